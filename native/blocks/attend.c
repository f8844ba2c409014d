/* attend.c - causal attention over the block table.
 *
 * A piece of work is a run of tokens of one sequence (often one token), the query heads of one KV head, and a part of
 * the positions that they see: all of them, or where pieces would be fewer than members need, one of several parts,
 * whose sums are put together afterwards. A piece goes through its positions SPAN at a time: scores, their exponentials
 * against the largest score so far, weighted sum of V; so K and V are read once for all queries of the piece, and what
 * it works on stays in the cache however long the context is. Many queries are taken as matrix products, few by the
 * kernels for short rows.
 *
 * A token's bits depend on its own sequence alone, never on other tokens of the chunk or on who computes what: pieces
 * can be handed out as members come for them. Tokens from the chunk's n_prefill on, computed as if alone, have their
 * positions cut by their own number and that of members; those of the others are not cut, and are always taken as matrix
 * products, which give a row the same bits however long the run is. */
#include "attend.h"

#include <math.h>
#include <string.h>

enum { SPAN = PI_ATTENTION_SPAN };

/* ---- heads of one token ---- */

static void finish_head(const pi_session *s, const pi_attention *w, int32_t t, const float *norm, float *head) {
    const pi_model *m = s->model;
    const int32_t which = pi_rope_index(m, w, s->options.n_ctx);
    if (norm && !w->late_norm) m->kernels->rms_norm(head, norm, m->inner_eps, w->n_embd_head, head);
    if (which >= 0) {
        const pi_rope *rope = &m->rope[which];
        const float *cs = s->cs + pi_rope_floats(m, which) * (size_t)s->options.n_batch;
        pi_rope_apply(rope, cs + (ptrdiff_t)t * rope->n_rot, head);
    }
    if (norm && w->late_norm) m->kernels->rms_norm(head, norm, m->inner_eps, w->n_embd_head, head);
}

/* A head of q, whose scale may grow with the position. */
static void finish_query(const pi_session *s, const pi_attention *w, int32_t t, float *head) {
    finish_head(s, w, t, w->q_norm, head);
    if (w->temp_scale == 0) return;
    const float turns = floorf((float)(s->chunk.pos[t] + w->temp_first) / (float)w->temp_length),
                by = 1 + w->temp_scale * logf(1 + turns);
    for (int32_t i = 0; i < w->n_embd_head; i++) head[i] *= by;
}

/* K, normed and rotated, and V of one KV head go to the pool. */
static void store_kv(const pi_session *s, int32_t l, int32_t t, int32_t kvh) {
    const pi_attention *w = pi_attention_of(&s->model->layer[l]);
    const te_kernels *kern = s->model->kernels;
    const int32_t nkv = w->n_head_kv, d = w->n_embd_head, pos = s->chunk.pos[t];
    const pi_seq *seq = &s->kv.seq[s->chunk.seq[t]];
    float *k = s->k + ((ptrdiff_t)t * nkv + kvh) * d, *v = s->v + ((ptrdiff_t)t * nkv + kvh) * d;
    const bool has_v = s->kv.layer[l].row_v != 0;
    if (has_v && !w->v.w) memcpy(v, k, (size_t)d * sizeof *v); /* before anything becomes of K */
    if (w->v_norm) kern->rms_norm(v, w->v_norm, s->model->inner_eps, d, v);
    finish_head(s, w, t, w->k_norm, k);
    kern->row[s->kv.type_k].from_f32(k, pi_kv_k(&s->kv, l, seq, kvh, pos), d);
    if (has_v) kern->row[s->kv.type_v].from_f32(v, pi_kv_v(&s->kv, l, seq, kvh, pos), d);
}

static void store_all_kv(const pi_session *s, const te_team *team, int32_t l) {
    const int32_t nkv = pi_attention_of(&s->model->layer[l])->n_head_kv;
    for (int32_t i = team->ith; i < s->chunk.n_tok * nkv; i += team->nth) store_kv(s, l, i / nkv, i % nkv);
}

/* ---- one piece ---- */

typedef struct piece {
    int32_t t, n;         /* tokens t..t+n-1, at consecutive positions of one sequence */
    int32_t kvh;          /* for the query heads of this KV head */
    int32_t from, to;     /* positions; beyond a token's own nothing is seen */
    int32_t part, n_slot; /* which of the parts; parts that there is room for. n_slot 0: there is one part */
    bool prompt;          /* spans end where all prompts' do */
} piece;

