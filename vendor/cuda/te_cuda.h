/* te_cuda.h - the tensor engine on NVIDIA GPUs: a device, its memory and graphs, and kernels for decoding (1 to 8
 * tokens at a time).
 *
 * The library (libpowerinfer_cuda.so) exports one function, te_cuda_table(), which returns everything below as a table of
 * functions. Kernels know rows, lists of rows, masks and blocks of positions.
 *
 * Device layout of a matrix (te_layout.h). Rows of `stride` bytes: those of the file's row, in planes of fields where
 * the format has several, rounded up to 16, zeros behind. `pack` makes this layout from the file's, and gathers rows or
 * columns while it does.
 *
 * Operations are put on the device's stream and return at once. Between capture_begin and capture_end they are recorded
 * instead, and graph_launch replays them; whatever changes from token to token (x, positions, tables, masks, lists and
 * their lengths) is read from device memory, after the operation's predecessor has finished. Weights, however, are read
 * before that: what writes them must have been waited for. Every operation gives the same bits for the same inputs on
 * the same device: sums are in a fixed order, there are no float atomics.
 *
 * Device pointers of floats are 16-byte aligned, and leading dimensions (ldx ...) multiples of 4. Errors: a status; the
 * sentence is last_error(). Nothing is printed, nothing ends the process. A te_cuda is used by one thread at a time,
 * except for `memory` and `failed`. */
#ifndef TE_CUDA_H
#define TE_CUDA_H

#include <stddef.h>
#include <stdint.h>

#include "../core/te_device_ops.h"
#include "../core/te_status.h"
#include "../cpu/te_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TE_CUDA_VERSION = 16,
    TE_CUDA_MAX_TOK = 8,
    TE_CUDA_WIDE_TOK = 64,
    TE_CUDA_ROW = 8192,   /* columns of a token that a block holds, at most */
    TE_CUDA_HIDDEN = 768, /* of all routes of a tile, in experts_wide.cuh */
    TE_CUDA_KV_BLOCK = 64,
    TE_CUDA_SLOTS = 8,
    TE_CUDA_FETCHES = 128
};

typedef struct te_cuda te_cuda;
typedef struct te_cuda_graph te_cuda_graph;

typedef struct te_cuda_info {
    char name[128];
    int32_t index, major, minor; /* compute capability */
    int32_t n_sm;
    int32_t driver;   /* CUDA version the driver knows, 1000 * major + 10 * minor */
    int32_t runtime;  /* CUDA version this library was built with */
    uint64_t n_bytes; /* memory of the device */
    uint64_t l2_bytes;
    int32_t maps_host;          /* kernels read host memory in place */
    int32_t registers_readonly; /* file mappings can be registered */
} te_cuda_info;

typedef struct te_cuda_memory {
    uint64_t free_bytes, total_bytes; /* of the device, as the driver says: other programs count */
    uint64_t owned_bytes;             /* allocated through this te_cuda */
} te_cuda_memory;

/* ---- operations ----
 *
 * Their arguments are those of te_device_ops.h; here is what kernels for decoding need besides.
 *
 * linear: 1 to TE_CUDA_MAX_TOK tokens; cols is read where there is no product. marks: in mark_parts() parts.
 * ffn: of a few tokens, all but the last sum: partial takes ffn_parts() * n_tok * cols floats, which merge adds up;
 * of y, add, stage, down_out and the adapters it knows nothing. merge: n_parts of partial are added.
 * route: of any number of tokens. experts: of a few tokens, all but the last sum: to h and partial (n_used * n_tok * n_embd
 * floats); of y, add and stage it knows nothing. Behind another operation than route, expert and place must be older.
 * attention: scratch is attention_floats() floats; counter is attention_counters() words that are 0 before
 * the first use and are left 0. */

/* The input of two to eight tokens as kernels multiply with it, to te_prepared's v. */
typedef struct te_cuda_prepare {
    const float *x; /* as te_linear_args's */
    size_t ldx;
    int32_t n_tok, cols;
    te_norm norm;
    int32_t type;
    void *v; /* prepared_bytes(), 16-byte aligned; NULL: only the side is wanted */
    te_side side;
    int32_t side_type; /* of the matrices that take what the side keeps */
    void *side_v;      /* that, prepared, or NULL */
} te_cuda_prepare;

typedef enum te_cuda_ffn_mode {
    TE_CUDA_DENSE, /* all rows of gate and up are read */
    TE_CUDA_SKIP   /* RELU, DRELU and RELU2: gate first; up only where a token's activation is not 0 */
} te_cuda_ffn_mode;

