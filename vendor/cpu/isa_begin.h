/* isa_begin.h - turns a part of a file into code for one instruction set, without build flags:
 *
 *     #include "isa_begin.h"
 *     TE_ISA_BEGIN("avx2,fma,f16c")
 *     ... vocabulary, kernels, TE_KERNEL_TABLE(avx2, vec_avx2, gemm) ...
 *     TE_ISA_END
 *
 * Every header that is not ours stands here, before the target changes: an inline function of a standard header
 * compiled behind TE_ISA_BEGIN could be the one that the linker keeps for the whole program. For the same reason
 * everything in between lives in an anonymous namespace and the table is the only symbol that leaves the object
 * (of AMX and bf16 functions with names of their own, gemm_*_table.hpp). */
#ifndef TE_ISA_BEGIN_H
#define TE_ISA_BEGIN_H

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
/* gcc 12 warns of its own _mm512_undefined_ps, once inlined. */
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../core/te_half.h"
#include "../core/te_quant.h"
#include "te_kernels.h"
#include "te_tables.h"

#define TE_PRAGMA(s) _Pragma(#s)
#if defined(__clang__)
#define TE_ISA_BEGIN(s) TE_PRAGMA(clang attribute push(__attribute__((target(s))), apply_to = function))
#define TE_ISA_END      TE_PRAGMA(clang attribute pop)
#else
#define TE_ISA_BEGIN(s) TE_PRAGMA(GCC push_options) TE_PRAGMA(GCC target(s))
#define TE_ISA_END      TE_PRAGMA(GCC pop_options)
#endif

#endif
