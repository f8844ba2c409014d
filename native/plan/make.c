/* make.c - the best placement: lists what there is to choose from, chooses, and places. */
#include <stdio.h>
#include <stdlib.h>

#include "plan.h"

/* More groups than this in a layer make a plan slower and no better. */
enum { MAX_GROUPS = 4096 };
/* What there is to choose from. */
typedef struct menu {
    const pi_model *m;
    const pi_cost *cost;
    const pi_plan_options *o;
    int32_t *order;    /* [n_layer][n_placed] blocks of a layer, hottest first; n / block of them */
    pi_option *option; /* [n_layer][MAX_GROUPS + 2]: on the CPU; on the device with 0, 1, 2 ... groups of neurons */
    pi_option head[2];
    pi_item *item;    /* [n_layer + 1], the head last */
    int32_t n_item;   /* n_layer + 1 */
    int32_t *chosen;  /* [n_item] the best so far */
    int32_t *owner;   /* [n_item] the device that each lies on, if it lies on one */
    int32_t *attempt; /* [n_item] what is being tried */
    int32_t n_room;   /* devices with a budget for more than their own needs */
    int32_t device[PI_PLAN_DEVICES];
    uint64_t room[PI_PLAN_DEVICES]; /* what those have left for layers with cold neurons */
} menu;

static int32_t group_of(const menu *u, int32_t l) { /* neurons that move together: whole blocks */
    const pi_layer_cost *c = &u->cost->layer[l];
    const int32_t n_ff = c->n, block = c->block, least = (n_ff + MAX_GROUPS - 1) / MAX_GROUPS,
                  wanted = u->o->group > least && !c->used ? u->o->group : least;
    const int64_t n = ((int64_t)wanted + block - 1) / block * block;
    return n < n_ff ? (int32_t)n : n_ff ? n_ff : 1;
}

static void list_options(menu *u, int32_t l, uint64_t *key, uint64_t *spare, int32_t *other) {
    const int32_t n_ff = u->cost->layer[l].n, block = u->cost->layer[l].block, group = group_of(u, l),
                  n_groups = (n_ff + group - 1) / group;
    const pi_activity activity = pi_cost_activity(u->cost, u->o, l);
    int32_t *order = u->order + (ptrdiff_t)l * u->cost->n_placed;
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
    const pi_share on_cpu = {.n_cold = n_ff, .active_cold = all};
    out[0] = (pi_option){0, pi_layer_us(pi_cost_time(u->cost, u->o, l, false, &on_cpu))};
    for (int32_t g = 0; g <= n_groups; g++) {
        const int32_t n_hot = g < n_groups ? g * group : n_ff;
        pi_share n = {.n_hot = n_hot,
                      .active_hot = hot[g],
                      .n_cold = n_ff - n_hot,
                      .active_cold = n_hot < n_ff ? all - hot[g] : 0};
        const double part = pi_cost_zero_copy(u->cost, u->o, l, &n);
        n.n_pcie = part * n.n_cold;
        n.active_pcie = part * n.active_cold;
        n.n_cold = part < 1 ? n.n_cold - n.n_pcie : 0;
        n.active_cold = part < 1 ? n.active_cold - n.active_pcie : 0;
        out[g + 1] = (pi_option){pi_cost_fixed(&u->cost->layer[l]) + pi_cost_ffn(u->cost, l, n_hot),
                                 pi_layer_us(pi_cost_time(u->cost, u->o, l, true, &n))};
    }
    u->item[l] = (pi_item){out, n_groups + 2};
}

