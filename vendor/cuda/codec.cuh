// codec.cuh - how the lanes of a warp read rows of each weight format (device layout, te_cuda.h), written once.
//
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
//
// Activations lie in shared memory in units of 16 bytes (4 floats, or 16 bytes), swizzled so that every codec's pattern
// of reads (every unit, every other one, 0 1 4 5 8 9 12 13, 0 1 8 9 ...) touches each bank once.
#ifndef TE_CUDA_CODEC_CUH
#define TE_CUDA_CODEC_CUH

#include "../core/te_types.h"
#include "tools.cuh"

namespace te {

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

// Byte k of w as a float; exact.
template <int k> __device__ __forceinline__ float u8_float(uint32_t w) { return (float)(w >> 8 * k & 0xff); }
template <int k> __device__ __forceinline__ float s8_float(uint32_t w) { return (float)(int8_t)(w >> 8 * k); }

template <int T, int W>
__device__ __forceinline__ void add_weight(float (&acc)[T][W], const float (&h)[T], int k, float w) {
#pragma unroll
    for (int t = 0; t < T; t++) acc[t][k] = fmaf(h[t], w, acc[t][k]);
}

struct codec_f32 {
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
};

// F16 and BF16 differ in how two of them become floats.
template <int TYPE> struct codec_16 {
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
};

// n: pieces of a row; the scales stand behind all of them.
struct codec_q8_0 {
    static constexpr int type = TE_Q8_0, lane_weights = 16, steps = 4, down_weights = 16, offsets = 0, flight = 2;
    static constexpr bool int8 = true;
    struct piece {
        uint4 q;
        uint16_t d;
    };
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int n) {
        return {load16(row + 16 * (size_t)p), load2(row + 16 * (size_t)n + 2 * (p / 2))};
    }
    template <int T> static __device__ __forceinline__ void dot(const piece &v, const acts &a, int p, float (&s)[T]) {
        const float d = half_bits(v.d);
#pragma unroll
        for (int t = 0; t < T; t++) s[t] = fmaf((float)dot16(v.q, a.unit(t, p), 0), d * a.scale(t, p >> 1).d, s[t]);
    }
    typedef piece part;
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int n) { return load(row, i, n); }
    template <int T>
    static __device__ __forceinline__ void axpy(const part &v, const float (&h)[T],
                                                float (&acc)[T][down_weights + offsets]) {
        const float d = half_bits(v.d);
        float hd[T];
#pragma unroll
        for (int t = 0; t < T; t++) hd[t] = h[t] * d;
        const uint32_t w[4] = {v.q.x, v.q.y, v.q.z, v.q.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            add_weight(acc, hd, 4 * k, s8_float<0>(w[k]));
            add_weight(acc, hd, 4 * k + 1, s8_float<1>(w[k]));
            add_weight(acc, hd, 4 * k + 2, s8_float<2>(w[k]));
            add_weight(acc, hd, 4 * k + 3, s8_float<3>(w[k]));
        }
    }
    static __device__ __forceinline__ int column(int i, int k) { return 16 * i + k; }
};

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

struct codec_q4_0 {
    static constexpr int type = TE_Q4_0, lane_weights = 32, steps = 2, down_weights = 16, offsets = 2, flight = 3;
    static constexpr bool int8 = true;
    struct piece {
        uint4 q;
        uint16_t d;
    };
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int n) {
        return {load16(row + 16 * (size_t)p), load2(row + 16 * (size_t)n + 2 * p)};
    }
    template <int T> static __device__ __forceinline__ void dot(const piece &v, const acts &a, int p, float (&s)[T]) {
        const float d = half_bits(v.d);
        const uint4 lo = and4(v.q, LOW), hi = and4(shift4(v.q, 4), LOW);
#pragma unroll
        for (int t = 0; t < T; t++) {
            const bytes32 b = a.scale(t, p);
            const int i = dot16(hi, a.unit(t, 2 * p + 1), dot16(lo, a.unit(t, 2 * p), 0)) - 8 * (b.sum[0] + b.sum[1]);
            s[t] = fmaf((float)i, d * b.d, s[t]);
        }
    }
    struct part {
        uint2 q;
        uint16_t d;
    };
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int n) {
        return {load8(row + 8 * (size_t)i), load2(row + 8 * (size_t)n + 2 * (i / 2))};
    }
    template <int T>
    static __device__ __forceinline__ void axpy(const part &v, const float (&h)[T],
                                                float (&acc)[T][down_weights + offsets]) {
        const float d = half_bits(v.d);
        float hd[T];
#pragma unroll
        for (int t = 0; t < T; t++) hd[t] = h[t] * d;
        axpy_nibbles<T>(make_uint2(v.q.x & LOW, v.q.y & LOW), make_uint2(v.q.x >> 4 & LOW, v.q.y >> 4 & LOW), hd, hd,
                        8 * d, 8 * d, h, acc);
    }
    static __device__ __forceinline__ int column(int i, int k) { return i / 2 * 32 + i % 2 * 8 + k % 8 + k / 8 * 16; }
};

