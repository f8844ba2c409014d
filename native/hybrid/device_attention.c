/* device_attention.c - attention on a device: its weights, its K and V, and its operations. */
#include <stdlib.h>

#include "program.h"

static te_norm send_wide(pi_upload *u, const float *w, int32_t n) {
    return (te_norm){
        .kind = w ? TE_RMS_NORM : TE_NO_NORM, .eps = u->h->s->model->inner_eps, .w = pi_upload_vector(u, w, n)};
}

/* Of gated heads: q has each head's query, then its gate. */
static void send_gated(pi_upload *u, const pi_layer *layer, const pi_attention *a, int32_t n_q, pi_device_layer *d) {
    int32_t *query = pi_upload_take(u, 2 * sizeof *query * (size_t)n_q), *gate = query ? query + n_q : NULL;
    for (int32_t i = 0; query && i < n_q; i++) {
        query[i] = i / a->n_embd_head * 2 * a->n_embd_head + i % a->n_embd_head;
        gate[i] = query[i] + a->n_embd_head;
    }
    const te_mat *adapter = layer->adapter ? &layer->adapter[PI_ADAPT_Q].b : NULL;
    if (query) {
        d->q = pi_upload_rows(u, &a->q, query, n_q);
        d->head_gate = pi_upload_rows(u, &a->q, gate, n_q);
        d->q_b = pi_upload_some(u, a->q_b, query, n_q);
        d->head_gate_b = pi_upload_some(u, a->q_b, gate, n_q);
        if (adapter) d->adapter_b[PI_ADAPT_Q] = pi_upload_rows(u, adapter, query, n_q);
        if (adapter) d->adapter_head_gate = pi_upload_rows(u, adapter, gate, n_q);
    }
    free(query);
}

static void send(pi_upload *u, const pi_layer *layer, const pi_block *b, pi_device_layer *d) {
    const pi_session *s = u->h->s;
    const pi_model_info *i = &s->model->info;
    const pi_attention *a = &b->attention;
    const int32_t n_q = i->n_head * a->n_embd_head, n_kv = a->n_head_kv * a->n_embd_head;
    if (a->gated)
        send_gated(u, layer, a, n_q, d);
    else {
        d->q = pi_upload_mat(u, &a->q);
        d->q_b = pi_upload_vector(u, a->q_b, n_q);
        d->head_gate = pi_upload_mat(u, &a->gate);
    }
    d->k = pi_upload_mat(u, &a->k);
    d->v = pi_upload_mat(u, &a->v);
    d->o = pi_upload_mat(u, &a->o);
    for (int32_t k = PI_ADAPT_Q; layer->adapter && k <= PI_ADAPT_O; k++) {
        d->adapter_a[k] = pi_upload_mat(u, &layer->adapter[k].a);
        if (k != PI_ADAPT_Q || !a->gated) d->adapter_b[k] = pi_upload_mat(u, &layer->adapter[k].b);
    }
    d->k_b = pi_upload_vector(u, a->k_b, n_kv);
    d->v_b = pi_upload_vector(u, a->v_b, n_kv);
    d->o_b = pi_upload_vector(u, a->o_b, i->n_embd);
    d->q_norm = pi_upload_vector(u, a->q_norm, a->n_embd_head);
    d->k_norm = pi_upload_vector(u, a->k_norm, a->n_embd_head);
    d->v_norm = pi_upload_vector(u, a->v_norm, a->n_embd_head);
    d->wide_q_norm = send_wide(u, a->wide_q_norm, n_q);
    d->wide_k_norm = send_wide(u, a->wide_k_norm, n_kv);
    d->sinks = pi_upload_vector(u, a->sinks, i->n_head);
    const pi_kv_layer *kv = &s->kv.layer[layer - s->model->layer];
    d->pool_k = pi_upload_reserve(u, kv->k_bytes);
    d->pool_v = pi_upload_reserve(u, kv->v_bytes);
}

static te_rope_kind rope_of(pi_rope_kind kind) {
    return kind == PI_ROPE_NONE ? TE_NO_ROPE : kind == PI_ROPE_NORM ? TE_ROPE_NORM : TE_ROPE_NEOX;
}

/* A norm of n values of each of n_tok tokens, of all heads together. */
static void norm_heads(const pi_program *p, int32_t n_tok, const te_norm *norm, const float *from, size_t n,
                       float *to) {
    const te_linear_args a = {.x = from,
                              .ldx = n,
                              .n_tok = n_tok,
                              .cols = (int32_t)n,
                              .side = {.norm = *norm, .keep = to},
                              .side_type = -1}; /* no matrix is multiplied with it */
    p->ops->linear(p->dev, &a);
}

/* q of the tokens, gates of their heads, and k and v of those before them, too. Before wide norms q and k wait where
 * attention's output and q will be. */
