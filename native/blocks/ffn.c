/* ffn.c - the feed-forward block: which neurons are computed (those that a predictor names, those whose gate is open, all),
 * and by which operator.
 *
 *     y += sum over neurons j of act(gate_j . h) * (up_j . h) * down_j
 *
 * Generated tokens go through the fused row-sparse operator; prompts through matrix products, with the mask applied to
 * the hidden values. */
#include "ffn.h"

#include <math.h>
#include <string.h>

#include "../model/bind.h"
#include "../model/keys.h"

typedef enum ffn_mode { FFN_MASKED, FFN_EXACT, FFN_DENSE } ffn_mode;

/* Bytes are counted for all tokens, neurons only for those of the sparse operator: a prompt's dense tokens say nothing
 * about sparsity. */
static void add_counts(te_ffn_counts *c, const te_ffn_counts *part, bool sparse_tokens) {
    c->rows += part->rows;
    c->bytes += part->bytes;
    if (!sparse_tokens) return;
    c->listed += part->listed;
    c->computed += part->computed;
    c->fired += part->fired;
}

/* How many of n hidden values the row-sparse operator would have needed the up row of (without a gate: the down row);
 * n_fired of them are not 0. */
static int64_t count_computed(const pi_session *s, const float *gate, const uint8_t *mask, int64_t n, ffn_mode mode,
                              int64_t n_fired) {
    const int32_t act = s->model->info.activation;
    const bool skip = mode != FFN_DENSE && pi_is_relu(act);
    if (skip && !gate) return n_fired;
    if (!skip && !mask) return n;
    const float least = !skip ? -INFINITY : act == PI_ACTIVATION_RELU ? s->model->info.activation_threshold : 0;
    int64_t sum = 0;
    if (!mask)
        for (int64_t i = 0; i < n; i++) sum += gate[i] > least;
    else if (!gate)
        for (int64_t i = 0; i < n; i++) sum += mask[i];
    else
        for (int64_t i = 0; i < n; i++) sum += mask[i] & (gate[i] > least);
    return sum;
}

/* Adds to the layer's counts for how many of the n tokens with hidden values u each of this member's neurons fired. */
static void count_fired(const pi_session *s, const te_team *team, int32_t l, const float *u, int32_t n) {
    const size_t n_ff = (size_t)pi_n_ff(pi_ffn_of(&s->model->layer[l]));
    uint32_t *fired = pi_fired_of(s, l);
    int64_t lo, hi;
    te_share(team, (int64_t)n_ff, 16, &lo, &hi);
    for (int32_t t = 0; t < n; t++)
        for (int64_t j = lo; j < hi; j++) fired[j] += u[(size_t)t * n_ff + (size_t)j] != 0;
}

/* Before the sums of down are added to x: the order of few tokens, in all modes. */
static void add_bias_first(const pi_session *s, te_team *team, const pi_ffn *w, float *x, int32_t n) {
    const int32_t n_embd = s->model->info.n_embd;
    if (!w->down_b) return;
    for (int32_t t = team->ith; t < n; t += team->nth)
        s->model->kernels->add(w->down_b, n_embd, x + (ptrdiff_t)t * n_embd);
    te_barrier(team);
}

te_ffn pi_ffn_operator(const pi_model *m, const pi_ffn *w) {
    return (te_ffn){.gate = w->gate,
                    .up = w->up,
                    .down = w->down_t,
                    .up_bias = w->up_b,
                    .act = (te_activation)m->info.activation,
                    .threshold = m->info.activation_threshold,
                    .curve = w->curve};
}

void pi_keep_hidden(pi_session *s, const te_team *team, const pi_ffn *w, int32_t t0, int32_t n, te_ffn_io *io) {
    const size_t n_ff = (size_t)pi_n_ff(w);
    int64_t lo, hi;
    te_share(team, (int64_t)n * (int64_t)n_ff, 64, &lo, &hi);
    io->hidden = s->up + (size_t)t0 * n_ff;
    io->ld_hidden = n_ff;
    memset(io->hidden + lo, 0, (size_t)(hi - lo) * sizeof *io->hidden);
}

