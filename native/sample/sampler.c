/* sampler.c - chooses the next token from logits.
 *
 * Steps: logits + bias -> penalties -> DRY (dry.h) -> greedy (temperature <= 0), or mirostat, or top-n-sigma -> top-k
 * -> typical -> top-p -> min-p -> XTC -> temperature -> draw. Each filter sees probabilities that are renormalised
 * over what the one before it left; every filter leaves at least one token.
 *
 * With l the logits of the tokens that are left and p = softmax(l):
 *   repeat     l / penalty where l > 0, l * penalty elsewhere, for every token in the window
 *   frequency  l - count * penalty; presence: l - penalty, for every token in the window
 *   n-sigma    l >= max l - n * standard deviation of l                                            (arXiv 2411.07641)
 *   top-k      the k largest
 *   typical    in order of |-ln p - H|, H the entropy, until the sum of p exceeds typical_p        (arXiv 2202.00666)
 *   top-p      in falling order until the sum of p reaches top_p                                   (arXiv 1904.09751)
 *   min-p      l >= max l + ln min_p                                                               (arXiv 2407.01082)
 *   XTC        with xtc_probability: of the tokens with p >= xtc_threshold all but the least likely go
 *   dynamic    temperature - range + 2 * range * (H / ln(number of tokens)) ^ exponent, at least 0
 *   mirostat   l /= temperature; 2: keep -log2 p <= mu; 1: keep the k of Zipf's law for mu;        (arXiv 2007.14966)
 *              draw; mu -= eta * (-log2 p - tau)
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
#include "dry.h"
#include "penalties.h"
#include "weigh.h"

enum { FIRST_LOOK = 256 };

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

    pi_penalties penalties;
    pi_dry dry;
};

#define REFUSE(...) return (pi_status)te_fail(TE_ARGUMENT, __VA_ARGS__)

/* What is written before it is read is not cleared: of a large vocabulary that would take longer than the choices of a
 * short answer. */
static void *room(int32_t n, size_t size) { return (size_t)n <= SIZE_MAX / size ? malloc((size_t)n * size) : NULL; }

pi_status pi_sampler_new(const pi_sampling *options, int32_t n_vocab, int32_t n_bias, const int32_t *bias_token,
                         const float *bias, pi_sampler **out) {
    if (out == NULL) REFUSE("no place for the new sampler was given");
    *out = NULL;
    if (options == NULL) REFUSE("no sampling options were given");
    const pi_status status = pi_sampling_check(options);
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

    for (int32_t i = 0; i < options->n_dry_breakers; i++) {
        const int32_t token = options->dry_breakers[i];
        if (token < 0 || token >= n_vocab) {
            REFUSE("dry_breakers names token %d, the vocabulary has %d", token, n_vocab);
        }
    }

    pi_sampler *s = calloc(1, sizeof *s);
    if (s == NULL) goto no_memory;
    s->o = *options;
    s->n_vocab = n_vocab;
    s->n_blocks = (int32_t)(((int64_t)n_vocab + BLOCK - 1) / BLOCK);
    s->n_bias = n_bias;
    s->own = room(n_vocab, sizeof *s->own);
    s->weights = room(n_vocab, sizeof *s->weights);
    s->block_max = room(s->n_blocks, sizeof *s->block_max);
    s->chosen = room(n_vocab, sizeof *s->chosen);
    s->work = room(n_vocab, sizeof *s->work);
    s->spare = room(n_vocab, sizeof *s->spare);
    if (!s->own || !s->weights || !s->block_max || !s->chosen || !s->work || !s->spare) goto no_memory;
    if (n_bias > 0) {
        s->bias_token = calloc((size_t)n_bias, sizeof *s->bias_token);
        s->bias = calloc((size_t)n_bias, sizeof *s->bias);
        if (!s->bias_token || !s->bias) goto no_memory;
        memcpy(s->bias_token, bias_token, (size_t)n_bias * sizeof *bias_token);
        memcpy(s->bias, bias, (size_t)n_bias * sizeof *bias);
    }
    if (!pi_penalties_open(&s->penalties, options, n_vocab)) goto no_memory;
    if (!pi_dry_open(&s->dry, options, n_vocab)) goto no_memory;
    s->o.dry_breakers = NULL; /* the caller's */
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
    pi_penalties_close(&s->penalties);
    pi_dry_close(&s->dry);
    free(s);
}

int32_t pi_sampler_n_vocab(const pi_sampler *s) { return s->n_vocab; }

void pi_sampler_reset(pi_sampler *s, uint64_t seed) {
    if (!s) return;
    s->o.seed = seed;
    s->random = seed;
    s->mu = 2.0 * (double)s->o.mirostat_tau;
    pi_penalties_reset(&s->penalties);
    pi_dry_reset(&s->dry);
}

