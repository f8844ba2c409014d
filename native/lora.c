/* lora.c - low-rank adapters: a matrix W of a layer gets the company of two small ones, y = W x + b (a x).
 *
 * They are kept as floats beside the weights, which stay as they are in their mapping. Ranks are filled up with zeros
 * to whole vectors of the kernels. */
#include <stdlib.h>
#include <string.h>

#include "session.h"

enum { MAX_RANK = 4096, UNIT = 32 };

/* Where an adapter of one tensor goes: places from `which` on, of a layer. */
typedef struct target {
    pi_layer *layer;
    int32_t which, n; /* 3 for q, k and v in one matrix */
    int32_t rows[3];  /* of the matrix of each place */
    int32_t cols;
} target;

/* The matrices that a name stands for; false if this model has none. */
static bool find_shapes(const pi_model *m, target *t) {
    const pi_layer *l = t->layer;
    const te_mat *const mat[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up};
    if (t->which == PI_ADAPT_DOWN) {
        t->rows[0] = m->info.n_embd;
        t->cols = m->info.n_ff;
        return true;
    }
    for (int32_t i = 0; i < t->n; i++) {
        t->rows[i] = mat[t->which + i]->n_rows;
        t->cols = mat[t->which + i]->cols;
    }
    return mat[t->which]->w && (t->which > PI_ADAPT_V || m->arch->fused_qkv == (t->n == 3));
}

/* What a tensor's name stands for, "blk.N.NAME.weight"; false if an adapter of it is not for this model. */
static bool find_target(const pi_model *m, const char *tensor, target *out) {
    static const struct {
        const char *name;
        int32_t which, n;
    } places[] = {{"attn_qkv.weight", PI_ADAPT_Q, 3},    {"attn_q.weight", PI_ADAPT_Q, 1},
                  {"attn_k.weight", PI_ADAPT_K, 1},      {"attn_v.weight", PI_ADAPT_V, 1},
                  {"attn_output.weight", PI_ADAPT_O, 1}, {"ffn_gate.weight", PI_ADAPT_GATE, 1},
                  {"ffn_up.weight", PI_ADAPT_UP, 1},     {"ffn_down.weight", PI_ADAPT_DOWN, 1}};
    if (strncmp(tensor, "blk.", 4) != 0) return false;
    char *rest;
    const long n = strtol(tensor + 4, &rest, 10);
    if (rest == tensor + 4 || *rest != '.' || n < 0 || n >= m->info.n_layer) return false;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        if (strcmp(rest + 1, places[i].name) != 0) continue;
        *out = (target){.layer = &m->layer[n], .which = places[i].which, .n = places[i].n};
        return find_shapes(m, out);
    }
    return false;
}

static te_mat floats(const float *w, int32_t rows, int32_t cols) {
    return (te_mat){.w = w, .type = TE_F32, .stride = sizeof(float) * (size_t)cols, .cols = cols, .n_rows = rows};
}

pi_status pi_model_add_adapter(pi_model *m, const char *tensor, int32_t rank, float scale, const float *a,
                               const float *b) {
    target to;
    if (!m || !tensor || !a || !b) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_model_add_adapter: an argument is NULL");
    if (m->loaded < m->info.n_layer) return PI_FAIL(PI_ERROR_ARGUMENT, "an adapter needs a model that is loaded");
    if (m->ref.n != 1) return PI_FAIL(PI_ERROR_ARGUMENT, "an adapter cannot be added while sessions use the model");
    if (rank < 1 || rank > MAX_RANK)
        return PI_FAIL(PI_ERROR_ARGUMENT, "the adapter of %.100s has rank %d, must be 1..%d", tensor, rank, MAX_RANK);
    if (!find_target(m, tensor, &to))
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "an adapter of %.100s is not supported for this model", tensor);
    pi_layer *l = to.layer;
    if (l->adapter && l->adapter[to.which].a.w)
        return PI_FAIL(PI_ERROR_ARGUMENT, "%.100s has an adapter already", tensor);
    int32_t rows = 0;
    for (int32_t i = 0; i < to.n; i++) rows += to.rows[i];
    const size_t r = (size_t)rank, whole = (r + UNIT - 1) / UNIT * UNIT;
    const size_t n_a = pi_mul(whole, (size_t)to.cols), n_b = pi_mul((size_t)rows, whole);
    pi_adapter *place = l->adapter ? l->adapter : calloc(PI_N_ADAPT, sizeof *place);
    float *own = place ? calloc(pi_add(n_a, n_b), sizeof *own) : NULL;
    if (!own) {
        if (!l->adapter) free(place);
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the adapter of %.100s", tensor);
    }
    for (size_t i = 0; i < r * (size_t)to.cols; i++) own[i] = scale * a[i];
    float *own_b = own + n_a;
    for (size_t i = 0; i < (size_t)rows; i++) memcpy(own_b + i * whole, b + i * r, r * sizeof *b);
    l->adapter = place;
    for (int32_t i = 0; i < to.n; i++) { /* they share a; the first owns the memory */
        place[to.which + i] =
            (pi_adapter){.a = floats(own, (int32_t)whole, to.cols), .b = floats(own_b, to.rows[i], (int32_t)whole)};
        own_b += (size_t)to.rows[i] * whole;
    }
    place[to.which].memory = own;
    if ((int32_t)whole > m->adapter_rank) m->adapter_rank = (int32_t)whole;
    if (to.which >= PI_ADAPT_GATE) m->adapted_ffn = true;
    return PI_OK;
}

void pi_adapters_free(pi_layer *l) {
    for (int32_t i = 0; l->adapter && i < PI_N_ADAPT; i++) free(l->adapter[i].memory);
    free(l->adapter);
    l->adapter = NULL;
}

void pi_adapt(pi_session *s, te_team *team, const pi_layer *layer, int32_t which, const float *x, size_t ldx,
              int32_t n_tok, bool rows, float *y, size_t ldy) {
    const pi_adapter *d = layer->adapter ? &layer->adapter[which] : NULL;
    if (!d || !d->a.w) return;
    const size_t rank = (size_t)d->a.n_rows;
    const te_linear a = {.w = d->a, .y = s->adapt, .ldy = rank, .rows = rows},
                    b = {.w = d->b, .y = y, .ldy = ldy, .add = true, .rows = rows};
    te_barrier(team);
    te_op_linear(team, s->ws, &a, 1, x, ldx, n_tok);
    te_barrier(team);
    te_op_linear(team, s->ws, &b, 1, s->adapt, rank, n_tok);
    te_barrier(team);
}
