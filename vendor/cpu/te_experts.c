/* te_experts.c - the chosen experts of a mixture. Generated tokens, down stored by output:
 *
 *     the rows of all experts' gates and ups are one sequence, which members share; a barrier
 *     the rows of all experts' downs are another; a barrier
 *     members share the columns of the sums over a token's routes
 *
 * Down stored by neuron, and neurons that may be left out: te_experts_neurons.c.
 *
 * Prompts: a task is an expert with some of its tokens, all three products of it, so that members meet only at the end. */
#include "te_experts_run.h"

#include <string.h>

enum { UNIT = 16 }; /* rows: members' outputs don't share cache lines */

/* The matrix whose rows are read first. */
static const te_mat *first_mat(const te_expert *e) { return e->gate.w ? &e->gate : &e->up; }

/* Hidden values of n neurons of a token, from what their rows' products are. g NULL: they have no gate. */
static void open_neurons(const te_experts_run *r, const float *g, const float *u, int32_t n, float *h) {
    const te_mixture *m = r->m;
    const float least = m->act == TE_RELU ? m->threshold : 0;
    int32_t fired = 0, open = 0;
    for (int32_t i = 0; i < n && g; i++) open += g[i] > least;
    r->ws->k->glu(m->act, m->threshold, g, u, n, h);
    for (int32_t i = 0; i < n; i++) fired += h[i] != 0;
    r->counts->listed += n;
    r->counts->computed += te_silences(m) ? open : n;
    r->counts->fired += fired;
}

/* ---- generated tokens ---- */

void te_op_experts_pack(const te_team *team, te_workspace *ws, const te_mat *gate, const te_mat *up, const float *x,
                        size_t ldx, int32_t n_tok) {
    const te_ffn f = {.gate = *gate, .up = *up};
    const te_ffn_io io = {.x = x, .ldx = ldx};
    /* The last members first: the first one has other things to do. */
    for (int32_t t = team->nth - 1 - team->ith; t < n_tok; t += team->nth) te_op_ffn_pack_token(ws, &f, &io, t);
}

/* The products of rows lo..hi-1 with one packed vector: one stream, which ends in the next one's beginning. */
static void stream(const te_experts_run *r, const te_mat *m, int32_t lo, int32_t hi, te_ahead next, const void *act,
                   float *y) {
    const te_row_kernels *k = te_rows_of(r->ws, m);
    const int32_t end = hi - lo > next.rows.n ? hi - next.rows.n : lo;
    const te_ahead none = {0};
    if (end > lo) k->dot(m, (te_rows){NULL, lo, end - lo}, none, act, y);
    if (hi > end) k->dot(m, (te_rows){NULL, end, hi - end}, next, act, y + (end - lo));
}

/* Neurons j0..j1-1 of an expert, none of them left out. next: the rows that this member reads after them. */
static void whole_neurons(const te_experts_run *r, const te_expert *e, int32_t j0, int32_t j1, te_ahead next) {
    const te_mixture *m = r->m;
    const size_t n_ff = (size_t)e->up.n_rows, room = r->ws->sum_stride, stride = r->ws->act_stride;
    const te_ffn f = te_operator_of(m, e);
    const int32_t up_act = te_pass_up_act(r->ws, &f);
    const bool gated = e->gate.w != NULL;
    float *g = r->me->sums[0], *u = r->me->sums[1];
    const uint32_t tokens = te_tokens_of(m, e);
    uint32_t bits[256];
    enum { MOST = sizeof bits / sizeof *bits };
    for (int32_t j = j0, n; j < j1; j += n) {
        n = te_smaller(j1 - j, te_smaller((int32_t)room, e->n == 1 ? INT32_MAX : MOST));
        const te_ahead after = j + n < j1 ? te_next_rows(first_mat(e), j + n) : next;
        if (e->n == 1) {
            const int32_t t = m->token[e->first];
            if (gated) stream(r, &e->gate, j, j + n, te_next_rows(&e->up, j), te_experts_input(r, 0, t), g);
            stream(r, &e->up, j, j + n, after, te_experts_input(r, up_act, t), u);
        } else {
            for (int32_t i = 0; i < n; i++) bits[i] = tokens;
            const te_tokens who = {bits, m->n_tok};
            const te_rows rows = {NULL, j, n};
            if (gated)
                te_rows_of(r->ws, &e->gate)
                    ->dot_batch(&e->gate, rows, (te_ahead){&e->up, rows}, who, te_experts_input(r, 0, 0), stride, g,
                                room);
            te_rows_of(r->ws, &e->up)
                ->dot_batch(&e->up, rows, after, who, te_experts_input(r, up_act, 0), stride, u, room);
        }
        for (int32_t i = 0; i < e->n; i++) {
            const size_t p = (size_t)e->first + (size_t)i, at = e->n == 1 ? 0 : room * (size_t)m->token[p];
            if (e->gate_b) te_add_bias(e->gate_b + j, n, g + at);
            if (e->up_b) te_add_bias(e->up_b + j, n, u + at);
            open_neurons(r, gated ? g + at : NULL, u + at, n, m->hidden + n_ff * p + j);
        }
    }
    if (gated) te_count_rows(r, &e->gate, j1 - j0);
    te_count_rows(r, &e->up, j1 - j0);
}

