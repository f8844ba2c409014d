// route.cuh - a router's choice of experts by a warp, a token at a time (te_route_args).
#ifndef TE_CUDA_ROUTE_CUH
#define TE_CUDA_ROUTE_CUH

#include <cfloat>

#include "words.cuh"

namespace te {

constexpr int ROUTE_WARPS = 8, ROUTE_KEYS = 8, ROUTE_FEW = 4, ROUTE_MOST = 4096;

// Floats as integers in the same order; what is no number comes last, since a token's experts are different. 0: chosen already.
__device__ __forceinline__ uint32_t key_of(float v) {
    const uint32_t b = __float_as_uint(v + 0.0f); // of the two zeros one
    return v == v ? b & 0x80000000u ? ~b : b | 0x80000000u : 1;
}
// The number of a key; of what is no number -infinity is as good as any.
__device__ __forceinline__ float value_of(uint32_t key) {
    return key <= 1 ? -INFINITY : __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
__device__ __forceinline__ uint32_t warp_most(uint32_t v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, v);
#else
    for (int o = 16; o; o /= 2) v = max(v, __shfl_xor_sync(~0u, v, o));
    return v;
#endif
}

// The largest key, and among equal ones the first expert, of keys that each lane has the largest of; one is above 0.
struct best_key {
    uint32_t key;
    int e;
    __device__ __forceinline__ void take(uint32_t k, int i) {
        if (k <= key) return; // lanes go through ascending experts
        key = k;
        e = i;
    }
    __device__ __forceinline__ int of_warp() const {
        const uint32_t most = warp_most(key);
        return ~(int)warp_most(key == most ? ~(uint32_t)e : 0);
    }
};

// p of scores: of expert lane + 32 i, in v[i].
template <class F> __device__ __forceinline__ void each_expert(int n, F f) {
#pragma unroll 1
    for (int e = threadIdx.x % 32; e < n; e += 32) f(e);
}

// Of the experts chosen, in shared memory: weights, and what the others are told. Returns how many are not there.
__device__ __forceinline__ int finish_route(const te_route_args &a, int t, const int *chosen, float *w) {
    const int lane = threadIdx.x % 32, n = a.n_used;
    if (a.gating == TE_GATING_CHOSEN) {
        float most = -INFINITY, sum = 0;
        for (int r = lane; r < n; r += 32) { // where all are ruled out, each is as good as another
            if (w[r] == -INFINITY) w[r] = -FLT_MAX;
            most = fmaxf(most, w[r]);
        }
        most = warp_max(most);
        for (int r = lane; r < n; r += 32) sum += w[r] = expf(w[r] - most);
        sum = warp_sum(sum);
        for (int r = lane; r < n; r += 32) w[r] /= sum;
    }
    float factor = a.scale;
    if (a.normed) {
        float sum = 0;
        for (int r = lane; r < n; r += 32) sum += w[r];
        sum = warp_sum(sum);
        factor /= sum < 1e-20f ? 1e-20f : sum;
    }
    const uint32_t number = a.publish ? ticket_number(a.ticket) : 0;
    int missing = 0, gone = 0, keeps = 0;
    if (a.n_kept) {
#pragma unroll 1
        for (int r0 = 0; r0 < n; r0 += 32)
            gone += __popc(__ballot_sync(~0u, r0 + lane < n && __ldcg(a.place + chosen[min(r0 + lane, n - 1)]) < 0));
        keeps = __ldg(a.n_kept + gone);
        gone = 0;
    }
#pragma unroll 1
    for (int r0 = 0; r0 < n; r0 += 32) {
        const int r = r0 + lane, e = r < n ? chosen[r] : 0;
        const float weight = r < n ? w[r] * factor * (a.factor ? __ldg(a.factor + e) : 1) : 0;
        const bool placed = r >= n || __ldcg(a.place + e) >= 0;
        const unsigned lost = __ballot_sync(~0u, !placed);
        const bool kept = !placed && gone + __popc(lost & ((1u << lane) - 1)) < keeps, there = placed || kept;
        gone += __popc(lost);
        missing += __popc(__ballot_sync(~0u, !there));
#pragma unroll
        for (int k = 0; k < 2; k++) { // words next to each other
            const int from = 16 * k + lane / 2;
            const uint32_t who = __shfl_sync(~0u, there ? ~0u : (uint32_t)e, from),
                           bits = __shfl_sync(~0u, __float_as_uint(weight), from);
            if (a.publish && r0 + from < n)
                store_word(a.publish + 2 * ((size_t)t * (size_t)n + (size_t)(r0 + 16 * k)) + lane,
                           lane % 2 ? bits : who, number);
        }
        if (r >= n) continue;
        a.expert[(size_t)t * (size_t)n + r] = e;
        a.weight[(size_t)t * (size_t)n + r] = weight;
        if (a.n_kept) a.kept[(size_t)t * (size_t)n + r] = kept;
        if (a.uses) atomicAdd(a.uses + e, 1);
    }
    return missing;
}

__device__ __forceinline__ float route_rank(const te_route_args &a, float p, int e) {
    return a.choice_b ? p + __ldg(a.choice_b + e) : p;
}
__device__ __forceinline__ float sigmoid(float v) { return 1 / (1 + expf(-v)); }

// Whether choose_small takes it: all scores in registers.
inline bool is_small(const te_route_args &a) { return a.n_expert <= 32 * ROUTE_KEYS && a.n_group <= 1; }
// The experts of token t and what their weights are made of, to shared memory; at: also what place says of them, of which
// lane l has those of experts l, l + 32 ... KEYS: of so many at most.
template <int KEYS>
__device__ __forceinline__ void choose_small(const te_route_args &a, int t, int *chosen, float *w,
                                             const int *place = nullptr, int *at = nullptr) {
    const int lane = threadIdx.x % 32, n = a.n_expert;
    const float *score = a.score + (size_t)t * a.ld_score;
    float p[KEYS];
    uint32_t key[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; i++) p[i] = lane + 32 * i < n ? __ldcg(score + lane + 32 * i) : -INFINITY;
    if (a.gating == TE_GATING_SOFTMAX) {
        float most = p[0], sum = 0;
#pragma unroll
        for (int i = 1; i < KEYS; i++) most = fmaxf(most, p[i]);
        most = value_of(warp_most(key_of(most)));
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
            p[i] = lane + 32 * i < n ? expf(p[i] - most) : 0;
            sum += p[i];
        }
        const float share = 1 / warp_sum(sum);
#pragma unroll
        for (int i = 0; i < KEYS; i++) p[i] *= share;
    }
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        if (a.gating == TE_GATING_SIGMOID) p[i] = sigmoid(p[i]);
        key[i] = lane + 32 * i < n ? key_of(route_rank(a, p[i], lane + 32 * i)) : 0;
    }
#pragma unroll 1
    for (int r = 0; r < a.n_used; r++) {
        best_key best = {0, 0};
#pragma unroll
        for (int i = 0; i < KEYS; i++) best.take(key[i], lane + 32 * i);
        const int e = best.of_warp();
        float v = 0;
        int where = 0;
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
            const bool own = e == lane + 32 * i;
            v = own ? p[i] : v;
            where = own && at ? place[i] : where;
            key[i] = own ? 0 : key[i];
        }
        if (e % 32 == lane) {
            chosen[r] = e;
            w[r] = v;
            if (at) at[r] = where;
        }
    }
    __syncwarp();
}

} // namespace te
#endif
