/* program.c - the device's side of a hybrid step: the program of operations that a pi_device runs, block after block; the
 * CPU's side, and how the two meet, is in step.c. */
#include "part.h"
#include "program.h"

#include <string.h>

/* ---- which programs are kept ---- */

/* Whether each of many tokens is the next of another sequence, and devices load nothing for them. Recording was not tried
 * on a GPU for latent attention of so many. */
static bool decodes_many(const pi_hybrid *h) {
    return h->apart && h->n_tok <= h->max_mixed && h->n_logits == h->n_tok && !h->s->model->latent_rank &&
           pi_hybrid_loads_nothing(h);
}

/* Whether a program for prompts and decoding is one of the last PI_MIXED that were kept, or its key one of the last two
 * (steps of more sequences than a program takes have two in turn): the one that ran longest ago gives way. */
static bool keeps(pi_hybrid *h, uint64_t key) {
    int32_t at = 0;
    while (at < PI_MIXED - 1 && h->mixed[at] != key) at++;
    const bool is_last = h->last_mixed[0] == key, is_kept = h->mixed[at] == key || is_last || h->last_mixed[1] == key;
    if (!is_last) h->last_mixed[1] = h->last_mixed[0];
    h->last_mixed[0] = key;
    if (!is_kept) return false;
    memmove(h->mixed + 1, h->mixed, sizeof *h->mixed * (size_t)at);
    h->mixed[0] = key;
    return true;
}

/* Programs of prompts are not kept, for there are too many lengths; of those that also decode some are. Beside a single
 * sequence's next token that is a prompt's program, as is the end of a prompt by itself. */
uint64_t pi_program_key(pi_hybrid *h) {
    const bool beside_one = h->grouped == h->n_tok && h->n_logits == 1 && !h->decode && pi_hybrid_is_resident(h),
               mixed = beside_one || (h->grouped && h->grouped < h->n_tok);
    const uint64_t key = (uint64_t)h->logits_at << 48 | (uint64_t)h->n_tok << 32 | (uint64_t)h->n_logits << 8 |
                         (uint64_t)h->deep << 5 | (uint64_t)h->apart << 4 | (uint64_t)(h->grouped > 0) << 3 |
                         (uint64_t)h->decode << 2 | (uint64_t)h->masked << 1 | (uint64_t)h->skip;
    const bool may_decode = h->decode || decodes_many(h);
    if (!mixed && !h->logits_at && (h->decode || h->n_tok <= PI_MANY)) return may_decode ? key : 0;
    /* Of more next tokens a plan counts no program of each number: they are among the last ones, too. */
    if (!mixed) return may_decode && keeps(h, key | PI_KEY_MIXED) ? key | PI_KEY_MIXED : 0;
    const bool may = h->n_tok <= h->max_mixed && !h->s->model->latent_rank && pi_hybrid_loads_nothing(h);
    return may && keeps(h, key | PI_KEY_MIXED) ? key | PI_KEY_MIXED : 0;
}

/* ---- a program ---- */

te_linear_args pi_program_from_x(const pi_program *p) {
    const int32_t n = p->h->s->model->info.n_embd;
    return (te_linear_args){.x = p->d->x, .ldx = (size_t)n, .n_tok = p->n_tok, .cols = n};
}

te_linear_args pi_program_from_all(const pi_program *p) {
    te_linear_args a = pi_program_from_x(p);
    a.x -= a.ldx * (size_t)p->n_before;
    a.n_tok += p->n_before;
    return a;
}

te_merge_args pi_program_to_x(const pi_program *p, te_norm norm) {
    const int32_t n = p->h->s->model->info.n_embd;
    return (te_merge_args){.n_tok = p->n_tok,
                           .cols = n,
                           .add = p->d->x,
                           .ld_add = (size_t)n,
                           .y = p->d->x,
                           .ldy = (size_t)n,
                           .norm = norm,
                           .normed = p->d->y};
}

/* Behind layer l: to the CPU, or to another device. */
static void publish_x(const pi_program *p, int32_t l) {
    te_linear_args a = pi_program_from_x(p);
    a.side.publish = p->d->published + (size_t)a.cols * (size_t)p->n_before;
    a.side.ticket = pi_program_ticket(p, l, PI_LEAVE);
    p->ops->linear(p->dev, &a);
}

/* In front of layer l, or of the head: from the CPU, or (passes) from the device that had the layer before. */
static void take_x(const pi_program *p, int32_t l, bool passes) {
    const pi_hybrid *h = p->h;
    const int32_t n = h->s->model->info.n_embd;
    const uint64_t *from = passes ? h->device[h->layer[l - 1].device].published : p->d->answer;
    const te_merge_args a = {.n_tok = p->n_tok,
                             .cols = n,
                             .y = p->d->x,
                             .ldy = (size_t)n,
                             .words = from + (size_t)n * (size_t)p->n_before,
                             .ticket =
                                 passes ? pi_program_ticket(p, l - 1, PI_LEAVE) : pi_program_ticket(p, l, PI_ENTER)};
    p->ops->merge(p->dev, &a);
}

