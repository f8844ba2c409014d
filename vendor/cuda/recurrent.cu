// recurrent.cu - blocks with a state, of few tokens and of prompts, and gates.
//
//     conv   a thread takes a channel and some tokens of a sequence. It reads the inputs in front of them, or what is
//            remembered; the thread of the first ones writes what will be
//     scan   a block takes 32 columns of a head's state, in registers, through all tokens of a sequence. Four threads share a
//            column; q, k and v of the next tokens are on their way to shared memory meanwhile
#include "gemm_mma.cuh"
#include "launch.h"

namespace te {
namespace {

constexpr int THREADS = 128, COLS = THREADS / 4; // of a state, of a block
constexpr int SEGMENT = 16;                      // tokens of a thread of conv; more than any width
constexpr int TILE = 8;                          // tokens whose vectors are in shared memory at once
static_assert(SEGMENT >= TE_CONV_WIDTH && TILE <= THREADS, "see conv and scan");

// The tokens of a run.
struct tokens {
    const int32_t *order;
    int first, n;
    __device__ int at(int i) const { return order ? __ldcg(order + i) : first; }
};
__device__ tokens tokens_of(const te_recurrent_args &a, int r) {
    if (a.apart) return {nullptr, r, 1};
    const int lo = __ldcg(a.run + r), n = __ldcg(a.run + r + 1) - lo;
    return {a.order + lo, 0, n};
}

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// ---- conv ----

template <int WIDTH> __global__ void __launch_bounds__(THREADS) conv_kernel(te_recurrent_args a) {
    dep_go();
    const int c = blockIdx.x * THREADS + threadIdx.x, from = blockIdx.y * SEGMENT;
    const bool in = c < a.n_channels;
    float w[WIDTH], x[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; j++) w[j] = in ? __ldg(a.w + (size_t)j * a.n_channels + c) : 0;
    const float bias = in && a.b ? __ldg(a.b + c) : 0;
    dep_wait();
    const tokens run = tokens_of(a, blockIdx.z);
    if (!in || from >= run.n) return;
    const int first = run.at(0);
    const bool begins = __ldcg(a.pos + first) == 0;
    float *last = a.state + a.ld_state * (size_t)__ldcg(a.place + first) + c;
    auto input = [&](int i) { // of the i-th token of the run, or of one that is remembered
        if (i < 0) return begins ? 0.0f : __ldcg(last + (size_t)(i + WIDTH - 1) * a.n_channels);
        const size_t at = a.ldx * (size_t)run.at(i) + c;
        const float v = __ldcg(a.x + at);
        return a.before ? v * __ldcg(a.before + at) : v;
    };
#pragma unroll
    for (int j = 0; j + 1 < WIDTH; j++) x[j] = input(from + j - (WIDTH - 1));
    float next[WIDTH]; // what will be remembered
#pragma unroll
    for (int j = 0; j + 1 < WIDTH; j++) next[j] = from == 0 ? input(run.n + j - (WIDTH - 1)) : 0;
    for (int i = from; i < min(from + SEGMENT, run.n); i++) {
        const size_t t = run.at(i);
        x[WIDTH - 1] = input(i);
        float y = bias;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) y = fmaf(w[j], x[j], y);
        if (a.silu) y *= sigmoid(y);
        if (a.after) y *= __ldcg(a.after + a.ldx * t + c);
        a.y[a.ldy * t + c] = y;
#pragma unroll
        for (int j = 0; j + 1 < WIDTH; j++) x[j] = x[j + 1];
        const int keep = __ldcg(a.keep + t);
#pragma unroll
        for (int j = 0; j + 1 < WIDTH; j++)
            if (keep >= 0) a.state[a.ld_state * (size_t)keep + (size_t)j * a.n_channels + c] = x[j];
    }
#pragma unroll
    for (int j = 0; j + 1 < WIDTH; j++)
        if (from == 0) last[(size_t)j * a.n_channels] = next[j];
}

// ---- scan ----

// Vectors of a tile, and what is known of its tokens.
template <int ROWS> struct tile {
    float4 q[TILE][ROWS / 4], k[TILE][ROWS / 4], v[TILE][COLS / 4];
    float decay[TILE], rate[TILE], q_scale[TILE], k_scale[TILE];
    int token[TILE], keep[TILE];
};

__device__ __forceinline__ float quad_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}

