/* plan.h - what a budget of device memory holds: sizes, times, and the choice between them.
 *
 * Bytes on the device. A matrix keeps its format: rows as in the file, each rounded up to 16 bytes, the whole to 256; q,
 * k and v are three matrices however the file stores them. Vectors (norms, biases) are floats, rounded up to 256. Of a
 * layer's FFN the rows of its hot neurons (gate, up, down, up's bias) and their ids. A down matrix
 * that stays stored by output (quantised, or of a model that is no ReLU model) gives the columns of its hot neurons,
 * which then are whole blocks of neighbours. K and V as the session's pool has them. token_embd stays in host memory, so
 * an output matrix that is tied to it counts in full.
 *
 * Time of a layer, in us (bytes over rates; vectors are too small to count):
 *     on the CPU     (attention + predictor + K, V at half the context + FFN) / cpu + handover
 *     on the device  layer_us + (attention + predictor + K, V at half the context) / gpu
 *                    + max(ffn_us + hot / gpu, cold / cpu + handover)
 * ffn_us falls away without hot neurons, handover without cold ones. The output matrix: bytes over the rate of its side,
 * with a hand-over on the CPU. If nothing at all lies on the device there are no hand-overs.
 * FFN bytes are expectations: p is how often a neuron is computed.
 *     predicted   p (gate + up + down)       p = min(1, overshoot f)
 *     exact       gate + p (up + down)       p = f; without a gate: up + p down
 *     dense       gate + up + down
 * with f = min(1, (count + 1/2) / (tokens + 1)), or one share for all neurons where there are no counts. Columns of a
 * down stored by output are always read.
 *
 * The plan minimises the sum over layers and head; all of the model is put on the device where it fits and costs at
 * most 0.5 % over the best. Choosing one option for each of them within the budget is a
 * multiple-choice knapsack (choose.c). */
#ifndef PI_PLAN_H
#define PI_PLAN_H

#include "../model.h"

enum { PI_DEVICE_ROW = 16, PI_DEVICE_ALIGN = 256 };

/* ---- choose.c ---- */

typedef struct pi_option {
    uint64_t bytes;
    double us;
} pi_option;

/* The options of one item by ascending bytes; the first takes none. */
typedef struct pi_item {
    const pi_option *option;
    int32_t n;
} pi_item;

/* For each item the index of an option, so that the bytes fit and the sum of us is least, or nearly: *bound is proven to
 * be no more than the least possible. Deterministic. Errors: MEMORY. */
pi_status pi_choose(const pi_item *item, int32_t n_items, uint64_t budget, int32_t *chosen, double *bound);

/* ---- cost.c ---- */

/* Sizes of one layer. */
typedef struct pi_layer_cost {
    uint64_t kv_bytes, attention_bytes, norm_bytes, predictor_bytes; /* on the device */
    double fixed_read;                                               /* bytes per token, FFN apart */
    double always_read, active_read; /* bytes of one neuron: for every token, for one that computes it */
    size_t gate_stride, up_stride, down_stride;
    int32_t column_rows; /* down stored by output: its rows (n_embd), else 0 */
    int32_t block;       /* neurons that must stay together */
    bool up_bias;
} pi_layer_cost;

typedef struct pi_cost {
    int32_t n_ff;
    pi_layer_cost *layer; /* [n_layer] */
    uint64_t head_bytes, head_norm_bytes;
    double head_read;
    uint64_t scratch_bytes; /* of decode and of prompts */
    uint64_t staging_bytes; /* only needed while a part of the weights is not on the device */
} pi_cost;

/* o: checked, with no zeros that stand for defaults. Errors: MEMORY. */
pi_status pi_cost_new(const pi_model *m, const pi_plan_options *o, pi_cost *out);
void pi_cost_free(pi_cost *c);
uint64_t pi_cost_scratch(const pi_model *m, const pi_plan_options *o);
uint64_t pi_cost_fixed(const pi_layer_cost *c);                   /* bytes of a layer on the device without neurons */
uint64_t pi_cost_ffn(const pi_cost *c, int32_t l, int32_t n_hot); /* bytes of its hot neurons */
/* How often a neuron is computed per token: (count + 1/2) * scale, or the same for all. */
typedef struct pi_activity {
    const uint32_t *count; /* [n_ff] of a layer, or NULL */
    double scale, same;
} pi_activity;
pi_activity pi_cost_activity(const pi_plan_options *o, int32_t l, int32_t n_ff);
static inline double pi_active(const pi_activity *a, int32_t j) {
    if (!a->count) return a->same;
    const double p = ((double)a->count[j] + 0.5) * a->scale;
    return p < 1 ? p : 1;
}
/* Time of a layer by its parts. */
typedef struct pi_layer_time {
    double fixed_us, gpu_ffn_us, cpu_ffn_us, handover_us;
} pi_layer_time;
pi_layer_time pi_cost_time(const pi_cost *c, const pi_plan_options *o, int32_t l, bool on_device, int32_t n_hot,
                           double active_hot, double active_cold);
static inline double pi_layer_us(pi_layer_time t) {
    const double cold = t.cpu_ffn_us + t.handover_us;
    return t.fixed_us + (t.gpu_ffn_us > cold ? t.gpu_ffn_us : cold);
}

/* ---- options.c ---- */

/* Checks o and puts numbers where zeros stand for defaults. Errors: ARGUMENT. */
pi_status pi_plan_check(const pi_model *m, pi_plan_options *o);

/* ---- order.c ---- */

/* Blocks of `block` neurons by falling sum of counts (ties by id). key, spare [n], order, other [n]: room to work. */
void pi_order(const uint32_t *count, int32_t n_ff, int32_t block, uint64_t *key, uint64_t *spare, int32_t *order,
              int32_t *other);

/* ---- plans ---- */

struct pi_plan {
    int32_t n_layer, n_ff;
    size_t n_words;       /* of a layer's marks */
    uint64_t *mark;       /* [n_layer][n_words] one bit per neuron: hot */
    pi_plan_layer *layer; /* [n_layer] */
    pi_plan_info info;
};

static inline bool pi_is_hot(const pi_plan *p, int32_t l, int32_t j) {
    return p->mark[(size_t)l * p->n_words + (size_t)j / 64] >> (j % 64) & 1;
}
static inline void pi_set_hot(pi_plan *p, int32_t l, int32_t j) {
    p->mark[(size_t)l * p->n_words + (size_t)j / 64] |= (uint64_t)1 << (j % 64);
}

/* evaluate.c: from the marks, each layer's on_device and head_on_device, all else that is to be said. */
void pi_plan_evaluate(pi_plan *p, const pi_cost *cost, const pi_plan_options *o);
/* Sets the least and the most that a plan of this model takes on a device. */
void pi_plan_extremes(const pi_model *m, const pi_cost *cost, const pi_plan_options *o, pi_plan_info *i);
double pi_head_us(const pi_cost *cost, const pi_plan_options *o, bool on_device, bool uses_device);
typedef struct pi_size_text {
    char text[32];
} pi_size_text;
pi_size_text pi_size(uint64_t n_bytes); /* for messages */

/* make.c: the best placement within the budget. Errors: ARGUMENT (a budget that holds nothing), MEMORY. */
pi_status pi_plan_make(pi_plan *p, const pi_model *m, const pi_cost *cost, const pi_plan_options *o);

#endif
