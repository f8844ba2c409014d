/* host.c - the stand-in device: opening and closing it, and a thread that runs programs. */
#include "host.h"

#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_os.h"
#include "../../vendor/core/te_pool.h"

static const int64_t usual_wait_ns = 60000000000;

/* ---- the thread ---- */

static void run_program(void *ctx, te_team *team) {
    pi_host_device *d = ctx;
    d->team = team;
    d->calls = 1;
    d->program(d->ctx, &d->base);
}

/* What cuda records once must not change: a program of a key that was seen makes the same calls. */
static void check_calls(pi_host_device *d) {
    const size_t n = sizeof d->seen / sizeof d->seen[0], at = d->key % n;
    if (!d->key || __atomic_load_n(d->base.cancelled, __ATOMIC_RELAXED)) return; /* not kept, or cut short */
    if (d->seen[at].calls && d->seen[at].key == d->key && d->seen[at].calls != d->calls)
        pi_host_fail(d, PI_FAIL(PI_ERROR_DEVICE, "a program changed its calls between two launches (key %llu)",
                                (unsigned long long)d->key));
    d->seen[at].key = d->key;
    d->seen[at].calls = d->calls;
}

static void thread_main(void *arg) {
    pi_host_device *d = arg;
    for (uint32_t n = 0;; n++) {
        while (__atomic_load_n(&d->asked, __ATOMIC_ACQUIRE) == n) te_os_wait(&d->asked, n, -1);
        if (d->stop) return;
        te_pool_run(d->pool, run_program, d);
        if (d->status == PI_OK) check_calls(d);
        __atomic_store_n(&d->done, n + 1, __ATOMIC_RELEASE);
        te_os_wake(&d->done);
    }
}

static void wait_done(pi_host_device *d) {
    uint32_t done;
    while ((done = __atomic_load_n(&d->done, __ATOMIC_ACQUIRE)) != d->asked) te_os_wait(&d->done, done, -1);
}

static pi_status host_launch(pi_device *dev, pi_device_program *program, void *ctx, uint64_t key) {
    pi_host_device *d = pi_host(dev);
    wait_done(d);
    if (d->status != PI_OK) return PI_FAIL(d->status, "%s", d->problem);
    if (PI_HOST_IS_DUE(launch)) return PI_FAIL(PI_ERROR_DEVICE, "a fault that was asked for: launch");
    d->wait = (pi_wait){dev->cancelled, dev->wait_ns > 0 ? dev->wait_ns : usual_wait_ns, NULL, NULL};
    d->program = program;
    d->ctx = ctx;
    d->key = key;
    __atomic_store_n(&d->asked, d->asked + 1, __ATOMIC_RELEASE);
    te_os_wake(&d->asked);
    return PI_OK;
}

static void host_look(pi_device *dev) {
    if (__atomic_load_n(&pi_host(dev)->vanished, __ATOMIC_ACQUIRE))
        __atomic_store_n(dev->cancelled, 1, __ATOMIC_RELAXED);
}

static bool host_ended(pi_device *dev, int32_t ms) {
    pi_host_device *d = pi_host(dev);
    const int64_t until = te_os_now_ns() + (int64_t)ms * 1000000;
    uint32_t done;
    while ((done = __atomic_load_n(&d->done, __ATOMIC_ACQUIRE)) != d->asked) {
        const int64_t left = until - te_os_now_ns();
        if (left <= 0) return false;
        te_os_wait(&d->done, done, left);
        host_look(dev);
    }
    return true;
}

static pi_status host_finish(pi_device *dev) {
    pi_host_device *d = pi_host(dev);
    const int64_t patience_ns = 20000000;
    const int64_t until = te_os_now_ns() + d->wait.limit_ns;
    uint32_t done;
    bool late = false;
    while ((done = __atomic_load_n(&d->done, __ATOMIC_ACQUIRE)) != d->asked) {
        const int64_t left = until - te_os_now_ns();
        if (left <= 0) {
            late = true;
            __atomic_store_n(dev->cancelled, 1, __ATOMIC_RELAXED);
        }
        te_os_wait(&d->done, done, left > patience_ns ? patience_ns : left > 0 ? left : -1);
        host_look(dev);
    }
    if (late && d->status == PI_OK)
        pi_host_fail(
            d, PI_FAIL(PI_ERROR_TIMEOUT, "the device did not end a step within %g s", (double)d->wait.limit_ns * 1e-9));
    if (__atomic_load_n(dev->cancelled, __ATOMIC_RELAXED) && d->status == PI_OK)
        pi_host_fail(d, PI_FAIL(PI_ERROR_TIMEOUT, "the device's part of a step was cancelled"));
    const pi_status st = d->status;
    d->status = PI_OK;
    __atomic_store_n(&d->vanished, 0, __ATOMIC_RELAXED); /* of the last operation: none behind it has taken that back */
    __atomic_store_n(dev->cancelled, 0, __ATOMIC_RELAXED);
    return st == PI_OK ? PI_OK : PI_FAIL(st, "%s", d->problem);
}

