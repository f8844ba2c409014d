// ffn_k23.cu - the feed-forward of Q2_K and Q3_K.
#include "formats.cuh"
#include "one_ffn.cuh"

namespace te {

const ffn_kernels *ffn_k23(int type) { return kernels_of<single_ffn, ffn_kernels>(formats_k23(), type); }

} // namespace te
