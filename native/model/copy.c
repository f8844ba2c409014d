/* copy.c - weights in memory of the model's own instead of the file's mapping, made while loading:
 *
 *     all of them, where the caller wants no mapping (use_mmap 0): huge pages whatever the file lies in, and of a neuron
 *         that passes its gate one run of bytes: up and down side by side
 *     ffn_down of a ReLU model's floats, transposed, so that a silent neuron's row can be skipped
 *     fc1 and fc2, where another format is asked for (predictor_type)
 *     experts, where the file does not have them one behind the other
 *
 *     [q | k | v | o | fc1 | fc2 | gate | up 0, down 0, up 1, down 1, ...]      one allocation per layer
 *
 * Gates stay together because all of them are read, one after the other, wherever they decide themselves. With their
 * rows side by side as well, dense F16 decode was a quarter slower and exact Q4_0 a tenth, and nothing was gained.
 *
 * A team makes the copies, each member the rows that the same member of a session's team will read, so that on a machine
 * with several memories pages lie where they are used. */
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_os.h"
#include "../../vendor/core/te_pool.h"
#include "../../vendor/core/te_quant.h"
#include "../../vendor/core/te_types.h"
#include "model.h"

/* How te_ops.h's operations share rows out: in products by 16, of neurons each. */
enum { MAX_MOVES = PI_MAX_BLOCKS * PI_BLOCK_MATS, LINE = 64, PRODUCT_UNIT = 16, NEURON_UNIT = 1 };

/* One matrix on its way. */
typedef struct move {
    te_mat *from, *to; /* in the model; the same unless transposed */
    te_mat made;       /* what *to becomes; w is set when there is memory */
    size_t offset;
    int32_t unit;             /* rows that members take together */
    const void *const *parts; /* as in pi_block_mat */
    int32_t part_rows;
} move;

typedef struct copy_task {
    const te_kernels *kernels;
    move move[MAX_MOVES];
    int32_t n;
    size_t bytes;
    size_t max_cols; /* of matrices that change their format */
    float *floats;   /* [members][max_cols] */
} copy_task;

/* ---- what goes where */

static void reserve(copy_task *t, size_t at, size_t n_bytes) {
    t->bytes = pi_add(at, n_bytes == SIZE_MAX ? n_bytes : (n_bytes + LINE - 1) / LINE * LINE);
}

/* Moves a matrix, in this format; to: another one that becomes its transpose. */
static void put(copy_task *t, te_mat *from, te_mat *to, int32_t type, int32_t unit) {
    if (!from->w) return;
    const int32_t cols = to == from ? from->cols : from->n_rows, n_rows = to == from ? from->n_rows : from->cols;
    const te_mat made = {.type = type, .stride = te_row_bytes(type, cols), .cols = cols, .n_rows = n_rows};
    if (type != from->type && (size_t)cols > t->max_cols) t->max_cols = (size_t)cols;
    t->move[t->n++] = (move){.from = from, .to = to, .made = made, .offset = t->bytes, .unit = unit};
    reserve(t, t->bytes, pi_mul(made.stride, (size_t)n_rows));
}

/* The last two matrices side by side, row by row. */
static void interleave(copy_task *t) {
    move *a = &t->move[t->n - 2], *b = a + 1;
    b->offset = a->offset + a->made.stride;
    a->made.stride = b->made.stride = a->made.stride + b->made.stride;
    reserve(t, a->offset, pi_mul(a->made.stride, (size_t)a->made.n_rows));
}

/* Only float formats can be transposed without a change of value, and only some layers have silent neurons to skip. */
static bool transposes(const pi_model *m, const pi_block *b, const pi_block_mat *down) {
    const int32_t type = down->mat->type;
    const bool sparse = pi_is_relu(m->info.activation) || (b->kind == &pi_ffn_kind && b->ffn.cuts);
    return down->mat != down->by_neurons && down->mat->w && sparse &&
           (type == TE_F32 || type == TE_F16 || type == TE_BF16);
}

