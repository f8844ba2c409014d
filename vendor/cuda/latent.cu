// latent.cu - latent attention, of few tokens and of prompts.
//
// In four kernels, one behind the other, so that each sees all that the one before it wrote:
//     settle   the tokens' rows go to the pool, and the rotated values of their queries into `query`
//     heads    the rest of `query`: k_b_h . q of every head
//     attend   a block takes 8 query heads of a token and a part of its positions; it reads each row of the pool once, into
//              shared memory, for the scores and as V. Of few tokens positions are split, and merge adds the parts up
//     heads    v_b_h . what was gathered
#include "kv_rows.cuh"
#include "launch.h"

namespace te {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int MAX_RANK = 512, MAX_ROW = 640; // values of a latent, of a row
constexpr int HEADS = WARPS, TILE = 16, COLS = MAX_RANK / THREADS, PER_LANE = MAX_ROW / 32, MOST_SPLITS = 32;
constexpr int TOKENS = 8, ROWS = 4; // of the product of heads: tokens of a block, rows of a warp
static_assert(HEADS == 8 && TILE <= 32 && TE_CUDA_KV_BLOCK % TILE == 0,
              "weights are read as two float4; a tile is in a block");

struct latent_args {
    te_latent_args op;
    int splits;
    int row_bytes;
};

// ---- settle ----

// A warp takes the rotated values of one head, or the token's row of the pool.
__global__ void __launch_bounds__(THREADS) settle_kernel(latent_args args) {
    __shared__ float rows[WARPS][MAX_ROW];
    dep_wait();
    const te_latent_args &a = args.op;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, item = blockIdx.x * WARPS + warp, t = blockIdx.y;
    if (item > a.n_head) return; // no barrier follows
    const int row = a.n_rot + a.rank;
    const float2 *cs = (const float2 *)(a.cs + (size_t)t * a.n_rot);
    if (item < a.n_head) {
        if (t < a.n_before) return;
        const float *from = a.q + (size_t)t * a.ldq + (size_t)item * a.n_key + (a.n_key - a.n_rot);
        float *to = a.query + ((size_t)t * a.n_head + item) * row;
        for (int i = lane; i < a.n_rot / 2; i += 32) {
            const float x = __ldcg(from + 2 * i), y = __ldcg(from + 2 * i + 1);
            const float2 w = __ldcg(cs + i);
            to[2 * i] = x * w.x - y * w.y;
            to[2 * i + 1] = x * w.y + y * w.x;
        }
        return;
    }
    const int pos = __ldcg(a.pos + t);
    if (pos < 0) return;
    const float *kv = a.kv + (size_t)t * a.ldkv;
    float *x = rows[warp], sum = 0;
    for (int i = lane; i < a.rank; i += 32) {
        const float v = __ldcg(kv + i);
        x[a.n_rot + i] = v;
        sum = fmaf(v, v, sum);
    }
    const float scale = 1.0f / sqrtf(warp_sum(sum) / (float)a.rank + a.norm_eps);
    for (int i = lane; i < a.rank; i += 32) x[a.n_rot + i] *= scale * __ldg(a.norm + i);
    for (int i = lane; i < a.n_rot / 2; i += 32) {
        const float u = __ldcg(kv + a.rank + 2 * i), v = __ldcg(kv + a.rank + 2 * i + 1);
        const float2 w = __ldcg(cs + i);
        x[2 * i] = u * w.x - v * w.y;
        x[2 * i + 1] = u * w.y + v * w.x;
    }
    __syncwarp();
    const size_t block =
        (size_t)__ldcg(a.table + (size_t)(a.row ? __ldcg(a.row + t) : t) * a.ld_table + pos / TE_CUDA_KV_BLOCK);
    store_row(a.type, x,
              (uint8_t *)a.pool + (block * TE_CUDA_KV_BLOCK + pos % TE_CUDA_KV_BLOCK) * (size_t)args.row_bytes, row);
}

// ---- products of single heads ----

struct heads_args {
    te_mat w;
    int rows; // of a head
    const float *x;
    size_t ldx, dx; // from token to token, from head to head
    float *y;
    size_t ldy, dy;
    int n_tok;
};

// Weights i and i + 1 (i even) of a row.
__device__ __forceinline__ float2 weight_pair(int type, const uint8_t *row, int i) {
    if (type == TE_F32) return __ldg((const float2 *)(row + 4 * (size_t)i));
    const uint32_t both = __ldg((const uint32_t *)(row + 2 * (size_t)i));
    return type == TE_F16 ? half2_bits(both) : bf162_bits(both);
}

// A warp computes some rows of one head for up to 8 tokens, whose inputs lie in shared memory, zeros where there is none.
__global__ void __launch_bounds__(THREADS) heads_kernel(heads_args a) {
    extern __shared__ float2 inputs[]; // [TOKENS][cols / 2]
    dep_wait();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, h = blockIdx.y, t0 = blockIdx.z * TOKENS,
              n = min(TOKENS, a.n_tok - t0), pairs = a.w.cols / 2;
    for (int i = threadIdx.x; i < TOKENS * pairs; i += THREADS) {
        const int t = i / pairs, c = i % pairs;
        inputs[i] =
            t < n ? __ldcg((const float2 *)(a.x + (size_t)(t0 + t) * a.ldx + (size_t)h * a.dx) + c) : make_float2(0, 0);
    }
    __syncthreads();
    for (int k = 0; k < ROWS; k++) {
        const int r = (blockIdx.x * WARPS + warp) * ROWS + k;
        if (r >= a.rows) break;
        const uint8_t *row = (const uint8_t *)a.w.w + a.w.stride * ((size_t)h * a.rows + r);
        float sum[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) sum[t] = 0;
        for (int c = lane; c < pairs; c += 32) {
            const float2 w = weight_pair(a.w.type, row, 2 * c);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                const float2 x = inputs[t * pairs + c];
                sum[t] = fmaf(w.x, x.x, fmaf(w.y, x.y, sum[t]));
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const float all = warp_sum(sum[t]);
            if (t < n && lane == t) a.y[(size_t)(t0 + t) * a.ldy + (size_t)h * a.dy + r] = all;
        }
    }
}

// ---- attend ----

// Parts of a head's sum: the largest score, the weights' sum, and the sum of latents; splits behind each other.
__device__ __forceinline__ size_t part_at(const latent_args &args, int t, int h, int split) {
    return (((size_t)t * args.op.n_head + h) * args.splits + split) * (size_t)(args.op.rank + 2);
}

__global__ void __launch_bounds__(THREADS) attend_kernel(latent_args args) {
    extern __shared__ float tile[]; // [TILE][row]
    __shared__ __align__(16) float weight[TILE][HEADS];
    __shared__ float factor[HEADS], last_top[HEADS], last_total[HEADS];
    dep_wait();
    const te_latent_args &a = args.op;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, t = a.n_before + blockIdx.z,
              first = blockIdx.x * HEADS, heads = min(HEADS, a.n_head - first), row = a.n_rot + a.rank,
              n_pos = __ldcg(a.pos + t) + 1;
    const int32_t *blocks = a.table + (size_t)(a.row ? __ldcg(a.row + t) : t) * a.ld_table;
    // Parts are whole tiles; the last ones may have none.
    const int per = n_pos > 0 ? ((n_pos + args.splits - 1) / args.splits + TILE - 1) / TILE * TILE : 0;
    const int from = min((int)blockIdx.y * per, max(n_pos, 0)), to = min(from + per, max(n_pos, 0));
    float q[PER_LANE], acc[HEADS][COLS], top = -INFINITY, total = 0;
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        const int i = lane + 32 * k;
        q[k] =
            warp < heads && i < row ? a.scale * __ldcg(a.query + ((size_t)t * a.n_head + first + warp) * row + i) : 0;
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int c = 0; c < COLS; c++) acc[h][c] = 0;
    if (tid < HEADS) factor[tid] = 0;
    for (int i = tid; i < TILE * HEADS; i += THREADS) weight[i / HEADS][i % HEADS] = 0; // of heads that there are not
    for (int p0 = from; p0 < to; p0 += TILE) {
        const int n = min(TILE, to - p0), pairs = row / 2;
        const uint8_t *at =
            (const uint8_t *)a.pool +
            ((size_t)__ldcg(blocks + p0 / TE_CUDA_KV_BLOCK) * TE_CUDA_KV_BLOCK + p0 % TE_CUDA_KV_BLOCK) *
                (size_t)args.row_bytes;
        __syncthreads(); // all have read the tile before
        for (int i = tid; i < n * pairs; i += THREADS) {
            const int r = i / pairs, c = i % pairs;
            *(float2 *)&tile[r * row + 2 * c] = pair_of(a.type, at + (size_t)r * args.row_bytes, 2 * c);
        }
        __syncthreads();
        if (warp < heads) {
            float own = -INFINITY; // lane r has that of position r
            for (int r = 0; r < n; r++) {
                float sum = 0;
#pragma unroll
                for (int k = 0; k < PER_LANE; k++)
                    if (lane + 32 * k < row) sum = fmaf(q[k], tile[r * row + lane + 32 * k], sum);
                sum = warp_sum(sum);
                if (lane == r) own = sum;
            }
            const float now = fmaxf(top, warp_max(own));
            const float by = top == -INFINITY ? 0 : expf(top - now), w = lane < n ? expf(own - now) : 0;
            total = total * by + warp_sum(w);
            top = now;
            if (lane < TILE) weight[lane][warp] = w;
            if (lane == 0) factor[warp] = by;
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float by = factor[h];
#pragma unroll
            for (int c = 0; c < COLS; c++) acc[h][c] *= by;
        }
        for (int r = 0; r < n; r++) {
            const float4 w0 = *(const float4 *)&weight[r][0], w1 = *(const float4 *)&weight[r][4];
            const float w[HEADS] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                const int i = tid + THREADS * c;
                const float v = i < a.rank ? tile[r * row + a.n_rot + i] : 0;
#pragma unroll
                for (int h = 0; h < HEADS; h++) acc[h][c] = fmaf(w[h], v, acc[h][c]);
            }
        }
    }
    if (warp < heads && lane == 0) {
        last_top[warp] = top;
        last_total[warp] = total;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (h >= heads) break;
        const float all = last_total[h];
        float *out = args.splits > 1 ? a.scratch + part_at(args, t, first + h, blockIdx.y)
                                     : a.gathered + ((size_t)t * a.n_head + first + h) * a.rank;
        if (args.splits > 1) {
            if (tid == 0) out[0] = last_top[h];
            if (tid == 1) out[1] = all;
            out += 2;
        }
        const float by = args.splits > 1 ? 1 : all != 0 ? 1 / all : 0;
#pragma unroll
        for (int c = 0; c < COLS; c++)
            if (tid + THREADS * c < a.rank) out[tid + THREADS * c] = acc[h][c] * by;
    }
}

