/* kv.h - the KV pools of a session: blocks of 64 positions, shared by reference count, found through block tables of each
 * sequence. Layers that see all positions have one pool, those that see a window another, in which a sequence gives back the
 * blocks that lie behind it.
 *
 * Memory of layer l, for K and V alike:   [block][n_head_kv][64 positions][n_embd_head]   in the session's type.
 * Latent attention (block.h) has no memory of V: a row of V is the second part of K's.
 * Invariants: a block is written only by the one sequence that holds it alone (refs == 1); positions of a sequence have
 * no gaps; a sequence holds in both pools what its next token sees. */
#ifndef PI_KV_H
#define PI_KV_H

#include "states.h"

enum { PI_KV_FULL, PI_KV_WINDOW, PI_KV_POOLS };

/* The blocks of one pool that a sequence holds: block[i] has positions 64 i to 64 i + 63, first <= i < n. */
typedef struct pi_table {
    int32_t first; /* 0 in the full pool */
    int32_t n;     /* ceil(length / 64) */
    int32_t *block;
} pi_table;

typedef struct pi_seq {
    int32_t length; /* positions held */
    pi_table of[PI_KV_POOLS];
} pi_seq;

typedef struct pi_kv_pool {
    int32_t n_blocks, n_free;
    int32_t *refs;   /* [n_blocks] */
    int32_t *free_;  /* stack of free blocks, n_free long */
    int32_t *tables; /* memory of all sequences' tables */
} pi_kv_pool;

/* Where a layer's K and V lie: [block of its pool][head][64 positions][a row]. */
typedef struct pi_kv_layer {
    int32_t pool, n_head; /* of K and V */
    bool borrowed;        /* they are those of an earlier layer, which writes them, or there are none */
    size_t row_k, row_v;  /* bytes of one head at one position; row_v 0: V is in K's row, */
    size_t v_in_k;        /* from this byte on */
    size_t k_bytes, v_bytes;
    char *k, *v; /* NULL where they lie on a device */
} pi_kv_layer;

/* Layers whose K and V lie elsewhere: bytes of them, K or V, at an offset of the layer's pool. */
typedef struct pi_kv_device {
    void *ctx;
    bool (*has)(void *ctx, int32_t l);
    void (*read)(void *ctx, int32_t l, bool is_v, size_t at, void *to, size_t n_bytes);
    void (*write)(void *ctx, int32_t l, bool is_v, size_t at, const void *from, size_t n_bytes);
    void (*copy)(void *ctx, int32_t l, bool is_v, size_t to, size_t from, size_t n_bytes);
    pi_status (*status)(void *ctx); /* the first error of these since it was asked last, and of those of: */
    pi_states_device states;
} pi_kv_device;

/* What a session asks for. */
typedef struct pi_kv_shape {
    int32_t n_ctx, n_pool, n_seq, n_batch, n_guesses;
    int32_t type_k, type_v; /* their blocks fill the model's heads */
} pi_kv_shape;

typedef struct pi_kv {
    const pi_model *model;
    int32_t type_k, type_v; /* te_type */
    int32_t n_ctx, n_seq;
    int32_t n_pools; /* 2 where layers have a window that is shorter than n_ctx, else 1 */
    int32_t window;  /* of those layers */
    int32_t keep; /* positions that a sequence holds of them at least: with what a chunk adds, and may be cut again */
    pi_kv_pool pool[PI_KV_POOLS];
    pi_seq *seq;         /* [n_seq] */
    pi_kv_layer *layer;  /* [n_layer] */
    pi_kv_device device; /* has NULL: none is */
    pi_states states;    /* of recurrent layers */
} pi_kv;

/* Blocks that hold n positions. */
static inline int32_t pi_kv_blocks(int32_t n) { return (n + PI_KV_BLOCK - 1) / PI_KV_BLOCK; }

/* Errors: MEMORY. */
pi_status pi_kv_init(pi_kv *kv, const pi_model *m, const pi_kv_shape *shape, const pi_kv_device *device);
void pi_kv_free(pi_kv *kv);
uint64_t pi_kv_bytes(const pi_kv *kv); /* of layers in host memory, with their states */
/* Whether a layer is in the pool of windows. a NULL: it has no K and V. */
static inline bool pi_kv_has_window(int32_t n_ctx, const pi_attention *a) {
    return a && a->window && a->window < n_ctx;
}
/* Bytes of a head's K, or V, at one position, and of all of such a layer. */
size_t pi_kv_row_bytes(const pi_model *m, const pi_attention *a, bool is_v, int32_t type);
uint64_t pi_kv_layer_bytes(const pi_model *m, const pi_kv_shape *shape, const pi_attention *a, bool is_v, int32_t type);

