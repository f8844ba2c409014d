/* te_device_ops.h - the operations of a device, as arguments: what a program fills in, and what every device (a GPU, the
 * stand-in of ordinary memory) takes. Pointers are device memory; S marks memory that both sides see.
 *
 * The fields behind "by the device" are not the caller's: a device puts there what its kernels need besides, such as room
 * for sums. Zero leaves an option out. */
#ifndef TE_DEVICE_OPS_H
#define TE_DEVICE_OPS_H

#include <stdbool.h>

#include "te_tensor.h"

enum { TE_MAX_PRODUCTS = 4 };

typedef enum te_norm_kind { TE_NO_NORM, TE_RMS_NORM, TE_LAYER_NORM } te_norm_kind;
typedef struct te_norm {
    te_norm_kind kind;
    float eps;
    const float *w, *b; /* [cols]; b may be NULL */
} te_norm;

/* Messages to and from the CPU, in S: 64-bit words, each a value in the lower half and the ticket of its exchange in the
 * upper, so that a value is its own flag. The ticket is *base + add. */
typedef struct te_ticket {
    const uint32_t *base;
    uint32_t add;
} te_ticket;

/* ---- products ---- */

/* One of several products of one input: y[t*ldy + r] = f(w row r . norm(x_t) + bias[r]) + add[t*ld_add + r]. */
typedef struct te_product {
    te_mat w;          /* device layout; all products of an operation have the same cols */
    const float *bias; /* or NULL */
    const float *add;  /* or NULL; may be y */
    size_t ld_add;
    float *y; /* NULL if only marks are wanted */
    size_t ldy;
    int32_t relu;   /* f: max(., 0) */
    uint8_t *mark;  /* or NULL. Bit r of the bytes at mark + t*ld_mark is set where the sum >= threshold. The bytes */
    size_t ld_mark; /* of whole 32-bit words must exist; those behind the last row's byte are not written. No list. */
    float mark_threshold;
    const float *mark_threshold_at; /* if not NULL the threshold */
} te_product;

/* Beside the products: another norm of x, kept on the device, published as words of floats, or both. */
typedef struct te_side {
    te_norm norm;
    float *keep;       /* [n_tok][cols], or NULL */
    uint64_t *publish; /* S [n_tok][cols], or NULL */
    te_ticket ticket;
} te_side;

/* The input of a few tokens in the form that kernels multiply with, made once instead of by every block. x and norm stay
 * as they are where it is used: products of types that take another form read these. */
typedef struct te_prepared {
    const void *v; /* or NULL */
    int32_t type;  /* for matrices of this type, and those that take the same */
} te_prepared;

/* Which rows. list NULL: rows 0 to n-1. Else list[0..count-1], ascending, count = n, or *n_list if that is not NULL
 * (*n_list <= n). Results are indexed by the place in the list. */
typedef struct te_row_list {
    const int32_t *list, *n_list;
    int32_t n;
} te_row_list;

typedef struct te_linear_args {
    const float *x; /* [n_tok] rows of cols floats, ldx apart */
    size_t ldx;
    int32_t n_tok, cols;
    te_norm norm;
    te_product product[TE_MAX_PRODUCTS];
    int32_t n_products; /* 0 if only the side is wanted */
    te_side side;
    int32_t side_type; /* of the matrices that are multiplied with what the side keeps */
    /* by the device */
    te_prepared prepared;
    te_row_list rows; /* of every product; n is ignored where there is no list */
} te_linear_args;

/* ---- attention ---- */

typedef enum te_rope_kind { TE_NO_ROPE, TE_ROPE_NORM, TE_ROPE_NEOX } te_rope_kind;

/* Attention of one layer for n_tok tokens, each of a sequence. K and V of a token are normed, rotated and stored at its
 * position; then its query heads look at positions 0 to pos[t], or at some of these (window). Pool of K and of V:
 * [block][n_head_kv][64][n_embd_head], rows in the file's layout. Tokens of the same sequence must be at consecutive
 * positions, ascending with t. A token with pos < 0 is left out (its result is 0). */
