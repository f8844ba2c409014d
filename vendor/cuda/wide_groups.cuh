// wide_groups.cuh - products of 9 to 128 tokens with quantised matrices on Hopper, whose wgmma lets four warps multiply
// together, with tokens' values where they are in shared memory: weights become F16 in registers while it does.
//
// A warp has a group of 16 rows and all tokens. A block has `each` groups of one product. Columns are cut into stages of 256,
// which `deep` warps of each group take in turn. One more warp brings the rows of stages into a ring, by copies of the
// hardware of all of a block's rows at once, the first of them before the kernel in front has ended; another one brings the
// tokens' values into a ring of their own. Blocks of a cluster have the same groups and a part of the columns each
// (`splits`): in the end each adds up some of the rows, over all parts in order.
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
#include "wide_rows.cuh"

namespace te {

constexpr int GROUP_WARPS = 12, GROUP_THREADS = 32 * GROUP_WARPS;
constexpr int GROUP_DEEP = 2;           // warps of a group of rows, at most
constexpr int GROUP_STAGES = 16;        // of rows and of the tokens' values, at most
constexpr int GROUP_AHEAD = 112 * 1024; // bytes of rows on their way, about
// In how many steps the tokens' values of GROUP_COLS columns come: of more tokens there is no room for several stages else.
__host__ __device__ constexpr int group_steps(int tiles) { return tiles > 11 ? 2 : 1; }
// Where lanes keep where they find rows in a stage, instead of working it out for each, and blocks ask early for what they add
// to: with 49 to 64 tokens a layer's products so take 71.1 and 74.8 us, 71.8 and 75.6 without. With fewer they take up to 1.2 us
// more, by what the compiler makes of a stage.
__host__ __device__ constexpr bool group_keeps(int tiles) { return tiles == 7 || tiles == 8; }
constexpr int GROUP_HEAD = 1024;       // stages begin at multiples of this; as much is in front of them, for barriers
constexpr int GROUP_ROOM = 225 * 1024; // of a block of Hopper, which has 2 KB more for what kernels declare
constexpr int GROUP_TOK = 128;         // tokens, at most
constexpr int GROUP_KERNELS = GROUP_TOK / 8 - 1; // of 2, 3, ... tiles of eight tokens
// Tokens that a kernel of so many tiles has room for in its end: one of two numbers, for each is code of its own.
__host__ __device__ constexpr int group_room(int tiles) {
    return 8 * tiles <= TE_CUDA_WIDE_TOK ? (int)TE_CUDA_WIDE_TOK : GROUP_TOK;
}

struct group_args {
    const uint4 *x;
    const float *scale; // of each token
    int n_tok, cols, n_products, groups;
    int each, across, deep, splits, stages, slots; // of a group_kernel each: groups of a block, slots: stages of rows
    bool activates;                                // product 0 is up, 1 is gate
    wide_product product[TE_MAX_PRODUCTS];         // first: its first group
    te_cuda_act act;
    uint32_t *counter; // n_tok + 1, which are 0
};
__device__ __forceinline__ int group_which(const group_args &a, int group) {
    int i = 0;
    while (i + 1 < a.n_products && group >= a.product[i + 1].first) i++;
    return i;
}

// Where a block's sums are, and whose they are.
template <int MOST = 4> // blocks of a cluster, at most
struct group_sums {
    const float *part; // [deep][tokens][ld]
    int ld, rows;      // rows: from one of `deep` to the next, in tokens
    int deep, splits;
    const float *scale; // of each token, shared
    // Of token t and rows `at` to at + 3, over all parts in order.
    __device__ __forceinline__ float4 at(int t, int at) const {
        if (deep == 1 && splits == 1) return *(const float4 *)(part + t * ld + at);
        float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < GROUP_DEEP; k++) {
            if (k >= deep) break;
            const float *from = part + (k * rows + t) * ld + at;
            add(v, splits > 1 ? cluster_load4(from, 0) : *(const float4 *)from);
#pragma unroll
            for (int s = 1; s < MOST; s++)
                if (s < splits) add(v, cluster_load4(from, s));
        }
        return v;
    }
    static __device__ __forceinline__ void add(float4 &v, const float4 &f) {
        v = make_float4(v.x + f.x, v.y + f.y, v.z + f.z, v.w + f.w);
    }
};
// The tokens' scales on their way to shared memory, behind dep_wait: long before they are needed.
__device__ __forceinline__ void group_scales(const group_args &a, float *to) {
    for (int t = threadIdx.x; t < a.n_tok; t += blockDim.x) to[t] = __ldcg(a.scale + t);
}
// e / n, of small numbers.
struct group_divide {
    float by;
    int n;
    __device__ __forceinline__ explicit group_divide(int of) : by(1.0f / (float)of), n(of) {}
    __device__ __forceinline__ int quotient(int e) const { return (int)(((float)e + 0.5f) * by); }
};

