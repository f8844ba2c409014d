// batch_input.cuh - the input of the kernels for two to eight tokens: products on tensor cores, and activations in shared
// memory in the order in which these take them.
//
// Products are m16n8k16 (floats) and m16n8k32 (bytes): A is 16 rows of weights, B the tokens. Lane 4g + q holds columns of
// rows g and g + 8 of A, columns of token g of B, and of the result tokens 2q and 2q + 1 of rows g (c[0], c[1]) and g + 8
// (c[2], c[3]). Which columns the four lanes q hold does not matter as long as A and B agree, so each holds neighbours.
//
// A float becomes two of F16 beside a power of two for each 64 columns of a token, or three of BF16: with weights of that
// format products are as exact as those of floats. Integer formats take bytes, as rows_input.cuh makes them.
#ifndef TE_CUDA_BATCH_INPUT_CUH
#define TE_CUDA_BATCH_INPUT_CUH

#include "gemm_mma.cuh"
#include "rows_input.cuh"

namespace te {

constexpr int BATCH_TOKENS = 8, BATCH_ROWS = 16, BATCH_SCALED = 64; // columns with a scale, at most
constexpr int BATCH_UNIT = 256; // of columns are tiles: places repeat, and all chunks are whole

// c += A * B of BF16; m16n8k16 as multiply_add. Devices without it gather rows and columns from the other lanes.
__device__ __forceinline__ void multiply_add_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const int lane = (int)threadIdx.x % 32, row = lane & ~3, token = lane % 4 * 8;
#pragma unroll
    for (int k = 0; k < 8; k++) { // the pairs of columns, of lane k % 4
        float2 w[2], x[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            w[i] = bf162_bits(__shfl_sync(~0u, a[k / 4 * 2 + i], row + k % 4));
            x[i] = bf162_bits(__shfl_sync(~0u, k < 4 ? b0 : b1, token + 4 * i + k % 4));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) c[i] = fmaf(w[i / 2].y, x[i % 2].y, fmaf(w[i / 2].x, x[i % 2].x, c[i]));
    }
#endif
}

// A * B of signed bytes, m16n8k32.
__device__ __forceinline__ void multiply_bytes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%10,%10,%10,%10};"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
#else
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] = 0;
    auto part = [](int &c0, int &c1, uint32_t w, uint32_t x) {
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                     : "+r"(c0), "+r"(c1)
                     : "r"(w), "r"(x));
    };
    part(c[0], c[1], a[0], b0);
    part(c[2], c[3], a[1], b0);
    part(c[0], c[1], a[2], b1);
    part(c[2], c[3], a[3], b1);
#endif
}

__device__ __forceinline__ uint32_t bf162_of(float x, float y) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const uint32_t *>(&v);
}
// Two floats as two (F16) or three (BF16) pairs whose sums they are.
__device__ __forceinline__ void split_halves(float x, float y, uint32_t (&p)[2]) {
    p[0] = half2_of(x, y);
    const float2 h = half2_bits(p[0]);
    p[1] = half2_of(x - h.x, y - h.y);
}
__device__ __forceinline__ void split_thirds(float x, float y, uint32_t (&p)[3]) {
    p[0] = bf162_of(x, y);
    const float2 h = bf162_bits(p[0]);
    x -= h.x;
    y -= h.y;
    p[1] = bf162_of(x, y);
    const float2 l = bf162_bits(p[1]);
    p[2] = bf162_of(x - l.x, y - l.y);
}
// A power of two that brings values up to `most` near the upper end of F16, and its inverse.
__device__ __forceinline__ float2 half_range(float most) {
    const int e = max(1, min(253, 268 - (int)(__float_as_uint(most) >> 23 & 255)));
    return make_float2(__uint_as_float((uint32_t)e << 23), __uint_as_float((uint32_t)(254 - e) << 23));
}

