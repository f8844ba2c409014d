/* mamba.c - Mamba-2. Of each token:
 *
 *     z, xbc, dt = in . h      x, b, c = silu(conv(xbc))
 *     rate = softplus(dt + dt_b)      decay = exp(a rate)
 *     state = decay state + b (rate x)      o = c . state + d x
 *     y += out . norm(o * silu(z))          of each group's values together; some have no norm */
#include <math.h>

#include "recurrent.h"

static pi_status bind(pi_model *m, int32_t l, pi_block *b) {
    pi_mamba *w = &b->mamba;
    pi_recurrent *s = &w->state;
    const int32_t n = m->info.n_embd;
    int64_t width = 0;
    if (!m->arch->recurrent_beside) PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.attn_norm", l).text, false, &b->norm));
    PI_TRY(pi_bind_heads(m, s, &width));
    const int64_t n_v = (int64_t)s->n_head * s->n_v, n_xbc = n_v + 2 * (int64_t)s->n_group * s->n_k,
                  n_in = n_v + n_xbc + s->n_head;
    if (n_in > INT32_MAX / 8) return PI_FAIL(PI_ERROR_FORMAT, "%lld channels are too many", (long long)n_in);
    PI_TRY(pi_bind_conv(m, l, "ssm_conv1d", (int32_t)n_xbc, width, true, &s->conv));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ssm_in.weight", l), (int32_t)n_in, n, false, &w->in));
    PI_TRY(pi_bind_values(m, pi_name_of("blk.%d.ssm_a", l), s->n_head, false, &w->a));
    PI_TRY(pi_bind_values(m, pi_name_of("blk.%d.ssm_d", l), s->n_head, false, &w->d));
    PI_TRY(pi_bind_values(m, pi_name_of("blk.%d.ssm_dt.bias", l), s->n_head, false, &w->dt_b));
    PI_TRY(
        pi_bind_values(m, pi_name_of("blk.%d.ssm_norm.weight", l), (int32_t)n_v, m->arch->recurrent_beside, &w->norm));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ssm_out.weight", l), n, (int32_t)n_v, false, &w->out));
    return pi_bind_state(m, s, n_in, 0, 2 * (int64_t)s->n_head, n_v);
}

static void prepare(pi_block_run *r) { pi_make_input(r, 0); }

static size_t row_of(const pi_mamba *w) { return (size_t)w->in.n_rows; }

static void head(const pi_block_run *r, int32_t h, te_scan *out) {
    const pi_session *s = r->s;
    const pi_mamba *w = &r->block->mamba;
    const pi_recurrent *p = &w->state;
    const size_t n = (size_t)p->n_head, n_k = (size_t)p->n_k, n_v = n * (size_t)p->n_v,
                 g = (size_t)(h / (p->n_head / p->n_group));
    const float *xbc = s->state_in + n_v;
    out->ldx = row_of(w);
    out->v = xbc + (size_t)h * (size_t)p->n_v;
    out->k = xbc + n_v + g * n_k;
    out->q = xbc + n_v + ((size_t)p->n_group + g) * n_k;
    out->ld_gate = 2 * n;
    out->decay = s->state_gates + h;
    out->rate = out->decay + n;
    out->skip = w->d[h];
    out->ldy = n_v;
    out->y = s->state_out + (size_t)h * (size_t)p->n_v;
}

static void run(pi_block_run *r) {
    pi_session *s = r->s;
    te_team *team = r->team;
    const pi_mamba *w = &r->block->mamba;
    const pi_recurrent *p = &w->state;
    const te_kernels *kern = s->model->kernels;
    const int32_t n_tok = s->chunk.n_tok, n = p->n_head, n_v = n * p->n_v, each = n_v / p->n_group;
    const size_t n_embd = (size_t)s->model->info.n_embd, row = row_of(w);
    const te_linear in = {.w = w->in, .y = s->state_in, .ldy = row};
    pi_linear(s, team, &in, 1, pi_block_input(r), n_embd, 0, n_tok);
    te_barrier(team);
    float *xbc = s->state_in + n_v;
    te_conv c = {.x = xbc, .ldx = row, .y = xbc, .ldy = row, .silu = true};
    pi_run_conv(r, p, &c);
    for (int32_t t = team->ith; t < n_tok; t += team->nth) {
        const float *dt = s->state_in + (size_t)t * row + row - (size_t)n;
        float *decay = s->state_gates + (ptrdiff_t)t * 2 * n, *rate = decay + n;
        for (int32_t h = 0; h < n; h++) {
            rate[h] = pi_softplus(dt[h] + w->dt_b[h]);
            decay[h] = expf(w->a[h] * rate[h]);
        }
    }
    te_barrier(team);
    pi_run_scan(r, p, head);
    te_barrier(team);
    for (int32_t i = r->from * p->n_group + team->ith; i < n_tok * p->n_group; i += team->nth) {
        const int32_t t = i / p->n_group, g = i % p->n_group;
        float *o = s->state_out + (size_t)i * (size_t)each;
        kern->glu(TE_SILU, 0, s->state_in + (size_t)t * row + (size_t)g * (size_t)each, o, each, o);
        if (w->norm) kern->rms_norm(o, w->norm + (ptrdiff_t)g * each, s->model->inner_eps, each, o);
    }
    te_barrier(team);
    pi_run_output(r, &w->out);
}

static int32_t matrices(pi_block *b, pi_block_mat out[PI_BLOCK_MATS]) {
    out[0] = (pi_block_mat){.mat = &b->mamba.in, .use = PI_MAT_PRODUCT};
    out[1] = (pi_block_mat){.mat = &b->mamba.out, .use = PI_MAT_PRODUCT};
    return 2;
}

const pi_block_kind pi_mamba_kind = {"Mamba-2", bind, matrices, NULL, prepare, run, &pi_mamba_on_device, true};
