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

/* From on_device and the marks, all else that is to be said of a layer. */
static void evaluate_layer(pi_plan *p, const pi_cost *cost, const pi_plan_options *o, int32_t l) {
    const pi_layer_cost *c = &cost->layer[l];
    pi_plan_layer *out = &p->layer[l];
    const pi_activity activity = pi_cost_activity(o, l, p->n_ff);
    double active[2] = {0, 0};
    for (int32_t j = 0; j < p->n_ff; j++) {
        const bool hot = pi_is_hot(p, l, j);
        active[hot] += pi_active(&activity, j);
        out->n_hot += hot;
    }
    pi_layer_time t = pi_cost_time(cost, o, l, out->on_device, out->n_hot, active[1], active[0]);
    if (!p->info.uses_device) t.handover_us = 0;
    out->active_hot = active[1];
    out->active_cold = active[0];
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

double pi_head_us(const pi_cost *cost, const pi_plan_options *o, bool on_device, bool uses_device) {
    const double rate = on_device ? o->gpu_bytes_per_s : o->cpu_bytes_per_s;
    return cost->head_read / (rate * 1e-6) + (uses_device && !on_device ? o->handover_us : 0);
}

static void add_layer(pi_plan_info *i, const pi_cost *cost, const pi_plan_layer *y, int32_t l, int32_t n_ff) {
    const pi_layer_cost *c = &cost->layer[l];
    const int32_t n_cold = n_ff - y->n_hot;
    const double neuron = (double)c->gate_stride + (double)c->up_stride +
                          (double)c->down_stride * (c->column_rows ? (double)c->column_rows / n_ff : 1);
    i->n_layer_device += y->on_device;
    i->n_layer_resident += y->on_device && !n_cold;
    i->n_hot += y->n_hot;
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
    i->active_cold += y->active_cold;
    i->stream_bytes += neuron * n_cold + (y->on_device ? 0 : (double)c->attention_bytes);
}

void pi_plan_evaluate(pi_plan *p, const pi_cost *cost, const pi_plan_options *o) {
    pi_plan_info *i = &p->info;
    i->uses_device = i->head_on_device;
    for (int32_t l = 0; l < p->n_layer; l++) i->uses_device |= p->layer[l].on_device;
    for (int32_t l = 0; l < p->n_layer; l++) {
        evaluate_layer(p, cost, o, l);
        add_layer(i, cost, &p->layer[l], l, p->n_ff);
    }
    i->head_us = pi_head_us(cost, o, i->head_on_device, i->uses_device);
    i->total_us += i->head_us;
    *(i->head_on_device ? &i->gpu_us : &i->cpu_us) += i->head_us;
    if (i->head_on_device) {
        i->head_bytes = cost->head_bytes;
        i->norm_bytes += cost->head_norm_bytes;
    } else if (i->uses_device) {
        i->handover_us += o->handover_us;
        i->cpu_us -= o->handover_us;
    }
    if (i->uses_device) {
        const bool all = i->head_on_device && i->n_layer_resident == p->n_layer;
        i->scratch_bytes = cost->scratch_bytes;
        i->staging_bytes = all ? 0 : cost->staging_bytes;
        i->overhead_bytes = o->overhead_bytes;
        i->prompt_us = i->stream_bytes / (o->pcie_bytes_per_s * 1e-6);
    }
    i->total_bytes = i->kv_bytes + i->attention_bytes + i->norm_bytes + i->predictor_bytes + i->ffn_bytes +
                     i->head_bytes + i->scratch_bytes + i->staging_bytes + i->overhead_bytes;
    i->tokens_per_s = 1e6 / i->total_us;
}

void pi_plan_extremes(const pi_model *m, const pi_cost *cost, const pi_plan_options *o, pi_plan_info *i) {
    uint64_t smallest = cost->head_bytes + cost->head_norm_bytes, all = smallest;
    for (int32_t l = 0; l < m->info.n_layer; l++) {
        const uint64_t fixed = pi_cost_fixed(&cost->layer[l]);
        if (fixed < smallest) smallest = fixed;
        all += fixed + pi_cost_ffn(cost, l, m->info.n_ff);
    }
    i->full_bytes = o->overhead_bytes + cost->scratch_bytes + all;
    i->min_bytes = o->overhead_bytes + cost->scratch_bytes + cost->staging_bytes + smallest;
    if (i->full_bytes < i->min_bytes) i->min_bytes = i->full_bytes;
}
