/* cuda.cuh - private to native/device/cuda: a GPU as pi_device, over the tensor engine of vendor/cuda. */
#ifndef PI_CUDA_CUH
#define PI_CUDA_CUH

#include "../../../vendor/core/te_os.h"
#include "../../../vendor/core/te_pool.h"
#include "../../../vendor/cuda/te_cuda.h"
#include "../device.h"
#include "../space.h"

namespace pi {

/* Memory that operations need between their kernels; one piece of each kind, for the largest that any program asked for. */
enum Room {
    PARTIAL,
    HIDDEN,
    BITS,
    SCRATCH,
    COUNTERS,
    HALF_X,
    HALF_SIDE,
    HALF_H,
    HALF_Z,
    ADAPT,
    GEMM,
    PREPARED,
    PREPARED_SIDE,
    ROUTES,
    FETCH,
    ROOMS
};
/* What operations do: nothing but say how much room they need, or that and their work. */
enum Mode { IDLE, MEASURE, WORK };

struct Range {
    const char *host;
    size_t n_bytes;
    const char *device;
};
struct Graph {
    uint64_t key;
    te_cuda_graph *graph;
    uint64_t last_run; /* by number */
};

/* What ffn left for merge: n_parts sums of y in room PARTIAL. */
struct Sum {
    const float *y;
    int32_t n_parts;
    bool zero_copy;       /* of neurons that are read from host memory */
    te_prepared prepared; /* their input, which is also the hot ones' */
};

/* Memory that pieces are cut from, and what is cut off so far. */
struct Slab {
    char *p;
    size_t n_bytes, used_bytes;
};

/* The most that one graph takes, its kernels' code included; what is more is other programs'. */
constexpr uint64_t graph_bytes = 256u << 20;
enum { MAX_GRAPHS = 64, MAX_RANGES = 512, MAX_SLABS = 2048, FETCH_MATS = 4 };

struct Cuda {
    pi_device base;
    const te_cuda_api *te;
    te_cuda *d;
    uint64_t budget_bytes; /* 0: no limit */
    uint64_t used_bytes;   /* as the driver counts: context, code, allocations, graphs */
    Mode mode;
    te_status status; /* the first error of the program that is made, and its sentence */
    char problem[512];
    size_t need[ROOMS], have[ROOMS];
    void *room[ROOMS];
    Sum sum;
    const float *kept; /* what a side kept, of which PREPARED_SIDE is another form */
    te_prepared kept_form;
    const float *half_x, *half_norm; /* input and weights of the norm that an F16 input was made of, */
    te_cuda_half half;               /* which it is */
    bool attended;                   /* attention made it of its result */
    te_cuda_gemm last;               /* a feed-forward's last product, of n_products: merge has yet to run it */
    te_linear_args last_rows;        /* the same of a few tokens, which goes to `partial` */
    bool settled;                    /* an operation of this step has begun after the copy of its inputs had ended */
    uint64_t graphs_bytes;           /* of used_bytes what graphs took */
    Graph graph[MAX_GRAPHS];
    int32_t n_graphs;
    uint64_t n_graph_runs;
    Slab slab[MAX_SLABS];
    int32_t n_slabs;
    Range mapped[MAX_RANGES];
    int32_t n_mapped;
    bool packed, looked_for_blas, has_prompted;
    uint64_t free_before; /* the first prompt, while it runs */
    /* What pack and loads bring over where the source is not mapped passes through two halves of pinned memory, in turn;
     * for loads several threads fill them. */
    char *ring; /* S */
    int32_t turn;
    te_pool *copiers;

    /* Fetches: those asked for that have not been put on their stream as a whole, and how far the first of these is. What
     * is not mapped passes through two halves of pinned memory; `sent` of vendor/cuda's fetches are on the stream. */
    struct {
        te_mat from[FETCH_MATS], to[FETCH_MATS];
        int32_t n;
        uint32_t end; /* of vendor/cuda's fetches, the last that belongs to it */
    } fetch[PI_FETCHES];
    uint32_t n_fetch_asked, n_fetch_sent, n_fetched, sent;
    int32_t fetch_mat, fetch_row, fetch_turn;
    uint32_t fetch_half_end[2]; /* a half is free once so many have ended */
    char *fetch_ring;           /* S */
    te_status fetch_status;
    char fetch_problem[256];