static void plan_block(const pi_model *m, pi_block *b, copy_task *t) {
    const bool all = !m->options.use_mmap;
    pi_block_mat mats[PI_BLOCK_MATS];
    const int32_t n = b->kind->matrices(b, mats);
    int32_t n_neurons = 0; /* matrices with a row for each neuron, before down: gate and up */
    for (int32_t i = 0; i < n; i++) {
        te_mat *mat = mats[i].mat;
        switch (mats[i].use) {
        case PI_MAT_PRODUCT:
        case PI_MAT_HEADS:
        case PI_MAT_EXPERTS: {
            const bool apart = mats[i].parts && mat->w == mats[i].parts[0];
            if (!all && !apart) break;
            put(t, mat, mat, mat->type, PRODUCT_UNIT);
            if (!apart) break;
            t->move[t->n - 1].parts = mats[i].parts;
            t->move[t->n - 1].part_rows = mats[i].part_rows;
            break;
        }
        case PI_MAT_PREDICTOR: {
            const int32_t type = m->options.predictor_type >= 0 ? m->options.predictor_type : mat->type;
            if (all || type != mat->type) put(t, mat, mat, type, PRODUCT_UNIT);
            break;
        }
        case PI_MAT_NEURONS:
            n_neurons += mat->w != NULL;
            if (all) put(t, mat, mat, mat->type, NEURON_UNIT);
            break;
        case PI_MAT_DOWN: {
            te_mat *to = transposes(m, b, &mats[i]) ? mats[i].by_neurons : mat;
            if (all || to != mat) put(t, mat, to, mat->type, NEURON_UNIT);
            if (all && n_neurons == 2 && to == mats[i].by_neurons) interleave(t);
        }
        }
    }
}

static void plan_layer(const pi_model *m, pi_layer *l, copy_task *t) {
    *t = (copy_task){.kernels = m->kernels};
    for (int32_t i = 0; i < l->n_blocks; i++) plan_block(m, &l->block[i], t);
}

static bool is_tied(const pi_model *m) { return m->output.w == m->token_embd.w; }

static void plan_head(pi_model *m, copy_task *t) {
    *t = (copy_task){.kernels = m->kernels};
    if (m->options.use_mmap) return;
    te_mat *mats[] = {&m->token_embd, &m->position_embd, &m->output};
    for (int32_t i = 0; i < (is_tied(m) ? 2 : 3); i++) put(t, mats[i], mats[i], mats[i]->type, PRODUCT_UNIT);
}

/* ---- moving; every function the rows lo..hi-1 of what is made */

static const char *row_of(const te_mat *m, int64_t r) { return (const char *)m->w + m->stride * (size_t)r; }
static const char *source_row(const move *mv, int64_t r) {
    if (!mv->parts) return row_of(mv->from, r);
    return (const char *)mv->parts[r / mv->part_rows] + mv->from->stride * (size_t)(r % mv->part_rows);
}
static char *own_row(const move *mv, int64_t r) { return (char *)(uintptr_t)row_of(&mv->made, r); }

static void copy_rows(const move *mv, int64_t lo, int64_t hi) {
    const size_t n = te_row_bytes(mv->made.type, mv->made.cols);
    for (int64_t r = lo; r < hi; r++) memcpy(own_row(mv, r), source_row(mv, r), n);
}

static void convert_rows(const copy_task *t, const move *mv, float *floats, int64_t lo, int64_t hi) {
    const int32_t cols = mv->made.cols;
    for (int64_t r = lo; r < hi; r++) {
        t->kernels->row[mv->from->type].to_f32(row_of(mv->from, r), 0, cols, floats);
        te_quantize_row(mv->made.type, floats, own_row(mv, r), cols);
    }
}

/* Through a tile in the first cache, for both sides' rows lie a power of two apart, or near it. A cache line of the
 * source's rows at a time; along them first, so that they are a few streams. */
static inline void transpose_rows(const move *mv, const size_t size, int64_t lo, int64_t hi) {
    enum { COLS = 128, ROWS = 32 };
    char tile[ROWS][COLS * 4];
    for (int32_t c0 = 0; c0 < mv->made.cols; c0 += COLS) {
        const int32_t n_cols = mv->made.cols - c0 < COLS ? mv->made.cols - c0 : COLS;
        for (int64_t r0 = lo; r0 < hi; r0 += ROWS) {
            const int32_t n_rows = hi - r0 < ROWS ? (int32_t)(hi - r0) : ROWS;
            for (int32_t c = 0; c < n_cols; c++) {
                const char *from = row_of(mv->from, c0 + c) + size * (size_t)r0;
                for (int32_t r = 0; r < n_rows; r++) memcpy(tile[r] + size * (size_t)c, from + size * (size_t)r, size);
            }
            for (int32_t r = 0; r < n_rows; r++)
                memcpy(own_row(mv, r0 + r) + size * (size_t)c0, tile[r], size * (size_t)n_cols);
        }
    }
}

