/* plan.h - what a budget of device memory holds: sizes, times, and the choice between them.
 *
 * Bytes on the device:
 *     a matrix       keeps its format: rows as in the file, each rounded up to 16 bytes, the whole to 256; q, k and v are
 *                    three matrices however the file stores them
 *     a vector       (norms, biases) is floats, rounded up to 256
 *     a layer's FFN  the rows of its hot neurons (gate, up, down), and lists as long as if all neurons were in them: ids,
 *                    ids of blocks, up's bias, counters if neurons are counted. A down matrix that stays stored by output
 *                    (quantised, or of a model that is no ReLU model) gives the columns of its hot neurons, which then
 *                    are whole blocks of neighbours
 *     K and V        as the session's pool has them, and with them what recurrent layers remember of all sequences, with
 *                    checkpoints and places for guesses, and read and write for each token
 *     a predictor    its last matrix lies there in two parts
 *     the head       token_embd stays in host memory, so an output matrix that is tied to it counts in full
 *     a device       that is used has work space (scratch_bytes in cost.c: the session's buffers, what kernels need
 *                    between them for n_batch tokens, and the driver's tables of the pages of the file and of what
 *                    loading moves), the driver's own memory (overhead_bytes), and, where it has a layer with cold
 *                    neurons, the buffers through which those of a prompt stream
 *
 * Time of a layer, in us (bytes over rates; vectors are too small to count):
 *     on the CPU     (attention + predictor + K, V at half the context + FFN) / cpu + handover
 *     on the device  layer_us + (attention + predictor + K, V at half the context) / gpu
 *                    + max(ffn_us + hot / gpu, ffn_us + pcie / zero_copy, cold / cpu + handover)
 * ffn_us falls away without such neurons, handover without cold ones. pcie: the hottest of the neurons that are not hot, as
 * many as make them as long as the cold ones or these as short as the hot ones, at most all of them; none where zero_copy
 * is 0, down is stored by output, devices do not compute the format, or an adapter changes the feed-forward.
 * Where attention and FFN read the same input (Falcon) the sides part before attention: attention, K and V then stand in
 * max, in front of what the device reads.
 * Blocks at the beginning of a layer that no device computes, such as heads of more than 256 values, are not among this:
 * their matrices, K and V are read by the CPU on either side, and on the device cost a hand-over more.
 * From one device to another it takes a hand-over. The output matrix: bytes over the rate of its side, with a hand-over on
 * the CPU. If nothing at all lies on the device there are no hand-overs.
 * Where the first layer's device is not the last layer's, it has nothing to do while that computes the head: it has a copy of
 * some of the head's rows then, if that fits and saves more than a hand-over, and computes these where one token is all. The
 * sums above do not count it.
 * FFN bytes are expectations: p is how often a neuron is computed.
 *     predicted   p (gate + up + down)       p = min(1, overshoot f)
 *     exact       gate + p (up + down)       p = f; without a gate: up + p down
 *     dense       gate + up + down
 * with f = min(1, (count + 1/2) / (tokens + 1)), or one share for all neurons where there are no counts. Columns of a
 * down stored by output are always read.
 *
 * Of a mixture of experts, an expert is one neuron in all of this: its bytes are those of its three matrices (biases of
 * all experts are a layer's vectors), p is how often it is chosen, in every mode: count / tokens; without counts what a
 * router gives whose scores are those of noise plus half as much that is always the same, for some expert or other: which
 * ones, the session finds out. Which experts are read by zero-copy is said for no expert: of m of a token's that are not on
 * the device it reads as many as make that soonest done (pi_cost_kept), if that is some of as many as are expected. A layer
 * without experts beside others has nothing to choose: its feed-forward counts as attention does.
 *
 * The plan minimises the sum over layers and head; all of the model is put on the device where it fits and costs at
 * most a quarter over the best that is estimated. Choosing one option for each of them within the budget is a
 * multiple-choice knapsack (choose.c). Several devices take ranges of neighbouring layers, the last of them the head: the
 * borders start where the plan of one device with all the memory would put them, and move while that gains (make.c). */
