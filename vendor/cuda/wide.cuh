// wide.cuh - products of 9 to 64 tokens with matrices of every format, on tensor cores: weights are read once, as they are,
// and become F16 in registers.
//
// A warp has 16 rows and all tokens; a block's eight warps have 128, and share the tokens' values of a stage of
// columns, which pass through shared memory. Blocks of a cluster have the same rows and a part of the columns each; in the
// end each adds up some of the rows, over all parts in order.
//
// Values of tokens lie in the order of fragments (gemm_mma.cuh), since columns of both factors may be in any order if it is
// the same: unit u has of each tile of eight tokens 16 bytes for each lane, eight columns of a token (wide_place).
#ifndef TE_CUDA_WIDE_CUH
#define TE_CUDA_WIDE_CUH

#include "formats.cuh"
#include "gemm_mma.cuh"

namespace te {

constexpr int WIDE_WARPS = 8, WIDE_THREADS = 32 * WIDE_WARPS, WIDE_ROWS = 16 * WIDE_WARPS;
constexpr int WIDE_UNITS = 8, WIDE_STAGES = 3; // units of a stage, stages in shared memory

struct wide_product {
    const uint8_t *w;
    size_t stride;
    const float *bias, *add;
    float *y;
    size_t ld_add, ldy;
    int rows, first; // the first block of its rows
    bool relu;
};
struct wide_args {
    const uint4 *x;
    const float *scale; // of each token
    int n_tok, cols, splits, n_products;
    wide_product product[TE_MAX_PRODUCTS];
};

// How rows of a format are read:
//     chunk, depth             columns, and chunks that a lane has on their way
//     blocks                   of a multiprocessor, with so many tiles at most
//     words                    which columns a lane has (wide_place)
//     row, load(r, p, k, q, n) what lane q of four holds of chunk k of a row of n columns
//     scale_of(r, q)           a row's scales of a chunk
//     halves(r, s, i)          its eight weights of unit i of the chunk
template <class C> struct wide {
    static constexpr int chunk = 32, depth = 4, words = 1;
    static constexpr int blocks(int) { return 2; }
    struct row {
        uint4 w;
    };
    struct scales {};
    static __device__ __forceinline__ scales scale_of(const row &, int) { return {}; }
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        const int i = 4 * k + q;
        r.w = make_uint4(0, 0, 0, 0);
        if (8 * i < n) r.w = C::halves(p, i, n);
    }
    static __device__ __forceinline__ uint4 halves(const row &r, const scales &, int) { return r.w; }
};

// Four bytes less `offset`, times d.
__device__ __forceinline__ uint2 wide_bytes(uint32_t w, float offset, __half2 d) {
    uint32_t v[2] = {pair_of_bytes<true>(w, offset), pair_of_bytes<false>(w, offset)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const __half2 h = __hmul2(*reinterpret_cast<const __half2 *>(&v[i]), d);
        v[i] = *reinterpret_cast<const uint32_t *>(&h);
    }
    return make_uint2(v[0], v[1]);
}
// The same, times d and less `low`.
__device__ __forceinline__ uint2 wide_bytes(uint32_t w, __half2 d, __half2 low) {
    uint32_t v[2] = {pair_of_bytes<true>(w, 0), pair_of_bytes<false>(w, 0)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const __half2 h = __hfma2(*reinterpret_cast<const __half2 *>(&v[i]), d, low);
        v[i] = *reinterpret_cast<const uint32_t *>(&h);
    }
    return make_uint2(v[0], v[1]);
}
__device__ __forceinline__ __half2 as_half2(uint32_t v) { return *reinterpret_cast<const __half2 *>(&v); }
// The upper halves of four bytes less `offset`, times d. Where they stand they are 16 times as much: to shift them takes as
// long as four multiplications.
__device__ __forceinline__ uint2 wide_upper(uint32_t w, float offset, __half2 d) {
    uint32_t v[2] = {__byte_perm(w & ~LOW, 0x64646464, 0x4140), __byte_perm(w & ~LOW, 0x64646464, 0x4342)};
#pragma unroll
    for (int i = 0; i < 2; i++) { // from 1024 + 16 * half a byte, exactly
        const __half2 h =
            __hmul2(__hfma2(as_half2(v[i]), __float2half2_rn(1.0f / 16), __float2half2_rn(-64 - offset)), d);
        v[i] = *reinterpret_cast<const uint32_t *>(&h);
    }
    return make_uint2(v[0], v[1]);
}
// The lower two bytes less `offset`; exact.
__device__ __forceinline__ __half2 two_bytes(uint32_t w, float offset) {
    return as_half2(pair_of_bytes<true>(w, offset));
}
__device__ __forceinline__ uint4 both(uint2 a, uint2 b) { return make_uint4(a.x, a.y, b.x, b.y); }
__device__ __forceinline__ uint32_t word_of(const uint4 &v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
template <int TYPE> struct wide<codec_16<TYPE>> {
    static constexpr int chunk = 64, depth = 2, words = 1;
    static constexpr int blocks(int) { return 2; }
    struct row {
        uint4 w[2];
    };
    struct scales {};
    static __device__ __forceinline__ scales scale_of(const row &, int) { return {}; }
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int c = 64 * k + 32 * i + 8 * q;
            r.w[i] = c < n ? load16(p + 2 * (size_t)c) : make_uint4(0, 0, 0, 0); // zeros behind the last weight
        }
    }
    static __device__ __forceinline__ uint4 halves(const row &r, const scales &, int i) {
        const uint4 w = r.w[i];
        if (TYPE == TE_F16) return w;
        auto pair = [](uint32_t v) {
            const float2 f = bf162_bits(v);
            return half2_of(f.x, f.y);
        };
        return make_uint4(pair(w.x), pair(w.y), pair(w.z), pair(w.w));
    }
};

