// wide_groups.cuh - products of 9 to 64 tokens with quantised matrices on Hopper, whose wgmma lets four warps multiply
// together, with tokens' values where they are in shared memory: weights become F16 in registers while it does.
//
// A warp has a group of 16 rows and all tokens. Groups are dealt out evenly, so that each multiprocessor has as many bytes
// to read: at most `across` of them to a block. Columns are cut into stages of 256, which `deep` warps of each group take in
// turn. A warp's rows of its next stage come into shared memory while it multiplies those of this one, the first of them
// before the kernel in front has ended. The tokens' values of a stage are brought by one copy, as many ahead as there is
// room for: the last warp that leaves a stage asks for the next one there. Blocks of a cluster have the same groups and a
// part of the columns each (`splits`): in the end each adds up some of the rows, over all parts in order.
//
// Of a feed-forward's gate and up a group has eight rows each, and what is written is their activation, in F16.
#ifndef TE_CUDA_WIDE_GROUPS_CUH
#define TE_CUDA_WIDE_GROUPS_CUH

#include "activation.cuh"
#include "half_range.cuh"
#include "wide.cuh"
#include "wide_copies.cuh"
#include "wide_multiply.cuh"
#include "wide_place.cuh"

namespace te {

constexpr int GROUP_WARPS = 12, GROUP_THREADS = 32 * GROUP_WARPS;
constexpr int GROUP_DEEP = 2;    // warps of a group of rows, at most
constexpr int GROUP_SLOTS = 2;   // stages of a warp's rows in shared memory; with more on its way all were slower
constexpr int GROUP_STAGES = 12; // of the tokens' values, at most
constexpr int GROUP_COLS = 32 * WIDE_UNITS;
constexpr int GROUP_HEAD = 256;        // bytes in front of the stages: barriers, and how many have left
constexpr int GROUP_ROOM = 226 * 1024; // of a block of Hopper, which has 1 KB more for what kernels declare

// How a format's rows pass through shared memory, 16 rows and GROUP_COLS columns at a time:
//     pieces, slot             of 16 bytes, of a row; bytes of all rows
//     first(i, n), step(i)     where piece i of a row of n columns is, and bytes from there to the next GROUP_COLS'
//     there(i, k, n)           how many of its bytes are the row's, of the k-th GROUP_COLS
//     place(r, i)              where it is put, of row r
//     take(r, s, at, k, c, q)  what lane q of four holds (wide.cuh) of row `at`, of part c of the k-th GROUP_COLS
//     word_at(n), word_step    if it has `word`: four bytes more of a row, which are at a multiple of four
template <class C> struct grouped;

// Blocks of 32 columns: all of BYTES each, then all scales. Eight lanes at a time read two rows; of every other row the
// halves of 128 bytes have changed places, so that no two of these lanes want one bank.
template <class C, int BYTES> struct grouped_32 : wide<C> {
    static constexpr int quants = BYTES / 2, pieces = quants + 1, slot = 16 * 16 * pieces;
    static constexpr bool word = false;
    static __device__ __forceinline__ size_t first(int i, int n) {
        return i < quants ? 16 * (size_t)i : (size_t)(n / 32) * BYTES;
    }
    static __device__ __forceinline__ int step(int i) { return i < quants ? 8 * BYTES : 16; }
    static __device__ __forceinline__ int there(int i, int k, int n) {
        const int blocks = min(n / 32 - 8 * k, 8);
        return i < quants ? (16 * i < BYTES * blocks ? 16 : 0) : 2 * blocks;
    }
    static __device__ __forceinline__ int place(int r, int i) {
        return 16 * (i < quants ? r * quants + (i ^ r % 2 * 4) : 16 * quants + r);
    }
    static __device__ __forceinline__ void take(typename wide<C>::row &r, const uint8_t *s, int at, int, int c, int q) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int piece = 8 * c + 4 * i + q;
            r.q[i] = *(const uint4 *)(s + place(at, piece));
            r.d[i] = *(const uint16_t *)(s + place(at, quants) + piece * 16 / BYTES * 2);
        }
    }
};
template <> struct grouped<codec_q8_0> : grouped_32<codec_q8_0, 32> {};
template <> struct grouped<codec_q4_0> : grouped_32<codec_q4_0, 16> {};

