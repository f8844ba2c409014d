// tools.cuh - what all kernels use: the order of kernels in a stream, loads, sums over a warp, 16-bit floats.
//
// Programmatic dependent launch: a kernel may start while its predecessor drains. Before dep_wait() it may only touch
// weights (attention what `early` allows, te_cuda.h); every block of every kernel calls dep_wait(), so that completion is
// transitive. dep_go() lets the successor start.
// Below compute capability 9.0 both are nothing and kernels simply follow each other.
#ifndef TE_CUDA_TOOLS_CUH
#define TE_CUDA_TOOLS_CUH

#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace te {

__device__ __forceinline__ void dep_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void dep_go() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Weights pass through once: they are not kept in L1.
__device__ __forceinline__ uint4 load16(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load8(const void *p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ uint32_t load4(const void *p) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
// Scales: neighbouring lanes read the same sectors, so these stay in L1.
__device__ __forceinline__ uint16_t load2(const void *p) { return __ldg((const unsigned short *)p); }
__device__ __forceinline__ void prefetch_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Bytes (a multiple of 16) on their way to L2; nothing where the device has no such copies.
__device__ __forceinline__ void prefetch_bytes(const void *p, size_t n) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"((unsigned)n) : "memory");
#else
    (void)p;
    (void)n;
#endif
}

// Clusters: blocks that see each other's shared memory. Below compute capability 9.0 every block is alone.
__device__ __forceinline__ int cluster_size() {
    int n = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
#endif
    return n;
}
__device__ __forceinline__ int cluster_rank() {
    int n = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n));
#endif
    return n;
}
// What the blocks of a cluster wrote to their shared memory before cluster_arrive is seen behind cluster_wait; a block
// whose memory others read waits once more before it ends. Alone, the block's threads meet.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
    __syncthreads();
#endif
}
// *p of the cluster's block number `rank`; p: shared.
__device__ __forceinline__ uint32_t cluster_load(const void *p, int rank) {
#if __CUDA_ARCH__ >= 900
    uint32_t at, v;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((uint32_t)__cvta_generic_to_shared(p)), "r"(rank));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
#else
    (void)rank;
    return *(const uint32_t *)p;
#endif
}

__device__ __forceinline__ float half_bits(uint16_t h) { return __half2float(__ushort_as_half(h)); }
__device__ __forceinline__ float2 half2_bits(uint32_t v) { return __half22float2(*reinterpret_cast<__half2 *>(&v)); }
__device__ __forceinline__ uint32_t half2_of(float x, float y) {
    const __half2 h = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t *>(&h);
}
__device__ __forceinline__ float2 bf162_bits(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

// Sums N values (1, 4, 8 or 16) over a warp: the sum of s[sum_index<N>(lane)] is the return value.
// Halving the values while lanes are folded takes fewer exchanges than N sums. LANES: over groups of that many lanes.
template <int N, int LANES = 32> __device__ __forceinline__ float warp_sums(float (&s)[N], int lane) {
    int width = N;
    int o = LANES / 2;
#pragma unroll
    for (; width > 1; width /= 2, o /= 2) {
        const bool upper = lane & o;
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            if (i < width / 2) {
                const float give = upper ? s[i] : s[i + width / 2], keep = upper ? s[i + width / 2] : s[i];
                s[i] = keep + __shfl_xor_sync(~0u, give, o);
            }
    }
    float v = s[0];
#pragma unroll
    for (; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
// Which value a lane's result of warp_sums belongs to, and whether this lane is the one that stores it.
template <int N, int LANES = 32> __device__ __forceinline__ int sum_index(int lane) {
    return lane % LANES / (LANES / N);
}
template <int N, int LANES = 32> __device__ __forceinline__ bool sum_owner(int lane) {
    return (lane & (LANES / N - 1)) == 0;
}

// *counter + 1, or 0 behind `last`; the old value is returned. What the block wrote before is seen by who counts later.
__device__ __forceinline__ unsigned count_block(uint32_t *counter, unsigned last) {
    unsigned old;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(last) : "memory");
    return old;
}

// Ascending places for the threads of a block that have `on` set, behind *n of them; all threads call it.
// warps: shared, one word per warp.
__device__ __forceinline__ int ordered_place(bool on, int *n, int *warps) {
    const int warp = threadIdx.x / 32, n_warps = (blockDim.x + 31) / 32;
    const unsigned vote = __ballot_sync(~0u, on);
    if (threadIdx.x % 32 == 0) warps[warp] = __popc(vote);
    __syncthreads();
    int before = *n, total = 0;
    for (int w = 0; w < n_warps; w++) {
        if (w < warp) before += warps[w];
        total += warps[w];
    }
    __syncthreads();
    *n += total;
    return before + __popc(vote & ((1u << (threadIdx.x % 32)) - 1));
}

} // namespace te
#endif