// The parts of one head of a token, in their order.
__global__ void __launch_bounds__(THREADS) merge_kernel(latent_args args) {
    dep_wait();
    const te_latent_args &a = args.op;
    const int h = blockIdx.x, t = a.n_before + blockIdx.y;
    float top = -INFINITY, total = 0;
    for (int k = 0; k < args.splits; k++) top = fmaxf(top, __ldcg(a.scratch + part_at(args, t, h, k)));
    float sum[COLS];
#pragma unroll
    for (int c = 0; c < COLS; c++) sum[c] = 0;
    for (int k = 0; k < args.splits; k++) {
        const float *part = a.scratch + part_at(args, t, h, k);
        const float own = __ldcg(part + 1);
        if (own == 0) continue; // no positions
        const float by = expf(__ldcg(part) - top);
        total += by * own;
#pragma unroll
        for (int c = 0; c < COLS; c++)
            if ((int)threadIdx.x + THREADS * c < a.rank)
                sum[c] = fmaf(by, __ldcg(part + 2 + threadIdx.x + THREADS * c), sum[c]);
    }
    const float by = total != 0 ? 1 / total : 0;
#pragma unroll
    for (int c = 0; c < COLS; c++) {
        const int i = threadIdx.x + THREADS * c;
        if (i < a.rank) a.gathered[((size_t)t * a.n_head + h) * a.rank + i] = sum[c] * by;
    }
}

