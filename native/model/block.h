/* block.h - what a layer is made of. A model is a table of layers, a layer a short list of blocks; a block reads the
 * residual stream, and what it gives is added to it.
 *
 * Each kind of block is one file that knows all about itself: which keys, tensors and matrices it has, how it is
 * computed on the CPU, and by `device` on a device; what else it costs is in plan/cost.c. What differs between
 * architectures is data in these structs, set by bind from a row of the table in model/arch.c. Shapes: [rows][cols],
 * cols contiguous. */
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
    te_mat gate;                        /* [n_head*n_embd_head][n_embd]: what o reads is times its sigmoid; or w NULL */
    const float *q_b, *k_b, *v_b, *o_b; /* or NULL */
    const float *q_norm, *k_norm;       /* [n_embd_head] or NULL */
    const float *wide_q_norm,
        *wide_k_norm;      /* [n_head*n_embd_head], [n_head_kv*n_embd_head] or NULL: of all heads together */
    const float *sub_norm; /* [n_head*n_embd_head] of what o reads, or NULL */
    const float *sinks;    /* [n_head] or NULL: what a head's softmax sees beside its scores, and adds nothing for */
    const float *v_norm;   /* [n_embd_head] or NULL: of each head of V */
    int32_t n_embd_head, n_head_kv;
    bool borrows; /* K and V are those of layer kv_layer, an earlier one; k and v are not there */
    int32_t kv_layer;
    float scale;    /* of scores */
    float soft_cap; /* of scaled scores: cap * tanh(score / cap); 0: none */
    int32_t window; /* positions that a token sees, its own among them; 0: all */
    bool chunked;   /* rather those from the last multiple of the window on (Llama 4) */
    bool late_norm; /* q_norm and k_norm are behind RoPE */
    /* q is multiplied by 1 + temp_scale * ln(1 + the whole part of (position + temp_first) / temp_length); scale 0: it is
     * not. */
    float temp_scale;
    int32_t temp_first, temp_length;
    int32_t rope; /* which of the model's variants; -1: none */
    bool gated;   /* q has twice the rows: of each head its query, then what its output is gated with, a sigmoid */
} pi_attention;

/* x += proj(act(gate x) * e), e the token's embedding for this layer. */
typedef struct pi_per_layer {
    te_mat gate; /* [n_embd_layer][n_embd] */
    te_mat proj; /* [n_embd][n_embd_layer] */
} pi_per_layer;
/* A branch of low rank beside attention. */
typedef struct pi_laurel {
    te_mat left, right; /* [rank][n_embd], [n_embd][rank] */
    pi_norm norm;
} pi_laurel;

/* Several residual streams. */
typedef struct pi_altup {
    te_mat spread, join;            /* [(n_stream - 1) * n_embd][n_embd] of the first, and of the last layer */
    const float *router_norm;       /* [n_embd], divided by n_embd */
    const float *router;            /* [n_stream][n_embd] */
    const float *predict, *correct; /* [n_stream * n_stream][n_stream], [n_stream][n_stream] */
    const float *scale;             /* [n_embd] */
    struct pi_per_layer per_layer;
    pi_norm norm; /* of what embeddings say */
} pi_altup;

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
    te_mat gate, up;       /* [n_ff][n_embd]; gate.w NULL when not gated */
    te_mat down;           /* [n_embd][n_ff] as ordinary files have it, or w NULL */
    te_mat down_t;         /* [n_ff][n_embd]: row j belongs to neuron j, or w NULL */
    const float *up_b;     /* [n_ff] or NULL */
    const float *sub_norm; /* [n_ff] of what down reads, or NULL */
    const float *down_b;   /* [n_embd] or NULL */
    te_mat fc1;            /* [r][n_embd], or w NULL: no predictor */
    te_mat fc2;            /* [n_ff][r] */
    uint64_t *sign;        /* [n_ff][sign_words of the model], or NULL: bits of the sign predictor */
    float threshold;       /* of the predictor's scores */
    te_xielu curve;        /* of PI_ACTIVATION_XIELU */
    bool cuts; /* of a token's gates, what is above their mean and `cut` times their deviation is activated, */
    float cut; /* and the others are silent */
} pi_ffn;

/* What makes weights of a router's products; numbers as in files. CHOSEN: experts are ranked by the products themselves;
 * the softmax is over the chosen ones. */
typedef enum pi_gating { PI_GATING_UNSAID, PI_GATING_SOFTMAX, PI_GATING_SIGMOID, PI_GATING_CHOSEN } pi_gating;

