/* pool_stress.c - te_pool under load: many runs, barriers and work queues, uneven members, several pools at once, idling,
 * forking.
 *
 *     pool_stress [ROUNDS]      prints what failed and exits with 1, or exits with 0
 *
 * Members hand plain (non-atomic) values to each other across barriers, so a thread sanitizer sees a barrier that does
 * not order.
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/te_os.h"
#include "core/te_pool.h"
#include "core/te_team_size.h"
#include "../stress.h"

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif

#define MAX_MEMBERS 16

static void sleep_us(long us) {
    const struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, NULL);
}

typedef struct exchange {
    int64_t slot[2][MAX_MEMBERS]; /* written by its member in one phase, read by all in the next */
    int64_t taken[MAX_MEMBERS];   /* sum of the numbers that a member took from the counter */
    int64_t run;
    int32_t n_barriers;
    int32_t sleeper; /* this member sleeps once, so that the others stop spinning; -1: none */
} exchange;

#define N_NUMBERS 100

static void exchange_task(void *ctx, te_team *team) {
    exchange *e = ctx;
    int64_t sum = 0;
    for (int32_t round = 0; round < e->n_barriers; round++) {
        int64_t *slot = e->slot[round % 2];
        slot[team->ith] = e->run * 1000003 + round * 31 + team->ith;
        if (round == e->n_barriers / 2 && team->ith == e->sleeper) sleep_us(300);
        te_barrier(team);
        for (int32_t i = 0; i < team->nth; i++) {
            const int64_t expected = e->run * 1000003 + round * 31 + i;
            CHECK(slot[i] == expected, "run %lld round %d: member %d reads %lld of member %d", (long long)e->run, round,
                  team->ith, (long long)slot[i], i);
        }
    }
    if (team->ith == team->nth - 1) te_counter_reset(team, 2);
    te_barrier(team);
    for (int64_t first; (first = te_counter_take(team, 2, 3)) < N_NUMBERS;)
        for (int64_t i = first; i < first + 3 && i < N_NUMBERS; i++) sum += i;
    e->taken[team->ith] = sum;
}

static void run_exchange(te_pool *pool, exchange *e) {
    memset(e->taken, 0, sizeof e->taken); /* a run may have fewer members than the pool */
    te_pool_run(pool, exchange_task, e);
    int64_t sum = 0;
    for (int32_t i = 0; i < te_pool_n_threads(pool); i++) sum += e->taken[i];
    CHECK(sum == N_NUMBERS * (N_NUMBERS - 1) / 2, "members took numbers that add up to %lld", (long long)sum);
}

/* ---- work queues ---- */

#define MAX_PARTS 12

/* Plain values, so that a thread sanitizer sees a part that begins before the one before it in its chain is complete. */
typedef struct dealing {
    int32_t n_chains, n_parts;
    int32_t done[2][MAX_MEMBERS][MAX_PARTS]; /* by an unordered deal, by an ordered one */
    int64_t sum[MAX_MEMBERS];                /* of a chain, in the order of its parts */
    int32_t n_by[MAX_MEMBERS];               /* parts that a member did */
    int32_t late;                            /* a member that is away when the deal begins; -1: none */
    int32_t slow;                            /* a member that is slow at each part; -1: none */
} dealing;

static void dealing_task(void *ctx, te_team *team) {
    dealing *g = ctx;
    te_work d;
    if (team->ith == g->late) sleep_us(500);
    te_work_begin(team, &d, g->n_parts, false);
    CHECK(d.n_chains == g->n_chains, "%d chains for %d threads", d.n_chains, g->n_chains);
    while (te_work_next(team, &d)) {
        g->done[0][d.chain][d.part]++;
        g->n_by[team->ith]++;
        if (team->ith == g->slow) sleep_us(100);
    }
    /* No barrier: those who are first begin the next deal while others still work on this one. */
    te_work_begin(team, &d, g->n_parts, true);
    while (te_work_next(team, &d)) {
        for (int32_t i = 0; i < d.n_parts; i++)
            CHECK((i < d.part) == (g->done[1][d.chain][i] != 0), "part %d of chain %d before or after part %d", d.part,
                  d.chain, i);
        g->done[1][d.chain][d.part]++;
        g->sum[d.chain] = g->sum[d.chain] * 3 + d.part;
        if (team->ith == g->slow) sleep_us(20);
    }
    te_barrier(team);
    /* Everything is done now, and every member sees it. */
    for (int32_t c = 0; c < g->n_chains; c++) {
        int64_t sum = 0;
        for (int32_t i = 0; i < d.n_parts; i++) {
            CHECK(g->done[0][c][i] == 1 && g->done[1][c][i] == 1, "part %d of chain %d was done %d and %d times", i, c,
                  g->done[0][c][i], g->done[1][c][i]);
            sum = sum * 3 + i;
        }
        CHECK(g->sum[c] == sum, "chain %d adds up to %lld, not %lld", c, (long long)g->sum[c], (long long)sum);
    }
}

