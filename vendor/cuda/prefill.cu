// prefill.cu - F16 input of products: of normed floats, and of a feed-forward's middle.
//
// Both take two kernels. The first writes values as they are, and of each token the largest; the second, which nearly always
// has nothing else to do, writes the scale. Only where the values of the matrix leave F16's range it makes them again. Where
// each token has a scale of its own, the first kernel does it all.
#include "activation.cuh"
#include "half_range.cuh"
#include "prefill.cuh"
#include "wide_place.cuh"

namespace te {

constexpr int HALF_THREADS = 512, HALF_WARPS = HALF_THREADS / 32;

// Sum or maximum over a block; all threads get it. room: shared, HALF_WARPS floats.
template <bool MAX> __device__ float over_block(float v, float *room) {
    v = MAX ? warp_max(v) : warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
    __syncthreads();
    v = room[0];
    for (int w = 1; w < HALF_WARPS; w++) v = MAX ? fmaxf(v, room[w]) : v + room[w];
    return v;
}

// Four floats from column c on; 0 behind the last.
__device__ __forceinline__ float4 four(const float *x, int c, int cols) {
    if (c + 4 <= cols) return __ldcg((const float4 *)(x + c));
    float4 v = make_float4(0, 0, 0, 0);
    if (c < cols) v.x = __ldcg(x + c);
    if (c + 1 < cols) v.y = __ldcg(x + c + 1);
    if (c + 2 < cols) v.z = __ldcg(x + c + 2);
    return v;
}
template <class F> __device__ __forceinline__ float4 each(F f) { return make_float4(f(0), f(1), f(2), f(3)); }
__device__ __forceinline__ float part(const float4 &v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// A source of values: begin is called by whole blocks, once for each token; at gives columns c to c + 3, 0 behind the last;
// end when a token's are through. first: not called for these values before.

struct normed {
    te_cuda_halve a;
    float mean, scale;
    __device__ void begin(int t, float *room) {
        mean = 0;
        scale = 1;
        if (a.norm.kind == TE_NO_NORM) return;
        const float *x = a.x + t * a.ldx;
        float s = 0;
        if (a.norm.kind == TE_LAYER_NORM) {
            for (int c = 4 * threadIdx.x; c < a.cols; c += 4 * HALF_THREADS) {
                const float4 v = four(x, c, a.cols);
                s += (v.x + v.y) + (v.z + v.w);
            }
            mean = over_block<false>(s, room) / (float)a.cols;
        }
        s = 0;
        for (int c = 4 * threadIdx.x; c < a.cols; c += 4 * HALF_THREADS) {
            const float4 v = four(x, c, a.cols);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (c + i < a.cols) s = fmaf(part(v, i) - mean, part(v, i) - mean, s);
        }
        scale = 1.0f / sqrtf(over_block<false>(s, room) / (float)a.cols + a.norm.eps);
    }
    __device__ float4 at(int t, int c, bool) {
        float4 v = four(a.x + t * a.ldx, c, a.cols);
        if (a.norm.kind != TE_NO_NORM)
            v = each([&](int i) {
                if (c + i >= a.cols) return 0.0f;
                const float b = a.norm.b ? __ldg(a.norm.b + c + i) : 0;
                return fmaf((part(v, i) - mean) * scale, __ldg(a.norm.w + c + i), b);
            });
        return a.relu ? each([&](int i) { return fmaxf(part(v, i), 0); }) : v;
    }
    __device__ void end(float *) {}
};

struct activated {
    te_cuda_act a;
    float asked, fired; // whole numbers
    __device__ void begin(int, float *) { asked = fired = 0; }
    __device__ float4 at(int t, int c, bool first) {
        const float4 u = four(a.up + t * a.ld_up, c, a.n),
                     g = a.gate ? four(a.gate + t * a.ld_gate, c, a.n) : make_float4(0, 0, 0, 0);
        const uint8_t *mask = a.mask ? a.mask + t * a.ld_mask : nullptr;
        return each([&](int i) {
            if (c + i >= a.n) return 0.0f;
            const int j = a.id ? __ldg(a.id + c + i) : c + i;
            if (mask && !(__ldcg(mask + j / 8) >> j % 8 & 1)) return 0.0f;
            float up = part(u, i), h;
            if (a.up_bias) up += __ldg(a.up_bias + j);
            if (!a.gate) {
                h = activate_up(a.act, a.threshold, a.curve, up);
            } else {
                h = gated_value(a.act, activate(a.act, a.threshold, part(g, i)), up);
            }
            if (first) {
                asked++;
                fired += h != 0;
                if (a.fired && h != 0) atomicAdd(a.fired + j, 1u);
            }
            return h;
        });
    }
    __device__ void end(float *room) {
        if (!a.counts) return;
        const uint32_t n_asked = (uint32_t)over_block<false>(asked, room),
                       n_fired = (uint32_t)over_block<false>(fired, room);
        if (threadIdx.x) return;
        atomicAdd(a.counts, n_asked);
        atomicAdd(a.counts + 1, n_asked);
        atomicAdd(a.counts + 2, n_fired);
    }
};

__device__ __forceinline__ void put4(const te_cuda_half &to, int t, int c, float4 v) {
    const uint2 two = make_uint2(half2_of(v.x, v.y), half2_of(v.z, v.w));
    if (to.tiles)
        wide_put(to, t, c, two);
    else
        *(uint2 *)((uint16_t *)to.v + (size_t)t * to.ld + (size_t)c) = two;
}

// A token's values once more, times `down`; of several blocks of a token, each its own.
template <class S> __device__ void again(S &s, int t, int cols, float down, const te_cuda_half &to) {
    const int step = 4 * HALF_THREADS * cluster_size();
    for (int c = 4 * (threadIdx.x + HALF_THREADS * cluster_rank()); c < cols; c += step) {
        const float4 v = s.at(t, c, false);
        put4(to, t, c, make_float4(v.x * down, v.y * down, v.z * down, v.w * down));
    }
}

// The blocks of a cluster share a token's columns.
template <class S> __global__ void __launch_bounds__(HALF_THREADS) halve_kernel(S s, int cols, te_cuda_half to) {
    __shared__ float room[HALF_WARPS], own_most;
    dep_go();
    dep_wait();
    const int parts = cluster_size(), rank = cluster_rank(), t = blockIdx.x / parts;
    float most = 0;
    s.begin(t, room);
    for (int c = 4 * (threadIdx.x + HALF_THREADS * rank); c < (int)to.ld; c += 4 * HALF_THREADS * parts) {
        const float4 v = s.at(t, c, true);
        most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
        put4(to, t, c, v);
    }
    s.end(room);
    most = over_block<true>(most, room);
    if (parts > 1) {
        if (threadIdx.x == 0) own_most = most;
        cluster_arrive();
        cluster_wait();
        for (int i = 0; i < parts; i++) most = fmaxf(most, __uint_as_float(cluster_load(&own_most, i)));
        cluster_arrive(); // who has read all may end
        cluster_wait();
    }
    if (!to.tiles) {
        if (threadIdx.x == 0 && rank == 0) to.scale[1 + t] = most;
        return;
    }
    const int e = half_exponent(most);
    if (threadIdx.x == 0 && rank == 0) to.scale[t] = ldexpf(1, e);
    if (e) again(s, t, cols, ldexpf(1, -e), to);
}

template <class S>
__global__ void __launch_bounds__(HALF_THREADS) rescale_kernel(S s, int n_tok, int cols, te_cuda_half to) {
    __shared__ float room[HALF_WARPS];
    dep_go();
    dep_wait();
    float most = 0;
    for (int t = threadIdx.x; t < n_tok; t += HALF_THREADS) most = fmaxf(most, __ldcg(to.scale + 1 + t));
    most = over_block<true>(most, room);
    const int e = half_exponent(most);
    if (blockIdx.x == 0 && threadIdx.x == 0) to.scale[0] = ldexpf(1, e);
    if (!e) return;
    for (int t = blockIdx.x; t < n_tok; t += gridDim.x) {
        s.begin(t, room);
        again(s, t, cols, ldexpf(1, -e), to);
    }
}

// parts: blocks of a token, where there are few of these.
template <class S>
static te_status run(te_cuda *d, const char *name, const S &s, int n_tok, int cols, const te_cuda_half &to, int parts) {
    if (n_tok < 1 || n_tok > 65535 || cols < 1 || !to.v || !to.scale || !aligned(to.v, 16) || to.ld % 8 ||
        to.ld < (size_t)cols || to.ld > INT32_MAX || (to.tiles && (n_tok > 8 * to.tiles || to.ld % 256)))
        return refuse(d, te_fail(TE_ARGUMENT, "%s: %d tokens of %d values, %zu apart", name, n_tok, cols, to.ld));
    if (d->info.major < 9 || n_tok > TE_CUDA_WIDE_TOK) parts = 1;
    TE_CUDA_TRY(launch_clusters(d, name, halve_kernel<S>, dim3((unsigned)(n_tok * parts)), (unsigned)parts,
                                HALF_THREADS, 0, s, cols, to));
    if (to.tiles) return TE_OK;
    const int blocks = n_tok < 2 * d->info.n_sm ? n_tok : 2 * d->info.n_sm;
    return launch(d, name, rescale_kernel<S>, dim3((unsigned)blocks), HALF_THREADS, 0, s, n_tok, cols, to);
}

// Of few tokens a block has all of a token's values at once, R times four of a thread.
constexpr int ROW_MOST = TE_CUDA_ROW / 4 / HALF_THREADS;
template <int R> __device__ __forceinline__ void halve_row(const te_cuda_halve &a, int t, float2 *room) {
    const bool normed = a.norm.kind != TE_NO_NORM;
    float4 w[R], v[R];
#pragma unroll
    for (int k = 0; k < R; k++) {
        const int c = 4 * (threadIdx.x + k * HALF_THREADS);
        w[k] = normed && c < a.cols ? __ldg((const float4 *)(a.norm.w + c)) : make_float4(1, 1, 1, 1);
    }
    dep_go();
    dep_wait();
#pragma unroll
    for (int k = 0; k < R; k++) {
        const int c = 4 * (threadIdx.x + k * HALF_THREADS);
        v[k] = c < a.cols ? __ldcg((const float4 *)(a.x + t * a.ldx + c)) : make_float4(0, 0, 0, 0);
        if (a.relu) v[k] = make_float4(fmaxf(v[k].x, 0), fmaxf(v[k].y, 0), fmaxf(v[k].z, 0), fmaxf(v[k].w, 0));
    }
    float sum = 0, most = 0;
#pragma unroll
    for (int k = 0; k < R; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum = fmaf(part(v[k], i), part(v[k], i), sum);
            most = fmaxf(most, fabsf(part(v[k], i) * part(w[k], i)));
        }
    sum = warp_sum(sum);
    most = warp_max(most);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = make_float2(sum, most);
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < HALF_WARPS; i++) {
        sum += room[i].x;
        most = fmaxf(most, room[i].y);
    }
    const float scale = normed ? 1.0f / sqrtf(sum / (float)a.cols + a.norm.eps) : 1;
    most *= scale;
    const int e = half_exponent(most);
    const float down = ldexpf(1, -e);
    if (threadIdx.x == 0) a.to.scale[t] = ldexpf(1, e);
    if (threadIdx.x == 0 && a.also.v) a.also.scale[t] = ldexpf(1, e);
#pragma unroll
    for (int k = 0; k < R; k++) {
        const int c = 4 * (threadIdx.x + k * HALF_THREADS);
        const float4 y = each([&](int i) { return part(v[k], i) * scale * part(w[k], i); }),
                     z = each([&](int i) { return part(y, i) * down; });
        if (c < (int)a.to.ld) put4(a.to, t, c, z);
        if (a.also.v && c < (int)a.also.ld) put4(a.also, t, c, z);
        if (a.keep && c < a.cols) *(float4 *)(a.keep + (size_t)t * (size_t)a.cols + c) = y;
    }
}

template <int R>
__global__ void __launch_bounds__(HALF_THREADS) halve_row_kernel(const __grid_constant__ te_cuda_halve a) {
    __shared__ float2 room[HALF_WARPS];
    halve_row<R>(a, blockIdx.x, room);
}

// Whether a block takes a token; two forms and floats are made in no other way.
static bool is_by_rows(const te_cuda_halve *op) {
    const te_norm &n = op->norm;
    return op->to.tiles && op->cols % 4 == 0 && op->to.ld <= TE_CUDA_ROW && op->also.ld <= TE_CUDA_ROW &&
           aligned(n.w, 16) && (n.kind == TE_NO_NORM || (n.kind == TE_RMS_NORM && !n.b && !op->relu));
}
static int row_times(const te_cuda_halve *op) { // fours of a thread
    return divide_up((int64_t)(op->to.ld > op->also.ld ? op->to.ld : op->also.ld), 4 * HALF_THREADS);
}
static te_status check_rows(te_cuda *d, const te_cuda_halve *op) {
    if (!op->x || !aligned(op->x, 16) || op->ldx % 4 || (op->norm.kind != TE_NO_NORM && !op->norm.w))
        return refuse(d, te_fail(TE_ARGUMENT, "halve: x is not aligned to 16 bytes, or a norm has no weights"));
    if (!is_by_rows(op)) {
        if (!op->also.v && !op->keep) return TE_OK;
        return refuse(d, te_fail(TE_UNSUPPORTED, "halve: two forms of %d values of a token", (int)op->cols));
    }
    for (const te_cuda_half *h : {&op->to, &op->also})
        if ((h->v || h == &op->to) && (!h->v || !h->scale || !aligned(h->v, 16) || h->ld % 256 ||
                                       h->ld < (size_t)op->cols || op->n_tok < 1 || op->n_tok > 8 * h->tiles))
            return refuse(d, te_fail(TE_ARGUMENT, "halve: %d tokens of %d values in %d tiles", (int)op->n_tok,
                                     (int)op->cols, (int)h->tiles));
    return TE_OK;
}

te_status halve(te_cuda *d, const te_cuda_halve *op) {
    TE_CUDA_TRY(check_rows(d, op));
    if (is_by_rows(op))
        return launch(d, "halve", row_times(op) > 2 ? halve_row_kernel<ROW_MOST> : halve_row_kernel<2>,
                      dim3((unsigned)op->n_tok), HALF_THREADS, 0, *op);
    const normed s = {*op, 0, 1};
    return run(d, "halve", s, op->n_tok, op->cols, op->to, 1);
}

// ---- a router's scores ----

struct scores_args {
    te_cuda_scores of;
    te_cuda_halve side;
    int n_blocks, across; // blocks of scores, and how many of these have the same tokens
};
// A block has ROWS rows and TOKENS tokens, of which so many warps share the columns that all have work; behind these are blocks
// that make a side, of R fours of a thread.
template <int ROWS, int TOKENS, int R>
__global__ void __launch_bounds__(HALF_THREADS) scores_kernel(const __grid_constant__ scores_args args) {
    constexpr int SHARES = HALF_WARPS / TOKENS;
    __shared__ float2 room[HALF_WARPS];
    __shared__ float sums[HALF_WARPS][ROWS + 1];
    const te_cuda_scores &a = args.of;
    const int b = blockIdx.x;
    if (b >= args.n_blocks) return halve_row<R>(args.side, b - args.n_blocks, room);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r0 = b % args.across * ROWS,
              t0 = b / args.across * TOKENS, t = t0 + warp % TOKENS;
    const bool normed = a.norm.kind != TE_NO_NORM;
    const float *m[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        m[i] = (const float *)((const uint8_t *)a.w.w + (size_t)min(r0 + i, a.w.n_rows - 1) * a.w.stride);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if ((int)threadIdx.x == 32 * i) prefetch_bytes(m[i], 4 * (size_t)a.cols);
    dep_go();
    dep_wait();
    const float *x = a.x + (size_t)min(t, a.n_tok - 1) * a.ldx;
    float sum[ROWS + 1] = {}; // the last: of squares
#pragma unroll 4
    for (int c = 4 * (lane + 32 * (warp / TOKENS)); c < a.cols; c += 128 * SHARES) {
        float4 v = __ldcg((const float4 *)(x + c));
        if (normed) {
            const float4 n = __ldg((const float4 *)(a.norm.w + c));
            sum[ROWS] = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum[ROWS]))));
            v = make_float4(v.x * n.x, v.y * n.y, v.z * n.z, v.w * n.w);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float4 w = __ldg((const float4 *)(m[i] + c));
            sum[i] = fmaf(w.x, v.x, fmaf(w.y, v.y, fmaf(w.z, v.z, fmaf(w.w, v.w, sum[i]))));
        }
    }
