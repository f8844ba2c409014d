// gemm.hpp - products for many tokens at once, sums in f32: te_gemm_kernels for any vocabulary V of floats. The AMX
// version is gemm_amx.hpp; block formats have another in gemm_int8.hpp.
//
// A panel of weights is dequantised to floats in the cache, then all tokens run over it. Activations are packed once:
// blocks of TB tokens, [k][TB], so that the tokens of one k are whole vectors:
//
//     sums [MR outputs][3 vectors of tokens] += splat(weight k of an output) * x[k][tokens]
//
// An output is a row of the matrix (gemm) or a column (gemm_t); only the steps through the panel differ, so neither
// needs the weights transposed. Sums of a panel stand in scratch between passes over k and are written to y at the end,
// so y is touched once. The last block of tokens is one or two vectors wide if that is enough for it. Of V it needs
// lanes, f32, zero, splat, load, store, add, fma, add_transposed; of rows.hpp to_f32.
//
// P says what stands in the 32 bits of a lane: one float (single), or a pair of bf16 of neighbouring k
// (gemm_bf16.hpp), two products to an instruction. Depths and pitches count such elements.
//
// While a tile is computed, pieces of what comes next are fetched: weights are read in runs of 512 bytes, which no
// hardware prefetcher follows, and activations, of which every panel needs all, are in L3. Two cores of Zen 4, F16, 4096
// columns, GFLOPS of the quietest run, without and with it; fma reaches 221, and so does the inner loop on data in L1:
//                512 tokens               64 tokens    12 (gemm), 16 (gemm_t)
//     AVX2       gemm   197 208           176 194       78 107
//                gemm_t 200 210           156 188       88 139
//     AVX-512    gemm   213 216           179 204       80 125
//                gemm_t 210 215                         99 177
//
// One thread of a 2-core Sapphire Rapids virtual machine, without it, 512 tokens, TFLOPS; fma reaches 0.114 with AVX2 and
// 0.215 with AVX-512, the inner loop by itself, on data in L1, 0.187 with AVX-512:
//     AVX2     gemm 0.097-0.104  gemm_t 0.089-0.099
//     AVX-512  gemm 0.149-0.159  gemm_t 0.134-0.141
#ifndef TE_GEMM_HPP
#define TE_GEMM_HPP

#if defined(__clang__)
#define TE_UNROLL _Pragma("unroll")
#else
#define TE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

// The activations of token t.
inline const float *token_at(const float *x, size_t ldx, const int32_t *row, int32_t t) {
    return x + (size_t)(row ? row[t] : t) * ldx;
}

// Elements of one float.
template <class V> struct single {
    static constexpr int32_t per = 1; // weights to an element
    static typename V::f32 fma(typename V::f32 w, typename V::f32 x, typename V::f32 sum) { return V::fma(w, x, sum); }
    // n floats as elements, in `room` if they change
    static const float *row(const float *in, int32_t, float *) { return in; }
};

