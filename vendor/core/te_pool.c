/* te_pool.c - a persistent team of threads: a generation word starts a run, a counting barrier with a phase word holds
 * it together.
 *
 * Waiting, everywhere: spin for a bounded time, then sleep on the word (a futex). A sleeper first counts itself in
 * `sleepers` and then looks at the word again; who changes the word changes it first and then looks at `sleepers`.
 * These four steps are sequentially consistent, so one of the two sees the other and no wake-up is lost; and nobody
 * makes a system call while nobody sleeps.
 *
 * The barrier: members count up `arrived`; the last one sets it back and moves `phase` on, which releases the others.
 * Each member remembers the phase it is in (te_team.sense), so a slow one that is still leaving a barrier is never
 * confused by the next one, which can't complete without it.
 */
#include "te_pool.h"

#include <stdatomic.h>
#include <stdbool.h>

#include "te_os.h"

/* Words that different members write lie this far apart: two lines, since x86 prefetches lines in pairs. */
#define APART 128

/* A wake-up costs some tens of microseconds, so spinning for about that long at most doubles what any wait costs. */
#define SPIN_NS 80000
/* With more spinning members than CPUs, spinning keeps off the CPU the very member that is waited for. */
#define SPIN_CROWDED_NS 2000
#define RELAX_PER_CLOCK 16 /* a look at the clock costs as much as a few turns */

#define N_COUNTERS 4

typedef struct te_word {
    _Atomic uint32_t value;
    char pad[APART - sizeof(uint32_t)];
    _Atomic uint32_t sleepers;
    char pad_after[APART - sizeof(uint32_t)];
} te_word;

typedef struct te_counter {
    _Atomic int64_t next;
    char pad[APART - sizeof(int64_t)];
} te_counter;

typedef struct te_member {
    te_pool *pool;
    int32_t ith;
    uint32_t generation; /* of the last run it took part in */
    te_thread thread;
} te_member;

struct te_pool {
    /* Set by the caller before `generation` moves; read by members after. */
    te_task *task;
    void *ctx;
    bool stop;
    int32_t n_threads;
    int32_t n_logical;
    int64_t process_id;
    te_member *members; /* n_threads; [0] is the caller and has no thread */
    char pad[APART];
    te_word generation;
    te_word phase;
    _Atomic uint32_t arrived;
    char pad_arrived[APART - sizeof(uint32_t)];
    te_counter counters[N_COUNTERS];
};

/* Members of all runs under way in this process, against which the CPUs are counted; and the process that the count is
 * of, once it forked. */
static _Atomic int32_t n_running;
static _Atomic int64_t n_running_process;

/* The futex calls take the word as the plain integer that it is in memory. */
_Static_assert(sizeof(_Atomic uint32_t) == sizeof(uint32_t), "an atomic word is its value");

static void word_change(te_word *w, uint32_t value) {
    atomic_store(&w->value, value);
    if (atomic_load(&w->sleepers) != 0) te_os_wake((const uint32_t *)(const void *)&w->value);
}

/* Returns once the word is not `old`. */
static void word_await(te_word *w, uint32_t old, int32_t n_logical) {
    int64_t deadline = 0;
    for (;;) {
        for (int i = 0; i < RELAX_PER_CLOCK; i++) {
            if (atomic_load_explicit(&w->value, memory_order_acquire) != old) return;
            te_os_relax();
        }
        const bool crowded = atomic_load_explicit(&n_running, memory_order_relaxed) > n_logical;
        const int64_t now = te_os_now_ns();
        if (deadline == 0) deadline = now + (crowded ? SPIN_CROWDED_NS : SPIN_NS);
        if (now >= deadline) break;
    }
    atomic_fetch_add(&w->sleepers, 1);
    while (atomic_load(&w->value) == old) te_os_wait((const uint32_t *)(const void *)&w->value, old, -1);
    atomic_fetch_sub_explicit(&w->sleepers, 1, memory_order_relaxed);
}

void te_barrier(te_team *team) {
    te_pool *p = team->pool;
    if (team->nth == 1) return;
    const uint32_t sense = team->sense++;
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) + 1 == (uint32_t)team->nth) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed); /* ordered before the next arrivals by the phase */
        word_change(&p->phase, sense + 1);
    } else {
        word_await(&p->phase, sense, p->n_logical);
    }
}

void te_counter_reset(te_team *team, int32_t which) {
    atomic_store_explicit(&team->pool->counters[which].next, 0, memory_order_relaxed);
}

int64_t te_counter_take(te_team *team, int32_t which, int64_t n) {
    return atomic_fetch_add_explicit(&team->pool->counters[which].next, n, memory_order_relaxed);
}