void pi_program_add(const pi_program *p, const float *x, const te_mat *w, int32_t n_tok, const te_product *to) {
    const te_linear_args a = {.x = x,
                              .ldx = (size_t)w->cols,
                              .n_tok = n_tok,
                              .cols = w->cols,
                              .product = {{.w = *w, .y = to->y, .ldy = to->ldy, .add = to->y, .ld_add = to->ldy}},
                              .n_products = 1};
    if (w->w) p->ops->linear(p->dev, &a);
}

void pi_program_adapt(const pi_program_block *b, int32_t which, const te_linear_args *op) {
    const pi_program *p = b->p;
    te_linear_args in = *op;
    in.n_products = 0;
    for (int32_t i = 0; i < op->n_products; i++) {
        const te_mat a = b->w->adapter_a[which + i];
        if (a.w) in.product[in.n_products++] = (te_product){.w = a, .y = p->d->adapt[i], .ldy = (size_t)a.n_rows};
    }
    if (!in.n_products) return;
    p->ops->linear(p->dev, &in);
    for (int32_t i = 0; i < op->n_products; i++)
        pi_program_add(p, p->d->adapt[i], &b->w->adapter_b[which + i], op->n_tok, &op->product[i]);
}

void pi_program_output(const pi_program_block *b, const float *from, const te_mat *w, const float *bias) {
    const pi_program *p = b->p;
    const size_t n = (size_t)p->h->s->model->info.n_embd;
    const bool normed = b->post_norm.kind != TE_NO_NORM;
    te_linear_args out = {.x = from, .ldx = (size_t)w->cols, .n_tok = p->n_tok, .cols = w->cols, .n_products = 1};
    out.product[0] = (te_product){
        .w = *w, .bias = bias, .add = normed ? NULL : p->d->x, .ld_add = n, .y = normed ? p->d->y : p->d->x, .ldy = n};
    p->ops->linear(p->dev, &out);
    pi_program_adapt(b, PI_ADAPT_O, &out);
    if (!normed) return;
    te_merge_args sum = pi_program_to_x(p, b->post_norm);
    sum.partial = p->d->y;
    sum.n_parts = 1;
    p->ops->merge(p->dev, &sum);
}

/* The same program for the tokens whose output of layer l is wanted. `state` is to hold what it says of the device. */
static pi_program wanted(const pi_program *p, int32_t l, pi_device_state *state) {
    pi_program out = *p;
    out.n_before = pi_hybrid_unwanted(p->h, l);
    if (!out.n_before) return out;
    *state = *p->d;
    state->x += (size_t)p->h->s->model->info.n_embd * (size_t)out.n_before;
    out.d = state;
    out.n_tok -= out.n_before;
    return out;
}

/* Whether nobody wants what the block would give, and it keeps nothing. */
static bool is_idle(const pi_program *p, const pi_block_on_device *kind) {
    return !p->n_tok && kind->tokens == PI_WANTED_TOKENS;
}

static void layer(const pi_program *p, int32_t l) {
    const pi_layer *layer = &p->h->s->model->layer[l];
    const pi_device_layer *w = &p->h->layer[l];
    pi_program_block block[PI_MAX_BLOCKS];
    te_linear_args beside = {0};
    const int32_t end = layer->n_blocks - layer->n_tail;
    for (int32_t i = layer->n_host; i < end; i++) {
        block[i] = (pi_program_block){p, layer, &layer->block[i], w, l, w->norm[i], w->post_norm[i], &beside};
        const pi_block_on_device *kind = layer->block[i].kind->device;
        if (is_idle(p, kind)) continue;
        if (kind->begin) kind->begin(&block[i]);
        if (layer->parallel && kind->prepare) kind->prepare(&block[i]);
    }
    for (int32_t i = layer->n_host; i < end; i++) {
        const pi_block_on_device *kind = layer->block[i].kind->device;
        if (is_idle(p, kind)) continue;
        if (!layer->parallel && kind->prepare) kind->prepare(&block[i]);
        kind->run(&block[i]);
    }
}

static void adapt_head(const pi_program *p, const te_linear_args *op) {
    const te_mat a = p->d->output_a;
    if (!a.w) return;
    te_linear_args in = *op;
    in.side = (te_side){0};
    in.product[0] = (te_product){.w = a, .y = p->d->adapt[0], .ldy = (size_t)a.n_rows};
    p->ops->linear(p->dev, &in);
    pi_program_add(p, p->d->adapt[0], &p->d->output_b, op->n_tok, &op->product[0]);
}

