/* ffn.h - what others than its own block need of the feed-forward. */
#ifndef PI_FFN_H
#define PI_FFN_H

#include "ops.h"

/* How many of the tokens `from` and later are sparse: all but the prompt tokens of predicted mode. */
int32_t pi_n_sparse(const pi_chunk *c, int32_t from);
/* predict.c. Predicted mode: marks (s->mask) and lists (s->list) the neurons for the chunk's sparse tokens, `from` and
 * later, from x, the residual that the predictor reads, or, in a sign predictor's case, from h; returns the list's
 * length. Contains barriers and ends with one. Otherwise does nothing and returns 0. */
int32_t pi_predict(pi_session *s, te_team *team, const pi_layer *layer, int32_t l, int32_t from);
/* Whether some of the chunk's tokens are masked by a predictor. */
bool pi_has_mask(const pi_session *s);

#endif
