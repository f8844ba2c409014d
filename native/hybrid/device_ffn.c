/* device_ffn.c - a feed-forward on a device: its hot neurons, its predictor, and the exchange about the cold ones. */
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_types.h"
#include "program.h"

/* ---- weights ---- */

/* An adapter's matrix with a row per neuron, in two parts. */
static void send_neuron_rows(pi_upload *u, const te_mat *m, int32_t which, pi_device_layer *d) {
    te_mat *hot = which == PI_ADAPT_DOWN ? &d->adapter_a[which] : &d->adapter_b[which];
    *hot = pi_upload_rows(u, m, d->hot, d->n_hot);
    d->adapter_cold[which] = pi_upload_rows(u, m, d->cold, d->n_cold);
}

/* Of down's adapter a is turned for that. */
static void send_turned(pi_upload *u, const te_mat *m, pi_device_layer *d) {
    const size_t rows = (size_t)m->n_rows, cols = (size_t)m->cols;
    const float *from = m->w;
    float *to = pi_upload_take(u, pi_mul(rows, cols * sizeof *to));
    for (size_t r = 0; to && r < rows; r++)
        for (size_t c = 0; c < cols; c++) to[c * rows + r] = from[r * cols + c];
    const te_mat turned = {to, rows * sizeof *to, m->type, m->n_rows, m->cols};
    if (to) send_neuron_rows(u, &turned, PI_ADAPT_DOWN, d);
    free(to);
}

static void send_adapters(pi_upload *u, const pi_adapter *adapter, pi_device_layer *d) {
    for (int32_t k = PI_ADAPT_GATE; k <= PI_ADAPT_UP; k++) {
        d->adapter_a[k] = pi_upload_mat(u, &adapter[k].a);
        send_neuron_rows(u, &adapter[k].b, k, d);
    }
    const pi_adapter *down = &adapter[PI_ADAPT_DOWN];
    if (down->a.w) send_turned(u, &down->a, d);
    d->adapter_b[PI_ADAPT_DOWN] = pi_upload_mat(u, &down->b);
}

static void send_predictor(pi_upload *u, const pi_ffn *f, pi_device_layer *d) {
    const int32_t words = u->h->s->model->sign_words;
    if (f->sign) {
        d->sign_hot = pi_upload_words(u, f->sign, words, d->hot, d->n_hot);
        d->sign_cold = pi_upload_words(u, f->sign, words, d->cold, d->n_cold);
    } else {
        d->fc1 = pi_upload_mat(u, &f->fc1);
        d->fc2_hot = pi_upload_rows(u, &f->fc2, d->hot, d->n_hot);
        d->fc2_cold = pi_upload_rows(u, &f->fc2, d->cold, d->n_cold);
    }
}

/* A down by neuron, of floats, by output. */
static te_mat send_by_output(pi_upload *u, const te_mat *m) {
    const size_t size = te_row_bytes(m->type, 1), rows = (size_t)m->n_rows, cols = (size_t)m->cols;
    const te_mat turned = {NULL, rows * size, m->type, m->n_rows, m->cols};
    te_mat from = turned, out = {0};
    char *to = pi_upload_take(u, pi_mul(rows, cols * size));
    for (size_t c = 0; to && c < cols; c++)
        for (size_t r = 0; r < rows; r++)
            memcpy(to + (c * rows + r) * size, (const char *)m->w + m->stride * r + c * size, size);
    from.w = to;
    if (to) out = pi_upload_mat(u, &from);
    free(to);
    return out;
}

static void send(pi_upload *u, const pi_layer *layer, const pi_block *b, pi_device_layer *d) {
    const pi_session *s = u->h->s;
    const pi_ffn *f = &b->ffn;
    d->gate = pi_upload_rows(u, &f->gate, d->hot, d->n_hot);
    d->up = pi_upload_rows(u, &f->up, d->hot, d->n_hot);
    if (f->cuts && f->down_t.w)
        d->down_out = send_by_output(u, &f->down_t);
    else if (f->down_t.w)
        d->down = pi_upload_rows(u, &f->down_t, d->hot, d->n_hot);
    else
        d->down_out = pi_upload_columns(u, &f->down, d->hot, d->n_hot);
    if (f->down.w && d->n_cold)
        d->cold_block_ids =
            pi_upload_ids(u, d->cold_blocks, pi_upload_block_ids(&f->down, d->cold, d->n_cold, d->cold_blocks));
    if (layer->adapter) send_adapters(u, layer->adapter, d);
    d->has_predictor = s->options.sparsity == PI_SPARSITY_PREDICTED;
    if (d->has_predictor) send_predictor(u, f, d);
    d->up_b = pi_upload_some(u, f->up_b, d->hot, d->n_hot);
    d->up_b_cold = pi_upload_some(u, f->up_b, d->cold, d->n_cold);
    d->down_b = pi_upload_vector(u, f->down_b, s->model->info.n_embd);
    d->cold_ids = pi_upload_ids(u, d->cold, d->n_cold);
    if (s->model->info.n_expert || !s->fired) return; /* of a mixture experts are counted */
    if (d->n_hot) d->fired_hot = pi_upload_reserve(u, sizeof *d->fired_hot * (size_t)d->n_hot);
    if (d->n_cold) d->fired_cold = pi_upload_reserve(u, sizeof *d->fired_cold * (size_t)d->n_cold);
}

