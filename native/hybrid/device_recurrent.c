/* device_recurrent.c - blocks with a state on a device: their weights, their places among its states, and their operations. */
#include "program.h"

static int32_t round_4(int32_t n) { return (n + 3) / 4 * 4; }

static void send_conv(pi_upload *u, const pi_conv *c, pi_device_layer *d) {
    d->recurrent.conv = pi_upload_vector(u, c->w, (int64_t)c->width * c->n_channels);
    d->recurrent.conv_b = pi_upload_vector(u, c->b, c->n_channels);
}

/* state_in, of products of x alone. */
static void make_input(const pi_program_block *b, te_norm norm, size_t ld) {
    const pi_program *p = b->p;
    te_linear_args in = pi_program_from_x(p);
    in.norm = norm;
    in.n_products = 1;
    in.product[0] = (te_product){.w = b->w->recurrent.in, .y = p->d->state_in, .ldy = ld};
    p->ops->linear(p->dev, &in);
}

/* What all kinds have in common. */
static te_recurrent_args begin(const pi_program_block *b, const float *x, int32_t ldx, float *y) {
    const pi_program *p = b->p;
    const pi_recurrent *r = &b->block->recurrent;
    const pi_device_layer *w = b->w;
    return (te_recurrent_args){.x = x,
                               .ldx = (size_t)ldx,
                               .w = w->recurrent.conv,
                               .b = w->recurrent.conv_b,
                               .n_channels = r->conv.n_channels,
                               .width = r->conv.width,
                               .y = y,
                               .ldy = (size_t)r->conv.n_channels,
                               .n_head = r->n_head,
                               .n_group = r->n_group,
                               .n_k = r->n_k,
                               .n_v = r->n_v,
                               .a = w->recurrent.a,
                               .dt_b = w->recurrent.dt_b,
                               .skip = w->recurrent.d,
                               .out = p->d->state_out,
                               .ld_out = (size_t)r->n_head * (size_t)r->n_v,
                               .n_tok = p->n_tok,
                               .n_runs = p->h->n_runs,
                               .apart = p->h->apart,
                               .order = p->in.order,
                               .run = p->in.run,
                               .pos = p->in.pos,
                               .place = p->in.state,
                               .keep = p->in.keep,
                               .state = p->d->states + w->recurrent.at,
                               .ld_state = p->d->state_floats};
}

/* ---- delta nets ---- */

static void send_delta(pi_upload *u, const pi_layer *layer, const pi_block *b, pi_device_layer *d) {
    const pi_delta *w = &b->delta;
    (void)layer;
    d->recurrent.in = pi_upload_mat(u, &w->qkv);
    d->recurrent.gate = pi_upload_mat(u, &w->gate);
    d->recurrent.alpha = pi_upload_mat(u, &w->alpha);
    d->recurrent.beta = pi_upload_mat(u, &w->beta);
    d->recurrent.out = pi_upload_mat(u, &w->out);
    send_conv(u, &w->state.conv, d);
    d->recurrent.a = pi_upload_vector(u, w->a, w->state.n_head);
    d->recurrent.dt_b = pi_upload_vector(u, w->dt_b, w->state.n_head);
    d->recurrent.norm = pi_upload_vector(u, w->norm, w->state.n_v);
}

static void run_delta(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_device_layer *w = b->w;
    const pi_delta *shape = &b->block->delta;
    const pi_recurrent *r = &shape->state;
    const int32_t n = r->n_head, each = n / r->n_group, n_qk = r->n_group * r->n_k, n_qkv = r->conv.n_channels;
    const size_t n_out = (size_t)n * (size_t)r->n_v, ld_gate = (size_t)round_4(w->recurrent.beta.n_rows);
    /* In one matrix: of each group betas, then alphas, of its heads. */
    const bool apart = w->recurrent.alpha.w != NULL;
    float *beta = p->d->state_gates, *alpha = apart ? beta + ld_gate * (size_t)p->n_tok : beta + each;
    te_linear_args in = pi_program_from_x(p);
    in.norm = b->norm;
    in.n_products = apart ? 4 : 3;
    in.product[0] = (te_product){.w = w->recurrent.in, .y = p->d->state_in, .ldy = (size_t)n_qkv};
    in.product[1] = (te_product){.w = w->recurrent.gate, .y = p->d->state_z, .ldy = n_out};
    in.product[2] = (te_product){.w = w->recurrent.beta, .y = beta, .ldy = ld_gate};
    in.product[3] = (te_product){.w = w->recurrent.alpha, .y = alpha, .ldy = ld_gate};
    p->ops->linear(p->dev, &in);
    pi_program_stamp(p, b->l, PI_MOMENT_QKV);
    te_recurrent_args a = begin(b, p->d->state_in, n_qkv, p->d->state_conv);
    a.silu = a.delta = 1;
    a.tiled = shape->tiled;
    a.k_at = n_qk;
    a.v_at = 2 * n_qk;
    a.alpha = alpha;
    a.beta = beta;
    a.ld_gate = ld_gate;
    a.gate_each = apart ? n : each;
    a.gate_step = apart ? 0 : 2 * each;
    p->ops->recurrent(p->dev, &a);
    const te_gate_args gate = {.x = a.out,
                               .ldx = n_out,
                               .gate = p->d->state_z,
                               .ld_gate = n_out,
                               .n_tok = p->n_tok,
                               .n_group = n,
                               .each = r->n_v,
                               .silu = 1,
                               .norm = w->recurrent.norm,
                               .norm_eps = p->h->s->model->inner_eps,
                               .y = a.out,
                               .ldy = n_out};
    p->ops->gate(p->dev, &gate);
    pi_program_stamp(p, b->l, PI_MOMENT_ATTENTION);
    pi_program_output(b, a.out, &w->recurrent.out, NULL);
    pi_program_stamp(p, b->l, PI_MOMENT_OUTPUT);
}

