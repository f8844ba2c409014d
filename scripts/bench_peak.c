/* bench_peak.c - what the multiplying units of this machine do at most, without memory: the flat part of a roofline.
 *
 *     cc -O2 scripts/bench_peak.c -pthread -o bench_peak
 *     ./bench_peak [threads]
 *
 * Every thread multiplies random numbers that stay in registers (tiles), in independent chains, for a fifth of a
 * second. Printed as one line of JSON: billions of multiplications and additions per second of all threads, for each
 * set that the processor has. AMX runs slower on random numbers than on zeros, and these are random. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CHAINS = 12, TURNS = 20000 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint32_t random_bits(uint64_t *s) {
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    return (uint32_t)(*s >> 16);
}

/* Numbers near 1 in magnitude: single precision, or pairs of bfloat16. */
static void fill(void *p, size_t n_bytes, int is_int8, uint64_t seed) {
    uint64_t s = seed * 2654435761u + 88172645463325252u;
    for (size_t i = 0; i + 4 <= n_bytes; i += 4) {
        uint32_t v = random_bits(&s);
        if (!is_int8) v = (v & 0x807f807fu) | 0x3f003f00u;
        memcpy((uint8_t *)p + i, &v, 4);
    }
}

/* Each returns the operations of TURNS turns; *sink keeps them from being dropped. */
__attribute__((target("avx2,fma"))) static double fma_avx2(float *sink) {
    float x[8];
    __m256 acc[CHAINS];
    fill(x, sizeof x, 0, 1);
    const __m256 a = _mm256_loadu_ps(x), b = _mm256_mul_ps(a, _mm256_set1_ps(0.5f));
    for (int c = 0; c < CHAINS; c++) acc[c] = _mm256_mul_ps(a, _mm256_set1_ps((float)c));
    for (int i = 0; i < TURNS; i++)
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) acc[c] = _mm256_fmadd_ps(acc[c], b, a);
    for (int c = 0; c < CHAINS; c++) *sink += _mm256_cvtss_f32(acc[c]);
    return 2.0 * 8 * CHAINS * TURNS;
}

__attribute__((target("avx512f"))) static double fma_avx512(float *sink) {
    float x[16];
    __m512 acc[CHAINS];
    fill(x, sizeof x, 0, 1);
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_mul_ps(a, _mm512_set1_ps(0.5f));
    for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_mul_ps(a, _mm512_set1_ps((float)c));
    for (int i = 0; i < TURNS; i++)
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_fmadd_ps(acc[c], b, a);
    for (int c = 0; c < CHAINS; c++) *sink += _mm512_cvtss_f32(acc[c]);
    return 2.0 * 16 * CHAINS * TURNS;
}

__attribute__((target("avx512f,avx512vnni"))) static double int8_vnni(float *sink) {
    uint8_t x[64];
    __m512i acc[CHAINS];
    fill(x, sizeof x, 1, 1);
    const __m512i a = _mm512_loadu_si512(x), b = _mm512_xor_si512(a, _mm512_set1_epi8(0x55));
    for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_set1_epi32(c);
    for (int i = 0; i < TURNS; i++)
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_dpbusd_epi32(acc[c], a, b);
    for (int c = 0; c < CHAINS; c++) *sink += (float)_mm_cvtsi128_si32(_mm512_castsi512_si128(acc[c]));
    return 2.0 * 64 * CHAINS * TURNS;
}

__attribute__((target("avx512f,avx512bf16"))) static double bf16_avx512(float *sink) {
    float x[16];
    __m512 acc[CHAINS];
    fill(x, sizeof x, 0, 1);
    const __m512 v = _mm512_loadu_ps(x);
    const __m512bh a = (__m512bh)v, b = (__m512bh)_mm512_mul_ps(v, _mm512_set1_ps(0.5f));
    for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_mul_ps(v, _mm512_set1_ps((float)c));
    for (int i = 0; i < TURNS; i++)
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) acc[c] = _mm512_dpbf16_ps(acc[c], a, b);
    for (int c = 0; c < CHAINS; c++) *sink += _mm512_cvtss_f32(acc[c]);
    return 2.0 * 32 * CHAINS * TURNS;
}

