// wide_most_k.cu - products of most tokens by neuron on Hopper, of Q4_K, Q5_K and Q6_K.
#include "formats.cuh"
#include "wide_most.cuh"

namespace te {

const most_kernels *most_k(int type) { return kernels_of<most_of, most_kernels>(formats_k(), type); }

} // namespace te
