// gemm_weights.cu - weights of every format (device layout, te_cuda.h) as F16, for products of many tokens.
//
// A thread makes eight neighbouring weights at a time, so that neighbouring threads write neighbouring 16-byte words.
#include "gemm_mma.cuh"
#include "prefill.cuh"

namespace te {

// Eight weights d * (q + shift) - low, of bytes q.
__device__ __forceinline__ uint4 eight(uint2 q, float d, float shift, float low) {
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = fmaf(d, (float)((k < 4 ? q.x : q.y) >> 8 * (k % 4) & 0xff) + shift, -low);
    return make_uint4(half2_of(v[0], v[1]), half2_of(v[2], v[3]), half2_of(v[4], v[5]), half2_of(v[6], v[7]));
}
__device__ __forceinline__ uint2 bits_at(const void *p, int shift, uint32_t mask) {
    const uint2 v = __ldg((const uint2 *)p); // other threads want other bits of them: they stay in L1
    return make_uint2(v.x >> shift & mask, v.y >> shift & mask);
}
__device__ __forceinline__ uint2 joined(uint2 a, uint2 b, int left) {
    return make_uint2(a.x | b.x << left, a.y | b.y << left);
}
constexpr uint32_t LOW_HALVES = 0x0f0f0f0f;

// Each format: weights 8i to 8i + 7 of a row of so many columns.
struct half_f32 {
    static __device__ uint4 at(const uint8_t *row, int i, int cols) {
        const float *x = (const float *)row;
        auto pair = [&](int c) { return half2_of(c < cols ? x[c] : 0, c + 1 < cols ? x[c + 1] : 0); };
        return make_uint4(pair(8 * i), pair(8 * i + 2), pair(8 * i + 4), pair(8 * i + 6));
    }
};
struct half_bf16 {
    static __device__ uint4 at(const uint8_t *row, int i, int) {
        const uint4 v = load16(row + 16 * (size_t)i); // zeros behind the last weight
        auto pair = [](uint32_t w) {
            const float2 f = bf162_bits(w);
            return half2_of(f.x, f.y);
        };
        return make_uint4(pair(v.x), pair(v.y), pair(v.z), pair(v.w));
    }
};
struct half_q8_0 {
    static __device__ uint4 at(const uint8_t *row, int i, int cols) {
        const uint2 q = load8(row + 8 * (size_t)i);
        const float d = half_bits(load2(row + (size_t)cols + 2 * (i / 4)));
        return eight(make_uint2(q.x ^ 0x80808080, q.y ^ 0x80808080), d, -128, 0); // + 128: no signs
    }
};
struct half_q4_0 {
    static __device__ uint4 at(const uint8_t *row, int i, int cols) {
        const float d = half_bits(load2(row + (size_t)cols / 2 + 2 * (i / 4)));
        return eight(bits_at(row + 16 * (size_t)(i / 4) + 8 * (i % 2), i % 4 / 2 * 4, LOW_HALVES), d, -8, 0);
    }
};
// Of a block's eight units of 32 weights two share 32 bytes, as low and high halves; bit u of 32 more is the fifth of unit u.
template <bool FIVE> struct half_k45 {
    static __device__ uint4 at(const uint8_t *row, int i, int) {
        const uint8_t *b = row + (size_t)(i / 32) * (FIVE ? 176 : 144);
        const int u = i % 32 / 4, at = i % 4 * 8, k = u / 2;
        const uint4 head = __ldg((const uint4 *)b);
        const float2 d = half2_bits(head.x);
        // Six bits of scale and minimum of each unit: the first four units' whole, the others' in two places.
        const uint32_t scales = k < 2 ? head.y & 0x3f3f3f3f : (head.w & LOW_HALVES) | (head.y >> 2 & 0x30303030),
                       minima = k < 2 ? head.z & 0x3f3f3f3f : (head.w >> 4 & LOW_HALVES) | (head.z >> 2 & 0x30303030);
        uint2 q = bits_at(b + (FIVE ? 48 : 16) + 32 * k + at, u % 2 * 4, LOW_HALVES);
        if (FIVE) q = joined(q, bits_at(b + 16 + at, u, 0x01010101), 4);
        const int shift = u % 4 * 8;
        return eight(q, d.x * (float)(scales >> shift & 0xff), 0, d.y * (float)(minima >> shift & 0xff));
    }
};
// Each half of a block is four quarters of 32 weights: low and high halves of two times 32 bytes, two more bits in 32 others.
struct half_q6_k {
    static __device__ uint4 at(const uint8_t *row, int i, int cols) {
        const size_t n_blocks = (size_t)cols / 256, half = (size_t)i / 16;
        const int k = i % 16 / 4, at = i % 4 * 8;
        const uint2 low = bits_at(row + 64 * half + 32 * (k % 2) + at, k / 2 * 4, LOW_HALVES),
                    high = bits_at(row + 128 * n_blocks + 32 * half + at, 2 * k, 0x03030303);
        const int8_t scale = (int8_t)__ldg(row + 192 * n_blocks + 8 * half + 2 * k + at / 16);
        return eight(joined(low, high, 4), half_bits(load2(row + 208 * n_blocks + 2 * (half / 2))) * (float)scale, -32,
                     0);
    }
};

constexpr int WEIGHT_THREADS = 256;

template <class F>
__global__ void __launch_bounds__(WEIGHT_THREADS)
    half_kernel(const uint8_t *w, size_t stride, int rows, int cols, uint16_t *to, int ld) {
    dep_go();
    dep_wait();
    const int i = blockIdx.x * WEIGHT_THREADS + threadIdx.x;
    if (8 * i >= ld) return;
#pragma unroll 4
    for (int r = blockIdx.y; r < rows; r += gridDim.y)
        *(uint4 *)(to + (size_t)r * (size_t)ld + 8 * i) = F::at(w + (size_t)r * stride, i, cols);
}

te_status to_half(te_cuda *d, const te_mat *m, int r0, int n, void *to, int ld) {
    struct entry {
        int type;
        void (*kernel)(const uint8_t *, size_t, int, int, uint16_t *, int);
    };
    static const entry entries[] = {
        {TE_F32, half_kernel<half_f32>},         {TE_BF16, half_kernel<half_bf16>},
        {TE_Q8_0, half_kernel<half_q8_0>},       {TE_Q4_0, half_kernel<half_q4_0>},
        {TE_Q4_K, half_kernel<half_k45<false>>}, {TE_Q5_K, half_kernel<half_k45<true>>},
        {TE_Q6_K, half_kernel<half_q6_k>},
    };
    for (const entry &e : entries) {
        if (e.type != m->type) continue;
        const int across = divide_up(ld / 8, WEIGHT_THREADS), most = divide_up(16 * d->info.n_sm, across);
        return launch(d, "to_half", e.kernel, dim3((unsigned)across, (unsigned)(n < most ? n : most)), WEIGHT_THREADS,
                      0, (const uint8_t *)m->w + (size_t)r0 * m->stride, m->stride, n, (int)m->cols, (uint16_t *)to,
                      ld);
    }
    return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: no kernel for weights of type %d", (int)m->type));
}

} // namespace te