/* The rows lo..hi-1 of expert *i that a run of units begins with, which then has fewer; *i: at first -1. */
static bool next_expert(int64_t *first, int64_t last, int32_t n_rows, int32_t *i, int32_t *lo, int32_t *hi) {
    if (*first >= last) return false;
    const int64_t each = (n_rows + UNIT - 1) / UNIT, at = *first % each, n = each - at;
    *i = (int32_t)(*first / each);
    const int64_t end = last - *first < n ? at + last - *first : each;
    *lo = (int32_t)(at * UNIT);
    *hi = te_smaller((int32_t)(end * UNIT), n_rows);
    *first += end - at;
    return true;
}

static int64_t units_of(const te_mixture *m, int32_t n_rows) {
    return (int64_t)m->n_experts * ((n_rows + UNIT - 1) / UNIT);
}

/* Hidden values of all routes. */
static void open_experts(const te_experts_run *r) {
    const te_mixture *m = r->m;
    const te_expert *e0 = &m->expert[0];
    const int32_t n_ff = e0->up.n_rows;
    te_work d;
    te_work_begin(r->team, &d,
                  te_parts_of(r->team, (te_all_bytes(&e0->gate) + te_all_bytes(&e0->up)) * (size_t)m->n_experts),
                  false);
    while (te_work_next(r->team, &d)) {
        int64_t first, last;
        int32_t i = -1, lo, hi;
        te_work_share(&d, units_of(m, n_ff), 1, &first, &last);
        while (next_expert(&first, last, n_ff, &i, &lo, &hi)) {
            const te_expert *e = &m->expert[i];
            const te_ahead next = first < last ? te_next_rows(first_mat(&e[1]), 0) : (te_ahead){0};
            if (te_silences(m))
                te_experts_neurons(r, e, lo, hi, NULL, next);
            else
                whole_neurons(r, e, lo, hi, next);
        }
    }
}

/* The first rows of down that this member is dealt are what it fetches while it waits for hidden values. */
static void downs_ahead(const te_experts_run *r) {
    const te_mixture *m = r->m;
    const int32_t n_rows = m->expert[0].down.n_rows;
    int64_t first, last;
    size_t left = 64 << 10;
    int32_t i, lo, hi;
    te_share_of(r->team->ith, te_pool_n_threads(r->team->pool), units_of(m, n_rows), 1, &first, &last);
    te_ahead_begin(r->team);
    if (next_expert(&first, last, n_rows, &i, &lo, &hi)) te_ahead_rows(r->team, &m->expert[i].down, lo, hi, &left);
}

/* Outputs of all routes. */
static void close_experts(const te_experts_run *r) {
    const te_mixture *m = r->m;
    te_workspace *ws = r->ws;
    const te_expert *e0 = &m->expert[0];
    const te_row_kernels *k = te_rows_of(ws, &e0->down);
    const size_t cols = (size_t)e0->down.n_rows, n_ff = (size_t)e0->down.cols;
    int32_t packed = -1;
    te_work d;
    te_work_begin(r->team, &d, te_parts_of(r->team, te_all_bytes(&e0->down) * (size_t)m->n_experts), false);
    while (te_work_next(r->team, &d)) {
        int64_t first, last;
        int32_t i = -1, lo, hi;
        te_work_share(&d, units_of(m, (int32_t)cols), 1, &first, &last);
        while (next_expert(&first, last, (int32_t)cols, &i, &lo, &hi)) {
            const te_expert *e = &m->expert[i];
            te_pack_fn *packed_for = NULL;
            if (packed != i)
                te_pack(ws, r->me, 0, &e->down, m->hidden + n_ff * (size_t)e->first, n_ff, e->n, &packed_for);
            packed = i;
            const te_ahead next = first < last ? te_next_rows(&e[1].down, 0) : (te_ahead){0};
            float *y = m->out + cols * (size_t)e->first + lo;
            const void *act = te_act(ws, r->me, 0, 0);
            if (e->n == 1)
                stream(r, &e->down, lo, hi, next, act, y);
            else
                k->dot_batch(&e->down, (te_rows){NULL, lo, hi - lo}, next, (te_tokens){NULL, e->n}, act, ws->act_stride,
                             y, cols);
            for (int32_t t = 0; t < e->n && e->down_b; t++) te_add_bias(e->down_b + lo, hi - lo, y + cols * (size_t)t);
            r->counts->bytes += (int64_t)te_row_bytes(e->down.type, e->down.cols) * (hi - lo);
            if (lo == 0) r->counts->rows += (int64_t)n_ff;
        }
    }
}