/* The first half of a feed-forward: h[t*ldh + j] = act(gate_j . x_t) * (up_j . x_t + up_bias[j]), without a gate
 * act(up_j . x_t + up_bias[j]), x normed. With a mask (bits as te_product's marks; words of 32 bits, ld_mask in
 * bytes) only neurons that are set for some token are computed, gate and up at once unless the mode is SKIP; h is 0
 * where a token's bit is not set. A mask and a list exclude each other. */
typedef struct te_cuda_hidden {
    const float *x;
    size_t ldx;
    int32_t n_tok;
    te_norm norm;
    te_prepared prepared;
    te_mat gate, up; /* gate.w NULL: ungated; the same type */
    const float *up_bias;
    te_activation act;
    float threshold;
    te_xielu curve;
    te_cuda_ffn_mode mode;
    te_row_list rows;
    const uint8_t *mask;
    size_t ld_mask;
    const float *gate_add, *up_add; /* added to the products of token t with row j: [t*ld_add + j], or NULL. No list */
    size_t ld_add;
    float *h;
    size_t ldh;
    uint32_t *fired;  /* [rows of up], or NULL: counts of tokens with h != 0, added to, by row id */
    uint32_t *counts; /* [3], or NULL, added to: pairs of (neuron, token) asked for, with up read (TE_CUDA_DENSE: all),
                         with h != 0 */
} te_cuda_hidden;

/* The second half: sums of rows of down, stored transposed: partial[b][t][c] = sum over part b of the rows of
 * h[t*ldh + j] * down_j[c]. Rows with h == 0 for all tokens are not read. partial holds parts() * n_tok * cols
 * floats; `merge` adds them up. rows: as the hidden's. all: most h are expected not to be 0. */
typedef struct te_cuda_down {
    te_mat w;
    const float *h;
    size_t ldh;
    int32_t n_tok;
    te_row_list rows;
    int32_t all;
    float *partial;
} te_cuda_down;

/* y_t (+)= row id[t] + offset of a table, in the file's layout, in device or mapped host memory. */
typedef struct te_cuda_embed {
    te_mat table;
    const int32_t *id; /* [n_tok] on the device; negative: y_t is 0 */
    int32_t offset;
    int32_t n_tok;
    int32_t add;
    float *y;
    size_t ldy;
} te_cuda_embed;

/* dst row i, block j = src row (rows ? rows[i / each] * each + i % each : i), block (blocks ? blocks[j] : j), from the
 * file's layout to the device's. src: device or mapped host memory, 2-byte aligned (F32: 4; blocks of an odd number of
 * bytes: 1). dst: n_rows and cols of the result. Lists are on
 * the device. */
typedef struct te_cuda_pack {
    te_mat dst;
    const void *src;
    size_t src_stride;
    const int32_t *rows, *blocks;
    int32_t each;           /* neighbours that an entry of rows names; 0: 1 */
    const uint32_t *wanted; /* or NULL. Loads with rows may leave those out whose entry e has wanted[e] 0 */
} te_cuda_pack;

/* ---- prompts: any number of tokens at a time ----
 *
 * te_cuda_halve makes F16 input of floats, te_cuda_gemm multiplies it with matrices, te_cuda_act puts the activation
 * between the products of a feed-forward. The products are those of cuBLASLt where set_blas() has found it, else our own. */

/* Input of products: value c of token t is *scale * v[t * ld + c]. scale is a power of two, 1 unless the values of the
 * matrix leave the range of F16. With tiles it is that of products of a few tokens, as half_form() says: a value's place
 * is another one (wide.cuh), and each token has a scale of its own. */
typedef struct te_cuda_half {
    void *v;       /* F16 [n_tok][ld], 16-byte aligned; zeros behind the last column. With tiles [8 * tiles][ld] */
    size_t ld;     /* a multiple of 8; with tiles, of 256 */
    float *scale;  /* n_tok + 1 floats: the scale, and room; with tiles n_tok scales */
    int32_t tiles; /* of eight tokens, or 0 */
    int32_t words; /* which values stand together */
    int32_t
        matrices; /* with tiles: values lie in matrices of 8 x 8, as products want them; 0: as products of experts do */
} te_cuda_half;

/* to = norm(x), or max(norm(x), 0); where they are wanted, the same in another form and as floats: of input with tiles and
 * an RMS norm or none. */
