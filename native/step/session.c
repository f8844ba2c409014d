/* session.c - opening a session, feeding batches, sequences, saved state. */
#include "session.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_types.h"
#include "../blocks/attention.h"
#include "../hybrid/hybrid.h"
#include "forward.h"

enum { MAX_BATCH = 1 << 16, MAX_SEQ = 1 << 16, MAX_CTX = 1 << 24, MAX_THREADS = 1024, DEFAULT_CTX = 4096 };

pi_session_options pi_session_defaults(void) {
    return (pi_session_options){
        .n_seq = 1, .n_batch = 512, .type_k = PI_KV_F16, .type_v = PI_KV_F16, .sparsity = PI_SPARSITY_AUTO};
}

static pi_status check_sparsity(const pi_model *m, int32_t asked, int32_t *out) {
    const bool relu = pi_is_relu(m->info.activation) && !m->n_expert;
    if (m->n_expert && (asked == PI_SPARSITY_PREDICTED || asked == PI_SPARSITY_EXACT))
        return PI_FAIL(
            PI_ERROR_ARGUMENT,
            "sparsity \"%s\" is not possible: the model has experts, and its router names them; \"dense\" is",
            asked == PI_SPARSITY_EXACT ? "exact" : "predicted");
    switch (asked) {
    case PI_SPARSITY_AUTO:
        *out = m->info.predictor && !m->adapted_ffn ? PI_SPARSITY_PREDICTED
               : relu                               ? PI_SPARSITY_EXACT
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
        if (!relu)
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

static pi_status in_range(const char *name, int32_t v, int32_t lo, int32_t hi) {
    if (v < lo || v > hi) return PI_FAIL(PI_ERROR_ARGUMENT, "%s is %d, must be %d..%d", name, v, lo, hi);
    return PI_OK;
}

pi_status pi_session_check(const pi_model *m, pi_session_options *o) {
    if (o->n_ctx == 0) o->n_ctx = m->info.n_ctx_train < DEFAULT_CTX ? m->info.n_ctx_train : DEFAULT_CTX;
    if (o->n_pool == 0) o->n_pool = o->n_ctx;
    PI_TRY(in_range("n_ctx", o->n_ctx, 1, MAX_CTX));
    PI_TRY(in_range("n_pool", o->n_pool, o->n_ctx, MAX_CTX));
    PI_TRY(in_range("n_seq", o->n_seq, 1, MAX_SEQ));
    PI_TRY(in_range("n_batch", o->n_batch, 1, MAX_BATCH));
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
    if (o->count_neurons && m->n_expert) return PI_FAIL(PI_ERROR_UNSUPPORTED, "neurons of experts cannot be counted");
    return check_sparsity(m, o->sparsity, &o->sparsity);
}

static bool uses_device(const pi_session_options *o) {
    return o->plan && o->device != PI_DEVICE_NONE && o->plan->info.uses_device;
}

static pi_status check_options(const pi_model *m, pi_session_options *o) {
    if (m->loaded < m->info.n_layer)
        return PI_FAIL(PI_ERROR_ARGUMENT, "the model is not loaded: %d of %d layers", m->loaded, m->info.n_layer);
    if (o->n_threads == 0) {
        o->n_threads = te_os_n_cores();
        if (uses_device(o) && o->n_threads >= 4) o->n_threads--; /* a GPU's driver wants some of a core: 2 % on 16 */
    }
    PI_TRY(in_range("n_threads", o->n_threads, 1, MAX_THREADS));
    PI_TRY(in_range("wait_ms", o->wait_ms, 0, INT32_MAX));
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
    const size_t n_routes = pi_mul(b, (size_t)s->model->n_used), n_expert = (size_t)s->model->n_expert;
    const size_t n_routed = (size_t)s->model->n_used * (size_t)s->model->n_ff_expert;
    const size_t n_hidden = n_ff > n_routed ? n_ff : n_routed;
    const bool predictor = i->predictor != PI_PREDICTOR_NONE, mlp = i->predictor == PI_PREDICTOR_MLP;
    s->x = carve(c, b, (size_t)i->n_embd, f);
    s->h = carve(c, b, (size_t)i->n_embd, f);
    s->h2 = carve(c, s->model->arch->parallel ? b : 0, (size_t)i->n_embd, f);
    s->out = carve(c, s->model->arch->post_norm ? b : 0, (size_t)i->n_embd, f);
    s->q = carve(c, b, n_q, f);
    s->k = carve(c, b, n_kv, f);
    s->v = carve(c, b, n_kv, f);
    s->att = carve(c, b, n_q, f);
    s->cs = carve(c, b, (size_t)s->model->rope.n_rot, f);
    s->gate = carve(c, i->is_gated ? b : 0, n_hidden, f);
    s->up = carve(c, b, n_hidden, f);
    s->routes.score = carve(c, b, n_expert, f);
    s->routes.expert = carve(c, n_routes, 1, sizeof *s->routes.expert);
    s->routes.weight = carve(c, n_routes, 1, f);
    s->routes.place = carve(c, n_routes, 1, sizeof *s->routes.place);
    s->routes.first = carve(c, 1, n_expert + 1, sizeof *s->routes.first);
    s->routes.x = carve(c, n_routes, (size_t)i->n_embd, f);
    s->rank = carve(c, mlp ? b : 0, (size_t)s->model->max_rank, f);
    s->adapt = carve(c, s->model->adapter_rank ? b : 0, (size_t)s->model->adapter_rank, f);
    s->adapt_up = carve(c, s->model->adapted_ffn ? b : 0, n_ff, f);
    s->score = carve(c, predictor ? b : 0, n_ff, f);
    s->mask = carve(c, predictor ? b : 0, n_ff, 1);
    s->sign = carve(c, b, (size_t)s->model->sign_words, sizeof *s->sign);
    s->threshold = carve(c, 1, (size_t)i->n_layer, f);
    s->tap = carve(c, 1, (size_t)i->n_layer, sizeof *s->tap);
    s->list = carve(c, predictor ? 1 : 0, n_ff, sizeof *s->list);
    s->list_own = carve(c, predictor ? 1 : 0, n_ff, sizeof *s->list_own);
    s->list_part = carve(c, 1, nt, sizeof *s->list_part);
    s->scratch = carve(c, nt, s->scratch_floats, f);
    const size_t split = b < PI_ATTENTION_SPLIT_TOK ? b : PI_ATTENTION_SPLIT_TOK;
    s->parts = carve(c, s->room.n_slot > 1 ? pi_mul(split, (size_t)i->n_head) : 0,
                     pi_mul((size_t)s->room.n_slot, s->room.part_floats), f);
    s->chunk.token = carve(c, b, 1, sizeof(int32_t));
    s->chunk.pos = carve(c, b, 1, sizeof(int32_t));
    s->chunk.seq = carve(c, b, 1, sizeof(int32_t));
    s->chunk.logits_row = carve(c, b, 1, sizeof(int32_t));
    s->chunk.batch_row = carve(c, b, 1, sizeof(int32_t));
    s->step = carve(c, 1, (size_t)i->n_layer, sizeof *s->step);
    s->count = carve(c, (size_t)i->n_layer, nt, sizeof *s->count);
    s->fired = carve(c, s->options.count_neurons ? (size_t)i->n_layer : 0, n_ff, sizeof *s->fired);
    if (!s->options.count_neurons) s->fired = NULL;
}

/* What attention.c and a context shift need per member; rounded to cache lines. */
static size_t scratch_floats(const pi_session *s) {
    const size_t shift = (size_t)s->model->info.n_embd_head * 2;
    const size_t n = s->room.floats > shift ? s->room.floats : shift;
    return n == SIZE_MAX ? n : (n + 31) / 16 * 16;
}

static int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }

static pi_status open_session(pi_session *s) {
    const pi_model *m = s->model;
    const pi_model_info *i = &m->info;
    pi_session_options *o = &s->options;
    PI_TRY(check_options(m, o));
    pi_kv_far far = {0};
    if (uses_device(o)) {
        PI_TRY(pi_hybrid_place(s, o->plan, &s->hybrid));
        far = pi_hybrid_far(s->hybrid);
    }
    PI_TRY(pi_kv_init(&s->kv, m, o->n_ctx, o->n_pool, o->n_seq, o->type_k, o->type_v, &far));
    s->room = pi_attention_room_of(s);
    s->scratch_floats = scratch_floats(s);
    carver c = {NULL, 0};
    lay_out(s, &c);
    s->memory_bytes = c.used;
    s->memory = te_os_alloc(s->memory_bytes);
    if (!s->memory)
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the buffers of a step (%zu bytes at n_batch %d)",
                       s->memory_bytes, o->n_batch);
    c = (carver){s->memory, 0};
    lay_out(s, &c);
    for (int32_t l = 0; l < i->n_layer; l++) s->threshold[l] = pi_threshold_of(&m->layer[l]);
    const te_workspace_limits limits = {
        .n_threads = o->n_threads,
        .max_tok = o->n_batch,
        .max_cols = max_i32(max_i32(i->n_embd, max_i32(i->n_ff, m->n_ff_expert)),
                            max_i32(i->n_head * i->n_embd_head, max_i32(m->max_rank, m->adapter_rank))),
        .max_rows = i->n_ff};
    PI_TRY(te_workspace_new(m->kernels, limits, &s->ws));
    PI_TRY(te_pool_new(o->n_threads, &s->pool));
    if (s->hybrid) PI_TRY(pi_hybrid_load(s->hybrid, o));
    o->plan = NULL;
    o->device_index = NULL;
    o->progress = NULL;
    return PI_OK;
}

