/* te_pool.h - a persistent team of threads that run one function together and meet at barriers.
 *
 * Every member runs the same straight-line code on its own share (SPMD); a barrier stands wherever one member reads
 * what another wrote:
 *
 *     static void step(void *ctx, te_team *team) {
 *         half_of_the_work(ctx, team->ith, team->nth);
 *         te_barrier(team);
 *         the_rest(ctx, team->ith, team->nth);
 *     }
 *     te_pool_run(pool, step, ctx); // the calling thread is member 0
 */
#ifndef TE_POOL_H
#define TE_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "te_status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct te_pool te_pool;

/* What a member is likely to read soon (te_ahead_add). */
enum { TE_MOST_SPANS = 4 };
typedef struct te_spans {
    int32_t n, at; /* spans before `at` have been fetched */
    struct {
        const char *first;
        size_t n_bytes;
    } span[TE_MOST_SPANS];
} te_spans;

typedef struct te_team {
    te_pool *pool;
    int32_t ith;       /* 0..nth-1 */
    int32_t nth;       /* members of this run: the pool's, or fewer while other programs keep their CPUs from them */
    uint32_t sense;    /* of the next barrier; private to te_pool */
    uint32_t n_queues; /* begun in this run; private to te_pool */
    te_spans ahead;
    uint32_t turn; /* 0 when a run begins; for operations that use buffers in turn: changed only behind a barrier, so
                        * that what was read in a turn is free again in the next but one */
} te_team;

typedef void te_task(void *ctx, te_team *team);

/* n_threads >= 1 members; n_threads - 1 threads are started now, spin for a bounded time when idle, then sleep. */
te_status te_pool_new(int32_t n_threads, te_pool **out);
void te_pool_free(te_pool *p); /* NULL is allowed; no run may be under way */
int32_t te_pool_n_threads(const te_pool *p);

/* Runs task on all members and returns when all have returned. One run at a time per pool; the caller sees to that.
 * A team is as fast as its slowest member, so where members had to wait for CPUs that other programs used, or missed them,
 * the next runs have fewer of them, and later more again (te_team_size.h). Results must therefore not depend on team->nth: outputs that do not
 * overlap may be shared out by it, sums are cut by te_pool_n_threads. */
void te_pool_run(te_pool *p, te_task *task, void *ctx);

/* What this member is likely to read soon: while it waits for others, at barriers and for parts of a work queue, it fetches
 * that into its cache, in the order in which it was added. Memory has time then. begin: nothing more from now on. That is to be
 * called before the operation in front of the one that reads what is added, so that nothing is fetched behind it once more. add:
 * what is more than TE_MOST_SPANS is left out. */
static inline void te_ahead_begin(te_team *team) { team->ahead.n = team->ahead.at = 0; }
static inline void te_ahead_add(te_team *team, const void *first, size_t n_bytes) {
    te_spans *a = &team->ahead;
    if (n_bytes == 0 || a->n == TE_MOST_SPANS) return;
    a->span[a->n].first = (const char *)first;
    a->span[a->n++].n_bytes = n_bytes;
}

/* All members arrive before any leaves; what was written before is visible after. */
void te_barrier(te_team *team);

/* Members take consecutive numbers 0, 1, 2 ... from a shared counter. te_counter_reset: by one member, between two
 * barriers. */
void te_counter_reset(te_team *team, int32_t which);              /* which: 0..4 */
int64_t te_counter_take(te_team *team, int32_t which, int64_t n); /* returns the first of n numbers */

/* Share i of `count` of n items in units of `unit`: [*lo, *hi). Shares differ by one unit at most. */
static inline void te_share_of(int32_t i, int32_t count, int64_t n, int64_t unit, int64_t *lo, int64_t *hi) {
    const int64_t units = (n + unit - 1) / unit;
    *lo = units * i / count * unit;
    *hi = units * (i + 1) / count * unit;
    if (*lo > n) *lo = n;
    if (*hi > n) *hi = n;
}

/* This member's share. */
static inline void te_share(const te_team *team, int64_t n, int64_t unit, int64_t *lo, int64_t *hi) {
    te_share_of(team->ith, team->nth, n, unit, lo, hi);
}

/* A work queue: parts are handed out while they are done, so that a member whose CPU another program also uses does
 * less of it. There is a chain for each of the pool's threads, and each chain has the same number of parts. A member
 * goes through its own chain, then helps with the others, the chains of members that are not in this run among them.
 * ordered: a chain's parts are done one after the other, whoever does them; each sees what the one before it wrote.
 * Thus a sum per chain has one order, whatever the timing.
 *
 *     te_work d;
 *     te_work_begin(team, &d, n_parts, ordered);
 *     while (te_work_next(team, &d)) work_on(d.chain, d.part);
 *
 * All members begin the same queues in the same order, and go on until there is no next; no barrier is needed before,
 * and what was done is complete after the next one, which has to come between an ordered queue and the next queue. */
typedef struct te_work {
    int32_t chain, part; /* what to do */
    int32_t n_chains, n_parts;
    uint32_t number; /* of this queue */
    bool ordered;
} te_work;
void te_work_begin(te_team *team, te_work *d, int32_t n_parts, bool ordered); /* n_parts: 1..65535 */
bool te_work_next(te_team *team, te_work *d);

/* The part's share of n items in units of `unit`: a chain is a run of items, its parts follow each other. */
static inline void te_work_share(const te_work *d, int64_t n, int64_t unit, int64_t *lo, int64_t *hi) {
    int64_t first, last;
    te_share_of(d->chain, d->n_chains, n, unit, &first, &last);
    te_share_of(d->part, d->n_parts, last - first, unit, lo, hi);
    *lo += first;
    *hi += first;
}

#ifdef __cplusplus
}
#endif
#endif
