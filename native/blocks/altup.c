/* altup.c - several residual streams, of which blocks change the first (Gemma 3n's AltUp). A layer begins with a guess at
 * all of them, and ends with what the first one became:
 *
 *     p_i = x_i + sum over j of P_ij x_j          P = predict . r(x_0)
 *     x_0 = what the layer's blocks make of p_0
 *     x_i = p_i + c_i (x_0 - p_0)                 c = 1 + correct . r(x_0)
 *     x_i += what the token's embedding for this layer says of scale * x_0, for all but the first
 *     r(x) = tanh(router . norm(x) / n_embd)
 *
 * The first layer makes the streams of the embedding, the last one puts them together again; products that do so have
 * the length of the first stream. s->x is x_0; s->stream has p_0, while the layer is computed, and the others. */
#include <math.h>
#include <string.h>

#include "../model/bind.h"
#include "../model/keys.h"
#include "ops.h"
#include "per_layer.h"

static float *stream(const pi_session *s, int32_t i, int32_t t) {
    return s->stream + ((size_t)i * (size_t)s->options.n_batch + (size_t)t) * (size_t)s->model->info.n_embd;
}

/* r(x) of a token. s->h is room to work. */
static void route(const pi_session *s, const pi_altup *w, int32_t t, float *out) {
    const pi_model *m = s->model;
    const int32_t n_embd = m->info.n_embd;
    const te_mat router = {w->router, sizeof(float) * (size_t)n_embd, TE_F32, n_embd, m->n_stream};
    float *h = s->h + (size_t)t * (size_t)n_embd;
    m->kernels->rms_norm(s->x + (size_t)t * (size_t)n_embd, w->router_norm, m->norm_eps, n_embd, h);
    m->kernels->rows_dot(&router, NULL, h, (size_t)n_embd, 1, out, (size_t)m->n_stream);
    for (int32_t i = 0; i < m->n_stream; i++) out[i] = tanhf(out[i]);
}

/* y = rows of n values each . r(x_0), of a token. */
static void coefficients(const pi_session *s, const pi_altup *w, const float *rows, int32_t n_rows, int32_t t) {
    const int32_t n = s->model->n_stream;
    float r[PI_MAX_STREAMS], *y = s->stream_c + (ptrdiff_t)t * PI_MAX_STREAMS * PI_MAX_STREAMS;
    route(s, w, t, r);
    for (int32_t k = 0; k < n_rows; k++) {
        y[k] = 0;
        for (int32_t j = 0; j < n; j++) y[k] += rows[k * n + j] * r[j];
    }
}

static float length(const float *x, int32_t n) {
    double sum = 0;
    for (int32_t c = 0; c < n; c++) sum += (double)x[c] * (double)x[c];
    return sqrtf((float)(sum / n));
}

/* What a row y that has the length of `as` is multiplied by. */
static float stretch(float as, const float *y, int32_t n) {
    static const float least = 1e-5F; /* of a square */
    return as / fmaxf(length(y, n), sqrtf(least));
}

/* The streams of the embedding. */
static void spread(const pi_block_run *r) {
    pi_session *s = r->s;
    const int32_t n_embd = s->model->info.n_embd, n_tok = s->chunk.n_tok;
    for (int32_t i = 1; i < s->model->n_stream; i++) {
        const te_mat w = pi_expert_rows(&r->block->altup.spread, i - 1, n_embd);
        const te_linear to = {.w = w, .y = stream(s, i, 0), .ldy = (size_t)n_embd};
        pi_linear(s, r->team, &to, 1, s->x, (size_t)n_embd, 0, n_tok);
        te_barrier(r->team);
    }
    for (int32_t t = r->team->ith; t < n_tok; t += r->team->nth) {
        const float as = length(s->x + (size_t)t * (size_t)n_embd, n_embd);
        for (int32_t i = 1; i < s->model->n_stream; i++) {
            float *y = stream(s, i, t);
            const float by = stretch(as, y, n_embd);
            for (int32_t c = 0; c < n_embd; c++) y[c] *= by;
        }
    }
    te_barrier(r->team);
}

