// experts_prompt.cu - te_cuda_prompt_experts: routes in the order of their experts' places, products with these, the sums of
// each token. Of some tokens the products are those of experts_wide.cuh, and the order's kernel makes the choice.
#include "experts.cuh"
#include "experts_wide.cuh"
#include "launch.h"
#include "prefill.cuh"
#include "wide_place.cuh"

namespace te {

constexpr int ORDER_THREADS = 1024, LIST_HEAD = 4;
constexpr int EXPERT_WIDE_TOK = 192; // tokens of experts_wide.cuh, at most

// Of tiles of at most so many routes.
static size_t most_tiles(const te_experts_args *op, int tile) {
    const size_t n_routes = (size_t)op->n_tok * (size_t)op->n_used;
    return n_routes / (size_t)tile + ((size_t)op->n_places < n_routes ? (size_t)op->n_places : n_routes);
}
size_t prompt_experts_words(const te_experts_args *op) {
    return LIST_HEAD + 4 * most_tiles(op, EXPERT_WIDE_TILE) + 3 * (size_t)op->n_tok * (size_t)op->n_used;
}

static const expert_wide_kernels *wide_experts(int type) {
    for (auto *group :
         {experts_wide_float, experts_wide_32, experts_wide_bits, experts_wide_table, experts_wide_k, experts_wide_k23})
        if (const expert_wide_kernels *k = group(type)) return k;
    return nullptr;
}

struct order_args {
    const int32_t *expert, *place;
    int n_routes, n_used, n_places, missing, first, tile, words; // words: of a place's bits, one for each token
    expert_lists lists;
};

// One block: a count of each place's routes, and where they begin. FEW, of some tokens: whose routes a place has, as
// bits (its experts are different), so that routes of a place are in the order of their tokens. Else in any order.
// CHOOSES: of these, a warp a token, from the router's scores. (Of more tokens than warps a kernel of its own is faster.)
template <bool FEW, bool CHOOSES>
__global__ void __launch_bounds__(ORDER_THREADS)
    order_kernel(const __grid_constant__ order_args a, const __grid_constant__ te_route_args r) {
    extern __shared__ int count[]; // of each place, then where its routes begin
    __shared__ int sums[2][ORDER_THREADS / 32];
    uint32_t *const bits = (uint32_t *)(count + a.n_places); // a.words a place
    dep_go();
    dep_wait();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int k = threadIdx.x; k < (1 + (FEW ? a.words : 0)) * a.n_places; k += ORDER_THREADS) count[k] = 0;
    for (int i = threadIdx.x; FEW && i < a.n_routes; i += ORDER_THREADS) a.lists.most[i] = 0;
    int *const chosen = (int *)(bits + a.words * a.n_places);
    if (CHOOSES) {
        float *const weight = (float *)(chosen + a.n_routes);
#pragma unroll 1
        for (int t = warp; t < r.n_tok; t += ORDER_THREADS / 32) {
            choose_small<ROUTE_FEW>(r, t, chosen + t * r.n_used, weight + t * r.n_used);
            finish_route(r, t, chosen + t * r.n_used, weight + t * r.n_used);
        }
    }
    __syncthreads();
    auto place = [&](int i) {
        return place_of(a.place, CHOOSES ? chosen[i] : __ldcg(a.expert + i), a.missing, a.first, a.n_places);
    };
#pragma unroll 4
    for (int i = threadIdx.x; i < a.n_routes; i += ORDER_THREADS) {
        const int k = place(i), t = FEW ? i / a.n_used : 0;
        if (!FEW) a.lists.position[i] = k < 0 ? -1 : atomicAdd(&count[k], 1);
        if (FEW && k >= 0) atomicOr(&bits[a.words * k + t / 32], 1u << t % 32);
    }
    __syncthreads();
    auto routes_of = [&](int k, int n_words) { // tokens of the first words
        int n = 0;
        for (int w = 0; w < n_words; w++) n += __popc(bits[a.words * k + w]);
        return n;
    };
    int before = 0, tiles = 0;
#pragma unroll 1
    for (int k0 = 0; k0 < a.n_places; k0 += ORDER_THREADS) {
        const int k = k0 + threadIdx.x,
                  n = k >= a.n_places ? 0
                      : FEW           ? routes_of(k, a.words)
                                      : count[k],
                  n_tiles = (n + a.tile - 1) / a.tile;
        int s = n, st = n_tiles; // inclusive
        for (int o = 1; o < 32; o *= 2) {
            const int v = __shfl_up_sync(~0u, s, o), vt = __shfl_up_sync(~0u, st, o);
            if (lane >= o) {
                s += v;
                st += vt;
            }
        }
        if (lane == 31) {
            sums[0][warp] = s;
            sums[1][warp] = st;
        }
        __syncthreads();
        int total = 0, total_tiles = 0;
        for (int w = 0; w < ORDER_THREADS / 32; w++) {
            if (w < warp) {
                s += sums[0][w];
                st += sums[1][w];
            }
            total += sums[0][w];
            total_tiles += sums[1][w];
        }
        const int begin = before + s - n, at = tiles + st - n_tiles;
        if (k < a.n_places) count[k] = begin;
        for (int i = 0; i < n_tiles; i++)
            a.lists.tile[at + i] = {k, begin + i * a.tile, min(a.tile, n - i * a.tile), 0};
        before += total;
        tiles += total_tiles;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        *a.lists.n_sorted = before;
        *a.lists.n_tiles = tiles;
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < a.n_routes; i += ORDER_THREADS) {
        const int k = place(i);
        if (FEW && k < 0) a.lists.position[i] = -1;
        if (k < 0) continue;
        int p = count[k];
        if (FEW) {
            const int t = i / a.n_used;
            p += routes_of(k, t / 32) + __popc(bits[a.words * k + t / 32] & ((1u << t % 32) - 1));
        } else {
            p += a.lists.position[i];
        }
        a.lists.position[i] = p;
        a.lists.sorted[p] = i;
    }
}

