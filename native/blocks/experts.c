/* experts.c - the mixture of experts: each token goes through the n_used feed-forwards that its router ranks first.
 *
 *     p = softmax(router . h), or the sigmoid of each
 *     y += sum over the chosen experts e of weight[e] * down_e . (act(gate_e . h) * (up_e . h))
 *     y += sigmoid(shared_router . h) * down_s . (act(gate_s . h) * (up_s . h))      where one expert is all tokens'
 *
 * Without gates (Nemotron-H) act(up_e . h) stands in both. Chosen are those with the largest p + choice_b; weight is
 * p, in most models divided by the sum of the chosen p. Or p = router . h as it is, and weight the softmax over the
 * chosen p.
 *
 * A route is a token and one of its experts. Routes are put in the order of the experts, so that an expert's matrices are
 * read once for all tokens that chose it, and those of the others not at all. Which kernels compute a route depends on its
 * token's kind (prompt or generated), never on how many others chose the expert: a token's bits do not depend on others. */
#include <float.h>
#include <math.h>

#include "../model/bind.h"
#include "../model/keys.h"
#include "experts.h"

enum { MAX_EXPERTS = 4096, MAX_FF = 1 << 20 };

/* What the weights of sigmoids add up to at least, so that they can be divided by it. */
static const float LEAST_SUM = 1e-20F;

static const float taken = -INFINITY;

/* The largest of rank[0..n-1] that is not taken, the first of equal ones; -1: there is none. */
static int32_t best_of(const float *rank, int32_t n) {
    int32_t best = -1;
    for (int32_t e = 0; e < n; e++)
        if (rank[e] != taken && (best < 0 || rank[e] > rank[best])) best = e;
    return best;
}

/* Takes all experts out that are not in the best groups; a group is as good as its two best experts together, or as its best
 * one. */
static void keep_best_groups(const pi_experts *w, float *rank, float *group) {
    const int32_t size = w->n_expert / w->n_group;
    for (int32_t g = 0; g < w->n_group; g++) {
        float *own = rank + (ptrdiff_t)g * size;
        const int32_t first = best_of(own, size);
        const float best = own[first];
        own[first] = taken;
        const int32_t second = best_of(own, size);
        group[g] = second < 0 || w->best_in_group ? best : best + own[second];
        own[first] = best;
    }
    for (int32_t i = 0; i < w->n_group_used; i++) {
        const int32_t g = best_of(group, w->n_group);
        if (g >= 0) group[g] = taken;
    }
    for (int32_t g = 0; g < w->n_group; g++)
        for (int32_t e = g * size; group[g] != taken && e < (g + 1) * size; e++) rank[e] = taken;
}

/* x[0..n-1] become exponentials, the largest of them 1; returns their sum. */
static float exponents(float *x, int32_t n) {
    float top = x[0], sum = 0;
    for (int32_t i = 1; i < n; i++)
        if (x[i] > top) top = x[i];
    for (int32_t i = 0; i < n; i++) sum += x[i] = expf(x[i] - top);
    return sum;
}

/* The n_used experts of one token, and their weights. rank, group [n_expert]: room to work. */
static void choose(const pi_experts *w, const float *p, float *rank, float *group, int32_t *expert, float *weight) {
    float sum = 0;
    for (int32_t e = 0; e < w->n_expert; e++) {
        rank[e] = w->choice_b ? p[e] + w->choice_b[e] : p[e];
        if (rank[e] == taken) rank[e] = -FLT_MAX;
    }
    if (w->n_group > 1) keep_best_groups(w, rank, group);
    for (int32_t r = 0; r < w->n_used; r++) {
        const int32_t best = best_of(rank, w->n_expert);
        expert[r] = best;
        weight[r] = p[best];
        sum += p[best];
        rank[best] = taken;
    }
    if (w->gating == PI_GATING_CHOSEN) sum = exponents(weight, w->n_used);
    if (sum < LEAST_SUM) sum = LEAST_SUM;
    const bool normed = w->normed || w->gating == PI_GATING_CHOSEN;
    for (int32_t r = 0; r < w->n_used; r++) {
        weight[r] = w->scale * (normed ? weight[r] / sum : weight[r]);
        if (w->factor) weight[r] *= w->factor[expert[r]];
    }
}

/* The experts of all tokens whose output is wanted, by the rows of x. The router's products are those of floats for prompts
 * too: rounded inputs would choose other experts. */