void pi_adapt_ffn(pi_session *s, te_team *team, const pi_layer *layer, const float *x, int32_t t0, int32_t n_tok,
                  te_ffn_io *io) {
    if (!pi_adapts_ffn(layer)) return;
    const size_t n_embd = (size_t)s->model->info.n_embd, n_ff = (size_t)pi_n_ff(pi_ffn_of(layer)),
                 off = (size_t)t0 * n_ff;
    float *up = s->adapt_up + off, *gate = pi_ffn_of(layer)->gate.w ? s->gate + off : NULL;
    int64_t lo, hi;
    te_share(team, (int64_t)n_tok * (int64_t)n_ff, 64, &lo, &hi);
    const size_t n_bytes = sizeof(float) * (size_t)(hi - lo);
    memset(up + lo, 0, n_bytes);
    if (gate) memset(gate + lo, 0, n_bytes);
    pi_keep_hidden(s, team, pi_ffn_of(layer), t0, n_tok, io);
    pi_adapt(s, team, pi_adapter_of(layer, PI_ADAPT_UP), x, n_embd, n_tok, TE_BY_ROWS, up, n_ff);
    pi_adapt(s, team, pi_adapter_of(layer, PI_ADAPT_GATE), x, n_embd, n_tok, TE_BY_ROWS, gate, n_ff);
    te_barrier(team);
    io->up_add = up;
    io->gate_add = gate;
    io->ld_add = n_ff;
}

int64_t pi_sum_counts(const pi_session *s, int32_t l, int32_t n, pi_layer_step *step) {
    int64_t listed = 0;
    for (int32_t i = 0; i < n; i++) {
        const pi_layer_count *c = &s->count[(ptrdiff_t)l * s->options.n_threads + i];
        listed += c->ffn.listed;
        step->n_predicted += c->predicted;
        step->n_computed += c->ffn.computed;
        step->n_active += c->ffn.fired;
        step->n_rows += c->ffn.rows;
        step->ffn_bytes += c->ffn.bytes;
    }
    return listed;
}

void pi_count_down(pi_session *s, const te_team *team, int32_t l, const te_mat *down) {
    if (team->ith != 0) return;
    te_ffn_counts *c = &s->count[(ptrdiff_t)l * s->options.n_threads].ffn;
    c->rows += down->cols;
    c->bytes += pi_mat_bytes(down);
}

/* What a token's gates must exceed. */
static float cut_of(const float *g, int32_t n, float cut) {
    enum { LANES = 16 };
    double sum[LANES] = {0}, squares[LANES] = {0}, all = 0, spread = 0;
    for (int32_t j = 0; j < n; j++) sum[j % LANES] += (double)g[j];
    for (int32_t k = 0; k < LANES; k++) all += sum[k];
    const double mean = all / n;
    for (int32_t j = 0; j < n; j++) squares[j % LANES] += ((double)g[j] - mean) * ((double)g[j] - mean);
    for (int32_t k = 0; k < LANES; k++) spread += squares[k];
    return (float)(mean + sqrt(spread / n) * (double)cut);
}

/* Gates of n tokens become what they are above that, the others 0. Ends with a barrier. */
static void cut_gates(te_team *team, const pi_ffn *w, float *g, int32_t n) {
    const int32_t n_ff = pi_n_ff(w);
    for (int32_t t = team->ith; t < n; t += team->nth) {
        float *row = g + (ptrdiff_t)t * n_ff;
        const float least = cut_of(row, n_ff, w->cut);
        for (int32_t j = 0; j < n_ff; j++) row[j] = row[j] > least ? row[j] - least : 0;
    }
    te_barrier(team);
}