typedef struct tile_config {
    uint8_t palette, start_row, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Four tiles of sums, two of each factor: the shape of a matrix product. */
#define TILES(NAME, INSTRUCTION, IS_INT8, PER_TILE)                                                                    \
    __attribute__((target("amx-tile,amx-bf16,amx-int8"))) static double NAME(float *sink) {                            \
        _Alignas(64) uint8_t x[4][1024];                                                                               \
        _Alignas(64) float out[256];                                                                                   \
        tile_config config = {.palette = 1};                                                                           \
        for (int t = 0; t < 8; t++) {                                                                                  \
            config.row_bytes[t] = 64;                                                                                  \
            config.rows[t] = 16;                                                                                       \
        }                                                                                                              \
        _tile_loadconfig(&config);                                                                                     \
        fill(x, sizeof x, IS_INT8, 1);                                                                                 \
        _tile_zero(0);                                                                                                 \
        _tile_zero(1);                                                                                                 \
        _tile_zero(2);                                                                                                 \
        _tile_zero(3);                                                                                                 \
        _tile_loadd(4, x[0], 64);                                                                                      \
        _tile_loadd(5, x[1], 64);                                                                                      \
        _tile_loadd(6, x[2], 64);                                                                                      \
        _tile_loadd(7, x[3], 64);                                                                                      \
        for (int i = 0; i < TURNS / 10; i++) {                                                                         \
            INSTRUCTION(0, 4, 6);                                                                                      \
            INSTRUCTION(1, 4, 7);                                                                                      \
            INSTRUCTION(2, 5, 6);                                                                                      \
            INSTRUCTION(3, 5, 7);                                                                                      \
        }                                                                                                              \
        _tile_stored(0, out, 64);                                                                                      \
        _tile_release();                                                                                               \
        *sink += out[0];                                                                                               \
        return 4.0 * PER_TILE * (TURNS / 10);                                                                          \
    }
TILES(bf16_amx, _tile_dpbf16ps, 0, 16384 * 1.0)
TILES(int8_amx, _tile_dpbssd, 1, 32768 * 1.0)

/* Linux grants the tiles on request, to the process. */
static int has_amx(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    unsigned a, b, c, d = 0;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    return (d >> 22 & 1) && (d >> 25 & 1) && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA);
}

typedef double work(float *sink);
typedef struct job {
    work *run;
    pthread_barrier_t *barrier;
    double rate;
    float sink;
} job;

static void *body(void *p) {
    job *j = p;
    j->run(&j->sink);
    pthread_barrier_wait(j->barrier);
    const double start = now();
    double n = 0;
    while (now() - start < 0.2) n += j->run(&j->sink);
    j->rate = n / (now() - start);
    return NULL;
}

int main(int argc, char **argv) {
    const int n = argc > 1 ? atoi(argv[1]) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    static const char *const names[] = {"avx2_fma", "avx512_fma", "vnni_int8", "avx512_bf16", "amx_bf16", "amx_int8"};
    work *const works[] = {fma_avx2, fma_avx512, int8_vnni, bf16_avx512, bf16_amx, int8_amx};
    const int amx = has_amx();
    const int has[] = {__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
                       __builtin_cpu_supports("avx512f"),
                       __builtin_cpu_supports("avx512vnni"),
                       __builtin_cpu_supports("avx512bf16"),
                       amx,
                       amx};
    pthread_t threads[256];
    job jobs[256];
    if (n < 1 || n > 256) {
        fprintf(stderr, "bench_peak: needs 1 to 256 threads\n");
        return 2;
    }
    printf("{\"threads\": %d", n);
    for (int w = 0; w < (int)(sizeof works / sizeof *works); w++) {
        if (!has[w]) continue;
        pthread_barrier_t barrier;
        pthread_barrier_init(&barrier, NULL, (unsigned)n);
        double rate = 0;
        for (int i = 0; i < n; i++) {
            jobs[i] = (job){.run = works[w], .barrier = &barrier};
            if (pthread_create(&threads[i], NULL, body, &jobs[i])) return 1;
        }
        for (int i = 0; i < n; i++) {
            pthread_join(threads[i], NULL);
            rate += jobs[i].rate;
        }
        pthread_barrier_destroy(&barrier);
        printf(", \"%s\": %.0f", names[w], rate * 1e-9);
    }
    printf("}\n");
    return 0;
}
#else
int main(void) {
    fprintf(stderr, "bench_peak: knows the instruction sets of x86-64 alone\n");
    return 2;
}
#endif
