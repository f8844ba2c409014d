/* attention.c - the attention block: its tensors, which positions a layer sees, and what stands around attention itself
 * (attend.c): norm, products, adapters, gates. */
#include <math.h>
#include <stdlib.h>

#include "../model/bind.h"
#include "../model/keys.h"
#include "attend.h"
#include "ops.h"

/* Whether layer i has a window. */
static pi_status has_window(const pi_model *m, int32_t i, bool *out) {
    const pi_arch *a = m->arch;
    *out = a->window_period && (a->window_period == 1 || (a->full_last ? i + 1 : i) % a->window_period != 0);
    if (!a->windows_listed) return PI_OK;
    bool found = false;
    int32_t *listed = malloc(sizeof *listed * (size_t)m->info.n_layer);
    if (!listed) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d layers", m->info.n_layer);
    const pi_status st =
        pi_key_each(m->file->gguf, a->name, "attention.sliding_window_pattern", m->info.n_layer, 0, 1, listed, &found);
    if (st == PI_OK && found) *out = listed[i];
    free(listed);
    return st != PI_OK || found
               ? st
               : PI_FAIL(PI_ERROR_FORMAT, "the file has no key %s.attention.sliding_window_pattern", a->name);
}

/* Which positions the layer's tokens see, and which RoPE goes with that. */
static pi_status read_window(const pi_model *m, int32_t i, pi_attention *w) {
    const pi_arch *a = m->arch;
    int64_t window = a->window_default;
    bool near = false;
    w->rope = m->n_ropes ? 0 : -1;
    if (a->no_rope_period && (i + 1) % a->no_rope_period == 0) w->rope = -1;
    PI_TRY(has_window(m, i, &near));
    if (!a->window_period && !a->windows_listed) return PI_OK;
    PI_TRY(pi_key_i64(m->file->gguf, a->name, "attention.sliding_window", a->window_period != 1, INT32_MAX, &window,
                      NULL));
    if (a->window_rope && near && window) w->rope = m->n_ropes - 1;
    if (a->full_no_rope && !near && window) w->rope = -1;
    if (near) w->window = (int32_t)window;
    w->chunked = a->chunked && near;
    return PI_OK;
}

/* Of chunked attention: norms without weight behind RoPE, and q's scale where there is no RoPE. */
static pi_status read_chunked(pi_model *m, pi_attention *w) {
    enum { WITHOUT_NORMS = 128 }; /* experts of the one model that has none; no key says so */
    const te_gguf *g = m->file->gguf;
    int64_t length = 8192;
    if (w->rope >= 0) {
        if (m->info.n_expert == WITHOUT_NORMS) return PI_OK;
        w->late_norm = true;
        PI_TRY(pi_bind_constant(m, w->n_embd_head, 1, &w->k_norm));
        w->q_norm = w->k_norm;
        return PI_OK;
    }
    w->temp_scale = 0.1F;
    PI_TRY(pi_key_f32(g, m->arch->name, "attention.temperature_scale", &w->temp_scale, NULL));
    PI_TRY(pi_key_i64(g, m->arch->name, "attention.temperature_length", 1, INT32_MAX, &length, NULL));
    if (!isfinite(w->temp_scale))
        return PI_FAIL(PI_ERROR_FORMAT, "%s.attention.temperature_scale is %g", m->arch->name, (double)w->temp_scale);
    w->temp_length = (int32_t)length;
    w->temp_first = 1;
    return PI_OK;
}

/* The sizes of the layer's heads, and whose K and V it uses: the last layers may read those of the last one before them
 * that is of their kind. */
