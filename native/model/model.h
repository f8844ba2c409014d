/* model.h - pi_model: hyperparameters and weights of one model. Weights stay in the file's mapping, apart from vectors
 * (copied, a few MB) and what copy.c moves while loading. Shapes: [rows][cols], cols contiguous; a row's stride may be
 * more than its bytes (pi_row_bytes). */
#ifndef PI_MODEL_H
#define PI_MODEL_H

#include "../../vendor/core/te_pool.h"
#include "../../vendor/core/te_tensor.h"
#include "../../vendor/core/te_types.h"
#include "../../vendor/cpu/te_kernels.h"
#include "block.h"
#include "file.h"

/* DEVICE_HEAD, DEVICE_STATE: values of the largest head of attention, and of k of a head with a state, that devices know; the
 * CPU computes those of larger ones. */
enum { PI_DEVICE_HEAD = 256, PI_DEVICE_STATE = 256, PI_MAX_BLOCKS = 4, PI_MAX_ROPES = 2, PI_MAX_STREAMS = 8 };

/* What distinguishes the architectures. Adding one is adding a row to the table in arch.c. */
typedef struct pi_arch {
    const char *name;                          /* general.architecture */
    const pi_block_kind *block[PI_MAX_BLOCKS]; /* of each layer, in order */
    pi_rope_kind rope;
    bool layer_norm;        /* LayerNorm with bias; else RMSNorm */
    bool no_norm_bias;      /* LayerNorm without (Cohere) */
    bool parallel;          /* attention and FFN both read the layer's input (Falcon) */
    bool maybe_parallel;    /* the same where use_parallel_residual says so, or a file without it has no ffn_norm */
    bool gated;             /* the FFN has a gate */
    bool post_norm;         /* norms behind attention and FFN, too */
    bool no_pre_norm;       /* and none before them (OLMo 2) */
    bool learned_pos;       /* position_embd.weight (OPT) */
    int32_t pos_offset;     /* rows of it in front of position 0's (OPT) */
    bool fused_qkv;         /* attn_qkv.weight */
    bool fused_gate_up;     /* ffn_up.weight has the gate's rows, then up's (Phi-3) */
    bool bias;              /* q, k, v, o, up and down have biases (OPT) */
    bool qkv_bias;          /* q, k and v have biases (Qwen2); elsewhere they may */
    bool qk_norm;           /* RMSNorm over each head of q and k (Qwen3) */
    bool maybe_qk_norm;     /* the same where the file has it (GLM 4.5, but for Air) */
    bool wide_qk_norm;      /* RMSNorm over all heads of q, and of k, together (OLMoE) */
    bool norm_after_rope;   /* norms of heads come after RoPE (HunYuan) */
    bool sub_norms;         /* RMSNorm of what attention's output and down read (BitNet) */
    bool sinks;             /* heads have a logit beside those of positions (gpt-oss) */
    bool post_ffn_norm;     /* the norm before the feed-forward is called post_attention_norm */
    bool experts;           /* the feed-forward is a mixture of experts, where the file says how many */
    bool normed_experts;    /* weights of a token's experts sum to 1, unless the file says otherwise */
    pi_gating gating;       /* what makes them, where the file does not say it; UNSAID: SOFTMAX */
    bool gate_cuts;         /* gates that are not far above the others of their token are silent (Gemma 3n) */
    bool experts_beside;    /* beside a feed-forward, with norms for each and behind both (Gemma 4) */
    bool expert_bias;       /* the router, and gate, up and down of experts have biases (gpt-oss) */
    bool next_layers;       /* the last layers of a file may be for guesses at further tokens (GLM 4.5) */
    bool sigmoid_if_biased; /* that is PI_GATING_SIGMOID where experts have a bias for the choice (GLM 4.7 Flash) */
    bool best_in_group;     /* of softmaxes: groups of experts are ranked by their best one (DeepSeek V2) */
    bool early_router;      /* experts are chosen by what attention reads (SmallThinker) */
    bool scaled_embd;       /* embeddings times sqrt(n_embd) (Gemma) */
    bool logit_scale;       /* logits times a number of the file (Cohere) */
    bool scales;            /* embeddings, what blocks add, scores and (divided) logits have scales (Granite) */
    bool warm_queries;      /* queries far from the beginning are longer: attention.temperature_scale (Ministral) */
    int32_t no_rope_period; /* the last of so many layers has no RoPE (SmolLM 3); 0: all have */
    bool soft_caps;         /* of scores and of logits (Gemma 2) */
    bool logit_cap;         /* of logits, where the file says so (Gemma 4) */
    int32_t wide_layers; /* a model of so many scales scores by the width per head (Gemma 2 and 3 27B); 0: none does */
    int32_t window_period;  /* of so many layers all but the first have a window; 0: none has, 1: all have */
    int32_t window_default; /* where the file does not say how long it is; 0: there is none */
    bool full_last;         /* all but the last */
    bool windows_listed;    /* the file says which layers have one (Gemma 4) */
    bool layers_differ;     /* heads of layers with a window have a size of their own, key/value heads and neurons are
                               counted by layer, and the last layers may read K and V of earlier ones (Gemma 4) */
    bool maybe_v;           /* where there is no v, V is what K is made of (Gemma 4) */
    bool v_norm;            /* RMSNorm without weight over each head of v (Gemma 4) */
    bool unscaled;          /* scores are not scaled (Gemma 4) */
    bool chunked;           /* windows begin at multiples of their length, and layers without rotation have q scaled by
                               position; heads of q and k of the others are normed behind it, but where there are 128
                               experts (Llama 4) */
    bool weighted_input;    /* what an expert reads is weighted, not what it gives (Llama 4) */
    bool experts_step;      /* the file says which layers have experts: every so manieth (Llama 4) */
    bool layer_scale;       /* what a layer leaves is multiplied by a number (Gemma 4) */
    bool per_layer;       /* a third block adds what a token's embedding for this layer says, where the file has any */
    bool window_rope;     /* layers with a window have a RoPE of their own (Gemma 3) */
    float window_base;    /* its base, where the file does not say it; 0: that of the others */
    bool full_no_rope;    /* layers without one have no RoPE, unless all are without (SmallThinker) */
    bool yarn_exact;      /* the borders of YaRN's ramp are not rounded to whole pairs (gpt-oss) */
    pi_activation dense;  /* activation of an ordinary GGUF file */
    pi_activation sparse; /* activation of a PowerInfer file */

    /* Layers with a state: which kind of block they have, instead of attention; NULL: there are none. */
    const pi_block_kind *recurrent;
    bool recurrent_beside;   /* all layers have it, side by side with attention (Falcon-H1) */
    bool by_interval;        /* a period says which, or a list, not the number of heads (Qwen3-Next) */
    bool one_block;          /* layers have either of these, or a feed-forward (Nemotron-H) */
    bool gated_heads;        /* what attention's heads give is gated (Qwen3-Next) */
    bool gate_matrix;        /* the same, by a matrix of its own (AFMoE) */
    bool tiled_heads;        /* which heads of a delta net share q and k (Qwen3.5) */
    bool bare_ffn_norm;      /* the norm before the feed-forward is called ffn_norm and no more (Falcon-H1) */
    bool rope_unless;        /* there is a RoPE unless rope.scaling.finetuned is false (Granite) */
    const char *output_norm; /* the last norm's name; NULL: output_norm */
} pi_arch;
const pi_arch *pi_arch_find(te_str name); /* or NULL */
void pi_arch_names(char *out, size_t n);  /* "llama, bamboo, ...", as far as n bytes hold it */

