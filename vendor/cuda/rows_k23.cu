// rows_k23.cu - the row kernels of Q2_K and Q3_K.
#include "formats.cuh"
#include "one.cuh"

namespace te {

const rows_kernels *rows_k23(int type) { return kernels_of<one_rows, rows_kernels>(formats_k23(), type); }

} // namespace te
