// wide_copies.cuh - copies in bulk into shared memory, and the barriers that say when they are there and when nobody needs
// them any more. From compute capability 9.0 on.
#ifndef TE_CUDA_WIDE_COPIES_CUH
#define TE_CUDA_WIDE_COPIES_CUH

#include "gemm_mma.cuh"
#include "launch.h"

namespace te {

struct alignas(128) ring_map { // where a matrix is, as the hardware's copies take it
    uint64_t word[16];
};
// Of rows of `cols` numbers of a type (the driver's) from `at` on, a copy takes a box. wide_ring.cu
enum { MAP_BYTES = 0, MAP_F16 = 6 };
te_status map_box(te_cuda *d, const void *at, int type, int cols, int rows, size_t stride, int box_cols, int box_rows,
                  ring_map *out);
bool has_maps(); // the driver is new enough

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void bar_init(uint64_t *b, int n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(n) : "memory");
}
__device__ __forceinline__ void bars_ready() { // for copies and other blocks
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void bar_arrive(uint64_t *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// Arrives; the barrier then waits for so many bytes, too.
__device__ __forceinline__ void bar_expect(uint64_t *b, int n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(n_bytes)
                 : "memory");
}
__device__ __forceinline__ void bar_wait(uint64_t *b, int parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(shared_address(b)),
                 "r"(parity)
                 : "memory");
}
__device__ __forceinline__ void bulk_copy(void *to, const void *from, int n_bytes, uint64_t *b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(n_bytes), "r"(shared_address(b))
                 : "memory");
}
// A box of a matrix from column c and row r on, which L2 need not keep. Behind the matrix are zeros.
__device__ __forceinline__ void ring_copy_rows(uint32_t to, const ring_map *m, int c, int r, uint64_t *b) {
    constexpr uint64_t READ_ONCE = 0x12F0000000000000;
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(m), "r"(c), "r"(r), "r"(shared_address(b)), "l"(READ_ONCE)
                 : "memory");
}
// cluster_arrive where others read shared memory alone: what goes to the device's memory is not waited for, which takes longer.
__device__ __forceinline__ void cluster_share() {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208 // older compilers have no such fence
    asm volatile("fence.release.sync_restrict::shared::cta.cluster;\n"
                 "barrier.cluster.arrive.relaxed;" ::
                     : "memory");
#else
    cluster_arrive();
#endif
}
// cluster_arrive of threads that have used what they read of others' memory, before these may end. What threads have written
// to the device's memory need not be seen yet: that takes as long as a barrier.
__device__ __forceinline__ void cluster_leave() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
#endif

} // namespace te
#endif