template <class V, class P = single<V>> struct gemm_f32 {
    using f32 = typename V::f32;
    static constexpr int32_t L = V::lanes;
    static constexpr int32_t TB = 3 * L;         // tokens per block
    static constexpr int32_t TP = 528 / TB * TB; // tokens per pass: their sums and one KC of activations stay in L2
    static constexpr int32_t KC = 256;           // elements per pass: a block of the K formats, or two
    static constexpr int32_t NC = 128;           // rows per panel
    static constexpr int32_t MR = L / 2;         // rows per register tile: MR * 3 sums, 3 activations, a weight
    static constexpr int32_t RC = 128;           // elements, of one column, per pass of gemm_t
    static constexpr int32_t CC = 256;           // columns per panel of gemm_t
    static constexpr int32_t WS = CC + 16; // its row pitch: with 1 KiB a column of vectors would share four sets of L1
    static constexpr int32_t LC = TP + 16; // pitch of the sums, for the same reason
    // Elements per tile: their TB activations (12 KiB), and the next that are fetched meanwhile, stay in L1.
    static constexpr int32_t KH = L == 16 ? 64 : 128;

    static int32_t up(int32_t n, int32_t unit) { return (n + unit - 1) / unit * unit; }
    static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
    static int32_t elements(int32_t k) { return up(k, P::per) / P::per; }
    // Tokens that the block at token t is wide.
    static int32_t width(int32_t t, int32_t n_tok) { return n_tok - t >= TB ? TB : up(n_tok - t, L); }

    static size_t pack_bytes(int32_t n_tok, int32_t k) {
        return ((size_t)up(n_tok, L) * (size_t)elements(k) * sizeof(float) + 63) / 64 * 64;
    }

    static void pack(const float *x, size_t ldx, const int32_t *row, int32_t n_tok, int32_t k, int32_t t0, int32_t t1,
                     void *px) {
        for (int32_t t = t0; t < t1; t += TB) {
            const int32_t w = width(t, n_tok), n = least(w, n_tok - t);
            float *out = (float *)px + (size_t)t * (size_t)elements(k), room[16];
            for (int32_t k0 = 0; k0 < k; k0 += 16 * P::per, out += 16 * w) { // 16 elements of each token at a time
                const int32_t kn = least(16 * P::per, k - k0), en = elements(kn);
                for (int32_t i = 0; i < n; i++) {
                    const float *in = P::row(token_at(x, ldx, row, t + i) + k0, kn, room);
                    for (int32_t j = 0; j < en; j++) out[j * w + i] = in[j];
                }
                for (int32_t j = 0; j < en; j++)
                    for (int32_t i = n; i < w; i++) out[j * w + i] = 0;
            }
        }
    }

    // A panel, and its sums [output][token].
    static size_t scratch_bytes(int32_t, int32_t) {
        const size_t rows = (size_t)NC * (KC + LC), cols = (size_t)RC * WS + (size_t)CC * LC;
        return (rows > cols ? rows : cols) * sizeof(float);
    }

    static void begin() {}
    static void end() {}

    // Memory that is fetched to cache `level` piece by piece while tiles are computed: runs of `bytes`, `stride` apart.
    template <int level> struct ahead {
        const char *run;
        size_t stride;
        int32_t bytes, n_runs, lines, at = 0; // lines: of a piece
        ahead(const void *p, size_t run_bytes, int32_t n, size_t apart, int32_t n_pieces)
            : run((const char *)p - ((uintptr_t)p & 63)), stride(apart),
              bytes((int32_t)(run_bytes + ((uintptr_t)p & 63))), n_runs(n),
              lines(up(n * (up(bytes, 64) / 64), n_pieces) / n_pieces) {}
        void piece() {
            for (int32_t i = 0; i < lines && n_runs > 0; i++, at += 64) {
                if (at >= bytes) {
                    at = 0;
                    run += stride;
                    if (--n_runs == 0) return;
                }
                __builtin_prefetch(run + at, 0, 4 - level);
            }
        }
    };
    using weights_ahead = ahead<2>;

    // Packed activations.
    struct packed {
        const float *x;
        int32_t n_tok, n_el;
        int32_t width(int32_t t) const { return gemm_f32::width(t, n_tok); }
        const float *at(int32_t t, int32_t k) const {
            return x + (size_t)t * (size_t)n_el + (size_t)k * (size_t)width(t);
        }
    };

    // gemm: outputs are rows of the matrix. Element k of output r of a panel stands at r * next_output + k * next_k.
    struct from_rows {
        static constexpr int32_t width = NC, depth = KC, next_output = KC, next_k = 1, floats = NC * KC;
        static weights_ahead fetch(const te_mat *m, int32_t o, int32_t on, int32_t k, int32_t kn, int32_t n_pieces) {
            const char *first = (const char *)m->w + (size_t)o * m->stride + te_row_bytes(m->type, k);
            return {first, te_row_bytes(m->type, kn), on, m->stride, n_pieces};
        }
        static void make(const te_mat *m, int32_t o, int32_t on, int32_t k, int32_t kn, float *panel) {
            const auto to_f32 = row_table(m->type).to_f32;
            float f[KC * P::per];
            for (int32_t i = 0; i < on; i++) {
                float *out = panel + i * KC, *to = P::per == 1 ? out : f;
                to_f32((const char *)m->w + (size_t)(o + i) * m->stride, k, kn, to);
                P::row(to, kn, out);
            }
            for (int32_t i = on * KC; i < up(on, MR) * KC; i++) panel[i] = 0;
        }
    };
    // gemm_t: outputs are columns.
    struct from_cols {
        static constexpr int32_t width = CC, depth = RC, next_output = 1, next_k = WS, floats = RC * WS;
        static weights_ahead fetch(const te_mat *m, int32_t o, int32_t on, int32_t k, int32_t kn, int32_t n_pieces) {
            const char *first = (const char *)m->w + (size_t)k * m->stride + te_row_bytes(m->type, o);
            return {first, te_row_bytes(m->type, on), on > 0 ? kn : 0, m->stride, n_pieces};
        }
        static void make(const te_mat *m, int32_t o, int32_t on, int32_t k, int32_t kn, float *panel) {
            const auto to_f32 = row_table(m->type).to_f32;
            const char *row = (const char *)m->w + (size_t)k * m->stride;
            float two[2][CC];
            for (int32_t i = 0; i < kn; i += P::per, row += P::per * m->stride, panel += WS) {
                if constexpr (P::per == 1) {
                    to_f32(row, o, on, panel);
                } else {
                    to_f32(row, o, on, two[0]);
                    if (i + 1 < kn)
                        to_f32(row + m->stride, o, on, two[1]);
                    else
                        memset(two[1], 0, (size_t)on * sizeof(float));
                    P::rows(two[0], two[1], on, panel);
                }
                for (int32_t j = on; j < up(on, MR); j++) panel[j] = 0;
            }
        }
    };

    // c[r][0..NV*L-1] (+)= sum over k of element k of output r * x[k][0..NV*L-1], for M outputs.
    template <class From, int NV, int M = MR>
    static void tile(const float *w, const float *x, int32_t kn, float *c, bool first) {
        f32 acc[M][NV];
        TE_UNROLL for (int r = 0; r < M; r++) TE_UNROLL for (int v = 0; v < NV; v++) acc[r][v] =
            first ? V::zero() : V::load(c + r * LC + v * L);
        for (int32_t k = 0; k < kn; k++) {
            f32 xv[NV];
            TE_UNROLL for (int v = 0; v < NV; v++) xv[v] = V::load(x + (size_t)k * NV * L + v * L);
            TE_UNROLL for (int r = 0; r < M; r++) {
                const f32 wv = V::splat(w[r * From::next_output + k * From::next_k]);
                TE_UNROLL for (int v = 0; v < NV; v++) acc[r][v] = P::fma(wv, xv[v], acc[r][v]);
            }
        }
        TE_UNROLL for (int r = 0; r < M; r++) TE_UNROLL for (int v = 0; v < NV; v++)
            V::store(c + r * LC + v * L, acc[r][v]);
    }

    // Elements k0..k0+kn-1 of a panel times those of tokens t..t+tn-1. Each block of activations is fetched during the
    // one before it.
    template <class From>
    static void tiles(const float *panel, int32_t on, const packed &x, int32_t t, int32_t tn, int32_t k0, int32_t kn,
                      float *c, weights_ahead weights) {
        for (int32_t h = 0; h < kn; h += KH)
            for (int32_t b = 0; b < tn; b += TB) {
                const int32_t w = x.width(t + b), hn = least(KH, kn - h);
                const bool last = b + TB >= tn;
                const int32_t t_next = last ? t : t + b + TB, h_next = k0 + h + (last ? hn : 0),
                              k_next = h_next < x.n_el ? h_next : 0, n_next = least(KH, x.n_el - k_next);
                ahead<1> next(x.at(t_next, k_next), (size_t)(n_next * x.width(t_next)) * sizeof(float), 1, 0,
                              up(on, MR) / MR);
                const auto run = w == TB ? tile<From, 3> : w == 2 * L ? tile<From, 2> : tile<From, 1>;
                for (int32_t i = 0; i < on; i += MR) {
                    next.piece();
                    weights.piece();
                    if (w == L && i + 2 * MR <= on) { // MR sums would wait for each other
                        tile<From, 1, 2 * MR>(panel + i * From::next_output + h * From::next_k, x.at(t + b, k0 + h), hn,
                                              c + i * LC + b, k0 + h == 0);
                        next.piece();
                        weights.piece();
                        i += MR;
                        continue;
                    }
                    run(panel + i * From::next_output + h * From::next_k, x.at(t + b, k0 + h), hn, c + i * LC + b,
                        k0 + h == 0);
                }
            }
    }

    // Outputs o0..o1-1, sums over 0..k-1. Each panel's weights are fetched during the one before it.
    template <class From>
    static void product(const te_mat *m, int32_t o0, int32_t o1, int32_t k, const void *px, int32_t n_tok, float *y,
                        size_t ldy, const float *bias, bool add, void *scratch) {
        constexpr int32_t depth = From::depth * P::per;
        float *panel = (float *)scratch, *c = panel + From::floats;
        const packed x = {(const float *)px, n_tok, elements(k)};
        for (int32_t o = o0; o < o1; o += From::width)
            for (int32_t t = 0; t < n_tok; t += TP) {
                const int32_t on = least(From::width, o1 - o), tn = least(TP, n_tok - t);
                for (int32_t k0 = 0; k0 < k; k0 += depth) {
                    const int32_t kn = least(depth, k - k0), n_el = elements(kn);
                    From::make(m, o, on, k0, kn, panel);
                    const bool last = k0 + kn >= k;
                    const int32_t k_next = last ? 0 : k0 + kn, o_next = last && t + tn >= n_tok ? o + on : o;
                    const int32_t n_tiles = up(on, MR) / MR * (up(tn, TB) / TB) * (up(n_el, KH) / KH);
                    tiles<From>(panel, on, x, t, tn, k0 / P::per, n_el, c,
                                From::fetch(m, o_next, least(From::width, o1 - o_next), k_next,
                                            least(depth, k - k_next), n_tiles));
                }
                to_y(c, on, tn, y + (size_t)t * ldy + o, ldy, bias ? bias + o : NULL, add);
            }
    }

    // What a row of y begins with.
    static void begin_row(float *y, int32_t n, const float *bias, bool add) {
        int32_t o = 0;
        for (; o + L <= n; o += L) {
            const f32 b = bias ? V::load(bias + o) : V::zero();
            V::store(y + o, add ? V::add(V::load(y + o), b) : b);
        }
        for (; o < n; o++) y[o] = (add ? y[o] : 0) + (bias ? bias[o] : 0);
    }

    // y[t][o] (+)= bias[o] + c[o][t]. Four tokens at a time: rows of y are often a power of two apart, where a cache
    // keeps few of them. Those of sixteen tokens on are fetched meanwhile.
    static void to_y(const float *c, int32_t on, int32_t tn, float *y, size_t ldy, const float *bias, bool add) {
        for (int32_t t = 0; t < tn; t += 4, c += 4, y += 4 * ldy) {
            const int32_t n = least(4, tn - t), in_fours = n == 4 ? on / 4 * 4 : 0;
            for (int32_t i = 0; i < n; i++) {
                float *row = y + (size_t)i * ldy;
                if (t + i + 16 < tn)
                    for (int32_t o = 0; o < on; o += 16) __builtin_prefetch(row + 16 * ldy + o, 1, 2);
                if (!add || bias) begin_row(row, on, bias, add);
            }
            for (int32_t o = 0; o < in_fours; o += 4) V::add_transposed(y + o, c + o * LC, LC, ldy);
            for (int32_t o = in_fours; o < on; o++)
                for (int32_t i = 0; i < n; i++) y[(size_t)i * ldy + (size_t)o] += c[o * LC + i];
        }
    }

    static void gemm(const te_mat *m, int32_t r0, int32_t r1, const void *px, int32_t n_tok, float *y, size_t ldy,
                     const float *bias, bool add, void *scratch) {
        product<from_rows>(m, r0, r1, m->cols, px, n_tok, y, ldy, bias, add, scratch);
    }
    static void gemm_t(const te_mat *m, int32_t c0, int32_t c1, const void *ph, int32_t n_tok, float *y, size_t ldy,
                       const float *bias, bool add, void *scratch) {
        product<from_cols>(m, c0, c1, m->n_rows, ph, n_tok, y, ldy, bias, add, scratch);
    }
};