/* ---- opening ---- */

static void host_close(pi_device *dev) {
    if (!dev) return;
    pi_host_device *d = pi_host(dev);
    if (d->started) {
        if (dev->cancelled) __atomic_store_n(dev->cancelled, 1, __ATOMIC_RELAXED);
        wait_done(d);
        d->stop = true;
        __atomic_store_n(&d->asked, d->asked + 1, __ATOMIC_RELEASE);
        te_os_wake(&d->asked);
        te_os_thread_join(&d->thread);
    }
    te_pool_free(d->pool);
    te_workspace_free(d->ws);
    te_os_free(d->scratch, d->scratch_floats * sizeof(float));
    while (d->blocks) {
        pi_host_block *next = d->blocks->next;
        te_os_free(d->blocks->p, d->blocks->n_bytes);
        free(d->blocks);
        d->blocks = next;
    }
    free(d);
}

static pi_status start(pi_host_device *d, uint64_t budget_bytes) {
    d->base.ops = pi_device_host();
    d->kernels = te_cpu_kernels();
    if (!d->kernels) return PI_ERROR_ARGUMENT;
    d->base.cancelled = pi_host_share(&d->base, sizeof(uint32_t));
    if (!d->base.cancelled) return PI_ERROR_MEMORY;
    d->budget_bytes = budget_bytes;
    PI_TRY(te_pool_new(1, &d->pool));
    PI_TRY(te_os_thread_start(&d->thread, thread_main, d, "pi-device"));
    d->started = true;
    return PI_OK;
}

static pi_status host_open(int32_t index, uint64_t budget_bytes, pi_device **out) {
    *out = NULL;
    (void)index; /* there are as many as are asked for */
    pi_host_device *d = calloc(1, sizeof *d);
    if (!d) return PI_FAIL(PI_ERROR_MEMORY, "out of memory opening a host device");
    const pi_status st = start(d, budget_bytes);
    if (st != PI_OK) {
        host_close(&d->base);
        return st;
    }
    *out = &d->base;
    return PI_OK;
}

static void host_get_info(pi_device *dev, pi_device_info *out) {
    const pi_host_device *d = pi_host(dev);
    *out = (pi_device_info){.name = "host stand-in",
                            .memory_bytes = d->budget_bytes,
                            .free_bytes = d->budget_bytes - d->used_bytes,
                            .used_bytes = d->used_bytes,
                            .n_parts = PI_HOST_PARTS,
                            .max_decode = PI_HOST_MAX_DECODE,
                            .max_wide = PI_WIDE};
}

static const pi_device_ops host_ops = {.version = PI_DEVICE_VERSION,
                                       .kind = "host",
                                       .error = te_last_error,
                                       .open = host_open,
                                       .close = host_close,
                                       .get_info = host_get_info,
                                       .reserve = pi_host_reserve,
                                       .alloc = pi_host_alloc,
                                       .share = pi_host_share,
                                       .stride = pi_host_stride,
                                       .map = pi_host_map,
                                       .zero_copy = pi_host_zero_copy,
                                       .pack = pi_host_pack,
                                       .upload = pi_host_upload,
                                       .download = pi_host_copy,
                                       .copy = pi_host_copy,
                                       .fetch = pi_host_fetch,
                                       .fetched = pi_host_fetched,
                                       .launch = host_launch,
                                       .look = host_look,
                                       .ended = host_ended,
                                       .finish = host_finish,
                                       .begin = pi_host_begin,
                                       .end = pi_host_end,
                                       .linear = pi_host_linear,
                                       .attention = pi_host_attention,
                                       .latent = pi_host_latent,
                                       .recurrent = pi_host_recurrent,
                                       .gate = pi_host_gate,
                                       .cut = pi_host_cut,
                                       .marks = pi_host_marks,
                                       .ffn = pi_host_ffn,
                                       .route = pi_host_route,
                                       .experts = pi_host_experts,
                                       .merge = pi_host_merge,
                                       .load = pi_host_load,
                                       .logits = pi_host_logits,
                                       .stamp = pi_host_stamp};

const pi_device_ops *pi_device_host(void) { return &host_ops; }
