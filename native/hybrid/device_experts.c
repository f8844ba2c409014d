/* device_experts.c - a mixture of experts on a device: its router, those experts that have a place there, and the exchange
 * about the others.
 *
 * The device makes the choice by itself and goes on; what it posts tells the CPU which of the chosen experts it has not.
 * Where experts are is an input of each step, so that they can move between steps (pi_hybrid's place). */
#include "../../vendor/core/te_types.h"
#include "cache.h"
#include "program.h"

/* ---- weights ---- */

/* The places' matrices, and the experts that they begin with. */
static te_mat send_places(pi_upload *u, const te_mat *all, int32_t n_expert, const pi_device_layer *d) {
    const int32_t rows = all->n_rows / n_expert;
    const size_t stride = u->dev->ops->stride(all->type, all->cols), each = pi_mul(stride, (size_t)rows);
    te_mat out = {.type = all->type, .cols = all->cols, .stride = stride, .n_rows = d->n_hot * rows};
    if (!d->n_hot || !all->w) return (te_mat){0};
    char *at = pi_upload_reserve(u, pi_mul(each, (size_t)d->n_hot));
    for (int32_t k = 0; at && k < d->n_hot; k++) {
        const te_mat from = pi_expert_rows(all, d->hot[k], rows);
        pi_upload_to(u, &from, at + each * (size_t)k);
    }
    out.w = at;
    return out;
}

static void send(pi_upload *u, const pi_layer *layer, const pi_block *b, pi_device_layer *d) {
    (void)layer;
    const pi_experts *w = &b->experts;
    d->router = pi_upload_mat(u, &w->router);
    d->choice_b = pi_upload_vector(u, w->choice_b, w->n_expert);
    d->factor = pi_upload_vector(u, w->factor, w->n_expert);
    d->router_norm = pi_upload_norm(u, &w->router_norm);
    d->shared_norm = pi_upload_norm(u, &w->shared_norm);
    d->shared_post_norm = pi_upload_norm(u, &w->shared_post_norm);
    d->own_post_norm = pi_upload_norm(u, &w->own_post_norm);
    d->router_b = pi_upload_vector(u, w->router_b, w->n_expert);
    d->gate_b = pi_upload_vector(u, w->gate_b, w->gate.n_rows);
    d->up_b = pi_upload_vector(u, w->up_b, w->up.n_rows);
    d->down_b = pi_upload_vector(u, w->down_b, (int64_t)w->n_expert * u->h->s->model->info.n_embd);
    if (d->kept) d->n_kept = pi_upload_ids(u, d->kept, w->n_used + 1);
    d->gate = send_places(u, &w->gate, w->n_expert, d);
    d->up = send_places(u, &w->up, w->n_expert, d);
    d->down = send_places(u, &w->down_t, w->n_expert, d);
    d->down_out = send_places(u, &w->down, w->n_expert, d);
    d->shared_gate = pi_upload_mat(u, &w->shared_gate);
    d->shared_up = pi_upload_mat(u, &w->shared_up);
    d->shared_down = pi_upload_mat(u, &w->shared_down);
    if (!w->shared_router) return;
    const int32_t n_embd = u->h->s->model->info.n_embd;
    const te_mat row = {w->shared_router, sizeof(float) * (size_t)n_embd, TE_F32, n_embd, 1};
    d->shared_router = pi_upload_mat(u, &row);
}

/* ---- the choice ---- */

static bool asks_cpu(const pi_program_block *b) { return b->p->h->decode && b->w->n_cpu; }

/* Whether the device keeps some of a token's routes, to read their experts in host memory. Of several tokens the CPU reads
 * an expert once for all of them. */
static bool keeps(const pi_program_block *b) { return asks_cpu(b) && b->p->n_tok == 1 && b->w->n_kept; }

/* Whether a prompt's experts are loaded only once it is known which its tokens want. Nearly all are by a long one: then
 * they come ahead of the choice, while the layer in front is computed. */
static bool loads_chosen(const pi_program_block *b) {
    static const double nearly_all = 0.9;
    const pi_hybrid *h = b->p->h;
    return !h->decode && b->w->n_cold && pi_cache_wanted(h, b->l, b->p->n_tok) < nearly_all;
}

static uint32_t *uses_of(const pi_program_block *b) {
    return b->p->in.uses + (ptrdiff_t)b->l * b->p->h->s->model->info.n_expert;
}

static te_linear_args router_of(const pi_program_block *b) {
    te_linear_args a = pi_program_from_x(b->p);
    a.n_products = 1;
    a.product[0] = (te_product){
        .w = b->w->router, .bias = b->w->router_b, .y = b->p->d->score, .ldy = (size_t)b->block->experts.n_expert};
    return a;
}

