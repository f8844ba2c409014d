// codec_nibbles.cuh - the formats of which 32 weights have 16 bytes of halves, as Q4_0: Q4_1, Q5_0, Q5_1, IQ4_NL, IQ4_XS and
// MXFP4. They differ in what a half means and in where scales come from; the rest is one codec.
//
// A row of device layout has all halves, then all fifth bits, if there are some, then all scales (te_layout.h).
#ifndef TE_CUDA_CODEC_NIBBLES_CUH
#define TE_CUDA_CODEC_NIBBLES_CUH

#include "batch_codec.cuh"

namespace te {

struct codec_q8_0;

// ---- scales ----

// of(): what 32 weights, unit number `unit` of a block, are multiplied with, and what is added to that.
struct nibble_half {
    typedef uint16_t raw;
    static constexpr bool is_half = true;
    static __device__ __forceinline__ raw load(const uint8_t *scales, int p) { return load2(scales + 2 * (size_t)p); }
    static __device__ __forceinline__ float2 of(raw s, int) { return make_float2(half_bits(s), 0); }
    template <class B> static __device__ __forceinline__ float2 in_file(const B *b, int) {
        return make_float2(half_at(b->d), 0);
    }
};
struct nibble_pair {
    typedef uint32_t raw; // the scale, then the minimum
    static constexpr bool is_half = false;
    static __device__ __forceinline__ raw load(const uint8_t *scales, int p) {
        return __ldg((const uint32_t *)scales + p);
    }
    static __device__ __forceinline__ float2 of(raw s, int) { return half2_bits(s); }
    template <class B> static __device__ __forceinline__ float2 in_file(const B *b, int) {
        return make_float2(half_at(b->d), half_at(b->m));
    }
};
struct nibble_exponent {
    typedef uint8_t raw;
    static constexpr bool is_half = false;
    static __device__ __forceinline__ raw load(const uint8_t *scales, int p) { return __ldg(scales + p); }
    // 2^(e - 128): below 2 that is a denormal number.
    static __device__ __forceinline__ float2 of(raw e, int) {
        return make_float2(__uint_as_float(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23), 0);
    }
    template <class B> static __device__ __forceinline__ float2 in_file(const B *b, int) { return of(b->e, 0); }
};
// Of eight units: a half, 16 bits of upper parts, 32 bits of lower ones.
struct nibble_units {
    typedef uint2 raw;
    static constexpr bool is_half = false;
    static __device__ __forceinline__ raw load(const uint8_t *scales, int p) {
        return __ldg((const uint2 *)scales + (p >> 3));
    }
    static __device__ __forceinline__ float2 of(raw s, int unit) {
        const int scale = (int)((s.y >> 4 * unit & 15) | (s.x >> (16 + 2 * unit) & 3) << 4) - 32;
        return make_float2(half_bits((uint16_t)s.x) * (float)scale, 0);
    }
    template <class B> static __device__ __forceinline__ float2 in_file(const B *b, int unit) {
        const uint32_t high = b->scales_h[0] | (uint32_t)b->scales_h[1] << 8;
        const int scale = (int)((b->scales_l[unit / 2] >> unit % 2 * 4 & 15) | (high >> 2 * unit & 3) << 4) - 32;
        return make_float2(half_at(b->d) * (float)scale, 0);
    }
};

// ---- values ----

// The fifth bits of four weights, the lowest of `bits`.
__device__ __forceinline__ uint32_t fifth_bits(uint32_t bits) { return (bits & 15) * 0x02040810u & 0x10101010u; }

// bytes(): of the eight halves of a word, those of the low and of the high ones. high: their fifth bits are the lowest four
// and four from bit 16 on. A weight is its byte less `offset`, times the scale; where bytes are signed, offset is 0.
template <bool FIVE, int OFFSET> struct nibble_bits {
    static constexpr bool five = FIVE, is_signed = false;
    static constexpr int offset = OFFSET;
    static __device__ __forceinline__ void bytes(uint32_t q, uint32_t high, uint32_t &lo, uint32_t &hi) {
        lo = q & LOW;
        hi = q >> 4 & LOW;
        if (!FIVE) return;
        lo |= fifth_bits(high);
        hi |= fifth_bits(high >> 16);
    }
    static __device__ __forceinline__ int value(int code) { return code - OFFSET; }
};
constexpr uint32_t four_bytes(int a, int b, int c, int d) {
    return (uint32_t)(a & 255) | (uint32_t)(b & 255) << 8 | (uint32_t)(c & 255) << 16 | (uint32_t)(d & 255) << 24;
}
// Sixteen signed bytes, of which halves are the numbers.
template <uint32_t T0, uint32_t T1, uint32_t T2, uint32_t T3> struct nibble_table {
    static constexpr bool five = false, is_signed = true;
    static constexpr int offset = 0;
    // Of the lower four halves: a byte is found in both parts of the table, the half's upper bit says in which it is.
    static __device__ __forceinline__ uint32_t four(uint32_t q) {
        const uint32_t at = q & 0x7777;
        return __byte_perm(__byte_perm(T0, T1, at), __byte_perm(T2, T3, at), 0x3210 | (q & 0x8888) >> 1);
    }
    static __device__ __forceinline__ void bytes(uint32_t q, uint32_t, uint32_t &lo, uint32_t &hi) {
        const uint32_t a = four(q), b = four(q >> 16);
        lo = __byte_perm(a, b, 0x6420);
        hi = __byte_perm(a, b, 0x7531);
    }
    static __device__ __forceinline__ int value(int code) { return (int8_t)four((uint32_t)code); }
};
typedef nibble_table<four_bytes(-127, -104, -83, -65), four_bytes(-49, -35, -22, -10), four_bytes(1, 13, 25, 38),
                     four_bytes(53, 69, 89, 113)>
    nibble_iq4;
// Twice the numbers of four bits: a scale's exponent is one less.
typedef nibble_table<four_bytes(0, 1, 2, 3), four_bytes(4, 6, 8, 12), four_bytes(0, -1, -2, -3),
                     four_bytes(-4, -6, -8, -12)>
    nibble_fp4;

// ---- the codec ----

// A piece is the halves of 32 weights, a part half of that; n of them are a row. MIN: scales come with minima.
template <int TYPE, class B, class V, class S, bool MIN> struct codec_nibbles {
    typedef B block;
    typedef V values;
    typedef S scale;
    typedef codec_q8_0 scores;
    static constexpr int units = sizeof(B::q) / 16, scales_at = V::five ? 20 : 16; // of a unit; behind those of all
    static constexpr int type = TYPE, lane_weights = 32, steps = 2, down_weights = 16, flight = 2;
    static constexpr int offsets = MIN || V::offset ? 2 : 0;
    static constexpr bool int8 = true, min = MIN;
    struct piece {
        uint4 q;
        uint32_t high;
        typename S::raw s;
    };
    static __device__ __forceinline__ uint32_t load_high(const uint8_t *row, int p, size_t n) {
        return V::five ? __ldg((const uint32_t *)(row + 16 * n) + p) : 0;
    }
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int n) {
        return {load16(row + 16 * (size_t)p), load_high(row, p, (size_t)n), S::load(row + scales_at * (size_t)n, p)};
    }
    template <int T> static __device__ __forceinline__ void dot(const piece &v, const acts &a, int p, float (&s)[T]) {
        const float2 d = S::of(v.s, p % 8);
        uint4 lo, hi;
        V::bytes(v.q.x, v.high, lo.x, hi.x);
        V::bytes(v.q.y, v.high >> 4, lo.y, hi.y);
        V::bytes(v.q.z, v.high >> 8, lo.z, hi.z);
        V::bytes(v.q.w, v.high >> 12, lo.w, hi.w);
#pragma unroll
        for (int t = 0; t < T; t++) {
            const bytes32 b = a.scale(t, p);
            const int all = b.sum[0] + b.sum[1],
                      i = dot16(hi, a.unit(t, 2 * p + 1), dot16(lo, a.unit(t, 2 * p), -V::offset * all));
            if (MIN)
                s[t] = fmaf(b.d, fmaf(d.x, (float)i, d.y * (float)all), s[t]);
            else
                s[t] = fmaf((float)i, d.x * b.d, s[t]);
        }
    }
    struct part {
        uint2 q;
        uint32_t high; // as bytes() wants those of the first word
        typename S::raw s;
        int unit;
    };
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int n) {
        const size_t nb = (size_t)(n >> 1);
        return {load8(row + 8 * (size_t)i), load_high(row, i >> 1, nb) >> 8 * (i & 1),
                S::load(row + scales_at * nb, i >> 1), i >> 1 & 7};
    }
    template <int T>
    static __device__ __forceinline__ void axpy(const part &v, const float (&h)[T],
                                                float (&acc)[T][down_weights + offsets]) {
        const float2 d = S::of(v.s, v.unit);
        float hd[T];
#pragma unroll
        for (int t = 0; t < T; t++) hd[t] = h[t] * d.x;
        uint2 lo, hi;
        V::bytes(v.q.x, v.high, lo.x, hi.x);
        V::bytes(v.q.y, v.high >> 4, lo.y, hi.y);
        if constexpr (offsets > 0) {
            const float off = MIN ? -d.y : V::offset * d.x;
            axpy_nibbles<T>(lo, hi, hd, hd, off, off, h, acc);
        } else {
            const uint32_t w[4] = {lo.x, lo.y, hi.x, hi.y};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                add_weight(acc, hd, 4 * k, s8_float<0>(w[k]));
                add_weight(acc, hd, 4 * k + 1, s8_float<1>(w[k]));
                add_weight(acc, hd, 4 * k + 2, s8_float<2>(w[k]));
                add_weight(acc, hd, 4 * k + 3, s8_float<3>(w[k]));
            }
        }
    }
    static __device__ __forceinline__ int column(int i, int k) { return i / 2 * 32 + i % 2 * 8 + k % 8 + k / 8 * 16; }
    static __device__ uint4 halves(const uint8_t *row, int i, int n) {
        const size_t nb = (size_t)(n / 32);
        const int p = i / 4;
        const float2 d = S::of(S::load(row + scales_at * nb, p), p % 8);
        const uint2 q = __ldg((const uint2 *)(row + 16 * (size_t)p + 8 * (i % 2)));
        const uint32_t high = load_high(row, p, nb) >> 8 * (i % 2);
        uint2 lo, hi;
        V::bytes(q.x, high, lo.x, hi.x);
        V::bytes(q.y, high >> 4, lo.y, hi.y);
        uint2 w = i % 4 / 2 ? hi : lo;
        if (V::is_signed) w = make_uint2(w.x ^ 0x80808080, w.y ^ 0x80808080); // + 128: no signs
        return eight(w, d.x, V::is_signed ? -128 : -V::offset, -d.y);
    }
    static __device__ __forceinline__ float weight(const uint8_t *row, int c) {
        const block *b = (const block *)row + c / (32 * units);
        const int unit = c / 32 % units, i = c % 32;
        int code = b->q[16 * unit + i % 16] >> i / 16 * 4 & 15;
        if constexpr (V::five) code |= (b->qh[i / 8] >> i % 8 & 1) << 4;
        const float2 d = S::in_file(b, unit);
        return fmaf(d.x, (float)V::value(code), d.y);
    }
};

