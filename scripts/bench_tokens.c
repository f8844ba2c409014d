/* bench_tokens.c - products of 1 to 32 tokens by a team, and what limits them, per weight format and instruction set.
 *
 *     cc -O3 scripts/bench_tokens.c build/testing/libte_testing.so -Wl,-rpath,build/testing -pthread -o bench_tokens
 *     ./bench_tokens THREADS[,THREADS ...] ISA[,ISA ...] TYPE[,TYPE ...] [ROUNDS]
 *
 * The dense products of layers of Llama-2-7B (TE_BY_ROWS, as in decoding), more than 1 GB of random weights, 64 MB for each
 * thread in a measurement, which begins where the one before ended, so that no cache holds them. For each number of tokens,
 * medians of ROUNDS (5):
 *
 *     G/s      billions of products a second of a weight and a token
 *     GB/s     of weights, and which part this is of the rate at which the same threads read the same memory
 *     core     which part the products are of those that the same kernels do at the same time in all threads with rows
 *              that stay in the second cache: without memory, members' waiting and shares that are unlike
 *     x        tokens a second beside those of one token
 *
 * Before that, how many billions of products AVX2's tile of Q4_0 and AVX-512's would do without any load: the limit of
 * arithmetic of one thread and of all; and whether two processors share a core: two threads beside one, on processors 0 and
 * each other one that this program may use. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../vendor/core/te_os.h"
#include "../vendor/core/te_pool.h"
#include "../vendor/cpu/te_ops.h"

enum { COLS = 4096, N_FF = 11008, MOST = 32, WIDTHS = 6, MAX_ROUNDS = 32 };

typedef struct bench {
    const te_kernels *k;
    te_workspace *ws;
    uint8_t *w;
    size_t n_bytes, layer_bytes;
    int32_t type, n_layers, n_tok, first, n, nth;
    float *x, *y[3];
    size_t read_at, read_bytes, read_ahead;
    int64_t sink[64];
    double rate[64];
} bench;

static double now(void) { return (double)te_os_now_ns() * 1e-9; }

/* ---- arithmetic alone ---- */

/* A unit of 32 weights: eight rows and a token (AVX2, as vec_avx2.hpp has it), sixteen (AVX-512). */
#define AVX2_STEP "vpmaddubsw %%ymm14, %%ymm15, %%ymm12\n vpaddw %%ymm12, %%ymm13, %%ymm13\n"
#define AVX2_UNIT(a)                                                                                                   \
    "vpmaddubsw %%ymm14, %%ymm15, %%ymm13\n" AVX2_STEP AVX2_STEP AVX2_STEP AVX2_STEP AVX2_STEP AVX2_STEP AVX2_STEP     \
    "vpmaddwd %%ymm11, %%ymm13, %%ymm13\n vpaddd %%ymm10, %%ymm13, %%ymm13\n vcvtdq2ps %%ymm13, %%ymm13\n"             \
    "vmulps %%ymm9, %%ymm8, %%ymm12\n vfmadd231ps %%ymm12, %%ymm13, %%ymm" #a "\n"
