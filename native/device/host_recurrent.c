/* host_recurrent.c - blocks with a state on the stand-in, sequence after sequence, and gates. */
#include <math.h>
#include <string.h>

#include "host.h"

static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }
static float sigmoid(float x) { return 1 / (1 + expf(-x)); }

/* Decay and rate of each token and head, [n_tok][2][n_head]. */
static void make_gates(const te_recurrent_args *a, float *gates) {
    for (int32_t t = 0; t < a->n_tok; t++)
        for (int32_t h = 0; h < a->n_head; h++) {
            const size_t at =
                a->ld_gate * (size_t)t + (size_t)(h / a->gate_each * a->gate_step) + (size_t)(h % a->gate_each);
            const float dt = softplus(a->alpha[at] + a->dt_b[h]);
            float *own = gates + (ptrdiff_t)t * 2 * a->n_head + h;
            own[0] = expf(a->a[h] * dt);
            own[a->n_head] = a->beta ? sigmoid(a->beta[at]) : dt;
        }
}

/* Of length 1, then times scale. */
static void make_unit(float *v, int32_t n, float scale) {
    float sum = 1e-6F;
    for (int32_t i = 0; i < n; i++) sum += v[i] * v[i];
    for (int32_t i = 0; i < n; i++) v[i] *= scale / sqrtf(sum);
}

static void convolve(const pi_host_device *d, const te_recurrent_args *a, const int32_t *row, int32_t n, float *state) {
    const te_conv c = {.w = a->w,
                       .b = a->b,
                       .last = state,
                       .ld = (size_t)a->n_channels,
                       .width = a->width,
                       .n_channels = a->n_channels,
                       .silu = a->silu,
                       .x = a->x,
                       .before = a->before,
                       .after = a->after,
                       .ldx = a->ldx,
                       .y = a->y,
                       .ldy = a->ldy,
                       .row = row,
                       .n = n};
    d->kernels->conv(&c);
    for (int32_t i = 0; a->delta && i < n; i++)
        for (int32_t g = 0; g < a->n_group; g++) {
            float *y = a->y + a->ldy * (size_t)row[i] + (ptrdiff_t)g * a->n_k;
            make_unit(y + a->q_at, a->n_k, 1 / sqrtf((float)a->n_k));
            make_unit(y + a->k_at, a->n_k, 1);
        }
}

static void scan(const pi_host_device *d, const te_recurrent_args *a, const float *gates, const int32_t *row, int32_t n,
                 float *state) {
    for (int32_t h = 0; h < a->n_head; h++) {
        const int32_t group = a->tiled ? h % a->n_group : h / (a->n_head / a->n_group);
        const te_scan s = {.state = state + (ptrdiff_t)h * a->n_k * a->n_v,
                           .ld_state = (size_t)a->n_v,
                           .n_k = a->n_k,
                           .n_v = a->n_v,
                           .q = a->y + a->q_at + (ptrdiff_t)group * a->n_k,
                           .k = a->y + a->k_at + (ptrdiff_t)group * a->n_k,
                           .v = a->y + a->v_at + (ptrdiff_t)h * a->n_v,
                           .ldx = a->ldy,
                           .decay = gates + h,
                           .rate = gates + a->n_head + h,
                           .ld_gate = 2 * (size_t)a->n_head,
                           .skip = a->skip ? a->skip[h] : 0,
                           .delta = a->delta,
                           .y = a->out + (ptrdiff_t)h * a->n_v,
                           .ldy = a->ld_out,
                           .row = row,
                           .n = n};
        d->kernels->scan(&s);
    }
}

void pi_host_recurrent(pi_device *dev, const te_recurrent_args *a) {
    pi_host_device *d = pi_host(dev);
    if (!pi_host_begin_op(dev, 13, a->n_tok)) return;
    pi_host_mix(d, a->x);
    pi_host_mix(d, a->state);
    pi_host_mix(d, a->order);
    pi_host_mix(d, (const void *)(uintptr_t)a->n_runs);
    const size_t conv = (size_t)(a->width - 1) * (size_t)a->n_channels,
                 all = conv + (size_t)a->n_head * (size_t)a->n_k * (size_t)a->n_v;
    float *gates = pi_host_scratch(d, 2 * (size_t)a->n_tok * (size_t)(a->n_head + 1));
    if (!gates) return;
    make_gates(a, gates);
    for (int32_t r = 0; r < a->n_runs; r++) {
        const int32_t *row = a->order + a->run[r], *end = a->order + a->run[r + 1];
        if (row == end) continue;
        float *state = a->state + a->ld_state * (size_t)a->place[*row];
        if (a->pos[*row] == 0) memset(state, 0, sizeof *state * all);
        while (row < end) { /* up to a token behind which the state is kept */
            int32_t n = 1;
            while (row + n < end && a->keep[row[n - 1]] < 0) n++;
            convolve(d, a, row, n, state);
            if (a->n_head) scan(d, a, gates, row, n, state + conv);
            row += n;
            if (a->keep[row[-1]] >= 0)
                memcpy(a->state + a->ld_state * (size_t)a->keep[row[-1]], state, sizeof *state * all);
        }
    }
}

void pi_host_gate(pi_device *dev, const te_gate_args *a) {
    pi_host_device *d = pi_host(dev);
    if (!pi_host_begin_op(dev, 14, a->n_tok)) return;
    pi_host_mix(d, a->x);
    pi_host_mix(d, a->gate);
    for (int32_t t = 0; t < a->n_tok; t++)
        for (int32_t g = 0; g < a->n_group; g++) {
            const float *x = a->x + a->ldx * (size_t)t + (ptrdiff_t)g * a->each,
                        *gate = a->gate + a->ld_gate * (size_t)t + (ptrdiff_t)g * a->each,
                        *w = a->norm ? a->norm + (ptrdiff_t)g * a->norm_step : NULL;
            float *y = a->y + a->ldy * (size_t)t + (ptrdiff_t)g * a->each;
            if (w && !a->norm_last) {
                d->kernels->rms_norm(x, w, a->norm_eps, a->each, y);
                x = y;
            }
            for (int32_t i = 0; i < a->each; i++) y[i] = x[i] * sigmoid(gate[i]) * (a->silu ? gate[i] : 1);
            if (w && a->norm_last) d->kernels->rms_norm(y, w, a->norm_eps, a->each, y);
        }
}
