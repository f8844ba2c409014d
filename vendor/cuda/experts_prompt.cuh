// experts_prompt.cuh - products of many tokens' routes with the experts that they go to, on tensor cores.
//
// Routes lie in the order of the experts' places (experts_prompt.cu), cut into tiles of at most `tile` routes of one place.
// A block multiplies a tile with 128 rows of its expert at a time. Slices of 64 columns pass through shared memory: inputs
// are copied in the background, weights are made F16 on the way. Half of the warps make the next slice's weights before
// they multiply, the others after that, so that both kinds of work go on side by side.
//
// BY_NEURON: a down whose rows belong to neurons. A block multiplies a tile with 128 columns of its expert; a slice is 64
// neurons, which lie in shared memory as they come, and are transposed on the way to the products.
#ifndef TE_CUDA_EXPERTS_PROMPT_CUH
#define TE_CUDA_EXPERTS_PROMPT_CUH

#include "activation.cuh"
#include "codec.cuh"
#include "gemm_mma.cuh"

namespace te {

constexpr int EXPERT_GEMM_THREADS = 256, EXPERT_ROWS = 128, EXPERT_SLICE = 64, EXPERT_STAGES = 3, EXPERT_TILE = 128;

// What the order of routes is, in words: how many are computed, how many tiles these make; of each route its place in the
// order or -1; the routes in that order; the tiles.
struct expert_tile {
    int place, first, n, unused;
};
struct expert_lists {
    int *n_sorted, *n_tiles, *position, *sorted;
    expert_tile *tile;
    uint32_t *most; // of few tokens: 0 for each route
};

struct expert_gemm {
    expert_lists lists;
    const uint16_t *x; // F16, of a token or (down) of a place in the order
    size_t ldx;
    const float *scale;     // of all x, or of each row
    const float *in_weight; // of each route's x, or NULL
    const uint8_t *w[2];
    size_t stride[2];
    const float *b[2];
    int cols, k0, k;   // columns of a row; those that are multiplied with x: k0 (a multiple of 64) ... k0 + k - 1
    int rows, row0, n; // rows of an expert; those that are wanted
    // By neuron: cols, and of these n from row0 on (multiples of 64, unless it is the last one); rows, and of these k from k0 on.
    int tile; // 64 or 128
    int n_used;
    const int32_t *expert;
    bool down, pairs; // pairs: w is gate and up; neither: up alone
    te_activation act;
    float threshold;
    float *y; // of each place in the order: hidden values, of up alone its products, or sums of down
    size_t ldy;
    const float *h; // few tokens' down: its input, as the first product left it,
    size_t ldh;
    uint32_t *most; // and the largest size of each route's (te_cuda_prompt_experts's hidden)
    uint32_t *counts;
};
typedef void (*expert_gemm_function)(expert_gemm);

inline size_t expert_gemm_smem(int tile) { return 2 * (size_t)(EXPERT_STAGES * tile + 2 * EXPERT_ROWS) * EXPERT_SLICE; }

template <class C, bool BY_NEURON>
__global__ void __launch_bounds__(EXPERT_GEMM_THREADS, 2) expert_gemm_kernel(const __grid_constant__ expert_gemm a) {
    constexpr int UNITS = EXPERT_SLICE / 8, FRAGMENTS = EXPERT_TILE / 32, W_SLICE = EXPERT_ROWS * EXPERT_SLICE;
    extern __shared__ uint4 shared[];
    __shared__ const uint16_t *source[EXPERT_TILE]; // rows of the input
    __shared__ const uint8_t *rows[EXPERT_ROWS];    // and of the weights
    uint16_t *const weights = (uint16_t *)shared, *const inputs = weights + 2 * W_SLICE;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, wn = warp % 4 * 32, x_slice = a.tile * EXPERT_SLICE;
    auto narrow = [](int r, int c) { return r * EXPERT_SLICE + (c ^ (r & 7)) * 8; };
    auto wide = [](int r, int c) { return r * EXPERT_ROWS + (c ^ (r & 7)) * 8; };
    dep_go();
    dep_wait();
    const bool down = BY_NEURON || a.down, pairs = !BY_NEURON && a.pairs;
    const int each = pairs ? EXPERT_ROWS / 2 : EXPERT_ROWS, across = (a.n + each - 1) / each,
              n_items = __ldcg(a.lists.n_tiles) * across, n_slices = (a.k + EXPERT_SLICE - 1) / EXPERT_SLICE;
    uint32_t asked = 0, fired = 0;
    // Row r of 128 of an item: of gate and up in turn, else as they come.
    auto row_of = [&](const expert_tile &t, int j0, int r) -> const uint8_t * {
        const int g = pairs ? r % 2 : 0, j = j0 + (pairs ? r / 2 : r);
        return j < a.n ? a.w[g] + ((size_t)t.place * (size_t)a.rows + (size_t)(a.row0 + j)) * a.stride[g] : nullptr;
    };
    auto neuron = [&](int place, int j) {
        return a.w[0] + ((size_t)place * (size_t)a.rows + (size_t)(a.k0 + j)) * a.stride[0];
    };
    auto tile_of = [&](int item) {
        const int4 v = __ldcg((const int4 *)a.lists.tile + item / across);
        return expert_tile{v.x, v.y, v.z, v.w};
    };
    auto expect = [&](int item) { // the rows of an item will be wanted
        if (BY_NEURON) {          // all of its tile's items want the same: each asks for some
            if (item >= n_items) return;
            const int place = tile_of(item).place;
#pragma unroll 1
            for (int j = item % across + across * tid; j < a.k; j += across * EXPERT_GEMM_THREADS)
                prefetch_bytes(neuron(place, j), a.stride[0]);
            return;
        }
        if (item >= n_items || tid >= EXPERT_ROWS) return;
        const uint8_t *row = row_of(tile_of(item), item % across * each, tid);
        if (row) prefetch_bytes(row, a.stride[pairs ? tid % 2 : 0]);
    };
    expect(blockIdx.x);
#pragma unroll 1
    for (int item = blockIdx.x; item < n_items; item += gridDim.x) {
        const expert_tile t = tile_of(item);
        const int j0 = item % across * each;
        __syncthreads(); // the item before has been read
        if (tid < t.n)
            source[tid] =
                a.x + (size_t)(down ? t.first + tid : __ldcg(a.lists.sorted + t.first + tid) / a.n_used) * a.ldx;
        if (!BY_NEURON && tid < EXPERT_ROWS) rows[tid] = row_of(t, j0, tid);
        expect(item + gridDim.x);
        __syncthreads();
        auto fetch = [&](int slice) {
            uint16_t *to = inputs + slice % EXPERT_STAGES * x_slice;
#pragma unroll 1
            for (int e = tid; e < a.tile * UNITS; e += EXPERT_GEMM_THREADS) {
                const int r = e / UNITS, c = e % UNITS, k = slice * EXPERT_SLICE + 8 * c;
                const bool there = r < t.n && k < a.k;
                fetch16(to + narrow(r, c), there ? source[r] + k : a.x, there);
            }
        };
        auto convert = [&](int slice) {
            if constexpr (BY_NEURON) {
                constexpr int ACROSS = EXPERT_ROWS / 8, STEP = EXPERT_GEMM_THREADS / ACROSS;
                const int r0 = tid / ACROSS, c = tid % ACROSS, j = j0 + 8 * c, k = slice * EXPERT_SLICE + r0;
                uint16_t *to = weights + slice % 2 * W_SLICE + wide(r0, c);
#pragma unroll
                for (int i = 0; i < EXPERT_SLICE / STEP; i++) // STEP is a multiple of 8: swizzled alike
                    *(uint4 *)(to + STEP * i * EXPERT_ROWS) =
                        k + STEP * i < a.k && j < a.n
                            ? C::halves(neuron(t.place, k + STEP * i), (a.row0 + j) / 8, a.cols)
                            : make_uint4(0, 0, 0, 0);
                return;
            }
            constexpr int STEP = EXPERT_GEMM_THREADS / UNITS;
            const int r0 = tid / UNITS, c = tid % UNITS, k = slice * EXPERT_SLICE + 8 * c;
            uint16_t *to = weights + slice % 2 * W_SLICE + narrow(r0, c);
#pragma unroll
            for (int i = 0; i < EXPERT_ROWS / STEP; i++) { // STEP is a multiple of 8: swizzled alike
                const uint8_t *row = rows[r0 + STEP * i];
                *(uint4 *)(to + STEP * i * EXPERT_SLICE) =
                    row && k < a.k ? C::halves(row, (a.k0 + k) / 8, a.cols) : make_uint4(0, 0, 0, 0);
            }
        };
        float sum[FRAGMENTS][4][4] = {};
        // Routes 32i + 16 (warp / 4) ... + 15 of the tile, rows wn ... + 31.
        auto multiply = [&](int slice) {
            const uint16_t *x = inputs + slice % EXPERT_STAGES * x_slice, *w = weights + slice % 2 * W_SLICE;
            const int m0 = warp / 4 * 16;
#pragma unroll
            for (int kk = 0; kk < EXPERT_SLICE / 16; kk++) {
                uint32_t b[2][4];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    if (BY_NEURON)
                        matrices_transposed(b[j], w + wide(16 * kk + lane % 16, wn / 8 + 2 * j + lane / 16));
                    else
                        matrices(b[j], w + narrow(wn + 16 * j + lane % 8 + lane / 16 * 8, 2 * kk + lane / 8 % 2));
                }
#pragma unroll
                for (int i = 0; i < FRAGMENTS; i++) {
                    if (32 * i + m0 >= t.n) break;
                    uint32_t v[4];
                    matrices(v, x + narrow(32 * i + m0 + lane % 16, 2 * kk + lane / 16));
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        multiply_add(sum[i][j], v, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
            }
        };
#pragma unroll
        for (int s = 0; s < EXPERT_STAGES - 1; s++) {
            if (s < n_slices) fetch(s);
            fetches_end();
        }
        convert(0);
#pragma unroll 1
        for (int s = 0; s < n_slices; s++) {
            fetches_wait<EXPERT_STAGES - 2>();
            __syncthreads();
            if (s + EXPERT_STAGES - 1 < n_slices) fetch(s + EXPERT_STAGES - 1);
            fetches_end();
#pragma unroll 1
            for (int turn = 0; turn < 2; turn++) {
                if ((turn + warp / 4) % 2 == 0)
                    multiply(s);
                else if (s + 1 < n_slices)
                    convert(s + 1);
            }
        }
        const float scale_all = down ? 1 : __ldcg(a.scale);
#pragma unroll
        for (int i = 0; i < FRAGMENTS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int r = 32 * i + warp / 4 * 16 + 8 * half + lane / 4;
                if (r >= t.n) continue;
                const size_t p = (size_t)(t.first + r);
                float scale = down ? __ldcg(a.scale + p) : scale_all;
                if (a.in_weight) scale *= __ldcg(a.in_weight + __ldcg(a.lists.sorted + p));
                const int e = pairs && (a.b[0] || a.b[1]) ? __ldcg(a.expert + __ldcg(a.lists.sorted + p)) : 0;
                float *y = a.y + p * a.ldy;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int col = wn + 8 * j + lane % 4 * 2;
                    const float v0 = scale * sum[i][j][2 * half], v1 = scale * sum[i][j][2 * half + 1];
                    if (!pairs) {
                        if (j0 + col + 1 < a.n)
                            *(float2 *)(y + j0 + col) = make_float2(v0, v1);
                        else if (j0 + col < a.n)
                            y[j0 + col] = v0;
                        continue;
                    }
                    const int c = j0 + col / 2;
                    if (c >= a.n) continue;
                    const size_t at = (size_t)e * (size_t)a.rows + (size_t)(a.row0 + c);
                    const float g = a.b[0] ? v0 + __ldg(a.b[0] + at) : v0, u = a.b[1] ? v1 + __ldg(a.b[1] + at) : v1,
                                h = gated_value(a.act, activate(a.act, a.threshold, g), u);
                    y[c] = h;
                    asked++;
                    fired += h != 0;
                }
            }
    }
    if constexpr (!BY_NEURON) {
        if (!pairs || !a.counts) return;
        for (int o = 16; o; o /= 2) {
            asked += __shfl_xor_sync(~0u, asked, o);
            fired += __shfl_xor_sync(~0u, fired, o);
        }
        if (lane == 0 && asked) {
            atomicAdd(a.counts, asked);
            atomicAdd(a.counts + 1, asked);
            atomicAdd(a.counts + 2, fired);
        }
    }
}

} // namespace te
#endif
