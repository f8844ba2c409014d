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
 *
 * Work queues: a word per chain holds the queue's number, the next part and whether one is under way. Nothing is set back
 * between queues: a word with an older number is a chain that nobody has begun, one with a newer number belongs to one
 * that others could begin only because this one has no part left.
 *
 * The size of the team: beside other programs runs may have fewer members (te_team_size.c). Members read from time to time
 * how the system treated them. Those that are too many are parked, asleep on a word of their own.
 */
#include "te_pool.h"

#include <stdatomic.h>
#include <stdbool.h>

#include "te_os.h"
#include "te_team_size.h"

/* Words that different members write lie this far apart: two lines, since x86 prefetches lines in pairs. */
#define APART 128

/* A wake-up costs some tens of microseconds, so spinning for about that long at most doubles what any wait costs. */
#define SPIN_NS 80000
/* With more spinning members than CPUs, spinning keeps off the CPU the very member that is waited for. */
#define SPIN_CROWDED_NS 2000
#define RELAX_PER_CLOCK 16 /* a look at the clock costs as much as a few turns */
#define RELAX_PER_LOOK  4  /* and one at all chains */

#define N_COUNTERS 5

/* A wake-up of an idle CPU is a delay, too, of some tens of microseconds; nobody else had the CPU then. */
#define WAKE_UP_NS 50000
/* A thread that wakes up is put on an idle CPU if there is one; the system is slower to move one that never sleeps. */
#define NAP_NS 100000

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

/* Of a work queue: number << 32 | under way (ordered chains) << 31 | next part. */
typedef struct te_chain {
    _Atomic uint64_t state;
    char pad[APART - sizeof(uint64_t)];
} te_chain;
#define UNDER_WAY (UINT64_C(1) << 31)

typedef struct te_member {
    te_pool *pool;
    int32_t ith;
    uint32_t generation; /* of the last run it knows of */
    te_thread thread;
    _Atomic bool parked; /* set by the member, reset by the caller */
    bool has_times;      /* times are of this thread, not of an earlier caller's */
    te_thread_times times;
    int64_t waited_ns, ran_ns; /* in the last window; wake-ups are no waits; ran_ns < 0: not known */
    int64_t idle_ns;           /* in runs since te_team_size_next looked for room */
    te_chain chain;
} te_member;

struct te_pool {
    /* Set by the caller before `generation` moves; read by members after. */
    te_task *task;
    void *ctx;
    _Atomic bool stop;
    bool measure; /* members shall say how the system treated them */
    uint32_t n_queues;
    int32_t n_threads;
    int32_t n_logical;
    int64_t process_id;
    te_member *members; /* n_threads; [0] is the caller and has no thread */
    /* Only the caller looks at these. */
    const void *caller; /* whose delays members[0] has */
    int64_t run_ns;     /* of this window */
    int64_t last_ns;    /* of the last run */
    int64_t milli;      /* of a CPU, thousandths: what members had in the last window */
    int64_t looked_ns;  /* runs since te_team_size_next looked for room */
    int64_t beside_ns;  /* CPU time that other teams of this process had meanwhile */
    te_team_size size;  /* members read nap_ns */
    char pad[APART];
    _Atomic int32_t n_live; /* members of the runs now */
    te_word generation;
    te_word phase;
    te_word park; /* changes when somebody is to leave the park */
    _Atomic uint32_t arrived;
    char pad_arrived[APART - sizeof(uint32_t)];
    te_counter counters[N_COUNTERS];
};

/* Members of all runs under way in this process, against which the CPUs are counted; and the process that the count is
 * of, once it forked. */
static _Atomic int32_t n_running;
static _Atomic int64_t n_running_process;
/* What these members have of the CPUs, in thousandths of one. */
static _Atomic int64_t running_milli;

/* The futex calls take the word as the plain integer that it is in memory. */
_Static_assert(sizeof(_Atomic uint32_t) == sizeof(uint32_t), "an atomic word is its value");

static void word_change(te_word *w, uint32_t value) {
    atomic_store(&w->value, value);
    if (atomic_load(&w->sleepers) != 0) te_os_wake((const uint32_t *)(const void *)&w->value);
}

/* How long it pays to wait without sleeping. */
static int64_t spin_ns(int32_t n_logical) {
    return atomic_load_explicit(&n_running, memory_order_relaxed) > n_logical ? SPIN_CROWDED_NS : SPIN_NS;
}