template <bool FIVE> struct grouped<codec_k45<FIVE>> : wide<codec_k45<FIVE>> {
    typedef codec_k45<FIVE> codec;
    static constexpr int pieces = codec::bytes / 16, slot = 16 * codec::bytes;
    static constexpr bool word = false;
    static __device__ __forceinline__ size_t first(int i, int) { return 16 * (size_t)i; }
    static __device__ __forceinline__ int step(int) { return codec::bytes; }
    static __device__ __forceinline__ int there(int, int, int) { return 16; }
    static __device__ __forceinline__ int place(int r, int i) { return r * codec::bytes + 16 * i; }
    static __device__ __forceinline__ void take(typename wide<codec>::row &r, const uint8_t *s, int at, int, int,
                                                int q) {
        const uint8_t *b = s + place(at, 0);
        r.head = *(const uint4 *)b;
        r.shift = 2 * q;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            r.q[i] = *(const uint4 *)(b + codec::q_at + 32 * q + 16 * i);
            if (FIVE) r.high[FIVE ? i : 0] = *(const uint4 *)(b + codec::high_at + 16 * i);
        }
    }
};

// Of d there are two bytes: the word has those of two blocks.
template <> struct grouped<codec_q6_k> : wide<codec_q6_k> {
    typedef codec_q6_k codec;
    static constexpr int pieces = 13, of_row = 16 * pieces + 16, slot = 16 * of_row; // no two of 16 lanes in one bank
    static constexpr bool word = true;
    static constexpr int word_step = 2;
    static __device__ __forceinline__ size_t first(int i, int n) {
        const size_t nb = (size_t)n / 256;
        return i < 8 ? 16 * (size_t)i : i < 12 ? codec::high_at * nb + 16 * (size_t)(i - 8) : codec::scales_at * nb;
    }
    static __device__ __forceinline__ size_t word_at(int n) { return codec::d_at * ((size_t)n / 256); }
    static __device__ __forceinline__ int step(int i) { return i < 8 ? 128 : i < 12 ? 64 : 16; }
    static __device__ __forceinline__ int there(int, int, int) { return 16; }
    static __device__ __forceinline__ int place(int r, int i) { return r * of_row + 16 * i; }
    static __device__ __forceinline__ void take(row &r, const uint8_t *s, int at, int k, int c, int q) {
        const uint8_t *b = s + place(at, 0);
        r.a = *(const uint2 *)(b + 64 * c + 8 * q);
        r.b = *(const uint2 *)(b + 64 * c + 32 + 8 * q);
        r.high = *(const uint2 *)(b + 128 + 32 * c + 8 * q);
        r.scales = *(const uint2 *)(b + 192 + 8 * c);
        r.d = *(const uint16_t *)(b + 16 * pieces + 2 * (k % 2));
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
    static constexpr int MAX_SPLITS = 4; // blocks of a cluster
    const float *part; // [deep][tokens][ld]
    int ld, rows;      // rows: from one of `deep` to the next, in tokens
    int deep, splits;
    // Of token t and rows `at` to at + 3, over all parts in order.
    __device__ __forceinline__ float4 at(int t, int at) const {
        float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < GROUP_DEEP; k++) {
            if (k >= deep) break;
            const float *from = part + (k * rows + t) * ld + at;
            add(v, splits > 1 ? cluster_load4(from, 0) : *(const float4 *)from);
#pragma unroll
            for (int s = 1; s < MAX_SPLITS; s++)
                if (s < splits) add(v, cluster_load4(from, s));
        }
        return v;
    }
    static __device__ __forceinline__ void add(float4 &v, const float4 &f) {
        v = make_float4(v.x + f.x, v.y + f.y, v.z + f.z, v.w + f.w);
    }
};
// e / n, of small numbers.
struct group_divide {
    float by;
    int n;
    __device__ __forceinline__ explicit group_divide(int of) : by(1.0f / (float)of), n(of) {}
    __device__ __forceinline__ int quotient(int e) const { return (int)(((float)e + 0.5f) * by); }
};