pi_status pi_session_open(pi_model *model, const pi_session_options *options, pi_session **out) {
    if (!model || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_open: model or out is NULL");
    *out = NULL;
    pi_session *s = calloc(1, sizeof *s);
    if (!s) return PI_FAIL(PI_ERROR_MEMORY, "out of memory opening a session");
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
    if (!s) return;
    pi_hybrid_close(s->hybrid);
    te_pool_free(s->pool);
    te_workspace_free(s->ws);
    pi_kv_free(&s->kv);
    te_os_free(s->memory, s->memory_bytes);
    free(s->logits);
    free(s->hidden);
    pi_model_close(s->model);
    free(s);
}

void pi_session_get_info(const pi_session *s, pi_session_info *out) {
    const pi_session_options *o = &s->options;
    pi_session_lock(s);
    float lowest = s->threshold[0];
    for (int32_t l = 1; l < s->model->info.n_layer; l++)
        if (s->threshold[l] < lowest) lowest = s->threshold[l];
    *out = (pi_session_info){.n_ctx = o->n_ctx,
                             .n_pool = s->kv.n_blocks * PI_KV_BLOCK,
                             .n_seq = o->n_seq,
                             .n_batch = o->n_batch,
                             .n_threads = o->n_threads,
                             .sparsity = o->sparsity,
                             .sparse_threshold = lowest,
                             .n_kv_bytes = pi_kv_bytes(&s->kv),
                             .n_work_bytes = s->memory_bytes + te_workspace_bytes(s->ws),
                             .n_device_bytes = s->hybrid ? pi_hybrid_bytes(s->hybrid) : 0,
                             .n_in_place = s->hybrid ? pi_hybrid_in_place(s->hybrid) : 0,
                             .n_blocks = s->kv.n_blocks,
                             .n_blocks_free = s->kv.n_free};
    pi_session_unlock(s);
}

pi_status pi_session_set_sparsity(pi_session *s, int32_t sparsity) {
    int32_t v = 0;
    if (!s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_set_sparsity: session is NULL");
    PI_TRY(check_sparsity(s->model, sparsity, &v));
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

pi_status pi_session_set_tap(pi_session *s, int32_t layer, const pi_tap *tap) {
    if (!s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_set_tap: session is NULL");
    if (layer < 0 || layer >= s->model->info.n_layer)
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d is out of range 0..%d", layer, s->model->info.n_layer - 1);
    if (tap && s->hybrid)
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "a session with layers on a device cannot be tapped; one of the CPU alone can");
    if (tap && s->model->n_expert) return PI_FAIL(PI_ERROR_UNSUPPORTED, "a model with experts cannot be tapped");
    if (tap && tap->score && !s->model->info.predictor)
        return PI_FAIL(PI_ERROR_ARGUMENT, "the model has no predictor whose scores could be tapped");
    pi_session_lock(s);
    s->tap[layer] = tap ? *tap : (pi_tap){0};
    s->n_taps = 0;
    for (int32_t l = 0; l < s->model->info.n_layer; l++) {
        const pi_tap *t = &s->tap[l];
        s->n_taps += t->input || t->norm || t->hidden || t->score;
    }
    pi_session_unlock(s);
    return PI_OK;
}

/* ---- feeding ---- */

static int32_t batch_seq(const pi_batch *b, int32_t i) { return b->seq ? b->seq[i] : 0; }
static int32_t batch_wants(const pi_batch *b, int32_t i) {
    if (!b->want_logits) return i + 1 == b->n_tokens ? PI_WANT_NEXT : PI_WANT_NOTHING;
    return b->want_logits[i];
}
static bool has_logits(const pi_batch *b, int32_t i) { return batch_wants(b, i) != PI_WANT_NOTHING; }

/* Checks every token; leaves in to[seq] the length each sequence will have. */
static pi_status check_batch(const pi_session *s, const pi_batch *b, int32_t *to, int32_t *n_logits) {
    const pi_model_info *c = &s->model->info;
    *n_logits = 0;
    if (s->n_taps && b->n_tokens > s->options.n_batch)
        return PI_FAIL(PI_ERROR_ARGUMENT, "a tapped feed of %d tokens is longer than n_batch, which is %d", b->n_tokens,
                       s->options.n_batch);
    for (int32_t i = 0; i < s->kv.n_seq; i++) to[i] = s->kv.seq[i].length;
    for (int32_t i = 0; i < b->n_tokens; i++) {
        const int32_t seq = batch_seq(b, i);
        if (b->token[i] < 0 || b->token[i] >= c->n_vocab)
            return PI_FAIL(PI_ERROR_ARGUMENT, "token %d at index %d is out of range 0..%d", b->token[i], i,
                           c->n_vocab - 1);
        if (seq < 0 || seq >= s->kv.n_seq)
            return PI_FAIL(PI_ERROR_ARGUMENT, "sequence %d at index %d is out of range 0..%d", seq, i, s->kv.n_seq - 1);
        if (batch_wants(b, i) > PI_WANT_VISIT)
            return PI_FAIL(PI_ERROR_ARGUMENT, "want_logits is %d at index %d, must be 0..%d", batch_wants(b, i), i,
                           PI_WANT_VISIT);
        if (b->pos && b->pos[i] != to[seq])
            return PI_FAIL(PI_ERROR_ARGUMENT,
                           "position %d at index %d does not continue sequence %d, which has %d positions", b->pos[i],
                           i, seq, to[seq]);
        if (to[seq] >= s->options.n_ctx)
            return PI_FAIL(PI_ERROR_CONTEXT, "sequence %d is full: n_ctx is %d and %d tokens more were given", seq,
                           s->options.n_ctx, b->n_tokens - i);
        to[seq]++;
        *n_logits += has_logits(b, i);
    }
    int64_t needed = 0;
    for (int32_t i = 0; i < s->kv.n_seq; i++)
        needed += to[i] > s->kv.seq[i].length ? pi_kv_blocks_needed(&s->kv, i, s->kv.seq[i].length, to[i]) : 0;
    if (needed > s->kv.n_free)
        return PI_FAIL(PI_ERROR_CONTEXT,
                       "the KV pool is full: %lld blocks of %d positions are needed, %d of %d are free",
                       (long long)needed, PI_KV_BLOCK, s->kv.n_free, s->kv.n_blocks);
    return PI_OK;
}

static pi_status reserve_logits(pi_session *s, int32_t rows) {
    if (rows <= s->logits_capacity) return PI_OK;
    const size_t nl = pi_mul(pi_mul((size_t)rows, (size_t)s->model->info.n_vocab), sizeof(float));
    const size_t nh = pi_mul(pi_mul((size_t)rows, (size_t)s->model->info.n_embd), sizeof(float));
    float *logits = malloc(nl), *hidden = malloc(nh);
    if (!logits || !hidden) {
        free(logits);
        free(hidden);
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d rows of logits (%zu bytes)", rows, nl);
    }
    free(s->logits);
    free(s->hidden);
    s->logits = logits;
    s->hidden = hidden;
    s->logits_capacity = rows;
    return PI_OK;
}

/* Says of which tokens of a batch each is computed by row kernels, as it would be alone; the others are by matrix
 * products. That depends on the token's own sequence only: see pi_batch. of_seq: room for 3 * n_seq. */
static void choose_ways(const pi_session *s, const pi_batch *b, const int32_t *pos, int32_t *of_seq, uint8_t *alone) {
    const bool narrow = s->options.n_batch < PI_PROMPT_LEAST;
    int32_t *n_next = of_seq, *from = n_next + s->kv.n_seq, *to = from + s->kv.n_seq;
    for (int32_t q = 0; q < s->kv.n_seq; q++) n_next[q] = from[q] = to[q] = 0;
    for (int32_t i = 0; i < b->n_tokens; i++) {
        alone[i] = batch_wants(b, i) == PI_WANT_NEXT;
        n_next[batch_seq(b, i)] += alone[i];
    }
    for (int32_t i = 0; i < b->n_tokens; i++) {
        const int32_t q = batch_seq(b, i);
        if (n_next[q] > PI_FEW_TOK) alone[i] = 0;
        if (alone[i]) continue;
        if (to[q] == 0) from[q] = pos[i];
        to[q] = pos[i] + 1;
    }
    for (int32_t i = 0; i < b->n_tokens; i++) {
        const int32_t q = batch_seq(b, i), end = to[q] / PI_PROMPT_PART * PI_PROMPT_PART;
        alone[i] |= pos[i] >= end || end - from[q] < PI_PROMPT_LEAST || narrow;
    }
}

/* Fills the chunk from tokens first..first+n-1, in pi_chunk's order. A device computes all of a chunk alike, and so does
 * the CPU beside it. */
static void fill_chunk(pi_session *s, const pi_batch *b, const uint8_t *alone, int32_t first, int32_t n,
                       const int32_t *pos, int32_t *row) {
    pi_chunk *c = &s->chunk;
    const bool split = s->options.sparsity == PI_SPARSITY_PREDICTED && !s->options.mask_prompts;
    const bool few = s->hybrid && n <= s->hybrid->max_decode;
    c->n_tok = c->n_many = c->n_dense = c->n_logits = 0;
    for (int32_t pass = 0; pass < 4; pass++) {
        int32_t next = *row;
        if (pass == 1) c->first_dense = c->n_tok;
        if (pass == 2) c->n_many = c->n_tok;
        for (int32_t i = first; i < first + n; i++) {
            const bool wants = has_logits(b, i), dense = split && !wants;
            const int32_t own = next;
            next += wants;
            if ((s->hybrid ? few : alone[i]) ? pass != (dense ? 2 : 3) : pass != dense) continue;
            const int32_t at = c->n_tok++;
            c->token[at] = b->token[i];
            c->seq[at] = batch_seq(b, i);
            c->pos[at] = pos[i];
            c->logits_row[at] = wants ? own : -1;
            c->batch_row[at] = i;
            c->n_dense += dense;
            c->n_logits += wants;
        }
    }
    *row += c->n_logits;
    c->lone = n <= PI_ATTENTION_SPLIT_TOK;
    for (int32_t i = 1; i < n && c->lone; i++)
        for (int32_t j = 0; j < i; j++) c->lone &= c->seq[i] != c->seq[j];
}

/* How many of n tokens come before the one more that is computed as if alone than a chunk may have of these. */
static int32_t before_too_many(const uint8_t *alone, int32_t n) {
    int32_t n_few = 0, i = 0;
    while (i < n && n_few + alone[i] <= PI_FEW_TOK) n_few += alone[i++];
    return i;
}

/* How many tokens from first on are computed together. A device takes a run of tokens whose FFN is alike, of which the
 * last may want logits: first those that do not, then those that do, of these no more than it has room for. */
static int32_t chunk_length(const pi_session *s, const pi_batch *b, const uint8_t *alone, int32_t first) {
    const int32_t left = b->n_tokens - first;
    const int32_t most = left < s->options.n_batch ? left : s->options.n_batch;
    if (!s->hybrid) return before_too_many(alone + first, most);
    const bool split = s->options.sparsity == PI_SPARSITY_PREDICTED && !s->options.mask_prompts;
    int32_t n = 1, n_logits = has_logits(b, first);
    while (n < most && (has_logits(b, first + n) == has_logits(b, first) || (!split && has_logits(b, first + n))) &&
           !(has_logits(b, first + n - 1) && !has_logits(b, first + n)) && n_logits < s->hybrid->max_logits)
        n_logits += has_logits(b, first + n++);
    return n;
}

/* The chunk through the model. */
static void step(void *ctx, te_team *team) {
    pi_session *s = ctx;
    pi_step_embed(s, team);
    for (int32_t l = 0; l < s->model->info.n_layer; l++) pi_step_layer(s, team, l);
    pi_step_head(s, team);
}

static pi_status forward(pi_session *s) {
    const pi_model *m = s->model;
    const int64_t t0 = te_os_now_ns();
    if (s->hybrid)
        PI_TRY(pi_hybrid_run(s->hybrid));
    else
        te_pool_run(s->pool, step, s);
    s->last_bytes += (int64_t)(pi_row_bytes(&m->token_embd) * (size_t)s->chunk.n_tok);
    if (s->chunk.n_logits) s->last_bytes += pi_mat_bytes(&m->output);
    s->last_ns += te_os_now_ns() - t0;
    return PI_OK;
}

static pi_status feed(pi_session *s, const pi_batch *b, int32_t *to, int32_t *pos, uint8_t *alone) {
    int32_t n_logits = 0, row = 0;
    PI_TRY(check_batch(s, b, to, &n_logits));
    PI_TRY(reserve_logits(s, n_logits));
    s->logits_rows = n_logits;
    s->last_bytes = s->last_ns = 0;
    for (int32_t i = b->n_tokens - 1; i >= 0; i--) pos[i] = --to[batch_seq(b, i)];
    choose_ways(s, b, pos, to, alone);
    /* Memory for all chunks is certain (check_batch); lengths grow chunk by chunk. */
    for (int32_t first = 0, n = 0; first < b->n_tokens; first += n) {
        n = chunk_length(s, b, alone, first);
        for (int32_t i = first; i < first + n; i++) pi_kv_extend(&s->kv, batch_seq(b, i), pos[i] + 1);
        fill_chunk(s, b, alone, first, n, pos, &row);
        const pi_status st = forward(s);
        s->n_counted += st == PI_OK ? (uint64_t)n : 0;
        if (st == PI_OK) continue;
        for (int32_t i = b->n_tokens - 1; i >= 0; i--) /* the first token of a sequence says how long it was */
            if (s->kv.seq[batch_seq(b, i)].length > pos[i]) pi_kv_cut(&s->kv, batch_seq(b, i), pos[i]);
        s->logits_rows = 0;
        return st;
    }
    return PI_OK;
}

pi_status pi_session_feed(pi_session *s, const pi_batch *b) {
    if (!s || !b || b->n_tokens < 1 || !b->token)
        return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_feed: a batch needs at least one token");
    int32_t *to = malloc(3 * sizeof(int32_t) * (size_t)s->kv.n_seq),
            *pos = calloc((size_t)b->n_tokens, sizeof(int32_t));
    uint8_t *alone = calloc((size_t)b->n_tokens, 1);
    pi_status st;
    pi_session_lock(s);
    if (!to || !pos || !alone)
        st = PI_FAIL(PI_ERROR_MEMORY, "out of memory for a batch of %d tokens", b->n_tokens);
    else
        st = feed(s, b, to, pos, alone);
    pi_session_unlock(s);
    free(to);
    free(pos);
    free(alone);
    return st;
}

/* Row index of rows of n floats that the last feed left at *base, or NULL. */
static float *kept_row(pi_session *s, float *const *base, int32_t index, int32_t n) {
    pi_session_lock(s);
    float *row = index < 0 || index >= s->logits_rows ? NULL : *base + (size_t)index * (size_t)n;
    pi_session_unlock(s);
    return row;
}

float *pi_session_logits(pi_session *s, int32_t index) {
    return kept_row(s, &s->logits, index, s->model->info.n_vocab);
}

const float *pi_session_hidden(pi_session *s, int32_t index) {
    return kept_row(s, &s->hidden, index, s->model->info.n_embd);
}

pi_status pi_session_last_step(const pi_session *s, int32_t layer, pi_layer_step *out) {
    if (!s || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_last_step: session or out is NULL");
    if (layer < 0 || layer >= s->model->info.n_layer)
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d is out of range 0..%d", layer, s->model->info.n_layer - 1);
    pi_session_lock(s);
    *out = s->step[layer];
    pi_session_unlock(s);
    return PI_OK;
}

pi_status pi_session_last_total(const pi_session *s, int64_t *bytes, float *us) {
    if (!s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_last_total: session is NULL");
    pi_session_lock(s);
    if (bytes) *bytes = s->last_bytes;
    if (us) *us = (float)((double)s->last_ns * 1e-3);
    pi_session_unlock(s);
    return PI_OK;
}

static pi_status counts_of(pi_session *s, int32_t layer, uint32_t *count, uint64_t *n_tokens) {
    const size_t n = (size_t)s->model->info.n_ff;
    memcpy(count, s->fired + n * (size_t)layer, sizeof *count * n);
    if (s->hybrid) PI_TRY(pi_hybrid_add_fired(s->hybrid, layer, count));
    if (n_tokens) *n_tokens = s->n_counted;
    return PI_OK;
}

static pi_status check_counts(const pi_session *s) {
    if (!s->fired) return PI_FAIL(PI_ERROR_ARGUMENT, "the session was opened without count_neurons");
    return PI_OK;
}

pi_status pi_session_counts(pi_session *s, int32_t layer, uint32_t *count, uint64_t *n_tokens) {
    if (!s || !count) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_counts: session or count is NULL");
    if (layer < 0 || layer >= s->model->info.n_layer)
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d is out of range 0..%d", layer, s->model->info.n_layer - 1);
    PI_TRY(check_counts(s));
    pi_session_lock(s);
    const pi_status st = counts_of(s, layer, count, n_tokens);
    pi_session_unlock(s);
    return st;
}

pi_status pi_session_reset_counts(pi_session *s) {
    if (!s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_reset_counts: session is NULL");
    PI_TRY(check_counts(s));
    pi_session_lock(s);
    const pi_status st = s->hybrid ? pi_hybrid_reset_fired(s->hybrid) : PI_OK;
    if (st == PI_OK) {
        memset(s->fired, 0, sizeof *s->fired * (size_t)s->model->info.n_layer * (size_t)s->model->info.n_ff);
        s->n_counted = 0;
    }
    pi_session_unlock(s);
    return st;
}
