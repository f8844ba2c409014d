/* lookahead.c - cold rows fetched before it is certain that they are wanted.
 *
 * While a device computes what stands between the CPU's answer for one layer and the marks of the next, the host's memory
 * is idle. A residual stream changes little from layer to layer, so the device runs the next layer's predictor on the
 * residual of this one, in the time in which it waits for the CPU, and posts the marks as a guess. From its answer until
 * the next layer's x is there each member fetches into its own cache: its columns of the guessed neurons' down, then the
 * other rows of its share of the guess. What is computed is decided by the true marks alone: a wrong guess costs reading,
 * a missing one nothing. Who begins with a marked neuron is decided by both: the member that fetched it, since another
 * core's cache is nearly as far as memory.
 *
 * Of a mixture the device has the next layer's router choose by the residual of this one, and names the experts that it
 * would leave to the CPU; each member fetches the rows that it would be dealt of these, of several tokens, too. A router
 * that reads its layer's input has chosen before attention: what it chose is no guess, and is fetched instead.
 */
#include <string.h>

#include "program.h"

bool pi_hybrid_looks_ahead(const pi_hybrid *h, int32_t l) {
    const pi_device_layer *w = &h->layer[l];
    const pi_session_options *o = &h->s->options;
    /* Of several tokens too much is guessed: with eight, members that still fetched held up the others, 24 became 30 ms. */
    if (o->no_lookahead || o->n_batch < 3 || !h->decode || !h->masked || h->n_tok > 1) return false;
    if (h->s->model->layer[l].n_host) return false; /* what comes before its neurons is not the device's */
    return l > 0 && w->device >= 0 && h->layer[l - 1].device == w->device && w->n_cpu > 0 && w->fc1.w;
}

enum { LINE = 64, PIECE = 16 * LINE };
/* Bytes that a member fetches for a layer: what its second cache, of 1 or 2 MiB, keeps until they are read. */
enum { MOST = 1 << 20 };

uint64_t *pi_hybrid_guess(const pi_hybrid *h, int32_t l) {
    const pi_device_state *d = &h->device[h->layer[l].device];
    return d->ahead + (l % 2) * d->ahead_words;
}

/* The places of the guess that member i fetches rows of. */
static void fetched_share(const pi_cold_member *me, int32_t i, int32_t n_members, int64_t *lo, int64_t *hi) {
    te_share_of(i, n_members, me->n_guessed, 1, lo, hi);
    if (*hi > *lo + me->n_rows_ahead) *hi = *lo + me->n_rows_ahead;
}

/* How many of a neuron's rows, gate, up and down, a member fetches. */
static int32_t n_mats(const pi_cold_member *me) { return me->part_bytes ? 2 : 3; }

/* Of a sum by columns a member's columns of down come first: no other member can help it with these. */
void pi_hybrid_take_guess(pi_hybrid *h, const te_team *team, int32_t l) {
    const int32_t device = h->layer[l].device, n_parts = h->device[device].info.n_parts,
                  n_words = pi_mark_words(h->layer[l].n_cpu, n_parts);
    const pi_ffn *w = pi_ffn_of(&h->s->model->layer[l]);
    pi_cold_member *me = &h->member[team->ith];
    pi_hybrid_await(h, device, pi_hybrid_guess(h, l), 0, n_words, h->number + pi_number(l, PI_COLD), me->ahead);
    me->n_guessed = pi_hybrid_list(h, l, me->ahead, 0, n_parts, me->guessed, NULL);

    size_t n_bytes = (w->gate.w ? pi_row_bytes(&w->gate) : 0) + pi_row_bytes(&w->up), parts = 0;
    me->part_bytes = 0;
    if (pi_hybrid_by_columns(h, team, l)) {
        int32_t lo, hi;
        te_ffn_columns(team, &w->down_t, &lo, &hi);
        me->part_at = te_row_bytes(w->down_t.type, lo);
        me->part_bytes = te_row_bytes(w->down_t.type, hi) - me->part_at;
        parts = pi_row_bytes(&w->down_t) / (size_t)team->nth * (size_t)me->n_guessed;
        if (parts > MOST / 2) parts = 0;
    } else {
        n_bytes += pi_row_bytes(&w->down_t);
    }
    me->n_parts_ahead = parts ? me->n_guessed : 0;
    me->n_rows_ahead = n_bytes ? (int32_t)((MOST - parts) / n_bytes) : 0;
    int64_t last;
    fetched_share(me, team->ith, te_pool_n_threads(team->pool), &me->first_row, &last);
    me->next_ahead = 0;
    me->end_ahead = me->n_parts_ahead + n_mats(me) * (last - me->first_row);
    me->ahead_bytes = 0;
}

