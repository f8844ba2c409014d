// rows_batch.hpp - the row kernels for a few tokens at once: each row is read and unpacked once. A token's sums have the
// terms and the order that dot and axpy of rows.hpp give them, whatever the other tokens are, so the bits are the same.
//
// The vectors of eight tokens are too large for the first cache. So tiles of rows are walked a piece of columns at a
// time, and a dot product's sums wait in memory between the pieces. Few tokens of block formats take longer pieces.
//
// AVX2 has registers for the sums of three rows of floats by four tokens, a vector of each at a time, which share the loads
// of activations: Zen 5, F16, eight tokens 73 instead of 62 GFLOP/s.
//
// Rows that are wanted by the same tokens are added to their sums a few at a time, so that these are read and written once
// for all. One thread of a Zen 5, eight tokens, billions of products a second, one row and so: AVX2, two rows, Q4_0 35 and
// 51, Q4_K 32 and 40, F16 32 and 51; AVX-512, four rows, Q4_0 38 and 75, Q4_K 37 and 60, F16 (two) 39 and 54.
#ifndef TE_ROWS_BATCH_HPP
#define TE_ROWS_BATCH_HPP

namespace {

// What both kernels share: up to eight tokens at a time, in groups of V::abreast, or a power of two below; tiles of rows.
template <class V> struct batch_rows {
    static constexpr int L = V::lanes;
    static constexpr int32_t PASS = 8, TILE = 16;

    static uint32_t all(int32_t n) { return n >= PASS ? (1u << PASS) - 1 : (1u << n) - 1; }
    // Rows of a tile: more share the pieces of the tokens' vectors, but they have to stay in the second cache.
    static int32_t tile(size_t row_bytes) {
        const size_t n = (64u << 10) / (row_bytes + 1);
        return n < 4 ? 4 : n > TILE ? TILE : (int32_t)n;
    }
    // Where the rows that follow a tile of n are: in the list, or those that the caller names, or, where rows follow each
    // other in the matrix, what is next there, since the member's next part begins with it.
    struct following {
        const te_mat *m;
        te_rows rows;
        te_ahead ahead;
        size_t row_bytes;
        const uint8_t *of(int32_t i, int32_t n, const uint8_t *own) const {
            const int32_t next = i + n;
            if (next < rows.n) return row_start(m, rows, next);
            if (ahead.m) return next - rows.n < ahead.rows.n ? row_start(ahead.m, ahead.rows, next - rows.n) : own;
            return !rows.row && rows.first + next < m->n_rows ? row_start(m, rows, next) : own;
        }
    };
    // The tokens from t0 on that want the row at place i of the list.
    static uint32_t wanted(te_tokens who, int32_t i, int32_t t0) {
        return (who.bits ? who.bits[i] >> t0 : ~0u) & all(who.n - t0);
    }
    // Rows i ... i + n - 1 of a tile, which are wanted by the same of these tokens.
    struct run {
        int32_t i, n;
        uint32_t tokens;
    };
    // The rows from place r0 on that are wanted at all, `most` at a time where these are wanted by the same tokens, else one;
    // returns how many runs.
    static int32_t runs(te_tokens who, int32_t r0, int32_t n_rows, int32_t t0, int32_t most, run *out) {
        int32_t n_runs = 0;
        for (int32_t i = 0, n; i < n_rows; i += n) {
            const uint32_t tokens = wanted(who, r0 + i, t0);
            n = i + most <= n_rows ? most : 1;
            for (int32_t r = 1; r < n; r++)
                if (wanted(who, r0 + i + r, t0) != tokens) n = 1;
            if (tokens) out[n_runs++] = {i, n, tokens};
        }
        return n_runs;
    }
    // The lowest `most` of the tokens in *left, or a half, a quarter ... as many; returns how many.
    static int take(uint32_t *left, int most, int *token) {
        int n = most;
        for (const int n_left = __builtin_popcount(*left); n > n_left;) n /= 2;
        for (int i = 0; i < n; i++, *left &= *left - 1) token[i] = __builtin_ctz(*left);
        return n;
    }
};

// F: how a row is walked.
//     sums                    vectors that a token's sum consists of
//     rows                    of a dot product that are walked side by side, where they are wanted by the same tokens
//     columns(n_tok), sum_columns    of a piece, for dot and for axpy
//     dot<T, R>(w, act, at, n, last, sum, next)   adds n columns from column `at` on to the sums of R rows by T tokens
//     axpy<T, R>(w, h, at, n, acc, next)       the same, to the columns of T sums of rows; h[r * T + t]
//     most_axpy, axpy_rows    the most tokens at a time there, and rows side by side
template <class V, class F> struct batch {
    using G = batch_rows<V>;
    static constexpr int L = V::lanes;
    static constexpr int32_t PASS = G::PASS;

    // What a token's dot product has come to, between two pieces.
    struct state {
        alignas(64) float v[F::sums * L];
    };
    template <int T, int R>
    __attribute__((flatten)) static void dot_of(const uint8_t *const *w, const char *act, size_t stride,
                                                const int *token, int32_t at, int32_t n, bool last, state *of_row,
                                                const uint8_t *const *next, float *y, size_t ldy) {
        typename V::f32 sum[R * T][F::sums];
        const char *x[T];
        TE_EACH(T) x[t] = act + stride * (size_t)token[t];
        TE_EACH_ROW(R) TE_EACH(T) {
            const state *so_far = of_row + r * PASS + token[t];
            for (int i = 0; i < F::sums; i++) sum[r * T + t][i] = at ? V::load(so_far->v + i * L) : V::zero();
        }
        F::template dot<T, R>(w, x, at, n, last, sum, next);
        TE_EACH_ROW(R) TE_EACH(T) {
            if (last)
                y[ldy * (size_t)token[t] + r] = F::total(sum[r * T + t]);
            else
                for (int i = 0; i < F::sums; i++) V::store(of_row[r * PASS + token[t]].v + i * L, sum[r * T + t][i]);
        }
    }
    // The tokens of `left`, some at a time.
    template <int R>
    __attribute__((always_inline)) static void
    dot_rows(uint32_t left, const uint8_t *const *w, const uint8_t *const *next, const char *act, size_t stride,
             int32_t at, int32_t n, bool last, state *of_row, float *y, size_t ldy) {
        for (; left; next = w) {
            int token[PASS];
            switch (G::take(&left, F::most, token)) {
            case 8:
                if constexpr (F::most == 8) dot_of<8, R>(w, act, stride, token, at, n, last, of_row, next, y, ldy);
                break;
            case 4:
                dot_of<4, R>(w, act, stride, token, at, n, last, of_row, next, y, ldy);
                break;
            case 2:
                dot_of<2, R>(w, act, stride, token, at, n, last, of_row, next, y, ldy);
                break;
            default:
                dot_of<1, R>(w, act, stride, token, at, n, last, of_row, next, y, ldy);
                break;
            }
        }
    }

    static void dot(const te_mat *m, te_rows rows, te_ahead ahead, te_tokens who, const void *act, size_t stride,
                    float *y, size_t ldy) {
        const size_t row_bytes = F::bytes(m->cols);
        const int32_t tile = G::tile(row_bytes);
        const typename G::following next = {m, rows, ahead, row_bytes};
        const int32_t columns = F::columns(who.n);
        state sums[G::TILE * PASS];
        for (int32_t r0 = 0; r0 < rows.n; r0 += tile) {
            const int32_t n_rows = rows.n - r0 < tile ? rows.n - r0 : tile;
            for (int32_t t0 = 0; t0 < who.n; t0 += PASS) {
                const char *x = (const char *)act + stride * (size_t)t0;
                typename G::run runs[G::TILE];
                const int32_t n_runs = G::runs(who, r0, n_rows, t0, F::rows, runs);
                for (int32_t c = 0; c < m->cols; c += columns) {
                    const bool last = m->cols - c <= columns;
                    const int32_t n = last ? m->cols - c : columns;
                    const size_t at = F::bytes(c);
                    for (int32_t j = 0; j < n_runs; j++) {
                        const int32_t i = runs[j].i, abreast = runs[j].n;
                        const uint8_t *w[F::rows], *soon[F::rows];
                        for (int32_t r = 0; r < abreast; r++) {
                            w[r] = row_start(m, rows, r0 + i + r) + at;
                            soon[r] = t0 == 0 ? next.of(r0 + i + r, tile, w[r] - at) + at : w[r];
                        }
                        float *out = y + ldy * (size_t)t0 + r0 + i;
                        if (F::rows > 1 && abreast == F::rows)
                            dot_rows<F::rows>(runs[j].tokens, w, soon, x, stride, c, n, last, sums + i * PASS, out,
                                              ldy);
                        else
                            dot_rows<1>(runs[j].tokens, w, soon, x, stride, c, n, last, sums + i * PASS, out, ldy);
                    }
                }
            }
        }
    }

    template <int T, int R>
    __attribute__((flatten)) static void axpy_of(const uint8_t *const *w, const float *a, size_t lda, const int *token,
                                                 int32_t at, int32_t n, float *acc, size_t stride,
                                                 const uint8_t *const *next) {
        float h[R * T], *y[T];
        TE_EACH(T) {
            TE_EACH_ROW(R) h[r * T + t] = a[lda * (size_t)token[t] + r];
            y[t] = acc + stride * (size_t)token[t];
        }
        F::template axpy<T, R>(w, h, at, n, y, next);
    }
    // The tokens of `left`, some at a time.
    template <int R>
    __attribute__((always_inline)) static void axpy_rows(uint32_t left, const uint8_t *const *w,
                                                         const uint8_t *const *next, const float *a, size_t lda,
                                                         int32_t at, int32_t n, float *acc, size_t stride) {
        for (; left; next = w) {
            int token[PASS];
            switch (G::take(&left, F::most_axpy, token)) {
            case 4:
                if constexpr (F::most_axpy == 4) axpy_of<4, R>(w, a, lda, token, at, n, acc, stride, next);
                break;
            case 2:
                if constexpr (F::most_axpy == 4) axpy_of<2, R>(w, a, lda, token, at, n, acc, stride, next);
                break;
            default:
                axpy_of<1, R>(w, a, lda, token, at, n, acc, stride, next);
                break;
            }
        }
    }

    static void axpy(const te_mat *m, te_rows rows, te_ahead ahead, te_tokens who, const float *a, size_t lda,
                     float *acc, size_t stride) {
        const size_t row_bytes = F::bytes(m->cols);
        const int32_t tile = G::tile(row_bytes);
        const typename G::following next = {m, rows, ahead, row_bytes};
        for (int32_t r0 = 0; r0 < rows.n; r0 += tile) {
            const int32_t n_rows = rows.n - r0 < tile ? rows.n - r0 : tile;
            for (int32_t t0 = 0; t0 < who.n; t0 += PASS) {
                float *y = acc + stride * (size_t)t0;
                typename G::run runs[G::TILE];
                const int32_t n_runs = G::runs(who, r0, n_rows, t0, F::axpy_rows, runs);
                for (int32_t c = 0; c < m->cols; c += F::sum_columns) {
                    const int32_t n = m->cols - c < F::sum_columns ? m->cols - c : F::sum_columns;
                    const size_t at = F::bytes(c);
                    for (int32_t j = 0; j < n_runs; j++) {
                        const int32_t i = runs[j].i, abreast = runs[j].n;
                        const uint8_t *w[F::axpy_rows], *soon[F::axpy_rows];
                        for (int32_t r = 0; r < abreast; r++) {
                            w[r] = row_start(m, rows, r0 + i + r) + at;
                            soon[r] = t0 == 0 ? next.of(r0 + i + r, tile, w[r] - at) + at : w[r];
                        }
                        const float *h = a + lda * (size_t)t0 + r0 + i;
                        if (F::axpy_rows > 1 && abreast == F::axpy_rows)
                            axpy_rows<F::axpy_rows>(runs[j].tokens, w, soon, h, lda, c, n, y, stride);
                        else
                            axpy_rows<1>(runs[j].tokens, w, soon, h, lda, c, n, y, stride);
                    }
                }
            }
        }
    }
};

// As float_rows.
template <class V, class C> struct float_walk {
    using R = float_rows<V, C>;
    static constexpr int L = V::lanes, n_vec = R::n_vec, step = R::step, sums = n_vec,
                         most = n_vec < 4 ? V::abreast : 4, most_axpy = 4, rows = L == 8 ? 3 : 1, axpy_rows = 2;
    static constexpr int32_t sum_columns = 512;
    static int32_t columns(int32_t) { return 512; }
    static_assert(512 % step == 0 && n_vec > 1, "pieces are whole steps");
    static size_t bytes(int32_t cols) { return (size_t)cols * C::bytes; }

    // Vectors u0..u0+U-1 of all whole steps: as many sums as there are registers for. The first pass fetches.
    template <int T, int R, int U>
    static void steps(const uint8_t *const *w, const float *const *x, int32_t n, int u0, typename V::f32 (*sum)[sums],
                      const uint8_t *const *next) {
        constexpr int passes = n_vec / U;
        typename V::f32 acc[R * T][U];
#pragma GCC unroll 24
        for (int i = 0; i < R * T; i++) TE_EACH_ROW(U) acc[i][r] = sum[i][u0 + r];
        const int32_t n_steps = n / step;
        int32_t turn = u0 / U * n_steps;
        for (int32_t j = 0; j + step <= n; j += step, turn++) {
            if (turn % passes == 0) TE_EACH_ROW(R) prefetch<step * C::bytes>(next[r] + turn / passes * step * C::bytes);
#pragma GCC unroll 8
            for (int u = 0; u < U; u++) {
                const int32_t at = j + (u0 + u) * L;
                typename V::f32 v[R];
                TE_EACH_ROW(R) v[r] = C::load(w[r] + at * C::bytes);
                TE_EACH(T) {
                    const typename V::f32 xt = V::load(x[t] + at);
                    TE_EACH_ROW(R) acc[r * T + t][u] = V::fma(v[r], xt, acc[r * T + t][u]);
                }
            }
        }
#pragma GCC unroll 24
        for (int i = 0; i < R * T; i++) TE_EACH_ROW(U) sum[i][u0 + r] = acc[i][r];
    }
    template <int T, int R>
    static void dot(const uint8_t *const *w, const char *const *act, int32_t at, int32_t n, bool last,
                    typename V::f32 (*sum)[sums], const uint8_t *const *next) {
        constexpr int room = (L == 8 ? 12 : 20) / (R * T), U = room < 2 ? 1 : room < 4 || n_vec < 4 ? 2 : 4;
        const float *x[T];
        TE_EACH(T) x[t] = (const float *)act[t] + at;
        for (int u = 0; u < n_vec; u += U) steps<T, R, U>(w, x, n, u, sum, next);
        if (!last) return;
        int32_t j = n / step * step;
        for (; j + L <= n; j += L) TE_EACH_ROW(R) {
                const typename V::f32 v = C::load(w[r] + j * C::bytes);
                TE_EACH(T) sum[r * T + t][0] = V::fma(v, V::load(x[t] + j), sum[r * T + t][0]);
            }
        for (int r = 0; j < n && r < R; r++) {
            const typename V::f32 v = C::load_part(w[r] + j * C::bytes, n - j);
            TE_EACH(T) sum[r * T + t][1] = V::fma(v, V::load_part(x[t] + j, n - j), sum[r * T + t][1]);
        }
    }
    static float total(const typename V::f32 *sum) {
        if constexpr (n_vec == 4) return V::sum(V::add(V::add(sum[0], sum[1]), V::add(sum[2], sum[3])));
        return V::sum(V::add(V::add(sum[0], sum[1]), V::add(V::zero(), V::zero())));
    }

    template <int T, int R>
    static void axpy(const uint8_t *const *row, const float *h, int32_t at, int32_t n, float *const *acc,
                     const uint8_t *const *next) {
        typename V::f32 hv[R][T];
        const uint8_t *w[R];
        TE_EACH_ROW(R) {
            w[r] = row[r];
            TE_EACH(T) hv[r][t] = V::splat(h[r * T + t]);
        }
        int32_t j = 0;
        for (; j + step <= n; j += step) {
            TE_EACH_ROW(R) prefetch<step * C::bytes>(next[r] + (size_t)j * C::bytes);
#pragma GCC unroll 4
            for (int u = 0; u < n_vec; u++) {
                typename V::f32 v[R];
                TE_EACH_ROW(R) v[r] = C::load(w[r] + u * L * C::bytes);
                add_rows<V, R, T>(v, hv, acc, at + j + u * L);
            }
            TE_EACH_ROW(R) w[r] += step * C::bytes;
        }
        for (; j < n; j += L) {
            typename V::f32 v[R];
            TE_EACH_ROW(R) {
                v[r] = j + L <= n ? C::load(w[r]) : C::load_part(w[r], n - j);
                w[r] += L * C::bytes;
            }
            add_rows<V, R, T>(v, hv, acc, at + j);
        }
    }
};

// As block_rows and k_rows, whose sums of a chunk are acc_floats.
template <class V, class C, int acc_floats> struct block_walk {
    using act = typename C::act;
    static constexpr int sums = 2, most = V::abreast, most_axpy = C::shares ? 4 : 1, rows = 1,
                         axpy_rows = C::shares ? V::rows : 1;
    // Of eight tokens, 24 KiB of activations, and of sums.
    static constexpr int32_t of_eight = 3072 / (int)sizeof(act) / 2 * 2 * C::chunk,
                             sum_columns = 768 / C::chunk * C::chunk > 0 ? 768 / C::chunk * C::chunk : C::chunk;
    static_assert(of_eight > 0, "a piece is a pair of chunks at least");
    // Few tokens leave room for longer pieces.
    static int32_t columns(int32_t n_tok) { return of_eight * (n_tok <= 2 ? 4 : n_tok <= 4 ? 2 : 1); }
    static size_t bytes(int32_t cols) { return (size_t)(cols / C::block) * C::block_bytes; }

    template <int T, int R>
    static void dot(const uint8_t *const *row, const char *const *packed, int32_t at, int32_t n, bool last,
                    typename V::f32 (*sum)[sums], const uint8_t *const *following) {
        const uint8_t *w = *row, *next = *following;
        const int32_t full = n / C::chunk;
        const act *x[T];
        TE_EACH(T) x[t] = (const act *)packed[t] + at / C::chunk;
        int32_t i = 0;
        for (; i + 2 <= full; i += 2, w += 2 * C::bytes, next += 2 * C::bytes) {
            prefetch<2 * C::bytes>(next);
            TE_EACH(T) sum[t][0] = C::mac(w, x[t][i], sum[t][0]);
            TE_EACH(T) sum[t][1] = C::mac(w + C::bytes, x[t][i + 1], sum[t][1]);
        }
        if (!last) return;
        if (i < full) {
            TE_EACH(T) sum[t][0] = row_end<V, C>::mac(w, x[t][i], sum[t][0]);
            w += C::bytes;
            i++;
        }
        const int32_t tail = (int32_t)bytes(n % C::chunk);
        if (tail) TE_EACH(T) sum[t][1] = row_end<V, C>::mac_part(w, tail, x[t][i], sum[t][1]);
    }
    static float total(const typename V::f32 *sum) { return V::sum(V::add(sum[0], sum[1])); }

    template <int T, int R> static void chunk(const uint8_t *const *w, const float *h, float *const *y) {
        if constexpr (C::shares) {
            C::template axpy_all<R, T>(w, h, y);
        } else {
            static_assert(R == 1, "rows share nothing");
            TE_EACH(T) C::axpy(*w, h[t], y[t]);
        }
    }

    template <int T, int R>
    static void axpy(const uint8_t *const *row, const float *h, int32_t at, int32_t n, float *const *acc,
                     const uint8_t *const *following) {
        float *y[T];
        const uint8_t *w[R], *next[R];
        TE_EACH(T) y[t] = acc[t] + (ptrdiff_t)(at / C::chunk) * acc_floats;
        TE_EACH_ROW(R) {
            w[r] = row[r];
            next[r] = following[r];
        }
        const int32_t full = n / C::chunk;
        for (int32_t i = 0; i < full; i++) {
            TE_EACH_ROW(R) prefetch<C::bytes>(next[r]);
            chunk<T, R>(w, h, y);
            TE_EACH_ROW(R) {
                w[r] += C::bytes;
                next[r] += C::bytes;
            }
            TE_EACH(T) y[t] += acc_floats;
        }
        const int32_t tail = (int32_t)bytes(n % C::chunk);
        for (int r = 0; tail && r < R; r++) TE_EACH(T) row_end<V, C>::axpy_part(w[r], tail, h[r * T + t], y[t]);
    }
};

// One token after the other: where nothing is gained by more.
template <class K> struct batch_by_one {
    static void dot(const te_mat *m, te_rows rows, te_ahead, te_tokens who, const void *act, size_t stride, float *y,
                    size_t ldy) {
        for (int32_t i = 0; i < rows.n; i++)
            for (int32_t t = 0; t < who.n; t++)
                if (te_wants(who, i, t))
                    K::dot(m, te_rows_part(rows, i, i + 1), te_ahead{}, (const char *)act + stride * (size_t)t,
                           y + ldy * (size_t)t + i);
    }
    static void axpy(const te_mat *m, te_rows rows, te_ahead, te_tokens who, const float *a, size_t lda, float *acc,
                     size_t stride) {
        for (int32_t i = 0; i < rows.n; i++)
            for (int32_t t = 0; t < who.n; t++)
                if (te_wants(who, i, t))
                    K::axpy(m, te_rows_part(rows, i, i + 1), te_ahead{}, a + lda * (size_t)t + i,
                            acc + stride * (size_t)t);
    }
};
template <class V, class K, bool one = V::abreast == 1> struct batch_of {
    using type = batch<V, typename K::walk>;
};
template <class V, class K> struct batch_of<V, K, true> {
    using type = batch_by_one<K>;
};

// As any_rows.
template <class V> struct batch_of_any {
    using R = any_rows<V>;
    enum { MOST = 32 };

    static void dot(const te_mat *m, te_rows rows, te_ahead, te_tokens who, const void *act, size_t stride, float *y,
                    size_t ldy) {
        alignas(64) float w[R::piece];
        for (int32_t i = 0; i < rows.n; i++) {
            float sum[MOST] = {};
            for (int32_t c = 0; c < m->cols; c += R::piece) {
                const int32_t n = R::length(m->cols, c);
                R::load(m, rows, i, c, n, w);
                for (int32_t t = 0; t < who.n; t++)
                    if (te_wants(who, i, t))
                        sum[t] += R::floats::dot_row((const uint8_t *)w,
                                                     (const float *)((const char *)act + stride * (size_t)t) + c, n,
                                                     fetched<1>{{(const uint8_t *)w}});
            }
            for (int32_t t = 0; t < who.n; t++)
                if (te_wants(who, i, t)) y[ldy * (size_t)t + i] = sum[t];
        }
    }
    static void axpy(const te_mat *m, te_rows rows, te_ahead, te_tokens who, const float *a, size_t lda, float *acc,
                     size_t stride) {
        alignas(64) float w[R::piece];
        for (int32_t i = 0; i < rows.n; i++)
            for (int32_t c = 0; c < m->cols; c += R::piece) {
                const int32_t n = R::length(m->cols, c);
                R::load(m, rows, i, c, n, w);
                for (int32_t t = 0; t < who.n; t++)
                    if (te_wants(who, i, t))
                        R::floats::axpy_row((const uint8_t *)w, a[lda * (size_t)t + i], n, acc + stride * (size_t)t + c,
                                            fetched<1>{{(const uint8_t *)w}});
            }
    }
};
} // namespace

#endif
