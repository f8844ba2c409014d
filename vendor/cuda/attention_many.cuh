// attention_many.cuh - which attention is that of many tokens, each of a sequence of its own (attention_many.cu).
#ifndef TE_CUDA_ATTENTION_MANY_CUH
#define TE_CUDA_ATTENTION_MANY_CUH

#include "te_cuda.h"

namespace te {

// Whether there are kernels for heads of so many values of F16.
inline bool has_short_rows(const te_attention_args *op) {
    return op->type_k == TE_F16 && op->type_v == TE_F16 && (op->n_embd_head == 64 || op->n_embd_head == 128);
}
// Whether that can be; it is where the result is wanted in F16, too.
bool may_be_of_many(const te_cuda *d, const te_attention_args *op);
inline bool is_of_many(const te_cuda *d, const te_attention_args *op) { return op->half && may_be_of_many(d, op); }
te_status attention_of_many(te_cuda *d, const te_attention_args *op);

} // namespace te
#endif
