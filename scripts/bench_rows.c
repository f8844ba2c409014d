/* bench_rows.c - how near the row kernels and the fused FFN come to the machine's read rate, per weight format and
 * instruction set.
 *
 *     cc -O3 scripts/bench_rows.c build/testing/libte_testing.so -Wl,-rpath,build/testing -o bench_rows
 *     ./bench_rows [threads [isa [type ...]]]
 *
 * Layers of a 7B width (rows of 4096 weights, 11008 neurons), more than 1 GB of random weights, so that no cache holds
 * them. Printed as GB/s and as a share of the rate at which the same threads read the same memory, measured before and
 * after, since machines drift: medians of TRIES.
 *
 *     dot      te_op_linear over all rows
 *     short    the same over rows of 1024 weights
 *     axpy     te_op_linear_t over all rows
 *     rows     a random 10 % of the neurons' rows read in order, one load for each cache line: what memory gives
 *     listed   te_op_ffn over a random 10 % of the neurons, which all fire
 *     joined   the same, a neuron's three rows stored side by side
 *     exact    te_op_ffn over all neurons, of which 10 % fire
 *
 * and, of one thread alone, what the arithmetic takes without the memory: dot and axpy over rows in the first cache; and
 * dot products of 1 to 32 tokens with rows from memory, in billions of products a second. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../vendor/core/te_os.h"
#include "../vendor/core/te_pool.h"
#include "../vendor/cpu/te_ops.h"

enum { COLS = 4096, SHORT = 1024, N_FF = 11008, TRIES = 12, PASSES = 4 };

typedef struct bench {
    const te_kernels *k;
    te_workspace *ws;
    uint8_t *w;
    size_t n_bytes, matrix_bytes;
    int32_t type, n_layers, n_listed;
    int32_t *lists; /* PASSES * n_layers * n_listed: the same rows again might come from a large cache */
    float *x, *y, *h;
    float threshold;
    int64_t bytes[64], sink[64];
} bench;

static te_mat matrix(const bench *b, int32_t i) {
    const te_mat m = {b->w + b->matrix_bytes * (size_t)i, te_row_bytes(b->type, COLS), b->type, COLS, N_FF};
    return m;
}

static void read_all(void *ctx, te_team *team) {
    bench *b = ctx;
    int64_t lo, hi, sum = 0;
    te_share(team, (int64_t)b->n_bytes, 4096, &lo, &hi);
    for (const uint8_t *p = b->w + lo; p + 64 <= b->w + hi; p += 64) {
        int64_t v;
        memcpy(&v, p, 8);
        sum += v;
    }
    b->sink[team->ith] = sum;
    b->bytes[team->ith] = hi - lo;
}

static void linear(bench *b, te_team *team, int32_t cols) {
    for (int32_t i = 0; i < 3 * b->n_layers; i++) {
        te_mat m = matrix(b, i);
        m.n_rows *= m.cols / cols;
        m.stride = m.stride / (size_t)(m.cols / cols);
        m.cols = cols;
        const te_linear l = {.w = m, .y = b->h, .ldy = (size_t)m.n_rows};
        te_op_linear(team, b->ws, &l, 1, b->x, (size_t)cols, 1);
    }
    b->bytes[team->ith] = team->ith == 0 ? (int64_t)b->n_bytes : 0;
}
static void dot(void *ctx, te_team *team) { linear(ctx, team, COLS); }
static void short_dot(void *ctx, te_team *team) { linear(ctx, team, SHORT); }

static void axpy(void *ctx, te_team *team) {
    bench *b = ctx;
    for (int32_t i = 0; i < 3 * b->n_layers; i++) {
        const te_mat m = matrix(b, i);
        te_op_linear_t(team, b->ws, &m, b->h, N_FF, 1, NULL, b->y, COLS, false, false);
    }
    b->bytes[team->ith] = team->ith == 0 ? (int64_t)b->n_bytes : 0;
}

/* The listed rows of layer i in pass p. */
static te_rows list(const bench *b, int32_t p, int32_t i) {
    const te_rows rows = {b->lists + (size_t)(p * b->n_layers + i) * (size_t)b->n_listed, 0, b->n_listed};
    return rows;
}

