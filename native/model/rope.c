/* rope.c - rotary position embedding with linear, YaRN (arXiv 2309.00071) and Llama-3 (rope_freqs.weight) scaling. */
#include "rope.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_quant.h"
#include "../../vendor/core/te_types.h"
#include "keys.h"

/* The pair index at which a full turn takes n_ctx / turns positions. */
static double yarn_pair(double n_rot, double n_ctx, double turns, double base) {
    return n_rot * log(n_ctx / (turns * 2 * 3.14159265358979323846)) / (2 * log(base));
}

static pi_status read_factors(const te_gguf *g, const char *name, int32_t n_pairs, float *factor) {
    const te_gguf_tensor *t = te_gguf_find_tensor(g, name);
    for (int32_t i = 0; i < n_pairs; i++) factor[i] = 1;
    if (!t) return PI_OK;
    if (t->n_dims != 1 || t->ne[0] != n_pairs || !te_can_dequantize(t->type) ||
        te_type_get(t->type)->block_weights != 1)
        return PI_FAIL(PI_ERROR_FORMAT, "%s has %d dimensions, %lld values of type %s in a row, expected {%d} floats",
                       name, t->n_dims, (long long)t->ne[0], te_type_get(t->type)->name, n_pairs);
    te_dequantize_row(t->type, t->data, factor, n_pairs);
    for (int32_t i = 0; i < n_pairs; i++)
        if (!(factor[i] >= FLT_MIN) || !isfinite(factor[i])) /* its reciprocal is finite, too */
            return PI_FAIL(PI_ERROR_FORMAT, "%s[%d] is %g, must be positive and finite", name, i, (double)factor[i]);
    return PI_OK;
}

/* What the file's keys say. */
typedef struct scaling {
    int64_t n_rot, n_orig;
    float base, factor, attn_factor, log_multiplier, beta_fast, beta_slow;
    bool linear, yarn;
} scaling;

static pi_status read_scaling(const te_gguf *g, const char *arch, int32_t n_embd_head, int32_t n_ctx_train,
                              bool by_length, scaling *out) {
    scaling k = {.n_rot = n_embd_head,
                 .n_orig = n_ctx_train,
                 .base = 10000,
                 .factor = 1,
                 .attn_factor = 1,
                 .beta_fast = 32,
                 .beta_slow = 1};
    te_str type = {"none", 4};
    bool has_old = false, has_factor = false;
    PI_TRY(pi_key_i64(g, arch, "rope.dimension_count", 2, n_embd_head, &k.n_rot, NULL));
    PI_TRY(pi_key_f32(g, arch, "rope.freq_base", &k.base, NULL));
    PI_TRY(pi_key_f32(g, arch, "rope.scale_linear", &k.factor, &has_old));
    PI_TRY(pi_key_f32(g, arch, "rope.scaling.factor", &k.factor, &has_factor));
    if (has_old || has_factor) type = (te_str){"linear", 6}; /* what a factor without a type means */
    PI_TRY(pi_key_str(g, arch, "rope.scaling.type", &type, NULL));
    PI_TRY(pi_key_i64(g, arch, "rope.scaling.original_context_length", 1, INT32_MAX, &k.n_orig, NULL));
    PI_TRY(pi_key_f32(g, arch, "rope.scaling.attn_factor", &k.attn_factor, NULL));
    PI_TRY(pi_key_f32(g, arch, "rope.scaling.yarn_log_multiplier", &k.log_multiplier, NULL));
    PI_TRY(pi_key_f32(g, arch, "rope.scaling.yarn_beta_fast", &k.beta_fast, NULL));
    PI_TRY(pi_key_f32(g, arch, "rope.scaling.yarn_beta_slow", &k.beta_slow, NULL));
    if (k.n_rot % 2)
        return PI_FAIL(PI_ERROR_FORMAT, "%s.rope.dimension_count is %lld, must be even", arch, (long long)k.n_rot);
    if (!(k.base > 1) || !isfinite(k.base))
        return PI_FAIL(PI_ERROR_FORMAT, "%s.rope.freq_base is %g", arch, (double)k.base);
    if (k.factor == 0) k.factor = 1; /* some converters write 0 for "no scaling" */
    if (!(k.factor >= 1) || !isfinite(k.factor))
        return PI_FAIL(PI_ERROR_FORMAT, "%s.rope.scaling.factor is %g, must be at least 1", arch, (double)k.factor);
    k.linear = te_str_is(type, "linear");
    k.yarn = te_str_is(type, "yarn");
    if (!k.linear && !k.yarn && !te_str_is(type, "none") && !(by_length && te_str_is(type, "longrope")))
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "RoPE scaling \"%.*s\" is not known (none, linear, yarn and longrope are)",
                       (int)(type.n < 40 ? type.n : 40), type.p);
    if (!isfinite(k.attn_factor) || !isfinite(k.log_multiplier) || k.log_multiplier < 0)
        return PI_FAIL(PI_ERROR_FORMAT, "RoPE keys of %s: attn_factor %g, yarn_log_multiplier %g", arch,
                       (double)k.attn_factor, (double)k.log_multiplier);
    if (k.yarn && (!(k.beta_fast > 0) || !(k.beta_slow > 0)))
        return PI_FAIL(PI_ERROR_FORMAT, "YaRN keys of %s: beta_fast %g, beta_slow %g", arch, (double)k.beta_fast,
                       (double)k.beta_slow);
    *out = k;
    return PI_OK;
}

