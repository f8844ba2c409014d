/* common.h - what every file of native/ needs: statuses, reference counts, checked sizes, the smaller and the larger. */
#ifndef PI_COMMON_H
#define PI_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../vendor/core/te_status.h"
#include "powerinfer.h"

/* pi_status and te_status share their numbers (asserted in api.c), so that an error travels up unchanged. */
#define PI_TRY(expr)                                                                                                   \
    do {                                                                                                               \
        const int pi_try_ = (int)(expr);                                                                               \
        if (pi_try_ != PI_OK) return (pi_status)pi_try_;                                                               \
    } while (0)
#define PI_FAIL(status, ...) ((pi_status)te_fail((te_status)(status), __VA_ARGS__))

typedef struct pi_ref {
    int32_t n;
} pi_ref;
static inline void pi_ref_take(pi_ref *r) { __atomic_add_fetch(&r->n, 1, __ATOMIC_RELAXED); }
/* True when the last reference was given back: the caller frees the object. */
static inline bool pi_ref_drop(pi_ref *r) { return __atomic_sub_fetch(&r->n, 1, __ATOMIC_ACQ_REL) == 0; }

/* a * b, or SIZE_MAX when that overflows (an allocation of SIZE_MAX bytes fails cleanly). */
static inline size_t pi_mul(size_t a, size_t b) {
    size_t r;
    return __builtin_mul_overflow(a, b, &r) ? SIZE_MAX : r;
}
static inline size_t pi_add(size_t a, size_t b) {
    size_t r;
    return __builtin_add_overflow(a, b, &r) ? SIZE_MAX : r;
}

static inline int32_t pi_min_i32(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t pi_max_i32(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int64_t pi_min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t pi_max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline uint64_t pi_max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

#endif
