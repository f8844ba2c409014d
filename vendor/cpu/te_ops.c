/* te_ops.c - the workspace, and products of a matrix with the vectors of one or many tokens, by a whole team. */
#include "te_ops.h"

#include <stdlib.h>
#include <string.h>

#include "../core/te_os.h"
#include "te_workspace.h"

/* ---- workspace ---- */

/* Adds count * each bytes, rounded up to cache lines, to *total; returns where they begin. *ok becomes false if a size
 * overflows. */
static size_t reserve(size_t *total, size_t count, size_t each, bool *ok) {
    const size_t limit = SIZE_MAX / 4;
    const size_t at = *total;
    if (each != 0 && count > limit / each) *ok = false;
    if (!*ok) return 0;
    const size_t n = (count * each + 127) / 128 * 128;
    if (n > limit - at) {
        *ok = false;
        return 0;
    }
    *total = at + n;
    return at;
}

/* Activations of n tokens as some GEMM wants them. */
static size_t packed_bytes(const te_kernels *k, int32_t n_tok, int32_t cols) {
    size_t most = k->gemm.pack_bytes(n_tok, cols);
    for (int i = 0; i < TE_INT8_WAYS; i++) {
        if (k->gemm.int8[i].types == 0) continue;
        const size_t n = k->gemm.int8[i].pack_bytes(n_tok, cols);
        if (n > most) most = n;
    }
    return most;
}

static int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
static int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

/* Those of a slice, or of a piece of te_op_linear_floats. */
static size_t slice_bytes(const te_kernels *k, int32_t n_slice, int32_t cols) {
    const size_t n = packed_bytes(k, n_slice, cols),
                 floats = k->floats.pack_bytes(smaller(n_slice, TE_FLOATS_TOKENS), cols);
    return n > floats ? n : floats;
}

static size_t gemm_bytes(const te_kernels *k, const te_workspace_limits *limits) {
    const size_t n = k->gemm.scratch_bytes(limits->max_tok, limits->max_cols),
                 floats = limits->mixture ? k->floats.scratch_bytes(limits->max_tok, limits->max_cols) : 0;
    return n > floats ? n : floats;
}

/* Whether so many packings by others instead of one's own are worth a barrier. */
static bool worth_waiting(int32_t n_threads, int32_t n_tok) { return (n_threads - 1) * n_tok >= 16 && n_tok >= 4; }

