// gemm_int8.hpp - products for many tokens in 8-bit integers, for the block formats: te_int8_kernels. AVX-512 has other
// records and tiles: gemm_int8_k.hpp for the formats of 256 weights, and gemm_int8_avx512.hpp, whose lanes are rows, for
// those of 32.
//
// Both sides are integers with a scale per group: activations are rounded to int8 per 32, as for the row kernels, and
// weights are unpacked a panel at a time (unpack.hpp), to unsigned bytes, since unsigned by signed is what the
// instructions multiply, four products to a 32-bit lane. Lanes are tokens, a dword of four weights is broadcast. A
// group's integer sum is exact and becomes a float times both scales; the weights' offset, or minimum, is made up for
// with the sum of the group's activations, which packing has made.
//
// Activations lie in blocks of TB tokens, per 32 of k one record: [8][tokens] dwords, scales, sums of either half, and
// these times the scale.
//
// What D adds to V: dot(total, s, j, weights, x), the j-th of `run` dots to be added to total, perhaps through s of type
// sums; end(total, s) after the last of them; `run` says how many s can take for weights of so many bits.
//
// A panel is unpacked row by row, just before its first use, and its weights have come from memory while the panel
// before it was worked on; activations come to the second cache a block ahead. Without that a Zen 4 took 8 ns to unpack
// 32 weights of Q4_0 instead of 1, and 1.1 times as long for the tiles.
//
// On a Zen 4 every dot, product and fma in whole registers takes a cycle of the same units (integer products, too):
// beside eight dots two more, with minima or groups of 16 three. So 0.80 and 0.73 of what dots alone reach, 464 GFLOP/s
// a core, can be had. AVX2, one thread, the machine and shape of gemm.hpp, TFLOPS: Q4_0 0.18, Q4_K 0.17, Q5_0 0.17, Q6_K
// 0.13. Loops over the dwords of a group that are not unrolled: 0.85 of that.
#ifndef TE_GEMM_INT8_HPP
#define TE_GEMM_INT8_HPP

