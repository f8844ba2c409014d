// wide_neurons.cuh - products of 9 to 144 tokens with quantised matrices that are stored by neuron (a transposed down), on
// Hopper: wgmma with the weights in registers, as in wide_groups.cuh, though rows and columns change places.
//
// Below, "rows" are neurons, whose values are added up, and "outputs" what lies along a row. A block has NEURON_OUTPUTS
// outputs, all tokens, and a part of the rows; blocks of a cluster have the same outputs, and add their parts up in the end
// (wide_groups.cuh). Stages of rows come into a ring: of each plane of the format (te_layout.h) a box of the tensor that it is,
// and the tokens' values. The last warp that leaves a stage asks for the next one there. Two times four warps have half of
// the outputs each, and two such teams half of the rows of each stage; of more than 64 tokens, whose sums take as many
// registers, all rows and half of each warp's outputs.
//
// A warp has 32 outputs. 16 bytes of each row hold them (of Q8_0 twice as many): read as a matrix of 16-bit words and
// transposed (ldmatrix), a lane has the same two bytes of two neighbouring rows in one register, and with masks pairs of
// weights as wgmma wants them, without an exchange. A word's low halves are outputs that follow each other, and so are its high
// ones. What a row's weights are multiplied with is worked out by one lane for each row; the others find it in shared memory.
#ifndef TE_CUDA_WIDE_NEURONS_CUH
#define TE_CUDA_WIDE_NEURONS_CUH

#include "wide_ring.cuh"

