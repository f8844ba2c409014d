// prefill.cuh - operations of many tokens: what a te_cuda keeps for them, and what their files share.
#ifndef TE_CUDA_PREFILL_CUH
#define TE_CUDA_PREFILL_CUH

#include "launch.h"

struct te_cuda_blas; // blas.cu: cuBLASLt, opened

struct te_cuda_prefill {
    te_cuda_blas *blas; // NULL: our own products
    char by[48];
    // Loads: their stream, and for each slot when its matrices are there and when they are not needed any more.
    cudaStream_t load;
    cudaEvent_t fork, ready[TE_CUDA_SLOTS], free[TE_CUDA_SLOTS];
    unsigned long long recording; // the recording that the bits below belong to; 0: none
    int forked, loaded, freed;    // bits of slots
    cudaEvent_t passed[2];        // load_mark's
    int marked;                   // bits of these
    int at_once[9]; // clusters of so many blocks, one to a multiprocessor, that run at once; [0]: whether asked
};

namespace te {

// Asks again and again until the stream (or event, if not NULL) has passed; TIMEOUT after `seconds`. device.cu
te_status wait_for(te_cuda *d, cudaStream_t stream, cudaEvent_t event, double seconds);

// The state above, made when it is first asked for.
te_status prefill_state(te_cuda *d, te_cuda_prefill **out);
void prefill_close(te_cuda *d);

te_status set_blas(te_cuda *d, const char *path);
const char *gemm_by(te_cuda *d);
size_t gemm_scratch(te_cuda *d, const te_mat *w, int32_t n_tok, size_t *least);
te_status halve(te_cuda *d, const te_cuda_halve *op);
te_status scores(te_cuda *d, const te_cuda_scores *op);
te_status gemm(te_cuda *d, const te_cuda_gemm *op);
te_status act(te_cuda *d, const te_cuda_act *op);
size_t prompt_attention_floats(te_cuda *d, const te_attention_args *op);
te_status prompt_attention(te_cuda *d, const te_attention_args *op);
bool prompt_attention_halves(te_cuda *d, const te_attention_args *op); // whether it can write its result in F16, too
te_status load(te_cuda *d, int32_t slot, const te_cuda_pack *op);
te_status load_ready(te_cuda *d, int32_t slot);
te_status load_free(te_cuda *d, int32_t slot);
te_status load_after(te_cuda *d);
// Rows on their way by few blocks, or by a copy where both sides are alike (needs_kernel: false).
te_status put_rows(te_cuda *there, const te_cuda_pack *op, int most_blocks);
bool needs_kernel(const te_cuda_pack *op);
cudaError_t load_rows_kernels(); // the driver has their code from here on
cudaError_t load_pack_kernel();  // elem.cu
te_status load_mark(te_cuda *d, int32_t place);
te_status load_passed(te_cuda *d, int32_t place, double seconds);

// One product of F16 matrices, as kernels and cuBLASLt take it: y[t][r] = f(*scale * sum over k + bias[r]) + add[t][r],
// the sum of x[t][k] * w[r][k], or transposed of x[t][k] * w[k][r].
struct half_product {
    const uint16_t *x, *w;
    size_t ldx, ldw; // in values; rows of w are zero from the last value to the next multiple of 8
    int n_tok, n_out, k;
    bool transposed;
    const float *scale, *bias, *add;
    bool relu;
    size_t ld_add, ldy;
    float *y;
};
te_status multiply(te_cuda *d, const half_product *p); // gemm_mma.cu

te_cuda_half half_form(te_cuda *d, int32_t type, int32_t n_tok, int32_t cols);
te_status multiply_wide(te_cuda *d, const te_cuda_gemm *op); // wide.cu: gemm, of input with tiles
// wide_groups.cu: the tiles of other products with such matrices, whose input is in matrices, or 0; and those products.
int group_tiles_for(const te_cuda *d, int32_t type, int32_t n_tok);
te_status multiply_groups(te_cuda *d, const te_cuda_gemm *op);
te_status check_act(te_cuda *d, const te_cuda_gemm *op); // an activation of these products
// wide_ring.cu: the same of products with F16.
int ring_tiles_for(const te_cuda *d, int32_t type, int32_t n_tok);
te_status multiply_ring(te_cuda *d, const te_cuda_gemm *op);
// wide_most.cu: the same of more tokens than wide_ring.cu and wide_neurons.cu take, and whether a product is one of these.
int most_tiles_for(const te_cuda *d, int32_t type, int32_t n_tok);
bool is_most(const te_cuda_gemm *op);
te_status multiply_most(te_cuda *d, const te_cuda_gemm *op);
// wide_neurons.cu: transposed ones with other formats, whose input is as for F16.
te_status multiply_neurons(te_cuda *d, const te_cuda_gemm *op);

// Rows r0 to r0 + n - 1 of a matrix as F16, rows of `ld` values; gemm_weights.cu.
te_status to_half(te_cuda *d, const te_mat *m, int r0, int n, void *to, int ld);

} // namespace te
#endif
