// ffn_float.cu - the feed-forward of the formats of floats.
#include "formats.cuh"
#include "one_ffn.cuh"

namespace te {

const ffn_kernels *ffn_float(int type) { return kernels_of<one_ffn, ffn_kernels>(formats_float(), type); }

} // namespace te