pi_status pi_sampler_accept(pi_sampler *s, int32_t token) {
    if (!s) REFUSE("pi_sampler_accept: sampler is NULL");
    if (token < 0 || token >= s->n_vocab) {
        REFUSE("token %d was accepted, the vocabulary has %d tokens", token, s->n_vocab);
    }
    if (!pi_dry_accept(&s->dry, token)) {
        return (pi_status)te_fail(TE_MEMORY, "no memory for %lld tokens", (long long)s->dry.n);
    }
    if (!pi_penalties_accept(&s->penalties, token)) {
        return (pi_status)te_fail(TE_MEMORY, "no memory for the last %lld tokens", (long long)s->penalties.window);
    }
    return PI_OK;
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
    pi_penalties_apply(&s->penalties, v);
    if (s->dry.n > 0) pi_dry_penalise(&s->dry, v);
    uint32_t bad = 0; /* what is clamped is none */
    const bool few = s->dry.n == 0 && s->n_bias + s->penalties.n_distinct < s->n_blocks;
    for (int32_t i = 0; few && i < s->n_bias; i++)
        s->block_max[s->bias_token[i] / BLOCK] = max_in(s, s->bias_token[i] / BLOCK, &bad);
    for (int32_t i = 0; few && i < s->penalties.n_distinct; i++)
        s->block_max[s->penalties.distinct[i] / BLOCK] = max_in(s, s->penalties.distinct[i] / BLOCK, &bad);
    for (int32_t b = 0; !few && b < s->n_blocks; b++) s->block_max[b] = max_in(s, b, &bad);
}

