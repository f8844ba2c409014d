/* experts.h - what others than the forward pass ask of a mixture of experts. */
#ifndef PI_BLOCKS_EXPERTS_H
#define PI_BLOCKS_EXPERTS_H

#include "../state/state.h"

/* y [n_tok][n_embd] = the sum over n routes of weight[i] * expert[i](h of token[i]), by row kernels. Routes are in the order
 * of their tokens. All members call it with the same arguments, behind a barrier; ends with one. */
void pi_experts_rows(pi_session *s, te_team *team, int32_t l, const pi_block *b, const float *h, int32_t n_tok,
                     const int32_t *token, const int32_t *expert, const float *weight, int32_t n, float *y);

#endif
