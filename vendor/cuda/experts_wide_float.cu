// experts_wide_float.cu - experts of 9 to 64 tokens, of F32, F16 and BF16.
#include "experts_wide.cuh"
#include "formats.cuh"

namespace te {

const expert_wide_kernels *experts_wide_float(int type) {
    return kernels_of<expert_wide_of, expert_wide_kernels>(formats_float(), type);
}

} // namespace te
