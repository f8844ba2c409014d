// experts_wide_k23.cu - experts of 9 to 64 tokens, of Q2_K and Q3_K.
#include "experts_wide.cuh"
#include "formats.cuh"

namespace te {

const expert_wide_kernels *experts_wide_k23(int type) {
    return kernels_of<expert_wide_of, expert_wide_kernels>(formats_k23(), type);
}

} // namespace te
