/* bind.c - finding tensors by name, with their types and shapes checked. */
#include "bind.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_quant.h"
#include "../../vendor/core/te_types.h"

/* Vectors are copied: whatever their type and alignment in the file, the engine sees aligned floats. */
struct pi_vector {
    struct pi_vector *next;
    _Alignas(void *) float data[];
};

/* Memory that the model keeps until it is closed; NULL: there is none. */
static void *keep(pi_model *m, size_t n_bytes) {
    struct pi_vector *b = malloc(pi_add(sizeof *b, n_bytes));
    if (!b) return NULL;
    b->next = m->vectors;
    m->vectors = b;
    return b->data;
}

pi_name pi_name_of(const char *format, ...) {
    pi_name n;
    va_list args;
    va_start(args, format);
    vsnprintf(n.text, sizeof n.text, format, args);
    va_end(args);
    return n;
}

pi_name pi_name_in_file(const pi_model *m, pi_name name) {
    static const char first[] = "blk.0.";
    const size_t n = sizeof first - 1;
    if (!m->first_layer || strncmp(name.text, first, n) != 0) return name;
    return pi_name_of("blk.%d.%s", m->first_layer, name.text + n);
}

bool pi_bind_has(const pi_model *m, pi_name name) {
    return te_gguf_find_tensor(m->file->gguf, pi_name_in_file(m, name).text) != NULL;
}

const te_gguf_tensor *pi_bind_take(pi_model *m, const char *name) {
    const te_gguf *g = m->file->gguf;
    const te_gguf_tensor *t = te_gguf_find_tensor(g, name);
    if (t) m->bound[t - te_gguf_tensor_at(g, 0)] = true;
    return t;
}

static bool is_of_layer(int32_t i, te_str name) {
    const pi_name layer = pi_name_of("blk.%d.", i);
    const size_t n = strlen(layer.text);
    return name.n > n && memcmp(name.p, layer.text, n) == 0;
}

/* Whether a tensor belongs to a layer that guesses at further tokens, of those behind the others, and this is not such a
 * layer; or to anything else, if it is. Nothing of it is read or checked: answers do not need it. */
static bool is_unused(const pi_model *m, te_str name) {
    if (m->first_layer) return !is_of_layer(m->first_layer, name);
    for (int32_t i = 0; i < m->n_unused_layers; i++)
        if (is_of_layer(m->info.n_layer + i, name)) return true;
    return false;
}

pi_status pi_bind_check_all(const pi_model *m) {
    const te_gguf *g = m->file->gguf;
    for (int64_t i = 0; i < te_gguf_n_tensors(g); i++) {
        const te_str name = te_gguf_tensor_at(g, i)->name;
        if (!m->bound[i] && !is_unused(m, name))
            return PI_FAIL(PI_ERROR_UNSUPPORTED, "the file has a tensor %.*s, which a %s model of %d layers does not",
                           (int)name.n, name.p, m->arch->name, m->info.n_layer);
    }
    return PI_OK;
}

/* The tensor of a name if it can be computed with; an absent one is an error unless optional, then *out is NULL. */
static pi_status find(pi_model *m, const char *name, bool optional, const te_gguf_tensor **out) {
    *out = pi_bind_take(m, name);
    if (!*out) return optional ? PI_OK : PI_FAIL(PI_ERROR_FORMAT, "the file has no tensor %s", name);
    return PI_OK;
}

static pi_status check_type(const te_gguf_tensor *t, const char *name) {
    if (te_can_dequantize(t->type)) return PI_OK;
    return PI_FAIL(PI_ERROR_UNSUPPORTED, "tensor %s has type %s, which cannot be computed with", name,
                   te_type_get(t->type)->name);
}

static te_mat keep_mat(pi_model *m, const te_gguf_tensor *t) {
    m->info.n_weight_bytes += t->n_bytes;
    m->info.n_parameters += (uint64_t)t->ne[0] * (uint64_t)t->ne[1] * (uint64_t)t->ne[2];
    return (te_mat){.w = t->data,
                    .stride = te_row_bytes(t->type, t->ne[0]),
                    .type = t->type,
                    .cols = (int32_t)t->ne[0],
                    .n_rows = (int32_t)(t->ne[1] * t->ne[2])};
}

pi_status pi_bind_mat(pi_model *m, pi_name name, int32_t rows, int32_t cols, bool optional, te_mat *mat) {
    name = pi_name_in_file(m, name);
    const te_gguf_tensor *t;
    *mat = (te_mat){0};
    PI_TRY(find(m, name.text, optional, &t));
    if (!t) return PI_OK;
    PI_TRY(check_type(t, name.text));
    if (t->n_dims != 2 || (rows && t->ne[1] != rows) || (cols && t->ne[0] != cols) || t->ne[0] > INT_MAX ||
        t->ne[1] > INT_MAX)
        return PI_FAIL(PI_ERROR_FORMAT, "tensor %s has %d dimensions {%lld, %lld}, expected {%d, %d}%s", name.text,
                       t->n_dims, (long long)t->ne[0], (long long)t->ne[1], cols, rows,
                       !rows || !cols ? " (0: any)" : "");
    *mat = keep_mat(m, t);
    return PI_OK;
}