namespace {

// What both kinds of records share: sizes, for blocks of so many vectors of tokens.
template <class V, int vectors> struct int8_sizes {
    using floats = gemm_f32<V>;
    static constexpr int32_t L = V::lanes;
    static constexpr int32_t TB = vectors * L; // tokens per block
    static constexpr int32_t TP = floats::TP;  // tokens per pass
    static constexpr int32_t KC = 256;         // weights per pass; their TB activations stay in L1
    static constexpr int32_t NC = 128;         // rows per panel
    static constexpr int32_t LC = floats::LC;  // pitch of the sums

    static int32_t up(int32_t n, int32_t unit) { return floats::up(n, unit); }
    static int32_t least(int32_t a, int32_t b) { return floats::least(a, b); }
    static int32_t width(int32_t t, int32_t n_tok) { return n_tok - t >= TB ? TB : up(n_tok - t, L); }
};

// Records of 32.
template <class V, class D> struct int8_by_32 : int8_sizes<V, D::vectors> {
    using sizes = int8_sizes<V, D::vectors>;
    using sizes::KC, sizes::L, sizes::LC, sizes::TB, sizes::width;
    using f32 = typename V::f32;
    using i32 = typename V::i32;
    static constexpr int32_t RECORD = 32;         // of k
    static constexpr int32_t TOKEN = 32 + 4 + 16; // bytes of a token's share of a record

    static void half_sums(const int8_t *q, int32_t *sums) {
        const __m256i fours = _mm256_madd_epi16(
            _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i *)q)), _mm256_set1_epi16(1));
        const __m128i pairs = _mm_hadd_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
        _mm_storel_epi64((__m128i *)sums, _mm_hadd_epi32(pairs, pairs));
    }

    static void pack(const float *x, size_t ldx, const int32_t *row, int32_t n_tok, int32_t k, int32_t t0, int32_t t1,
                     void *px) {
        for (int32_t t = t0; t < t1; t += TB) {
            const int32_t w = width(t, n_tok);
            uint8_t *out = (uint8_t *)px + (size_t)t * (size_t)(k / 32) * TOKEN;
            for (int32_t k0 = 0; k0 < k; k0 += 32, out += w * TOKEN) {
                uint32_t *q = (uint32_t *)out;
                float *d = (float *)(q + 8 * w);
                int32_t *sums = (int32_t *)(d + w);
                float *scaled = (float *)(sums + 2 * w);
                for (int32_t i = 0; i < w; i++) {
                    quantised one;
                    uint32_t dwords[8] = {};
                    int32_t half[2] = {};
                    d[i] = 0;
                    if (t + i < n_tok) {
                        quantise32<V>(token_at(x, ldx, row, t + i) + k0, 0, one);
                        memcpy(dwords, one.q, 32);
                        d[i] = one.d[0];
                        half_sums(one.q, half);
                    }
                    for (int h = 0; h < 2; h++) sums[h * w + i] = half[h];
                    for (int h = 0; h < 2; h++) scaled[h * w + i] = d[i] * (float)half[h];
                    for (int j = 0; j < 8; j++) q[j * w + i] = dwords[j];
                }
            }
        }
    }

    struct panel_row {
        alignas(64) uint8_t q[KC];
        float d[KC / 16], m[KC / 16];
    };
    static void unpack(const byte_format &f, const uint8_t *p, int32_t kn, panel_row &to) {
        f.unpack(p, kn / f.block, to.q, to.d, to.m);
    }

    // Sums of MR rows and NV vectors of tokens over kn weights.
    template <int group, int run, bool minima, int MR, int NV>
    static void tile(const panel_row *w, const uint8_t *x, int32_t kn, int shift, float *c, bool first) {
        f32 acc[MR][NV];
        TE_UNROLL for (int r = 0; r < MR; r++) TE_UNROLL for (int v = 0; v < NV; v++) acc[r][v] =
            first ? V::zero() : V::load(c + r * LC + v * L);
        for (int32_t k = 0; k < kn; k += 32, x += NV * L * TOKEN) {
            const uint8_t *scales = x + 32 * NV * L, *sums = scales + 4 * NV * L, *scaled = sums + 8 * NV * L;
            f32 half[MR][NV]; // of the first group of 16, times its weights' scale
            TE_UNROLL for (int h = 0; h < 32 / group; h++) {
                const int32_t g = (k / group) + h;
                i32 total[MR][NV];
                TE_UNROLL for (int v = 0; v < NV; v++) {
                    i32 start = V::zero_i32();
                    if (!minima) {
                        i32 sum = V::load_bytes(sums + 4 * (h * NV + v) * L);
                        if (group == 32) sum = D::add(sum, V::load_bytes(sums + 4 * (NV + v) * L));
                        start = V::sub_i32(start, D::shift(sum, shift));
                    }
                    TE_UNROLL for (int r = 0; r < MR; r++) total[r][v] = start;
                }
                TE_UNROLL for (int part = 0; part < group / 4; part += run) {
                    typename D::sums s[MR][NV];
                    TE_UNROLL for (int j = 0; j < run; j++) {
                        i32 xv[NV];
                        TE_UNROLL for (int v = 0; v < NV; v++) xv[v] =
                            V::load_bytes(x + 4 * ((h * group / 4 + part + j) * NV + v) * L);
                        TE_UNROLL for (int r = 0; r < MR; r++) {
                            const i32 wv = D::broadcast(w[r].q + k + h * group + 4 * (part + j));
                            TE_UNROLL for (int v = 0; v < NV; v++) D::dot(total[r][v], s[r][v], j, wv, xv[v]);
                        }
                    }
                    TE_UNROLL for (int r = 0; r < MR; r++) TE_UNROLL for (int v = 0; v < NV; v++)
                        D::end(total[r][v], s[r][v]);
                }
                f32 sx[NV];
                if (minima) TE_UNROLL for (int v = 0; v < NV; v++) {
                        sx[v] = V::load(scaled + 4 * (h * NV + v) * L);
                        if (group == 32) sx[v] = V::add(sx[v], V::load(scaled + 4 * (NV + v) * L));
                    }
                TE_UNROLL for (int r = 0; r < MR; r++) {
                    const f32 dw = V::splat(w[r].d[g]);
                    TE_UNROLL for (int v = 0; v < NV; v++) {
                        const f32 dx = V::load(scales + 4 * v * L), sum = V::to_f32(total[r][v]);
                        if (minima) acc[r][v] = V::fma(sx[v], V::splat(w[r].m[g]), acc[r][v]);
                        if (group == 32)
                            acc[r][v] = V::fma(sum, V::mul(dx, dw), acc[r][v]);
                        else if (h == 0)
                            half[r][v] = V::mul(sum, dw);
                        else
                            acc[r][v] = V::fma(V::fma(sum, dw, half[r][v]), dx, acc[r][v]);
                    }
                }
            }
        }
        TE_UNROLL for (int r = 0; r < MR; r++) TE_UNROLL for (int v = 0; v < NV; v++)
            V::store(c + r * LC + v * L, acc[r][v]);
    }

    typedef void tile_fn(const panel_row *, const uint8_t *, int32_t, int, float *, bool);
    // of[NV - 1]; rows of each
    struct tiles {
        tile_fn *of[2];
        int32_t rows[2];
    };
    template <int group, int run, bool minima> static tiles tiles_for() {
        constexpr int n = run < group / 4 ? run : group / 4;
        return {{tile<group, n, minima, 8, 1>, tile<group, n, minima, 4, 2>}, {8, 4}};
    }
    static tiles choose(const byte_format &f) {
        if (f.group == 16 && f.bits == 6) return tiles_for<16, D::run(6), false>();
        if (f.group == 16) return f.offset ? tiles_for<16, D::run(4), false>() : tiles_for<16, D::run(4), true>();
        if (f.bits == 4) return f.offset ? tiles_for<32, D::run(4), false>() : tiles_for<32, D::run(4), true>();
        return f.offset ? tiles_for<32, D::run(5), false>() : tiles_for<32, D::run(5), true>();
    }
};