template <> struct wide<codec_q8_0> {
    static constexpr int chunk = 128, depth = 1, words = 2;
    static constexpr int blocks(int tiles) { return tiles > 4 ? 2 : 3; }
    struct row {
        uint4 q[2];
        uint16_t d[2];
    };
    struct scales {
        __half2 d[2];
    };
    static __device__ __forceinline__ scales scale_of(const row &r, int) {
        return {{__half2half2(__ushort_as_half(r.d[0])), __half2half2(__ushort_as_half(r.d[1]))}};
    }
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        r = row();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int b = 4 * k + 2 * i + q / 2;
            if (32 * b >= n) continue;
            r.q[i] = load16(p + 32 * (size_t)b + 16 * (q % 2));
            r.d[i] = load2(p + (size_t)n + 2 * (size_t)b);
        }
    }
    static __device__ __forceinline__ uint4 halves(const row &r, const scales &s, int i) {
        const uint4 w = r.q[i / 2];
        return both(wide_bytes((i % 2 ? w.y : w.x) ^ 0x80808080, 128, s.d[i / 2]),
                    wide_bytes((i % 2 ? w.w : w.z) ^ 0x80808080, 128, s.d[i / 2]));
    }
};

template <> struct wide<codec_q4_0> {
    static constexpr int chunk = 256, depth = 1, words = 4;
    static constexpr int blocks(int tiles) { return tiles > 4 ? 2 : 3; }
    struct row {
        uint4 q[2];
        uint16_t d[2];
    };
    struct scales {
        __half2 d[2];
    };
    static __device__ __forceinline__ scales scale_of(const row &r, int) {
        return {{__half2half2(__ushort_as_half(r.d[0])), __half2half2(__ushort_as_half(r.d[1]))}};
    }
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        r = row();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int b = 8 * k + 4 * i + q;
            if (32 * b >= n) continue;
            r.q[i] = load16(p + 16 * (size_t)b);
            r.d[i] = load2(p + (size_t)n / 2 + 2 * (size_t)b);
        }
    }
    static __device__ __forceinline__ uint4 halves(const row &r, const scales &s, int i) {
        const uint32_t w = word_of(r.q[i / 4], i % 4);
        return both(wide_bytes(w & LOW, 8, s.d[i / 4]), wide_upper(w, 8, s.d[i / 4]));
    }
};

