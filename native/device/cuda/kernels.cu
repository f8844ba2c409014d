/* kernels.cu - see kernels.cuh. */
#include "kernels.cuh"

#include <cfloat>
#include <cmath>

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
__device__ __forceinline__ void store_word(uint64_t *p, uint32_t value, uint32_t ticket) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(pi_word(value, ticket)) : "memory");
}
/* Copies words between the device and host memory: four at a time, since only so many requests are on their way. */
__global__ void begin_kernel(uint32_t *to, const uint32_t *from, size_t n, uint32_t *ticket, uint32_t step) {
    dep_go();
    dep_wait();
    const size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x, all = (size_t)gridDim.x * blockDim.x;
    const size_t fours = ((uintptr_t)to | (uintptr_t)from) % 16 ? 0 : n / 4;
    for (size_t i = at; i < fours; i += all) {
        uint4 v;
        asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(from + 4 * i)
                     : "memory");
        *(uint4 *)(to + 4 * i) = v;
    }
    for (size_t i = 4 * fours + at; i < n; i += all) to[i] = *(volatile const uint32_t *)(from + i);
    if (at == 0 && ticket) *ticket += step;
}

/* Larger floats have larger keys, -0 and +0 the same one. */
__device__ __forceinline__ uint32_t key_of(float v) {
    const uint32_t bits = __float_as_uint(v + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
constexpr uint32_t key_of_none = 0x007fffffu; /* of -inf */

/* The first block of each row finds its n largest; or all of a row's blocks copy it; or both. Each thread's own largest: the n-th
 * largest of these bounds the n-th largest of all from below, so that few more than n reach it. These are put in order by
 * counting, for each, how many stand before it. */
constexpr int LOGITS_THREADS = 1024, LOGITS_KEPT = 1024;
__global__ void __launch_bounds__(LOGITS_THREADS) logits_kernel(const pi_device_logits a) {
    __shared__ uint64_t kept[LOGITS_KEPT], sorted[PI_LARGEST];
    __shared__ int n_kept;
    dep_go();
    dep_wait();
    const int asked = *(volatile const int32_t *)a.n_largest, n = abs(asked), t = threadIdx.x, cols = a.cols;
    const float *x = a.x + (size_t)blockIdx.y * cols;
    if (asked <= 0) {
        float *to = a.rows + (size_t)blockIdx.y * cols;
        const int at = blockIdx.x * blockDim.x + t, all = gridDim.x * blockDim.x;
        const int fours = ((uintptr_t)to | (uintptr_t)x) % 16 ? 0 : cols / 4;
        for (int i = at; i < fours; i += all) ((float4 *)to)[i] = __ldcg((const float4 *)x + i);
        for (int i = 4 * fours + at; i < cols; i += all) to[i] = __ldcg(x + i);
    }
    if (!n || blockIdx.x) return;
    /* Several values of a thread are on their way together. */
    auto each = [&](auto f) {
        constexpr int AT_ONCE = 8;
        for (int first = t; first < cols; first += AT_ONCE * LOGITS_THREADS) {
            float v[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const int i = first + k * LOGITS_THREADS;
                v[k] = i < cols ? __ldcg(x + i) : -INFINITY;
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) f(v[k], first + k * LOGITS_THREADS);
        }
    };
    uint32_t own = 0;
    bool bad = false;
    each([&](float v, int) {
        bad |= !(v <= FLT_MAX);
        own = max(own, key_of(v));
    });
    if (t == 0) n_kept = 0;
    bad = __syncthreads_or(bad);
    uint32_t bound = 0; /* the largest that n of them reach, found bit by bit */
    for (uint32_t bit = 0x80000000u; bit; bit /= 2)
        if (__syncthreads_count(own >= (bound | bit)) >= n) bound |= bit;
    bound = max(bound, key_of_none + 1);
    if (!bad)
        each([&](float v, int i) {
            const uint32_t key = key_of(v);
            if (key < bound) return;
            const int at = atomicAdd(&n_kept, 1);
            if (at < LOGITS_KEPT) kept[at] = (uint64_t)~key << 32 | (uint32_t)i; /* in their order */
        });
    __syncthreads();
    const int m = n_kept;
    if (bad || m > LOGITS_KEPT) {
        if (t == 0) a.n_found[blockIdx.y] = -1;
        return;
    }
    if (t < m) {
        int before = 0;
        for (int i = 0; i < m; i++) before += kept[i] < kept[t];
        if (before < n) {
            const uint32_t i = (uint32_t)kept[t];
            sorted[before] = (uint64_t)__float_as_uint(__ldcg(x + i)) << 32 | i;
        }
    }
    __syncthreads();
    const int n_found = min(m, n);
    if (t < n_found) a.largest[(size_t)blockIdx.y * PI_LARGEST + t] = sorted[t];
    if (t == 0) a.n_found[blockIdx.y] = n_found;
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

/* The mean and the factor of a row's norm. */
__device__ float2 norm_of(const float *x, int cols, const te_norm &norm, float *part) {
    if (norm.kind == TE_NO_NORM) return make_float2(0, 1);
    float mean = 0, sum = 0, squares = 0;
    if (norm.kind == TE_RMS_NORM && cols % 4 == 0 && (uintptr_t)x % 16 == 0) {
#pragma unroll 4
        for (int c = 4 * (int)threadIdx.x; c < cols; c += 4 * blockDim.x) {
            const float4 v = __ldcg((const float4 *)(x + c));
            squares += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
        }
        return make_float2(0, 1.0f / sqrtf(block_sum(squares, part) / (float)cols + norm.eps));
    }
    if (norm.kind == TE_LAYER_NORM) {
        for (int c = threadIdx.x; c < cols; c += blockDim.x) sum += x[c];
        mean = block_sum(sum, part) / (float)cols;
    }
    for (int c = threadIdx.x; c < cols; c += blockDim.x) squares += (x[c] - mean) * (x[c] - mean);
    return make_float2(mean, 1.0f / sqrtf(block_sum(squares, part) / (float)cols + norm.eps));
}
__device__ float normed(float v, const te_norm &norm, float2 of, int c) {
    return norm.kind == TE_NO_NORM ? v : (v - of.x) * of.y * norm.w[c] + (norm.b ? norm.b[c] : 0.0f);
}

/* Blocks of a row each norm the whole of it and write their share. */
__global__ void norm_kernel(const float *x, size_t ldx, int cols, te_side side) {
    __shared__ float part[32];
    dep_go();
    dep_wait();
    x += ldx * blockIdx.y;
    const float2 of = norm_of(x, cols, side.norm, part);
    const uint32_t want = side.publish ? number(side.ticket.base, side.ticket.add) : 0;
    const int lo = (int)((int64_t)cols * blockIdx.x / gridDim.x),
              hi = (int)((int64_t)cols * (blockIdx.x + 1) / gridDim.x);
    for (int c = lo + threadIdx.x; c < hi; c += blockDim.x) {
        const float v = normed(x[c], side.norm, of, c);
        if (side.keep) side.keep[(size_t)blockIdx.y * cols + c] = v;
        if (side.publish) store_word(side.publish + (size_t)blockIdx.y * cols + c, __float_as_uint(v), want);
    }
}

__global__ void add_norm_kernel(const te_merge_args a) {
    __shared__ float part[32];
    const size_t t = blockIdx.y;
    const float *x = a.normed + t * a.cols;
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    const bool inside = c < a.cols;
    if (inside) te::prefetch_l2(a.norm.w + c);
    dep_go();
    dep_wait();
    const float own = inside ? __ldcg(x + c) : 0, add = inside && a.add ? __ldcg(a.add + t * a.ld_add + c) : 0;
    const float2 of = norm_of(x, a.cols, a.norm, part);
    if (!inside) return;
    const float y = add + normed(own, a.norm, of, c);
    a.y[t * a.ldy + c] = a.scale != 0 ? y * a.scale : y;
}

/* A thread a row; 32 rows make a word. */
__global__ void sign_kernel(te_scores a, int n_rows, uint8_t *bits, size_t ld_bits) {
    extern __shared__ uint64_t signs[];
    dep_go();
    dep_wait();
    const int n_words = (a.cols + 63) / 64;
    const float *h = a.h + a.ldh * blockIdx.y;
    for (int w = threadIdx.x; w < n_words; w += blockDim.x) {
        uint64_t v = 0;
        for (int k = 0; k < 64 && w * 64 + k < a.cols; k++) v |= (uint64_t)(h[w * 64 + k] < 0.0f) << k;
        signs[w] = v;
    }
    __syncthreads();
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    bool on = false;
    if (j < n_rows) {
        int differ = 0;
        for (int w = 0; w < n_words; w++) differ += __popcll(signs[w] ^ a.sign[(size_t)j * n_words + w]);
        on = (float)(a.cols - 2 * differ) / (float)a.cols >= *a.threshold;
    }
    const uint32_t word = __ballot_sync(~0u, on);
    if (threadIdx.x % 32 == 0 && j < n_rows) ((uint32_t *)(bits + ld_bits * blockIdx.y))[j / 32] = word;
}

} // namespace

te_status begin(te_cuda *d, void *to, const void *from, size_t n_bytes, uint32_t *ticket, uint32_t tickets) {
    const size_t n = (n_bytes + 3) / 4;
    int blocks = te::divide_up((int64_t)n, 4 * 256);
    if (blocks > 64) blocks = 64;
    return te::launch(d, "begin", begin_kernel, dim3((unsigned)(blocks ? blocks : 1)), 256, 0, (uint32_t *)to,
                      (const uint32_t *)from, n, ticket, tickets);
}

te_status logits(te_cuda *d, const pi_device_logits *a) {
    int blocks = te::divide_up(a->cols, 4 * LOGITS_THREADS); /* of a row; 128 in all keep the bus busy */
    if (blocks > te::divide_up(128, a->n_rows)) blocks = te::divide_up(128, a->n_rows);
    return te::launch(d, "logits", logits_kernel, dim3((unsigned)blocks, (unsigned)a->n_rows), LOGITS_THREADS, 0, *a);
}

te_status stamp(te_cuda *d, uint64_t *at) { return te::launch(d, "stamp", stamp_kernel, dim3(1), 1, 0, at); }

te_status norm_rows(te_cuda *d, const float *x, size_t ldx, int32_t n_tok, int32_t cols, const te_side &side) {
    return te::launch(d, "norm_rows", norm_kernel, dim3((unsigned)te::divide_up(cols, 512), (unsigned)n_tok), 256, 0, x,
                      ldx, (int)cols, side);
}

te_status add_norm(te_cuda *d, const te_merge_args *a) {
    return te::launch(d, "add_norm", add_norm_kernel, dim3((unsigned)te::divide_up(a->cols, 256), (unsigned)a->n_tok),
                      256, 0, *a);
}

te_status sign_marks(te_cuda *d, const te_scores &a, int32_t n_rows, int32_t n_tok, uint8_t *bits, size_t ld_bits) {
    return te::launch(d, "sign_marks", sign_kernel, dim3((unsigned)te::divide_up(n_rows, 128), (unsigned)n_tok), 128,
                      sizeof(uint64_t) * (size_t)((a.cols + 63) / 64), a, (int)n_rows, bits, ld_bits);
}

} // namespace pi