/* Their mean, behind products. */
static void join(const pi_block_run *r) {
    pi_session *s = r->s;
    const int32_t n_embd = s->model->info.n_embd, n = s->model->n_stream, from = r->from;
    for (int32_t i = 1; i < n; i++) {
        const te_mat w = pi_expert_rows(&r->block->altup.join, i - 1, n_embd);
        const te_linear to = {.w = w, .y = stream(s, 0, from), .ldy = (size_t)n_embd};
        pi_linear(s, r->team, &to, 1, stream(s, i, from), (size_t)n_embd, from, s->chunk.n_tok - from);
        te_barrier(r->team);
        for (int32_t t = from + r->team->ith; t < s->chunk.n_tok; t += r->team->nth) {
            const float *y = stream(s, 0, t);
            float *x = s->x + (size_t)t * (size_t)n_embd, *as = s->stream_c + (ptrdiff_t)t * PI_MAX_STREAMS;
            if (i == 1) *as = length(x, n_embd);
            const float by = stretch(*as, y, n_embd), share = i + 1 == n ? 1 / (float)n : 1;
            for (int32_t c = 0; c < n_embd; c++) x[c] = (x[c] + by * y[c]) * share;
        }
        te_barrier(r->team);
    }
}

static void begin(pi_block_run *r) {
    const pi_session *s = r->s;
    const pi_altup *w = &r->block->altup;
    const int32_t n = s->model->n_stream, n_embd = s->model->info.n_embd;
    if (r->l == 0) spread(r);
    for (int32_t t = r->team->ith; t < s->chunk.n_tok; t += r->team->nth) coefficients(s, w, w->predict, n * n, t);
    te_barrier(r->team);
    int64_t lo, hi;
    te_share(r->team, n_embd, 16, &lo, &hi);
    for (int32_t t = 0; t < s->chunk.n_tok; t++) {
        const float *p = s->stream_c + (ptrdiff_t)t * PI_MAX_STREAMS * PI_MAX_STREAMS;
        float *x = s->x + (size_t)t * (size_t)n_embd;
        for (int64_t c = lo; c < hi; c++) {
            float old[PI_MAX_STREAMS];
            for (int32_t j = 0; j < n; j++) old[j] = j ? stream(s, j, t)[c] : x[c];
            for (int32_t i = 0; i < n; i++) {
                float v = old[i];
                for (int32_t j = 0; j < n; j++) v += p[i * n + j] * old[j];
                stream(s, i, t)[c] = v;
            }
            x[c] = stream(s, 0, t)[c];
        }
    }
    te_barrier(r->team);
}

static void prepare(pi_block_run *r) { (void)r; }

/* What the layer made of the first stream goes to all, and to s->h as embeddings are mixed with it. */
static void correct(const pi_block_run *r) {
    const pi_session *s = r->s;
    const pi_altup *w = &r->block->altup;
    const int32_t n = s->model->n_stream, n_embd = s->model->info.n_embd;
    for (int32_t t = r->from + r->team->ith; t < s->chunk.n_tok; t += r->team->nth)
        coefficients(s, w, w->correct, n, t);
    te_barrier(r->team);
    int64_t lo, hi;
    te_share(r->team, n_embd, 16, &lo, &hi);
    for (int32_t t = r->from; t < s->chunk.n_tok; t++) {
        const float *by = s->stream_c + (ptrdiff_t)t * PI_MAX_STREAMS * PI_MAX_STREAMS, *guess = stream(s, 0, t);
        float *x = s->x + (size_t)t * (size_t)n_embd, *h = s->h + (size_t)t * (size_t)n_embd;
        for (int64_t c = lo; c < hi; c++) {
            const float news = x[c] - guess[c];
            for (int32_t i = 1; i < n; i++) stream(s, i, t)[c] += (1 + by[i]) * news;
            x[c] = guess[c] + (1 + by[0]) * news;
            h[c] = w->scale[c] * x[c];
        }
    }
    te_barrier(r->team);
}