typedef struct pi_memory { /* of te_os_alloc */
    void *p;
    size_t n_bytes;
} pi_memory;

/* lora.c: W x + b (a x), with the scale in a; a.w NULL: there is none. */
typedef struct pi_adapter {
    te_mat a;     /* [rank][cols of W]; of the embedding, whose rows are looked up, [cols][rank] */
    te_mat b;     /* [rows of W][rank] */
    void *memory; /* or NULL: another one of the layer owns it */
} pi_adapter;
enum { PI_ADAPT_Q, PI_ADAPT_K, PI_ADAPT_V, PI_ADAPT_O, PI_ADAPT_GATE, PI_ADAPT_UP, PI_ADAPT_DOWN, PI_N_ADAPT };

typedef struct pi_layer {
    pi_block block[PI_MAX_BLOCKS];
    int32_t n_blocks;
    int32_t n_host;      /* so many blocks at its beginning no device computes, */
    int32_t n_tail;      /* nor so many at its end; the others it may */
    bool parallel;       /* all blocks read the layer's input; else each reads what the one before it left */
    const float *scale;  /* [1] what the layer leaves is multiplied by, or NULL */
    pi_memory own;       /* of the matrices that were moved */
    pi_adapter *adapter; /* [PI_N_ADAPT] or NULL */
} pi_layer;