pi_status pi_bind_mats(pi_model *m, pi_name name, int32_t n, int32_t rows, int32_t cols, te_mat *mat) {
    name = pi_name_in_file(m, name);
    const te_gguf_tensor *t;
    *mat = (te_mat){0};
    PI_TRY(find(m, name.text, false, &t));
    PI_TRY(check_type(t, name.text));
    if (t->n_dims != 3 || t->ne[0] != cols || t->ne[1] != rows || t->ne[2] != n || (int64_t)n * rows > INT_MAX)
        return PI_FAIL(PI_ERROR_FORMAT, "tensor %s has %d dimensions {%lld, %lld, %lld}, expected {%d, %d, %d}",
                       name.text, t->n_dims, (long long)t->ne[0], (long long)t->ne[1], (long long)t->ne[2], cols, rows,
                       n);
    *mat = keep_mat(m, t);
    return PI_OK;
}

/* All of a tensor as floats; its n weights are in the file. */
static pi_status keep_floats(pi_model *m, const te_gguf_tensor *t, const char *name, int64_t n, const float **out) {
    PI_TRY(check_type(t, name));
    float *values = keep(m, pi_mul(sizeof *values, (size_t)n));
    if (!values) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for tensor %s (%lld floats)", name, (long long)n);
    te_dequantize_row(t->type, t->data, values, n);
    *out = values;
    m->info.n_weight_bytes += t->n_bytes;
    m->info.n_parameters += (uint64_t)n;
    return PI_OK;
}

pi_status pi_bind_vec(pi_model *m, pi_name name, int32_t n, bool optional, const float **out) {
    name = pi_name_in_file(m, name);
    *out = NULL;
    const te_gguf_tensor *t;
    PI_TRY(find(m, name.text, optional, &t));
    if (!t) return PI_OK;
    if (t->n_dims != 1 || t->ne[0] != n)
        return PI_FAIL(PI_ERROR_FORMAT, "tensor %s has %d dimensions {%lld, %lld}, expected {%d}", name.text, t->n_dims,
                       (long long)t->ne[0], (long long)t->ne[1], n);
    return keep_floats(m, t, name.text, n, out);
}

pi_status pi_bind_vecs(pi_model *m, pi_name name, int32_t n, int32_t cols, const float **out) {
    name = pi_name_in_file(m, name);
    *out = NULL;
    const te_gguf_tensor *t;
    PI_TRY(find(m, name.text, false, &t));
    if (t->n_dims != 2 || t->ne[0] != cols || t->ne[1] != n)
        return PI_FAIL(PI_ERROR_FORMAT, "tensor %s has %d dimensions {%lld, %lld}, expected {%d, %d}", name.text,
                       t->n_dims, (long long)t->ne[0], (long long)t->ne[1], cols, n);
    return keep_floats(m, t, name.text, (int64_t)n * cols, out);
}

pi_status pi_bind_values(pi_model *m, pi_name name, int32_t n, bool optional, const float **out) {
    name = pi_name_in_file(m, name);
    *out = NULL;
    const te_gguf_tensor *t;
    PI_TRY(find(m, name.text, optional, &t));
    if (!t) return PI_OK;
    if (t->n_dims > 2 || t->ne[0] > n || t->ne[1] > n || t->ne[0] * t->ne[1] != n)
        return PI_FAIL(PI_ERROR_FORMAT, "tensor %s has %d dimensions {%lld, %lld}, expected %d values", name.text,
                       t->n_dims, (long long)t->ne[0], (long long)t->ne[1], n);
    return keep_floats(m, t, name.text, n, out);
}

pi_status pi_bind_room(pi_model *m, int64_t n, float **out) {
    *out = keep(m, pi_mul(sizeof **out, (size_t)n));
    return *out ? PI_OK : PI_FAIL(PI_ERROR_MEMORY, "out of memory for %lld floats", (long long)n);
}

pi_status pi_bind_constant(pi_model *m, int32_t n, float value, const float **out) {
    float *values;
    PI_TRY(pi_bind_room(m, n, &values));
    for (int32_t i = 0; i < n; i++) values[i] = value;
    *out = values;
    return PI_OK;
}

pi_status pi_bind_parts(pi_model *m, int32_t n, const void ***out) {
    *out = keep(m, pi_mul(sizeof **out, (size_t)n));
    return *out ? PI_OK : PI_FAIL(PI_ERROR_MEMORY, "out of memory for the places of %d matrices", n);
}

pi_status pi_bind_ffn_norm(pi_model *m, int32_t i, pi_norm *out) {
    if (m->arch->no_pre_norm) return PI_OK;
    if (m->arch->bare_ffn_norm && pi_bind_has(m, pi_name_of("blk.%d.ffn_norm", i)))
        return pi_bind_vec(m, pi_name_of("blk.%d.ffn_norm", i), m->info.n_embd, false, &out->w);
    if (m->arch->one_block) return pi_bind_norm(m, pi_name_of("blk.%d.attn_norm", i).text, false, out);
    const char *name = m->arch->post_ffn_norm ? "post_attention_norm" : "ffn_norm";
    return pi_bind_norm(m, pi_name_of("blk.%d.%s", i, name).text, false, out);
}

pi_status pi_bind_norm(pi_model *m, const char *prefix, bool optional, pi_norm *out) {
    *out = (pi_norm){NULL, NULL};
    PI_TRY(pi_bind_vec(m, pi_name_of("%s.weight", prefix), m->info.n_embd, optional, &out->w));
    if (out->w && m->arch->no_norm_bias) return pi_bind_constant(m, m->info.n_embd, 0, &out->b);
    if (out->w && m->arch->layer_norm)
        PI_TRY(pi_bind_vec(m, pi_name_of("%s.bias", prefix), m->info.n_embd, false, &out->b));
    return PI_OK;
}

void pi_bind_free_vectors(pi_model *m) {
    while (m->vectors) {
        struct pi_vector *next = m->vectors->next;
        free(m->vectors);
        m->vectors = next;
    }
}