static void run_moves(void *ctx, te_team *team) {
    const copy_task *t = ctx;
    for (int32_t i = 0; i < t->n; i++) {
        const move *mv = &t->move[i];
        int64_t lo, hi;
        te_share(team, mv->made.n_rows, mv->unit, &lo, &hi);
        if (mv->from != mv->to) {
            if (te_type_get(mv->made.type)->block_bytes == 2)
                transpose_rows(mv, 2, lo, hi);
            else
                transpose_rows(mv, 4, lo, hi);
        } else if (mv->made.type != mv->from->type) {
            convert_rows(t, mv, t->floats + t->max_cols * (size_t)team->ith, lo, hi);
        } else {
            copy_rows(mv, lo, hi);
        }
    }
}

pi_status pi_model_team(pi_model *m) { return m->team ? PI_OK : (pi_status)te_pool_new(te_os_n_cores(), &m->team); }

static pi_status move_all(pi_model *m, copy_task *t, pi_memory *out) {
    if (!t->n) return PI_OK;
    PI_TRY(pi_model_team(m));
    pi_memory memory = {te_os_alloc(t->bytes), t->bytes};
    const size_t n_floats = pi_mul((size_t)te_pool_n_threads(m->team), t->max_cols);
    if (n_floats) t->floats = malloc(pi_mul(n_floats, sizeof(float)));
    if (!memory.p || (n_floats && !t->floats)) {
        te_os_free(memory.p, memory.n_bytes);
        free(t->floats);
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %zu bytes of weights", t->bytes);
    }
    for (int32_t i = 0; i < t->n; i++) t->move[i].made.w = (char *)memory.p + t->move[i].offset;
    te_pool_run(m->team, run_moves, t);
    free(t->floats);
    if (m->options.use_mlock) {
        const pi_status st = (pi_status)te_os_lock(memory.p, memory.n_bytes);
        if (st != PI_OK) {
            te_os_free(memory.p, memory.n_bytes);
            return st;
        }
    }
    for (int32_t i = 0; i < t->n; i++) {
        const move *mv = &t->move[i];
        const int32_t rows = mv->parts ? mv->part_rows : mv->from->n_rows;
        for (int32_t r = 0; r < mv->from->n_rows; r += rows)
            te_os_forget(source_row(mv, r), mv->from->stride * (size_t)rows);
        if (mv->from != mv->to) {
            *mv->from = (te_mat){0};
            m->info.n_transposed_bytes += te_row_bytes(mv->made.type, mv->made.cols) * (size_t)mv->made.n_rows;
            m->info.n_layer_down_transposed++;
        }
        *mv->to = mv->made;
    }
    m->info.n_copied_bytes += memory.n_bytes;
    *out = memory;
    return PI_OK;
}

pi_status pi_copy_layer(pi_model *m, pi_layer *l) {
    copy_task t;
    plan_layer(m, l, &t);
    return move_all(m, &t, &l->own);
}

pi_status pi_copy_head(pi_model *m) {
    copy_task t;
    const bool tied = is_tied(m);
    plan_head(m, &t);
    PI_TRY(move_all(m, &t, &m->own));
    if (tied) m->output = m->token_embd;
    return PI_OK;
}

pi_status pi_copy_check(pi_model *m) {
    copy_task t;
    plan_head(m, &t);
    size_t n = t.bytes;
    for (int32_t i = 0; i < m->info.n_layer; i++) {
        plan_layer(m, &m->layer[i], &t);
        n = pi_add(n, pi_add(t.bytes, pi_sign_bytes(m)));
    }
    const uint64_t free_bytes = te_os_memory_available();
    if (n <= free_bytes) return PI_OK;
    return PI_FAIL(PI_ERROR_MEMORY, "loading takes %.2f GiB of memory, and this process can have %.2f GiB%s",
                   (double)n / (1 << 30), (double)free_bytes / (1 << 30),
                   m->options.use_mmap ? "" : "; with use_mmap weights stay in the file's mapping");
}
