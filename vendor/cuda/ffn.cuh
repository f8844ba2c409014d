// ffn.cuh - a feed-forward in one kernel: the scores of a block's neurons, gate and up of those that are wanted, and the
// sum of their rows of down.
//
// Block b scores neurons b, b + blocks, b + 2 blocks ...: neighbours tend to be alike in how often they fire. The wanted
// ones of a cluster are dealt out to its blocks, and each leaves its own part of the sum. For the sum the threads are groups
// that take every so-many-th row, each thread the same columns of each row; the groups' sums are added in shared memory.
#ifndef TE_CUDA_FFN_CUH
#define TE_CUDA_FFN_CUH

#include "batch_sums.cuh"
#include "rows.cuh"

namespace te {

enum score_kind {
    SCORE_NONE,
    SCORE_ROWS,
    SCORE_SIGNS,
    SCORE_BITS // an operation in front has decided
};

// Shared memory of a block: where each piece begins, in bytes.
struct ffn_smem {
    int scales, z, z_scales, part, pointer, place, chosen, chosen_bytes; // activations are first, later sums of groups
};

struct ffn_args {
    rows_args k; // gate and up, as for te_cuda_hidden
    rows_args s; // SCORE_ROWS: product 0 is fc2, its input z
    score_kind score;
    const uint64_t *sign;
    const float *sign_h;
    size_t sign_ldh;
    const float *threshold;
    const uint32_t *bits; // SCORE_BITS: [n_tok][ld_bits] words
    int ld_bits;
    const int32_t *list; // rows of gate, up and down, or NULL: as they are
    bool file, first, beside;
    const uint8_t *down;
    size_t down_stride;
    float *partial;
    int own;                        // neurons of a block, at most
    int cols, tiles, lanes, groups; // of down; lanes: threads of a group
    ffn_smem at;
};
typedef void (*ffn_function)(ffn_args);
struct ffn_kernels {
    int type, lane_weights, steps, down_weights;
    bool int8;
    int score_type, score_weights, score_steps; // the format of fc2
    bool score_int8;
    batch_shape batch, score_batch;
    int factor_parts;       // batch::parts; 0: plain loops
    ffn_function kernel[2]; // for one token, and for several: NULL where that takes a kernel for each step
    ffn_function one;       // for one token in the usual case (one_ffn.cuh), or NULL
};
const ffn_kernels *ffn_float(int type);
const ffn_kernels *ffn_32(int type);
const ffn_kernels *ffn_bits(int type);
const ffn_kernels *ffn_table(int type);
const ffn_kernels *ffn_k(int type);
const ffn_kernels *ffn_k23(int type);
const ffn_kernels *ffn_file(int type); // of rows as in the file, where they are otherwise on a device

// The signs of h, 64 to a word. All threads call it; not synchronised behind.
__device__ __forceinline__ void pack_signs(const float *h, int cols, uint64_t *signs) {
    for (int c0 = threadIdx.x / 32 * 32; c0 < (cols + 63) / 64 * 64; c0 += (int)blockDim.x) {
        const int c = c0 + (int)threadIdx.x % 32;
        const uint32_t bits = __ballot_sync(~0u, c < cols && __ldcg(h + c) < 0);
        if (threadIdx.x % 32 == 0) ((uint32_t *)signs)[c0 / 32] = bits;
    }
}
// A warp: whether the signs of a row agree with those of h.
__device__ __forceinline__ bool signs_agree(const uint64_t *row, const uint64_t *signs, int cols, float threshold) {
    int differ = 0;
    for (int w = threadIdx.x % 32; w < (cols + 63) / 64; w += 32)
        differ += __popcll(__ldg((const unsigned long long *)row + w) ^ signs[w]);
    for (int o = 16; o; o /= 2) differ += __shfl_xor_sync(~0u, differ, o);
    return (float)(cols - 2 * differ) / (float)cols >= threshold;
}

// Neurons in shared memory: their ids, the tokens that want them, and their gates (T a neuron) once these are known.
struct chosen {
    int *id;
    uint32_t *want;
    float *h;
};
// Deals the neurons of a cluster's blocks out evenly: from what each has in `from` to `to`; returns how many there are
// now. All threads call it; cluster_wait() comes later.
template <int T>
__device__ __forceinline__ int deal(int n, const chosen &from, const chosen &to, bool gates, int *count) {
    const int blocks = cluster_size(), rank = cluster_rank();
    if (threadIdx.x == 0) *count = n;
    cluster_arrive();
    cluster_wait();
    int total = 0;
    for (int i = 0; i < blocks; i++) total += (int)cluster_load(count, i);
    const int lo = (int)((int64_t)total * rank / blocks), hi = (int)((int64_t)total * (rank + 1) / blocks);
    for (int i = threadIdx.x; i < hi - lo; i += ROWS_THREADS) {
        int k = lo + i, block = 0;
        for (int m; k >= (m = (int)cluster_load(count, block)); block++) k -= m;
        to.id[i] = (int)cluster_load(from.id + k, block);
        to.want[i] = cluster_load(from.want + k, block);
        for (int t = 0; t < T && gates; t++) to.h[i * T + t] = __uint_as_float(cluster_load(from.h + k * T + t, block));
    }
    cluster_arrive();
    __syncthreads();
    return hi - lo;
}

// The order of kernels, where two feed-forwards are computed side by side: the first lets the second start when what both
// read is there; the second waits for the first only before it ends, so that who waits for it has waited for both.
__device__ __forceinline__ void meet(const ffn_args &f) {
    if (!f.first) dep_go();
    if (!f.beside) dep_wait();
    if (f.first) dep_go();
}

// The row of gate, up and down that neuron j is.
__device__ __forceinline__ size_t row_id(const ffn_args &f, int j) { return (size_t)(f.list ? __ldg(f.list + j) : j); }

// Neurons in order of which some of the tokens t0 .. t0 + N - 1 has an h that is not 0 (or is no number): their places and
// rows of down; returns how many. All threads call it; ends with a barrier.
template <int T, int N>
__device__ __forceinline__ int find_rows(const ffn_args &f, int n, const int *id, const float *h, int t0, int *place,
                                         const uint8_t **pointer, int *words) {
    int m = 0;
    for (int e0 = 0; e0 < n; e0 += ROWS_THREADS) {
        const int e = e0 + (int)threadIdx.x;
        bool on = false;
#pragma unroll
        for (int t = 0; t < N; t++) on |= e < n && t0 + t < f.k.n_tok && h[e * T + t0 + t] != 0;
        const int at = ordered_place(on, &m, words);
        if (on) {
            place[at] = e;
            pointer[at] = f.down + row_id(f, id[e]) * f.down_stride;
        }
    }
    __syncthreads();
    return m;
}

// sum over k < m of h(k, t) * row k, to the block's part of tokens t0 + t, t < TA.
template <class C, int TA, class F>
__device__ __forceinline__ void sum_tiles(const ffn_args &f, int m, const uint8_t *const *pointer, F h, int t0,
                                          float *sums) {
    constexpr int W = C::down_weights, FLIGHT = C::flight;
    const int n_tok = f.k.n_tok, n_pieces = (f.cols + W - 1) / W;
    const int group = threadIdx.x / f.lanes, lane = threadIdx.x - group * f.lanes;
    for (int tile = 0; tile < f.tiles; tile++) {
        const int piece = tile * f.lanes + lane, first_col = tile * f.lanes * W;
        const bool inside = group < f.groups && piece < n_pieces;
        float acc[TA][W + C::offsets] = {};
        if (inside) {
            typename C::part now[FLIGHT], next[FLIGHT];
            auto load = [&](typename C::part(&p)[FLIGHT], int k) {
#pragma unroll
                for (int i = 0; i < FLIGHT; i++)
                    if (k + i * f.groups < m) p[i] = C::load_down(pointer[k + i * f.groups], piece, n_pieces);
            };
            const int step = FLIGHT * f.groups;
            load(now, group);
            for (int k = group; k < m; k += step) {
                load(next, k + step);
#pragma unroll
                for (int i = 0; i < FLIGHT; i++)
                    if (k + i * f.groups < m) {
                        float w[TA];
#pragma unroll
                        for (int t = 0; t < TA; t++) w[t] = h(k + i * f.groups, t);
                        C::template axpy<TA>(now[i], w, acc);
                    }
#pragma unroll
                for (int i = 0; i < FLIGHT; i++) now[i] = next[i];
            }
        }
        if constexpr (C::offsets > 0)
#pragma unroll
            for (int t = 0; t < TA; t++)
#pragma unroll
                for (int k = 0; k < W; k++) acc[t][k] -= acc[t][W + k / (W / C::offsets)];
#pragma unroll
        for (int t = 0; t < TA; t++) {
            for (int g = 1; g < f.groups; g++) {
                __syncthreads();
                if (group == g)
#pragma unroll
                    for (int k = 0; k < W; k++) sums[k * f.lanes + lane] = acc[t][k];
                __syncthreads();
                if (group == 0)
#pragma unroll
                    for (int k = 0; k < W; k++) acc[t][k] += sums[k * f.lanes + lane];
            }
            float *to = f.partial + ((size_t)blockIdx.x * n_tok + (t0 + t)) * f.cols + first_col;
            if (C::offsets == 0 && C::column(0, W - 1) == W - 1 &&
                f.cols % W == 0) { // a thread's columns are neighbours
                if (group == 0 && inside && t0 + t < n_tok)
#pragma unroll
                    for (int k = 0; k < W; k += 4)
                        *(float4 *)(to + lane * W + k) =
                            make_float4(acc[t][k], acc[t][k + 1], acc[t][k + 2], acc[t][k + 3]);
                continue;
            }
            // Into the order of the columns, so that neighbours are stored together.
            __syncthreads();
            if (group == 0 && inside)
#pragma unroll
                for (int k = 0; k < W; k++) sums[C::column(piece, k) - first_col] = acc[t][k];
            __syncthreads();
            if (t0 + t < n_tok)
                for (int i = threadIdx.x; i < min(f.lanes * W, f.cols - first_col); i += ROWS_THREADS) to[i] = sums[i];
        }
        __syncthreads(); // the sums are about to change
    }
}

// sum over neurons e with h != 0 of h[e * T + t] * the row of down of id[e], to the block's part.
template <class C, int T>
__device__ __forceinline__ void sum_rows(const ffn_args &f, int n, const int *id, const float *h, int *place,
                                         const uint8_t **pointer, float *sums, int *words) {
    if constexpr (T == BATCH_TOKENS && batch<C>::there) {
        __shared__ float most[BATCH_TOKENS], back[BATCH_TOKENS];
        const int m = find_rows<T, T>(f, n, id, h, 0, place, pointer, words), n_tok = f.k.n_tok,
                  n_parts = (f.cols + C::down_weights - 1) / C::down_weights;
        const batch_rows r = {pointer, m, (uint2 *)sums, most, back};
        batch_factors<batch<C>>(r, n_tok, [&](int e, int t) { return h[place[e] * T + t]; });
        batch_sums<C>(r, threadIdx.x / 32, ROWS_WARPS, (n_parts + 7) / 8, n_parts, n_tok, f.cols,
                      f.partial + (size_t)blockIdx.x * n_tok * f.cols);
        return;
    }
    constexpr int TA = T < 4 ? T : 4;
    for (int t0 = 0; t0 < f.k.n_tok; t0 += TA) {
        const int m = find_rows<T, TA>(f, n, id, h, t0, place, pointer, words);
        sum_tiles<C, TA>(f, m, pointer, [&](int k, int t) { return h[place[k] * T + t0 + t]; }, t0, sums);
    }
}

// asked, computed, fired of this thread, added to the counts of all.
__device__ __forceinline__ void add_counts(uint32_t *counts, uint32_t asked, uint32_t computed, uint32_t fired) {
    if (!counts) return;
    for (int o = 16; o; o /= 2) {
        asked += __shfl_xor_sync(~0u, asked, o);
        computed += __shfl_xor_sync(~0u, computed, o);
        fired += __shfl_xor_sync(~0u, fired, o);
    }
    if (threadIdx.x % 32) return;
    if (asked) atomicAdd(counts, asked);
    if (computed) atomicAdd(counts + 1, computed);
    if (fired) atomicAdd(counts + 2, fired);
}

template <class C, class S, int T>
__global__ void __launch_bounds__(ROWS_THREADS, T == 1 ? 2 : 1) ffn_kernel(const __grid_constant__ ffn_args f) {
    extern __shared__ uint4 shared[];
    __shared__ float room[ROWS_WARPS * T];
    __shared__ int words[ROWS_WARPS], count;
    __shared__ rows_norm<T> norm;
    const rows_args &a = f.k;
    uint8_t *s = (uint8_t *)shared;
    float *part = (float *)(s + f.at.part);
    const uint8_t **pointer = (const uint8_t **)(s + f.at.pointer);
    int *place = (int *)(s + f.at.place);
    auto chosen_at = [&](int at) {
        int *id = (int *)(s + at);
        return chosen{id, (uint32_t *)id + f.own, (float *)id + 2 * f.own};
    };
    const chosen mine = chosen_at(f.at.chosen), dealt = chosen_at(f.at.chosen + f.at.chosen_bytes);
    const int b = blockIdx.x, nb = gridDim.x, own = (a.n - b + nb - 1) / nb;
    const rows_product &first = a.product[0], &up = a.product[a.gated ? 1 : 0];
    const bool gate_first = a.gated && a.skip, pairs = a.gated && !a.skip, scored = f.score != SCORE_NONE;
    const int n_pieces = (a.cols + C::lane_weights - 1) / C::lane_weights;
    block_of<C, T> k = {a, shared, (bytes32 *)(s + f.at.scales), part, pointer, n_pieces, norm, {}, {}};
    auto row_of = [&](const rows_product &p, int j) { return p.w + row_id(f, j) * p.stride; };
    // This block's wanted neurons, in order: bits(e) says which tokens want the e-th.
    auto choose = [&](auto bits) {
        int n = 0;
        for (int e0 = 0; e0 < own; e0 += ROWS_THREADS) {
            const int e = e0 + (int)threadIdx.x;
            const uint32_t want = e < own ? bits(e) : 0;
            const int at = ordered_place(want != 0, &n, words);
            if (!want) continue;
            mine.id[at] = b + e * nb;
            mine.want[at] = want;
        }
        return n;
    };
    int n = own;
    chosen now = dealt;
    if (f.score == SCORE_ROWS) {
        const rows_product &fc2 = f.s.product[0];
        const int z_pieces = (f.s.cols + S::lane_weights - 1) / S::lane_weights;
        block_of<S, T> z = {
            f.s, (uint4 *)(s + f.at.z), (bytes32 *)(s + f.at.z_scales), part, pointer, z_pieces, norm, {}, {}};
        auto score_row = [&](int e) { return fc2.w + (size_t)(b + e * nb) * fc2.stride; };
        z.start_early(own, score_row);
        for (int e = threadIdx.x; e < own; e += ROWS_THREADS) pointer[e] = score_row(e);
        meet(f);
        z.input(room);
        z.run(own);
        const float threshold = __ldcg(f.threshold);
        n = choose([&](int e) {
            uint32_t want = 0;
            for (int t = 0; t < a.n_tok; t++) want |= (uint32_t)(z.sum(e, t) >= threshold) << t;
            return want;
        });
    } else if (f.score == SCORE_SIGNS) {
        meet(f);
        uint64_t *signs = (uint64_t *)(s + f.at.z);
        const int n_words = (a.cols + 63) / 64;
        for (int t = 0; t < a.n_tok; t++) pack_signs(f.sign_h + t * f.sign_ldh, a.cols, signs + t * n_words);
        __syncthreads();
        const float threshold = __ldcg(f.threshold);
        for (int e = threadIdx.x / 32; e < own; e += ROWS_WARPS) {
            uint32_t want = 0;
            const uint64_t *row = f.sign + (size_t)(b + e * nb) * n_words;
            for (int t = 0; t < a.n_tok; t++)
                want |= (uint32_t)signs_agree(row, signs + t * n_words, a.cols, threshold) << t;
            if (threadIdx.x % 32 == 0) place[e] = (int)want;
        }
        __syncthreads();
        n = choose([&](int e) { return (uint32_t)place[e]; });
    } else if (f.score == SCORE_BITS) {
        meet(f);
        n = choose([&](int e) {
            const int j = b + e * nb;
            uint32_t want = 0;
            for (int t = 0; t < a.n_tok; t++)
                want |= (__ldcg(f.bits + (size_t)t * f.ld_bits + j / 32) >> (j % 32) & 1) << t;
            return want;
        });
    } else {
        k.start_early(pairs ? 2 * own : own, [&](int r) {
            return pairs ? row_of(r % 2 ? up : first, b + r / 2 * nb) : row_of(first, b + r * nb);
        });
        for (int e = threadIdx.x; e < own; e += ROWS_THREADS) {
            now.id[e] = b + e * nb;
            now.want[e] = (1u << a.n_tok) - 1;
        }
        if (T == 1) k.early.load(a.norm, a.cols);
        meet(f);
    }
    __syncthreads();
    if (scored) n = deal<T>(n, mine, dealt, false, &count);
    uint32_t asked = 0, computed = 0, fired = 0;
    const bool fetch_down = T == 1 && !f.file; // those of several tokens would push each other out of the cache
    for (int e = threadIdx.x; e < n; e += ROWS_THREADS) {
        const int j = now.id[e];
        asked += __popc(now.want[e]);
        if (pairs) {
            pointer[2 * e] = row_of(first, j);
            pointer[2 * e + 1] = row_of(up, j);
        } else {
            pointer[e] = row_of(first, j);
        }
        if (scored && !a.skip && fetch_down) prefetch_bytes(f.down + row_id(f, j) * f.down_stride, f.down_stride);
    }
    __syncthreads();
    if (scored) {
        k.start(pairs ? 2 * n : n, 0);
        if (T == 1) k.early.load(a.norm, a.cols);
    }
    if (n > 0) {
        k.input(room);
        k.run(pairs ? 2 * n : n);
    }
    if (gate_first) {               // up and down of those whose gate lets a token through
        if (scored) cluster_wait(); // others have read what is overwritten now
        int n_live = 0;
        for (int e0 = 0; e0 < n; e0 += ROWS_THREADS) {
            const int e = e0 + (int)threadIdx.x;
            float g[T];
            uint32_t on = 0;
#pragma unroll
            for (int t = 0; t < T; t++) {
                g[t] = e < n && (now.want[e] >> t & 1) ? activate(a.act, a.threshold, k.sum(e, t)) : 0;
                on |= (uint32_t)(g[t] != 0) << t;
            }
            const int at = ordered_place(on != 0, &n_live, words);
            if (!on) continue;
            mine.id[at] = now.id[e];
            mine.want[at] = on;
            computed += __popc(on);
#pragma unroll
            for (int t = 0; t < T; t++) mine.h[at * T + t] = g[t];
        }
        __syncthreads();
        n = n_live;
        if (!scored)
            n = deal<T>(n, mine, dealt, true, &count);
        else
            now = mine;
        for (int e = threadIdx.x; e < n; e += ROWS_THREADS) {
            pointer[e] = row_of(up, now.id[e]);
            if (fetch_down) prefetch_bytes(f.down + row_id(f, now.id[e]) * f.down_stride, f.down_stride);
        }
        __syncthreads();
        k.start(n, 0);
        k.rewind();
        k.run(n);
    }
    for (int i = threadIdx.x; i < n * T; i += ROWS_THREADS) {
        const int e = i / T, t = i % T;
        float v = 0;
        if (now.want[e] >> t & 1) {
            float u = k.sum(pairs ? 2 * e + 1 : e, t);
            if (up.bias) u += __ldg(up.bias + now.id[e]);
            if (!a.gated) {
                v = activate_up(a.act, a.threshold, a.curve, u);
            } else {
                const float g = pairs ? activate(a.act, a.threshold, k.sum(2 * e, t)) : now.h[i];
                v = gated_value(a.act, g, u);
            }
            computed += !gate_first && (!a.skip || v != 0);
            fired += v != 0;
            if (a.fired && v != 0) atomicAdd(a.fired + now.id[e], 1);
        }
        now.h[i] = v;
    }
    add_counts(a.counts, asked, computed, fired);
    __syncthreads();
    sum_rows<C, T>(f, n, now.id, now.h, place, pointer, (float *)shared, words);
    if (scored != gate_first) cluster_wait();
    if (f.beside) dep_wait();
}

template <class C> constexpr int factor_parts_of() {
    if constexpr (batch<C>::there)
        return batch<C>::parts;
    else
        return 0;
}
// SEVERAL: with a kernel for several tokens, which takes longer to compile than all others of a format together.
template <class C, bool SEVERAL = true> constexpr ffn_kernels ffn_of() {
    typedef typename C::scores S;
    ffn_function several = nullptr;
    if constexpr (SEVERAL) several = ffn_kernel<C, S, BATCH_TOKENS>;
    return {C::type,
            C::lane_weights,
            C::steps,
            C::down_weights,
            C::int8,
            S::type,
            S::lane_weights,
            S::steps,
            S::int8,
            batch_shape_of<C>(),
            batch_shape_of<S>(),
            factor_parts_of<C>(),
            {ffn_kernel<C, S, 1>, several},
            nullptr};
}
template <class C> struct any_ffn {
    static constexpr ffn_kernels kernels = ffn_of<C>();
};

} // namespace te
#endif