te_status te_workspace_new(const te_kernels *k, te_workspace_limits limits, te_workspace **out) {
    *out = NULL;
    if (limits.n_threads < 1 || limits.max_tok < 1 || limits.max_cols < 1 || limits.max_rows < 1 ||
        limits.n_threads > 4096 || limits.max_tok > INT32_MAX - 256 || limits.max_cols > INT32_MAX - 256 ||
        limits.max_rows > INT32_MAX - 256)
        return te_fail(TE_ARGUMENT, "a workspace of %d threads, %d tokens, %d columns and %d rows is out of range",
                       limits.n_threads, limits.max_tok, limits.max_cols, limits.max_rows);

    const size_t pass = (size_t)smaller(limits.max_tok, TE_WORKSPACE_TOKENS), n_threads = (size_t)limits.n_threads;
    size_t act = 0;
    for (int type = 0; type < TE_TYPE_LIMIT; type++) {
        const size_t n = k->row[type].act_bytes ? k->row[type].act_bytes(limits.max_cols) : 0;
        if (n > act) act = n;
    }
    /* An odd number of cache lines: where it is a multiple of 64 of them, as with 14,336 columns, the same columns of all
     * tokens are in one set of the first cache. Q4_0 on AVX2, Zen 4, 8 and 16 tokens: 0.97 of the time. */
    act = ((act + 63) / 64 | 1) * 64;
    const size_t acc = te_acc_floats(limits.max_cols);

    size_t total = 0;
    bool ok = true;
    const size_t act_at[2] = {reserve(&total, pass, act, &ok), reserve(&total, pass, act, &ok)};
    const size_t sums_at[2] = {reserve(&total, pass, acc * sizeof(float), &ok),
                               reserve(&total, pass, acc * sizeof(float), &ok)};
    const size_t queue_at = reserve(&total, pass, TE_QUEUE_FLOATS * sizeof(float), &ok);
    const size_t floats_at = reserve(&total, (size_t)larger(limits.max_cols, limits.max_rows), sizeof(float), &ok);
    const size_t gemm_at = reserve(&total, 1, gemm_bytes(k, &limits), &ok);
    const int32_t n_slice = limits.mixture ? smaller(TE_SLICE_TOKENS, limits.max_tok) : 0;
    const size_t slice_at =
        reserve(&total, n_slice > 0, n_slice > 0 ? slice_bytes(k, n_slice, limits.max_cols) : 0, &ok);
    const bool has_glu = n_slice > 0 && k->gemm.glu;
    const size_t hidden_at = reserve(&total, has_glu, has_glu ? k->gemm.pack_bytes(n_slice, limits.max_cols) : 0, &ok);
    const size_t each = total;
    total = 0;
    reserve(&total, n_threads, each, &ok);
    const size_t packed_at = reserve(&total, 1, packed_bytes(k, limits.max_tok, limits.max_cols), &ok);
    const bool together = worth_waiting(limits.n_threads, (int32_t)pass);
    const size_t together_at = reserve(&total, together ? 4 * pass : 0, act, &ok);
    if (!ok)
        return te_fail(TE_MEMORY, "a workspace of %d tokens of %d columns is too large", limits.max_tok,
                       limits.max_cols);

    te_workspace *w = calloc(1, sizeof *w + n_threads * sizeof w->member[0]);
    char *memory = w ? te_os_alloc(total) : NULL;
    if (!memory) {
        free(w);
        return te_fail(TE_MEMORY, "no memory for a workspace of %zu bytes", total);
    }
    w->k = k;
    w->limits = limits;
    w->n_bytes = total;
    w->memory = memory;
    w->packed = memory + packed_at;
    for (size_t i = 0; together && i < 4; i++) w->together[i / 2][i % 2] = memory + together_at + i * pass * act;
    w->act_stride = act;
    w->sum_stride = acc;
    for (size_t i = 0; i < n_threads; i++) {
        char *own = memory + i * each;
        te_member *m = &w->member[i];
        m->act[0] = own + act_at[0];
        m->act[1] = own + act_at[1];
        m->sums[0] = (float *)(own + sums_at[0]);
        m->sums[1] = (float *)(own + sums_at[1]);
        m->queue = (float *)(own + queue_at);
        m->floats = (float *)(own + floats_at);
        m->gemm = own + gemm_at;
        m->slice = own + slice_at;
        m->hidden = own + hidden_at;
    }
    *out = w;
    return TE_OK;
}

void te_workspace_free(te_workspace *w) {
    if (!w) return;
    te_os_free(w->memory, w->n_bytes);
    free(w);
}

size_t te_workspace_bytes(const te_workspace *w) { return w->n_bytes; }

/* ---- activations that members pack together ---- */

bool te_packs_together(const te_team *team, const te_workspace *ws, int32_t n_tok) {
    return ws->together[0][0] && worth_waiting(team->nth, n_tok);
}

void te_together_add(te_together *p, const te_workspace *ws, const te_mat *m) {
    if (p->n < 2 && !te_together_of(p, ws, m)) {
        p->act[p->n] = ws; /* until it is packed */
        p->by[p->n++] = te_rows_of(ws, m);
    }
}

const void *te_together_of(const te_together *p, const te_workspace *ws, const te_mat *m) {
    for (int32_t i = 0; i < p->n; i++)
        if (p->by[i]->act_pack == te_rows_of(ws, m)->act_pack) return p->act[i];
    return NULL;
}

