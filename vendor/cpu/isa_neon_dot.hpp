// isa_neon_dot.hpp - Advanced SIMD with the dot product extension.
#include "isa_begin.h"

TE_ISA_BEGIN("arch=armv8.2-a+dotprod")
#include "vec_neon.hpp"
#include "vec_neon_dot.hpp"
TE_ISA_VOCABULARY(neon_dot, vec_neon_dot)
#define TE_PART(part) TE_PART_OF(neon_dot, part)
