// down_bits.cu - sums of rows of Q4_1, Q5_0 and Q5_1.
#include "formats.cuh"
#include "down.cuh"

namespace te {

const down_kernels *down_bits(int type) { return kernels_of<down_sums, down_kernels>(formats_bits(), type); }

} // namespace te
