// vec_avx2.hpp - the vector vocabulary on AVX2 + FMA + F16C. What each word means: vec_scalar.hpp.
namespace {
struct vec_avx2 {
    static constexpr int lanes = 8;
    static constexpr bool q4_0_by_blocks = true; // whether rows_q4_0, rows_q8_0 and rows_units have their words
    static constexpr int abreast = 4;            // tokens, in rows_batch.hpp
    static constexpr int rows = 2;               // that one pass over axpy's sums adds
    using f32 = __m256;
    using i32 = __m256i;
    struct w16 {
        __m256 lo, hi;
    };

    // floats
    static f32 zero() { return _mm256_setzero_ps(); }
    static f32 splat(float a) { return _mm256_set1_ps(a); }
    static f32 load(const void *p) { return _mm256_loadu_ps((const float *)p); }
    static void store(void *p, f32 a) { _mm256_storeu_ps((float *)p, a); }
    static __m256i first(int n) { // all ones in lanes below n
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    static f32 load_part(const void *p, int n) { return _mm256_maskload_ps((const float *)p, first(n)); }
    static void store_part(void *p, f32 a, int n) { _mm256_maskstore_ps((float *)p, first(n), a); }
    static f32 add(f32 a, f32 b) { return _mm256_add_ps(a, b); }
    static f32 sub(f32 a, f32 b) { return _mm256_sub_ps(a, b); }
    static f32 mul(f32 a, f32 b) { return _mm256_mul_ps(a, b); }
    static f32 div(f32 a, f32 b) { return _mm256_div_ps(a, b); }
    static f32 max(f32 a, f32 b) { return _mm256_max_ps(a, b); }
    static f32 min(f32 a, f32 b) { return _mm256_min_ps(a, b); }
    static f32 fma(f32 a, f32 b, f32 c) { return _mm256_fmadd_ps(a, b, c); }
    static f32 abs(f32 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    static f32 if_less(f32 a, f32 b, f32 x, f32 y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
    static f32 round(f32 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static f32 ldexp(f32 a, f32 n) {
        const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
    }
    static float sum(f32 a) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    static void sum4(const f32 *a, float *y) {
        const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
        _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
    }
    static float hmax(f32 a) {
        __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        s = _mm_max_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
    }

    // half and bfloat16
    static float half(const void *p) {
        uint16_t h;
        memcpy(&h, p, 2);
        return _cvtsh_ss(h);
    }
    static f32 splat_half(const void *p) {
        int16_t h;
        memcpy(&h, p, 2);
        return _mm256_cvtph_ps(_mm_set1_epi16(h));
    }
    static __m128i part16(const void *p, int n) { // n 16-bit words, the others 0
        uint16_t w[8] = {};
        memcpy(w, p, (size_t)n * 2);
        return _mm_loadu_si128((const __m128i *)w);
    }
    static f32 load_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
    static f32 load_f16_part(const void *p, int n) { return _mm256_cvtph_ps(part16(p, n)); }
    static void store_f16(void *p, f32 a) {
        _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static void store_f16_part(void *p, f32 a, int n) {
        uint16_t w[8];
        store_f16(w, a);
        memcpy(p, w, (size_t)n * 2);
    }
    static f32 bf16(__m128i words) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16)); }
    static f32 load_bf16(const void *p) { return bf16(_mm_loadu_si128((const __m128i *)p)); }
    static f32 load_bf16_part(const void *p, int n) { return bf16(part16(p, n)); }

    // bytes
    static i32 load_bytes(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
    static void store_i32(void *p, i32 a) { _mm256_storeu_si256((__m256i *)p, a); }
    static i32 splat_bytes(uint8_t b) { return _mm256_set1_epi8((char)b); }
    static i32 bits_and(i32 a, uint8_t mask) { return _mm256_and_si256(a, splat_bytes(mask)); }
    static i32 bits_or(i32 a, i32 b) { return _mm256_or_si256(a, b); }
    static i32 high4(i32 a) { return bits_and(_mm256_srli_epi16(a, 4), 15); }
    static i32 zero_i32() { return _mm256_setzero_si256(); }
    static i32 sub_i32(i32 a, i32 b) { return _mm256_sub_epi32(a, b); }
    static i32 add_i32(i32 a, i32 b) { return _mm256_add_epi32(a, b); }
    static f32 to_f32(i32 a) { return _mm256_cvtepi32_ps(a); }
    static __m128i eight(const void *p) { return _mm_loadl_epi64((const __m128i *)p); }
    static f32 widen_u8(const void *p) { return to_f32(_mm256_cvtepu8_epi32(eight(p))); }
    static f32 widen_s8(const void *p) { return to_f32(_mm256_cvtepi8_epi32(eight(p))); }
    static void store_s8(void *p, f32 a) {
        const __m256i v = _mm256_cvtps_epi32(a);
        const __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(w, w));
    }
    static i32 widen_add(i32 c, __m256i words) {
        return _mm256_add_epi32(c, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
    }
    static i32 dot_u8(i32 c, i32 w, i32 x) { return widen_add(c, _mm256_maddubs_epi16(w, x)); }
    static i32 dot_nibbles(i32 c, i32 q, i32 x0, i32 x1) { // four products of at most 15 * 127 fit into 16 bits
        return widen_add(
            c, _mm256_add_epi16(_mm256_maddubs_epi16(bits_and(q, 15), x0), _mm256_maddubs_epi16(high4(q), x1)));
    }
    static constexpr int signed_offset = 0;
    static i32 dot_s8(i32 c, i32 w, i32 x) { // |w| * (x with the sign of w): 2 * 128 * 127 fits
        return widen_add(c, _mm256_maddubs_epi16(_mm256_sign_epi8(w, w), _mm256_sign_epi8(x, w)));
    }
    template <int k> static f32 float_u8(i32 a) {
        if constexpr (k == 3) return to_f32(_mm256_srli_epi32(a, 24));
        return to_f32(_mm256_and_si256(_mm256_srli_epi32(a, 8 * k), _mm256_set1_epi32(255)));
    }
    template <int k> static f32 float_nibble(i32 a) {
        if constexpr (k == 7) return to_f32(_mm256_srli_epi32(a, 28));
        return to_f32(_mm256_and_si256(_mm256_srli_epi32(a, 4 * k), _mm256_set1_epi32(15)));
    }
    template <int k> static f32 float_nibble_minus_8(i32 a) { // with its top bit flipped a nibble is signed
        const __m256i flipped = _mm256_xor_si256(a, _mm256_set1_epi32((int)0x88888888));
        return to_f32(_mm256_srai_epi32(_mm256_slli_epi32(flipped, 28 - 4 * k), 28));
    }

    static i32 q4_0_two(const uint8_t *p, const uint8_t *r) { // of two blocks
        const te_block_q4_0 *a = (const te_block_q4_0 *)p, *b = (const te_block_q4_0 *)r;
        return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a->q)),
                                       _mm_loadu_si128((const __m128i *)b->q), 1);
    }
    static i32 q4_0_bytes(const uint8_t *p) { return q4_0_two(p, p + sizeof(te_block_q4_0)); }
    static f32 q4_0_scales(const uint8_t *p) {
        const __m128i first = _mm_loadu_si128((const __m128i *)p), second = _mm_loadu_si128((const __m128i *)(p + 16));
        const __m128i spread = _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
        return _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_blend_epi16(first, second, 2), spread)); // words 0 and 9 of p
    }
    // For rows_q4_0.hpp. Eight blocks, two in each register, and their scales: that of block 2i + j in lane 4j + i.
    // The sixteen bytes in which the scale of block b is word `at`.
    static __m128i around(const uint8_t *p, int b, int at) {
        return _mm_loadu_si128((const __m128i *)(p + b * (int)sizeof(te_block_q4_0) - 2 * at));
    }
    static void q4_0_chunk(const uint8_t *p, i32 *q, f32 *d) {
        for (int i = 0; i < 4; i++) q[i] = q4_0_bytes(p + 2 * i * (int)sizeof(te_block_q4_0));
        __m128i h = _mm_blend_epi16(around(p, 0, 0), around(p, 2, 1), 2);
        h = _mm_blend_epi16(h, around(p, 4, 2), 4);
        h = _mm_blend_epi16(h, around(p, 6, 3), 8);
        h = _mm_blend_epi16(h, around(p, 1, 4), 16);
        h = _mm_blend_epi16(h, around(p, 3, 5), 32);
        h = _mm_blend_epi16(h, around(p, 5, 6), 64);
        h = _mm_blend_epi16(h, around(p, 7, 7), 128);
        *d = _mm256_cvtph_ps(h);
    }
    static i32 dots(i32 low, const int8_t *x, i32 high,
                    const int8_t *y) { // in 16 bits, which sixteen products fit into
        return _mm256_add_epi16(_mm256_maddubs_epi16(low, load_bytes(x)), _mm256_maddubs_epi16(high, load_bytes(y)));
    }
    static i32 fold_dwords(i32 a, i32 b) {
        return _mm256_add_epi16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    }
    static i32 fold_qwords(i32 a, i32 b, i32 start) {
        return widen_add(start, _mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)));
    }

    // For rows_q8_0.hpp: a block's weights, their products with a token's, and what was added to each weight. Block b is lane
    // q8_0_lane(b) of a chunk's sums.
    static constexpr int q8_0_lane(int b) { return b; }
    static constexpr int q8_0_offset = 0;
    struct q8_0_weights {
        i32 q, size;
    };
    static q8_0_weights q8_0_load(const int8_t *p) {
        const i32 q = load_bytes(p);
        return {q, _mm256_sign_epi8(q, q)};
    }
    static i32 q8_0_dot(const q8_0_weights &w, i32 x) {
        return _mm256_madd_epi16(_mm256_maddubs_epi16(w.size, _mm256_sign_epi8(x, w.q)), ones());
    }
    // The sums of four registers' halves, a lane for each register; and of the halves of two such.
    static i32 four_sums(const i32 *a) {
        const i32 b = add_i32(_mm256_unpacklo_epi32(a[0], a[1]), _mm256_unpackhi_epi32(a[0], a[1])),
                  c = add_i32(_mm256_unpacklo_epi32(a[2], a[3]), _mm256_unpackhi_epi32(a[2], a[3]));
        return add_i32(_mm256_unpacklo_epi64(b, c), _mm256_unpackhi_epi64(b, c));
    }
    static i32 two_halves(i32 a, i32 b) {
        return add_i32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
    }
    // Of four bytes as words the first and the third, then the others; of all lanes of four registers.
    static void even_and_odd(const int8_t *p, int16_t *to) {
        for (int i = 0; i < 4; i++) to[i] = p[i % 2 * 2 + i / 2];
    }
    template <int n> static void q8_0_store(uint8_t (*to)[32], const i32 *v) {
        static_assert(n == 8, "words");
        for (int i = 0; i < 4; i++) {
            store_i32(to[2 * i], _mm256_srai_epi16(_mm256_slli_epi16(v[i], 8), 8));
            store_i32(to[2 * i + 1], _mm256_srai_epi16(v[i], 8));
        }
    }

    static f32 q8_0_scales(const uint8_t *p) { // as in q4_0_chunk
        const auto around = [p](int b) {
            return _mm_loadu_si128((const __m128i *)(p + b * ((int)sizeof(te_block_q8_0) - 2)));
        };
        __m128i h = _mm_blend_epi16(around(0), around(1), 2);
        h = _mm_blend_epi16(h, around(2), 4);
        h = _mm_blend_epi16(h, around(3), 8);
        h = _mm_blend_epi16(h, around(4), 16);
        h = _mm_blend_epi16(h, around(5), 32);
        h = _mm_blend_epi16(h, around(6), 64);
        h = _mm_blend_epi16(h, around(7), 128);
        return _mm256_cvtph_ps(h);
    }
    struct q8_0_chunk { // eight blocks, a register each
        const te_block_q8_0 *p;
        explicit q8_0_chunk(const uint8_t *at) : p((const te_block_q8_0 *)at) {}
        q8_0_weights weights(int i) const { return q8_0_load(p[i].q); }
        f32 scales() const { return q8_0_scales((const uint8_t *)p); }
    };

    // For rows_units.hpp: four units of 32 weights, a register each, and a token's. In each half of the result, which is of
    // sixteen weights, a lane for each unit, two words with the products of eight.
    static i32 four_units(const i32 *q, const int8_t *x) {
        i32 w[4];
        for (int i = 0; i < 4; i++) w[i] = _mm256_maddubs_epi16(q[i], load_bytes(x + 32 * i));
        const i32 a = add_words(_mm256_unpacklo_epi32(w[0], w[1]), _mm256_unpackhi_epi32(w[0], w[1])),
                  b = add_words(_mm256_unpacklo_epi32(w[2], w[3]), _mm256_unpackhi_epi32(w[2], w[3]));
        return add_words(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    }
    static i32 add_words(i32 a, i32 b) { return _mm256_add_epi16(a, b); }
    static i32 words_times(i32 a, i32 b) { return _mm256_madd_epi16(a, b); } // and each two added up
    static i32 ones() { return _mm256_set1_epi16(1); }
    // Of eight units, four_units times these words, to one integer each.
    static i32 eight_units(i32 a, i32 by_a, i32 b, i32 by_b) {
        a = words_times(a, by_a);
        b = words_times(b, by_b);
        return add_i32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
    }
    // Scales of sixteen sixteens as four_units' words.
    static void unit_scales(const int8_t *p, i32 *s) {
        const i32 v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
        const i32 first = _mm256_setr_epi8(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6, 1, 1, 1, 1, 3, 3, 3, 3, 5, 5,
                                           5, 5, 7, 7, 7, 7);
        s[0] = _mm256_srai_epi16(_mm256_shuffle_epi8(v, first), 8);
        s[1] = _mm256_srai_epi16(_mm256_shuffle_epi8(v, _mm256_add_epi8(first, splat_bytes(8))), 8);
    }
    static f32 low8(w16 a) { return a.lo; }
    static f32 high8(w16 a) { return a.hi; }

    // For rows_tile.hpp, eight rows in lanes: bytes 4k .. 4k + 3 of the sixteen at `at`.
    static void transposed16(const uint8_t *const *row, size_t at, i32 *v) {
        i32 y[4];
        for (int r = 0; r < 4; r++)
            y[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(row[r] + at))),
                                           _mm_loadu_si128((const __m128i *)(row[r + 4] + at)), 1);
        const i32 t0 = _mm256_unpacklo_epi32(y[0], y[1]), t1 = _mm256_unpacklo_epi32(y[2], y[3]),
                  t2 = _mm256_unpackhi_epi32(y[0], y[1]), t3 = _mm256_unpackhi_epi32(y[2], y[3]);
        v[0] = _mm256_unpacklo_epi64(t0, t1);
        v[1] = _mm256_unpackhi_epi64(t0, t1);
        v[2] = _mm256_unpacklo_epi64(t2, t3);
        v[3] = _mm256_unpackhi_epi64(t2, t3);
    }
    static uint64_t four_halves(const uint8_t *const *row) {
        uint16_t d[4];
        for (int r = 0; r < 4; r++) memcpy(&d[r], row[r], 2);
        return d[0] | (uint32_t)d[1] << 16 | (uint64_t)(d[2] | (uint32_t)d[3] << 16) << 32;
    }
    static void eight_halves(const uint8_t *const *row, uint16_t *d) {
        const uint64_t low = four_halves(row), high = four_halves(row + 4);
        memcpy(d, &low, 8);
        memcpy(d + 4, &high, 8);
    }
    // The lanes' first (at = 0) or second halves as floats.
    template <int at> static f32 halves(i32 a) {
        const i32 own = at ? _mm256_srli_epi32(a, 16) : _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
        const i32 packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(own, own), 8);
        return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
    }
    // Byte k of each lane, signed, as two equal words.
    template <int k> static i32 unit_scale(i32 a) {
        constexpr int s = 0x01010101 * k;
        return _mm256_srai_epi16(
            _mm256_shuffle_epi8(a, _mm256_setr_epi32(s, s + 0x04040404, s + 0x08080808, s + 0x0c0c0c0c, s,
                                                     s + 0x04040404, s + 0x08080808, s + 0x0c0c0c0c)),
            8);
    }
    static i32 four_of(const void *p) {
        int32_t v;
        memcpy(&v, p, 4);
        return _mm256_set1_epi32(v);
    }
    // + four products of each lane, in words, which sixteen of nibbles fit into.
    static i32 words_begin(i32 q, i32 x) { return _mm256_maddubs_epi16(q, x); }
    static i32 words_dot(i32 c, i32 q, i32 x) {
        c = add_words(c, _mm256_maddubs_epi16(q, x));
        asm("" : "+x"(c)); // or gcc adds in another order, for which it keeps all products in memory
        return c;
    }
    static i32 add_in_order(i32 a, i32 b) {
        a = add_i32(a, b);
        asm("" : "+x"(a));
        return a;
    }
    // The rows' products with a token's unit, eight steps of which tile_begin is the first; start: the token's integer.
    static i32 tile_begin(i32 q, i32 x, const void *) { return words_begin(q, x); }
    static i32 tile_dot(i32 c, i32 q, i32 x) { return words_dot(c, q, x); }
    static i32 tile_end(i32 c, const void *start) { return widen_add(four_of(start), c); }

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
    static w16 load16(const float *p) { return {load(p), load(p + 8)}; }
    static void store16(float *p, w16 a) {
        store(p, a.lo);
        store(p + 8, a.hi);
    }
    static w16 mul16(w16 a, w16 b) { return {mul(a.lo, b.lo), mul(a.hi, b.hi)}; }
    static w16 splat16(float lo, float hi) { return {splat(lo), splat(hi)}; }
    static w16 halves16(const uint8_t *p) {
        int32_t d;
        memcpy(&d, p, 4);
        const __m128 f = _mm_cvtph_ps(_mm_cvtsi32_si128(d));
        return {_mm256_broadcastss_ps(f), _mm256_broadcastss_ps(_mm_movehdup_ps(f))};
    }
    static w16 widen16_u8(uint64_t lo, uint64_t hi) {
        return {to_f32(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)lo))),
                to_f32(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)hi)))};
    }
    static w16 widen16_s8(const void *p) { return {widen_s8(p), widen_s8((const uint8_t *)p + 8)}; }
    static f32 add_high8(f32 a, w16 b) { return add(a, b.hi); }
    template <int a, int b, int c, int d> static f32 spread(w16 s) {
        const __m256 v = a < 8 ? s.lo : s.hi;
        static_assert(a / 8 == b / 8, "both elements come from one register");
        return _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(a % 8, a % 8, a % 8, a % 8, b % 8, b % 8, b % 8, b % 8));
    }
    template <int s0, int s1> static i32 fields(const uint8_t *p, uint8_t mask) {
        const i32 v = load_bytes(p);
        return bits_and(s0 < 0 ? _mm256_srli_epi16(v, -s0) : _mm256_slli_epi16(v, s0), mask);
    }

    template <int bytes, int at> static i32 blocks16(const uint8_t *p) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(p + at))),
                                       _mm_loadu_si128((const __m128i *)(p + bytes + at)), 1);
    }
    template <int bytes, int at> static f32 block_halves(const uint8_t *p) {
        return _mm256_set_m128(_mm_set1_ps(half(p + bytes + at)), _mm_set1_ps(half(p + at)));
    }
    // Blocks have 17 bytes, so that block b's scale is byte b of the sixteen that fill its four lanes.
    static f32 mxfp4_scales(const uint8_t *p) {
        constexpr int a = 0x00ffffff, b = 0x01ffffff; // of no byte but the b-th the top one
        const __m256i e =
            _mm256_srli_epi32(_mm256_shuffle_epi8(load_bytes(p), _mm256_setr_epi32(a, a, a, a, b, b, b, b)), 1);
        const __m256i normal = _mm256_sub_epi32(e, _mm256_set1_epi32(1 << 23));
        const __m256i least =
            _mm256_add_epi32(_mm256_srli_epi32(e, 2), _mm256_set1_epi32(1 << 21)); // more for e = 0 and 1
        return _mm256_castsi256_ps(_mm256_max_epi32(normal, least));
    }
    template <int bytes, int at> static i32 block_bits(const uint8_t *p, uint8_t value) {
        uint16_t a, b;
        memcpy(&a, p + at, 2);
        memcpy(&b, p + bytes + at, 2);
        const __m256i words = _mm256_set_m128i(_mm_cvtsi32_si128(b), _mm_cvtsi32_si128(a));
        const __m256i each = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1));
        const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
        const __m256i set = _mm256_and_si256(_mm256_shuffle_epi8(words, each), bit);
        return bits_and(_mm256_cmpeq_epi8(set, bit), value);
    }
    template <int s0, int s1, int, int> static i32 fields4(const uint8_t *p, uint8_t mask) {
        static_assert(s0 * s1 >= 0, "one direction");
        constexpr int a = s0 < 0 ? -s0 : s0, b = s1 < 0 ? -s1 : s1;
        const __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
        const __m256i by = _mm256_setr_epi32(a, a, a, a, b, b, b, b);
        return bits_and(s0 < 0 || s1 < 0 ? _mm256_srlv_epi32(v, by) : _mm256_sllv_epi32(v, by), mask);
    }
    template <int s> static i32 shift_bytes(i32 a, uint8_t mask) {
        return bits_and(s < 0 ? _mm256_srli_epi16(a, s < 0 ? -s : 0) : _mm256_slli_epi16(a, s < 0 ? 0 : s), mask);
    }
    static constexpr int top_factor = 1;
    static i32 top4(i32 a) { return high4(a); }
    static __m128i sixteen_values(const int8_t *values) { return _mm_loadu_si128((const __m128i *)values); }
    static i32 lookup(i32 a, const int8_t *values) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(sixteen_values(values)), a);
    }
    static void lookup16(const int8_t *values, void *p) {
        _mm_storeu_si128((__m128i *)p, _mm_shuffle_epi8(sixteen_values(values), _mm_loadu_si128((const __m128i *)p)));
    }
    static i32 dot2_u8(i32 c, i32 w0, i32 x0, i32 w1, i32 x1) { // four products of at most 64 * 127 fit into 16 bits
        return widen_add(c, _mm256_add_epi16(_mm256_maddubs_epi16(w0, x0), _mm256_maddubs_epi16(w1, x1)));
    }
    template <int k> static f32 float_s8(i32 a) {
        return to_f32(_mm256_srai_epi32(k == 3 ? a : _mm256_slli_epi32(a, 24 - 8 * k), 24));
    }
    template <int k, int minus> static f32 float_u5(i32 a) {
        const f32 v = float_u8<k>(a);
        return minus ? sub(v, splat((float)minus)) : v;
    }
    template <int k> static f32 float_u6_minus_32(i32 a) { return sub(float_u8<k>(a), splat(32.0f)); }
    template <int at> static f32 float_bits2(i32 a) {
        return to_f32(_mm256_and_si256(_mm256_srli_epi32(a, at), _mm256_set1_epi32(3)));
    }
    static w16 add16(w16 a, w16 b) { return {add(a.lo, b.lo), add(a.hi, b.hi)}; }
    static f32 sub16(f32 a, w16 b) { return sub(a, add(b.lo, b.hi)); }
};
} // namespace
