// wide_groups.cu - products of 9 to 64 tokens on Hopper: which there are, and how rows and columns are shared out.
#include "prefill.cuh"
#include "wide_groups.cuh"

namespace te {

static const group_kernels *kernels_of_groups(int type) {
    const group_kernels *k = groups_32(type);
    return k ? k : groups_k(type);
}

static int kernel_for(int n_tok) {
    int i = 0;
    while (i < GROUP_KERNELS && 8 * group_tiles[i] < n_tok) i++;
    return i;
}

int group_tiles_for(const te_cuda *d, int32_t type, int32_t n_tok) {
#ifdef TE_CUDA_WGMMA // the build has code for sm_90a
    const bool has = d->info.major == 9 && kernels_of_groups(type) && n_tok > TE_CUDA_MAX_TOK &&
                     n_tok <= TE_CUDA_WIDE_TOK && d->smem_block >= GROUP_ROOM + 1024;
    return has ? group_tiles[kernel_for(n_tok)] : 0;
#else
    (void)d;
    (void)type;
    (void)n_tok;
    return 0;
#endif
}

struct group_cut {
    int blocks, across, deep, splits, stages;
};

// A block, or two that split its columns, for each multiprocessor, or as many for each where it cannot have so many groups.
static group_cut cut_of(const te_cuda *d, int groups, int cols, int tiles, int slot) {
    const int pairs = d->info.n_sm / 2, n = divide_up(cols, GROUP_COLS);
    group_cut c = {};
    c.splits = n > 1 && groups <= pairs * GROUP_WARPS ? 2 : 1;
    const int wanted = c.splits == 2 ? pairs : d->info.n_sm * divide_up(groups, (int64_t)d->info.n_sm * GROUP_WARPS);
    c.blocks = wanted < groups ? wanted : groups;
    c.across = divide_up(divide_up(groups, c.blocks), 4) * 4;
    c.deep = GROUP_WARPS / c.across < GROUP_DEEP ? GROUP_WARPS / c.across : GROUP_DEEP;
    // As many stages as there are, or find room, and as many for each of `deep`.
    const int all = divide_up(divide_up(n, c.splits), c.deep) * c.deep;
    c.stages = all < GROUP_STAGES ? all : GROUP_STAGES;
    while (c.stages > c.deep && group_smem(tiles, slot, c.across, c.deep, c.stages) > GROUP_ROOM) c.stages -= c.deep;
    return c;
}

te_status check_act(te_cuda *d, const te_cuda_gemm *op) {
    const te_cuda_act *a = op->act;
    const te_mat *up = &op->product[0].w, *gate = &op->product[1].w;
    if (op->n_products != 2 || up->type != gate->type || up->n_rows != a->n || gate->n_rows != a->n || a->mask ||
        a->id || !a->to.tiles || !a->to.matrices || a->to.ld % 256 || a->to.ld < (size_t)a->n || !op->counter)
        return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: an activation of other products than gate and up"));
    if (!aligned(a->up, 16) || a->ld_up % 4 || !aligned(a->to.v, 16) || !a->to.scale)
        return refuse(d, te_fail(TE_ARGUMENT, "gemm: hidden values are not aligned to 16 bytes"));
    return TE_OK;
}

te_status multiply_groups(te_cuda *d, const te_cuda_gemm *op) {
    const te_cuda_half &x = op->x;
    const int at = kernel_for(op->n_tok);
    if (op->transposed || at == GROUP_KERNELS || x.tiles != group_tiles[at] || x.ld % 256 || x.matrices != HALF_IN_TURN)
        return refuse(d, te_fail(TE_ARGUMENT, "gemm: %d tokens in %d tiles", (int)op->n_tok, (int)x.tiles));
    if (op->act) TE_CUDA_TRY(check_act(d, op));
    bool done[TE_MAX_PRODUCTS] = {};
    for (int i = 0; i < op->n_products; i++) {
        if (done[i]) continue;
        const te_mat *w = &op->product[i].w;
        const group_kernels *k = kernels_of_groups(w->type);
        if (!k || k->words != x.words)
            return refuse(d, te_fail(TE_ARGUMENT, "gemm: the input is not that of weights of type %d", (int)w->type));
        group_args a = {};
        a.x = (const uint4 *)x.v;
        a.scale = x.scale;
        a.n_tok = op->n_tok;
        a.cols = w->cols;
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
                                         a.groups,
                                         p->relu != 0};
            a.groups += divide_up(p->w.n_rows, 16);
        }
        if (op->act) {
            a.activates = true;
            a.act = *op->act;
            a.counter = op->counter;
            a.groups = divide_up(op->act->n, 8);
        }
        const group_cut c = cut_of(d, a.groups, w->cols, x.tiles, k->slot);
        a.across = c.across;
        a.deep = c.deep;
        a.splits = c.splits;
        a.stages = c.stages;
        TE_CUDA_TRY(launch_clusters(d, "gemm", k->run[at], dim3((unsigned)(c.blocks * c.splits)), (unsigned)c.splits,
                                    32 * c.across * c.deep, group_smem(x.tiles, k->slot, c.across, c.deep, c.stages),
                                    a));
    }
    return TE_OK;
}

} // namespace te
