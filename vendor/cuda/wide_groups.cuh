// wide_groups.cuh - products of 17 to 64 tokens with quantised matrices on Hopper, whose wgmma lets four warps multiply
// together, with tokens' values where they are in shared memory: weights become F16 in registers while it does.
//
// A warp has a group of 16 rows and all tokens. Groups are dealt out evenly, so that each multiprocessor has as many bytes
// to read: at most `across` of them to a block. Columns are cut into stages, which `deep` warps of each group take in turn.
// One more warp brings the tokens' values of a stage into shared memory, some stages ahead; the others wait for that, but
// not for each other. Blocks of a cluster have the same groups and a part of the columns each (`splits`): in the end each
// adds up some of the rows, over all parts in order.
//
// Of a feed-forward's gate and up a group has eight rows each, and what is written is their activation, in F16.
#ifndef TE_CUDA_WIDE_GROUPS_CUH
#define TE_CUDA_WIDE_GROUPS_CUH

#include "activation.cuh"
#include "half_range.cuh"
#include "wide.cuh"
#include "wide_copies.cuh"
#include "wide_multiply.cuh"

namespace te {

constexpr int GROUP_WARPS = 12, GROUP_THREADS = 32 * GROUP_WARPS + 32; // warps for rows
constexpr int GROUP_STAGES = 6, GROUP_LEAST_STAGES = 2;
constexpr int GROUP_BARRIERS = 128; // bytes of them in front of the stages

// Rows of a format, read without branches: what a branch loads is waited for where it ends, so that nothing would be on its
// way ahead. Behind the last column comes again what is in front of it, as tokens have zeros there.
constexpr int GROUP_AHEAD = 2; // chunks in registers
template <class C> struct grouped;
template <> struct grouped<codec_q8_0> : wide<codec_q8_0> {
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int b = min(4 * k + 2 * i + q / 2, n / 32 - 1);
            r.q[i] = load16(p + 32 * (size_t)b + 16 * (q % 2));
            r.d[i] = load2(p + (size_t)n + 2 * (size_t)b);
        }
    }
};
template <> struct grouped<codec_q4_0> : wide<codec_q4_0> {
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int b = min(8 * k + 4 * i + q, n / 32 - 1);
            r.q[i] = load16(p + 16 * (size_t)b);
            r.d[i] = load2(p + (size_t)n / 2 + 2 * (size_t)b);
        }
    }
};
template <> struct grouped<codec_q4_k> : wide<codec_q4_k> {
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        const uint8_t *b = p + (size_t)min(k, n / 256 - 1) * codec::bytes;
        r.head = __ldg((const uint4 *)b);
        r.shift = 2 * q;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            r.q[i] = load16(b + codec::q_at + 32 * q + 16 * i);
        }
    }
};
template <> struct grouped<codec_q6_k> : wide<codec_q6_k> {
    static __device__ __forceinline__ void load(row &r, const uint8_t *p, int k, int q, int n) {
        const size_t nb = (size_t)n / 256, half = (size_t)min(k, n / 128 - 1);
        const uint8_t *low = p + 64 * half + 8 * q;
        r.a = load8(low);
        r.b = load8(low + 32);
        r.high = load8(p + codec_q6_k::high_at * nb + 32 * half + 8 * q);
        r.scales = __ldg((const uint2 *)(p + codec_q6_k::scales_at * nb + 8 * half));
        r.d = load2(p + codec_q6_k::d_at * nb + 2 * (half / 2));
    }
};

struct group_args {
    const uint4 *x;
    const float *scale; // of each token
    int n_tok, cols, n_products, groups;
    int across, deep, splits, stages;
    bool activates;                        // product 0 is up, 1 is gate
    wide_product product[TE_MAX_PRODUCTS]; // first: its first group
    te_cuda_act act;
    uint32_t *counter; // n_tok + 1, which are 0
};
__device__ __forceinline__ int group_from(const group_args &a, int block, int blocks) { // a block's first group
    return (int)((int64_t)a.groups * block / blocks);
}
__device__ __forceinline__ int group_which(const group_args &a, int group) {
    int i = 0;
    while (i + 1 < a.n_products && group >= a.product[i + 1].first) i++;
    return i;
}