static pi_status menu_new(menu *u, const pi_model *m, const pi_cost *cost, const pi_plan_options *o) {
    const size_t n_layer = (size_t)m->info.n_layer, n_ff = (size_t)cost->n_placed;
    *u = (menu){.m = m, .cost = cost, .o = o, .n_item = m->info.n_layer + 1};
    u->order = malloc(pi_mul(pi_mul(n_layer, n_ff), sizeof *u->order));
    u->option = malloc(pi_mul(n_layer * (MAX_GROUPS + 2), sizeof *u->option));
    u->item = calloc(n_layer + 1, sizeof *u->item);
    u->chosen = calloc(3 * (n_layer + 1), sizeof *u->chosen);
    uint64_t *key = malloc(n_ff * 2 * sizeof *key);
    int32_t *other = malloc(n_ff * sizeof *other);
    const bool ok = u->order && u->option && u->item && u->chosen && key && other;
    if (ok) {
        u->owner = u->chosen + u->n_item;
        u->attempt = u->owner + u->n_item;
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

/* ---- choosing ---- */

/* Time of a placement: those items that are on a device are on those of owner. */
static double placed_us(const menu *u, const int32_t *chosen, const int32_t *owner) {
    double us = 0;
    for (int32_t i = 0; i < u->n_item; i++) {
        us += u->item[i].option[chosen[i]].us;
        if (i && chosen[i] && chosen[i - 1] && owner[i] != owner[i - 1]) us += u->o->handover_us;
    }
    return us;
}

/* The best options of items first..last-1 within a budget, into u->attempt; *us: their time. */
static pi_status choose_range(menu *u, int32_t first, int32_t last, uint64_t room, bool thorough, double *us,
                              double *bound) {
    *us = *bound = 0;
    if (first >= last) return PI_OK;
    PI_TRY(pi_choose(u->item + first, last - first, room, thorough, u->attempt + first, bound));
    for (int32_t i = first; i < last; i++) *us += u->item[i].option[u->attempt[i]].us;
    return PI_OK;
}

/* Ranges of items: device k of u->device has items cut[k]..cut[k + 1]-1. */
typedef struct ranges {
    int32_t cut[PI_PLAN_DEVICES + 1];
    double us[PI_PLAN_DEVICES];
} ranges;

/* First ranges: as many bytes for each as its share of all room, of what one device with all of it would hold. */
static pi_status first_ranges(menu *u, ranges *r) {
    double us, bound, all_room = 0, all = 0, sum = 0, rooms = 0;
    uint64_t pool = 0;
    for (int32_t k = 0; k < u->n_room; k++) pool = u->room[k] > UINT64_MAX - pool ? UINT64_MAX : pool + u->room[k];
    all_room = (double)pool;
    PI_TRY(choose_range(u, 0, u->n_item, pool, false, &us, &bound));
    for (int32_t i = 0; i < u->n_item; i++) all += (double)u->item[i].option[u->attempt[i]].bytes;
    int32_t at = 0;
    for (int32_t k = 0; k < u->n_room; k++) {
        r->cut[k] = at;
        rooms += (double)u->room[k];
        while (at < u->n_item) {
            const double half = (double)u->item[at].option[u->attempt[at]].bytes / 2;
            if (sum + half > all * rooms / all_room) break;
            sum += 2 * half;
            at++;
        }
    }
    r->cut[u->n_room] = u->n_item;
    for (int32_t k = 0; k < u->n_room; k++)
        PI_TRY(choose_range(u, r->cut[k], r->cut[k + 1], u->room[k], false, &r->us[k], &bound));
    return PI_OK;
}

/* Moves one border by `step` items if that gains. */
static pi_status move_border(menu *u, ranges *r, int32_t k, int32_t step, bool *moved) {
    const int32_t to = r->cut[k] + step;
    double left, right, bound;
    if (to < r->cut[k - 1] || to > r->cut[k + 1]) return PI_OK;
    PI_TRY(choose_range(u, r->cut[k - 1], to, u->room[k - 1], false, &left, &bound));
    PI_TRY(choose_range(u, to, r->cut[k + 1], u->room[k], false, &right, &bound));
    if (left + right >= (r->us[k - 1] + r->us[k]) * (1 - 1e-9)) return PI_OK;
    r->cut[k] = to;
    r->us[k - 1] = left;
    r->us[k] = right;
    *moved = true;
    return PI_OK;
}

enum { MOST_ROUNDS = 32 };

/* A plan for all devices that have room, into u->attempt; owner: whose each item is. */
static pi_status choose_ranges(menu *u, int32_t *owner) {
    ranges r = {{0}, {0}};
    double us, bound;
    PI_TRY(first_ranges(u, &r));
    bool moved = true;
    for (int32_t round = 0; round < MOST_ROUNDS && moved && u->n_room > 1; round++) {
        moved = false;
        for (int32_t step = 4; step; step /= 2)
            for (int32_t k = 1; k < u->n_room; k++) {
                PI_TRY(move_border(u, &r, k, step, &moved));
                PI_TRY(move_border(u, &r, k, -step, &moved));
            }
    }
    for (int32_t k = 0; k < u->n_room; k++) {
        PI_TRY(choose_range(u, r.cut[k], r.cut[k + 1], u->room[k], true, &us, &bound));
        for (int32_t i = r.cut[k]; i < r.cut[k + 1]; i++) owner[i] = u->device[k];
    }
    return PI_OK;
}

/* Everything on devices, one after the other filled as far as whole layers go: false if they cannot hold it. No buffers
 * for streaming are needed then. */
static bool fill_all(menu *u, int32_t *owner, uint64_t left_on_first) {
    const uint64_t shared = u->o->overhead_bytes + u->cost->scratch_bytes;
    int32_t at = 0;
    for (int32_t d = 0; d < u->o->n_devices && at < u->n_item; d++) {
        uint64_t left = pi_budget(u->o, d);
        if (left < shared) continue;
        left -= shared;
        if (!at) left -= left_on_first < left ? left_on_first : left;
        for (; at < u->n_item; at++) {
            const int32_t last = u->item[at].n - 1;
            const uint64_t n_bytes = u->item[at].option[last].bytes;
            if (n_bytes > left) break;
            left -= n_bytes;
            u->attempt[at] = last;
            owner[at] = d;
        }
    }
    return at == u->n_item;
}

/* The same; with room for what helps with the head where there are several. */
static bool fill_devices(menu *u, int32_t *owner) {
    if (!fill_all(u, owner, 0)) return false;
    if (owner[0] == owner[u->n_item - 1] || !u->cost->helper_bytes) return true;
    return fill_all(u, owner, u->cost->helper_bytes) || fill_all(u, owner, 0);
}

static void keep(menu *u, const int32_t *owner) {
    for (int32_t i = 0; i < u->n_item; i++) {
        u->chosen[i] = u->attempt[i];
        u->owner[i] = owner[i];
    }
}

/* Everything on devices is taken if it is at most this much slower than the best mixture: then prompts stream nothing, the
 * host has nothing to do, and the step does not depend on how busy it is. A 7B model in Q4_0 of which 3 % stayed on a
 * host of 16 cores was estimated to be faster than all of it on an H200, and was slower. */
static const double for_all = 1.25;

static void find_room(menu *u) {
    const uint64_t shared = u->o->overhead_bytes + u->cost->scratch_bytes + u->cost->staging_bytes;
    for (int32_t d = 0; d < u->o->n_devices; d++) {
        const uint64_t budget = pi_budget(u->o, d);
        if (budget < shared) continue;
        u->device[u->n_room] = d;
        u->room[u->n_room++] = budget - shared;
    }
}

/* Chooses between the best mixtures, everything on devices, and nothing (*any false). */
static pi_status choose(menu *u, bool *any, double *bound, int32_t *owner) {
    const int32_t n = u->n_item;
    double best = 0;
    for (int32_t k = 0; k < n; k++) best += u->item[k].option[0].us - u->o->handover_us;
    const double host = best; /* nothing on devices */
    *bound = best;
    *any = false;
    find_room(u);
    if (u->n_room) { /* the device with most room alone */
        int32_t most = 0;
        double us = 0, least = 0;
        for (int32_t k = 1; k < u->n_room; k++)
            if (u->room[k] > u->room[most]) most = k;
        PI_TRY(choose_range(u, 0, n, u->room[most], true, &us, &least));
        if (u->n_room == 1 && least < *bound) *bound = least;
        if (us < best) {
            for (int32_t i = 0; i < n; i++) owner[i] = u->device[most];
            keep(u, owner);
            best = us;
            *any = true;
        }
    }
    if (u->n_room > 1) {
        uint64_t pool = 0; /* no plan is better than that of one device with all memory */
        double us = 0, least = 0;
        for (int32_t k = 0; k < u->n_room; k++) pool = u->room[k] > UINT64_MAX - pool ? UINT64_MAX : pool + u->room[k];
        PI_TRY(choose_range(u, 0, n, pool, false, &us, &least));
        if (least < *bound) *bound = least;
        PI_TRY(choose_ranges(u, owner));
        us = placed_us(u, u->attempt, owner);
        if (us < best) {
            keep(u, owner);
            best = us;
            *any = true;
        }
    }
    if (fill_devices(u, owner)) {
        const double us = placed_us(u, u->attempt, owner);
        if (us < *bound) *bound = us;
        if (us < best || (*any && us <= best * for_all && us <= host)) {
            keep(u, owner);
            *any = true;
        }
    }
    return PI_OK;
}

/* Marks the hottest neurons, and those after them that the device reads by zero-copy. */
static void place_layer(pi_plan *p, const menu *u, int32_t l) {
    const int32_t groups = u->chosen[l] - 1, block = u->cost->layer[l].block, n_ff = u->cost->layer[l].n;
    p->layer[l].device = groups >= 0 ? u->owner[l] : -1;
    if (groups < 0) return;
    const pi_activity activity = pi_cost_activity(u->cost, u->o, l);
    const pi_layer_cost *c = &u->cost->layer[l];
    const int64_t wanted = (int64_t)groups * group_of(u, l);
    const int32_t n_hot = wanted < n_ff ? (int32_t)wanted : n_ff;
    const int32_t *order = u->order + (ptrdiff_t)l * u->cost->n_placed;
    pi_share n = {.n_hot = n_hot, .n_cold = n_ff - n_hot};
    for (int32_t j = 0; j < n_ff; j++) {
        const int32_t id = order[j / block] * block + j % block;
        *(j < n_hot ? &n.active_hot : &n.active_cold) += pi_active(&activity, id);
        if (j < n_hot) pi_set_hot(p, l, id);
    }
    if (c->used) return; /* a mixture's experts move */
    const double part = pi_cost_zero_copy(u->cost, u->o, l, &n), bytes = pi_ffn_read(c, n.n_cold, n.active_cold);
    double taken = 0;
    for (int32_t j = n_hot; j < n_ff && part > 0; j++) { /* zero-copy: block is 1 */
        taken += pi_ffn_read(c, 1, pi_active(&activity, order[j]));
        if (part < 1 && taken > part * bytes) break;
        pi_set_pcie(p, l, order[j]);
    }
}

static pi_status too_small(const pi_model *m, const pi_cost *cost, const pi_plan_options *o, const pi_plan_info *i,
                           int32_t device) {
    const uint64_t part = i->min_bytes - o->overhead_bytes - cost->scratch_bytes;
    pi_plan_options less = *o;
    pi_plan_info least = *i;
    if (less.n_batch > PI_SMALL_BATCH) less.n_batch = PI_SMALL_BATCH;
    pi_cost small; /* windows hold a chunk more than they see, so that layers cost less, too */
    if (less.n_batch < o->n_batch && pi_cost_new(m, &less, &small) == PI_OK) {
        pi_plan_extremes(m, &small, &less, &least);
        pi_cost_free(&small);
    }
    char which[32] = "";
    if (o->n_devices > 1) snprintf(which, sizeof which, " for device %d", device);
    return PI_FAIL(
        PI_ERROR_ARGUMENT,
        "a budget of %s%s is too small: the driver's own memory takes %s, work space for n_batch %d takes %s, "
        "and the smallest part of the model with its buffers takes %s, so that at least %s are needed "
        "(%s with n_batch %d); all of it takes %s, and with a budget of 0 the CPU computes everything",
        pi_size(pi_budget(o, device)).text, which, pi_size(o->overhead_bytes).text, o->n_batch,
        pi_size(cost->scratch_bytes).text, pi_size(part).text, pi_size(i->min_bytes).text,
        pi_size(least.min_bytes).text, less.n_batch, pi_size(i->full_bytes).text);
}

pi_status pi_plan_make(pi_plan *p, const pi_model *m, const pi_cost *cost, const pi_plan_options *o) {
    pi_plan_extremes(m, cost, o, &p->info);
    bool wanted = false;
    for (int32_t d = 0; d < o->n_devices; d++) {
        const uint64_t budget = pi_budget(o, d);
        if (budget && budget < p->info.min_bytes) return too_small(m, cost, o, &p->info, d);
        wanted |= budget > 0;
    }
    double bound = 0;
    if (wanted) {
        menu u;
        bool any = false;
        pi_status st = menu_new(&u, m, cost, o);
        int32_t *owner = calloc((size_t)m->info.n_layer + 1, sizeof *owner);
        if (!owner && st == PI_OK) st = PI_FAIL(PI_ERROR_MEMORY, "out of memory planning %d layers", m->info.n_layer);
        if (st == PI_OK) st = choose(&u, &any, &bound, owner);
        if (st == PI_OK && any) {
            for (int32_t l = 0; l < p->n_layer; l++) place_layer(p, &u, l);
            p->info.head_device = u.chosen[p->n_layer] ? u.owner[p->n_layer] : -1;
        }
        free(owner);
        menu_free(&u);
        PI_TRY(st);
    }
    pi_plan_evaluate(p, cost, o);
    p->info.bound_us = wanted && bound < p->info.total_us ? bound : p->info.total_us; /* but for rounding */
    return PI_OK;
}