static void stress_deals(int32_t n_runs) {
    for (int32_t n = 1; n <= 8; n++) {
        te_pool *pool;
        CHECK(te_pool_new(n, &pool) == TE_OK, "%s", te_last_error());
        uint32_t random = (uint32_t)n;
        for (int32_t run = 0; run < n_runs; run++) {
            random = random * 1664525u + 1013904223u;
            dealing g = {.n_chains = n, .n_parts = 1 + (int32_t)(random >> 20) % MAX_PARTS, .late = -1, .slow = -1};
            if ((random >> 8 & 7) == 0) g.late = (int32_t)(random >> 16) % n;
            if ((random >> 11 & 7) == 0) g.slow = (int32_t)(random >> 16) % n;
            te_pool_run(pool, dealing_task, &g);
        }
        te_pool_free(pool);
    }
}

/* ---- what is fetched in waits ---- */

typedef struct ahead {
    _Atomic bool comes; /* member 1 is on its way to the barrier */
    bool waited;        /* it was there first */
} ahead;

static void ahead_task(void *ctx, te_team *team) {
    static const char rows[3000];
    ahead *h = ctx;
    const te_spans *a = &team->ahead;
    if (team->ith == 0) {
        while (!atomic_load(&h->comes)) sleep_us(100);
        sleep_us(20000);
    }
    if (team->ith == 1) {
        te_ahead_begin(team);
        te_ahead_add(team, rows, 0);
        for (int i = 0; i < TE_MOST_SPANS + 1; i++) te_ahead_add(team, rows + i, 500);
        CHECK(a->n == TE_MOST_SPANS && a->at == 0, "%d spans", a->n);
        atomic_store(&h->comes, true);
    }
    te_barrier(team);
    if (a->at < a->n) return;
    for (int i = 0; i < a->n; i++)
        CHECK(a->span[i].n_bytes == 0 && a->span[i].first == rows + i + 512, "span %d: %zu bytes are left", i,
              a->span[i].n_bytes);
    if (team->ith == 1) h->waited = true;
}

static void check_ahead(void) {
    bool waited = false; /* in one of many tries nobody keeps the CPU from it meanwhile */
    for (int run = 0; run < 50 && !waited; run++) {
        te_pool *pool;
        CHECK(te_pool_new(2, &pool) == TE_OK, "%s", te_last_error());
        ahead h = {0};
        te_pool_run(pool, ahead_task, &h);
        waited = h.waited;
        te_pool_free(pool);
    }
    CHECK(waited, "a member that waited never fetched all of its spans");
}

/* Nobody waits for the work of a member that is away: the others do it. */
static void check_help(void) {
    te_pool *pool;
    CHECK(te_pool_new(2, &pool) == TE_OK, "%s", te_last_error());
    int32_t least = MAX_PARTS; /* in one of many tries the member that is here has its CPU all the time */
    for (int32_t run = 0; run < 50; run++) {
        dealing g = {.n_chains = 2, .n_parts = MAX_PARTS, .late = 1, .slow = -1};
        te_pool_run(pool, dealing_task, &g);
        if (g.n_by[1] < least) least = g.n_by[1];
    }
    CHECK(least < MAX_PARTS, "a member that was away did all of its %d parts", least);
    te_pool_free(pool);
}

typedef struct load {
    int32_t n_threads, n_runs, seed;
} load;

