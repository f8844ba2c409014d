/* latent.c - latent attention (DeepSeek's MLA), with what belongs to K and V absorbed into the queries and the output:
 *
 *     q = q_b . norm(q_a . h), or q . h;       [latent | k_rope] = kv_a . h
 *     row of the pool = [rope(k_rope) | norm(latent)], one for all heads
 *     query of a head = [rope(q_rope) | k_b . q_nope];  what it gathers is a sum of latents;  v_b of it is the head's value
 *
 * In files the rotated values of a head and of kv_a are the last ones; in the pool they are the first, where RoPE and context
 * shifts look for them. So attention is the ordinary one, of one KV head, whose V is a part of K.
 *
 * Each head has matrices of its own in k_b and v_b, and a member of the team computes whole heads. Prompt tokens are taken
 * as matrix products, the others by row kernels, so that a token's bits do not depend on the others. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_quant.h"
#include "../../vendor/core/te_types.h"
#include "../model/bind.h"
#include "../model/keys.h"
#include "attend.h"
#include "ops.h"

/* Keys and values of all heads in one tensor, as files had it before absorption: of each head first the rows of its key, then
 * those of its value. The key's are turned, which formats of blocks do not survive: they become F16. */
static pi_status bind_old(pi_model *m, int32_t i, pi_latent *w) {
    const int32_t n_head = m->info.n_head, rank = m->latent_rank, n_nope = m->head_key - m->rope[0].n_rot,
                  rows = n_nope + m->head_value;
    te_mat all;
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.attn_kv_b.weight", i), n_head * rows, rank, false, &all));
    PI_TRY(pi_bind_parts(m, n_head, &w->v_parts));
    w->part_rows = m->head_value;
    const int32_t type = all.type == TE_F32 || all.type == TE_BF16 ? all.type : TE_F16;
    w->k_b = (te_mat){.type = type, .stride = te_row_bytes(type, n_nope), .cols = n_nope, .n_rows = n_head * rank};
    w->v_b = all;
    w->v_b.n_rows = n_head * m->head_value;
    const size_t words = pi_mul(w->k_b.stride, (size_t)w->k_b.n_rows) / sizeof(void *) + 1;
    const void **made = NULL;
    float *key = malloc(sizeof *key * (size_t)n_nope * (size_t)rank), *row = malloc(sizeof *row * (size_t)n_nope);
    pi_status s = !key || !row || words > INT32_MAX
                      ? PI_FAIL(PI_ERROR_MEMORY, "out of memory for keys of %d heads", n_head)
                      : pi_bind_parts(m, (int32_t)words, &made);
    for (int32_t h = 0; s == PI_OK && h < n_head; h++) {
        const char *at = (const char *)all.w + all.stride * (size_t)h * (size_t)rows;
        w->v_parts[h] = at + all.stride * (size_t)n_nope;
        for (int32_t r = 0; r < n_nope; r++)
            te_dequantize_row(all.type, at + all.stride * (size_t)r, key + (ptrdiff_t)r * rank, rank);
        for (int32_t c = 0; c < rank; c++) {
            for (int32_t r = 0; r < n_nope; r++) row[r] = key[(ptrdiff_t)r * rank + c];
            te_quantize_row(type, row, (char *)(void *)made + w->k_b.stride * ((size_t)h * (size_t)rank + (size_t)c),
                            n_nope);
        }
    }
    free(key);
    free(row);
    w->k_b.w = made;
    w->v_b.w = w->v_parts[0];
    return s;
}

/* The low-rank q, or the direct one. */
static pi_status bind_q(pi_model *m, int32_t i, pi_latent *w) {
    const int32_t n_q = m->info.n_head * m->head_key, n_embd = m->info.n_embd;
    int64_t rank = 0;
    PI_TRY(pi_key_i64(m->file->gguf, m->arch->name, "attention.q_lora_rank", 0, INT32_MAX, &rank, NULL));
    if (!rank) return pi_bind_mat(m, pi_name_of("blk.%d.attn_q.weight", i), n_q, n_embd, false, &w->attention.q);
    if (rank > (int64_t)m->info.n_head * m->info.n_embd_head) /* what the buffer of a chunk holds */
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "a q_lora_rank of %lld is more than %d heads of %d values have",
                       (long long)rank, m->info.n_head, m->info.n_embd_head);
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.attn_q_a.weight", i), (int32_t)rank, n_embd, false, &w->q_a));
    PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_q_a_norm.weight", i), (int32_t)rank, false, &w->q_norm));
    return pi_bind_mat(m, pi_name_of("blk.%d.attn_q_b.weight", i), n_q, (int32_t)rank, false, &w->q_b);
}

