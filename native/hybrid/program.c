/* program.c - the device's side of a hybrid step: the program of operations that a pi_device runs; the CPU's side,
 * and how the two meet, is in step.c. */
#include "../../vendor/core/te_types.h"
#include "hybrid.h"

typedef struct program {
    const pi_hybrid *h;
    const pi_device_state *d;
    pi_device *dev;
    const pi_device_ops *ops;
    pi_device_input in;
    int32_t n_tok;
} program;

static te_ticket ticket_of(const program *p, int32_t l, int32_t which) {
    return (te_ticket){p->d->ticket, pi_number(l, which)};
}

static te_linear_args from_x(const program *p) {
    const int32_t n = p->h->s->model->info.n_embd;
    return (te_linear_args){.x = p->d->x, .ldx = (size_t)n, .n_tok = p->n_tok, .cols = n};
}

static void stamp(const program *p, int32_t l, pi_moment which) {
    if (p->d->stamps) p->ops->stamp(p->dev, p->d->stamps + (ptrdiff_t)l * PI_MOMENT_INPUT + which);
}

static void publish_x(const program *p, int32_t l) {
    te_linear_args a = from_x(p);
    a.side.publish = p->d->published;
    a.side.ticket = ticket_of(p, l, PI_LEAVE);
    p->ops->linear(p->dev, &a);
}

static void take_x(const program *p, int32_t l) {
    const int32_t n = p->h->s->model->info.n_embd;
    const te_merge_args a = {.n_tok = p->n_tok,
                             .cols = n,
                             .y = p->d->x,
                             .ldy = (size_t)n,
                             .words = p->d->answer,
                             .ticket = ticket_of(p, l, PI_ENTER)};
    p->ops->merge(p->dev, &a);
}

/* y += w x, y being the result of another product; w.w NULL: nothing. */
static void add_product(const program *p, const float *x, const te_mat *w, int32_t n_tok, const te_product *to) {
    const te_linear_args a = {.x = x,
                              .ldx = (size_t)w->cols,
                              .n_tok = n_tok,
                              .cols = w->cols,
                              .product = {{.w = *w, .y = to->y, .ldy = to->ldy, .add = to->y, .ld_add = to->ldy}},
                              .n_products = 1};
    if (w->w) p->ops->linear(p->dev, &a);
}

/* The adapters' parts of the products op, of matrices from `which` on, are added to what the products gave. */
static void adapt(const program *p, int32_t l, int32_t which, const te_linear_args *op) {
    const pi_device_layer *w = &p->h->layer[l];
    te_linear_args in = *op;
    in.n_products = 0;
    for (int32_t i = 0; i < op->n_products; i++) {
        const te_mat a = w->adapter_a[which + i];
        if (a.w) in.product[in.n_products++] = (te_product){.w = a, .y = p->d->adapt[i], .ldy = (size_t)a.n_rows};
    }
    if (!in.n_products) return;
    p->ops->linear(p->dev, &in);
    for (int32_t i = 0; i < op->n_products; i++)
        add_product(p, p->d->adapt[i], &w->adapter_b[which + i], op->n_tok, &op->product[i]);
}

/* What a block gives, on its way to x: a norm behind the block is of all of it. */
static te_merge_args to_x(const program *p, te_norm norm) {
    const int32_t n = p->h->s->model->info.n_embd;
    return (te_merge_args){.n_tok = p->n_tok,
                           .cols = n,
                           .add = p->d->x,
                           .ld_add = (size_t)n,
                           .y = p->d->x,
                           .ldy = (size_t)n,
                           .norm = norm,
                           .normed = p->d->y};
}

static te_rope_kind rope_of(pi_rope_kind kind) {
    return kind == PI_ROPE_NONE ? TE_NO_ROPE : kind == PI_ROPE_NORM ? TE_ROPE_NORM : TE_ROPE_NEOX;
}

