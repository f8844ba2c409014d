/* kv.c - the KV pool. */
#include "kv.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_os.h"
#include "../../vendor/core/te_types.h"

static int32_t blocks_of(int32_t n) { return (n + PI_KV_BLOCK - 1) / PI_KV_BLOCK; }

pi_status pi_kv_init(pi_kv *kv, const pi_model *m, int32_t n_ctx, int32_t n_pool, int32_t n_seq, int32_t type_k,
                     int32_t type_v, const pi_kv_device *device) {
    const int32_t per_seq = blocks_of(n_ctx), n_layer = m->info.n_layer, head = m->info.n_embd_head;
    *kv = (pi_kv){
        .model = m, .type_k = type_k, .type_v = type_v, .n_ctx = n_ctx, .n_blocks = blocks_of(n_pool), .n_seq = n_seq};
    if (device) kv->device = *device;
    kv->row_k = te_row_bytes(type_k, head);
    kv->row_v = te_row_bytes(type_v, head);
    const size_t rows = pi_mul(pi_mul((size_t)kv->n_blocks, PI_KV_BLOCK), (size_t)m->info.n_head_kv);
    kv->layer_k_bytes = pi_mul(rows, kv->row_k);
    kv->layer_v_bytes = pi_mul(rows, kv->row_v);
    kv->refs = calloc((size_t)kv->n_blocks, sizeof *kv->refs);
    kv->free_ = calloc((size_t)kv->n_blocks, sizeof *kv->free_);
    kv->seq = calloc((size_t)n_seq, sizeof *kv->seq);
    kv->tables = calloc(pi_mul((size_t)n_seq, (size_t)per_seq), sizeof *kv->tables);
    kv->k = calloc((size_t)n_layer, sizeof *kv->k);
    kv->v = calloc((size_t)n_layer, sizeof *kv->v);
    bool ok = kv->refs && kv->free_ && kv->seq && kv->tables && kv->k && kv->v;
    for (int32_t l = 0; ok && l < n_layer; l++) {
        if (pi_kv_on_device(kv, l) || !pi_kv_has(kv, l)) continue;
        kv->k[l] = te_os_alloc(kv->layer_k_bytes);
        kv->v[l] = te_os_alloc(kv->layer_v_bytes);
        ok = kv->k[l] && kv->v[l];
    }
    if (!ok) {
        pi_kv_free(kv);
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for a KV cache of %d positions in %d layers (%.2f GiB)",
                       kv->n_blocks * PI_KV_BLOCK, n_layer,
                       ((double)kv->layer_k_bytes + (double)kv->layer_v_bytes) * n_layer / (1 << 30));
    }
    const pi_status states = pi_states_init(&kv->states, m, n_seq);
    if (states != PI_OK) {
        pi_kv_free(kv);
        return states;
    }
    for (int32_t i = 0; i < n_seq; i++) kv->seq[i].block = kv->tables + (ptrdiff_t)i * per_seq;
    for (int32_t b = kv->n_blocks - 1; b >= 0; b--) kv->free_[kv->n_free++] = b; /* block 0 on top */
    return PI_OK;
}

void pi_kv_free(pi_kv *kv) {
    for (int32_t l = 0; kv->model && l < kv->model->info.n_layer; l++) {
        if (kv->k && kv->k[l]) te_os_free(kv->k[l], kv->layer_k_bytes);
        if (kv->v && kv->v[l]) te_os_free(kv->v[l], kv->layer_v_bytes);
    }
    free(kv->refs);
    free(kv->free_);
    free(kv->seq);
    free(kv->tables);
    free(kv->k);
    free(kv->v);
    pi_states_free(&kv->states);
    *kv = (pi_kv){0};
}

