/* te_os_linux.c - te_os for Linux: files, mappings, memory, limits, clock, threads, futexes. */
#define _GNU_SOURCE
#include "te_os.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "te_os_limits.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14; older kernels answer EINVAL */
#endif

#define HUGE_BYTES ((size_t)2 << 20)

/* strerror for this thread only. */
static const char *reason(int error, char *buffer, size_t n) { return strerror_r(error, buffer, n); }

te_status te_os_map(const char *path, te_mapping *out) {
    char text[128];
    struct stat st;
    *out = (te_mapping){NULL, 0};
    /* O_NONBLOCK: a FIFO without a writer would make open wait for ever. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return te_fail(TE_IO, "%s: cannot open: %s", path, reason(errno, text, sizeof text));
    te_status status = TE_OK;
    if (fstat(fd, &st) != 0) {
        status = te_fail(TE_IO, "%s: cannot read its size: %s", path, reason(errno, text, sizeof text));
    } else if (!S_ISREG(st.st_mode)) {
        status =
            te_fail(TE_IO, "%s: is %s, not a regular file", path, S_ISDIR(st.st_mode) ? "a directory" : "a device");
    } else if (st.st_size > 0) {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED)
            status = te_fail(TE_IO, "%s: cannot map %" PRId64 " bytes: %s", path, (int64_t)st.st_size,
                             reason(errno, text, sizeof text));
        else
            *out = (te_mapping){p, (size_t)st.st_size};
        /* Before it is read for the first time: then the page cache takes huge pages for what is not cached yet, where
         * the file system can. Not for a file that memory cannot hold, of which a row would cost 2 MiB. */
        if (out->n_bytes >= HUGE_BYTES && out->n_bytes <= te_os_memory_bytes()) madvise(p, out->n_bytes, MADV_HUGEPAGE);
    }
    close(fd);
    return status;
}

void te_os_unmap(te_mapping *m) {
    if (m->n_bytes > 0) munmap((void *)(uintptr_t)m->data, m->n_bytes);
    *m = (te_mapping){NULL, 0};
}

/* The whole pages that hold [p, p + n_bytes). */
static void *page_span(const void *p, size_t n_bytes, size_t *n_out) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t lo = (uintptr_t)p / page * page;
    *n_out = (uintptr_t)p + n_bytes - lo;
    return (void *)lo;
}

void te_os_prefault(const void *p, size_t n_bytes) {
    if (n_bytes == 0) return;
    size_t n;
    void *lo = page_span(p, n_bytes, &n);
    /* The kernel does the touching: a file that was cut meanwhile is an error code there and a SIGBUS here. */
    if (madvise(lo, n, MADV_POPULATE_READ) != 0 && errno == EINVAL) madvise(lo, n, MADV_WILLNEED);
}

void te_os_forget(const void *p, size_t n_bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), lo = ((uintptr_t)p + page - 1) / page * page,
                    hi = ((uintptr_t)p + n_bytes) / page * page;
    if (lo < hi) madvise((void *)lo, hi - lo, MADV_DONTNEED);
}

te_status te_os_lock(const void *p, size_t n_bytes) {
    if (n_bytes == 0 || mlock(p, n_bytes) == 0) return TE_OK;
    const int error = errno;
    char text[128];
    struct rlimit limit;
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        return te_fail(TE_MEMORY,
                       "cannot lock %zu bytes in memory: %s; the limit of this process is %" PRIu64
                       " bytes (ulimit -l)",
                       n_bytes, reason(error, text, sizeof text), (uint64_t)limit.rlim_cur);
    return te_fail(TE_MEMORY, "cannot lock %zu bytes in memory: %s; this process has no limit of its own (ulimit -l)",
                   n_bytes, reason(error, text, sizeof text));
}

static size_t mapped_bytes(size_t n_bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (n_bytes + page - 1) / page * page;
}

