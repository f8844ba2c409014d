/* cost.c - sizes and times of a model's parts on either side; plan.h has the rules. */
#include <math.h>
#include <stdlib.h>

#include "../kv/kv.h"
#include "plan.h"

static uint64_t mat_bytes(size_t stride, int64_t n_rows) { return pi_space_matrix(stride, (uint64_t)n_rows); }

/* A matrix whose rows lie in two parts, either of which may be empty. */
static uint64_t in_two(uint64_t n_bytes) { return n_bytes + PI_DEVICE_ALIGN; }

static uint64_t vec_bytes(const float *v, int64_t n) { return v ? pi_space(sizeof(float) * (uint64_t)n) : 0; }

static double read_bytes(te_mat m) { return (double)pi_mat_bytes(&m); }

static pi_kv_shape kv_shape(const pi_plan_options *o) {
    return (pi_kv_shape){.n_ctx = o->n_ctx, .n_pool = o->n_pool, .n_seq = o->n_seq, .n_batch = o->n_batch};
}

static uint64_t pool_bytes(const pi_model *m, const pi_plan_options *o, const pi_attention *a, bool is_v,
                           int32_t type) {
    const pi_kv_shape s = kv_shape(o);
    return pi_space(pi_kv_layer_bytes(m, &s, a, is_v, type));
}

/* What a layer's adapters add. Of the feed-forward's the matrices with a row per neuron lie in two parts. */
static void adapter_cost(const pi_layer *w, pi_layer_cost *c) {
    for (int32_t k = 0; w->adapter && k < PI_N_ADAPT; k++) {
        const te_mat a = w->adapter[k].a, b = w->adapter[k].b;
        if (!a.w) continue;
        const bool down = k == PI_ADAPT_DOWN, neurons = k == PI_ADAPT_GATE || k == PI_ADAPT_UP;
        const uint64_t a_bytes = down ? in_two(mat_bytes(sizeof(float) * (size_t)a.n_rows, a.cols))
                                      : mat_bytes(pi_row_bytes(&a), a.n_rows),
                       b_bytes = mat_bytes(pi_row_bytes(&b), b.n_rows);
        const pi_attention *attention = pi_attention_of(w);
        const bool two = neurons || (k == PI_ADAPT_Q && attention && attention->gated);
        c->attention_bytes += a_bytes + (two ? in_two(b_bytes) : b_bytes);
        c->fixed_read += read_bytes(a) + read_bytes(b);
    }
}

static void attention_cost(const pi_model *m, const pi_plan_options *o, const pi_layer *w, pi_layer_cost *c) {
    const pi_model_info *i = &m->info;
    const pi_attention *a = pi_attention_of(w);
    const int32_t d = a ? a->n_embd_head : 0, n_q = i->n_head * d, n_kv = a ? a->n_head_kv * d : 0;
    const double half = o->n_ctx / 2.0; /* of a sequence that is as long as it will be on average */
    const pi_latent *latent = pi_latent_of(w);
    if (!a) return;
    const double position = (double)a->n_head_kv * ((double)pi_kv_row_bytes(m, a, false, o->type_k) +
                                                    (double)pi_kv_row_bytes(m, a, true, o->type_v)),
                 read = (a->window && a->window < half ? a->window : half) * position;
    if (w->n_host) {
        c->host_read += read;
        return;
    }
    c->fixed_read += read;
    if (latent)
        c->norm_bytes += vec_bytes(latent->norm, m->latent_rank) + vec_bytes(latent->q_norm, latent->q_a.n_rows);
    c->kv_bytes += pool_bytes(m, o, a, false, o->type_k) + pool_bytes(m, o, a, true, o->type_v);
    c->attention_bytes += vec_bytes(a->q_b, n_q) + (a->gated ? vec_bytes(a->q_b, n_q) : 0) + vec_bytes(a->k_b, n_kv) +
                          vec_bytes(a->v_b, n_kv) + vec_bytes(a->o_b, i->n_embd);
    c->norm_bytes += vec_bytes(a->q_norm, d) + vec_bytes(a->k_norm, d) + vec_bytes(a->v_norm, d);
    c->norm_bytes += vec_bytes(a->wide_q_norm, n_q) + vec_bytes(a->wide_k_norm, n_kv) + vec_bytes(a->sinks, i->n_head);
}

