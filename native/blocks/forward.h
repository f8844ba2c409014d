/* forward.h - the stages of a chunk's way through the model, as the members of a team call them. */
#ifndef PI_FORWARD_H
#define PI_FORWARD_H

#include "../state/state.h"

/* Whether the caller wants the feed to end, if it is time to ask. By the thread that feeds. */
bool pi_step_is_stopped(pi_session *s);
/* Whether the chunk ends in front of layer l, behind which the CPU computes one of its layers. The leader asks a layer ahead:
 * barriers lie between, so all members see the same, and leave together. */
bool pi_step_ends_before(pi_session *s, const te_team *team, int32_t l);
/* cos and sin of the chunk's token t, of each variant of RoPE: rows of cs, n_rows of a variant before those of the next. */
void pi_step_angles(const pi_session *s, int32_t t, int32_t n_rows, float *cs);
void pi_step_embed(pi_session *s, te_team *team);
/* The first token whose output of layer l is wanted. Behind the last layer only logits are made of it, and its K and V
 * are kept for all tokens: of a prompt that asks for its last token's logits this saves most of a layer. */
int32_t pi_first_wanted(const pi_session *s, int32_t l);
/* Bytes that a layer's blocks in front of its feed-forward read for the chunk: weights, K and V, states. */
int64_t pi_bytes_before_ffn(const pi_session *s, int32_t l, int32_t from);
/* Blocks first to end - 1 of a layer, others of which are computed elsewhere, for the chunk's tokens from `from` on. With the
 * first block those begin that are at the layer's end, too. */
void pi_step_blocks(pi_session *s, te_team *team, int32_t l, int32_t first, int32_t end, int32_t from);
void pi_step_layer(pi_session *s, te_team *team, int32_t l);
/* Final hidden states of all the chunk's tokens, where the session keeps them; ends without a barrier. */
void pi_step_hidden(const pi_session *s, const te_team *team);
void pi_step_head(pi_session *s, te_team *team);
/* What becomes of the chunk's logits behind the output product; the head calls it where the CPU computes that. */
void pi_step_logits(pi_session *s, te_team *team);

#endif
