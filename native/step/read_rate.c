/* read_rate.c - how fast threads read memory by plain loads: the ceiling of decoding.
 *
 * The time runs from a barrier to a barrier, so that waking the threads is none of it. */
#include <stdlib.h>
#include <string.h>

#include "../state/state.h"

typedef struct read_task {
    uint64_t *data;
    int64_t n_words;
    int64_t ns;
    uint64_t sum[1024]; /* keeps the loads alive */
} read_task;

enum { MAX_THREADS = 1024, PAGE_WORDS = 512 };

static void read_all(void *ctx, te_team *team) {
    read_task *t = ctx;
    int64_t lo, hi, start = 0;
    te_share(team, t->n_words, PAGE_WORDS, &lo, &hi);
    uint64_t s[16] = {0};
    te_barrier(team);
    if (team->ith == 0) start = te_os_now_ns();
    for (int64_t i = lo; i + 16 <= hi; i += 16)
        for (int32_t j = 0; j < 16; j++) s[j] += t->data[i + j];
    for (int32_t j = 1; j < 16; j++) s[0] += s[j];
    t->sum[team->ith] = s[0];
    te_barrier(team);
    if (team->ith == 0) t->ns = te_os_now_ns() - start;
}

/* Each thread's share, so that it lies near that thread. */
static void write_all(void *ctx, te_team *team) {
    const read_task *t = ctx;
    int64_t lo, hi;
    te_share(team, t->n_words, PAGE_WORDS, &lo, &hi);
    memset(t->data + lo, team->ith + 1, (size_t)(hi - lo) * sizeof *t->data);
}

static double rate_of(const read_task *t) {
    return (double)t->n_words * (double)sizeof *t->data * 1e9 / (double)(t->ns > 0 ? t->ns : 1);
}

pi_status pi_cpu_read_rate(int32_t n_threads, uint64_t n_bytes, int32_t n_repeat, double *bytes_per_s) {
    if (!bytes_per_s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_cpu_read_rate: bytes_per_s is NULL");
    if (n_threads < 1 || n_threads > MAX_THREADS)
        return PI_FAIL(PI_ERROR_ARGUMENT, "n_threads is %d, must be 1..%d", n_threads, MAX_THREADS);
    if (n_repeat < 1 || n_repeat > 1000) return PI_FAIL(PI_ERROR_ARGUMENT, "n_repeat is %d, must be 1..1000", n_repeat);
    if (n_bytes < 1 << 20)
        return PI_FAIL(PI_ERROR_ARGUMENT, "n_bytes is %llu, at least 1 MiB is needed", (unsigned long long)n_bytes);
    te_pool *pool = NULL;
    read_task *task = calloc(1, sizeof *task);
    void *data = te_os_alloc((size_t)n_bytes);
    pi_status st = task && data
                       ? (pi_status)te_pool_new(n_threads, &pool)
                       : PI_FAIL(PI_ERROR_MEMORY, "out of memory for %llu bytes to read", (unsigned long long)n_bytes);
    if (st == PI_OK) {
        task->data = data;
        task->n_words = (int64_t)(n_bytes / sizeof *task->data);
        te_pool_run(pool, write_all, task);
        *bytes_per_s = 0;
        for (int32_t i = 0; i < n_repeat; i++) {
            te_pool_run(pool, read_all, task);
            if (rate_of(task) > *bytes_per_s) *bytes_per_s = rate_of(task);
        }
    }
    te_pool_free(pool);
    te_os_free(data, (size_t)n_bytes);
    free(task);
    return st;
}

struct pi_read_probe {
    pi_session *session;
    char *memory;
    size_t slice_bytes, n_bytes;
    size_t at; /* of the next slice */
    read_task task;
};

static void next_slice(pi_read_probe *p, te_task *run) {
    p->task.data = (uint64_t *)(void *)(p->memory + p->at);
    p->at = p->at + p->slice_bytes < p->n_bytes ? p->at + p->slice_bytes : 0;
    pi_session_lock(p->session);
    te_pool_run(p->session->pool, run, &p->task);
    pi_session_unlock(p->session);
}

pi_status pi_read_probe_open(pi_session *session, uint64_t slice_bytes, int32_t n_slices, pi_read_probe **out) {
    if (!session || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_read_probe_open: session or out is NULL");
    *out = NULL;
    if (slice_bytes < 1 << 20 || slice_bytes > PTRDIFF_MAX / 2 || n_slices < 1)
        return PI_FAIL(PI_ERROR_ARGUMENT, "%d slices of %llu bytes, at least one of 1 MiB is needed", n_slices,
                       (unsigned long long)slice_bytes);
    const size_t slice = (size_t)slice_bytes / 4096 * 4096, n_bytes = pi_mul(slice, (size_t)n_slices);
    pi_read_probe *p = calloc(1, sizeof *p);
    char *memory = p ? te_os_alloc(n_bytes) : NULL;
    if (!memory) {
        free(p);
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d slices of %zu bytes to read", n_slices, slice);
    }
    pi_ref_take(&session->ref);
    p->session = session;
    p->memory = memory;
    p->slice_bytes = slice;
    p->n_bytes = n_bytes;
    p->task.n_words = (int64_t)(slice / sizeof *p->task.data);
    for (int32_t i = 0; i < n_slices; i++) next_slice(p, write_all);
    *out = p;
    return PI_OK;
}

pi_status pi_read_probe_next(pi_read_probe *p, double *bytes_per_s) {
    if (!p || !bytes_per_s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_read_probe_next: probe or bytes_per_s is NULL");
    next_slice(p, read_all);
    *bytes_per_s = rate_of(&p->task);
    return PI_OK;
}

void pi_read_probe_close(pi_read_probe *p) {
    if (!p) return;
    pi_session_close(p->session);
    te_os_free(p->memory, p->n_bytes);
    free(p);
}