typedef codec_nibbles<TE_Q4_1, te_block_q4_1, nibble_bits<false, 0>, nibble_pair, true> codec_q4_1;
typedef codec_nibbles<TE_Q5_0, te_block_q5_0, nibble_bits<true, 16>, nibble_half, false> codec_q5_0;
typedef codec_nibbles<TE_Q5_1, te_block_q5_1, nibble_bits<true, 0>, nibble_pair, true> codec_q5_1;
typedef codec_nibbles<TE_IQ4_NL, te_block_iq4_nl, nibble_iq4, nibble_half, false> codec_iq4_nl;
typedef codec_nibbles<TE_IQ4_XS, te_block_iq4_xs, nibble_iq4, nibble_units, false> codec_iq4_xs;
typedef codec_nibbles<TE_MXFP4, te_block_mxfp4, nibble_fp4, nibble_exponent, false> codec_mxfp4;

// A lane loads a piece with its scale and fifth bits; the four exchange words until each has word q of all, and ask each other
// for the rest.
template <int TYPE, class B, class V, class S, bool MIN> struct batch<codec_nibbles<TYPE, B, V, S, MIN>> {
    typedef codec_nibbles<TYPE, B, V, S, MIN> codec;
    static constexpr bool there = true, exact = false;
    static constexpr int chunk = 256, depth = 2, parts = 2;
    typedef batch_bytes<true> input;
    struct row {
        uint4 q[2];
        uint32_t high[2];
        typename S::raw s[2];
    };
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        const int nb = n / 32;
        r = row();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int b = 8 * k + 4 * i + q;
            if (b >= nb) continue;
            const typename codec::piece v = codec::load(p, b, nb);
            r.q[i] = v.q;
            r.high[i] = v.high;
            r.s[i] = v.s;
        }
    }
    // Bytes with signs, which are this many times the weights without their scale.
    static constexpr int times = V::offset ? 128 / V::offset : 1;
    static __device__ __forceinline__ uint32_t with_signs(uint32_t w) { return V::offset ? w * times ^ 0x80808080 : w; }
    static __device__ __forceinline__ void multiply(const row (&r)[2], const batch_acts &x, int k, int lane,
                                                    float (&sum)[4]) {
        const bool odd = lane & 1;
        const int q = lane & 3;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            uint32_t w[2][4]; // row, block
            float2 own[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint2 half[2]; // of blocks q % 2 and q % 2 + 2: words 0 and 1, or 2 and 3
                exchange_pairs(r[i].q[part], half);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const uint32_t mine = odd ? half[j].y : half[j].x,
                                   got = __shfl_xor_sync(~0u, odd ? half[j].x : half[j].y, 1);
                    w[i][2 * j] = odd ? got : mine;
                    w[i][2 * j + 1] = odd ? mine : got;
                }
                own[i] = S::of(r[i].s[part], 4 * part + q);
            }
