/* te_quant.c - dispatch by type, both ways; the float types and the formats of 32 weights (and NVFP4, Q1_0) to floats.
 *
 * In a block of 32, byte i of the four-bit part holds weight i (low half) and weight 16 + i (high half). d and m are
 * halves. In the order of the block:
 *   Q4_0:  d, q[16]              w = d*(q - 8)
 *   Q5_0:  d, high[4], q[16]     w = d*(q - 16), the fifth bit of weight i is bit i of high
 *   Q4_1:  d, m, q[16]           w = d*q + m
 *   Q5_1:  d, m, high[4], q[16]  w = d*q + m
 *   Q8_0:  d, q[32]              w = d*q
 *   MXFP4: e, q[16]              w = 2^(e-128)*fp4[q], fp4 doubled to stay whole */
#include "te_quant.h"

#include <stddef.h>
#include <string.h>

#include "te_quant_rows.h"
#include "te_types.h"

const int8_t te_fp4_value[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static void f32_to_f32(const uint8_t *src, float *dst, int64_t n) { memcpy(dst, src, (size_t)n * sizeof *dst); }

static void f16_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) dst[i] = te_f16_to_f32(te_load_u16(src + 2 * i));
}

static void bf16_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) dst[i] = te_bf16_to_f32(te_load_u16(src + 2 * i));
}

static void f64_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        double w;
        memcpy(&w, src + 8 * i, sizeof w);
        dst[i] = (float)w;
    }
}

static void q1_0_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_q1_0 *b = (const te_block_q1_0 *)src; n > 0; n -= 128, b++, dst += 128) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 128; i++) dst[i] = b->q[i / 8] >> i % 8 & 1 ? d : -d;
    }
}

static void q4_0_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_q4_0 *b = (const te_block_q4_0 *)src; n > 0; n -= 32, b++, dst += 32) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 16; i++) {
            dst[i] = d * (float)((b->q[i] & 15) - 8);
            dst[16 + i] = d * (float)((b->q[i] >> 4) - 8);
        }
    }
}

static void q4_1_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_q4_1 *b = (const te_block_q4_1 *)src; n > 0; n -= 32, b++, dst += 32) {
        const float d = te_load_f16(b->d), m = te_load_f16(b->m);
        for (int i = 0; i < 16; i++) {
            dst[i] = d * (float)(b->q[i] & 15) + m;
            dst[16 + i] = d * (float)(b->q[i] >> 4) + m;
        }
    }
}

/* Weight i of a block of 32 with five bits. */
static int five_bits(const uint8_t *q, uint32_t high, int i) {
    return (q[i % 16] >> i / 16 * 4 & 15) | (int)(high >> i & 1) << 4;
}

static void q5_0_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_q5_0 *b = (const te_block_q5_0 *)src; n > 0; n -= 32, b++, dst += 32) {
        const float d = te_load_f16(b->d);
        const uint32_t high = te_load_u32(b->qh);
        for (int i = 0; i < 32; i++) dst[i] = d * (float)(five_bits(b->q, high, i) - 16);
    }
}

static void q5_1_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_q5_1 *b = (const te_block_q5_1 *)src; n > 0; n -= 32, b++, dst += 32) {
        const float d = te_load_f16(b->d), m = te_load_f16(b->m);
        const uint32_t high = te_load_u32(b->qh);
        for (int i = 0; i < 32; i++) dst[i] = d * (float)five_bits(b->q, high, i) + m;
    }
}

static void q8_0_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_q8_0 *b = (const te_block_q8_0 *)src; n > 0; n -= 32, b++, dst += 32) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 32; i++) dst[i] = (float)b->q[i] * d;
    }
}

static void mxfp4_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_mxfp4 *b = (const te_block_mxfp4 *)src; n > 0; n -= 32, b++, dst += 32) {
        const float d = te_half_e8m0(b->e);
        for (int i = 0; i < 16; i++) {
            dst[i] = d * (float)te_fp4_value[b->q[i] & 15];
            dst[16 + i] = d * (float)te_fp4_value[b->q[i] >> 4];
        }
    }
}

/* Half of an E4M3 number (the other half of the doubling in te_fp4_value); its sign is not used, and 0x7f, its NaN, is
 * zero. */
