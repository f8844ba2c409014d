/* kv.h - the KV pool of a session: blocks of 64 positions, shared by reference count, found through a block table per
 * sequence.
 *
 * Memory of layer l, for K and V alike:   [block][n_head_kv][64 positions][n_embd_head]   in the pool's type.
 * Invariants: a block is written only by the one sequence that holds it alone (refs == 1); positions of a sequence have
 * no gaps. */
#ifndef PI_KV_H
#define PI_KV_H

#include "states.h"

typedef struct pi_seq {
    int32_t length;  /* positions held */
    int32_t n_block; /* blocks held = ceil(length / 64) */
    int32_t *block;  /* [max blocks of a sequence] */
} pi_seq;

/* Layers whose K and V lie elsewhere: bytes of them, K or V, at an offset of the layer's pool. */
typedef struct pi_kv_device {
    void *ctx;
    bool (*has)(void *ctx, int32_t l);
    void (*read)(void *ctx, int32_t l, bool is_v, size_t at, void *to, size_t n_bytes);
    void (*write)(void *ctx, int32_t l, bool is_v, size_t at, const void *from, size_t n_bytes);
    void (*copy)(void *ctx, int32_t l, bool is_v, size_t to, size_t from, size_t n_bytes);
    pi_status (*status)(void *ctx); /* the first error of these since it was asked last */
} pi_kv_device;

typedef struct pi_kv {
    const pi_model *model;
    int32_t type_k, type_v; /* te_type */
    size_t row_k, row_v;    /* bytes of one head's K and V at one position */
    int32_t n_ctx, n_blocks, n_free, n_seq;
    int32_t *refs;       /* [n_blocks] */
    int32_t *free_;      /* stack of free blocks, n_free long */
    pi_seq *seq;         /* [n_seq] */
    int32_t *tables;     /* memory of all seq[].block */
    char **k, **v;       /* [n_layer]; NULL where they lie on a device, or the layer does not attend */
    pi_kv_device device; /* has NULL: none is */
    size_t layer_k_bytes, layer_v_bytes;
    pi_states states;
} pi_kv;

/* type_k, type_v: their blocks fill the model's heads. Errors: MEMORY. */
pi_status pi_kv_init(pi_kv *kv, const pi_model *m, int32_t n_ctx, int32_t n_pool, int32_t n_seq, int32_t type_k,
                     int32_t type_v, const pi_kv_device *device);
void pi_kv_free(pi_kv *kv);
uint64_t pi_kv_bytes(const pi_kv *kv); /* of layers in host memory, and of states */

/* Whether layer l has K and V. */
static inline bool pi_kv_has(const pi_kv *kv, int32_t l) { return pi_attention_of(&kv->model->layer[l]) != NULL; }

/* Where head h of position pos in seq is kept in layer l. */
static inline pi_status pi_kv_device_status(const pi_kv *kv) {
    return kv->device.has ? kv->device.status(kv->device.ctx) : PI_OK;
}
static inline bool pi_kv_on_device(const pi_kv *kv, int32_t l) {
    return kv->device.has && kv->device.has(kv->device.ctx, l);
}
static inline size_t pi_kv_at(const pi_kv *kv, const pi_seq *s, int32_t h, int32_t pos, size_t row) {
    const size_t b = (size_t)s->block[pos / PI_KV_BLOCK], nh = (size_t)kv->model->info.n_head_kv;
    return ((b * nh + (size_t)h) * PI_KV_BLOCK + (size_t)(pos % PI_KV_BLOCK)) * row;
}
static inline char *pi_kv_k(const pi_kv *kv, int32_t l, const pi_seq *s, int32_t h, int32_t pos) {
    return kv->k[l] + pi_kv_at(kv, s, h, pos, kv->row_k);
}
static inline char *pi_kv_v(const pi_kv *kv, int32_t l, const pi_seq *s, int32_t h, int32_t pos) {
    return kv->v[l] + pi_kv_at(kv, s, h, pos, kv->row_v);
}

/* Blocks that must be taken from the free stack so that positions [from, to) of seq can be written: new ones, and a
 * copy of each held one that is shared. */
int32_t pi_kv_blocks_needed(const pi_kv *kv, int32_t seq, int32_t from, int32_t to);
/* Makes positions [length, to) of seq writable; needs pi_kv_blocks_needed free blocks. Sets seq's length to `to`. */
void pi_kv_extend(pi_kv *kv, int32_t seq, int32_t to);
/* The blocks that seq holds of positions [from, to) become its own; needs pi_kv_blocks_needed(from, to) free blocks. */
void pi_kv_own(pi_kv *kv, int32_t seq, int32_t from, int32_t to);
/* The most positions, at most n, that seq can be cut to, or copied: n itself where no layer has a state. */
int32_t pi_kv_reachable(const pi_kv *kv, int32_t seq, int32_t n);
/* n_keep, n: reachable ones. */
void pi_kv_cut(pi_kv *kv, int32_t seq, int32_t n_keep);
void pi_kv_copy(pi_kv *kv, int32_t dst, int32_t src, int32_t n);
/* The work of a context shift, of layers in host memory, on a sequence that owns the blocks of positions [n_keep, length - n_drop); part of
 * n_parts (layers x heads) per call. */
void pi_kv_move_down(pi_kv *kv, int32_t seq, int32_t n_keep, int32_t n_drop, int32_t part, int32_t n_parts,
                     float *scratch);
/* The same for all layers on devices, by one thread. Errors: MEMORY (nothing was changed). */
pi_status pi_kv_move_on_device(pi_kv *kv, int32_t seq, int32_t n_keep, int32_t n_drop, float *scratch);

#endif
