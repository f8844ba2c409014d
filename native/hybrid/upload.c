/* upload.c - brings a device's layers there, and reserves the buffers of a run. */
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_types.h"
#include "hybrid.h"

typedef struct upload {
    pi_hybrid *h;
    pi_device *dev;
    pi_status status; /* the first error; later calls do nothing */
    char problem[512];
} upload;

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Its sentence must outlive what is freed on the way out. */
static void fail(upload *u, pi_status status, const char *problem) {
    if (u->status != PI_OK || status == PI_OK) return;
    u->status = status;
    strncpy(u->problem, problem, sizeof u->problem - 1);
}
static void ask(upload *u, pi_status status) {
    if (status != PI_OK) fail(u, status, u->dev->ops->error());
}
/* Memory of this side. */
static void *take(upload *u, size_t n_bytes) {
    if (u->status != PI_OK) return NULL;
    void *p = malloc(n_bytes ? n_bytes : 1);
    if (!p) fail(u, PI_ERROR_MEMORY, "out of memory bringing weights to a device");
    return p;
}

static void *reserve(upload *u, size_t n_bytes) {
    if (u->status != PI_OK) return NULL;
    void *p = n_bytes > SIZE_MAX / 2 ? NULL : u->dev->ops->alloc(u->dev, round_up(n_bytes, PI_DEVICE_ALIGN));
    if (!p) fail(u, PI_ERROR_MEMORY, n_bytes > SIZE_MAX / 2 ? "a device's buffer is too large" : u->dev->ops->error());
    return p;
}
static void *share(upload *u, size_t n_bytes) {
    if (u->status != PI_OK) return NULL;
    void *p = u->dev->ops->share(u->dev, n_bytes);
    if (!p) fail(u, PI_ERROR_MEMORY, u->dev->ops->error());
    return p;
}
static float *floats(upload *u, size_t rows, size_t cols) {
    return reserve(u, pi_mul(pi_mul(rows, cols), sizeof(float)));
}

static void sent(upload *u, size_t n_bytes) {
    pi_hybrid *h = u->h;
    h->sent_bytes += n_bytes;
    if (h->sent_bytes > h->total_bytes) h->total_bytes = h->sent_bytes;
    if (u->status == PI_OK && h->progress && h->progress(h->progress_ctx, h->sent_bytes, h->total_bytes) != 0)
        fail(u, PI_ERROR_DEVICE, "bringing weights to a device was stopped");
}

