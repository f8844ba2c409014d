/* input.c - what a step's programs read that is not the same in each step: where it lies, and what it is. */
#include <string.h>

#include "../blocks/forward.h"
#include "hybrid.h"

/* ---- where it lies ---- */

static size_t to_lines(size_t n) { return (n + 63) / 64 * 64; }

size_t pi_hybrid_count_bytes(const pi_hybrid *h) {
    const pi_model_info *i = &h->s->model->info;
    return sizeof(uint32_t) * (size_t)i->n_layer * (3 + (size_t)i->n_expert);
}

static size_t input_bytes(const pi_hybrid *h, size_t n_tok, pi_device_input *at, char *base) {
    const pi_model_info *i = &h->s->model->info;
    const size_t n_layer = (size_t)i->n_layer, n_expert = (size_t)i->n_expert;
    const size_t x = to_lines(sizeof(float) * n_tok * (size_t)i->n_embd), each = to_lines(sizeof(int32_t) * n_tok),
                 table = x + 2 * each,
                 cs = table + to_lines(sizeof(int32_t) * (size_t)h->s->kv.n_pools * n_tok * (size_t)h->ld_table),
                 n_largest = to_lines(cs + sizeof(float) * n_tok * pi_rope_floats(h->s->model, h->s->model->n_ropes)),
                 order = n_largest + to_lines(sizeof(int32_t)),
                 run = h->s->model->state_floats ? to_lines(sizeof(int32_t) * (n_tok + 1)) : 0, place = order + 4 * run,
                 counts = to_lines(place + sizeof(int32_t) * n_layer * n_expert);
    if (at)
        *at = (pi_device_input){.x = (float *)(void *)base,
                                .pos = (int32_t *)(void *)(base + x),
                                .first = (int32_t *)(void *)(base + x + each),
                                .table = (int32_t *)(void *)(base + table),
                                .cs = (float *)(void *)(base + cs),
                                .n_largest = (int32_t *)(void *)(base + n_largest),
                                .order = (int32_t *)(void *)(base + order),
                                .run = (int32_t *)(void *)(base + order + run),
                                .state = (int32_t *)(void *)(base + order + 2 * run),
                                .keep = (int32_t *)(void *)(base + order + 3 * run),
                                .place = (int32_t *)(void *)(base + place),
                                .counts = (uint32_t *)(void *)(base + counts),
                                .uses = (uint32_t *)(void *)(base + counts) + 3 * n_layer,
                                .cold = (int32_t *)(void *)(base + counts + pi_hybrid_count_bytes(h))};
    return counts + pi_hybrid_count_bytes(h) + (h->decode ? 0 : sizeof(int32_t) * n_layer * n_expert);
}
pi_device_input pi_hybrid_input(const pi_hybrid *h, int32_t n_tok, void *base) {
    pi_device_input in;
    (void)input_bytes(h, (size_t)n_tok, &in, base);
    return in;
}
size_t pi_hybrid_input_bytes(const pi_hybrid *h, int32_t n_tok) { return input_bytes(h, (size_t)n_tok, NULL, NULL); }

/* ---- what it is ---- */

bool pi_hybrid_embeds_first(const pi_hybrid *h) { return h->layer[0].device >= 0 && !h->s->model->layer[0].n_host; }

static void embed_step(void *ctx, te_team *team) {
    const pi_hybrid *h = ctx;
    pi_session *s = h->s;
    pi_step_embed(s, team);
    te_barrier(team);
    int64_t lo, hi;
    te_share(team, (int64_t)h->n_tok * s->model->info.n_embd, 16, &lo, &hi);
    float *to = pi_hybrid_input(h, h->n_tok, h->device[h->layer[0].device].shared_input).x;
    memcpy(to + lo, s->x + lo, sizeof *to * (size_t)(hi - lo));
}

