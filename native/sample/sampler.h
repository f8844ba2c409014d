/* sampler.h - what the engine's own files ask of a sampler. */
#ifndef PI_SAMPLER_H
#define PI_SAMPLER_H

#include "../powerinfer.h"

/* How many logits pi_sampler_sample reads. */
int32_t pi_sampler_n_vocab(const pi_sampler *sampler);

/* How many of the largest logits pi_sampler_sample decides by; 0: by all of them. */
int32_t pi_sampler_n_largest(const pi_sampler *sampler);
/* pi_sampler_sample by these alone, n >= 1: the logit's bits and in the lower half the token, falling, equal ones by token. All
 * that are finite, where they are fewer than pi_sampler_n_largest. */
int32_t pi_sampler_sample_largest(pi_sampler *sampler, const uint64_t *largest, int32_t n);

/* ARGUMENT for options out of their ranges. */
pi_status pi_sampling_check(const pi_sampling *options);

#endif
