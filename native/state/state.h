/* state.h - what a session holds: one KV pool, the team of threads that computes, and the buffers of one step. */
#ifndef PI_STATE_H
#define PI_STATE_H

#include "../../vendor/core/te_os.h"
#include "../../vendor/core/te_pool.h"
#include "../../vendor/cpu/te_experts.h"
#include "../kv/kv.h"

/* One chunk of a batch: at most n_batch tokens computed together. First come those computed by matrix products, then
 * those by row kernels, as each would be alone; of the former those whose FFN is dense come last, of the latter first. */
typedef struct pi_chunk {
    int32_t n_tok;
    int32_t n_prefill; /* tokens 0..n_prefill-1: by matrix products */
    /* Prompt tokens of predicted mode; first_dense <= n_prefill <= first_dense + n_dense. */
    int32_t first_dense, n_dense;
    int32_t n_logits;
    bool decode;                /* a few tokens, each of another sequence */
    int32_t *token, *pos, *seq; /* [n_batch] */
    int32_t *logits_row;        /* [n_batch]: row in the session's logits, or -1 */
    int32_t *batch_row;         /* [n_batch]: index in the batch, for taps: theirs is no longer than n_batch */
    /* Where layers have states: the tokens by sequence and position; run i is those at run[i]..run[i + 1]-1 of order. */
    int32_t *order, *run, n_runs; /* [n_batch], [n_batch + 1] */
    int32_t *kept;                /* [n_batch] of order: the place where the state behind a token goes, too, or -1 */
} pi_chunk;

enum {
    PI_ATTENTION_SPAN = 256, /* positions whose scores are held at a time; whole blocks */
    PI_ATTENTION_PART = 256  /* the fewest positions that are worth a part of their own */
};

/* What attention needs of a member's scratch, for a piece of so many rows of queries (tokens times the query heads of a
 * KV head). Offsets in floats; the queries themselves are at 0. */
typedef struct pi_attention_room {
    int32_t rows;
    int32_t n_slot;     /* into how many parts a token's positions can be cut */
    int32_t n_tok;      /* of how many tokens there is room for all parts: the most that row kernels take at a time */
    size_t part_floats; /* of one row's part */
    size_t ld;          /* floats per row of scores */
    size_t out, sums, packed_q, packed, work, score, seen;
    size_t floats; /* in all */
} pi_attention_room;

/* Which experts the tokens of a chunk go to. A route is a token and one of its experts; a token's routes follow each
 * other, by rank. Rows of what is computed for routes are in the order of their experts. */
typedef struct pi_routes {
    float *score;    /* [n_batch][3 n_expert] of the router; then what experts are ranked by, and their groups */
    int32_t *expert; /* [n_batch * n_used] */
    float *weight;   /* [n_batch * n_used] what the expert's output is multiplied with */
    int32_t *of;     /* [n_batch * n_used] a route's token, where routes are not those of all tokens */
    int32_t *place;  /* [n_batch * n_used] a route's row */
    int32_t *first;  /* [n_expert + 1] the first row of an expert */
    int32_t *token;  /* [n_batch * n_used] a row's token */
    float *factor;   /* [n_batch * n_used] a row's weight */
    te_expert *list; /* [n_expert] those that have rows */
    float *x;        /* [n_batch * n_used][n_embd] inputs, then outputs */
} pi_routes;

typedef struct pi_layer_count { /* one member's part of pi_layer_step */
    _Alignas(64) te_ffn_counts ffn;
    int64_t predicted;
} pi_layer_count;

struct pi_session {
    pi_ref ref;
    pi_model *model;
    pi_session_options options;
    te_mutex lock;
    pi_session *beside; /* whose lock and pool are this one's, or NULL */
    te_pool *pool;
    te_workspace *ws;
    pi_kv kv;
    struct pi_hybrid *hybrid; /* NULL: the CPU computes everything */