/* Of a block with a state: its vectors, and what all sequences remember. */
static void recurrent_cost(const pi_plan_options *o, const pi_block *b, pi_layer_cost *c) {
    const pi_recurrent *r = &b->recurrent;
    const uint64_t bytes = sizeof(float) * (uint64_t)pi_recurrent_floats(r);
    c->kv_bytes += pi_space(bytes) * (uint64_t)pi_states_places(o->n_seq, o->n_guesses);
    c->fixed_read += 2 * (double)bytes;
    c->norm_bytes += vec_bytes(r->conv.w, (int64_t)r->conv.width * r->conv.n_channels);
    c->norm_bytes += vec_bytes(r->conv.b, r->conv.n_channels);
    if (b->kind == &pi_mamba_kind)
        c->norm_bytes += vec_bytes(b->mamba.a, r->n_head) + vec_bytes(b->mamba.d, r->n_head) +
                         vec_bytes(b->mamba.dt_b, r->n_head) + vec_bytes(b->mamba.norm, (int64_t)r->n_head * r->n_v);
    if (b->kind == &pi_delta_kind)
        c->norm_bytes +=
            vec_bytes(b->delta.a, r->n_head) + vec_bytes(b->delta.dt_b, r->n_head) + vec_bytes(b->delta.norm, r->n_v);
}

/* Matrices of gated heads' queries and gates are one in the file, two on a device. */
static uint64_t product_bytes(const pi_block *b, const te_mat *m) {
    const bool two = b->kind == &pi_attention_kind && b->attention.gated && m->w == b->attention.q.w;
    return two ? 2 * mat_bytes(pi_row_bytes(m), m->n_rows / 2) : mat_bytes(pi_row_bytes(m), m->n_rows);
}

/* What a block of any kind has: norms, and matrices that are multiplied whole. */
static void block_cost(const pi_model *m, const pi_plan_options *o, const pi_layer *w, int32_t k, pi_layer_cost *c) {
    pi_block b = w->block[k];
    const bool here = k >= w->n_host && k < w->n_blocks - w->n_tail;
    const bool shared = k > 0 && b.norm.w == w->block[0].norm.w; /* by blocks side by side */
    if (here && !shared) c->norm_bytes += vec_bytes(b.norm.w, m->info.n_embd) + vec_bytes(b.norm.b, m->info.n_embd);
    if (here) c->norm_bytes += vec_bytes(b.post_norm.w, m->info.n_embd) + vec_bytes(b.post_norm.b, m->info.n_embd);
    pi_block_mat mats[PI_BLOCK_MATS];
    const int32_t n = b.kind->matrices(&b, mats);
    for (int32_t i = 0; i < n; i++) {
        te_mat mat = *mats[i].mat;
        if (mats[i].use != PI_MAT_PRODUCT && mats[i].use != PI_MAT_HEADS) continue;
        if (!here) {
            c->host_read += read_bytes(mat);
            continue;
        }
        if (mats[i].use == PI_MAT_HEADS) mat.type = pi_space_heads(mat.type);
        c->attention_bytes += product_bytes(&w->block[k], &mat);
        c->fixed_read += read_bytes(mat);
    }
    if (here && b.kind->recurrent) recurrent_cost(o, &b, c);
}

static void predictor_cost(const pi_model *m, const pi_plan_options *o, const pi_ffn *w, pi_layer_cost *c) {
    if (o->sparsity != PI_SPARSITY_PREDICTED) return;
    if (m->info.predictor == PI_PREDICTOR_SIGN) {
        c->predictor_bytes = in_two(mat_bytes(sizeof(uint64_t) * (size_t)m->sign_words, m->info.n_ff));
        c->fixed_read += (double)pi_sign_bytes(m);
    } else {
        c->predictor_bytes =
            mat_bytes(pi_row_bytes(&w->fc1), w->fc1.n_rows) + in_two(mat_bytes(pi_row_bytes(&w->fc2), w->fc2.n_rows));
        c->fixed_read += read_bytes(w->fc1) + read_bytes(w->fc2);
    }
}

/* Whether a down stored by output is so in memory, too: floats of ReLU models are transposed by loading. */
static bool stays_by_output(const pi_model *m, const pi_ffn *w) {
    return !w->down_t.w && !(te_type_get(w->down.type)->block_weights == 1 && pi_is_relu(m->info.activation));
}