/* Matrix products for tokens t0..t0+n-1. All rows are read. */
static void run_products(pi_block_run *r, int32_t t0, int32_t n, ffn_mode mode, bool sparse_tokens) {
    pi_session *s = r->s;
    te_team *team = r->team;
    const int32_t l = r->l;
    const pi_model *m = s->model;
    const pi_ffn *w = &r->block->ffn;
    const size_t n_embd = (size_t)m->info.n_embd, n_ff = (size_t)pi_n_ff(w), off = (size_t)t0 * n_ff;
    float *g = s->gate + off, *u = s->up + off, *x = r->y + (size_t)t0 * n_embd;
    const float *h = s->h + (size_t)t0 * n_embd;
    const te_way way = t0 < s->chunk.n_prefill ? TE_BY_GEMM : TE_BY_ROWS;
    const te_linear in[2] = {{.w = w->up, .bias = w->up_b, .y = u, .ldy = n_ff, .way = way},
                             {.w = w->gate, .y = g, .ldy = n_ff, .way = way}};
    te_op_linear(team, s->ws, in, w->gate.w ? 2 : 1, h, n_embd, n);
    te_barrier(team);
    pi_adapt(s, team, pi_adapter_of(r->layer, PI_ADAPT_UP), h, n_embd, n, way, u, n_ff);
    pi_adapt(s, team, pi_adapter_of(r->layer, PI_ADAPT_GATE), h, n_embd, n, way, g, n_ff);
    if (w->cuts) cut_gates(team, w, g, n);
    int64_t lo, hi;
    te_share(team, (int64_t)n * (int64_t)n_ff, 64, &lo, &hi);
    if (hi > lo && m->info.activation == PI_ACTIVATION_XIELU)
        m->kernels->xielu(&w->curve, u + lo, (int32_t)(hi - lo), u + lo);
    else if (hi > lo)
        m->kernels->glu((te_activation)m->info.activation, m->info.activation_threshold, w->gate.w ? g + lo : NULL,
                        u + lo, (int32_t)(hi - lo), u + lo);
    if (mode == FFN_MASKED)
        for (int64_t i = lo; i < hi; i++)
            if (!s->mask[off + (size_t)i]) u[i] = 0;
    te_ffn_counts part = {.listed = hi - lo};
    for (int64_t i = lo; i < hi; i++) part.fired += u[i] != 0;
    part.computed = count_computed(s, w->gate.w ? g + lo : NULL, mode == FFN_MASKED ? s->mask + off + lo : NULL,
                                   hi - lo, mode, part.fired);
    if (team->ith == 0) {
        part.rows = (int64_t)n_ff * (w->gate.w ? 3 : 2);
        part.bytes = pi_mat_bytes(&w->up) + pi_mat_bytes(&w->gate) + pi_mat_bytes(&w->down_t) + pi_mat_bytes(&w->down);
    }
    add_counts(&s->count[(ptrdiff_t)l * s->options.n_threads + team->ith].ffn, &part, sparse_tokens);
    te_barrier(team);
    if (pi_fired_of(s, l)) count_fired(s, team, l, u, n);
    if (s->tap[l].hidden)
        for (int32_t t = team->ith; t < n; t += team->nth)
            memcpy(s->tap[l].hidden + (size_t)s->chunk.batch_row[t0 + t] * n_ff, u + (size_t)t * n_ff,
                   sizeof *u * n_ff);
    if (w->sub_norm) {
        for (int32_t t = team->ith; t < n; t += team->nth)
            m->kernels->rms_norm(u + (size_t)t * n_ff, w->sub_norm, m->inner_eps, (int32_t)n_ff, u + (size_t)t * n_ff);
        te_barrier(team);
    }
    if (w->down_t.w) {
        const bool first = way == TE_BY_ROWS;
        if (first) add_bias_first(s, team, w, x, n);
        te_op_linear_t(team, s->ws, &w->down_t, u, n_ff, n, first ? NULL : w->down_b, x, n_embd, true, way);
    } else {
        const te_linear out = {.w = w->down, .bias = w->down_b, .y = x, .ldy = n_embd, .add = true, .way = way};
        te_op_linear(team, s->ws, &out, 1, u, n_ff, n);
    }
    pi_adapt(s, team, pi_adapter_of(r->layer, PI_ADAPT_DOWN), u, n_ff, n, way, x, n_embd);
}

