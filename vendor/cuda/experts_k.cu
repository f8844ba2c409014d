// experts_k.cu - experts of the formats of 256 weights to a block.
#include "formats.cuh"
#include "experts.cuh"

namespace te {

const expert_kernels *experts_k(int type) { return kernels_of<expert_of, expert_kernels>(formats_k(), type); }

} // namespace te
