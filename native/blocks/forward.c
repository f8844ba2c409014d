/* forward.c - the stages of a chunk's way through the model: embedding, layers, head. Every member of the team runs this
 * code; barriers stand where one reads what others wrote.
 *
 *     x = embedding
 *     for each layer, for each of its blocks: x += block(norm(x))
 *     logits = output . norm(x), for the tokens that want them; the last layer's x is computed from the first of these on
 *
 * Blocks of a parallel layer (Falcon) all read the x that the layer began with. */
#include "forward.h"

#include <math.h>

#include "../../vendor/core/te_types.h"
#include "attend.h"
#include "ffn.h"
#include "per_layer.h"
#include "recurrent.h"

bool pi_step_is_stopped(pi_session *s) {
    const pi_batch *b = s->asking;
    if (s->is_stopped || !b || !b->stop || te_os_now_ns() - s->asked_ns < (int64_t)b->stop_ms * 1000000)
        return s->is_stopped;
    s->is_stopped = b->stop(b->stop_ctx) != 0;
    s->asked_ns = te_os_now_ns();
    return s->is_stopped;
}

bool pi_step_ends_before(pi_session *s, const te_team *team, int32_t l) {
    const int32_t end = __atomic_load_n(&s->stop_layer, __ATOMIC_RELAXED);
    if (team->ith == 0 && l < s->model->info.n_layer && end > l && pi_step_is_stopped(s))
        __atomic_store_n(&s->stop_layer, l + 1, __ATOMIC_RELAXED);
    return end <= l;
}

void pi_step_angles(const pi_session *s, int32_t t, int32_t n_rows, float *cs) {
    const pi_model *m = s->model;
    for (int32_t i = 0; i < m->n_ropes; i++) {
        const pi_rope *r = &m->rope[i];
        if (!m->has_long_rope || i == pi_rope_index_of(m, 0, s->options.n_ctx))
            pi_rope_angles(r, s->chunk.pos[t], r->magnitude, cs + (ptrdiff_t)t * r->n_rot);
        cs += (ptrdiff_t)n_rows * r->n_rot;
    }
}

/* x of a head for further tokens, of each token's embedding, which is in x, and what was given beside it. */
static void join_hidden(pi_session *s, te_team *team) {
    const pi_model *m = s->model;
    const size_t n = (size_t)m->info.n_embd;
    for (int32_t t = team->ith; t < s->chunk.n_tok; t += team->nth) {
        float *pair = s->pair + 2 * n * (size_t)t;
        pi_norm_row(m, &m->embd_norm, s->x + n * (size_t)t, pair);
        pi_norm_row(m, &m->hidden_norm, s->given + n * (size_t)s->chunk.batch_row[t], pair + n);
    }
    te_barrier(team);
    const te_linear product = {.w = m->join, .y = s->x, .ldy = n};
    pi_linear(s, team, &product, 1, s->pair, 2 * n, 0, s->chunk.n_tok);
    te_barrier(team);
}

void pi_step_embed(pi_session *s, te_team *team) {
    const pi_model *m = s->model;
    const int32_t n = m->info.n_embd;
    for (int32_t t = team->ith; t < s->chunk.n_tok; t += team->nth) {
        float *x = s->x + (size_t)t * (size_t)n, *tmp = s->h + (size_t)t * (size_t)n;
        m->kernels->row[m->token_embd.type].to_f32(
            (const char *)m->token_embd.w + m->token_embd.stride * (size_t)s->chunk.token[t], 0, n, x);
        for (int32_t i = 0; m->embd_scale != 1 && i < n; i++) x[i] *= m->embd_scale;
        if (m->position_embd.w) {
            const size_t row = (size_t)s->chunk.pos[t] + (size_t)m->arch->pos_offset;
            m->kernels->row[m->position_embd.type].to_f32(
                (const char *)m->position_embd.w + m->position_embd.stride * row, 0, n, tmp);
            m->kernels->add(tmp, n, x);
        }
        pi_step_angles(s, t, s->options.n_batch, s->cs);
    }
    te_barrier(team);
    pi_adapt_embedding(s, team);
    pi_per_layer_embed(s, team);
    if (m->join.w) join_hidden(s, team);
}

