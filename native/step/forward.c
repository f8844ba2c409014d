/* forward.c - one chunk of tokens through the model. Every member of the team runs this code; barriers stand where one
 * reads what others wrote.
 *
 *     x = embedding
 *     per layer:  sequential (Llama ...)                      parallel (Falcon)
 *                 x += o . attention(norm(x))                 a = norm(x), a2 = norm2(x) or a
 *                 x += ffn(norm(x)), predicted from x         x += o . attention(a2) + ffn(a), predicted from x
 *     logits = output . norm(x), for the tokens that want them; the last layer's x is computed from the first of these on
 *
 * A layer is two stages, attention_stage and ffn_stage, that communicate through x, h and the KV pool alone: the seam
 * at which a device takes over a layer's attention, or a part of its neurons. */
#include <math.h>
#include <string.h>

#include "../../vendor/core/te_types.h"
#include "../hybrid/hybrid.h"

static void norm(const pi_session *s, const float *x, const float *w, const float *b, float *y) {
    const pi_model *m = s->model;
    if (m->arch->layer_norm)
        m->kernels->layer_norm(x, w, b, m->norm_eps, m->info.n_embd, y);
    else
        m->kernels->rms_norm(x, w, m->norm_eps, m->info.n_embd, y);
}

void pi_linear(pi_session *s, te_team *team, const te_linear *products, int32_t n_products, const float *x, size_t ldx,
               int32_t t0, int32_t n) {
    enum { MOST = 3 };
    const int32_t left = s->chunk.n_many - t0, n_many = left < 0 ? 0 : left < n ? left : n;
    te_linear some[MOST];
    for (int32_t i = 0; i < n_products && i < MOST; i++) {
        some[i] = products[i];
        some[i].way = TE_BY_GEMM;
    }
    if (n_many > 0) te_op_linear(team, s->ws, some, n_products, x, ldx, n_many);
    if (n_many == n) return;
    for (int32_t i = 0; i < n_products && i < MOST; i++) {
        some[i].y += some[i].ldy * (size_t)n_many;
        some[i].way = TE_BY_ROWS;
    }
    te_op_linear(team, s->ws, some, n_products, x + ldx * (size_t)n_many, ldx, n - n_many);
}

/* Adapters' part of a product of all tokens. */
static void adapt(pi_session *s, te_team *team, const pi_layer *layer, int32_t which, const float *x, size_t ldx,
                  float *y, size_t ldy) {
    const pi_adapter *d = pi_adapter_of(layer, which);
    const int32_t n_many = s->chunk.n_many, n_few = s->chunk.n_tok - n_many;
    if (n_many > 0) pi_adapt(s, team, d, x, ldx, n_many, TE_BY_GEMM, y, ldy);
    if (n_few > 0)
        pi_adapt(s, team, d, x + ldx * (size_t)n_many, ldx, n_few, TE_BY_ROWS, y + ldy * (size_t)n_many, ldy);
}

static void embed(pi_session *s, te_team *team) {
    const pi_model *m = s->model;
    const int32_t n = m->info.n_embd;
    for (int32_t t = team->ith; t < s->chunk.n_tok; t += team->nth) {
        float *x = s->x + (size_t)t * (size_t)n, *tmp = s->h + (size_t)t * (size_t)n;
        m->kernels->row[m->token_embd.type].to_f32(
            (const char *)m->token_embd.w + m->token_embd.stride * (size_t)s->chunk.token[t], 0, n, x);
        if (m->position_embd.w) {
            const size_t row = (size_t)s->chunk.pos[t] + 2; /* OPT's table has two unused rows in front */
            m->kernels->row[m->position_embd.type].to_f32(
                (const char *)m->position_embd.w + m->position_embd.stride * row, 0, n, tmp);
            m->kernels->add(tmp, n, x);
        }
        if (m->rope.kind != PI_ROPE_NONE)
            pi_rope_angles(&m->rope, s->chunk.pos[t], m->rope.magnitude, s->cs + (size_t)t * (size_t)m->rope.n_rot);
    }
    te_barrier(team);
    pi_adapt_embedding(s, team);
}

/* The first token whose output of layer l is wanted. Behind the last layer only logits are made of it, and its K and V
 * are kept for all tokens: of a prompt that asks for its last token's logits this saves most of a layer. */
