// isa_amx.hpp - AVX-512 with products of bf16 and AMX.
#include "isa_begin.h"

#ifdef TE_EMULATE_AMX
TE_ISA_BEGIN("avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")
#include "tiles_emulated.hpp"
#else
TE_ISA_BEGIN("avx2,fma,f16c,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16")
#endif
#include "vec_avx512.hpp"
TE_ISA_VOCABULARY(amx, vec_avx512)
#define TE_PART(part) TE_PART_OF(amx, part)
