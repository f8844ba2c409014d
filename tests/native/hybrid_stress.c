/* hybrid_stress.c - sessions whose layers lie on two stand-in devices and the CPU: several side by side compute the same
 * bits as one alone, and opening one leaves nothing behind wherever memory runs out.
 *
 *     hybrid_stress MODEL      prints what failed and exits with 1, or exits with 0
 *
 * Built with a thread sanitizer it also shows data races of the hand-over. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/te_os.h"
#include "powerinfer.h"
#include "../stress.h"

#define OK(call) CHECK((call) == PI_OK, "%s", pi_error_message())

enum { N_WORKERS = 2, N_STEPS = 5, N_PROMPT = 20, N_SIZES = 3 };
/* Of teams; with the last, some members have no columns of a short sum. */
static const int32_t sizes[N_SIZES] = {2, 3, 5};

static pi_model *model;
static pi_model_info info;
static pi_plan *plan;

/* ---- memory that runs out: the n-th allocation from now on, and all after it, fail ---- */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)
enum { HAS_FAULTS = 0 };
static void fail_from(int64_t n) { (void)n; }
static int64_t held(void) { return 0; }
#else
enum { HAS_FAULTS = 1 };
static int64_t n_left = INT64_MAX, n_held;
static void fail_from(int64_t n) { __atomic_store_n(&n_left, n, __ATOMIC_RELAXED); }
static int64_t held(void) { return __atomic_load_n(&n_held, __ATOMIC_RELAXED); }
static void *count(void *p) {
    if (p) __atomic_fetch_add(&n_held, 1, __ATOMIC_RELAXED);
    return p;
}
static int is_out(void) { return __atomic_sub_fetch(&n_left, 1, __ATOMIC_RELAXED) < 0; }

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_memalign(size_t alignment, size_t n);
void __libc_free(void *p);
void *malloc(size_t n) { return is_out() ? NULL : count(__libc_malloc(n)); }
void *calloc(size_t n, size_t size) { return is_out() ? NULL : count(__libc_calloc(n, size)); }
void *aligned_alloc(size_t alignment, size_t n) { return is_out() ? NULL : count(__libc_memalign(alignment, n)); }
void free(void *p) {
    if (p) __atomic_fetch_sub(&n_held, 1, __ATOMIC_RELAXED);
    __libc_free(p);
}
#endif

/* ---- sessions ---- */

/* Layers in order on the first device, the CPU and the second device, each with every third neuron cold. */
static void make_plan(void) {
    const int32_t n = info.n_layer, per_layer = info.n_ff - info.n_ff / 3;
    uint8_t *on_device = malloc((size_t)n);
    int32_t *n_hot = malloc(sizeof *n_hot * (size_t)n), *device = malloc(sizeof *device * ((size_t)n + 1)),
            *hot = malloc(sizeof *hot * (size_t)n * (size_t)info.n_ff), at = 0;
    CHECK(on_device && n_hot && device && hot, "memory");
    for (int32_t l = 0; l < n; l++) {
        on_device[l] = l != n / 2;
        device[l] = l >= n / 2;
        n_hot[l] = on_device[l] ? per_layer : 0;
        for (int32_t j = 0; j < n_hot[l]; j++) hot[at++] = j;
    }
    device[n] = 1;
    pi_plan_options o = pi_plan_defaults();
    const uint64_t budgets[2] = {UINT64_C(1) << 32, UINT64_C(1) << 32};
    o.n_devices = 2;
    o.budgets = budgets;
    o.n_ctx = o.n_pool = 128;
    o.n_seq = 2;
    o.n_batch = 32;
    o.overhead_bytes = 0;
    o.group = 1;
    OK(pi_plan_restore(
        model, &o,
        &(pi_placement){.on_device = on_device, .n_hot = n_hot, .hot = hot, .head_on_device = 1, .device = device},
        &plan));
    free(on_device);
    free(n_hot);
    free(device);
    free(hot);
}

