/* te_tensor.h - what kernels are given: a matrix of rows in some weight format, and which of its rows. */
#ifndef TE_TENSOR_H
#define TE_TENSOR_H

#include <stddef.h>
#include <stdint.h>

/* A matrix [n_rows][cols], rows `stride` bytes apart, row 0 at w. cols is a multiple of the format's block. */
typedef struct te_mat {
    const void *w;
    size_t stride;
    int32_t type; /* te_type */
    int32_t cols;
    int32_t n_rows;
} te_mat;

/* Which rows: row[0..n-1] ascending, or first..first+n-1 when row is NULL. Dense and sparse are the same kernel. */
typedef struct te_rows {
    const int32_t *row;
    int32_t first;
    int32_t n;
} te_rows;

/* The curve of an activation xIELU (TE_XIELU):
 *     alpha_p x^2 + beta x    for x > 0;    alpha_n (exp(min(x, eps)) - 1 - x) + beta x    else */
typedef struct te_xielu {
    float alpha_p, alpha_n, beta, eps;
} te_xielu;

static inline int32_t te_row_at(te_rows r, int32_t i) { return r.row ? r.row[i] : r.first + i; }
static inline te_rows te_rows_part(te_rows r, int32_t lo, int32_t hi) {
    te_rows p = {r.row ? r.row + lo : (const int32_t *)0, r.row ? 0 : r.first + lo, hi - lo};
    return p;
}

#endif
