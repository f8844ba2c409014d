// wide_multiply.cuh - 64 rows of four warps times eight columns a lane of all tokens, which are in shared memory: wgmma, for
// kernels that are compiled for Hopper alone (sm_90a).
//
// Of a tile of eight tokens that is 512 bytes: four matrices of 8 x 8 F16, with a row for each token. A lane's eight weights
// of a row are in four words; word j multiplies with matrix j, where lane q of four has word q of each row (wide_place).
#ifndef TE_CUDA_WIDE_MULTIPLY_CUH
#define TE_CUDA_WIDE_MULTIPLY_CUH

#include "gemm_mma.cuh"

namespace te {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// How wgmma finds the tokens' values: 128 bytes to the matrix of the next columns, 512 to that of the next tokens.
__device__ __forceinline__ uint64_t wide_descriptor(uint32_t address) {
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(128 >> 4) << 16 | (uint64_t)(512 >> 4) << 32;
}
#define WIDE_SUMS_2   "%0, %1, %2, %3, %4, %5, %6, %7"
#define WIDE_SUMS_3   WIDE_SUMS_2 ", %8, %9, %10, %11"
#define WIDE_SUMS_4   WIDE_SUMS_3 ", %12, %13, %14, %15"
#define WIDE_SUMS_5   WIDE_SUMS_4 ", %16, %17, %18, %19"
#define WIDE_SUMS_6   WIDE_SUMS_5 ", %20, %21, %22, %23"
#define WIDE_SUMS_7   WIDE_SUMS_6 ", %24, %25, %26, %27"
#define WIDE_SUMS_8   WIDE_SUMS_7 ", %28, %29, %30, %31"
#define WIDE_SUMS_9   WIDE_SUMS_8 ", %32, %33, %34, %35"
#define WIDE_SUMS_10  WIDE_SUMS_9 ", %36, %37, %38, %39"
#define WIDE_SUMS_11  WIDE_SUMS_10 ", %40, %41, %42, %43"
#define WIDE_SUMS_12  WIDE_SUMS_11 ", %44, %45, %46, %47"
#define WIDE_SUMS_13  WIDE_SUMS_12 ", %48, %49, %50, %51"
#define WIDE_SUMS_14  WIDE_SUMS_13 ", %52, %53, %54, %55"
#define WIDE_SUMS_15  WIDE_SUMS_14 ", %56, %57, %58, %59"
#define WIDE_SUMS_16  WIDE_SUMS_15 ", %60, %61, %62, %63"
#define WIDE_TILE(t)  "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
#define WIDE_TILES_2  WIDE_TILE(0), WIDE_TILE(1)
#define WIDE_TILES_3  WIDE_TILES_2, WIDE_TILE(2)
#define WIDE_TILES_4  WIDE_TILES_3, WIDE_TILE(3)
#define WIDE_TILES_5  WIDE_TILES_4, WIDE_TILE(4)
#define WIDE_TILES_6  WIDE_TILES_5, WIDE_TILE(5)
#define WIDE_TILES_7  WIDE_TILES_6, WIDE_TILE(6)
#define WIDE_TILES_8  WIDE_TILES_7, WIDE_TILE(7)
#define WIDE_TILES_9  WIDE_TILES_8, WIDE_TILE(8)
#define WIDE_TILES_10 WIDE_TILES_9, WIDE_TILE(9)
#define WIDE_TILES_11 WIDE_TILES_10, WIDE_TILE(10)
#define WIDE_TILES_12 WIDE_TILES_11, WIDE_TILE(11)
#define WIDE_TILES_13 WIDE_TILES_12, WIDE_TILE(12)
#define WIDE_TILES_14 WIDE_TILES_13, WIDE_TILE(13)
#define WIDE_TILES_15 WIDE_TILES_14, WIDE_TILE(14)
#define WIDE_TILES_16 WIDE_TILES_15, WIDE_TILE(15)
// d += A * B; operands a to a + 4: those of A and the descriptor of B.
#define WIDE_WGMMA(tiles, tokens, a0, a1, a2, a3, b)                                                                   \
    __device__ __forceinline__ void wide_wgmma(float (&d)[tiles][4], const uint32_t (&a)[4], uint64_t at) {            \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32.f16.f16 {" WIDE_SUMS_##tiles                 \
                     "}, "                                                                                             \
                     "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", 1, 1, 1, 0;"                                  \
                     : WIDE_TILES_##tiles                                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(at));                                           \
    }
WIDE_WGMMA(2, 16, 8, 9, 10, 11, 12)
WIDE_WGMMA(3, 24, 12, 13, 14, 15, 16)
WIDE_WGMMA(4, 32, 16, 17, 18, 19, 20)
WIDE_WGMMA(5, 40, 20, 21, 22, 23, 24)
WIDE_WGMMA(6, 48, 24, 25, 26, 27, 28)
WIDE_WGMMA(7, 56, 28, 29, 30, 31, 32)
WIDE_WGMMA(8, 64, 32, 33, 34, 35, 36)
WIDE_WGMMA(9, 72, 36, 37, 38, 39, 40)
WIDE_WGMMA(10, 80, 40, 41, 42, 43, 44)
WIDE_WGMMA(11, 88, 44, 45, 46, 47, 48)
WIDE_WGMMA(12, 96, 48, 49, 50, 51, 52)
WIDE_WGMMA(13, 104, 52, 53, 54, 55, 56)
WIDE_WGMMA(14, 112, 56, 57, 58, 59, 60)
WIDE_WGMMA(15, 120, 60, 61, 62, 63, 64)
WIDE_WGMMA(16, 128, 64, 65, 66, 67, 68)
// Of wide_many.cuh.
#define WIDE_SUMS_17  WIDE_SUMS_16 ", %64, %65, %66, %67"
#define WIDE_SUMS_18  WIDE_SUMS_17 ", %68, %69, %70, %71"
#define WIDE_SUMS_20  WIDE_SUMS_18 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WIDE_SUMS_22  WIDE_SUMS_20 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WIDE_SUMS_24  WIDE_SUMS_22 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WIDE_TILES_17 WIDE_TILES_16, WIDE_TILE(16)
#define WIDE_TILES_18 WIDE_TILES_17, WIDE_TILE(17)
#define WIDE_TILES_20 WIDE_TILES_18, WIDE_TILE(18), WIDE_TILE(19)
#define WIDE_TILES_22 WIDE_TILES_20, WIDE_TILE(20), WIDE_TILE(21)
#define WIDE_TILES_24 WIDE_TILES_22, WIDE_TILE(22), WIDE_TILE(23)
WIDE_WGMMA(17, 136, 68, 69, 70, 71, 72)
WIDE_WGMMA(18, 144, 72, 73, 74, 75, 76)
WIDE_WGMMA(20, 160, 80, 81, 82, 83, 84)
WIDE_WGMMA(22, 176, 88, 89, 90, 91, 92)
WIDE_WGMMA(24, 192, 96, 97, 98, 99, 100)
#endif

// sum += the rows' weights (of two units, row g and row g + 8 each) times the tokens' values that descriptor `at` names. Sums
// and weights may not be touched before group_settle.
template <int TILES>
__device__ __forceinline__ void group_multiply(float (&sum)[TILES][4], const uint4 (&w)[2][2], uint64_t at) {
    uint32_t a[4][4] = {{w[0][0].x, w[0][1].x, w[0][0].y, w[0][1].y},
                        {w[0][0].z, w[0][1].z, w[0][0].w, w[0][1].w},
                        {w[1][0].x, w[1][1].x, w[1][0].y, w[1][1].y},
                        {w[1][0].z, w[1][1].z, w[1][0].w, w[1][1].w}};
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
    for (int i = 0; i < 4; i++) // made in front of the fence
#pragma unroll
        for (int r = 0; r < 4; r++) asm volatile("" : "+r"(a[i][r])::"memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4; i++) wide_wgmma(sum, a[i], at + (uint64_t)((i / 2 * TILES * 512 + i % 2 * 256) >> 4));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// All multiplications but the last N are done.
template <int N> __device__ __forceinline__ void group_settle() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}

} // namespace te
#endif
