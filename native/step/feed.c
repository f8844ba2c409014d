/* feed.c - computing a batch: every token is checked and all memory reserved before the first chunk. */
#include <stdlib.h>

#include "../blocks/forward.h"
#include "../hybrid/hybrid.h"
#include "chunk.h"

pi_status pi_feed_check(const pi_session *s, const pi_batch *b, int32_t *to, int32_t *n_logits) {
    const pi_model_info *c = &s->model->info;
    *n_logits = 0;
    if (!b->hidden != !s->model->join.w)
        return PI_FAIL(PI_ERROR_ARGUMENT, "%s",
                       b->hidden ? "hidden states are given, and the model reads none"
                                 : "this head reads hidden states beside tokens, and none are given");
    if (s->n_taps && b->n_tokens > s->options.n_batch)
        return PI_FAIL(PI_ERROR_ARGUMENT, "a tapped feed of %d tokens is longer than n_batch, which is %d", b->n_tokens,
                       s->options.n_batch);
    for (int32_t i = 0; i < s->kv.n_seq; i++) to[i] = s->kv.seq[i].length;
    for (int32_t i = 0; i < b->n_tokens; i++) {
        const int32_t seq = pi_batch_seq(b, i);
        if (b->token[i] < 0 || b->token[i] >= c->n_vocab)
            return PI_FAIL(PI_ERROR_ARGUMENT, "token %d at index %d is out of range 0..%d", b->token[i], i,
                           c->n_vocab - 1);
        if (seq < 0 || seq >= s->kv.n_seq)
            return PI_FAIL(PI_ERROR_ARGUMENT, "sequence %d at index %d is out of range 0..%d", seq, i, s->kv.n_seq - 1);
        if (pi_batch_kind(b, i) > PI_TOKEN_SCORED)
            return PI_FAIL(PI_ERROR_ARGUMENT, "the token kind is %d at index %d, must be 0..%d", pi_batch_kind(b, i), i,
                           PI_TOKEN_SCORED);
        if (b->pos && b->pos[i] != to[seq])
            return PI_FAIL(PI_ERROR_ARGUMENT,
                           "position %d at index %d does not continue sequence %d, which has %d positions", b->pos[i],
                           i, seq, to[seq]);
        if (to[seq] >= s->options.n_ctx)
            return PI_FAIL(PI_ERROR_CONTEXT, "sequence %d is full: n_ctx is %d and %d tokens more were given", seq,
                           s->options.n_ctx, b->n_tokens - i);
        to[seq]++;
        *n_logits += pi_batch_has_logits(b, i);
    }
    int64_t needed = 0;
    for (int32_t i = 0; i < s->kv.n_seq; i++)
        needed +=
            to[i] > s->kv.seq[i].length ? pi_kv_blocks_needed(&s->kv, PI_KV_FULL, i, s->kv.seq[i].length, to[i]) : 0;
    const pi_kv_pool *pool = &s->kv.pool[PI_KV_FULL];
    if (needed > pool->n_free)
        return PI_FAIL(PI_ERROR_CONTEXT,
                       "the KV pool is full: %lld blocks of %d positions are needed, %d of %d are free",
                       (long long)needed, PI_KV_BLOCK, pool->n_free, pool->n_blocks);
    return PI_OK;
}

/* Room for them of the session's own; what the last feed left stays where there is none. */
static pi_status reserve_logits(pi_session *s, int32_t rows) {
    if (rows > s->logits_capacity) {
        const size_t nl = pi_mul(pi_mul((size_t)rows, (size_t)s->model->info.n_vocab), sizeof(float));
        const size_t nh = pi_mul(pi_mul((size_t)rows, (size_t)s->model->info.n_embd), sizeof(float));
        float *logits = malloc(nl), *hidden = malloc(nh);
        if (!logits || !hidden) {
            free(logits);
            free(hidden);
            return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d rows of logits (%zu bytes)", rows, nl);
        }
        free(s->own_logits);
        free(s->own_hidden);
        s->own_logits = logits;
        s->own_hidden = hidden;
        s->logits_capacity = rows;
    }
    s->logits = s->own_logits;
    s->largest = NULL;
    s->hidden = s->own_hidden;
    return PI_OK;
}

