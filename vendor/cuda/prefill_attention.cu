// prefill_attention.cu - attention of a prompt's tokens over the block table, on tensor cores.
//
// A first kernel norms and rotates heads: K and V go to the pool, q becomes F16 rows in the scratch memory. In the second a
// block takes some tokens' query heads of one KV head as rows of a matrix, 16 to a warp, and passes over K and V in tiles of
// positions under a running softmax; where K and V are not F16 they become it on the way into shared memory. Of few
// tokens, which are few blocks, several share a sequence's positions, and a third kernel puts their sums together.
#include "gemm_mma.cuh"
#include "kv_rows.cuh"
#include "prefill.cuh"
#include "wide_place.cuh"

namespace te {
namespace {

constexpr int SETTLE_WARPS = 8, MERGE_WARPS = 4, MAX_HEAD = 256, MAX_ROWS = 128;
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

// ---- heads ----

// A warp takes a head: normed and rotated in shared memory.
__device__ void settle(const te_attention_args &a, const float *src, const float *norm, bool rotate, int t, float *x) {
    const int lane = threadIdx.x % 32, d = a.n_embd_head;
    float sum = 0;
    for (int i = lane; i < d; i += 32) {
        x[i] = __ldcg(src + i);
        sum = fmaf(x[i], x[i], sum);
    }
    if (norm) {
        const float scale = 1.0f / sqrtf(warp_sum(sum) / (float)d + a.norm_eps);
        for (int i = lane; i < d; i += 32) x[i] *= scale * (a.norm_last ? 1 : __ldg(norm + i));
    }
    __syncwarp();
    if (!rotate) return; // V, which has no norm
    for (int i = lane; a.rope != TE_NO_ROPE && i < a.n_rot / 2; i += 32) {
        const bool near = a.rope == TE_ROPE_NORM;
        const int j = near ? 2 * i : i, k = near ? j + 1 : i + a.n_rot / 2;
        const float2 cs = __ldcg((const float2 *)(a.cs + (size_t)t * a.n_rot) + i);
        const float u = x[j], v = x[k];
        x[j] = u * cs.x - v * cs.y;
        x[k] = u * cs.y + v * cs.x;
    }
    __syncwarp();
    if (!norm || !a.norm_last) return; // RoPE leaves the mean square as it is: the weights alone come after it
    for (int i = lane; i < d; i += 32) x[i] *= __ldg(norm + i);
    __syncwarp();
}

__device__ __forceinline__ size_t pool_row(const te_attention_args &a, int seq, int p, int head) {
    return ((size_t)__ldcg(a.table + (size_t)seq * a.ld_table + p / TE_CUDA_KV_BLOCK) * a.n_head_kv + head) *
               TE_CUDA_KV_BLOCK +
           p % TE_CUDA_KV_BLOCK;
}

__global__ void __launch_bounds__(32 * SETTLE_WARPS) settle_kernel(const __grid_constant__ prompt_args args) {
    __shared__ float rooms[SETTLE_WARPS][MAX_HEAD];
    const te_attention_args &a = args.op;
    dep_go();
    dep_wait();
    const int t = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, d = a.n_embd_head;
    const int pos = __ldcg(a.pos + t), seq = a.row ? __ldcg(a.row + t) : t;
    float *x = rooms[warp];
    if (pos < 0 || pos >= a.n_ctx) return; // nobody looks at its q
    for (int j = warp + SETTLE_WARPS * (int)blockIdx.y; j < a.n_head + 2 * a.n_head_kv;
         j += SETTLE_WARPS * (int)gridDim.y) {
        __syncwarp();
        if (j < a.n_head) {
            if (t < a.n_before) continue;
            settle(a, a.q + t * a.ldq + (size_t)j * d, a.q_norm, true, t, x);
            const float by = a.temp_scale != 0 ? warmth(a, pos) : 1;
            uint32_t *to = (uint32_t *)((uint16_t *)a.scratch + ((size_t)t * a.n_head + j) * args.pitch);
            for (int i = lane; i < args.pitch / 2; i += 32)
                to[i] = 2 * i < d ? half2_of(by * x[2 * i], by * x[2 * i + 1]) : 0;
            continue;
        }
        const bool is_k = j < a.n_head + a.n_head_kv;
        const int head = j - a.n_head - (is_k ? 0 : a.n_head_kv);
        settle(a, (is_k ? a.k + t * a.ldk : a.v + t * a.ldv) + (size_t)head * d, is_k ? a.k_norm : a.v_norm, is_k, t,
               x);
        const size_t row = pool_row(a, seq, pos, head);
        store_row(is_k ? a.type_k : a.type_v, x,
                  (uint8_t *)(is_k ? a.k_pool : a.v_pool) + row * (size_t)(is_k ? args.row_k : args.row_v), d);
    }
}

// ---- attention ----

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Where eight values of a row stand in shared memory: no two of eight rows in one bank.
template <int D> __device__ __forceinline__ int place_of(int row, int unit) { return row * D + (unit ^ (row & 7)) * 8; }

// A tile of K or V that is not F16, or whose rows are not of whole 16 bytes, by all threads of a block: n positions of heads of
// d values, then zeros. Apart from the kernel, whose code is read anew by each launch.
template <int D, int TILE, int THREADS>
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
        *(uint4 *)(to + place_of<D>(r, c)) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

// D: values of a head, rounded up. MATS: matrices of 16 rows of a warp: with two, what is read of K and V serves twice.
// STAGES: tiles of K and V in flight. FEW: up to FEW_TOK tokens. Where positions are cut depends on the last and
// first ones of all of a sequence's tokens, so that a token's bits do not depend on who shares its block. Which of the
// blocks takes a part does: of short sequences, which have one part each, all blocks have some.
template <int D, int WARPS, int MATS, int TILE, int STAGES, bool FEW = false>
__global__ void __launch_bounds__(32 * WARPS, FEW ? 2 : 1) prompt_kernel(const __grid_constant__ prompt_args args) {
    constexpr int ROWS = 16 * MATS * WARPS, THREADS = 32 * WARPS, UNITS = D / 8;
    const te_attention_args &a = args.op;
    extern __shared__ uint4 shared[];
    __shared__ int token_pos[MAX_ROWS], token_seq[MAX_ROWS], all_pos[FEW ? FEW_TOK : 1], all_seq[FEW ? FEW_TOK : 1];
    uint16_t *const qs = (uint16_t *)shared, *const kv = qs + ROWS * D;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, d = a.n_embd_head;
    const int kvh = blockIdx.y / args.chunks, first = blockIdx.y % args.chunks * args.share;
    const int n_tok = ROWS / args.share, t0 = a.n_before + (gridDim.x - 1 - blockIdx.x) * n_tok; // the longest first
    auto at = [](int row, int unit) { return place_of<D>(row, unit); };
    dep_go();
    dep_wait();
    for (int i = tid; i < MAX_ROWS; i += THREADS) {
        const int t = t0 + i;
        const bool there = i < n_tok && t < a.n_tok;
        const int pos = there ? __ldcg(a.pos + t) : -1;
        token_pos[i] = pos >= 0 && pos < a.n_ctx ? pos : -1;
        token_seq[i] = there ? (a.row ? __ldcg(a.row + t) : t) : -1;
    }
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
    for (int e = tid; e < ROWS * UNITS; e += THREADS) {
        const int r = e / UNITS, c = e % UNITS;
        const bool there = pos_of(r) >= 0;
        const size_t from =
            (size_t)(t0 + r / args.share) * a.n_head + (size_t)(kvh * args.group + first + r % args.share);
        fetch16(qs + at(r, c), (const uint16_t *)a.scratch + (there ? from * D + 8 * c : 0), there);
    }
    fetches_end();
    // Positions p0 .. p0 + TILE - 1 of a block of the pools; those from `end` on are zeros: nothing was written there.
    const bool wide_k = a.type_k == TE_F16 && d % 8 == 0, wide_v = a.type_v == TE_F16 && d % 8 == 0;
    auto fetch = [&](int stage, int block, int p0, int end) {
        uint16_t *ks = kv + stage * 2 * TILE * D, *vs = ks + TILE * D;
        const size_t row = ((size_t)block * a.n_head_kv + kvh) * TE_CUDA_KV_BLOCK + p0 % TE_CUDA_KV_BLOCK;
        const uint8_t *k = (const uint8_t *)a.k_pool + row * (size_t)args.row_k,
                      *v = (const uint8_t *)a.v_pool + row * (size_t)args.row_v;
        auto bring = [&](bool wide, uint16_t *to, const uint8_t *from, int bytes, int type) {
            if (!wide) return convert_tile<D, TILE, THREADS>(to, from, bytes, type, end - p0, d);
#pragma unroll 4
            for (int e = tid; e < TILE * UNITS; e += THREADS) {
                const int r = e / UNITS, c = e % UNITS;
                const bool there = p0 + r < end && 8 * c < d;
                fetch16(to + at(r, c), there ? from + (size_t)(r * bytes + 16 * c) : from, there);
            }
        };
        bring(wide_k, ks, k, args.row_k, a.type_k);
        bring(wide_v, vs, v, args.row_v, a.type_v);
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
    const float cap = a.soft_cap, scale = cap > 0 ? 1.0f : a.scale * 1.442695041f;
    for (int i0 = 0; i0 < n_tok;) { // tokens of one sequence at a time
        const int seq = token_seq[i0];
        int i1 = i0, end = 0, begin = 0x7fffffff; // positions that these tokens see
        for (; i1 < n_tok && token_seq[i1] == seq; i1++) {
            end = max(end, token_pos[i1] + 1);
            if (token_pos[i1] >= 0) begin = min(begin, first_seen(a, token_pos[i1]));
        }
        if (FEW && end &&
            ((i0 == 0 && t0 > 0) || i1 == n_tok)) { // more of it, all together, may stand before these, or behind
            for (int t = lane; t < a.n_tok; t += 32) {
                if (all_seq[t] != seq || all_pos[t] < 0) continue;
                end = max(end, all_pos[t] + 1);
                begin = min(begin, first_seen(a, all_pos[t]));
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
        if (STAGES > 1 && first_tile < n_tiles)
            fetch(first_tile % STAGES, block_at(first_tile), first_tile * TILE, end);
        int next = block_at(first_tile + (STAGES > 1 ? 1 : 0));
        for (int i = first_tile; i < n_tiles; i++) {
            const int p0 = i * TILE;
            if (STAGES == 1) {
                __syncthreads();
                fetch(0, next, p0, end);
                next = block_at(i + 1);
            }
            fetches_wait<0>();
            __syncthreads();
            if (STAGES > 1 && i + 1 < n_tiles) {
                fetch((i + 1) % STAGES, next, p0 + TILE, end);
                next = block_at(i + 2);
            }
            const uint16_t *ks = kv + i % STAGES * 2 * TILE * D, *vs = ks + TILE * D;
            if (p0 >= most) continue;
            float s[MATS][TILE / 8][4] = {};
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
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
            if (cap > 0) { // tanh(u) = 1 - 2 / (e^(2u) + 1)
                const float slope = a.scale / cap * (2 * 1.442695041f), once = cap * 1.442695041f;
#pragma unroll
                for (int m = 0; m < MATS; m++)
#pragma unroll
                    for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                        for (int c = 0; c < 4; c++)
                            s[m][j][c] = once - __fdividef(2 * once, power_of_2(s[m][j][c] * slope) + 1);
            }
            if (p0 + TILE > least ||
                p0 < first_seen(a, most - 1)) { // some of the warp's rows do not see all of the tile
#pragma unroll
                for (int m = 0; m < MATS; m++)
#pragma unroll
                    for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                        for (int c = 0; c < 4; c++) {
                            const int p = p0 + 8 * j + lane % 4 * 2 + c % 2;
                            const int n = limit[m][c / 2];
                            if (p >= n || p < first_seen(a, n - 1)) s[m][j][c] = -INFINITY;
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
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) {
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

// A warp puts together the parts of a token's head.
__global__ void __launch_bounds__(32 * MERGE_WARPS) merge_parts_kernel(const __grid_constant__ prompt_args args) {
    const te_attention_args &a = args.op;
    const int lane = threadIdx.x % 32, d = a.n_embd_head;
    const int unit = (int)(blockIdx.x * MERGE_WARPS + threadIdx.x / 32), t = a.n_before + unit / a.n_head,
              head = unit % a.n_head;
    dep_go();
    dep_wait();
    if (t >= a.n_tok) return;
    const size_t width = (size_t)(d + PART_BEGIN);
    const float *from = args.part + ((size_t)t * a.n_head + head) * args.parts * width;
    float best[MOST_PARTS], most = -INFINITY, total = 0;
#pragma unroll
    for (int k = 0; k < MOST_PARTS; k++) {
        const float2 w = k < args.parts ? __ldcg((const float2 *)(from + k * width)) : make_float2(-INFINITY, 0);
        const float now = fmaxf(most, w.x), zero = now == -INFINITY ? 0 : now;
        best[k] = w.x;
        total = total * power_of_2(most - zero) + w.y * power_of_2(w.x - zero);
        most = now;
    }
    const bool sees = most > -INFINITY;
    if (a.sinks && sees) total += power_of_2(fmaf(__ldg(a.sinks + head), 1.442695041f, -most));
    const float by = sees ? 1.0f / total : 0;
    te_cuda_half half = {};
    half.tiles = a.half_tiles;
    half.words = a.half_words;
    half.matrices = a.half_matrices;
    // Means of values of F16 are in its range, and as exact in it as those were.
    if (a.half && head == 0 && lane == 0) a.half_scale[t] = 1;
    for (int c = 2 * lane; c < d; c += 64) {
        float2 sum = make_float2(0, 0);
#pragma unroll
        for (int k = 0; k < MOST_PARTS; k++) {
            if (best[k] == -INFINITY) continue;
            const float2 v = __ldcg((const float2 *)(from + k * width + PART_BEGIN + c));
            const float f = power_of_2(best[k] - most);
            sum = make_float2(fmaf(v.x, f, sum.x), fmaf(v.y, f, sum.y));
        }
        const int col = head * d + c;
        *(float2 *)(a.out + t * a.ld_out + col) = make_float2(sum.x * by, sum.y * by);
        if (a.half)
            *(uint32_t *)((uint16_t *)a.half + wide_place(half, t, col / 4 * 4) + col % 4 / 2 * wide_next(half)) =
                half2_of(sum.x * by, sum.y * by);
    }
}

struct variant {
    int d, rows, threads;
    size_t smem;
    void (*kernel)(prompt_args);
};
template <int D, int WARPS, int MATS, int TILE, int STAGES, bool FEW = false> constexpr variant variant_of() {
    return {D, 16 * MATS * WARPS, 32 * WARPS, 2 * (size_t)(16 * MATS * WARPS * D + STAGES * 2 * TILE * D),
            prompt_kernel<D, WARPS, MATS, TILE, STAGES, FEW>};
}
const variant variants[] = {variant_of<64, 8, 1, 64, 2>(), variant_of<128, 8, 1, 64, 2>(),
                            variant_of<128, 4, 1, 64, 1>(), variant_of<256, 4, 1, 32, 2>(),
                            variant_of<256, 4, 1, 32, 1>()};

const variant few_variants[] = {variant_of<64, 4, 1, 64, 2, true>(), variant_of<128, 4, 1, 64, 2, true>(),
                                variant_of<256, 4, 1, 32, 2, true>()};

template <int N> const variant *fitting(const te_cuda *d, int n_embd_head, const variant (&all)[N]) {
    for (const variant &v : all)
        if (v.d >= n_embd_head && v.smem + 2048 <= d->smem_block) return &v;
    return nullptr;
}
// Blocks of few tokens that share positions, as many as find room at once; 0: these are not so few.
int parts_of(const te_cuda *d, const te_attention_args *op) {
    const variant *v = fitting(d, op->n_embd_head, few_variants);
    if (!v || op->n_tok > FEW_TOK) return 0;
    const int group = op->n_head / op->n_head_kv, share = group < 8 ? group : 8,
              across = divide_up(op->n_tok, v->rows / share) * op->n_head_kv * divide_up(group, share),
              fits = 2 * d->info.n_sm / across,
              most = op->n_tok > TE_CUDA_WIDE_TOK ? MOST_ROWS / op->n_tok : MOST_PARTS;
    if (fits < 2) return op->n_tok <= TE_CUDA_WIDE_TOK ? 1 : 0;
    return fits < most ? fits : most;
}
const variant *variant_for(const te_cuda *d, const te_attention_args *op) {
    return parts_of(d, op) ? fitting(d, op->n_embd_head, few_variants) : fitting(d, op->n_embd_head, variants);
}

prompt_args prepare(const te_cuda *d, const te_attention_args *op, const variant *v) {
    prompt_args a = {};
    a.op = *op;
    if (!op->window) a.op.window = op->n_ctx;
    a.group = op->n_head / op->n_head_kv;
    a.share = a.group < 8 ? a.group : 8;
    a.chunks = divide_up(a.group, a.share);
    a.row_k = (int)te_row_bytes(op->type_k, op->n_embd_head);
    a.row_v = (int)te_row_bytes(op->type_v, op->n_embd_head);
    a.pitch = v->d;
    a.parts = parts_of(d, op);
    a.part = op->scratch + (size_t)op->n_tok * (size_t)op->n_head * (size_t)v->d / 2;
    return a;
}

} // namespace

size_t prompt_attention_floats(te_cuda *d, const te_attention_args *op) {
    const variant *v = variant_for(d, op);
    if (!v) return 0;
    const size_t heads = (size_t)op->n_tok * (size_t)op->n_head;
    const prompt_args a = prepare(d, op, v);
    return heads * ((size_t)v->d / 2 + (size_t)a.parts * (size_t)(op->n_embd_head + PART_BEGIN));
}

bool prompt_attention_halves(te_cuda *d, const te_attention_args *op) { return parts_of(d, op) > 0; }

te_status prompt_attention(te_cuda *d, const te_attention_args *op) {
    if (op->n_tok < 1 || op->n_tok > 65535 || op->n_before < 0 || op->n_before > op->n_tok)
        return refuse(d, te_fail(TE_ARGUMENT, "attention: %d tokens, %d in front of those that are wanted",
                                 (int)op->n_tok, (int)op->n_before));
    if (op->n_head_kv < 1 || op->n_head < 1 || op->n_head % op->n_head_kv || op->n_embd_head < 2 ||
        op->n_embd_head % 2 || op->n_embd_head > MAX_HEAD || op->n_ctx < 1)
        return refuse(d, te_fail(TE_UNSUPPORTED, "attention: %d heads on %d of %d values, context %d", (int)op->n_head,
                                 (int)op->n_head_kv, (int)op->n_embd_head, (int)op->n_ctx));
    if (op->rope != TE_NO_ROPE && (!op->cs || op->n_rot < 2 || op->n_rot % 2 || op->n_rot > op->n_embd_head))
        return refuse(
            d, te_fail(TE_ARGUMENT, "attention: %d values of %d are rotated", (int)op->n_rot, (int)op->n_embd_head));
    for (int32_t type : {op->type_k, op->type_v})
        if ((type != TE_F16 && type != TE_F32 && type != TE_BF16 && type != TE_Q8_0) ||
            (type == TE_Q8_0 && op->n_embd_head % 32))
            return refuse(d, te_fail(TE_UNSUPPORTED, "attention: K or V of type %d with heads of %d", (int)type,
                                     (int)op->n_embd_head));
    if (op->window < 0) return refuse(d, te_fail(TE_ARGUMENT, "attention: a window of %d positions", (int)op->window));
    const variant *v = variant_for(d, op);
    if (!v || !op->scratch || !aligned(op->scratch, 16) || !aligned(op->out, 8) || op->ld_out % 2)
        return refuse(d, te_fail(TE_ARGUMENT, "attention: the scratch memory or the result are not aligned"));
    if (op->half &&
        (!prompt_attention_halves(d, op) || !op->half_scale || op->half_words < 1 || 8 * op->half_tiles < op->n_tok))
        return refuse(
            d, te_fail(TE_ARGUMENT, "attention: %d tiles of F16 for %d tokens", (int)op->half_tiles, (int)op->n_tok));
    const prompt_args a = prepare(d, op, v);
    // Of few tokens each warp has a head.
    const int most = divide_up(op->n_head + 2 * op->n_head_kv, SETTLE_WARPS), across = 8 * d->info.n_sm / op->n_tok,
              shares = across < 1      ? 1
                       : across < most ? across
                                       : most;
    TE_CUDA_TRY(
        launch(d, "attention", settle_kernel, dim3((unsigned)op->n_tok, (unsigned)shares), 32 * SETTLE_WARPS, 0, a));
    if (op->n_before == op->n_tok) return TE_OK;
    const int n = op->n_tok - op->n_before;
    TE_CUDA_TRY(launch(d, "attention", v->kernel,
                       dim3((unsigned)divide_up(n, v->rows / a.share), (unsigned)(op->n_head_kv * a.chunks),
                            (unsigned)(a.parts ? a.parts : 1)),
                       v->threads, v->smem, a));
    if (!a.parts) return TE_OK;
    return launch(d, "attention", merge_parts_kernel, dim3((unsigned)divide_up((int64_t)n * op->n_head, MERGE_WARPS)),
                  32 * MERGE_WARPS, 0, a);
}

} // namespace te
