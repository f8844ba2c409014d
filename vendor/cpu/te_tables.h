/* te_tables.h - the kernel tables that this build holds, one object each. */
#ifndef TE_TABLES_H
#define TE_TABLES_H

#include "te_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif
extern const te_kernels te_kernels_scalar;
#if defined(__x86_64__)
extern const te_kernels te_kernels_avx2, te_kernels_avx512, te_kernels_avx512_bf16, te_kernels_amx;
#elif defined(__aarch64__)
extern const te_kernels te_kernels_neon;
/* Older clangs know the intrinsics of the dot product only where all code is compiled for it. */
#if !defined(__clang__) || __clang_major__ >= 16
#define TE_HAS_NEON_DOT 1
extern const te_kernels te_kernels_neon_dot;
#endif
#endif
#ifdef __cplusplus
}
#endif
#endif
