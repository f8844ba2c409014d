/* options.c - the options of a session, as sessions and plans check them. */
#include "options.h"

enum { MAX_BATCH = 1 << 16, MAX_SEQ = 1 << 16, MAX_CTX = 1 << 24, DEFAULT_CTX = 4096 };

pi_session_options pi_session_defaults(void) {
    return (pi_session_options){
        .n_seq = 1, .n_batch = 512, .type_k = PI_KV_F16, .type_v = PI_KV_F16, .sparsity = PI_SPARSITY_AUTO};
}

pi_status pi_check_sparsity(const pi_model *m, int32_t asked, int32_t *out) {
    const bool sparse = pi_is_sparse(m);
    if (m->info.n_expert && asked == PI_SPARSITY_PREDICTED)
        return PI_FAIL(PI_ERROR_ARGUMENT, "sparsity \"predicted\" is not possible: the model has experts, and its "
                                          "router names them");
    switch (asked) {
    case PI_SPARSITY_AUTO:
        *out = m->info.predictor && !m->adapted_ffn ? PI_SPARSITY_PREDICTED
               : sparse                             ? PI_SPARSITY_EXACT
                                                    : PI_SPARSITY_DENSE;
        return PI_OK;
    case PI_SPARSITY_PREDICTED:
        if (!m->info.predictor)
            return PI_FAIL(PI_ERROR_ARGUMENT,
                           "sparsity \"predicted\" needs a model with predictors (fc1, fc2); this one has none");
        if (m->adapted_ffn)
            return PI_FAIL(
                PI_ERROR_ARGUMENT,
                "sparsity \"predicted\" is not possible: an adapter changes the feed-forward, so its predictors "
                "no longer fit");
        break;
    case PI_SPARSITY_EXACT:
        if (!sparse)
            return PI_FAIL(PI_ERROR_ARGUMENT,
                           "sparsity \"exact\" needs a ReLU model; no neuron of this one is ever silent");
        break;
    case PI_SPARSITY_DENSE:
        break;
    default:
        return PI_FAIL(PI_ERROR_ARGUMENT, "sparsity %d is not known", asked);
    }
    *out = asked;
    return PI_OK;
}

pi_status pi_in_range(const char *name, int32_t v, int32_t lo, int32_t hi) {
    if (v < lo || v > hi) return PI_FAIL(PI_ERROR_ARGUMENT, "%s is %d, must be %d..%d", name, v, lo, hi);
    return PI_OK;
}

pi_status pi_session_check(const pi_model *m, pi_session_options *o) {
    if (o->n_ctx == 0) o->n_ctx = m->info.n_ctx_train < DEFAULT_CTX ? m->info.n_ctx_train : DEFAULT_CTX;
    if (o->n_pool == 0) o->n_pool = o->n_ctx;
    PI_TRY(pi_in_range("n_ctx", o->n_ctx, 1, MAX_CTX));
    PI_TRY(pi_in_range("n_pool", o->n_pool, o->n_ctx, MAX_CTX));
    PI_TRY(pi_in_range("n_seq", o->n_seq, 1, MAX_SEQ));
    PI_TRY(pi_in_range("n_batch", o->n_batch, 1, MAX_BATCH));
    PI_TRY(pi_in_range("n_guesses", o->n_guesses, 0, MAX_SEQ));
    if (m->arch->learned_pos && o->n_ctx > m->info.n_ctx_train)
        return PI_FAIL(PI_ERROR_ARGUMENT, "n_ctx is %d, and this model has learned positions for only %d", o->n_ctx,
                       m->info.n_ctx_train);
    for (int32_t i = 0; i < 2; i++) {
        const int32_t t = i ? o->type_v : o->type_k;
        if (t != PI_KV_F32 && t != PI_KV_F16 && t != PI_KV_Q8_0)
            return PI_FAIL(PI_ERROR_ARGUMENT, "KV type %d is not one of F32 (0), F16 (1), Q8_0 (8)", t);
        if (m->info.n_embd_head % te_type_get(t)->block_weights)
            return PI_FAIL(PI_ERROR_ARGUMENT, "%s cannot hold K or V: the head size %d is not a multiple of %d",
                           te_type_get(t)->name, m->info.n_embd_head, te_type_get(t)->block_weights);
    }
    if (m->latent_rank) {
        if (o->type_k != o->type_v)
            return PI_FAIL(PI_ERROR_ARGUMENT,
                           "type_k is %s and type_v %s; of this model K and V are one vector, so both must be the same",
                           te_type_get(o->type_k)->name, te_type_get(o->type_v)->name);
        if (m->latent_rank % te_type_get(o->type_k)->block_weights)
            return PI_FAIL(PI_ERROR_ARGUMENT, "%s cannot hold V: its %d values are not a multiple of %d",
                           te_type_get(o->type_k)->name, m->latent_rank, te_type_get(o->type_k)->block_weights);
    }
    return pi_check_sparsity(m, o->sparsity, &o->sparsity);
}
