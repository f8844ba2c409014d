/* evaluate.c - what a placement takes and how fast it is. */
#include <stdio.h>

#include "plan.h"

pi_size_text pi_size(uint64_t n) {
    pi_size_text t;
    if (n >= 1U << 30)
        snprintf(t.text, sizeof t.text, "%.2f GiB", (double)n / (1 << 30));
    else
        snprintf(t.text, sizeof t.text, "%.1f MiB", (double)n / (1 << 20));
    return t;
}

/* From the device and the marks, all else that is to be said of a layer; before: the device of the layer before it. */
static void evaluate_layer(pi_plan *p, const pi_cost *cost, const pi_plan_options *o, int32_t l, int32_t before) {
    const pi_layer_cost *c = &cost->layer[l];
    pi_plan_layer *out = &p->layer[l];
    const pi_activity activity = pi_cost_activity(cost, o, l);
    double active[3] = {0, 0, 0};
    int32_t n[3] = {0, 0, 0};
    for (int32_t j = 0; j < c->n; j++) {
        const int32_t kind = pi_is_hot(p, l, j) ? 0 : pi_is_pcie(p, l, j) ? 1 : 2;
        active[kind] += pi_active(&activity, j);
        n[kind]++;
    }
    pi_share share = {n[0], n[1], n[2], active[0], active[1], active[2]};
    out->on_device = out->device >= 0;
    if (c->used && out->on_device) {
        const double part = pi_cost_zero_copy(cost, o, l, &share);
        share.n_pcie = part * n[2];
        share.active_pcie = active[1] = part * active[2];
        share.n_cold = part < 1 ? n[2] - share.n_pcie : 0;
        share.active_cold = active[2] -= active[1];
        for (int32_t m = 0; part > 0 && m < p->n_kept; m++)
            p->kept[(ptrdiff_t)l * p->n_kept + m] = pi_cost_kept(cost, o, l, m);
    }
    pi_layer_time t = pi_cost_time(cost, o, l, out->on_device, &share);
    if (!p->info.uses_device) t.handover_us = 0;
    if (out->device >= 0 && before >= 0 && before != out->device) t.fixed_us += o->handover_us;
    out->n_hot = n[0];
    out->n_pcie = n[1];
    out->active_hot = active[0];
    out->active_pcie = active[1];
    out->active_cold = active[2];
    if (out->on_device) {
        out->predictor_on_device = c->predictor_bytes > 0;
        out->kv_bytes = c->kv_bytes;
        out->attention_bytes = c->attention_bytes;
        out->norm_bytes = c->norm_bytes;
        out->predictor_bytes = c->predictor_bytes;
        out->ffn_bytes = pi_cost_ffn(cost, l, out->n_hot);
    }
    out->fixed_us = t.fixed_us;
    out->gpu_ffn_us = t.gpu_ffn_us;
    out->cpu_ffn_us = t.cpu_ffn_us;
    out->handover_us = t.handover_us;
    out->us = pi_layer_us(t);
}

static void add_layer(pi_plan_info *i, const pi_cost *cost, const pi_plan_layer *y, int32_t l) {
    const pi_layer_cost *c = &cost->layer[l];
    const int32_t n_cold = c->n - y->n_hot;
    const double neuron = (double)c->gate_stride + (double)c->up_stride +
                          (double)c->down_stride * (c->column_rows ? (double)c->column_rows / c->n : 1);
    i->n_layer_device += y->on_device;
    i->n_layer_resident += y->on_device && !n_cold;
    i->n_hot += y->n_hot;
    i->n_pcie += y->n_pcie;
    i->kv_bytes += y->kv_bytes;
    i->attention_bytes += y->attention_bytes;
    i->norm_bytes += y->norm_bytes;
    i->predictor_bytes += y->predictor_bytes;
    i->ffn_bytes += y->ffn_bytes;
    i->gpu_us += y->gpu_ffn_us + (y->on_device ? y->fixed_us : 0);
    i->cpu_us += y->cpu_ffn_us + (y->on_device ? 0 : y->fixed_us);
    i->handover_us += y->handover_us;
    i->total_us += y->us;
    i->active_hot += y->active_hot;
    i->active_pcie += y->active_pcie;
    i->active_cold += y->active_cold;
    i->stream_bytes += neuron * n_cold + (y->on_device ? 0 : (double)c->attention_bytes);
}