/* A feed-forward all of which lies where its layer lies, as attention does (pi_is_whole_ffn). */
static void whole_ffn_cost(const pi_model *m, const pi_plan_options *o, const pi_ffn *w, pi_layer_cost *c) {
    const te_mat down = w->down_t.w ? w->down_t : w->down;
    c->block = 1;
    c->norm_bytes += vec_bytes(w->down_b, m->info.n_embd) + vec_bytes(w->up_b, m->info.n_ff);
    c->list_bytes = pi_space(sizeof(int32_t)); /* of neurons that are not there: none */
    if (o->count_neurons && !m->info.n_expert)
        c->list_bytes += in_two(pi_space(sizeof(int32_t) * (uint64_t)m->info.n_ff));
    c->attention_bytes += mat_bytes(pi_row_bytes(&w->gate), w->gate.n_rows);
    c->attention_bytes += mat_bytes(pi_row_bytes(&w->up), w->up.n_rows);
    if (w->cuts)
        c->attention_bytes += mat_bytes(te_row_bytes(down.type, m->info.n_ff), m->info.n_embd);
    else
        c->attention_bytes += w->down_t.w || stays_by_output(m, w)
                                  ? mat_bytes(pi_row_bytes(&down), down.n_rows)
                                  : mat_bytes(te_row_bytes(down.type, m->info.n_embd), m->info.n_ff);
    c->fixed_read += read_bytes(w->gate) + read_bytes(w->up) + read_bytes(down);
}

static void ffn_cost(const pi_model *m, const pi_plan_options *o, const pi_layer *layer, pi_layer_cost *c) {
    const pi_ffn *w = pi_ffn_of(layer);
    const pi_model_info *i = &m->info;
    c->block = 1;
    c->norm_bytes += vec_bytes(w->down_b, i->n_embd);
    c->gate_stride = pi_row_bytes(&w->gate);
    c->up_stride = pi_row_bytes(&w->up);
    double row = 0, column = 0; /* of down, per neuron */
    if (w->down_t.w) {
        c->down_stride = pi_row_bytes(&w->down_t);
        row = (double)c->down_stride;
    } else if (stays_by_output(m, w)) {
        c->down_stride = pi_row_bytes(&w->down);
        c->column_rows = i->n_embd;
        c->block = te_type_get(w->down.type)->block_weights;
        column = (double)c->down_stride * i->n_embd / i->n_ff;
    } else {
        c->down_stride = (size_t)te_type_get(w->down.type)->block_bytes * (size_t)i->n_embd;
        row = (double)c->down_stride;
    }
    const double gate = (double)c->gate_stride, up = (double)c->up_stride;
    switch (o->sparsity) {
    case PI_SPARSITY_PREDICTED:
        c->always_read = column;
        c->active_read = gate + up + row;
        break;
    case PI_SPARSITY_EXACT:
        c->always_read = column + (w->gate.w ? gate : up);
        c->active_read = (w->gate.w ? up : 0) + row;
        break;
    default:
        c->always_read = column + gate + up + row;
    }
    const te_mat down = w->down_t.w ? w->down_t : w->down;
    c->zero_copy = o->zero_copy_bytes_per_s > 0 && !c->column_rows && !pi_adapts_ffn(layer) &&
                   pi_space_reads_rows(w->up.type, pi_row_bytes(&w->up)) && down.type == w->up.type &&
                   (!w->gate.w || w->gate.type == w->up.type);
    const uint64_t ids = pi_space(sizeof(int32_t) * (uint64_t)i->n_ff);
    c->list_bytes = ids;
    if (o->count_neurons) c->list_bytes += in_two(ids);
    if (c->column_rows) c->list_bytes += pi_space(sizeof(int32_t) * (uint64_t)(i->n_ff / c->block));
    if (w->up_b) c->list_bytes += vec_bytes(w->up_b, i->n_ff) + PI_DEVICE_ALIGN; /* in two parts */
}

/* P(N > x) of a standard normal N, and the x for a probability. */
static double above(double x) { return erfc(x / sqrt(2)) / 2; }
static double quantile(double p) {
    double lo = -8, hi = 8;
    for (int32_t i = 0; i < 50; i++) *(above((lo + hi) / 2) > p ? &lo : &hi) = (lo + hi) / 2;
    return (lo + hi) / 2;
}

/* How often each of n experts is used, the most used first: its score is noise and ROUTER_SKEW times what it always is,
 * which is drawn as the noise is; used are those above a limit that lets n_used of them through. */
