/* sampler.c - chooses the next token from logits.
 *
 * Steps: logits + bias -> penalties -> greedy (temperature <= 0), or mirostat 2, or top-k -> typical -> top-p -> min-p
 * -> temperature -> draw. Each filter sees probabilities that are renormalised over what the one before it left; every
 * filter leaves at least one token.
 *
 * With l the logits of the tokens that are left and p = softmax(l):
 *   repeat     l / penalty where l > 0, l * penalty elsewhere, for every token in the window
 *   frequency  l - count * penalty; presence: l - penalty, for every token in the window
 *   top-k      the k largest
 *   typical    in order of |-ln p - H|, H the entropy, until the sum of p exceeds typical_p        (arXiv 2202.00666)
 *   top-p      in falling order until the sum of p reaches top_p                                   (arXiv 1904.09751)
 *   min-p      l >= max l + ln min_p                                                               (arXiv 2407.01082)
 *   mirostat   l /= temperature; keep -log2 p <= mu; draw; mu -= eta * (-log2 p - tau)             (arXiv 2007.14966)
 *
 * Nothing sorts a whole vocabulary unless a filter keeps much of it: the largest of each block of 32 logits is found on
 * the way in, and the k-th largest of those bounds the k-th largest logit from below, so that only about k blocks need
 * a second look. Random numbers are SplitMix64's (one 64-bit counter), so a seed gives the same draws on every machine.
 */
#include "sampler.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_status.h"
#include "candidates.h"

enum { BLOCK = 32, FIRST_LOOK = 256 };

struct pi_sampler {
    pi_sampling o;
    int32_t n_vocab, n_blocks;
    int32_t n_bias;
    int32_t *bias_token;
    float *bias;
    uint64_t random;
    double mu; /* mirostat's bound on the surprise, bits */

    const float *values; /* [n_vocab] logits with bias and penalties, no NaN, no +inf: the caller's, or `own` */
    float *own;          /* [n_vocab] */
    float *weights;      /* [n_vocab] exponentials */
    float *block_max;    /* [n_blocks] */
    candidate *chosen;   /* [n_vocab] candidates that are left, falling; two work arrays of the same size */
    candidate *work;
    candidate *spare;

    /* Accepted tokens, kept only when a penalty is on: a ring of the last `window`, and each distinct token in it with
     * its count. */
    int64_t window; /* 0: no penalties; INT64_MAX: all */
    int32_t *ring;
    int64_t n_ring, ring_size, ring_next;
    int32_t *count;    /* [n_vocab] */
    int32_t *distinct; /* [n_vocab], n_distinct of them valid */
    int32_t *place;    /* [n_vocab] where a token stands in distinct */
    int32_t n_distinct;
};

#define REFUSE(...) return (pi_status)te_fail(TE_ARGUMENT, __VA_ARGS__)

pi_sampling pi_sampling_defaults(void) {
    const pi_sampling o = {
        .temperature = 0.8f,
        .top_k = 40,
        .top_p = 0.95f,
        .min_p = 0.05f,
        .typical_p = 1.0f,
        .repeat_penalty = 1.0f,
        .penalty_last_n = 64,
        .mirostat_tau = 5.0f,
        .mirostat_eta = 0.1f,
    };
    return o;
}

static pi_status check_options(const pi_sampling *o) {
    const struct {
        const char *name;
        float value, low, high;
    } ranges[] = {
        {"temperature", o->temperature, -FLT_MAX, FLT_MAX},
        {"top_p", o->top_p, 0.0f, FLT_MAX},
        {"min_p", o->min_p, -FLT_MAX, 1.0f},
        {"typical_p", o->typical_p, 0.0f, FLT_MAX},
        {"repeat_penalty", o->repeat_penalty, FLT_MIN, FLT_MAX},
        {"frequency_penalty", o->frequency_penalty, -FLT_MAX, FLT_MAX},
        {"presence_penalty", o->presence_penalty, -FLT_MAX, FLT_MAX},
        {"mirostat_tau", o->mirostat_tau, 0.0f, FLT_MAX},
        {"mirostat_eta", o->mirostat_eta, 0.0f, FLT_MAX},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        if (!(ranges[i].value >= ranges[i].low && ranges[i].value <= ranges[i].high)) { /* a NaN fails as well */
            REFUSE("%s is %g, it must lie between %g and %g", ranges[i].name, (double)ranges[i].value,
                   (double)ranges[i].low, (double)ranges[i].high);
        }
    }
    if (o->penalty_last_n < -1) {
        REFUSE("penalty_last_n is %d, it must be a number of tokens, or -1 for all", o->penalty_last_n);
    }
    if (o->mirostat == 1) {
        return (pi_status)te_fail(TE_UNSUPPORTED, "mirostat 1 is not implemented, mirostat 2 is");
    }
    if (o->mirostat != 0 && o->mirostat != 2) REFUSE("mirostat is %d, it must be 0 or 2", o->mirostat);
    return PI_OK;
}