/* Of which kinds layers may be where they differ; see layers.c. */
typedef enum pi_layer_use { PI_LAYER_ATTENDS, PI_LAYER_RECURS, PI_LAYER_FEEDS } pi_layer_use;

/* A layer's block of a kind, or NULL. */
static inline pi_block *pi_block_of(const pi_layer *l, const pi_block_kind *kind) {
    for (int32_t i = 0; i < l->n_blocks; i++)
        if (l->block[i].kind == kind) return (pi_block *)(uintptr_t)&l->block[i];
    return NULL;
}
static inline pi_attention *pi_attention_of(const pi_layer *l) {
    pi_block *b = pi_block_of(l, &pi_attention_kind), *latent = b ? NULL : pi_block_of(l, &pi_latent_kind);
    return b ? &b->attention : latent ? &latent->latent.attention : NULL;
}
static inline pi_latent *pi_latent_of(const pi_layer *l) {
    pi_block *b = pi_block_of(l, &pi_latent_kind);
    return b ? &b->latent : NULL;
}
static inline pi_ffn *pi_ffn_of(const pi_layer *l) {
    pi_block *b = pi_block_of(l, &pi_ffn_kind);
    return b ? &b->ffn : NULL;
}
static inline pi_experts *pi_experts_of(const pi_layer *l) {
    pi_block *b = pi_block_of(l, &pi_experts_kind);
    return b ? &b->experts : NULL;
}
/* The neurons of a layer's feed-forward. */
static inline int32_t pi_n_ff(const pi_ffn *w) { return w->up.n_rows; }
/* A layer's block with a state, or NULL. */
static inline const pi_block *pi_recurrent_of(const pi_layer *l) {
    for (int32_t i = 0; i < l->n_blocks; i++)
        if (l->block[i].kind->recurrent) return &l->block[i];
    return NULL;
}
/* The same, if devices compute it where the layer lies on one. */
static inline const pi_block *pi_recurrent_on_device(const pi_layer *l) {
    const pi_block *b = pi_recurrent_of(l);
    return b && b >= l->block + l->n_host ? b : NULL;
}
/* Whether the layer has a down whose rows don't belong to neurons, so that silent ones' parts are read, too. */
static inline bool pi_keeps_down(const pi_layer *l) {
    const pi_ffn *f = pi_ffn_of(l);
    const pi_experts *e = pi_experts_of(l);
    return (f && !f->down_t.w) || (e && !e->down_t.w);
}
/* Of the predictor's scores; 0 where a layer has no predictor. */
static inline float pi_threshold_of(const pi_layer *l) {
    const pi_ffn *f = pi_ffn_of(l);
    return f ? f->threshold : 0;
}

/* A mixture's gate, up and down, whichever way it is stored. */
enum { PI_EXPERT_MATS = 3 };
static inline const te_mat *pi_expert_mat(const pi_experts *w, int32_t k) {
    return k == 0 ? &w->gate : k == 1 ? &w->up : w->down_t.w ? &w->down_t : &w->down;
}
/* Expert e's rows of a matrix that has n of each. */
static inline te_mat pi_expert_rows(const te_mat *all, int32_t e, int32_t n) {
    te_mat m = *all;
    m.w = (const char *)all->w + all->stride * (size_t)e * (size_t)n;
    m.n_rows = n;
    return m;
}

/* A layer's adapter of one matrix, or NULL. */
static inline const pi_adapter *pi_adapter_of(const pi_layer *l, int32_t which) {
    return l->adapter && l->adapter[which].a.w ? &l->adapter[which] : NULL;
}
static inline bool pi_adapts_ffn(const pi_layer *l) {
    return pi_adapter_of(l, PI_ADAPT_GATE) || pi_adapter_of(l, PI_ADAPT_UP) || pi_adapter_of(l, PI_ADAPT_DOWN);
}

struct pi_model {
    pi_ref ref;
    pi_file *file;
    const te_kernels *kernels;
    const pi_arch *arch;
    pi_model_options options;
    pi_model_info info;
    float norm_eps;     /* of norms of the residual stream and of what blocks give */
    float inner_eps;    /* of those inside blocks */
    float embd_scale;   /* embeddings are multiplied by it */
    float score_scale;  /* of attention's scores; 0: by the size of heads */
    float temperature;  /* of queries beyond n_ctx_orig (pi_attention); 0: none */
    int32_t n_ctx_orig; /* of that, and of RoPE's factors for short contexts */
    bool has_long_rope; /* rope[1] is rope[0] of contexts longer than n_ctx_orig */
    float logit_scale;  /* logits are multiplied by it */
    float logit_cap;    /* of logits: cap * tanh(logit / cap); 0: none */
    /* Of latent attention, else 0: values of the latent, of a head's key before it is brought there, and of its value. */
    int32_t latent_rank, head_key, head_value;
    pi_rope rope[PI_MAX_ROPES]; /* variants, of which a layer uses one or none */
    int32_t n_ropes;
    int32_t
        n_unused_layers; /* of the file, behind the others: for guesses at further tokens, if this is not their head */
    int32_t first_layer; /* layer 0 is this one of the file: not 0 of such a head, else 0 */

