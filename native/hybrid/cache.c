/* cache.c - experts move to where they are used.
 *
 * Each expert has a running mean of how often a token uses it. Where one without a place is used so much more than one
 * with a place that the bytes which this saves the CPU over the next HORIZON tokens are worth the copy, they change: the
 * one loses its place before the next step, and the other has it once its copy has arrived. Copies run beside steps, and
 * are begun for at most a part of a step's time, so that they take little of the host memory's rate. */
#include "cache.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Means are of the last WINDOW tokens or so, of several sequences at least of the last STEPS steps: of eight, 64 tokens are
 * no more than eight steps, whose noise had half an expert of each layer copied in each step, and 3 % fewer uses found
 * theirs. What a file's counts say is worth as much as COUNTED tokens: they may be of
 * other texts, or of another model. A longer window wins 1 % of the uses where nothing ever changes, and loses 4 where
 * what a token uses is much like what the one before used (tests/native/hybrid_cache_check.c). */
enum { HORIZON = 256, WINDOW = 64, STEPS = 32, COUNTED = 32 };
/* The part of a step's time that copies may take, and the rate that they are reckoned at. */
static const double copy_share = 0.3, copy_bytes_per_ns = 40;
/* What an expert must be used more than another, for such a mean to tell: in standard deviations. */
static const double sure = 1;

typedef struct moving {
    int32_t layer, expert, place;
} moving;

struct pi_expert_cache {
    bool live;
    float *used;              /* [n_layer][n_expert] running means */
    bool *comes;              /* [n_layer][n_expert] on its way to a place */
    double n_seen;            /* tokens that they are of */
    pi_expert_counts *counts; /* [n_layer] */
    struct {
        moving queue[PI_FETCHES];
        uint32_t n_asked, n_taken;
        int32_t next_layer; /* the first that is asked what it wants */
    } device[PI_MAX_DEVICES];
};

static int32_t *places_of(const pi_hybrid *h, int32_t l) {
    return h->place + (ptrdiff_t)l * h->s->model->info.n_expert;
}

pi_status pi_cache_open(pi_hybrid *h, bool live) {
    const pi_model_info *i = &h->s->model->info;
    const size_t n_layer = (size_t)i->n_layer, n = pi_mul(n_layer, (size_t)i->n_expert);
    if (!i->n_expert) return PI_OK;
    pi_expert_cache *c = calloc(1, sizeof *c);
    h->cache = c;
    h->place = calloc(n, sizeof *h->place);
    if (c) c->used = calloc(n, sizeof *c->used);
    if (c) c->comes = calloc(n, sizeof *c->comes);
    if (c) c->counts = calloc(n_layer, sizeof *c->counts);
    if (!c || !h->place || !c->used || !c->comes || !c->counts)
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the places of %d experts", i->n_expert);
    c->live = live;
    const pi_model *m = h->s->model;
    for (size_t k = 0; m->expert_counts && k < n; k++)
        c->used[k] = (float)((double)m->expert_counts[k] / (double)m->expert_tokens);
    if (m->expert_counts) c->n_seen = COUNTED;
    for (int32_t l = 0; l < i->n_layer; l++) {
        const pi_device_layer *d = &h->layer[l];
        if (!pi_experts_of(&h->s->model->layer[l])) continue;
        c->counts[l].n_places = d->n_hot;
        for (int32_t k = 0; k < d->n_hot; k++) places_of(h, l)[d->hot[k]] = k;
        for (int32_t k = 0; k < d->n_cold; k++) places_of(h, l)[d->cold[k]] = -1 - k;
    }
    return PI_OK;
}

void pi_cache_close(pi_hybrid *h) {
    pi_expert_cache *c = h->cache;
    free(h->place);
    h->place = NULL;
    if (c) free(c->used);
    if (c) free(c->comes);
    if (c) free(c->counts);
    free(c);
    h->cache = NULL;
}

