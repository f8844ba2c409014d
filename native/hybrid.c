/* hybrid.c - carries a plan out: opens devices, reserves their buffers, uploads what lies there. */
#include "hybrid.h"

#include <stdlib.h>
#include <string.h>

#include "../vendor/core/te_types.h"

/* ---- uploading ---- */

typedef struct upload {
    pi_device *dev;
    pi_status status; /* the first error; later calls do nothing */
} upload;

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

static void *reserve(upload *u, size_t n_bytes) {
    if (u->status != PI_OK) return NULL;
    void *p = u->dev->ops->alloc(u->dev, round_up(n_bytes, PI_DEVICE_ALIGN));
    if (!p) u->status = PI_FAIL(PI_ERROR_MEMORY, "%s", u->dev->ops->error());
    return p;
}
static void *share(upload *u, size_t n_bytes) {
    if (u->status != PI_OK) return NULL;
    void *p = u->dev->ops->share(u->dev, n_bytes);
    if (!p) u->status = PI_FAIL(PI_ERROR_MEMORY, "%s", u->dev->ops->error());
    return p;
}
static float *floats(upload *u, size_t rows, size_t cols) {
    return reserve(u, pi_mul(pi_mul(rows, cols), sizeof(float)));
}

static void send(upload *u, void *to, const void *from, size_t n_bytes) {
    if (u->status == PI_OK && n_bytes) u->status = u->dev->ops->upload(u->dev, to, from, n_bytes);
    if (u->status != PI_OK) (void)PI_FAIL(u->status, "%s", u->dev->ops->error());
}

static const float *send_vector(upload *u, const float *v, int32_t n) {
    if (!v) return NULL;
    float *p = floats(u, 1, (size_t)n);
    send(u, p, v, sizeof *v * (size_t)n);
    return p;
}

static const int32_t *send_ids(upload *u, const int32_t *ids, int32_t n) {
    int32_t *p = reserve(u, sizeof *ids * (size_t)(n ? n : 1));
    send(u, p, ids, sizeof *ids * (size_t)n);
    return p;
}

static pi_dev_norm send_norm(upload *u, const pi_model *m, const float *w, const float *b) {
    return (pi_dev_norm){.w = send_vector(u, w, m->info.n_embd),
                         .b = send_vector(u, b, m->info.n_embd),
                         .eps = m->norm_eps,
                         .layer = m->arch->layer_norm};
}

static te_mat send_part(upload *u, const te_mat *m, const int32_t *ids, int32_t n, bool columns) {
    if (!m->w || !n || u->status != PI_OK) return (te_mat){0};
    const int32_t cols = columns ? n : m->cols, rows = columns ? m->n_rows : n;
    te_mat out = {.w = reserve(u, pi_mul(u->dev->ops->stride(m->type, cols), (size_t)rows))};
    if (u->status == PI_OK) u->status = u->dev->ops->pack(u->dev, m, ids, n, columns, &out);
    if (u->status != PI_OK) (void)PI_FAIL(u->status, "%s", u->dev->ops->error());
    return out;
}
/* Rows ids[0..n-1] of m; all of m; columns ids[0..n-1] of m, whole blocks of its format. */
static te_mat send_rows(upload *u, const te_mat *m, const int32_t *ids, int32_t n) {
    return send_part(u, m, ids, n, false);
}
static te_mat send_mat(upload *u, const te_mat *m) { return send_part(u, m, NULL, m->n_rows, false); }
static int32_t block_ids(const te_mat *m, const int32_t *ids, int32_t n, int32_t *out) {
    const int32_t block = te_type_get(m->type)->block_weights;
    for (int32_t i = 0; i < n / block; i++) out[i] = ids[i * block] / block;
    return n / block;
}
static te_mat send_columns(upload *u, const te_mat *m, const int32_t *ids, int32_t n) {
    int32_t *blocks = malloc(sizeof *blocks * ((size_t)n + 1));
    if (!blocks) {
        if (u->status == PI_OK) u->status = PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d columns", n);
        return (te_mat){0};
    }
    (void)block_ids(m, ids, n, blocks);
    const te_mat out = send_part(u, m, blocks, n, true);
    free(blocks);
    return out;
}

