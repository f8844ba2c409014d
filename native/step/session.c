/* session.c - opening and closing a session, its thresholds. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_types.h"
#include "../blocks/attend.h"
#include "../hybrid/hybrid.h"
#include "../state/options.h"
#include "chunk.h"

enum { MAX_THREADS = 1024 };

static bool uses_device(const pi_session_options *o) {
    return o->plan && o->device != PI_DEVICE_NONE && o->plan->info.uses_device;
}

static pi_status check_options(const pi_model *m, pi_session_options *o) {
    if (m->loaded < m->info.n_layer)
        return PI_FAIL(PI_ERROR_ARGUMENT, "the model is not loaded: %d of %d layers", m->loaded, m->info.n_layer);
    if (o->beside) {
        if (o->beside->beside) return PI_FAIL(PI_ERROR_ARGUMENT, "a session beside another that is so itself");
        o->n_threads = o->beside->options.n_threads;
    }
    if (o->n_threads == 0) {
        o->n_threads = te_os_n_cores();
        if (uses_device(o) && o->n_threads >= 4) o->n_threads--; /* a GPU's driver wants some of a core: 2 % on 16 */
    }
    PI_TRY(pi_in_range("n_threads", o->n_threads, 1, MAX_THREADS));
    PI_TRY(pi_in_range("wait_ms", o->wait_ms, 0, INT32_MAX));
    return pi_session_check(m, o);
}

/* Hands out parts of one allocation, each on a cache line of its own; with base NULL it only measures. */
typedef struct carver {
    char *base;
    size_t used;
} carver;
static void *carve(carver *c, size_t rows, size_t cols, size_t size) {
    const size_t at = c->used, n = pi_mul(pi_mul(rows, cols), size);
    c->used = pi_add(at, n == SIZE_MAX ? n : (n + 127) / 64 * 64);
    return c->base ? c->base + at : NULL;
}

