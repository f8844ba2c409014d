/* candidates.c - sorting tokens by their logits, and finding the k-th. */
#include "candidates.h"

/* Radix sort, one byte at a time, from 64 words on. */
void pi_sort_candidates(candidate *words, candidate *spare, int32_t n) {
    if (n < 64) {
        for (int32_t i = 1; i < n; i++) {
            const candidate c = words[i];
            int32_t j = i;
            for (; j > 0 && words[j - 1] >> 32 > c >> 32; j--) words[j] = words[j - 1];
            words[j] = c;
        }
        return;
    }
    int32_t counts[4][256] = {{0}};
    for (int32_t i = 0; i < n; i++) {
        for (int b = 0; b < 4; b++) counts[b][words[i] >> (32 + 8 * b) & 255]++;
    }
    candidate *from = words, *to = spare;
    for (int b = 0; b < 4; b++) {
        const int shift = 32 + 8 * b;
        int32_t *count = counts[b];
        if (count[from[0] >> shift & 255] == n) continue; /* all agree in this byte */
        for (int32_t k = 0, at = 0; k < 256; k++) {
            const int32_t here = count[k];
            count[k] = at;
            at += here;
        }
        for (int32_t i = 0; i < n; i++) to[count[from[i] >> shift & 255]++] = from[i];
        candidate *const swap = from;
        from = to;
        to = swap;
    }
    if (from != words) memcpy(words, from, (size_t)n * sizeof *words);
}

/* The least of the k largest so far stands at the root of a heap. */
float pi_kth_largest(const float *values, int32_t n, int32_t k, float *heap) {
    for (int32_t i = 0; i < k; i++) { /* the first k: each rises from the end */
        int32_t at = i;
        for (; at > 0 && heap[(at - 1) / 2] > values[i]; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
        heap[at] = values[i];
    }
    for (int32_t i = k; i < n; i++) { /* each that is larger than the root replaces it and sinks */
        if (values[i] <= heap[0]) continue;
        int32_t at = 0;
        for (int32_t child = 1; child < k; child = 2 * at + 1) {
            child += child + 1 < k && heap[child + 1] < heap[child];
            if (heap[child] >= values[i]) break;
            heap[at] = heap[child];
            at = child;
        }
        heap[at] = values[i];
    }
    return heap[0];
}