/* Experts without a place are listed by their numbers: neighbours in the file are then loaded together. */
static void list_cold(pi_hybrid *h, int32_t l) {
    pi_device_layer *d = &h->layer[l];
    int32_t *place = places_of(h, l);
    d->n_cold = 0;
    for (int32_t e = 0; e < h->s->model->info.n_expert; e++) {
        if (place[e] >= 0) continue;
        d->cold[d->n_cold] = e;
        place[e] = -1 - d->n_cold++;
    }
}

pi_status pi_cache_settle(pi_hybrid *h) {
    pi_expert_cache *c = h->cache;
    for (int32_t i = 0; c && c->live && i < h->n_devices; i++) {
        pi_device *dev = h->device[i].dev;
        if (c->device[i].n_asked == c->device[i].n_taken) continue;
        pi_status st = PI_OK;
        const uint32_t n_there = dev->ops->fetched(dev, &st);
        if (st != PI_OK) return PI_FAIL(st, "%s", dev->ops->error());
        for (; c->device[i].n_taken != n_there; c->device[i].n_taken++) {
            const moving m = c->device[i].queue[c->device[i].n_taken % PI_FETCHES];
            places_of(h, m.layer)[m.expert] = m.place;
            c->comes[(ptrdiff_t)m.layer * h->s->model->info.n_expert + m.expert] = false;
            h->layer[m.layer].hot[m.place] = m.expert;
            list_cold(h, m.layer);
        }
    }
    return PI_OK;
}

/* ---- who moves ---- */

static void note_uses(pi_hybrid *h, int32_t n_tok) {
    pi_expert_cache *c = h->cache;
    const pi_model_info *info = &h->s->model->info;
    const int32_t n_expert = info->n_expert;
    const int32_t several = STEPS * (n_tok < PI_SMALL_BATCH ? n_tok : PI_SMALL_BATCH),
                  window = several > WINDOW ? several : WINDOW;
    c->n_seen = c->n_seen + n_tok < window ? c->n_seen + n_tok : window;
    for (int32_t l = 0; l < info->n_layer; l++) {
        const pi_device_layer *d = &h->layer[l];
        if (d->device < 0 || !pi_experts_of(&h->s->model->layer[l])) continue;
        const int32_t n = n_tok - pi_hybrid_unwanted(h, l);
        if (n == 0) continue;
        const double part = n < c->n_seen ? n / c->n_seen : 1; /* of the mean, that the new tokens are */
        const uint32_t *uses = h->device[d->device].counts + 3 * (ptrdiff_t)info->n_layer + (ptrdiff_t)l * n_expert;
        float *used = c->used + (ptrdiff_t)l * n_expert;
        for (int32_t e = 0; e < n_expert; e++) used[e] += (float)(part * ((double)uses[e] / n - used[e]));
        c->counts[l].n_resident += h->s->step[l].n_routes_device;
        c->counts[l].n_streamed += h->s->step[l].n_routes_streamed;
        c->counts[l].n_zero_copy += h->s->step[l].n_zero_copy;
    }
}

/* The layer's most used expert without a place, and the least used one with a place; false: they stay where they are. */
static bool find_move(const pi_hybrid *h, int32_t l, moving *out) {
    const pi_expert_cache *c = h->cache;
    const int32_t n_expert = h->s->model->info.n_expert;
    const float *used = c->used + (ptrdiff_t)l * n_expert;
    const int32_t *place = places_of(h, l);
    const bool *comes = c->comes + (ptrdiff_t)l * n_expert;
    int32_t in = -1, leave = -1;
    for (int32_t e = 0; e < n_expert; e++) {
        int32_t *best = place[e] >= 0 ? &leave : &in;
        if (comes[e]) continue;
        if (*best < 0 || (place[e] >= 0 ? used[e] < used[*best] : used[e] > used[*best])) *best = e;
    }
    if (in < 0 || leave < 0) return false;
    const double gain = (double)used[in] - used[leave];
    const double error = sure * sqrt(((double)used[in] + used[leave]) / (c->n_seen > 1 ? c->n_seen : 1));
    *out = (moving){l, in, place[leave]};
    return gain > error && gain * HORIZON > 1;
}