static const uint64_t *send_signs(upload *u, const pi_model *m, const pi_layer *w, const int32_t *ids, int32_t n) {
    const size_t words = (size_t)m->sign_words, row = words * sizeof *w->sign;
    char *to = reserve(u, pi_mul(row, (size_t)(n ? n : 1))), *all = malloc(pi_mul(row, (size_t)(n ? n : 1)));
    if (!all && u->status == PI_OK) u->status = PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d rows of signs", n);
    for (int32_t i = 0; all && i < n; i++) memcpy(all + row * (size_t)i, w->sign + words * (size_t)ids[i], row);
    send(u, to, all, row * (size_t)n);
    free(all);
    return (const uint64_t *)(void *)to;
}

/* ---- layers ---- */

static pi_status split_neurons(const pi_plan *p, int32_t l, pi_device_layer *d) {
    d->hot = malloc(sizeof *d->hot * (size_t)p->n_ff);
    d->cold = malloc(sizeof *d->cold * (size_t)p->n_ff);
    d->cold_blocks = malloc(sizeof *d->cold * (size_t)p->n_ff);
    if (!d->hot || !d->cold || !d->cold_blocks)
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the neurons of layer %d", l);
    for (int32_t j = 0; j < p->n_ff; j++) {
        if (pi_is_hot(p, l, j))
            d->hot[d->n_hot++] = j;
        else
            d->cold[d->n_cold++] = j;
    }
    return PI_OK;
}

static void send_layer(upload *u, const pi_session *s, int32_t l, pi_device_layer *d) {
    const pi_model *m = s->model;
    const pi_model_info *i = &m->info;
    const pi_layer *w = &m->layer[l];
    const int32_t n_q = i->n_head * i->n_embd_head, n_kv = i->n_head_kv * i->n_embd_head;
    d->attn_norm = send_norm(u, m, w->attn_norm, w->attn_norm_b);
    d->attn_norm2 = send_norm(u, m, w->attn_norm2, w->attn_norm2_b);
    d->ffn_norm = send_norm(u, m, w->ffn_norm, w->ffn_norm_b);
    d->q = send_mat(u, &w->q);
    d->k = send_mat(u, &w->k);
    d->v = send_mat(u, &w->v);
    d->o = send_mat(u, &w->o);
    d->q_b = send_vector(u, w->q_b, n_q);
    d->k_b = send_vector(u, w->k_b, n_kv);
    d->v_b = send_vector(u, w->v_b, n_kv);
    d->o_b = send_vector(u, w->o_b, i->n_embd);
    d->q_norm = send_vector(u, w->q_norm, i->n_embd_head);
    d->k_norm = send_vector(u, w->k_norm, i->n_embd_head);
    d->down_b = send_vector(u, w->down_b, i->n_embd);
    d->gate = send_rows(u, &w->gate, d->hot, d->n_hot);
    d->up = send_rows(u, &w->up, d->hot, d->n_hot);
    if (w->down_t.w)
        d->down = send_rows(u, &w->down_t, d->hot, d->n_hot);
    else
        d->down_out = send_columns(u, &w->down, d->hot, d->n_hot);
    if (w->down.w && d->n_cold) {
        const int32_t n = block_ids(&w->down, d->cold, d->n_cold, d->cold_blocks);
        d->cold_block_ids = send_ids(u, d->cold_blocks, n);
    }
    if (w->up_b && d->n_hot) {
        float *b = malloc(sizeof *b * (size_t)d->n_hot);
        if (!b && u->status == PI_OK) u->status = PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d biases", d->n_hot);
        for (int32_t k = 0; b && k < d->n_hot; k++) b[k] = w->up_b[d->hot[k]];
        d->up_b = send_vector(u, b, b ? d->n_hot : 0);
        free(b);
    }
    if (s->options.sparsity == PI_SPARSITY_PREDICTED && w->sign) {
        d->sign_hot = send_signs(u, m, w, d->hot, d->n_hot);
        d->sign_cold = send_signs(u, m, w, d->cold, d->n_cold);
    } else if (s->options.sparsity == PI_SPARSITY_PREDICTED) {
        d->fc1 = send_mat(u, &w->fc1);
        d->fc2_hot = send_rows(u, &w->fc2, d->hot, d->n_hot);
        d->fc2_cold = send_rows(u, &w->fc2, d->cold, d->n_cold);
    }
    if (w->up_b && d->n_cold) {
        float *b = malloc(sizeof *b * (size_t)d->n_cold);
        if (!b && u->status == PI_OK) u->status = PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d biases", d->n_cold);
        for (int32_t k = 0; b && k < d->n_cold; k++) b[k] = w->up_b[d->cold[k]];
        d->up_b_cold = send_vector(u, b, b ? d->n_cold : 0);
        free(b);
    }
    d->cold_ids = send_ids(u, d->cold, d->n_cold);
    d->pool_k = reserve(u, s->kv.layer_k_bytes);
    d->pool_v = reserve(u, s->kv.layer_v_bytes);
}