/* Which tokens are whose, and where their states are. */
static void fill_runs(const pi_hybrid *h, const pi_device_input *in) {
    const pi_chunk *c = &h->s->chunk;
    for (int32_t i = 0; i < c->n_tok; i++) {
        const int32_t t = c->order[i];
        in->order[i] = t;
        in->state[t] = c->seq[t];
        in->keep[t] = c->kept[i];
    }
    for (int32_t r = 0; r <= c->n_tok; r++) in->run[r] = r < c->n_runs ? c->run[r] : c->n_tok;
}

/* Whether n tokens of prompts are faster by attention that reads K and V once for them, but is three kernels: two at 3,000 or
 * seven at 900 (an H200, 32 heads). */
static bool is_deep(const int32_t *pos, int32_t n) {
    enum { DEEP = 6144 };
    int64_t sum = 0;
    for (int32_t t = 0; t < n; t++) sum += pos[t];
    return n > 1 && sum >= DEEP;
}

static void fill_inputs(pi_hybrid *h, int32_t device) {
    const pi_session *s = h->s;
    const pi_device_input in = pi_hybrid_input(h, h->n_tok, h->device[device].shared_input);
    const bool has_angles = pi_hybrid_embeds_first(h); /* made with the embedding, which is there */
    memset(in.counts, 0, pi_hybrid_count_bytes(h));
    *in.n_largest = h->n_largest;
    for (int32_t l = 0; h->place && !h->decode && l < s->model->info.n_layer; l++)
        if (h->layer[l].cold)
            memcpy(in.cold + (ptrdiff_t)l * s->model->info.n_expert, h->layer[l].cold,
                   sizeof *in.cold * (size_t)h->layer[l].n_cold);
    if (h->place)
        memcpy(in.place, h->place, sizeof *in.place * (size_t)s->model->info.n_layer * (size_t)s->model->info.n_expert);
    const int32_t n_front = h->n_tok - h->n_logits;
    bool is_grouped = true, is_mixed = n_front > 0 && h->n_logits > 1;
    h->apart = true;
    for (int32_t t = 0; t < h->n_tok; t++) {
        const pi_seq *seq = &s->kv.seq[s->chunk.seq[t]];
        in.pos[t] = s->chunk.pos[t];
        in.first[t] = t;
        for (int32_t k = t - 1; k >= 0; k--)
            if (s->chunk.seq[k] == s->chunk.seq[t]) {
                in.first[t] = in.first[k];
                h->apart = false;
                is_mixed &= t < n_front || k < n_front;
                break;
            }
        const bool is_next = in.first[t] == t || in.first[t - 1] == in.first[t];
        is_grouped &= is_next;
        is_mixed &= is_next || t >= n_front;
        for (int32_t p = 0; in.first[t] == t && p < s->kv.n_pools; p++) {
            const pi_table *held = &seq->of[p];
            memcpy(in.table + ((ptrdiff_t)p * h->n_tok + t) * h->ld_table + held->first, held->block + held->first,
                   sizeof *held->block * (size_t)(held->n - held->first));
        }
        if (!has_angles) pi_step_angles(s, t, h->n_tok, in.cs);
    }
    h->grouped = is_mixed ? n_front : is_grouped ? h->n_tok : 0;
    /* Plans count no room for that where a prompt's parts are no longer. */
    h->deep = h->decode && h->grouped && s->options.n_batch > h->max_decode && is_deep(in.pos, n_front);
    if (s->model->state_floats) fill_runs(h, &in);
    for (int32_t i = 0; has_angles && i < s->model->n_ropes; i++) {
        const size_t at = pi_rope_floats(s->model, i), n_rot = (size_t)s->model->rope[i].n_rot;
        memcpy(in.cs + at * (size_t)h->n_tok, s->cs + at * (size_t)s->options.n_batch,
               sizeof *in.cs * (size_t)h->n_tok * n_rot);
    }
}

void pi_hybrid_fill_inputs(pi_hybrid *h) {
    if (pi_hybrid_embeds_first(h)) te_pool_run(h->n_tok > h->max_decode ? h->few : h->caller, embed_step, h);
    for (int32_t i = 0; i < h->n_devices; i++) fill_inputs(h, i);
}
