/* cache.h - where the experts of mixtures are: which of them have a place on their layer's device, and who moves there.
 *
 * Experts are at home in host memory, all of them; a place holds a copy. Nobody else writes pi_hybrid's `place`, or `hot`
 * and `cold` of a mixture's layers. A step reads them as they were when it began. */
#ifndef PI_CACHE_H
#define PI_CACHE_H

#include "hybrid.h"

typedef struct pi_expert_cache pi_expert_cache;

/* Layers' hot and cold ids are what the plan says. live: experts that are used more take the places of others. Errors:
 * MEMORY. */
pi_status pi_cache_open(pi_hybrid *h, bool live);
void pi_cache_close(pi_hybrid *h);
/* Before a step: what has arrived gets its place. Errors: DEVICE, of a copy on its way. */
pi_status pi_cache_settle(pi_hybrid *h);
/* After a step of n_tok tokens that took so long, whose uses are in the devices' counts: starts copies of experts that
 * will pay, no more than disturb the next step little. */
void pi_cache_follow(pi_hybrid *h, int32_t n_tok, int64_t ns);
/* Which share of a layer's experts without a place n_tok tokens will want, from 0 to 1: an estimate. */
double pi_cache_wanted(const pi_hybrid *h, int32_t l, int32_t n_tok);
/* A layer's numbers since the session was opened. */
pi_expert_counts pi_cache_counts(const pi_hybrid *h, int32_t l);

#endif
