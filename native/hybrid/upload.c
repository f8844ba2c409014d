/* upload.c - brings a device's layers there, and reserves the buffers of a run. */
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_types.h"
#include "program.h"

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Its sentence must outlive what is freed on the way out. */
static void fail(pi_upload *u, pi_status status, const char *problem) {
    if (u->status != PI_OK || status == PI_OK) return;
    u->status = status;
    strncpy(u->problem, problem, sizeof u->problem - 1);
}
static void ask(pi_upload *u, pi_status status) {
    if (status != PI_OK) fail(u, status, u->dev->ops->error());
}
void *pi_upload_take(pi_upload *u, size_t n_bytes) {
    if (u->status != PI_OK) return NULL;
    void *p = malloc(n_bytes ? n_bytes : 1);
    if (!p) fail(u, PI_ERROR_MEMORY, "out of memory bringing weights to a device");
    return p;
}

void *pi_upload_reserve(pi_upload *u, size_t n_bytes) {
    if (u->status != PI_OK) return NULL;
    void *p = n_bytes > SIZE_MAX / 2 ? NULL : u->dev->ops->alloc(u->dev, round_up(n_bytes, PI_DEVICE_ALIGN));
    if (!p) fail(u, PI_ERROR_MEMORY, n_bytes > SIZE_MAX / 2 ? "a device's buffer is too large" : u->dev->ops->error());
    return p;
}
static void *share(pi_upload *u, size_t n_bytes) {
    if (u->status != PI_OK) return NULL;
    void *p = u->dev->ops->share(u->dev, n_bytes);
    if (!p) fail(u, PI_ERROR_MEMORY, u->dev->ops->error());
    return p;
}
static float *floats(pi_upload *u, size_t rows, size_t cols) {
    return pi_upload_reserve(u, pi_mul(pi_mul(rows, cols), sizeof(float)));
}

static void sent(pi_upload *u, size_t n_bytes) {
    pi_hybrid *h = u->h;
    h->sent_bytes += n_bytes;
    if (h->sent_bytes > h->total_bytes) h->total_bytes = h->sent_bytes;
    if (u->status == PI_OK && h->progress && h->progress(h->progress_ctx, h->sent_bytes, h->total_bytes) != 0)
        fail(u, PI_ERROR_DEVICE, "bringing weights to a device was stopped");
}

void pi_upload_bytes(pi_upload *u, void *to, const void *from, size_t n_bytes) {
    if (u->status == PI_OK && n_bytes) ask(u, u->dev->ops->upload(u->dev, to, from, n_bytes));
}

const float *pi_upload_vector(pi_upload *u, const float *v, int64_t n) {
    if (!v) return NULL;
    float *p = floats(u, 1, (size_t)n);
    pi_upload_bytes(u, p, v, sizeof *v * (size_t)n);
    return p;
}

const int32_t *pi_upload_ids(pi_upload *u, const int32_t *ids, int32_t n) {
    int32_t *p = pi_upload_reserve(u, sizeof *ids * (size_t)(n ? n : 1));
    pi_upload_bytes(u, p, ids, sizeof *ids * (size_t)n);
    return p;
}

te_norm pi_upload_norm(pi_upload *u, const pi_norm *norm) {
    const pi_model *m = u->h->s->model;
    return (te_norm){.kind = !norm->w              ? TE_NO_NORM
                             : m->arch->layer_norm ? TE_LAYER_NORM
                                                   : TE_RMS_NORM,
                     .eps = m->norm_eps,
                     .w = pi_upload_vector(u, norm->w, m->info.n_embd),
                     .b = pi_upload_vector(u, norm->b, m->info.n_embd)};
}

void pi_upload_to(pi_upload *u, const te_mat *m, void *at) {
    te_mat out = {.w = at};
    if (u->status == PI_OK) ask(u, u->dev->ops->pack(u->dev, m, NULL, m->n_rows, false, &out));
    sent(u, u->status == PI_OK ? out.stride * (size_t)m->n_rows : 0);
}

