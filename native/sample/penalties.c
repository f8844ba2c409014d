/* penalties.c - what penalties.h says. */
#include "penalties.h"

#include <math.h>
#include <stdlib.h>

#include "weigh.h"

bool pi_penalties_open(pi_penalties *p, const pi_sampling *options, int32_t n_vocab) {
    p->repeat = options->repeat_penalty;
    p->frequency = options->frequency_penalty;
    p->presence = options->presence_penalty;
    if (p->repeat != 1.0f || p->frequency != 0.0f || p->presence != 0.0f) {
        p->window = options->penalty_last_n < 0 ? INT64_MAX : options->penalty_last_n;
    }
    if (p->window == 0) return true;
    p->count = calloc((size_t)n_vocab, sizeof *p->count);
    p->distinct = calloc((size_t)n_vocab, sizeof *p->distinct);
    p->place = calloc((size_t)n_vocab, sizeof *p->place);
    return p->count && p->distinct && p->place;
}

void pi_penalties_close(pi_penalties *p) {
    free(p->ring);
    free(p->count);
    free(p->distinct);
    free(p->place);
}

void pi_penalties_reset(pi_penalties *p) {
    for (int32_t i = 0; i < p->n_distinct; i++) p->count[p->distinct[i]] = 0;
    p->n_distinct = 0;
    p->n_ring = 0;
    p->ring_next = 0;
}

static void forget(pi_penalties *p, int32_t token) {
    if (--p->count[token] > 0) return;
    const int32_t last = p->distinct[--p->n_distinct];
    p->distinct[p->place[token]] = last;
    p->place[last] = p->place[token];
}

bool pi_penalties_accept(pi_penalties *p, int32_t token) {
    if (p->window == 0) return true;
    if (p->window != INT64_MAX) {
        if (p->n_ring == p->ring_size && p->ring_size < p->window) {
            int64_t size = p->ring_size < 64 ? 64 : 2 * p->ring_size;
            if (size > p->window) size = p->window;
            int32_t *ring = realloc(p->ring, (size_t)size * sizeof *ring);
            if (ring == NULL) return false;
            p->ring = ring;
            p->ring_size = size;
        }
        if (p->n_ring == p->window) {
            forget(p, p->ring[p->ring_next]);
        } else {
            p->n_ring++;
        }
        p->ring[p->ring_next] = token;
        if (++p->ring_next == p->window) p->ring_next = 0;
    }
    if (p->count[token] == 0) {
        p->place[token] = p->n_distinct;
        p->distinct[p->n_distinct++] = token;
    }
    if (p->count[token] < INT32_MAX) p->count[token]++;
    return true;
}

void pi_penalties_apply(const pi_penalties *p, float *logits) {
    for (int32_t i = 0; i < p->n_distinct; i++) {
        const int32_t token = p->distinct[i];
        double value = (double)logits[token];
        if (value == -(double)INFINITY) continue;
        value = value > 0.0 ? value / (double)p->repeat : value * (double)p->repeat;
        value -= (double)p->count[token] * (double)p->frequency + (double)p->presence;
        logits[token] = clamped(value);
    }
}