pi_status pi_sampler_new(const pi_sampling *options, int32_t n_vocab, int32_t n_bias, const int32_t *bias_token,
                         const float *bias, pi_sampler **out) {
    if (out == NULL) REFUSE("no place for the new sampler was given");
    *out = NULL;
    if (options == NULL) REFUSE("no sampling options were given");
    const pi_status status = check_options(options);
    if (status != PI_OK) return status;
    if (n_vocab < 1) REFUSE("n_vocab is %d, it must be at least 1", n_vocab);
    if (n_bias < 0) REFUSE("n_bias is %d, it must not be negative", n_bias);
    if (n_bias > 0 && (bias_token == NULL || bias == NULL)) REFUSE("n_bias is %d, but there are no pairs", n_bias);
    for (int32_t i = 0; i < n_bias; i++) {
        if (bias_token[i] < 0 || bias_token[i] >= n_vocab) {
            REFUSE("the logit bias names token %d, the vocabulary has %d", bias_token[i], n_vocab);
        }
        if (!(bias[i] <= FLT_MAX)) {
            REFUSE("the logit bias of token %d is %g, it must be a number, or -inf to exclude it", bias_token[i],
                   (double)bias[i]);
        }
    }

    pi_sampler *s = calloc(1, sizeof *s);
    if (s == NULL) goto no_memory;
    s->o = *options;
    s->n_vocab = n_vocab;
    s->n_blocks = (int32_t)(((int64_t)n_vocab + BLOCK - 1) / BLOCK);
    s->n_bias = n_bias;
    s->own = calloc((size_t)n_vocab, sizeof *s->own);
    s->weights = calloc((size_t)n_vocab, sizeof *s->weights);
    s->block_max = calloc((size_t)s->n_blocks, sizeof *s->block_max);
    s->chosen = calloc((size_t)n_vocab, sizeof *s->chosen);
    s->work = calloc((size_t)n_vocab, sizeof *s->work);
    s->spare = calloc((size_t)n_vocab, sizeof *s->spare);
    if (!s->own || !s->weights || !s->block_max || !s->chosen || !s->work || !s->spare) goto no_memory;
    if (n_bias > 0) {
        s->bias_token = calloc((size_t)n_bias, sizeof *s->bias_token);
        s->bias = calloc((size_t)n_bias, sizeof *s->bias);
        if (!s->bias_token || !s->bias) goto no_memory;
        memcpy(s->bias_token, bias_token, (size_t)n_bias * sizeof *bias_token);
        memcpy(s->bias, bias, (size_t)n_bias * sizeof *bias);
    }
    if (options->repeat_penalty != 1.0f || options->frequency_penalty != 0.0f || options->presence_penalty != 0.0f) {
        s->window = options->penalty_last_n < 0 ? INT64_MAX : options->penalty_last_n;
    }
    if (s->window > 0) {
        s->count = calloc((size_t)n_vocab, sizeof *s->count);
        s->distinct = calloc((size_t)n_vocab, sizeof *s->distinct);
        s->place = calloc((size_t)n_vocab, sizeof *s->place);
        if (!s->count || !s->distinct || !s->place) goto no_memory;
    }
    pi_sampler_reset(s, options->seed);
    *out = s;
    return PI_OK;

no_memory:
    pi_sampler_free(s);
    return (pi_status)te_fail(TE_MEMORY, "no memory for a sampler over %d tokens", n_vocab);
}

