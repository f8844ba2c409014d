// gemm_int8.hpp - products for many tokens in 8-bit integers, for the block formats: te_gemm_kernels' second set.
//
// Both sides are integers with a scale per group: activations are rounded to int8 per 32, as for the row kernels, and
// weights are unpacked a panel at a time (unpack.hpp), to unsigned bytes, since unsigned by signed is what the
// instructions multiply, four products to a 32-bit lane. Lanes are tokens, a dword of four weights is broadcast. A
// group's integer sum is exact and becomes a float times both scales; the weights' offset, or minimum, is made up for
// with the sum of the group's activations, which packing has made.
//
// Activations lie in blocks of TB tokens, per 32 of k one record: [8][tokens] dwords, scales, sums of either half.
//
// What D adds to V: dot(acc, weights, x) with acc of type sums, and total(acc, start) as 32-bit integers; `run` says
// how many dots an acc can take for weights of so many bits.
//
// One thread, the machine and shape of gemm.hpp, TFLOPS. AVX-512, where one instruction a cycle makes 0.42: Q4_0
// 0.27-0.31, Q8_0 0.25-0.29, Q4_K 0.25-0.30, Q6_K 0.22-0.24. AVX2: Q4_0 0.18, Q4_K 0.17, Q5_0 0.17, Q6_K 0.13. Loops over
// the dwords of a group that are not unrolled: AVX-512 0.85 of that.
#ifndef TE_GEMM_INT8_HPP
#define TE_GEMM_INT8_HPP

