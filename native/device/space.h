/* space.h - how much of a device's memory matrices and kernels take: no device is needed to ask. Devices lay out rows and
 * allocations by it. What kernels take between them is the most that any device asks for. */
#ifndef PI_SPACE_H
#define PI_SPACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes: a row is rounded up to the one, an allocation to the other. */
enum { PI_DEVICE_ROW = 16, PI_DEVICE_ALIGN = 256 };
static inline uint64_t pi_space_row(uint64_t n_bytes) {
    return (n_bytes + PI_DEVICE_ROW - 1) / PI_DEVICE_ROW * PI_DEVICE_ROW;
}
static inline uint64_t pi_space(uint64_t n_bytes) {
    return (n_bytes + PI_DEVICE_ALIGN - 1) / PI_DEVICE_ALIGN * PI_DEVICE_ALIGN;
}
/* Of a matrix; row_bytes as in the file. */
static inline uint64_t pi_space_matrix(uint64_t row_bytes, uint64_t n_rows) {
    return pi_space(pi_space_row(row_bytes) * n_rows);
}
/* Whether kernels can read rows in host memory, which lie so many bytes apart, as they are. */
bool pi_space_reads_rows(int32_t type, uint64_t stride);
/* Whether attention can be for the last `window` positions only (0: for all). Tokens that are computed together must see
 * each other. */
bool pi_space_window(int32_t window);
/* Which format matrices of single heads have on a device: floats stay, others become F16. */
int32_t pi_space_heads(int32_t type);
/* Whether a row's product with a vector has the same bits whichever rows are multiplied with it: not where a device's
 * threads share out what all rows take (Q4_0, vendor/cuda/lean.cu). */
bool pi_space_rows_alone(int32_t type);
/* Of a format of which products of many tokens may be faster together than of half as many and the rest: of how many there are
 * kernels (vendor/cuda/wide_many.cuh, wide_most.cuh), at most PI_WIDE. 0: of no more than of any other format. */
int32_t pi_space_wide(int32_t type);
/* Whether latent attention can be of such sizes. */
bool pi_space_latent(int32_t rank, int32_t n_rot, int32_t head_key, int32_t head_value);

/* What kernels are allowed for work space. At most PI_SMALL_BATCH are computed together with the CPU, with so many partial
 * sums of one token's feed-forward and of attention; chunks of more are matrix products, whose weights are converted in
 * pieces of at most so many bytes, and whose hidden values are made of so many bytes and neurons at a time. Cold weights of
 * such a chunk stream through two buffers, each at most PI_STAGE_BYTES: 0.6 ms of PCIe 5 is more than a transfer takes to
 * start. Shorter chunks of tokens are computed where the weights lie. */
enum {
    PI_SMALL_BATCH = 8,
    PI_MANY = 64,              /* sequences whose next tokens are a recorded program */
    PI_WIDE = 256,             /* tokens whose products are faster together, of F16 on some devices */
    PI_WIDE_QUANTISED = 240,   /* of other formats there */
    PI_WIDE_EXPERTS = 192,     /* of mixtures: experts' kernels take no more (vendor/cuda/experts_prompt.cu) */
    PI_GRAPH_BYTES = 56 << 10, /* of such a program, for each layer: 42 KiB measured, and up to 10 of maps */
    PI_LOGITS_BYTES = 128
        << 20, /* rows of logits that leave a device together: memory of the CPU, too, which is pinned */
    PI_PARTS = 384,
    PI_SPLITS = 32,
    PI_SHARES = 8,   /* parts of attention of a prompt's token: of PI_MANY tokens, and fewer each */
    PI_SHARED = 256, /* of so many at most */
    PI_PIECE_BYTES = 64 << 20,
    PI_HIDDEN_BYTES = 64 << 20,
    PI_HIDDEN_ROWS = 16384,
    PI_STAGES = 2,
    PI_STAGE_BYTES = 32 << 20,
    PI_FETCH_BYTES = 4 << 20 /* what experts pass through that come to a device in the background */
};

/* Partial sums of a feed-forward of n tokens: of several, half as many blocks each make one, where a row is work for
 * several blocks. */
static inline uint64_t pi_parts(uint64_t n_tok, uint64_t n_embd) {
    const uint64_t most = PI_PARTS, each = n_tok > 1 && n_embd >= 4096 ? most / 2 : most;
    return n_tok * each > most ? n_tok * each : most;
}

/* How many rows of logits those are, of chunks of n_batch tokens. */
static inline uint64_t pi_space_rows(uint64_t n_batch, uint64_t n_vocab) {
    const uint64_t n = PI_LOGITS_BYTES / (sizeof(float) * n_vocab);
    return n < 1 ? 1 : n < n_batch ? n : n_batch;
}
/* How many stay on the CPU's side of a device that are made by several runs: one of each sequence, or twice as many bytes. */
static inline uint64_t pi_space_kept_rows(uint64_t n_rows, uint64_t n_seq, uint64_t n_vocab) {
    const uint64_t most = 2 * (uint64_t)PI_LOGITS_BYTES / (sizeof(float) * n_vocab), n = n_seq < most ? n_seq : most;
    return n > n_rows ? n : n_rows;
}
/* Bytes of the rows of n_seq sequences' next tokens, as far as they are made together. */
static inline uint64_t pi_space_logits(uint64_t n_seq, uint64_t n_batch, uint64_t n_vocab) {
    const uint64_t n = pi_space_rows(n_batch, n_vocab);
    return sizeof(float) * n_vocab * (n_seq < n ? n_seq : n);
}

/* Neurons of a longer chunk's feed-forward that are computed at once, where down is stored by neurons. */
static inline int32_t pi_hidden_rows(int32_t n_ff, int32_t n_tok, bool gated) {
    const int64_t most = PI_HIDDEN_BYTES / (int64_t)sizeof(float) / n_tok / (gated ? 2 : 1) / 256 * 256;
    const int32_t rows = most < 256 ? 256 : most < PI_HIDDEN_ROWS ? (int32_t)most : PI_HIDDEN_ROWS;
    return n_ff < rows ? n_ff : rows;
}

/* What kernels are asked for: tokens of a chunk, and of the model. */
typedef struct pi_space_shape {
    uint64_t n_tok, n_embd, n_ff, n_head, n_embd_head;
    uint64_t n_inner;                       /* values of all heads of a block with a state; 0: there is none */
    uint64_t sign_words;                    /* of a sign predictor; 0: it is none */
    uint64_t adapter_rank;                  /* of a feed-forward's adapters; 0: there are none */
    uint64_t n_expert, n_used, n_ff_expert; /* 0: no experts. n_ff_expert: the largest, shared ones too */
    bool gated;
    bool predicted;        /* neurons are named by a predictor */
    bool by_output;        /* some layer's down is stored by output */
    uint64_t mapped_bytes; /* host memory that they read */
    uint64_t matrix_bytes; /* the largest pi_space_converted of a matrix that they multiply with */
} pi_space_shape;
/* Bytes of a matrix of a format whose products with a prompt want it in F16 first, a piece at a time. */
uint64_t pi_space_converted(int32_t type, uint64_t n_rows, uint64_t cols);
/* Floats between attention's kernels: of sequences' next tokens, or of a prompt's. */
uint64_t pi_space_attention(const pi_space_shape *s);
/* What kernels take between them, at most. */
uint64_t pi_space_kernels(const pi_space_shape *s);

#ifdef __cplusplus
}
#endif

#endif
