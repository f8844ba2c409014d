// one.cuh - products of one token where nothing is unusual: no list, a row's activations in shared memory at once; what
// is posted for a CPU takes a kernel of its own. They do what rows.cuh and ffn.cuh do, in little code: if all kernels of
// a layer fit into the instruction cache, no layer waits for instructions.
#ifndef TE_CUDA_ONE_CUH
#define TE_CUDA_ONE_CUH

#include "rows.cuh"

namespace te {

// The input on its way to shared memory; columns are a multiple of 4.
template <class C> struct one_input {
    float4 v[FILL_ONCE];
    __device__ __forceinline__ void load(const rows_args &a) {
#pragma unroll
        for (int k = 0; k < FILL_ONCE; k++) {
            const int c = 4 * (threadIdx.x + k * ROWS_THREADS);
            v[k] = c < a.cols ? __ldcg((const float4 *)(a.x + c)) : make_float4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ void put(const rows_args &a, uint4 *q, bytes32 *scales) const {
#pragma unroll
        for (int k = 0; k < FILL_ONCE; k++) {
            const int i = threadIdx.x + k * ROWS_THREADS;
            if (4 * i < a.tile) put_x<C>(a, 0, i, v[k], q, scales);
        }
    }
    // What an RMS norm multiplies all columns with; the block's threads meet.
    __device__ __forceinline__ float scale(const rows_args &a, float eps, float *room) const {
        float s = 0;
#pragma unroll
        for (int k = 0; k < FILL_ONCE; k++) s += squares(v[k], 0, 4, 0);
        s = warp_sum(s);
        if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = s;
        __syncthreads();
        s = 0;
#pragma unroll
        for (int w = 0; w < ROWS_WARPS; w++) s += room[w];
        return 1.0f / sqrtf(s / (float)a.cols + eps);
    }
    __device__ __forceinline__ one_input times(const early_norm &early) const {
        one_input r;
#pragma unroll
        for (int k = 0; k < FILL_ONCE; k++)
            r.v[k] =
                make_float4(v[k].x * early.w[k].x, v[k].y * early.w[k].y, v[k].z * early.w[k].z, v[k].w * early.w[k].w);
        return r;
    }
    // This block's share of the side, which is normed or not.
    __device__ __forceinline__ void keep(const rows_args &a, const early_norm &early, float scale, int lo,
                                         int hi) const {
        const bool normed = a.side.norm.kind != TE_NO_NORM;
#pragma unroll
        for (int k = 0; k < FILL_ONCE; k++) {
            const int i = threadIdx.x + k * ROWS_THREADS;
            const float4 w = early.w[k], x = v[k];
            if (i >= lo && i < hi)
                *(float4 *)(a.side.keep + 4 * i) =
                    normed ? make_float4(x.x * scale * w.x, x.y * scale * w.y, x.z * scale * w.z, x.w * scale * w.w)
                           : x;
        }
    }
};

template <class C> __device__ __forceinline__ acts acts_of(const rows_args &a, const uint4 *q, const bytes32 *scales) {
    return {q, scales, C::int8 ? a.tile / 16 : a.tile / 4, a.tile / 32};
}
template <class C> __device__ __forceinline__ int pieces_of(const rows_args &a) {
    return (a.cols + C::lane_weights - 1) / C::lane_weights;
}
// The sum of row r from its tasks.
__device__ __forceinline__ float row_sum(const float *part, int r, int parts) {
    float s = 0;
#pragma unroll 1
    for (int i = 0; i < parts; i++) s += part[r * parts + i];
    return s;
}
// Each warp's first task of rows row(0) ... row(n - 1).
template <class C, class F>
__device__ __forceinline__ void start_tasks(const rows_args &a, int n, rows_task<C> &ahead, F row) {
    const int r = (int)(threadIdx.x / 32) / a.parts, p = (int)(threadIdx.x / 32) - r * a.parts;
    if (r < n) ahead.load(row(r), p * rows_task<C>::pieces, pieces_of<C>(a));
}

// This block's share of a side that is posted, a column a thread: words that leave the device together are next to each
// other.
__device__ __forceinline__ void post_side(const rows_args &a, float scale, int lo, int hi) {
    const float *w = a.side.norm.kind != TE_NO_NORM ? a.side.norm.w : nullptr;
    const uint32_t number = ticket_number(a.side.ticket);
#pragma unroll 1
    for (int c = 4 * lo + (int)threadIdx.x; c < 4 * hi; c += ROWS_THREADS) {
        float v = __ldcg(a.x + c);
        if (w) v = v * scale * __ldg(w + c);
        store_word(a.side.publish + c, __float_as_uint(v), number);
        if (a.side.keep) a.side.keep[c] = v;
    }
}
// Marks of this block's n rows, whose sums are there (te_marks_args).
__device__ __forceinline__ void post_marks(const rows_args &a, const float *part, int n) {
    const int words = ((a.n + (int)gridDim.x - 1) / (int)gridDim.x + 31) / 32;
    const float threshold = __ldcg(a.product[0].threshold_at);
    const uint32_t number = ticket_number(a.ticket);
#pragma unroll 1
    for (int e = threadIdx.x; e < 32 * words; e += ROWS_THREADS) {
        const uint32_t bits = __ballot_sync(~0u, e < n && row_sum(part, e, a.parts) >= threshold);
        if (e % 32 == 0) store_word(a.publish + (size_t)blockIdx.x * words + e / 32, bits, number);
    }
}

template <class C, bool POST>
__global__ void __launch_bounds__(ROWS_THREADS, 2)
    one_rows_kernel(const __grid_constant__ rows_args a, const __grid_constant__ rows_smem at) {
    extern __shared__ uint4 shared[];
    __shared__ float room[ROWS_WARPS];
    uint8_t *s = (uint8_t *)shared;
    bytes32 *scales = (bytes32 *)(s + at.acts);
    float *part = (float *)(s + at.acts + at.scales);
    const uint8_t **pointer = (const uint8_t **)(s + at.acts + at.scales + at.part);
    const bool marks = POST && a.publish;
    const int b = blockIdx.x,
              lo = marks ? (int)((int64_t)a.n * b / gridDim.x) : b * a.share_each + min(b, a.share_more),
              n = marks ? (int)((int64_t)a.n * (b + 1) / gridDim.x) - lo
                        : max(0, min(a.share_each + (b < a.share_more), a.n - lo));
    auto product_of = [&](int j) -> const rows_product & {
        int m = 0;
#pragma unroll 1
        while (m + 1 < a.n_products && j >= a.product[m + 1].first) m++;
        return a.product[m];
    };
    auto row = [&](int r) {
        const rows_product &p = product_of(lo + r);
        return p.w + (size_t)(lo + r - p.first) * p.stride;
    };
    rows_task<C> ahead;
    early_norm early;
    start_tasks<C>(a, n, ahead, row);
#pragma unroll 1
    for (int r = threadIdx.x; r < n; r += ROWS_THREADS) {
        const rows_product &p = product_of(lo + r);
        pointer[r] = row(r);
        if (p.bias) prefetch_l2(p.bias + (lo + r - p.first));
    }
    const bool normed = a.norm.kind != TE_NO_NORM;
    const te_norm &norm = normed ? a.norm : a.side.norm; // of both the same
    early.load(norm, a.cols);
    dep_go();
    dep_wait();
    float scale = 1;
    if (a.tile > 4 * FILL_ONCE * ROWS_THREADS) {
        scale = fill_wide<C>(a, shared, scales, room);
    } else {
        one_input<C> x;
        x.load(a);
        const int side_blocks = min((int)gridDim.x - a.side_first, SIDE_BLOCKS), side = b - a.side_first;
        const bool keeps = (a.side.keep || (POST && a.side.publish)) && side >= 0 && side < side_blocks;
        if (n > 0) (normed ? x.times(early) : x).put(a, shared, scales);
        if (norm.kind != TE_NO_NORM && (normed || keeps))
            scale = x.scale(a, norm.eps, room);
        else
            __syncthreads();
        if (keeps) {
            const int from = a.cols / 4 * side / side_blocks, to = a.cols / 4 * (side + 1) / side_blocks;
            if (POST && a.side.publish)
                post_side(a, scale, from, to);
            else
                x.keep(a, early, scale, from, to);
        }
    }
    if (n == 0 && !marks) return;
    run_tasks<C, 1>(pointer, n, a.parts, 0, pieces_of<C>(a), acts_of<C>(a, shared, scales), ahead,
                    [&](int i, float v) { part[i] = v; });
    __syncthreads();
    if (marks) return post_marks(a, part, n);
#pragma unroll 1
    for (int r = threadIdx.x; r < n; r += ROWS_THREADS) {
        const rows_product &p = product_of(lo + r);
        const int to = lo + r - p.first;
        float v = row_sum(part, r, a.parts);
        if (normed) v *= scale;
        if (p.bias) v += __ldg(p.bias + to);
        if (p.relu) v = fmaxf(v, 0);
        if (p.add) v += __ldcg(p.add + to);
        p.y[to] = v;
    }
}

template <class C> constexpr rows_kernels one_rows_of() {
    rows_kernels k = rows_of<C>();
    k.one[0] = one_rows_kernel<C, false>;
    k.one[1] = one_rows_kernel<C, true>;
    return k;
}
template <class C> struct one_rows {
    static constexpr rows_kernels kernels = one_rows_of<C>();
};

} // namespace te
#endif
