/* delta.c - the gated delta net of Qwen3-Next. Of each token:
 *
 *     q, k, v = silu(conv(qkv . h))           q and k of heads of length 1, q divided by sqrt(n_k), too
 *     decay = exp(a softplus(alpha + dt_b))   rate = sigmoid(beta)
 *     state = decay state + k (rate (v - decay k . state))      o = q . state
 *     y += out . (norm(o) * silu(gate . h)) */
#include <math.h>

#include "recurrent.h"

/* Floats of a row of state_gates: alpha, then beta, of all heads; then what is made of them. */
enum { GATES = 4 };

static pi_status bind(pi_model *m, int32_t l, pi_block *b) {
    pi_delta *w = &b->delta;
    pi_recurrent *s = &w->state;
    const int32_t n = m->info.n_embd;
    int64_t width = 0;
    PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.attn_norm", l).text, false, &b->norm));
    PI_TRY(pi_bind_heads(m, s, &width));
    const int64_t n_qk = (int64_t)s->n_group * s->n_k, n_v = (int64_t)s->n_head * s->n_v, n_qkv = 2 * n_qk + n_v;
    if (n_qkv > INT32_MAX / 8) return PI_FAIL(PI_ERROR_FORMAT, "%lld channels are too many", (long long)n_qkv);
    PI_TRY(pi_bind_conv(m, l, "ssm_conv1d", (int32_t)n_qkv, width, false, &s->conv));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.attn_qkv.weight", l), (int32_t)n_qkv, n, false, &w->qkv));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.attn_gate.weight", l), (int32_t)n_v, n, false, &w->gate));
    w->tiled = m->arch->tiled_heads;
    if (w->tiled) {
        PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ssm_alpha.weight", l), s->n_head, n, false, &w->alpha));
        PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ssm_beta.weight", l), s->n_head, n, false, &w->beta));
    } else
        PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ssm_ba.weight", l), 2 * s->n_head, n, false, &w->beta));
    PI_TRY(pi_bind_values(m, pi_name_of("blk.%d.ssm_a", l), s->n_head, false, &w->a));
    PI_TRY(pi_bind_values(m, pi_name_of("blk.%d.ssm_dt.bias", l), s->n_head, false, &w->dt_b));
    PI_TRY(pi_bind_values(m, pi_name_of("blk.%d.ssm_norm.weight", l), s->n_v, false, &w->norm));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ssm_out.weight", l), n, (int32_t)n_v, false, &w->out));
    float *unit = NULL;
    PI_TRY(pi_bind_room(m, s->n_k, &unit));
    for (int32_t i = 0; i < s->n_k; i++) unit[i] = 1 / sqrtf((float)s->n_k);
    w->unit = unit;
    return pi_bind_state(m, s, n_qkv, n_v, GATES * (int64_t)s->n_head, n_v);
}

static void prepare(pi_block_run *r) { pi_make_input(r, 0); }

/* Decay and rate of a token, and its q and k made as long as they must be. */
static void make_gates(const pi_block_run *r, int32_t t) {
    const pi_session *s = r->s;
    const pi_delta *w = &r->block->delta;
    const pi_recurrent *p = &w->state;
    const te_kernels *kern = s->model->kernels;
    const int32_t n = p->n_head, each = n / p->n_group;
    const float *in = s->state_gates + (ptrdiff_t)t * GATES * n;
    float *decay = s->state_gates + ((ptrdiff_t)t * GATES + 2) * n, *rate = decay + n;
    for (int32_t h = 0; h < n; h++) {
        /* Both in one matrix: of each group betas, then alphas, of its heads. */
        const int32_t at = w->alpha.w ? h : h / each * 2 * each + h % each;
        const float beta = in[w->alpha.w ? n + h : at], alpha = in[w->alpha.w ? h : at + each];
        decay[h] = expf(w->a[h] * pi_softplus(alpha + w->dt_b[h]));
        rate[h] = 1 / (1 + expf(-beta));
    }
    float *q = s->state_in + (size_t)t * (size_t)p->conv.n_channels, *k = q + (ptrdiff_t)p->n_group * p->n_k;
    const float eps = 1e-6F / (float)p->n_k, scale = 1 / sqrtf((float)p->n_k);
    for (int32_t g = 0; g < p->n_group; g++, q += p->n_k, k += p->n_k) {
        kern->rms_norm(q, w->unit, eps, p->n_k, q);
        kern->rms_norm(k, w->unit, eps, p->n_k, k);
        for (int32_t i = 0; i < p->n_k; i++) q[i] *= scale;
    }
}