static pi_status read_heads(const pi_model *m, int32_t i, pi_attention *w) {
    const pi_model_info *c = &m->info;
    const pi_arch *a = m->arch;
    const te_gguf *g = m->file->gguf;
    int64_t n_shared = 0;
    w->n_embd_head = c->n_embd_head;
    w->n_head_kv = c->n_head_kv;
    w->kv_layer = i;
    if (!a->layers_differ) return PI_OK;
    w->n_head_kv = m->n_head_kv[i];
    if (w->window) w->n_embd_head = m->n_embd_head_window;
    PI_TRY(pi_key_i64(g, a->name, "attention.shared_kv_layers", 0, c->n_layer - 1, &n_shared, NULL));
    const int32_t first = c->n_layer - (int32_t)n_shared;
    if (i < first) return PI_OK;
    for (w->kv_layer = first - 1; w->kv_layer >= 0; w->kv_layer--)
        if (!pi_attention_of(&m->layer[w->kv_layer])->window == !w->window) break;
    if (w->kv_layer < 0)
        return PI_FAIL(PI_ERROR_FORMAT, "layer %d has no K and V, and no layer before %d of its kind has them", i,
                       first);
    w->borrows = true;
    const pi_attention *of = pi_attention_of(&m->layer[w->kv_layer]);
    if (of->n_head_kv != w->n_head_kv)
        return PI_FAIL(PI_ERROR_FORMAT, "layer %d has %d key/value heads, and layer %d, whose K and V it reads, has %d",
                       i, w->n_head_kv, w->kv_layer, of->n_head_kv);
    for (int32_t k = 0; k < 3; k++) { /* files may have them in vain */
        static const char *const names[] = {"attn_k", "attn_v", "attn_k_norm"};
        pi_bind_take((pi_model *)(uintptr_t)m, pi_name_of("blk.%d.%s.weight", i, names[k]).text);
    }
    return PI_OK;
}

/* q, k and v, of one matrix or of three. */
static pi_status bind_qkv(pi_model *m, int32_t i, pi_attention *l) {
    const pi_model_info *c = &m->info;
    const pi_arch *a = m->arch;
    const int32_t n_q = c->n_head * l->n_embd_head, n_kv = l->n_head_kv * l->n_embd_head;
    if (a->fused_qkv) {
        te_mat qkv;
        PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.attn_qkv.weight", i), n_q + 2 * n_kv, c->n_embd, false, &qkv));
        l->q = l->k = l->v = qkv;
        l->q.n_rows = n_q;
        l->k.n_rows = l->v.n_rows = n_kv;
        l->k.w = (const char *)qkv.w + qkv.stride * (size_t)n_q;
        l->v.w = (const char *)l->k.w + qkv.stride * (size_t)n_kv;
        PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_qkv.bias", i), n_q + 2 * n_kv, !a->bias, &l->q_b));
        if (l->q_b) l->k_b = l->q_b + n_q, l->v_b = l->k_b + n_kv;
        return PI_OK;
    }
    l->gated = a->gated_heads;
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.attn_q.weight", i), l->gated ? 2 * n_q : n_q, c->n_embd, false, &l->q));
    if (!l->borrows) {
        PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.attn_k.weight", i), n_kv, c->n_embd, false, &l->k));
        PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.attn_v.weight", i), n_kv, c->n_embd, a->maybe_v, &l->v));
    }
    const bool optional = !a->bias && !a->qkv_bias;
    PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_q.bias", i), l->q.n_rows, optional, &l->q_b));
    PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_k.bias", i), n_kv, optional, &l->k_b));
    PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_v.bias", i), n_kv, optional, &l->v_b));
    return PI_OK;
}

/* Norms of q and k: over all heads, or of each. */
static pi_status bind_qk_norms(pi_model *m, int32_t i, pi_attention *l) {
    const pi_arch *a = m->arch;
    const int32_t n_q = m->info.n_head * l->n_embd_head, n_kv = l->n_head_kv * l->n_embd_head;
    if (a->wide_qk_norm) {
        PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_q_norm.weight", i), n_q, false, &l->wide_q_norm));
        PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_k_norm.weight", i), n_kv, false, &l->wide_k_norm));
    }
    if (a->qk_norm || a->maybe_qk_norm) {
        const bool optional = !a->qk_norm;
        PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_q_norm.weight", i), l->n_embd_head, optional, &l->q_norm));
        if (!l->borrows)
            PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_k_norm.weight", i), l->n_embd_head, !l->q_norm, &l->k_norm));
        if (l->k_norm && !l->q_norm)
            return PI_FAIL(PI_ERROR_FORMAT, "blk.%d.attn_k_norm.weight is there without blk.%d.attn_q_norm.weight", i,
                           i);
    }
    return PI_OK;
}