// linear_min_tok by time of the row kernels over that of gemm, one thread, F16, 4096 columns: AVX-512 6 tokens 0.8, 8
// 1.0, 12 1.4 (Zen 4: 0.6, 0.9, 1.2); AVX2 8 tokens 0.8, 12 1.1, 16 1.5. min_tok: gemm_t wins from 12 on. Scalar: gemm wins from 3 on; 8 leaves
// a few sequences that decode together to the row kernels, as elsewhere.
template <class V> te_gemm_kernels gemm_table() {
    using G = gemm_f32<V>;
    constexpr bool scalar = V::abreast == 1;
    te_gemm_kernels k = {};
    k.min_tok = scalar ? 8 : V::lanes == 16 ? 12 : 16;
    for (int i = 0; i < TE_TYPE_LIMIT; i++) k.linear_min_tok[i] = scalar || V::lanes == 16 ? 8 : 12;
    k.pack_unit = G::TB;
    k.row_unit = 64;
    k.pack_bytes = G::pack_bytes;
    k.pack = k.pack_t = G::pack;
    k.scratch_bytes = G::scratch_bytes;
    k.begin = G::begin;
    k.end = G::end;
    k.gemm = G::gemm;
    k.gemm_t = G::gemm_t;
    return k;
}

} // namespace
#endif
