/* device_latent.c - latent attention on a device: its weights, its rows of the KV pool, and its operations. */
#include <stdlib.h>

#include "../../vendor/core/te_quant.h"
#include "../../vendor/core/te_types.h"
#include "program.h"

/* Matrices of single heads, as floats where they have another format. */
static te_mat send_heads(pi_upload *u, const te_mat *m) {
    const int32_t type = pi_space_heads(m->type);
    if (type == m->type) return pi_upload_mat(u, m);
    te_mat made = {.stride = te_row_bytes(type, m->cols), .type = type, .cols = m->cols, .n_rows = m->n_rows};
    char *all = pi_upload_take(u, pi_mul(made.stride, (size_t)m->n_rows));
    float *row = pi_upload_take(u, pi_mul(sizeof *row, (size_t)m->cols));
    for (int32_t r = 0; all && row && r < m->n_rows; r++) {
        te_dequantize_row(m->type, (const char *)m->w + m->stride * (size_t)r, row, m->cols);
        te_quantize_row(type, row, all + made.stride * (size_t)r, m->cols);
    }
    made.w = all;
    const te_mat out = all && row ? pi_upload_mat(u, &made) : (te_mat){0};
    free(all);
    free(row);
    return out;
}

static void send(pi_upload *u, const pi_layer *layer, const pi_block *b, pi_device_layer *d) {
    const pi_session *s = u->h->s;
    const pi_model *m = s->model;
    const pi_latent *w = &b->latent;
    d->q = pi_upload_mat(u, w->q_a.w ? &w->q_b : &w->attention.q);
    d->q_low = pi_upload_mat(u, &w->q_a);
    d->kv_a = pi_upload_mat(u, &w->kv_a);
    d->key_b = send_heads(u, &w->k_b);
    d->value_b = send_heads(u, &w->v_b);
    d->o = pi_upload_mat(u, &w->attention.o);
    for (int32_t k = PI_ADAPT_Q; layer->adapter && k <= PI_ADAPT_O; k++) {
        d->adapter_a[k] = pi_upload_mat(u, &layer->adapter[k].a);
        d->adapter_b[k] = pi_upload_mat(u, &layer->adapter[k].b);
    }
    d->q_low_norm = (te_norm){.kind = w->q_norm ? TE_RMS_NORM : TE_NO_NORM,
                              .eps = m->inner_eps,
                              .w = pi_upload_vector(u, w->q_norm, w->q_a.n_rows)};
    d->latent_norm = pi_upload_vector(u, w->norm, m->latent_rank);
    d->pool_k = pi_upload_reserve(u, s->kv.layer[layer - m->layer].k_bytes);
}

static void run(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_session *s = p->h->s;
    const pi_model *m = s->model;
    const pi_model_info *i = &m->info;
    const pi_device_layer *w = b->w;
    const int32_t n_rot = i->n_embd_head - m->latent_rank;
    const size_t n_q = (size_t)i->n_head * (size_t)m->head_key, d = (size_t)i->n_embd_head,
                 n_value = (size_t)i->n_head * (size_t)m->head_value, rank = (size_t)w->q_low.n_rows;
    /* Where the first tokens' output is not wanted, only their rows of the pool are. */
    const size_t before = (size_t)p->n_before;
    float *latent_q = p->d->latent_q + n_q * before;
    te_linear_args in = pi_program_from_x(p), all = pi_program_from_all(p), *kv = p->n_before ? &all : &in;
    in.norm = all.norm = b->norm;
    if (w->q_low.w)
        in.product[in.n_products++] = (te_product){.w = w->q_low, .y = p->d->att, .ldy = rank};
    else
        in.product[in.n_products++] = (te_product){.w = w->q, .y = latent_q, .ldy = n_q};
    kv->product[kv->n_products++] = (te_product){.w = w->kv_a, .y = p->d->v, .ldy = d};
    if (p->n_before) p->ops->linear(p->dev, &all);
    if (p->n_tok) {
        p->ops->linear(p->dev, &in);
        pi_program_adapt(b, PI_ADAPT_Q, &in); /* kv_a and a low-rank q have none */
    }
    if (p->n_tok && w->q_low.w) {
        te_linear_args q = {.x = p->d->att, .ldx = rank, .n_tok = p->n_tok, .cols = (int32_t)rank, .n_products = 1};
        q.norm = w->q_low_norm;
        q.product[0] = (te_product){.w = w->q, .y = latent_q, .ldy = n_q};
        p->ops->linear(p->dev, &q);
    }
    pi_program_stamp(p, b->l, PI_MOMENT_QKV);
    const te_latent_args a = {.q = p->d->latent_q,
                              .kv = p->d->v,
                              .ldq = n_q,
                              .ldkv = d,
                              .n_tok = all.n_tok,
                              .n_before = p->n_before,
                              .n_head = i->n_head,
                              .n_key = m->head_key,
                              .n_value = m->head_value,
                              .rank = m->latent_rank,
                              .n_rot = n_rot,
                              .norm = w->latent_norm,
                              .norm_eps = m->inner_eps,
                              .scale = b->block->latent.attention.scale,
                              .cs = p->in.cs,
                              .pos = p->in.pos,
                              .table = p->in.table,
                              .row = p->in.first,
                              .ld_table = p->h->ld_table,
                              .k_b = w->key_b,
                              .v_b = w->value_b,
                              .pool = w->pool_k,
                              .type = s->kv.type_k,
                              .n_ctx = s->options.n_ctx,
                              .query = p->d->q,
                              .gathered = p->d->att,
                              .out = p->d->latent_q,
                              .ld_out = n_value};
    p->ops->latent(p->dev, &a);
    pi_program_stamp(p, b->l, PI_MOMENT_ATTENTION);
    if (!p->n_tok) return;
    te_linear_args out = {.x = p->d->latent_q + n_value * before,
                          .ldx = n_value,
                          .n_tok = p->n_tok,
                          .cols = (int32_t)n_value,
                          .n_products = 1};
    out.product[0] =
        (te_product){.w = w->o, .add = p->d->x, .ld_add = (size_t)i->n_embd, .y = p->d->x, .ldy = (size_t)i->n_embd};
    p->ops->linear(p->dev, &out);
    pi_program_adapt(b, PI_ADAPT_O, &out);
    pi_program_stamp(p, b->l, PI_MOMENT_OUTPUT);
}

const pi_block_on_device pi_latent_on_device = {send, NULL, NULL, run, PI_KEEPS_TOKENS};
