// rows_k.hpp - rows of the formats of 256 weights: whole blocks, a few of them to a row.
//
// Such rows are short, and those of a mapped file lie in small pages, at whose ends the hardware stops to look ahead. So
// lines are fetched twice: far ahead from memory, and shortly before their use from L2. Two threads, Q4_K, dot, on an Intel
// machine: from a mapped file 85 % of its read rate instead of 78, from huge pages 88 % instead of 90; over a tenth of the
// rows 5 to 25 % more from either. How near does not matter much (768 to 1280 bytes).
//
// Where a format has minima, w = s * q - m, axpy sums s * q in place of the columns, and the minima, which whole units
// share, beside them: a subtraction less for every vector of weights. A block then has 256 + 16 sums; those of minima are
// the last C::n_minima.
#ifndef TE_ROWS_K_HPP
#define TE_ROWS_K_HPP

namespace {

template <class V, class C> struct k_rows : block_rows<V, C> {
    static constexpr int32_t n_minima = C::n_minima, sums = n_minima ? 272 : 256;
    using walk = block_walk<V, C, sums>;
    static constexpr size_t near = 1280, far = row_ahead::BYTES, step = 2 * C::bytes;
    static_assert(C::chunk == 256, "rows are whole chunks");

    // Rows that follow row i: `soon` is the one that is worked on next, `later` one that is far ahead (or, as row_ahead
    // says, one of those that the caller names).
    struct following {
        row_ahead ahead;
        const te_mat *m;
        te_rows rows;
        size_t row_bytes;
        following(const te_mat *own, te_rows own_rows, const te_ahead &named, int32_t abreast)
            : ahead(own, own_rows, named, 0), m(own), rows(own_rows),
              row_bytes((size_t)(own->cols / C::chunk) * C::bytes) {
            const int32_t distance = 1 + (int32_t)((far - 1) / row_bytes);
            ahead.distance = named.m ? 0 : distance < abreast ? abreast : distance;
        }
        const uint8_t *later(int32_t i, const uint8_t *own) const { return ahead.at(i, own); }
        const uint8_t *soon(int32_t i, int32_t by, const uint8_t *own) const {
            return i + by < rows.n ? row_start(m, rows, i + by) : ahead.distance == 0 ? ahead.at(0, own) : own;
        }
    };
    // One of the rows that are worked on.
    struct walk_of {
        const uint8_t *w, *later, *soon;
        // Fetches what follows the n_bytes at `at`, `near` bytes on.
        template <int n_bytes> void fetch(size_t at, size_t near_bytes, size_t row_bytes) const {
            const size_t on = at + near_bytes;
            const uint8_t *p = on < row_bytes ? w + on : soon + (on - row_bytes);
            prefetch<n_bytes>(later + at);
#pragma GCC unroll 16
            for (int k = 0; k < n_bytes; k += 64) __builtin_prefetch(p + k, 0, 3);
        }
    };
    static walk_of walk_from(const following &next, int32_t r, int32_t abreast) {
        const uint8_t *w = row_start(next.m, next.rows, r);
        return {w, next.later(r, w), next.soon(r, abreast, w)};
    }

    static void dot(const te_mat *m, te_rows rows, te_ahead named, const void *act, float *y) {
        const following next(m, rows, named, 1);
        const typename C::act *a = (const typename C::act *)act;
        const int32_t n = m->cols / C::chunk;
        for (int32_t r = 0; r < rows.n; r++) {
            const walk_of row = walk_from(next, r, 1);
            typename V::f32 acc0 = V::zero(), acc1 = V::zero(); // two chains hide the latency of the sums
            size_t at = 0;
            for (int32_t i = 0; i < n; i += 2, at += step) {
                row.template fetch<(int)step>(at, near, next.row_bytes);
                acc0 = C::mac(row.w + at, a[i], acc0);
                if (i + 1 < n) acc1 = C::mac(row.w + at + C::bytes, a[i + 1], acc1);
            }
            y[r] = V::sum(V::add(acc0, acc1));
        }
    }
    using base = block_rows<V, C>;
    template <int R> static void axpy_rows(const following &next, int32_t r0, int32_t n, const float *h, float *acc) {
        walk_of row[R];
        TE_EACH_ROW(R) row[r] = walk_from(next, r0 + r, R);
        size_t at = 0;
        for (int32_t i = 0; i < n; i++, at += C::bytes, acc += sums) {
            const uint8_t *w[R];
            TE_EACH_ROW(R) {
                row[r].template fetch<C::bytes>(at, near / R, next.row_bytes);
                w[r] = row[r].w + at;
            }
            base::template chunk<R>(w, h, acc);
        }
    }
    static void axpy(const te_mat *m, te_rows rows, te_ahead named, const float *a, float *acc) {
        constexpr int abreast = base::abreast;
        const following next(m, rows, named, abreast);
        const int32_t n = m->cols / C::chunk;
        int32_t r = 0;
        for (; r + abreast <= rows.n; r += abreast) axpy_rows<abreast>(next, r, n, a + r, acc);
        for (; r < rows.n; r++) axpy_rows<1>(next, r, n, a + r, acc);
    }
    static void acc_add(const float *acc, int32_t, int32_t lo, int32_t hi, float *y) {
        for (int32_t c = lo; c < hi; c += 16) {
            const int32_t in = c % C::chunk;
            const float *block = acc + c / C::chunk * sums;
            float sum[16] = {}; // y may be large beside the difference
            V::add_transposed(sum, block + C::place(in), C::stride);
            float minimum = 0;
            if constexpr (n_minima > 0) minimum = block[sums - n_minima + in / (C::chunk / n_minima)];
            for (int i = 0; i < 16; i++) y[c + i] += sum[i] - minimum;
        }
    }
};
} // namespace

#endif
