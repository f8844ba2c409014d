// attention.cu - attention of a few tokens over the block table.
//
// A block takes some query heads that share a KV head, for one token and a part of the positions. It copies K and V of up
// to 64 positions into shared memory as they are, scores them, and adds up V under a running softmax; of long contexts of
// F16 each warp does so for itself (attention_warp.cuh), in twice as many blocks. Positions of this very step are not in the
// pool yet: the last block of a token makes their K and V anew from k and v, through the pool's format, and stores the
// token's own. The block that is last to finish merges the parts in order.
#include <climits>

#include "attention_head.cuh"
#include "attention_many.cuh"
#include "attention_warp.cuh"
#include "kv_rows.cuh"
#include "launch.h"
#include "prefill.cuh"

namespace te {

constexpr int ATT_THREADS = 32 * ATT_WARPS, ATT_GRAIN = 16;
constexpr int LONG_FROM = 4096 / ATT_GRAIN, LONG_BLOCKS = 2; // grains; blocks of a multiprocessor
constexpr int ATT_PAIRS = ATT_MAX_DIM / 64;                  // pairs of values of a lane

// A product of one token with a few rows of floats: a router's, by blocks behind those of the heads, which are few.
struct beside_args {
    const float *x, *bias;
    const uint8_t *w;
    float *y;
    size_t stride;
    int rows, cols, first; // first: the first column of blocks
};

struct attention_args {
    te_attention_args op;
    beside_args beside;
    int group;                  // query heads of a KV head
    int chunks;                 // blocks that share them
    int splits;                 // of the positions, at most
    int long_splits, long_from; // of so many grains and more, F16: each warp for itself
    int tile;                   // positions in shared memory
    int row_k, row_v;
};

// Eight rows a block, one a warp.
__device__ __forceinline__ void multiply_beside(const beside_args &a) {
    const int lane = threadIdx.x % 32,
              r = (int)(((blockIdx.x - a.first) * gridDim.y + blockIdx.y) * ATT_WARPS + threadIdx.x / 32);
    const float *w = (const float *)(a.w + (size_t)r * a.stride);
    if (r < a.rows && lane == 0) prefetch_bytes(w, 4 * (size_t)a.cols);
    dep_go();
    dep_wait();
    if (r >= a.rows) return;
    float sum = 0;
#pragma unroll 4
    for (int c = 4 * lane; c < a.cols; c += 128) {
        const float4 m = __ldg((const float4 *)(w + c)), v = __ldcg((const float4 *)(a.x + c));
        sum = fmaf(m.x, v.x, fmaf(m.y, v.y, fmaf(m.z, v.z, fmaf(m.w, v.w, sum))));
    }
    sum = warp_sum(sum);
    if (lane == 0) a.y[r] = sum + (a.bias ? __ldg(a.bias + r) : 0);
}

// D: K and V are F16, a head has D values; 0: whatever they are. LONG: there may be contexts in which each warp has
// positions of its own.
template <int G, int D, bool LONG = false>
__global__ void __launch_bounds__(ATT_THREADS, G == 1 && LONG ? 3 : 2)
    attention_kernel(const __grid_constant__ attention_args args) {
    const te_attention_args &a = args.op;
    if (args.beside.rows && (int)blockIdx.x >= args.beside.first) return multiply_beside(args.beside);
    extern __shared__ uint4 tiles[];
    constexpr int MAX = D ? D : ATT_MAX_DIM;
    __shared__ attention_smem<G> s;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, d = D ? D : a.n_embd_head;
    const int type_k = D ? (int)TE_F16 : a.type_k, type_v = D ? (int)TE_F16 : a.type_v;
    const int kvh = blockIdx.x / args.chunks, first = blockIdx.x % args.chunks * G, heads = min(G, args.group - first);
    const int head = kvh * args.group + first, split = blockIdx.y, t = blockIdx.z;
    // Shared: two stages of K and V rows, then rows of this step, then room for a head of each warp.
    const int row_k = args.row_k, row_v = args.row_v, stage = args.tile * (row_k + row_v);
    uint8_t *base = (uint8_t *)tiles, *fresh_k = base + 2 * (size_t)stage,
            *fresh_v = fresh_k + (size_t)TE_CUDA_MAX_TOK * row_k;
    float *room = (float *)(fresh_v + (size_t)TE_CUDA_MAX_TOK * row_v) + warp * ATT_MAX_DIM;
    if (!a.early) {
        dep_go();
        dep_wait();
    }
    // Which tokens of this step does t see? Lane u looks at token u; where tokens are apart, lane 0 at t itself.
    const int own = a.apart ? t : 0, u0 = own + lane, own_lane = t - own;
    const bool looks = a.apart ? lane == 0 : lane < a.n_tok;
    const int their_pos = looks ? __ldcg(a.pos + u0) : -1, their_seq = looks ? (a.row ? __ldcg(a.row + u0) : u0) : -1;
    const int pos = __shfl_sync(~0u, their_pos, own_lane), seq = __shfl_sync(~0u, their_seq, own_lane);
    float *out = a.out + t * a.ld_out + (size_t)head * d;
    if (pos < 0 || pos >= a.n_ctx) {
        if (a.early) dep_wait();
        if (split == 0)
#pragma unroll 1
            for (int i = tid; i < heads * d; i += ATT_THREADS) out[i] = 0;
        return;
    }
    // The first position in the window, and the grain that it lies in. All of this step's tokens are in the window, but for
    // those before a chunk, in front of which nothing is read then.
    const int lowest = first_seen(a, pos);
    const unsigned seen = __ballot_sync(~0u, their_pos >= lowest && their_pos <= pos && their_seq == seq && u0 <= t);
    const int n_old = pos + 1 - __popc(seen), skipped = n_old > lowest ? lowest / ATT_GRAIN * ATT_GRAIN : n_old,
              grains = (n_old - skipped + ATT_GRAIN - 1) / ATT_GRAIN;
    const bool is_long = LONG && grains >= args.long_from;
    const int splits = is_long ? args.long_splits : args.splits;
    const int per = max(4, (grains + splits - 1) / splits), used = max(1, (grains + per - 1) / per);
    if (split >= used) { // completion is transitive only if every block waits
        if (a.early) dep_wait();
        return;
    }
    const int p_begin = skipped + split * per * ATT_GRAIN, p_end = min(n_old, p_begin + per * ATT_GRAIN),
              n_fresh = split == used - 1 ? __popc(seen) : 0;
    const int n_tiles = (p_end - p_begin + args.tile - 1) / args.tile;
    const int *table = a.table + (size_t)seq * a.ld_table;
    auto row_of = [&](int p) {
        return ((size_t)__ldcg(table + p / TE_CUDA_KV_BLOCK) * a.n_head_kv + kvh) * TE_CUDA_KV_BLOCK +
               p % TE_CUDA_KV_BLOCK;
    };
    const size_t own_row = row_of(pos);
    // Sixteen rows, which never leave their block, are as many 16-byte words as a row has bytes. A warp takes those of K or V.
    auto copy_tile = [&](int i) {
        const int p0 = p_begin + i * args.tile, n = min(args.tile, p_end - p0),
                  jobs = 2 * ((n + ATT_GRAIN - 1) / ATT_GRAIN);
        uint8_t *to = base + (size_t)(i & 1) * stage;
#pragma unroll 1
        for (int j = warp; j < jobs; j += ATT_WARPS) {
            const int g = j / 2, row = j & 1 ? row_v : row_k;
            const uint8_t *from = (const uint8_t *)(j & 1 ? a.v_pool : a.k_pool) + row_of(p0 + g * ATT_GRAIN) * row;
            uint8_t *there = to + (j & 1 ? (size_t)args.tile * row_k : 0) + (size_t)(g * ATT_GRAIN) * row;
#pragma unroll 8
            for (int w = lane; w < row; w += 32) copy16(there + 16 * w, from + 16 * w);
        }
        copies_end();
    };
    warp_rows<G, D> own_rows;
    if constexpr (LONG)
        if (is_long)
            own_rows.begin(a, table, kvh, p_begin, p_end, warp, ATT_WARPS,
                           base + warp * WARP_STAGES * warp_rows<G, D>::PIECE);
    if (!is_long && n_tiles > 0) copy_tile(0);
    const float sink = a.sinks && tid < heads ? __ldg(a.sinks + head + tid) : 0;
    if (32 * tid < d) { // a layer's vectors come from far away
        if (a.q_norm) prefetch_l2(a.q_norm + 32 * tid);
        if (a.k_norm) prefetch_l2(a.k_norm + 32 * tid);
    }
    if (a.early) {
        dep_go();
        dep_wait();
    }
    // K and V of this step, through the pool's format; jobs go to the warps behind those of q. What a warp's first job reads
    // is on its way beside its q.
    const int job = (warp + ATT_WARPS - heads % ATT_WARPS) % ATT_WARPS;
    auto token_of = [&](int j) {
        unsigned later = seen;
        for (int k = 0; k < j / 2; k++) later &= later - 1;
        return own + __ffs((int)later) - 1;
    };
    auto fetch_fresh = [&](int j, int u) {
        return fetch_head<MAX>(a, (j & 1 ? a.v + u * a.ldv : a.k + u * a.ldk) + (size_t)kvh * d, !(j & 1), u);
    };
    head_values<MAX> first_fresh = {};
    {
        head_values<MAX> of_q = {};
        if (warp < heads) of_q = fetch_head<MAX>(a, a.q + t * a.ldq + (size_t)(head + warp) * d, true, t);
        if (job < 2 * n_fresh) first_fresh = fetch_fresh(job, token_of(job));
        if (warp < heads) settle_head<MAX>(a, of_q, a.q_norm, true, s.q[warp]);
        if (warp < heads && a.temp_scale != 0) {
            const float by = warmth(a, pos);
            for (int i = lane; i < d; i += 32) s.q[warp][i] *= by;
        }
    }
#pragma unroll 1
    for (int j = job; j < 2 * n_fresh; j += ATT_WARPS) {
        const int i = j / 2, row = j & 1 ? row_v : row_k, u = token_of(j);
        const bool is_k = !(j & 1);
        uint8_t *to = (is_k ? fresh_k : fresh_v) + (size_t)i * row;
        const head_values<MAX> h = j == job ? first_fresh : fetch_fresh(j, u);
        settle_head<MAX>(a, h, is_k ? a.k_norm : a.v_norm, is_k, room);
        kv_store(is_k ? type_k : type_v, room, to, d);
        if (u == t && first == 0) { // rows are of even size
            uint8_t *pool = (uint8_t *)(is_k ? a.k_pool : a.v_pool) + own_row * row;
            for (int w = 2 * lane; w < row; w += 64) *(uint16_t *)(pool + w) = *(const uint16_t *)(to + w);
        }
    }
    if (tid < G) {
        s.best[tid] = -INFINITY;
        s.total[tid] = 0;
    }
    __syncthreads();
    // Sums of some lines of threads, or of warps: each of a part of the positions, all under one maximum.
    const int pairs = d / 2, n_lines = is_long ? ATT_WARPS : ATT_THREADS / pairs, line = tid / pairs,
              pair = tid % pairs;
    float2 *lines = (float2 *)base; // where K and V were
    if constexpr (D > 0) own_rows.q.load(s.q, heads);
    if constexpr (LONG) {
        if (is_long) {
            float *weights = s.warp.of_rows[warp];
            own_rows.run(a, lowest, weights);
            if (warp == own_rows.n_pieces % ATT_WARPS && n_fresh)
                own_rows.add(a, fresh_k, fresh_v, n_fresh, 0, weights);
            own_rows.finish(s, lines);
        }
    }
    if (!is_long) {
        float2 q[G][D ? 1 : ATT_PAIRS];
        if constexpr (D == 0)
#pragma unroll
            for (int g = 0; g < G; g++)
#pragma unroll
                for (int i = 0; i < ATT_PAIRS; i++) {
                    const int c = 2 * lane + 64 * i;
                    q[g][i] = g < heads && c < d ? *(const float2 *)&s.q[g][c] : make_float2(0, 0);
                }
        constexpr int BATCH = G == 1 ? 8 : 16 / G; // positions that a warp scores at a time
        // Each thread adds up V for one pair of columns, over every n_lines-th position.
        float2 acc[G] = {};
#pragma unroll 1
        for (int i = 0; i < max(1, n_tiles); i++) {
            if (i + 1 < n_tiles)
                copy_tile(i + 1);
            else
                copies_end();
            copies_wait<1>();
            __syncthreads();
            const uint8_t *ks = base + (size_t)(i & 1) * stage, *vs = ks + (size_t)args.tile * row_k;
            const int m = min(args.tile, p_end - p_begin - i * args.tile), all = m + (i + 1 >= n_tiles ? n_fresh : 0);
            auto row_at = [&](int p) { return p < m ? ks + (size_t)p * row_k : fresh_k + (size_t)(p - m) * row_k; };
            if constexpr (D > 0) {
                constexpr int LANES = short_rows<G, D>::LANES, ROWS = short_rows<G, D>::ROWS;
#pragma unroll 2
                for (int p0 = warp * ROWS; p0 < all; p0 += ATT_WARPS * ROWS) {
                    const int p = p0 + lane / LANES;
                    const float v = own_rows.q.score(row_at(min(p, all - 1)), lane);
                    if (sum_owner<G, LANES>(lane) && p < all)
                        s.score[sum_index<G, LANES>(lane)][p] = capped(v * a.scale, a.soft_cap);
                }
            } else {
#pragma unroll 1
                for (int p0 = warp * BATCH; p0 < all; p0 += ATT_WARPS * BATCH) {
                    float sum[G * BATCH] = {};
#pragma unroll
                    for (int b = 0; b < BATCH; b++) {
                        const int p = min(p0 + b, all - 1);
                        const uint8_t *row = row_at(p);
#pragma unroll
                        for (int k = 0; k < ATT_PAIRS; k++) {
                            const int c = 2 * lane + 64 * k;
                            if (c < d) {
                                const float2 w = kv_pair(type_k, row, c);
#pragma unroll
                                for (int g = 0; g < G; g++)
                                    sum[b * G + g] = fmaf(w.x, q[g][k].x, fmaf(w.y, q[g][k].y, sum[b * G + g]));
                            }
                        }
                    }
                    const float v = warp_sums<G * BATCH>(sum, lane);
                    const int i = sum_index<G * BATCH>(lane), p = p0 + i / G;
                    if (sum_owner<G * BATCH>(lane) && p < all) s.score[i % G][p] = capped(v * a.scale, a.soft_cap);
                }
            }
            __syncthreads();
            if (warp < G) {                                            // the running softmax of one head
                const int hidden = lowest - (p_begin + i * args.tile); // rows in front of the window
                float e[3], most = -INFINITY, sum = 0;
#pragma unroll
                for (int k = 0; k < 3; k++) {
                    e[k] = lane + 32 * k < all && lane + 32 * k >= hidden ? s.score[warp][lane + 32 * k] : -INFINITY;
                    most = fmaxf(most, e[k]);
                }
                const float before = s.best[warp], now = fmaxf(before, warp_max(most)),
                            zero = now == -INFINITY ? 0 : now, f = expf(before - zero);
#pragma unroll
                for (int k = 0; k < 3; k++) {
                    e[k] = expf(e[k] - zero);
                    sum += e[k];
                    if (lane + 32 * k < all) s.score[warp][lane + 32 * k] = e[k];
                }
                sum = warp_sum(sum);
                __syncwarp(); // all lanes have read what lane 0 overwrites
                if (lane == 0) {
                    s.factor[warp] = f;
                    s.best[warp] = now;
                    s.total[warp] = s.total[warp] * f + sum;
                }
            }
            __syncthreads();
            if (line < n_lines) {
#pragma unroll
                for (int g = 0; g < G; g++) {
                    acc[g].x *= s.factor[g];
                    acc[g].y *= s.factor[g];
                }
#pragma unroll 4
                for (int p = line; p < all; p += n_lines) {
                    const float2 v =
                        kv_pair(type_v, p < m ? vs + (size_t)p * row_v : fresh_v + (size_t)(p - m) * row_v, 2 * pair);
#pragma unroll
                    for (int g = 0; g < G; g++) {
                        const float e = s.score[g][p];
                        acc[g].x = fmaf(e, v.x, acc[g].x);
                        acc[g].y = fmaf(e, v.y, acc[g].y);
                    }
                }
            }
            __syncthreads(); // the stage and the scores are about to change
        }
        if (line < n_lines)
#pragma unroll
            for (int g = 0; g < G; g++) lines[(line * G + g) * pairs + pair] = acc[g];
    }
    // A sink is one more score, of no V; where it is too large for the sum, all positions' share is 0.
    if (a.sinks && used == 1 && tid < heads) s.total[tid] += expf(sink - s.best[tid]);
    __syncthreads();
    const int width = d + 2; // a part: its maximum, its total, its sums
    float *scratch = a.scratch + ((size_t)(t * a.n_head + head) * args.long_splits) * width;
#pragma unroll 1
    for (int i = tid; i < heads * pairs; i += ATT_THREADS) {
        const int g = i / pairs, c = i % pairs;
        float2 v = make_float2(0, 0);
        for (int l = 0; l < n_lines; l++) {
            const float2 w = lines[(l * G + g) * pairs + c];
            v.x += w.x;
            v.y += w.y;
        }
        if (used == 1) {
            const float f = 1.0f / s.total[g];
            *(float2 *)&out[g * d + 2 * c] = make_float2(v.x * f, v.y * f);
            continue;
        }
        float *to = scratch + ((size_t)g * args.long_splits + split) * width;
        if (c == 0) *(float2 *)to = make_float2(s.best[g], s.total[g]);
        *(float2 *)&to[2 + 2 * c] = v;
    }
    if (used == 1) return;
    // The block that comes last adds the parts, in their order.
    __syncthreads();
    if (tid == 0)
        s.is_last = count_block(a.counter + t * gridDim.x + blockIdx.x, (unsigned)used - 1) == (unsigned)used - 1;
    __syncthreads();
    if (!s.is_last) return;
#pragma unroll 1
    for (int i = tid; i < heads * pairs; i += ATT_THREADS) {
        const int g = i / pairs, c = i % pairs;
        const float *from = scratch + (size_t)g * args.long_splits * width;
        float most = -INFINITY, total = 0;
        float2 sum = make_float2(0, 0);
#pragma unroll 1
        for (int k0 = 0; k0 < used; k0 += 8) { // eight at a time are on their way
            float2 w[8], v[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const float *part = from + (size_t)min(k0 + k, used - 1) * width;
                w[k] = __ldcg((const float2 *)part);
                v[k] = __ldcg((const float2 *)(part + 2 + 2 * c));
            }
#pragma unroll
            for (int k = 0; k < 8; k++) {
                if (k0 + k >= used) break;
                const float now = fmaxf(most, w[k].x), f0 = expf(most - now), f1 = expf(w[k].x - now);
                sum = make_float2(sum.x * f0 + v[k].x * f1, sum.y * f0 + v[k].y * f1);
                total = total * f0 + w[k].y * f1;
                most = now;
            }
        }
        if (a.sinks) total += expf(__ldg(a.sinks + head + g) - most);
        *(float2 *)&out[g * d + 2 * c] = make_float2(sum.x / total, sum.y / total);
    }
}

static size_t smem_of(const attention_args &a, int heads) {
    const size_t stages = 2 * (size_t)a.tile * (size_t)(a.row_k + a.row_v),
                 lines = (size_t)heads * ATT_THREADS * sizeof(float2);
    const size_t rest = (size_t)TE_CUDA_MAX_TOK * (size_t)(a.row_k + a.row_v) + ATT_WARPS * ATT_MAX_DIM * sizeof(float);
    return stages + rest > lines ? stages + rest : lines;
}

static attention_args prepare(const te_cuda *d, const te_attention_args *op, int *variant) {
    attention_args a = {};
    a.op = *op;
    if (!op->window) a.op.window = op->n_ctx;
    a.group = op->n_head / op->n_head_kv;
    *variant = a.group == 1 ? 0 : a.group <= 4 ? 1 : 2;
    const int per_block = *variant == 0 ? 1 : 4 * *variant;
    a.chunks = divide_up(a.group, per_block);
    // A block for each multiprocessor, so that the next operation's finds room beside it, or two if that many are not
    // made of parts; a part has at least 64 positions, and there are at most 64.
    const int across = op->n_head_kv * a.chunks * op->n_tok,
              wanted = 2 * across <= d->info.n_sm ? d->info.n_sm / across : divide_up(2 * d->info.n_sm, across),
              most = divide_up(op->n_ctx, 64);
    a.splits = wanted < most ? wanted : most;
    if (a.splits > 64) a.splits = 64;
    a.row_k = (int)te_row_bytes(op->type_k, op->n_embd_head);
    a.row_v = (int)te_row_bytes(op->type_v, op->n_embd_head);
    const size_t most_bytes = d->smem_sm / 2 - 16 * 1024 < d->smem_block ? d->smem_sm / 2 - 16 * 1024 : d->smem_block;
    // Of many blocks three fit on a multiprocessor, if their tiles are small.
    for (a.tile = across > 2 * d->info.n_sm ? 32 : 64; a.tile > ATT_GRAIN && smem_of(a, per_block) > most_bytes;)
        a.tile /= 2;
    a.long_splits = a.splits;
    a.long_from = INT_MAX;
    if (!has_short_rows(op) || a.tile != WARP_STAGES * ATT_WARPS * WARP_ROWS / 2 || op->n_ctx <= LONG_FROM * ATT_GRAIN)
        return a;
    a.long_from = LONG_FROM;
    const int fits = LONG_BLOCKS * d->info.n_sm / across;
    if (a.splits > 1 && fits > a.splits) a.long_splits = fits < 64 ? fits : 64;
    return a;
}

static te_status check(te_cuda *d, const te_attention_args *op) {
    const int32_t most = op->apart ? 65535 : TE_CUDA_MAX_TOK;
    if (op->n_tok < 1 || op->n_tok > most)
        return refuse(d, te_fail(TE_ARGUMENT, "attention: %d tokens, 1 to %d are possible", (int)op->n_tok, (int)most));
    if (op->window && op->window < TE_CUDA_MAX_TOK)
        return refuse(d, te_fail(TE_UNSUPPORTED, "attention: a window of %d positions, %d are the least",
                                 (int)op->window, TE_CUDA_MAX_TOK));
    if (op->n_head_kv < 1 || op->n_head < 1 || op->n_head % op->n_head_kv || op->n_embd_head < 2 ||
        op->n_embd_head % 2 || op->n_embd_head > ATT_MAX_DIM || op->n_ctx < 1)
        return refuse(d, te_fail(TE_UNSUPPORTED, "attention: %d heads on %d of %d values, context %d", (int)op->n_head,
                                 (int)op->n_head_kv, (int)op->n_embd_head, (int)op->n_ctx));
    if (op->rope != TE_NO_ROPE && (!op->cs || op->n_rot < 2 || op->n_rot % 2 || op->n_rot > op->n_embd_head))
        return refuse(
            d, te_fail(TE_ARGUMENT, "attention: %d values of %d are rotated", (int)op->n_rot, (int)op->n_embd_head));
    if (op->half && !attention_halves(d, op)) return refuse(d, te_fail(TE_UNSUPPORTED, "attention: no result in F16"));
    if (op->half && (!op->half_scale || op->half_words < 1 || 8 * op->half_tiles < op->n_tok))
        return refuse(
            d, te_fail(TE_ARGUMENT, "attention: %d tiles of F16 for %d tokens", (int)op->half_tiles, (int)op->n_tok));
    const int32_t types[2] = {op->type_k, op->type_v};
    for (int32_t type : types)
        if ((type != TE_F16 && type != TE_F32 && type != TE_BF16 && type != TE_Q8_0) ||
            (type == TE_Q8_0 && op->n_embd_head % 32))
            return refuse(d, te_fail(TE_UNSUPPORTED, "attention: K or V of type %d with heads of %d", (int)type,
                                     (int)op->n_embd_head));
    return TE_OK;
}

size_t attention_floats(te_cuda *d, const te_attention_args *op) {
    if (is_of_many(d, op)) return 0;
    int variant;
    const attention_args a = prepare(d, op, &variant);
    if (a.splits == 1) return 0; // nothing is left in parts
    return (size_t)op->n_tok * (size_t)op->n_head * (size_t)a.long_splits * (size_t)(op->n_embd_head + 2);
}
size_t attention_counters(te_cuda *d, const te_attention_args *op) {
    if (is_of_many(d, op)) return 0;
    int variant;
    const attention_args a = prepare(d, op, &variant);
    return (size_t)op->n_tok * (size_t)(op->n_head_kv * a.chunks);
}

int32_t attention_halves(te_cuda *d, const te_attention_args *op) {
    if (op->n_head * op->n_embd_head % 256) return 0;
    if (op->apart || !op->grouped) return may_be_of_many(d, op);
    te_attention_args front = *op, rest = *op; // prompts' tokens, and those behind them
    front.n_tok = rest.n_before = op->grouped;
    rest.apart = 1;
    return prompt_attention_halves(d, &front) && (rest.n_tok == rest.n_before || may_be_of_many(d, &rest));
}

int32_t attends_beside(const te_linear_args *op) {
    const te_product *p = &op->product[0];
    return op->n_tok == 1 && op->n_products == 1 && op->norm.kind == TE_NO_NORM && !op->side.keep &&
           !op->side.publish && !op->rows.list && p->w.type == TE_F32 && p->w.n_rows <= 512 && op->cols % 4 == 0 &&
           p->w.cols == op->cols && aligned(op->x, 16) && p->y && !p->relu && !p->add && !p->mark;
}

te_status attention(te_cuda *d, const te_attention_args *op) {
    TE_CUDA_TRY(check(d, op));
    if (is_of_many(d, op)) return attention_of_many(d, op);
    int variant;
    attention_args a = prepare(d, op, &variant);
    const int across = op->n_head_kv * a.chunks;
    int behind = 0;
    if (op->beside) {
        const te_product *p = &op->beside->product[0];
        TE_CUDA_TRY(check_matrix(d, "attention", &p->w));
        if (op->n_tok != 1 || !attends_beside(op->beside))
            return refuse(d, te_fail(TE_UNSUPPORTED, "attention: %d tokens beside another product", (int)op->n_tok));
        a.beside = {op->beside->x, p->bias, (const uint8_t *)p->w.w, p->y, p->w.stride, p->w.n_rows, p->w.cols, across};
        behind = divide_up(divide_up(p->w.n_rows, ATT_WARPS), a.long_splits);
    }
    static void (*const kernels[3][6])(attention_args) = {
        {attention_kernel<1, 0>, attention_kernel<1, 64>, attention_kernel<1, 128>, attention_kernel<1, 64, true>,
         attention_kernel<1, 128, true>, attention_kernel<1, 256>},
        {attention_kernel<4, 0>, attention_kernel<4, 64>, attention_kernel<4, 128>, attention_kernel<4, 64, true>,
         attention_kernel<4, 128, true>, attention_kernel<4, 256>},
        {attention_kernel<8, 0>, attention_kernel<8, 64>, attention_kernel<8, 128>, attention_kernel<8, 64, true>,
         attention_kernel<8, 128, true>, attention_kernel<8, 0>}}; // eight heads of 256 are more than registers hold
    const bool wide_rows = op->type_k == TE_F16 && op->type_v == TE_F16 && op->n_embd_head == 256;
    const int own = has_short_rows(op) ? op->n_embd_head / 64 + (a.long_from != INT_MAX ? 2 : 0) : wide_rows ? 5 : 0;
    const size_t smem = smem_of(a, variant == 0 ? 1 : 4 * variant);
    return launch(d, "attention", kernels[variant][own],
                  dim3((unsigned)(across + behind), (unsigned)a.long_splits, (unsigned)op->n_tok), ATT_THREADS, smem,
                  a);
}

} // namespace te
