/* te_experts.h - operations of a whole team over some of many feed-forwards: those that a mixture's router has chosen.
 *
 * A route is a token and one of its experts, a place a route's number in the order of the experts: an expert's routes have
 * the places first ... first+n-1, by token. */
#ifndef TE_EXPERTS_H
#define TE_EXPERTS_H

#include "te_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An expert that some token has chosen. Formats and sizes are the same for all experts of a mixture. */
typedef struct te_expert {
    te_mat gate, up;                     /* [n_ff][cols]; gate.w NULL when not gated, then down_t.w is NULL, too */
    te_mat down;                         /* [cols][n_ff], or w NULL */
    te_mat down_t;                       /* [n_ff][cols] instead: row j belongs to neuron j */
    const float *gate_b, *up_b, *down_b; /* [n_ff], [n_ff], [cols]; or NULL */
    int32_t first, n;                    /* places; n >= 1 */
} te_expert;

/* y[t] (+)= sum over t's routes, in their order, of weight * down_e . (act(gate_e . x[t]) * (up_e . x[t])), or
 * down_e . act(up_e . x[t]) without a gate, with the biases; add false: tokens without a route get 0. */
typedef struct te_mixture {
    const te_expert *expert; /* [n_experts] those of a token always in the same order */
    int32_t n_experts;
    te_activation act;
    float threshold;
    bool skip; /* RELU, DRELU and RELU2, generated tokens: rows of silent neurons are left out; the same bits */
    int32_t n_tok, n_routes, cols;
    const int32_t *place; /* [n_routes] of the routes in the order of their tokens */
    const int32_t *token; /* [n_routes] by place: a row of x */
    const float *weight;  /* [n_routes] by place */
    const float *x;       /* [n_tok] rows of cols, ldx floats apart */
    size_t ldx;
    float *y;
    size_t ldy;
    bool add;
    float *gate, *hidden; /* [n_routes][n_ff] room to work, by place but for prompts; gate is for them only */
    float *out;           /* [n_routes][cols] by place */
} te_mixture;

/* By row kernels, for up to 32 tokens: each gets the bits that it gets alone. Whatever is read of an expert is read once
 * for all of its tokens; members share its bytes. te_op_experts_pack comes first, which asks the matrices for their
 * formats alone, then a barrier; contains barriers, ends without one. counts: added to. */
void te_op_experts_pack(const te_team *team, te_workspace *ws, const te_mat *gate, const te_mat *up, const float *x,
                        size_t ldx, int32_t n_tok);
void te_op_experts(te_team *team, te_workspace *ws, const te_mixture *m, te_ffn_counts *counts);
/* While this member waits for others, it fetches up to n_bytes of what it will read first in te_op_experts of one token, down by
 * neuron: the gates of these experts, in their order. */
void te_op_experts_ahead(te_team *team, const te_mat *gate, int32_t n, size_t n_bytes);
/* By matrix products, any number of tokens: the same bits however many others are computed with it. The order of the experts
 * does not matter: the largest should come first. Begins behind a barrier, contains some, ends without one. */
void te_op_experts_gemm(te_team *team, te_workspace *ws, const te_mixture *m, te_ffn_counts *counts);

#ifdef __cplusplus
}
#endif
#endif
