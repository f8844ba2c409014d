/* experts.c - the CPU's part of a mixture of experts whose layer lies on a device: the chosen experts that are not there. */
#include "../blocks/experts.h"

#include <string.h>

#include "program.h"

/* What the device said of a step's routes, the CPU's put together: token, expert and weight of each. */
static int32_t take_routes(pi_hybrid *h, int32_t l, int32_t *token, int32_t *expert, float *weight) {
    const pi_session *s = h->s;
    const int32_t device = h->layer[l].device, n_used = pi_experts_of(&s->model->layer[l])->n_used,
                  n_expert = s->model->info.n_expert;
    const uint64_t *words = pi_routes_of(h, &h->device[device], l);
    const uint32_t ticket = h->number + pi_number(l, PI_COLD);
    int32_t n = 0;
    for (int32_t i = 0; i < h->n_tok * n_used; i++) {
        uint32_t word[2];
        pi_hybrid_await(h, device, words, 2 * (int64_t)i, 2, ticket, word);
        const int32_t e = (int32_t)word[0];
        if (e < 0 || e >= n_expert) continue;
        token[n] = i / n_used;
        expert[n] = e;
        memcpy(&weight[n++], &word[1], sizeof *weight);
    }
    /* Of a step that was cancelled some words are zeros: a token would have the same expert several times. */
    return __atomic_load_n(h->device[device].dev->cancelled, __ATOMIC_RELAXED) ? 0 : n;
}

int32_t pi_hybrid_kept(const pi_hybrid *h, int32_t l) {
    const pi_device_layer *d = &h->layer[l];
    const pi_model_info *i = &h->s->model->info;
    if (h->n_tok > 1 || !d->kept) return 0;
    const uint32_t *uses = h->device[d->device].counts + 3 * (ptrdiff_t)i->n_layer + (ptrdiff_t)l * i->n_expert;
    const int32_t *place = h->place + (ptrdiff_t)l * i->n_expert;
    int32_t n_missing = 0;
    for (int32_t e = 0; e < i->n_expert; e++) n_missing += place[e] < 0 ? (int32_t)uses[e] : 0;
    return n_missing <= i->n_expert_used ? d->kept[n_missing] : 0;
}

/* Of models whose weights are of what experts read: the only route of a token has its row of x. */
static void weigh_input(const pi_routes *routes, te_team *team, int32_t n, int32_t n_embd, float *x) {
    for (int32_t i = team->ith; i < n; i += team->nth) {
        float *row = x + (ptrdiff_t)routes->of[i] * n_embd;
        for (int32_t c = 0; c < n_embd; c++) row[c] *= routes->weight[i];
        routes->weight[i] = 1;
    }
    te_barrier(team);
}

/* A device that has all experts of a step's tokens neither waits for an answer nor is given one. */
void pi_hybrid_cold_experts(pi_hybrid *h, te_team *team, int32_t l) {
    pi_session *s = h->s;
    const pi_model *m = s->model;
    const int32_t device = h->layer[l].device, n_embd = m->info.n_embd;
    const uint32_t ticket = h->number + pi_number(l, PI_COLD);
    const uint64_t *asked = pi_asked_of(h, &h->device[device], l);
    const pi_routes *routes = &s->routes;
    float *x = h->member[0].x;
    int64_t lo, hi;
    const bool guessed = pi_hybrid_guesses_experts(h, l);
    if (guessed) pi_hybrid_fetch_experts(h, team, l, asked);
    if (team->ith == 0) h->n_routes[l] = take_routes(h, l, routes->of, routes->expert, routes->weight);
    te_share(team, (int64_t)h->n_tok * n_embd, 16, &lo, &hi);
    pi_hybrid_await(h, device, asked, lo, hi - lo, ticket, (uint32_t *)(void *)(x + lo));
    te_barrier(team);
    pi_hybrid_note(h, team, l, PI_MOMENT_LIST);
    const int32_t n = h->n_routes[l]; /* the first member may be layers ahead: of some the CPU has no part */
    const int64_t began = team->ith == 0 ? te_os_now_ns() : 0;
    if (n) {
        if (pi_experts_of(&m->layer[l])->on_input) weigh_input(routes, team, n, n_embd, x);
        const pi_route_list list = {n, routes->of, routes->expert, routes->weight};
        pi_experts_rows(s, team, pi_block_of(&m->layer[l], &pi_experts_kind), l, &list, x, h->y, h->n_tok, false);
        te_barrier(team);
        pi_publish_words(h->device[device].answer, lo, hi - lo, ticket, (const uint32_t *)(const void *)(h->y + lo));
    }
    if (guessed && team->ith == 0) s->step[l].n_foreseen = pi_hybrid_foreseen_experts(h, l, routes->expert, n);
    pi_hybrid_layer_done(h, team, l, began);
}
