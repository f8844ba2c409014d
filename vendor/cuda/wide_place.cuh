// wide_place.cuh - where values of tokens lie for products of 9 to 256 tokens (wide.cuh).
#ifndef TE_CUDA_WIDE_PLACE_CUH
#define TE_CUDA_WIDE_PLACE_CUH

#include "te_cuda.h"
#include "tools.cuh"

namespace te {

// te_cuda_half's matrices: of eight neighbouring columns each of four matrices has two, or one has all.
enum { HALF_IN_TURN = 1, HALF_IN_ORDER = 2 };

// Where value c (a multiple of 4) of token t and the three behind it stand. Of every 32 * words columns lane
// q of four has the q-th quarter: in unit u its words u and words + u, of four columns each. words is a power of two.
__device__ __forceinline__ size_t wide_place(const te_cuda_half &to, int t, int c) {
    // Shifts: divisions by a number that the compiler does not know took a fifth of a norm's time.
    const int words = to.words, log = __ffs(words) - 1, r = c & (8 * words - 1), q = c >> (3 + log) & 3,
              u = (c >> (5 + log) << log) + (r >> 2 & (words - 1)), upper = r >> (2 + log);
    const size_t tile = ((size_t)u * (size_t)to.tiles + (size_t)(t / 8)) * 256;
    // Two columns of a lane are in one of four matrices, or all eight together: in a matrix of their own, or one after the
    // other for each token.
    if (to.matrices == HALF_IN_ORDER) return tile + (size_t)(64 * q + t % 8 * 8 + 4 * upper);
    if (to.matrices) return tile + (size_t)(128 * upper + t % 8 * 8 + 2 * q);
    return tile + (size_t)((t % 8 * 4 + q) * 8 + 4 * upper);
}
// From two values there to the next two.
__device__ __forceinline__ int wide_next(const te_cuda_half &to) { return to.matrices == HALF_IN_TURN ? 64 : 2; }
// The four values, as two words.
__device__ __forceinline__ void wide_put(const te_cuda_half &to, int t, int c, uint2 v) {
    uint16_t *p = (uint16_t *)to.v + wide_place(to, t, c);
    if (wide_next(to) == 2) {
        *(uint2 *)p = v;
        return;
    }
    *(uint32_t *)p = v.x;
    *(uint32_t *)(p + 64) = v.y;
}

} // namespace te
#endif
