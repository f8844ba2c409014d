/* parts.h - the kernel tables of this build and the parts that fill them.
 *
 * CMakeLists.txt makes one object of each part for each instruction set, so that compilers work side by side and none
 * takes long: `kernels` there lists them. The object of part P for set S defines one function, te_S_P, and nothing else
 * (in builds that are not optimised, a set has one object).
 * te_cpu.c says which parts fill which table, and runs them only where the instruction set runs. */
#ifndef PARTS_H
#define PARTS_H

#include "te_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Puts the part's kernels into the table. */
typedef void te_part(te_kernels *table);

/* Parts that every set of its own vocabulary has. */
#define TE_TABLE(isa)                                                                                                  \
    extern te_kernels te_kernels_##isa;                                                                                \
    te_part te_##isa##_rows_float, te_##isa##_rows_32, te_##isa##_rows_k, te_##isa##_rows_256, te_##isa##_vectors,     \
        te_##isa##_gemm

TE_TABLE(scalar);
#if defined(__x86_64__)
TE_TABLE(avx2);
te_part te_avx2_gemm_int8;
/* AVX2's table with other rows of integers. */
extern te_kernels te_kernels_avx2_vnni;
te_part te_avx2_vnni_rows_32, te_avx2_vnni_rows_k, te_avx2_vnni_rows_256;
TE_TABLE(avx512);
te_part te_avx512_gemm_int8, te_avx512_gemm_int8_k;
/* AVX-512's tables with other products of floats. */
extern te_kernels te_kernels_avx512_bf16, te_kernels_amx;
te_part te_avx512_bf16_gemm_bf16, te_amx_gemm_amx;
#elif defined(__aarch64__)
TE_TABLE(neon);
/* Older clangs know the intrinsics of the dot product only where all code is compiled for it. */
#if !defined(__clang__) || __clang_major__ >= 16
#define TE_HAS_NEON_DOT 1
TE_TABLE(neon_dot);
#endif
#endif
#undef TE_TABLE

#ifdef __cplusplus
}
#endif
#endif
