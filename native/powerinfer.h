/* powerinfer.h - the whole public C interface of the PowerInfer engine.
 *
 *     pi_file *file; pi_model *model; pi_session *session;
 *     pi_file_open("model.gguf", &file);
 *     pi_model_options mo = pi_model_defaults();      pi_model_open(file, &mo, &model);
 *     pi_session_options so = pi_session_defaults();  pi_session_open(model, &so, &session);
 *     pi_session_feed(session, &batch);               float *logits = pi_session_logits(session, 0);
 *
 * In this order: errors, version, processor; files; weight formats; models; sessions; feeding; sequences; what a session
 * tells; sampling; rounds; plans; machine.
 *
 * Every function that can fail returns a pi_status; pi_error_message() then has one sentence with the values in it (per
 * thread). On an error nothing has changed. The engine never prints, aborts or exits. Handles are reference-counted: a
 * model keeps its file and a session its model, so handles may be closed in any order. Closing NULL does nothing.
 * Threads: a pi_file and a loaded pi_model may be used from any number of threads; a session or sampler by one call at
 * a time (a second concurrent call on the same session waits for the first). */
#ifndef POWERINFER_H
#define POWERINFER_H

#include <stddef.h>
#include <stdint.h>

#define PI_VERSION "0.1.0"

#ifdef __cplusplus
extern "C" {
#endif

/* cdef begin: the Python binding reads the declarations from here to the end mark. */

/* ---- errors, version, processor ---- */

typedef enum pi_status {
    PI_OK = 0,
    PI_ERROR_IO = 1,          /* a file cannot be opened, read or mapped */
    PI_ERROR_FORMAT = 2,      /* a file is not what it must be */
    PI_ERROR_ARGUMENT = 3,    /* a value given by the caller is out of range */
    PI_ERROR_MEMORY = 4,      /* out of memory */
    PI_ERROR_UNSUPPORTED = 5, /* valid, but not implemented; the message names it */
    PI_ERROR_CONTEXT = 6,     /* no room for more positions */
    PI_ERROR_DEVICE = 7,      /* a device or its driver failed, or cannot be used as asked */
    PI_ERROR_TIMEOUT = 8,     /* a device did not answer in time */
    PI_ERROR_STOPPED = 9      /* the caller's own function ended a feed */
} pi_status;

/* The sentence for this thread's last error, UTF-8 as far as file contents allow; "" if none. Valid until the thread's
 * next error. */
const char *pi_error_message(void);
const char *pi_version(void);
/* Name of the instruction set in use: "scalar", on x86-64 also "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx", on 64-bit ARM
 * also "neon", "neon_dot"; NULL (with a message) if POWERINFER_ISA names one that cannot run here. */
const char *pi_cpu_isa(void);
/* 1 if the named instruction set can run here. */
int32_t pi_cpu_has_isa(const char *name);
/* Physical cores this process may use (affinity and cgroup limits counted), at least 1. */
int32_t pi_cpu_cores(void);
/* What the library was built with, one line: the compiler. */
const char *pi_build_info(void);
/* Bytes per second that n_threads read from n_bytes of fresh memory, best of n_repeat passes; blocks for that long. */
pi_status pi_cpu_read_rate(int32_t n_threads, uint64_t n_bytes, int32_t n_repeat, double *bytes_per_s);

/* ---- files ---- */

typedef struct pi_file pi_file;

/* One metadata value. Pointers lie in the file's mapping: valid while the file is open, unaligned, text not
 * zero-terminated. type and element_type are GGUF's (0 u8, 1 i8, 2 u16, 3 i16, 4 u32, 5 i32, 6 f32, 7 bool, 8 string, 9
 * array, 10 u64, 11 i64, 12 f64). A string's data are its bytes; an array's the elements as in the file (strings: u64
 * length, then bytes, one after the other). */
typedef struct pi_meta {
    const char *key;
    size_t key_bytes;
    int32_t type;
    int32_t element_type; /* -1 unless an array */
    uint64_t n;           /* elements; 1 for scalars */
    const void *data;
    size_t n_bytes;
} pi_meta;

typedef struct pi_tensor {
    const char *name; /* name_bytes long, not zero-terminated */
    size_t name_bytes;
    const char *type_name; /* "Q4_0" */
    int32_t type;          /* ggml's number */
    int32_t n_dims;
    int64_t ne[4]; /* ne[0] contiguous */
    const void *data;
    size_t n_bytes;
} pi_tensor;

typedef struct pi_file_info {
    int32_t version;
    int32_t is_powerinfer; /* magic PWRI */
    int32_t n_parts;
    int64_t n_meta;
    int64_t n_tensors;
    uint64_t n_bytes;
} pi_file_info;

/* path: any part of a split file. Errors: IO, FORMAT, MEMORY. */
pi_status pi_file_open(const char *path, pi_file **out);
void pi_file_close(pi_file *file);
void pi_file_get_info(const pi_file *file, pi_file_info *out);
pi_status pi_file_meta(const pi_file *file, int64_t index, pi_meta *out); /* ARGUMENT if out of range */
int64_t pi_file_find_meta(const pi_file *file, const char *key);          /* index, or -1 */
pi_status pi_file_tensor(const pi_file *file, int64_t index, pi_tensor *out);
/* Weights of a tensor as floats: n from element first (both multiples of the type's block), row-major. UNSUPPORTED for
 * types without a decoder. */
pi_status pi_file_dequantize(const pi_file *file, int64_t index, int64_t first, int64_t n, float *out);

/* ---- weight formats ---- */

int32_t pi_type_find(const char *name);          /* ggml's number of "Q4_K", any case; -1 if not known */
const char *pi_type_name(int32_t type);          /* NULL if not known */
int32_t pi_type_block(int32_t type);             /* weights per block; 0 if not known */
uint64_t pi_type_bytes(int32_t type, int64_t n); /* bytes of n weights; 0 unless n is a multiple of the block */
int32_t pi_type_can_quantize(int32_t type);      /* 1 if pi_quantize knows it */
/* src [n_rows][n_cols] to rows of a format, one after the other at dst (n_rows * pi_type_bytes(type, n_cols) bytes), by
 * n_threads (0: physical cores); the bits do not depend on n_threads. Errors: ARGUMENT (n_cols not a multiple of the
 * block), UNSUPPORTED (a format that cannot be written), MEMORY. */
pi_status pi_quantize(int32_t type, const float *src, int64_t n_rows, int64_t n_cols, void *dst, int32_t n_threads);

/* ---- models ---- */

typedef struct pi_model pi_model;

/* Of the feed-forward. */
typedef enum pi_activation {
    PI_ACTIVATION_AUTO = -1, /* what the file says (powerinfer.hidden_act), else the architecture's own */
    PI_ACTIVATION_RELU = 0,  /* relu(gate) * up; ungated: relu(up) */
    PI_ACTIVATION_DRELU = 1, /* relu(gate) * relu(up) */
    PI_ACTIVATION_SILU = 2,
    PI_ACTIVATION_GELU = 3,      /* the exact one */
    PI_ACTIVATION_GELU_TANH = 4, /* the approximation by tanh (Gemma) */
    PI_ACTIVATION_CLAMPED = 5,   /* gpt-oss: g sigmoid(1.702 g) (u + 1), g = min(gate, 7), u = up within -7 and 7; a
                                    model has it or not, no option */
    PI_ACTIVATION_RELU2 = 6,     /* relu(gate)^2 * up; ungated: relu(up)^2 */
    PI_ACTIVATION_XIELU = 7      /* of up, a curve for each layer (Apertus); no option */
} pi_activation;

typedef enum pi_predictor {
    PI_PREDICTOR_AUTO = -1, /* what the file says (powerinfer.predictor), else MLP if the file has fc1 and fc2 */
    PI_PREDICTOR_NONE = 0,
    PI_PREDICTOR_MLP = 1, /* score = fc2 . relu(fc1 . residual) */
    PI_PREDICTOR_SIGN = 2 /* score = mean of sign(w_i) * sign(x_i): w the gate's (ungated: up's) row, x the FFN's normed
                             input; the signs are taken from the weights while loading */
} pi_predictor;

typedef struct pi_model_options {
    int32_t activation; /* pi_activation */
    int32_t predictor;  /* pi_predictor */
    /* ggml's number of a format that pi_quantize knows: pi_model_load rewrites fc1 and fc2; -1: as in the file. */
    int32_t predictor_type;
    /* 1: weights stay in the file's mapping; 0: pi_model_load copies them into memory of huge pages, a ReLU neuron's rows
     * side by side. */
    int32_t use_mmap;
    int32_t use_mlock; /* 1: keep the weights in RAM; MEMORY if the limit forbids it */
    int32_t prefault;  /* 1: pi_model_load reads all weights in, so that the first tokens do not wait for the disk */
    int32_t next_head; /* 1: not the model but its head that guesses at a further token (NextN, MTP): the first layer
                          behind the others, as a model of one layer. Its token at a position is what follows there, and
                          reads the model's final hidden state of that position (pi_batch.hidden) too. UNSUPPORTED if
                          the file has none */
} pi_model_options;
pi_model_options pi_model_defaults(void);

typedef struct pi_model_info {
    char architecture[32];
    int32_t n_layer, n_embd, n_head, n_head_kv, n_embd_head, n_ff, n_vocab, n_ctx_train;
    int32_t activation;              /* pi_activation, never AUTO */
    float activation_threshold;      /* FATReLU; 0 for plain ReLU */
    int32_t is_gated;                /* the FFN has a gate matrix */
    int32_t n_expert, n_expert_used; /* of a mixture, and of a token's; 0: it is none */
    int32_t n_layer_dense;           /* of a mixture: so many layers at the beginning have no experts */
    int32_t expert_gating;           /* of its routers: 1 softmax, 2 sigmoid, 3 softmax over the chosen; 0: none */
    int32_t n_neurons;               /* of a layer that a token goes through: n_ff, or those of its experts together */
    int32_t n_placed;                /* that plans place of a layer, at most: n_ff neurons, or n_expert experts */
    int32_t predictor;               /* pi_predictor, never AUTO */
    float sparse_threshold;          /* a neuron is predicted when its score is >= this; the lowest of all layers */
    int32_t can_skip_down;           /* ffn_down is (or was made) transposed: down rows of silent neurons are skipped */
    int32_t n_layer_down_transposed; /* how many layers' ffn_down was transposed while loading */
    uint64_t n_weight_bytes;         /* of all tensors that the model uses */
    uint64_t n_transposed_bytes;     /* memory taken by transposed copies */
    uint64_t n_copied_bytes; /* memory taken by all copies of matrices, once loaded: transposed, with use_mmap 0,
                                        of another predictor_type */
    uint64_t n_sign_bytes;   /* memory taken by the sign predictor, once loaded */
    uint64_t n_parameters;
    int32_t n_next;         /* layers of the file behind the others, which guess at further tokens: see next_head */
    int32_t n_recurrent;    /* layers with a state, which is all that they know of earlier tokens */
    uint64_t n_state_bytes; /* of a sequence */
    char rope[48];          /* e.g. "norm, base 10000, linear x4"; "none" */
} pi_model_info;

/* Binds the tensors of file: names, shapes and types are checked here. Cheap; weights stay in the mapping.
 * Errors: FORMAT (missing or misshapen tensor, bad key), UNSUPPORTED (architecture, type), ARGUMENT, MEMORY. */
pi_status pi_model_open(pi_file *file, const pi_model_options *options, pi_model **out);
void pi_model_close(pi_model *model);
/* The next piece of what loading takes (copying weights, transposing ffn_down, reading weights in), on all physical
 * cores: call until *done == *total. Sessions need a loaded model. Errors: MEMORY, at the first call if there is less
 * memory than all pieces take. */
pi_status pi_model_load(pi_model *model, int32_t *done, int32_t *total);
void pi_model_get_info(const pi_model *model, pi_model_info *out);
/* Adds a low-rank adapter to one matrix: W becomes W + scale * b a. tensor: "blk.0.attn_q.weight" and so on, a matrix of
 * attention or of the feed-forward, "token_embd.weight" or "output.weight", once each. a: [rank][columns of W], b: [rows
 * of W][rank]; copied. The model must be loaded and have no sessions. A model without an output matrix uses the
 * embedding's for it: without that one's adapter. With adapters of the feed-forward predictors no longer fit: sessions
 * are exact or dense. Errors: ARGUMENT, UNSUPPORTED (another tensor), MEMORY. */
pi_status pi_model_add_adapter(pi_model *model, const char *tensor, int32_t rank, float scale, const float *a,
                               const float *b);
/* The file's threshold of one layer (powerinfer.sparse_thresholds, else powerinfer.sparse_threshold, else 0); NaN if
 * layer is out of range. */
float pi_model_threshold(const pi_model *model, int32_t layer);

/* ---- sessions ---- */

/* One KV pool that holds many sequences, and the threads that compute. Positions of a sequence are 0, 1, 2 ... without
 * gaps. */
typedef struct pi_session pi_session;

typedef enum pi_sparsity {
    PI_SPARSITY_AUTO = 0,      /* predicted if the model has predictors, else exact if it is a ReLU model, else dense */
    PI_SPARSITY_PREDICTED = 1, /* only neurons that the predictor names */
    PI_SPARSITY_EXACT = 2,     /* all neurons are asked, the gate decides: same answers as dense */
    PI_SPARSITY_DENSE = 3
} pi_sparsity;

/* What computes beside the CPU. */
typedef enum pi_device_kind {
    PI_DEVICE_NONE = 0,
    PI_DEVICE_HOST = 1, /* a stand-in in ordinary memory, for tests */
    PI_DEVICE_CUDA = 2
} pi_device_kind;

enum { PI_KV_BLOCK = 64 }; /* positions that share a block of the KV pool */
typedef enum pi_kv_type { PI_KV_F32 = 0, PI_KV_F16 = 1, PI_KV_Q8_0 = 8 } pi_kv_type;

/* done of total bytes; another result than 0 ends the work with a DEVICE error. */
typedef int32_t (*pi_progress)(void *ctx, uint64_t done, uint64_t total);

typedef struct pi_session_options {
    int32_t n_ctx;          /* most positions of one sequence; 0: the model's own, at most 4096 */
    int32_t n_pool;         /* positions that all sequences share; 0: n_ctx. Rounded up to blocks */
    int32_t n_seq;          /* sequences are numbered 0..n_seq-1 */
    int32_t n_batch;        /* tokens computed together; a larger batch is cut into chunks of this many */
    int32_t n_threads;      /* 0: physical cores; with a device one less, which the driver is left, of four or more */
    int32_t type_k, type_v; /* pi_kv_type */
    int32_t sparsity;       /* pi_sparsity */
    int32_t mask_prompts;   /* 1: predicted mode computes every token with the predictor's neurons, not only those that
                               want logits; for measuring what the mask costs */
    int32_t device;         /* pi_device_kind that the plan is carried out on */
    const struct pi_plan *plan;  /* NULL: the CPU computes everything. Read during the call only */
    const int32_t *device_index; /* which devices of that kind the plan's are; NULL: 0, 1, 2 ... */
    pi_progress progress;        /* called while weights are brought to devices, or NULL */
    void *progress_ctx;
    /* How long a step waits for a device, and a device for the CPU, before it fails; 0: a minute, and ten. */
    int32_t wait_ms;
    /* 1: count which neurons fire, for pi_session_counts; takes 4 bytes per neuron of a layer on a device there, which the
     * plan must be made for. */
    int32_t count_neurons;
    /* 1: keep when each side of a step did what, for pi_session_timeline; a GPU takes some microseconds a layer more. */
    int32_t timeline;
    /* 1: weights in host memory are not registered with a device's driver, which keeps their pages in RAM; prompts then
     * bring them over through a small buffer, which is slower. */
    int32_t no_pinning;
    /* 1: rows of the CPU's neurons or experts are not fetched by a device's guess a layer ahead; for measuring what that
     * gains. Answers of neurons may differ by rounding. */
    int32_t no_lookahead;
    int32_t frozen_experts; /* 1: a mixture's experts stay on the side where the plan puts them, so that the same input
                               gives the same bits; 0: those that are used more move to the device */
    int32_t n_guesses; /* of recurrent layers: of so many tokens that are generated together the state behind each is
                               kept, beside checkpoints, so that a sequence can be taken back to between guesses */
    struct pi_session *beside; /* whose threads compute this session, too: the two take turns, and n_threads is the
                                  other's, which is kept open with this one. NULL: it has its own */
    int32_t keep_hidden; /* 1: each feed leaves the final hidden states of all its tokens (pi_session_all_hidden) */
} pi_session_options;
pi_session_options pi_session_defaults(void);
/* K and V of a session with these options, wherever they lie; 0 where there can be none. */
uint64_t pi_model_kv_bytes(const pi_model *model, const pi_session_options *options);

typedef struct pi_session_info {
    int32_t n_ctx, n_pool, n_seq, n_batch, n_threads;
    int32_t sparsity; /* never AUTO */
    float sparse_threshold;
    uint64_t n_kv_bytes; /* in host memory; of recurrent layers states and checkpoints */
    uint64_t n_work_bytes;
    uint64_t n_device_bytes;         /* of all devices: weights, K and V, buffers */
    int32_t n_zero_copy;             /* neurons of all layers whose rows devices read in host memory */
    uint64_t n_unmapped_bytes;       /* of weights in host memory, which a device's driver refused to register */
    int32_t n_blocks, n_blocks_free; /* of PI_KV_BLOCK positions; of layers that see all of them */
    int32_t n_window; /* positions that layers with a window hold of a sequence, some more at times; 0: all hold all */
    int32_t n_mixed;  /* tokens of prompts and of others' next ones that devices compute together at most; 0: none */
    int32_t n_part;   /* tokens of a part whose layers are computed between others' steps at most; 0: there is none */
} pi_session_info;

/* Errors: ARGUMENT (ranges; PREDICTED without predictors, EXACT without ReLU; Q8_0 with a head size that is no multiple
 * of 32; a plan of another model), MEMORY (also a device's), DEVICE. */
pi_status pi_session_open(pi_model *model, const pi_session_options *options, pi_session **out);
void pi_session_close(pi_session *session);
void pi_session_get_info(const pi_session *session, pi_session_info *out);
/* UNSUPPORTED: PREDICTED, in a session whose devices have no predictors because it was opened in another mode. */
pi_status pi_session_set_sparsity(pi_session *session, int32_t sparsity);
/* Replaces the thresholds of all layers, or those of each (threshold [n_layer]). NaN is an ARGUMENT error. */
pi_status pi_session_set_threshold(pi_session *session, float threshold);
pi_status pi_session_set_thresholds(pi_session *session, const float *threshold);

/* ---- feeding ---- */

/* What a token is, which says how it is computed and whether its logits are kept. */
typedef enum pi_token_kind {
    PI_TOKEN_PROMPT,    /* of a prompt; no logits */
    PI_TOKEN_GENERATED, /* was generated, or ends a prompt; logits, to choose what follows */
    PI_TOKEN_SCORED     /* of a prompt, with logits */
} pi_token_kind;

/* Tokens to compute. Within a sequence, positions must continue it: the first new position is pi_seq_length, then one
 * more each. In predicted mode tokens that want logits are computed with the predictor's neurons; the others with all of
 * them. A batch with more tokens than n_batch is computed in chunks; the call returns after the last.
 *
 * Which kernels compute a token, and so its bits, depends on its own sequence alone (the CPU's; a device takes what is
 * fastest for the whole chunk). A prompt's tokens (PROMPT and SCORED) are computed by matrix products. So a prompt
 * has the same bits however it is cut into batches, if it is cut where pi_chunk_end says. A batch that brings less than
 * 16 tokens of a sequence for these products, or an n_batch of less than 16, has all of them computed one by one, as
 * GENERATED ones are. More than 16 GENERATED tokens of a sequence in a batch are computed as SCORED. */
typedef struct pi_batch {
    int32_t n_tokens;
    const int32_t *token;
    const int32_t *pos;  /* NULL: each sequence continues */
    const int32_t *seq;  /* NULL: all 0 */
    const uint8_t *kind; /* pi_token_kind of each; NULL: GENERATED for the last, PROMPT for the others */
    const float *hidden; /* [n_tokens][n_embd] what a next_head reads beside each token; else NULL */
    /* Called by the calling thread while the feed goes on, between chunks and layers that the CPU computes and while a device
     * computes a prompt, stop_ms or a little more after the last time or the beginning; another result than 0 ends the feed.
     * It must not use the session. NULL: none. */
    int32_t (*stop)(void *ctx);
    void *stop_ctx;
    int32_t stop_ms;
} pi_batch;

/* What is left to feed of a sequence's tokens, and how large the next part of it should be. */
typedef struct pi_prompt_rest {
    int32_t first, end;             /* tokens first..end-1 */
    int32_t generated_from;         /* from here on they are fed as GENERATED; end: none is */
    int32_t scored_from, scored_to; /* these are fed as SCORED: scored_from..scored_to-1 */
    int32_t size;                   /* wanted size of the part; it may have up to 30 tokens more */
    int32_t max_scored;             /* as many SCORED tokens in it, or up to 30 more */
    int32_t branch;                 /* where another prompt may part from this one: the part ends there, or a few tokens
                                       before, so that layers with states have a checkpoint; 0: nowhere */
} pi_prompt_rest;
/* Where the next part of a prompt ends, so that its bits are those it has when it is fed at once: after first, or first
 * itself where size or max_scored leave room for none; -1 for NULL or a broken range. */
int32_t pi_chunk_end(const pi_prompt_rest *rest);
/* How many tokens of a common prefix may be taken over so that a prompt gets the bits that it gets anew: of n_same tokens
 * with which a prompt of n_prompt tokens begins, and a sequence that was fed a prompt of n_held_prompt. All, if that
 * sequence's prompt is among them: the prompt then goes on where its answer was being written. No more than is reachable in
 * seq; session NULL: all is. */
int32_t pi_prefix_reusable(const pi_session *session, int32_t seq, int32_t n_same, int32_t n_held_prompt,
                           int32_t n_prompt);

/* Errors: ARGUMENT (token, position or sequence out of range), CONTEXT (no room: nothing was computed), MEMORY; DEVICE,
 * TIMEOUT (a device failed or did not answer), STOPPED: the sequences are as they were before, or as far before as is
 * reachable: empty where layers with a window have given back what that needs, at a checkpoint where layers have states. */
pi_status pi_session_feed(pi_session *session, const pi_batch *batch);
/* Logits [n_vocab] of the index-th token of the last batch that wanted them; writable; valid until the next feed. NULL
 * if out of range, or where they are still on a device (pi_session_feed_choose), which fails. */
float *pi_session_logits(pi_session *session, int32_t index);
/* The final normed hidden state [n_embd] of the same token. */
const float *pi_session_hidden(pi_session *session, int32_t index);
/* The same of every token of the last batch, in its order: [n_tokens][n_embd], valid until the next feed; NULL unless the
 * session has keep_hidden. */
const float *pi_session_all_hidden(pi_session *session);

/* ---- sequences ---- */

int32_t pi_seq_length(const pi_session *session, int32_t seq); /* positions held; -1 if seq is out of range */
/* Keeps positions 0..n_keep-1. UNSUPPORTED unless n_keep is reachable. */
pi_status pi_seq_cut(pi_session *session, int32_t seq, int32_t n_keep);
/* The most positions, at most n, that a sequence can be cut to or copied: n, or 0 where layers with a window no longer hold
 * what the next token sees. Of layers with a state (recurrent ones), which forgets nothing, it is where the session has a
 * checkpoint, or 0: it makes one where a prompt's matrix products end (after each chunk of a long prompt), and before a feed
 * of several GENERATED tokens; those that were not used for longest give way. -1 if seq is out of range, or n negative. */
int32_t pi_seq_reachable(const pi_session *session, int32_t seq, int32_t n);
/* dst (dropped first) becomes the first n positions of src, a reachable number; whole blocks are shared until one
 * side writes. */
pi_status pi_seq_copy(pi_session *session, int32_t dst, int32_t src, int32_t n);
pi_status pi_seq_drop(pi_session *session, int32_t seq);
/* Context shift: keeps the first n_keep positions, drops the n_drop after them, moves the rest down (K is rotated to
 * the new positions). UNSUPPORTED for models with learned positions (OPT), with recurrent layers or with norms of keys
 * behind RoPE, and where a window would reach into the first n_keep positions, which layers with a window no longer hold. */
pi_status pi_seq_shift(pi_session *session, int32_t seq, int32_t n_keep, int32_t n_drop);
/* A sequence's K, V and states as bytes, for saving. load replaces seq; the session must have the same model shape
 * and KV types (checked by a header). */
uint64_t pi_seq_state_bytes(const pi_session *session, int32_t seq);
pi_status pi_seq_state_save(pi_session *session, int32_t seq, void *out, uint64_t n_bytes);
pi_status pi_seq_state_load(pi_session *session, int32_t seq, const void *in, uint64_t n_bytes);

/* ---- what a session tells ---- */

/* What the last feed's last chunk did in one layer's FFN. Neuron counts are sums over the tokens that were computed
 * sparsely. */
typedef struct pi_layer_step {
    int32_t n_tokens;        /* of the chunk; in the last layer from the first wanted one on (devices: 0, or over 8) */
    int32_t n_sparse;        /* of those, computed by the row-sparse operator */
    int64_t n_predicted;     /* (neuron, token) pairs that the mask named; all of them in exact and dense mode */
    int64_t n_computed;      /* pairs whose up (ungated: down) row was used */
    int64_t n_active;        /* pairs with a non-zero product */
    int64_t n_active_device; /* of those, whose neuron lies on a device */
    int64_t n_rows;          /* weight rows read by the FFN */
    int64_t ffn_bytes;       /* bytes of weights read by the FFN, predictor included */
    int64_t bytes;           /* of the whole layer: weights, K and V */
    float ffn_us, layer_us;  /* of a layer on a device: the CPU's part, and since its last hand-over; 0 without one */
    int64_t n_foreseen; /* (neuron, token) pairs of the CPU's share, or of a mixture n_routes', that a device had named
                           early, mostly by a guess a layer ahead, so that rows were fetched; in predicted mode */
    int64_t n_routes;   /* of a mixture: (token, expert) pairs of the chunk */
    int64_t n_routes_device;   /* of those, whose expert had a place on a device */
    int64_t n_routes_streamed; /* and of a prompt on a device, those whose expert was brought there for this chunk */
    int64_t n_zero_copy;       /* and those whose expert a device read in host memory */
    int64_t n_copies;          /* experts that began to move to a place after it */
    uint64_t copied_bytes;
} pi_layer_step;
pi_status pi_session_last_step(const pi_session *session, int32_t layer, pi_layer_step *out);

/* Of a mixture's layer, since the session was opened: how many routes (a token and one of its experts) there were, of
 * those whose expert had a place on the device or was brought there for a prompt; and what moved there. */
typedef struct pi_expert_counts {
    int32_t n_places; /* experts that the device has room for */
    int64_t n_routes, n_resident, n_streamed;
    int64_t n_zero_copy; /* of the others, whose expert the device read in host memory */
    int64_t n_copies;
    uint64_t copied_bytes;
} pi_expert_counts;
/* place: [n_expert] 1 for experts that are on the device, or NULL. uses: [n_expert] routes to each, or NULL. Errors:
 * ARGUMENT (layer; a model without experts). */
pi_status pi_session_experts(const pi_session *session, int32_t layer, pi_expert_counts *out, uint8_t *place,
                             uint64_t *uses);

/* What one layer's FFN is given and makes of it, for profiling and training: a feed writes a row per token, in the order
 * of its batch, which then may have at most n_batch tokens. The memory is the caller's; NULL: not wanted. A tapped
 * layer is computed by matrix products. */
typedef struct pi_tap {
    float *input;  /* [n_batch][n_embd] what an MLP predictor reads: the residual before ffn_norm; Falcon: the block's
                      input */
    float *norm;   /* [n_batch][n_embd] the normed input of gate and up */
    float *hidden; /* [n_batch][n_ff] act(gate) * up, after the mask if there is one; 0 where a neuron is silent */
    float *score;  /* [n_batch][n_ff] of the predictor, in any mode */
} pi_tap;
/* tap NULL ends it. Errors: ARGUMENT (layer; scores of a model without predictor), UNSUPPORTED (a session with layers on
 * a device). */
pi_status pi_session_set_tap(pi_session *session, int32_t layer, const pi_tap *tap);

/* Of a session opened with count_neurons: how often each of a layer's neurons fired (a product that is not 0) since then
 * or the last reset, count [n_placed] (of a mixture: how often each expert was used), and over how many tokens. Neurons
 * that a token's mask left out did not fire for it.
 * Errors: ARGUMENT (layer; a session that does not count), MEMORY, DEVICE. */
pi_status pi_session_counts(pi_session *session, int32_t layer, uint32_t *count, uint64_t *n_tokens);
pi_status pi_session_reset_counts(pi_session *session);

/* Bytes of weights, K and V that the last feed read in all (embedding and output head included), and its time. */
pi_status pi_session_last_total(const pi_session *session, int64_t *bytes, float *us);

/* Moments of a layer that lies on a device: what ended there; and, from INPUT on, of the CPU's part in it, by its first
 * thread. */
typedef enum pi_moment {
    PI_MOMENT_QKV,
    PI_MOMENT_ATTENTION,
    PI_MOMENT_OUTPUT,  /* attention's output product */
    PI_MOMENT_PREDICT, /* the predictor's first layer; the CPU is sent the input */
    PI_MOMENT_MARKS,   /* its second, of cold neurons; the CPU is sent the marks */
    PI_MOMENT_HOT,     /* hot neurons */
    PI_MOMENT_MERGE,   /* the CPU's sum has come and was added */
    PI_MOMENT_INPUT,   /* the input is there */
    PI_MOMENT_LIST,    /* marked neurons are listed */
    PI_MOMENT_ANSWER,  /* their sum is sent */
    PI_MOMENTS
} pi_moment;
/* Of a layer in the last step of a session with options.timeline: when that was, us[PI_MOMENTS], in microseconds since the
 * step began; negative: it was not. Errors: ARGUMENT. */
pi_status pi_session_timeline(pi_session *session, int32_t layer, float *us);

/* Measures how fast the session's own threads read memory, between feeds: n_slices of slice_bytes (at least 1 MiB;
 * rounded down to 4 KiB), which next reads in turn by plain loads, from the moment when all threads are there to that
 * when the last has done its part. */
typedef struct pi_read_probe pi_read_probe;
pi_status pi_read_probe_open(pi_session *session, uint64_t slice_bytes, int32_t n_slices, pi_read_probe **out);
pi_status pi_read_probe_next(pi_read_probe *probe, double *bytes_per_s);
void pi_read_probe_close(pi_read_probe *probe);

/* ---- sampling ---- */

typedef struct pi_sampler pi_sampler;

typedef struct pi_sampling {
    float temperature;       /* <= 0: greedy */
    int32_t top_k;           /* <= 0: off */
    float top_p;             /* >= 1: off */
    float min_p;             /* <= 0: off */
    float typical_p;         /* >= 1: off */
    float repeat_penalty;    /* 1: off */
    float frequency_penalty; /* 0: off */
    float presence_penalty;  /* 0: off */
    int32_t penalty_last_n;  /* tokens looked back at; 0: none, -1: all accepted */
    int32_t mirostat;        /* 0 off, 1 mirostat, 2 mirostat 2.0 */
    float mirostat_tau, mirostat_eta;
    uint64_t seed;
    float top_n_sigma;     /* keep logits within so many standard deviations of the largest; <= 0: off */
    float xtc_probability; /* how often the likeliest tokens are excluded; <= 0: off */
    float xtc_threshold;   /* which: all but the least likely of those at least so likely; > 0.5: none */
    float dynatemp_range;  /* temperature - range .. temperature + range, by entropy; <= 0: off */
    float dynatemp_exponent;
    float dry_multiplier; /* penalty for sequences that come again; <= 0: off */
    float dry_base;
    int32_t dry_allowed_length;  /* >= 1; penalty multiplier * base ^ (length of the repeated sequence - this) */
    int32_t dry_penalty_last_n;  /* tokens looked back at; 0: none, -1: all accepted */
    const int32_t *dry_breakers; /* [n_dry_breakers] tokens that no sequence goes on over; read by pi_sampler_new */
    int32_t n_dry_breakers;
} pi_sampling;
pi_sampling pi_sampling_defaults(void);

/* n_bias pairs (bias_token[i], bias[i]) are added to the logits. Errors: ARGUMENT, MEMORY. */
pi_status pi_sampler_new(const pi_sampling *options, int32_t n_vocab, int32_t n_bias, const int32_t *bias_token,
                         const float *bias, pi_sampler **out);
void pi_sampler_free(pi_sampler *sampler);
/* Chooses a token from logits [n_vocab], which are not changed, and must not be by others meanwhile. -inf excludes a
 * token; ARGUMENT if nothing finite is left or a NaN is met. Order: bias, penalties, DRY, then greedy, or mirostat
 * (temperature first), or top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature (dynamic, if asked for). */
pi_status pi_sampler_sample(pi_sampler *sampler, const float *logits, int32_t *token);
/* Tells the sampler that token was appended (penalties look at it). */
pi_status pi_sampler_accept(pi_sampler *sampler, int32_t token);
/* Forgets accepted tokens and restarts the random sequence from seed. */
void pi_sampler_reset(pi_sampler *sampler, uint64_t seed);
/* Feeds one token to a sequence, whose length is pos, chooses what follows it and accepts that: pi_session_feed,
 * pi_sampler_sample and pi_sampler_accept in one call, for languages in which what stands between the three takes time.
 * Errors: theirs, and ARGUMENT for a sampler of another n_vocab; *next is then token if that was fed, else -1. */
pi_status pi_session_next(pi_session *session, int32_t seq, int32_t pos, int32_t token, pi_sampler *sampler,
                          int32_t *next);
/* The same of many: pi_session_feed, then the i-th of n samplers, no two of which are the same, chooses by the logits of
 * row[i] and accepts chosen[i], shared out among the session's threads (beside a device among up to 8 of them).
 * chosen[i] is -1 where that failed: the same choice tells why once more. Errors: of pi_session_feed; ARGUMENT for a row
 * that the batch does not have, or a sampler of another n_vocab: then nothing was fed. Where samplers ask for the largest
 * logits alone (greedy, top_k of at most 128; no bias, penalty, mirostat or top_n_sigma), a device brings no more than
 * these, and pi_session_logits brings the rest. */
pi_status pi_session_feed_choose(pi_session *session, const pi_batch *batch, int32_t n, const int32_t *row,
                                 pi_sampler *const *sampler, int32_t *chosen);

/* ---- rounds ---- */

/* Generations that go on together by themselves, so that nobody else's work stands between their steps. */
typedef struct pi_rounds {
    int32_t n;                  /* generations; a round computes a token of each, and chooses what follows */
    int32_t most;               /* rounds */
    const int32_t *seq;         /* [n] no two the same */
    pi_sampler *const *sampler; /* [n] no two the same */
    const int32_t *token;       /* [n] that the first round computes; each further one what was chosen */
    int32_t n_end;
    const int32_t *end; /* [n_end] tokens that are the last of a generation */
    int64_t until_ns;   /* of the monotonic clock: when it is over no round begins, but for the first */
    uint32_t stop;      /* another thread's: not 0: no further round begins when so many are done */
    uint32_t state;     /* the engine's, 0 in the beginning: rounds done * 2, + 1 when no more come */
    int32_t *chosen;    /* [most][n] as of pi_session_feed_choose */
    int32_t
        part_layers;   /* of a part that is under way (pi_session_begin_part), how many come in front of each round; no
                          * round follows its last ones. 0: the part is computed as by pi_session_end_part */
    int32_t part_left; /* the engine's: layers of the part that are left, */
    int64_t part_ns;   /* and how long the device took for those of these rounds */
} pi_rounds;
/* Runs rounds until one has chosen an end token, or a choice has failed, or no more may begin: at least one. Then
 * rounds->state tells how many; where another one was begun and failed, nothing of that one was computed. Errors: of
 * pi_session_feed_choose, then as well. */
pi_status pi_session_rounds(pi_session *session, pi_rounds *rounds);
/* A part of prompts whose layers are computed a few at a time, in front of rounds (pi_rounds.part_layers) of at most 64
 * generations: the batch's tokens, at most the session's n_part, none of which wants logits. begin computes nothing; the
 * part's sequences have all of its tokens from then on, and are for nobody else. One at a time: end computes all layers that
 * are left, and so does every other call that feeds tokens or changes sequences, but for pi_session_feed_choose of at most 64
 * tokens of other sequences, and what cuts, drops or copies others. Logits of the last feed stay. A part that
 * fails, as the call that had its layers says, leaves its sequences as they were. Errors: of pi_session_feed; UNSUPPORTED
 * where n_part is 0. */
pi_status pi_session_begin_part(pi_session *session, const pi_batch *batch);
pi_status pi_session_end_part(pi_session *session);
/* For another thread: waits until more than `seen` rounds are done, or no more come, and returns how many are done. */
int32_t pi_rounds_wait(const pi_rounds *rounds, int32_t seen);

/* ---- plans ---- */

/* What a budget of device memory holds: of each layer, attention with K and V, norms and predictor, and its hottest
 * neurons; and the output matrix. A plan minimises the expected time of a token; native/plan/plan.h has the rules by
 * which bytes and time are counted. The weights need not be loaded. A plan keeps nothing of the model. */
typedef struct pi_plan pi_plan;

enum { PI_PLAN_DEVICES = 16 }; /* at most */

typedef struct pi_plan_options {
    uint64_t budget_bytes;                   /* of each device; 0: all on the CPU */
    int32_t n_devices;                       /* 0 or 1: one */
    const uint64_t *budgets;                 /* [n_devices] of each device, instead of budget_bytes; or NULL */
    int32_t n_ctx, n_pool, n_seq, n_batch;   /* as in pi_session_options */
    int32_t n_guesses;                       /* the same */
    int32_t type_k, type_v;                  /* pi_kv_type */
    int32_t sparsity;                        /* pi_sparsity that the plan is for */
    int32_t count_neurons;                   /* as in pi_session_options */
    int32_t group;                           /* neurons that move together, or more where a format asks for it */
    double gpu_bytes_per_s, cpu_bytes_per_s; /* rates at which weights are read */
    double pcie_bytes_per_s;                 /* from host to device memory */
    double zero_copy_bytes_per_s;            /* at which a device's kernels read host memory; 0: they do not */
    double handover_us;                      /* device to CPU and back, once a layer */
    double layer_us, ffn_us;                 /* what a layer's, and its hot FFN's, kernels take beyond bytes */
    uint64_t overhead_bytes;                 /* context, code, captured graphs, libraries' workspaces */
    const uint32_t *counts;                  /* [n_layer][n_placed] how often each fired, or NULL */
    uint64_t n_tokens;                       /* tokens that were counted over */
    double active_share;                     /* how often a neuron fires, where there are no counts */
    double overshoot;                        /* neurons predicted per neuron that fires, >= 1 */
} pi_plan_options;
/* No budget; rates of a desktop (CPU 40 GB/s, device 800, PCIe 24). Times and overhead were measured on an H200:
 * hand-over 6 us, kernels 16 + 9 us, 416 MiB of context, code, graphs and libraries. */
pi_plan_options pi_plan_defaults(void);

typedef struct pi_plan_layer {
    int32_t on_device;               /* attention, K and V, norms and predictor are */
    int32_t device;                  /* which; -1: the CPU */
    int32_t predictor_on_device;     /* the plan's mode uses one, and it is */
    int32_t n_hot;                   /* neurons on the device */
    int32_t n_pcie;                  /* neurons of the host's that the device reads by zero-copy while it would wait */
    double active_hot;               /* of those on the device, computed per token, expected */
    double active_pcie, active_cold; /* of a mixture, too: which experts are read by zero-copy a step decides */
    uint64_t kv_bytes, attention_bytes, norm_bytes, predictor_bytes, ffn_bytes; /* on the device */
    double fixed_us; /* attention, K and V, predictor; with attention beside the FFN (Falcon) on a device: predictor */
    double gpu_ffn_us, cpu_ffn_us, handover_us; /* CPU and hand-over run beside the device */
    double us;                                  /* of the layer */
} pi_plan_layer;

typedef struct pi_plan_info {
    int32_t n_layer, n_placed;
    int32_t sparsity; /* never AUTO */
    int32_t n_ctx, n_pool, n_seq, n_batch;
    int32_t has_counts;       /* the plan rests on counts; else on active_share */
    int32_t uses_device;      /* 0: all on the CPU, because the budget is 0 or that is faster */
    int32_t n_layer_device;   /* layers with attention on the device */
    int32_t n_layer_resident; /* of those, with all their neurons */
    int32_t head_on_device;
    int32_t head_device; /* which; -1: the CPU */
    int32_t n_devices;   /* that there are budgets for */
    int64_t n_hot, n_pcie;
    uint64_t kv_bytes, attention_bytes, norm_bytes, predictor_bytes, ffn_bytes;
    uint64_t head_bytes;     /* with the copy of some rows on a device that helps with it */
    uint64_t scratch_bytes;  /* activations, logits, tables */
    uint64_t staging_bytes;  /* buffers through which a prompt's cold weights stream */
    uint64_t overhead_bytes; /* as given */
    uint64_t total_bytes;    /* of all these; at most budget_bytes */
    uint64_t budget_bytes;
    uint64_t min_bytes;    /* the least budget that puts anything on the device */
    uint64_t full_bytes;   /* the budget that holds everything */
    double gpu_us, cpu_us; /* busy per token; partly at the same time */
    double handover_us;    /* all layers' */
    double head_us;        /* output matrix */
    double total_us;       /* of a token */
    double bound_us;       /* no plan within the budget is faster than this; 0 for a restored plan */
    double tokens_per_s;   /* one sequence, its context half full */
    double active_hot, active_pcie, active_cold; /* neurons computed per token */
    double stream_bytes;                         /* weights of the layers that are not on the device */
    double prompt_us; /* what reading those over PCIe takes: at least this per n_batch tokens of a prompt */
} pi_plan_info;

/* One device's share of a plan: a range of layers. */
typedef struct pi_plan_device {
    int32_t first_layer, n_layers; /* that have their attention there, among neighbours that may be the CPU's */
    uint64_t budget_bytes;
    uint64_t scratch_bytes, staging_bytes, overhead_bytes;
    uint64_t total_bytes; /* these three and all that lies there; at most budget_bytes */
} pi_plan_device;

/* Deterministic; well below 0.1 s for 80 layers of 28672 neurons. counts are read during the call only. Errors:
 * ARGUMENT (ranges; a mode that the model does not have; a budget below min_bytes: the message says what would do),
 * UNSUPPORTED (a model that devices cannot compute), MEMORY. */
pi_status pi_plan_new(const pi_model *model, const pi_plan_options *options, pi_plan **out);

/* A placement that was saved, or made elsewhere. */
typedef struct pi_placement {
    const uint8_t *on_device; /* [n_layer] attention, K and V, norms and predictor are */
    const int32_t *n_hot;     /* [n_layer] */
    const int32_t *hot;       /* ids of all layers' hot neurons, one layer after the other, ascending in each */
    int32_t head_on_device;
    const int32_t *device; /* [n_layer + 1] of each layer on a device, and of the head; NULL: all on the first */
    const int32_t *n_pcie; /* [n_layer], or NULL: none */
    const int32_t *pcie;   /* ids as in hot */
} pi_placement;
/* The plan of a placement: checked, and priced with these options. Errors: ARGUMENT (also if it takes more than the
 * budget, or splits neurons that a format holds together), MEMORY. */
pi_status pi_plan_restore(const pi_model *model, const pi_plan_options *options, const pi_placement *placement,
                          pi_plan **out);
void pi_plan_free(pi_plan *plan);
pi_status pi_plan_get_info(const pi_plan *plan, pi_plan_info *out);
pi_status pi_plan_get_layer(const pi_plan *plan, int32_t layer, pi_plan_layer *out);
pi_status pi_plan_get_device(const pi_plan *plan, int32_t device, pi_plan_device *out);
/* Ids of the layer's n_hot hot neurons, ascending. */
pi_status pi_plan_hot(const pi_plan *plan, int32_t layer, int32_t *ids);
/* Ids of the layer's n_pcie neurons that the device reads by zero-copy, ascending. */
pi_status pi_plan_pcie(const pi_plan *plan, int32_t layer, int32_t *ids);

/* ---- machine ---- */

/* What a bug report should say of a machine; "" and 0 for what the system does not tell. */
typedef struct pi_machine_info {
    char cpu[128], os[128], distribution[96], libc[64];
    char container[32];       /* "docker", "podman", "kubernetes", "lxc", "WSL", or "" */
    char huge_pages[16];      /* transparent ones: "always", "madvise", "never" */
    int32_t n_cores;          /* physical, that this process may use */
    int32_t n_logical;        /* logical, that this process may use */
    int32_t n_online;         /* logical, of the machine */
    int32_t threads_per_core; /* 2 with SMT */
    int32_t n_numa;           /* NUMA nodes */
    double cpu_quota;         /* CPUs that the cgroup allows; 0: no limit */
    uint64_t memory_bytes;
    uint64_t memory_free_bytes;  /* that this process can have, its cgroups asked too; the cache of files is free */
    uint64_t memory_limit_bytes; /* of the cgroup; 0: none */
    uint64_t memlock_bytes;      /* that this process may lock; UINT64_MAX: no limit */
} pi_machine_info;
pi_status pi_machine_get_info(pi_machine_info *out);

typedef struct pi_gpu_driver {
    int32_t is_present;   /* libcuda.so.1 can be opened */
    int32_t cuda_version; /* that it serves: 13000 is 13.0 */
    int32_t n_gpus;
    char version[64];  /* "580.159.03" */
    char problem[256]; /* why no device can be used, or "" */
} pi_gpu_driver;
typedef struct pi_gpu {
    char name[128];
    int32_t capability_major, capability_minor, n_sm;
    uint64_t memory_bytes, free_bytes;
    double memory_bytes_per_s; /* bus width times clock */
    int32_t pcie_generation, pcie_lanes;
} pi_gpu;
/* Asks CUDA's driver, if there is one, and fills the first n_gpus of gpu; takes no device memory. It starts the driver in
 * this process (cuInit): a child forked afterwards cannot use CUDA, one that is executed anew can. */
pi_status pi_gpu_probe(pi_gpu_driver *driver, int32_t n_gpus, pi_gpu *gpu);

/* A device (pi_device_kind) as sessions use it. */
typedef struct pi_device_facts {
    char name[128];
    uint64_t memory_bytes, free_bytes; /* once it is open */
    int32_t can_map;                   /* it reads host memory by zero-copy: prompts stream cold weights */
    char no_mapping[256];              /* why not, or "" */
    double read_bytes_per_s;           /* its own memory; this and the next two measured, or 0 */
    double copy_bytes_per_s;           /* from host to device memory */
    double zero_copy_bytes_per_s;      /* its kernels read host memory */
} pi_device_facts;
/* Opens the device, looks and closes it again. model: whose file it shall map, or NULL for other memory. measure: the
 * rates too. Errors: DEVICE (no library, no driver, no such device), MEMORY. */
pi_status pi_device_examine(int32_t kind, int32_t index, const pi_model *model, int32_t measure, pi_device_facts *out);

/* cdef end */

#ifdef __cplusplus
}
#endif
#endif