/* What a row of queries has gathered so far. out: sums of V, weighted by exp(weight_scale * (score - top)), whose sum
 * is total. */
typedef struct sums {
    float top, total;
} sums;

static te_mat k_block(const pi_session *s, int32_t l, const pi_seq *seq, int32_t kvh, int32_t p, int32_t n) {
    const int32_t d = pi_attention_of(&s->model->layer[l])->n_embd_head;
    return (te_mat){pi_kv_k(&s->kv, l, seq, kvh, p), s->kv.layer[l].row_k, s->kv.type_k, d, n};
}
static te_mat v_block(const pi_session *s, int32_t l, const pi_seq *seq, int32_t kvh, int32_t p, int32_t n) {
    const pi_kv_layer *at = &s->kv.layer[l];
    const int32_t d = pi_value_width(s->model, pi_attention_of(&s->model->layer[l]));
    return (te_mat){pi_kv_v(&s->kv, l, seq, kvh, p), at->row_v ? at->row_v : at->row_k, s->kv.type_v, d, n};
}

static void scale_row(float *x, int32_t n, float by) {
    for (int32_t i = 0; i < n; i++) x[i] *= by;
}

/* What scores are multiplied by where they become weights: those under a soft cap have been. */
static float weight_scale(const pi_attention *w) { return w->soft_cap > 0 ? 1 : w->scale; }

/* Turns a row's scores of n positions into weights, and what was gathered before to the same scale. */
static void weigh(const te_kernels *kern, const pi_attention *w, float *score, int32_t n, sums *sum, float *out,
                  int32_t d) {
    const float scale = weight_scale(w);
    if (w->soft_cap > 0) kern->soft_cap(score, n, w->scale, w->soft_cap);
    const float old = sum->top, now = kern->exp_sum(score, n, scale, &sum->top);
    if (sum->top != old && sum->total != 0) {
        const float by = expf(scale * (old - sum->top));
        scale_row(out, d, by);
        sum->total *= by;
    }
    sum->total += now;
}

static int32_t between(int32_t v, int32_t lo, int32_t hi) { return v < lo ? lo : v > hi ? hi : v; }

/* The first position that a token sees. */
static int32_t first_seen(const pi_attention *w, int32_t pos) {
    if (w->chunked) return pos / w->window * w->window;
    return w->window && pos >= w->window ? pos + 1 - w->window : 0;
}

/* All of a piece's spans by the products that are made for it. */
static void gather_products(const pi_session *s, te_team *team, int32_t l, const piece *w, int32_t rows, float *out,
                            sums *sum) {
    enum { MOST = SPAN / PI_KV_BLOCK };
    const te_gemm_kernels *g = &s->model->kernels->gemm;
    const pi_seq *seq = &s->kv.seq[s->chunk.seq[w->t]];
    const pi_attention *block = pi_attention_of(&s->model->layer[l]);
    float *base = pi_scratch(s, team);
    int32_t *lo = (int32_t *)(void *)(base + s->room.seen), *hi = lo + rows;
    const int32_t group = rows / w->n, dv = pi_value_width(s->model, block);
    te_mat k[MOST], v[MOST];
    te_attend a = {.k = k,
                   .v = v,
                   .block = PI_KV_BLOCK,
                   .span = SPAN,
                   .n_rows = rows,
                   .q = base + s->room.packed_q,
                   .lo = lo,
                   .hi = hi,
                   .scale = block->scale,
                   .cap = block->soft_cap,
                   .first = true,
                   .memory = base + s->room.work};
    for (int32_t p = w->from, b; p < w->to; p = b, a.first = false) {
        const int32_t end = (p / SPAN + 1) * SPAN;
        b = w->to < end ? w->to : end;
        a.n_blocks = 0;
        for (int32_t at = p; at < b; at += PI_KV_BLOCK, a.n_blocks++) {
            const int32_t n = b - at < PI_KV_BLOCK ? b - at : PI_KV_BLOCK;
            k[a.n_blocks] = k_block(s, l, seq, w->kvh, at, n);
            v[a.n_blocks] = v_block(s, l, seq, w->kvh, at, n);
        }
        for (int32_t r = 0; r < rows; r++) {
            const int32_t own = s->chunk.pos[w->t] + r / group;
            lo[r] = between(first_seen(block, own) - p, 0, b - p);
            hi[r] = between(own + 1 - p, lo[r], b - p);
        }
        g->attend(&a);
    }
    float *top = base + s->room.seen, *total = top + rows;
    g->attend_end(&a, out, (size_t)dv, top, total);
    for (int32_t r = 0; r < rows; r++) sum[r] = (sums){top[r], total[r]};
}

