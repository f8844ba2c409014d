/* plan.c - pi_plan: making one, restoring one, reading it. */
#include <stdlib.h>

#include "plan.h"

static pi_status plan_alloc(const pi_model *m, const pi_plan_options *o, pi_plan **out) {
    pi_plan *p = calloc(1, sizeof *p);
    if (p) {
        p->n_layer = m->info.n_layer;
        p->n_placed = m->info.n_placed;
        p->n_words = ((size_t)p->n_placed + 63) / 64;
        p->mark = calloc((size_t)p->n_layer, p->n_words * sizeof *p->mark);
        p->pcie = calloc((size_t)p->n_layer, p->n_words * sizeof *p->pcie);
        p->layer = calloc((size_t)p->n_layer, sizeof *p->layer);
        p->n_kept = m->info.n_expert_used + 1;
        p->kept = calloc(pi_mul((size_t)p->n_layer, (size_t)p->n_kept), sizeof *p->kept);
    }
    if (!p || !p->mark || !p->pcie || !p->layer || !p->kept) {
        pi_plan_free(p);
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory planning %d layers", m->info.n_layer);
    }
    p->info = (pi_plan_info){.n_layer = p->n_layer,
                             .n_placed = p->n_placed,
                             .sparsity = o->sparsity,
                             .n_ctx = o->n_ctx,
                             .n_pool = o->n_pool,
                             .n_seq = o->n_seq,
                             .n_batch = o->n_batch,
                             .has_counts = o->counts && o->sparsity != PI_SPARSITY_DENSE,
                             .head_device = -1};
    for (int32_t l = 0; l < p->n_layer; l++) p->layer[l].device = -1;
    *out = p;
    return PI_OK;
}

void pi_plan_free(pi_plan *p) {
    if (!p) return;
    free(p->mark);
    free(p->pcie);
    free(p->layer);
    free(p->kept);
    free(p);
}

/* ---- a plan from elsewhere ---- */

/* Marks a layer's ids, which ascend. */
static pi_status restore_ids(pi_plan *p, int32_t l, int32_t n_all, bool pcie, const int32_t *id, int32_t n) {
    int32_t before = -1;
    const char *kind = pcie ? "zero-copy" : "hot";
    if (n < 0 || n > n_all)
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d of the plan has %d %s neurons, the model has %d", l, n, kind,
                       n_all);
    if (n && p->layer[l].device < 0)
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d of the plan lies on the CPU, yet has %d %s neurons", l, n, kind);
    for (int32_t k = 0; k < n; k++) {
        const int32_t j = id[k];
        if (j <= before || j >= n_all)
            return PI_FAIL(PI_ERROR_ARGUMENT, "%s neuron %d of layer %d of the plan is %d, must be %d..%d", kind, k, l,
                           j, before + 1, n_all - 1);
        before = j;
        if (!pcie) {
            pi_set_hot(p, l, j);
            continue;
        }
        if (pi_is_hot(p, l, j))
            return PI_FAIL(PI_ERROR_ARGUMENT, "neuron %d of layer %d of the plan is hot and read by zero-copy", j, l);
        pi_set_pcie(p, l, j);
    }
    return PI_OK;
}

static pi_status restore_layer(pi_plan *p, const pi_cost *cost, const pi_placement *at, int32_t l, int64_t *read_hot,
                               int64_t *read_pcie) {
    const int32_t n_hot = at->n_hot[l], n_pcie = at->n_pcie ? at->n_pcie[l] : 0, block = cost->layer[l].block,
                  n_all = cost->layer[l].n;
    PI_TRY(restore_ids(p, l, n_all, false, at->hot + *read_hot, n_hot));
    *read_hot += n_hot;
    if (n_pcie && (!cost->layer[l].zero_copy || cost->layer[l].used))
        return PI_FAIL(
            PI_ERROR_ARGUMENT,
            "layer %d of the plan has neurons that are read by zero-copy, which the device, or a format of the "
            "feed-forward, does not allow",
            l);
    if (n_pcie) PI_TRY(restore_ids(p, l, n_all, true, at->pcie + *read_pcie, n_pcie));
    *read_pcie += n_pcie;
    for (int32_t j = 0; j < n_all; j++)
        if (pi_is_hot(p, l, j) != pi_is_hot(p, l, j / block * block))
            return PI_FAIL(PI_ERROR_ARGUMENT,
                           "layer %d of the plan splits neurons %d..%d, which the format of ffn_down holds together", l,
                           j / block * block, j / block * block + block - 1);
    return PI_OK;
}

