// rows_k.hpp - rows of the formats of 256 weights: whole blocks, a few of them to a row.
//
// Such rows are short, and those of a mapped file lie in small pages, at whose ends the hardware stops to look ahead. So
// lines are fetched twice: far ahead from memory, and shortly before their use from L2. Two threads, Q4_K, dot: from a
// mapped file 85 % of its read rate instead of 78, from huge pages 88 % instead of 90; over a tenth of the rows 5 to 25 %
// more from either. How near does not matter much (768 to 1280 bytes).
//
// Where a format has minima, w = s * q - m, axpy sums s * q in place of the columns, and the minima, which whole units
// share, beside them: a subtraction less for every vector of weights. A block then has 256 + 16 sums; those of minima are
// the last C::n_minima.
namespace {

template <class V, class C> struct k_rows : block_rows<V, C> {
    static constexpr int32_t n_minima = C::n_minima, sums = n_minima ? 272 : 256;
    using walk = block_walk<V, C, sums>;
    static constexpr size_t near = 1280, far = 4608, step = 2 * C::bytes;
    static_assert(C::chunk == 256, "rows are whole chunks");

    // Rows that follow row i: `soon` is the next one, `later` one that is far ahead (or, as row_ahead says, one of those
    // that the caller names).
    struct following {
        row_ahead ahead;
        const te_mat *m;
        te_rows rows;
        size_t row_bytes;
        following(const te_mat *own, te_rows own_rows, const te_ahead &named)
            : ahead(own, own_rows, named, 0), m(own), rows(own_rows),
              row_bytes((size_t)(own->cols / C::chunk) * C::bytes) {
            ahead.distance = named.m ? 0 : 1 + (int32_t)((far - 1) / row_bytes);
        }
        const uint8_t *later(int32_t i, const uint8_t *own) const { return ahead.at(i, own); }
        const uint8_t *soon(int32_t i, const uint8_t *own) const {
            return i + 1 < rows.n ? row_start(m, rows, i + 1) : ahead.distance == 0 ? ahead.at(0, own) : own;
        }
    };

    // Runs part(at, i) for the blocks of a row, i even, and fetches meanwhile; part takes blocks i and, if two, i + 1.
    template <class Part> static void row(const following &next, int32_t r, int32_t n, const Part &part) {
        const uint8_t *w = row_start(next.m, next.rows, r), *later = next.later(r, w), *soon = next.soon(r, w);
        size_t at = 0;
        for (int32_t i = 0; i < n; i += 2, at += step) {
            const uint8_t *p = at + near < next.row_bytes ? w + at + near : soon + (at + near - next.row_bytes);
            prefetch<step>(later + at);
#pragma GCC unroll 16
            for (size_t k = 0; k < step; k += 64) __builtin_prefetch(p + k, 0, 3);
            part(w + at, i, i + 1 < n);
        }
    }
    static void dot(const te_mat *m, te_rows rows, te_ahead named, const void *act, float *y) {
        const following next(m, rows, named);
        const typename C::act *a = (const typename C::act *)act;
        for (int32_t r = 0; r < rows.n; r++) {
            typename V::f32 acc0 = V::zero(), acc1 = V::zero(); // two chains hide the latency of the sums
            row(next, r, m->cols / C::chunk, [&](const uint8_t *w, int32_t i, bool two) {
                acc0 = C::mac(w, a[i], acc0);
                if (two) acc1 = C::mac(w + C::bytes, a[i + 1], acc1);
            });
            y[r] = V::sum(V::add(acc0, acc1));
        }
    }
    static void axpy(const te_mat *m, te_rows rows, te_ahead named, const float *a, float *acc) {
        const following next(m, rows, named);
        for (int32_t r = 0; r < rows.n; r++) {
            const float h = a[r];
            row(next, r, m->cols / C::chunk, [=](const uint8_t *w, int32_t i, bool two) {
                C::axpy(w, h, acc + i * sums);
                if (two) C::axpy(w + C::bytes, h, acc + (i + 1) * sums);
            });
        }
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
