// wide_neurons_32.cu - products of 9 to 128 tokens with rows by neuron on Hopper, of Q8_0 and Q4_0.
#include "formats.cuh"
#include "wide_neurons.cuh"

namespace te {

const neuron_kernels *neurons_32(int type) { return kernels_of<neurons_of, neuron_kernels>(formats_32(), type); }

} // namespace te
