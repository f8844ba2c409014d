/* dry.h - the DRY penalty ("don't repeat yourself") of sampler.c: against whole sequences that come again.
 *
 * With h[0 .. n) the last tokens, r how many stand behind the last breaker, and for each place j with h[j] no breaker
 *   L(j)  the largest L <= min(r, j) with h[j-L .. j) = h[n-L .. n)
 * the logit of a token loses multiplier * base ^ (L - allowed_length), L the largest L(j) of the places j that hold it,
 * if that is allowed_length or more.
 */
#ifndef PI_DRY_H
#define PI_DRY_H

#include <stdbool.h>
#include <stdint.h>

#include "../powerinfer.h"

typedef struct pi_dry {
    float multiplier, base;
    int32_t allowed_length;
    int64_t window; /* tokens looked back at; INT64_MAX: all; 0: off */
    int32_t n_vocab;
    bool *is_breaker; /* [n_vocab] */
    int32_t *longest; /* [n_vocab] the longest match before each token, 0 between calls */
    int32_t *history; /* the last n tokens, and earlier ones until there is no more room */
    int32_t *match;   /* [size] of the history read backwards: how far it agrees with its beginning */
    int64_t n, size;
} pi_dry;

/* False without memory. What dry holds must be freed in any case. */
bool pi_dry_open(pi_dry *dry, const pi_sampling *options, int32_t n_vocab);
void pi_dry_close(pi_dry *dry);
void pi_dry_reset(pi_dry *dry);
/* False without memory; nothing is changed then. */
bool pi_dry_accept(pi_dry *dry, int32_t token);
/* Lowers logits [n_vocab]; those that are -inf stay so. */
void pi_dry_penalise(pi_dry *dry, float *logits);

#endif
