// experts_float.cu - experts of floats.
#include "formats.cuh"
#include "experts.cuh"

namespace te {

const expert_kernels *experts_float(int type) { return kernels_of<expert_of, expert_kernels>(formats_float(), type); }

} // namespace te
