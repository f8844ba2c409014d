/* host_ops.c - the operations of the stand-in device, on the CPU's kernels. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_os.h"
#include "../../vendor/core/te_types.h"
#include "../model/rope.h"
#include "host.h"

/* ---- what every operation begins with ---- */

static void mix(pi_host_device *d, uint64_t v) {
    d->calls = (d->calls ^ v) * 0x9E3779B97F4A7C15U;
    d->calls ^= d->calls >> 29;
}
void pi_host_mix(pi_host_device *d, const void *p) { mix(d, (uint64_t)(uintptr_t)p); }
static void mix_mat(pi_host_device *d, const te_mat *m) {
    pi_host_mix(d, m->w);
    mix(d, (uint64_t)m->n_rows << 32 | (uint32_t)m->cols);
}

/* Whether it does: faults that are asked for come here. */
static bool goes_on(pi_device *dev) {
    pi_host_device *d = pi_host(dev);
    pi_host_be_late(d);
    if (PI_HOST_IS_DUE(die)) pi_host_fail(d, PI_FAIL(PI_ERROR_DEVICE, "a fault that was asked for: operation"));
    const bool vanishes = PI_HOST_IS_DUE(vanish);
    __atomic_store_n(&d->vanished, vanishes, __ATOMIC_RELEASE);
    if (vanishes || PI_HOST_IS_DUE(hang))
        while (!__atomic_load_n(dev->cancelled, __ATOMIC_RELAXED)) te_os_wait(dev->cancelled, 0, 1000000);
    if (vanishes) pi_host_fail(d, PI_FAIL(PI_ERROR_DEVICE, "a fault that was asked for: the device is lost"));
    return d->status == PI_OK && !__atomic_load_n(dev->cancelled, __ATOMIC_RELAXED);
}

bool pi_host_begin_op(pi_device *dev, uint64_t kind, int32_t n_tok) {
    pi_host_device *d = pi_host(dev);
    mix(d, kind << 32 | (uint32_t)n_tok);
    return goes_on(dev);
}

/* Room for operations of so many tokens, columns and rows. */
bool pi_host_reserve_work(pi_host_device *d, int32_t n_tok, int32_t cols, int32_t rows) {
    const te_workspace_limits have = d->limits, want = {.n_threads = 1,
                                                        .max_tok = pi_max_i32(n_tok, have.max_tok),
                                                        .max_cols = pi_max_i32(cols, have.max_cols),
                                                        .max_rows = pi_max_i32(rows, have.max_rows)};
    if (d->ws && want.max_tok == have.max_tok && want.max_cols == have.max_cols && want.max_rows == have.max_rows)
        return true;
    te_workspace_free(d->ws);
    d->ws = NULL;
    const pi_status st = (pi_status)te_workspace_new(d->kernels, want, &d->ws);
    if (st == PI_OK) d->limits = want;
    pi_host_fail(d, st);
    return st == PI_OK;
}

float *pi_host_scratch(pi_host_device *d, size_t n_floats) {
    if (n_floats <= d->scratch_floats) return d->scratch;
    float *p = te_os_alloc(pi_mul(n_floats, sizeof(float)));
    if (!p) {
        pi_host_fail(d, PI_FAIL(PI_ERROR_MEMORY, "out of memory for %zu floats of a host device", n_floats));
        return NULL;
    }
    te_os_free(d->scratch, d->scratch_floats * sizeof(float));
    d->scratch = p;
    d->scratch_floats = n_floats;
    return p;
}

static uint32_t ticket_of(const te_ticket *k) { return *k->base + k->add; }

static void norm_row(const pi_host_device *d, const te_norm *n, const float *x, int32_t cols, float *y) {
    if (n->kind == TE_NO_NORM)
        memmove(y, x, sizeof *y * (size_t)cols);
    else if (n->kind == TE_LAYER_NORM)
        d->kernels->layer_norm(x, n->w, n->b, n->eps, cols, y);
    else
        d->kernels->rms_norm(x, n->w, n->eps, cols, y);
}