static pi_status reserve_all(pi_session *s, int32_t rows) {
    if (!s->options.keep_hidden || rows <= s->all_capacity) return PI_OK;
    const size_t n = pi_mul(pi_mul((size_t)rows, (size_t)s->model->info.n_embd), sizeof(float));
    float *all = malloc(n);
    if (!all) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the hidden states of %d tokens (%zu bytes)", rows, n);
    free(s->all_hidden);
    s->all_hidden = all;
    s->all_capacity = rows;
    return PI_OK;
}

/* The chunk through the model. */
static void step(void *ctx, te_team *team) {
    pi_session *s = ctx;
    pi_step_embed(s, team);
    for (int32_t l = 0; l < s->model->info.n_layer; l++) {
        if (pi_step_ends_before(s, team, l)) return;
        pi_step_layer(s, team, l);
    }
    if (pi_step_ends_before(s, team, s->model->info.n_layer)) return;
    pi_step_hidden(s, team);
    pi_step_head(s, team);
}

/* Nothing in vendor/ stops so, and te_status has no value for it. */
static pi_status stopped(const pi_session *s) {
    (void)PI_FAIL(PI_ERROR_DEVICE, "the feed was ended by its stop function, in front of layer %d of %d", s->stop_layer,
                  s->model->info.n_layer);
    return PI_ERROR_STOPPED;
}

static pi_status forward(pi_session *s) {
    const pi_model *m = s->model;
    const int64_t t0 = te_os_now_ns();
    if (pi_step_is_stopped(s)) s->stop_layer = 0;
    if (s->stop_layer == 0) return stopped(s);
    pi_status st = PI_OK;
    if (s->hybrid)
        st = pi_hybrid_run(s->hybrid);
    else
        te_pool_run(s->pool, step, s);
    if (s->stop_layer <= m->info.n_layer) return stopped(s); /* whatever the devices say that were told to end */
    if (st != PI_OK) return st;
    s->last_bytes += (int64_t)(pi_row_bytes(&m->token_embd) * (size_t)s->chunk.n_tok);
    if (s->chunk.n_logits) s->last_bytes += pi_mat_bytes(&m->output);
    s->last_ns += te_os_now_ns() - t0;
    return PI_OK;
}

/* Arrays for one batch, as long as it is computed. */
typedef struct feed_room {
    int32_t *of_seq; /* [3 * n_seq] */
    int32_t *pos;    /* [n_tokens] */
    uint8_t *by_row; /* [n_tokens] */
} feed_room;

/* Several generated tokens may be guesses: states to go back to. Of a sequence's last ones that behind each is kept by the
 * blocks that make it, as far as there are places, of the last one its own; else there is a checkpoint at the beginning. */
static void keep_states(pi_session *s, const pi_cut *cut, int32_t *last) {
    const pi_batch *b = cut->batch;
    pi_states *states = &s->kv.states;
    if (!states->floats) return;
    pi_states_begin(states);
    for (int32_t q = 0; q < s->kv.n_seq; q++) last[q] = 0;
    for (int32_t i = b->n_tokens - 1; i >= 0; i--) {
        const int32_t q = pi_batch_seq(b, i), pos = cut->pos[i];
        if (pi_batch_kind(b, i) != PI_TOKEN_GENERATED) continue;
        /* down to last[q] there are places */
        if (!last[q] || (last[q] == pos + 2 && pi_states_reserve(states, q, pos + 1))) last[q] = pos + 1;
    }
    for (int32_t i = 0; i < b->n_tokens; i++) {
        const int32_t q = pi_batch_seq(b, i), length = s->kv.seq[q].length;
        if (pi_batch_kind(b, i) == PI_TOKEN_GENERATED && cut->pos[i] == length + 1 && last[q] > length + 1)
            pi_states_keep(states, q, length, true);
    }
}

void pi_feed_undo(pi_session *s, int32_t n, const int32_t *seq, const int32_t *pos) {
    for (int32_t i = n - 1; i >= 0; i--) {  /* the first token of a sequence says how long it was */
        const int32_t q = seq ? seq[i] : 0; /* places for states behind its tokens are forgotten in any case */
        if (s->kv.seq[q].length >= pos[i]) pi_kv_cut(&s->kv, q, pi_kv_reachable(&s->kv, q, pos[i]));
    }
}

