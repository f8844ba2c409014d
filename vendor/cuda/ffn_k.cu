// ffn_k.cu - the feed-forward of the formats of 256 weights to a block.
#include "formats.cuh"
#include "one_ffn.cuh"

namespace te {

const ffn_kernels *ffn_k(int type) { return kernels_of<one_ffn, ffn_kernels>(formats_k(), type); }

} // namespace te
