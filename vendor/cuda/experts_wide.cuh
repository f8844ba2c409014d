// experts_wide.cuh - products of 9 to 64 tokens' routes with the experts that they go to, on tensor cores: each row of an
// expert is read once for up to EXPERT_WIDE_TILE routes, as it is, and becomes F16 in registers (wide.cuh).
//
// Routes lie in the order that order_kernel made in front, in tiles of one expert. A unit is 16 rows of a tile's expert: of
// gate and up those of eight neurons, so that a lane has a neuron's gate and its up. All tiles' units are shared out over
// the blocks; the warps of a block take one each in turn, all columns of it. The tile's inputs are in shared memory, as many
// columns at once as it has room for. Hidden values whose rows have room become F16 on their way there, each route's with a
// scale of its own; longer ones, which come there several times, before.
// A route's bits depend neither on its tile nor on its place in it.
#ifndef TE_CUDA_EXPERTS_WIDE_CUH
#define TE_CUDA_EXPERTS_WIDE_CUH

#include "experts_prompt.cuh"
#include "half_range.cuh"
#include "wide.cuh"

namespace te {

constexpr int EXPERT_WIDE_TILE = 32, EXPERT_WIDE_UNITS = 96; // of 32 columns, of eight routes' inputs in shared memory
constexpr size_t EXPERT_WIDE_SMEM = (size_t)EXPERT_WIDE_UNITS * 512;

// DOWN: sums of hidden values; else these.
template <class C, bool DOWN> struct expert_wide {
    typedef wide<C> F;
    static constexpr int UNITS = F::chunk / 32;

    const expert_gemm &a;
    int x_tiles; // te_cuda_half's
    uint4 *x;
    int *source;  // of a tile: rows of the input
    float *scale; // what they are multiplied with
    uint32_t asked, fired;

    // Eight hidden values as F16, which lane q has of unit u (wide_place).
    __device__ __forceinline__ uint4 halves(const float *row, int u, int q, float down) const {
        constexpr int W = F::words;
        const int c = u / W * (32 * W) + q * (8 * W) + u % W * 4;
        auto four = [&](int c) {
            float4 v = make_float4(0, 0, 0, 0);
            if (c + 4 <= a.k)
                v = __ldcg((const float4 *)(row + c));
            else if (c < a.k)
                v = make_float4(__ldcg(row + c), c + 1 < a.k ? __ldcg(row + c + 1) : 0,
                                c + 2 < a.k ? __ldcg(row + c + 2) : 0, 0);
            return make_uint2(half2_of(v.x * down, v.y * down), half2_of(v.z * down, v.w * down));
        };
        return both(four(c), four(c + 4 * W));
    }
    // A tile's inputs, `n` units from the first-th on.
    template <int T> __device__ __forceinline__ void fetch(const expert_tile &t, int first, int n) const {
        if (DOWN && a.h) {
#pragma unroll 2
            for (int e = threadIdx.x; e < n * T * 32; e += WIDE_THREADS) {
                const int i = e / 32 % T * 8 + e % 32 / 4, u = first + e / (32 * T);
                x[e] = make_uint4(0, 0, 0, 0);
                if (i < t.n) x[e] = halves(a.h + (size_t)source[i] * a.ldh, u, e % 4, 1 / scale[i]);
            }
            return;
        }
        const uint4 *from = (const uint4 *)a.x;
#pragma unroll 4
        for (int e = threadIdx.x; e < n * T * 32; e += WIDE_THREADS) {
            const int i = e / 32 % T * 8 + e % 32 / 4, u = first + e / (32 * T);
            const bool there = i < t.n;
            const int r = there ? source[i] : 0;
            fetch16(x + e, from + ((size_t)u * (size_t)x_tiles + (size_t)(r / 8)) * 32 + r % 8 * 4 + e % 4, there);
        }
        fetches_end();
    }

    // What a lane has of a unit's sums: rows g and g + 8, of each eight routes numbers 2q and 2q + 1.
    template <int T> __device__ __forceinline__ void put(const expert_tile &t, int unit, const float (&sum)[T][4]) {
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
        for (int i = 0; i < T; i++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int at = 8 * i + 2 * q + k, j = 8 * unit + g;
                const size_t p = (size_t)(t.first + at);
                float *y = a.y + p * a.ldy, h = 0;
                if (DOWN) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int r = 16 * unit + g + 8 * half;
                        if (at < t.n && r < a.n) y[r] = scale[at] * sum[i][2 * half + k];
                    }
                    continue;
                }
                if (at < t.n && j < a.n) {
                    float gate = scale[at] * sum[i][k], up = scale[at] * sum[i][2 + k];
                    if (a.b[0] || a.b[1]) {
                        const int e = __ldcg(a.expert + __ldcg(a.lists.sorted + p));
                        const size_t b = (size_t)e * (size_t)a.rows + (size_t)(a.row0 + j);
                        if (a.b[0]) gate += __ldg(a.b[0] + b);
                        if (a.b[1]) up += __ldg(a.b[1] + b);
                    }
                    h = gated_value(a.act, activate(a.act, a.threshold, gate), up);
                    y[j] = h;
                    asked++;
                    fired += h != 0;
                }
                if (!a.most) continue;
                uint32_t most = __float_as_uint(h) & 0x7fffffff; // of eight neurons
#pragma unroll
                for (int o = 4; o < 32; o *= 2) most = max(most, __shfl_xor_sync(~0u, most, o));
                if (g == 0 && at < t.n) atomicMax(a.most + p, most);
            }
    }

    // n units of a tile, from the first-th on.
    template <int T> __device__ void run(const expert_tile &t, int first, int n) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
        const int chunks = (a.k + F::chunk - 1) / F::chunk, c0 = a.k0 / F::chunk,
                  most = EXPERT_WIDE_UNITS / T / UNITS, // chunks in shared memory
            turns = (n + WIDE_WARPS - 1) / WIDE_WARPS;
        const size_t rows = (size_t)t.place * (size_t)a.rows + (size_t)a.row0;
        typename F::row ahead[F::depth][2];
        const uint8_t *row[2] = {};
        int next = 0, next_chunk = 0;
        auto find = [&] { // the rows of the next turn; a warp that has none reads nothing
            const int u = next * WIDE_WARPS + warp;
            if (u >= n) {
                row[0] = nullptr;
                return;
            }
            const int r = (DOWN ? 16 : 8) * (first + u) + g, s = DOWN ? r + 8 : r;
            row[0] = a.w[0] + (rows + (size_t)min(r, a.n - 1)) * a.stride[0];
            row[1] = DOWN ? a.w[0] + (rows + (size_t)min(s, a.n - 1)) * a.stride[0]
                          : a.w[1] + (rows + (size_t)min(s, a.n - 1)) * a.stride[1];
        };
        auto load = [&](typename F::row(&to)[2]) {
            if (next >= turns) return;
            if (row[0])
#pragma unroll
                for (int i = 0; i < 2; i++) F::load(to[i], row[i], c0 + next_chunk, q, a.cols);
            if (++next_chunk < chunks) return;
            next_chunk = 0;
            if (++next < turns) find();
        };
        find();