#ifndef PI_PLAN_H
#define PI_PLAN_H

#include "../device/space.h"
#include "../model/model.h"

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
 * be no more than the least possible. thorough: not only to one step of what is best by bytes. Deterministic. Errors:
 * MEMORY. */
pi_status pi_choose(const pi_item *item, int32_t n_items, uint64_t budget, bool thorough, int32_t *chosen,
                    double *bound);

/* ---- cost.c ---- */

/* Sizes of one layer. */
typedef struct pi_layer_cost {
    int32_t n; /* neurons; of a mixture, experts: below, a neuron is then an expert. 0: its layers without experts */
    uint64_t kv_bytes, attention_bytes, norm_bytes, predictor_bytes; /* on the device */
    uint64_t list_bytes;                                             /* ids and biases of all neurons */
    double fixed_read;                                               /* bytes per token, FFN apart */
    double host_read;   /* bytes per token that the CPU reads in any case: blocks that no device computes */
    double beside_read; /* of these, what a device reads beside its FFN */
    double always_read, active_read; /* bytes of one neuron: for every token, for one that computes it */
    double silent_read;              /* of active_read: rows of an expert's silent neurons, which the CPU leaves out */
    size_t gate_stride, up_stride, down_stride;
    int32_t column_rows; /* down stored by output: its rows (n_embd), else 0 */
    int32_t block;       /* neurons that must stay together */
    bool zero_copy;      /* the device can read cold neurons where they lie */
    double *used;        /* [n] of a mixture: how often each expert is taken to be used, where there are no counts */
    int32_t n_used;      /* of a mixture: experts that a token uses */
} pi_layer_cost;

typedef struct pi_cost {
    int32_t n_layer, n_placed; /* n_placed: the most n of a layer */
    pi_layer_cost *layer;      /* [n_layer] */
    uint64_t head_bytes, head_norm_bytes;
    double head_read;
    int32_t helper_rows;    /* of the head, of which another device has a copy if it helps; 0: none helps */
    uint64_t helper_bytes;  /* of that copy, and of what else it needs */
    uint64_t scratch_bytes; /* of decode and of prompts */
    uint64_t staging_bytes; /* only needed while a part of the weights is not on the device */
} pi_cost;

/* o: checked, with no zeros that stand for defaults. Errors: MEMORY. */
pi_status pi_cost_new(const pi_model *m, const pi_plan_options *o, pi_cost *out);
void pi_cost_free(pi_cost *c);
uint64_t pi_cost_fixed(const pi_layer_cost *c);                   /* bytes of a layer on the device without neurons */
uint64_t pi_cost_ffn(const pi_cost *c, int32_t l, int32_t n_hot); /* bytes of its hot neurons, and lists */
/* How often a neuron is computed per token: (count + 1/2) * scale, or the same for all. */
typedef struct pi_activity {
    const uint32_t *count; /* of a layer's neurons, or NULL */
    const double *used;    /* instead, or NULL */
    double scale, same;
} pi_activity;
pi_activity pi_cost_activity(const pi_cost *c, const pi_plan_options *o, int32_t l);
static inline double pi_active(const pi_activity *a, int32_t j) {
    if (a->used) return a->used[j];
    if (!a->count) return a->same;
    const double p = ((double)a->count[j] + 0.5) * a->scale;
    return p < 1 ? p : 1;
}
/* A layer's neurons by where they are computed; active: computed per token. */
typedef struct pi_share {
    double n_hot, n_pcie, n_cold;
    double active_hot, active_pcie, active_cold;
} pi_share;
/* Time of a layer by its parts. */
typedef struct pi_layer_time {
    double fixed_us, gpu_ffn_us, cpu_ffn_us, handover_us;
} pi_layer_time;
pi_layer_time pi_cost_time(const pi_cost *c, const pi_plan_options *o, int32_t l, bool on_device, const pi_share *n);
/* Of a mixture: how many of the m experts that a token wants and the device has not it best reads by zero-copy. */
int32_t pi_cost_kept(const pi_cost *c, const pi_plan_options *o, int32_t l, int32_t m);
/* Which part of the bytes of the cold neurons, 0 to 1, the device best reads by zero-copy; n_pcie and active_pcie are 0. */
double pi_cost_zero_copy(const pi_cost *c, const pi_plan_options *o, int32_t l, const pi_share *n);
/* Time of the head, with the way of x to the CPU if that has it and a device is used. */
double pi_head_us(const pi_cost *cost, const pi_plan_options *o, bool on_device, bool uses_device);
static inline double pi_ffn_read(const pi_layer_cost *c, double n, double active) {
    return n * c->always_read + active * c->active_read;
}
static inline double pi_layer_us(pi_layer_time t) {
    const double cold = t.cpu_ffn_us + t.handover_us;
    return t.fixed_us + (t.gpu_ffn_us > cold ? t.gpu_ffn_us : cold);
}

