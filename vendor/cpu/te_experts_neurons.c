/* te_experts_neurons.c - the chosen experts for generated tokens, neuron by neuron: silent ones are left out, and down may
 * be stored by neuron. Then members share the neurons of each expert by their number, so that the order of a token's sum does
 * not depend on which other experts are wanted, and add up rows of down as they go. */
#include <string.h>

#include "te_experts_run.h"

/* Some neurons of an expert for its only token, in a list that becomes shorter: those that its gate lets through, with what
 * their gates' products are, then those with a hidden value that is not 0, with this. */
enum { NEURONS = 512 };
typedef struct of_one {
    const te_experts_run *r;
    const te_expert *e;
    int32_t j0, n; /* from where on, and how many in the beginning */
    int32_t n_listed, id[NEURONS];
    float g[NEURONS], u[NEURONS];
} of_one;

/* Where the rows of one stage end, those of the next begin to be fetched: so many rows before. */
static int32_t before_end(const te_mat *m, int32_t n) {
    const int32_t last = te_next_rows(m, 0).rows.n;
    return n > last ? n - last : 0;
}

/* Entries first..end-1 of the list; the whole list is a run of rows, which is faster to read. */
static te_rows listed(const of_one *o, bool all, int32_t first, int32_t end) {
    if (all) return (te_rows){NULL, o->j0 + first, end - first};
    return (te_rows){o->id + first, 0, end - first};
}

/* The gates of neurons first..end-1; those that are let through are put into the list. */
static void open_gates(of_one *o, int32_t first, int32_t end, te_ahead ahead, const void *act) {
    const te_expert *e = o->e;
    const te_mixture *m = o->r->m;
    const bool skip = te_silences(m);
    const float least = m->act == TE_RELU ? m->threshold : 0;
    float *g = o->g;
    if (first < end) te_rows_of(o->r->ws, &e->gate)->dot(&e->gate, listed(o, true, first, end), ahead, act, g + first);
    if (e->gate_b) te_add_bias(e->gate_b + o->j0 + first, end - first, g + first);
    for (int32_t i = first; i < end; i++) {
        o->id[o->n_listed] = o->j0 + i;
        g[o->n_listed] = g[i];
        o->n_listed += !skip || (g[i] > least && g[i] != 0);
    }
}

/* The hidden values of the list's entries first..end-1, of which *fired stay in it. hidden: where all go, or NULL. */
static void open_ups(of_one *o, bool all, int32_t first, int32_t end, te_ahead ahead, const void *act, float *hidden,
                     int32_t *fired) {
    const te_expert *e = o->e;
    const te_experts_run *r = o->r;
    const te_mixture *m = r->m;
    const bool skip = te_silences(m);
    const float weight = m->weight[e->first];
    float *u = o->u;
    if (first < end) te_rows_of(r->ws, &e->up)->dot(&e->up, listed(o, all, first, end), ahead, act, u + first);
    for (int32_t i = first; e->up_b && i < end; i++) u[i] += e->up_b[o->id[i]];
    r->ws->k->glu(m->act, m->threshold, o->g + first, u + first, end - first, u + first);
    for (int32_t i = first; i < end; i++) {
        if (hidden) hidden[o->id[i]] = u[i];
        r->counts->fired += u[i] != 0;
        o->id[*fired] = o->id[i];
        u[*fired] = weight * u[i];
        *fired += !skip || u[i] != 0;
    }
}

/* Neurons j0..j1-1 of an expert for its only token; silent ones are left out where they may be. All gates come first, then
 * all ups and, with sums, all downs that are wanted: longer streams than a few rows of each in turn. While the last rows of
 * each are worked on, the first of the next are fetched. next: the rows that this member reads after these neurons. */
static void neurons_of_one(const te_experts_run *r, const te_expert *e, int32_t j0, int32_t j1, float *sums,
                           te_ahead next) {
    const te_mixture *m = r->m;
    const te_ffn f = te_operator_of(m, e);
    const te_ahead none = {0};
    const int32_t t = m->token[e->first];
    const void *act = te_experts_input(r, 0, t), *up_act = te_experts_input(r, te_pass_up_act(r->ws, &f), t);
    float *hidden = sums ? NULL : m->hidden + (size_t)e->up.n_rows * (size_t)e->first;
    of_one o;
    o.r = r;
    o.e = e;
    for (int32_t j = j0; j < j1; j += o.n) {
        o.j0 = j;
        o.n = te_smaller(j1 - j, NEURONS);
        o.n_listed = 0;
        const te_ahead after = j + o.n < j1 ? te_next_rows(&e->gate, j + o.n) : next;
        int32_t end = before_end(&e->gate, o.n), fired = 0;
        open_gates(&o, 0, end, none, act);
        open_gates(&o, end, o.n, (te_ahead){&e->up, {o.id, 0, o.n_listed}}, act);
        const int32_t open = o.n_listed;
        const bool all = open == o.n;
        end = before_end(&e->up, open);
        if (hidden && !all) memset(hidden + j, 0, (size_t)o.n * sizeof *hidden);
        open_ups(&o, all, 0, end, none, up_act, hidden, &fired);
        open_ups(&o, all, end, open, sums ? (te_ahead){&e->down_t, {o.id, 0, fired}} : after, up_act, hidden, &fired);
        te_count_rows(r, &e->gate, o.n);
        te_count_rows(r, &e->up, open);
        r->counts->listed += o.n;
        r->counts->computed += open;
        if (!sums) continue;
        const te_row_kernels *k = te_rows_of(r->ws, &e->down_t);
        float *to = sums + r->ws->sum_stride * (size_t)t;
        end = before_end(&e->down_t, fired);
        if (end) k->axpy(&e->down_t, listed(&o, fired == o.n, 0, end), none, o.u, to);
        if (fired > end) k->axpy(&e->down_t, listed(&o, fired == o.n, end, fired), after, o.u + end, to);
        te_count_rows(r, &e->down_t, fired);
    }
}

