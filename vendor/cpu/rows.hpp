// rows.hpp - the row kernels: dot, axpy and conversion of rows. One body serves every format and every instruction set;
// dense and sparse differ only in where the next row's number comes from.
//
// Rows are walked one at a time while the next one (or the one that the caller names) is prefetched in address order: a
// stream that the hardware follows. Several rows abreast are many short streams: with eight a dot product reads at half
// the rate, and axpy, which then loads and stores its sums less often, at 0.85 of it in F16 (one row: 1.0).
namespace {

inline const uint8_t *row_start(const te_mat *m, te_rows rows, int32_t i) {
    return (const uint8_t *)m->w + m->stride * (size_t)te_row_at(rows, i);
}

// What to prefetch while row i is worked on: row i of `ahead`; without one, where rows follow each other in memory, so
// many bytes further on, also past the last row, since there the member's next part begins; else the next row, if that
// is 2 KiB on, else one so far on, at the end of the list row i itself, which costs next to nothing. Measured for so
// many bytes: 3 KiB, Q8_0 with 4096 and 11008 columns 96 and 101 % of the read rate, 8 KiB 90 and 91 %.
struct row_ahead {
    enum { BYTES = 3072 };
    const te_mat *m;
    te_rows rows;
    int32_t distance;
    bool is_stream;
    row_ahead(const te_mat *own, te_rows own_rows, const te_ahead &ahead, size_t row_bytes)
        : m(ahead.m ? ahead.m : own), rows(ahead.m ? ahead.rows : own_rows),
          distance(ahead.m ? 0 : 1 + (int32_t)(2047 / (row_bytes + 1))),
          is_stream(!ahead.m && !own_rows.row && own->stride == row_bytes) {}
    const uint8_t *at(int32_t i, const uint8_t *own) const {
        if (is_stream) return own + BYTES;
        return i + distance < rows.n ? row_start(m, rows, i + distance) : own;
    }
};

template <int n_bytes> inline void prefetch(const uint8_t *p) {
#pragma GCC unroll 16
    for (int k = 0; k < n_bytes; k += 64) __builtin_prefetch(p + k, 0, 2);
}

template <class V, class C> struct float_walk; // rows_few.hpp
template <class V, class C, int acc_floats> struct block_walk;

// ---- float formats
template <class V, class C> struct float_rows {
    using walk = float_walk<V, C>;
    // Vectors per step. In 16-bit formats a step is one cache line: BF16, 512 bits, dot 98 % and axpy 103 % of the read
    // rate of a plain loop, with two lines 90 % and 98 %; in F32 four lines are better than two (93 against 89 %).
    static constexpr int L = V::lanes, n_vec = C::bytes == 4 ? 4 : 32 / L, step = n_vec * L;

    static size_t act_bytes(int32_t cols) { return (size_t)cols * sizeof(float); }
    static void act_pack(const float *x, int32_t cols, void *act) { memcpy(act, x, (size_t)cols * sizeof(float)); }

    static float dot_row(const uint8_t *w, const float *x, int32_t cols, const uint8_t *next) {
        typename V::f32 acc[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
        int32_t j = 0;
        for (; j + step <= cols; j += step, w += step * C::bytes, next += step * C::bytes, x += step) {
            prefetch<step * C::bytes>(next);
#pragma GCC unroll 4
            for (int u = 0; u < n_vec; u++) acc[u] = V::fma(C::load(w + u * L * C::bytes), V::load(x + u * L), acc[u]);
        }
        for (; j + L <= cols; j += L, w += L * C::bytes, x += L) acc[0] = V::fma(C::load(w), V::load(x), acc[0]);
        if (j < cols) acc[1] = V::fma(C::load_part(w, cols - j), V::load_part(x, cols - j), acc[1]);
        return V::sum(V::add(V::add(acc[0], acc[1]), V::add(acc[2], acc[3])));
    }
    static void dot(const te_mat *m, te_rows rows, te_ahead ahead, const void *act, float *y) {
        const row_ahead next(m, rows, ahead, (size_t)m->cols * C::bytes);
        for (int32_t i = 0; i < rows.n; i++) {
            const uint8_t *w = row_start(m, rows, i);
            y[i] = dot_row(w, (const float *)act, m->cols, next.at(i, w));
        }
    }
    static void axpy_row(const uint8_t *w, float h, int32_t cols, float *acc, const uint8_t *next) {
        const typename V::f32 hv = V::splat(h);
        int32_t j = 0;
        for (; j + step <= cols; j += step, w += step * C::bytes, next += step * C::bytes, acc += step) {
            prefetch<step * C::bytes>(next);
#pragma GCC unroll 4
            for (int u = 0; u < n_vec; u++)
                V::store(acc + u * L, V::fma(C::load(w + u * L * C::bytes), hv, V::load(acc + u * L)));
        }
        for (; j + L <= cols; j += L, w += L * C::bytes, acc += L) V::store(acc, V::fma(C::load(w), hv, V::load(acc)));
        if (j < cols) V::store(acc, V::fma(C::load_part(w, cols - j), hv, V::load(acc)));
    }
    static void axpy(const te_mat *m, te_rows rows, te_ahead ahead, const float *a, float *acc) {
        const row_ahead next(m, rows, ahead, (size_t)m->cols * C::bytes);
        for (int32_t i = 0; i < rows.n; i++) {
            const uint8_t *w = row_start(m, rows, i);
            axpy_row(w, a[i], m->cols, acc, next.at(i, w));
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
    static float dot_row(const uint8_t *w, const typename C::act *a, int32_t full, int32_t tail, const uint8_t *next) {
        typename V::f32 acc0 = V::zero(), acc1 = V::zero(); // two chains hide the latency of the sums
        int32_t i = 0;
        for (; i + 2 <= full; i += 2, w += 2 * C::bytes, next += 2 * C::bytes, a += 2) {
            prefetch<2 * C::bytes>(next);
            acc0 = C::mac(w, a[0], acc0);
            acc1 = C::mac(w + C::bytes, a[1], acc1);
        }
        if (i < full) {
            prefetch<C::bytes>(next);
            acc0 = C::mac(w, *a++, acc0);
            w += C::bytes;
        }
        if (tail) {
            uint8_t copy[C::bytes] = {};
            memcpy(copy, w, (size_t)tail);
            acc1 = C::mac(copy, *a, acc1);
        }
        return V::sum(V::add(acc0, acc1));
    }
    static void dot(const te_mat *m, te_rows rows, te_ahead ahead, const void *act, float *y) {
        const int32_t full = m->cols / C::chunk, tail = tail_bytes(m->cols);
        const row_ahead next(m, rows, ahead, (size_t)(m->cols / C::block) * C::block_bytes);
        for (int32_t i = 0; i < rows.n; i++) {
            const uint8_t *w = row_start(m, rows, i);
            y[i] = dot_row(w, (const typename C::act *)act, full, tail, next.at(i, w));
        }
    }
    static void axpy_row(const uint8_t *w, float h, int32_t full, int32_t tail, float *acc, const uint8_t *next) {
        int32_t i = 0;
        for (; i + 2 <= full; i += 2, w += 2 * C::bytes, next += 2 * C::bytes, acc += 2 * C::chunk) {
            prefetch<2 * C::bytes>(next);
            C::axpy(w, h, acc);
            C::axpy(w + C::bytes, h, acc + C::chunk);
        }
        if (i < full) {
            prefetch<C::bytes>(next);
            C::axpy(w, h, acc);
            w += C::bytes;
            acc += C::chunk;
        }
        if (tail) {
            uint8_t copy[C::bytes] = {};
            memcpy(copy, w, (size_t)tail);
            C::axpy(copy, h, acc);
        }
    }
    static void axpy(const te_mat *m, te_rows rows, te_ahead ahead, const float *a, float *acc) {
        const int32_t full = m->cols / C::chunk, tail = tail_bytes(m->cols);
        const row_ahead next(m, rows, ahead, (size_t)(m->cols / C::block) * C::block_bytes);
        for (int32_t i = 0; i < rows.n; i++) {
            const uint8_t *w = row_start(m, rows, i);
            axpy_row(w, a[i], full, tail, acc, next.at(i, w));
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
template <class V, int type, int block, int block_bytes> struct any_rows {
    using floats = float_rows<V, codec_f32<V>>;
    static constexpr int32_t piece = 512;
    static_assert(piece % block == 0, "whole blocks");

    static const uint8_t *at(const uint8_t *row, int32_t c) { return row + (size_t)(c / block) * block_bytes; }
    static int32_t length(int32_t cols, int32_t c) { return cols - c < piece ? cols - c : piece; }

    static void dot(const te_mat *m, te_rows rows, te_ahead, const void *act, float *y) {
        alignas(64) float w[piece];
        for (int32_t i = 0; i < rows.n; i++) {
            float sum = 0;
            for (int32_t c = 0; c < m->cols; c += piece) {
                const int32_t n = length(m->cols, c);
                te_dequantize_row(type, at(row_start(m, rows, i), c), w, n);
                sum += floats::dot_row((const uint8_t *)w, (const float *)act + c, n, (const uint8_t *)w);
            }
            y[i] = sum;
        }
    }
    static void axpy(const te_mat *m, te_rows rows, te_ahead, const float *a, float *acc) {
        alignas(64) float w[piece];
        for (int32_t i = 0; i < rows.n; i++) {
            for (int32_t c = 0; c < m->cols; c += piece) {
                const int32_t n = length(m->cols, c);
                te_dequantize_row(type, at(row_start(m, rows, i), c), w, n);
                floats::axpy_row((const uint8_t *)w, a[i], n, acc + c, (const uint8_t *)w);
            }
        }
    }
    static void to_f32(const void *row, int32_t c0, int32_t n, float *out) {
        te_dequantize_row(type, at((const uint8_t *)row, c0), out, n);
    }
};

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
        uint8_t *p = (uint8_t *)row;
        for (int32_t b = 0; b < n; b += 32, x += 32, p += 34) {
            typename V::f32 most = V::zero();
            for (int i = 0; i < 32; i += L) most = V::max(most, V::abs(V::load(x + i)));
            const float d = V::hmax(most) / 127.0f;
            const uint16_t h = te_f32_to_f16(d);
            memcpy(p, &h, 2);
            const typename V::f32 scale = V::splat(d != 0.0f ? 1.0f / d : 0.0f);
            for (int i = 0; i < 32; i += L) {
                // To the nearest, ties away from zero: a tie that went down to even is half above the result.
                const typename V::f32 v = V::mul(V::load(x + i), scale), size = V::abs(v), even = V::round(size);
                const typename V::f32 q =
                    V::if_less(size, V::add(even, V::splat(0.5f)), even, V::add(even, V::splat(1.0f)));
                const typename V::f32 bounded =
                    V::max(V::if_less(v, V::zero(), V::sub(V::zero(), q), q), V::splat(-127.0f));
                V::store_s8(p + 2 + i, V::min(bounded, V::splat(127.0f)));
            }
        }
    }
};
} // namespace