// What blocks write in the end; of `splits` each its share. A thread has two places at a time, whose loads come together.
inline __device__ __noinline__ void group_write(const group_args &a, const group_sums &sums, int g0, int count,
                                                int split) {
    const int quads = 4 * count, from = quads * split / a.splits, n = quads * (split + 1) / a.splits - from,
              all = a.n_tok * n;
    const group_divide by(n);
    for (int e = threadIdx.x; e < all; e += 2 * blockDim.x) {
        float f[2][4], before[2][4] = {}, bias[2][4] = {};
        float *y[2];
        int there[2];
        bool relu[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int i = min(e + j * (int)blockDim.x, all - 1), t = by.quotient(i), at = 4 * (from + i - t * n),
                      group = g0 + at / 16;
            const wide_product &p = a.product[group_which(a, group)];
            const int r = 16 * (group - p.first) + at % 16;
            there[j] = e + j * (int)blockDim.x < all ? min(p.rows - r, 4) : 0;
            const float4 v = sums.at(t, at);
            const float scale = __ldcg(a.scale + t);
            f[j][0] = scale * v.x;
            f[j][1] = scale * v.y;
            f[j][2] = scale * v.z;
            f[j][3] = scale * v.w;
            y[j] = p.y + t * p.ldy + r;
            relu[j] = p.relu;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (p.bias && k < there[j]) bias[j][k] = __ldg(p.bias + r + k);
                if (p.add && k < there[j]) before[j][k] = __ldcg(p.add + t * p.ld_add + r + k);
            }
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                f[j][k] += bias[j][k];
                if (relu[j]) f[j][k] = fmaxf(f[j][k], 0);
                f[j][k] += before[j][k];
            }
            if (there[j] == 4) *(float4 *)y[j] = make_float4(f[j][0], f[j][1], f[j][2], f[j][3]);
#pragma unroll
            for (int k = 0; k < 3; k++)
                if (there[j] < 4 && k < there[j]) y[j][k] = f[j][k];
        }
    }
}

