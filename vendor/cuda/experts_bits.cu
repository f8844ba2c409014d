// experts_bits.cu - experts of Q4_1, Q5_0 and Q5_1.
#include "formats.cuh"
#include "experts.cuh"

namespace te {

const expert_kernels *experts_bits(int type) { return kernels_of<expert_of, expert_kernels>(formats_bits(), type); }

} // namespace te
