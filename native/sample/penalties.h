/* penalties.h - the repeat, frequency and presence penalties of sampler.c: against single tokens that come again. */
#ifndef PI_PENALTIES_H
#define PI_PENALTIES_H

#include <stdbool.h>
#include <stdint.h>

#include "../powerinfer.h"

/* Accepted tokens, kept only when a penalty is on: a ring of the last `window`, and each distinct token in it with
 * its count. */
typedef struct pi_penalties {
    float repeat, frequency, presence;
    int64_t window; /* 0: off; INT64_MAX: all */
    int32_t *ring;
    int64_t n_ring, ring_size, ring_next;
    int32_t *count;    /* [n_vocab] */
    int32_t *distinct; /* [n_vocab], n_distinct of them valid */
    int32_t *place;    /* [n_vocab] where a token stands in distinct */
    int32_t n_distinct;
} pi_penalties;

/* False without memory. What penalties hold must be freed in any case. */
bool pi_penalties_open(pi_penalties *p, const pi_sampling *options, int32_t n_vocab);
void pi_penalties_close(pi_penalties *p);
void pi_penalties_reset(pi_penalties *p);
/* False without memory; nothing is changed then. */
bool pi_penalties_accept(pi_penalties *p, int32_t token);
/* Changes the logits of the distinct tokens; those that are -inf stay so. */
void pi_penalties_apply(const pi_penalties *p, float *logits);

#endif
