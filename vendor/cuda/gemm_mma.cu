// gemm_mma.cu - products of F16 matrices on tensor cores, for machines without cuBLASLt.
//
// A block computes BM tokens x BN outputs, eight warps as 2 x 4. Slices of 64 values of both matrices pass through shared
// memory, several in flight. Rows of a slice are swizzled in units of 16 bytes, so that the eight rows that a matrix load
// touches lie in different banks.
#include "gemm_mma.cuh"
#include "prefill.cuh"

namespace te {

constexpr int MMA_THREADS = 256, SLICE = 64, SLICE_UNITS = SLICE / 8;

// STAGES: slices in shared memory.
template <int BM, int BN, int STAGES, bool TRANSPOSED>
__global__ void __launch_bounds__(MMA_THREADS) mma_kernel(const __grid_constant__ half_product p) {
    constexpr int WM = BM / 2, WN = BN / 4, TM = WM / 16, TN = WN / 8, STAGE = (BM + BN) * SLICE;
    extern __shared__ uint4 shared[];
    uint16_t *const base = (uint16_t *)shared;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, wm = warp / 4 * WM, wn = warp % 4 * WN;
    const int t0 = blockIdx.x * BM, r0 = blockIdx.y * BN;
    // Where unit c (8 values) of row r of a slice lies: rows of 8 units, or of BN / 8 for a transposed w.
    auto narrow = [](int r, int c) { return r * SLICE + (c ^ (r & 7)) * 8; };
    auto wide = [](int k, int c) { return k * BN + (c ^ (k & 7)) * 8; };
    auto fetch = [&](int slice) {
        uint16_t *x = base + slice % STAGES * STAGE, *w = x + BM * SLICE;
        const int k0 = slice * SLICE;
#pragma unroll
        for (int i = 0; i < BM * SLICE_UNITS / MMA_THREADS; i++) {
            const int e = tid + i * MMA_THREADS, r = e / SLICE_UNITS, c = e % SLICE_UNITS, t = t0 + r, k = k0 + 8 * c;
            const bool there = t < p.n_tok && k < p.k;
            fetch16(x + narrow(r, c), there ? p.x + (size_t)t * p.ldx + k : p.x, there);
        }
#pragma unroll
        for (int i = 0; i < BN * SLICE_UNITS / MMA_THREADS; i++) {
            const int e = tid + i * MMA_THREADS;
            if (TRANSPOSED) {
                const int r = e / (BN / 8), c = e % (BN / 8), k = k0 + r, n = r0 + 8 * c;
                const bool there = k < p.k && n < p.n_out;
                fetch16(w + wide(r, c), there ? p.w + (size_t)k * p.ldw + n : p.w, there);
            } else {
                const int r = e / SLICE_UNITS, c = e % SLICE_UNITS, n = r0 + r, k = k0 + 8 * c;
                const bool there = n < p.n_out && k < p.k;
                fetch16(w + narrow(r, c), there ? p.w + (size_t)n * p.ldw + k : p.w, there);
            }
        }
    };
    dep_go();
    dep_wait();
    const int n_slices = (p.k + SLICE - 1) / SLICE;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < n_slices) fetch(s);
        fetches_end();
    }
    float sum[TM][TN][4] = {};
    for (int s = 0; s < n_slices; s++) {
        fetches_wait<STAGES - 2>();
        __syncthreads();
        if (s + STAGES - 1 < n_slices) fetch(s + STAGES - 1);
        fetches_end();
        const uint16_t *x = base + s % STAGES * STAGE, *w = x + BM * SLICE;
#pragma unroll
        for (int kk = 0; kk < SLICE / 16; kk++) {
            uint32_t a[TM][4];
#pragma unroll
            for (int i = 0; i < TM; i++) matrices(a[i], x + narrow(wm + 16 * i + lane % 16, 2 * kk + lane / 16));
#pragma unroll
            for (int j = 0; j < TN / 2; j++) {
                uint32_t b[4];
                if (TRANSPOSED)
                    matrices_transposed(b, w + wide(16 * kk + lane % 16, (wn + 16 * j) / 8 + lane / 16));
                else
                    matrices(b, w + narrow(wn + 16 * j + lane % 8 + lane / 16 * 8, 2 * kk + lane / 8 % 2));
#pragma unroll
                for (int i = 0; i < TM; i++) {
                    multiply_add(sum[i][2 * j], a[i], b[0], b[1]);
                    multiply_add(sum[i][2 * j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }
    const float scale = __ldcg(p.scale);
#pragma unroll
    for (int j = 0; j < TN; j++) {
        const int r = r0 + wn + 8 * j + lane % 4 * 2;
        const float b0 = p.bias && r < p.n_out ? __ldg(p.bias + r) : 0,
                    b1 = p.bias && r + 1 < p.n_out ? __ldg(p.bias + r + 1) : 0;
#pragma unroll
        for (int i = 0; i < TM; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int t = t0 + wm + 16 * i + 8 * h + lane / 4;
                if (t >= p.n_tok || r >= p.n_out) continue;
                float2 v = make_float2(fmaf(scale, sum[i][j][2 * h], b0), fmaf(scale, sum[i][j][2 * h + 1], b1));
                if (p.relu) v = make_float2(fmaxf(v.x, 0), fmaxf(v.y, 0));
                float *y = p.y + (size_t)t * p.ldy + r;
                const float *add = p.add ? p.add + (size_t)t * p.ld_add + r : nullptr;
                if (r + 1 < p.n_out) {
                    if (add) {
                        const float2 o = __ldcg((const float2 *)add);
                        v = make_float2(v.x + o.x, v.y + o.y);
                    }
                    *(float2 *)y = v;
                } else {
                    *y = add ? v.x + __ldcg(add) : v.x;
                }
            }
    }
}

struct mma_variant {
    int bm, bn;
    double speed;
    size_t smem;
    void (*kernel[2])(half_product);
};
template <int BM, int BN, int STAGES> constexpr mma_variant variant_of(double speed) {
    return {BM,
            BN,
            speed,
            sizeof(uint16_t) * STAGES * (BM + BN) * SLICE,
            {mma_kernel<BM, BN, STAGES, false>, mma_kernel<BM, BN, STAGES, true>}};
}
// Those with fewer stages are for devices with less shared memory.
static const mma_variant variants[] = {variant_of<128, 256, 3>(1.0), variant_of<128, 256, 2>(0.8),
                                       variant_of<128, 128, 3>(0.8), variant_of<128, 128, 2>(0.65),
                                       variant_of<64, 64, 4>(0.85),  variant_of<64, 64, 2>(0.7)};

te_status multiply(te_cuda *d, const half_product *p) {
    const mma_variant *best = nullptr;
    double least = 0;
    for (const mma_variant &v : variants) { // as many outputs as the busiest multiprocessor has
        const int64_t blocks = (int64_t)divide_up(p->n_tok, v.bm) * divide_up(p->n_out, v.bn);
        const double time = (double)divide_up(blocks, d->info.n_sm) * v.bm * v.bn / v.speed;
        if (v.smem > d->smem_block || (best && time >= least)) continue;
        best = &v;
        least = time;
    }
    return launch(d, "gemm", best->kernel[p->transposed],
                  dim3((unsigned)divide_up(p->n_tok, best->bm), (unsigned)divide_up(p->n_out, best->bn)), MMA_THREADS,
                  best->smem, *p);
}

} // namespace te