static void attention(const program *p, int32_t l) {
    const pi_session *s = p->h->s;
    const pi_model *m = s->model;
    const pi_model_info *i = &m->info;
    const pi_device_layer *w = &p->h->layer[l];
    const pi_attention *shape = pi_attention_of(&m->layer[l]);
    const pi_rope *rope = pi_rope_of(m, shape);
    const size_t n_q = (size_t)i->n_head * (size_t)i->n_embd_head, n_kv = (size_t)i->n_head_kv * (size_t)i->n_embd_head;
    te_linear_args qkv = from_x(p);
    qkv.norm = w->attn_norm;
    qkv.n_products = 3;
    qkv.product[0] = (te_product){.w = w->q, .bias = w->q_b, .y = p->d->q, .ldy = n_q};
    qkv.product[1] = (te_product){.w = w->k, .bias = w->k_b, .y = p->d->k, .ldy = n_kv};
    qkv.product[2] = (te_product){.w = w->v, .bias = w->v_b, .y = p->d->v, .ldy = n_kv};
    p->ops->linear(p->dev, &qkv);
    adapt(p, l, PI_ADAPT_Q, &qkv);
    stamp(p, l, PI_MOMENT_QKV);
    const te_attention_args a = {.q = p->d->q,
                                 .k = p->d->k,
                                 .v = p->d->v,
                                 .ldq = n_q,
                                 .ldk = n_kv,
                                 .ldv = n_kv,
                                 .n_tok = p->n_tok,
                                 .n_head = i->n_head,
                                 .n_head_kv = i->n_head_kv,
                                 .n_embd_head = i->n_embd_head,
                                 .q_norm = w->q_norm,
                                 .k_norm = w->k_norm,
                                 .norm_eps = m->norm_eps,
                                 .scale = shape->scale,
                                 .rope = rope_of(rope ? rope->kind : PI_ROPE_NONE),
                                 .n_rot = rope ? rope->n_rot : 0,
                                 .cs = p->in.cs + (rope ? pi_rope_floats(m, shape->rope) * (size_t)p->n_tok : 0),
                                 .pos = p->in.pos,
                                 .table = p->in.table,
                                 .row = p->in.first,
                                 .ld_table = p->h->ld_table,
                                 .k_pool = w->pool_k,
                                 .v_pool = w->pool_v,
                                 .type_k = s->kv.type_k,
                                 .type_v = s->kv.type_v,
                                 .n_ctx = s->options.n_ctx,
                                 .out = p->d->att,
                                 .ld_out = n_q,
                                 .window = shape->window,
                                 .grouped = p->h->grouped};
    p->ops->attention(p->dev, &a);
    stamp(p, l, PI_MOMENT_ATTENTION);
    const bool normed = w->attn_post_norm.kind != TE_NO_NORM;
    te_linear_args out = {.x = p->d->att, .ldx = n_q, .n_tok = p->n_tok, .cols = (int32_t)n_q, .n_products = 1};
    out.product[0] = (te_product){.w = w->o,
                                  .bias = w->o_b,
                                  .add = normed ? NULL : p->d->x,
                                  .ld_add = (size_t)i->n_embd,
                                  .y = normed ? p->d->y : p->d->x,
                                  .ldy = (size_t)i->n_embd};
    p->ops->linear(p->dev, &out);
    adapt(p, l, PI_ADAPT_O, &out);
    if (normed) {
        te_merge_args sum = to_x(p, w->attn_post_norm);
        sum.partial = p->d->y;
        sum.n_parts = 1;
        p->ops->merge(p->dev, &sum);
    }
    stamp(p, l, PI_MOMENT_OUTPUT);
}

/* Of n neurons from the first-th of hot or cold ones on. */
static te_scores scores_of(const program *p, int32_t l, const te_mat *fc2, const uint64_t *sign, int32_t first,
                           int32_t n) {
    const pi_hybrid *h = p->h;
    const pi_model *m = h->s->model;
    if (!h->masked) return (te_scores){0};
    te_scores a = {.fc2 = *fc2,
                   .z = p->d->z,
                   .ldz = (size_t)fc2->cols,
                   .h = p->d->h,
                   .ldh = (size_t)m->info.n_embd,
                   .cols = m->info.n_embd,
                   .threshold = h->layer[l].threshold};
    if (sign) a.sign = sign + (ptrdiff_t)first * m->sign_words;
    if (a.fc2.w) a.fc2.w = (const char *)a.fc2.w + a.fc2.stride * (size_t)first;
    a.fc2.n_rows = n;
    return a;
}

