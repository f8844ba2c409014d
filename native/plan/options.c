/* options.c - what a plan is asked for, checked. */
#include "../../vendor/core/te_types.h"
#include "plan.h"

enum { MAX_BATCH = 1 << 16, MAX_SEQ = 1 << 16, MAX_CTX = 1 << 24, DEFAULT_CTX = 4096, MAX_GROUP = 1 << 20 };

pi_plan_options pi_plan_defaults(void) {
    return (pi_plan_options){.n_seq = 1,
                             .n_batch = 512,
                             .type_k = PI_KV_F16,
                             .type_v = PI_KV_F16,
                             .sparsity = PI_SPARSITY_AUTO,
                             .group = 32,
                             .gpu_bytes_per_s = 800e9,
                             .cpu_bytes_per_s = 40e9,
                             .pcie_bytes_per_s = 24e9,
                             .handover_us = 6,
                             .layer_us = 16,
                             .ffn_us = 9,
                             .overhead_bytes = 608U << 20,
                             .active_share = 0.15,
                             .overshoot = 1.2};
}

static pi_status in_range(const char *name, int32_t v, int32_t lo, int32_t hi) {
    if (v < lo || v > hi) return PI_FAIL(PI_ERROR_ARGUMENT, "%s is %d, must be %d..%d", name, v, lo, hi);
    return PI_OK;
}

static pi_status number_in(const char *name, double v, double lo, double hi) {
    if (!(v >= lo && v <= hi)) return PI_FAIL(PI_ERROR_ARGUMENT, "%s is %g, must be %g to %g", name, v, lo, hi);
    return PI_OK;
}

static pi_status check_sparsity(const pi_model *m, pi_plan_options *o) {
    const bool relu = pi_is_relu(m->info.activation), predictor = m->info.predictor != PI_PREDICTOR_NONE;
    PI_TRY(in_range("sparsity", o->sparsity, PI_SPARSITY_AUTO, PI_SPARSITY_DENSE));
    if (o->sparsity == PI_SPARSITY_AUTO)
        o->sparsity = predictor ? PI_SPARSITY_PREDICTED : relu ? PI_SPARSITY_EXACT : PI_SPARSITY_DENSE;
    if (o->sparsity == PI_SPARSITY_PREDICTED && !predictor)
        return PI_FAIL(PI_ERROR_ARGUMENT, "a plan for sparsity \"predicted\" needs a model with predictors");
    if (o->sparsity == PI_SPARSITY_EXACT && !relu)
        return PI_FAIL(PI_ERROR_ARGUMENT, "a plan for sparsity \"exact\" needs a ReLU model");
    return PI_OK;
}

pi_status pi_plan_check(const pi_model *m, pi_plan_options *o) {
    const int32_t n_train = m->info.n_ctx_train;
    if (o->n_ctx == 0) o->n_ctx = n_train < DEFAULT_CTX ? n_train : DEFAULT_CTX;
    if (o->n_pool == 0) o->n_pool = o->n_ctx;
    PI_TRY(in_range("n_ctx", o->n_ctx, 1, MAX_CTX));
    PI_TRY(in_range("n_pool", o->n_pool, o->n_ctx, MAX_CTX));
    PI_TRY(in_range("n_seq", o->n_seq, 1, MAX_SEQ));
    PI_TRY(in_range("n_batch", o->n_batch, 1, MAX_BATCH));
    PI_TRY(in_range("group", o->group, 1, MAX_GROUP));
    if (m->arch->learned_pos && o->n_ctx > n_train)
        return PI_FAIL(PI_ERROR_ARGUMENT, "n_ctx is %d, and this model has learned positions for only %d", o->n_ctx,
                       n_train);
    for (int32_t i = 0; i < 2; i++) {
        const int32_t t = i ? o->type_v : o->type_k;
        if (t != PI_KV_F32 && t != PI_KV_F16 && t != PI_KV_Q8_0)
            return PI_FAIL(PI_ERROR_ARGUMENT, "KV type %d is not one of F32 (0), F16 (1), Q8_0 (8)", t);
        if (m->info.n_embd_head % te_type_get(t)->block_weights)
            return PI_FAIL(PI_ERROR_ARGUMENT, "%s cannot hold K or V: the head size %d is not a multiple of %d",
                           te_type_get(t)->name, m->info.n_embd_head, te_type_get(t)->block_weights);
    }
    PI_TRY(number_in("gpu_bytes_per_s", o->gpu_bytes_per_s, 1, 1e18));
    PI_TRY(number_in("cpu_bytes_per_s", o->cpu_bytes_per_s, 1, 1e18));
    PI_TRY(number_in("pcie_bytes_per_s", o->pcie_bytes_per_s, 1, 1e18));
    PI_TRY(number_in("handover_us", o->handover_us, 0, 1e9));
    PI_TRY(number_in("layer_us", o->layer_us, 0, 1e9));
    PI_TRY(number_in("ffn_us", o->ffn_us, 0, 1e9));
    PI_TRY(number_in("active_share", o->active_share, 0, 1));
    PI_TRY(number_in("overshoot", o->overshoot, 1, 1e6));
    if (o->overhead_bytes > UINT64_MAX / 4)
        return PI_FAIL(PI_ERROR_ARGUMENT, "overhead_bytes is %llu, more than any device has",
                       (unsigned long long)o->overhead_bytes);
    if (o->counts && !o->n_tokens)
        return PI_FAIL(PI_ERROR_ARGUMENT, "counts were given without the number of tokens that they come from");
    return check_sparsity(m, o);
}