static void rank_experts(const pi_block_run *r, const float *x) {
    const pi_session *s = r->s;
    te_team *team = r->team;
    const pi_experts *w = &r->block->experts;
    const pi_routes *to = &s->routes;
    const size_t n_embd = (size_t)s->model->info.n_embd, n_expert = (size_t)w->n_expert;
    te_linear router = {.w = w->router, .bias = w->router_b, .y = to->score, .ldy = 3 * n_expert, .way = TE_BY_ROWS};
    const int32_t n = s->chunk.n_tok - r->from, of_prompt = s->chunk.n_prefill - r->from,
                  n_prefill = of_prompt < 0 ? 0 : of_prompt;
    const float *in = x + n_embd * (size_t)r->from;
    if (n_prefill) te_op_linear_floats(team, s->ws, &router, in, n_embd, n_prefill);
    if (n > n_prefill) {
        router.y += router.ldy * (size_t)n_prefill;
        te_op_linear(team, s->ws, &router, 1, in + n_embd * (size_t)n_prefill, n_embd, n - n_prefill);
    }
    if (team->ith == 0) s->count[(ptrdiff_t)r->l * s->options.n_threads].ffn.bytes += pi_mat_bytes(&w->router);
    te_barrier(team);
    for (int32_t t = r->from + team->ith; t < s->chunk.n_tok; t += team->nth) {
        float *p = to->score + 3 * n_expert * (size_t)(t - r->from), *rank = p + n_expert;
        if (w->gating == PI_GATING_SOFTMAX)
            s->model->kernels->softmax(p, w->n_expert, 1);
        else if (w->gating == PI_GATING_SIGMOID)
            for (size_t e = 0; e < n_expert; e++) p[e] = 1 / (1 + expf(-p[e]));
        else
            for (size_t e = 0; e < n_expert; e++) p[e] = p[e] == taken ? -FLT_MAX : p[e];
        choose(w, p, rank, rank + n_expert, to->expert + (ptrdiff_t)t * w->n_used,
               to->weight + (ptrdiff_t)t * w->n_used);
    }
    te_barrier(team);
}

static void begin(pi_block_run *r) {
    if (r->block->experts.early) rank_experts(r, r->s->x);
}

static void count_uses(const pi_block_run *r) {
    const pi_session *s = r->s;
    const int32_t n_used = r->block->experts.n_used;
    uint64_t *uses = s->uses + (ptrdiff_t)r->l * s->model->info.n_expert;
    uint32_t *fired = s->fired ? s->fired + (ptrdiff_t)r->l * s->model->info.n_placed : NULL;
    for (int32_t i = r->from * n_used; i < s->chunk.n_tok * n_used; i++) {
        uses[s->routes.expert[i]]++;
        if (fired) fired[s->routes.expert[i]]++;
    }
}

/* Rows of h times the weights of their only experts, which become 1. Ends with a barrier. */
static const float *weigh_input(const pi_block_run *r, const float *h, int32_t t0, int32_t n) {
    const pi_session *s = r->s;
    const size_t n_embd = (size_t)s->model->info.n_embd;
    float *to = s->h2 + n_embd * (size_t)t0;
    for (int32_t t = r->team->ith; t < n; t += r->team->nth) {
        float *weight = &s->routes.weight[t0 + t];
        for (size_t c = 0; c < n_embd; c++) to[n_embd * (size_t)t + c] = *weight * h[n_embd * (size_t)t + c];
        *weight = 1;
    }
    te_barrier(r->team);
    return to;
}

/* x under another norm than that of what experts read; w NULL: what they read. Ends with a barrier. */
static const float *read_under(const pi_block_run *r, const pi_norm *norm) {
    const pi_session *s = r->s;
    const size_t n_embd = (size_t)s->model->info.n_embd;
    if (!norm->w) return pi_block_input(r);
    for (int32_t t = r->from + r->team->ith; t < s->chunk.n_tok; t += r->team->nth)
        pi_norm_row(s->model, norm, s->x + n_embd * (size_t)t, s->h2 + n_embd * (size_t)t);
    te_barrier(r->team);
    return s->h2;
}