typedef struct te_cuda_halve {
    const float *x;
    size_t ldx;
    int32_t n_tok, cols;
    te_norm norm;
    int32_t relu;
    te_cuda_half to, also; /* also: with tiles, or v NULL */
    float *keep;           /* [n_tok][cols], or NULL */
} te_cuda_halve;

/* Scores of a router, in floats: y_t = w . norm(x_t) + bias, of rows of F32, for more than TE_CUDA_MAX_TOK
 * tokens; an RMS norm or none. With a side, of the same tokens, halve is done at once. */
typedef struct te_cuda_scores {
    const float *x;
    size_t ldx;
    int32_t n_tok, cols; /* cols: a multiple of 4 */
    te_norm norm;
    te_mat w;
    const float *bias;
    float *y;
    size_t ldy;
    const te_cuda_halve *side; /* or NULL */
} te_cuda_scores;

/* Products as te_linear_args's, all with w's rows, or all transposed: y_t = sum over rows j of x_tj * row j of w. Then x
 * has as many columns as w has rows, y and bias as many as w has columns. y is needed, relu excludes add. Weights that are
 * not F16 are converted into scratch, piece by piece; gemm_scratch() says how large it is best and must be at least.
 * Of input with tiles (half_form() for the type of each w) weights are read as they are: no scratch, no marks; transposed
 * only where that is in matrices, one at a time, of input for F16 in matrices, which may be tiles of more tokens. */
typedef struct te_cuda_gemm {
    te_cuda_half x;
    int32_t n_tok, transposed;
    te_product product[TE_MAX_PRODUCTS];
    int32_t n_products;
    void *scratch; /* 256-byte aligned */
    size_t n_scratch;
    const struct te_cuda_act
        *act;          /* NULL, or, of input with tiles: product 0 is up, 1 gate, and only act's result is written,
                                      with tiles. up is room for hidden values; no gate, bias of products, mask or ids */
    uint32_t *counter; /* with act: n_tok + 1 words that are 0 before and after */
} te_cuda_gemm;

/* The middle of a feed-forward: h = act(gate) * (up + up_bias), without a gate act(up + up_bias), 0 where a token's bit in
 * the mask is not set. gate and up: results of gemm, with a column for each of n neurons. */
typedef struct te_cuda_act {
    const float *gate, *up; /* gate NULL: ungated */
    size_t ld_gate, ld_up;
    int32_t n_tok, n;
    const int32_t *id; /* [n] on the device: the neuron of each column, for up_bias, mask and fired; NULL: the column */
    const float *up_bias;
    te_activation act;
    float threshold;
    te_xielu curve;
    const uint8_t *mask; /* or NULL; as te_cuda_hidden's */
    size_t ld_mask;
    te_cuda_half to;
    uint32_t *fired, *counts; /* as te_cuda_hidden's, or NULL */
} te_cuda_act;

/* Experts of many tokens: te_experts_args's y (add: added to), of its input in F16. Of x, ldx, stage, h and partial nothing
 * is read. Hidden values are made of n_ff_once neurons at a time, sums of n_embd_once columns: multiples of 64, or all. */
typedef struct te_cuda_prompt_experts {
    te_experts_args of;
    te_cuda_half x;
    int32_t n_ff_once, n_embd_once;
    int32_t *lists; /* prompt_experts_words() words */
    float *values;  /* n_tok * n_used * the larger of the two, each rounded up to a multiple of 4 */
    te_cuda_half h; /* of n_tok * n_used rows, for n_ff_once values; its scale has room for one of each row; or: */
    float
        *hidden; /* as many rows of floats, n_ff_once up to 4 apart, or NULL. Of x with tiles and a down by output that
                       is faster where n_ff_once is at most TE_CUDA_HIDDEN */
} te_cuda_prompt_experts;

/* ---- the table ---- */

