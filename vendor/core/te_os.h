/* te_os.h - all that differs between operating systems: files, mappings, memory, threads, clocks. Linux; another system
 * is another te_os file. */
#ifndef TE_OS_H
#define TE_OS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "te_status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A whole file, read-only. An empty file maps to data NULL, n_bytes 0. */
typedef struct te_mapping {
    const void *data;
    size_t n_bytes;
} te_mapping;
te_status te_os_map(const char *path,
                    te_mapping *out); /* TE_IO with path and reason; directories and devices are refused */
void te_os_unmap(te_mapping *m);

/* Reads pages in (so that later reads do not fault); bounded work, call in chunks for progress. A failure is ignored:
 * it is only advice. */
void te_os_prefault(const void *p, size_t n_bytes);
void te_os_forget(const void *p, size_t n_bytes); /* whole pages of a mapping no longer count as this process's memory;
                                                     they come back when they are read */
te_status te_os_lock(const void *p, size_t n_bytes); /* mlock; TE_MEMORY with the limit named */

/* 64-byte aligned (2 MiB aligned and advised for huge pages from 2 MiB up), zeroed. NULL when out of memory or n_bytes
 * overflows. */
void *te_os_alloc(size_t n_bytes);
void te_os_free(void *p, size_t n_bytes);

int32_t
te_os_n_cores(void); /* physical cores this process may use: affinity, SMT siblings and cgroup quota counted; >= 1 */
int32_t te_os_n_logical(void);     /* logical CPUs this process may use */
uint64_t te_os_memory_bytes(void); /* RAM this process may use (cgroup limit counted) */
uint64_t
te_os_memory_available(void); /* that this process can still have, file cache given up (cgroups counted); UINT64_MAX:
                                      not known */
int64_t te_os_now_ns(void);   /* monotonic */
int64_t
te_os_process_id(void); /* changes in a forked child, which has the parent's memory and none of its other threads */

typedef struct te_thread {
    uintptr_t handle;
} te_thread;
te_status te_os_thread_start(te_thread *t, void (*run)(void *), void *arg, const char *name);
void te_os_thread_join(te_thread *t);

/* Of the calling thread, in all. */
typedef struct te_thread_times {
    int64_t ran_ns;       /* known to some milliseconds */
    int64_t delay_ns;     /* it was ready to run while others had the CPU */
    int64_t n_dispatched; /* how often it was given one */
} te_thread_times;
bool te_os_thread_times(te_thread_times *out); /* false if the system does not say; costs some microseconds */

/* How many CPUs this process may use, and how long in all, since the machine began, other programs had them; those that
 * give way (nice) are left out. False if the system does not say. In steps of 10 ms a CPU; costs some microseconds a CPU of the
 * machine. */
bool te_os_others(int32_t *n_cpus, int64_t *busy_ns);

/* Sleeps while *word == expected, at most timeout_ns (< 0: for ever); may return early. Wake wakes all sleepers. */
void te_os_wait(const uint32_t *word, uint32_t expected, int64_t timeout_ns);
void te_os_wake(const uint32_t *word);
void te_os_relax(void); /* one turn of a spin loop */
void te_os_yield(void); /* whoever waits for this CPU runs first */
/* A turn of a wait for a device, so long after it began: at first one of a spin loop, then the CPU is given to whoever waits
 * for it. Where those keep it for long, sleeps for some 50 us instead: a sleeper is let in when it wakes, one that spins or
 * yields when their time is over, milliseconds later. Not for members of a team: how long these wait for a CPU tells how
 * many there should be (te_pool.c), and a sleeper does not. */
void te_os_rest(int64_t waited_ns);

/* A plain mutex. Zero-initialised is unlocked. */
typedef struct te_mutex {
    uint32_t word;
} te_mutex;
void te_os_mutex_lock(te_mutex *m);
void te_os_mutex_unlock(te_mutex *m);

/* What kind of machine this is; "" and 0 for what the system does not say. te_os_machine.c. */
typedef struct te_machine {
    char cpu[128];         /* the processor's own name */
    char os[128];          /* "Linux 6.1.0 x86_64" */
    char distribution[96]; /* "Debian GNU/Linux 12 (bookworm)" */
    char libc[64];         /* "glibc 2.36" */
    char container[32];    /* "docker", "podman", "kubernetes", "lxc", "WSL", or "" */
    char huge_pages[16];   /* transparent ones: "always", "madvise", "never" */
    int32_t n_online;      /* logical CPUs of the machine */
    int32_t threads_per_core;
    int32_t n_numa;
    double cpu_quota; /* CPUs that the cgroup allows; 0: no limit */
    uint64_t memory_bytes;
    uint64_t memory_free_bytes;  /* that this process can have, its cgroups asked too; the cache of files is free */
    uint64_t memory_limit_bytes; /* of the cgroup; 0: none */
    uint64_t memlock_bytes;      /* that this process may lock; UINT64_MAX: no limit */
} te_machine;
void te_os_machine(const char *root, te_machine *out); /* root: put before every path, "" for the real system */

/* Opens a shared library, which then stays open; NULL and the reason in why if it cannot be. */
void *te_os_library(const char *name, char *why, size_t n_why);
/* The folder of the file that holds this code, with a slash at its end; false if it is not known or longer than n. */
bool te_os_own_folder(char *folder, size_t n);
/* Stores the address of a function in *function, a function pointer of n_function bytes; false if there is none. */
bool te_os_symbol(void *library, const char *name, void *function, size_t n_function);

#ifdef __cplusplus
}
#endif
#endif
