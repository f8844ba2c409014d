/* weigh.h - exponentials, their sums and maxima, with the same bits on every machine, for sampler.c. */
#ifndef PI_WEIGH_H
#define PI_WEIGH_H

#include <float.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 32 };

/* e^x for x <= 0, 0 below -87; relative error under 2e-7. No branch and no table, so that the loops over it are
 * vectorised, and no libm, so that it has the same bits on every machine. */
static inline float exp_falling(float x) {
    const float y = x < -87.0f ? -87.0f : x;
    const int32_t n = (int32_t)(y * 1.44269504f - 0.5f);
    const float r = (y - (float)n * 0.693359375f) + (float)n * 2.12194440e-4f; /* ln 2 in two parts */
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t bits = (n + 127) * (1 << 23);
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? 0.0f : p * scale;
}

/* The sum, in an order that does not depend on how it was compiled; 8 chains, because one would wait for each addition.
 */
static inline double sum_of(const float *weights, int32_t n) {
    double chain[8] = {0};
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int c = 0; c < 8; c++) chain[c] += (double)weights[i + c];
    }
    for (; i < n; i++) chain[i & 7] += (double)weights[i];
    return ((chain[0] + chain[4]) + (chain[1] + chain[5])) + ((chain[2] + chain[6]) + (chain[3] + chain[7]));
}

static inline float clamped(double value) {
    return value > (double)FLT_MAX ? FLT_MAX : value < -(double)FLT_MAX ? -FLT_MAX : (float)value;
}

static inline float larger(float a, float b) { return a > b ? a : b; }

/* The largest of BLOCK values, written so that compilers make vectors of it; *bad: whether a NaN or +inf was met. */
static inline float max_of_block(const float *v, uint32_t *bad) {
    _Static_assert(BLOCK == 32, "four rows of eight");
    int32_t odd = 0;
    for (int32_t i = 0; i < BLOCK; i++) odd |= !(v[i] <= FLT_MAX);
    *bad |= (uint32_t)odd;
    float m[8];
    for (int32_t i = 0; i < 8; i++) m[i] = larger(larger(v[i], v[i + 8]), larger(v[i + 16], v[i + 24]));
    for (int32_t i = 0; i < 4; i++) m[i] = larger(m[i], m[i + 4]);
    return larger(larger(m[0], m[1]), larger(m[2], m[3]));
}

#endif
