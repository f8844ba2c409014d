// experts_group.cuh - the experts of several tokens in two kernels: a row of an expert is read once for up to EXPERT_GROUP of
// the tokens that want it.
//
// A group is an expert and some of its routes. The rows of all groups are shared out over the blocks, as those of routes are
// where there is one token (experts.cuh). A route's bits do not depend on the group that it is in.
#ifndef TE_CUDA_EXPERTS_GROUP_CUH
#define TE_CUDA_EXPERTS_GROUP_CUH

#include "experts_rows.cuh"

namespace te {

constexpr int EXPERT_GROUP = 4;

// In shared memory: of each group its place and its routes (-1: none), of each place how many routes it has, then which
// group is its first.
struct expert_groups {
    int *place, *route, *count;
    int *warps; // EXPERT_WARPS words
    // All threads call it. Returns how many there are.
    __device__ __forceinline__ int make(const expert_args &a) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        auto place_at = [&](int i) { return place_of(a.place, __ldcg(a.expert + i), a.missing, a.first, a.n_places); };
        for (int k = threadIdx.x; k < a.n_places; k += EXPERT_THREADS) count[k] = 0;
        for (int i = threadIdx.x; i < a.n_groups * EXPERT_GROUP; i += EXPERT_THREADS) route[i] = -1;
        __syncthreads();
        for (int i = threadIdx.x; i < a.n_routes; i += EXPERT_THREADS) {
            const int k = place_at(i);
            if (k >= 0) atomicAdd(count + k, 1);
        }
        __syncthreads();
        int before = 0;
#pragma unroll 1
        for (int k0 = 0; k0 < a.n_places; k0 += EXPERT_THREADS) {
            const int k = k0 + (int)threadIdx.x, n = k < a.n_places ? (count[k] + EXPERT_GROUP - 1) / EXPERT_GROUP : 0;
            int sum = n; // inclusive
            for (int o = 1; o < 32; o *= 2) {
                const int v = __shfl_up_sync(~0u, sum, o);
                if (lane >= o) sum += v;
            }
            if (lane == 31) warps[warp] = sum;
            __syncthreads();
            int total = 0;
            for (int w = 0; w < EXPERT_WARPS; w++) {
                if (w < warp) sum += warps[w];
                total += warps[w];
            }
            const int first = before + sum - n;
            if (k < a.n_places) count[k] = first * EXPERT_GROUP;
            for (int i = 0; i < n; i++) place[first + i] = k;
            before += total;
            __syncthreads();
        }
        // Which routes of a place share a group depends on timing, and nothing on that.
        for (int i = threadIdx.x; i < a.n_routes; i += EXPERT_THREADS) {
            const int k = place_at(i);
            if (k >= 0) route[atomicAdd(count + k, 1)] = i;
        }
        __syncthreads();
        return before;
    }
};