/* The sums over tokens' routes. Members share the columns, or of many tokens those: a row of out is read in one piece. */
static void sum_routes(const te_experts_run *r, bool by_token) {
    const te_mixture *m = r->m;
    int64_t lo = 0, hi = m->cols, t0 = 0, t1 = m->n_tok;
    if (by_token)
        te_share(r->team, m->n_tok, 1, &t0, &t1);
    else
        te_share(r->team, m->cols, UNIT, &lo, &hi);
    int32_t i = 0;
    while (i < m->n_routes && m->token[m->place[i]] < t0) i++;
    for (int64_t t = t0; t < t1; t++) {
        float *y = m->y + m->ldy * (size_t)t;
        int32_t end = i;
        while (end < m->n_routes && m->token[m->place[end]] == t) end++;
        if (!m->add) memset(y + lo, 0, (size_t)(hi - lo) * sizeof *y);
        float sum[UNIT];
        for (int64_t c = lo; c < hi; c += UNIT) {
            const int32_t n = (int32_t)(hi - c < UNIT ? hi - c : UNIT);
            memset(sum, 0, sizeof sum);
            for (int32_t route = i; route < end; route++) {
                const float *out = m->out + (size_t)m->cols * (size_t)m->place[route] + c;
                const float weight = m->weight[m->place[route]];
                for (int32_t l = 0; l < n; l++) sum[l] += weight * out[l];
            }
            for (int32_t l = 0; l < n; l++) y[c + l] += sum[l];
        }
        i = end;
    }
}

void te_op_experts(te_team *team, te_workspace *ws, const te_mixture *m, te_ffn_counts *counts) {
    const te_experts_run r = {team, ws, &ws->member[team->ith], m, counts};
    if (m->n_experts && m->expert[0].down_t.w) {
        te_experts_by_neuron(&r);
        return;
    }
    if (m->n_experts) {
        const te_spans then = team->ahead;
        open_experts(&r);
        downs_ahead(&r);
        te_barrier(team);
        team->ahead = then;
        close_experts(&r);
        te_barrier(team);
    }
    sum_routes(&r, false);
}

/* ---- prompts ---- */

/* Tokens of a slice, at most. Each slice unpacks all of its expert's weights, so large ones are faster as long as every
 * member has some: the last ones are small. */
static int32_t largest_slice(const te_mixture *m, const te_team *team) {
    enum { EACH = 4, LEAST = 96 };
    const int32_t n = m->n_routes / (EACH * te_pool_n_threads(team->pool));
    return n < LEAST ? LEAST : te_smaller((n + UNIT - 1) / UNIT * UNIT, TE_SLICE_TOKENS);
}

/* Into how many slices an expert's tokens are cut, and how many a slice has: whole vectors of tokens. */
static int32_t slices_of(const te_expert *e, int32_t most, int32_t *each) {
    const int32_t n = (e->n + most - 1) / most;
    *each = ((e->n + n - 1) / n + UNIT - 1) / UNIT * UNIT;
    return (e->n + *each - 1) / *each;
}

/* Packs this member's share of all tokens for gate and up, if slices may take copies of them: a token has several experts. */
static void pack_tokens(const te_experts_run *r) {
    const te_mixture *m = r->m;
    const te_gemm_way way = te_gemm_of(r->ws->k, first_mat(&m->expert[0])->type);
    int64_t t0, t1;
    te_share(r->team, m->n_tok, 1, &t0, &t1);
    if (way.token_bytes && t0 < t1)
        way.pack(m->x, m->ldx, NULL, m->n_tok, m->cols, (int32_t)t0, (int32_t)t1, r->ws->packed);
}