/* The queries of a piece to q, its sums to out and sum. */
static void gather(const pi_session *s, te_team *team, int32_t l, const piece *w, bool tile) {
    const pi_model *m = s->model;
    const te_kernels *kern = m->kernels;
    const te_gemm_kernels *g = &kern->gemm;
    const pi_seq *seq = &s->kv.seq[s->chunk.seq[w->t]];
    const pi_attention_room *room = &s->room;
    const pi_attention *block = pi_attention_of(&m->layer[l]);
    const int32_t d = block->n_embd_head, dv = pi_value_width(m, block), group = m->info.n_head / block->n_head_kv,
                  rows = w->n * group, pos = s->chunk.pos[w->t];
    float *base = pi_scratch(s, team), *q = base, *out = base + room->out, *score = base + room->score;
    sums *sum = (sums *)(void *)(base + room->sums);
    void *packed_q = base + room->packed_q, *packed = base + room->packed, *work = base + room->work;
    for (int32_t r = 0; r < rows; r++) {
        float *head = q + (ptrdiff_t)r * d;
        const int32_t t = w->t + r / group;
        memcpy(head, s->q + ((ptrdiff_t)t * m->info.n_head + w->kvh * group + r % group) * d * (block->gated ? 2 : 1),
               (size_t)d * sizeof *head);
        finish_query(s, block, t, head);
        sum[r] = (sums){-INFINITY, 0};
    }
    if (tile) g->pack(q, (size_t)d, NULL, rows, d, 0, rows, packed_q);
    if (w->prompt && g->attend) {
        gather_products(s, team, l, w, rows, out, sum);
        return;
    }
    memset(out, 0, (size_t)rows * (size_t)dv * sizeof *out);
    for (int32_t a = w->from, b; a < w->to; a = b) {
        const int32_t end = w->prompt ? (a / SPAN + 1) * SPAN : a + SPAN;
        b = w->to < end ? w->to : end;
        for (int32_t p = a; p < b; p += PI_KV_BLOCK) {
            const int32_t n = b - p < PI_KV_BLOCK ? b - p : PI_KV_BLOCK;
            const te_mat k = k_block(s, l, seq, w->kvh, p, n);
            if (tile)
                g->gemm(&k, 0, n, packed_q, rows, score + (p - a), room->ld, NULL, false, work);
            else
                kern->rows_dot(&k,
                               p + n < b ? pi_kv_k(&s->kv, l, seq, w->kvh, p + n) : pi_kv_v(&s->kv, l, seq, w->kvh, a),
                               q, (size_t)d, rows, score + (p - a), room->ld);
        }
        for (int32_t r = 0; r < rows; r++) {
            const int32_t own = pos + r / group, first = first_seen(block, own);
            const int32_t lo = between(first - a, 0, b - a), hi = between(own + 1 - a, lo, b - a);
            float *x = score + (size_t)r * room->ld;
            if (hi > lo) weigh(kern, block, x + lo, hi - lo, &sum[r], out + (ptrdiff_t)r * dv, dv);
            memset(x, 0, (size_t)lo * sizeof *x);
            memset(x + hi, 0, (size_t)(b - a - hi) * sizeof *x);
        }
        for (int32_t p = a; p < b; p += PI_KV_BLOCK) {
            const int32_t n = b - p < PI_KV_BLOCK ? b - p : PI_KV_BLOCK;
            const te_mat v = v_block(s, l, seq, w->kvh, p, n);
            if (tile) {
                g->pack_t(score + (p - a), room->ld, NULL, rows, n, 0, rows, packed);
                g->gemm_t(&v, 0, dv, packed, rows, out, (size_t)dv, NULL, true, work);
            } else {
                const void *next = p + n < b       ? pi_kv_v(&s->kv, l, seq, w->kvh, p + n)
                                   : p + n < w->to ? pi_kv_k(&s->kv, l, seq, w->kvh, p + n)
                                                   : NULL;
                kern->rows_sum(&v, next, score + (p - a), room->ld, rows, out, (size_t)dv);
            }
        }
    }
}

