/* candidates.h - tokens in the order of their logits, for sampler.c. */
#ifndef PI_CANDIDATES_H
#define PI_CANDIDATES_H

#include <stdint.h>
#include <string.h>

/* A candidate is one word: high half the logit so mapped that larger logits come first, low half the token. Sorting the
 * words sorts by falling logit, equal ones by token. */
typedef uint64_t candidate;

static inline candidate to_candidate(float value, int32_t token) {
    value += 0.0f; /* -0 becomes +0: equal values have equal bits */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t falling = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
    return (candidate)falling << 32 | (uint32_t)token;
}

static inline int32_t token_of(candidate c) { return (int32_t)(uint32_t)c; }

static inline float value_of(candidate c) {
    const uint32_t falling = (uint32_t)(c >> 32);
    const uint32_t bits = falling & 0x80000000u ? falling : ~falling & 0x7fffffffu;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Sorts by the high half, equal ones stay in order; spare has n entries. */
void pi_sort_candidates(candidate *words, candidate *spare, int32_t n);

/* The k-th largest of n values, 1 <= k <= n; heap has k entries. */
float pi_kth_largest(const float *values, int32_t n, int32_t k, float *heap);

#endif
