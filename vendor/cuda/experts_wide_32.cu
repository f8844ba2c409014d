// experts_wide_32.cu - experts of 9 to 64 tokens, of the formats of 32 weights to a block.
#include "experts_wide.cuh"
#include "formats.cuh"

namespace te {

const expert_wide_kernels *experts_wide_32(int type) {
    return kernels_of<expert_wide_of, expert_wide_kernels>(formats_32(), type);
}

} // namespace te
