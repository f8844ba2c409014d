// attention_head.cuh - a head of q, k or v on its way: from memory, normed and rotated, into the pool's format.
#ifndef TE_CUDA_ATTENTION_HEAD_CUH
#define TE_CUDA_ATTENTION_HEAD_CUH

#include "te_cuda.h"
#include "tools.cuh"

namespace te {

// Values i and i + 1 (i even) of a row of K or V in the pool's format.
__device__ __forceinline__ float2 kv_pair(int type, const uint8_t *row, int i) {
    switch (type) {
    case TE_F16:
        return half2_bits(*(const uint32_t *)(row + 2 * i));
    case TE_BF16:
        return bf162_bits(*(const uint32_t *)(row + 2 * i));
    case TE_F32:
        return *(const float2 *)(row + 4 * i);
    default: { // Q8_0
        const uint8_t *b = row + (i >> 5) * 34;
        const float d = half_bits(*(const uint16_t *)b);
        const uint32_t q = *(const uint16_t *)(b + 2 + (i & 31));
        return make_float2(d * (float)(int8_t)q, d * (float)(int8_t)(q >> 8));
    }
    }
}
// A warp writes one row; n is a multiple of 32 for Q8_0.
__device__ inline void kv_store(int type, const float *x, uint8_t *row, int n) {
    const int lane = threadIdx.x % 32;
    for (int c = 0; c < n; c += 32) {
        const int i = c + lane;
        const float v = i < n ? x[i] : 0;
        if (type == TE_Q8_0) {
            uint8_t *b = row + c / 32 * 34;
            const float d = warp_max(fabsf(v)) / 127.0f, inverse = d != 0 ? 1.0f / d : 0;
            b[2 + lane] = (uint8_t)(int8_t)roundf(v * inverse);
            if (lane == 0) *(__half *)b = __float2half_rn(d);
        } else if (i < n) {
            if (type == TE_F16) ((__half *)row)[i] = __float2half_rn(v);
            if (type == TE_BF16) ((__nv_bfloat16 *)row)[i] = __float2bfloat16_rn(v);
            if (type == TE_F32) ((float *)row)[i] = v;
        }
    }
    __syncwarp();
}

// A head on its way from memory: lane l holds values l, l + 32 ..., and cos and sin of pairs l, l + 32 ...
// MAX: values of a head at most.
template <int MAX> struct head_values {
    float v[MAX / 32];
    float2 cs[MAX / 64];
};
template <int MAX>
__device__ __forceinline__ head_values<MAX> fetch_head(const te_attention_args &a, const float *src, bool rotate,
                                                       int t) {
    head_values<MAX> h;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < MAX / 32; k++) h.v[k] = lane + 32 * k < a.n_embd_head ? __ldcg(src + lane + 32 * k) : 0;
#pragma unroll
    for (int k = 0; k < MAX / 64; k++) {
        const int i = lane + 32 * k;
        h.cs[k] =
            rotate && i < a.n_rot / 2 ? __ldcg((const float2 *)(a.cs + (size_t)t * a.n_rot) + i) : make_float2(1, 0);
    }
    return h;
}
// A warp puts it into shared memory, normed and rotated.
template <int MAX>
__device__ __forceinline__ void settle_head(const te_attention_args &a, const head_values<MAX> &h, const float *norm,
                                            bool rotate, float *dst) {
    const int lane = threadIdx.x % 32, d = a.n_embd_head;
    float sum = 0, scale = 1;
#pragma unroll
    for (int k = 0; k < MAX / 32; k++) sum = fmaf(h.v[k], h.v[k], sum);
    if (norm) scale = 1.0f / sqrtf(warp_sum(sum) / (float)d + a.norm_eps);
#pragma unroll
    for (int k = 0; k < MAX / 32; k++) {
        const int i = lane + 32 * k;
        if (i < d) dst[i] = norm ? h.v[k] * scale * (a.norm_last ? 1 : __ldg(norm + i)) : h.v[k];
    }
    __syncwarp();
    if (!rotate) return; // V, which has no norm
    const bool turns = a.rope != TE_NO_ROPE;
#pragma unroll
    for (int k = 0; k < MAX / 64; k++) {
        const int i = lane + 32 * k, x = a.rope == TE_ROPE_NORM ? 2 * i : i,
                  y = a.rope == TE_ROPE_NORM ? x + 1 : i + a.n_rot / 2;
        if (!turns || i >= a.n_rot / 2) break;
        const float u = dst[x], v = dst[y];
        dst[x] = u * h.cs[k].x - v * h.cs[k].y;
        dst[y] = u * h.cs[k].y + v * h.cs[k].x;
    }
    __syncwarp();
    if (!norm || !a.norm_last) return; // RoPE leaves the mean square as it is: the weights alone come after it
    for (int i = lane; i < d; i += 32) dst[i] *= __ldg(norm + i);
    __syncwarp();
}

} // namespace te
#endif