/* ---- before x changes: the input, and who is wanted ---- */

/* Of n neurons from the first-th of hot or cold ones on. */
static te_scores scores_of(const pi_program *p, const pi_device_layer *w, const te_mat *fc2, const uint64_t *sign,
                           int32_t first, int32_t n) {
    const pi_model *m = p->h->s->model;
    if (!p->h->masked) return (te_scores){0};
    te_scores a = {.fc2 = *fc2,
                   .z = p->d->z,
                   .ldz = (size_t)fc2->cols,
                   .h = p->d->h,
                   .ldh = (size_t)m->info.n_embd,
                   .cols = m->info.n_embd,
                   .threshold = w->threshold};
    if (sign) a.sign = sign + (ptrdiff_t)first * m->sign_words;
    if (a.fc2.w) a.fc2.w = (const char *)a.fc2.w + a.fc2.stride * (size_t)first;
    a.fc2.n_rows = n;
    return a;
}

static bool asks_cpu(const pi_program_block *b) { return b->p->h->decode && b->w->n_cpu; }

/* Whether others than the FFN read its input, or x changes before the FFN does: then it is made once and kept. */
static bool keeps_input(const pi_program_block *b) { return b->p->h->masked || asks_cpu(b) || b->layer->parallel; }

/* All of the layer's neurons, whose gates are cut by what all of a token's are. */
static void run_cut(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_device_layer *w = b->w;
    const pi_model_info *i = &p->h->s->model->info;
    const size_t n_ff = (size_t)w->gate.n_rows;
    te_linear_args in = pi_program_from_x(p);
    in.norm = b->norm;
    in.n_products = 2;
    in.product[0] = (te_product){.w = w->gate, .y = p->d->cut_gates, .ldy = n_ff};
    in.product[1] = (te_product){.w = w->up, .y = p->d->cut_ups, .ldy = n_ff};
    p->ops->linear(p->dev, &in);
    const te_cut_args cut = {.gate = p->d->cut_gates,
                             .up = p->d->cut_ups,
                             .ld = n_ff,
                             .n_tok = p->n_tok,
                             .n = w->gate.n_rows,
                             .cut = b->block->ffn.cut,
                             .act = i->activation,
                             .threshold = i->activation_threshold,
                             .fired = w->fired_hot,
                             .counts = p->in.counts + 3 * (ptrdiff_t)b->l};
    p->ops->cut(p->dev, &cut);
    const te_linear_args out = {.x = p->d->cut_gates,
                                .ldx = n_ff,
                                .n_tok = p->n_tok,
                                .cols = w->gate.n_rows,
                                .product = {{.w = w->down_out, .y = p->d->y, .ldy = (size_t)i->n_embd}},
                                .n_products = 1};
    p->ops->linear(p->dev, &out);
    te_merge_args sum = pi_program_to_x(p, b->post_norm);
    sum.n_parts = 1;
    sum.partial = p->d->y;
    p->ops->merge(p->dev, &sum);
}