/* n bytes into the second cache, whose lines a core asks for without waiting for them: no more than a piece, since what it
 * asked for is in the way of what it then reads. Returns how many. */
static size_t fetch_piece(const char *from, size_t n_bytes) {
    const size_t n = n_bytes < PIECE ? n_bytes : PIECE;
    for (size_t at = 0; at < n; at += LINE) __builtin_prefetch(from + at, 0, 2);
    return n;
}

void pi_hybrid_fetch_ahead(pi_hybrid *h, const te_team *team, int32_t l, const uint64_t *until) {
    const pi_ffn *w = pi_ffn_of(&h->s->model->layer[l]);
    const te_mat *mats[] = {&w->gate, &w->up, &w->down_t};
    pi_cold_member *me = &h->member[team->ith];
    const uint32_t ticket = h->number + pi_number(l, PI_COLD);
    for (; me->next_ahead < me->end_ahead; me->next_ahead++, me->ahead_bytes = 0) {
        const int64_t i = me->next_ahead - me->n_parts_ahead; /* < 0: a part of a row of down */
        const te_mat *m = i < 0 ? &w->down_t : mats[i % n_mats(me)];
        if (!m->w) continue;
        const int32_t id = me->guessed[i < 0 ? me->next_ahead : me->first_row + i / n_mats(me)];
        const char *from = (const char *)m->w + m->stride * (size_t)id + (i < 0 ? me->part_at : 0);
        const size_t n_bytes = i < 0 ? me->part_bytes : pi_row_bytes(m);
        while (me->ahead_bytes < n_bytes) {
            if (pi_has_words(until, 1, ticket, NULL)) return;
            me->ahead_bytes += fetch_piece(from + me->ahead_bytes, n_bytes - me->ahead_bytes);
        }
    }
}

/* ---- experts ---- */

bool pi_hybrid_guesses_experts(const pi_hybrid *h, int32_t l) {
    const pi_layer *layer = &h->s->model->layer[l], *before = l > 0 ? layer - 1 : layer;
    const pi_device_layer *w = &h->layer[l];
    const pi_experts *e = pi_experts_of(layer);
    if (h->s->options.no_lookahead || !h->decode || !e || !e->down.w || w->device < 0 || !w->n_cpu || layer->n_host)
        return false;
    return e->early || (l > 0 && pi_experts_of(before) && w[-1].n_cpu && w[-1].device == w->device && !before->n_tail);
}

enum { MOST_EXPERTS = 64 };
/* How long a guess is waited for; a device that is silent for longer is left to the wait for its choice, which has an end. */
enum { PATIENCE_NS = 1000000 };

/* The experts of layer l that the device has named, ascending; or -1: it has not yet. */
static int32_t guessed_experts(const pi_hybrid *h, int32_t l, int32_t expert[MOST_EXPERTS]) {
    const pi_model *m = h->s->model;
    const pi_device_state *d = &h->device[h->layer[l].device];
    const uint64_t *words = pi_experts_of(&m->layer[l])->early ? pi_routes_of(h, d, l) : pi_guess_of(h, d, l);
    const int32_t n_routes = h->n_tok * m->info.n_expert_used;
    int32_t n = 0;
    for (int32_t i = n_routes - 1; i >= 0; i--) { /* the last ones are there last */
        uint32_t word[2];
        if (!pi_has_words(words + 2 * (ptrdiff_t)i, 2, h->number + pi_number(l, PI_COLD), word)) return -1;
        const int32_t e = (int32_t)word[0];
        int32_t k = n;
        while (k > 0 && expert[k - 1] > e) k--;
        if (e < 0 || e >= m->info.n_expert || n == MOST_EXPERTS || (k > 0 && expert[k - 1] == e)) continue;
        memmove(expert + k + 1, expert + k, sizeof *expert * (size_t)(n - k));
        expert[k] = e;
        n++;
    }
    return n;
}

