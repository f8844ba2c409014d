// down_table.cu - sums of rows of IQ4_NL, IQ4_XS and MXFP4.
#include "formats.cuh"
#include "down.cuh"

namespace te {

const down_kernels *down_table(int type) { return kernels_of<down_sums, down_kernels>(formats_table(), type); }

} // namespace te
