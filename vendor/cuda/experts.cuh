// experts.cuh - the experts of a few tokens: te_experts_args in two kernels, and what the kernels of each format are.
//
// A route is a token and one of its experts. The rows of all routes whose expert is there are shared out over the blocks,
// whatever route they belong to. A warp takes one row at a time, or several short ones side by side, `lanes` lanes each, and
// has DEPTH tasks of `steps` pieces a lane on their way. Each route is computed by itself, so that its bits depend on
// nothing else. The first kernel gives the hidden values of each route, and makes the choice before if nobody else has; the
// second a part of the sum for each rank, or for each rank several where down is stored by neuron (experts_down.cuh).
#ifndef TE_CUDA_EXPERTS_CUH
#define TE_CUDA_EXPERTS_CUH

#include "experts_rows.cuh"
#include "experts_sum.cuh"
#include "experts_prompt.cuh"

namespace te {

typedef void (*expert_function)(expert_args, expert_smem);

struct expert_kernels {
    int type, lane_weights, steps;
    bool int8;
    expert_function kernel[2]; // hidden values, sums
    expert_function sum;       // all of them at once (experts_sum.cuh)
    int down_weights;
    expert_down_function by_neuron; // sums
    expert_gemm_function prompt[2]; // where down is stored by neuron: hidden values by the one, sums by the other
};
const expert_kernels *experts_float(int type); // NULL for types of another file
const expert_kernels *experts_32(int type);
const expert_kernels *experts_bits(int type);
const expert_kernels *experts_table(int type);
const expert_kernels *experts_k(int type);
const expert_kernels *experts_k23(int type);
const expert_kernels *experts_file(int type); // of rows as in the file, where they are otherwise on a device
const expert_kernels *expert_kernels_of(int type, bool file); // experts.cu
te_status check_route(te_cuda *d, const te_route_args *op);
te_status check_experts(te_cuda *d, const te_experts_args *op);

template <class C, bool DOWN>
__global__ void __launch_bounds__(EXPERT_THREADS, 2)
    expert_kernel(const __grid_constant__ expert_args a, const __grid_constant__ expert_smem at) {
    typedef expert_task<C> task;
    extern __shared__ uint4 shared[];
    __shared__ int n_there;
    __shared__ float squares_of[EXPERT_WARPS];
    uint8_t *s = (uint8_t *)shared;
    bytes32 *scales = (bytes32 *)(s + at.acts);
    // Routes that are computed come first, those that are not from the end on.
    int *route = (int *)(s + at.acts + at.scales), *place = route + a.n_routes, *who = place + a.n_routes,
        *chosen = who + a.n_routes, *chosen_place = chosen + a.n_routes; // the last two, and weights, if it chooses
    float *sums = (float *)(s + at.acts + at.scales + at.list);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const acts in = {shared, scales, C::int8 ? a.tile / 16 : a.tile / 4, a.tile / 32};
    auto fill = [&](int row, int threads) {
        float sum = 0;
        for (int i = threadIdx.x; i < a.tile / 4; i += threads) {
            float4 v = expert_x(a, row, 4 * i);
            if (!DOWN && a.norm) { // all columns' factor is left to the sums
                const float4 w = load_vector(a.norm, 4 * i, a.cols, 0);
                sum += squares(v, 0, 4, 0);
                v = make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
            }
            put_x<C>(a, 0, i, v, shared, scales);
        }
        if (DOWN || !a.norm) return;
        sum = warp_sum(sum);
        if (lane == 0) squares_of[warp] = sum;
    };
    if (!DOWN && a.norm && 32 * (int)threadIdx.x < a.cols) prefetch_l2(a.norm + 32 * threadIdx.x);
    // The kernel in front of sums, or of what is computed beside others, lets it start when all its blocks know that what
    // chose the experts has ended, or have seen the choice written.
    const bool chooses = !DOWN && a.chooses;
    const int n_work = (int)gridDim.x - chooses;
    if (!DOWN && !a.beside) dep_wait();
    if (!chooses) dep_go();
    const bool one_input = !DOWN && a.n_routes == a.n_used;
    if (chooses) {
        const int t = EXPERT_WARPS - 1 - warp, n_tok = a.n_routes / a.n_used; // a warp for each token
        if (t < n_tok) {
            int places[ROUTE_FEW];
#pragma unroll
            for (int i = 0; i < ROUTE_FEW; i++)
                places[i] = lane + 32 * i < a.choice.n_expert ? __ldcg(a.place + lane + 32 * i) : -1;
            float *w = (float *)(chosen_place + a.n_routes) + t * a.n_used;
            choose_small<ROUTE_FEW>(a.choice, t, chosen + t * a.n_used, w, places, chosen_place + t * a.n_used);
            if (blockIdx.x == n_work) { // every block makes the same choice, and one that has no rows writes it
                finish_route(a.choice, t, chosen + t * a.n_used, w);
                __threadfence();
            }
        }
        if (n_tok > 1) __syncthreads();
    }
    if (warp == EXPERT_WARPS - 1) {
        if (lane == 0) squares_of[warp] = 0;
        int m = 0, gone = 0;
#pragma unroll 1
        for (int i0 = 0; i0 < a.n_routes; i0 += 32) {
            const int i = i0 + lane;
            int e = 0, k = -1;
            if (i < a.n_routes) {
                e = chooses ? chosen[i] : __ldcg(a.expert + i);
                k = chooses  ? (chosen_place[i] < a.n_places ? chosen_place[i] : -1)
                    : a.kept ? (__ldcg(a.kept + i) ? e : -1)
                             : place_of(a.place, e, a.missing, a.first, a.n_places);
            }
            const unsigned vote = __ballot_sync(~0u, k >= 0), lower = (1u << lane) - 1;
            if (k >= 0) {
                const int to = m + __popc(vote & lower);
                route[to] = i;
                place[to] = k;
                who[to] = e;
            } else if (i < a.n_routes) {
                route[a.n_routes - 1 - (gone + __popc(~vote & lower))] = i;
            }
            m += __popc(vote);
            gone += __popc(~vote);
        }
        if (lane == 0) n_there = m;
    } else if (one_input) {
        fill(0, EXPERT_THREADS - 32);
    }
    __syncthreads();
    if (chooses) dep_go();
    const int m = n_there, per_warp = 32 / a.lanes, sub = lane % a.lanes;
    // Items (neurons, or columns of the result) of all routes; whole rows of a warp go together.
    const int two = !DOWN && a.pairs; // 1: rows of gate and up in turn
    const int unit = two ? (per_warp + 1) / 2 : per_warp, total = m * a.rows, n_units = (total + unit - 1) / unit;
    const int each = n_units / n_work, more = n_units % n_work, b = blockIdx.x, first_unit = b * each + min(b, more);
    const int lo = min(total, first_unit * unit),
              hi = b < n_work ? min(total, (first_unit + each + (b < more)) * unit) : lo;
    if (!DOWN && (a.b[0] || a.b[1])) // biases come from far away
#pragma unroll 1
        for (int k = lo + (int)threadIdx.x; k < hi; k += EXPERT_THREADS) {
            const int r = k / a.rows;
            const size_t e = (size_t)who[r] * (size_t)a.rows + (size_t)(k - r * a.rows);
            if (a.b[0]) prefetch_l2(a.b[0] + e);
            if (a.b[1]) prefetch_l2(a.b[1] + e);
        }
    int current = one_input ? 0 : -1;
    bool waited = !DOWN;
#pragma unroll 1
    for (int from = lo; from < hi;) {
        const int r0 = from / a.rows, input = DOWN ? route[r0] : route[r0] / a.n_used;
        int r1 = r0 + 1;
        if (!DOWN)
            while (r1 < m && route[r1] / a.n_used == input) r1++;
        const int to = min(hi, r1 * a.rows), n = (to - from) << two;
        const int turns = (n + per_warp - 1) / per_warp;
        auto row_of = [&](int turn) -> const uint8_t * {
            const int i = turn * per_warp + lane / a.lanes;
            if (i >= n) return nullptr;
            const int item = from + (i >> two), g = i & two, r = item / a.rows;
            return a.w[g] + ((size_t)place[r] * (size_t)a.rows + (size_t)(item - r * a.rows)) * a.stride[g];
        };
        task ahead[task::depth];
        int next = warp, next_chunk = 0;
        const uint8_t *next_row = next < turns ? row_of(next) : nullptr;
        auto load = [&](task &t) {
            if (next >= turns) return;
            t.load(next_row, next_chunk * a.lanes * task::steps + sub, a.lanes, a.n_pieces);
            if (++next_chunk < a.chunks) return;
            next_chunk = 0;
            next += EXPERT_WARPS;
            if (next < turns) next_row = row_of(next);
        };
#pragma unroll
        for (int d = 0; d < task::depth; d++) load(ahead[d]);
        if (!waited) {
            dep_wait();
            waited = true;
        }
        if (input != current) {
            if (current >= 0) __syncthreads();
            fill(input, EXPERT_THREADS);
            current = input;
            __syncthreads();
        }
        int turn = warp, chunk = 0;
        float sum[1] = {0};
#pragma unroll 1
        while (turn < turns) {
#pragma unroll
            for (int d = 0; d < task::depth; d++) {
                if (turn >= turns) break;
                const int p = chunk * a.lanes * task::steps + sub;
#pragma unroll
                for (int i = 0; i < task::steps; i++) C::template dot<1>(ahead[d].p[i], in, p + a.lanes * i, sum);
                load(ahead[d]);
                if (++chunk < a.chunks) continue;
                float v = sum[0];
#pragma unroll 1
                for (int o = a.lanes / 2; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
                const int i = turn * per_warp + lane / a.lanes;
                if (sub == 0 && i < n) {
                    if (DOWN) {
                        const int r = r0, c = from + i - r * a.rows, id = route[r], t = id / a.n_used,
                                  rank = id - t * a.n_used;
                        if (a.b[0]) v += __ldg(a.b[0] + (size_t)who[r] * (size_t)a.rows + c);
                        a.partial[((size_t)rank * (size_t)(a.n_routes / a.n_used) + (size_t)t) * (size_t)a.rows + c] =
                            a.weight ? __ldcg(a.weight + id) * v : v;
                    } else {
                        sums[((from - lo) << two) + i] = v;
                    }
                }
                sum[0] = 0;
                chunk = 0;
                turn += EXPERT_WARPS;
            }
        }
        from = to;
    }
    if (!waited) dep_wait();
    if constexpr (DOWN) {
        // Routes that are computed elsewhere give nothing (the operation beside this one has said so already).
        const int n_gone = a.beside ? 0 : (a.n_routes - m) * (a.rows / 4), step = (int)gridDim.x * EXPERT_THREADS;
#pragma unroll 1
        for (int i = b * EXPERT_THREADS + (int)threadIdx.x; i < n_gone; i += step) {
            const int r = i / (a.rows / 4), id = route[a.n_routes - 1 - r], t = id / a.n_used, rank = id - t * a.n_used;
            float *y = a.partial + ((size_t)rank * (size_t)(a.n_routes / a.n_used) + (size_t)t) * (size_t)a.rows;
            ((float4 *)y)[i - r * (a.rows / 4)] = make_float4(0, 0, 0, 0);
        }
    } else {
        __syncthreads();
        float factor = 1;
        if (a.norm) {
            float sum = 0;
            for (int w = 0; w < EXPERT_WARPS; w++) sum += squares_of[w];
            factor = 1.0f / sqrtf(sum / (float)a.cols + a.norm_eps);
        }
        uint32_t asked = 0, fired = 0;
#pragma unroll 1
        for (int k = lo + (int)threadIdx.x; k < hi; k += EXPERT_THREADS) {
            const int r = k / a.rows, j = k - r * a.rows;
            const size_t e = (size_t)who[r] * (size_t)a.rows + (size_t)j;
            float by = factor;
            if (a.in_weight) by *= __ldcg(a.in_weight + route[r]);
            float g = by * sums[(k - lo) << two], u = two ? by * sums[2 * (k - lo) + 1] : 0;
            if (a.b[0]) g += __ldg(a.b[0] + e);
            if (a.b[1]) u += __ldg(a.b[1] + e);
            float h = activate(a.act, a.threshold, g);
            if (two) h = gated_value(a.act, h, u);
            a.h[(size_t)route[r] * a.ldh + (size_t)j] = h;
            if (a.down_t && h != 0)
                prefetch_bytes(a.down_t + ((size_t)place[r] * (size_t)a.rows + (size_t)j) * a.down_stride,
                               a.down_stride);
            asked++;
            fired += h != 0;
        }
        for (int o = 16; o && a.counts && hi > lo; o /= 2) {
            asked += __shfl_xor_sync(~0u, asked, o);
            fired += __shfl_xor_sync(~0u, fired, o);
        }
        if (lane == 0 && asked && a.counts) {
            atomicAdd(a.counts, asked);
            atomicAdd(a.counts + 1, asked);
            atomicAdd(a.counts + 2, fired);
        }
        if (a.beside) dep_wait(); // who waits for this kernel has then waited for the one in front, too
    }
}

template <class C> struct expert_of {
    static constexpr expert_kernels kernels = {C::type,
                                               C::lane_weights,
                                               expert_task<C>::steps,
                                               C::int8,
                                               {expert_kernel<C, false>, expert_kernel<C, true>},
                                               expert_sum_kernel<C>,
                                               C::down_weights,
                                               expert_down_kernel<C>,
                                               {expert_gemm_kernel<C, false>, expert_gemm_kernel<C, true>}};
};
template <class C> struct expert_in_file { // read by a few tokens only
    static constexpr expert_kernels kernels = {C::type,
                                               C::lane_weights,
                                               expert_task<C>::steps,
                                               C::int8,
                                               {expert_kernel<C, false>, expert_kernel<C, true>},
                                               nullptr,
                                               0,
                                               nullptr,
                                               {}};
};

} // namespace te
#endif
