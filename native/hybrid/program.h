/* program.h - what a device does with each kind of block: how its weights come there, and its part of a step's program. */
#ifndef PI_PROGRAM_H
#define PI_PROGRAM_H

#include "hybrid.h"
#include "upload.h"

/* A program of operations while it is put together. Of the last layer of a prompt, d->x begins with the first token whose
 * output is wanted: n_tok are from there on, n_before stand in front of it. */
typedef struct pi_program {
    const pi_hybrid *h;
    const pi_device_state *d;
    pi_device *dev;
    const pi_device_ops *ops;
    pi_device_input in;
    int32_t n_tok, n_before;
} pi_program;

/* The key of the step's program: equal keys, equal programs; 0: it is not kept. */
uint64_t pi_program_key(pi_hybrid *h);

/* One block's part of it. */
typedef struct pi_program_block {
    const pi_program *p;
    const pi_layer *layer;
    const pi_block *block;
    const pi_device_layer *w;
    int32_t l;
    te_norm norm, post_norm; /* D */
    te_linear_args *beside; /* of the layer: what its attention is to compute at the same time; n_products 0: nothing */
} pi_program_block;

/* Which tokens of a prompt's last layer a kind of block computes: all of them; those that are wanted; or those, having
 * kept something of the others for later tokens, so that it runs even where none is wanted. */
typedef enum pi_block_tokens { PI_ALL_TOKENS, PI_WANTED_TOKENS, PI_KEEPS_TOKENS } pi_block_tokens;

/* What a kind of block does on a device. */
struct pi_block_on_device {
    /* Brings the block's weights there; norms before and after it are there already. */
    void (*send)(pi_upload *u, const pi_layer *layer, const pi_block *b, pi_device_layer *d);
    /* Reads the layer's input in x, before any of its blocks; or NULL. */
    void (*begin)(const pi_program_block *b);
    /* What must be known before x changes; or NULL. The blocks of a layer that stand side by side are all prepared before
     * any runs. */
    void (*prepare)(const pi_program_block *b);
    /* Adds what the block gives to x. */
    void (*run)(const pi_program_block *b);
    pi_block_tokens tokens;
};
typedef struct pi_block_on_device pi_block_on_device;

/* What a layer of a mixture tells the CPU: of its routes, and their input. */
static inline uint64_t *pi_routes_of(const pi_hybrid *h, const pi_device_state *d, int32_t l) {
    return d->routes + (ptrdiff_t)l * d->info.max_decode * 2 * h->s->model->info.n_expert_used;
}
static inline uint64_t *pi_guess_of(const pi_hybrid *h, const pi_device_state *d, int32_t l) {
    return d->guess + (ptrdiff_t)l * d->info.max_decode * 2 * h->s->model->info.n_expert_used;
}
static inline uint64_t *pi_asked_of(const pi_hybrid *h, const pi_device_state *d, int32_t l) {
    return d->asked + (ptrdiff_t)l * d->info.max_decode * h->s->model->info.n_embd;
}

static inline te_ticket pi_program_ticket(const pi_program *p, int32_t l, int32_t which) {
    return (te_ticket){p->d->ticket, pi_number(l, which)};
}
static inline void pi_program_stamp(const pi_program *p, int32_t l, pi_moment which) {
    if (p->d->stamps) p->ops->stamp(p->dev, p->d->stamps + (ptrdiff_t)l * PI_MOMENT_INPUT + which);
}

/* program.c: a product of x, or nothing yet; the same with the tokens that stand before p's. */
te_linear_args pi_program_from_x(const pi_program *p);
te_linear_args pi_program_from_all(const pi_program *p);
/* What a block gives, on its way to x: a norm behind the block is of all of it. */
te_merge_args pi_program_to_x(const pi_program *p, te_norm norm);
/* y += w x, y being the result of another product; w->w NULL: nothing. */
void pi_program_add(const pi_program *p, const float *x, const te_mat *w, int32_t n_tok, const te_product *to);
/* What a block gives is w . from (+ bias), and goes to x. */
void pi_program_output(const pi_program_block *b, const float *from, const te_mat *w, const float *bias);
/* The layer's adapters' parts of the products op, of matrices from `which` on, are added to what the products gave. */
void pi_program_adapt(const pi_program_block *b, int32_t which, const te_linear_args *op);

#endif
