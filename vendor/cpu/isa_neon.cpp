// isa_neon.cpp - the kernels for Advanced SIMD, which every 64-bit ARM processor has: no target to switch to.
#include "isa_begin.h"

#if defined(__aarch64__)
#include "vec_neon.hpp"
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
TE_KERNEL_TABLE(neon, vec_neon, gemm_table<vec_neon>())
#endif
