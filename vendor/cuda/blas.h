// blas.h - matrix products by cuBLASLt, a library that is opened at run time if it is there.
#ifndef TE_CUDA_BLAS_H
#define TE_CUDA_BLAS_H

#include "prefill.cuh"

namespace te {

constexpr size_t BLAS_WORKSPACE = (size_t)32 << 20; // what the library's own guide advises for this generation

// Errors: UNSUPPORTED if it cannot be opened, or is not of a version whose interface is known.
te_status blas_open(const char *path, te_cuda_blas **out);
void blas_close(te_cuda_blas *b);
int32_t blas_version(const te_cuda_blas *b); // 10000 * major + 100 * minor + patch

// UNSUPPORTED if it has no algorithm for the shape.
te_status blas_multiply(te_cuda *d, te_cuda_blas *b, const half_product *p, void *workspace);

} // namespace te
#endif