// Scales and minima of units 2k and 2k + 1 of a Q4_K or Q5_K block, from its first 16 bytes.
struct k_scales {
    float scale[2], low[2];
};
__device__ __forceinline__ k_scales k_unpack(uint4 head, int k) {
    const float2 d = half2_bits(head.x);
    // Bytes 0-3, 4-7 and 8-11 of the twelve; units 4-7 take their upper two bits from the first eight.
    const uint32_t s = k < 2 ? head.y & 0x3f3f3f3f : (head.w & LOW) | (head.y >> 2 & 0x30303030);
    const uint32_t m = k < 2 ? head.z & 0x3f3f3f3f : (head.w >> 4 & LOW) | (head.z >> 2 & 0x30303030);
    const int shift = k % 2 * 16;
    return {{d.x * (float)(s >> shift & 0xff), d.x * (float)(s >> (shift + 8) & 0xff)},
            {d.y * (float)(m >> shift & 0xff), d.y * (float)(m >> (shift + 8) & 0xff)}};
}

// Q4_K, and Q5_K with the fifth bits. Eight lanes take a block: lane 2k + h the bytes 16h .. 16h + 15 of units 2k, 2k + 1.
template <bool FIVE> struct codec_k45 {
    static constexpr int type = FIVE ? TE_Q5_K : TE_Q4_K, lane_weights = 32, steps = FIVE ? 1 : 2, down_weights = 16,
                         offsets = 2, flight = 2;
    static constexpr bool int8 = true;
    static constexpr int block = FIVE ? 176 : 144;
    struct piece {
        uint4 head, high, q;
    };
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int) {
        const uint8_t *b = row + (size_t)(p >> 3) * block;
        const int j = p & 7;
        piece v;
        v.head = __ldg((const uint4 *)b);
        v.high = FIVE ? __ldg((const uint4 *)(b + 16 + 16 * (j & 1))) : make_uint4(0, 0, 0, 0);
        v.q = load16(b + (FIVE ? 48 : 16) + 16 * j);
        return v;
    }
    template <int T> static __device__ __forceinline__ void dot(const piece &v, const acts &a, int p, float (&s)[T]) {
        const int k = p >> 1 & 3, h = p & 1;
        const k_scales c = k_unpack(v.head, k);
        uint4 lo = and4(v.q, LOW), hi = and4(shift4(v.q, 4), LOW);
        if (FIVE) {
            const uint4 bits = shift4(v.high, 2 * k);
            lo = or4(lo, left4(and4(bits, 0x01010101), 4));
            hi = or4(hi, left4(and4(bits, 0x02020202), 3));
        }
        const int unit = 16 * (p >> 3) + 4 * k + h;
#pragma unroll
        for (int t = 0; t < T; t++) {
            const bytes32 b0 = a.scale(t, unit >> 1), b1 = a.scale(t, (unit >> 1) + 1);
            const float i0 = (float)dot16(lo, a.unit(t, unit), 0), i1 = (float)dot16(hi, a.unit(t, unit + 2), 0);
            s[t] = fmaf(b0.d, fmaf(c.scale[0], i0, -c.low[0] * (float)(h ? b0.sum[1] : b0.sum[0])), s[t]);
            s[t] = fmaf(b1.d, fmaf(c.scale[1], i1, -c.low[1] * (float)(h ? b1.sum[1] : b1.sum[0])), s[t]);
        }
    }
    struct part {
        uint4 head;
        uint2 high, q;
        int k;
    };
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int) {
        const uint8_t *b = row + (size_t)(i >> 4) * block;
        const int j = i & 15;
        part v;
        v.head = __ldg((const uint4 *)b);
        v.high = FIVE ? load8(b + 16 + 8 * (j & 3)) : make_uint2(0, 0);
        v.q = load8(b + (FIVE ? 48 : 16) + 8 * j);
        v.k = j >> 2;
        return v;
    }
    template <int T>
    static __device__ __forceinline__ void axpy(const part &v, const float (&h)[T],
                                                float (&acc)[T][down_weights + offsets]) {
        const k_scales c = k_unpack(v.head, v.k);
        float s0[T], s1[T];
#pragma unroll
        for (int t = 0; t < T; t++) {
            s0[t] = h[t] * c.scale[0];
            s1[t] = h[t] * c.scale[1];
        }
        uint2 lo = make_uint2(v.q.x & LOW, v.q.y & LOW), hi = make_uint2(v.q.x >> 4 & LOW, v.q.y >> 4 & LOW);
        if (FIVE) {
            const uint32_t x = v.high.x >> 2 * v.k, y = v.high.y >> 2 * v.k;
            lo.x |= (x & 0x01010101) << 4;
            lo.y |= (y & 0x01010101) << 4;
            hi.x |= (x & 0x02020202) << 3;
            hi.y |= (y & 0x02020202) << 3;
        }
        axpy_nibbles<T>(lo, hi, s0, s1, c.low[0], c.low[1], h, acc);
    }
    static __device__ __forceinline__ int column(int i, int k) {
        return (i >> 4) * 256 + (i >> 2 & 3) * 64 + (i & 3) * 8 + k % 8 + k / 8 * 32;
    }
};