// What products with up alone become: hidden values. All others are.
struct up_alone {
    const float *bias; // of all experts, or NULL
    const int32_t *expert;
    const int *sorted;
    int rows, row0; // as expert_gemm's
    te_activation act;
    float threshold;
    uint32_t *counts;
};

// Hidden values as F16, a warp a row. Each row has a scale of its own, 1 unless its values leave the range of F16.
template <bool ALONE>
__global__ void __launch_bounds__(256) route_halve_kernel(const float *h, size_t ldh, int n, const int *n_sorted,
                                                          const te_cuda_half to, const up_alone of) {
    dep_go();
    dep_wait();
    const int lane = threadIdx.x % 32, rows = __ldcg(n_sorted), step = (int)gridDim.x * 8;
    uint32_t asked = 0, fired = 0;
    for (int r = (int)blockIdx.x * 8 + (int)threadIdx.x / 32; r < rows; r += step) {
        const float *x = h + (size_t)r * ldh, *bias = nullptr;
        uint16_t *y = (uint16_t *)to.v + (size_t)r * to.ld;
        if (ALONE && of.bias)
            bias = of.bias + (size_t)__ldcg(of.expert + __ldcg(of.sorted + r)) * (size_t)of.rows + (size_t)of.row0;
        auto one = [&](int c, float v) {
            if (!ALONE) return v;
            return activate(of.act, of.threshold, bias ? v + __ldg(bias + c) : v);
        };
        auto four = [&](int c) {
            float4 v = make_float4(0, 0, 0, 0);
            if (c + 4 <= n) v = __ldcg((const float4 *)(x + c));
            if (c + 4 <= n) return make_float4(one(c, v.x), one(c + 1, v.y), one(c + 2, v.z), one(c + 3, v.w));
            return make_float4(c < n ? one(c, __ldcg(x + c)) : 0, c + 1 < n ? one(c + 1, __ldcg(x + c + 1)) : 0,
                               c + 2 < n ? one(c + 2, __ldcg(x + c + 2)) : 0, 0);
        };
        float most = 0;
        for (int c = 4 * lane; c < n; c += 128) {
            const float4 v = four(c);
            most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
            asked += min(4, n - c);
            fired += (v.x != 0) + (v.y != 0) + (v.z != 0) + (v.w != 0);
        }
        most = warp_max(most);
        const int e = half_exponent(most);
        const float down = ldexpf(1, -e);
        for (int c = 4 * lane; c < (int)to.ld; c += 128) {
            const float4 v = four(c);
            *(uint2 *)(to.tiles ? (uint16_t *)to.v + wide_place(to, r, c) : y + c) =
                make_uint2(half2_of(v.x * down, v.y * down), half2_of(v.z * down, v.w * down));
        }
        if (lane == 0) to.scale[r] = ldexpf(1, e);
    }
    if constexpr (ALONE) {
        if (!of.counts) return;
        for (int o = 16; o; o /= 2) {
            asked += __shfl_xor_sync(~0u, asked, o);
            fired += __shfl_xor_sync(~0u, fired, o);
        }
        if (lane == 0 && asked) {
            atomicAdd(of.counts, asked);
            atomicAdd(of.counts + 1, asked);
            atomicAdd(of.counts + 2, fired);
        }
    }
}

