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

#include "../../vendor/cpu/te_ops.h"
#include "../powerinfer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PI_DEVICE_VERSION = 4 };

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
    int32_t n_parts;                   /* in how many parts marks are posted; see handover.h */
    int32_t max_decode;                /* tokens that a program may hand over to the CPU within a layer */
} pi_device_info;

typedef struct pi_device_rates {
    double read_bytes_per_s;     /* its own memory */
    double copy_bytes_per_s;     /* from host to device memory */
    double in_place_bytes_per_s; /* its kernels read host memory */
} pi_device_rates;

/* A norm of rows; w NULL: none. */
typedef struct pi_dev_norm {
    const float *w, *b; /* D */
    float eps;
    bool layer; /* LayerNorm; else RMSNorm */
} pi_dev_norm;

/* Where words carry the number of the hand-over that they belong to: *base (D) + add. */
typedef struct pi_dev_seq {
    const uint32_t *base;
    uint32_t add;
} pi_dev_seq;

/* Products of norm(x) with up to three matrices, and beside them another norm of x that is kept, posted, or both.
 * out[].y may be shared memory. */
typedef struct pi_dev_linear {
    const float *x; /* D [n_tok][ldx] */
    size_t ldx;
    int32_t n_tok, cols;
    pi_dev_norm norm;
    int32_t n_out;
    te_linear out[3]; /* w, bias, y: D */
    bool relu;
    struct {
        bool wanted;
        pi_dev_norm norm;
        float *keep;    /* D [n_tok][cols] or NULL */
        uint64_t *post; /* S [n_tok][cols] or NULL */
        pi_dev_seq seq;
        int32_t type; /* of the matrices that are multiplied with what is kept */
    } side;
} pi_dev_linear;

/* Head norms, RoPE, K and V into the pool, attention over the blocks that the token's table names. */
typedef struct pi_dev_attention {
    float *q, *k, *v; /* D; q and k are changed */
    float *att;       /* D [n_tok][n_head * n_embd_head] */
    int32_t n_tok, n_head, n_head_kv, n_embd_head;
    int32_t rope, n_rot;          /* pi_rope_kind; floats of cs per token */
    const float *cs;              /* D [n_tok][n_rot] */
    const float *q_norm, *k_norm; /* D or NULL */
    float eps;
    int32_t type_k, type_v; /* te_type */
    size_t row_k, row_v;
    void *pool_k, *pool_v; /* D, laid out as in kv.h */
    const int32_t *pos;    /* D [n_tok] */
    const int32_t *first;  /* D [n_tok] the first token of the same sequence: its row of the table counts */
    const int32_t *table;  /* D [n_tok][ld_table] blocks of a sequence */
    int32_t ld_table;
    int32_t n_ctx;
    bool grouped; /* tokens of a sequence are next to each other */
} pi_dev_attention;

/* Which rows a token wants: those whose score reaches *threshold. The score of row j is fc2_j . z, or the mean product of
 * the signs of its weights, bits in sign (see te_kernels.h), and of h; with neither every row is wanted. */
typedef struct pi_dev_scores {
    te_mat fc2;           /* D, or w NULL */
    const float *z;       /* D [n_tok][fc2.cols] */
    const uint64_t *sign; /* D [n_rows][n_words], or NULL */
    int32_t n_words, n_rows;
    const float *h; /* D [n_tok][cols] */
    int32_t cols;
    const float *threshold; /* D */
} pi_dev_scores;

/* Marks of the wanted rows, posted as handover.h lays them out. */
typedef struct pi_dev_marks {
    pi_dev_scores scores;
    int32_t n_tok;
    uint64_t *post; /* S [n_tok][words] */
    pi_dev_seq seq;
} pi_dev_marks;

/* Beside a product with W: y = W x + b (a x); a.w NULL: W alone. */
typedef struct pi_dev_adapter {
    te_mat a, b; /* D */
} pi_dev_adapter;

/* y_t (+)= the feed-forward over all neurons, as te_op_ffn, of the wanted ones. Only merge reads y, once: until then a
 * device may keep it elsewhere, as parts that have not been added up. */
