/* te_ffn.c - the fused feed-forward over a list of neurons: gate, up, activation and down without leaving the list.
 * The stages that neurons pass are in te_pass.h. */
#include <string.h>

#include "te_ops.h"
#include "te_pass.h"

_Static_assert(2 * TE_QUEUE_ROOM <= TE_QUEUE_FLOATS, "both queues' values");

static float *value(const te_queue *q, int32_t t) { return q->value + (size_t)t * TE_QUEUE_FLOATS; }

/* The entries i < n that token t wants; returns how many. */
static int32_t wanted(const te_queue *q, int32_t n, int32_t t, int32_t *entry) {
    int32_t count = 0;
    for (int32_t i = 0; i < n; i++) {
        entry[count] = i;
        count += (int32_t)(q->tokens[i] >> t & 1);
    }
    return count;
}

/* y[t * ldy + i] = row id[i] . x_t for the tokens that want it; packed activations of set `which`. */
static void products(const te_pass *p, const te_mat *m, const int32_t *id, const uint32_t *tokens, int32_t n,
                     te_ahead ahead, int32_t which, float *y, size_t ldy) {
    const te_row_kernels *k = te_rows_of(p->ws, m);
    const te_rows rows = {id, 0, n};
    const void *act = p->act[which];
    if (p->n_tok == 1)
        k->dot(m, rows, ahead, act, y);
    else
        k->dot_batch(m, rows, ahead, (te_tokens){tokens, p->n_tok}, act, p->ws->act_stride, y, ldy);
}

static void drop_front(te_queue *q, int32_t n, int32_t n_tok) {
    const size_t left = (size_t)(q->n - n);
    memmove(q->id, q->id + n, left * sizeof q->id[0]);
    memmove(q->tokens, q->tokens + n, left * sizeof q->tokens[0]);
    for (int32_t t = 0; t < n_tok; t++) memmove(value(q, t), value(q, t) + n, left * sizeof(float));
    q->n -= n;
}

static void count_rows(const te_pass *p, const te_mat *m, int32_t n) {
    p->counts->rows += n;
    p->counts->bytes += (int64_t)te_row_bytes(m->type, m->cols) * n;
}

static void put_hidden(const te_pass *p, int32_t t, int32_t id, float h) { p->hidden[t][id] = h; }

/* What is added to token t's product with neuron id's row. */
static float added(const te_pass *p, const float *add, int32_t t, int32_t id) {
    return add ? add[p->io->ld_add * (size_t)t + (size_t)id] : 0.0f;
}

/* Whether the up row of a neuron with this gate value can be left out. */
static bool silent(const te_ffn *f, float g) { return f->act == TE_DRELU ? !(g > 0) : !(g > f->threshold) || g == 0; }

/* The tokens that want neuron j, which is at place i of the list. */
static uint32_t wanted_by(const te_pass *p, int32_t i, int32_t j) {
    const te_ffn_io *io = p->io;
    if (p->only) return p->only;
    if (io->tokens) return io->tokens[i];
    if (!io->mask) return UINT32_MAX >> (TE_WORKSPACE_TOKENS - p->n_tok);
    uint32_t tokens = 0;
    for (int32_t t = 0; t < p->n_tok; t++)
        tokens |= (uint32_t)(io->mask[io->ld_mask * (size_t)t + (size_t)j] != 0) << t;
    return tokens;
}

/* Takes rows i0 .. i0+n-1 of the list in: their gate products, and what passes goes to p->gated. */
static void gate_stage(te_pass *p, te_rows rows, int32_t i0, int32_t n, te_ahead ahead) {
    const te_ffn *f = p->f;
    te_queue *q = &p->gated;
    const int32_t at = q->n; /* the new entries are at[0..listed-1] */
    int32_t listed = 0;
    for (int32_t i = 0; i < n; i++) {
        const int32_t j = te_row_at(rows, i0 + i);
        const uint32_t tokens = wanted_by(p, i0 + i, j);
        p->counts->listed += p->n_tok == 1 ? tokens : (uint32_t)__builtin_popcount(tokens);
        if (!tokens) continue;
        q->id[at + listed] = j;
        q->tokens[at + listed++] = tokens;
    }
    if (!f->gate.w) {
        q->n += listed;
        return;
    }
    if (listed == 0) return;
    count_rows(p, &f->gate, listed);
    products(p, &f->gate, q->id + at, q->tokens + at, listed, ahead, 0, value(q, 0) + at, TE_QUEUE_FLOATS);
    for (int32_t i = at; i < at + listed; i++) { /* those that no token wants any more leave no gaps */
        uint32_t tokens = q->tokens[i];
        for (uint32_t left = tokens; left; left &= left - 1) {
            const int32_t t = __builtin_ctz(left);
            const float g = value(q, t)[i] + added(p, p->io->gate_add, t, q->id[i]);
            value(q, t)[q->n] = g;
            if (!p->skip || !silent(f, g)) continue;
            tokens &= ~(1u << t);
            if (p->hidden) put_hidden(p, t, q->id[i], 0.0f);
        }
        q->id[q->n] = q->id[i];
        q->tokens[q->n] = tokens;
        q->n += tokens != 0;
    }
}

