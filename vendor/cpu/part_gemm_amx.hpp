// part_gemm_amx.hpp - products of bf16 tiles for many tokens, of all formats.
#include "codec.hpp"
#include "codec_k.hpp"
#include "gemm.hpp"
#include "unpack.hpp"
#include "elem.hpp"
#include "gemm_amx.hpp"
#include "attend_amx.hpp"

TE_PART(gemm_amx) {
    using G = gemm_amx;
    // Time of the row kernels over that of gemm, one thread, 4096 columns: with 6 tokens F16 2.0, Q8_0 1.5, Q4_0 1.1,
    // Q4_K 0.8, with 8 tokens 2.5, 2.0, 1.4, 1.0; gemm_t wins from 6 on.
    te_gemm_kernels k = {};
    // F16 would win from 3 tokens on; but below 8 nothing is rounded to bf16, so that a short part of a prompt answers as
    // its tokens one by one.
    k.min_tok = 8;
    for (uint16_t &n : k.linear_min_tok) n = 8;
    k.pack_unit = 16;
    k.row_unit = 64;
    k.pack_bytes = G::pack_bytes;
    k.pack = G::pack_tiles<true>;
    k.pack_t = G::pack_tiles<false>;
    k.scratch_bytes = G::scratch_bytes;
    k.begin = G::begin;
    k.end = G::end;
    k.gemm = G::gemm;
    k.gemm_t = G::gemm_t;
    k.glu = G::glu;
    k.attend_bytes = attend_amx::bytes;
    k.attend = attend_amx::attend;
    k.attend_end = attend_amx::end;
    table->gemm = k;
}