/* For several tokens by the stages of te_pass.h. */
void te_experts_neurons(const te_experts_run *r, const te_expert *e, int32_t j0, int32_t j1, float *sums,
                        te_ahead next) {
    const te_mixture *m = r->m;
    const te_ffn f = te_operator_of(m, e);
    const te_ffn_io io = {.gate_add = e->gate_b, .up_add = e->up_b};
    float *hidden[TE_WORKSPACE_TOKENS], weight[TE_WORKSPACE_TOKENS];
    if (e->n == 1) {
        neurons_of_one(r, e, j0, j1, sums, next);
        return;
    }
    for (int32_t p = e->first; p < e->first + e->n; p++) {
        hidden[m->token[p]] = m->hidden + (size_t)e->up.n_rows * (size_t)p;
        weight[m->token[p]] = m->weight[p];
    }
    te_pass p = {.ws = r->ws,
                 .f = &f,
                 .io = &io,
                 .act = {te_experts_input(r, 0, 0), te_experts_input(r, te_pass_up_act(r->ws, &f), 0)},
                 .sums = sums,
                 .weight = weight,
                 .hidden = sums ? NULL : hidden,
                 .only = te_tokens_of(m, e),
                 .n_tok = m->n_tok,
                 .skip = te_silences(m),
                 .counts = r->counts};
    te_pass_begin(&p, r->me);
    te_pass_neurons(&p, (te_rows){NULL, 0, e->up.n_rows}, j0, j1);
}

/* ---- down by neuron ---- */

void te_op_experts_ahead(te_team *team, const te_mat *gate, int32_t n, size_t n_bytes) {
    te_ahead_begin(team);
    for (int32_t i = 0; i < n; i++) {
        int64_t lo, hi;
        te_share_of(team->ith, te_pool_n_threads(team->pool), gate[i].n_rows, 1, &lo, &hi);
        if (lo < hi) te_ahead_rows(team, &gate[i], lo, hi, &n_bytes);
    }
}

void te_experts_by_neuron(const te_experts_run *r) {
    const te_mixture *m = r->m;
    const te_mat *down = &m->expert[0].down_t;
    const int32_t n_ff = down->n_rows, n_chains = te_pool_n_threads(r->team->pool);
    const size_t n_bytes = te_all_bytes(down) * 3 * (size_t)m->n_experts;
    const int32_t n_parts = te_smaller(te_parts_of(r->team, n_bytes), m->n_experts);
    te_work d;
    te_work_begin(r->team, &d, n_parts, true);
    while (te_work_next(r->team, &d)) {
        int64_t lo, hi, first, last;
        if (d.part == 0) te_sums_begin(r->ws, r->team, d.chain, m->n_tok, down->cols);
        te_share_of(d.chain, n_chains, n_ff, 1, &lo, &hi);
        te_share_of(d.part, d.n_parts, m->n_experts, 1, &first, &last);
        for (int64_t i = first; i < last; i++) {
            const te_expert *e = &m->expert[i];
            const te_ahead next = i + 1 < m->n_experts ? te_next_rows(&e[1].gate, (int32_t)lo) : (te_ahead){0};
            te_experts_neurons(r, e, (int32_t)lo, (int32_t)hi, te_sums(r->ws, r->team, d.chain, 0), next);
        }
    }
    te_sums_end(r->team, r->ws, &d, down, m->n_tok, m->y, m->ldy, !m->add, NULL);
    int64_t lo, hi;
    te_sums_share(r->team, down->cols, &lo, &hi);
    for (int32_t i = 0; i < m->n_experts && m->expert[i].down_b; i++)
        for (int32_t p = m->expert[i].first; p < m->expert[i].first + m->expert[i].n; p++)
            for (int64_t c = lo; c < hi; c++)
                m->y[m->ldy * (size_t)m->token[p] + (size_t)c] += m->weight[p] * m->expert[i].down_b[c];
}
