/* file.c - pi_file: metadata and tensors of a GGUF file. */
#include "file.h"

#include <stdlib.h>

#include "../../vendor/core/te_quant.h"
#include "../../vendor/core/te_types.h"

pi_status pi_file_open(const char *path, pi_file **out) {
    if (!out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_file_open: out is NULL");
    *out = NULL;
    if (!path || !*path) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_file_open: the path is empty");
    pi_file *f = calloc(1, sizeof *f);
    if (!f) return PI_FAIL(PI_ERROR_MEMORY, "out of memory opening %s", path);
    f->ref.n = 1;
    const te_status s = te_gguf_open(path, &f->gguf);
    if (s != TE_OK) {
        free(f);
        return (pi_status)s;
    }
    *out = f;
    return PI_OK;
}

void pi_file_close(pi_file *f) {
    if (!f || !pi_ref_drop(&f->ref)) return;
    te_gguf_close(f->gguf);
    free(f);
}

void pi_file_get_info(const pi_file *f, pi_file_info *out) {
    if (!out) return;
    *out = (pi_file_info){0};
    if (!f) return;
    out->version = te_gguf_version(f->gguf);
    out->is_powerinfer = te_gguf_is_powerinfer(f->gguf);
    out->n_parts = te_gguf_n_parts(f->gguf);
    out->n_meta = te_gguf_n_kv(f->gguf);
    out->n_tensors = te_gguf_n_tensors(f->gguf);
    out->n_bytes = te_gguf_n_bytes(f->gguf);
}

pi_status pi_file_meta(const pi_file *f, int64_t index, pi_meta *out) {
    if (!f || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_file_meta: file or out is NULL");
    const int64_t n = te_gguf_n_kv(f->gguf);
    if (index < 0 || index >= n)
        return PI_FAIL(PI_ERROR_ARGUMENT, "metadata index %lld is out of range 0..%lld", (long long)index,
                       (long long)n - 1);
    const te_kv *kv = te_gguf_kv_at(f->gguf, index);
    *out = (pi_meta){.key = kv->key.p,
                     .key_bytes = kv->key.n,
                     .type = kv->type,
                     .element_type = kv->element_type,
                     .n = kv->n,
                     .data = kv->data,
                     .n_bytes = kv->n_bytes};
    return PI_OK;
}

int64_t pi_file_find_meta(const pi_file *f, const char *key) {
    const te_kv *kv = f && key ? te_gguf_find(f->gguf, key) : NULL;
    return kv ? kv - te_gguf_kv_at(f->gguf, 0) : -1;
}

pi_status pi_file_tensor(const pi_file *f, int64_t index, pi_tensor *out) {
    if (!f || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_file_tensor: file or out is NULL");
    const int64_t n = te_gguf_n_tensors(f->gguf);
    if (index < 0 || index >= n)
        return PI_FAIL(PI_ERROR_ARGUMENT, "tensor index %lld is out of range 0..%lld", (long long)index,
                       (long long)n - 1);
    const te_gguf_tensor *t = te_gguf_tensor_at(f->gguf, index);
    *out = (pi_tensor){.name = t->name.p,
                       .name_bytes = t->name.n,
                       .type_name = te_type_get(t->type)->name,
                       .type = t->type,
                       .n_dims = t->n_dims,
                       .ne = {t->ne[0], t->ne[1], t->ne[2], t->ne[3]},
                       .data = t->data,
                       .n_bytes = t->n_bytes};
    return PI_OK;
}

pi_status pi_file_dequantize(const pi_file *f, int64_t index, int64_t first, int64_t n, float *out) {
    pi_tensor t;
    if (!out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_file_dequantize: out is NULL");
    PI_TRY(pi_file_tensor(f, index, &t));
    const te_type_info *type = te_type_get(t.type);
    const int64_t total = t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3], block = type->block_weights;
    if (!te_can_dequantize(t.type))
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "tensor %.*s has type %s, which cannot be dequantised", (int)t.name_bytes,
                       t.name, type->name);
    if (first < 0 || n < 0 || first > total || n > total - first || first % block || n % block)
        return PI_FAIL(PI_ERROR_ARGUMENT,
                       "%lld elements from %lld are not a run of whole blocks (of %lld) of a tensor of %lld",
                       (long long)n, (long long)first, (long long)block, (long long)total);
    te_dequantize_row(t.type, (const char *)t.data + te_row_bytes(t.type, first), out, n);
    return PI_OK;
}
