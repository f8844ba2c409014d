/* sequence.c - cutting, copying, dropping, shifting and saving the sequences of a session. */
#include <stdlib.h>
#include <string.h>

#include "../state/state.h"

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
    if (n != reachable)
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "cannot %s %d of the %d positions of sequence %d: recurrent layers (%s) can go back to %d only",
                       verb, n, have, seq, s->model->arch->name, reachable);
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
    const pi_status st = cut(s, seq, n_keep);
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
    const pi_status st = copy(s, dst, src, n);
    pi_session_unlock(s);
    return st;
}

/* ---- context shift ---- */

typedef struct shift_task {
    pi_session *s;
    int32_t seq, n_keep, n_drop;
} shift_task;

static void shift_step(void *ctx, te_team *team) {
    const shift_task *t = ctx;
    pi_kv_move_down(&t->s->kv, t->seq, t->n_keep, t->n_drop, team->ith, team->nth, pi_scratch(t->s, team));
}

static pi_status shift(pi_session *s, int32_t seq, int32_t n_keep, int32_t n_drop) {
    pi_seq *q = &s->kv.seq[seq];
    const int32_t n = q->length;
    if (s->model->arch->learned_pos)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "a model with learned positions (%s) cannot shift its context",
                       s->model->arch->name);
    if (s->kv.states.floats)
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "a model with recurrent layers (%s) cannot shift its context: their states hold what is to be "
                       "dropped",
                       s->model->arch->name);
    if (n_keep < 0 || n_drop < 1 || n_keep > n || n_drop > n - n_keep)
        return PI_FAIL(PI_ERROR_ARGUMENT, "cannot keep %d and drop %d of the %d positions of sequence %d", n_keep,
                       n_drop, n, seq);
    if (pi_kv_blocks_needed(&s->kv, seq, n_keep, n - n_drop) > s->kv.n_free)
        return PI_FAIL(PI_ERROR_CONTEXT,
                       "the KV pool is full: shifting sequence %d must copy shared blocks, %d are free", seq,
                       s->kv.n_free);
    pi_kv_own(&s->kv, seq, n_keep, n - n_drop);
    if (s->kv.device.has) PI_TRY(pi_kv_move_on_device(&s->kv, seq, n_keep, n_drop, s->scratch));
    const pi_status st = pi_kv_device_status(&s->kv);
    if (st != PI_OK) { /* some layers may have been moved */
        pi_kv_cut(&s->kv, seq, n_keep);
        return st;
    }
    shift_task task = {s, seq, n_keep, n_drop};
    te_pool_run(s->pool, shift_step, &task);
    pi_kv_cut(&s->kv, seq, n - n_drop);
    return PI_OK;
}

pi_status pi_seq_shift(pi_session *s, int32_t seq, int32_t n_keep, int32_t n_drop) {
    PI_TRY(check_seq(s, seq));
    pi_session_lock(s);
    const pi_status st = shift(s, seq, n_keep, n_drop);
    pi_session_unlock(s);
    return st;
}

/* ---- saved state: header, then per layer and KV head the K rows, then the V rows, of all positions; then what layers
 * with a state remember ---- */

typedef struct state_header {
    char magic[8];
    int32_t n_layer, n_head_kv, n_embd_head, n_embd, type_k, type_v, length, state_floats;
    uint64_t n_bytes;
} state_header;
static const char state_magic[8] = "pi-kv-1";

static uint64_t state_bytes(const pi_session *s, int64_t length) {
    const pi_model_info *i = &s->model->info;
    uint64_t n = 0;
    for (int32_t l = 0; l < i->n_layer; l++) n += pi_kv_has(&s->kv, l);
    return sizeof(state_header) + (uint64_t)length * n * (uint64_t)i->n_head_kv * (s->kv.row_k + s->kv.row_v) +
           (length ? s->kv.states.floats * sizeof(float) : 0);
}

