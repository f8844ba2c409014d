// few_codec.cuh - how the kernels for two to eight tokens read rows of each weight format (device layout, te_cuda.h).
//
// Dot products take a chunk of columns of 16 rows at a time (few_input.cuh). A lane loads 16 bytes of a row where it can,
// as eight rows are eight requests; where these belong to one block of weights, lanes exchange words.
//     input                    what activations become
//     chunk, depth             columns, and chunks that a lane has on their way
//     row                      what a lane holds of a chunk of a row; 0 where there is no row
//     load(row, p, k, q, n)    of chunk k of a row of n columns, by lane q of four
//     multiply(r, x, k, l, s)  s += rows r[0] and r[1] . activations, chunk k of the tile, by lane l
// Sums of rows take 16 rows at a time, of which lane 4g + q has rows 4q .. 4q + 3, the columns that codec::load_down says:
//     parts                    2 with F16, 3 with BF16: what a row's factor becomes
//     fragments(p, h, hi, lo)  A of columns 8h + 2i and 8h + 2i + 1 of the four rows, as F16 whose sums the weights are (of
//                              blocks of 256 to 22 bits, or 2^-25 if that is more); `exact`: lo is 0
#ifndef TE_CUDA_FEW_CODEC_CUH
#define TE_CUDA_FEW_CODEC_CUH

#include "few_input.cuh"

