/* te_pool.h - a persistent team of threads that run one function together and meet at barriers.
 *
 * Every member runs the same straight-line code on its own share (SPMD); a barrier stands wherever one member reads
 * what another wrote:
 *
 *     static void step(void *ctx, te_team *team) { half_of_the_work(ctx, team->ith, team->nth); te_barrier(team);
 * the_rest(...); } te_pool_run(pool, step, ctx);            // the calling thread is member 0
 */
#ifndef TE_POOL_H
#define TE_POOL_H

#include <stddef.h>
#include <stdint.h>

#include "te_status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct te_pool te_pool;

typedef struct te_team {
    te_pool *pool;
    int32_t ith; /* 0..nth-1 */
    int32_t nth;
    uint32_t sense; /* of the next barrier; private to te_pool */
} te_team;

typedef void te_task(void *ctx, te_team *team);

/* n_threads >= 1 members; n_threads - 1 threads are started now, spin for a bounded time when idle, then sleep. */
te_status te_pool_new(int32_t n_threads, te_pool **out);
void te_pool_free(te_pool *p); /* NULL is allowed; no run may be under way */
int32_t te_pool_n_threads(const te_pool *p);

/* Runs task on all members and returns when all have returned. One run at a time per pool; the caller sees to that. */
void te_pool_run(te_pool *p, te_task *task, void *ctx);

/* All members arrive before any leaves; what was written before is visible after. */
void te_barrier(te_team *team);

/* Members take consecutive numbers 0, 1, 2 ... from a shared counter. te_counter_reset: by one member, between two
 * barriers. */
void te_counter_reset(te_team *team, int32_t which);              /* which: 0..3 */
int64_t te_counter_take(te_team *team, int32_t which, int64_t n); /* returns the first of n numbers */

/* This member's share [*lo, *hi) of n items in units of `unit` (shares differ by one unit at most; the same every
 * time). */
static inline void te_share(const te_team *team, int64_t n, int64_t unit, int64_t *lo, int64_t *hi) {
    const int64_t units = (n + unit - 1) / unit;
    *lo = units * team->ith / team->nth * unit;
    *hi = units * (team->ith + 1) / team->nth * unit;
    if (*lo > n) *lo = n;
    if (*hi > n) *hi = n;
}

#ifdef __cplusplus
}
#endif
#endif