void te_pack_together(te_team *team, const te_workspace *ws, te_together *p, int32_t cols, const float *x, size_t ldx,
                      int32_t n_tok) {
    enum { PIECE = 2048 }; /* columns: whole chunks of every format, whose activations follow each other */
    const int32_t n_pieces = (cols + PIECE - 1) / PIECE;
    int64_t lo, hi;
    te_share(team, (int64_t)n_tok * n_pieces, 1, &lo, &hi);
    for (int32_t i = 0; i < p->n; i++) {
        char *to = ws->together[team->turn & 1][i];
        for (int64_t u = lo; u < hi; u++) {
            const size_t t = (size_t)(u / n_pieces);
            const int32_t c = (int32_t)(u % n_pieces) * PIECE;
            p->by[i]->act_pack(x + ldx * t + c, smaller(cols - c, PIECE),
                               to + ws->act_stride * t + p->by[i]->act_bytes(c));
        }
        p->act[i] = to;
    }
    te_barrier(team);
    team->turn++;
}

/* ---- sums over members ---- */

void te_sums_begin(const te_workspace *ws, const te_team *team, int32_t chain, int32_t n_tok, int32_t cols) {
    for (int32_t t = 0; t < n_tok; t++) memset(te_sums(ws, team, chain, t), 0, te_acc_floats(cols) * sizeof(float));
}

void te_sums_add(const te_team *team, const te_workspace *ws, const te_work *d, const te_mat *m, int32_t t, int32_t lo,
                 int32_t hi, float *y) {
    const te_row_kernels *k = te_rows_of(ws, m);
    /* Blocks of 256 weights may have 272 sums, other formats have one for each column. */
    const bool blocks = te_type_get(m->type)->block_weights == 256;
    const size_t first = (size_t)(blocks ? lo / 256 * 272 : lo), end = blocks ? te_acc_floats(hi) : (size_t)hi;
    for (int32_t i = 0; i < d->n_chains; i++) {
        /* Other members wrote them: many lines have to be on their way at a time. */
        if (i + 2 < d->n_chains)
            for (size_t c = first; c < end; c += 16) __builtin_prefetch(te_sums(ws, team, i + 2, t) + c);
        k->acc_add(te_sums(ws, team, i, t), m->cols, lo, hi, y);
    }
}

void te_sums_end(te_team *team, te_workspace *ws, const te_work *d, const te_mat *m, int32_t n_tok, float *y,
                 size_t ldy, bool first, const float *bias) {
    te_barrier(team);
    int64_t lo, hi;
    te_sums_share(team, m->cols, &lo, &hi);
    for (int32_t t = 0; t < n_tok && lo < hi; t++) {
        float *yt = y + ldy * (size_t)t;
        if (first && bias) memcpy(yt + lo, bias + lo, (size_t)(hi - lo) * sizeof(float));
        if (first && !bias) memset(yt + lo, 0, (size_t)(hi - lo) * sizeof(float));
        te_sums_add(team, ws, d, m, t, (int32_t)lo, (int32_t)hi, yt);
    }
    team->turn++;
}

/* ---- products ---- */

/* Packs [n_tok][k] by the whole team; returns when it is complete and no panel is handed out yet. */
static void pack_for_gemm(te_team *team, te_workspace *ws, te_gemm_pack *pack, const float *x, size_t ldx,
                          int32_t n_tok, int32_t k) {
    int64_t t0, t1;
    te_barrier(team); /* a slower member may still work on the activations of the last product */
    if (team->ith == 0) te_counter_reset(team, TE_COUNTER_UNITS);
    te_share(team, n_tok, ws->k->gemm.pack_unit, &t0, &t1);
    if (t0 < t1) pack(x, ldx, NULL, n_tok, k, (int32_t)t0, (int32_t)t1, ws->packed);
    te_barrier(team);
}

/* The next of n units of work, [*lo, *hi); false if there are none left. Whoever is free takes them, so that a member
 * whose CPU is shared holds nobody up: in each round every member half of what would be its share of the rest, since
 * fewer and longer calls are faster (AMX, Q4_0: in parts of 256 rows 0.9 of the speed of two halves, so 0.97). The
 * parts are the same whoever takes them. */
