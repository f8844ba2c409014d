/* dry.c - see dry.h. Matches are found by the Z algorithm over the history read backwards, in time that grows with its
 * length. */
#include "dry.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

bool pi_dry_open(pi_dry *dry, const pi_sampling *options, int32_t n_vocab) {
    if (options->dry_multiplier <= 0.0f || options->dry_penalty_last_n == 0) return true;
    dry->multiplier = options->dry_multiplier;
    dry->base = options->dry_base;
    dry->allowed_length = options->dry_allowed_length;
    dry->window = options->dry_penalty_last_n < 0 ? INT64_MAX : options->dry_penalty_last_n;
    dry->n_vocab = n_vocab;
    dry->is_breaker = calloc((size_t)n_vocab, sizeof *dry->is_breaker);
    dry->longest = calloc((size_t)n_vocab, sizeof *dry->longest);
    if (dry->is_breaker == NULL || dry->longest == NULL) return false;
    for (int32_t i = 0; i < options->n_dry_breakers; i++) dry->is_breaker[options->dry_breakers[i]] = true;
    return true;
}

void pi_dry_close(pi_dry *dry) {
    free(dry->is_breaker);
    free(dry->longest);
    free(dry->history);
    free(dry->match);
}

void pi_dry_reset(pi_dry *dry) { dry->n = 0; }

bool pi_dry_accept(pi_dry *dry, int32_t token) {
    if (dry->window == 0) return true;
    if (dry->n == dry->size) {
        /* Twice the window: so tokens are moved once in a while, and not each time. */
        const int64_t most = dry->window > INT32_MAX / 2 ? INT32_MAX : 2 * dry->window;
        if (dry->size < most) {
            const int64_t grown = dry->size < 64 ? 64 : 2 * dry->size, size = grown < most ? grown : most;
            int32_t *const history = realloc(dry->history, (size_t)size * sizeof *history);
            if (history == NULL) return false;
            dry->history = history;
            int32_t *const match = realloc(dry->match, (size_t)size * sizeof *match);
            if (match == NULL) return false;
            dry->match = match;
            dry->size = size;
        } else {
            const int64_t kept = dry->size / 2;
            memmove(dry->history, dry->history + dry->n - kept, (size_t)kept * sizeof *dry->history);
            dry->n = kept;
        }
    }
    dry->history[dry->n++] = token;
    return true;
}

/* Backwards: token i of n, i = 0 the last one. */
static int32_t back(const pi_dry *dry, int64_t i) { return dry->history[dry->n - 1 - i]; }

/* match[i], 0 < i < n: how many tokens from i on, read backwards, are those from 0 on. */
static void find_matches(pi_dry *dry, int64_t n) {
    int64_t left = 0, right = 0; /* the match that reaches farthest: [left, right) are [0, right - left) */
    for (int64_t i = 1; i < n; i++) {
        int64_t length = 0;
        if (i < right) {
            length = dry->match[i - left];
            if (length > right - i) length = right - i;
        }
        while (i + length < n && back(dry, length) == back(dry, i + length)) length++;
        dry->match[i] = (int32_t)length;
        if (i + length > right) {
            left = i;
            right = i + length;
        }
    }
}

void pi_dry_penalise(pi_dry *dry, float *logits) {
    const int64_t n = dry->window < dry->n ? dry->window : dry->n;
    int64_t limit = 0;
    while (limit < n && !dry->is_breaker[back(dry, limit)]) limit++;
    if (limit < dry->allowed_length || n < 2) return;
    find_matches(dry, n);
    /* Behind what begins (backwards) at i stands the token at i - 1. */
    for (int64_t i = 1; i < n; i++) {
        const int32_t token = back(dry, i - 1), length = dry->match[i] < limit ? dry->match[i] : (int32_t)limit;
        if (length > dry->longest[token]) dry->longest[token] = length;
    }
    for (int64_t i = 1; i < n; i++) {
        const int32_t token = back(dry, i - 1), length = dry->longest[token];
        dry->longest[token] = 0;
        if (length < dry->allowed_length || length == 0 || dry->is_breaker[token] || logits[token] == -INFINITY)
            continue;
        const double penalty = (double)dry->multiplier * pow((double)dry->base, (double)(length - dry->allowed_length));
        const double value = (double)logits[token] - penalty;
        logits[token] = value < -(double)FLT_MAX ? -FLT_MAX : (float)value;
    }
}
