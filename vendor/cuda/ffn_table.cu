// ffn_table.cu - the feed-forward of IQ4_NL, IQ4_XS and MXFP4.
#include "formats.cuh"
#include "one_ffn.cuh"

namespace te {

const ffn_kernels *ffn_table(int type) { return kernels_of<single_ffn, ffn_kernels>(formats_table(), type); }

} // namespace te
