// wide_groups.cu - products of 9 to 240 tokens on Hopper: which there are, and how rows and columns are shared out.
#include "prefill.cuh"
#include "wide_groups.cuh"
#include "wide_many.cuh"

namespace te {

static const group_kernels *kernels_of_groups(int type) {
    const group_kernels *k = groups_32(type);
    return k ? k : groups_k(type);
}

// Of more than GROUP_TOK tokens.
static const many_kernels *many_kernels_of(int type) {
    const many_kernels *k = many_32(type);
    return k ? k : many_k(type);
}
static int many_kernel_for(int n_tok) {
    int i = 0;
    while (i < MANY_KERNELS && 8 * many_tiles[i] < n_tok) i++;
    return i;
}

int group_tiles_for(const te_cuda *d, int32_t type, int32_t n_tok) {
#ifdef TE_CUDA_WGMMA // the build has code for sm_90a
    if (d->info.major != 9 || n_tok <= TE_CUDA_MAX_TOK || n_tok > MANY_TOK || d->smem_block < GROUP_ROOM + 2048 ||
        !has_maps())
        return 0;
    if (n_tok <= GROUP_TOK) return kernels_of_groups(type) ? divide_up(n_tok, 8) : 0;
    return many_kernels_of(type) ? many_tiles[many_kernel_for(n_tok)] : 0;
#else
    (void)d;
    (void)type;
    (void)n_tok;
    return 0;
#endif
}

struct group_cut {
    int each, blocks, across, deep, splits, shares, slots, stages;
};

// Blocks of so many groups; each has rows of one product.
static int blocks_of(const group_args &a, int each) {
    if (a.activates) return divide_up(a.groups, each);
    int n = 0;
    for (int i = 0; i < a.n_products; i++) n += divide_up(divide_up(a.product[i].rows, 16), each);
    return n;
}
static int groups_each(const group_args &a, int blocks) { // with at most so many blocks
    int each = divide_up(a.groups, blocks);
    while (blocks_of(a, each) > blocks) each++;
    return each;
}

// A block, or two that split its columns, for each multiprocessor, or as many for each where it cannot have so many groups.
static group_cut cut_of(const te_cuda *d, const group_args &a, int tiles, int row_bytes) {
    const int pairs = d->info.n_sm / 2, n = divide_up(a.cols, GROUP_COLS), most_each = group_most(tiles, row_bytes);
    group_cut c = {};
    c.splits = n > 1 && a.groups > 0 && pairs > a.n_products && groups_each(a, pairs) <= most_each ? 2 : 1;
    int turns = 1;
    auto wanted = [&] { return c.splits == 2 ? pairs : d->info.n_sm * turns; };
    while (wanted() < a.n_products || groups_each(a, wanted()) > most_each) turns++;
    c.each = groups_each(a, wanted());
    c.blocks = blocks_of(a, c.each);
    c.across = divide_up(c.each, 4) * 4;
    c.deep = GROUP_WARPS / c.across < GROUP_DEEP ? GROUP_WARPS / c.across : GROUP_DEEP;
    // As many stages as there are, or find room, and as many for each of `deep`. Of the tokens' values three for each, of which
    // two come while one is multiplied, where as many of rows find room beside them, or at least so many that some come.
    const int steps = group_steps(tiles), per = steps * c.deep;
    const int all = divide_up(divide_up(n, c.splits), c.deep) * c.deep, most = GROUP_STAGES / c.deep * c.deep,
              most_x = GROUP_STAGES / per * per, ahead = GROUP_AHEAD / (c.each * 16 * row_bytes) / c.deep * c.deep;
    auto fits = [&] { return group_smem(tiles, row_bytes, c.each, c.across, c.deep, c.slots, c.stages) <= GROUP_ROOM; };
    c.slots = 3 * c.deep;
    c.stages = 3 * per;
    const int least = fits() ? 3 * per : steps == 1 ? 2 * c.deep : 4;
    c.stages = steps * all < most_x ? steps * all : most_x;
    c.slots = all < most ? all : most;
    if (c.slots > ahead) c.slots = ahead > 2 * c.deep ? ahead : 2 * c.deep;
    while (c.stages > least && !fits()) c.stages -= per;
    while (c.slots > c.deep && !fits()) c.slots -= c.deep;
    while (c.stages > per && !fits()) c.stages -= per;
    return c;
}

// The same of more tokens: a block has all columns and shares the tokens' values with another one, or two split the columns of
// rows that both have.
static group_cut many_cut_of(const te_cuda *d, const group_args &a, int tiles, int row_bytes) {
    const int pairs = d->info.n_sm / 2, n = divide_up(a.cols, GROUP_COLS), most_each = many_most(tiles, row_bytes);
    group_cut c = {};
    c.splits = n > 1 && a.groups > 0 && pairs > a.n_products && groups_each(a, pairs) <= most_each ? 2 : 1;
    int turns = 1;
    auto wanted = [&] { return c.splits == 2 ? pairs : pairs * 2 * turns; };
    while (wanted() < a.n_products || groups_each(a, wanted()) > most_each) turns++;
    c.each = groups_each(a, wanted());
    c.blocks = blocks_of(a, c.each);
    c.shares = c.splits == 1 && c.blocks > 1 ? 2 : 1;
    c.blocks = divide_up(c.blocks, c.shares) * c.shares;
    c.across = divide_up(c.each, 4) * 4;
    c.deep = many_deep(c.each);
    const many_ring ring = many_ring_of(tiles, row_bytes, c.each);
    c.slots = ring.slots;
    c.stages = ring.stages;
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
    const bool many = op->n_tok > GROUP_TOK;
    const int at = many ? many_kernel_for(op->n_tok) : divide_up(op->n_tok, 8) - 2;
    if (op->transposed || op->n_tok <= TE_CUDA_MAX_TOK || op->n_tok > MANY_TOK ||
        x.tiles != (many ? many_tiles[at] : at + 2) || x.ld % 256 || x.matrices != HALF_IN_TURN)
        return refuse(d, te_fail(TE_ARGUMENT, "gemm: %d tokens in %d tiles", (int)op->n_tok, (int)x.tiles));
    if (op->act) TE_CUDA_TRY(check_act(d, op));
    bool done[TE_MAX_PRODUCTS] = {};
    for (int i = 0; i < op->n_products; i++) {
        if (done[i]) continue;
        const te_mat *w = &op->product[i].w;
        const group_kernels *few = many ? nullptr : kernels_of_groups(w->type);
        const many_kernels *k = many_kernels_of(w->type); // which has all that these have
        if (!k || (!many && !few) || k->words != x.words)
            return refuse(d, te_fail(TE_ARGUMENT, "gemm: the input is not that of weights of type %d", (int)w->type));
        group_job job = {};
        group_args &a = job.of;
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
        const group_cut c = many ? many_cut_of(d, a, x.tiles, k->row_bytes) : cut_of(d, a, x.tiles, k->row_bytes);
        if (op->act && c.blocks * c.splits > (int)GROUP_DONE)
            return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: %d neurons with an activation", (int)op->act->n));
        a.each = c.each;
        a.across = c.across;
        a.deep = c.deep;
        a.splits = c.splits;
        a.slots = c.slots;
        a.stages = c.stages;
        int first = 0;
        for (int j = 0; j < a.n_products; j++) {
            wide_product &p = a.product[j];
            p.first = first;
            first += divide_up(divide_up(p.rows, 16), c.each) * c.each;
            for (int i = 0; i < k->parts; i++) {
                const group_part part = k->part(i, w->cols);
                TE_CUDA_TRY(map_box(d, p.w + part.at, MAP_BYTES, (int)part.length, p.rows, p.stride, part.width,
                                    (op->act ? 8 : 16) * c.each, &job.map[j][i]));
            }
        }
        if (many) {
            TE_CUDA_TRY(launch_clusters(d, "gemm", k->run[at], dim3((unsigned)(c.blocks * c.splits)),
                                        (unsigned)(c.splits * c.shares), many_threads(c.across * c.deep),
                                        many_smem(x.tiles, k->row_bytes, c.each, c.across, c.deep, c.slots, c.stages),
                                        many_job{job, c.shares}));
            continue;
        }
        TE_CUDA_TRY(launch_clusters(d, "gemm", few->run[at], dim3((unsigned)(c.blocks * c.splits)), (unsigned)c.splits,
                                    32 * c.across * c.deep + 64,
                                    group_smem(x.tiles, k->row_bytes, c.each, c.across, c.deep, c.slots, c.stages),
                                    job));
    }
    return TE_OK;
}

} // namespace te
