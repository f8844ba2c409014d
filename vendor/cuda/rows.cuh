// rows.cuh - dot products of rows with a vector: the kernel of te_linear_args and te_cuda_hidden. With several vectors, for
// formats that have it, batch.cuh takes the place of rows_block.
//
// A block owns some rows. They are cut into tasks of a few KB, dealt to the block's warps in turn; a warp has the loads of
// its next task in flight while it works on one. The sums of tasks meet in shared memory and are added in order.
// The input is normed, and for integer formats quantised, by every block for itself, into shared memory: that costs less
// than a kernel of its own. Where it does not fit, rows are worked through in tiles of columns.
#ifndef TE_CUDA_ROWS_CUH
#define TE_CUDA_ROWS_CUH

#include "activation.cuh"
#include "batch.cuh"

namespace te {

template <class C> struct rows_task {
    static constexpr int pieces = 32 * C::steps, weights = pieces * C::lane_weights;
    typename C::piece p[C::steps];

    __device__ __forceinline__ void load(const uint8_t *row, int first, int n) {
#pragma unroll
        for (int i = 0; i < C::steps; i++) {
            const int k = first + 32 * i + (int)threadIdx.x % 32;
            p[i] = typename C::piece();
            if (k < n) p[i] = C::load(row, k, n);
        }
    }
};

__device__ __forceinline__ bool marked(const rows_args &a, int t, int j) {
    return __ldcg(a.mask + t * a.ld_mask + j / 8) >> (j % 8) & 1;
}

// The share of block b of n things: equal parts, the first ones by one larger.
struct share {
    int lo, hi;
};
__device__ __forceinline__ share share_of(int n, int b, int nb) {
    const int each = n / nb, more = n % nb, lo = b * each + min(b, more);
    return {lo, lo + each + (b < more)};
}
__device__ __forceinline__ share list_share(const rows_args &a) {
    return share_of(a.n_list ? min(__ldcg(a.n_list), a.n) : a.n, blockIdx.x, gridDim.x);
}

// SELECT_ALL: rows first, first + step ...
struct every {
    int first, step, n;
    __device__ __forceinline__ int at(int i) const { return first + i * step; }
};
__device__ __forceinline__ every every_row(const rows_args &a) {
    const int b = blockIdx.x;
    if (a.publish) {
        const int lo = (int)((int64_t)a.n * b / gridDim.x);
        return {lo, 1, (int)((int64_t)a.n * (b + 1) / gridDim.x) - lo};
    }
    // Neighbours tend to be alike in how often they fire: where that counts, every block gets some of all.
    if (a.ffn && a.skip) return {b, (int)gridDim.x, a.share_each + (b < a.share_more)};
    const int lo = (b * a.share_each + min(b, a.share_more)) * a.unit, n = (a.share_each + (b < a.share_more)) * a.unit;
    return {lo, 1, max(0, min(n, a.n - lo))};
}

// Calls put(i, id) for row i = 0, 1, ... of this block's, by any thread; returns how many there are. All threads call it.
template <bool FFN, class F> __device__ __forceinline__ int choose_rows(const rows_args &a, int *room, F put) {
    const int b = blockIdx.x, nb = gridDim.x;
    if (FFN && a.select == SELECT_MARK) {
        // Every block counts all bits, and takes an equal share of them.
        const int n_words = (a.n + 31) / 32, per = (n_words + ROWS_THREADS - 1) / ROWS_THREADS, w0 = threadIdx.x * per;
        auto word = [&](int w) {
            uint32_t v = 0;
            for (int t = 0; t < a.n_tok; t++) v |= __ldcg((const uint32_t *)(a.mask + t * a.ld_mask) + w);
            return w == n_words - 1 && a.n % 32 ? v & ((1u << a.n % 32) - 1) : v;
        };
        const uint32_t first = w0 < n_words ? word(w0) : 0; // mostly the only one
        int own = __popc(first);
        for (int w = w0 + 1; w < w0 + per && w < n_words; w++) own += __popc(word(w));
        int sum = own; // inclusive over the warp, then over the block
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        for (int o = 1; o < 32; o *= 2) {
            const int v = __shfl_up_sync(~0u, sum, o);
            if (lane >= o) sum += v;
        }
        if (lane == 31) room[warp] = sum;
        __syncthreads();
        int before = sum - own, total = 0;
        for (int w = 0; w < ROWS_WARPS; w++) {
            if (w < warp) before += room[w];
            total += room[w];
        }
        const share s = share_of(total, b, nb);
        for (int w = w0; w < w0 + per && w < n_words && before < s.hi; w++)
            for (uint32_t v = w == w0 ? first : word(w); v; v &= v - 1, before++)
                if (before >= s.lo && before < s.hi) put(before - s.lo, 32 * w + __ffs(v) - 1);
        return s.hi - s.lo;
    }
    if (a.select == SELECT_LIST) {
        const share s = list_share(a);
        for (int i = s.lo + threadIdx.x; i < s.hi; i += ROWS_THREADS) put(i - s.lo, __ldcg(a.list + i));
        return s.hi - s.lo;
    }
    const every e = every_row(a);
    for (int i = threadIdx.x; i < e.n; i += ROWS_THREADS) put(i, e.at(i));
    return e.n;
}

// The sums of all tasks of rows pointer[0..n-1], as put(task * T + token, sum). ahead: this warp's first one.
template <class C, int T, class F>
__device__ __forceinline__ void run_tasks(const uint8_t *const *pointer, int n, int parts, int piece, int n_pieces,
                                          const acts &in, rows_task<C> &ahead, F put) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row_step = ROWS_WARPS / parts, part_step = ROWS_WARPS - row_step * parts;
    int r = warp / parts, at = warp - r * parts;
#pragma unroll 1
    for (int t = warp; r < n; t += ROWS_WARPS) {
        int next_r = r + row_step, next_at = at + part_step;
        if (next_at >= parts) {
            next_at -= parts;
            next_r++;
        }
        rows_task<C> next;
        if (next_r < n) next.load(pointer[next_r], piece + next_at * rows_task<C>::pieces, n_pieces);
        float s[T] = {};
        const int p = at * rows_task<C>::pieces + lane;
#pragma unroll
        for (int i = 0; i < C::steps; i++) C::template dot<T>(ahead.p[i], in, p + 32 * i, s);
        const float v = warp_sums<T>(s, lane);
        if (sum_owner<T>(lane)) put(t * T + sum_index<T>(lane), v);
        ahead = next;
        r = next_r;
        at = next_at;
    }
}

