/* make.c - the best placement: lists what there is to choose from, chooses, and places. */
#include <stdlib.h>

#include "plan.h"

/* More groups than this in a layer make a plan slower and no better. */
enum { MAX_GROUPS = 4096 };
/* n_batch of the example in the message about a budget that is too small; so few tokens stream nothing. */
enum { FEW_TOKENS = 16 };

/* What there is to choose from. */
typedef struct menu {
    const pi_model *m;
    const pi_cost *cost;
    const pi_plan_options *o;
    int32_t *order;    /* [n_layer][n_ff] blocks of a layer, hottest first; n_ff / block of them */
    pi_option *option; /* [n_layer][MAX_GROUPS + 2]: on the CPU; on the device with 0, 1, 2 ... groups of neurons */
    pi_option head[2];
    pi_item *item;   /* [n_layer + 1], the head last */
    int32_t *chosen; /* [n_layer + 1] */
} menu;

static int32_t group_of(const menu *u, int32_t l) { /* neurons that move together: whole blocks */
    const int32_t n_ff = u->m->info.n_ff, block = u->cost->layer[l].block, least = (n_ff + MAX_GROUPS - 1) / MAX_GROUPS,
                  wanted = u->o->group > least ? u->o->group : least;
    const int64_t n = ((int64_t)wanted + block - 1) / block * block;
    return n < n_ff ? (int32_t)n : n_ff;
}

static void list_options(menu *u, int32_t l, uint64_t *key, uint64_t *spare, int32_t *other) {
    const int32_t n_ff = u->m->info.n_ff, block = u->cost->layer[l].block, group = group_of(u, l),
                  n_groups = (n_ff + group - 1) / group;
    const pi_activity activity = pi_cost_activity(u->o, l, n_ff);
    int32_t *order = u->order + (ptrdiff_t)l * n_ff;
    pi_option *out = u->option + (ptrdiff_t)l * (MAX_GROUPS + 2);
    pi_order(activity.count, n_ff, block, key, spare, order, other);
    double hot[MAX_GROUPS + 1];
    hot[0] = 0;
    for (int32_t g = 0; g < n_groups; g++) {
        double sum = 0;
        for (int32_t j = g * group; j < n_ff && j < (g + 1) * group; j++)
            sum += pi_active(&activity, order[j / block] * block + j % block);
        hot[g + 1] = hot[g] + sum;
    }
    const double all = hot[n_groups];
    out[0] = (pi_option){0, pi_layer_us(pi_cost_time(u->cost, u->o, l, false, 0, 0, all))};
    for (int32_t g = 0; g <= n_groups; g++) {
        const int32_t n_hot = g < n_groups ? g * group : n_ff;
        out[g + 1] = (pi_option){pi_cost_fixed(&u->cost->layer[l]) + pi_cost_ffn(u->cost, l, n_hot),
                                 pi_layer_us(pi_cost_time(u->cost, u->o, l, true, n_hot, hot[g], all - hot[g]))};
    }
    u->item[l] = (pi_item){out, n_groups + 2};
}

static pi_status menu_new(menu *u, const pi_model *m, const pi_cost *cost, const pi_plan_options *o) {
    const size_t n_layer = (size_t)m->info.n_layer, n_ff = (size_t)m->info.n_ff;
    *u = (menu){.m = m, .cost = cost, .o = o};
    u->order = malloc(pi_mul(pi_mul(n_layer, n_ff), sizeof *u->order));
    u->option = malloc(pi_mul(n_layer * (MAX_GROUPS + 2), sizeof *u->option));
    u->item = calloc(n_layer + 1, sizeof *u->item);
    u->chosen = calloc(n_layer + 1, sizeof *u->chosen);
    uint64_t *key = malloc(n_ff * 2 * sizeof *key);
    int32_t *other = malloc(n_ff * sizeof *other);
    const bool ok = u->order && u->option && u->item && u->chosen && key && other;
    if (ok) {
        for (int32_t l = 0; l < m->info.n_layer; l++) list_options(u, l, key, key + n_ff, other);
        u->head[0] = (pi_option){0, pi_head_us(cost, o, false, true)};
        u->head[1] = (pi_option){cost->head_bytes + cost->head_norm_bytes, pi_head_us(cost, o, true, true)};
        u->item[n_layer] = (pi_item){u->head, 2};
    }
    free(key);
    free(other);
    return ok ? PI_OK : PI_FAIL(PI_ERROR_MEMORY, "out of memory planning %d layers", m->info.n_layer);
}

static void menu_free(menu *u) {
    free(u->order);
    free(u->option);
    free(u->item);
    free(u->chosen);
}

