/* lora.c - low-rank adapters: a matrix W of a layer gets the company of two small ones, y = W x + b (a x).
 *
 * They are kept as floats beside the weights, which stay as they are in their mapping. Ranks are filled up with zeros
 * to whole vectors of the kernels. */
#include <stdlib.h>
#include <string.h>

#include "session.h"

enum { MAX_RANK = 4096, UNIT = 32 };

/* Rows and columns of the matrix that a place of pi_layer.adapter stands for; false if this model has none. */
static bool shape_of(const pi_model *m, const pi_layer *l, int32_t which, int32_t *rows, int32_t *cols) {
    const te_mat *const mat[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up};
    *rows = m->info.n_embd;
    *cols = m->info.n_ff;
    if (which == PI_ADAPT_DOWN) return true;
    *rows = mat[which]->n_rows;
    *cols = mat[which]->cols;
    return mat[which]->w != NULL;
}

/* The layer and the place of a tensor's name, "blk.N.NAME.weight". */
static bool find_place(const pi_model *m, const char *tensor, int32_t *layer, int32_t *which) {
    static const char *const names[PI_N_ADAPT] = {"attn_q",   "attn_k", "attn_v",  "attn_output",
                                                  "ffn_gate", "ffn_up", "ffn_down"};
    if (strncmp(tensor, "blk.", 4) != 0) return false;
    char *rest;
    const long n = strtol(tensor + 4, &rest, 10);
    if (rest == tensor + 4 || *rest != '.' || n < 0 || n >= m->info.n_layer) return false;
    rest++;
    for (int32_t i = 0; i < PI_N_ADAPT; i++) {
        const size_t length = strlen(names[i]);
        if (strncmp(rest, names[i], length) == 0 && strcmp(rest + length, ".weight") == 0) {
            *layer = (int32_t)n;
            *which = i;
            return true;
        }
    }
    return false;
}

static te_mat floats(const float *w, int32_t rows, int32_t cols) {
    return (te_mat){.w = w, .type = TE_F32, .stride = sizeof(float) * (size_t)cols, .cols = cols, .n_rows = rows};
}

pi_status pi_model_add_adapter(pi_model *m, const char *tensor, int32_t rank, float scale, const float *a,
                               const float *b) {
    int32_t layer = 0, which = 0, rows = 0, cols = 0;
    if (!m || !tensor || !a || !b) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_model_add_adapter: an argument is NULL");
    if (m->loaded < m->info.n_layer) return PI_FAIL(PI_ERROR_ARGUMENT, "an adapter needs a model that is loaded");
    if (m->ref.n != 1) return PI_FAIL(PI_ERROR_ARGUMENT, "an adapter cannot be added while sessions use the model");
    if (rank < 1 || rank > MAX_RANK)
        return PI_FAIL(PI_ERROR_ARGUMENT, "the adapter of %.100s has rank %d, must be 1..%d", tensor, rank, MAX_RANK);
    if (!find_place(m, tensor, &layer, &which) || m->arch->fused_qkv ||
        !shape_of(m, &m->layer[layer], which, &rows, &cols))
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "an adapter of %.100s is not supported for this model", tensor);
    pi_layer *l = &m->layer[layer];
    if (l->adapter && l->adapter[which].a.w) return PI_FAIL(PI_ERROR_ARGUMENT, "%.100s has an adapter already", tensor);
    const size_t r = (size_t)rank, whole = (r + UNIT - 1) / UNIT * UNIT;
    const size_t n_a = pi_mul(whole, (size_t)cols), n_b = pi_mul((size_t)rows, whole);
    pi_adapter *place = l->adapter ? l->adapter : calloc(PI_N_ADAPT, sizeof *place);
    float *own = place ? calloc(pi_add(n_a, n_b), sizeof *own) : NULL;
    if (!own) {
        if (!l->adapter) free(place);
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the adapter of %.100s", tensor);
    }
    for (size_t i = 0; i < r * (size_t)cols; i++) own[i] = scale * a[i];
    for (size_t i = 0; i < (size_t)rows; i++) memcpy(own + n_a + i * whole, b + i * r, r * sizeof *b);
    l->adapter = place;
    place[which] = (pi_adapter){
        .a = floats(own, (int32_t)whole, cols), .b = floats(own + n_a, rows, (int32_t)whole), .memory = own};
    if ((int32_t)whole > m->adapter_rank) m->adapter_rank = (int32_t)whole;
    if (which >= PI_ADAPT_GATE) m->adapted_ffn = true;
    return PI_OK;
}

void pi_adapters_free(pi_layer *l) {
    for (int32_t i = 0; l->adapter && i < PI_N_ADAPT; i++) free(l->adapter[i].memory);
    free(l->adapter);
    l->adapter = NULL;
}

void pi_adapt(pi_session *s, te_team *team, const pi_layer *layer, int32_t which, const float *x, size_t ldx,
              int32_t n_tok, float *y, size_t ldy) {
    const pi_adapter *d = layer->adapter ? &layer->adapter[which] : NULL;
    if (!d || !d->a.w) return;
    const size_t rank = (size_t)d->a.n_rows;
    const te_linear a = {.w = d->a, .y = s->adapt, .ldy = rank}, b = {.w = d->b, .y = y, .ldy = ldy, .add = true};
    te_barrier(team);
    te_op_linear(team, s->ws, &a, 1, x, ldx, n_tok);
    te_barrier(team);
    te_op_linear(team, s->ws, &b, 1, s->adapt, rank, n_tok);
    te_barrier(team);
}