// 1 / x, to a last place of a float (2^-23), of which F16 keeps 2^-11; a division has some ten instructions more.
__device__ __forceinline__ float group_reciprocal(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What blocks write in the end; of `splits` each its share. A thread has some places at a time, whose loads come together: the
// smallest blocks (four groups, two warps of each) then write what they have of up to 40 * PLACES tokens in one turn.
__host__ __device__ constexpr int group_places(int tiles) { return tiles > 15 ? 4 : tiles > 10 ? 3 : 2; }
// EARLY: what they are added to and biases of the first places are on their way while the block waits for others' sums, which
// is `meet`; else the block has met before.
template <int PLACES, bool EARLY = false, int MOST, class F = int>
__device__ __forceinline__ void group_write(const group_args &a, const group_sums<MOST> &sums, int g0, int count,
                                            int split, F meet = 0) {
    const int quads = 4 * count, from = quads * split / a.splits, n = quads * (split + 1) / a.splits - from,
              all = a.n_tok * n;
    if constexpr (EARLY) {
        if (all == 0) {
            meet();
            return;
        }
    }
    const group_divide by(n);
    const wide_product &p = a.product[group_which(a, g0)]; // of all of them
    bool met = !EARLY;
    for (int e = threadIdx.x; e < all || !met; e += PLACES * blockDim.x) {
        float f[PLACES][4], before[PLACES][4] = {}, bias[PLACES][4] = {};
        float *y[PLACES];
        int there[PLACES], t[PLACES], at[PLACES];
        auto take = [&](float (&to)[4], int token, int row) {
            const float4 v = sums.at(token, row);
            const float scale = sums.scale[token];
            to[0] = scale * v.x;
            to[1] = scale * v.y;
            to[2] = scale * v.z;
            to[3] = scale * v.w;
        };
#pragma unroll
        for (int j = 0; j < PLACES; j++) {
            const int i = min(e + j * (int)blockDim.x, all - 1);
            t[j] = by.quotient(i);
            at[j] = 4 * (from + i - t[j] * n);
            const int r = 16 * (g0 - p.first) + at[j];
            there[j] = e + j * (int)blockDim.x < all ? min(p.rows - r, 4) : 0;
            if (!EARLY) take(f[j], t[j], at[j]);
            y[j] = p.y + t[j] * p.ldy + r;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (p.bias && k < there[j]) bias[j][k] = __ldg(p.bias + r + k);
                if (p.add && k < there[j]) before[j][k] = __ldcg(p.add + t[j] * p.ld_add + r + k);
            }
        }
        if constexpr (EARLY) {
            if (!met) meet();
            met = true;
#pragma unroll
            for (int j = 0; j < PLACES; j++) take(f[j], t[j], at[j]);
        }
#pragma unroll
        for (int j = 0; j < PLACES; j++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                f[j][k] += bias[j][k];
                if (p.relu) f[j][k] = fmaxf(f[j][k], 0);
                f[j][k] += before[j][k];
            }
            if (there[j] == 4) *(float4 *)y[j] = make_float4(f[j][0], f[j][1], f[j][2], f[j][3]);
#pragma unroll
            for (int k = 0; k < 3; k++)
                if (there[j] < 4 && k < there[j]) y[j][k] = f[j][k];
        }
    }
}

