/* te_types.h - the weight formats of ggml. TE_TYPES(X) is the only list of formats in the tree.
 *
 *     X(TAG, ggml id, codec name, bytes per block, weights per block)
 *
 * Adding a format: a line here, a block struct with its size assertion below, a scalar pair in te_quant*.c, and, if it
 * shall be fast, a codec of the CPU and one of GPUs (CONTRIBUTING.md). */
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

/* The block of each format, te_block_NAME. All are made of bytes, because rows begin anywhere: d, dmin and m are
 * little-endian halves, other [2] and [4] words of 16 and 32 bits. The heads of te_quant*.c say what the fields mean.
 *
 * 32 weights: byte i of q has weight i in its low half and weight 16 + i in its high one; bit i of qh is weight i's fifth. */
typedef struct te_block_q4_0 {
    uint8_t d[2];
    uint8_t q[16];
} te_block_q4_0; /* w = d*(q - 8) */
typedef struct te_block_q4_1 {
    uint8_t d[2];
    uint8_t m[2];
    uint8_t q[16];
} te_block_q4_1; /* w = d*q + m */
typedef struct te_block_q5_0 {
    uint8_t d[2];
    uint8_t qh[4];
    uint8_t q[16];
} te_block_q5_0; /* w = d*(q - 16) */
typedef struct te_block_q5_1 {
    uint8_t d[2];
    uint8_t m[2];
    uint8_t qh[4];
    uint8_t q[16];
} te_block_q5_1; /* w = d*q + m */
typedef struct te_block_q8_0 {
    uint8_t d[2];
    int8_t q[32];
} te_block_q8_0; /* w = d*q */
typedef struct te_block_iq4_nl {
    uint8_t d[2];
    uint8_t q[16];
} te_block_iq4_nl; /* w = d*te_iq4_value[q] */
typedef struct te_block_mxfp4 {
    uint8_t e;
    uint8_t q[16];
} te_block_mxfp4; /* w = 2^(e-128)*fp4[q] */

/* 256 weights in units of 32 (scales[12]: eight scales and eight minima of six bits) or 16. */
typedef struct te_block_q2_k {
    uint8_t scales[16];
    uint8_t q[64];
    uint8_t d[2];
    uint8_t dmin[2];
} te_block_q2_k;
typedef struct te_block_q3_k {
    uint8_t qh[32];
    uint8_t q[64];
    uint8_t scales[12];
    uint8_t d[2];
} te_block_q3_k;
typedef struct te_block_q4_k {
    uint8_t d[2];
    uint8_t dmin[2];
    uint8_t scales[12];
    uint8_t q[128];
} te_block_q4_k;
typedef struct te_block_q5_k {
    uint8_t d[2];
    uint8_t dmin[2];
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t q[128];
} te_block_q5_k;
typedef struct te_block_q6_k {
    uint8_t q[128];
    uint8_t qh[64];
    int8_t scales[16];
    uint8_t d[2];
} te_block_q6_k;
typedef struct te_block_iq4_xs {
    uint8_t d[2];
    uint8_t scales_h[2];
    uint8_t scales_l[4];
    uint8_t q[128];
} te_block_iq4_xs;
typedef struct te_block_tq1_0 {
    uint8_t q[48];
    uint8_t q4[4];
    uint8_t d[2];
} te_block_tq1_0;
typedef struct te_block_tq2_0 {
    uint8_t q[64];
    uint8_t d[2];
} te_block_tq2_0;

/* 256 weights by indices into a book of vectors, te_iq_tables.h. */
typedef struct te_block_iq1_s {
    uint8_t d[2];
    uint8_t q[32];
    uint8_t qh[8][2];
} te_block_iq1_s;
typedef struct te_block_iq1_m {
    uint8_t q[32];
    uint8_t qh[16];
    uint8_t scales[4][2];
} te_block_iq1_m;
typedef struct te_block_iq2_xxs {
    uint8_t d[2];
    struct {
        uint8_t q[4];
        uint8_t signs[4];
    } unit[8];
} te_block_iq2_xxs;
typedef struct te_block_iq2_xs {
    uint8_t d[2];
    uint8_t q[32][2];
    uint8_t scales[8];
} te_block_iq2_xs;
typedef struct te_block_iq2_s {
    uint8_t d[2];
    uint8_t q[32];
    uint8_t signs[32];
    uint8_t qh[8];
    uint8_t scales[8];
} te_block_iq2_s;
typedef struct te_block_iq3_xxs {
    uint8_t d[2];
    uint8_t q[64];
    uint8_t signs[8][4];
} te_block_iq3_xxs;
typedef struct te_block_iq3_s {
    uint8_t d[2];
    uint8_t q[64];
    uint8_t qh[8];
    uint8_t signs[32];
    uint8_t scales[4];
} te_block_iq3_s;

typedef struct te_block_nvfp4 {
    uint8_t scales[4];
    uint8_t q[4][8];
} te_block_nvfp4;
typedef struct te_block_q1_0 {
    uint8_t d[2];
    uint8_t q[16];
} te_block_q1_0;

#ifdef __cplusplus
#define TE_STATIC_ASSERT(x) static_assert(x, #x)
#else
#define TE_STATIC_ASSERT(x) _Static_assert(x, #x)
#endif

TE_STATIC_ASSERT(sizeof(te_block_q4_0) == 18);
TE_STATIC_ASSERT(sizeof(te_block_q4_1) == 20);
TE_STATIC_ASSERT(sizeof(te_block_q5_0) == 22);
TE_STATIC_ASSERT(sizeof(te_block_q5_1) == 24);
TE_STATIC_ASSERT(sizeof(te_block_q8_0) == 34);
TE_STATIC_ASSERT(sizeof(te_block_iq4_nl) == 18);
TE_STATIC_ASSERT(sizeof(te_block_mxfp4) == 17);
TE_STATIC_ASSERT(sizeof(te_block_q2_k) == 84);
TE_STATIC_ASSERT(sizeof(te_block_q3_k) == 110);
TE_STATIC_ASSERT(sizeof(te_block_q4_k) == 144);
TE_STATIC_ASSERT(sizeof(te_block_q5_k) == 176);
TE_STATIC_ASSERT(sizeof(te_block_q6_k) == 210);
TE_STATIC_ASSERT(sizeof(te_block_iq4_xs) == 136);
TE_STATIC_ASSERT(sizeof(te_block_tq1_0) == 54);
TE_STATIC_ASSERT(sizeof(te_block_tq2_0) == 66);
TE_STATIC_ASSERT(sizeof(te_block_iq1_s) == 50);
TE_STATIC_ASSERT(sizeof(te_block_iq1_m) == 56);
TE_STATIC_ASSERT(sizeof(te_block_iq2_xxs) == 66);
TE_STATIC_ASSERT(sizeof(te_block_iq2_xs) == 74);
TE_STATIC_ASSERT(sizeof(te_block_iq2_s) == 82);
TE_STATIC_ASSERT(sizeof(te_block_iq3_xxs) == 98);
TE_STATIC_ASSERT(sizeof(te_block_iq3_s) == 110);
TE_STATIC_ASSERT(sizeof(te_block_nvfp4) == 36);
TE_STATIC_ASSERT(sizeof(te_block_q1_0) == 18);

#endif
