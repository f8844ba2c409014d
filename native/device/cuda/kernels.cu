/* kernels.cu - see kernels.cuh. */
#include "kernels.cuh"

#include "../../../vendor/cuda/tools.cuh"
#include "../../../vendor/cuda/words.cuh"
#include "../handover.h"

namespace pi {
namespace {

using te::dep_go;
using te::dep_wait;

__device__ __forceinline__ uint32_t number(const uint32_t *base, uint32_t add) {
    return *(volatile const uint32_t *)base + add;
}
__device__ __forceinline__ void store_word(uint64_t *p, uint32_t value, uint32_t seq) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(pi_word(value, seq)) : "memory");
}
__global__ void begin_kernel(uint32_t *to, const uint32_t *from, size_t n, uint32_t *seq, uint32_t step) {
    dep_go();
    dep_wait();
    const size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (size_t i = at; i < n; i += (size_t)gridDim.x * blockDim.x) to[i] = *(volatile const uint32_t *)(from + i);
    if (at == 0 && seq) *seq += step;
}

__global__ void stamp_kernel(uint64_t *at) {
    dep_go();
    dep_wait();
    const uint64_t now = te::now_ns();
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(now) : "memory");
}

__device__ float block_sum(float v, float *part) {
    v = te::warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    float s = 0;
    for (int i = 0; i < (int)blockDim.x / 32; i++) s += part[i];
    return s;
}

/* Blocks of a row each norm the whole of it and write their share. */
__global__ void norm_kernel(const float *x, size_t ldx, int cols, pi_dev_norm norm, float *keep, uint64_t *words,
                            pi_dev_seq seq) {
    __shared__ float part[32];
    dep_go();
    dep_wait();
    x += ldx * blockIdx.y;
    float mean = 0, r = 1;
    if (norm.w) {
        float sum = 0, squares = 0;
        if (norm.layer) {
            for (int c = threadIdx.x; c < cols; c += blockDim.x) sum += x[c];
            mean = block_sum(sum, part) / (float)cols;
        }
        for (int c = threadIdx.x; c < cols; c += blockDim.x) squares += (x[c] - mean) * (x[c] - mean);
        r = 1.0f / sqrtf(block_sum(squares, part) / (float)cols + norm.eps);
    }
    const uint32_t want = words ? number(seq.base, seq.add) : 0;
    const int lo = (int)((int64_t)cols * blockIdx.x / gridDim.x),
              hi = (int)((int64_t)cols * (blockIdx.x + 1) / gridDim.x);
    for (int c = lo + threadIdx.x; c < hi; c += blockDim.x) {
        float v = x[c];
        if (norm.w) v = (v - mean) * r * norm.w[c] + (norm.b ? norm.b[c] : 0.0f);
        if (keep) keep[(size_t)blockIdx.y * cols + c] = v;
        if (words) store_word(words + (size_t)blockIdx.y * cols + c, __float_as_uint(v), want);
    }
}

/* A thread a row; 32 rows make a word. */
__global__ void sign_kernel(pi_dev_scores a, uint8_t *bits, size_t ld_bits) {
    extern __shared__ uint64_t signs[];
    dep_go();
    dep_wait();
    const float *h = a.h + (size_t)a.cols * blockIdx.y;
    for (int w = threadIdx.x; w < a.n_words; w += blockDim.x) {
        uint64_t v = 0;
        for (int k = 0; k < 64 && w * 64 + k < a.cols; k++) v |= (uint64_t)(h[w * 64 + k] < 0.0f) << k;
        signs[w] = v;
    }
    __syncthreads();
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    bool on = false;
    if (j < a.n_rows) {
        int differ = 0;
        for (int w = 0; w < a.n_words; w++) differ += __popcll(signs[w] ^ a.sign[(size_t)j * a.n_words + w]);
        on = (float)(a.cols - 2 * differ) / (float)a.cols >= *a.threshold;
    }
    const uint32_t word = __ballot_sync(~0u, on);
    if (threadIdx.x % 32 == 0 && j < a.n_rows) ((uint32_t *)(bits + ld_bits * blockIdx.y))[j / 32] = word;
}

} // namespace

te_status begin(te_cuda *d, void *to, const void *from, size_t n_bytes, uint32_t *seq, uint32_t seq_step) {
    const size_t n = (n_bytes + 3) / 4;
    int blocks = te::divide_up((int64_t)n, 256);
    if (blocks > 64) blocks = 64;
    return te::launch(d, "begin", begin_kernel, dim3((unsigned)(blocks ? blocks : 1)), 256, 0, (uint32_t *)to,
                      (const uint32_t *)from, n, seq, seq_step);
}

te_status stamp(te_cuda *d, uint64_t *at) { return te::launch(d, "stamp", stamp_kernel, dim3(1), 1, 0, at); }

te_status norm_rows(te_cuda *d, const float *x, size_t ldx, int32_t n_tok, int32_t cols, const pi_dev_norm &norm,
                    float *keep, uint64_t *words, pi_dev_seq seq) {
    return te::launch(d, "norm_rows", norm_kernel, dim3((unsigned)te::divide_up(cols, 512), (unsigned)n_tok), 256, 0, x,
                      ldx, (int)cols, norm, keep, words, seq);
}

te_status sign_marks(te_cuda *d, const pi_dev_scores &a, int32_t n_tok, uint8_t *bits, size_t ld_bits) {
    return te::launch(d, "sign_marks", sign_kernel, dim3((unsigned)te::divide_up(a.n_rows, 128), (unsigned)n_tok), 128,
                      sizeof(uint64_t) * (size_t)a.n_words, a, bits, ld_bits);
}

} // namespace pi
