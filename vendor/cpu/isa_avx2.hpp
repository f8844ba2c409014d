// isa_avx2.hpp - AVX2 + FMA + F16C.
#include "isa_begin.h"

TE_ISA_BEGIN("avx2,fma,f16c,popcnt")
#include "vec_avx2.hpp"
TE_ISA_VOCABULARY(avx2, vec_avx2)
#define TE_INT8       "gemm_int8_avx2.hpp"
#define TE_PART(part) TE_PART_OF(avx2, part)