// n: pieces of a row, four to a block. Lane 2g + h of a block takes bytes 16h .. of the g-th half: the low and high
// halves of its ql bytes are weights 16h + i and 64 + 16h + i, those 32 bytes further 32 + 16h + i and 96 + 16h + i.
struct codec_q6_k {
    static constexpr int type = TE_Q6_K, lane_weights = 64, steps = 1, down_weights = 16, offsets = 0, flight = 2;
    static constexpr bool int8 = true;
    struct piece {
        uint4 a, b, high;
        uint2 scales;
        uint16_t d;
    };
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int n) {
        const size_t nb = (size_t)(n >> 2);
        const int h = p & 1, half = p >> 1;
        const uint8_t *ql = row + 64 * (size_t)half + 16 * h, *qh = row + 128 * nb + 32 * (size_t)half + 16 * h;
        return {load16(ql), load16(ql + 32), load16(qh), __ldg((const uint2 *)(row + 192 * nb + 8 * (size_t)half)),
                load2(row + 208 * nb + 2 * (p >> 2))};
    }
    template <int T> static __device__ __forceinline__ void dot(const piece &v, const acts &a, int p, float (&s)[T]) {
        const int h = p & 1;
        const float d = half_bits(v.d);
        const uint32_t s01 = v.scales.x >> 8 * h, s23 = v.scales.y >> 8 * h;
        const float sc[4] = {d * s8_float<0>(s01), d * s8_float<2>(s01), d * s8_float<0>(s23), d * s8_float<2>(s23)};
        const uint4 w[4] = {or4(and4(v.a, LOW), left4(and4(v.high, 0x03030303), 4)),
                            or4(and4(v.b, LOW), left4(and4(v.high, 0x0c0c0c0c), 2)),
                            or4(and4(shift4(v.a, 4), LOW), and4(v.high, 0x30303030)),
                            or4(and4(shift4(v.b, 4), LOW), and4(shift4(v.high, 2), 0x30303030))};
        const int unit = 8 * (p >> 1) + h;
#pragma unroll
        for (int t = 0; t < T; t++)
#pragma unroll
            for (int g = 0; g < 4; g++) {
                const bytes32 b = a.scale(t, (unit >> 1) + g);
                const int i = dot16(w[g], a.unit(t, unit + 2 * g), -32 * (h ? b.sum[1] : b.sum[0]));
                s[t] = fmaf((float)i, sc[g] * b.d, s[t]);
            }
    }
    // Eight parts of 16 to half a block: bytes 4g .. 4g + 3 of three times 32, weights 4g + i, + 32, + 64 and + 96.
    struct part {
        uint32_t a, b, high;
        uint2 scales;
        uint16_t d;
        int h;
    };
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int n) {
        const size_t nb = (size_t)(n >> 4);
        const int half = i >> 3, g = i & 7;
        const uint8_t *ql = row + 64 * (size_t)half + 4 * g;
        return {load4(ql),
                load4(ql + 32),
                load4(row + 128 * nb + 32 * (size_t)half + 4 * g),
                __ldg((const uint2 *)(row + 192 * nb + 8 * (size_t)half)),
                load2(row + 208 * nb + 2 * (half >> 1)),
                g >> 2};
    }
    template <int T>
    static __device__ __forceinline__ void axpy(const part &v, const float (&h)[T],
                                                float (&acc)[T][down_weights + offsets]) {
        const float d = half_bits(v.d);
        const uint32_t s01 = v.scales.x >> 8 * v.h, s23 = v.scales.y >> 8 * v.h;
        const float sc[4] = {d * s8_float<0>(s01), d * s8_float<2>(s01), d * s8_float<0>(s23), d * s8_float<2>(s23)};
        const uint32_t w[4] = {(v.a & LOW) | (v.high & 0x03030303) << 4, (v.b & LOW) | (v.high & 0x0c0c0c0c) << 2,
                               (v.a >> 4 & LOW) | (v.high & 0x30303030), (v.b >> 4 & LOW) | (v.high >> 2 & 0x30303030)};
#pragma unroll
        for (int g = 0; g < 4; g++) {
            float hs[T];
#pragma unroll
            for (int t = 0; t < T; t++) hs[t] = h[t] * sc[g];
            add_weight(acc, hs, 4 * g, u8_float<0>(w[g]) - 32);
            add_weight(acc, hs, 4 * g + 1, u8_float<1>(w[g]) - 32);
            add_weight(acc, hs, 4 * g + 2, u8_float<2>(w[g]) - 32);
            add_weight(acc, hs, 4 * g + 3, u8_float<3>(w[g]) - 32);
        }
    }
    static __device__ __forceinline__ int column(int i, int k) {
        return (i >> 3) * 128 + (i & 7) * 4 + k % 4 + k / 4 * 32;
    }
};

typedef codec_16<TE_F16> codec_f16;
typedef codec_16<TE_BF16> codec_bf16;
typedef codec_k45<false> codec_q4_k;
typedef codec_k45<true> codec_q5_k;

} // namespace te
#endif
