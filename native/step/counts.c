/* counts.c - what a session tells of its work: taps of layers, the last step, how often neurons fired. */
#include <string.h>

#include "../hybrid/cache.h"

pi_status pi_session_set_tap(pi_session *s, int32_t layer, const pi_tap *tap) {
    if (!s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_set_tap: session is NULL");
    if (layer < 0 || layer >= s->model->info.n_layer)
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d is out of range 0..%d", layer, s->model->info.n_layer - 1);
    if (tap && s->hybrid)
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "a session with layers on a device cannot be tapped; one of the CPU alone can");
    if (tap && s->model->info.n_expert) return PI_FAIL(PI_ERROR_UNSUPPORTED, "a model with experts cannot be tapped");
    if (tap && !pi_ffn_of(&s->model->layer[layer]))
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "layer %d has no feed-forward to be tapped", layer);
    if (tap && tap->score && !s->model->info.predictor)
        return PI_FAIL(PI_ERROR_ARGUMENT, "the model has no predictor whose scores could be tapped");
    pi_session_lock(s);
    s->tap[layer] = tap ? *tap : (pi_tap){0};
    s->n_taps = 0;
    for (int32_t l = 0; l < s->model->info.n_layer; l++) {
        const pi_tap *t = &s->tap[l];
        s->n_taps += t->input || t->norm || t->hidden || t->score;
    }
    pi_session_unlock(s);
    return PI_OK;
}

pi_status pi_session_last_step(const pi_session *s, int32_t layer, pi_layer_step *out) {
    if (!s || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_last_step: session or out is NULL");
    if (layer < 0 || layer >= s->model->info.n_layer)
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d is out of range 0..%d", layer, s->model->info.n_layer - 1);
    pi_session_lock(s);
    *out = s->step[layer];
    pi_session_unlock(s);
    return PI_OK;
}

pi_status pi_session_experts(const pi_session *s, int32_t layer, pi_expert_counts *out, uint8_t *place,
                             uint64_t *uses) {
    if (out) *out = (pi_expert_counts){0};
    if (!s || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_experts: session or out is NULL");
    const pi_model_info *i = &s->model->info;
    if (layer < 0 || layer >= i->n_layer)
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d is out of range 0..%d", layer, i->n_layer - 1);
    if (!i->n_expert) return PI_FAIL(PI_ERROR_ARGUMENT, "the model has no experts");
    const ptrdiff_t first = (ptrdiff_t)layer * i->n_expert;
    pi_session_lock(s);
    if (s->hybrid) *out = pi_cache_counts(s->hybrid, layer);
    for (int32_t e = 0; e < i->n_expert; e++) {
        out->n_routes += (int64_t)s->uses[first + e];
        if (uses) uses[e] = s->uses[first + e];
        if (place) place[e] = out->n_places && s->hybrid->place[first + e] >= 0;
    }
    pi_session_unlock(s);
    return PI_OK;
}

pi_status pi_session_last_total(const pi_session *s, int64_t *bytes, float *us) {
    if (!s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_last_total: session is NULL");
    pi_session_lock(s);
    if (bytes) *bytes = s->last_bytes;
    if (us) *us = (float)((double)s->last_ns * 1e-3);
    pi_session_unlock(s);
    return PI_OK;
}

static pi_status counts_of(pi_session *s, int32_t layer, uint32_t *count, uint64_t *n_tokens) {
    const size_t n = (size_t)s->model->info.n_placed;
    memcpy(count, s->fired + n * (size_t)layer, sizeof *count * n);
    if (s->hybrid) PI_TRY(pi_hybrid_add_fired(s->hybrid, layer, count));
    if (n_tokens) *n_tokens = s->n_counted;
    return PI_OK;
}

static pi_status check_counts(const pi_session *s) {
    if (!s->fired) return PI_FAIL(PI_ERROR_ARGUMENT, "the session was opened without count_neurons");
    return PI_OK;
}

pi_status pi_session_counts(pi_session *s, int32_t layer, uint32_t *count, uint64_t *n_tokens) {
    if (!s || !count) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_counts: session or count is NULL");
    if (layer < 0 || layer >= s->model->info.n_layer)
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d is out of range 0..%d", layer, s->model->info.n_layer - 1);
    PI_TRY(check_counts(s));
    pi_session_lock(s);
    const pi_status st = counts_of(s, layer, count, n_tokens);
    pi_session_unlock(s);
    return st;
}

pi_status pi_session_reset_counts(pi_session *s) {
    if (!s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_reset_counts: session is NULL");
    PI_TRY(check_counts(s));
    pi_session_lock(s);
    const pi_status st = s->hybrid ? pi_hybrid_reset_fired(s->hybrid) : PI_OK;
    if (st == PI_OK) {
        memset(s->fired, 0, sizeof *s->fired * (size_t)s->model->info.n_layer * (size_t)s->model->info.n_placed);
        s->n_counted = 0;
    }
    pi_session_unlock(s);
    return st;
}