// The input of one token with more columns than fill_one takes, all of them in shared memory: K loads of a thread are on
// their way at once. The sum of this thread's squares.
template <class C, int K, bool NORMED>
__device__ __forceinline__ float fill_some(const rows_args &a, int first, uint4 *q, bytes32 *b) {
    float4 v[K], w[NORMED ? K : 1];
    float s = 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = 4 * (first + (int)threadIdx.x + k * ROWS_THREADS);
        v[k] = c < a.cols ? load_x(a, 0, c) : make_float4(0, 0, 0, 0);
        if (NORMED) w[k] = c < a.cols ? load_vector(a.norm.w, c, a.cols, 0) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int i = first + (int)threadIdx.x + k * ROWS_THREADS;
        if (4 * i >= a.tile) continue;
        if (NORMED) {
            s += squares(v[k], 4 * i, a.cols, 0);
            v[k] = make_float4(v[k].x * w[k].x, v[k].y * w[k].y, v[k].z * w[k].z, v[k].w * w[k].w);
        }
        put_x<C>(a, 0, i, v[k], q, b);
    }
    return s;
}
// Whether fill_wide takes it.
__host__ __device__ inline bool fills_wide(const rows_args &a) {
    return a.tile >= a.cols && (a.norm.kind == TE_NO_NORM || (a.norm.kind == TE_RMS_NORM && !a.norm.b));
}
// What all sums must be multiplied with is returned; the block's threads meet.
template <class C> __device__ __forceinline__ float fill_wide(const rows_args &a, uint4 *q, bytes32 *b, float *room) {
    if (a.norm.kind == TE_NO_NORM) {
#pragma unroll 1
        for (int i = 0; 4 * i < a.tile; i += 4 * ROWS_THREADS) fill_some<C, 4, false>(a, i, q, b);
        __syncthreads();
        return 1;
    }
    float s = 0;
#pragma unroll 1
    for (int i = 0; 4 * i < a.tile; i += 3 * ROWS_THREADS) s += fill_some<C, 3, true>(a, i, q, b);
    s = warp_sum(s);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = s;
    __syncthreads();
    s = 0;
#pragma unroll
    for (int w = 0; w < ROWS_WARPS; w++) s += room[w];
    return 1.0f / sqrtf(s / (float)a.cols + a.norm.eps);
}

