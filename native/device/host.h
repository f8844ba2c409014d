/* host.h - private to host*.c: the stand-in device. */
#ifndef PI_DEVICE_HOST_H
#define PI_DEVICE_HOST_H

#include "../../vendor/core/te_os.h"
#include "../../vendor/cpu/te_ops.h"
#include "../common.h"
#include "device.h"
#include "handover.h"
#include "space.h"

typedef struct pi_host_block {
    struct pi_host_block *next;
    void *p;
    size_t n_bytes;
} pi_host_block;

enum { PI_HOST_RANGES = 256, PI_HOST_FETCH_MATS = 4 };
typedef struct pi_host_range {
    const char *p;
    size_t n_bytes;
} pi_host_range;

typedef struct pi_host_device {
    pi_device base;
    const te_kernels *kernels;
    pi_host_block *blocks;
    uint64_t budget_bytes, used_bytes, reserved_bytes; /* reserved: of those in use, for the next allocations */
    pi_host_range mapped[PI_HOST_RANGES];
    int32_t n_mapped;

    /* The thread: `asked` and `done` count programs. */
    te_thread thread;
    bool started, stop;
    uint32_t asked, done;
    pi_device_program *program;
    void *ctx;

    te_pool *pool; /* of one member: te_ops need a team */
    te_team *team;
    te_workspace *ws;
    te_workspace_limits limits;
    float *scratch;
    size_t scratch_floats;
    pi_status status; /* sticky until finish */
    char problem[1024];
    pi_wait wait;
    uint32_t vanished;
    /* Fetches: those asked for, and those done, which one is at each look at them. */
    struct {
        te_mat from, to;
    } fetch[PI_FETCHES][PI_HOST_FETCH_MATS];
    int32_t n_fetch[PI_FETCHES];
    uint32_t n_asked, n_fetched;
    pi_status fetch_status;
    uint64_t key, calls; /* of the program that runs: a digest of its calls so far */
    struct {
        uint64_t key, calls;
    } seen[64]; /* programs of one key must make equal calls */
} pi_host_device;

/* What tests make the stand-ins of this process do wrong: the n-th time from now on; 0: nothing. Only the test library
 * has it. */
#ifdef PI_TESTING
typedef struct pi_host_fault {
    int32_t alloc, launch, transfer, fetch;
    int32_t die, hang,
        vanish;      /* an operation reports an error; it never ends, unless it is cancelled; so, but the device
                                  can be seen to have failed */
    int32_t map_one; /* one piece of memory cannot be mapped */
    int32_t map;     /* from now on nothing can be mapped */
    int32_t late_us; /* from now on some operations begin so much later */
} pi_host_fault;
extern pi_host_fault pi_host_faults;
extern int32_t pi_host_left_out; /* rows of loads that nobody wanted */
bool pi_host_is_due(int32_t *fault);
void pi_host_be_late(const pi_host_device *d);
#define PI_HOST_IS_DUE(fault) pi_host_is_due(&pi_host_faults.fault)
#define PI_HOST_HAS(fault)    (pi_host_faults.fault != 0)
#else
#define PI_HOST_IS_DUE(fault) false
#define pi_host_be_late(d)    ((void)(d))
#define PI_HOST_HAS(fault)    false
#endif

static inline pi_host_device *pi_host(pi_device *dev) { return (pi_host_device *)dev; }
/* Records the first error of a program. */
void pi_host_fail(pi_host_device *d, pi_status status);
/* host_memory.c: as pi_device_ops; gather: rows or columns of a matrix, as pi_device_load names them. */
pi_status pi_host_reserve(pi_device *dev, size_t n_bytes);
void *pi_host_alloc(pi_device *dev, size_t n_bytes);
void *pi_host_share(pi_device *dev, size_t n_bytes);
size_t pi_host_stride(int32_t type, int32_t cols);
pi_status pi_host_map(pi_device *dev, const void *p, size_t n_bytes);
bool pi_host_zero_copy(pi_device *dev, const te_mat *m);
pi_status pi_host_pack(pi_device *dev, const te_mat *from, const int32_t *ids, int32_t n, bool columns, te_mat *out);
pi_status pi_host_upload(pi_device *dev, void *to, const void *from, size_t n_bytes);
pi_status pi_host_copy(pi_device *dev, void *to, const void *from, size_t n_bytes);
pi_status pi_host_fetch(pi_device *dev, const te_mat *from, int32_t n, const te_mat *to);
uint32_t pi_host_fetched(pi_device *dev, pi_status *st);
void pi_host_gather(const te_mat *from, const int32_t *ids, int32_t each, int32_t n, bool columns, const te_mat *to);
/* host_ops.c */
void pi_host_begin(pi_device *dev, void *to, const void *from, size_t n_bytes, uint32_t *ticket, uint32_t tickets);
void pi_host_end(pi_device *dev, void *to, const void *from, size_t n_bytes);
void pi_host_logits(pi_device *dev, const pi_device_logits *a);
void pi_host_linear(pi_device *dev, const te_linear_args *a);
void pi_host_attention(pi_device *dev, const te_attention_args *a);
void pi_host_latent(pi_device *dev, const te_latent_args *a);       /* host_latent.c */
void pi_host_recurrent(pi_device *dev, const te_recurrent_args *a); /* host_recurrent.c */
void pi_host_gate(pi_device *dev, const te_gate_args *a);
void pi_host_cut(pi_device *dev, const te_cut_args *a);
void pi_host_marks(pi_device *dev, const te_marks_args *a);
void pi_host_ffn(pi_device *dev, const te_ffn_args *a);
void pi_host_merge(pi_device *dev, const te_merge_args *a);
/* host_experts.c */
void pi_host_route(pi_device *dev, const te_route_args *a);
void pi_host_experts(pi_device *dev, const te_experts_args *a);
/* What host_ops.c gives it. begin: of every operation; false: do nothing. */
bool pi_host_begin_op(pi_device *dev, uint64_t kind, int32_t n_tok);
void pi_host_mix(pi_host_device *d, const void *p);
/* Room for operations of so many tokens, columns and rows; of floats. Errors fail the device. */
bool pi_host_reserve_work(pi_host_device *d, int32_t n_tok, int32_t cols, int32_t rows);
float *pi_host_scratch(pi_host_device *d, size_t n_floats);
void pi_host_load(pi_device *dev, const pi_device_load *a);
void pi_host_stamp(pi_device *dev, uint64_t *at);

enum { PI_HOST_PARTS = 3, PI_HOST_MAX_DECODE = 8 };

#endif
