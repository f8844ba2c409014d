/* bind.c - finds a model's tensors by name and checks their types and shapes, so that a wrong file fails here and
 * by name. */
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_os.h"
#include "../../vendor/core/te_quant.h"
#include "../../vendor/core/te_types.h"
#include "model.h"

/* Vectors are copied: whatever their type and alignment in the file, the engine sees aligned floats. */
struct pi_block {
    struct pi_block *next;
    float data[];
};

enum { MAX_NAME = 96 };
typedef struct tensor_name {
    char text[MAX_NAME];
} tensor_name;

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
static tensor_name name_of(const char *format, ...) {
    tensor_name n;
    va_list args;
    va_start(args, format);
    vsnprintf(n.text, sizeof n.text, format, args);
    va_end(args);
    return n;
}

static const te_gguf_tensor *take_tensor(pi_model *m, const char *name) {
    const te_gguf *g = m->file->gguf;
    const te_gguf_tensor *t = te_gguf_find_tensor(g, name);
    if (t) m->bound[t - te_gguf_tensor_at(g, 0)] = true;
    return t;
}

/* A tensor that nobody asked for is a part of the model that would not be computed: the answers would be wrong. */
static pi_status check_all_bound(const pi_model *m) {
    const te_gguf *g = m->file->gguf;
    for (int64_t i = 0; i < te_gguf_n_tensors(g); i++) {
        const te_str name = te_gguf_tensor_at(g, i)->name;
        if (!m->bound[i])
            return PI_FAIL(PI_ERROR_UNSUPPORTED, "the file has a tensor %.*s, which a %s model of %d layers does not",
                           (int)name.n, name.p, m->arch->name, m->info.n_layer);
    }
    return PI_OK;
}

/* cols 0: any (fc1's and fc2's rank). An absent tensor is an error unless optional, then mat->w stays NULL. */
static pi_status bind_mat(pi_model *m, tensor_name name, int32_t rows, int32_t cols, bool optional, te_mat *mat) {
    *mat = (te_mat){0};
    const te_gguf_tensor *t = take_tensor(m, name.text);
    if (!t) return optional ? PI_OK : PI_FAIL(PI_ERROR_FORMAT, "the file has no tensor %s", name.text);
    const te_type_info *type = te_type_get(t->type);
    if (!te_can_dequantize(t->type))
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "tensor %s has type %s, which cannot be computed with", name.text,
                       type->name);
    if (t->n_dims != 2 || (rows && t->ne[1] != rows) || (cols && t->ne[0] != cols) || t->ne[0] > INT_MAX ||
        t->ne[1] > INT_MAX)
        return PI_FAIL(PI_ERROR_FORMAT, "tensor %s has %d dimensions {%lld, %lld}, expected {%d, %d}%s", name.text,
                       t->n_dims, (long long)t->ne[0], (long long)t->ne[1], cols, rows,
                       !rows || !cols ? " (0: any)" : "");
    *mat = (te_mat){.w = t->data,
                    .stride = te_row_bytes(t->type, t->ne[0]),
                    .type = t->type,
                    .cols = (int32_t)t->ne[0],
                    .n_rows = (int32_t)t->ne[1]};
    m->info.n_weight_bytes += t->n_bytes;
    m->info.n_parameters += (uint64_t)t->ne[0] * (uint64_t)t->ne[1];
    return PI_OK;
}

static pi_status bind_vec(pi_model *m, tensor_name name, int32_t n, bool optional, const float **out) {
    *out = NULL;
    const te_gguf_tensor *t = take_tensor(m, name.text);
    if (!t) return optional ? PI_OK : PI_FAIL(PI_ERROR_FORMAT, "the file has no tensor %s", name.text);
    const te_type_info *type = te_type_get(t->type);
    if (t->n_dims != 1 || t->ne[0] != n)
        return PI_FAIL(PI_ERROR_FORMAT, "tensor %s has %d dimensions {%lld, %lld}, expected {%d}", name.text, t->n_dims,
                       (long long)t->ne[0], (long long)t->ne[1], n);
    if (!te_can_dequantize(t->type))
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "tensor %s has type %s, which cannot be computed with", name.text,
                       type->name);
    struct pi_block *b = malloc(sizeof *b + sizeof(float) * (size_t)n);
    if (!b) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for tensor %s (%d floats)", name.text, n);
    te_dequantize_row(t->type, t->data, b->data, n);
    b->next = m->vectors;
    m->vectors = b;
    *out = b->data;
    m->info.n_weight_bytes += t->n_bytes;
    m->info.n_parameters += (uint64_t)n;
    return PI_OK;
}

