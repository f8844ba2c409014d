/* device.cu - a GPU as pi_device: opening, programs, and the end of them. */
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../handover.h"
#include "cuda.cuh"

namespace pi {

void note(Cuda *c, te_status st) {
    if (st == TE_OK || c->status != TE_OK) return;
    c->status = st;
    snprintf(c->problem, sizeof c->problem, "%s", te_last_error());
    __atomic_store_n(c->base.cancelled, 1, __ATOMIC_RELAXED); /* nobody waits for the rest */
}

constexpr uint64_t library_bytes = 512u << 20;

void find_blas(Cuda *c) {
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
    if (c->looked_for_blas) return;
    c->looked_for_blas = true;
    const uint64_t before = free_bytes(c);
    for (const char *name : names)
        if (c->te->set_blas(c->d, name) == TE_OK) break;
    count_taken(c, before, library_bytes);
}

namespace {

/* ---- programs ---- */

void forget_graphs(Cuda *c) {
    const uint64_t before = c->n_graphs ? free_bytes(c) : 0;
    for (int32_t i = 0; i < c->n_graphs; i++) {
        c->te->graph_free(c->graph[i].graph);
        c->graph[i] = {};
    }
    if (c->n_graphs) count_graphs(c, before, c->n_graphs);
    c->n_graphs = 0;
}

/* Finds out what a program needs, and gets it. */
pi_status measure(Cuda *c, pi_device_program *program, void *ctx) {
    c->status = TE_OK;
    c->mode = MEASURE;
    program(ctx, &c->base);
    c->mode = IDLE;
    for (int r = 0; r < ROOMS && c->status == TE_OK; r++) {
        if (c->need[r] <= c->have[r]) continue;
        forget_graphs(c); /* they hold the old address */
        give(&c->base, c->room[r], c->have[r]);
        c->have[r] = 0;
        c->room[r] = alloc_alone(&c->base, c->need[r]);
        if (!c->room[r] || c->te->fill(c->d, c->room[r], 0, c->need[r]) != TE_OK) return PI_ERROR_MEMORY;
        c->have[r] = c->need[r];
    }
    return c->status == TE_OK ? PI_OK : (pi_status)te_fail(c->status, "%s", c->problem);
}

void work(Cuda *c, pi_device_program *program, void *ctx) {
    c->mode = WORK;
    program(ctx, &c->base);
    c->mode = IDLE;
}

Graph *find_graph(Cuda *c, uint64_t key) {
    for (int32_t i = 0; i < c->n_graphs; i++)
        if (c->graph[i].key == key) return &c->graph[i];
    return nullptr;
}

/* A place for another graph. The one that ran longest ago gives way where there is none: of mixed ones, or of all. */
Graph *graph_place(Cuda *c, uint64_t key) {
    int32_t n_mixed = 0;
    for (int32_t i = 0; i < c->n_graphs; i++) n_mixed += (c->graph[i].key & PI_KEY_MIXED) != 0;
    const uint64_t among = (key & PI_KEY_MIXED) && n_mixed == PI_MIXED ? PI_KEY_MIXED : 0;
    Graph *at = nullptr;
    if (!among && c->n_graphs < MAX_GRAPHS)
        at = &c->graph[c->n_graphs++];
    else
        for (int32_t i = 0; i < c->n_graphs; i++)
            if ((c->graph[i].key & among) == among && (!at || c->graph[i].last_run < at->last_run)) at = &c->graph[i];
    c->te->graph_free(at->graph);
    *at = {};
    return at;
}

pi_status make_graph(Cuda *c, pi_device_program *program, void *ctx, uint64_t key, Graph **out) {
    const pi_status measured = measure(c, program, ctx);
    if (measured != PI_OK) return measured;
    const uint64_t before = free_bytes(c); /* with the one that gives way */
    Graph *at = graph_place(c, key);
    te_cuda_graph *g = nullptr;
    te_status st = c->te->capture_begin(c->d);
    if (st != TE_OK) return (pi_status)st;
    work(c, program, ctx);
    st = c->te->capture_end(c->d, &g);
    if (c->status != TE_OK) {
        c->te->graph_free(g);
        return (pi_status)te_fail(c->status, "%s", c->problem);
    }
    if (st != TE_OK) return (pi_status)st;
    count_graphs(c, before, 1);
    *at = {key, g, 0};
    *out = at;
    return PI_OK;
}

void thread_main(void *arg) {
    Cuda *c = (Cuda *)arg;
    for (uint32_t n = 0;; n++) {
        while (__atomic_load_n(&c->asked, __ATOMIC_ACQUIRE) == n) te_os_wait(&c->asked, n, -1);
        if (c->stop) return;
        c->may_end = true;
        work(c, c->program, c->ctx);
        c->may_end = false;
        __atomic_store_n(&c->done, n + 1, __ATOMIC_RELEASE);
        te_os_wake(&c->done);
    }
}

void wait_thread(Cuda *c) {
    uint32_t done;
    while ((done = __atomic_load_n(&c->done, __ATOMIC_ACQUIRE)) != c->asked) te_os_wait(&c->done, done, -1);
}

pi_status launch_by_thread(Cuda *c, pi_device_program *program, void *ctx) {
    const pi_status st = measure(c, program, ctx);
    if (st != PI_OK) return st;
    if (!c->started) {
        const te_status started = te_os_thread_start(&c->thread, thread_main, c, "pi-cuda");
        if (started != TE_OK) return (pi_status)started;
        c->started = true;
    }
    if (!c->has_prompted) c->free_before = free_bytes(c);
    c->program = program;
    c->ctx = ctx;
    __atomic_store_n(&c->asked, c->asked + 1, __ATOMIC_RELEASE);
    te_os_wake(&c->asked);
    return PI_OK;
}

pi_status launch(pi_device *dev, pi_device_program *program, void *ctx, uint64_t key) {
    Cuda *c = of(dev);
    wait_thread(c);
    if (!key) return launch_by_thread(c, program, ctx);
    Graph *g = find_graph(c, key);
    if (!g) {
        const pi_status st = make_graph(c, program, ctx, key, &g);
        if (st != PI_OK) return st;
    }
    g->last_run = ++c->n_graph_runs;
    return (pi_status)c->te->graph_launch(c->d, g->graph);
}

void look(pi_device *dev) {
    Cuda *c = of(dev);
    if (c->te->failed(c->d) != TE_OK) __atomic_store_n(dev->cancelled, 1, __ATOMIC_RELAXED);
}

bool ended(pi_device *dev, int32_t ms) {
    Cuda *c = of(dev);
    const int64_t until = te_os_now_ns() + (int64_t)ms * 1000000;
    uint32_t done;
    while ((done = __atomic_load_n(&c->done, __ATOMIC_ACQUIRE)) != c->asked) {
        const int64_t left = until - te_os_now_ns();
        if (left <= 0) return false;
        te_os_wait(&c->done, done, left);
    }
    return c->te->wait(c->d, ms * 1e-3) != TE_TIMEOUT; /* what else it says finish will say again */
}

pi_status finish(pi_device *dev) {
    Cuda *c = of(dev);
    volatile uint32_t *cancelled = dev->cancelled;
    wait_thread(c);
    te_status st = c->te->wait(c->d, finish_seconds);
    if (st == TE_TIMEOUT) {
        *cancelled = 1;
        st = c->te->wait(c->d, 5);
    }
    if (c->free_before) { /* the first prompt has loaded its kernels */
        count_taken(c, c->free_before, graph_bytes);
        c->free_before = 0;
        c->has_prompted = true;
    }
    const bool was = *cancelled != 0;
    *cancelled = 0;
    const te_status failed = c->status;
    c->status = TE_OK;
    if (failed != TE_OK) return (pi_status)te_fail(failed, "%s", c->problem);
    if (st != TE_OK) return (pi_status)te_fail(TE_DEVICE, "%s", te_last_error());
    return was ? (pi_status)te_fail(TE_TIMEOUT, "the GPU timed out waiting for the CPU's part of a step") : PI_OK;
}

/* ---- opening ---- */

void close(pi_device *dev) {
    if (!dev) return;
    Cuda *c = of(dev);
    if (dev->cancelled) *(volatile uint32_t *)dev->cancelled = 1;
    if (c->started) {
        wait_thread(c);
        c->stop = true;
        __atomic_store_n(&c->asked, c->asked + 1, __ATOMIC_RELEASE);
        te_os_wake(&c->asked);
        te_os_thread_join(&c->thread);
    }
    te_pool_free(c->copiers);
    if (c->d) {
        (void)c->te->wait(c->d, 5);
        forget_graphs(c);
        c->te->close(c->d);
    }
    free(c);
}

/* What the driver takes of a GPU for a process that uses it at all: its context, and this library's code. The first
 * opening of a GPU finds it out; where that cannot be seen, it is what it was on an H200: the driver does not say, or
 * there was a context already, whose larger stacks are its maker's. */
enum { MAX_GPUS = 64 };
constexpr uint64_t usual_context_bytes = 310u << 20, least_context_bytes = 64u << 20;
/* More is other programs' that began to use the GPU meanwhile. */
constexpr uint64_t most_context_bytes = 1u << 30;
uint64_t context_bytes[MAX_GPUS];

void count_context(Cuda *c, int32_t index, uint64_t before, uint64_t after) {
    uint64_t *known = &context_bytes[index % MAX_GPUS], n = __atomic_load_n(known, __ATOMIC_RELAXED);
    const uint64_t took = before && after > before ? after - before : 0;
    if (took > least_context_bytes && took < most_context_bytes) n = took;
    if (!n) n = usual_context_bytes;
    __atomic_store_n(known, n, __ATOMIC_RELAXED);
    c->used_bytes = n;
}

pi_status start(Cuda *c, int32_t index, uint64_t budget_bytes) {
    const uint64_t before = used_without_context(index);
    const te_status st = c->te->open(index, &c->d);
    if (st == TE_UNSUPPORTED) { /* no driver, an old one, or a GPU that this library was not built for */
        snprintf(c->problem, sizeof c->problem, "%s", te_last_error());
        return (pi_status)te_fail(TE_DEVICE, "%s", c->problem);
    }
    if (st != TE_OK) return (pi_status)st;
    count_context(c, index, before, used_without_context(index));
    if (budget_bytes > c->used_bytes && budget_bytes - c->used_bytes > free_bytes(c)) {
        te_cuda_info i = {};
        (void)c->te->info(c->d, &i);
        return (pi_status)te_fail(TE_MEMORY, "a budget of %.2f GiB, but only %.2f GiB of %s's memory are free",
                                  (double)budget_bytes / 0x1p30, (double)free_bytes(c) / 0x1p30, i.name);
    }
    c->budget_bytes = budget_bytes;
    c->base.cancelled = (uint32_t *)share(&c->base, sizeof(uint32_t));
    return c->base.cancelled ? PI_OK : PI_ERROR_MEMORY;
}

pi_status open(int32_t index, uint64_t budget_bytes, pi_device **out) {
    *out = nullptr;
    Cuda *c = (Cuda *)calloc(1, sizeof *c);
    if (!c) return (pi_status)te_fail(TE_MEMORY, "out of memory opening a GPU");
    c->base.ops = pi_device_cuda();
    c->te = te_cuda_table();
    const pi_status st = start(c, index, budget_bytes);
    if (st != PI_OK) {
        close(&c->base);
        return st;
    }
    *out = &c->base;
    return PI_OK;
}

void get_info(pi_device *dev, pi_device_info *out) {
    Cuda *c = of(dev);
    te_cuda_info i = {};
    te_cuda_memory m = {};
    (void)c->te->info(c->d, &i);
    (void)c->te->memory(c->d, &m);
    *out = {};
    snprintf(out->name, sizeof out->name, "%s", i.name);
    out->memory_bytes = m.total_bytes;
    out->free_bytes = m.free_bytes;
    out->used_bytes = c->used_bytes;
    out->n_parts = c->te->mark_parts(c->d);
    out->max_decode = TE_CUDA_MAX_TOK;
    const bool has = c->te->half_form(c->d, TE_F16, PI_WIDE, 256).matrices; /* this build, on this GPU */
    out->max_wide = has ? (int32_t)PI_WIDE : (int32_t)TE_CUDA_WIDE_TOK;
}

size_t stride(int32_t type, int32_t cols) { return te_cuda_table()->stride(type, cols); }

const pi_device_ops table = {
    PI_DEVICE_VERSION,
    "cuda",
    te_last_error,
    open,
    close,
    get_info,
    reserve,
    alloc,
    share,
    stride,
    map,
    zero_copy,
    pack,
    upload,
    download,
    copy,
    launch,
    look,
    ended,
    finish,
    op_begin,
    op_end,
    op_linear,
    op_attention,
    op_latent,
    op_recurrent,
    op_gate,
    op_marks,
    op_ffn,
    op_cut,
    op_route,
    op_experts,
    op_merge,
    op_load,
    op_logits,
    op_stamp,
    fetch,
    fetched,
    measure_rates,
};

} // namespace
} // namespace pi

extern "C" const pi_device_ops *pi_device_cuda(void) { return &pi::table; }
