/* kv.c - the KV pools. */
#include "kv.h"

#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_os.h"
#include "../../vendor/core/te_types.h"

/* ---- sizes ---- */

static int32_t keep_of(int32_t window, int32_t n_batch) { return window + pi_max_i32(n_batch, PI_KV_BLOCK); }

/* Of the pool of windows: what all sequences may hold, unless the full pool has less. */
static int32_t window_blocks(const pi_kv_shape *s, int32_t window) {
    const int64_t each = pi_min_i32(pi_kv_blocks(keep_of(window, s->n_batch)) + 1, pi_kv_blocks(s->n_ctx)),
                  all = each * s->n_seq;
    return all < pi_kv_blocks(s->n_pool) ? (int32_t)all : pi_kv_blocks(s->n_pool);
}

static int32_t layer_blocks(const pi_kv_shape *s, const pi_attention *a) {
    return pi_kv_has_window(s->n_ctx, a) ? window_blocks(s, a->window) : pi_kv_blocks(s->n_pool);
}

size_t pi_kv_row_bytes(const pi_model *m, const pi_attention *a, bool is_v, int32_t type) {
    return is_v && m->latent_rank ? 0 : te_row_bytes(type, a->n_embd_head);
}

uint64_t pi_kv_layer_bytes(const pi_model *m, const pi_kv_shape *s, const pi_attention *a, bool is_v, int32_t type) {
    if (!a || a->borrows) return 0;
    return (uint64_t)layer_blocks(s, a) * PI_KV_BLOCK * (uint64_t)a->n_head_kv * pi_kv_row_bytes(m, a, is_v, type);
}

static bool pool_init(pi_kv *kv, int32_t p, int32_t n_blocks) {
    pi_kv_pool *pool = &kv->pool[p];
    const int32_t per_seq = pi_kv_blocks(kv->n_ctx);
    *pool = (pi_kv_pool){.n_blocks = n_blocks};
    pool->refs = calloc((size_t)n_blocks, sizeof *pool->refs);
    pool->free_ = calloc((size_t)n_blocks, sizeof *pool->free_);
    pool->tables = calloc(pi_mul((size_t)kv->n_seq, (size_t)per_seq), sizeof *pool->tables);
    if (!pool->refs || !pool->free_ || !pool->tables) return false;
    for (int32_t i = 0; i < kv->n_seq; i++) kv->seq[i].of[p].block = pool->tables + (ptrdiff_t)i * per_seq;
    for (int32_t b = n_blocks - 1; b >= 0; b--) pool->free_[pool->n_free++] = b; /* block 0 on top */
    return true;
}

static bool layer_init(pi_kv *kv, int32_t l) {
    const pi_attention *a = pi_attention_of(&kv->model->layer[l]);
    pi_kv_layer *at = &kv->layer[l];
    at->borrowed = true;
    if (!a) return true;
    if (a->borrows) {
        *at = kv->layer[a->kv_layer];
        at->borrowed = true;
        return true;
    }
    *at = (pi_kv_layer){.pool = pi_kv_has_window(kv->n_ctx, a) ? PI_KV_WINDOW : PI_KV_FULL,
                        .n_head = a->n_head_kv,
                        .row_k = pi_kv_row_bytes(kv->model, a, false, kv->type_k),
                        .row_v = pi_kv_row_bytes(kv->model, a, true, kv->type_v)};
    if (!at->row_v) at->v_in_k = te_row_bytes(kv->type_k, a->n_embd_head - kv->model->latent_rank);
    const size_t rows = pi_mul(pi_mul((size_t)kv->pool[at->pool].n_blocks, PI_KV_BLOCK), (size_t)at->n_head);
    at->k_bytes = pi_mul(rows, at->row_k);
    at->v_bytes = pi_mul(rows, at->row_v);
    if (pi_kv_on_device(kv, l)) return true;
    at->k = te_os_alloc(at->k_bytes);
    if (at->row_v) at->v = te_os_alloc(at->v_bytes);
    return at->k && (at->v || !at->row_v);
}

