// down_k.cu - sums of rows of the formats of 256 weights to a block.
#include "formats.cuh"
#include "down.cuh"

namespace te {

const down_kernels *down_k(int type) { return kernels_of<down_sums, down_kernels>(formats_k(), type); }

} // namespace te