/* The FFN's input, kept and posted; the predictor's first layer; marks of the cold neurons. Reads x. */
static void prepare(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_hybrid *h = p->h;
    const pi_device_layer *w = b->w;
    if (!keeps_input(b) || b->block->ffn.cuts) return;
    te_linear_args a = pi_program_from_x(p);
    a.side.norm = b->norm;
    a.side.keep = p->d->h;
    a.side_type = b->block->ffn.up.type;
    if (asks_cpu(b)) {
        a.side.publish = p->d->published;
        a.side.ticket = pi_program_ticket(p, b->l, PI_COLD);
    }
    if (h->masked && w->fc1.w) {
        a.n_products = 1;
        a.product[0] = (te_product){.w = w->fc1, .y = p->d->z, .ldy = (size_t)w->fc1.n_rows, .relu = true};
    }
    p->ops->linear(p->dev, &a);
    pi_program_stamp(p, b->l, PI_MOMENT_PREDICT);
    if (!asks_cpu(b) || !h->masked) return;
    const te_marks_args m = {.scores = scores_of(p, w, &w->fc2_cold, w->sign_cold, 0, w->n_cpu),
                             .n_rows = w->n_cpu,
                             .n_tok = p->n_tok,
                             .publish = p->d->marks,
                             .ticket = pi_program_ticket(p, b->l, PI_COLD)};
    p->ops->marks(p->dev, &m);
    pi_program_stamp(p, b->l, PI_MOMENT_MARKS);
}

/* Layer l's predictor on the residual of the one before it, which changes little: a guess that the CPU fetches rows by,
 * made while the device would wait for the CPU. A single token's z leaves room behind it. */
static void look_ahead(const pi_program *p, int32_t l) {
    const pi_hybrid *h = p->h;
    if (l >= h->s->model->info.n_layer || !pi_hybrid_looks_ahead(h, l)) return;
    const pi_device_layer *w = &h->layer[l];
    float *z = p->d->z + (h->s->model->max_rank + 3) / 4 * 4;
    te_linear_args a = pi_program_from_x(p);
    a.n_products = 1;
    a.product[0] = (te_product){.w = w->fc1, .y = z, .ldy = (size_t)w->fc1.n_rows, .relu = true};
    p->ops->linear(p->dev, &a);
    te_marks_args m = {.scores = scores_of(p, w, &w->fc2_cold, NULL, 0, w->n_cpu),
                       .n_rows = w->n_cpu,
                       .n_tok = p->n_tok,
                       .publish = pi_hybrid_guess(h, l),
                       .ticket = pi_program_ticket(p, l, PI_COLD)};
    m.scores.z = z;
    p->ops->marks(p->dev, &m);
}

/* ---- neurons ---- */

static te_ffn_args ffn_args(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_model_info *i = &p->h->s->model->info;
    const bool kept = keeps_input(b);
    return (te_ffn_args){.x = kept ? p->d->h : p->d->x,
                         .ldx = (size_t)i->n_embd,
                         .n_tok = p->n_tok,
                         .norm = kept ? (te_norm){0} : b->norm,
                         .act = i->activation,
                         .threshold = i->activation_threshold,
                         .curve = b->block->ffn.curve,
                         .skip = p->h->skip,
                         .y = p->d->y,
                         .counts = p->in.counts + 3 * (ptrdiff_t)b->l};
}

/* One adapter, of n neurons from the first-th of hot or cold ones on. */
static te_adapter neuron_adapter(const pi_device_layer *w, int32_t which, bool cold, int32_t first, int32_t n) {
    const bool down = which == PI_ADAPT_DOWN;
    te_mat rows = cold ? w->adapter_cold[which] : down ? w->adapter_a[which] : w->adapter_b[which];
    if (!rows.w) return (te_adapter){0};
    rows.w = (const char *)rows.w + rows.stride * (size_t)first;
    rows.n_rows = n;
    return down ? (te_adapter){rows, w->adapter_b[which]} : (te_adapter){w->adapter_a[which], rows};
}

static void set_adapters(const pi_device_layer *w, bool cold, int32_t first, int32_t n, te_ffn_args *a) {
    a->gate_adapter = neuron_adapter(w, PI_ADAPT_GATE, cold, first, n);
    a->up_adapter = neuron_adapter(w, PI_ADAPT_UP, cold, first, n);
    a->down_adapter = neuron_adapter(w, PI_ADAPT_DOWN, cold, first, n);
}

static void run_hot(const pi_program_block *b, bool add) {
    const pi_program *p = b->p;
    const pi_device_layer *w = b->w;
    te_ffn_args a = ffn_args(b);
    a.gate = w->gate;
    a.up = w->up;
    a.down = w->down;
    a.down_out = w->down_out;
    a.up_bias = w->up_b;
    set_adapters(w, false, 0, w->n_hot, &a);
    a.scores = scores_of(p, w, &w->fc2_hot, w->sign_hot, 0, w->n_hot);
    a.fired = w->fired_hot;
    a.add = add;
    p->ops->ffn(p->dev, &a);
}