static bool take_units(te_team *team, int64_t n, int64_t *lo, int64_t *hi) {
    const int64_t nth = team->nth, least = n < 16 * nth ? 1 : 2;
    int64_t i = te_counter_take(team, TE_COUNTER_UNITS, 1), first = 0, size = n / (2 * nth);
    while (i >= nth && size > least) {
        i -= nth;
        first += nth * size;
        size = (n - first) / (2 * nth);
    }
    if (size < least) size = least;
    *lo = first + i * size;
    *hi = *lo + size < n ? *lo + size : n;
    return *lo < n;
}

static int64_t units_of(const te_linear *l, int32_t unit) { return ((int64_t)l->w.n_rows + unit - 1) / unit; }

enum { BY_ROWS, BY_GEMM, BY_INT8 }; /* BY_INT8 + i: by gemm.int8[i] */

static int gemm_number(const te_gemm_kernels *g, int32_t type) {
    for (int i = 0; i < TE_INT8_WAYS; i++)
        if (g->int8[i].types >> type & 1) return BY_INT8 + i;
    return BY_GEMM;
}

static te_gemm_way way_number(const te_gemm_kernels *g, int by) {
    if (by == BY_GEMM) return (te_gemm_way){g->pack, g->gemm, NULL};
    const te_int8_kernels *k = &g->int8[by - BY_INT8];
    return (te_gemm_way){k->pack, k->gemm, k->by_token ? k->pack_bytes : NULL};
}

te_gemm_way te_gemm_of(const te_kernels *k, int32_t type) { return way_number(&k->gemm, gemm_number(&k->gemm, type)); }

te_gemm_way te_gemm_t_of(const te_kernels *k) { return (te_gemm_way){k->gemm.pack_t, k->gemm.gemm_t, NULL}; }

static int way_of(const te_workspace *ws, const te_linear *l, int32_t n_tok) {
    const te_gemm_kernels *g = &ws->k->gemm;
    if (l->way == TE_BY_ROWS || (l->way == TE_BY_COUNT && n_tok < g->linear_min_tok[l->w.type])) return BY_ROWS;
    return gemm_number(g, l->w.type);
}

/* Those of the products that are computed in this way. */
static void linear_gemm(te_team *team, te_workspace *ws, const te_linear *products, int32_t n_products, const float *x,
                        size_t ldx, int32_t n_tok, int by) {
    const te_gemm_kernels *g = &ws->k->gemm;
    const te_gemm_way way = way_number(g, by);
    int64_t units = 0;
    for (int32_t p = 0; p < n_products; p++)
        if (way_of(ws, &products[p], n_tok) == by) units += units_of(&products[p], g->row_unit);
    if (units == 0) return;
    pack_for_gemm(team, ws, way.pack, x, ldx, n_tok, products[0].w.cols);
    g->begin();
    /* The panels of all products are one sequence. */
    for (int64_t lo, hi; take_units(team, units, &lo, &hi);) {
        int64_t first = 0;
        for (int32_t p = 0; p < n_products && first < hi; p++) {
            const te_linear *l = &products[p];
            if (way_of(ws, l, n_tok) != by) continue;
            const int64_t n = units_of(l, g->row_unit);
            const int64_t u0 = lo > first ? lo - first : 0, u1 = hi - first < n ? hi - first : n;
            if (u0 < u1) {
                const int64_t r1 = u1 * g->row_unit;
                way.gemm(&l->w, (int32_t)(u0 * g->row_unit), r1 < l->w.n_rows ? (int32_t)r1 : l->w.n_rows, ws->packed,
                         n_tok, l->y, l->ldy, l->bias, l->add, ws->member[team->ith].gemm);
            }
            first += n;
        }
    }
    g->end();
}

