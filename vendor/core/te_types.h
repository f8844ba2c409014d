/* te_types.h - the weight formats of ggml. TE_TYPES(X) is the only list of formats in the tree.
 *
 *     X(TAG, ggml id, codec name, bytes per block, weights per block)
 *
 * Adding a format: a line here, a block struct with its size assertion below, a scalar pair in te_quant.c, and, if it
 * shall be fast, a codec in vendor/cpu/codec.hpp. */
#ifndef TE_TYPES_H
#define TE_TYPES_H

#include <stddef.h>
#include <stdint.h>

#define TE_TYPES(X)                                                                                                    \
    X(F32, 0, f32, 4, 1)                                                                                               \
    X(F16, 1, f16, 2, 1)                                                                                               \
    X(Q4_0, 2, q4_0, 18, 32)                                                                                           \
    X(Q4_1, 3, q4_1, 20, 32)                                                                                           \
    X(Q5_0, 6, q5_0, 22, 32)                                                                                           \
    X(Q5_1, 7, q5_1, 24, 32)                                                                                           \
    X(Q8_0, 8, q8_0, 34, 32)                                                                                           \
    X(Q8_1, 9, q8_1, 36, 32)                                                                                           \
    X(Q2_K, 10, q2_k, 84, 256)                                                                                         \
    X(Q3_K, 11, q3_k, 110, 256)                                                                                        \
    X(Q4_K, 12, q4_k, 144, 256)                                                                                        \
    X(Q5_K, 13, q5_k, 176, 256)                                                                                        \
    X(Q6_K, 14, q6_k, 210, 256)                                                                                        \
    X(Q8_K, 15, q8_k, 292, 256)                                                                                        \
    X(IQ2_XXS, 16, iq2_xxs, 66, 256)                                                                                   \
    X(IQ2_XS, 17, iq2_xs, 74, 256)                                                                                     \
    X(IQ3_XXS, 18, iq3_xxs, 98, 256)                                                                                   \
    X(IQ1_S, 19, iq1_s, 50, 256)                                                                                       \
    X(IQ4_NL, 20, iq4_nl, 18, 32)                                                                                      \
    X(IQ3_S, 21, iq3_s, 110, 256)                                                                                      \
    X(IQ2_S, 22, iq2_s, 82, 256)                                                                                       \
    X(IQ4_XS, 23, iq4_xs, 136, 256)                                                                                    \
    X(I8, 24, i8, 1, 1)                                                                                                \
    X(I16, 25, i16, 2, 1)                                                                                              \
    X(I32, 26, i32, 4, 1)                                                                                              \
    X(I64, 27, i64, 8, 1)                                                                                              \
    X(F64, 28, f64, 8, 1)                                                                                              \
    X(IQ1_M, 29, iq1_m, 56, 256)                                                                                       \
    X(BF16, 30, bf16, 2, 1)                                                                                            \
    X(TQ1_0, 34, tq1_0, 54, 256)                                                                                       \
    X(TQ2_0, 35, tq2_0, 66, 256)                                                                                       \
    X(MXFP4, 39, mxfp4, 17, 32)                                                                                        \
    X(NVFP4, 40, nvfp4, 36, 64)                                                                                        \
    X(Q1_0, 41, q1_0, 18, 128)

typedef enum te_type {
#define X(tag, id, codec, bytes, n) TE_##tag = (id),
    TE_TYPES(X)
#undef X
        TE_TYPE_LIMIT = 64 /* ids are below; tables indexed by id have this many entries */
} te_type;

typedef struct te_type_info {
    const char *name; /* "Q4_0" */
    int32_t block_bytes;
    int32_t block_weights;
} te_type_info;

#ifdef __cplusplus
extern "C" {
#endif

/* NULL if id is not a known format. */
const te_type_info *te_type_get(int32_t id);

/* Bytes of n weights; n is a multiple of the block. */
size_t te_row_bytes(int32_t type, int64_t n);

#ifdef __cplusplus
}
#endif

/* Blocks of the formats that have vector kernels. d, dmin: IEEE half. */
typedef struct te_block_q4_0 {
    uint16_t d;
    uint8_t q[16];
} te_block_q4_0; /* w[i] = d*((q[i]&15)-8), w[16+i] = d*((q[i]>>4)-8) */
typedef struct te_block_q8_0 {
    uint16_t d;
    int8_t q[32];
} te_block_q8_0; /* w[i] = d*q[i] */
/* Six-bit scales sc_u and minima m_u of eight units of 32 weights in 12 bytes: w = d*sc_u*q - dmin*m_u. */
typedef struct te_block_q4_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t q[128];
} te_block_q4_k;
typedef struct te_block_q5_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t q[128];
} te_block_q5_k;
/* Sixteen int8 scales of 16 weights each: w = d*sc*(q-32), q = four low bits in ql, two high bits in qh. */
typedef struct te_block_q6_k {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t scales[16];
    uint16_t d;
} te_block_q6_k;

#ifdef __cplusplus
#define TE_STATIC_ASSERT(x) static_assert(x, #x)
#else
#define TE_STATIC_ASSERT(x) _Static_assert(x, #x)
#endif
TE_STATIC_ASSERT(sizeof(te_block_q4_0) == 18);
TE_STATIC_ASSERT(sizeof(te_block_q8_0) == 34);
TE_STATIC_ASSERT(sizeof(te_block_q4_k) == 144);
TE_STATIC_ASSERT(sizeof(te_block_q5_k) == 176);
TE_STATIC_ASSERT(sizeof(te_block_q6_k) == 210);

#endif
