// wide.cu - products of 9 to 64 tokens: which kernel, and how columns are shared out.
#include "prefill.cuh"
#include "wide.cuh"
#include "wide_place.cuh"

namespace te {

static const wide_kernels *wide_kernels_of(int type) {
    for (auto *group : {wide_float, wide_32, wide_bits, wide_table, wide_k, wide_k23})
        if (const wide_kernels *k = group(type)) return k;
    return nullptr;
}

// Which of the kernels takes so many tokens; WIDE_KERNELS: none.
static int kernel_for(int n_tok) {
    int i = 0;
    while (i < WIDE_KERNELS && 8 * wide_tiles[i] < n_tok) i++;
    return n_tok > TE_CUDA_MAX_TOK ? i : WIDE_KERNELS;
}

te_cuda_half half_form(te_cuda *d, int32_t type, int32_t n_tok, int32_t cols) {
    const wide_kernels *k = wide_kernels_of(type);
    const int i = kernel_for(n_tok);
    te_cuda_half h = {};
    h.ld = (size_t)divide_up(cols, 8) * 8;
    const int groups = group_tiles_for(d, type, n_tok), most = most_tiles_for(d, type, n_tok),
              ring = most ? most : ring_tiles_for(d, type, n_tok);
    if (!k || (!groups && !ring && (i == WIDE_KERNELS || wide_smem(wide_tiles[i]) > d->smem_block))) return h;
    h.ld = (size_t)divide_up(cols, 256) * 256;
    h.words = k->words;
    if (ring) {
        h.tiles = ring;
        h.matrices = HALF_IN_ORDER;
    } else if (groups) {
        h.tiles = groups;
        h.matrices = HALF_IN_TURN;
    } else {
        h.tiles = wide_tiles[i];
    }
    return h;
}

// Blocks of a cluster: enough that all multiprocessors have work. Measured: clusters of 8 where two blocks fit on a
// multiprocessor take longer than half as many.
static int splits_of(const te_cuda *d, int blocks, int per_sm, int chunks) {
    const double wanted = (per_sm > 2 ? 1.4 : 0.9) * d->info.n_sm;
    int n = 1;
    while (d->info.major >= 9 && n < 8 && blocks * n < wanted && 2 * n <= chunks) n *= 2;
    return n;
}

te_status multiply_wide(te_cuda *d, const te_cuda_gemm *op) {
    const te_cuda_half &x = op->x;
    if (is_most(op)) return multiply_most(d, op);
    if (x.matrices == HALF_IN_ORDER)
        return op->transposed && op->product[0].w.type != TE_F16 ? multiply_neurons(d, op) : multiply_ring(d, op);
    if (x.matrices) return multiply_groups(d, op);
    if (op->act) return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: an activation of these products"));
    const int at = kernel_for(op->n_tok);
    if (op->transposed || at == WIDE_KERNELS || x.tiles != wide_tiles[at] || x.ld % 256)
        return refuse(d, te_fail(TE_ARGUMENT, "gemm: %d tokens in %d tiles", (int)op->n_tok, (int)x.tiles));
    bool done[TE_MAX_PRODUCTS] = {};
    for (int i = 0; i < op->n_products; i++) {
        if (done[i]) continue;
        const te_mat *w = &op->product[i].w;
        const wide_kernels *k = wide_kernels_of(w->type);
        if (!k || k->words != x.words)
            return refuse(d, te_fail(TE_ARGUMENT, "gemm: the input is not that of weights of type %d", (int)w->type));
        const auto &of = k->of[at];
        wide_args a = {};
        a.x = (const uint4 *)x.v;
        a.scale = x.scale;
        a.n_tok = op->n_tok;
        a.cols = w->cols;
        int blocks = 0;
        for (int j = i; j < op->n_products; j++) { // those of one format in one launch
            const te_product *p = &op->product[j];
            if (p->w.type != w->type) continue;
            if (p->mark) return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: marks of a few tokens' products"));
            done[j] = true;
            a.product[a.n_products++] = {(const uint8_t *)p->w.w,
                                         p->w.stride,
                                         p->bias,
                                         p->add,
                                         p->y,
                                         p->ld_add,
                                         p->ldy,
                                         p->w.n_rows,
                                         blocks,
                                         p->relu != 0};
            blocks += divide_up(p->w.n_rows, WIDE_ROWS);
        }
        a.splits = splits_of(d, blocks, of.blocks, divide_up(w->cols, k->chunk));
        TE_CUDA_TRY(launch_clusters(d, "gemm", of.run, dim3((unsigned)(blocks * a.splits)), (unsigned)a.splits,
                                    WIDE_THREADS, wide_smem(x.tiles), a));
    }
    return TE_OK;
}

} // namespace te
