/* sequence.c - cutting, copying, dropping, shifting and saving the sequences of a session. */
#include <stdlib.h>
#include <string.h>

#include "chunk.h"

static pi_status check_seq(const pi_session *s, int32_t seq) {
    if (!s) return PI_FAIL(PI_ERROR_ARGUMENT, "the session is NULL");
    if (seq < 0 || seq >= s->kv.n_seq)
        return PI_FAIL(PI_ERROR_ARGUMENT, "sequence %d is out of range 0..%d", seq, s->kv.n_seq - 1);
    return PI_OK;
}

int32_t pi_seq_length(const pi_session *s, int32_t seq) {
    if (!s || seq < 0 || seq >= s->kv.n_seq) return -1;
    pi_session_lock(s);
    const int32_t n = s->kv.seq[seq].length;
    pi_session_unlock(s);
    return n;
}

/* A number of positions that a sequence has, and can be taken back to. */
static pi_status check_reachable(const pi_session *s, const char *verb, int32_t seq, int32_t n) {
    const int32_t have = s->kv.seq[seq].length;
    if (n < 0 || n > have)
        return PI_FAIL(PI_ERROR_ARGUMENT, "cannot %s %d positions of sequence %d, which has %d", verb, n, seq, have);
    const int32_t reachable = pi_kv_reachable(&s->kv, seq, n);
    if (n != reachable && s->kv.states.floats)
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "cannot %s %d of the %d positions of sequence %d: recurrent layers (%s) can go back to %d only",
                       verb, n, have, seq, s->model->arch->name, reachable);
    if (n != reachable)
        return PI_FAIL(
            PI_ERROR_UNSUPPORTED,
            "cannot %s %d of the %d positions of sequence %d: layers see the last %d of them, and hold those "
            "from position %d on",
            verb, n, have, seq, s->kv.window, pi_kv_held_from(&s->kv, seq));
    return PI_OK;
}

int32_t pi_seq_reachable(const pi_session *s, int32_t seq, int32_t n) {
    if (!s || seq < 0 || seq >= s->kv.n_seq || n < 0) return -1;
    pi_session_lock(s);
    const int32_t reachable = pi_kv_reachable(&s->kv, seq, n);
    pi_session_unlock(s);
    return reachable;
}

static pi_status cut(pi_session *s, int32_t seq, int32_t n_keep) {
    PI_TRY(check_reachable(s, "keep", seq, n_keep));
    pi_kv_cut(&s->kv, seq, n_keep);
    return PI_OK;
}

pi_status pi_seq_cut(pi_session *s, int32_t seq, int32_t n_keep) {
    PI_TRY(check_seq(s, seq));
    pi_session_lock(s);
    pi_status st = pi_part_settle_seq(s, seq);
    if (st == PI_OK) st = cut(s, seq, n_keep);
    pi_session_unlock(s);
    return st;
}

pi_status pi_seq_drop(pi_session *s, int32_t seq) { return pi_seq_cut(s, seq, 0); }

static pi_status copy(pi_session *s, int32_t dst, int32_t src, int32_t n) {
    PI_TRY(check_reachable(s, "copy", src, n));
    pi_kv_copy(&s->kv, dst, src, n);
    return PI_OK;
}

pi_status pi_seq_copy(pi_session *s, int32_t dst, int32_t src, int32_t n) {
    PI_TRY(check_seq(s, dst));
    PI_TRY(check_seq(s, src));
    pi_session_lock(s);
    pi_status st = pi_part_settle_seq(s, dst);
    if (st == PI_OK) st = pi_part_settle_copy(s, src, n);
    if (st == PI_OK) st = copy(s, dst, src, n);
    pi_session_unlock(s);
    return st;
}

/* ---- context shift ---- */

typedef struct shift_task {
    pi_session *s;
    pi_kv_shift shift;
} shift_task;

static void shift_step(void *ctx, te_team *team) {
    const shift_task *t = ctx;
    pi_kv_shift_part(&t->s->kv, &t->shift, team->ith, team->nth, pi_scratch(t->s, team));
}

