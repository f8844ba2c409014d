// ffn_32.cu - the feed-forward of the formats of 32 weights to a block.
#include "one_ffn.cuh"

namespace te {

const ffn_kernels *ffn_32(int type) {
    static constexpr ffn_kernels q8_0 = one_ffn_of<codec_q8_0, codec_q8_0>();
    static constexpr ffn_kernels q4_0 = one_ffn_of<codec_q4_0, codec_q4_0>();
    return type == q8_0.type ? &q8_0 : type == q4_0.type ? &q4_0 : nullptr;
}

} // namespace te