static float half_e4m3(uint8_t x) {
    const int exponent = x >> 3 & 15, fraction = x & 7;
    if (x == 0x7f) return 0.0f;
    if (exponent == 0) return (float)fraction * 0x1p-10f;
    return (1.0f + (float)fraction / 8.0f) * te_bits_float((uint32_t)(exponent - 8 + 127) << 23);
}

/* NVFP4: four scales, then four units of 16 weights, each 8 bytes: low halves first. */
static void nvfp4_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_nvfp4 *b = (const te_block_nvfp4 *)src; n > 0; n -= 64, b++, dst += 64) {
        for (int unit = 0; unit < 4; unit++) {
            const float d = half_e4m3(b->scales[unit]);
            const uint8_t *q = b->q[unit];
            for (int i = 0; i < 8; i++) {
                dst[16 * unit + i] = d * (float)te_fp4_value[q[i] & 15];
                dst[16 * unit + 8 + i] = d * (float)te_fp4_value[q[i] >> 4];
            }
        }
    }
}

static te_to_f32 *const to_f32[TE_TYPE_LIMIT] = {
    [TE_F32] = f32_to_f32,
    [TE_F16] = f16_to_f32,
    [TE_BF16] = bf16_to_f32,
    [TE_F64] = f64_to_f32,
    [TE_Q1_0] = q1_0_to_f32,
    [TE_Q4_0] = q4_0_to_f32,
    [TE_Q4_1] = q4_1_to_f32,
    [TE_Q5_0] = q5_0_to_f32,
    [TE_Q5_1] = q5_1_to_f32,
    [TE_Q8_0] = q8_0_to_f32,
    [TE_MXFP4] = mxfp4_to_f32,
    [TE_NVFP4] = nvfp4_to_f32,
    [TE_Q2_K] = te_q2_k_to_f32,
    [TE_Q3_K] = te_q3_k_to_f32,
    [TE_Q4_K] = te_q4_k_to_f32,
    [TE_Q5_K] = te_q5_k_to_f32,
    [TE_Q6_K] = te_q6_k_to_f32,
    [TE_TQ1_0] = te_tq1_0_to_f32,
    [TE_TQ2_0] = te_tq2_0_to_f32,
    [TE_IQ1_S] = te_iq1_s_to_f32,
    [TE_IQ1_M] = te_iq1_m_to_f32,
    [TE_IQ2_XXS] = te_iq2_xxs_to_f32,
    [TE_IQ2_XS] = te_iq2_xs_to_f32,
    [TE_IQ2_S] = te_iq2_s_to_f32,
    [TE_IQ3_XXS] = te_iq3_xxs_to_f32,
    [TE_IQ3_S] = te_iq3_s_to_f32,
    [TE_IQ4_NL] = te_iq4_nl_to_f32,
    [TE_IQ4_XS] = te_iq4_xs_to_f32,
};

bool te_can_dequantize(int32_t type) { return type >= 0 && type < TE_TYPE_LIMIT && to_f32[type] != NULL; }

void te_dequantize_row(int32_t type, const void *src, float *dst, int64_t n) { to_f32[type](src, dst, n); }

static te_from_f32 *const from_f32[TE_TYPE_LIMIT] = {
    [TE_F32] = te_f32_from_f32,   [TE_F16] = te_f16_from_f32,   [TE_BF16] = te_bf16_from_f32,
    [TE_Q4_0] = te_q4_0_from_f32, [TE_Q4_1] = te_q4_1_from_f32, [TE_Q5_0] = te_q5_0_from_f32,
    [TE_Q5_1] = te_q5_1_from_f32, [TE_Q8_0] = te_q8_0_from_f32, [TE_IQ4_NL] = te_iq4_nl_from_f32,
    [TE_Q2_K] = te_q2_k_from_f32, [TE_Q3_K] = te_q3_k_from_f32, [TE_Q4_K] = te_q4_k_from_f32,
    [TE_Q5_K] = te_q5_k_from_f32, [TE_Q6_K] = te_q6_k_from_f32, [TE_MXFP4] = te_mxfp4_from_f32,
};

bool te_can_quantize(int32_t type) { return type >= 0 && type < TE_TYPE_LIMIT && from_f32[type] != NULL; }

void te_quantize_row(int32_t type, const float *src, void *dst, int64_t n) { from_f32[type](src, dst, n); }