static inline pi_status pi_kv_device_status(const pi_kv *kv) {
    return kv->device.has ? kv->device.status(kv->device.ctx) : PI_OK;
}
static inline bool pi_kv_on_device(const pi_kv *kv, int32_t l) {
    return kv->device.has && kv->device.has(kv->device.ctx, l);
}
/* Where head h of position pos is kept in a layer whose pool has table t. */
static inline size_t pi_kv_at(const pi_kv_layer *l, const pi_table *t, int32_t h, int32_t pos, size_t row) {
    const size_t b = (size_t)t->block[pos / PI_KV_BLOCK];
    return ((b * (size_t)l->n_head + (size_t)h) * PI_KV_BLOCK + (size_t)(pos % PI_KV_BLOCK)) * row;
}
static inline char *pi_kv_k(const pi_kv *kv, int32_t l, const pi_seq *s, int32_t h, int32_t pos) {
    const pi_kv_layer *at = &kv->layer[l];
    return at->k + pi_kv_at(at, &s->of[at->pool], h, pos, at->row_k);
}
static inline char *pi_kv_v(const pi_kv *kv, int32_t l, const pi_seq *s, int32_t h, int32_t pos) {
    const pi_kv_layer *at = &kv->layer[l];
    if (!at->row_v) return pi_kv_k(kv, l, s, h, pos) + at->v_in_k;
    return at->v + pi_kv_at(at, &s->of[at->pool], h, pos, at->row_v);
}

/* The most positions, at most n, that seq can be cut to, or copied: n itself, but 0 where a layer with a window does not
 * hold what the token behind them sees, and where layers have states the next checkpoint. */
int32_t pi_kv_reachable(const pi_kv *kv, int32_t seq, int32_t n);
/* The first position that layers with a window hold of seq; 0 where they hold all. */
static inline int32_t pi_kv_held_from(const pi_kv *kv, int32_t seq) {
    return kv->n_pools > 1 ? kv->seq[seq].of[PI_KV_WINDOW].first * PI_KV_BLOCK : 0;
}

/* Blocks that must be taken from a pool's free stack so that positions [from, to) of seq can be written: new ones, and a
 * copy of each held one that is shared. */
int32_t pi_kv_blocks_needed(const pi_kv *kv, int32_t pool, int32_t seq, int32_t from, int32_t to);
/* Makes positions [length, to) of seq writable, at most a chunk's; needs pi_kv_blocks_needed free blocks of the full pool.
 * The other one then has them, too: its blocks are as many, and shared where those of the full pool are, or enough for all
 * sequences without sharing. Sets seq's length to `to`, and gives back what lies behind windows. */
void pi_kv_extend(pi_kv *kv, int32_t seq, int32_t to);
/* seq gives back what it holds, and gets blocks for n positions, of windows from position `from` on (a block's first), where
 * there is room for that. */
bool pi_kv_has_room(const pi_kv *kv, int32_t seq, int32_t n, int32_t from);
void pi_kv_renew(pi_kv *kv, int32_t seq, int32_t n, int32_t from);
/* The first position of windows that a sequence of n positions keeps, a block's first. */
static inline int32_t pi_kv_kept_from(const pi_kv *kv, int32_t n) {
    return kv->n_pools > 1 && n > kv->keep ? (n - kv->keep) / PI_KV_BLOCK * PI_KV_BLOCK : 0;
}
/* n_keep, n: reachable ones. */
void pi_kv_cut(pi_kv *kv, int32_t seq, int32_t n_keep);
void pi_kv_copy(pi_kv *kv, int32_t dst, int32_t src, int32_t n);

/* The blocks that seq holds of positions [from, to) become its own; needs pi_kv_blocks_needed(from, to) free blocks. */
void pi_kv_own(pi_kv *kv, int32_t pool, int32_t seq, int32_t from, int32_t to);
void pi_kv_give_back(pi_kv *kv, int32_t pool, int32_t block);

/* ---- context shift ---- */

/* Positions [from, length) of a pool's layers become what is kept `gap` further on, turned back by n_drop. */
typedef struct pi_kv_shift {
    int32_t seq, length, n_drop;
    int32_t from[PI_KV_POOLS], gap[PI_KV_POOLS];
} pi_kv_shift;
/* Makes seq ready to be shifted: its first n_keep positions stay, the n_drop behind them go. Errors, on which nothing has
 * changed: CONTEXT (shared blocks must be copied, and there is no room), UNSUPPORTED (a window reaches into what stays, and
 * it is no longer held). */
pi_status pi_kv_shift_begin(pi_kv *kv, int32_t seq, int32_t n_keep, int32_t n_drop, pi_kv_shift *out);
/* The work, of layers in host memory; part of n_parts (layers x heads) per call. scratch: 2 n_embd_head floats. */
void pi_kv_shift_part(pi_kv *kv, const pi_kv_shift *shift, int32_t part, int32_t n_parts, float *scratch);
/* The same for all layers on devices, by one thread. Errors: MEMORY (nothing was moved). */
pi_status pi_kv_shift_devices(pi_kv *kv, const pi_kv_shift *shift, float *scratch);

#endif
