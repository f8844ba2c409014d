// elem.cu - small kernels: packing into device layout, embeddings, addition, the largest value.
#include <cfloat>

#include "../core/te_layout.h"
#include "formats.cuh"
#include "launch.h"
#include "prefill.cuh"

namespace te {

// ---- pack ----

// Two bytes a thread; a row's padding becomes 0. ODD: of blocks that begin at any address.
template <bool ODD> __global__ void pack_kernel(const te_cuda_pack a, const te_layout v, int block, int n_blocks) {
    dep_go();
    dep_wait();
    const int row = blockIdx.y;
    const uint8_t *src = (const uint8_t *)a.src +
                         (size_t)(a.rows ? __ldcg(a.rows + row / a.each) * a.each + row % a.each : row) * a.src_stride;
    uint8_t *dst = (uint8_t *)a.dst.w + (size_t)row * a.dst.stride;
    for (int at = 2 * (blockIdx.x * blockDim.x + threadIdx.x); at < (int)a.dst.stride;
         at += 2 * gridDim.x * blockDim.x) {
        auto source = [&](int rest) -> const uint8_t * { // of a byte of the result
            for (int i = 0; i < v.n_planes; i++) {
                const int n = v.plane[i].n_bytes * n_blocks;
                if (rest < n) {
                    const int b = rest / v.plane[i].n_bytes, from = a.blocks ? __ldcg(a.blocks + b) : b;
                    return src + (size_t)from * (size_t)block + v.plane[i].at + rest % v.plane[i].n_bytes;
                }
                rest -= n;
            }
            return nullptr;
        };
        const uint8_t *const from = source(at), *const second = ODD ? source(at + 1) : nullptr;
        uint16_t word = 0;
        if (ODD)
            word = (uint16_t)((from ? *from : 0) | (second ? *second : 0) << 8);
        else if (from)
            word = *(const uint16_t *)from;
        *(uint16_t *)(dst + at) = word;
    }
}

cudaError_t load_pack_kernel() {
    cudaFuncAttributes a;
    const cudaError_t e = cudaFuncGetAttributes(&a, (const void *)pack_kernel<false>);
    return e == cudaSuccess ? cudaFuncGetAttributes(&a, (const void *)pack_kernel<true>) : e;
}

te_status pack(te_cuda *d, const te_cuda_pack *op) {
    TE_CUDA_TRY(check_matrix(d, "pack", &op->dst));
    const te_type_info *info = te_type_get(op->dst.type);
    const bool odd = info->block_bytes % 2;
    if (!op->src || (!odd && (!aligned(op->src, 2) || op->src_stride % 2)))
        return refuse(d, te_fail(TE_ARGUMENT, "pack: rows at %p, %zu bytes apart, are not aligned to 2 bytes", op->src,
                                 op->src_stride));
    if (op->dst.stride > INT32_MAX / 2)
        return refuse(d, te_fail(TE_ARGUMENT, "pack: rows of %zu bytes", op->dst.stride));
    const int threads = 256, n_blocks = op->dst.cols / info->block_weights,
              across = divide_up((int64_t)op->dst.stride, 2 * threads);
    const int32_t each = op->each > 1 ? op->each : 1, most = 32768 > each ? 32768 / each * each : each;
    if (each > 65535) return refuse(d, te_fail(TE_UNSUPPORTED, "pack: %d rows together", (int)each));
    for (int32_t r = 0; r < op->dst.n_rows; r += most) { // a grid's second dimension is limited
        te_cuda_pack part = *op;
        part.each = each;
        part.dst.w = (const uint8_t *)op->dst.w + (size_t)r * op->dst.stride;
        part.dst.n_rows = op->dst.n_rows - r < most ? op->dst.n_rows - r : most;
        if (op->rows)
            part.rows = op->rows + r / each;
        else
            part.src = (const uint8_t *)op->src + (size_t)r * op->src_stride;
        TE_CUDA_TRY(launch(d, "pack", odd ? pack_kernel<true> : pack_kernel<false>,
                           dim3((unsigned)(across < 64 ? across : 64), (unsigned)part.dst.n_rows), threads, 0, part,
                           *te_layout_get(op->dst.type), (int)info->block_bytes, n_blocks));
    }
    return TE_OK;
}

// ---- embeddings ----

// Weight c of a row in the file's layout, in shared memory.
template <class... C> __device__ float file_weight(formats<C...>, int type, const uint8_t *row, int c) {
    float w = 0;
    ((type == C::type ? void(w = C::weight(row, c)) : void()), ...);
    return w;
}

__global__ void embed_kernel(const te_cuda_embed a, int row_bytes) {
    extern __shared__ uint4 shared[];
    dep_go();
    dep_wait();
    const int t = blockIdx.x, id = __ldcg(a.id + t);
    float *y = a.y + t * a.ldy;
    if (id >= 0) { // a row may lie in host memory: it is read once, as wide as its place allows
        const uint8_t *row = (const uint8_t *)a.table.w + (size_t)(id + a.offset) * a.table.stride;
        uint8_t *s = (uint8_t *)shared;
        const int wide = (uintptr_t)row % 16 == 0 ? row_bytes / 16 * 16 : 0;
        for (int i = 16 * threadIdx.x; i < wide; i += 16 * blockDim.x) *(uint4 *)(s + i) = load16(row + i);
        if (row_bytes % 2 || (uintptr_t)row % 2)
            for (int i = wide + threadIdx.x; i < row_bytes; i += blockDim.x) s[i] = row[i];
        else
            for (int i = wide + 2 * threadIdx.x; i < row_bytes; i += 2 * blockDim.x)
                *(uint16_t *)(s + i) = *(const uint16_t *)(row + i);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < a.table.cols; c += blockDim.x) {
        const float w = id >= 0 ? file_weight(formats_all(), a.table.type, (const uint8_t *)shared, c) : 0;
        y[c] = a.add ? y[c] + w : w;
    }
}

te_status embed(te_cuda *d, const te_cuda_embed *op) {
    if (!has_type(op->table.type) || op->table.cols < 1 || op->table.cols % te_type_get(op->table.type)->block_weights)
        return refuse(d, te_fail(TE_UNSUPPORTED, "embed: no kernel for rows of %d weights of type %d",
                                 (int)op->table.cols, (int)op->table.type));
    const bool odd = te_type_get(op->table.type)->block_bytes % 2;
    if (!op->table.w || (!odd && (!aligned(op->table.w, 2) || op->table.stride % 2)) || !op->id || !op->y ||
        op->n_tok < 1)
        return refuse(d, te_fail(TE_ARGUMENT, "embed: a table at %p, rows %zu bytes apart, %d tokens", op->table.w,
                                 op->table.stride, (int)op->n_tok));
    const size_t n_bytes = te_row_bytes(op->table.type, op->table.cols);
    if (n_bytes > d->smem_block) return refuse(d, te_fail(TE_UNSUPPORTED, "embed: rows of %zu bytes", n_bytes));
    return launch(d, "embed", embed_kernel, dim3((unsigned)op->n_tok), 1024, (n_bytes + 15) / 16 * 16, *op,
                  (int)n_bytes);
}

// ---- the rest ----

__global__ void add_kernel(const float *x, float *y, int64_t n) {
    dep_go();
    dep_wait();
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __ldcg(y + i) + __ldcg(x + i);
}
te_status add(te_cuda *d, const float *x, float *y, int64_t n) {
    if (n < 1) return TE_OK;
    if (n > (int64_t)INT32_MAX * 256) return refuse(d, te_fail(TE_ARGUMENT, "add: %lld values", (long long)n));
    return launch(d, "add", add_kernel, dim3((unsigned)divide_up(n, 256)), 256, 0, x, y, n);
}

__global__ void argmax_kernel(const float *x, size_t ldx, int n, int32_t *best) {
    __shared__ float value[32];
    __shared__ int place[32];
    dep_go();
    dep_wait();
    x += blockIdx.x * ldx;
    float v = -FLT_MAX;
    int at = n; // nothing better was found
    auto take = [&](float w, int i) {
        if (i < n && (at == n || w > v || (w == v && i < at))) {
            v = w;
            at = i;
        }
    };
    for (int i = threadIdx.x; i < n; i += 1024) {
        const float w = __ldcg(x + i);
        if (w == w) take(w, i);
    }
    auto fold = [&] {
        for (int o = 16; o; o /= 2) {
            const float w = __shfl_xor_sync(~0u, v, o);
            const int i = __shfl_xor_sync(~0u, at, o);
            take(w, i);
        }
    };
    fold();
    if (threadIdx.x % 32 == 0) {
        value[threadIdx.x / 32] = v;
        place[threadIdx.x / 32] = at;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    v = value[threadIdx.x];
    at = place[threadIdx.x];
    fold();
    if (threadIdx.x == 0) best[blockIdx.x] = at < n ? at : 0;
}
te_status argmax(te_cuda *d, const float *x, size_t ldx, int32_t n, int32_t n_tok, int32_t *best) {
    if (n < 1 || n_tok < 1)
        return refuse(d, te_fail(TE_ARGUMENT, "argmax: of %d values, %d tokens", (int)n, (int)n_tok));
    return launch(d, "argmax", argmax_kernel, dim3((unsigned)n_tok), 1024, 0, x, ldx, n, best);
}

} // namespace te
