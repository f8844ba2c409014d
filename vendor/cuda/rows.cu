// rows.cu - te_linear_args and te_cuda_hidden: checks, and how rows are shared out over blocks.
#include <cstring>

#include "../core/te_layout.h"
#include "launch.h"
#include "lean.h"
#include "rows.cuh"

namespace te {

static const rows_kernels *rows_kernels_of(int type) {
    const rows_kernels *k = nullptr;
    for (auto *of : {rows_float, rows_32, rows_bits, rows_table, rows_k, rows_k23})
        if (!k) k = of(type);
    return k;
}

int32_t has_type(int32_t type) { return te_layout_get(type) && rows_kernels_of(type); }

batch_shape batch_shape_for(int32_t type) {
    const rows_kernels *k = rows_kernels_of(type);
    return k ? k->batch : batch_shape{};
}
size_t prepared_bytes(int32_t type, int32_t cols) {
    const batch_shape f = batch_shape_for(type);
    return cols < 1 ? 0 : batch_tile_bytes(f, batch_width(cols)) + batch_scale_bytes(f, batch_width(cols));
}
const void *prepared_for(const te_prepared *p, int32_t type) {
    return p->v && batch_shape_for(type).form == batch_shape_for(p->type).form ? p->v : nullptr;
}

size_t stride(int32_t type, int32_t cols) {
    const te_type_info *info = te_type_get(type);
    if (!info || !has_type(type) || cols < 1 || cols % info->block_weights) return 0;
    return (te_row_bytes(type, cols) + 15) / 16 * 16;
}

te_status check_matrix(te_cuda *d, const char *op, const te_mat *m) {
    const size_t least = stride(m->type, m->cols);
    if (!least)
        return refuse(d, te_fail(TE_UNSUPPORTED, "%s: no kernel for rows of %d weights of type %d", op, (int)m->cols,
                                 (int)m->type));
    if (!m->w || !aligned(m->w, 16) || m->stride < least || m->stride % 16 || m->n_rows < 1)
        return refuse(d,
                      te_fail(TE_ARGUMENT, "%s: a matrix at %p with %d rows, %zu bytes apart, is not in device layout",
                              op, m->w, (int)m->n_rows, m->stride));
    return TE_OK;
}

te_status check_input(te_cuda *d, const char *op, const float *x, size_t ldx, int32_t n_tok, int32_t cols,
                      const te_norm *norm) {
    if (n_tok < 1 || n_tok > TE_CUDA_MAX_TOK)
        return refuse(d, te_fail(TE_ARGUMENT, "%s: %d tokens, 1 to %d are possible", op, (int)n_tok, TE_CUDA_MAX_TOK));
    if (!x || !aligned(x, 16) || (n_tok > 1 && (ldx % 4 || ldx < (size_t)cols)))
        return refuse(d, te_fail(TE_ARGUMENT, "%s: input at %p, %zu floats apart: both must be multiples of 16 bytes",
                                 op, (const void *)x, ldx));
    if (norm->kind != TE_NO_NORM && (!norm->w || !aligned(norm->w, 16) || !aligned(norm->b, 16)))
        return refuse(d, te_fail(TE_ARGUMENT, "%s: the norm's vectors at %p and %p must be aligned to 16 bytes", op,
                                 (const void *)norm->w, (const void *)norm->b));
    return TE_OK;
}

// rows_per: rows of a block for each of the n entries. Sets the tile, the parts and the grid, and launches.
static te_status run(te_cuda *d, const char *name, rows_args *a, int type, int rows_per) {
    const rows_kernels *k = rows_kernels_of(type);
    te_status started;
    if (run_lean(d, name, type, rows_per, a, &started)) return started;
    const bool several = a->n_tok > 1, batch = several && k->batch.column_bytes;
    const int tokens = several ? BATCH_TOKENS : 1, task = 32 * k->steps * k->lane_weights,
              blocks_per_sm = several ? 1 : 2;
    size_t room = d->smem_sm / (size_t)blocks_per_sm - 2048;
    if (room > d->smem_block) room = d->smem_block;
    const int units = divide_up(a->n, a->unit), at_once = d->info.n_sm * blocks_per_sm;
    const size_t fixed =
        a->publish ? (size_t)divide_up(a->n, mark_parts(d)) : 0; // rows of a block: no more blocks help
    if (batch) {
        // What is left is for sums, pointers and ids.
        const size_t rest = batch_sum_bytes(fixed) + (fixed > 1024 ? 16 * fixed : 16 * 1024);
        set_batch_tile(a, k->batch, room > rest ? room - rest : 0, divide_up(units, at_once) * a->unit * rows_per);
    } else {
        // Half of what is there goes to activations at most.
        const size_t per_task = (size_t)(tokens * (k->int8 ? 5 : 16) * (task / 4)) + fixed * (size_t)tokens * 4;
        int tile = divide_up(a->cols, task) * task;
        const int most = (int)(room * 3 / 5 / per_task) * task;
        if (tile > most) {
            const int n_tiles = divide_up(tile, most < task ? task : most);
            tile = divide_up(divide_up(a->cols, n_tiles), task) * task;
        }
        a->tile = tile;
        a->parts = tile / task;
    }
    // As many blocks as run at once, or a multiple of that when a block's sums would not fit.
    rows_smem s = {};
    size_t total = 0;
    // Few rows of a block: then the side has blocks of its own, which are not late with theirs.
    const bool apart = (a->side.keep || a->side.publish) && !several && a->select == SELECT_ALL && units >= at_once &&
                       units <= 8 * at_once && at_once > 4 * SIDE_BLOCKS;
    const int beside = apart ? SIDE_BLOCKS : 0;
    int grid = (a->publish ? mark_parts(d) : units < at_once ? units : at_once) - beside;
    for (;; grid += at_once) {
        a->capacity = (divide_up(units, grid) * a->unit) * rows_per;
        s.acts = batch ? (int)batch_tile_bytes(k->batch, a->tile) : tokens * a->tile * (k->int8 ? 1 : 4);
        s.scales = batch ? (int)batch_scale_bytes(k->batch, a->tile) : k->int8 ? tokens * (a->tile / 32) * 8 : 0;
        s.part =
            batch ? (int)batch_sum_bytes((size_t)a->capacity) : (a->capacity * a->parts * tokens * 4 + 15) / 16 * 16;
        s.pointer = (a->capacity * 8 + 15) / 16 * 16;
        s.id = (a->capacity * 4 + 15) / 16 * 16;
        s.gate = a->ffn && a->skip && a->gated ? (a->capacity * tokens * 4 + 15) / 16 * 16 : 0;
        total =
            (size_t)s.acts + (size_t)s.scales + (size_t)s.part + (size_t)s.pointer + 2 * (size_t)s.id + (size_t)s.gate;
        if (total <= room || grid >= units || a->publish) break;
    }
    if (total > room)
        return refuse(d, te_fail(TE_UNSUPPORTED,
                                 "%s: %d columns of %d tokens need %zu bytes of shared memory, the device has %zu",
                                 name, (int)a->cols, a->n_tok, total, room));
    a->share_each = units / grid;
    a->share_more = units % grid;
    a->side_first = apart ? grid : 0;
    const bool wide = a->tile > 4 * FILL_ONCE * ROWS_THREADS && fills_wide(*a) && !a->side.keep && !a->side.publish,
               usual = !several && !a->ffn && a->select == SELECT_ALL && a->unit == 1 && (wide || fills_once(*a)),
               posts = a->publish || a->side.publish;
    return launch(d, name, usual ? k->one[posts] : k->kernel[a->ffn ? 1 : 0][several], dim3((unsigned)(grid + beside)),
                  ROWS_THREADS, total, *a, s);
}

static te_status run_products(te_cuda *d, const te_linear_args *op, const int *which, int n, bool side) {
    rows_args a = {};
    a.x = op->x;
    a.ldx = op->ldx;
    a.norm = op->norm;
    a.prepared = prepared_for(&op->prepared, op->product[which[0]].w.type);
    a.n_tok = op->n_tok;
    a.cols = op->product[which[0]].w.cols;
    a.unit = 1;
    int64_t rows = 0;
    for (int i = 0; i < n; i++) {
        const te_product *p = &op->product[which[i]];
        a.product[i] = {(const uint8_t *)p->w.w,
                        p->bias,
                        p->add,
                        p->y,
                        p->mark,
                        p->w.stride,
                        p->ld_add,
                        p->ldy,
                        p->ld_mark,
                        p->mark_threshold,
                        p->mark_threshold_at,
                        (int)rows,
                        p->w.n_rows,
                        p->relu != 0};
        if (p->mark) a.unit = 8;
        rows += p->w.n_rows;
    }
    if (rows > INT32_MAX / 2) return refuse(d, te_fail(TE_ARGUMENT, "linear: %lld rows are too many", (long long)rows));
    a.n_products = n;
    a.n = (int)rows;
    if (side) a.side = op->side;
    if (op->rows.list) {
        a.select = SELECT_LIST;
        a.list = op->rows.list;
        a.n_list = op->rows.n_list;
        a.n = op->rows.n;
    }
    return a.n < 1 ? TE_OK : run(d, "linear", &a, op->product[which[0]].w.type, 1);
}

int32_t mark_parts(te_cuda *d) { return 2 * d->info.n_sm; }

__global__ void __launch_bounds__(ROWS_THREADS) side_kernel(const __grid_constant__ rows_args a) {
    __shared__ float room[ROWS_WARPS];
    dep_go();
    dep_wait();
    side_block(a, room);
}
static te_status only_side(te_cuda *d, const te_linear_args *op) {
    if (op->cols < 1) return refuse(d, te_fail(TE_ARGUMENT, "linear: %d columns", (int)op->cols));
    rows_args a = {};
    a.x = op->x;
    a.ldx = op->ldx;
    a.n_tok = op->n_tok;
    a.cols = op->cols;
    a.side = op->side;
    return launch(d, "linear", side_kernel, dim3(SIDE_BLOCKS), ROWS_THREADS, 0, a);
}

te_status linear(te_cuda *d, const te_linear_args *op) {
    const bool side = op->side.keep || op->side.publish;
    if ((op->n_products < 1 && !side) || op->n_products < 0 || op->n_products > TE_MAX_PRODUCTS)
        return refuse(
            d, te_fail(TE_ARGUMENT, "linear: %d products, 1 to %d are possible", (int)op->n_products, TE_MAX_PRODUCTS));
    for (int i = 0; i < op->n_products; i++) {
        const te_product *p = &op->product[i];
        TE_CUDA_TRY(check_matrix(d, "linear", &p->w));
        if (p->w.cols != op->product[0].w.cols)
            return refuse(d, te_fail(TE_ARGUMENT, "linear: rows of %d and of %d weights", (int)op->product[0].w.cols,
                                     (int)p->w.cols));
        if (!p->y && !p->mark) return refuse(d, te_fail(TE_ARGUMENT, "linear: product %d has no result", i));
        if ((p->mark || op->rows.list) && (op->n_products != 1 || (p->mark && op->rows.list)))
            return refuse(d, te_fail(TE_ARGUMENT, "linear: a list or marks, and of one product only"));
    }
    const int32_t cols = op->n_products ? op->product[0].w.cols : op->cols;
    TE_CUDA_TRY(check_input(d, "linear", op->x, op->ldx, op->n_tok, cols, &op->norm));
    if (side) TE_CUDA_TRY(check_input(d, "linear", op->x, op->ldx, op->n_tok, cols, &op->side.norm));
    if (op->side.publish && !op->side.ticket.base)
        return refuse(d, te_fail(TE_ARGUMENT, "linear: words without a number"));
    if (op->n_products == 0) return only_side(d, op);
    // Products of the same type go together.
    bool done[TE_MAX_PRODUCTS] = {};
    for (int i = 0; i < op->n_products; i++) {
        int which[TE_MAX_PRODUCTS], n = 0;
        for (int j = i; j < op->n_products; j++)
            if (!done[j] && op->product[j].w.type == op->product[i].w.type) {
                which[n++] = j;
                done[j] = true;
            }
        if (n) TE_CUDA_TRY(run_products(d, op, which, n, side && i == 0));
    }
    return TE_OK;
}

// Marks by scores of fc2: the blocks of a product publish them.
te_status post_scores(te_cuda *d, const te_marks_args *op) {
    const te_scores *s = &op->scores;
    TE_CUDA_TRY(check_matrix(d, "marks", &s->fc2));
    const te_norm none = {};
    TE_CUDA_TRY(check_input(d, "marks", s->z, s->ldz, op->n_tok, s->fc2.cols, &none));
    rows_args a = {};
    a.x = s->z;
    a.ldx = s->ldz;
    a.n_tok = op->n_tok;
    a.cols = s->fc2.cols;
    a.unit = 1;
    a.n = op->n_rows;
    a.n_products = 1;
    a.product[0].w = (const uint8_t *)s->fc2.w;
    a.product[0].stride = s->fc2.stride;
    a.product[0].n_rows = op->n_rows;
    a.product[0].threshold_at = s->threshold;
    a.publish = op->publish;
    a.ticket = op->ticket;
    return run(d, "marks", &a, s->fc2.type, 1);
}

te_status check_hidden(te_cuda *d, const te_cuda_hidden *op, check_function check) {
    const bool gated = op->gate.w != nullptr;
    TE_CUDA_TRY(check(d, "hidden", &op->up));
    if (gated) {
        TE_CUDA_TRY(check(d, "hidden", &op->gate));
        if (op->gate.type != op->up.type || op->gate.cols != op->up.cols || op->gate.n_rows != op->up.n_rows)
            return refuse(d, te_fail(TE_UNSUPPORTED, "hidden: gate is %d x %d of type %d, up %d x %d of type %d",
                                     (int)op->gate.n_rows, (int)op->gate.cols, (int)op->gate.type, (int)op->up.n_rows,
                                     (int)op->up.cols, (int)op->up.type));
    }
    TE_CUDA_TRY(check_input(d, "hidden", op->x, op->ldx, op->n_tok, op->up.cols, &op->norm));
    if (op->mask && op->rows.list) return refuse(d, te_fail(TE_ARGUMENT, "hidden: a mask and a list"));
    if (op->mask && (!aligned(op->mask, 4) || op->ld_mask % 4))
        return refuse(d, te_fail(TE_ARGUMENT, "hidden: the mask is not made of words of 32 bits"));
    if (!op->h) return refuse(d, te_fail(TE_ARGUMENT, "hidden: no result"));
    const bool relu = op->act == TE_RELU || op->act == TE_DRELU || op->act == TE_RELU2;
    if (op->mode == TE_CUDA_SKIP && !relu)
        return refuse(
            d, te_fail(TE_ARGUMENT, "hidden: activation %d is hardly ever 0: nothing can be skipped", (int)op->act));
    return TE_OK;
}

rows_args hidden_args(const te_cuda_hidden *op) {
    const bool gated = op->gate.w != nullptr;
    rows_args a = {};
    a.x = op->x;
    a.ldx = op->ldx;
    a.norm = op->norm;
    a.prepared = prepared_for(&op->prepared, op->up.type);
    a.n_tok = op->n_tok;
    a.cols = op->up.cols;
    a.unit = 1;
    a.n = op->rows.list ? op->rows.n : op->up.n_rows;
    a.select = op->rows.list ? SELECT_LIST : op->mask ? SELECT_MARK : SELECT_ALL;
    a.list = op->rows.list;
    a.n_list = op->rows.n_list;
    a.mask = op->mask;
    a.ld_mask = op->ld_mask;
    const rows_product up = {(const uint8_t *)op->up.w,
                             op->up_bias,
                             nullptr,
                             nullptr,
                             nullptr,
                             op->up.stride,
                             0,
                             0,
                             0,
                             0,
                             nullptr,
                             0,
                             op->up.n_rows,
                             false};
    if (gated) {
        a.product[0].w = (const uint8_t *)op->gate.w;
        a.product[0].stride = op->gate.stride;
    }
    a.product[gated ? 1 : 0] = up;
    a.n_products = gated ? 2 : 1;
    a.ffn = true;
    a.gated = gated;
    a.skip = op->mode == TE_CUDA_SKIP;
    a.act = op->act;
    a.threshold = op->threshold;
    a.curve = op->curve;
    a.gate_add = op->gate_add;
    a.up_add = op->up_add;
    a.ld_add = op->ld_add;
    a.h = op->h;
    a.ldh = op->ldh;
    a.fired = op->fired;
    a.counts = op->counts;
    return a;
}

te_status hidden(te_cuda *d, const te_cuda_hidden *op) {
    TE_CUDA_TRY(check_hidden(d, op, check_matrix));
    rows_args a = hidden_args(op);
    return a.n < 1 ? TE_OK : run(d, "hidden", &a, op->up.type, a.gated && !a.skip ? 2 : 1);
}

} // namespace te