static void project(const pi_program_block *b, size_t n_q, size_t n_kv) {
    const pi_program *p = b->p;
    const pi_device_layer *w = b->w;
    const bool wide = w->wide_q_norm.kind != TE_NO_NORM;
    const size_t at = n_q * (size_t)p->n_before;
    float *q = (wide ? p->d->att : p->d->q) + at, *k = wide ? p->d->q : p->d->k;
    te_linear_args in = pi_program_from_x(p), all = pi_program_from_all(p), *kv = p->n_before ? &all : &in;
    in.norm = all.norm = b->norm;
    in.product[in.n_products++] = (te_product){.w = w->q, .bias = w->q_b, .y = q, .ldy = n_q};
    kv->product[kv->n_products++] = (te_product){.w = w->k, .bias = w->k_b, .y = k, .ldy = n_kv};
    kv->product[kv->n_products++] = (te_product){.w = w->v.w ? w->v : w->k, .bias = w->v_b, .y = p->d->v, .ldy = n_kv};
    const te_product gate = {
        .w = w->head_gate, .bias = w->head_gate_b, .y = p->d->head_gates ? p->d->head_gates + at : NULL, .ldy = n_q};
    if (p->n_before) p->ops->linear(p->dev, &all);
    if (p->n_tok) {
        const int32_t n = in.n_products;
        if (gate.w.w) in.product[in.n_products++] = gate;
        p->ops->linear(p->dev, &in);
        in.n_products = n;
        pi_program_adapt(b, PI_ADAPT_Q, &in);
        pi_program_add(p, p->d->adapt[0], &w->adapter_head_gate, p->n_tok, &gate);
    }
    if (wide) norm_heads(p, all.n_tok, &w->wide_k_norm, k, n_kv, p->d->k);
    if (wide && p->n_tok) norm_heads(p, p->n_tok, &w->wide_q_norm, q, n_q, p->d->q + at);
    pi_program_stamp(p, b->l, PI_MOMENT_QKV);
}

static void run(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_session *s = p->h->s;
    const pi_model *m = s->model;
    const pi_model_info *i = &m->info;
    const pi_device_layer *w = b->w;
    const pi_attention *shape = &b->block->attention;
    const int32_t which = pi_rope_index(m, shape, s->options.n_ctx);
    const pi_rope *rope = pi_rope_of(m, shape, s->options.n_ctx);
    const size_t n_q = (size_t)i->n_head * (size_t)shape->n_embd_head,
                 n_kv = (size_t)shape->n_head_kv * (size_t)shape->n_embd_head;
    const int32_t n_all = p->n_before + p->n_tok; /* tokens of the chunk */
    project(b, n_q, n_kv);
    const te_attention_args a = {.q = p->d->q,
                                 .k = p->d->k,
                                 .v = p->d->v,
                                 .ldq = n_q,
                                 .ldk = n_kv,
                                 .ldv = n_kv,
                                 .n_tok = n_all,
                                 .n_before = p->n_before,
                                 .n_head = i->n_head,
                                 .n_head_kv = shape->n_head_kv,
                                 .n_embd_head = shape->n_embd_head,
                                 .q_norm = w->q_norm,
                                 .k_norm = w->k_norm,
                                 .v_norm = w->v_norm,
                                 .norm_eps = m->inner_eps,
                                 .norm_last = shape->late_norm,
                                 .scale = shape->scale,
                                 .soft_cap = shape->soft_cap,
                                 .sinks = w->sinks,
                                 .rope = rope_of(rope ? rope->kind : PI_ROPE_NONE),
                                 .n_rot = rope ? rope->n_rot : 0,
                                 .cs = p->in.cs + (rope ? pi_rope_floats(m, which) * (size_t)n_all : 0),
                                 .pos = p->in.pos,
                                 .table = p->in.table + (ptrdiff_t)s->kv.layer[b->l].pool * n_all * p->h->ld_table,
                                 .row = p->in.first,
                                 .ld_table = p->h->ld_table,
                                 .k_pool = w->pool_k,
                                 .v_pool = w->pool_v,
                                 .type_k = s->kv.type_k,
                                 .type_v = s->kv.type_v,
                                 .n_ctx = s->options.n_ctx,
                                 .out = p->d->att,
                                 .ld_out = n_q,
                                 .window = shape->window,
                                 .chunked = shape->chunked,
                                 .temp_scale = shape->temp_scale,
                                 .temp_first = shape->temp_first,
                                 .temp_length = shape->temp_length,
                                 .grouped = p->h->decode && !p->h->deep ? 0 : p->h->grouped,
                                 .apart = p->h->apart,
                                 .next_type = w->head_gate.w || p->n_before ? -1 : w->o.type,
                                 .beside = b->beside->n_products ? b->beside : NULL};
    p->ops->attention(p->dev, &a);
    pi_program_stamp(p, b->l, PI_MOMENT_ATTENTION);
    if (!p->n_tok) return;
    float *att = p->d->att + n_q * (size_t)p->n_before;
    if (w->head_gate.w) {
        const te_gate_args gate = {.x = att,
                                   .ldx = n_q,
                                   .gate = p->d->head_gates + n_q * (size_t)p->n_before,
                                   .ld_gate = n_q,
                                   .n_tok = p->n_tok,
                                   .n_group = i->n_head,
                                   .each = shape->n_embd_head,
                                   .y = att,
                                   .ldy = n_q};
        p->ops->gate(p->dev, &gate);
    }
    pi_program_output(b, att, &w->o, w->o_b);
    pi_program_stamp(p, b->l, PI_MOMENT_OUTPUT);
}

const pi_block_on_device pi_attention_on_device = {send, NULL, NULL, run, PI_KEEPS_TOKENS};