typedef struct te_attention_args {
    const float *q;     /* [n_tok][n_head * n_embd_head] */
    const float *k, *v; /* [n_tok][n_head_kv * n_embd_head] */
    size_t ldq, ldk, ldv;
    int32_t n_tok, n_head, n_head_kv, n_embd_head; /* n_embd_head: even, at most 256 */
    const float *q_norm, *k_norm, *v_norm;         /* [n_embd_head] RMS norm of each head, or NULL */
    int32_t norm_last;                             /* those of q and k come after RoPE */
    float norm_eps, scale;                         /* scores are multiplied by scale */
    float soft_cap;                                /* then they are cap * tanh(score / cap); 0: they stay as they are */
    const float *sinks; /* [n_head] or NULL: one more score of each head, of no position and no V, as it is */
    te_rope_kind rope;
    int32_t n_rot;        /* leading values of a head that are rotated */
    const float *cs;      /* [n_tok][n_rot] cos and sin of each pair */
    const int32_t *pos;   /* [n_tok] */
    const int32_t *table; /* block table: block of position p of token t is table[row[t]*ld_table + p/64] */
    const int32_t *row;   /* [n_tok] the table's row of the token's sequence; NULL: row[t] = t */
    int32_t ld_table;
    void *k_pool, *v_pool;  /* of this layer */
    int32_t type_k, type_v; /* F16, F32, BF16, Q8_0 */
    int32_t n_ctx;          /* positions are below */
    float *out;             /* [n_tok][n_head * n_embd_head] */
    size_t ld_out;
    int32_t window;  /* positions that a token sees, itself the last; 0: all. A GPU takes 8 and more */
    int32_t chunked; /* rather those from the last multiple of the window on */
    /* q is multiplied by 1 + temp_scale * ln(1 + the whole part of (position + temp_first) / temp_length); scale 0: it is
     * not. */
    float temp_scale;
    int32_t temp_first, temp_length;
    int32_t
        n_before;    /* the first so many tokens' K and V are stored, but their results are not wanted: q and out may be
                         anything */
    int32_t grouped; /* so many in front have their sequence's next to them; behind these no two are of one */
    int32_t apart;   /* no two tokens are of one sequence; with `half` the first n_before are left out */
    /* The format of the matrix that the result is multiplied with next; -1: of none, also where anything (a gate, a norm)
     * comes between that changes it first. */
    int32_t next_type;
    const te_linear_args *beside; /* or NULL: a product that is computed, too, at the same time or before */
    /* by the device */
    void *half; /* NULL, or the result once more, in F16: a te_cuda_half of few tokens with so many tiles and words. */
    float *half_scale; /* n_head * n_embd_head is then a multiple of 256 */
    int32_t half_tiles, half_words, half_matrices;
    int32_t early; /* pos, row and table are not written by operations of the same program: they, and the older K and V,
                      are read before the operation in front has finished */
    float *scratch;
    uint32_t *counter;
} te_attention_args;

/* Latent attention of one layer for n_tok tokens, each of a sequence. A token has one row in the pool for all heads, V is a
 * part of it:
 *     row = [the key's n_rot values, rotated | norm(latent)],  stored at the token's position
 *     a head's query = [its last n_rot values, rotated | k_b_h . the others];  scores over positions 0 to pos[t]
 *     out = v_b_h . (sum of latents, weighted)
 * Rotated are neighbours. Pool: [block][64][n_rot + rank]. A token with pos < 0 is left out (its result is 0). Several
 * tokens of a sequence are at consecutive positions. */
typedef struct te_latent_args {
    const float *q;  /* [n_tok][n_head * n_key] */
    const float *kv; /* [n_tok][rank + n_rot]: the latent, then the key's values */
    size_t ldq, ldkv;
    int32_t n_tok, n_head, n_key, n_value, rank, n_rot; /* all but the first two: even */
    const float *norm;                                  /* [rank] RMS norm of the latent */
    float norm_eps, scale;
    const float *cs;      /* [n_tok][n_rot] cos and sin of each pair */
    const int32_t *pos;   /* [n_tok] */
    const int32_t *table; /* as te_attention_args's */
    const int32_t *row;
    int32_t ld_table;
    te_mat k_b, v_b; /* [n_head * rank][n_key - n_rot], [n_head * n_value][rank]; F32, F16 or BF16 */
    void *pool;      /* of this layer */
    int32_t type;    /* F16, F32, BF16, Q8_0 */
    int32_t n_ctx;
    int32_t n_before; /* as te_attention_args's */
    float *query;     /* [n_tok][n_head * (n_rot + rank)] room to work */
    float *gathered;  /* [n_tok][n_head * rank] the same */
    float *out;       /* [n_tok][n_head * n_value]; may be q */
    size_t ld_out;
    float *scratch; /* by the device */
} te_latent_args;

/* ---- blocks with a state ---- */