static void publish_floats(uint64_t *words, int64_t n, uint32_t ticket, const float *v) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, v + i, sizeof bits);
        pi_publish_words(words, i, 1, ticket, &bits);
    }
}

/* ---- operations ---- */

void pi_host_begin(pi_device *dev, void *to, const void *from, size_t n_bytes, uint32_t *ticket, uint32_t tickets) {
    if (!pi_host_begin_op(dev, 1, 0)) return;
    pi_host_mix(pi_host(dev), to);
    pi_host_mix(pi_host(dev), from);
    memcpy(to, from, n_bytes);
    *ticket += tickets;
}

void pi_host_end(pi_device *dev, void *to, const void *from, size_t n_bytes) {
    if (pi_host_begin_op(dev, 8, 0)) memcpy(to, from, n_bytes);
}

/* The n largest of a row, each put among those before it. Returns how many there are. */
static int32_t find_largest(const float *x, int32_t cols, int32_t n, uint64_t *largest) {
    int32_t n_found = 0;
    for (int32_t i = 0; i < cols; i++) {
        if (!(x[i] <= FLT_MAX)) return -1;
        if (x[i] == -INFINITY) continue;
        int32_t at = n_found;
        for (; at > 0; at--) {
            const uint32_t bits = (uint32_t)(largest[at - 1] >> 32);
            float before;
            memcpy(&before, &bits, sizeof before);
            if (before >= x[i]) break;
            if (at < n) largest[at] = largest[at - 1];
        }
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        if (at < n) largest[at] = (uint64_t)bits << 32 | (uint32_t)i;
        n_found += n_found < n;
    }
    return n_found;
}

void pi_host_logits(pi_device *dev, const pi_device_logits *a) {
    if (!pi_host_begin_op(dev, 19, a->n_rows)) return;
    pi_host_mix(pi_host(dev), a->x);
    const size_t cols = (size_t)a->cols;
    const int32_t n = abs(*a->n_largest);
    if (*a->n_largest <= 0) memcpy(a->rows, a->x, sizeof *a->x * cols * (size_t)a->n_rows);
    for (int32_t i = 0; n && i < a->n_rows; i++)
        a->n_found[i] = find_largest(a->x + cols * (size_t)i, a->cols, n, a->largest + (ptrdiff_t)i * PI_LARGEST);
}

void pi_host_linear(pi_device *dev, const te_linear_args *a) {
    pi_host_device *d = pi_host(dev);
    if (!pi_host_begin_op(dev, 2, a->n_tok)) return;
    pi_host_mix(d, a->x);
    pi_host_mix(d, a->side.keep);
    int32_t rows = 1;
    te_linear product[TE_MAX_PRODUCTS];
    for (int32_t i = 0; i < a->n_products; i++) {
        const te_product *p = &a->product[i];
        mix_mat(d, &p->w);
        pi_host_mix(d, p->y);
        rows = pi_max_i32(rows, p->w.n_rows);
        product[i] = (te_linear){.w = p->w, .bias = p->bias, .y = p->y, .ldy = p->ldy, .add = p->add != NULL};
    }
    const size_t n = (size_t)a->cols;
    float *x = pi_host_scratch(d, n * ((size_t)a->n_tok + 1));
    if (!x || !pi_host_reserve_work(d, a->n_tok, a->cols, rows)) return;
    if (a->side.keep || a->side.publish) {
        float *row = x + n * (size_t)a->n_tok;
        for (int32_t t = a->n_tok - 1; t >= 0; t--) {
            norm_row(d, &a->side.norm, a->x + a->ldx * (size_t)t, a->cols, row);
            if (a->side.keep) memcpy(a->side.keep + n * (size_t)t, row, sizeof *row * n);
            if (!a->side.publish) continue;
            /* A GPU's blocks post in any order, and one that fails has posted some words: here the last ones. */
            const int64_t half = a->cols / 2;
            uint64_t *words = a->side.publish + n * (size_t)t;
            publish_floats(words + half, a->cols - half, ticket_of(&a->side.ticket), row + half);
            if (t == a->n_tok - 1 && !goes_on(dev)) return;
            publish_floats(words, half, ticket_of(&a->side.ticket), row);
        }
    }
    if (!a->n_products) return;
    for (int32_t t = 0; t < a->n_tok; t++) norm_row(d, &a->norm, a->x + a->ldx * (size_t)t, a->cols, x + n * (size_t)t);
    te_op_linear(d->team, d->ws, product, a->n_products, x, n, a->n_tok);
    for (int32_t i = 0; i < a->n_products; i++)
        for (int32_t t = 0; a->product[i].relu && t < a->n_tok; t++) {
            float *y = a->product[i].y + a->product[i].ldy * (size_t)t;
            for (int32_t r = 0; r < a->product[i].w.n_rows; r++) y[r] = y[r] > 0 ? y[r] : 0;
        }
}

