// one_ffn.cuh - the feed-forward of one token in the usual case: a predictor's rows score the neurons, gate and up of the wanted
// ones are read at once. What ffn.cuh does, in little code (see one.cuh).
#ifndef TE_CUDA_ONE_FFN_CUH
#define TE_CUDA_ONE_FFN_CUH

#include "ffn.cuh"
#include "one.cuh"

namespace te {

template <class C, class S>
__global__ void __launch_bounds__(ROWS_THREADS, 2) one_ffn_kernel(const __grid_constant__ ffn_args f) {
    extern __shared__ uint4 shared[];
    __shared__ int count, live;
    const rows_args &a = f.k;
    uint8_t *s = (uint8_t *)shared;
    uint4 *z_shared = (uint4 *)(s + f.at.z);
    bytes32 *scales = (bytes32 *)(s + f.at.scales), *z_scales = (bytes32 *)(s + f.at.z_scales);
    float *part = (float *)(s + f.at.part);
    const uint8_t **pointer = (const uint8_t **)(s + f.at.pointer);
    int *id = (int *)(s + f.at.chosen), *dealt = (int *)(s + f.at.chosen + f.at.chosen_bytes);
    float *h = (float *)(dealt + f.own);
    const int b = blockIdx.x, nb = gridDim.x, own = (a.n - b + nb - 1) / nb, lane = threadIdx.x % 32;
    const rows_product &fc2 = f.s.product[0];
    auto score_row = [&](int e) { return fc2.w + (size_t)(b + e * nb) * fc2.stride; };
    rows_task<S> scores;
    start_tasks<S>(f.s, own, scores, score_row);
#pragma unroll 1
    for (int e = threadIdx.x; e < own; e += ROWS_THREADS) pointer[e] = score_row(e);
    dep_go();
    dep_wait();
    one_input<S> z;
    one_input<C> x;
    z.load(f.s);
    x.load(a);
    const float threshold = __ldcg(f.threshold);
    z.put(f.s, z_shared, z_scales);
    x.put(a, shared, scales);
    __syncthreads();
    auto keep = [&](int i, float v) { part[i] = v; };
    run_tasks<S, 1>(pointer, own, f.s.parts, 0, pieces_of<S>(f.s), acts_of<S>(f.s, z_shared, z_scales), scores, keep);
    __syncthreads();
    if (threadIdx.x < 32) {
        int n = 0;
#pragma unroll 1
        for (int e0 = 0; e0 < own; e0 += 32) {
            const int e = e0 + lane;
            const bool on = e < own && row_sum(part, e, f.s.parts) >= threshold;
            const unsigned vote = __ballot_sync(~0u, on);
            if (on) id[n + __popc(vote & ((1u << lane) - 1))] = b + e * nb;
            n += __popc(vote);
        }
        if (lane == 0) count = n;
    }
    // The wanted neurons of a cluster's blocks are dealt out evenly.
    cluster_arrive();
    cluster_wait();
    const int blocks = cluster_size(), rank = cluster_rank();
    int total = 0;
#pragma unroll 1
    for (int i = 0; i < blocks; i++) total += (int)cluster_load(&count, i);
    const int first = total * rank / blocks, n = total * (rank + 1) / blocks - first;
    auto dealt_id = [&](int e) {
        int k = first + e, block = 0;
#pragma unroll 1
        for (int m; k >= (m = (int)cluster_load(&count, block)); block++) k -= m;
        return (size_t)cluster_load(id + k, block);
    };
    rows_task<C> ahead;
    start_tasks<C>(a, 2 * n, ahead, [&](int r) {
        const rows_product &p = a.product[r % 2];
        return p.w + dealt_id(r / 2) * p.stride;
    });
#pragma unroll 1
    for (int e = threadIdx.x; e < n; e += ROWS_THREADS) {
        const size_t j = dealt_id(e);
        dealt[e] = (int)j;
        pointer[2 * e] = a.product[0].w + j * a.product[0].stride;
        pointer[2 * e + 1] = a.product[1].w + j * a.product[1].stride;
        prefetch_bytes(f.down + j * f.down_stride, f.down_stride);
    }
    cluster_arrive();
    __syncthreads();
    run_tasks<C, 1>(pointer, 2 * n, a.parts, 0, pieces_of<C>(a), acts_of<C>(a, shared, scales), ahead, keep);
    __syncthreads();
    if (threadIdx.x < 32) {
        int m = 0;
#pragma unroll 1
        for (int e0 = 0; e0 < n; e0 += 32) {
            const int e = e0 + lane;
            float v = 0;
            if (e < n) {
                const float *bias = a.product[1].bias, g = activate(a.act, a.threshold, row_sum(part, 2 * e, a.parts));
                float u = row_sum(part, 2 * e + 1, a.parts);
                if (bias) u += __ldg(bias + dealt[e]);
                v = gated_value(a.act, g, u);
                if (a.fired && v != 0) atomicAdd(a.fired + dealt[e], 1);
            }
            const unsigned vote = __ballot_sync(~0u, v != 0); // true for what is no number
            const int to = m + __popc(vote & ((1u << lane) - 1));
            if (v != 0) {
                h[to] = v;
                pointer[to] = f.down + (size_t)dealt[e] * f.down_stride;
            }
            m += __popc(vote);
        }
        if (lane == 0) {
            live = m;
            if (a.counts && n) {
                atomicAdd(a.counts, n);
                atomicAdd(a.counts + 1, n);
                atomicAdd(a.counts + 2, m);
            }
        }
    }
    __syncthreads();
    sum_tiles<C, 1>(f, live, pointer, [&](int k, int) { return h[k]; }, 0, (float *)shared);
    cluster_wait();
}

template <class C, bool SEVERAL> constexpr ffn_kernels one_ffn_of() {
    ffn_kernels k = ffn_of<C, SEVERAL>();
    k.one = one_ffn_kernel<C, typename C::scores>;
    return k;
}
template <class C> struct one_ffn {
    static constexpr ffn_kernels kernels = one_ffn_of<C, true>();
};
// Of formats that fewer models have: several tokens take a kernel for each step.
template <class C> struct single_ffn {
    static constexpr ffn_kernels kernels = one_ffn_of<C, false>();
};

} // namespace te
#endif
