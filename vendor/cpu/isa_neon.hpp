// isa_neon.hpp - Advanced SIMD, which every 64-bit ARM processor has: no target to switch to.
#include "isa_begin.h"

TE_ISA_ANY
#include "vec_neon.hpp"
TE_ISA_VOCABULARY(neon, vec_neon)
#define TE_PART(part) TE_PART_OF(neon, part)
