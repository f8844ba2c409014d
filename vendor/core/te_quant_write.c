/* te_quant_write.c - floats to the float types, the formats of 32 weights (te_quant.c has their layouts), IQ4_NL among them. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "te_quant_rows.h"
#include "te_types.h"

void te_f32_from_f32(const float *src, uint8_t *dst, int64_t n) { memcpy(dst, src, (size_t)n * sizeof *src); }

void te_f16_from_f32(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) te_store_f16(dst + 2 * i, src[i]);
}

void te_bf16_from_f32(const float *src, uint8_t *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) te_store_u16(dst + 2 * i, te_f32_to_bf16(src[i]));
}

/* v as an integer in [lo, hi], towards zero; lo for a NaN (a plain cast of what does not fit is undefined). */
static int to_int(float v, int lo, int hi) {
    if (!(v > (float)lo)) return lo;
    return v < (float)hi ? (int)v : hi;
}

static float reciprocal(float d) { return d != 0.0f ? 1.0f / d : 0.0f; }

/* The weight of largest magnitude, the first of several, with its sign. */
static float extreme(const float *w) {
    float value = w[0];
    for (int i = 1; i < 32; i++) {
        if (fabsf(w[i]) > fabsf(value)) value = w[i];
    }
    return value;
}

static void range(const float *w, float *lo, float *hi) {
    *lo = *hi = w[0];
    for (int i = 1; i < 32; i++) {
        if (w[i] < *lo) *lo = w[i];
        if (w[i] > *hi) *hi = w[i];
    }
}

/* Packs 32 weights of four or five bits: q[16], and the fifth bits into high[4] unless that is NULL. */
static void pack(const int *q, uint8_t *high, uint8_t *dst) {
    for (int i = 0; i < 16; i++) dst[i] = (uint8_t)((q[i] & 15) | (q[16 + i] & 15) << 4);
    if (high == NULL) return;
    memset(high, 0, 4);
    for (int i = 0; i < 32; i++) high[i / 8] |= (uint8_t)(q[i] >> 4 << i % 8);
}

/* Q4_0 and Q5_0: the extreme weight becomes the most negative code, -half; high is where the fifth bits go, or NULL. */
static void quantize_signed(const float *w, int half, uint8_t *d_out, uint8_t *high, uint8_t *dst) {
    int q[32];
    const float d = extreme(w) / (float)-half;
    const float id = reciprocal(d);
    for (int i = 0; i < 32; i++) q[i] = to_int(w[i] * id + ((float)half + 0.5f), 0, 2 * half - 1);
    te_store_f16(d_out, d);
    pack(q, high, dst);
}

/* Q4_1 and Q5_1: the range of the weights is divided into `last` steps. */
static void quantize_range(const float *w, int last, uint8_t *d_out, uint8_t *m_out, uint8_t *high, uint8_t *dst) {
    int q[32];
    float lo, hi;
    range(w, &lo, &hi);
    const float d = (hi - lo) / (float)last;
    const float id = reciprocal(d);
    for (int i = 0; i < 32; i++) q[i] = to_int((w[i] - lo) * id + 0.5f, 0, last);
    te_store_f16(d_out, d);
    te_store_f16(m_out, lo);
    pack(q, high, dst);
}

void te_q4_0_from_f32(const float *src, uint8_t *dst, int64_t n) {
    for (te_block_q4_0 *b = (te_block_q4_0 *)dst; n > 0; n -= 32, src += 32, b++)
        quantize_signed(src, 8, b->d, NULL, b->q);
}

void te_q5_0_from_f32(const float *src, uint8_t *dst, int64_t n) {
    for (te_block_q5_0 *b = (te_block_q5_0 *)dst; n > 0; n -= 32, src += 32, b++)
        quantize_signed(src, 16, b->d, b->qh, b->q);
}

void te_q4_1_from_f32(const float *src, uint8_t *dst, int64_t n) {
    for (te_block_q4_1 *b = (te_block_q4_1 *)dst; n > 0; n -= 32, src += 32, b++)
        quantize_range(src, 15, b->d, b->m, NULL, b->q);
}