/* Of the tokens of some sequences, each sequence's one after the other: a causal convolution of each channel,
 *     y = act(b + sum over j of w[j] * (before * x)[the token width - 1 - j back]) * after
 * then, where there are heads, each one's state [n_k][n_v] (q, k and v are columns of y),
 *     state = decay state + k u^T       out = q . state + skip v       u = rate v, by the delta rule rate (v - decay k . state)
 *     decay = exp(a softplus(alpha + dt_b))       rate = sigmoid(beta), without beta softplus(alpha + dt_b)
 * By the delta rule q and k are made vectors of length 1, and q is divided by sqrt(n_k).
 * Sequences: run r has tokens order[run[r]] to order[run[r + 1] - 1], in the order of their positions; it may have none. What
 * a sequence remembers lies in a place: [width - 1][n_channels] of before * x, then [n_head][n_k][n_v]. Where a run begins
 * with position 0 it is zeros, whatever is there. */
typedef struct te_recurrent_args {
    const float *x, *before, *after; /* [n_tok] rows of n_channels floats, ldx apart; before, after: NULL is 1 */
    size_t ldx;
    const float *w, *b; /* [width][n_channels], [n_channels] or NULL */
    int32_t n_channels, width;
    int32_t silu; /* act: x sigmoid(x); else none */
    float *y;     /* [n_tok] rows of n_channels; overlaps nothing */
    size_t ldy;
    int32_t n_head, n_group;  /* n_head 0: y is all. Heads of a group share q and k: those of h % n_group if they are */
    int32_t n_k, n_v, tiled;  /* tiled, else of h / (n_head / n_group) */
    int32_t q_at, k_at, v_at; /* q, k: [n_group][n_k] from these columns on; v: [n_head][n_v] */
    int32_t delta;
    const float *alpha,
        *beta; /* [n_tok] rows, ld_gate apart; that of head h is at h / gate_each * gate_step + h % gate_each */
    size_t ld_gate;
    int32_t gate_each, gate_step;
    const float *a, *dt_b, *skip; /* [n_head]; skip: NULL is 0 */
    float *out;                   /* [n_tok] rows of n_head * n_v; overlaps nothing */
    size_t ld_out;
    int32_t n_tok, n_runs;
    int32_t apart;              /* each token is a run of its own */
    const int32_t *order, *run; /* [n_tok], [n_runs + 1] */
    const int32_t *pos;         /* [n_tok] */
    const int32_t *place;       /* [n_tok] where its sequence's state is, before and afterwards */
    const int32_t *keep;        /* [n_tok] where the state behind it goes, too, or -1 */
    float *state;               /* place p: from p * ld_state on */
    size_t ld_state;
    int32_t
        early; /* by the device: order to state were not written by operations of the same program (te_attention_args) */
} te_recurrent_args;

/* y = norm(x) * act(gate), or norm(x * act(gate)), of n_group groups of `each` values of a token. */
typedef struct te_gate_args {
    const float *x; /* [n_tok] rows of n_group * each floats, ldx apart */
    size_t ldx;
    const float *gate;
    size_t ld_gate;
    int32_t n_tok, n_group, each;
    int32_t silu;                 /* act: x sigmoid(x); else sigmoid(x) */
    const float *norm;            /* RMS norm of a group, or NULL; group g's weights are at g * norm_step */
    int32_t norm_step, norm_last; /* norm_last: the second of the two */
    float norm_eps;
    float *y; /* may be x */
    size_t ldy;
} te_gate_args;

/* ---- feed-forward ---- */

/* Which rows a token wants: those whose score reaches *threshold. The score of row j is fc2_j . z_t, or
 * (cols - 2 * differing signs) / cols of the signs of its weights (bits of negative ones, 64 to a word) and of h_t. With
 * neither, every row is wanted. */
typedef struct te_scores {
    te_mat fc2; /* w NULL: none */
    const float *z;
    size_t ldz;
    const uint64_t *sign; /* [rows][(cols + 63) / 64], or NULL */
    const float *h;       /* [n_tok] rows of cols floats, ldh apart */
    size_t ldh;
    int32_t cols;
    const float *threshold;
} te_scores;

/* Marks of the wanted ones of n_rows rows, published as words of 32 marks. They are made in n_parts parts, the same
 * number for every operation on a device; part p has rows [n_rows p / n_parts, n_rows (p + 1) / n_parts) and
 * ((n_rows + n_parts - 1) / n_parts + 31) / 32 words of its own. A token has n_parts times as many words. */
typedef struct te_marks_args {
    te_scores scores;
    int32_t n_rows, n_tok;
    uint64_t *publish; /* S [n_tok][words] */
    te_ticket ticket;
} te_marks_args;

/* Beside a product with W: y = W x + b (a x); a.w NULL: W alone. */
typedef struct te_adapter {
    te_mat a, b;
} te_adapter;

