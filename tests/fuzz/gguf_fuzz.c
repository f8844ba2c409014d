/* gguf_fuzz.c - libFuzzer entry for the GGUF reader: opens the bytes, walks all that a handle gives out, and closes it.
 *
 * Beyond what the sanitizers see, it traps when a promise of te_gguf.h is broken. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "te_gguf.h"
#include "te_types.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static volatile uint64_t sink;

static void must(bool promise) {
    if (!promise) __builtin_trap();
}

/* Reads every byte, and sees that they lie in the file. */
static void touch(const uint8_t *file, size_t n_file, const void *p, size_t n) {
    const uint8_t *bytes = p;
    uint64_t sum = 0;
    must(bytes >= file && n <= n_file && (size_t)(bytes - file) <= n_file - n);
    for (size_t i = 0; i < n; i++) sum += bytes[i];
    sink += sum;
}

/* A name as the C string that the find functions take. Names hold no zero byte. */
static char *string_of(te_str s) {
    char *copy = malloc(s.n + 1);
    must(copy != NULL && memchr(s.p, 0, s.n) == NULL);
    memcpy(copy, s.p, s.n);
    copy[s.n] = 0;
    return copy;
}

static void walk_key(const te_gguf *g, const uint8_t *file, size_t n_file, const te_kv *kv) {
    touch(file, n_file, kv->key.p, kv->key.n);
    touch(file, n_file, kv->data, kv->n_bytes);
    must(kv->type >= TE_KV_U8 && kv->type <= TE_KV_F64);
    must((kv->type == TE_KV_ARRAY) == (kv->element_type >= 0));
    if (kv->element_type == TE_KV_STRING) {
        const uint8_t *p = kv->data;
        for (uint64_t i = 0; i < kv->n; i++) {
            uint64_t length;
            memcpy(&length, p, sizeof length);
            p += sizeof length + length;
        }
        must(p == (const uint8_t *)kv->data + kv->n_bytes);
    }
    char *key = string_of(kv->key);
    int64_t integer = 5;
    float real = 0.5f;
    bool flag = true, found = false;
    te_str text = {NULL, 0};
    must(te_gguf_find(g, key) == kv);
    if (te_gguf_get_i64(g, key, -100, 100, &integer, &found) == TE_OK) must(found && integer >= -100 && integer <= 100);
    must(te_gguf_get_f32(g, key, &real, NULL) != TE_OK || kv->type == TE_KV_F32 || kv->type == TE_KV_F64);
    must(te_gguf_get_bool(g, key, &flag, &found) != TE_OK || kv->type == TE_KV_BOOL);
    if (te_gguf_get_str(g, key, &text, &found) == TE_OK) touch(file, n_file, text.p, text.n);
    free(key);
}

static void walk_tensor(const te_gguf *g, const uint8_t *file, size_t n_file, const te_gguf_tensor *t) {
    const te_type_info *info = te_type_get(t->type);
    int64_t n_rows = 1;
    must(info != NULL && t->n_dims >= 1 && t->n_dims <= 4 && t->part == 0);
    for (int32_t i = 0; i < 4; i++) must(t->ne[i] >= 1 && (i < t->n_dims || t->ne[i] == 1));
    for (int32_t i = 1; i < 4; i++) n_rows *= t->ne[i];
    must(t->ne[0] % info->block_weights == 0 && t->n_bytes == te_row_bytes(t->type, t->ne[0]) * (size_t)n_rows);
    must(((size_t)((const uint8_t *)t->data - file) & 7) == 0);
    touch(file, n_file, t->data, t->n_bytes);
    touch(file, n_file, t->name.p, t->name.n);
    char *name = string_of(t->name);
    must(te_gguf_find_tensor(g, name) == t);
    free(name);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    te_gguf *g = NULL;
    if (te_gguf_open_memory(data, n_bytes, &g) != TE_OK) {
        must(g == NULL && te_last_error()[0] != 0);
        return 0;
    }
    size_t n_mapped;
    must(te_gguf_mapping(g, 0, &n_mapped) == data && n_mapped == n_bytes && te_gguf_n_bytes(g) == n_bytes);
    must(te_gguf_version(g) == 2 || te_gguf_version(g) == 3);
    must(te_gguf_is_powerinfer(g) == (data[0] == 'P') && te_gguf_n_parts(g) == 1);
    for (int64_t i = 0; i < te_gguf_n_kv(g); i++) walk_key(g, data, n_bytes, te_gguf_kv_at(g, i));
    for (int64_t i = 0; i < te_gguf_n_tensors(g); i++) walk_tensor(g, data, n_bytes, te_gguf_tensor_at(g, i));
    te_gguf_close(g);
    return 0;
}
