// batch.cuh - dot products of rows with two to eight vectors, on tensor cores: what rows_block (rows.cuh) is for one.
//
// A block's rows go in groups of 16. Its columns are cut into slices; a warp has the same slice of every group, or of every
// other one where there are fewer slices than warps, and loads of its next columns in flight while it works on some. After
// BATCH_ROUND groups of each warp their sums meet in shared memory and are added in order.
#ifndef TE_CUDA_BATCH_CUH
#define TE_CUDA_BATCH_CUH

#include "batch_codec.cuh"

namespace te {

constexpr int BATCH_ROUND = 2, BATCH_SUMS = BATCH_ROWS * BATCH_TOKENS,
              BATCH_ROUND_FLOATS = ROWS_WARPS * BATCH_ROUND * BATCH_SUMS;

template <class C> struct batch_block {
    typedef batch<C> F;
    typedef typename F::row lane_row;
    const rows_args &a;
    uint4 *q;
    bytes32 *scales;
    float *part; // the sums of a round, then those of all rows
    const uint8_t **pointer;
    int n_pieces;
    rows_norm<BATCH_TOKENS> &norm;
    lane_row ahead[F::depth][2];
    early_norm early;
    bool late = false;

    struct slice {
        int first, n; // chunks of the tile; below 1: none
    };
    __device__ __forceinline__ slice own(int c0) const {
        const int all = (min(a.tile, a.cols - c0) + F::chunk - 1) / F::chunk, each = (all + a.parts - 1) / a.parts,
                  lo = (int)threadIdx.x / 32 % a.parts * each;
        return {min(lo, all - 1), min(each, all - lo)};
    }
    __device__ __forceinline__ int first_group() const { return (int)threadIdx.x / 32 / a.parts; }
    __device__ __forceinline__ batch_acts acts() const { return {(uint8_t *)q, (float *)scales, a.tile / 4}; }
    __device__ __forceinline__ void load(lane_row (&to)[2], const uint8_t *const (&row)[2], int chunk) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            to[i] = lane_row();
            if (row[i]) F::load(to[i], row[i], chunk, threadIdx.x % 4, a.cols);
        }
    }
    // A warp's chunks: all of its slice, of each of its groups. `depth` of them are on their way.
    struct position {
        int group, k;
        __device__ __forceinline__ void next(int chunks, int sets) {
            if (++k < chunks) return;
            k = 0;
            group += sets;
        }
    };
    // Starts the loads of each warp's first columns of rows row(0) .. row(n - 1).
    template <class R> __device__ __forceinline__ void start_rows(int n, int c0, R row) {
        const slice s = own(c0);
        if (s.n < 1) return;
        position to = {first_group(), 0};
#pragma unroll
        for (int j = 0; j < F::depth; j++) {
            const int r = BATCH_ROWS * to.group + (int)threadIdx.x % 32 / 4;
            const uint8_t *const p[2] = {r < n ? row(r) : nullptr, r + 8 < n ? row(r + 8) : nullptr};
            load(ahead[j], p, c0 / F::chunk + s.first + to.k);
            to.next(s.n, ROWS_WARPS / a.parts);
        }
    }
    __device__ __forceinline__ void start(int n, int c0) {
        start_rows(n, c0, [&](int r) { return pointer[r]; });
    }
    // The same before the pointers are there: row(r) is the pointer to be.
    template <class R> __device__ __forceinline__ void start_early(int n, R row) { start_rows(n, 0, row); }
    // The input, or its first tile, into shared memory.
    __device__ __forceinline__ void input(float *room) {
        if (a.prepared) return batch_take<typename F::input>(a, 0, acts());
        late = a.norm.kind == TE_RMS_NORM && !a.norm.b && a.tile >= a.cols;
        if (!late) measure<BATCH_TOKENS>(a, norm, room);
        batch_fill<typename F::input>(a, norm, 0, acts(), late, room);
    }
    // Another tile of it.
    __device__ __forceinline__ void fill(int c0) {
        if (a.prepared)
            batch_take<typename F::input>(a, c0, acts());
        else
            batch_fill<typename F::input>(a, norm, c0, acts(), false, nullptr);
    }
    // Adds up what warps have left of groups g0 .. of a round. All threads call it.
    __device__ __forceinline__ void end_round(int g0, int groups, bool first) {
        const int sets = ROWS_WARPS / a.parts;
        __syncthreads();
        for (int i = threadIdx.x; i < min(BATCH_ROUND * sets, groups - g0) * BATCH_SUMS; i += ROWS_THREADS) {
            const int g = i / BATCH_SUMS;
            const float *from = part + (g % sets * a.parts * BATCH_ROUND + g / sets) * BATCH_SUMS + i % BATCH_SUMS;
            float v = 0;
#pragma unroll 4
            for (int w = 0; w < a.parts; w++) v += from[w * BATCH_ROUND * BATCH_SUMS];
            float *to = part + BATCH_ROUND_FLOATS + g0 * BATCH_SUMS + i;
            *to = first ? v : *to + v;
        }
        __syncthreads();
    }
    // The sums of rows pointer[0..n-1], as sum(r, t). start and input come before.
    __device__ __forceinline__ void run(int n) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = (n + BATCH_ROWS - 1) / BATCH_ROWS,
                  sets = ROWS_WARPS / a.parts;
        const batch_acts x = acts();
        for (int c0 = 0; c0 < a.cols; c0 += a.tile) {
            if (c0 > 0) {
                start(n, c0);
                fill(c0);
            }
            const slice s = own(c0);
            const int chunk = c0 / F::chunk + s.first,
                      all = s.n > 0 ? (groups - first_group() + sets - 1) / sets * s.n : 0;
            position now = {first_group(), 0}, to = now;
#pragma unroll
            for (int j = 0; j < F::depth; j++) to.next(s.n, sets);
            int g0 = 0, held = 0; // groups of this round whose sums are there
            float sum[4] = {};
            for (int i = 0; i < all; i += F::depth) {
#pragma unroll
                for (int j = 0; j < F::depth; j++) {
                    if (i + j >= all) break;
                    F::multiply(ahead[j], x, s.first + now.k, lane, sum);
                    const int r = BATCH_ROWS * to.group + lane / 4;
                    const uint8_t *const p[2] = {r < n ? pointer[r] : nullptr, r + 8 < n ? pointer[r + 8] : nullptr};
                    load(ahead[j], p, chunk + to.k);
                    to.next(s.n, sets);
                    now.next(s.n, sets);
                    if (now.k) continue;
                    float2 *at = (float2 *)(part + (warp * BATCH_ROUND + held++) * BATCH_SUMS);
                    at[lane] = make_float2(sum[0], sum[1]);
                    at[32 + lane] = make_float2(sum[2], sum[3]);
#pragma unroll
                    for (int k = 0; k < 4; k++) sum[k] = 0;
                    if (held < BATCH_ROUND) continue;
                    end_round(g0, groups, c0 == 0);
                    g0 += BATCH_ROUND * sets;
                    held = 0;
                }
            }
            for (int i = lane; s.n < 1 && i < BATCH_ROUND * BATCH_SUMS; i += 32)
                part[warp * BATCH_ROUND * BATCH_SUMS + i] = 0;
            for (; g0 < groups; g0 += BATCH_ROUND * sets) end_round(g0, groups, c0 == 0); // without more groups
        }
    }
    // Before a second run with the same input: only of several tiles the first must come again.
    __device__ __forceinline__ void rewind() {
        if (a.tile < a.cols) fill(0);
    }
    __device__ __forceinline__ float sum(int r, int t) const {
        const float s = part[BATCH_ROUND_FLOATS + r * BATCH_TOKENS + t];
        return late ? s * norm.scale[t] : s;
    }
};

