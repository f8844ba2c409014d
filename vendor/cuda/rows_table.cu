// rows_table.cu - the row kernels of IQ4_NL, IQ4_XS and MXFP4.
#include "formats.cuh"
#include "one.cuh"

namespace te {

const rows_kernels *rows_table(int type) { return kernels_of<one_rows, rows_kernels>(formats_table(), type); }

} // namespace te