template <class C, int T> struct rows_block {
    const rows_args &a;
    uint4 *q;
    bytes32 *scales;
    float *part;
    const uint8_t **pointer;
    int n_pieces;
    rows_norm<T> &norm;
    rows_task<C> ahead;
    early_norm early;
    float scale = 1; // of all sums: what the norm has not been multiplied with

    __device__ __forceinline__ int first_row() const { return (int)(threadIdx.x / 32) / a.parts; }
    // Starts the loads of each warp's first task of rows pointer[0..n-1].
    __device__ __forceinline__ void start(int n, int first_piece) {
        const int r = first_row(), p = (int)(threadIdx.x / 32) - r * a.parts;
        if (r < n) ahead.load(pointer[r], first_piece + p * rows_task<C>::pieces, n_pieces);
    }
    // The same before the pointers are there: row(r) is the pointer to be.
    template <class F> __device__ __forceinline__ void start_early(int n, F row) {
        const int r = first_row(), p = (int)(threadIdx.x / 32) - r * a.parts;
        if (r < n) ahead.load(row(r), p * rows_task<C>::pieces, n_pieces);
    }
    // The input, or its first tile, into shared memory.
    __device__ __forceinline__ void input(float *room) {
        if (T == 1 && a.tile >= a.cols && a.tile <= 4 * FILL_ONCE * ROWS_THREADS) {
            scale = fill_one<C>(a, early, q, scales, room);
            return;
        }
        if (T == 1 && fills_wide(a)) {
            scale = fill_wide<C>(a, q, scales, room);
            return;
        }
        measure<T>(a, norm, room);
        fill_acts<C, T>(a, norm, 0, q, scales);
    }
    // The sums of rows pointer[0..n-1], as sum(r, t). start and input come before.
    __device__ __forceinline__ void run(int n) {
        const int tile_pieces = a.tile / C::lane_weights;
        const acts in = {q, scales, C::int8 ? a.tile / 16 : a.tile / 4, a.tile / 32};
        for (int c0 = 0, piece = 0; c0 < a.cols; c0 += a.tile, piece += tile_pieces) {
            if (c0 > 0) {
                start(n, piece);
                fill_acts<C, T>(a, norm, c0, q, scales);
            }
            run_tasks<C, T>(pointer, n, a.parts, piece, n_pieces, in, ahead,
                            [&](int i, float v) { part[i] = c0 > 0 ? part[i] + v : v; });
            __syncthreads();
        }
    }
    // Before a second run with the same input: only of several tiles the first must come again.
    __device__ __forceinline__ void rewind() {
        if (a.tile < a.cols) fill_acts<C, T>(a, norm, 0, q, scales);
    }
    __device__ __forceinline__ float sum(int r, int t) const {
        float s = 0;
        for (int i = 0; i < a.parts; i++) s += part[(r * a.parts + i) * T + t];
        return T == 1 ? s * scale : s;
    }
};

template <class C, int T>
using block_of = typename either<T == BATCH_TOKENS && batch<C>::there, batch_block<C>, rows_block<C, T>>::type;

template <class C, int T>
__device__ __forceinline__ void finish_linear(const block_of<C, T> &k, const int *id, int n, int place) {
    const rows_args &a = k.a;
    for (int i = threadIdx.x; i < n * T; i += ROWS_THREADS) {
        const int e = i / T, t = i % T;
        if (t >= a.n_tok) continue;
        int m = 0;
        while (m + 1 < a.n_products && id[e] >= a.product[m + 1].first) m++;
        const rows_product &p = a.product[m];
        if (!p.y) continue;
        const int r = id[e] - p.first, to = a.select == SELECT_LIST ? place + e : r;
        float s = k.sum(e, t);
        if (p.bias) s += __ldg(p.bias + r);
        if (p.relu) s = fmaxf(s, 0);
        if (p.add) s += __ldcg(p.add + t * p.ld_add + to);
        p.y[t * p.ldy + to] = s;
    }
    // Marks: one product, rows in order; those in device memory from a multiple of 8 on.
    const rows_product &p = a.product[0];
    if (!p.mark && !a.publish) return;
    const float threshold = p.threshold_at ? __ldcg(p.threshold_at) : p.threshold;
    if (a.publish) {
        const int words = ((a.n + (int)gridDim.x - 1) / (int)gridDim.x + 31) / 32;
        const uint32_t number = ticket_number(a.ticket);
        for (int i = threadIdx.x; i < 32 * words * a.n_tok; i += ROWS_THREADS) {
            const int w = i / 32 % words, t = i / 32 / words, e = 32 * w + i % 32;
            const uint32_t bits = __ballot_sync(~0u, e < n && k.sum(e, t) >= threshold);
            if (i % 32 == 0) store_word(a.publish + ((size_t)t * gridDim.x + blockIdx.x) * words + w, bits, number);
        }
        return;
    }
    for (int i = threadIdx.x; i < (n + 7) / 8 * T; i += ROWS_THREADS) {
        const int first = i / T * 8, t = i % T;
        if (t >= a.n_tok) continue;
        uint32_t bits = 0;
        for (int e = first; e < first + 8 && e < n; e++) {
            float s = k.sum(e, t);
            if (p.bias) s += __ldg(p.bias + id[e]);
            if (p.relu) s = fmaxf(s, 0);
            if (s >= threshold) bits |= 1u << (e - first);
        }
        p.mark[t * p.ld_mark + id[first] / 8] = (uint8_t)bits;
    }
}