// Counts a block that is done, and, above GROUP_DONE (blocks, at most), one of those that are odd. What it wrote before is
// seen by who counts later. How many there are.
constexpr uint32_t GROUP_DONE = 0xffff;
__device__ __forceinline__ uint32_t group_count(uint32_t *counter, bool odd) {
    const uint32_t one = 1 + odd * (GROUP_DONE + 1);
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(one) : "memory");
    return old + one;
}

// The same of a feed-forward's gate and up: hidden values as floats, to act.up, and in F16. Nearly always each token's largest
// is in the range of F16. A block in which one's is not is odd; only such blocks say how large they are. (One without work is
// odd, too: its largest are 0.) The block that is last makes the values of tokens that leave the range anew. Where none is odd
// nobody has said anything, and all fit. TOK: tokens that there is room for.
template <int TOK>
__device__ __forceinline__ void group_activate(const group_args &a, const group_sums<> &sums, int g0, int count,
                                               int split) {
    const te_cuda_act &c = a.act;
    __shared__ uint32_t most[TOK], seen[2], done;
    if (threadIdx.x < 2) seen[threadIdx.x] = 0;
    for (int t = threadIdx.x; t < a.n_tok; t += blockDim.x) most[t] = 0;
    __syncthreads();
    const int quads = 2 * count, from = quads * split / a.splits, n = quads * (split + 1) / a.splits - from;
    const group_divide by(n);
    uint32_t asked = 0, fired = 0;
    float *values = const_cast<float *>(c.up);
    // Of a tile of eight tokens lanes beside each other have the same quad: what they write is in one line.
    for (int e = threadIdx.x; e < (a.n_tok + 7) / 8 * 8 * n; e += blockDim.x) {
        const int tile = by.quotient(e / 8), t = 8 * tile + e % 8, quad = from + e / 8 - tile * n,
                  at = quad / 2 * 16 + quad % 2 * 4, j = 8 * g0 + 4 * quad;
        if (t >= a.n_tok) continue;
        if (j >= c.n) continue;
        const float4 gate = sums.at(t, at), up = sums.at(t, at + 8);
        const float scale = sums.scale[t];
        const float g[4] = {scale * gate.x, scale * gate.y, scale * gate.z, scale * gate.w};
        // What few models have is asked for once for all values: these were 380 instructions, of which most did nothing.
        float u[4] = {scale * up.x, scale * up.y, scale * up.z, scale * up.w}, h[4], largest = 0;
        if (c.up_bias) {
            const float v[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
            for (int i = 0; i < 4; i++) u[i] = fmaf(scale, v[i], j + i < c.n ? __ldg(c.up_bias + j + i) : 0);
        }
        if (c.act == TE_SILU) { // most models': asked once, and not for each value what it is
#pragma unroll
            for (int i = 0; i < 4; i++) h[i] = g[i] * group_reciprocal(1 + expf(-g[i])) * u[i];
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) h[i] = gated_value(c.act, activate(c.act, c.threshold, g[i]), u[i]);
        }
        if (j + 4 > c.n) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (j + i >= c.n) h[i] = 0;
        }
        if (c.counts || c.fired) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                asked += j + i < c.n;
                fired += h[i] != 0;
                if (c.fired && h[i] != 0) atomicAdd(c.fired + j + i, 1u);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(h[i]));
        *(float4 *)(values + t * c.ld_up + j) = make_float4(h[0], h[1], h[2], h[3]);
        wide_put(c.to, t, j, make_uint2(half2_of(h[0], h[1]), half2_of(h[2], h[3])));
        atomicMax(most + t, __float_as_uint(largest));
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
    int odd = 0;
    for (int t = threadIdx.x; t < a.n_tok; t += blockDim.x) odd |= !half_fits(__uint_as_float(most[t]));
    odd = __syncthreads_or(odd);
    // What is counted orders all that the block has written: no fence of every thread.
    if (threadIdx.x < 32) {
        for (int t = threadIdx.x; odd && t < a.n_tok; t += 32) atomicMax(a.counter + 1 + t, most[t]);
        __syncwarp();
        if (threadIdx.x == 0) done = group_count(a.counter, odd);
    } else if (c.counts && threadIdx.x < 35) {
        atomicAdd(c.counts + threadIdx.x - 32, seen[(threadIdx.x - 32) / 2]);
    }
    __syncthreads();
    if ((done & GROUP_DONE) != gridDim.x) return;
    const uint32_t n_odd = done / (GROUP_DONE + 1);
    if (threadIdx.x == 0) a.counter[0] = 0;
    int out = 0; // whether a token's are out of range
    for (int t = threadIdx.x; t < a.n_tok; t += blockDim.x) {
        const float largest = n_odd ? __uint_as_float(atomicExch(a.counter + 1 + t, 0u)) : 0;
        // Where it is small, and not all blocks said so, another one has a larger one that fits.
        const int e = n_odd == gridDim.x || largest > HALF_MOST ? half_exponent(largest) : 0;
        c.to.scale[t] = ldexpf(1, e);
        most[t] = (uint32_t)e;
        out |= e;
    }
    if (!__syncthreads_or(out)) return;
    for (int t = 0; t < a.n_tok; t++) {
        if (!most[t]) continue;
        const float by = ldexpf(1, -(int)most[t]);
        for (int j = 4 * threadIdx.x; j < end; j += 4 * blockDim.x) {
            const float4 v = __ldcg((const float4 *)(values + t * c.ld_up + j));
            wide_put(c.to, t, j, make_uint2(half2_of(v.x * by, v.y * by), half2_of(v.z * by, v.w * by)));
        }
    }
}