// Where a block's sums are, and whose they are.
struct group_sums {
    const float *part; // [deep][tokens][ld]
    int ld, rows;      // rows: from one of `deep` to the next, in tokens
    int deep, splits;
    // Of token t and rows `at` to at + 3, over all parts in order.
    __device__ __forceinline__ float4 at(int t, int at) const {
        float4 v = make_float4(0, 0, 0, 0);
        for (int k = 0; k < deep; k++) {
            const float *from = part + (k * rows + t) * ld + at;
            for (int s = 0; s < splits; s++) {
                const float4 f = splits > 1 ? cluster_load4(from, s) : *(const float4 *)from;
                v = make_float4(v.x + f.x, v.y + f.y, v.z + f.z, v.w + f.w);
            }
        }
        return v;
    }
};

// What blocks write in the end; of `splits` each its share.
inline __device__ __noinline__ void group_write(const group_args &a, const group_sums &sums, int g0, int count,
                                                int split) {
    const int quads = 4 * count, from = quads * split / a.splits, n = quads * (split + 1) / a.splits - from;
    for (int e = threadIdx.x; e < a.n_tok * n; e += blockDim.x) {
        const int t = e / n, at = 4 * (from + e % n), group = g0 + at / 16;
        const wide_product &p = a.product[group_which(a, group)];
        const int r = 16 * (group - p.first) + at % 16;
        if (r >= p.rows) continue;
        const float4 v = sums.at(t, at);
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
#pragma unroll
        for (int i = 0; i < 3; i++)
            if (r + i < p.rows) y[i] = f[i];
    }
}