void pi_sampler_free(pi_sampler *s) {
    if (s == NULL) return;
    free(s->own);
    free(s->weights);
    free(s->block_max);
    free(s->chosen);
    free(s->work);
    free(s->spare);
    free(s->bias_token);
    free(s->bias);
    free(s->ring);
    free(s->count);
    free(s->distinct);
    free(s->place);
    free(s);
}

int32_t pi_sampler_n_vocab(const pi_sampler *s) { return s->n_vocab; }

void pi_sampler_reset(pi_sampler *s, uint64_t seed) {
    if (!s) return;
    s->o.seed = seed;
    s->random = seed;
    s->mu = 2.0 * (double)s->o.mirostat_tau;
    for (int32_t i = 0; i < s->n_distinct; i++) s->count[s->distinct[i]] = 0;
    s->n_distinct = 0;
    s->n_ring = 0;
    s->ring_next = 0;
}

/* ---- penalties ---- */

static void forget(pi_sampler *s, int32_t token) {
    if (--s->count[token] > 0) return;
    const int32_t last = s->distinct[--s->n_distinct];
    s->distinct[s->place[token]] = last;
    s->place[last] = s->place[token];
}

pi_status pi_sampler_accept(pi_sampler *s, int32_t token) {
    if (!s) REFUSE("pi_sampler_accept: sampler is NULL");
    if (token < 0 || token >= s->n_vocab) {
        REFUSE("token %d was accepted, the vocabulary has %d tokens", token, s->n_vocab);
    }
    if (s->window == 0) return PI_OK;
    if (s->window != INT64_MAX) {
        if (s->n_ring == s->ring_size && s->ring_size < s->window) {
            int64_t size = s->ring_size < 64 ? 64 : 2 * s->ring_size;
            if (size > s->window) size = s->window;
            int32_t *ring = realloc(s->ring, (size_t)size * sizeof *ring);
            if (ring == NULL) {
                return (pi_status)te_fail(TE_MEMORY, "no memory for the last %lld tokens", (long long)size);
            }
            s->ring = ring;
            s->ring_size = size;
        }
        if (s->n_ring == s->window) {
            forget(s, s->ring[s->ring_next]);
        } else {
            s->n_ring++;
        }
        s->ring[s->ring_next] = token;
        if (++s->ring_next == s->window) s->ring_next = 0;
    }
    if (s->count[token] == 0) {
        s->place[token] = s->n_distinct;
        s->distinct[s->n_distinct++] = token;
    }
    if (s->count[token] < INT32_MAX) s->count[token]++;
    return PI_OK;
}

static float clamped(double value) {
    return value > (double)FLT_MAX ? FLT_MAX : value < -(double)FLT_MAX ? -FLT_MAX : (float)value;
}

static void penalise(pi_sampler *s) {
    for (int32_t i = 0; i < s->n_distinct; i++) {
        const int32_t token = s->distinct[i];
        double value = (double)s->own[token];
        if (value == -(double)INFINITY) continue;
        value = value > 0.0 ? value / (double)s->o.repeat_penalty : value * (double)s->o.repeat_penalty;
        value -= (double)s->count[token] * (double)s->o.frequency_penalty + (double)s->o.presence_penalty;
        s->own[token] = clamped(value);
    }
}

/* ---- candidates ---- */

/* Appends to chosen the tokens first .. first + count - 1 whose value is at least bound, -inf never. Returns the new
 * number of candidates. */
static int32_t gather(pi_sampler *s, int32_t n, int32_t first, int32_t count, float bound) {
    for (int32_t i = first; i < first + count; i++) {
        if (s->values[i] >= bound && s->values[i] != -INFINITY) s->chosen[n++] = to_candidate(s->values[i], i);
    }
    return n;
}

/* A value that at least k values reach (all values, if fewer than k are finite), and few more than k.
 * For small k it is the k-th largest of block_max; else it is read off a histogram of the upper halves of the mapped
 * values. For a large part of a small vocabulary it is lower than all of them: sorting everything costs less. */