void te_q5_1_from_f32(const float *src, uint8_t *dst, int64_t n) {
    for (te_block_q5_1 *b = (te_block_q5_1 *)dst; n > 0; n -= 32, src += 32, b++)
        quantize_range(src, 31, b->d, b->m, b->qh, b->q);
}

void te_q8_0_from_f32(const float *src, uint8_t *dst, int64_t n) {
    for (te_block_q8_0 *b = (te_block_q8_0 *)dst; n > 0; n -= 32, src += 32, b++) {
        const float d = fabsf(extreme(src)) / 127.0f;
        const float id = reciprocal(d);
        te_store_f16(b->d, d);
        for (int i = 0; i < 32; i++) b->q[i] = (int8_t)to_int(roundf(src[i] * id), -127, 127);
    }
}

/* Codes of IQ4_NL for a scale: the nearest value is that with as many middles between values below the weight. */
static void iq4_nl_codes(const float *w, float d, int *q) {
    const float id = reciprocal(d);
    memset(q, 0, 32 * sizeof *q);
    for (int k = 0; k < 15; k++) {
        const float middle = 0.5f * (float)(te_iq4_value[k] + te_iq4_value[k + 1]);
        for (int i = 0; i < 32; i++) q[i] += w[i] * id > middle;
    }
}

/* Tries scales that give the largest weight a place near either end of the list of values; least squares over the codes
 * of each say which scale is best for them. As in te_quant_k_write.c, an error counts the more the larger its weight is.
 */
void te_iq4_nl_from_f32(const float *src, uint8_t *dst, int64_t n) {
    enum { N_PLACES = 12 };
    for (te_block_iq4_nl *b = (te_block_iq4_nl *)dst; n > 0; n -= 32, src += 32, b++) {
        const float largest = extreme(src);
        float importance[32], square = 0.0f, best_error = INFINITY, best_d = 0.0f;
        int q[32];
        for (int i = 0; i < 32; i++) square += src[i] * src[i];
        for (int i = 0; i < 32; i++) importance[i] = 1.0f + 0.5f * src[i] * src[i] * reciprocal(square / 32.0f);
        for (int k = 0; k < 2 * N_PLACES; k++) {
            const float place = k < N_PLACES ? 80.0f + 5.0f * (float)k : -80.0f - 5.0f * (float)(k - N_PLACES);
            float wv = 0.0f, vv = 0.0f, error = 0.0f;
            iq4_nl_codes(src, largest / place, q);
            for (int i = 0; i < 32; i++) {
                const float v = te_iq4_value[q[i]], pv = importance[i] * v;
                wv += pv * src[i];
                vv += pv * v;
            }
            const float d = te_as_f16(wv / vv); /* no value is 0 */
            for (int i = 0; i < 32; i++) {
                const float r = src[i] - d * (float)te_iq4_value[q[i]];
                error += importance[i] * r * r;
            }
            if (!(error < best_error)) continue;
            best_error = error;
            best_d = d;
        }
        iq4_nl_codes(src, best_d, q);
        te_store_f16(b->d, best_d);
        pack(q, NULL, b->q);
    }
}

/* The code whose value is nearest, the first of two that are equally near. */
static int nearest_fp4(float w, float d) {
    int best = 0;
    float least = fabsf(w - d * (float)te_fp4_value[0]);
    for (int k = 1; k < 16; k++) {
        const float error = fabsf(w - d * (float)te_fp4_value[k]);
        if (!(error < least)) continue;
        least = error;
        best = k;
    }
    return best;
}

/* The scale gives the largest weight the exponent of the largest values, 4 and 6. */
void te_mxfp4_from_f32(const float *src, uint8_t *dst, int64_t n) {
    for (te_block_mxfp4 *b = (te_block_mxfp4 *)dst; n > 0; n -= 32, src += 32, b++) {
        int q[32];
        const int exponent = (int)(te_float_bits(fabsf(extreme(src))) >> 23);
        b->e = (uint8_t)(exponent > 2 ? exponent - 2 : 0);
        for (int i = 0; i < 32; i++) q[i] = nearest_fp4(src[i], te_half_e8m0(b->e));
        pack(q, NULL, b->q);
    }
}