static void rows(void *ctx, te_team *team) {
    bench *b = ctx;
    int64_t lo, hi, sum = 0, n = 0;
    const size_t row_bytes = te_row_bytes(b->type, COLS);
    te_share(team, b->n_listed, 1, &lo, &hi);
    for (int32_t i = 0; i < 3 * PASSES * b->n_layers; i++) {
        const te_mat m = matrix(b, i % (3 * b->n_layers));
        const te_rows listed = list(b, i / (3 * b->n_layers), i % (3 * b->n_layers) / 3);
        for (int32_t j = (int32_t)lo; j < hi; j++, n++) {
            const uint8_t *p = (const uint8_t *)m.w + m.stride * (size_t)te_row_at(listed, j);
            for (size_t k = 0; k + 8 <= row_bytes; k += 64) {
                int64_t v;
                memcpy(&v, p + k, 8);
                sum += v;
            }
        }
    }
    b->sink[team->ith] = sum;
    b->bytes[team->ith] = n * (int64_t)row_bytes;
}

typedef enum way { LISTED, JOINED, EXACT } way;

static void ffn(bench *b, te_team *team, way how) {
    b->bytes[team->ith] = 0;
    for (int32_t i = 0; i < (how == EXACT ? 1 : PASSES) * b->n_layers; i++) {
        const int32_t layer = i % b->n_layers;
        te_ffn f = {.gate = matrix(b, 3 * layer), .act = TE_RELU, .threshold = how == EXACT ? b->threshold : -1e30f};
        f.up = f.down = f.gate;
        const size_t to_next = how == JOINED ? f.gate.stride : b->matrix_bytes;
        f.up.w = (const uint8_t *)f.gate.w + to_next;
        f.down.w = (const uint8_t *)f.up.w + to_next;
        if (how == JOINED) f.gate.stride = f.up.stride = f.down.stride = 3 * to_next;
        const te_rows all = {NULL, 0, N_FF}, some = list(b, i / b->n_layers, layer);
        const te_ffn_io io = {.x = b->x, .ldx = COLS, .n_tok = 1, .y = b->y, .ldy = COLS};
        te_ffn_counts counts;
        te_op_ffn(team, b->ws, &f, how == EXACT ? all : some, true, &io, &counts);
        b->bytes[team->ith] += counts.bytes;
        te_barrier(team);
    }
}
static void listed(void *ctx, te_team *team) { ffn(ctx, team, LISTED); }
static void joined(void *ctx, te_team *team) { ffn(ctx, team, JOINED); }
static void exact(void *ctx, te_team *team) { ffn(ctx, team, EXACT); }

static double rate(te_pool *pool, te_task *task, bench *b) {
    const int64_t start = te_os_now_ns();
    te_pool_run(pool, task, b);
    const double seconds = (double)(te_os_now_ns() - start) * 1e-9;
    double n = 0;
    for (int32_t i = 0; i < te_pool_n_threads(pool); i++) n += (double)b->bytes[i];
    return n / seconds * 1e-9;
}

/* GB/s of one thread over the first rows of the weights, as many as fit into 24 KiB, again and again. */
static double cached(const bench *b, bool transposed) {
    enum { AGAIN = 40 };
    const te_row_kernels *k = &b->k->row[b->type];
    const te_mat m = matrix(b, 0);
    const int32_t fit = (int32_t)((24 << 10) / m.stride);
    const te_rows few = {NULL, 0, fit > 0 ? fit : 1};
    const te_ahead none = {0};
    void *act = te_os_alloc(k->act_bytes(COLS));
    float *sums = te_os_alloc(te_acc_floats(COLS) * sizeof(float));
    double best = 0;
    if (!act || !sums) exit(1);
    k->act_pack(b->x, COLS, act);
    for (int t = 0; t < 32; t++) {
        const int64_t start = te_os_now_ns();
        for (int i = 0; i < AGAIN; i++) {
            if (transposed)
                k->axpy(&m, few, none, b->x, sums);
            else
                k->dot(&m, few, none, act, b->y);
        }
        const double r = (double)m.stride * few.n * AGAIN / (double)(te_os_now_ns() - start);
        if (r > best) best = r;
    }
    te_os_free(act, k->act_bytes(COLS));
    te_os_free(sums, te_acc_floats(COLS) * sizeof(float));
    return best;
}