/* The fused operator over a list of neurons for a few tokens. */
static void run_rows(pi_block_run *r, int32_t t0, int32_t n, ffn_mode mode, te_rows rows, bool sparse_tokens) {
    pi_session *s = r->s;
    te_team *team = r->team;
    const int32_t l = r->l;
    const pi_model *m = s->model;
    const pi_ffn *w = &r->block->ffn;
    const size_t n_embd = (size_t)m->info.n_embd, n_ff = (size_t)pi_n_ff(w), off = (size_t)t0 * n_ff;
    float *x = r->y + (size_t)t0 * n_embd, *hidden = s->up + off;
    const te_ffn f = pi_ffn_operator(m, w);
    te_ffn_io io = {.x = s->h + (size_t)t0 * n_embd,
                    .ldx = n_embd,
                    .n_tok = n,
                    .mask = mode == FFN_MASKED ? s->mask + off : NULL,
                    .ld_mask = n_ff,
                    .by_neuron = mode == FFN_MASKED,
                    .y = x,
                    .ldy = n_embd,
                    .fired = pi_fired_of(s, l)};
    te_ffn_counts *c = &s->count[(ptrdiff_t)l * s->options.n_threads + team->ith].ffn, part = {0};
    const bool skip = mode != FFN_DENSE && pi_is_relu(m->info.activation);
    pi_adapt_ffn(s, team, r->layer, io.x, t0, n, &io);
    const pi_adapter *down = pi_adapter_of(r->layer, PI_ADAPT_DOWN);
    if (w->down_t.w) {
        add_bias_first(s, team, w, x, n);
        te_op_ffn(team, s->ws, &f, rows, skip, &io, &part);
        add_counts(c, &part, sparse_tokens);
        pi_adapt(s, team, down, hidden, n_ff, n, TE_BY_ROWS, x, n_embd);
        return;
    }
    pi_keep_hidden(s, team, w, t0, n, &io);
    te_barrier(team);
    te_op_ffn(team, s->ws, &f, rows, skip, &io, &part);
    add_counts(c, &part, sparse_tokens);
    te_barrier(team);
    const te_linear out = {.w = w->down, .bias = w->down_b, .y = x, .ldy = n_embd, .add = true};
    pi_linear(s, team, &out, 1, hidden, n_ff, t0, n);
    pi_adapt(s, team, down, hidden, n_ff, n, TE_BY_ROWS, x, n_embd);
    pi_count_down(s, team, l, &w->down);
}

/* Few tokens of a layer that cuts gates: these are made for all neurons, and once more, with what they must exceed taken
 * off, for those that exceed it, whose rows of up and down alone are read. */
static void run_cut(pi_block_run *r, int32_t t0, int32_t n, bool sparse_tokens) {
    pi_session *s = r->s;
    te_team *team = r->team;
    const pi_ffn *w = &r->block->ffn;
    const int32_t n_ff = pi_n_ff(w);
    const size_t n_embd = (size_t)s->model->info.n_embd, off = (size_t)t0 * (size_t)n_ff;
    float *g = s->gate + off, *y = r->y + (size_t)t0 * n_embd;
    const te_linear gate = {.w = w->gate, .y = g, .ldy = (size_t)n_ff, .way = TE_BY_ROWS};
    te_op_linear(team, s->ws, &gate, 1, s->h + (size_t)t0 * n_embd, n_embd, n);
    te_barrier(team);
    for (int32_t t = team->ith; t < n; t += team->nth) {
        float *row = g + (ptrdiff_t)t * n_ff;
        uint8_t *mask = s->mask + off + (ptrdiff_t)t * n_ff;
        const float least = cut_of(row, n_ff, w->cut);
        for (int32_t j = 0; j < n_ff; j++) {
            mask[j] = row[j] > least;
            row[j] = -least;
        }
    }
    const te_ffn f = pi_ffn_operator(s->model, w);
    te_ffn_io io = {.x = s->h + (size_t)t0 * n_embd,
                    .ldx = n_embd,
                    .n_tok = n,
                    .mask = s->mask + off,
                    .ld_mask = (size_t)n_ff,
                    .by_neuron = true,
                    .y = y,
                    .ldy = n_embd,
                    .gate_add = g,
                    .ld_add = (size_t)n_ff,
                    .fired = pi_fired_of(s, r->l)};
    if (!w->down_t.w) pi_keep_hidden(s, team, w, t0, n, &io);
    te_barrier(team);
    te_ffn_counts part = {0};
    te_op_ffn(team, s->ws, &f, (te_rows){NULL, 0, n_ff}, true, &io, &part);
    part.listed = team->ith == 0 ? (int64_t)n * n_ff : 0;
    if (team->ith == 0) {
        part.rows += n_ff;
        part.bytes += pi_mat_bytes(&w->gate);
    }
    add_counts(&s->count[(ptrdiff_t)r->l * s->options.n_threads + team->ith].ffn, &part, sparse_tokens);
    if (w->down_t.w) return;
    te_barrier(team);
    const te_linear out = {.w = w->down, .y = y, .ldy = n_embd, .add = true};
    pi_linear(s, team, &out, 1, s->up + off, (size_t)n_ff, t0, n);
    pi_count_down(s, team, r->l, &w->down);
}