#pragma unroll
    for (int i = 0; i <= ROWS; i++) {
        const float v = warp_sum(sum[i]);
        if (lane == 0) sums[warp][i] = v;
    }
    __syncthreads();
    const int of = threadIdx.x % TOKENS, i = threadIdx.x / TOKENS, r = r0 + i;
    if (i >= ROWS || r >= a.w.n_rows || t0 + of >= a.n_tok) return;
    float v = 0, squares = 0;
#pragma unroll
    for (int s = 0; s < SHARES; s++) {
        v += sums[of + s * TOKENS][i];
        squares += sums[of + s * TOKENS][ROWS];
    }
    const float scale = normed ? 1.0f / sqrtf(squares / (float)a.cols + a.norm.eps) : 1;
    a.y[(size_t)(t0 + of) * a.ldy + r] = fmaf(scale, v, a.bias ? __ldg(a.bias + r) : 0);
}

te_status scores(te_cuda *d, const te_cuda_scores *op) {
    TE_CUDA_TRY(check_matrix(d, "scores", &op->w));
    const te_norm &n = op->norm;
    const te_cuda_halve *side = op->side;
    if (op->w.type != TE_F32 || op->w.cols != op->cols || op->cols % 4 || !op->x || !aligned(op->x, 16) ||
        op->ldx % 4 || op->n_tok < 1 || op->n_tok > 65535 || !op->y || n.b || !aligned(n.w, 16) ||
        (n.kind != TE_NO_NORM && (n.kind != TE_RMS_NORM || !n.w)))
        return refuse(d, te_fail(TE_ARGUMENT, "scores: %d tokens, rows of type %d and %d columns, norm %d",
                                 (int)op->n_tok, (int)op->w.type, (int)op->w.cols, (int)n.kind));
    if (side) TE_CUDA_TRY(check_rows(d, side));
    if (side && !is_by_rows(side)) return refuse(d, te_fail(TE_UNSUPPORTED, "scores: beside another side"));
    const bool many = op->n_tok > 28, wide = side && row_times(side) > 2;
    scores_args a = {};
    a.of = *op;
    if (side) a.side = *side;
    a.across = divide_up(op->w.n_rows, many ? 4 : 2);
    a.n_blocks = a.across * divide_up(op->n_tok, many ? 8 : 4);
    static void (*const kernels[2][2])(scores_args) = {{scores_kernel<2, 4, 2>, scores_kernel<2, 4, ROW_MOST>},
                                                       {scores_kernel<4, 8, 2>, scores_kernel<4, 8, ROW_MOST>}};
    return launch(d, "scores", kernels[many][wide], dim3((unsigned)(a.n_blocks + (side ? side->n_tok : 0))),
                  HALF_THREADS, 0, a);
}

te_status act(te_cuda *d, const te_cuda_act *op) {
    if (!op->up || !aligned(op->up, 16) || op->ld_up % 4 || !aligned(op->gate, 16) || (op->gate && op->ld_gate % 4))
        return refuse(d, te_fail(TE_ARGUMENT, "act: gate or up are not aligned to 16 bytes"));
    const activated s = {*op, 0, 0};
    return run(d, "act", s, op->n_tok, op->n, op->to, 4);
}

} // namespace te
