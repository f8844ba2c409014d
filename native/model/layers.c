/* layers.c - a model's table of layers: every tensor of the file bound, by the blocks that own it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_os.h"
#include "../../vendor/core/te_types.h"
#include "bind.h"
#include "keys.h"

/* Which predictor is used: as asked for, else as the file says, else its own matrices. */
static pi_status choose_predictor(pi_model *m, bool has_mlp) {
    const te_gguf *g = m->file->gguf;
    const int32_t asked = m->options.predictor;
    te_str text = {NULL, 0};
    bool found = false;
    int32_t kind = has_mlp ? PI_PREDICTOR_MLP : PI_PREDICTOR_NONE;
    PI_TRY(te_gguf_get_str(g, "powerinfer.predictor", &text, &found));
    if (found) {
        const bool sign = te_str_is(text, "sign");
        if (!sign && !te_str_is(text, "mlp"))
            return PI_FAIL(PI_ERROR_UNSUPPORTED, "powerinfer.predictor is \"%.*s\"; mlp and sign are known",
                           (int)(text.n < 40 ? text.n : 40), text.p);
        kind = sign ? PI_PREDICTOR_SIGN : PI_PREDICTOR_MLP;
    }
    if (asked != PI_PREDICTOR_AUTO) kind = asked;
    const pi_status error = asked != PI_PREDICTOR_AUTO ? PI_ERROR_ARGUMENT : PI_ERROR_FORMAT;
    if (kind == PI_PREDICTOR_MLP && !has_mlp)
        return PI_FAIL(error, "the predictor is to be an MLP, but the file has no fc1 and fc2");
    if (kind == PI_PREDICTOR_SIGN && m->info.n_expert)
        return PI_FAIL(error, "a sign predictor of experts is not supported");
    for (int32_t i = 0; kind == PI_PREDICTOR_SIGN && i < m->info.n_layer; i++)
        if (!pi_ffn_of(&m->layer[i]))
            return PI_FAIL(error, "a sign predictor needs neurons in all layers, layer %d has none", i);
    if (kind == PI_PREDICTOR_SIGN && !pi_is_relu(m->info.activation))
        return PI_FAIL(error, "a sign predictor needs a ReLU model; no neuron of this one is ever silent");
    if (m->options.predictor_type >= 0 && !has_mlp)
        return PI_FAIL(PI_ERROR_ARGUMENT, "a format for the predictor was given (%s), but the file has no fc1 and fc2",
                       te_type_get(m->options.predictor_type)->name);
    m->info.predictor = kind;
    if (kind == PI_PREDICTOR_SIGN) m->sign_words = (m->info.n_embd + 63) / 64;
    return PI_OK;
}

static void set_threshold(const pi_layer *l, float threshold) {
    pi_ffn *f = pi_ffn_of(l);
    if (f) f->threshold = threshold;
}

/* Thresholds of the layers: one of each, or one for all. */
static pi_status read_thresholds(pi_model *m) {
    const te_gguf *g = m->file->gguf;
    const char *name = "powerinfer.sparse_thresholds";
    float all = 0;
    PI_TRY(te_gguf_get_f32(g, "powerinfer.sparse_threshold", &all, NULL));
    if (isnan(all)) return PI_FAIL(PI_ERROR_FORMAT, "powerinfer.sparse_threshold is not a number");
    for (int32_t i = 0; i < m->info.n_layer; i++) set_threshold(&m->layer[i], all);
    const te_kv *each = te_gguf_find(g, name);
    if (each) {
        if (each->type != TE_KV_ARRAY || each->element_type != TE_KV_F32 || each->n != (uint64_t)m->info.n_layer)
            return PI_FAIL(PI_ERROR_FORMAT, "%s must be an array of %d f32, one for each layer", name, m->info.n_layer);
        for (int32_t i = 0; i < m->info.n_layer; i++) {
            float one;
            memcpy(&one, (const char *)each->data + sizeof one * (size_t)i, sizeof one);
            if (isnan(one)) return PI_FAIL(PI_ERROR_FORMAT, "%s[%d] is not a number", name, i);
            set_threshold(&m->layer[i], one);
        }
    }
    m->info.sparse_threshold = pi_threshold_of(&m->layer[0]);
    for (int32_t i = 1; i < m->info.n_layer; i++)
        if (pi_threshold_of(&m->layer[i]) < m->info.sparse_threshold)
            m->info.sparse_threshold = pi_threshold_of(&m->layer[i]);
    return PI_OK;
}