/* The row of head h of a position in a pool. */
static char *kv_row(const te_attention_args *a, const void *pool, int32_t type, int32_t t, int32_t h, int32_t pos) {
    const int32_t *blocks = a->table + (ptrdiff_t)(a->row ? a->row[t] : t) * a->ld_table;
    const size_t block = (size_t)blocks[pos / PI_KV_BLOCK] * (size_t)a->n_head_kv + (size_t)h;
    return (char *)(uintptr_t)pool +
           (block * PI_KV_BLOCK + (size_t)(pos % PI_KV_BLOCK)) * te_row_bytes(type, a->n_embd_head);
}

/* A head as it is multiplied: normed and rotated. */
static void settle_head(const pi_host_device *d, const te_attention_args *a, int32_t t, const float *norm,
                        const float *from, float *head) {
    static const pi_rope_kind kind[] = {
        [TE_NO_ROPE] = PI_ROPE_NONE, [TE_ROPE_NORM] = PI_ROPE_NORM, [TE_ROPE_NEOX] = PI_ROPE_NEOX};
    const pi_rope rope = {.kind = kind[a->rope], .n_rot = a->n_rot};
    memcpy(head, from, sizeof *head * (size_t)a->n_embd_head);
    if (norm && !a->norm_last) d->kernels->rms_norm(head, norm, a->norm_eps, a->n_embd_head, head);
    if (rope.kind != PI_ROPE_NONE) pi_rope_apply(&rope, a->cs + (ptrdiff_t)t * a->n_rot, head);
    if (norm && a->norm_last) d->kernels->rms_norm(head, norm, a->norm_eps, a->n_embd_head, head);
}

/* What a query is multiplied by. */
static float warmth(const te_attention_args *a, int32_t pos) {
    if (a->temp_scale == 0) return 1;
    return 1 + a->temp_scale * logf(1 + floorf((float)(pos + a->temp_first) / (float)a->temp_length));
}

/* The first position that a token sees. */
static int32_t first_seen(const te_attention_args *a, int32_t pos) {
    if (a->chunked) return pos / a->window * a->window;
    return a->window && pos >= a->window ? pos + 1 - a->window : 0;
}

