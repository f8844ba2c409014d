// experts.cu - te_route_args and te_experts_args of a few tokens: the router's choice, checks, and how rows are shared out.
#include <cfloat>

#include "experts.cuh"
#include "formats.cuh"
#include "launch.h"

namespace te {

// ---- the router's choice ----

constexpr int ROUTE_WARPS = 8, ROUTE_KEYS = 8, ROUTE_MOST = 4096;

// Floats as integers in the same order; what is no number comes last, since a token's experts are different. 0: chosen already.
__device__ __forceinline__ uint32_t key_of(float v) {
    const uint32_t b = __float_as_uint(v + 0.0f); // of the two zeros one
    return v == v ? b & 0x80000000u ? ~b : b | 0x80000000u : 1;
}
__device__ __forceinline__ uint32_t warp_most(uint32_t v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, v);
#else
    for (int o = 16; o; o /= 2) v = max(v, __shfl_xor_sync(~0u, v, o));
    return v;
#endif
}

// The largest key, and among equal ones the first expert, of keys that each lane has the largest of; one is above 0.
struct best_key {
    uint32_t key;
    int e;
    __device__ __forceinline__ void take(uint32_t k, int i) {
        if (k <= key) return; // lanes go through ascending experts
        key = k;
        e = i;
    }
    __device__ __forceinline__ int of_warp() const {
        const uint32_t most = warp_most(key);
        return ~(int)warp_most(key == most ? ~(uint32_t)e : 0);
    }
};

// p of scores: of expert lane + 32 i, in v[i].
template <class F> __device__ __forceinline__ void each_expert(int n, F f) {
#pragma unroll 1
    for (int e = threadIdx.x % 32; e < n; e += 32) f(e);
}

