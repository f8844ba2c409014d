// gemm_weights.cu - weights of every format (device layout, te_cuda.h) as F16, for products of many tokens.
//
// A thread makes eight neighbouring weights at a time, so that neighbouring threads write neighbouring 16-byte words.
#include "formats.cuh"
#include "prefill.cuh"

namespace te {

constexpr int WEIGHT_THREADS = 256;

template <class C>
__global__ void __launch_bounds__(WEIGHT_THREADS)
    half_kernel(const uint8_t *w, size_t stride, int rows, int cols, uint16_t *to, int ld) {
    dep_go();
    dep_wait();
    const int i = blockIdx.x * WEIGHT_THREADS + threadIdx.x;
    if (8 * i >= ld) return;
#pragma unroll 4
    for (int r = blockIdx.y; r < rows; r += gridDim.y)
        *(uint4 *)(to + (size_t)r * (size_t)ld + 8 * i) = C::halves(w + (size_t)r * stride, i, cols);
}

template <class C> struct half_of {
    static constexpr void (*kernels)(const uint8_t *, size_t, int, int, uint16_t *, int) = half_kernel<C>;
};
typedef decltype(half_of<codec_f32>::kernels) half_function;

te_status to_half(te_cuda *d, const te_mat *m, int r0, int n, void *to, int ld) {
    half_function *const kernel = kernels_of<half_of, half_function>(formats_all(), m->type);
    if (!kernel) return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: no kernel for weights of type %d", (int)m->type));
    const int across = divide_up(ld / 8, WEIGHT_THREADS), most = divide_up(16 * d->info.n_sm, across);
    return launch(d, "to_half", *kernel, dim3((unsigned)across, (unsigned)(n < most ? n : most)), WEIGHT_THREADS, 0,
                  (const uint8_t *)m->w + (size_t)r0 * m->stride, m->stride, n, (int)m->cols, (uint16_t *)to, ld);
}

} // namespace te