/* ---- buffers ---- */

static size_t input_bytes(const pi_hybrid *h, size_t n_tok, pi_device_input *at, char *base) {
    const size_t each = round_up(sizeof(int32_t) * n_tok, 64), table = 2 * each,
                 cs = table + round_up(sizeof(int32_t) * n_tok * (size_t)h->ld_table, 64);
    if (at)
        *at = (pi_device_input){(int32_t *)(void *)base, (int32_t *)(void *)(base + each),
                                (int32_t *)(void *)(base + table), (float *)(void *)(base + cs), NULL};
    const size_t counts = round_up(cs + sizeof(float) * n_tok * (size_t)h->s->model->rope.n_rot, 64);
    if (at) at->counts = (uint32_t *)(void *)(base + counts);
    return counts + sizeof(uint32_t) * 3 * (size_t)h->s->model->info.n_layer;
}
pi_device_input pi_hybrid_input(const pi_hybrid *h, int32_t n_tok, void *base) {
    pi_device_input in;
    (void)input_bytes(h, (size_t)n_tok, &in, base);
    return in;
}
size_t pi_hybrid_input_bytes(const pi_hybrid *h, int32_t n_tok) { return input_bytes(h, (size_t)n_tok, NULL, NULL); }

/* Bytes of a neuron's rows on the way, each matrix with room to begin at a boundary. */
static size_t staged_bytes(const pi_model *m, int32_t l, size_t n) {
    const pi_layer *w = &m->layer[l];
    const te_mat *mats[] = {&w->gate, &w->up, &w->down_t};
    size_t sum = 0;
    for (size_t k = 0; k < sizeof mats / sizeof *mats; k++)
        if (mats[k]->w)
            sum += round_up(round_up(te_row_bytes(mats[k]->type, mats[k]->cols), PI_DEVICE_ROW) * n, PI_DEVICE_ALIGN);
    if (w->down.w)
        sum += round_up(round_up(te_row_bytes(w->down.type, (int32_t)n), PI_DEVICE_ROW) * (size_t)w->down.n_rows,
                        PI_DEVICE_ALIGN);
    return sum;
}

enum { STAGE_BYTES = 64 << 20 };
int32_t pi_hybrid_staged(const pi_hybrid *h, int32_t l, size_t n_bytes) {
    const pi_layer *w = &h->s->model->layer[l];
    const int32_t block = w->down.w ? te_type_get(w->down.type)->block_weights : 1;
    int32_t n = h->layer[l].n_cold / block;
    while (n > 1 && staged_bytes(h->s->model, l, (size_t)n * (size_t)block) > n_bytes) n -= n / 8 + 1;
    return (n > 0 ? n : 1) * block;
}

static size_t stage_bytes(const pi_hybrid *h) {
    size_t most = 0;
    for (int32_t l = 0; l < h->s->model->info.n_layer; l++) {
        const pi_device_layer *d = &h->layer[l];
        if (d->device < 0 || !d->n_cold) continue;
        const size_t n = staged_bytes(h->s->model, l, (size_t)pi_hybrid_staged(h, l, STAGE_BYTES));
        if (n > most) most = n;
    }
    return most;
}

