// ffn_far.cu - the feed-forward of rows in host memory, of the formats that lie otherwise on a device.
#include "far_codec.cuh"
#include "ffn.cuh"

namespace te {

const ffn_kernels *ffn_far(int type) {
    static constexpr ffn_kernels q8_0 = ffn_of<far_q8_0, codec_q8_0>();
    static constexpr ffn_kernels q4_0 = ffn_of<far_q4_0, codec_q4_0>();
    static constexpr ffn_kernels q6_k = ffn_of<far_q6_k, codec_q8_0>();
    return type == q8_0.type ? &q8_0 : type == q4_0.type ? &q4_0 : type == q6_k.type ? &q6_k : nullptr;
}

} // namespace te