/* Both return once the word is not `old`. */
static void word_sleep(te_word *w, uint32_t old) {
    atomic_fetch_add(&w->sleepers, 1);
    while (atomic_load(&w->value) == old) te_os_wait((const uint32_t *)(const void *)&w->value, old, -1);
    atomic_fetch_sub_explicit(&w->sleepers, 1, memory_order_relaxed);
}

/* One turn of a spin loop, in which a few lines of what comes next are fetched; more would keep a member from seeing that
 * its wait is over. */
static void relax(te_team *team) {
    enum { LINE = 64, LINES = 4 };
    te_spans *a = &team->ahead;
    if (a->at == a->n) {
        te_os_relax();
        return;
    }
    const char *first = a->span[a->at].first;
    size_t left = a->span[a->at].n_bytes;
    for (int i = 0; i < LINES && left > 0; i++) {
        __builtin_prefetch(first, 0, 2);
        first += LINE;
        left -= left < LINE ? left : LINE;
    }
    a->span[a->at].first = first;
    a->span[a->at].n_bytes = left;
    a->at += left == 0;
}

/* team: whose member waits, or NULL between runs. */
static void word_await(te_word *w, uint32_t old, int32_t n_logical, te_team *team) {
    int64_t deadline = 0;
    for (;;) {
        for (int i = 0; i < RELAX_PER_CLOCK; i++) {
            if (atomic_load_explicit(&w->value, memory_order_acquire) != old) return;
            if (team)
                relax(team);
            else
                te_os_relax();
        }
        const int64_t now = te_os_now_ns();
        if (deadline == 0) deadline = now + spin_ns(n_logical);
        if (now >= deadline) break;
    }
    word_sleep(w, old);
}

void te_barrier(te_team *team) {
    te_pool *p = team->pool;
    if (team->nth == 1) return;
    const uint32_t sense = team->sense++;
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) + 1 == (uint32_t)team->nth) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed); /* ordered before the next arrivals by the phase */
        word_change(&p->phase, sense + 1);
    } else {
        word_await(&p->phase, sense, p->n_logical, team);
    }
}

void te_counter_reset(te_team *team, int32_t which) {
    atomic_store_explicit(&team->pool->counters[which].next, 0, memory_order_relaxed);
}

int64_t te_counter_take(te_team *team, int32_t which, int64_t n) {
    return atomic_fetch_add_explicit(&team->pool->counters[which].next, n, memory_order_relaxed);
}

/* ---- work queues ---- */

static uint32_t number_of(uint64_t state) { return (uint32_t)(state >> 32); }

/* How many parts of a chain nobody has taken. */
static int32_t left(const te_work *d, uint64_t state) {
    if (number_of(state) == d->number) {
        /* Members that saw different inputs, in a run that fails, may have cut the chain differently. */
        const int32_t n = d->n_parts - (int32_t)(state & (UNDER_WAY - 1));
        return n > 0 ? n : 0;
    }
    return (int32_t)(number_of(state) - d->number) > 0 ? 0 : d->n_parts;
}

typedef enum taken { TAKEN, NOT_NOW, NOTHING_LEFT } taken;

/* NOT_NOW: what is left has to wait for the part that is under way. */
static taken take(te_work *d, te_member *members, int32_t chain) {
    _Atomic uint64_t *state = &members[chain].chain.state;
    uint64_t old = atomic_load_explicit(state, memory_order_relaxed);
    for (;;) {
        const int32_t n = left(d, old);
        if (n == 0) return NOTHING_LEFT;
        if (number_of(old) == d->number && (old & UNDER_WAY)) return NOT_NOW;
        const int32_t part = d->n_parts - n;
        const uint64_t now = (uint64_t)d->number << 32 | (d->ordered ? UNDER_WAY : 0) | (uint64_t)(part + 1);
        if (atomic_compare_exchange_weak_explicit(state, &old, now, memory_order_acquire, memory_order_relaxed)) {
            d->chain = chain;
            d->part = part;
            return TAKEN;
        }
    }
}

void te_work_begin(te_team *team, te_work *d, int32_t n_parts, bool ordered) {
    *d = (te_work){-1, 0, team->pool->n_threads, n_parts, ++team->n_queues, ordered};
}

/* Of the chains of all, first its own, but those of members that are not here must not fall behind. */
static taken take_any(const te_team *team, te_work *d) {
    te_member *members = team->pool->members;
    for (int32_t i = team->nth; i < d->n_chains; i++) {
        const uint64_t own = atomic_load_explicit(&members[team->ith].chain.state, memory_order_relaxed),
                       other = atomic_load_explicit(&members[i].chain.state, memory_order_relaxed);
        if (left(d, other) > left(d, own) && take(d, members, i) == TAKEN) return TAKEN;
    }
    taken best = NOTHING_LEFT;
    for (int32_t i = 0; i < d->n_chains; i++) {
        const int32_t at = team->ith + i;
        const taken t = take(d, members, at < d->n_chains ? at : at - d->n_chains);
        if (t == TAKEN) return t;
        if (t == NOT_NOW) best = t;
    }
    return best;
}

