/* te_cpu.c - chooses the kernel table: what the processor has, what the operating system saves and permits, what
 * POWERINFER_ISA names. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../core/te_os.h"
#include "../core/te_status.h"
#include "te_kernels.h"
#include "parts.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct cpuid_regs {
    unsigned a, b, c, d;
} cpuid_regs;

static cpuid_regs cpuid(unsigned leaf, unsigned subleaf) { /* zeros if there is no such leaf */
    cpuid_regs r = {0, 0, 0, 0};
    if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) memset(&r, 0, sizeof r);
    return r;
}

static bool all(unsigned word, unsigned bits) { return (word & bits) == bits; }

/* True if the operating system saves all of these parts of the processor's state (bits of XCR0). */
static bool saved(unsigned parts) {
    if (!(cpuid(1, 0).c & 1u << 27)) return false; /* OSXSAVE */
    unsigned lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return all(lo, parts);
}

static bool has_avx2(void) {
    const unsigned fma = 1u << 12, popcnt = 1u << 23, avx = 1u << 28, f16c = 1u << 29, avx2 = 1u << 5,
                   sse_and_avx = 0x6;
    return all(cpuid(1, 0).c, fma | popcnt | avx | f16c) && all(cpuid(7, 0).b, avx2) && saved(sse_and_avx);
}

static bool has_avx2_vnni(void) { return has_avx2() && all(cpuid(7, 1).a, 1u << 4); }

static bool has_avx512(void) {
    const unsigned f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, vnni = 1u << 11;
    const cpuid_regs r = cpuid(7, 0);
    const unsigned masks_and_zmm = 0xe0;
    return has_avx2() && all(r.b, f | dq | bw | vl) && all(r.c, vnni) && saved(masks_and_zmm);
}

static bool has_avx512_bf16(void) { return has_avx512() && all(cpuid(7, 1).a, 1u << 5); }

/* Linux hands out the tile registers on request, for the whole process and its later threads. */
static bool has_amx(void) {
#if defined(TE_EMULATE_AMX)
    return has_avx512_bf16();
#else
    const unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24, amx_int8 = 1u << 25;
    if (!has_avx512_bf16() || !all(cpuid(7, 0).d, amx_bf16 | amx_tile | amx_int8)) return false;
    if (!saved(3u << 17)) return false; /* tile configuration, tile data */
#if defined(__linux__)
    const long arch_request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, arch_request_permission, tile_data) == 0;
#else
    return false;
#endif
#endif
}
#endif

#if defined(TE_HAS_NEON_DOT)
#if defined(__linux__)
#include <sys/auxv.h>
#endif

static bool has_neon_dot(void) {
#if defined(__linux__)
    const unsigned long asimddp = 1ul << 20;
    return (getauxval(AT_HWCAP) & asimddp) != 0;
#else
    return false;
#endif
}
#endif

static bool always(void) { return true; }

#define PARTS(isa)                                                                                                     \
    te_##isa##_rows_float, te_##isa##_rows_32, te_##isa##_rows_k, te_##isa##_rows_256, te_##isa##_vectors,             \
        te_##isa##_gemm

te_kernels te_kernels_scalar;
#if defined(__x86_64__)
te_kernels te_kernels_avx2, te_kernels_avx2_vnni, te_kernels_avx512, te_kernels_avx512_bf16, te_kernels_amx;
#elif defined(__aarch64__)
te_kernels te_kernels_neon;
#if defined(TE_HAS_NEON_DOT)
te_kernels te_kernels_neon_dot;
#endif
#endif

/* Best last. A table begins as a copy of `base`, which has been filled before it; then its parts fill it in order. */
static const struct {
    const char *name;
    te_kernels *kernels;
    const te_kernels *base;
    bool (*runs)(void);
    te_part *parts[9];
} tables[] = {
    {"scalar", &te_kernels_scalar, NULL, always, {PARTS(scalar)}},
#if defined(__x86_64__)
    {"avx2", &te_kernels_avx2, NULL, has_avx2, {PARTS(avx2), te_avx2_gemm_int8}},
    {"avx2_vnni",
     &te_kernels_avx2_vnni,
     &te_kernels_avx2,
     has_avx2_vnni,
     {te_avx2_vnni_rows_32, te_avx2_vnni_rows_k, te_avx2_vnni_rows_256}},
    {"avx512", &te_kernels_avx512, NULL, has_avx512, {PARTS(avx512), te_avx512_gemm_int8, te_avx512_gemm_int8_k}},
    {"avx512_bf16", &te_kernels_avx512_bf16, &te_kernels_avx512, has_avx512_bf16, {te_avx512_bf16_gemm_bf16}},
    {"amx", &te_kernels_amx, &te_kernels_avx512, has_amx, {te_amx_gemm_amx}},
#elif defined(__aarch64__)
    {"neon", &te_kernels_neon, NULL, always, {PARTS(neon)}},
#if defined(TE_HAS_NEON_DOT)
    {"neon_dot", &te_kernels_neon_dot, NULL, has_neon_dot, {PARTS(neon_dot)}},
#endif
#endif
};
static const int n_tables = sizeof tables / sizeof tables[0];

/* Fills all tables that this machine can run, once. */
static void fill_tables(void) {
    static te_mutex mutex;
    static bool done;
    te_os_mutex_lock(&mutex);
    for (int i = 0; !done && i < n_tables; i++) {
        if (!tables[i].runs()) continue;
        if (tables[i].base) *tables[i].kernels = *tables[i].base;
        for (te_part *const *part = tables[i].parts; *part; part++) (*part)(tables[i].kernels);
        tables[i].kernels->name = tables[i].name;
    }
    done = true;
    te_os_mutex_unlock(&mutex);
}

const te_kernels *te_cpu_kernels_named(const char *name) {
    fill_tables();
    for (int i = 0; i < n_tables; i++)
        if (strcmp(tables[i].name, name) == 0) return tables[i].runs() ? tables[i].kernels : NULL;
    return NULL;
}

static bool known(const char *name) {
    for (int i = 0; i < n_tables; i++)
        if (strcmp(tables[i].name, name) == 0) return true;
    return false;
}

/* "scalar, avx2 or avx512" */
static const char *names(char *out, size_t n_out) {
    size_t n = 0;
    for (int i = 0; i < n_tables && n < n_out; i++) {
        const char *before = i == 0 ? "" : i < n_tables - 1 ? ", " : " or ";
        n += (size_t)snprintf(out + n, n_out - n, "%s%s", before, tables[i].name);
    }
    return out;
}

const te_kernels *te_cpu_kernels(void) {
    static _Atomic(const te_kernels *) chosen;
    const te_kernels *k = atomic_load_explicit(&chosen, memory_order_acquire);
    if (k) return k;
    fill_tables();
    const char *name = getenv("POWERINFER_ISA");
    if (name && *name) {
        k = te_cpu_kernels_named(name);
        if (!k && known(name)) {
            te_fail(TE_UNSUPPORTED, "POWERINFER_ISA is %s, which this machine cannot run", name);
        } else if (!k) {
            char text[128];
            te_fail(TE_ARGUMENT, "POWERINFER_ISA is \"%s\"; it can be %s", name, names(text, sizeof text));
        }
    } else {
        for (int i = 0; i < n_tables; i++)
            if (tables[i].runs()) k = tables[i].kernels;
    }
    /* Threads that come here together choose the same table. */
    if (k) atomic_store_explicit(&chosen, k, memory_order_release);
    return k;
}
