// isa_avx2.cpp - the kernels for AVX2 + FMA + F16C.
#include "isa_begin.h"

#if defined(__x86_64__)
TE_ISA_BEGIN("avx2,fma,f16c,popcnt")
#include "vec_avx2.hpp"
#include "codec.hpp"
#include "codec_k.hpp"
#include "rows.hpp"
#include "elem.hpp"
#include "table.hpp"
#include "gemm.hpp"
TE_KERNEL_TABLE(avx2, vec_avx2, gemm_table<vec_avx2>())
TE_ISA_END
#endif
