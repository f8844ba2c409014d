// cut.cu - te_cut_args: gates that are cut by what all of their token's are.
#include "activation.cuh"
#include "launch.h"
#include "tools.cuh"

namespace te {
namespace {

constexpr int THREADS = 1024;

__device__ float block_sum(float v, float *part) {
    __syncthreads(); // who reads the parts before has done so
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < THREADS / 32; i++) sum += part[i];
    return sum;
}

// A block takes a token.
__global__ void __launch_bounds__(THREADS) cut_kernel(const __grid_constant__ te_cut_args a) {
    __shared__ float part[THREADS / 32];
    dep_go();
    dep_wait();
    float *g = a.gate + a.ld * (size_t)blockIdx.x;
    const float *up = a.up + a.ld * (size_t)blockIdx.x;
    float sum = 0, squares = 0;
#pragma unroll 4
    for (int j = threadIdx.x; j < a.n; j += THREADS) sum += __ldcg(g + j);
    const float mean = block_sum(sum, part) / (float)a.n;
#pragma unroll 4
    for (int j = threadIdx.x; j < a.n; j += THREADS) {
        const float v = __ldcg(g + j) - mean;
        squares = fmaf(v, v, squares);
    }
    const float least = fmaf(sqrtf(block_sum(squares, part) / (float)a.n), a.cut, mean);
    uint32_t fired = 0;
#pragma unroll 4
    for (int j = threadIdx.x; j < a.n; j += THREADS) {
        const float v = __ldcg(g + j),
                    h = v > least ? activate((te_activation)a.act, a.threshold, v - least) * __ldcg(up + j) : 0;
        g[j] = h;
        fired += h != 0;
        if (a.fired && h != 0) atomicAdd(a.fired + j, 1);
    }
    if (!a.counts) return;
    for (int o = 16; o; o /= 2) fired += __shfl_xor_sync(~0u, fired, o);
    if (threadIdx.x % 32 == 0 && fired) atomicAdd(a.counts + 2, fired);
    if (threadIdx.x < 2) atomicAdd(a.counts + threadIdx.x, (uint32_t)a.n);
}

} // namespace

te_status cut(te_cuda *d, const te_cut_args *op) {
    if (op->n_tok < 1 || op->n < 1 || op->ld < (size_t)op->n || !op->gate || !op->up)
        return refuse(d, te_fail(TE_ARGUMENT, "cut: %d tokens of %d gates", (int)op->n_tok, (int)op->n));
    return launch(d, "cut", cut_kernel, dim3((unsigned)op->n_tok), THREADS, 0, *op);
}

} // namespace te