/* The first n of p->gated: their hidden values, and what is not 0 goes to p->hidden. */
static void up_stage(te_pass *p, int32_t n, te_ahead ahead) {
    const te_ffn *f = p->f;
    float products_of[TE_WORKSPACE_TOKENS * TE_GROUP], u[TE_GROUP], g[TE_GROUP];
    int32_t entry[TE_GROUP];
    te_queue *in = &p->gated, *out = &p->down;
    uint32_t fired[TE_GROUP] = {0};
    count_rows(p, &f->up, n);
    products(p, &f->up, in->id, in->tokens, n, ahead, 1, products_of, TE_GROUP);
    for (int32_t t = 0; t < p->n_tok; t++) {
        const int32_t count = wanted(in, n, t, entry);
        for (int32_t i = 0; i < count; i++) {
            u[i] = products_of[t * TE_GROUP + entry[i]] + added(p, p->io->up_add, t, in->id[entry[i]]);
            if (f->gate.w)
                g[i] = value(in, t)[entry[i]];
            else if (f->up_bias)
                u[i] += f->up_bias[in->id[entry[i]]];
        }
        if (!count) continue;
        if (f->act == TE_XIELU)
            p->ws->k->xielu(&f->curve, u, count, u);
        else
            p->ws->k->glu(f->act, f->threshold, f->gate.w ? g : NULL, u, count, u);
        if (f->gate.w || !p->skip) p->counts->computed += count;
        for (int32_t i = 0; i < count; i++) {
            const int32_t id = in->id[entry[i]];
            if (u[i] != 0) {
                fired[entry[i]] |= 1u << t;
                p->counts->fired++;
                if (p->io->fired) p->io->fired[id]++;
                if (!f->gate.w && p->skip) p->counts->computed++;
            }
            if (p->hidden) put_hidden(p, t, id, u[i]);
            if (f->down.w) value(out, t)[out->n + entry[i]] = p->weight ? p->weight[t] * u[i] : u[i];
        }
    }
    if (f->down.w) {
        const int32_t at = out->n;
        for (int32_t i = 0; i < n; i++) {
            const uint32_t tokens = p->skip ? fired[i] : in->tokens[i];
            if (!tokens) continue;
            out->id[out->n] = in->id[i];
            out->tokens[out->n] = tokens;
            for (int32_t t = 0; t < p->n_tok; t++) value(out, t)[out->n] = value(out, t)[at + i];
            out->n++;
        }
    }
    drop_front(in, n, p->n_tok);
}

static void down_stage(te_pass *p, int32_t n, te_ahead ahead) {
    const te_mat *down = &p->f->down;
    const te_row_kernels *k = te_rows_of(p->ws, down);
    const te_queue *q = &p->down;
    const te_rows rows = {q->id, 0, n};
    count_rows(p, down, n);
    if (p->n_tok == 1)
        k->axpy(down, rows, ahead, value(q, 0), p->sums);
    else
        k->axpy_batch(down, rows, ahead, (te_tokens){q->tokens, p->n_tok}, value(q, 0), TE_QUEUE_FLOATS, p->sums,
                      p->ws->sum_stride);
    drop_front(&p->down, n, p->n_tok);
}

static int32_t ready(const te_pass *p, const te_queue *q, bool last) {
    return q->n >= p->group ? p->group : last ? q->n : 0;
}
static te_ahead front(const te_mat *m, const te_queue *q, int32_t n) { return (te_ahead){m, {q->id, 0, n}}; }

