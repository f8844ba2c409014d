// wide_neurons_k.cu - products of 9 to 128 tokens with rows by neuron on Hopper, of Q4_K, Q5_K and Q6_K.
#include "formats.cuh"
#include "wide_neurons.cuh"

namespace te {

const neuron_kernels *neurons_k(int type) { return kernels_of<neurons_of, neuron_kernels>(formats_k(), type); }

} // namespace te
