// prompt_multiply.cuh - attention of prompts by wgmma: four warps multiply 64 rows, and read K and V where they are in shared
// memory, once for all of these (prefill_attention.cu). For what is compiled for Hopper alone (sm_90a).
//
// There a matrix lies in panels of 64 columns, lines of 128 bytes, whose eighths change places with each of eight lines;
// panels begin at multiples of 1024 bytes.
#ifndef TE_CUDA_PROMPT_MULTIPLY_CUH
#define TE_CUDA_PROMPT_MULTIPLY_CUH

#include "wide_multiply.cuh"

namespace te {

constexpr int PANEL = 64; // columns
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HAS_PANELS = true;
#else
constexpr bool HAS_PANELS = false;
#endif
// Where eight values of a row stand, in a matrix of so many rows.
__device__ __forceinline__ int panel_place(int rows, int row, int unit) {
    return (unit / 8 * rows + row) * PANEL + (unit % 8 ^ (row & 7)) * 8;
}

// The same for multiplications by one warp: no two of eight rows in one bank.
template <int D> __device__ __forceinline__ int place_of(int row, int unit) { return row * D + (unit ^ (row & 7)) * 8; }
template <int D, bool PANELS> __device__ __forceinline__ int place_in(int rows, int row, int unit) {
    return PANELS ? panel_place(rows, row, unit) : place_of<D>(row, unit);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// How wgmma finds lines from this address on.
__device__ __forceinline__ uint64_t panel_descriptor(uint32_t address) {
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
// d += A * B of 64 rows, 16 columns and 64 results of a row: both in shared memory, of B 64 lines;
__device__ __forceinline__ void multiply_lines(float (*d)[4], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WIDE_SUMS_8 "}, %32, %33, 1, 1, 1, 0, 0;"
                 : WIDE_TILES_8
                 : "l"(a), "l"(b));
}
// A in registers, of B 16 lines, each of them a factor of all 64 results.
__device__ __forceinline__ void multiply_across(float (*d)[4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WIDE_SUMS_8
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : WIDE_TILES_8
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Nothing moves from one side of this to the other that reads or writes these sums.
template <int N> __device__ __forceinline__ void keep_sums(float (&d)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) asm volatile("" : "+f"(d[j][c])::"memory");
}
#endif

// What threads wrote to shared memory is seen by multiplications behind the next barrier.
__device__ __forceinline__ void written_for_multiply() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// s = rows * K: 64 rows of `rows_q` of D columns from q on, and 64 of K.
template <int D> __device__ __forceinline__ void panel_scores(float (&s)[8][4], uint32_t q, int rows_q, uint32_t k) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    keep_sums(s);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        multiply_lines(s, panel_descriptor(q + (uint32_t)(i / 4 * rows_q * 2 * PANEL + i % 4 * 32)),
                       panel_descriptor(k + (uint32_t)(i / 4 * 64 * 2 * PANEL + i % 4 * 32)));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    group_settle<0>();
    keep_sums(s);
#endif
}
// out += weights * V, of 64 positions.
template <int D> __device__ __forceinline__ void panel_values(float (&out)[D / 8][4], uint32_t (&w)[4][4], uint32_t v) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+r"(w[i][e])::"memory");
    keep_sums(out);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int p = 0; p < D / PANEL; p++)
            multiply_across(out + 8 * p, w[i], panel_descriptor(v + (uint32_t)((p * 64 + 16 * i) * 2 * PANEL)));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    group_settle<0>();
    keep_sums(out);
#endif
}

} // namespace te
#endif
