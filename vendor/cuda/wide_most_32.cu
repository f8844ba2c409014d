// wide_most_32.cu - products of most tokens by neuron on Hopper, of Q8_0 and Q4_0.
#include "formats.cuh"
#include "wide_most.cuh"

namespace te {

const most_kernels *most_32(int type) { return kernels_of<most_of, most_kernels>(formats_32(), type); }

} // namespace te
