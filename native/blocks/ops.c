/* ops.c - norms, products, taps and the door to the residual stream. */
#include "ops.h"

#include <string.h>

#include "experts.h"

void pi_norm_row(const pi_model *m, const pi_norm *w, const float *x, float *y) {
    if (!w->w)
        memcpy(y, x, sizeof *y * (size_t)m->info.n_embd);
    else if (m->arch->layer_norm)
        m->kernels->layer_norm(x, w->w, w->b, m->norm_eps, m->info.n_embd, y);
    else
        m->kernels->rms_norm(x, w->w, m->norm_eps, m->info.n_embd, y);
}

/* Of blocks side by side those with the last one's norm read what it reads. */
static bool shares_input(const pi_block_run *r) {
    const pi_layer *l = r->layer;
    return !l->parallel || r->block->norm.w == l->block[l->n_blocks - 1].norm.w;
}

float *pi_block_input(const pi_block_run *r) { return shares_input(r) ? r->s->h : r->s->h2; }

void pi_make_input(const pi_block_run *r, int32_t from) {
    const pi_session *s = r->s;
    const pi_block *first = &r->layer->block[0];
    if (!r->block->norm.w && s->model->arch->recurrent_beside) return; /* it reads what the one before it read */
    if (r->layer->parallel && r->block != first && r->block->norm.w == first->norm.w) return;
    float *y = pi_block_input(r);
    for (int32_t t = from + r->team->ith; t < s->chunk.n_tok; t += r->team->nth) {
        const size_t at = (size_t)t * (size_t)s->model->info.n_embd;
        pi_norm_row(s->model, &r->block->norm, s->x + at, y + at);
    }
}

void pi_linear(pi_session *s, te_team *team, const te_linear *products, int32_t n_products, const float *x, size_t ldx,
               int32_t t0, int32_t n) {
    enum { MOST = 4 };
    const int32_t left = s->chunk.n_prefill - t0, n_prefill = left < 0 ? 0 : left < n ? left : n;
    te_linear some[MOST];
    for (int32_t i = 0; i < n_products && i < MOST; i++) {
        some[i] = products[i];
        some[i].way = TE_BY_GEMM;
    }
    if (n_prefill > 0) te_op_linear(team, s->ws, some, n_products, x, ldx, n_prefill);
    if (n_prefill == n) return;
    for (int32_t i = 0; i < n_products && i < MOST; i++) {
        some[i].y += some[i].ldy * (size_t)n_prefill;
        some[i].way = TE_BY_ROWS;
    }
    te_op_linear(team, s->ws, some, n_products, x + ldx * (size_t)n_prefill, ldx, n - n_prefill);
}

/* The gates of the experts that the only token's router has chosen, in the order in which they are read. */
static void experts_ahead(const pi_session *s, te_team *team, const pi_experts *w) {
    te_mat gate[TE_MOST_SPANS];
    int32_t n = 0;
    for (int32_t last = -1; n < TE_MOST_SPANS && n < w->n_used; n++) {
        int32_t next = w->n_expert;
        for (int32_t i = 0; i < w->n_used; i++) {
            const int32_t e = s->routes.expert[i];
            if (e > last && e < next) next = e;
        }
        if (next == w->n_expert) break;
        gate[n] = w->gate.w ? pi_expert_rows(&w->gate, next, w->n_ff) : w->gate;
        last = next;
    }
    te_op_experts_ahead(team, gate, n, PI_AHEAD);
}

void pi_ahead(const pi_block_run *r) {
    const pi_session *s = r->s;
    const pi_model *m = s->model;
    const pi_layer *layer = r->layer;
    if (!s->chunk.decode) return;
    te_ahead_begin(r->team);
    if (s->hybrid) return; /* which has ways of its own to look ahead */
    const pi_block *next = r->block + 1;
    if (next == layer->block + layer->n_blocks) {
        if (r->l + 1 == m->info.n_layer) {
            te_op_linear_ahead(r->team, &(const te_mat *){&m->output}, 1, PI_AHEAD);
            return;
        }
        next = m->layer[r->l + 1].block;
    }
    if (next->kind == &pi_attention_kind) {
        const pi_attention *w = &next->attention;
        const te_mat *qkv[] = {&w->q, &w->k, &w->v};
        te_op_linear_ahead(r->team, qkv, w->borrows ? 1 : w->v.w ? 3 : 2, PI_AHEAD);
    } else if (next->kind == &pi_experts_kind) {
        const pi_experts *w = &next->experts;
        if (!w->early)
            te_op_linear_ahead(r->team, &(const te_mat *){&w->router}, 1, PI_AHEAD);
        else if (w->down_t.w && s->chunk.n_tok == 1)
            experts_ahead(s, r->team, w);
    }
}

void pi_tap_rows(const pi_session *s, const te_team *team, const float *rows, int32_t n, float *tap) {
    if (!tap) return;
    for (int32_t t = team->ith; t < s->chunk.n_tok; t += team->nth)
        memcpy(tap + (size_t)s->chunk.batch_row[t] * (size_t)n, rows + (size_t)t * (size_t)n, sizeof *rows * (size_t)n);
}

/* ---- the residual stream ---- */

static bool goes_through(const pi_block *b) { return b->post_norm.w != NULL; }

float *pi_residual_open(const pi_block_run *r) {
    pi_session *s = r->s;
    if (!goes_through(r->block)) return s->x;
    const int64_t n_embd = s->model->info.n_embd;
    int64_t lo, hi;
    te_share(r->team, (s->chunk.n_tok - r->from) * n_embd, 16, &lo, &hi);
    memset(s->out + r->from * n_embd + lo, 0, sizeof *s->out * (size_t)(hi - lo));
    return s->out;
}

void pi_residual_close(const pi_block_run *r) {
    pi_session *s = r->s;
    const pi_model *m = s->model;
    if (!goes_through(r->block)) return;
    te_barrier(r->team);
    for (int32_t t = r->from + r->team->ith; t < s->chunk.n_tok; t += r->team->nth) {
        float *y = s->out + (size_t)t * (size_t)m->info.n_embd;
        pi_norm_row(m, &r->block->post_norm, y, y);
        m->kernels->add(y, m->info.n_embd, s->x + (size_t)t * (size_t)m->info.n_embd);
    }
}
