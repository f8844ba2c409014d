/* chunk.h - how batches are cut into chunks, and which kernels compute each of their tokens. Only chunk.c knows the
 * numbers behind that. */
#ifndef PI_CHUNK_H
#define PI_CHUNK_H

#include "../state/state.h"

static inline int32_t pi_batch_seq(const pi_batch *b, int32_t i) { return b->seq ? b->seq[i] : 0; }
static inline int32_t pi_batch_kind(const pi_batch *b, int32_t i) {
    if (!b->kind) return i + 1 == b->n_tokens ? PI_TOKEN_GENERATED : PI_TOKEN_PROMPT;
    return b->kind[i];
}
static inline bool pi_batch_has_logits(const pi_batch *b, int32_t i) { return pi_batch_kind(b, i) != PI_TOKEN_PROMPT; }

/* A batch with what is known of each of its tokens. */
typedef struct pi_cut {
    const pi_batch *batch;
    const int32_t *pos; /* [n_tokens] positions in their sequences */
    uint8_t *by_row;    /* [n_tokens] computed by row kernels, as in decoding; the others by matrix products */
} pi_cut;

/* Fills c->by_row. of_seq: room for 3 * n_seq numbers. */
void pi_chunk_choose_kernels(const pi_session *s, const pi_cut *c, int32_t *of_seq);
/* How many tokens, of prompts and next ones of several sequences, are computed together at most, so that devices' weights
 * are read once for both; 0: none are, since devices have not all of the model, or prompts have other neurons. */
int32_t pi_chunk_mixed(const pi_session *s);
/* How many tokens from first on are computed together. */
int32_t pi_chunk_length(const pi_session *s, const pi_cut *c, int32_t first);
/* Fills s->chunk with tokens first..first+n-1. *row: where their logits begin; moved behind them. */
void pi_chunk_fill(pi_session *s, const pi_cut *c, int32_t first, int32_t n, int32_t *row);
/* Behind the chunk: checkpoints of sequences whose last token in it is a prompt's for matrix products. A device also takes
 * many generated tokens as such, which want none. */
void pi_chunk_keep(pi_session *s, const pi_cut *c);

/* pi_session_feed (feed.c), of which the caller holds the lock. check: every token of a batch; leaves in to[seq] the length each
 * sequence will have. undo: its sequences are as they were before it, as far as they can be. */
pi_status pi_feed_locked(pi_session *s, const pi_batch *b);
pi_status pi_feed_check(const pi_session *s, const pi_batch *b, int32_t *to, int32_t *n_logits);
void pi_feed_undo(pi_session *s, int32_t n, const int32_t *seq, const int32_t *pos);

/* part.c, with the lock held. settle: what stands in front of every call that changes sequences: a part that is under way is
 * computed. Of what it is for: settle_seq where it has tokens of that sequence, settle_copy where it writes to a block that
 * has some of the sequence's first n positions, settle_feed where the batch is no step that may stand between its layers.
 * look: behind rounds that had some of its layers; returns how many are left. */
pi_status pi_part_settle(pi_session *s);
pi_status pi_part_settle_seq(pi_session *s, int32_t seq);
pi_status pi_part_settle_copy(pi_session *s, int32_t seq, int32_t n);
pi_status pi_part_settle_feed(pi_session *s, const pi_batch *b);
int32_t pi_part_look(pi_session *s);

#endif
