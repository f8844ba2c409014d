// rows.hpp - the row kernels: dot, axpy and conversion of rows. One body serves every format and every instruction set;
// dense and sparse differ only in where the next row's number comes from.
//
// Rows are walked one at a time while the next one (or the one that the caller names) is prefetched in address order: a
// stream that the hardware follows. Several rows abreast are many short streams: with eight a dot product reads at half
// the rate, and axpy of F16 at 0.85 of it (one row: 1.0). Formats whose axpy is bound by arithmetic, most of all by loads
// and stores of its sums, take C::rows of them at a time (Zen 4, dense, share of the read rate with one row and with four:
// Q4_0 54 and 83 %, Q4_K 44 and 65 %).
#ifndef TE_ROWS_HPP
#define TE_ROWS_HPP

namespace {

inline const uint8_t *row_start(const te_mat *m, te_rows rows, int32_t i) {
    return (const uint8_t *)m->w + m->stride * (size_t)te_row_at(rows, i);
}

// What to prefetch while row i is worked on: row i of `ahead`; without one, where rows follow each other in memory, so
// many bytes further on, also past the last row, since there the member's next part begins; else the next row, if that
// is 2 KiB on, else one so far on, at the end of the list row i itself, which costs next to nothing. So many bytes: Zen 4,
// 4096 columns, while it read 48 GB/s: 3 KiB 59 and 61 % of the read rate in Q8_0 and Q4_0, 8 KiB 84 and 91, 16 KiB 82 and
// 88, no prefetching 95 and 83 (with 11008 columns 75 and 83 instead of 81 and 91); Sapphire Rapids, 15 threads: 3 KiB 126
// and 124 %, 8 KiB 137 and 128.
//
// A processor drops prefetches while many lines are on their way, and what was dropped is then waited for. So rows of a
// list are fetched once more, AGAIN rows before their turn; that costs little where the line has come. A tenth of the
// neurons, Zen 4, reading 31 GB/s, without and with it: Q4_0 53 and 61 % of the read rate, F16 68 and 85.
struct row_ahead {
    enum { BYTES = 8192, AGAIN = 4 };
    const te_mat *m, *here;
    te_rows rows, rows_here;
    int32_t distance;
    bool is_stream, is_list;
    row_ahead(const te_mat *own, te_rows own_rows, const te_ahead &ahead, size_t row_bytes)
        : m(ahead.m ? ahead.m : own), here(own), rows(ahead.m ? ahead.rows : own_rows), rows_here(own_rows),
          distance(ahead.m ? 0 : 1 + (int32_t)(2047 / (row_bytes + 1))),
          is_stream(!ahead.m && !own_rows.row && own->stride == row_bytes), is_list(own_rows.row != nullptr) {}
    const uint8_t *at(int32_t i, const uint8_t *own) const {
        if (is_stream) return own + BYTES;
        return i + distance < rows.n ? row_start(m, rows, i + distance) : own;
    }
    // The row AGAIN turns after row i, which the caller may have named; w, row i, where there is none.
    const uint8_t *again(int32_t i, const uint8_t *w) const {
        const int32_t past = i + AGAIN - rows_here.n;
        if (past < 0) return row_start(here, rows_here, i + AGAIN);
        return distance == 0 && past < rows.n ? row_start(m, rows, past) : w;
    }
};

// level: 3 the first cache, 2 the second.
template <int n_bytes, int level = 2> inline void prefetch(const uint8_t *p) {
#pragma GCC unroll 16
    for (int k = 0; k < n_bytes; k += 64) __builtin_prefetch(p + k, 0, level);
}

// What is fetched while a row is worked on, piece by piece: of a list (N = 2) another row's once more.
template <int N> struct fetched {
    const uint8_t *row[N];
    static fetched beside(const row_ahead &next, int32_t i, const uint8_t *w) {
        if constexpr (N == 2) return {{next.at(i, w), next.again(i, w)}};
        return {{next.at(i, w)}};
    }
    template <int n_bytes> void piece() {
#pragma GCC unroll 2
        for (const uint8_t *&p : row) {
            prefetch<n_bytes>(p);
            p += n_bytes;
        }
    }
};

template <class V, class C> struct float_walk; // rows_batch.hpp
template <class V, class C, int acc_floats> struct block_walk;

// ---- float formats
template <class V, class C> struct float_rows {
    using walk = float_walk<V, C>;
    // Vectors per step. In 16-bit formats a step is one cache line: BF16, 512 bits, dot 98 % and axpy 103 % of the read
    // rate of a plain loop, with two lines 90 % and 98 %; in F32 four lines are better than two (93 against 89 %).
    static constexpr int L = V::lanes, n_vec = C::bytes == 4 ? 4 : 32 / L, step = n_vec * L;

    static size_t act_bytes(int32_t cols) { return (size_t)cols * sizeof(float); }
    static void act_pack(const float *x, int32_t cols, void *act) { memcpy(act, x, (size_t)cols * sizeof(float)); }

    typedef typename V::f32 sums[4];
    // sum += n columns, whole steps.
    template <int N> static void add_steps(const uint8_t *w, const float *x, int32_t n, fetched<N> next, sums &sum) {
        for (; n >= step; n -= step, w += step * C::bytes, x += step) {
            next.template piece<step * C::bytes>();
#pragma GCC unroll 4
            for (int u = 0; u < n_vec; u++) sum[u] = V::fma(C::load(w + u * L * C::bytes), V::load(x + u * L), sum[u]);
        }
    }
    // The sum of a row, with its last n columns, less than a step.
    static float finish(const uint8_t *w, const float *x, int32_t n, sums &sum) {
        int32_t j = 0;
        for (; j + L <= n; j += L, w += L * C::bytes, x += L) sum[0] = V::fma(C::load(w), V::load(x), sum[0]);
        if (j < n) sum[1] = V::fma(C::load_part(w, n - j), V::load_part(x, n - j), sum[1]);
        return V::sum(V::add(V::add(sum[0], sum[1]), V::add(sum[2], sum[3])));
    }
    template <int N> static float dot_row(const uint8_t *w, const float *x, int32_t cols, fetched<N> next) {
        const int32_t whole = cols / step * step;
        sums sum = {V::zero(), V::zero(), V::zero(), V::zero()};
        add_steps(w, x, whole, next, sum);
        return finish(w + (size_t)whole * C::bytes, x + whole, cols - whole, sum);
    }
    // Beside long rows x would come from the second cache each time (Zen 4, F16, 11008 columns: 57 % of the read rate):
    // there a few rows share a piece of it after the other, which is 82 %.
    static constexpr int32_t PIECE = 4096, LONG = 6144, TILE = 8;
    // Piece i of a tile's rows at column c, or the one that follows it; `own`: there is none.
    static const uint8_t *piece(const te_mat *m, te_rows tile, int32_t c, int32_t i, const uint8_t *own) {
        if (i >= tile.n) i -= tile.n, c += PIECE;
        return c < m->cols && i < tile.n ? row_start(m, tile, i) + (size_t)c * C::bytes : own;
    }
    static void dot_tile(const te_mat *m, te_rows tile, te_rows after, const te_mat *after_m, const float *x,
                         float *y) {
        sums sum[TILE];
        for (sums &s : sum)
            for (typename V::f32 &v : s) v = V::zero();
        for (int32_t c = 0; c < m->cols; c += PIECE) {
            const int32_t n = m->cols - c < PIECE ? m->cols - c : PIECE, whole = n / step * step;
            const bool last = n == m->cols - c;
            for (int32_t i = 0; i < tile.n; i++) {
                const uint8_t *w = row_start(m, tile, i) + (size_t)c * C::bytes, *next = piece(m, tile, c, i + 2, w);
                const int32_t then = i + 2 - tile.n;
                if (last && then >= 0 && then < after.n) next = row_start(after_m, after, then);
                add_steps(w, x + c, whole, fetched<1>{{next}}, sum[i]);
                if (last) y[i] = finish(w + (size_t)whole * C::bytes, x + c + whole, n - whole, sum[i]);
            }
        }
    }
    static void dot(const te_mat *m, te_rows rows, te_ahead ahead, const void *act, float *y) {
        const float *x = (const float *)act;
        if (m->cols > LONG) {
            for (int32_t r = 0; r < rows.n; r += TILE) {
                const int32_t end = rows.n - r < TILE ? rows.n : r + TILE;
                const te_rows tile = te_rows_part(rows, r, end), after = te_rows_part(rows, end, rows.n);
                dot_tile(m, tile, after.n || !ahead.m ? after : ahead.rows, after.n || !ahead.m ? m : ahead.m, x,
                         y + r);
            }
            return;
        }
        const row_ahead next(m, rows, ahead, (size_t)m->cols * C::bytes);
        if (next.is_list)
            dot_all<2>(m, rows, next, x, y);
        else
            dot_all<1>(m, rows, next, x, y);
    }
    template <int N>
    static void dot_all(const te_mat *m, te_rows rows, const row_ahead &next, const float *x, float *y) {
        for (int32_t i = 0; i < rows.n; i++) {
            const uint8_t *w = row_start(m, rows, i);
            y[i] = dot_row(w, x, m->cols, fetched<N>::beside(next, i, w));
        }
    }
    template <int N> static void axpy_row(const uint8_t *w, float h, int32_t cols, float *acc, fetched<N> next) {
        const typename V::f32 hv = V::splat(h);
        int32_t j = 0;
        for (; j + step <= cols; j += step, w += step * C::bytes, acc += step) {
            next.template piece<step * C::bytes>();
#pragma GCC unroll 4
            for (int u = 0; u < n_vec; u++)
                V::store(acc + u * L, V::fma(C::load(w + u * L * C::bytes), hv, V::load(acc + u * L)));
        }
        for (; j + L <= cols; j += L, w += L * C::bytes, acc += L) V::store(acc, V::fma(C::load(w), hv, V::load(acc)));
        if (j < cols) V::store(acc, V::fma(C::load_part(w, cols - j), hv, V::load(acc)));
    }
    static void axpy(const te_mat *m, te_rows rows, te_ahead ahead, const float *a, float *acc) {
        const row_ahead next(m, rows, ahead, (size_t)m->cols * C::bytes);
        if (next.is_list)
            axpy_all<2>(m, rows, next, a, acc);
        else
            axpy_all<1>(m, rows, next, a, acc);
    }
    template <int N>
    static void axpy_all(const te_mat *m, te_rows rows, const row_ahead &next, const float *a, float *acc) {
        for (int32_t i = 0; i < rows.n; i++) {
            const uint8_t *w = row_start(m, rows, i);
            axpy_row(w, a[i], m->cols, acc, fetched<N>::beside(next, i, w));
        }
    }
    static void acc_add(const float *acc, int32_t, int32_t lo, int32_t hi, float *y) {
        for (int32_t c = lo; c < hi; c++) y[c] += acc[c];
    }
    static void to_f32(const void *row, int32_t c0, int32_t n, float *out) {
        const uint8_t *p = (const uint8_t *)row + (size_t)c0 * C::bytes;
        int32_t i = 0;
        for (; i + L <= n; i += L) V::store(out + i, C::load(p + (size_t)i * C::bytes));
        if (i < n) V::store_part(out + i, C::load_part(p + (size_t)i * C::bytes, n - i), n - i);
    }
};

// ---- block formats with int8 activations

// What comes once at the end of a row, out of line: gcc takes its time for every copy of a codec.
template <class V, class C> struct row_end {
    __attribute__((noinline, flatten)) static typename V::f32 mac(const uint8_t *p, const typename C::act &a,
                                                                  typename V::f32 acc) {
        return C::mac(p, a, acc);
    }
    // Of a chunk of which the row has only n_bytes.
    static typename V::f32 mac_part(const uint8_t *p, int32_t n_bytes, const typename C::act &a, typename V::f32 acc) {
        uint8_t copy[C::bytes] = {};
        memcpy(copy, p, (size_t)n_bytes);
        return mac(copy, a, acc);
    }
    __attribute__((noinline, flatten)) static void axpy_part(const uint8_t *p, int32_t n_bytes, float h, float *y) {
        uint8_t copy[C::bytes] = {};
        const uint8_t *w = (const uint8_t *)memcpy(copy, p, (size_t)n_bytes);
        if constexpr (C::shares)
            C::template axpy_all<1, 1>(&w, &h, &y);
        else
            C::axpy(w, h, y);
    }
};

// How many rows a pass over the sums of axpy adds.
template <class C> constexpr int rows_abreast() {
    if constexpr (C::shares) return C::rows;
    return 1;
}
template <class V, class C> struct block_rows {
    using walk = block_walk<V, C, C::chunk>;
    static constexpr int32_t act_chunk = (int32_t)sizeof(typename C::act);
    static int32_t n_chunks(int32_t cols) { return (cols + C::chunk - 1) / C::chunk; }
    // Of the chunk that a row ends in.
    static int32_t tail_bytes(int32_t cols) { return cols % C::chunk / C::block * C::block_bytes; }

    static size_t act_bytes(int32_t cols) { return (size_t)n_chunks(cols) * act_chunk; }
    static void act_pack(const float *x, int32_t cols, void *act) {
        typename C::act *a = (typename C::act *)act;
        for (int32_t j = 0; j < cols; j += C::chunk, a++) {
            quantised q;
            const int units = (cols - j < C::chunk ? cols - j : C::chunk) / 32;
            if (units < C::chunk / 32) memset(&q, 0, sizeof q);
            for (int u = 0; u < units; u++) quantise32<V>(x + j + 32 * u, u, q);
            C::pack(q, *a);
        }
    }
    template <int N>
    static float dot_row(const uint8_t *w, const typename C::act *a, int32_t full, int32_t tail, fetched<N> next) {
        typename V::f32 acc0 = V::zero(), acc1 = V::zero(); // two chains hide the latency of the sums
        int32_t i = 0;
        for (; i + 2 <= full; i += 2, w += 2 * C::bytes, a += 2) {
            next.template piece<2 * C::bytes>();
            acc0 = C::mac(w, a[0], acc0);
            acc1 = C::mac(w + C::bytes, a[1], acc1);
        }
        if (i < full) {
            next.template piece<C::bytes>();
            acc0 = row_end<V, C>::mac(w, *a++, acc0);
            w += C::bytes;
        }
        if (tail) acc1 = row_end<V, C>::mac_part(w, tail, *a, acc1);
        return V::sum(V::add(acc0, acc1));
    }
    static void dot(const te_mat *m, te_rows rows, te_ahead ahead, const void *act, float *y) {
        const row_ahead next(m, rows, ahead, (size_t)(m->cols / C::block) * C::block_bytes);
        if (next.is_list)
            dot_all<2>(m, rows, next, (const typename C::act *)act, y);
        else
            dot_all<1>(m, rows, next, (const typename C::act *)act, y);
    }
    template <int N>
    static void dot_all(const te_mat *m, te_rows rows, const row_ahead &next, const typename C::act *act, float *y) {
        const int32_t full = m->cols / C::chunk, tail = tail_bytes(m->cols);
        for (int32_t i = 0; i < rows.n; i++) {
            const uint8_t *w = row_start(m, rows, i);
            y[i] = dot_row(w, act, full, tail, fetched<N>::beside(next, i, w));
        }
    }
    static constexpr int abreast = rows_abreast<C>();
    template <int R> static void chunk(const uint8_t *const *w, const float *h, float *acc) {
        if constexpr (C::shares)
            C::template axpy_all<R, 1>(w, h, &acc);
        else
            C::axpy(*w, *h, acc);
    }
    template <int R, int N>
    static void axpy_rows(const uint8_t **w, fetched<N> *next, const float *h, int32_t full, int32_t tail, float *acc) {
        for (int32_t i = 0; i < full; i++, acc += C::chunk) {
            TE_EACH_ROW(R) next[r].template piece<C::bytes>();
            chunk<R>(w, h, acc);
            TE_EACH_ROW(R) w[r] += C::bytes;
        }
        if (!tail) return;
        for (int r = 0; r < R; r++) row_end<V, C>::axpy_part(w[r], tail, h[r], acc);
    }
    static void axpy(const te_mat *m, te_rows rows, te_ahead ahead, const float *a, float *acc) {
        const row_ahead next(m, rows, ahead, (size_t)(m->cols / C::block) * C::block_bytes);
        if (next.is_list)
            axpy_all<2>(m, rows, next, a, acc);
        else
            axpy_all<1>(m, rows, next, a, acc);
    }
    // Of a stream of rows, those that a pass adds fetch those of a later pass.
    template <int N>
    static void axpy_all(const te_mat *m, te_rows rows, const row_ahead &next, const float *a, float *acc) {
        const int32_t full = m->cols / C::chunk, tail = tail_bytes(m->cols);
        const size_t pass = (size_t)abreast * m->stride;
        const size_t on = next.is_stream ? (row_ahead::BYTES + pass - 1) / pass * pass : 0;
        for (int32_t i = 0; i < rows.n;) {
            const uint8_t *w[abreast];
            fetched<N> ahead_of[abreast];
            const int32_t n = rows.n - i < abreast ? 1 : abreast;
            for (int32_t r = 0; r < n; r++) {
                w[r] = row_start(m, rows, i + r);
                ahead_of[r] = fetched<N>::beside(next, i + r, w[r]);
                if (on) ahead_of[r].row[0] = w[r] + on;
            }
            if (n == abreast)
                axpy_rows<abreast>(w, ahead_of, a + i, full, tail, acc);
            else
                axpy_rows<1>(w, ahead_of, a + i, full, tail, acc);
            i += n;
        }
    }
    static void acc_add(const float *acc, int32_t, int32_t lo, int32_t hi, float *y) {
        if constexpr (C::stride == 1) {
            for (int32_t c = lo; c < hi; c++) y[c] += acc[c];
        } else {
            for (int32_t c = lo; c < hi; c += 16)
                V::add_transposed(y + c, acc + c / C::chunk * C::chunk + C::place(c % C::chunk), C::stride);
        }
    }
    static void to_f32(const void *row, int32_t c0, int32_t n, float *out) {
        const uint8_t *p = (const uint8_t *)row + (size_t)c0 / C::block * C::block_bytes;
        for (int32_t i = 0; i < n; i += C::block, p += C::block_bytes) C::to_f32(p, out + i);
    }
};

// ---- every other format: pieces of a row go through te_dequantize_row
template <class V> struct any_rows {
    using floats = float_rows<V, codec_f32<V>>;
    static constexpr int32_t piece = 512; // whole blocks

    static int32_t length(int32_t cols, int32_t c) { return cols - c < piece ? cols - c : piece; }
    // Columns c..c+n-1 of row i of the list.
    static void load(const te_mat *m, te_rows rows, int32_t i, int32_t c, int32_t n, float *w) {
        te_dequantize_row(m->type, row_start(m, rows, i) + te_row_bytes(m->type, c), w, n);
    }

    static void dot(const te_mat *m, te_rows rows, te_ahead, const void *act, float *y) {
        alignas(64) float w[piece];
        for (int32_t i = 0; i < rows.n; i++) {
            float sum = 0;
            for (int32_t c = 0; c < m->cols; c += piece) {
                const int32_t n = length(m->cols, c);
                load(m, rows, i, c, n, w);
                sum += floats::dot_row((const uint8_t *)w, (const float *)act + c, n, fetched<1>{{(const uint8_t *)w}});
            }
            y[i] = sum;
        }
    }
    static void axpy(const te_mat *m, te_rows rows, te_ahead, const float *a, float *acc) {
        alignas(64) float w[piece];
        for (int32_t i = 0; i < rows.n; i++) {
            for (int32_t c = 0; c < m->cols; c += piece) {
                const int32_t n = length(m->cols, c);
                load(m, rows, i, c, n, w);
                floats::axpy_row((const uint8_t *)w, a[i], n, acc + c, fetched<1>{{(const uint8_t *)w}});
            }
        }
    }
};
template <int type> void any_to_f32(const void *row, int32_t c0, int32_t n, float *out) {
    te_dequantize_row(type, (const uint8_t *)row + te_row_bytes(type, c0), out, n);
}

// ---- floats to rows, for the KV cache; the bits are those of te_quantize_row
template <class V> struct writers {
    static constexpr int L = V::lanes;
    static void f32(const float *x, void *row, int32_t n) { memcpy(row, x, (size_t)n * sizeof(float)); }
    static void f16(const float *x, void *row, int32_t n) {
        uint8_t *p = (uint8_t *)row;
        int32_t i = 0;
        for (; i + L <= n; i += L) V::store_f16(p + 2 * (size_t)i, V::load(x + i));
        if (i < n) V::store_f16_part(p + 2 * (size_t)i, V::load_part(x + i, n - i), n - i);
    }
    static void bf16(const float *x, void *row, int32_t n) {
        for (int32_t i = 0; i < n; i++) {
            const uint16_t h = te_f32_to_bf16(x[i]);
            memcpy((uint8_t *)row + 2 * (size_t)i, &h, 2);
        }
    }
    static void q8_0(const float *x, void *row, int32_t n) {
        te_block_q8_0 *p = (te_block_q8_0 *)row;
        for (int32_t b = 0; b < n; b += 32, x += 32, p++) {
            typename V::f32 most = V::zero();
            for (int i = 0; i < 32; i += L) most = V::max(most, V::abs(V::load(x + i)));
            const float d = V::hmax(most) / 127.0f;
            const uint16_t h = te_f32_to_f16(d);
            memcpy(p->d, &h, 2);
            const typename V::f32 scale = V::splat(d != 0.0f ? 1.0f / d : 0.0f);
            for (int i = 0; i < 32; i += L) {
                // To the nearest, ties away from zero: a tie that went down to even is half above the result.
                const typename V::f32 v = V::mul(V::load(x + i), scale), size = V::abs(v), even = V::round(size);
                const typename V::f32 q =
                    V::if_less(size, V::add(even, V::splat(0.5f)), even, V::add(even, V::splat(1.0f)));
                const typename V::f32 bounded =
                    V::max(V::if_less(v, V::zero(), V::sub(V::zero(), q), q), V::splat(-127.0f));
                V::store_s8(p->q + i, V::min(bounded, V::splat(127.0f)));
            }
        }
    }
};
} // namespace

#endif
