// down_32.cu - sums of rows of the formats of 32 weights to a block.
#include "formats.cuh"
#include "down.cuh"

namespace te {

const down_kernels *down_32(int type) { return kernels_of<down_sums, down_kernels>(formats_32(), type); }

} // namespace te