/* The device of item i (the head: n_layer), of which the placement says whether it is on one. */
static pi_status restore_device(const pi_placement *at, const pi_plan_options *o, int32_t i, bool on_device,
                                int32_t *before, int32_t *out) {
    *out = !on_device ? -1 : at->device ? at->device[i] : 0;
    if (!on_device) return PI_OK;
    if (*out < *before || *out >= o->n_devices)
        return PI_FAIL(PI_ERROR_ARGUMENT, "item %d of the plan is on device %d, must be %d..%d", i, *out, *before,
                       o->n_devices - 1);
    *before = *out;
    return PI_OK;
}

static pi_status restore(pi_plan *p, const pi_model *m, const pi_cost *cost, const pi_plan_options *o,
                         const pi_placement *at) {
    int64_t read_hot = 0, read_pcie = 0;
    int32_t before = 0;
    for (int32_t l = 0; l < p->n_layer; l++) {
        PI_TRY(restore_device(at, o, l, at->on_device[l] != 0, &before, &p->layer[l].device));
        PI_TRY(restore_layer(p, cost, at, l, &read_hot, &read_pcie));
    }
    PI_TRY(restore_device(at, o, p->n_layer, at->head_on_device != 0, &before, &p->info.head_device));
    pi_plan_extremes(m, cost, o, &p->info);
    pi_plan_evaluate(p, cost, o);
    for (int32_t d = 0; d < p->n_devices; d++)
        if (p->device[d].total_bytes > p->device[d].budget_bytes)
            return PI_FAIL(PI_ERROR_ARGUMENT, "the plan takes %s (%llu bytes), the budget is %s (%llu bytes)",
                           pi_size(p->device[d].total_bytes).text, (unsigned long long)p->device[d].total_bytes,
                           pi_size(p->device[d].budget_bytes).text, (unsigned long long)p->device[d].budget_bytes);
    return PI_OK;
}

/* placement: NULL to choose one. */
static pi_status plan_new(const pi_model *model, const pi_plan_options *options, const pi_placement *placement,
                          pi_plan **out) {
    pi_plan_options o = options ? *options : pi_plan_defaults();
    PI_TRY(pi_plan_check(model, &o));
    pi_cost cost;
    pi_plan *p = NULL;
    pi_status st = pi_cost_new(model, &o, &cost);
    if (st == PI_OK) st = plan_alloc(model, &o, &p);
    if (st == PI_OK) st = placement ? restore(p, model, &cost, &o, placement) : pi_plan_make(p, model, &cost, &o);
    pi_cost_free(&cost);
    if (st != PI_OK) {
        pi_plan_free(p);
        return st;
    }
    *out = p;
    return PI_OK;
}

pi_status pi_plan_new(const pi_model *model, const pi_plan_options *options, pi_plan **out) {
    if (!model || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_plan_new: model or out is NULL");
    *out = NULL;
    return plan_new(model, options, NULL, out);
}

pi_status pi_plan_restore(const pi_model *model, const pi_plan_options *options, const pi_placement *placement,
                          pi_plan **out) {
    if (!model || !out || !placement || !placement->on_device || !placement->n_hot || !placement->hot ||
        (placement->n_pcie && !placement->pcie))
        return PI_FAIL(PI_ERROR_ARGUMENT, "pi_plan_restore: model, placement or out is NULL");
    *out = NULL;
    return plan_new(model, options, placement, out);
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

static pi_status list_marks(const pi_plan *p, int32_t layer, bool pcie, int32_t *ids) {
    if (!p || !ids) return PI_FAIL(PI_ERROR_ARGUMENT, "a plan's neurons: plan or ids is NULL");
    PI_TRY(check_layer(p, layer));
    int32_t n = 0;
    for (int32_t j = 0; j < p->n_placed; j++)
        if (pcie ? pi_is_pcie(p, layer, j) : pi_is_hot(p, layer, j)) ids[n++] = j;
    return PI_OK;
}

pi_status pi_plan_hot(const pi_plan *p, int32_t layer, int32_t *ids) { return list_marks(p, layer, false, ids); }

pi_status pi_plan_pcie(const pi_plan *p, int32_t layer, int32_t *ids) { return list_marks(p, layer, true, ids); }

pi_status pi_plan_get_device(const pi_plan *p, int32_t device, pi_plan_device *out) {
    if (!p || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_plan_get_device: plan or out is NULL");
    if (device < 0 || device >= p->n_devices)
        return PI_FAIL(PI_ERROR_ARGUMENT, "device %d is out of range 0..%d", device, p->n_devices - 1);
    *out = p->device[device];
    return PI_OK;
}
