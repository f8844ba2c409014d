// gemm_int8_avx512.hpp - what gemm_int8.hpp asks of AVX-512 VNNI: one instruction adds four products to a 32-bit lane,
// in whole registers one each cycle, so that all that has to do with scales runs beside it.
namespace {
struct int8_avx512 {
    static constexpr uint64_t types = 1ull << TE_Q4_0 | 1ull << TE_Q4_1 | 1ull << TE_Q5_0 | 1ull << TE_Q5_1 |
                                      1ull << TE_Q8_0 | 1ull << TE_IQ4_NL | 1ull << TE_MXFP4;
    // Break-even with the row kernels, one thread: with 8 tokens Q8_0 1.2, Q4_0 0.9, with 12 1.7, 1.5.
    static constexpr uint16_t min_tok(int type) { return type == TE_Q4_0 ? 9 : 8; }
    using sums = __m512i;
    static constexpr int vectors = 3;
    static constexpr int run(int) { return 8; }
    static void dot(__m512i &total, sums &, int, __m512i w, __m512i x) { total = _mm512_dpbusd_epi32(total, w, x); }
    static void end(__m512i &, sums &) {}
    static __m512i add(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
    static __m512i shift(__m512i a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
    static __m512i broadcast(const uint8_t *p) {
        int32_t w;
        memcpy(&w, p, 4);
        return _mm512_set1_epi32(w);
    }
};
using isa_int8 = int8_avx512;
} // namespace
