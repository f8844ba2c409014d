// gemm_bf16_table.hpp - what isa_avx512_bf16.cpp has for its table, which is isa_avx512.cpp's in all other respects.
#ifndef TE_GEMM_BF16_TABLE_HPP
#define TE_GEMM_BF16_TABLE_HPP

#include "te_kernels.h"

extern "C" {
size_t te_bf16_pack_bytes(int32_t n_tok, int32_t k);
void te_bf16_pack(const float *x, size_t ldx, int32_t n_tok, int32_t k, int32_t t0, int32_t t1, void *px);
void te_bf16_gemm(const te_mat *m, int32_t r0, int32_t r1, const void *px, int32_t n_tok, float *y, size_t ldy,
                  const float *bias, bool add, void *scratch);
void te_bf16_gemm_t(const te_mat *m, int32_t c0, int32_t c1, const void *ph, int32_t n_tok, float *y, size_t ldy,
                    const float *bias, bool add, void *scratch);
}

namespace {

// AVX-512's table with other products of floats. Scratch is as large, and by count (TE_BY_COUNT) less than 8 tokens are
// still computed by row kernels, which round nothing to bf16.
constexpr te_gemm_kernels with_bf16(te_gemm_kernels k) {
    k.pack_bytes = te_bf16_pack_bytes;
    k.pack = k.pack_t = te_bf16_pack;
    k.gemm = te_bf16_gemm;
    k.gemm_t = te_bf16_gemm_t;
    return k;
}

} // namespace
#endif
