/* kernels.cuh - kernels that only programs of a pi_device need: a step's inputs, and what decides in prompts.
 * Shared memory is pinned host memory at the same address on both sides. All follow vendor/cuda's rule for programmatic dependent launch. */
#ifndef PI_CUDA_KERNELS_CUH
#define PI_CUDA_KERNELS_CUH

#include "../../../vendor/cuda/launch.h"
#include "../device.h"

namespace pi {

/* A step's inputs to the device, and the ticket of its first exchange. */
te_status begin(te_cuda *d, void *to, const void *from, size_t n_bytes, uint32_t *ticket, uint32_t tickets);
/* Rows of logits, or the largest of each. */
te_status logits(te_cuda *d, const pi_device_logits *a);
/* The device's clock. */
te_status stamp(te_cuda *d, uint64_t *at);
/* norm(x) of each row, kept, published, or both. */
te_status norm_rows(te_cuda *d, const float *x, size_t ldx, int32_t n_tok, int32_t cols, const te_side &side);
/* The second half of a merge with a norm: y = add + norm(normed). */
te_status add_norm(te_cuda *d, const te_merge_args *a);
/* Bits of the rows whose signs agree with those of h, as te's marks. */
te_status sign_marks(te_cuda *d, const te_scores &a, int32_t n_rows, int32_t n_tok, uint8_t *bits, size_t ld_bits);

} // namespace pi
#endif
