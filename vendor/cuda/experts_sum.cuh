// experts_sum.cuh - the second kernel of few tokens' experts where the sum of all routes goes to one place at once
// (te_experts_args' merge): no parts are left for another kernel.
//
// A block has some columns of the result, and of these the rows of all routes, whose hidden values it holds in shared memory.
// One block fills a multiprocessor, so that hidden values are read by half as many. Otherwise it is as expert_kernel.
#ifndef TE_CUDA_EXPERTS_SUM_CUH
#define TE_CUDA_EXPERTS_SUM_CUH

#include "experts_rows.cuh"

namespace te {

constexpr int EXPERT_SUM_THREADS = 1024, EXPERT_SUM_WARPS = EXPERT_SUM_THREADS / 32;

// Shared memory: activations of all routes, their scales, each route's place, expert and weight, then its
// sums, and what these are added to.
template <class C>
__global__ void __launch_bounds__(EXPERT_SUM_THREADS, 1)
    expert_sum_kernel(const __grid_constant__ expert_args a, const __grid_constant__ expert_smem at) {
    typedef expert_task<C> task;
    extern __shared__ uint4 shared[];
    uint8_t *s = (uint8_t *)shared;
    bytes32 *scales = (bytes32 *)(s + at.acts);
    int *place = (int *)(s + at.acts + at.scales), *who = place + a.n_routes;
    float *weight = (float *)(who + a.n_routes), *sums = (float *)(s + at.acts + at.scales + at.list);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, b = blockIdx.x, per_warp = 32 / a.lanes,
              sub = lane % a.lanes;
    const int each = a.rows / (int)gridDim.x, more = a.rows % (int)gridDim.x, lo = b * each + min(b, more),
              n_cols = each + (b < more), n = n_cols * a.n_routes, turns = (n + per_warp - 1) / per_warp;
    // The kernel in front lets this one start when all its blocks know that the choice has been written.
    dep_go();
    for (int r = threadIdx.x; r < a.n_routes; r += EXPERT_SUM_THREADS) {
        const int e = __ldcg(a.expert + r);
        who[r] = e;
        place[r] = place_of(a.place, e, a.missing, a.first, a.n_places);
        weight[r] = a.weight ? __ldcg(a.weight + r) : 1;
    }
    __syncthreads();
    auto row_of = [&](int turn) -> const uint8_t * {
        const int i = turn * per_warp + lane / a.lanes, r = i / n_cols;
        if (i >= n || place[r] < 0) return nullptr;
        return a.w[0] + ((size_t)place[r] * (size_t)a.rows + (size_t)(lo + i - r * n_cols)) * a.stride[0];
    };
    task ahead[task::depth];
    int next = warp, next_chunk = 0;
    const uint8_t *next_row = next < turns ? row_of(next) : nullptr;
    auto load = [&](task &t) {
        if (next >= turns) return;
        t.load(next_row, next_chunk * a.lanes * task::steps + sub, a.lanes, a.n_pieces);
        if (++next_chunk < a.chunks) return;
        next_chunk = 0;
        next += EXPERT_SUM_WARPS;
        if (next < turns) next_row = row_of(next);
    };
#pragma unroll
    for (int d = 0; d < task::depth; d++) load(ahead[d]);
    // A thread has a token's column in the end. Biases come from far away.
    const int own = threadIdx.x, n_own = n / a.n_used;
    if (own < n_own) {
        const int t = own / n_cols, c = lo + own - t * n_cols;
        float v = a.sum_bias ? __ldg(a.sum_bias + c) : 0;
#pragma unroll 4
        for (int r = t * a.n_used; a.b[0] && r < (t + 1) * a.n_used; r++)
            if (place[r] >= 0) v = fmaf(weight[r], __ldg(a.b[0] + (size_t)who[r] * (size_t)a.rows + c), v);
        sums[n + own] = v;
    }
    dep_wait();
    const int quads = a.tile / 4;
#pragma unroll 2
    for (int i = threadIdx.x; i < a.n_routes * quads; i += EXPERT_SUM_THREADS) { // whole warps are of one route
        const int r = i / quads, q = i - r * quads;
        put_x<C>(a, r, q, expert_x(a, r, 4 * q), shared, scales);
    }
    if (own < n_own && a.add)
        sums[n + own] += __ldcg(a.add + (size_t)(own / n_cols) * a.ld_add + (size_t)(lo + own % n_cols));
    __syncthreads();
    const int units = C::int8 ? a.tile / 16 : a.tile / 4;
    int turn = warp, chunk = 0;
    float sum[1] = {0};
#pragma unroll 1
    while (turn < turns) {
#pragma unroll
        for (int d = 0; d < task::depth; d++) {
            if (turn >= turns) break;
            const int i = turn * per_warp + lane / a.lanes, r = min(i, n - 1) / n_cols,
                      p = chunk * a.lanes * task::steps + sub;
            const acts in = {shared + r * units, scales + r * (a.tile / 32), units, a.tile / 32};
#pragma unroll
            for (int k = 0; k < task::steps; k++) C::template dot<1>(ahead[d].p[k], in, p + a.lanes * k, sum);
            load(ahead[d]);
            if (++chunk < a.chunks) continue;
            float v = sum[0];
#pragma unroll 1
            for (int o = a.lanes / 2; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
            if (sub == 0 && i < n) sums[i] = place[r] < 0 ? 0 : weight[r] * v;
            sum[0] = 0;
            chunk = 0;
            turn += EXPERT_SUM_WARPS;
        }
    }
    __syncthreads();
    if (own >= n_own) return;
    const int t = own / n_cols, c = own - t * n_cols;
    float y = sums[n + own];
#pragma unroll 4
    for (int r = t * a.n_used; r < (t + 1) * a.n_used; r++) y += sums[r * n_cols + c];
    a.y[(size_t)t * a.ldy + lo + c] = y;
}

} // namespace te
#endif