uint64_t pi_kv_bytes(const pi_kv *kv) {
    int32_t n = 0;
    for (int32_t l = 0; l < kv->model->info.n_layer; l++) n += pi_kv_has(kv, l) && !pi_kv_on_device(kv, l);
    return ((uint64_t)kv->layer_k_bytes + kv->layer_v_bytes) * (uint64_t)n + kv->states.n_bytes;
}

static void unref(pi_kv *kv, int32_t block) {
    if (--kv->refs[block] == 0) kv->free_[kv->n_free++] = block;
}

int32_t pi_kv_blocks_needed(const pi_kv *kv, int32_t seq, int32_t from, int32_t to) {
    const pi_seq *s = &kv->seq[seq];
    const int32_t end = from < to ? blocks_of(to) : 0;
    int32_t n = end > s->n_block ? end - s->n_block : 0;
    for (int32_t b = from / PI_KV_BLOCK; b < s->n_block && b < end; b++) n += kv->refs[s->block[b]] > 1;
    return n;
}

static void copy_block(pi_kv *kv, int32_t to, int32_t from) {
    const size_t nk = kv->row_k * PI_KV_BLOCK * (size_t)kv->model->info.n_head_kv,
                 nv = kv->row_v * PI_KV_BLOCK * (size_t)kv->model->info.n_head_kv;
    for (int32_t l = 0; l < kv->model->info.n_layer; l++) {
        if (!pi_kv_has(kv, l)) continue;
        if (pi_kv_on_device(kv, l)) {
            kv->device.copy(kv->device.ctx, l, false, (size_t)to * nk, (size_t)from * nk, nk);
            kv->device.copy(kv->device.ctx, l, true, (size_t)to * nv, (size_t)from * nv, nv);
            continue;
        }
        memcpy(kv->k[l] + (size_t)to * nk, kv->k[l] + (size_t)from * nk, nk);
        memcpy(kv->v[l] + (size_t)to * nv, kv->v[l] + (size_t)from * nv, nv);
    }
}

void pi_kv_own(pi_kv *kv, int32_t seq, int32_t from, int32_t to) {
    pi_seq *s = &kv->seq[seq];
    for (int32_t b = from / PI_KV_BLOCK; b < s->n_block && b < blocks_of(to); b++) {
        const int32_t old = s->block[b];
        if (kv->refs[old] == 1) continue;
        const int32_t own = kv->free_[--kv->n_free];
        copy_block(kv, own, old);
        kv->refs[own] = 1;
        kv->refs[old]--;
        s->block[b] = own;
    }
}

void pi_kv_extend(pi_kv *kv, int32_t seq, int32_t to) {
    pi_seq *s = &kv->seq[seq];
    pi_kv_own(kv, seq, s->length, to);
    while (s->n_block < blocks_of(to)) {
        const int32_t b = kv->free_[--kv->n_free];
        kv->refs[b] = 1;
        s->block[s->n_block++] = b;
    }
    s->length = to;
}

int32_t pi_kv_reachable(const pi_kv *kv, int32_t seq, int32_t n) {
    return pi_states_reachable(&kv->states, seq, kv->seq[seq].length, n);
}

void pi_kv_cut(pi_kv *kv, int32_t seq, int32_t n_keep) {
    pi_seq *s = &kv->seq[seq];
    pi_states_copy(&kv->states, seq, seq, s->length, n_keep);
    while (s->n_block > blocks_of(n_keep)) unref(kv, s->block[--s->n_block]);
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
    d->n_block = blocks_of(n);
    d->length = n;
    for (int32_t i = 0; i < d->n_block; i++) {
        d->block[i] = s->block[i];
        kv->refs[d->block[i]]++;
    }
}

