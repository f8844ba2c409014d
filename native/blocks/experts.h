/* experts.h - what computes the routes of a mixture of experts, on the CPU, once experts are chosen. */
#ifndef PI_EXPERTS_H
#define PI_EXPERTS_H

#include "ops.h"

/* Some of a chunk's routes, any of them. All members of a team give the same. */
typedef struct pi_route_list {
    int32_t n;             /* 0 .. n_batch * n_used */
    const int32_t *token;  /* [n] ascending, 0 .. n_tok-1; NULL: every token has n_used, one after the other */
    const int32_t *expert; /* [n] 0 .. n_expert-1; a token's are different */
    const float *weight;   /* [n] */
} pi_route_list;

/* y[t] = sum of t's routes, in their order, of weight * expert(h[t]); 0 where it has none. add: added to y instead.
 * h, y: [n_tok][n_embd], n_tok <= n_batch; they do not overlap. By row kernels: a token's bits are those it has alone, for
 * generated tokens. Counts in s->count of layer l what is read. Uses s->routes, s->gate and s->up, but for a chunk's
 * scores, experts and weights. Begins behind a barrier, ends without one. */
void pi_experts_rows(const pi_session *s, te_team *team, const pi_block *block, int32_t l, const pi_route_list *routes,
                     const float *h, float *y, int32_t n_tok, bool add);
/* The same by matrix products, for tokens of a prompt. */
void pi_experts_gemm(const pi_session *s, te_team *team, const pi_block *block, int32_t l, const pi_route_list *routes,
                     const float *h, float *y, int32_t n_tok, bool add);
/* Rows of what experts gave under a norm. Begins and ends with a barrier. */
void pi_experts_norm(const pi_session *s, te_team *team, const pi_norm *norm, float *y, int32_t n_tok);
/* The expert that all tokens use, if there is one: added to y. As the others, but for routes. */
void pi_experts_shared(const pi_session *s, te_team *team, const pi_block *block, int32_t l, const float *h, float *y,
                       int32_t n_tok, te_way way);

#endif
