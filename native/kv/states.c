/* states.c - states of sequences and their checkpoints. */
#include "states.h"

#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_os.h"

/* Of a sequence: one where its prompt's matrix products ended, one where guesses began. */
enum { CHECKPOINTS = 2, LINE = 16 };

static size_t whole_lines(size_t n_floats) { return (n_floats + LINE - 1) / LINE * LINE; }

size_t pi_states_places(int32_t n_seq, int32_t n_guesses) {
    return (size_t)n_seq * (1 + CHECKPOINTS) + (size_t)n_guesses;
}

size_t pi_states_bytes(const pi_model *m, int32_t n_seq, int32_t n_guesses) {
    return pi_mul(pi_mul(whole_lines(m->state_floats), pi_states_places(n_seq, n_guesses)), sizeof(float));
}

static void lay_out(pi_states *s) {
    size_t n = 0;
    for (int32_t l = 0; l < s->model->info.n_layer; l++) {
        const pi_block *b = pi_recurrent_of(&s->model->layer[l]);
        s->at[l] = n;
        if (b && !pi_states_on_device(s, l)) n += pi_recurrent_floats(&b->recurrent);
    }
    s->own_floats = whole_lines(n);
}

pi_status pi_states_init(pi_states *s, const pi_model *m, int32_t n_seq, int32_t n_guesses,
                         const pi_states_device *device) {
    *s = (pi_states){.model = m, .floats = whole_lines(m->state_floats), .n_seq = n_seq, .n_guesses = n_guesses};
    if (!s->floats) return PI_OK;
    if (device) s->device = *device;
    if (n_seq > INT32_MAX / (1 + CHECKPOINTS)) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d states", n_seq);
    s->n_checkpoints = CHECKPOINTS * n_seq;
    s->checkpoint = calloc((size_t)s->n_checkpoints + (size_t)n_guesses, sizeof *s->checkpoint);
    s->at = calloc((size_t)m->info.n_layer, sizeof *s->at);
    if (s->at) lay_out(s);
    s->n_bytes = pi_mul(pi_mul(s->own_floats, pi_states_places(n_seq, n_guesses)), sizeof(float));
    if (s->at && s->n_bytes) s->memory = te_os_alloc(s->n_bytes);
    if (s->checkpoint && s->at && (s->memory || !s->n_bytes)) return PI_OK;
    const size_t n = s->n_bytes;
    pi_states_free(s);
    return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the states of %d sequences and their checkpoints (%zu bytes)",
                   n_seq, n);
}

void pi_states_free(pi_states *s) {
    free(s->checkpoint);
    free(s->at);
    if (s->memory) te_os_free(s->memory, s->n_bytes);
    *s = (pi_states){0};
}

/* All that a sequence remembers to memory or from it: one of both is NULL. Returns its bytes. */
static size_t move(const pi_states *s, int32_t seq, char *to, const char *from) {
    size_t at = 0;
    for (int32_t l = 0; l < s->model->info.n_layer; l++) {
        const pi_block *b = pi_recurrent_of(&s->model->layer[l]);
        const size_t n = b ? pi_recurrent_floats(&b->recurrent) * sizeof(float) : 0;
        if (!n) continue;
        char *own = pi_states_on_device(s, l) ? NULL : (char *)pi_state_of(s, seq, l);
        if (own)
            memcpy(to ? to + at : own, to ? own : from + at, n);
        else if (to)
            s->device.read(s->device.ctx, l, seq, to + at);
        else
            s->device.write(s->device.ctx, l, seq, from + at);
        at += n;
    }
    return at;
}

void pi_states_save(const pi_states *s, int32_t seq, char *to) {
    const size_t n = move(s, seq, to, NULL);
    memset(to + n, 0, s->floats * sizeof(float) - n);
}

void pi_states_load(pi_states *s, int32_t seq, const char *from) { move(s, seq, NULL, from); }

typedef struct copy_task {
    float *to;
    const float *from;
    size_t n;
} copy_task;

