/* part.c - a part of prompts that devices compute a few layers at a time, in front of others' steps: so these take longer by
 * as much as is wanted, whatever the part takes in all.
 *
 * Between two of its turns the part is nothing but its residual stream and its inputs, which stand behind those of a step of
 * few tokens. Everything else that layers work with is theirs for as long as they run, and is shared with the steps. */
#include "part.h"

#include <stdlib.h>

/* Tokens of the steps beside a part, whose inputs stand in front of it: as many as recorded programs of next tokens have. */
enum { BESIDE = PI_MANY, LINE = 256 };

/* Where the part's inputs begin in those of a device. */
static size_t part_at(const pi_hybrid *h) { return (pi_hybrid_input_bytes(h, BESIDE) + LINE - 1) / LINE * LINE; }

int32_t pi_hybrid_most_part(const pi_hybrid *h) {
    const pi_session *s = h->s;
    const pi_model_info *i = &s->model->info;
    /* Experts that are used, and neurons that fire, are counted by steps; and so are moments of a timeline. */
    const bool can = h->is_whole && h->n_devices == 1 && pi_hybrid_embeds_first(h) && !i->n_expert && !s->fired &&
                     !h->moment && !s->kv.states.floats && s->options.n_batch > BESIDE;
    if (!can) return 0;
    pi_hybrid run = *h;
    run.decode = false;
    int32_t n = s->options.n_batch - BESIDE;
    while (n > 0 && part_at(h) + pi_hybrid_input_bytes(&run, n) > h->device[0].input_bytes) n--;
    return n > h->max_decode ? n : 0;
}

pi_status pi_hybrid_part_begin(pi_hybrid *h) {
    PI_TRY(pi_hybrid_check_process(h));
    if (!h->part) h->part = calloc(1, sizeof *h->part);
    if (!h->part) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for a prompt's part");
    PI_TRY(pi_hybrid_kv_status(h));
    pi_hybrid_part *p = h->part;
    const size_t at = part_at(h);
    p->run = *h;
    p->device = (pi_device_part){&p->run, 0};
    pi_device_state *d = &p->run.device[0];
    d->input = (char *)d->input + at;
    d->shared_input = (char *)d->shared_input + at;
    d->x = d->input;
    pi_hybrid_set_run(&p->run);
    pi_hybrid_fill_inputs(&p->run);
    p->run.n_runs = h->s->chunk.n_runs;
    p->n_done = p->n_next = 0;
    p->is_under_way = true;
    p->is_lost = false;
    return PI_OK;
}

void pi_hybrid_part_forget(pi_hybrid *h) {
    if (h->part) h->part->is_under_way = h->part->is_lost = false;
}

int64_t pi_hybrid_part_ns(const pi_hybrid *h) { return h->part ? h->part->ns : 0; }

int32_t pi_hybrid_part_left(const pi_hybrid *h) {
    const pi_hybrid_part *p = h->part;
    if (!p || !p->is_under_way) return 0;
    return p->is_lost ? -1 : h->s->model->info.n_layer - p->n_done;
}

void pi_hybrid_part_ask(pi_hybrid *h, int32_t n_layers) {
    const int32_t left = pi_hybrid_part_left(h);
    if (left <= 0) return;
    h->part->n_next = n_layers < left ? n_layers : left;
    h->part->ns = 0;
}

pi_status pi_hybrid_part_launch(pi_hybrid *h) {
    pi_hybrid_part *p = h->part;
    if (!p || !p->n_next) return PI_OK;
    pi_device *dev = h->device[0].dev;
    p->run.first_layer = p->n_done;
    p->run.end_layer = p->n_done + p->n_next;
    const pi_status st = dev->ops->launch(dev, pi_hybrid_program, &p->device, 0);
    return st == PI_OK ? PI_OK : PI_FAIL(st, "%s", dev->ops->error());
}

void pi_hybrid_part_went(pi_hybrid *h, pi_status st) {
    pi_hybrid_part *p = h->part;
    if (!p || !p->n_next) return;
    const uint64_t *stamps = h->device[0].part_stamps;
    p->n_done += p->n_next;
    p->n_next = 0;
    p->is_lost = st != PI_OK;
    if (st == PI_OK) p->ns = (int64_t)(stamps[1] - stamps[0]);
}

pi_status pi_hybrid_part_rest(pi_hybrid *h) {
    pi_device *dev = h->device[0].dev;
    PI_TRY(pi_hybrid_check_process(h));
    PI_TRY(pi_hybrid_bring_rows(h)); /* they are in the layers' work space */
    pi_hybrid_part_ask(h, h->s->model->info.n_layer);
    pi_status st = pi_hybrid_part_launch(h);
    const pi_status finished = dev->ops->finish(dev);
    if (st == PI_OK && finished != PI_OK) st = PI_FAIL(finished, "%s", dev->ops->error());
    pi_hybrid_part_went(h, st);
    return st;
}
