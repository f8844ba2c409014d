// vec_avx512.hpp - the vector vocabulary on AVX-512 F, BW, VL, DQ and VNNI, in whole 512-bit registers. What each word
// means: vec_scalar.hpp.
namespace {
struct vec_avx512 {
    static constexpr int lanes = 16;
    static constexpr bool q4_0_by_blocks = true; // whether rows_q4_0, rows_q8_0 and rows_units_wide have their words
    static constexpr int abreast = 8;            // tokens, in rows_batch.hpp
    static constexpr int rows = 4;               // that one pass over axpy's sums adds
    using f32 = __m512;
    using i32 = __m512i;
    using w16 = __m512;

    // floats
    static f32 zero() { return _mm512_setzero_ps(); }
    static f32 splat(float a) { return _mm512_set1_ps(a); }
    static f32 load(const void *p) { return _mm512_loadu_ps(p); }
    static void store(void *p, f32 a) { _mm512_storeu_ps(p, a); }
    static __mmask16 first(int n) { return (__mmask16)((1u << n) - 1); }
    static f32 load_part(const void *p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
    static void store_part(void *p, f32 a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
    static f32 add(f32 a, f32 b) { return _mm512_add_ps(a, b); }
    static f32 sub(f32 a, f32 b) { return _mm512_sub_ps(a, b); }
    static f32 mul(f32 a, f32 b) { return _mm512_mul_ps(a, b); }
    static f32 div(f32 a, f32 b) { return _mm512_div_ps(a, b); }
    static f32 max(f32 a, f32 b) { return _mm512_max_ps(a, b); }
    static f32 min(f32 a, f32 b) { return _mm512_min_ps(a, b); }
    static f32 fma(f32 a, f32 b, f32 c) { return _mm512_fmadd_ps(a, b, c); }
    static f32 abs(f32 a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
    static f32 if_less(f32 a, f32 b, f32 x, f32 y) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
    }
    static f32 round(f32 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static f32 ldexp(f32 a, f32 n) { return _mm512_scalef_ps(a, n); }
    static float sum(f32 a) { return _mm512_reduce_add_ps(a); }
    static float hmax(f32 a) { return _mm512_reduce_max_ps(a); }
    static void sum4(const f32 *a, float *y) {
        const __m512 x = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1])),
                     z = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
        const __m512 s = _mm512_add_ps(_mm512_shuffle_ps(x, z, 0x44), _mm512_shuffle_ps(x, z, 0xee));
        const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
        _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
    }

    // half and bfloat16
    static float half(const void *p) {
        uint16_t h;
        memcpy(&h, p, 2);
        return _cvtsh_ss(h);
    }
    static __m256i part16(const void *p, int n) { return _mm256_maskz_loadu_epi16(first(n), p); }
    static f32 load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
    static f32 load_f16_part(const void *p, int n) { return _mm512_cvtph_ps(part16(p, n)); }
    static __m256i f16(f32 a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static void store_f16(void *p, f32 a) { _mm256_storeu_si256((__m256i *)p, f16(a)); }
    static void store_f16_part(void *p, f32 a, int n) { _mm256_mask_storeu_epi16(p, first(n), f16(a)); }
    static f32 bf16(__m256i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16)); }
    static f32 load_bf16(const void *p) { return bf16(_mm256_loadu_si256((const __m256i *)p)); }
    static f32 load_bf16_part(const void *p, int n) { return bf16(part16(p, n)); }

