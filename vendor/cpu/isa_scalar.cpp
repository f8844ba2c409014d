// isa_scalar.cpp - the kernels in portable C++.
#include "isa_begin.h"
#include "vec_scalar.hpp"
#include "codec.hpp"
#include "codec_k.hpp"
#include "codec_32.hpp"
#include "codec_256.hpp"
#include "rows.hpp"
#include "rows_k.hpp"
#include "elem.hpp"
#include "heads.hpp"
#include "table.hpp"
#include "gemm.hpp"
TE_KERNEL_TABLE(scalar, vec_scalar, (gemm_table<vec_scalar>(8, 8)))
