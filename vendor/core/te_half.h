/* te_half.h - the 16-bit floats F16 (IEEE half) and BF16 (the upper half of a float), and scales of eight bits, one value
 * at a time.
 *
 * To 16 bits: rounds to nearest, ties to even; too large becomes infinity; a NaN stays one, made quiet. To float:
 * exact. The same bits as the F16C instructions give, also with denormals-are-zero set. */
#ifndef TE_HALF_H
#define TE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t te_float_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float te_bits_float(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Half of an E8M0 number, 2^(e-128): a denormal float for e = 0 and 1. MXFP4 doubles its values. */
static inline float te_half_e8m0(uint8_t e) {
    return te_bits_float(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

static inline float te_f16_to_f32(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t size = h & 0x7fffu;
    if (size > 0x7c00u) return te_bits_float(sign | 0x7fc00000u | size << 13);
    if (size == 0x7c00u) return te_bits_float(sign | 0x7f800000u);
    /* Below 2^-14 a half counts units of 2^-24. Above, the exponents' biases differ by 127 - 15 = 112. */
    if (size < 0x0400u) return te_bits_float(sign | te_float_bits((float)size * 0x1p-24f));
    return te_bits_float(sign | ((size << 13) + (112u << 23)));
}

static inline uint16_t te_f32_to_f16(float f) {
    const uint32_t bits = te_float_bits(f);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (size >> 13 & 0x3ffu));
    if (size >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* from 65520, half way between 65504 and 2^16 */
    if (size < 0x38800000u) {
        /* Below 2^-14: at 0.5 a float's last bit is worth 2^-24, the half's unit there, so the addition does the
         * rounding. */
        return (uint16_t)(sign | (te_float_bits(te_bits_float(size) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13);
}

static inline float te_bf16_to_f32(uint16_t h) { return te_bits_float((uint32_t)h << 16); }

static inline uint16_t te_f32_to_bf16(float f) {
    const uint32_t bits = te_float_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#endif
