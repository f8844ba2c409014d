// lean.cu - products of one token, or two in turn, with all rows in Q4_0, where nothing is unusual: what one.cuh and rows.cuh
// do, in fewer instructions. Weights of half a byte come so fast that these are the limit.
//
// A warp multiplies some rows at a time, which share what is read of the activations. A block's rows, in such groups, are
// one sequence of steps of 32 pieces each, which is cut evenly for its warps, wherever rows end: hardly any lanes are idle,
// however long a row is. Sums of a group's parts meet in shared memory and are added in order. A warp has some steps on
// their way ahead, the first ones before the kernel in front has ended; they fill the registers of a multiprocessor.
#include "activation.cuh"
#include "launch.h"
#include "lean.h"

namespace te {

// One block of a multiprocessor: its threads, rows at a time, steps ahead.
template <int THREADS, int ROWS, int AHEAD> struct lean_shape {
    static constexpr int threads = THREADS, rows = ROWS, ahead = AHEAD;
};
typedef lean_shape<512, 4, 4> lean_usual;
typedef lean_shape<640, 2, 4> lean_wider; // each thread brings in eight columns at a time: it takes 5,120 at once

// Of 32 activations x = 16 * d * q; less: -8 times the sum of q.
struct lean32 {
    float d;
    int less;
};

// Eight activations, the i-th of a row, into shared memory; the four lanes of 32 are neighbours, and whole warps call it.
// What is too small or no number: as make_bytes.
__device__ __forceinline__ void put_eight(const float4 (&v)[2], int i, uint4 *q, lean32 *b) {
    auto size = [](float4 x) {
        auto one = [](float y) { return __float_as_uint(y) & 0x7fffffff; };
        return max(max(one(x.x), one(x.y)), max(one(x.z), one(x.w)));
    };
    uint32_t bits = max(size(v[0]), size(v[1]));
    bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
    bits = max(bits, __shfl_xor_sync(~0u, bits, 2));
    const float most = __uint_as_float(bits), scale = most > 1e-35f ? __fdividef(127.0f, most) : 0;
    auto byte = [&](float x) { return __float_as_uint(fmaf(x, scale, 12582912.0f)); };
    auto bytes = [&](float4 x) {
        return __byte_perm(__byte_perm(byte(x.x), byte(x.y), 0x0040), __byte_perm(byte(x.z), byte(x.w), 0x0040),
                           0x5410);
    };
    const uint2 w = make_uint2(bytes(v[0]), bytes(v[1]));
    int sum = __dp4a((int)w.y, 0x01010101, __dp4a((int)w.x, 0x01010101, 0));
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    ((uint2 *)&q[swizzle(i >> 1)])[i & 1] = w;
    const float d = bits >= 0x7f800000 ? __uint_as_float(0x7fffffff) : most > 1e-35f ? most * (1 / 2032.0f) : 0;
    if (i % 4 == 0) b[i / 4] = {d, -8 * sum};
}

// Loads that leave what they load into as it is unless `on`; they are not waited for where a branch would end.
__device__ __forceinline__ void load16_if(bool on, const void *p, uint4 &v) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"
                 "@p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n\t}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                 : "l"(p), "r"((unsigned)on));
}
__device__ __forceinline__ void load2_if(bool on, const void *p, uint16_t &v) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\t@p ld.global.nc.u16 %0, [%1];\n\t}"
                 : "+h"(v)
                 : "l"(p), "r"((unsigned)on));
}
// Bytes without a sign by bytes with one.
__device__ __forceinline__ int dot16_unsigned(uint4 w, uint4 x, int s) {
    auto dot = [](uint32_t a, uint32_t b, int c) {
        int d;
        asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
        return d;
    };
    return dot(w.w, x.w, dot(w.z, x.z, dot(w.y, x.y, dot(w.x, x.x, s))));
}