// The same of a feed-forward's gate and up: hidden values as floats, to act.up, and in F16. The block that is last looks
// whether a token's leave the range of F16, and makes those anew.
inline __device__ __noinline__ void group_activate(const group_args &a, const group_sums &sums, int g0, int count,
                                                   int split) {
    const te_cuda_act &c = a.act;
    __shared__ uint32_t most[TE_CUDA_WIDE_TOK], seen[2], is_last;
    if (threadIdx.x < 2) seen[threadIdx.x] = 0;
    for (int t = threadIdx.x; t < a.n_tok; t += blockDim.x) most[t] = 0;
    __syncthreads();
    const int quads = 2 * count, from = quads * split / a.splits, n = quads * (split + 1) / a.splits - from;
    uint32_t asked = 0, fired = 0;
    float *values = const_cast<float *>(c.up);
    for (int e = threadIdx.x; e < a.n_tok * n; e += blockDim.x) {
        const int t = e / n, quad = from + e % n, at = quad / 2 * 16 + quad % 2 * 4, j = 8 * g0 + 4 * quad;
        if (j >= c.n) continue;
        const float4 gate = sums.at(t, at), up = sums.at(t, at + 8);
        const float scale = __ldcg(a.scale + t), g[4] = {gate.x, gate.y, gate.z, gate.w},
                    u[4] = {up.x, up.y, up.z, up.w};
        float h[4], largest = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool there = j + i < c.n;
            const float bias = there && c.up_bias ? __ldg(c.up_bias + j + i) : 0;
            h[i] = gated_value(c.act, activate(c.act, c.threshold, scale * g[i]), fmaf(scale, u[i], bias));
            if (!there) h[i] = 0;
            asked += there;
            fired += h[i] != 0;
            if (c.fired && h[i] != 0) atomicAdd(c.fired + j + i, 1u);
            largest = fmaxf(largest, fabsf(h[i]));
        }
        *(float4 *)(values + t * c.ld_up + j) = make_float4(h[0], h[1], h[2], h[3]);
        wide_put(c.to, t, j, make_uint2(half2_of(h[0], h[1]), half2_of(h[2], h[3])));
        atomicMax(most + t, __float_as_uint(largest));
    }
    const int end = (c.n + 3) / 4 * 4, behind = ((int)c.to.ld - end) / 4;
    if (g0 + count == a.groups && split == 0)
        for (int e = threadIdx.x; e < a.n_tok * behind; e += blockDim.x)
            wide_put(c.to, e / behind, end + e % behind * 4, make_uint2(0, 0));
    if (c.counts) {
        atomicAdd(seen, asked);
        atomicAdd(seen + 1, fired);
    }
    __syncthreads();
    for (int t = threadIdx.x; t < a.n_tok; t += blockDim.x) atomicMax(a.counter + 1 + t, most[t]);
    if (c.counts && threadIdx.x < 3) atomicAdd(c.counts + threadIdx.x, seen[threadIdx.x / 2]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = count_block(a.counter, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    for (int t = threadIdx.x; t < a.n_tok; t += blockDim.x) {
        const float largest = __uint_as_float(atomicExch(a.counter + 1 + t, 0u));
        const int e = half_exponent(largest);
        c.to.scale[t] = ldexpf(1, e);
        most[t] = (uint32_t)e;
    }
    __syncthreads();
    for (int t = 0; t < a.n_tok; t++) {
        if (!most[t]) continue;
        const float by = ldexpf(1, -(int)most[t]);
        for (int j = 4 * threadIdx.x; j < end; j += 4 * blockDim.x) {
            const float4 v = __ldcg((const float4 *)(values + t * c.ld_up + j));
            wide_put(c.to, t, j, make_uint2(half2_of(v.x * by, v.y * by), half2_of(v.z * by, v.w * by)));
        }
    }
}

// TILES: of eight tokens; a number that the compiler knows.
template <class C, int TILES>
__global__ void __launch_bounds__(GROUP_THREADS, 1) group_kernel(const __grid_constant__ group_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef grouped<C> F;
    constexpr int UNITS = F::chunk / 32, PER_STAGE = WIDE_UNITS / UNITS, UNIT = TILES * 32, ROOM = WIDE_UNITS * UNIT,
                  DEPTH = GROUP_AHEAD;
    extern __shared__ __align__(128) uint4 shared[];
    uint4 *ring = shared + GROUP_BARRIERS / 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int split = (int)blockIdx.x % a.splits, block = (int)blockIdx.x / a.splits,
              blocks = (int)gridDim.x / a.splits, g0 = group_from(a, block, blocks),
              count = group_from(a, block + 1, blocks) - g0;
    const int all = (a.cols + F::chunk - 1) / F::chunk, c0 = all * split / a.splits,
              n_all = all * (split + 1) / a.splits - c0, n_stages = (n_all + PER_STAGE - 1) / PER_STAGE;
    // This warp's group, and which stages it takes; the last one may have fewer chunks.
    const int own = warp % a.across, turn = warp / a.across;
    const bool multiplies = turn < a.deep, works = multiplies && own < count;
    const int last = n_stages - 1, n_own = turn <= last ? (last - turn) / a.deep + 1 : 0,
              n = multiplies ? n_own * PER_STAGE - ((last - turn) % a.deep ? 0 : n_stages * PER_STAGE - n_all) : 0;
    const uint8_t *row[2];
    {
        const int group = g0 + min(own, count - 1);
        const wide_product *p = a.product + (a.activates ? 0 : group_which(a, group));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int r = 16 * (group - p->first) + g + 8 * i;
            if (a.activates) {
                p = a.product + 1 - i; // gate, then up
                r = 8 * group + g;
            }
            row[i] = p->w + (size_t)min(r, p->rows - 1) * p->stride;
        }
    }
    typename F::row ahead[DEPTH][2];
    auto load = [&](typename F::row(&to)[2], int k) {
        const int c = (turn + k / PER_STAGE * a.deep) * PER_STAGE + k % PER_STAGE, at = works && k < n ? c0 + c : all;
#pragma unroll
        for (int i = 0; i < 2; i++) F::load(to[i], row[i], at, q, a.cols);
    };
    float sum[TILES][4] = {};
    const uint4 *x = a.x + (size_t)(c0 * UNITS) * UNIT;
    auto stage_size = [&](int s) { return min(n_all * UNITS * UNIT - s * ROOM, ROOM); }; // of 16 bytes
    uint64_t *full = (uint64_t *)shared, *empty = full + GROUP_STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < a.stages; s++) {
            bar_init(full + s, 1);
            bar_init(empty + s, a.across * a.deep);
        }
        bars_ready();
    }
