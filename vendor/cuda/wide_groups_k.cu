// wide_groups_k.cu - products of 9 to 128 tokens on Hopper, of Q4_K, Q5_K and Q6_K.
#include "formats.cuh"
#include "wide_groups.cuh"

namespace te {

const group_kernels *groups_k(int type) { return kernels_of<group_of, group_kernels>(formats_k(), type); }

} // namespace te
