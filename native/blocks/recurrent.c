/* recurrent.c - what blocks with a state share. */
#include "recurrent.h"

#include <math.h>
#include <string.h>

#include "../model/keys.h"

enum { MAX_SIZE = 1 << 20, MAX_HEADS = 4096 };

/* ---- opening a model ---- */

pi_status pi_bind_conv(pi_model *m, int32_t l, const char *name, int32_t n_channels, int64_t width, bool bias,
                       pi_conv *out) {
    const float *by_channel = NULL;
    float *w = NULL;
    if (width < 2 || width > TE_CONV_WIDTH)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "a convolution over %lld tokens is not supported (2 to %d are)",
                       (long long)width, TE_CONV_WIDTH);
    *out = (pi_conv){.width = (int32_t)width, .n_channels = n_channels};
    PI_TRY(pi_bind_vecs(m, pi_name_of("blk.%d.%s.weight", l, name), n_channels, (int32_t)width, &by_channel));
    PI_TRY(pi_bind_room(m, width * n_channels, &w));
    for (int32_t c = 0; c < n_channels; c++)
        for (int32_t j = 0; j < width; j++) w[(ptrdiff_t)j * n_channels + c] = by_channel[(ptrdiff_t)c * width + j];
    out->w = w;
    if (bias) PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.%s.bias", l, name), n_channels, false, &out->b));
    return PI_OK;
}

pi_status pi_bind_heads(pi_model *m, pi_recurrent *s, int64_t *width) {
    const te_gguf *g = m->file->gguf;
    const char *arch = m->arch->name;
    int32_t n_inner = 0, n_width = 0;
    PI_TRY(pi_key_need_i32(g, arch, "ssm.conv_kernel", 1, MAX_SIZE, &n_width));
    PI_TRY(pi_key_need_i32(g, arch, "ssm.state_size", 1, MAX_SIZE, &s->n_k));
    PI_TRY(pi_key_need_i32(g, arch, "ssm.group_count", 1, MAX_HEADS, &s->n_group));
    PI_TRY(pi_key_need_i32(g, arch, "ssm.time_step_rank", 1, MAX_HEADS, &s->n_head));
    PI_TRY(pi_key_need_i32(g, arch, "ssm.inner_size", 1, MAX_SIZE, &n_inner));
    if (n_inner % s->n_head || s->n_head % s->n_group)
        return PI_FAIL(PI_ERROR_FORMAT, "%d values, %d heads and %d groups of a recurrent layer do not share evenly",
                       n_inner, s->n_head, s->n_group);
    s->n_v = n_inner / s->n_head;
    *width = n_width;
    return PI_OK;
}

static void grow(int32_t *most, int64_t n) {
    if (n > *most) *most = (int32_t)n;
}

pi_status pi_bind_state(pi_model *m, pi_recurrent *s, int64_t in, int64_t z, int64_t gates, int64_t out) {
    const int64_t most = INT32_MAX / 8, conv = (int64_t)(s->conv.width - 1) * s->conv.n_channels,
                  heads = (int64_t)s->n_k * s->n_v * s->n_head; /* below 2^52: each is below 2^20 */
    if (in > most || z > most || gates > most || out > most || heads > most ||
        (int64_t)m->state_floats + conv + heads > most)
        return PI_FAIL(PI_ERROR_FORMAT, "a sequence's state has more than %lld values", (long long)most);
    m->state_floats += (size_t)(conv + heads);
    grow(&m->state_in, in);
    grow(&m->state_z, z);
    grow(&m->state_gates, gates);
    grow(&m->state_out, out);
    m->info.n_recurrent++;
    m->info.n_state_bytes = m->state_floats * sizeof(float);
    return PI_OK;
}

/* ---- a chunk ---- */

/* The layer's state of the run's sequence. */
static float *state_of(const pi_block_run *r, int32_t run) {
    const pi_chunk *c = &r->s->chunk;
    return pi_state_of(&r->s->kv.states, c->seq[c->order[c->run[run]]], r->l);
}
/* How many of a run's tokens from `done` on are computed at once: up to one behind which the state is kept. */
static int32_t until_kept(const pi_chunk *c, int32_t run, int32_t done) {
    const int32_t end = c->run[run + 1];
    int32_t i = c->run[run] + done;
    while (i < end && c->kept[i] < 0) i++;
    return (i < end ? i + 1 : end) - c->run[run] - done;
}
/* Where the layer's state behind a run's token is kept, or NULL. */
static float *kept_behind(const pi_block_run *r, int32_t run, int32_t token) {
    const int32_t place = r->s->chunk.kept[r->s->chunk.run[run] + token];
    return place < 0 ? NULL : pi_state_of(&r->s->kv.states, place, r->l);
}
static void copy_rows(float *to, const float *from, int32_t n_rows, size_t ld, int32_t n) {
    for (int32_t i = 0; i < n_rows; i++) memcpy(to + ld * (size_t)i, from + ld * (size_t)i, sizeof(float) * (size_t)n);
}
static bool begins(const pi_session *s, int32_t run) { return s->chunk.pos[s->chunk.order[s->chunk.run[run]]] == 0; }

