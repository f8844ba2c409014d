/* te_quant_k.c - the formats of 256 weights with scales of their own: Q2_K to Q6_K, and the ternary TQ1_0 and TQ2_0.
 *
 * Sizes in bytes, in the order of the block:
 *   Q2_K:  scales 16, q 64, d 2, dmin 2              w = d*(scale & 15)*q - dmin*(scale >> 4), 16 weights a scale
 *   Q3_K:  high 32, q 64, scales 12, d 2             w = d*(scale - 32)*(q - 4, or q with the high bit), 16 a scale
 *   Q4_K:  d 2, dmin 2, scales 12, q 128             w = d*scale*q - dmin*min, 32 weights a scale
 *   Q5_K:  d 2, dmin 2, scales 12, high 32, q 128    the same with a fifth bit
 *   Q6_K:  q 128, high 64, scales 16 (signed), d 2   w = d*scale*(q - 32), 16 weights a scale
 *   TQ1_0: q 48, q 4, d 2                            w = d*(q - 1), q = 0..2
 *   TQ2_0: q 64, d 2                                 the same */
#include <stddef.h>

#include "te_quant_rows.h"
#include "te_types.h"

/* Two-bit codes: in 32 bytes, bits 0-1 hold weights 0-31, bits 2-3 weights 32-63, and so on. */
static int two_bits(const uint8_t *q, int i) { return q[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3; }

void te_q2_k_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_q2_k *b = (const te_block_q2_k *)src; n > 0; n -= 256, b++, dst += 256) {
        const float d = te_load_f16(b->d), dmin = te_load_f16(b->dmin);
        for (int i = 0; i < 256; i++) {
            const uint8_t scale = b->scales[i / 16];
            const float step = d * (float)(scale & 15), low = dmin * (float)(scale >> 4);
            dst[i] = step * (float)two_bits(b->q, i) - low;
        }
    }
}

void te_q3_k_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_q3_k *b = (const te_block_q3_k *)src; n > 0; n -= 256, b++, dst += 256) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 256; i++) {
            const int unit = i / 16;
            const int low4 = b->scales[unit % 8] >> unit / 8 * 4 & 15;
            const int high2 = b->scales[8 + unit % 4] >> unit / 4 * 2 & 3;
            const float step = d * (float)((low4 | high2 << 4) - 32);
            const int third = b->qh[i % 32] >> i / 32 & 1;
            dst[i] = step * (float)(two_bits(b->q, i) - (third ? 0 : 4));
        }
    }
}

/* Scale and minimum of unit 0..7. Those of units 0-3 are the low six bits of bytes 0-3 and 4-7; those of units 4-7 have
 * their low four bits in the two halves of bytes 8-11, and their upper two in the upper two bits of bytes 0-3 and 4-7.
 */
static void scale_min(const uint8_t *s, int unit, float *scale, float *min) {
    const int i = unit % 4;
    if (unit < 4) {
        *scale = (float)(s[i] & 63);
        *min = (float)(s[4 + i] & 63);
    } else {
        *scale = (float)((s[8 + i] & 15) | s[i] >> 6 << 4);
        *min = (float)(s[8 + i] >> 4 | s[4 + i] >> 6 << 4);
    }
}

/* Q4_K and Q5_K, which begin alike: high holds the fifth bits (bit k of byte i: weight 32*k + i), or is NULL. */
static void k45(const te_block_q4_k *b, const uint8_t *high, const uint8_t *q, float *dst) {
    const float d = te_load_f16(b->d), dmin = te_load_f16(b->dmin);
    for (int unit = 0; unit < 8; unit++) {
        float scale, min;
        scale_min(b->scales, unit, &scale, &min);
        const float step = d * scale, low = dmin * min;
        for (int i = 0; i < 32; i++) {
            const int four = q[unit / 2 * 32 + i] >> unit % 2 * 4 & 15;
            const int fifth = high ? high[i] >> unit & 1 : 0;
            dst[32 * unit + i] = step * (float)(four | fifth << 4) - low;
        }
    }
}

void te_q4_k_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_q4_k *b = (const te_block_q4_k *)src; n > 0; n -= 256, b++, dst += 256) k45(b, NULL, b->q, dst);
}

void te_q5_k_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_q5_k *b = (const te_block_q5_k *)src; n > 0; n -= 256, b++, dst += 256)
        k45((const te_block_q4_k *)b, b->qh, b->q, dst);
}

void te_q6_k_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_q6_k *b = (const te_block_q6_k *)src; n > 0; n -= 256, b++, dst += 256) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 256; i++) {
            /* Each half of 128: 64 bytes hold weights 0-63 in their low halves and 64-127 in their high ones. */
            const int four = b->q[i / 128 * 64 + i % 64] >> i % 128 / 64 * 4 & 15;
            const int group = i / 16;
            const float step = d * (float)b->scales[group];
            dst[i] = step * (float)((four | two_bits(b->qh, i) << 4) - 32);
        }
    }
}

/* A byte holds five ternary digits as a fraction of 256: times 3^k (mod 256), then times 3, the digit k is what passes
 * 256. */
static float ternary(uint8_t byte, int k) {
    static const uint8_t power[5] = {1, 3, 9, 27, 81};
    const uint8_t rest = (uint8_t)(byte * power[k]);
    return (float)((rest * 3 >> 8) - 1);
}

void te_tq1_0_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_tq1_0 *b = (const te_block_tq1_0 *)src; n > 0; n -= 256, b++, dst += 256) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 160; i++) dst[i] = d * ternary(b->q[i % 32], i / 32);
        for (int i = 0; i < 80; i++) dst[160 + i] = d * ternary(b->q[32 + i % 16], i / 16);
        for (int i = 0; i < 16; i++) dst[240 + i] = d * ternary(b->q4[i % 4], i / 4);
    }
}

void te_tq2_0_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_tq2_0 *b = (const te_block_tq2_0 *)src; n > 0; n -= 256, b++, dst += 256) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 256; i++) dst[i] = d * (float)(two_bits(b->q, i) - 1);
    }
}
