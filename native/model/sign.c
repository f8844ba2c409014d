/* sign.c - the sign predictor: a neuron fires where its gate's (without a gate: up's) product with the input is positive,
 * and the signs alone of both say most of that.
 *
 *     score_j = mean over i of sign(w_ji) * sign(x_i)      x: the normed input of the FFN
 *
 * One bit per weight, taken from the file's weights while loading: a 16th of the bytes of an F16 row. After SparseInfer
 * (Shin et al., arXiv 2411.12692). */
#include <stdlib.h>

#include "../../vendor/core/te_os.h"
#include "../../vendor/core/te_pool.h"
#include "model.h"

typedef struct sign_task {
    const te_row_kernels *row;
    const te_kernels *kernels;
    te_mat w;
    uint64_t *out;
    float *floats; /* [members][cols] */
    int32_t words;
} sign_task;

static void take_signs(void *ctx, te_team *team) {
    const sign_task *t = ctx;
    float *row = t->floats + (size_t)team->ith * (size_t)t->w.cols;
    int64_t lo, hi;
    te_share(team, t->w.n_rows, 1, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        t->row->to_f32((const char *)t->w.w + t->w.stride * (size_t)i, 0, t->w.cols, row);
        t->kernels->sign_pack(row, t->w.cols, t->out + i * t->words);
    }
}

/* The signs of the matrix that decides whether a neuron fires. */
pi_status pi_load_signs(pi_model *m, pi_layer *l) {
    pi_ffn *f = pi_ffn_of(l);
    sign_task task = {.kernels = m->kernels, .w = f->gate.w ? f->gate : f->up, .words = m->sign_words};
    task.row = &m->kernels->row[task.w.type];
    PI_TRY(pi_model_team(m));
    task.out = te_os_alloc(pi_sign_bytes(m));
    task.floats = malloc(pi_mul(pi_mul((size_t)te_pool_n_threads(m->team), (size_t)task.w.cols), sizeof(float)));
    if (!task.out || !task.floats) {
        te_os_free(task.out, pi_sign_bytes(m));
        free(task.floats);
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the signs of a layer (%zu bytes)", pi_sign_bytes(m));
    }
    te_pool_run(m->team, take_signs, &task);
    free(task.floats);
    f->sign = task.out;
    m->info.n_sign_bytes += pi_sign_bytes(m);
    return PI_OK;
}
