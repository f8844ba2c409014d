// gemm_bf16.hpp - products for many tokens with AVX-512's dot product of bf16 pairs: gemm.hpp, both operands rounded to
// bf16 as in gemm_amx.hpp, sums in f32. One instruction multiplies and adds twice as many as an fma.
#ifndef TE_GEMM_BF16_HPP
#define TE_GEMM_BF16_HPP

namespace {

struct bf16_pairs {
    static constexpr int32_t per = 2;
    static __m512 fma(__m512 w, __m512 x, __m512 sum) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }

    static __mmask16 first(int32_t n) { return (__mmask16)(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1); }
    // n floats as pairs; a last one alone is paired with 0. Whole registers are stored: `room` is a multiple of 16 wide.
    static const float *row(const float *in, int32_t n, float *room) {
        for (int32_t i = 0; i < n; i += 32) {
            const __m512 lo = _mm512_maskz_loadu_ps(first(n - i), in + i);
            const __m512 hi = n - i > 16 ? _mm512_maskz_loadu_ps(first(n - i - 16), in + i + 16) : _mm512_setzero_ps();
            _mm512_storeu_ps(room + i / 2, (__m512)_mm512_cvtne2ps_pbh(hi, lo));
        }
        return room;
    }
    // Pairs of neighbouring rows, in the same column: n of them.
    static void rows(const float *a, const float *b, int32_t n, float *out) {
        const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                               6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        for (int32_t i = 0; i < n; i += 16) {
            const __mmask16 some = first(n - i);
            const __m512i both =
                (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(some, b + i), _mm512_maskz_loadu_ps(some, a + i));
            _mm512_mask_storeu_ps(out + i, some, (__m512)_mm512_permutexvar_epi16(pairs, both));
        }
    }
};

} // namespace
#endif
