/* te_quant_rows.h - private to te_quant*.c: functions per format that turn whole blocks into floats, and back.
 *
 * te_NAME_to_f32(src, dst, n), te_NAME_from_f32(src, dst, n): n weights, a multiple of the block; bytes unaligned.
 * Every expression is evaluated in float, in the order that the formula in the comment gives, so that the results are
 * the same bits everywhere (no multiply may be fused with an addition). */
#ifndef TE_QUANT_ROWS_H
#define TE_QUANT_ROWS_H

#include <stdint.h>

#include "te_half.h"

typedef void te_to_f32(const uint8_t *src, float *dst, int64_t n);

te_to_f32 te_q2_k_to_f32, te_q3_k_to_f32, te_q4_k_to_f32, te_q5_k_to_f32, te_q6_k_to_f32, te_tq1_0_to_f32,
    te_tq2_0_to_f32;
te_to_f32 te_iq1_s_to_f32, te_iq1_m_to_f32, te_iq2_xxs_to_f32, te_iq2_xs_to_f32, te_iq2_s_to_f32, te_iq3_xxs_to_f32,
    te_iq3_s_to_f32;
te_to_f32 te_iq4_nl_to_f32, te_iq4_xs_to_f32;

typedef void te_from_f32(const float *src, uint8_t *dst, int64_t n);

te_from_f32 te_f32_from_f32, te_f16_from_f32, te_bf16_from_f32;
te_from_f32 te_q4_0_from_f32, te_q4_1_from_f32, te_q5_0_from_f32, te_q5_1_from_f32, te_q8_0_from_f32,
    te_iq4_nl_from_f32, te_mxfp4_from_f32;
te_from_f32 te_q2_k_from_f32, te_q3_k_from_f32, te_q4_k_from_f32, te_q5_k_from_f32, te_q6_k_from_f32;

/* What the 16 codes of IQ4_NL and IQ4_XS stand for, ascending; and those of MXFP4 and NVFP4: twice the values of the
 * 4-bit float E2M1. */
extern const int8_t te_iq4_value[16], te_fp4_value[16];

static inline uint16_t te_load_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

static inline uint32_t te_load_u32(const uint8_t *p) {
    return (uint32_t)te_load_u16(p) | (uint32_t)te_load_u16(p + 2) << 16;
}

static inline float te_load_f16(const uint8_t *p) { return te_f16_to_f32(te_load_u16(p)); }

static inline void te_store_u16(uint8_t *p, uint16_t v) {
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

static inline void te_store_f16(uint8_t *p, float v) { te_store_u16(p, te_f32_to_f16(v)); }

/* The nearest half, as a float: what a reader of a block will see. */
static inline float te_as_f16(float v) { return te_f16_to_f32(te_f32_to_f16(v)); }

#endif