// ROWS: at least n_k, a multiple of 16. Of a column thread p of four has rows 16 i + 4 p to 16 i + 4 p + 3.
template <int ROWS> __global__ void __launch_bounds__(THREADS) scan_kernel(te_recurrent_args a) {
    extern __shared__ float4 shared[];
    tile<ROWS> *tiles = (tile<ROWS> *)shared; // [2]
    dep_go();
    if (!a.early) dep_wait();
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, part = tid % 4, h = blockIdx.y,
              col0 = blockIdx.x * COLS, col = col0 + tid / 4,
              group = a.tiled ? h % a.n_group : h / (a.n_head / a.n_group);
    const bool in = col < a.n_v;
    const tokens run = tokens_of(a, blockIdx.z);
    const size_t at = (size_t)(a.width - 1) * a.n_channels + (size_t)h * a.n_k * a.n_v + col;
    float s[ROWS / 4];
    float *own = nullptr;
    if (run.n > 0) {
        const int first = run.at(0);
        const bool begins = __ldcg(a.pos + first) == 0;
        own = a.state + a.ld_state * (size_t)__ldcg(a.place + first) + at;
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            const int row = 16 * (i / 4) + 4 * part + i % 4;
            s[i] = in && !begins && row < a.n_k ? __ldcg(own + (size_t)row * a.n_v) : 0;
        }
    }
    if (a.early) dep_wait();
    if (run.n < 1) return;

    auto store = [&](float *to) {
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            const int row = 16 * (i / 4) + 4 * part + i % 4;
            if (in && row < a.n_k) to[(size_t)row * a.n_v] = s[i];
        }
    };
    // Brings the vectors of tokens from `base` on.
    auto fetch = [&](tile<ROWS> &to, int base) {
        constexpr int EACH = ROWS / 4, ALL = 2 * EACH + COLS / 4;
        for (int i = tid; i < TILE * ALL; i += THREADS) {
            const int j = i / ALL, c = i % ALL;
            const bool there = base + j < run.n;
            const float *y = a.y + a.ldy * (size_t)(there ? run.at(base + j) : run.at(0));
            if (c < 2 * EACH) {
                const int r = 4 * (c % EACH);
                float4 *at = c < EACH ? &to.q[j][c] : &to.k[j][c - EACH];
                const bool row = there && r < a.n_k;
                fetch16(at, y + (c < EACH ? a.q_at : a.k_at) + group * a.n_k + (row ? r : 0), row);
            } else {
                const int r = col0 + 4 * (c - 2 * EACH);
                const bool column = there && r < a.n_v;
                fetch16(&to.v[j][c - 2 * EACH], y + a.v_at + h * a.n_v + (column ? r : 0), column);
            }
        }
        fetches_end();
    };
    float alpha = 0, beta = 0; // of the token that this thread makes decay and rate of
    int token = 0, keep = -1;
    auto read_gates = [&](int base) {
        if (tid >= TILE || base + tid >= run.n) return;
        token = run.at(base + tid);
        const size_t g = a.ld_gate * (size_t)token + (size_t)(h / a.gate_each * a.gate_step + h % a.gate_each);
        alpha = __ldcg(a.alpha + g);
        if (a.beta) beta = __ldcg(a.beta + g);
        keep = __ldcg(a.keep + token);
    };
    auto put_gates = [&](tile<ROWS> &to) {
        if (tid >= TILE) return;
        const float dt = softplus(alpha + __ldg(a.dt_b + h));
        to.decay[tid] = expf(__ldg(a.a + h) * dt);
        to.rate[tid] = a.beta ? sigmoid(beta) : dt;
        to.token[tid] = token;
        to.keep[tid] = keep;
    };
    // What makes q and k as long as they must be.
    auto measure = [&](tile<ROWS> &of) {
        for (int j = warp; j < TILE; j += THREADS / 32) {
            float q = 0, k = 0;
            for (int c = lane; c < ROWS / 4; c += 32) {
                const float4 u = of.q[j][c], w = of.k[j][c];
                q += u.x * u.x + u.y * u.y + u.z * u.z + u.w * u.w;
                k += w.x * w.x + w.y * w.y + w.z * w.z + w.w * w.w;
            }
            q = warp_sum(q);
            k = warp_sum(k);
            if (lane) continue;
            of.q_scale[j] = a.delta ? rsqrtf((q + 1e-6f) * (float)a.n_k) : 1;
            of.k_scale[j] = a.delta ? rsqrtf(k + 1e-6f) : 1;
        }
    };

    const float skip = a.skip ? __ldg(a.skip + h) : 0;
    fetch(tiles[0], 0);
    read_gates(0);
    for (int base = 0, turn = 0; base < run.n; base += TILE, turn ^= 1) {
        tile<ROWS> &now = tiles[turn];
        put_gates(now);
        fetches_wait<0>();
        __syncthreads(); // and all have done with the other tile
        if (base + TILE < run.n) {
            fetch(tiles[turn ^ 1], base + TILE);
            read_gates(base + TILE);
        }
        measure(now);
        __syncthreads();
        for (int j = 0; j < min(TILE, run.n - base); j++) {
            const float decay = now.decay[j], rate = now.rate[j], v = ((const float *)now.v[j])[tid / 4];
            float u = rate * v, sum[4] = {0, 0, 0, 0};
            if (a.delta) {
#pragma unroll
                for (int i = 0; i < ROWS / 16; i++) {
                    const float4 k = now.k[j][4 * i + part];
                    sum[0] = fmaf(k.x, s[4 * i], sum[0]);
                    sum[1] = fmaf(k.y, s[4 * i + 1], sum[1]);
                    sum[2] = fmaf(k.z, s[4 * i + 2], sum[2]);
                    sum[3] = fmaf(k.w, s[4 * i + 3], sum[3]);
                }
                const float known = quad_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) * now.k_scale[j];
                u = rate * (v - decay * known) * now.k_scale[j];
                sum[0] = sum[1] = sum[2] = sum[3] = 0;
            }
#pragma unroll
            for (int i = 0; i < ROWS / 16; i++) {
                const float4 k = now.k[j][4 * i + part], q = now.q[j][4 * i + part];
                s[4 * i] = fmaf(k.x, u, decay * s[4 * i]);
                s[4 * i + 1] = fmaf(k.y, u, decay * s[4 * i + 1]);
                s[4 * i + 2] = fmaf(k.z, u, decay * s[4 * i + 2]);
                s[4 * i + 3] = fmaf(k.w, u, decay * s[4 * i + 3]);
                sum[0] = fmaf(q.x, s[4 * i], sum[0]);
                sum[1] = fmaf(q.y, s[4 * i + 1], sum[1]);
                sum[2] = fmaf(q.z, s[4 * i + 2], sum[2]);
                sum[3] = fmaf(q.w, s[4 * i + 3], sum[3]);
            }
            const float out = quad_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) * now.q_scale[j];
            if (in && part == 0) a.out[a.ld_out * (size_t)now.token[j] + (size_t)h * a.n_v + col] = fmaf(skip, v, out);
            if (now.keep[j] >= 0) store(a.state + a.ld_state * (size_t)now.keep[j] + at);
        }
    }
    store(own);
}

