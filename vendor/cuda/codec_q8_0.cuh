// codec_q8_0.cuh - Q8_0: 32 bytes and a scale. A row of device layout has all bytes, then all scales.
#ifndef TE_CUDA_CODEC_Q8_0_CUH
#define TE_CUDA_CODEC_Q8_0_CUH

#include "batch_codec.cuh"

namespace te {

// Two pieces of 16 bytes to a block; n of them are a row.
struct codec_q8_0 {
    typedef te_block_q8_0 block;
    typedef codec_q8_0 scores;
    static constexpr int bytes = sizeof(block), q_at = offsetof(block, q), d_at = offsetof(block, d);
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
    static __device__ uint4 halves(const uint8_t *row, int i, int n) {
        const uint2 q = load8(row + 8 * (size_t)i);
        const float d = half_bits(load2(row + (size_t)n + 2 * (i / 4)));
        return eight(make_uint2(q.x ^ 0x80808080, q.y ^ 0x80808080), d, -128, 0); // + 128: no signs
    }
    static __device__ __forceinline__ float weight(const uint8_t *row, int c) {
        const block *b = (const block *)row + c / 32;
        return half_at(b->d) * (float)b->q[c % 32];
    }
};

struct file_q8_0 : codec_q8_0 {
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int) {
        const uint8_t *b = row + bytes * (size_t)(p >> 1);
        return {even16(b + q_at + 16 * (p & 1)), load2(b + d_at)};
    }
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int n) { return load(row, i, n); }
};

template <> struct batch<codec_q8_0> {
    static constexpr bool there = true, exact = false;
    static constexpr int chunk = 128, depth = 2, parts = 2;
    typedef batch_bytes<false> input;
    struct row {
        uint4 q[2];
        uint2 d;
    };
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        const int nb = n / 32, b = 4 * k;
        r = row();
        if (b >= nb) return;
        r.d = __ldg((const uint2 *)(p + 32 * (size_t)nb + 2 * (size_t)b));
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (b + 2 * i + q / 2 < nb) r.q[i] = load16(p + 32 * (size_t)(b + 2 * i) + 16 * q);
    }
    static __device__ __forceinline__ void multiply(const row (&r)[2], const batch_acts &x, int k, int lane,
                                                    float (&sum)[4]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 d0 = half2_bits(i ? r[0].d.y : r[0].d.x), d1 = half2_bits(i ? r[1].d.y : r[1].d.x);
            uint2 w0[2], w1[2];
            exchange_pairs(r[0].q[i], w0);
            exchange_pairs(r[1].q[i], w1);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint32_t a[4] = {w0[j].x, w1[j].x, w0[j].y, w1[j].y};
                batch_block_32(a, x, 4 * k + 2 * i + j, lane).add(j ? d0.y : d0.x, j ? d1.y : d1.x, sum);
            }
        }
    }
    static __device__ __forceinline__ void fragments(const codec_q8_0::part (&p)[4], int h, uint32_t (&hi)[4][4],
                                                     uint32_t (&lo)[4][4]) {
        uint2 w[4];
        uint16_t d[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = make_uint2((h ? p[i].q.z : p[i].q.x) ^ 0x80808080, (h ? p[i].q.w : p[i].q.y) ^ 0x80808080);
            d[i] = p[i].d;
        }
        byte_fragments(w, d, 128, hi, lo);
    }
};

} // namespace te
#endif
