// vec_avx2_vnni.hpp - vec_avx2.hpp with AVX-VNNI: four products of bytes and their sum in one instruction.
namespace {
struct vec_avx2_vnni : vec_avx2 {
    static i32 dot_u8(i32 c, i32 w, i32 x) { return _mm256_dpbusd_avx_epi32(c, w, x); }
    static i32 dot_s8(i32 c, i32 w, i32 x) { // |w| * (x with the sign of w)
        return dot_u8(c, _mm256_sign_epi8(w, w), _mm256_sign_epi8(x, w));
    }
    static i32 dot2_u8(i32 c, i32 w0, i32 x0, i32 w1, i32 x1) { return dot_u8(dot_u8(c, w0, x0), w1, x1); }
    static i32 dot_nibbles(i32 c, i32 q, i32 x0, i32 x1) { return dot2_u8(c, bits_and(q, 15), x0, high4(q), x1); }

    // For rows_q4_0.hpp and rows_panel.hpp.
    static i32 dots(i32 low, const int8_t *x, i32 high, const int8_t *y) {
        return dot2_u8(zero_i32(), low, load_bytes(x), high, load_bytes(y));
    }
    static i32 fold_dwords(i32 a, i32 b) {
        return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    }
    static i32 fold_qwords(i32 a, i32 b, i32 start) {
        return _mm256_add_epi32(start, _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)));
    }
    static i32 q4_0_panel_dot(const i32 *q, const void *low, const void *high, const void *start) {
        const i32 x[4] = {eight_of(low, 0), eight_of(low, 8), eight_of(high, 0), eight_of(high, 8)};
        i32 a = zero_i32(), b = zero_i32();
        for (int k = 0; k < 4; k++) {
            a = dot_u8(a, q[2 * k], x[k]);
            b = dot_u8(b, q[2 * k + 1], x[k]);
        }
        const __m256 fa = _mm256_castsi256_ps(a), fb = _mm256_castsi256_ps(b);
        int32_t s;
        memcpy(&s, start, 4);
        const i32 sum = _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(fa, fb, 0x88)),
                                         _mm256_castps_si256(_mm256_shuffle_ps(fa, fb, 0xdd)));
        return _mm256_add_epi32(_mm256_set1_epi32(s), sum);
    }
};
} // namespace
