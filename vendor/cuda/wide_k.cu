// wide_k.cu - products of 9 to 64 tokens, of Q4_K, Q5_K and Q6_K.
#include "formats.cuh"
#include "wide.cuh"

namespace te {

const wide_kernels *wide_k(int type) { return kernels_of<wide_of, wide_kernels>(formats_k(), type); }

} // namespace te
