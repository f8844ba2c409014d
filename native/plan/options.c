/* options.c - what a plan is asked for, checked. */
#include "../state/options.h"
#include "plan.h"

enum { MAX_GROUP = 1 << 20 };

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
                             .overhead_bytes = 416U << 20,
                             .active_share = 0.15,
                             .overshoot = 1.2};
}

static pi_status number_in(const char *name, double v, double lo, double hi) {
    if (!(v >= lo && v <= hi)) return PI_FAIL(PI_ERROR_ARGUMENT, "%s is %g, must be %g to %g", name, v, lo, hi);
    return PI_OK;
}

/* What devices do not know of attention, or NULL. */
static const char *unknown_attention(const pi_model *m, int32_t l) {
    const pi_attention *a = m->layer[l].n_host ? NULL : pi_attention_of(&m->layer[l]);
    if (!a) return NULL;
    if (a->borrows) return "K and V of another layer";
    return a->sub_norm ? "a norm behind attention" : NULL;
}

static pi_status check_layer(const pi_model *m, int32_t l) {
    const pi_ffn *f = pi_ffn_of(&m->layer[l]);
    const pi_experts *e = pi_experts_of(&m->layer[l]);
    const char *what = unknown_attention(m, l);
    if (m->layer[l].scale && ((!f && !(e && e->shared_norm.w)) || !m->arch->post_norm))
        what = "a scale of what it leaves";
    if (f && !m->info.n_expert && pi_n_ff(f) != m->info.n_ff) what = "another number of neurons";
    if (f && f->cuts && f->down_t.w && te_type_get(f->down_t.type)->block_weights > 1)
        what = "a feed-forward that cuts its gates, and a down by neuron in blocks,";
    if (f && f->cuts && pi_adapts_ffn(&m->layer[l])) what = "adapters of a feed-forward that cuts its gates,";
    for (int32_t i = m->layer[l].n_host; i < m->layer[l].n_blocks - m->layer[l].n_tail; i++)
        if (!m->layer[l].block[i].kind->device) what = m->layer[l].block[i].kind->name;
    /* Neurons and experts are split: they cannot be in front of what the CPU computes before the device begins. */
    for (int32_t i = 0; !what && i < m->layer[l].n_host; i++)
        if (m->layer[l].block[i].kind == &pi_ffn_kind || m->layer[l].block[i].kind == &pi_experts_kind)
            what = m->layer[l].block[m->layer[l].n_host - 1].kind->name;
    if (!what) return PI_OK;
    return PI_FAIL(PI_ERROR_UNSUPPORTED, "layer %d has %s, which a device does not know; the CPU computes such a model",
                   l, what);
}

/* Of a plan that may put layers on a device: what it knows. */
static pi_status check_layers(const pi_model *m, const pi_plan_options *o) {
    uint64_t budget = 0;
    for (int32_t d = 0; d < o->n_devices; d++) budget |= pi_budget(o, d);
    for (int32_t l = 0; budget && l < m->info.n_layer; l++) {
        const pi_experts *e = pi_experts_of(&m->layer[l]);
        if (e && ((e->gate.w && e->gate.type != e->up.type) ||
                  (e->shared_gate.w && e->shared_gate.type != e->shared_up.type)))
            return PI_FAIL(
                PI_ERROR_UNSUPPORTED,
                "layer %d has experts whose gate and up are of two formats, which a device does not know; the "
                "CPU computes such a model",
                l);
        const pi_latent *latent = pi_latent_of(&m->layer[l]);
        if (latent && latent->q_a.n_rows % 4)
            return PI_FAIL(
                PI_ERROR_UNSUPPORTED,
                "a q_lora_rank of %d is no multiple of 4, which a device needs; the CPU computes such a model",
                latent->q_a.n_rows);
        if (latent && !pi_space_latent(m->latent_rank, m->rope[0].n_rot, m->head_key, m->head_value))
            return PI_FAIL(PI_ERROR_UNSUPPORTED,
                           "a latent of %d values and %d rotated ones, with heads of %d and %d, is more than a device "
                           "knows; the CPU computes such a model",
                           m->latent_rank, m->rope[0].n_rot, m->head_key, m->head_value);
        if (e && e->best_in_group && e->n_group_used < e->n_group)
            return PI_FAIL(PI_ERROR_UNSUPPORTED,
                           "layer %d ranks groups of experts by their best one, which a device does not know; the CPU "
                           "computes such a model",
                           l);
        PI_TRY(check_layer(m, l));
        const pi_attention *attention = m->layer[l].n_host ? NULL : pi_attention_of(&m->layer[l]);
        const int32_t window = attention ? attention->window : 0;
        if (!pi_space_window(window))
            return PI_FAIL(
                PI_ERROR_UNSUPPORTED,
                "layer %d sees the last %d positions, a device needs windows of %d or more; the CPU computes "
                "such a model",
                l, window, PI_SMALL_BATCH);
    }
    return PI_OK;
}

pi_status pi_plan_check(const pi_model *m, pi_plan_options *o) {
    pi_session_options s = {.n_ctx = o->n_ctx,
                            .n_pool = o->n_pool,
                            .n_seq = o->n_seq,
                            .n_batch = o->n_batch,
                            .n_guesses = o->n_guesses,
                            .type_k = o->type_k,
                            .type_v = o->type_v,
                            .sparsity = o->sparsity};
    PI_TRY(pi_session_check(m, &s));
    o->n_ctx = s.n_ctx;
    o->n_pool = s.n_pool;
    o->sparsity = s.sparsity;
    if (o->group < 1 || o->group > MAX_GROUP)
        return PI_FAIL(PI_ERROR_ARGUMENT, "group is %d, must be 1..%d", o->group, MAX_GROUP);
    PI_TRY(number_in("gpu_bytes_per_s", o->gpu_bytes_per_s, 1, 1e18));
    PI_TRY(number_in("cpu_bytes_per_s", o->cpu_bytes_per_s, 1, 1e18));
    PI_TRY(number_in("pcie_bytes_per_s", o->pcie_bytes_per_s, 1, 1e18));
    PI_TRY(number_in("zero_copy_bytes_per_s", o->zero_copy_bytes_per_s, 0, 1e18));
    PI_TRY(number_in("handover_us", o->handover_us, 0, 1e9));
    PI_TRY(number_in("layer_us", o->layer_us, 0, 1e9));
    PI_TRY(number_in("ffn_us", o->ffn_us, 0, 1e9));
    PI_TRY(number_in("active_share", o->active_share, 0, 1));
    PI_TRY(number_in("overshoot", o->overshoot, 1, 1e6));
    if (o->n_devices < 1) o->n_devices = 1;
    if (o->n_devices > PI_PLAN_DEVICES)
        return PI_FAIL(PI_ERROR_ARGUMENT, "a plan is for 1..%d devices, not for %d", PI_PLAN_DEVICES, o->n_devices);
    PI_TRY(check_layers(m, o));
    if (o->overhead_bytes > UINT64_MAX / 4)
        return PI_FAIL(PI_ERROR_ARGUMENT, "overhead_bytes is %llu, more than any device has",
                       (unsigned long long)o->overhead_bytes);
    if (o->counts && !o->n_tokens)
        return PI_FAIL(PI_ERROR_ARGUMENT, "counts were given without the number of tokens that they come from");
    return PI_OK;
}
