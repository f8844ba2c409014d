// isa_avx512.hpp - AVX-512 F, BW, VL, DQ and VNNI.
#include "isa_begin.h"

TE_ISA_BEGIN("avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#include "vec_avx512.hpp"
TE_ISA_VOCABULARY(avx512, vec_avx512)
#define TE_INT8       "gemm_int8_avx512.hpp"
#define TE_PART(part) TE_PART_OF(avx512, part)
