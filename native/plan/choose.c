/* choose.c - the multiple-choice knapsack: one option per item, least time, within a budget of bytes.
 *
 * 1. Per item the options that no other beats in both bytes and time, and of those the lower convex hull.
 * 2. A price per byte, found by bisection, at which every item's best hull point just fits the budget. It gives a bound
 *    (Lagrange) and a plan that misses it by at most the one step that no longer fits.
 * 3. What the budget has left is spent on the best steps that fit.
 * 4. If bound and plan still differ, dynamic programming over the items on sums that can beat the plan, with the bound
 *    to drop the others. It is exact while few options are left (few items, or a small gap); beyond its limits it thins
 *    out sums and options evenly, and step 3 spends what that leaves.
 * (Kellerer, Pferschy, Pisinger: Knapsack Problems, chapter 11.) */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

/* Limits of step 4: sums kept per item, with few and with many items, and sums tried in all (some 10 ms). */
enum { FEW_ITEMS = 16, FEW_SUMS = 1 << 13, MANY_SUMS = 1 << 10, MAX_STEPS = 1 << 21 };
static const double good_enough = 2e-4; /* relative gap at which step 4 is left out */

typedef struct table {
    int32_t *best, *hull; /* indices into the item's options, ascending bytes, falling time */
    int32_t n_best, n_hull;
    const pi_option *option;
    int32_t at; /* the option chosen */
} table;

typedef struct sum {
    uint64_t bytes;
    double us;
    int32_t parent, option;
} sum;

typedef struct search {
    table *t;
    int32_t n;
    uint64_t budget, used;
    double us;    /* of the plan so far */
    double price; /* us per byte */
    double bound;
} search;

static double slope(const pi_option *a, const pi_option *b) {
    return (a->us - b->us) / ((double)b->bytes - (double)a->bytes);
}

/* Step 1. */
static void find_best(table *t, int32_t n) {
    const pi_option *o = t->option;
    t->n_best = t->n_hull = 0;
    for (int32_t i = 0; i < n; i++) {
        if (t->n_best && o[i].us >= o[t->best[t->n_best - 1]].us) continue;
        if (t->n_best && o[i].bytes == o[t->best[t->n_best - 1]].bytes) t->n_best--;
        t->best[t->n_best++] = i;
    }
    for (int32_t k = 0; k < t->n_best; k++) {
        const pi_option *c = &o[t->best[k]];
        while (t->n_hull > 1) {
            const pi_option *a = &o[t->hull[t->n_hull - 2]], *b = &o[t->hull[t->n_hull - 1]];
            if (slope(a, b) > slope(b, c)) break;
            t->n_hull--;
        }
        t->hull[t->n_hull++] = t->best[k];
    }
}

/* The last hull point whose step from the one before saves at least price per byte. */
static int32_t at_price(const table *t, double price) {
    int32_t lo = 0, hi = t->n_hull - 1;
    while (lo < hi) {
        const int32_t mid = (lo + hi + 1) / 2;
        if (slope(&t->option[t->hull[mid - 1]], &t->option[t->hull[mid]]) >= price)
            lo = mid;
        else
            hi = mid - 1;
    }
    return t->hull[lo];
}

static uint64_t bytes_at(const search *s, double price) {
    uint64_t n = 0;
    for (int32_t i = 0; i < s->n; i++) {
        const uint64_t b = s->t[i].option[at_price(&s->t[i], price)].bytes;
        n = n > UINT64_MAX - b ? UINT64_MAX : n + b;
    }
    return n;
}

static void take(search *s, int32_t item, int32_t option) {
    table *t = &s->t[item];
    s->used += t->option[option].bytes - t->option[t->at].bytes;
    s->us += t->option[option].us - t->option[t->at].us;
    t->at = option;
}

/* Step 2. Positive doubles are ordered as their bits are, so 64 halvings find neighbours. */
static void price_bytes(search *s) {
    uint64_t lo = 0, hi;
    const double huge = 1e300;
    memcpy(&hi, &huge, sizeof hi);
    if (bytes_at(s, 0) > s->budget) {
        while (hi - lo > 1) {
            const uint64_t mid = lo + (hi - lo) / 2;
            double price;
            memcpy(&price, &mid, sizeof price);
            if (bytes_at(s, price) > s->budget)
                lo = mid;
            else
                hi = mid;
        }
        memcpy(&s->price, &hi, sizeof s->price);
    }
    s->bound = -s->price * (double)s->budget;
    for (int32_t i = 0; i < s->n; i++) {
        table *t = &s->t[i];
        const int32_t k = at_price(t, s->price);
        take(s, i, k);
        s->bound += t->option[k].us + s->price * (double)t->option[k].bytes;
    }
}

