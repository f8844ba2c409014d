// lean.h - products that lean.cu takes.
#ifndef TE_CUDA_LEAN_H
#define TE_CUDA_LEAN_H

#include "rows_input.cuh"

namespace te {

// Launches what linear or hidden ask for, as run of rows.cu, and says how that went; false if others must.
bool run_lean(te_cuda *d, const char *name, int type, int rows_per, rows_args *a, te_status *to);

} // namespace te
#endif
