// wide_groups_32.cu - products of 9 to 128 tokens on Hopper, of Q8_0 and Q4_0.
#include "formats.cuh"
#include "wide_groups.cuh"

namespace te {

const group_kernels *groups_32(int type) { return kernels_of<group_of, group_kernels>(formats_32(), type); }

} // namespace te
