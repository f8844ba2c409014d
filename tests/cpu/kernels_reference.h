/* kernels_reference.h - what kernels_check.c holds the kernels to: weights of the formats with vector kernels, and the
 * rounding of activations and of floats to rows, written from the formats' definitions. Shares no code with the engine.
 */
#ifndef KERNELS_REFERENCE_H
#define KERNELS_REFERENCE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "core/te_types.h"

static uint64_t random_state;

static inline uint64_t random_word(void) {
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* About normal: the sum of four numbers of 16 bits, at variance 1. */
static inline float random_normal(void) {
    const uint64_t z = random_word();
    const int64_t sum = (int64_t)(z & 0xffff) + (int64_t)(z >> 16 & 0xffff) + (int64_t)(z >> 32 & 0xffff) +
                        (int64_t)(z >> 48) - 2 * 65535;
    return (float)((double)sum * (1.7320508075688772 / 65536));
}

/* ---- 16-bit floats ---- */

static inline uint16_t word_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

static inline double half_value(uint16_t h) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const double sign = h >> 15 ? -1.0 : 1.0;
    if (exponent == 31) return fraction ? (double)NAN : sign * (double)INFINITY;
    return sign * (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24));
}

static inline double brain_value(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return (double)f;
}

/* To a float of so many fraction bits, whose least exponent is `least`; ties to even. */
static inline double rounded_to(double x, int fraction_bits, int least) {
    if (x == 0 || !isfinite(x)) return x;
    int exponent;
    frexp(x, &exponent); /* |x| in [2^(exponent-1), 2^exponent) */
    const int unit = (exponent - 1 > least ? exponent - 1 : least) - fraction_bits;
    return ldexp(rint(ldexp(x, -unit)), unit);
}

/* A NaN keeps its sign and upper bits and becomes quiet. */
static inline uint16_t to_half(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (isnan(f)) return (uint16_t)(sign | 0x7e00 | (bits >> 13 & 0x3ff));
    const double size = fabs(rounded_to((double)f, 10, -14));
    if (size >= 65536) return (uint16_t)(sign | 0x7c00);
    if (size < 0x1p-14) return (uint16_t)(sign | (int)ldexp(size, 24));
    int exponent;
    const double fraction = frexp(size, &exponent); /* in [0.5, 1) */
    return (uint16_t)(sign | (exponent + 14) << 10 | ((int)ldexp(fraction, 11) - 1024));
}

static inline uint16_t to_brain(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (isnan(f)) return (uint16_t)(bits >> 16 | 0x40);
    const uint32_t rest = bits & 0xffff, up = bits >> 16;
    return (uint16_t)(up + (rest > 0x8000 || (rest == 0x8000 && (up & 1))));
}

/* ---- weights ---- */

/* The six-bit scale and minimum of unit u of a K block; s: its twelve bytes. */
static inline void unit_scales(const uint8_t *s, int u, int *scale, int *minimum) {
    if (u < 4) {
        *scale = s[u] & 63;
        *minimum = s[4 + u] & 63;
    } else {
        *scale = (s[4 + u] & 15) | s[u - 4] >> 6 << 4;
        *minimum = s[4 + u] >> 4 | s[u] >> 6 << 4;
    }
}

/* What a code of IQ4_NL and IQ4_XS stands for. */
static inline int listed_value(int code) {
    static const int upper[8] = {1, 13, 25, 38, 53, 69, 89, 113}, lower[8] = {127, 104, 83, 65, 49, 35, 22, 10};
    return code < 8 ? -lower[code] : upper[code - 8];
}

