// launch.h - inside of a te_cuda, and what its files share on the host's side.
#ifndef TE_CUDA_LAUNCH_H
#define TE_CUDA_LAUNCH_H

#include <cuda_runtime.h>

#include "../core/te_types.h"
#include "te_cuda.h"

struct te_cuda_block; // device.cu: one allocation

struct te_cuda {
    te_cuda_info info;
    cudaStream_t stream;
    cudaEvent_t mark[8];
    int marked; // bits of the slots in use
    size_t smem_block, smem_sm;
    bool overlap, capturing;
    cudaStream_t capture; // the stream that is being captured: operations go there
    te_status failed;     // of the first operation that failed while capturing
    char sentence[256];
    te_cuda_block *blocks;
    uint64_t owned_bytes;
    struct te_cuda_prefill *prefill; // prefill.cuh; NULL until it is needed
    struct te_cuda_fetches *fetches; // fetch.cu; the same
};

#define TE_CUDA_TRY(expr)                                                                                              \
    do {                                                                                                               \
        const te_status te_try_ = (expr);                                                                              \
        if (te_try_ != TE_OK) return te_try_;                                                                          \
    } while (0)

namespace te {

// What a call of CUDA said, as a status; `call` names it in the sentence.
te_status cuda_status(cudaError_t e, const char *call);
// Refuses an operation: the status is kept for capture_end, too.
te_status refuse(te_cuda *d, te_status s);

// cluster: blocks of a cluster, which divide the grid; 1 below compute capability 9.0.
template <class... A>
te_status launch_clusters(te_cuda *d, const char *name, void (*kernel)(A...), dim3 grid, unsigned cluster, int threads,
                          size_t smem, A... args) {
    if (smem > 32 * 1024) { // with what kernels declare themselves it may be over the limit for all devices
        const cudaError_t e =
            cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
        if (e != cudaSuccess) return refuse(d, cuda_status(e, name));
    }
    cudaLaunchAttribute attributes[2];
    unsigned n = 0;
    if (d->overlap) {
        attributes[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[n++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[n].id = cudaLaunchAttributeClusterDimension;
        attributes[n++].val.clusterDim = {cluster, 1, 1};
    }
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = dim3((unsigned)threads);
    c.dynamicSmemBytes = smem;
    c.stream = d->capturing ? d->capture : d->stream;
    c.attrs = attributes;
    c.numAttrs = n;
    void *pointers[] = {(void *)&args...};
    const cudaError_t e = cudaLaunchKernelExC(&c, (const void *)kernel, pointers);
    return e == cudaSuccess ? TE_OK : refuse(d, cuda_status(e, name));
}

template <class... A>
te_status launch(te_cuda *d, const char *name, void (*kernel)(A...), dim3 grid, int threads, size_t smem, A... args) {
    return launch_clusters(d, name, kernel, grid, 1, threads, smem, args...);
}

inline int divide_up(int64_t a, int64_t b) { return (int)((a + b - 1) / b); }
inline bool aligned(const void *p, size_t n) { return (uintptr_t)p % n == 0; }

// A device matrix that kernels may read: type, alignment, stride.
te_status check_matrix(te_cuda *d, const char *op, const te_mat *m);
// A matrix in host memory: as on a device, or, of formats that are otherwise there, as in the file. ffn.cu
te_status check_file(te_cuda *d, const char *op, const te_mat *m);

// pinned.cu: host memory for all devices, with flags of cudaHostRegister; each pin has its unpin.
cudaError_t pin(const void *p, size_t n_bytes, unsigned flags);
cudaError_t unpin(const void *p);

// The operations, one file each.
te_status pack(te_cuda *d, const te_cuda_pack *op);
size_t prepared_bytes(int32_t type, int32_t cols);
te_status prepare(te_cuda *d, const te_cuda_prepare *op);
// What was prepared, if matrices of this type take it.
const void *prepared_for(const te_prepared *p, int32_t type);
te_status linear(te_cuda *d, const te_linear_args *op);
te_status hidden(te_cuda *d, const te_cuda_hidden *op);
int32_t parts(te_cuda *d, const te_mat *down, int32_t n_rows);
te_status down(te_cuda *d, const te_cuda_down *op);
te_status route(te_cuda *d, const te_route_args *op);
int32_t expert_parts(te_cuda *d, const te_experts_args *op);
te_status experts(te_cuda *d, const te_experts_args *op);
size_t prompt_experts_words(const te_experts_args *op);
te_status prompt_experts(te_cuda *d, const te_cuda_prompt_experts *op);
te_status merge(te_cuda *d, const te_merge_args *op);
int32_t mark_parts(te_cuda *d);
te_status marks(te_cuda *d, const te_marks_args *op);
te_status post_scores(te_cuda *d, const te_marks_args *op); // of marks, those by fc2
int32_t ffn_parts(te_cuda *d, const te_ffn_args *op);
te_status ffn(te_cuda *d, const te_ffn_args *op);
size_t attention_floats(te_cuda *d, const te_attention_args *op);
size_t attention_counters(te_cuda *d, const te_attention_args *op);
int32_t attention_halves(te_cuda *d, const te_attention_args *op);
int32_t attends_beside(const te_linear_args *op);
te_status attention(te_cuda *d, const te_attention_args *op);
size_t latent_floats(te_cuda *d, const te_latent_args *op); // latent.cu
te_status latent(te_cuda *d, const te_latent_args *op);
te_status recurrent(te_cuda *d, const te_recurrent_args *op); // recurrent.cu
te_status gate(te_cuda *d, const te_gate_args *op);
te_status cut(te_cuda *d, const te_cut_args *op); // cut.cu
te_status fetch_open(te_cuda *d);
te_status fetch(te_cuda *d, const te_cuda_pack *op, void *room, size_t n_room);
te_status fetched(te_cuda *d, uint32_t *n);
void fetch_close(te_cuda *d);
te_status embed(te_cuda *d, const te_cuda_embed *op);
te_status add(te_cuda *d, const float *x, float *y, int64_t n);
te_status argmax(te_cuda *d, const float *x, size_t ldx, int32_t n, int32_t n_tok, int32_t *best);
int32_t has_type(int32_t type);
size_t stride(int32_t type, int32_t cols);

} // namespace te
#endif