static pi_status bind(pi_model *m, int32_t i, pi_block *b) {
    const pi_model_info *c = &m->info;
    pi_latent *w = &b->latent;
    float by_factor = 0;
    const int32_t n_nope = m->head_key - m->rope[0].n_rot;
    PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.attn_norm", i).text, false, &b->norm));
    PI_TRY(pi_key_f32(m->file->gguf, m->arch->name, "rope.scaling.yarn_log_multiplier", &by_factor, NULL));
    const float by = 1 + by_factor * m->rope[0].log_factor;
    w->attention.n_embd_head = c->n_embd_head;
    w->attention.n_head_kv = 1;
    w->attention.kv_layer = i;
    w->attention.scale = by * by / sqrtf((float)m->head_key);
    if (!(w->attention.scale > 0) || !isfinite(w->attention.scale))
        return PI_FAIL(PI_ERROR_FORMAT, "a yarn_log_multiplier of %g makes the scale of scores %g", (double)by_factor,
                       (double)w->attention.scale);
    PI_TRY(bind_q(m, i, w));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.attn_kv_a_mqa.weight", i), c->n_embd_head, c->n_embd, false, &w->kv_a));
    PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.attn_kv_a_norm.weight", i), m->latent_rank, false, &w->norm));
    if (pi_bind_has(m, pi_name_of("blk.%d.attn_kv_b.weight", i))) {
        PI_TRY(bind_old(m, i, w));
    } else {
        PI_TRY(pi_bind_mats(m, pi_name_of("blk.%d.attn_k_b.weight", i), c->n_head, m->latent_rank, n_nope, &w->k_b));
        PI_TRY(pi_bind_mats(m, pi_name_of("blk.%d.attn_v_b.weight", i), c->n_head, m->head_value, m->latent_rank,
                            &w->v_b));
    }
    return pi_bind_mat(m, pi_name_of("blk.%d.attn_output.weight", i), c->n_embd, c->n_head * m->head_value, false,
                       &w->attention.o);
}

/* ---- on the CPU ---- */

/* Where each head's values lie: x and y of head h of a token are `step` floats apart, tokens `ld`. */
typedef struct head_rows {
    float *at;
    size_t ld, step;
} head_rows;

/* y = w_h . x of every head h and of tokens `from` and later; all has `rows` rows of each head. Ends without a barrier. */
static void heads_product(const pi_session *s, te_team *team, const te_mat *all, int32_t rows, int32_t from,
                          head_rows x, head_rows y) {
    enum { TOGETHER = 8 };
    const te_kernels *kern = s->model->kernels;
    const te_gemm_kernels *g = &kern->gemm;
    const te_row_kernels *rk = &kern->row[all->type];
    const pi_attention_room *room = &s->room;
    float *base = pi_scratch(s, team);
    void *packed = base + room->packed_q, *work = base + room->work;
    char *act = (char *)(void *)(base + room->score);
    const size_t act_bytes = (rk->act_bytes(all->cols) + 63) / 64 * 64;
    bool open = false;
    for (int32_t h = team->ith; h < s->model->info.n_head; h += team->nth) {
        const te_mat m = pi_expert_rows(all, h, rows);
        const float *xh = x.at + x.step * (size_t)h;
        float *yh = y.at + y.step * (size_t)h;
        int32_t t = from, n;
        for (; t < s->chunk.n_prefill; t += n) {
            n = s->chunk.n_prefill - t < room->rows ? s->chunk.n_prefill - t : room->rows;
            if (!open) g->begin();
            open = true;
            g->pack(xh + x.ld * (size_t)t, x.ld, NULL, n, m.cols, 0, n, packed);
            g->gemm(&m, 0, rows, packed, n, yh + y.ld * (size_t)t, y.ld, NULL, false, work);
        }
        for (; t < s->chunk.n_tok; t += n) {
            n = s->chunk.n_tok - t < TOGETHER ? s->chunk.n_tok - t : TOGETHER;
            for (int32_t k = 0; k < n; k++)
                rk->act_pack(xh + x.ld * (size_t)(t + k), m.cols, act + act_bytes * (size_t)k);
            rk->dot_batch(&m, (te_rows){NULL, 0, rows}, (te_ahead){0}, (te_tokens){NULL, n}, act, act_bytes,
                          yh + y.ld * (size_t)t, y.ld);
        }
    }
    if (open) g->end();
}

static void prepare(pi_block_run *r) { pi_make_input(r, 0); }

