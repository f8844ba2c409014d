// down.cu - te_cuda_down and te_merge_args: checks, and the sum over the parts.
#include "down.cuh"
#include "launch.h"
#include "words.cuh"

namespace te {

static const down_kernels *down_kernels_of(int type) {
    const down_kernels *k = nullptr;
    for (auto *of : {down_float, down_32, down_bits, down_table, down_k, down_k23})
        if (!k) k = of(type);
    return k;
}

static int tiles(const te_mat *m, const down_kernels *k) { return divide_up(m->cols, DOWN_LANES * k->weights); }

// Shared memory of a block for several tokens on tensor cores.
static size_t batch_down_bytes(const down_kernels *k, int rows) {
    return (size_t)rows * (8 + 4 * BATCH_TOKENS) + (size_t)batch_factor_bytes(rows, k->factor_parts);
}

// Two blocks a multiprocessor, and no more rows of a block than it has room for.
int32_t parts(te_cuda *d, const te_mat *down, int32_t n_rows) {
    const down_kernels *k = down_kernels_of(down->type);
    if (!k || n_rows < 1) return 0;
    const bool wide = !k->factor_parts || batch_down_bytes(k, DOWN_ROWS) + 1024 <= d->smem_block;
    const int wanted = 2 * d->info.n_sm / tiles(down, k), least = divide_up(n_rows, wide ? DOWN_ROWS : DOWN_ROWS / 2),
              most = divide_up(n_rows, DOWN_GROUPS);
    const int n = wanted < most ? wanted : most;
    return n > least ? n : least;
}

te_status down(te_cuda *d, const te_cuda_down *op) {
    TE_CUDA_TRY(check_matrix(d, "down", &op->w));
    if (op->n_tok < 1 || op->n_tok > TE_CUDA_MAX_TOK)
        return refuse(d,
                      te_fail(TE_ARGUMENT, "down: %d tokens, 1 to %d are possible", (int)op->n_tok, TE_CUDA_MAX_TOK));
    if (!op->h || !op->partial) return refuse(d, te_fail(TE_ARGUMENT, "down: no input or no result"));
    const int n = op->rows.list ? op->rows.n : op->w.n_rows;
    if (n < 1) return TE_OK;
    const down_kernels *k = down_kernels_of(op->w.type);
    const int n_parts = parts(d, &op->w, n), n_tiles = tiles(&op->w, k);
    const bool several = op->n_tok > 1;
    down_args a = {};
    a.w = (const uint8_t *)op->w.w;
    a.h = op->h;
    a.list = op->rows.list;
    a.n_list = op->rows.list ? op->rows.n_list : nullptr;
    a.partial = op->partial;
    a.stride = op->w.stride;
    a.ldh = op->ldh;
    a.n_tok = op->n_tok;
    a.n = n;
    a.cols = op->w.cols;
    a.n_tiles = n_tiles;
    a.n_parts = n_parts;
    a.room = divide_up(n, n_parts);
    a.all = op->all != 0;
    const bool batch = several && k->factor_parts;
    const size_t smem = batch ? batch_down_bytes(k, a.room) : 0;
    const int across = batch ? divide_up(n_tiles, BATCH_DOWN_TILES) : n_tiles;
    return launch(d, "down", k->kernel[several], dim3((unsigned)(across * n_parts)), DOWN_THREADS, smem, a);
}

constexpr int MERGE_COLS = 32, MERGE_THREADS = 512, MERGE_GROUPS = MERGE_THREADS / 8, MERGE_WARPS = MERGE_THREADS / 32;

// A block takes 32 columns of up to four tokens: eight threads four columns each, the others of every so-many-th part. (More
// blocks than find room at once would leave the last ones' parts for when the CPU's words have come.)
constexpr int MERGE_TOKENS = 4;
__global__ void __launch_bounds__(MERGE_THREADS) merge_kernel(const te_merge_args a) {
    __shared__ alignas(16) float sums[MERGE_TOKENS][MERGE_WARPS][MERGE_COLS];
    const int t0 = blockIdx.y * MERGE_TOKENS, n = min(a.n_tok - t0, MERGE_TOKENS), c0 = blockIdx.x * MERGE_COLS,
              g = threadIdx.x / 8, col = c0 + threadIdx.x % 8 * 4;
    const bool wide = a.cols % 4 == 0;
    const int t = t0 + (int)threadIdx.x / MERGE_COLS, c = c0 + (int)threadIdx.x % MERGE_COLS;
    const bool last = (int)threadIdx.x < MERGE_COLS * n && c < a.cols;
    // The CPU's word crosses the bus while the predecessor ends and the parts are added up: it may be there already.
    const uint64_t *at = last && a.words ? a.words + (size_t)t * a.cols + c : nullptr;
    uint64_t word = 0;
    dep_go();
    if (at) word = load_word(at);
    dep_wait();
    if (a.expected && __ldcg(a.expected) == 0) at = nullptr;
    float y = last && a.add ? __ldcg(a.add + t * a.ld_add + c) : 0;
    if (last && a.bias) y += __ldg(a.bias + c);
    for (int i = 0; i < n; i++) {
        float4 s = make_float4(0, 0, 0, 0);
#pragma unroll 5
        for (int b = g; b < a.n_parts; b += MERGE_GROUPS) {
            const float *from = a.partial + ((size_t)b * a.n_tok + t0 + i) * a.cols + col;
            float4 v = make_float4(0, 0, 0, 0);
            if (wide) {
                if (col < a.cols) v = __ldcg((const float4 *)from);
            } else {
                if (col < a.cols) v.x = __ldcg(from);
                if (col + 1 < a.cols) v.y = __ldcg(from + 1);
                if (col + 2 < a.cols) v.z = __ldcg(from + 2);
                if (col + 3 < a.cols) v.w = __ldcg(from + 3);
            }
            s = make_float4(s.x + v.x, s.y + v.y, s.z + v.z, s.w + v.w);
        }
#pragma unroll
        for (int o = 8; o < 32; o *= 2) {
            s.x += __shfl_xor_sync(~0u, s.x, o);
            s.y += __shfl_xor_sync(~0u, s.y, o);
            s.z += __shfl_xor_sync(~0u, s.z, o);
            s.w += __shfl_xor_sync(~0u, s.w, o);
        }
        if (threadIdx.x % 32 < 8) *(float4 *)&sums[i][threadIdx.x / 32][threadIdx.x % 8 * 4] = s;
    }
    __syncthreads();
    if (!last) return;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; w++) sum += sums[threadIdx.x / MERGE_COLS][w][threadIdx.x % MERGE_COLS];
    y += sum;
    if (at) y += __uint_as_float(await_word(at, word, ticket_number(a.ticket), a.cancelled, a.limit_ns));
    a.y[t * a.ldy + c] = y;
}

te_status merge(te_cuda *d, const te_merge_args *op) {
    if (op->n_parts < 0 || op->cols < 1 || op->n_tok < 1 || !op->y || (op->n_parts && !op->partial) ||
        (op->words && (!op->ticket.base || !op->cancelled)))
        return refuse(d, te_fail(TE_ARGUMENT, "merge: %d parts of %d columns and %d tokens", (int)op->n_parts,
                                 (int)op->cols, (int)op->n_tok));
    const dim3 grid((unsigned)divide_up(op->cols, MERGE_COLS), (unsigned)divide_up(op->n_tok, MERGE_TOKENS));
    return launch(d, "merge", merge_kernel, grid, MERGE_THREADS, 0, *op);
}

} // namespace te
