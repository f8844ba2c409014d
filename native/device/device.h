/* device.h - what computes a part of a model beside the CPU: memory of its own, and operations that run on it in order.
 *
 * Two kinds: "cuda", a library of its own that is opened when there is a driver, and "host", a stand-in of ordinary
 * memory and one thread that obeys the same budget and hand-over, for tests on machines without a GPU.
 *
 * A step's work on a device is a program: a function that calls operations in order. Where it is launched again with
 * the same key, it must make the same calls with the same arguments (cuda records them once, as a graph), so whatever
 * changes from step to step lies in device memory or in shared memory. Pointers marked D are device memory, S shared
 * memory (host memory that both sides see), H host memory.
 *
 * Operations return nothing; the first error sticks, later operations do nothing, and finish reports it. */
#ifndef PI_DEVICE_H
#define PI_DEVICE_H

#include <stdbool.h>

#include "../../vendor/core/te_device_ops.h"
#include "../powerinfer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PI_DEVICE_VERSION = 22,
    PI_FETCHES = 32,
    PI_LARGEST = 128, /* logits of a row that are found, at most */
    PI_MIXED = 8      /* kept programs of prompts and of sequences' next tokens: 2 MiB each of a plan's overhead */
};
/* In the keys of these. */
static const uint64_t PI_KEY_MIXED = UINT64_C(1) << 63;

/* Every device begins with this. */
typedef struct pi_device {
    const struct pi_device_ops *ops;
    uint32_t *cancelled; /* S. Not 0: waits of programs and of the CPU end at once; see pi_wait. An error sets it */
    int64_t wait_ns;     /* how long a program waits for the CPU at most; 0: a minute. Set before the first launch */
} pi_device;
typedef void pi_device_program(void *ctx, pi_device *dev);

typedef struct pi_device_info {
    char name[128];
    uint64_t memory_bytes, free_bytes; /* of the device, or of the stand-in's budget */
    uint64_t used_bytes;               /* by this pi_device */
    int32_t n_parts;                   /* in how many parts marks are published; see handover.h */
    int32_t max_decode;                /* tokens that a program may exchange with the CPU within a layer */
    int32_t max_wide;                  /* tokens whose products are faster together, of pi_space_wide's formats */
} pi_device_info;

typedef struct pi_device_rates {
    double read_bytes_per_s;      /* its own memory */
    double copy_bytes_per_s;      /* from host to device memory */
    double zero_copy_bytes_per_s; /* its kernels read host memory */
} pi_device_rates;

/* Rows of a host matrix into device memory, in the order of ids (columns: of each row the blocks of its format that ids
 * name, n columns in all), while earlier operations still run; `stage` names the buffer: a load waits until what was
 * computed from its last content has ended, a computation that names it waits for the load. Only in programs whose key is
 * 0: where the matrix is not mapped, it passes through a small buffer while the program is put together. */
typedef struct pi_device_load {
    te_mat from;                   /* H */
    const int32_t *ids, *host_ids; /* D and H, the same; NULL: all. Blocks ascend */
    bool columns;
    int32_t each; /* rows: neighbours that an id names; 0: 1 */
    /* D, by id, of a route with `loads`, or NULL: where it is 0 nothing reads the rows, which then may be left out (what
     * passes through a small buffer comes as a whole). */
    const uint32_t *wanted;
    int32_t n;
    te_mat to; /* D */
    int32_t stage;
} pi_device_load;

/* Rows of logits on their way to the CPU: as they are, or the largest ones of each, for choices that need no more, or both.
 * Which it is may change from step to step. */
typedef struct pi_device_logits {
    const float *x; /* D [n_rows][cols] */
    int32_t n_rows, cols;
    const int32_t *n_largest; /* D: how many of each row, at most PI_LARGEST; 0: the rows; less: both */
    float *rows;              /* S [n_rows][cols] */
    /* S [n_rows][PI_LARGEST], of which the first n_found are: a logit's bits and in the lower half its column, falling, equal
     * ones by column; -inf is none. */
    uint64_t *largest;
    int32_t *n_found; /* S [n_rows]; -1: only the row can tell, for it has a NaN, a +inf or too many equal ones */
} pi_device_logits;