/* Rows begin to end - 1 of it, all or a single token's. */
static void head(const pi_program *p, int32_t begin, int32_t end) {
    const pi_hybrid *h = p->h;
    const pi_model_info *i = &h->s->model->info;
    const int32_t first = p->n_tok - h->n_logits;
    if (!h->n_logits) return;
    te_mat w = p->d->output;
    w.w = (const char *)w.w + w.stride * (size_t)begin;
    w.n_rows = end - begin;
    te_linear_args a = pi_program_from_x(p);
    a.x += (size_t)first * (size_t)i->n_embd;
    a.n_tok = h->n_logits;
    a.norm = p->d->output_norm;
    a.n_products = 1;
    const pi_device_state *to = &h->device[h->head_device];
    const size_t row = (size_t)h->logits_at;
    float *logits = to->logits + row * (size_t)i->n_vocab + begin, *y = pi_hybrid_rows(h, p->d);
    const bool leaves = y != to->logits;
    if (!leaves) y = logits;
    a.product[0] = (te_product){
        .w = w, .bias = p->d->output_bias ? p->d->output_bias + begin : NULL, .y = y, .ldy = (size_t)w.n_rows};
    a.side.norm = p->d->output_norm;
    a.side.keep = p->d->hidden + row * (size_t)i->n_embd;
    a.side_type = -1;
    p->ops->linear(p->dev, &a);
    adapt_head(p, &a);
    if (leaves && h->n_logits == 1) /* perhaps some of its rows */
        p->ops->end(p->dev, logits, y, sizeof *y * (size_t)w.n_rows);
    else if (leaves)
        p->ops->logits(p->dev, &(pi_device_logits){y, h->n_logits, w.n_rows, p->in.n_largest, logits,
                                                   to->largest + row * PI_LARGEST, to->n_found + row});
}

void pi_hybrid_program(void *ctx, pi_device *dev) {
    const pi_device_part *part = ctx;
    const pi_hybrid *h = part->h;
    const pi_device_state *d = &h->device[part->device];
    const pi_model *m = h->s->model;
    const pi_program p = {
        .h = h, .d = d, .dev = dev, .ops = dev->ops, .in = pi_hybrid_input(h, h->n_tok, d->input), .n_tok = h->n_tok};
    const int32_t n = m->info.n_layer;
    const size_t skipped =
        h->layer[0].device == part->device && !m->layer[0].n_host ? 0 : (size_t)((char *)p.in.pos - (char *)d->input);
    /* A part's inputs come with its first layers; it exchanges nothing, so it has no tickets. */
    const bool is_part = h->part && h == &h->part->run, goes_on = h->first_layer > 0;
    p.ops->begin(dev, (char *)d->input + skipped, (const char *)d->shared_input + skipped,
                 goes_on ? 0 : pi_hybrid_input_bytes(h, h->n_tok) - skipped, d->ticket, is_part ? 0 : pi_numbers(n));
    if (is_part) p.ops->stamp(dev, d->part_stamps);
    const bool shares = pi_hybrid_shares_head(h);
    for (int32_t l = h->first_layer; l < h->end_layer; l++) {
        if (h->layer[l].device != part->device) continue;
        if (m->layer[l].n_host || (l > 0 && (h->layer[l - 1].device != part->device || m->layer[l - 1].n_tail)))
            take_x(&p, l, pi_hybrid_passes(h, l));
        pi_device_state state;
        const pi_program here = wanted(&p, l, &state);
        layer(&here, l);
        const bool returns = (l + 1 < n && h->layer[l + 1].device == part->device && m->layer[l + 1].n_host) ||
                             (m->layer[l].n_tail && here.n_tok);
        const int32_t next = pi_hybrid_device_of(h, l + 1);
        const bool is_last = l + 1 == n, kept = is_last && h->s->options.keep_hidden;
        const bool leaves = is_last ? h->n_logits && (next != part->device || shares) : next != part->device;
        if (returns || kept || leaves) publish_x(&here, l);
    }
    if (is_part) {
        p.ops->stamp(dev, d->part_stamps + 1);
        return; /* nobody asks for its counts */
    }
    p.ops->end(dev, d->counts, p.in.counts, pi_hybrid_count_bytes(h));
    if (shares && h->helper == part->device) {
        take_x(&p, n, true);
        head(&p, 0, h->helper_rows);
    }
    if (h->head_device != part->device) return;
    pi_device_state state;
    const pi_program here = wanted(&p, n, &state);
    if ((h->layer[n - 1].device != part->device || m->layer[n - 1].n_tail) && h->n_logits)
        take_x(&here, n, pi_hybrid_passes(h, n));
    head(&here, shares ? h->helper_rows : 0, m->info.n_vocab);
}