/* What a token has for each layer, where the file has that. */
static pi_status bind_per_layer(pi_model *m) {
    const pi_model_info *c = &m->info;
    int64_t n = 0;
    PI_TRY(pi_key_i64(m->file->gguf, m->arch->name, "embedding_length_per_layer_input", 0, 1 << 16, &n, NULL));
    m->n_embd_layer = (int32_t)n;
    if (!n) return PI_OK;
    const int32_t all = c->n_layer * m->n_embd_layer;
    PI_TRY(pi_bind_mat(m, pi_name_of("per_layer_token_embd.weight"), c->n_vocab, all, false, &m->layer_embd));
    const te_type_info *type = te_type_get(m->layer_embd.type);
    if (m->n_embd_layer % type->block_weights)
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "per_layer_token_embd.weight has %d values of each layer in blocks of %d (%s), which are not "
                       "whole blocks",
                       m->n_embd_layer, type->block_weights, type->name);
    PI_TRY(pi_bind_mat(m, pi_name_of("per_layer_model_proj.weight"), all, c->n_embd, false, &m->layer_proj));
    return pi_bind_vec(m, pi_name_of("per_layer_proj_norm.weight"), m->n_embd_layer, false, &m->layer_norm);
}

/* Whether layer i of a model with experts has some. */
static pi_status has_experts(const pi_model *m, int32_t i, bool *out) {
    int64_t step = 1;
    if (m->arch->experts_step)
        PI_TRY(pi_key_i64(m->file->gguf, m->arch->name, "interleave_moe_layer_step", 1, m->info.n_layer, &step, NULL));
    *out = i >= m->info.n_layer_dense && (i + 1) % step == 0;
    return PI_OK;
}

/* The kinds of a layer's blocks, and their number. */
static pi_status kinds_of(const pi_model *m, int32_t i, const pi_block_kind *out[PI_MAX_BLOCKS], int32_t *n_blocks) {
    const pi_arch *a = m->arch;
    int32_t n = 0;
    bool experts = false;
    if (m->info.n_expert && a->experts) PI_TRY(has_experts(m, i, &experts));
    for (int32_t k = 0; k < PI_MAX_BLOCKS && a->block[k]; k++) {
        const pi_block_kind *kind = a->block[k];
        const bool attends = kind == &pi_attention_kind;
        if (kind == &pi_per_layer_kind && !m->n_embd_layer) continue;
        if (experts && kind == &pi_ffn_kind) kind = &pi_experts_kind;
        if (a->one_block && attends == (m->use[i] == PI_LAYER_FEEDS)) continue;
        if (a->recurrent && attends && m->use[i] == PI_LAYER_RECURS) kind = a->recurrent;
        out[n++] = kind;
        if (a->recurrent_beside && attends) out[n++] = a->recurrent;
    }
    *n_blocks = n;
    return PI_OK;
}

/* Whether no device computes a block; of heads with a state devices read four values at a time. */
static bool is_host_s(const pi_block *b) {
    const bool attends = b->kind == &pi_attention_kind, recurs = b->kind->recurrent && b->recurrent.n_head;
    const pi_recurrent *r = &b->recurrent;
    return !b->kind->device || (attends && b->attention.n_embd_head > PI_DEVICE_HEAD) ||
           (recurs && (r->n_k > PI_DEVICE_STATE || r->n_k % 4 || r->n_v % 4));
}

/* How many blocks a layer begins and ends with that no device computes: all up to the last such one, but for those at the
 * end. What a layer's scale multiplies is behind all blocks. */
static void count_host_blocks(const pi_model *m, pi_layer *l) {
    int32_t end = l->n_blocks;
    while (!l->scale && end > 0 && is_host_s(&l->block[end - 1])) end--;
    if (!end) end = l->n_blocks; /* all of them */
    l->n_tail = l->n_blocks - end;
    l->n_host = end;
    while (l->n_host > 0 && !is_host_s(&l->block[l->n_host - 1])) l->n_host--;
    if (m->arch->recurrent_beside && l->n_host == 1) l->n_host = 2;
}

static pi_status read_parallel(const pi_model *m, int32_t i, bool *out) {
    *out = m->arch->parallel;
    if (!m->arch->maybe_parallel) return PI_OK;
    *out = !pi_bind_has(m, pi_name_of("blk.%d.ffn_norm.weight", i));
    return pi_key_bool(m->file->gguf, m->arch->name, "use_parallel_residual", out);
}

/* What a head for further tokens has in front of its layer and behind it; where embedding, norm and output are missing
 * they are the model's. */
