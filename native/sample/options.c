/* options.c - what a sampler may be asked for. */
#include <float.h>
#include <stddef.h>

#include "../../vendor/core/te_status.h"
#include "sampler.h"

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
        .xtc_threshold = 0.1f,
        .dynatemp_exponent = 1.0f,
        .dry_base = 1.75f,
        .dry_allowed_length = 2,
        .dry_penalty_last_n = -1,
    };
    return o;
}

pi_status pi_sampling_check(const pi_sampling *o) {
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
        {"top_n_sigma", o->top_n_sigma, -FLT_MAX, FLT_MAX},
        {"xtc_probability", o->xtc_probability, -FLT_MAX, 1.0f},
        {"xtc_threshold", o->xtc_threshold, 0.0f, FLT_MAX},
        {"dynatemp_range", o->dynatemp_range, -FLT_MAX, FLT_MAX},
        {"dynatemp_exponent", o->dynatemp_exponent, 0.0f, FLT_MAX},
        {"dry_multiplier", o->dry_multiplier, -FLT_MAX, FLT_MAX},
        {"dry_base", o->dry_base, o->dry_multiplier > 0.0f ? 1.0f : 0.0f, FLT_MAX},
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
    if (o->dry_penalty_last_n < -1) {
        REFUSE("dry_penalty_last_n is %d, it must be a number of tokens, or -1 for all", o->dry_penalty_last_n);
    }
    if (o->dry_multiplier > 0.0f && o->dry_allowed_length < 1) {
        REFUSE("dry_allowed_length is %d, it must be at least 1", o->dry_allowed_length);
    }
    if (o->n_dry_breakers < 0 || (o->n_dry_breakers > 0 && o->dry_breakers == NULL)) {
        REFUSE("n_dry_breakers is %d, and there is no list of so many", o->n_dry_breakers);
    }
    if (o->mirostat < 0 || o->mirostat > 2) REFUSE("mirostat is %d, it must be 0, 1 or 2", o->mirostat);
    return PI_OK;
}
