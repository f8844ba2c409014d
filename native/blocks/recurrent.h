/* recurrent.h - what blocks with a state share: their keys, their convolution and their heads' scan. Each of these takes
 * the tokens of a sequence one after the other, whatever they are computed with, so that how a prompt is cut changes no
 * bits here. All members of the team call what takes a pi_block_run. */
#ifndef PI_BLOCK_RECURRENT_H
#define PI_BLOCK_RECURRENT_H

#include "../model/bind.h"
#include "ops.h"

/* Binds "blk.L.NAME.weight" [n_channels][width] and the bias beside it. bias: it must be there; else it may not. */
pi_status pi_bind_conv(pi_model *m, int32_t l, const char *name, int32_t n_channels, int64_t width, bool bias,
                       pi_conv *out);
/* Sizes of a block's heads, of keys ssm.*: n_group, n_head, n_k and n_v; FORMAT if they do not fit together. */
pi_status pi_bind_heads(pi_model *m, pi_recurrent *s, int64_t *width);
/* Gives the block its place in the state, and room for a token's numbers in s->state_in, _z, _gates and _out. FORMAT if
 * there is no memory for so large a state. */
pi_status pi_bind_state(pi_model *m, pi_recurrent *s, int64_t in, int64_t z, int64_t gates, int64_t out);

/* What conv and scan read and write of the chunk's tokens: c->x, before, after, ldx, y, ldy and silu are the caller's. */
void pi_run_conv(const pi_block_run *r, const pi_recurrent *b, te_conv *c);
/* How one head is computed: q, k, v, ldx, decay, rate, ld_gate, skip, delta, y and ldy of head h. */
typedef void pi_head_of(const pi_block_run *r, int32_t h, te_scan *s);
void pi_run_scan(const pi_block_run *r, const pi_recurrent *b, pi_head_of *head);

/* y += out . state_out, of the tokens that are wanted. */
void pi_run_output(const pi_block_run *r, const te_mat *out);

/* Bytes of the block's weights, and of the chunk's sequences' states, which are read and written. */
int64_t pi_recurrent_bytes(const pi_session *s, const pi_block *b);

/* log(1 + e^x) */
float pi_softplus(float x);

#endif
