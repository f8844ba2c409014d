// batch_sums.cuh - sums of rows of down for two to eight tokens, on tensor cores.
//
// Rows go in groups of 16, columns in tiles of eight lanes' parts (codec::load_down); a warp sums all rows for its tiles.
// A is 16 columns of 16 rows: two parts' weights of two rows are interleaved into pairs. B is the rows' factors.
#ifndef TE_CUDA_BATCH_SUMS_CUH
#define TE_CUDA_BATCH_SUMS_CUH

#include "batch_codec.cuh"

namespace te {

// Shared memory of a block with so many rows: their factors as pairs of F16 or BF16.
constexpr int batch_factor_bytes(int rows, int parts) { return (rows + BATCH_ROWS - 1) / BATCH_ROWS * parts * 32 * 8; }

struct batch_rows {
    const uint8_t *const *pointer;
    int n;
    uint2 *factor;      // [groups][parts][lanes]
    float *most, *back; // [8] each
};

// Factors of the rows: value(e, t) of row e and token t < n_tok. All threads call it.
template <class F, class V> __device__ __forceinline__ void batch_factors(const batch_rows &r, int n_tok, V value) {
    if (F::parts == 2) {
        for (int t = threadIdx.x / 32; t < n_tok; t += (int)blockDim.x / 32) {
            float most = 0;
            for (int e = threadIdx.x % 32; e < r.n; e += 32) most = fmaxf(most, fabsf(value(e, t)));
            most = warp_max(most);
            const float2 by = half_range(most);
            if (threadIdx.x % 32 == 0) {
                r.most[t] = by.x;
                r.back[t] = by.y;
            }
        }
        __syncthreads();
    }
    const int lane = threadIdx.x % 32, t = lane / 4, q = lane % 4;
    for (int g = threadIdx.x / 32; g < (r.n + BATCH_ROWS - 1) / BATCH_ROWS; g += (int)blockDim.x / 32) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int e = BATCH_ROWS * g + 4 * q + i;
            v[i] = e < r.n && t < n_tok ? value(e, t) : 0;
            if (F::parts == 2 && t < n_tok) v[i] *= r.most[t];
        }
        uint32_t p0[F::parts], p1[F::parts];
        if constexpr (F::parts == 2) {
            split_halves(v[0], v[1], p0);
            split_halves(v[2], v[3], p1);
        } else {
            split_thirds(v[0], v[1], p0);
            split_thirds(v[2], v[3], p1);
        }
#pragma unroll
        for (int i = 0; i < F::parts; i++) r.factor[(g * F::parts + i) * 32 + lane] = make_uint2(p0[i], p1[i]);
    }
    __syncthreads();
}

// The sums of all rows in tiles tile, tile + step ... of a row of n_pieces parts, to to[t * cols + column].
template <class C>
__device__ __forceinline__ void batch_sums(const batch_rows &r, int tile, int step, int last_tile, int n_pieces,
                                           int n_tok, int cols, float *to) {
    typedef batch<C> F;
    constexpr int W = C::down_weights, DEPTH = sizeof(typename C::part) > 24 ? 1 : 2;
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, groups = (r.n + BATCH_ROWS - 1) / BATCH_ROWS;
    typename C::part ahead[DEPTH][4];
    auto load = [&](typename C::part(&p)[4], int group, int piece) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int e = BATCH_ROWS * group + 4 * q + i;
            p[i] = typename C::part();
            if (e < r.n && piece < n_pieces) p[i] = C::load_down(r.pointer[e], piece, n_pieces);
        }
    };
    if (tile < last_tile)
#pragma unroll
        for (int j = 0; j < DEPTH; j++)
            if (j < groups) load(ahead[j], j, 8 * tile + g);
    for (; tile < last_tile; tile += step) {
        float sum[W / 2][4] = {};
        for (int k = 0; k < groups; k += DEPTH) {
            const bool more = k + DEPTH < groups;
            const int next = more ? k + DEPTH : 0, next_tile = more ? tile : tile + step;
#pragma unroll
            for (int j = 0; j < DEPTH; j++) {
                if (k + j < groups) {
                    uint2 b[F::parts];
#pragma unroll
                    for (int i = 0; i < F::parts; i++) b[i] = r.factor[((k + j) * F::parts + i) * 32 + lane];
#pragma unroll
                    for (int h = 0; h < W / 8; h++) {
                        uint32_t hi[4][4], lo[4][4];
                        F::fragments(ahead[j], h, hi, lo);
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            float (&s)[4] = sum[4 * h + i];
                            if constexpr (F::parts == 3) {
#pragma unroll
                                for (int p = 0; p < 3; p++) multiply_add_bf16(s, hi[i], b[p].x, b[p].y);
                            } else {
                                multiply_add(s, hi[i], b[0].x, b[0].y);
                                multiply_add(s, hi[i], b[1].x, b[1].y);
                                if (!F::exact) multiply_add(s, lo[i], b[0].x, b[0].y);
                            }
                        }
                    }
                }
                if (next + j < groups && next_tile < last_tile) load(ahead[j], next + j, 8 * next_tile + g);
            }
        }
        const int piece = 8 * tile + g;
        if (piece >= n_pieces) continue;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = 2 * q + i;
            if (t >= n_tok) continue;
            const float back = F::parts == 2 ? r.back[t] : 1;
#pragma unroll
            for (int k = 0; k < W; k += 4) { // four columns are neighbours in all formats
                const int c = C::column(piece, k);
                const float4 v = make_float4(sum[k / 2][i] * back, sum[k / 2][2 + i] * back, sum[k / 2 + 1][i] * back,
                                             sum[k / 2 + 1][2 + i] * back);
                float *at = to + (size_t)t * cols + c;
                if (cols % 4 == 0) {
                    if (c < cols) *(float4 *)at = v;
                    continue;
                }
                if (c < cols) at[0] = v.x;
                if (c + 1 < cols) at[1] = v.y;
                if (c + 2 < cols) at[2] = v.z;
                if (c + 3 < cols) at[3] = v.w;
            }
        }
    }
}

} // namespace te
#endif
