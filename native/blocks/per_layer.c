/* per_layer.c - embeddings per layer: beside its embedding a token has one for each layer, mixed with a product of the
 * first (pi_step_embed), which a gate lets into the residual stream behind the feed-forward. */
#include "per_layer.h"

#include <math.h>

#include "../model/bind.h"
#include "ops.h"

pi_status pi_per_layer_bind(pi_model *m, int32_t i, pi_per_layer *w) {
    const int32_t n = m->n_embd_layer, n_embd = m->info.n_embd;
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.inp_gate.weight", i), n, n_embd, false, &w->gate));
    return pi_bind_mat(m, pi_name_of("blk.%d.proj.weight", i), n_embd, n, false, &w->proj);
}

static pi_status bind(pi_model *m, int32_t i, pi_block *b) {
    PI_TRY(pi_per_layer_bind(m, i, &b->per_layer));
    return pi_bind_norm(m, pi_name_of("blk.%d.post_norm", i).text, false, &b->post_norm);
}

static int32_t matrices(pi_block *b, pi_block_mat out[PI_BLOCK_MATS]) {
    out[0] = (pi_block_mat){.mat = &b->per_layer.gate, .use = PI_MAT_PRODUCT};
    out[1] = (pi_block_mat){.mat = &b->per_layer.proj, .use = PI_MAT_PRODUCT};
    return 2;
}

void pi_per_layer_embed(pi_session *s, te_team *team) {
    const pi_model *m = s->model;
    const int32_t n = m->n_embd_layer, n_layer = m->info.n_layer;
    const size_t all = (size_t)n * (size_t)n_layer;
    if (!n) return;
    const te_linear product = {.w = m->layer_proj, .y = s->layer_embd, .ldy = all};
    pi_linear(s, team, &product, 1, s->x, (size_t)m->info.n_embd, 0, s->chunk.n_tok);
    te_barrier(team);
    const float of_x = 1 / sqrtf((float)m->info.n_embd), of_token = sqrtf((float)n), half = sqrtf(0.5F);
    for (int32_t i = team->ith; i < s->chunk.n_tok * n_layer; i += team->nth) {
        const int32_t t = i / n_layer, l = i % n_layer;
        float *y = s->layer_embd + all * (size_t)t + (size_t)n * (size_t)l,
              *own = pi_scratch(s, team); /* at least a head, and as much as this: see session.c */
        m->kernels->row[m->layer_embd.type].to_f32(
            (const char *)m->layer_embd.w + m->layer_embd.stride * (size_t)s->chunk.token[t], (int64_t)n * l, n, own);
        for (int32_t k = 0; k < n; k++) y[k] *= of_x;
        m->kernels->rms_norm(y, m->layer_norm, m->inner_eps, n, y);
        for (int32_t k = 0; k < n; k++) y[k] = (y[k] + of_token * own[k]) * half;
    }
    te_barrier(team);
}

static void prepare(pi_block_run *r) { pi_make_input(r, r->from); }

void pi_per_layer_mix(const pi_block_run *r, const pi_per_layer *w, const float *in, float *y, bool add) {
    pi_session *s = r->s;
    const pi_model *m = s->model;
    const size_t n = (size_t)m->n_embd_layer, all = n * (size_t)m->info.n_layer, n_embd = (size_t)m->info.n_embd,
                 from = (size_t)r->from;
    const int32_t n_tok = s->chunk.n_tok - r->from;
    const te_linear gate = {.w = w->gate, .y = s->gate, .ldy = n};
    pi_linear(s, r->team, &gate, 1, in + n_embd * from, n_embd, r->from, n_tok);
    te_barrier(r->team);
    for (int32_t t = r->team->ith; t < n_tok; t += r->team->nth) {
        float *g = s->gate + n * (size_t)t;
        m->kernels->glu((te_activation)m->info.activation, m->info.activation_threshold, g,
                        s->layer_embd + all * (from + (size_t)t) + n * (size_t)r->l, (int32_t)n, g);
    }
    te_barrier(r->team);
    const te_linear proj = {.w = w->proj, .y = y + n_embd * from, .ldy = n_embd, .add = add};
    pi_linear(s, r->team, &proj, 1, s->gate, n, r->from, n_tok);
}

static void run(pi_block_run *r) { pi_per_layer_mix(r, &r->block->per_layer, pi_block_input(r), r->y, true); }

const pi_block_kind pi_per_layer_kind = {"embeddings per layer", bind, matrices, NULL, prepare, run, NULL, false};