// ---- the operation ----

latent_args prepare(const te_cuda *d, const te_latent_args *op) {
    latent_args a = {};
    a.op = *op;
    const int wanted = op->n_tok - op->n_before, across = divide_up(op->n_head, HEADS) * (wanted ? wanted : 1),
              most = divide_up(op->n_ctx, 64);
    a.splits = wanted > 2 * TE_CUDA_MAX_TOK ? 1 : divide_up(2 * d->info.n_sm, across);
    if (a.splits > most) a.splits = most;
    if (a.splits > MOST_SPLITS) a.splits = MOST_SPLITS;
    a.row_bytes = (int)te_row_bytes(op->type, op->n_rot + op->rank);
    return a;
}

bool is_even(int64_t n) { return n % 2 == 0; }

te_status check(te_cuda *d, const te_latent_args *op) {
    if (op->n_tok < 1 || op->n_tok > 65535 || op->n_before < 0 || op->n_before > op->n_tok || op->n_head < 1 ||
        op->n_head > 65535 || op->n_ctx < 1)
        return refuse(d, te_fail(TE_ARGUMENT, "latent attention: %d tokens, %d heads, context %d", (int)op->n_tok,
                                 (int)op->n_head, (int)op->n_ctx));
    if (op->rank < 2 || op->rank > MAX_RANK || op->n_rot < 2 || op->n_rot + op->rank > MAX_ROW ||
        op->n_key <= op->n_rot || op->n_key > MAX_ROW || op->n_value < 1 || !is_even(op->rank) || !is_even(op->n_rot) ||
        !is_even(op->n_key) || !is_even(op->n_value) || !is_even((int64_t)op->ldq) || !aligned(op->q, 8) ||
        !aligned(op->gathered, 8) || !aligned(op->cs, 8))
        return refuse(d, te_fail(TE_UNSUPPORTED, "latent attention: rank %d and %d rotated values, heads of %d and %d",
                                 (int)op->rank, (int)op->n_rot, (int)op->n_key, (int)op->n_value));
    if ((op->type != TE_F16 && op->type != TE_F32 && op->type != TE_BF16 && op->type != TE_Q8_0) ||
        (op->type == TE_Q8_0 && (op->n_rot + op->rank) % 32))
        return refuse(d, te_fail(TE_UNSUPPORTED, "latent attention: a pool of type %d, rows of %d", (int)op->type,
                                 (int)(op->n_rot + op->rank)));
    const te_mat *mats[2] = {&op->k_b, &op->v_b};
    const int32_t cols[2] = {op->n_key - op->n_rot, op->rank}, rows[2] = {op->rank, op->n_value};
    for (int k = 0; k < 2; k++) {
        const te_mat *m = mats[k];
        if ((m->type != TE_F16 && m->type != TE_F32 && m->type != TE_BF16) || m->cols != cols[k] ||
            m->n_rows != (int64_t)op->n_head * rows[k] || !aligned(m->w, 8) || m->stride % 8)
            return refuse(d, te_fail(TE_UNSUPPORTED, "latent attention: a matrix of type %d with %d rows of %d",
                                     (int)m->type, (int)m->n_rows, (int)m->cols));
    }
    return TE_OK;
}

