// isa_amx.cpp - AMX changes one thing, many tokens at once; everything else is AVX-512's, where the table is made.
#include "isa_begin.h"

#if defined(__x86_64__)
#include "gemm_amx_table.hpp"

TE_ISA_BEGIN("avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16")
#include "vec_avx512.hpp"
#include "codec.hpp"
#include "codec_k.hpp"
#include "codec_32.hpp"
#include "codec_256.hpp"
namespace {
template <class V> const te_row_kernels &row_table(int32_t type) { return te_kernels_avx512.row[type]; }
} // namespace
#include "gemm.hpp"
#include "unpack.hpp"
#include "gemm_amx.hpp"
extern "C" {
size_t te_amx_pack_bytes(int32_t n_tok, int32_t k) { return gemm_amx::pack_bytes(n_tok, k); }
void te_amx_pack(const float *x, size_t ldx, int32_t n_tok, int32_t k, int32_t t0, int32_t t1, void *px) {
    gemm_amx::pack_tiles<true>(x, ldx, n_tok, k, t0, t1, px);
}
void te_amx_pack_t(const float *h, size_t ldh, int32_t n_tok, int32_t k, int32_t t0, int32_t t1, void *ph) {
    gemm_amx::pack_tiles<false>(h, ldh, n_tok, k, t0, t1, ph);
}
size_t te_amx_scratch_bytes(int32_t n_tok, int32_t k) { return gemm_amx::scratch_bytes(n_tok, k); }
void te_amx_begin(void) { gemm_amx::begin(); }
void te_amx_end(void) { gemm_amx::end(); }
void te_amx_gemm(const te_mat *m, int32_t r0, int32_t r1, const void *px, int32_t n_tok, float *y, size_t ldy,
                 const float *bias, bool add, void *scratch) {
    gemm_amx::gemm(m, r0, r1, px, n_tok, y, ldy, bias, add, scratch);
}
void te_amx_gemm_t(const te_mat *m, int32_t c0, int32_t c1, const void *ph, int32_t n_tok, float *y, size_t ldy,
                   const float *bias, bool add, void *scratch) {
    gemm_amx::gemm_t(m, c0, c1, ph, n_tok, y, ldy, bias, add, scratch);
}
}
TE_ISA_END
#endif