// The product; R has the records and the tiles.
template <class V, class R> struct gemm_int8 : R {
    using floats = gemm_f32<V>;
    using tiles = typename R::tiles;
    using panel_row = typename R::panel_row;
    using R::KC, R::L, R::LC, R::NC, R::RECORD, R::TB, R::TOKEN, R::TP, R::least, R::up, R::width;

    static size_t pack_bytes(int32_t n_tok, int32_t k) {
        return (size_t)up(n_tok, L) * (size_t)(up(k, RECORD) / RECORD) * TOKEN;
    }
    struct scratch {
        panel_row panel[NC];
        float sums[NC * LC];
    };
    static size_t scratch_bytes(int32_t n_tok, int32_t k) { // of gemm_f32, too: there is one scratch memory
        const size_t n = floats::scratch_bytes(n_tok, k);
        return n > sizeof(scratch) ? n : sizeof(scratch);
    }

    // Where a panel's weights are: k..k+kn-1 of rows r..r+rn-1.
    struct weights {
        const te_mat *m;
        const byte_format *f;
        int32_t r, rn, k, kn;
        const uint8_t *first; // of row r
        int32_t bytes;        // of a row's share
        weights(const te_mat *mat, const byte_format *format, int32_t row, int32_t last, int32_t from)
            : m(mat), f(format), r(row), rn(least(NC, last - row)), k(from), kn(least(KC, mat->cols - from)),
              first(row_at(mat, *format, row, from)), bytes(kn / format->block * format->bytes) {}
        const uint8_t *row(int32_t i) const { return first + (size_t)i * m->stride; }
        // Of the panel that comes after this one; without rows if there is none.
        weights next(int32_t last) const {
            return k + KC < m->cols ? weights(m, f, r, last, k + KC) : weights(m, f, least(r + NC, last), last, 0);
        }
        // n rows from the panel's i-th on, into the second cache (level 2) or the first (3). A function of nothing but
        // prefetches is dropped by gcc before it is inlined, unless it must be.
        template <int level> __attribute__((always_inline)) void fetch(int32_t i, int32_t n) const {
            for (const int32_t end = least(i + n, rn); i < end; i++) {
                const uint8_t *p = row(i), *last = p + bytes - 1;
                for (; p < last; p += 64) __builtin_prefetch(p, 0, level);
                __builtin_prefetch(last, 0, level);
            }
        }
        // The same. What a tile has beyond the matrix stays as it is: sums of it are not read.
        void unpack(int32_t i, int32_t n, panel_row *to) const {
            for (const int32_t end = least(i + n, rn); i < end; i++) R::unpack(*f, row(i), kn, to[i]);
        }
    };

    // The record of token t, the first of a block, and weight k of n_k.
    static const uint8_t *record(const void *px, int32_t t, int32_t n_tok, int32_t k, int32_t n_k) {
        return (const uint8_t *)px + (size_t)t * (size_t)(n_k / RECORD) * TOKEN +
               (size_t)(k / RECORD) * (size_t)(width(t, n_tok) * TOKEN);
    }

    // A panel times tokens t..t+tn-1, to s->sums; s->panel is filled on the way.
    static void panel_product(const weights &now, const weights &next, const tiles &run, int shift, const void *px,
                              int32_t t, int32_t tn, int32_t n_tok, scratch *s) {
        const int32_t n_k = now.m->cols;
        for (int32_t b = 0; b < tn; b += TB) {
            const bool last = b + TB >= tn;
            const int32_t w = width(t + b, n_tok), step = run.rows[w / L - 1], n_tiles = (now.rn + step - 1) / step;
            const uint8_t *x = record(px, t + b, n_tok, now.k, n_k);
            // Of the block that comes next, a part with each tile.
            const int32_t after = last ? t : t + b + TB, bytes = width(after, n_tok) * TOKEN * (KC / RECORD);
            const uint8_t *ahead = record(px, after, n_tok, last ? next.k : now.k, n_k);
            for (int32_t i = 0; i < now.rn; i += step) {
                if (b == 0) {
                    now.unpack(i, step, s->panel);
                    now.template fetch<3>(i + step, step);
                }
                if (last) next.template fetch<2>(i, step);
                for (int32_t j = 0; j < bytes / n_tiles; j += 64, ahead += 64) __builtin_prefetch(ahead, 0, 2);
                run.of[w / L - 1](s->panel + i, x, now.kn, shift, s->sums + i * LC + b, now.k == 0);
            }
        }
    }

    static void gemm(const te_mat *m, int32_t r0, int32_t r1, const void *px, int32_t n_tok, float *y, size_t ldy,
                     const float *bias, bool add, void *memory) {
        const byte_format &f = *byte_formats<V>::of(m->type);
        const tiles run = R::choose(f);
        const int shift = f.offset ? __builtin_ctz((unsigned)f.offset) : 0;
        scratch *s = (scratch *)memory;
        for (int32_t r = r0; r < r1; r += NC)
            for (int32_t t = 0; t < n_tok; t += TP) {
                const int32_t tn = least(TP, n_tok - t);
                for (int32_t k = 0; k < m->cols; k += KC) {
                    const weights now(m, &f, r, r1, k);
                    panel_product(now, now.next(r1), run, shift, px, t, tn, n_tok, s);
                }
                floats::to_y(s->sums, least(NC, r1 - r), tn, y + (size_t)t * ldy + r, ldy, bias ? bias + r : NULL, add);
            }
    }
};

// Way i of these products into a table that has those in floats, with which they share scratch memory.
template <class G, class D> void fill_int8(te_gemm_kernels *k, int i) {
    k->int8[i] = {D::types, D::by_token, G::pack_bytes, G::pack, G::gemm};
    for (int type = 0; type < TE_TYPE_LIMIT; type++)
        if (D::types >> type & 1) k->linear_min_tok[type] = D::min_tok(type);
    k->pack_unit = 48;
    k->scratch_bytes = G::scratch_bytes;
}

} // namespace
#endif
