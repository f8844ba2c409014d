// codec_q45_k.cuh - Q4_K and Q5_K, which has fifth bits besides: blocks of 256 in eight units of 32, of which two share 32
// bytes as low and high halves; bit u of 32 more bytes is the fifth of unit u. Rows lie alike in files and on devices.
#ifndef TE_CUDA_CODEC_Q45_K_CUH
#define TE_CUDA_CODEC_Q45_K_CUH

#include "batch_codec.cuh"

namespace te {

struct codec_q8_0;

// Scales and minima of units 2k and 2k + 1 of a block, from its first 16 bytes.
struct k_scales {
    float scale[2], low[2];
};
// Bytes 0-3, 4-7 and 8-11 of the twelve; units 4-7 take their upper two bits from the first eight.
__device__ __forceinline__ uint32_t k_scale_bytes(uint4 head, int k) {
    return k < 2 ? head.y & 0x3f3f3f3f : (head.w & LOW) | (head.y >> 2 & 0x30303030);
}
__device__ __forceinline__ uint32_t k_low_bytes(uint4 head, int k) {
    return k < 2 ? head.z & 0x3f3f3f3f : (head.w >> 4 & LOW) | (head.z >> 2 & 0x30303030);
}
__device__ __forceinline__ k_scales k_unpack(uint4 head, int k) {
    const float2 d = half2_bits(head.x);
    const uint32_t s = k_scale_bytes(head, k), m = k_low_bytes(head, k);
    const int shift = k % 2 * 16;
    return {{d.x * (float)(s >> shift & 0xff), d.x * (float)(s >> (shift + 8) & 0xff)},
            {d.y * (float)(m >> shift & 0xff), d.y * (float)(m >> (shift + 8) & 0xff)}};
}

// Scale and minimum of unit u.
__device__ __forceinline__ float2 k_unit(uint4 head, int u) {
    const float2 d = half2_bits(head.x);
    const uint32_t s = k_scale_bytes(head, u / 2), m = k_low_bytes(head, u / 2);
    const int shift = u % 4 * 8;
    return make_float2(d.x * (float)(s >> shift & 0xff), d.y * (float)(m >> shift & 0xff));
}

// Eight lanes take a block: lane 2k + h the bytes 16h .. 16h + 15 of units 2k, 2k + 1.
template <bool FIVE> struct codec_k45 {
    typedef typename either<FIVE, te_block_q5_k, te_block_q4_k>::type block;
    typedef codec_q8_0 scores;
    static constexpr int type = FIVE ? TE_Q5_K : TE_Q4_K, lane_weights = 32, steps = FIVE ? 1 : 2, down_weights = 16,
                         offsets = 2, flight = 2;
    static constexpr bool int8 = true;
    static constexpr int bytes = sizeof(block), q_at = offsetof(block, q), high_at = offsetof(te_block_q5_k, qh);
    struct piece {
        uint4 head, high, q;
    };
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int) {
        const uint8_t *b = row + (size_t)(p >> 3) * bytes;
        const int j = p & 7;
        piece v;
        v.head = __ldg((const uint4 *)b);
        v.high = FIVE ? __ldg((const uint4 *)(b + high_at + 16 * (j & 1))) : make_uint4(0, 0, 0, 0);
        v.q = load16(b + q_at + 16 * j);
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
        const uint8_t *b = row + (size_t)(i >> 4) * bytes;
        const int j = i & 15;
        part v;
        v.head = __ldg((const uint4 *)b);
        v.high = FIVE ? load8(b + high_at + 8 * (j & 3)) : make_uint2(0, 0);
        v.q = load8(b + q_at + 8 * j);
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
    static __device__ uint4 halves(const uint8_t *row, int i, int) {
        const uint8_t *b = row + (size_t)(i / 32) * bytes;
        const int u = i % 32 / 4, at = i % 4 * 8;
        const float2 c = k_unit(__ldg((const uint4 *)b), u);
        uint2 q = bits_at(b + q_at + u / 2 * 32 + at, u % 2 * 4, LOW);
        if (FIVE) q = joined(q, bits_at(b + high_at + at, u, 0x01010101), 4);
        return eight(q, c.x, 0, c.y);
    }
    static __device__ __forceinline__ float weight(const uint8_t *row, int c) {
        const uint8_t *b = row + c / 256 * bytes;
        const int u = c % 256 / 32, at = c % 32;
        const float2 k = k_unit(*(const uint4 *)b, u);
        int q = b[q_at + u / 2 * 32 + at] >> u % 2 * 4 & 15;
        if (FIVE) q |= (b[high_at + at] >> u & 1) << 4;
        return k.x * (float)q - k.y;
    }
};

template <bool FIVE> struct batch<codec_k45<FIVE>> {
    static constexpr bool there = true, exact = false;
    static constexpr int chunk = 256, depth = 2, parts = 2;
    typedef codec_k45<FIVE> codec;
    typedef batch_bytes<false> input;
    struct row {
        uint4 head, q[2];
        uint2 high;
    };
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        r = row();
        if (chunk * k >= n) return;
        const uint8_t *b = p + (size_t)k * codec::bytes;
        r.head = __ldg((const uint4 *)b);
        if (FIVE) r.high = __ldg((const uint2 *)(b + codec::high_at + 8 * exchanged(q)));
#pragma unroll
        for (int i = 0; i < 2; i++) r.q[i] = load16(b + codec::q_at + 64 * i + 16 * q);
    }
    static __device__ __forceinline__ void multiply(const row (&r)[2], const batch_acts &x, int k, int lane,
                                                    float (&sum)[4]) {
        uint2 w0[2], w1[2];
#pragma unroll
        for (int u = 0; u < 8; u++) { // of 32 columns
            if (u % 4 == 0) {
                exchange_pairs(r[0].q[u / 4], w0);
                exchange_pairs(r[1].q[u / 4], w1);
            }
            const k_scales c[2] = {k_unpack(r[0].head, u / 2), k_unpack(r[1].head, u / 2)};
            auto five = [&](uint32_t q, uint32_t high) {
                q = q >> 4 * (u % 2) & LOW;
                return FIVE ? q | (high >> u & 0x01010101) << 4 : q;
            };
            const uint2 v0 = w0[u / 2 % 2], v1 = w1[u / 2 % 2];
            const uint32_t w[4] = {five(v0.x, r[0].high.x), five(v1.x, r[1].high.x), five(v0.y, r[0].high.y),
                                   five(v1.y, r[1].high.y)};
            const batch_block_32 b(w, x, 8 * k + u, lane);
            const float2 all = ((const float2 *)(x.scale + x.n_sums))[(8 * k + u) * 4 + lane % 4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                sum[j] = fmaf(
                    j % 2 ? b.d.y : b.d.x,
                    fmaf(c[j / 2].scale[u % 2], (float)b.c[j], -c[j / 2].low[u % 2] * (j % 2 ? all.y : all.x)), sum[j]);
        }
    }
    static __device__ __forceinline__ void fragments(const typename codec_k45<FIVE>::part (&p)[4], int h,
                                                     uint32_t (&hi)[4][4], uint32_t (&lo)[4][4]) {
        float_fragments(hi, lo, [&](int r, int k, uint2 &wh, uint2 &wl) {
            const k_scales c = k_unpack(p[r].head, p[r].k);
            uint32_t w = (k ? p[r].q.y : p[r].q.x) >> 4 * h & LOW;
            if (FIVE) w |= ((k ? p[r].high.y : p[r].high.x) >> (2 * p[r].k + h) & 0x01010101) << 4;
            expand_word(w, c.scale[h], c.low[h], wh, wl);
        });
    }
};

typedef codec_k45<false> codec_q4_k;
typedef codec_k45<true> codec_q5_k;

} // namespace te
#endif