struct add_args {
    const float *v, *bias, *weight;
    const int32_t *expert;
    const int *position;
    size_t ldv;
    float *y;
    const float *add, *sum_bias; // what the routes' sums are added to, or NULL
    size_t ldy, ld_add;
    int n_used, n_embd, c0, n;
    bool early;
};
// y of a token: its routes in the order of their ranks. A block has some columns of a token, four a thread.
constexpr int ADD_THREADS = 128, ADD_ONCE = 8; // routes on their way
__global__ void __launch_bounds__(ADD_THREADS) add_routes_kernel(const __grid_constant__ add_args a) {
    extern __shared__ int positions[];
    dep_go();
    // Between the order and this kernel are some that wait for the order before they let others start.
    if (!a.early) dep_wait();
    const size_t first = (size_t)blockIdx.x * (size_t)a.n_used;
    float *weights = (float *)(positions + a.n_used);
    int *who = positions + 2 * a.n_used;
    for (int r = threadIdx.x; r < a.n_used; r += ADD_THREADS) {
        positions[r] = __ldcg(a.position + first + r);
        weights[r] = a.weight ? __ldcg(a.weight + first + r) : 1;
        who[r] = __ldcg(a.expert + first + r);
    }
    const int c = 4 * (int)(blockIdx.y * ADD_THREADS + threadIdx.x);
    if (a.early) dep_wait();
    __syncthreads();
    if (c >= a.n) return;
    float4 s = make_float4(0, 0, 0, 0);
    if (a.add) s = __ldcg((const float4 *)(a.add + (size_t)blockIdx.x * a.ld_add + a.c0 + c));
    if (a.sum_bias) {
        const float4 b = __ldg((const float4 *)(a.sum_bias + a.c0 + c));
        s = make_float4(s.x + b.x, s.y + b.y, s.z + b.z, s.w + b.w);
    }
#pragma unroll 1
    for (int r0 = 0; r0 < a.n_used; r0 += ADD_ONCE) {
        float4 v[ADD_ONCE];
#pragma unroll
        for (int i = 0; i < ADD_ONCE; i++) {
            const int r = r0 + i;
            v[i] = make_float4(0, 0, 0, 0);
            if (r < a.n_used && positions[r] >= 0)
                v[i] = __ldcg((const float4 *)(a.v + (size_t)positions[r] * a.ldv + c));
        }
#pragma unroll
        for (int i = 0; i < ADD_ONCE; i++) {
            const int r = r0 + i;
            if (r >= a.n_used || positions[r] < 0) continue;
            if (a.bias) {
                const float4 b = __ldg((const float4 *)(a.bias + (size_t)who[r] * (size_t)a.n_embd + a.c0 + c));
                v[i] = make_float4(v[i].x + b.x, v[i].y + b.y, v[i].z + b.z, v[i].w + b.w);
            }
            const float w = weights[r];
            s = make_float4(fmaf(w, v[i].x, s.x), fmaf(w, v[i].y, s.y), fmaf(w, v[i].z, s.z), fmaf(w, v[i].w, s.w));
        }
    }
    *(float4 *)(a.y + (size_t)blockIdx.x * a.ldy + a.c0 + c) = s;
}