static pi_status init(pi_rope *r, const te_gguf *g, const char *arch, int32_t n_embd_head, int32_t n_ctx_train,
                      bool yarn_exact, const char *factors) {
    const bool by_length = strcmp(factors, "rope_freqs.weight") != 0;
    scaling k;
    PI_TRY(read_scaling(g, arch, n_embd_head, n_ctx_train, by_length, &k));
    const int32_t n_pairs = (int32_t)k.n_rot / 2;
    r->n_rot = (int32_t)k.n_rot;
    r->magnitude = by_length ? k.attn_factor : 1;
    r->freq = malloc(sizeof(float) * (size_t)n_pairs);
    if (!r->freq) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d RoPE frequencies", n_pairs);
    PI_TRY(read_factors(g, factors, n_pairs, r->freq));
    double low = 0, high = 0;
    if (k.yarn) {
        low = yarn_pair((double)k.n_rot, (double)k.n_orig, k.beta_fast, k.base);
        high = yarn_pair((double)k.n_rot, (double)k.n_orig, k.beta_slow, k.base);
        low = fmax(0, yarn_exact ? low : floor(low));
        high = fmin((double)k.n_rot - 1, yarn_exact ? high : ceil(high));
        r->log_factor = logf(k.factor);
        r->magnitude = k.attn_factor * (1 + 0.1F * logf(k.factor)) / (1 + 0.1F * k.log_multiplier * logf(k.factor));
    }
    for (int32_t i = 0; i < n_pairs; i++) {
        const double plain = pow(k.base, -2.0 * i / (double)k.n_rot) / r->freq[i];
        double share = k.linear ? 1 : 0; /* of the interpolated frequency, plain / factor */
        if (k.yarn) share = fmin(1, fmax(0, (i - low) / fmax(0.001, high - low)));
        r->freq[i] = (float)(plain * (1 - share) + plain / k.factor * share);
    }
    const char *how = k.linear                          ? ", linear"
                      : k.yarn                          ? ", yarn"
                      : by_length                       ? ", longrope"
                      : te_gguf_find_tensor(g, factors) ? ", llama3 factors"
                                                        : "";
    const int n = snprintf(r->text, sizeof r->text, "%s, base %g%s", r->kind == PI_ROPE_NORM ? "norm" : "neox",
                           (double)k.base, how);
    if ((k.linear || k.yarn) && n > 0 && (size_t)n < sizeof r->text)
        snprintf(r->text + n, sizeof r->text - (size_t)n, " x%g", (double)k.factor);
    return PI_OK;
}

pi_status pi_rope_init(pi_rope *r, pi_rope_kind kind, const te_gguf *g, const char *arch, int32_t n_embd_head,
                       int32_t n_ctx_train, bool yarn_exact, const char *factors) {
    *r = (pi_rope){.kind = kind, .magnitude = 1, .text = "none"};
    return kind == PI_ROPE_NONE ? PI_OK : init(r, g, arch, n_embd_head, n_ctx_train, yarn_exact, factors);
}

pi_status pi_rope_init_window(pi_rope *r, const pi_rope *full, const te_gguf *g, const char *arch, float base,
                              int32_t n_embd_head) {
    const bool own = base > 0;
    if (!own) base = 10000;
    int64_t n_rot = n_embd_head ? n_embd_head : full->n_rot;
    if (n_embd_head) PI_TRY(pi_key_i64(g, arch, "rope.dimension_count_swa", 2, n_embd_head, &n_rot, NULL));
    if (n_rot % 2)
        return PI_FAIL(PI_ERROR_FORMAT, "%s.rope.dimension_count_swa is %lld, must be even", arch, (long long)n_rot);
    *r = (pi_rope){.kind = full->kind, .n_rot = (int32_t)n_rot, .magnitude = 1};
    if (!own) PI_TRY(pi_key_f32(g, arch, "rope.freq_base", &base, NULL));
    PI_TRY(pi_key_f32(g, arch, "rope.freq_base_swa", &base, NULL));
    if (!(base > 1) || !isfinite(base))
        return PI_FAIL(PI_ERROR_FORMAT, "%s.rope.freq_base_swa is %g", arch, (double)base);
    r->freq = malloc(sizeof(float) * (size_t)(r->n_rot / 2));
    if (!r->freq) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d RoPE frequencies", r->n_rot / 2);
    for (int32_t i = 0; i < r->n_rot / 2; i++) r->freq[i] = (float)pow(base, -2.0 * i / (double)r->n_rot);
    return PI_OK;
}

void pi_rope_free(pi_rope *r) {
    free(r->freq);
    r->freq = NULL;
}

void pi_rope_angles(const pi_rope *r, double pos, float magnitude, float *cs) {
    for (int32_t i = 0; i < r->n_rot / 2; i++) {
        const double a = pos * (double)r->freq[i];
        cs[2 * i] = (float)cos(a) * magnitude;
        cs[2 * i + 1] = (float)sin(a) * magnitude;
    }
}

/* Pairs that stand `step` apart, the second one's numbers at b: in a shape that compilers turn into vectors. */
static void turn(const float *restrict cs, int32_t n, int32_t step, float *restrict a, float *restrict b) {
    for (int32_t i = 0; i < n; i++) {
        const float c = cs[2 * i], s = cs[2 * i + 1], x = a[step * i], y = b[step * i];
        a[step * i] = x * c - y * s;
        b[step * i] = x * s + y * c;
    }
}

void pi_rope_apply(const pi_rope *r, const float *cs, float *head) {
    const int32_t half = r->n_rot / 2;
    if (r->kind == PI_ROPE_NORM)
        turn(cs, half, 2, head, head + 1);
    else
        turn(cs, half, 1, head, head + half);
}