template <bool FIVE> struct wide<codec_k45<FIVE>> {
    typedef codec_k45<FIVE> codec;
    static constexpr int chunk = 256, depth = 1, words = 8;
    static constexpr int blocks(int tiles) { return tiles > 2 || FIVE ? 2 : 3; }
    struct row {
        uint4 head, q[2], high[FIVE ? 2 : 1];
        int shift;
    };
    struct scales {
        __half2 d[2], low[2];
    };
    static __device__ __forceinline__ scales scale_of(const row &r, int q) {
        // Whole numbers of six bits times halves: rounded once, as their products in floats would be.
        const int two = q % 2 * 16;
        const __half2 d = as_half2(r.head.x),
                      s = __hmul2(two_bytes(k_scale_bytes(r.head, q) >> two, 0), __low2half2(d)),
                      m = __hneg2(__hmul2(two_bytes(k_low_bytes(r.head, q) >> two, 0), __high2half2(d)));
        return {{__low2half2(s), __high2half2(s)}, {__low2half2(m), __high2half2(m)}};
    }
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        r = row();
        if (256 * k >= n) return;
        const uint8_t *b = p + (size_t)k * codec::bytes;
        r.head = __ldg((const uint4 *)b);
        r.shift = 2 * q;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            r.q[i] = load16(b + codec::q_at + 32 * q + 16 * i);
            if (FIVE) r.high[FIVE ? i : 0] = __ldg((const uint4 *)(b + codec::high_at + 16 * i));
        }
    }
    static __device__ __forceinline__ uint4 halves(const row &r, const scales &s, int i) {
        const uint32_t w = word_of(r.q[i / 4], i % 4);
        uint32_t lo = w & LOW, hi = w >> 4 & LOW;
        if (FIVE) {
            const uint32_t bits = word_of(r.high[FIVE ? i / 4 : 0], i % 4) >> r.shift;
            lo |= (bits & 0x01010101) << 4;
            hi |= (bits & 0x02020202) << 3;
        }
        return both(wide_bytes(lo, s.d[0], s.low[0]), wide_bytes(hi, s.d[1], s.low[1]));
    }
};

template <> struct wide<codec_q6_k> {
    static constexpr int chunk = 128, depth = 2, words = 1;
    static constexpr int blocks(int) { return 2; }
    struct row {
        uint2 a, b, high, scales;
        uint16_t d;
    };
    struct scales {
        __half2 d[2]; // of units 0 and 1, 2 and 3
    };
    static __device__ __forceinline__ scales scale_of(const row &r, int q) { // rounded once, as in floats
        const __half2 d = __half2half2(__ushort_as_half(r.d));
        auto two = [&](uint32_t w) { // bytes q / 2 and q / 2 + 2, which have signs
            return __hmul2(two_bytes(__byte_perm(w ^ 0x80808080, 0, q / 2 ? 0x31 : 0x20), 128), d);
        };
        return {{two(r.scales.x), two(r.scales.y)}};
    }
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        r = row();
        if (128 * k >= n) return;
        const size_t nb = (size_t)n / 256, half = (size_t)k;
        const uint8_t *low = p + 64 * half + 8 * q;
        r.a = load8(low);
        r.b = load8(low + 32);
        r.high = load8(p + codec_q6_k::high_at * nb + 32 * half + 8 * q);
        r.scales = __ldg((const uint2 *)(p + codec_q6_k::scales_at * nb + 8 * half));
        r.d = load2(p + codec_q6_k::d_at * nb + 2 * (half / 2));
    }
    static __device__ __forceinline__ uint4 halves(const row &r, const scales &s, int i) {
        const uint2 v = i % 2 ? r.b : r.a;
        const __half2 d = i % 2 ? __high2half2(s.d[i / 2]) : __low2half2(s.d[i / 2]);
        auto six = [&](uint32_t q, uint32_t high) {
            return (i / 2 ? q >> 4 & LOW : q & LOW) | (high >> 2 * i & 0x03030303) << 4;
        };
        return both(wide_bytes(six(v.x, r.high.x), 32, d), wide_bytes(six(v.y, r.high.y), 32, d));
    }
};

