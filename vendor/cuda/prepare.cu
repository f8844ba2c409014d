// prepare.cu - te_cuda_prepare: the input of two to eight tokens as the kernels multiply with it (batch_input.cuh).
#include "batch_input.cuh"
#include "launch.h"

namespace te {

// Whole warps call it.
__device__ __forceinline__ void put_prepared(batch_form form, void *to, int cols, int t, int c, float4 v) {
    switch (form) {
    case BATCH_FLOATS:
        break;
    case BATCH_HALVES:
        batch_halves::put(batch_prepared<batch_halves>(to, cols), t, c, v);
        break;
    case BATCH_THIRDS:
        batch_thirds::put(batch_prepared<batch_thirds>(to, cols), t, c, v);
        break;
    case BATCH_BYTES:
        batch_bytes<false>::put(batch_prepared<batch_bytes<false>>(to, cols), t, c, v);
        break;
    case BATCH_NIBBLES:
        batch_bytes<true>::put(batch_prepared<batch_bytes<true>>(to, cols), t, c, v);
        break;
    }
}

// A block has some columns of a token, and looks at all of them for the norms.
__global__ void __launch_bounds__(ROWS_THREADS)
    prepare_kernel(const te_cuda_prepare op, const batch_form form, const batch_form side_form) {
    __shared__ float room[ROWS_WARPS];
    rows_args a = {};
    a.x = op.x;
    a.ldx = op.ldx;
    a.cols = op.cols;
    const int t = blockIdx.y, c0 = 4 * (int)blockIdx.x * ROWS_THREADS, c = c0 + 4 * (int)threadIdx.x;
    const bool inside = c < op.cols;
    dep_go();
    dep_wait();
    const float4 x = inside ? load_x(a, t, c) : make_float4(0, 0, 0, 0);
    float2 n; // mean and scale
    auto normed = [&](const te_norm &norm) {
        if (norm.kind == TE_NO_NORM) return x;
        n = row_norm(a, norm, t, room);
        return inside ? apply_norm(norm, op.cols, x, c, n.x, n.y, load_vector(norm.w, c, op.cols, 0)) : x;
    };
    const bool side = op.side.keep || op.side.publish, mine = c < batch_width(op.cols);
    if (side || op.side_v) { // first, as the CPU waits for it
        const te_norm &norm = op.side.norm;
        const float4 v = normed(norm);
        const uint32_t number = op.side.publish ? ticket_number(op.side.ticket) : 0;
        // A column a thread: words that leave the device together are next to each other.
        for (int i = c0 + (int)threadIdx.x; side && i < min(c0 + 4 * ROWS_THREADS, op.cols); i += ROWS_THREADS) {
            float u = __ldcg(op.x + t * op.ldx + i);
            if (norm.kind != TE_NO_NORM) u = fmaf((u - n.x) * n.y, __ldg(norm.w + i), norm.b ? __ldg(norm.b + i) : 0);
            const size_t to = (size_t)t * op.cols + i;
            if (op.side.publish) store_word(op.side.publish + to, __float_as_uint(u), number);
            if (op.side.keep) op.side.keep[to] = u;
        }
        if (op.side_v && mine) put_prepared(side_form, op.side_v, op.cols, t, c, v);
    }
    if (!op.v) return;
    const float4 v = normed(op.norm);
    if (mine) put_prepared(form, op.v, op.cols, t, c, v);
}

te_status prepare(te_cuda *d, const te_cuda_prepare *op) {
    const batch_form form = batch_shape_for(op->type).form, side_form = batch_shape_for(op->side_type).form;
    TE_CUDA_TRY(check_input(d, "prepare", op->x, op->ldx, op->n_tok, op->cols, &op->norm));
    TE_CUDA_TRY(check_input(d, "prepare", op->x, op->ldx, op->n_tok, op->cols, &op->side.norm));
    if (op->cols < 1 || (op->v && form == BATCH_FLOATS) || (op->side_v && side_form == BATCH_FLOATS) ||
        !aligned(op->v, 16) || !aligned(op->side_v, 16) || (op->side.publish && !op->side.ticket.base))
        return refuse(d, te_fail(TE_ARGUMENT, "prepare: %d columns to %p for type %d and to %p for type %d",
                                 (int)op->cols, op->v, (int)op->type, op->side_v, (int)op->side_type));
    const dim3 grid((unsigned)divide_up(batch_width(op->cols), 4 * ROWS_THREADS), (unsigned)op->n_tok);
    return launch(d, "prepare", prepare_kernel, grid, ROWS_THREADS, 0, *op, form, side_form);
}

} // namespace te