typedef struct pi_dev_ffn {
    const float *x;   /* D [n_tok][cols]; the input is norm(x) */
    pi_dev_norm norm; /* the same in all calls that add to one y */
    int32_t n_tok;
    te_mat gate, up, down; /* D; down: a row per row of up, w NULL where it is stored by output */
    te_mat down_out;       /* D [n_embd][rows of up], or w NULL */
    /* Or, of at most max_decode tokens: n_list neurons, of which the j-th is row list[j] (D) of gate, up and down, which
     * are H and which `reads` has said yes to. Everything else is by j. A device may compute them beside those of the call
     * behind, if that adds to y. */
    const int32_t *list;
    int32_t n_list;
    /* Of the three matrices, not with a list or scores. gate, up: a is [rank][cols], b has a row per row of up. down: a has
     * a row of rank values per row of up (it is stored transposed), b is [n_embd][rank]. */
    pi_dev_adapter gate_adapter, up_adapter, down_adapter;
    const float *up_bias; /* D or NULL */
    int32_t act;          /* te_activation */
    float act_threshold;
    bool skip;
    pi_dev_scores scores;
    float *y; /* D [n_tok][n_embd] */
    bool add;
    bool staged; /* the matrices come from loads of the buffer `stage` */
    int32_t stage;
    uint32_t *counts; /* D [3]: listed, computed, fired are added to, or NULL */
    uint32_t *fired;  /* D [neurons]: the tokens for which a row's product was not 0 are added, or NULL */
} pi_dev_ffn;

/* x_t += y + bias + what the CPU posted; or, if replace, x_t = what was posted. */
typedef struct pi_dev_merge {
    float *x; /* D [n_tok][n_embd] */
    int32_t n_tok, n_embd;
    const float *y;        /* D or NULL */
    const float *bias;     /* D or NULL */
    const uint64_t *words; /* S [n_tok][n_embd] or NULL */
    pi_dev_seq seq;
    bool replace;
} pi_dev_merge;

/* Rows of a host matrix into device memory, in the order of ids (columns: of each row the blocks of its format that ids
 * name, n columns in all), while earlier operations still run; `stage` names the buffer: a load waits until what was
 * computed from its last content has ended, a computation that names it waits for the load. Only in programs whose key is
 * 0: where the matrix is not mapped, it passes through a small buffer while the program is put together. */
typedef struct pi_dev_load {
    te_mat from;                   /* H */
    const int32_t *ids, *host_ids; /* D and H, the same; NULL: all. Blocks ascend */
    bool columns;
    int32_t n;
    te_mat to; /* D */
    int32_t stage;
} pi_dev_load;

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
    /* Host memory that pi_dev_load's matrices lie in, to be read there. Errors: UNSUPPORTED where driver or limits refuse. */
    pi_status (*map)(pi_device *dev, const void *p, size_t n_bytes);
    /* Whether kernels can read the rows of a host matrix in place: it is mapped, and its format is the device's. */
    bool (*reads)(pi_device *dev, const te_mat *m);
    /* Rows of a host matrix into device memory at out->w, in the device's layout: as pi_dev_load, but at once, not inside
     * a program. Sets the rest of out. */
    pi_status (*pack)(pi_device *dev, const te_mat *from, const int32_t *ids, int32_t n, bool columns, te_mat *out);
    /* Bytes between host and device memory; return when the host side may be reused. Not inside a program. */
    pi_status (*upload)(pi_device *dev, void *to, const void *from, size_t n_bytes);
    pi_status (*download)(pi_device *dev, void *to, const void *from, size_t n_bytes);
    pi_status (*copy)(pi_device *dev, void *to, const void *from, size_t n_bytes); /* D to D */

    /* Starts a program after those before it. key: programs of equal key make equal calls; 0: it is not kept. Returns
     * before the program has ended, and does not wait for what it waits for. */
    pi_status (*launch)(pi_device *dev, pi_device_program *program, void *ctx, uint64_t key);
    /* Sets *cancelled where the device has failed, so that nobody waits for what will not come; finish says why. Any
     * thread may call it, at any time. */
    void (*look)(pi_device *dev);
    /* Waits for all programs, and sets *cancelled back. Errors: DEVICE (the sticky error), TIMEOUT (a wait was cancelled
     * or took too long: the device can be used again). */
    pi_status (*finish)(pi_device *dev);

    /* Operations, only inside a program. */
    void (*begin)(pi_device *dev, void *to, const void *from, size_t n_bytes, uint32_t *seq,
                  uint32_t seq_step);                                        /* copies S to D; *seq (D) += seq_step */
    void (*end)(pi_device *dev, void *to, const void *from, size_t n_bytes); /* copies D to S */
    void (*linear)(pi_device *dev, const pi_dev_linear *a);
    void (*attention)(pi_device *dev, const pi_dev_attention *a);
    void (*marks)(pi_device *dev, const pi_dev_marks *a);
    void (*ffn)(pi_device *dev, const pi_dev_ffn *a);
    void (*merge)(pi_device *dev, const pi_dev_merge *a);
    void (*load)(pi_device *dev, const pi_dev_load *a);
    void (*stamp)(pi_device *dev, uint64_t *at); /* S: the device's clock, in ns, once what is in front has ended */

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
