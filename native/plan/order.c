/* order.c - a layer's neurons from the hottest to the coldest: a radix sort, since a large model has millions. */
#include <string.h>

#include "plan.h"

enum { DIGIT = 11, BUCKETS = 1 << DIGIT };

void pi_order(const uint32_t *count, int32_t n_ff, int32_t block, uint64_t *key, uint64_t *spare, int32_t *order,
              int32_t *other) {
    const int32_t n = n_ff / block;
    uint64_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        uint64_t sum = 0;
        for (int32_t j = 0; count && j < block; j++) sum += count[(ptrdiff_t)i * block + j];
        key[i] = sum;
        order[i] = i;
        if (sum > largest) largest = sum;
    }
    int32_t shift = 0;
    for (; largest >> shift; shift += DIGIT) {
        uint32_t start[BUCKETS] = {0}, at = 0;
        for (int32_t i = 0; i < n; i++) start[key[i] >> shift & (BUCKETS - 1)]++;
        for (int32_t b = BUCKETS - 1; b >= 0; b--) { /* the largest digit comes first */
            const uint32_t here = start[b];
            start[b] = at;
            at += here;
        }
        for (int32_t i = 0; i < n; i++) {
            const uint32_t to = start[key[i] >> shift & (BUCKETS - 1)]++;
            spare[to] = key[i];
            other[to] = order[i];
        }
        memcpy(key, spare, sizeof *key * (size_t)n);
        memcpy(order, other, sizeof *order * (size_t)n);
    }
}
