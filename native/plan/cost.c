/* cost.c - sizes and times of a model's parts on either side; plan.h has the rules. */
#include <stdlib.h>

#include "../../vendor/core/te_types.h"
#include "../kv.h"
#include "plan.h"

/* Two buffers through which a prompt's cold weights stream, each at most this large: 1.2 ms of PCIe 5 is more than a
 * transfer takes to start. Shorter chunks of tokens are computed where the weights lie. */
static const uint64_t stage_bytes = 64U << 20;
enum { N_STAGES = 2, MIN_STREAM_TOKENS = 32 };

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

static uint64_t mat_bytes(size_t stride, int64_t n_rows) {
    return round_up(round_up(stride, PI_DEVICE_ROW) * (uint64_t)n_rows, PI_DEVICE_ALIGN);
}

static uint64_t vec_bytes(const float *v, int32_t n) {
    return v ? round_up(sizeof(float) * (uint64_t)n, PI_DEVICE_ALIGN) : 0;
}

static double read_bytes(te_mat m) { return (double)pi_mat_bytes(&m); }

/* Bytes of K or V of one head at one position. */
static size_t kv_row(const pi_model *m, int32_t type) { return te_row_bytes(type, m->info.n_embd_head); }

static uint64_t pool_bytes(const pi_model *m, const pi_plan_options *o, int32_t type) {
    const uint64_t positions = round_up((uint64_t)o->n_pool, PI_KV_BLOCK);
    return round_up(positions * (uint64_t)m->info.n_head_kv * kv_row(m, type), PI_DEVICE_ALIGN);
}

static void attention_cost(const pi_model *m, const pi_plan_options *o, const pi_layer *w, pi_layer_cost *c) {
    const pi_model_info *i = &m->info;
    const int32_t n_q = i->n_head * i->n_embd_head, n_kv = i->n_head_kv * i->n_embd_head;
    c->kv_bytes = pool_bytes(m, o, o->type_k) + pool_bytes(m, o, o->type_v);
    c->attention_bytes = mat_bytes(pi_row_bytes(&w->q), n_q) + mat_bytes(pi_row_bytes(&w->k), n_kv) +
                         mat_bytes(pi_row_bytes(&w->v), n_kv) + mat_bytes(pi_row_bytes(&w->o), i->n_embd) +
                         vec_bytes(w->q_b, n_q) + vec_bytes(w->k_b, n_kv) + vec_bytes(w->v_b, n_kv) +
                         vec_bytes(w->o_b, i->n_embd);
    c->norm_bytes = vec_bytes(w->attn_norm, i->n_embd) + vec_bytes(w->attn_norm_b, i->n_embd) +
                    vec_bytes(w->attn_norm2, i->n_embd) + vec_bytes(w->attn_norm2_b, i->n_embd) +
                    vec_bytes(w->q_norm, i->n_embd_head) + vec_bytes(w->k_norm, i->n_embd_head) +
                    vec_bytes(w->ffn_norm, i->n_embd) + vec_bytes(w->ffn_norm_b, i->n_embd) +
                    vec_bytes(w->down_b, i->n_embd);
    const double position = (double)i->n_head_kv * ((double)kv_row(m, o->type_k) + (double)kv_row(m, o->type_v));
    c->fixed_read =
        read_bytes(w->q) + read_bytes(w->k) + read_bytes(w->v) + read_bytes(w->o) + o->n_ctx / 2.0 * position;
}

static void predictor_cost(const pi_model *m, const pi_plan_options *o, const pi_layer *w, pi_layer_cost *c) {
    if (o->sparsity != PI_SPARSITY_PREDICTED) return;
    if (m->info.predictor == PI_PREDICTOR_SIGN) {
        c->predictor_bytes = mat_bytes(sizeof(uint64_t) * (size_t)m->sign_words, m->info.n_ff);
        c->fixed_read += (double)pi_sign_bytes(m);
    } else {
        c->predictor_bytes =
            mat_bytes(pi_row_bytes(&w->fc1), w->fc1.n_rows) + mat_bytes(pi_row_bytes(&w->fc2), w->fc2.n_rows);
        c->fixed_read += read_bytes(w->fc1) + read_bytes(w->fc2);
    }
}

