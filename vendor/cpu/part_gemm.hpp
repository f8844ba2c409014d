// part_gemm.hpp - products for many tokens in floats.
#include "gemm.hpp"

TE_PART(gemm) { table->gemm = table->floats = gemm_table<isa_vec>(); }
