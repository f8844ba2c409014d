// experts_32.cu - experts of the formats of 32 weights to a block.
#include "formats.cuh"
#include "experts.cuh"

namespace te {

const expert_kernels *experts_32(int type) { return kernels_of<expert_of, expert_kernels>(formats_32(), type); }

} // namespace te