static void run(pi_block_run *r) {
    pi_session *s = r->s;
    const pi_altup *w = &r->block->altup;
    const int32_t n_embd = s->model->info.n_embd;
    correct(r);
    pi_per_layer_mix(r, &w->per_layer, s->h, s->out, false);
    te_barrier(r->team);
    for (int32_t t = r->from + r->team->ith; t < s->chunk.n_tok; t += r->team->nth) {
        float *y = s->out + (size_t)t * (size_t)n_embd;
        pi_norm_row(s->model, &w->norm, y, y);
        for (int32_t i = 1; i < s->model->n_stream; i++) s->model->kernels->add(y, n_embd, stream(s, i, t));
    }
    te_barrier(r->team);
    if (w->join.w) join(r);
}

static pi_status bind(pi_model *m, int32_t i, pi_block *b) {
    pi_altup *w = &b->altup;
    const int32_t n_embd = m->info.n_embd;
    const float *norm;
    float *of_router;
    int64_t n = 4, active = 0;
    PI_TRY(pi_key_i64(m->file->gguf, m->arch->name, "altup.num_inputs", 2, PI_MAX_STREAMS, &n, NULL));
    PI_TRY(pi_key_i64(m->file->gguf, m->arch->name, "altup.active_idx", 0, n - 1, &active, NULL));
    if (active)
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "%s.altup.active_idx is %lld; models whose blocks change stream 0 are known", m->arch->name,
                       (long long)active);
    if (!m->n_embd_layer)
        return PI_FAIL(PI_ERROR_FORMAT, "the file has no key %s.embedding_length_per_layer_input", m->arch->name);
    m->n_stream = (int32_t)n;
    if (i == 0) PI_TRY(pi_bind_mats(m, pi_name_of("altup_proj.weight"), m->n_stream - 1, n_embd, n_embd, &w->spread));
    if (i + 1 == m->info.n_layer)
        PI_TRY(pi_bind_mats(m, pi_name_of("altup_unembd_proj.weight"), m->n_stream - 1, n_embd, n_embd, &w->join));
    PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.altup_router_norm.weight", i), n_embd, false, &norm));
    PI_TRY(pi_bind_room(m, n_embd, &of_router));
    for (int32_t c = 0; c < n_embd; c++) of_router[c] = norm[c] / (float)n_embd;
    w->router_norm = of_router;
    PI_TRY(pi_bind_vecs(m, pi_name_of("blk.%d.altup_router.weight", i), m->n_stream, n_embd, &w->router));
    PI_TRY(pi_bind_vecs(m, pi_name_of("blk.%d.altup_predict_coef.weight", i), m->n_stream * m->n_stream, m->n_stream,
                        &w->predict));
    PI_TRY(pi_bind_vecs(m, pi_name_of("blk.%d.altup_correct_coef.weight", i), m->n_stream, m->n_stream, &w->correct));
    PI_TRY(pi_bind_vec(m, pi_name_of("blk.%d.altup_correct_scale.weight", i), n_embd, false, &w->scale));
    PI_TRY(pi_per_layer_bind(m, i, &w->per_layer));
    return pi_bind_norm(m, pi_name_of("blk.%d.post_norm", i).text, false, &w->norm);
}

static int32_t matrices(pi_block *b, pi_block_mat out[PI_BLOCK_MATS]) {
    pi_altup *w = &b->altup;
    te_mat *const mat[] = {&w->spread, &w->join, &w->per_layer.gate, &w->per_layer.proj};
    for (int32_t i = 0; i < 4; i++) out[i] = (pi_block_mat){.mat = mat[i], .use = PI_MAT_PRODUCT};
    return 4;
}

const pi_block_kind pi_altup_kind = {"several residual streams", bind, matrices, begin, prepare, run, NULL, false};