static void run_part(pi_block_run *r, int32_t t0, int32_t n, ffn_mode mode, bool sparse_tokens) {
    const pi_session *s = r->s;
    const pi_ffn *w = &r->block->ffn;
    /* Of one token that leaves nothing out, whole matrices one after the other are longer streams than groups of their
     * rows in turn: F16, 2 threads, 82 instead of 73 % of the read rate for the whole token. */
    const bool whole_product = (mode == FFN_DENSE && (!w->down_t.w || n == 1 || w->cuts)) || w->sub_norm;
    const bool adapted = w->cuts && pi_adapts_ffn(r->layer);
    if (t0 < s->chunk.n_prefill || whole_product || adapted || s->tap[r->l].hidden) {
        run_products(r, t0, n, mode, sparse_tokens);
        return;
    }
    if (w->cuts) {
        run_cut(r, t0, n, sparse_tokens);
        return;
    }
    const te_rows all = {NULL, 0, pi_n_ff(w)}, listed = {s->list, 0, r->n_list};
    run_rows(r, t0, n, mode, mode == FFN_MASKED ? listed : all, sparse_tokens);
}

static void run(pi_block_run *r) {
    const pi_session *s = r->s;
    const pi_chunk *c = &s->chunk;
    const pi_ffn *w = &r->block->ffn;
    const int32_t act = s->model->info.activation;
    const int32_t border[] = {0, c->first_dense, c->n_prefill, c->first_dense + c->n_dense, c->n_tok};
    const ffn_mode mode = pi_has_mask(s)                             ? FFN_MASKED
                          : s->options.sparsity == PI_SPARSITY_DENSE ? FFN_DENSE
                          : !pi_is_relu(act) && !w->cuts             ? FFN_DENSE
                                                                     : FFN_EXACT;
    pi_tap_rows(s, r->team, s->h, s->model->info.n_embd, s->tap[r->l].norm);
    for (int32_t i = 0; i < 4; i++) {
        const int32_t t0 = border[i] > r->from ? border[i] : r->from, n = border[i + 1] - t0;
        const bool dense = i == 1 || i == 2; /* if there are such tokens */
        if (n <= 0) continue;
        if (t0 > 0) te_barrier(r->team); /* the operators share their workspace */
        run_part(r, t0, n, dense ? FFN_EXACT : mode, !dense);
    }
}

static void prepare(pi_block_run *r) {
    pi_tap_rows(r->s, r->team, r->s->x, r->s->model->info.n_embd, r->s->tap[r->l].input);
    pi_make_input(r, r->from);
    r->n_list = pi_predict(r->s, r->team, r->layer, r->l, r->from);
}

/* Files have the logarithms that training moves: alphas are softplus of them. */
static pi_status read_curve(const pi_model *m, int32_t i, te_xielu *out) {
    const te_gguf *g = m->file->gguf;
    const int32_t n = m->info.n_layer;
    PI_TRY(pi_key_f32_of(g, m->arch->name, "xielu.alpha_p", n, i, &out->alpha_p));
    PI_TRY(pi_key_f32_of(g, m->arch->name, "xielu.alpha_n", n, i, &out->alpha_n));
    PI_TRY(pi_key_f32_of(g, m->arch->name, "xielu.beta", n, i, &out->beta));
    PI_TRY(pi_key_f32_of(g, m->arch->name, "xielu.eps", n, i, &out->eps));
    if (!isfinite(out->alpha_p + out->alpha_n + out->beta + out->eps))
        return PI_FAIL(PI_ERROR_FORMAT, "%s.xielu of layer %d is not finite", m->arch->name, i);
    out->alpha_p = log1pf(expf(-fabsf(out->alpha_p))) + fmaxf(out->alpha_p, 0);
    out->alpha_n = log1pf(expf(-fabsf(out->alpha_n))) + fmaxf(out->alpha_n, 0) + out->beta;
    return PI_OK;
}

static pi_status bind_predictor(pi_model *m, int32_t i, int32_t n_ff, pi_ffn *l) {
    const pi_model_info *c = &m->info;
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.fc1.weight", i), 0, c->n_embd, true, &l->fc1));
    if (!l->fc1.w) {
        if (te_gguf_is_powerinfer(m->file->gguf))
            return PI_FAIL(PI_ERROR_FORMAT,
                           "the file has no tensor blk.%d.fc1.weight, the predictor of a PowerInfer model", i);
        return PI_OK;
    }
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.fc2.weight", i), n_ff, l->fc1.n_rows, false, &l->fc2));
    if (l->fc1.n_rows > m->max_rank) m->max_rank = l->fc1.n_rows;
    const te_type_info *type = m->options.predictor_type < 0 ? NULL : te_type_get(m->options.predictor_type);
    if (type && (c->n_embd % type->block_weights || l->fc1.n_rows % type->block_weights))
        return PI_FAIL(PI_ERROR_ARGUMENT,
                       "the predictor of layer %d (rank %d, width %d) cannot be %s, which has blocks of %d", i,
                       l->fc1.n_rows, c->n_embd, type->name, type->block_weights);
    return PI_OK;
}

