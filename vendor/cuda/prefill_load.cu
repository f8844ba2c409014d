// prefill_load.cu - matrices of host memory that are on their way to the device while it computes.
//
// Whole matrices whose rows are the same on both sides are copied. For others a stream of its own, of high priority, runs a
// kernel of few blocks: each brings some rows after others into shared memory as they lie in the file, and writes them from
// there in device layout. So everything crosses the bus once, in 16-byte words, whatever the list of rows or blocks, and most
// multiprocessors stay with the products. Words pass through registers: an H100 reads host memory at 46 to 49 GB/s that way,
// and at 18 by asynchronous copies into shared memory, whatever the number of blocks.
#include <cstdlib>

#include "../core/te_layout.h"
#include "prefill.cuh"

namespace te {

constexpr int LOAD_THREADS = 512, LOAD_BLOCKS = 32;
constexpr int LOAD_WORDS = 8; // of 16 bytes that a thread may have on their way; 2, if a row has so few

struct load_args {
    te_cuda_pack op;
    te_layout layout;
    int block;    // bytes
    int n_blocks; // of a result's row
    int room;     // bytes of a row in shared memory
    int group;    // rows at a time: a power of 2
    int list_at;  // of op.wanted: where in shared memory the wanted entries of op.rows are listed
};

// Places of the wanted entries of rows, in order; how many. All threads call it; ends with a barrier.
static __device__ int list_wanted(const te_cuda_pack &op, int *list, int *n_wanted) {
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x, n = op.dst.n_rows / op.each;
        int m = 0;
        for (int k0 = 0; k0 < n; k0 += 32) {
            const bool on = k0 + lane < n && __ldcg(op.wanted + __ldcg(op.rows + k0 + lane)) != 0;
            const unsigned vote = __ballot_sync(~0u, on);
            if (on) list[m + __popc(vote & ((1u << lane) - 1))] = k0 + lane;
            m += __popc(vote);
        }
        if (lane == 0) *n_wanted = m;
    }
    __syncthreads();
    return *n_wanted;
}