/* Step 3. */
static void spend_rest(search *s) {
    for (;;) {
        int32_t item = -1, option = 0;
        double gain = 0;
        for (int32_t i = 0; i < s->n; i++) {
            const table *t = &s->t[i];
            const uint64_t most = t->option[t->at].bytes + (s->budget - s->used);
            int32_t lo = 0, hi = t->n_best - 1; /* the largest that fits is the fastest that fits */
            while (lo < hi) {
                const int32_t mid = (lo + hi + 1) / 2;
                if (t->option[t->best[mid]].bytes <= most)
                    lo = mid;
                else
                    hi = mid - 1;
            }
            const double g = t->option[t->at].us - t->option[t->best[lo]].us;
            if (g > gain) {
                gain = g;
                item = i;
                option = t->best[lo];
            }
        }
        if (item < 0) return;
        take(s, item, option);
    }
}

/* What is left of an item's options for step 4, in out: those that a plan better than s->us may hold. */
static int32_t candidates(const search *s, const table *t, int32_t most, int32_t *out) {
    double least = 0;
    int32_t n = 0;
    for (int32_t k = 0; k < t->n_best; k++) {
        const pi_option *o = &t->option[t->best[k]];
        const double v = o->us + s->price * (double)o->bytes;
        if (k == 0 || v < least) least = v;
    }
    for (int32_t k = 0; k < t->n_best; k++) {
        const pi_option *o = &t->option[t->best[k]];
        if (o->bytes > s->budget) break;
        if (s->bound + (o->us + s->price * (double)o->bytes - least) < s->us) out[n++] = t->best[k];
    }
    if (n <= most) return n;
    for (int32_t k = 0; k < most; k++) out[k] = out[(int64_t)k * (n - 1) / (most - 1)];
    return most;
}

/* Least time that a plan with this sum so far can reach. rest: of the items that follow, least us + price * bytes and
 * least us. */
static double reach(const search *s, uint64_t bytes, double us, double rest_priced, double rest_us) {
    const double priced = us + s->price * ((double)bytes - (double)s->budget) + rest_priced, free_ = us + rest_us;
    return priced > free_ ? priced : free_;
}

typedef struct sums {
    sum *at;
    int32_t n;
} sums;

/* next and from + one option, merged by bytes into out; what fits and may still win and is faster than all that is
 * smaller. */
static int32_t merge(const search *s, const sums *next, const sums *from, const pi_option *o, int32_t option,
                     double rest_priced, double rest_us, sum *out) {
    int32_t n = 0, a = 0, b = 0;
    while (a < next->n || b < from->n) {
        sum c = {0, 0, b, option};
        if (b < from->n) {
            c.bytes = from->at[b].bytes + o->bytes;
            c.us = from->at[b].us + o->us;
        }
        if (b == from->n || (a < next->n && (next->at[a].bytes < c.bytes ||
                                             (next->at[a].bytes == c.bytes && next->at[a].us <= c.us)))) {
            c = next->at[a++];
        } else if (c.bytes > s->budget) {
            b = from->n;
            continue;
        } else {
            b++;
            if (reach(s, c.bytes, c.us, rest_priced, rest_us) >= s->us * (1 - 1e-9)) continue;
        }
        if (n && c.us >= out[n - 1].us) continue;
        out[n++] = c;
    }
    return n;
}

/* Keeps of each of `most / 2` equal ranges of bytes the smallest and the fastest. */
static int32_t thin_out(sum *at, int32_t n, int32_t most) {
    if (n <= most) return n;
    const double low = (double)at[0].bytes, range = (double)at[n - 1].bytes - low + 1;
    const int32_t n_ranges = most / 2;
    int32_t kept = 0, before = -1, second = 0;
    for (int32_t i = 0; i < n; i++) {
        const double place = ((double)at[i].bytes - low) / range * n_ranges;
        const int32_t here =
            place < n_ranges ? (int32_t)place : n_ranges - 1; /* beyond 2^53 bytes range lacks its + 1 */
        if (here != before) second = 0;
        kept += second < 2; /* the third and later ones of a range take the place of the one before */
        before = here;
        second++;
        at[kept - 1] = at[i];
    }
    return kept;
}