static const int32_t *places_of(const pi_program_block *b) {
    return b->p->in.place + (ptrdiff_t)b->l * b->p->h->s->model->info.n_expert;
}

static te_gating gating_of(pi_gating gating) {
    return gating == PI_GATING_SIGMOID  ? TE_GATING_SIGMOID
           : gating == PI_GATING_CHOSEN ? TE_GATING_CHOSEN
                                        : TE_GATING_SOFTMAX;
}

/* Whether nobody wants to know the choice before the experts that the device has: they make it themselves. */
static bool chooses_late(const pi_program_block *b) { return b->w->n_hot && !asks_cpu(b) && !loads_chosen(b); }

/* The router's choice, of its scores. */
static te_route_args choice_of(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_experts *w = &b->block->experts;
    return (te_route_args){.score = p->d->score,
                           .ld_score = (size_t)w->n_expert,
                           .n_tok = p->n_tok,
                           .n_expert = w->n_expert,
                           .n_used = w->n_used,
                           .n_group = w->n_group,
                           .n_group_used = w->n_group_used,
                           .gating = gating_of(w->gating),
                           .normed = w->normed,
                           .scale = w->scale,
                           .choice_b = b->w->choice_b,
                           .factor = b->w->factor,
                           .place = places_of(b),
                           .expert = p->d->expert,
                           .weight = p->d->weight,
                           .uses = uses_of(b),
                           .loads = loads_chosen(b),
                           .n_kept = keeps(b) ? b->w->n_kept : NULL,
                           .kept = p->d->kept,
                           .n_missing = asks_cpu(b) ? p->d->n_missing : NULL,
                           .publish = asks_cpu(b) ? pi_routes_of(p->h, p->d, b->l) : NULL,
                           .ticket = pi_program_ticket(p, b->l, PI_COLD)};
}

static void choose(const pi_program_block *b) {
    const te_route_args r = choice_of(b);
    if (!chooses_late(b)) b->p->ops->route(b->p->dev, &r);
}

static void begin(const pi_program_block *b) {
    if (!b->block->experts.early) return;
    const te_linear_args a = router_of(b);
    const pi_layer *layer = b->layer;
    /* Attention reads nothing but q, k and v, so that there is time beside it. */
    if (chooses_late(b) && b->p->n_tok == 1 && !layer->n_host &&
        layer->block[0].kind->device == &pi_attention_on_device) {
        *b->beside = a;
        return;
    }
    b->p->ops->linear(b->p->dev, &a);
    choose(b); /* a prompt's loads begin, and the CPU knows what it will compute */
}

enum { SHARED_LD = 4 };

/* What the expert of all tokens gives is multiplied with: a mixture of one expert, whose router gives a sigmoid. */
static void weigh_shared(const pi_program_block *b) {
    const pi_program *p = b->p;
    te_linear_args a = pi_program_from_x(p);
    a.x = p->d->h;
    a.n_products = 1;
    a.product[0] = (te_product){.w = b->w->shared_router, .y = p->d->shared_score, .ldy = SHARED_LD};
    p->ops->linear(p->dev, &a);
    const te_route_args r = {.score = p->d->shared_score,
                             .ld_score = SHARED_LD,
                             .n_tok = p->n_tok,
                             .n_expert = 1,
                             .n_used = 1,
                             .n_group = 1,
                             .n_group_used = 1,
                             .gating = TE_GATING_SIGMOID,
                             .scale = 1,
                             .place = p->d->shared_place,
                             .expert = p->d->shared_expert,
                             .weight = p->d->shared_weight};
    p->ops->route(p->dev, &r);
}

/* Whether a single token's experts read x itself: the router has, before, and nobody else wants what they read. */
static bool norms_late(const pi_program_block *b) {
    return b->block->experts.early && b->w->n_hot && !asks_cpu(b) && b->p->h->decode && b->p->n_tok == 1 &&
           !b->w->shared_up.w && !b->layer->parallel && b->norm.kind == TE_RMS_NORM && !b->norm.b;
}

/* The experts' input, kept and posted; the router's choice, unless it is made. Reads x. */
static void prepare(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_experts *w = &b->block->experts;
    if (norms_late(b)) return;
    te_linear_args a = w->early ? pi_program_from_x(p) : router_of(b);
    if (!w->early) a.norm = b->w->router_norm.kind == TE_NO_NORM ? b->norm : b->w->router_norm;
    a.side.norm = b->norm;
    a.side.keep = p->d->h;
    a.side_type = w->up.type;
    if (asks_cpu(b)) {
        a.side.publish = pi_asked_of(p->h, p->d, b->l);
        a.side.ticket = pi_program_ticket(p, b->l, PI_COLD);
    }
    p->ops->linear(p->dev, &a);
    pi_program_stamp(p, b->l, PI_MOMENT_PREDICT);
    if (!w->early) choose(b);
    if (b->w->shared_router.w) weigh_shared(b);
    pi_program_stamp(p, b->l, PI_MOMENT_MARKS);
}