// Activations in shared memory. put(): columns c .. c + 3 of the tile of token t, by a whole warp, whose lanes have 128
// columns in order. Places are swizzled by the 32 columns' number, so that neither side meets in a bank.
struct batch_acts {
    uint8_t *x;
    float *scale; // [64 columns][8] of halves; [32 columns][8] of bytes, then as many sums of bytes
    int n_sums;   // where the sums begin
};
__device__ __forceinline__ int batch_place(int s, int lane) { return lane ^ (s & 7) << 2; }

struct batch_halves {
    static constexpr int column_bytes = 2 * 2 * BATCH_TOKENS, scale_bytes = 4 * BATCH_TOKENS, planes = 1, parts = 2;
    static constexpr batch_form form = BATCH_HALVES;
    static __device__ __forceinline__ void put(const batch_acts &a, int t, int c, float4 v) {
        float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
        for (int o = 1; o < 16; o *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        const float2 by = half_range(most);
        if (c % BATCH_SCALED == 0) a.scale[c / BATCH_SCALED * BATCH_TOKENS + t] = by.y;
        uint32_t p0[2], p1[2];
        split_halves(v.x * by.x, v.y * by.x, p0);
        split_halves(v.z * by.x, v.w * by.x, p1);
        const int s = c / 32, unit = batch_place(s, 4 * t + c % 32 / 8);
#pragma unroll
        for (int i = 0; i < 2; i++)
            *(uint2 *)(a.x + ((2 * s + i) * 32 + unit) * 16 + c % 8 * 2) = make_uint2(p0[i], p1[i]);
    }
};
struct batch_thirds {
    static constexpr int column_bytes = 3 * 2 * BATCH_TOKENS, scale_bytes = 0, planes = 0, parts = 3;
    static constexpr batch_form form = BATCH_THIRDS;
    static __device__ __forceinline__ void put(const batch_acts &a, int t, int c, float4 v) {
        uint32_t p0[3], p1[3];
        split_thirds(v.x, v.y, p0);
        split_thirds(v.z, v.w, p1);
        const int s = c / 32, unit = batch_place(s, 4 * t + c % 32 / 8);
#pragma unroll
        for (int i = 0; i < 3; i++)
            *(uint2 *)(a.x + ((3 * s + i) * 32 + unit) * 16 + c % 8 * 2) = make_uint2(p0[i], p1[i]);
    }
};
// Of the eight words of 32 bytes, lane q takes two: q and q + 4 (NIBBLES), or a pair, lane 1 the third, lane 2 the second.
template <bool NIBBLES> struct batch_bytes {
    static constexpr int column_bytes = BATCH_TOKENS, scale_bytes = 2 * 2 * 4 * BATCH_TOKENS, planes = 2;
    static constexpr batch_form form = NIBBLES ? BATCH_NIBBLES : BATCH_BYTES;
    static __device__ __forceinline__ void put(const batch_acts &a, int t, int c, float4 v) {
        const quad_bytes b = make_bytes(v);
        const int s = c / 32, i = c % 32 / 4, q = NIBBLES ? i % 4 : (i >> 1 & 1) << 1 | i >> 2,
                  h = NIBBLES ? i / 4 : i % 2;
        *(uint32_t *)(a.x + (s * 32 + batch_place(s, 4 * t + q)) * 8 + 4 * h) = b.q;
        if (i) return;
        a.scale[s * BATCH_TOKENS + t] = b.of.d;
        a.scale[a.n_sums + s * BATCH_TOKENS + t] = (float)(b.of.sum[0] + b.of.sum[1]);
    }
};

// Prepared input (te_cuda_prepare) is what shared memory would hold of a tile of all columns: x, scales, sums. (Planes: of
// scale and sums, equally long.)
__host__ __device__ constexpr int batch_width(int cols) { return (cols + BATCH_UNIT - 1) / BATCH_UNIT * BATCH_UNIT; }
template <class I> __device__ __forceinline__ batch_acts batch_prepared(void *v, int cols) {
    return {(uint8_t *)v, (float *)((uint8_t *)v + (size_t)batch_width(cols) * I::column_bytes), batch_width(cols) / 4};
}

// n bytes, a multiple of 16, from global to shared memory; batch_wait waits for them.
__device__ __forceinline__ void batch_copy(void *to, const void *from, int n) {
    for (int i = 16 * threadIdx.x; i < n; i += 16 * ROWS_THREADS) {
#if __CUDA_ARCH__ >= 800
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared((uint8_t *)to + i)),
            "l"((const uint8_t *)from + i)
            : "memory");
#else
        *(uint4 *)((uint8_t *)to + i) = __ldcg((const uint4 *)((const uint8_t *)from + i));
#endif
    }
}
__device__ __forceinline__ void batch_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    __syncthreads();
}
// Columns c0 .. c0 + tile - 1 of what was prepared. Ends with a barrier.
template <class I> __device__ __forceinline__ void batch_take(const rows_args &a, int c0, const batch_acts &to) {
    const batch_acts from = batch_prepared<I>(const_cast<void *>(a.prepared), a.cols);
    const int n = min(a.tile, batch_width(a.cols) - c0);
    batch_copy(to.x, from.x + (size_t)c0 * I::column_bytes, n * I::column_bytes);
    if constexpr (I::planes > 0) {
        constexpr int per = I::scale_bytes / I::planes / 4; // floats of BATCH_SCALED columns
#pragma unroll
        for (int i = 0; i < I::planes; i++)
            batch_copy(to.scale + i * to.n_sums, from.scale + i * from.n_sums + c0 / BATCH_SCALED * per,
                       n / BATCH_SCALED * per * 4);
    }
    batch_wait();
}

