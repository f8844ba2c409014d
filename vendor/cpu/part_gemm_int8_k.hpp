// part_gemm_int8_k.hpp - such products for the K formats on AVX-512; after `gemm_int8`.
#include "codec.hpp"
#include "codec_k.hpp"
#include "gemm.hpp"
#include "unpack.hpp"
#include "gemm_int8.hpp"
#include "gemm_int8_k.hpp"
#include TE_INT8

TE_PART(gemm_int8_k) {
    using G = gemm_int8<isa_vec, int8_k>;
    static_assert(sizeof(G::scratch) >= sizeof(isa_gemm_int8::scratch), "there is one scratch memory");
    fill_int8<G, int8_k>(&table->gemm, 1);
}