/* A norm's weight and, for LayerNorm, its bias. */
static pi_status bind_norm(pi_model *m, const char *prefix, bool optional, const float **w, const float **b) {
    *b = NULL;
    PI_TRY(bind_vec(m, name_of("%s.weight", prefix), m->info.n_embd, optional, w));
    if (*w && m->arch->layer_norm) PI_TRY(bind_vec(m, name_of("%s.bias", prefix), m->info.n_embd, false, b));
    return PI_OK;
}

static pi_status bind_attention(pi_model *m, int32_t i, pi_layer *l) {
    const pi_model_info *c = &m->info;
    const pi_arch *a = m->arch;
    const int32_t n_q = c->n_head * c->n_embd_head, n_kv = c->n_head_kv * c->n_embd_head;
    PI_TRY(bind_norm(m, name_of("blk.%d.attn_norm", i).text, false, &l->attn_norm, &l->attn_norm_b));
    if (a->parallel)
        PI_TRY(bind_norm(m, name_of("blk.%d.attn_norm_2", i).text, true, &l->attn_norm2, &l->attn_norm2_b));
    if (a->fused_qkv) {
        te_mat qkv;
        PI_TRY(bind_mat(m, name_of("blk.%d.attn_qkv.weight", i), n_q + 2 * n_kv, c->n_embd, false, &qkv));
        l->q = l->k = l->v = qkv;
        l->q.n_rows = n_q;
        l->k.n_rows = l->v.n_rows = n_kv;
        l->k.w = (const char *)qkv.w + qkv.stride * (size_t)n_q;
        l->v.w = (const char *)l->k.w + qkv.stride * (size_t)n_kv;
    } else {
        PI_TRY(bind_mat(m, name_of("blk.%d.attn_q.weight", i), n_q, c->n_embd, false, &l->q));
        PI_TRY(bind_mat(m, name_of("blk.%d.attn_k.weight", i), n_kv, c->n_embd, false, &l->k));
        PI_TRY(bind_mat(m, name_of("blk.%d.attn_v.weight", i), n_kv, c->n_embd, false, &l->v));
        const bool optional = !a->bias && !a->qkv_bias;
        PI_TRY(bind_vec(m, name_of("blk.%d.attn_q.bias", i), n_q, optional, &l->q_b));
        PI_TRY(bind_vec(m, name_of("blk.%d.attn_k.bias", i), n_kv, optional, &l->k_b));
        PI_TRY(bind_vec(m, name_of("blk.%d.attn_v.bias", i), n_kv, optional, &l->v_b));
    }
    PI_TRY(bind_mat(m, name_of("blk.%d.attn_output.weight", i), c->n_embd, n_q, false, &l->o));
    PI_TRY(bind_vec(m, name_of("blk.%d.attn_output.bias", i), c->n_embd, !a->bias, &l->o_b));
    if (a->qk_norm) {
        PI_TRY(bind_vec(m, name_of("blk.%d.attn_q_norm.weight", i), c->n_embd_head, false, &l->q_norm));
        PI_TRY(bind_vec(m, name_of("blk.%d.attn_k_norm.weight", i), c->n_embd_head, false, &l->k_norm));
    }
    l->attn_bytes = (int64_t)(l->q.stride * (size_t)n_q + l->k.stride * (size_t)n_kv + l->v.stride * (size_t)n_kv +
                              l->o.stride * (size_t)c->n_embd);
    return PI_OK;
}