// Of the experts chosen, in shared memory: weights, and what the others are told. Returns how many are not there.
__device__ __forceinline__ int finish_route(const te_route_args &a, int t, const int *chosen, float *w) {
    const int lane = threadIdx.x % 32, n = a.n_used;
    if (a.gating == TE_GATING_CHOSEN) {
        float most = -INFINITY, sum = 0;
        for (int r = lane; r < n; r += 32) { // where all are ruled out, each is as good as another
            if (w[r] == -INFINITY) w[r] = -FLT_MAX;
            most = fmaxf(most, w[r]);
        }
        most = warp_max(most);
        for (int r = lane; r < n; r += 32) sum += w[r] = expf(w[r] - most);
        sum = warp_sum(sum);
        for (int r = lane; r < n; r += 32) w[r] /= sum;
    }
    float factor = a.scale;
    if (a.normed) {
        float sum = 0;
        for (int r = lane; r < n; r += 32) sum += w[r];
        sum = warp_sum(sum);
        factor /= sum < 1e-20f ? 1e-20f : sum;
    }
    const uint32_t number = a.publish ? ticket_number(a.ticket) : 0;
    int missing = 0, gone = 0, keeps = 0;
    if (a.n_kept) {
#pragma unroll 1
        for (int r0 = 0; r0 < n; r0 += 32)
            gone += __popc(__ballot_sync(~0u, r0 + lane < n && __ldcg(a.place + chosen[min(r0 + lane, n - 1)]) < 0));
        keeps = __ldg(a.n_kept + gone);
        gone = 0;
    }
#pragma unroll 1
    for (int r0 = 0; r0 < n; r0 += 32) {
        const int r = r0 + lane, e = r < n ? chosen[r] : 0;
        const float weight = r < n ? w[r] * factor * (a.factor ? __ldg(a.factor + e) : 1) : 0;
        const bool placed = r >= n || __ldcg(a.place + e) >= 0;
        const unsigned lost = __ballot_sync(~0u, !placed);
        const bool kept = !placed && gone + __popc(lost & ((1u << lane) - 1)) < keeps, there = placed || kept;
        gone += __popc(lost);
        missing += __popc(__ballot_sync(~0u, !there));
#pragma unroll
        for (int k = 0; k < 2; k++) { // words next to each other
            const int from = 16 * k + lane / 2;
            const uint32_t who = __shfl_sync(~0u, there ? ~0u : (uint32_t)e, from),
                           bits = __shfl_sync(~0u, __float_as_uint(weight), from);
            if (a.publish && r0 + from < n)
                store_word(a.publish + 2 * ((size_t)t * (size_t)n + (size_t)(r0 + 16 * k)) + lane,
                           lane % 2 ? bits : who, number);
        }
        if (r >= n) continue;
        a.expert[(size_t)t * (size_t)n + r] = e;
        a.weight[(size_t)t * (size_t)n + r] = weight;
        if (a.n_kept) a.kept[(size_t)t * (size_t)n + r] = kept;
        if (a.uses) atomicAdd(a.uses + e, 1);
    }
    return missing;
}

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
    auto rank_of = [&](float p, int e) { return a.choice_b ? p + __ldg(a.choice_b + e) : p; };
    auto sigmoid = [](float v) { return 1 / (1 + expf(-v)); };
    if (SMALL && t < a.n_tok) {
        float p[ROUTE_KEYS];
        uint32_t key[ROUTE_KEYS];
        float most = -INFINITY, sum = 0;
#pragma unroll
        for (int i = 0; i < ROUTE_KEYS; i++) {
            p[i] = lane + 32 * i < n ? __ldcg(score + lane + 32 * i) : -INFINITY;
            most = fmaxf(most, p[i]);
        }
        if (a.gating == TE_GATING_SOFTMAX) {
            most = warp_max(most);
#pragma unroll
            for (int i = 0; i < ROUTE_KEYS; i++) {
                p[i] = lane + 32 * i < n ? expf(p[i] - most) : 0;
                sum += p[i];
            }
            sum = warp_sum(sum);
        }
#pragma unroll
        for (int i = 0; i < ROUTE_KEYS; i++) {
            if (a.gating == TE_GATING_SOFTMAX) p[i] /= sum;
            if (a.gating == TE_GATING_SIGMOID) p[i] = sigmoid(p[i]);
            key[i] = lane + 32 * i < n ? key_of(rank_of(p[i], lane + 32 * i)) : 0;
        }
#pragma unroll 1
        for (int r = 0; r < a.n_used; r++) {
            best_key best = {0, 0};
#pragma unroll
            for (int i = 0; i < ROUTE_KEYS; i++) best.take(key[i], lane + 32 * i);
            const int e = best.of_warp();
            float v = 0;
#pragma unroll
            for (int i = 0; i < ROUTE_KEYS; i++)
                if (e / 32 == i) {
                    v = p[i];
                    if (e % 32 == lane) key[i] = 0;
                }
            v = __shfl_sync(~0u, v, e % 32);
            if (lane == 0) {
                chosen[r] = e;
                w[r] = v;
            }
        }
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
            rank_all[e] = rank_of(p_all[e], e);
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

te_status route(te_cuda *d, const te_route_args *op) {
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
    const bool small = n <= 32 * ROUTE_KEYS && n_group == 1;
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
    TE_CUDA_TRY(check(d, "experts", &op->gate));
    TE_CUDA_TRY(check(d, "experts", &op->up));
    const bool by_neuron = op->down_t.w != nullptr;
    const te_mat *down = by_neuron ? &op->down_t : &op->down;
    TE_CUDA_TRY(check(d, "experts", down));
    if (op->gate.type != op->up.type || op->gate.cols != op->up.cols || (by_neuron && op->down.w) ||
        down->cols != (by_neuron ? op->gate.cols : op->n_ff))
        return refuse(
            d, te_fail(TE_UNSUPPORTED,
                       "experts: gate of type %d and %d columns, up of %d and %d, down of %d columns for %d neurons",
                       (int)op->gate.type, (int)op->gate.cols, (int)op->up.type, (int)op->up.cols, (int)down->cols,
                       (int)op->n_ff));
    const int64_t n_ff = (int64_t)op->n_places * op->n_ff, n_embd = (int64_t)op->n_places * op->gate.cols;
    if (op->n_places < 1 || op->n_places > ROUTE_MOST || op->gate.n_rows < n_ff || op->up.n_rows < n_ff ||
        down->n_rows < (by_neuron ? n_ff : n_embd) || op->gate.cols % 4)
        return refuse(d, te_fail(TE_ARGUMENT, "experts: %d places in matrices of %d, %d and %d rows", (int)op->n_places,
                                 (int)op->gate.n_rows, (int)op->up.n_rows, (int)down->n_rows));
    if (op->n_used < 1 || op->n_used > op->n_expert || op->n_tok < 1 || !op->place || !op->expert || !op->weight ||
        (int64_t)op->n_tok * op->n_used * (op->n_ff > op->gate.cols ? op->n_ff : op->gate.cols) > INT32_MAX / 2)
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
    a.weight = op->weight;
    a.partial = op->partial;
    const int64_t grid = (int64_t)a.n_tiles * a.n_shares * op->n_tok * op->n_used;
    return launch(d, "experts", k->by_neuron, dim3((unsigned)grid), EXPERT_DOWN_THREADS, 0, a);
}

// Lanes of a row, tasks of a row and columns in shared memory; the rest of the arguments, and the launch.
static te_status run(te_cuda *d, expert_args a, int type, bool down) {
    const expert_kernels *k = expert_kernels_of(type, a.kept != nullptr);
    if (!k) return refuse(d, te_fail(TE_UNSUPPORTED, "experts: no kernel for weights of type %d", type));
    a.n_pieces = divide_up(a.cols, k->lane_weights);
    for (a.lanes = 32; a.lanes > 4 && a.lanes / 2 * k->steps >= a.n_pieces;) a.lanes /= 2;
    a.chunks = divide_up(a.n_pieces, a.lanes * k->steps);
    a.tile = divide_up((int64_t)a.chunks * a.lanes * k->steps * k->lane_weights, 128) * 128;
    const int unit = down ? 32 / a.lanes : (32 / a.lanes + 1) / 2,
              units = divide_up((int64_t)a.n_routes * a.rows, unit);
    expert_smem s = {};
    s.acts = a.tile * (k->int8 ? 1 : 4);
    s.scales = k->int8 ? a.tile / 32 * 8 : 0;
    s.list = (3 * a.n_routes * 4 + 15) / 16 * 16;
    size_t total = 0;
    // Host memory is read no faster by more blocks. Beside these, which are of two kernels, all others find room.
    const int few = divide_up(d->info.n_sm, 8) * 2;
    for (int per_sm = 2;; per_sm = 1) {
        const int all = per_sm * d->info.n_sm, rest = all > 3 * few ? all - 2 * few : divide_up(all, 2),
                  at_once = a.kept     ? few
                            : a.beside ? rest
                                       : all,
                  grid = units < at_once ? units : at_once;
        total = (size_t)(s.acts + s.scales + s.list) + (down ? 0 : 8 * (size_t)divide_up(units, grid) * (size_t)unit);
        size_t room = d->smem_sm / (size_t)per_sm - 2048;
        if (room > d->smem_block) room = d->smem_block;
        if (total <= room)
            return launch(d, "experts", k->kernel[down], dim3((unsigned)grid), EXPERT_THREADS, total, a, s);
        if (per_sm == 1) break;
    }
    return refuse(d, te_fail(TE_UNSUPPORTED, "experts: %d columns need %zu bytes of shared memory, the device has %zu",
                             a.cols, total, d->smem_block));
}

te_status experts(te_cuda *d, const te_experts_args *op) {
    TE_CUDA_TRY(check_experts(d, op));
    const te_norm none = {};
    TE_CUDA_TRY(check_input(d, "experts", op->x, op->ldx, op->n_tok, op->gate.cols, &none));
    if (!op->h || !aligned(op->h, 16) || op->ldh % 4 || op->ldh < (size_t)op->n_ff || !op->partial ||
        !aligned(op->partial, 16))
        return refuse(d, te_fail(TE_ARGUMENT, "experts: no room for hidden values or sums"));
    expert_args a = {};
    a.x = op->x;
    a.ldx = op->ldx;
    a.cols = op->gate.cols;
    a.n_used = op->n_used;
    a.n_routes = op->n_tok * op->n_used;
    a.rows = op->n_ff;
    a.w[0] = (const uint8_t *)op->gate.w;
    a.w[1] = (const uint8_t *)op->up.w;
    a.stride[0] = op->gate.stride;
    a.stride[1] = op->up.stride;
    a.b[0] = op->gate_b;
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
    a.down_t = (const uint8_t *)op->down_t.w;
    a.down_stride = op->down_t.stride;
    TE_CUDA_TRY(run(d, a, op->gate.type, false));
    if (op->down_t.w) return sum_by_neuron(d, op);
    a.x = op->h;
    a.ldx = op->ldh;
    a.cols = op->n_ff;
    a.rows = op->gate.cols;
    a.w[0] = (const uint8_t *)op->down.w;
    a.stride[0] = op->down.stride;
    a.b[0] = op->down_b;
    a.weight = op->weight;
    a.partial = op->partial;
    return run(d, a, op->down.type, true);
}

} // namespace te