static void assume_uses(int32_t n, int32_t n_used, double *used) {
    static const double router_skew = 0.5;
    double lo = -16, hi = 16, sum = 0;
    for (int32_t step = 0; step < 50; step++) {
        const double limit = (lo + hi) / 2;
        sum = 0;
        for (int32_t e = 0; e < n; e++) {
            if (step == 0) used[e] = router_skew * quantile((e + 0.5) / n); /* what it always is */
            sum += above(limit - used[e]);
        }
        *(sum > n_used ? &lo : &hi) = limit;
    }
    for (int32_t e = 0; e < n; e++) used[e] = above((lo + hi) / 2 - used[e]);
}

/* An expert is one neuron whose rows are all of its own. */
static pi_status experts_cost(const pi_model *m, const pi_plan_options *o, const pi_layer *layer, pi_layer_cost *c) {
    static const double silent = 0.6; /* SmallThinker's neurons, at least */
    const pi_experts *w = pi_experts_of(layer);
    const te_mat *down = pi_expert_mat(w, 2);
    c->block = 1;
    c->used = malloc(sizeof *c->used * (size_t)w->n_expert);
    if (!c->used) return PI_FAIL(PI_ERROR_MEMORY, "out of memory planning %d experts", w->n_expert);
    assume_uses(w->n_expert, w->n_used, c->used);
    c->norm_bytes += vec_bytes(w->choice_b, w->n_expert) + vec_bytes(w->shared_router, m->info.n_embd);
    c->norm_bytes += vec_bytes(w->router_b, w->n_expert) + vec_bytes(w->gate_b, w->gate.n_rows) +
                     vec_bytes(w->up_b, w->up.n_rows) + vec_bytes(w->down_b, (int64_t)w->n_expert * m->info.n_embd);
    const pi_norm *const norms[] = {&w->router_norm, &w->shared_norm, &w->shared_post_norm, &w->own_post_norm};
    for (int32_t k = 0; k < 4; k++) c->norm_bytes += vec_bytes(norms[k]->w, m->info.n_embd);
    c->norm_bytes += vec_bytes(w->factor, w->n_expert);
    c->gate_stride = pi_space_row(pi_row_bytes(&w->gate)) * (size_t)w->n_ff;
    c->up_stride = pi_space_row(pi_row_bytes(&w->up)) * (size_t)w->n_ff;
    c->down_stride = pi_space_row(pi_row_bytes(down)) * (size_t)(down->n_rows / w->n_expert);
    c->active_read = (read_bytes(w->gate) + read_bytes(w->up) + read_bytes(*down)) / w->n_expert;
    if (o->sparsity == PI_SPARSITY_EXACT) {
        if (w->down_t.w) c->active_read -= silent * read_bytes(*down) / w->n_expert;
        if (w->gate.w) c->silent_read = silent * read_bytes(w->up) / w->n_expert;
    }
    c->n_used = w->n_used;
    c->zero_copy = o->zero_copy_bytes_per_s > 0 && w->down.w;
    const te_mat *const mats[] = {&w->gate, &w->up, down};
    for (int32_t k = 0; k < 3; k++)
        c->zero_copy = c->zero_copy && (!mats[k]->w || pi_space_reads_rows(mats[k]->type, pi_row_bytes(mats[k])));
    if (c->zero_copy) c->list_bytes = pi_space(sizeof(int32_t) * ((uint64_t)w->n_used + 1));
    return PI_OK;
}

static uint64_t converted(te_mat m) {
    return m.w ? pi_space_converted(m.type, (uint64_t)m.n_rows, (uint64_t)m.cols) : 0;
}

/* Of all matrices that a prompt is multiplied with. */
static uint64_t largest_converted(const pi_model *m) {
    uint64_t n = 0;
    for (int32_t l = 0; l < m->info.n_layer; l++) {
        pi_layer *w = &m->layer[l];
        for (int32_t i = 0; i < w->n_blocks; i++) {
            pi_block_mat mats[PI_BLOCK_MATS];
            const int32_t n_mats = w->block[i].kind->matrices(&w->block[i], mats);
            for (int32_t k = 0; k < n_mats; k++)
                if (mats[k].use != PI_MAT_PREDICTOR && mats[k].use != PI_MAT_HEADS)
                    n = pi_max_u64(n, converted(*mats[k].mat));
        }
        for (int32_t k = 0; w->adapter && k < PI_N_ADAPT; k++)
            n = pi_max_u64(n, pi_max_u64(converted(w->adapter[k].a), converted(w->adapter[k].b)));
    }
    n = pi_max_u64(n, pi_max_u64(converted(m->output_adapter.a), converted(m->output_adapter.b)));
    return pi_max_u64(n, converted(m->output));
}