void pi_run_conv(const pi_block_run *r, const pi_recurrent *b, te_conv *c) {
    enum { UNIT = 64 };
    const pi_session *s = r->s;
    const pi_chunk *chunk = &s->chunk;
    const pi_conv *w = &b->conv;
    const int32_t n_units = (w->n_channels + UNIT - 1) / UNIT;
    te_conv all = *c;
    all.ld = (size_t)w->n_channels;
    all.width = w->width;
    int64_t lo, hi;
    te_share(r->team, (int64_t)n_units * chunk->n_runs, 1, &lo, &hi);
    while (lo < hi) {
        const int32_t run = (int32_t)(lo / n_units), from = (int32_t)(lo % n_units) * UNIT;
        const int64_t rest = hi - lo < n_units - lo % n_units ? hi - lo : n_units - lo % n_units;
        const int32_t n = from + rest * UNIT < w->n_channels ? (int32_t)rest * UNIT : w->n_channels - from;
        te_conv one = all;
        one.w = w->w + from;
        one.b = w->b ? w->b + from : NULL;
        one.last = state_of(r, run) + from;
        one.n_channels = n;
        one.x += from;
        if (one.before) one.before += from;
        if (one.after) one.after += from;
        one.y += from;
        if (begins(s, run))
            for (int32_t j = 0; j + 1 < w->width; j++)
                memset(one.last + (size_t)j * one.ld, 0, sizeof(float) * (size_t)n);
        const int32_t n_tok = chunk->run[run + 1] - chunk->run[run];
        for (int32_t done = 0; done < n_tok; done += one.n) {
            one.row = chunk->order + chunk->run[run] + done;
            one.n = until_kept(chunk, run, done);
            s->model->kernels->conv(&one);
            float *kept = kept_behind(r, run, done + one.n - 1);
            if (kept) copy_rows(kept + from, one.last, w->width - 1, one.ld, n);
        }
        lo += rest;
    }
}

void pi_run_scan(const pi_block_run *r, const pi_recurrent *b, pi_head_of *head) {
    enum { UNIT = 32 }; /* columns */
    const pi_session *s = r->s;
    const pi_chunk *chunk = &s->chunk;
    const int32_t n_units = (b->n_v + UNIT - 1) / UNIT;
    const size_t conv = (size_t)(b->conv.width - 1) * (size_t)b->conv.n_channels,
                 each = (size_t)b->n_k * (size_t)b->n_v;
    int64_t lo, hi;
    te_share(r->team, (int64_t)n_units * b->n_head * chunk->n_runs, 1, &lo, &hi);
    for (; lo < hi; lo++) {
        const int32_t from = (int32_t)(lo % n_units) * UNIT, h = (int32_t)(lo / n_units % b->n_head),
                      run = (int32_t)(lo / n_units / b->n_head), left = b->n_v - from;
        te_scan one = {.state = state_of(r, run) + conv + each * (size_t)h + from,
                       .ld_state = (size_t)b->n_v,
                       .n_k = b->n_k,
                       .n_v = left < UNIT ? left : UNIT};
        head(r, h, &one);
        one.v += from;
        one.y += from;
        for (int32_t i = 0; i < b->n_k && begins(s, run); i++)
            memset(one.state + (size_t)i * one.ld_state, 0, sizeof(float) * (size_t)one.n_v);
        const int32_t n_tok = chunk->run[run + 1] - chunk->run[run];
        for (int32_t done = 0; done < n_tok; done += one.n) {
            one.row = chunk->order + chunk->run[run] + done;
            one.n = until_kept(chunk, run, done);
            s->model->kernels->scan(&one);
            float *kept = kept_behind(r, run, done + one.n - 1);
            if (kept) copy_rows(kept + conv + each * (size_t)h + from, one.state, b->n_k, one.ld_state, one.n_v);
        }
    }
}

void pi_run_output(const pi_block_run *r, const te_mat *out) {
    pi_session *s = r->s;
    const size_t n = (size_t)s->model->info.n_embd, width = (size_t)out->cols, from = (size_t)r->from;
    const te_linear product = {.w = *out, .y = r->y + n * from, .ldy = n, .add = true};
    pi_linear(s, r->team, &product, 1, s->state_out + width * from, width, r->from, s->chunk.n_tok - r->from);
}

int64_t pi_recurrent_bytes(const pi_session *s, const pi_block *b) {
    pi_block copy = *b;
    pi_block_mat mats[PI_BLOCK_MATS];
    const int32_t n = copy.kind->matrices(&copy, mats);
    const pi_recurrent *w = &b->recurrent;
    int64_t bytes = 2 * (int64_t)(pi_recurrent_floats(w) * sizeof(float)) * s->chunk.n_runs;
    for (int32_t i = 0; i < n; i++) bytes += pi_mat_bytes(mats[i].mat);
    return bytes;
}

float pi_softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }
