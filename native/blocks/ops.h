/* ops.h - what the kinds of blocks share: norms, products, adapters, taps, and the one door to the residual stream. All
 * members of the team call these. */
#ifndef PI_BLOCK_OPS_H
#define PI_BLOCK_OPS_H

#include "../state/state.h"

/* One row of n_embd values. */
void pi_norm_row(const pi_model *m, const pi_norm *w, const float *x, float *y);
/* Where the normed input of a block lies, [n_tok][n_embd]; makes this member's share of it, of tokens `from` and later.
 * Blocks side by side that have one norm share one input. */
float *pi_block_input(const pi_block_run *r);
void pi_make_input(const pi_block_run *r, int32_t from);

/* te_op_linear for tokens t0 ... t0+n-1 of the chunk, whose first rows are x and the products' y: prompt tokens by GEMM,
 * the others by row kernels. */
void pi_linear(pi_session *s, te_team *team, const te_linear *products, int32_t n_products, const float *x, size_t ldx,
               int32_t t0, int32_t n);

/* Bytes that a member fetches while it waits for others: what a short wait allows, and what the second cache keeps beside the
 * rows that are read before them. */
enum { PI_AHEAD = 128 << 10 };
/* What members read first in the block behind this one, or of the head, is fetched by those who wait for others from now on; for
 * generated tokens. To be called before the block's last operation. */
void pi_ahead(const pi_block_run *r);

/* Adds an adapter's part of a product, whose own part is already in y, or not at all. x: n_tok rows, ldx floats apart; y
 * the same; way: as te_linear's. Begins and ends with a barrier; d NULL or without matrices: does nothing. */
void pi_adapt(pi_session *s, te_team *team, const pi_adapter *d, const float *x, size_t ldx, int32_t n_tok, te_way way,
              float *y, size_t ldy);
/* The same for a layer's adapter of one matrix and all tokens of the chunk. */
void pi_adapt_chunk(pi_session *s, te_team *team, const pi_layer *layer, int32_t which, const float *x, size_t ldx,
                    float *y, size_t ldy);
/* The embedding's adapter, of the chunk's tokens; ends with a barrier. */
void pi_adapt_embedding(pi_session *s, te_team *team);

/* Copies a member's share of the chunk's rows of n floats to a tap, in the order of the batch; tap NULL: nothing. */
void pi_tap_rows(const pi_session *s, const te_team *team, const float *rows, int32_t n, float *tap);

/* The door to the residual stream: what a block gives is added to the rows [n_tok][n_embd] that open returns, and is in x
 * when close has ended. Without a norm behind the block these rows are x itself. A barrier must lie between open and what
 * adds; close begins with one where it has work to do, and ends without. */
float *pi_residual_open(const pi_block_run *r);
void pi_residual_close(const pi_block_run *r);

#endif