static pi_status shift(pi_session *s, int32_t seq, int32_t n_keep, int32_t n_drop) {
    const int32_t n = s->kv.seq[seq].length;
    shift_task task = {.s = s};
    if (s->model->arch->learned_pos)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "a model with learned positions (%s) cannot shift its context",
                       s->model->arch->name);
    if (s->kv.states.floats)
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "a model with recurrent layers (%s) cannot shift its context: their states hold what is to be "
                       "dropped",
                       s->model->arch->name);
    if (s->model->arch->norm_after_rope)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "a model that norms keys behind RoPE (%s) cannot shift its context",
                       s->model->arch->name);
    if (n_keep < 0 || n_drop < 1 || n_keep > n || n_drop > n - n_keep)
        return PI_FAIL(PI_ERROR_ARGUMENT, "cannot keep %d and drop %d of the %d positions of sequence %d", n_keep,
                       n_drop, n, seq);
    PI_TRY(pi_kv_shift_begin(&s->kv, seq, n_keep, n_drop, &task.shift));
    pi_status st = s->kv.device.has ? pi_kv_shift_devices(&s->kv, &task.shift, s->scratch) : PI_OK;
    if (st == PI_OK) st = pi_kv_device_status(&s->kv);
    if (st != PI_OK) { /* some layers may have been moved */
        pi_kv_cut(&s->kv, seq, pi_kv_reachable(&s->kv, seq, n_keep));
        return st;
    }
    te_pool_run(s->pool, shift_step, &task);
    pi_kv_cut(&s->kv, seq, n - n_drop);
    return PI_OK;
}

pi_status pi_seq_shift(pi_session *s, int32_t seq, int32_t n_keep, int32_t n_drop) {
    PI_TRY(check_seq(s, seq));
    pi_session_lock(s);
    pi_status st = pi_part_settle(s);
    if (st == PI_OK) st = shift(s, seq, n_keep, n_drop);
    pi_session_unlock(s);
    return st;
}

/* ---- saved state: header, then per layer and KV head the K rows, then the V rows, of all positions that are held;
 * then what recurrent layers remember ---- */

typedef struct state_header {
    char magic[8];
    int32_t n_layer, n_head_kv, n_embd_head, n_embd, type_k, type_v, length;
    int32_t held_from; /* the first position of layers with a window */
    uint64_t n_bytes;
} state_header;
static const char state_magic[8] = "pi-kv-1";

/* The first position that a state has of layer l. */
static int32_t state_from(const pi_session *s, int32_t l, int32_t held_from) {
    return s->kv.layer[l].pool == PI_KV_WINDOW ? held_from : 0;
}

static state_header header_of(const pi_session *s, int32_t length, int32_t held_from) {
    const pi_model_info *i = &s->model->info;
    state_header h = {.n_layer = i->n_layer,
                      .n_head_kv = i->n_head_kv,
                      .n_embd_head = i->n_embd_head,
                      .n_embd = i->n_embd,
                      .type_k = s->kv.type_k,
                      .type_v = s->kv.type_v,
                      .length = length,
                      .held_from = held_from,
                      .n_bytes = sizeof(state_header) + (length ? s->kv.states.floats * sizeof(float) : 0)};
    for (int32_t l = 0; l < i->n_layer; l++) {
        const pi_kv_layer *at = &s->kv.layer[l];
        if (!at->borrowed)
            h.n_bytes +=
                (uint64_t)(length - state_from(s, l, held_from)) * (uint64_t)at->n_head * (at->row_k + at->row_v);
    }
    memcpy(h.magic, state_magic, sizeof h.magic);
    return h;
}

/* Copies all rows of seq out of the pools (save) or into them. The state may have more of layers with a window than seq. */
static void copy_rows(pi_session *s, int32_t seq, int32_t held_from, char *p, bool save) {
    const pi_seq *q = &s->kv.seq[seq];
    for (int32_t l = 0; l < s->model->info.n_layer; l++)
        for (int32_t h = 0; !s->kv.layer[l].borrowed && h < s->kv.layer[l].n_head; h++)
            for (int32_t kind = 0; kind < 2; kind++) {
                const pi_kv_device *device = &s->kv.device;
                const pi_kv_layer *layer = &s->kv.layer[l];
                const size_t each = kind ? layer->row_v : layer->row_k;
                if (!each) continue; /* V is in K's row */
                const pi_table *t = &q->of[layer->pool];
                char *pool = kind ? layer->v : layer->k; /* NULL: on a device */
                int32_t pos = t->first * PI_KV_BLOCK;
                p += (size_t)(pos - state_from(s, l, held_from)) * each;
                for (; pos < q->length; pos += PI_KV_BLOCK) {
                    const int32_t n = q->length - pos < PI_KV_BLOCK ? q->length - pos : PI_KV_BLOCK;
                    const size_t bytes = (size_t)n * each, at = pi_kv_at(layer, t, h, pos, each);
                    if (!pool && save)
                        device->read(device->ctx, l, kind, at, p, bytes);
                    else if (!pool)
                        device->write(device->ctx, l, kind, at, p, bytes);
                    else if (save)
                        memcpy(p, pool + at, bytes);
                    else
                        memcpy(pool + at, p, bytes);
                    p += bytes;
                }
            }
    if (!q->length || !s->kv.states.floats) return;
    if (save)
        pi_states_save(&s->kv.states, seq, p);
    else
        pi_states_load(&s->kv.states, seq, p);
}