static pi_status bind(pi_model *m, int32_t i, pi_block *b) {
    const pi_model_info *c = &m->info;
    const pi_arch *a = m->arch;
    pi_attention *l = &b->attention;
    PI_TRY(read_window(m, i, l));
    PI_TRY(read_heads(m, i, l));
    const int32_t d = l->n_embd_head, n_q = c->n_head * d;
    /* Of two norms of blocks side by side (Falcon-40B) the second is this one's, the first the feed-forward's. */
    if (m->layer[i].parallel) PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.attn_norm_2", i).text, true, &b->norm));
    if (!b->norm.w && !a->no_pre_norm) PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.attn_norm", i).text, false, &b->norm));
    const bool wide = a->wide_layers && c->n_layer == a->wide_layers;
    l->scale = a->unscaled ? 1 : 1.0F / sqrtf(wide ? (float)c->n_embd / (float)c->n_head : (float)d);
    if (m->score_scale > 0) l->scale = m->score_scale;
    l->late_norm = a->norm_after_rope;
    l->temp_scale = m->temperature;
    l->temp_length = m->n_ctx_orig;
    if (a->soft_caps) PI_TRY(pi_key_cap(m->file->gguf, a->name, "attn_logit_softcapping", 50, &l->soft_cap));
    PI_TRY(bind_qkv(m, i, l));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.attn_output.weight", i), c->n_embd, n_q, false, &l->o));
    PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_output.bias", i), c->n_embd, !a->bias, &l->o_b));
    if (a->gate_matrix)
        PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.attn_gate.weight", i), n_q, c->n_embd, false, &l->gate));
    if (a->sub_norms) PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_sub_norm.weight", i), n_q, false, &l->sub_norm));
    if (a->sinks) PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_sinks.weight", i), c->n_head, false, &l->sinks));
    if (a->post_norm) PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.post_attention_norm", i).text, false, &b->post_norm));
    PI_TRY(bind_qk_norms(m, i, l));
    if (a->chunked) PI_TRY(read_chunked(m, l));
    if (a->v_norm && !l->borrows) PI_TRY(pi_bind_constant(m, d, 1, &l->v_norm));
    return PI_OK;
}

static void prepare(pi_block_run *r) { pi_make_input(r, 0); }

/* Norms over all heads of a token's q, and of its k. */
static void norm_heads(const pi_block_run *r, size_t n_q, size_t n_kv) {
    const pi_session *s = r->s;
    const pi_model *m = s->model;
    const pi_attention *w = &r->block->attention;
    te_barrier(r->team); /* adapters have changed them */
    for (int32_t t = r->team->ith; t < s->chunk.n_tok; t += r->team->nth) {
        float *q = s->q + n_q * (size_t)t, *k = s->k + n_kv * (size_t)t;
        if (t >= r->from) m->kernels->rms_norm(q, w->wide_q_norm, m->inner_eps, (int32_t)n_q, q);
        m->kernels->rms_norm(k, w->wide_k_norm, m->inner_eps, (int32_t)n_kv, k);
    }
    te_barrier(r->team);
}