pi_status pi_kv_init(pi_kv *kv, const pi_model *m, const pi_kv_shape *shape, const pi_kv_device *device) {
    const int32_t n_layer = m->info.n_layer;
    *kv = (pi_kv){.model = m,
                  .type_k = shape->type_k,
                  .type_v = shape->type_v,
                  .n_ctx = shape->n_ctx,
                  .n_seq = shape->n_seq,
                  .n_pools = 1};
    if (device) kv->device = *device;
    for (int32_t l = 0; l < n_layer; l++) {
        const pi_attention *a = pi_attention_of(&m->layer[l]);
        if (!pi_kv_has_window(shape->n_ctx, a)) continue;
        kv->n_pools = 2;
        kv->window = a->window; /* all of a model are alike */
        kv->keep = keep_of(a->window, shape->n_batch);
    }
    kv->seq = calloc((size_t)shape->n_seq, sizeof *kv->seq);
    kv->layer = calloc((size_t)n_layer, sizeof *kv->layer);
    bool ok = kv->seq && kv->layer && pool_init(kv, PI_KV_FULL, pi_kv_blocks(shape->n_pool));
    if (ok && kv->n_pools > 1) ok = pool_init(kv, PI_KV_WINDOW, window_blocks(shape, kv->window));
    for (int32_t l = 0; ok && l < n_layer; l++) ok = layer_init(kv, l);
    const pi_status states =
        ok ? pi_states_init(&kv->states, m, shape->n_seq, shape->n_guesses, &kv->device.states) : PI_OK;
    if (ok && states == PI_OK) return PI_OK;
    const double gib = kv->layer ? (double)pi_kv_bytes(kv) / (1 << 30) : 0;
    pi_kv_free(kv);
    if (states != PI_OK) return states;
    return PI_FAIL(PI_ERROR_MEMORY, "out of memory for a KV cache of %d positions in %d layers (at %.2f GiB)",
                   shape->n_pool, n_layer, gib);
}

void pi_kv_free(pi_kv *kv) {
    for (int32_t l = 0; kv->layer && l < kv->model->info.n_layer; l++) {
        const pi_kv_layer *at = &kv->layer[l];
        if (at->k && !at->borrowed) te_os_free(at->k, at->k_bytes);
        if (at->v && !at->borrowed) te_os_free(at->v, at->v_bytes);
    }
    for (int32_t p = 0; p < PI_KV_POOLS; p++) {
        free(kv->pool[p].refs);
        free(kv->pool[p].free_);
        free(kv->pool[p].tables);
    }
    free(kv->seq);
    free(kv->layer);
    pi_states_free(&kv->states);
    *kv = (pi_kv){0};
}

uint64_t pi_kv_bytes(const pi_kv *kv) {
    uint64_t n = kv->states.n_bytes;
    for (int32_t l = 0; l < kv->model->info.n_layer; l++) {
        const pi_kv_layer *at = &kv->layer[l];
        if (!at->borrowed && !pi_kv_on_device(kv, l)) n += (uint64_t)at->k_bytes + at->v_bytes;
    }
    return n;
}

/* ---- blocks ---- */

static int32_t take(pi_kv_pool *pool) {
    const int32_t b = pool->free_[--pool->n_free];
    pool->refs[b] = 1;
    return b;
}

void pi_kv_give_back(pi_kv *kv, int32_t p, int32_t block) {
    pi_kv_pool *pool = &kv->pool[p];
    if (--pool->refs[block] == 0) pool->free_[pool->n_free++] = block;
}

/* The first position that the token behind the first n sees in a layer with a window. */
static int32_t first_seen(const pi_kv *kv, int32_t n) { return pi_max_i32(n + 1 - kv->window, 0); }

int32_t pi_kv_reachable(const pi_kv *kv, int32_t seq, int32_t n) {
    if (n >= kv->seq[seq].length) return kv->seq[seq].length;
    n = pi_states_reachable(&kv->states, seq, kv->seq[seq].length, n);
    return kv->n_pools == 1 || pi_kv_held_from(kv, seq) <= first_seen(kv, n) ? n : 0;
}

int32_t pi_kv_blocks_needed(const pi_kv *kv, int32_t p, int32_t seq, int32_t from, int32_t to) {
    const pi_table *t = &kv->seq[seq].of[p];
    const int32_t end = from < to ? pi_kv_blocks(to) : 0;
    int32_t n = pi_max_i32(end - t->n, 0);
    for (int32_t b = pi_max_i32(from / PI_KV_BLOCK, t->first); b < t->n && b < end; b++)
        n += kv->pool[p].refs[t->block[b]] > 1;
    return n;
}

