// experts.cu - te_route_args and te_experts_args of a few tokens: the router's choice, checks, and how rows are shared out.
#include <climits>

#include "experts.cuh"
#include "formats.cuh"
#include "launch.h"

namespace te {

// ---- the router's choice ----

// SMALL: at most 32 * ROUTE_KEYS experts, and no groups: all in registers. Else in shared memory. A warp a token.
template <bool SMALL>
__global__ void __launch_bounds__(32 * ROUTE_WARPS) route_kernel(const __grid_constant__ te_route_args a) {
    extern __shared__ float room[];
    __shared__ int lacking[ROUTE_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = a.n_expert,
              t = blockIdx.x * (blockDim.x / 32) + warp;
    const size_t own = 2 * (size_t)a.n_used + (SMALL ? 0 : 3 * (size_t)n);
    float *w = room + (size_t)warp * own, *p_all = w + 2 * a.n_used, *rank_all = p_all + n, *group = rank_all + n;
    int *chosen = (int *)(w + a.n_used), missing = 0;
    dep_go();
    dep_wait();
    const float *score = a.score + (size_t)t * a.ld_score;
    if (SMALL && t < a.n_tok) {
        if (n <= 32 * ROUTE_FEW)
            choose_small<ROUTE_FEW>(a, t, chosen, w);
        else
            choose_small<ROUTE_KEYS>(a, t, chosen, w);
    }
    if (!SMALL && t < a.n_tok) {
        float most = -INFINITY, sum = 0;
        each_expert(n, [&](int e) { most = fmaxf(most, p_all[e] = __ldcg(score + e)); });
        if (a.gating == TE_GATING_SOFTMAX) {
            most = warp_max(most);
            each_expert(n, [&](int e) { sum += p_all[e] = expf(p_all[e] - most); });
            sum = warp_sum(sum);
        }
        each_expert(n, [&](int e) {
            if (a.gating == TE_GATING_SOFTMAX) p_all[e] /= sum;
            if (a.gating == TE_GATING_SIGMOID) p_all[e] = sigmoid(p_all[e]);
            rank_all[e] = route_rank(a, p_all[e], e);
        });
        __syncwarp();
        if (a.n_group > 1) {
            const int size = n / a.n_group;
            each_expert(a.n_group, [&](int g) {
                float first = -INFINITY, second = -INFINITY;
#pragma unroll 1
                for (int i = 0; i < size; i++) {
                    const float v = rank_all[g * size + i];
                    second = v > first ? first : fmaxf(second, v);
                    first = fmaxf(first, v);
                }
                group[g] = size > 1 ? first + second : first;
            });
            __syncwarp();
            each_expert(a.n_group, [&](int g) {
                int before = 0;
#pragma unroll 1
                for (int i = 0; i < a.n_group; i++) before += group[i] > group[g] || (group[i] == group[g] && i < g);
                if (before >= a.n_group_used)
                    for (int i = 0; i < size; i++) rank_all[g * size + i] = -INFINITY;
            });
            __syncwarp();
        }
        // Keys take the ranks' places; each lane reads and writes its own experts' alone.
        each_expert(n, [&](int e) { rank_all[e] = __uint_as_float(key_of(rank_all[e])); });
#pragma unroll 1
        for (int r = 0; r < a.n_used; r++) {
            best_key best = {0, 0};
            each_expert(n, [&](int e) { best.take(__float_as_uint(rank_all[e]), e); });
            const int e = best.of_warp();
            if (e % 32 == lane) {
                rank_all[e] = 0; // whose bits are 0, too
                chosen[r] = e;
                w[r] = p_all[e];
            }
        }
    }
    __syncwarp();
    if (t < a.n_tok) missing = finish_route(a, t, chosen, w);
    if (!a.n_missing) return;
    if (lane == 0) lacking[warp] = missing;
    __syncthreads();
    if (threadIdx.x) return;
    for (int k = 1; k < (int)blockDim.x / 32; k++) missing += lacking[k];
    if (gridDim.x == 1)
        *a.n_missing = missing;
    else if (missing)
        atomicAdd(a.n_missing, missing);
}

__global__ void zero_kernel(int32_t *n) {
    dep_go();
    dep_wait();
    *n = 0;
}

te_status check_route(te_cuda *d, const te_route_args *op) {
    const int n = op->n_expert, n_group = op->n_group > 1 ? op->n_group : 1;
    if (n < 1 || n > ROUTE_MOST || op->n_used < 1 || op->n_used > n || op->n_tok < 1)
        return refuse(d, te_fail(TE_ARGUMENT, "route: %d of %d experts for %d tokens; at most %d are possible",
                                 (int)op->n_used, n, (int)op->n_tok, ROUTE_MOST));
    if (n_group > 1 && (n % n_group || op->n_group_used < 1 || op->n_group_used > n_group ||
                        (int64_t)op->n_group_used * (n / n_group) < op->n_used))
        return refuse(d,
                      te_fail(TE_ARGUMENT, "route: %d of %d groups of %d experts", (int)op->n_group_used, n_group, n));
    if (!op->score || !op->place || !op->expert || !op->weight || (op->publish && !op->ticket.base) ||
        (op->n_kept && !op->kept) || op->gating < TE_GATING_SOFTMAX || op->gating > TE_GATING_CHOSEN)
        return refuse(d, te_fail(TE_ARGUMENT, "route: no scores, places or results, or gating %d", (int)op->gating));
    return TE_OK;
}

te_status route(te_cuda *d, const te_route_args *op) {
    TE_CUDA_TRY(check_route(d, op));
    const int n = op->n_expert;
    const bool small = is_small(*op);
    const size_t each = 4 * (2 * (size_t)op->n_used + (small ? 0 : 3 * (size_t)n));
    int warps = op->n_tok < ROUTE_WARPS ? op->n_tok : ROUTE_WARPS;
    while (warps > 1 && warps * each > 32 * 1024) warps /= 2;
    if (each > d->smem_block)
        return refuse(d, te_fail(TE_UNSUPPORTED, "route: %zu bytes of shared memory for a token", each));
    const int blocks = divide_up(op->n_tok, warps);
    if (op->n_missing && blocks > 1) TE_CUDA_TRY(launch(d, "route", zero_kernel, dim3(1), 1, 0, op->n_missing));
    return launch(d, "route", small ? route_kernel<true> : route_kernel<false>, dim3((unsigned)blocks), 32 * warps,
                  warps * each, *op);
}

// ---- experts ----

const expert_kernels *expert_kernels_of(int type, bool file) {
    const expert_kernels *k = file ? experts_file(type) : nullptr;
    for (auto *of : {experts_float, experts_32, experts_bits, experts_table, experts_k, experts_k23})
        if (!k) k = of(type);
    return k;
}

te_status check_experts(te_cuda *d, const te_experts_args *op) {
    auto check = op->kept ? check_file : check_matrix;
    const bool gated = op->gate.w != nullptr;
    if (gated) TE_CUDA_TRY(check(d, "experts", &op->gate));
    TE_CUDA_TRY(check(d, "experts", &op->up));
    const bool by_neuron = op->down_t.w != nullptr;
    const te_mat *down = by_neuron ? &op->down_t : &op->down;
    TE_CUDA_TRY(check(d, "experts", down));
    if ((gated && (op->gate.type != op->up.type || op->gate.cols != op->up.cols)) ||
        (by_neuron && (op->down.w || !gated)) || (op->on_input && !gated) ||
        down->cols != (by_neuron ? op->up.cols : op->n_ff))
        return refuse(
            d, te_fail(TE_UNSUPPORTED,
                       "experts: gate of type %d and %d columns, up of %d and %d, down of %d columns for %d neurons",
                       (int)op->gate.type, (int)op->gate.cols, (int)op->up.type, (int)op->up.cols, (int)down->cols,
                       (int)op->n_ff));
    const int64_t n_ff = (int64_t)op->n_places * op->n_ff, n_embd = (int64_t)op->n_places * op->up.cols;
    if (op->n_places < 1 || op->n_places > ROUTE_MOST || (gated && op->gate.n_rows < n_ff) || op->up.n_rows < n_ff ||
        down->n_rows < (by_neuron ? n_ff : n_embd) || op->up.cols % 4)
        return refuse(d, te_fail(TE_ARGUMENT, "experts: %d places in matrices of %d, %d and %d rows", (int)op->n_places,
                                 (int)op->gate.n_rows, (int)op->up.n_rows, (int)down->n_rows));
    if (op->n_used < 1 || op->n_used > op->n_expert || op->n_tok < 1 || !op->place || !op->expert || !op->weight ||
        (int64_t)op->n_tok * op->n_used * (op->n_ff > op->up.cols ? op->n_ff : op->up.cols) > INT32_MAX / 2)
        return refuse(d, te_fail(TE_ARGUMENT, "experts: %d of %d experts for %d tokens", (int)op->n_used,
                                 (int)op->n_expert, (int)op->n_tok));
    return TE_OK;
}

static int down_tiles(const te_mat *down_t, const expert_kernels *k) {
    return divide_up(down_t->cols, 32 * k->down_weights);
}

// Of the neurons of a route: as many as give two blocks a multiprocessor, of enough neurons each.
static int down_shares(te_cuda *d, const te_experts_args *op, const expert_kernels *k) {
    constexpr int LEAST = 32;
    const int64_t wanted = 2 * d->info.n_sm / ((int64_t)down_tiles(&op->down_t, k) * op->n_tok * op->n_used);
    const int most = divide_up(op->n_ff, LEAST);
    return wanted < 1 ? 1 : wanted < most ? (int)wanted : most;
}

int32_t expert_parts(te_cuda *d, const te_experts_args *op) {
    const expert_kernels *k = op->down_t.w ? expert_kernels_of(op->down_t.type, false) : nullptr;
    return op->n_used * (k ? down_shares(d, op, k) : 1);
}

static te_status sum_by_neuron(te_cuda *d, const te_experts_args *op) {
    const expert_kernels *k = expert_kernels_of(op->down_t.type, false);
    if (!k) return refuse(d, te_fail(TE_UNSUPPORTED, "experts: no kernel for weights of type %d", op->down_t.type));
    expert_down_args a = {};
    a.w = (const uint8_t *)op->down_t.w;
    a.stride = op->down_t.stride;
    a.cols = op->down_t.cols;
    a.n_ff = op->n_ff;
    a.n_tok = op->n_tok;
    a.n_used = op->n_used;
    a.n_tiles = down_tiles(&op->down_t, k);
    a.n_shares = down_shares(d, op, k);
    a.h = op->h;
    a.ldh = op->ldh;
    a.place = op->place;
    a.expert = op->expert;
    a.missing = op->missing;
    a.first = op->first;
    a.n_places = op->n_places;
    a.bias = op->down_b;
    a.weight = op->on_input ? nullptr : op->weight;
    a.partial = op->partial;
    const int64_t grid = (int64_t)a.n_tiles * a.n_shares * op->n_tok * op->n_used;
    return launch(d, "experts", k->by_neuron, dim3((unsigned)grid), EXPERT_DOWN_THREADS, 0, a);
}

// Lanes of a row, tasks of a row and columns in shared memory: as few tasks as possible for the warps of a block that has its
// share of a single token's rows. (Of one token: its bits do not depend on how many there are.)
static void shape_rows(const te_cuda *d, expert_args *a, const expert_kernels *k) {
    a->n_pieces = divide_up(a->cols, k->lane_weights);
    const int rows = divide_up((int64_t)a->n_used * a->rows * (a->pairs ? 2 : 1), 2 * d->info.n_sm);
    int best = INT_MAX;
    for (int lanes = 32; lanes >= 4; lanes /= 2) {
        const int chunks = divide_up(a->n_pieces, lanes * k->steps), per_warp = 32 / lanes,
                  tasks = divide_up(rows, EXPERT_WARPS * per_warp) * chunks, all = divide_up(rows, per_warp) * chunks;
        // Four lanes read 64 bytes together, which pays where that is the row. Of equal ones those with less work in all.
        const int cost = 64 * tasks + all;
        if (cost >= best || (lanes == 4 && chunks > 1)) continue;
        best = cost;
        a->lanes = lanes;
        a->chunks = chunks;
    }
    a->tile = divide_up((int64_t)a->chunks * a->lanes * k->steps * k->lane_weights, 128) * 128;
}

// The rest of the arguments, and the launch.
static te_status run(te_cuda *d, expert_args a, int type, bool down) {
    const expert_kernels *k = expert_kernels_of(type, a.kept != nullptr);
    if (!k) return refuse(d, te_fail(TE_UNSUPPORTED, "experts: no kernel for weights of type %d", type));
    shape_rows(d, &a, k);
    const int unit = a.pairs ? (32 / a.lanes + 1) / 2 : 32 / a.lanes,
              units = divide_up((int64_t)a.n_routes * a.rows, unit);
    expert_smem s = {};
    s.acts = a.tile * (k->int8 ? 1 : 4);
    s.scales = k->int8 ? a.tile / 32 * 8 : 0;
    s.list = ((a.chooses ? 6 : 3) * a.n_routes * 4 + 15) / 16 * 16;
    size_t total = 0;
    // Host memory is read no faster by more blocks. Beside these, which are of two kernels, all others find room.
    const int few = divide_up(d->info.n_sm, 8) * 2;
    for (int per_sm = 2;; per_sm = 1) {
        const int all = per_sm * d->info.n_sm, rest = all > 3 * few ? all - 2 * few : divide_up(all, 2),
                  at_once = (a.kept     ? few
                             : a.beside ? rest
                                        : all) -
                            a.chooses, // a block writes the choice, and does nothing else
            grid = units < at_once ? units : at_once;
        total = (size_t)(s.acts + s.scales + s.list) + (down ? 0 : 8 * (size_t)divide_up(units, grid) * (size_t)unit);
        size_t room = d->smem_sm / (size_t)per_sm - 2048;
        if (room > d->smem_block) room = d->smem_block;
        if (total <= room)
            return launch(d, "experts", k->kernel[down], dim3((unsigned)(grid + a.chooses)), EXPERT_THREADS, total, a,
                          s);
        if (per_sm == 1) break;
    }
    return refuse(d, te_fail(TE_UNSUPPORTED, "experts: %d columns need %zu bytes of shared memory, the device has %zu",
                             a.cols, total, d->smem_block));
}

// Every block reads the hidden values of all routes: of many, or of large experts (gpt-oss's 2,880 neurons: 7 % of a token's
// time), parts of the sum and their merge take less.
constexpr int SUM_MOST = 32 * 1024, SUM_NEURONS = 2048;
static te_status sum_at_once(te_cuda *d, expert_args a, const te_merge_args *to, int type, bool *done) {
    const expert_kernels *k = expert_kernels_of(type, false);
    const int n_tok = a.n_routes / a.n_used;
    *done = false;
    if (!k || a.n_routes > SUM_MOST / a.cols || a.cols > SUM_NEURONS || to->words || to->norm.kind != TE_NO_NORM)
        return TE_OK;
    shape_rows(d, &a, k);
    // A block's columns times tokens have a thread each.
    const int least = divide_up(a.rows, EXPERT_SUM_THREADS / n_tok), most = d->info.n_sm > least ? d->info.n_sm : least,
              grid = a.rows < most ? a.rows : most;
    expert_smem s = {};
    s.acts = a.n_routes * a.tile * (k->int8 ? 1 : 4);
    s.scales = k->int8 ? a.n_routes * (a.tile / 32) * 8 : 0;
    s.list = (12 * a.n_routes + 15) / 16 * 16;
    const size_t total =
        (size_t)(s.acts + s.scales + s.list) + 4 * (size_t)divide_up(a.rows, grid) * (size_t)(a.n_routes + n_tok);
    if (total > d->smem_block) return TE_OK;
    a.add = to->add;
    a.ld_add = to->ld_add;
    a.sum_bias = to->bias;
    a.y = to->y;
    a.ldy = to->ldy;
    *done = true;
    return launch(d, "experts", k->sum, dim3((unsigned)grid), EXPERT_SUM_THREADS, total, a, s);
}

static te_status merge_parts(te_cuda *d, const te_experts_args *op) {
    te_merge_args m = *op->merge;
    m.partial = op->partial;
    m.n_parts = expert_parts(d, op);
    return merge(d, &m);
}

te_status experts(te_cuda *d, const te_experts_args *op) {
    TE_CUDA_TRY(check_experts(d, op));
    const te_merge_args *to = op->merge;
    if (to && (op->add || op->kept || op->beside || to->cols != op->up.cols || to->n_tok != op->n_tok || !to->y))
        return refuse(d, te_fail(TE_ARGUMENT, "experts: a merge of more than these"));
    TE_CUDA_TRY(check_input(d, "experts", op->x, op->ldx, op->n_tok, op->up.cols, &op->norm));
    if (op->norm.kind != TE_NO_NORM && (op->norm.kind != TE_RMS_NORM || op->norm.b || op->n_tok > 1))
        return refuse(
            d, te_fail(TE_UNSUPPORTED, "experts: a norm of kind %d of %d tokens", (int)op->norm.kind, (int)op->n_tok));
    if (!op->h || !aligned(op->h, 16) || op->ldh % 4 || op->ldh < (size_t)op->n_ff || !op->partial ||
        !aligned(op->partial, 16))
        return refuse(d, te_fail(TE_ARGUMENT, "experts: no room for hidden values or sums"));
    expert_args a = {};
    a.x = op->x;
    a.ldx = op->ldx;
    a.cols = op->up.cols;
    a.norm = op->norm.kind == TE_NO_NORM ? nullptr : op->norm.w;
    a.norm_eps = op->norm.eps;
    if (op->choice) {
        TE_CUDA_TRY(check_route(d, op->choice));
        a.choice = *op->choice;
        a.chooses = is_small(a.choice) && a.choice.n_expert <= 32 * ROUTE_FEW && !a.choice.n_missing && !op->beside &&
                    !op->kept && !op->missing && !op->on_input;
        if (!a.chooses) TE_CUDA_TRY(route(d, op->choice));
    }
    a.n_used = op->n_used;
    a.n_routes = op->n_tok * op->n_used;
    a.rows = op->n_ff;
    a.pairs = op->gate.w != nullptr;
    a.w[0] = (const uint8_t *)(a.pairs ? op->gate.w : op->up.w);
    a.w[1] = (const uint8_t *)op->up.w;
    a.stride[0] = a.pairs ? op->gate.stride : op->up.stride;
    a.stride[1] = op->up.stride;
    a.b[0] = a.pairs ? op->gate_b : op->up_b;
    a.b[1] = op->up_b;
    a.place = op->place;
    a.expert = op->expert;
    a.missing = op->missing;
    a.first = op->first;
    a.n_places = op->n_places;
    a.kept = op->kept;
    a.beside = op->beside != 0;
    a.act = (te_activation)op->act;
    a.threshold = op->threshold;
    a.h = op->h;
    a.ldh = op->ldh;
    a.counts = op->counts;
    a.in_weight = op->on_input ? op->weight : nullptr;
    a.down_t = (const uint8_t *)op->down_t.w;
    a.down_stride = op->down_t.stride;
    TE_CUDA_TRY(run(d, a, op->up.type, false));
    if (op->down_t.w) {
        TE_CUDA_TRY(sum_by_neuron(d, op));
        return to ? merge_parts(d, op) : TE_OK;
    }
    a.norm = nullptr;
    a.chooses = a.pairs = false;
    a.x = op->h;
    a.ldx = op->ldh;
    a.cols = op->n_ff;
    a.rows = op->up.cols;
    a.w[0] = (const uint8_t *)op->down.w;
    a.stride[0] = op->down.stride;
    a.b[0] = op->down_b;
    a.in_weight = nullptr;
    a.weight = op->on_input ? nullptr : op->weight;
    a.partial = op->partial;
    bool done = false;
    if (to) TE_CUDA_TRY(sum_at_once(d, a, to, op->down.type, &done));
    if (done) return TE_OK;
    TE_CUDA_TRY(run(d, a, op->down.type, true));
    return to ? merge_parts(d, op) : TE_OK;
}

} // namespace te
