// rows_32.cu - the row kernels of the formats of 32 weights to a block.
#include "one.cuh"

namespace te {

const rows_kernels *rows_32(int type) {
    static constexpr rows_kernels q8_0 = one_rows_of<codec_q8_0>();
    static constexpr rows_kernels q4_0 = one_rows_of<codec_q4_0>();
    return type == q8_0.type ? &q8_0 : type == q4_0.type ? &q4_0 : nullptr;
}

} // namespace te