namespace te {

constexpr int NEURON_OUTPUTS = 256, NEURON_ROWS = 128; // of a block, of a stage at least
constexpr int NEURON_TEAMS = 2, NEURON_WARPS = 8 * NEURON_TEAMS, NEURON_THREADS = 32 * NEURON_WARPS;
constexpr int NEURON_LD = NEURON_OUTPUTS + 4; // floats from one token's sums to the next
constexpr int NEURON_SPLITS = 8, NEURON_BOXES = 4;
constexpr int NEURON_TOK = 144, NEURON_KERNELS = NEURON_TOK / 8 - 1; // of 2, 3, ... tiles of eight tokens

// A plane of a row of n weights: of each block of weights `bytes`, from at * blocks on. A stage has `width` bytes of each row,
// from first + (bytes of the block's first output) on, or from a multiple of 16 before that: copies begin nowhere else.
struct neuron_box {
    int at, bytes, width, first;
};

// How a format's rows are read:
//     weights, n_boxes, box    of a block of the file; the planes, which follow each other in a stage
//     rows(tiles)              of a stage
//     factors                  numbers of a row that a warp wants: 1 (a scale for all), 2 (for low and high halves), or 4 (the
//                              same, and what is taken off then)
//     words                    registers for each eight rows
//     load(w, s, row, c)       these of rows row to row + 31, from a stage; c: the warp, of all that have other outputs
//     factor(s, row, c, b, f)  the factors of a row; b: the block's number
//     offset                   what is taken off numbers of four bits and more
//     value(w, j, c, h, half)  two rows' weights of low (h 0) or high halves, byte j of two: whole numbers
//     output(c), apart         the first of a warp's outputs with low halves, and from there to those with high ones
template <class C> struct by_neuron;

// Twice as many rows where there is room for stages of them, and for what is multiplied in registers.
__host__ __device__ constexpr int neuron_rows(int tiles) { return tiles > 6 ? NEURON_ROWS : 2 * NEURON_ROWS; }

// Where 16 bytes of a row are: rows of 128 or 64 bytes, as copies arrange them so that no two of eight are in one bank.
__device__ __forceinline__ int neuron_place_128(int row, int i) { return 128 * row + 16 * (i ^ row % 8); }
__device__ __forceinline__ int neuron_place_64(int row, int i) { return 64 * row + 16 * (i ^ row / 2 % 4); }
__device__ __forceinline__ __half2 neuron_half2(uint32_t v) { return *reinterpret_cast<const __half2 *>(&v); }
// Of words with a number in the lower (h 0) or upper four bits of each 16: the number, less an offset. `more`: further bits of
// it, where they are in the lower half.
struct neuron_nibbles {
    uint32_t mask, shift;
    __half2 by, less;
    __device__ __forceinline__ neuron_nibbles(int h, float offset)
        : mask(h ? 0x00f000f0 : 0x000f000f), shift(h ? 4 : 0), by(__float2half2_rn(h ? 1.0f / 16 : 1.0f)),
          less(__float2half2_rn(h ? -64 - offset : -1024 - offset)) {}
    __device__ __forceinline__ __half2 of(uint32_t w, uint32_t more = 0) const {
        return __hfma2(neuron_half2((w & mask) | more << shift | 0x64006400), by, less);
    }
};
__device__ __forceinline__ uint16_t neuron_bits(__half h) { return __half_as_ushort(h); }

template <> struct by_neuron<codec_q4_0> {
    static constexpr int weights = 32, n_boxes = 2, factors = 1, words = 1, apart = 16;
    static __host__ __device__ constexpr int rows(int tiles) { return neuron_rows(tiles); }
    static __host__ __device__ constexpr neuron_box box(int i) {
        constexpr neuron_box all[] = {{0, 16, 128, 0}, {16, 2, 16, 0}};
        return all[i];
    }
    template <int ROWS>
    static __device__ __forceinline__ void load(uint32_t (&w)[words][4], const uint8_t *s, int row, int c) {
        matrices_transposed(w[0], s + neuron_place_128(row, c));
    }
    template <int ROWS>
    static __device__ __forceinline__ void factor(const uint8_t *s, int row, int c, int, uint16_t (&f)[factors]) {
        f[0] = *(const uint16_t *)(s + ROWS * box(0).width + 16 * row + 2 * c);
    }
    static constexpr float offset = 8;
    static __device__ __forceinline__ __half2 value(const uint32_t (&w)[words], int j, int, int,
                                                    const neuron_nibbles &half) {
        return half.of(w[0] >> 8 * j);
    }
    static __device__ __forceinline__ int output(int c) { return 32 * c; }
};

template <> struct by_neuron<codec_q8_0> {
    static constexpr int weights = 32, n_boxes = 3, factors = 1, words = 2, apart = 16;
    static __host__ __device__ constexpr int rows(int) { return NEURON_ROWS; }
    static __host__ __device__ constexpr neuron_box box(int i) {
        constexpr neuron_box all[] = {{0, 32, 128, 0}, {0, 32, 128, 128}, {32, 2, 16, 0}};
        return all[i];
    }
    template <int ROWS>
    static __device__ __forceinline__ void load(uint32_t (&w)[words][4], const uint8_t *s, int row, int c) {
        s += c / 4 * ROWS * box(0).width;
        for (int i = 0; i < words; i++) matrices_transposed(w[i], s + neuron_place_128(row, c % 4 * 2 + i));
    }
    template <int ROWS>
    static __device__ __forceinline__ void factor(const uint8_t *s, int row, int c, int, uint16_t (&f)[factors]) {
        f[0] = *(const uint16_t *)(s + 2 * ROWS * box(0).width + 16 * row + 2 * c);
    }
    static constexpr float offset = 0;
    static __device__ __forceinline__ __half2 value(const uint32_t (&w)[words], int j, int, int h,
                                                    const neuron_nibbles &) { // bytes with a sign
        const uint32_t v = (h ? w[1] : w[0]) >> 8 * j;
        return __hsub2(neuron_half2((v & 0x00ff00ff) ^ 0x64806480), __float2half2_rn(1024 + 128));
    }
    static __device__ __forceinline__ int output(int c) { return 32 * c; }
};

// Rows of 144 and of 176 bytes: no two of eight in one bank.
template <bool FIVE> struct by_neuron<codec_k45<FIVE>> {
    typedef codec_k45<FIVE> codec;
    static constexpr int weights = 256, n_boxes = 1, factors = 4, words = FIVE ? 2 : 1, apart = 32;
    static __host__ __device__ constexpr int rows(int tiles) { return FIVE ? NEURON_ROWS : neuron_rows(tiles); }
    static __host__ __device__ constexpr neuron_box box(int i) {
        constexpr neuron_box all[] = {{0, codec::bytes, codec::bytes, 0}};
        return all[i];
    }
    template <int ROWS>
    static __device__ __forceinline__ void load(uint32_t (&w)[words][4], const uint8_t *s, int row, int c) {
        s += codec::bytes * row;
        matrices_transposed(w[0], s + codec::q_at + 16 * c);
        if (FIVE) matrices_transposed(w[FIVE], s + codec::high_at + 16 * (c % 2));
    }
    template <int ROWS>
    static __device__ __forceinline__ void factor(const uint8_t *s, int row, int c, int, uint16_t (&f)[factors]) {
        typename wide<codec>::row r;
        r.head = *(const uint4 *)(s + codec::bytes * row);
        const typename wide<codec>::scales v = wide<codec>::scale_of(r, c / 2);
        for (int i = 0; i < 2; i++) {
            f[i] = neuron_bits(__low2half(v.d[i]));
            f[2 + i] = neuron_bits(__low2half(v.low[i]));
        }
    }
    static constexpr float offset = 0;
    static __device__ __forceinline__ __half2 value(const uint32_t (&w)[words], int j, int c, int h,
                                                    const neuron_nibbles &half) {
        const uint32_t fifth = FIVE ? w[words - 1] >> 8 * j >> (c / 2 * 2 + h) << 4 & 0x00100010 : 0;
        return half.of(w[0] >> 8 * j, fifth);
    }
    static __device__ __forceinline__ int output(int c) { return c / 2 * 64 + c % 2 * 16; }
};

template <> struct by_neuron<codec_q6_k> {
    typedef codec_q6_k codec;
    static constexpr int weights = 256, n_boxes = 4, factors = 2, words = 2, apart = 64;
    static __host__ __device__ constexpr int rows(int) { return NEURON_ROWS; }
    static __host__ __device__ constexpr neuron_box box(int i) {
        constexpr neuron_box all[] = {
            {0, 128, 128, 0}, {codec::high_at, 64, 64, 0}, {codec::scales_at, 16, 16, 0}, {codec::d_at, 2, 16, 0}};
        return all[i];
    }
    template <int ROWS>
    static __device__ __forceinline__ void load(uint32_t (&w)[words][4], const uint8_t *s, int row, int c) {
        matrices_transposed(w[0], s + neuron_place_128(row, c));
        matrices_transposed(w[1], s + ROWS * box(0).width + neuron_place_64(row, c / 4 * 2 + c % 2));
    }
    template <int ROWS>
    static __device__ __forceinline__ void factor(const uint8_t *s, int row, int c, int block, uint16_t (&f)[factors]) {
        const uint8_t *scales = s + ROWS * box(0).width + ROWS * box(1).width + 16 * row;
        const __half d = *(const __half *)(scales + ROWS * box(2).width + 2 * (block % 8));
        for (int i = 0; i < 2; i++) // rounded once, as in floats
            f[i] = neuron_bits(__hmul(__int2half_rn((int8_t)scales[c / 4 * 8 + c % 4 + 4 * i]), d));
    }
    static constexpr float offset = 32;
    static __device__ __forceinline__ __half2 value(const uint32_t (&w)[words], int j, int c, int h,
                                                    const neuron_nibbles &half) {
        return half.of(w[0] >> 8 * j, w[1] >> 8 * j >> (c / 2 % 2 * 2 + 4 * h) << 4 & 0x00300030);
    }
    static __device__ __forceinline__ int output(int c) { return c / 4 * 128 + c % 4 * 16; }
};

struct neuron_args {
    ring_map map[NEURON_BOXES];
    group_args of; // one product; cols: rows of the matrix
    int x_tiles;   // of the tokens' values, of which these may be a part
};
template <class C> __host__ __device__ constexpr int neuron_bytes() { // of a row of a stage
    int n = 0;
    for (int i = 0; i < by_neuron<C>::n_boxes; i++) n += by_neuron<C>::box(i).width;
    return n;
}

// Counts in shared memory; the old value is returned. What was done before is done for who counts later.
__device__ __forceinline__ int neuron_count(uint32_t *counter) {
    uint32_t old;
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                 : "=r"(old)
                 : "r"(shared_address(counter))
                 : "memory");
    return (int)old;
}

