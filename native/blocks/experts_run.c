/* experts_run.c - the chosen experts' products: of generated tokens by row kernels, of prompts by matrix products. */
#include "experts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Values that the activation is called for at a time. */
enum { MOST = 1 << 20 };

static float sigmoid(float x) { return 1 / (1 + expf(-x)); }

static te_ffn_counts *counts_of(const pi_session *s, const te_team *team, int32_t l) {
    return &s->count[(ptrdiff_t)l * s->options.n_threads + team->ith].ffn;
}

/* The first n of up become hidden values; members share them. */
static void activate(const pi_session *s, const te_team *team, int32_t l, int64_t n) {
    const pi_model *m = s->model;
    int64_t lo, hi;
    te_share(team, n, 64, &lo, &hi);
    for (int64_t i = lo, many; i < hi; i += many) {
        many = hi - i < MOST ? hi - i : MOST;
        m->kernels->glu((te_activation)m->info.activation, m->info.activation_threshold,
                        m->info.is_gated ? s->gate + i : NULL, s->up + i, (int32_t)many, s->up + i);
    }
    te_ffn_counts *c = counts_of(s, team, l);
    c->listed += hi - lo;
    c->computed += hi - lo;
    for (int64_t i = lo; i < hi; i++) c->fired += s->up[i] != 0;
}

static int32_t token_of(const pi_experts *w, const pi_route_list *routes, int32_t i) {
    return routes->token ? routes->token[i] : i / w->n_used;
}

static int by_size(const void *a, const void *b) { return ((const te_expert *)b)->n - ((const te_expert *)a)->n; }

static const float *bias_of(const float *all, int32_t e, int32_t n) { return all ? all + (ptrdiff_t)e * n : NULL; }

/* Puts the routes in the order of their experts: s->routes' place and first. By one member. */
static void order_routes(const pi_session *s, const pi_experts *w, const pi_route_list *routes) {
    const pi_routes *to = &s->routes;
    const int32_t *expert = routes->expert;
    int32_t at = 0;
    memset(to->first, 0, sizeof *to->first * ((size_t)w->n_expert + 1));
    for (int32_t i = 0; i < routes->n; i++) to->first[expert[i]]++;
    for (int32_t e = 0; e <= w->n_expert; e++) {
        const int32_t has = to->first[e];
        to->first[e] = at;
        at += has;
    }
    for (int32_t i = 0; i < routes->n; i++) to->place[i] = to->first[expert[i]]++;
    for (int32_t e = w->n_expert; e > 0; e--) to->first[e] = to->first[e - 1]; /* back to where each begins */
    to->first[0] = 0;
}

/* Expert e's n rows of a matrix of all experts, or none where the block has no such. */
static te_mat rows_of(const te_mat *all, int32_t e, int32_t n) { return all->w ? pi_expert_rows(all, e, n) : *all; }

/* The chosen experts, and what else of the routes is in their order; t0: the number of the first token. By one member. */
static void list_experts(const pi_session *s, const pi_experts *w, const pi_route_list *routes, int32_t t0) {
    const pi_routes *to = &s->routes;
    order_routes(s, w, routes);
    for (int32_t i = 0; i < routes->n; i++) {
        to->token[to->place[i]] = token_of(w, routes, i) - t0;
        to->factor[to->place[i]] = routes->weight[i];
    }
    te_expert *one = to->list;
    for (int32_t e = 0; e < w->n_expert; e++) {
        const int32_t n = to->first[e + 1] - to->first[e];
        if (!n) continue;
        *one++ = (te_expert){.gate = rows_of(&w->gate, e, w->n_ff),
                             .up = rows_of(&w->up, e, w->n_ff),
                             .down = rows_of(&w->down, e, s->model->info.n_embd),
                             .down_t = rows_of(&w->down_t, e, w->n_ff),
                             .gate_b = bias_of(w->gate_b, e, w->n_ff),
                             .up_b = bias_of(w->up_b, e, w->n_ff),
                             .down_b = bias_of(w->down_b, e, s->model->info.n_embd),
                             .first = to->first[e],
                             .n = n};
    }
}

static te_mixture mixture_of(const pi_session *s, const pi_route_list *routes, int32_t n_experts, const float *h,
                             float *y, int32_t n_tok, bool add) {
    const pi_model_info *info = &s->model->info;
    return (te_mixture){.expert = s->routes.list,
                        .n_experts = n_experts,
                        .act = (te_activation)info->activation,
                        .threshold = info->activation_threshold,
                        .skip = s->options.sparsity != PI_SPARSITY_DENSE,
                        .n_tok = n_tok,
                        .n_routes = routes->n,
                        .cols = info->n_embd,
                        .place = s->routes.place,
                        .token = s->routes.token,
                        .weight = s->routes.factor,
                        .x = h,
                        .ldx = (size_t)info->n_embd,
                        .y = y,
                        .ldy = (size_t)info->n_embd,
                        .add = add,
                        .gate = s->gate,
                        .hidden = s->up,
                        .out = s->routes.x};
}

