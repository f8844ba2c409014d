/* experts_run.c - the chosen experts' products: of generated tokens by row kernels, of prompts by matrix products. */
#include "experts.h"

#include <math.h>
#include <string.h>

/* Values that the activation is called for at a time. */
enum { MOST = 1 << 20 };

static float sigmoid(float x) { return 1 / (1 + expf(-x)); }

static te_ffn_counts *counts_of(const pi_session *s, const te_team *team, int32_t l) {
    return &s->count[(ptrdiff_t)l * s->options.n_threads + team->ith].ffn;
}

static int32_t token_of(const pi_experts *w, const pi_route_list *routes, int32_t i) {
    return routes->token ? routes->token[i] : i / w->n_used;
}

/* Rows of h in the order of the routes' places. */
static void gather(const pi_session *s, te_team *team, const pi_block *block, int32_t l, const pi_route_list *routes,
                   const float *h) {
    const pi_experts *w = &block->experts;
    const pi_routes *to = &s->routes;
    const size_t n_embd = (size_t)s->model->info.n_embd;
    if (team->ith == 0) {
        const int64_t one = (pi_mat_bytes(&w->gate) + pi_mat_bytes(&w->up) + pi_mat_bytes(&w->down)) / w->n_expert;
        const int64_t n_chosen = pi_experts_order(s, w, routes);
        te_ffn_counts *c = counts_of(s, team, l);
        c->rows += n_chosen * w->n_ff * 3;
        c->bytes += n_chosen * one;
    }
    te_barrier(team);
    for (int32_t i = team->ith; i < routes->n; i += team->nth)
        memcpy(to->x + n_embd * (size_t)to->place[i], h + n_embd * (size_t)token_of(w, routes, i), sizeof *h * n_embd);
    te_barrier(team);
}

/* The first n of up become hidden values; members share them. */
static void activate(const pi_session *s, const te_team *team, int32_t l, int64_t n) {
    const pi_model *m = s->model;
    int64_t lo, hi;
    te_share(team, n, 64, &lo, &hi);
    for (int64_t i = lo, many; i < hi; i += many) {
        many = hi - i < MOST ? hi - i : MOST;
        m->kernels->glu((te_activation)m->info.activation, m->info.activation_threshold, s->gate + i, s->up + i,
                        (int32_t)many, s->up + i);
    }
    te_ffn_counts *c = counts_of(s, team, l);
    c->listed += hi - lo;
    c->computed += hi - lo;
    for (int64_t i = lo; i < hi; i++) c->fired += s->up[i] != 0;
}

/* y of all routes: [n][n_ff] hidden values, then [n][n_embd] outputs in the place of the inputs. */
static void run_experts(const pi_session *s, te_team *team, const pi_block *block, int32_t l, int32_t n, te_way way) {
    const pi_model *m = s->model;
    const pi_experts *w = &block->experts;
    const pi_routes *to = &s->routes;
    const size_t n_embd = (size_t)m->info.n_embd, n_ff = (size_t)w->n_ff;
    for (int32_t e = 0; e < w->n_expert; e++) {
        const size_t at = (size_t)to->first[e];
        const int32_t n_tok = to->first[e + 1] - to->first[e];
        const te_linear in[2] = {{.w = pi_experts_up(w, e), .y = s->up + n_ff * at, .ldy = n_ff, .way = way},
                                 {.w = pi_experts_gate(w, e), .y = s->gate + n_ff * at, .ldy = n_ff, .way = way}};
        if (n_tok) te_op_linear(team, s->ws, in, 2, to->x + n_embd * at, n_embd, n_tok);
    }
    te_barrier(team);
    activate(s, team, l, (int64_t)n * (int64_t)n_ff);
    te_barrier(team);
    for (int32_t e = 0; e < w->n_expert; e++) {
        const size_t at = (size_t)to->first[e];
        const int32_t n_tok = to->first[e + 1] - to->first[e];
        const te_linear out = {
            .w = pi_experts_down(w, e, m->info.n_embd), .y = to->x + n_embd * at, .ldy = n_embd, .way = way};
        if (n_tok) te_op_linear(team, s->ws, &out, 1, s->up + n_ff * at, n_ff, n_tok);
    }
    te_barrier(team);
}

/* Adds up a token's routes in their order; members share the columns. */
static void sum_routes(const pi_session *s, const te_team *team, const pi_experts *w, const pi_route_list *routes,
                       float *y, int32_t n_tok, bool add) {
    const pi_routes *to = &s->routes;
    const size_t n_embd = (size_t)s->model->info.n_embd;
    int64_t lo, hi;
    te_share(team, (int64_t)n_embd, 16, &lo, &hi);
    for (int32_t t = 0, i = 0, end; t < n_tok; t++, i = end, y += n_embd) {
        for (end = i; end < routes->n && token_of(w, routes, end) == t;) end++;
        for (int64_t c = lo; c < hi; c++) {
            float sum = 0;
            for (int32_t r = i; r < end; r++)
                sum += routes->weight[r] * to->x[n_embd * (size_t)to->place[r] + (size_t)c];
            y[c] = add ? y[c] + sum : sum;
        }
    }
}

static void run_routes(const pi_session *s, te_team *team, const pi_block *block, int32_t l,
                       const pi_route_list *routes, const float *h, float *y, int32_t n_tok, bool add, te_way way) {
    gather(s, team, block, l, routes, h);
    run_experts(s, team, block, l, routes->n, way);
    sum_routes(s, team, &block->experts, routes, y, n_tok, add);
}

void pi_experts_rows(const pi_session *s, te_team *team, const pi_block *block, int32_t l, const pi_route_list *routes,
                     const float *h, float *y, int32_t n_tok, bool add) {
    run_routes(s, team, block, l, routes, h, y, n_tok, add, TE_BY_ROWS);
}

void pi_experts_gemm(const pi_session *s, te_team *team, const pi_block *block, int32_t l, const pi_route_list *routes,
                     const float *h, float *y, int32_t n_tok, bool add) {
    run_routes(s, team, block, l, routes, h, y, n_tok, add, TE_BY_GEMM);
}

void pi_experts_shared(const pi_session *s, te_team *team, const pi_block *block, int32_t l, const float *h, float *y,
                       int32_t n_tok, te_way way) {
    const pi_experts *w = &block->experts;
    const size_t n_embd = (size_t)s->model->info.n_embd, n_ff = (size_t)w->n_ff_shared;
    float *factor = s->routes.score, *out = s->routes.x;
    const te_linear in[2] = {{.w = w->shared_up, .y = s->up, .ldy = n_ff, .way = way},
                             {.w = w->shared_gate, .y = s->gate, .ldy = n_ff, .way = way}};
    te_op_linear(team, s->ws, in, 2, h, n_embd, n_tok);
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
    int64_t lo, hi;
    te_share(team, (int64_t)n_embd, 16, &lo, &hi);
    for (int32_t t = 0; t < n_tok; t++)
        for (int64_t c = lo; c < hi; c++)
            y[n_embd * (size_t)t + (size_t)c] += factor[t] * out[n_embd * (size_t)t + (size_t)c];
    if (team->ith == 0) {
        te_ffn_counts *c = counts_of(s, team, l);
        c->rows += 3 * w->n_ff_shared;
        c->bytes += pi_mat_bytes(&w->shared_gate) + pi_mat_bytes(&w->shared_up) + pi_mat_bytes(&w->shared_down);
    }
}