static void lay_out(pi_session *s, carver *c) {
    const pi_model_info *i = &s->model->info;
    const size_t b = (size_t)s->options.n_batch, nt = (size_t)s->options.n_threads, f = sizeof(float),
                 n_ff = (size_t)i->n_ff;
    const size_t n_q = (size_t)i->n_head * (size_t)i->n_embd_head, n_kv = (size_t)i->n_head_kv * (size_t)i->n_embd_head;
    const size_t n_routes = pi_mul(b, (size_t)s->model->info.n_expert_used), n_expert = (size_t)s->model->info.n_expert;
    const size_t n_routed = (size_t)s->model->info.n_expert_used * (size_t)s->model->n_ff_expert;
    const size_t n_layer_embd = (size_t)s->model->n_embd_layer, n_ffn = n_ff > n_routed ? n_ff : n_routed;
    const size_t n_hidden = n_ffn > n_layer_embd ? n_ffn : n_layer_embd;
    const bool predictor = i->predictor != PI_PREDICTOR_NONE, mlp = i->predictor == PI_PREDICTOR_MLP;
    s->x = carve(c, b, (size_t)i->n_embd, f);
    s->pair = carve(c, s->model->join.w ? b : 0, 2 * (size_t)i->n_embd, f);
    s->h = carve(c, b, (size_t)i->n_embd, f);
    const pi_arch *a = s->model->arch;
    const bool two_inputs = s->model->layer[0].parallel || a->weighted_input || a->experts_beside;
    s->h2 = carve(c, two_inputs ? b : 0, (size_t)i->n_embd, f);
    s->out = carve(c, s->model->arch->post_norm ? b : 0, (size_t)i->n_embd, f);
    s->q = carve(c, b, s->model->arch->gated_heads ? 2 * n_q : n_q, f);
    s->head_gates = carve(c, s->model->arch->gate_matrix ? b : 0, n_q, f);
    s->k = carve(c, b, n_kv, f);
    s->v = carve(c, b, n_kv, f);
    s->att = carve(c, b, n_q, f);
    s->latent_q = carve(c, b, pi_latent_q(s->model), f);
    s->cs = carve(c, b, pi_rope_floats(s->model, s->model->n_ropes), f);
    s->stream = carve(c, pi_mul(b, (size_t)s->model->n_stream), (size_t)i->n_embd, f);
    s->stream_c = carve(c, s->model->n_stream ? b : 0, PI_MAX_STREAMS * PI_MAX_STREAMS, f);
    s->layer_embd = carve(c, b, pi_mul((size_t)i->n_layer, n_layer_embd), f);
    s->gate = carve(c, i->is_gated ? b : 0, n_hidden, f);
    s->up = carve(c, b, n_hidden, f);
    s->routes.score = carve(c, b, pi_mul(3, n_expert), f);
    s->routes.expert = carve(c, n_routes, 1, sizeof *s->routes.expert);
    s->routes.weight = carve(c, n_routes, 1, f);
    s->routes.of = carve(c, n_routes, 1, sizeof *s->routes.of);
    s->routes.place = carve(c, n_routes, 1, sizeof *s->routes.place);
    s->routes.first = carve(c, 1, n_expert + 1, sizeof *s->routes.first);
    s->routes.token = carve(c, n_routes, 1, sizeof *s->routes.token);
    s->routes.factor = carve(c, n_routes, 1, f);
    s->routes.list = carve(c, n_expert, 1, sizeof *s->routes.list);
    s->routes.x = carve(c, n_routes, (size_t)i->n_embd, f);
    s->state_in = carve(c, b, (size_t)s->model->state_in, f);
    s->state_z = carve(c, b, (size_t)s->model->state_z, f);
    s->state_gates = carve(c, b, (size_t)s->model->state_gates, f);
    s->state_out = carve(c, b, (size_t)s->model->state_out, f);
    s->rank = carve(c, mlp ? b : 0, (size_t)s->model->max_rank, f);
    s->adapt = carve(c, s->model->adapter_rank ? b : 0, (size_t)s->model->adapter_rank, f);
    s->adapt_up = carve(c, s->model->adapted_ffn ? b : 0, n_ff, f);
    s->score = carve(c, predictor ? b : 0, n_ff, f);
    s->mask = carve(c, predictor || s->model->cuts_gates ? b : 0, n_ff, 1);
    s->sign = carve(c, b, (size_t)s->model->sign_words, sizeof *s->sign);
    s->threshold = carve(c, 1, (size_t)i->n_layer, f);
    s->tap = carve(c, 1, (size_t)i->n_layer, sizeof *s->tap);
    s->list = carve(c, predictor ? 1 : 0, n_ff, sizeof *s->list);
    s->list_own = carve(c, predictor ? 1 : 0, n_ff, sizeof *s->list_own);
    s->list_part = carve(c, 1, nt, sizeof *s->list_part);
    s->scratch = carve(c, nt, s->scratch_floats, f);
    const size_t few = b < (size_t)s->room.n_tok ? b : (size_t)s->room.n_tok;
    s->parts = carve(c, s->room.n_slot > 1 ? pi_mul(few, (size_t)i->n_head) : 0,
                     pi_mul((size_t)s->room.n_slot, s->room.part_floats), f);
    s->chunk.token = carve(c, b, 1, sizeof(int32_t));
    s->chunk.pos = carve(c, b, 1, sizeof(int32_t));
    s->chunk.seq = carve(c, b, 1, sizeof(int32_t));
    s->chunk.logits_row = carve(c, b, 1, sizeof(int32_t));
    s->chunk.batch_row = carve(c, b, 1, sizeof(int32_t));
    s->chunk.order = carve(c, s->model->state_floats ? b : 0, 1, sizeof(int32_t));
    s->chunk.kept = carve(c, s->model->state_floats ? b : 0, 1, sizeof(int32_t));
    s->chunk.run = carve(c, s->model->state_floats ? b + 1 : 0, 1, sizeof(int32_t));
    s->step = carve(c, 1, (size_t)i->n_layer, sizeof *s->step);
    s->count = carve(c, (size_t)i->n_layer, nt, sizeof *s->count);
    s->uses = carve(c, (size_t)i->n_layer, n_expert, sizeof *s->uses);
    s->fired = carve(c, s->options.count_neurons ? (size_t)i->n_layer : 0, (size_t)i->n_placed, sizeof *s->fired);
    if (!s->options.count_neurons) s->fired = NULL;
}

/* What attend.c and a context shift need per member; rounded to cache lines. */
static size_t scratch_floats(const pi_session *s) {
    const size_t shift = (size_t)s->model->info.n_embd_head * 2;
    const size_t embd = (size_t)s->model->n_embd_layer, least = shift > embd ? shift : embd;
    const size_t n = s->room.floats > least ? s->room.floats : least;
    return n == SIZE_MAX ? n : (n + 31) / 16 * 16;
}

static pi_kv_shape kv_shape(const pi_session_options *o) {
    return (pi_kv_shape){.n_ctx = o->n_ctx,
                         .n_pool = o->n_pool,
                         .n_seq = o->n_seq,
                         .n_batch = o->n_batch,
                         .n_guesses = o->n_guesses,
                         .type_k = o->type_k,
                         .type_v = o->type_v};
}

