// down_k.cu - sums of rows of the formats of 256 weights to a block.
#include "down.cuh"

namespace te {

const down_kernels *down_k(int type) {
    static constexpr down_kernels q4_k = down_of<codec_q4_k>();
    static constexpr down_kernels q5_k = down_of<codec_q5_k>();
    static constexpr down_kernels q6_k = down_of<codec_q6_k>();
    return type == q4_k.type ? &q4_k : type == q5_k.type ? &q5_k : type == q6_k.type ? &q6_k : nullptr;
}

} // namespace te