/* Billions of products a second of one thread: n_tok tokens times all rows. */
static double few(const bench *b, int32_t n_tok) {
    const te_row_kernels *k = &b->k->row[b->type];
    const size_t act = (k->act_bytes(COLS) + 63) / 64 * 64, n_out = (size_t)N_FF * (size_t)n_tok;
    char *acts = te_os_alloc(act * (size_t)n_tok);
    float *y = te_os_alloc(n_out * sizeof(float));
    const te_rows all = {NULL, 0, N_FF};
    const te_ahead none = {0};
    if (!acts || !y) exit(1);
    for (int32_t t = 0; t < n_tok; t++) k->act_pack(b->x, COLS, acts + act * (size_t)t);
    double best = 0;
    for (int32_t i = 0; i < b->n_layers; i++) {
        const te_mat m = matrix(b, 3 * i);
        const int64_t start = te_os_now_ns();
        if (n_tok == 1)
            k->dot(&m, all, none, acts, y);
        else
            k->dot_batch(&m, all, none, (te_tokens){NULL, n_tok}, acts, act, y, N_FF);
        const double r = (double)n_out * COLS / (double)(te_os_now_ns() - start);
        if (r > best) best = r;
    }
    te_os_free(acts, act * (size_t)n_tok);
    te_os_free(y, n_out * sizeof(float));
    return best;
}

static uint64_t random_bits(void) {
    static uint64_t s = 88172645463325252u;
    s ^= s << 13;
    s ^= s >> 7;
    return s ^= s << 17;
}

/* Random blocks with scales of moderate size. */
static void fill(bench *b) {
    static const struct {
        int32_t type, at[2];
    } halves[] = {{TE_Q8_0, {0, 0}}, {TE_Q4_0, {0, 0}}, {TE_Q4_K, {0, 2}}, {TE_Q5_K, {0, 2}}, {TE_Q6_K, {208, 208}}};
    const size_t block = (size_t)te_type_get(b->type)->block_bytes;
    for (size_t i = 0; i + 8 <= b->matrix_bytes; i += 8) {
        const uint64_t v = random_bits();
        memcpy(b->w + i, &v, 8);
    }
    for (size_t i = 0; i < b->matrix_bytes; i += block) {
        if (b->type == TE_F16) b->w[i + 1] = (uint8_t)(0x2c | (b->w[i + 1] & 0x83));
        if (b->type == TE_BF16 || b->type == TE_F32)
            b->w[i + block - 1] = (uint8_t)(0x3d | (b->w[i + block - 1] & 0x80));
        for (size_t k = 0; k < sizeof halves / sizeof halves[0]; k++)
            for (int half = 0; half < 2 && halves[k].type == b->type; half++)
                b->w[i + (size_t)halves[k].at[half] + 1] = 0x20;
    }
    for (size_t i = b->matrix_bytes; i < b->n_bytes; i += b->matrix_bytes) memcpy(b->w + i, b->w, b->matrix_bytes);
}

static int descending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

static double median(float *values, int n) {
    qsort(values, (size_t)n, sizeof *values, descending);
    return (double)(values[(n - 1) / 2] + values[n / 2]) / 2;
}