typedef struct pi_device_ops {
    uint32_t version;
    const char *kind;
    /* The calling thread's last error of this library. */
    const char *(*error)(void);
    /* budget_bytes: alloc never takes more in all; 0: no limit. */
    pi_status (*open)(int32_t index, uint64_t budget_bytes, pi_device **out);
    void (*close)(pi_device *dev); /* gives all memory back */
    void (*get_info)(pi_device *dev, pi_device_info *out);

    /* Takes n bytes at once, which the next allocations are cut from. Errors: MEMORY. */
    pi_status (*reserve)(pi_device *dev, size_t n_bytes);
    void *(*alloc)(pi_device *dev, size_t n_bytes); /* D, 256-byte aligned, zeroed; NULL with an error */
    void *(*share)(pi_device *dev, size_t n_bytes); /* S, zeroed; NULL with an error */
    /* Bytes of a row in the device's layout, which may differ from the file's but is no larger than that rounded up to
     * PI_DEVICE_ROW. A matrix on the device is n_rows such rows. */
    size_t (*stride)(int32_t type, int32_t cols);
    /* Host memory that pi_device_load's matrices lie in, to be read there. Errors: UNSUPPORTED where driver or limits refuse. */
    pi_status (*map)(pi_device *dev, const void *p, size_t n_bytes);
    /* Whether kernels can read the rows of a host matrix by zero-copy: it is mapped, and its format is the device's. */
    bool (*zero_copy)(pi_device *dev, const te_mat *m);
    /* Rows of a host matrix into device memory at out->w, in the device's layout: as pi_device_load, but at once, not inside
     * a program. Sets the rest of out. */
    pi_status (*pack)(pi_device *dev, const te_mat *from, const int32_t *ids, int32_t n, bool columns, te_mat *out);
    /* Bytes between host and device memory; return when the host side may be reused. Not inside a program. */
    pi_status (*upload)(pi_device *dev, void *to, const void *from, size_t n_bytes);
    pi_status (*download)(pi_device *dev, void *to, const void *from, size_t n_bytes);
    pi_status (*copy)(pi_device *dev, void *to, const void *from, size_t n_bytes); /* D to D */

    /* Starts a program after those before it. key: programs of equal key make equal calls; 0: it is not kept. Of those with
     * PI_KEY_MIXED no more than the last PI_MIXED are. Returns before the program has ended, and does not wait for what
     * it waits for. */
    pi_status (*launch)(pi_device *dev, pi_device_program *program, void *ctx, uint64_t key);
    /* Sets *cancelled where the device has failed, so that nobody waits for what will not come; finish says why. Any
     * thread may call it, at any time. */
    void (*look)(pi_device *dev);
    /* Waits for all programs, at most so long: whether they have ended, well or not. */
    bool (*ended)(pi_device *dev, int32_t ms);
    /* Waits for all programs, and sets *cancelled back. Errors: DEVICE (the sticky error), TIMEOUT (a wait was cancelled
     * or took too long: the device can be used again). */
    pi_status (*finish)(pi_device *dev);

    /* Operations, only inside a program; their arguments are in te_device_ops.h. ffn: with a list of at most max_decode
     * tokens, of matrices that zero_copy has said yes to. */
    void (*begin)(pi_device *dev, void *to, const void *from, size_t n_bytes, uint32_t *ticket,
                  uint32_t tickets);                                         /* copies S to D; *ticket (D) += tickets */
    void (*end)(pi_device *dev, void *to, const void *from, size_t n_bytes); /* copies D to S */
    void (*linear)(pi_device *dev, const te_linear_args *a);
    void (*attention)(pi_device *dev, const te_attention_args *a);
    void (*latent)(pi_device *dev, const te_latent_args *a);
    void (*recurrent)(pi_device *dev, const te_recurrent_args *a);
    void (*gate)(pi_device *dev, const te_gate_args *a);
    void (*marks)(pi_device *dev, const te_marks_args *a);
    void (*ffn)(pi_device *dev, const te_ffn_args *a);
    void (*cut)(pi_device *dev, const te_cut_args *a);
    void (*route)(pi_device *dev, const te_route_args *a);
    void (*experts)(pi_device *dev, const te_experts_args *a);
    void (*merge)(pi_device *dev, const te_merge_args *a);
    void (*load)(pi_device *dev, const pi_device_load *a);
    void (*logits)(pi_device *dev, const pi_device_logits *a);
    void (*stamp)(pi_device *dev, uint64_t *at); /* S: the device's clock, in ns, once what is in front has ended */

    /* Brings n matrices of host memory (from) to places of the device's, in its layout (to), in the background: while
     * programs run that do not use those places. At most PI_FETCHES are under way. fetched: how many have ended so far, in
     * the order in which they were asked for; their first error sticks in *st. Neither waits. */
    pi_status (*fetch)(pi_device *dev, const te_mat *from, int32_t n, const te_mat *to);
    uint32_t (*fetched)(pi_device *dev, pi_status *st);

    /* What the device reads, measured now, in memory of its own for as long. NULL: it cannot be said. */
    pi_status (*measure)(pi_device *dev, pi_device_rates *out);
} pi_device_ops;

/* The operations of a kind (pi_device_kind). Errors: DEVICE (no library, or one of another version). */
pi_status pi_device_find(int32_t kind, const pi_device_ops **out);
/* The stand-in, and what the CUDA library exports. */
const pi_device_ops *pi_device_host(void);
#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const pi_device_ops *pi_device_cuda(void);

#ifdef __cplusplus
}
#endif
#endif
