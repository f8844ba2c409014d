// wide_ring.cuh - products of 9 to 192 tokens with matrices of F16 on Hopper: wgmma with both factors where they are in shared
// memory, which copies of the hardware fill.
//
// A block has some rows, 64 for each group of four warps, and all tokens. One more warp brings stages of columns into a
// ring, rows as tiles of a tensor and the tokens' values beside them, as many stages ahead as there is room for; of the
// first stages rows come before the kernel in front has ended. Groups multiply a stage when it is there, and give it free.
// Blocks of a cluster have the same rows and a part of the columns each (`splits`), as in wide_groups.cuh, whose ends these
// kernels share; of a feed-forward's gate and up a block has as many rows each.
//
// Of a transposed product (down, stored by neuron) rows and columns change places: a tile has 64 results of each neuron of
// a stage, 128 bytes, and wgmma takes it as it lies. Below, "rows" are a product's results, "columns" what is added up.
#ifndef TE_CUDA_WIDE_RING_CUH
#define TE_CUDA_WIDE_RING_CUH

#include "launch.h"
#include "wide_groups.cuh"

namespace te {

constexpr int RING_TILE = 64;                          // columns of a tile, 128 bytes of each row
constexpr int RING_STAGES = 16, RING_LEAST_STAGES = 3; // in shared memory
constexpr int RING_WIDE = 2 * RING_TILE; // of a stage; a tile's where too few stages of all tokens' values find room
constexpr int RING_WIDE_TILES = 12;      // with which three do
constexpr int RING_TOK = 192;            // tokens, at most
// Tiles of eight tokens that there are kernels of: of more tokens not each number.
constexpr int RING_KERNELS = 20;
constexpr int ring_tiles[RING_KERNELS] = {2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24};
// Tokens that a kernel has room for in its end, as group_room.
__host__ __device__ constexpr int ring_room(int tiles) { return 8 * tiles <= GROUP_TOK ? group_room(tiles) : RING_TOK; }
constexpr int RING_GROUPS = 3, RING_ROWS = 64 * RING_GROUPS;
constexpr int RING_THREADS = 128 * RING_GROUPS + 32;
constexpr int RING_BEGIN = 1024; // tiles begin at multiples of this; as much is in front of them, for barriers
__host__ __device__ constexpr int ring_x(int tiles, int cols) { return tiles * cols * 16; } // tokens' bytes of a stage

struct ring_args {
    ring_map map[TE_MAX_PRODUCTS];
    group_args of; // `first` of a product: its first 16 rows, counted by whole blocks
    int rows;      // of a block, a multiple of 16
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Kept in L2 for other blocks.
constexpr uint64_t RING_KEPT = 0x14F0000000000000;
__device__ __forceinline__ void ring_copy_tokens(uint32_t to, const void *from, int n_bytes, uint64_t *b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(n_bytes), "r"(shared_address(b)), "l"(RING_KEPT)
                 : "memory");
}
// d += A * B of 64 rows and 16 columns; operands a, b and c: the descriptors, and whether A is transposed.
#define RING_WGMMA(tiles, tokens, a, b, c)                                                                             \
    template <bool TRANSPOSED>                                                                                         \
    __device__ __forceinline__ void ring_wgmma(float (&d)[tiles][4], uint64_t rows, uint64_t x) {                      \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32.f16.f16 {" WIDE_SUMS_##tiles                 \
                     "}, %" #a ", %" #b ", 1, 1, 1, %" #c ", 0;"                                                       \
                     : WIDE_TILES_##tiles                                                                              \
                     : "l"(rows), "l"(x), "n"((int)TRANSPOSED));                                                       \
    }
RING_WGMMA(2, 16, 8, 9, 10)
RING_WGMMA(3, 24, 12, 13, 14)
RING_WGMMA(4, 32, 16, 17, 18)
RING_WGMMA(5, 40, 20, 21, 22)
RING_WGMMA(6, 48, 24, 25, 26)
RING_WGMMA(7, 56, 28, 29, 30)
RING_WGMMA(8, 64, 32, 33, 34)
RING_WGMMA(9, 72, 36, 37, 38)
RING_WGMMA(10, 80, 40, 41, 42)
RING_WGMMA(11, 88, 44, 45, 46)
RING_WGMMA(12, 96, 48, 49, 50)
RING_WGMMA(13, 104, 52, 53, 54)
RING_WGMMA(14, 112, 56, 57, 58)
RING_WGMMA(15, 120, 60, 61, 62)
RING_WGMMA(16, 128, 64, 65, 66)
RING_WGMMA(17, 136, 68, 69, 70)
RING_WGMMA(18, 144, 72, 73, 74)
RING_WGMMA(20, 160, 80, 81, 82)
RING_WGMMA(22, 176, 88, 89, 90)
RING_WGMMA(24, 192, 96, 97, 98)
// How wgmma finds a tile's lines: of 128 bytes each, whose eighths change places with each of eight lines.
__device__ __forceinline__ uint64_t ring_descriptor(uint32_t address) {
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
#endif

// TILES: of eight tokens. COLS: of a stage.
template <int TILES, bool TRANSPOSED, int COLS>
__global__ void __launch_bounds__(RING_THREADS, 1) ring_kernel(const __grid_constant__ ring_args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int W_TILES = COLS / RING_TILE, X_BYTES = ring_x(TILES, COLS);
    // A group's first tile, and from 16 columns to the next of a transposed one.
    constexpr int GROUP_BYTES = 128 * (TRANSPOSED ? COLS : 64), NEXT_BYTES = 16 * 128;
    const group_args &a = args.of;
    extern __shared__ __align__(128) uint8_t room[];
    __shared__ float scales[8 * TILES];
    uint8_t *const head = room + (RING_BEGIN - shared_address(room) % RING_BEGIN) % RING_BEGIN;
    uint8_t *const ring = head + RING_BEGIN;
    uint64_t *const full = (uint64_t *)head, *const empty = full + RING_STAGES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4, rows = args.rows,
              groups = (rows + 63) / 64;
    const bool multiplies = group < groups;
    const int split = (int)blockIdx.x % a.splits, g0 = (int)blockIdx.x / a.splits * (rows / 16);
    const int which = a.activates ? 0 : group_which(a, g0), r0 = 16 * (g0 - a.product[which].first);
    const int all = (a.cols + COLS - 1) / COLS, s0 = all * split / a.splits, n = all * (split + 1) / a.splits - s0;
    const int tile_bytes = rows * 2 * RING_TILE, w_bytes = W_TILES * tile_bytes;
    const uint32_t w = shared_address(ring), x = w + (uint32_t)(a.stages * w_bytes);
    if (threadIdx.x == 0) {
        for (int s = 0; s < a.stages; s++) {
            bar_init(full + s, 1);
            bar_init(empty + s, 4 * groups);
        }
        bars_ready();
    }
    __syncthreads();
    dep_go();
    int slot = 0, parity = 0;
    auto next_slot = [&] {
        if (++slot < a.stages) return;
        slot = 0;
        parity ^= 1;
    };
    if (!multiplies && lane == 0) {
        auto copy_rows = [&](int s) {
            bar_expect(full + slot, w_bytes + X_BYTES);
            for (int i = 0; TRANSPOSED && i < groups; i++)
                ring_copy_rows(w + (uint32_t)(slot * w_bytes + i * GROUP_BYTES), args.map + which, r0 + 64 * i,
                               (s0 + s) * COLS, full + slot);
            for (int i = 0; !TRANSPOSED && i < W_TILES; i++) { // gate and up, or the first and the second half
                const uint32_t to = w + (uint32_t)(slot * w_bytes + i * tile_bytes);
                const int c = (s0 + s) * COLS + i * RING_TILE, r = a.activates ? 8 * g0 : r0;
                ring_copy_rows(to, args.map + (a.activates ? 1 : which), c, r, full + slot);
                ring_copy_rows(to + (uint32_t)tile_bytes / 2, args.map + which, c, a.activates ? r : r + rows / 2,
                               full + slot);
            }
        };
        auto copy_tokens = [&](int s) {
            ring_copy_tokens(x + (uint32_t)(slot * X_BYTES), (const uint8_t *)a.x + (size_t)(s0 + s) * X_BYTES, X_BYTES,
                             full + slot);
        };
        const int before = min(a.stages, n);
        for (; slot < before; slot++) copy_rows(slot);
        dep_wait();
        for (slot = 0; slot < before; slot++) copy_tokens(slot);
        slot = 0;
        for (int s = before; s < n; s++) {
            bar_wait(empty + slot, parity);
            copy_rows(s);
            copy_tokens(s);
            next_slot();
        }
    } else {
        dep_wait(); // one thread is not here: the scales are those of groups, however many there are
        for (int t = threadIdx.x; multiplies && t < a.n_tok; t += 128 * groups) scales[t] = __ldcg(a.scale + t);
    }
    float sum[TILES][4] = {};
    if (multiplies) {
        int last = 0;
#pragma unroll 1
        for (int s = 0; s < n; s++) {
            bar_wait(full + slot, parity);
            const uint64_t wd = ring_descriptor(w + (uint32_t)(slot * w_bytes + group * GROUP_BYTES)),
                           xd = wide_descriptor(x + (uint32_t)(slot * X_BYTES));
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < COLS / 16; k++)
                ring_wgmma<TRANSPOSED>(
                    sum, wd + (uint64_t)((TRANSPOSED ? k * NEXT_BYTES : k / 4 * tile_bytes + k % 4 * 32) >> 4),
                    xd + (uint64_t)((k / 2 * TILES * 512 + k % 2 * 256) >> 4));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            group_settle<1>(); // the stage before is not read any more
            if (s && lane == 0) bar_arrive(empty + last);
            last = slot;
            next_slot();
        }
        group_settle<0>();
    }
    __syncthreads(); // nobody reads stages any more
    float *const part = (float *)ring;
    const group_sums<> sums = {part, rows + 4, 8 * TILES, 1, a.splits, scales};
    if (multiplies) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = 16 * warp + 8 * h + lane / 4;
            if (r >= rows) continue;
            if (a.activates) { // eight rows of gate and up in turn
                const bool up = r >= rows / 2;
                const int j = r - up * (rows / 2);
                r = j / 8 * 16 + 8 * up + j % 8;
            }
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) part[(8 * t + lane % 4 * 2 + i) * sums.ld + r] = sum[t][2 * h + i];
        }
    }
    if (a.splits > 1) {
        cluster_share();
        cluster_wait();
    } else {
        __syncthreads();
    }
    const int count = min(rows / 16, a.groups - g0);
    if (a.activates)
        group_activate<ring_room(TILES)>(a, sums, g0, count, split);
    else
        group_write<group_places(TILES)>(a, sums, g0, count, split);
    if (a.splits > 1) { // others read this block's sums
        cluster_leave();
        cluster_wait();
    }
#else
    __trap(); // code for another processor than the one that the host asked for
#endif
}

} // namespace te
#endif
