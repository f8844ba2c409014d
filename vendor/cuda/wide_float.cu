// wide_float.cu - products of 9 to 64 tokens, of F32, F16 and BF16.
#include "formats.cuh"
#include "wide.cuh"

namespace te {

const wide_kernels *wide_float(int type) { return kernels_of<wide_of, wide_kernels>(formats_float(), type); }

} // namespace te