/* values = logits with bias and penalties; block_max and *max of them. */
static pi_status prepare(pi_sampler *s, const float *logits, float *max) {
    uint32_t bad = 0;
    s->values = logits;
    for (int32_t b = 0; b < s->n_blocks; b++) s->block_max[b] = max_in(s, b, &bad);
    for (int32_t i = 0; bad; i++)
        if (!(logits[i] <= FLT_MAX)) REFUSE("the logit of token %d is %g", i, (double)logits[i]);
    if (s->n_bias > 0 || s->penalties.n_distinct > 0 || s->dry.n > 0) adjust(s);
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

/* Mirostat's bound after a token of this weight, of a sum, was drawn. */
static void learn(pi_sampler *s, float weight, double sum) {
    const double surprise = -log2((double)weight / sum);
    s->mu -= (double)s->o.mirostat_eta * (surprise - (double)s->o.mirostat_tau);
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
    learn(s, s->weights[token], sum);
    return token;
}

/* Mirostat 1: the slope of Zipf's law is estimated from the likeliest tokens, and says how many have a surprise below
 * mu on the whole. */
static int32_t draw_mirostat_1(pi_sampler *s, float max, float scale) {
    enum { ESTIMATED = 100 };
    const int32_t n = take_top(s, s->n_vocab < ESTIMATED ? s->n_vocab : ESTIMATED);
    double sum_tb = 0.0, sum_tt = 0.0;
    for (int32_t i = 0; i + 1 < n; i++) {
        const double t = log((double)(i + 2) / (double)(i + 1));
        sum_tb += t * (double)((value_of(s->chosen[i]) - value_of(s->chosen[i + 1])) * scale);
        sum_tt += t * t;
    }
    int32_t k = 1;
    if (sum_tt > 0.0) {
        const double slope = sum_tb / sum_tt, epsilon = slope - 1.0, n_vocab = (double)s->n_vocab;
        /* (1 - n^-epsilon) / epsilon, which is ln n where epsilon is 0 */
        const double mass = fabs(epsilon) < 1e-9 ? log(n_vocab) : -expm1(-epsilon * log(n_vocab)) / epsilon;
        const double wanted = pow(exp2(s->mu) / mass, 1.0 / slope);
        k = wanted >= n_vocab ? s->n_vocab : wanted >= 1.0 ? (int32_t)wanted : 1; /* a NaN is none of both */
    }
    const int32_t n_kept = take_top(s, k);
    const double sum = weigh_chosen(s, n_kept, max, scale);
    const int32_t i = draw(s, n_kept, sum);
    learn(s, s->weights[i], sum);
    return token_of(s->chosen[i]);
}

/* The bound below which top-n-sigma excludes. */
static float sigma_bound(const pi_sampler *s, float max) {
    double sum = 0.0, squares = 0.0;
    int32_t n = 0;
    for (int32_t i = 0; i < s->n_vocab; i++) {
        if (s->values[i] == -INFINITY) continue;
        const double below = (double)s->values[i] - (double)max; /* near the largest, where it matters */
        sum += below;
        squares += below * below;
        n++;
    }
    const double mean = sum / n, variance = squares / n - mean * mean;
    return clamped((double)max - (double)s->o.top_n_sigma * sqrt(variance > 0.0 ? variance : 0.0));
}

/* XTC over the whole vocabulary (n 0), or the first n of chosen. Returns the new n. */
static int32_t exclude_top_choices(pi_sampler *s, int32_t n, float *max) {
    if (s->o.xtc_probability <= 0.0f || s->o.xtc_threshold > 0.5f) return n;
    if (next_random(s) >= (double)s->o.xtc_probability) return n;
    const bool all = n == 0;
    const int32_t size = all ? s->n_vocab : n;
    const double sum = all ? weigh_all(s, *max, 1.0f) : weigh_chosen(s, n, *max, 1.0f);
    const double bound = (double)s->o.xtc_threshold * sum;
    int32_t last = -1, n_above = 0;
    for (int32_t i = 0; i < size; i++) {
        if ((double)s->weights[i] < bound || (all && s->values[i] == -INFINITY)) continue;
        n_above++;
        /* Of equal ones the last, as in falling order. */
        if (!all || last < 0 || s->values[i] <= s->values[last]) last = i;
    }
    if (n_above < 2) return n;
    if (!all) {
        memmove(s->chosen, s->chosen + last, (size_t)(n - last) * sizeof *s->chosen);
        *max = value_of(s->chosen[0]);
        return n - last;
    }
    *max = s->values[last];
    for (int32_t i = 0; i < size; i++) {
        const bool goes = i != last && (double)s->weights[i] >= bound;
        s->own[i] = goes ? -INFINITY : s->values[i];
    }
    s->values = s->own;
    return 0;
}

/* The temperature for the entropy of what is left; 0: the likeliest is to be taken. */
static float dynamic_temperature(pi_sampler *s, int32_t n, float max) {
    const pi_sampling *const o = &s->o;
    if (o->dynatemp_range <= 0.0f) return o->temperature;
    const bool all = n == 0;
    const int32_t size = all ? s->n_vocab : n;
    const double log_sum = log(all ? weigh_all(s, max, 1.0f) : weigh_chosen(s, n, max, 1.0f));
    double entropy = 0.0;
    int32_t n_left = 0;
    for (int32_t i = 0; i < size; i++) {
        const float value = all ? s->values[i] : value_of(s->chosen[i]);
        if (value == -INFINITY) continue;
        n_left++;
        const double log_p = (double)(value - max) - log_sum;
        if (s->weights[i] > 0.0f) entropy -= exp(log_p) * log_p;
    }
    if (n_left < 2) return o->temperature;
    const double share = entropy / log((double)n_left);
    const double low = larger(o->temperature - o->dynatemp_range, 0.0f);
    const double high = (double)o->temperature + (double)o->dynatemp_range;
    return clamped(low +
                   (high - low) * pow(share > 0.0 ? share < 1.0 ? share : 1.0 : 0.0, (double)o->dynatemp_exponent));
}

static float scale_of(float temperature) { return temperature < 1.0f / FLT_MAX ? FLT_MAX : 1.0f / temperature; }

/* first_with, where block_max may be of tokens that were excluded since. */
static int32_t first_left(const pi_sampler *s, float value) {
    int32_t i = 0;
    while (s->values[i] != value) i++;
    return i;
}

/* What comes behind top-k. n: candidates in chosen; 0: still the whole vocabulary, in values. */
static int32_t sample_rest(pi_sampler *s, int32_t n, float max) {
    const pi_sampling *const o = &s->o;
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
    n = exclude_top_choices(s, n, &max);
    const float temperature = dynamic_temperature(s, n, max), scale = scale_of(temperature);
    if (temperature <= 0.0f) {
        return n == 0 ? first_left(s, max) : token_of(s->chosen[0]);
    }
    if (n == 0) {
        const double sum = weigh_all(s, max, scale);
        return draw(s, s->n_vocab, sum);
    }
    const double sum = weigh_chosen(s, n, max, scale);
    return token_of(s->chosen[draw(s, n, sum)]);
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
    if (o->mirostat != 0) {
        const float scale = scale_of(o->temperature);
        *token = o->mirostat == 1 ? draw_mirostat_1(s, max, scale) : draw_mirostat(s, max, scale);
        return PI_OK;
    }

    int32_t n = 0; /* candidates in chosen */
    if (o->top_n_sigma > 0.0f) exclude_below(s, sigma_bound(s, max));
    if (o->top_k > 0 && o->top_k < s->n_vocab) n = take_top(s, o->top_k);
    *token = sample_rest(s, n, max);
    return PI_OK;
}

int32_t pi_sampler_n_largest(const pi_sampler *s) {
    const pi_sampling *const o = &s->o;
    if (s->n_bias > 0 || s->penalties.window != 0 || s->dry.multiplier > 0.0f)
        return 0; /* others may be the largest then */
    if (o->temperature <= 0.0f) return 1;
    if (o->mirostat != 0 || o->top_n_sigma > 0.0f || o->top_k >= s->n_vocab) return 0;
    return o->top_k > 0 ? o->top_k : 0;
}

int32_t pi_sampler_sample_largest(pi_sampler *s, const uint64_t *largest, int32_t n) {
    const pi_sampling *const o = &s->o;
    if (o->temperature <= 0.0f) return token_of(largest[0]);
    if (n > o->top_k) n = o->top_k;
    for (int32_t i = 0; i < n; i++) {
        const uint32_t bits = (uint32_t)(largest[i] >> 32);
        float value;
        memcpy(&value, &bits, sizeof value);
        s->chosen[i] = to_candidate(value, token_of(largest[i]));
    }
    return sample_rest(s, n, value_of(s->chosen[0]));
}