__global__ void __launch_bounds__(LOAD_THREADS) load_kernel(const __grid_constant__ load_args a) {
    extern __shared__ uint4 shared[];
    __shared__ int n_wanted;
    const te_cuda_pack &op = a.op;
    int *const list = (int *)((uint8_t *)shared + a.list_at);
    const int n_rows = op.wanted ? list_wanted(op, list, &n_wanted) * op.each : op.dst.n_rows;
    const int n_groups = (n_rows + a.group - 1) / a.group, block = a.block;
    const int first = op.blocks ? __ldg(op.blocks) : 0,
              end = op.blocks ? __ldg(op.blocks + a.n_blocks - 1) + 1 : a.n_blocks;
    const int span = (end - first) * block, units = (int)(op.dst.stride / 16);
    // A row of a group is one of these threads', so that each asks the list once.
    const int width = LOAD_THREADS / a.group, mine = threadIdx.x / width, lane = threadIdx.x % width;
    const uintptr_t src = (uintptr_t)op.src + (size_t)first * (size_t)block;
    // Row r of those that come: which of the result it is, and where it comes from.
    auto result = [&](int r) { return op.wanted ? list[r / op.each] * op.each + r % op.each : r; };
    auto source = [&](int r) {
        return src + (size_t)(op.rows ? __ldg(op.rows + r / op.each) * op.each + r % op.each : r) * op.src_stride;
    };
    uint4 words[LOAD_WORDS];
    auto ask = [&](int g) { // for whole words around a row: they never leave its pages
        const int r = g * a.group + mine;
        if (g >= n_groups || r >= n_rows) return;
        const uintptr_t from = source(result(r));
        const int n = (int)((from % 16 + (size_t)span + 15) / 16);
        const uint4 *at = (const uint4 *)(from / 16 * 16);
#pragma unroll
        for (int i = 0; i < LOAD_WORDS; i++)
            if (lane + i * width < n) words[i] = __ldcs(at + lane + i * width);
    };
    auto put = [&](int turn) { // room has their last one, and those behind it are not read
        uint4 *to = (uint4 *)((uint8_t *)shared + (size_t)((turn * a.group + mine) * a.room));
#pragma unroll
        for (int i = 0; i < LOAD_WORDS; i++)
            if (lane + i * width < a.room / 16) to[lane + i * width] = words[i];
    };
    // Bytes u * 16 to u * 16 + 15 of a row of the result.
    auto word = [&](const uint8_t *row, int u) {
        int rest = 16 * u, p = 0; // fields of all blocks stand together
        while (p < a.layout.n_planes && rest >= a.layout.plane[p].n_bytes * a.n_blocks)
            rest -= a.layout.plane[p++].n_bytes * a.n_blocks;
        if (p == a.layout.n_planes) return make_uint4(0, 0, 0, 0);
        int bytes = a.layout.plane[p].n_bytes; // 0: behind the last plane
        int b = rest / bytes, i = rest % bytes;
        auto place = [&] {
            return row + (op.blocks ? __ldg(op.blocks + b) - first : b) * block + a.layout.plane[p].at + i;
        };
        if (i + 16 <= bytes && (uintptr_t)place() % 16 == 0) return *(const uint4 *)place();
        auto advance = [&](int n) {
            i += n;
            if (i < bytes) return;
            i = 0;
            if (++b < a.n_blocks) return;
            b = 0;
            bytes = ++p < a.layout.n_planes ? a.layout.plane[p].n_bytes : 0;
        };
        uint32_t v[4] = {0, 0, 0, 0};
        if (block % 2) { // they begin at any address
#pragma unroll
            for (int k = 0; k < 16; k++, advance(1)) {
                if (!bytes) break;
                v[k / 4] |= (uint32_t)*place() << k % 4 * 8;
            }
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++, advance(2)) {
                if (!bytes) break;
                v[k / 2] |= (uint32_t)(*(const uint16_t *)place()) << k % 2 * 16;
            }
        }
        return make_uint4(v[0], v[1], v[2], v[3]);
    };
    const int step = gridDim.x;
    ask(blockIdx.x);
    int turn = 0;
    for (int g = blockIdx.x; g < n_groups; g += step, turn ^= 1) {
        put(turn);
        __syncthreads(); // the room of the other turn has been read, too
        ask(g + step);
        if (g * a.group + mine >= n_rows) continue;
        const int r = result(g * a.group + mine);
        const uintptr_t off = (op.src_stride % 16 ? source(r) : src) % 16;
        const uint8_t *row = (const uint8_t *)shared + (size_t)((turn * a.group + mine) * a.room) + off;
        uint4 *to = (uint4 *)((uint8_t *)op.dst.w + (size_t)r * op.dst.stride);
        for (int u = lane; u < units; u += width) to[u] = word(row, u);
    }
}

// ---- streams ----

static te_status open_loads(te_cuda *d, te_cuda_prefill *p) {
    if (p->load) return TE_OK;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed; // the first load may be one that is recorded
    cudaError_t e = cudaThreadExchangeStreamCaptureMode(&mode);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->fork, cudaEventDisableTiming);
    for (int i = 0; i < TE_CUDA_SLOTS && e == cudaSuccess; i++) {
        e = cudaEventCreateWithFlags(&p->ready[i], cudaEventDisableTiming);
        if (e == cudaSuccess) e = cudaEventCreateWithFlags(&p->free[i], cudaEventDisableTiming);
    }
    for (cudaEvent_t &passed : p->passed)
        if (e == cudaSuccess) e = cudaEventCreateWithFlags(&passed, cudaEventDisableTiming);
    int least = 0, greatest = 0;
    if (e == cudaSuccess) e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (e == cudaSuccess) e = cudaStreamCreateWithPriority(&p->load, cudaStreamNonBlocking, greatest);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return refuse(d, cuda_status(e, "a stream for loads"));
}

void prefill_close(te_cuda *d) {
    te_cuda_prefill *p = d->prefill;
    if (!p) return;
    if (p->load) {
        (void)cudaStreamSynchronize(p->load);
        (void)cudaStreamDestroy(p->load);
    }
    if (p->fork) (void)cudaEventDestroy(p->fork);
    for (int i = 0; i < TE_CUDA_SLOTS; i++) {
        if (p->ready[i]) (void)cudaEventDestroy(p->ready[i]);
        if (p->free[i]) (void)cudaEventDestroy(p->free[i]);
    }
    for (cudaEvent_t passed : p->passed)
        if (passed) (void)cudaEventDestroy(passed);
    (void)set_blas(d, nullptr);
    free(p);
    d->prefill = nullptr;
}