template <class C, bool DOWN>
__global__ void __launch_bounds__(EXPERT_THREADS, 2)
    expert_group_kernel(const __grid_constant__ expert_args a, const __grid_constant__ expert_smem at) {
    constexpr int G = EXPERT_GROUP, DEPTH = 2;
    typedef expert_task<C> task;
    extern __shared__ uint4 shared[];
    __shared__ int words[EXPERT_WARPS];
    uint8_t *s = (uint8_t *)shared;
    bytes32 *scales = (bytes32 *)(s + at.acts);
    int *list = (int *)(s + at.acts + at.scales);
    const expert_groups groups = {list, list + a.n_groups, list + a.n_groups * (1 + G), words};
    float *sums = (float *)(s + at.acts + at.scales + at.list);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, b = blockIdx.x, per_warp = 32 / a.lanes,
              sub = lane % a.lanes, n_tok = a.n_routes / a.n_used;
    const acts in = {shared, scales, C::int8 ? a.tile / 16 : a.tile / 4, a.tile / 32};
    // The kernel in front of sums lets it start when all its blocks know that what chose the experts has ended.
    if (!DOWN) dep_wait();
    dep_go();
    const int n_groups = groups.make(a), wide = DOWN ? 1 : 2;
    // Items: neurons, or columns of the result, of all groups; whole rows of a warp go together.
    const int unit = DOWN ? per_warp : (per_warp + 1) / 2, total = n_groups * a.rows,
              n_units = (total + unit - 1) / unit;
    const int each = n_units / (int)gridDim.x, more = n_units % (int)gridDim.x, first_unit = b * each + min(b, more);
    const int lo = min(total, first_unit * unit), hi = min(total, (first_unit + each + (b < more)) * unit);
    bool waited = !DOWN;
#pragma unroll 1
    for (int from = lo; from < hi;) {
        const int g = from / a.rows, to = min(hi, (g + 1) * a.rows), n = (to - from) * wide,
                  turns = (n + per_warp - 1) / per_warp;
        const int *routes = groups.route + g * G;
        const uint8_t *base[2];
        for (int i = 0; i < wide; i++)
            base[i] = a.w[i] + ((size_t)groups.place[g] * (size_t)a.rows + (size_t)(from - g * a.rows)) * a.stride[i];
        auto row_of = [&](int turn) -> const uint8_t * {
            const int i = turn * per_warp + lane / a.lanes;
            if (i >= n) return nullptr;
            return DOWN ? base[0] + (size_t)i * a.stride[0] : base[i % 2] + (size_t)(i / 2) * a.stride[i % 2];
        };
        task ahead[DEPTH];
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
        for (int d = 0; d < DEPTH; d++) load(ahead[d]);
        if (!waited) {
            dep_wait();
            waited = true;
        }
        if (from != lo) __syncthreads(); // the inputs before have been read
        const int quads = a.tile / 4;
#pragma unroll 1
        for (int i = threadIdx.x; i < G * quads; i += EXPERT_THREADS) {
            const int t = i / quads, k = i - t * quads, r = routes[t];
            const float4 v = r < 0 ? make_float4(0, 0, 0, 0) : expert_x(a, DOWN ? r : r / a.n_used, 4 * k);
            put_x<C>(a, t, k, v, shared, scales);
        }
        __syncthreads();
        int turn = warp, chunk = 0;
        float sum[G] = {};
#pragma unroll 1
        while (turn < turns) {
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                if (turn >= turns) break;
                const int p = chunk * a.lanes * task::steps + sub;
#pragma unroll
                for (int i = 0; i < task::steps; i++) C::template dot<G>(ahead[d].p[i], in, p + a.lanes * i, sum);
                load(ahead[d]);
                if (++chunk < a.chunks) continue;
#pragma unroll 1
                for (int o = a.lanes / 2; o; o /= 2)
#pragma unroll
                    for (int t = 0; t < G; t++) sum[t] += __shfl_xor_sync(~0u, sum[t], o);
                const int i = turn * per_warp + lane / a.lanes;
                if (sub == 0 && i < n)
                    *(float4 *)(sums + (size_t)((from - lo) * wide + i) * G) =
                        make_float4(sum[0], sum[1], sum[2], sum[3]);
#pragma unroll
                for (int t = 0; t < G; t++) sum[t] = 0;
                chunk = 0;
                turn += EXPERT_WARPS;
            }
        }
        from = to;
    }
    if (!waited) dep_wait();
    __syncthreads();
    uint32_t asked = 0, fired = 0;
    const int n_items = hi - lo;
#pragma unroll 1
    for (int i = threadIdx.x; i < n_items * G; i += EXPERT_THREADS) {
        const int t = i / n_items, k = i - t * n_items, g = (lo + k) / a.rows, j = lo + k - g * a.rows,
                  r = groups.route[g * G + t];
        if (r < 0) continue;
        const size_t e = a.b[0] || a.b[1] ? (size_t)__ldcg(a.expert + r) * (size_t)a.rows + (size_t)j : 0;
        float v = sums[(size_t)(k * wide) * G + t];
        if (a.b[0]) v += __ldg(a.b[0] + e);
        if (DOWN) {
            const int token = r / a.n_used, rank = r - token * a.n_used;
            a.partial[((size_t)rank * (size_t)n_tok + (size_t)token) * (size_t)a.rows + (size_t)j] =
                __ldcg(a.weight + r) * v;
            continue;
        }
        float u = sums[(size_t)(k * wide + 1) * G + t];
        if (a.b[1]) u += __ldg(a.b[1] + e);
        const float h = gated_value(a.act, activate(a.act, a.threshold, v), u);
        a.h[(size_t)r * a.ldh + (size_t)j] = h;
        if (a.down_t && h != 0)
            prefetch_bytes(a.down_t + ((size_t)groups.place[g] * (size_t)a.rows + (size_t)j) * a.down_stride,
                           a.down_stride);
        asked++;
        fired += h != 0;
    }
    if constexpr (DOWN) { // routes that are computed elsewhere give nothing
        const int step = (int)gridDim.x;
#pragma unroll 1
        for (int r = b; r < a.n_routes; r += step) {
            if (place_of(a.place, __ldcg(a.expert + r), a.missing, a.first, a.n_places) >= 0) continue;
            const int token = r / a.n_used, rank = r - token * a.n_used;
            float *y = a.partial + ((size_t)rank * (size_t)n_tok + (size_t)token) * (size_t)a.rows;
            for (int c = threadIdx.x; c < a.rows; c += EXPERT_THREADS) y[c] = 0;
        }
    } else {
        for (int o = 16; o && a.counts; o /= 2) {
            asked += __shfl_xor_sync(~0u, asked, o);
            fired += __shfl_xor_sync(~0u, fired, o);
        }
        if (lane == 0 && asked && a.counts) {
            atomicAdd(a.counts, asked);
            atomicAdd(a.counts + 1, asked);
            atomicAdd(a.counts + 2, fired);
        }
    }
}

} // namespace te
#endif