static float bound_of_top(pi_sampler *s, int32_t k) {
    enum { BUCKETS = 1 << 16 };
    if (k <= s->n_blocks / 4) return pi_kth_largest(s->block_max, s->n_blocks, k, s->weights);
    if (k > s->n_vocab / 2 || s->n_vocab < BUCKETS / 2) return -FLT_MAX;
    uint32_t *const counts = (uint32_t *)s->work;
    memset(counts, 0, BUCKETS * sizeof *counts);
    for (int32_t i = 0; i < s->n_vocab; i++) counts[to_candidate(s->values[i], 0) >> 48]++;
    uint32_t bucket = 0;
    for (uint32_t n = counts[0]; n < (uint32_t)k; n += counts[bucket]) bucket++;
    const float lowest = value_of((candidate)bucket << 48 | (candidate)0xffff << 32);
    return lowest >= -FLT_MAX ? lowest : -FLT_MAX; /* the bucket of -inf holds NaNs as well */
}

/* chosen = the k largest values, falling. Returns how many there are: fewer than k if fewer are finite. */
static int32_t take_top(pi_sampler *s, int32_t k) {
    const float bound = bound_of_top(s, k);
    int32_t n = 0;
    for (int32_t b = 0; b < s->n_blocks; b++) {
        if (s->block_max[b] < bound) continue;
        const int32_t first = b * BLOCK, left = s->n_vocab - first;
        n = gather(s, n, first, left < BLOCK ? left : BLOCK, bound);
    }
    pi_sort_candidates(s->chosen, s->spare, n);
    return n < k ? n : k;
}

/* ---- probabilities ---- */

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
static double sum_of(const float *weights, int32_t n) {
    double chain[8] = {0};
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int c = 0; c < 8; c++) chain[c] += (double)weights[i + c];
    }
    for (; i < n; i++) chain[i & 7] += (double)weights[i];
    return ((chain[0] + chain[4]) + (chain[1] + chain[5])) + ((chain[2] + chain[6]) + (chain[3] + chain[7]));
}

/* weights[i] = e^((values[i] - max) * scale). Returns their sum. */
static double weigh_all(pi_sampler *s, float max, float scale) {
    const float *const values = s->values;
    float *const weights = s->weights;
    for (int32_t i = 0; i < s->n_vocab; i++) weights[i] = exp_falling((values[i] - max) * scale);
    return sum_of(weights, s->n_vocab);
}

/* The same for the first n of chosen, weights in their order. */
static double weigh_chosen(pi_sampler *s, int32_t n, float max, float scale) {
    for (int32_t i = 0; i < n; i++) s->weights[i] = exp_falling((value_of(s->chosen[i]) - max) * scale);
    return sum_of(s->weights, n);
}

