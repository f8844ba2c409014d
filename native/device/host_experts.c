/* host_experts.c - the stand-in device's operations of a mixture of experts. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "host.h"

enum { OP_ROUTE = 10, OP_EXPERTS = 11 };

/* The largest of v[0..n-1] that is above `below` or, if equal, comes later: experts in order of their rank, without marks. */
typedef struct ranked {
    float v;
    int32_t at;
} ranked;
static ranked next_best(const float *v, int32_t n, ranked before) {
    ranked best = {0, -1};
    for (int32_t i = 0; i < n; i++) {
        const bool later = before.at < 0 || v[i] < before.v || (v[i] == before.v && i > before.at);
        if (later && !isnan(v[i]) && (best.at < 0 || v[i] > best.v)) best = (ranked){v[i], i};
    }
    return best;
}

/* -inf for all experts outside the best groups; group [n_group]: room. */
static void drop_groups(const te_route_args *a, float *rank, float *group) {
    const int32_t size = a->n_expert / a->n_group;
    for (int32_t g = 0; g < a->n_group; g++) {
        const ranked first = next_best(rank + (ptrdiff_t)g * size, size, (ranked){0, -1}),
                     second = next_best(rank + (ptrdiff_t)g * size, size, first);
        group[g] = second.at < 0 ? first.v : first.v + second.v;
    }
    ranked last = {0, -1};
    for (int32_t i = 0; i < a->n_group_used; i++) last = next_best(group, a->n_group, last);
    for (int32_t g = 0; g < a->n_group; g++)
        for (int32_t e = 0; (group[g] < last.v || (group[g] == last.v && g > last.at)) && e < size; e++)
            rank[(ptrdiff_t)g * size + e] = -INFINITY;
}

/* The first expert that is none of expert[0..n-1]: of what is not a number any will do that is another. */
static int32_t first_left(const int32_t *expert, int32_t n) {
    int32_t e = 0;
    for (int32_t r = 0; r < n; r++)
        if (expert[r] == e) {
            e++;
            r = -1;
        }
    return e;
}

static void choose(const pi_host_device *d, const te_route_args *a, int32_t t, float *p, float *rank, float *group) {
    const int32_t n = a->n_expert;
    int32_t *expert = a->expert + (ptrdiff_t)t * a->n_used;
    float *weight = a->weight + (ptrdiff_t)t * a->n_used, sum = 0;
    memcpy(p, a->score + a->ld_score * (size_t)t, sizeof *p * (size_t)n);
    if (a->gating == TE_GATING_SOFTMAX) d->kernels->softmax(p, n, 1);
    for (int32_t e = 0; a->gating == TE_GATING_SIGMOID && e < n; e++) p[e] = 1 / (1 + expf(-p[e]));
    for (int32_t e = 0; e < n; e++) rank[e] = a->choice_b ? p[e] + a->choice_b[e] : p[e];
    if (a->n_group > 1) drop_groups(a, rank, group);
    ranked last = {0, -1};
    for (int32_t r = 0; r < a->n_used; r++) {
        const ranked next = next_best(rank, n, last);
        if (next.at >= 0) last = next;
        expert[r] = next.at >= 0 ? next.at : first_left(expert, r);
        weight[r] = p[expert[r]];
        if (a->gating == TE_GATING_CHOSEN && weight[r] == -INFINITY) weight[r] = -FLT_MAX;
    }
    if (a->gating == TE_GATING_CHOSEN) d->kernels->softmax(weight, a->n_used, 1);
    for (int32_t r = 0; r < a->n_used; r++) sum += weight[r];
    if (sum < 1e-20F) sum = 1e-20F;
    for (int32_t r = 0; r < a->n_used; r++) {
        weight[r] = a->scale * (a->normed ? weight[r] / sum : weight[r]);
        if (a->factor) weight[r] *= a->factor[expert[r]];
    }
}

void pi_host_route(pi_device *dev, const te_route_args *a) {
    pi_host_device *d = pi_host(dev);
    if (!pi_host_begin_op(dev, OP_ROUTE, a->n_tok)) return;
    pi_host_mix(d, a->score);
    pi_host_mix(d, a->place);
    pi_host_mix(d, a->publish);
    pi_host_mix(d, a->n_kept);
    const size_t n = (size_t)a->n_expert;
    float *p = pi_host_scratch(d, 3 * n);
    if (!p) return;
    int32_t n_missing = 0;
    for (int32_t t = 0; t < a->n_tok; t++) {
        choose(d, a, t, p, p + n, p + 2 * n);
        int32_t keeps = 0;
        for (int32_t r = 0; a->n_kept && r < a->n_used; r++) keeps += a->place[a->expert[t * a->n_used + r]] < 0;
        keeps = a->n_kept ? a->n_kept[keeps] : 0;
        for (int32_t r = 0; r < a->n_used; r++) {
            const int32_t i = t * a->n_used + r, e = a->expert[i];
            const bool kept = a->place[e] < 0 && keeps > 0, there = a->place[e] >= 0 || kept;
            keeps -= kept;
            if (a->n_kept) a->kept[i] = kept;
            uint32_t word[2] = {there ? UINT32_MAX : (uint32_t)e, 0};
            memcpy(&word[1], &a->weight[i], sizeof word[1]);
            n_missing += !there;
            if (a->uses) a->uses[e]++;
            if (a->publish) pi_publish_words(a->publish, 2 * (int64_t)i, 2, *a->ticket.base + a->ticket.add, word);
        }
    }
    if (a->n_missing) *a->n_missing = n_missing;
}