/* ---- experts ---- */

static te_experts_args experts_args(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_experts *w = &b->block->experts;
    const pi_model_info *i = &p->h->s->model->info;
    return (te_experts_args){.x = p->d->h,
                             .ldx = (size_t)i->n_embd,
                             .n_tok = p->n_tok,
                             .n_expert = w->n_expert,
                             .n_used = w->n_used,
                             .n_ff = w->n_ff,
                             .gate_b = b->w->gate_b,
                             .up_b = b->w->up_b,
                             .down_b = b->w->down_b,
                             .place = places_of(b),
                             .expert = p->d->expert,
                             .weight = p->d->weight,
                             .act = i->activation,
                             .threshold = i->activation_threshold,
                             .on_input = w->on_input,
                             .y = p->d->y,
                             .counts = p->in.counts + 3 * (ptrdiff_t)b->l};
}

/* The c-th and following n experts that have no place, on their way to the n places' matrix. */
static char *stage_mat(const pi_program_block *b, const te_mat *all, int32_t c, int32_t n, int32_t stage, char *at,
                       te_mat *out) {
    const pi_program *p = b->p;
    const int32_t rows = all->n_rows / b->block->experts.n_expert;
    if (!all->w) return at;
    *out = (te_mat){at, p->ops->stride(all->type, all->cols), all->type, all->cols, rows * n};
    const pi_device_load a = {.from = *all,
                              .ids = p->in.cold + (ptrdiff_t)b->l * p->h->s->model->info.n_expert + c,
                              .host_ids = b->w->cold + c,
                              .each = rows,
                              .wanted = loads_chosen(b) ? uses_of(b) : NULL,
                              .n = out->n_rows,
                              .to = *out,
                              .stage = stage};
    p->ops->load(p->dev, &a);
    const size_t n_bytes = out->stride * (size_t)out->n_rows;
    return at + (n_bytes + PI_DEVICE_ALIGN - 1) / PI_DEVICE_ALIGN * PI_DEVICE_ALIGN;
}

/* A long run's experts that have no place, some at a time. */
static void run_loaded(const pi_program_block *b, bool first) {
    const pi_program *p = b->p;
    const pi_experts *w = &b->block->experts;
    const pi_device_layer *d = b->w;
    const int32_t most = pi_hybrid_staged(p->h, b->l, p->d->stage_bytes);
    int32_t turn = 0;
    for (int32_t c = 0; c < d->n_cold; c += most, turn++) {
        const int32_t n = d->n_cold - c < most ? d->n_cold - c : most, stage = turn % PI_STAGES;
        te_experts_args a = experts_args(b);
        char *at = p->d->stage[stage];
        te_mat *const to[PI_EXPERT_MATS] = {&a.gate, &a.up, w->down_t.w ? &a.down_t : &a.down};
        for (int32_t k = 0; k < PI_EXPERT_MATS; k++) at = stage_mat(b, pi_expert_mat(w, k), c, n, stage, at, to[k]);
        a.n_places = n;
        a.missing = true;
        a.first = c;
        a.staged = true;
        a.stage = stage;
        a.add = !first;
        first = false;
        p->ops->experts(p->dev, &a);
    }
}

/* Experts that have no place, read where they lie while the CPU computes others of them. */
static void run_kept(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_experts *w = &b->block->experts;
    te_experts_args a = experts_args(b);
    a.gate = w->gate;
    a.up = w->up;
    a.down = w->down;
    a.n_places = w->n_expert;
    a.kept = p->d->kept;
    p->ops->experts(p->dev, &a);
}

/* The expert of all tokens; its weights are 1 from the start where there is no router for it. */
static void run_shared(const pi_program_block *b, bool first) {
    const pi_program *p = b->p;
    const pi_device_layer *w = b->w;
    te_experts_args a = experts_args(b);
    a.n_expert = a.n_used = a.n_places = 1;
    a.n_ff = b->block->experts.n_ff_shared;
    a.gate_b = a.up_b = a.down_b = NULL;
    a.on_input = false;
    a.gate = w->shared_gate;
    a.up = w->shared_up;
    a.down = w->shared_down;
    a.place = p->d->shared_place;
    a.expert = p->d->shared_expert;
    a.weight = p->d->shared_weight;
    a.add = !first;
    if (w->shared_norm.kind != TE_NO_NORM) a.x = p->d->shared_x;
    p->ops->experts(p->dev, &a);
}

