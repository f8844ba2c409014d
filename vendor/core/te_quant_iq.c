/* te_quant_iq.c - the formats whose codes are indices into a book of vectors (IQ1, IQ2, IQ3) or into a list of values
 * (IQ4).
 *
 * A block has 256 weights (IQ4_NL: 32). Sizes in bytes, in the order of the block:
 *   IQ1_S:   d 2, index 32, high 16 (u16 per 32 weights: 4x3 index bits, 3 bits of scale, sign of the shift)
 *   IQ1_M:   index 32, high 16 (4 bits per 8 weights: 3 index bits, sign of the shift),
 *            scales 8 (u16: 4x3 bits, and 4 bits of d)
 *   IQ2_XXS: d 2, 8 x (4 index bytes, u32: 4x7 sign bits, 4 bits of scale)
 *   IQ2_XS:  d 2, 32 x u16 (9 index bits, 7 sign bits), scales 8
 *   IQ2_S:   d 2, index 32, signs 32, high 8, scales 8
 *   IQ3_XXS: d 2, index 64, 8 x u32 (4x7 sign bits, 4 bits of scale)
 *   IQ3_S:   d 2, index 64, high 8, signs 32, scales 4
 *   IQ4_NL:  d 2, q 16
 *   IQ4_XS:  d 2, scale high bits 2, scale low bits 4, q 128
 * Seven sign bits stand for eight: the eighth makes their number even. */
#include <stdbool.h>

#include "te_iq_tables.h"
#include "te_quant_rows.h"
#include "te_types.h"

const int8_t te_iq4_value[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static unsigned even_signs(unsigned seven) {
    unsigned parity = seven ^ seven >> 4;
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return seven | (parity & 1) << 7;
}

/* Low or high half of a byte of scales. */
static unsigned nibble(const uint8_t *p, int i) { return p[i / 2] >> i % 2 * 4 & 15u; }

static void iq2_eight(float *dst, float d, uint16_t entry, const int8_t *value, unsigned signs) {
    for (int i = 0; i < 8; i++) {
        const float w = d * (float)value[entry >> 2 * i & 3];
        dst[i] = signs >> i & 1 ? -w : w;
    }
}

static void iq3_four(float *dst, float d, uint16_t entry, const int8_t *value, unsigned signs) {
    for (int i = 0; i < 4; i++) {
        const float w = d * (float)value[entry >> 4 * i & 15];
        dst[i] = signs >> i & 1 ? -w : w;
    }
}

static void iq1_eight(float *dst, float d, uint16_t entry, bool negative) {
    const float shift = negative ? -0.125f : 0.125f;
    for (int i = 0; i < 8; i++) dst[i] = d * ((float)iq1_value[entry >> 2 * i & 3] + shift);
}

void te_iq1_s_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_iq1_s *b = (const te_block_iq1_s *)src; n > 0; n -= 256, b++, dst += 256) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 32; i++) {
            const unsigned high = te_load_u16(b->qh[i / 4]);
            const float step = d * (float)(2 * (high >> 12 & 7) + 1);
            iq1_eight(dst + 8 * i, step, iq1_book[b->q[i] | (high >> i % 4 * 3 & 7) << 8], high >> 15);
        }
    }
}

void te_iq1_m_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_iq1_m *b = (const te_block_iq1_m *)src; n > 0; n -= 256, b++, dst += 256) {
        unsigned d_bits = 0;
        for (int i = 0; i < 4; i++) d_bits |= (te_load_u16(b->scales[i]) >> 12 & 15u) << 4 * i;
        const float d = te_f16_to_f32((uint16_t)d_bits);
        for (int i = 0; i < 32; i++) {
            const unsigned scale = te_load_u16(b->scales[i / 8]) >> i / 2 % 4 * 3 & 7u;
            const unsigned high = nibble(b->qh, i);
            iq1_eight(dst + 8 * i, d * (float)(2 * scale + 1), iq1_book[b->q[i] | (high & 7) << 8], high >> 3);
        }
    }
}