static void run(const te_kernels *k, te_pool *pool, int32_t type) {
    bench b = {.k = k, .type = type, .n_listed = N_FF / 10};
    b.matrix_bytes = te_row_bytes(type, COLS) * N_FF;
    b.n_layers = (int32_t)((1200u << 20) / (3 * b.matrix_bytes)) + 1;
    b.n_bytes = b.matrix_bytes * 3 * (size_t)b.n_layers;
    const size_t n_lists = PASSES * (size_t)b.n_layers, n_out = (size_t)N_FF * (COLS / SHORT);
    b.w = te_os_alloc(b.n_bytes);
    b.x = te_os_alloc(COLS * sizeof(float));
    b.y = te_os_alloc(COLS * sizeof(float));
    b.h = te_os_alloc(n_out * sizeof(float));
    b.lists = te_os_alloc(n_lists * (size_t)b.n_listed * sizeof(int32_t));
    const te_workspace_limits limits = {te_pool_n_threads(pool), 1, N_FF, N_FF};
    if (!b.w || !b.x || !b.y || !b.h || !b.lists || te_workspace_new(k, limits, &b.ws) != TE_OK) {
        fprintf(stderr, "bench_rows: no memory for %zu bytes\n", b.n_bytes);
        exit(1);
    }
    fill(&b);
    for (int i = 0; i < COLS; i++) b.x[i] = (float)(int64_t)random_bits() * 0x1p-63f;
    for (size_t l = 0; l < n_lists; l++)
        for (int32_t j = 0, n = 0; j < N_FF; j++)
            if ((int32_t)(random_bits() % (uint64_t)(N_FF - j)) < b.n_listed - n)
                b.lists[l * (size_t)b.n_listed + (size_t)n++] = j;
    rate(pool, dot, &b);
    float *sorted = malloc(N_FF * sizeof(float));
    if (!sorted) exit(1);
    memcpy(sorted, b.h, N_FF * sizeof(float));
    qsort(sorted, N_FF, sizeof(float), descending);
    b.threshold = sorted[N_FF / 10];
    free(sorted);

    static const struct {
        const char *name;
        te_task *task;
    } tasks[] = {{"dot", dot},       {"short", short_dot}, {"axpy", axpy},  {"rows", rows},
                 {"listed", listed}, {"joined", joined},   {"exact", exact}};
    enum { N_TASKS = sizeof tasks / sizeof tasks[0] };
    float ceiling[TRIES * N_TASKS], found[N_TASKS][TRIES], share[N_TASKS][TRIES];
    double before = rate(pool, read_all, &b);
    for (int t = 0; t < TRIES; t++) {
        for (int i = 0; i < N_TASKS; i++) {
            const double r = rate(pool, tasks[i].task, &b), after = rate(pool, read_all, &b);
            found[i][t] = (float)r;
            share[i][t] = (float)(200 * r / (before + after));
            ceiling[N_TASKS * t + i] = (float)(before = after);
        }
    }
    printf("%-6s %-5s %d threads: read %5.1f GB/s", k->name, te_type_get(type)->name, te_pool_n_threads(pool),
           median(ceiling, TRIES * N_TASKS));
    for (int i = 0; i < N_TASKS; i++)
        printf(" | %s %.1f (%.0f %%)", tasks[i].name, median(found[i], TRIES), median(share[i], TRIES));
    printf(" | in cache: dot %.1f, axpy %.1f | tokens:", cached(&b, false), cached(&b, true));
    for (int32_t n_tok = 1; n_tok <= 32; n_tok *= 2) printf(" %d %.0f", n_tok, few(&b, n_tok));
    printf("\n");
    fflush(stdout);
    te_workspace_free(b.ws);
    te_os_free(b.w, b.n_bytes);
    te_os_free(b.x, COLS * sizeof(float));
    te_os_free(b.y, COLS * sizeof(float));
    te_os_free(b.h, n_out * sizeof(float));
    te_os_free(b.lists, n_lists * (size_t)b.n_listed * sizeof(int32_t));
}

int main(int argc, char **argv) {
    static const int32_t types[] = {TE_F32, TE_F16, TE_BF16, TE_Q8_0, TE_Q4_0, TE_Q4_K, TE_Q5_K, TE_Q6_K};
    const int32_t n_threads = argc > 1 ? atoi(argv[1]) : te_os_n_cores();
    const te_kernels *k = argc > 2 ? te_cpu_kernels_named(argv[2]) : te_cpu_kernels();
    te_pool *pool;
    if (!k || n_threads < 1 || n_threads > 64 || te_pool_new(n_threads, &pool) != TE_OK) {
        fprintf(stderr, "bench_rows: needs 1 to 64 threads and an instruction set that this machine has\n");
        return 2;
    }
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        bool asked = argc < 4;
        for (int a = 3; a < argc; a++) asked = asked || strcmp(argv[a], te_type_get(types[i])->name) == 0;
        if (asked) run(k, pool, types[i]);
    }
    te_pool_free(pool);
    return 0;
}
