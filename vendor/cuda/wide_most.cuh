// wide_most.cuh - products of most tokens on Hopper, 193 to 256 with F16 and, of quantised matrices by neuron, 145 to 256: sums
// of so many leave a warp no registers to unpack in, so some warps unpack into shared memory, and others multiply what is there.
//
// A block has `n` results of each token. Of its warps four unpack, and bring what they unpack (of F16 it is brought as it is)
// and the tokens' values; three or two teams of four multiply, 64 or 128 tokens each. wgmma takes tokens as its rows, and
// results as its columns, of which any number of eights is possible. A step is 64 of the columns that are added up.
//
// As in wide_many.cuh two blocks with other rows bring the tokens' values together, or some split the columns of the same rows.
#ifndef TE_CUDA_WIDE_MOST_CUH
#define TE_CUDA_WIDE_MOST_CUH

#include "wide_many.cuh"
#include "wide_neurons.cuh"
#include "wide_ring.cuh"

namespace te {

constexpr int MOST_UNITS = 2, MOST_COLS = 32 * MOST_UNITS; // a step
constexpr int MOST_UNPACK = 4;                             // warps
// Teams of four warps that multiply: three with 64 tokens each, or two with twice as many.
__host__ __device__ constexpr int most_blocks(int teams) { return teams > 2 ? 1 : 2; } // of 64
__host__ __device__ constexpr int most_tokens(int teams) { return 64 * teams * most_blocks(teams); }
constexpr int MOST_TOK = most_tokens(2);
__host__ __device__ constexpr int most_threads(int teams) { return 128 * teams + 32 * MOST_UNPACK; }
// Registers of a thread at first, and of those that unpack and of the others while these multiply.
__host__ __device__ constexpr int most_registers(int teams) { return 65536 / most_threads(teams) / 8 * 8; }
constexpr int MOST_FEW = 56;
__host__ __device__ constexpr int most_more(int teams) {
    return ((teams + 1) * most_registers(teams) - MOST_FEW) / teams / 8 * 8;
}

struct most_job {
    group_job of;
    int shares;  // blocks that bring the tokens' values together
    int x_tiles; // of the input
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// What threads have written to shared memory is seen by wgmma of others that they tell.
__device__ __forceinline__ void most_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Rows may be read before or behind it: no clobber, for else each eight rows would wait for those in front.
__device__ __forceinline__ void most_put(uint32_t to, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v));
}
// All of the four warps that unpack, and all of a block.
__device__ __forceinline__ void most_unpacked() { asm volatile("bar.sync 3, %0;" ::"n"(32 * MOST_UNPACK) : "memory"); }
template <int TEAMS> __device__ __forceinline__ void most_meet() {
    __syncwarp();
    asm volatile("bar.sync 2, %0;" ::"n"(most_threads(TEAMS)) : "memory");
}
// d += A * B of 64 tokens and 64 results, of which a tile has 64 of each column.
__device__ __forceinline__ void most_across(float (&d)[8][4], uint64_t x, uint64_t rows) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WIDE_SUMS_8 "}, %32, %33, 1, 1, 1, 0, 1;"
                 : WIDE_TILES_8
                 : "l"(x), "l"(rows));
}
#endif

// Where a block is.
struct most_place {
    const group_job &job;
    int which, g0, r; // product, first group, first row
};

// What is multiplied:
//     n                          results of a block
//     slot                       bytes of a step of rows as they are, 0 if they are multiplied so
//     room                       shared memory besides
//     bring(p, k, to, there)     asks for step k
//     unpack(p, s, to, room, warp)   what is at s, by one of four warps
//     rows(at), next(i)          how wgmma finds a step, and from there columns 16 * i on
//     multiply(d, x, w)          with 64 tokens
//     result(a, t, q), apart     which of a block's the first of a lane's two sums of tile t is, and from there to the other

