/* block.h - what a layer is made of. A model is a table of layers, a layer a short list of blocks; a block reads the
 * residual stream, and what it gives is added to it.
 *
 * Each kind of block is one file that knows all about itself: which keys, tensors and matrices it has, how it is computed on
 * the CPU, and by `device` on a device; what else it costs is in plan/cost.c. What differs between architectures is data in these structs, set by bind from a row of the table
 * in model/arch.c. Shapes: [rows][cols], cols contiguous. */
#ifndef PI_BLOCK_H
#define PI_BLOCK_H

#include <stdbool.h>
#include <stdint.h>

#include "../../vendor/core/te_tensor.h"
#include "rope.h"

/* A norm over n_embd values; w NULL: there is none. */
typedef struct pi_norm {
    const float *w, *b; /* b: LayerNorm's */
} pi_norm;

typedef struct pi_attention {
    te_mat q;                           /* [n_head*n_embd_head][n_embd] */
    te_mat k, v;                        /* [n_head_kv*n_embd_head][n_embd] */
    te_mat o;                           /* [n_embd][n_head*n_embd_head] */
    const float *q_b, *k_b, *v_b, *o_b; /* or NULL */
    const float *q_norm, *k_norm;       /* [n_embd_head] or NULL */
    const float *wide_q_norm,
        *wide_k_norm;   /* [n_head*n_embd_head], [n_head_kv*n_embd_head] or NULL: of all heads together */
    const float *sinks; /* [n_head] or NULL: what a head's softmax sees beside its scores, and adds nothing for */
    float scale;        /* of scores */
    float soft_cap;     /* of scaled scores: cap * tanh(score / cap); 0: none */
    int32_t window;     /* positions that a token sees, its own among them; 0: all */
    int32_t rope;       /* which of the model's variants; -1: none */
} pi_attention;

/* Attention whose K and V are one latent vector of a token (DeepSeek's MLA). A row of the KV pool is [the key's rotated
 * part | the latent]; all heads share it, and V is its second part. */
typedef struct pi_latent {
    pi_attention attention; /* q: of models without q_a; k and v: none; o: [n_embd][n_head*head_value] */
    te_mat q_a, q_b;        /* [q_rank][n_embd], [n_head*head_key][q_rank]; or w NULL */
    te_mat kv_a;            /* [latent_rank + n_rot][n_embd] */
    te_mat k_b;             /* [n_head*latent_rank][head_key - n_rot]: brings a head's query to the latent */
    te_mat v_b;             /* [n_head*head_value][latent_rank] */
    const void **v_parts;   /* of v_b, and part_rows: see pi_block_mat */
    int32_t part_rows;
    const float *q_norm, *norm; /* [q_rank] or NULL; [latent_rank] of the latent */
} pi_latent;

typedef struct pi_ffn {
    te_mat gate, up;     /* [n_ff][n_embd]; gate.w NULL when not gated */
    te_mat down;         /* [n_embd][n_ff] as ordinary files have it, or w NULL */
    te_mat down_t;       /* [n_ff][n_embd]: row j belongs to neuron j, or w NULL */
    const float *up_b;   /* [n_ff] or NULL */
    const float *down_b; /* [n_embd] or NULL */
    te_mat fc1;          /* [r][n_embd], or w NULL: no predictor */
    te_mat fc2;          /* [n_ff][r] */
    uint64_t *sign;      /* [n_ff][sign_words of the model], or NULL: bits of the sign predictor */
    float threshold;     /* of the predictor's scores */
} pi_ffn;

/* What makes weights of a router's products; numbers as in files. CHOSEN: experts are ranked by the products themselves;
 * the softmax is over the chosen ones. */
typedef enum pi_gating { PI_GATING_UNSAID, PI_GATING_SOFTMAX, PI_GATING_SIGMOID, PI_GATING_CHOSEN } pi_gating;

