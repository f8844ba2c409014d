// experts_wide_bits.cu - experts of 9 to 64 tokens, of Q4_1, Q5_0 and Q5_1.
#include "experts_wide.cuh"
#include "formats.cuh"

namespace te {

const expert_wide_kernels *experts_wide_bits(int type) {
    return kernels_of<expert_wide_of, expert_wide_kernels>(formats_bits(), type);
}

} // namespace te