static cudaStream_t stream_of(te_cuda *d) { return d->capturing ? d->capture : d->stream; }

// The recording under way; 0: none.
static te_status recording_of(te_cuda *d, unsigned long long *now) {
    *now = 0;
    if (!d->capturing) return TE_OK;
    cudaStreamCaptureStatus status;
    const cudaError_t e = cudaStreamGetCaptureInfo(d->capture, &status, now);
    if (e != cudaSuccess) return refuse(d, cuda_status(e, "cudaStreamGetCaptureInfo"));
    ++*now;
    return TE_OK;
}

// What slots know holds within one recording, or outside of any.
static te_status slots_of(te_cuda *d, int32_t slot, te_cuda_prefill **out) {
    if (slot < 0 || slot >= TE_CUDA_SLOTS)
        return refuse(d, te_fail(TE_ARGUMENT, "slot %d: there are %d", (int)slot, TE_CUDA_SLOTS));
    TE_CUDA_TRY(prefill_state(d, out));
    te_cuda_prefill *p = *out;
    TE_CUDA_TRY(open_loads(d, p));
    unsigned long long now = 0;
    TE_CUDA_TRY(recording_of(d, &now));
    if (now != p->recording) {
        p->recording = now;
        p->forked = p->loaded = p->freed = 0;
    }
    return TE_OK;
}

bool needs_kernel(const te_cuda_pack *op) {
    const size_t n_bytes = te_row_bytes(op->dst.type, op->dst.cols);
    return op->rows || op->blocks || te_layout_get(op->dst.type)->n_planes > 1 || op->src_stride != n_bytes ||
           op->dst.stride != n_bytes;
}
cudaError_t load_rows_kernels() {
    cudaFuncAttributes a;
    const cudaError_t e = cudaFuncGetAttributes(&a, (const void *)load_kernel);
    return e == cudaSuccess ? load_pack_kernel() : e;
}

te_status put_rows(te_cuda *there, const te_cuda_pack *op, int most_blocks) {
    load_args a = {};
    a.op = *op;
    if (a.op.each < 1) a.op.each = 1;
    const te_type_info *info = te_type_get(op->dst.type);
    a.layout = *te_layout_get(op->dst.type);
    a.block = info->block_bytes;
    a.n_blocks = op->dst.cols / info->block_weights;
    // With a list of blocks a row may be read from any of its blocks to any other.
    const size_t n_bytes = te_row_bytes(op->dst.type, op->dst.cols), span = op->blocks ? op->src_stride : n_bytes;
    if (a.layout.n_planes == 1 && !op->blocks) { // a row as it is: one block
        a.block = a.layout.plane[0].n_bytes = (int)n_bytes;
        a.n_blocks = 1;
    }
    const size_t room = (span + 32 + 15) / 16 * 16;
    if (!op->rows || op->dst.n_rows % a.op.each) a.op.wanted = nullptr;
    if (!op->rows && a.n_blocks == 1 && op->src_stride == n_bytes && op->dst.stride == n_bytes) {
        return cuda_status(cudaMemcpyAsync((void *)op->dst.w, op->src, n_bytes * (size_t)op->dst.n_rows,
                                           cudaMemcpyDefault, there->stream),
                           "cudaMemcpyAsync");
    } else if (2 * room <= there->smem_block && room <= 16 * LOAD_WORDS * LOAD_THREADS) {
        a.room = (int)room;
        for (a.group = 1; a.group < 16 && a.group * room <= 16 * LOAD_THREADS;) a.group *= 2;
        const int groups = divide_up(op->dst.n_rows, a.group), blocks = groups < most_blocks ? groups : most_blocks;
        size_t smem = 2 * (size_t)a.group * room;
        const size_t with_list = smem + sizeof(int) * (size_t)(op->dst.n_rows / a.op.each);
        if (with_list > there->smem_block - 64) a.op.wanted = nullptr; // then all come
        a.list_at = (int)smem;
        if (a.op.wanted) smem = with_list;
        return launch(there, "load", load_kernel, dim3((unsigned)blocks), LOAD_THREADS, smem, a);
    } else {
        return pack(there, op);
    }
}

