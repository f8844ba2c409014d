// wide_most.cu - products of most tokens on Hopper: which there are, and how rows and columns are shared out.
#include "prefill.cuh"
#include "wide_most.cuh"
#include "wide_place.cuh"

namespace te {

static const most_kernels *kernels_of_most(int type) {
    const most_kernels *k = most_32(type);
    return k ? k : most_k(type);
}
constexpr int MOST_EACH = 5;
constexpr int most_each[MOST_EACH] = {4, 6, 8, 11, 12};
static constexpr most_run most_rows[MOST_EACH] = {
    most_run_of<most_floats<4, false>, 2>(), most_run_of<most_floats<6, false>, 2>(),
    most_run_of<most_floats<8, false>, 2>(), most_run_of<most_floats<11, false>, 2>(),
    most_run_of<most_floats<12, false>, 2>()};
static constexpr most_run most_transposed = most_run_of<most_floats<4, true>, 2>();

int most_tiles_for(const te_cuda *d, int32_t type, int32_t n_tok) {
#ifdef TE_CUDA_WGMMA // the build has code for sm_90a
    const bool has = d->info.major == 9 && type == TE_F16 && n_tok > RING_TOK && n_tok <= MOST_TOK &&
                     d->smem_block >= GROUP_ROOM + 2048 && has_maps();
    return has ? divide_up(n_tok, 8) : 0;
#else
    (void)d;
    (void)type;
    (void)n_tok;
    return 0;
#endif
}

bool is_most(const te_cuda_gemm *op) {
    const bool floats = op->product[0].w.type == TE_F16;
    return op->x.matrices == HALF_IN_ORDER && (floats || op->transposed) &&
           op->n_tok > (floats ? RING_TOK : NEURON_TOK);
}

struct most_cut {
    const most_run *run;
    int results, blocks, splits, shares; // of a block
};

// Blocks of `each` groups; each has rows of one product.
static int blocks_of(const group_args &a, int each) {
    if (a.activates) return divide_up(a.groups, each);
    int n = 0;
    for (int i = 0; i < a.n_products; i++) n += divide_up(divide_up(a.product[i].rows, 16), each);
    return n;
}

// How many blocks of which kernel, and whether those of a cluster split their columns: what takes least, as wgmma takes it and as
// the tokens' values pass through L2, 3,100 bytes a cycle.
static most_cut cut_of(const te_cuda *d, const group_args &a) {
    most_cut best = {};
    double least = 0;
    const int steps = divide_up(a.cols, MOST_COLS);
    for (int i = 0; i < MOST_EACH; i++)
        for (int splits = 1; splits <= 3 && splits <= steps; splits++) {
            const int fit = d->info.n_sm * (splits > 2 ? 15 : 16) / 16 / splits; // clusters at once
            if (fit < 1) continue;                                               // on a small part of a GPU
            most_cut c = {most_rows + i, 16 * most_each[i], blocks_of(a, most_each[i]), splits, 1};
            c.shares = splits == 1 && c.blocks > 1 && d->info.n_sm > 1 ? 2 : 1;
            c.blocks = divide_up(c.blocks, c.shares) * c.shares;
            const int turns = divide_up(c.blocks, fit), active = (c.blocks < fit ? c.blocks : fit) * splits;
            const double multiply = MOST_TOK * c.results / 32.0, bring = 128.0 * MOST_TOK / c.shares * active / 3100,
                         cost = turns * (divide_up(steps, splits) * (multiply > bring ? multiply : bring) + 4000);
            if (least > 0 && cost >= least) continue;
            least = cost;
            best = c;
        }
    return best;
}

// By neuron: in as many parts as make the busiest multiprocessor multiply least. Of clusters of more than two not all
// multiprocessors find room.
static most_cut cut_across(const te_cuda *d, const group_args &a, const most_run *run, int results) {
    most_cut c = {run, results, divide_up(a.product[0].rows, results), 1, 1};
    int least = 0;
    for (int splits = 1; splits <= 4 && splits <= divide_up(a.cols, MOST_COLS); splits++) {
        const int fit = d->info.n_sm * (splits > 2 ? 15 : 16) / 16 / splits;
        if (fit < 1) continue;
        const int cost = divide_up(c.blocks, fit) * (divide_up(divide_up(a.cols, MOST_COLS), splits) + 1);
        if (least && cost >= least) continue;
        least = cost;
        c.splits = splits;
    }
    return c;
}

// Where a product's rows are, as copies take them.
static te_status map_rows(te_cuda *d, const te_cuda_gemm *op, const most_kernels *k, int results, const te_mat &w,
                          ring_map *map) {
    if (!k)
        return map_box(d, w.w, MAP_F16, w.cols, w.n_rows, w.stride, MOST_COLS, op->transposed ? MOST_COLS : results / 2,
                       map);
    const int blocks = w.cols / k->weights;
    for (int i = 0; i < k->n_boxes; i++) {
        const neuron_box b = k->box(i);
        TE_CUDA_TRY(map_box(d, (const uint8_t *)w.w + (size_t)b.at * (size_t)blocks, MAP_BYTES, b.bytes * blocks,
                            w.n_rows, w.stride, b.width, MOST_COLS, map + i));
    }
    return TE_OK;
}

te_status multiply_most(te_cuda *d, const te_cuda_gemm *op) {
    const te_cuda_half &x = op->x;
    const int type = op->product[0].w.type, teams = op->n_tok > most_tokens(3) ? 2 : 3;
    if (op->n_tok > MOST_TOK || 8 * x.tiles < op->n_tok || 8 * x.tiles > most_tokens(teams) || x.ld % 256)
        return refuse(d, te_fail(TE_ARGUMENT, "gemm: %d tokens in %d tiles", (int)op->n_tok, (int)x.tiles));
    const most_kernels *k = type == TE_F16 ? nullptr : kernels_of_most(type);
    if ((op->transposed && (op->act || op->n_products > 1)) || (type != TE_F16 && !k))
        return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: %d products of type %d by neuron", (int)op->n_products, type));
    if (op->act) TE_CUDA_TRY(check_act(d, op));
    most_job job = {};
    group_args &a = job.of.of;
    a.x = (const uint4 *)x.v;
    a.scale = x.scale;
    a.n_tok = op->n_tok;
    a.cols = op->transposed ? op->product[0].w.n_rows : op->product[0].w.cols;
    for (int i = 0; i < op->n_products; i++) {
        const te_product *p = &op->product[i];
        if (p->w.type != type)
            return refuse(d, te_fail(TE_ARGUMENT, "gemm: the input is not that of weights of type %d", (int)p->w.type));
        if (p->mark) return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: marks of a few tokens' products"));
        const int rows = op->transposed ? p->w.cols : p->w.n_rows;
        a.product[a.n_products++] = {
            (const uint8_t *)p->w.w, p->w.stride, p->bias, p->add, p->y, p->ld_add, p->ldy, rows, 0, p->relu != 0};
        a.groups += divide_up(rows, 16);
    }
    if (op->act) {
        a.activates = true;
        a.act = *op->act;
        a.counter = op->counter;
        a.groups = divide_up(op->act->n, 8);
    }
    const most_cut c = !op->transposed ? cut_of(d, a)
                       : k             ? cut_across(d, a, k->across + (teams < 3), NEURON_OUTPUTS / 2)
                                       : cut_across(d, a, &most_transposed, 64);
    if (op->act && c.blocks * c.splits > (int)GROUP_DONE)
        return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: %d neurons with an activation", (int)op->act->n));
    a.splits = c.splits;
    job.shares = c.shares;
    job.x_tiles = x.tiles;
    int first = 0;
    for (int i = 0; i < a.n_products; i++) {
        a.product[i].first = first;
        first += divide_up(a.product[i].rows, c.results) * (c.results / 16);
        TE_CUDA_TRY(map_rows(d, op, k, c.results, op->product[i].w, job.of.map[i]));
    }
    return launch_clusters(d, "gemm", c.run->run, dim3((unsigned)(c.blocks * c.splits)),
                           (unsigned)(c.splits * c.shares), most_threads(teams), c.run->smem, job);
}

} // namespace te