static te_status check(te_cuda *d, const te_cuda_prompt_experts *op) {
    const te_experts_args *a = &op->of;
    TE_CUDA_TRY(check_experts(d, a));
    if (a->kept) return refuse(d, te_fail(TE_UNSUPPORTED, "experts: a prompt's are not read in host memory"));
    const int n_embd = a->up.cols;
    const bool parts = op->n_ff_once < 1 || op->n_embd_once < 1 || (op->n_ff_once < a->n_ff && op->n_ff_once % 64) ||
                       (op->n_embd_once < n_embd && op->n_embd_once % 64);
    if (parts || !op->lists || !aligned(op->lists, 16) || !op->values || !aligned(op->values, 16) || !a->y ||
        !aligned(a->y, 16) || !aligned(a->down_b, 16) || a->n_tok > 65535)
        return refuse(d, te_fail(TE_ARGUMENT, "experts: %d neurons and %d columns at once, or no room",
                                 (int)op->n_ff_once, (int)op->n_embd_once));
    if (a->choice) TE_CUDA_TRY(check_route(d, a->choice));
    const te_merge_args *m = a->merge;
    if (m && (a->add || m->words || m->norm.kind != TE_NO_NORM || m->cols != n_embd || m->n_tok != a->n_tok || !m->y ||
              !aligned(m->y, 16) || !aligned(m->add, 16) || !aligned(m->bias, 16) || m->ldy % 4 || m->ld_add % 4))
        return refuse(d, te_fail(TE_ARGUMENT, "experts: a merge of more than these, or not aligned to 16 bytes"));
    if (!op->x.v || !op->x.scale || !aligned(op->x.v, 16) || op->x.ld % 8 || op->x.ld < (size_t)n_embd)
        return refuse(d, te_fail(TE_ARGUMENT, "experts: the input's rows of %zu values are not aligned", op->x.ld));
    if (op->x.tiles) {
        const expert_wide_kernels *k = wide_experts(a->up.type);
        if (!k || !a->gate.w || a->on_input || k->words != op->x.words || op->x.matrices || op->x.ld % 256 ||
            a->n_tok > EXPERT_WIDE_TOK || 8 * op->x.tiles < a->n_tok || EXPERT_WIDE_SMEM + 1024 > d->smem_block)
            return refuse(d, te_fail(TE_ARGUMENT, "experts: %d tokens in %d tiles", (int)a->n_tok, (int)op->x.tiles));
    }
    const int n_ff = op->n_ff_once < a->n_ff ? op->n_ff_once : a->n_ff;
    if (op->hidden) {
        if (!op->x.tiles || !a->down.w || !wide_experts(a->down.type) || !aligned(op->hidden, 16) ||
            (n_ff < a->n_ff && n_ff % 256))
            return refuse(d, te_fail(TE_ARGUMENT, "experts: floats of %d hidden values", n_ff));
        return TE_OK;
    }
    const te_cuda_half &h = op->h;
    const expert_wide_kernels *k = h.tiles ? wide_experts(a->down.type) : nullptr;
    if (h.tiles && (!op->x.tiles || !a->down.w || !k || k->words != h.words || h.matrices || h.ld % 256 ||
                    8 * h.tiles < a->n_tok * a->n_used || (n_ff < a->n_ff && n_ff % 256)))
        return refuse(d, te_fail(TE_ARGUMENT, "experts: hidden values in %d tiles", (int)h.tiles));
    if (!h.v || !h.scale || !aligned(h.v, 16) || h.ld % 8 || h.ld < (size_t)n_ff)
        return refuse(d, te_fail(TE_ARGUMENT, "experts: rows of %zu hidden values are not aligned", h.ld));
    return TE_OK;
}

