/* experts.c - the mixture of experts: each token goes through the n_used feed-forwards that its router ranks first.
 *
 *     p = softmax(router . h)
 *     y += sum over the chosen experts e of p[e] / (sum of the chosen p) * down_e . (act(gate_e . h) * (up_e . h))
 *
 * A route is a token and one of its experts. Routes are put in the order of the experts, so that an expert's matrices are
 * read once for all tokens that chose it, and those of the others not at all. Which kernels compute a route depends on its
 * token's kind (prompt or generated), never on how many others chose the expert: a token's bits do not depend on others. */
#include <string.h>

#include "../model/bind.h"
#include "../model/keys.h"
#include "ops.h"

enum { MAX_EXPERTS = 4096, MAX_FF = 1 << 20 };

/* Expert e's rows of a matrix that has n of each. */
static te_mat rows_of(const te_mat *all, int32_t e, int32_t n) {
    te_mat m = *all;
    m.w = (const char *)all->w + all->stride * (size_t)e * (size_t)n;
    m.n_rows = n;
    return m;
}

/* The n_used largest probabilities, the first of equal ones before the others; those that are taken become -1. */
static void choose(const pi_experts *w, float *p, int32_t *expert, float *weight) {
    float sum = 0;
    for (int32_t r = 0; r < w->n_used; r++) {
        int32_t best = -1;
        for (int32_t e = 0; e < w->n_expert; e++)
            if (!(p[e] < 0) && (best < 0 || p[e] > p[best])) best = e;
        expert[r] = best;
        weight[r] = p[best];
        sum += p[best];
        p[best] = -1;
    }
    for (int32_t r = 0; r < w->n_used; r++) weight[r] /= sum;
}

/* Puts n routes in the order of their experts. Returns how many experts have some. */
static int32_t order(const pi_experts *w, const pi_routes *to, int32_t n) {
    int32_t at = 0, n_chosen = 0;
    memset(to->first, 0, sizeof *to->first * ((size_t)w->n_expert + 1));
    for (int32_t i = 0; i < n; i++) to->first[to->expert[i]]++;
    for (int32_t e = 0; e <= w->n_expert; e++) {
        const int32_t has = to->first[e];
        n_chosen += has > 0;
        to->first[e] = at;
        at += has;
    }
    for (int32_t i = 0; i < n; i++) to->place[i] = to->first[to->expert[i]]++;
    for (int32_t e = w->n_expert; e > 0; e--) to->first[e] = to->first[e - 1]; /* back to where each begins */
    to->first[0] = 0;
    return n_chosen;
}

/* Routes of tokens t0 ... t0+n-1. The router's products are those of the row kernels for prompts too: rounded inputs would
 * choose other experts. */
static void route(const pi_block_run *r, int32_t t0, int32_t n) {
    const pi_session *s = r->s;
    te_team *team = r->team;
    const pi_experts *w = &r->block->experts;
    const pi_routes *to = &s->routes;
    const size_t n_embd = (size_t)s->model->info.n_embd, n_expert = (size_t)w->n_expert;
    const float *h = pi_block_input(r) + n_embd * (size_t)t0;
    const te_linear router = {.w = w->router, .y = to->score, .ldy = n_expert, .way = TE_BY_ROWS};
    te_op_linear(team, s->ws, &router, 1, h, n_embd, n);
    te_barrier(team);
    for (int32_t t = team->ith; t < n; t += team->nth) {
        float *p = to->score + n_expert * (size_t)t;
        s->model->kernels->softmax(p, w->n_expert, 1);
        choose(w, p, to->expert + (ptrdiff_t)t * w->n_used, to->weight + (ptrdiff_t)t * w->n_used);
    }
    te_barrier(team);
    if (team->ith == 0) {
        const int64_t one = (pi_mat_bytes(&w->gate) + pi_mat_bytes(&w->up) + pi_mat_bytes(&w->down)) / w->n_expert;
        const int64_t n_chosen = order(w, to, n * w->n_used);
        te_ffn_counts *c = &s->count[(ptrdiff_t)r->l * s->options.n_threads].ffn;
        c->rows += n_chosen * w->n_ff * 3;
        c->bytes += n_chosen * one + pi_mat_bytes(&w->router);
    }
    te_barrier(team);
    for (int32_t i = team->ith; i < n * w->n_used; i += team->nth)
        memcpy(to->x + n_embd * (size_t)to->place[i], h + n_embd * (size_t)(i / w->n_used), sizeof *h * n_embd);
    te_barrier(team);
}