static void ffn_cost(const pi_model *m, const pi_plan_options *o, const pi_layer *w, pi_layer_cost *c) {
    const pi_model_info *i = &m->info;
    c->block = 1;
    c->up_bias = w->up_b != NULL;
    c->gate_stride = pi_row_bytes(&w->gate);
    c->up_stride = pi_row_bytes(&w->up);
    double row = 0, column = 0; /* of down, per neuron */
    if (w->down_t.w) {
        c->down_stride = pi_row_bytes(&w->down_t);
        row = (double)c->down_stride;
    } else {
        const te_type_info *type = te_type_get(w->down.type);
        if (type->block_weights == 1 && pi_is_relu(i->activation)) { /* loading transposes it */
            c->down_stride = (size_t)type->block_bytes * (size_t)i->n_embd;
            row = (double)c->down_stride;
        } else {
            c->down_stride = pi_row_bytes(&w->down);
            c->column_rows = i->n_embd;
            c->block = type->block_weights;
            column = (double)c->down_stride * i->n_embd / i->n_ff;
        }
    }
    const double gate = (double)c->gate_stride, up = (double)c->up_stride;
    switch (o->sparsity) {
    case PI_SPARSITY_PREDICTED:
        c->always_read = column;
        c->active_read = gate + up + row;
        break;
    case PI_SPARSITY_EXACT:
        c->always_read = column + (w->gate.w ? gate : up);
        c->active_read = (w->gate.w ? up : 0) + row;
        break;
    default:
        c->always_read = column + gate + up + row;
    }
}

uint64_t pi_cost_scratch(const pi_model *m, const pi_plan_options *o) {
    const pi_model_info *i = &m->info;
    const uint64_t n_tok = (uint64_t)(o->n_batch > o->n_seq ? o->n_batch : o->n_seq), n_seq = (uint64_t)o->n_seq,
                   n_embd = (uint64_t)i->n_embd, n_ff = (uint64_t)i->n_ff,
                   n_q = (uint64_t)i->n_head * (uint64_t)i->n_embd_head,
                   n_kv = (uint64_t)i->n_head_kv * (uint64_t)i->n_embd_head,
                   n_blocks = round_up((uint64_t)o->n_ctx, PI_KV_BLOCK) / PI_KV_BLOCK;
    const bool predicted = o->sparsity == PI_SPARSITY_PREDICTED;
    const uint64_t words[] = {
        n_tok * n_embd * (m->arch->parallel ? 4 : 3), /* x, its norms, the sum that comes from the host */
        n_tok * (2 * n_q + 2 * n_kv),                 /* q, attention's output; k, v */
        n_tok * n_ff * (i->is_gated ? 2 : 1),         /* gate, up */
        predicted ? n_tok * (n_ff + (uint64_t)m->max_rank + 2 * (uint64_t)m->sign_words) : 0, /* scores */
        n_tok * ((uint64_t)m->rope.n_rot + 3),             /* angles; token, position, sequence */
        n_seq * ((uint64_t)i->n_vocab + n_embd + n_blocks) /* logits, hidden state; block table */
    };
    uint64_t n = 0;
    for (size_t k = 0; k < sizeof words / sizeof *words; k++) n += round_up(4 * words[k], PI_DEVICE_ALIGN);
    return n;
}