namespace {

template <class V, class D> struct gemm_int8 {
    using f32 = typename V::f32;
    using i32 = typename V::i32;
    using floats = gemm_f32<V>;
    static constexpr int32_t L = V::lanes;
    static constexpr int32_t TB = D::vectors * L; // tokens per block
    static constexpr int32_t TP = floats::TP;     // tokens per pass
    static constexpr int32_t KC = 256;            // weights per pass; their TB activations stay in L1
    static constexpr int32_t NC = 128;            // rows per panel
    static constexpr int32_t LC = floats::LC;     // pitch of the sums
    static constexpr int32_t TOKEN = 32 + 4 + 8;  // bytes of a token's share of a record

    static int32_t up(int32_t n, int32_t unit) { return floats::up(n, unit); }
    static int32_t least(int32_t a, int32_t b) { return floats::least(a, b); }
    static int32_t width(int32_t t, int32_t n_tok) { return n_tok - t >= TB ? TB : up(n_tok - t, L); }

    static size_t pack_bytes(int32_t n_tok, int32_t k) {
        return (size_t)up(n_tok, L) * (size_t)(up(k, 32) / 32) * TOKEN;
    }

    static void pack(const float *x, size_t ldx, int32_t n_tok, int32_t k, int32_t t0, int32_t t1, void *px) {
        for (int32_t t = t0; t < t1; t += TB) {
            const int32_t w = width(t, n_tok);
            uint8_t *out = (uint8_t *)px + (size_t)t * (size_t)(k / 32) * TOKEN;
            for (int32_t k0 = 0; k0 < k; k0 += 32, out += w * TOKEN) {
                uint32_t *q = (uint32_t *)out;
                float *d = (float *)(q + 8 * w);
                int32_t *sums = (int32_t *)(d + w);
                for (int32_t i = 0; i < w; i++) {
                    quantised one;
                    uint32_t dwords[8] = {};
                    d[i] = 0;
                    sums[i] = sums[w + i] = 0;
                    if (t + i < n_tok) {
                        quantise32<V>(x + (size_t)(t + i) * ldx + k0, 0, one);
                        memcpy(dwords, one.q, 32);
                        d[i] = one.d[0];
                        for (int j = 0; j < 16; j++) sums[i] += one.q[j];
                        sums[w + i] = one.sum[0] - sums[i];
                    }
                    for (int j = 0; j < 8; j++) q[j * w + i] = dwords[j];
                }
            }
        }
    }

    struct panel_row {
        alignas(64) uint8_t q[KC];
        float d[KC / 16], m[KC / 16];
    };
    struct scratch {
        panel_row panel[NC];
        float sums[NC * LC];
    };
    static size_t scratch_bytes(int32_t n_tok, int32_t k) { // of gemm_f32, too: there is one scratch memory
        const size_t n = floats::scratch_bytes(n_tok, k);
        return n > sizeof(scratch) ? n : sizeof(scratch);
    }

    // Sums of MR rows and NV vectors of tokens over kn weights.
    template <int group, int run, bool minima, int MR, int NV>
    static void tile(const panel_row *w, const uint8_t *x, int32_t kn, int shift, float *c, bool first) {
        f32 acc[MR][NV];
        TE_UNROLL for (int r = 0; r < MR; r++) TE_UNROLL for (int v = 0; v < NV; v++) acc[r][v] =
            first ? V::zero() : V::load(c + r * LC + v * L);
        for (int32_t k = 0; k < kn; k += 32, x += NV * L * TOKEN) {
            const uint8_t *scales = x + 32 * NV * L, *sums = scales + 4 * NV * L;
            TE_UNROLL for (int h = 0; h < 32 / group; h++) {
                const int32_t g = (k / group) + h;
                i32 start[NV];
                TE_UNROLL for (int v = 0; v < NV; v++) {
                    start[v] = V::load_bytes(sums + 4 * (h * NV + v) * L);
                    if (group == 32) start[v] = D::add(start[v], V::load_bytes(sums + 4 * (NV + v) * L));
                }
                i32 total[MR][NV];
                TE_UNROLL for (int part = 0; part < group / 4; part += run) {
                    typename D::sums s[MR][NV];
                    TE_UNROLL for (int j = 0; j < run; j++) {
                        i32 xv[NV];
                        TE_UNROLL for (int v = 0; v < NV; v++) xv[v] =
                            V::load_bytes(x + 4 * ((h * group / 4 + part + j) * NV + v) * L);
                        TE_UNROLL for (int r = 0; r < MR; r++) {
                            const i32 wv = D::broadcast(w[r].q + k + h * group + 4 * (part + j));
                            TE_UNROLL for (int v = 0; v < NV; v++) s[r][v] =
                                j == 0 ? D::dot(wv, xv[v]) : D::dot(s[r][v], wv, xv[v]);
                        }
                    }
                    TE_UNROLL for (int r = 0; r < MR; r++) TE_UNROLL for (int v = 0; v < NV; v++) total[r][v] =
                        part == 0 ? D::total(s[r][v]) : D::add(total[r][v], D::total(s[r][v]));
                }
                TE_UNROLL for (int v = 0; v < NV; v++) {
                    const f32 dx = V::load(scales + 4 * v * L);
                    if (minima) {
                        const f32 sx = V::mul(V::to_f32(start[v]), dx);
                        TE_UNROLL for (int r = 0; r < MR; r++) {
                            acc[r][v] = V::fma(V::to_f32(total[r][v]), V::mul(dx, V::splat(w[r].d[g])), acc[r][v]);
                            acc[r][v] = V::fma(sx, V::splat(w[r].m[g]), acc[r][v]);
                        }
                    } else {
                        const i32 off = D::shift(start[v], shift);
                        TE_UNROLL for (int r = 0; r < MR; r++) acc[r][v] =
                            V::fma(V::to_f32(V::sub_i32(total[r][v], off)), V::mul(dx, V::splat(w[r].d[g])), acc[r][v]);
                    }
                }
            }
        }
        TE_UNROLL for (int r = 0; r < MR; r++) TE_UNROLL for (int v = 0; v < NV; v++)
            V::store(c + r * LC + v * L, acc[r][v]);
    }

    typedef void tile_fn(const panel_row *, const uint8_t *, int32_t, int, float *, bool);
    // tiles[NV - 1]; rows of each
    struct tiles {
        tile_fn *of[3];
    };
    static constexpr int32_t rows_of(int32_t n_vectors) { return n_vectors == 1 ? 8 : 4; }
    template <int group, int run, bool minima> static tiles tiles_for() {
        constexpr int n = run < group / 4 ? run : group / 4;
        tiles t = {{tile<group, n, minima, 8, 1>, tile<group, n, minima, 4, 2>, NULL}};
        if constexpr (D::vectors == 3) t.of[2] = tile<group, n, minima, 4, 3>;
        return t;
    }
    static tiles choose(const byte_format &f) {
        if (f.group == 16 && f.bits == 6) return tiles_for<16, D::run(6), false>();
        if (f.group == 16) return f.offset ? tiles_for<16, D::run(4), false>() : tiles_for<16, D::run(4), true>();
        if constexpr (D::run(8) != 0)
            if (f.bits == 8) return tiles_for<32, D::run(8), false>();
        if (f.bits == 4) return f.offset ? tiles_for<32, D::run(4), false>() : tiles_for<32, D::run(4), true>();
        return f.offset ? tiles_for<32, D::run(5), false>() : tiles_for<32, D::run(5), true>();
    }

    static void gemm(const te_mat *m, int32_t r0, int32_t r1, const void *px, int32_t n_tok, float *y, size_t ldy,
                     const float *bias, bool add, void *memory) {
        const byte_format &f = *byte_formats<V>::of(m->type);
        const tiles run = choose(f);
        const int shift = f.offset ? __builtin_ctz((unsigned)f.offset) : 0;
        scratch *s = (scratch *)memory;
        const int32_t k = m->cols;
        for (int32_t r = r0; r < r1; r += NC)
            for (int32_t t = 0; t < n_tok; t += TP) {
                const int32_t rn = least(NC, r1 - r), tn = least(TP, n_tok - t);
                for (int32_t k0 = 0; k0 < k; k0 += KC) {
                    const int32_t kn = least(KC, k - k0);
                    for (int32_t i = 0; i < rn; i++) {
                        panel_row &p = s->panel[i];
                        f.unpack(row_at(m, f, r + i, k0), kn / f.block, p.q, p.d, p.m);
                    }
                    if (rn % 8) memset((void *)(s->panel + rn), 0, sizeof(panel_row) * (size_t)(8 - rn % 8));
                    for (int32_t b = 0; b < tn; b += TB) {
                        const int32_t w = width(t + b, n_tok), step = rows_of(w / L);
                        const uint8_t *x = (const uint8_t *)px + (size_t)(t + b) * (size_t)(k / 32) * TOKEN +
                                           (size_t)(k0 / 32) * (size_t)(w * TOKEN);
                        for (int32_t i = 0; i < rn; i += step)
                            run.of[w / L - 1](s->panel + i, x, kn, shift, s->sums + i * LC + b, k0 == 0);
                    }
                }
                floats::to_y(s->sums, rn, tn, y + (size_t)t * ldy + r, ldy, bias ? bias + r : NULL, add);
            }
    }
};

// The products in floats, and those in integers.
template <class V, class D> constexpr te_gemm_kernels gemm_table_int8() {
    using G = gemm_int8<V, D>;
    te_gemm_kernels k = gemm_table<V>();
    k.int8_types = D::types;
    for (int i = 0; i < TE_TYPE_LIMIT; i++)
        if (D::types >> i & 1) k.linear_min_tok[i] = D::min_tok(i);
    k.pack_unit = 48;
    k.scratch_bytes = G::scratch_bytes;
    k.int8_pack_bytes = G::pack_bytes;
    k.int8_pack = G::pack;
    k.int8_gemm = G::gemm;
    return k;
}

} // namespace
#endif
