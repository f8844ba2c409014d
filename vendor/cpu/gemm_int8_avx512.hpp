// gemm_int8_avx512.hpp - products for many tokens in 8-bit integers on AVX-512 VNNI, for the formats of 32 weights.
//
// Lanes are rows, a dword of four activations is broadcast, so that no lane is left empty whatever the number of tokens:
// a mixture's expert has few of them. The price is a transposition of every panel, 16 rows by one dword each, less than
// one shuffle for 32 weights where codes have four bits and are transposed before they are widened.
//
// A panel is 64 rows by 256 weights (16 KiB), unpacked just before its first use; meanwhile the rows of the next one come
// from memory. Six tokens times two vectors of rows, or up to three times four, stay in registers over its depth; between
// panels their sums stand in scratch, where a token's 64 rows lie side by side.
//
// Prompts of a mixture in Q4_0 (128 experts of 768, eight a token), two threads of a Zen 5, in turns with tokens in lanes:
// 128 tokens 1.41 times as fast, 512 tokens 1.16. The next panel fetched at each step of unpacking and of the tiles instead
// of all while one is unpacked: 1.07 and 1.03; the next 64 whole rows instead of the panel's pieces: less.
#ifndef TE_GEMM_INT8_AVX512_HPP
#define TE_GEMM_INT8_AVX512_HPP

namespace {

struct int8_avx512 {
    static constexpr uint64_t types = 1ull << TE_Q4_0 | 1ull << TE_Q4_1 | 1ull << TE_Q5_0 | 1ull << TE_Q5_1 |
                                      1ull << TE_Q8_0 | 1ull << TE_IQ4_NL | 1ull << TE_MXFP4;
    static constexpr bool by_token = true;
    // Break-even with the row kernels, one thread: with 8 tokens Q8_0 1.2, Q4_0 0.9, with 12 1.7, 1.5.
    static constexpr uint16_t min_tok(int type) { return type == TE_Q4_0 ? 9 : 8; }
    using V = vec_avx512;
    using floats = gemm_f32<V>;
    static constexpr int32_t KC = 256; // weights of a panel
    static constexpr int32_t NR = 64;  // rows
    static constexpr int32_t TP = 528; // tokens per pass: their sums stay in L2
    static constexpr int32_t NT = 6;   // tokens of a tile

    static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

    // 32 activations of a token; a token's follow each other.
    struct record {
        int8_t q[32];
        float d;
        int32_t minus_sum; // of q
        float sum;         // d times that of q
        int32_t unused;
    };

    static size_t pack_bytes(int32_t n_tok, int32_t k) {
        return (size_t)n_tok * (size_t)((k + 31) / 32) * sizeof(record);
    }

    static void pack(const float *x, size_t ldx, const int32_t *row, int32_t, int32_t k, int32_t t0, int32_t t1,
                     void *px) {
        for (int32_t t = t0; t < t1; t++) {
            const float *in = token_at(x, ldx, row, t);
            record *out = (record *)px + (size_t)t * (size_t)(k / 32);
            for (int32_t i = 0; i < k / 32; i++) {
                quantised one;
                quantise32<V>(in + 32 * i, 0, one);
                memcpy(out[i].q, one.q, 32);
                out[i].d = one.d[0];
                out[i].minus_sum = -one.sum[0];
                out[i].sum = one.d[0] * (float)one.sum[0];
                out[i].unused = 0;
            }
        }
    }

    struct panel {
        alignas(64) uint8_t q[KC / 4][NR][4];
        alignas(64) float d[KC / 32][NR], m[KC / 32][NR];
    };
    struct scratch {
        panel p;
        alignas(64) uint8_t q[16][KC]; // rows on their way to the panel
        float d[16][KC / 32], m[16][KC / 32];
        alignas(64) float sums[TP][NR];
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
            : m(mat), f(format), r(row), rn(least(NR, last - row)), k(from), kn(least(KC, mat->cols - from)),
              first(row_at(mat, *format, row, from)), bytes(kn / 32 * format->bytes) {}
        // Of the panel that comes after this one; without rows if there is none.
        weights next(int32_t last) const {
            return k + KC < m->cols ? weights(m, f, r, last, k + KC) : weights(m, f, least(r + NR, last), last, 0);
        }
        const uint8_t *row(int32_t i) const { return first + (size_t)i * m->stride; }
    };