/* How many experts have routes. */
static int32_t n_listed(const pi_session *s, const pi_experts *w) {
    int32_t n = 0;
    for (int32_t e = 0; e < w->n_expert; e++) n += s->routes.first[e + 1] > s->routes.first[e];
    return n;
}

void pi_experts_rows(const pi_session *s, te_team *team, const pi_block *block, int32_t l, const pi_route_list *routes,
                     const float *h, float *y, int32_t n_tok, bool add) {
    enum { PASS = 32 }; /* tokens that te_op_experts takes */
    const pi_experts *w = &block->experts;
    const size_t n_embd = (size_t)s->model->info.n_embd;
    for (int32_t t0 = 0, i = 0, end; t0 < n_tok; t0 += PASS, i = end) {
        const int32_t n = n_tok - t0 < PASS ? n_tok - t0 : PASS;
        for (end = i; end < routes->n && token_of(w, routes, end) < t0 + n;) end++;
        const pi_route_list part = {.n = end - i,
                                    .token = routes->token ? routes->token + i : NULL,
                                    .expert = routes->expert + i,
                                    .weight = routes->weight + i};
        const float *x = h + n_embd * (size_t)t0;
        if (t0 > 0) te_barrier(team); /* the tokens before had the same buffers */
        if (team->ith == 0) list_experts(s, w, &part, routes->token ? t0 : 0);
        te_op_experts_pack(team, s->ws, &w->gate, &w->up, x, n_embd, n);
        te_barrier(team);
        const te_mixture m = mixture_of(s, &part, n_listed(s, w), x, y + n_embd * (size_t)t0, n, add);
        te_op_experts(team, s->ws, &m, counts_of(s, team, l));
    }
}

void pi_experts_gemm(const pi_session *s, te_team *team, const pi_block *block, int32_t l, const pi_route_list *routes,
                     const float *h, float *y, int32_t n_tok, bool add) {
    const pi_experts *w = &block->experts;
    if (team->ith == 0) {
        list_experts(s, w, routes, 0);
        qsort(s->routes.list, (size_t)n_listed(s, w), sizeof *s->routes.list, by_size);
    }
    te_barrier(team);
    const int32_t n_experts = n_listed(s, w);
    const te_mixture m = mixture_of(s, routes, n_experts, h, y, n_tok, add);
    te_op_experts_gemm(team, s->ws, &m, counts_of(s, team, l));
}

void pi_experts_norm(const pi_session *s, te_team *team, const pi_norm *norm, float *y, int32_t n_tok) {
    const size_t n_embd = (size_t)s->model->info.n_embd;
    te_barrier(team);
    for (int32_t t = team->ith; t < n_tok; t += team->nth)
        pi_norm_row(s->model, norm, y + n_embd * (size_t)t, y + n_embd * (size_t)t);
    te_barrier(team);
}

void pi_experts_shared(const pi_session *s, te_team *team, const pi_block *block, int32_t l, const float *h, float *y,
                       int32_t n_tok, te_way way) {
    const pi_experts *w = &block->experts;
    const size_t n_embd = (size_t)s->model->info.n_embd, n_ff = (size_t)w->n_ff_shared;
    float *factor = s->routes.score, *out = s->routes.x;
    const te_linear in[2] = {{.w = w->shared_up, .y = s->up, .ldy = n_ff, .way = way},
                             {.w = w->shared_gate, .y = s->gate, .ldy = n_ff, .way = way}};
    te_op_linear(team, s->ws, in, w->shared_gate.w ? 2 : 1, h, n_embd, n_tok);
    for (int32_t t = team->ith; t < n_tok; t += team->nth) {
        float sum = 0;
        for (size_t c = 0; w->shared_router && c < n_embd; c++) sum += w->shared_router[c] * h[n_embd * (size_t)t + c];
        factor[t] = w->shared_router ? sigmoid(sum) : 1;
    }
    te_barrier(team);
    activate(s, team, l, (int64_t)n_tok * (int64_t)n_ff);
    te_barrier(team);
    const te_linear down = {.w = w->shared_down, .y = out, .ldy = n_embd, .way = way};
    te_op_linear(team, s->ws, &down, 1, s->up, n_ff, n_tok);
    te_barrier(team);
    if (w->shared_post_norm.w) pi_experts_norm(s, team, &w->shared_post_norm, out, n_tok);
    int64_t lo, hi;
    te_share(team, (int64_t)n_embd, 16, &lo, &hi);
    for (int32_t t = 0; t < n_tok; t++)
        for (int64_t c = lo; c < hi; c++)
            y[n_embd * (size_t)t + (size_t)c] += factor[t] * out[n_embd * (size_t)t + (size_t)c];
    if (team->ith == 0) {
        te_ffn_counts *c = counts_of(s, team, l);
        c->rows += (w->shared_gate.w ? 3 : 2) * w->n_ff_shared;
        c->bytes += pi_mat_bytes(&w->shared_gate) + pi_mat_bytes(&w->shared_up) + pi_mat_bytes(&w->shared_down);
    }
}