static int32_t first_wanted(const pi_session *s, int32_t l) {
    const pi_chunk *c = &s->chunk;
    if (l + 1 < s->model->info.n_layer || c->lone || s->fired || s->n_taps || s->model->layer[l].adapter) return 0;
    int32_t t = 0;
    while (t < c->n_tok && c->logits_row[t] < 0) t++;
    return t;
}

/* Input norms of a layer: h for the FFN and the attention's input, for a member's share of the tokens. Q, attention and
 * its output for tokens from `from` on. */
static void attention_stage(pi_session *s, te_team *team, int32_t l, int32_t from) {
    const pi_model *m = s->model;
    const pi_layer *w = &m->layer[l];
    const size_t n = (size_t)m->info.n_embd, n_q = (size_t)m->info.n_head * (size_t)m->info.n_embd_head,
                 n_kv = (size_t)m->info.n_head_kv * (size_t)m->info.n_embd_head;
    float *in = w->attn_norm2 ? s->h2 : s->h;
    for (int32_t t = team->ith; t < s->chunk.n_tok; t += team->nth) {
        const size_t at = (size_t)t * n;
        norm(s, s->x + at, w->attn_norm, w->attn_norm_b, s->h + at);
        if (w->attn_norm2) norm(s, s->x + at, w->attn_norm2, w->attn_norm2_b, s->h2 + at);
    }
    te_barrier(team);
    te_linear qkv[3] = {{.w = w->q, .bias = w->q_b, .y = s->q, .ldy = n_q},
                        {.w = w->k, .bias = w->k_b, .y = s->k, .ldy = n_kv},
                        {.w = w->v, .bias = w->v_b, .y = s->v, .ldy = n_kv}};
    pi_linear(s, team, qkv + 1, 2, in, n, 0, from);
    for (int32_t i = 0; i < 3; i++) qkv[i].y += qkv[i].ldy * (size_t)from;
    pi_linear(s, team, qkv, 3, in + n * (size_t)from, n, from, s->chunk.n_tok - from);
    te_barrier(team);
    adapt(s, team, w, PI_ADAPT_Q, in, n, s->q, n_q);
    adapt(s, team, w, PI_ADAPT_K, in, n, s->k, n_kv);
    adapt(s, team, w, PI_ADAPT_V, in, n, s->v, n_kv);
    pi_attention(s, team, l, from);
    te_barrier(team);
    const te_linear out = {.w = w->o, .bias = w->o_b, .y = s->x + n * (size_t)from, .ldy = n, .add = true};
    pi_linear(s, team, &out, 1, s->att + n_q * (size_t)from, n_q, from, s->chunk.n_tok - from);
    adapt(s, team, w, PI_ADAPT_O, s->att, n_q, s->x, n);
    te_barrier(team);
}

static void ffn_stage(pi_session *s, te_team *team, int32_t l, int32_t n_list, int32_t from) {
    const pi_model *m = s->model;
    const pi_layer *w = &m->layer[l];
    if (!m->arch->parallel) {
        pi_tap_rows(s, team, s->x, m->info.n_embd, s->tap[l].input);
        for (int32_t t = from + team->ith; t < s->chunk.n_tok; t += team->nth) {
            const size_t at = (size_t)t * (size_t)m->info.n_embd;
            norm(s, s->x + at, w->ffn_norm, w->ffn_norm_b, s->h + at);
        }
    }
    if (!m->arch->parallel || w->sign) n_list = pi_predict(s, team, l, from);
    if (!m->arch->parallel) te_barrier(team);
    pi_ffn(s, team, l, n_list, from);
    te_barrier(team);
}