uint64_t pi_model_kv_bytes(const pi_model *m, const pi_session_options *options) {
    if (!m || !options) return 0;
    pi_session_options o = *options;
    if (pi_session_check(m, &o) != PI_OK) return 0;
    const pi_kv_shape shape = kv_shape(&o);
    uint64_t n = pi_states_bytes(m, o.n_seq, o.n_guesses);
    for (int32_t l = 0; l < m->info.n_layer; l++)
        n += pi_kv_layer_bytes(m, &shape, pi_attention_of(&m->layer[l]), false, o.type_k) +
             pi_kv_layer_bytes(m, &shape, pi_attention_of(&m->layer[l]), true, o.type_v);
    return n;
}

/* Memory is taken when it is first written, in the middle of an answer perhaps: what will be taken is compared with what
 * is free before. */
static pi_status check_memory(const pi_session *s) {
    const double gib = 1 << 30;
    const uint64_t kv = pi_kv_bytes(&s->kv), n = kv + s->memory_bytes, free_bytes = te_os_memory_available();
    if (n <= free_bytes) return PI_OK;
    return PI_FAIL(
        PI_ERROR_MEMORY,
        "K/V takes %.2f GiB and a batch %.2f GiB (n_ctx=%d, n_pool=%d, n_seq=%d, n_batch=%d), and this process "
        "can have %.2f GiB",
        (double)kv / gib, (double)s->memory_bytes / gib, s->options.n_ctx, s->options.n_pool, s->options.n_seq,
        s->options.n_batch, (double)free_bytes / gib);
}

/* The most columns of a matrix, or rows of a transposed one. */
static int32_t most_cols(const pi_model *m) {
    const pi_model_info *i = &m->info;
    const int32_t each[] = {m->join.w ? 2 * i->n_embd : i->n_embd,
                            i->n_ff,
                            m->n_ff_expert,
                            i->n_head * i->n_embd_head,
                            m->state_out,
                            m->n_embd_layer,
                            m->max_rank,
                            m->adapter_rank};
    int32_t most = 0;
    for (size_t k = 0; k < sizeof each / sizeof *each; k++) most = pi_max_i32(most, each[k]);
    return most;
}

static pi_status open_session(pi_session *s) {
    const pi_model *m = s->model;
    const pi_model_info *i = &m->info;
    pi_session_options *o = &s->options;
    PI_TRY(check_options(m, o));
    pi_kv_device device = {0};
    if (uses_device(o)) {
        PI_TRY(pi_hybrid_place(s, o->plan, &s->hybrid));
        device = pi_hybrid_kv(s->hybrid);
    }
    const pi_kv_shape shape = kv_shape(o);
    PI_TRY(pi_kv_init(&s->kv, m, &shape, &device));
    s->room = pi_attention_room_of(s);
    s->scratch_floats = scratch_floats(s);
    carver c = {NULL, 0};
    lay_out(s, &c);
    s->memory_bytes = c.used;
    PI_TRY(check_memory(s));
    s->memory = te_os_alloc(s->memory_bytes);
    if (!s->memory)
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the buffers of a step (%zu bytes at n_batch %d)",
                       s->memory_bytes, o->n_batch);
    c = (carver){s->memory, 0};
    lay_out(s, &c);
    for (int32_t l = 0; l < i->n_layer; l++) s->threshold[l] = pi_threshold_of(&m->layer[l]);
    const te_workspace_limits limits = {.n_threads = o->n_threads,
                                        .max_tok = o->n_batch,
                                        .max_cols = most_cols(m),
                                        .max_rows = i->n_ff,
                                        .mixture = i->n_expert > 0};
    PI_TRY(te_workspace_new(m->kernels, limits, &s->ws));
    if (o->beside) {
        s->beside = o->beside;
        pi_ref_take(&s->beside->ref);
        s->pool = s->beside->pool;
    } else {
        PI_TRY(te_pool_new(o->n_threads, &s->pool));
    }
    s->kv.states.pool = s->pool;
    if (s->hybrid) PI_TRY(pi_hybrid_load(s->hybrid, o));
    o->plan = NULL;
    o->device_index = NULL;
    o->progress = NULL;
    o->beside = NULL; /* s->beside has it */
    return PI_OK;
}

