// half_range.cuh - when values leave the range of F16, and by how much.
#ifndef TE_CUDA_HALF_RANGE_CUH
#define TE_CUDA_HALF_RANGE_CUH

#include "tools.cuh"

namespace te {

// Above 65504 F16 has no values; below 2^-14 they lose bits, which matters only where there are no larger ones.
__device__ __forceinline__ bool needs_scale(float most) {
    const bool fits = most <= 32768 && most >= 0x1p-8f, sound = most > 0 && most < INFINITY;
    return !fits && sound;
}
__device__ __forceinline__ int scale_exponent(float most) { // so that the largest is below 2^14
    return max(-120, min(120, ilogbf(most) - 13));
}

} // namespace te
#endif