void *te_os_alloc(size_t n_bytes) {
    if (n_bytes > PTRDIFF_MAX - 2 * HUGE_BYTES) return NULL;
    if (n_bytes < HUGE_BYTES) {
        const size_t n = (n_bytes + 63) / 64 * 64;
        void *p = aligned_alloc(64, n > 0 ? n : 64);
        if (p != NULL) memset(p, 0, n > 0 ? n : 64);
        return p;
    }
    /* One huge page more than needed, then both ends cut off so that what is left starts on a huge page. */
    const size_t n = mapped_bytes(n_bytes);
    char *whole = mmap(NULL, n + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED) return NULL;
    const size_t head = (HUGE_BYTES - (uintptr_t)whole % HUGE_BYTES) % HUGE_BYTES;
    if (head > 0) munmap(whole, head);
    if (head < HUGE_BYTES) munmap(whole + head + n, HUGE_BYTES - head);
    madvise(whole + head, n, MADV_HUGEPAGE);
    return whole + head;
}

void te_os_free(void *p, size_t n_bytes) {
    if (p == NULL) return;
    if (n_bytes < HUGE_BYTES)
        free(p);
    else
        munmap(p, mapped_bytes(n_bytes));
}

/* The logical CPUs of the affinity mask, in *cpus (to be freed); n = 0 if the kernel does not say. */
static int32_t allowed_cpus(int32_t **cpus) {
    *cpus = NULL;
    for (int n_max = 1024; n_max <= 1 << 20; n_max *= 2) { /* EINVAL: the kernel's mask is larger */
        cpu_set_t *set = CPU_ALLOC((size_t)n_max);
        if (set == NULL) return 0;
        const size_t n_set = CPU_ALLOC_SIZE((size_t)n_max);
        CPU_ZERO_S(n_set, set);
        const int rc = sched_getaffinity(0, n_set, set);
        int32_t n = 0;
        if (rc == 0) {
            *cpus = malloc((size_t)n_max * sizeof **cpus);
            for (int cpu = 0; *cpus != NULL && cpu < n_max; cpu++)
                if (CPU_ISSET_S((size_t)cpu, n_set, set)) (*cpus)[n++] = cpu;
        }
        CPU_FREE(set);
        if (rc == 0 || errno != EINVAL) return n;
    }
    return 0;
}

int32_t te_os_n_cores(void) {
    int32_t *cpus;
    const int32_t n = allowed_cpus(&cpus);
    const int32_t n_cores = te_os_cores_of("", cpus, n);
    free(cpus);
    return te_os_under_quota("", n_cores);
}

int32_t te_os_n_logical(void) {
    int32_t *cpus;
    const int32_t n = allowed_cpus(&cpus);
    free(cpus);
    return te_os_under_quota("", n);
}

uint64_t te_os_memory_bytes(void) {
    const long n_pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    const uint64_t ram = n_pages > 0 && page > 0 ? (uint64_t)n_pages * (uint64_t)page : UINT64_MAX;
    const uint64_t limit = te_os_memory_limit("");
    return limit < ram ? limit : ram;
}

uint64_t te_os_memory_available(void) { return te_os_memory_left(""); }

int64_t te_os_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t te_os_process_id(void) { return getpid(); }

typedef struct start {
    void (*run)(void *);
    void *arg;
    char name[16];
} start;

static void *thread_main(void *arg) {
    start s = *(start *)arg;
    free(arg);
    pthread_setname_np(pthread_self(), s.name);
    s.run(s.arg);
    return NULL;
}

