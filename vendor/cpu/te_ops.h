/* te_ops.h - operations of a whole team. Every member calls them with the same arguments; each computes its share.
 * Unless said otherwise they do NOT end in a barrier: call te_barrier before another member's share is read, and
 * before an input of the operation is overwritten. Results are the same bits for the same inputs and number of
 * members. */
#ifndef TE_OPS_H
#define TE_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../core/te_pool.h"
#include "../core/te_status.h"
#include "../core/te_tensor.h"
#include "te_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Scratch memory of a team: per member and shared. Sized once for the largest operation it will see. */
typedef struct te_workspace te_workspace;
typedef struct te_workspace_limits {
    int32_t n_threads;
    int32_t max_tok;  /* tokens in one operation */
    int32_t max_cols; /* weights per row of any matrix, and rows of any matrix of te_op_linear_t */
    int32_t max_rows; /* neurons of any FFN */
    bool mixture;     /* room for te_op_experts_gemm and te_op_linear_floats, too */
} te_workspace_limits;
te_status te_workspace_new(const te_kernels *k, te_workspace_limits limits, te_workspace **out);
void te_workspace_free(te_workspace *w);
size_t te_workspace_bytes(const te_workspace *w);

/* Which kernels compute a product of several tokens. By row kernels each token gets the bits that it gets alone, and
 * those of te_op_ffn; by GEMM (te_kernels.h) the same bits however many others are computed with it. */
typedef enum te_way {
    TE_BY_COUNT, /* what is faster for so many tokens: from linear_min_tok (transposed: min_tok) on GEMM */
    TE_BY_ROWS,
    TE_BY_GEMM
} te_way;

/* One product of several that share the input: y[t*ldy + r] = dot(w row r, x[t]) + bias[r], r in 0..w.n_rows-1 (added
 * to y if add). Row kernels read each row once for all tokens. */
typedef struct te_linear {
    te_mat w;
    const float *bias; /* NULL: none */
    float *y;
    size_t ldy;
    bool add;
    te_way way;
} te_linear;
/* x: [n_tok] rows, ldx floats apart. n_tok >= 1. May use barriers inside. y must not overlap x. */
void te_op_linear(te_team *team, te_workspace *ws, const te_linear *products, int32_t n_products, const float *x,
                  size_t ldx, int32_t n_tok);

/* The same of one product with few rows, as a router's, by products of floats: x is not rounded, whatever the format. A
 * token gets the same bits however many others there are. The workspace must be of a mixture. */
void te_op_linear_floats(te_team *team, te_workspace *ws, const te_linear *product, const float *x, size_t ldx,
                         int32_t n_tok);

/* While this member waits for others, it fetches up to n_bytes of what it will read first in te_op_linear, of products with
 * these matrices by row kernels. */
void te_op_linear_ahead(te_team *team, const te_mat *const *w, int32_t n, size_t n_bytes);

/* y[t*ldy + c] (+)= bias[c] + sum_r h[t*ldh + r] * w[r][c]: a product with a matrix that is stored transposed
 * (ffn_down_t). */
void te_op_linear_t(te_team *team, te_workspace *ws, const te_mat *w, const float *h, size_t ldh, int32_t n_tok,
                    const float *bias, float *y, size_t ldy, bool add, te_way by);

/* The fused feed-forward over a list of neurons. Per neuron j of rows and token t with
 * mask[t*ld_mask + j] != 0 (mask NULL: all):
 *     gated:   g = gate_j . x_t;  if skip and act(g) == 0: done, up and down are not read for this token
 *              u = up_j . x_t;  h = act(g) * u   (DRELU: relu(g) * relu(u))
 *     ungated: h = act(up_j . x_t + up_bias[j])
 *     y_t += h * down_j      (not read if skip and h == 0 for all tokens)
 * gate_add and up_add, if not NULL: [t*ld_add + j] of them is added to gate_j . x_t and up_j . x_t.
 * skip is allowed for RELU, DRELU and RELU2 only; with skip false all rows of the list are read (verification, SiLU).
 * hidden, if not NULL: h is stored, hidden[t*ld_hidden + j] (only entries of the list and mask are written). If down.w
 * is NULL, that is all.
 * x: [n_tok][cols]. y: [n_tok][cols], added to. One or a few tokens: cost is one pass over the rows in memory
 * whatever n_tok (a pass takes up to 32 tokens; more are taken in as many passes as it needs).
 * Contains one barrier, or none where h is stored; ends without one. Neurons are shared out by position in the list,
 * contiguous parts, so that the sums have a fixed order; with a NULL row list (all neurons) skip true and false give the
 * same bits for a RELU layer. A token's sum has the bits that it has alone where the list is NULL or by_neuron is set. */