static void load_main(void *arg) {
    const load *l = arg;
    te_pool *pool;
    CHECK(te_pool_new(l->n_threads, &pool) == TE_OK, "%s", te_last_error());
    exchange e = {0};
    uint32_t random = (uint32_t)l->seed;
    for (e.run = 0; e.run < l->n_runs; e.run++) {
        random = random * 1664525u + 1013904223u;
        e.n_barriers = 1 + (int32_t)(random >> 28);
        e.sleeper = random >> 20 & 15 ? -1 : (int32_t)(random >> 16) % l->n_threads;
        run_exchange(pool, &e);
        if ((random >> 8 & 63) == 0) sleep_us(200); /* long enough for the idle members to fall asleep */
    }
    te_pool_free(pool);
}

static void stress_one_pool(int32_t n_runs) {
    for (int32_t n = 1; n <= 8; n++) load_main(&(load){n, n_runs, n});
}

static void stress_many_pools(int32_t n_runs) {
    te_thread threads[4];
    load loads[4];
    for (int32_t i = 0; i < 4; i++) {
        loads[i] = (load){1 + i % 3 + (i == 0), n_runs, 100 + i};
        CHECK(te_os_thread_start(&threads[i], load_main, &loads[i], "load") == TE_OK, "%s", te_last_error());
    }
    for (int32_t i = 0; i < 4; i++) te_os_thread_join(&threads[i]);
}

static void stress_new_free(int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        te_pool *pool;
        CHECK(te_pool_new(1 + i % 5, &pool) == TE_OK, "%s", te_last_error());
        exchange e = {.run = i, .n_barriers = 2, .sleeper = -1};
        if (i % 2) run_exchange(pool, &e);
        te_pool_free(pool);
    }
    te_pool_free(NULL);
}

/* A mutex-guarded plain counter: none of the additions may be lost. */
typedef struct guarded {
    te_mutex mutex;
    int64_t value;
} guarded;

static void add_main(void *arg) {
    guarded *g = arg;
    for (int i = 0; i < 20000; i++) {
        te_os_mutex_lock(&g->mutex);
        g->value++;
        te_os_mutex_unlock(&g->mutex);
    }
}

static void stress_mutex(void) {
    guarded g = {0};
    te_thread threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(te_os_thread_start(&threads[i], add_main, &g, "add") == TE_OK, "%s", te_last_error());
    for (int i = 0; i < 4; i++) te_os_thread_join(&threads[i]);
    CHECK(g.value == 80000, "80000 additions gave %lld", (long long)g.value);
}

