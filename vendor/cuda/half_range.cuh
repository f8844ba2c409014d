// half_range.cuh - when values leave the range of F16, and by how much.
#ifndef TE_CUDA_HALF_RANGE_CUH
#define TE_CUDA_HALF_RANGE_CUH

#include "tools.cuh"

namespace te {

// Above 65504 F16 has no values; below 2^-14 they lose bits, which matters only where there are no larger ones. What is
// multiplied with values of at most this size: a power of two, nearly always 1; then the largest is below 2^14.
constexpr float HALF_MOST = 32768, HALF_LEAST = 0x1p-8f;
__device__ __forceinline__ bool half_fits(float most) { return most <= HALF_MOST && most >= HALF_LEAST; }
__device__ __forceinline__ int half_exponent(float most) {
    const bool sound = most > 0 && most < INFINITY;
    return half_fits(most) || !sound ? 0 : max(-120, min(120, ilogbf(most) - 13));
}
__device__ __forceinline__ float half_scale(float most) { return ldexpf(1, half_exponent(most)); }

} // namespace te
#endif