static void run(pi_block_run *r) {
    const pi_session *s = r->s;
    const pi_experts *w = &r->block->experts;
    const pi_chunk *c = &s->chunk;
    const int32_t border = c->n_prefill > r->from ? c->n_prefill : r->from, borders[] = {r->from, border, c->n_tok};
    if (!w->early) rank_experts(r, read_under(r, &w->router_norm));
    const float *shared_in = read_under(r, &w->shared_norm);
    if (r->team->ith == 0) count_uses(r);
    for (int32_t i = 0; i < 2; i++) {
        const int32_t t0 = borders[i], n = borders[i + 1] - t0;
        if (n <= 0) continue;
        if (t0 > 0) te_barrier(r->team); /* the tokens before had the same buffers */
        const ptrdiff_t first = (ptrdiff_t)t0 * w->n_used;
        const pi_route_list routes = {
            .n = n * w->n_used, .expert = s->routes.expert + first, .weight = s->routes.weight + first};
        const size_t at = (size_t)t0 * (size_t)s->model->info.n_embd;
        const float *h = pi_block_input(r) + at, *in = w->on_input ? weigh_input(r, h, t0, n) : h;
        pi_ahead(r);
        (i == 0 ? pi_experts_gemm : pi_experts_rows)(s, r->team, r->block, r->l, &routes, in, r->y + at, n, true);
        if (w->own_post_norm.w) pi_experts_norm(s, r->team, &w->own_post_norm, r->y + at, n);
        if (w->shared_up.w)
            pi_experts_shared(s, r->team, r->block, r->l, shared_in + at, r->y + at, n,
                              i == 0 ? TE_BY_GEMM : TE_BY_ROWS);
    }
}

static void prepare(pi_block_run *r) { pi_make_input(r, r->from); }

/* The keys of a router. */
static pi_status read_router(pi_model *m, int32_t i, pi_experts *w) {
    const te_gguf *g = m->file->gguf;
    const char *arch = m->arch->name;
    const bool biased = pi_bind_has(m, pi_name_of("blk.%d.exp_probs_b.bias", i));
    const pi_gating usual = m->arch->gating                        ? m->arch->gating
                            : m->arch->sigmoid_if_biased && biased ? PI_GATING_SIGMOID
                                                                   : PI_GATING_SOFTMAX;
    int64_t gating = usual, n_group = 1, n_group_used = 1;
    PI_TRY(pi_key_i64(g, arch, "expert_gating_func", 0, 255, &gating, NULL));
    if (!gating) gating = usual;
    if (gating != usual && gating != PI_GATING_SOFTMAX && gating != PI_GATING_SIGMOID)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "%s.expert_gating_func is %lld; 1 (softmax) and 2 (sigmoid) are known",
                       arch, (long long)gating);
    w->gating = (pi_gating)gating;
    w->normed = m->arch->normed_experts;
    w->best_in_group = m->arch->best_in_group && gating == PI_GATING_SOFTMAX;
    w->early = m->arch->early_router;
    PI_TRY(pi_key_bool(g, arch, "expert_weights_norm", &w->normed));
    PI_TRY(pi_key_f32(g, arch, "expert_weights_scale", &w->scale, NULL));
    if (!isfinite(w->scale)) return PI_FAIL(PI_ERROR_FORMAT, "%s.expert_weights_scale is not finite", arch);
    if (w->scale == 0) w->scale = 1; /* files without a scale may say so */
    PI_TRY(pi_key_i64(g, arch, "expert_group_count", 0, w->n_expert, &n_group, NULL));
    w->n_group = n_group ? (int32_t)n_group : 1;
    n_group_used = w->n_group;
    PI_TRY(pi_key_i64(g, arch, "expert_group_used_count", 0, w->n_group, &n_group_used, NULL));
    w->n_group_used = n_group_used ? (int32_t)n_group_used : w->n_group;
    if (w->n_expert % w->n_group || w->n_used > w->n_expert / w->n_group * w->n_group_used)
        return PI_FAIL(PI_ERROR_FORMAT, "%d experts in %d groups, of which %d are used, cannot give a token %d",
                       w->n_expert, w->n_group, w->n_group_used, w->n_used);
    PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.exp_probs_b.bias", i), w->n_expert, true, &w->choice_b));
    for (int32_t e = 0; w->choice_b && e < w->n_expert; e++)
        if (!isfinite(w->choice_b[e])) return PI_FAIL(PI_ERROR_FORMAT, "blk.%d.exp_probs_b.bias is not finite", i);
    return PI_OK;
}

/* A matrix of each expert, which files of the first converters have in tensors of their own. */
static pi_status bind_separate(pi_model *m, int32_t i, const char *name, int32_t n, int32_t rows, int32_t cols,
                               te_mat *all, const void ***parts) {
    if ((int64_t)n * rows > INT32_MAX) return PI_FAIL(PI_ERROR_FORMAT, "%d experts of %d rows are too many", n, rows);
    PI_TRY(pi_bind_parts(m, n, parts));
    for (int32_t e = 0; e < n; e++) {
        te_mat one;
        PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.%s.%d.weight", i, name, e), rows, cols, false, &one));
        if (!e) *all = one;
        if (one.type != all->type)
            return PI_FAIL(PI_ERROR_UNSUPPORTED,
                           "blk.%d.%s.%d.weight is %s, that of expert 0 %s; experts of several "
                           "formats are not supported",
                           i, name, e, te_type_get(one.type)->name, te_type_get(all->type)->name);
        (*parts)[e] = one.w;
    }
    all->n_rows = n * rows;
    return PI_OK;
}