template <class L, bool FFN>
__global__ void __launch_bounds__(L::threads, 1)
    lean_kernel(const __grid_constant__ rows_args a, const __grid_constant__ rows_smem at) {
    constexpr int R = L::rows, D = L::ahead, THREADS = L::threads, W = THREADS / 32;
    extern __shared__ uint4 x[];
    __shared__ float room[W];
    uint8_t *s = (uint8_t *)x;
    lean32 *scales = (lean32 *)(s + at.acts);
    float *part = (float *)(s + at.acts + at.scales);
    const uint8_t **pointer = (const uint8_t **)(s + at.acts + at.scales + at.part);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, b = blockIdx.x;
    const int lo = b * a.share_each + min(b, a.share_more), n = a.share_each + (b < a.share_more),
              rows = FFN ? 2 * n : n, groups = (rows + R - 1) / R, chunks = a.parts, steps = groups * chunks,
              pieces = a.cols / 32;
    auto product_of = [&](int j) -> const rows_product & {
        int m = 0;
#pragma unroll 1
        while (m + 1 < a.n_products && j >= a.product[m + 1].first) m++;
        return a.product[m];
    };
#pragma unroll 1
    for (int r = threadIdx.x; r < rows; r += THREADS) {
        const int j = FFN ? lo + r / 2 : lo + r;
        const rows_product &p = FFN ? a.product[r % 2] : product_of(j);
        pointer[r] = p.w + (size_t)(j - (FFN ? 0 : p.first)) * p.stride;
        if (p.bias) prefetch_l2(p.bias + (j - (FFN ? 0 : p.first)));
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < (groups + W) * R; i += THREADS) part[i] = 0;
    __syncthreads();
    const int first = (int)((int64_t)steps * warp / W), end = (int)((int64_t)steps * (warp + 1) / W);
    // What is loaded next: pieces 32 * next_c + lane of rows R * next_g + r.
    int next = first, next_g = first / chunks, next_c = first - next_g * chunks, left = 0;
    const uint8_t *row[R];
    auto aim = [&] {
        left = next < end ? rows - next_g * R : 0;
#pragma unroll
        for (int r = 0; r < R; r++) row[r] = pointer[min(next_g * R + r, rows - 1)];
    };
    struct {
        uint4 q[R];
        uint16_t d[R];
    } ring[D] = {};
    auto load = [&](auto &to) {
        const int k = min(32 * next_c + lane, pieces - 1); // of what lies behind a row's end, x is 0
#pragma unroll
        for (int r = 0; r < R; r++) {
            load16_if(r < left, row[r] + 16 * k, to.q[r]);
            load2_if(r < left, row[r] + (16 * pieces + 2 * k), to.d[r]);
        }
        next++;
        if (++next_c == chunks) {
            next_c = 0;
            next_g++;
            aim();
        } else if (next == end) {
            left = 0;
        }
    };
    aim();
#pragma unroll
    for (int k = 0; k < D; k++) load(ring[k]);
    const bool normed = a.norm.kind != TE_NO_NORM;
    for (int c = 32 * threadIdx.x; normed && c < a.cols; c += 32 * THREADS) prefetch_l2(a.norm.w + c);
    dep_go();
    dep_wait();
    float square = 0, scale = 1;
#pragma unroll 1
    for (int i = threadIdx.x; 8 * i < a.tile; i += THREADS) {
        float4 v[2] = {}, w[2] = {};
        if (8 * i < a.cols) {
#pragma unroll
            for (int k = 0; k < 2; k++) v[k] = __ldcg((const float4 *)a.x + 2 * i + k);
#pragma unroll
            for (int k = 0; k < 2 && normed; k++) w[k] = __ldg((const float4 *)a.norm.w + 2 * i + k);
        }
#pragma unroll
        for (int k = 0; k < 2 && normed; k++) {
            square += squares(v[k], 0, 4, 0);
            v[k] = make_float4(v[k].x * w[k].x, v[k].y * w[k].y, v[k].z * w[k].z, v[k].w * w[k].w);
        }
        put_eight(v, i, x, scales);
    }
    if (normed) {
        square = warp_sum(square);
        if (lane == 0) room[warp] = square;
    }
    __syncthreads();
    if (normed) {
        square = 0;
#pragma unroll
        for (int w = 0; w < W; w++) square += room[w];
        scale = 1.0f / sqrtf(square / (float)a.cols + a.norm.eps);
    }
    int g = first / chunks, c = first - g * chunks;
    const uint4 *x_low = x + swizzle(2 * lane), *x_high = x + swizzle(2 * lane + 1);
    float sum[R] = {};
#pragma unroll 1
    for (int i = first; i < end; i += D) {
#pragma unroll
        for (int k = 0; k < D; k++) {
            if (i + k >= end) break;
            const uint4 low = x_low[64 * c], high = x_high[64 * c];
            const lean32 of = scales[32 * c + lane];
#pragma unroll
            for (int r = 0; r < R; r++) {
                const uint4 q = ring[k].q[r];
                const int v = dot16_unsigned(and4(q, LOW << 4), high, dot16_unsigned(and4(q, LOW), low, of.less) << 4);
                sum[r] = fmaf((float)v, half_bits(ring[k].d[r]) * of.d, sum[r]);
            }
            load(ring[k]);
            if (++c < chunks && i + k + 1 < end) continue;
            const float v = warp_sums<R>(sum, lane);
            if (sum_owner<R>(lane)) part[(g + warp) * R + sum_index<R>(lane)] = v;
#pragma unroll
            for (int r = 0; r < R; r++) sum[r] = 0;
            if (c == chunks) {
                c = 0;
                g++;
            }
        }
    }
    __syncthreads();
    // Warp w left its sums of group g at g + w: the parts of a group are neighbours.
    auto sum_of = [&](int r) {
        const int g = r / R, from = ((g * chunks + 1) * W - 1) / steps, to = ((g + 1) * chunks * W - 1) / steps;
        float v = 0;
#pragma unroll 1
        for (int w = from; w <= to; w++) v += part[(g + w) * R + r % R];
        return v * scale;
    };
    if constexpr (FFN) {
        const float *bias = a.product[1].bias;
        uint32_t asked = 0, fired = 0;
#pragma unroll 1
        for (int e = threadIdx.x; e < n; e += THREADS) {
            const int j = lo + e;
            float u = sum_of(2 * e + 1);
            if (bias) u += __ldg(bias + j);
            const float h = gated_value(a.act, activate(a.act, a.threshold, sum_of(2 * e)), u);
            a.h[j] = h;
            asked++;
            fired += h != 0;
            if (a.fired && h != 0) atomicAdd(a.fired + j, 1);
        }
        if (!a.counts) return;
        for (int o = 16; o; o /= 2) {
            asked += __shfl_xor_sync(~0u, asked, o);
            fired += __shfl_xor_sync(~0u, fired, o);
        }
        if (lane || !asked) return;
        atomicAdd(a.counts, asked);
        atomicAdd(a.counts + 1, asked);
        atomicAdd(a.counts + 2, fired);
    } else {
#pragma unroll 1
        for (int r = threadIdx.x; r < n; r += THREADS) {
            const rows_product &p = product_of(lo + r);
            const int to = lo + r - p.first;
            float v = sum_of(r);
            if (p.bias) v += __ldg(p.bias + to);
            if (p.relu) v = fmaxf(v, 0);
            if (p.add) v += __ldcg(p.add + to);
            p.y[to] = v;
        }
    }
}

