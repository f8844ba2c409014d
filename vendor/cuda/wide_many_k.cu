// wide_many_k.cu - products of 129 to 240 tokens on Hopper, of Q4_K, Q5_K and Q6_K.
#include "formats.cuh"
#include "wide_many.cuh"

namespace te {

const many_kernels *many_k(int type) { return kernels_of<many_of, many_kernels>(formats_k(), type); }

} // namespace te