void te_iq2_xxs_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_iq2_xxs *b = (const te_block_iq2_xxs *)src; n > 0; n -= 256, b++, dst += 256) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 32; i++) {
            const uint32_t bits = te_load_u32(b->unit[i / 4].signs);
            const float step = d * (0.5f + (float)(bits >> 28)) * 0.25f;
            iq2_eight(dst + 8 * i, step, iq2_xxs_book[b->unit[i / 4].q[i % 4]], iq2_xxs_value,
                      even_signs(bits >> i % 4 * 7 & 127));
        }
    }
}

void te_iq2_xs_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_iq2_xs *b = (const te_block_iq2_xs *)src; n > 0; n -= 256, b++, dst += 256) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 32; i++) {
            const unsigned code = te_load_u16(b->q[i]);
            const float step = d * (0.5f + (float)nibble(b->scales, i / 2)) * 0.25f;
            iq2_eight(dst + 8 * i, step, iq2_xs_book[code & 511], iq2_xs_value, even_signs(code >> 9));
        }
    }
}

void te_iq2_s_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_iq2_s *b = (const te_block_iq2_s *)src; n > 0; n -= 256, b++, dst += 256) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 32; i++) {
            const unsigned index = b->q[i] | (b->qh[i / 4] >> i % 4 * 2 & 3u) << 8;
            const float step = d * (0.5f + (float)nibble(b->scales, i / 2)) * 0.25f;
            iq2_eight(dst + 8 * i, step, iq2_s_book[index], iq2_s_value, b->signs[i]);
        }
    }
}

void te_iq3_xxs_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_iq3_xxs *b = (const te_block_iq3_xxs *)src; n > 0; n -= 256, b++, dst += 256) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 64; i++) {
            const uint32_t bits = te_load_u32(b->signs[i / 8]);
            const float step = d * (0.5f + (float)(bits >> 28)) * 0.5f;
            const unsigned signs = even_signs(bits >> i / 2 % 4 * 7 & 127) >> i % 2 * 4;
            iq3_four(dst + 4 * i, step, iq3_xxs_book[b->q[i]], iq3_xxs_value, signs);
        }
    }
}

void te_iq3_s_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_iq3_s *b = (const te_block_iq3_s *)src; n > 0; n -= 256, b++, dst += 256) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 64; i++) {
            const unsigned index = b->q[i] | (b->qh[i / 8] >> i % 8 & 1u) << 8;
            const float step = d * (float)(1 + 2 * nibble(b->scales, i / 8));
            iq3_four(dst + 4 * i, step, iq3_s_book[index], iq3_s_value, (unsigned)b->signs[i / 2] >> i % 2 * 4);
        }
    }
}

void te_iq4_nl_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_iq4_nl *b = (const te_block_iq4_nl *)src; n > 0; n -= 32, b++, dst += 32) {
        const float d = te_load_f16(b->d);
        for (int i = 0; i < 16; i++) {
            dst[i] = d * (float)te_iq4_value[b->q[i] & 15];
            dst[16 + i] = d * (float)te_iq4_value[b->q[i] >> 4];
        }
    }
}

void te_iq4_xs_to_f32(const uint8_t *src, float *dst, int64_t n) {
    for (const te_block_iq4_xs *b = (const te_block_iq4_xs *)src; n > 0; n -= 256, b++, dst += 256) {
        const float d = te_load_f16(b->d);
        const unsigned high = te_load_u16(b->scales_h);
        for (int unit = 0; unit < 8; unit++) {
            const unsigned scale = nibble(b->scales_l, unit) | (high >> 2 * unit & 3) << 4;
            const float step = d * (float)((int)scale - 32);
            const uint8_t *q = b->q + 16 * unit;
            for (int i = 0; i < 16; i++) {
                dst[32 * unit + i] = step * (float)te_iq4_value[q[i] & 15];
                dst[32 * unit + 16 + i] = step * (float)te_iq4_value[q[i] >> 4];
            }
        }
    }
}