static pi_status bind_one(pi_model *m, int32_t i, const char *name, int32_t n, int32_t rows, int32_t cols, te_mat *all,
                          const void ***parts) {
    if (pi_bind_has(m, pi_name_of("blk.%d.%s.0.weight", i, name)))
        return bind_separate(m, i, name, n, rows, cols, all, parts);
    return pi_bind_mats(m, pi_name_of("blk.%d.%s_exps.weight", i, name), n, rows, cols, all);
}

/* gate and up of all experts where the file has an expert's in one matrix, in this order. */
static pi_status bind_fused(pi_model *m, pi_name name, pi_experts *w) {
    te_mat both;
    PI_TRY(pi_bind_mats(m, name, w->n_expert, 2 * w->n_ff, m->info.n_embd, &both));
    PI_TRY(pi_bind_parts(m, w->n_expert, &w->gate_parts));
    PI_TRY(pi_bind_parts(m, w->n_expert, &w->up_parts));
    for (int32_t e = 0; e < w->n_expert; e++) {
        w->gate_parts[e] = pi_expert_rows(&both, 2 * e, w->n_ff).w;
        w->up_parts[e] = pi_expert_rows(&both, 2 * e + 1, w->n_ff).w;
    }
    w->gate = w->up = both;
    w->gate.n_rows = w->up.n_rows = w->n_expert * w->n_ff;
    w->up.w = w->up_parts[0];
    return PI_OK;
}

static pi_status bind_experts(pi_model *m, int32_t i, pi_experts *w) {
    const int32_t n = w->n_expert, n_embd = m->info.n_embd;
    const pi_name fused = pi_name_of("blk.%d.ffn_gate_up_exps.weight", i);
    if (pi_bind_has(m, fused)) {
        PI_TRY(bind_fused(m, fused, w));
    } else {
        if (m->arch->gated) PI_TRY(bind_one(m, i, "ffn_gate", n, w->n_ff, n_embd, &w->gate, &w->gate_parts));
        PI_TRY(bind_one(m, i, "ffn_up", n, w->n_ff, n_embd, &w->up, &w->up_parts));
    }
    const pi_name by_neuron = pi_name_of("blk.%d.ffn_down_t_exps.weight", i);
    if (pi_bind_has(m, by_neuron) && !m->arch->gated)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "%s: experts without gates are not supported by neuron", by_neuron.text);
    if (pi_bind_has(m, by_neuron)) return pi_bind_mats(m, by_neuron, n, w->n_ff, n_embd, &w->down_t);
    return bind_one(m, i, "ffn_down", n, n_embd, w->n_ff, &w->down, &w->down_parts);
}

static pi_status bind_shared(pi_model *m, int32_t i, pi_experts *w) {
    const int32_t n_embd = m->info.n_embd;
    const char *suffix = m->arch->experts_beside ? "" : "_shexp";
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ffn_up%s.weight", i, suffix), 0, n_embd, true, &w->shared_up));
    if (!w->shared_up.w) return PI_OK;
    w->n_ff_shared = w->shared_up.n_rows;
    if (w->n_ff_shared > MAX_FF) return PI_FAIL(PI_ERROR_FORMAT, "a shared expert has %d neurons", w->n_ff_shared);
    if (m->arch->gated)
        PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ffn_gate%s.weight", i, suffix), w->n_ff_shared, n_embd, false,
                           &w->shared_gate));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ffn_down%s.weight", i, suffix), n_embd, w->n_ff_shared, false,
                       &w->shared_down));
    return pi_bind_vec(m, pi_name_of("blk.%d.ffn_gate_inp_shexp.weight", i), n_embd, true, &w->shared_router);
}

/* Norms of a mixture beside a feed-forward. The router's is the vector it multiplies with, and the width's root. */
static pi_status bind_beside(pi_model *m, int32_t i, pi_block *b) {
    const int32_t n_embd = m->info.n_embd;
    pi_experts *w = &b->experts;
    const float *scale;
    float *of_router;
    PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.ffn_norm", i).text, false, &w->shared_norm));
    PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.pre_ffw_norm_2", i).text, false, &b->norm));
    PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.post_ffw_norm_1", i).text, false, &w->shared_post_norm));
    PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.post_ffw_norm_2", i).text, false, &w->own_post_norm));
    PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.ffn_gate_inp.scale", i), n_embd, false, &scale));
    PI_TRY(pi_bind_room(m, n_embd, &of_router));
    for (int32_t c = 0; c < n_embd; c++) of_router[c] = scale[c] / sqrtf((float)n_embd);
    w->router_norm.w = of_router;
    return pi_bind_vec(m, pi_name_of("blk.%d.ffn_down_exps.scale", i), w->n_expert, true, &w->factor);
}