/* The ordinary feed-forward that a mixture stands beside: all of what it gives, normed, to shared_y. */
static void run_beside(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_device_layer *w = b->w;
    te_linear_args in = pi_program_from_x(p);
    in.side = (te_side){.norm = w->shared_norm, .keep = p->d->shared_x};
    in.side_type = w->shared_up.type;
    p->ops->linear(p->dev, &in);
    run_shared(b, true);
    te_merge_args sum = pi_program_to_x(p, w->shared_post_norm);
    sum.add = NULL;
    sum.y = p->d->shared_y;
    sum.n_parts = 1;
    sum.partial = p->d->y;
    p->ops->merge(p->dev, &sum);
}

/* What both give, normed once more, to x. */
static void add_both(const pi_program_block *b) {
    const pi_program *p = b->p;
    te_merge_args sum = pi_program_to_x(p, b->post_norm);
    sum.n_parts = 1;
    sum.partial = p->d->shared_y;
    sum.scale = b->layer->scale ? *b->layer->scale : 0;
    p->ops->merge(p->dev, &sum);
}

/* The next layer's router on x as it is, while the CPU computes its part of this layer: what it will be asked for. */
static void look_ahead(const pi_program *p, int32_t l) {
    const pi_hybrid *h = p->h;
    if (l >= h->s->model->info.n_layer || !pi_hybrid_guesses_experts(h, l)) return;
    if (pi_experts_of(&h->s->model->layer[l])->early) return; /* it is known before attention */
    const pi_layer *layer = &h->s->model->layer[l];
    const pi_device_layer *w = &h->layer[l];
    for (int32_t i = 0; i < layer->n_blocks; i++) {
        const pi_block *block = &layer->block[i];
        if (block->kind != &pi_experts_kind) continue;
        const pi_program_block next = {p, layer, block, w, l, w->norm[i], w->post_norm[i], NULL};
        te_linear_args a = router_of(&next);
        a.norm = w->router_norm.kind == TE_NO_NORM ? next.norm : w->router_norm;
        p->ops->linear(p->dev, &a);
        te_route_args r = choice_of(&next);
        r.uses = NULL;
        r.n_missing = NULL;
        r.expert = p->d->guess_expert;
        r.weight = p->d->guess_weight;
        r.kept = p->d->guess_kept;
        r.publish = pi_guess_of(h, p->d, l);
        p->ops->route(p->dev, &r);
    }
}

static void run(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_device_layer *w = b->w;
    const bool beside = w->shared_norm.kind != TE_NO_NORM, shared = w->shared_up.w && !beside, in_place = keeps(b),
               loads = !p->h->decode && w->n_cold;
    te_merge_args sum = pi_program_to_x(p, beside ? w->own_post_norm : b->post_norm);
    if (beside) sum.add = sum.y = p->d->shared_y;
    sum.n_parts = w->n_hot || loads || shared || in_place;
    sum.partial = sum.n_parts ? p->d->y : NULL;
    sum.words = asks_cpu(b) ? p->d->answer : NULL;
    sum.expected = asks_cpu(b) ? p->d->n_missing : NULL;
    sum.ticket = pi_program_ticket(p, b->l, PI_COLD);
    /* Where nothing else is added. */
    const bool at_once = w->n_hot && !in_place && !loads && !shared && !sum.words;
    /* Else the experts' kernel may choose by the scores that this overwrites. */
    if (asks_cpu(b)) look_ahead(p, b->l + 1);
    if (beside) run_beside(b);
    if (in_place) run_kept(b);
    if (w->n_hot) {
        const te_route_args choice = choice_of(b);
        te_experts_args a = experts_args(b);
        a.add = a.beside = in_place;
        a.choice = chooses_late(b) ? &choice : NULL;
        if (norms_late(b)) {
            a.x = p->d->x;
            a.norm = b->norm;
        }
        a.gate = w->gate;
        a.up = w->up;
        a.down = w->down_out;
        a.down_t = w->down;
        a.n_places = w->n_hot;
        a.merge = at_once ? &sum : NULL;
        p->ops->experts(p->dev, &a);
    }
    if (loads) run_loaded(b, !w->n_hot);
    if (shared) run_shared(b, !w->n_hot && !loads && !in_place);
    pi_program_stamp(p, b->l, PI_MOMENT_HOT);
    if (!at_once) p->ops->merge(p->dev, &sum);
    if (beside) add_both(b);
    pi_program_stamp(p, b->l, PI_MOMENT_MERGE);
}

const pi_block_on_device pi_experts_on_device = {send, begin, prepare, run, PI_WANTED_TOKENS};