#pragma unroll
        for (int d = 0; d < F::depth; d++) load(ahead[d]);
        if (DOWN && !waited) dep_wait(); // weights are on their way
        waited = true;
        __syncthreads(); // the inputs before have been read
        if (threadIdx.x < t.n) {
            const int p = t.first + (int)threadIdx.x;
            const int r = DOWN ? p : __ldcg(a.lists.sorted + p) / a.n_used;
            source[threadIdx.x] = r;
            scale[threadIdx.x] = DOWN && a.h ? half_scale(__uint_as_float(__ldcg(a.most + p))) : __ldcg(a.scale + r);
        }
        __syncthreads();
        int turn = 0, chunk = 0, there = -1; // there: the first of the chunks in shared memory
        float sum[T][4] = {};
#pragma unroll 1
        while (turn < turns) {
#pragma unroll
            for (int d = 0; d < F::depth; d++) {
                if (turn >= turns) break;
                const int from = chunk / most * most;
                if (from != there) {
                    if (there >= 0) __syncthreads();
                    fetch<T>(t, from * UNITS, min(most, chunks - from) * UNITS);
                    fetches_wait<0>();
                    __syncthreads();
                    there = from;
                }
                const bool works = turn * WIDE_WARPS + warp < n;
                if (works) {
                    const uint4 *b = x + (chunk - from) * UNITS * T * 32 + lane;
                    typename F::scales s[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) s[i] = F::scale_of(ahead[d][i], q);
#pragma unroll
                    for (int i = 0; i < UNITS; i++) {
                        const uint4 u = F::halves(ahead[d][0], s[0], i), v = F::halves(ahead[d][1], s[1], i);
                        const uint32_t a0[4] = {u.x, v.x, u.y, v.y}, a1[4] = {u.z, v.z, u.w, v.w};
#pragma unroll
                        for (int k = 0; k < T; k++) {
                            const uint4 w = b[(i * T + k) * 32];
                            multiply_add(sum[k], a0, w.x, w.y);
                            multiply_add(sum[k], a1, w.z, w.w);
                        }
                    }
                }
                load(ahead[d]);
                if (++chunk < chunks) continue;
                if (works) put<T>(t, first + turn * WIDE_WARPS + warp, sum);
#pragma unroll
                for (int k = 0; k < T; k++)
#pragma unroll
                    for (int i = 0; i < 4; i++) sum[k][i] = 0;
                chunk = 0;
                turn++;
            }
        }
    }
    bool waited;
};