/* y_t (+)= sum over the wanted neurons j of down_j * act(gate_j . x_t) * (up_j . x_t + up_bias[j]), x normed; without a
 * gate, of down_j * act(up_j . x_t + up_bias[j]). Only merge reads y, once: until then a device may keep it elsewhere, as
 * parts that have not been added up.
 * With a list there are n_list neurons, read where they lie in host memory: the j-th is row list[j] of gate, up and down,
 * whose rows are as in the file and at any even address, and j everywhere else (scores, up_bias, fired). A device may
 * compute them beside those of the call behind, if that adds to y. The list is read as early as weights are. */
typedef struct te_ffn_args {
    const float *x; /* [n_tok] rows of up.cols floats, ldx apart */
    size_t ldx;
    int32_t n_tok;
    te_norm norm;          /* the same in all calls that add to one y */
    te_mat gate, up, down; /* gate.w NULL: ungated; else of up's type and size. down: a row per row of up, or w NULL: */
    te_mat down_out;       /* [n_embd][rows of up], where down is stored by output */
    const int32_t *list;   /* [n_list], or NULL; all three matrices are of one type then */
    int32_t n_list;
    /* Not with a list or scores. gate, up: a is [rank][cols], b has a row per row of up. down: a has a row of rank values
     * per row of up (it is stored transposed), b is [n_embd][rank]. */
    te_adapter gate_adapter, up_adapter, down_adapter;
    const float *up_bias;
    int32_t act; /* te_activation */
    float threshold;
    te_xielu curve;
    int32_t skip; /* neurons whose activation is 0: up and down are read where the gate lets a token through */
    te_scores scores;
    float *y; /* [n_tok][n_embd] */
    int32_t add;
    int32_t staged, stage; /* the matrices come from loads of the buffer `stage` */
    uint32_t *fired;       /* [neurons], or NULL: counts of tokens with h != 0 are added */
    uint32_t *counts;      /* [3], or NULL: pairs of (neuron, token) asked for, with up read, with h != 0 are added */
    /* by the device */
    te_prepared prepared;
    int32_t zero_copy;              /* a list in host memory */
    int32_t first, beside;          /* two operations, one behind the other, that are computed side by side */
    const float *gate_add, *up_add; /* added to the products of token t with row j: [t*ld_add + j], or NULL */
    size_t ld_add;
    float *
        h; /* [n_tok] rows of n floats (n: neurons), ldh apart: the result if down.w is NULL or store_h is set, else room */
    size_t ldh;
    int32_t store_h;
    uint32_t *bits; /* room for n_tok * ((n + 31) / 32) words; with scores only */
    float *partial; /* the sum over b of partial[b][t][c] is y[t][c] */
} te_ffn_args;

/* gate = act(gate - least) * up where gate is above least = mean + cut * deviation of the token's n gates, else 0. */
typedef struct te_cut_args {
    float *gate;     /* [n_tok] rows of n values, ld apart; the result, too */
    const float *up; /* the same */
    size_t ld;
    int32_t n_tok, n;
    float cut;
    int32_t act; /* te_activation */
    float threshold;
    uint32_t *fired, *counts; /* as te_ffn_args's */
} te_cut_args;

/* ---- experts ---- */

typedef enum te_gating {
    TE_GATING_SOFTMAX,
    TE_GATING_SIGMOID,
    TE_GATING_CHOSEN /* the choice is by the scores themselves, weights are the softmax over the chosen ones, of which
                        -inf counts as the least number */
} te_gating;

/* A token's experts: those n_used with the largest p + choice_b, p being the softmax or sigmoid of its scores, the first
 * of equal ones. Of groups (n_expert / n_group neighbours each) only the n_group_used best count; a group is as good as
 * its two best experts together. weight = scale * p, with `normed` divided by the sum of the chosen p (at least 1e-20).
 *
 * place[e] says where an expert is: k from 0 on: the k-th place of the device's memory; below 0: the (-1 - place)-th of
 * those that are not there. Of a token's routes to these the device may keep some, to read their experts in host memory:
 * the first n_kept[m], m being how many there are. */
