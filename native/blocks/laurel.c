/* laurel.c - a branch beside attention (Gemma 3n): of the h that attention read, a product of low rank.
 *
 *     x = (x + h + norm(right . (left . h))) / sqrt(2) */
#include <math.h>

#include "../model/bind.h"
#include "ops.h"

static pi_status bind(pi_model *m, int32_t i, pi_block *b) {
    pi_laurel *w = &b->laurel;
    const int32_t n_embd = m->info.n_embd;
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.laurel_l.weight", i), 0, n_embd, false, &w->left));
    if (w->left.n_rows > m->info.n_ff)
        return PI_FAIL(PI_ERROR_FORMAT, "blk.%d.laurel_l.weight has %d rows, more than %d neurons", i, w->left.n_rows,
                       m->info.n_ff);
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.laurel_r.weight", i), n_embd, w->left.n_rows, false, &w->right));
    return pi_bind_norm(m, pi_name_of("blk.%d.laurel_post_norm", i).text, false, &w->norm);
}

static int32_t matrices(pi_block *b, pi_block_mat out[PI_BLOCK_MATS]) {
    out[0] = (pi_block_mat){.mat = &b->laurel.left, .use = PI_MAT_PRODUCT};
    out[1] = (pi_block_mat){.mat = &b->laurel.right, .use = PI_MAT_PRODUCT};
    return 2;
}

static void prepare(pi_block_run *r) { (void)r; } /* h is there */

static void run(pi_block_run *r) {
    pi_session *s = r->s;
    const pi_laurel *w = &r->block->laurel;
    const size_t n_embd = (size_t)s->model->info.n_embd, rank = (size_t)w->left.n_rows, at = n_embd * (size_t)r->from;
    const int32_t n = s->chunk.n_tok - r->from;
    const float *h = s->h + at, half = sqrtf(0.5F);
    const te_linear left = {.w = w->left, .y = s->gate, .ldy = rank},
                    right = {.w = w->right, .y = s->out + at, .ldy = n_embd};
    pi_linear(s, r->team, &left, 1, h, n_embd, r->from, n);
    te_barrier(r->team);
    pi_linear(s, r->team, &right, 1, s->gate, rank, r->from, n);
    te_barrier(r->team);
    for (int32_t t = r->team->ith; t < n; t += r->team->nth) {
        const size_t row = n_embd * (size_t)t;
        float *x = s->x + at + row, *y = s->out + at + row;
        pi_norm_row(s->model, &w->norm, y, y);
        for (size_t c = 0; c < n_embd; c++) x[c] = (x[c] + h[row + c] + y[c]) * half;
    }
}

const pi_block_kind pi_laurel_kind = {"a branch of low rank", bind, matrices, NULL, prepare, run, NULL, false};