static void attend(const pi_host_device *d, const te_attention_args *a, int32_t t, int32_t h, float *score, float *row,
                   float *q) {
    const int32_t n = a->n_embd_head, kvh = h / (a->n_head / a->n_head_kv), n_pos = a->pos[t] + 1,
                  first = first_seen(a, a->pos[t]);
    settle_head(d, a, t, a->q_norm, a->q + a->ldq * (size_t)t + (ptrdiff_t)h * n, q);
    for (int32_t i = 0; i < n; i++) q[i] *= warmth(a, a->pos[t]);
    float *out = a->out + a->ld_out * (size_t)t + (ptrdiff_t)h * n;
    for (int32_t p = first; p < n_pos; p++) {
        d->kernels->row[a->type_k].to_f32(kv_row(a, a->k_pool, a->type_k, t, kvh, p), 0, n, row);
        float sum = 0;
        for (int32_t i = 0; i < n; i++) sum += q[i] * row[i];
        score[p] = sum;
    }
    const float scale = a->soft_cap > 0 ? 1 : a->scale; /* of what is capped no more */
    for (int32_t p = first; a->soft_cap > 0 && p < n_pos; p++)
        score[p] = a->soft_cap * tanhf(a->scale * score[p] / a->soft_cap);
    if (a->sinks) score[n_pos] = a->sinks[h] / scale;
    d->kernels->softmax(score + first, n_pos - first + (a->sinks != NULL), scale);
    memset(out, 0, sizeof *out * (size_t)n);
    for (int32_t p = first; p < n_pos; p++) {
        d->kernels->row[a->type_v].to_f32(kv_row(a, a->v_pool, a->type_v, t, kvh, p), 0, n, row);
        for (int32_t i = 0; i < n; i++) out[i] += score[p] * row[i];
    }
}

void pi_host_attention(pi_device *dev, const te_attention_args *a) {
    pi_host_device *d = pi_host(dev);
    if (a->beside) pi_host_linear(dev, a->beside);
    if (!pi_host_begin_op(dev, 3, a->n_tok)) return;
    pi_host_mix(d, a->k_pool);
    pi_host_mix(d, a->q);
    const int32_t n = a->n_embd_head;
    const size_t head = ((size_t)n + 15) / 16 * 16;
    float *row = pi_host_scratch(d, 2 * head + (size_t)a->n_ctx + 1); /* a sink's score is the last */
    if (!row) return;
    float *q = row + head, *score = q + head;
    for (int32_t t = 0; t < a->n_tok; t++)
        for (int32_t h = 0; h < a->n_head_kv; h++) {
            settle_head(d, a, t, a->k_norm, a->k + a->ldk * (size_t)t + (ptrdiff_t)h * n, q);
            d->kernels->row[a->type_k].from_f32(q, kv_row(a, a->k_pool, a->type_k, t, h, a->pos[t]), n);
            const float *v = a->v + a->ldv * (size_t)t + (ptrdiff_t)h * n;
            if (a->v_norm) d->kernels->rms_norm(v, a->v_norm, a->norm_eps, n, q);
            d->kernels->row[a->type_v].from_f32(a->v_norm ? q : v, kv_row(a, a->v_pool, a->type_v, t, h, a->pos[t]), n);
        }
    for (int32_t t = a->n_before; t < a->n_tok; t++)
        for (int32_t h = 0; h < a->n_head; h++) attend(d, a, t, h, score, row, q);
}

static bool has_scores(const te_scores *a) { return a->fc2.w || a->sign; }

/* Scores of n rows for each token, [n_tok][n], in scratch after `before` floats. */
static float *scores(pi_host_device *d, const te_scores *a, int32_t n, int32_t n_tok, size_t before) {
    const size_t words = a->sign ? ((size_t)a->cols + 63) / 64 * 2 : 0;
    const size_t floats = ((size_t)n_tok * (size_t)n + 15) / 16 * 16;
    float *s = pi_host_scratch(d, before + floats + words);
    if (!s) return NULL;
    s += before;
    if (a->sign) {
        uint64_t *bits = (uint64_t *)(void *)(s + floats);
        for (int32_t t = 0; t < n_tok; t++) {
            d->kernels->sign_pack(a->h + a->ldh * (size_t)t, a->cols, bits);
            d->kernels->sign_dot(a->sign, n, bits, a->cols, s + (ptrdiff_t)t * n);
        }
        return s;
    }
    if (!pi_host_reserve_work(d, n_tok, a->fc2.cols, n)) return NULL;
    const te_linear out = {.w = a->fc2, .y = s, .ldy = (size_t)n};
    te_op_linear(d->team, d->ws, &out, 1, a->z, a->ldz, n_tok);
    return s;
}