const pi_block_on_device pi_delta_on_device = {send_delta, NULL, NULL, run_delta, PI_ALL_TOKENS};

/* ---- short convolutions ---- */

static void send_shortconv(pi_upload *u, const pi_layer *layer, const pi_block *b, pi_device_layer *d) {
    const pi_shortconv *w = &b->shortconv;
    (void)layer;
    d->recurrent.in = pi_upload_mat(u, &w->in);
    d->recurrent.out = pi_upload_mat(u, &w->out);
    send_conv(u, &w->state.conv, d);
}

static void run_shortconv(const pi_program_block *b) {
    const pi_program *p = b->p;
    const int32_t n = p->h->s->model->info.n_embd;
    float *in = p->d->state_in;
    make_input(b, b->norm, 3 * (size_t)n);
    pi_program_stamp(p, b->l, PI_MOMENT_QKV);
    te_recurrent_args a = begin(b, in + (ptrdiff_t)2 * n, 3 * n, p->d->state_out);
    a.before = in;
    a.after = in + n;
    p->ops->recurrent(p->dev, &a);
    pi_program_stamp(p, b->l, PI_MOMENT_ATTENTION);
    pi_program_output(b, a.y, &b->w->recurrent.out, NULL);
    pi_program_stamp(p, b->l, PI_MOMENT_OUTPUT);
}

const pi_block_on_device pi_shortconv_on_device = {send_shortconv, NULL, NULL, run_shortconv, PI_ALL_TOKENS};

/* ---- Mamba-2 ---- */

static void send_mamba(pi_upload *u, const pi_layer *layer, const pi_block *b, pi_device_layer *d) {
    const pi_mamba *w = &b->mamba;
    const int32_t n = w->state.n_head;
    (void)layer;
    d->recurrent.in = pi_upload_mat(u, &w->in);
    d->recurrent.out = pi_upload_mat(u, &w->out);
    send_conv(u, &w->state.conv, d);
    d->recurrent.a = pi_upload_vector(u, w->a, n);
    d->recurrent.d = pi_upload_vector(u, w->d, n);
    d->recurrent.dt_b = pi_upload_vector(u, w->dt_b, n);
    d->recurrent.norm = pi_upload_vector(u, w->norm, (int64_t)n * w->state.n_v);
}

static size_t row_of(const pi_mamba *w) { return (size_t)round_4(w->in.n_rows); }

/* Beside attention it reads what that reads, before x changes. */
static void begin_mamba(const pi_program_block *b) {
    if (!b->block->norm.w) make_input(b, b->w->norm[0], row_of(&b->block->mamba));
}

static void run_mamba(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_device_layer *w = b->w;
    const pi_recurrent *r = &b->block->recurrent;
    const int32_t n = r->n_head, n_v = n * r->n_v, each = n_v / r->n_group;
    const size_t row = row_of(&b->block->mamba);
    if (b->block->norm.w) make_input(b, b->norm, row);
    pi_program_stamp(p, b->l, PI_MOMENT_QKV);
    te_recurrent_args a = begin(b, p->d->state_in + n_v, (int32_t)row, p->d->state_conv);
    a.silu = 1;
    a.k_at = n_v;
    a.q_at = n_v + r->n_group * r->n_k;
    a.alpha = p->d->state_in + n_v + r->conv.n_channels;
    a.ld_gate = row;
    a.gate_each = n;
    p->ops->recurrent(p->dev, &a);
    const te_gate_args gate = {.x = a.out,
                               .ldx = (size_t)n_v,
                               .gate = p->d->state_in,
                               .ld_gate = row,
                               .n_tok = p->n_tok,
                               .n_group = r->n_group,
                               .each = each,
                               .silu = 1,
                               .norm = w->recurrent.norm,
                               .norm_step = each,
                               .norm_last = 1,
                               .norm_eps = p->h->s->model->inner_eps,
                               .y = a.out,
                               .ldy = (size_t)n_v};
    p->ops->gate(p->dev, &gate);
    pi_program_stamp(p, b->l, PI_MOMENT_ATTENTION);
    pi_program_output(b, a.out, &w->recurrent.out, NULL);
    pi_program_stamp(p, b->l, PI_MOMENT_OUTPUT);
}

const pi_block_on_device pi_mamba_on_device = {send_mamba, begin_mamba, NULL, run_mamba, PI_ALL_TOKENS};
