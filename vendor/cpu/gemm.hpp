// gemm.hpp - products for many tokens at once in f32: te_gemm_kernels for any vocabulary V of floats. The AMX version
// is gemm_amx.hpp.
//
// A panel of weights is dequantised to floats in the cache, then all tokens run over it. Activations are packed once:
// blocks of TB tokens, [k][TB], so that the tokens of one k are whole vectors (gemm) or TB neighbouring scalars to
// broadcast (gemm_t):
//
//     gemm:   sums [MR rows][3 vectors of tokens]   += splat(w[row][k]) * x[k][tokens]      panel [rows][KC]
//     gemm_t: sums [MT tokens][2 vectors of columns] += splat(h[row][token]) * w[row][cols]  panel [RC][CC]
//
// Neither needs the weights transposed. Sums of a panel stand in scratch between passes over k and are written to y at
// the end, so y is touched once. The last block of tokens is one or two vectors wide if that is enough for it. Of V it
// needs lanes, f32, zero, splat, load, store, add, fma; of rows.hpp to_f32.
//
// Share of the f32 fma peak of the same run in percent, the better of two, on the machine and shape of gemm_amx.hpp,
// F32 F16 Q8_0 Q4_0 Q4_K Q6_K, on 1 and on 2 threads. The peak of one core: AVX2 0.114 TFLOPS, AVX-512 0.213.
//     AVX2     gemm 72 78 79 86 81 76, 73 76 77 79 79 73    gemm_t 69 71 66 69 70 69, 68 69 65 67 68 68
//     AVX-512  gemm 59 62 61 67 61 58, 56 61 61 65 59 57    gemm_t 51 50 51 51 52 48, 49 50 51 49 51 48
#ifndef TE_GEMM_HPP
#define TE_GEMM_HPP

#if defined(__clang__)
#define TE_UNROLL _Pragma("unroll")
#else
#define TE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

