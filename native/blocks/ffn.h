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
/* The bytes that a predictor reads for a token. */
int64_t pi_predictor_bytes(const pi_model *m, const pi_ffn *w);

/* The fused operator's matrices, and what it does with them. */
te_ffn pi_ffn_operator(const pi_model *m, const pi_ffn *w);
/* Lets the operator keep the hidden values of n tokens, which go to s->up from token t0 on: 0 where it computes none. This
 * member's share is cleared; ends without a barrier. */
void pi_keep_hidden(pi_session *s, const te_team *team, const pi_ffn *w, int32_t t0, int32_t n, te_ffn_io *io);
/* What adapters of gate and up add to a few tokens' products, made for te_op_ffn in io (and where hidden values are
 * kept, since down's adapter wants them; zeroed). s->gate and s->up are then in use. Ends with a barrier; a layer without
 * adapters of the feed-forward: does nothing. */
void pi_adapt_ffn(pi_session *s, te_team *team, const pi_layer *layer, const float *x, int32_t t0, int32_t n_tok,
                  te_ffn_io *io);
/* What n members have counted in layer l, added up; returns the listed pairs. */
int64_t pi_sum_counts(const pi_session *s, int32_t l, int32_t n, pi_layer_step *step);
/* A down stored by output was read as a whole. */
void pi_count_down(pi_session *s, const te_team *team, int32_t l, const te_mat *down);

#endif