// Rows of F16, as wide_ring.cuh has them in shared memory. TRANSPOSED: 64 results.
template <int EACH, bool TRANSPOSED> struct most_floats {
    static_assert(EACH == 4 || !TRANSPOSED, "a tile of 64 results");
    struct room {};
    static constexpr int n = 16 * EACH, slot = 0, apart = 1;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    static __device__ __forceinline__ void bring(const most_place &p, int k, uint32_t to, uint64_t *there) {
        const int c = k * RING_TILE, bytes = n * 2 * RING_TILE;
        bar_expect(there, bytes);
        if (TRANSPOSED) {
            ring_copy_rows(to, &p.job.map[p.which][0], p.r, c, there);
            return;
        }
        const bool activates = p.job.of.activates; // gate and up, or the first and the second half
        ring_copy_rows(to, &p.job.map[activates ? 1 : p.which][0], c, p.r, there);
        ring_copy_rows(to + bytes / 2, &p.job.map[p.which][0], c, activates ? p.r : p.r + n / 2, there);
    }
    static __device__ __forceinline__ uint64_t rows(uint32_t at) { return ring_descriptor(at); }
    static constexpr __device__ int next(int i) { return i * (TRANSPOSED ? 16 * 128 : 32); }
    static __device__ __forceinline__ void multiply(float (&d)[2 * EACH][4], uint64_t x, uint64_t w) {
        if constexpr (TRANSPOSED)
            most_across(d, x, w);
        else
            ring_wgmma<false>(d, x, w);
    }
    static __device__ __forceinline__ int result(const group_args &a, int t, int q) {
        if (a.activates) t = t < EACH ? 2 * t : 2 * (t - EACH) + 1; // eight of gate and up in turn
        return 8 * t + 2 * q;
    }
#endif
};

// Results of a quantised matrix by neuron: half of what blocks of wide_neurons.cuh have. Each warp that unpacks has 32.
template <class C> struct most_neurons {
    typedef by_neuron<C> F;
    static constexpr int ROWS = MOST_COLS, n = 32 * MOST_UNPACK, slot = ROWS * neuron_bytes<C>(), apart = 2;
    static_assert(2 * n == NEURON_OUTPUTS && slot % RING_BEGIN == 0, "stages begin at any address");
    struct room {
        uint4 factors[MOST_UNPACK][MOST_UNITS][4 * F::factors]; // as wide_neurons.cuh's
    };
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    static __device__ __forceinline__ void bring(const most_place &p, int k, uint32_t to, uint64_t *there) {
        bar_expect(there, slot);
#pragma unroll
        for (int i = 0; i < F::n_boxes; i++) {
            const int at = p.g0 / (NEURON_OUTPUTS / 16) * (NEURON_OUTPUTS / F::weights) * F::box(i).bytes / 16 * 16;
            ring_copy_rows(to, &p.job.map[0][i], F::box(i).first + at, k * ROWS, there);
            to += (uint32_t)(ROWS * F::box(i).width);
        }
    }
    static __device__ __forceinline__ void unpack(const most_place &p, const uint8_t *s, uint32_t to, room &room,
                                                  int warp) {
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, block = p.g0 / (NEURON_OUTPUTS / 16),
                  c = p.g0 / (n / 16) % 2 * MOST_UNPACK + warp;
        const neuron_nibbles half[2] = {{0, F::offset}, {1, F::offset}};
        uint16_t *const put = (uint16_t *)room.factors[warp] + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
        __syncwarp(); // factors of the step in front have been read
#pragma unroll
        for (int u = 0; u < MOST_UNITS; u++) {
            uint16_t own[F::factors];
            F::template factor<ROWS>(s, 32 * u + lane, c, block, own);
#pragma unroll
            for (int f = 0; f < F::factors; f++) put[(u * F::factors + f) * 32] = own[f];
        }
        __syncwarp();
        to += (uint32_t)(16 * g + 4 * q);
#pragma unroll
        for (int u = 0; u < MOST_UNITS; u++) {
            uint32_t w[F::words][4];
            F::template load<ROWS>(w, s, 32 * u + lane, c);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint4 by = room.factors[warp][u][(F::factors > 1 ? 4 * h : 0) + q];
                uint4 low = {};
                if (F::factors == 4) low = room.factors[warp][u][4 * (2 + h) + q];
#pragma unroll
                for (int k = 0; k < 4; k++) { // eight rows
                    uint32_t of[F::words];
#pragma unroll
                    for (int m = 0; m < F::words; m++) of[m] = w[m][k];
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        __half2 v = F::value(of, j, c, h, half[h]);
                        const __half2 d = neuron_half2(word_of(by, k));
                        v = F::factors == 4 ? __hfma2(v, d, neuron_half2(word_of(low, k))) : __hmul2(v, d);
                        most_put(to + (uint32_t)(512 * (u * n / 8 + 4 * warp + 2 * h + j) + 128 * k),
                                 *reinterpret_cast<const uint32_t *>(&v));
                    }
                }
            }
        }
    }
    static __device__ __forceinline__ uint64_t rows(uint32_t at) { return wide_descriptor(at); }
    static constexpr __device__ int next(int i) { return i / 2 * n * 64 + i % 2 * 256; }
    static __device__ __forceinline__ void multiply(float (&d)[n / 8][4], uint64_t x, uint64_t w) {
        ring_wgmma<false>(d, x, w);
    }
    static __device__ __forceinline__ int result(const group_args &, int t, int q) {
        return F::output(t / 4) + t / 2 % 2 * F::apart + 4 * q + t % 2;
    }