static void head(const pi_block_run *r, int32_t h, te_scan *out) {
    const pi_session *s = r->s;
    const pi_delta *w = &r->block->delta;
    const pi_recurrent *p = &w->state;
    const size_t n = (size_t)p->n_head, n_k = (size_t)p->n_k, n_group = (size_t)p->n_group,
                 g = (size_t)(w->tiled ? h % p->n_group : h / (p->n_head / p->n_group));
    out->ldx = (size_t)p->conv.n_channels;
    out->q = s->state_in + g * n_k;
    out->k = s->state_in + (n_group + g) * n_k;
    out->v = s->state_in + 2 * n_group * n_k + (size_t)h * (size_t)p->n_v;
    out->ld_gate = GATES * n;
    out->decay = s->state_gates + 2 * n + h;
    out->rate = out->decay + n;
    out->delta = true;
    out->ldy = n * (size_t)p->n_v;
    out->y = s->state_out + (size_t)h * (size_t)p->n_v;
}

static void run(pi_block_run *r) {
    pi_session *s = r->s;
    te_team *team = r->team;
    const pi_delta *w = &r->block->delta;
    const pi_recurrent *p = &w->state;
    const te_kernels *kern = s->model->kernels;
    const int32_t n_tok = s->chunk.n_tok;
    const size_t n_embd = (size_t)s->model->info.n_embd, n_qkv = (size_t)p->conv.n_channels, n = (size_t)p->n_head,
                 n_out = n * (size_t)p->n_v;
    const te_linear in[] = {{.w = w->qkv, .y = s->state_in, .ldy = n_qkv},
                            {.w = w->gate, .y = s->state_z, .ldy = n_out},
                            {.w = w->beta, .y = s->state_gates + (w->alpha.w ? n : 0), .ldy = GATES * n},
                            {.w = w->alpha, .y = s->state_gates, .ldy = GATES * n}};
    pi_linear(s, team, in, w->alpha.w ? 4 : 3, pi_block_input(r), n_embd, 0, n_tok);
    te_barrier(team);
    te_conv c = {.x = s->state_in, .ldx = n_qkv, .y = s->state_in, .ldy = n_qkv, .silu = true};
    pi_run_conv(r, p, &c);
    te_barrier(team);
    for (int32_t t = team->ith; t < n_tok; t += team->nth) make_gates(r, t);
    te_barrier(team);
    pi_run_scan(r, p, head);
    te_barrier(team);
    for (int32_t i = r->from * p->n_head + team->ith; i < n_tok * p->n_head; i += team->nth) {
        float *o = s->state_out + (size_t)i * (size_t)p->n_v;
        kern->rms_norm(o, w->norm, s->model->inner_eps, p->n_v, o);
        kern->glu(TE_SILU, 0, s->state_z + (size_t)i * (size_t)p->n_v, o, p->n_v, o);
    }
    te_barrier(team);
    pi_run_output(r, &w->out);
}

static int32_t matrices(pi_block *b, pi_block_mat out[PI_BLOCK_MATS]) {
    te_mat *const mat[] = {&b->delta.qkv, &b->delta.gate, &b->delta.alpha, &b->delta.beta, &b->delta.out};
    for (int32_t i = 0; i < 5; i++) out[i] = (pi_block_mat){.mat = mat[i], .use = PI_MAT_PRODUCT};
    return 5;
}

const pi_block_kind pi_delta_kind = {"delta nets", bind, matrices, NULL, prepare, run, &pi_delta_on_device, true};
