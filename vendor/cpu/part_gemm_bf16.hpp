// part_gemm_bf16.hpp - products of pairs of bf16 for many tokens. Scratch is as large as that of floats, and by count
// (TE_BY_COUNT) less than 8 tokens are still computed by row kernels, which round nothing to bf16.
#include "gemm.hpp"
#include "gemm_bf16.hpp"

TE_PART(gemm_bf16) {
    using G = gemm_f32<isa_vec, bf16_pairs>;
    te_gemm_kernels *k = &table->gemm;
    k->pack_bytes = G::pack_bytes;
    k->pack = k->pack_t = G::pack;
    k->gemm = G::gemm;
    k->gemm_t = G::gemm_t;
}