// Columns c0 .. c0 + tile - 1 into shared memory, 128 of all tokens a warp. late: the root of the mean square of a token
// is not known yet: its squares are added up on the way, and the sums of products are to be multiplied with norm.scale.
// All blocks read the same input: each begins elsewhere. Ends with a barrier.
template <class I>
__device__ void batch_fill(const rows_args &a, rows_norm<BATCH_TOKENS> &n, int c0, const batch_acts &to, bool late,
                           float *room) {
    const int lane = threadIdx.x % 32, turn = ((int)threadIdx.x / 32 + (int)blockIdx.x) % ROWS_WARPS;
    float sum[BATCH_TOKENS] = {};
    for (int u = 128 * turn + 4 * lane; u < a.tile; u += 128 * ROWS_WARPS) {
        const int c = c0 + u;
        float4 v[BATCH_TOKENS], w = make_float4(1, 1, 1, 1);
#pragma unroll
        for (int t = 0; t < BATCH_TOKENS; t++) {
            v[t] = make_float4(0, 0, 0, 0);
            if (t < a.n_tok && c < a.cols) v[t] = load_x(a, t, c);
        }
        if (a.norm.kind != TE_NO_NORM && c < a.cols) w = load_vector(a.norm.w, c, a.cols, 0);
#pragma unroll
        for (int t = 0; t < BATCH_TOKENS; t++) {
            if (t >= a.n_tok) break;
            if (late) {
                sum[t] += squares(v[t], c, a.cols, 0);
                v[t] = make_float4(v[t].x * w.x, v[t].y * w.y, v[t].z * w.z, v[t].w * w.w);
            } else if (a.norm.kind != TE_NO_NORM && c < a.cols) {
                v[t] = apply_norm(a.norm, a.cols, v[t], c, n.mean[t], n.scale[t], w);
            }
            I::put(to, t, u, v[t]);
        }
    }
    if (late) {
        const float s = warp_sums<BATCH_TOKENS>(sum, lane);
        if (sum_owner<BATCH_TOKENS>(lane)) room[turn * BATCH_TOKENS + sum_index<BATCH_TOKENS>(lane)] = s;
    }
    __syncthreads();
    if (late && (int)threadIdx.x < BATCH_TOKENS) {
        float s = 0;
        for (int w = 0; w < ROWS_WARPS; w++) s += room[w * BATCH_TOKENS + threadIdx.x];
        n.scale[threadIdx.x] = 1.0f / sqrtf(s / (float)a.cols + a.norm.eps);
    }
}

} // namespace te
#endif