#endif
};

// Stages in shared memory: of the tokens' values and of what is multiplied, a step each, and of rows as they are.
struct most_ring {
    int x, w, slots;
};
constexpr int MOST_STAGES = 8; // of each, at most
// Bytes of a step.
__host__ __device__ constexpr int most_x(int teams) { return MOST_UNITS * most_tokens(teams) / 8 * 512; }
template <class S> __host__ __device__ constexpr int most_w() { return MOST_UNITS * S::n * 64; }
template <class S, int TEAMS> __host__ __device__ constexpr size_t most_bytes(const most_ring &r) {
    return (size_t)(r.x * most_x(TEAMS) + r.w * most_w<S>() + r.slots * S::slot);
}
template <class S, int TEAMS> __host__ __device__ constexpr most_ring most_ring_of() {
    constexpr size_t room = MANY_ROOM - 2 * GROUP_HEAD - sizeof(typename S::room);
    most_ring r = {MOST_STAGES, S::slot ? MOST_STAGES - 1 : MOST_STAGES, S::slot ? 2 : 0};
    while (r.w > 1 && most_bytes<S, TEAMS>(r) > room) r = {r.x - 1, r.w - 1, r.slots};
    while (r.slots && r.slots < MOST_STAGES && most_bytes<S, TEAMS>({r.x, r.w, r.slots + 1}) <= room) r.slots++;
    return r;
}
template <class S, int TEAMS> constexpr size_t most_smem() {
    const size_t all = most_bytes<S, TEAMS>(most_ring_of<S, TEAMS>()),
                 part = sizeof(float) * (size_t)(most_tokens(TEAMS) * (S::n + 4));
    return 2 * GROUP_HEAD + (all > part ? all : part);
}
template <class S, int TEAMS> constexpr bool most_fits() {
    return most_ring_of<S, TEAMS>().w > 1 && most_smem<S, TEAMS>() <= (size_t)MANY_ROOM;
}

