// wide_table.cu - products of 9 to 64 tokens, of the formats whose halves name numbers.
#include "formats.cuh"
#include "wide.cuh"

namespace te {

const wide_kernels *wide_table(int type) { return kernels_of<wide_of, wide_kernels>(formats_table(), type); }

} // namespace te