static double cpu_seconds(void) {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

static void nothing_task(void *ctx, te_team *team) {
    (void)ctx;
    (void)team;
}

static void check_idle(void) {
    te_pool *pools[3];
    for (int i = 0; i < 3; i++) {
        CHECK(te_pool_new(4, &pools[i]) == TE_OK, "%s", te_last_error());
        te_pool_run(pools[i], nothing_task, NULL);
    }
    sleep_us(300000);
    const double before = cpu_seconds();
    sleep_us(1000000);
    const double used = cpu_seconds() - before;
    CHECK(used < 0.5, /* spinning would take all CPUs */ "three idle pools used %.3f s of CPU in one second", used);
    for (int i = 0; i < 3; i++) te_pool_free(pools[i]);
}

/* Members that wait at a barrier for one that is away must sleep: another program may want their CPUs. */
static void late_task(void *ctx, te_team *team) {
    (void)ctx;
    if (team->ith == 0) sleep_us(1000000);
    te_barrier(team);
}

static void check_late_member(void) {
    te_pool *pool;
    CHECK(te_pool_new(4, &pool) == TE_OK, "%s", te_last_error());
    const double before = cpu_seconds();
    te_pool_run(pool, late_task, NULL);
    const double used = cpu_seconds() - before;
    CHECK(used < 0.5, /* spinning would take three CPUs, or all of a smaller machine */
          "three members used %.3f s of CPU while they waited for one second", used);
    te_pool_free(pool);
}

/* What the system would say: whether every member waits for a CPU or has one half of the time, and of so many CPUs what share
 * other programs have; of 0 CPUs nothing. */
static struct {
    _Atomic bool waits, half;
    int32_t n_cpus;
    double share;
} system_says;

static bool say_times(te_thread_times *out) {
    static _Thread_local int64_t last_ns, ran_ns;
    const int64_t now = te_os_now_ns();
    /* All the time and far more: between two looks a member may have little of it where the machine is busy. */
    ran_ns += atomic_load(&system_says.half) ? (now - last_ns) / 2 : 1000 * (now - last_ns);
    last_ns = now;
    *out = (te_thread_times){.ran_ns = ran_ns, .delay_ns = atomic_load(&system_says.waits) ? now : 0};
    return true;
}
static bool say_others(int32_t *n_cpus, int64_t *busy_ns) {
    static int64_t last_ns, sum_ns;
    const int64_t now = te_os_now_ns();
    sum_ns += (int64_t)((double)(now - last_ns) * system_says.share * system_says.n_cpus);
    last_ns = now;
    *n_cpus = system_says.n_cpus;
    *busy_ns = sum_ns;
    return system_says.n_cpus > 0;
}

static void spin_task(void *ctx, te_team *team) {
    const int64_t end = te_os_now_ns() + 2000000;
    while (te_os_now_ns() < end) te_os_relax();
    if (team->ith == 0) *(int32_t *)ctx = team->nth;
}

/* Until a run has at least lo and at most hi members; how many it had. */
static int32_t run_until(te_pool *pool, int32_t lo, int32_t hi) {
    int32_t nth = 0;
    const int64_t end = te_os_now_ns() + INT64_C(60000000000);
    do te_pool_run(pool, spin_task, &nth);
    while ((nth < lo || nth > hi) && te_os_now_ns() < end);
    return nth;
}

/* RUNS runs have n members. */
static void check_stays(te_pool *pool, int32_t n, const char *where) {
    enum { RUNS = 300 };
    int32_t nth;
    for (int run = 0; run < RUNS; run++) {
        te_pool_run(pool, spin_task, &nth);
        CHECK(nth == n, "%d members instead of %d %s", nth, n, where);
    }
}

/* A team whose members wait for CPUs becomes smaller. It follows what others leave, or tries where that is not known. */
static void check_room(void) {
    enum { MEMBERS = 6, FEWEST = 2 };
    const te_team_asks before = te_team_system;
    te_team_system = (te_team_asks){say_times, say_others, te_os_now_ns};
    for (int known = 0; known < 2; known++) {
        te_pool *pool;
        CHECK(te_pool_new(MEMBERS, &pool) == TE_OK, "%s", te_last_error());
        system_says.n_cpus = known ? 2 * MEMBERS : 0;
        system_says.share = 2; /* all and more: the moments that the test's and the pool's clock are read differ */
        atomic_store(&system_says.waits, true);
        int32_t nth = run_until(pool, FEWEST, FEWEST);
        CHECK(nth == FEWEST, "a team that waits for CPUs has %d members", nth);
        atomic_store(&system_says.waits, false);
        if (known) check_stays(pool, FEWEST, "where others have all CPUs");
        atomic_store(&system_says.half, true);
        for (int32_t n = known ? 4 : 0; n > 2; n--) { /* of 12 CPUs they leave 4, then 3 */
            system_says.share = 1 - n / 12.0;
            nth = run_until(pool, n, n);
            CHECK(nth == n, "%d members where others leave %d CPUs", nth, n);
        }
        system_says.share = 0;
        nth = run_until(pool, MEMBERS, MEMBERS);
        CHECK(nth == MEMBERS, "known %d: %d members where nobody waits", known, nth);
        atomic_store(&system_says.half, false);
        te_pool_free(pool);
    }
    te_team_system = before;
}

/* Members that wait for late ones sleep instead of waiting for CPUs, so a whole team asks, too, what others leave. */
static void check_room_of_whole_team(void) {
    enum { MEMBERS = 6, LEFT = 4 };
    const te_team_asks before = te_team_system;
    te_team_system = (te_team_asks){say_times, say_others, te_os_now_ns};
    te_pool *pool;
    CHECK(te_pool_new(MEMBERS, &pool) == TE_OK, "%s", te_last_error());
    system_says.n_cpus = 2 * MEMBERS;
    system_says.share = 1 - LEFT / 12.0;
    check_stays(pool, MEMBERS, "that have all the CPUs they need");
    atomic_store(&system_says.half, true);
    int32_t nth = run_until(pool, LEFT, LEFT);
    CHECK(nth == LEFT, "%d members that miss CPUs where others leave %d", nth, LEFT);
    system_says.share = 0;
    nth = run_until(pool, MEMBERS, MEMBERS);
    CHECK(nth == MEMBERS, "%d members where others have nothing", nth);
    check_stays(pool, MEMBERS, "that miss CPUs which others do not have");
    system_says.n_cpus = 0;
    check_stays(pool, MEMBERS, "that miss CPUs where the system does not say who has them");
    atomic_store(&system_says.half, false);
    te_pool_free(pool);
    te_team_system = before;
}

/* A forked child has none of the pool's threads; using and freeing the pool there must work all the same. */
static void check_fork(void) {
#ifndef UNDER_TSAN /* its runtime gives up when a forked child starts a thread */
    te_pool *pool;
    CHECK(te_pool_new(3, &pool) == TE_OK, "%s", te_last_error());
    exchange e = {.run = 1, .n_barriers = 5, .sleeper = -1};
    run_exchange(pool, &e);
    te_pool_run(pool, dealing_task, &(dealing){.n_chains = 3, .n_parts = 5, .late = -1, .slow = -1});
    for (int uses = 0; uses < 3; uses++) {
        const pid_t child = fork();
        CHECK(child >= 0, "fork failed");
        if (child == 0) {
            alarm(30);
            for (e.run = 0; e.run < uses; e.run++) {
                run_exchange(pool, &e);
                te_pool_run(pool, dealing_task, &(dealing){.n_chains = 3, .n_parts = 5, .late = -1, .slow = -1});
            }
            te_pool_free(pool);
            _exit(0);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && status == 0, "the child that used the pool %d times ended with %d",
              uses, status);
    }
    run_exchange(pool, &e);
    te_pool_free(pool);
#endif
}

static void check_share(void) {
    for (int64_t n = 0; n < 200; n++)
        for (int32_t nth = 1; nth < 9; nth++)
            for (int64_t unit = 1; unit < 34; unit += 8) {
                int64_t end = 0, smallest = INT64_MAX, largest = 0;
                for (int32_t ith = 0; ith < nth; ith++) {
                    int64_t lo, hi;
                    te_share(&(te_team){.ith = ith, .nth = nth}, n, unit, &lo, &hi);
                    CHECK(lo == end && hi >= lo, "n %lld, unit %lld, member %d of %d: %lld..%lld after %lld",
                          (long long)n, (long long)unit, ith, nth, (long long)lo, (long long)hi, (long long)end);
                    CHECK(lo % unit == 0 || lo == n, "a share of %lld starts at %lld, inside a unit of %lld",
                          (long long)n, (long long)lo, (long long)unit);
                    const int64_t units = (hi - lo + unit - 1) / unit;
                    if (units < smallest) smallest = units;
                    if (units > largest) largest = units;
                    end = hi;
                }
                CHECK(end == n && largest - smallest <= 1, "shares of %lld over %d: end %lld, %lld to %lld units",
                      (long long)n, nth, (long long)end, (long long)smallest, (long long)largest);
            }
}

int main(int argc, char **argv) {
    const int32_t rounds = argc > 1 ? atoi(argv[1]) : 300;
    te_pool *pool;
    CHECK(te_pool_new(0, &pool) == TE_ARGUMENT && pool == NULL, "a pool of no threads");
    CHECK(strstr(te_last_error(), "n_threads is 0") != NULL, "the message is '%s'", te_last_error());
    check_share();
    stress_mutex();
    stress_new_free(rounds / 3);
    stress_one_pool(rounds);
    stress_deals(rounds);
    check_help();
    check_ahead();
    stress_many_pools(rounds);
    check_fork();
    check_late_member();
    check_room();
    check_room_of_whole_team();
    check_idle();
    return 0;
}