static pi_status bind_join(pi_model *m) {
    const pi_model_info *c = &m->info;
    if (!pi_bind_has(m, pi_name_of("blk.0.nextn.eh_proj.weight")))
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "layer %d of the file, which is to guess at further tokens, has no tensor %s", m->first_layer,
                       pi_name_in_file(m, pi_name_of("blk.0.nextn.eh_proj.weight")).text);
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.0.nextn.eh_proj.weight"), c->n_embd, 2 * c->n_embd, false, &m->join));
    PI_TRY(pi_bind_norm(m, "blk.0.nextn.enorm", false, &m->embd_norm));
    PI_TRY(pi_bind_norm(m, "blk.0.nextn.hnorm", false, &m->hidden_norm));
    PI_TRY(pi_bind_norm(m, "blk.0.nextn.shared_head_norm", true, &m->output_norm));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.0.nextn.embed_tokens.weight"), c->n_vocab, c->n_embd, true, &m->token_embd));
    return pi_bind_mat(m, pi_name_of("blk.0.nextn.shared_head_head.weight"), c->n_vocab, c->n_embd, true, &m->output);
}

static pi_status bind_all(pi_model *m) {
    const pi_model_info *c = &m->info;
    if (m->n_ropes) pi_bind_take(m, "rope_freqs.weight"); /* rope.c reads them */
    if (m->has_long_rope) pi_bind_take(m, "rope_factors_short.weight");
    if (m->has_long_rope) pi_bind_take(m, "rope_factors_long.weight");
    if (m->first_layer) PI_TRY(bind_join(m));
    if (!m->token_embd.w)
        PI_TRY(pi_bind_mat(m, pi_name_of("token_embd.weight"), c->n_vocab, c->n_embd, false, &m->token_embd));
    if (m->arch->learned_pos)
        PI_TRY(pi_bind_mat(m, pi_name_of("position_embd.weight"), c->n_ctx_train + m->arch->pos_offset, c->n_embd,
                           false, &m->position_embd));
    if (!m->output_norm.w)
        PI_TRY(pi_bind_norm(m, m->arch->output_norm ? m->arch->output_norm : "output_norm", false, &m->output_norm));
    if (m->arch->per_layer) PI_TRY(bind_per_layer(m));
    if (!m->output.w) PI_TRY(pi_bind_mat(m, pi_name_of("output.weight"), c->n_vocab, c->n_embd, true, &m->output));
    if (!m->output.w) m->output = m->token_embd;
    PI_TRY(pi_bind_vec(m, pi_name_of("output.bias"), c->n_vocab, true, &m->output_b));
    te_mat labels; /* of a reranker; the caller multiplies the last hidden state with it */
    PI_TRY(pi_bind_mat(m, pi_name_of("cls.output.weight"), 0, c->n_embd, true, &labels));
    m->layer = calloc((size_t)c->n_layer, sizeof *m->layer);
    if (!m->layer) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d layers", c->n_layer);
    int32_t n_predictors = 0, n_kept = 0;
    for (int32_t i = 0; i < c->n_layer; i++) {
        pi_layer *l = &m->layer[i];
        PI_TRY(read_parallel(m, i, &l->parallel));
        const pi_block_kind *kinds[PI_MAX_BLOCKS];
        int32_t n_blocks = 0;
        PI_TRY(kinds_of(m, i, kinds, &n_blocks));
        for (; l->n_blocks < n_blocks; l->n_blocks++) {
            l->block[l->n_blocks].kind = kinds[l->n_blocks];
            PI_TRY(kinds[l->n_blocks]->bind(m, i, &l->block[l->n_blocks]));
        }
        if (m->arch->layer_scale)
            PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.layer_output_scale.weight", i), 1, true, &l->scale));
        count_host_blocks(m, l);
        const int32_t n_placed = pi_n_placed(m, l);
        if (n_placed > m->info.n_placed) m->info.n_placed = n_placed;
        const pi_ffn *f = pi_ffn_of(l);
        n_predictors += f && f->fc1.w;
        n_kept += pi_keeps_down(l);
    }
    if (n_predictors && n_predictors != c->n_layer)
        return PI_FAIL(PI_ERROR_FORMAT, "%d of %d layers have a predictor (fc1, fc2); all or none must", n_predictors,
                       c->n_layer);
    if (!m->first_layer) { /* these keys are the model's */
        PI_TRY(choose_predictor(m, n_predictors > 0));
        PI_TRY(read_thresholds(m));
    }
    m->info.can_skip_down = !n_kept;
    return pi_bind_check_all(m);
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
    pi_adapters_free(m);
    if (m->layer)
        for (int32_t i = 0; i < m->info.n_layer; i++) {
            te_os_free(m->layer[i].own.p, m->layer[i].own.n_bytes);
            const pi_ffn *f = pi_ffn_of(&m->layer[i]);
            if (f) te_os_free(f->sign, pi_sign_bytes(m));
        }
    free(m->layer);
    m->layer = NULL;
    free(m->use);
    m->use = NULL;
    te_os_free(m->own.p, m->own.n_bytes);
    m->own = (pi_memory){0};
    te_pool_free(m->team);
    m->team = NULL;
    pi_bind_free_vectors(m);
}
