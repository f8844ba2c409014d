// down_32.cu - sums of rows of the formats of 32 weights to a block.
#include "down.cuh"

namespace te {

const down_kernels *down_32(int type) {
    static constexpr down_kernels q8_0 = down_of<codec_q8_0>();
    static constexpr down_kernels q4_0 = down_of<codec_q4_0>();
    return type == q8_0.type ? &q8_0 : type == q4_0.type ? &q4_0 : nullptr;
}

} // namespace te
