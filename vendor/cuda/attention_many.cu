// attention_many.cu - attention of many tokens, each the next of a sequence of its own, over K and V of F16.
//
// A warp takes some query heads that share a KV head, for one token, and waits for no other warp: with so many tokens there
// is work for all. Of fewer tokens two or four warps of a block share the positions, and the first of them puts their sums
// together. The first n_before tokens are others', and left out.
#include <climits>

#include "attention_head.cuh"
#include "attention_many.cuh"
#include "attention_warp.cuh"
#include "launch.h"
#include "wide_place.cuh"

namespace te {

constexpr int MANY_WARPS = 4, MANY_BLOCKS = 5; // of a block; of a multiprocessor

struct many_args {
    te_attention_args op;
    int group, chunks; // query heads of a KV head; warps that share them
    int share;         // warps that share positions: 1, 2 or 4
};

// What a warp has in shared memory.
template <int G, int D> struct alignas(16) many_room {
    uint8_t ring[WARP_STAGES * warp_rows<G, D>::PIECE], fresh_k[2 * D], fresh_v[2 * D];
    float head[G][ATT_MAX_DIM], weights[WARP_ROWS * G], best[G], total[G];
};

template <int G, int D>
__global__ void __launch_bounds__(32 * MANY_WARPS) many_kernel(const __grid_constant__ many_args args) {
    const te_attention_args &a = args.op;
    extern __shared__ uint4 shared[];
    many_room<G, D> *rooms = (many_room<G, D> *)shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = a.n_before + (int)blockIdx.y;
    const int share = args.share, part = warp % share, unit = (int)(blockIdx.x * MANY_WARPS + warp) / share;
    many_room<G, D> &s = rooms[warp];
    const bool works = unit < a.n_head_kv * args.chunks;
    const int kvh = works ? unit / args.chunks : 0, first = works ? unit % args.chunks * G : 0,
              heads = min(G, args.group - first), head = kvh * args.group + first;
    if (!a.early) {
        dep_go();
        dep_wait();
    }
    const int pos = __ldcg(a.pos + t), seq = a.row ? __ldcg(a.row + t) : t;
    const bool sees = works && pos >= 0 && pos < a.n_ctx;
    const int lowest = max(0, pos + 1 - a.window), skipped = lowest / WARP_ROWS * WARP_ROWS;
    const int *table = a.table + (size_t)seq * a.ld_table;
    warp_rows<G, D> rows;
    if (sees) rows.begin(a, table, kvh, skipped, pos, part, share, s.ring);
    if (a.early) {
        dep_go();
        dep_wait();
    }
    float *out = a.out + t * a.ld_out + (size_t)head * D;
    constexpr int COLS = warp_rows<G, D>::COLS, LANES = warp_rows<G, D>::LANES;
    if (sees) {
        head_values<D> q[G], k, v;
#pragma unroll
        for (int g = 0; g < G; g++)
            if (g < heads) q[g] = fetch_head<D>(a, a.q + t * a.ldq + (size_t)(head + g) * D, true, t);
        const bool is_first = part == 0;
        if (is_first) {
            k = fetch_head<D>(a, a.k + t * a.ldk + (size_t)kvh * D, true, t);
            v = fetch_head<D>(a, a.v + t * a.ldv + (size_t)kvh * D, false, t);
        }
#pragma unroll
        for (int g = 0; g < G; g++)
            if (g < heads) settle_head<D>(a, q[g], a.q_norm, true, s.head[g]);
        rows.q.load(s.head, heads);
        __syncwarp();
        if (is_first) { // K and V of this token, through the pool's format
            const size_t own =
                (((size_t)__ldcg(table + pos / TE_CUDA_KV_BLOCK) * a.n_head_kv + kvh) * TE_CUDA_KV_BLOCK +
                 pos % TE_CUDA_KV_BLOCK) *
                (2 * D);
            settle_head<D>(a, k, a.k_norm, true, s.head[0]);
            kv_store(TE_F16, s.head[0], s.fresh_k, D);
            settle_head<D>(a, v, a.v_norm, false, s.head[0]);
            kv_store(TE_F16, s.head[0], s.fresh_v, D);
            if (first == 0)
#pragma unroll
                for (int i = 0; i < D / 64; i++) {
                    const int w = lane + 32 * i;
                    ((uint32_t *)((uint8_t *)a.k_pool + own))[w] = ((const uint32_t *)s.fresh_k)[w];
                    ((uint32_t *)((uint8_t *)a.v_pool + own))[w] = ((const uint32_t *)s.fresh_v)[w];
                }
        }
        rows.run(a, lowest, s.weights);
        if (is_first) rows.add(a, s.fresh_k, s.fresh_v, 1, 0, s.weights);
        if (share > 1) { // sums to where K and V were
            float *to = (float *)s.ring;
#pragma unroll
            for (int g = 0; g < G; g++)
#pragma unroll
                for (int c = 0; c < COLS; c++) to[g * D + lane * COLS + c] = rows.acc[g][c];
            if (lane % LANES == 0 && (G > 1 || lane == 0)) {
                s.best[lane / LANES] = rows.best;
                s.total[lane / LANES] = rows.total;
            }
        }
    }
    if (share > 1) __syncthreads();
    if (part || !works) return;
    // Means of values of F16 are in its range, and as exact in it as those were.
    if (a.half && unit == 0 && lane == 0) a.half_scale[t] = 1;
#pragma unroll
    for (int g = 0; g < G; g++) {
        float *to = out + g * D + lane * COLS;
        if (g >= heads) break;
        float sum[COLS] = {}, most = -INFINITY, total = 0;
        if (sees) {
            most = __shfl_sync(~0u, rows.best, g * LANES % 32);
            total = __shfl_sync(~0u, rows.total, g * LANES % 32);
#pragma unroll
            for (int c = 0; c < COLS; c++) sum[c] = rows.acc[g][c];
            for (int p = 1; p < share; p++) {
                const many_room<G, D> &o = rooms[warp + p];
                const float *from = (const float *)o.ring + g * D + lane * COLS;
                const float now = fmaxf(most, o.best[g]), f0 = expf(most - now), f1 = expf(o.best[g] - now);
                total = total * f0 + o.total[g] * f1;
                most = now;
#pragma unroll
                for (int c = 0; c < COLS; c++) sum[c] = sum[c] * f0 + from[c] * f1;
            }
            // A sink is one more score, of no V.
            if (a.sinks) total += expf(__ldg(a.sinks + head + g) - most);
        }
        const float by = sees ? 1.0f / total : 0;
        const int col = (head + g) * D + lane * COLS;
        te_cuda_half half = {};
        half.tiles = a.half_tiles;
        half.words = a.half_words;
        half.matrices = a.half_matrices;
        const int next = wide_next(half);
        uint16_t *also = a.half ? (uint16_t *)a.half + wide_place(half, t, col / 4 * 4) + col % 4 / 2 * next : nullptr;
#pragma unroll
        for (int c = 0; c < COLS; c += 2) {
            const float x = sum[c] * by, y = sum[c + 1] * by;
            *(float2 *)&to[c] = make_float2(x, y);
            if (also) *(uint32_t *)(also + c / 2 * next) = half2_of(x, y);
        }
    }
}

static many_args prepare(const te_cuda *d, const te_attention_args *op, int *variant) {
    many_args a = {};
    a.op = *op;
    if (!op->window) a.op.window = op->n_ctx;
    a.group = op->n_head / op->n_head_kv;
    *variant = a.group == 1 ? 0 : 1;
    a.chunks = divide_up(a.group, *variant ? 4 : 1);
    const int64_t units = (int64_t)op->n_head_kv * a.chunks * (op->n_tok - op->n_before),
                  most = MANY_WARPS * MANY_BLOCKS * d->info.n_sm;
    a.share = 4 * units <= most ? 4 : 2 * units <= most ? 2 : 1;
    return a;
}

bool may_be_of_many(const te_cuda *d, const te_attention_args *op) {
    if (op->chunked || op->temp_scale != 0) return false; // windows only, and queries as they are
    if (!op->apart || op->n_tok > 65535 || !has_short_rows(op)) return false;
    int variant;
    const many_args a = prepare(d, op, &variant);
    // Of query heads that share one a warp has four, one after the other: worth it only where there are many warps.
    return (int64_t)op->n_head_kv * a.chunks * (op->n_tok - op->n_before) >= (variant ? 4 : 1) * d->info.n_sm;
}

template <int G, int D> static te_status run(te_cuda *d, const many_args &a) {
    const int units = a.op.n_head_kv * a.chunks * a.share;
    return launch(d, "attention", many_kernel<G, D>,
                  dim3((unsigned)divide_up(units, MANY_WARPS), (unsigned)(a.op.n_tok - a.op.n_before)), 32 * MANY_WARPS,
                  MANY_WARPS * sizeof(many_room<G, D>), a);
}

te_status attention_of_many(te_cuda *d, const te_attention_args *op) {
    int variant;
    const many_args a = prepare(d, op, &variant);
    if (op->n_embd_head == 64) return variant ? run<4, 64>(d, a) : run<1, 64>(d, a);
    return variant ? run<4, 128>(d, a) : run<1, 128>(d, a);
}

} // namespace te
