// rows_float.cu - the row kernels of the formats of floats.
#include "formats.cuh"
#include "one.cuh"

namespace te {

const rows_kernels *rows_float(int type) { return kernels_of<one_rows, rows_kernels>(formats_float(), type); }

} // namespace te