typedef struct te_ffn {
    te_mat gate; /* gate.w NULL: ungated */
    te_mat up;
    te_mat down; /* stored transposed: row j belongs to neuron j */
    const float *up_bias;
    te_activation act;
    float threshold; /* of RELU: passes g > threshold */
    te_xielu curve;  /* of XIELU */
} te_ffn;
typedef struct te_ffn_counts { /* this member's part; sum over members */
    int64_t listed;            /* (neuron, token) pairs asked for */
    int64_t computed;          /* of those, whose up row (ungated: down row) was used; all unless skip */
    int64_t fired;             /* of those, with h != 0 */
    int64_t rows;  /* weight rows read (gate, up and down counted each, once per pass however many tokens) */
    int64_t bytes; /* of those rows */
} te_ffn_counts;
/* Columns [lo, hi) of token t's sum, y[lo] to y[hi - 1]; valid during the call. */
typedef void te_ffn_sink(void *ctx, int32_t t, int32_t lo, int32_t hi, const float *y);
typedef struct te_ffn_io {
    const float *x;
    size_t ldx;
    int32_t n_tok;
    const uint8_t *mask;
    size_t ld_mask;
    /* Instead of mask, for up to 32 tokens: bit t of tokens[i] says that token t wants the row at place i of the list. */
    const uint32_t *tokens;
    /* Shared out beforehand: member i has the n_of[i] neurons from place i * room of the list on. NULL: equal shares.
     * rows.n is how many they are together. */
    const int32_t *n_of;
    int32_t room;
    bool by_neuron;   /* shared out by the neurons' numbers: as even, only for long lists that are ascending */
    bool is_packed;   /* te_op_ffn_pack has packed x */
    bool packed_once; /* then: te_op_ffn_pack_token has, every token, for all members */
    float *y;
    size_t ldy;
    te_ffn_sink *sink; /* instead of y: each member hands its columns of the sum over, as soon as it has them */
    void *sink_ctx;
    float *hidden;
    size_t ld_hidden;
    /* Of one token with hidden: what is stored for the row at place i also goes to listed[place[i]] (place NULL: i). */
    float *listed;
    const int32_t *place;
    const float *gate_add, *up_add;
    size_t ld_add;
    uint32_t *fired; /* [rows of up]: the tokens with h != 0 are added, or NULL */
} te_ffn_io;
void te_op_ffn(te_team *team, te_workspace *ws, const te_ffn *f, te_rows rows, bool skip, const te_ffn_io *io,
               te_ffn_counts *counts);
/* Of one token whose hidden values te_op_ffn has stored (io's listed, [rows.n]), after a barrier: the sum over the listed
 * rows of down, in their order, to io's sink. Each member adds up columns of its own, so that the bits do not depend on who
 * computed the hidden values, nor on the number of members. Ends without a barrier. counts: added to. */
void te_op_ffn_down(te_team *team, te_workspace *ws, const te_mat *down, te_rows rows, const te_ffn_io *io,
                    te_ffn_counts *counts);
/* This member's columns then; false if the format's rows cannot be cut so finely. */
bool te_ffn_columns(const te_team *team, const te_mat *down, int32_t *lo, int32_t *hi);
/* What te_op_ffn does before it looks at the list, for callers that have the list to wait for: packs this member's own
 * copy of up to 32 tokens' x (io's x, ldx and n_tok), which members may have in places of their own. */
void te_op_ffn_pack(const te_team *team, te_workspace *ws, const te_ffn *f, const te_ffn_io *io);
/* The same of token t, by one member for all; a barrier before te_op_ffn. */
void te_op_ffn_pack_token(te_workspace *ws, const te_ffn *f, const te_ffn_io *io, int32_t t);

#ifdef __cplusplus
}
#endif
#endif