/* Rows [lo, hi) of one product for n_tok <= TE_WORKSPACE_TOKENS tokens, packed in act; t: the first one's number. */
static void linear_rows(te_workspace *ws, te_member *me, const te_linear *l, const void *act, int32_t lo, int32_t hi,
                        int32_t n_tok, size_t t) {
    const te_row_kernels *k = te_rows_of(ws, &l->w);
    /* As many rows in one call as there is room for: the prefetched stream never breaks off. */
    const int32_t most = l->add ? larger(larger(ws->limits.max_cols, ws->limits.max_rows) / n_tok, 1) : hi - lo;
    for (int32_t r = lo, n; r < hi; r += n) {
        n = smaller(hi - r, most);
        float *y = l->y + l->ldy * t + r, *d = l->add ? me->floats : y;
        const size_t ldd = l->add ? (size_t)n : l->ldy;
        const te_rows rows = {NULL, r, n}, next = {NULL, r + n, smaller(n, hi - r - n)};
        const te_ahead ahead = {next.n > 0 ? &l->w : NULL, next}, none = {0};
        if (n_tok == 1)
            k->dot(&l->w, rows, none, act, d);
        else
            k->dot_batch(&l->w, rows, ahead, (te_tokens){NULL, n_tok}, act, ws->act_stride, d, ldd);
        for (int32_t i = 0; i < n_tok; i++, y += l->ldy, d += ldd) {
            if (l->bias)
                for (int32_t c = 0; c < n; c++) d[c] += l->bias[r + c];
            if (l->add)
                for (int32_t c = 0; c < n; c++) y[c] += d[c];
        }
    }
}

/* Into how many parts a chain is cut: as many as leave a part so large that stopping and starting again costs little. */
static int32_t linear_parts(const te_team *team, const te_linear *products, int32_t n_products) {
    enum { PART_BYTES = 64 << 10, MOST = 8 };
    size_t n_bytes = 0;
    for (int32_t p = 0; p < n_products; p++) n_bytes += products[p].w.stride * (size_t)products[p].w.n_rows;
    const size_t n = n_bytes / (size_t)te_pool_n_threads(team->pool) / PART_BYTES;
    return n < 1 ? 1 : n > MOST ? MOST : (int32_t)n;
}

/* Few rows are dealt out by fours, which then share cache lines with those of other members. */
static bool are_few(const te_team *team, int64_t n_rows) { return n_rows < 64 * te_pool_n_threads(team->pool); }

static int32_t row_unit(const te_team *team, int64_t n_rows) { return are_few(team, n_rows) ? 4 : 16; }

void te_op_linear_ahead(te_team *team, const te_mat *const *w, int32_t n, size_t n_bytes) {
    int64_t units = 0, n_rows = 0, lo, hi, first = 0;
    for (int32_t p = 0; p < n; p++) n_rows += w[p]->n_rows;
    const int32_t unit = row_unit(team, n_rows);
    for (int32_t p = 0; p < n; p++) units += (w[p]->n_rows + unit - 1) / unit;
    te_share_of(team->ith, te_pool_n_threads(team->pool), units, 1, &lo, &hi);
    te_ahead_begin(team);
    for (int32_t p = 0; p < n; p++) {
        const int64_t n_units = (w[p]->n_rows + unit - 1) / unit, u0 = lo > first ? lo - first : 0,
                      u1 = hi - first < n_units ? hi - first : n_units;
        first += n_units;
        const int64_t r0 = u0 * unit, r1 = u1 * unit < w[p]->n_rows ? u1 * unit : w[p]->n_rows;
        if (r0 < r1) te_ahead_rows(team, w[p], r0, r1, &n_bytes);
    }
}

enum { TOKENS = 8 }; /* that row kernels like at a time */

/* Few rows and many tokens, as those of a router and many sequences: members share the tokens instead of the rows, so that they
 * need not meet for every 32 of them. */
