// rows_k.cu - the row kernels of the formats of 256 weights to a block.
#include "one.cuh"

namespace te {

const rows_kernels *rows_k(int type) {
    static constexpr rows_kernels q4_k = one_rows_of<codec_q4_k>();
    static constexpr rows_kernels q5_k = one_rows_of<codec_q5_k>();
    static constexpr rows_kernels q6_k = one_rows_of<codec_q6_k>();
    return type == q4_k.type ? &q4_k : type == q5_k.type ? &q5_k : type == q6_k.type ? &q6_k : nullptr;
}

} // namespace te