static pi_status bind_ffn(pi_model *m, int32_t i, pi_layer *l) {
    const pi_model_info *c = &m->info;
    const pi_arch *a = m->arch;
    if (!a->parallel) PI_TRY(bind_norm(m, name_of("blk.%d.ffn_norm", i).text, false, &l->ffn_norm, &l->ffn_norm_b));
    if (a->gated) PI_TRY(bind_mat(m, name_of("blk.%d.ffn_gate.weight", i), c->n_ff, c->n_embd, false, &l->gate));
    PI_TRY(bind_mat(m, name_of("blk.%d.ffn_up.weight", i), c->n_ff, c->n_embd, false, &l->up));
    PI_TRY(bind_mat(m, name_of("blk.%d.ffn_down_t.weight", i), c->n_ff, c->n_embd, true, &l->down_t));
    if (!l->down_t.w) {
        const tensor_name n = name_of("blk.%d.ffn_down.weight", i);
        if (!te_gguf_find_tensor(m->file->gguf, n.text))
            return PI_FAIL(PI_ERROR_FORMAT, "the file has neither tensor blk.%d.ffn_down_t.weight nor %s", i, n.text);
        PI_TRY(bind_mat(m, n, c->n_embd, c->n_ff, false, &l->down));
    }
    /* The fused operator has no place for biases of a gated layer's gate and up. */
    if (!a->gated) PI_TRY(bind_vec(m, name_of("blk.%d.ffn_up.bias", i), c->n_ff, !a->bias, &l->up_b));
    PI_TRY(bind_vec(m, name_of("blk.%d.ffn_down%s.bias", i, l->down_t.w ? "_t" : ""), c->n_embd, !a->bias, &l->down_b));
    PI_TRY(bind_mat(m, name_of("blk.%d.fc1.weight", i), 0, c->n_embd, true, &l->fc1));
    if (!l->fc1.w) {
        if (te_gguf_is_powerinfer(m->file->gguf))
            return PI_FAIL(PI_ERROR_FORMAT,
                           "the file has no tensor blk.%d.fc1.weight, the predictor of a PowerInfer model", i);
        return PI_OK;
    }
    PI_TRY(bind_mat(m, name_of("blk.%d.fc2.weight", i), c->n_ff, l->fc1.n_rows, false, &l->fc2));
    if (l->fc1.n_rows > m->max_rank) m->max_rank = l->fc1.n_rows;
    const te_type_info *type = m->options.predictor_type < 0 ? NULL : te_type_get(m->options.predictor_type);
    if (type && (c->n_embd % type->block_weights || l->fc1.n_rows % type->block_weights))
        return PI_FAIL(PI_ERROR_ARGUMENT,
                       "the predictor of layer %d (rank %d, width %d) cannot be %s, which has blocks of %d", i,
                       l->fc1.n_rows, c->n_embd, type->name, type->block_weights);
    return PI_OK;
}

/* Which predictor is used: as asked for, else as the file says, else its own matrices. */
static pi_status choose_predictor(pi_model *m, bool has_mlp) {
    const te_gguf *g = m->file->gguf;
    const int32_t asked = m->options.predictor;
    te_str text = {NULL, 0};
    bool found = false;
    int32_t kind = has_mlp ? PI_PREDICTOR_MLP : PI_PREDICTOR_NONE;
    PI_TRY(te_gguf_get_str(g, "powerinfer.predictor", &text, &found));
    if (found) {
        const bool sign = text.n == 4 && memcmp(text.p, "sign", 4) == 0;
        if (!sign && !(text.n == 3 && memcmp(text.p, "mlp", 3) == 0))
            return PI_FAIL(PI_ERROR_UNSUPPORTED, "powerinfer.predictor is \"%.*s\"; mlp and sign are known",
                           (int)(text.n < 40 ? text.n : 40), text.p);
        kind = sign ? PI_PREDICTOR_SIGN : PI_PREDICTOR_MLP;
    }
    if (asked != PI_PREDICTOR_AUTO) kind = asked;
    const pi_status error = asked != PI_PREDICTOR_AUTO ? PI_ERROR_ARGUMENT : PI_ERROR_FORMAT;
    if (kind == PI_PREDICTOR_MLP && !has_mlp)
        return PI_FAIL(error, "the predictor is to be an MLP, but the file has no fc1 and fc2");
    if (kind == PI_PREDICTOR_SIGN && !pi_is_relu(m->info.activation))
        return PI_FAIL(error, "a sign predictor needs a ReLU model; no neuron of this one is ever silent");
    if (m->options.predictor_type >= 0 && !has_mlp)
        return PI_FAIL(PI_ERROR_ARGUMENT, "a format for the predictor was given (%s), but the file has no fc1 and fc2",
                       te_type_get(m->options.predictor_type)->name);
    m->info.predictor = kind;
    if (kind == PI_PREDICTOR_SIGN) m->sign_words = (m->info.n_embd + 63) / 64;
    return PI_OK;
}