static void avx2_units(int n) {
    for (int i = 0; i < n; i += 8)
        __asm__ volatile(AVX2_UNIT(0) AVX2_UNIT(1) AVX2_UNIT(2) AVX2_UNIT(3) AVX2_UNIT(4) AVX2_UNIT(5) AVX2_UNIT(6)
                             AVX2_UNIT(7)::
                                 : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm12", "xmm13");
}
#define AVX512_STEP(a) "vpdpbusd %%zmm14, %%zmm15, %%zmm" #a "\n"
#define AVX512_UNIT(a)                                                                                                 \
    "vmovdqa32 %%zmm10, %%zmm" #a "\n" AVX512_STEP(a) AVX512_STEP(a) AVX512_STEP(a) AVX512_STEP(a) AVX512_STEP(a)      \
        AVX512_STEP(a) AVX512_STEP(a) AVX512_STEP(a) "vcvtdq2ps %%zmm" #a ", %%zmm" #a                                 \
                                                     "\n vmulps %%zmm9, %%zmm8, %%zmm12\n"                             \
                                                     "vfmadd213ps %%zmm11, %%zmm12, %%zmm" #a "\n"
static void avx512_units(int n) {
    for (int i = 0; i < n; i += 16)
        __asm__ volatile(AVX512_UNIT(0) AVX512_UNIT(1) AVX512_UNIT(2) AVX512_UNIT(3) AVX512_UNIT(4) AVX512_UNIT(5)
                             AVX512_UNIT(6) AVX512_UNIT(7)::
                                 : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm12");
}

typedef struct alone {
    pthread_barrier_t *barrier;
    void (*units)(int);
    int cpu, rows;
    double rate; /* 10^9 products a second */
} alone;
static void *alone_run(void *p) {
    enum { UNITS = 1 << 17, TIMES = 6 };
    alone *a = p;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(a->cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    a->units(UNITS);
    pthread_barrier_wait(a->barrier);
    const double start = now();
    for (int i = 0; i < TIMES; i++) a->units(UNITS);
    const double end = now();
    a->units(UNITS * TIMES / 2); /* while others end */
    a->rate = (double)UNITS * TIMES * 256 / (end - start) * 1e-9;
    return NULL;
}
/* The sum of rates on these processors at once, the best of three. */
static double alone_once(const int *cpus, int n, void (*units)(int)) {
    pthread_barrier_t barrier;
    pthread_t thread[64];
    alone a[64];
    double sum = 0;
    pthread_barrier_init(&barrier, NULL, (unsigned)n);
    for (int i = 0; i < n; i++) {
        a[i] = (alone){.barrier = &barrier, .units = units, .cpu = cpus[i]};
        if (pthread_create(&thread[i], NULL, alone_run, &a[i])) exit(1);
    }
    for (int i = 0; i < n; i++) {
        pthread_join(thread[i], NULL);
        sum += a[i].rate;
    }
    pthread_barrier_destroy(&barrier);
    return sum;
}
static double alone_on(const int *cpus, int n, void (*units)(int)) {
    double best = 0;
    for (int i = 0; i < 3; i++) {
        const double rate = alone_once(cpus, n, units);
        if (rate > best) best = rate;
    }
    return best;
}
static void arithmetic(const int *cpus, int n) {
    static const struct {
        const char *name;
        void (*units)(int);
    } sets[] = {{"avx2", avx2_units}, {"avx512", avx512_units}};
    for (int s = 0; s < 2; s++) {
        if (!te_cpu_kernels_named(sets[s].name)) continue;
        const double one = alone_on(cpus, 1, sets[s].units);
        printf("%s without loads: one thread %.1f G/s, %d threads %.1f", sets[s].name, one, n,
               alone_on(cpus, n, sets[s].units));
        for (int i = 1; i < n && s == 0; i++) {
            const int two[2] = {cpus[0], cpus[i]};
            printf("%s%.2f", i == 1 ? "; two threads beside one, processor 0 and another: " : " ",
                   alone_on(two, 2, sets[s].units) / one);
        }
        printf("\n");
    }
}

/* ---- reading ---- */

/* With the hardware's prefetcher alone, or 8 KiB fetched ahead as row kernels do: which is faster depends on the machine. */
static void read_some(void *ctx, te_team *team) {
    bench *b = ctx;
    const size_t ahead = b->read_ahead;
    int64_t lo, hi, sum[8] = {0};
    te_share(team, (int64_t)b->read_bytes, 4096, &lo, &hi);
    for (const uint8_t *p = b->w + b->read_at + lo; p + 512 <= b->w + b->read_at + hi; p += 512)
        for (int i = 0; i < 8; i++) {
            int64_t v;
            if (ahead) __builtin_prefetch(p + 64 * i + ahead, 0, 2);
            memcpy(&v, p + 64 * i, 8);
            sum[i] += v;
        }
    for (int i = 1; i < 8; i++) sum[0] += sum[i];
    b->sink[team->ith] = sum[0];
}
static double read_rate(te_pool *pool, bench *b, size_t n_bytes) {
    double best = 0;
    b->read_bytes = n_bytes < b->n_bytes ? n_bytes : b->n_bytes;
    for (b->read_ahead = 0; b->read_ahead <= 8192; b->read_ahead += 8192) {
        if (b->read_at + b->read_bytes > b->n_bytes) b->read_at = 0;
        const double start = now();
        te_pool_run(pool, read_some, b);
        const double rate = (double)b->read_bytes / (now() - start) * 1e-9;
        b->read_at += b->read_bytes;
        if (rate > best) best = rate;
    }
    return best;
}

/* ---- products ---- */

static void layers(void *ctx, te_team *team) {
    bench *b = ctx;
    const size_t row = te_row_bytes(b->type, COLS), long_row = te_row_bytes(b->type, N_FF);
    if (team->ith == 0) b->nth = team->nth;
    for (int32_t i = 0; i < b->n; i++) {
        const uint8_t *w = b->w + b->layer_bytes * (size_t)((b->first + i) % b->n_layers);
        te_linear own[4][3];
        static const int32_t rows[4][3] = {{COLS, COLS, COLS}, {COLS}, {N_FF, N_FF}, {COLS}}, n[4] = {3, 1, 2, 1};
        for (int j = 0; j < 4; j++) {
            const int32_t cols = j == 3 ? N_FF : COLS;
            for (int p = 0; p < n[j]; p++) {
                const te_mat m = {w, j == 3 ? long_row : row, b->type, cols, rows[j][p]};
                own[j][p] = (te_linear){.w = m, .y = b->y[p], .ldy = N_FF, .way = TE_BY_ROWS};
                w += m.stride * (size_t)m.n_rows;
            }
            te_op_linear(team, b->ws, own[j], n[j], b->x, N_FF, b->n_tok);
            te_barrier(team);
        }
    }
}
/* Seconds of one layer. */
static double layer_time(te_pool *pool, bench *b, int32_t n_tok) {
    b->n_tok = n_tok;
    const double start = now();
    te_pool_run(pool, layers, b);
    const double seconds = now() - start;
    b->first = (b->first + b->n) % b->n_layers;
    return seconds / b->n;
}

/* Each member's own rows, which fit into half a second cache of 1 MB. */
static void cached(void *ctx, te_team *team) {
    bench *b = ctx;
    const te_row_kernels *k = &b->k->row[b->type];
    const size_t act = ((k->act_bytes(COLS) + 63) / 64 | 1) * 64, row = te_row_bytes(b->type, COLS);
    const int32_t n = (int32_t)((448u << 10) / row / 16 * 16);
    const te_mat m = {b->w + (size_t)team->ith * row * (size_t)n, row, b->type, COLS, n};
    const te_rows rows = {NULL, 0, n};
    const te_ahead own = {&m, {NULL, 0, n}};
    char *acts = te_os_alloc(act * MOST);
    float *y = te_os_alloc((size_t)n * MOST * sizeof(float));
    if (!acts || !y) exit(1);
    for (int32_t t = 0; t < b->n_tok; t++) k->act_pack(b->x + (size_t)t * N_FF, COLS, acts + act * (size_t)t);
    for (int again = 0; again < 2; again++) {
        int64_t done = 0;
        te_barrier(team);
        const double start = now();
        double end = start;
        for (; end - start < (again ? 0.008 : 0.002); end = now(), done += n) {
            if (b->n_tok == 1)
                k->dot(&m, rows, own, acts, y);
            else
                k->dot_batch(&m, rows, own, (te_tokens){NULL, b->n_tok}, acts, act, y, (size_t)n);
        }
        b->rate[team->ith] = (double)done * COLS * b->n_tok / (end - start) * 1e-9;
        te_barrier(team);
    }
    b->nth = team->nth;
    te_os_free(acts, act * MOST);
    te_os_free(y, (size_t)n * MOST * sizeof(float));
}
static double cached_rate(te_pool *pool, bench *b, int32_t n_tok) {
    double sum = 0;
    b->n_tok = n_tok;
    te_pool_run(pool, cached, b);
    for (int32_t i = 0; i < b->nth; i++) sum += b->rate[i];
    return sum;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}
static double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, ascending);
    return (v[(n - 1) / 2] + v[n / 2]) / 2;
}

static void run(bench *b, te_pool *pool, int rounds) {
    const int32_t nth = te_pool_n_threads(pool);
    const te_workspace_limits limits = {nth, MOST, N_FF, N_FF, false};
    if (te_workspace_new(b->k, limits, &b->ws) != TE_OK) exit(1);
    const int32_t some = (int32_t)((((size_t)nth * 64) << 20) / b->layer_bytes);
    b->n = some < 1 ? 1 : some > b->n_layers ? b->n_layers : some;
    double seconds[WIDTHS][MAX_ROUNDS], core[WIDTHS][MAX_ROUNDS], read[MAX_ROUNDS];
    int32_t least = nth;
    layer_time(pool, b, 2);
    for (int r = 0; r < rounds; r++) {
        read[r] = read_rate(pool, b, (size_t)b->n * b->layer_bytes);
        for (int j = 0; j < WIDTHS; j++) {
            const int i = r % 2 ? WIDTHS - 1 - j : j;
            seconds[i][r] = layer_time(pool, b, 1 << i);
            if (b->nth < least) least = b->nth;
            core[i][r] = cached_rate(pool, b, 1 << i);
        }
    }
    const double read_all = median(read, rounds), weights = 4.0 * COLS * COLS + 3.0 * COLS * N_FF;
    printf("%-9s %-5s %2d threads%s read %5.1f GB/s |", b->k->name, te_type_get(b->type)->name, nth,
           least < nth ? " (fewer at times)" : "", read_all);
    double one = 0, last = 0;
    for (int i = 0; i < WIDTHS; i++) {
        const double s = median(seconds[i], rounds), c = median(core[i], rounds), tokens = (1 << i) / s,
                     bytes = (double)b->layer_bytes / s * 1e-9, products = tokens * weights * 1e-9;
        if (i == 0) one = tokens;
        printf(" %d: %.0f G/s %.0f GB/s (%.0f %%) core %.0f %% x %.2f%s |", 1 << i, products, bytes,
               100 * bytes / read_all, 100 * products / c, tokens / one, tokens < last ? " FEWER" : "");
        last = tokens;
    }
    printf("\n");
    fflush(stdout);
    te_workspace_free(b->ws);
}

/* ---- weights ---- */

static uint64_t random_bits(void) {
    static uint64_t s = 88172645463325252u;
    s ^= s << 13;
    s ^= s >> 7;
    return s ^= s << 17;
}
/* Random blocks, whose scales are of moderate size. */
static void fill_layer(bench *b) {
    static const struct {
        int32_t type, at[2];
    } halves[] = {{TE_F16, {0, 0}},  {TE_Q8_0, {0, 0}}, {TE_Q4_0, {0, 0}},
                  {TE_Q4_K, {0, 2}}, {TE_Q5_K, {0, 2}}, {TE_Q6_K, {208, 208}}};
    const size_t block = (size_t)te_type_get(b->type)->block_bytes;
    for (size_t i = 0; i + 8 <= b->layer_bytes; i += 8) {
        const uint64_t v = random_bits();
        memcpy(b->w + i, &v, 8);
    }
    for (size_t i = 0; i < b->layer_bytes; i += block)
        for (size_t k = 0; k < sizeof halves / sizeof halves[0]; k++)
            for (int half = 0; half < 2 && halves[k].type == b->type; half++)
                b->w[i + (size_t)halves[k].at[half] + 1] = 0x20;
}
static void copy_layers(void *ctx, te_team *team) {
    bench *b = ctx;
    for (int32_t i = 1 + team->ith; i < b->n_layers; i += team->nth)
        memcpy(b->w + b->layer_bytes * (size_t)i, b->w, b->layer_bytes);
}

static bool named(const char *list, const char *name) {
    const size_t n = strlen(name);
    for (const char *p = list; p; p = strchr(p, ','), p = p ? p + 1 : NULL)
        if (strncmp(p, name, n) == 0 && (p[n] == 0 || p[n] == ',')) return true;
    return false;
}

int main(int argc, char **argv) {
    static const int32_t types[] = {TE_F16, TE_Q8_0, TE_Q4_0, TE_Q4_K, TE_Q5_K, TE_Q6_K};
    static const char *const isas[] = {"avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx"};
    int rounds = argc > 4 ? atoi(argv[4]) : 5, cpus[64], n_cpus = 0;
    if (argc < 4 || rounds < 1 || rounds > MAX_ROUNDS) {
        fprintf(stderr, "bench_tokens: THREADS[,THREADS ...] ISA[,ISA ...] TYPE[,TYPE ...] [ROUNDS]\n");
        return 2;
    }
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    for (int i = 0; i < CPU_SETSIZE && n_cpus < 64; i++)
        if (CPU_ISSET(i, &set)) cpus[n_cpus++] = i;
    arithmetic(cpus, n_cpus);
    bench b = {.n_bytes = (size_t)1500 << 20};
    b.w = te_os_alloc(b.n_bytes);
    b.x = te_os_alloc(sizeof(float) * N_FF * MOST);
    if (!b.w || !b.x) return 1;
    for (int i = 0; i < 3; i++)
        if (!(b.y[i] = te_os_alloc(sizeof(float) * N_FF * MOST))) return 1;
    for (int i = 0; i < N_FF * MOST; i++) b.x[i] = (float)(int64_t)random_bits() * 0x1p-63f;
    for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
        if (!named(argv[3], te_type_get(types[t])->name)) continue;
        bool filled = false;
        for (const char *p = argv[1]; p; p = strchr(p, ','), p = p ? p + 1 : NULL) {
            te_pool *pool;
            if (atoi(p) < 1 || atoi(p) > 64 || te_pool_new(atoi(p), &pool) != TE_OK) return 2;
            b.type = types[t];
            b.layer_bytes = 4 * te_row_bytes(b.type, COLS) * COLS + 2 * te_row_bytes(b.type, COLS) * N_FF +
                            te_row_bytes(b.type, N_FF) * COLS;
            b.n_layers = (int32_t)(b.n_bytes / b.layer_bytes);
            b.first = 0;
            if (!filled) fill_layer(&b), te_pool_run(pool, copy_layers, &b);
            filled = true;
            for (size_t s = 0; s < sizeof isas / sizeof isas[0]; s++) {
                b.k = named(argv[2], isas[s]) ? te_cpu_kernels_named(isas[s]) : NULL;
                if (b.k) run(&b, pool, rounds);
            }
            te_pool_free(pool);
        }
    }
    return 0;
}
