/* heads_check.c - attention's kernels of every table that this machine can run, against doubles: short rows against
 * several vectors, and a softmax in parts. test_heads.py has more cases; this runs where Python does not.
 *
 *     heads_check     prints what was checked; exits with 1 if a value is off
 */
#define _GNU_SOURCE
#include <stdio.h>

#include "cpu/te_kernels.h"
#include "kernels_matrix.h"

#define EPS      0x1p-23
#define COUNT(a) ((int32_t)(sizeof(a) / sizeof *(a)))

static const te_kernels *table;
static char what[128];
static long n_checked, n_off;

static void near(int32_t index, float value, double reference, double limit) {
    n_checked++;
    if (fabs((double)value - reference) <= limit) return;
    fprintf(stderr, "%s %s, [%d]: %.9g instead of %.9g, allowed is %.3g\n", table->name, what, (int)index,
            (double)value, reference, limit);
    if (++n_off == 20) exit(1);
}

enum { PAD = 16 };

/* n rows of len floats, PAD more between them and behind: those must neither be read nor written. */
static float *padded(int32_t n, int32_t len, bool filled) {
    float *p = memory((size_t)n * (size_t)(len + PAD) * sizeof(float), 0);
    for (int32_t i = 0; i < n * (len + PAD); i++)
        p[i] = i % (len + PAD) >= len ? filled ? NAN : CANARY : random_normal();
    return p;
}

static void check_rows(int32_t type, int32_t cols, int32_t n_rows, int32_t n) {
    matrix a = matrix_new(type, n_rows, cols, 0, RANDOM, n % 2 == 0);
    float *x = padded(n, cols, true), *weights = padded(n, n_rows, true), *dots = padded(n, n_rows, false),
          *sums = padded(n, cols, false), *before = padded(n, cols, false);
    memcpy(before, sums, sizeof(float) * (size_t)n * (size_t)(cols + PAD));
    snprintf(what, sizeof what, "rows of %s, %d x %d, %d vectors", te_type_get(type)->name, (int)n_rows, (int)cols,
             (int)n);
    table->rows_dot(&a.m, n_rows > 3 ? a.m.w : NULL, x, (size_t)(cols + PAD), n, dots, (size_t)(n_rows + PAD));
    table->rows_sum(&a.m, n_rows > 3 ? a.m.w : NULL, weights, (size_t)(n_rows + PAD), n, sums, (size_t)(cols + PAD));
    for (int32_t i = 0; i < n; i++) {
        for (int32_t r = 0; r < n_rows + PAD; r++) {
            double sum = r < n_rows ? 0 : (double)CANARY, size = 0;
            for (int32_t c = 0; c < cols && r < n_rows; c++) {
                const double term = a.w[r * cols + c] * (double)x[i * (cols + PAD) + c];
                sum += term;
                size += fabs(term);
            }
            near(r, dots[i * (n_rows + PAD) + r], sum, 8 * EPS * sqrt(cols) * size);
        }
        for (int32_t c = 0; c < cols + PAD; c++) {
            double sum = (double)before[i * (cols + PAD) + c], size = c < cols ? fabs(sum) : 0;
            for (int32_t r = 0; r < n_rows && c < cols; r++) {
                const double term = a.w[r * cols + c] * (double)weights[i * (n_rows + PAD) + r];
                sum += term;
                size += fabs(term);
            }
            near(c, sums[i * (cols + PAD) + c], sum, 8 * EPS * sqrt(n_rows + 1) * size);
        }
    }
    free(x);
    free(weights);
    free(dots);
    free(sums);
    free(before);
    matrix_free(&a);
}

static void check_exp_sum(int32_t n, float spread, float scale, float top) {
    float *x = floats(n), most = top;
    double *s = memory((size_t)n * sizeof *s, 0), total = 0, allowed = 0;
    for (int32_t i = 0; i < n; i++) {
        x[i] = i % 5 == 3 ? -INFINITY : random_normal() * spread;
        if (x[i] > most) most = x[i];
    }
    for (int32_t i = 0; i < n; i++) s[i] = ((double)x[i] - (double)most) * (double)scale;
    snprintf(what, sizeof what, "exp_sum of %d, spread %g", (int)n, (double)spread);
    const float sum = table->exp_sum(x, n, scale, &top);
    near(-1, top, (double)most, 0);
    for (int32_t i = 0; i < n; i++) {
        const double p = exp(s[i]), limit = isinf(s[i]) ? 0 : (1e-6 + EPS * fabs(s[i])) * p + 1e-37;
        near(i, x[i], p, limit);
        total += p;
        allowed += limit;
    }
    near(n, sum, total, allowed + EPS * sqrt(n) * total);
    for (int32_t i = 0; i < PAD; i++) near(n + i, x[n + i], (double)CANARY, 0);
    free(x);
    free(s);
}

static void check_soft_cap(int32_t n, float spread, float scale, float cap) {
    float *x = floats(n);
    double *y = memory((size_t)n * sizeof *y, 0);
    for (int32_t i = 0; i < n; i++) {
        x[i] = random_normal() * spread;
        y[i] = (double)cap * tanh((double)scale * (double)x[i] / (double)cap);
    }
    snprintf(what, sizeof what, "soft_cap of %d, spread %g", (int)n, (double)spread);
    table->soft_cap(x, n, scale, cap);
    for (int32_t i = 0; i < n; i++) near(i, x[i], y[i], 4 * EPS * (double)cap);
    for (int32_t i = 0; i < PAD; i++) near(n + i, x[n + i], (double)CANARY, 0);
    free(x);
    free(y);
}

int main(void) {
    static const char *const tables[] = {"scalar",      "avx2", "avx2_vnni", "avx512",
                                         "avx512_bf16", "amx",  "neon",      "neon_dot"};
    static const int32_t widths[][3] = {{TE_F32, 5, 128},   {TE_F16, 24, 256},  {TE_BF16, 24, 128},
                                        {TE_Q8_0, 32, 544}, {TE_Q4_0, 64, 128}, {TE_Q4_K, 256, 768}};
    static const int32_t rows[] = {1, 3, 37, 64}, vectors[] = {1, 2, 3, 7, 16}, lengths[] = {1, 7, 8, 17, 64, 255, 256};
    long n_all = 0;
    for (int32_t i = 0; i < COUNT(tables); i++) {
        table = te_cpu_kernels_named(tables[i]);
        if (!table) continue;
        n_checked = 0;
        random_state = 1;
        for (int32_t k = 0; k < COUNT(widths); k++)
            for (int32_t w = 1; w < 3; w++)
                for (int32_t r = 0; r < COUNT(rows); r++)
                    for (int32_t v = 0; v < COUNT(vectors); v++)
                        check_rows(widths[k][0], widths[k][w], rows[r], vectors[v]);
        for (int32_t k = 0; k < COUNT(lengths); k++) {
            check_exp_sum(lengths[k], 1, 1, -INFINITY);
            check_exp_sum(lengths[k], 30, 0.125f, 5);
            check_exp_sum(lengths[k], 0.1f, 2, 1e4f);
            check_soft_cap(lengths[k], 1, 0.125f, 50);
            check_soft_cap(lengths[k], 100, 1, 30);
        }
        printf("%s: %ld values, %ld off\n", table->name, n_checked, n_off);
        n_all += n_checked;
    }
    return n_off > 0 || n_all == 0;
}
