// codec_q4_0.cuh - Q4_0: 32 halves of 16 bytes and a scale. A row of device layout has all bytes, then all scales.
#ifndef TE_CUDA_CODEC_Q4_0_CUH
#define TE_CUDA_CODEC_Q4_0_CUH

#include "batch_codec.cuh"

namespace te {

// A piece of 16 bytes is a block's, a part half of it; n of them are a row.
struct codec_q4_0 {
    typedef te_block_q4_0 block;
    typedef codec_q4_0 scores;
    static constexpr int bytes = sizeof(block), q_at = offsetof(block, q), d_at = offsetof(block, d);
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
    static __device__ uint4 halves(const uint8_t *row, int i, int n) {
        const float d = half_bits(load2(row + (size_t)n / 2 + 2 * (i / 4)));
        return eight(bits_at(row + 16 * (size_t)(i / 4) + 8 * (i % 2), i % 4 / 2 * 4, LOW), d, -8, 0);
    }
    static __device__ __forceinline__ float weight(const uint8_t *row, int c) {
        const block *b = (const block *)row + c / 32;
        return half_at(b->d) * (float)((b->q[c % 16] >> c % 32 / 16 * 4 & 15) - 8);
    }
};

struct file_q4_0 : codec_q4_0 {
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int) {
        const uint8_t *b = row + bytes * (size_t)p;
        return {even16(b + q_at), load2(b + d_at)};
    }
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int) {
        const uint8_t *b = row + bytes * (size_t)(i >> 1);
        return {even8(b + q_at + 8 * (i & 1)), load2(b + d_at)};
    }
};

// A lane loads a block; the four exchange words until each has word q of all.
template <> struct batch<codec_q4_0> {
    static constexpr bool there = true, exact = false;
    static constexpr int chunk = 256, depth = 2, parts = 2;
    typedef batch_bytes<true> input;
    struct row {
        uint4 q[2], d;
    };
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        const int nb = n / 32, b = 8 * k;
        r = row();
        const uint8_t *d = p + 16 * (size_t)nb + 2 * (size_t)b;
        if (b < nb) r.d = __ldg((const uint4 *)d); // the row ends at a multiple of 16 bytes
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (b + 4 * i + q < nb) r.q[i] = load16(p + 16 * (size_t)(b + 4 * i + q));
    }
    static __device__ __forceinline__ void multiply(const row (&r)[2], const batch_acts &x, int k, int lane,
                                                    float (&sum)[4]) {
#pragma unroll
        for (int part = 0; part < 2; part++) {
            uint32_t w[2][4]; // row, block
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint2 half[2]; // of blocks q % 2 and q % 2 + 2: words 0 and 1, or 2 and 3
                exchange_pairs(r[i].q[part], half);
                const bool odd = lane & 1;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const uint32_t own = odd ? half[j].y : half[j].x,
                                   got = __shfl_xor_sync(~0u, odd ? half[j].x : half[j].y, 1);
                    w[i][2 * j] = odd ? got : own;
                    w[i][2 * j + 1] = odd ? own : got;
                }
            }
#pragma unroll
            for (int b = 0; b < 4; b++) { // bytes of 16 * (weight - 8)
                auto low = [](uint32_t v) { return (v << 4 & 0xf0f0f0f0) ^ 0x80808080; };
                auto high = [](uint32_t v) { return (v & 0xf0f0f0f0) ^ 0x80808080; };
                auto scale = [&](int i) {
                    const uint32_t dd[4] = {r[i].d.x, r[i].d.y, r[i].d.z, r[i].d.w};
                    const float2 d = half2_bits(dd[2 * part + b / 2]);
                    return (b % 2 ? d.y : d.x) / 16;
                };
                const uint32_t a[4] = {low(w[0][b]), low(w[1][b]), high(w[0][b]), high(w[1][b])};
                batch_block_32(a, x, 8 * k + 4 * part + b, lane).add(scale(0), scale(1), sum);
            }
        }
    }
    static __device__ __forceinline__ void fragments(const codec_q4_0::part (&p)[4], int h, uint32_t (&hi)[4][4],
                                                     uint32_t (&lo)[4][4]) {
        uint2 w[4];
        uint16_t d[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = make_uint2(p[i].q.x >> 4 * h & LOW, p[i].q.y >> 4 * h & LOW);
            d[i] = p[i].d;
        }
        byte_fragments(w, d, 8, hi, lo);
    }
};

} // namespace te
#endif
