// kv_rows.cuh - rows of K and V in the pool's format, read from and written to a device's memory; which of them a token sees.
#ifndef TE_CUDA_KV_ROWS_CUH
#define TE_CUDA_KV_ROWS_CUH

#include "../core/te_types.h"
#include "te_cuda.h"
#include "tools.cuh"

namespace te {

// Values i and i + 1 (i even).
__device__ __forceinline__ float2 pair_of(int type, const uint8_t *row, int i) {
    switch (type) {
    case TE_F16:
        return half2_bits(__ldcg((const uint32_t *)(row + 2 * i)));
    case TE_BF16:
        return bf162_bits(__ldcg((const uint32_t *)(row + 2 * i)));
    case TE_F32:
        return __ldcg((const float2 *)(row + 4 * i));
    default: { // Q8_0
        const uint8_t *b = row + (i >> 5) * 34;
        const float d = half_bits(__ldcg((const unsigned short *)b));
        const uint32_t q = __ldcg((const unsigned short *)(b + 2 + (i & 31)));
        return make_float2(d * (float)(int8_t)q, d * (float)(int8_t)(q >> 8));
    }
    }
}

// A warp writes a row.
__device__ __forceinline__ void store_row(int type, const float *x, uint8_t *row, int n) {
    const int lane = threadIdx.x % 32;
    for (int i = lane; i < (n + 31) / 32 * 32; i += 32) {
        const float v = i < n ? x[i] : 0;
        if (type == TE_Q8_0) {
            const float d = warp_max(fabsf(v)) / 127.0f;
            uint8_t *b = row + i / 32 * 34;
            b[2 + lane] = (uint8_t)(int8_t)roundf(v * (d != 0 ? 1.0f / d : 0));
            if (lane == 0) *(__half *)b = __float2half_rn(d);
        } else if (i < n) {
            if (type == TE_F16) ((__half *)row)[i] = __float2half_rn(v);
            if (type == TE_BF16) ((__nv_bfloat16 *)row)[i] = __float2bfloat16_rn(v);
            if (type == TE_F32) ((float *)row)[i] = v;
        }
    }
}

// The first position that a token sees; a.window is not 0.
__device__ __forceinline__ int first_seen(const te_attention_args &a, int pos) {
    return a.chunked ? pos / a.window * a.window : max(0, pos + 1 - a.window);
}

// What a query is multiplied by, where temp_scale is not 0.
__device__ __forceinline__ float warmth(const te_attention_args &a, int pos) {
    return 1 + a.temp_scale * logf(1 + floorf((float)(pos + a.temp_first) / (float)a.temp_length));
}

} // namespace te
#endif