static te_status multiply_experts(te_cuda *d, expert_gemm g, int type, bool by_neuron, int64_t n_tiles, int x_tiles) {
    if (x_tiles) {
        const expert_wide_kernels *k = wide_experts(type); // there is one: check
        const int64_t units = n_tiles * divide_up(g.n, g.down ? 16 : 8);
        const int blocks = divide_up(units, WIDE_WARPS), at_once = k->blocks * d->info.n_sm;
        return launch(d, "experts", k->run[g.down], dim3((unsigned)(blocks < at_once ? blocks : at_once)), WIDE_THREADS,
                      EXPERT_WIDE_SMEM, g, x_tiles);
    }
    const expert_kernels *k = expert_kernels_of(type, false);
    if (!k) return refuse(d, te_fail(TE_UNSUPPORTED, "experts: no kernel for weights of type %d", type));
    const int64_t items = n_tiles * divide_up(g.n, g.pairs ? EXPERT_ROWS / 2 : EXPERT_ROWS);
    const int at_once = 2 * d->info.n_sm;
    return launch(d, "experts", k->prompt[by_neuron], dim3((unsigned)(items < at_once ? items : at_once)),
                  EXPERT_GEMM_THREADS, expert_gemm_smem(g.tile), g);
}

te_status prompt_experts(te_cuda *d, const te_cuda_prompt_experts *op) {
    TE_CUDA_TRY(check(d, op));
    const te_experts_args *a = &op->of;
    const int n_embd = a->up.cols, n_routes = a->n_tok * a->n_used;
    const bool by_neuron = a->down_t.w != nullptr;
    const te_mat *down = by_neuron ? &a->down_t : &a->down;
    const te_merge_args *m = a->merge;
    expert_gemm g = {};
    // Larger tiles want more shared memory than some devices have.
    g.tile = expert_gemm_smem(EXPERT_TILE) + 1024 <= d->smem_block && !op->x.tiles ? EXPERT_TILE : 64;
    g.lists.n_sorted = op->lists;
    g.lists.n_tiles = op->lists + 1;
    g.lists.tile = (expert_tile *)(op->lists + LIST_HEAD);
    const bool few = op->x.tiles > 0;
    const int tile = few ? EXPERT_WIDE_TILE : g.tile;
    g.lists.position = op->lists + LIST_HEAD + 4 * most_tiles(a, EXPERT_WIDE_TILE);
    g.lists.sorted = g.lists.position + n_routes;
    g.lists.most = (uint32_t *)g.lists.sorted + n_routes;
    const order_args o = {
        a->expert, a->place, n_routes, a->n_used, a->n_places, a->missing, a->first, tile, divide_up(a->n_tok, 32),
        g.lists};
    const te_route_args *r = a->choice;
    const bool chooses = r && few && is_small(*r) && r->n_expert <= 32 * ROUTE_FEW && !r->n_missing && !r->n_kept &&
                         a->n_tok <= ORDER_THREADS / 32;
    // Where this begins beside the scores, a layer of 17 and more tokens takes 25 to 45 us longer; of fewer it gains nothing.
    const bool overlap = d->overlap;
    d->overlap = false;
    te_status st = r && !chooses ? route(d, r) : TE_OK;
    if (st == TE_OK)
        st = launch(d, "experts",
                    chooses ? order_kernel<true, true>
                    : few   ? order_kernel<true, false>
                            : order_kernel<false, false>,
                    dim3(1), ORDER_THREADS,
                    sizeof(int) * ((1 + (few ? (size_t)o.words : 0)) * (size_t)a->n_places +
                                   (chooses ? 2 * (size_t)n_routes : 0)),
                    o, chooses ? *r : te_route_args{});
    d->overlap = overlap;
    TE_CUDA_TRY(st);
    g.n_used = a->n_used;
    g.expert = a->expert;
    g.act = (te_activation)a->act;
    g.threshold = a->threshold;
    g.y = op->values;
    const int64_t n_tiles = (int64_t)most_tiles(a, tile);
    const int rows_blocks = divide_up(n_routes, 8) < 8 * d->info.n_sm ? divide_up(n_routes, 8) : 8 * d->info.n_sm;
    for (int f0 = 0; f0 < a->n_ff; f0 += op->n_ff_once) {
        const int n_ff = a->n_ff - f0 < op->n_ff_once ? a->n_ff - f0 : op->n_ff_once;
        g.x = (const uint16_t *)op->x.v;
        g.ldx = op->x.ld;
        g.scale = op->x.scale;
        g.pairs = a->gate.w != nullptr;
        g.w[0] = (const uint8_t *)(g.pairs ? a->gate.w : a->up.w);
        g.w[1] = (const uint8_t *)a->up.w;
        g.stride[0] = g.pairs ? a->gate.stride : a->up.stride;
        g.stride[1] = a->up.stride;
        g.b[0] = a->gate_b;
        g.b[1] = a->up_b;
        g.cols = g.k = n_embd;
        g.k0 = 0;
        g.rows = a->n_ff;
        g.row0 = f0;
        g.n = n_ff;
        g.down = false;
        g.y = op->hidden ? op->hidden : op->values;
        g.ldy = (size_t)(n_ff + 3) / 4 * 4;
        g.most = op->hidden ? g.lists.most : nullptr;
        g.counts = a->counts;
        g.in_weight = a->on_input ? a->weight : nullptr;
        TE_CUDA_TRY(multiply_experts(d, g, a->up.type, false, n_tiles, op->x.tiles));
        const up_alone alone = {a->up_b, a->expert, g.lists.sorted, a->n_ff, f0, g.act, g.threshold, a->counts};
        if (!op->hidden)
            TE_CUDA_TRY(launch(d, "experts", g.pairs ? route_halve_kernel<false> : route_halve_kernel<true>,
                               dim3((unsigned)rows_blocks), 256, 0, (const float *)g.y, g.ldy, n_ff,
                               (const int *)g.lists.n_sorted, op->h, alone));
        g.h = op->hidden;
        g.ldh = g.ldy;
        g.y = op->values;
        g.x = (const uint16_t *)op->h.v;
        g.ldx = op->h.ld;
        g.scale = op->h.scale;
        g.w[0] = (const uint8_t *)down->w;
        g.stride[0] = down->stride;
        g.b[0] = g.b[1] = g.in_weight = nullptr;
        g.cols = down->cols;
        g.k0 = f0;
        g.k = n_ff;
        g.rows = by_neuron ? a->n_ff : n_embd;
        g.down = true;
        g.pairs = false;
        g.counts = nullptr;
        for (int c0 = 0; c0 < n_embd; c0 += op->n_embd_once) {
            g.row0 = c0;
            g.n = n_embd - c0 < op->n_embd_once ? n_embd - c0 : op->n_embd_once;
            g.ldy = (size_t)(g.n + 3) / 4 * 4;
            TE_CUDA_TRY(multiply_experts(d, g, down->type, by_neuron, n_tiles, op->hidden ? 1 : op->h.tiles));
            add_args sum = {g.y,
                            f0 ? nullptr : a->down_b,
                            a->on_input ? nullptr : a->weight,
                            a->expert,
                            g.lists.position,
                            g.ldy,
                            m ? m->y : a->y,
                            nullptr,
                            nullptr,
                            m ? m->ldy : (size_t)n_embd,
                            0,
                            a->n_used,
                            n_embd,
                            c0,
                            g.n,
                            few};
            if (a->add || f0) {
                sum.add = sum.y;
                sum.ld_add = sum.ldy;
            } else if (m) {
                sum.add = m->add;
                sum.ld_add = m->ld_add;
                sum.sum_bias = m->bias;
            }
            TE_CUDA_TRY(launch(d, "experts", add_routes_kernel,
                               dim3((unsigned)a->n_tok, (unsigned)divide_up(g.n, 4 * ADD_THREADS)), ADD_THREADS,
                               12 * (size_t)a->n_used, sum));
        }
    }
    return TE_OK;
}

} // namespace te
