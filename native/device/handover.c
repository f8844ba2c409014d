/* handover.c - posting and awaiting words on the CPU. */
#include "handover.h"

#include <string.h>

#include "../../vendor/core/te_os.h"

enum { LOOKS = 64 }; /* between looks at the clock */
/* The other side needs no more than some hundred microseconds a layer; after that long it is slow or gone, and a core is
 * better given to others. */
static const int64_t spin_ns = 2000000, look_ns = 20000000;

static uint64_t look(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

/* Until the word carries the ticket. */
static pi_awaited await_word(const pi_wait *w, const uint64_t *word, uint32_t ticket) {
    int64_t began = 0, looked = 0;
    for (;;) {
        for (int k = 0; k < LOOKS; k++) {
            if ((uint32_t)(look(word) >> 32) == ticket) return PI_GOT;
            te_os_relax();
        }
        if (__atomic_load_n(w->cancelled, __ATOMIC_RELAXED)) return PI_CANCELLED;
        const int64_t now = te_os_now_ns();
        if (!began) began = looked = now;
        if (now - began > w->limit_ns) {
            __atomic_store_n(w->cancelled, 1, __ATOMIC_RELAXED);
            return PI_LATE;
        }
        if (w->look && now - looked > look_ns) {
            looked = now;
            w->look(w->ctx);
        }
        static const uint32_t never;
        if (now - began > spin_ns)
            te_os_wait(&never, 0, 50000);
        else if (now - began > PI_YIELD_NS)
            te_os_yield();
    }
}

/* How many of the first n words, in whole groups, carry the ticket already; their low halves to out. */
static int64_t take_ready(const uint64_t *words, int64_t n, uint32_t ticket, uint32_t *out) {
    enum { GROUP = 8 };
    int64_t i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        uint64_t v[GROUP], other = 0;
        for (int k = 0; k < GROUP; k++) {
            v[k] = look(words + i + k);
            other |= v[k] >> 32 ^ ticket;
        }
        if (other) break;
        for (int k = 0; k < GROUP; k++) out[i + k] = (uint32_t)v[k];
    }
    return i;
}

pi_awaited pi_await_words(const pi_wait *w, const uint64_t *words, int64_t first, int64_t n, uint32_t ticket,
                          uint32_t *out) {
    words += first;
    for (int64_t i = 0; i < n; i++) {
        i += take_ready(words + i, n - i, ticket, out + i);
        if (i == n) break;
        uint64_t v = look(words + i);
        if ((uint32_t)(v >> 32) != ticket) {
            const pi_awaited ended = await_word(w, words + i, ticket);
            if (ended != PI_GOT) {
                memset(out + i, 0, (size_t)(n - i) * sizeof *out);
                return ended;
            }
            v = look(words + i);
        }
        out[i] = (uint32_t)v;
    }
    return PI_GOT;
}

bool pi_has_words(const uint64_t *words, int64_t n, uint32_t ticket, uint32_t *out) {
    for (int64_t i = 0; i < n; i++) {
        const uint64_t v = look(words + i);
        if ((uint32_t)(v >> 32) != ticket) return false;
        if (out) out[i] = (uint32_t)v;
    }
    return true;
}

void pi_publish_words(uint64_t *words, int64_t first, int64_t n, uint32_t ticket, const uint32_t *values) {
    for (int64_t i = first; i < first + n; i++)
        __atomic_store_n(words + i, pi_word(values[i - first], ticket), __ATOMIC_RELEASE);
}