template <class S, int TEAMS>
__global__ void __launch_bounds__(most_threads(TEAMS), 1) most_kernel(const __grid_constant__ most_job args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr most_ring RING = most_ring_of<S, TEAMS>();
    constexpr int WARPS = 4 * TEAMS, BLOCKS = most_blocks(TEAMS), TOK = most_tokens(TEAMS);
    constexpr int W = most_w<S>(), X = most_x(TEAMS), LD = S::n + 4;
    const group_job &job = args.of;
    const group_args &a = job.of;
    const int shares = args.shares;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float scales[TOK];
    __shared__ typename S::room room;
    uint8_t *const head = shared + (GROUP_HEAD - shared_address(shared) % GROUP_HEAD) % GROUP_HEAD;
    uint64_t *const rows_there = (uint64_t *)head, *const x_there = rows_there + MOST_STAGES,
                    *const w_there = x_there + MOST_STAGES, *const left = w_there + MOST_STAGES;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = lane / 4, q = lane % 4;
    // Sizes of all are multiples of GROUP_HEAD, as where copies put them wants.
    uint8_t *const w = head + GROUP_HEAD, *const x = w + RING.w * W, *const rows = x + RING.x * X;
    const int split = (int)blockIdx.x % a.splits, g0 = (int)blockIdx.x / a.splits * (S::n / 16),
              which = a.activates ? 0 : group_which(a, g0), rank = cluster_rank();
    const wide_product &p = a.product[which];
    const most_place place = {job, which, g0, a.activates ? 8 * g0 : 16 * (g0 - p.first)};
    // The second block of the last cluster may have no groups.
    const int count = max(0, min(S::n / 16, (a.activates ? a.groups : p.first + (p.rows + 15) / 16) - g0));
    const int all = (a.cols + MOST_COLS - 1) / MOST_COLS, s0 = all * split / a.splits,
              n = all * (split + 1) / a.splits - s0;
    const int unit = args.x_tiles * 512, x_bytes = MOST_UNITS * unit; // of the tokens' values
    if (threadIdx.x == 0) {
        for (int s = 0; s < RING.slots; s++) bar_init(rows_there + s, 1);
        for (int s = 0; s < RING.x; s++) bar_init(x_there + s, 1);
        for (int s = 0; s < RING.w; s++) {
            bar_init(w_there + s, S::slot ? MOST_UNPACK : 1);
            bar_init(left + s, WARPS * shares);
        }
        bars_ready();
    }
    if (shares > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    dep_go();
    float *const part = (float *)w;
    if (warp >= WARPS) {
        registers_fewer<MOST_FEW>();
        const bool brings = warp == WARPS && lane == 0;
        auto bring_tokens = [&](int s) {
            const uint8_t *from = (const uint8_t *)a.x + (size_t)(s0 + s) * (size_t)x_bytes;
            uint8_t *to = x + s % RING.x * X;
            uint64_t *there = x_there + s % RING.x;
            bar_expect(there, x_bytes);
            if (shares > 1)
                bulk_copy_to_both(to + rank * unit, from + rank * unit, unit, there); // one of two units
            else
                bulk_copy(to, from, x_bytes, there);
        };
        // Where step s will be nobody reads another one any more; nor then what the tokens' values of that one were.
        auto begin = [&](int s) {
            if (s < RING.w) return;
            bar_wait(left + s % RING.w, (s / RING.w - 1) % 2);
            const int next = s - RING.w + RING.x;
            if (brings && next < n) bring_tokens(next);
        };
        if constexpr (S::slot > 0) {
            auto bring = [&](int s) {
                const int slot = s % RING.slots;
                S::bring(place, s0 + s, shared_address(rows + slot * S::slot), rows_there + slot);
            };
            if (brings) {
                for (int s = 0; s < min(RING.slots, n); s++) bring(s);
                dep_wait();
                for (int s = 0; s < min(RING.x, n); s++) bring_tokens(s);
            }
#pragma unroll 1
            for (int s = 0; s < n; s++) {
                const int slot = s % RING.slots, to = s % RING.w;
                bar_wait(rows_there + slot, s / RING.slots % 2);
                begin(s);
                __syncwarp();
                S::unpack(place, rows + slot * S::slot, shared_address(w + to * W), room, warp - WARPS);
                most_written();
                __syncwarp();
                if (lane == 0) bar_arrive(w_there + to);
                most_unpacked();
                if (brings && s + RING.slots < n) bring(s + RING.slots);
            }
            if (!brings) dep_wait();
        } else if (brings) {
            auto bring = [&](int s) {
                S::bring(place, s0 + s, shared_address(w + s % RING.w * W), w_there + s % RING.w);
            };
            for (int s = 0; s < min(RING.w, n); s++) bring(s);
            dep_wait();
            for (int s = 0; s < min(RING.x, n); s++) bring_tokens(s);
#pragma unroll 1
            for (int s = RING.w; s < n; s++) {
                begin(s);
                bring(s);
            }
        } else {
            dep_wait();
        }
        most_meet<TEAMS>(); // before the others have left theirs, these would take what some of them still wait for
        registers_more<most_registers(TEAMS)>();
    } else {
        registers_more<most_more(TEAMS)>();
        float sum[BLOCKS][S::n / 8][4] = {};
        dep_wait();
        group_scales(a, scales);
        const int first = BLOCKS * (warp / 4); // 64 tokens
        auto leave = [&](int s) {              // nobody reads the step any more
            __syncwarp();
            if (lane) return;
            bar_arrive(left + s % RING.w);
            if (shares > 1) bar_arrive_at(left + s % RING.w, rank ^ 1);
        };
#pragma unroll 1
        for (int s = 0; s < n; s++) {
            bar_wait(w_there + s % RING.w, s / RING.w % 2);
            bar_wait(x_there + s % RING.x, s / RING.x % 2);
            // One lane's, for then the compiler knows that they are the same in all.
            const uint64_t wd = S::rows(__shfl_sync(~0u, shared_address(w + s % RING.w * W), 0)),
                           xd = wide_descriptor(
                               __shfl_sync(~0u, shared_address(x + s % RING.x * X) + (uint32_t)(8 * 512 * first), 0));
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int i = 0; i < 2 * MOST_UNITS; i++)
#pragma unroll
                for (int b = 0; b < BLOCKS; b++)
                    S::multiply(sum[b], xd + (uint64_t)((i / 2 * unit + i % 2 * 256 + b * 8 * 512) >> 4),
                                wd + (uint64_t)(S::next(i) >> 4));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            group_settle<1>();
            if (s) leave(s - 1);
        }
        group_settle<0>();
        asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); // nobody reads stages any more
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int t = 0; t < S::n / 8; t++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float *to = part + (64 * (first + b) + 16 * (warp % 4) + 8 * h + g) * LD + S::result(a, t, q);
                    const float2 v = make_float2(sum[b][t][2 * h], sum[b][t][2 * h + 1]);
                    if (S::apart == 1) {
                        *(float2 *)to = v;
                    } else {
                        to[0] = v.x;
                        to[S::apart] = v.y;
                    }
                }
        registers_fewer<most_registers(TEAMS)>();
        most_meet<TEAMS>();
    }
    if (a.splits > 1) {
        cluster_share();
        cluster_wait();
    } else {
        __syncthreads();
    }
    const group_sums<> sums = {part, LD, TOK, 1, a.splits, scales};
    if (a.activates)
        group_activate<TOK>(a, sums, g0, count, split);
    else
        group_write<4>(a, sums, g0, count, split);
    if (a.splits * shares > 1) { // the others read this block's sums, or the other arrives at its barriers
        cluster_leave();
        cluster_wait();
    }
#else
    __trap(); // code for another processor than the one that the host asked for
#endif
}

// Kernels: of F16 for `each` groups of 16 rows, and by neuron, with three teams and with two.
struct most_run {
    void (*run)(most_job);
    size_t smem;
};
template <class S, int TEAMS> constexpr most_run most_run_of() {
    static_assert(most_fits<S, TEAMS>(), "no room for tokens");
    return {most_kernel<S, TEAMS>, most_smem<S, TEAMS>()};
}
struct most_kernels {
    int weights, n_boxes; // as neuron_kernels
    neuron_box (*box)(int i);
    most_run across[2];
};
template <class C> struct most_of {
    typedef by_neuron<C> F;
    static constexpr most_kernels kernels = {
        F::weights, F::n_boxes, F::box, {most_run_of<most_neurons<C>, 3>(), most_run_of<most_neurons<C>, 2>()}};
};
const most_kernels *most_32(int type);
const most_kernels *most_k(int type);

} // namespace te
#endif