void pi_host_marks(pi_device *dev, const te_marks_args *a) {
    pi_host_device *d = pi_host(dev);
    if (!pi_host_begin_op(dev, 4, a->n_tok)) return;
    mix_mat(d, &a->scores.fc2);
    pi_host_mix(d, a->publish);
    const int32_t n = a->n_rows, per_part = pi_part_words(n, PI_HOST_PARTS);
    const float *s = scores(d, &a->scores, n, a->n_tok, 0);
    if (!s) return;
    for (int32_t t = 0; t < a->n_tok; t++)
        for (int32_t p = 0; p < PI_HOST_PARTS; p++) {
            const int32_t lo = pi_part_begin(n, p, PI_HOST_PARTS), hi = pi_part_begin(n, p + 1, PI_HOST_PARTS);
            for (int32_t w = 0; w < per_part; w++) {
                uint32_t bits = 0;
                for (int32_t i = 0; i < 32 && lo + w * 32 + i < hi; i++)
                    bits |= (uint32_t)(s[(ptrdiff_t)t * n + lo + w * 32 + i] >= *a->scores.threshold) << i;
                pi_publish_words(a->publish, ((int64_t)t * PI_HOST_PARTS + p) * per_part + w, 1, ticket_of(&a->ticket),
                                 &bits);
            }
        }
}

/* y += b (a x), a as it is or transposed; z: room for a x. */
static void adapt(pi_host_device *d, const te_adapter *w, bool turned, const float *x, size_t ldx, int32_t n_tok,
                  float *z, float *y, size_t ldy) {
    if (!w->a.w) return;
    const size_t rank = (size_t)w->b.cols;
    const te_linear a = {.w = w->a, .y = z, .ldy = rank}, b = {.w = w->b, .y = y, .ldy = ldy, .add = true};
    if (turned)
        te_op_linear_t(d->team, d->ws, &w->a, x, ldx, n_tok, NULL, z, rank, false, TE_BY_COUNT);
    else
        te_op_linear(d->team, d->ws, &a, 1, x, ldx, n_tok);
    te_op_linear(d->team, d->ws, &b, 1, z, rank, n_tok);
}

static void run_ffn(pi_host_device *d, const te_ffn_args *a) {
    const int32_t n = a->up.n_rows, n_embd = a->up.cols,
                  rank = pi_max_i32(a->gate_adapter.b.cols, pi_max_i32(a->up_adapter.b.cols, a->down_adapter.b.cols));
    const size_t pairs = (size_t)a->n_tok * (size_t)n, row = (size_t)n_embd;
    const int32_t most = pi_max_i32(pi_max_i32(n_embd, n), rank);
    if (!pi_host_reserve_work(d, a->n_tok, most, most)) return;
    /* Hidden values, and a byte of mask each; normed inputs; then scores. */
    const size_t mask_floats = (pairs + 3) / 4, inputs = (pairs + mask_floats + 15) / 16 * 16,
                 before = inputs + ((size_t)a->n_tok * row + 15) / 16 * 16;
    /* Or, instead of scores, what adapters add to gate and up, and their a x. */
    float *hidden = pi_host_scratch(d, before + (rank ? 2 * pairs + (size_t)a->n_tok * (size_t)rank : pairs)),
          *score = NULL;
    if (!hidden) return;
    uint8_t *mask = NULL;
    if (has_scores(&a->scores)) {
        score = scores(d, &a->scores, n, a->n_tok, before);
        if (!score) return;
        hidden = d->scratch;
        mask = (uint8_t *)(hidden + pairs);
        for (size_t i = 0; i < pairs; i++) mask[i] = score[i] >= *a->scores.threshold;
    }
    float *x = hidden + inputs;
    for (size_t t = 0; t < (size_t)a->n_tok; t++) norm_row(d, &a->norm, a->x + a->ldx * t, n_embd, x + row * t);
    if (!a->add) memset(a->y, 0, sizeof *a->y * (size_t)a->n_tok * row);
    memset(hidden, 0, sizeof *hidden * pairs);
    const te_ffn f = {.gate = a->gate,
                      .up = a->up,
                      .down = a->down,
                      .up_bias = a->up_bias,
                      .act = (te_activation)a->act,
                      .threshold = a->threshold,
                      .curve = a->curve};
    te_ffn_io io = {.x = x,
                    .ldx = row,
                    .n_tok = a->n_tok,
                    .mask = mask,
                    .ld_mask = (size_t)n,
                    .y = a->y,
                    .ldy = row,
                    .hidden = hidden,
                    .ld_hidden = (size_t)n,
                    .fired = a->fired};
    float *gate_add = d->scratch + before, *up_add = gate_add + pairs, *z = up_add + pairs;
    if (rank) {
        memset(gate_add, 0, sizeof *gate_add * 2 * pairs);
        adapt(d, &a->gate_adapter, false, x, row, a->n_tok, z, gate_add, (size_t)n);
        adapt(d, &a->up_adapter, false, x, row, a->n_tok, z, up_add, (size_t)n);
        io.gate_add = gate_add;
        io.up_add = up_add;
        io.ld_add = (size_t)n;
    }
    te_ffn_counts counts = {0};
    te_op_ffn(d->team, d->ws, &f, (te_rows){NULL, 0, n}, a->skip != 0, &io, &counts);
    if (a->down_out.w) {
        const te_linear out = {.w = a->down_out, .y = a->y, .ldy = row, .add = true};
        te_op_linear(d->team, d->ws, &out, 1, hidden, (size_t)n, a->n_tok);
    }
    adapt(d, &a->down_adapter, true, hidden, (size_t)n, a->n_tok, z, a->y, row);
    if (!a->counts) return;
    a->counts[0] += (uint32_t)counts.listed;
    a->counts[1] += (uint32_t)counts.computed;
    a->counts[2] += (uint32_t)counts.fired;
}

