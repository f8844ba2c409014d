/* te_team_size.h - how many members of a team take part in its runs while other programs use the CPUs, too. Part of te_pool;
 * plain sums over what the pool measures and the system says, without threads. */
#ifndef TE_TEAM_SIZE_H
#define TE_TEAM_SIZE_H

#include <stdbool.h>
#include <stdint.h>

#include "te_os.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct te_team_size {
    int32_t n_threads;
    int64_t nap_ns; /* members that waited for so long in the last window shall let themselves be moved; 0: none */
    /* Private to te_team_size. */
    int32_t n_live;    /* in the last window */
    int32_t n_grow;    /* by how many members it grows next where the system does not say what others have */
    int64_t park_ns;   /* how long a member that was too many stays away then */
    int64_t looked_ns; /* when it was looked at what room there is */
    int64_t look_ns;   /* when it will be */
    int64_t asked_ns;  /* when the system said what other programs have; 0: it did not */
    int64_t others_ns; /* what they had then */
    double n_busy;     /* how many CPUs they had between the last two answers; < 0: not known of this team */
    bool settling;     /* it has shrunk, and the system may not have moved threads yet */
    bool suspect;      /* members waited in the last window */
} te_team_size;

/* A window: runs with the same members, one behind the other. */
typedef struct te_window {
    int32_t n_live; /* these members */
    int64_t run_ns;
    int64_t waited_ns; /* all members, for CPUs that others had; wake-ups left out */
    int64_t
        idle_ns; /* all members, in runs since te_team_size_next looked for room: without a CPU for whatever reason */
    double n_beside; /* CPUs that other teams of this process had beside these runs: te_os_others leaves them out */
} te_window;

/* The delays of members are to be looked at once in so much time of runs. */
enum { TE_WINDOW_NS = 20000000 };

void te_team_size_begin(te_team_size *s, int32_t n_threads);
/* After a window: how many members the next runs shall have. *looked: it looked for room. */
int32_t te_team_size_next(te_team_size *s, const te_window *w, bool *looked);

/* For how many of n_threads members there is room beside other programs that have n_busy of the n_cpus CPUs; at least a
 * quarter, since a machine that is busy everywhere has room for some all the same. */
int32_t te_team_room(int32_t n_threads, int32_t n_cpus, double n_busy);

/* What the system is asked; tests have answers of their own. */
typedef struct te_team_asks {
    bool (*times)(te_thread_times *out);               /* te_os_thread_times */
    bool (*others)(int32_t *n_cpus, int64_t *busy_ns); /* te_os_others */
    int64_t (*now_ns)(void);                           /* te_os_now_ns */
} te_team_asks;
extern te_team_asks te_team_system;

#ifdef __cplusplus
}
#endif
#endif
