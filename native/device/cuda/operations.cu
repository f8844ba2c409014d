/* operations.cu - what programs are made of, in terms of vendor/cuda: a few tokens by the kernels for decoding, more of
 * them by the operations for prompts (prompt.cu). */
#include <cmath>

#include "cuda.cuh"
#include "kernels.cuh"

namespace pi {
namespace {

/* A wait for the CPU ends after this time if nothing else was said. */
constexpr uint64_t usual_wait_ns = 60000000000;

} // namespace

te_cuda_norm norm_of(const pi_dev_norm &n) {
    te_cuda_norm r = {};
    r.kind = !n.w ? TE_CUDA_NO_NORM : n.layer ? TE_CUDA_LAYER_NORM : TE_CUDA_RMS_NORM;
    r.eps = n.eps;
    r.w = n.w;
    r.b = n.b;
    return r;
}

void *room(Cuda *c, Room r, size_t n_bytes) {
    if (n_bytes > c->need[r]) c->need[r] = n_bytes;
    return c->room[r];
}

void op_begin(pi_device *dev, void *to, const void *from, size_t n_bytes, uint32_t *seq, uint32_t seq_step) {
    Cuda *c = of(dev);
    c->sum = {};
    c->settled = false;
    c->kept = nullptr;
    if (ready(c)) note(c, begin(c->d, to, from, n_bytes, seq, seq_step));
}

void op_end(pi_device *dev, void *to, const void *from, size_t n_bytes) {
    Cuda *c = of(dev);
    if (ready(c)) note(c, begin(c->d, to, from, n_bytes, nullptr, 0));
}

void products_of(const pi_dev_linear *a, int32_t t, te_cuda_product *product) {
    for (int32_t i = 0; i < a->n_out; i++) {
        const te_linear &o = a->out[i];
        te_cuda_product &p = product[i];
        p.w = o.w;
        p.bias = o.bias;
        p.y = o.y + o.ldy * (size_t)t;
        p.ldy = o.ldy;
        p.relu = a->relu;
        p.add = o.add ? p.y : nullptr;
        p.ld_add = o.ldy;
    }
}

namespace {

te_cuda_seq seq_of(const pi_dev_seq &s) { return {s.base, s.add}; }

/* The input of several tokens is made for the kernels once where that is faster than in each block: the blocks' way takes
 * as long as there are tokens and columns. */
bool is_prepared(int32_t n_tok, int32_t cols) { return n_tok > 4 && cols >= 2048; }

te_cuda_prepared prepare(Cuda *c, const float *x, size_t ldx, int32_t n_tok, int32_t cols, const te_cuda_norm &norm,
                         int32_t type) {
    const size_t n_bytes = is_prepared(n_tok, cols) ? c->te->prepared_bytes(type, cols) : 0;
    if (!n_bytes) return {};
    te_cuda_prepare op = {};
    op.x = x;
    op.ldx = ldx;
    op.n_tok = n_tok;
    op.cols = cols;
    op.norm = norm;
    op.type = type;
    op.v = room(c, PREPARED, n_bytes);
    if (ready(c)) note(c, c->te->prepare(c->d, &op));
    return {op.v, type};
}

/* Of several tokens the side of a product is made in front of it, with the inputs of what follows: blocks of the product
 * would do that token by token. */
te_cuda_prepared prepare_with_side(Cuda *c, const te_cuda_linear *l, int32_t cols, int32_t type, int32_t side_type) {
    te_cuda_prepare op = {};
    op.x = l->x;
    op.ldx = l->ldx;
    op.n_tok = l->n_tok;
    op.cols = cols;
    op.norm = l->norm;
    op.side = l->side;
    const bool wide = is_prepared(l->n_tok, cols);
    const size_t n_bytes = l->n_products && wide ? c->te->prepared_bytes(type, cols) : 0,
                 n_side = l->side.keep && wide ? c->te->prepared_bytes(side_type, cols) : 0;
    op.type = type;
    if (n_bytes) op.v = room(c, PREPARED, n_bytes);
    op.side_type = side_type;
    if (n_side) op.side_v = room(c, PREPARED_SIDE, n_side);
    c->kept = n_side ? l->side.keep : nullptr;
    c->kept_form = {op.side_v, side_type};
    if (ready(c)) note(c, c->te->prepare(c->d, &op));
    return {op.v, type};
}

void few_linear(Cuda *c, const pi_dev_linear *a, int32_t t, int32_t n) {
    te_cuda_linear op = {};
    op.x = a->x + a->ldx * (size_t)t;
    op.ldx = a->ldx;
    op.n_tok = n;
    op.cols = a->cols;
    op.norm = norm_of(a->norm);
    op.n_products = a->n_out;
    products_of(a, t, op.product);
    const int32_t type = a->n_out ? a->out[0].w.type : -1;
    if (a->side.wanted) {
        const size_t at = (size_t)a->cols * (size_t)t;
        op.side.norm = norm_of(a->side.norm);
        op.side.keep = a->side.keep ? a->side.keep + at : nullptr;
        op.side.post = a->side.post ? a->side.post + at : nullptr;
        op.side.seq = seq_of(a->side.seq);
    }
    c->kept = nullptr;
    if (a->side.wanted && n > 1) {
        op.prepared = prepare_with_side(c, &op, a->cols, type, a->side.type);
        op.side = {};
        if (!a->n_out) return;
    } else if (a->n_out) {
        op.prepared = prepare(c, op.x, op.ldx, n, a->cols, op.norm, type);
    }
    if (ready(c)) note(c, c->te->linear(c->d, &op));
}

} // namespace

namespace {

/* What decides which neurons are computed (the one product with relu) is not rounded to F16, so that a prompt's marks are
 * those of decoding. Products for prompts store four values at once. */
bool is_for_many(const pi_dev_linear *a) {
    if (a->n_tok <= TE_CUDA_MAX_TOK || a->relu) return false;
    for (int32_t i = 0; i < a->n_out; i++)
        if (a->out[i].ldy % 4) return false;
    return true;
}

} // namespace

void op_linear(pi_device *dev, const pi_dev_linear *a) {
    Cuda *c = of(dev);
    if (idle(c)) return;
    if (is_for_many(a)) return many_linear(c, a);
    pieces(a->n_tok, [&](int32_t t, int32_t n) { few_linear(c, a, t, n); });
}

void attention_of(const pi_dev_attention *a, int32_t t, int32_t n, te_cuda_attention *op) {
    const size_t n_q = (size_t)a->n_head * (size_t)a->n_embd_head, n_kv = (size_t)a->n_head_kv * (size_t)a->n_embd_head;
    *op = {};
    op->q = a->q + n_q * (size_t)t;
    op->k = a->k + n_kv * (size_t)t;
    op->v = a->v + n_kv * (size_t)t;
    op->ldq = n_q;
    op->ldk = op->ldv = n_kv;
    op->n_tok = n;
    op->n_head = a->n_head;
    op->n_head_kv = a->n_head_kv;
    op->n_embd_head = a->n_embd_head;
    op->q_norm = a->q_norm;
    op->k_norm = a->k_norm;
    op->norm_eps = a->eps;
    op->scale = 1.0f / sqrtf((float)a->n_embd_head);
    op->rope = (te_cuda_rope_kind)a->rope;
    op->n_rot = a->n_rot;
    op->cs = a->cs + (size_t)a->n_rot * (size_t)t;
    op->pos = a->pos + t;
    op->table = a->table;
    op->seq = a->first + t;
    op->ld_table = a->ld_table;
    op->k_pool = a->pool_k;
    op->v_pool = a->pool_v;
    op->type_k = a->type_k;
    op->type_v = a->type_v;
    op->n_ctx = a->n_ctx;
    op->out = a->att + n_q * (size_t)t;
    op->ld_out = n_q;
}

void op_attention(pi_device *dev, const pi_dev_attention *a) {
    Cuda *c = of(dev);
    if (idle(c)) return;
    if (a->n_tok > TE_CUDA_MAX_TOK && a->grouped) return many_attention(c, a);
    /* The step's first attention starts when all before it has ended, the copy of the step's inputs, too; the others may
     * read those, and K and V of earlier steps, before the operation in front has ended. */
    const bool early = c->settled && a->n_tok <= TE_CUDA_MAX_TOK;
    pieces(a->n_tok, [&](int32_t t, int32_t n) {
        te_cuda_attention op;
        attention_of(a, t, n, &op);
        op.scratch = (float *)room(c, SCRATCH, sizeof(float) * c->te->attention_floats(c->d, &op));
        op.counter = (uint32_t *)room(c, COUNTERS, sizeof(uint32_t) * c->te->attention_counters(c->d, &op));
        op.early = early;
        if (!ready(c)) return;
        if (!c->settled) c->te->set_overlap(c->d, 0);
        note(c, c->te->attention(c->d, &op));
        if (!c->settled) c->te->set_overlap(c->d, 1);
        c->settled = true;
    });
}

namespace {

te_cuda_scores scores_of(const pi_dev_scores &a) {
    te_cuda_scores s = {};
    s.fc2 = a.fc2;
    s.z = a.z;
    s.ldz = (size_t)a.fc2.cols;
    s.sign = a.sign;
    s.h = a.h;
    s.ldh = (size_t)a.cols;
    s.cols = a.cols;
    s.threshold = a.threshold;
    return s;
}

} // namespace

void op_marks(pi_device *dev, const pi_dev_marks *a) {
    Cuda *c = of(dev);
    if (!ready(c)) return;
    te_cuda_marks op = {};
    op.scores = scores_of(a->scores);
    op.n_rows = a->scores.fc2.w ? a->scores.fc2.n_rows : a->scores.n_rows;
    op.n_tok = a->n_tok;
    op.post = a->post;
    op.seq = seq_of(a->seq);
    note(c, c->te->marks(c->d, &op));
}

namespace {

void few_ffn(Cuda *c, const pi_dev_ffn *a) {
    const int32_t n = a->list ? a->n_list : a->up.n_rows, n_embd = a->up.cols;
    const bool scored = a->scores.fc2.w || a->scores.sign;
    te_cuda_ffn op = {};
    op.x = a->x;
    op.ldx = (size_t)n_embd;
    op.n_tok = a->n_tok;
    op.norm = norm_of(a->norm);
    op.gate = a->gate;
    op.up = a->up;
    op.down = a->down;
    if (a->list) {
        for (te_mat *m : {&op.gate, &op.up, &op.down}) m->w = mapped(c, m->w);
        op.list = a->list;
        op.n_list = a->n_list;
        op.far = op.first = 1;
    }
    op.beside = a->add && c->sum.far;
    if (c->kept == a->x)
        op.prepared = c->kept_form;
    else
        op.prepared = op.beside ? c->sum.prepared : prepare(c, op.x, op.ldx, op.n_tok, n_embd, op.norm, a->up.type);
    op.up_bias = a->up_bias;
    op.act = (te_activation)a->act;
    op.threshold = a->act_threshold;
    op.skip = a->skip;
    if (scored) op.scores = scores_of(a->scores);
    op.counts = a->counts;
    op.fired = a->fired;
    op.ldh = (size_t)(n + 3) / 4 * 4;
    op.h = (float *)room(c, HIDDEN, sizeof(float) * op.ldh * (size_t)a->n_tok);
    if (scored) op.bits = (uint32_t *)room(c, BITS, sizeof(uint32_t) * (size_t)a->n_tok * (size_t)((n + 31) / 32));
    if (is_adapted(a)) adapt_products(c, a, &op);
    const int32_t n_parts = c->te->ffn_parts(c->d, &op), own = n_parts ? n_parts : 1,
                  adapted = a->down_adapter.a.w ? 1 : 0;
    const size_t part = (size_t)a->n_tok * (size_t)n_embd;
    /* Sums stay in parts, behind those of the same layer that are there, until merge adds them up. */
    const int32_t before = a->add ? c->sum.n_parts : 0;
    op.partial =
        (float *)room(c, PARTIAL, sizeof(float) * (size_t)(before + own + adapted) * part) + (size_t)before * part;
    c->sum = {a->y, before + own + adapted, a->list != nullptr, op.prepared};
    if (ready(c)) note(c, c->te->ffn(c->d, &op));
    if (adapted) adapt_sum(c, a, &op, op.partial + (size_t)own * part);
    if (n_parts) return;
    te_cuda_linear out = {};
    out.x = op.h;
    out.ldx = op.ldh;
    out.n_tok = a->n_tok;
    out.n_products = 1;
    out.product[0].w = a->down_out;
    out.product[0].y = op.partial;
    out.product[0].ldy = (size_t)n_embd;
    out.prepared = prepare(c, out.x, out.ldx, out.n_tok, n, {}, a->down_out.type);
    if (ready(c)) note(c, c->te->linear(c->d, &out));
}

} // namespace

void op_ffn(pi_device *dev, const pi_dev_ffn *a) {
    Cuda *c = of(dev);
    if (idle(c)) return;
    if (a->n_tok > TE_CUDA_MAX_TOK) return many_ffn(c, a);
    /* Kernels read weights before their predecessor has ended, unless loads wrote them. */
    if (a->staged && ready(c)) {
        c->te->set_overlap(c->d, 0);
        note(c, c->te->load_ready(c->d, a->stage));
    }
    few_ffn(c, a);
    if (a->staged && ready(c)) {
        note(c, c->te->load_free(c->d, a->stage));
        c->te->set_overlap(c->d, 1);
    }
}

void op_merge(pi_device *dev, const pi_dev_merge *a) {
    Cuda *c = of(dev);
    if (!ready(c)) return;
    te_cuda_merge op = {};
    if (a->y && c->sum.y == a->y) {
        op.partial = (float *)c->room[PARTIAL];
        op.n_parts = c->sum.n_parts;
    } else if (a->y) {
        op.partial = a->y;
        op.n_parts = 1;
    }
    op.n_tok = a->n_tok;
    op.cols = a->n_embd;
    op.add = a->replace ? nullptr : a->x;
    op.ld_add = op.ldy = (size_t)a->n_embd;
    op.bias = a->bias;
    op.y = a->x;
    op.words = a->words;
    op.seq = seq_of(a->seq);
    op.cancelled = dev->cancelled;
    op.limit_ns = dev->wait_ns ? (uint64_t)dev->wait_ns : usual_wait_ns;
    note(c, c->te->merge(c->d, &op));
    c->sum = {};
}

void op_load(pi_device *dev, const pi_dev_load *a) {
    Cuda *c = of(dev);
    const void *src = mapped(c, a->from.w);
    if (c->mode == MEASURE && !src) return note(c, reserve_copiers(c));
    if (!ready(c)) return;
    if (!src) return note(c, load_by_ring(c, a));
    te_cuda_pack op = {};
    op.dst = a->to;
    op.src = src;
    op.src_stride = a->from.stride;
    op.rows = a->columns ? nullptr : a->ids;
    op.blocks = a->columns ? a->ids : nullptr;
    note(c, c->te->load(c->d, a->stage, &op));
}

void op_stamp(pi_device *dev, uint64_t *at) {
    Cuda *c = of(dev);
    if (ready(c)) note(c, stamp(c->d, at));
}

} // namespace pi