// TILES: of eight tokens.
template <class C, int TILES>
__global__ void __launch_bounds__(NEURON_THREADS, 1) neuron_kernel(const __grid_constant__ neuron_args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef by_neuron<C> F;
    constexpr bool APART = 8 * TILES > TE_CUDA_WIDE_TOK; // teams have low and high halves, or half of the rows
    constexpr int ROWS = F::rows(TILES), STEPS = ROWS / (APART ? 1 : NEURON_TEAMS) / 32; // a team's, of 32 rows
    constexpr int HALVES = APART ? 1 : 2;
    constexpr int W_BYTES = ROWS * neuron_bytes<C>(), X_BYTES = TILES * ROWS * 16;
    static_assert(W_BYTES % RING_BEGIN == 0, "stages begin at any address");
    const group_args &a = args.of;
    extern __shared__ __align__(128) uint8_t room[];
    // Of each warp, and two turns: factor f of 32 rows, those of lanes with the same rows together.
    __shared__ uint4 factors[NEURON_WARPS][STEPS][4 * F::factors];
    __shared__ float scales[8 * TILES]; // of each token
    uint8_t *const head = room + (RING_BEGIN - shared_address(room) % RING_BEGIN) % RING_BEGIN;
    uint8_t *const ring = head + RING_BEGIN;
    uint64_t *const full = (uint64_t *)head;
    uint32_t *const left = (uint32_t *)(full + RING_STAGES); // warps that are done with a stage
    // One lane's, so that the compiler knows it to be the same in all.
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), g = lane / 4, q = lane % 4;
    const int split = (int)blockIdx.x % a.splits, block = (int)blockIdx.x / a.splits;
    const int all = (a.cols + ROWS - 1) / ROWS, s0 = all * split / a.splits, n = all * (split + 1) / a.splits - s0;
    uint8_t *const values = ring + a.stages * W_BYTES;
    auto copy_rows = [&](int s, int slot) {
        constexpr int blocks = NEURON_OUTPUTS / F::weights;
        bar_expect(full + slot, W_BYTES + X_BYTES);
        uint32_t to = shared_address(ring + slot * W_BYTES);
#pragma unroll
        for (int i = 0; i < F::n_boxes; i++) {
            ring_copy_rows(to, args.map + i, F::box(i).first + block * blocks * F::box(i).bytes / 16 * 16,
                           (s0 + s) * ROWS, full + slot);
            to += (uint32_t)(ROWS * F::box(i).width);
        }
    };
    auto copy_tokens = [&](int s, int slot) {
        constexpr int UNITS = ROWS / 32, UNIT_BYTES = X_BYTES / UNITS;
        const uint32_t to = shared_address(values + slot * X_BYTES);
        const size_t first = (size_t)(s0 + s) * UNITS, unit = 512 * (size_t)args.x_tiles;
        if (args.x_tiles == TILES) {
            ring_copy_tokens(to, (const uint8_t *)a.x + first * unit, X_BYTES, full + slot);
            return;
        }
#pragma unroll 1
        for (int u = 0; u < UNITS; u++)
            ring_copy_tokens(to + (uint32_t)(u * UNIT_BYTES), (const uint8_t *)a.x + (first + (size_t)u) * unit,
                             UNIT_BYTES, full + slot);
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
    const int before = min(a.stages, n);
    if (threadIdx.x == 0)
        for (int s = 0; s < before; s++) copy_rows(s, s);
    dep_wait();
    group_scales(a, scales);
    if (threadIdx.x == 0)
        for (int s = 0; s < before; s++) copy_tokens(s, s);
    __syncwarp();
    const int c = warp % 8, team = warp / 8, h0 = APART ? team : 0, row0 = APART ? 0 : 32 * STEPS * team;
    const neuron_nibbles half[2] = {{h0, F::offset}, {1, F::offset}};
    uint16_t *const put = (uint16_t *)factors[warp] + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
    float sum[HALVES][TILES][4] = {}; // of low and of high halves
    int slot = 0, parity = 0;
#pragma unroll 1
    for (int s = 0; s < n; s++) {
        const uint8_t *rows = ring + slot * W_BYTES;
        const uint64_t x = wide_descriptor(shared_address(values + slot * X_BYTES));
        bar_wait(full + slot, parity);
        uint32_t w[2][F::words][4];
        F::template load<ROWS>(w[0], rows, row0 + lane, c);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            uint16_t own[F::factors];
            F::template factor<ROWS>(rows, row0 + 32 * i + lane, c, block, own);
#pragma unroll
            for (int f = 0; f < F::factors; f++) put[(i * F::factors + f) * 32] = own[f];
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int step = row0 / 32 + i;
            uint4 by[HALVES], low[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                by[h] = factors[warp][i][(F::factors > 1 ? 4 * (h0 + h) : 0) + q];
                if (F::factors == 4) low[h] = factors[warp][i][4 * (2 + h0 + h) + q];
            }
            if (i + 1 < STEPS) F::template load<ROWS>(w[(i + 1) % 2], rows, row0 + 32 * (i + 1) + lane, c);
            uint32_t part[2][HALVES][4]; // of 16 rows: weights of low and of high halves
#pragma unroll
            for (int k = 0; k < 4; k++) { // eight rows
                uint32_t of[F::words];
#pragma unroll
                for (int m = 0; m < F::words; m++) of[m] = w[i % 2][m][k];
#pragma unroll
                for (int h = 0; h < HALVES; h++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        __half2 v = F::value(of, j, c, h0 + h, half[h]);
                        const __half2 d = neuron_half2(word_of(by[h], k));
                        v = F::factors == 4 ? __hfma2(v, d, neuron_half2(word_of(low[h], k))) : __hmul2(v, d);
                        part[k / 2][h][k % 2 * 2 + j] = *reinterpret_cast<const uint32_t *>(&v);
                    }
            }
#pragma unroll
            for (int k = 0; k < 2; k++) // made in front of the fence
#pragma unroll
                for (int h = 0; h < HALVES; h++)
#pragma unroll
                    for (int j = 0; j < 4; j++) asm volatile("" : "+r"(part[k][h][j])::"memory");
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int h = 0; h < HALVES; h++)
                    wide_wgmma(sum[h], part[k][h], x + (uint64_t)((step * TILES * 512 + k * 256) >> 4));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (i + 2 < STEPS) group_settle<1>();
        }
        group_settle<0>();
        __syncwarp();
        if (lane == 0 && neuron_count(left + slot) == NEURON_WARPS - 1) { // the last one
            left[slot] = 0;
            if (s + a.stages < n) {
                copy_rows(s + a.stages, slot);
                copy_tokens(s + a.stages, slot);
            }
        }
        if (++slot < a.stages) continue;
        slot = 0;
        parity ^= 1;
    }
    __syncthreads(); // nobody reads stages any more
    float *const part = (float *)ring;
    const group_sums<NEURON_SPLITS> sums = {part, NEURON_LD, 8 * TILES, 1, a.splits, scales};
