/* te_experts_run.h - private to te_experts.c, te_experts_neurons.c: one call of te_op_experts by one member. */
#ifndef TE_EXPERTS_RUN_H
#define TE_EXPERTS_RUN_H

#include "te_experts.h"
#include "te_pass.h"

typedef struct te_experts_run {
    te_team *team;
    te_workspace *ws;
    te_member *me;
    const te_mixture *m;
    te_ffn_counts *counts;
} te_experts_run;

static inline int32_t te_smaller(int32_t a, int32_t b) { return a < b ? a : b; }

static inline void te_count_rows(const te_experts_run *r, const te_mat *m, int32_t n) {
    r->counts->rows += n;
    r->counts->bytes += (int64_t)te_row_bytes(m->type, m->cols) * n;
}

static inline void te_add_bias(const float *b, int32_t n, float *y) {
    for (int32_t i = 0; b && i < n; i++) y[i] += b[i];
}

/* Ungated neurons cannot: their only product before down's is up's. */
static inline bool te_silences(const te_mixture *m) {
    return m->skip && te_is_relu(m->act) && m->n_experts && m->expert[0].gate.w;
}

/* Packed inputs are member 0's, which all read. */
static inline const char *te_experts_input(const te_experts_run *r, int32_t which, int32_t t) {
    return te_act(r->ws, &r->ws->member[0], which, t);
}

static inline te_ffn te_operator_of(const te_mixture *m, const te_expert *e) {
    return (te_ffn){.gate = e->gate, .up = e->up, .down = e->down_t, .act = m->act, .threshold = m->threshold};
}

/* The tokens of an expert, a bit for each. */
static inline uint32_t te_tokens_of(const te_mixture *m, const te_expert *e) {
    uint32_t bits = 0;
    for (int32_t i = 0; i < e->n; i++) bits |= 1u << m->token[e->first + i];
    return bits;
}

/* Rows that come next: while the last ones are worked on, the first of these are fetched. */
static inline te_ahead te_next_rows(const te_mat *m, int32_t row) {
    const int32_t n = (int32_t)(8192 / (m->stride + 1)) + 2;
    return (te_ahead){m, {NULL, row, te_smaller(n, m->n_rows - row)}};
}

static inline size_t te_all_bytes(const te_mat *m) { return m->stride * (size_t)m->n_rows; }

/* Into how many parts a member's share of so many bytes is cut: as te_op_linear does. */
static inline int32_t te_parts_of(const te_team *team, size_t n_bytes) {
    enum { PART_BYTES = 64 << 10, MOST = 8 };
    const size_t n = n_bytes / (size_t)te_pool_n_threads(team->pool) / PART_BYTES;
    return n < 1 ? 1 : n > MOST ? MOST : (int32_t)n;
}

/* Hidden values of neurons j0..j1-1 of an expert, or with sums its tokens' sums of down's rows; silent neurons are left
 * out. next: the rows that this member reads after these neurons. */
void te_experts_neurons(const te_experts_run *r, const te_expert *e, int32_t j0, int32_t j1, float *sums,
                        te_ahead next);
/* All of it, down by neuron. */
void te_experts_by_neuron(const te_experts_run *r);

#endif