pi_status pi_session_open(pi_model *model, const pi_session_options *options, pi_session **out) {
    if (!model || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_open: model or out is NULL");
    *out = NULL;
    pi_session *s = calloc(1, sizeof *s);
    if (!s) return PI_FAIL(PI_ERROR_MEMORY, "out of memory opening a session");
    s->ref.n = 1;
    s->model = model;
    s->options = options ? *options : pi_session_defaults();
    pi_ref_take(&model->ref);
    const pi_status st = open_session(s);
    if (st != PI_OK) {
        pi_session_close(s);
        return st;
    }
    *out = s;
    return PI_OK;
}

void pi_session_close(pi_session *s) {
    if (!s || !pi_ref_drop(&s->ref)) return;
    pi_hybrid_close(s->hybrid);
    if (!s->beside) te_pool_free(s->pool);
    te_workspace_free(s->ws);
    pi_kv_free(&s->kv);
    te_os_free(s->memory, s->memory_bytes);
    free(s->own_logits);
    free(s->own_hidden);
    free(s->all_hidden);
    free(s->part.seq);
    pi_model_close(s->model);
    pi_session_close(s->beside);
    free(s);
}

void pi_session_get_info(const pi_session *s, pi_session_info *out) {
    if (out) *out = (pi_session_info){0};
    if (!s || !out) return;
    const pi_session_options *o = &s->options;
    const pi_kv_pool *full = &s->kv.pool[PI_KV_FULL];
    pi_session_lock(s);
    float lowest = s->threshold[0];
    for (int32_t l = 1; l < s->model->info.n_layer; l++)
        if (s->threshold[l] < lowest) lowest = s->threshold[l];
    *out = (pi_session_info){.n_ctx = o->n_ctx,
                             .n_pool = full->n_blocks * PI_KV_BLOCK,
                             .n_seq = o->n_seq,
                             .n_batch = o->n_batch,
                             .n_threads = o->n_threads,
                             .sparsity = o->sparsity,
                             .sparse_threshold = lowest,
                             .n_kv_bytes = pi_kv_bytes(&s->kv),
                             .n_work_bytes = s->memory_bytes + te_workspace_bytes(s->ws),
                             .n_device_bytes = s->hybrid ? pi_hybrid_bytes(s->hybrid) : 0,
                             .n_zero_copy = s->hybrid ? pi_hybrid_zero_copy(s->hybrid) : 0,
                             .n_unmapped_bytes = s->hybrid ? s->hybrid->unmapped_bytes : 0,
                             .n_blocks = full->n_blocks,
                             .n_blocks_free = full->n_free,
                             .n_window = s->kv.n_pools > 1 ? s->kv.keep : 0,
                             .n_mixed = pi_chunk_mixed(s),
                             .n_part = s->hybrid ? s->hybrid->max_part : 0};
    pi_session_unlock(s);
}

pi_status pi_session_set_sparsity(pi_session *s, int32_t sparsity) {
    int32_t v = 0;
    if (!s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_set_sparsity: session is NULL");
    PI_TRY(pi_check_sparsity(s->model, sparsity, &v));
    if (s->hybrid) PI_TRY(pi_hybrid_check_sparsity(s->hybrid, v));
    pi_session_lock(s);
    s->options.sparsity = v;
    pi_session_unlock(s);
    return PI_OK;
}

/* Both sides' thresholds, [n_layer]. */
static pi_status change_thresholds(pi_session *s, const float *threshold) {
    if (s->hybrid) PI_TRY(pi_hybrid_set_thresholds(s->hybrid, threshold));
    memcpy(s->threshold, threshold, sizeof *threshold * (size_t)s->model->info.n_layer);
    return PI_OK;
}

pi_status pi_session_set_thresholds(pi_session *s, const float *threshold) {
    if (!s || !threshold) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_set_thresholds: session or threshold is NULL");
    for (int32_t l = 0; l < s->model->info.n_layer; l++)
        if (isnan(threshold[l])) return PI_FAIL(PI_ERROR_ARGUMENT, "the threshold of layer %d is not a number", l);
    pi_session_lock(s);
    const pi_status st = change_thresholds(s, threshold);
    pi_session_unlock(s);
    return st;
}

pi_status pi_session_set_threshold(pi_session *s, float threshold) {
    if (!s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_set_threshold: session is NULL");
    if (isnan(threshold)) return PI_FAIL(PI_ERROR_ARGUMENT, "the threshold is not a number");
    const int32_t n = s->model->info.n_layer;
    float *all = malloc(sizeof *all * (size_t)n);
    if (!all) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d thresholds", n);
    for (int32_t l = 0; l < n; l++) all[l] = threshold;
    const pi_status st = pi_session_set_thresholds(s, all);
    free(all);
    return st;
}