static char *stage_mat(const pi_program *p, const te_mat *from, const int32_t *ids, const int32_t *host_ids, int32_t n,
                       int32_t stage, bool columns, char *at, te_mat *out) {
    if (!from->w) return at;
    const int32_t cols = columns ? n : from->cols, rows = columns ? from->n_rows : n;
    *out = (te_mat){at, p->ops->stride(from->type, cols), from->type, cols, rows};
    const pi_device_load a = {
        .from = *from, .ids = ids, .host_ids = host_ids, .n = n, .columns = columns, .to = *out, .stage = stage};
    p->ops->load(p->dev, &a);
    const size_t n_bytes = out->stride * (size_t)rows;
    return at + (n_bytes + PI_DEVICE_ALIGN - 1) / PI_DEVICE_ALIGN * PI_DEVICE_ALIGN;
}

/* A long run's cold neurons, some at a time. */
static void run_loaded(const pi_program_block *b, bool first) {
    const pi_program *p = b->p;
    const pi_ffn *w = &b->block->ffn;
    const pi_device_layer *d = b->w;
    const int32_t most = pi_hybrid_staged(p->h, b->l, p->d->stage_bytes);
    int32_t turn = 0;
    for (int32_t c = 0; c < d->n_cold; c += most, turn++) {
        const int32_t n = d->n_cold - c < most ? d->n_cold - c : most, stage = turn % 2;
        te_ffn_args a = ffn_args(b);
        char *at = p->d->stage[stage];
        at = stage_mat(p, &w->gate, d->cold_ids + c, d->cold + c, n, stage, false, at, &a.gate);
        at = stage_mat(p, &w->up, d->cold_ids + c, d->cold + c, n, stage, false, at, &a.up);
        at = stage_mat(p, &w->down_t, d->cold_ids + c, d->cold + c, n, stage, false, at, &a.down);
        if (w->down.w) {
            const int32_t block = c / te_type_get(w->down.type)->block_weights;
            (void)stage_mat(p, &w->down, d->cold_block_ids + block, d->cold_blocks + block, n, stage, true, at,
                            &a.down_out);
        }
        if (d->up_b_cold) a.up_bias = d->up_b_cold + c;
        set_adapters(d, true, c, n, &a);
        a.scores = scores_of(p, d, &d->fc2_cold, d->sign_cold, c, n);
        if (d->fired_cold) a.fired = d->fired_cold + c;
        a.staged = true;
        a.stage = stage;
        a.add = !first;
        first = false;
        p->ops->ffn(p->dev, &a);
    }
}

/* Cold neurons whose rows the device reads where they lie, while the CPU computes the others. */
static void run_zero_copy(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_ffn *w = &b->block->ffn;
    const pi_device_layer *d = b->w;
    te_ffn_args a = ffn_args(b);
    a.gate = w->gate;
    a.up = w->up;
    a.down = w->down_t;
    a.list = d->cold_ids + d->n_cpu;
    a.n_list = d->n_cold - d->n_cpu;
    if (d->up_b_cold) a.up_bias = d->up_b_cold + d->n_cpu;
    a.scores = scores_of(p, d, &d->fc2_cold, d->sign_cold, d->n_cpu, a.n_list);
    if (d->fired_cold) a.fired = d->fired_cold + d->n_cpu;
    p->ops->ffn(p->dev, &a);
}

static void run(const pi_program_block *b) {
    const pi_program *p = b->p;
    const pi_hybrid *h = p->h;
    const pi_device_layer *w = b->w;
    const bool zero_copy = h->decode && w->n_cpu < w->n_cold;
    if (b->block->ffn.cuts) {
        run_cut(b);
        return;
    }
    look_ahead(p, b->l + 1);
    if (zero_copy) run_zero_copy(b);
    if (w->n_hot) run_hot(b, zero_copy);
    if (!h->decode && w->n_cold) run_loaded(b, !w->n_hot);
    te_merge_args sum = pi_program_to_x(p, b->post_norm);
    sum.n_parts = w->n_hot || zero_copy || !h->decode;
    sum.partial = sum.n_parts ? p->d->y : NULL;
    sum.bias = w->down_b;
    sum.scale = b->layer->scale ? *b->layer->scale : 0;
    sum.words = asks_cpu(b) ? p->d->answer : NULL;
    sum.ticket = pi_program_ticket(p, b->l, PI_COLD);
    pi_program_stamp(p, b->l, PI_MOMENT_HOT);
    p->ops->merge(p->dev, &sum);
    pi_program_stamp(p, b->l, PI_MOMENT_MERGE);
}

const pi_block_on_device pi_ffn_on_device = {send, NULL, prepare, run, PI_WANTED_TOKENS};