    te_mat token_embd; /* [n_vocab][n_embd] */
    te_mat join; /* [n_embd][2 * n_embd] of a head: x is join . [normed embedding | normed hidden state]; or w NULL */
    pi_norm embd_norm, hidden_norm; /* of these two */
    te_mat output;                  /* [n_vocab][n_embd]; token_embd when tied */
    te_mat position_embd;           /* [n_ctx_train + 2][n_embd], or w NULL */
    pi_norm output_norm;
    const float *output_b; /* [n_vocab] or NULL */
    pi_layer *layer;       /* [n_layer] */
    /* Embeddings per layer (pi_per_layer): n_embd_layer values of each layer; 0: there are none. */
    te_mat layer_embd, layer_proj; /* [n_vocab][n_layer * n_embd_layer], [n_layer * n_embd_layer][n_embd] */
    const float *layer_norm;       /* [n_embd_layer] */
    int32_t n_embd_layer;
    int32_t n_stream;           /* residual streams (pi_altup); 0: there is one */
    int32_t *n_head_kv, *n_ff;  /* [n_layer], or NULL: all layers have the model's */
    int32_t n_embd_head_window; /* of such a model: of layers with a window */
    pi_memory own;              /* of embeddings and output that were moved */
    pi_adapter embd_adapter, output_adapter;

    uint8_t *use;        /* [n_layer] pi_layer_use, of an architecture with recurrent layers */
    size_t state_floats; /* of a sequence's states, all blocks together; 0: there is none */
    int32_t state_in, state_z, state_gates, state_out; /* most floats of a token that such a block works with */

    struct pi_vector *vectors; /* chain of owned float vectors */
    bool *bound;               /* [tensors of the file] while they are bound: this one was asked for */
    int32_t loaded;            /* layers done by pi_model_load */
    te_pool *team;             /* while loading, once something needs it */
    int32_t max_rank;          /* largest r of any predictor */
    bool cuts_gates;           /* some feed-forwards cut their gates (pi_ffn) */
    int32_t n_ff_expert;       /* the most neurons of an expert */
    int32_t sign_words;        /* 64-bit words per neuron of the sign predictor; 0: there is none */
    int32_t adapter_rank;      /* largest rank of any adapter; 0: there are none */
    bool adapted_ffn;          /* some of them belong to the feed-forward */

    uint32_t
        *expert_counts; /* [n_layer][n_expert] how many of the file's expert_tokens used each expert; NULL: unsaid */
    uint64_t expert_tokens;
};

/* Floats of cos and sin that one token has, of the variants before r; of all: r = n_ropes. Buffers of several tokens hold
 * one variant after the other. */
static inline size_t pi_rope_floats(const pi_model *m, int32_t r) {
    size_t n = 0;
    for (int32_t i = 0; i < r; i++) n += (size_t)m->rope[i].n_rot;
    return n;
}
/* Whether logits are not yet what the output product gives. */
static inline bool pi_changes_logits(const pi_model *m) { return m->logit_scale != 1 || m->logit_cap > 0; }
/* Which variant a layer that has one uses in a context of n_ctx positions; -1: none. */
static inline int32_t pi_rope_index_of(const pi_model *m, int32_t rope, int32_t n_ctx) {
    return rope == 0 && m->has_long_rope && n_ctx > m->n_ctx_orig ? 1 : rope;
}
static inline int32_t pi_rope_index(const pi_model *m, const pi_attention *a, int32_t n_ctx) {
    return pi_rope_index_of(m, a->rope, n_ctx);
}
static inline const pi_rope *pi_rope_of(const pi_model *m, const pi_attention *a, int32_t n_ctx) {
    const int32_t i = pi_rope_index(m, a, n_ctx);
    return i < 0 ? NULL : &m->rope[i];
}