template <int TYPE, class B, class V, class S, bool MIN> struct wide<codec_nibbles<TYPE, B, V, S, MIN>> {
    typedef codec_nibbles<TYPE, B, V, S, MIN> codec;
    static constexpr int chunk = 128, depth = 2, words = 4;
    static constexpr int blocks(int) { return 2; }
    struct row {
        uint4 q;
        uint32_t high;
        typename S::raw s;
        int unit;
    };
    struct scales {
        __half2 d, low;
    };
    static __device__ __forceinline__ scales scale_of(const row &r, int) {
        const float2 v = S::of(r.s, r.unit);
        return {__float2half2_rn(v.x), __float2half2_rn(v.y)};
    }
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        const int b = 4 * k + q;
        r = row();
        if (32 * b >= n) return;
        const typename codec::piece v = codec::load(p, b, n / 32);
        r.q = v.q;
        r.high = v.high;
        r.s = v.s;
        r.unit = b % 8;
    }
    static __device__ __forceinline__ uint4 halves(const row &r, const scales &s, int i) {
        uint32_t lo, hi;
        V::bytes(word_of(r.q, i), r.high >> 4 * i, lo, hi);
        if (V::is_signed) {
            lo ^= 0x80808080;
            hi ^= 0x80808080;
        }
        constexpr int offset = V::is_signed ? 128 : V::offset;
        if (MIN) return both(wide_bytes(lo, s.d, s.low), wide_bytes(hi, s.d, s.low));
        return both(wide_bytes(lo, offset, s.d), wide_bytes(hi, offset, s.d));
    }
};

// Four floats of another block of the cluster.
__device__ __forceinline__ float4 cluster_load4(const float *p, int rank) {
#if __CUDA_ARCH__ >= 900
    uint32_t at;
    float4 v;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((uint32_t)__cvta_generic_to_shared(p)), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
#else
    (void)rank;
    return *(const float4 *)p;
#endif
}