#pragma unroll
    for (int j = 0; j < DEPTH - 1; j++) load(ahead[j], j);
    __syncthreads();
    dep_go();
    dep_wait();
    int slot = 0, parity = 0;
    auto next_slot = [&] {
        if (++slot < a.stages) return;
        slot = 0;
        parity ^= 1;
    };
    if (!multiplies && lane == 0) {
        for (int s = 0; s < n_stages; s++) {
            bar_wait(empty + slot, parity ^ 1);
            const int n_bytes = 16 * stage_size(s);
            bar_expect(full + slot, n_bytes);
            bulk_copy(ring + slot * ROOM, x + (size_t)s * ROOM, n_bytes, full + slot);
            next_slot();
        }
    }
    if (multiplies) {
        int stage = 0;
        auto leave = [&] { // every warp passes every stage, else one might take a later use of a barrier for an earlier
            __syncwarp();
            if (lane == 0) bar_arrive(empty + slot);
            stage++;
            next_slot();
        };
        auto pass = [&](int until) {
            while (stage < until) {
                bar_wait(full + slot, parity);
                leave();
            }
        };
        for (int k0 = 0; k0 < n; k0 += DEPTH) {
#pragma unroll
            for (int j = 0; j < DEPTH; j++) {
                const int k = k0 + j;
                if (k >= n) break;
                if (k % PER_STAGE == 0) {
                    group_settle<0>(); // nothing of the stage before is read any more
                    if (k) leave();
                    pass(turn + k / PER_STAGE * a.deep);
                    bar_wait(full + slot, parity);
                }
                const uint4 *from = ring + slot * ROOM + k % PER_STAGE * UNITS * UNIT;
                const typename F::scales s[2] = {F::scale_of(ahead[j][0], q), F::scale_of(ahead[j][1], q)};
#pragma unroll
                for (int i = 0; i < UNITS; i++) {
                    group_multiply(sum, F::halves(ahead[j][0], s[0], i), F::halves(ahead[j][1], s[1], i),
                                   from + i * UNIT);
                    group_settle<1>();
                    // The registers of the chunk before are free now.
                    if (i == 0) load(ahead[(j + DEPTH - 1) % DEPTH], k - 1 + DEPTH);
                }
            }
        }
        group_settle<0>();
        if (n) leave();
        pass(n_stages);
    }
    __syncthreads(); // nobody reads stages any more
    float *part = (float *)ring;
    const group_sums sums = {part, 16 * a.across + 4, 8 * TILES, a.deep, a.splits};
    if (works) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                part[(turn * sums.rows + 8 * t + 2 * q + i % 2) * sums.ld + 16 * own + g + i / 2 * 8] = sum[t][i];
    }
    if (a.splits > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    if (a.activates)
        group_activate(a, sums, g0, count, split);
    else
        group_write(a, sums, g0, count, split);
    if (a.splits > 1) { // others read this block's sums
        cluster_arrive();
        cluster_wait();
    }
#else
    __trap(); // code for another processor than the one that the host asked for
#endif
}

// Shared memory of a kernel.
inline size_t group_smem(int tiles, int across, int deep, int stages) {
    const size_t ring = (size_t)(stages * WIDE_UNITS * 512 * tiles),
                 part = sizeof(float) * (size_t)(deep * 8 * tiles * (16 * across + 4));
    return GROUP_BARRIERS + (ring > part ? ring : part);
}

// Of a format: its words, its chunk's columns, and a kernel for each number of tiles.
constexpr int GROUP_KERNELS = 7;
constexpr int group_tiles[GROUP_KERNELS] = {2, 3, 4, 5, 6, 7, 8};
struct group_kernels {
    int words, chunk;
    void (*run[GROUP_KERNELS])(group_args);
};
template <class C> struct group_of {
    static constexpr group_kernels kernels = {wide<C>::words,
                                              wide<C>::chunk,
                                              {group_kernel<C, 2>, group_kernel<C, 3>, group_kernel<C, 4>,
                                               group_kernel<C, 5>, group_kernel<C, 6>, group_kernel<C, 7>,
                                               group_kernel<C, 8>}};
};
const group_kernels *groups_32(int type);
const group_kernels *groups_k(int type);

} // namespace te
#endif
