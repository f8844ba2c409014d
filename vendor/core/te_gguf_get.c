/* te_gguf_get.c - typed reading of single values. */
#include "te_gguf_part.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static const char *const type_names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                         "bool", "string", "array", "u64", "i64", "f64"};

bool te_str_is(te_str s, const char *text) { return s.n == strlen(text) && (!s.n || !memcmp(s.p, text, s.n)); }

const te_kv *te_gguf_part_find(const te_gguf_part *p, const char *key) {
    return te_gguf_index_find(&p->kv_index, (te_str){key, strlen(key)});
}

static te_status wrong_type(const te_gguf_part *p, const te_kv *kv, const char *wanted) {
    char key[TE_GGUF_QUOTED];
    te_gguf_quote(kv->key, key);
    return te_fail(TE_FORMAT, "%s: key '%s' has the type %s, not %s", p->label, key, type_names[kv->type], wanted);
}

/* An integer of any width: its value, or *too_large when it is above INT64_MAX. False if it is no integer. */
static bool integer(const te_kv *kv, int64_t *value, bool *too_large) {
    union {
        uint8_t u8;
        uint16_t u16;
        int16_t i16;
        uint32_t u32;
        int32_t i32;
        uint64_t u64;
        int64_t i64;
    } v;
    if (kv->n_bytes > sizeof v) return false;
    memcpy(&v, kv->data, kv->n_bytes);
    switch (kv->type) {
    case TE_KV_U8:
        *value = v.u8;
        return true;
    case TE_KV_I8:
        *value = v.u8 < 128 ? v.u8 : v.u8 - 256;
        return true;
    case TE_KV_U16:
        *value = v.u16;
        return true;
    case TE_KV_I16:
        *value = v.i16;
        return true;
    case TE_KV_U32:
        *value = v.u32;
        return true;
    case TE_KV_I32:
        *value = v.i32;
        return true;
    case TE_KV_I64:
        *value = v.i64;
        return true;
    case TE_KV_U64:
        *too_large = v.u64 > INT64_MAX;
        *value = *too_large ? INT64_MAX : (int64_t)v.u64;
        return true;
    default:
        return false;
    }
}

te_status te_gguf_part_i64(const te_gguf_part *p, const char *key, int64_t lo, int64_t hi, int64_t *out, bool *found) {
    const te_kv *kv = te_gguf_part_find(p, key);
    int64_t value = 0;
    bool too_large = false;
    if (found != NULL) *found = kv != NULL;
    if (kv == NULL) return TE_OK;
    if (!integer(kv, &value, &too_large)) return wrong_type(p, kv, "an integer");
    if (too_large || value < lo || value > hi) {
        return te_fail(TE_FORMAT, "%s: key '%s' is %s%" PRId64 "; %" PRId64 " to %" PRId64 " are possible", p->label,
                       key, too_large ? "above " : "", value, lo, hi);
    }
    *out = value;
    return TE_OK;
}

te_status te_gguf_get_i64(const te_gguf *g, const char *key, int64_t lo, int64_t hi, int64_t *out, bool *found) {
    return te_gguf_part_i64(te_gguf_first_part(g), key, lo, hi, out, found);
}

te_status te_gguf_get_f32(const te_gguf *g, const char *key, float *out, bool *found) {
    const te_kv *kv = te_gguf_find(g, key);
    double wide;
    if (found != NULL) *found = kv != NULL;
    if (kv == NULL) return TE_OK;
    if (kv->type == TE_KV_F32) {
        memcpy(out, kv->data, sizeof *out);
        return TE_OK;
    }
    if (kv->type != TE_KV_F64) return wrong_type(te_gguf_first_part(g), kv, "a float");
    memcpy(&wide, kv->data, sizeof wide);
    const float narrow = (float)wide;
    if (isinf(narrow) && !isinf(wide)) {
        return te_fail(TE_FORMAT, "%s: key '%s' is %g, which no 32-bit float can hold", te_gguf_first_part(g)->label,
                       key, wide);
    }
    *out = narrow;
    return TE_OK;
}

te_status te_gguf_get_bool(const te_gguf *g, const char *key, bool *out, bool *found) {
    const te_kv *kv = te_gguf_find(g, key);
    if (found != NULL) *found = kv != NULL;
    if (kv == NULL) return TE_OK;
    if (kv->type != TE_KV_BOOL) return wrong_type(te_gguf_first_part(g), kv, "a bool");
    *out = *(const uint8_t *)kv->data == 1;
    return TE_OK;
}

te_status te_gguf_get_str(const te_gguf *g, const char *key, te_str *out, bool *found) {
    const te_kv *kv = te_gguf_find(g, key);
    if (found != NULL) *found = kv != NULL;
    if (kv == NULL) return TE_OK;
    if (kv->type != TE_KV_STRING) return wrong_type(te_gguf_first_part(g), kv, "a string");
    *out = (te_str){kv->data, kv->n_bytes};
    return TE_OK;
}