static pi_status bind(pi_model *m, int32_t i, pi_block *b) {
    const pi_model_info *c = &m->info;
    const pi_arch *a = m->arch;
    pi_ffn *l = &b->ffn;
    const int32_t n_ff = m->n_ff ? m->n_ff[i] : c->n_ff;
    const pi_norm *before = &m->layer[i].block[0].norm; /* of blocks side by side one norm may serve both */
    const bool apart = a->maybe_parallel && pi_bind_has(m, pi_name_of("blk.%d.ffn_norm.weight", i));
    if (!m->layer[i].parallel || apart)
        PI_TRY(pi_bind_ffn_norm(m, i, &b->norm));
    else if (pi_bind_has(m, pi_name_of("blk.%d.attn_norm_2.weight", i)))
        PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.attn_norm", i).text, false, &b->norm));
    else
        b->norm = *before;
    if (a->post_norm) PI_TRY(pi_bind_norm(m, pi_name_of("blk.%d.post_ffw_norm", i).text, false, &b->post_norm));
    if (a->fused_gate_up) {
        PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ffn_up.weight", i), 2 * n_ff, c->n_embd, false, &l->gate));
        l->up = l->gate;
        l->gate.n_rows = l->up.n_rows = n_ff;
        l->up.w = (const char *)l->gate.w + l->gate.stride * (size_t)n_ff;
    } else {
        if (a->gated) PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ffn_gate.weight", i), n_ff, c->n_embd, false, &l->gate));
        PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ffn_up.weight", i), n_ff, c->n_embd, false, &l->up));
    }
    if (a->gate_cuts) {
        PI_TRY(pi_key_f32_of(m->file->gguf, a->name, "activation_sparsity_scale", c->n_layer, i, &l->cut));
        l->cuts = l->cut > -INFINITY;
        m->cuts_gates |= l->cuts;
    }
    if (c->activation == PI_ACTIVATION_XIELU) PI_TRY(read_curve(m, i, &l->curve));
    if (a->sub_norms) PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.ffn_sub_norm.weight", i), n_ff, false, &l->sub_norm));
    PI_TRY(pi_bind_mat(m, pi_name_of("blk.%d.ffn_down_t.weight", i), n_ff, c->n_embd, true, &l->down_t));
    if (!l->down_t.w) {
        const pi_name n = pi_name_of("blk.%d.ffn_down.weight", i);
        if (!pi_bind_has(m, n))
            return PI_FAIL(PI_ERROR_FORMAT, "the file has neither tensor blk.%d.ffn_down_t.weight nor %s", i, n.text);
        PI_TRY(pi_bind_mat(m, n, c->n_embd, n_ff, false, &l->down));
    }
    /* The fused operator has no place for biases of a gated layer's gate and up. */
    if (!a->gated) PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.ffn_up.bias", i), n_ff, !a->bias, &l->up_b));
    PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.ffn_down%s.bias", i, l->down_t.w ? "_t" : ""), c->n_embd, !a->bias,
                       &l->down_b));
    return bind_predictor(m, i, n_ff, l);
}

static int32_t matrices(pi_block *b, pi_block_mat out[PI_BLOCK_MATS]) {
    pi_ffn *f = &b->ffn;
    int32_t n = 0;
    out[n++] = (pi_block_mat){.mat = &f->fc1, .use = PI_MAT_PREDICTOR};
    out[n++] = (pi_block_mat){.mat = &f->fc2, .use = PI_MAT_PREDICTOR};
    out[n++] = (pi_block_mat){.mat = &f->gate, .use = PI_MAT_NEURONS};
    out[n++] = (pi_block_mat){.mat = &f->up, .use = PI_MAT_NEURONS};
    out[n++] = (pi_block_mat){.mat = f->down.w ? &f->down : &f->down_t, .by_neurons = &f->down_t, .use = PI_MAT_DOWN};
    return n;
}

const pi_block_kind pi_ffn_kind = {"feed-forward", bind, matrices, NULL, prepare, run, &pi_ffn_on_device, false};