template <class C> constexpr batch_shape batch_shape_of() {
    if constexpr (batch<C>::there)
        return {batch<C>::input::column_bytes, batch<C>::input::scale_bytes, batch<C>::chunk, batch<C>::input::form};
    else
        return {0, 0, 0, BATCH_FLOATS};
}

// On the host. Shared memory of a tile's activations, of their scales and of the sums of so many rows.
inline size_t batch_tile_bytes(const batch_shape &f, int tile) { return (size_t)tile * (size_t)f.column_bytes; }
inline size_t batch_scale_bytes(const batch_shape &f, int tile) {
    return (size_t)(tile / BATCH_SCALED) * (size_t)f.scale_bytes;
}
inline size_t batch_sum_bytes(size_t rows) {
    return 4 * ((size_t)BATCH_ROUND_FLOATS + (rows + BATCH_ROWS - 1) / BATCH_ROWS * BATCH_SUMS);
}
// The columns of a tile, whose activations take at most so many bytes, and into how many slices they go where a block has
// so many rows.
inline void set_batch_tile(rows_args *a, const batch_shape &f, size_t most_bytes, int rows) {
    auto up = [](int n, int by) { return (n + by - 1) / by; };
    int most = (int)(most_bytes / (batch_tile_bytes(f, BATCH_UNIT) + batch_scale_bytes(f, BATCH_UNIT)));
    if (most < 1) most = 1;
    const int all = up(a->cols, BATCH_UNIT);
    a->tile = BATCH_UNIT * up(all, up(all, most));
    const int chunks = up(a->cols < a->tile ? a->cols : a->tile, f.chunk), groups = up(rows > 0 ? rows : 1, BATCH_ROWS);
    int least = 0;
    for (int p = ROWS_WARPS; p; p /= 2) { // as many chunks as the busiest warp has
        const int n = up(chunks, p) * up(groups, ROWS_WARPS / p);
        if (least && n >= least) continue;
        least = n;
        a->parts = p;
    }
}

} // namespace te
#endif
