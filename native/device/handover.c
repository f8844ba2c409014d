/* handover.c - posting and awaiting words on the CPU. */
#include "handover.h"

#include <string.h>

#include "../../vendor/core/te_os.h"

enum { LOOKS = 64 }; /* between looks at the clock */
/* The other side needs no more than some hundred microseconds a layer; after that long it is slow or gone, and a core is
 * better given to others. */
static const int64_t spin_ns = 2000000;

bool pi_await_words(const pi_wait *w, const uint64_t *words, int64_t first, int64_t n, uint32_t seq, uint32_t *out) {
    int64_t began = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint64_t *word = words + first + i;
        uint64_t v;
        while ((uint32_t)((v = __atomic_load_n(word, __ATOMIC_ACQUIRE)) >> 32) != seq) {
            for (int k = 0; k < LOOKS && (uint32_t)(__atomic_load_n(word, __ATOMIC_RELAXED) >> 32) != seq; k++)
                te_os_relax();
            const bool cancelled = __atomic_load_n(w->cancelled, __ATOMIC_RELAXED) != 0;
            const int64_t now = te_os_now_ns();
            if (!began) began = now;
            if (cancelled || now - began > w->limit_ns) {
                __atomic_store_n(w->cancelled, 1, __ATOMIC_RELAXED);
                memset(out + i, 0, (size_t)(n - i) * sizeof *out);
                return false;
            }
            static const uint32_t never;
            if (now - began > spin_ns) te_os_wait(&never, 0, 50000);
        }
        began = 0;
        out[i] = (uint32_t)v;
    }
    return true;
}

void pi_post_words(uint64_t *words, int64_t first, int64_t n, uint32_t seq, const uint32_t *values) {
    for (int64_t i = first; i < first + n; i++)
        __atomic_store_n(words + i, pi_word(values[i - first], seq), __ATOMIC_RELEASE);
}