namespace te {

template <bool B, class X, class Y> struct either {
    typedef X type;
};
template <class X, class Y> struct either<false, X, Y> {
    typedef Y type;
};

// few<C>: of the format of codec C. Without one (there: false) plain loops serve several tokens, too.
template <class C> struct few {
    static constexpr bool there = false;
};

// Four columns of two rows, in pairs of columns, as pairs of rows: from fragment `pair` on, words `row` and row + 1.
__device__ __forceinline__ void interleave(uint2 w0, uint2 w1, uint32_t (&a)[4][4], int pair, int row) {
    a[pair][row] = __byte_perm(w0.x, w1.x, 0x5410);
    a[pair][row + 1] = __byte_perm(w0.x, w1.x, 0x7632);
    a[pair + 1][row] = __byte_perm(w0.y, w1.y, 0x5410);
    a[pair + 1][row + 1] = __byte_perm(w0.y, w1.y, 0x7632);
}

template <int TYPE> struct few<codec_16<TYPE>> {
    static constexpr bool there = true, exact = true;
    static constexpr int chunk = 64, depth = 3, parts = TYPE == TE_F16 ? 2 : 3;
    typedef typename either<TYPE == TE_F16, few_halves, few_thirds>::type input;
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
    static __device__ __forceinline__ void multiply(const row (&r)[2], const few_acts &x, int k, int lane,
                                                    float (&sum)[4]) {
        float s[parts][4] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t a0[4] = {r[0].w[i].x, r[1].w[i].x, r[0].w[i].y, r[1].w[i].y},
                           a1[4] = {r[0].w[i].z, r[1].w[i].z, r[0].w[i].w, r[1].w[i].w};
            const int unit = (2 * k + i) * parts * 32 + few_place(2 * k + i, lane);
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

// Of 32 columns: bytes of two rows times those of the tokens, and the tokens' scales.
struct few_block_32 {
    int c[4];
    float2 d;
    __device__ __forceinline__ few_block_32(const uint32_t (&a)[4], const few_acts &x, int s, int lane,
                                            bool own = true) {
        const uint2 b = ((const uint2 *)x.x)[s * 32 + few_place(s, lane)];
        multiply_bytes(c, a, own ? b.x : 0, own ? b.y : 0);
        d = ((const float2 *)x.scale)[s * 4 + lane % 4];
    }
    // sum += c * (what the rows' scales are) * d
    __device__ __forceinline__ void add(float row0, float row1, float (&sum)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = fmaf((float)c[i], (i < 2 ? row0 : row1) * (i % 2 ? d.y : d.x), sum[i]);
    }
};

// q times d, exactly: d has 11 bits and q eight at most. q: pairs of F16.
__device__ __forceinline__ void scaled_halves(uint32_t q, __half2 d, uint32_t &hi, uint32_t &lo) {
    const __half2 v = *reinterpret_cast<const __half2 *>(&q), h = __hmul2(v, d), l = __hfma2(v, d, __hneg2(h));
    hi = *reinterpret_cast<const uint32_t *>(&h);
    lo = *reinterpret_cast<const uint32_t *>(&l);
}
// Bytes 0, 1 (FIRST) or 2, 3 of w, below 256, less `offset`, as a pair of F16; exact.
template <bool FIRST> __device__ __forceinline__ uint32_t pair_of_bytes(uint32_t w, float offset) {
    const uint32_t v = __byte_perm(w, 0x64646464, FIRST ? 0x4140 : 0x4342); // 1024 + byte
    const __half2 h = __hsub2(*reinterpret_cast<const __half2 *>(&v), __float2half2_rn(1024 + offset));
    return *reinterpret_cast<const uint32_t *>(&h);
}
// The fragments of eight columns of four rows of bytes.
__device__ __forceinline__ void byte_fragments(const uint2 (&w)[4], const uint16_t (&d)[4], float offset,
                                               uint32_t (&hi)[4][4], uint32_t (&lo)[4][4]) {
#pragma unroll
    for (int r = 0; r < 4; r += 2) {
        const __half2 dd = __halves2half2(__ushort_as_half(d[r]), __ushort_as_half(d[r + 1]));
#pragma unroll
        for (int i = 0; i < 4; i++) { // columns 2i and 2i + 1
            const uint32_t two =
                __byte_perm(i / 2 ? w[r].y : w[r].x, i / 2 ? w[r + 1].y : w[r + 1].x, i % 2 ? 0x7362 : 0x5140);
            scaled_halves(pair_of_bytes<true>(two, offset), dd, hi[i][r], lo[i][r]);
            scaled_halves(pair_of_bytes<false>(two, offset), dd, hi[i][r + 1], lo[i][r + 1]);
        }
    }
}
// scale * byte - low of the bytes of a word.
__device__ __forceinline__ void expand_word(uint32_t w, float scale, float low, uint2 &hi, uint2 &lo) {
    uint32_t p[2], q[2];
    split_halves(fmaf(scale, u8_float<0>(w), -low), fmaf(scale, u8_float<1>(w), -low), p);
    split_halves(fmaf(scale, u8_float<2>(w), -low), fmaf(scale, u8_float<3>(w), -low), q);
    hi = make_uint2(p[0], q[0]);
    lo = make_uint2(p[1], q[1]);
}
// The fragments of formats whose weights become floats first: word(r, k) is columns 4k .. 4k + 3 of row r, as that.
template <class F> __device__ __forceinline__ void float_fragments(uint32_t (&hi)[4][4], uint32_t (&lo)[4][4], F word) {
#pragma unroll
    for (int r = 0; r < 4; r += 2)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint2 h[2], l[2];
            word(r, k, h[0], l[0]);
            word(r + 1, k, h[1], l[1]);
            interleave(h[0], h[1], hi, 2 * k, r);
            interleave(l[0], l[1], lo, 2 * k, r);
        }
}

// A lane's 16 bytes of 64 of two blocks, as eight of each: the first block's in w[0], the other's in w[1].
__device__ __forceinline__ void exchange_pairs(uint4 v, uint2 (&w)[2]) {
    const bool upper = threadIdx.x & 2;
    const uint2 own = upper ? make_uint2(v.z, v.w) : make_uint2(v.x, v.y),
                give = upper ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w),
                got = make_uint2(__shfl_xor_sync(~0u, give.x, 2), __shfl_xor_sync(~0u, give.y, 2));
    w[0] = upper ? got : own;
    w[1] = upper ? own : got;
}
// Which eight of 32 bytes lane q has then.
__device__ __forceinline__ int exchanged(int q) { return (q & 1) << 1 | q >> 1; }

template <> struct few<codec_q8_0> {
    static constexpr bool there = true, exact = false;
    static constexpr int chunk = 128, depth = 2, parts = 2;
    typedef few_bytes<false> input;
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
    static __device__ __forceinline__ void multiply(const row (&r)[2], const few_acts &x, int k, int lane,
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
                few_block_32(a, x, 4 * k + 2 * i + j, lane).add(j ? d0.y : d0.x, j ? d1.y : d1.x, sum);
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

// A lane loads a block; the four exchange words until each has word q of all.
template <> struct few<codec_q4_0> {
    static constexpr bool there = true, exact = false;
    static constexpr int chunk = 256, depth = 2, parts = 2;
    typedef few_bytes<true> input;
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
    static __device__ __forceinline__ void multiply(const row (&r)[2], const few_acts &x, int k, int lane,
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
                few_block_32(a, x, 8 * k + 4 * part + b, lane).add(scale(0), scale(1), sum);
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

template <bool FIVE> struct few<codec_k45<FIVE>> {
    static constexpr bool there = true, exact = false;
    static constexpr int chunk = 256, depth = 2, parts = 2, block = codec_k45<FIVE>::block;
    typedef few_bytes<false> input;
    struct row {
        uint4 head, q[2];
        uint2 high;
    };
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        r = row();
        if (chunk * k >= n) return;
        const uint8_t *b = p + (size_t)k * block;
        r.head = __ldg((const uint4 *)b);
        if (FIVE) r.high = __ldg((const uint2 *)(b + 16 + 8 * exchanged(q)));
#pragma unroll
        for (int i = 0; i < 2; i++) r.q[i] = load16(b + (FIVE ? 48 : 16) + 64 * i + 16 * q);
    }
    static __device__ __forceinline__ void multiply(const row (&r)[2], const few_acts &x, int k, int lane,
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
            const few_block_32 b(w, x, 8 * k + u, lane);
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

// Scales are those of 16 weights, two lanes' worth: the tokens' bytes are 0 for the other two.
template <> struct few<codec_q6_k> {
    static constexpr bool there = true, exact = false;
    static constexpr int chunk = 128, depth = 2, parts = 2;
    typedef few_bytes<false> input;
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
        r.high = load8(p + 128 * nb + 32 * half + 8 * exchanged(q));
        r.scales = __ldg((const uint2 *)(p + 192 * nb + 8 * half));
        r.d = load2(p + 208 * nb + 2 * (half / 2));
    }
    static __device__ __forceinline__ void multiply(const row (&r)[2], const few_acts &x, int k, int lane,
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
                few_block_32(a, x, 4 * k + i, lane, (lane & 1) == h).add(scale(0), scale(1), sum);
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