/* What a code of MXFP4 stands for. */
static inline double fp4_value(int code) {
    static const double size[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code < 8 ? size[code] : -size[code - 8];
}

/* Weight i of a row. */
static inline double weight(int32_t type, const uint8_t *row, int i) {
    const int in_32 = i % 32, in_256 = i % 256;
    float f;
    int scale, minimum;
    switch (type) {
    case TE_F32:
        memcpy(&f, row + 4 * (size_t)i, 4);
        return (double)f;
    case TE_F16:
        return half_value(word_at(row + 2 * (size_t)i));
    case TE_BF16:
        return brain_value(word_at(row + 2 * (size_t)i));
    case TE_Q8_0: {
        const uint8_t *b = row + i / 32 * 34;
        return half_value(word_at(b)) * ((b[2 + in_32] ^ 128) - 128);
    }
    case TE_Q4_0: {
        const uint8_t *b = row + i / 32 * 18;
        return half_value(word_at(b)) * ((in_32 < 16 ? b[2 + in_32] & 15 : b[2 + in_32 - 16] >> 4) - 8);
    }
    case TE_Q4_K:
    case TE_Q5_K: {
        const uint8_t *b = row + i / 256 * (type == TE_Q4_K ? 144 : 176);
        const uint8_t *low = b + (type == TE_Q4_K ? 16 : 48);
        const int u = in_256 / 32, four = low[u / 2 * 32 + in_32] >> (u % 2 ? 4 : 0) & 15;
        const int q = four + (type == TE_Q5_K && (b[16 + in_32] >> u & 1) ? 16 : 0);
        unit_scales(b + 4, u, &scale, &minimum);
        return half_value(word_at(b)) * scale * q - half_value(word_at(b + 2)) * minimum;
    }
    case TE_Q4_1:
    case TE_Q5_0:
    case TE_Q5_1: {
        const int has_min = type != TE_Q5_0, has_fifth = type != TE_Q4_1, low = 2 + 2 * has_min;
        const uint8_t *b = row + i / 32 * (low + 4 * has_fifth + 16), *q = b + low + 4 * has_fifth;
        const int four = in_32 < 16 ? q[in_32] & 15 : q[in_32 - 16] >> 4;
        const int code = four + (has_fifth && (b[low + in_32 / 8] >> in_32 % 8 & 1) ? 16 : 0);
        return half_value(word_at(b)) * (has_min ? code : code - 16) + (has_min ? half_value(word_at(b + 2)) : 0);
    }
    case TE_IQ4_NL: {
        const uint8_t *b = row + i / 32 * 18;
        return half_value(word_at(b)) * listed_value(in_32 < 16 ? b[2 + in_32] & 15 : b[2 + in_32 - 16] >> 4);
    }
    case TE_MXFP4: {
        const uint8_t *b = row + i / 32 * 17;
        return ldexp(fp4_value(in_32 < 16 ? b[1 + in_32] & 15 : b[1 + in_32 - 16] >> 4), b[0] - 127);
    }
    case TE_IQ4_XS: {
        const uint8_t *b = row + i / 256 * 136, *q = b + 8 + in_256 / 32 * 16;
        const int u = in_256 / 32, upper = word_at(b + 2) >> 2 * u & 3;
        scale = (b[4 + u / 2] >> u % 2 * 4 & 15) + 16 * upper - 32;
        return half_value(word_at(b)) * scale * listed_value(in_32 < 16 ? q[in_32] & 15 : q[in_32 - 16] >> 4);
    }
    case TE_Q2_K: {
        const uint8_t *b = row + i / 256 * 84;
        const int q = b[16 + in_256 / 128 * 32 + in_32] >> i % 128 / 32 * 2 & 3, unit = b[in_256 / 16];
        return half_value(word_at(b + 80)) * (unit & 15) * q - half_value(word_at(b + 82)) * (unit >> 4);
    }
    case TE_Q3_K: {
        const uint8_t *b = row + i / 256 * 110, *s = b + 96;
        const int q = (b[32 + in_256 / 128 * 32 + in_32] >> i % 128 / 32 * 2 & 3) + 4 * (b[in_32] >> in_256 / 32 & 1);
        const int unit = in_256 / 16, four = unit < 8 ? s[unit] & 15 : s[unit - 8] >> 4;
        scale = four + 16 * (s[8 + unit % 4] >> unit / 4 * 2 & 3) - 32;
        return half_value(word_at(b + 108)) * scale * (q - 4);
    }
    default: { /* TE_Q6_K */
        const uint8_t *b = row + i / 256 * 210;
        const int in_128 = i % 128, u = in_128 / 32;
        const int low = b[in_256 / 128 * 64 + u % 2 * 32 + in_32] >> (u < 2 ? 0 : 4) & 15;
        const int high = b[128 + in_256 / 128 * 32 + in_32] >> 2 * u & 3;
        return half_value(word_at(b + 208)) * ((b[192 + in_256 / 16] ^ 128) - 128) * ((low | high << 4) - 32);
    }
    }
}

static inline int is_float(int32_t type) { return type == TE_F32 || type == TE_F16 || type == TE_BF16; }
static inline int has_vectors(int32_t type) {
    return is_float(type) || type == TE_Q8_0 || type == TE_Q4_0 || type == TE_Q4_1 || type == TE_Q5_0 ||
           type == TE_Q5_1 || type == TE_IQ4_NL || type == TE_MXFP4 || type == TE_Q2_K || type == TE_Q3_K ||
           type == TE_Q4_K || type == TE_Q5_K || type == TE_Q6_K || type == TE_IQ4_XS;
}

/* Sets the scales of a block in half precision to those bits (the second one, if there is one, to `other`); that of
 * MXFP4, which halves its codes' values, to the scale's power of two. */
static inline void set_scales(int32_t type, uint8_t *block, uint16_t scale, uint16_t other) {
    const int at = type == TE_Q6_K ? 208 : type == TE_Q3_K ? 108 : type == TE_Q2_K ? 80 : 0;
    if (type == TE_MXFP4) {
        block[0] = (uint8_t)(128 - 15 + (scale >> 10 & 31));
        return;
    }
    block[at] = (uint8_t)scale;
    block[at + 1] = (uint8_t)(scale >> 8);
    if (type == TE_Q4_1 || type == TE_Q5_1 || type == TE_Q2_K || type == TE_Q4_K || type == TE_Q5_K) {
        block[at + 2] = (uint8_t)other;
        block[at + 3] = (uint8_t)(other >> 8);
    }
}

/* ---- activations and rows that are written ---- */

/* As the kernels of 8-bit products see x: 127 steps to the largest of 32, ties to even. */
static inline void seen_as_bytes(const float *x, int n, double *out) {
    for (int b = 0; b < n; b += 32) {
        float most = 0;
        for (int i = b; i < b + 32; i++) most = fmaxf(most, fabsf(x[i]));
        const float step = most / 127.0f, per_step = most > 1e-35f ? 127.0f / most : 0.0f;
        for (int i = b; i < b + 32; i++) out[i] = (double)step * (double)rintf(x[i] * per_step);
    }
}

/* A row of Q8_0: 127 steps to the largest of 32, ties away from zero, the step then rounded to half precision. */
static inline void to_q8_0(const float *x, int n, uint8_t *out) {
    for (int b = 0; b < n; b += 32, out += 34) {
        float most = 0;
        for (int i = b; i < b + 32; i++) most = fmaxf(most, fabsf(x[i]));
        const float step = most / 127.0f, per_step = step != 0 ? 1.0f / step : 0.0f;
        const uint16_t h = to_half(step);
        out[0] = (uint8_t)h;
        out[1] = (uint8_t)(h >> 8);
        for (int i = 0; i < 32; i++) out[2 + i] = (uint8_t)(int8_t)roundf(x[b + i] * per_step);
    }
}

#endif
