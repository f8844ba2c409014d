/* hybrid_lookahead.c - cold rows fetched before it is certain that they are wanted.
 *
 * While a device computes what stands between the CPU's answer for one layer and the marks of the next, the host's memory
 * is idle. A residual stream changes little from layer to layer, so the device runs the next layer's predictor on the
 * residual of this one, in the time in which it waits for the CPU, and posts the marks as a guess. From its answer until
 * the next layer's x is there each member fetches the rows of its share of the guess into its own cache. What is computed
 * is decided by the true marks alone: a wrong guess costs reading, a missing one nothing. */
#include "hybrid.h"

bool pi_hybrid_looks_ahead(const pi_hybrid *h, int32_t l) {
    const pi_device_layer *w = &h->layer[l];
    const pi_session_options *o = &h->s->options;
    /* Of several tokens too much is guessed: with eight, members that still fetched held up the others, 24 became 30 ms. */
    if (o->no_lookahead || o->n_batch < 3 || !h->decode || !h->masked || h->n_tok > 1) return false;
    return l > 0 && w->device >= 0 && h->layer[l - 1].device == w->device && w->n_cpu > 0 && w->fc1.w;
}

enum { LINE = 64, PIECE = 16 * LINE };
enum { MATS = 3 }; /* rows of a neuron */
/* Bytes that a member fetches for a layer: what its second cache, of 1 or 2 MiB, keeps until they are read. */
enum { MOST = 1 << 20 };

uint64_t *pi_hybrid_guess(const pi_hybrid *h, int32_t l) {
    const pi_device_state *d = &h->device[h->layer[l].device];
    return d->ahead + (l % 2) * d->ahead_words;
}

void pi_hybrid_take_guess(pi_hybrid *h, const te_team *team, int32_t l) {
    const int32_t device = h->layer[l].device, n_parts = h->device[device].info.n_parts,
                  n_words = pi_mark_words(h->layer[l].n_cpu, n_parts);
    pi_cold_member *me = &h->member[team->ith];
    pi_hybrid_await(h, device, pi_hybrid_guess(h, l), 0, n_words, h->number + pi_number(l, PI_COLD), me->ahead);
    /* As te_op_ffn shares them out, if the guess is right. */
    te_share_of(team->ith, te_pool_n_threads(team->pool), pi_hybrid_list(h, l, me->ahead, 0, n_parts, me), 1,
                &me->next_ahead, &me->end_ahead);
    const pi_layer *w = &h->s->model->layer[l];
    const size_t n_bytes = (w->gate.w ? pi_row_bytes(&w->gate) : 0) + pi_row_bytes(&w->up) + pi_row_bytes(&w->down_t);
    const int64_t most = me->next_ahead + (n_bytes > 0 ? (int64_t)(MOST / n_bytes) : 0);
    if (me->end_ahead > most) me->end_ahead = most;
    me->next_ahead *= MATS;
    me->end_ahead *= MATS;
    me->ahead_bytes = 0;
}

/* Into the second cache, whose lines a core asks for without waiting for them. A piece of a row at a time: what it asked
 * for is in the way of what it then reads. */
void pi_hybrid_fetch_ahead(pi_hybrid *h, const te_team *team, int32_t l, const uint64_t *until) {
    const pi_layer *w = &h->s->model->layer[l];
    const te_mat *mats[MATS] = {&w->gate, &w->up, &w->down_t};
    pi_cold_member *me = &h->member[team->ith];
    const uint32_t seq = h->number + pi_number(l, PI_COLD);
    for (; me->next_ahead < me->end_ahead; me->next_ahead++, me->ahead_bytes = 0) {
        const te_mat *m = mats[me->next_ahead % MATS];
        if (!m->w) continue;
        const size_t n_bytes = pi_row_bytes(m);
        const char *row = (const char *)m->w + m->stride * (size_t)me->list[me->next_ahead / MATS];
        for (; me->ahead_bytes < n_bytes; me->ahead_bytes += PIECE) {
            if (pi_has_words(until, 1, seq, NULL)) return;
            for (size_t at = 0; at < PIECE; at += LINE) __builtin_prefetch(row + me->ahead_bytes + at, 0, 2);
        }
    }
}

int32_t pi_hybrid_foreseen(const pi_hybrid *h, int32_t l, const pi_cold_member *me) {
    const int32_t n_words = pi_mark_words(h->layer[l].n_cpu, h->device[h->layer[l].device].info.n_parts);
    int32_t n = 0;
    for (int32_t i = 0; i < n_words; i++) n += __builtin_popcount(me->marks[i] & me->ahead[i]);
    return n;
}