// The same of a feed-forward's gate and up: hidden values as floats, to act.up, and in F16. The block that is last looks
// whether a token's leave the range of F16, and makes those anew.
inline __device__ __noinline__ void group_activate(const group_args &a, const group_sums &sums, int g0, int count,
                                                   int split) {
    const te_cuda_act &c = a.act;
    __shared__ uint32_t most[TE_CUDA_WIDE_TOK], seen[2], is_last;
    __shared__ float scales[TE_CUDA_WIDE_TOK];
    if (threadIdx.x < 2) seen[threadIdx.x] = 0;
    for (int t = threadIdx.x; t < a.n_tok; t += blockDim.x) {
        most[t] = 0;
        scales[t] = __ldcg(a.scale + t);
    }
    __syncthreads();
    const int quads = 2 * count, from = quads * split / a.splits, n = quads * (split + 1) / a.splits - from;
    const group_divide by(n);
    uint32_t asked = 0, fired = 0;
    float *values = const_cast<float *>(c.up);
    for (int e = threadIdx.x; e < a.n_tok * n; e += blockDim.x) {
        const int t = by.quotient(e), quad = from + e - t * n, at = quad / 2 * 16 + quad % 2 * 4, j = 8 * g0 + 4 * quad;
        if (j >= c.n) continue;
        const float4 gate = sums.at(t, at), up = sums.at(t, at + 8);
        const float scale = scales[t], g[4] = {gate.x, gate.y, gate.z, gate.w}, u[4] = {up.x, up.y, up.z, up.w};
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
        const uint32_t bits = __float_as_uint(largest);
#if __CUDA_ARCH__ >= 800 // of those whose token is the first lane's, one does it: a warp has one or two tokens' mostly
        const unsigned here = __activemask(), first = (unsigned)__ffs((int)here) - 1;
        const int t0 = __shfl_sync(here, t, (int)first);
        const uint32_t of_first = __reduce_max_sync(here, t == t0 ? bits : 0);
        if (t != t0)
            atomicMax(most + t, bits);
        else if (threadIdx.x % 32 == first)
            atomicMax(most + t, of_first);
#else
        atomicMax(most + t, bits);
#endif
    }
    const int end = (c.n + 3) / 4 * 4, behind = ((int)c.to.ld - end) / 4;
    if (g0 + count == a.groups && split == 0)
        for (int e = threadIdx.x; e < a.n_tok * behind; e += blockDim.x)
            wide_put(c.to, e / behind, end + e % behind * 4, make_uint2(0, 0));
    if (c.counts) {
        asked = (uint32_t)warp_sum((float)asked); // whole numbers, and small ones
        fired = (uint32_t)warp_sum((float)fired);
        if (threadIdx.x % 32 == 0) {
            atomicAdd(seen, asked);
            atomicAdd(seen + 1, fired);
        }
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

// Bytes from device to shared memory in the background, and zeros up to SIZE.
template <int SIZE> __device__ __forceinline__ void group_fetch(void *to, const void *from, int n) {
#if __CUDA_ARCH__ >= 800
    if (SIZE == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(n)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(n)
                     : "memory");
#endif
}
// The same of 16 bytes that are there.
__device__ __forceinline__ void group_fetch(void *to, const void *from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
#endif
}
// Counts in shared memory; the old value is returned. What was done before is done for who counts later.
__device__ __forceinline__ int group_count(uint32_t *counter) {
    uint32_t old;
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                 : "=r"(old)
                 : "r"(shared_address(counter))
                 : "memory");
    return (int)old;
}

// TILES: of eight tokens; a number that the compiler knows.
template <class C, int TILES>
__global__ void __launch_bounds__(GROUP_THREADS, 1) group_kernel(const __grid_constant__ group_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef grouped<C> F;
    constexpr int UNIT = TILES * 32, ROOM = WIDE_UNITS * UNIT, UNITS = F::chunk / 32,
                  PIECES = (16 * F::pieces + 31) / 32; // of a lane
    extern __shared__ __align__(128) uint4 shared[];
    uint64_t *const full = (uint64_t *)shared;
    uint32_t *const left = (uint32_t *)(full + GROUP_STAGES); // warps that are done with the tokens' values there
    uint4 *const values = shared + GROUP_HEAD / 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    uint8_t *const rows = (uint8_t *)(values + a.stages * ROOM) + warp * GROUP_SLOTS * F::slot;
    const int split = (int)blockIdx.x % a.splits, block = (int)blockIdx.x / a.splits,
              blocks = (int)gridDim.x / a.splits, g0 = group_from(a, block, blocks),
              count = group_from(a, block + 1, blocks) - g0;
    const int all = (a.cols + GROUP_COLS - 1) / GROUP_COLS, c0 = all * split / a.splits,
              n_all = all * (split + 1) / a.splits - c0;
    // This warp's group, and its stages: each `deep`-th.
    const int own = warp % a.across, turn = warp / a.across, n = (n_all - turn + a.deep - 1) / a.deep;
    const bool works = own < count;
    const int group = g0 + min(own, count - 1), which = a.activates ? 0 : group_which(a, group);
    auto row = [&](int r) { // of 16; gate, then up
        const wide_product &p = a.product[a.activates ? 1 - r / 8 : which];
        const int at = a.activates ? 8 * group + r % 8 : 16 * (group - p.first) + r;
        return p.w + (size_t)min(at, p.rows - 1) * p.stride;
    };
    const uint8_t *from[PIECES], *word = row(lane % 16);
    int where[PIECES]; // in a slot, and from one stage to the next in a row
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int e = min(lane + 32 * i, 16 * F::pieces - 1), r = e / F::pieces, piece = e % F::pieces;
        from[i] = row(r) + F::first(piece, a.cols);
        where[i] = F::place(r, piece) | F::step(piece) << 16;
    }
    if constexpr (F::word) word += F::word_at(a.cols);
    auto slot = [&](int k) { return rows + k % GROUP_SLOTS * F::slot; };
    auto ask = [&](int k) { // for this warp's k-th stage
        const int c = c0 + turn + k * a.deep;
        uint8_t *to = slot(k);
        if (works && k < n) {
            const bool whole = GROUP_COLS * (c + 1) <= a.cols;
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                const int e = lane + 32 * i;
                if (e >= 16 * F::pieces) continue;
                uint8_t *piece = to + (where[i] & 0xffff);
                const uint8_t *at = from[i] + (size_t)(c * (where[i] >> 16));
                if (whole)
                    group_fetch(piece, at);
                else
                    group_fetch<16>(piece, at, F::there(e % F::pieces, c, a.cols));
            }
            if constexpr (F::word)
                if (lane < 16)
                    group_fetch<4>(to + F::place(lane, F::pieces), word + ((size_t)c * F::word_step & ~(size_t)3), 4);
        }
        fetches_end();
    };
    ask(0);
    const uint4 *x = a.x + (size_t)c0 * ROOM;
    auto bring = [&](int s) {
        uint64_t *b = full + s % a.stages;
        bar_expect(b, 16 * ROOM);
        bulk_copy(values + s % a.stages * ROOM, x + (size_t)s * ROOM, 16 * ROOM, b);
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < a.stages; s++) {
            bar_init(full + s, 1);
            left[s] = 0;
        }
        bars_ready();
    }
    __syncthreads();
    dep_go();
    dep_wait();
    if (threadIdx.x == 0)
        for (int s = 0; s < min(a.stages, n_all); s++) bring(s);
    __syncwarp();
    float sum[TILES][4] = {};
    int stage = turn, parity = 0; // `stages` is a multiple of `deep`