void te_pass_begin(te_pass *p, const te_member *me) {
    p->group = p->n_tok == 1 ? TE_GROUP_OF_ONE : TE_GROUP;
    p->gated.value = me->queue;
    p->down.value = me->queue + TE_QUEUE_ROOM;
}

/* ---- one token of which all neurons are looked at ----
 *
 * The first matrix, gate or without gates up, is read as a dense layer reads it, in one stream, and between its segments
 * the rows of the others that the segment before leaves. Q4_0, 10 % active, two threads of a Zen 5 that read 74 GB/s:
 * AFM-4.5B's shape, without gates, in groups 50 GB/s, in segments of 64 rows 51, of 256 60, of 1024 66; Llama-2-7B's, with
 * gates, in groups 48, in segments of 1024 57. */

/* Neurons of a segment that are not out yet, with their gate values, or without gates their hidden ones. */
enum { SEGMENT = 1024 };
typedef struct left_over {
    int32_t n, id[SEGMENT];
    float value[SEGMENT];
} left_over;

/* The group of them that begins at a place, and what matrix of it is wanted. */
static te_ahead group_of(const te_pass *p, const left_over *l, int32_t at) {
    const int32_t n = l->n - at < p->group ? l->n - at : p->group;
    return n > 0 ? (te_ahead){p->f->gate.w ? &p->f->up : &p->f->down, {l->id + at, 0, n}} : (te_ahead){0};
}

/* The first products of a segment. Beside its last rows, those that come next are fetched. */
static void stream_segment(te_pass *p, te_rows rows, const left_over *next, left_over *out) {
    const te_ffn *f = p->f;
    const te_mat *m = f->gate.w ? &f->gate : &f->up;
    const te_row_kernels *k = te_rows_of(p->ws, m);
    const char *act = p->act[f->gate.w ? 0 : 1];
    const float *add = f->gate.w ? p->io->gate_add : p->io->up_add, *bias = f->gate.w ? NULL : f->up_bias;
    const int32_t n_last = next->n == 0 || rows.n < p->group ? 0 : p->group, most = rows.n - n_last;
    float v[SEGMENT];
    p->counts->listed += rows.n;
    count_rows(p, m, rows.n);
    if (most) k->dot(m, te_rows_part(rows, 0, most), (te_ahead){0}, act, v);
    if (n_last) k->dot(m, te_rows_part(rows, most, rows.n), group_of(p, next, 0), act, v + most);
    for (int32_t i = 0; i < rows.n; i++) {
        const int32_t id = te_row_at(rows, i);
        v[i] += added(p, add, 0, id) + (bias ? bias[id] : 0.0f);
    }
    if (!f->gate.w) p->ws->k->glu(f->act, f->threshold, NULL, v, rows.n, v);
    out->n = 0;
    for (int32_t i = 0; i < rows.n; i++) {
        const int32_t id = te_row_at(rows, i);
        const bool stays = f->gate.w ? !silent(f, v[i]) : v[i] != 0;
        if (p->hidden && (!f->gate.w || !stays)) put_hidden(p, 0, id, f->gate.w ? 0.0f : v[i]);
        if (p->io->fired && !f->gate.w) p->io->fired[id] += stays;
        out->id[out->n] = id;
        out->value[out->n] = v[i];
        out->n += stays;
    }
    if (f->gate.w) return;
    p->counts->computed += out->n;
    p->counts->fired += out->n;
    for (int32_t i = 0; p->weight && i < out->n; i++) out->value[i] *= p->weight[0];
}

/* Their rows of up and down. */
static void pass_gated(te_pass *p, const left_over *l) {
    te_queue *q = &p->gated;
    for (int32_t i = 0, n; i < l->n; i += n) {
        n = l->n - i < p->group ? l->n - i : p->group;
        for (q->n = 0; q->n < n; q->n++) {
            q->id[q->n] = l->id[i + q->n];
            q->tokens[q->n] = 1;
            q->value[q->n] = l->value[i + q->n];
        }
        const int32_t n_down = ready(p, &p->down, false);
        const te_ahead next = group_of(p, l, i + n);
        up_stage(p, n, n_down ? front(&p->f->down, &p->down, n_down) : next);
        if (n_down) down_stage(p, n_down, next);
    }
}

