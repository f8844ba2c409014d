/* states.h - what layers with a state remember of each sequence, and copies of that at earlier positions (checkpoints),
 * to which alone a sequence can be taken back: a state cannot forget its last tokens.
 *
 * Memory: n_seq + n_checkpoints + n_guesses places, the first n_seq of them the sequences' own. A place has what its layers
 * remember, one behind the other, of those in host memory here, of the others on their devices. A sequence without positions
 * has a state of zeros, which whoever computes its first token writes: what is there before means nothing. */
#ifndef PI_STATES_H
#define PI_STATES_H

#include "../model/model.h"

typedef struct pi_checkpoint {
    int32_t seq, pos; /* pos 0: it is free */
    bool brief;       /* of a feed with guesses: the sequence's next one takes its place */
    uint64_t used;
} pi_checkpoint;

/* Layers whose states lie on devices. */
typedef struct pi_states_device {
    void *ctx;
    bool (*has)(void *ctx, int32_t l);
    void (*copy)(void *ctx, int32_t to, int32_t from); /* of all of these, from place to place */
    void (*read)(void *ctx, int32_t l, int32_t place, void *to);
    void (*write)(void *ctx, int32_t l, int32_t place, const void *from);
} pi_states_device;

typedef struct pi_states {
    const pi_model *model;
    pi_states_device device; /* has NULL: none is */
    size_t floats;           /* of one sequence, whole cache lines; 0: the model has no such layers */
    size_t own_floats;       /* of these in host memory; whole cache lines, too */
    size_t *at;              /* [n_layer] floats before a layer's there */
    int32_t n_seq, n_checkpoints;
    int32_t n_guesses; /* further places, for states between guesses, which blocks themselves write */
    float *memory;
    size_t n_bytes;
    pi_checkpoint *checkpoint; /* [n_checkpoints + n_guesses] */
    uint64_t clock, began;     /* clock where the present feed reserved its first place */
    te_pool *pool; /* the session's, between its steps: states may be as large as caches. NULL: it has none yet */
} pi_states;

/* Bytes of n_seq sequences' states and checkpoints; SIZE_MAX: too many. */
size_t pi_states_bytes(const pi_model *m, int32_t n_seq, int32_t n_guesses);
size_t pi_states_places(int32_t n_seq, int32_t n_guesses);
/* device: NULL, or has NULL: all are in host memory. Errors: MEMORY. */
pi_status pi_states_init(pi_states *s, const pi_model *m, int32_t n_seq, int32_t n_guesses,
                         const pi_states_device *device);
void pi_states_free(pi_states *s);

static inline bool pi_states_on_device(const pi_states *s, int32_t l) {
    return s->device.has && s->device.has(s->device.ctx, l);
}
/* Of layer l, in host memory. */
static inline float *pi_state_of(const pi_states *s, int32_t place, int32_t l) {
    return s->memory ? s->memory + s->own_floats * (size_t)place + s->at[l] : NULL;
}
/* All that a sequence remembers, `floats` of them at any address. */
void pi_states_save(const pi_states *s, int32_t seq, char *to);
void pi_states_load(pi_states *s, int32_t seq, const char *from);

/* The most positions, at most n, that a sequence of `length` can be taken back to. */
int32_t pi_states_reachable(const pi_states *s, int32_t seq, int32_t length, int32_t n);
/* Makes a checkpoint of a sequence at its length, which is not 0, in place of the one that was used longest ago. */
void pi_states_keep(pi_states *s, int32_t seq, int32_t length, bool brief);
/* A feed begins: its places may take those of feeds before it, not each other's. */
static inline void pi_states_begin(pi_states *s) { s->began = s->clock; }
/* Reserves a place for the state that seq will have behind its first pos tokens; false: there is none left. */
bool pi_states_reserve(pi_states *s, int32_t seq, int32_t pos);
/* That place, or -1: the present feed has reserved none for this. */
int32_t pi_states_reserved(const pi_states *s, int32_t seq, int32_t pos);
/* dst, of any state, gets that which src of `length` had at n, a reachable number; dst's checkpoints that it does not
 * have then are dropped. dst may be src. */
void pi_states_copy(pi_states *s, int32_t dst, int32_t src, int32_t length, int32_t n);

#endif