/* Host memory that kernels read: the file, and what loading moves of layers (copy.c), whether it has or will. Copies of all
 * weights (use_mmap 0) are no more: the file is then not read by kernels. */
static uint64_t mapped_bytes(const pi_model *m) {
    uint64_t n = te_gguf_n_bytes(m->file->gguf);
    for (int32_t l = 0; l < m->info.n_layer; l++) {
        const pi_ffn *w = pi_ffn_of(&m->layer[l]);
        if (!w) continue;
        const bool moved = w->down_t.w && m->info.n_layer_down_transposed,
                   to_move = !w->down_t.w && !stays_by_output(m, w);
        if (moved || to_move) n += pi_mat_bytes(moved ? &w->down_t : &w->down);
    }
    return n;
}

/* What kernels are asked for by chunks of n_batch tokens. */
static pi_space_shape shape(const pi_model *m, const pi_plan_options *o) {
    const pi_model_info *i = &m->info;
    pi_space_shape s = {.n_tok = (uint64_t)o->n_batch,
                        .n_embd = (uint64_t)i->n_embd,
                        .n_ff = (uint64_t)i->n_ff,
                        .n_head = (uint64_t)i->n_head,
                        .n_embd_head = (uint64_t)i->n_embd_head,
                        .n_inner = pi_max_u64((uint64_t)m->state_out, m->cuts_gates ? (uint64_t)i->n_ff : 0),
                        .sign_words = (uint64_t)m->sign_words,
                        .adapter_rank = m->adapted_ffn ? (uint64_t)m->adapter_rank : 0,
                        .gated = i->is_gated,
                        .predicted = o->sparsity == PI_SPARSITY_PREDICTED,
                        .mapped_bytes = mapped_bytes(m),
                        .matrix_bytes = largest_converted(m)};
    for (int32_t l = 0; l < i->n_layer; l++) {
        const pi_ffn *w = pi_ffn_of(&m->layer[l]);
        s.by_output |= w && stays_by_output(m, w);
        const pi_experts *e = pi_experts_of(&m->layer[l]);
        if (!e) continue;
        s.n_expert = pi_max_u64(s.n_expert, (uint64_t)e->n_expert);
        s.n_used = pi_max_u64(s.n_used, (uint64_t)e->n_used);
        s.n_ff_expert = pi_max_u64(s.n_ff_expert, (uint64_t)(e->n_ff > e->n_ff_shared ? e->n_ff : e->n_ff_shared));
    }
    return s;
}

