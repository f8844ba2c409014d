// fetch.cu - matrices of host memory that come to the device beside all that runs there.
//
// The copy engine brings rows into a room on the device, as they are in the file; from there a kernel of few blocks puts them
// into device layout. Both are on a stream of the lowest priority, in order, so that the room can be used again and again.
#include <cstdlib>

#include "prefill.cuh"

struct te_cuda_fetches {
    cudaStream_t stream;
    cudaEvent_t ended[TE_CUDA_FETCHES];
    uint32_t n_asked, n_ended;
};

namespace te {

constexpr int FETCH_BLOCKS = 8;

static cudaError_t open_events(te_cuda_fetches *f) {
    int least = 0, greatest = 0;
    cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (e == cudaSuccess) e = cudaStreamCreateWithPriority(&f->stream, cudaStreamNonBlocking, least);
    for (cudaEvent_t &ended : f->ended)
        if (e == cudaSuccess) e = cudaEventCreateWithFlags(&ended, cudaEventDisableTiming);
    return e == cudaSuccess ? load_rows_kernels() : e;
}

static void close_fetches(te_cuda_fetches *f) {
    if (f->stream) {
        (void)cudaStreamSynchronize(f->stream);
        (void)cudaStreamDestroy(f->stream);
    }
    for (cudaEvent_t ended : f->ended)
        if (ended) (void)cudaEventDestroy(ended);
    free(f);
}
void fetch_close(te_cuda *d) {
    if (d->fetches) close_fetches(d->fetches);
    d->fetches = nullptr;
}

te_status fetch_open(te_cuda *d) {
    if (d->fetches) return TE_OK;
    te_cuda_fetches *f = (te_cuda_fetches *)calloc(1, sizeof *f);
    if (!f) return te_fail(TE_MEMORY, "out of memory");
    const te_status s = cuda_status(open_events(f), "a stream for fetches");
    if (s == TE_OK)
        d->fetches = f;
    else
        close_fetches(f);
    return s;
}

// Rows from the first-th on, n of them, at src.
static te_cuda_pack some_rows(const te_cuda_pack *op, int first, int n, const void *src) {
    te_cuda_pack part = *op;
    part.dst.w = (const uint8_t *)op->dst.w + (size_t)first * op->dst.stride;
    part.dst.n_rows = n;
    part.src = src;
    return part;
}

te_status fetch(te_cuda *d, const te_cuda_pack *op, void *room, size_t n_room) {
    te_cuda there = {}; // the same device, another stream; of d nothing is touched that operations use
    there.info = d->info;
    there.smem_block = d->smem_block;
    there.smem_sm = d->smem_sm;
    TE_CUDA_TRY(check_matrix(&there, "fetch", &op->dst));
    const size_t n_bytes = te_row_bytes(op->dst.type, op->dst.cols);
    const bool odd = te_type_get(op->dst.type)->block_bytes % 2;
    if (!op->src || (!odd && (!aligned(op->src, 2) || op->src_stride % 2)) || op->src_stride < n_bytes ||
        op->dst.stride > INT32_MAX || op->rows || op->blocks || !room || !aligned(room, 16) ||
        n_room < op->src_stride + 16)
        return te_fail(TE_ARGUMENT, "fetch: rows at %p, %zu bytes apart, through %zu bytes", op->src, op->src_stride,
                       n_room);
    TE_CUDA_TRY(fetch_open(d));
    te_cuda_fetches *f = d->fetches;
    if (f->n_asked - f->n_ended >= TE_CUDA_FETCHES)
        return te_fail(TE_ARGUMENT, "fetch: %d are under way already", (int)TE_CUDA_FETCHES);
    there.stream = there.capture = f->stream;
    te_status s = TE_OK;
    if (!needs_kernel(op)) {
        s = put_rows(&there, op, FETCH_BLOCKS);
    } else {
        const size_t fits = (n_room - 16) / op->src_stride;
        const int most = fits < (size_t)op->dst.n_rows ? (int)fits : op->dst.n_rows;
        for (int r = 0; r < op->dst.n_rows && s == TE_OK; r += most) {
            const int n = op->dst.n_rows - r < most ? op->dst.n_rows - r : most;
            const size_t span = op->src_stride * (size_t)(n - 1) + n_bytes;
            s = cuda_status(cudaMemcpyAsync(room, (const uint8_t *)op->src + op->src_stride * (size_t)r, span,
                                            cudaMemcpyDefault, f->stream),
                            "cudaMemcpyAsync");
            const te_cuda_pack part = some_rows(op, r, n, room);
            if (s == TE_OK) s = put_rows(&there, &part, FETCH_BLOCKS);
        }
    }
    if (s == TE_OK)
        s = cuda_status(cudaEventRecord(f->ended[f->n_asked % TE_CUDA_FETCHES], f->stream), "cudaEventRecord");
    if (s == TE_OK) f->n_asked++;
    return s;
}

te_status fetched(te_cuda *d, uint32_t *n) {
    te_cuda_fetches *f = d->fetches;
    *n = f ? f->n_ended : 0;
    while (f && f->n_ended != f->n_asked) {
        const cudaError_t e = cudaEventQuery(f->ended[f->n_ended % TE_CUDA_FETCHES]);
        if (e == cudaErrorNotReady) return (void)cudaGetLastError(), TE_OK;
        if (e != cudaSuccess) return cuda_status(e, "a fetch");
        *n = ++f->n_ended;
    }
    return TE_OK;
}

} // namespace te
