/* te_kernels.h - the contract of all CPU kernels. One table per instruction set; every entry is filled (a set that
 * has nothing better
 * takes a lower set's entry). Kernels are plain functions of one thread: no allocation, no locks, no errors.
 *
 * Weights: te_mat (te_tensor.h). Float formats (F32 F16 BF16) take any cols >= 1; block formats a multiple of their
 * block.
 * No alignment of weights is assumed; no byte outside the named rows' own [0, row bytes) is read (a file may end
 * there).
 * Tolerance, against doubles over the same (possibly quantised) inputs: |y - ref| <= 8 eps32 sqrt(cols) sum|w x|. */
#ifndef TE_KERNELS_H
#define TE_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../core/te_tensor.h"
#include "../core/te_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows that will be wanted next: kernels may prefetch them while they work. m NULL: none. */
typedef struct te_ahead {
    const te_mat *m;
    te_rows rows;
} te_ahead;

/* Up to 32 tokens, and which of them want a row: bit t of bits[i] says that token t wants the row at place i of the
 * list; bits NULL: all want all. */
typedef struct te_tokens {
    const uint32_t *bits;
    int32_t n;
} te_tokens;
static inline bool te_wants(te_tokens who, int32_t i, int32_t t) { return !who.bits || (who.bits[i] >> t & 1) != 0; }

/* What one weight format can do. Activations are packed once per input vector into the format's own layout ("act":
 * floats as they are, or
 * int8 per 32 with scales, in the order in which the weights unpack). An act is 64-byte aligned. */
typedef struct te_row_kernels {
    size_t (*act_bytes)(int32_t cols);
    void (*act_pack)(const float *x, int32_t cols, void *act);
    /* y[i] = dot(row i of rows, x) for i in 0..rows.n-1 (compact: y is indexed by the position in rows, not by the
     * row). */
    void (*dot)(const te_mat *m, te_rows rows, te_ahead ahead, const void *act, float *y);
    /* acc += sum_i a[i] * row i. acc: te_acc_floats(cols) floats, 64-byte aligned, zeroed by the caller, element
     * order private to the kernel.
     * Rows with a[i] == 0 change nothing, so that skipping them gives the same bits (-0 aside). */
    void (*axpy)(const te_mat *m, te_rows rows, te_ahead ahead, const float *a, float *acc);
    /* dot and axpy for several tokens, each row read once. The bits of a token's results are those that dot and axpy
     * give it alone. act, y, a, acc: of token 0; token t's are act_stride bytes, ldy, lda, acc_stride floats further
     * on. Results that are not wanted stay as they are. */
    void (*dot_batch)(const te_mat *m, te_rows rows, te_ahead ahead, te_tokens who, const void *act, size_t act_stride,
                      float *y, size_t ldy);
    void (*axpy_batch)(const te_mat *m, te_rows rows, te_ahead ahead, te_tokens who, const float *a, size_t lda,
                       float *acc, size_t acc_stride);
    /* y[c] += acc's column c for lo <= c < hi; lo is a multiple of 16, hi a multiple of 16 or cols. */
    void (*acc_add)(const float *acc, int32_t cols, int32_t lo, int32_t hi, float *y);
    /* out[0..n-1] = weights c0..c0+n-1 of a row; c0 and n multiples of the block. */
    void (*to_f32)(const void *row, int32_t c0, int32_t n, float *out);
    /* NULL unless the format can be written (F32, F16, BF16, Q8_0): n floats to a row. For the KV cache. Bits as
     * te_quantize_row. */
    void (*from_f32)(const float *x, void *row, int32_t n);
} te_row_kernels;

/* 256 columns, and room for sixteen sums that belong to several of them. */
static inline size_t te_acc_floats(int32_t cols) { return ((size_t)cols + 255) / 256 * 272; }

typedef enum te_activation {
    TE_RELU,
    TE_DRELU,
    TE_SILU,
    TE_GELU,
    TE_GELU_TANH,
    TE_CLAMPED,
    TE_RELU2,
    TE_XIELU
} te_activation; /* GELU: the exact erf form; GELU_TANH: x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)); both to 1e-6.
                  * CLAMPED has a gate: g sigmoid(1.702 g) (u + 1), with g = min(gate, 7) and u = up within -7 and 7.
                  * RELU2: relu(x)^2. XIELU: te_xielu, without a gate and not by glu */

/* Whether neurons can be silent: where such an activation is 0, nothing else of the neuron is read. */
static inline bool te_is_relu(te_activation act) { return act == TE_RELU || act == TE_DRELU || act == TE_RELU2; }

/* gemm for block formats whose bit 1 << te_type is set, with activations rounded to int8 and integer sums. types 0: the
 * functions are NULL. [0]: rounded per 32, as act_pack rounds them. [1], formats of 256: each 32 with the step of the
 * largest of 256, divided by the largest power of two with which 127 steps still reach the largest of the 32; the sums
 * of 16 or 32 activations that minima are multiplied with are off by up to 2^-15 of a block's largest or, if that is
 * more, of the step of 256, which comes to the tolerance. */