static pi_status bind_biases(pi_model *m, int32_t i, pi_experts *w) {
    const int32_t n = w->n_expert;
    PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.ffn_gate_inp.bias", i), n, false, &w->router_b));
    PI_TRY(pi_bind_vecs(m, pi_name_of("blk.%d.ffn_gate_exps.bias", i), n, w->n_ff, &w->gate_b));
    PI_TRY(pi_bind_vecs(m, pi_name_of("blk.%d.ffn_up_exps.bias", i), n, w->n_ff, &w->up_b));
    return pi_bind_vecs(m, pi_name_of("blk.%d.ffn_down_exps.bias", i), n, m->info.n_embd, &w->down_b);
}

static pi_status bind(pi_model *m, int32_t i, pi_block *b) {
    const te_gguf *g = m->file->gguf;
    const char *arch = m->arch->name;
    const int32_t n_embd = m->info.n_embd;
    pi_experts *w = &b->experts;
    int64_t n_ff = m->info.n_ff;
    if (te_gguf_is_powerinfer(g))
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "predictors of experts are not supported, and this is a PowerInfer file");
    *w = (pi_experts){.scale = 1};
    PI_TRY(pi_key_need_i32(g, arch, "expert_count", 1, MAX_EXPERTS, &w->n_expert));
    PI_TRY(pi_key_need_i32(g, arch, "expert_used_count", 1, w->n_expert, &w->n_used));
    PI_TRY(pi_key_i64(g, arch, "expert_feed_forward_length", 1, MAX_FF, &n_ff, NULL));
    if (n_ff > MAX_FF) return PI_FAIL(PI_ERROR_FORMAT, "an expert has %lld neurons", (long long)n_ff);
    w->n_ff = (int32_t)n_ff;
    w->on_input = m->arch->weighted_input;
    if (w->on_input && w->n_used != 1)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "a token uses %d experts; %s models with one are supported", w->n_used,
                       arch);
    PI_TRY(read_router(m, i, w));
    PI_TRY(m->arch->experts_beside ? bind_beside(m, i, b) : pi_bind_ffn_norm(m, i, &b->norm));
    if (m->arch->post_norm) PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.post_ffw_norm", i).text, false, &b->post_norm));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ffn_gate_inp.weight", i), w->n_expert, n_embd, false, &w->router));
    PI_TRY(bind_experts(m, i, w));
    if (m->arch->expert_bias) PI_TRY(bind_biases(m, i, w));
    PI_TRY(bind_shared(m, i, w));
    m->info.n_expert_used = w->n_used;
    m->info.expert_gating = (int32_t)w->gating;
    const int64_t n_neurons = (int64_t)w->n_used * w->n_ff + w->n_ff_shared;
    m->info.n_neurons = n_neurons < INT32_MAX ? (int32_t)n_neurons : INT32_MAX;
    m->n_ff_expert = pi_max_i32(m->n_ff_expert, pi_max_i32(w->n_ff, w->n_ff_shared));
    return PI_OK;
}

static int32_t matrices(pi_block *b, pi_block_mat out[PI_BLOCK_MATS]) {
    pi_experts *w = &b->experts;
    te_mat *const mat[] = {&w->router, &w->gate,        &w->up,        &w->down,
                           &w->down_t, &w->shared_gate, &w->shared_up, &w->shared_down};
    const int32_t n = sizeof mat / sizeof *mat;
    for (int32_t i = 0; i < n; i++)
        out[i] = (pi_block_mat){.mat = mat[i], .use = i >= 1 && i <= 4 ? PI_MAT_EXPERTS : PI_MAT_PRODUCT};
    const struct {
        int32_t i, rows;
        const void **parts;
    } several[] = {
        {1, w->n_ff, w->gate_parts}, {2, w->n_ff, w->up_parts}, {3, w->down.n_rows / w->n_expert, w->down_parts}};
    for (int32_t k = 0; k < 3; k++) {
        out[several[k].i].parts = several[k].parts;
        out[several[k].i].part_rows = several[k].rows;
    }
    return n;
}

const pi_block_kind pi_experts_kind = {"experts", bind, matrices, begin, prepare, run, &pi_experts_on_device, false};
