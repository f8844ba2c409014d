// rows_bits.cu - the row kernels of Q4_1, Q5_0 and Q5_1.
#include "formats.cuh"
#include "one.cuh"

namespace te {

const rows_kernels *rows_bits(int type) { return kernels_of<one_rows, rows_kernels>(formats_bits(), type); }

} // namespace te