int32_t pi_first_wanted(const pi_session *s, int32_t l) {
    const pi_chunk *c = &s->chunk;
    if (l + 1 < s->model->info.n_layer || c->decode || s->options.keep_hidden || s->fired || s->n_taps ||
        s->model->layer[l].adapter)
        return 0;
    int32_t t = 0;
    while (t < c->n_tok && c->logits_row[t] < 0) t++;
    return t;
}

int64_t pi_bytes_before_ffn(const pi_session *s, int32_t l, int32_t from) {
    const pi_layer *w = &s->model->layer[l];
    int64_t n = pi_attention_of(w) ? pi_attention_weight_bytes(w) + pi_attention_bytes(s, l, from) : 0;
    if (pi_recurrent_of(w)) n += pi_recurrent_bytes(s, pi_recurrent_of(w));
    return n;
}

static void record(pi_session *s, const te_team *team, int32_t l, int32_t from, int64_t t0, int64_t t1, int64_t t2) {
    const pi_layer *w = &s->model->layer[l];
    pi_layer_step st = {.n_tokens = s->chunk.n_tok - from, .n_sparse = pi_n_sparse(&s->chunk, from)};
    const int64_t listed = pi_sum_counts(s, l, team->nth, &st);
    if (s->options.sparsity != PI_SPARSITY_PREDICTED)
        st.n_predicted = listed;
    else if (st.n_sparse && pi_ffn_of(w))
        st.ffn_bytes += pi_predictor_bytes(s->model, pi_ffn_of(w));
    st.bytes = st.ffn_bytes + pi_bytes_before_ffn(s, l, from);
    if (pi_attention_of(w) && !st.n_tokens) st.bytes -= pi_attention_query_bytes(w);
    if (pi_experts_of(w)) st.n_routes = (int64_t)st.n_tokens * pi_experts_of(w)->n_used;
    st.ffn_us = (float)((double)(t2 - t1) * 1e-3);
    st.layer_us = (float)((double)(t2 - t0) * 1e-3);
    s->step[l] = st;
    s->last_bytes += st.bytes;
}

void pi_step_logits(pi_session *s, te_team *team) {
    const pi_model *m = s->model;
    int64_t lo, hi;
    te_share(team, m->info.n_vocab, 64, &lo, &hi);
    for (int32_t t = 0; t < s->chunk.n_tok; t++) {
        if (s->chunk.logits_row[t] < 0) continue;
        float *row = s->logits + (size_t)s->chunk.logits_row[t] * (size_t)m->info.n_vocab;
        if (m->logit_cap > 0)
            m->kernels->soft_cap(row + lo, (int32_t)(hi - lo), m->logit_scale, m->logit_cap);
        else
            for (int64_t i = lo; i < hi; i++) row[i] *= m->logit_scale;
    }
}

void pi_step_hidden(const pi_session *s, const te_team *team) {
    const size_t n = (size_t)s->model->info.n_embd;
    for (int32_t t = team->ith; s->options.keep_hidden && t < s->chunk.n_tok; t += team->nth)
        pi_norm_row(s->model, &s->model->output_norm, s->x + n * (size_t)t,
                    s->all_hidden + n * (size_t)s->chunk.batch_row[t]);
}

