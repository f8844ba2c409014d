/* choose.c - feeds that also choose what follows: of one sequence, of many, and of many round after round. */
#include <stdlib.h>

#include "../../vendor/core/te_os.h"
#include "../hybrid/hybrid.h"
#include "../sample/sampler.h"
#include "chunk.h"

enum { CHOICES_ALONE = 4, NEEDS_ROW = -2 };

/* Feeds the token and chooses what follows, under one lock: another thread's feed would replace the logits. */
static pi_status next_locked(pi_session *s, const pi_batch *batch, pi_sampler *sampler, int32_t *next) {
    int32_t chosen = -1;
    PI_TRY(pi_part_settle(s));
    PI_TRY(pi_feed_locked(s, batch));
    *next = batch->token[0];
    PI_TRY(pi_sampler_sample(sampler, s->logits, &chosen));
    PI_TRY(pi_sampler_accept(sampler, chosen));
    *next = chosen;
    return PI_OK;
}

pi_status pi_session_next(pi_session *s, int32_t seq, int32_t pos, int32_t token, pi_sampler *sampler, int32_t *next) {
    if (!s || !sampler || !next) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_next: session, sampler or next is NULL");
    *next = -1;
    const int32_t n_vocab = s->model->info.n_vocab, n_sampled = pi_sampler_n_vocab(sampler);
    if (n_sampled != n_vocab)
        return PI_FAIL(PI_ERROR_ARGUMENT, "there are %d logits, of this sampler they must be %d", n_vocab, n_sampled);
    const pi_batch batch = {.n_tokens = 1, .token = &token, .pos = &pos, .seq = &seq};
    pi_session_lock(s);
    const pi_status st = next_locked(s, &batch, sampler, next);
    pi_session_unlock(s);
    return st;
}

/* What many samplers choose of. */
typedef struct choices {
    pi_session *s;
    const int32_t *row;
    pi_sampler *const *sampler;
    int32_t *chosen;
    int32_t n;
} choices;

static void choose(const choices *c, int32_t i) {
    const pi_session *s = c->s;
    const int32_t row = c->row[i];
    int32_t token = -1;
    pi_status st = PI_OK;
    if (s->largest && s->n_found[row] < 1) {
        c->chosen[i] = NEEDS_ROW;
        return;
    }
    if (s->largest)
        token = pi_sampler_sample_largest(c->sampler[i], s->largest + (ptrdiff_t)row * PI_LARGEST, s->n_found[row]);
    else
        st = pi_sampler_sample(c->sampler[i], s->logits + (size_t)row * (size_t)s->model->info.n_vocab, &token);
    c->chosen[i] = st == PI_OK && pi_sampler_accept(c->sampler[i], token) == PI_OK ? token : -1;
}

static void choose_shared(void *ctx, te_team *team) {
    const choices *c = ctx;
    for (int64_t i; (i = te_counter_take(team, 0, 1)) < c->n;) choose(c, (int32_t)i);
}

static pi_status check_choices(const pi_session *s, const pi_batch *b, const choices *c) {
    int32_t n_logits = 0;
    for (int32_t i = 0; i < b->n_tokens; i++) n_logits += pi_batch_has_logits(b, i);
    for (int32_t i = 0; i < c->n; i++) {
        if (!c->sampler[i] || pi_sampler_n_vocab(c->sampler[i]) != s->model->info.n_vocab)
            return PI_FAIL(PI_ERROR_ARGUMENT, "sampler %d is NULL or of another vocabulary than the model's", i);
        if (c->row[i] < 0 || c->row[i] >= n_logits)
            return PI_FAIL(PI_ERROR_ARGUMENT, "sampler %d is for row %d, and the batch has %d with logits", i,
                           c->row[i], n_logits);
    }
    return PI_OK;
}

/* How many of each row's largest logits are all that the choices ask for; 0: rows, which somebody else may ask for, too. */
static int32_t count_largest(const pi_batch *b, const choices *c) {
    int32_t n_logits = 0, most = 0;
    for (int32_t i = 0; i < b->n_tokens; i++) n_logits += pi_batch_has_logits(b, i);
    for (int32_t i = 0; i < c->n; i++) {
        const int32_t n = pi_sampler_n_largest(c->sampler[i]);
        if (n == 0 || n > PI_LARGEST) return 0;
        most = n > most ? n : most;
    }
    return n_logits == c->n ? most : 0;
}

/* Choices by rows that were not brought before. */
static void choose_by_rows(const choices *c) {
    bool are_there = true;
    for (int32_t i = 0; i < c->n; i++) {
        if (c->chosen[i] != NEEDS_ROW) continue;
        c->chosen[i] = -1;
        are_there = are_there && pi_hybrid_bring_rows(c->s->hybrid) == PI_OK;
        if (are_there) choose(c, i);
    }
}

/* The same of many: feeds, and has the samplers choose. The caller holds the lock. */
static pi_status feed_and_choose(pi_session *s, const pi_batch *b, const choices *c) {
    s->n_largest = s->hybrid ? count_largest(b, c) : 0;
    const pi_status st = pi_feed_locked(s, b);
    s->n_largest = 0;
    PI_TRY(st);
    /* Waking the team takes as long as a few choices by rows, or as all by the largest logits. */
    if (c->n > CHOICES_ALONE && !s->largest)
        te_pool_run(s->hybrid ? s->hybrid->few : s->pool, choose_shared, (void *)c);
    else
        for (int32_t i = 0; i < c->n; i++) choose(c, i);
    choose_by_rows(c);
    return PI_OK;
}

