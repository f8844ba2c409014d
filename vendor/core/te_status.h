/* te_status.h - how the engine reports errors: a status, and one sentence per thread that names the values.
 *
 *     if (n > limit) return te_fail(TE_ARGUMENT, "n_ctx is %d, at most %d is possible", n, limit);
 */
#ifndef TE_STATUS_H
#define TE_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum te_status {
    TE_OK = 0,
    TE_IO = 1,          /* a file cannot be opened, read or mapped */
    TE_FORMAT = 2,      /* a file is not what it must be */
    TE_ARGUMENT = 3,    /* a caller's value is out of range */
    TE_MEMORY = 4,      /* an allocation failed */
    TE_UNSUPPORTED = 5, /* valid, but not implemented here: the sentence names it */
    TE_CONTEXT = 6,     /* no room for more positions */
    TE_DEVICE = 7,      /* a device, or its driver, failed */
    TE_TIMEOUT = 8,     /* a device did not answer in time */
} te_status;

/* Stores the sentence for this thread (cut at 1023 bytes) and returns status. Never fails. */
te_status te_fail(te_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3), cold))
#endif
    ;

/* In this form a caller's compiler and analyser see that te_fail returns the status it is given, and do not follow
 * paths on which a failure looks like TE_OK. The status is evaluated twice. */
static inline te_status te_status_same(te_status status) { return status; }
#define te_fail(status, ...) te_status_same((te_fail(status, __VA_ARGS__), (status)))

/* The sentence of this thread's last failure; "" if there was none. Valid until the thread's next failure. */
const char *te_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
