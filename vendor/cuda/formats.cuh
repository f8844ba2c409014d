// formats.cuh - the list of weight formats that there are kernels for. Each group is compiled in files of its own
// (rows_k.cu, ffn_k.cu, down_k.cu ...).
#ifndef TE_CUDA_FORMATS_CUH
#define TE_CUDA_FORMATS_CUH

#include "codec_float.cuh"
#include "codec_nibbles.cuh"
#include "codec_q23_k.cuh"
#include "codec_q45_k.cuh"
#include "codec_q4_0.cuh"
#include "codec_q6_k.cuh"
#include "codec_q8_0.cuh"

namespace te {

template <class... C> struct formats {};

typedef formats<codec_f32, codec_f16, codec_bf16> formats_float;
typedef formats<codec_q8_0, codec_q4_0> formats_32;
typedef formats<codec_q4_1, codec_q5_0, codec_q5_1> formats_bits;
typedef formats<codec_iq4_nl, codec_iq4_xs, codec_mxfp4> formats_table;
typedef formats<codec_q4_k, codec_q5_k, codec_q6_k> formats_k;
typedef formats<codec_q2_k, codec_q3_k> formats_k23;
typedef formats<codec_f32, codec_f16, codec_bf16, codec_q8_0, codec_q4_0, codec_q4_1, codec_q5_0, codec_q5_1,
                codec_iq4_nl, codec_iq4_xs, codec_mxfp4, codec_q2_k, codec_q3_k, codec_q4_k, codec_q5_k, codec_q6_k>
    formats_all;
// Those that lie otherwise on a device, as in the file: `in_file` of te_layout.h.
typedef formats<file_q8_0, file_q4_0, file_q6_k> formats_file;

// Of<C>::kernels of the format among these; NULL: it is none of them.
template <template <class> class Of, class K, class... C> const K *kernels_of(formats<C...>, int type) {
    const K *found = nullptr;
    ((found = type == C::type ? &Of<C>::kernels : found), ...);
    return found;
}

} // namespace te
#endif