__device__ __forceinline__ float added(const rows_args &a, const float *add, int t, int j) {
    return add ? __ldcg(add + t * a.ld_add + j) : 0;
}

// Of n neurons whose sums are there: h, and counts. gate: row offset of the gates, or -1; up: of the ups; live[e]: the
// place of neuron e among the ups, or -1 where up was not read (then h is 0).
template <class C, int T>
__device__ __forceinline__ void store_hidden(const block_of<C, T> &k, const int *id, const int *live,
                                             const float *gates, int n, int place) {
    const rows_args &a = k.a;
    const rows_product &up = a.product[a.gated ? 1 : 0];
    uint32_t asked = 0, computed = 0, fired = 0;
    for (int e = threadIdx.x; e < n; e += ROWS_THREADS) {
        const int j = id[e], to = a.select == SELECT_LIST ? place + e : j;
        uint32_t n_fired = 0;
        for (int t = 0; t < a.n_tok; t++) {
            const bool on = !a.mask || a.n_tok == 1 || marked(a, t, j); // of one token, all that are here are
            float h = 0;
            if (on) {
                asked++;
                const int r = live ? live[e] : a.gated ? 2 * e + 1 : e;
                if (r >= 0) {
                    float u = k.sum(r, t) + added(a, a.up_add, t, j);
                    if (up.bias) u += __ldg(up.bias + j);
                    if (!a.gated) {
                        h = activate_up(a.act, a.threshold, a.curve, u);
                        computed += !a.skip || h != 0;
                    } else {
                        float g = gates ? gates[e * T + t] : k.sum(2 * e, t) + added(a, a.gate_add, t, j);
                        g = activate(a.act, a.threshold, g);
                        computed += !a.skip || g != 0;
                        h = gated_value(a.act, g, u);
                    }
                }
                n_fired += h != 0;
            }
            a.h[t * a.ldh + to] = h;
        }
        fired += n_fired;
        if (a.fired && n_fired) atomicAdd(a.fired + j, n_fired);
    }
    if (!a.counts) return;
    for (int o = 16; o; o /= 2) {
        asked += __shfl_xor_sync(~0u, asked, o);
        computed += __shfl_xor_sync(~0u, computed, o);
        fired += __shfl_xor_sync(~0u, fired, o);
    }
    if (threadIdx.x % 32 == 0 && asked) {
        atomicAdd(a.counts, asked);
        atomicAdd(a.counts + 1, computed);
        atomicAdd(a.counts + 2, fired);
    }
}