te_status heads_product(te_cuda *d, const heads_args &a, int n_head) {
    const dim3 grid((unsigned)divide_up(a.rows, WARPS * ROWS), (unsigned)n_head, (unsigned)divide_up(a.n_tok, TOKENS));
    return launch(d, "latent attention", heads_kernel, grid, THREADS, sizeof(float) * TOKENS * (size_t)a.w.cols, a);
}

} // namespace

size_t latent_floats(te_cuda *d, const te_latent_args *op) {
    const latent_args a = prepare(d, op);
    return a.splits > 1 ? (size_t)op->n_tok * (size_t)op->n_head * (size_t)a.splits * (size_t)(op->rank + 2) : 0;
}

te_status latent(te_cuda *d, const te_latent_args *op) {
    TE_CUDA_TRY(check(d, op));
    const latent_args a = prepare(d, op);
    const size_t row = (size_t)(op->n_rot + op->rank), n_head = (size_t)op->n_head, before = (size_t)op->n_before;
    const int32_t wanted = op->n_tok - op->n_before;
    TE_CUDA_TRY(launch(d, "latent attention", settle_kernel,
                       dim3((unsigned)divide_up(op->n_head + 1, WARPS), (unsigned)op->n_tok), THREADS, 0, a));
    if (!wanted) return TE_OK;
    heads_args k = {};
    k.w = op->k_b;
    k.rows = op->rank;
    k.x = op->q + op->ldq * before;
    k.ldx = op->ldq;
    k.dx = (size_t)op->n_key;
    k.ldy = n_head * row;
    k.y = op->query + op->n_rot + k.ldy * before;
    k.dy = row;
    k.n_tok = wanted;
    TE_CUDA_TRY(heads_product(d, k, op->n_head));
    TE_CUDA_TRY(launch(d, "latent attention", attend_kernel,
                       dim3((unsigned)divide_up(op->n_head, HEADS), (unsigned)a.splits, (unsigned)wanted), THREADS,
                       sizeof(float) * TILE * row, a));
    if (a.splits > 1)
        TE_CUDA_TRY(
            launch(d, "latent attention", merge_kernel, dim3((unsigned)op->n_head, (unsigned)wanted), THREADS, 0, a));
    heads_args v = {};
    v.w = op->v_b;
    v.rows = op->n_value;
    v.ldx = n_head * (size_t)op->rank;
    v.x = op->gathered + v.ldx * before;
    v.dx = (size_t)op->rank;
    v.ldy = op->ld_out;
    v.y = op->out + v.ldy * before;
    v.dy = (size_t)op->n_value;
    v.n_tok = wanted;
    return heads_product(d, v, op->n_head);
}

} // namespace te