static void send(upload *u, void *to, const void *from, size_t n_bytes) {
    if (u->status == PI_OK && n_bytes) ask(u, u->dev->ops->upload(u->dev, to, from, n_bytes));
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

static te_norm send_norm(upload *u, const pi_model *m, const pi_norm *norm) {
    return (te_norm){.kind = !norm->w              ? TE_NO_NORM
                             : m->arch->layer_norm ? TE_LAYER_NORM
                                                   : TE_RMS_NORM,
                     .eps = m->norm_eps,
                     .w = send_vector(u, norm->w, m->info.n_embd),
                     .b = send_vector(u, norm->b, m->info.n_embd)};
}

static te_mat send_part(upload *u, const te_mat *m, const int32_t *ids, int32_t n, bool columns) {
    if (!m->w || !n || u->status != PI_OK) return (te_mat){0};
    const int32_t cols = columns ? n : m->cols, rows = columns ? m->n_rows : n;
    te_mat out = {.w = reserve(u, pi_mul(u->dev->ops->stride(m->type, cols), (size_t)rows))};
    if (u->status == PI_OK) ask(u, u->dev->ops->pack(u->dev, m, ids, n, columns, &out));
    sent(u, u->status == PI_OK ? out.stride * (size_t)rows : 0);
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
    int32_t *blocks = take(u, sizeof *blocks * ((size_t)n + 1));
    if (!blocks) return (te_mat){0};
    (void)block_ids(m, ids, n, blocks);
    const te_mat out = send_part(u, m, blocks, n, true);
    free(blocks);
    return out;
}

static const uint64_t *send_signs(upload *u, const pi_model *m, const pi_ffn *w, const int32_t *ids, int32_t n) {
    const size_t words = (size_t)m->sign_words, row = words * sizeof *w->sign;
    char *to = reserve(u, pi_mul(row, (size_t)(n ? n : 1))), *all = take(u, pi_mul(row, (size_t)n));
    for (int32_t i = 0; all && i < n; i++) memcpy(all + row * (size_t)i, w->sign + words * (size_t)ids[i], row);
    send(u, to, all, row * (size_t)n);
    sent(u, row * (size_t)n);
    free(all);
    return (const uint64_t *)(void *)to;
}

/* Elements ids[0..n-1] of v. */
static const float *send_some(upload *u, const float *v, const int32_t *ids, int32_t n) {
    if (!v || !n) return NULL;
    float *some = take(u, sizeof *some * (size_t)n);
    for (int32_t k = 0; some && k < n; k++) some[k] = v[ids[k]];
    const float *p = some ? send_vector(u, some, n) : NULL;
    free(some);
    return p;
}

/* Adapters' matrices with a row per neuron, in two parts; down's a is turned for that. */
static void send_neuron_rows(upload *u, const te_mat *m, int32_t which, pi_device_layer *d) {
    te_mat *hot = which == PI_ADAPT_DOWN ? &d->adapter_a[which] : &d->adapter_b[which];
    *hot = send_rows(u, m, d->hot, d->n_hot);
    d->adapter_cold[which] = send_rows(u, m, d->cold, d->n_cold);
}

static void send_turned(upload *u, const te_mat *m, int32_t which, pi_device_layer *d) {
    const size_t rows = (size_t)m->n_rows, cols = (size_t)m->cols;
    const float *from = m->w;
    float *to = take(u, pi_mul(rows, cols * sizeof *to));
    for (size_t r = 0; to && r < rows; r++)
        for (size_t c = 0; c < cols; c++) to[c * rows + r] = from[r * cols + c];
    const te_mat turned = {to, rows * sizeof *to, m->type, m->n_rows, m->cols};
    if (to) send_neuron_rows(u, &turned, which, d);
    free(to);
}

static void send_adapters(upload *u, const pi_layer *w, pi_device_layer *d) {
    for (int32_t k = 0; w->adapter && k < PI_N_ADAPT; k++) {
        const pi_adapter *from = &w->adapter[k];
        if (k == PI_ADAPT_DOWN && from->a.w)
            send_turned(u, &from->a, k, d);
        else
            d->adapter_a[k] = send_mat(u, &from->a);
        if (k == PI_ADAPT_GATE || k == PI_ADAPT_UP)
            send_neuron_rows(u, &from->b, k, d);
        else
            d->adapter_b[k] = send_mat(u, &from->b);
    }
}

/* ---- layers ---- */

static void send_layer(upload *u, const pi_session *s, int32_t l, pi_device_layer *d) {
    const pi_model *m = s->model;
    const pi_model_info *i = &m->info;
    const pi_layer *w = &m->layer[l];
    const pi_attention *a = pi_attention_of(w);
    const pi_ffn *f = pi_ffn_of(w);
    const int32_t n_q = i->n_head * i->n_embd_head, n_kv = i->n_head_kv * i->n_embd_head;
    const pi_norm *norm = &pi_block_of(w, &pi_attention_kind)->norm, *ffn_norm = &pi_block_of(w, &pi_ffn_kind)->norm;
    d->attn_norm = send_norm(u, m, norm);
    d->ffn_norm = ffn_norm->w == norm->w ? d->attn_norm : send_norm(u, m, ffn_norm);
    d->attn_post_norm = send_norm(u, m, &pi_block_of(w, &pi_attention_kind)->post_norm);
    d->ffn_post_norm = send_norm(u, m, &pi_block_of(w, &pi_ffn_kind)->post_norm);
    d->q = send_mat(u, &a->q);
    d->k = send_mat(u, &a->k);
    d->v = send_mat(u, &a->v);
    d->o = send_mat(u, &a->o);
    send_adapters(u, w, d);
    d->q_b = send_vector(u, a->q_b, n_q);
    d->k_b = send_vector(u, a->k_b, n_kv);
    d->v_b = send_vector(u, a->v_b, n_kv);
    d->o_b = send_vector(u, a->o_b, i->n_embd);
    d->q_norm = send_vector(u, a->q_norm, i->n_embd_head);
    d->k_norm = send_vector(u, a->k_norm, i->n_embd_head);
    d->down_b = send_vector(u, f->down_b, i->n_embd);
    d->gate = send_rows(u, &f->gate, d->hot, d->n_hot);
    d->up = send_rows(u, &f->up, d->hot, d->n_hot);
    if (f->down_t.w)
        d->down = send_rows(u, &f->down_t, d->hot, d->n_hot);
    else
        d->down_out = send_columns(u, &f->down, d->hot, d->n_hot);
    if (f->down.w && d->n_cold) {
        const int32_t n = block_ids(&f->down, d->cold, d->n_cold, d->cold_blocks);
        d->cold_block_ids = send_ids(u, d->cold_blocks, n);
    }
    d->up_b = send_some(u, f->up_b, d->hot, d->n_hot);
    d->has_predictor = s->options.sparsity == PI_SPARSITY_PREDICTED;
    if (d->has_predictor && f->sign) {
        d->sign_hot = send_signs(u, m, f, d->hot, d->n_hot);
        d->sign_cold = send_signs(u, m, f, d->cold, d->n_cold);
    } else if (d->has_predictor) {
        d->fc1 = send_mat(u, &f->fc1);
        d->fc2_hot = send_rows(u, &f->fc2, d->hot, d->n_hot);
        d->fc2_cold = send_rows(u, &f->fc2, d->cold, d->n_cold);
    }
    d->up_b_cold = send_some(u, f->up_b, d->cold, d->n_cold);
    d->cold_ids = send_ids(u, d->cold, d->n_cold);
    d->pool_k = reserve(u, s->kv.layer_k_bytes);
    d->pool_v = reserve(u, s->kv.layer_v_bytes);
    if (s->fired && d->n_hot) d->fired_hot = reserve(u, sizeof *d->fired_hot * (size_t)d->n_hot);
    if (s->fired && d->n_cold) d->fired_cold = reserve(u, sizeof *d->fired_cold * (size_t)d->n_cold);
}

/* ---- buffers ---- */

static size_t input_bytes(const pi_hybrid *h, size_t n_tok, pi_device_input *at, char *base) {
    const size_t x = round_up(sizeof(float) * n_tok * (size_t)h->s->model->info.n_embd, 64),
                 each = round_up(sizeof(int32_t) * n_tok, 64), table = x + 2 * each,
                 cs = table + round_up(sizeof(int32_t) * n_tok * (size_t)h->ld_table, 64);
    if (at)
        *at = (pi_device_input){.x = (float *)(void *)base,
                                .pos = (int32_t *)(void *)(base + x),
                                .first = (int32_t *)(void *)(base + x + each),
                                .table = (int32_t *)(void *)(base + table),
                                .cs = (float *)(void *)(base + cs)};
    const size_t counts = round_up(cs + sizeof(float) * n_tok * pi_rope_floats(h->s->model, h->s->model->n_ropes), 64);
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
    const pi_ffn *w = pi_ffn_of(&m->layer[l]);
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

int32_t pi_hybrid_staged(const pi_hybrid *h, int32_t l, size_t n_bytes) {
    const pi_ffn *w = pi_ffn_of(&h->s->model->layer[l]);
    const int32_t block = w->down.w ? te_type_get(w->down.type)->block_weights : 1;
    int32_t n = h->layer[l].n_cold / block;
    while (n > 1 && staged_bytes(h->s->model, l, (size_t)n * (size_t)block) > n_bytes) n -= n / 8 + 1;
    return (n > 0 ? n : 1) * block;
}

static size_t stage_bytes(const pi_hybrid *h, int32_t device) {
    size_t most = 0;
    for (int32_t l = 0; l < h->s->model->info.n_layer; l++) {
        const pi_device_layer *d = &h->layer[l];
        if (d->device != device || !d->n_cold) continue;
        const size_t n = staged_bytes(h->s->model, l, (size_t)pi_hybrid_staged(h, l, PI_STAGE_BYTES));
        if (n > most) most = n;
    }
    return most;
}

static void send_head(upload *u, pi_device_state *d) {
    const pi_model *m = u->h->s->model;
    d->output_norm = send_norm(u, m, &m->output_norm);
    d->output = send_mat(u, &m->output);
    d->output_a = send_mat(u, &m->output_adapter.a);
    d->output_b = send_mat(u, &m->output_adapter.b);
    d->logits = share(u, sizeof(float) * (size_t)u->h->max_logits * (size_t)m->info.n_vocab);
    d->hidden = share(u, sizeof(float) * (size_t)u->h->max_logits * (size_t)m->info.n_embd);
}

static void send_state(upload *u, pi_device_state *d) {
    const pi_hybrid *h = u->h;
    const pi_session *s = h->s;
    const pi_model_info *i = &s->model->info;
    const size_t b = (size_t)s->options.n_batch, n_embd = (size_t)i->n_embd,
                 n_q = (size_t)i->n_head * (size_t)i->n_embd_head, n_kv = (size_t)i->n_head_kv * (size_t)i->n_embd_head;
    int32_t most_cold = 0;
    for (int32_t l = 0; l < i->n_layer; l++)
        if (h->layer[l].n_cpu > most_cold) most_cold = h->layer[l].n_cpu;
    d->input_bytes = input_bytes(h, b, NULL, NULL);
    d->input = reserve(u, d->input_bytes);
    d->shared_input = share(u, d->input_bytes);
    d->ticket = reserve(u, sizeof *d->ticket);
    d->x = d->input; /* the embedding is the first of a step's inputs */
    d->h = floats(u, b, n_embd);
    d->q = floats(u, b, n_q);
    d->k = floats(u, b, n_kv);
    d->v = floats(u, b, n_kv);
    d->att = floats(u, b, n_q);
    d->z = floats(u, b, (size_t)s->model->max_rank);
    d->y = floats(u, b, n_embd);
    for (int32_t k = 0; k < 3 && s->model->adapter_rank; k++)
        d->adapt[k] = floats(u, b, (size_t)s->model->adapter_rank);
    d->threshold = floats(u, 1, (size_t)i->n_layer);
    send(u, d->threshold, s->threshold, sizeof(float) * (size_t)i->n_layer);
    d->published = share(u, sizeof *d->published * b * n_embd);
    d->answer = share(u, sizeof *d->answer * b * n_embd);
    d->counts = share(u, sizeof *d->counts * 3 * (size_t)i->n_layer);
    d->marks =
        share(u, sizeof *d->marks * (size_t)d->info.max_decode * (size_t)pi_mark_words(most_cold, d->info.n_parts));
    d->ahead_words = pi_mark_words(most_cold, d->info.n_parts);
    d->ahead = share(u, sizeof *d->ahead * 2 * (size_t)d->ahead_words);
    d->stage_bytes = s->options.n_batch > h->max_decode ? stage_bytes(h, (int32_t)(d - h->device)) : 0;
    for (int32_t k = 0; k < PI_STAGES && d->stage_bytes; k++) d->stage[k] = reserve(u, d->stage_bytes);
}

pi_status pi_hybrid_upload(pi_hybrid *h, int32_t device) {
    pi_device_state *d = &h->device[device];
    upload u = {.h = h, .dev = d->dev};
    const pi_status reserved = d->dev->ops->reserve(d->dev, d->held_bytes);
    if (reserved != PI_OK) return PI_FAIL(reserved, "%s", d->dev->ops->error());
    for (int32_t l = 0; l < h->s->model->info.n_layer; l++)
        if (h->layer[l].device == device) send_layer(&u, h->s, l, &h->layer[l]);
    if (h->head_device == device) send_head(&u, d); /* before all that is not among the reserved bytes */
    send_state(&u, d);
    for (int32_t l = 0; l < h->s->model->info.n_layer; l++)
        if (h->layer[l].device == device) h->layer[l].threshold = d->threshold + l;
    return u.status == PI_OK ? PI_OK : PI_FAIL(u.status, "%s", u.problem);
}