static void send_state(upload *u, pi_hybrid *h, pi_device_state *d, bool head) {
    const pi_session *s = h->s;
    const pi_model_info *i = &s->model->info;
    const size_t b = (size_t)s->options.n_batch, n_embd = (size_t)i->n_embd,
                 n_q = (size_t)i->n_head * (size_t)i->n_embd_head, n_kv = (size_t)i->n_head_kv * (size_t)i->n_embd_head;
    int32_t most_cold = 0;
    for (int32_t l = 0; l < i->n_layer; l++)
        if (h->layer[l].device >= 0 && h->layer[l].n_cold > most_cold) most_cold = h->layer[l].n_cold;
    u->dev->ops->get_info(u->dev, &d->info);
    d->input_bytes = input_bytes(h, b, NULL, NULL);
    d->input = reserve(u, d->input_bytes);
    d->shared_input = share(u, d->input_bytes);
    d->seq = reserve(u, sizeof *d->seq);
    d->x = floats(u, b, n_embd);
    d->h = floats(u, b, n_embd);
    d->q = floats(u, b, n_q);
    d->k = floats(u, b, n_kv);
    d->v = floats(u, b, n_kv);
    d->att = floats(u, b, n_q);
    d->z = floats(u, b, (size_t)s->model->max_rank);
    d->y = floats(u, b, n_embd);
    d->threshold = floats(u, 1, (size_t)i->n_layer);
    send(u, d->threshold, s->threshold, sizeof(float) * (size_t)i->n_layer);
    d->post = share(u, sizeof *d->post * b * n_embd);
    d->answer = share(u, sizeof *d->answer * b * n_embd);
    d->counts = share(u, sizeof *d->counts * 3 * (size_t)i->n_layer);
    d->marks =
        share(u, sizeof *d->marks * (size_t)d->info.max_decode * (size_t)pi_mark_words(most_cold, d->info.n_parts));
    d->stage_bytes = stage_bytes(h);
    for (int32_t k = 0; k < 2 && d->stage_bytes; k++) d->stage[k] = reserve(u, d->stage_bytes);
    if (head) {
        d->output_norm = send_norm(u, s->model, s->model->output_norm, s->model->output_norm_b);
        d->output = send_mat(u, &s->model->output);
        d->logits = share(u, sizeof(float) * (size_t)h->max_logits * (size_t)i->n_vocab);
        d->hidden = share(u, sizeof(float) * (size_t)h->max_logits * n_embd);
    }
}

/* ---- opening ---- */

static pi_status place(pi_hybrid *h, const pi_plan *plan) {
    const pi_model_info *i = &h->s->model->info;
    if (plan->n_layer != i->n_layer || plan->n_ff != i->n_ff)
        return PI_FAIL(PI_ERROR_ARGUMENT, "the plan is for %d layers of %d neurons, the model has %d of %d",
                       plan->n_layer, plan->n_ff, i->n_layer, i->n_ff);
    h->layer = calloc((size_t)i->n_layer, sizeof *h->layer);
    if (!h->layer) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d layers", i->n_layer);
    for (int32_t l = 0; l < i->n_layer; l++) {
        h->layer[l].device = plan->layer[l].on_device ? 0 : -1;
        if (h->layer[l].device >= 0) PI_TRY(split_neurons(plan, l, &h->layer[l]));
    }
    h->head_device = plan->info.head_on_device ? 0 : -1;
    return PI_OK;
}

pi_status pi_hybrid_place(pi_session *s, const pi_plan *plan, pi_hybrid **out) {
    *out = NULL;
    pi_hybrid *h = calloc(1, sizeof *h);
    if (!h) return PI_FAIL(PI_ERROR_MEMORY, "out of memory opening a session");
    h->s = s;
    const pi_status st = place(h, plan);
    if (st != PI_OK) {
        pi_hybrid_close(h);
        return st;
    }
    *out = h;
    return PI_OK;
}

/* Whether the device reads a prompt's cold weights where they lie. */
static bool map_weights(const pi_hybrid *h, pi_device *dev) {
    const pi_model *m = h->s->model;
    for (int32_t i = 0; i < te_gguf_n_parts(m->file->gguf); i++) {
        size_t n_bytes = 0;
        const void *p = te_gguf_mapping(m->file->gguf, i, &n_bytes);
        if (dev->ops->map(dev, p, n_bytes) != PI_OK) return false;
    }
    for (int32_t l = 0; l < m->info.n_layer; l++)
        if (m->layer[l].own.p && h->layer[l].device >= 0 &&
            dev->ops->map(dev, m->layer[l].own.p, m->layer[l].own.n_bytes) != PI_OK)
            return false;
    return true;
}

