// far_codec.cuh - the formats whose rows `pack` rearranges, as the file has them: for rows that are read in host memory.
//
// Blocks are of 34 (Q8_0), 18 (Q4_0) and 210 bytes (Q6_K), at even addresses. Lanes take the same pieces as of packed rows,
// put together from words of four bytes that are kept in L1: the first loads of a warp ask for (of Q6_K: half of) the sectors
// of whole lines over the bus, and those behind find them on their way. No word is read that has nothing of the row.
#ifndef TE_CUDA_FAR_CODEC_CUH
#define TE_CUDA_FAR_CODEC_CUH

#include "codec.cuh"

namespace te {

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

struct far_q8_0 : codec_q8_0 {
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int) {
        const uint8_t *b = row + 34 * (size_t)(p >> 1);
        return {even16(b + 2 + 16 * (p & 1)), load2(b)};
    }
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int n) { return load(row, i, n); }
};

struct far_q4_0 : codec_q4_0 {
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int) {
        const uint8_t *b = row + 18 * (size_t)p;
        return {even16(b + 2), load2(b)};
    }
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int) {
        const uint8_t *b = row + 18 * (size_t)(i >> 1);
        return {even8(b + 2 + 8 * (i & 1)), load2(b)};
    }
};

// A block: ql[128], qh[64], scales[16], d.
struct far_q6_k : codec_q6_k {
    static __device__ __forceinline__ piece load(const uint8_t *row, int p, int) {
        const uint8_t *b = row + 210 * (size_t)(p >> 2);
        const int h = p & 1, half = p >> 1 & 1;
        const uint8_t *ql = b + 64 * half + 16 * h;
        return {even16(ql), even16(ql + 32), even16(b + 128 + 32 * half + 16 * h), even8(b + 192 + 8 * half),
                load2(b + 208)};
    }
    static __device__ __forceinline__ part load_down(const uint8_t *row, int i, int) {
        const uint8_t *b = row + 210 * (size_t)(i >> 4);
        const int half = i >> 3 & 1, g = i & 7;
        const uint8_t *ql = b + 64 * half + 4 * g;
        return {even4(ql),      even4(ql + 32), even4(b + 128 + 32 * half + 4 * g), even8(b + 192 + 8 * half),
                load2(b + 208), g >> 2};
    }
};

} // namespace te
#endif