#pragma unroll 1
    for (int k = 0; k < n; k++) {
        fetches_wait<GROUP_SLOTS - 2>();
        __syncwarp();
        // One lane's, for then the compiler knows that it is the same in all, and keeps it where wgmma takes it from.
        const uint64_t tokens = wide_descriptor(__shfl_sync(~0u, shared_address(values + stage * ROOM), 0));
#pragma unroll
        for (int c = 0; c < WIDE_UNITS / UNITS; c++) {
            typename F::row r[2];
#pragma unroll
            for (int i = 0; i < 2; i++) F::take(r[i], slot(k), g + 8 * i, c0 + turn + k * a.deep, c, q);
            const typename F::scales s[2] = {F::scale_of(r[0], q), F::scale_of(r[1], q)};
            if (c == 0) {
                ask(k + 1); // where the rows before these were
                bar_wait(full + stage, parity);
            }
#pragma unroll
            for (int i = 0; i < UNITS; i += 2) {
                const uint4 w[2][2] = {{F::halves(r[0], s[0], i), F::halves(r[1], s[1], i)},
                                       {F::halves(r[0], s[0], i + 1), F::halves(r[1], s[1], i + 1)}};
                group_multiply(sum, w, tokens + (uint64_t)((c * UNITS + i) * UNIT));
                group_settle<1>();
            }
        }
        group_settle<0>(); // the stage is not read any more
        __syncwarp();
        if (lane == 0 && group_count(left + stage) == a.across - 1) {
            const int next = turn + k * a.deep + a.stages;
            left[stage] = 0;
            if (next < n_all) bring(next);
        }
        __syncwarp();
        stage += a.deep;
        if (stage < a.stages) continue;
        stage = turn;
        parity ^= 1;
    }
    fetches_wait<0>();
    __syncthreads(); // nobody reads stages any more
    float *part = (float *)values;
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
        cluster_leave();
        cluster_wait();
    }
#else
    __trap(); // code for another processor than the one that the host asked for
#endif
}

// Shared memory of a kernel: stages of tokens' values and slots of rows, and in the end sums.
constexpr size_t group_smem(int tiles, int slot, int across, int deep, int stages) {
    const size_t all = (size_t)(stages * WIDE_UNITS * 512 * tiles + across * deep * GROUP_SLOTS * slot),
                 part = sizeof(float) * (size_t)(deep * 8 * tiles * (16 * across + 4));
    return GROUP_HEAD + (all > part ? all : part);
}

// Of a format: its words, bytes of a warp's rows, and a kernel for each number of tiles.
constexpr int GROUP_KERNELS = 7;
constexpr int group_tiles[GROUP_KERNELS] = {2, 3, 4, 5, 6, 7, 8};
struct group_kernels {
    int words, slot;
    void (*run[GROUP_KERNELS])(group_args);
};
template <class C> struct group_of {
    // Of most tokens a stage for each of a group's warps has room.
    static_assert(group_smem(8, grouped<C>::slot, GROUP_WARPS, 1, 1) <= GROUP_ROOM &&
                      group_smem(8, grouped<C>::slot, GROUP_WARPS / GROUP_DEEP, GROUP_DEEP, GROUP_DEEP) <= GROUP_ROOM,
                  "rows of this format leave no room for tokens");
    static constexpr group_kernels kernels = {wide<C>::words,
                                              grouped<C>::slot,
                                              {group_kernel<C, 2>, group_kernel<C, 3>, group_kernel<C, 4>,
                                               group_kernel<C, 5>, group_kernel<C, 6>, group_kernel<C, 7>,
                                               group_kernel<C, 8>}};
};
const group_kernels *groups_32(int type);
const group_kernels *groups_k(int type);

} // namespace te
#endif