static double chosen_us(const menu *u, bool last) {
    double us = 0;
    for (int32_t i = 0; i <= u->m->info.n_layer; i++)
        us += u->item[i].option[last ? u->item[i].n - 1 : u->chosen[i]].us;
    return us;
}

/* Everything on the device is taken if it is at most this much slower than the best mixture: then prompts stream
 * nothing, and the host has nothing to do. */
static const double for_all = 1.005;

/* Chooses between the best mixture, everything on the device, and nothing (*any false). */
static pi_status choose(menu *u, const pi_plan_info *i, bool *any, double *bound) {
    const pi_plan_options *o = u->o;
    const uint64_t budget = o->budget_bytes,
                   shared = o->overhead_bytes + u->cost->scratch_bytes + u->cost->staging_bytes;
    const int32_t n = u->m->info.n_layer + 1;
    double best = 0;
    for (int32_t k = 0; k < n; k++) best += u->item[k].option[0].us - o->handover_us;
    *bound = best;
    *any = false;
    if (budget >= shared) {
        double mixed_bound = 0;
        PI_TRY(pi_choose(u->item, n, budget - shared, u->chosen, &mixed_bound));
        if (mixed_bound < *bound) *bound = mixed_bound;
        const double us = chosen_us(u, false);
        if (us < best) {
            best = us;
            *any = true;
        }
    }
    if (budget >= i->full_bytes) {
        const double us = chosen_us(u, true);
        if (us < *bound) *bound = us;
        if (us < best || (*any && us <= best * for_all)) {
            for (int32_t k = 0; k < n; k++) u->chosen[k] = u->item[k].n - 1;
            *any = true;
        }
    }
    return PI_OK;
}

static void place(pi_plan *p, const menu *u) {
    for (int32_t l = 0; l < p->n_layer; l++) {
        const int32_t groups = u->chosen[l] - 1, block = u->cost->layer[l].block;
        p->layer[l].on_device = groups >= 0;
        if (groups < 0) continue;
        const int64_t wanted = (int64_t)groups * group_of(u, l);
        const int32_t n_hot = wanted < p->n_ff ? (int32_t)wanted : p->n_ff;
        const int32_t *order = u->order + (ptrdiff_t)l * p->n_ff;
        for (int32_t j = 0; j < n_hot; j++) pi_set_hot(p, l, order[j / block] * block + j % block);
    }
    p->info.head_on_device = u->chosen[p->n_layer];
}

static pi_status too_small(const pi_model *m, const pi_cost *cost, const pi_plan_options *o, const pi_plan_info *i) {
    const uint64_t part = i->min_bytes - o->overhead_bytes - cost->scratch_bytes;
    pi_plan_options less = *o;
    pi_plan_info least = *i;
    if (less.n_batch > FEW_TOKENS) {
        less.n_batch = FEW_TOKENS;
        pi_cost small = *cost; /* shares the layers, which n_batch does not change */
        small.scratch_bytes = pi_cost_scratch(m, &less);
        small.staging_bytes = 0;
        pi_plan_extremes(m, &small, &less, &least);
    }
    return PI_FAIL(PI_ERROR_ARGUMENT,
                   "a budget of %s is too small: the driver's own memory takes %s, work space for n_batch %d takes %s, "
                   "and the smallest part of the model with its buffers takes %s, so that at least %s are needed "
                   "(%s with n_batch %d); all of it takes %s, and with a budget of 0 the CPU computes everything",
                   pi_size(o->budget_bytes).text, pi_size(o->overhead_bytes).text, o->n_batch,
                   pi_size(cost->scratch_bytes).text, pi_size(part).text, pi_size(i->min_bytes).text,
                   pi_size(least.min_bytes).text, less.n_batch, pi_size(i->full_bytes).text);
}

pi_status pi_plan_make(pi_plan *p, const pi_model *m, const pi_cost *cost, const pi_plan_options *o) {
    pi_plan_extremes(m, cost, o, &p->info);
    if (o->budget_bytes && o->budget_bytes < p->info.min_bytes) return too_small(m, cost, o, &p->info);
    double bound = 0;
    if (o->budget_bytes) {
        menu u;
        bool any = false;
        pi_status st = menu_new(&u, m, cost, o);
        if (st == PI_OK) st = choose(&u, &p->info, &any, &bound);
        if (st == PI_OK && any) place(p, &u);
        menu_free(&u);
        PI_TRY(st);
    }
    pi_plan_evaluate(p, cost, o);
    p->info.bound_us = o->budget_bytes && bound < p->info.total_us ? bound : p->info.total_us; /* but for rounding */
    return PI_OK;
}
