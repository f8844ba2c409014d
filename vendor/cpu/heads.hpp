// heads.hpp - a block of rows against several vectors of floats at once, for attention: rows are K or V of consecutive
// positions, vectors the queries (or weights) of the heads that share them. Rows are short and few, so what the row
// kernels do per row and vector is done for four rows together (the sums across a vector), or not at all (sums of V
// stay in registers while all rows pass by).
//
// One or two vectors take F16 as it is; more, and other formats, are converted once into a tile in the first cache.
#ifndef TE_HEADS_HPP
#define TE_HEADS_HPP

namespace {

template <class V> struct heads {
    using f32 = typename V::f32;
    static constexpr int L = V::lanes;
    static constexpr int ABREAST = L == 16 ? 4 : 2;   // vectors: what the registers hold
    static constexpr int32_t COLS = 512, TILE = 4096; // columns per pass, floats per tile

    static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

    // Where the next block's rows are, as far apart as this one's.
    struct ahead {
        const uint8_t *p;
        size_t stride, bytes;
        void fetch(int32_t row) const {
            if (!p) return;
            for (size_t k = 0; k < bytes; k += 64) __builtin_prefetch(p + (size_t)row * stride + k, 0, 2);
        }
    };

    // y[h * ldy + 0..n-1] (+)= four rows . x[h], of which the first n are wanted.
    template <class C, int H>
    static void dot4(const uint8_t *const w[4], int32_t n, int32_t cols, const float *x, size_t ldx, float *y,
                     size_t ldy, bool add, const uint8_t *next, int lines) {
        f32 sum[H][4];
        for (int h = 0; h < H; h++)
            for (int r = 0; r < 4; r++) sum[h][r] = V::zero();
        int32_t c = 0;
        for (; c + L <= cols; c += L) {
            for (int i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
            f32 v[4];
#pragma GCC unroll 8
            for (int r = 0; r < 4; r++) v[r] = C::load(w[r] + c * C::bytes);
#pragma GCC unroll 8
            for (int h = 0; h < H; h++) {
                const f32 xv = V::load(x + (size_t)h * ldx + c);
#pragma GCC unroll 8
                for (int r = 0; r < 4; r++) sum[h][r] = V::fma(v[r], xv, sum[h][r]);
            }
        }
        if (c < cols) {
            f32 v[4];
#pragma GCC unroll 8
            for (int r = 0; r < 4; r++) v[r] = C::load_part(w[r] + c * C::bytes, cols - c);
#pragma GCC unroll 8
            for (int h = 0; h < H; h++) {
                const f32 xv = V::load_part(x + (size_t)h * ldx + c, cols - c);
#pragma GCC unroll 8
                for (int r = 0; r < 4; r++) sum[h][r] = V::fma(v[r], xv, sum[h][r]);
            }
        }
        for (int h = 0; h < H; h++) {
            float s[4];
            V::sum4(sum[h], s);
            float *out = y + (size_t)h * ldy;
            for (int32_t r = 0; r < n; r++) out[r] = add ? out[r] + s[r] : s[r];
        }
    }

    template <class C>
    static void dot_rows(const uint8_t *w, size_t stride, int32_t n_rows, int32_t cols, const float *x, size_t ldx,
                         int32_t n, float *y, size_t ldy, bool add, const ahead &next) {
        for (int32_t r = 0; r < n_rows; r += 4) {
            const int32_t rn = least(4, n_rows - r);
            const uint8_t *row[4];
            for (int32_t i = 0; i < 4; i++) {
                row[i] = w + stride * (size_t)(r + least(i, rn - 1));
            }
            const uint8_t *p = next.p ? next.p + (size_t)r * next.stride : row[0];
            int lines = next.p ? (int)((4 * next.stride * L / (size_t)cols + 63) / 64) : 0;
            int32_t h = 0;
            for (; h + ABREAST <= n; h += ABREAST)
                dot4<C, ABREAST>(row, rn, cols, x + (size_t)h * ldx, ldx, y + (size_t)h * ldy + r, ldy, add, p, lines),
                    lines = 0;
            for (; h + 2 <= n; h += 2)
                dot4<C, 2>(row, rn, cols, x + (size_t)h * ldx, ldx, y + (size_t)h * ldy + r, ldy, add, p, lines),
                    lines = 0;
            if (h < n)
                dot4<C, 1>(row, rn, cols, x + (size_t)h * ldx, ldx, y + (size_t)h * ldy + r, ldy, add, p, lines),
                    lines = 0;
        }
    }

    // y[h][0..NV*L-1] += sum over rows of a[h][row] * row
    template <class C, int H, int NV>
    static void sum_vectors(const uint8_t *w, size_t stride, int32_t n_rows, const float *a, size_t lda, float *y,
                            size_t ldy, const ahead &next) {
        f32 sum[H][NV];
        for (int h = 0; h < H; h++)
            for (int v = 0; v < NV; v++) sum[h][v] = V::load(y + (size_t)h * ldy + v * L);
        for (int32_t r = 0; r < n_rows; r++, w += stride) {
            next.fetch(r);
            f32 av[H];
#pragma GCC unroll 8
            for (int h = 0; h < H; h++) av[h] = V::splat(a[(size_t)h * lda + (size_t)r]);
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) {
                const f32 wv = C::load(w + v * L * C::bytes);
#pragma GCC unroll 8
                for (int h = 0; h < H; h++) sum[h][v] = V::fma(wv, av[h], sum[h][v]);
            }
        }
        for (int h = 0; h < H; h++)
            for (int v = 0; v < NV; v++) V::store(y + (size_t)h * ldy + v * L, sum[h][v]);
    }
    // The last columns, fewer than a vector.
    template <class C>
    static void sum_rest(const uint8_t *w, size_t stride, int32_t n_rows, const float *a, float *y, int32_t n) {
        f32 sum = V::load_part(y, n);
        for (int32_t r = 0; r < n_rows; r++, w += stride) sum = V::fma(C::load_part(w, n), V::splat(a[r]), sum);
        V::store_part(y, sum, n);
    }

    // Columns from *c on, as many vectors at a time as there are, at most NV.
    template <class C, int H, int NV>
    static void sum_columns(int32_t *c, const uint8_t *w, size_t stride, int32_t n_rows, int32_t cols, const float *a,
                            size_t lda, float *y, size_t ldy, const ahead &next) {
        for (; *c + NV * L <= cols; *c += NV * L)
            sum_vectors<C, H, NV>(w + *c * C::bytes, stride, n_rows, a, lda, y + *c, ldy, *c ? ahead{} : next);
        if constexpr (NV > 1) sum_columns<C, H, NV / 2>(c, w, stride, n_rows, cols, a, lda, y, ldy, next);
    }
    template <class C, int H>
    static void sum_all(const uint8_t *w, size_t stride, int32_t n_rows, int32_t cols, const float *a, size_t lda,
                        float *y, size_t ldy, const ahead &next) {
        constexpr int n_vec = H == 1 ? 8 : 4 * ABREAST / H;
        int32_t c = 0;
        sum_columns<C, H, n_vec>(&c, w, stride, n_rows, cols, a, lda, y, ldy, next);
        for (int h = 0; h < H && c < cols; h++)
            sum_rest<C>(w + c * C::bytes, stride, n_rows, a + (size_t)h * lda, y + (size_t)h * ldy + c, cols - c);
    }
    template <class C>
    static void sum_rows(const uint8_t *w, size_t stride, int32_t n_rows, int32_t cols, const float *a, size_t lda,
                         int32_t n, float *y, size_t ldy, const ahead &next) {
        int32_t h = 0;
        const ahead none = {};
        for (; h + ABREAST <= n; h += ABREAST)
            sum_all<C, ABREAST>(w, stride, n_rows, cols, a + (size_t)h * lda, lda, y + (size_t)h * ldy, ldy,
                                h ? none : next);
        for (; h + 2 <= n; h += 2)
            sum_all<C, 2>(w, stride, n_rows, cols, a + (size_t)h * lda, lda, y + (size_t)h * ldy, ldy, h ? none : next);
        if (h < n)
            sum_all<C, 1>(w, stride, n_rows, cols, a + (size_t)h * lda, lda, y + (size_t)h * ldy, ldy, h ? none : next);
    }

    // Calls f(rows as floats, their stride in bytes, first row, rows, first column, columns, what to prefetch).
    template <class F> static void tiles(const te_mat *m, const void *next, F f) {
        alignas(64) float tile[TILE];
        const auto to_f32 = row_table(m->type).to_f32;
        for (int32_t c = 0; c < m->cols; c += COLS) {
            const int32_t cn = least(COLS, m->cols - c), pitch = (cn + L - 1) / L * L, most = TILE / pitch;
            for (int32_t r = 0; r < m->n_rows; r += most) {
                const int32_t rn = least(most, m->n_rows - r);
                for (int32_t i = 0; i < rn; i++)
                    to_f32((const uint8_t *)m->w + m->stride * (size_t)(r + i), c, cn, tile + i * pitch);
                const uint8_t *p = next && !c ? (const uint8_t *)next + m->stride * (size_t)r : NULL;
                f((const uint8_t *)tile, (size_t)pitch * sizeof(float), r, rn, c, cn, ahead{p, m->stride, m->stride});
            }
        }
    }

    __attribute__((flatten)) static void dot(const te_mat *m, const void *next, const float *x, size_t ldx, int32_t n,
                                             float *y, size_t ldy) {
        const ahead fetch = {(const uint8_t *)next, m->stride, m->stride};
        if (m->type == TE_F16 && n <= 2)
            return dot_rows<codec_f16<V>>((const uint8_t *)m->w, m->stride, m->n_rows, m->cols, x, ldx, n, y, ldy,
                                          false, fetch);
        if (m->type == TE_F32)
            return dot_rows<codec_f32<V>>((const uint8_t *)m->w, m->stride, m->n_rows, m->cols, x, ldx, n, y, ldy,
                                          false, fetch);
        tiles(m, next,
              [=](const uint8_t *w, size_t stride, int32_t r, int32_t rn, int32_t c, int32_t cn, const ahead &a) {
                  dot_rows<codec_f32<V>>(w, stride, rn, cn, x + c, ldx, n, y + r, ldy, c > 0, a);
              });
    }

    __attribute__((flatten)) static void sum(const te_mat *m, const void *next, const float *a, size_t lda, int32_t n,
                                             float *y, size_t ldy) {
        const ahead fetch = {(const uint8_t *)next, m->stride, m->stride};
        if (m->type == TE_F16 && n <= 2)
            return sum_rows<codec_f16<V>>((const uint8_t *)m->w, m->stride, m->n_rows, m->cols, a, lda, n, y, ldy,
                                          fetch);
        if (m->type == TE_F32)
            return sum_rows<codec_f32<V>>((const uint8_t *)m->w, m->stride, m->n_rows, m->cols, a, lda, n, y, ldy,
                                          fetch);
        tiles(m, next,
              [=](const uint8_t *w, size_t stride, int32_t r, int32_t rn, int32_t c, int32_t cn, const ahead &f) {
                  sum_rows<codec_f32<V>>(w, stride, rn, cn, a + r, lda, n, y + c, ldy, f);
              });
    }

    static float exp_sum(float *x, int32_t n, float scale, float *top) {
        float most = *top;
        int32_t i = 0;
        if (n >= L) {
            f32 m = V::splat(most);
            for (; i + L <= n; i += L) m = V::max(m, V::load(x + i));
            most = V::hmax(m);
        }
        for (; i < n; i++) most = x[i] > most ? x[i] : most;
        *top = most;
        if (most == -__builtin_inff()) most = 0; // then all become 0
        const f32 s = V::splat(scale), t = V::splat(most);
        f32 sum = V::zero();
        for (i = 0; i + L <= n; i += L) {
            const f32 e = elementwise<V>::exp(V::mul(s, V::sub(V::load(x + i), t)));
            V::store(x + i, e);
            sum = V::add(sum, e);
        }
        if (i == n) return V::sum(sum);
        const f32 e = elementwise<V>::exp(V::mul(s, V::sub(V::load_part(x + i, n - i), t)));
        V::store_part(x + i, e, n - i);
        return V::sum(sum) + V::sum(V::load_part(x + i, n - i));
    }
};
} // namespace

#endif
