// experts_file.cu - the experts of rows in host memory, of the formats that lie otherwise on a device.
#include "experts.cuh"
#include "formats.cuh"

namespace te {

const expert_kernels *experts_file(int type) {
    return kernels_of<expert_in_file, expert_kernels>(formats_file(), type);
}

} // namespace te