/* Their rows of down. */
static void add_fired(te_pass *p, const left_over *l) {
    const te_mat *down = &p->f->down;
    if (!down->w) return;
    count_rows(p, down, l->n);
    for (int32_t i = 0; i < l->n; i += p->group)
        te_rows_of(p->ws, down)
            ->axpy(down, group_of(p, l, i).rows, group_of(p, l, i + p->group), l->value + i, p->sums);
}

static void fetch_rows(te_ahead some) {
    for (int32_t i = 0; i < some.rows.n && some.m->w; i++) {
        const char *row = (const char *)some.m->w + some.m->stride * (size_t)te_row_at(some.rows, i);
        const size_t n_bytes = te_row_bytes(some.m->type, some.m->cols);
        for (size_t c = 0; c < n_bytes; c += 64) __builtin_prefetch(row + c, 0, 2);
    }
}

static bool is_stream(const te_pass *p, te_rows rows, int32_t n) {
    enum { LEAST = 64 }; /* neurons; fewer are looked at in groups */
    return p->n_tok == 1 && p->skip && !rows.row && n >= LEAST && (p->only || (!p->io->tokens && !p->io->mask));
}

static void stream_neurons(te_pass *p, te_rows rows, int32_t lo, int32_t hi) {
    void (*const finish)(te_pass *, const left_over *) = p->f->gate.w ? pass_gated : add_fired;
    left_over two[2];
    two[1].n = 0;
    int32_t turn = 0;
    for (int32_t i = lo; i < hi; i += SEGMENT, turn ^= 1) {
        stream_segment(p, te_rows_part(rows, i, hi - i < SEGMENT ? hi : i + SEGMENT), &two[!turn], &two[turn]);
        finish(p, &two[!turn]);
    }
    fetch_rows(group_of(p, &two[!turn], 0));
    finish(p, &two[!turn]);
    for (int32_t n; p->down.n; down_stage(p, n, (te_ahead){0})) n = ready(p, &p->down, true);
}

void te_pass_neurons(te_pass *p, te_rows rows, int32_t lo, int32_t hi) {
    const te_ffn *f = p->f;
    const te_mat *first = f->gate.w ? &f->gate : &f->up;
    const int32_t group = p->group;
    if (is_stream(p, rows, hi - lo)) {
        stream_neurons(p, rows, lo, hi);
        return;
    }
    for (int32_t i = lo; i < hi || p->gated.n || p->down.n; i += group) {
        const int32_t fresh = hi - i > group ? group : hi - i > 0 ? hi - i : 0;
        const int32_t n_up = ready(p, &p->gated, fresh == 0), n_down = ready(p, &p->down, fresh == 0 && n_up == 0);
        const int32_t left = hi - i - fresh;
        te_ahead after = {0}; /* what the next turn begins with */
        if (left > 0)
            after = (te_ahead){first, te_rows_part(rows, i + fresh, i + fresh + (left > group ? group : left))};
        te_ahead after_up = n_down ? front(&f->down, &p->down, n_down) : after;
        if (fresh) gate_stage(p, rows, i, fresh, n_up ? front(&f->up, &p->gated, n_up) : after_up);
        if (n_up) {
            if (!n_down && !f->gate.w && p->gated.n > n_up) { /* without gates the next up rows are already waiting */
                after_up = (te_ahead){&f->up, {p->gated.id + n_up, 0, p->gated.n - n_up}};
            }
            up_stage(p, n_up, after_up);
        }
        if (n_down) {
            if (!f->gate.w && p->gated.n) after = front(&f->up, &p->gated, p->gated.n > group ? group : p->gated.n);
            down_stage(p, n_down, after);
        }
    }
}

/* Into how many parts a chain of the list is cut: the queues run empty at the end of each. Short ones let members end
 * together, since cores get unequal shares of the memory's rate: for lists of rows that are partly in their caches. Else
 * they cost more than that (172 rows a member of F16: a third of the time). */
static int32_t ffn_parts(const te_team *team, int32_t n, bool short_ones) {
    const int32_t part = short_ones ? 2 : 16, most = short_ones ? 64 : 4;
    const int32_t n_parts = n / te_pool_n_threads(team->pool) / part;
    return n_parts < 1 ? 1 : n_parts > most ? most : n_parts;
}

int32_t te_pass_up_act(const te_workspace *ws, const te_ffn *f) {
    return f->gate.w && te_rows_of(ws, &f->gate)->act_pack == te_rows_of(ws, &f->up)->act_pack ? 0 : 1;
}

