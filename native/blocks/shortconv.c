/* shortconv.c - the gated short convolution of LFM2:
 *
 *     b, c, x = in . h        y += out . (c * conv(b * x)) */
#include "../model/keys.h"
#include "recurrent.h"

static pi_status bind(pi_model *m, int32_t l, pi_block *b) {
    pi_shortconv *w = &b->shortconv;
    const int32_t n = m->info.n_embd;
    int32_t width = 0;
    PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.attn_norm", l).text, false, &b->norm));
    PI_TRY(pi_key_need_i32(m->file->gguf, m->arch->name, "shortconv.l_cache", 1, INT32_MAX, &width));
    PI_TRY(pi_bind_conv(m, l, "shortconv.conv", n, width, false, &w->state.conv));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.shortconv.in_proj.weight", l), 3 * n, n, false, &w->in));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.shortconv.out_proj.weight", l), n, n, false, &w->out));
    return pi_bind_state(m, &w->state, 3 * (int64_t)n, 0, 0, n);
}

static void prepare(pi_block_run *r) { pi_make_input(r, 0); }

static void run(pi_block_run *r) {
    pi_session *s = r->s;
    const pi_shortconv *w = &r->block->shortconv;
    const size_t n = (size_t)s->model->info.n_embd;
    const te_linear in = {.w = w->in, .y = s->state_in, .ldy = 3 * n};
    pi_linear(s, r->team, &in, 1, pi_block_input(r), n, 0, s->chunk.n_tok);
    te_barrier(r->team);
    te_conv c = {.x = s->state_in + 2 * n,
                 .before = s->state_in,
                 .after = s->state_in + n,
                 .ldx = 3 * n,
                 .y = s->state_out,
                 .ldy = n};
    pi_run_conv(r, &w->state, &c);
    te_barrier(r->team);
    pi_run_output(r, &w->out);
}

static int32_t matrices(pi_block *b, pi_block_mat out[PI_BLOCK_MATS]) {
    out[0] = (pi_block_mat){.mat = &b->shortconv.in, .use = PI_MAT_PRODUCT};
    out[1] = (pi_block_mat){.mat = &b->shortconv.out, .use = PI_MAT_PRODUCT};
    return 2;
}

const pi_block_kind pi_shortconv_kind = {"short convolutions",    bind, matrices, NULL, prepare, run,
                                         &pi_shortconv_on_device, true};