// ---- gates ----

__device__ float block_sum(float v, float *part) {
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < THREADS / 32; i++) sum += part[i];
    return sum;
}

// A block takes a group of a token.
__global__ void __launch_bounds__(THREADS) gate_kernel(te_gate_args a) {
    __shared__ float part[THREADS / 32];
    dep_go();
    dep_wait();
    const size_t t = blockIdx.y, at = (size_t)blockIdx.x * a.each;
    const float *x = a.x + a.ldx * t + at, *gate = a.gate + a.ld_gate * t + at,
                *w = a.norm ? a.norm + (size_t)blockIdx.x * a.norm_step : nullptr;
    float *y = a.y + a.ldy * t + at;
    auto act = [&](int c) {
        const float g = __ldcg(gate + c);
        return a.silu ? g * sigmoid(g) : sigmoid(g);
    };
    float sum = 0;
    for (int c = threadIdx.x; w && c < a.each; c += THREADS) {
        const float v = a.norm_last ? __ldcg(x + c) * act(c) : __ldcg(x + c);
        sum = fmaf(v, v, sum);
    }
    const float scale = w ? 1.0f / sqrtf(block_sum(sum, part) / (float)a.each + a.norm_eps) : 1;
    for (int c = threadIdx.x; c < a.each; c += THREADS) y[c] = __ldcg(x + c) * act(c) * (w ? scale * __ldg(w + c) : 1);
}

