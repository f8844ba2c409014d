/* kernels_matrix.h - what kernels_check.c works on: aligned memory, floats that are followed by values that must stay, and
 * matrices of every format between pages that nobody may touch. The includer defines _GNU_SOURCE. */
#ifndef KERNELS_MATRIX_H
#define KERNELS_MATRIX_H

#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/te_quant.h"
#include "core/te_tensor.h"
#include "kernels_reference.h"

#define CANARY (-77.25f)

static inline void *memory(size_t n_bytes, int fill) { /* 64-byte aligned */
    if (n_bytes > PTRDIFF_MAX / 2) exit(2);            /* of a negative count, which gcc 13 thinks possible */
    const size_t n = (n_bytes + 64) / 64 * 64;
    void *p = aligned_alloc(64, n);
    if (!p) exit(2);
    memset(p, fill, n);
    return p;
}

static inline float *floats(int32_t n) { /* n floats, and sixteen more that must stay */
    float *p = memory(((size_t)n + 16) * sizeof(float), 0);
    for (int32_t i = 0; i < n + 16; i++) p[i] = CANARY;
    return p;
}

static inline float *normals(int32_t n) {
    float *p = memory((size_t)n * sizeof(float), 0);
    for (int32_t i = 0; i < n; i++) p[i] = random_normal();
    return p;
}

typedef enum fill { RANDOM, WHOLE, LOWEST, HIGHEST, N_FILLS } fill; /* WHOLE: scales 1, so that sums are exact */

typedef struct matrix {
    te_mat m;
    double *w; /* its weights */
    uint8_t *map;
    size_t n_map, page;
} matrix;

static inline size_t row_bytes(int32_t type, int32_t cols) {
    const te_type_info *info = te_type_get(type);
    return (size_t)(cols / info->block_weights) * (size_t)info->block_bytes;
}

static inline void fill_row(uint8_t *row, int32_t type, int32_t cols, fill f) {
    const te_type_info *info = te_type_get(type);
    for (int32_t i = 0; i < cols && is_float(type); i++) {
        const float x = f == WHOLE ? (float)((int)(random_word() % 255) - 127) : random_normal();
        const uint16_t h = type == TE_F16 ? to_half(x) : to_brain(x);
        if (type == TE_F32)
            memcpy(row + 4 * (size_t)i, &x, 4);
        else
            memcpy(row + 2 * (size_t)i, &h, 2);
    }
    const size_t n = is_float(type) ? 0 : row_bytes(type, cols);
    for (size_t i = 0; i < n; i++) {
        row[i] = f == LOWEST ? 0x80 : f == HIGHEST ? 0xff : (uint8_t)random_word();
        /* Without this bit a half is finite and below 2, wherever it stands; so are the scales of other kinds. */
        if (!has_vectors(type)) row[i] &= 0xbf;
    }
    for (int32_t i = 0; i < cols && type == TE_F64; i++) {
        const double x = (double)random_normal();
        memcpy(row + 8 * (size_t)i, &x, 8);
    }
    for (size_t i = 0; i < n && has_vectors(type); i += (size_t)info->block_bytes) {
        const uint64_t r = random_word(); /* between 2^-7 and 2^-6, of both signs */
        const uint16_t one = 0x3c00, scale = (uint16_t)(0x2000 | (r & 0x83ff)),
                       other = (uint16_t)(0x2000 | (r >> 16 & 0x83ff));
        set_scales(type, row + i, f == WHOLE ? one : scale, f == WHOLE ? one : other);
    }
}

/* stride: of the rows, or 0 for none between them. The bytes end at a guarded page, or with `at_start` begin at one. */
static inline matrix matrix_new(int32_t type, int32_t n_rows, int32_t cols, size_t gap, fill f, bool at_start) {
    matrix a = {.m = {.type = type, .cols = cols, .n_rows = n_rows, .stride = row_bytes(type, cols) + gap}};
    const size_t n = a.m.stride * (size_t)n_rows - gap;
    a.page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t inside = (n + a.page - 1) / a.page * a.page;
    a.n_map = inside + 2 * a.page;
    a.map = mmap(NULL, a.n_map, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (a.map == MAP_FAILED) exit(2);
    uint8_t *w = a.map + a.page + (at_start ? 0 : inside - n);
    a.m.w = w;
    a.w = memory((size_t)n_rows * (size_t)cols * sizeof(double), 0);
    float *row = memory((size_t)cols * sizeof(float), 0);
    for (int32_t r = 0; r < n_rows; r++) {
        uint8_t *p = w + (size_t)r * a.m.stride;
        double *out = a.w + (size_t)r * (size_t)cols;
        fill_row(p, type, cols, f);
        if (!has_vectors(type)) te_dequantize_row(type, p, row, cols);
        for (int32_t c = 0; c < cols; c++) out[c] = has_vectors(type) ? weight(type, p, c) : (double)row[c];
    }
    free(row);
    if (mprotect(a.map, a.page, PROT_NONE) != 0 || mprotect(a.map + a.page + inside, a.page, PROT_NONE) != 0) exit(2);
    return a;
}

static inline void matrix_free(matrix *a) {
    munmap(a->map, a->n_map);
    free(a->w);
}

#endif