static uint64_t scratch_bytes(const pi_model *m, const pi_plan_options *o) {
    const pi_model_info *i = &m->info;
    const uint64_t n_tok = (uint64_t)o->n_batch, n_embd = (uint64_t)i->n_embd,
                   n_q = (uint64_t)i->n_head * (uint64_t)i->n_embd_head,
                   n_kv = (uint64_t)i->n_head_kv * (uint64_t)i->n_embd_head,
                   n_blocks = ((uint64_t)o->n_ctx + PI_KV_BLOCK - 1) / PI_KV_BLOCK, rank = (uint64_t)m->adapter_rank;
    uint64_t n_tables = 1;
    bool states = false; /* on devices */
    for (int32_t l = 0; l < i->n_layer; l++) {
        if (pi_kv_has_window(o->n_ctx, pi_attention_of(&m->layer[l]))) n_tables = 2;
        states |= pi_recurrent_on_device(&m->layer[l]) != NULL;
    }
    const uint64_t n_state = states ? n_tok : 0;
    /* What a hybrid session takes for itself (native/hybrid/upload.c). */
    const uint64_t words[] = {
        n_tok * n_embd,
        n_tok * n_embd,
        n_tok * n_embd, /* x, its norm, the sum of a feed-forward */
        n_tok * n_q,
        n_tok * n_q,
        n_tok * n_kv,
        n_tok * n_kv,                                                           /* q, attention's output, k, v */
        n_tok * pi_latent_q(m),                                                 /* and before it is a latent one's */
        n_tok * (uint64_t)m->max_rank,                                          /* the predictor's hidden values */
        rank ? 3 * n_tok * rank + 128 : 0,                                      /* and those of adapters */
        n_tok * (n_tables * n_blocks + pi_rope_floats(m, m->n_ropes) + 2) + 80, /* tables, angles, positions */
        m->state_floats ? 4 * (n_tok + 17) + 16 : 0,                            /* whose tokens are whose */
        pi_gates_heads(m) ? n_tok * n_q : 0,
        m->cuts_gates ? n_tok * (uint64_t)i->n_ff : 0, /* gates that are cut, ups beside them */
        m->cuts_gates ? n_tok * (uint64_t)i->n_ff : 0,
        n_state * (uint64_t)(m->state_in + 3), /* of blocks with a state: their inputs, these convolved, */
        m->state_gates ? n_state * (uint64_t)(m->state_in + 3) : 0,
        n_state * (uint64_t)(m->state_z + 3), /* gates, and what they give */
        n_state * (uint64_t)(m->state_gates + 7),
        n_state * (uint64_t)(m->state_out + 3),
        3 * (uint64_t)i->n_layer + 16,                          /* counts */
        n_tok * (uint64_t)(i->n_expert + 2 * i->n_expert_used), /* routers' scores, choices and weights */
        n_tok * (uint64_t)i->n_expert_used,                     /* (in two buffers) */
        i->n_expert ? 6 * n_tok + 8 * 64 : 0,                   /* of an expert of all tokens, and rounding */
        m->arch->experts_beside ? n_tok * n_embd : 0,           /* of a mixture beside a feed-forward */
        m->arch->experts_beside ? n_tok * n_embd : 0,           /* (its input, its part) */
        (uint64_t)i->n_expert_used,                             /* which of them are read in host memory */
        PI_SMALL_BATCH * (uint64_t)i->n_expert_used,            /* a guess at the next layer's choice, */
        PI_SMALL_BATCH * (uint64_t)i->n_expert_used,            /* its weights, */
        (uint64_t)i->n_expert_used,                             /* and which are read in host memory */
        3 * (uint64_t)i->n_layer * (uint64_t)i->n_expert + (i->n_expert ? 17 : 0), /* where they are, uses, lists */
        (uint64_t)i->n_layer,                                                      /* thresholds */
        1,                                                                         /* the number of a hand-over */
    };
    const pi_space_shape kernels = shape(m, o);
    uint64_t n = pi_space_kernels(&kernels);
    /* Logits are made in place of x's norm and what is behind it here, up to a latent one's: what of them is more. */
    uint64_t place = 0;
    for (size_t k = 1; k < 8; k++) place += pi_space(4 * words[k]);
    const uint64_t rows = pi_space_logits((uint64_t)o->n_seq, n_tok, (uint64_t)i->n_vocab);
    n += rows > place ? pi_space(rows - place) : 0;
    for (size_t k = 0; k < sizeof words / sizeof *words; k++) n += pi_space(4 * words[k]);
    /* Programs of more sequences than a small batch, one recorded for each number of them. */
    const uint64_t n_seq = (uint64_t)o->n_seq, most = n_tok < PI_MANY ? n_tok : PI_MANY,
                   many = n_seq < most ? n_seq : most;
    if (many > PI_SMALL_BATCH) n += (many - PI_SMALL_BATCH) * PI_GRAPH_BYTES * (uint64_t)i->n_layer;
    return n;
}

double pi_head_us(const pi_cost *cost, const pi_plan_options *o, bool on_device, bool uses_device) {
    const double rate = on_device ? o->gpu_bytes_per_s : o->cpu_bytes_per_s;
    return cost->head_read / (rate * 1e-6) + (uses_device && !on_device ? o->handover_us : 0);
}

/* What helps with the head begins later, by the way of x. */
static void helper_cost(const pi_model *m, const pi_plan_options *o, pi_cost *out) {
    const int32_t n = m->info.n_vocab, rows = n / 16 * 7 / 64 * 64;
    if (m->output_adapter.a.w || !pi_space_rows_alone(m->output.type)) return;
    if (pi_head_us(out, o, true, true) * rows / n <= o->handover_us) return;
    out->helper_rows = rows;
    out->helper_bytes = mat_bytes(pi_row_bytes(&m->output), rows) + vec_bytes(m->output_norm.w, m->info.n_embd) +
                        vec_bytes(m->output_norm.b, m->info.n_embd) + vec_bytes(m->output_b, rows);
}

