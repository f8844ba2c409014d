/* shift.c - a context shift: what is kept of a sequence moves down, and K is turned to the new positions.
 *
 * Where layers with a window still hold the positions that stay in front, they are moved as the others are. Else all that
 * they hold moves: blocks by their numbers in the table, what is left (less than a block) within them. */
#include <stdlib.h>
#include <string.h>

#include "../../vendor/cpu/te_kernels.h"
#include "kv.h"

pi_status pi_kv_shift_begin(pi_kv *kv, int32_t seq, int32_t n_keep, int32_t n_drop, pi_kv_shift *out) {
    pi_seq *s = &kv->seq[seq];
    const int32_t length = s->length - n_drop;
    pi_table *t = &s->of[PI_KV_WINDOW];
    const bool whole = pi_kv_held_from(kv, seq) > n_keep; /* all that windows hold moves */
    const int32_t down = whole ? n_drop / PI_KV_BLOCK : 0,
                  first = pi_max_i32(t->first - down, whole ? pi_kv_blocks(n_keep) : 0),
                  seen = pi_max_i32(length + 1 - kv->window, 0);
    const int32_t to[PI_KV_POOLS] = {length, whole ? s->length : length};
    *out = (pi_kv_shift){.seq = seq,
                         .length = length,
                         .n_drop = n_drop,
                         .from = {n_keep, whole ? first * PI_KV_BLOCK : n_keep},
                         .gap = {n_drop, n_drop - down * PI_KV_BLOCK}};
    if (kv->n_pools > 1 && length > 0 && seen < first * PI_KV_BLOCK)
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "cannot shift sequence %d to %d positions: layers see the last %d of them, and no longer hold "
                       "those in front of position %d",
                       seq, length, kv->window, first * PI_KV_BLOCK);
    for (int32_t p = 0; p < kv->n_pools; p++)
        if (pi_kv_blocks_needed(kv, p, seq, n_keep, to[p]) > kv->pool[p].n_free)
            return PI_FAIL(PI_ERROR_CONTEXT,
                           "the KV pool is full: shifting sequence %d must copy shared blocks, %d are free", seq,
                           kv->pool[p].n_free);
    for (int32_t p = 0; p < kv->n_pools; p++) pi_kv_own(kv, p, seq, n_keep, to[p]);
    if (kv->n_pools > 1 && whole) {
        for (int32_t b = t->first; b < t->n; b++) {
            if (b - down >= first)
                t->block[b - down] = t->block[b];
            else
                pi_kv_give_back(kv, PI_KV_WINDOW, t->block[b]);
        }
        t->n -= down;
        t->first = first;
    }
    return PI_OK;
}

/* Rows are read at pos + gap and written at pos, in ascending order, so nothing is overwritten before it was read. */
static void move_head(const pi_kv *kv, int32_t l, int32_t h, const pi_table *t, const pi_kv_shift *shift, char *k,
                      char *v, float *scratch) {
    const pi_model *m = kv->model;
    const pi_kv_layer *at = &kv->layer[l];
    const pi_attention *w = pi_attention_of(&m->layer[l]);
    const int32_t gap = shift->gap[at->pool];
    const pi_rope *rope = pi_rope_of(m, w, kv->n_ctx);
    float *row = scratch, *cs = scratch + w->n_embd_head;
    if (!rope && !gap) return;
    if (rope) pi_rope_angles(rope, -(double)shift->n_drop, 1, cs);
    const te_row_kernels *rk = &m->kernels->row[kv->type_k];
    for (int32_t pos = shift->from[at->pool]; pos < shift->length; pos++) {
        rk->to_f32(k + pi_kv_at(at, t, h, pos + gap, at->row_k), 0, w->n_embd_head, row);
        if (rope) pi_rope_apply(rope, cs, row);
        rk->from_f32(row, k + pi_kv_at(at, t, h, pos, at->row_k), w->n_embd_head);
        if (gap && at->row_v)
            memcpy(v + pi_kv_at(at, t, h, pos, at->row_v), v + pi_kv_at(at, t, h, pos + gap, at->row_v), at->row_v);
    }
}

void pi_kv_shift_part(pi_kv *kv, const pi_kv_shift *shift, int32_t part, int32_t n_parts, float *scratch) {
    int32_t turn = 0;
    for (int32_t l = 0; l < kv->model->info.n_layer; l++) {
        const pi_kv_layer *at = &kv->layer[l];
        const pi_table *t = &kv->seq[shift->seq].of[at->pool];
        if (at->borrowed || pi_kv_on_device(kv, l)) continue;
        for (int32_t h = 0; h < at->n_head; h++, turn++)
            if (turn % n_parts == part) move_head(kv, l, h, t, shift, at->k, at->v, scratch);
    }
}

/* The blocks of a layer on a device are fetched, moved here and sent back. */
pi_status pi_kv_shift_devices(pi_kv *kv, const pi_kv_shift *shift, float *scratch) {
    const pi_model *m = kv->model;
    const pi_seq *s = &kv->seq[shift->seq];
    const size_t n = (size_t)pi_kv_blocks(kv->n_ctx);
    size_t most_k = 0, most_v = 0; /* of a block */
    for (int32_t l = 0; l < m->info.n_layer; l++) {
        const pi_kv_layer *at = &kv->layer[l];
        const size_t rows = PI_KV_BLOCK * (size_t)at->n_head;
        if (!pi_kv_on_device(kv, l)) continue;
        if (rows * at->row_k > most_k) most_k = rows * at->row_k;
        if (rows * at->row_v > most_v) most_v = rows * at->row_v;
    }
    if (!most_k) return PI_OK;
    char *k = malloc(pi_mul(n, most_k)), *v = malloc(pi_add(pi_mul(n, most_v), 1));
    int32_t *block = malloc(pi_mul(n, sizeof *block));
    const bool ok = k && v && block;
    for (int32_t b = 0; ok && b < (int32_t)n; b++) block[b] = b;
    for (int32_t l = 0; ok && l < m->info.n_layer; l++) {
        const pi_kv_layer *at = &kv->layer[l];
        if (at->borrowed || !pi_kv_on_device(kv, l)) continue;
        const int32_t first = shift->from[at->pool] / PI_KV_BLOCK;
        const size_t rows = PI_KV_BLOCK * (size_t)at->n_head, nk = rows * at->row_k, nv = rows * at->row_v;
        const pi_table *t = &s->of[at->pool];
        const pi_table here = {t->first, t->n, block};
        for (int32_t b = first; b < t->n; b++) {
            kv->device.read(kv->device.ctx, l, false, (size_t)t->block[b] * nk, k + (size_t)b * nk, nk);
            if (nv) kv->device.read(kv->device.ctx, l, true, (size_t)t->block[b] * nv, v + (size_t)b * nv, nv);
        }
        for (int32_t h = 0; h < at->n_head; h++) move_head(kv, l, h, &here, shift, k, v, scratch);
        for (int32_t b = first; b < pi_kv_blocks(shift->length); b++) {
            kv->device.write(kv->device.ctx, l, false, (size_t)t->block[b] * nk, k + (size_t)b * nk, nk);
            if (nv) kv->device.write(kv->device.ctx, l, true, (size_t)t->block[b] * nv, v + (size_t)b * nv, nv);
        }
    }
    free(k);
    free(v);
    free(block);
    return ok ? PI_OK : PI_FAIL(PI_ERROR_MEMORY, "out of memory shifting %d positions", shift->length);
}
