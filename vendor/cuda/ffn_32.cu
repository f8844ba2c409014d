// ffn_32.cu - the feed-forward of the formats of 32 weights to a block.
#include "formats.cuh"
#include "one_ffn.cuh"

namespace te {

const ffn_kernels *ffn_32(int type) { return kernels_of<one_ffn, ffn_kernels>(formats_32(), type); }

} // namespace te