template <class C, int T>
__device__ __forceinline__ void ffn_block(block_of<C, T> &k, int *id, int *live, float *gates, float *room,
                                          int *words) {
    const rows_args &a = k.a;
    const rows_product &first = a.product[0], &up = a.product[a.gated ? 1 : 0];
    int n = 0;
    const bool two_phases = a.gated && a.skip, known = a.select == SELECT_ALL;
    auto aim = [&] { // at the rows of the first phase
        n = choose_rows<true>(a, words, [&](int e, int j) {
            id[e] = j;
            if (!a.gated || two_phases) {
                k.pointer[e] = first.w + (size_t)j * first.stride;
            } else {
                k.pointer[2 * e] = first.w + (size_t)j * first.stride;
                k.pointer[2 * e + 1] = up.w + (size_t)j * up.stride;
            }
        });
    };
    const bool pairs = a.gated && !two_phases;
    if (known) {
        const every e = every_row(a);
        k.start_early(pairs ? 2 * e.n : e.n, [&](int r) {
            const rows_product &p = pairs && r % 2 ? up : first;
            return p.w + (size_t)e.at(pairs ? r / 2 : r) * p.stride;
        });
        aim();
    }
    if (T == 1) k.early.load(a.norm, a.cols);
    dep_go();
    dep_wait();
    if (!known) {
        // h of neurons that nobody asked for; their bits are on their way while the others are being counted.
        const share z = share_of(a.select == SELECT_MARK ? a.n : 0, blockIdx.x, gridDim.x);
        auto unasked = [&](int j) {
            bool any = false;
            for (int t = 0; t < a.n_tok; t++) any |= marked(a, t, j);
            return !any;
        };
        const int j0 = z.lo + (int)threadIdx.x;
        const bool zero = j0 < z.hi && unasked(j0);
        aim();
        __syncthreads();
        k.start(pairs ? 2 * n : n, 0);
        for (int t = 0; t < a.n_tok && zero; t++) a.h[t * a.ldh + j0] = 0;
        for (int j = j0 + ROWS_THREADS; j < z.hi; j += ROWS_THREADS)
            for (int t = 0; t < a.n_tok && unasked(j); t++) a.h[t * a.ldh + j] = 0;
    }
    const int place = a.select == SELECT_LIST ? list_share(a).lo : 0;
    if (n == 0) return;
    k.input(room);
    if (!two_phases) {
        k.run(pairs ? 2 * n : n);
        store_hidden<C, T>(k, id, nullptr, nullptr, n, place);
        return;
    }
    k.run(n);
    int n_live = 0;
    for (int e0 = 0; e0 < n; e0 += ROWS_THREADS) {
        const int e = e0 + threadIdx.x;
        bool on = false;
        for (int t = 0; t < a.n_tok && e < n; t++) {
            const int j = id[e];
            const float g = k.sum(e, t) + added(a, a.gate_add, t, j);
            const bool asked = !a.mask || a.n_tok == 1 || marked(a, t, j);
            gates[e * T + t] = g;
            on |= asked && activate(a.act, a.threshold, g) != 0;
        }
        const int at = ordered_place(on, &n_live, words);
        if (e < n) live[e] = on ? at : -1;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n; e += ROWS_THREADS)
        if (live[e] >= 0) k.pointer[live[e]] = up.w + (size_t)id[e] * up.stride;
    __syncthreads();
    k.start(n_live, 0);
    k.rewind();
    k.run(n_live);
    store_hidden<C, T>(k, id, live, gates, n, place);
}

template <class C, int T, bool FFN>
__global__ void __launch_bounds__(ROWS_THREADS, T == 8 ? 1 : 2)
    rows_kernel(const __grid_constant__ rows_args a, const __grid_constant__ rows_smem at) {
    extern __shared__ uint4 shared[];
    __shared__ float room[ROWS_WARPS * T];
    __shared__ int words[ROWS_WARPS];
    __shared__ rows_norm<T> norm;
    uint8_t *s = (uint8_t *)shared;
    int *id = (int *)(s + at.acts + at.scales + at.part + at.pointer), *live = id + at.id / 4;
    block_of<C, T> k = {a,
                        shared,
                        (bytes32 *)(s + at.acts),
                        (float *)(s + at.acts + at.scales),
                        (const uint8_t **)(s + at.acts + at.scales + at.part),
                        (a.cols + C::lane_weights - 1) / C::lane_weights,
                        norm,
                        {},
                        {}};
    if constexpr (FFN) {
        ffn_block<C, T>(k, id, live, (float *)(live + at.id / 4), room, words);
        return;
    }
    int n = 0;
    auto row = [&](int j) {
        int m = 0;
        while (m + 1 < a.n_products && j >= a.product[m + 1].first) m++;
        return a.product[m].w + (size_t)(j - a.product[m].first) * a.product[m].stride;
    };
    auto aim = [&] {
        n = choose_rows<false>(a, words, [&](int e, int j) {
            id[e] = j;
            k.pointer[e] = row(j);
        });
    };
    const bool known = a.select == SELECT_ALL;
    if (known) {
        const every e = every_row(a);
        k.start_early(e.n, [&](int r) { return row(e.at(r)); });
        aim();
    }
    if (T == 1) k.early.load(a.norm, a.cols);
    dep_go();
    dep_wait();
    if (!known) {
        aim();
        __syncthreads();
        k.start(n, 0);
    }
    if (a.side.keep || a.side.publish) side_block(a, room);
    if (n == 0 && !a.publish) return;
    k.input(room);
    k.run(n);
    finish_linear<C, T>(k, id, n, a.select == SELECT_LIST ? list_share(a).lo : 0);
}

template <class C> constexpr rows_kernels rows_of() {
    return {C::type,
            C::lane_weights,
            C::steps,
            C::int8,
            batch_shape_of<C>(),
            {{rows_kernel<C, 1, false>, rows_kernel<C, BATCH_TOKENS, false>},
             {rows_kernel<C, 1, true>, rows_kernel<C, BATCH_TOKENS, true>}},
            {}};
}

} // namespace te
#endif