static pi_status open_session(int32_t n_threads, pi_session **out) {
    pi_session_options o = pi_session_defaults();
    o.n_ctx = o.n_pool = 128;
    o.n_seq = 2;
    o.n_batch = 32;
    o.n_threads = n_threads;
    o.device = PI_DEVICE_HOST;
    o.plan = plan;
    o.count_neurons = 1;
    return pi_session_open(model, &o, out);
}

static uint64_t fold(uint64_t bits, const float *logits) {
    for (int32_t i = 0; i < info.n_vocab; i++) {
        uint32_t word;
        memcpy(&word, &logits[i], sizeof word);
        bits = (bits ^ word) * 1099511628211u;
    }
    return bits;
}

/* A prompt, then steps of one token and of two. */
static uint64_t converse(int32_t n_threads) {
    pi_session *s;
    OK(open_session(n_threads, &s));
    int32_t token[N_PROMPT];
    for (int32_t i = 0; i < N_PROMPT; i++) token[i] = (i * 31 + 7) % info.n_vocab;
    OK(pi_session_feed(s, &(pi_batch){.n_tokens = N_PROMPT, .token = token}));
    uint64_t bits = fold(14695981039346656037u, pi_session_logits(s, 0));
    for (int32_t k = 0; k < N_STEPS; k++) {
        OK(pi_session_feed(s, &(pi_batch){.n_tokens = 1, .token = token + k}));
        bits = fold(bits, pi_session_logits(s, 0));
        OK(pi_session_feed(s, &(pi_batch){.n_tokens = 2,
                                          .token = token + k,
                                          .seq = (const int32_t[]){0, 1},
                                          .kind = (const uint8_t[]){1, 1}}));
        bits = fold(fold(bits, pi_session_logits(s, 0)), pi_session_logits(s, 1));
    }
    pi_session_close(s);
    return bits;
}

static uint64_t expected[N_SIZES];

static void worker(void *arg) {
    const int32_t index = *(const int32_t *)arg;
    for (int32_t i = 0; i < N_SIZES; i++) {
        const int32_t n = (index + i) % N_SIZES;
        CHECK(converse(sizes[n]) == expected[n], "other bits than alone, %d threads", sizes[n]);
    }
}

static void run_out_of_memory(void) {
    int64_t n = 0, before = 0;
    for (;; n++) {
        pi_session *s = NULL;
        fail_from(n);
        const pi_status st = open_session(2, &s);
        fail_from(INT64_MAX);
        if (st == PI_OK) {
            pi_session_close(s);
            break;
        }
        CHECK(st == PI_ERROR_MEMORY && !s, "status %d, '%s'", (int)st, pi_error_message());
        if (n == 0) before = held();
        /* Threads leave a little behind, once. A piece left behind each time would be many. */
        CHECK(held() - before < 40, "%lld pieces are held after %lld failures", (long long)(held() - before),
              (long long)n);
    }
    CHECK(n > 100, "opening takes only %lld pieces of memory", (long long)n);
}

int main(int argc, char **argv) {
    if (argc != 2) return fprintf(stderr, "usage: hybrid_stress MODEL\n"), 2;
    pi_file *file;
    OK(pi_file_open(argv[1], &file));
    const pi_model_options options = pi_model_defaults();
    OK(pi_model_open(file, &options, &model));
    pi_file_close(file);
    for (int32_t done = 0, total = 1; done < total;) OK(pi_model_load(model, &done, &total));
    pi_model_get_info(model, &info);
    make_plan();
    for (int32_t n = 0; n < N_SIZES; n++) {
        expected[n] = converse(sizes[n]);
        CHECK(converse(sizes[n]) == expected[n], "other bits, %d threads", sizes[n]);
    }
    te_thread threads[N_WORKERS];
    int32_t index[N_WORKERS];
    for (int32_t i = 0; i < N_WORKERS; i++) {
        index[i] = i;
        CHECK(te_os_thread_start(&threads[i], worker, &index[i], "worker") == TE_OK, "%s", te_last_error());
    }
    for (int32_t i = 0; i < N_WORKERS; i++) te_os_thread_join(&threads[i]);
    if (HAS_FAULTS) run_out_of_memory();
    pi_plan_free(plan);
    pi_model_close(model);
    return 0;
}