static void record(pi_session *s, const te_team *team, int32_t l, int32_t from, int64_t t0, int64_t t1, int64_t t2) {
    const pi_layer *w = &s->model->layer[l];
    pi_layer_step st = {.n_tokens = s->chunk.n_tok - from, .n_sparse = pi_n_sparse(&s->chunk, from)};
    int64_t listed = 0;
    for (int32_t i = 0; i < team->nth; i++) {
        const pi_layer_count *c = &s->count[(ptrdiff_t)l * s->options.n_threads + i];
        st.n_predicted += c->predicted;
        st.n_computed += c->ffn.computed;
        st.n_active += c->ffn.fired;
        st.n_rows += c->ffn.rows;
        st.ffn_bytes += c->ffn.bytes;
        listed += c->ffn.listed;
    }
    if (s->options.sparsity != PI_SPARSITY_PREDICTED)
        st.n_predicted = listed;
    else if (st.n_sparse)
        st.ffn_bytes += w->sign ? (int64_t)pi_sign_bytes(s->model) : pi_mat_bytes(&w->fc1) + pi_mat_bytes(&w->fc2);
    const int64_t unread = st.n_tokens ? 0 : pi_mat_bytes(&w->q) + pi_mat_bytes(&w->o);
    st.bytes = st.ffn_bytes + w->attn_bytes - unread + pi_attention_bytes(s, from);
    st.ffn_us = (float)((double)(t2 - t1) * 1e-3);
    st.layer_us = (float)((double)(t2 - t0) * 1e-3);
    s->step[l] = st;
    s->last_bytes += st.bytes;
}

static void head(pi_session *s, te_team *team) {
    const pi_model *m = s->model;
    const pi_chunk *c = &s->chunk;
    const size_t n = (size_t)m->info.n_embd, n_vocab = (size_t)m->info.n_vocab;
    if (!c->n_logits) return;
    for (int32_t t = team->ith; t < c->n_tok; t += team->nth)
        if (c->logits_row[t] >= 0)
            norm(s, s->x + (size_t)t * n, m->output_norm, m->output_norm_b, s->hidden + (size_t)c->logits_row[t] * n);
    te_barrier(team);
    /* Together: tokens that are computed in the same way and have rows one after the other, with others between. */
    for (int32_t t = 0, many, row; t < c->n_tok;) {
        const te_way way = t < c->n_many ? TE_BY_GEMM : TE_BY_ROWS;
        const int32_t end = way == TE_BY_GEMM ? c->n_many : c->n_tok;
        for (many = 0, row = -1; t < end && (c->logits_row[t] < 0 || !many || c->logits_row[t] == row + many); t++) {
            if (c->logits_row[t] < 0) continue;
            if (many++ == 0) row = c->logits_row[t];
        }
        if (many == 0) continue;
        const float *hidden = s->hidden + (size_t)row * n;
        const te_linear out = {.w = m->output, .y = s->logits + (size_t)row * n_vocab, .ldy = n_vocab, .way = way};
        te_op_linear(team, s->ws, &out, 1, hidden, n, many);
        pi_adapt(s, team, &m->output_adapter, hidden, n, many, out.way, out.y, n_vocab);
    }
}

void pi_step_embed(pi_session *s, te_team *team) { embed(s, team); }
void pi_step_head(pi_session *s, te_team *team) { head(s, team); }

void pi_step_layer(pi_session *s, te_team *team, int32_t l) {
    const pi_model *m = s->model;
    const bool leader = team->ith == 0;
    s->count[(ptrdiff_t)l * s->options.n_threads + team->ith] = (pi_layer_count){0};
    const int64_t t0 = leader ? te_os_now_ns() : 0;
    const int32_t from = first_wanted(s, l);
    int32_t n_list = 0;
    if (m->arch->parallel) {
        pi_tap_rows(s, team, s->x, m->info.n_embd, s->tap[l].input);
        if (!m->layer[l].sign) n_list = pi_predict(s, team, l, from);
    }
    attention_stage(s, team, l, from);
    const int64_t t1 = leader ? te_os_now_ns() : 0;
    ffn_stage(s, team, l, n_list, from);
    if (leader) record(s, team, l, from, t0, t1, te_os_now_ns());
}

static void step(void *ctx, te_team *team) {
    pi_session *s = ctx;
    embed(s, team);
    for (int32_t l = 0; l < s->model->info.n_layer; l++) pi_step_layer(s, team, l);
    head(s, team);
}

pi_status pi_forward(pi_session *s) {
    const pi_model *m = s->model;
    const int64_t t0 = te_os_now_ns();
    if (s->hybrid)
        PI_TRY(pi_hybrid_run(s->hybrid));
    else
        te_pool_run(s->pool, step, s);
    s->last_bytes += (int64_t)(pi_row_bytes(&m->token_embd) * (size_t)s->chunk.n_tok);
    if (s->chunk.n_logits) s->last_bytes += pi_mat_bytes(&m->output);
    s->last_ns += te_os_now_ns() - t0;
    return PI_OK;
}
