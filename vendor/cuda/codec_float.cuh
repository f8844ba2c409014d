// codec_float.cuh - F32, F16 and BF16.
#ifndef TE_CUDA_CODEC_FLOAT_CUH
#define TE_CUDA_CODEC_FLOAT_CUH

#include "batch_codec.cuh"

namespace te {

template <int TYPE> struct codec_16;

struct codec_f32 {
    typedef codec_16<TE_F16> scores;
    static constexpr int type = TE_F32, lane_weights = 4, steps = 4, down_weights = 4, offsets = 0, flight = 4;
    static constexpr bool int8 = false;
    struct piece {
        uint4 w;
    };
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int) {
        return {load16(row + 16 * (size_t)p)};
    }
    template <int T> static __device__ __forceinline__ void dot(const piece &v, const acts &a, int p, float (&s)[T]) {
        const float4 w = *reinterpret_cast<const float4 *>(&v.w);
#pragma unroll
        for (int t = 0; t < T; t++) s[t] = fma4(w, a.floats(t, p), s[t]);
    }
    typedef piece part;
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int n) { return load(row, i, n); }
    template <int T>
    static __device__ __forceinline__ void axpy(const part &v, const float (&h)[T],
                                                float (&acc)[T][down_weights + offsets]) {
        add_weight(acc, h, 0, __uint_as_float(v.w.x));
        add_weight(acc, h, 1, __uint_as_float(v.w.y));
        add_weight(acc, h, 2, __uint_as_float(v.w.z));
        add_weight(acc, h, 3, __uint_as_float(v.w.w));
    }
    static __device__ __forceinline__ int column(int i, int k) { return 4 * i + k; }
    static __device__ uint4 halves(const uint8_t *row, int i, int n) {
        const float *x = (const float *)row;
        auto pair = [&](int c) { return half2_of(c < n ? x[c] : 0, c + 1 < n ? x[c + 1] : 0); };
        return make_uint4(pair(8 * i), pair(8 * i + 2), pair(8 * i + 4), pair(8 * i + 6));
    }
    static __device__ __forceinline__ float weight(const uint8_t *row, int c) { return ((const float *)row)[c]; }
};

// F16 and BF16 differ in how two of them become floats.
template <int TYPE> struct codec_16 {
    typedef codec_16<TE_F16> scores;
    static constexpr int type = TYPE, lane_weights = 8, steps = 4, down_weights = 8, offsets = 0, flight = 3;
    static constexpr bool int8 = false;
    struct piece {
        uint4 w;
    };
    static __device__ __forceinline__ float2 two(uint32_t v) { return TYPE == TE_F16 ? half2_bits(v) : bf162_bits(v); }
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int) {
        return {load16(row + 16 * (size_t)p)};
    }
    template <int T> static __device__ __forceinline__ void dot(const piece &v, const acts &a, int p, float (&s)[T]) {
        const float2 w0 = two(v.w.x), w1 = two(v.w.y), w2 = two(v.w.z), w3 = two(v.w.w);
#pragma unroll
        for (int t = 0; t < T; t++) {
            s[t] = fma4(make_float4(w0.x, w0.y, w1.x, w1.y), a.floats(t, 2 * p), s[t]);
            s[t] = fma4(make_float4(w2.x, w2.y, w3.x, w3.y), a.floats(t, 2 * p + 1), s[t]);
        }
    }
    typedef piece part;
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int n) { return load(row, i, n); }
    template <int T>
    static __device__ __forceinline__ void axpy(const part &v, const float (&h)[T],
                                                float (&acc)[T][down_weights + offsets]) {
        const uint32_t w[4] = {v.w.x, v.w.y, v.w.z, v.w.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float2 f = two(w[k]);
            add_weight(acc, h, 2 * k, f.x);
            add_weight(acc, h, 2 * k + 1, f.y);
        }
    }
    static __device__ __forceinline__ int column(int i, int k) { return 8 * i + k; }
    static __device__ uint4 halves(const uint8_t *row, int i, int) {
        const uint4 v = load16(row + 16 * (size_t)i); // zeros behind the last weight
        if (TYPE == TE_F16) return v;
        auto pair = [](uint32_t w) {
            const float2 f = two(w);
            return half2_of(f.x, f.y);
        };
        return make_uint4(pair(v.x), pair(v.y), pair(v.z), pair(v.w));
    }
    static __device__ __forceinline__ float weight(const uint8_t *row, int c) {
        return two(((const uint16_t *)row)[c]).x;
    }
};

template <int TYPE> struct batch<codec_16<TYPE>> {
    static constexpr bool there = true, exact = true;
    static constexpr int chunk = 64, depth = 3, parts = TYPE == TE_F16 ? 2 : 3;
    typedef typename either<TYPE == TE_F16, batch_halves, batch_thirds>::type input;
    struct row {
        uint4 w[2];
    };
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int c = chunk * k + 32 * i + 8 * q;
            r.w[i] = c < n ? load16(p + 2 * (size_t)c) : make_uint4(0, 0, 0, 0);
        }
    }
    static __device__ __forceinline__ void multiply(const row (&r)[2], const batch_acts &x, int k, int lane,
                                                    float (&sum)[4]) {
        float s[parts][4] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t a0[4] = {r[0].w[i].x, r[1].w[i].x, r[0].w[i].y, r[1].w[i].y},
                           a1[4] = {r[0].w[i].z, r[1].w[i].z, r[0].w[i].w, r[1].w[i].w};
            const int unit = (2 * k + i) * parts * 32 + batch_place(2 * k + i, lane);
#pragma unroll
            for (int p = 0; p < parts; p++) {
                const uint4 b = ((const uint4 *)x.x)[unit + 32 * p];
                if constexpr (TYPE == TE_F16) {
                    multiply_add(s[p], a0, b.x, b.y);
                    multiply_add(s[p], a1, b.z, b.w);
                } else {
                    multiply_add_bf16(s[p], a0, b.x, b.y);
                    multiply_add_bf16(s[p], a1, b.z, b.w);
                }
            }
        }
        if constexpr (TYPE == TE_F16) {
            const float2 d = ((const float2 *)x.scale)[k * 4 + lane % 4];
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] = fmaf(s[0][i] + s[1][i], i % 2 ? d.y : d.x, sum[i]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] += s[0][i] + (s[1][i] + s[2][i]);
        }
    }
    static __device__ __forceinline__ void fragments(const typename codec_16<TYPE>::part (&p)[4], int,
                                                     uint32_t (&hi)[4][4], uint32_t (&)[4][4]) {
        interleave(make_uint2(p[0].w.x, p[0].w.y), make_uint2(p[1].w.x, p[1].w.y), hi, 0, 0);
        interleave(make_uint2(p[0].w.z, p[0].w.w), make_uint2(p[1].w.z, p[1].w.w), hi, 2, 0);
        interleave(make_uint2(p[2].w.x, p[2].w.y), make_uint2(p[3].w.x, p[3].w.y), hi, 0, 2);
        interleave(make_uint2(p[2].w.z, p[2].w.w), make_uint2(p[3].w.z, p[3].w.w), hi, 2, 2);
    }
};

typedef codec_16<TE_F16> codec_f16;
typedef codec_16<TE_BF16> codec_bf16;

} // namespace te
#endif