constexpr int GROUP_PARTS = 4;
struct group_job {
    ring_map map[TE_MAX_PRODUCTS][GROUP_PARTS];
    group_args of;
};
// Bytes of a stage of rows.
__host__ __device__ constexpr int group_slot(int each, int row_bytes) {
    return (16 * each * row_bytes + GROUP_HEAD - 1) / GROUP_HEAD * GROUP_HEAD;
}

// TILES: of eight tokens; a number that the compiler knows.
template <class C, int TILES>
__global__ void __launch_bounds__(GROUP_THREADS + 64, 1) group_kernel(const __grid_constant__ group_job job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef grouped<C> F;
    const group_args &a = job.of;
    constexpr int STEPS = group_steps(TILES), UNIT = TILES * 32, UNITS = F::chunk / 32, X_UNITS = WIDE_UNITS / STEPS,
                  ROOM = X_UNITS * UNIT; // of a stage of the tokens' values
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float scales[8 * TILES];
    uint8_t *const head = shared + (GROUP_HEAD - shared_address(shared) % GROUP_HEAD) % GROUP_HEAD;
    uint64_t *const rows_there = (uint64_t *)head, *const rows_left = rows_there + GROUP_STAGES,
                    *const there = rows_left + GROUP_STAGES, *const left = there + GROUP_STAGES;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = lane / 4, q = lane % 4;
    const int n_rows = 16 * a.each, slot_bytes = group_slot(a.each, F::row_bytes);
    uint8_t *const rows = head + GROUP_HEAD;
    uint4 *const values = (uint4 *)(rows + a.slots * slot_bytes);
    const int split = (int)blockIdx.x % a.splits, g0 = (int)blockIdx.x / a.splits * a.each,
              which = a.activates ? 0 : group_which(a, g0);
    const wide_product &p = a.product[which];
    const int count = min(a.each, (a.activates ? a.groups : p.first + (p.rows + 15) / 16) - g0);
    const int all = (a.cols + GROUP_COLS - 1) / GROUP_COLS, c0 = all * split / a.splits,
              n_all = all * (split + 1) / a.splits - c0;
    // This warp's group, and its stages: each `deep`-th.
    const int own = warp % a.across, turn = warp / a.across, workers = a.across * a.deep;
    if (threadIdx.x == 0) {
        for (int s = 0; s < a.slots; s++) {
            bar_init(rows_there + s, 1);
            bar_init(rows_left + s, a.across);
        }
        for (int s = 0; s < a.stages; s++) {
            bar_init(there + s, 1);
            bar_init(left + s, a.across);
        }
        bars_ready();
    }
    __syncthreads();
    dep_go();
    float sum[TILES][4] = {};
    if (warp == workers) { // brings rows
        const int r = a.activates ? 8 * g0 : 16 * (g0 - p.first);
        int slot = 0, parity = 1;
        if (lane == 0)
#pragma unroll 1
            for (int s = 0; s < n_all; s++) {
                bar_wait(rows_left + slot, parity);
                bar_expect(rows_there + slot, n_rows * F::row_bytes);
                uint32_t to = shared_address(rows + slot * slot_bytes);
#pragma unroll
                for (int i = 0; i < F::parts; i++) {
                    const int c = F::place(i, c0 + s), n_bytes = n_rows * F::width(i);
                    if (a.activates) // gate, then up
                        ring_copy_rows(to + (uint32_t)n_bytes / 2, &job.map[0][i], c, r, rows_there + slot);
                    ring_copy_rows(to, &job.map[a.activates ? 1 : which][i], c, r, rows_there + slot);
                    to += (uint32_t)n_bytes;
                }
                if (++slot < a.slots) continue;
                slot = 0;
                parity ^= 1;
            }
        dep_wait();
    } else if (warp > workers) { // brings the tokens' values
        dep_wait();
        const uint4 *x = a.x + (size_t)(c0 * STEPS) * ROOM;
        int slot = 0, parity = 1;
        if (lane == 0)
#pragma unroll 1
            for (int s = 0; s < STEPS * n_all; s++) {
                bar_wait(left + slot, parity);
                bar_expect(there + slot, 16 * ROOM);
                bulk_copy(values + slot * ROOM, x + (size_t)s * ROOM, 16 * ROOM, there + slot);
                if (++slot < a.stages) continue;
                slot = 0;
                parity ^= 1;
            }
    } else {
        dep_wait();
        group_scales(a, scales);
        // Its first row, and from there to the eighth.
        const int row = (a.activates ? 8 : 16) * min(own, a.each - 1) + F::row_of(g),
                  further = a.activates ? 8 * a.each : 8;
        // Known by exchange alone, so that the compiler does not work them out anew for each stage: that was 35 of its 390
        // instructions.
        uint32_t places[2][F::places];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            F::places_of(places[i], n_rows, row + i * further, q);
#pragma unroll
            for (int j = 0; group_keeps(TILES) && j < F::places; j++)
                places[i][j] = __shfl_sync(~0u, places[i][j], lane);
        }
        // Of both there is a multiple of `deep`, of stages of STEPS as many.
        int slot = turn, parity = 0, stage = STEPS * turn, stage_parity = 0;
#pragma unroll 1
        for (int k = turn; k < n_all; k += a.deep) {
            // One lane's, for then the compiler knows that it is the same in all, and keeps it where wgmma takes it from.
            const uint64_t tokens = wide_descriptor(__shfl_sync(~0u, shared_address(values + stage * ROOM), 0));
            bar_wait(rows_there + slot, parity);
#pragma unroll
            for (int c = 0; c < WIDE_UNITS / UNITS; c++) {
                typename F::row r[2];
#pragma unroll
                for (int i = 0; i < 2; i++) F::take_at(r[i], rows + slot * slot_bytes, places[i], n_rows, c0 + k, c, q);
                const typename F::scales s[2] = {F::scale_of(r[0], q), F::scale_of(r[1], q)};
#pragma unroll
                for (int i = 0; i < UNITS; i += 2) {
                    const int u = c * UNITS + i;
                    if (u % X_UNITS == 0) bar_wait(there + stage + u / X_UNITS, stage_parity);
                    const uint4 w[2][2] = {{F::halves(r[0], s[0], i), F::halves(r[1], s[1], i)},
                                           {F::halves(r[0], s[0], i + 1), F::halves(r[1], s[1], i + 1)}};
                    group_multiply(sum, w, tokens + (uint64_t)(u * UNIT));
                    group_settle<1>();
                    if (u && u % X_UNITS == 0) { // the values in front are not read any more
                        __syncwarp();
                        if (lane == 0) bar_arrive(left + stage + u / X_UNITS - 1);
                    }
                }
            }
            group_settle<0>(); // the stage is not read any more
            __syncwarp();
            if (lane == 0) {
                bar_arrive(rows_left + slot);
                bar_arrive(left + stage + STEPS - 1);
            }
            slot += a.deep;
            if (slot >= a.slots) {
                slot = turn;
                parity ^= 1;
            }
            stage += STEPS * a.deep;
            if (stage >= a.stages) {
                stage = STEPS * turn;
                stage_parity ^= 1;
            }
        }
    }
    __syncthreads(); // nobody reads stages any more
    float *part = (float *)rows;
    const group_sums<> sums = {part, 16 * a.across + 4, 8 * TILES, a.deep, a.splits, scales};
    if (warp < workers && own < count) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                part[(turn * sums.rows + 8 * t + 2 * q + i % 2) * sums.ld + 16 * own + F::row_of(g) + i / 2 * 8] =
                    sum[t][i];
    }
    auto meet = [&] {
        if (a.splits > 1) {
            cluster_share();
            cluster_wait();
        } else {
            __syncthreads();
        }
    };
    if (a.activates) {
        meet();
        group_activate<group_room(TILES)>(a, sums, g0, count, split);
    } else if constexpr (group_keeps(TILES)) {
        group_write<group_places(TILES), true>(a, sums, g0, count, split, meet);
    } else {
        meet();
        group_write<group_places(TILES)>(a, sums, g0, count, split);
    }
    if (a.splits > 1) { // others read this block's sums
        cluster_leave();
        cluster_wait();
    }