    // bytes
    static i32 load_bytes(const void *p) { return _mm512_loadu_si512(p); }
    static void store_i32(void *p, i32 a) { _mm512_storeu_si512(p, a); }
    static i32 splat_bytes(uint8_t b) { return _mm512_set1_epi8((char)b); }
    static i32 bits_and(i32 a, uint8_t mask) { return _mm512_and_si512(a, splat_bytes(mask)); }
    static i32 bits_or(i32 a, i32 b) { return _mm512_or_si512(a, b); }
    static i32 high4(i32 a) { return bits_and(_mm512_srli_epi16(a, 4), 15); }
    static i32 zero_i32() { return _mm512_setzero_si512(); }
    static i32 add_i32(i32 a, i32 b) { return _mm512_add_epi32(a, b); }
    static i32 sub_i32(i32 a, i32 b) { return _mm512_sub_epi32(a, b); }
    static f32 to_f32(i32 a) { return _mm512_cvtepi32_ps(a); }
    static f32 widen_u8(const void *p) { return to_f32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p))); }
    static f32 widen_s8(const void *p) { return to_f32(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
    static void store_s8(void *p, f32 a) {
        _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
    }
    static i32 dot_u8(i32 c, i32 w, i32 x) { return _mm512_dpbusd_epi32(c, w, x); }
    static i32 dot_nibbles(i32 c, i32 q, i32 x0, i32 x1) {
        return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(c, bits_and(q, 15), x0), high4(q), x1);
    }
    static constexpr int signed_offset = 128;
    static i32 dot_s8(i32 c, i32 w, i32 x) { return _mm512_dpbusd_epi32(c, _mm512_xor_si512(w, splat_bytes(128)), x); }
    template <int k> static f32 float_u8(i32 a) {
        if constexpr (k == 3) return to_f32(_mm512_srli_epi32(a, 24));
        return to_f32(_mm512_and_si512(_mm512_srli_epi32(a, 8 * k), _mm512_set1_epi32(255)));
    }
    // Bits put where a float's fraction has bits of the same worth are a float, and a constant more: no conversion.
    template <int bit, int minus> static f32 float_bits4(i32 a) {
        const __m512i one = _mm512_set1_epi32((150 - bit) << 23), mask = _mm512_set1_epi32(15 << bit); // 2^(23 - bit)
        const i32 bits = _mm512_ternarylogic_epi32(a, mask, one, 0xea);                                // a & mask | one
        return sub(_mm512_castsi512_ps(bits), splat((float)((1 << (23 - bit)) + minus)));
    }
    // Nibble k. A permutation looks at the low four bits of each index: a table of sixteen floats, with no mask and no
    // conversion. Two ways in turns, for permutations and shifts have two of Zen 4's four units to themselves.
    template <int k, int minus> static f32 float_nibble_minus(i32 a) {
        constexpr float m = (float)minus;
        const __m512 table = _mm512_setr_ps(0 - m, 1 - m, 2 - m, 3 - m, 4 - m, 5 - m, 6 - m, 7 - m, 8 - m, 9 - m,
                                            10 - m, 11 - m, 12 - m, 13 - m, 14 - m, 15 - m);
        if constexpr (k == 3 || k == 4) return float_bits4<4 * k, minus>(a);
        return _mm512_permutexvar_ps(k ? _mm512_srli_epi32(a, 4 * k) : a, table);
    }
    template <int k> static f32 float_nibble(i32 a) { return float_nibble_minus<k, 0>(a); }
    template <int k> static f32 float_nibble_minus_8(i32 a) { return float_nibble_minus<k, 8>(a); }

    static __m256 times(__m256 a, float by) { return _mm256_mul_ps(a, _mm256_set1_ps(by)); }
    static __m128 times(__m128 a, const float *by) { return _mm_mul_ps(a, _mm_loadu_ps(by)); }
    static __m128 times(__m128 a, float by) { return _mm_mul_ps(a, _mm_set1_ps(by)); }
    // Words `pick` of the 128 bytes from p on.
    static __m512i two_lines(const uint8_t *p, __m512i pick) {
        return _mm512_permutex2var_epi16(load_bytes(p), pick, load_bytes(p + 64));
    }
    // Eight blocks of 18 bytes, four in each register: a permutation for each, one for all scales, which come times `by`.
    template <class D> static void q4_0_pair(const uint8_t *p, D by, i32 *q, f32 *s) {
        const __m512i first = _mm512_set_epi16(35, 34, 33, 32, 31, 30, 29, 28, 26, 25, 24, 23, 22, 21, 20, 19, 17, 16,
                                               15, 14, 13, 12, 11, 10, 8, 7, 6, 5, 4, 3, 2, 1);
        // Of words 32 to 63, and of 40 to 71, which are 32 and up here.
        const __m512i second = _mm512_set_epi16(63, 62, 61, 60, 59, 58, 57, 56, 30, 29, 28, 27, 26, 25, 24, 23, 21, 20,
                                                19, 18, 17, 16, 15, 14, 12, 11, 10, 9, 8, 7, 6, 5);
        q[0] = two_lines(p, first);
        q[1] = _mm512_permutex2var_epi16(load_bytes(p + 64), second, load_bytes(p + 8 * sizeof(te_block_q4_0) - 64));
        const __m512i scales = _mm512_castsi128_si512(_mm_setr_epi16(0, 9, 18, 27, 36, 45, 54, 63));
        const __m512 d =
            _mm512_castps256_ps512(times(_mm256_cvtph_ps(_mm512_castsi512_si128(two_lines(p, scales))), by));
        s[0] = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), d);
        s[1] = _mm512_permutexvar_ps(_mm512_setr_epi32(4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7), d);
    }
    // For rows_q4_0.hpp. Sixteen blocks, four in each register, and their scales: that of block 4i + j in lane 4j + i. Each
    // line is loaded once: loads that wait for memory keep a Zen 5 from looking ahead (one thread 13 instead of 30 GB/s).
    static i32 load_once(const uint8_t *p) {
        i32 v = load_bytes(p);
        asm("" : "+v"(v)); // or gcc loads it again for each use
        return v;
    }
    static void q4_0_chunk(const uint8_t *p, i32 *q, f32 *d) {
        const i32 z[5] = {load_once(p), load_once(p + 64), load_once(p + 128), load_once(p + 192),
                          _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(p + 256)))};
        const __m512i first = _mm512_set_epi16(35, 34, 33, 32, 31, 30, 29, 28, 26, 25, 24, 23, 22, 21, 20, 19, 17, 16,
                                               15, 14, 13, 12, 11, 10, 8, 7, 6, 5, 4, 3, 2, 1);
        for (int i = 0; i < 4; i++) // its blocks begin at word 36i, which is word 4i of these two registers
            q[i] =
                _mm512_permutex2var_epi16(z[i], _mm512_add_epi16(first, _mm512_set1_epi16((short)(4 * i))), z[i + 1]);
        const __m512i pick =
            _mm512_castsi256_si512(_mm256_setr_epi16(0, 36, 8, 44, 9, 45, 17, 53, 18, 54, 26, 62, 27, 63, 35, 0));
        const __m512i a = _mm512_maskz_permutex2var_epi16(0x3333, z[0], pick, z[1]),
                      b = _mm512_maskz_permutex2var_epi16(0x4ccc, z[2], pick, z[3]);
        const __m512i last = _mm512_maskz_permutexvar_epi16(0x8000, _mm512_set1_epi16(7), z[4]);
        *d = _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_ternarylogic_epi32(a, b, last, 0xfe)));
    }
    static i32 dots(i32 low, const int8_t *x, i32 high, const int8_t *y) {
        return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero_i32(), low, load_bytes(x)), high, load_bytes(y));
    }
    static i32 fold_dwords(i32 a, i32 b) {
        return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    static i32 fold_qwords(i32 a, i32 b, i32 start) {
        return _mm512_add_epi32(start, _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b)));
    }
    // For rows_panel.hpp: a block of sixteen rows, q[2k + g] with bytes 8k .. 8k + 7 (low nibbles, then high ones) of rows
    // 4h + 2g and 4h + 2g + 1, h = 0 to 3.
    static i32 four_rows(const uint8_t *const *row, size_t to) {
        __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(row[0] + to)));
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(row[4] + to)), 1);
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(row[8] + to)), 2);
        return _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(row[12] + to)), 3);
    }
    static void q4_0_panel(const uint8_t *const *row, size_t at, i32 *q) {
        const size_t to = at + offsetof(te_block_q4_0, q);
        for (int g = 0; g < 2; g++) {
            const i32 a = four_rows(row + 2 * g, to), b = four_rows(row + 2 * g + 1, to);
            const i32 first = _mm512_unpacklo_epi64(a, b), second = _mm512_unpackhi_epi64(a, b);
            q[g] = bits_and(first, 15);
            q[2 + g] = bits_and(second, 15);
            q[4 + g] = high4(first);
            q[6 + g] = high4(second);
        }
    }
    // Sixteen blocks' scales of rows r and r + 8: the first eight of either, then the others.
    static __m512i q4_0_sixteen(const uint8_t *p, const uint8_t *r) {
        const __m512i pick = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 9, 18, 27, 36, 45, 54, 63));
        const int half = 8 * (int)sizeof(te_block_q4_0);
        const __m512i a = _mm512_maskz_permutex2var_epi16(0xff, load_bytes(p), pick, load_bytes(p + 64)),
                      b = _mm512_maskz_permutex2var_epi16(0xff00, load_bytes(r), pick, load_bytes(r + 64)),
                      c = _mm512_maskz_permutex2var_epi16(0xff0000, load_bytes(p + half), pick,
                                                          load_bytes(p + half + 64)),
                      d = _mm512_maskz_permutex2var_epi16(0xff000000, load_bytes(r + half), pick,
                                                          load_bytes(r + half + 64));
        return bits_or(_mm512_ternarylogic_epi32(a, b, c, 0xfe), d);
    }
    static void q4_0_panel_scales(const uint8_t *const *row, size_t at, uint16_t *d) {
        __m512i a[8];
        for (int r = 0; r < 8; r++) a[r] = q4_0_sixteen(row[r] + at, row[r + 8] + at);
        by_blocks(a, d);
    }
    // Rows' scales, two rows' in each register, by blocks.
    static void by_blocks(__m512i *a, uint16_t *d) {
        __m512i b[8];
        for (int r = 0; r < 4; r++) { // a transposition of 8 by 8 words in each quarter
            b[2 * r] = _mm512_unpacklo_epi16(a[r], a[r + 4]);
            b[2 * r + 1] = _mm512_unpackhi_epi16(a[r], a[r + 4]);
        }
        for (int r = 0; r < 4; r++) {
            a[2 * r] = _mm512_unpacklo_epi16(b[r], b[r + 4]);
            a[2 * r + 1] = _mm512_unpackhi_epi16(b[r], b[r + 4]);
        }
        for (int r = 0; r < 4; r++) {
            b[2 * r] = _mm512_unpacklo_epi16(a[r], a[r + 4]);
            b[2 * r + 1] = _mm512_unpackhi_epi16(a[r], a[r + 4]);
        }
        for (int k = 0; k < 8; k++) {
            _mm256_storeu_si256((__m256i *)(d + 16 * k), _mm512_castsi512_si256(b[k]));
            _mm256_storeu_si256((__m256i *)(d + 16 * (k + 8)), _mm512_extracti64x4_epi64(b[k], 1));
        }
    }
    // The rows' products with a token's block, low and high: its bytes, which the nibbles meet.
    static i32 q4_0_panel_dot(const i32 *q, const void *low, const void *high, const void *start) {
        const i32 x[4] = {eight_of(low, 0), eight_of(low, 8), eight_of(high, 0), eight_of(high, 8)};
        int32_t s;
        memcpy(&s, start, 4);
        i32 a = _mm512_maskz_set1_epi32(0x5555, s), b = a;
        for (int r = 0; r < 4; r++) {
            a = _mm512_dpbusd_epi32(a, q[2 * r], x[r]);
            b = _mm512_dpbusd_epi32(b, q[2 * r + 1], x[r]);
        }
        const __m512 fa = _mm512_castsi512_ps(a), fb = _mm512_castsi512_ps(b);
        return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(fa, fb, 0x88)),
                                _mm512_castps_si512(_mm512_shuffle_ps(fa, fb, 0xdd)));
    }
    static i32 eight_of(const void *p, int at) { // bytes at .. at + 7, in all lanes
        int64_t v;
        memcpy(&v, (const char *)p + at, 8);
        return _mm512_set1_epi64(v);
    }
    // For rows_units_wide.hpp, sixteen rows in lanes: bytes 4k .. 4k + 3 of the sixteen at `at`.
    static void transposed16(const uint8_t *const *row, size_t at, i32 *v) {
        const i32 y[4] = {four_rows(row, at), four_rows(row + 1, at), four_rows(row + 2, at), four_rows(row + 3, at)};
        const i32 t0 = _mm512_unpacklo_epi32(y[0], y[1]), t1 = _mm512_unpacklo_epi32(y[2], y[3]),
                  t2 = _mm512_unpackhi_epi32(y[0], y[1]), t3 = _mm512_unpackhi_epi32(y[2], y[3]);
        v[0] = _mm512_unpacklo_epi64(t0, t1);
        v[1] = _mm512_unpackhi_epi64(t0, t1);
        v[2] = _mm512_unpacklo_epi64(t2, t3);
        v[3] = _mm512_unpackhi_epi64(t2, t3);
    }
    // The lanes' first (at = 0) or second halves as floats.
    template <int at> static f32 halves(i32 a) {
        return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(at ? _mm512_srli_epi32(a, 16) : a));
    }
    static void eight_halves(const uint8_t *const *row, uint16_t *d) {
        for (int r = 0; r < 8; r++) memcpy(&d[r], row[r], 2);
    }
    // Byte k of each lane, signed, as a float.
    template <int k> static i32 unit_scale(i32 a) { return _mm512_castps_si512(float_s8<k>(a)); }
    static i32 four_of(const void *p) {
        int32_t v;
        memcpy(&v, p, 4);
        return _mm512_set1_epi32(v);
    }
    // Of two blocks: the sums of even and odd units, four lanes each, which have less than 2^15, as activations are
    // at least -127: 8 * 31 * 127. In quarter r come units 2r and 2r + 1 of the first, then of the second.
    template <bool five> static i32 units_of_two(i32 even0, i32 odd0, i32 even1, i32 odd1) {
        const i32 a = pairs_of(even0, odd0), b = pairs_of(even1, odd1);
        if constexpr (!five) return pairs_of(a, b); // sixteen products fit into a word
        const __m512 fa = _mm512_castsi512_ps(a), fb = _mm512_castsi512_ps(b);
        return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(fa, fb, 0x88)),
                                _mm512_castps_si512(_mm512_shuffle_ps(fa, fb, 0xdd)));
    }
    // Each two lanes' sum, in each quarter those of a and then those of b. They fit into words.
    static i32 pairs_of(i32 a, i32 b) { return _mm512_madd_epi16(_mm512_packs_epi32(a, b), _mm512_set1_epi16(1)); }
    // Two blocks' factors, scales and then minima, in that order.
    static void factors_of_two(w16 a, w16 b, f32 &d, f32 &m) {
        const __m512i order = _mm512_setr_epi32(0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
        d = _mm512_permutex2var_ps(a, order, b);
        m = _mm512_permutex2var_ps(a, _mm512_add_epi32(order, _mm512_set1_epi32(8)), b);
    }
    // A block's registers, each of whose quarters is sixteen weights, to one number for each, times its scale: in quarter c
    // those of registers 0 to 3. Sums of eight weights of six bits, less 32, fit into words: 8 * 32 * 127.
    static i32 sixteen_scales(const int8_t *p) {
        const __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
        const __m256i order = _mm256_setr_epi8(0, 0, 4, 4, 8, 8, 12, 12, 1, 1, 5, 5, 9, 9, 13, 13, 2, 2, 6, 6, 10, 10,
                                               14, 14, 3, 3, 7, 7, 11, 11, 15, 15);
        return _mm512_cvtepi8_epi16(_mm256_shuffle_epi8(v, order));
    }
    static i32 scaled_sixteens(const i32 *s, i32 scales) {
        return _mm512_madd_epi16(_mm512_packs_epi32(pairs_of(s[0], s[1]), pairs_of(s[2], s[3])), scales);
    }
    // The units of two such blocks: in quarter c the even (c = 0) and odd ones of the first, then of the second.
    static i32 units_of_sixteens(i32 a, i32 b) {
        return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    }
    static f32 two_halves16(const uint8_t *p, const uint8_t *r) { // each in eight lanes
        return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_set1_ps(half(p))), _mm256_set1_ps(half(r)), 1);
    }
    // For rows_q8_0.hpp, as vec_avx2.hpp has them. Sixteen blocks, two in each register, and each line loaded once, as in
    // q4_0_chunk.
    static constexpr int q8_0_lane(int b) { return b / 8 * 8 + b % 2 * 4 + b % 8 / 2; }
    static constexpr int q8_0_offset = 128;
    using q8_0_weights = i32;
    static i32 flip(i32 a) { return _mm512_xor_si512(a, splat_bytes(128)); }
    static i32 words_at(int first, int i, __m512i a, __m512i words,
                        __m512i b) { // words, which move on by `first` for each i
        return _mm512_permutex2var_epi16(a, _mm512_add_epi16(words, _mm512_set1_epi16((short)(first * i))), b);
    }
    struct q8_0_chunk {
        i32 z[9];
        explicit q8_0_chunk(const uint8_t *p) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) z[i] = load_once(p + 64 * i);
            z[8] = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(p + 512)));
        }
        i32 weights(int i) const { // blocks 2i and 2i + 1 begin at words 2i and 2i + 17 of register i
            const __m512i first = _mm512_set_epi16(33, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 16,
                                                   15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1);
            return flip(words_at(2, i, z[i], first, z[i + 1]));
        }
        f32 scales() const {
            // Of registers 2i and 2i + 1, i = 0: in words 0, 1, 4 and 5; each i two words further on.
            const __m512i pick =
                _mm512_castsi256_si512(_mm256_setr_epi16(0, 34, 4, 38, 17, 51, 21, 55, 8, 42, 12, 46, 25, 59, 29, 63));
            const i32 a = _mm512_maskz_permutex2var_epi16(0x0033, z[0], pick, z[1]),
                      b = _mm512_maskz_permutex2var_epi16(0x00cc, z[2], pick, z[3]),
                      c = _mm512_maskz_permutex2var_epi16(0x3300, z[4], pick, z[5]),
                      d = _mm512_maskz_permutex2var_epi16(0xcc00, z[6], pick, z[7]);
            return _mm512_cvtph_ps(_mm512_castsi512_si256(bits_or(_mm512_ternarylogic_epi32(a, b, c, 0xfe), d)));
        }
    };
    static i32 q8_0_dot(i32 w, i32 x) { return _mm512_dpbusd_epi32(zero_i32(), w, x); }
    static i32 four_sums(const i32 *a) {
        return fold_qwords(fold_dwords(a[0], a[1]), fold_dwords(a[2], a[3]), zero_i32());
    }
    static i32 two_halves(i32 a, i32 b) {
        return add_i32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    }
    // For rows_panel.hpp, as those of Q4_0.
    static void q8_0_panel(const uint8_t *const *row, size_t at, i32 *q) {
        for (int half = 0; half < 2; half++)
            for (int g = 0; g < 2; g++) {
                const size_t to = at + offsetof(te_block_q8_0, q) + 16 * (size_t)half;
                const i32 a = four_rows(row + 2 * g, to), b = four_rows(row + 2 * g + 1, to);
                q[4 * half + g] = flip(_mm512_unpacklo_epi64(a, b));
                q[4 * half + 2 + g] = flip(_mm512_unpackhi_epi64(a, b));
            }
    }
    static void q8_0_panel_scales(const uint8_t *const *row, size_t at, uint16_t *d) {
        __m512i a[8];
        const __m512i pick = _mm512_set1_epi64(0x0033002200110000); // four blocks', 17 words from each to the next
        for (int r = 0; r < 8; r++) {
            a[r] = zero_i32();
#pragma GCC unroll 4
            for (int m = 0; m < 4; m++) {
                const uint8_t *p = row[r] + at + 128 * m, *q = row[r + 8] + at + 128 * m;
                const __mmask32 four = 15u << (m / 2 * 16 + m % 2 * 4);
                const __m512i words = _mm512_add_epi16(pick, _mm512_set1_epi16((short)(4 * m)));
                a[r] = bits_or(a[r], _mm512_maskz_permutex2var_epi16(four, load_bytes(p), words, load_bytes(p + 64)));
                a[r] =
                    bits_or(a[r], _mm512_maskz_permutex2var_epi16(four << 8, load_bytes(q), words, load_bytes(q + 64)));
            }
        }
        by_blocks(a, d);
    }
    static i32 q8_0_bytes(const uint8_t *p) {
        const te_block_q8_0 *b = (const te_block_q8_0 *)p;
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)b[0].q)),
                                  _mm256_loadu_si256((const __m256i *)b[1].q), 1);
    }
    // Four blocks of 34 bytes.
    template <class D> static __m512 q8_0_scales(const uint8_t *p, D by) {
        const __m512i scales = _mm512_castsi128_si512(_mm_setr_epi16(0, 17, 34, 51, 0, 0, 0, 0));
        return _mm512_castps128_ps512(times(_mm_cvtph_ps(_mm512_castsi512_si128(two_lines(p, scales))), by));
    }
    static void q8_0_pair(const uint8_t *p, const float *by, i32 *q, f32 *s) {
        const __m512 d = q8_0_scales(p, by);
        q[0] = q8_0_bytes(p);
        q[1] = q8_0_bytes(p + 2 * sizeof(te_block_q8_0));
        s[0] = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), d);
        s[1] = _mm512_permutexvar_ps(_mm512_setr_epi32(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3), d);
    }
    static void q8_0_splats(const uint8_t *p, float by, f32 *s) {
        const __m512 d = q8_0_scales(p, by);
        for (int i = 0; i < 4; i++) s[i] = _mm512_permutexvar_ps(_mm512_set1_epi32(i), d);
    }

    static void add_transposed(float *y, const float *p, int stride, size_t pitch = 4) {
        __m128 a = _mm_loadu_ps(p), b = _mm_loadu_ps(p + stride), c = _mm_loadu_ps(p + 2 * stride),
               d = _mm_loadu_ps(p + 3 * stride);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_storeu_ps(y, _mm_add_ps(_mm_loadu_ps(y), a));
        _mm_storeu_ps(y + pitch, _mm_add_ps(_mm_loadu_ps(y + pitch), b));
        _mm_storeu_ps(y + 2 * pitch, _mm_add_ps(_mm_loadu_ps(y + 2 * pitch), c));
        _mm_storeu_ps(y + 3 * pitch, _mm_add_ps(_mm_loadu_ps(y + 3 * pitch), d));
    }

    // sixteen floats
    static w16 load16(const float *p) { return load(p); }
    static void store16(float *p, w16 a) { store(p, a); }
    static w16 mul16(w16 a, w16 b) { return mul(a, b); }
    static w16 splat16(float lo, float hi) { return _mm512_mask_blend_ps(0xff00, splat(lo), splat(hi)); }
    static w16 halves16(const uint8_t *p) {
        int32_t d;
        memcpy(&d, p, 4);
        return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                                     _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi32_si128(d))));
    }
    static w16 widen16_u8(uint64_t lo, uint64_t hi) {
        return to_f32(_mm512_cvtepu8_epi32(_mm_set_epi64x((long long)hi, (long long)lo)));
    }
    static w16 widen16_s8(const void *p) { return widen_s8(p); }
    static f32 add_high8(f32 a, w16 b) { return _mm512_mask_add_ps(a, 0xff00, a, b); }
    template <int a, int b, int c, int d> static f32 spread(w16 s) {
        return _mm512_permutexvar_ps(_mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d), s);
    }
    template <int s0, int s1> static i32 fields(const uint8_t *p, uint8_t mask) {
        const i32 v = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
        constexpr int a = s0 < 0 ? -s0 : s0, b = s1 < 0 ? -s1 : s1;
        static_assert(s0 * s1 >= 0, "one direction");
        const __m512i by = _mm512_mask_blend_epi32(0xff00, _mm512_set1_epi16(a), _mm512_set1_epi16(b));
        return bits_and(s0 < 0 || s1 < 0 ? _mm512_srlv_epi16(v, by) : _mm512_sllv_epi16(v, by), mask);
    }

    template <int bytes, int at> static i32 blocks16(const uint8_t *p) {
        if constexpr (bytes == 32) { // they lie in two registers
            return _mm512_shuffle_i32x4(load_bytes(p), load_bytes(p + 64), at == 0 ? 0x88 : 0xdd);
        } else {
            const __m512i lo = _mm512_inserti32x4(_mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(p + at))),
                                                  _mm_loadu_si128((const __m128i *)(p + bytes + at)), 1);
            const __m256i hi =
                _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(p + 2 * bytes + at))),
                                        _mm_loadu_si128((const __m128i *)(p + 3 * bytes + at)), 1);
            return _mm512_inserti64x4(lo, hi, 1);
        }
    }
    static uint64_t word16(const uint8_t *p) {
        uint16_t w;
        memcpy(&w, p, 2);
        return w;
    }
    template <int bytes, int at> static uint64_t words16(const uint8_t *p) { // of four blocks
        return word16(p + at) | word16(p + bytes + at) << 16 | word16(p + 2 * bytes + at) << 32 |
               word16(p + 3 * bytes + at) << 48;
    }
    template <int bytes, int at> static f32 block_halves(const uint8_t *p) {
        const __m128 four = _mm_cvtph_ps(_mm_cvtsi64_si128((long long)words16<bytes, at>(p)));
        return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                     _mm512_castps128_ps512(four));
    }
    // Blocks have 17 bytes, so that block b's scale is byte b of the sixteen that fill its four lanes.
    static f32 mxfp4_scales(const uint8_t *p) {
        constexpr int a = 0x00ffffff, b = 0x01ffffff, c = 0x02ffffff,
                      d = 0x03ffffff; // of no byte but the b-th the top one
        const __m512i e = _mm512_srli_epi32(
            _mm512_shuffle_epi8(load_bytes(p), _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d)), 1);
        const __m512i normal = _mm512_sub_epi32(e, _mm512_set1_epi32(1 << 23));
        const __m512i least =
            _mm512_add_epi32(_mm512_srli_epi32(e, 2), _mm512_set1_epi32(1 << 21)); // more for e = 0 and 1
        return _mm512_castsi512_ps(_mm512_max_epi32(normal, least));
    }
    template <int bytes, int at> static i32 block_bits(const uint8_t *p, uint8_t value) {
        return _mm512_maskz_mov_epi8(_cvtu64_mask64(words16<bytes, at>(p)), splat_bytes(value));
    }
    template <int s0, int s1, int s2, int s3> static i32 fields4(const uint8_t *p, uint8_t mask) {
        const __m512i v = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
        constexpr int a = s0 & 31, b = s1 & 31, c = s2 & 31, d = s3 & 31;
        return bits_and(_mm512_rolv_epi32(v, _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d)), mask);
    }
    template <int s> static i32 shift_bytes(i32 a, uint8_t mask) {
        return bits_and(s < 0 ? _mm512_srli_epi16(a, s < 0 ? -s : 0) : _mm512_slli_epi16(a, s < 0 ? 0 : s), mask);
    }
    static constexpr int top_factor = 16;
    static i32 top4(i32 a) { return bits_and(a, 0xf0); }
    static __m128i sixteen_values(const int8_t *values) { return _mm_loadu_si128((const __m128i *)values); }
    static i32 lookup(i32 a, const int8_t *values) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen_values(values)), a);
    }
    static void lookup16(const int8_t *values, void *p) {
        _mm_storeu_si128((__m128i *)p, _mm_shuffle_epi8(sixteen_values(values), _mm_loadu_si128((const __m128i *)p)));
    }
    static i32 dot2_u8(i32 c, i32 w0, i32 x0, i32 w1, i32 x1) {
        return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(c, w0, x0), w1, x1);
    }
    template <int k> static f32 float_s8(i32 a) {
        return to_f32(_mm512_srai_epi32(k == 3 ? a : _mm512_slli_epi32(a, 24 - 8 * k), 24));
    }
    template <int k, int minus> static f32 float_u5(i32 a) { // as float_nibble, with two tables
        constexpr float m = (float)minus;
        const __m512 low = _mm512_setr_ps(0 - m, 1 - m, 2 - m, 3 - m, 4 - m, 5 - m, 6 - m, 7 - m, 8 - m, 9 - m, 10 - m,
                                          11 - m, 12 - m, 13 - m, 14 - m, 15 - m);
        const __m512 high = _mm512_setr_ps(16 - m, 17 - m, 18 - m, 19 - m, 20 - m, 21 - m, 22 - m, 23 - m, 24 - m,
                                           25 - m, 26 - m, 27 - m, 28 - m, 29 - m, 30 - m, 31 - m);
        return _mm512_permutex2var_ps(low, k ? _mm512_srli_epi32(a, 8 * k) : a, high);
    }
    // A byte put where a float's fraction has bits of the same worth is a float, and a constant more: no conversion.
    template <int k> static f32 float_u6_minus_32(i32 a) {
        constexpr int at = k == 3 ? 2 : k; // byte 3 stands too high
        const __m512i v = k == 3 ? _mm512_srli_epi32(a, 8) : a;
        const __m512i one = _mm512_set1_epi32((150 - 8 * at) << 23); // 2^(23 - 8 * at)
        const __m512i bits = _mm512_or_si512(_mm512_and_si512(v, _mm512_set1_epi32(63 << 8 * at)), one);
        return sub(_mm512_castsi512_ps(bits), splat((float)((1 << (23 - 8 * at)) + 32)));
    }
    template <int at> static f32 float_bits2(i32 a) { // the table looks at two more bits, and does not mind them
        const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
        return _mm512_permutexvar_ps(at ? _mm512_srli_epi32(a, at) : a, table);
    }
    static w16 add16(w16 a, w16 b) { return add(a, b); }
    static f32 sub16(f32 a, w16 b) { return sub(a, b); }
};
} // namespace
