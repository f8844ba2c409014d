// wide_many_32.cu - products of 129 to 240 tokens on Hopper, of Q8_0 and Q4_0.
#include "formats.cuh"
#include "wide_many.cuh"

namespace te {

const many_kernels *many_32(int type) { return kernels_of<many_of, many_kernels>(formats_32(), type); }

} // namespace te