void pi_step_head(pi_session *s, te_team *team) {
    const pi_model *m = s->model;
    const pi_chunk *c = &s->chunk;
    const size_t n = (size_t)m->info.n_embd, n_vocab = (size_t)m->info.n_vocab;
    if (!c->n_logits) return;
    for (int32_t t = team->ith; t < c->n_tok; t += team->nth)
        if (c->logits_row[t] >= 0)
            pi_norm_row(m, &m->output_norm, s->x + (size_t)t * n, s->hidden + (size_t)c->logits_row[t] * n);
    te_barrier(team);
    /* Together: tokens that are computed in the same way and have rows one after the other, with others between. */
    for (int32_t t = 0, many, row; t < c->n_tok;) {
        const te_way way = t < c->n_prefill ? TE_BY_GEMM : TE_BY_ROWS;
        const int32_t end = way == TE_BY_GEMM ? c->n_prefill : c->n_tok;
        for (many = 0, row = -1; t < end && (c->logits_row[t] < 0 || !many || c->logits_row[t] == row + many); t++) {
            if (c->logits_row[t] < 0) continue;
            if (many++ == 0) row = c->logits_row[t];
        }
        if (many == 0) continue;
        const float *hidden = s->hidden + (size_t)row * n;
        const te_linear out = {
            .w = m->output, .bias = m->output_b, .y = s->logits + (size_t)row * n_vocab, .ldy = n_vocab, .way = way};
        te_op_linear(team, s->ws, &out, 1, hidden, n, many);
        pi_adapt(s, team, &m->output_adapter, hidden, n, many, out.way, out.y, n_vocab);
    }
    if (!pi_changes_logits(m)) return;
    te_barrier(team);
    pi_step_logits(s, team);
}

static void prepare(pi_block_run *r) {
    r->y = pi_residual_open(r);
    r->block->kind->prepare(r);
}

static void run(pi_block_run *r) {
    r->block->kind->run(r);
    pi_residual_close(r);
    te_barrier(r->team);
}

/* What the layer leaves of tokens from `from` on is multiplied. */
static void scale_rows(pi_session *s, te_team *team, float by, int32_t from) {
    const int64_t n = s->model->info.n_embd;
    int64_t lo, hi;
    te_share(team, (s->chunk.n_tok - from) * n, 16, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) s->x[from * n + i] *= by;
    te_barrier(team);
}

void pi_step_blocks(pi_session *s, te_team *team, int32_t l, int32_t first, int32_t end, int32_t from) {
    const pi_layer *layer = &s->model->layer[l];
    const int32_t tail = layer->n_blocks - layer->n_tail;
    if (!first && !pi_attention_of(layer)) pi_attention_next(team, l);
    for (int32_t i = 0; !first && i < layer->n_blocks; i++) {
        pi_block_run r = {s, team, layer, &layer->block[i], l, from, 0, NULL};
        if ((i < end || i >= tail) && r.block->kind->begin) r.block->kind->begin(&r);
    }
    for (int32_t i = first; i < end; i++) {
        pi_block_run r = {s, team, layer, &layer->block[i], l, from, 0, NULL};
        prepare(&r);
        te_barrier(team);
        run(&r);
    }
}

void pi_step_layer(pi_session *s, te_team *team, int32_t l) {
    const pi_layer *layer = &s->model->layer[l];
    const bool leader = team->ith == 0;
    const int32_t from = pi_first_wanted(s, l);
    pi_block_run blocks[PI_MAX_BLOCKS];
    int64_t t[PI_MAX_BLOCKS + 1];
    s->count[(ptrdiff_t)l * s->options.n_threads + team->ith] = (pi_layer_count){0};
    t[0] = leader ? te_os_now_ns() : 0;
    if (!pi_attention_of(layer)) pi_attention_next(team, l);
    for (int32_t i = 0; i < layer->n_blocks; i++) {
        blocks[i] = (pi_block_run){s, team, layer, &layer->block[i], l, from, 0, NULL};
        if (layer->block[i].kind->begin) layer->block[i].kind->begin(&blocks[i]);
    }
    for (int32_t i = 0; layer->parallel && i < layer->n_blocks; i++) prepare(&blocks[i]);
    if (layer->parallel) te_barrier(team);
    for (int32_t i = 0; i < layer->n_blocks; i++) {
        if (!layer->parallel) {
            prepare(&blocks[i]);
            te_barrier(team);
        }
        run(&blocks[i]);
        if (leader) t[i + 1] = te_os_now_ns();
    }
    if (layer->scale) scale_rows(s, team, *layer->scale, from);
    if (leader) record(s, team, l, from, t[0], t[layer->n_blocks - 1], t[layer->n_blocks]);
}
