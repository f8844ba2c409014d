// isa_avx2_vnni.hpp - AVX2 with AVX-VNNI.
#include "isa_begin.h"

TE_ISA_BEGIN("avx2,fma,f16c,popcnt,avxvnni")
#include "vec_avx2.hpp"
#include "vec_avx2_vnni.hpp"
TE_ISA_VOCABULARY(avx2_vnni, vec_avx2_vnni)
#define TE_PART(part) TE_PART_OF(avx2_vnni, part)
