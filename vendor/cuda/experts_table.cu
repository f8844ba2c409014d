// experts_table.cu - experts of IQ4_NL, IQ4_XS and MXFP4.
#include "formats.cuh"
#include "experts.cuh"

namespace te {

const expert_kernels *experts_table(int type) { return kernels_of<expert_of, expert_kernels>(formats_table(), type); }

} // namespace te