#pragma unroll
            for (int b = 0; b < 4; b++) {
                const int from = (lane & ~3) | b;
                uint32_t lo[2], hi[2];
                float d[2], m[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t high = V::five ? __shfl_sync(~0u, r[i].high[part], from) >> 4 * q : 0;
                    V::bytes(w[i][b], high, lo[i], hi[i]);
                    d[i] = __shfl_sync(~0u, own[i].x, from) / times;
                    m[i] = MIN ? __shfl_sync(~0u, own[i].y, from) : 0;
                }
                const uint32_t a[4] = {with_signs(lo[0]), with_signs(lo[1]), with_signs(hi[0]), with_signs(hi[1])};
                const int s = 8 * k + 4 * part + b;
                const batch_block_32 c(a, x, s, lane);
                if (!MIN) {
                    c.add(d[0], d[1], sum);
                    continue;
                }
                const float2 all = ((const float2 *)(x.scale + x.n_sums))[s * 4 + q];
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum[j] = fmaf(j % 2 ? c.d.y : c.d.x,
                                  fmaf(d[j / 2], (float)c.c[j], m[j / 2] * (j % 2 ? all.y : all.x)), sum[j]);
            }
        }
    }
    static __device__ __forceinline__ void fragments(const typename codec::part (&p)[4], int h, uint32_t (&hi)[4][4],
                                                     uint32_t (&lo)[4][4]) {
        auto word = [&](int r, int k) {
            uint32_t first, second;
            V::bytes(k ? p[r].q.y : p[r].q.x, p[r].high >> 4 * k, first, second);
            return (h ? second : first) ^ (V::is_signed ? 0x80808080 : 0);
        };
        constexpr int offset = V::is_signed ? 128 : V::offset;
        if constexpr (S::is_half) {
            uint2 w[4];
            uint16_t d[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                w[i] = make_uint2(word(i, 0), word(i, 1));
                d[i] = p[i].s;
            }
            byte_fragments(w, d, offset, hi, lo);
        } else {
            float_fragments(hi, lo, [&](int r, int k, uint2 &wh, uint2 &wl) {
                const float2 d = S::of(p[r].s, p[r].unit);
                expand_word(word(r, k), d.x, MIN ? -d.y : offset * d.x, wh, wl);
            });
        }
    }
};

} // namespace te
#endif