    // Brings the rows of the panel that comes after this one from memory, some at each of so many steps, since only so many
    // lines can be on their way at a time.
    struct ahead {
        const uint8_t *row;
        size_t stride;
        int32_t bytes, n, steps, credit;
        __attribute__((always_inline)) void step() {
            for (credit += n; credit >= steps; credit -= steps, row += stride) {
                const uint8_t *p = row, *end = row + bytes - 1;
                for (; p < end; p += 64) __builtin_prefetch(p, 0, 2);
                __builtin_prefetch(end, 0, 2);
            }
        }
    };

    // 16 x 4 dwords: lane i of out[j] is dword j of row[i].
    static void transpose(const uint8_t *const *row, size_t at, __m512i out[4]) {
        __m512i v[4];
        for (int i = 0; i < 4; i++) {
            v[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(row[i] + at)));
            v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x00f0, _mm_loadu_si128((const __m128i *)(row[i + 4] + at)));
            v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x0f00, _mm_loadu_si128((const __m128i *)(row[i + 8] + at)));
            v[i] = _mm512_mask_broadcast_i32x4(v[i], 0xf000, _mm_loadu_si128((const __m128i *)(row[i + 12] + at)));
        }
        const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
        const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
        out[0] = _mm512_unpacklo_epi64(a, c);
        out[1] = _mm512_unpackhi_epi64(a, c);
        out[2] = _mm512_unpacklo_epi64(b, d);
        out[3] = _mm512_unpackhi_epi64(b, d);
    }

    // Rows i..i+15 of the panel, any format. Beyond the matrix its last row stands for others.
    static void unpack_any(const weights &now, ahead &next, int32_t i, __m512i, scratch *s) {
        const uint8_t *row[16];
        const byte_format &f = *now.f;
        const int32_t n = now.kn / 32;
        for (int32_t l = 0; l < 16; l++) {
            row[l] = s->q[l];
            f.unpack(now.row(least(i + l, now.rn - 1)), n, s->q[l], s->d[l], s->m[l]);
            if (l < n) next.step();
        }
        for (int32_t k = 0; k < 8 * n; k += 4) {
            __m512i v[4];
            transpose(row, 4 * (size_t)k, v);
            for (int32_t j = 0; j < 4; j++) _mm512_store_si512(s->p.q[k + j][i], v[j]);
        }
        for (int32_t g = 0; g < n; g++)
            for (int32_t l = 0; l < 16; l++) s->p.d[g][i + l] = s->d[l][g];
        if (f.offset) return;
        for (int32_t g = 0; g < n; g++)
            for (int32_t l = 0; l < 16; l++) s->p.m[g][i + l] = s->m[l][g];
    }

    // The same where a block is a scale and 16 bytes of two codes each. values: of the 16 codes, four times.
    template <class B>
    static void unpack_codes(const weights &now, ahead &next, int32_t i, __m512i values, scratch *s) {
        constexpr size_t scale = sizeof(B) - 16;
        const __m512i low = _mm512_set1_epi8(15);
        const uint8_t *row[16];
        const int32_t n = now.kn / 32;
        for (int32_t l = 0; l < 16; l++) row[l] = now.row(least(i + l, now.rn - 1));
        alignas(32) uint16_t half[KC / 32][16];
        for (int32_t g = 0; g < n; g++) {
            __m512i v[4];
            const size_t at = (size_t)g * sizeof(B);
            transpose(row, at + scale, v);
            for (int32_t j = 0; j < 4; j++) {
                const __m512i first = _mm512_and_si512(v[j], low),
                              second = _mm512_and_si512(_mm512_srli_epi16(v[j], 4), low);
                _mm512_store_si512(s->p.q[8 * g + j][i], _mm512_shuffle_epi8(values, first));
                _mm512_store_si512(s->p.q[8 * g + 4 + j][i], _mm512_shuffle_epi8(values, second));
            }
            for (int32_t l = 0; l < 16; l++)
                if (scale == 2)
                    memcpy(&half[g][l], row[l] + at, 2);
                else
                    s->p.d[g][i + l] = te_half_e8m0(row[l][at]);
            next.step();
        }
        for (int32_t g = 0; scale == 2 && g < n; g++) _mm512_store_ps(s->p.d[g] + i, V::load_f16(half[g]));
    }

    typedef void unpack_fn(const weights &, ahead &, int32_t, __m512i, scratch *);
    static unpack_fn *unpack_of(int32_t type) {
        if (type == TE_Q4_0) return unpack_codes<te_block_q4_0>;
        if (type == TE_IQ4_NL) return unpack_codes<te_block_iq4_nl>;
        return type == TE_MXFP4 ? unpack_codes<te_block_mxfp4> : unpack_any;
    }
    // What the codes 0..15 of such a format stand for.
    static __m512i values_of(const byte_format &f) {
        uint8_t block[64] = {}, q[32];
        float d, m;
        for (int32_t i = 0; i < 16; i++) block[f.bytes - 16 + i] = (uint8_t)i;
        f.unpack(block, 1, q, &d, &m);
        return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)q));
    }

    // Sums of N tokens and R vectors of the panel's rows, from row i on. x: of the first token, ldx records apart.
    template <bool minima, int R, int N>
    static void tile(const panel &p, int32_t i, const record *x, size_t ldx, int32_t kn, int shift, float (*sums)[NR],
                     bool first, ahead &next) {
        __m512 acc[N][R];
        TE_UNROLL for (int t = 0; t < N; t++) TE_UNROLL for (int r = 0; r < R; r++) acc[t][r] =
            first ? _mm512_setzero_ps() : _mm512_load_ps(sums[t] + i + 16 * r);
        const __m128i by = _mm_cvtsi32_si128(shift);
        for (int32_t g = 0; g < kn / 32; g++, x++) {
            next.step();
            __m512i total[N][R];
            TE_UNROLL for (int t = 0; t < N; t++) {
                const __m512i start =
                    minima ? _mm512_setzero_si512() : _mm512_sll_epi32(_mm512_set1_epi32(x[t * ldx].minus_sum), by);
                TE_UNROLL for (int r = 0; r < R; r++) total[t][r] = start;
            }
            TE_UNROLL for (int j = 0; j < 8; j++) {
                __m512i w[R];
                TE_UNROLL for (int r = 0; r < R; r++) w[r] = _mm512_load_si512(p.q[8 * g + j][i + 16 * r]);
                TE_UNROLL for (int t = 0; t < N; t++) {
                    int32_t four;
                    memcpy(&four, x[t * ldx].q + 4 * j, 4);
                    const __m512i v = _mm512_set1_epi32(four);
                    TE_UNROLL for (int r = 0; r < R; r++) total[t][r] = _mm512_dpbusd_epi32(total[t][r], w[r], v);
                }
            }
            __m512 d[R];
            TE_UNROLL for (int r = 0; r < R; r++) d[r] = _mm512_load_ps(p.d[g] + i + 16 * r);
            TE_UNROLL for (int t = 0; t < N; t++) {
                const __m512 dx = _mm512_set1_ps(x[t * ldx].d);
                TE_UNROLL for (int r = 0; r < R; r++) {
                    if (minima)
                        acc[t][r] = _mm512_fmadd_ps(_mm512_set1_ps(x[t * ldx].sum), _mm512_load_ps(p.m[g] + i + 16 * r),
                                                    acc[t][r]);
                    acc[t][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[t][r]), _mm512_mul_ps(dx, d[r]), acc[t][r]);
                }
            }
        }
        TE_UNROLL for (int t = 0; t < N; t++) TE_UNROLL for (int r = 0; r < R; r++)
            _mm512_store_ps(sums[t] + i + 16 * r, acc[t][r]);
    }

    typedef void tile_fn(const panel &, int32_t, const record *, size_t, int32_t, int, float (*)[NR], bool, ahead &);
    template <bool minima> static tile_fn *tile_of(int32_t n) {
        static constexpr tile_fn *of[NT] = {tile<minima, 4, 1>, tile<minima, 4, 2>, tile<minima, 4, 3>,
                                            tile<minima, 2, 4>, tile<minima, 2, 5>, tile<minima, 2, 6>};
        return of[n - 1];
    }

    // y[t][o] (+)= bias[o] + sums[t][o]
    static void to_y(const float (*sums)[NR], int32_t on, int32_t tn, float *y, size_t ldy, const float *bias,
                     bool add) {
        for (int32_t t = 0; t < tn; t++, y += ldy)
            for (int32_t o = 0; o < on; o += 16) {
                const __mmask16 mask = V::first(least(16, on - o));
                __m512 sum = _mm512_load_ps(sums[t] + o);
                if (bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, bias + o));
                if (add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, y + o));
                _mm512_mask_storeu_ps(y + o, mask, sum);
            }
    }

    // Calls of ahead's step while a panel is unpacked and multiplied with n tokens.
    static int32_t steps(const weights &now, int32_t n) {
        const int32_t rest = n % NT, halves = (now.rn + 31) / 32, whole = (now.rn + 63) / 64;
        const int32_t tiles = n / NT * halves + (rest > 3 ? halves : rest > 0 ? whole : 0);
        return ((now.rn + 15) / 16 + tiles) * (now.kn / 32);
    }

    static void gemm(const te_mat *m, int32_t r0, int32_t r1, const void *px, int32_t n_tok, float *y, size_t ldy,
                     const float *bias, bool add, void *memory) {
        const byte_format &f = *byte_formats<V>::of(m->type);
        const int shift = f.offset ? __builtin_ctz((unsigned)f.offset) : 0;
        const size_t ldx = (size_t)m->cols / 32;
        unpack_fn *unpack = unpack_of(m->type);
        const __m512i values = values_of(f);
        scratch *s = (scratch *)memory;
        for (int32_t r = r0; r < r1; r += NR)
            for (int32_t t0 = 0; t0 < n_tok; t0 += TP) {
                const int32_t tn = least(TP, n_tok - t0);
                for (int32_t k = 0; k < m->cols; k += KC) {
                    const weights now(m, &f, r, r1, k), then = now.next(r1);
                    ahead next = {then.first, m->stride, then.bytes, then.rn, steps(now, tn), 0};
                    for (int32_t i = 0; i < now.rn; i += 16) unpack(now, next, i, values, s);
                    const record *x = (const record *)px + (size_t)t0 * ldx + k / 32;
                    for (int32_t t = 0, n; t < tn; t += n) {
                        n = least(NT, tn - t);
                        tile_fn *run = f.offset ? tile_of<false>(n) : tile_of<true>(n);
                        for (int32_t i = 0; i < now.rn; i += n <= 3 ? 64 : 32)
                            run(s->p, i, x + (size_t)t * ldx, ldx, now.kn, shift, s->sums + t, k == 0, next);
                    }
                }
                to_y(s->sums, least(NR, r1 - r), tn, y + (size_t)t0 * ldy + r, ldy, bias ? bias + r : NULL, add);
            }
    }
};
using isa_int8 = int8_avx512;
using isa_gemm_int8 = int8_avx512;
} // namespace

#endif