/* Thresholds of the layers: one of each, or one for all. */
static pi_status read_thresholds(pi_model *m) {
    const te_gguf *g = m->file->gguf;
    const char *name = "powerinfer.sparse_thresholds";
    float all = 0;
    PI_TRY(te_gguf_get_f32(g, "powerinfer.sparse_threshold", &all, NULL));
    if (isnan(all)) return PI_FAIL(PI_ERROR_FORMAT, "powerinfer.sparse_threshold is not a number");
    for (int32_t i = 0; i < m->info.n_layer; i++) m->layer[i].threshold = all;
    const te_kv *each = te_gguf_find(g, name);
    if (each) {
        if (each->type != TE_KV_ARRAY || each->element_type != TE_KV_F32 || each->n != (uint64_t)m->info.n_layer)
            return PI_FAIL(PI_ERROR_FORMAT, "%s must be an array of %d f32, one for each layer", name, m->info.n_layer);
        for (int32_t i = 0; i < m->info.n_layer; i++) {
            memcpy(&m->layer[i].threshold, (const char *)each->data + sizeof(float) * (size_t)i, sizeof(float));
            if (isnan(m->layer[i].threshold)) return PI_FAIL(PI_ERROR_FORMAT, "%s[%d] is not a number", name, i);
        }
    }
    m->info.sparse_threshold = m->layer[0].threshold;
    for (int32_t i = 1; i < m->info.n_layer; i++)
        if (m->layer[i].threshold < m->info.sparse_threshold) m->info.sparse_threshold = m->layer[i].threshold;
    return PI_OK;
}

static pi_status bind_all(pi_model *m) {
    const pi_model_info *c = &m->info;
    if (m->rope.kind != PI_ROPE_NONE) take_tensor(m, "rope_freqs.weight"); /* rope.c reads it */
    PI_TRY(bind_mat(m, name_of("token_embd.weight"), c->n_vocab, c->n_embd, false, &m->token_embd));
    if (m->arch->learned_pos)
        PI_TRY(bind_mat(m, name_of("position_embd.weight"), c->n_ctx_train + 2, c->n_embd, false, &m->position_embd));
    PI_TRY(bind_norm(m, "output_norm", false, &m->output_norm, &m->output_norm_b));
    PI_TRY(bind_mat(m, name_of("output.weight"), c->n_vocab, c->n_embd, true, &m->output));
    if (!m->output.w) m->output = m->token_embd;
    m->layer = calloc((size_t)c->n_layer, sizeof *m->layer);
    if (!m->layer) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d layers", c->n_layer);
    int32_t n_predictors = 0, n_down_t = 0;
    for (int32_t i = 0; i < c->n_layer; i++) {
        PI_TRY(bind_attention(m, i, &m->layer[i]));
        PI_TRY(bind_ffn(m, i, &m->layer[i]));
        n_predictors += m->layer[i].fc1.w != NULL;
        n_down_t += m->layer[i].down_t.w != NULL;
    }
    if (n_predictors && n_predictors != c->n_layer)
        return PI_FAIL(PI_ERROR_FORMAT, "%d of %d layers have a predictor (fc1, fc2); all or none must", n_predictors,
                       c->n_layer);
    PI_TRY(choose_predictor(m, n_predictors > 0));
    PI_TRY(read_thresholds(m));
    m->info.can_skip_down = n_down_t == c->n_layer;
    return check_all_bound(m);
}

pi_status pi_model_bind(pi_model *m) {
    const int64_t n = te_gguf_n_tensors(m->file->gguf);
    m->bound = calloc((size_t)n + 1, sizeof *m->bound);
    const pi_status s =
        m->bound ? bind_all(m) : PI_FAIL(PI_ERROR_MEMORY, "out of memory for %lld tensors", (long long)n);
    free(m->bound);
    m->bound = NULL;
    return s;
}

void pi_model_unbind(pi_model *m) {
    if (m->layer)
        for (int32_t i = 0; i < m->info.n_layer; i++) {
            te_os_free(m->layer[i].own.p, m->layer[i].own.n_bytes);
            te_os_free(m->layer[i].sign, pi_sign_bytes(m));
        }
    free(m->layer);
    m->layer = NULL;
    te_os_free(m->own.p, m->own.n_bytes);
    m->own = (pi_memory){0};
    te_pool_free(m->team);
    m->team = NULL;
    pi_adapters_free(m);
    while (m->vectors) {
        struct pi_block *next = m->vectors->next;
        free(m->vectors);
        m->vectors = next;
    }
}