enum { TE_INT8_WAYS = 2 };
typedef struct te_int8_kernels {
    uint64_t types;
    bool by_token; /* packed tokens follow each other, pack_bytes(1, k) each, and may be copied one by one */
    size_t (*pack_bytes)(int32_t n_tok, int32_t k);
    void (*pack)(const float *x, size_t ldx, const int32_t *row, int32_t n_tok, int32_t k, int32_t t0, int32_t t1,
                 void *px);
    void (*gemm)(const te_mat *m, int32_t r0, int32_t r1, const void *px, int32_t n_tok, float *y, size_t ldy,
                 const float *bias, bool add, void *scratch);
} te_int8_kernels;

/* The first two products of gated neurons. */
typedef struct te_gated {
    const te_mat *gate, *up;
    const float *gate_b, *up_b; /* or NULL */
    te_activation act;
    float threshold;
} te_gated;

/* A span of the positions that queries are compared with. */
typedef struct te_attend {
    const te_mat *k, *v; /* [n_blocks] rows are positions; all but the last have `block` of them, a multiple of 32 */
    int32_t n_blocks, block;
    int32_t span;           /* the most positions of a span */
    int32_t n_rows;         /* queries */
    const void *q;          /* packed, by pack */
    const int32_t *lo, *hi; /* [n_rows] a query sees the span's positions lo..hi-1 */
    float scale, cap;       /* of scores; cap > 0: soft_cap */
    bool first;             /* nothing was gathered before */
    void *memory;           /* attend_bytes, 64-byte aligned */
} te_attend;

/* A block of matrix product for many tokens; see te_ops.h for the collective operation that uses it.
 * gemm:   y[t*ldy + r] (+)= dot(row r, x[t]) for r0 <= r < r1, all n_tok tokens
 * gemm_t: y[t*ldy + c] (+)= sum over all rows r of h[t][r] * row r [c], for c0 <= c < c1  (multiples of 256, or cols)
 * px is what pack (for gemm_t: pack_t, k = rows of the matrix) made of the activations ([n_tok] rows of k floats,
 * ldx floats apart; token t is row row[t] of x, or row t if row is NULL) by the whole
 * team, each member its token share [t0, t1) (multiples of pack_unit, or n_tok). scratch: scratch_bytes, per
 * thread. begin/end bracket a thread's use (AMX tile state).
 * glu: hidden values act(gate . x + gate_b) * (up . x + up_b) of n_tok tokens, as pack would make it of those that gemm and
 * te_kernels.glu give, with the same bits; ph: 64-byte aligned. Adds to *n_open gates above the threshold (not counted for
 * activations without a silent side), to *n_fired hidden values that are not 0. NULL: by gemm, glu and pack.
 * attend: attention by products. Adds a span to what a->memory has gathered; a query's numbers do not depend on others.
 * attend_end: y[r] = sum over positions p of exp(scale * (score[r][p] - top[r])) * v[p], total[r] the sum of these
 * exponentials, to the rounding of gemm's inputs; of cap > 0 scale is 1, and scores are capped. NULL: by gemm and gemm_t. */
typedef struct te_gemm_kernels {
    int32_t min_tok;                        /* from how many tokens on gemm_t beats the row kernels */
    uint16_t linear_min_tok[TE_TYPE_LIMIT]; /* from how many tokens on gemm beats the row kernels, by format */
    int32_t pack_unit;                      /* tokens */
    int32_t row_unit;                       /* rows per panel that suits the caches; r0 is a multiple of it */
    size_t (*pack_bytes)(int32_t n_tok, int32_t k);
    void (*pack)(const float *x, size_t ldx, const int32_t *row, int32_t n_tok, int32_t k, int32_t t0, int32_t t1,
                 void *px);
    void (*pack_t)(const float *h, size_t ldh, const int32_t *row, int32_t n_tok, int32_t k, int32_t t0, int32_t t1,
                   void *ph);
    size_t (*scratch_bytes)(int32_t n_tok, int32_t k);
    void (*begin)(void);
    void (*end)(void);
    void (*gemm)(const te_mat *m, int32_t r0, int32_t r1, const void *px, int32_t n_tok, float *y, size_t ldy,
                 const float *bias, bool add, void *scratch);
    void (*gemm_t)(const te_mat *m, int32_t c0, int32_t c1, const void *ph, int32_t n_tok, float *y, size_t ldy,
                   const float *bias, bool add, void *scratch);
    void (*glu)(const te_gated *a, const void *px, int32_t n_tok, void *ph, int64_t *n_open, int64_t *n_fired,
                void *scratch);
    size_t (*attend_bytes)(int32_t n_rows, int32_t d, int32_t dv, int32_t span);
    void (*attend)(const te_attend *a);
    void (*attend_end)(const te_attend *a, float *y, size_t ldy, float *top, float *total);
    te_int8_kernels int8[TE_INT8_WAYS]; /* no format is in both */
} te_gemm_kernels;

/* A causal convolution of each channel over the last `width` tokens, of n tokens, which are rows of x and y:
 *     y = after * act(b + sum_j w[j] * (before * x) of token i - width + 1 + j)
 * last: before * x of the width - 1 tokens before the first, the oldest first; afterwards of those before what follows. */