bool te_work_next(te_team *team, te_work *d) {
    const bool finished = d->chain >= 0; /* a part of this queue, which others may now go on from */
    if (d->ordered && finished)
        atomic_store_explicit(&team->pool->members[d->chain].chain.state,
                              (uint64_t)d->number << 32 | (uint64_t)(d->part + 1), memory_order_release);
    int64_t deadline = 0;
    for (;;) {
        const taken t = take_any(team, d);
        if (t != NOT_NOW) return t == TAKEN;
        /* Those who work on these chains go on with them; without a CPU they come back when others have given up. So a part
         * may still be under way when others have left the queue, and its end would be taken for one of a newer queue's. */
        const int64_t now = te_os_now_ns();
        if (deadline == 0) deadline = now + spin_ns(team->pool->n_logical);
        if (now >= deadline) return false;
        for (int i = 0; i < RELAX_PER_LOOK; i++) relax(team);
    }
}

/* ---- members ---- */

/* How the system treated this thread since it was asked last; the first time that is not known. */
static void measure(te_member *m) {
    te_thread_times now = {0};
    const bool has_times = te_team_system.times(&now), known = has_times && m->has_times;
    const int64_t waited = now.delay_ns - m->times.delay_ns - (now.n_dispatched - m->times.n_dispatched) * WAKE_UP_NS;
    m->waited_ns = known && waited > 0 ? waited : 0;
    m->ran_ns = known ? now.ran_ns - m->times.ran_ns : -1;
    m->has_times = has_times;
    m->times = now;
}

static void nap(int64_t ns) {
    static const uint32_t never;
    te_os_wait(&never, 0, ns);
}

/* One member's part of one run. The last barrier tells the caller that all have returned. */
static void take_part(te_pool *p, int32_t ith) {
    te_team team = {.pool = p,
                    .ith = ith,
                    .nth = atomic_load_explicit(&p->n_live, memory_order_relaxed),
                    .sense = atomic_load_explicit(&p->phase.value, memory_order_relaxed),
                    .n_queues = p->n_queues};
    if (p->size.nap_ns > 0 && p->members[ith].waited_ns >= p->size.nap_ns) nap(NAP_NS);
    p->task(p->ctx, &team);
    if (p->measure) measure(&p->members[ith]);
    te_barrier(&team);
    if (ith == 0) p->n_queues = team.n_queues;
}

static void member_main(void *arg) {
    te_member *m = arg;
    te_pool *p = m->pool;
    for (;;) {
        word_await(&p->generation, m->generation, p->n_logical, NULL);
        const uint32_t park = atomic_load_explicit(&p->park.value, memory_order_acquire);
        if (atomic_load(&p->stop)) return;
        if (m->ith < atomic_load_explicit(&p->n_live, memory_order_relaxed)) {
            m->generation++;
            take_part(p, m->ith);
            continue;
        }
        atomic_store_explicit(&m->parked, true, memory_order_release);
        for (uint32_t seen = park; atomic_load_explicit(&m->parked, memory_order_acquire) && !atomic_load(&p->stop);
             seen = atomic_load_explicit(&p->park.value, memory_order_acquire))
            word_sleep(&p->park, seen);
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
        m->has_times = false;
        atomic_store_explicit(&m->parked, false, memory_order_relaxed);
        *status = te_os_thread_start(&m->thread, member_main, m, "te-pool");
        if (*status != TE_OK) return i;
    }
    return p->n_threads;
}

static void word_step(te_word *w) { word_change(w, atomic_load_explicit(&w->value, memory_order_relaxed) + 1); }