/* Neurons that are read by zero-copy, as a feed-forward over a copy of their rows. */
static void run_zero_copy_ffn(pi_host_device *d, const te_ffn_args *a) {
    te_ffn_args own = *a;
    te_mat *const mats[] = {&own.gate, &own.up, &own.down};
    size_t n_bytes = 0;
    for (int32_t k = 0; k < 3; k++) {
        const te_mat *m = mats[k];
        if (m->w && !pi_host_zero_copy(&d->base, m)) {
            pi_host_fail(d, PI_FAIL(PI_ERROR_DEVICE, "weights lie in memory that the device cannot read"));
            return;
        }
        if (m->w) n_bytes += te_row_bytes(m->type, m->cols) * (size_t)a->n_list;
    }
    char *rows = te_os_alloc(n_bytes), *at = rows;
    if (!rows) {
        pi_host_fail(d, PI_FAIL(PI_ERROR_MEMORY, "out of memory for rows of %d neurons", a->n_list));
        return;
    }
    for (int32_t k = 0; k < 3; k++) {
        te_mat *m = mats[k];
        if (!m->w) continue;
        const te_mat to = {at, te_row_bytes(m->type, m->cols), m->type, m->cols, a->n_list};
        pi_host_gather(m, a->list, 1, a->n_list, false, &to);
        *m = to;
        at += to.stride * (size_t)to.n_rows;
    }
    run_ffn(d, &own);
    te_os_free(rows, n_bytes);
}

void pi_host_ffn(pi_device *dev, const te_ffn_args *a) {
    pi_host_device *d = pi_host(dev);
    if (!pi_host_begin_op(dev, 5, a->n_tok)) return;
    mix_mat(d, &a->up);
    mix_mat(d, &a->scores.fc2);
    pi_host_mix(d, a->list);
    pi_host_mix(d, a->y);
    if (a->list)
        run_zero_copy_ffn(d, a);
    else
        run_ffn(d, a);
}