/* Packs the input of n routes, unless it is packed so. */
static void pack_slice(const te_experts_run *r, const te_gemm_way *way, int32_t first, int32_t n,
                       te_gemm_pack **packed_for) {
    const te_mixture *m = r->m;
    if (*packed_for == way->pack) return;
    *packed_for = way->pack;
    if (way->token_bytes && way->pack == te_gemm_of(r->ws->k, first_mat(&m->expert[0])->type).pack) {
        const size_t each = way->token_bytes(1, m->cols);
        for (int32_t i = 0; i < n; i++)
            memcpy((char *)r->me->slice + each * (size_t)i,
                   (const char *)r->ws->packed + each * (size_t)m->token[first + i], each);
        return;
    }
    way->pack(m->x, m->ldx, m->token + first, n, m->cols, 0, n, r->me->slice);
}

/* Whether an expert's hidden values come as down's products read them. */
static bool hidden_packed(const te_kernels *k, const te_expert *e) {
    return k->gemm.glu && e->gate.w && e->down.w && te_gemm_of(k, e->gate.type).gemm == k->gemm.gemm &&
           te_gemm_of(k, e->up.type).gemm == k->gemm.gemm && te_gemm_of(k, e->down.type).pack == k->gemm.pack;
}

/* All products of an expert for n of its tokens, as above. */
static void run_packed(const te_experts_run *r, const te_expert *e, int32_t first, int32_t n) {
    const te_mixture *m = r->m;
    const te_gemm_kernels *g = &r->ws->k->gemm;
    const te_gated a = {&e->gate, &e->up, e->gate_b, e->up_b, m->act, m->threshold};
    const int64_t n_all = (int64_t)n * e->up.n_rows;
    int64_t n_open = 0, n_fired = 0;
    g->pack(m->x, m->ldx, m->token + first, n, e->up.cols, 0, n, r->me->slice);
    g->begin();
    g->glu(&a, r->me->slice, n, r->me->hidden, &n_open, &n_fired, r->me->gemm);
    const size_t cols = (size_t)e->up.cols;
    g->gemm(&e->down, 0, (int32_t)cols, r->me->hidden, n, m->out + cols * (size_t)first, cols, e->down_b, false,
            r->me->gemm);
    g->end();
    r->counts->listed += n_all;
    r->counts->computed += te_silences(m) ? n_open : n_all;
    r->counts->fired += n_fired;
}

/* All products of an expert for n of its tokens. most: of a slice. Where it can be, a member's hidden values are always at
 * the same place, which stays in its cache. */
static void run_slice(const te_experts_run *r, const te_expert *e, int32_t first, int32_t n, int32_t most) {
    const te_mixture *m = r->m;
    const te_kernels *k = r->ws->k;
    if (hidden_packed(k, e)) {
        run_packed(r, e, first, n);
        return;
    }
    const int32_t nth = r->team->nth, own = most * nth <= m->n_routes ? most * r->team->ith : first;
    const size_t n_ff = (size_t)e->up.n_rows, cols = (size_t)e->up.cols, at = n_ff * (size_t)own;
    float *g = m->gate + at, *u = m->hidden + at;
    const te_gemm_way gate = te_gemm_of(k, e->gate.type), up = te_gemm_of(k, e->up.type);
    te_gemm_pack *packed_for = NULL;
    if (e->gate.w) {
        pack_slice(r, &gate, first, n, &packed_for);
        k->gemm.begin();
        gate.gemm(&e->gate, 0, e->gate.n_rows, r->me->slice, n, g, n_ff, e->gate_b, false, r->me->gemm);
        k->gemm.end();
    }
    pack_slice(r, &up, first, n, &packed_for);
    k->gemm.begin();
    up.gemm(&e->up, 0, e->up.n_rows, r->me->slice, n, u, n_ff, e->up_b, false, r->me->gemm);
    k->gemm.end();
    for (int32_t i = 0; i < n; i++)
        open_neurons(r, e->gate.w ? g + n_ff * (size_t)i : NULL, u + n_ff * (size_t)i, (int32_t)n_ff,
                     u + n_ff * (size_t)i);
    const te_mat *out = e->down_t.w ? &e->down_t : &e->down;
    const te_gemm_way down = e->down_t.w ? te_gemm_t_of(k) : te_gemm_of(k, out->type);
    down.pack(u, n_ff, NULL, n, (int32_t)n_ff, 0, n, r->me->slice);
    k->gemm.begin();
    down.gemm(out, 0, (int32_t)cols, r->me->slice, n, m->out + cols * (size_t)first, cols, e->down_b, false,
              r->me->gemm);
    k->gemm.end();
}

