/* lora.c - low-rank adapters: a matrix W gets the company of two small ones, y = W x + b (a x).
 *
 * They are kept as floats beside the weights, which stay as they are in their mapping. Ranks are filled up with zeros
 * to whole vectors of the kernels. Of the embedding a row of W is looked up instead: W[token] + b[token] a. */
#include <stdlib.h>
#include <string.h>

#include "model.h"

enum { MAX_RANK = 4096, UNIT = 32 };

/* Where an adapter of one tensor goes: places from `which` on, of a layer, or a place of the model's own. */
typedef struct target {
    pi_adapter *own;
    pi_layer *layer;
    int32_t which, n; /* 3 for q, k and v in one matrix, 2 for gate and up */
    int32_t rows[3];  /* of the matrix of each place */
    int32_t cols;
    bool looked_up; /* a is stored transposed */
} target;

/* The matrices that a name stands for; false if this model has none. */
static bool find_shapes(const pi_model *m, target *t) {
    const pi_attention *a = pi_attention_of(t->layer);
    const pi_ffn *f = pi_ffn_of(t->layer);
    if (t->which >= PI_ADAPT_GATE ? !f : !a) return false;
    const te_mat none = {0}, *const mat[] = {a ? &a->q : &none, a ? &a->k : &none,    a ? &a->v : &none,
                                             a ? &a->o : &none, f ? &f->gate : &none, f ? &f->up : &none};
    if (t->which == PI_ADAPT_DOWN) {
        t->rows[0] = m->info.n_embd;
        t->cols = pi_n_ff(f);
        return true;
    }
    for (int32_t i = 0; i < t->n; i++) {
        t->rows[i] = mat[t->which + i]->n_rows;
        t->cols = mat[t->which + i]->cols;
    }
    if (!mat[t->which]->w) return false;
    if (t->which >= PI_ADAPT_GATE) return m->arch->fused_gate_up == (t->n == 2);
    return t->which > PI_ADAPT_V || m->arch->fused_qkv == (t->n == 3);
}

/* The embedding; the output matrix, where it is another: an adapter of the embedding does not change a tied one, as in
 * PEFT. */
static bool find_own(pi_model *m, const char *tensor, target *out) {
    const bool embd = strcmp(tensor, "token_embd.weight") == 0;
    if (!embd && (strcmp(tensor, "output.weight") != 0 || m->output.w == m->token_embd.w)) return false;
    *out = (target){.own = embd ? &m->embd_adapter : &m->output_adapter,
                    .n = 1,
                    .rows = {m->info.n_vocab},
                    .cols = m->info.n_embd,
                    .looked_up = embd};
    return true;
}

/* What a tensor's name stands for, "blk.N.NAME.weight" mostly; false if an adapter of it is not for this model. */
static bool find_target(pi_model *m, const char *tensor, target *out) {
    static const struct {
        const char *name;
        int32_t which, n;
    } places[] = {{"attn_qkv.weight", PI_ADAPT_Q, 3},    {"attn_q.weight", PI_ADAPT_Q, 1},
                  {"attn_k.weight", PI_ADAPT_K, 1},      {"attn_v.weight", PI_ADAPT_V, 1},
                  {"attn_output.weight", PI_ADAPT_O, 1}, {"ffn_gate.weight", PI_ADAPT_GATE, 1},
                  {"ffn_up.weight", PI_ADAPT_UP, 1},     {"ffn_down.weight", PI_ADAPT_DOWN, 1}};
    if (strncmp(tensor, "blk.", 4) != 0) return find_own(m, tensor, out);
    char *rest;
    const long n = strtol(tensor + 4, &rest, 10);
    if (rest == tensor + 4 || *rest != '.' || n < 0 || n >= m->info.n_layer) return false;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        if (strcmp(rest + 1, places[i].name) != 0) continue;
        *out = (target){.layer = &m->layer[n], .which = places[i].which, .n = places[i].n};
        if (out->which == PI_ADAPT_UP && m->arch->fused_gate_up) { /* the gate's rows come first */
            out->which = PI_ADAPT_GATE;
            out->n = 2;
        }
        return find_shapes(m, out);
    }
    return false;
}

static te_mat floats(const float *w, int32_t rows, int32_t cols) {
    return (te_mat){.w = w, .type = TE_F32, .stride = sizeof(float) * (size_t)cols, .cols = cols, .n_rows = rows};
}

/* a with the scale in it, and zeros up to the whole rank. */
static te_mat copy_a(const target *to, int32_t rank, int32_t whole, float scale, const float *a, float *own) {
    const size_t cols = (size_t)to->cols, r = (size_t)rank, ld = (size_t)whole;
    for (size_t i = 0; i < r; i++)
        for (size_t c = 0; c < cols; c++) own[to->looked_up ? c * ld + i : i * cols + c] = scale * a[i * cols + c];
    return to->looked_up ? floats(own, to->cols, whole) : floats(own, whole, to->cols);
}

/* Into place[0] and those behind it, which share a; the first owns the memory. */
static pi_status keep(const target *to, pi_adapter *place, const char *tensor, int32_t rank, float scale,
                      const float *a, const float *b) {
    const int32_t whole = (rank + UNIT - 1) / UNIT * UNIT;
    size_t rows = 0;
    for (int32_t i = 0; i < to->n; i++) rows += (size_t)to->rows[i];
    const size_t r = (size_t)rank, ld = (size_t)whole, n_a = pi_mul(ld, (size_t)to->cols), n_b = pi_mul(rows, ld);
    float *own = calloc(pi_add(n_a, n_b), sizeof *own), *own_b = own + n_a;
    if (!own) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the adapter of %.100s", tensor);
    const te_mat first = copy_a(to, rank, whole, scale, a, own);
    for (size_t i = 0; i < rows; i++) memcpy(own_b + i * ld, b + i * r, r * sizeof *b);
    for (int32_t i = 0; i < to->n; i++) {
        place[i] = (pi_adapter){.a = first, .b = floats(own_b, to->rows[i], whole)};
        own_b += (size_t)to->rows[i] * ld;
    }
    place[0].memory = own;
    return PI_OK;
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
    pi_adapter *all = l ? l->adapter : to.own;
    if (!all && !(all = calloc(PI_N_ADAPT, sizeof *all)))
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the adapter of %.100s", tensor);
    if (l) l->adapter = all;
    if (all[to.which].a.w) return PI_FAIL(PI_ERROR_ARGUMENT, "%.100s has an adapter already", tensor);
    if (to.looked_up) scale *= m->embd_scale; /* a row of W is multiplied by it, too */
    PI_TRY(keep(&to, all + to.which, tensor, rank, scale, a, b));
    if (all[to.which].b.cols > m->adapter_rank) m->adapter_rank = all[to.which].b.cols;
    if (l && to.which >= PI_ADAPT_GATE) m->adapted_ffn = true;
    return PI_OK;
}

void pi_adapters_free(pi_model *m) {
    for (int32_t l = 0; m->layer && l < m->info.n_layer; l++) {
        pi_adapter *all = m->layer[l].adapter;
        for (int32_t i = 0; all && i < PI_N_ADAPT; i++) free(all[i].memory);
        free(all);
        m->layer[l].adapter = NULL;
    }
    free(m->embd_adapter.memory);
    free(m->output_adapter.memory);
    m->embd_adapter = m->output_adapter = (pi_adapter){0};
}
