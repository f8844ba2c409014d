// gemm_amx_table.hpp - what isa_amx.cpp has for the table of AMX, which is isa_avx512.cpp's in all other respects.
#ifndef TE_GEMM_AMX_TABLE_HPP
#define TE_GEMM_AMX_TABLE_HPP

#include "te_kernels.h"

extern "C" {
size_t te_amx_pack_bytes(int32_t n_tok, int32_t k);
void te_amx_pack(const float *x, size_t ldx, int32_t n_tok, int32_t k, int32_t t0, int32_t t1, void *px);
void te_amx_pack_t(const float *h, size_t ldh, int32_t n_tok, int32_t k, int32_t t0, int32_t t1, void *ph);
size_t te_amx_scratch_bytes(int32_t n_tok, int32_t k);
void te_amx_begin(void);
void te_amx_end(void);
void te_amx_gemm(const te_mat *m, int32_t r0, int32_t r1, const void *px, int32_t n_tok, float *y, size_t ldy,
                 const float *bias, bool add, void *scratch);
void te_amx_gemm_t(const te_mat *m, int32_t c0, int32_t c1, const void *ph, int32_t n_tok, float *y, size_t ldy,
                   const float *bias, bool add, void *scratch);
}

namespace {

constexpr te_gemm_kernels gemm_table_amx() {
    // Time of the row kernels over that of gemm, one thread, 4096 columns: with 6 tokens F16 2.0, Q8_0 1.5, Q4_0 1.1,
    // Q4_K 0.8, with 8 tokens 2.5, 2.0, 1.4, 1.0; gemm_t wins from 6 on.
    te_gemm_kernels k = {};
    // F16 would win from 3 tokens on; but below 8 nothing is rounded to bf16, so that a short part of a prompt answers as
    // its tokens one by one.
    k.min_tok = 8;
    for (int i = 0; i < TE_TYPE_LIMIT; i++) k.linear_min_tok[i] = 8;
    k.pack_unit = 16;
    k.row_unit = 64;
    k.pack_bytes = te_amx_pack_bytes;
    k.pack = te_amx_pack;
    k.pack_t = te_amx_pack_t;
    k.scratch_bytes = te_amx_scratch_bytes;
    k.begin = te_amx_begin;
    k.end = te_amx_end;
    k.gemm = te_amx_gemm;
    k.gemm_t = te_amx_gemm_t;
    return k;
}

} // namespace
#endif
