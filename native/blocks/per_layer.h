/* per_layer.h - embeddings per layer. */
#ifndef PI_PER_LAYER_H
#define PI_PER_LAYER_H

#include "../state/state.h"

/* Makes the embeddings of the chunk's tokens for all layers, of x; ends with a barrier. A model without: does nothing. */
void pi_per_layer_embed(pi_session *s, te_team *team);

#endif
