/* predict.c - which neurons of a feed-forward are computed in predicted mode.
 *
 *     score = fc2 . relu(fc1 . r)     r: the residual before the norm; or as model/sign.c
 *
 * Neurons whose score reaches the threshold are marked, per token, and listed for the step. */
#include <string.h>

#include "ffn.h"

bool pi_has_mask(const pi_session *s) {
    return s->options.sparsity == PI_SPARSITY_PREDICTED && s->chunk.n_tok > s->chunk.n_dense;
}

/* Token t, or if its FFN is dense the first one behind these. */
static int32_t sparse_from(const pi_chunk *c, int32_t t) {
    const int32_t end = c->first_dense + c->n_dense;
    return t >= c->first_dense && t < end ? end : t;
}

int32_t pi_n_sparse(const pi_chunk *c, int32_t from) {
    int32_t n = 0;
    for (int32_t t = sparse_from(c, from); t < c->n_tok; t = sparse_from(c, t + 1)) n++;
    return n;
}

/* Marks the chunk's sparse tokens in s->mask and lists the union in s->list. Members own fixed ranges of neurons, so
 * the list is ascending. */
static int32_t mark(pi_session *s, te_team *team, int32_t l, int32_t from, pi_layer_count *count) {
    const pi_chunk *c = &s->chunk;
    const int32_t n_ff = s->model->info.n_ff;
    const float threshold = s->threshold[l];
    enum { LINE = 64 }; /* neurons at a time, so that all bytes of a cache line of every token are used at once */
    int64_t lo, hi;
    te_share(team, n_ff, LINE, &lo, &hi);
    int32_t n = 0, *own = s->list_own + lo;
    for (int64_t j0 = lo; j0 < hi; j0 += LINE) {
        const int32_t width = hi - j0 < LINE ? (int32_t)(hi - j0) : LINE;
        bool any[LINE] = {false};
        for (int32_t t = sparse_from(c, from); t < c->n_tok; t = sparse_from(c, t + 1)) {
            const size_t at = (size_t)t * (size_t)n_ff + (size_t)j0;
            for (int32_t j = 0; j < width; j++) {
                const bool on = s->score[at + (size_t)j] >= threshold;
                s->mask[at + (size_t)j] = on;
                count->predicted += on;
                any[j] |= on;
            }
        }
        for (int32_t j = 0; j < width; j++) {
            own[n] = (int32_t)j0 + j;
            n += any[j];
        }
    }
    s->list_part[team->ith] = n;
    te_barrier(team);
    int32_t at = 0, total = 0;
    for (int32_t i = 0; i < team->nth; i++) {
        if (i < team->ith) at += s->list_part[i];
        total += s->list_part[i];
    }
    memcpy(s->list + at, own, (size_t)n * sizeof *own);
    te_barrier(team);
    return total;
}

/* Scores of tokens t0..t0+n-1 by fc1 and fc2, from the residual. */
static void mlp_scores(pi_session *s, te_team *team, const pi_ffn *w, size_t t0, int32_t n) {
    const size_t n_embd = (size_t)s->model->info.n_embd, n_ff = (size_t)s->model->info.n_ff, r = (size_t)w->fc1.n_rows;
    const te_linear fc1 = {.w = w->fc1, .y = s->rank, .ldy = r},
                    fc2 = {.w = w->fc2, .y = s->score + t0 * n_ff, .ldy = n_ff};
    pi_linear(s, team, &fc1, 1, s->x + t0 * n_embd, n_embd, (int32_t)t0, n);
    te_barrier(team);
    int64_t lo, hi;
    te_share(team, (int64_t)n * (int64_t)r, 16, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) s->rank[i] = s->rank[i] > 0 ? s->rank[i] : 0;
    te_barrier(team);
    pi_linear(s, team, &fc2, 1, s->rank, r, (int32_t)t0, n);
}

/* The same by the signs of the weights, from the normed input of the FFN. */
static void sign_scores(pi_session *s, te_team *team, const pi_ffn *w, size_t t0, int32_t n) {
    const te_kernels *k = s->model->kernels;
    const int32_t n_embd = s->model->info.n_embd, n_ff = s->model->info.n_ff, words = s->model->sign_words;
    te_barrier(team); /* h is made by all */
    for (int32_t t = team->ith; t < n; t += team->nth)
        k->sign_pack(s->h + (t0 + (size_t)t) * (size_t)n_embd, n_embd, s->sign + (ptrdiff_t)t * words);
    te_barrier(team);
    enum { ROWS = 64 }; /* a block of rows stays in the first cache for all tokens */
    int64_t lo, hi;
    te_share(team, n_ff, ROWS, &lo, &hi);
    for (int64_t j = lo; j < hi; j += ROWS)
        for (int32_t t = 0; t < n; t++)
            k->sign_dot(w->sign + j * words, hi - j < ROWS ? (int32_t)(hi - j) : ROWS, s->sign + (ptrdiff_t)t * words,
                        n_embd, s->score + (t0 + (size_t)t) * (size_t)n_ff + j);
}

static void scores(pi_session *s, te_team *team, const pi_ffn *w, int32_t t0, int32_t n) {
    if (n < 1) return;
    if (w->sign)
        sign_scores(s, team, w, (size_t)t0, n);
    else
        mlp_scores(s, team, w, (size_t)t0, n);
    te_barrier(team);
}

int64_t pi_predictor_bytes(const pi_model *m, const pi_ffn *w) {
    return w->sign ? (int64_t)pi_sign_bytes(m) : pi_mat_bytes(&w->fc1) + pi_mat_bytes(&w->fc2);
}

int32_t pi_predict(pi_session *s, te_team *team, const pi_layer *layer, int32_t l, int32_t from) {
    float *tap = s->tap[l].score;
    if (!pi_has_mask(s) && !tap) return 0;
    const pi_ffn *w = pi_ffn_of(layer);
    /* Before and behind the tokens whose FFN is dense, or all. */
    const int32_t n = s->chunk.n_tok, d0 = tap ? n : s->chunk.first_dense, d1 = tap ? n : d0 + s->chunk.n_dense;
    const int32_t after = from > d1 ? from : d1;
    scores(s, team, w, from, d0 - from);
    scores(s, team, w, after, n - after);
    pi_tap_rows(s, team, s->score, s->model->info.n_ff, tap);
    return pi_has_mask(s) ? mark(s, team, l, from, &s->count[(ptrdiff_t)l * s->options.n_threads + team->ith]) : 0;
}
