// gemm_int8_avx2.hpp - what gemm_int8.hpp asks of AVX2: pairs of products are added up in 16 bits, as many as fit
// (weights of b bits: 2^b * 2 * 127 for each pair), before they are widened.
#ifndef TE_GEMM_INT8_AVX2_HPP
#define TE_GEMM_INT8_AVX2_HPP

namespace {
struct int8_avx2 {
    static constexpr uint64_t types = 1ull << TE_MXFP4 | 1ull << TE_Q4_0 | 1ull << TE_Q4_1 | 1ull << TE_Q5_0 |
                                      1ull << TE_Q5_1 | 1ull << TE_Q2_K | 1ull << TE_Q3_K | 1ull << TE_Q4_K |
                                      1ull << TE_Q5_K | 1ull << TE_Q6_K;
    static constexpr bool by_token = false;
    // Break-even with the row kernels, one thread: with 6 tokens Q4_K 1.3, Q4_0 1.1, Q6_K 0.7, with 8 1.6, 1.4, 1.0.
    static constexpr uint16_t min_tok(int type) { return type == TE_Q6_K ? 8 : 6; }
    using sums = __m256i;
    static constexpr int vectors = 2;
    static constexpr int run(int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 0; }
    static void dot(__m256i &, sums &s, int j, __m256i w, __m256i x) {
        s = j == 0 ? _mm256_maddubs_epi16(w, x) : _mm256_add_epi16(s, _mm256_maddubs_epi16(w, x));
        if (j > 0) __asm__("" : "+x"(s)); // or gcc adds up in another order, for which it keeps all products in memory
    }
    static void end(__m256i &total, sums &s) {
        total = _mm256_add_epi32(total, _mm256_madd_epi16(s, _mm256_set1_epi16(1)));
    }
    static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
    static __m256i shift(__m256i a, int n) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(n)); }
    static __m256i broadcast(const uint8_t *p) {
        int32_t w;
        memcpy(&w, p, 4);
        return _mm256_set1_epi32(w);
    }
};
using isa_int8 = int8_avx2;
using isa_gemm_int8 = gemm_int8<isa_vec, int8_by_32<isa_vec, int8_avx2>>;
} // namespace

#endif