/* ---- options.c ---- */

/* Checks o and puts numbers where zeros stand for defaults. Errors: ARGUMENT, UNSUPPORTED (a model that no device
 * computes). */
pi_status pi_plan_check(const pi_model *m, pi_plan_options *o);

/* ---- order.c ---- */

/* Blocks of `block` neurons by falling sum of counts (ties by id). key, spare [n], order, other [n]: room to work. */
void pi_order(const uint32_t *count, int32_t n_ff, int32_t block, uint64_t *key, uint64_t *spare, int32_t *order,
              int32_t *other);

/* ---- plans ---- */

struct pi_plan {
    int32_t n_layer, n_placed; /* the most neurons, or experts, of a layer */
    size_t n_words;            /* of a layer's marks */
    uint64_t *mark;            /* [n_layer][n_words] one bit per neuron: hot */
    uint64_t *pcie;            /* the same: read by zero-copy by the device */
    int32_t n_kept, *kept;     /* [n_layer][n_kept] pi_cost_kept of 0, 1 ... experts */
    pi_plan_layer *layer;      /* [n_layer] */
    int32_t n_devices;
    int32_t helper, helper_rows; /* the device that helps with a token's head, or -1, and which rows: the first ones */
    pi_plan_device device[PI_PLAN_DEVICES];
    pi_plan_info info;
};

static inline bool pi_is_hot(const pi_plan *p, int32_t l, int32_t j) {
    return p->mark[(size_t)l * p->n_words + (size_t)j / 64] >> (j % 64) & 1;
}
static inline void pi_set_hot(pi_plan *p, int32_t l, int32_t j) {
    p->mark[(size_t)l * p->n_words + (size_t)j / 64] |= (uint64_t)1 << (j % 64);
}
/* A cold neuron whose rows the device reads where they lie; the CPU computes the other cold ones. */
static inline bool pi_is_pcie(const pi_plan *p, int32_t l, int32_t j) {
    return p->pcie[(size_t)l * p->n_words + (size_t)j / 64] >> (j % 64) & 1;
}
static inline void pi_set_pcie(pi_plan *p, int32_t l, int32_t j) {
    p->pcie[(size_t)l * p->n_words + (size_t)j / 64] |= (uint64_t)1 << (j % 64);
}

/* evaluate.c: from the marks, each layer's and the head's device, all else that is to be said. */
void pi_plan_evaluate(pi_plan *p, const pi_cost *cost, const pi_plan_options *o);
/* Sets the least and the most that a plan of this model takes on a device. */
void pi_plan_extremes(const pi_model *m, const pi_cost *cost, const pi_plan_options *o, pi_plan_info *i);
typedef struct pi_size_text {
    char text[32];
} pi_size_text;
pi_size_text pi_size(uint64_t n_bytes); /* for messages */

/* A device's budget. */
static inline uint64_t pi_budget(const pi_plan_options *o, int32_t device) {
    return o->budgets ? o->budgets[device] : o->budget_bytes;
}

/* make.c: the best placement within the budget. Errors: ARGUMENT (a budget that holds nothing), MEMORY. */
pi_status pi_plan_make(pi_plan *p, const pi_model *m, const pi_cost *cost, const pi_plan_options *o);

#endif