template <class V> struct gemm_f32 {
    using f32 = typename V::f32;
    static constexpr int32_t L = V::lanes;
    static constexpr int32_t TB = 3 * L;             // tokens per block
    static constexpr int32_t TP = 256 / TB * 2 * TB; // tokens per pass: their sums and one KC of activations stay in L2
    static constexpr int32_t KC = 256;               // weights per pass: one block of the K formats
    static constexpr int32_t NC = 128;               // rows per panel
    static constexpr int32_t MR = L / 2;             // rows per register tile: MR * 3 sums, 3 activations, a weight
    static constexpr int32_t RC = 128;               // rows per pass of gemm_t
    static constexpr int32_t CC = 256;               // columns per panel of gemm_t
    static constexpr int32_t WS = CC + 16; // its row pitch: with 1 KiB a column of vectors would share four sets of L1
    static constexpr int32_t LC = TP + 16; // pitch of gemm's sums [row][token], for the same reason

    static int32_t up(int32_t n, int32_t unit) { return (n + unit - 1) / unit * unit; }
    static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
    // Tokens that the block at token t is wide.
    static int32_t width(int32_t t, int32_t n_tok) { return n_tok - t >= TB ? TB : up(n_tok - t, L); }

    static size_t pack_bytes(int32_t n_tok, int32_t k) {
        return ((size_t)up(n_tok, L) * (size_t)k * sizeof(float) + 63) / 64 * 64;
    }

    static void pack(const float *x, size_t ldx, int32_t n_tok, int32_t k, int32_t t0, int32_t t1, void *px) {
        for (int32_t t = t0; t < t1; t += TB) {
            const int32_t w = width(t, n_tok), n = least(w, n_tok - t);
            float *out = (float *)px + (size_t)t * (size_t)k;
            for (int32_t k0 = 0; k0 < k; k0 += 16) { // a cache line of each token at a time
                const int32_t kn = least(16, k - k0);
                for (int32_t i = 0; i < n; i++) {
                    const float *in = x + (size_t)(t + i) * ldx + k0;
                    for (int32_t j = 0; j < kn; j++) out[(k0 + j) * w + i] = in[j];
                }
                for (int32_t j = 0; j < kn; j++)
                    for (int32_t i = n; i < w; i++) out[(k0 + j) * w + i] = 0;
            }
        }
    }

    // Panel and sums of gemm: NC * (KC + LC) floats; of gemm_t: RC * WS + TP * WS.
    static size_t scratch_bytes(int32_t, int32_t) {
        const size_t rows = (size_t)NC * (KC + LC), cols = (size_t)(RC + TP + TB) * WS;
        return (rows > cols ? rows : cols) * sizeof(float);
    }

    static void begin() {}
    static void end() {}

    // c[r][0..NV*L-1] (+)= sum over k of w[r][k] * x[k][0..NV*L-1] for MR rows.
    template <int NV> static void tile(const float *w, const float *x, int32_t kn, float *c, bool first) {
        f32 acc[MR][NV];
        TE_UNROLL for (int r = 0; r < MR; r++) TE_UNROLL for (int v = 0; v < NV; v++) acc[r][v] =
            first ? V::zero() : V::load(c + r * LC + v * L);
        for (int32_t k = 0; k < kn; k++) {
            f32 xv[NV];
            TE_UNROLL for (int v = 0; v < NV; v++) xv[v] = V::load(x + (size_t)k * NV * L + v * L);
            TE_UNROLL for (int r = 0; r < MR; r++) {
                const f32 wv = V::splat(w[r * KC + k]);
                TE_UNROLL for (int v = 0; v < NV; v++) acc[r][v] = V::fma(wv, xv[v], acc[r][v]);
            }
        }
        TE_UNROLL for (int r = 0; r < MR; r++) TE_UNROLL for (int v = 0; v < NV; v++)
            V::store(c + r * LC + v * L, acc[r][v]);
    }

    static void gemm(const te_mat *m, int32_t r0, int32_t r1, const void *px, int32_t n_tok, float *y, size_t ldy,
                     const float *bias, bool add, void *scratch) {
        const auto to_f32 = row_table<V>(m->type).to_f32;
        const int32_t k = m->cols;
        float *panel = (float *)scratch, *c = panel + (size_t)NC * KC;
        for (int32_t r = r0; r < r1; r += NC)
            for (int32_t t = 0; t < n_tok; t += TP) {
                const int32_t rn = least(NC, r1 - r), tn = least(TP, n_tok - t), tiles = up(rn, MR);
                for (int32_t k0 = 0; k0 < k; k0 += KC) {
                    const int32_t kn = least(KC, k - k0);
                    for (int32_t i = 0; i < rn; i++)
                        to_f32((const char *)m->w + (size_t)(r + i) * m->stride, k0, kn, panel + i * KC);
                    for (int32_t i = rn * KC; i < tiles * KC; i++) panel[i] = 0;
                    for (int32_t b = 0; b < tn; b += TB) {
                        const int32_t w = width(t + b, n_tok);
                        const float *x = (const float *)px + (size_t)(t + b) * (size_t)k + (size_t)k0 * (size_t)w;
                        const auto run = w == TB ? tile<3> : w == 2 * L ? tile<2> : tile<1>;
                        for (int32_t i = 0; i < tiles; i += MR) run(panel + i * KC, x, kn, c + i * LC + b, k0 == 0);
                    }
                }
                rows_to_y(c, rn, tn, y + (size_t)t * ldy + r, ldy, bias ? bias + r : NULL, add);
            }
    }

    // y[t][r] (+)= c[r][t] + bias[r]. Sixteen tokens at a time: a cache line of each row of c, and sixteen rows of y
    // that stay in L1.
    static void rows_to_y(const float *c, int32_t rn, int32_t tn, float *y, size_t ldy, const float *bias, bool add) {
        for (int32_t t0 = 0; t0 < tn; t0 += 16) {
            const int32_t n = least(16, tn - t0);
            for (int32_t r = 0; r < rn; r++) {
                const float *s = c + r * LC + t0;
                const float b = bias ? bias[r] : 0;
                float *o = y + (size_t)t0 * ldy + r;
                if (add)
                    for (int32_t i = 0; i < n; i++) o[(size_t)i * ldy] += s[i] + b;
                else
                    for (int32_t i = 0; i < n; i++) o[(size_t)i * ldy] = s[i] + b;
            }
        }
    }

    // c[t][0..NV*L-1] (+)= sum over rows r of h[r][t] * w[r][0..NV*L-1] for MT tokens; rows of h are hw floats apart.
    template <int MT, int NV>
    static void tile_t(const float *w, const float *h, int32_t hw, int32_t rn, float *c, bool first) {
        f32 acc[MT][NV];
        TE_UNROLL for (int t = 0; t < MT; t++) TE_UNROLL for (int v = 0; v < NV; v++) acc[t][v] =
            first ? V::zero() : V::load(c + t * WS + v * L);
        for (int32_t r = 0; r < rn; r++) {
            f32 wv[NV];
            TE_UNROLL for (int v = 0; v < NV; v++) wv[v] = V::load(w + (size_t)r * WS + v * L);
            TE_UNROLL for (int t = 0; t < MT; t++) {
                const f32 hv = V::splat(h[(size_t)r * (size_t)hw + t]);
                TE_UNROLL for (int v = 0; v < NV; v++) acc[t][v] = V::fma(hv, wv[v], acc[t][v]);
            }
        }
        TE_UNROLL for (int t = 0; t < MT; t++) TE_UNROLL for (int v = 0; v < NV; v++)
            V::store(c + t * WS + v * L, acc[t][v]);
    }

    static void gemm_t(const te_mat *m, int32_t c0, int32_t c1, const void *ph, int32_t n_tok, float *y, size_t ldy,
                       const float *bias, bool add, void *scratch) {
        const auto to_f32 = row_table<V>(m->type).to_f32;
        const int32_t rows = m->n_rows;
        float *panel = (float *)scratch, *c = panel + (size_t)RC * WS;
        for (int32_t cc = c0; cc < c1; cc += CC)
            for (int32_t t = 0; t < n_tok; t += TP) {
                const int32_t cn = least(CC, c1 - cc), vn = up(cn, L), tn = least(TP, n_tok - t);
                for (int32_t r0 = 0; r0 < rows; r0 += RC) {
                    const int32_t rn = least(RC, rows - r0);
                    for (int32_t i = 0; i < rn; i++) {
                        float *out = panel + i * WS;
                        to_f32((const char *)m->w + (size_t)(r0 + i) * m->stride, cc, cn, out);
                        for (int32_t j = cn; j < vn; j++) out[j] = 0;
                    }
                    for (int32_t j = 0; j < vn; j += 2 * L)
                        for (int32_t b = 0; b < tn; b += TB) {
                            const int32_t w = width(t + b, n_tok), mt = w == TB ? TB / 4 : L / 2;
                            const float *h =
                                (const float *)ph + (size_t)(t + b) * (size_t)rows + (size_t)r0 * (size_t)w;
                            const bool wide = vn - j >= 2 * L;
                            const auto run = mt == L / 2 ? (wide ? tile_t<L / 2, 2> : tile_t<L / 2, 1>)
                                                         : (wide ? tile_t<TB / 4, 2> : tile_t<TB / 4, 1>);
                            for (int32_t i = 0; i < w && b + i < tn; i += mt)
                                run(panel + j, h + i, w, rn, c + (b + i) * WS + j, r0 == 0);
                        }
                }
                for (int32_t i = 0; i < tn; i++)
                    row_to_y(c + i * WS, cn, y + (size_t)(t + i) * ldy + cc, bias ? bias + cc : NULL, add);
            }
    }

    // y[0..n-1] (+)= c + bias
    static void row_to_y(const float *c, int32_t n, float *y, const float *bias, bool add) {
        int32_t j = 0;
        for (; j + L <= n; j += L) {
            f32 v = V::load(c + j);
            if (bias) v = V::add(v, V::load(bias + j));
            if (add) v = V::add(v, V::load(y + j));
            V::store(y + j, v);
        }
        for (; j < n; j++) y[j] = c[j] + (bias ? bias[j] : 0) + (add ? y[j] : 0);
    }
};

// min_tok by time of the row kernels over that of gemm, one thread, 4096 columns. AVX-512, 12 tokens: F16 1.3,
// Q8_0 1.0, Q4_0 0.8, Q4_K 0.7 (16: 1.6, 1.4, 1.0, 1.0). AVX2, 16 tokens: F16 1.3, Q8_0 1.1, Q4_0 1.1, Q4_K 0.8. gemm_t
// wins from 12 on. Scalar: gemm wins from 3 on; 8 leaves a few sequences that decode together to the row kernels, as
// elsewhere.
template <class V> constexpr te_gemm_kernels gemm_table(int32_t min_tok = V::lanes == 16 ? 12 : 16) {
    using G = gemm_f32<V>;
    return {min_tok,          G::TB,    64,     G::pack_bytes, G::pack,  G::pack,
            G::scratch_bytes, G::begin, G::end, G::gemm,       G::gemm_t};
}

} // namespace
#endif