static pi_status feed(pi_session *s, const pi_batch *b, const feed_room *room) {
    int32_t n_logits = 0, row = 0, *to = room->of_seq;
    const pi_cut cut = {b, room->pos, room->by_row};
    PI_TRY(pi_feed_check(s, b, to, &n_logits));
    PI_TRY(reserve_all(s, b->n_tokens));
    PI_TRY(reserve_logits(s, n_logits));
    s->logits_rows = n_logits;
    s->all_rows = s->options.keep_hidden ? b->n_tokens : 0;
    s->given = b->hidden;
    s->asking = b;
    s->asked_ns = te_os_now_ns();
    s->is_stopped = false;
    s->stop_layer = INT32_MAX;
    s->last_bytes = s->last_ns = 0;
    for (int32_t i = b->n_tokens - 1; i >= 0; i--) room->pos[i] = --to[pi_batch_seq(b, i)];
    pi_chunk_choose_kernels(s, &cut, room->of_seq);
    keep_states(s, &cut, room->of_seq);
    /* Memory for all chunks is certain (pi_feed_check); lengths grow chunk by chunk. */
    for (int32_t first = 0, n = 0; first < b->n_tokens; first += n) {
        n = pi_chunk_length(s, &cut, first);
        for (int32_t i = first; i < first + n; i++) pi_kv_extend(&s->kv, pi_batch_seq(b, i), cut.pos[i] + 1);
        pi_chunk_fill(s, &cut, first, n, &row);
        const pi_status st = forward(s);
        if (st == PI_OK) pi_chunk_keep(s, &cut);
        s->n_counted += s->stop_layer > 0 ? (uint64_t)n : 0; /* of a chunk that failed some layers have counted */
        if (st == PI_OK) continue;
        pi_feed_undo(s, b->n_tokens, b->seq, cut.pos);
        s->logits_rows = s->all_rows = 0;
        return st;
    }
    return PI_OK;
}

pi_status pi_feed_locked(pi_session *s, const pi_batch *b) {
    const size_t n = (size_t)b->n_tokens;
    const feed_room room = {malloc(3 * sizeof(int32_t) * (size_t)s->kv.n_seq), calloc(n, sizeof(int32_t)),
                            calloc(n, 1)};
    const pi_status st = room.of_seq && room.pos && room.by_row
                             ? feed(s, b, &room)
                             : PI_FAIL(PI_ERROR_MEMORY, "out of memory for a batch of %d tokens", b->n_tokens);
    s->asking = NULL;
    free(room.of_seq);
    free(room.pos);
    free(room.by_row);
    return st;
}

pi_status pi_session_feed(pi_session *s, const pi_batch *b) {
    if (!s || !b || b->n_tokens < 1 || !b->token)
        return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_feed: a batch needs at least one token");
    pi_session_lock(s);
    pi_status st = pi_part_settle(s);
    if (st == PI_OK) st = pi_feed_locked(s, b);
    pi_session_unlock(s);
    return st;
}

/* A row of n floats that the last feed left, or NULL. */
static float *kept_row(pi_session *s, float *const *base, int32_t index, int32_t n) {
    pi_session_lock(s);
    float *row = index < 0 || index >= s->logits_rows ? NULL : *base + (size_t)index * (size_t)n;
    pi_session_unlock(s);
    return row;
}

float *pi_session_logits(pi_session *s, int32_t index) {
    if (!s) return NULL;
    pi_session_lock(s);
    const bool is_there = !s->hybrid || pi_hybrid_bring_rows(s->hybrid) == PI_OK;
    pi_session_unlock(s);
    return is_there ? kept_row(s, &s->logits, index, s->model->info.n_vocab) : NULL;
}

const float *pi_session_all_hidden(pi_session *s) {
    if (!s) return NULL;
    pi_session_lock(s);
    const float *all = s->all_rows ? s->all_hidden : NULL;
    pi_session_unlock(s);
    return all;
}

const float *pi_session_hidden(pi_session *s, int32_t index) {
    return s ? kept_row(s, &s->hidden, index, s->model->info.n_embd) : NULL;
}