pi_status pi_session_feed_choose(pi_session *s, const pi_batch *b, int32_t n, const int32_t *row,
                                 pi_sampler *const *sampler, int32_t *chosen) {
    if (!s || !b || b->n_tokens < 1 || !b->token || n < 0 || (n > 0 && (!row || !sampler || !chosen)))
        return PI_FAIL(PI_ERROR_ARGUMENT,
                       "pi_session_feed_choose: a batch needs at least one token, and choices what they choose by");
    const choices c = {s, row, sampler, chosen, n};
    PI_TRY(check_choices(s, b, &c));
    pi_session_lock(s);
    pi_status st = pi_part_settle_feed(s, b);
    if (st == PI_OK) st = feed_and_choose(s, b, &c);
    pi_session_unlock(s);
    return st;
}

/* ---- round after round ---- */

static bool is_end(const pi_rounds *r, int32_t token) {
    for (int32_t i = 0; i < r->n_end; i++)
        if (r->end[i] == token) return true;
    return token < 0; /* its choice failed */
}

/* Says how many rounds are done, and whether no more come, to those who wait for it. */
static void tell(pi_rounds *r, int32_t n_done, bool is_over) {
    __atomic_store_n(&r->state, (uint32_t)n_done << 1 | is_over, __ATOMIC_RELEASE);
    te_os_wake(&r->state);
}

/* One round, with its layers of a part. */
static pi_status round_of(pi_session *s, pi_rounds *r, const pi_batch *b, const choices *c) {
    const bool has_layers = r->part_layers && r->n <= PI_MANY && s->part.n_tok;
    if (has_layers)
        pi_hybrid_part_ask(s->hybrid, r->part_layers);
    else
        PI_TRY(pi_part_settle(s));
    const pi_status st = feed_and_choose(s, b, c);
    if (has_layers && st == PI_OK) r->part_ns += pi_hybrid_part_ns(s->hybrid);
    if (has_layers) pi_hybrid_part_ask(s->hybrid, 0); /* where nothing ran: the next step is for somebody else */
    r->part_left = pi_part_look(s);
    return st;
}

static pi_status run_rounds(pi_session *s, pi_rounds *r, const int32_t *row, const uint8_t *kind, int32_t *n_done) {
    const int32_t *token = r->token;
    for (;;) {
        int32_t *chosen = r->chosen + (size_t)*n_done * (size_t)r->n;
        const pi_batch b = {.n_tokens = r->n, .token = token, .seq = r->seq, .kind = kind};
        const choices c = {s, row, r->sampler, chosen, r->n};
        if (*n_done == 0) PI_TRY(check_choices(s, &b, &c));
        pi_session_lock(s);
        const pi_status st = round_of(s, r, &b, &c);
        pi_session_unlock(s);
        PI_TRY(st);
        const uint32_t stop = __atomic_load_n(&r->stop, __ATOMIC_ACQUIRE);
        ++*n_done;
        bool is_last = *n_done >= r->most || (stop && (uint32_t)*n_done >= stop);
        is_last |= r->part_layers && !r->part_left; /* who asked for them has another part */
        for (int32_t i = 0; i < r->n && !is_last; i++) is_last = is_end(r, chosen[i]);
        if (is_last || te_os_now_ns() >= r->until_ns) return PI_OK;
        tell(r, *n_done, false);
        token = chosen;
    }
}

/* A sequence that is there twice, or -1. */
static int32_t twice(const pi_rounds *r) {
    for (int32_t i = 1; i < r->n; i++)
        for (int32_t j = 0; j < i; j++)
            if (r->seq[i] == r->seq[j]) return r->seq[i];
    return -1;
}

pi_status pi_session_rounds(pi_session *s, pi_rounds *r) {
    if (!s || !r || r->n < 1 || r->most < 1 || r->n_end < 0 || r->part_layers < 0 || !r->seq || !r->sampler ||
        !r->token || !r->chosen || (r->n_end && !r->end)) {
        if (r) tell(r, (int32_t)(r->state >> 1), true);
        return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_rounds: what a round of one sequence needs is missing");
    }
    const int32_t again = twice(r);
    if (again >= 0) {
        tell(r, (int32_t)(r->state >> 1), true);
        return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_rounds: sequence %d is there twice", again);
    }
    const size_t n = (size_t)r->n;
    int32_t *row = calloc(n, sizeof *row), n_done = 0;
    uint8_t *kind = calloc(n, 1);
    for (int32_t i = 0; row && kind && i < r->n; i++) row[i] = i, kind[i] = PI_TOKEN_GENERATED;
    const pi_status st = row && kind ? run_rounds(s, r, row, kind, &n_done)
                                     : PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d sequences", r->n);
    free(row);
    free(kind);
    tell(r, n_done, true);
    return st;
}

int32_t pi_rounds_wait(const pi_rounds *r, int32_t seen) {
    while (r) {
        const uint32_t state = __atomic_load_n(&r->state, __ATOMIC_ACQUIRE);
        if ((int32_t)(state >> 1) > seen || (state & 1)) return (int32_t)(state >> 1);
        te_os_wait(&r->state, state, -1);
    }
    return 0;
}
