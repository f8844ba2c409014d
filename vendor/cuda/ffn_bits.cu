// ffn_bits.cu - the feed-forward of Q4_1, Q5_0 and Q5_1.
#include "formats.cuh"
#include "one_ffn.cuh"

namespace te {

const ffn_kernels *ffn_bits(int type) { return kernels_of<single_ffn, ffn_kernels>(formats_bits(), type); }

} // namespace te
