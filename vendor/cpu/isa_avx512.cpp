// isa_avx512.cpp - the kernels for AVX-512 F, BW, VL, DQ and VNNI; and the tables of bf16 and AMX, which
// change one thing each, isa_avx512_bf16.cpp and isa_amx.cpp.
#include "isa_begin.h"

#if defined(__x86_64__)
#include "gemm_amx_table.hpp"
#include "gemm_bf16_table.hpp"

TE_ISA_BEGIN("avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#include "vec_avx512.hpp"
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
#include "gemm_int8_avx512.hpp"
#include "gemm_int8_k.hpp"
TE_KERNEL_TABLE(avx512, vec_avx512, (with_int8_k(gemm_table_int8<vec_avx512, int8_avx512>())))
TE_KERNEL_TABLE(avx512_bf16, vec_avx512, (with_bf16(with_int8_k(gemm_table_int8<vec_avx512, int8_avx512>()))))
TE_KERNEL_TABLE(amx, vec_avx512, gemm_table_amx())
TE_ISA_END
#endif
