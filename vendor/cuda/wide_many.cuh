// wide_many.cuh - products of 129 to 240 tokens with quantised matrices on Hopper: as those of up to 128 (wide_groups.cuh),
// whose weights are read and unpacked once for them all.
//
// Values of so many tokens do not fit into shared memory for 256 columns at a time: a stage of them is what is multiplied at
// once, 64 columns. They are what passes through L2 most often, once for each block. So where blocks have all columns, two
// with other rows are a cluster: each brings a half of a stage's values, to both.
#ifndef TE_CUDA_WIDE_MANY_CUH
#define TE_CUDA_WIDE_MANY_CUH

#include "wide_groups.cuh"

namespace te {

constexpr int MANY_TOK = 240;  // tokens, at most
constexpr int MANY_UNITS = 2;  // of 32 columns: a stage of the tokens' values
constexpr int MANY_STAGES = 3; // of rows, for each of `deep`, at most
// Beside the warps that multiply four more, of which two bring what these multiply. Threads have as many registers each at
// first; those of the four leave most of theirs to the others, whose sums want them, while these multiply.
constexpr int MANY_BRING = 4;
constexpr int many_threads(int warps) { return 32 * (warps + MANY_BRING); }
constexpr int MANY_REGISTERS = 65536 / (32 * (GROUP_WARPS + MANY_BRING)), MANY_FEW = 32, MANY_MORE = 160;
static_assert(GROUP_WARPS * MANY_MORE + MANY_BRING * MANY_FEW <= (GROUP_WARPS + MANY_BRING) * MANY_REGISTERS, "");
// Of more tiles sums leave so few registers that rows are taken anew for each unit, whose weights the unit in front has used,
// and half of the tokens are multiplied at a time: wgmma of so many wants more than threads have at first.
constexpr int MANY_WHOLE = 24;
constexpr int MANY_ROOM = 224 * 1024; // of a block: kernels declare up to 3 KB

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// All of four warps have fewer registers from here on, or more.
template <int N> __device__ __forceinline__ void registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
// All of a block.
__device__ __forceinline__ void many_meet(int workers) {
    __syncwarp();
    asm volatile("bar.sync 2, %0;" ::"r"(32 * (workers + MANY_BRING)) : "memory");
}
// The same barrier of the cluster's other block.
__device__ __forceinline__ void bar_arrive_at(uint64_t *b, int rank) {
    asm volatile("{\n"
                 ".reg .b32 other;\n"
                 "mapa.shared::cluster.u32 other, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [other];\n"
                 "}" ::"r"(shared_address(b)),
                 "r"(rank)
                 : "memory");
}
// To the same place in both blocks of the cluster; the barrier of each counts the bytes.
__device__ __forceinline__ void bulk_copy_to_both(void *to, const void *from, int n_bytes, uint64_t *b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
                 "l"(from), "r"(n_bytes), "r"(shared_address(b)), "h"((uint16_t)3)
                 : "memory");
}
// sum += the rows' weights of a unit times the tokens' values.
template <int TILES>
__device__ __forceinline__ void many_multiply(float (&sum)[TILES][4], const uint4 (&w)[2], uint64_t at) {
    group_settle<0>();
    uint32_t a[2][4] = {{w[0].x, w[1].x, w[0].y, w[1].y}, {w[0].z, w[1].z, w[0].w, w[1].w}};
#pragma unroll
    for (int i = 0; i < 2; i++) // made in front of the fence
#pragma unroll
        for (int r = 0; r < 4; r++) asm volatile("" : "+r"(a[i][r])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            wide_wgmma(*(float (*)[TILES / 2][4])(sum + h * (TILES / 2)), a[i],
                       at + (uint64_t)((i * 256 + h * (TILES / 2) * 512) >> 4));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
#endif

struct many_job {
    group_job of;
    int shares; // blocks that bring the tokens' values together
};

// TILES: of eight tokens. Values come in the order in which `deep` warps of a group take them, in turn.
template <class C, int TILES>
__global__ void __launch_bounds__(many_threads(GROUP_WARPS), 1)
    many_groups_kernel(const __grid_constant__ many_job args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef grouped<C> F;
    const group_job &job = args.of;
    const group_args &a = job.of;
    constexpr bool SPARES = TILES > MANY_WHOLE;
    constexpr int UNIT = TILES * 32, ROOM = MANY_UNITS * UNIT, UNITS = F::chunk / 32, PARTS = WIDE_UNITS / MANY_UNITS;
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
              which = a.activates ? 0 : group_which(a, g0), rank = cluster_rank();
    const wide_product &p = a.product[which];
    // The second block of the last cluster may have no groups.
    const int count = max(0, min(a.each, (a.activates ? a.groups : p.first + (p.rows + 15) / 16) - g0));
    const int all = (a.cols + GROUP_COLS - 1) / GROUP_COLS, c0 = all * split / a.splits,
              n_all = all * (split + 1) / a.splits - c0;
    const int own = warp % a.across, turn = warp / a.across, workers = a.across * a.deep;
    if (threadIdx.x == 0) {
        for (int s = 0; s < a.slots; s++) {
            bar_init(rows_there + s, 1);
            bar_init(rows_left + s, a.across);
        }
        for (int s = 0; s < a.stages; s++) {
            bar_init(there + s, 1);
            bar_init(left + s, a.across * args.shares);
        }
        bars_ready();
    }
    if (args.shares > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    dep_go();
    float *part = (float *)rows;
    const group_sums<> sums = {part, 16 * a.across + 4, 8 * TILES, a.deep, a.splits, scales};
    if (warp >= workers) {
        registers_fewer<MANY_FEW>();
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
        } else if (warp == workers + 1) { // brings the tokens' values
            dep_wait();
            const uint4 *x = a.x + (size_t)(c0 * PARTS) * ROOM;
            int stage = 0, parity = 1;
            if (lane == 0)
#pragma unroll 1
                for (int k = 0; k < n_all; k += a.deep)
#pragma unroll 1
                    for (int i = 0; i < PARTS; i++)
#pragma unroll 1
                        for (int t = k; t < min(k + a.deep, n_all); t++) {
                            const uint4 *from = x + (size_t)(t * PARTS + i) * ROOM;
                            uint4 *to = values + stage * ROOM;
                            bar_wait(left + stage, parity);
                            bar_expect(there + stage, 16 * ROOM);
                            if (args.shares > 1)
                                bulk_copy_to_both(to + rank * (ROOM / 2), from + rank * (ROOM / 2), 8 * ROOM,
                                                  there + stage);
                            else
                                bulk_copy(to, from, 16 * ROOM, there + stage);
                            if (++stage < a.stages) continue;
                            stage = 0;
                            parity ^= 1;
                        }
        } else {
            dep_wait();
        }
        many_meet(workers); // before the others have left theirs, these would take what some of them still wait for
        registers_more<MANY_REGISTERS>();
    } else {
        registers_more<MANY_MORE>();
        float sum[TILES][4] = {};
        dep_wait();
        group_scales(a, scales);
        const int row = (a.activates ? 8 : 16) * min(own, a.each - 1) + F::row_of(g),
                  further = a.activates ? 8 * a.each : 8;
        int slot = turn, parity = 0, stage = turn, stage_parity = 0;
        auto leave = [&](int s) { // nobody reads the stage any more
            __syncwarp();
            if (lane) return;
            bar_arrive(left + s);
            if (args.shares > 1) bar_arrive_at(left + s, rank ^ 1);
        };
#pragma unroll 1
        for (int k = turn; k < n_all; k += a.deep) {
            const int step = min(a.deep, n_all - (k - turn)); // to this warp's next stage of values
            int before = -1;
            bar_wait(rows_there + slot, parity);
#pragma unroll
            for (int c = 0; c < WIDE_UNITS / UNITS; c++) {
                typename F::row r[2];
                auto take = [&] {
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        F::take(r[i], rows + slot * slot_bytes, n_rows, row + i * further, c0 + k, c, q);
                };
                if (!SPARES) take();
                const typename F::scales s[2] = {F::scale_of(r[0], q), F::scale_of(r[1], q)};
#pragma unroll
                for (int i = 0; i < UNITS; i += MANY_UNITS) {
                    // One lane's, for then the compiler knows that it is the same in all.
                    const uint64_t tokens = wide_descriptor(__shfl_sync(~0u, shared_address(values + stage * ROOM), 0));
                    bar_wait(there + stage, stage_parity);
                    if constexpr (SPARES) {
#pragma unroll
                        for (int u = 0; u < MANY_UNITS; u++) {
                            take();
                            const uint4 w[2] = {F::halves(r[0], F::scale_of(r[0], q), i + u),
                                                F::halves(r[1], F::scale_of(r[1], q), i + u)};
                            many_multiply(sum, w, tokens + (uint64_t)(u * TILES * 512 >> 4));
                        }
                    } else {
                        const uint4 w[2][2] = {{F::halves(r[0], s[0], i), F::halves(r[1], s[1], i)},
                                               {F::halves(r[0], s[0], i + 1), F::halves(r[1], s[1], i + 1)}};
                        group_multiply(sum, w, tokens);
                        group_settle<1>();
                    }
                    if (c + i) leave(before);
                    before = stage;
                    stage += step;
                    if (stage >= a.stages) {
                        stage -= a.stages;
                        stage_parity ^= 1;
                    }
                }
            }
            group_settle<0>();
            leave(before);
            if (lane == 0) bar_arrive(rows_left + slot);
            slot += a.deep;
            if (slot >= a.slots) {
                slot = turn;
                parity ^= 1;
            }
        }
        asm volatile("bar.sync 1, %0;" ::"r"(32 * workers) : "memory"); // nobody reads stages any more
        if (own < count)
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    part[(turn * sums.rows + 8 * t + 2 * q + i % 2) * sums.ld + 16 * own + F::row_of(g) + i / 2 * 8] =
                        sum[t][i];
        registers_fewer<MANY_REGISTERS>();
        many_meet(workers);
    }
    if (a.splits > 1) {
        cluster_share();
        cluster_wait();
    } else {
        __syncthreads();
    }
    if (a.activates)
        group_activate<MANY_TOK>(a, sums, g0, count, split);
    else
        group_write<group_places(TILES)>(a, sums, g0, count, split);
    if (a.splits * args.shares > 1) { // the other reads this block's sums, or arrives at its barriers
        cluster_leave();
        cluster_wait();
    }
#else
    __trap(); // code for another processor than the one that the host asked for
#endif
}

// Shared memory, as group_smem.
constexpr size_t many_smem(int tiles, int row_bytes, int each, int across, int deep, int slots, int stages) {
    const size_t all = (size_t)(slots * group_slot(each, row_bytes) + stages * MANY_UNITS * 512 * tiles),
                 part = sizeof(float) * (size_t)(deep * 8 * tiles * (16 * across + 4));
    return 2 * GROUP_HEAD + (all > part ? all : part);
}

constexpr int MANY_KERNELS = 8;
constexpr int many_tiles[MANY_KERNELS] = {17, 18, 20, 22, 24, 26, 28, 30};
// Groups of a block, at most: two stages of rows and three of the tokens' values are there at a time.
constexpr int many_most(int tiles, int row_bytes) {
    int each = GROUP_WARPS;
    while (each > 0 && many_smem(tiles, row_bytes, each, each, 1, 2, 3) > MANY_ROOM) each--;
    return each;
}
// Warps of a group of rows, of a block with so many groups.
constexpr int many_deep(int each) {
    const int n = GROUP_WARPS / ((each + 3) / 4 * 4);
    return n < GROUP_DEEP ? n : GROUP_DEEP;
}
// Stages of rows and of the tokens' values: rows take what room there is beside some of values. Each of `deep` has stages of
// its own of both, as many as the others: which of a barrier's turns a warp waits for can only be told where it has seen them
// all. Of values it has two at least, for it leaves one when it has begun the next.
struct many_ring {
    int slots, stages;
};
constexpr many_ring many_ring_of(int tiles, int row_bytes, int each) {
    const int deep = many_deep(each), room = MANY_ROOM - 2 * GROUP_HEAD, slot = group_slot(each, row_bytes),
              stage = MANY_UNITS * 512 * tiles;
    int slots = MANY_STAGES * deep;
    while (slots > 2 * deep && room - slots * slot < 4 * deep * stage) slots -= deep;
    while (slots > deep && room - slots * slot < 2 * deep * stage) slots -= deep;
    const int stages = (room - slots * slot) / stage / deep * deep, most = GROUP_STAGES / deep * deep;
    return {slots, stages < most ? stages : most};
}
constexpr bool many_rings_fit(int row_bytes) {
    for (int tiles : many_tiles) {
        if (many_most(tiles, row_bytes) < 4) return false;
        for (int each = 1; each <= many_most(tiles, row_bytes); each++) {
            const int deep = many_deep(each);
            const many_ring r = many_ring_of(tiles, row_bytes, each);
            if (r.slots < deep || r.slots % deep || r.stages < 2 * deep || r.stages % deep ||
                many_smem(tiles, row_bytes, each, (each + 3) / 4 * 4, deep, r.slots, r.stages) > MANY_ROOM)
                return false;
        }
    }
    return true;
}
struct many_kernels {
    int words, row_bytes, parts; // as group_kernels
    group_part (*part)(int i, int cols);
    void (*run[MANY_KERNELS])(many_job);
};
template <class C> struct many_of {
    typedef grouped<C> F;
    static_assert(many_rings_fit(F::row_bytes), "rows of this format leave no room for tokens");
    static group_part part(int i, int cols) {
        return {F::width(i), F::at(i, (size_t)cols), F::length(i, (size_t)cols)};
    }
    static constexpr many_kernels kernels = {
        wide<C>::words,
        F::row_bytes,
        F::parts,
        part,
        {many_groups_kernel<C, 17>, many_groups_kernel<C, 18>, many_groups_kernel<C, 20>, many_groups_kernel<C, 22>,
         many_groups_kernel<C, 24>, many_groups_kernel<C, 26>, many_groups_kernel<C, 28>, many_groups_kernel<C, 30>}};
};
const many_kernels *many_32(int type);
const many_kernels *many_k(int type);

} // namespace te
#endif
