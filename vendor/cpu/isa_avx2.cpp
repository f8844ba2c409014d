// isa_avx2.cpp - the kernels for AVX2 + FMA + F16C.
#include "isa_begin.h"

#if defined(__x86_64__)
TE_ISA_BEGIN("avx2,fma,f16c,popcnt")
#include "vec_avx2.hpp"
#include "codec.hpp"
#include "codec_k.hpp"
#include "codec_32.hpp"
#include "codec_256.hpp"
#include "rows.hpp"
#include "rows_k.hpp"
#include "rows_few.hpp"
#include "elem.hpp"
#include "heads.hpp"
#include "table.hpp"
#include "gemm.hpp"
#include "unpack.hpp"
#include "gemm_int8.hpp"
#include "gemm_int8_avx2.hpp"
TE_KERNEL_TABLE(avx2, vec_avx2, (gemm_table_int8<vec_avx2, int8_avx2>()))
TE_ISA_END
#endif
