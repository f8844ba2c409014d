// isa_scalar.cpp - the kernels in portable C++.
#include "isa_begin.h"
#include "vec_scalar.hpp"
#include "codec.hpp"
#include "codec_k.hpp"
#include "rows.hpp"
#include "elem.hpp"
#include "table.hpp"
#include "gemm.hpp"
TE_KERNEL_TABLE(scalar, vec_scalar, gemm_table<vec_scalar>(8))