/* Rows of the expert at a place, of a matrix that has n of each; w NULL: there is no such matrix. */
static te_mat at_place(const te_mat *all, int32_t place, int32_t n) {
    te_mat m = *all;
    if (m.w) m.w = (const char *)m.w + m.stride * (size_t)place * (size_t)n;
    m.n_rows = n;
    return m;
}

/* y += weight * what the expert at a place gives for x; hidden: up's and gate's products, out [n_embd]. */
static void run_route(pi_host_device *d, const te_experts_args *a, int32_t place, int32_t e, const float *x,
                      float weight, float *hidden, float *out, float *y) {
    const int32_t n_embd = a->up.cols;
    const size_t n_ff = (size_t)a->n_ff;
    const float *down_b = a->down_b ? a->down_b + (size_t)n_embd * (size_t)e : NULL;
    const te_mat gate = at_place(&a->gate, place, a->n_ff), up = at_place(&a->up, place, a->n_ff),
                 down = at_place(&a->down, place, n_embd), down_t = at_place(&a->down_t, place, a->n_ff);
    float *const gates = gate.w ? hidden + n_ff : NULL;
    const te_linear in[2] = {
        {.w = up, .bias = a->up_b ? a->up_b + n_ff * (size_t)e : NULL, .y = hidden, .ldy = n_ff},
        {.w = gate, .bias = a->gate_b ? a->gate_b + n_ff * (size_t)e : NULL, .y = gates, .ldy = n_ff}};
    for (int32_t c = 0; c < n_embd; c++) out[c] = (a->on_input ? weight : 1) * x[c];
    te_op_linear(d->team, d->ws, in, gates ? 2 : 1, out, (size_t)n_embd, 1);
    d->kernels->glu((te_activation)a->act, a->threshold, gates, hidden, a->n_ff, hidden);
    for (size_t i = 0; a->counts && i < n_ff; i++) a->counts[2] += hidden[i] != 0;
    if (a->counts) a->counts[0] += (uint32_t)a->n_ff, a->counts[1] += (uint32_t)a->n_ff;
    const te_linear back = {.w = down, .bias = down_b, .y = out, .ldy = (size_t)n_embd};
    if (down_t.w)
        te_op_linear_t(d->team, d->ws, &down_t, hidden, n_ff, 1, down_b, out, (size_t)n_embd, false, TE_BY_ROWS);
    else
        te_op_linear(d->team, d->ws, &back, 1, hidden, n_ff, 1);
    for (int32_t c = 0; c < n_embd; c++) y[c] += (a->on_input ? 1 : weight) * out[c];
}

void pi_host_experts(pi_device *dev, const te_experts_args *a) {
    pi_host_device *d = pi_host(dev);
    if (a->choice) pi_host_route(dev, a->choice);
    if (!pi_host_begin_op(dev, OP_EXPERTS, a->n_tok)) return;
    pi_host_mix(d, a->gate.w);
    pi_host_mix(d, a->up.w);
    pi_host_mix(d, a->place);
    pi_host_mix(d, a->y);
    const int32_t n_embd = a->up.cols, widest = n_embd > a->n_ff ? n_embd : a->n_ff;
    float *hidden = pi_host_scratch(d, 2 * (size_t)a->n_ff + 2 * (size_t)n_embd);
    if (!hidden || !pi_host_reserve_work(d, 1, widest, widest)) return;
    for (int32_t t = 0; t < a->n_tok; t++) {
        const float *x = a->x + a->ldx * (size_t)t;
        float *y = a->y + (ptrdiff_t)t * n_embd, *out = hidden + 2 * (size_t)a->n_ff, *normed = out + n_embd;
        if (a->norm.kind != TE_NO_NORM) {
            d->kernels->rms_norm(x, a->norm.w, a->norm.eps, n_embd, normed);
            x = normed;
        }
        if (!a->add) memset(y, 0, sizeof *y * (size_t)n_embd);
        for (int32_t r = 0; r < a->n_used; r++) {
            const int32_t i = t * a->n_used + r, e = a->expert[i],
                          place = a->kept      ? (a->kept[i] ? e : -1)
                                  : a->missing ? -1 - a->place[e] - a->first
                                               : a->place[e];
            if (place < 0 || place >= a->n_places) continue;
            run_route(d, a, place, e, x, a->weight[i], hidden, out, y);
        }
    }
    if (a->merge) pi_host_merge(dev, a->merge);
}
