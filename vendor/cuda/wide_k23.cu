// wide_k23.cu - products of 9 to 64 tokens, of Q2_K and Q3_K.
#include "formats.cuh"
#include "wide.cuh"

namespace te {

const wide_kernels *wide_k23(int type) { return kernels_of<wide_of, wide_kernels>(formats_k23(), type); }

} // namespace te