static void pack(const te_workspace *ws, const te_member *me, const te_ffn *f, const te_ffn_io *io, int32_t n_tok) {
    te_pack_fn *packed_for = NULL, *packed_for_up = NULL;
    if (f->gate.w) te_pack(ws, me, 0, &f->gate, io->x, io->ldx, n_tok, &packed_for);
    if (te_pass_up_act(ws, f) == 1) te_pack(ws, me, 1, &f->up, io->x, io->ldx, n_tok, &packed_for_up);
}

void te_op_ffn_pack(const te_team *team, te_workspace *ws, const te_ffn *f, const te_ffn_io *io) {
    pack(ws, &ws->member[team->ith], f, io, io->n_tok);
}

void te_op_ffn_pack_token(te_workspace *ws, const te_ffn *f, const te_ffn_io *io, int32_t t) {
    const te_member *to = &ws->member[0];
    const float *x = io->x + io->ldx * (size_t)t;
    if (f->gate.w) te_rows_of(ws, &f->gate)->act_pack(x, f->gate.cols, te_act(ws, to, 0, t));
    if (te_pass_up_act(ws, f) == 1) te_rows_of(ws, &f->up)->act_pack(x, f->up.cols, te_act(ws, to, 1, t));
}

/* As te_sums_end, of tokens t0 ..., to the sink. */
static void sums_to_sink(te_team *team, const te_workspace *ws, const te_work *d, const te_pass *p, float *y,
                         int32_t t0) {
    const te_mat *down = &p->f->down;
    int64_t lo, hi;
    te_barrier(team);
    te_sums_share(team, down->cols, &lo, &hi);
    for (int32_t t = 0; t < p->n_tok && lo < hi; t++) {
        memset(y + lo, 0, (size_t)(hi - lo) * sizeof *y);
        te_sums_add(team, ws, d, down, t, (int32_t)lo, (int32_t)hi, y);
        p->io->sink(p->io->sink_ctx, t0 + t, (int32_t)lo, (int32_t)hi, y);
    }
    team->turn++;
}