static void copy_step(void *ctx, te_team *team) {
    const copy_task *t = ctx;
    int64_t lo, hi;
    te_share(team, (int64_t)t->n, LINE, &lo, &hi);
    if (hi > lo) memcpy(t->to + lo, t->from + lo, sizeof *t->to * (size_t)(hi - lo));
}

static void copy_state(const pi_states *s, int32_t to, int32_t from) {
    enum { WORTH = 1 << 17 }; /* floats that a team copies sooner than one thread */
    const size_t n = s->own_floats;
    copy_task task = {s->memory + n * (size_t)to, s->memory + n * (size_t)from, n};
    if (s->device.copy) s->device.copy(s->device.ctx, to, from);
    if (s->pool && n >= WORTH)
        te_pool_run(s->pool, copy_step, &task);
    else if (n)
        memcpy(task.to, task.from, sizeof *task.to * n);
}

int32_t pi_states_reachable(const pi_states *s, int32_t seq, int32_t length, int32_t n) {
    if (n >= length) return length;
    if (!s->floats) return n;
    int32_t best = 0;
    for (int32_t i = 0; i < s->n_checkpoints + s->n_guesses; i++) {
        const pi_checkpoint *c = &s->checkpoint[i];
        if (c->seq == seq && c->pos <= n && c->pos > best) best = c->pos;
    }
    return best;
}

static int32_t place_of(const pi_states *s, const pi_checkpoint *c) { return s->n_seq + (int32_t)(c - s->checkpoint); }

/* Where a new one of seq goes. */
static pi_checkpoint *room(pi_states *s, int32_t seq, int32_t pos, bool brief) {
    pi_checkpoint *oldest = &s->checkpoint[0];
    for (int32_t i = 0; i < s->n_checkpoints; i++) {
        pi_checkpoint *c = &s->checkpoint[i];
        if (c->pos && c->seq == seq && (c->pos == pos || (brief && c->brief))) return c;
        if ((c->pos ? c->used : 0) < (oldest->pos ? oldest->used : 0)) oldest = c;
    }
    return oldest;
}

void pi_states_keep(pi_states *s, int32_t seq, int32_t length, bool brief) {
    if (!s->floats || !length) return;
    pi_checkpoint *c = room(s, seq, length, brief);
    const bool is_there = c->pos == length && c->seq == seq;
    if (!is_there) copy_state(s, place_of(s, c), seq);
    *c = (pi_checkpoint){seq, length, is_there ? c->brief && brief : brief, ++s->clock};
}

bool pi_states_reserve(pi_states *s, int32_t seq, int32_t pos) {
    pi_checkpoint *oldest = NULL;
    for (int32_t i = s->n_checkpoints; i < s->n_checkpoints + s->n_guesses; i++) {
        pi_checkpoint *c = &s->checkpoint[i];
        const uint64_t used = c->pos ? c->used : 0;
        if (used <= s->began && (!oldest || used < (oldest->pos ? oldest->used : 0))) oldest = c;
    }
    if (!s->floats || !oldest) return false;
    *oldest = (pi_checkpoint){seq, pos, true, ++s->clock};
    return true;
}

int32_t pi_states_reserved(const pi_states *s, int32_t seq, int32_t pos) {
    for (int32_t i = s->n_checkpoints; i < s->n_checkpoints + s->n_guesses; i++) {
        const pi_checkpoint *c = &s->checkpoint[i];
        if (c->pos == pos && c->seq == seq && c->used > s->began) return place_of(s, c);
    }
    return -1;
}

void pi_states_copy(pi_states *s, int32_t dst, int32_t src, int32_t length, int32_t n) {
    if (!s->floats) return;
    pi_checkpoint *from = NULL;
    for (int32_t i = 0; i < s->n_checkpoints + s->n_guesses; i++) {
        pi_checkpoint *c = &s->checkpoint[i];
        if (c->pos && c->seq == src && c->pos == n) from = c;
        if (c->pos && c->seq == dst && (dst != src || c->pos > n)) c->pos = 0;
    }
    if (from && n != length) from->used = ++s->clock;
    const int32_t state = n == length ? src : from ? place_of(s, from) : dst;
    if (n && state != dst) copy_state(s, dst, state);
}
