// down.cuh - sums of rows weighted by h: the kernel of te_cuda_down.
//
// A block owns a tile of columns and every n-th row. It lists its rows with h != 0 in order, then four groups of 128
// threads take every fourth of them, each thread the same columns of each row, several rows in flight. The groups' sums are
// added in shared memory and stored as the block's part.
#ifndef TE_CUDA_DOWN_CUH
#define TE_CUDA_DOWN_CUH

#include "batch_sums.cuh"

namespace te {

constexpr int DOWN_LANES = 128, DOWN_GROUPS = 4, DOWN_THREADS = DOWN_LANES * DOWN_GROUPS;
constexpr int DOWN_ROWS = 1024; // of a block

struct down_args {
    const uint8_t *w;
    const float *h;
    const int32_t *list, *n_list;
    float *partial;
    size_t stride, ldh;
    int n_tok, n, cols, n_tiles, n_parts;
    int room; // rows of a part, at most
    bool all;
};
typedef void (*down_function)(down_args);
struct down_kernels {
    int type, weights;
    int factor_parts;        // batch::parts; 0: several tokens are taken four at a time
    down_function kernel[2]; // for one token, and for several
};
const down_kernels *down_float(int type);
const down_kernels *down_32(int type);
const down_kernels *down_bits(int type);
const down_kernels *down_table(int type);
const down_kernels *down_k(int type);
const down_kernels *down_k23(int type);

// acc += rows group, group + GROUPS ... of m, a thread's part of each: row[k] is the k-th of w, weight[t][k] what it is
// multiplied with. What is to be taken off later is taken off by take_offsets.
template <class C, int T, int GROUPS, int ROOM>
__device__ __forceinline__ void add_rows(int group, int m, int piece, int n_pieces, const uint8_t *w, size_t stride,
                                         const int (&row)[ROOM], const float (&weight)[T][ROOM],
                                         float (&acc)[T][C::down_weights + C::offsets]) {
    constexpr int FLIGHT = C::flight, STEP = FLIGHT * GROUPS;
    typename C::part now[FLIGHT], next[FLIGHT];
    auto load = [&](typename C::part(&p)[FLIGHT], int k) {
#pragma unroll
        for (int f = 0; f < FLIGHT; f++)
            if (k + f * GROUPS < m) p[f] = C::load_down(w + (size_t)row[k + f * GROUPS] * stride, piece, n_pieces);
    };
    load(now, group);
    for (int k = group; k < m; k += STEP) {
        load(next, k + STEP);
#pragma unroll
        for (int f = 0; f < FLIGHT; f++)
            if (k + f * GROUPS < m) {
                float h[T];
#pragma unroll
                for (int t = 0; t < T; t++) h[t] = weight[t][k + f * GROUPS];
                C::template axpy<T>(now[f], h, acc);
            }
#pragma unroll
        for (int f = 0; f < FLIGHT; f++) now[f] = next[f];
    }
}
template <class C, int T> __device__ __forceinline__ void take_offsets(float (&acc)[T][C::down_weights + C::offsets]) {
    constexpr int W = C::down_weights;
    if constexpr (C::offsets > 0)
#pragma unroll
        for (int t = 0; t < T; t++)
#pragma unroll
            for (int k = 0; k < W; k++) acc[t][k] -= acc[t][W + k / (W / C::offsets)];
}

template <class C, int T>
__global__ void __launch_bounds__(DOWN_THREADS, T == 1 ? 2 : 1) down_kernel(const down_args a) {
    constexpr int W = C::down_weights;
    __shared__ int row[DOWN_ROWS];
    __shared__ float weight[T][DOWN_ROWS];
    __shared__ float sums[DOWN_LANES * W];
    __shared__ int words[DOWN_THREADS / 32];
    const int tile = blockIdx.x % a.n_tiles, b = blockIdx.x / a.n_tiles, n_pieces = (a.cols + W - 1) / W;
    const int group = threadIdx.x / DOWN_LANES, lane = threadIdx.x % DOWN_LANES, piece = tile * DOWN_LANES + lane;
    const int first_col = tile * DOWN_LANES * W;
    const bool inside = piece < n_pieces;
    if (a.all && inside) // the first rows are sure to be wanted
        for (int k = 0; k < C::flight; k++) {
            const int i = b + (group + k * DOWN_GROUPS) * a.n_parts;
            if (!a.list && i < a.n)
                prefetch_l2(a.w + (size_t)i * a.stride + (size_t)piece * a.stride / (size_t)n_pieces);
        }
    dep_go();
    dep_wait();
    const int n = a.n_list ? min(__ldcg(a.n_list), a.n) : a.n;
    for (int t0 = 0; t0 < a.n_tok; t0 += T) {
        int m = 0;
        for (int k0 = 0; b + k0 * a.n_parts < n; k0 += DOWN_THREADS) {
            const int i = b + (k0 + (int)threadIdx.x) * a.n_parts;
            float h[T];
            bool on = false;
#pragma unroll
            for (int t = 0; t < T; t++) {
                h[t] = i < n && t0 + t < a.n_tok ? __ldcg(a.h + (t0 + t) * a.ldh + i) : 0;
                on |= h[t] != 0; // true for what is not a number
            }
            const int at = ordered_place(on, &m, words);
            if (!on) continue;
            row[at] = a.list ? __ldcg(a.list + i) : i;
#pragma unroll
            for (int t = 0; t < T; t++) weight[t][at] = h[t];
        }
        __syncthreads();
        float acc[T][W + C::offsets] = {};
        if (inside) add_rows<C, T, DOWN_GROUPS>(group, m, piece, n_pieces, a.w, a.stride, row, weight, acc);
        take_offsets<C, T>(acc);
#pragma unroll
        for (int t = 0; t < T; t++) {
            for (int g = 1; g < DOWN_GROUPS; g++) {
                __syncthreads();
                if (group == g)
#pragma unroll
                    for (int k = 0; k < W; k++) sums[k * DOWN_LANES + lane] = acc[t][k];
                __syncthreads();
                if (group == 0)
#pragma unroll
                    for (int k = 0; k < W; k++) acc[t][k] += sums[k * DOWN_LANES + lane];
            }
            // Into the order of the columns, so that neighbours are stored together.
            __syncthreads();
            if (group == 0 && inside)
#pragma unroll
                for (int k = 0; k < W; k++) sums[C::column(piece, k) - first_col] = acc[t][k];
            __syncthreads();
            if (t0 + t < a.n_tok) {
                float *to = a.partial + ((size_t)b * a.n_tok + (t0 + t)) * a.cols + first_col;
                for (int i = threadIdx.x; i < min(DOWN_LANES * W, a.cols - first_col); i += DOWN_THREADS)
                    to[i] = sums[i];
            }
        }
        __syncthreads(); // the lists are about to change
    }
}

// Several tokens, on tensor cores. A block takes two tiles, if there are, one after the other. Shared memory: rows, h of
// each token, factors.
constexpr int BATCH_DOWN_TILES = 2;
template <class C> __global__ void __launch_bounds__(DOWN_THREADS) batch_down_kernel(const down_args a) {
    extern __shared__ uint4 shared[];
    __shared__ int words[DOWN_THREADS / 32];
    __shared__ float most[BATCH_TOKENS], back[BATCH_TOKENS];
    const uint8_t **pointer = (const uint8_t **)shared;
    float *h = (float *)(pointer + a.room);
    uint2 *factor = (uint2 *)(h + BATCH_TOKENS * a.room);
    const int blocks = (a.n_tiles + BATCH_DOWN_TILES - 1) / BATCH_DOWN_TILES,
              tile = blockIdx.x % blocks * BATCH_DOWN_TILES, last = min(tile + BATCH_DOWN_TILES, a.n_tiles),
              b = blockIdx.x / blocks, n_pieces = (a.cols + C::down_weights - 1) / C::down_weights;
    if (a.all && !a.list) { // the first rows are sure to be wanted
        const size_t n_bytes = a.stride / (size_t)a.n_tiles;
        const int i = b + (int)threadIdx.x / 32 * a.n_parts;
        for (size_t at = (size_t)tile * n_bytes + threadIdx.x % 32 * 128; i < a.n && at < (size_t)last * n_bytes;
             at += 32 * 128)
            prefetch_l2(a.w + (size_t)i * a.stride + at);
    }
    dep_go();
    dep_wait();
    const int n = a.n_list ? min(__ldcg(a.n_list), a.n) : a.n;
    int m = 0;
    for (int k0 = 0; b + k0 * a.n_parts < n; k0 += DOWN_THREADS) {
        const int i = b + (k0 + (int)threadIdx.x) * a.n_parts;
        float v[BATCH_TOKENS];
        bool on = false;
#pragma unroll
        for (int t = 0; t < BATCH_TOKENS; t++) {
            v[t] = i < n && t < a.n_tok ? __ldcg(a.h + t * a.ldh + i) : 0;
            on |= v[t] != 0; // true for what is not a number
        }
        const int at = ordered_place(on, &m, words);
        if (!on) continue;
        pointer[at] = a.w + (size_t)(a.list ? __ldcg(a.list + i) : i) * a.stride;
#pragma unroll
        for (int t = 0; t < BATCH_TOKENS; t++) h[at * BATCH_TOKENS + t] = v[t];
    }
    __syncthreads();
    const batch_rows r = {pointer, m, factor, most, back};
    batch_factors<batch<C>>(r, a.n_tok, [&](int e, int t) { return h[e * BATCH_TOKENS + t]; });
    constexpr int each = DOWN_LANES / 8;
    batch_sums<C>(r, each * tile + (int)threadIdx.x / 32, DOWN_THREADS / 32, each * last, n_pieces, a.n_tok, a.cols,
                  a.partial + (size_t)b * a.n_tok * a.cols);
}

template <class C> constexpr down_kernels down_of() {
    if constexpr (batch<C>::there)
        return {C::type, C::down_weights, batch<C>::parts, {down_kernel<C, 1>, batch_down_kernel<C>}};
    else
        return {C::type, C::down_weights, 0, {down_kernel<C, 1>, down_kernel<C, 4>}};
}
template <class C> struct down_sums {
    static constexpr down_kernels kernels = down_of<C>();
};

} // namespace te
#endif