// ---- the operations ----

template <int WIDTH> te_status convolve(te_cuda *d, const te_recurrent_args &a) {
    const int longest = a.apart ? 1 : a.n_tok;
    return launch(
        d, "recurrent", conv_kernel<WIDTH>,
        dim3((unsigned)divide_up(a.n_channels, THREADS), (unsigned)divide_up(longest, SEGMENT), (unsigned)a.n_runs),
        THREADS, 0, a);
}

template <int ROWS> te_status scan(te_cuda *d, const te_recurrent_args &a) {
    return launch(d, "recurrent", scan_kernel<ROWS>,
                  dim3((unsigned)divide_up(a.n_v, COLS), (unsigned)a.n_head, (unsigned)a.n_runs), THREADS,
                  2 * sizeof(tile<ROWS>), a);
}

te_status check(te_cuda *d, const te_recurrent_args *op) {
    if (op->n_tok < 1 || op->n_runs < 1 || op->n_runs > op->n_tok || op->n_tok > 65535 || op->n_channels < 1 ||
        op->width < 2 || op->width > TE_CONV_WIDTH || (op->apart && op->n_runs != op->n_tok))
        return refuse(d,
                      te_fail(TE_ARGUMENT, "recurrent: %d tokens of %d sequences, %d channels, a convolution over %d",
                              (int)op->n_tok, (int)op->n_runs, (int)op->n_channels, (int)op->width));
    if (!op->n_head) return TE_OK;
    if (op->n_head > 65535 || op->n_group < 1 || op->n_head % op->n_group || op->n_k < 1 || op->n_k > 256 ||
        op->n_v < 1 || op->n_k % 4 || op->n_v % 4 || op->q_at % 4 || op->k_at % 4 || op->v_at % 4 || op->ldy % 4 ||
        !aligned(op->y, 16))
        return refuse(d, te_fail(TE_UNSUPPORTED, "recurrent: %d heads of %d groups, %d and %d values", (int)op->n_head,
                                 (int)op->n_group, (int)op->n_k, (int)op->n_v));
    return TE_OK;
}

} // namespace

te_status recurrent(te_cuda *d, const te_recurrent_args *op) {
    TE_CUDA_TRY(check(d, op));
    static te_status (*const conv[])(te_cuda *, const te_recurrent_args &) = {
        convolve<2>, convolve<3>, convolve<4>, convolve<5>, convolve<6>, convolve<7>, convolve<8>};
    TE_CUDA_TRY(conv[op->width - 2](d, *op));
    if (!op->n_head) return TE_OK;
    return op->n_k <= 64 ? scan<64>(d, *op) : op->n_k <= 128 ? scan<128>(d, *op) : scan<256>(d, *op);
}

te_status gate(te_cuda *d, const te_gate_args *op) {
    if (op->n_tok < 1 || op->n_tok > 65535 || op->n_group < 1 || op->each < 1)
        return refuse(d, te_fail(TE_ARGUMENT, "gate: %d tokens, %d groups of %d", (int)op->n_tok, (int)op->n_group,
                                 (int)op->each));
    return launch(d, "gate", gate_kernel, dim3((unsigned)op->n_group, (unsigned)op->n_tok), THREADS, 0, *op);
}

} // namespace te
