/* sampler.h - what the engine's own files ask of a sampler. */
#ifndef PI_SAMPLER_H
#define PI_SAMPLER_H

#include "../powerinfer.h"

/* How many logits pi_sampler_sample reads. */
int32_t pi_sampler_n_vocab(const pi_sampler *sampler);

/* ARGUMENT for options out of their ranges. */
pi_status pi_sampling_check(const pi_sampling *options);

#endif
