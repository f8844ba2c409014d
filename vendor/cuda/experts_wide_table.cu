// experts_wide_table.cu - experts of 9 to 64 tokens, of the formats whose halves name numbers.
#include "experts_wide.cuh"
#include "formats.cuh"

namespace te {

const expert_wide_kernels *experts_wide_table(int type) {
    return kernels_of<expert_wide_of, expert_wide_kernels>(formats_table(), type);
}

} // namespace te