static void copy_block(pi_kv *kv, int32_t p, int32_t to, int32_t from) {
    for (int32_t l = 0; l < kv->model->info.n_layer; l++) {
        const pi_kv_layer *at = &kv->layer[l];
        if (at->pool != p || at->borrowed) continue;
        const size_t rows = PI_KV_BLOCK * (size_t)at->n_head, nk = at->row_k * rows, nv = at->row_v * rows;
        if (pi_kv_on_device(kv, l)) {
            kv->device.copy(kv->device.ctx, l, false, (size_t)to * nk, (size_t)from * nk, nk);
            if (nv) kv->device.copy(kv->device.ctx, l, true, (size_t)to * nv, (size_t)from * nv, nv);
            continue;
        }
        memcpy(at->k + (size_t)to * nk, at->k + (size_t)from * nk, nk);
        if (nv) memcpy(at->v + (size_t)to * nv, at->v + (size_t)from * nv, nv);
    }
}

void pi_kv_own(pi_kv *kv, int32_t p, int32_t seq, int32_t from, int32_t to) {
    pi_kv_pool *pool = &kv->pool[p];
    pi_table *t = &kv->seq[seq].of[p];
    for (int32_t b = pi_max_i32(from / PI_KV_BLOCK, t->first); b < t->n && b < pi_kv_blocks(to); b++) {
        const int32_t old = t->block[b];
        if (pool->refs[old] == 1) continue;
        t->block[b] = take(pool);
        copy_block(kv, p, t->block[b], old);
        pool->refs[old]--;
    }
}

/* Nothing is held in front of block `first`. */
static void let_go(pi_kv *kv, int32_t p, pi_table *t, int32_t first) {
    for (; t->first < first && t->first < t->n; t->first++) pi_kv_give_back(kv, p, t->block[t->first]);
}

void pi_kv_extend(pi_kv *kv, int32_t seq, int32_t to) {
    pi_seq *s = &kv->seq[seq];
    for (int32_t p = 0; p < kv->n_pools; p++) {
        pi_table *t = &s->of[p];
        if (p == PI_KV_WINDOW) let_go(kv, p, t, pi_kv_kept_from(kv, to) / PI_KV_BLOCK);
        pi_kv_own(kv, p, seq, s->length, to);
        while (t->n < pi_kv_blocks(to)) t->block[t->n++] = take(&kv->pool[p]);
    }
    s->length = to;
}

bool pi_kv_has_room(const pi_kv *kv, int32_t seq, int32_t n, int32_t from) {
    for (int32_t p = 0; p < kv->n_pools; p++) {
        const pi_kv_pool *pool = &kv->pool[p];
        const pi_table *t = &kv->seq[seq].of[p];
        int32_t room = pool->n_free;
        for (int32_t b = t->first; b < t->n; b++) room += pool->refs[t->block[b]] == 1;
        if (pi_kv_blocks(n) - (p == PI_KV_WINDOW ? from / PI_KV_BLOCK : 0) > room) return false;
    }
    return true;
}

void pi_kv_renew(pi_kv *kv, int32_t seq, int32_t n, int32_t from) {
    pi_kv_cut(kv, seq, 0);
    for (int32_t p = 0; p < kv->n_pools; p++) {
        pi_table *t = &kv->seq[seq].of[p];
        t->first = t->n = p == PI_KV_WINDOW ? from / PI_KV_BLOCK : 0;
        while (t->n < pi_kv_blocks(n)) t->block[t->n++] = take(&kv->pool[p]);
    }
    kv->seq[seq].length = n;
}

void pi_kv_cut(pi_kv *kv, int32_t seq, int32_t n_keep) {
    pi_seq *s = &kv->seq[seq];
    pi_states_copy(&kv->states, seq, seq, s->length, n_keep);
    for (int32_t p = 0; p < kv->n_pools; p++) {
        pi_table *t = &s->of[p];
        while (t->n > pi_max_i32(pi_kv_blocks(n_keep), t->first)) pi_kv_give_back(kv, p, t->block[--t->n]);
        if (n_keep == 0) t->first = t->n = 0;
    }
    s->length = n_keep;
}

void pi_kv_copy(pi_kv *kv, int32_t dst, int32_t src, int32_t n) {
    pi_seq *d = &kv->seq[dst], *s = &kv->seq[src];
    if (dst == src) {
        pi_kv_cut(kv, dst, n);
        return;
    }
    pi_kv_cut(kv, dst, 0);
    pi_states_copy(&kv->states, dst, src, s->length, n);
    for (int32_t p = 0; n > 0 && p < kv->n_pools; p++) {
        pi_table *to = &d->of[p];
        to->first = s->of[p].first;
        to->n = pi_kv_blocks(n);
        for (int32_t i = to->first; i < to->n; i++) {
            to->block[i] = s->of[p].block[i];
            kv->pool[p].refs[to->block[i]]++;
        }
    }
    d->length = n;
}
