/* keys.c - typed reading of architecture keys. */
#include "keys.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct key_name {
    char text[128];
} key_name;

static key_name full_name(const char *arch, const char *name) {
    key_name k;
    snprintf(k.text, sizeof k.text, "%s.%s", arch, name); /* both come from this library's own tables */
    return k;
}

pi_status pi_key_i64(const te_gguf *g, const char *arch, const char *name, int64_t lo, int64_t hi, int64_t *out,
                     bool *found) {
    const key_name k = full_name(arch, name);
    return (pi_status)te_gguf_get_i64(g, k.text, lo, hi, out, found);
}

pi_status pi_key_f32(const te_gguf *g, const char *arch, const char *name, float *out, bool *found) {
    const key_name k = full_name(arch, name);
    return (pi_status)te_gguf_get_f32(g, k.text, out, found);
}

pi_status pi_key_bool(const te_gguf *g, const char *arch, const char *name, bool *out) {
    const key_name k = full_name(arch, name);
    return (pi_status)te_gguf_get_bool(g, k.text, out, NULL);
}

pi_status pi_key_str(const te_gguf *g, const char *arch, const char *name, te_str *out, bool *found) {
    const key_name k = full_name(arch, name);
    return (pi_status)te_gguf_get_str(g, k.text, out, found);
}

pi_status pi_key_each(const te_gguf *g, const char *arch, const char *name, int32_t n, int32_t lo, int32_t hi,
                      int32_t *out, bool *found) {
    const key_name k = full_name(arch, name);
    const te_kv *kv = te_gguf_find(g, k.text);
    if (found) *found = kv != NULL;
    if (!kv) return PI_OK;
    if (kv->type != TE_KV_ARRAY) {
        int64_t one = 0;
        PI_TRY(te_gguf_get_i64(g, k.text, lo, hi, &one, NULL));
        for (int32_t i = 0; i < n; i++) out[i] = (int32_t)one;
        return PI_OK;
    }
    const bool bytes = kv->element_type == TE_KV_BOOL || kv->element_type == TE_KV_U8,
               words = kv->element_type == TE_KV_I32 || kv->element_type == TE_KV_U32;
    if ((!bytes && !words) || kv->n != (uint64_t)n)
        return PI_FAIL(PI_ERROR_FORMAT, "%s must be a number, or an array of %d, one for each layer", k.text, n);
    for (int32_t i = 0; i < n; i++) {
        int32_t v = 0;
        if (bytes)
            v = ((const uint8_t *)kv->data)[i];
        else
            memcpy(&v, (const char *)kv->data + sizeof v * (size_t)i, sizeof v);
        if (v < lo || v > hi) return PI_FAIL(PI_ERROR_FORMAT, "%s[%d] is %d, must be %d to %d", k.text, i, v, lo, hi);
        out[i] = v;
    }
    return PI_OK;
}

pi_status pi_key_f32_of(const te_gguf *g, const char *arch, const char *name, int32_t n, int32_t i, float *out) {
    const key_name k = full_name(arch, name);
    const te_kv *kv = te_gguf_find(g, k.text);
    if (!kv) return PI_FAIL(PI_ERROR_FORMAT, "the file has no key %s", k.text);
    if (kv->type != TE_KV_ARRAY)
        PI_TRY(te_gguf_get_f32(g, k.text, out, NULL));
    else if (kv->element_type != TE_KV_F32 || kv->n != (uint64_t)n)
        return PI_FAIL(PI_ERROR_FORMAT, "%s must be a number, or an array of %d f32, one for each layer", k.text, n);
    else
        memcpy(out, (const char *)kv->data + sizeof *out * (size_t)i, sizeof *out);
    return isnan(*out) ? PI_FAIL(PI_ERROR_FORMAT, "%s of layer %d is not a number", k.text, i) : PI_OK;
}

pi_status pi_key_cap(const te_gguf *g, const char *arch, const char *name, float unsaid, float *out) {
    *out = unsaid;
    PI_TRY(pi_key_f32(g, arch, name, out, NULL));
    if (!(*out >= 0) || !isfinite(*out))
        return PI_FAIL(PI_ERROR_FORMAT, "%s.%s is %g, must be positive, or 0 for none", arch, name, (double)*out);
    return PI_OK;
}

pi_status pi_key_need_i32(const te_gguf *g, const char *arch, const char *name, int32_t lo, int32_t hi, int32_t *out) {
    int64_t v = 0;
    bool found = false;
    PI_TRY(pi_key_i64(g, arch, name, lo, hi, &v, &found));
    if (!found) return PI_FAIL(PI_ERROR_FORMAT, "the file has no key %s.%s", arch, name);
    *out = (int32_t)v;
    return PI_OK;
}