/* A mixture of experts: for each token the router picks n_used of the n_expert feed-forwards. */
typedef struct pi_experts {
    te_mat router;         /* [n_expert][n_embd] */
    const float *choice_b; /* [n_expert] added to weights where experts are ranked, and nowhere else; or NULL */
    const float *router_b; /* [n_expert] or NULL */
    te_mat gate, up;       /* [n_expert * n_ff][n_embd]: an expert's rows follow each other */
    te_mat down;           /* [n_expert * n_embd][n_ff], or w NULL */
    te_mat down_t;         /* [n_expert * n_ff][n_embd] instead: rows belong to neurons; or w NULL */
    const void **gate_parts, **up_parts, **down_parts; /* see pi_block_mat */
    const float *gate_b, *up_b, *down_b;               /* [n_expert * n_ff], and down's [n_expert * n_embd]; or NULL */
    te_mat shared_gate, shared_up, shared_down; /* one more expert, which all tokens use; w NULL: there is none */
    const float
        *shared_router; /* [n_embd]: what the shared one gives is multiplied by sigmoid(shared_router . h); or NULL */
    int32_t n_expert, n_used, n_ff, n_ff_shared;
    int32_t n_group, n_group_used; /* groups of neighbours, and how many of them a token may choose in */
    bool best_in_group;            /* a group is as good as its best expert; else as its two best together */
    pi_gating gating;
    bool normed; /* weights of a token's experts are made to sum to 1 */
    bool early;  /* the router reads the layer's input, before attention changes it */
    float scale; /* of weights */
} pi_experts;

typedef struct pi_block {
    const struct pi_block_kind *kind;
    pi_norm norm;      /* of what the block reads */
    pi_norm post_norm; /* of what it gives */
    union {
        pi_attention attention;
        pi_latent latent; /* begins with its attention */
        pi_ffn ffn;
        pi_experts experts;
    };
} pi_block;

struct pi_model;
struct pi_layer;
struct pi_session;
struct te_team;

/* One block's work on the chunk of a session, as a member of its team sees it. */
typedef struct pi_block_run {
    struct pi_session *s;
    struct te_team *team;
    const struct pi_layer *layer;
    const pi_block *block;
    int32_t l;      /* the layer's number */
    int32_t from;   /* the first token of the chunk whose output is wanted */
    int32_t n_list; /* predicted mode: neurons that some token asks for; set by prepare */
    float *y;       /* [n_tok][n_embd] what the block gives is added to these rows */
} pi_block_run;

/* What loading may do with a matrix, and what a row of it belongs to. */
typedef enum pi_mat_use {
    PI_MAT_PRODUCT,   /* an output of the block */
    PI_MAT_PREDICTOR, /* the same, of a predictor, whose format may be another */
    PI_MAT_NEURONS,   /* a neuron */
    PI_MAT_DOWN,      /* a neuron, or an output; may be stored the other way round */
    PI_MAT_HEADS,     /* an output of one of the block's heads, which are multiplied one by one */
    PI_MAT_EXPERTS,   /* an output of one of the block's experts */
} pi_mat_use;

typedef struct pi_block_mat {
    te_mat *mat;        /* w NULL: the block has none */
    te_mat *by_neurons; /* of DOWN: what it is where a row belongs to a neuron; may be mat itself */
    pi_mat_use use;
    /* Of a PRODUCT whose rows are not one behind the other in the file: where each run of part_rows begins; else NULL. mat->w
     * is the first until loading has put all in one place. */
    const void *const *parts;
    int32_t part_rows;
} pi_block_mat;
enum { PI_BLOCK_MATS = 8 };

/* What a kind of block knows. All members of the team call prepare and run; the blocks of a layer that stand side by
 * side are all prepared before any runs. */
typedef struct pi_block_kind {
    const char *name;
    /* Reads the block's keys and finds its tensors. Errors: FORMAT, UNSUPPORTED, MEMORY. */
    pi_status (*bind)(struct pi_model *m, int32_t l, pi_block *b);
    /* All matrices of the block, in the order in which copies of them are stored; returns their number. */
    int32_t (*matrices)(pi_block *b, pi_block_mat out[PI_BLOCK_MATS]);
    /* Reads the layer's input in x, before any block of the layer; or NULL. Ends with a barrier. */
    void (*begin)(pi_block_run *r);
    /* Makes the block's input from x, and what must be known before x changes. Ends with or without a barrier. */
    void (*prepare)(pi_block_run *r);
    /* Adds what the tokens from r->from on give to r->y. Begins behind a barrier, ends without one. */
    void (*run)(pi_block_run *r);
    /* What a device does with such a block (hybrid/program.h); NULL: none computes it. */
    const struct pi_block_on_device *device;
} pi_block_kind;

extern const struct pi_block_on_device pi_attention_on_device, pi_latent_on_device, pi_ffn_on_device,
    pi_experts_on_device;
extern const pi_block_kind pi_attention_kind, pi_latent_kind, pi_ffn_kind, pi_experts_kind;

#endif
