// down_float.cu - sums of rows of the formats of floats.
#include "down.cuh"

namespace te {

const down_kernels *down_float(int type) {
    static constexpr down_kernels f32 = down_of<codec_f32>();
    static constexpr down_kernels f16 = down_of<codec_f16>();
    static constexpr down_kernels bf16 = down_of<codec_bf16>();
    return type == f32.type ? &f32 : type == f16.type ? &f16 : type == bf16.type ? &bf16 : nullptr;
}

} // namespace te
