/* operations.cu - what programs are made of, in terms of vendor/cuda: a few tokens by the kernels for decoding, more of
 * them by the operations for prompts (prompt.cu), whose tokens may also be one of each of many sequences. */
#include "cuda.cuh"
#include "kernels.cuh"

namespace pi {
namespace {

/* A wait for the CPU ends after this time if nothing else was said. */
constexpr uint64_t usual_wait_ns = 60000000000;

} // namespace

void *room(Cuda *c, Room r, size_t n_bytes) {
    if (n_bytes > c->need[r]) c->need[r] = n_bytes;
    return c->room[r];
}

void op_begin(pi_device *dev, void *to, const void *from, size_t n_bytes, uint32_t *ticket, uint32_t tickets) {
    Cuda *c = of(dev);
    c->sum = {};
    c->settled = false;
    c->kept = nullptr;
    c->half_x = nullptr;
    c->attended = false;
    c->last = {};
    c->last_rows = {};
    if (ready(c)) note(c, begin(c->d, to, from, n_bytes, ticket, tickets));
    if (ready(c)) note(c, c->te->load_after(c->d)); /* among the inputs are lists of what is loaded */
}

void op_end(pi_device *dev, void *to, const void *from, size_t n_bytes) {
    Cuda *c = of(dev);
    run_last_rows(c);
    if (ready(c)) note(c, begin(c->d, to, from, n_bytes, nullptr, 0));
}

namespace {

/* The input of several tokens is made for the kernels once where that is faster than in each block: the blocks' way takes
 * as long as there are tokens and columns, and longer where they make integers of it. */
bool is_prepared(int32_t n_tok, int32_t cols, int32_t type) {
    const te_type_info *info = te_type_get(type);
    return n_tok > (info && info->block_weights > 1 ? 2 : 4) && cols >= 2048;
}

te_prepared prepare(Cuda *c, const float *x, size_t ldx, int32_t n_tok, int32_t cols, const te_norm &norm,
                    int32_t type) {
    const size_t n_bytes = is_prepared(n_tok, cols, type) ? c->te->prepared_bytes(type, cols) : 0;
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
te_prepared prepare_with_side(Cuda *c, const te_linear_args *l, int32_t cols, int32_t type, int32_t side_type) {
    te_cuda_prepare op = {};
    op.x = l->x;
    op.ldx = l->ldx;
    op.n_tok = l->n_tok;
    op.cols = cols;
    op.norm = l->norm;
    op.side = l->side;
    const size_t n_bytes = l->n_products && is_prepared(l->n_tok, cols, type) ? c->te->prepared_bytes(type, cols) : 0,
                 n_side = l->side.keep && is_prepared(l->n_tok, cols, side_type)
                              ? c->te->prepared_bytes(side_type, cols)
                              : 0;
    op.type = type;
    if (n_bytes) op.v = room(c, PREPARED, n_bytes);
    op.side_type = side_type;
    if (n_side) op.side_v = room(c, PREPARED_SIDE, n_side);
    c->kept = n_side ? l->side.keep : nullptr;
    c->kept_form = {op.side_v, side_type};
    if (ready(c)) note(c, c->te->prepare(c->d, &op));
    return {op.v, type};
}

bool has_side(const te_linear_args *a) { return a->side.keep || a->side.publish; }

} // namespace

te_linear_args some_tokens(const te_linear_args *a, int32_t t, int32_t n) {
    te_linear_args b = *a;
    const size_t at = (size_t)a->cols * (size_t)t;
    b.x += a->ldx * (size_t)t;
    b.n_tok = n;
    for (int32_t i = 0; i < a->n_products; i++) {
        te_product &p = b.product[i];
        p.y += p.ldy * (size_t)t;
        if (p.add) p.add += p.ld_add * (size_t)t;
    }
    if (b.side.keep) b.side.keep += at;
    if (b.side.publish) b.side.publish += at;
    return b;
}

namespace {

void decode_linear(Cuda *c, te_linear_args op) {
    const int32_t type = op.n_products ? op.product[0].w.type : -1;
    c->kept = nullptr;
    if (has_side(&op) && op.n_tok > 1) {
        op.prepared = prepare_with_side(c, &op, op.cols, type, op.side_type);
        op.side = {};
        if (!op.n_products) return;
    } else if (op.n_products) {
        op.prepared = prepare(c, op.x, op.ldx, op.n_tok, op.cols, op.norm, type);
    }
    if (ready(c)) note(c, c->te->linear(c->d, &op));
}

/* What decides which neurons are computed (the one product with relu) is not rounded to F16, so that a prompt's marks are
 * those of decoding. Products for prompts store four values at once. */
bool is_prefill(const te_linear_args *a) {
    if (a->n_tok <= TE_CUDA_MAX_TOK) return false;
    for (int32_t i = 0; i < a->n_products; i++)
        if (a->product[i].relu || a->product[i].ldy % 4) return false;
    return true;
}

} // namespace

void op_linear(pi_device *dev, const te_linear_args *a) {
    Cuda *c = of(dev);
    run_last_rows(c);
    if (idle(c)) return;
    if (a->side.keep) c->half_x = nullptr; /* it may be what is kept anew */
    if (is_prefill(a)) return prefill_linear(c, a);
    pieces(a->n_tok, [&](int32_t t, int32_t n) { decode_linear(c, some_tokens(a, t, n)); });
}

namespace {

te_attention_args some_tokens(const te_attention_args *a, int32_t t, int32_t n) {
    te_attention_args b = *a;
    b.q += a->ldq * (size_t)t;
    b.k += a->ldk * (size_t)t;
    b.v += a->ldv * (size_t)t;
    b.n_tok = n;
    b.cs += (size_t)a->n_rot * (size_t)t;
    b.pos += t;
    b.row += t;
    b.out += a->ld_out * (size_t)t;
    return b;
}

void decode_attention(Cuda *c, te_attention_args op) {
    op.scratch = (float *)room(c, SCRATCH, sizeof(float) * c->te->attention_floats(c->d, &op));
    op.counter = (uint32_t *)room(c, COUNTERS, sizeof(uint32_t) * c->te->attention_counters(c->d, &op));
    if (ready(c)) note(c, c->te->attention(c->d, &op));
}

/* Prompts' tokens, whose K and V the others of their sequence behind them find in the pool; then these. */
void mixed_attention(Cuda *c, const te_attention_args *a) {
    const int32_t n = a->grouped;
    const te_cuda_half half = attention_half(c, a);
    te_attention_args front = *a, rest = half.v ? *a : some_tokens(a, n, a->n_tok - n);
    front.n_tok = n;
    front.n_before = a->n_before < n ? a->n_before : n;
    prefill_attention(c, &front, half);
    rest.n_before = half.v ? n : 0; /* in tiles that both share */
    rest.apart = 1;
    rest.beside = nullptr;
    decode_attention(c, in_half(&rest, half));
}

} // namespace

void op_attention(pi_device *dev, const te_attention_args *a) {
    Cuda *c = of(dev);
    run_last_rows(c);
    if (idle(c)) return;
    const bool beside = a->beside && a->n_tok == 1 && c->te->attends_beside(a->beside);
    if (a->beside && !beside) op_linear(dev, a->beside);
    const bool wide =
        (a->n_tok > TE_CUDA_MAX_TOK || a->grouped) && !a->apart; /* few are grouped where they are to be */
    if (wide && a->grouped && a->grouped < a->n_tok) return mixed_attention(c, a);
    if (wide && a->grouped) return prefill_attention(c, a, attention_half(c, a));
    /* The step's first attention starts when all before it has ended, the copy of the step's inputs, too; the others may
     * read those, and K and V of earlier steps, before the operation in front has ended. */
    const bool early = c->settled && (a->n_tok <= TE_CUDA_MAX_TOK || a->apart);
    const te_cuda_half half = attention_half(c, a);
    auto attend = [&](int32_t t, int32_t n) {
        const te_attention_args some = some_tokens(a, t, n);
        te_attention_args op = in_half(&some, half);
        op.early = early;
        if (!beside) op.beside = nullptr;
        if (!c->settled) c->te->set_overlap(c->d, 0);
        decode_attention(c, op);
        if (!c->settled) c->te->set_overlap(c->d, 1);
        if (ready(c)) c->settled = true;
    };
    if (a->apart) return attend(0, a->n_tok);
    pieces(a->n_tok, attend);
}

void op_latent(pi_device *dev, const te_latent_args *a) {
    Cuda *c = of(dev);
    run_last_rows(c);
    if (idle(c)) return;
    te_latent_args op = *a;
    op.scratch = (float *)room(c, SCRATCH, sizeof(float) * c->te->latent_floats(c->d, &op));
    if (ready(c)) note(c, c->te->latent(c->d, &op));
}

void op_recurrent(pi_device *dev, const te_recurrent_args *a) {
    Cuda *c = of(dev);
    run_last_rows(c);
    if (!ready(c)) return;
    /* As attention: states and whose they are are read early, but by the step's first operation that does so. */
    te_recurrent_args op = *a;
    op.early = c->settled;
    if (!c->settled) c->te->set_overlap(c->d, 0);
    note(c, c->te->recurrent(c->d, &op));
    if (!c->settled) c->te->set_overlap(c->d, 1);
    c->settled = true;
}

void op_gate(pi_device *dev, const te_gate_args *a) {
    Cuda *c = of(dev);
    run_last_rows(c);
    if (ready(c)) note(c, c->te->gate(c->d, a));
}

void op_cut(pi_device *dev, const te_cut_args *a) {
    Cuda *c = of(dev);
    run_last_rows(c);
    if (ready(c)) note(c, c->te->cut(c->d, a));
}

void op_marks(pi_device *dev, const te_marks_args *a) {
    Cuda *c = of(dev);
    run_last_rows(c);
    if (ready(c)) note(c, c->te->marks(c->d, a));
}

namespace {

void decode_ffn(Cuda *c, const te_ffn_args *a) {
    const int32_t n = a->list ? a->n_list : a->up.n_rows, n_embd = a->up.cols;
    const bool scored = a->scores.fc2.w || a->scores.sign;
    te_ffn_args op = *a;
    if (a->list) {
        for (te_mat *m : {&op.gate, &op.up, &op.down}) m->w = mapped(c, m->w);
        op.zero_copy = op.first = 1;
    }
    op.beside = a->add && c->sum.zero_copy;
    if (c->kept == a->x)
        op.prepared = c->kept_form;
    else
        op.prepared = op.beside ? c->sum.prepared : prepare(c, op.x, op.ldx, op.n_tok, n_embd, op.norm, a->up.type);
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
    te_linear_args out = {};
    out.x = op.h;
    out.ldx = op.ldh;
    out.n_tok = a->n_tok;
    out.n_products = 1;
    out.product[0].w = a->down_out;
    out.product[0].y = op.partial;
    out.product[0].ldy = (size_t)n_embd;
    out.prepared = prepare(c, out.x, out.ldx, out.n_tok, n, {}, a->down_out.type);
    c->last_rows = out;
    if (before || adapted || a->staged) run_last_rows(c);
}

/* The product gives what merge would make of it, or would norm: true if nothing else is left to add. */
bool settle_rows(Cuda *c, const te_merge_args *a) {
    te_product *p = &c->last_rows.product[0];
    const bool whole = c->last_rows.n_products && a->partial && c->sum.y == a->partial && !a->words;
    if (whole) {
        const bool normed = a->norm.kind != TE_NO_NORM;
        p->y = normed ? a->normed : a->y;
        p->ldy = normed ? (size_t)a->cols : a->ldy;
        p->bias = a->bias;
        p->add = normed ? nullptr : a->add;
        p->ld_add = a->ld_add;
    }
    run_last_rows(c);
    return whole;
}

} // namespace

void run_last_rows(Cuda *c) {
    if (c->last_rows.n_products && ready(c)) note(c, c->te->linear(c->d, &c->last_rows));
    c->last_rows = {};
}

void op_ffn(pi_device *dev, const te_ffn_args *a) {
    Cuda *c = of(dev);
    if (idle(c)) return;
    run_last_rows(c);
    if (a->n_tok > TE_CUDA_MAX_TOK) return prefill_ffn(c, a);
    /* Kernels read weights before their predecessor has ended, unless loads wrote them. */
    const bool waits = a->staged && ready(c);
    if (waits) {
        c->te->set_overlap(c->d, 0);
        note(c, c->te->load_ready(c->d, a->stage));
    }
    decode_ffn(c, a);
    if (!waits) return;
    if (ready(c)) note(c, c->te->load_free(c->d, a->stage));
    c->te->set_overlap(c->d, 1);
}

void op_merge(pi_device *dev, const te_merge_args *a) {
    Cuda *c = of(dev);
    if (settle_last(c, a)) return;
    const bool normed = a->norm.kind != TE_NO_NORM;
    bool whole = settle_rows(c, a);
    if (!ready(c)) return;
    te_merge_args op = *a;
    if (a->partial && c->sum.y == a->partial) {
        op.partial = (float *)c->room[PARTIAL];
        op.n_parts = c->sum.n_parts;
    }
    op.cancelled = dev->cancelled;
    op.limit_ns = dev->wait_ns ? (uint64_t)dev->wait_ns : usual_wait_ns;
    if (normed) {
        op.add = nullptr;
        op.y = a->normed;
        op.ldy = (size_t)a->cols;
    }
    whole = whole || (normed && op.n_parts == 1 && op.partial == a->normed && !a->bias && !a->words);
    if (!whole) note(c, c->te->merge(c->d, &op));
    if (normed) note(c, add_norm(c->d, a));
    c->sum = {};
}

/* The thread is no further ahead than so many bytes of loads, some tenths of a second, so that a prompt can be ended. */
static void wait_for_loads(Cuda *c, const pi_device_load *a) {
    constexpr size_t most_ahead = (size_t)8 << 30;
    c->loaded_bytes += a->to.stride * (size_t)a->to.n_rows;
    if (!c->may_end || c->loaded_bytes < most_ahead) return;
    c->loaded_bytes = 0;
    note(c, c->te->wait(c->d, finish_seconds));
}

void op_load(pi_device *dev, const pi_device_load *a) {
    Cuda *c = of(dev);
    const void *src = mapped(c, a->from.w);
    if (c->mode == MEASURE && !src) return note(c, reserve_copiers(c));
    if (!ready(c)) return;
    if (!src) return note(c, load_by_ring(c, a));
    wait_for_loads(c, a);
    te_cuda_pack op = {};
    op.dst = a->to;
    op.src = src;
    op.src_stride = a->from.stride;
    op.rows = a->columns ? nullptr : a->ids;
    op.each = a->each;
    op.wanted = a->columns ? nullptr : a->wanted;
    op.blocks = a->columns ? a->ids : nullptr;
    note(c, c->te->load(c->d, a->stage, &op));
}

void op_logits(pi_device *dev, const pi_device_logits *a) {
    Cuda *c = of(dev);
    run_last_rows(c);
    if (ready(c)) note(c, logits(c->d, a));
}

void op_stamp(pi_device *dev, uint64_t *at) {
    Cuda *c = of(dev);
    run_last_rows(c);
    if (ready(c)) note(c, stamp(c->d, at));
}

} // namespace pi
