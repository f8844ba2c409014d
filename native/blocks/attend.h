/* attend.h - what others than its own block need of attention. */
#ifndef PI_ATTEND_H
#define PI_ATTEND_H

#include "../state/state.h"

/* Makes ready what the next layer's attention takes pieces from: for a layer whose attention is computed elsewhere. A
 * barrier must lie between this and what was before, and what comes after. */
void pi_attention_next(te_team *team, int32_t l);
/* Bytes of K and V that the attention of tokens `from` and later reads in layer l; tokens that are taken together read
 * them once. */
int64_t pi_attention_bytes(const pi_session *s, int32_t l, int32_t from);
/* Writes K and V of the chunk (after q/k norm and RoPE) and computes att of tokens `from` and later, rows of
 * n_head * pi_value_width values; of a decode chunk from must be 0. Contains a barrier; ends without one. */
void pi_attend_chunk(pi_session *s, te_team *team, int32_t l, int32_t from);
/* What a member's scratch must hold. */
pi_attention_room pi_attention_room_of(const pi_session *s);

#endif
