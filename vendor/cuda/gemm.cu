// gemm.cu - products of many tokens with matrices of any format: weights that are not F16 are converted piece by piece,
// then cuBLASLt or our own kernel multiplies.
#include <cstdio>
#include <cstdlib>

#include "blas.h"
#include "tools.cuh"

namespace te {

te_status prefill_state(te_cuda *d, te_cuda_prefill **out) {
    if (!d->prefill) {
        te_cuda_prefill *p = (te_cuda_prefill *)calloc(1, sizeof *p);
        if (!p) return refuse(d, te_fail(TE_MEMORY, "out of memory"));
        snprintf(p->by, sizeof p->by, "own");
        d->prefill = p;
    }
    *out = d->prefill;
    return TE_OK;
}

te_status set_blas(te_cuda *d, const char *path) {
    te_cuda_prefill *p;
    TE_CUDA_TRY(prefill_state(d, &p));
    TE_CUDA_TRY(cuda_status(cudaStreamSynchronize(d->stream), "cudaStreamSynchronize"));
    te_cuda_blas *b = nullptr;
    if (path) TE_CUDA_TRY(blas_open(path, &b));
    blas_close(p->blas);
    p->blas = b;
    const int v = b ? (int)blas_version(b) : 0;
    if (b)
        snprintf(p->by, sizeof p->by, "cuBLASLt %d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    else
        snprintf(p->by, sizeof p->by, "own");
    return TE_OK;
}
const char *gemm_by(te_cuda *d) { return d->prefill ? d->prefill->by : "own"; }

// ---- marks ----

// A warp sees 32 results of a token; bytes behind the last are not touched.
__global__ void marks_kernel(const float *y, size_t ldy, int n, float threshold, uint8_t *mark, size_t ld_mark) {
    dep_go();
    dep_wait();
    const int r = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y, lane = threadIdx.x % 32;
    const unsigned bits = __ballot_sync(~0u, r < n && __ldcg(y + t * ldy + r) >= threshold);
    if (lane % 8 == 0 && r < n) mark[t * ld_mark + r / 8] = (uint8_t)(bits >> lane);
}

// ---- products ----

static bool in_place(const te_mat *w) { return w->type == TE_F16; }
static int half_ld(const te_mat *w) { return (w->cols + 7) / 8 * 8; }
// Pieces of converted weights: their rows begin at multiples of this, and more bytes gain nothing.
constexpr int PIECE_ROWS = 256;
constexpr size_t PIECE_BYTES = (size_t)64 << 20;

size_t gemm_scratch(te_cuda *d, const te_mat *w, int32_t n_tok, size_t *least) {
    (void)n_tok;
    const size_t fixed = d->prefill && d->prefill->blas ? BLAS_WORKSPACE : 0;
    const size_t row = in_place(w) ? 0 : (size_t)half_ld(w) * 2;
    const size_t whole = row * (size_t)divide_up(w->n_rows, PIECE_ROWS) * PIECE_ROWS, small = row * PIECE_ROWS;
    if (least) *least = fixed + small;
    return fixed + (whole < PIECE_BYTES ? whole : small < PIECE_BYTES ? PIECE_BYTES : small);
}

static te_status run_half(te_cuda *d, const half_product *p, void *workspace) {
    te_cuda_blas *b = d->prefill ? d->prefill->blas : nullptr;
    if (b) {
        const te_status s = blas_multiply(d, b, p, workspace);
        if (s != TE_UNSUPPORTED) return refuse(d, s);
    }
    return multiply(d, p);
}

static te_status check_product(te_cuda *d, const te_cuda_gemm *op, const te_product *p) {
    TE_CUDA_TRY(check_matrix(d, "gemm", &p->w));
    const te_mat *first = &op->product[0].w;
    const int k = op->transposed ? p->w.n_rows : p->w.cols, k0 = op->transposed ? first->n_rows : first->cols;
    if (k != k0 || (size_t)k > op->x.ld)
        return refuse(d, te_fail(TE_ARGUMENT, "gemm: a matrix of %d values for tokens, another of %d, input of %zu", k,
                                 k0, op->x.ld));
    if (!p->y || !aligned(p->y, 16) || p->ldy % 4 || (p->add && (!aligned(p->add, 16) || p->ld_add % 4)) ||
        (p->bias && !aligned(p->bias, 16)))
        return refuse(d, te_fail(TE_ARGUMENT, "gemm: results, sums or biases are not aligned to 16 bytes"));
    if (p->relu && p->add) return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: relu and add"));
    if (p->mark && (op->transposed || !aligned(p->mark, 4) || p->ld_mark % 4))
        return refuse(d, te_fail(TE_ARGUMENT, "gemm: marks of a transposed product, or not in words of 32 bits"));
    return TE_OK;
}

static te_status one_product(te_cuda *d, const te_cuda_gemm *op, const te_product *p) {
    const te_mat *w = &p->w;
    const bool across = op->transposed != 0;
    const size_t fixed = d->prefill && d->prefill->blas ? BLAS_WORKSPACE : 0, row = (size_t)half_ld(w) * 2;
    uint8_t *room = (uint8_t *)op->scratch + fixed;
    half_product h = {};
    h.x = (const uint16_t *)op->x.v;
    h.ldx = op->x.ld;
    h.n_tok = op->n_tok;
    h.transposed = across;
    h.scale = op->x.scale;
    h.y = p->y;
    h.ldy = p->ldy;
    h.relu = p->relu != 0;
    int piece = w->n_rows;
    if (!in_place(w)) {
        const size_t fits = (op->n_scratch - fixed) / row / PIECE_ROWS * PIECE_ROWS;
        if (fits < (size_t)piece) { // as equal as possible
            const int n = divide_up(piece, (int64_t)fits);
            piece = divide_up(divide_up(piece, n), PIECE_ROWS) * PIECE_ROWS;
        }
    }
    for (int r0 = 0; r0 < w->n_rows; r0 += piece) {
        const int n = w->n_rows - r0 < piece ? w->n_rows - r0 : piece;
        if (in_place(w)) {
            h.w = (const uint16_t *)w->w;
            h.ldw = w->stride / 2;
        } else {
            TE_CUDA_TRY(to_half(d, w, r0, n, room, half_ld(w)));
            h.w = (const uint16_t *)room;
            h.ldw = (size_t)half_ld(w);
        }
        if (across) { // pieces are parts of the sums: the later ones add to the first
            h.x = (const uint16_t *)op->x.v + r0;
            h.k = n;
            h.n_out = w->cols;
            h.add = r0 ? p->y : p->add;
            h.ld_add = r0 ? p->ldy : p->ld_add;
            h.bias = r0 ? nullptr : p->bias;
        } else {
            h.k = w->cols;
            h.n_out = n;
            h.bias = p->bias ? p->bias + r0 : nullptr;
            h.add = p->add ? p->add + r0 : nullptr;
            h.ld_add = p->ld_add;
            h.y = p->y + r0;
        }
        TE_CUDA_TRY(run_half(d, &h, op->scratch));
    }
    if (!p->mark) return TE_OK;
    return launch(d, "marks", marks_kernel, dim3((unsigned)divide_up(w->n_rows, 256), (unsigned)op->n_tok), 256, 0,
                  (const float *)p->y, p->ldy, (int)w->n_rows, p->mark_threshold, p->mark, p->ld_mark);
}

te_status gemm(te_cuda *d, const te_cuda_gemm *op) {
    if (op->n_products < 1 || op->n_products > TE_MAX_PRODUCTS || op->n_tok < 1 || op->n_tok > 65535)
        return refuse(d, te_fail(TE_ARGUMENT, "gemm: %d products of %d tokens", (int)op->n_products, (int)op->n_tok));
    if (!op->x.v || !op->x.scale || !aligned(op->x.v, 16) || op->x.ld % 8)
        return refuse(d, te_fail(TE_ARGUMENT, "gemm: the input is not aligned to 16 bytes"));
    for (int i = 0; i < op->n_products; i++) {
        const te_product *p = &op->product[i];
        TE_CUDA_TRY(check_product(d, op, p));
        if (op->x.tiles) continue;
        size_t least;
        (void)gemm_scratch(d, &p->w, op->n_tok, &least);
        if (op->n_scratch < least || (least && (!op->scratch || !aligned(op->scratch, 256))))
            return refuse(d, te_fail(TE_ARGUMENT, "gemm: %zu bytes of scratch at %p, %zu are needed", op->n_scratch,
                                     op->scratch, least));
        if (op->transposed && p->relu && gemm_scratch(d, &p->w, op->n_tok, nullptr) > op->n_scratch)
            return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: relu of a transposed product in pieces"));
    }
    if (op->x.tiles) return multiply_wide(d, op);
    for (int i = 0; i < op->n_products; i++) TE_CUDA_TRY(one_product(d, op, &op->product[i]));
    return TE_OK;
}

} // namespace te
