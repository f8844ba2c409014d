// gemm_int8_k.hpp - gemm_int8.hpp's records and tiles for the K formats on AVX-512 VNNI, whose blocks of 256 weights have
// small integers as scales.
//
// Dots, products and fmas have two of a Zen 4's four units to themselves; conversions, sums and scaling by powers of two
// run on the others, beside them. So activations are rounded, per 32, with the step of the largest of 256 over a power of
// two: the largest power that keeps the 32 within 127 steps. A group's sum is scaled by that power, and its scale times
// the token's step need not be multiplied: nine instead of ten or eleven instructions for eight dots. A step is never
// larger than Q8_K's, one for 256, and at most twice that of 32 activations by themselves.
//
// Minima: of all groups together, 16-bit sums of activations times integer minima, two to a dot. These sums have a
// power of two of their own, that of the largest, so that they are off by 2^-15 of it at most (of a step, if it is less
// than one); rounding 32 activations may change their sum by 16 steps, 2^-8 of the largest that there is. One activation
// of 256 that is 10^5 times as large as the others leaves errors of 0.4 of Q8_K's or less; 10^6 times, in Q2_K, 1.2.
//
// On a Zen 4, tiles by themselves on data in L1: 0.80 of what dots alone reach, where gemm_int8.hpp's with minima had
// 0.72. Prompts of 512 tokens of Q4_K_M, two threads, in turns: 1.09 times as many tokens/s.
//
// A record, of 256 of k: [64][tokens] dwords of activations, [8] powers, [16] sums of 16, [4] pairs of sums of 32, [8]
// pairs of sums of 16, the power of these, the step.
#ifndef TE_GEMM_INT8_K_HPP
#define TE_GEMM_INT8_K_HPP

namespace {

struct int8_k : int8_sizes<vec_avx512, 3> {
    static constexpr bool by_token = false;
    static constexpr uint64_t types =
        1ull << TE_Q2_K | 1ull << TE_Q3_K | 1ull << TE_Q4_K | 1ull << TE_Q5_K | 1ull << TE_Q6_K | 1ull << TE_IQ4_XS;
    // Break-even with the row kernels, one thread, in records of 32: with 8 tokens Q4_K 1.2, Q6_K 0.7, with 12 1.7, 1.2.
    static constexpr uint16_t min_tok(int type) { return type == TE_Q6_K ? 11 : 8; }
    static constexpr int32_t RECORD = 256;
    // Dwords of a token's share, and where they begin.
    enum { Q = 0, POWER = 64, SUMS = 72, PAIRS = 88, HALVES = 92, PAIR_POWER = 100, STEP = 101, DWORDS = 102 };
    static constexpr int32_t TOKEN = 4 * DWORDS;

    // The largest of each of eight times 32 numbers, all >= 0, that lie in pairs of registers.
    static __m256 largest(const __m512 *v) {
        __m512 four[4], eight[2];
        for (int i = 0; i < 4; i++) {
            const __m512 a = _mm512_max_ps(v[4 * i], v[4 * i + 1]), b = _mm512_max_ps(v[4 * i + 2], v[4 * i + 3]);
            four[i] = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        }
        for (int i = 0; i < 2; i++) {
            const __m512d a = _mm512_castps_pd(four[2 * i]), b = _mm512_castps_pd(four[2 * i + 1]);
            eight[i] =
                _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
        }
        const __m512 m = _mm512_max_ps(_mm512_shuffle_f32x4(eight[0], eight[1], 0x44),
                                       _mm512_shuffle_f32x4(eight[0], eight[1], 0xee));
        const __m512 s = _mm512_max_ps(m, _mm512_shuffle_f32x4(m, m, 0xb1)); // lanes 0, 0, 1, 1
        return _mm512_castps512_ps256(_mm512_shuffle_f32x4(s, s, 0x08));
    }

    struct activations {
        alignas(64) uint32_t of[DWORDS];
    };

