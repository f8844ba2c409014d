/* te_quant_k_write.c - floats to the formats of 256 weights with scales of their own: Q2_K to Q6_K.
 *
 * All five give a unit of 16 or 32 weights a grid, w = step*q - low, with step = d*scale and low = dmin*min (or none),
 * where d and dmin are halves of the whole block and scale and min small integers of the unit. Wanted is the block with
 * the least sum of importance * error^2. There is no closed form, so it is searched for:
 *   1. each unit gets its best grid with a free step and low: from several steps, improved by least squares;
 *   2. d and dmin are set so that the largest of these become the largest integers, or the next smaller ones; for each
 *      such pair every unit takes the best integers near its grid, and the best pair wins.
 * Sums are over four lanes in a fixed order, so that the bits are the same on every machine. */
#include <math.h>
#include <string.h>

#include "te_quant_rows.h"
#include "te_types.h"

enum { BLOCK = 256, MAX_UNITS = 16, N_STARTS = 13, N_IMPROVED = 2, N_LIMITS = 6 };

typedef struct k_format {
    int n_weights;                 /* of a unit */
    float first, last;             /* codes q */
    float scale_first, scale_last; /* scale, min */
    int has_low;
    float emphasis; /* of large weights */
} k_format;

static const k_format q2_k = {16, 0, 3, 0, 15, 1, 1.5f}, q3_k = {16, -4, 3, -32, 31, 0, 0.5f},
                      q4_k = {32, 0, 15, 0, 63, 1, 1.0f}, q5_k = {32, 0, 31, 0, 63, 1, 1.0f},
                      q6_k = {16, -32, 31, -128, 127, 0, 0.5f};

typedef struct unit {
    const float *w, *importance;
    float sum; /* of the importance */
} unit;

typedef struct grid {
    float step, low, error;
} grid;

/* What a grid makes of a unit. With the errors r = w - (step*q - low) and the importance p of each weight, the sums of
 * p*r*r, p*r, p*r*q, p*q and p*q*q; all but the first say how step and low should change while the codes stay. */
typedef struct fit {
    float rr, r, rq, q, qq;
} fit;

typedef struct block {
    float d, dmin, error;
    float scale[MAX_UNITS], min[MAX_UNITS];
} block;

/* ---- four floats at a time ---- */

typedef float v4 __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));

