/* adapt.cu - adapters of a feed-forward of few tokens: y = W x + b (a x) for gate, up and down. What gate's and up's add is
 * made before the neurons are computed; h is kept for down's, whose a is stored transposed, a row for each neuron. */
#include "cuda.cuh"

namespace pi {
namespace {

/* Floats of one piece of memory. */
struct Parts {
    float *gate, *up, *z,
        *sums; /* added to gate and up [n_tok][ld]; a x [n_tok][rank]; parts of a h [n][n_tok][rank] */
    size_t ld;
    int32_t n_sums;
};

int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

Parts lay_out(Cuda *c, const te_ffn_args *a) {
    const int32_t rank = most(a->gate_adapter.b.cols, most(a->up_adapter.b.cols, a->down_adapter.b.cols));
    const size_t n_tok = (size_t)a->n_tok;
    Parts p = {};
    p.ld = (size_t)(a->up.n_rows + 3) / 4 * 4;
    p.n_sums = a->down_adapter.a.w ? c->te->parts(c->d, &a->down_adapter.a, a->up.n_rows) : 0;
    const size_t floats = n_tok * (2 * p.ld + (size_t)rank * (size_t)(1 + p.n_sums));
    p.gate = (float *)room(c, ADAPT, sizeof(float) * floats);
    p.up = p.gate + n_tok * p.ld;
    p.z = p.up + n_tok * p.ld;
    p.sums = p.z + n_tok * (size_t)rank;
    return p;
}

void product(Cuda *c, const te_mat &w, const float *x, size_t ldx, int32_t n_tok, const te_norm &norm, float *y,
             size_t ldy) {
    te_linear_args op = {};
    op.x = x;
    op.ldx = ldx;
    op.n_tok = n_tok;
    op.norm = norm;
    op.n_products = 1;
    op.product[0].w = w;
    op.product[0].y = y;
    op.product[0].ldy = ldy;
    note(c, c->te->linear(c->d, &op));
}

} // namespace

bool is_adapted(const te_ffn_args *a) { return a->gate_adapter.a.w || a->up_adapter.a.w || a->down_adapter.a.w; }

void adapt_products(Cuda *c, const te_ffn_args *a, te_ffn_args *op) {
    const Parts p = lay_out(c, a);
    op->store_h = 1;
    op->ld_add = p.ld;
    if (a->gate_adapter.a.w) op->gate_add = p.gate;
    if (a->up_adapter.a.w) op->up_add = p.up;
    if (!ready(c)) return;
    for (const te_adapter *w : {&a->gate_adapter, &a->up_adapter}) {
        if (!w->a.w) continue;
        const size_t rank = (size_t)w->b.cols;
        product(c, w->a, op->x, op->ldx, a->n_tok, op->norm, p.z, rank);
        product(c, w->b, p.z, rank, a->n_tok, {}, w == &a->gate_adapter ? p.gate : p.up, p.ld);
    }
}

void adapt_sum(Cuda *c, const te_ffn_args *a, const te_ffn_args *op, float *part) {
    const Parts p = lay_out(c, a);
    const te_adapter &w = a->down_adapter;
    if (!ready(c)) return;
    te_cuda_down sum = {};
    sum.w = w.a;
    sum.h = op->h;
    sum.ldh = op->ldh;
    sum.n_tok = a->n_tok;
    sum.all = !a->skip;
    sum.partial = p.sums;
    te_merge_args z = {};
    z.partial = p.sums;
    z.n_parts = p.n_sums;
    z.n_tok = a->n_tok;
    z.cols = w.a.cols;
    z.y = p.z;
    z.ldy = (size_t)w.a.cols;
    note(c, c->te->down(c->d, &sum));
    note(c, c->te->merge(c->d, &z));
    product(c, w.b, p.z, z.ldy, a->n_tok, {}, part, (size_t)w.b.n_rows);
}

} // namespace pi
