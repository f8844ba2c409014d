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

static int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
static int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

te_status te_workspace_new(const te_kernels *k, te_workspace_limits limits, te_workspace **out) {
    *out = NULL;
    if (limits.n_threads < 1 || limits.max_tok < 1 || limits.max_cols < 1 || limits.max_rows < 1 ||
        limits.n_threads > 4096 || limits.max_cols > INT32_MAX - 256 || limits.max_rows > INT32_MAX - 256)
        return te_fail(TE_ARGUMENT, "a workspace of %d threads, %d tokens, %d columns and %d rows is out of range",
                       limits.n_threads, limits.max_tok, limits.max_cols, limits.max_rows);

    const size_t pass = (size_t)smaller(limits.max_tok, TE_PASS_TOK), n_threads = (size_t)limits.n_threads;
    size_t act = 0;
    for (int type = 0; type < TE_TYPE_LIMIT; type++) {
        const size_t n = k->row[type].act_bytes ? k->row[type].act_bytes(limits.max_cols) : 0;
        if (n > act) act = n;
    }
    act = (act + 63) / 64 * 64;
    const size_t acc = te_acc_floats(limits.max_cols);

    size_t total = 0;
    bool ok = true;
    const size_t act_at[2] = {reserve(&total, pass, act, &ok), reserve(&total, pass, act, &ok)};
    const size_t sums_at[2] = {reserve(&total, pass, acc * sizeof(float), &ok),
                               reserve(&total, pass, acc * sizeof(float), &ok)};
    const size_t queue_at = reserve(&total, pass, TE_QUEUE_FLOATS * sizeof(float), &ok);
    const size_t floats_at = reserve(&total, (size_t)larger(limits.max_cols, limits.max_rows), sizeof(float), &ok);
    const size_t gemm_at = reserve(&total, 1, k->gemm.scratch_bytes(limits.max_tok, limits.max_cols), &ok);
    const size_t each = total;
    total = 0;
    reserve(&total, n_threads, each, &ok);
    const size_t packed_at = reserve(&total, 1, k->gemm.pack_bytes(limits.max_tok, limits.max_cols), &ok);
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

float *te_workspace_floats(te_workspace *w, const te_team *team, int32_t n) {
    (void)n; /* n <= max(max_cols, max_rows), by contract */
    return w->member[team->ith].floats;
}

/* ---- sums over members ---- */

void te_sums_begin(const te_workspace *ws, te_member *me, int32_t n_tok, int32_t cols) {
    for (int32_t t = 0; t < n_tok; t++) memset(te_sums(ws, me, t), 0, te_acc_floats(cols) * sizeof(float));
}

void te_sums_end(te_team *team, te_workspace *ws, const te_mat *m, int32_t n_tok, float *y, size_t ldy, bool first,
                 const float *bias) {
    te_barrier(team);
    te_member *me = &ws->member[team->ith];
    const te_row_kernels *k = te_rows_of(ws, m);
    int64_t lo, hi;
    te_share(team, m->cols, 256, &lo, &hi);
    for (int32_t t = 0; t < n_tok && lo < hi; t++) {
        float *yt = y + ldy * (size_t)t;
        if (first && bias) memcpy(yt + lo, bias + lo, (size_t)(hi - lo) * sizeof(float));
        if (first && !bias) memset(yt + lo, 0, (size_t)(hi - lo) * sizeof(float));
        for (int32_t i = 0; i < team->nth; i++) {
            const float *sums =
                ws->member[i].sums[me->turn] + ws->sum_stride * (size_t)t; /* turns are the same for all members */
            k->acc_add(sums, m->cols, (int32_t)lo, (int32_t)hi, yt);
        }
    }
    me->turn ^= 1;
}

/* ---- products ---- */

/* Packs [n_tok][k] for gemm, or for gemm_t, by the whole team; returns when it is complete. */
static void pack_for_gemm(te_team *team, te_workspace *ws, bool transposed, const float *x, size_t ldx, int32_t n_tok,
                          int32_t k) {
    const te_gemm_kernels *g = &ws->k->gemm;
    int64_t t0, t1;
    te_barrier(team); /* a slower member may still work on the activations of the last product */
    te_share(team, n_tok, g->pack_unit, &t0, &t1);
    if (t0 < t1) (transposed ? g->pack_t : g->pack)(x, ldx, n_tok, k, (int32_t)t0, (int32_t)t1, ws->packed);
    te_barrier(team);
}

static void linear_gemm(te_team *team, te_workspace *ws, const te_linear *products, int32_t n_products, const float *x,
                        size_t ldx, int32_t n_tok) {
    const te_gemm_kernels *g = &ws->k->gemm;
    te_member *me = &ws->member[team->ith];
    pack_for_gemm(team, ws, false, x, ldx, n_tok, products[0].w.cols);
    int64_t units = 0;
    for (int32_t p = 0; p < n_products; p++) units += ((int64_t)products[p].w.n_rows + g->row_unit - 1) / g->row_unit;
    /* The panels of all products are one sequence, of which each member takes a part. */
    int64_t lo, hi, first = 0;
    te_share(team, units, 1, &lo, &hi);
    g->begin();
    for (int32_t p = 0; p < n_products; p++) {
        const te_linear *l = &products[p];
        const int64_t n = ((int64_t)l->w.n_rows + g->row_unit - 1) / g->row_unit;
        const int64_t u0 = lo > first ? lo - first : 0, u1 = hi - first < n ? hi - first : n;
        if (u0 < u1) {
            const int64_t r1 = u1 * g->row_unit;
            g->gemm(&l->w, (int32_t)(u0 * g->row_unit), r1 < l->w.n_rows ? (int32_t)r1 : l->w.n_rows, ws->packed, n_tok,
                    l->y, l->ldy, l->bias, l->add, me->gemm);
        }
        first += n;
    }
    g->end();
}

/* Rows [lo, hi) of one product for n_tok <= TE_PASS_TOK tokens that are packed. */
static void linear_rows(te_workspace *ws, te_member *me, const te_linear *l, int32_t lo, int32_t hi, int32_t n_tok,
                        size_t t_first) {
    enum { tile = 32 }; /* rows that stay in the cache while all tokens pass over them */
    const te_row_kernels *k = te_rows_of(ws, &l->w);
    const te_ahead none = {0};
    for (int32_t r = lo; r < hi;) {
        const int32_t left = hi - r;
        /* One token: all rows in one call, the prefetched stream never breaks off. */
        const int32_t n = n_tok == 1 ? smaller(left, ws->limits.max_cols) : smaller(left, tile);
        const te_rows rows = {NULL, r, n};
        for (int32_t t = 0; t < n_tok; t++) {
            float *y = l->y + l->ldy * (t_first + (size_t)t) + r;
            float *d = l->add ? me->floats : y;
            const te_rows next = {NULL, r + n, smaller(n, hi - r - n)};
            const te_ahead ahead = {&l->w, next};
            k->dot(&l->w, rows, n_tok > 1 && t == 0 && next.n > 0 ? ahead : none, te_act(ws, me, 0, t), d);
            if (l->bias)
                for (int32_t i = 0; i < n; i++) d[i] += l->bias[r + i];
            if (l->add)
                for (int32_t i = 0; i < n; i++) y[i] += d[i];
        }
        r += n;
    }
}

void te_op_linear(te_team *team, te_workspace *ws, const te_linear *products, int32_t n_products, const float *x,
                  size_t ldx, int32_t n_tok) {
    if (n_products < 1) return;
    if (n_tok >= ws->k->gemm.min_tok) {
        linear_gemm(team, ws, products, n_products, x, ldx, n_tok);
        return;
    }
    te_member *me = &ws->member[team->ith];
    for (int32_t t = 0; t < n_tok; t += TE_PASS_TOK) {
        const int32_t n = smaller(n_tok - t, TE_PASS_TOK);
        te_pack_fn *packed_for = NULL;
        for (int32_t p = 0; p < n_products; p++) {
            const te_linear *l = &products[p];
            te_pack(ws, me, 0, &l->w, x + ldx * (size_t)t, ldx, n, &packed_for);
            int64_t lo, hi;
            te_share(team, l->w.n_rows, 16, &lo, &hi);
            linear_rows(ws, me, l, (int32_t)lo, (int32_t)hi, n, (size_t)t);
        }
    }
}

void te_op_linear_t(te_team *team, te_workspace *ws, const te_mat *w, const float *h, size_t ldh, int32_t n_tok,
                    const float *bias, float *y, size_t ldy, bool add) {
    enum { group = 64 };
    if (n_tok >= ws->k->gemm.min_tok) {
        const te_gemm_kernels *g = &ws->k->gemm;
        int64_t lo, hi;
        pack_for_gemm(team, ws, true, h, ldh, n_tok, w->n_rows);
        te_share(team, w->cols, 256, &lo, &hi);
        g->begin();
        if (lo < hi)
            g->gemm_t(w, (int32_t)lo, (int32_t)hi, ws->packed, n_tok, y, ldy, bias, add, ws->member[team->ith].gemm);
        g->end();
        return;
    }
    te_member *me = &ws->member[team->ith];
    int64_t lo, hi;
    te_share(team, w->n_rows, 1, &lo, &hi);
    const te_row_kernels *k = te_rows_of(ws, w);
    for (int32_t t0 = 0; t0 < n_tok; t0 += TE_PASS_TOK) {
        const int32_t n = smaller(n_tok - t0, TE_PASS_TOK);
        te_sums_begin(ws, me, n, w->cols);
        for (int64_t r = lo; r < hi; r += group) {
            const int32_t n_rows = hi - r < group ? (int32_t)(hi - r) : group;
            const te_rows rows = {NULL, (int32_t)r, n_rows};
            for (int32_t t = 0; t < n; t++) {
                const te_ahead none = {0};
                k->axpy(w, rows, none, h + ldh * (size_t)(t0 + t) + r, te_sums(ws, me, t));
            }
        }
        float *yt = y + ldy * (size_t)t0;
        te_sums_end(team, ws, w, n, yt, ldy, !add, bias);
        if (add && bias) {
            te_share(team, w->cols, 256, &lo, &hi);
            for (int32_t t = 0; t < n && lo < hi; t++)
                ws->k->add(bias + lo, (int32_t)(hi - lo), yt + ldy * (size_t)t + lo);
            te_share(team, w->n_rows, 1, &lo, &hi);
        }
    }
}
