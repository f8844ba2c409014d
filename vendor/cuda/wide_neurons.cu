// wide_neurons.cu - products of 9 to 144 tokens with rows by neuron on Hopper: how rows are shared out, and where matrices are.
#include "prefill.cuh"
#include "wide_neurons.cuh"

namespace te {

static const neuron_kernels *neuron_kernels_of(int type) {
    const neuron_kernels *k = neurons_32(type);
    return k ? k : neurons_k(type);
}

static size_t neuron_smem(int tiles, const neuron_kernels *k, int stages) {
    const size_t ring = (size_t)(stages * k->rows(tiles)) * (size_t)(k->bytes + tiles * 16),
                 part = sizeof(float) * (size_t)(8 * tiles * NEURON_LD);
    return 2 * RING_BEGIN + (ring > part ? ring : part);
}
static int stages_of(const te_cuda *d, const neuron_kernels *k, int tiles) {
    // What kernels declare: factors, of more tokens by all teams.
    const size_t own = 1024 + (size_t)((8 * tiles > TE_CUDA_WIDE_TOK ? 32 : 16) * k->factors * k->rows(tiles));
    int stages = RING_STAGES;
    while (stages > RING_LEAST_STAGES && neuron_smem(tiles, k, stages) + own > d->smem_block) stages--;
    return stages;
}

// How many clusters of so many blocks run at once: parts of a GPU have so many multiprocessors that some are left over. Each of
// these kernels fills a multiprocessor, so that the first one's answer is that of all.
static te_status clusters_at_once(te_cuda *d, void (*kernel)(neuron_args), size_t smem, const int **out) {
    te_cuda_prefill *p;
    TE_CUDA_TRY(prefill_state(d, &p));
    *out = p->at_once;
    if (p->at_once[0]) return TE_OK;
    cudaError_t e = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    for (int n = 1; n <= NEURON_SPLITS && e == cudaSuccess; n++) {
        cudaLaunchAttribute cluster = {};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {(unsigned)n, 1, 1};
        cudaLaunchConfig_t c = {};
        c.gridDim = dim3((unsigned)n);
        c.blockDim = dim3(NEURON_THREADS);
        c.dynamicSmemBytes = smem;
        c.attrs = &cluster;
        c.numAttrs = 1;
        e = cudaOccupancyMaxActiveClusters(p->at_once + n, kernel, &c);
    }
    if (e != cudaSuccess) return refuse(d, cuda_status(e, "cudaOccupancyMaxActiveClusters"));
    p->at_once[0] = 1;
    return TE_OK;
}

// Blocks of a cluster, so that the busiest multiprocessor reads least.
static int splits_of(const int *at_once, int tiles, int stages) {
    int best = 1, least = 0;
    for (int n = 1; n <= NEURON_SPLITS && n <= stages; n++) {
        if (at_once[n] < 1) continue;
        const int cost = divide_up(tiles, at_once[n]) * (divide_up(stages, n) + 1); // the stage: its start
        if (least && cost >= least) continue;
        least = cost;
        best = n;
    }
    return best;
}

te_status multiply_neurons(te_cuda *d, const te_cuda_gemm *op) {
    const te_cuda_half &x = op->x;
    const te_product *p = &op->product[0];
    const te_mat *w = &p->w;
    const neuron_kernels *k = neuron_kernels_of(w->type);
    const int tiles = divide_up(op->n_tok, 8); // of x.tiles those that begin at x.v
    if (!k || op->n_products != 1 || op->act || !op->transposed || x.ld % 256 || x.tiles < tiles ||
        op->n_tok > NEURON_TOK || !ring_tiles_for(d, TE_F16, op->n_tok))
        return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: %d products of type %d by neuron, %d tokens in %d tiles",
                                 (int)op->n_products, (int)w->type, (int)op->n_tok, (int)x.tiles));
    neuron_args args = {};
    group_args &a = args.of;
    for (int i = 0; i < k->n_boxes; i++) {
        const neuron_box b = k->box(i);
        const int blocks = w->cols / k->weights;
        TE_CUDA_TRY(map_box(d, (const uint8_t *)w->w + (size_t)b.at * (size_t)blocks, MAP_BYTES, b.bytes * blocks,
                            w->n_rows, w->stride, b.width, k->rows(tiles), args.map + i));
    }
    args.x_tiles = x.tiles;
    a.x = (const uint4 *)x.v;
    a.scale = x.scale;
    a.n_tok = op->n_tok;
    a.cols = w->n_rows;
    a.n_products = 1;
    a.groups = divide_up(w->cols, 16);
    a.product[0] = {(const uint8_t *)w->w, w->stride, p->bias, p->add, p->y, p->ld_add, p->ldy, w->cols, 0,
                    p->relu != 0};
    a.stages = stages_of(d, k, tiles);
    void (*const kernel)(neuron_args) = k->run[tiles - 2];
    const size_t smem = neuron_smem(tiles, k, a.stages);
    const int *at_once, blocks = divide_up(w->cols, NEURON_OUTPUTS);
    TE_CUDA_TRY(clusters_at_once(d, kernel, smem, &at_once));
    a.splits = splits_of(at_once, blocks, divide_up(w->n_rows, k->rows(tiles)));
    return launch_clusters(d, "gemm", kernel, dim3((unsigned)(blocks * a.splits)), (unsigned)a.splits, NEURON_THREADS,
                           smem, args);
}

} // namespace te