/* The rows of gates and ups, then of downs, that te_op_experts deals to this member first. */
void pi_hybrid_fetch_experts(pi_hybrid *h, const te_team *team, int32_t l, const uint64_t *until) {
    enum { UNIT = 16 }; /* rows, as they are dealt */
    const pi_model *m = h->s->model;
    const pi_experts *w = pi_experts_of(&m->layer[l]);
    const te_mat *const mats[] = {&w->gate, &w->up, &w->down};
    const uint32_t ticket = h->number + pi_number(l, PI_COLD);
    int32_t expert[MOST_EXPERTS], n = -1;
    size_t left = MOST;
    const int64_t began = te_os_now_ns();
    while (n < 0) {
        const int64_t waited = te_os_now_ns() - began;
        if (pi_has_words(until, 1, ticket, NULL) || waited > PATIENCE_NS) return;
        if (waited > PI_YIELD_NS) te_os_yield();
        n = guessed_experts(h, l, expert);
    }
    for (int32_t k = 0; k < 3; k++) {
        if (!mats[k]->w) continue;
        const int32_t rows = k < 2 ? w->n_ff : m->info.n_embd;
        const size_t n_bytes = pi_row_bytes(mats[k]);
        int64_t lo, hi;
        te_share_of(team->ith, te_pool_n_threads(team->pool), (int64_t)n * rows, UNIT, &lo, &hi);
        for (int64_t i = lo; i < hi && left >= n_bytes; i++, left -= n_bytes) {
            const te_mat of = pi_expert_rows(mats[k], expert[i / rows], rows);
            const char *row = (const char *)of.w + of.stride * (size_t)(i % rows);
            for (size_t at = 0; at < n_bytes; at += fetch_piece(row + at, n_bytes - at))
                if (pi_has_words(until, 1, ticket, NULL)) return;
        }
    }
}

int32_t pi_hybrid_foreseen_experts(const pi_hybrid *h, int32_t l, const int32_t *of, int32_t n) {
    int32_t expert[MOST_EXPERTS], sum = 0;
    const int32_t n_guessed = guessed_experts(h, l, expert);
    for (int32_t i = 0; i < n; i++)
        for (int32_t k = 0; k < n_guessed; k++) sum += of[i] == expert[k];
    return sum;
}

/* ---- neurons that were guessed ---- */

int32_t pi_hybrid_foreseen(const pi_hybrid *h, int32_t l, const pi_cold_member *me) {
    const int32_t n_words = pi_mark_words(h->layer[l].n_cpu, h->device[h->layer[l].device].info.n_parts);
    int32_t n = 0;
    for (int32_t i = 0; i < n_words; i++) n += __builtin_popcount(me->marks[i] & me->ahead[i]);
    return n;
}

/* Neurons that nobody fetched take longer, so they go round: each member has as many of these, not as many neurons. No
 * member has more than one neuron above the mean rounded up. */
int32_t pi_hybrid_assign(const pi_cold_member *me, int32_t n, int32_t n_members) {
    const int32_t room = (n + n_members - 1) / n_members + 1;
    int32_t at = 0, n_rest = 0;
    for (int32_t i = 0; i < n_members; i++) {
        int32_t *const own = me->place + (ptrdiff_t)i * room;
        int32_t n_own = 0;
        int64_t lo, hi;
        fetched_share(me, i, n_members, &lo, &hi);
        for (int64_t k = lo; k < hi; k++) {
            while (at < n && me->all[at] < me->guessed[k]) me->rest[n_rest++] = at++;
            if (at < n && me->all[at] == me->guessed[k] && n_own < room) own[n_own++] = at++;
        }
        me->n_of[i] = n_own;
    }
    while (at < n) me->rest[n_rest++] = at++;
    for (int32_t k = 0, i = 0; k < n_rest; i = i + 1 < n_members ? i + 1 : 0)
        if (me->n_of[i] < room) me->place[(ptrdiff_t)i * room + me->n_of[i]++] = me->rest[k++];
    for (int32_t i = 0; i < n_members; i++)
        for (int32_t k = i * room; k < i * room + me->n_of[i]; k++) me->list[k] = me->all[me->place[k]];
    return room;
}