    /* Programs that are not kept as graphs are put on the stream by a thread: they may be longer than the driver's queue,
     * and wait for the CPU. `asked` and `done` count them. */
    te_thread thread;
    bool started, stop;
    bool may_end;        /* what is cancelled gets no further operations: a program that is not kept */
    size_t loaded_bytes; /* by loads that the thread put on their stream since it last waited for the device */
    uint32_t asked, done;
    pi_device_program *program;
    void *ctx;
};

inline Cuda *of(pi_device *dev) { return reinterpret_cast<Cuda *>(dev); }

/* memory.cu */
pi_status reserve(pi_device *dev, size_t n_bytes);
void *alloc(pi_device *dev, size_t n_bytes);       /* until the device is closed */
void *alloc_alone(pi_device *dev, size_t n_bytes); /* not zeroed */
void give(pi_device *dev, void *p, size_t n_bytes);
void *share(pi_device *dev, size_t n_bytes);
pi_status map(pi_device *dev, const void *p, size_t n_bytes);
bool zero_copy(pi_device *dev, const te_mat *m);
const void *mapped(const Cuda *c, const void *p); /* where kernels find host memory, or null */
pi_status pack(pi_device *dev, const te_mat *from, const int32_t *ids, int32_t n, bool columns, te_mat *out);
/* What loads of sources that are not mapped need; then such a load, in a program that a thread puts on the stream. */
te_status reserve_copiers(Cuda *c);
te_status load_by_ring(Cuda *c, const pi_device_load *a);
pi_status upload(pi_device *dev, void *to, const void *from, size_t n_bytes);
pi_status download(pi_device *dev, void *to, const void *from, size_t n_bytes);
pi_status copy(pi_device *dev, void *to, const void *from, size_t n_bytes);
/* Bytes that are free on the device, as the driver says. */
uint64_t free_bytes(Cuda *c);
/* What is used of a GPU before there is a context; 0 if that cannot be known. */
uint64_t used_without_context(int32_t index);
/* Counts what the driver took between two looks, at most n_bytes and what it rounds up. */
void count_taken(Cuda *c, uint64_t free_before, uint64_t n_bytes);
void count_graphs(Cuda *c, uint64_t free_before, int32_t n_gone);

/* device.cu: keeps the first error of a program. */
void note(Cuda *c, te_status st);
/* The first product of a prompt opens cuBLASLt where the loader finds it; without it, products are vendor/cuda's own. */
void find_blas(Cuda *c);

/* operations.cu */
inline bool idle(const Cuda *c) { return c->mode == IDLE; }
inline bool ready(const Cuda *c) {
    if (c->may_end && *(volatile const uint32_t *)c->base.cancelled) return false;
    return c->mode == WORK && c->status == TE_OK;
}
/* A piece of memory for this operation; while measuring, nothing but its size matters. */
void *room(Cuda *c, Room r, size_t n_bytes);
/* Calls f(t, n) for pieces of a run of tokens that the kernels for decoding take. */
template <class F> void pieces(int32_t n_tok, F f) {
    for (int32_t t = 0; t < n_tok; t += TE_CUDA_MAX_TOK)
        f(t, n_tok - t < TE_CUDA_MAX_TOK ? n_tok - t : (int32_t)TE_CUDA_MAX_TOK);
}
/* Tokens t to t + n - 1 of an operation. */
te_linear_args some_tokens(const te_linear_args *a, int32_t t, int32_t n);
void op_begin(pi_device *dev, void *to, const void *from, size_t n_bytes, uint32_t *ticket, uint32_t tickets);
void op_end(pi_device *dev, void *to, const void *from, size_t n_bytes);
void op_logits(pi_device *dev, const pi_device_logits *a);
void op_linear(pi_device *dev, const te_linear_args *a);
void op_attention(pi_device *dev, const te_attention_args *a);
void op_latent(pi_device *dev, const te_latent_args *a);
void op_recurrent(pi_device *dev, const te_recurrent_args *a);
void op_gate(pi_device *dev, const te_gate_args *a);
void op_cut(pi_device *dev, const te_cut_args *a);
void op_marks(pi_device *dev, const te_marks_args *a);
void op_ffn(pi_device *dev, const te_ffn_args *a);
void op_merge(pi_device *dev, const te_merge_args *a);
void op_load(pi_device *dev, const pi_device_load *a);
void op_stamp(pi_device *dev, uint64_t *at);

/* experts.cu */
void op_route(pi_device *dev, const te_route_args *a);
void op_experts(pi_device *dev, const te_experts_args *a);

/* rates.cu */
pi_status measure_rates(pi_device *dev, pi_device_rates *out);

/* adapt.cu: what adapters of gate and up add to the products of a feed-forward of few tokens, for op; then down's part of
 * the sum, to `part` [n_tok][n_embd]. */
bool is_adapted(const te_ffn_args *a);
void adapt_products(Cuda *c, const te_ffn_args *a, te_ffn_args *op);
void adapt_sum(Cuda *c, const te_ffn_args *a, const te_ffn_args *op, float *part);

/* fetch.cu */
pi_status fetch(pi_device *dev, const te_mat *from, int32_t n, const te_mat *to);
uint32_t fetched(pi_device *dev, pi_status *st);

/* operations.cu: c->last_rows, if there is one. Every operation but merge, which may settle it, begins with it. */
void run_last_rows(Cuda *c);
/* prompt.cu. run_last: c->last, if there is one; settle_last: the same, and with it what merge would add to it. */
void run_last(Cuda *c);
bool settle_last(Cuda *c, const te_merge_args *a);
te_cuda_half attention_half(Cuda *c, const te_attention_args *a); /* where it is to write HALF_X, if it does, */
te_attention_args in_half(const te_attention_args *a, const te_cuda_half &half); /* and told so */
void prefill_experts(Cuda *c, const te_experts_args *a);
void prefill_linear(Cuda *c, const te_linear_args *a);
void prefill_attention(Cuda *c, const te_attention_args *a, const te_cuda_half &half);
void prefill_ffn(Cuda *c, const te_ffn_args *a);

constexpr double finish_seconds = 90;

} // namespace pi
#endif