    // The 256 from x on.
    static void quantise(const float *x, activations &out) {
        const __m512i ones = _mm512_set1_epi8(1);
        __m512 v[16], trouble = _mm512_setzero_ps();
        for (int i = 0; i < 16; i++) {
            v[i] = _mm512_abs_ps(_mm512_loadu_ps(x + 16 * i));
            trouble = _mm512_fmadd_ps(v[i], _mm512_setzero_ps(), trouble); // 0 or not a number
        }
        memset(&out, 0, sizeof out);
        const __m256 of32 = largest(v);
        const float most = _mm512_reduce_max_ps(_mm512_insertf32x8(_mm512_castps256_ps512(of32), of32, 1));
        const float nan = _mm512_reduce_add_ps(trouble), step = (most > 1e-35f ? most / 127.0f : 0.0f) + nan;
        memcpy(&out.of[STEP], &step, 4);
        if (!(most > 1e-35f) || !(nan == 0.0f)) return;

        // The smallest power of two that is not below a group's share of the largest.
        const __m256 share = _mm256_div_ps(of32, _mm256_set1_ps(most));
        const __m256 above = _mm256_getmant_ps(share, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
        __m256 power = _mm256_getexp_ps(share);
        power = _mm256_mask_add_ps(power, _mm256_cmp_ps_mask(above, _mm256_set1_ps(1), _CMP_GT_OQ), power,
                                   _mm256_set1_ps(1));
        power = _mm256_max_ps(power, _mm256_set1_ps(-64));
        float powers[8];
        _mm256_storeu_ps(powers, power);
        memcpy(&out.of[POWER], powers, sizeof powers);

        const __m512 steps = _mm512_set1_ps(127.0f / most);
        __m512i lanes[4];
        for (int i = 0; i < 4; i++) {
            uint8_t *q = (uint8_t *)&out.of[Q] + 64 * i;
            for (int j = 0; j < 4; j++) {
                const __m512 n = _mm512_mul_ps(_mm512_loadu_ps(x + 64 * i + 16 * j), steps);
                vec_avx512::store_s8(q + 16 * j, _mm512_scalef_ps(n, _mm512_set1_ps(-powers[2 * i + j / 2])));
            }
            lanes[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, _mm512_loadu_si512(q)); // sums of four
        }
        add_sums(lanes, power, out);
    }

    // The sums of all groups from those of four activations: lane j of lanes[i] has group 4 * i + j of sixteen.
    static void add_sums(const __m512i *lanes, __m256 power, activations &out) {
        __m512i two[2];
        for (int i = 0; i < 2; i++)
            two[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(lanes[2 * i], lanes[2 * i + 1]),
                                      _mm512_unpackhi_epi32(lanes[2 * i], lanes[2 * i + 1]));
        const __m512i mixed =
            _mm512_add_epi32(_mm512_unpacklo_epi64(two[0], two[1]), _mm512_unpackhi_epi64(two[0], two[1]));
        const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512i sums = _mm512_permutexvar_epi32(in_order, mixed);
        _mm512_storeu_si512(&out.of[SUMS], sums);

        const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        const __m512 of16 =
            _mm512_scalef_ps(_mm512_cvtepi32_ps(sums), _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(power)));
        const __m512 of32 = _mm512_add_ps(of16, _mm512_permute_ps(of16, 0xb1)); // each twice
        const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(of16), _mm512_abs_ps(of32)));
        const __m128 up = _mm_sub_ss(_mm_set_ss(14), _mm_getexp_ss(_mm_set_ss(1), _mm_set_ss(most > 1 ? most : 1)));
        const __m512 by = _mm512_broadcastss_ps(up);
        const float down = -_mm_cvtss_f32(up);
        memcpy(&out.of[PAIR_POWER], &down, 4);
        const __m256i halves = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_scalef_ps(of16, by)));
        _mm256_storeu_si256((__m256i *)&out.of[HALVES], halves);
        const __m512i wholes = _mm512_cvtps_epi32(_mm512_scalef_ps(of32, by));
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
        const __m256i pairs = _mm512_cvtsepi32_epi16(_mm512_permutexvar_epi32(even, wholes));
        _mm_storeu_si128((__m128i *)&out.of[PAIRS], _mm256_castsi256_si128(pairs));
    }

    static void pack(const float *x, size_t ldx, const int32_t *row, int32_t n_tok, int32_t k, int32_t t0, int32_t t1,
                     void *px) {
        for (int32_t t = t0; t < t1; t += TB) {
            const int32_t w = width(t, n_tok);
            uint32_t *out = (uint32_t *)px + (size_t)t * (size_t)(k / RECORD) * DWORDS;
            for (int32_t k0 = 0; k0 < k; k0 += RECORD, out += w * DWORDS)
                for (int32_t i = 0; i < w; i++) {
                    activations one = {};
                    if (t + i < n_tok) quantise(token_at(x, ldx, row, t + i) + k0, one);
                    for (int j = 0; j < DWORDS; j++) out[j * w + i] = one.of[j];
                }
        }
    }

    struct panel_row {
        alignas(64) uint8_t q[KC];
        float d[16], m[16]; // m: not read
        int16_t min[16];
        float min_scale;
    };
    static void unpack(const byte_format &f, const uint8_t *p, int32_t, panel_row &to) {
        f.unpack(p, 1, to.q, to.d, to.m);
        if (f.minima) f.minima(p, to.min, &to.min_scale);
    }

    static __m512i dword(const void *p) {
        int32_t w;
        memcpy(&w, p, 4);
        return _mm512_set1_epi32(w);
    }

    // Sums of MR rows and NV vectors of tokens over 256 weights.
    template <int group, bool minima, int MR, int NV>
    static void tile(const panel_row *w, const uint8_t *x, int32_t, int shift, float *c, bool first) {
        const auto at = [x](int i, int v) { return x + (size_t)(i * NV + v) * 64; }; // dword i of vector v
        const auto floats_at = [at](int i, int v) { return _mm512_loadu_ps(at(i, v)); };
        __m512 acc[MR][NV];
        TE_UNROLL for (int r = 0; r < MR; r++) TE_UNROLL for (int v = 0; v < NV; v++) acc[r][v] = _mm512_setzero_ps();
        if (minima) {
            __m512i total[MR][NV];
            TE_UNROLL for (int r = 0; r < MR; r++) TE_UNROLL for (int v = 0; v < NV; v++) total[r][v] =
                _mm512_setzero_si512();
            TE_UNROLL for (int g = 0; g < 256 / group / 2; g++) TE_UNROLL for (int r = 0; r < MR; r++) {
                const __m512i min = dword(w[r].min + 2 * g);
                TE_UNROLL for (int v = 0; v < NV; v++) total[r][v] = _mm512_dpwssd_epi32(
                    total[r][v], min, _mm512_loadu_si512(at((group == 32 ? PAIRS : HALVES) + g, v)));
            }
            TE_UNROLL for (int r = 0; r < MR; r++) {
                const __m512 scale = _mm512_set1_ps(w[r].min_scale);
                TE_UNROLL for (int v = 0; v < NV; v++) acc[r][v] =
                    _mm512_mul_ps(_mm512_scalef_ps(_mm512_cvtepi32_ps(total[r][v]), floats_at(PAIR_POWER, v)), scale);
            }
        }
        for (int u = 0; u < 8; u++) TE_UNROLL for (int h = 0; h < 32 / group; h++) {
                __m512i total[MR][NV];
                TE_UNROLL for (int v = 0; v < NV; v++) {
                    __m512i start = _mm512_setzero_si512();
                    if (!minima) {
                        __m512i sum = _mm512_loadu_si512(at(SUMS + 2 * u + h, v));
                        if (group == 32) sum = _mm512_add_epi32(sum, _mm512_loadu_si512(at(SUMS + 2 * u + 1, v)));
                        start = _mm512_sub_epi32(start, _mm512_sll_epi32(sum, _mm_cvtsi32_si128(shift)));
                    }
                    TE_UNROLL for (int r = 0; r < MR; r++) total[r][v] = start;
                }
                TE_UNROLL for (int j = 0; j < group / 4; j++) {
                    const int i = 8 * u + h * (group / 4) + j;
                    __m512i xv[NV];
                    TE_UNROLL for (int v = 0; v < NV; v++) xv[v] = _mm512_loadu_si512(at(i, v));
                    TE_UNROLL for (int r = 0; r < MR; r++) {
                        const __m512i wv = dword(w[r].q + 4 * i);
                        TE_UNROLL for (int v = 0; v < NV; v++) total[r][v] =
                            _mm512_dpbusd_epi32(total[r][v], wv, xv[v]);
                    }
                }
                TE_UNROLL for (int r = 0; r < MR; r++) {
                    const __m512 d = _mm512_set1_ps(w[r].d[u * (32 / group) + h]);
                    TE_UNROLL for (int v = 0; v < NV; v++) acc[r][v] = _mm512_fmadd_ps(
                        _mm512_scalef_ps(_mm512_cvtepi32_ps(total[r][v]), floats_at(POWER + u, v)), d, acc[r][v]);
                }
            }
        TE_UNROLL for (int r = 0; r < MR; r++) TE_UNROLL for (int v = 0; v < NV; v++) {
            float *sum = c + r * LC + v * L;
            const __m512 before = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sum);
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(acc[r][v], floats_at(STEP, v), before));
        }
    }

    typedef void tile_fn(const panel_row *, const uint8_t *, int32_t, int, float *, bool);
    // of[NV - 1]; rows of each
    struct tiles {
        tile_fn *of[3];
        int32_t rows[3];
    };
    template <int group, bool minima> static tiles tiles_for() {
        return {{tile<group, minima, 8, 1>, tile<group, minima, 4, 2>, tile<group, minima, 4, 3>}, {8, 4, 4}};
    }
    static tiles choose(const byte_format &f) {
        if (f.group == 16) return f.offset ? tiles_for<16, false>() : tiles_for<16, true>();
        return f.offset ? tiles_for<32, false>() : tiles_for<32, true>();
    }
};

} // namespace
#endif
