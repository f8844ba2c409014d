// wide_groups_k.cu - products of 17 to 64 tokens on Hopper, of Q4_K and Q6_K.
#include "formats.cuh"
#include "wide_groups.cuh"

namespace te {

const group_kernels *groups_k(int type) {
    return kernels_of<group_of, group_kernels>(formats<codec_q4_k, codec_q6_k>(), type);
}

} // namespace te