/* y of all routes: [n][n_ff] hidden values, then [n][n_embd] outputs in the place of the inputs. */
static void run_experts(const pi_block_run *r, int32_t n, te_way way) {
    const pi_session *s = r->s;
    const pi_model *m = s->model;
    te_team *team = r->team;
    const pi_experts *w = &r->block->experts;
    const pi_routes *to = &s->routes;
    const size_t n_embd = (size_t)m->info.n_embd, n_ff = (size_t)w->n_ff;
    for (int32_t e = 0; e < w->n_expert; e++) {
        const size_t at = (size_t)to->first[e];
        const int32_t n_tok = to->first[e + 1] - to->first[e];
        const te_linear in[2] = {
            {.w = rows_of(&w->up, e, w->n_ff), .y = s->up + n_ff * at, .ldy = n_ff, .way = way},
            {.w = rows_of(&w->gate, e, w->n_ff), .y = s->gate + n_ff * at, .ldy = n_ff, .way = way}};
        if (n_tok) te_op_linear(team, s->ws, in, 2, to->x + n_embd * at, n_embd, n_tok);
    }
    te_barrier(team);
    int64_t lo, hi;
    te_share(team, (int64_t)n * (int64_t)n_ff, 64, &lo, &hi);
    for (int64_t i = lo, many; i < hi; i += many) {
        many = hi - i < MAX_FF ? hi - i : MAX_FF;
        m->kernels->glu((te_activation)m->info.activation, m->info.activation_threshold, s->gate + i, s->up + i,
                        (int32_t)many, s->up + i);
    }
    te_ffn_counts *c = &s->count[(ptrdiff_t)r->l * s->options.n_threads + team->ith].ffn;
    c->listed += hi - lo;
    c->computed += hi - lo;
    for (int64_t i = lo; i < hi; i++) c->fired += s->up[i] != 0;
    te_barrier(team);
    for (int32_t e = 0; e < w->n_expert; e++) {
        const size_t at = (size_t)to->first[e];
        const int32_t n_tok = to->first[e + 1] - to->first[e];
        const te_linear out = {
            .w = rows_of(&w->down, e, m->info.n_embd), .y = to->x + n_embd * at, .ldy = n_embd, .way = way};
        if (n_tok) te_op_linear(team, s->ws, &out, 1, s->up + n_ff * at, n_ff, n_tok);
    }
    te_barrier(team);
}

/* Adds up a token's routes in the order of their ranks; members share the columns. */
static void add_routes(const pi_block_run *r, int32_t t0, int32_t n) {
    const pi_session *s = r->s;
    const pi_routes *to = &s->routes;
    const int32_t n_used = r->block->experts.n_used;
    const size_t n_embd = (size_t)s->model->info.n_embd;
    int64_t lo, hi;
    te_share(r->team, (int64_t)n_embd, 16, &lo, &hi);
    for (int32_t t = 0; t < n; t++) {
        float *y = r->y + n_embd * (size_t)(t0 + t);
        const ptrdiff_t first = (ptrdiff_t)t * n_used;
        for (int64_t c = lo; c < hi; c++) {
            float sum = 0;
            for (ptrdiff_t i = first; i < first + n_used; i++)
                sum += to->weight[i] * to->x[n_embd * (size_t)to->place[i] + (size_t)c];
            y[c] += sum;
        }
    }
}

static void run(pi_block_run *r) {
    const pi_chunk *c = &r->s->chunk;
    const int32_t n_used = r->block->experts.n_used, border = c->n_prefill > r->from ? c->n_prefill : r->from,
                  begin[] = {r->from, border, c->n_tok};
    for (int32_t i = 0; i < 2; i++) {
        const int32_t t0 = begin[i], n = begin[i + 1] - t0;
        if (n <= 0) continue;
        if (t0 > 0) te_barrier(r->team); /* the tokens before had the same buffers */
        route(r, t0, n);
        run_experts(r, n * n_used, i == 0 ? TE_BY_GEMM : TE_BY_ROWS);
        add_routes(r, t0, n);
    }
}

static void prepare(pi_block_run *r) { pi_make_input(r, r->from); }

static int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

static pi_status bind(pi_model *m, int32_t i, pi_block *b) {
    const te_gguf *g = m->file->gguf;
    const char *arch = m->arch->name;
    const int32_t n_embd = m->info.n_embd;
    pi_experts *w = &b->experts;
    if (te_gguf_is_powerinfer(g))
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "predictors of experts are not supported, and this is a PowerInfer file");
    PI_TRY(pi_key_need_i32(g, arch, "expert_count", 1, MAX_EXPERTS, &w->n_expert));
    PI_TRY(pi_key_need_i32(g, arch, "expert_used_count", 1, w->n_expert, &w->n_used));
    PI_TRY(pi_key_need_i32(g, arch, "expert_feed_forward_length", 1, MAX_FF, &w->n_ff));
    PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.ffn_norm", i).text, false, &b->norm));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ffn_gate_inp.weight", i), w->n_expert, n_embd, false, &w->router));
    PI_TRY(pi_bind_mats(m, pi_name_of("blk.%d.ffn_gate_exps.weight", i), w->n_expert, w->n_ff, n_embd, &w->gate));
    PI_TRY(pi_bind_mats(m, pi_name_of("blk.%d.ffn_up_exps.weight", i), w->n_expert, w->n_ff, n_embd, &w->up));
    PI_TRY(pi_bind_mats(m, pi_name_of("blk.%d.ffn_down_exps.weight", i), w->n_expert, n_embd, w->n_ff, &w->down));
    m->n_expert = larger(m->n_expert, w->n_expert);
    m->n_used = larger(m->n_used, w->n_used);
    m->n_ff_expert = larger(m->n_ff_expert, w->n_ff);
    return PI_OK;
}

static int32_t matrices(pi_block *b, pi_block_mat out[PI_BLOCK_MATS]) {
    te_mat *const mat[] = {&b->experts.router, &b->experts.gate, &b->experts.up, &b->experts.down};
    for (int32_t i = 0; i < 4; i++) out[i] = (pi_block_mat){.mat = mat[i], .use = PI_MAT_PRODUCT};
    return 4;
}

const pi_block_kind pi_experts_kind = {"experts", bind, matrices, prepare, run, NULL};