#else
    __trap(); // code for another processor than the one that the host asked for
#endif
}

// Shared memory of a kernel: slots of rows and stages of tokens' values, and in the end sums.
constexpr size_t group_smem(int tiles, int row_bytes, int each, int across, int deep, int slots, int stages) {
    const size_t all = (size_t)(slots * group_slot(each, row_bytes) +
                                stages * (WIDE_UNITS / group_steps(tiles)) * 512 * tiles),
                 part = sizeof(float) * (size_t)(deep * 8 * tiles * (16 * across + 4));
    return 2 * GROUP_HEAD + (all > part ? all : part);
}

// Groups of a block, at most: one stage of rows and of the tokens' values comes while another is multiplied.
constexpr int group_most(int tiles, int row_bytes) {
    int each = GROUP_WARPS;
    while (each > 0 && group_smem(tiles, row_bytes, each, GROUP_WARPS, 1, 2, 2 * group_steps(tiles)) > GROUP_ROOM)
        each--;
    return each;
}

// Of a format: its words, how its rows are copied, and a kernel for each number of tiles.
struct group_part {
    int width;
    size_t at, length;
};
struct group_kernels {
    int words, row_bytes, parts;
    group_part (*part)(int i, int cols);
    void (*run[GROUP_KERNELS])(group_job);
};
template <class C> struct group_of {
    // Of most tokens a stage for each of a group's warps has room; groups come in fours.
    static_assert(group_most(GROUP_TOK / 8, grouped<C>::row_bytes) > GROUP_WARPS - 4 &&
                      group_smem(GROUP_TOK / 8, grouped<C>::row_bytes, GROUP_WARPS / GROUP_DEEP / 4 * 4,
                                 GROUP_WARPS / GROUP_DEEP / 4 * 4, GROUP_DEEP, GROUP_DEEP,
                                 2 * GROUP_DEEP) <= GROUP_ROOM,
                  "rows of this format leave no room for tokens");
    static group_part part(int i, int cols) {
        return {grouped<C>::width(i), grouped<C>::at(i, (size_t)cols), grouped<C>::length(i, (size_t)cols)};
    }
    static constexpr group_kernels kernels = {
        wide<C>::words,
        grouped<C>::row_bytes,
        grouped<C>::parts,
        part,
        {group_kernel<C, 2>, group_kernel<C, 3>, group_kernel<C, 4>, group_kernel<C, 5>, group_kernel<C, 6>,
         group_kernel<C, 7>, group_kernel<C, 8>, group_kernel<C, 9>, group_kernel<C, 10>, group_kernel<C, 11>,
         group_kernel<C, 12>, group_kernel<C, 13>, group_kernel<C, 14>, group_kernel<C, 15>, group_kernel<C, 16>}};
};
const group_kernels *groups_32(int type);
const group_kernels *groups_k(int type);

} // namespace te
#endif