/* The first place of the list with a neuron >= j. */
static int32_t place_of(te_rows rows, int32_t j) {
    int32_t lo = 0, hi = rows.n;
    while (lo < hi) {
        const int32_t mid = lo + (hi - lo) / 2;
        if (te_row_at(rows, mid) < j)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The places of the list that a part has. */
static void share(const te_work *d, const te_ffn *f, te_rows rows, const te_ffn_io *io, int64_t *lo, int64_t *hi) {
    if (io->n_of) {
        te_share_of(d->part, d->n_parts, io->n_of[d->chain], 1, lo, hi);
        *lo += (int64_t)d->chain * io->room;
        *hi += (int64_t)d->chain * io->room;
        return;
    }
    if (!io->by_neuron) {
        te_work_share(d, rows.n, 1, lo, hi);
        return;
    }
    int64_t first, last;
    te_share_of(d->chain, d->n_chains, f->up.n_rows, 1, &first, &last);
    const int32_t at = place_of(rows, (int32_t)first);
    te_share_of(d->part, d->n_parts, place_of(rows, (int32_t)last) - at, 1, lo, hi);
    *lo += at;
    *hi += at;
}

void te_op_ffn(te_team *team, te_workspace *ws, const te_ffn *f, te_rows rows, bool skip, const te_ffn_io *io,
               te_ffn_counts *counts) {
    te_member *me = &ws->member[team->ith];
    te_ffn_counts sum = {0};
    const int32_t n_parts = ffn_parts(team, rows.n, io->listed != NULL);
    if (!te_is_relu(f->act)) skip = false;
    for (int32_t t0 = 0; t0 < io->n_tok; t0 += TE_WORKSPACE_TOKENS) {
        const size_t t = (size_t)t0;
        te_ffn_io part = *io;
        part.x += io->ldx * t;
        if (io->mask) part.mask += io->ld_mask * t;
        if (io->y) part.y += io->ldy * t;
        if (io->hidden) part.hidden += io->ld_hidden * t;
        if (io->gate_add) part.gate_add += io->ld_add * t;
        if (io->up_add) part.up_add += io->ld_add * t;
        const te_member *packed = io->packed_once ? &ws->member[0] : me;
        float *hidden[TE_WORKSPACE_TOKENS];
        te_pass p = {.ws = ws,
                     .f = f,
                     .io = &part,
                     .act = {te_act(ws, packed, 0, 0), te_act(ws, packed, te_pass_up_act(ws, f), 0)},
                     .hidden = io->hidden ? hidden : NULL,
                     .skip = skip,
                     .counts = &sum};
        p.n_tok = io->n_tok - t0 < TE_WORKSPACE_TOKENS ? io->n_tok - t0 : TE_WORKSPACE_TOKENS;
        for (int32_t i = 0; io->hidden && i < p.n_tok; i++) hidden[i] = part.hidden + io->ld_hidden * (size_t)i;
        te_pass_begin(&p, me);
        if (!io->is_packed && te_packs_together(team, ws, p.n_tok)) {
            te_together together = {0};
            if (f->gate.w) te_together_add(&together, ws, &f->gate);
            te_together_add(&together, ws, &f->up);
            te_pack_together(team, ws, &together, f->up.cols, part.x, io->ldx, p.n_tok);
            if (f->gate.w) p.act[0] = te_together_of(&together, ws, &f->gate);
            p.act[1] = te_together_of(&together, ws, &f->up);
        } else if (!io->is_packed) {
            pack(ws, me, f, &part, p.n_tok);
        }
        te_work d;
        te_work_begin(team, &d, n_parts, f->down.w != NULL);
        while (te_work_next(team, &d)) {
            int64_t lo, hi;
            share(&d, f, rows, io, &lo, &hi);
            p.sums = te_sums(ws, team, d.chain, 0);
            if (f->down.w && d.part == 0) te_sums_begin(ws, team, d.chain, p.n_tok, f->down.cols);
            te_pass_neurons(&p, rows, (int32_t)lo, (int32_t)hi);
            /* Next to each other: all members read them. */
            for (int64_t i = lo; io->hidden && io->listed && i < hi; i++)
                io->listed[io->place ? io->place[i] : i] = io->hidden[te_row_at(rows, (int32_t)i)];
        }
        if (f->down.w && io->sink)
            sums_to_sink(team, ws, &d, &p, me->floats, t0);
        else if (f->down.w)
            te_sums_end(team, ws, &d, &f->down, p.n_tok, part.y, io->ldy, false, NULL);
    }
    if (counts) *counts = sum;
}

bool te_ffn_columns(const te_team *team, const te_mat *down, int32_t *lo, int32_t *hi) {
    enum { UNIT = 32 }; /* a line of F16, a block of most formats */
    int64_t first, last;
    te_share(team, down->cols, UNIT, &first, &last);
    *lo = (int32_t)first;
    *hi = (int32_t)last;
    return te_type_get(down->type)->block_weights <= UNIT;
}

void te_op_ffn_down(te_team *team, te_workspace *ws, const te_mat *down, te_rows rows, const te_ffn_io *io,
                    te_ffn_counts *counts) {
    enum { TAKEN = 64 }; /* rows in one call */
    te_member *me = &ws->member[team->ith];
    int32_t lo, hi, id[TAKEN];
    float h[TAKEN], *y = me->floats;
    te_ffn_columns(team, down, &lo, &hi);
    if (lo == hi) return; /* nobody waits for this member, so what it reads may already be of the next operation */
    te_mat part = *down;
    part.w = (const char *)down->w + te_row_bytes(down->type, lo);
    part.cols = hi - lo;
    float *sums = me->sums[0];
    memset(sums, 0, te_acc_floats(part.cols) * sizeof *sums);
    int64_t n_rows = 0;
    for (int32_t i = 0; i < rows.n;) {
        int32_t n = 0;
        for (; i < rows.n && n < TAKEN; i++) {
            id[n] = te_row_at(rows, i);
            h[n] = io->listed[i];
            n += h[n] != 0;
        }
        n_rows += n;
        te_rows_of(ws, down)->axpy(&part, (te_rows){id, 0, n}, (te_ahead){0}, h, sums);
    }
    memset(y + lo, 0, (size_t)part.cols * sizeof *y);
    te_rows_of(ws, down)->acc_add(sums, part.cols, 0, part.cols, y + lo);
    io->sink(io->sink_ctx, 0, lo, hi, y);
    if (lo == 0) {
        counts->rows += n_rows;
        counts->bytes += n_rows * (int64_t)te_row_bytes(down->type, down->cols);
    }
}
