/* host.c - the stand-in device: a budget of ordinary memory, and a thread that runs programs. */
#include "host.h"

#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_os.h"
#include "../../vendor/core/te_pool.h"
#include "../../vendor/core/te_types.h"
#include "../plan/plan.h"

static const int64_t usual_wait_ns = 60000000000;

pi_host_fault pi_host_faults;

bool pi_host_is_due(int32_t *fault) {
    return __atomic_load_n(fault, __ATOMIC_RELAXED) > 0 && __atomic_sub_fetch(fault, 1, __ATOMIC_RELAXED) == 0;
}

void pi_host_fail(pi_host_device *d, pi_status status) {
    if (status == PI_OK || d->status != PI_OK) return;
    d->status = status;
    strncpy(d->problem, te_last_error(), sizeof d->problem - 1);
    __atomic_store_n(d->base.cancelled, 1, __ATOMIC_RELAXED); /* who waits for this program waits in vain */
}

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
    if (pi_host_is_due(&pi_host_faults.launch)) return PI_FAIL(PI_ERROR_DEVICE, "a fault that was asked for: launch");
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
    __atomic_store_n(dev->cancelled, 0, __ATOMIC_RELAXED);
    return st == PI_OK ? PI_OK : PI_FAIL(st, "%s", d->problem);
}

/* ---- memory ---- */

static void *add_block(pi_host_device *d, size_t n_bytes) {
    pi_host_block *b = malloc(sizeof *b);
    void *p = te_os_alloc(n_bytes ? n_bytes : 1);
    if (!b || !p || pi_host_is_due(&pi_host_faults.alloc)) {
        te_os_free(p, n_bytes ? n_bytes : 1);
        free(b);
        (void)PI_FAIL(PI_ERROR_MEMORY, "out of memory for %zu bytes of a host device", n_bytes);
        return NULL;
    }
    *b = (pi_host_block){d->blocks, p, n_bytes ? n_bytes : 1};
    d->blocks = b;
    return p;
}

static pi_status use(pi_host_device *d, size_t n_bytes) {
    if (d->budget_bytes && (n_bytes > d->budget_bytes || d->used_bytes > d->budget_bytes - n_bytes))
        return PI_FAIL(PI_ERROR_MEMORY, "%zu bytes more would exceed the device's budget: %llu of %llu are used",
                       n_bytes, (unsigned long long)d->used_bytes, (unsigned long long)d->budget_bytes);
    d->used_bytes += n_bytes;
    return PI_OK;
}

static pi_status host_reserve(pi_device *dev, size_t n_bytes) {
    pi_host_device *d = pi_host(dev);
    PI_TRY(use(d, n_bytes));
    d->reserved_bytes = n_bytes;
    return PI_OK;
}

/* Whatever fits is cut from what is reserved, as a GPU does it. */
static void *host_alloc(pi_device *dev, size_t n_bytes) {
    pi_host_device *d = pi_host(dev);
    const bool cut = n_bytes <= d->reserved_bytes;
    if (!cut && use(d, n_bytes) != PI_OK) return NULL;
    void *p = add_block(d, n_bytes);
    if (cut && p) d->reserved_bytes -= n_bytes;
    if (!cut && !p) d->used_bytes -= n_bytes;
    return p;
}

static void *host_share(pi_device *dev, size_t n_bytes) { return add_block(pi_host(dev), n_bytes); }

static pi_status host_upload(pi_device *dev, void *to, const void *from, size_t n_bytes) {
    (void)dev;
    if (pi_host_is_due(&pi_host_faults.transfer)) return PI_FAIL(PI_ERROR_DEVICE, "a fault that was asked for: copy");
    memcpy(to, from, n_bytes);
    return PI_OK;
}
static size_t host_stride(int32_t type, int32_t cols) {
    return (te_row_bytes(type, cols) + PI_DEVICE_ROW - 1) / PI_DEVICE_ROW * PI_DEVICE_ROW;
}
static pi_status host_map(pi_device *dev, const void *p, size_t n_bytes) {
    pi_host_device *d = pi_host(dev);
    if (pi_host_faults.map) return PI_FAIL(PI_ERROR_UNSUPPORTED, "a fault that was asked for: map");
    if (d->n_mapped == PI_HOST_RANGES)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "more than %d pieces of host memory to map", PI_HOST_RANGES);
    d->mapped[d->n_mapped++] = (pi_host_range){p, n_bytes};
    return PI_OK;
}
static bool host_reads(pi_device *dev, const te_mat *m) {
    const pi_host_device *d = pi_host(dev);
    const char *first = m->w, *end = first + m->stride * (size_t)(m->n_rows - 1) + te_row_bytes(m->type, m->cols);
    for (int32_t i = 0; i < d->n_mapped; i++)
        if (first >= d->mapped[i].p && end <= d->mapped[i].p + d->mapped[i].n_bytes) return true;
    return false;
}
static pi_status host_pack(pi_device *dev, const te_mat *from, const int32_t *ids, int32_t n, bool columns,
                           te_mat *out) {
    (void)dev;
    const int32_t cols = columns ? n : from->cols;
    *out = (te_mat){out->w, host_stride(from->type, cols), from->type, cols, columns ? from->n_rows : n};
    pi_host_gather(from, ids, n, columns, out);
    return PI_OK;
}
static pi_status host_copy(pi_device *dev, void *to, const void *from, size_t n_bytes) {
    return host_upload(dev, to, from, n_bytes);
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
    d->base.cancelled = add_block(d, sizeof(uint32_t));
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
                            .max_decode = PI_HOST_MAX_DECODE};
}

static const pi_device_ops host_ops = {.version = PI_DEVICE_VERSION,
                                       .kind = "host",
                                       .error = te_last_error,
                                       .open = host_open,
                                       .close = host_close,
                                       .get_info = host_get_info,
                                       .reserve = host_reserve,
                                       .alloc = host_alloc,
                                       .share = host_share,
                                       .stride = host_stride,
                                       .map = host_map,
                                       .reads = host_reads,
                                       .pack = host_pack,
                                       .upload = host_upload,
                                       .download = host_copy,
                                       .copy = host_copy,
                                       .launch = host_launch,
                                       .look = host_look,
                                       .finish = host_finish,
                                       .begin = pi_host_begin,
                                       .end = pi_host_end,
                                       .linear = pi_host_linear,
                                       .attention = pi_host_attention,
                                       .marks = pi_host_marks,
                                       .ffn = pi_host_ffn,
                                       .merge = pi_host_merge,
                                       .load = pi_host_load,
                                       .stamp = pi_host_stamp};

const pi_device_ops *pi_device_host(void) { return &host_ops; }