/* What a row has gathered becomes its output. A sink is one more score, of no V; where it is too large for this sum,
 * the positions' share is 0. */
static void finish_row(const pi_attention *w, int32_t h, sums sum, float *out, int32_t d) {
    if (w->sinks) sum.total += expf(w->sinks[h] - weight_scale(w) * sum.top);
    scale_row(out, d, sum.total != 0 ? 1 / sum.total : 0);
}

/* Where the sums of one part of a row (token t, query head h) wait: d floats, top and total. */
static float *part_row(const pi_session *s, int32_t t, int32_t h, int32_t n_slot, int32_t part) {
    return s->parts + (((size_t)(t - s->chunk.n_prefill) * (size_t)s->model->info.n_head + (size_t)h) * (size_t)n_slot +
                       (size_t)part) *
                          s->room.part_floats;
}

static void attend(const pi_session *s, te_team *team, int32_t l, const piece *w, bool tile) {
    const pi_model_info *i = &s->model->info;
    const pi_attention *block = pi_attention_of(&s->model->layer[l]);
    const int32_t d = pi_value_width(s->model, block), group = i->n_head / block->n_head_kv;
    const float *out = pi_scratch(s, team) + s->room.out;
    const sums *sum = (const sums *)(const void *)(pi_scratch(s, team) + s->room.sums);
    gather(s, team, l, w, tile);
    for (int32_t r = 0; r < w->n * group; r++, out += d) {
        const int32_t t = w->t + r / group, h = w->kvh * group + r % group;
        float *to = w->n_slot ? part_row(s, t, h, w->n_slot, w->part) : s->att + ((ptrdiff_t)t * i->n_head + h) * d;
        memcpy(to, out, (size_t)d * sizeof *to);
        if (w->n_slot)
            memcpy(to + d, &sum[r], sizeof sum[r]);
        else
            finish_row(block, h, sum[r], to, d);
    }
}

/* att of one row from its parts, in their order. */
static void join(const pi_session *s, const pi_attention *w, int32_t t, int32_t h, int32_t n_slot, int32_t n_parts) {
    const int32_t d = pi_value_width(s->model, w);
    float *out = s->att + ((ptrdiff_t)t * s->model->info.n_head + h) * d, top = -INFINITY, total = 0;
    memset(out, 0, (size_t)d * sizeof *out);
    for (int32_t i = 0; i < n_parts; i++) {
        const float x = part_row(s, t, h, n_slot, i)[d];
        if (x > top) top = x;
    }
    for (int32_t i = 0; i < n_parts; i++) {
        const float *part = part_row(s, t, h, n_slot, i);
        if (part[d + 1] == 0) continue;
        const float by = expf(weight_scale(w) * (part[d] - top));
        for (int32_t c = 0; c < d; c++) out[c] += by * part[c];
        total += by * part[d + 1];
    }
    finish_row(w, h, (sums){top, total}, out, d);
}

/* ---- all of a chunk ---- */

/* Of a prompt's tokens, at most how many make a run, so that there is a piece for each member. */
static int32_t longest_run(const pi_session *s, const pi_attention *w) {
    enum { LEAST_ROWS = 16 };
    const int32_t nkv = w->n_head_kv, group = s->model->info.n_head / nkv,
                  n_runs = (2 * s->options.n_threads + nkv - 1) / nkv, n = (s->chunk.n_prefill + n_runs - 1) / n_runs;
    return n * group < LEAST_ROWS ? (LEAST_ROWS + group - 1) / group : n;
}

/* A run of queries and the positions that they see. */
typedef struct query_run {
    int32_t t, n;            /* tokens */
    int32_t begin, n_pos;    /* positions begin..n_pos-1, whole blocks but for the last */
    int32_t n_slot, n_parts; /* parts that there is room for, parts that there are */
    bool prompt;
    bool tile; /* by matrix products */
} query_run;

/* The run of tokens that ends before `end`, at most as long as there is room for; half of it where few positions are seen,
 * for scores beyond a token's own position are computed in vain. Tokens that are computed as if alone see the same blocks;
 * those of a prompt have their spans' borders where all prompts have them: so no row's sums depend on the others. */