/* One member's part of one run. The last barrier tells the caller that all have returned. */
static void take_part(te_pool *p, int32_t ith) {
    te_team team = {p, ith, p->n_threads, atomic_load_explicit(&p->phase.value, memory_order_relaxed)};
    p->task(p->ctx, &team);
    te_barrier(&team);
}

static void member_main(void *arg) {
    te_member *m = arg;
    te_pool *p = m->pool;
    for (;;) {
        word_await(&p->generation, m->generation, p->n_logical);
        m->generation++;
        if (p->stop) return;
        take_part(p, m->ith);
    }
}

/* Starts the threads of members [first, n_threads); returns how many members there are then. */
static int32_t start_members(te_pool *p, int32_t first, te_status *status) {
    *status = TE_OK;
    const uint32_t generation = atomic_load_explicit(&p->generation.value, memory_order_relaxed);
    for (int32_t i = first; i < p->n_threads; i++) {
        te_member *m = &p->members[i];
        m->pool = p;
        m->ith = i;
        m->generation = generation;
        *status = te_os_thread_start(&m->thread, member_main, m, "te-pool");
        if (*status != TE_OK) return i;
    }
    return p->n_threads;
}

static void stop_members(te_pool *p, int32_t n_started) {
    p->stop = true;
    word_change(&p->generation, atomic_load_explicit(&p->generation.value, memory_order_relaxed) + 1);
    for (int32_t i = 1; i < n_started; i++) te_os_thread_join(&p->members[i].thread);
}

te_status te_pool_new(int32_t n_threads, te_pool **out) {
    *out = NULL;
    if (n_threads < 1 || n_threads > 1024)
        return te_fail(TE_ARGUMENT, "n_threads is %d, must be 1 to 1024", (int)n_threads);
    te_pool *p = te_os_alloc(sizeof *p);
    te_member *members = te_os_alloc((size_t)n_threads * sizeof *members);
    if (p == NULL || members == NULL) {
        te_os_free(p, sizeof *p);
        te_os_free(members, (size_t)n_threads * sizeof *members);
        return te_fail(TE_MEMORY, "no memory for a pool of %d threads", (int)n_threads);
    }
    p->n_threads = n_threads;
    p->n_logical = te_os_n_logical();
    p->process_id = te_os_process_id();
    p->members = members;
    te_status status;
    const int32_t n_started = start_members(p, 1, &status);
    if (status != TE_OK) {
        stop_members(p, n_started);
        te_os_free(members, (size_t)n_threads * sizeof *members);
        te_os_free(p, sizeof *p);
        return status;
    }
    *out = p;
    return TE_OK;
}

void te_pool_free(te_pool *p) {
    if (p == NULL) return;
    if (p->process_id == te_os_process_id())
        stop_members(p, p->n_threads); /* in a forked child there is nobody to stop */
    te_os_free(p->members, (size_t)p->n_threads * sizeof *p->members);
    te_os_free(p, sizeof *p);
}

int32_t te_pool_n_threads(const te_pool *p) { return p->n_threads; }

/* After a fork the child has the pool's memory, in whatever state it was, and none of its threads: it starts its own.
 */
static void restart_in_child(te_pool *p) {
    p->process_id = te_os_process_id();
    if (atomic_exchange(&n_running_process, p->process_id) != p->process_id) atomic_store(&n_running, 0);
    atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&p->generation.sleepers, 0, memory_order_relaxed);
    atomic_store_explicit(&p->phase.sleepers, 0, memory_order_relaxed);
    int32_t first = 1;
    for (;;) {
        te_status status;
        first = start_members(p, first, &status);
        if (status == TE_OK) return;
        /* A run can't fail; the system's limit on threads may have room again a little later. */
        static const uint32_t never;
        te_os_wait(&never, 0, 10000000);
    }
}

void te_pool_run(te_pool *p, te_task *task, void *ctx) {
    p->task = task;
    p->ctx = ctx;
    for (int i = 0; i < N_COUNTERS; i++) atomic_store_explicit(&p->counters[i].next, 0, memory_order_relaxed);
    if (p->n_threads > 1) {
        if (p->process_id != te_os_process_id()) restart_in_child(p);
        atomic_fetch_add_explicit(&n_running, p->n_threads, memory_order_relaxed);
        word_change(&p->generation, atomic_load_explicit(&p->generation.value, memory_order_relaxed) + 1);
    }
    take_part(p, 0);
    if (p->n_threads > 1) atomic_fetch_sub_explicit(&n_running, p->n_threads, memory_order_relaxed);
}
