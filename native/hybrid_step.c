/* hybrid_step.c - one run of tokens through a model that lies partly on a device: starts the device's program
 * (hybrid_program.c) and runs the CPU's side. Each hand-over is one post and one wait on either side, in the same order:
 *
 *     device                                     CPU
 *     ENTER  waits for x                         posts x (the embedding, or what its layers made of it)
 *     per layer: attention, predictor
 *     COLD   posts h and marks, hot neurons,     lists the marked neurons, computes them, posts their sum
 *            waits for the sum, adds
 *     LEAVE  posts x                             waits for x, computes its own layers
 *
 * A long prompt's cold neurons are not computed by the CPU: the device loads their rows. */
#include <string.h>

#include "../vendor/core/te_types.h"
#include "hybrid.h"

static uint32_t number(const pi_hybrid *h, int32_t l, int32_t which) { return h->number + pi_number(l, which); }

static void post_from_cpu(pi_hybrid *h, te_team *team, int32_t device, const float *x, uint32_t seq) {
    int64_t lo, hi;
    te_share(team, (int64_t)h->n_tok * h->s->model->info.n_embd, 16, &lo, &hi);
    pi_post_words(h->device[device].answer, lo, hi - lo, seq, (const uint32_t *)(const void *)(x + lo));
}

/* This member's share of what the device posted, to x. */
static void await_on_cpu(pi_hybrid *h, te_team *team, int32_t device, float *x, uint32_t seq) {
    int64_t lo, hi;
    te_share(team, (int64_t)h->n_tok * h->s->model->info.n_embd, 16, &lo, &hi);
    (void)pi_await_words(&h->wait, h->device[device].post, lo, hi - lo, seq, (uint32_t *)(void *)(x + lo));
}

/* The list of neurons that any token's marks name, made by every member for itself, and this member's share of the
 * masks. */
static int32_t list_marked(pi_hybrid *h, te_team *team, int32_t l, int32_t *list) {
    pi_session *s = h->s;
    const pi_device_layer *w = &h->layer[l];
    const pi_device_state *d = &h->device[w->device];
    const int32_t n_parts = d->info.n_parts, per_part = pi_part_words(w->n_cold, n_parts), n_ff = s->model->info.n_ff;
    const int64_t words = (int64_t)per_part * n_parts;
    const uint32_t seq = number(h, l, PI_COLD);
    pi_layer_count *count = &s->count[(ptrdiff_t)l * s->options.n_threads + team->ith];
    int32_t n = 0, part_lo = n_parts * team->ith / team->nth, part_hi = n_parts * (team->ith + 1) / team->nth;
    for (int32_t p = 0; p < n_parts; p++) {
        const int32_t lo = pi_part_begin(w->n_cold, p, n_parts), hi = pi_part_begin(w->n_cold, p + 1, n_parts);
        for (int32_t k = 0; lo + k * 32 < hi; k++) {
            const int32_t width = hi - lo - k * 32 < 32 ? hi - lo - k * 32 : 32;
            uint32_t any = 0, bits[8];
            for (int32_t t = 0; t < h->n_tok; t++) {
                (void)pi_await_words(&h->wait, d->marks, t * words + (int64_t)p * per_part + k, 1, seq, &bits[t]);
                any |= bits[t];
            }
            const int32_t *id = w->cold + lo + k * 32;
            if (p >= part_lo && p < part_hi)
                for (int32_t t = 0; t < h->n_tok; t++)
                    for (int32_t i = 0; i < width; i++) {
                        s->mask[(ptrdiff_t)t * n_ff + id[i]] = bits[t] >> i & 1;
                        count->predicted += bits[t] >> i & 1;
                    }
            for (int32_t i = 0; i < width; i++) {
                list[n] = id[i];
                n += any >> i & 1;
            }
        }
    }
    return n;
}

static void cold_neurons(pi_hybrid *h, te_team *team, int32_t l) {
    pi_session *s = h->s;
    const pi_model *m = s->model;
    const pi_layer *w = &m->layer[l];
    const pi_device_layer *d = &h->layer[l];
    const size_t n_embd = (size_t)m->info.n_embd, n_ff = (size_t)m->info.n_ff;
    int32_t *list = h->list + n_ff * (size_t)team->ith;
    int64_t lo, hi;
    te_rows rows = {d->cold, 0, d->n_cold};
    if (h->masked) rows = (te_rows){list, 0, list_marked(h, team, l, list)};
    await_on_cpu(h, team, d->device, s->h, number(h, l, PI_COLD));
    te_share(team, h->n_tok * (int64_t)n_embd, 16, &lo, &hi);
    memset(h->y + lo, 0, sizeof *h->y * (size_t)(hi - lo));
    if (!w->down_t.w) {
        te_share(team, h->n_tok * (int64_t)n_ff, 64, &lo, &hi);
        memset(s->up + lo, 0, sizeof *s->up * (size_t)(hi - lo));
    }
    te_barrier(team);
    const te_ffn f = {.gate = w->gate,
                      .up = w->up,
                      .down = w->down_t,
                      .up_bias = w->up_b,
                      .act = (te_activation)m->info.activation,
                      .threshold = m->info.activation_threshold};
    const te_ffn_io io = {.x = s->h,
                          .ldx = n_embd,
                          .n_tok = h->n_tok,
                          .mask = h->masked ? s->mask : NULL,
                          .ld_mask = n_ff,
                          .y = h->y,
                          .ldy = n_embd,
                          .hidden = s->up,
                          .ld_hidden = n_ff};
    te_ffn_counts *c = &s->count[(ptrdiff_t)l * s->options.n_threads + team->ith].ffn;
    te_op_ffn(team, s->ws, &f, rows, h->skip, &io, c);
    te_barrier(team);
    if (!w->down_t.w) {
        const te_linear out = {.w = w->down, .y = h->y, .ldy = n_embd};
        te_op_linear(team, s->ws, &out, 1, s->up, n_ff, h->n_tok);
        te_barrier(team);
    }
    post_from_cpu(h, team, d->device, h->y, number(h, l, PI_COLD));
}

