/* te_tables.h - the kernel tables that this build holds, one object each. */
#ifndef TE_TABLES_H
#define TE_TABLES_H

#include "te_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif
extern const te_kernels te_kernels_scalar;
#if defined(__x86_64__)
extern const te_kernels te_kernels_avx2, te_kernels_avx512, te_kernels_amx;
#endif
#ifdef __cplusplus
}
#endif
#endif