pi_status pi_cost_new(const pi_model *m, const pi_plan_options *o, pi_cost *out) {
    const pi_model_info *i = &m->info;
    *out = (pi_cost){.n_placed = i->n_placed, .n_layer = i->n_layer};
    out->layer = calloc((size_t)i->n_layer, sizeof *out->layer);
    if (!out->layer) return PI_FAIL(PI_ERROR_MEMORY, "out of memory planning %d layers", i->n_layer);
    uint64_t largest = 0, least = 0; /* least: an expert is loaded whole */
    for (int32_t l = 0; l < i->n_layer; l++) {
        pi_layer_cost *c = &out->layer[l];
        for (int32_t k = 0; k < m->layer[l].n_blocks; k++) block_cost(m, o, &m->layer[l], k, c);
        attention_cost(m, o, &m->layer[l], c);
        adapter_cost(&m->layer[l], c);
        if (m->layer[l].parallel) c->beside_read = c->fixed_read;
        c->n = pi_is_whole_ffn(m, &m->layer[l]) ? 0 : pi_n_placed(m, &m->layer[l]);
        if (pi_experts_of(&m->layer[l])) {
            const pi_status st = experts_cost(m, o, &m->layer[l], c);
            if (st != PI_OK) {
                pi_cost_free(out);
                return st;
            }
            const uint64_t one = pi_cost_ffn(out, l, 1);
            if (one > least) least = one;
        } else if (pi_is_whole_ffn(m, &m->layer[l])) {
            whole_ffn_cost(m, o, pi_ffn_of(&m->layer[l]), c);
        } else if (!pi_ffn_of(&m->layer[l])) {
            c->block = 1;
        } else {
            predictor_cost(m, o, pi_ffn_of(&m->layer[l]), c);
            ffn_cost(m, o, &m->layer[l], c);
        }
        const uint64_t ffn = pi_cost_ffn(out, l, c->n);
        if (ffn > largest) largest = ffn;
    }
    const te_mat *head[] = {&m->output, &m->output_adapter.a, &m->output_adapter.b};
    for (size_t k = 0; k < sizeof head / sizeof *head; k++) {
        if (!head[k]->w) continue;
        out->head_bytes += mat_bytes(pi_row_bytes(head[k]), head[k]->n_rows);
        out->head_read += read_bytes(*head[k]);
    }
    out->head_norm_bytes = vec_bytes(m->output_norm.w, i->n_embd) + vec_bytes(m->output_norm.b, i->n_embd) +
                           vec_bytes(m->output_b, i->n_vocab);
    helper_cost(m, o, out);
    out->scratch_bytes = scratch_bytes(m, o);
    if (o->n_batch > PI_SMALL_BATCH)
        out->staging_bytes = PI_STAGES * pi_max_u64(largest < PI_STAGE_BYTES ? largest : PI_STAGE_BYTES, least);
    return PI_OK;
}

void pi_cost_free(pi_cost *c) {
    for (int32_t l = 0; c->layer && l < c->n_layer; l++) free(c->layer[l].used);
    free(c->layer);
    c->layer = NULL;
}

uint64_t pi_cost_fixed(const pi_layer_cost *c) {
    return c->kv_bytes + c->attention_bytes + c->norm_bytes + c->predictor_bytes;
}

uint64_t pi_cost_ffn(const pi_cost *cost, int32_t l, int32_t n_hot) {
    const pi_layer_cost *c = &cost->layer[l];
    uint64_t n = c->list_bytes;
    if (!n_hot) return n;
    n += mat_bytes(c->up_stride, n_hot);
    if (c->gate_stride) n += mat_bytes(c->gate_stride, n_hot);
    if (c->column_rows)
        n += mat_bytes(c->down_stride / (size_t)(c->n / c->block) * (size_t)(n_hot / c->block), c->column_rows);
    else
        n += mat_bytes(c->down_stride, n_hot);
    return n;
}

pi_activity pi_cost_activity(const pi_cost *cost, const pi_plan_options *o, int32_t l) {
    pi_activity a = {.same = 1};
    const double *used = cost->layer[l].used;
    if (o->sparsity == PI_SPARSITY_DENSE && !used) return a;
    const double overshoot = o->sparsity == PI_SPARSITY_PREDICTED && !used ? o->overshoot : 1;
    if (o->counts) {
        a.count = o->counts + (ptrdiff_t)l * cost->n_placed;
        a.scale = overshoot / ((double)o->n_tokens + 1);
    } else if (used) {
        a.used = used;
    } else if (o->active_share * overshoot < 1) {
        a.same = o->active_share * overshoot;
    }
    return a;
}

