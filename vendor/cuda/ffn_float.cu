// ffn_float.cu - the feed-forward of the formats of floats.
#include "one_ffn.cuh"

namespace te {

const ffn_kernels *ffn_float(int type) {
    static constexpr ffn_kernels f32 = one_ffn_of<codec_f32, codec_f16>();
    static constexpr ffn_kernels f16 = one_ffn_of<codec_f16, codec_f16>();
    static constexpr ffn_kernels bf16 = one_ffn_of<codec_bf16, codec_f16>();
    return type == f32.type ? &f32 : type == f16.type ? &f16 : type == bf16.type ? &bf16 : nullptr;
}

} // namespace te