/* q of tokens r->from and later, to latent_q. Ends with a barrier. */
static void make_q(pi_block_run *r, const float *in) {
    pi_session *s = r->s;
    te_team *team = r->team;
    const pi_model *m = s->model;
    const pi_latent *w = &r->block->latent;
    const size_t n = (size_t)m->info.n_embd, n_q = (size_t)m->info.n_head * (size_t)m->head_key, from = (size_t)r->from;
    const int32_t n_tok = s->chunk.n_tok - r->from;
    const float *x = in;
    size_t ldx = n;
    if (w->q_a.w) {
        const size_t rank = (size_t)w->q_a.n_rows;
        const te_linear a = {.w = w->q_a, .y = s->att + rank * from, .ldy = rank};
        pi_linear(s, team, &a, 1, in + n * from, n, r->from, n_tok);
        te_barrier(team);
        for (int32_t t = r->from + team->ith; t < s->chunk.n_tok; t += team->nth) {
            float *row = s->att + rank * (size_t)t;
            m->kernels->rms_norm(row, w->q_norm, m->inner_eps, (int32_t)rank, row);
        }
        te_barrier(team);
        x = s->att;
        ldx = rank;
    }
    const te_linear q = {.w = w->q_a.w ? w->q_b : w->attention.q, .y = s->latent_q + n_q * from, .ldy = n_q};
    pi_linear(s, team, &q, 1, x + ldx * from, ldx, r->from, n_tok);
    te_barrier(team);
    pi_adapt_chunk(s, team, r->layer, PI_ADAPT_Q, in, n, s->latent_q, n_q);
}

static void run(pi_block_run *r) {
    pi_session *s = r->s;
    te_team *team = r->team;
    const pi_model *m = s->model;
    const pi_model_info *i = &m->info;
    const pi_latent *w = &r->block->latent;
    const size_t n = (size_t)i->n_embd, d = (size_t)i->n_embd_head, n_head = (size_t)i->n_head,
                 rank = (size_t)m->latent_rank, n_rot = d - rank, key = (size_t)m->head_key,
                 value = (size_t)m->head_value, from = (size_t)r->from;
    const float *in = pi_block_input(r);
    const te_linear kv = {.w = w->kv_a, .y = s->v, .ldy = d};
    pi_linear(s, team, &kv, 1, in, n, 0, s->chunk.n_tok);
    make_q(r, in);
    for (int32_t t = team->ith; t < s->chunk.n_tok; t += team->nth) {
        const float *row = s->v + d * (size_t)t;
        float *to = s->k + d * (size_t)t;
        memcpy(to, row + rank, n_rot * sizeof *to);
        m->kernels->rms_norm(row, w->norm, m->inner_eps, m->latent_rank, to + n_rot);
        for (size_t h = 0; t >= r->from && h < n_head; h++)
            memcpy(s->q + (n_head * (size_t)t + h) * d, s->latent_q + (n_head * (size_t)t + h) * key + (key - n_rot),
                   n_rot * sizeof *to);
    }
    heads_product(s, team, &w->k_b, m->latent_rank, r->from, (head_rows){s->latent_q, n_head * key, key},
                  (head_rows){s->q + n_rot, n_head * d, d});
    te_barrier(team);
    pi_attend_chunk(s, team, r->l, r->from);
    te_barrier(team);
    heads_product(s, team, &w->v_b, m->head_value, r->from, (head_rows){s->att, n_head * rank, rank},
                  (head_rows){s->q, n_head * value, value});
    te_barrier(team);
    const te_linear out = {.w = w->attention.o, .y = r->y + n * from, .ldy = n, .add = true};
    pi_linear(s, team, &out, 1, s->q + n_head * value * from, n_head * value, r->from, s->chunk.n_tok - r->from);
    pi_adapt_chunk(s, team, r->layer, PI_ADAPT_O, s->q, n_head * value, r->y, n);
}

static int32_t matrices(pi_block *b, pi_block_mat out[PI_BLOCK_MATS]) {
    pi_latent *w = &b->latent;
    te_mat *const mat[] = {&w->attention.q, &w->q_a, &w->q_b, &w->kv_a, &w->k_b, &w->v_b, &w->attention.o};
    const int32_t n = (int32_t)(sizeof mat / sizeof *mat);
    for (int32_t i = 0; i < n; i++) {
        const bool heads = mat[i] == &w->k_b || mat[i] == &w->v_b;
        out[i] = (pi_block_mat){.mat = mat[i], .use = heads ? PI_MAT_HEADS : PI_MAT_PRODUCT};
        if (mat[i] == &w->v_b && w->v_parts) {
            out[i].parts = w->v_parts;
            out[i].part_rows = w->part_rows;
        }
    }
    return n;
}

const pi_block_kind pi_latent_kind = {"latent attention",   bind, matrices, NULL, prepare, run,
                                      &pi_latent_on_device, NULL};
