/* prompt.cu - operations of more tokens than the kernels for decoding take: products of F16, with the matrices as they
 * are, made F16 in registers (some tokens) or converted piece by piece (many). */
#include "cuda.cuh"
#include "kernels.cuh"

namespace pi {
namespace {

/* Room for F16 values of n_tok tokens, in a form or as products with matrices of this type want them; type -1: as rows. */
te_cuda_half half_room(Cuda *c, Room r, int32_t n_tok, te_cuda_half h) {
    const size_t values = (size_t)(h.tiles ? 8 * h.tiles : n_tok) * h.ld * 2, scale = (values + 255) / 256 * 256;
    char *p = (char *)room(c, r, scale + sizeof(float) * ((size_t)n_tok + 1));
    h.v = p;
    h.scale = (float *)(p + scale);
    return h;
}
te_cuda_half half_room(Cuda *c, Room r, int32_t n_tok, int32_t cols, int32_t type) {
    te_cuda_half h = {};
    h.ld = (size_t)(cols + 7) / 8 * 8;
    if (type >= 0) h = c->te->half_form(c->d, type, n_tok, cols);
    return half_room(c, r, n_tok, h);
}

void halve(Cuda *c, const float *x, size_t ldx, int32_t n_tok, int32_t cols, const te_norm &norm, te_cuda_half to,
           te_cuda_half also = {}, float *keep = nullptr) {
    te_cuda_halve op = {};
    op.also = also;
    op.keep = keep;
    op.x = x;
    op.ldx = ldx;
    op.n_tok = n_tok;
    op.cols = cols;
    op.norm = norm;
    op.to = to;
    note(c, c->te->halve(c->d, &op));
}

bool same_form(const te_cuda_half &a, const te_cuda_half &b) {
    return a.tiles == b.tiles && a.words == b.words && a.matrices == b.matrices;
}

/* Room that products with these matrices like best. */
void *gemm_room(Cuda *c, te_cuda_gemm *op) {
    size_t most = 0;
    if (c->mode == MEASURE && !op->x.tiles) find_blas(c);
    for (int32_t i = 0; i < op->n_products && !op->x.tiles; i++) {
        size_t least = 0;
        const size_t n = c->te->gemm_scratch(c->d, &op->product[i].w, op->n_tok, &least);
        if (n > most) most = n;
    }
    op->n_scratch = most;
    return op->scratch = room(c, GEMM, most);
}

size_t floats_of(int32_t n_tok, int32_t n) { return (size_t)n_tok * ((size_t)(n + 3) / 4 * 4); }

} // namespace

void run_last(Cuda *c) {
    if (c->last.n_products && ready(c)) note(c, c->te->gemm(c->d, &c->last));
    c->last = {};
}

/* The product adds what it gives to x itself. */
bool settle_last(Cuda *c, const te_merge_args *a) {
    te_product *p = &c->last.product[0];
    const bool plain = c->last.n_products && p->y == a->partial && !a->words && a->norm.kind == TE_NO_NORM;
    if (plain) {
        p->y = a->y;
        p->ldy = a->ldy;
        p->bias = a->bias;
        p->add = a->add;
        p->ld_add = a->ld_add;
    }
    run_last(c);
    return plain;
}

/* What experts of this type want of n_tok tokens whose routes are few enough that each row of an expert is read once for them
 * (vendor/cuda/experts_wide.cuh); no tiles: they are too many. Of more than TE_CUDA_WIDE_TOK measured on Hopper alone. */
static te_cuda_half experts_form(Cuda *c, int32_t type, int32_t n_tok, int32_t cols) {
    const int32_t widest = TE_CUDA_WIDE_TOK, few = n_tok < widest ? n_tok : widest;
    if (n_tok > widest && (n_tok > PI_WIDE_EXPERTS || !c->te->half_form(c->d, TE_Q4_0, n_tok, 256).matrices)) return {};
    te_cuda_half h = c->te->half_form(c->d, type, few, cols);
    if (n_tok > widest && h.tiles) h.tiles = (n_tok + 7) / 8;
    h.matrices = 0;
    return h;
}

/* A few rows of floats, of few tokens: in floats, with the side. */
static bool is_router(Cuda *c, const te_linear_args *a) {
    const te_product &p = a->product[0];
    const te_norm &n = a->norm;
    return a->n_products == 1 && p.w.type == TE_F32 && p.w.n_rows <= 512 && !p.relu && !p.add && a->cols % 4 == 0 &&
           (n.kind == TE_NO_NORM || (n.kind == TE_RMS_NORM && !n.b)) &&
           experts_form(c, TE_F32, a->n_tok, a->cols).tiles;
}

/* What a side keeps, as experts of side_type want it, if it can be made with the products' input, or alone. (A feed-forward
 * makes its own input.) */
static te_cuda_half side_form(Cuda *c, const te_linear_args *a) {
    const te_norm &n = a->norm, &side = a->side.norm;
    const bool same = n.kind == side.kind && n.w == side.w && n.b == side.b && n.eps == side.eps;
    te_cuda_half h = {};
    if (a->n_tok > PI_WIDE_EXPERTS || !a->side.keep || a->side.publish || a->side_type < 0 || a->cols % 4 ||
        a->cols > TE_CUDA_ROW || side.kind != TE_RMS_NORM || side.b || (a->n_products && !same))
        return h;
    if (a->n_products && !is_router(c, a) && !c->te->half_form(c->d, a->product[0].w.type, a->n_tok, a->cols).tiles)
        return h;
    h = experts_form(c, a->side_type, a->n_tok, a->cols);
    return h.tiles ? half_room(c, HALF_SIDE, a->n_tok, h) : te_cuda_half{};
}

/* The form that others of the products want than the first, if one kernel can make both. */
static te_cuda_half second_form(Cuda *c, const te_linear_args *a) {
    const te_norm &n = a->norm;
    const bool can = a->cols % 4 == 0 && a->cols <= TE_CUDA_ROW && n.kind == TE_RMS_NORM && !n.b;
    for (int32_t i = 1; i < a->n_products && can; i++) {
        const te_cuda_half first = c->te->half_form(c->d, a->product[0].w.type, a->n_tok, a->cols),
                           form = c->te->half_form(c->d, a->product[i].w.type, a->n_tok, a->cols);
        if (first.tiles && form.tiles && !same_form(form, first)) return half_room(c, HALF_SIDE, a->n_tok, form);
    }
    return {};
}

static void route_scores(Cuda *c, const te_linear_args *a, const te_cuda_half &side) {
    te_cuda_halve keeps = {};
    keeps.x = a->x;
    keeps.ldx = a->ldx;
    keeps.n_tok = a->n_tok;
    keeps.cols = a->cols;
    keeps.norm = a->side.norm;
    keeps.to = side;
    keeps.keep = a->side.keep;
    te_cuda_scores op = {};
    op.x = a->x;
    op.ldx = a->ldx;
    op.n_tok = a->n_tok;
    op.cols = a->cols;
    op.norm = a->norm;
    op.w = a->product[0].w;
    op.bias = a->product[0].bias;
    op.y = a->product[0].y;
    op.ldy = a->product[0].ldy;
    op.side = side.tiles ? &keeps : nullptr;
    if (ready(c)) note(c, c->te->scores(c->d, &op));
}

void prefill_linear(Cuda *c, const te_linear_args *a) {
    const te_cuda_half side = side_form(c, a);
    const bool attended = c->attended && c->half_x == a->x && a->norm.kind == TE_NO_NORM;
    c->attended = false;
    if ((a->side.keep || a->side.publish) && !side.tiles && ready(c))
        note(c, norm_rows(c->d, a->x, a->ldx, a->n_tok, a->cols, a->side));
    if (side.tiles && !a->n_products && ready(c))
        halve(c, a->x, a->ldx, a->n_tok, a->cols, a->side.norm, side, {}, a->side.keep);
    if (side.tiles) {
        c->half_x = a->side.keep;
        c->half_norm = nullptr;
        c->half = side;
    } else if (c->half.v == c->room[HALF_X]) {
        c->half_x = nullptr;
    }
    if (is_router(c, a)) return route_scores(c, a, side);
    const te_cuda_half second = side.tiles || attended ? te_cuda_half{} : second_form(c, a);
    if (second.tiles && c->half.v == c->room[HALF_SIDE]) c->half_x = nullptr;
    bool done[TE_MAX_PRODUCTS] = {};
    for (int32_t i = 0; i < a->n_products; i++) { /* those that want one form of the input at a time */
        if (done[i]) continue;
        te_cuda_gemm op = {};
        op.x = half_room(c, HALF_X, a->n_tok, a->cols, a->product[i].w.type);
        const bool is_second = i && second.tiles && same_form(op.x, second);
        if (is_second) op.x = second;
        op.n_tok = a->n_tok;
        for (int32_t k = i; k < a->n_products; k++) {
            const te_cuda_half form = c->te->half_form(c->d, a->product[k].w.type, a->n_tok, a->cols);
            if (!same_form(form, op.x)) continue;
            done[k] = true;
            op.product[op.n_products++] = a->product[k];
        }
        (void)gemm_room(c, &op);
        if (!ready(c)) continue;
        const bool both = side.tiles && i == 0;
        if (!is_second && (!attended || !same_form(c->half, op.x)))
            halve(c, a->x, a->ldx, a->n_tok, a->cols, a->norm, op.x,
                  i      ? te_cuda_half{}
                  : both ? side
                         : second,
                  both ? a->side.keep : nullptr);
        note(c, c->te->gemm(c->d, &op));
    }
}

te_cuda_half attention_half(Cuda *c, const te_attention_args *a) {
    c->attended = false;
    if (a->n_tok <= TE_CUDA_MAX_TOK || a->next_type < 0 || !c->te->attention_halves(c->d, a)) return {};
    const te_cuda_half h = half_room(c, HALF_X, a->n_tok, a->n_head * a->n_embd_head, a->next_type);
    if (!h.matrices) return {}; /* measured with products of these alone */
    c->half_x = a->out;
    c->half_norm = nullptr;
    c->half = h;
    c->attended = true;
    return h;
}

te_attention_args in_half(const te_attention_args *a, const te_cuda_half &half) {
    te_attention_args op = *a;
    op.half = half.v;
    op.half_scale = half.scale;
    op.half_tiles = half.tiles;
    op.half_words = half.words;
    op.half_matrices = half.matrices;
    return op;
}

void prefill_attention(Cuda *c, const te_attention_args *a, const te_cuda_half &half) {
    te_attention_args op = in_half(a, half);
    op.scratch = (float *)room(c, SCRATCH, sizeof(float) * c->te->prompt_attention_floats(c->d, &op));
    if (ready(c)) note(c, c->te->prompt_attention(c->d, &op));
}

namespace {

/* Bits of the wanted rows; null if all are. */
uint8_t *wanted(Cuda *c, const te_scores &a, int32_t n, int32_t n_tok, size_t *ld) {
    if (!a.fc2.w && !a.sign) return nullptr;
    *ld = (size_t)(n + 31) / 32 * 4;
    uint8_t *bits = (uint8_t *)room(c, BITS, *ld * (size_t)n_tok);
    if (!ready(c)) return bits;
    if (a.sign) {
        note(c, sign_marks(c->d, a, n, n_tok, bits, *ld));
        return bits;
    }
    pieces(n_tok, [&](int32_t t, int32_t m) {
        te_linear_args op = {};
        op.x = a.z + a.ldz * (size_t)t;
        op.ldx = a.ldz;
        op.n_tok = m;
        op.n_products = 1;
        op.product[0].w = a.fc2;
        op.product[0].mark = bits + *ld * (size_t)t;
        op.product[0].ld_mark = *ld;
        op.product[0].mark_threshold_at = a.threshold;
        note(c, c->te->linear(c->d, &op));
    });
    return bits;
}

/* y += b (a x), a as it is or transposed. */
void adapt(Cuda *c, const te_adapter &w, bool transposed, const te_cuda_half &x, int32_t n_tok, float *y, size_t ldy) {
    if (!w.a.w) return;
    const int32_t rank = w.b.cols;
    te_cuda_gemm first = {}, second = {};
    first.x = x;
    first.n_tok = second.n_tok = n_tok;
    first.transposed = transposed;
    first.n_products = second.n_products = 1;
    first.product[0].w = w.a;
    first.product[0].y = (float *)room(c, ADAPT, sizeof(float) * floats_of(n_tok, rank));
    first.product[0].ldy = (size_t)rank;
    second.x = half_room(c, HALF_Z, n_tok, rank, -1);
    second.product[0].w = w.b;
    second.product[0].y = y;
    second.product[0].add = y;
    second.product[0].ldy = second.product[0].ld_add = ldy;
    (void)gemm_room(c, &first);
    (void)gemm_room(c, &second);
    if (!ready(c)) return;
    note(c, c->te->gemm(c->d, &first));
    halve(c, first.product[0].y, (size_t)rank, n_tok, rank, {}, second.x);
    note(c, c->te->gemm(c->d, &second));
}

/* The form of hidden values; no tiles: as rows. */
te_cuda_half hidden_form(Cuda *c, const te_ffn_args *a) {
    const int32_t n = a->up.n_rows, n_tok = a->n_tok;
    te_cuda_half h = {};
    h.ld = (size_t)(n + 7) / 8 * 8;
    if (a->down_adapter.a.w) return h;
    if (!a->down.w) return c->te->half_form(c->d, a->down_out.type, n_tok, n);
    const te_cuda_half form = c->te->half_form(c->d, TE_F16, n_tok, n);
    return form.matrices && c->te->half_form(c->d, a->down.type, n_tok, n).matrices ? form : h;
}

void ffn(Cuda *c, const te_ffn_args *a, const te_cuda_half &x) {
    run_last(c);
    const int32_t n = a->up.n_rows, n_embd = a->up.cols, n_tok = a->n_tok;
    const size_t ld = (size_t)(n + 3) / 4 * 4;
    te_cuda_act act = {};
    act.mask = wanted(c, a->scores, n, n_tok, &act.ld_mask);
    act.up = (float *)room(c, HIDDEN, sizeof(float) * floats_of(n_tok, n) * (a->gate.w ? 2 : 1));
    act.gate = a->gate.w ? act.up + floats_of(n_tok, n) : nullptr;
    act.ld_up = act.ld_gate = ld;
    act.n_tok = n_tok;
    act.n = n;
    act.up_bias = a->up_bias;
    act.act = (te_activation)a->act;
    act.threshold = a->threshold;
    act.curve = a->curve;
    const bool plain = x.matrices && a->gate.w && a->gate.type == a->up.type && !act.mask && !a->gate_adapter.a.w &&
                       !a->up_adapter.a.w;
    act.to = half_room(c, HALF_H, n_tok, hidden_form(c, a));
    act.counts = a->counts;
    act.fired = a->fired;
    te_cuda_gemm in = {}, out = {};
    in.x = x;
    in.n_tok = out.n_tok = n_tok;
    in.product[0].w = a->up;
    in.product[0].y = const_cast<float *>(act.up);
    in.product[1].w = a->gate;
    in.product[1].y = const_cast<float *>(act.gate);
    in.product[0].ldy = in.product[1].ldy = ld;
    in.n_products = a->gate.w ? 2 : 1;
    out.x = act.to;
    out.transposed = a->down.w != nullptr;
    out.n_products = 1;
    out.product[0].w = a->down.w ? a->down : a->down_out;
    out.product[0].y = a->y;
    out.product[0].ldy = out.product[0].ld_add = (size_t)n_embd;
    out.product[0].add = a->add ? a->y : nullptr;
    (void)gemm_room(c, &in);
    (void)gemm_room(c, &out);
    const bool at_once = plain && act.to.matrices;
    if (at_once) {
        in.act = &act;
        in.counter = (uint32_t *)room(c, COUNTERS, sizeof(uint32_t) * ((size_t)n_tok + 1));
    }
    if (ready(c)) note(c, c->te->gemm(c->d, &in));
    adapt(c, a->gate_adapter, false, x, n_tok, const_cast<float *>(act.gate), ld);
    adapt(c, a->up_adapter, false, x, n_tok, const_cast<float *>(act.up), ld);
    if (!at_once && ready(c)) note(c, c->te->act(c->d, &act));
    c->last = out;
    if (a->add || a->staged || a->down_adapter.a.w) run_last(c);
    adapt(c, a->down_adapter, true, act.to, n_tok, a->y, (size_t)n_embd);
}

te_mat some_rows(te_mat m, int32_t first, int32_t n) {
    if (!m.w) return m;
    m.w = (const char *)m.w + m.stride * (size_t)first;
    m.n_rows = n;
    return m;
}

/* n neurons from the first-th on, where down is stored by neurons. */
te_ffn_args some_neurons(const te_ffn_args *a, int32_t first, int32_t n) {
    te_ffn_args b = *a;
    for (te_mat *m : {&b.gate, &b.up, &b.down, &b.gate_adapter.b, &b.up_adapter.b, &b.down_adapter.a, &b.scores.fc2})
        *m = some_rows(*m, first, n);
    if (b.scores.sign) b.scores.sign += (ptrdiff_t)first * ((b.scores.cols + 63) / 64);
    if (b.up_bias) b.up_bias += first;
    if (b.fired) b.fired += first;
    b.add = a->add || first > 0;
    return b;
}

} // namespace

/* The input in the form of `to`, which is in HALF_X: made there, unless there is one. */
static te_cuda_half make_half(Cuda *c, const float *x, size_t ldx, int32_t n_tok, int32_t cols, const te_norm &norm,
                              const te_cuda_half &to) {
    if (c->half_x == x && c->half_norm == norm.w && same_form(c->half, to)) return c->half;
    c->attended = false;
    c->half_x = x;
    c->half_norm = norm.w;
    c->half = to;
    if (ready(c)) halve(c, x, ldx, n_tok, cols, norm, to);
    return to;
}

void prefill_ffn(Cuda *c, const te_ffn_args *a) {
    auto form = [&](const te_mat &m) { return c->te->half_form(c->d, m.type, a->n_tok, a->up.cols); };
    const bool adapted = a->gate_adapter.a.w || a->up_adapter.a.w,
               unlike = a->gate.w && a->gate.type != a->up.type && !same_form(form(a->gate), form(a->up));
    te_cuda_half x = half_room(c, HALF_X, a->n_tok, a->up.cols, adapted || unlike ? -1 : a->up.type);
    /* Of a layer's several calls the first makes the input. */
    if (!a->add) c->half_x = nullptr;
    x = make_half(c, a->x, a->ldx, a->n_tok, a->up.cols, a->norm, x);
    if (a->staged && ready(c)) note(c, c->te->load_ready(c->d, a->stage));
    const int32_t n = a->up.n_rows, most = a->down.w ? pi_hidden_rows(n, a->n_tok, a->gate.w != nullptr) : n;
    for (int32_t first = 0; first < n; first += most) {
        const te_ffn_args b = some_neurons(a, first, n - first < most ? n - first : most);
        ffn(c, &b, x);
    }
    if (a->staged && ready(c)) note(c, c->te->load_free(c->d, a->stage));
}

void prefill_experts(Cuda *c, const te_experts_args *a) {
    run_last(c);
    const int32_t n_embd = a->up.cols, n_routes = a->n_tok * a->n_used;
    te_cuda_prompt_experts op = {};
    op.of = *a;
    /* Products of few tokens are those of experts with gates, whose input is not weighted. */
    const te_cuda_half form =
        a->gate.w && !a->on_input ? experts_form(c, a->up.type, a->n_tok, n_embd) : te_cuda_half{};
    op.x = form.tiles ? half_room(c, HALF_X, a->n_tok, form) : half_room(c, HALF_X, a->n_tok, n_embd, -1);
    op.n_ff_once = pi_hidden_rows(a->n_ff, n_routes, false);
    op.n_embd_once = pi_hidden_rows(n_embd, n_routes, false);
    op.values = (float *)room(
        c, HIDDEN, sizeof(float) * floats_of(n_routes, op.n_ff_once > op.n_embd_once ? op.n_ff_once : op.n_embd_once));
    te_cuda_half h = {};
    h.ld = (size_t)(op.n_ff_once + 7) / 8 * 8;
    if (op.x.tiles && a->down.w) h = experts_form(c, a->down.type, a->n_tok, op.n_ff_once);
    if (h.tiles) h.tiles = (n_routes + 7) / 8; /* of routes */
    if (h.tiles && op.n_ff_once <= TE_CUDA_HIDDEN)
        op.hidden = (float *)room(c, HALF_H, sizeof(float) * floats_of(n_routes, op.n_ff_once));
    else
        op.h = half_room(c, HALF_H, n_routes, h);
    op.lists = (int32_t *)room(c, ROUTES, sizeof(int32_t) * c->te->prompt_experts_words(a));
    op.x = make_half(c, a->x, a->ldx, a->n_tok, n_embd, {}, op.x);
    if (!ready(c)) return;
    if (a->staged) note(c, c->te->load_ready(c->d, a->stage));
    note(c, c->te->prompt_experts(c->d, &op));
    if (a->staged) note(c, c->te->load_free(c->d, a->stage));
}

} // namespace pi
