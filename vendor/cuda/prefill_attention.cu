// prefill_attention.cu - attention of a prompt's tokens over the block table, on tensor cores.
//
// A first kernel norms and rotates heads: K and V go to the pool, q becomes F16 rows in the scratch memory. In the second a
// block takes some tokens' query heads of one KV head as rows of a matrix, 16 to a warp, and passes over K and V in tiles of
// positions under a running softmax; where K and V are not F16 they become it on the way into shared memory. Of few
// tokens, which are few blocks, several share a sequence's positions, and a third kernel puts their sums together. On Hopper
// four warps multiply 64 rows together (prompt_multiply.cuh), for heads of up to 128 values.
#include "gemm_mma.cuh"
#include "kv_rows.cuh"
#include "prefill.cuh"
#include "prompt_attention.cuh"
#include "wide_place.cuh"

namespace te {
namespace {

constexpr int SETTLE_WARPS = 8, MERGE_WARPS = 4, MAX_HEAD = 256;

// ---- heads ----

// A warp takes a head: normed and rotated in shared memory.
__device__ void settle(const te_attention_args &a, const float *src, const float *norm, bool rotate, int t, float *x) {
    const int lane = threadIdx.x % 32, d = a.n_embd_head;
    float sum = 0;
    for (int i = lane; i < d; i += 32) {
        x[i] = __ldcg(src + i);
        sum = fmaf(x[i], x[i], sum);
    }
    if (norm) {
        const float scale = 1.0f / sqrtf(warp_sum(sum) / (float)d + a.norm_eps);
        for (int i = lane; i < d; i += 32) x[i] *= scale * (a.norm_last ? 1 : __ldg(norm + i));
    }
    __syncwarp();
    if (!rotate) return; // V, which has no norm
    for (int i = lane; a.rope != TE_NO_ROPE && i < a.n_rot / 2; i += 32) {
        const bool near = a.rope == TE_ROPE_NORM;
        const int j = near ? 2 * i : i, k = near ? j + 1 : i + a.n_rot / 2;
        const float2 cs = __ldcg((const float2 *)(a.cs + (size_t)t * a.n_rot) + i);
        const float u = x[j], v = x[k];
        x[j] = u * cs.x - v * cs.y;
        x[k] = u * cs.y + v * cs.x;
    }
    __syncwarp();
    if (!norm || !a.norm_last) return; // RoPE leaves the mean square as it is: the weights alone come after it
    for (int i = lane; i < d; i += 32) x[i] *= __ldg(norm + i);
    __syncwarp();
}

__device__ __forceinline__ size_t pool_row(const te_attention_args &a, int seq, int p, int head) {
    return ((size_t)__ldcg(a.table + (size_t)seq * a.ld_table + p / TE_CUDA_KV_BLOCK) * a.n_head_kv + head) *
               TE_CUDA_KV_BLOCK +
           p % TE_CUDA_KV_BLOCK;
}

__global__ void __launch_bounds__(32 * SETTLE_WARPS) settle_kernel(const __grid_constant__ prompt_args args) {
    __shared__ float rooms[SETTLE_WARPS][MAX_HEAD];
    const te_attention_args &a = args.op;
    dep_go();
    dep_wait();
    const int t = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, d = a.n_embd_head;
    const int pos = __ldcg(a.pos + t), seq = a.row ? __ldcg(a.row + t) : t;
    float *x = rooms[warp];
    if (pos < 0 || pos >= a.n_ctx) return; // nobody looks at its q
    for (int j = warp + SETTLE_WARPS * (int)blockIdx.y; j < a.n_head + 2 * a.n_head_kv;
         j += SETTLE_WARPS * (int)gridDim.y) {
        __syncwarp();
        if (j < a.n_head) {
            if (t < a.n_before) continue;
            settle(a, a.q + t * a.ldq + (size_t)j * d, a.q_norm, true, t, x);
            const float by = a.temp_scale != 0 ? warmth(a, pos) : 1;
            uint32_t *to = (uint32_t *)((uint16_t *)a.scratch + ((size_t)t * a.n_head + j) * args.pitch);
            for (int i = lane; i < args.pitch / 2; i += 32)
                to[i] = 2 * i < d ? half2_of(by * x[2 * i], by * x[2 * i + 1]) : 0;
            continue;
        }
        const bool is_k = j < a.n_head + a.n_head_kv;
        const int head = j - a.n_head - (is_k ? 0 : a.n_head_kv);
        settle(a, (is_k ? a.k + t * a.ldk : a.v + t * a.ldv) + (size_t)head * d, is_k ? a.k_norm : a.v_norm, is_k, t,
               x);
        const size_t row = pool_row(a, seq, pos, head);
        store_row(is_k ? a.type_k : a.type_v, x,
                  (uint8_t *)(is_k ? a.k_pool : a.v_pool) + row * (size_t)(is_k ? args.row_k : args.row_v), d);
    }
}

// ---- parts ----

// A warp puts together the parts of a token's head.
__global__ void __launch_bounds__(32 * MERGE_WARPS) merge_parts_kernel(const __grid_constant__ prompt_args args) {
    const te_attention_args &a = args.op;
    const int lane = threadIdx.x % 32, d = a.n_embd_head;
    const int unit = (int)(blockIdx.x * MERGE_WARPS + threadIdx.x / 32), t = a.n_before + unit / a.n_head,
              head = unit % a.n_head;
    dep_go();
    dep_wait();
    if (t >= a.n_tok) return;
    const size_t width = (size_t)(d + PART_BEGIN);
    const float *from = args.part + ((size_t)t * a.n_head + head) * args.parts * width;
    float best[MOST_PARTS], most = -INFINITY, total = 0;
#pragma unroll
    for (int k = 0; k < MOST_PARTS; k++) {
        const float2 w = k < args.parts ? __ldcg((const float2 *)(from + k * width)) : make_float2(-INFINITY, 0);
        const float now = fmaxf(most, w.x), zero = now == -INFINITY ? 0 : now;
        best[k] = w.x;
        total = total * power_of_2(most - zero) + w.y * power_of_2(w.x - zero);
        most = now;
    }
    const bool sees = most > -INFINITY;
    if (a.sinks && sees) total += power_of_2(fmaf(__ldg(a.sinks + head), 1.442695041f, -most));
    const float by = sees ? 1.0f / total : 0;
    te_cuda_half half = {};
    half.tiles = a.half_tiles;
    half.words = a.half_words;
    half.matrices = a.half_matrices;
    // Means of values of F16 are in its range, and as exact in it as those were.
    if (a.half && head == 0 && lane == 0) a.half_scale[t] = 1;
    for (int c = 2 * lane; c < d; c += 64) {
        float2 sum = make_float2(0, 0);
#pragma unroll
        for (int k = 0; k < MOST_PARTS; k++) {
            if (best[k] == -INFINITY) continue;
            const float2 v = __ldcg((const float2 *)(from + k * width + PART_BEGIN + c));
            const float f = power_of_2(best[k] - most);
            sum = make_float2(fmaf(v.x, f, sum.x), fmaf(v.y, f, sum.y));
        }
        const int col = head * d + c;
        *(float2 *)(a.out + t * a.ld_out + col) = make_float2(sum.x * by, sum.y * by);
        if (a.half)
            *(uint32_t *)((uint16_t *)a.half + wide_place(half, t, col / 4 * 4) + col % 4 / 2 * wide_next(half)) =
                half2_of(sum.x * by, sum.y * by);
    }
}

struct variant {
    int d, rows, threads, blocks; // blocks: of a multiprocessor
    size_t smem;
    void (*kernel)(prompt_args);
};
template <int D, int WARPS, int MATS, int TILE, int STAGES, bool PANELS = false, bool FEW = false, bool PLAIN = false>
constexpr variant variant_of() {
    return {D,
            16 * MATS * WARPS,
            32 * WARPS,
            blocks_of(WARPS, FEW),
            2 * (size_t)(16 * MATS * WARPS * D + STAGES * 2 * TILE * D) + (PANELS ? PANEL_BEGIN : 0),
            prompt_kernel<D, WARPS, MATS, TILE, STAGES, PANELS, FEW, PLAIN>};
}
const variant variants[] = {variant_of<64, 8, 1, 64, 2>(), variant_of<128, 8, 1, 64, 2>(),
                            variant_of<128, 4, 1, 64, 1>(), variant_of<256, 4, 1, 32, 2>(),
                            variant_of<256, 4, 1, 32, 1>()};
const variant few_variants[] = {variant_of<64, 4, 1, 64, 2, false, true>(), variant_of<128, 4, 1, 64, 2, false, true>(),
                                variant_of<256, 4, 1, 32, 2, false, true>()};
// On Hopper, of heads of up to 128 values: of few tokens with up to 64 rows, and with more; the plain ones.
const variant panel_variants[] = {variant_of<64, 8, 1, 64, 3, true>(), variant_of<128, 8, 1, 64, 3, true>()},
              few_panel_variants[] = {variant_of<64, 4, 1, 64, 2, true, true>(),
                                      variant_of<128, 4, 1, 64, 2, true, true>()},
              some_panel_variants[] = {variant_of<64, 8, 1, 64, 3, true, true>(),
                                       variant_of<128, 8, 1, 64, 3, true, true>()},
              plain_variants[] = {variant_of<64, 8, 1, 64, 3, true, false, true>(),
                                  variant_of<128, 8, 1, 64, 3, true, false, true>()},
              few_plain_variants[] = {variant_of<64, 4, 1, 64, 2, true, true, true>(),
                                      variant_of<128, 4, 1, 64, 2, true, true, true>()},
              some_plain_variants[] = {variant_of<64, 8, 1, 64, 3, true, true, true>(),
                                       variant_of<128, 8, 1, 64, 3, true, true, true>()};

template <int N> const variant *fitting(const te_cuda *d, int n_embd_head, const variant (&all)[N]) {
    for (const variant &v : all)
        if (v.d >= n_embd_head && v.smem + 2048 <= d->smem_block) return &v;
    return nullptr;
}
bool has_panels(const te_cuda *d, const te_attention_args *op) {
#ifdef TE_CUDA_WGMMA // the build has code for sm_90a
    return d->info.major == 9 && op->n_embd_head <= 128 && fitting(d, op->n_embd_head, panel_variants);
#else
    (void)d;
    (void)op;
    return false;
#endif
}
bool is_plain(const te_attention_args *op) {
    return (op->n_embd_head == 64 || op->n_embd_head == 128) && op->type_k == TE_F16 && op->type_v == TE_F16 &&
           !op->window && op->soft_cap == 0;
}
int share_of(const te_attention_args *op) {
    const int group = op->n_head / op->n_head_kv;
    return group < 8 ? group : 8;
}
const variant *few_variant(const te_cuda *d, const te_attention_args *op) {
    const int n = op->n_embd_head;
    const bool plain = is_plain(op);
    if (!has_panels(d, op)) return fitting(d, n, few_variants);
    if (op->n_tok * share_of(op) <= 64) return fitting(d, n, plain ? few_plain_variants : few_panel_variants);
    return fitting(d, n, plain ? some_plain_variants : some_panel_variants);
}
// Blocks of few tokens that share positions, as many as find room at once; 0: these are not so few.
int parts_of(const te_cuda *d, const te_attention_args *op) {
    const variant *v = few_variant(d, op);
    if (!v || op->n_tok > FEW_TOK) return 0;
    const int group = op->n_head / op->n_head_kv, share = share_of(op),
              across = divide_up(op->n_tok, v->rows / share) * op->n_head_kv * divide_up(group, share),
              fits = v->blocks * d->info.n_sm / across,
              most = op->n_tok > TE_CUDA_WIDE_TOK ? MOST_ROWS / op->n_tok : MOST_PARTS;
    if (fits < 2) return op->n_tok <= TE_CUDA_WIDE_TOK ? 1 : 0;
    return fits < most ? fits : most;
}
const variant *variant_for(const te_cuda *d, const te_attention_args *op) {
    if (parts_of(d, op)) return few_variant(d, op);
    if (!has_panels(d, op)) return fitting(d, op->n_embd_head, variants);
    return fitting(d, op->n_embd_head, is_plain(op) ? plain_variants : panel_variants);
}

prompt_args prepare(const te_cuda *d, const te_attention_args *op, const variant *v) {
    prompt_args a = {};
    a.op = *op;
    if (!op->window) a.op.window = op->n_ctx;
    a.group = op->n_head / op->n_head_kv;
    a.share = share_of(op);
    a.chunks = divide_up(a.group, a.share);
    a.row_k = (int)te_row_bytes(op->type_k, op->n_embd_head);
    a.row_v = (int)te_row_bytes(op->type_v, op->n_embd_head);
    a.pitch = v->d;
    a.parts = parts_of(d, op);
    a.part = op->scratch + (size_t)op->n_tok * (size_t)op->n_head * (size_t)v->d / 2;
    return a;
}

} // namespace

size_t prompt_attention_floats(te_cuda *d, const te_attention_args *op) {
    const variant *v = variant_for(d, op);
    if (!v) return 0;
    const size_t heads = (size_t)op->n_tok * (size_t)op->n_head;
    const prompt_args a = prepare(d, op, v);
    return heads * ((size_t)v->d / 2 + (size_t)a.parts * (size_t)(op->n_embd_head + PART_BEGIN));
}

bool prompt_attention_halves(te_cuda *d, const te_attention_args *op) { return parts_of(d, op) > 0; }

te_status prompt_attention(te_cuda *d, const te_attention_args *op) {
    if (op->n_tok < 1 || op->n_tok > 65535 || op->n_before < 0 || op->n_before > op->n_tok)
        return refuse(d, te_fail(TE_ARGUMENT, "attention: %d tokens, %d in front of those that are wanted",
                                 (int)op->n_tok, (int)op->n_before));
    if (op->n_head_kv < 1 || op->n_head < 1 || op->n_head % op->n_head_kv || op->n_embd_head < 2 ||
        op->n_embd_head % 2 || op->n_embd_head > MAX_HEAD || op->n_ctx < 1)
        return refuse(d, te_fail(TE_UNSUPPORTED, "attention: %d heads on %d of %d values, context %d", (int)op->n_head,
                                 (int)op->n_head_kv, (int)op->n_embd_head, (int)op->n_ctx));
    if (op->rope != TE_NO_ROPE && (!op->cs || op->n_rot < 2 || op->n_rot % 2 || op->n_rot > op->n_embd_head))
        return refuse(
            d, te_fail(TE_ARGUMENT, "attention: %d values of %d are rotated", (int)op->n_rot, (int)op->n_embd_head));
    for (int32_t type : {op->type_k, op->type_v})
        if ((type != TE_F16 && type != TE_F32 && type != TE_BF16 && type != TE_Q8_0) ||
            (type == TE_Q8_0 && op->n_embd_head % 32))
            return refuse(d, te_fail(TE_UNSUPPORTED, "attention: K or V of type %d with heads of %d", (int)type,
                                     (int)op->n_embd_head));
    if (op->window < 0) return refuse(d, te_fail(TE_ARGUMENT, "attention: a window of %d positions", (int)op->window));
    const variant *v = variant_for(d, op);
    if (!v || !op->scratch || !aligned(op->scratch, 16) || !aligned(op->out, 8) || op->ld_out % 2)
        return refuse(d, te_fail(TE_ARGUMENT, "attention: the scratch memory or the result are not aligned"));
    if (op->half &&
        (!prompt_attention_halves(d, op) || !op->half_scale || op->half_words < 1 || 8 * op->half_tiles < op->n_tok))
        return refuse(
            d, te_fail(TE_ARGUMENT, "attention: %d tiles of F16 for %d tokens", (int)op->half_tiles, (int)op->n_tok));
    const prompt_args a = prepare(d, op, v);
    // Of few tokens each warp has a head.
    const int most = divide_up(op->n_head + 2 * op->n_head_kv, SETTLE_WARPS), across = 8 * d->info.n_sm / op->n_tok,
              shares = across < 1      ? 1
                       : across < most ? across
                                       : most;
    TE_CUDA_TRY(
        launch(d, "attention", settle_kernel, dim3((unsigned)op->n_tok, (unsigned)shares), 32 * SETTLE_WARPS, 0, a));
    if (op->n_before == op->n_tok) return TE_OK;
    const int n = op->n_tok - op->n_before;
    TE_CUDA_TRY(launch(d, "attention", v->kernel,
                       dim3((unsigned)divide_up(n, v->rows / a.share), (unsigned)(op->n_head_kv * a.chunks),
                            (unsigned)(a.parts ? a.parts : 1)),
                       v->threads, v->smem, a));
    if (!a.parts) return TE_OK;
    return launch(d, "attention", merge_parts_kernel, dim3((unsigned)divide_up((int64_t)n * op->n_head, MERGE_WARPS)),
                  32 * MERGE_WARPS, 0, a);
}

} // namespace te
