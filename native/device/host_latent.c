/* host_latent.c - latent attention on the stand-in, one value after the other. */
#include <string.h>

#include "../../vendor/core/te_quant.h"
#include "../../vendor/core/te_types.h"
#include "../model/rope.h"
#include "host.h"

static char *pool_row(const te_latent_args *a, int32_t t, int32_t pos) {
    const int32_t *blocks = a->table + (ptrdiff_t)(a->row ? a->row[t] : t) * a->ld_table;
    const size_t at = (size_t)blocks[pos / PI_KV_BLOCK] * PI_KV_BLOCK + (size_t)(pos % PI_KV_BLOCK);
    return (char *)a->pool + at * te_row_bytes(a->type, a->n_rot + a->rank);
}

static void rotate(const te_latent_args *a, int32_t t, const float *from, float *to) {
    const pi_rope rope = {.kind = PI_ROPE_NORM, .n_rot = a->n_rot};
    memcpy(to, from, sizeof *to * (size_t)a->n_rot);
    pi_rope_apply(&rope, a->cs + (ptrdiff_t)t * a->n_rot, to);
}

static float product(const float *x, const float *y, int32_t n) {
    float sum = 0;
    for (int32_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* y = w_h . x of each head of a token; x and y: `dx` and `dy` floats from head to head. */
static void heads(const te_latent_args *a, const te_mat *w, const float *x, int32_t dx, float *y, int32_t dy,
                  float *row) {
    const int32_t rows = w->n_rows / a->n_head;
    for (int32_t r = 0; r < w->n_rows; r++) {
        te_dequantize_row(w->type, (const char *)w->w + w->stride * (size_t)r, row, w->cols);
        const ptrdiff_t h = r / rows;
        y[h * dy + r % rows] = product(row, x + h * dx, w->cols);
    }
}

static void attend(const pi_host_device *d, const te_latent_args *a, int32_t t, int32_t h, float *score, float *row) {
    const int32_t n = a->n_rot + a->rank, n_pos = a->pos[t] + 1;
    const float *q = a->query + ((ptrdiff_t)t * a->n_head + h) * n;
    float *out = a->gathered + ((ptrdiff_t)t * a->n_head + h) * a->rank;
    memset(out, 0, sizeof *out * (size_t)a->rank);
    for (int32_t p = 0; p < n_pos; p++) {
        te_dequantize_row(a->type, pool_row(a, t, p), row, n);
        score[p] = product(q, row, n);
    }
    if (n_pos > 0) d->kernels->softmax(score, n_pos, a->scale);
    for (int32_t p = 0; p < n_pos; p++) {
        te_dequantize_row(a->type, pool_row(a, t, p), row, n);
        for (int32_t c = 0; c < a->rank; c++) out[c] += score[p] * row[a->n_rot + c];
    }
}

void pi_host_latent(pi_device *dev, const te_latent_args *a) {
    pi_host_device *d = pi_host(dev);
    if (!pi_host_begin_op(dev, 12, a->n_tok)) return;
    pi_host_mix(d, a->pool);
    pi_host_mix(d, a->q);
    pi_host_mix(d, a->k_b.w);
    pi_host_mix(d, a->v_b.w);
    const int32_t n = a->n_rot + a->rank, widest = n > a->k_b.cols ? n : a->k_b.cols;
    float *row = pi_host_scratch(d, (size_t)widest + (size_t)a->n_ctx);
    if (!row) return;
    float *score = row + widest;
    for (int32_t t = 0; t < a->n_tok; t++) {
        const float *q = a->q + a->ldq * (size_t)t, *kv = a->kv + a->ldkv * (size_t)t;
        float *query = a->query + (ptrdiff_t)t * a->n_head * n;
        for (int32_t h = 0; t >= a->n_before && h < a->n_head; h++)
            rotate(a, t, q + (ptrdiff_t)h * a->n_key + (a->n_key - a->n_rot), query + (ptrdiff_t)h * n);
        if (t >= a->n_before) heads(a, &a->k_b, q, a->n_key, query + a->n_rot, n, row);
        if (a->pos[t] < 0) continue;
        rotate(a, t, kv + a->rank, row);
        d->kernels->rms_norm(kv, a->norm, a->norm_eps, a->rank, row + a->n_rot);
        te_quantize_row(a->type, row, pool_row(a, t, a->pos[t]), n);
    }
    for (int32_t t = a->n_before; t < a->n_tok; t++)
        for (int32_t h = 0; h < a->n_head; h++) attend(d, a, t, h, score, row);
    for (int32_t t = a->n_before; t < a->n_tok; t++)
        heads(a, &a->v_b, a->gathered + (ptrdiff_t)t * a->n_head * a->rank, a->rank, a->out + a->ld_out * (size_t)t,
              a->n_value, row);
}