static void linear_tokens(te_team *team, te_workspace *ws, const te_linear *products, int32_t n_products,
                          const float *x, size_t ldx, int32_t n_tok) {
    enum { EACH = TE_WORKSPACE_TOKENS / TOKENS };
    const int32_t units = (n_tok + TOKENS - 1) / TOKENS, n_chains = te_pool_n_threads(team->pool),
                  most = (units + n_chains - 1) / n_chains;
    te_member *me = &ws->member[team->ith];
    te_work d;
    te_work_begin(team, &d, (most + EACH - 1) / EACH, false);
    while (te_work_next(team, &d)) {
        int64_t lo, hi;
        te_pack_fn *packed_for = NULL;
        te_work_share(&d, n_tok, TOKENS, &lo, &hi);
        for (int32_t p = 0; p < n_products && lo < hi; p++) {
            const te_linear *l = &products[p];
            if (way_of(ws, l, n_tok) != BY_ROWS) continue;
            te_pack(ws, me, 0, &l->w, x + ldx * (size_t)lo, ldx, (int32_t)(hi - lo), &packed_for);
            linear_rows(ws, me, l, te_act(ws, me, 0, 0), 0, l->w.n_rows, (int32_t)(hi - lo), (size_t)lo);
        }
    }
}

void te_op_linear(te_team *team, te_workspace *ws, const te_linear *products, int32_t n_products, const float *x,
                  size_t ldx, int32_t n_tok) {
    if (n_products < 1) return;
    for (int by = BY_GEMM; by < BY_INT8 + TE_INT8_WAYS; by++)
        linear_gemm(team, ws, products, n_products, x, ldx, n_tok, by);
    te_member *me = &ws->member[team->ith];
    int64_t units = 0, n_rows = 0;
    for (int32_t p = 0; p < n_products; p++) n_rows += products[p].w.n_rows;
    const int32_t unit = row_unit(team, n_rows);
    for (int32_t p = 0; p < n_products; p++)
        if (way_of(ws, &products[p], n_tok) == BY_ROWS) units += units_of(&products[p], unit);
    if (units == 0) return;
    if (are_few(team, n_rows) && n_tok > TE_WORKSPACE_TOKENS && n_tok >= TOKENS * te_pool_n_threads(team->pool)) {
        linear_tokens(team, ws, products, n_products, x, ldx, n_tok);
        return;
    }
    const int32_t n_parts = linear_parts(team, products, n_products);
    for (int32_t t = 0; t < n_tok; t += TE_WORKSPACE_TOKENS) {
        const int32_t n = smaller(n_tok - t, TE_WORKSPACE_TOKENS);
        te_pack_fn *packed_for = NULL;
        te_together together = {0};
        if (te_packs_together(team, ws, n)) {
            for (int32_t p = 0; p < n_products; p++)
                if (way_of(ws, &products[p], n_tok) == BY_ROWS) te_together_add(&together, ws, &products[p].w);
            te_pack_together(team, ws, &together, products[0].w.cols, x + ldx * (size_t)t, ldx, n);
        }
        te_work d;
        te_work_begin(team, &d, n_parts, false);
        while (te_work_next(team, &d)) {
            /* The rows of all these products are one sequence. */
            int64_t lo, hi, first = 0;
            te_work_share(&d, units, 1, &lo, &hi);
            for (int32_t p = 0; p < n_products && first < hi; p++) {
                const te_linear *l = &products[p];
                if (way_of(ws, l, n_tok) != BY_ROWS) continue;
                const int64_t n_units = units_of(l, unit);
                const int64_t u0 = lo > first ? lo - first : 0, u1 = hi - first < n_units ? hi - first : n_units;
                first += n_units;
                if (u0 >= u1) continue;
                const int64_t r1 = u1 * unit;
                const void *act = te_together_of(&together, ws, &l->w);
                if (!act) te_pack(ws, me, 0, &l->w, x + ldx * (size_t)t, ldx, n, &packed_for);
                linear_rows(ws, me, l, act ? act : te_act(ws, me, 0, 0), (int32_t)(u0 * unit),
                            r1 < l->w.n_rows ? (int32_t)r1 : l->w.n_rows, n, (size_t)t);
            }
        }
    }
}