static query_run run_before(const pi_session *s, const pi_attention *w, int32_t end, int32_t from) {
    enum { FEW = 1024 };
    const pi_chunk *c = &s->chunk;
    const int32_t group = s->model->info.n_head / w->n_head_kv, last = c->pos[end - 1],
                  rows = last < FEW ? s->room.rows / 2 : s->room.rows, room = rows / group;
    const bool few = end > c->n_prefill;
    const int32_t begin = first_seen(w, last) / PI_KV_BLOCK;
    const int32_t longest = few ? room : longest_run(s, w), most = longest < room ? longest : room;
    const int32_t least = few && c->n_prefill > from ? c->n_prefill : from;
    int32_t n = 1;
    for (; n < most && end - n > least; n++) {
        const int32_t t = end - n - 1;
        if (c->seq[t] != c->seq[end - 1] || c->pos[t] != last - n) break;
        if (few &&
            (pi_kv_blocks(c->pos[t] + 1) != pi_kv_blocks(last + 1) || first_seen(w, c->pos[t]) / PI_KV_BLOCK != begin))
            break;
    }
    query_run r = {.t = end - n, .n = n, .n_pos = last + 1, .n_slot = few ? s->room.n_slot : 1, .n_parts = 1};
    r.begin = first_seen(w, c->pos[r.t]) / PI_KV_BLOCK * PI_KV_BLOCK;
    r.prompt = !few;
    r.tile = !few || group >= s->model->kernels->gemm.min_tok;
    r.n_parts = between(pi_kv_blocks(r.n_pos - r.begin) * PI_KV_BLOCK / PI_ATTENTION_PART, 1, r.n_slot);
    return r;
}

int64_t pi_attention_bytes(const pi_session *s, int32_t l, int32_t from) {
    const pi_attention *w = pi_attention_of(&s->model->layer[l]);
    int64_t n = 0;
    for (int32_t end = s->chunk.n_tok; end > from;) {
        const query_run r = run_before(s, w, end, from);
        n += r.n_pos - r.begin;
        end = r.t;
    }
    const pi_kv_layer *kv = &s->kv.layer[l];
    return n * kv->n_head * (int64_t)(kv->row_k + kv->row_v);
}

void pi_attention_next(te_team *team, int32_t l) {
    if (team->ith == 0) te_counter_reset(team, 2 + (l + 1) % 2);
}

void pi_attend_chunk(pi_session *s, te_team *team, int32_t l, int32_t from) {
    enum { WORTH_SHARING = 8192 }; /* scores per member, from which on the slowest of fixed shares costs more */
    const pi_chunk *c = &s->chunk;
    const te_gemm_kernels *g = &s->model->kernels->gemm;
    const pi_attention *block = pi_attention_of(&s->model->layer[l]);
    const int32_t nh = s->model->info.n_head, nkv = block->n_head_kv;
    if (!c->decode && !block->borrows) {
        store_all_kv(s, team, l);
        te_barrier(team);
    }
    /* Runs are taken from the last on: the later ones of a prompt see more positions, and small pieces at the end
     * balance best. */
    int64_t n_pieces = 0, n_scores = 0;
    for (int32_t end = c->n_tok; end > from;) {
        const query_run r = run_before(s, block, end, from);
        n_pieces += (int64_t)nkv * r.n_parts;
        n_scores += (int64_t)r.n * (r.n_pos - 1 - r.begin) * nh;
        end = r.t;
    }
    const bool dealt = n_scores >= (int64_t)WORTH_SHARING * team->nth;
    const int32_t counter = 2 + l % 2;
    pi_attention_next(team, l);
    int64_t lo, hi, first = 0;
    te_share(team, n_pieces, 1, &lo, &hi);
    if (dealt) {
        lo = te_counter_take(team, counter, 1);
        hi = n_pieces;
    }
    bool open = false, joined = true;
    for (int32_t end = c->n_tok; end > from;) {
        const query_run r = run_before(s, block, end, from);
        const int32_t n_blocks = pi_kv_blocks(r.n_pos - r.begin), parts = r.n_parts;
        joined &= parts == 1;
        while (lo < hi && lo < first + (int64_t)nkv * parts) {
            const int32_t i = (int32_t)(lo - first), part = i % parts;
            piece w = {.t = r.t,
                       .n = r.n,
                       .kvh = i / parts,
                       .part = part,
                       .n_slot = parts > 1 ? r.n_slot : 0,
                       .prompt = r.prompt};
            w.from = r.begin + (int32_t)((int64_t)n_blocks * part / parts) * PI_KV_BLOCK;
            w.to =
                part + 1 == parts ? r.n_pos : r.begin + (int32_t)((int64_t)n_blocks * (part + 1) / parts) * PI_KV_BLOCK;
            if (c->decode && w.to == r.n_pos && !block->borrows) store_kv(s, l, r.t, w.kvh);
            if (r.tile && !open) g->begin();
            open |= r.tile;
            attend(s, team, l, &w, r.tile);
            lo = dealt ? te_counter_take(team, counter, 1) : lo + 1;
        }
        first += (int64_t)nkv * parts;
        end = r.t;
    }
    if (open) g->end();
    if (joined) return;
    te_barrier(team);
    int32_t turn = 0;
    for (int32_t end = c->n_tok; end > from;) {
        const query_run r = run_before(s, block, end, from);
        for (int32_t i = 0; r.n_parts > 1 && i < r.n * nh; i++, turn++)
            if (turn % team->nth == team->ith) join(s, block, r.t + i / nh, i % nh, r.n_slot, r.n_parts);
        end = r.t;
    }
}

