// wide_bits.cu - products of 9 to 64 tokens, of Q4_1, Q5_0 and Q5_1.
#include "formats.cuh"
#include "wide.cuh"

namespace te {

const wide_kernels *wide_bits(int type) { return kernels_of<wide_of, wide_kernels>(formats_bits(), type); }

} // namespace te
