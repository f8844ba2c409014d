/* plan.c - pi_plan: making one, restoring one, reading it. */
#include <stdlib.h>

#include "plan.h"

static pi_status plan_alloc(const pi_model *m, const pi_plan_options *o, pi_plan **out) {
    pi_plan *p = calloc(1, sizeof *p);
    if (p) {
        p->n_layer = m->info.n_layer;
        p->n_ff = m->info.n_ff;
        p->n_words = ((size_t)p->n_ff + 63) / 64;
        p->mark = calloc((size_t)p->n_layer, p->n_words * sizeof *p->mark);
        p->layer = calloc((size_t)p->n_layer, sizeof *p->layer);
    }
    if (!p || !p->mark || !p->layer) {
        pi_plan_free(p);
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory planning %d layers", m->info.n_layer);
    }
    p->info = (pi_plan_info){.n_layer = p->n_layer,
                             .n_ff = p->n_ff,
                             .sparsity = o->sparsity,
                             .n_ctx = o->n_ctx,
                             .n_pool = o->n_pool,
                             .n_seq = o->n_seq,
                             .n_batch = o->n_batch,
                             .has_counts = o->counts && o->sparsity != PI_SPARSITY_DENSE,
                             .budget_bytes = o->budget_bytes};
    *out = p;
    return PI_OK;
}

void pi_plan_free(pi_plan *p) {
    if (!p) return;
    free(p->mark);
    free(p->layer);
    free(p);
}

pi_status pi_plan_new(const pi_model *model, const pi_plan_options *options, pi_plan **out) {
    if (!model || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_plan_new: model or out is NULL");
    *out = NULL;
    pi_plan_options o = options ? *options : pi_plan_defaults();
    PI_TRY(pi_plan_check(model, &o));
    pi_cost cost;
    pi_plan *p = NULL;
    pi_status st = pi_cost_new(model, &o, &cost);
    if (st == PI_OK) st = plan_alloc(model, &o, &p);
    if (st == PI_OK) st = pi_plan_make(p, model, &cost, &o);
    pi_cost_free(&cost);
    if (st != PI_OK) {
        pi_plan_free(p);
        return st;
    }
    *out = p;
    return PI_OK;
}

/* ---- a plan from elsewhere ---- */

static pi_status restore_layer(pi_plan *p, const pi_cost *cost, const pi_placement *at, int32_t l, int64_t *read) {
    const int32_t n_hot = at->n_hot[l], block = cost->layer[l].block;
    int32_t before = -1;
    p->layer[l].on_device = at->on_device[l] != 0;
    if (n_hot < 0 || n_hot > p->n_ff)
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d of the plan has %d hot neurons, the model has %d", l, n_hot,
                       p->n_ff);
    if (n_hot && !at->on_device[l])
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d of the plan lies on the CPU, yet has %d hot neurons", l, n_hot);
    for (int32_t k = 0; k < n_hot; k++) {
        const int32_t j = at->hot[*read + k];
        if (j <= before || j >= p->n_ff)
            return PI_FAIL(PI_ERROR_ARGUMENT, "hot neuron %d of layer %d of the plan is %d, must be %d..%d", k, l, j,
                           before + 1, p->n_ff - 1);
        pi_set_hot(p, l, before = j);
    }
    *read += n_hot;
    for (int32_t j = 0; j < p->n_ff; j++)
        if (pi_is_hot(p, l, j) != pi_is_hot(p, l, j / block * block))
            return PI_FAIL(PI_ERROR_ARGUMENT,
                           "layer %d of the plan splits neurons %d..%d, which the format of ffn_down holds together", l,
                           j / block * block, j / block * block + block - 1);
    return PI_OK;
}

static pi_status restore(pi_plan *p, const pi_model *m, const pi_cost *cost, const pi_plan_options *o,
                         const pi_placement *at) {
    int64_t read = 0;
    for (int32_t l = 0; l < p->n_layer; l++) PI_TRY(restore_layer(p, cost, at, l, &read));
    p->info.head_on_device = at->head_on_device != 0;
    pi_plan_extremes(m, cost, o, &p->info);
    pi_plan_evaluate(p, cost, o);
    if (p->info.total_bytes > o->budget_bytes)
        return PI_FAIL(PI_ERROR_ARGUMENT, "the plan takes %s (%llu bytes), the budget is %s (%llu bytes)",
                       pi_size(p->info.total_bytes).text, (unsigned long long)p->info.total_bytes,
                       pi_size(o->budget_bytes).text, (unsigned long long)o->budget_bytes);
    return PI_OK;
}

pi_status pi_plan_restore(const pi_model *model, const pi_plan_options *options, const pi_placement *placement,
                          pi_plan **out) {
    if (!model || !out || !placement || !placement->on_device || !placement->n_hot || !placement->hot)
        return PI_FAIL(PI_ERROR_ARGUMENT, "pi_plan_restore: model, placement or out is NULL");
    *out = NULL;
    pi_plan_options o = options ? *options : pi_plan_defaults();
    PI_TRY(pi_plan_check(model, &o));
    pi_cost cost;
    pi_plan *p = NULL;
    pi_status st = pi_cost_new(model, &o, &cost);
    if (st == PI_OK) st = plan_alloc(model, &o, &p);
    if (st == PI_OK) st = restore(p, model, &cost, &o, placement);
    pi_cost_free(&cost);
    if (st != PI_OK) {
        pi_plan_free(p);
        return st;
    }
    *out = p;
    return PI_OK;
}

/* ---- reading a plan ---- */

pi_status pi_plan_get_info(const pi_plan *p, pi_plan_info *out) {
    if (!p || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_plan_get_info: plan or out is NULL");
    *out = p->info;
    return PI_OK;
}

static pi_status check_layer(const pi_plan *p, int32_t l) {
    if (l < 0 || l >= p->n_layer)
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d is out of range 0..%d", l, p->n_layer - 1);
    return PI_OK;
}

pi_status pi_plan_get_layer(const pi_plan *p, int32_t layer, pi_plan_layer *out) {
    if (!p || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_plan_get_layer: plan or out is NULL");
    PI_TRY(check_layer(p, layer));
    *out = p->layer[layer];
    return PI_OK;
}

pi_status pi_plan_hot(const pi_plan *p, int32_t layer, int32_t *ids) {
    if (!p || !ids) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_plan_hot: plan or ids is NULL");
    PI_TRY(check_layer(p, layer));
    int32_t n = 0;
    for (int32_t j = 0; j < p->n_ff; j++)
        if (pi_is_hot(p, layer, j)) ids[n++] = j;
    return PI_OK;
}
