// wide_ring.cu - products of 9 to 192 tokens with F16 on Hopper: how rows and columns are shared out, and where matrices are.
#include "../core/te_os.h"
#include "prefill.cuh"
#include "wide_ring.cuh"

namespace te {

// cuTensorMapEncodeTiled is the driver's; its arguments and their values are declared here.
enum { MAP_PLAIN = 0, MAP_SWIZZLE_64 = 2, MAP_SWIZZLE_128 = 3, MAP_L2_256 = 3, MAP_ZEROS = 0 };
typedef int (*encode_map)(ring_map *, int type, uint32_t rank, const void *, const uint64_t *size,
                          const uint64_t *stride, const uint32_t *box, const uint32_t *step, int interleave,
                          int swizzle, int promotion, int fill);
static encode_map map_encoder() { // NULL: an older driver
    static encode_map found;
    encode_map f = __atomic_load_n(&found, __ATOMIC_ACQUIRE);
    if (f) return f;
    char why[256];
    void *library = te_os_library("libcuda.so.1", why, sizeof why);
    if (!library || !te_os_symbol(library, "cuTensorMapEncodeTiled", (void *)&f, sizeof f)) return nullptr;
    __atomic_store_n(&found, f, __ATOMIC_RELEASE);
    return f;
}

bool has_maps() { return map_encoder() != nullptr; }

te_status map_box(te_cuda *d, const void *at, int type, int cols, int rows, size_t stride, int box_cols, int box_rows,
                  ring_map *out) {
    const uint64_t size[2] = {(uint64_t)cols, (uint64_t)rows}, strides[1] = {stride};
    const uint32_t box[2] = {(uint32_t)box_cols, (uint32_t)box_rows}, step[2] = {1, 1};
    const int width =
                  box_cols *
                  (type == MAP_F16 ? 2 : 1), // those that fit are arranged so that columns of rows are in other banks
        swizzle = width == 128  ? MAP_SWIZZLE_128
                  : width == 64 ? MAP_SWIZZLE_64
                                : MAP_PLAIN;
    const int e = map_encoder()(out, type, 2, at, size, strides, box, step, MAP_PLAIN, swizzle, MAP_L2_256, MAP_ZEROS);
    if (!e) return TE_OK;
    return refuse(d, te_fail(TE_DEVICE, "gemm: the driver has no map of %d x %d (error %d)", rows, cols, e));
}

#define RING_KERNEL(tiles, cols) {ring_kernel<tiles, false, cols>, ring_kernel<tiles, true, cols>}
// Of the first numbers of tiles in ring_tiles; each pair's other one of transposed products.
static void (*const wide_kernels[GROUP_KERNELS][2])(ring_args) = {
    RING_KERNEL(2, RING_WIDE),  RING_KERNEL(3, RING_WIDE),  RING_KERNEL(4, RING_WIDE),  RING_KERNEL(5, RING_WIDE),
    RING_KERNEL(6, RING_WIDE),  RING_KERNEL(7, RING_WIDE),  RING_KERNEL(8, RING_WIDE),  RING_KERNEL(9, RING_WIDE),
    RING_KERNEL(10, RING_WIDE), RING_KERNEL(11, RING_WIDE), RING_KERNEL(12, RING_WIDE), RING_KERNEL(13, RING_WIDE),
    RING_KERNEL(14, RING_WIDE), RING_KERNEL(15, RING_WIDE), RING_KERNEL(16, RING_WIDE)};
// Of the last ones, of more than RING_WIDE_TILES.
static void (*const narrow_kernels[][2])(ring_args) = {
    RING_KERNEL(13, RING_TILE), RING_KERNEL(14, RING_TILE), RING_KERNEL(15, RING_TILE),
    RING_KERNEL(16, RING_TILE), RING_KERNEL(17, RING_TILE), RING_KERNEL(18, RING_TILE),
    RING_KERNEL(20, RING_TILE), RING_KERNEL(22, RING_TILE), RING_KERNEL(24, RING_TILE)};
constexpr int RING_NARROW = sizeof narrow_kernels / sizeof *narrow_kernels;
static_assert(ring_tiles[RING_KERNELS - RING_NARROW] == RING_WIDE_TILES + 1 &&
                  ring_tiles[GROUP_KERNELS - 1] == GROUP_TOK / 8,
              "a kernel of each number of tiles");
static int ring_kernel_for(int n_tok) {
    int i = 0;
    while (i < RING_KERNELS && 8 * ring_tiles[i] < n_tok) i++;
    return i;
}

struct ring_cut {
    int rows, splits, stages, cols;
};
static size_t ring_smem(int tiles, const ring_cut &c) {
    const size_t x = (size_t)(c.stages * ring_x(tiles, c.cols)),
                 // the last group multiplies 64 rows, whatever is there
        over = (size_t)(divide_up(c.rows, 64) * 64 - c.rows) * 2 * RING_TILE,
                 ring = (size_t)(c.stages * c.rows) * 2 * (size_t)c.cols + (x > over ? x : over),
                 part = sizeof(float) * (size_t)(8 * tiles * (c.rows + 4));
    return 2 * RING_BEGIN + (ring > part ? ring : part);
}
// Kernels have some shared memory besides: of each token a scale, and its largest hidden value.
static size_t ring_bytes(const te_cuda *d, int tiles) {
    return d->smem_block - (size_t)(512 + 32 * tiles + 4 * ring_room(tiles));
}

int ring_tiles_for(const te_cuda *d, int32_t type, int32_t n_tok) {
#ifdef TE_CUDA_WGMMA // the build has code for sm_90a
    const bool has =
        d->info.major == 9 && type == TE_F16 && n_tok > TE_CUDA_MAX_TOK && n_tok <= RING_TOK && map_encoder();
    const int tiles = has ? ring_tiles[ring_kernel_for(n_tok)] : 0;
    const ring_cut least = {RING_ROWS, 1, RING_LEAST_STAGES, tiles > RING_WIDE_TILES ? RING_TILE : RING_WIDE};
    return has && ring_smem(tiles, least) <= ring_bytes(d, tiles) ? tiles : 0;
#else
    (void)d;
    (void)type;
    (void)n_tok;
    return 0;
#endif
}

// As many stages as find room. Of more tokens they are narrow where wide ones would be the fewest: gate and up, whose blocks
// have many rows, take less so.
static void choose_stages(const te_cuda *d, int tiles, ring_cut *c) {
    for (c->cols = 8 * tiles > GROUP_TOK ? RING_TILE : RING_WIDE;; c->cols = RING_TILE) {
        c->stages = RING_STAGES;
        while (c->stages > RING_LEAST_STAGES && ring_smem(tiles, *c) > ring_bytes(d, tiles)) c->stages--;
        if (tiles <= RING_WIDE_TILES || c->stages > RING_LEAST_STAGES || c->cols == RING_TILE) return;
    }
}

// A block for each multiprocessor, or two that split its columns: where there are few rows, or, of long rows, some.
static ring_cut cut_of(const te_cuda *d, int64_t n_rows, int cols, int tiles) {
    ring_cut c = {};
    const int stages = divide_up(cols, 2 * RING_TILE), sm = d->info.n_sm;
    c.splits = sm > 1 && ((n_rows <= 8 * sm && stages > 1) || (n_rows <= 40 * sm && stages > 48)) ? 2 : 1;
    const int64_t slots = sm / c.splits, turns = divide_up(n_rows, slots * RING_ROWS);
    c.rows = divide_up(divide_up(n_rows, slots * turns), 16) * 16;
    choose_stages(d, tiles, &c);
    return c;
}

// Of a transposed product a block has whole groups of 64 rows: as many, and in as many parts, as make the busiest
// multiprocessor read least. Clusters of three or four leave some without work.
static ring_cut transposed_cut(const te_cuda *d, int64_t n_rows, int cols, int tiles) {
    ring_cut c = {};
    const int stages = divide_up(cols, 2 * RING_TILE), n = divide_up(n_rows, 64);
    int least = 0;
    for (int splits = 1; splits <= 4 && splits <= stages; splits++)
        for (int groups = 1; groups <= RING_GROUPS; groups++) {
            const int fit = d->info.n_sm * (splits > 2 ? 15 : 16) / 16 / splits; // clusters at once
            if (fit < 1) continue;                                               // on a small part of a GPU
            const int turns = divide_up(divide_up(n, groups), fit),
                      cost = turns * (groups * divide_up(stages, splits) + 1); // the stage: its start
            if (least && cost >= least) continue;
            least = cost;
            c.rows = 64 * groups;
            c.splits = splits;
        }
    choose_stages(d, tiles, &c);
    return c;
}

te_status multiply_ring(te_cuda *d, const te_cuda_gemm *op) {
    const te_cuda_half &x = op->x;
    const te_mat *first = &op->product[0].w;
    const bool across = op->transposed != 0;
    if (op->n_tok <= TE_CUDA_MAX_TOK || op->n_tok > RING_TOK || x.ld % 256 ||
        x.tiles != ring_tiles_for(d, first->type, op->n_tok) || !x.tiles)
        return refuse(d, te_fail(TE_ARGUMENT, "gemm: %d tokens in %d tiles", (int)op->n_tok, (int)x.tiles));
    if (across && op->act) return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: an activation of transposed products"));
    if (op->act) TE_CUDA_TRY(check_act(d, op));
    ring_args args = {};
    group_args &a = args.of;
    int64_t n_rows = 0;
    for (int i = 0; i < op->n_products; i++) n_rows += across ? op->product[i].w.cols : op->product[i].w.n_rows;
    const int depth = across ? first->n_rows : first->cols;
    const ring_cut c = across ? transposed_cut(d, n_rows, depth, x.tiles) : cut_of(d, n_rows, depth, x.tiles);
    a.x = (const uint4 *)x.v;
    a.scale = x.scale;
    a.n_tok = op->n_tok;
    a.cols = depth;
    a.splits = c.splits;
    a.stages = c.stages;
    args.rows = c.rows;
    for (int i = 0; i < op->n_products; i++) {
        const te_product *p = &op->product[i];
        if (p->w.type != TE_F16)
            return refuse(d, te_fail(TE_ARGUMENT, "gemm: the input is not that of weights of type %d", (int)p->w.type));
        if (p->mark) return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: marks of a few tokens' products"));
        const int rows = across ? p->w.cols : p->w.n_rows;
        TE_CUDA_TRY(map_box(d, p->w.w, MAP_F16, p->w.cols, p->w.n_rows, p->w.stride, RING_TILE,
                            across ? c.cols : c.rows / 2, args.map + i));
        a.product[a.n_products++] = {(const uint8_t *)p->w.w,
                                     p->w.stride,
                                     p->bias,
                                     p->add,
                                     p->y,
                                     p->ld_add,
                                     p->ldy,
                                     rows,
                                     a.groups,
                                     p->relu != 0};
        a.groups += divide_up(rows, c.rows) * (c.rows / 16);
    }
    if (op->act) {
        a.activates = true;
        a.act = *op->act;
        a.counter = op->counter;
        a.groups = divide_up(op->act->n, 8);
    }
    const int blocks = divide_up(a.groups, c.rows / 16) * c.splits;
    if (op->act && blocks > (int)GROUP_DONE)
        return refuse(d, te_fail(TE_UNSUPPORTED, "gemm: %d neurons with an activation", (int)op->act->n));
    const int at = ring_kernel_for(op->n_tok);
    auto *kernel = c.cols == RING_WIDE ? wide_kernels[at] : narrow_kernels[at - (RING_KERNELS - RING_NARROW)];
    return launch_clusters(d, "gemm", kernel[across], dim3((unsigned)blocks), (unsigned)c.splits,
                           128 * divide_up(c.rows, 64) + 32, ring_smem(x.tiles, c), args);
}

} // namespace te