/* A number in [0, 1), 53 bits. */
static double next_random(pi_sampler *s) {
    uint64_t z = s->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* An index below n, with probability weights[index] / sum. */
static int32_t draw(pi_sampler *s, int32_t n, double sum) {
    const double target = next_random(s) * sum;
    double passed = 0.0;
    int32_t i = 0;
    while (i + BLOCK < n) { /* whole blocks first */
        const double block = sum_of(s->weights + i, BLOCK);
        if (passed + block > target) break;
        passed += block;
        i += BLOCK;
    }
    for (; i < n; i++) {
        passed += (double)s->weights[i];
        if (passed > target && s->weights[i] > 0.0f) return i;
    }
    while (s->weights[i - 1] == 0.0f) i--; /* rounding left the target a hair above the last sum */
    return i - 1;
}

/* ---- filters: chosen[0..n-1] -> chosen[0..result-1], falling ---- */

static int32_t keep_typical(pi_sampler *s, int32_t n, float max) {
    const double sum = weigh_chosen(s, n, max, 1.0f), log_sum = log(sum);
    double entropy = 0.0;
    for (int32_t i = 0; i < n; i++) {
        const double log_p = (double)(value_of(s->chosen[i]) - max) - log_sum;
        entropy -= s->weights[i] > 0.0f ? (double)s->weights[i] / sum * log_p : 0.0;
    }
    for (int32_t i = 0; i < n; i++) {
        const double log_p = (double)(value_of(s->chosen[i]) - max) - log_sum;
        const float distance = clamped(fabs(-log_p - entropy));
        uint32_t bits;
        memcpy(&bits, &distance, sizeof bits); /* of numbers >= 0 the bits rise with the number */
        s->work[i] = (uint64_t)bits << 32 | (uint32_t)i;
    }
    pi_sort_candidates(s->work, s->spare, n);
    double passed = 0.0;
    int32_t n_kept = 0;
    while (n_kept < n) {
        const int32_t i = token_of(s->work[n_kept]);
        s->spare[n_kept++] = s->chosen[i];
        passed += (double)s->weights[i] / sum;
        if (passed > (double)s->o.typical_p) break;
    }
    memcpy(s->chosen, s->spare, (size_t)n_kept * sizeof *s->chosen);
    pi_sort_candidates(s->chosen, s->spare, n_kept);
    return n_kept;
}

/* How many of the first n in falling order it takes to reach top_p of sum; n + 1 if they do not. Fills weights. */
static int32_t reach_top_p(pi_sampler *s, int32_t n, float max, double sum) {
    double passed = 0.0;
    for (int32_t i = 0; i < n; i++) {
        s->weights[i] = exp_falling((value_of(s->chosen[i]) - max));
        passed += (double)s->weights[i];
        if (passed >= (double)s->o.top_p * sum) return i + 1;
    }
    return n + 1;
}

/* top-p over the whole vocabulary: most often few tokens hold the mass, so ever longer heads are tried. */
static int32_t take_top_p(pi_sampler *s, float max) {
    const double sum = weigh_all(s, max, 1.0f);
    for (int64_t k = FIRST_LOOK;; k *= 16) {
        const int32_t asked = k < s->n_vocab ? (int32_t)k : s->n_vocab;
        const int32_t n = take_top(s, asked);
        const int32_t n_kept = reach_top_p(s, n, max, sum);
        if (n_kept <= n) return n_kept;
        if (n < asked || asked == s->n_vocab) return n;
    }
}

static int32_t keep_min_p(pi_sampler *s, int32_t n, float max) {
    const float bound = max + logf(s->o.min_p);
    while (n > 1 && value_of(s->chosen[n - 1]) < bound) n--;
    return n;
}

/* values of tokens below bound = -inf. */
static void exclude_below(pi_sampler *s, float bound) {
    for (int32_t i = 0; i < s->n_vocab; i++) s->own[i] = s->values[i] >= bound ? s->values[i] : -INFINITY;
    s->values = s->own;
}

/* ---- the choice ---- */

static float larger(float a, float b) { return a > b ? a : b; }

/* The largest of BLOCK values, written so that compilers make vectors of it; *bad: whether a NaN or +inf was met. */
static float max_of_block(const float *v, uint32_t *bad) {
    _Static_assert(BLOCK == 32, "four rows of eight");
    int32_t odd = 0;
    for (int32_t i = 0; i < BLOCK; i++) odd |= !(v[i] <= FLT_MAX);
    *bad |= (uint32_t)odd;
    float m[8];
    for (int32_t i = 0; i < 8; i++) m[i] = larger(larger(v[i], v[i + 8]), larger(v[i + 16], v[i + 24]));
    for (int32_t i = 0; i < 4; i++) m[i] = larger(m[i], m[i + 4]);
    return larger(larger(m[0], m[1]), larger(m[2], m[3]));
}

/* The same of block b of values. */
static float max_in(const pi_sampler *s, int32_t b, uint32_t *bad) {
    const float *const v = s->values + (ptrdiff_t)b * BLOCK;
    const int32_t n = s->n_vocab - b * BLOCK;
    if (n >= BLOCK) return max_of_block(v, bad);
    float last[BLOCK];
    for (int32_t i = 0; i < BLOCK; i++) last[i] = i < n ? v[i] : -INFINITY;
    return max_of_block(last, bad);
}

/* values = a copy with bias and penalties; block_max of them. */
static void adjust(pi_sampler *s) {
    float *const v = s->own;
    memcpy(v, s->values, (size_t)s->n_vocab * sizeof *v);
    s->values = v;
    for (int32_t i = 0; i < s->n_bias; i++) {
        float *const value = &v[s->bias_token[i]];
        const bool excluded = *value == -INFINITY || s->bias[i] == -INFINITY;
        *value = excluded ? -INFINITY : clamped((double)*value + (double)s->bias[i]);
    }
    penalise(s);
    uint32_t bad = 0; /* what is clamped is none */
    const bool few = s->n_bias + s->n_distinct < s->n_blocks;
    for (int32_t i = 0; few && i < s->n_bias; i++)
        s->block_max[s->bias_token[i] / BLOCK] = max_in(s, s->bias_token[i] / BLOCK, &bad);
    for (int32_t i = 0; few && i < s->n_distinct; i++)
        s->block_max[s->distinct[i] / BLOCK] = max_in(s, s->distinct[i] / BLOCK, &bad);
    for (int32_t b = 0; !few && b < s->n_blocks; b++) s->block_max[b] = max_in(s, b, &bad);
}

/* values = logits with bias and penalties; block_max and *max of them. */
static pi_status prepare(pi_sampler *s, const float *logits, float *max) {
    uint32_t bad = 0;
    s->values = logits;
    for (int32_t b = 0; b < s->n_blocks; b++) s->block_max[b] = max_in(s, b, &bad);
    for (int32_t i = 0; bad; i++)
        if (!(logits[i] <= FLT_MAX)) REFUSE("the logit of token %d is %g", i, (double)logits[i]);
    if (s->n_bias > 0 || s->n_distinct > 0) adjust(s);
    *max = -INFINITY;
    for (int32_t b = 0; b < s->n_blocks; b++) *max = larger(*max, s->block_max[b]);
    if (*max == -INFINITY) REFUSE("all %d tokens are excluded: every logit is -inf", s->n_vocab);
    return PI_OK;
}

static int32_t first_with(const pi_sampler *s, float value) {
    int32_t b = 0;
    while (s->block_max[b] != value) b++;
    int32_t i = b * BLOCK;
    while (s->values[i] != value) i++;
    return i;
}

static int32_t draw_mirostat(pi_sampler *s, float max, float scale) {
    const double log_sum = log(weigh_all(s, max, scale));
    /* -log2 p <= mu in terms of (value - max) * scale = ln p + log_sum. The likeliest token always stays. */
    const double bound = log_sum - s->mu * 0.69314718055994531;
    for (int32_t i = 0; i < s->n_vocab; i++) {
        const bool keep = (double)((s->values[i] - max) * scale) >= bound;
        s->weights[i] = keep ? s->weights[i] : 0.0f;
    }
    double sum = sum_of(s->weights, s->n_vocab);
    int32_t token;
    if (sum > 0.0) {
        token = draw(s, s->n_vocab, sum);
    } else {
        token = first_with(s, max);
        s->weights[token] = 1.0f;
        sum = 1.0;
    }
    const double surprise = -log2((double)s->weights[token] / sum);
    s->mu -= (double)s->o.mirostat_eta * (surprise - (double)s->o.mirostat_tau);
    return token;
}

pi_status pi_sampler_sample(pi_sampler *s, const float *logits, int32_t *token) {
    if (!s || !logits || !token) REFUSE("pi_sampler_sample: sampler, logits or token is NULL");
    float max = 0.0f;
    const pi_status status = prepare(s, logits, &max);
    if (status != PI_OK) return status;
    const pi_sampling *const o = &s->o;
    if (o->temperature <= 0.0f) {
        *token = first_with(s, max);
        return PI_OK;
    }
    const float scale = o->temperature < 1.0f / FLT_MAX ? FLT_MAX : 1.0f / o->temperature;
    if (o->mirostat == 2) {
        *token = draw_mirostat(s, max, scale);
        return PI_OK;
    }

    int32_t n = 0; /* candidates in chosen; 0: still the whole vocabulary, in values */
    if (o->top_k > 0 && o->top_k < s->n_vocab) n = take_top(s, o->top_k);
    if (o->typical_p < 1.0f) {
        if (n == 0) n = take_top(s, s->n_vocab);
        n = keep_typical(s, n, max);
        max = value_of(s->chosen[0]);
    }
    if (o->top_p < 1.0f) {
        if (n == 0) {
            n = take_top_p(s, max);
        } else {
            const int32_t n_kept = reach_top_p(s, n, max, weigh_chosen(s, n, max, 1.0f));
            n = n_kept < n ? n_kept : n;
        }
    }
    if (o->min_p > 0.0f) {
        if (n == 0) {
            exclude_below(s, max + logf(o->min_p));
        } else {
            n = keep_min_p(s, n, max);
        }
    }
    if (n == 0) {
        const double sum = weigh_all(s, max, scale);
        *token = draw(s, s->n_vocab, sum);
    } else {
        const double sum = weigh_chosen(s, n, max, scale);
        *token = token_of(s->chosen[draw(s, n, sum)]);
    }
    return PI_OK;
}