uint64_t pi_seq_state_bytes(const pi_session *s, int32_t seq) {
    if (!s || seq < 0 || seq >= s->kv.n_seq) return 0;
    pi_session_lock(s);
    const state_header h = header_of(s, s->kv.seq[seq].length, pi_kv_held_from(&s->kv, seq));
    pi_session_unlock(s);
    return h.n_bytes;
}

pi_status pi_seq_state_save(pi_session *s, int32_t seq, void *out, uint64_t n_bytes) {
    PI_TRY(check_seq(s, seq));
    if (!out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_seq_state_save: out is NULL");
    pi_session_lock(s);
    pi_status st = pi_part_settle(s);
    const state_header h = header_of(s, s->kv.seq[seq].length, pi_kv_held_from(&s->kv, seq));
    if (st != PI_OK) {
        pi_session_unlock(s);
        return st;
    }
    if (n_bytes < h.n_bytes)
        st = PI_FAIL(PI_ERROR_ARGUMENT, "the state needs %llu bytes, the buffer has %llu",
                     (unsigned long long)h.n_bytes, (unsigned long long)n_bytes);
    else {
        memcpy(out, &h, sizeof h);
        copy_rows(s, seq, h.held_from, (char *)out + sizeof h, true);
        st = pi_kv_device_status(&s->kv);
    }
    pi_session_unlock(s);
    return st;
}

static pi_status state_load(pi_session *s, int32_t seq, const char *in, uint64_t n_bytes) {
    state_header h;
    if (n_bytes < sizeof h)
        return PI_FAIL(PI_ERROR_FORMAT, "a saved state has at least %zu bytes, this one %llu", sizeof h,
                       (unsigned long long)n_bytes);
    memcpy(&h, in, sizeof h);
    if (memcmp(h.magic, state_magic, sizeof h.magic) != 0)
        return PI_FAIL(PI_ERROR_FORMAT, "these %llu bytes are not a saved state", (unsigned long long)n_bytes);
    if (h.length < 0 || h.length > s->options.n_ctx)
        return PI_FAIL(PI_ERROR_CONTEXT, "the saved state has %d positions, n_ctx is %d", h.length, s->options.n_ctx);
    const bool possible = h.held_from >= 0 && h.held_from <= h.length && h.held_from % PI_KV_BLOCK == 0;
    const state_header want = header_of(s, h.length, possible ? h.held_from : 0);
    if (!possible || memcmp(&h, &want, sizeof h) != 0 || n_bytes != h.n_bytes)
        return PI_FAIL(PI_ERROR_FORMAT, "the saved state (%llu bytes) is not of this model's shape and KV types",
                       (unsigned long long)n_bytes);
    if (h.held_from && (s->kv.n_pools == 1 || h.held_from > h.length + 1 - s->kv.window))
        return PI_FAIL(PI_ERROR_FORMAT, "the saved state begins with position %d, behind what layers see", h.held_from);
    const int32_t kept = pi_kv_kept_from(&s->kv, h.length), from = kept > h.held_from ? kept : h.held_from;
    if (!pi_kv_has_room(&s->kv, seq, h.length, from))
        return PI_FAIL(PI_ERROR_CONTEXT, "the KV pool is full: no room for a saved state of %d positions", h.length);
    pi_kv_renew(&s->kv, seq, h.length, from);
    copy_rows(s, seq, h.held_from, (char *)(uintptr_t)in + sizeof h, false);
    const pi_status st = pi_kv_device_status(&s->kv);
    if (st != PI_OK) pi_kv_cut(&s->kv, seq, 0); /* what it holds now is nobody's */
    return st;
}

pi_status pi_seq_state_load(pi_session *s, int32_t seq, const void *in, uint64_t n_bytes) {
    PI_TRY(check_seq(s, seq));
    if (!in) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_seq_state_load: in is NULL");
    pi_session_lock(s);
    pi_status st = pi_part_settle(s);
    if (st == PI_OK) st = state_load(s, seq, in, n_bytes);
    pi_session_unlock(s);
    return st;
}
