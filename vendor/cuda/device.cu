// device.cu - a device: memory, its stream, graphs, waiting with a limit. Nothing here starts a kernel.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../core/te_os.h"
#include "launch.h"
#include "prefill.cuh"

enum block_kind { DEVICE_MEMORY, HOST_MEMORY, REGISTERED };

struct te_cuda_block {
    te_cuda_block *next;
    void *p;
    size_t n_bytes;
    block_kind kind;
};

struct te_cuda_graph {
    cudaGraphExec_t exec;
};

namespace te {

te_status cuda_status(cudaError_t e, const char *call) {
    if (e == cudaSuccess) return TE_OK;
    (void)cudaGetLastError(); // errors that do not last must not show up in the next call
    switch (e) {
    case cudaErrorMemoryAllocation:
        return te_fail(TE_MEMORY, "%s: the device is out of memory", call);
    case cudaErrorInsufficientDriver: {
        int driver = 0, runtime = 0;
        (void)cudaDriverGetVersion(&driver);
        (void)cudaRuntimeGetVersion(&runtime);
        if (driver == 0) return te_fail(TE_UNSUPPORTED, "no NVIDIA driver was found");
        return te_fail(TE_UNSUPPORTED,
                       "the NVIDIA driver knows CUDA %d.%d, this library needs %d.%d: please update the driver",
                       driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    }
    case cudaErrorNoDevice:
        return te_fail(TE_UNSUPPORTED, "there is no CUDA device");
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
        return te_fail(TE_UNSUPPORTED, "%s: this library was not built for the device's architecture", call);
    case cudaErrorNotSupported:
    case cudaErrorHostMemoryAlreadyRegistered:
        return te_fail(TE_UNSUPPORTED, "%s: %s", call, cudaGetErrorString(e));
    case cudaErrorInvalidValue:
        return te_fail(TE_ARGUMENT, "%s: %s", call, cudaGetErrorString(e));
    default:
        return te_fail(TE_DEVICE, "%s: %s (%s)", call, cudaGetErrorString(e), cudaGetErrorName(e));
    }
}

te_status refuse(te_cuda *d, te_status s) {
    if (s != TE_OK && d->capturing && d->failed == TE_OK) {
        d->failed = s;
        snprintf(d->sentence, sizeof d->sentence, "%s", te_last_error());
    }
    return s;
}

namespace {

#define CALL(expr)                                                                                                     \
    do {                                                                                                               \
        const cudaError_t e_ = (expr);                                                                                 \
        if (e_ != cudaSuccess) return cuda_status(e_, #expr);                                                          \
    } while (0)

te_status use(te_cuda *d) {
    const cudaError_t e = cudaSetDevice(d->info.index);
    return e == cudaSuccess ? TE_OK : cuda_status(e, "cudaSetDevice");
}
// Nothing but operations between capture_begin and capture_end.
te_status use_now(te_cuda *d, const char *what) {
    if (d->capturing) return te_fail(TE_ARGUMENT, "%s while operations are being recorded", what);
    return use(d);
}

te_status keep(te_cuda *d, void *p, size_t n_bytes, block_kind kind) {
    te_cuda_block *b = (te_cuda_block *)malloc(sizeof *b);
    if (!b) return te_fail(TE_MEMORY, "out of memory");
    *b = {d->blocks, p, n_bytes, kind};
    d->blocks = b;
    if (kind == DEVICE_MEMORY) d->owned_bytes += n_bytes;
    return TE_OK;
}
cudaError_t release(te_cuda_block *b) {
    return b->kind == DEVICE_MEMORY ? cudaFree(b->p) : b->kind == HOST_MEMORY ? cudaFreeHost(b->p) : unpin(b->p);
}
te_status drop(te_cuda *d, const void *p, block_kind kind, const char *what) {
    TE_CUDA_TRY(use_now(d, what));
    if (!p) return TE_OK;
    for (te_cuda_block **at = &d->blocks; *at; at = &(*at)->next) {
        te_cuda_block *b = *at;
        if (b->p != p || b->kind != kind) continue;
        *at = b->next;
        if (kind == DEVICE_MEMORY) d->owned_bytes -= b->n_bytes;
        const cudaError_t e = release(b);
        free(b);
        return cuda_status(e, what);
    }
    return te_fail(TE_ARGUMENT, "%s: %p is not of this device", what, p);
}

te_status device_count(int32_t *n) {
    int count = 0;
    *n = 0;
    CALL(cudaGetDeviceCount(&count));
    *n = count;
    return TE_OK;
}

int attribute(cudaDeviceAttr a, int index) {
    int v = 0;
    if (cudaDeviceGetAttribute(&v, a, index) != cudaSuccess) (void)cudaGetLastError();
    return v;
}

te_status fill_info(te_cuda *d, int32_t index) {
    cudaDeviceProp p;
    CALL(cudaGetDeviceProperties(&p, index));
    te_cuda_info *i = &d->info;
    memcpy(i->name, p.name, sizeof i->name - 1);
    i->index = index;
    i->major = p.major;
    i->minor = p.minor;
    i->n_sm = p.multiProcessorCount;
    i->n_bytes = p.totalGlobalMem;
    i->l2_bytes = (uint64_t)p.l2CacheSize;
    i->maps_host = p.canMapHostMemory && attribute(cudaDevAttrCanUseHostPointerForRegisteredMem, index);
    i->registers_readonly = attribute(cudaDevAttrHostRegisterReadOnlySupported, index);
    CALL(cudaDriverGetVersion(&i->driver));
    CALL(cudaRuntimeGetVersion(&i->runtime));
    d->smem_block = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    d->smem_sm = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, index);
    d->overlap = p.major >= 9;
    return TE_OK;
}

te_status open_streams(te_cuda *d) {
    int least = 0, greatest = 0;
    CALL(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    const int priority = least > greatest ? least - 1 : least; // fetches are below
    CALL(cudaStreamCreateWithPriority(&d->stream, cudaStreamNonBlocking, priority));
    CALL(cudaStreamCreateWithPriority(&d->capture, cudaStreamNonBlocking, priority));
    for (cudaEvent_t &e : d->mark) CALL(cudaEventCreate(&e));
    return TE_OK;
}

void device_close(te_cuda *d) {
    if (!d) return;
    if (use(d) == TE_OK) {
        if (d->capturing) {
            cudaGraph_t g = nullptr;
            (void)cudaStreamEndCapture(d->capture, &g);
            if (g) (void)cudaGraphDestroy(g);
        }
        if (d->stream) (void)cudaStreamSynchronize(d->stream);
        fetch_close(d);
        prefill_close(d);
        for (cudaEvent_t e : d->mark)
            if (e) (void)cudaEventDestroy(e);
        if (d->stream) (void)cudaStreamDestroy(d->stream);
        if (d->capture) (void)cudaStreamDestroy(d->capture);
    }
    // Also of a device that is lost: host memory is other devices', too, and is counted in pinned.cu.
    while (d->blocks) {
        te_cuda_block *b = d->blocks;
        d->blocks = b->next;
        (void)release(b);
        free(b);
    }
    (void)cudaGetLastError();
    free(d);
}

// A function of the driver, and the driver's handle of a device of the runtime; whether both were found.
bool of_driver(const char *name, void *function, size_t n_function, int32_t index, int *device) {
    char why[256];
    int (*get)(int *, int) = nullptr;
    void *library = te_os_library("libcuda.so.1", why, sizeof why);
    return library && te_os_symbol(library, name, function, n_function) &&
           te_os_symbol(library, "cuDeviceGet", (void *)&get, sizeof get) && get(device, index) == 0;
}

// Whether this process has a context on the device already. The driver's own function does not make one.
bool has_context(int32_t index) {
    unsigned flags = 0;
    int device = 0, active = 0, (*state)(int, unsigned *, int *) = nullptr;
    if (!of_driver("cuDevicePrimaryCtxGetState", (void *)&state, sizeof state, index, &device)) return true;
    return state(device, &flags, &active) != 0 || active;
}

// A context reserves stacks of 1 KiB for all threads that may run at once, 264 MiB of an H200. Kernels here take some 100
// bytes at most, and the driver enlarges stacks for one that needs more. A context that was there before is left as it is.
constexpr size_t stack_bytes = 128;

// The runtime gives its context back in an exit handler of this library, which runs behind the destructors of libraries that
// were loaded later. A profiler among these (torch's, by CUPTI) is told of the context's end all the same, and frees what it
// has freed. So each context has a reference that nobody gives back: it ends with the process.
void keep_context(int32_t index) {
    enum { MAX_GPUS = 64 };
    static uint32_t kept[MAX_GPUS];
    int device = 0, (*retain)(void **, int) = nullptr;
    void *context = nullptr;
    if (__atomic_exchange_n(&kept[index % MAX_GPUS], 1, __ATOMIC_RELAXED)) return;
    if (of_driver("cuDevicePrimaryCtxRetain", (void *)&retain, sizeof retain, index, &device))
        (void)retain(&context, device);
}

te_status use_first(te_cuda *d) {
    const bool fresh = !has_context(d->info.index);
    TE_CUDA_TRY(use(d));
    keep_context(d->info.index);
    if (fresh && cudaDeviceSetLimit(cudaLimitStackSize, stack_bytes) != cudaSuccess) (void)cudaGetLastError();
    return TE_OK;
}

te_status device_open(int32_t index, te_cuda **out) {
    *out = nullptr;
    int32_t n = 0;
    TE_CUDA_TRY(device_count(&n));
    if (index < 0 || index >= n)
        return te_fail(TE_ARGUMENT, "there is no CUDA device %d: the last is %d", (int)index, (int)n - 1);
    te_cuda *d = (te_cuda *)calloc(1, sizeof *d);
    if (!d) return te_fail(TE_MEMORY, "out of memory");
    d->info.index = index;
    te_status s = use_first(d);
    if (s == TE_OK) s = fill_info(d, index);
    if (s == TE_OK && (d->info.major < 7 || (d->info.major == 7 && d->info.minor < 5)))
        s = te_fail(TE_UNSUPPORTED, "%s has compute capability %d.%d, 7.5 is needed", d->info.name, d->info.major,
                    d->info.minor);
    if (s == TE_OK) s = open_streams(d);
    if (s != TE_OK) {
        device_close(d);
        return s;
    }
    *out = d;
    return TE_OK;
}

te_status device_info(te_cuda *d, te_cuda_info *out) {
    *out = d->info;
    return TE_OK;
}
te_status device_memory(te_cuda *d, te_cuda_memory *out) {
    TE_CUDA_TRY(use(d));
    size_t free_bytes = 0, total = 0;
    CALL(cudaMemGetInfo(&free_bytes, &total));
    *out = {free_bytes, total, d->owned_bytes};
    return TE_OK;
}
void *device_stream(te_cuda *d) { return d->stream; }

te_status device_alloc(te_cuda *d, size_t n_bytes, void **out) {
    *out = nullptr;
    TE_CUDA_TRY(use_now(d, "an allocation"));
    if (n_bytes == 0) n_bytes = 256;
    void *p = nullptr;
    if (cudaMalloc(&p, n_bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        size_t free_bytes = 0, total = 0;
        (void)cudaMemGetInfo(&free_bytes, &total);
        return te_fail(TE_MEMORY, "%s: no room for %.1f MiB, %.1f MiB of %.1f are free", d->info.name,
                       (double)n_bytes / 0x1p20, (double)free_bytes / 0x1p20, (double)total / 0x1p20);
    }
    const te_status s = keep(d, p, n_bytes, DEVICE_MEMORY);
    if (s != TE_OK) {
        (void)cudaFree(p);
        return s;
    }
    *out = p;
    return TE_OK;
}
te_status device_free(te_cuda *d, void *p) { return drop(d, p, DEVICE_MEMORY, "cudaFree"); }

te_status device_upload(te_cuda *d, void *dst, const void *src, size_t n) {
    TE_CUDA_TRY(use_now(d, "an upload"));
    CALL(cudaMemcpyAsync(dst, src, n, cudaMemcpyHostToDevice, d->stream));
    return TE_OK;
}
te_status device_download(te_cuda *d, void *dst, const void *src, size_t n) {
    TE_CUDA_TRY(use_now(d, "a download"));
    CALL(cudaMemcpyAsync(dst, src, n, cudaMemcpyDeviceToHost, d->stream));
    return TE_OK;
}
te_status device_copy(te_cuda *d, void *dst, const void *src, size_t n) {
    const te_status s = use(d);
    if (s != TE_OK) return refuse(d, s);
    return refuse(
        d, cuda_status(cudaMemcpyAsync(dst, src, n, cudaMemcpyDeviceToDevice, d->capturing ? d->capture : d->stream),
                       "cudaMemcpyAsync"));
}
te_status device_fill(te_cuda *d, void *dst, int32_t byte, size_t n) {
    const te_status s = use(d);
    if (s != TE_OK) return refuse(d, s);
    return refuse(d,
                  cuda_status(cudaMemsetAsync(dst, byte, n, d->capturing ? d->capture : d->stream), "cudaMemsetAsync"));
}

te_status host_alloc(te_cuda *d, size_t n_bytes, void **out) {
    *out = nullptr;
    TE_CUDA_TRY(use_now(d, "an allocation"));
    void *p = nullptr;
    const cudaError_t e = cudaHostAlloc(&p, n_bytes ? n_bytes : 1, cudaHostAllocPortable | cudaHostAllocMapped);
    if (e == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return te_fail(TE_MEMORY, "no room for %.1f MiB of pinned host memory", (double)n_bytes / 0x1p20);
    }
    if (e != cudaSuccess) return cuda_status(e, "cudaHostAlloc");
    const te_status s = keep(d, p, n_bytes, HOST_MEMORY);
    if (s != TE_OK) {
        (void)cudaFreeHost(p);
        return s;
    }
    *out = p;
    return TE_OK;
}
te_status host_free(te_cuda *d, void *p) { return drop(d, p, HOST_MEMORY, "cudaFreeHost"); }

te_status host_register(te_cuda *d, const void *p, size_t n_bytes, const void **device) {
    *device = nullptr;
    TE_CUDA_TRY(use_now(d, "cudaHostRegister"));
    // Pages of a file that is mapped read-only can be had read-only, or not at all; memory of the program either way.
    unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
    if (d->info.registers_readonly) flags |= cudaHostRegisterReadOnly;
    const cudaError_t e = pin(p, n_bytes, flags);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return te_fail(TE_UNSUPPORTED, "%.1f MiB of host memory cannot be pinned: %s%s", (double)n_bytes / 0x1p20,
                       cudaGetErrorString(e),
                       d->info.registers_readonly ? "" : " (the device knows no read-only registration)");
    }
    void *there = nullptr;
    te_status s = cuda_status(cudaHostGetDevicePointer(&there, (void *)p, 0), "cudaHostGetDevicePointer");
    if (s == TE_OK) s = keep(d, (void *)p, n_bytes, REGISTERED);
    if (s != TE_OK) {
        (void)unpin(p);
        return s;
    }
    *device = there;
    return TE_OK;
}
te_status host_unregister(te_cuda *d, const void *p) { return drop(d, p, REGISTERED, "cudaHostUnregister"); }

te_status capture_begin(te_cuda *d) {
    TE_CUDA_TRY(use_now(d, "capture_begin"));
    CALL(cudaStreamBeginCapture(d->capture, cudaStreamCaptureModeThreadLocal));
    d->capturing = true;
    d->failed = TE_OK;
    return TE_OK;
}

te_status capture_end(te_cuda *d, te_cuda_graph **out) {
    *out = nullptr;
    if (!d->capturing) return te_fail(TE_ARGUMENT, "capture_end without capture_begin");
    TE_CUDA_TRY(use(d));
    d->capturing = false;
    cudaGraph_t graph = nullptr;
    const cudaError_t e = cudaStreamEndCapture(d->capture, &graph);
    te_status s = d->failed != TE_OK ? te_fail(d->failed, "%s", d->sentence) : cuda_status(e, "cudaStreamEndCapture");
    te_cuda_graph *g = s == TE_OK ? (te_cuda_graph *)calloc(1, sizeof *g) : nullptr;
    if (s == TE_OK && !g) s = te_fail(TE_MEMORY, "out of memory");
    if (s == TE_OK) s = cuda_status(cudaGraphInstantiate(&g->exec, graph, 0), "cudaGraphInstantiate");
    if (s == TE_OK) s = cuda_status(cudaGraphUpload(g->exec, d->stream), "cudaGraphUpload");
    if (graph) (void)cudaGraphDestroy(graph);
    if (s != TE_OK && g) {
        if (g->exec) (void)cudaGraphExecDestroy(g->exec);
        free(g);
        g = nullptr;
    }
    (void)cudaGetLastError();
    *out = g;
    return s;
}

te_status graph_launch(te_cuda *d, te_cuda_graph *g) {
    TE_CUDA_TRY(use_now(d, "graph_launch"));
    CALL(cudaGraphLaunch(g->exec, d->stream));
    return TE_OK;
}
void graph_free(te_cuda_graph *g) {
    if (!g) return;
    if (cudaGraphExecDestroy(g->exec) != cudaSuccess) (void)cudaGetLastError();
    free(g);
}

te_status device_wait(te_cuda *d, double seconds) {
    TE_CUDA_TRY(use_now(d, "a wait"));
    return wait_for(d, d->stream, nullptr, seconds);
}

te_status device_failed(te_cuda *d) {
    TE_CUDA_TRY(use(d));
    const cudaError_t e = cudaStreamQuery(d->stream);
    if (e == cudaSuccess || e == cudaErrorNotReady) return (void)cudaGetLastError(), TE_OK;
    return cuda_status(e, "the device's work");
}

te_status device_mark(te_cuda *d, int32_t slot) {
    TE_CUDA_TRY(use_now(d, "a mark"));
    if (slot < 0 || slot >= 8) return te_fail(TE_ARGUMENT, "mark %d: there are 8", (int)slot);
    CALL(cudaEventRecord(d->mark[slot], d->stream));
    d->marked |= 1 << slot;
    return TE_OK;
}
te_status device_elapsed(te_cuda *d, int32_t from, int32_t to, double *ms) {
    *ms = 0;
    TE_CUDA_TRY(use_now(d, "elapsed"));
    if (from < 0 || from >= 8 || to < 0 || to >= 8 || !(d->marked >> from & 1) || !(d->marked >> to & 1))
        return te_fail(TE_ARGUMENT, "marks %d and %d are not both set", (int)from, (int)to);
    float v = 0;
    CALL(cudaEventElapsedTime(&v, d->mark[from], d->mark[to]));
    *ms = (double)v;
    return TE_OK;
}
void set_overlap(te_cuda *d, int32_t on) { d->overlap = on && d->info.major >= 9; }

const char *last_error() { return te_last_error(); }

// Operations with the device made current.
template <class ARG, te_status (*OP)(te_cuda *, const ARG *)> te_status on(te_cuda *d, const ARG *op) {
    const te_status s = use(d);
    return s == TE_OK ? OP(d, op) : refuse(d, s);
}
te_status add_on(te_cuda *d, const float *x, float *y, int64_t n) {
    const te_status s = use(d);
    return s == TE_OK ? add(d, x, y, n) : refuse(d, s);
}
te_status argmax_on(te_cuda *d, const float *x, size_t ldx, int32_t n, int32_t n_tok, int32_t *best) {
    const te_status s = use(d);
    return s == TE_OK ? argmax(d, x, ldx, n, n_tok, best) : refuse(d, s);
}
te_status set_blas_now(te_cuda *d, const char *path) {
    TE_CUDA_TRY(use_now(d, "set_blas"));
    return set_blas(d, path);
}
te_status load_passed_now(te_cuda *d, int32_t place, double seconds) {
    TE_CUDA_TRY(use_now(d, "a wait for loads"));
    return load_passed(d, place, seconds);
}
template <te_status (*OP)(te_cuda *, int32_t)> te_status slot_on(te_cuda *d, int32_t slot) {
    const te_status s = use(d);
    return s == TE_OK ? OP(d, slot) : refuse(d, s);
}
te_status load_after_on(te_cuda *d) {
    const te_status s = use(d);
    return s == TE_OK ? load_after(d) : refuse(d, s);
}
te_status fetch_open_on(te_cuda *d) {
    TE_CUDA_TRY(use(d));
    return fetch_open(d);
}
te_status fetch_on(te_cuda *d, const te_cuda_pack *op, void *room, size_t n_room) {
    TE_CUDA_TRY(use(d));
    return fetch(d, op, room, n_room);
}
te_status fetched_on(te_cuda *d, uint32_t *n) {
    TE_CUDA_TRY(use(d));
    return fetched(d, n);
}
te_status load_on(te_cuda *d, int32_t slot, const te_cuda_pack *op) {
    const te_status s = use(d);
    return s == TE_OK ? load(d, slot, op) : refuse(d, s);
}

const te_cuda_api table = {
    TE_CUDA_VERSION,
    sizeof(te_cuda_api),
    last_error,
    device_count,
    device_open,
    device_close,
    device_info,
    device_memory,
    device_stream,
    device_alloc,
    device_free,
    device_upload,
    device_download,
    device_copy,
    device_fill,
    host_alloc,
    host_free,
    host_register,
    host_unregister,
    capture_begin,
    capture_end,
    graph_launch,
    graph_free,
    device_wait,
    device_mark,
    device_elapsed,
    set_overlap,
    has_type,
    stride,
    on<te_cuda_pack, pack>,
    prepared_bytes,
    on<te_cuda_prepare, prepare>,
    on<te_linear_args, linear>,
    on<te_cuda_hidden, hidden>,
    parts,
    on<te_cuda_down, down>,
    mark_parts,
    on<te_marks_args, marks>,
    ffn_parts,
    on<te_ffn_args, ffn>,
    on<te_route_args, route>,
    expert_parts,
    on<te_experts_args, experts>,
    on<te_merge_args, merge>,
    attention_floats,
    attention_counters,
    attention_halves,
    attends_beside,
    on<te_attention_args, attention>,
    latent_floats,
    on<te_latent_args, latent>,
    on<te_recurrent_args, recurrent>,
    on<te_gate_args, gate>,
    on<te_cut_args, cut>,
    on<te_cuda_embed, embed>,
    add_on,
    argmax_on,
    set_blas_now,
    gemm_by,
    gemm_scratch,
    half_form,
    on<te_cuda_halve, halve>,
    on<te_cuda_scores, scores>,
    on<te_cuda_gemm, gemm>,
    on<te_cuda_act, act>,
    prompt_experts_words,
    on<te_cuda_prompt_experts, prompt_experts>,
    prompt_attention_floats,
    on<te_attention_args, prompt_attention>,
    load_on,
    slot_on<load_ready>,
    slot_on<load_free>,
    load_after_on,
    slot_on<load_mark>,
    load_passed_now,
    fetch_open_on,
    fetch_on,
    fetched_on,
    device_failed,
};

} // namespace

te_status wait_for(te_cuda *d, cudaStream_t stream, cudaEvent_t event, double seconds) {
    const int64_t begin = te_os_now_ns();
    const uint32_t never = 0; // nobody wakes this wait: it is a sleep
    for (;;) {
        const cudaError_t e = event ? cudaEventQuery(event) : cudaStreamQuery(stream);
        if (e == cudaSuccess) return TE_OK;
        if (e != cudaErrorNotReady) return cuda_status(e, "the device's work");
        (void)cudaGetLastError();
        const int64_t waited = te_os_now_ns() - begin;
        const double passed = (double)waited * 1e-9;
        if (passed > seconds)
            return te_fail(TE_TIMEOUT, "%s did not finish within %.3g seconds", d->info.name, seconds);
        // A token takes milliseconds: look closely at first, then leave the processor to others.
        if (passed > 0.02)
            te_os_wait(&never, 0, 200000);
        else
            te_os_rest(waited);
    }
}

} // namespace te

extern "C" const te_cuda_api *te_cuda_table(void) { return &te::table; }