static bool asks_cpu(const program *p, int32_t l) { return p->h->decode && p->h->layer[l].n_cpu; }

/* Whether others than the FFN read its input, or x changes before the FFN does: then it is made once and kept. */
static bool keeps_input(const program *p, int32_t l) {
    return p->h->masked || asks_cpu(p, l) || p->h->s->model->arch->parallel;
}

/* The FFN's input, kept and posted; the predictor's first layer; marks of the cold neurons. Reads x. */
static void predict(const program *p, int32_t l) {
    const pi_hybrid *h = p->h;
    const pi_device_layer *w = &h->layer[l];
    if (!keeps_input(p, l)) return;
    te_linear_args a = from_x(p);
    a.side.norm = p->h->layer[l].ffn_norm;
    a.side.keep = p->d->h;
    a.side_type = pi_ffn_of(&h->s->model->layer[l])->up.type;
    if (asks_cpu(p, l)) {
        a.side.publish = p->d->published;
        a.side.ticket = ticket_of(p, l, PI_COLD);
    }
    if (h->masked && w->fc1.w) {
        a.n_products = 1;
        a.product[0] = (te_product){.w = w->fc1, .y = p->d->z, .ldy = (size_t)w->fc1.n_rows, .relu = true};
    }
    p->ops->linear(p->dev, &a);
    stamp(p, l, PI_MOMENT_PREDICT);
    if (!asks_cpu(p, l) || !h->masked) return;
    const te_marks_args m = {.scores = scores_of(p, l, &w->fc2_cold, w->sign_cold, 0, w->n_cpu),
                             .n_rows = w->n_cpu,
                             .n_tok = p->n_tok,
                             .publish = p->d->marks,
                             .ticket = ticket_of(p, l, PI_COLD)};
    p->ops->marks(p->dev, &m);
    stamp(p, l, PI_MOMENT_MARKS);
}

/* The next layer's predictor on this one's residual, which changes little: a guess that the CPU fetches rows by, made while
 * the device would wait for the CPU. A single token's z leaves room behind it. */
static void look_ahead(const program *p, int32_t l) {
    const pi_hybrid *h = p->h;
    if (l >= h->s->model->info.n_layer || !pi_hybrid_looks_ahead(h, l)) return;
    const pi_device_layer *w = &h->layer[l];
    float *z = p->d->z + (h->s->model->max_rank + 3) / 4 * 4;
    te_linear_args a = from_x(p);
    a.n_products = 1;
    a.product[0] = (te_product){.w = w->fc1, .y = z, .ldy = (size_t)w->fc1.n_rows, .relu = true};
    p->ops->linear(p->dev, &a);
    te_marks_args m = {.scores = scores_of(p, l, &w->fc2_cold, NULL, 0, w->n_cpu),
                       .n_rows = w->n_cpu,
                       .n_tok = p->n_tok,
                       .publish = pi_hybrid_guess(h, l),
                       .ticket = ticket_of(p, l, PI_COLD)};
    m.scores.z = z;
    p->ops->marks(p->dev, &m);
}