te_status te_os_thread_start(te_thread *t, void (*run)(void *), void *arg, const char *name) {
    _Static_assert(sizeof(pthread_t) <= sizeof t->handle, "a pthread_t fits the handle");
    start *s = malloc(sizeof *s);
    if (s == NULL) return te_fail(TE_MEMORY, "cannot start thread %s: out of memory", name);
    *s = (start){run, arg, {0}};
    strncpy(s->name, name, sizeof s->name - 1);

    /* Signals belong to the program's own threads; faults must still reach the thread that caused them. */
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
    sigset_t block, before;
    sigfillset(&block);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&block, faults[i]);
    pthread_sigmask(SIG_SETMASK, &block, &before);
    pthread_t thread;
    const int error = pthread_create(&thread, NULL, thread_main, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        char text[128];
        free(s);
        return te_fail(TE_MEMORY, "cannot start thread %s: %s", name, reason(error, text, sizeof text));
    }
    t->handle = (uintptr_t)thread;
    return TE_OK;
}

void te_os_thread_join(te_thread *t) { pthread_join((pthread_t)t->handle, NULL); }

bool te_os_thread_times(te_thread_times *out) {
    char text[96]; /* "RAN_NS DELAY_NS DISPATCHED" */
    const int fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    const ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return false;
    text[n] = '\0';
    /* A kernel that does not count says 0. */
    return sscanf(text, "%" SCNd64 " %" SCNd64 " %" SCNd64, &out->ran_ns, &out->delay_ns, &out->n_dispatched) == 3 &&
           out->n_dispatched > 0;
}

bool te_os_others(int32_t *n_cpus, int64_t *busy_ns) {
    struct timespec own;
    int32_t *cpus;
    int64_t ticks;
    const long per_second = sysconf(_SC_CLK_TCK);
    *n_cpus = allowed_cpus(&cpus);
    /* This process's own time, which is taken off, stands under nice, too, where it gives way itself. */
    const bool known = per_second > 0 && clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own) == 0 &&
                       te_os_busy_ticks("", cpus, *n_cpus, getpriority(PRIO_PROCESS, 0) > 0, &ticks);
    free(cpus);
    if (!known) return false;
    *busy_ns = ticks * (1000000000 / per_second) - ((int64_t)own.tv_sec * 1000000000 + own.tv_nsec);
    return true;
}

void te_os_wait(const uint32_t *word, uint32_t expected, int64_t timeout_ns) {
    struct timespec t = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, timeout_ns < 0 ? NULL : &t, NULL, 0);
}

static void wake(const uint32_t *word, int n) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0); }

void te_os_wake(const uint32_t *word) { wake(word, INT32_MAX); }

void te_os_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

void te_os_yield(void) { sched_yield(); }

void te_os_rest(int64_t waited_ns) {
    enum { SPIN_NS = 100000, LOST_NS = 200000, NAP_NS = 50000, SHORTEST_NS = 50000000, LONGEST_NS = 1000000000 };
    static _Thread_local int64_t shared_until, shared_for; /* the CPU: how long it is taken to be */
    static const uint32_t never;                           /* woken */
    if (waited_ns < SPIN_NS) {
        te_os_relax();
        return;
    }
    const int64_t now = te_os_now_ns();
    if (now < shared_until) {
        te_os_wait(&never, 0, NAP_NS);
        return;
    }
    sched_yield();
    const int64_t after = te_os_now_ns();
    if (after - now < LOST_NS) return;
    /* Each look whether it still is costs a turn of the others. */
    const bool again = after - shared_until < 2 * shared_for;
    shared_for = !again ? SHORTEST_NS : shared_for < LONGEST_NS / 2 ? 2 * shared_for : LONGEST_NS;
    shared_until = after + shared_for;
}

/* 0 free, 1 held, 2 held and somebody may sleep (so that an uncontended unlock needs no system call). */
void te_os_mutex_lock(te_mutex *m) {
    uint32_t free_word = 0;
    if (__atomic_compare_exchange_n(&m->word, &free_word, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return;
    while (__atomic_exchange_n(&m->word, 2, __ATOMIC_ACQUIRE) != 0) te_os_wait(&m->word, 2, -1);
}

void te_os_mutex_unlock(te_mutex *m) {
    if (__atomic_exchange_n(&m->word, 0, __ATOMIC_RELEASE) == 2) wake(&m->word, 1);
}