static void stop_members(te_pool *p, int32_t n_started) {
    atomic_store(&p->stop, true);
    word_step(&p->generation);
    word_step(&p->park);
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
    te_team_size_begin(&p->size, n_threads);
    p->milli = 1000 * n_threads;
    atomic_store_explicit(&p->n_live, n_threads, memory_order_relaxed);
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
    if (atomic_exchange(&n_running_process, p->process_id) != p->process_id) {
        atomic_store(&n_running, 0);
        atomic_store(&running_milli, 0);
    }
    atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&p->n_live, p->n_threads, memory_order_relaxed);
    te_team_size_begin(&p->size, p->n_threads);
    for (int32_t i = 0; i < p->n_threads; i++)
        atomic_store_explicit(&p->members[i].chain.state, (uint64_t)p->n_queues << 32, memory_order_relaxed);
    atomic_store_explicit(&p->park.sleepers, 0, memory_order_relaxed);
    atomic_store_explicit(&p->generation.sleepers, 0, memory_order_relaxed);
    atomic_store_explicit(&p->phase.sleepers, 0, memory_order_relaxed);
    int32_t first = 1;
    for (;;) {
        te_status status;
        first = start_members(p, first, &status);
        if (status == TE_OK) return;
        nap(10000000); /* a run can't fail; the system's limit on threads may have room again a little later */
    }
}

/* To n members, or as many as are parked. */
static void grow(te_pool *p, int32_t n_live, int32_t n) {
    const uint32_t generation = atomic_load_explicit(&p->generation.value, memory_order_relaxed);
    int32_t i = n_live;
    while (i < n && atomic_load_explicit(&p->members[i].parked, memory_order_acquire))
        p->members[i++].generation = generation;
    if (i == n_live) return;
    atomic_store_explicit(&p->n_live, i, memory_order_relaxed);
    while (i > n_live) atomic_store_explicit(&p->members[--i].parked, false, memory_order_release);
    word_step(&p->park);
}

/* After a window of runs: whether the team is as many as the CPUs that it is given. */
static void fit_team(te_pool *p) {
    const int32_t n_live = atomic_load_explicit(&p->n_live, memory_order_relaxed);
    te_window w = {.n_live = n_live, .run_ns = p->run_ns};
    int64_t ran_ns = 0;
    for (int32_t i = 0; i < n_live; i++) {
        te_member *m = &p->members[i];
        w.waited_ns += m->waited_ns;
        if (m->ran_ns >= 0) m->idle_ns += p->run_ns - m->ran_ns;
        ran_ns += m->ran_ns >= 0 && m->ran_ns < p->run_ns ? m->ran_ns : p->run_ns;
        if (m->idle_ns > 0) w.idle_ns += m->idle_ns; /* < 0: it ran between runs, as the caller does */
    }
    p->milli = 1000 * ran_ns / (p->run_ns + 1); /* of a coarse clock a window may be 0 */
    p->looked_ns += p->run_ns;
    w.n_beside = (double)p->beside_ns / (double)(p->looked_ns + 1);
    bool looked;
    const int32_t n = te_team_size_next(&p->size, &w, &looked);
    for (int32_t i = 0; looked && i < p->n_threads; i++) p->members[i].idle_ns = 0;
    if (looked) p->looked_ns = p->beside_ns = 0;
    if (n < n_live)
        atomic_store_explicit(&p->n_live, n, memory_order_relaxed);
    else
        grow(p, n_live, n);
    p->run_ns = 0;
}

void te_pool_run(te_pool *p, te_task *task, void *ctx) {
    p->task = task;
    p->ctx = ctx;
    for (int i = 0; i < N_COUNTERS; i++) atomic_store_explicit(&p->counters[i].next, 0, memory_order_relaxed);
    if (p->n_threads == 1) {
        atomic_fetch_add_explicit(&running_milli, 1000, memory_order_relaxed);
        take_part(p, 0);
        atomic_fetch_sub_explicit(&running_milli, 1000, memory_order_relaxed);
        return;
    }
    if (p->process_id != te_os_process_id()) restart_in_child(p);
    static _Thread_local char self;
    if (p->caller != &self) p->members[0].has_times = false;
    p->caller = &self;
    p->measure = p->run_ns + p->last_ns >= TE_WINDOW_NS;
    const int32_t n_live = atomic_load_explicit(&p->n_live, memory_order_relaxed);
    const int64_t begun = te_os_now_ns();
    const int64_t milli = p->milli;
    atomic_fetch_add_explicit(&n_running, n_live, memory_order_relaxed);
    atomic_fetch_add_explicit(&running_milli, milli, memory_order_relaxed);
    word_step(&p->generation);
    take_part(p, 0);
    atomic_fetch_sub_explicit(&n_running, n_live, memory_order_relaxed);
    p->last_ns = te_os_now_ns() - begun;
    p->run_ns += p->last_ns;
    p->beside_ns +=
        (atomic_fetch_sub_explicit(&running_milli, milli, memory_order_relaxed) - milli) * p->last_ns / 1000;
    if (p->measure) fit_team(p);
}