/* ---- what it works on ---- */

static size_t lines(size_t bytes) { return (bytes + 63) / 64 * 16; } /* floats that fill cache lines */

/* Rows of scores are no power of two apart, for those would share few places in the cache. */
pi_attention_room pi_attention_room_of(const pi_session *s) {
    enum { ROWS = 256, MOST_PARTS = 64, MOST_BYTES = 64 << 20, PIECES = 4 }; /* pieces: the last ones end together */
    const pi_model_info *i = &s->model->info;
    const te_gemm_kernels *g = &s->model->kernels->gemm;
    const int32_t d = i->n_embd_head > s->model->head_key ? i->n_embd_head : s->model->head_key,
                  n_threads = s->options.n_threads, most = s->options.n_ctx / PI_ATTENTION_PART;
    int32_t n_head_kv = i->n_head_kv; /* of the layer that has the fewest */
    for (int32_t l = 0; l < i->n_layer; l++) {
        const pi_attention *a = pi_attention_of(&s->model->layer[l]);
        if (a && a->n_head_kv < n_head_kv) n_head_kv = a->n_head_kv;
    }
    const int32_t group = i->n_head / n_head_kv;
    pi_attention_room r = {.ld = PI_ATTENTION_SPAN + 16, .part_floats = lines(sizeof(float) * ((size_t)d + 2))};
    r.rows = group > ROWS ? group : ROWS;
    r.n_slot = n_threads > 1 ? (PIECES * n_threads + n_head_kv - 1) / n_head_kv : 1;
    if (r.n_slot > MOST_PARTS) r.n_slot = MOST_PARTS;
    if (r.n_slot > most) r.n_slot = most;
    if (r.n_slot < 1) r.n_slot = 1;
    const size_t part_bytes = pi_mul(pi_mul((size_t)i->n_head, (size_t)r.n_slot), r.part_floats * sizeof(float));
    r.n_tok = part_bytes > MOST_BYTES / 32 ? 16 : 32;
    const size_t n = (size_t)r.rows, head = lines(pi_mul(sizeof(float), pi_mul(n, (size_t)d)));
    const int32_t k = d > PI_KV_BLOCK ? d : PI_KV_BLOCK;
    r.out = head;
    r.sums = r.out + head;
    r.packed_q = r.sums + lines(n * 2 * sizeof(float));
    r.packed = r.packed_q + lines(g->pack_bytes(r.rows, d));
    r.work = r.packed + lines(g->pack_bytes(r.rows, PI_KV_BLOCK));
    size_t work = g->scratch_bytes(r.rows, k);
    if (g->attend_bytes) {
        const size_t of_attend = g->attend_bytes(r.rows, d, d, SPAN);
        if (of_attend > work) work = of_attend;
    }
    r.score = r.work + lines(work);
    r.seen = r.score + lines(pi_mul(sizeof(float), pi_mul(n, r.ld)));
    r.floats = pi_add(r.seen, lines(n * 2 * sizeof(float)));
    return r;
}