int32_t pi_hybrid_most(const pi_hybrid *h) {
    return h->can_load ? h->s->options.n_batch : h->device[0].info.max_decode;
}

pi_status pi_hybrid_load(pi_hybrid *h, int32_t kind, uint64_t budget_bytes) {
    const pi_device_ops *ops = NULL;
    PI_TRY(pi_device_find(kind, &ops));
    const pi_session *s = h->s;
    const size_t n_embd = (size_t)s->model->info.n_embd, n_ff = (size_t)s->model->info.n_ff;
    h->ld_table = (s->options.n_ctx + PI_KV_BLOCK - 1) / PI_KV_BLOCK;
    h->max_logits = s->options.n_batch;
    pi_device_state *d = &h->device[0];
    const pi_status opened = ops->open(0, budget_bytes, &d->dev);
    if (opened != PI_OK) return PI_FAIL(opened, "%s", ops->error());
    h->n_devices = 1;
    h->wait = (pi_wait){d->dev->cancelled, 60000000000};
    h->can_load = map_weights(h, d->dev);
    upload u = {.dev = d->dev};
    for (int32_t l = 0; l < s->model->info.n_layer; l++)
        if (h->layer[l].device == 0) send_layer(&u, s, l, &h->layer[l]);
    send_state(&u, h, d, h->head_device == 0);
    for (int32_t l = 0; l < s->model->info.n_layer; l++)
        if (h->layer[l].device == 0) h->layer[l].threshold = d->threshold + l;
    PI_TRY(u.status);
    h->list = malloc(pi_mul(sizeof *h->list * (size_t)s->options.n_threads, n_ff));
    h->y = te_os_alloc(sizeof *h->y * (size_t)d->info.max_decode * n_embd);
    if (!h->list || !h->y) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for lists of neurons");
    return PI_OK;
}

/* ---- K and V on devices ---- */

static bool far_has(void *ctx, int32_t l) { return ((const pi_hybrid *)ctx)->layer[l].device >= 0; }
static char *far_pool(const pi_hybrid *h, int32_t l, bool is_v) {
    return is_v ? h->layer[l].pool_v : h->layer[l].pool_k;
}
static pi_device *far_device(const pi_hybrid *h, int32_t l) { return h->device[h->layer[l].device].dev; }
static void far_note(pi_hybrid *h, pi_status st) {
    if (h->kv_status == PI_OK) h->kv_status = st;
}
static void far_read(void *ctx, int32_t l, bool is_v, size_t at, void *to, size_t n_bytes) {
    pi_hybrid *h = ctx;
    pi_device *dev = far_device(h, l);
    far_note(h, dev->ops->download(dev, to, far_pool(h, l, is_v) + at, n_bytes));
}
static void far_write(void *ctx, int32_t l, bool is_v, size_t at, const void *from, size_t n_bytes) {
    pi_hybrid *h = ctx;
    pi_device *dev = far_device(h, l);
    far_note(h, dev->ops->upload(dev, far_pool(h, l, is_v) + at, from, n_bytes));
}
static void far_copy(void *ctx, int32_t l, bool is_v, size_t to, size_t from, size_t n_bytes) {
    pi_hybrid *h = ctx;
    pi_device *dev = far_device(h, l);
    char *pool = far_pool(h, l, is_v);
    far_note(h, dev->ops->copy(dev, pool + to, pool + from, n_bytes));
}
pi_kv_far pi_hybrid_far(pi_hybrid *h) { return (pi_kv_far){h, far_has, far_read, far_write, far_copy}; }

void pi_hybrid_close(pi_hybrid *h) {
    if (!h) return;
    if (h->y) te_os_free(h->y, sizeof *h->y * (size_t)h->device[0].info.max_decode * (size_t)h->s->model->info.n_embd);
    free(h->list);
    for (int32_t i = 0; i < h->n_devices; i++) h->device[i].dev->ops->close(h->device[i].dev);
    for (int32_t l = 0; h->layer && l < h->s->model->info.n_layer; l++) {
        free(h->layer[l].hot);
        free(h->layer[l].cold);
        free(h->layer[l].cold_blocks);
    }
    free(h->layer);
    free(h);
}
