// codec.cuh - what a codec knows, and what codecs are made of. A codec is one weight format on the GPU: codec_NAME, in a file
// of its own (codec_*.cuh, listed in formats.cuh), which no kernel looks behind.
//
//     type, block              the format and its block, of te_types.h
//     scores                   the codec of a predictor's matrices beside it in one feed-forward
//     weight(row, c)           weight c of a row in the file's layout, in shared memory
// Rows are in device layout (te_layout.h) from here on; file_NAME is the same codec of rows in the file's, where these differ.
//
// Products of many tokens:
//     halves(row, i, n)        weights 8i .. 8i + 7 of a row of n columns as F16; 0 behind the last
// Dot products. 32 lanes take neighbouring pieces of a row at a time:
//     lane_weights             weights of one piece
//     steps                    pieces of a lane in one task of a warp: a task is 32 * steps * lane_weights weights
//     int8                     activations are bytes with a scale per 32 (struct bytes32), else floats
//     load(row, p, n)          piece p of a row of n pieces, in registers
//     dot<T>(piece, act, p, s) s[t] += piece . activations of token t, p counted from the beginning of the tile
// Sums of rows. A thread keeps down_weights columns, as down<T> says:
//     load_down(row, i, n)     its part i of a row of n parts
//     axpy<T>(part, h, acc)    acc[t][k] += h[t] * weight k; behind the weights, `offsets` sums of what is to be taken
//                              off later, each from as many neighbours: one addition instead of one for each weight
//     flight                   parts that are loaded while as many are worked on
//     column(i, k)             the column of weight k of part i
// What two to eight tokens want besides is batch<codec_NAME>: batch_codec.cuh.
//
// Activations lie in shared memory in units of 16 bytes (4 floats, or 16 bytes), swizzled so that every codec's pattern
// of reads (every unit, every other one, 0 1 4 5 8 9 12 13, 0 1 8 9 ...) touches each bank once.
#ifndef TE_CUDA_CODEC_CUH
#define TE_CUDA_CODEC_CUH

#include "../core/te_types.h"
#include "tools.cuh"