typedef struct te_cuda_api {
    int32_t version; /* TE_CUDA_VERSION */
    size_t size;     /* sizeof(te_cuda_api) */

    const char *(*last_error)(void);

    /* Devices. count: 0 with a status that says why, if there is no driver or it is too old for this library. */
    te_status (*count)(int32_t *n);
    te_status (*open)(int32_t index, te_cuda **out);
    void (*close)(te_cuda *d); /* waits for the stream, frees what is left */
    te_status (*info)(te_cuda *d, te_cuda_info *out);
    te_status (*memory)(te_cuda *d, te_cuda_memory *out);
    void *(*stream)(te_cuda *d); /* the cudaStream_t */

    /* Memory. alloc: 256-byte aligned. Copies and fills are ordered on the stream; the host side of an asynchronous copy
     * is pinned, and stays until the stream has passed. host_alloc: pinned, mapped (the same address on both sides).
     * host_register: a read-only mapping of a file, or memory of the program, becomes readable for kernels at *device.
     * UNSUPPORTED where driver or device refuse. */
    te_status (*alloc)(te_cuda *d, size_t n_bytes, void **out);
    te_status (*free)(te_cuda *d, void *p);
    te_status (*upload)(te_cuda *d, void *dst, const void *src, size_t n_bytes);
    te_status (*download)(te_cuda *d, void *dst, const void *src, size_t n_bytes);
    te_status (*copy)(te_cuda *d, void *dst, const void *src, size_t n_bytes); /* within the device */
    te_status (*fill)(te_cuda *d, void *dst, int32_t byte, size_t n_bytes);
    te_status (*host_alloc)(te_cuda *d, size_t n_bytes, void **out);
    te_status (*host_free)(te_cuda *d, void *p);
    te_status (*host_register)(te_cuda *d, const void *p, size_t n_bytes, const void **device);
    te_status (*host_unregister)(te_cuda *d, const void *p);

    /* Graphs. Between begin and end nothing but operations may be called. */
    te_status (*capture_begin)(te_cuda *d);
    te_status (*capture_end)(te_cuda *d, te_cuda_graph **out); /* also after an operation failed: then that error */
    te_status (*graph_launch)(te_cuda *d, te_cuda_graph *g);
    void (*graph_free)(te_cuda_graph *g);
    /* Until the stream is empty. TIMEOUT after `seconds` (the work goes on); DEVICE if it failed. */
    te_status (*wait)(te_cuda *d, double seconds);
    /* Marks a point of the stream in one of 8 slots; after wait, the milliseconds between two marks. */
    te_status (*mark)(te_cuda *d, int32_t slot);
    te_status (*elapsed)(te_cuda *d, int32_t from, int32_t to, double *ms);
    /* Kernels may start while their predecessor drains (the default where the device can). */
    void (*set_overlap)(te_cuda *d, int32_t on);

    /* Weights. */
    int32_t (*has_type)(int32_t type);
    size_t (*stride)(int32_t type, int32_t cols); /* bytes of a row in device layout; 0: no such row */
    te_status (*pack)(te_cuda *d, const te_cuda_pack *op);

    /* Operations. prepared_bytes: of te_cuda_prepare, for up to 8 tokens; 0: matrices of this type take x as it is. */
    size_t (*prepared_bytes)(int32_t type, int32_t cols);
    te_status (*prepare)(te_cuda *d, const te_cuda_prepare *op);
    te_status (*linear)(te_cuda *d, const te_linear_args *op);
    te_status (*hidden)(te_cuda *d, const te_cuda_hidden *op);
    int32_t (*parts)(te_cuda *d, const te_mat *down, int32_t n_rows); /* of partial, for at most n_rows rows */
    te_status (*down)(te_cuda *d, const te_cuda_down *op);
    int32_t (*mark_parts)(te_cuda *d);
    te_status (*marks)(te_cuda *d, const te_marks_args *op);
    int32_t (*ffn_parts)(te_cuda *d, const te_ffn_args *op); /* of partial; 0 if down.w is NULL */
    te_status (*ffn)(te_cuda *d, const te_ffn_args *op);
    te_status (*route)(te_cuda *d, const te_route_args *op);
    int32_t (*expert_parts)(te_cuda *d, const te_experts_args *op); /* of partial */
    te_status (*experts)(te_cuda *d, const te_experts_args *op);
    te_status (*merge)(te_cuda *d, const te_merge_args *op);
    size_t (*attention_floats)(te_cuda *d, const te_attention_args *op);
    size_t (*attention_counters)(te_cuda *d, const te_attention_args *op);
    int32_t (*attention_halves)(te_cuda *d,
                                const te_attention_args *op); /* whether it can write its result in F16, too */
    int32_t (*attends_beside)(const te_linear_args *op); /* whether a single token's attention takes it as `beside` */
    te_status (*attention)(te_cuda *d, const te_attention_args *op);
    /* Of any number of tokens; scratch is latent_floats() floats. */
    size_t (*latent_floats)(te_cuda *d, const te_latent_args *op);
    te_status (*latent)(te_cuda *d, const te_latent_args *op);
    /* Of any number of tokens. */
    te_status (*recurrent)(te_cuda *d, const te_recurrent_args *op);
    te_status (*gate)(te_cuda *d, const te_gate_args *op);
    te_status (*cut)(te_cuda *d, const te_cut_args *op);
    te_status (*embed)(te_cuda *d, const te_cuda_embed *op);
    te_status (*add)(te_cuda *d, const float *x, float *y, int64_t n); /* y += x */
    /* best[t] = the index of the largest of n values at x + t*ldx; the lowest of equal ones, 0 if all are NaN. */
    te_status (*argmax)(te_cuda *d, const float *x, size_t ldx, int32_t n, int32_t n_tok, int32_t *best);

    /* Prompts. set_blas: opens cuBLASLt at `path` (version 12 or 13); NULL: our own products from now on. gemm_by: what is
     * used, "cuBLASLt 13.1.0" or "own". gemm_scratch: for a gemm of one product with w; *least: below that it is refused. */
    te_status (*set_blas)(te_cuda *d, const char *path);
    const char *(*gemm_by)(te_cuda *d);
    size_t (*gemm_scratch)(te_cuda *d, const te_mat *w, int32_t n_tok, size_t *least);
    /* The form of n_tok tokens' input for matrices of this type with so many columns: v and scale NULL, tiles not 0 where
     * that is faster, which it is for TE_CUDA_MAX_TOK + 1 to TE_CUDA_WIDE_TOK tokens, of some types more. */
    te_cuda_half (*half_form)(te_cuda *d, int32_t type, int32_t n_tok, int32_t cols);
    te_status (*halve)(te_cuda *d, const te_cuda_halve *op);
    te_status (*scores)(te_cuda *d, const te_cuda_scores *op);
    te_status (*gemm)(te_cuda *d, const te_cuda_gemm *op);
    te_status (*act)(te_cuda *d, const te_cuda_act *op);
    size_t (*prompt_experts_words)(const te_experts_args *op);
    te_status (*prompt_experts)(te_cuda *d, const te_cuda_prompt_experts *op);
    /* As attention, of any number of tokens, those of a sequence next to each other; scratch:
     * prompt_attention_floats() floats; counter and early are not used. */
    size_t (*prompt_attention_floats)(te_cuda *d, const te_attention_args *op);
    te_status (*prompt_attention)(te_cuda *d, const te_attention_args *op);
    /* Matrices of host memory on their way while earlier operations still run, in TE_CUDA_SLOTS slots. load: packs on a
     * stream of its own, after what was on the stream at the slot's last load_free; several may go into a slot. Lists
     * have been waited for, and list a row's blocks in ascending order. load_ready: what follows on the stream waits for
     * the slot's loads. In a recording every slot that is loaded must be made ready before the end. load_after: what is on
     * the stream now ends before loads that follow begin (the first load ever does so by itself). */
    te_status (*load)(te_cuda *d, int32_t slot, const te_cuda_pack *op);
    te_status (*load_ready)(te_cuda *d, int32_t slot);
    te_status (*load_free)(te_cuda *d, int32_t slot);
    te_status (*load_after)(te_cuda *d);
    /* Where the sources of loads are used in turn: load_mark marks the loads put so far in one of 2 places, load_passed
     * waits until those have ended (TIMEOUT after `seconds`); at once where nothing was marked. Not in a recording. */
    te_status (*load_mark)(te_cuda *d, int32_t place);
    te_status (*load_passed)(te_cuda *d, int32_t place, double seconds);

    /* Matrices of pinned host memory into the device's layout, beside all that runs: on a stream of their own, one after
     * another, at most TE_CUDA_FETCHES, through `room` of the device (n_room bytes, the same for all). dst is in use by
     * nothing else. No lists. fetch_open gets what they need, which may wait for the device; otherwise the first fetch does.
     * fetched: how many have ended so far. One thread at a time uses these three, beside the one that uses the others. */
    te_status (*fetch_open)(te_cuda *d);
    te_status (*fetch)(te_cuda *d, const te_cuda_pack *op, void *room, size_t n_room);
    te_status (*fetched)(te_cuda *d, uint32_t *n);

    /* DEVICE if the device's work has failed. Any thread may ask, at any time. */
    te_status (*failed)(te_cuda *d);
} te_cuda_api;

#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const te_cuda_api *te_cuda_table(void);

#ifdef __cplusplus
}
#endif
#endif
