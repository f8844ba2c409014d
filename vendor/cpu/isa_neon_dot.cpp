// isa_neon_dot.cpp - the kernels for Advanced SIMD with the dot product extension.
#include "isa_begin.h"

#if defined(TE_HAS_NEON_DOT)
TE_ISA_BEGIN("arch=armv8.2-a+dotprod")
#include "vec_neon.hpp"
#include "vec_neon_dot.hpp"
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
TE_KERNEL_TABLE(neon_dot, vec_neon_dot, gemm_table<vec_neon_dot>())
TE_ISA_END
#endif