static te_ffn_args ffn_args(const program *p, int32_t l) {
    const pi_hybrid *h = p->h;
    const pi_model_info *i = &h->s->model->info;
    const bool kept = keeps_input(p, l);
    return (te_ffn_args){.x = kept ? p->d->h : p->d->x,
                         .ldx = (size_t)i->n_embd,
                         .n_tok = p->n_tok,
                         .norm = kept ? (te_norm){0} : p->h->layer[l].ffn_norm,
                         .act = i->activation,
                         .threshold = i->activation_threshold,
                         .skip = h->skip,
                         .y = p->d->y,
                         .counts = p->in.counts + 3 * (ptrdiff_t)l};
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

static void set_adapters(const program *p, int32_t l, bool cold, int32_t first, int32_t n, te_ffn_args *a) {
    const pi_device_layer *w = &p->h->layer[l];
    a->gate_adapter = neuron_adapter(w, PI_ADAPT_GATE, cold, first, n);
    a->up_adapter = neuron_adapter(w, PI_ADAPT_UP, cold, first, n);
    a->down_adapter = neuron_adapter(w, PI_ADAPT_DOWN, cold, first, n);
}

static char *stage_mat(const program *p, const te_mat *from, const int32_t *ids, const int32_t *host_ids, int32_t n,
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
static void load_cold(const program *p, int32_t l, bool first) {
    const pi_ffn *w = pi_ffn_of(&p->h->s->model->layer[l]);
    const pi_device_layer *d = &p->h->layer[l];
    const int32_t most = pi_hybrid_staged(p->h, l, p->d->stage_bytes);
    int32_t turn = 0;
    for (int32_t c = 0; c < d->n_cold; c += most, turn++) {
        const int32_t n = d->n_cold - c < most ? d->n_cold - c : most, stage = turn % 2;
        te_ffn_args a = ffn_args(p, l);
        char *at = p->d->stage[stage];
        at = stage_mat(p, &w->gate, d->cold_ids + c, d->cold + c, n, stage, false, at, &a.gate);
        at = stage_mat(p, &w->up, d->cold_ids + c, d->cold + c, n, stage, false, at, &a.up);
        at = stage_mat(p, &w->down_t, d->cold_ids + c, d->cold + c, n, stage, false, at, &a.down);
        if (w->down.w) {
            const int32_t b = c / te_type_get(w->down.type)->block_weights;
            (void)stage_mat(p, &w->down, d->cold_block_ids + b, d->cold_blocks + b, n, stage, true, at, &a.down_out);
        }
        if (d->up_b_cold) a.up_bias = d->up_b_cold + c;
        set_adapters(p, l, true, c, n, &a);
        a.scores = scores_of(p, l, &d->fc2_cold, d->sign_cold, c, n);
        if (d->fired_cold) a.fired = d->fired_cold + c;
        a.staged = true;
        a.stage = stage;
        a.add = !first;
        first = false;
        p->ops->ffn(p->dev, &a);
    }
}

/* Cold neurons whose rows the device reads where they lie, while the CPU computes the others. */
static void read_by_zero_copy(const program *p, int32_t l) {
    const pi_ffn *w = pi_ffn_of(&p->h->s->model->layer[l]);
    const pi_device_layer *d = &p->h->layer[l];
    te_ffn_args a = ffn_args(p, l);
    a.gate = w->gate;
    a.up = w->up;
    a.down = w->down_t;
    a.list = d->cold_ids + d->n_cpu;
    a.n_list = d->n_cold - d->n_cpu;
    if (d->up_b_cold) a.up_bias = d->up_b_cold + d->n_cpu;
    a.scores = scores_of(p, l, &d->fc2_cold, d->sign_cold, d->n_cpu, a.n_list);
    if (d->fired_cold) a.fired = d->fired_cold + d->n_cpu;
    p->ops->ffn(p->dev, &a);
}

static void ffn(const program *p, int32_t l) {
    const pi_hybrid *h = p->h;
    const pi_device_layer *w = &h->layer[l];
    const bool zero_copy = h->decode && w->n_cpu < w->n_cold;
    if (zero_copy) read_by_zero_copy(p, l);
    if (w->n_hot) {
        te_ffn_args a = ffn_args(p, l);
        a.gate = w->gate;
        a.up = w->up;
        a.down = w->down;
        a.down_out = w->down_out;
        a.up_bias = w->up_b;
        set_adapters(p, l, false, 0, w->n_hot, &a);
        a.scores = scores_of(p, l, &w->fc2_hot, w->sign_hot, 0, w->n_hot);
        a.fired = w->fired_hot;
        a.add = zero_copy;
        p->ops->ffn(p->dev, &a);
    }
    if (!h->decode && w->n_cold) load_cold(p, l, !w->n_hot);
    te_merge_args sum = to_x(p, w->ffn_post_norm);
    sum.n_parts = w->n_hot || zero_copy || !h->decode;
    sum.partial = sum.n_parts ? p->d->y : NULL;
    sum.bias = w->down_b;
    sum.words = asks_cpu(p, l) ? p->d->answer : NULL;
    sum.ticket = ticket_of(p, l, PI_COLD);
    stamp(p, l, PI_MOMENT_HOT);
    p->ops->merge(p->dev, &sum);
    stamp(p, l, PI_MOMENT_MERGE);
}

static void adapt_head(const program *p, const te_linear_args *op) {
    const te_mat a = p->d->output_a;
    if (!a.w) return;
    te_linear_args in = *op;
    in.side = (te_side){0};
    in.product[0] = (te_product){.w = a, .y = p->d->adapt[0], .ldy = (size_t)a.n_rows};
    p->ops->linear(p->dev, &in);
    add_product(p, p->d->adapt[0], &p->d->output_b, op->n_tok, &op->product[0]);
}

static void head(const program *p) {
    const pi_model_info *i = &p->h->s->model->info;
    const int32_t first = p->n_tok - p->h->n_logits;
    if (!p->h->n_logits) return;
    te_linear_args a = from_x(p);
    a.x += (size_t)first * (size_t)i->n_embd;
    a.n_tok = p->h->n_logits;
    a.norm = p->d->output_norm;
    a.n_products = 1;
    /* Single values are slow to leave the device: they are made there, where y has room, and copied at once. */
    const size_t n = (size_t)a.n_tok * (size_t)i->n_vocab, room = (size_t)p->h->s->options.n_batch * (size_t)i->n_embd;
    float *y = n <= room ? p->d->y : p->d->logits;
    a.product[0] = (te_product){.w = p->d->output, .y = y, .ldy = (size_t)i->n_vocab};
    a.side.norm = p->d->output_norm;
    a.side.keep = p->d->hidden;
    p->ops->linear(p->dev, &a);
    adapt_head(p, &a);
    if (y != p->d->logits) p->ops->end(p->dev, p->d->logits, y, sizeof *y * n);
}

void pi_hybrid_program(void *ctx, pi_device *dev) {
    const pi_device_part *part = ctx;
    const pi_hybrid *h = part->h;
    const pi_device_state *d = &h->device[part->device];
    const pi_model *m = h->s->model;
    const program p = {
        .h = h, .d = d, .dev = dev, .ops = dev->ops, .in = pi_hybrid_input(h, h->n_tok, d->input), .n_tok = h->n_tok};
    const int32_t n = m->info.n_layer;
    const size_t skipped = h->layer[0].device == part->device ? 0 : (size_t)((char *)p.in.pos - (char *)d->input);
    p.ops->begin(dev, (char *)d->input + skipped, (const char *)d->shared_input + skipped,
                 pi_hybrid_input_bytes(h, h->n_tok) - skipped, d->ticket, pi_numbers(n));
    for (int32_t l = 0; l < n; l++) {
        if (h->layer[l].device != part->device) continue;
        if (l > 0 && h->layer[l - 1].device != part->device) take_x(&p, l);
        if (m->arch->parallel) predict(&p, l);
        attention(&p, l);
        if (!m->arch->parallel) predict(&p, l);
        look_ahead(&p, l + 1);
        ffn(&p, l);
        const int32_t next = l + 1 < n ? h->layer[l + 1].device : h->head_device;
        if (next != part->device && (l + 1 < n || h->n_logits)) publish_x(&p, l);
    }
    p.ops->end(dev, d->counts, p.in.counts, sizeof *d->counts * 3 * (size_t)n);
    if (h->head_device != part->device) return;
    if (h->layer[n - 1].device != part->device && h->n_logits) take_x(&p, n);
    head(&p);
}