pi_layer_time pi_cost_time(const pi_cost *cost, const pi_plan_options *o, int32_t l, bool on_device,
                           const pi_share *n) {
    const pi_layer_cost *c = &cost->layer[l];
    const double gpu = o->gpu_bytes_per_s * 1e-6, cpu = o->cpu_bytes_per_s * 1e-6; /* bytes per us */
    pi_layer_time t = {0};
    t.fixed_us = on_device ? o->layer_us + (c->fixed_read - c->beside_read) / gpu : c->fixed_read / cpu;
    if (c->host_read > 0) t.fixed_us += c->host_read / cpu + (on_device ? o->handover_us : 0);
    if (n->n_hot > 0) t.gpu_ffn_us = o->ffn_us + pi_ffn_read(c, n->n_hot, n->active_hot) / gpu;
    if (n->n_pcie > 0) { /* side by side */
        const double us = o->ffn_us + pi_ffn_read(c, n->n_pcie, n->active_pcie) / (o->zero_copy_bytes_per_s * 1e-6);
        if (us > t.gpu_ffn_us) t.gpu_ffn_us = us;
    }
    if (on_device) t.gpu_ffn_us += c->beside_read / gpu;
    if (n->n_cold > 0)
        t.cpu_ffn_us = (pi_ffn_read(c, n->n_cold, n->active_cold) - n->active_cold * c->silent_read) / cpu;
    if (n->n_cold > 0 || !on_device) t.handover_us = o->handover_us;
    return t;
}

int32_t pi_cost_kept(const pi_cost *cost, const pi_plan_options *o, int32_t l, int32_t m) {
    const pi_layer_cost *c = &cost->layer[l];
    if (!c->zero_copy || !c->used) return 0;
    const double on_cpu = c->active_read / (o->cpu_bytes_per_s * 1e-6),
                 in_place = c->active_read / (o->zero_copy_bytes_per_s * 1e-6);
    int32_t best = 0;
    double least = 0;
    for (int32_t k = 0; k <= m; k++) {
        const double cpu = k < m ? o->handover_us + (m - k) * on_cpu : 0, gpu = k ? o->ffn_us + k * in_place : 0,
                     us = cpu > gpu ? cpu : gpu;
        if (k && us >= least) continue;
        best = k;
        least = us;
    }
    return best;
}

/* The same as a part of so many, which is a mean. Two kernels a layer do not pay where they seldom have work. */
static double kept_part(const pi_cost *cost, const pi_plan_options *o, int32_t l, double n_missing) {
    static const double least_kept = 0.75; /* measured on an H100: 1.3 are 9 % faster, 0.4 no faster */
    const int32_t most = cost->layer[l].n_used;
    if (!(n_missing > 0)) return 0;
    const int32_t m = n_missing < most ? (int32_t)n_missing : most;
    const double low = pi_cost_kept(cost, o, l, m), high = m < most ? pi_cost_kept(cost, o, l, m + 1) : low,
                 kept = low + (high - low) * (n_missing - m);
    return kept < least_kept ? 0 : kept / n_missing;
}

double pi_cost_zero_copy(const pi_cost *cost, const pi_plan_options *o, int32_t l, const pi_share *n) {
    const pi_layer_cost *c = &cost->layer[l];
    const double bytes = pi_ffn_read(c, n->n_cold, n->active_cold);
    if (!c->zero_copy || bytes <= 0) return 0;
    if (c->used) return kept_part(cost, o, l, n->active_cold);
    const double cpu = o->cpu_bytes_per_s * 1e-6, zero_copy = o->zero_copy_bytes_per_s * 1e-6,
                 gpu = o->gpu_bytes_per_s * 1e-6;
    double hot_us = 0;
    if (n->n_hot > 0) hot_us = o->ffn_us + pi_ffn_read(c, n->n_hot, n->active_hot) / gpu;
    const double cpu_us = bytes / cpu + o->handover_us - c->beside_read / gpu;
    const double even = (cpu_us - o->ffn_us) / (bytes / cpu + bytes / zero_copy); /* both sides end together */
    const double enough = (cpu_us - hot_us) / (bytes / cpu);                      /* the hot neurons take longest */
    const double part = even < enough ? even : enough;
    return part < 0 ? 0 : part > 1 ? 1 : part;
}
