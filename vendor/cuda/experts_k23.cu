// experts_k23.cu - experts of Q2_K and Q3_K.
#include "formats.cuh"
#include "experts.cuh"

namespace te {

const expert_kernels *experts_k23(int type) { return kernels_of<expert_of, expert_kernels>(formats_k23(), type); }

} // namespace te
