/* logits.c - logits of a run whose head is on a device: where they are, and how many of them are brought from there. */
#include <string.h>

#include "../blocks/forward.h"
#include "hybrid.h"

enum { MOST_ROWS = 1 << 15 }; /* in a program's key */

/* Of a feed's rows the device left n, the first of which is `row`: to the session's own. */
typedef struct left_rows {
    const pi_hybrid *h;
    size_t row, n;
} left_rows;
static void take_rows(te_team *team, float *to, const float *from, size_t n) {
    int64_t lo, hi;
    te_share(team, (int64_t)n, 16, &lo, &hi);
    memcpy(to + lo, from + lo, sizeof *to * (size_t)(hi - lo));
}
static void take_logits(void *ctx, te_team *team) {
    const left_rows *rows = ctx;
    pi_session *s = rows->h->s;
    const pi_device_state *d = &rows->h->device[rows->h->head_device];
    const size_t n_vocab = (size_t)s->model->info.n_vocab, n_embd = (size_t)s->model->info.n_embd;
    take_rows(team, s->own_logits + rows->row * n_vocab, d->logits, rows->n * n_vocab);
    take_rows(team, s->own_hidden + rows->row * n_embd, d->hidden, rows->n * n_embd);
}
static void take(pi_hybrid *h, int32_t row, int32_t n) {
    left_rows rows = {h, (size_t)row, (size_t)n};
    te_pool_run(n > 2 ? h->few : h->caller, take_logits, &rows);
    h->s->logits = h->s->own_logits;
    h->s->largest = NULL;
    h->s->hidden = h->s->own_hidden;
}

/* Whether each token of the run is the next one of another sequence. */
static bool is_decoding(const pi_hybrid *h) {
    const pi_chunk *c = &h->s->chunk;
    bool apart = h->n_logits == h->n_tok;
    for (int32_t t = 1; t < h->n_tok && apart; t++)
        for (int32_t k = 0; k < t; k++) apart &= c->seq[k] != c->seq[t];
    return apart;
}

/* How many of each row's largest logits are brought, of a run whose rows stay: where no more are asked for, and nothing is done
 * to them here. One of several runs of a feed brings its rows, too: the next one makes its own in their place. */
static int32_t count_largest(const pi_hybrid *h) {
    const bool may = h->n_logits > 1 && !pi_changes_logits(h->s->model) &&
                     pi_hybrid_rows(h, &h->device[h->head_device]) != h->device[h->head_device].logits;
    return !may ? 0 : h->n_logits == h->s->logits_rows ? h->s->n_largest : -h->s->n_largest;
}

/* Rows are looked at where the device left them, until the next feed: where the run has all of the feed, or stands behind
 * others of a step of more sequences than a program takes. (Where rows begin is part of a recorded program, so that other
 * feeds of several runs have no rows that stay.) Returns whether the run's may; those of the feed that are there are taken if
 * not. A run that failed ends its feed, and the next one's first row is 0. */
bool pi_hybrid_place_logits(pi_hybrid *h) {
    const pi_session *s = h->s;
    h->logits_at = 0;
    h->n_largest = 0;
    if (h->head_device < 0 || !h->n_logits) return false;
    const int32_t row = s->chunk.logits_row[h->n_tok - h->n_logits];
    if (row == 0) h->n_lent = 0, h->all_largest = true;
    const bool stays = row == h->n_lent && s->logits_rows <= h->max_rows && row < MOST_ROWS &&
                       (h->n_logits == s->logits_rows || (h->splits && pi_hybrid_is_resident(h) && is_decoding(h)));
    h->n_largest = stays ? count_largest(h) : 0;
    h->all_largest &= h->n_largest != 0;
    if (stays)
        h->logits_at = row;
    else if (h->n_lent)
        take(h, 0, h->n_lent);
    h->n_lent = stays ? row + h->n_logits : 0;
    return stays;
}
static void lend_logits(pi_hybrid *h) {
    const pi_device_state *d = &h->device[h->head_device];
    h->s->logits = d->logits;
    h->s->hidden = d->hidden;
    h->s->largest = h->all_largest ? d->largest : NULL;
    h->s->n_found = d->n_found;
}

static void logits_step(void *ctx, te_team *team) { pi_step_logits(ctx, team); }

void pi_hybrid_give_logits(pi_hybrid *h, bool stays) {
    pi_session *s = h->s;
    if (stays)
        lend_logits(h);
    else
        take(h, s->chunk.logits_row[h->n_tok - h->n_logits], h->n_logits);
    if (pi_changes_logits(s->model)) te_pool_run(s->pool, logits_step, s);
}
pi_status pi_hybrid_bring_rows(pi_hybrid *h) {
    if (!h->s->largest) return PI_OK;
    const pi_device_state *d = &h->device[h->head_device];
    const size_t n = (size_t)h->s->logits_rows * (size_t)h->s->model->info.n_vocab;
    PI_TRY(pi_hybrid_check_process(h));
    const pi_status st =
        h->n_largest < 0 ? PI_OK : d->dev->ops->download(d->dev, d->logits, d->rows, sizeof *d->rows * n);
    if (st != PI_OK) return PI_FAIL(st, "%s", d->dev->ops->error());
    h->s->largest = NULL;
    return PI_OK;
}
