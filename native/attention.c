/* attention.c - causal attention over the block table: per token and KV head, scores of all positions, softmax,
 * weighted sum of V. A prompt's tokens are taken together: K and V are read once for many queries. */
#include <math.h>
#include <string.h>

#include "session.h"

/* K and V of one token and KV head, or q of one head: normed, rotated, stored. */
static void finish_heads(pi_session *s, te_team *team, int32_t l) {
    const pi_model *m = s->model;
    const pi_layer *w = &m->layer[l];
    const te_kernels *kern = m->kernels;
    const int32_t nh = m->info.n_head, nkv = m->info.n_head_kv, d = m->info.n_embd_head, per_token = nh + nkv;
    for (int32_t i = team->ith; i < s->chunk.n_tok * per_token; i += team->nth) {
        const int32_t t = i / per_token, j = i % per_token;
        const bool is_q = j < nh;
        float *head = is_q ? s->q + ((ptrdiff_t)t * nh + j) * d : s->k + ((ptrdiff_t)t * nkv + (j - nh)) * d;
        const float *norm = is_q ? w->q_norm : w->k_norm;
        if (norm) kern->rms_norm(head, norm, m->norm_eps, d, head);
        if (m->rope.kind != PI_ROPE_NONE) pi_rope_apply(&m->rope, s->cs + (ptrdiff_t)t * m->rope.n_rot, head);
        if (is_q) continue;
        const pi_seq *seq = &s->kv.seq[s->chunk.seq[t]];
        const int32_t h = j - nh, pos = s->chunk.pos[t];
        kern->row[s->kv.type_k].from_f32(head, pi_kv_k(&s->kv, l, seq, h, pos), d);
        kern->row[s->kv.type_v].from_f32(s->v + ((ptrdiff_t)t * nkv + h) * d, pi_kv_v(&s->kv, l, seq, h, pos), d);
    }
}

/* Query heads [g0, g1) of those that share KV head kvh, for token t. */
static void attend(pi_session *s, te_team *team, int32_t l, int32_t t, int32_t kvh, int32_t g0, int32_t g1) {
    const pi_model *m = s->model;
    const te_kernels *kern = m->kernels;
    const pi_seq *seq = &s->kv.seq[s->chunk.seq[t]];
    const int32_t nh = m->info.n_head, d = m->info.n_embd_head, group = nh / m->info.n_head_kv, n = s->chunk.pos[t] + 1;
    const te_row_kernels *kk = &kern->row[s->kv.type_k], *kv = &kern->row[s->kv.type_v];
    const te_ahead none = {NULL, {NULL, 0, 0}};
    const size_t act_floats = (kk->act_bytes(d) + 63) / 64 * 16, ld = ((size_t)s->kv.n_ctx + 15) / 16 * 16;
    float *act = pi_scratch(s, team), *acc = act + act_floats * (size_t)group, *score = acc + te_acc_floats(d);
    const float scale = 1.0F / sqrtf((float)d);
    for (int32_t g = g0; g < g1; g++)
        kk->act_pack(s->q + ((ptrdiff_t)t * nh + kvh * group + g) * d, d, act + act_floats * (size_t)g);
    for (int32_t p = 0; p < n; p += PI_KV_BLOCK) {
        const te_rows rows = {NULL, 0, n - p < PI_KV_BLOCK ? n - p : PI_KV_BLOCK};
        const te_mat k = {pi_kv_k(&s->kv, l, seq, kvh, p), s->kv.row_k, s->kv.type_k, d, PI_KV_BLOCK};
        for (int32_t g = g0; g < g1; g++)
            kk->dot(&k, rows, none, act + act_floats * (size_t)g, score + ld * (size_t)g + p);
    }
    for (int32_t g = g0; g < g1; g++) {
        float *out = s->att + ((ptrdiff_t)t * nh + kvh * group + g) * d;
        kern->softmax(score + ld * (size_t)g, n, scale);
        memset(acc, 0, te_acc_floats(d) * sizeof *acc);
        for (int32_t p = 0; p < n; p += PI_KV_BLOCK) {
            const te_rows rows = {NULL, 0, n - p < PI_KV_BLOCK ? n - p : PI_KV_BLOCK};
            const te_mat v = {pi_kv_v(&s->kv, l, seq, kvh, p), s->kv.row_v, s->kv.type_v, d, PI_KV_BLOCK};
            kv->axpy(&v, rows, none, score + ld * (size_t)g + p, acc);
        }
        memset(out, 0, (size_t)d * sizeof *out);
        kv->acc_add(acc, d, 0, d, out);
    }
}

/* A run of tokens t0..t0+n-1 of one sequence at consecutive positions, for the query heads of one KV head: the same as
 * matrix products, a block of K and V for all of the run's queries at a time. */
