// experts_wide_k.cu - experts of 9 to 64 tokens, of Q4_K, Q5_K and Q6_K.
#include "experts_wide.cuh"
#include "formats.cuh"

namespace te {

const expert_wide_kernels *experts_wide_k(int type) {
    return kernels_of<expert_wide_of, expert_wide_kernels>(formats_k(), type);
}

} // namespace te