namespace te {

template <bool B, class X, class Y> struct either {
    typedef X type;
};
template <class X, class Y> struct either<false, X, Y> {
    typedef Y type;
};

__device__ __forceinline__ int swizzle(int unit) { return unit ^ ((unit >> 3 & 1) * 3) ^ (unit >> 2 & 4); }

// Of 32 activations: x = d * q; the sums of the two halves' q.
struct bytes32 {
    float d;
    int16_t sum[2];
};

// The activations of a tile of columns, token t at t * units and t * n32.
struct acts {
    const uint4 *q;
    const bytes32 *b;
    int units, n32;
    __device__ __forceinline__ uint4 unit(int t, int i) const { return q[t * units + swizzle(i)]; }
    __device__ __forceinline__ float4 floats(int t, int i) const {
        return *reinterpret_cast<const float4 *>(&q[t * units + swizzle(i)]);
    }
    __device__ __forceinline__ bytes32 scale(int t, int i) const { return b[t * n32 + i]; }
};

__device__ __forceinline__ float fma4(float4 w, float4 x, float s) {
    return fmaf(w.w, x.w, fmaf(w.z, x.z, fmaf(w.y, x.y, fmaf(w.x, x.x, s))));
}
__device__ __forceinline__ int dot16(uint4 w, uint4 x, int s) {
    return __dp4a((int)w.w, (int)x.w,
                  __dp4a((int)w.z, (int)x.z, __dp4a((int)w.y, (int)x.y, __dp4a((int)w.x, (int)x.x, s))));
}
__device__ __forceinline__ uint4 and4(uint4 v, uint32_t m) { return make_uint4(v.x & m, v.y & m, v.z & m, v.w & m); }
__device__ __forceinline__ uint4 shift4(uint4 v, int n) { return make_uint4(v.x >> n, v.y >> n, v.z >> n, v.w >> n); }
__device__ __forceinline__ uint4 left4(uint4 v, int n) { return make_uint4(v.x << n, v.y << n, v.z << n, v.w << n); }
__device__ __forceinline__ uint4 or4(uint4 a, uint4 b) {
    return make_uint4(a.x | b.x, a.y | b.y, a.z | b.z, a.w | b.w);
}
constexpr uint32_t LOW = 0x0f0f0f0f;
__device__ __forceinline__ float half_at(const uint8_t *p) { return half_bits(*(const uint16_t *)p); }

// Byte k of w as a float; exact.
template <int k> __device__ __forceinline__ float u8_float(uint32_t w) { return (float)(w >> 8 * k & 0xff); }
template <int k> __device__ __forceinline__ float s8_float(uint32_t w) { return (float)(int8_t)(w >> 8 * k); }

template <int T, int W>
__device__ __forceinline__ void add_weight(float (&acc)[T][W], const float (&h)[T], int k, float w) {
#pragma unroll
    for (int t = 0; t < T; t++) acc[t][k] = fmaf(h[t], w, acc[t][k]);
}

// ---- sums of rows ----

// The low and high halves of eight bytes are weights k and k + 8 of a part: acc += s * q, and h * offset aside.
template <int T>
__device__ __forceinline__ void axpy_nibbles(uint2 lo, uint2 hi, const float (&slo)[T], const float (&shi)[T],
                                             float offset_lo, float offset_hi, const float (&h)[T],
                                             float (&acc)[T][18]) {
    const uint32_t l[2] = {lo.x, lo.y}, u[2] = {hi.x, hi.y};
#pragma unroll
    for (int t = 0; t < T; t++) {
        acc[t][16] = fmaf(h[t], offset_lo, acc[t][16]);
        acc[t][17] = fmaf(h[t], offset_hi, acc[t][17]);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        add_weight(acc, slo, 4 * j, u8_float<0>(l[j]));
        add_weight(acc, slo, 4 * j + 1, u8_float<1>(l[j]));
        add_weight(acc, slo, 4 * j + 2, u8_float<2>(l[j]));
        add_weight(acc, slo, 4 * j + 3, u8_float<3>(l[j]));
        add_weight(acc, shi, 8 + 4 * j, u8_float<0>(u[j]));
        add_weight(acc, shi, 8 + 4 * j + 1, u8_float<1>(u[j]));
        add_weight(acc, shi, 8 + 4 * j + 2, u8_float<2>(u[j]));
        add_weight(acc, shi, 8 + 4 * j + 3, u8_float<3>(u[j]));
    }
}

// ---- weights as F16 ----

// Eight weights d * (q + shift) - low, of bytes q.
__device__ __forceinline__ uint4 eight(uint2 q, float d, float shift, float low) {
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = fmaf(d, (float)((k < 4 ? q.x : q.y) >> 8 * (k % 4) & 0xff) + shift, -low);
    return make_uint4(half2_of(v[0], v[1]), half2_of(v[2], v[3]), half2_of(v[4], v[5]), half2_of(v[6], v[7]));
}
__device__ __forceinline__ uint2 bits_at(const void *p, int shift, uint32_t mask) {
    const uint2 v = __ldg((const uint2 *)p); // other threads want other bits of them: they stay in L1
    return make_uint2(v.x >> shift & mask, v.y >> shift & mask);
}
__device__ __forceinline__ uint2 joined(uint2 a, uint2 b, int left) {
    return make_uint2(a.x | b.x << left, a.y | b.y << left);
}

// ---- rows as in the file ----

// Rows of a file in host memory, whose blocks are at even addresses (34 bytes of Q8_0, 18 of Q4_0, 210 of Q6_K). Lanes take
// the same pieces as of packed rows, put together from words of four bytes that are kept in L1: the first loads of a warp ask
// for (of Q6_K: half of) the sectors of whole lines over the bus, and those behind find them on their way. No word is read
// that has nothing of the row.
//
// WORDS words at an even address.
template <int WORDS> __device__ __forceinline__ void load_even(const uint8_t *p, uint32_t (&w)[WORDS]) {
    const uint32_t *from = (const uint32_t *)((uintptr_t)p & ~(uintptr_t)3);
    const bool odd = (uintptr_t)p & 2;
    uint32_t v[WORDS + 1];
#pragma unroll
    for (int i = 0; i < WORDS; i++) v[i] = __ldg(from + i);
    v[WORDS] = odd ? __ldg(from + WORDS) : 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++) w[i] = odd ? __funnelshift_r(v[i], v[i + 1], 16) : v[i];
}
__device__ __forceinline__ uint4 even16(const uint8_t *p) {
    uint32_t w[4];
    load_even(p, w);
    return make_uint4(w[0], w[1], w[2], w[3]);
}
__device__ __forceinline__ uint2 even8(const uint8_t *p) {
    uint32_t w[2];
    load_even(p, w);
    return make_uint2(w[0], w[1]);
}
__device__ __forceinline__ uint32_t even4(const uint8_t *p) {
    uint32_t w[1];
    load_even(p, w);
    return w[0];
}

} // namespace te
#endif
