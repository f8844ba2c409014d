/* isa_begin.h - turns what follows into code for one instruction set, without build flags. isa_NAME.hpp uses it:
 *
 *     #include "isa_begin.h"
 *     TE_ISA_BEGIN("avx2,fma,f16c")
 *     #include "vec_avx2.hpp"
 *     TE_ISA_VOCABULARY(avx2, vec_avx2)
 *
 * and the files that CMakeLists.txt makes of it and its parts end with TE_ISA_END. A set that needs no target begins
 * with TE_ISA_ANY.
 *
 * Every header that is not ours stands here, before the target changes: an inline function of a standard header
 * compiled behind TE_ISA_BEGIN could be the one that the linker keeps for the whole program. For the same reason
 * everything in between lives in an anonymous namespace and the part's function is the only symbol that leaves the
 * object. */
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
#include "parts.h"

#define TE_PRAGMA(s) _Pragma(#s)
#if defined(__clang__)
#define TE_ISA_BEGIN(s) TE_PRAGMA(clang attribute push(__attribute__((target(s))), apply_to = function))
#define TE_ISA_ANY      TE_PRAGMA(clang attribute push)
#define TE_ISA_END      TE_PRAGMA(clang attribute pop)
#else
#define TE_ISA_BEGIN(s) TE_PRAGMA(GCC push_options) TE_PRAGMA(GCC target(s))
#define TE_ISA_ANY      TE_PRAGMA(GCC push_options)
#define TE_ISA_END      TE_PRAGMA(GCC pop_options)
#endif

/* What parts need of a set: its vocabulary, and the row kernels of a type in its table. */
#define TE_ISA_VOCABULARY(isa, vocabulary)                                                                             \
    namespace {                                                                                                        \
    using isa_vec = vocabulary;                                                                                        \
    inline const te_row_kernels &row_table(int32_t type) { return te_kernels_##isa.row[type]; }                        \
    }
/* The head of a part's function. */
#define TE_PART_OF(isa, part) extern "C" void te_##isa##_##part(te_kernels *table)

#endif
