// attention_warp.cuh - attention over K and V of F16 in which no warp waits for another: each has positions of its own, which
// it copies, scores and adds up 8 at a time, while the next ones are on their way. Their sums meet once, at the end.
#ifndef TE_CUDA_ATTENTION_WARP_CUH
#define TE_CUDA_ATTENTION_WARP_CUH

#include "te_cuda.h"
#include "tools.cuh"

namespace te {

constexpr int ATT_WARPS = 8, ATT_MAX_DIM = 256;
// Positions of a piece, which never leaves its block; pieces of a warp in shared memory.
constexpr int WARP_ROWS = 8, WARP_STAGES = 2;

// 16 bytes from device to shared memory, in the background where the device can.
__device__ __forceinline__ void copy16(void *to, const void *from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
#else
    *(uint4 *)to = __ldcg((const uint4 *)from);
#endif
}
__device__ __forceinline__ void copies_end() { // of a group
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int LEFT> __device__ __forceinline__ void copies_wait() { // for all groups but so many, the last ones
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

// cap * tanh(x / cap), where there is a cap. Where the exponential overflows, the quotient is 0.
__device__ __forceinline__ float capped(float x, float cap) {
    return cap > 0 ? cap - __fdividef(2 * cap, __expf(2 * x / cap) + 1) : x;
}

template <int G> struct attention_smem {
    alignas(16) float q[G][ATT_MAX_DIM];
    union {
        float score[G][64 + TE_CUDA_MAX_TOK];
        struct { // where each warp has its own positions
            float of_rows[ATT_WARPS][WARP_ROWS * G], best[G][ATT_WARPS], total[G][ATT_WARPS];
        } warp;
    };
    float best[G], total[G], factor[G];
    int is_last;
};

// Scores of rows of D F16 values, for G heads: LANES lanes share a row, each VALUES neighbours of it.
template <int G, int D> struct short_rows {
    static constexpr int LANES = G * D / 32 < 8 ? 8 : G * D / 32, VALUES = D / LANES, ROWS = 32 / LANES;
    alignas(16) float q[G][VALUES];
    __device__ __forceinline__ void load(const float (*from)[ATT_MAX_DIM], int heads) {
        const int c = threadIdx.x % LANES * VALUES;
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
            for (int i = 0; i < VALUES; i += 4)
                *(float4 *)&q[g][i] = g < heads ? *(const float4 *)&from[g][c + i] : make_float4(0, 0, 0, 0);
    }
    __device__ __forceinline__ float score(const uint8_t *row, int lane) const {
        constexpr int WORDS = VALUES / 2;
        alignas(16) uint32_t w[WORDS];
        const uint8_t *from = row + lane % LANES * VALUES * 2;
        if constexpr (WORDS % 4 == 0)
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) *(uint4 *)&w[i] = *(const uint4 *)(from + 4 * i);
        else
            *(uint2 *)w = *(const uint2 *)from;
        float sum[G] = {};
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const float2 k = half2_bits(w[i]);
#pragma unroll
            for (int g = 0; g < G; g++) sum[g] = fmaf(k.y, q[g][2 * i + 1], fmaf(k.x, q[g][2 * i], sum[g]));
        }
        return warp_sums<G, LANES>(sum, lane);
    }
};

// A warp's part of the positions of a block, for G heads of D values.
template <int G, int D> struct warp_rows {
    static constexpr int ROW = 2 * D, PIECE = 2 * WARP_ROWS * ROW; // bytes: of a row, of a piece's K and V
    static constexpr int EACH = G < 4 ? 1 : G * WARP_ROWS / 32,
                         LANES = WARP_ROWS / EACH; // weights of a lane; lanes of a head
    static constexpr int COLS = D / 32;            // of V, of a lane
    short_rows<G, D> q;
    float best, total;  // of head lane / LANES
    float acc[G][COLS]; // columns COLS * lane ...
    int first, end, n_pieces, block;
    int mine, step; // pieces: the first, and how far it is to the next
    const uint8_t *k_pool, *v_pool;
    const int *table;
    size_t head_rows, at_head; // rows from block to block; the head's first
    uint8_t *ring;

    __device__ __forceinline__ int block_of(int piece) const {
        return piece < n_pieces ? __ldcg(table + (first + piece * WARP_ROWS) / TE_CUDA_KV_BLOCK) : 0;
    }
    // The piece's copies, as a group; of none, an empty one.
    __device__ __forceinline__ void fetch(int piece, int stage) const {
        if (piece < n_pieces) {
            const size_t at =
                ((size_t)block * head_rows + at_head + (first + piece * WARP_ROWS) % TE_CUDA_KV_BLOCK) * ROW;
            uint8_t *to = ring + stage * PIECE;
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int i = 16 * lane; i < PIECE / 2; i += 16 * 32) {
                copy16(to + i, k_pool + at + i);
                copy16(to + PIECE / 2 + i, v_pool + at + i);
            }
        }
        copies_end();
    }
    // Positions from `from` to `to`, old ones, shared by `warps` warps, of which this is number `warp`: the first pieces are
    // on their way behind this. own: room for WARP_STAGES pieces.
    __device__ __forceinline__ void begin(const te_attention_args &a, const int *blocks, int kvh, int from, int to,
                                          int warp, int warps, uint8_t *own) {
        mine = warp;
        step = warps;
        first = from;
        end = to;
        n_pieces = to > from ? (to - from + WARP_ROWS - 1) / WARP_ROWS : 0;
        k_pool = (const uint8_t *)a.k_pool;
        v_pool = (const uint8_t *)a.v_pool;
        table = blocks;
        head_rows = (size_t)a.n_head_kv * TE_CUDA_KV_BLOCK;
        at_head = (size_t)kvh * TE_CUDA_KV_BLOCK;
        ring = own;
        best = -INFINITY;
        total = 0;
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
            for (int c = 0; c < COLS; c++) acc[g][c] = 0;
        int blocks_ahead[WARP_STAGES];
#pragma unroll
        for (int s = 0; s < WARP_STAGES; s++) blocks_ahead[s] = block_of(mine + s * step);
        const int next = block_of(mine + WARP_STAGES * step);
#pragma unroll
        for (int s = 0; s < WARP_STAGES; s++) {
            block = blocks_ahead[s];
            fetch(mine + s * step, s);
        }
        block = next;
    }
    // n rows of K and V, those before `hidden` unseen. room: WARP_ROWS * G floats of this warp.
    __device__ __forceinline__ void add(const te_attention_args &a, const uint8_t *ks, const uint8_t *vs, int n,
                                        int hidden, float *room) {
        const int lane = threadIdx.x % 32, head = G == 1 ? 0 : lane / LANES;
        constexpr int SHARE = short_rows<G, D>::LANES, AT_ONCE = short_rows<G, D>::ROWS;
#pragma unroll
        for (int p0 = 0; p0 < WARP_ROWS; p0 += AT_ONCE) {
            const int p = p0 + lane / SHARE;
            const float v = q.score(ks + min(p, n - 1) * ROW, lane);
            if (sum_owner<G, SHARE>(lane)) room[p * G + sum_index<G, SHARE>(lane)] = v;
        }
        __syncwarp();
        float x[EACH], most = -INFINITY, sum = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int p = lane % LANES + i * LANES;
            x[i] = p < n && p >= hidden ? capped(room[p * G + head] * a.scale, a.soft_cap) : -INFINITY;
            most = fmaxf(most, x[i]);
        }
#pragma unroll
        for (int o = LANES / 2; o; o /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        const float now = fmaxf(best, most), zero = now == -INFINITY ? 0 : now, f = expf(best - zero);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            x[i] = expf(x[i] - zero);
            sum += x[i];
        }
#pragma unroll
        for (int o = LANES / 2; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
        total = total * f + sum;
        best = now;
        __syncwarp(); // lanes may share what they read
#pragma unroll
        for (int i = 0; i < EACH; i++) room[(lane % LANES + i * LANES) * G + head] = x[i];
        __syncwarp();
#pragma unroll
        for (int g = 0; g < G; g++) {
            const float by = __shfl_sync(~0u, f, g * LANES);
#pragma unroll
            for (int c = 0; c < COLS; c++) acc[g][c] *= by;
        }
        auto add_row = [&](int p) {
            alignas(16) float w[G];
            alignas(8) uint32_t bits[COLS / 2];
            const uint32_t *from = (const uint32_t *)(vs + p * ROW) + lane * (COLS / 2);
            if constexpr (COLS == 4)
                *(uint2 *)bits = *(const uint2 *)from;
            else
                bits[0] = *from;
            if constexpr (G == 1)
                w[0] = room[p];
            else
#pragma unroll
                for (int g = 0; g < G; g += 4) *(float4 *)&w[g] = *(const float4 *)&room[p * G + g];
#pragma unroll
            for (int c = 0; c < COLS / 2; c++) {
                const float2 v = half2_bits(bits[c]);
#pragma unroll
                for (int g = 0; g < G; g++) {
                    acc[g][2 * c] = fmaf(w[g], v.x, acc[g][2 * c]);
                    acc[g][2 * c + 1] = fmaf(w[g], v.y, acc[g][2 * c + 1]);
                }
            }
        };
        if (n == WARP_ROWS) {
#pragma unroll
            for (int p = 0; p < WARP_ROWS; p++) add_row(p);
        } else {
#pragma unroll 1
            for (int p = 0; p < n; p++) add_row(p); // what lies behind may be no numbers
        }
        __syncwarp(); // rows and weights are about to change
    }
    __device__ __forceinline__ void run(const te_attention_args &a, int lowest, float *room) {
        int stage = 0;
#pragma unroll 1
        for (int i = mine; i < n_pieces; i += step) {
            copies_wait<WARP_STAGES - 1>();
            __syncwarp();
            const int p = first + i * WARP_ROWS;
            const uint8_t *rows = ring + stage * PIECE;
            add(a, rows, rows + PIECE / 2, min(WARP_ROWS, end - p), lowest - p, room);
            const int next = i + WARP_STAGES * step;
            fetch(next, stage);
            block = block_of(next + step);
            stage = (stage + 1) % WARP_STAGES;
        }
        copies_wait<0>();
    }
    // All warps' sums under one maximum, to lines[warp][head] (pairs of columns), and what the heads' softmax is.
    __device__ __forceinline__ void finish(attention_smem<G> &s, float2 *lines) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (lane % LANES == 0 && (G > 1 || lane == 0)) {
            s.warp.best[lane / LANES][warp] = best;
            s.warp.total[lane / LANES][warp] = total;
        }
        __syncthreads(); // and nobody reads the ring any more
#pragma unroll
        for (int g = 0; g < G; g++) {
            const float theirs = s.warp.best[g][lane % ATT_WARPS], most = warp_max(theirs),
                        own = __shfl_sync(~0u, theirs, warp), by = most == -INFINITY ? 0 : expf(own - most);
            float2 *to = lines + (warp * G + g) * (D / 2) + lane * (COLS / 2);
#pragma unroll
            for (int c = 0; c < COLS / 2; c++) to[c] = make_float2(acc[g][2 * c] * by, acc[g][2 * c + 1] * by);
            if (threadIdx.x != g) continue;
            float sum = 0;
            for (int w = 0; w < ATT_WARPS; w++)
                sum += most == -INFINITY ? 0 : s.warp.total[g][w] * expf(s.warp.best[g][w] - most);
            s.best[g] = most;
            s.total[g] = sum;
        }
    }
};
template <int G> struct warp_rows<G, 0> {};

} // namespace te
#endif
