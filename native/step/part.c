/* part.c - a part of prompts that is computed a few layers at a time, in front of rounds. Whoever wants to feed or to change
 * its sequences, or to feed many tokens, computes what is left of it first: so nobody else has to know of it. */
#include <stdlib.h>
#include <string.h>

#include "../hybrid/hybrid.h"
#include "chunk.h"

static void forget(pi_session *s) {
    free(s->part.seq);
    s->part.seq = s->part.pos = NULL;
    s->part.n_tok = 0;
    pi_hybrid_part_forget(s->hybrid);
}

int32_t pi_part_look(pi_session *s) {
    if (!s->part.n_tok) return 0;
    const int32_t left = pi_hybrid_part_left(s->hybrid);
    if (left > 0) return left;
    if (left < 0)
        pi_feed_undo(s, s->part.n_tok, s->part.seq, s->part.pos);
    else
        s->n_counted += (uint64_t)s->part.n_tok;
    forget(s);
    return 0;
}

pi_status pi_part_settle(pi_session *s) {
    if (!s->part.n_tok) return PI_OK;
    const bool is_lost = pi_hybrid_part_left(s->hybrid) < 0;
    const pi_status st = is_lost ? PI_FAIL(PI_ERROR_DEVICE, "a part of a prompt was lost on its device")
                                 : pi_hybrid_part_rest(s->hybrid);
    (void)pi_part_look(s);
    return st;
}

/* The first position of a sequence that is the part's; INT32_MAX: it has none. */
static int32_t first_of(const pi_session *s, int32_t seq) {
    int32_t first = INT32_MAX;
    for (int32_t i = 0; i < s->part.n_tok && first == INT32_MAX; i++) /* a sequence's are in their order */
        if (s->part.seq[i] == seq) first = s->part.pos[i];
    return first;
}

pi_status pi_part_settle_seq(pi_session *s, int32_t seq) {
    return first_of(s, seq) == INT32_MAX ? PI_OK : pi_part_settle(s);
}

pi_status pi_part_settle_copy(pi_session *s, int32_t seq, int32_t n) {
    const int32_t kept = first_of(s, seq) / PI_KV_BLOCK * PI_KV_BLOCK;
    return n <= kept ? PI_OK : pi_part_settle(s);
}

pi_status pi_part_settle_feed(pi_session *s, const pi_batch *b) {
    bool is_beside = b->n_tokens <= PI_MANY;
    for (int32_t i = 0; is_beside && s->part.n_tok && i < b->n_tokens; i++)
        is_beside = first_of(s, pi_batch_seq(b, i)) == INT32_MAX;
    return is_beside ? PI_OK : pi_part_settle(s);
}

/* Arrays for one part, as long as it is begun. */
typedef struct part_room {
    int32_t *of_seq; /* [3 * n_seq] */
    uint8_t *by_row; /* [n_tokens] */
} part_room;

static pi_status begin(pi_session *s, const pi_batch *b, const part_room *room, int32_t *seq) {
    int32_t n_logits = 0, row = 0, *to = room->of_seq, *pos = seq + b->n_tokens;
    const pi_cut cut = {b, pos, room->by_row};
    const int32_t most = s->hybrid ? s->hybrid->max_part : 0;
    if (s->part.n_tok) return PI_FAIL(PI_ERROR_ARGUMENT, "another part of %d tokens is under way", s->part.n_tok);
    if (!most)
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "only one device that has all of a model, and counts nothing, computes parts "
                       "layer by layer");
    if (b->n_tokens > most)
        return PI_FAIL(PI_ERROR_ARGUMENT, "a part of %d tokens, %d are the most", b->n_tokens, most);
    PI_TRY(pi_feed_check(s, b, to, &n_logits));
    if (n_logits) return PI_FAIL(PI_ERROR_ARGUMENT, "%d tokens of a part want logits", n_logits);
    for (int32_t i = b->n_tokens - 1; i >= 0; i--) {
        seq[i] = pi_batch_seq(b, i);
        pos[i] = --to[seq[i]];
    }
    pi_chunk_choose_kernels(s, &cut, room->of_seq);
    for (int32_t i = 0; i < b->n_tokens; i++) pi_kv_extend(&s->kv, seq[i], pos[i] + 1);
    pi_chunk_fill(s, &cut, 0, b->n_tokens, &row);
    const pi_status st = pi_hybrid_part_begin(s->hybrid);
    if (st != PI_OK) {
        pi_feed_undo(s, b->n_tokens, seq, pos);
        return st;
    }
    s->part.n_tok = b->n_tokens;
    s->part.seq = seq;
    s->part.pos = pos;
    return PI_OK;
}

pi_status pi_session_begin_part(pi_session *s, const pi_batch *b) {
    if (!s || !b || b->n_tokens < 1 || !b->token || !b->kind)
        return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_begin_part: a part needs at least one token, and kinds");
    const size_t n = (size_t)b->n_tokens;
    int32_t *seq = calloc(n, 2 * sizeof *seq); /* and positions; the session's from when the part is begun */
    const part_room room = {malloc(3 * sizeof(int32_t) * (size_t)s->kv.n_seq), calloc(n, 1)};
    pi_session_lock(s);
    const pi_status st = seq && room.of_seq && room.by_row
                             ? begin(s, b, &room, seq)
                             : PI_FAIL(PI_ERROR_MEMORY, "out of memory for a part of %d tokens", b->n_tokens);
    pi_session_unlock(s);
    if (st != PI_OK) free(seq);
    free(room.of_seq);
    free(room.by_row);
    return st;
}

pi_status pi_session_end_part(pi_session *s) {
    if (!s) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_end_part: the session is NULL");
    pi_session_lock(s);
    const pi_status st = pi_part_settle(s);
    pi_session_unlock(s);
    return st;
}