static inline v4 load4(const float *p) {
    v4 v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline v4 all4(float f) { return (v4){f, f, f, f}; }

static inline v4 select4(v4i mask, v4 yes, v4 no) { return (v4)((mask & (v4i)yes) | (~mask & (v4i)no)); }

static inline float sum4(v4 v) { return (v[0] + v[2]) + (v[1] + v[3]); }

/* 0 where there is none. */
static float reciprocal(float v) {
    const float r = 1.0f / v;
    return fabsf(r) < INFINITY ? r : 0.0f;
}

static float clamp(float v, float lo, float hi) {
    if (!(v > lo)) return lo; /* a NaN, too */
    return v < hi ? v : hi;
}

/* The nearest codes, as whole floats: adding 1.5 * 2^23 rounds. */
static inline v4 codes4(const k_format *f, v4 w, v4 inverse, v4 low) {
    v4 q = (w + low) * inverse;
    q = select4(q > all4(f->first), q, all4(f->first)); /* a NaN, too, becomes the first */
    q = select4(q < all4(f->last), q, all4(f->last));
    return (q + all4(0x1.8p23f)) - all4(0x1.8p23f);
}

static fit fit_of(const k_format *f, const unit *u, float step, float low) {
    const v4 inverse = all4(reciprocal(step)), step4 = all4(step), low4 = all4(low);
    v4 rr = all4(0), r1 = rr, rq = rr, q1 = rr, qq = rr;
    for (int i = 0; i < f->n_weights; i += 4) {
        const v4 w = load4(u->w + i), p = load4(u->importance + i), q = codes4(f, w, inverse, low4);
        const v4 r = w - (step4 * q - low4), pr = p * r, pq = p * q;
        rr += pr * r;
        r1 += pr;
        rq += pr * q;
        q1 += pq;
        qq += pq * q;
    }
    return (fit){sum4(rr), sum4(r1), sum4(rq), sum4(q1), sum4(qq)};
}

/* ---- the search ---- */

/* x and y of least squares: xx*x + xy*y = rx, xy*x + yy*y = ry; 0 for one that the equations do not determine. */
static void solve(float xx, float xy, float yy, float rx, float ry, float *x, float *y) {
    const float det = xx * yy - xy * xy;
    *x = *y = 0.0f;
    if (det > 1e-4f * xx * yy) {
        *x = (rx * yy - ry * xy) / det;
        *y = (ry * xx - rx * xy) / det;
    } else if (xx > 0.0f) {
        *x = rx / xx;
    } else if (yy > 0.0f) {
        *y = ry / yy;
    }
}

/* Step and low that are best for the codes that a grid gives, and the error with these codes. */
static grid improved(const k_format *f, const unit *u, float step, float low) {
    const fit s = fit_of(f, u, step, low);
    float ds = 0.0f, dl = 0.0f;
    if (f->has_low) solve(s.qq, -s.q, u->sum, s.rq, -s.r, &ds, &dl);
    /* No block can say a low below 0: then step alone. */
    if (!f->has_low || !(step + ds > 0.0f) || !(low + dl >= 0.0f)) solve(s.qq, 0.0f, 0.0f, s.rq, 0.0f, &ds, &dl);
    return (grid){step + ds, low + dl, s.rr - (ds * s.rq - dl * s.r)};
}

/* The best step and low of a unit alone. The steps tried let the weights span all codes, a little more, or fewer: the
 * more codes there are, the more steps nearby are as good. */
static grid best_grid(const k_format *f, const unit *u) {
    float lo = u->w[0], hi = u->w[0];
    for (int i = 1; i < f->n_weights; i++) {
        if (u->w[i] < lo) lo = u->w[i];
        if (u->w[i] > hi) hi = u->w[i];
    }
    /* With a low, codes begin at the least weight; else the first code, the largest in size, takes the extreme one. */
    const float low = f->has_low && lo < 0.0f ? -lo : 0.0f;
    const float extent = f->has_low ? hi + low : -lo > hi ? lo : hi;
    const float span = f->has_low ? f->last : f->first, size = fabsf(span);
    if (extent == 0.0f) return (grid){0.0f, low, 0.0f};
    grid best = {extent / span, low, INFINITY};
    for (int i = 0; i < N_STARTS; i++) {
        const float more = 1.0f - (2.0f + size / 8.0f) * (float)i / (N_STARTS - 1);
        grid g = {extent / span * size / (size + more), low, 0.0f};
        for (int k = 0; k < N_IMPROVED; k++) {
            g = improved(f, u, g.step, g.low);
            if (g.error < best.error) best = g;
        }
    }
    return best;
}

/* The best integers near a unit's grid for given d and dmin: the nearest scale and its neighbours, each with the min
 * that suits it. Returns the error. */
static float choose_integers(const k_format *f, const unit *u, const grid *g, float d, float dmin, float *scale,
                             float *min) {
    const float nearest = clamp(rintf(g->step * reciprocal(d)), f->scale_first, f->scale_last);
    float best = INFINITY;
    *scale = *min = 0.0f;
    for (int near = -1; near <= 1; near++) {
        const float sc = nearest + (float)near;
        if (sc < f->scale_first || sc > f->scale_last) continue;
        float m = f->has_low ? clamp(rintf(g->low * reciprocal(dmin)), 0.0f, f->scale_last) : 0.0f;
        for (int i = 0; i < 3; i++) {
            const fit s = fit_of(f, u, d * sc, dmin * m);
            if (s.rr < best) {
                best = s.rr;
                *scale = sc;
                *min = m;
            }
            if (!f->has_low) break;
            const float low = dmin * m - s.r / u->sum; /* the best for these codes */
            const float next = clamp(rintf(low * reciprocal(dmin)), 0.0f, f->scale_last);
            if (next == m) break;
            m = next;
        }
    }
    return best;
}

/* An error counts the more the larger its weight is against the root mean square of the block: linearly for grids with
 * a low, where 0 may lie anywhere, else squared. With the factors of the formats no more error is left than ggml's
 * quantisers leave, counted plainly as well as by their own measures (tests/core/test_quant_write.py). */
static void set_importance(const k_format *f, const float *w, float *importance) {
    float square = 0.0f;
    for (int i = 0; i < BLOCK; i++) square += w[i] * w[i];
    const float inverse = reciprocal(square / BLOCK), inverse_root = sqrtf(inverse);
    for (int i = 0; i < BLOCK; i++)
        importance[i] = 1.0f + f->emphasis * (f->has_low ? fabsf(w[i]) * inverse_root : w[i] * w[i] * inverse);
}

static block best_block(const k_format *f, const float *w) {
    float importance[BLOCK], max_step = 0.0f, max_low = 0.0f;
    unit units[MAX_UNITS];
    grid grids[MAX_UNITS];
    block best = {.error = INFINITY};
    set_importance(f, w, importance);
    for (int i = 0; i < BLOCK / f->n_weights; i++) {
        units[i] = (unit){w + i * f->n_weights, importance + i * f->n_weights, 0.0f};
        for (int k = 0; k < f->n_weights; k++) units[i].sum += units[i].importance[k];
        grids[i] = best_grid(f, &units[i]);
        if (fabsf(grids[i].step) > fabsf(max_step)) max_step = grids[i].step;
        if (grids[i].low > max_low) max_low = grids[i].low;
    }
    /* Signed scales reach one further below zero. */
    const float limit = f->scale_first < 0.0f ? f->scale_first : f->scale_last, toward_0 = limit < 0.0f ? 1.0f : -1.0f;
    for (int i = 0; i < N_LIMITS; i++) {
        const float largest = limit + toward_0 * (float)i;
        block b = {.d = te_as_f16(max_step / largest), .dmin = te_as_f16(max_low / fabsf(largest))};
        for (int k = 0; k < BLOCK / f->n_weights; k++)
            b.error += choose_integers(f, &units[k], &grids[k], b.d, b.dmin, &b.scale[k], &b.min[k]);
        if (b.error < best.error) best = b;
    }
    return best;
}

/* ---- writing ---- */

static void codes_of(const k_format *f, const block *b, const float *w, int *q) {
    for (int i = 0; i < BLOCK; i += 4) {
        const int k = i / f->n_weights;
        const float step = b->d * b->scale[k], low = b->dmin * b->min[k];
        const v4 codes = codes4(f, load4(w + i), all4(reciprocal(step)), all4(low));
        for (int j = 0; j < 4; j++) q[i + j] = (int)codes[j];
    }
}

/* The inverse of two_bits in te_quant_k.c; dst [64]. */
static void pack_two_bits(const int *q, uint8_t *dst) {
    memset(dst, 0, 64);
    for (int i = 0; i < BLOCK; i++) dst[i / 128 * 32 + i % 32] |= (uint8_t)((q[i] & 3) << i % 128 / 32 * 2);
}

void te_q2_k_from_f32(const float *src, uint8_t *dst, int64_t n) {
    int q[BLOCK];
    for (te_block_q2_k *to = (te_block_q2_k *)dst; n > 0; n -= BLOCK, src += BLOCK, to++) {
        const block b = best_block(&q2_k, src);
        codes_of(&q2_k, &b, src, q);
        for (int i = 0; i < 16; i++) to->scales[i] = (uint8_t)((int)b.scale[i] | (int)b.min[i] << 4);
        pack_two_bits(q, to->q);
        te_store_f16(to->d, b.d);
        te_store_f16(to->dmin, b.dmin);
    }
}

void te_q3_k_from_f32(const float *src, uint8_t *dst, int64_t n) {
    int q[BLOCK];
    for (te_block_q3_k *to = (te_block_q3_k *)dst; n > 0; n -= BLOCK, src += BLOCK, to++) {
        const block b = best_block(&q3_k, src);
        codes_of(&q3_k, &b, src, q);
        memset(to, 0, sizeof *to);
        for (int i = 0; i < BLOCK; i++) {
            q[i] += 4;
            to->qh[i % 32] |= (uint8_t)(q[i] >> 2 << i / 32);
        }
        pack_two_bits(q, to->q);
        for (int i = 0; i < 16; i++) {
            const int scale = (int)b.scale[i] + 32;
            to->scales[i % 8] |= (uint8_t)((scale & 15) << i / 8 * 4);
            to->scales[8 + i % 4] |= (uint8_t)(scale >> 4 << i / 4 * 2);
        }
        te_store_f16(to->d, b.d);
    }
}

/* d, dmin and the scales of Q4_K and Q5_K, which begin alike, as scale_min in te_quant_k.c reads them. */
static void store_scales(const block *b, te_block_q4_k *to) {
    uint8_t *s = to->scales;
    te_store_f16(to->d, b->d);
    te_store_f16(to->dmin, b->dmin);
    for (int i = 0; i < 4; i++) {
        const int scale = (int)b->scale[4 + i], min = (int)b->min[4 + i];
        s[i] = (uint8_t)((int)b->scale[i] | scale >> 4 << 6);
        s[4 + i] = (uint8_t)((int)b->min[i] | min >> 4 << 6);
        s[8 + i] = (uint8_t)((scale & 15) | (min & 15) << 4);
    }
}

/* The low four bits: unit 2k in the low halves of 32 bytes, unit 2k + 1 in their high halves. */
static void pack_four_bits(const int *q, uint8_t *dst) {
    for (int i = 0; i < 128; i++) {
        const int *w = q + i / 32 * 64 + i % 32;
        dst[i] = (uint8_t)((w[0] & 15) | (w[32] & 15) << 4);
    }
}

void te_q4_k_from_f32(const float *src, uint8_t *dst, int64_t n) {
    int q[BLOCK];
    for (te_block_q4_k *to = (te_block_q4_k *)dst; n > 0; n -= BLOCK, src += BLOCK, to++) {
        const block b = best_block(&q4_k, src);
        codes_of(&q4_k, &b, src, q);
        store_scales(&b, to);
        pack_four_bits(q, to->q);
    }
}

void te_q5_k_from_f32(const float *src, uint8_t *dst, int64_t n) {
    int q[BLOCK];
    for (te_block_q5_k *to = (te_block_q5_k *)dst; n > 0; n -= BLOCK, src += BLOCK, to++) {
        const block b = best_block(&q5_k, src);
        codes_of(&q5_k, &b, src, q);
        store_scales(&b, (te_block_q4_k *)to);
        memset(to->qh, 0, 32);
        for (int i = 0; i < BLOCK; i++) to->qh[i % 32] |= (uint8_t)(q[i] >> 4 << i / 32);
        pack_four_bits(q, to->q);
    }
}

void te_q6_k_from_f32(const float *src, uint8_t *dst, int64_t n) {
    int q[BLOCK];
    for (te_block_q6_k *to = (te_block_q6_k *)dst; n > 0; n -= BLOCK, src += BLOCK, to++) {
        const block b = best_block(&q6_k, src);
        codes_of(&q6_k, &b, src, q);
        for (int i = 0; i < BLOCK; i++) q[i] += 32;
        for (int i = 0; i < 128; i++) {
            const int *w = q + i / 64 * 128 + i % 64;
            to->q[i] = (uint8_t)((w[0] & 15) | (w[64] & 15) << 4);
        }
        for (int i = 0; i < BLOCK; i++) q[i] >>= 4;
        pack_two_bits(q, to->qh);
        for (int i = 0; i < 16; i++) to->scales[i] = (int8_t)b.scale[i];
        te_store_f16(to->d, b.d);
    }
}
