/* attention.c - causal attention over the block table: per token and KV head, scores of all positions, softmax,
 * weighted sum of V. */
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

void pi_attention(pi_session *s, te_team *team, int32_t l) {
    finish_heads(s, team, l);
    te_barrier(team);
    /* A piece of work is a token and a KV head, whose K and V are read once; only where there are fewer pieces than
     * members (one token, few KV heads) are the query heads of a piece shared out, too. */
    const int32_t nkv = s->model->info.n_head_kv, group = s->model->info.n_head / nkv, pieces = s->chunk.n_tok * nkv;
    const int32_t wanted = (team->nth + pieces - 1) / pieces, parts = wanted < group ? wanted : group;
    for (int32_t i = team->ith; i < pieces * parts; i += team->nth) {
        const int32_t piece = i / parts, part = i % parts;
        attend(s, team, l, piece / nkv, piece % nkv, group * part / parts, group * (part + 1) / parts);
    }
}
