/* per_layer.h - embeddings per layer. */
#ifndef PI_PER_LAYER_H
#define PI_PER_LAYER_H

#include "../state/state.h"

/* Makes the embeddings of the chunk's tokens for all layers, of x; ends with a barrier. A model without: does nothing. */
void pi_per_layer_embed(pi_session *s, te_team *team);
/* y (+)= proj . (act(gate . in) * the embedding), of tokens from r->from on. in, y: [n_tok][n_embd]. Ends without a
 * barrier. */
void pi_per_layer_mix(const pi_block_run *r, const pi_per_layer *w, const float *in, float *y, bool add);
pi_status pi_per_layer_bind(pi_model *m, int32_t i, pi_per_layer *w);

#endif
