// rows_float.cu - the row kernels of the formats of floats.
#include "one.cuh"

namespace te {

const rows_kernels *rows_float(int type) {
    static constexpr rows_kernels f32 = one_rows_of<codec_f32>();
    static constexpr rows_kernels f16 = one_rows_of<codec_f16>();
    static constexpr rows_kernels bf16 = one_rows_of<codec_bf16>();
    return type == f32.type ? &f32 : type == f16.type ? &f16 : type == bf16.type ? &bf16 : nullptr;
}

} // namespace te
