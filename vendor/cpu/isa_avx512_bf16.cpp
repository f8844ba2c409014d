// isa_avx512_bf16.cpp - AVX-512 with bf16 changes one thing, products of floats for many tokens; everything else is
// AVX-512's, where the table is made.
#include "isa_begin.h"

#if defined(__x86_64__)
#include "gemm_bf16_table.hpp"

TE_ISA_BEGIN("avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")
#include "vec_avx512.hpp"
namespace {
template <class V> const te_row_kernels &row_table(int32_t type) { return te_kernels_avx512.row[type]; }
} // namespace
#include "gemm.hpp"
#include "gemm_bf16.hpp"
namespace {
using products = gemm_f32<vec_avx512, bf16_pairs>;
} // namespace
extern "C" {
size_t te_bf16_pack_bytes(int32_t n_tok, int32_t k) { return products::pack_bytes(n_tok, k); }
void te_bf16_pack(const float *x, size_t ldx, int32_t n_tok, int32_t k, int32_t t0, int32_t t1, void *px) {
    products::pack(x, ldx, n_tok, k, t0, t1, px);
}
void te_bf16_gemm(const te_mat *m, int32_t r0, int32_t r1, const void *px, int32_t n_tok, float *y, size_t ldy,
                  const float *bias, bool add, void *scratch) {
    products::gemm(m, r0, r1, px, n_tok, y, ldy, bias, add, scratch);
}
void te_bf16_gemm_t(const te_mat *m, int32_t c0, int32_t c1, const void *ph, int32_t n_tok, float *y, size_t ldy,
                    const float *bias, bool add, void *scratch) {
    products::gemm_t(m, c0, c1, ph, n_tok, y, ldy, bias, add, scratch);
}
}
TE_ISA_END
#endif
