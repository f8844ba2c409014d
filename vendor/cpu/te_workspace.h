/* te_workspace.h - private to te_ops.c, te_ffn.c, te_experts.c: scratch memory of a team, and how operations lay it out. */
#ifndef TE_WORKSPACE_H
#define TE_WORKSPACE_H

#include "../core/te_pool.h"
#include "te_ops.h"

/* Row kernels take at most so many tokens at a time: one pass over the weights each. */
enum { TE_WORKSPACE_TOKENS = 32 };

/* An expert's products in te_op_experts_gemm, and te_op_linear_floats, take at most so many; the latter's floats take as much
 * as the bf16 of twice as many. */
enum { TE_SLICE_TOKENS = 288, TE_FLOATS_TOKENS = TE_SLICE_TOKENS / 2 };

/* Members write only their own part, so that no two share a cache line; sums belong to a chain of a work queue, and whoever
 * has one of its parts writes there. Sums come in two sets, used in turn: whoever starts the next operation cannot
 * overwrite what a slower member still adds up. An operation has a barrier between its sums being complete and being
 * read, hence at most one operation lies between two members. */
typedef struct te_member {
    void *act[2];   /* packed activations of TE_WORKSPACE_TOKENS tokens, for two formats */
    float *sums[2]; /* of the chain of this number: TE_WORKSPACE_TOKENS vectors of te_acc_floats(max_cols) */
    float *queue;   /* te_ffn.c: what is known of waiting neurons, TE_QUEUE_FLOATS for each token */
    float *floats;  /* products, before they are added to what is there */
    void *gemm;     /* the GEMM's scratch */
    void *slice;    /* of a mixture: activations of TE_SLICE_TOKENS tokens as the GEMM wants them */
    void *hidden;   /* and hidden values, where the kernels give them so */
} te_member;

struct te_workspace {
    const te_kernels *k;
    te_workspace_limits limits;
    size_t n_bytes; /* of the allocation that all pointers lie in */
    void *memory;
    void *packed; /* activations of all tokens as the GEMM wants them; shared */
    void *together[2]
                  [2]; /* packed activations of TE_WORKSPACE_TOKENS tokens for two formats, shared: two sets, in turn */
    size_t act_stride; /* bytes of one token's activations */
    size_t sum_stride; /* floats of one token's sums */
    te_member member[];
};

enum { TE_QUEUE_FLOATS = 96 };
enum { TE_COUNTER_UNITS = 4 }; /* the pool's counter that hands units of matrix products out */

/* Which functions of te_gemm_kernels multiply with matrices of a type, and with transposed ones. */
typedef void te_gemm_pack(const float *x, size_t ldx, const int32_t *row, int32_t n_tok, int32_t k, int32_t t0,
                          int32_t t1, void *px);
typedef void te_gemm_fn(const te_mat *m, int32_t first, int32_t last, const void *px, int32_t n_tok, float *y,
                        size_t ldy, const float *bias, bool add, void *scratch);
typedef struct te_gemm_way {
    te_gemm_pack *pack;
    te_gemm_fn *gemm;
    size_t (*token_bytes)(int32_t n_tok, int32_t k); /* of n packed tokens that may be copied one by one; else NULL */
} te_gemm_way;
te_gemm_way te_gemm_of(const te_kernels *k, int32_t type);
te_gemm_way te_gemm_t_of(const te_kernels *k);

static inline const te_row_kernels *te_rows_of(const te_workspace *ws, const te_mat *m) { return &ws->k->row[m->type]; }

typedef void te_pack_fn(const float *x, int32_t cols, void *act);

/* Set of packed activations `which`, token t. */
static inline void *te_act(const te_workspace *ws, const te_member *me, int32_t which, int32_t t) {
    return (char *)me->act[which] + ws->act_stride * (size_t)t;
}

/* Packs n_tok <= TE_WORKSPACE_TOKENS tokens for matrices of m's type into set `which`, unless *packed_for (at first NULL) says
 * that they are. */
static inline void te_pack(const te_workspace *ws, const te_member *me, int32_t which, const te_mat *m, const float *x,
                           size_t ldx, int32_t n_tok, te_pack_fn **packed_for) {
    te_pack_fn *pack = te_rows_of(ws, m)->act_pack;
    if (*packed_for == pack) return;
    for (int32_t t = 0; t < n_tok; t++) pack(x + ldx * (size_t)t, m->cols, te_act(ws, me, which, t));
    *packed_for = pack;
}

/* Activations that the whole team packs, for up to two formats: else each member packs them all, and of 32 tokens of
 * Llama-2-7B that is a sixth of 16 members' time. Few tokens and few members are not worth waiting for each other. */
typedef struct te_together {
    int32_t n;
    const te_row_kernels *by[2];
    const void *act[2];
} te_together;
/* Whether it pays; false for a workspace that has no room for it. */
bool te_packs_together(const te_team *team, const te_workspace *ws, int32_t n_tok);
/* Adds the format of m, if there is room for it. */
void te_together_add(te_together *p, const te_workspace *ws, const te_mat *m);
/* Packs n_tok <= TE_WORKSPACE_TOKENS tokens of cols columns for the formats that were added. Contains a barrier, and turns the
 * sets over. */
void te_pack_together(te_team *team, const te_workspace *ws, te_together *p, int32_t cols, const float *x, size_t ldx,
                      int32_t n_tok);
/* What was packed for m's format; NULL: nothing was. */
const void *te_together_of(const te_together *p, const te_workspace *ws, const te_mat *m);

/* Adds rows r0..r1-1 to what the member fetches while it waits, as far as *left bytes reach, of which they then take theirs. */
static inline void te_ahead_rows(te_team *team, const te_mat *m, int64_t r0, int64_t r1, size_t *left) {
    const size_t all = m->stride * (size_t)(r1 - r0), n = all < *left ? all : *left;
    te_ahead_add(team, (const char *)m->w + m->stride * (size_t)r0, n);
    *left -= n;
}

/* The sums of a chain for token t. */
static inline float *te_sums(const te_workspace *ws, const te_team *team, int32_t chain, int32_t t) {
    return ws->member[chain].sums[team->turn & 1] + ws->sum_stride * (size_t)t;
}

/* Zeroes the sums of a chain for n_tok rows of cols columns: who has its first part. */
void te_sums_begin(const te_workspace *ws, const te_team *team, int32_t chain, int32_t n_tok, int32_t cols);

/* The columns that this member adds up: whole cache lines, since one who has more holds up all. */
static inline void te_sums_share(const te_team *team, int32_t cols, int64_t *lo, int64_t *hi) {
    te_share(team, cols, 16, lo, hi);
}

/* y[c] += token t's sums of all chains in their order, lo <= c < hi, as acc_add wants them. */
void te_sums_add(const te_team *team, const te_workspace *ws, const te_work *d, const te_mat *m, int32_t t, int32_t lo,
                 int32_t hi, float *y);

/* After the queue's members have added to its chains' sums with m's axpy: y_t += the chains' sums in their order, this member's
 * share of the columns. If first, y is set to bias (NULL: 0) before. Contains a barrier, and turns the sums over. */
void te_sums_end(te_team *team, te_workspace *ws, const te_work *d, const te_mat *m, int32_t n_tok, float *y,
                 size_t ldy, bool first, const float *bias);

#endif