static void attend_run(pi_session *s, te_team *team, int32_t l, int32_t t0, int32_t n, int32_t kvh) {
    const pi_model *m = s->model;
    const te_gemm_kernels *g = &m->kernels->gemm;
    const pi_seq *seq = &s->kv.seq[s->chunk.seq[t0]];
    const int32_t nh = m->info.n_head, d = m->info.n_embd_head, group = nh / m->info.n_head_kv, rows = n * group,
                  pos = s->chunk.pos[t0], n_pos = pos + n;
    const pi_attention_tile *tile = &s->tile;
    const size_t ld = tile->ld;
    float *q = pi_scratch(s, team), *out = q + tile->out, *score = q + tile->score;
    void *packed = q + tile->packed, *work = q + tile->work;
    for (int32_t r = 0; r < rows; r++)
        memcpy(q + (ptrdiff_t)r * d, s->q + ((ptrdiff_t)(t0 + r / group) * nh + kvh * group + r % group) * d,
               (size_t)d * sizeof *q);
    g->pack(q, (size_t)d, rows, d, 0, rows, packed);
    for (int32_t p = 0; p < n_pos; p += PI_KV_BLOCK) {
        const int32_t nb = n_pos - p < PI_KV_BLOCK ? n_pos - p : PI_KV_BLOCK;
        const te_mat k = {pi_kv_k(&s->kv, l, seq, kvh, p), s->kv.row_k, s->kv.type_k, d, nb};
        g->gemm(&k, 0, nb, packed, rows, score + p, ld, NULL, false, work);
    }
    const float scale = 1.0F / sqrtf((float)d);
    for (int32_t r = 0; r < rows; r++) {
        const int32_t seen = pos + r / group + 1;
        float *x = score + (size_t)r * ld;
        m->kernels->softmax(x, seen, scale);
        memset(x + seen, 0, (size_t)(n_pos - seen) * sizeof *x);
    }
    for (int32_t p = 0; p < n_pos; p += PI_KV_BLOCK) {
        const int32_t nb = n_pos - p < PI_KV_BLOCK ? n_pos - p : PI_KV_BLOCK;
        const te_mat v = {pi_kv_v(&s->kv, l, seq, kvh, p), s->kv.row_v, s->kv.type_v, d, nb};
        g->pack_t(score + p, ld, rows, nb, 0, rows, packed);
        g->gemm_t(&v, 0, d, packed, rows, out, (size_t)d, NULL, p > 0, work);
    }
    for (int32_t r = 0; r < rows; r++)
        memcpy(s->att + ((ptrdiff_t)(t0 + r / group) * nh + kvh * group + r % group) * d, out + (ptrdiff_t)r * d,
               (size_t)d * sizeof *out);
}

/* The length of the run of tokens from t on, at most `most`. */
static int32_t run_length(const pi_chunk *c, int32_t t, int32_t most) {
    int32_t n = 1;
    while (n < most && t + n < c->n_tok && c->seq[t + n] == c->seq[t] && c->pos[t + n] == c->pos[t] + n) n++;
    return n;
}

void pi_attention(pi_session *s, te_team *team, int32_t l) {
    finish_heads(s, team, l);
    te_barrier(team);
    const te_gemm_kernels *g = &s->model->kernels->gemm;
    const int32_t nkv = s->model->info.n_head_kv, group = s->model->info.n_head / nkv;
    /* Tokens that follow each other are taken together where that is enough for matrix products. Other tokens are taken
     * one by one, and only where those are fewer than members their query heads are shared out, too. Pieces of work are
     * dealt out one by one, for the later ones of a prompt see more positions. */
    const int32_t most = s->tile.rows / group;
    bool open = false;
    int32_t turn = 0;
    for (int32_t t = 0, n; t < s->chunk.n_tok; t += n) {
        n = run_length(&s->chunk, t, most);
        const bool tile = n * group >= g->min_tok && n > 1;
        const int32_t wanted = (team->nth + s->chunk.n_tok * nkv - 1) / (s->chunk.n_tok * nkv),
                      parts = tile || wanted <= 1 ? 1
                              : wanted < group    ? wanted
                                                  : group;
        for (int32_t i = 0; i < nkv * parts; i++, turn++) {
            if (turn % team->nth != team->ith) continue;
            if (tile && !open) g->begin();
            open |= tile;
            if (tile)
                attend_run(s, team, l, t, n, i);
            else
                for (int32_t k = t; k < t + n; k++)
                    attend(s, team, l, k, i / parts, group * (i % parts) / parts, group * (i % parts + 1) / parts);
        }
    }
    if (open) g->end();
}