#pragma unroll
    for (int turn = APART ? 0 : NEURON_TEAMS - 1; turn >= 0; turn--) { // one team after the other, or both
        if (APART || team == turn)
#pragma unroll
            for (int h = 0; h < HALVES; h++)
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float2 *at = (float2 *)(part + (8 * t + 2 * q + i) * NEURON_LD + F::output(c) + 2 * g +
                                                (h0 + h) * F::apart);
                        float2 v = make_float2(sum[h][t][i], sum[h][t][2 + i]);
                        if (!APART && turn < NEURON_TEAMS - 1) v = make_float2(v.x + at->x, v.y + at->y);
                        *at = v;
                    }
        if (turn) __syncthreads();
    }
    if (a.splits > 1) {
        cluster_share();
        cluster_wait();
    } else {
        __syncthreads();
    }
    const int g0 = NEURON_OUTPUTS / 16 * block;
    group_write<group_places(TILES)>(a, sums, g0, min(NEURON_OUTPUTS / 16, a.groups - g0), split);
    if (a.splits > 1) { // others read this block's sums
        cluster_leave();
        cluster_wait();
    }
#else
    __trap(); // code for another processor than the one that the host asked for
#endif
}

// Of a format: its boxes, and a kernel for each number of tiles from 2 on.
struct neuron_kernels {
    int weights, n_boxes, bytes, factors; // bytes: of a row of a stage
    neuron_box (*box)(int);
    int (*rows)(int tiles);
    void (*run[NEURON_KERNELS])(neuron_args);
};
template <class C> struct neurons_of {
    typedef by_neuron<C> F;
    static constexpr neuron_kernels kernels = {
        F::weights,
        F::n_boxes,
        neuron_bytes<C>(),
        F::factors,
        F::box,
        F::rows,
        {neuron_kernel<C, 2>, neuron_kernel<C, 3>, neuron_kernel<C, 4>, neuron_kernel<C, 5>, neuron_kernel<C, 6>,
         neuron_kernel<C, 7>, neuron_kernel<C, 8>, neuron_kernel<C, 9>, neuron_kernel<C, 10>, neuron_kernel<C, 11>,
         neuron_kernel<C, 12>, neuron_kernel<C, 13>, neuron_kernel<C, 14>, neuron_kernel<C, 15>, neuron_kernel<C, 16>,
         neuron_kernel<C, 17>, neuron_kernel<C, 18>}};
};
const neuron_kernels *neurons_32(int type);
const neuron_kernels *neurons_k(int type);

} // namespace te
#endif