static te_mat send_part(pi_upload *u, const te_mat *m, const int32_t *ids, int32_t n, bool columns) {
    if (!m->w || !n || u->status != PI_OK) return (te_mat){0};
    const int32_t cols = columns ? n : m->cols, rows = columns ? m->n_rows : n;
    te_mat out = {.w = pi_upload_reserve(u, pi_mul(u->dev->ops->stride(m->type, cols), (size_t)rows))};
    if (u->status == PI_OK) ask(u, u->dev->ops->pack(u->dev, m, ids, n, columns, &out));
    sent(u, u->status == PI_OK ? out.stride * (size_t)rows : 0);
    return out;
}
te_mat pi_upload_rows(pi_upload *u, const te_mat *m, const int32_t *ids, int32_t n) {
    return send_part(u, m, ids, n, false);
}
te_mat pi_upload_mat(pi_upload *u, const te_mat *m) { return send_part(u, m, NULL, m->n_rows, false); }
int32_t pi_upload_block_ids(const te_mat *m, const int32_t *ids, int32_t n, int32_t *out) {
    const int32_t block = te_type_get(m->type)->block_weights;
    for (int32_t i = 0; i < n / block; i++) out[i] = ids[i * block] / block;
    return n / block;
}
te_mat pi_upload_columns(pi_upload *u, const te_mat *m, const int32_t *ids, int32_t n) {
    int32_t *blocks = pi_upload_take(u, sizeof *blocks * ((size_t)n + 1));
    if (!blocks) return (te_mat){0};
    (void)pi_upload_block_ids(m, ids, n, blocks);
    const te_mat out = send_part(u, m, blocks, n, true);
    free(blocks);
    return out;
}

const uint64_t *pi_upload_words(pi_upload *u, const uint64_t *from, int32_t n_words, const int32_t *ids, int32_t n) {
    const size_t words = (size_t)n_words, row = words * sizeof *from;
    char *to = pi_upload_reserve(u, pi_mul(row, (size_t)(n ? n : 1))), *all = pi_upload_take(u, pi_mul(row, (size_t)n));
    for (int32_t i = 0; all && i < n; i++) memcpy(all + row * (size_t)i, from + words * (size_t)ids[i], row);
    pi_upload_bytes(u, to, all, row * (size_t)n);
    sent(u, row * (size_t)n);
    free(all);
    return (const uint64_t *)(void *)to;
}

const float *pi_upload_some(pi_upload *u, const float *v, const int32_t *ids, int32_t n) {
    if (!v || !n) return NULL;
    float *some = pi_upload_take(u, sizeof *some * (size_t)n);
    for (int32_t k = 0; some && k < n; k++) some[k] = v[ids[k]];
    const float *p = some ? pi_upload_vector(u, some, n) : NULL;
    free(some);
    return p;
}

/* ---- layers ---- */

static void send_layer(pi_upload *u, const pi_layer *layer, pi_device_layer *d) {
    for (int32_t i = layer->n_host; i < layer->n_blocks - layer->n_tail; i++) {
        const pi_block *b = &layer->block[i];
        const bool shared = i > 0 && b->norm.w == layer->block[0].norm.w; /* by blocks side by side */
        d->norm[i] = shared ? d->norm[0] : pi_upload_norm(u, &b->norm);
        d->post_norm[i] = pi_upload_norm(u, &b->post_norm);
        b->kind->device->send(u, layer, b, d);
    }
}

/* ---- buffers ---- */

/* The same of n experts. */
static size_t staged_experts(const pi_experts *w, size_t n) {
    size_t sum = 0;
    for (int32_t k = 0; k < PI_EXPERT_MATS; k++) {
        const te_mat *all = pi_expert_mat(w, k);
        const size_t rows = (size_t)(all->n_rows / w->n_expert) * n;
        sum += round_up(round_up(te_row_bytes(all->type, all->cols), PI_DEVICE_ROW) * rows, PI_DEVICE_ALIGN);
    }
    return sum;
}