/* Rows are read at pos + n_drop and written at pos, in ascending order, so nothing is overwritten before it was read. */
static void move_head(const pi_kv *kv, int32_t l, int32_t h, const pi_seq *s, int32_t n_keep, int32_t n_drop,
                      float *row, float *cs) {
    const pi_model *m = kv->model;
    const pi_rope *rope = pi_rope_of(m, pi_attention_of(&m->layer[l]));
    if (rope) pi_rope_angles(rope, -(double)n_drop, 1, cs);
    const te_row_kernels *rk = &m->kernels->row[kv->type_k];
    const int32_t head = m->info.n_embd_head;
    for (int32_t pos = n_keep; pos + n_drop < s->length; pos++) {
        rk->to_f32(pi_kv_k(kv, l, s, h, pos + n_drop), 0, head, row);
        if (rope) pi_rope_apply(rope, cs, row);
        rk->from_f32(row, pi_kv_k(kv, l, s, h, pos), head);
        memcpy(pi_kv_v(kv, l, s, h, pos), pi_kv_v(kv, l, s, h, pos + n_drop), kv->row_v);
    }
}

void pi_kv_move_down(pi_kv *kv, int32_t seq, int32_t n_keep, int32_t n_drop, int32_t part, int32_t n_parts,
                     float *scratch) {
    const pi_model *m = kv->model;
    const int32_t n_head = m->info.n_head_kv, items = m->info.n_layer * n_head;
    float *row = scratch, *cs = scratch + m->info.n_embd_head;
    for (int32_t i = part; i < items; i += n_parts)
        if (!pi_kv_on_device(kv, i / n_head))
            move_head(kv, i / n_head, i % n_head, &kv->seq[seq], n_keep, n_drop, row, cs);
}

/* The blocks of a layer on a device are fetched, moved here and sent back. */
pi_status pi_kv_move_on_device(pi_kv *kv, int32_t seq, int32_t n_keep, int32_t n_drop, float *scratch) {
    const pi_model *m = kv->model;
    const pi_seq *s = &kv->seq[seq];
    const size_t heads = (size_t)m->info.n_head_kv * PI_KV_BLOCK, nk = heads * kv->row_k, nv = heads * kv->row_v,
                 n = (size_t)s->n_block;
    const int32_t first = n_keep / PI_KV_BLOCK;
    char *k = malloc(pi_mul(n, nk)), *v = malloc(pi_mul(n, nv)), **k_of = calloc((size_t)m->info.n_layer, sizeof *k_of),
         **v_of = calloc((size_t)m->info.n_layer, sizeof *v_of);
    int32_t *block = malloc(pi_mul(n, sizeof *block));
    const bool ok = k && v && k_of && v_of && block;
    float *row = scratch, *cs = scratch + m->info.n_embd_head;
    pi_kv near = *kv;
    near.k = k_of;
    near.v = v_of;
    const pi_seq here = {s->length, s->n_block, block};
    for (int32_t b = 0; ok && b < s->n_block; b++) block[b] = b;
    for (int32_t l = 0; ok && l < m->info.n_layer; l++) {
        if (!pi_kv_on_device(kv, l)) continue;
        k_of[l] = k;
        v_of[l] = v;
        for (int32_t b = first; b < s->n_block; b++) {
            kv->device.read(kv->device.ctx, l, false, (size_t)s->block[b] * nk, k + (size_t)b * nk, nk);
            kv->device.read(kv->device.ctx, l, true, (size_t)s->block[b] * nv, v + (size_t)b * nv, nv);
        }
        for (int32_t h = 0; h < m->info.n_head_kv; h++) move_head(&near, l, h, &here, n_keep, n_drop, row, cs);
        for (int32_t b = first; b < blocks_of(s->length - n_drop); b++) {
            kv->device.write(kv->device.ctx, l, false, (size_t)s->block[b] * nk, k + (size_t)b * nk, nk);
            kv->device.write(kv->device.ctx, l, true, (size_t)s->block[b] * nv, v + (size_t)b * nv, nv);
        }
    }
    free(k);
    free(v);
    free(k_of);
    free(v_of);
    free(block);
    return ok ? PI_OK : PI_FAIL(PI_ERROR_MEMORY, "out of memory shifting %d positions", s->length);
}