static pi_status start(pi_hybrid *h, const moving *m) {
    const pi_experts *w = pi_experts_of(&h->s->model->layer[m->layer]);
    const pi_device_layer *d = &h->layer[m->layer];
    pi_device *dev = h->device[d->device].dev;
    const te_mat *const there[PI_EXPERT_MATS] = {&d->gate, &d->up, w->down_t.w ? &d->down : &d->down_out};
    te_mat from[PI_EXPERT_MATS], to[PI_EXPERT_MATS];
    int32_t n = 0;
    for (int32_t k = 0; k < PI_EXPERT_MATS; k++) {
        const te_mat *all = pi_expert_mat(w, k);
        if (!all->w) continue;
        from[n] = pi_expert_rows(all, m->expert, all->n_rows / w->n_expert);
        to[n] = pi_expert_rows(there[k], m->place, from[n].n_rows);
        n++;
    }
    return dev->ops->fetch(dev, from, n, to);
}

void pi_cache_follow(pi_hybrid *h, int32_t n_tok, int64_t ns) {
    pi_expert_cache *c = h->cache;
    const int32_t n_layer = h->s->model->info.n_layer;
    if (!c) return;
    note_uses(h, n_tok);
    for (int32_t i = 0; c->live && i < h->n_devices; i++) {
        double left = copy_share * copy_bytes_per_ns * (double)ns;
        int32_t idle = 0; /* layers in a row that want nothing */
        for (int32_t l = c->device[i].next_layer; idle < n_layer && left > 0; l = (l + 1) % n_layer, idle++) {
            moving m;
            c->device[i].next_layer = l;
            const pi_experts *w = pi_experts_of(&h->s->model->layer[l]);
            if (h->layer[l].device != i || !w || !h->layer[l].n_hot || !h->layer[l].n_cold || !find_move(h, l, &m))
                continue;
            if (c->device[i].n_asked - c->device[i].n_taken == PI_FETCHES || start(h, &m) != PI_OK) break;
            double n_bytes = 0;
            for (int32_t k = 0; k < PI_EXPERT_MATS; k++)
                n_bytes += (double)pi_mat_bytes(pi_expert_mat(w, k)) / w->n_expert;
            places_of(h, l)[h->layer[l].hot[m.place]] = -1;
            list_cold(h, l);
            c->device[i].queue[c->device[i].n_asked++ % PI_FETCHES] = m;
            c->comes[(ptrdiff_t)l * h->s->model->info.n_expert + m.expert] = true;
            c->counts[l].n_copies++;
            c->counts[l].copied_bytes += (uint64_t)n_bytes;
            h->s->step[l].n_copies++;
            h->s->step[l].copied_bytes += (uint64_t)n_bytes;
            left -= n_bytes;
            idle = -1;
        }
    }
}

double pi_cache_wanted(const pi_hybrid *h, int32_t l, int32_t n_tok) {
    const pi_expert_cache *c = h->cache;
    const pi_experts *w = pi_experts_of(&h->s->model->layer[l]);
    const pi_device_layer *d = &h->layer[l];
    const float *used = c->used + (ptrdiff_t)l * h->s->model->info.n_expert;
    double sum = 0;
    for (int32_t k = 0; k < d->n_cold; k++) sum += used[d->cold[k]];
    const double each = c->n_seen > 0 && d->n_cold ? sum / d->n_cold : (double)w->n_used / w->n_expert;
    return each < 1 ? 1 - pow(1 - each, n_tok) : 1;
}

pi_expert_counts pi_cache_counts(const pi_hybrid *h, int32_t l) {
    return h->cache ? h->cache->counts[l] : (pi_expert_counts){0};
}