/* Bytes of n neurons' rows on the way, each matrix with room to begin at a boundary. */
static size_t staged_bytes(const pi_model *m, int32_t l, size_t n) {
    if (pi_experts_of(&m->layer[l])) return staged_experts(pi_experts_of(&m->layer[l]), n);
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
    const int32_t block = w && w->down.w ? te_type_get(w->down.type)->block_weights : 1;
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

static void send_head(pi_upload *u, pi_device_state *d) {
    const pi_model *m = u->h->s->model;
    d->output_norm = pi_upload_norm(u, &m->output_norm);
    d->output = pi_upload_mat(u, &m->output);
    d->output_bias = pi_upload_vector(u, m->output_b, m->info.n_vocab);
    d->output_a = pi_upload_mat(u, &m->output_adapter.a);
    d->output_b = pi_upload_mat(u, &m->output_adapter.b);
    d->logits = share(u, sizeof(float) * (size_t)u->h->max_rows * (size_t)m->info.n_vocab);
    d->hidden = share(u, sizeof(float) * (size_t)u->h->max_rows * (size_t)m->info.n_embd);
    d->largest = share(u, sizeof *d->largest * (size_t)u->h->max_rows * PI_LARGEST);
    d->n_found = share(u, sizeof *d->n_found * (size_t)u->h->max_rows);
}

/* Buffers in one piece: where the head's logits are made, nothing of what they hold is needed. */
static void reserve_rows(pi_upload *u, pi_device_state *d) {
    const pi_session *s = u->h->s;
    const pi_model_info *i = &s->model->info;
    const size_t n_q = (size_t)i->n_head * (size_t)i->n_embd_head, n_kv = (size_t)i->n_head_kv * (size_t)i->n_embd_head;
    const struct {
        float **to;
        size_t cols;
    } part[] = {{&d->h, (size_t)i->n_embd},
                {&d->q, n_q},
                {&d->k, n_kv},
                {&d->v, n_kv},
                {&d->att, n_q},
                {&d->latent_q, pi_latent_q(s->model)},
                {&d->y, (size_t)i->n_embd}};
    size_t at[sizeof part / sizeof *part], n_bytes = 0;
    for (size_t k = 0; k < sizeof part / sizeof *part; k++) {
        const size_t n = pi_mul(pi_mul((size_t)s->options.n_batch, part[k].cols), sizeof(float));
        at[k] = n_bytes;
        n_bytes = pi_add(n_bytes, n < SIZE_MAX / 2 ? round_up(n, PI_DEVICE_ALIGN) : n);
    }
    const size_t rows = pi_space_logits((uint64_t)s->options.n_seq, (uint64_t)s->options.n_batch, (uint64_t)i->n_vocab);
    if (n_bytes < rows) n_bytes = round_up(rows, PI_DEVICE_ALIGN);
    char *piece = pi_upload_reserve(u, n_bytes);
    for (size_t k = 0; piece && k < sizeof part / sizeof *part; k++) *part[k].to = (float *)(void *)(piece + at[k]);
    d->rows = (float *)(void *)piece;
    d->rows_floats = n_bytes / sizeof(float);
}

static void send_helper(pi_upload *u, pi_device_state *d) {
    const pi_model *m = u->h->s->model;
    te_mat rows = m->output;
    rows.n_rows = u->h->helper_rows;
    d->output_norm = pi_upload_norm(u, &m->output_norm);
    d->output = pi_upload_mat(u, &rows);
    d->output_bias = pi_upload_vector(u, m->output_b, rows.n_rows);
}

static float *ones(pi_upload *u, size_t n) {
    float *here = pi_upload_take(u, sizeof *here * n), *p = floats(u, 1, n);
    for (size_t k = 0; here && k < n; k++) here[k] = 1;
    pi_upload_bytes(u, p, here, sizeof *here * n);
    free(here);
    return p;
}

static void send_state(pi_upload *u, pi_device_state *d) {
    const pi_hybrid *h = u->h;
    const pi_session *s = h->s;
    const pi_model_info *i = &s->model->info;
    const size_t b = (size_t)s->options.n_batch, n_embd = (size_t)i->n_embd,
                 n_q = (size_t)i->n_head * (size_t)i->n_embd_head;
    int32_t most_cold = 0;
    for (int32_t l = 0; l < i->n_layer; l++)
        if (h->layer[l].n_cpu > most_cold) most_cold = h->layer[l].n_cpu;
    d->input_bytes = pi_hybrid_input_bytes(h, h->s->options.n_batch);
    d->input = pi_upload_reserve(u, d->input_bytes);
    d->shared_input = share(u, d->input_bytes);
    d->ticket = pi_upload_reserve(u, sizeof *d->ticket);
    d->x = d->input; /* the embedding is the first of a step's inputs */
    reserve_rows(u, d);
    if (pi_gates_heads(s->model)) d->head_gates = floats(u, b, n_q);
    if (s->model->cuts_gates) {
        d->cut_gates = floats(u, b, (size_t)i->n_ff);
        d->cut_ups = floats(u, b, (size_t)i->n_ff);
    }
    if (d->state_floats) {
        const pi_model *m = s->model;
        d->state_in = floats(u, b, round_up((size_t)m->state_in, 4));
        if (m->state_gates) d->state_conv = floats(u, b, round_up((size_t)m->state_in, 4));
        if (m->state_z) d->state_z = floats(u, b, round_up((size_t)m->state_z, 4));
        if (m->state_gates) d->state_gates = floats(u, b, round_up((size_t)m->state_gates, 8));
        d->state_out = floats(u, b, round_up((size_t)m->state_out, 4));
    }
    d->z = floats(u, b, (size_t)s->model->max_rank);
    for (int32_t k = 0; k < 3 && s->model->adapter_rank; k++)
        d->adapt[k] = floats(u, b, (size_t)s->model->adapter_rank);
    d->threshold = floats(u, 1, (size_t)i->n_layer);
    pi_upload_bytes(u, d->threshold, s->threshold, sizeof(float) * (size_t)i->n_layer);
    d->published = share(u, sizeof *d->published * b * n_embd);
    d->answer = share(u, sizeof *d->answer * b * n_embd);
    d->counts = share(u, pi_hybrid_count_bytes(h));
    d->part_stamps = share(u, 2 * sizeof *d->part_stamps);
    if (i->n_expert) {
        const size_t n_used = (size_t)i->n_expert_used;
        d->score = floats(u, b, (size_t)i->n_expert);
        d->weight = floats(u, b, n_used);
        d->expert = pi_upload_reserve(u, sizeof *d->expert * b * n_used);
        d->shared_score = floats(u, b, 4); /* a row for each token must be a multiple of 16 bytes */
        d->shared_weight = ones(u, b);
        d->shared_expert = pi_upload_reserve(u, sizeof *d->shared_expert * b);
        d->shared_place = pi_upload_reserve(u, sizeof *d->shared_place);
        d->shared_x = s->model->arch->experts_beside ? floats(u, b, n_embd) : NULL;
        d->shared_y = s->model->arch->experts_beside ? floats(u, b, n_embd) : NULL;
        d->n_missing = pi_upload_reserve(u, sizeof *d->n_missing);
        d->kept = pi_upload_reserve(u, sizeof *d->kept * n_used);
        const size_t n_asked = (size_t)i->n_layer * (size_t)d->info.max_decode;
        d->routes = share(u, sizeof *d->routes * pi_mul(n_asked, 2 * n_used));
        const size_t n_guessed = (size_t)d->info.max_decode * n_used;
        d->guess_expert = pi_upload_reserve(u, sizeof *d->guess_expert * n_guessed);
        d->guess_kept = pi_upload_reserve(u, sizeof *d->guess_kept * n_used);
        d->guess_weight = floats(u, (size_t)d->info.max_decode, n_used);
        d->guess = share(u, sizeof *d->guess * pi_mul(n_asked, 2 * n_used));
        d->asked = share(u, sizeof *d->asked * pi_mul(n_asked, n_embd));
    }
    d->marks =
        share(u, sizeof *d->marks * (size_t)d->info.max_decode * (size_t)pi_mark_words(most_cold, d->info.n_parts));
    d->ahead_words = pi_mark_words(most_cold, d->info.n_parts);
    d->ahead = share(u, sizeof *d->ahead * 2 * (size_t)d->ahead_words);
    d->stage_bytes = s->options.n_batch > h->max_decode ? stage_bytes(h, (int32_t)(d - h->device)) : 0;
    for (int32_t k = 0; k < PI_STAGES && d->stage_bytes; k++) d->stage[k] = pi_upload_reserve(u, d->stage_bytes);
}

/* Room for what the device's layers remember, which stand one behind the other in a place. */
static void reserve_states(pi_upload *u, int32_t device) {
    const pi_hybrid *h = u->h;
    const pi_states *s = &h->s->kv.states;
    pi_device_state *d = &u->h->device[device];
    for (int32_t l = 0; l < h->s->model->info.n_layer; l++) {
        const pi_block *b = pi_recurrent_on_device(&h->s->model->layer[l]);
        if (!b || h->layer[l].device != device) continue;
        h->layer[l].recurrent.at = d->state_floats;
        d->state_floats += round_up(pi_recurrent_floats(&b->recurrent), PI_DEVICE_ALIGN / sizeof(float));
    }
    if (d->state_floats) d->states = floats(u, pi_states_places(s->n_seq, s->n_guesses), d->state_floats);
}

pi_status pi_hybrid_upload(pi_hybrid *h, int32_t device) {
    pi_device_state *d = &h->device[device];
    pi_upload u = {.h = h, .dev = d->dev};
    const pi_status reserved = d->dev->ops->reserve(d->dev, d->held_bytes);
    if (reserved != PI_OK) return PI_FAIL(reserved, "%s", d->dev->ops->error());
    for (int32_t l = 0; l < h->s->model->info.n_layer; l++)
        if (h->layer[l].device == device) send_layer(&u, &h->s->model->layer[l], &h->layer[l]);
    reserve_states(&u, device);
    if (h->head_device == device) send_head(&u, d); /* before all that is not among the reserved bytes */
    if (h->helper == device) send_helper(&u, d);
    send_state(&u, d);
    for (int32_t l = 0; l < h->s->model->info.n_layer; l++)
        if (h->layer[l].device == device) h->layer[l].threshold = d->threshold + l;
    return u.status == PI_OK ? PI_OK : PI_FAIL(u.status, "%s", u.problem);
}