typedef struct te_route_args {
    const float *score; /* [n_tok] rows of n_expert, ld_score apart */
    size_t ld_score;
    int32_t n_tok, n_expert, n_used, n_group, n_group_used;
    int32_t gating, normed; /* te_gating */
    float scale;
    const float *choice_b; /* [n_expert], or NULL */
    const float *factor;   /* [n_expert] that weights are multiplied by at last, or NULL */
    const int32_t *place;  /* [n_expert] */
    int32_t *expert;       /* [n_tok][n_used] results, the largest p + choice_b first */
    float *weight;         /* [n_tok][n_used] */
    uint32_t *uses;        /* [n_expert], or NULL: added to */
    int32_t loads;         /* loads that follow wait for the choice, and bring only what it wants */
    const int32_t *n_kept; /* [n_used + 1], or NULL: none */
    int32_t *kept;         /* [n_tok][n_used] with n_kept: 1 for routes that are kept, else 0 */
    int32_t *n_missing;    /* or NULL: set to the number of routes whose expert is not there, and that are not kept */
    uint64_t *publish; /* S [n_tok][n_used][2], or NULL: the expert, or -1 if it is there or kept; the weight's bits */
    te_ticket ticket;
} te_route_args;

/* y[t*ldy + c] = (add[t*ld_add + c] + bias[c]) + sum over b of partial[b][t][c] + words[t*cols + c]. With a norm what is
 * added to add is normed: y_t = add_t + norm(bias + sum + words_t). */
typedef struct te_merge_args {
    const float *partial; /* what ffn left in its y, or NULL */
    int32_t n_parts, n_tok, cols;
    const float *add, *bias; /* or NULL */
    size_t ld_add;
    float *y;
    size_t ldy;
    const uint64_t *words; /* or NULL: S [n_tok][cols], waited for until they carry the ticket */
    te_ticket ticket;
    const int32_t *expected; /* or NULL: where *expected is 0 there are no words */
    te_norm norm;
    float *normed; /* with a norm: room for n_tok * cols floats, which may be partial's */
    float scale;   /* with a norm: what y_t becomes is multiplied by it; 0: it is not */
    /* by the device. A wait ends where *cancelled (S) is not 0, or after limit_ns, which sets it; what was not there is 0. */
    uint32_t *cancelled;
    uint64_t limit_ns;
} te_merge_args;

/* y_t (+)= sum over those experts of token t that lie in the given places of
 *     weight * (down_e . (act(gate_e . x_t + gate_b) * (up_e . x_t + up_b)) + down_b),
 * without a gate of weight * (down_e . act(up_e . x_t + up_b) + down_b). on_input: the weight is of x_t instead, there
 * is a gate, and there are no biases.
 * Place k's rows are k * n_ff ... of gate, up and down_t, and k * n_embd ... of down. As with te_ffn_args only merge reads y.
 * Of down_t the rows of silent neurons need not be read.
 * With a choice that is made first, its results are for later calls, as if route had been called. With a merge, whose partial
 * is y, that is done behind it, as if it had been called.
 * With `kept` it is the routes that are kept, of a few tokens; place k is then expert k, whose rows are read where they lie
 * in host memory, as in the file and at any even address. The call behind it that adds those in places says `beside`, and
 * a device may compute both at once. */
typedef struct te_experts_args {
    const float *x; /* [n_tok] rows of up.cols floats, ldx apart: normed already, or: */
    size_t ldx;
    te_norm norm; /* of a single token; an RMS norm */
    int32_t n_tok, n_expert, n_used, n_ff;
    te_mat gate, up, down; /* of n_places experts; gate.w NULL: none; down.cols is n_ff; or down.w NULL, and: */
    te_mat down_t;         /* a row of n_embd per row of up, where down is stored by neuron; not without a gate */
    const float *gate_b, *up_b, *down_b; /* or NULL: of all experts by number, [n_expert][n_ff] or [n_expert][n_embd] */
    int32_t n_places;
    const int32_t *place;   /* [n_expert], as te_route_args's */
    int32_t missing, first; /* missing: the matrices are those of the first-th, ... of the experts that are not there */
    const int32_t *expert;  /* [n_tok][n_used], of route */
    const float *weight;    /* [n_tok][n_used] */
    const int32_t *kept;    /* [n_tok][n_used] of route, or NULL */
    const te_route_args *choice; /* or NULL: it is made */
    const te_merge_args *merge;  /* or NULL: it is done */
    int32_t act;                 /* te_activation */
    float threshold;
    int32_t on_input; /* weights are of the input */
    float *y;         /* [n_tok][n_embd] */
    int32_t add;
    int32_t beside;        /* adds to the call in front, which has `kept` and the same routes */
    int32_t staged, stage; /* the matrices come from loads of the buffer `stage`; prompts only */
    uint32_t *counts;      /* [3], or NULL: pairs of (neuron, token) asked for, with up read, with h != 0 are added */
    /* by the device */
    float *h; /* room for n_tok * n_used rows of n_ff floats, ldh apart */
    size_t ldh;
    float *partial; /* the sum over b of partial[b][t][c] is y[t][c] */
} te_experts_args;

#endif
