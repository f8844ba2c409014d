// rows_k.cu - the row kernels of the formats of 256 weights to a block.
#include "formats.cuh"
#include "one.cuh"

namespace te {

const rows_kernels *rows_k(int type) { return kernels_of<one_rows, rows_kernels>(formats_k(), type); }

} // namespace te
