/* api.c - version, processor, errors: what belongs to no handle. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../vendor/core/te_os.h"
#include "../vendor/core/te_pool.h"
#include "../vendor/cpu/te_kernels.h"
#include "common.h"

_Static_assert((int)PI_OK == TE_OK && (int)PI_ERROR_IO == TE_IO && (int)PI_ERROR_FORMAT == TE_FORMAT,
               "statuses share their numbers");
_Static_assert((int)PI_ERROR_ARGUMENT == TE_ARGUMENT && (int)PI_ERROR_MEMORY == TE_MEMORY,
               "statuses share their numbers");
_Static_assert((int)PI_ERROR_UNSUPPORTED == TE_UNSUPPORTED && (int)PI_ERROR_CONTEXT == TE_CONTEXT,
               "statuses share their numbers");
_Static_assert((int)PI_ACTIVATION_RELU == TE_RELU && (int)PI_ACTIVATION_DRELU == TE_DRELU,
               "activations share their numbers");
_Static_assert((int)PI_ACTIVATION_SILU == TE_SILU && (int)PI_ACTIVATION_GELU == TE_GELU,
               "activations share their numbers");

const char *pi_error_message(void) { return te_last_error(); }
const char *pi_version(void) { return PI_VERSION; }

const char *pi_cpu_isa(void) {
    const te_kernels *k = te_cpu_kernels();
    return k ? k->name : NULL;
}

int32_t pi_cpu_has_isa(const char *name) { return name && te_cpu_kernels_named(name) != NULL; }
int32_t pi_cpu_cores(void) { return te_os_n_cores(); }

const char *pi_build_info(void) {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "a compiler without a name";
#endif
}

typedef struct read_task {
    const uint64_t *data;
    int64_t n_words;
    uint64_t sum[1024]; /* keeps the loads alive */
} read_task;

static void read_all(void *ctx, te_team *team) {
    read_task *t = ctx;
    int64_t lo, hi;
    te_share(team, t->n_words, 512, &lo, &hi);
    uint64_t s[16] = {0};
    for (int64_t i = lo; i + 16 <= hi; i += 16)
        for (int32_t j = 0; j < 16; j++) s[j] += t->data[i + j];
    for (int32_t j = 1; j < 16; j++) s[0] += s[j];
    t->sum[team->ith] = s[0];
}

static void write_all(void *ctx, te_team *team) {
    read_task *t = ctx;
    int64_t lo, hi;
    te_share(team, t->n_words, 512, &lo, &hi);
    memset((uint64_t *)(uintptr_t)t->data + lo, team->ith + 1, (size_t)(hi - lo) * sizeof(uint64_t));
}

pi_status pi_cpu_read_rate(int32_t n_threads, uint64_t n_bytes, int32_t n_repeat, double *bytes_per_s) {
    if (!bytes_per_s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_cpu_read_rate: bytes_per_s is NULL");
    if (n_threads < 1 || n_threads > 1024)
        return PI_FAIL(PI_ERROR_ARGUMENT, "n_threads is %d, must be 1..1024", n_threads);
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
        task->n_words = (int64_t)(n_bytes / sizeof(uint64_t));
        te_pool_run(pool, write_all, task);
        int64_t best = INT64_MAX;
        for (int32_t i = 0; i < n_repeat; i++) {
            const int64_t t0 = te_os_now_ns();
            te_pool_run(pool, read_all, task);
            const int64_t t = te_os_now_ns() - t0;
            if (t < best) best = t;
        }
        *bytes_per_s = (double)n_bytes * 1e9 / (double)(best > 0 ? best : 1);
    }
    te_pool_free(pool);
    te_os_free(data, (size_t)n_bytes);
    free(task);
    return st;
}
