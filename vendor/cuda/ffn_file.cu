// ffn_file.cu - the feed-forward of rows in host memory, of the formats that lie otherwise on a device.
#include "ffn.cuh"
#include "formats.cuh"

namespace te {

const ffn_kernels *ffn_file(int type) { return kernels_of<any_ffn, ffn_kernels>(formats_file(), type); }

} // namespace te