static cudaError_t fork_loads(te_cuda *d, te_cuda_prefill *p) {
    const cudaError_t e = cudaEventRecord(p->fork, stream_of(d));
    return e == cudaSuccess ? cudaStreamWaitEvent(p->load, p->fork, 0) : e;
}

te_status load_after(te_cuda *d) {
    te_cuda_prefill *p = d->prefill;
    unsigned long long now = 0;
    TE_CUDA_TRY(recording_of(d, &now));
    if (!p || !p->load || p->recording != now || !p->forked) return TE_OK; // the first load will
    return refuse(d, cuda_status(fork_loads(d, p), "load_after"));
}

te_status load(te_cuda *d, int32_t slot, const te_cuda_pack *op) {
    te_cuda_prefill *p;
    TE_CUDA_TRY(slots_of(d, slot, &p));
    TE_CUDA_TRY(check_matrix(d, "load", &op->dst));
    const te_type_info *info = te_type_get(op->dst.type);
    const bool odd = info->block_bytes % 2;
    if (!op->src || (!odd && (!aligned(op->src, 2) || op->src_stride % 2)) || op->dst.stride > INT32_MAX)
        return refuse(d, te_fail(TE_ARGUMENT, "load: rows at %p, %zu bytes apart, are not aligned to 2 bytes", op->src,
                                 op->src_stride));
    cudaError_t e = cudaSuccess;
    if (!p->forked) { // the loads' stream becomes part of what is recorded
        e = fork_loads(d, p);
        p->forked = 1;
    }
    if (e == cudaSuccess && (p->freed >> slot & 1)) e = cudaStreamWaitEvent(p->load, p->free[slot], 0);
    if (e != cudaSuccess) return refuse(d, cuda_status(e, "load"));
    te_cuda there = *d; // the same device, another stream
    there.stream = there.capture = p->load;
    there.overlap = false;
    te_status s = put_rows(&there, op, LOAD_BLOCKS);
    if (s == TE_OK) s = cuda_status(cudaEventRecord(p->ready[slot], p->load), "cudaEventRecord");
    if (s == TE_OK) p->loaded |= 1 << slot;
    return refuse(d, s);
}

te_status load_ready(te_cuda *d, int32_t slot) {
    te_cuda_prefill *p;
    TE_CUDA_TRY(slots_of(d, slot, &p));
    if (!(p->loaded >> slot & 1)) return TE_OK;
    return refuse(d, cuda_status(cudaStreamWaitEvent(stream_of(d), p->ready[slot], 0), "cudaStreamWaitEvent"));
}

te_status load_free(te_cuda *d, int32_t slot) {
    te_cuda_prefill *p;
    TE_CUDA_TRY(slots_of(d, slot, &p));
    const te_status s = cuda_status(cudaEventRecord(p->free[slot], stream_of(d)), "cudaEventRecord");
    if (s == TE_OK) p->freed |= 1 << slot;
    return refuse(d, s);
}

// The state, once loads were put.
static te_status marks_of(te_cuda *d, int32_t place, te_cuda_prefill **out) {
    TE_CUDA_TRY(prefill_state(d, out));
    if (place < 0 || place >= 2 || d->capturing)
        return te_fail(TE_ARGUMENT, "mark %d of loads: there are 2, and none in a recording", (int)place);
    return open_loads(d, *out);
}

te_status load_mark(te_cuda *d, int32_t place) {
    te_cuda_prefill *p;
    TE_CUDA_TRY(marks_of(d, place, &p));
    TE_CUDA_TRY(cuda_status(cudaEventRecord(p->passed[place], p->load), "cudaEventRecord"));
    p->marked |= 1 << place;
    return TE_OK;
}

te_status load_passed(te_cuda *d, int32_t place, double seconds) {
    te_cuda_prefill *p;
    TE_CUDA_TRY(marks_of(d, place, &p));
    if (!(p->marked >> place & 1)) return TE_OK;
    return wait_for(d, p->load, p->passed[place], seconds);
}

} // namespace te
