// wide_many_float.cu - products of 129 to 192 tokens on Hopper, of F16.
#include "formats.cuh"
#include "wide_many.cuh"

namespace te {

const many_kernels *many_float(int type) { return kernels_of<many_of, many_kernels>(formats<codec_f16>(), type); }

} // namespace te