/* A mixture of experts: for each token the router picks n_used of the n_expert feed-forwards. */
typedef struct pi_experts {
    te_mat router;         /* [n_expert][n_embd] */
    const float *choice_b; /* [n_expert] added to weights where experts are ranked, and nowhere else; or NULL */
    const float *router_b; /* [n_expert] or NULL */
    const float *factor;   /* [n_expert] that weights are multiplied by, or NULL */
    /* Of what the router and the expert of all tokens read, where that is not what the others do; then there are norms
     * behind it and behind the others, too. w NULL: there are none. */
    pi_norm router_norm, shared_norm, shared_post_norm, own_post_norm;
    te_mat gate, up; /* [n_expert * n_ff][n_embd]: an expert's rows follow each other */
    te_mat down;     /* [n_expert * n_embd][n_ff], or w NULL */
    te_mat down_t;   /* [n_expert * n_ff][n_embd] instead: rows belong to neurons; or w NULL */
    const void **gate_parts, **up_parts, **down_parts; /* see pi_block_mat */
    const float *gate_b, *up_b, *down_b;               /* [n_expert * n_ff], and down's [n_expert * n_embd]; or NULL */
    te_mat shared_gate, shared_up, shared_down; /* one more expert, which all tokens use; w NULL: there is none */
    const float
        *shared_router; /* [n_embd]: what the shared one gives is multiplied by sigmoid(shared_router . h); or NULL */
    int32_t n_expert, n_used, n_ff, n_ff_shared;
    int32_t n_group, n_group_used; /* groups of neighbours, and how many of them a token may choose in */
    bool best_in_group;            /* a group is as good as its best expert; else as its two best together */
    pi_gating gating;
    bool normed;   /* weights of a token's experts are made to sum to 1 */
    bool early;    /* the router reads the layer's input, before attention changes it */
    bool on_input; /* a weight is of what the expert reads, not of what it gives; one expert of a token */
    float scale;   /* of weights */
} pi_experts;

/* A causal convolution of each channel over the last tokens. */
typedef struct pi_conv {
    const float *w, *b; /* [width][n_channels], [n_channels] or NULL */
    int32_t width, n_channels;
} pi_conv;

/* What blocks with a state have in common. The state of a sequence: [width - 1][n_channels] of the convolution, then
 * [n_head][n_k][n_v]. */
typedef struct pi_recurrent {
    pi_conv conv;
    int32_t n_head, n_group; /* heads, of which n_group share q and k; 0: a convolution is all there is */
    int32_t n_k, n_v;
} pi_recurrent;

static inline size_t pi_recurrent_floats(const pi_recurrent *r) {
    return (size_t)(r->conv.width - 1) * (size_t)r->conv.n_channels +
           (size_t)r->n_head * (size_t)r->n_k * (size_t)r->n_v;
}

/* A gated short convolution (LFM2): out . (c * conv(b * x)), with b, c, x = in . h. */
typedef struct pi_shortconv {
    pi_recurrent state;
    te_mat in;  /* [3 * n_embd][n_embd] */
    te_mat out; /* [n_embd][n_embd] */
} pi_shortconv;

/* A gated delta net (Qwen3-Next). */
typedef struct pi_delta {
    pi_recurrent state;
    te_mat qkv;            /* [2 * n_group * n_k + n_head * n_v][n_embd] */
    te_mat gate;           /* [n_head * n_v][n_embd] */
    te_mat alpha, beta;    /* [n_head][n_embd]; or alpha.w NULL and beta has both, [2 * n_head] */
    te_mat out;            /* [n_embd][n_head * n_v] */
    const float *a, *dt_b; /* [n_head] */
    const float *norm;     /* [n_v] */
    const float *unit;     /* [n_k] 1 / sqrt(n_k) */
    bool tiled;            /* head h has q and k of head h % n_group; else of h / (n_head / n_group) */
} pi_delta;

/* Mamba-2. */
typedef struct pi_mamba {
    pi_recurrent state;
    te_mat in;  /* z [n_head * n_v], x [the same], B and C [n_group * n_k] each, dt [n_head]; cols n_embd */
    te_mat out; /* [n_embd][n_head * n_v] */
    const float *a, *d, *dt_b; /* [n_head] */
    const float *norm;         /* [n_head * n_v], of each group's values together; or NULL */
} pi_mamba;

typedef struct pi_block {
    const struct pi_block_kind *kind;
    pi_norm norm;      /* of what the block reads; w NULL: that is x itself, or what the block beside it reads */
    pi_norm post_norm; /* of what it gives */
    union {
        pi_attention attention;
        pi_latent latent; /* begins with its attention */
        pi_ffn ffn;
        pi_experts experts;
        pi_per_layer per_layer;
        pi_laurel laurel;
        pi_altup altup;
        pi_recurrent recurrent; /* of each of these: */
        pi_shortconv shortconv;
        pi_delta delta;
        pi_mamba mamba;
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
    /* What a device does with such a block (hybrid/program.h); NULL: none computes it, and layers may only begin or end
     * with it. */
    const struct pi_block_on_device *device;
    bool recurrent; /* it has a state */
} pi_block_kind;

extern const struct pi_block_on_device pi_attention_on_device, pi_latent_on_device, pi_ffn_on_device,
    pi_experts_on_device, pi_delta_on_device, pi_shortconv_on_device, pi_mamba_on_device;
extern const pi_block_kind pi_attention_kind, pi_latent_kind, pi_ffn_kind, pi_experts_kind, pi_per_layer_kind;
extern const pi_block_kind pi_laurel_kind, pi_altup_kind;
extern const pi_block_kind pi_shortconv_kind, pi_delta_kind, pi_mamba_kind;

#endif