/* What plans place of a layer: neurons, or experts of a mixture, whose layers without experts lie somewhere as a whole, as
 * those without a feed-forward do. */
static inline int32_t pi_n_placed(const pi_model *m, const pi_layer *l) {
    const pi_experts *e = pi_experts_of(l);
    return e ? e->n_expert : m->info.n_expert || !pi_ffn_of(l) ? 0 : m->info.n_ff;
}
/* Whether all of a layer's feed-forward lies where the layer lies: one of a mixture's that has no experts; those of models
 * that cut gates, which are cut by what all of a token's are. */
static inline bool pi_is_whole_ffn(const pi_model *m, const pi_layer *l) {
    return (m->info.n_expert || m->cuts_gates) && pi_ffn_of(l);
}

static inline bool pi_is_relu(int32_t activation) {
    return activation == PI_ACTIVATION_RELU || activation == PI_ACTIVATION_DRELU || activation == PI_ACTIVATION_RELU2;
}

/* Whether some neurons can be silent. */
static inline bool pi_is_sparse(const pi_model *m) { return pi_is_relu(m->info.activation) || m->cuts_gates; }

static inline size_t pi_sign_bytes(const pi_model *m) {
    return sizeof(uint64_t) * (size_t)m->sign_words * (size_t)m->info.n_ff;
}

/* Bytes that a row of m has, which may lie further apart; 0 without matrix. */
static inline size_t pi_row_bytes(const te_mat *m) { return m->w ? te_row_bytes(m->type, m->cols) : 0; }
static inline int64_t pi_mat_bytes(const te_mat *m) { return (int64_t)(pi_row_bytes(m) * (size_t)m->n_rows); }

/* Of a layer's attention: all weights, and those that make no K and V. */
static inline int64_t pi_attention_query_bytes(const pi_layer *l) {
    const pi_attention *a = pi_attention_of(l);
    const pi_latent *w = pi_latent_of(l);
    const int64_t n = pi_mat_bytes(&a->q) + pi_mat_bytes(&a->gate) + pi_mat_bytes(&a->o);
    return w ? n + pi_mat_bytes(&w->q_a) + pi_mat_bytes(&w->q_b) + pi_mat_bytes(&w->k_b) + pi_mat_bytes(&w->v_b) : n;
}
static inline int64_t pi_attention_weight_bytes(const pi_layer *l) {
    const pi_attention *a = pi_attention_of(l);
    const pi_latent *w = pi_latent_of(l);
    return pi_attention_query_bytes(l) + (w ? pi_mat_bytes(&w->kv_a) : pi_mat_bytes(&a->k) + pi_mat_bytes(&a->v));
}

/* Whether what attention's heads give is gated. */
static inline bool pi_gates_heads(const pi_model *m) { return m->arch->gated_heads || m->arch->gate_matrix; }

/* Values of all heads before and behind latent attention, whichever are more; 0: there is none. */
static inline size_t pi_latent_q(const pi_model *m) {
    return (size_t)m->info.n_head * (size_t)(m->head_key > m->head_value ? m->head_key : m->head_value);
}

/* Values of a row of V: of latent attention a part of K's row. */
static inline int32_t pi_value_width(const pi_model *m, const pi_attention *a) {
    return m->latent_rank ? m->latent_rank : a->n_embd_head;
}

/* copy.c: makes m->team, the threads that load. Errors: MEMORY. */
pi_status pi_model_team(pi_model *m);

/* copy.c: moves what must be moved of a layer's matrices, or of embeddings and output, into memory of its own. On an
 * error nothing has changed. Errors: MEMORY. pi_copy_check: that there is memory for all of it, before any is moved. */
pi_status pi_copy_check(pi_model *m);
pi_status pi_copy_layer(pi_model *m, pi_layer *layer);
pi_status pi_copy_head(pi_model *m);

/* sign.c: makes the signs of the layer's feed-forward. Errors: MEMORY. */
pi_status pi_load_signs(pi_model *m, pi_layer *layer);

/* statistics.c: fills expert_counts. Errors: FORMAT, MEMORY. */
pi_status pi_model_read_statistics(pi_model *m);

/* lora.c */
void pi_adapters_free(pi_model *m);

/* uses.c: fills use, and n_ff, n_head_kv. Errors: FORMAT, UNSUPPORTED, MEMORY. */
pi_status pi_model_read_uses(pi_model *m);

/* layers.c: fills token_embd ... layer[] from the file. */
pi_status pi_model_bind(pi_model *m);
void pi_model_unbind(pi_model *m);

#endif
