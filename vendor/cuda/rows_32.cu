// rows_32.cu - the row kernels of the formats of 32 weights to a block.
#include "formats.cuh"
#include "one.cuh"

namespace te {

const rows_kernels *rows_32(int type) { return kernels_of<one_rows, rows_kernels>(formats_32(), type); }

} // namespace te
