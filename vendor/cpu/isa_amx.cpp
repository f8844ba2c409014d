// isa_amx.cpp - AMX changes one thing, many tokens at once; everything else is AVX-512's.
#include "isa_begin.h"

#if defined(__x86_64__)
TE_ISA_BEGIN("avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16")
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
#include "gemm_amx.hpp"
TE_KERNEL_TABLE(amx, vec_avx512, gemm_table_amx())
TE_ISA_END
#endif
