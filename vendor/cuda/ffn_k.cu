// ffn_k.cu - the feed-forward of the formats of 256 weights to a block.
#include "one_ffn.cuh"

namespace te {

const ffn_kernels *ffn_k(int type) {
    static constexpr ffn_kernels q4_k = one_ffn_of<codec_q4_k, codec_q8_0>();
    static constexpr ffn_kernels q5_k = one_ffn_of<codec_q5_k, codec_q8_0>();
    static constexpr ffn_kernels q6_k = one_ffn_of<codec_q6_k, codec_q8_0>();
    return type == q4_k.type ? &q4_k : type == q5_k.type ? &q5_k : type == q6_k.type ? &q6_k : nullptr;
}

} // namespace te
