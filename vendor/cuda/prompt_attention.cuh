// prompt_attention.cuh - the kernel of attention of a prompt's tokens (prefill_attention.cu).
#ifndef TE_CUDA_PROMPT_ATTENTION_CUH
#define TE_CUDA_PROMPT_ATTENTION_CUH

#include "kv_rows.cuh"
#include "prompt_multiply.cuh"
#include "te_cuda.h"

namespace te {
namespace {

constexpr int MAX_ROWS = 128, PANEL_BEGIN = 1024;
// Parts of positions: how many there are at most, of how many tokens together, tiles of one, floats before its values.
constexpr int FEW_TOK = 256, MOST_PARTS = 8, MOST_ROWS = MOST_PARTS * TE_CUDA_WIDE_TOK, LEAST_TILES = 2, PART_BEGIN = 4;

struct prompt_args {
    te_attention_args op;
    int group;  // query heads of a KV head
    int share;  // of them in a block
    int chunks; // blocks for them all
    int row_k, row_v, pitch;
    int parts;   // of few tokens: blocks that share positions,
    float *part; // and what they leave: [n_tok][n_head][parts], each best, total, and sums from PART_BEGIN on
};

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A tile of K or V that is not F16, or whose rows are not of whole 16 bytes, by all threads of a block: n positions of heads of
// d values, then zeros. Apart from the kernel, whose code is read anew by each launch.
template <int D, int TILE, int THREADS, bool PANELS>
__device__ __noinline__ void convert_tile(uint16_t *to, const uint8_t *from, int bytes, int type, int n, int d) {
    for (int e = threadIdx.x; e < TILE * (D / 8); e += THREADS) {
        const int r = e / (D / 8), c = e % (D / 8);
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool there = r < n && 8 * c + 2 * i < d;
            const float2 f = there ? pair_of(type, from + (size_t)(r * bytes), 8 * c + 2 * i) : make_float2(0, 0);
            w[i] = half2_of(f.x, f.y);
        }
        *(uint4 *)(to + place_in<D, PANELS>(TILE, r, c)) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

// D: values of a head, rounded up. MATS: matrices of 16 rows of a warp: with two, what is read of K and V serves twice.
// STAGES: tiles of K and V in flight. PANELS: four warps multiply 64 rows together, by wgmma.
// FEW: up to FEW_TOK tokens. Where positions are cut depends on the last and first ones of all of a sequence's tokens, so
// that a token's bits do not depend on who shares its block. Which of the blocks takes a part does: of short sequences, which
// have one part each, all blocks have some.
// PLAIN: heads of D values of F16, no window and no cap. The kernel for all has 80 KB of code, of which each launch reads what
// it needs anew.
template <int D, int WARPS, int MATS, int TILE, int STAGES, bool PANELS, bool FEW, bool PLAIN>
__device__ __forceinline__ void attend_rows(const prompt_args &args) {
    constexpr int ROWS = 16 * MATS * WARPS, THREADS = 32 * WARPS, UNITS = D / 8;
    const te_attention_args &a = args.op;
    extern __shared__ uint4 shared[];
    __shared__ int token_pos[MAX_ROWS], token_seq[MAX_ROWS], all_pos[FEW ? FEW_TOK : 1], all_seq[FEW ? FEW_TOK : 1];
    static_assert(!PANELS || (MATS == 1 && TILE == 64 && WARPS % 4 == 0 && STAGES > 1), "what four warps multiply");
    const uint32_t off = PANELS ? (PANEL_BEGIN - shared_address(shared) % PANEL_BEGIN) % PANEL_BEGIN : 0;
    uint16_t *const qs = (uint16_t *)((uint8_t *)shared + off), *const kv = qs + ROWS * D;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, d = PLAIN ? D : a.n_embd_head;
    const int kvh = blockIdx.y / args.chunks, first = blockIdx.y % args.chunks * args.share;
    const int n_tok = ROWS / args.share, t0 = a.n_before + (gridDim.x - 1 - blockIdx.x) * n_tok; // the longest first
    auto at = [](int row, int unit) { return place_in<D, PANELS>(TILE, row, unit); };
    dep_go();
    dep_wait();
#pragma unroll 1
    for (int i = tid; i < MAX_ROWS; i += THREADS) {
        const int t = t0 + i;
        const bool there = i < n_tok && t < a.n_tok;
        const int pos = there ? __ldcg(a.pos + t) : -1;
        token_pos[i] = pos >= 0 && pos < a.n_ctx ? pos : -1;
        token_seq[i] = there ? (a.row ? __ldcg(a.row + t) : t) : -1;
    }
#pragma unroll 1
    for (int t = tid; FEW && t < a.n_tok; t += THREADS) {
        const int pos = __ldcg(a.pos + t);
        all_pos[t] = pos < a.n_ctx ? pos : -1;
        all_seq[t] = a.row ? __ldcg(a.row + t) : t;
    }
    __syncthreads();
    // Row r is head first + r % share of token r / share.
    auto is_row = [&](int r) {
        return r / args.share < n_tok && t0 + r / args.share < a.n_tok && first + r % args.share < args.group;
    };
    auto pos_of = [&](int r) { return is_row(r) ? token_pos[r / args.share] : -1; };
#pragma unroll 1
    for (int e = tid; e < ROWS * UNITS; e += THREADS) {
        const int r = e / UNITS, c = e % UNITS;
        const bool there = pos_of(r) >= 0;
        const size_t from =
            (size_t)(t0 + r / args.share) * a.n_head + (size_t)(kvh * args.group + first + r % args.share);
        fetch16(qs + place_in<D, PANELS>(ROWS, r, c), (const uint16_t *)a.scratch + (there ? from * D + 8 * c : 0),
                there);
    }
    fetches_end();
    // Positions p0 .. p0 + TILE - 1 of a block of the pools; those from `end` on are zeros: nothing was written there.
    const bool wide_k = PLAIN || (a.type_k == TE_F16 && d % 8 == 0),
               wide_v = PLAIN || (a.type_v == TE_F16 && d % 8 == 0);
    const int row_k = PLAIN ? 2 * D : args.row_k, row_v = PLAIN ? 2 * D : args.row_v;
    auto first_of = [&](int pos) { return PLAIN ? 0 : first_seen(a, pos); };
    auto fetch = [&](int stage, int block, int p0, int end) {
        uint16_t *ks = kv + stage * 2 * TILE * D, *vs = ks + TILE * D;
        const size_t row = ((size_t)block * a.n_head_kv + kvh) * TE_CUDA_KV_BLOCK + p0 % TE_CUDA_KV_BLOCK;
        const uint8_t *k = (const uint8_t *)a.k_pool + row * (size_t)row_k,
                      *v = (const uint8_t *)a.v_pool + row * (size_t)row_v;
        auto bring = [&](bool wide, uint16_t *to, const uint8_t *from, int bytes, int type) {
            if (!wide) return convert_tile<D, TILE, THREADS, PANELS>(to, from, bytes, type, end - p0, d);
#pragma unroll 4
            for (int e = tid; e < TILE * UNITS; e += THREADS) {
                const int r = e / UNITS, c = e % UNITS;
                const bool there = p0 + r < end && 8 * c < d;
                fetch16(to + at(r, c), there ? from + (size_t)(r * bytes + 16 * c) : from, there);
            }
        };
        bring(wide_k, ks, k, row_k, a.type_k);
        bring(wide_v, vs, v, row_v, a.type_v);
        fetches_end();
    };
    float out[MATS][D / 8][4] = {}, best[MATS][2], total[MATS][2] = {};
    int rows[MATS][2], token[MATS][2], part_of[MATS][2] = {}, n_before = 0; // n_before: sequences in front of this one
#pragma unroll
    for (int m = 0; m < MATS; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            best[m][h] = -INFINITY;
            rows[m][h] = 16 * (MATS * warp + m) + lane / 4 + 8 * h;
            token[m][h] = is_row(rows[m][h]) ? rows[m][h] / args.share : MAX_ROWS; // none
        }
    // Powers of 2 are cheaper than of e. Under a soft cap scores are scaled before.
    const float cap = a.soft_cap, scale = !PLAIN && cap > 0 ? 1.0f : a.scale * 1.442695041f;
    for (int i0 = 0; i0 < n_tok;) { // tokens of one sequence at a time
        const int seq = token_seq[i0];
        if (seq < 0) break;                          // there are no more
        int i1 = n_tok, end = 0, begin = 0x7fffffff; // positions that these tokens see
#pragma unroll 1
        for (int i = n_tok - 1 - lane; i > i0; i -= 32)
            if (token_seq[i] != seq) i1 = i;
        for (int o = 16; o; o /= 2) i1 = min(i1, __shfl_xor_sync(~0u, i1, o));
#pragma unroll 1
        for (int i = i0 + lane; i < i1; i += 32) {
            end = max(end, token_pos[i] + 1);
            if (token_pos[i] >= 0) begin = min(begin, first_of(token_pos[i]));
        }
        for (int o = 16; o; o /= 2) {
            end = max(end, __shfl_xor_sync(~0u, end, o));
            begin = min(begin, __shfl_xor_sync(~0u, begin, o));
        }
        if (FEW && end &&
            ((i0 == 0 && t0 > 0) || i1 == n_tok)) { // more of it, all together, may stand before these, or behind
#pragma unroll 1
            for (int t = lane; t < a.n_tok; t += 32) {
                if (all_seq[t] != seq || all_pos[t] < 0) continue;
                end = max(end, all_pos[t] + 1);
                begin = min(begin, first_of(all_pos[t]));
            }
            for (int o = 16; o; o /= 2) {
                end = max(end, __shfl_xor_sync(~0u, end, o));
                begin = min(begin, __shfl_xor_sync(~0u, begin, o));
            }
        }
        int n_tiles = (end + TILE - 1) / TILE, first_tile = end ? begin / TILE : 0;
        if (FEW) {
            const int part = (int)(blockIdx.z + n_before++) % args.parts,
                      per = max(LEAST_TILES, (n_tiles - first_tile + args.parts - 1) / args.parts);
            first_tile += part * per;
            n_tiles = min(n_tiles, first_tile + per);
#pragma unroll
            for (int m = 0; m < MATS; m++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (token[m][h] >= i0 && token[m][h] < i1) part_of[m][h] = part;
            if (first_tile >= n_tiles) { // the same in all of the block
                i0 = i1;
                continue;
            }
        }
        // How many positions a row sees; of the warp's rows the most, and the least of those that are some token's.
        int limit[MATS][2], most = 0, least = 0x7fffffff;
#pragma unroll
        for (int m = 0; m < MATS; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int i = token[m][h];
                limit[m][h] = i >= i0 && i < i1 ? token_pos[i] + 1 : 0;
                most = max(most, limit[m][h]);
                if (i < MAX_ROWS) least = min(least, limit[m][h]);
            }
        for (int o = 16; o; o /= 2) {
            most = max(most, __shfl_xor_sync(~0u, most, o));
            least = min(least, __shfl_xor_sync(~0u, least, o));
        }
        i0 = i1;
        // The table is asked a tile earlier than its answer is needed.
        auto block_at = [&](int tile) {
            return tile < n_tiles ? __ldcg(a.table + (size_t)seq * a.ld_table + tile * TILE / TE_CUDA_KV_BLOCK) : 0;
        };
        auto fetch_ahead = [&](int tile, int block) { // or nothing, as a group
            if (tile < n_tiles)
                fetch(tile % STAGES, block, tile * TILE, end);
            else
                fetches_end();
        };
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) fetch_ahead(first_tile + i, block_at(first_tile + i));
        int next = block_at(first_tile + STAGES - 1);
        for (int i = first_tile; i < n_tiles; i++) {
            const int p0 = i * TILE;
            if (STAGES == 1) {
                __syncthreads();
                fetch(0, next, p0, end);
                next = block_at(i + 1);
            }
            fetches_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
            if (PANELS) written_for_multiply();
            __syncthreads();
            if (STAGES > 1) {
                fetch_ahead(i + STAGES - 1, next);
                next = block_at(i + STAGES);
            }
            const uint16_t *ks = kv + i % STAGES * 2 * TILE * D, *vs = ks + TILE * D;
            if (!PANELS && p0 >= most) continue;
            float s[MATS][TILE / 8][4] = {};
            if constexpr (PANELS)
                panel_scores<D>(s[0], shared_address(qs + warp / 4 * 64 * PANEL), ROWS, shared_address(ks));
#pragma unroll
            for (int k = 0; !PANELS && k < D / 16; k++) {
                uint32_t q[MATS][4];
#pragma unroll
                for (int m = 0; m < MATS; m++)
                    matrices(q[m], qs + at(16 * (MATS * warp + m) + lane % 16, 2 * k + lane / 16));
#pragma unroll
                for (int j = 0; j < TILE / 16; j++) {
                    uint32_t b[4];
                    matrices(b, ks + at(16 * j + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
                    for (int m = 0; m < MATS; m++) {
                        multiply_add(s[m][2 * j], q[m], b[0], b[1]);
                        multiply_add(s[m][2 * j + 1], q[m], b[2], b[3]);
                    }
                }
            }
            if (!PLAIN && cap > 0) { // tanh(u) = 1 - 2 / (e^(2u) + 1)
                const float slope = a.scale / cap * (2 * 1.442695041f), once = cap * 1.442695041f;
#pragma unroll
                for (int m = 0; m < MATS; m++)
#pragma unroll
                    for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                        for (int c = 0; c < 4; c++)
                            s[m][j][c] = once - __fdividef(2 * once, power_of_2(s[m][j][c] * slope) + 1);
            }
            if (p0 + TILE > least || p0 < first_of(most - 1)) { // some of the warp's rows do not see all of the tile
#pragma unroll
                for (int m = 0; m < MATS; m++)
#pragma unroll
                    for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                        for (int c = 0; c < 4; c++) {
                            const int p = p0 + 8 * j + lane % 4 * 2 + c % 2;
                            const int n = limit[m][c / 2];
                            if (p >= n || p < first_of(n - 1)) s[m][j][c] = -INFINITY;
                        }
            }
#pragma unroll
            for (int m = 0; m < MATS; m++) {
                float factor[2];
#pragma unroll
                for (int h = 0; h < 2; h++) { // four lanes hold a row
                    float top = -INFINITY;
#pragma unroll
                    for (int j = 0; j < TILE / 8; j++) top = fmaxf(top, fmaxf(s[m][j][2 * h], s[m][j][2 * h + 1]));
                    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                    top = fmaxf(best[m][h], fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale);
                    factor[h] = best[m][h] == -INFINITY ? 0 : power_of_2(best[m][h] - top);
                    best[m][h] = top;
                    if (top == -INFINITY) top = 0;
                    total[m][h] *= factor[h];
#pragma unroll
                    for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                        for (int c = 2 * h; c < 2 * h + 2; c++) {
                            s[m][j][c] = power_of_2(fmaf(s[m][j][c], scale, -top));
                            total[m][h] += s[m][j][c];
                        }
                }
#pragma unroll
                for (int j = 0; j < D / 8; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++) out[m][j][c] *= factor[c / 2];
            }
            if constexpr (PANELS) {
                uint32_t w[4][4];
#pragma unroll
                for (int k = 0; k < 4; k++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        w[k][e] = half2_of(s[0][2 * k + e / 2][e % 2 * 2], s[0][2 * k + e / 2][e % 2 * 2 + 1]);
                panel_values<D>(out[0], w, shared_address(vs));
            }
#pragma unroll
            for (int k = 0; !PANELS && k < TILE / 16; k++) {
                uint32_t w[MATS][4];
#pragma unroll
                for (int m = 0; m < MATS; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        w[m][e] = half2_of(s[m][2 * k + e / 2][e % 2 * 2], s[m][2 * k + e / 2][e % 2 * 2 + 1]);
#pragma unroll
                for (int j = 0; j < D / 16; j++) {
                    uint32_t b[4];
                    matrices_transposed(b, vs + at(16 * k + lane % 16, 2 * j + lane / 16));
#pragma unroll
                    for (int m = 0; m < MATS; m++) {
                        multiply_add(out[m][2 * j], w[m], b[0], b[1]);
                        multiply_add(out[m][2 * j + 1], w[m], b[2], b[3]);
                    }
                }
            }
        }
        if (STAGES > 1) __syncthreads(); // the next sequence's first tile may take the place of this one's last
    }
    fetches_wait<0>();
#pragma unroll
    for (int m = 0; m < MATS; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            total[m][h] += __shfl_xor_sync(~0u, total[m][h], 1);
            total[m][h] += __shfl_xor_sync(~0u, total[m][h], 2);
            const int i = token[m][h], t = t0 + i, head = first + rows[m][h] % args.share;
            if (i == MAX_ROWS) continue;
            if (FEW) {
                float *to = args.part +
                            (((size_t)t * a.n_head + (size_t)(kvh * args.group + head)) * args.parts + part_of[m][h]) *
                                (size_t)(d + PART_BEGIN);
                if (lane % 4 == 0) *(float2 *)to = make_float2(best[m][h], total[m][h]);
                if (best[m][h] == -INFINITY) continue;
#pragma unroll
                for (int j = 0; j < D / 8; j++) {
                    const int c = 8 * j + lane % 4 * 2;
                    if (c < d) *(float2 *)(to + PART_BEGIN + c) = make_float2(out[m][j][2 * h], out[m][j][2 * h + 1]);
                }
                continue;
            }
            if (a.sinks)
                total[m][h] += power_of_2(fmaf(__ldg(a.sinks + kvh * args.group + head), 1.442695041f, -best[m][h]));
            const float f = token_pos[i] >= 0 ? 1.0f / total[m][h] : 0;
            float *to = a.out + t * a.ld_out + (size_t)(kvh * args.group + head) * d;
#pragma unroll
            for (int j = 0; j < D / 8; j++) {
                const int c = 8 * j + lane % 4 * 2;
                if (c < d) *(float2 *)(to + c) = make_float2(out[m][j][2 * h] * f, out[m][j][2 * h + 1] * f);
            }
        }
}

// Blocks that find room on a multiprocessor at once.
constexpr int blocks_of(int warps, bool few) { return warps == 4 && few ? 2 : 1; }

template <int D, int WARPS, int MATS, int TILE, int STAGES, bool PANELS, bool FEW, bool PLAIN>
__global__ void __launch_bounds__(32 * WARPS, blocks_of(WARPS, FEW))
    prompt_kernel(const __grid_constant__ prompt_args args) {
    if constexpr (PANELS && !HAS_PANELS)
        __trap(); // such kernels are launched on Hopper alone
    else
        attend_rows<D, WARPS, MATS, TILE, STAGES, PANELS, FEW, PLAIN>(args);
}

} // namespace
} // namespace te
#endif
