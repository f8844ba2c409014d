// codec_q23_k.cuh - Q2_K and Q3_K, which has third bits besides: each half of a block of 256 is four quarters of 32 weights,
// two bits each of the same 32 bytes, and a scale for each 16. Bit 4 * half + quarter of 32 more bytes is the third of a weight.
//
// A row of device layout has the q of all blocks, then their scales and d (Q2_K), or their qh, then scales and d as they are in
// a block, 14 bytes (Q3_K).
#ifndef TE_CUDA_CODEC_Q23_K_CUH
#define TE_CUDA_CODEC_Q23_K_CUH

#include "batch_codec.cuh"

namespace te {

struct codec_q8_0;

// Scale and minimum of each 16 weights of half a block.
template <bool THREE> struct k23_scales {
    uint2 scales; // a byte of each: the scale, above it the minimum
    uint32_t d;   // of scales, then of minima
    static __device__ __forceinline__ k23_scales load(const uint8_t *row, int half, size_t nb) {
        return {__ldg((const uint2 *)(row + 64 * nb) + half), __ldg((const uint32_t *)(row + 80 * nb) + half / 2)};
    }
    // The byte of quarter g's first or second 16 weights.
    __device__ __forceinline__ uint32_t byte(int g, int h) const {
        return (g < 2 ? scales.x : scales.y) >> (16 * (g % 2) + 8 * h) & 255;
    }
    __device__ __forceinline__ float2 of(int g, int h, int) const {
        const float2 f = half2_bits(d);
        const uint32_t s = byte(g, h);
        return make_float2(f.x * (float)(s & 15), f.y * (float)(s >> 4));
    }
};
template <> struct k23_scales<true> {
    uint32_t w[3]; // the lower four bits of eight scales of each half, the upper two of four of each quarter
    uint16_t d;
    static __device__ __forceinline__ k23_scales load(const uint8_t *row, int half, size_t nb) {
        k23_scales v;
        const uint8_t *at = row + 96 * nb + 14 * (size_t)(half / 2);
        load_even(at, v.w);
        v.d = load2(at + 12);
        return v;
    }
    // The minimum is what weights without their offset of 4 have too much.
    __device__ __forceinline__ float2 of(int g, int h, int half) const {
        const int at = 16 * (g % 2) + 8 * h;
        const uint32_t low = (g < 2 ? w[0] : w[1]) >> (at + 4 * half) & 15,
                       high = w[2] >> (at + 4 * half + g / 2 * 2) & 3;
        const float scale = half_bits(d) * (float)((int)(low | high << 4) - 32);
        return make_float2(scale, 4 * scale);
    }
};

// n: pieces of a row, four to a block. Lane 2g + h of a block takes bytes 16h .. of its g-th 32.
template <bool THREE> struct codec_k23 {
    typedef typename either<THREE, te_block_q3_k, te_block_q2_k>::type block;
    typedef codec_q8_0 scores;
    typedef k23_scales<THREE> all_scales;
    static constexpr int type = THREE ? TE_Q3_K : TE_Q2_K, lane_weights = 64, steps = 1, down_weights = 16, offsets = 4,
                         flight = 2;
    static constexpr bool int8 = true;
    // Quarter g of bytes q, and of their third bits.
    static __device__ __forceinline__ uint32_t bits(uint32_t q, uint32_t high, int g, int half) {
        const uint32_t two = q >> 2 * g & 0x03030303;
        return THREE ? two | (high >> (4 * half + g) & 0x01010101) << 2 : two;
    }
    struct piece {
        uint4 q, high;
        all_scales s;
    };
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int n) {
        const size_t nb = (size_t)(n >> 2);
        return {load16(row + 16 * (size_t)p),
                THREE ? load16(row + 64 * nb + 32 * (size_t)(p >> 2) + 16 * (p & 1)) : make_uint4(0, 0, 0, 0),
                all_scales::load(row, p >> 1, nb)};
    }
    template <int T> static __device__ __forceinline__ void dot(const piece &v, const acts &a, int p, float (&s)[T]) {
        const int h = p & 1, half = p >> 1 & 1, unit = 8 * (p >> 1) + h;
#pragma unroll
        for (int g = 0; g < 4; g++) {
            const float2 d = v.s.of(g, h, half);
            const uint4 w = make_uint4(bits(v.q.x, v.high.x, g, half), bits(v.q.y, v.high.y, g, half),
                                       bits(v.q.z, v.high.z, g, half), bits(v.q.w, v.high.w, g, half));
#pragma unroll
            for (int t = 0; t < T; t++) {
                const bytes32 b = a.scale(t, (unit >> 1) + g);
                const int own = h ? b.sum[1] : b.sum[0], i = dot16(w, a.unit(t, unit + 2 * g), THREE ? -4 * own : 0);
                if (THREE)
                    s[t] = fmaf((float)i, d.x * b.d, s[t]);
                else
                    s[t] = fmaf(b.d, fmaf(d.x, (float)i, -d.y * (float)own), s[t]);
            }
        }
    }
    // Eight parts of 16 to half a block: bytes 4g .. 4g + 3 of 32, weights 4g + i, + 32, + 64 and + 96.
    struct part {
        uint32_t q, high;
        all_scales s;
        int h, half;
    };
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int n) {
        const size_t nb = (size_t)(n >> 4);
        return {load4(row + 4 * (size_t)i), THREE ? load4(row + 64 * nb + 32 * (size_t)(i >> 4) + 4 * (i & 7)) : 0,
                all_scales::load(row, i >> 3, nb), i >> 2 & 1, i >> 3 & 1};
    }
    template <int T>
    static __device__ __forceinline__ void axpy(const part &v, const float (&h)[T],
                                                float (&acc)[T][down_weights + offsets]) {
#pragma unroll
        for (int g = 0; g < 4; g++) {
            const float2 d = v.s.of(g, v.h, v.half);
            const uint32_t w = bits(v.q, v.high, g, v.half);
            float hs[T];
#pragma unroll
            for (int t = 0; t < T; t++) {
                hs[t] = h[t] * d.x;
                acc[t][16 + g] = fmaf(h[t], d.y, acc[t][16 + g]);
            }
            add_weight(acc, hs, 4 * g, u8_float<0>(w));
            add_weight(acc, hs, 4 * g + 1, u8_float<1>(w));
            add_weight(acc, hs, 4 * g + 2, u8_float<2>(w));
            add_weight(acc, hs, 4 * g + 3, u8_float<3>(w));
        }
    }
    static __device__ __forceinline__ int column(int i, int k) {
        return (i >> 3) * 128 + (i & 7) * 4 + k % 4 + k / 4 * 32;
    }
    static __device__ uint4 halves(const uint8_t *row, int i, int n) {
        const size_t nb = (size_t)n / 256;
        const int half = i / 16, g = i % 16 / 4, at = i % 4 * 8;
        uint2 q = bits_at(row + 32 * (size_t)half + at, 2 * g, 0x03030303);
        if (THREE)
            q = joined(q, bits_at(row + 64 * nb + 32 * (size_t)(half / 2) + at, 4 * (half % 2) + g, 0x01010101), 2);
        const float2 d = all_scales::load(row, half, nb).of(g, at / 16, half % 2);
        return eight(q, d.x, THREE ? -4 : 0, THREE ? 0 : d.y);
    }
    static __device__ __forceinline__ float weight(const uint8_t *row, int c) {
        const block *b = (const block *)row + c / 256;
        const int i = c % 256, unit = i / 16, two = b->q[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        if constexpr (THREE) {
            const int low = b->scales[unit % 8] >> unit / 8 * 4 & 15,
                      high = b->scales[8 + unit % 4] >> unit / 4 * 2 & 3, third = b->qh[i % 32] >> i / 32 & 1;
            return half_at(b->d) * (float)((low | high << 4) - 32) * (float)((two | third << 2) - 4);
        } else {
            const int s = b->scales[unit];
            return half_at(b->d) * (float)(s & 15) * (float)two - half_at(b->dmin) * (float)(s >> 4);
        }
    }
};

