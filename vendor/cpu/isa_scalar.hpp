// isa_scalar.hpp - portable C++.
#include "isa_begin.h"

TE_ISA_ANY
#include "vec_scalar.hpp"
TE_ISA_VOCABULARY(scalar, vec_scalar)
#define TE_PART(part) TE_PART_OF(scalar, part)
