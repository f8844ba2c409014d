// codec_q6_k.cuh - Q6_K: each half of a block of 256 is four quarters of 32 weights, low and high halves of twice 32 bytes, with
// two more bits in 32 others, and a scale for each 16. A row of device layout has the q of all blocks, then qh, scales, d.
#ifndef TE_CUDA_CODEC_Q6_K_CUH
#define TE_CUDA_CODEC_Q6_K_CUH

#include "batch_codec.cuh"

namespace te {

struct codec_q8_0;

// n: pieces of a row, four to a block. Lane 2g + h of a block takes bytes 16h .. of the g-th half: the low and high
// halves of its ql bytes are weights 16h + i and 64 + 16h + i, those 32 bytes further 32 + 16h + i and 96 + 16h + i.
struct codec_q6_k {
    typedef te_block_q6_k block;
    typedef codec_q8_0 scores;
    // In the file where these are in a block, on a device what all blocks have before them.
    static constexpr int bytes = sizeof(block), high_at = offsetof(block, qh), scales_at = offsetof(block, scales),
                         d_at = offsetof(block, d);
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
        const uint8_t *ql = row + 64 * (size_t)half + 16 * h, *qh = row + high_at * nb + 32 * (size_t)half + 16 * h;
        return {load16(ql), load16(ql + 32), load16(qh),
                __ldg((const uint2 *)(row + scales_at * nb + 8 * (size_t)half)), load2(row + d_at * nb + 2 * (p >> 2))};
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
                load4(row + high_at * nb + 32 * (size_t)half + 4 * g),
                __ldg((const uint2 *)(row + scales_at * nb + 8 * (size_t)half)),
                load2(row + d_at * nb + 2 * (half >> 1)),
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
    static __device__ uint4 halves(const uint8_t *row, int i, int n) {
        const size_t nb = (size_t)n / 256, half = (size_t)i / 16;
        const int k = i % 16 / 4, at = i % 4 * 8;
        const uint2 low = bits_at(row + 64 * half + 32 * (k % 2) + at, k / 2 * 4, LOW),
                    high = bits_at(row + high_at * nb + 32 * half + at, 2 * k, 0x03030303);
        const int8_t scale = (int8_t)__ldg(row + scales_at * nb + 8 * half + 2 * k + at / 16);
        return eight(joined(low, high, 4), half_bits(load2(row + d_at * nb + 2 * (half / 2))) * (float)scale, -32, 0);
    }
    static __device__ __forceinline__ float weight(const uint8_t *row, int c) {
        const block *b = (const block *)row + c / 256;
        const int i = c % 256, half = i / 128, k = i % 128;
        const int q = (b->q[64 * half + k % 64] >> k / 64 * 4 & 15) | (b->qh[32 * half + k % 32] >> k / 32 * 2 & 3)
                                                                          << 4;
        return half_at(b->d) * (float)b->scales[i / 16] * (float)(q - 32);
    }
};

struct file_q6_k : codec_q6_k {
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int) {
        const uint8_t *b = row + bytes * (size_t)(p >> 2);
        const int h = p & 1, half = p >> 1 & 1;
        const uint8_t *ql = b + 64 * half + 16 * h;
        return {even16(ql), even16(ql + 32), even16(b + high_at + 32 * half + 16 * h), even8(b + scales_at + 8 * half),
                load2(b + d_at)};
    }
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int) {
        const uint8_t *b = row + bytes * (size_t)(i >> 4);
        const int half = i >> 3 & 1, g = i & 7;
        const uint8_t *ql = b + 64 * half + 4 * g;
        return {
            even4(ql),       even4(ql + 32), even4(b + high_at + 32 * half + 4 * g), even8(b + scales_at + 8 * half),
            load2(b + d_at), g >> 2};
    }
};

// Scales are those of 16 weights, two lanes' worth: the tokens' bytes are 0 for the other two.
template <> struct batch<codec_q6_k> {
    static constexpr bool there = true, exact = false;
    static constexpr int chunk = 128, depth = 2, parts = 2;
    typedef batch_bytes<false> input;
    struct row {
        uint2 q[2], high, scales;
        uint16_t d;
    };
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        r = row();
        if (chunk * k >= n) return;
        const size_t nb = (size_t)n / 256, half = (size_t)k;
        const uint8_t *low = p + 64 * half + 8 * exchanged(q);
        r.q[0] = load8(low);
        r.q[1] = load8(low + 32);
        r.high = load8(p + codec_q6_k::high_at * nb + 32 * half + 8 * exchanged(q));
        r.scales = __ldg((const uint2 *)(p + codec_q6_k::scales_at * nb + 8 * half));
        r.d = load2(p + codec_q6_k::d_at * nb + 2 * (half / 2));
    }
    static __device__ __forceinline__ void multiply(const row (&r)[2], const batch_acts &x, int k, int lane,
                                                    float (&sum)[4]) {
        const float d[2] = {half_bits(r[0].d) / 4, half_bits(r[1].d) / 4};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            auto six = [&](const row &v, bool second) { // bytes of 4 * (weight - 32)
                const uint2 w = v.q[i % 2];
                const uint32_t q = second ? w.y : w.x, high = second ? v.high.y : v.high.x;
                return ((q >> i / 2 * 4 & LOW) << 2 | (high >> 2 * i & 0x03030303) << 6) ^ 0x80808080;
            };
            const uint32_t a[4] = {six(r[0], false), six(r[1], false), six(r[0], true), six(r[1], true)};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                auto scale = [&](int j) {
                    const uint32_t s = i / 2 ? r[j].scales.y : r[j].scales.x;
                    return d[j] * (float)(int8_t)(s >> 8 * (2 * (i % 2) + h));
                };
                batch_block_32(a, x, 4 * k + i, lane, (lane & 1) == h).add(scale(0), scale(1), sum);
            }
        }
    }
    static __device__ __forceinline__ void fragments(const codec_q6_k::part (&p)[4], int h, uint32_t (&hi)[4][4],
                                                     uint32_t (&lo)[4][4]) {
        float_fragments(hi, lo, [&](int r, int k, uint2 &wh, uint2 &wl) {
            const uint32_t s = (h ? p[r].scales.y : p[r].scales.x) >> (8 * p[r].h + 16 * k), high = p[r].high >> 4 * h,
                           w = k ? (p[r].b >> 4 * h & LOW) | (high & 0x0c0c0c0c) << 2
                                 : (p[r].a >> 4 * h & LOW) | (high & 0x03030303) << 4;
            const float scale = half_bits(p[r].d) * s8_float<0>(s);
            expand_word(w, scale, 32 * scale, wh, wl);
        });
    }
};

} // namespace te
#endif