void pi_host_cut(pi_device *dev, const te_cut_args *a) {
    pi_host_device *d = pi_host(dev);
    if (!pi_host_begin_op(dev, 15, a->n_tok)) return;
    pi_host_mix(d, a->gate);
    pi_host_mix(d, a->up);
    for (int32_t t = 0; t < a->n_tok; t++) {
        float *g = a->gate + a->ld * (size_t)t;
        double mean = 0, squares = 0;
        for (int32_t j = 0; j < a->n; j++) mean += (double)g[j] / a->n;
        for (int32_t j = 0; j < a->n; j++) squares += ((double)g[j] - mean) * ((double)g[j] - mean);
        const float least = (float)(mean + sqrt(squares / a->n) * (double)a->cut);
        for (int32_t j = 0; j < a->n; j++) g[j] = g[j] > least ? g[j] - least : 0;
        d->kernels->glu((te_activation)a->act, a->threshold, g, a->up + a->ld * (size_t)t, a->n, g);
        for (int32_t j = 0; j < a->n; j++) {
            if (a->fired) a->fired[j] += g[j] != 0;
            if (a->counts) a->counts[2] += g[j] != 0;
        }
        if (a->counts) a->counts[0] += (uint32_t)a->n, a->counts[1] += (uint32_t)a->n;
    }
}

void pi_host_merge(pi_device *dev, const te_merge_args *a) {
    pi_host_device *d = pi_host(dev);
    if (!pi_host_begin_op(dev, 6, a->n_tok)) return;
    pi_host_mix(d, a->y);
    pi_host_mix(d, a->words);
    float *answer = pi_host_scratch(d, (size_t)a->cols);
    if (!answer) return;
    const bool waits = a->words && (!a->expected || *a->expected);
    for (int32_t t = 0; t < a->n_tok; t++) {
        const ptrdiff_t at = (ptrdiff_t)t * a->cols;
        const float *add = a->add ? a->add + a->ld_add * (size_t)t : NULL;
        float *y = a->y + a->ldy * (size_t)t;
        if (waits && pi_await_words(&d->wait, a->words, at, a->cols, ticket_of(&a->ticket),
                                    (uint32_t *)(void *)answer) != PI_GOT) {
            pi_host_fail(d, PI_FAIL(PI_ERROR_TIMEOUT, "the device timed out waiting for the CPU's part of a step"));
            return;
        }
        const bool normed = a->norm.kind != TE_NO_NORM;
        float *sum = normed ? a->normed + at : y;
        for (int32_t i = 0; i < a->cols; i++) {
            float v = add && !normed ? add[i] : 0;
            if (a->partial) v += a->partial[at + i];
            if (a->bias) v += a->bias[i];
            if (waits) v += answer[i];
            sum[i] = v;
        }
        if (!normed) continue;
        norm_row(d, &a->norm, sum, a->cols, sum);
        for (int32_t i = 0; i < a->cols; i++) y[i] = ((add ? add[i] : 0) + sum[i]) * (a->scale != 0 ? a->scale : 1);
    }
}

void pi_host_load(pi_device *dev, const pi_device_load *a) {
    pi_host_device *d = pi_host(dev);
    if (!pi_host_begin_op(dev, 7, a->n)) return;
    pi_host_mix(d, a->to.w);
    const bool mapped = pi_host_zero_copy(dev, &a->from);
    pi_host_gather(&a->from, mapped ? a->ids : a->host_ids, a->each, a->n, a->columns, &a->to);
    for (int32_t r = 0; a->wanted && mapped && r < a->n; r++) {
        if (a->wanted[a->ids[r / a->each]]) continue;
        /* Who reads them all the same gets no numbers. */
        memset((char *)(uintptr_t)a->to.w + a->to.stride * (size_t)r, 0xFF, a->to.stride);
#ifdef PI_TESTING
        pi_host_left_out++;
#endif
    }
}

void pi_host_stamp(pi_device *dev, uint64_t *at) {
    if (pi_host_begin_op(dev, 9, 0)) __atomic_store_n(at, (uint64_t)te_os_now_ns(), __ATOMIC_RELEASE);
}