void te_op_linear_floats(te_team *team, te_workspace *ws, const te_linear *l, const float *x, size_t ldx,
                         int32_t n_tok) {
    enum { LANES = 16, ROWS = 16, PARTS = 2 };
    const te_gemm_kernels *g = &ws->k->floats;
    te_member *me = &ws->member[team->ith];
    const int32_t units = (n_tok + LANES - 1) / LANES, row_units = (l->w.n_rows + ROWS - 1) / ROWS;
    /* Of few tokens members share the rows, too. */
    const int32_t many_units = 2 * te_pool_n_threads(team->pool),
                  n_cuts = smaller((many_units + units - 1) / units, row_units);
    te_work d;
    te_work_begin(team, &d, PARTS, false);
    g->begin();
    while (te_work_next(team, &d)) {
        int64_t lo, hi;
        te_work_share(&d, (int64_t)units * n_cuts, 1, &lo, &hi);
        for (int64_t i = lo, n; i < hi; i += n) {
            const int32_t cut = (int32_t)(i / units), u = (int32_t)(i % units);
            n = smaller(smaller((int32_t)(hi - i), units - u), TE_FLOATS_TOKENS / LANES);
            const int32_t t = u * LANES, n_some = smaller((int32_t)n * LANES, n_tok - t);
            int64_t r0, r1;
            te_share_of(cut, n_cuts, l->w.n_rows, ROWS, &r0, &r1);
            g->pack(x + ldx * (size_t)t, ldx, NULL, n_some, l->w.cols, 0, n_some, me->slice);
            g->gemm(&l->w, (int32_t)r0, (int32_t)r1, me->slice, n_some, l->y + l->ldy * (size_t)t, l->ldy, l->bias,
                    l->add, me->gemm);
        }
    }
    g->end();
}

void te_op_linear_t(te_team *team, te_workspace *ws, const te_mat *w, const float *h, size_t ldh, int32_t n_tok,
                    const float *bias, float *y, size_t ldy, bool add, te_way by) {
    if (by == TE_BY_GEMM || (by == TE_BY_COUNT && n_tok >= ws->k->gemm.min_tok)) {
        const te_gemm_kernels *g = &ws->k->gemm;
        /* A unit begins with a block of every format; small ones for those that allow it, when there are many members. */
        const int32_t unit = te_type_get(w->type)->block_weights > 64 ? 256 : 64;
        pack_for_gemm(team, ws, g->pack_t, h, ldh, n_tok, w->n_rows);
        g->begin();
        for (int64_t lo, hi; take_units(team, ((int64_t)w->cols + unit - 1) / unit, &lo, &hi);)
            g->gemm_t(w, (int32_t)lo * unit, smaller((int32_t)hi * unit, w->cols), ws->packed, n_tok, y, ldy, bias, add,
                      ws->member[team->ith].gemm);
        g->end();
        return;
    }
    const te_row_kernels *k = te_rows_of(ws, w);
    for (int32_t t0 = 0; t0 < n_tok; t0 += TE_WORKSPACE_TOKENS) {
        const int32_t n = smaller(n_tok - t0, TE_WORKSPACE_TOKENS);
        int64_t lo, hi;
        te_work d;
        te_work_begin(team, &d, 4, true);
        while (te_work_next(team, &d)) {
            if (d.part == 0) te_sums_begin(ws, team, d.chain, n, w->cols);
            te_work_share(&d, w->n_rows, 1, &lo, &hi);
            const te_rows rows = {NULL, (int32_t)lo, (int32_t)(hi - lo)};
            const te_ahead none = {0};
            const float *a = h + ldh * (size_t)t0 + lo;
            float *sums = te_sums(ws, team, d.chain, 0);
            if (n == 1)
                k->axpy(w, rows, none, a, sums);
            else
                k->axpy_batch(w, rows, none, (te_tokens){NULL, n}, a, ldh, sums, ws->sum_stride);
        }
        float *yt = y + ldy * (size_t)t0;
        te_sums_end(team, ws, &d, w, n, yt, ldy, !add, bias);
        if (add && bias) {
            te_sums_share(team, w->cols, &lo, &hi);
            for (int32_t t = 0; t < n && lo < hi; t++)
                ws->k->add(bias + lo, (int32_t)(hi - lo), yt + ldy * (size_t)t + lo);
        }
    }
}
