/* handover.h - how two sides that compute together pass values: in shared memory, each 64-bit word holding 32 bits and
 * the number of the hand-over they belong to, so that a value is its own flag. A word is written once per hand-over, in
 * one store; who reads waits for the number. Numbers count up and are compared for equality only.
 *
 * Marks. A device scores n rows in n_parts parts; part p posts rows [n p / n_parts, n (p+1) / n_parts), 32 to a word,
 * each part beginning a word of its own. */
#ifndef PI_HANDOVER_H
#define PI_HANDOVER_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define PI_BOTH static inline __host__ __device__
#else
#define PI_BOTH static inline
#endif

PI_BOTH int32_t pi_part_begin(int32_t n, int32_t part, int32_t n_parts) {
    return (int32_t)((int64_t)n * part / n_parts);
}
PI_BOTH int32_t pi_part_words(int32_t n, int32_t n_parts) { return ((n + n_parts - 1) / n_parts + 31) / 32; }
PI_BOTH int32_t pi_mark_words(int32_t n, int32_t n_parts) { return pi_part_words(n, n_parts) * n_parts; }
PI_BOTH uint64_t pi_word(uint32_t value, uint32_t ticket) { return (uint64_t)ticket << 32 | value; }

/* One side's wait: bounded, and ended by a flag that either side sets. */
typedef struct pi_wait {
    uint32_t *cancelled; /* in shared memory */
    int64_t limit_ns;
    void (*look)(void *ctx); /* called now and then in a long wait: may set *cancelled. Or NULL */
    void *ctx;
} pi_wait;

typedef enum pi_awaited { PI_GOT = 0, PI_CANCELLED = 1, PI_LATE = 2 } pi_awaited;
/* Words first..first+n-1 once they carry the ticket: their low halves to out. Not PI_GOT: the wait was cancelled, or took too
 * long, which cancels it for all; out is filled with zeros from there on. */
pi_awaited pi_await_words(const pi_wait *w, const uint64_t *words, int64_t first, int64_t n, uint32_t ticket,
                          uint32_t *out);
/* After so long somebody is late: perhaps one who waits for this very core, which spinning would keep from him. With one
 * program more than cores steps took 75 ms so, and 16 where waiting threads yielded after 0.2 ms. */
enum { PI_YIELD_NS = 100000 };
/* Whether the first n words carry the ticket already; their low halves to out, where it is not NULL. Does not wait. */
bool pi_has_words(const uint64_t *words, int64_t n, uint32_t ticket, uint32_t *out);
/* Posts n values. */
void pi_publish_words(uint64_t *words, int64_t first, int64_t n, uint32_t ticket, const uint32_t *values);

#endif