static state_header header_of(const pi_session *s, int32_t length) {
    const pi_model_info *i = &s->model->info;
    state_header h = {.n_layer = i->n_layer,
                      .n_head_kv = i->n_head_kv,
                      .n_embd_head = i->n_embd_head,
                      .n_embd = i->n_embd,
                      .type_k = s->kv.type_k,
                      .type_v = s->kv.type_v,
                      .length = length,
                      .state_floats = (int32_t)s->kv.states.floats,
                      .n_bytes = state_bytes(s, length)};
    memcpy(h.magic, state_magic, sizeof h.magic);
    return h;
}

/* Copies all rows of seq out of the pool (save) or into it. */
static void copy_rows(pi_session *s, int32_t seq, char *p, bool save) {
    const pi_seq *q = &s->kv.seq[seq];
    for (int32_t l = 0; l < s->model->info.n_layer; l++)
        for (int32_t h = 0; pi_kv_has(&s->kv, l) && h < s->model->info.n_head_kv; h++)
            for (int32_t kind = 0; kind < 2; kind++)
                for (int32_t pos = 0; pos < q->length; pos += PI_KV_BLOCK) {
                    const int32_t n = q->length - pos < PI_KV_BLOCK ? q->length - pos : PI_KV_BLOCK;
                    const pi_kv_device *device = &s->kv.device;
                    const size_t each = kind ? s->kv.row_v : s->kv.row_k, bytes = (size_t)n * each;
                    const size_t at = pi_kv_at(&s->kv, q, h, pos, each);
                    char *pool = kind ? s->kv.v[l] : s->kv.k[l]; /* NULL: on a device */
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
    if (!q->length || !s->kv.states.floats) return;
    float *state = pi_state_of(&s->kv.states, seq);
    memcpy(save ? p : (char *)state, save ? (char *)state : p, s->kv.states.floats * sizeof *state);
}

uint64_t pi_seq_state_bytes(const pi_session *s, int32_t seq) {
    const int32_t n = pi_seq_length(s, seq);
    return n < 0 ? 0 : state_bytes(s, n);
}

pi_status pi_seq_state_save(pi_session *s, int32_t seq, void *out, uint64_t n_bytes) {
    PI_TRY(check_seq(s, seq));
    if (!out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_seq_state_save: out is NULL");
    pi_status st = PI_OK;
    pi_session_lock(s);
    const state_header h = header_of(s, s->kv.seq[seq].length);
    if (n_bytes < h.n_bytes)
        st = PI_FAIL(PI_ERROR_ARGUMENT, "the state needs %llu bytes, the buffer has %llu",
                     (unsigned long long)h.n_bytes, (unsigned long long)n_bytes);
    else {
        memcpy(out, &h, sizeof h);
        copy_rows(s, seq, (char *)out + sizeof h, true);
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
    const state_header want = header_of(s, h.length);
    if (memcmp(&h, &want, sizeof h) != 0 || n_bytes != h.n_bytes)
        return PI_FAIL(PI_ERROR_FORMAT, "the saved state (%llu bytes) is not of this model's shape and KV types",
                       (unsigned long long)n_bytes);
    /* Blocks that only this sequence holds come back when it is dropped. */
    const pi_seq *q = &s->kv.seq[seq];
    int32_t freed = 0;
    for (int32_t b = 0; b < q->n_block; b++) freed += s->kv.refs[q->block[b]] == 1;
    if ((h.length + PI_KV_BLOCK - 1) / PI_KV_BLOCK > s->kv.n_free + freed)
        return PI_FAIL(PI_ERROR_CONTEXT, "the KV pool is full: no room for a saved state of %d positions", h.length);
    pi_kv_cut(&s->kv, seq, 0);
    pi_kv_extend(&s->kv, seq, h.length);
    copy_rows(s, seq, (char *)(uintptr_t)in + sizeof h, false);
    const pi_status st = pi_kv_device_status(&s->kv);
    if (st != PI_OK) pi_kv_cut(&s->kv, seq, 0); /* what it holds now is nobody's */
    return st;
}

pi_status pi_seq_state_load(pi_session *s, int32_t seq, const void *in, uint64_t n_bytes) {
    PI_TRY(check_seq(s, seq));
    if (!in) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_seq_state_load: in is NULL");
    pi_session_lock(s);
    const pi_status st = state_load(s, seq, in, n_bytes);
    pi_session_unlock(s);
    return st;
}
