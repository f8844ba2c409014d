// down_float.cu - sums of rows of the formats of floats.
#include "formats.cuh"
#include "down.cuh"

namespace te {

const down_kernels *down_float(int type) { return kernels_of<down_sums, down_kernels>(formats_float(), type); }

} // namespace te