// Scales are those of 16 weights, two lanes' worth. Those of Q2_K are multiplied into its bits, and minima are a product of
// their own; of Q3_K the tokens' bytes are 0 for the other two lanes.
template <bool THREE> struct batch<codec_k23<THREE>> {
    typedef codec_k23<THREE> codec;
    static constexpr bool there = true, exact = false;
    static constexpr int chunk = 128, depth = 2, parts = 2;
    typedef batch_bytes<false> input;
    struct row {
        uint2 q, high;
        k23_scales<THREE> s;
    };
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        r = row();
        if (chunk * k >= n) return;
        const size_t nb = (size_t)n / 256, at = 8 * (size_t)exchanged(q);
        r.q = load8(p + 32 * (size_t)k + at);
        if (THREE) r.high = load8(p + 64 * nb + 32 * (size_t)(k / 2) + at);
        r.s = k23_scales<THREE>::load(p, k, nb);
    }
    static __device__ __forceinline__ void multiply(const row (&r)[2], const batch_acts &x, int k, int lane,
                                                    float (&sum)[4]) {
#pragma unroll
        for (int g = 0; g < 4; g++) {
            auto word = [&](int j, bool second) {
                return codec::bits(second ? r[j].q.y : r[j].q.x, second ? r[j].high.y : r[j].high.x, g, k % 2);
            };
            if constexpr (THREE) {
                auto three = [&](int j, bool second) { return word(j, second) << 5 ^ 0x80808080; }; // 32 * (weight - 4)
                const uint32_t a[4] = {three(0, false), three(1, false), three(0, true), three(1, true)};
#pragma unroll
                for (int h = 0; h < 2; h++)
                    batch_block_32(a, x, 4 * k + g, lane, (lane & 1) == h)
                        .add(r[0].s.of(g, h, k % 2).x / 32, r[1].s.of(g, h, k % 2).x / 32, sum);
            } else {
                const uint32_t s[2] = {r[0].s.byte(g, lane & 1), r[1].s.byte(g, lane & 1)}; // 15 times 3 is a byte
                const uint32_t low[2] = {(s[0] >> 4) * 0x01010101, (s[1] >> 4) * 0x01010101},
                               a[4] = {word(0, false) * (s[0] & 15), word(1, false) * (s[1] & 15),
                                       word(0, true) * (s[0] & 15), word(1, true) * (s[1] & 15)},
                               m[4] = {low[0], low[1], low[0], low[1]};
                const float2 d[2] = {half2_bits(r[0].s.d), half2_bits(r[1].s.d)};
                const batch_block_32 q(a, x, 4 * k + g, lane), minima(m, x, 4 * k + g, lane);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum[j] = fmaf(j % 2 ? q.d.y : q.d.x,
                                  fmaf(d[j / 2].x, (float)q.c[j], -d[j / 2].y * (float)minima.c[j]), sum[j]);
            }
        }
    }
    static __device__ __forceinline__ void fragments(const typename codec::part (&p)[4], int h, uint32_t (&hi)[4][4],
                                                     uint32_t (&lo)[4][4]) {
        float_fragments(hi, lo, [&](int r, int k, uint2 &wh, uint2 &wl) {
            const int g = 2 * h + k;
            const float2 d = p[r].s.of(g, p[r].h, p[r].half);
            expand_word(codec::bits(p[r].q, p[r].high, g, p[r].half), d.x, d.y, wh, wl);
        });
    }
};

typedef codec_k23<false> codec_q2_k;
typedef codec_k23<true> codec_q3_k;

} // namespace te
#endif