static void cpu_step(void *ctx, te_team *team) {
    pi_hybrid *h = ctx;
    pi_session *s = h->s;
    const int32_t n = s->model->info.n_layer;
    int32_t at = -1; /* where x is */
    pi_step_embed(s, team);
    for (int32_t l = 0; l <= n; l++) {
        const int32_t device = l < n ? h->layer[l].device : h->head_device;
        if (l == n && !h->n_logits) break;
        if (at >= 0 && device != at) {
            await_on_cpu(h, team, at, s->x, number(h, l - 1, PI_LEAVE));
            te_barrier(team);
        }
        if (device >= 0 && device != at) post_from_cpu(h, team, device, s->x, number(h, l, PI_ENTER));
        at = device;
        if (l == n) break;
        s->count[(ptrdiff_t)l * s->options.n_threads + team->ith] = (pi_layer_count){0};
        if (device < 0)
            pi_step_layer(s, team, l);
        else if (h->decode && h->layer[l].n_cold)
            cold_neurons(h, team, l);
    }
    if (at < 0) pi_step_head(s, team);
}

static void fill_inputs(pi_hybrid *h, pi_device_state *d) {
    const pi_session *s = h->s;
    const pi_device_input in = pi_hybrid_input(h, h->n_tok, d->shared_input);
    for (int32_t t = 0; t < h->n_tok; t++) {
        const pi_seq *seq = &s->kv.seq[s->chunk.seq[t]];
        in.pos[t] = s->chunk.pos[t];
        in.first[t] = t;
        for (int32_t k = t - 1; k >= 0; k--)
            if (s->chunk.seq[k] == s->chunk.seq[t]) {
                in.first[t] = in.first[k];
                break;
            }
        memcpy(in.table + (ptrdiff_t)t * h->ld_table, seq->block, sizeof *seq->block * (size_t)seq->n_block);
        if (s->model->rope.kind != PI_ROPE_NONE)
            pi_rope_angles(&s->model->rope, s->chunk.pos[t], s->model->rope.magnitude,
                           in.cs + (ptrdiff_t)t * s->model->rope.n_rot);
    }
}

/* Equal keys: equal programs. */
static uint64_t program_key(const pi_hybrid *h) {
    return (uint64_t)h->n_tok << 32 | (uint64_t)h->n_logits << 8 | (uint64_t)h->decode << 2 | (uint64_t)h->masked << 1 |
           (uint64_t)h->skip;
}

pi_status pi_hybrid_run(pi_hybrid *h) {
    pi_session *s = h->s;
    h->n_tok = s->chunk.n_tok;
    h->n_logits = s->chunk.n_logits;
    h->masked = s->options.sparsity == PI_SPARSITY_PREDICTED && !s->chunk.n_dense;
    h->skip = s->options.sparsity != PI_SPARSITY_DENSE && pi_is_relu(s->model->info.activation);
    h->decode = h->n_tok <= h->device[0].info.max_decode || !h->can_load;
    h->number += pi_numbers(s->model->info.n_layer);
    pi_device_part part[PI_MAX_DEVICES];
    pi_status st = h->kv_status;
    h->kv_status = PI_OK;
    if (st != PI_OK) return PI_FAIL(st, "a device's K and V could not be copied");
    int32_t launched = 0;
    for (; launched < h->n_devices && st == PI_OK; launched++) {
        pi_device_state *d = &h->device[launched];
        part[launched] = (pi_device_part){h, launched};
        fill_inputs(h, d);
        st = d->dev->ops->launch(d->dev, pi_hybrid_program, &part[launched], program_key(h));
    }
    if (st == PI_OK) te_pool_run(s->pool, cpu_step, h);
    for (int32_t i = 0; i < launched; i++) {
        const pi_status ended = h->device[i].dev->ops->finish(h->device[i].dev);
        if (st == PI_OK) st = ended;
    }
    if (st == PI_OK && h->head_device >= 0) {
        const pi_device_state *d = &h->device[h->head_device];
        const size_t n = (size_t)h->n_logits, n_vocab = (size_t)s->model->info.n_vocab,
                     n_embd = (size_t)s->model->info.n_embd,
                     row = n ? (size_t)s->chunk.logits_row[h->n_tok - (int32_t)n] : 0;
        memcpy(s->logits + row * n_vocab, d->logits, sizeof(float) * n * n_vocab);
        memcpy(s->hidden + row * n_embd, d->hidden, sizeof(float) * n * n_embd);
    }
    return st;
}