enum { TE_CONV_WIDTH = 8 }; /* 2 to this */
typedef struct te_conv {
    const float *w, *b; /* [width][ld], [n_channels] or NULL */
    float *last;        /* [width - 1][ld] */
    size_t ld;
    int32_t width, n_channels;
    bool silu;                       /* act: x sigmoid(x); else none */
    const float *x, *before, *after; /* rows ldx floats apart; before, after: NULL is 1 */
    size_t ldx;
    float *y; /* may be x */
    size_t ldy;
    const int32_t *row; /* [n] */
    int32_t n;
} te_conv;

/* A head's state, taken through n tokens, n >= 1, which are rows of all that follows:
 *     state = decay state + k u^T       y = q . state + skip v       u = rate v, by the delta rule rate (v - decay k . state)
 * state: [n_k][n_v]; q, k [n_k], v, y [n_v]; decay and rate are single numbers. y overlaps nothing. */
typedef struct te_scan {
    float *state;
    size_t ld_state;
    int32_t n_k, n_v;
    const float *q, *k, *v;
    size_t ldx;
    const float *decay, *rate;
    size_t ld_gate;
    float skip;
    bool delta;
    float *y;
    size_t ldy;
    const int32_t *row; /* [n] */
    int32_t n;
} te_scan;

typedef struct te_kernels {
    const char *name;                  /* "scalar" "avx2" "avx2_vnni" "avx512" "avx512_bf16" "amx" "neon" "neon_dot" */
    te_row_kernels row[TE_TYPE_LIMIT]; /* by te_type; all entries NULL for types that cannot be dequantised */
    te_gemm_kernels gemm;              /* for every type that row[] knows */
    te_gemm_kernels floats; /* the same by products of floats; neither integers nor bf16, glu and attend NULL */

    /* y may be x in all of these. */
    void (*rms_norm)(const float *x, const float *w, float eps, int32_t n,
                     float *y); /* y = x / sqrt(mean(x^2) + eps) * w */
    void (*layer_norm)(const float *x, const float *w, const float *b, float eps, int32_t n,
                       float *y); /* b may be NULL */
    void (*softmax)(float *x, int32_t n,
                    float scale); /* x = exp(scale*(x - max)) / sum; n >= 1; -inf entries become 0 */
    void (*add)(const float *x, int32_t n, float *y); /* y += x */
    /* Sign bits of n floats in (n+63)/64 words: bit i%64 of word i/64 is set where x[i] < 0; the last word's other bits
     * are 0. */
    void (*sign_pack)(const float *x, int32_t n, uint64_t *bits);
    /* y[i] = mean of the products of the n signs of row i and of x, in -1..1; rows [n_rows] of sign_pack's words. */
    void (*sign_dot)(const uint64_t *rows, int32_t n_rows, const uint64_t *x, int32_t n, float *y);
    /* h[i] = act(g[i]) * u[i] (DRELU: relu(g) * relu(u)); g NULL: h = act(u). threshold: RELU passes g > threshold,
     * else 0 (FATReLU). */
    void (*glu)(te_activation act, float threshold, const float *g, const float *u, int32_t n, float *h);
    /* h[i] = the curve at x[i]; h may be x. To 1e-6, and 2e-7 alpha_n. */
    void (*xielu)(const te_xielu *curve, const float *x, int32_t n, float *h);

    /* All rows of m, a few short ones, against n vectors of floats, as attention has them; activations of block formats
     * are not rounded here. next: m->n_rows rows, as far apart, that will be wanted next; NULL: none.
     * rows_dot: y[i * ldy + r] = dot(row r, x[i])      rows_sum: y[i * ldy + c] += sum_r a[i * lda + r] * row r [c] */
    void (*rows_dot)(const te_mat *m, const void *next, const float *x, size_t ldx, int32_t n, float *y, size_t ldy);
    void (*rows_sum)(const te_mat *m, const void *next, const float *a, size_t lda, int32_t n, float *y, size_t ldy);
    /* A softmax in parts: *top becomes the larger of itself (-inf at first) and x's largest, x = exp(scale*(x - *top));
     * returns their sum. scale > 0. */
    float (*exp_sum)(float *x, int32_t n, float scale, float *top);
    /* x = cap * tanh(scale * x / cap). cap > 0. */
    void (*soft_cap)(float *x, int32_t n, float scale, float cap);

    /* Tokens one after the other; no number depends on how many are computed together, or on other channels and columns. */
    void (*conv)(const te_conv *c);
    void (*scan)(const te_scan *s);
} te_kernels;

/* The table for this machine, chosen once: the best that the processor and the operating system allow, or the one
 * that the environment
 * variable POWERINFER_ISA names (scalar; x86-64: avx2, avx2_vnni, avx512, avx512_bf16, amx; 64-bit ARM: neon, neon_dot). NULL with a sentence in
 * te_last_error if that name is unknown to this build or cannot run here. */
const te_kernels *te_cpu_kernels(void);
/* A table by name, whatever was chosen; NULL if it cannot run here. */
const te_kernels *te_cpu_kernels_named(const char *name);

#ifdef __cplusplus
}
#endif
#endif
