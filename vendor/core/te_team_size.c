/* te_team_size.c - the size of a team.
 *
 * The system gives a thread that shares its CPU with another program turns of milliseconds, and all members wait for it at
 * the next barrier. With fewer members the system can place each on a CPU of its own. Two signs say that there are too many:
 *
 * Members read how long they were ready to run and did not (waited_ns). If that is much in two windows, runs go on with fewer
 * members at once.
 *
 * Where those who wait for a late member fall asleep, the other program moves to whichever CPU is idle just now, and the next
 * barrier is late because of another member. Then nobody waits for long, and yet they have less of the CPUs than there are
 * members (idle_ns). Members that are idle may as well have nothing to do, so the system is asked, too: where other programs
 * have CPUs that the team would need, it gets as many members as these leave room for.
 *
 * Other teams of this process are such programs, too; the pool knows what they have (n_beside).
 *
 * A smaller team grows into what others leave. Where the system does not say what that is, members are tried again later, the
 * later the more often that failed.
 */
#include "te_team_size.h"

#include "te_os.h"

/* How long a member that was too many is parked at first, and at most. */
#define PARK_NS     50000000
#define PARK_MAX_NS 2000000000
/* What other programs have is known well enough over so long a time: the system counts in steps of 10 ms a CPU. */
#define ASK_NS 200000000

te_team_asks te_team_system = {te_os_thread_times, te_os_others, te_os_now_ns};

static int32_t fewest(int32_t n_threads) { return (n_threads + 3) / 4; }

int32_t te_team_room(int32_t n_threads, int32_t n_cpus, double n_busy) {
    const double n = n_cpus - n_busy + 0.3; /* what others have is known to some tenths of a CPU */
    return n >= n_threads ? n_threads : n > fewest(n_threads) ? (int32_t)n : fewest(n_threads);
}

void te_team_size_begin(te_team_size *s, int32_t n_threads) {
    *s = (te_team_size){.n_threads = n_threads, .n_live = n_threads, .n_grow = 1, .n_busy = -1, .park_ns = PARK_NS};
}

/* For how many members other programs left room since this was asked last; 0: not known. *sure: and the time before. */
static int32_t ask_room(te_team_size *s, const te_window *w, int32_t *sure) {
    int32_t n_cpus;
    int64_t others_ns;
    const int64_t before_ns = s->asked_ns;
    const double busy_before = s->n_busy;
    s->asked_ns = 0;
    s->n_busy = -1;
    *sure = 0;
    if (!te_team_system.others(&n_cpus, &others_ns)) return 0;
    s->asked_ns = te_team_system.now_ns();
    const double n_busy = (double)(others_ns - s->others_ns) / (double)(s->asked_ns - before_ns);
    s->others_ns = others_ns;
    if (before_ns == 0) return 0;
    s->n_busy = (n_busy > 0 ? n_busy : 0) + w->n_beside;
    if (busy_before >= 0) *sure = te_team_room(s->n_threads, n_cpus, (s->n_busy + busy_before) / 2);
    return te_team_room(s->n_threads, n_cpus, s->n_busy);
}

/* To n members, for a while. on_trial: since the team has grown, no window has passed. */
static int32_t shrink(te_team_size *s, const te_window *w, int32_t n, bool on_trial) {
    s->park_ns = !on_trial ? PARK_NS : s->park_ns < PARK_MAX_NS / 2 ? 2 * s->park_ns : PARK_MAX_NS;
    int32_t sure;
    (void)ask_room(s, w, &sure); /* what others have beside the smaller team counts */
    s->n_busy = -1;
    /* A trial costs a window or two, and a window of long runs is long. */
    const int64_t park_ns = s->park_ns * (1 + w->run_ns / TE_WINDOW_NS);
    s->looked_ns = te_team_system.now_ns();
    s->look_ns = s->looked_ns + (s->asked_ns != 0 && park_ns < ASK_NS ? ASK_NS : park_ns);
    s->n_grow = 1;
    s->settling = true;
    s->nap_ns = w->run_ns / 8;
    if (n < fewest(s->n_threads)) n = fewest(s->n_threads);
    return n < w->n_live ? n : w->n_live;
}

/* To as many as others leave room for, or on trial. */
static int32_t fit_room(te_team_size *s, const te_window *w) {
    const int64_t now = te_team_system.now_ns();
    /* Others may have had the CPUs while the team had nothing to do, so members must have missed some of them. */
    const bool missing = w->idle_ns >= (now - s->looked_ns) / 4, whole = w->n_live == s->n_threads;
    s->looked_ns = now;
    if (whole) s->look_ns = now + ASK_NS;
    if (whole && !missing) {
        s->asked_ns = 0; /* asking costs more than it can bring */
        return w->n_live;
    }
    int32_t sure;
    const int32_t room = ask_room(s, w, &sure);
    if (s->asked_ns != 0) s->look_ns = now + ASK_NS;
    if (room == 0) return w->n_live + s->n_grow < s->n_threads ? w->n_live + s->n_grow : s->n_threads;
    /* Members that have to wait make a team smaller at once. Where they do not, one answer that is wrong by half a CPU must not:
     * it would grow again two answers later only. A team that is whole has one answer. */
    const int32_t fewer = whole ? room : sure;
    if (fewer > 0 && fewer < w->n_live && missing) return shrink(s, w, fewer, false);
    /* One member too many costs more than one too few. */
    return sure > w->n_live ? sure : w->n_live;
}

int32_t te_team_size_next(te_team_size *s, const te_window *w, bool *looked) {
    const bool on_trial = w->n_live > s->n_live;
    const int64_t looked_ns = s->looked_ns;
    /* A member that shares its CPU with one other program waits half of the time. */
    const int32_t n_over = (int32_t)((w->waited_ns + w->run_ns * 3 / 4) / w->run_ns);
    /* What comes once and goes, some work of the system's, costs less than a parked member. */
    const bool shrinks = n_over > 0 && (on_trial || s->suspect);
    s->suspect = n_over > 0 && !s->settling && !shrinks;
    s->nap_ns = 0;
    s->n_live = w->n_live;
    if (on_trial) s->n_grow *= 2;
    int32_t n = w->n_live;
    if (s->settling)
        s->settling = false;
    else if (shrinks)
        n = shrink(s, w, w->n_live - n_over, on_trial);
    else if (n_over == 0 && te_team_system.now_ns() >= s->look_ns)
        n = fit_room(s, w);
    *looked = s->looked_ns != looked_ns;
    return n;
}
