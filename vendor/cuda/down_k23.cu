// down_k23.cu - sums of rows of Q2_K and Q3_K.
#include "formats.cuh"
#include "down.cuh"

namespace te {

const down_kernels *down_k23(int type) { return kernels_of<down_sums, down_kernels>(formats_k23(), type); }

} // namespace te
