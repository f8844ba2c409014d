// experts_rows.cuh - what the kernels of a few tokens' experts share: their arguments, and what a warp loads at once.
#ifndef TE_CUDA_EXPERTS_ROWS_CUH
#define TE_CUDA_EXPERTS_ROWS_CUH

#include "activation.cuh"
#include "experts_down.cuh"
#include "route.cuh"
#include "rows_input.cuh"

namespace te {

constexpr int EXPERT_THREADS = 512, EXPERT_WARPS = EXPERT_THREADS / 32;

struct expert_args {
    const float *x; // of token t; the second kernel's: of route i
    size_t ldx;
    int cols, n_pieces;
    const float *norm; // of the first kernel: weights of an RMS norm of its one input, or NULL
    float norm_eps;
    te_route_args choice; // and the choice that it makes, if it chooses
    bool chooses;
    int n_used, n_routes, rows; // rows: of an expert; of gate and up each
    bool pairs;                 // the first kernel's w[0] is gate, w[1] up; else w[0] is all
    int lanes, chunks, tile;    // lanes of a row; tasks of a row; columns in shared memory, whole tasks
    const uint8_t *w[2];        // gate and up, or up, or down
    size_t stride[2];
    const float *b[2];
    const int32_t *place, *expert;
    int missing, first, n_places;
    const int32_t *kept; // of each route, or NULL: see te_experts_args
    bool beside;
    te_activation act;
    float threshold;
    float *h; // of the first kernel
    size_t ldh;
    uint32_t *counts;
    const uint8_t *down_t; // or NULL: rows of neurons that fire are wanted next
    size_t down_stride;
    const float *in_weight; // of each route's input, or NULL
    const float *weight;    // of what the second gives, or NULL
    float *partial;
    const float *add, *sum_bias; // instead of partial: what the sum is added to (or NULL), and where it goes
    float *y;
    size_t ld_add, ldy;
};
// Shared memory behind the activations and their scales: routes, places and experts, then the sums of gate and up.
struct expert_smem {
    int acts, scales, list;
};
template <class C> struct expert_task {
    // As many as there are registers for.
    static constexpr int steps = C::int8 && C::steps > 2 ? 2 : C::steps,
                         depth = sizeof(typename C::piece) <= 32 && C::int8 ? 3 : 2;
    typename C::piece p[steps];
    __device__ __forceinline__ void load(const uint8_t *row, int first, int step, int n) {
#pragma unroll
        for (int i = 0; i < steps; i++) {
            const int k = first + step * i;
            p[i] = typename C::piece();
            if (row && k < n) p[i] = C::load(row, k, n);
        }
    }
};

// Four activations of a row of the input.
__device__ __forceinline__ float4 expert_x(const expert_args &a, int row, int c) {
    const float *x = a.x + (size_t)row * a.ldx + c;
    if (c + 4 <= a.cols) return __ldcg((const float4 *)x);
    float4 v = make_float4(0, 0, 0, 0);
    if (c < a.cols) v.x = __ldcg(x);
    if (c + 1 < a.cols) v.y = __ldcg(x + 1);
    if (c + 2 < a.cols) v.z = __ldcg(x + 2);
    return v;
}

} // namespace te
#endif