/* What heads give, times the sigmoid of what stands behind their queries, or of another product. */
static void gate_heads(const pi_block_run *r) {
    const pi_session *s = r->s;
    const int32_t d = s->model->info.n_embd_head, n = s->model->info.n_head;
    for (int32_t i = r->from * n + r->team->ith; i < s->chunk.n_tok * n; i += r->team->nth) {
        const float *gate =
            r->block->attention.gated ? s->q + ((ptrdiff_t)2 * i + 1) * d : s->head_gates + (ptrdiff_t)i * d;
        float *head = s->att + (ptrdiff_t)i * d;
        for (int32_t c = 0; c < d; c++) head[c] *= 1 / (1 + expf(-gate[c]));
    }
    te_barrier(r->team);
}

static void run(pi_block_run *r) {
    pi_session *s = r->s;
    te_team *team = r->team;
    const pi_model_info *i = &s->model->info;
    const pi_attention *w = &r->block->attention;
    const size_t d = (size_t)w->n_embd_head, n = (size_t)i->n_embd, n_att = (size_t)i->n_head * d,
                 n_q = w->gated ? 2 * n_att : n_att, n_kv = (size_t)w->n_head_kv * d, from = (size_t)r->from;
    const float *in = pi_block_input(r);
    te_linear qkv[4] = {{.w = w->q, .bias = w->q_b, .y = s->q, .ldy = n_q},
                        {.w = w->k, .bias = w->k_b, .y = s->k, .ldy = n_kv},
                        {.w = w->v, .bias = w->v_b, .y = s->v, .ldy = n_kv},
                        {.w = w->gate, .y = s->head_gates, .ldy = n_att}};
    const int32_t n_products = w->borrows ? 1 : w->v.w ? 3 : 2; /* a gate only beside q, k and v */
    if (s->chunk.decode) te_op_linear_ahead(team, &(const te_mat *){&w->o}, 1, PI_AHEAD);
    if (n_products > 1) pi_linear(s, team, qkv + 1, n_products - 1, in, n, 0, r->from);
    for (int32_t k = 0; k < 4; k++) qkv[k].y += qkv[k].ldy * from;
    pi_linear(s, team, qkv, w->gate.w ? 4 : n_products, in + n * from, n, r->from, s->chunk.n_tok - r->from);
    te_barrier(team);
    pi_adapt_chunk(s, team, r->layer, PI_ADAPT_Q, in, n, s->q, n_q);
    pi_adapt_chunk(s, team, r->layer, PI_ADAPT_K, in, n, s->k, n_kv);
    pi_adapt_chunk(s, team, r->layer, PI_ADAPT_V, in, n, s->v, n_kv);
    if (w->wide_q_norm) norm_heads(r, n_q, n_kv);
    pi_attend_chunk(s, team, r->l, r->from);
    te_barrier(team);
    if (w->gated || w->gate.w) gate_heads(r);
    if (w->sub_norm) {
        for (int32_t t = r->from + team->ith; t < s->chunk.n_tok; t += team->nth) {
            float *att = s->att + n_att * (size_t)t;
            s->model->kernels->rms_norm(att, w->sub_norm, s->model->inner_eps, (int32_t)n_att, att);
        }
        te_barrier(team);
    }
    pi_ahead(r);
    const te_linear out = {.w = w->o, .bias = w->o_b, .y = r->y + n * from, .ldy = n, .add = true};
    pi_linear(s, team, &out, 1, s->att + n_att * from, n_att, r->from, s->chunk.n_tok - r->from);
    pi_adapt_chunk(s, team, r->layer, PI_ADAPT_O, s->att, n_att, r->y, n);
}

static int32_t matrices(pi_block *b, pi_block_mat out[PI_BLOCK_MATS]) {
    pi_attention *w = &b->attention;
    te_mat *const mat[] = {&w->q, &w->k, &w->v, &w->gate, &w->o};
    for (int32_t i = 0; i < 5; i++) out[i] = (pi_block_mat){.mat = mat[i], .use = PI_MAT_PRODUCT};
    return 5;
}

const pi_block_kind pi_attention_kind = {"attention", bind, matrices, NULL, prepare, run, &pi_attention_on_device,
                                         false};
