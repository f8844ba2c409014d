// words.cuh - the device's side of the hand-over with the CPU: words that carry a value and a number (te_ticket).
//
// A word is its own flag: it is stored and loaded whole, and nothing else is ordered by it.
#ifndef TE_CUDA_WORDS_CUH
#define TE_CUDA_WORDS_CUH

#include "te_cuda.h"
#include "tools.cuh"

namespace te {

// The base is advanced by a kernel in front: after dep_wait() only.
__device__ __forceinline__ uint32_t ticket_number(const te_ticket &s) { return __ldcg(s.base) + s.add; }
__device__ __forceinline__ void store_word(uint64_t *p, uint32_t value, uint32_t number) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"((uint64_t)number << 32 | value) : "memory");
}
__device__ __forceinline__ uint64_t load_word(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// The value of a word, of which `word` was seen last, once it carries the number; 0 after limit_ns, which sets
// *cancelled, or where that is set. *cancelled is one line of host memory for thousands of threads, whose reads queue up
// for 100 us: no wait that ends well reads it.
__device__ __forceinline__ uint32_t await_word(const uint64_t *p, uint64_t word, uint32_t number, uint32_t *cancelled,
                                               uint64_t limit_ns) {
    constexpr uint64_t patience_ns = 2000000;
    uint64_t began = 0, look = 0;
    for (uint32_t turn = 1; (uint32_t)(word >> 32) != number; turn++) {
        word = load_word(p);
        if (turn % 64) continue;
        const uint64_t now = now_ns();
        if (!began) look = (began = now) + patience_ns;
        if (now < look && now - began <= limit_ns) continue;
        look = now + patience_ns;
        if (*(volatile uint32_t *)cancelled || now - began > limit_ns) {
            *(volatile uint32_t *)cancelled = 1;
            return 0;
        }
    }
    return (uint32_t)word;
}

} // namespace te
#endif
