// part_gemm_int8.hpp - products for many tokens in 8-bit integers; after `gemm`.
#include "codec.hpp"
#include "codec_k.hpp"
#include "gemm.hpp"
#include "unpack.hpp"
#include "gemm_int8.hpp"
#include TE_INT8

TE_PART(gemm_int8) { fill_int8<isa_gemm_int8, isa_int8>(&table->gemm, 0); }
