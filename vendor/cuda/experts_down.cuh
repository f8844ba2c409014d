// experts_down.cuh - the second kernel of a few tokens' experts where down is stored by neuron: sums of the rows of neurons
// that fired.
//
// A block owns a route, a share of its expert's neurons and a tile of columns, one part (codec::load_down) for each lane. It
// lists those of its neurons with h != 0 in order, then each warp takes every 16th of them. The warps' sums are added in
// shared memory, in their order, and stored as one part of the token's sum; there are n_shares parts for each rank.
#ifndef TE_CUDA_EXPERTS_DOWN_CUH
#define TE_CUDA_EXPERTS_DOWN_CUH

#include "down.cuh"

namespace te {

constexpr int EXPERT_DOWN_THREADS = 512, EXPERT_DOWN_WARPS = EXPERT_DOWN_THREADS / 32, EXPERT_DOWN_LIST = 1024;

struct expert_down_args {
    const uint8_t *w;
    size_t stride;
    int cols, n_ff, n_tok, n_used, n_tiles, n_shares;
    const float *h; // of each route
    size_t ldh;
    const int32_t *place, *expert;
    int missing, first, n_places;
    const float *bias, *weight;
    float *partial;
};
typedef void (*expert_down_function)(expert_down_args);

// Which place of the call's matrices an expert has; below 0: none.
__device__ __forceinline__ int place_of(const int32_t *place, int e, int missing, int first, int n_places) {
    const int p = __ldcg(place + e), k = missing ? -1 - p - first : p;
    return k < n_places ? k : -1;
}

template <class C>
__global__ void __launch_bounds__(EXPERT_DOWN_THREADS, 2)
    expert_down_kernel(const __grid_constant__ expert_down_args a) {
    constexpr int W = C::down_weights, COLS = 32 * W;
    auto apart = [](int c) { return c + c / 32; }; // so that a warp's columns are in different banks
    __shared__ int row[EXPERT_DOWN_LIST];
    __shared__ float weight[1][EXPERT_DOWN_LIST];
    __shared__ float sums[EXPERT_DOWN_WARPS][COLS + COLS / 32];
    __shared__ int words[EXPERT_DOWN_WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = blockIdx.x % a.n_tiles,
              share = blockIdx.x / a.n_tiles % a.n_shares, route = blockIdx.x / (a.n_tiles * a.n_shares),
              t = route / a.n_used, rank = route % a.n_used, first_col = tile * COLS, piece = tile * 32 + lane,
              n_pieces = (a.cols + W - 1) / W, n_cols = min(COLS, a.cols - first_col);
    const int j0 = (int)((int64_t)a.n_ff * share / a.n_shares), j1 = (int)((int64_t)a.n_ff * (share + 1) / a.n_shares);
    // The kernel in front lets this one start when all its blocks know that what chose the experts has ended.
    dep_go();
    const int e = __ldcg(a.expert + route), k = place_of(a.place, e, a.missing, a.first, a.n_places);
    dep_wait();
    float *to =
        a.partial + ((size_t)(rank * a.n_shares + share) * (size_t)a.n_tok + (size_t)t) * (size_t)a.cols + first_col;
    if (k < 0) { // it is computed elsewhere
        for (int c = threadIdx.x; c < n_cols; c += EXPERT_DOWN_THREADS) to[c] = 0;
        return;
    }
    const uint8_t *w = a.w + (size_t)k * (size_t)a.n_ff * a.stride;
    const float *h = a.h + (size_t)route * a.ldh;
    float acc[1][W + C::offsets] = {};
#pragma unroll 1
    for (int from = j0; from < j1; from += EXPERT_DOWN_LIST) {
        int m = 0;
#pragma unroll 1
        for (int i = from; i < min(from + EXPERT_DOWN_LIST, j1); i += EXPERT_DOWN_THREADS) {
            const int j = i + (int)threadIdx.x;
            const float v = j < j1 ? __ldcg(h + j) : 0;
            // Behind its barriers nobody reads the list before this one any more.
            const int at = ordered_place(v != 0, &m, words); // true for what is not a number
            if (v != 0) {
                row[at] = j;
                weight[0][at] = v;
            }
        }
        __syncthreads();
        if (piece < n_pieces)
            add_rows<C, 1, EXPERT_DOWN_WARPS>(warp, m, piece, n_pieces, w, a.stride, row, weight, acc);
    }
    take_offsets<C, 1>(acc);
    if (piece < n_pieces)
#pragma unroll
        for (int i = 0; i < W; i++) sums[warp][apart(C::column(piece, i) - first_col)] = acc[0][i];
    __syncthreads();
    const float factor = a.weight ? __ldcg(a.weight + route) : 1;
    for (int c = threadIdx.x; c < n_cols; c += EXPERT_DOWN_THREADS) {
        float v = share == 0 && a.bias ? __ldg(a.bias + (size_t)e * (size_t)a.cols + first_col + c) : 0;
#pragma unroll
        for (int g = 0; g < EXPERT_DOWN_WARPS; g++) v += sums[g][apart(c)];
        to[c] = factor * v;
    }
}

} // namespace te
#endif