    pi_chunk chunk;
    /* Buffers of one chunk, n_batch rows each; all in one allocation. */
    float *x;          /* [n_embd] residual stream */
    float *pair;       /* [2 * n_embd] of a head for further tokens: embedding and hidden state, normed */
    float *h;          /* [n_embd] input of the FFN */
    float *h2;         /* [n_embd] input of the attention, where it is another */
    float *out;        /* [n_embd] what a block gives, where a norm stands between that and x */
    float *q;          /* [n_head * n_embd_head] */
    float *head_gates; /* [n_head * n_embd_head] of attention that has a gate */
    float *k, *v;      /* [n_head_kv * n_embd_head] */
    float *att;        /* [n_head * n_embd_head] */
    float *latent_q;   /* [n_head * head_key] of latent attention: q before it is brought to the latent */
    float *cs;         /* [n_rot] cos and sin per token */
    float *stream;     /* of several residual streams: p_0 and the others, [n_stream][n_batch][n_embd], */
    float *stream_c;   /* and [PI_MAX_STREAMS^2] what they are put together with */
    float *layer_embd; /* [n_layer * n_embd_layer] of models with embeddings per layer */
    float *gate, *up;  /* [n_ff] of the many-token path; also hidden values where down is not transposed */
    pi_routes routes;  /* of a mixture of experts; hidden values of routes are in gate and up, too */
    float *state_in, *state_z, *state_gates, *state_out; /* of blocks with a state */
    float *rank;                                         /* [max_rank] */
    float *adapt;                                        /* [adapter_rank] */
    float *adapt_up;    /* [n_ff] what an adapter adds to up's products, of a few tokens */
    float *score;       /* [n_ff] */
    uint8_t *mask;      /* [n_ff] */
    uint64_t *sign;     /* [sign_words] of the sign predictor's input */
    float *threshold;   /* [n_layer], once */
    pi_tap *tap;        /* [n_layer], once */
    int32_t *list;      /* [n_ff], once: neurons that some token of the chunk asks for */
    int32_t *list_own;  /* [n_ff], once: the same, each member's part where its own neurons begin */
    int32_t *list_part; /* [n_threads] how many of them are in each part */
    float *scratch;     /* per member: scratch_floats */
    size_t scratch_floats;
    float *parts; /* sums of attention's parts; see attend.c */
    pi_attention_room room;
    void *memory;
    size_t memory_bytes;

    float *logits; /* [logits_rows][n_vocab] of the last feed: own_logits, or where a device left them */
    float *hidden; /* [logits_rows][n_embd], the same */
    float *own_logits, *own_hidden;
    /* How many of each row's largest logits the choices of the feed under way ask for; 0: they ask for rows. */
    int32_t n_largest;
    /* [logits_rows][PI_LARGEST], as pi_device_logits has them. NULL: logits are where `logits` says. Else that is empty, and
     * the rows are on a device: pi_hybrid_bring_rows. */
    const uint64_t *largest;
    const int32_t *n_found; /* [logits_rows] */
    int32_t logits_rows, logits_capacity;
    float *all_hidden; /* [all_capacity][n_embd] of the last feed's all_rows tokens, where they are kept */
    int32_t all_rows, all_capacity;
    const float *given; /* [tokens of the feed][n_embd] what such a head reads beside tokens; while it is computed */
    const pi_batch *asking; /* whose `stop` is called while it is computed */
    int64_t asked_ns;       /* when it was, or when the feed began */
    bool is_stopped;        /* it has said that the feed is to end */
    int32_t stop_layer;     /* in front of which the chunk ends */

    int32_t n_taps; /* layers with a tap */

    struct {                /* that is under way, see pi_session_begin_part: of each token */
        int32_t n_tok;      /* 0: there is none */
        int32_t *seq, *pos; /* [n_tok], one allocation */
    } part;

    uint32_t *fired; /* [n_layer][n_placed] tokens for which a neuron fired, or an expert was used; NULL: not counted */
    uint64_t n_counted;
    pi_layer_step *step;   /* [n_layer] of the last chunk */
    uint64_t *uses;        /* [n_layer][n_expert] routes since the session was opened */
    pi_layer_count *count; /* [n_layer][n_threads] */
    int64_t last_bytes;
    int64_t last_ns;
};

/* Every public function holds the lock while it looks at what a feed changes, also those that only read. */
static inline te_mutex *pi_lock_of(const pi_session *s) {
    return (te_mutex *)(uintptr_t)(s->beside ? &s->beside->lock : &s->lock);
}
static inline void pi_session_lock(const pi_session *s) { te_os_mutex_lock(pi_lock_of(s)); }
static inline void pi_session_unlock(const pi_session *s) { te_os_mutex_unlock(pi_lock_of(s)); }

/* Where layer l counts its neurons that fire, or NULL: of a mixture experts are counted. */
static inline uint32_t *pi_fired_of(const pi_session *s, int32_t l) {
    const pi_model_info *i = &s->model->info;
    return s->fired && !i->n_expert ? s->fired + (size_t)i->n_ff * (size_t)l : NULL;
}

static inline float *pi_scratch(const pi_session *s, const te_team *team) {
    return s->scratch + s->scratch_floats * (size_t)team->ith;
}

#endif