template <class C, bool DOWN>
__global__ void __launch_bounds__(WIDE_THREADS, wide<C>::blocks(4))
    expert_wide_kernel(const __grid_constant__ expert_gemm a, int x_tiles) {
    extern __shared__ uint4 shared[];
    __shared__ int source[EXPERT_WIDE_TILE];
    __shared__ float scale[EXPERT_WIDE_TILE];
    // The kernels in front of sums let them start when all blocks of the first product know that the order is there.
    if (!DOWN) dep_wait();
    dep_go();
    expert_wide<C, DOWN> of = {a, x_tiles, shared, source, scale, 0, 0, !DOWN};
    const int each = DOWN ? 16 : 8, units = (a.n + each - 1) / each, total = __ldcg(a.lists.n_tiles) * units,
              b = blockIdx.x, per = total / (int)gridDim.x, more = total % (int)gridDim.x, lo = b * per + min(b, more),
              hi = lo + per + (b < more);
#pragma unroll 1
    for (int from = lo; from < hi;) {
        const int i = from / units, n = min(hi, (i + 1) * units) - from;
        const int4 v = __ldcg((const int4 *)a.lists.tile + i);
        const expert_tile t = {v.x, v.y, v.z, v.w};
        const int first = from - i * units;
        if (t.n <= 8)
            of.template run<1>(t, first, n);
        else if (t.n <= 16)
            of.template run<2>(t, first, n);
        else
            of.template run<4>(t, first, n);
        from += n;
    }
    if (!of.waited) dep_wait();
    if (DOWN || !a.counts) return;
    uint32_t asked = of.asked, fired = of.fired;
    for (int o = 16; o; o /= 2) {
        asked += __shfl_xor_sync(~0u, asked, o);
        fired += __shfl_xor_sync(~0u, fired, o);
    }
    if (threadIdx.x % 32 == 0 && asked) {
        atomicAdd(a.counts, asked);
        atomicAdd(a.counts + 1, asked);
        atomicAdd(a.counts + 2, fired);
    }
}

// Of a format: which values stand together in inputs, blocks of a multiprocessor, the kernels.
struct expert_wide_kernels {
    int words, blocks;
    void (*run[2])(expert_gemm, int); // hidden values, sums
};
template <class C> struct expert_wide_of {
    static constexpr expert_wide_kernels kernels = {
        wide<C>::words, wide<C>::blocks(4), {expert_wide_kernel<C, false>, expert_wide_kernel<C, true>}};
};
const expert_wide_kernels *experts_wide_float(int type);
const expert_wide_kernels *experts_wide_32(int type);
const expert_wide_kernels *experts_wide_bits(int type);
const expert_wide_kernels *experts_wide_table(int type);
const expert_wide_kernels *experts_wide_k(int type);
const expert_wide_kernels *experts_wide_k23(int type);

} // namespace te
#endif