/* The options of the best sum that improve() found, if it beats the plan. */
static void trace_back(search *s, const sums *list) {
    const sums *last = &list[s->n];
    if (!last->n || last->at[last->n - 1].us >= s->us) return;
    int32_t k = last->n - 1; /* the largest sum is the fastest */
    for (int32_t i = s->n; i > 0; i--) {
        const sum *c = &list[i].at[k];
        take(s, i - 1, c->option);
        k = c->parent;
    }
}

/* Step 4. list keeps every item's sums, to trace them back; room holds the two between which they are merged. */
static pi_status improve(search *s, sums *list) {
    const int32_t most = s->n > FEW_ITEMS ? MANY_SUMS : FEW_SUMS, most_options = MAX_STEPS / most / s->n + 8;
    int32_t n_options = 0;
    for (int32_t i = 0; i < s->n; i++)
        if (s->t[i].n_best > n_options) n_options = s->t[i].n_best;
    sum *room = malloc(sizeof *room * (size_t)most * 4);
    int32_t *option = malloc(sizeof *option * (size_t)n_options);
    double *priced = calloc((size_t)s->n + 1, sizeof *priced), *least = calloc((size_t)s->n + 1, sizeof *least);
    bool ok = room && option && priced && least;
    for (int32_t i = s->n; ok && i-- > 0;) {
        const table *t = &s->t[i];
        const pi_option *k = &t->option[at_price(t, s->price)];
        priced[i] = priced[i + 1] + k->us + s->price * (double)k->bytes;
        least[i] = least[i + 1] + t->option[t->best[t->n_best - 1]].us;
    }
    for (int32_t i = 0; ok && i < s->n && list[i].n; i++) {
        const int32_t n = candidates(s, &s->t[i], most_options, option);
        sums next = {room, 0};
        for (int32_t k = 0; k < n; k++) {
            sum *to = next.at == room ? room + (ptrdiff_t)most * 2 : room;
            const int32_t m =
                merge(s, &next, &list[i], &s->t[i].option[option[k]], option[k], priced[i + 1], least[i + 1], to);
            next = (sums){to, thin_out(to, m, most)};
        }
        list[i + 1].at = malloc(sizeof(sum) * (size_t)next.n + 1);
        ok = list[i + 1].at != NULL;
        if (!ok) break;
        memcpy(list[i + 1].at, next.at, sizeof(sum) * (size_t)next.n);
        list[i + 1].n = next.n;
    }
    if (ok) trace_back(s, list);
    free(room);
    free(option);
    free(priced);
    free(least);
    return ok ? PI_OK : PI_FAIL(PI_ERROR_MEMORY, "out of memory planning %d items", s->n);
}

static pi_status improve_plan(search *s) {
    sum none = {0, 0, -1, -1};
    sums *list = calloc((size_t)s->n + 1, sizeof *list);
    if (!list) return PI_FAIL(PI_ERROR_MEMORY, "out of memory planning %d items", s->n);
    list[0] = (sums){&none, 1};
    const pi_status st = improve(s, list);
    for (int32_t i = 1; i <= s->n; i++) free(list[i].at);
    free(list);
    return st;
}

pi_status pi_choose(const pi_item *item, int32_t n_items, uint64_t budget, bool thorough, int32_t *chosen,
                    double *bound) {
    const size_t n = n_items > 0 ? (size_t)n_items : 0;
    size_t n_options = 0;
    for (size_t i = 0; i < n; i++) n_options += (size_t)item[i].n;
    table *t = calloc(n, sizeof *t);
    int32_t *index = calloc(n_options, 2 * sizeof *index);
    pi_status st = t && index ? PI_OK : PI_FAIL(PI_ERROR_MEMORY, "out of memory planning %d items", n_items);
    if (st == PI_OK) {
        search s = {.t = t, .n = n_items, .budget = budget};
        int32_t *at = index;
        for (int32_t i = 0; i < n_items; i++) {
            t[i] = (table){.best = at, .hull = at + item[i].n, .option = item[i].option};
            at += 2 * (ptrdiff_t)item[i].n;
            find_best(&t[i], item[i].n);
            t[i].at = t[i].best[0];
            s.us += t[i].option[t[i].at].us;
        }
        price_bytes(&s);
        spend_rest(&s);
        if (thorough && s.us - s.bound > good_enough * s.us) {
            st = improve_plan(&s);
            if (st == PI_OK) spend_rest(&s);
        }
        *bound = s.bound < s.us ? s.bound : s.us;
        for (int32_t i = 0; i < n_items; i++) chosen[i] = t[i].at;
    }
    free(t);
    free(index);
    return st;
}