// TILES: of eight tokens; a number that the compiler knows, since loads from shared memory wait for each other else.
template <class C, int TILES>
__global__ void __launch_bounds__(WIDE_THREADS, wide<C>::blocks(TILES))
    wide_kernel(const __grid_constant__ wide_args a) {
    typedef wide<C> F;
    constexpr int UNITS = F::chunk / 32, PER_STAGE = WIDE_UNITS / UNITS;
    constexpr int UNIT = TILES * 32, ROOM = WIDE_UNITS * UNIT, LD = WIDE_ROWS + 4;
    extern __shared__ uint4 shared[];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, g = lane / 4, q = lane % 4;
    const int split = (int)blockIdx.x % a.splits, block = (int)blockIdx.x / a.splits;
    int which = 0;
    while (which + 1 < a.n_products && block >= a.product[which + 1].first) which++;
    const wide_product &p = a.product[which];
    const int r0 = (block - p.first) * WIDE_ROWS, w0 = 16 * warp + g;
    const uint8_t *row[2];
#pragma unroll
    for (int i = 0; i < 2; i++) row[i] = p.w + (size_t)min(r0 + w0 + 8 * i, p.rows - 1) * p.stride;
    const int all = (a.cols + F::chunk - 1) / F::chunk, c0 = all * split / a.splits,
              n = all * (split + 1) / a.splits - c0;
    typename F::row ahead[F::depth][2];
#pragma unroll
    for (int j = 0; j < F::depth; j++)
        if (j < n)
#pragma unroll
            for (int i = 0; i < 2; i++) F::load(ahead[j][i], row[i], c0 + j, q, a.cols);
    dep_go();
    dep_wait();
    auto fetch = [&](int stage) {
        const uint4 *from = a.x + (size_t)(c0 * UNITS + stage * WIDE_UNITS) * UNIT;
        uint4 *to = shared + stage % WIDE_STAGES * ROOM;
        const int there = min((n * UNITS - stage * WIDE_UNITS) * UNIT, ROOM);
#pragma unroll
        for (int i = 0; i < TILES * 32 * WIDE_UNITS / WIDE_THREADS; i++) {
            const int e = tid + i * WIDE_THREADS;
            if (e < there) fetch16(to + e, from + e, true);
        }
    };
#pragma unroll
    for (int s = 0; s < WIDE_STAGES - 1; s++) {
        fetch(s);
        fetches_end();
    }
    float sum[TILES][4] = {};
    for (int c = 0; c < n; c += F::depth) {
#pragma unroll
        for (int j = 0; j < F::depth; j++) {
            const int k = c + j, stage = k / PER_STAGE;
            if (k >= n) break;
            if (k % PER_STAGE == 0) {
                fetches_wait<WIDE_STAGES - 2>();
                __syncthreads();
                fetch(stage + WIDE_STAGES - 1);
                fetches_end();
            }
            const uint4 *x = shared + stage % WIDE_STAGES * ROOM + k % PER_STAGE * UNITS * UNIT + lane;
            typename F::scales s[2];
#pragma unroll
            for (int i = 0; i < 2; i++) s[i] = F::scale_of(ahead[j][i], q);
#pragma unroll
            for (int i = 0; i < UNITS; i++) {
                const uint4 u = F::halves(ahead[j][0], s[0], i), v = F::halves(ahead[j][1], s[1], i);
                const uint32_t a0[4] = {u.x, v.x, u.y, v.y}, a1[4] = {u.z, v.z, u.w, v.w};
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    const uint4 b = x[i * UNIT + 32 * t];
                    multiply_add(sum[t], a0, b.x, b.y);
                    multiply_add(sum[t], a1, b.z, b.w);
                }
            }
            if (k + F::depth < n)
#pragma unroll
                for (int i = 0; i < 2; i++) F::load(ahead[j][i], row[i], c0 + k + F::depth, q, a.cols);
        }
    }
    fetches_wait<0>();
    __syncthreads();
    float *part = (float *)shared;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) part[(8 * t + 2 * q + i % 2) * LD + w0 + i / 2 * 8] = sum[t][i];
    if (a.splits > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    const int rows = WIDE_ROWS / a.splits, first = split * rows;
    for (int e = tid; e < a.n_tok * rows / 4; e += WIDE_THREADS) {
        const int t = e / (rows / 4), at = first + e % (rows / 4) * 4, r = r0 + at;
        if (r >= p.rows) continue;
        const float *from = part + t * LD + at;
        float4 v = make_float4(0, 0, 0, 0);
        for (int s = 0; s < a.splits; s++) {
            const float4 o = a.splits > 1 ? cluster_load4(from, s) : *(const float4 *)from;
            v = make_float4(v.x + o.x, v.y + o.y, v.z + o.z, v.w + o.w);
        }
        const float scale = __ldcg(a.scale + t);
        float f[4] = {v.x, v.y, v.z, v.w};
        float *y = p.y + t * p.ldy + r;
        const float *add = p.add ? p.add + t * p.ld_add + r : nullptr;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (r + i >= p.rows) continue;
            f[i] = fmaf(scale, f[i], p.bias ? __ldg(p.bias + r + i) : 0);
            if (p.relu) f[i] = fmaxf(f[i], 0);
            if (add) f[i] += __ldcg(add + i);
        }
        if (r + 4 <= p.rows) {
            *(float4 *)y = make_float4(f[0], f[1], f[2], f[3]);
            continue;
        }
        for (int i = 0; r + i < p.rows; i++) y[i] = f[i];
    }
    if (a.splits > 1) { // others read this block's sums
        cluster_arrive();
        cluster_wait();
    }
}

inline size_t wide_smem(int tiles) { return (size_t)(WIDE_STAGES * WIDE_UNITS * 32 * 16 * tiles); }

// Of a format: its words, its chunk's columns, and a kernel for each number of tiles.
constexpr int WIDE_KERNELS = 5;
constexpr int wide_tiles[WIDE_KERNELS] = {2, 3, 4, 6, 8};
struct wide_kernels {
    int words, chunk;
    struct {
        int blocks; // of a multiprocessor
        void (*run)(wide_args);
    } of[WIDE_KERNELS];
};
template <class C> struct wide_of {
    typedef wide<C> F;
    static constexpr wide_kernels kernels = {F::words,
                                             F::chunk,
                                             {{F::blocks(2), wide_kernel<C, 2>},
                                              {F::blocks(3), wide_kernel<C, 3>},
                                              {F::blocks(4), wide_kernel<C, 4>},
                                              {F::blocks(6), wide_kernel<C, 6>},
                                              {F::blocks(8), wide_kernel<C, 8>}}};
};
const wide_kernels *wide_float(int type);
const wide_kernels *wide_32(int type);
const wide_kernels *wide_bits(int type);
const wide_kernels *wide_table(int type);
const wide_kernels *wide_k(int type);
const wide_kernels *wide_k23(int type);

} // namespace te
#endif