/* Few large experts: members share each product. */
static void run_together(const te_experts_run *r) {
    const te_mixture *m = r->m;
    const size_t n_ff = (size_t)m->expert[0].up.n_rows, cols = (size_t)m->expert[0].up.cols;
    te_team *team = r->team;
    for (int32_t i = team->ith; i < m->n_routes; i += team->nth)
        memcpy(m->out + cols * (size_t)i, m->x + m->ldx * (size_t)m->token[i], cols * sizeof *m->out);
    te_barrier(team);
    for (int32_t i = 0; i < m->n_experts; i++) {
        const te_expert *e = &m->expert[i];
        const size_t p = (size_t)e->first;
        const te_linear in[2] = {
            {.w = e->up, .bias = e->up_b, .y = m->hidden + n_ff * p, .ldy = n_ff, .way = TE_BY_GEMM},
            {.w = e->gate, .bias = e->gate_b, .y = m->gate + n_ff * p, .ldy = n_ff, .way = TE_BY_GEMM}};
        te_op_linear(team, r->ws, in, e->gate.w ? 2 : 1, m->out + cols * p, cols, e->n);
    }
    te_barrier(team);
    for (int32_t i = team->ith; i < m->n_routes; i += team->nth)
        open_neurons(r, m->expert[0].gate.w ? m->gate + n_ff * (size_t)i : NULL, m->hidden + n_ff * (size_t)i,
                     (int32_t)n_ff, m->hidden + n_ff * (size_t)i);
    te_barrier(team);
    for (int32_t i = 0; i < m->n_experts; i++) {
        const te_expert *e = &m->expert[i];
        const size_t p = (size_t)e->first;
        const te_linear out = {.w = e->down, .bias = e->down_b, .y = m->out + cols * p, .ldy = cols, .way = TE_BY_GEMM};
        if (e->down_t.w)
            te_op_linear_t(team, r->ws, &e->down_t, m->hidden + n_ff * p, n_ff, e->n, e->down_b, m->out + cols * p,
                           cols, false, TE_BY_GEMM);
        else
            te_op_linear(team, r->ws, &out, 1, m->hidden + n_ff * p, n_ff, e->n);
    }
}

void te_op_experts_gemm(te_team *team, te_workspace *ws, const te_mixture *m, te_ffn_counts *counts) {
    enum { EACH = 3 }; /* tasks of a member, at least: else some wait long for the last */
    const te_experts_run r = {team, ws, &ws->member[team->ith], m, counts};
    const int32_t most = largest_slice(m, team);
    int32_t n_tasks = 0, each;
    for (int32_t i = 0; i < m->n_experts; i++) n_tasks += slices_of(&m->expert[i], most, &each);
    for (int32_t i = 0; i < m->n_experts && team->ith == 0; i++) {
        const te_expert *e = &m->expert[i];
        if (e->gate.w) te_count_rows(&r, &e->gate, e->gate.n_rows);
        te_count_rows(&r, &e->up, e->up.n_rows);
        counts->rows += e->up.n_rows;
        counts->bytes += (int64_t)(e->down_t.w ? te_row_bytes(e->down_t.type, e->down_t.cols) * (size_t)e->up.n_rows
                                               : te_row_bytes(e->down.type, e->down.cols) * (size_t)e->up.cols);
    }
    if (n_tasks < EACH * te_pool_n_threads(team->pool)) {
        if (n_tasks) run_together(&r);
    } else {
        int32_t e = 0, task = 0; /* the first task of expert e */
        if (team->ith == 0) te_counter_reset(team, TE_COUNTER_UNITS);
        pack_tokens(&r);
        te_barrier(team);
        for (int64_t i; (i = te_counter_take(team, TE_COUNTER_UNITS, 1)) < n_tasks;) {
            int32_t n = slices_of(&m->expert[e], most, &each);
            for (; i >= task + n; n = slices_of(&m->expert[e], most, &each)) task += n, e++;
            const int32_t at = (int32_t)(i - task) * each;
            run_slice(&r, &m->expert[e], m->expert[e].first + at, te_smaller(each, m->expert[e].n - at), most);
        }
    }
    te_barrier(team);
    sum_routes(&r, true);
}