pi_status pi_cost_new(const pi_model *m, const pi_plan_options *o, pi_cost *out) {
    const pi_model_info *i = &m->info;
    *out = (pi_cost){.n_ff = i->n_ff};
    out->layer = calloc((size_t)i->n_layer, sizeof *out->layer);
    if (!out->layer) return PI_FAIL(PI_ERROR_MEMORY, "out of memory planning %d layers", i->n_layer);
    uint64_t largest = 0;
    for (int32_t l = 0; l < i->n_layer; l++) {
        pi_layer_cost *c = &out->layer[l];
        attention_cost(m, o, &m->layer[l], c);
        predictor_cost(m, o, &m->layer[l], c);
        ffn_cost(m, o, &m->layer[l], c);
        const uint64_t ffn = pi_cost_ffn(out, l, i->n_ff);
        if (ffn > largest) largest = ffn;
    }
    out->head_bytes = mat_bytes(pi_row_bytes(&m->output), m->output.n_rows);
    out->head_norm_bytes = vec_bytes(m->output_norm, i->n_embd) + vec_bytes(m->output_norm_b, i->n_embd);
    out->head_read = read_bytes(m->output);
    out->scratch_bytes = pi_cost_scratch(m, o);
    if (o->n_batch >= MIN_STREAM_TOKENS)
        out->staging_bytes = N_STAGES * (largest < stage_bytes ? largest : stage_bytes);
    return PI_OK;
}

void pi_cost_free(pi_cost *c) {
    free(c->layer);
    c->layer = NULL;
}

uint64_t pi_cost_fixed(const pi_layer_cost *c) {
    return c->kv_bytes + c->attention_bytes + c->norm_bytes + c->predictor_bytes;
}

uint64_t pi_cost_ffn(const pi_cost *cost, int32_t l, int32_t n_hot) {
    const pi_layer_cost *c = &cost->layer[l];
    if (!n_hot) return 0;
    uint64_t n = mat_bytes(c->up_stride, n_hot);
    if (c->gate_stride) n += mat_bytes(c->gate_stride, n_hot);
    if (c->column_rows)
        n += mat_bytes(c->down_stride / (size_t)(cost->n_ff / c->block) * (size_t)(n_hot / c->block), c->column_rows);
    else
        n += mat_bytes(c->down_stride, n_hot);
    if (c->up_bias) n += round_up(sizeof(float) * (uint64_t)n_hot, PI_DEVICE_ALIGN);
    return n + round_up(sizeof(int32_t) * (uint64_t)n_hot, PI_DEVICE_ALIGN);
}

pi_activity pi_cost_activity(const pi_plan_options *o, int32_t l, int32_t n_ff) {
    pi_activity a = {.same = 1};
    if (o->sparsity == PI_SPARSITY_DENSE) return a;
    const double overshoot = o->sparsity == PI_SPARSITY_PREDICTED ? o->overshoot : 1;
    if (o->counts) {
        a.count = o->counts + (ptrdiff_t)l * n_ff;
        a.scale = overshoot / ((double)o->n_tokens + 1);
    } else if (o->active_share * overshoot < 1) {
        a.same = o->active_share * overshoot;
    }
    return a;
}

pi_layer_time pi_cost_time(const pi_cost *cost, const pi_plan_options *o, int32_t l, bool on_device, int32_t n_hot,
                           double active_hot, double active_cold) {
    const pi_layer_cost *c = &cost->layer[l];
    const double gpu = o->gpu_bytes_per_s * 1e-6, cpu = o->cpu_bytes_per_s * 1e-6; /* bytes per us */
    const int32_t n_cold = cost->n_ff - n_hot;
    pi_layer_time t = {0};
    t.fixed_us = on_device ? o->layer_us + c->fixed_read / gpu : c->fixed_read / cpu;
    if (n_hot) t.gpu_ffn_us = o->ffn_us + (n_hot * c->always_read + active_hot * c->active_read) / gpu;
    if (n_cold) {
        t.cpu_ffn_us = (n_cold * c->always_read + active_cold * c->active_read) / cpu;
        t.handover_us = o->handover_us;
    }
    return t;
}
