// batch_codec.cuh - how the kernels for two to eight tokens read rows of each weight format (device layout, te_cuda.h).
//
// Dot products take a chunk of columns of 16 rows at a time (batch_input.cuh). A lane loads 16 bytes of a row where it can,
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
#ifndef TE_CUDA_BATCH_CODEC_CUH
#define TE_CUDA_BATCH_CODEC_CUH

#include "batch_input.cuh"

namespace te {

// batch<C>: of the format of codec C. Without one (there: false) plain loops serve several tokens, too.
template <class C> struct batch {
    static constexpr bool there = false;
};

// Four columns of two rows, in pairs of columns, as pairs of rows: from fragment `pair` on, words `row` and row + 1.
__device__ __forceinline__ void interleave(uint2 w0, uint2 w1, uint32_t (&a)[4][4], int pair, int row) {
    a[pair][row] = __byte_perm(w0.x, w1.x, 0x5410);
    a[pair][row + 1] = __byte_perm(w0.x, w1.x, 0x7632);
    a[pair + 1][row] = __byte_perm(w0.y, w1.y, 0x5410);
    a[pair + 1][row + 1] = __byte_perm(w0.y, w1.y, 0x7632);
}

// Of 32 columns: bytes of two rows times those of the tokens, and the tokens' scales.
struct batch_block_32 {
    int c[4];
    float2 d;
    __device__ __forceinline__ batch_block_32(const uint32_t (&a)[4], const batch_acts &x, int s, int lane,
                                              bool own = true) {
        const uint2 b = ((const uint2 *)x.x)[s * 32 + batch_place(s, lane)];
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

} // namespace te
#endif