template <class L> static bool start(te_cuda *d, const char *name, int rows_per, rows_args *a, te_status *to) {
    a->parts = divide_up(a->cols, 32 * 32);
    a->tile = a->parts * 32 * 32;
    const int grid = a->n < d->info.n_sm ? a->n : d->info.n_sm, rows = divide_up(a->n, grid) * rows_per;
    rows_smem s = {};
    s.acts = a->tile;
    s.scales = a->tile / 32 * (int)sizeof(lean32);
    s.part = (divide_up(rows, L::rows) + L::threads / 32) * L::rows * 4;
    s.pointer = rows * 8;
    const size_t total = (size_t)s.acts + (size_t)s.scales + (size_t)s.part + (size_t)s.pointer;
    if (total + 1024 > d->smem_block) return false;
    a->share_each = a->n / grid;
    a->share_more = a->n % grid;
    *to = launch(d, name, a->ffn ? lean_kernel<L, true> : lean_kernel<L, false>, dim3((unsigned)grid), L::threads,
                 total, *a, s);
    return true;
}

// Two tokens take less time one after the other than by tensor cores; each is computed as if it were alone.
constexpr int LEAN_TOKENS = 2;

bool run_lean(te_cuda *d, const char *name, int type, int rows_per, rows_args *a, te_status *to) {
    if (type != TE_Q4_0 || a->n_tok > LEAN_TOKENS || a->select != SELECT_ALL || a->unit != 1) return false;
    if (a->publish || a->side.keep || a->side.publish) return false;
    if (a->ffn && (!a->gated || a->skip || a->gate_add || a->up_add)) return false;
    if (a->norm.kind != TE_NO_NORM && (a->norm.kind != TE_RMS_NORM || a->norm.b)) return false;
    const bool wider = a->cols > 8 * lean_usual::threads && a->cols <= 8 * lean_wider::threads;
    for (int t = 0; t < a->n_tok; t++) {
        rows_args of = *a;
        of.n_tok = 1;
        of.x += (size_t)t * a->ldx;
        for (rows_product &p : of.product) {
            if (p.y) p.y += (size_t)t * p.ldy;
            if (p.add) p.add += (size_t)t * p.ld_add;
        }
        if (of.h) of.h += (size_t)t * a->ldh;
        const bool done =
            wider ? start<lean_wider>(d, name, rows_per, &of, to) : start<lean_usual>(d, name, rows_per, &of, to);
        if (!done || *to != TE_OK) return done;
    }
    return true;
}

} // namespace te