/* The first layer's device helps the last one's with the head, if it has room: after all else is placed. */
static void find_helper(pi_plan *p, const pi_cost *cost) {
    const int32_t first = p->layer[0].device, last = p->layer[p->n_layer - 1].device;
    p->helper = -1;
    p->helper_rows = 0;
    if (!cost->helper_rows || first < 0 || last < 0 || first == last || p->info.head_device != last) return;
    pi_plan_device *d = &p->device[first];
    if (d->total_bytes > d->budget_bytes || d->budget_bytes - d->total_bytes < cost->helper_bytes) return;
    p->helper = first;
    p->helper_rows = cost->helper_rows;
    d->total_bytes += cost->helper_bytes;
    p->info.head_bytes += cost->helper_bytes;
    p->info.total_bytes += cost->helper_bytes;
}

/* What lies on each device, and its sums in all. */
static void evaluate_devices(pi_plan *p, const pi_cost *cost, const pi_plan_options *o) {
    pi_plan_info *i = &p->info;
    for (int32_t k = 0; k < p->n_devices; k++) {
        pi_plan_device *d = &p->device[k];
        bool used = i->head_device == k, cold = false;
        uint64_t held = used ? cost->head_bytes + cost->head_norm_bytes : 0;
        *d = (pi_plan_device){.budget_bytes = pi_budget(o, k)};
        for (int32_t l = 0; l < p->n_layer; l++) {
            const pi_plan_layer *y = &p->layer[l];
            if (y->device != k) continue;
            if (!d->n_layers++) d->first_layer = l;
            used = true;
            cold |= y->n_hot < cost->layer[l].n;
            held += y->kv_bytes + y->attention_bytes + y->norm_bytes + y->predictor_bytes + y->ffn_bytes;
        }
        if (used) {
            d->scratch_bytes = cost->scratch_bytes;
            d->staging_bytes = cold ? cost->staging_bytes : 0;
            d->overhead_bytes = o->overhead_bytes;
        }
        d->total_bytes = held + d->scratch_bytes + d->staging_bytes + d->overhead_bytes;
        i->scratch_bytes += d->scratch_bytes;
        i->staging_bytes += d->staging_bytes;
        i->overhead_bytes += d->overhead_bytes;
        i->total_bytes += d->total_bytes;
        i->budget_bytes += d->budget_bytes;
    }
}

void pi_plan_evaluate(pi_plan *p, const pi_cost *cost, const pi_plan_options *o) {
    pi_plan_info *i = &p->info;
    i->head_on_device = i->head_device >= 0;
    i->n_devices = p->n_devices = o->n_devices;
    i->uses_device = i->head_on_device;
    for (int32_t l = 0; l < p->n_layer; l++) i->uses_device |= p->layer[l].device >= 0;
    for (int32_t l = 0; l < p->n_layer; l++) {
        evaluate_layer(p, cost, o, l, l ? p->layer[l - 1].device : -1);
        add_layer(i, cost, &p->layer[l], l);
    }
    const int32_t last = p->layer[p->n_layer - 1].device;
    i->head_us = pi_head_us(cost, o, i->head_on_device, i->uses_device);
    if (i->head_on_device && last >= 0 && last != i->head_device) i->head_us += o->handover_us;
    i->total_us += i->head_us;
    *(i->head_on_device ? &i->gpu_us : &i->cpu_us) += i->head_us;
    if (i->head_on_device) {
        i->head_bytes = cost->head_bytes;
        i->norm_bytes += cost->head_norm_bytes;
    } else if (i->uses_device) {
        i->handover_us += o->handover_us;
        i->cpu_us -= o->handover_us;
    }
    evaluate_devices(p, cost, o);
    find_helper(p, cost);
    if (i->uses_device) i->prompt_us = i->stream_bytes / (o->pcie_bytes_per_s * 1e-6);
    i->tokens_per_s = 1e6 / i->total_us;
}

void pi_plan_extremes(const pi_model *m, const pi_cost *cost, const pi_plan_options *o, pi_plan_info *i) {
    uint64_t smallest = cost->head_bytes + cost->head_norm_bytes, all = smallest;
    for (int32_t l = 0; l < m->info.n_layer; l++) {
        const uint64_t fixed = pi_cost_fixed(&cost->layer[l]), least = fixed + pi_cost_ffn(cost, l, 0);
        if (least < smallest) smallest = least;
        all += fixed + pi_cost_ffn(cost, l, cost->layer[l].n);
    }
    i->full_bytes = o->overhead_bytes + cost->scratch_bytes + all;
    i->min_bytes = o->overhead_bytes + cost->scratch_bytes + cost->staging_bytes + smallest;
    if (i->full_bytes < i->min_bytes) i->min_bytes = i->full_bytes;
}
