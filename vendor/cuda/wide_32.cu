// wide_32.cu - products of 9 to 64 tokens, of the formats of 32 weights to a block.
#include "formats.cuh"
#include "wide.cuh"

namespace te {

const wide_kernels *wide_32(int type) { return kernels_of<wide_of, wide_kernels>(formats_32(), type); }

} // namespace te
