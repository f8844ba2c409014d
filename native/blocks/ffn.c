/* ffn.c - the feed-forward of one layer: which neurons (predictor, exact gate, all), and by which operator.
 *
 *     score = fc2 . relu(fc1 . r)     r: the residual before ffn_norm (Falcon: the block's input); or as model/sign.c
 *     x    += sum over neurons j with score_j >= threshold of act(gate_j . h) * (up_j . h) * down_j
 *
 * A few tokens go through the fused row-sparse operator; many (a prompt) through matrix products, with the mask applied
 * to the hidden values. A device will own a part of the neurons: then `rows` of ffn_part is the list of the cold ones,
 * and the merge adds the device's sum. */
#include <math.h>
#include <string.h>

#include "../step/session.h"

static bool has_mask(const pi_session *s) {
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
static void mlp_scores(pi_session *s, te_team *team, const pi_layer *w, size_t t0, int32_t n) {
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
static void sign_scores(pi_session *s, te_team *team, const pi_layer *w, size_t t0, int32_t n) {
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

void pi_tap_rows(const pi_session *s, const te_team *team, const float *rows, int32_t n, float *tap) {
    if (!tap) return;
    for (int32_t t = team->ith; t < s->chunk.n_tok; t += team->nth)
        memcpy(tap + (size_t)s->chunk.batch_row[t] * (size_t)n, rows + (size_t)t * (size_t)n, sizeof *rows * (size_t)n);
}

static void scores(pi_session *s, te_team *team, const pi_layer *w, int32_t t0, int32_t n) {
    if (n < 1) return;
    if (w->sign)
        sign_scores(s, team, w, (size_t)t0, n);
    else
        mlp_scores(s, team, w, (size_t)t0, n);
    te_barrier(team);
}

int32_t pi_predict(pi_session *s, te_team *team, int32_t l, int32_t from) {
    float *tap = s->tap[l].score;
    if (!has_mask(s) && !tap) return 0;
    const pi_layer *w = &s->model->layer[l];
    /* Before and behind the tokens whose FFN is dense, or all. */
    const int32_t n = s->chunk.n_tok, d0 = tap ? n : s->chunk.first_dense, d1 = tap ? n : d0 + s->chunk.n_dense;
    const int32_t after = from > d1 ? from : d1;
    scores(s, team, w, from, d0 - from);
    scores(s, team, w, after, n - after);
    pi_tap_rows(s, team, s->score, s->model->info.n_ff, tap);
    return has_mask(s) ? mark(s, team, l, from, &s->count[(ptrdiff_t)l * s->options.n_threads + team->ith]) : 0;
}

typedef enum ffn_mode { FFN_MASKED, FFN_EXACT, FFN_DENSE } ffn_mode;

/* Bytes are counted for all tokens, neurons only for those of the sparse operator: a prompt's dense tokens say nothing
 * about sparsity. */
static void add_counts(te_ffn_counts *c, const te_ffn_counts *part, bool sparse_tokens) {
    c->rows += part->rows;
    c->bytes += part->bytes;
    if (!sparse_tokens) return;
    c->listed += part->listed;
    c->computed += part->computed;
    c->fired += part->fired;
}

/* How many of n hidden values the row-sparse operator would have needed the up row of (without a gate: the down row);
 * n_fired of them are not 0. */
static int64_t count_computed(const pi_session *s, const float *gate, const uint8_t *mask, int64_t n, ffn_mode mode,
                              int64_t n_fired) {
    const int32_t act = s->model->info.activation;
    const bool skip = mode != FFN_DENSE && pi_is_relu(act);
    if (skip && !gate) return n_fired;
    if (!skip && !mask) return n;
    const float least = !skip ? -INFINITY : act == PI_ACTIVATION_RELU ? s->model->info.activation_threshold : 0;
    int64_t sum = 0;
    if (!mask)
        for (int64_t i = 0; i < n; i++) sum += gate[i] > least;
    else if (!gate)
        for (int64_t i = 0; i < n; i++) sum += mask[i];
    else
        for (int64_t i = 0; i < n; i++) sum += mask[i] & (gate[i] > least);
    return sum;
}

/* Adds to the layer's counts for how many of the n tokens with hidden values u each of this member's neurons fired. */
static void count_fired(const pi_session *s, const te_team *team, int32_t l, const float *u, int32_t n) {
    const size_t n_ff = (size_t)s->model->info.n_ff;
    uint32_t *fired = s->fired + n_ff * (size_t)l;
    int64_t lo, hi;
    te_share(team, (int64_t)n_ff, 16, &lo, &hi);
    for (int32_t t = 0; t < n; t++)
        for (int64_t j = lo; j < hi; j++) fired[j] += u[(size_t)t * n_ff + (size_t)j] != 0;
}

/* Before the sums of down are added to x: the order of few tokens, in all modes. */
static void add_bias_first(const pi_session *s, te_team *team, const pi_layer *w, float *x, int32_t n) {
    const int32_t n_embd = s->model->info.n_embd;
    if (!w->down_b) return;
    for (int32_t t = team->ith; t < n; t += team->nth)
        s->model->kernels->add(w->down_b, n_embd, x + (ptrdiff_t)t * n_embd);
    te_barrier(team);
}

/* Matrix products for tokens t0..t0+n-1. All rows are read. */
static void ffn_many(pi_session *s, te_team *team, int32_t l, int32_t t0, int32_t n, ffn_mode mode,
                     bool sparse_tokens) {
    const pi_model *m = s->model;
    const pi_layer *w = &m->layer[l];
    const size_t n_embd = (size_t)m->info.n_embd, n_ff = (size_t)m->info.n_ff, off = (size_t)t0 * n_ff;
    float *g = s->gate + off, *u = s->up + off, *x = s->x + (size_t)t0 * n_embd;
    const float *h = s->h + (size_t)t0 * n_embd;
    const te_way way = t0 < s->chunk.n_many ? TE_BY_GEMM : TE_BY_ROWS;
    const te_linear in[2] = {{.w = w->up, .bias = w->up_b, .y = u, .ldy = n_ff, .way = way},
                             {.w = w->gate, .y = g, .ldy = n_ff, .way = way}};
    te_op_linear(team, s->ws, in, w->gate.w ? 2 : 1, h, n_embd, n);
    te_barrier(team);
    pi_adapt(s, team, pi_adapter_of(w, PI_ADAPT_UP), h, n_embd, n, way, u, n_ff);
    pi_adapt(s, team, pi_adapter_of(w, PI_ADAPT_GATE), h, n_embd, n, way, g, n_ff);
    int64_t lo, hi;
    te_share(team, (int64_t)n * (int64_t)n_ff, 64, &lo, &hi);
    if (hi > lo)
        m->kernels->glu((te_activation)m->info.activation, m->info.activation_threshold, w->gate.w ? g + lo : NULL,
                        u + lo, (int32_t)(hi - lo), u + lo);
    if (mode == FFN_MASKED)
        for (int64_t i = lo; i < hi; i++)
            if (!s->mask[off + (size_t)i]) u[i] = 0;
    te_ffn_counts part = {.listed = hi - lo};
    for (int64_t i = lo; i < hi; i++) part.fired += u[i] != 0;
    part.computed = count_computed(s, w->gate.w ? g + lo : NULL, mode == FFN_MASKED ? s->mask + off + lo : NULL,
                                   hi - lo, mode, part.fired);
    if (team->ith == 0) {
        part.rows = (int64_t)n_ff * (w->gate.w ? 3 : 2);
        part.bytes = pi_mat_bytes(&w->up) + pi_mat_bytes(&w->gate) + pi_mat_bytes(&w->down_t) + pi_mat_bytes(&w->down);
    }
    add_counts(&s->count[(ptrdiff_t)l * s->options.n_threads + team->ith].ffn, &part, sparse_tokens);
    te_barrier(team);
    if (s->fired) count_fired(s, team, l, u, n);
    if (s->tap[l].hidden)
        for (int32_t t = team->ith; t < n; t += team->nth)
            memcpy(s->tap[l].hidden + (size_t)s->chunk.batch_row[t0 + t] * n_ff, u + (size_t)t * n_ff,
                   sizeof *u * n_ff);
    if (w->down_t.w) {
        const bool first = way == TE_BY_ROWS;
        if (first) add_bias_first(s, team, w, x, n);
        te_op_linear_t(team, s->ws, &w->down_t, u, n_ff, n, first ? NULL : w->down_b, x, n_embd, true, way);
    } else {
        const te_linear out = {.w = w->down, .bias = w->down_b, .y = x, .ldy = n_embd, .add = true, .way = way};
        te_op_linear(team, s->ws, &out, 1, u, n_ff, n);
    }
    pi_adapt(s, team, pi_adapter_of(w, PI_ADAPT_DOWN), u, n_ff, n, way, x, n_embd);
}

/* The fused operator over a list of neurons for a few tokens. */
static void ffn_rows(pi_session *s, te_team *team, int32_t l, int32_t t0, int32_t n, ffn_mode mode, te_rows rows,
                     bool sparse_tokens) {
    const pi_model *m = s->model;
    const pi_layer *w = &m->layer[l];
    const size_t n_embd = (size_t)m->info.n_embd, n_ff = (size_t)m->info.n_ff, off = (size_t)t0 * n_ff;
    float *x = s->x + (size_t)t0 * n_embd, *hidden = s->up + off;
    const te_ffn f = {.gate = w->gate,
                      .up = w->up,
                      .down = w->down_t,
                      .up_bias = w->up_b,
                      .act = (te_activation)m->info.activation,
                      .threshold = m->info.activation_threshold};
    te_ffn_io io = {.x = s->h + (size_t)t0 * n_embd,
                    .ldx = n_embd,
                    .n_tok = n,
                    .mask = mode == FFN_MASKED ? s->mask + off : NULL,
                    .ld_mask = n_ff,
                    .by_neuron = mode == FFN_MASKED,
                    .y = x,
                    .ldy = n_embd,
                    .fired = s->fired ? s->fired + n_ff * (size_t)l : NULL};
    te_ffn_counts *c = &s->count[(ptrdiff_t)l * s->options.n_threads + team->ith].ffn, part = {0};
    const bool skip = mode != FFN_DENSE && pi_is_relu(m->info.activation);
    pi_adapt_ffn(s, team, w, io.x, t0, n, &io);
    const pi_adapter *down = pi_adapter_of(w, PI_ADAPT_DOWN);
    if (w->down_t.w) {
        add_bias_first(s, team, w, x, n);
        te_op_ffn(team, s->ws, &f, rows, skip, &io, &part);
        add_counts(c, &part, sparse_tokens);
        pi_adapt(s, team, down, hidden, n_ff, n, TE_BY_ROWS, x, n_embd);
        return;
    }
    io.hidden = hidden;
    io.ld_hidden = n_ff;
    int64_t lo, hi;
    te_share(team, (int64_t)n * (int64_t)n_ff, 64, &lo, &hi);
    memset(hidden + lo, 0, (size_t)(hi - lo) * sizeof *hidden);
    te_barrier(team);
    te_op_ffn(team, s->ws, &f, rows, skip, &io, &part);
    add_counts(c, &part, sparse_tokens);
    te_barrier(team);
    const te_linear out = {.w = w->down, .bias = w->down_b, .y = x, .ldy = n_embd, .add = true};
    pi_linear(s, team, &out, 1, hidden, n_ff, t0, n);
    pi_adapt(s, team, down, hidden, n_ff, n, TE_BY_ROWS, x, n_embd);
    if (team->ith == 0) {
        c->rows += (int64_t)n_ff; /* all of down is read: it is stored by output */
        c->bytes += pi_mat_bytes(&w->down);
    }
}

static void ffn_part(pi_session *s, te_team *team, int32_t l, int32_t t0, int32_t n, ffn_mode mode, int32_t n_list,
                     bool sparse_tokens) {
    const pi_layer *w = &s->model->layer[l];
    /* Of one token that leaves nothing out, whole matrices one after the other are longer streams than groups of their
     * rows in turn: F16, 2 threads, 82 instead of 73 % of the read rate for the whole token. */
    const bool whole_product = mode == FFN_DENSE && (!w->down_t.w || n == 1);
    if (t0 < s->chunk.n_many || whole_product || s->tap[l].hidden) {
        ffn_many(s, team, l, t0, n, mode, sparse_tokens);
        return;
    }
    const te_rows all = {NULL, 0, s->model->info.n_ff}, listed = {s->list, 0, n_list};
    ffn_rows(s, team, l, t0, n, mode, mode == FFN_MASKED ? listed : all, sparse_tokens);
}

void pi_ffn(pi_session *s, te_team *team, int32_t l, int32_t n_list, int32_t from) {
    const pi_chunk *c = &s->chunk;
    const int32_t border[] = {0, c->first_dense, c->n_many, c->first_dense + c->n_dense, c->n_tok};
    const ffn_mode mode = has_mask(s) ? FFN_MASKED : s->options.sparsity == PI_SPARSITY_DENSE ? FFN_DENSE : FFN_EXACT;
    pi_tap_rows(s, team, s->h, s->model->info.n_embd, s->tap[l].norm);
    for (int32_t i = 0; i < 4; i++) {
        const int32_t t0 = border[i] > from ? border[i] : from, n = border[i + 1] - t0;
        const bool dense = i == 1 || i == 2; /* if there are such tokens */
        if (n <= 0) continue;
        if (t0 > 0) te_barrier(team); /* the operators share their workspace */
        ffn_part(s, team, l, t0, n, dense ? FFN_EXACT : mode, dense ? 0 : n_list, !dense);
    }
}
