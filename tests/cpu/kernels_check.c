/* kernels_check.c - every kernel of every table that this machine can run, against doubles.
 *
 *     kernels_check [TABLE ...]     prints what was checked; exits with 1 if a value is off, with 2 if it cannot run
 *
 * The references are in kernels_reference.h and below. Formats without vector kernels are read by te_dequantize_row,
 * which formats_check holds to the same bits everywhere. Weights end or begin at a page that nobody may touch, results
 * are followed by values that must stay. Tolerances: that of te_kernels.h for sums; exact where all are whole numbers.
 */
#define _GNU_SOURCE
#include <stdio.h>

#include "cpu/te_kernels.h"
#include "kernels_matrix.h"

#define EPS      0x1p-23
#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

/* ---- what is off ---- */

static const te_kernels *table;
static char what[128]; /* kernel, type and shape that are at work */
static long n_checked, n_off;

#define AT(...) snprintf(what, sizeof what, __VA_ARGS__)

static void off(int32_t index, double value, double reference, double limit) {
    fprintf(stderr, "%s %s, [%d]: %.9g instead of %.9g, allowed is %.3g\n", table->name, what, (int)index, value,
            reference, limit);
    if (++n_off == 20) exit(1);
}

static void near(int32_t index, float value, double reference, double limit) {
    n_checked++;
    if (!(fabs((double)value - reference) <= limit)) off(index, (double)value, reference, limit);
}

static void same(int32_t index, int64_t value, int64_t reference) {
    n_checked++;
    if (value != reference) off(index, (double)value, (double)reference, 0);
}

static void untouched(const float *p, int32_t n) {
    for (int32_t i = 0; i < n; i++) near(i, p[i], (double)CANARY, 0);
}

/* ---- rows ---- */

static const int32_t float_widths[] = {1, 5, 7, 16, 17, 31, 64, 80, 333};
static const int32_t block_widths[] = {32, 64, 96, 128, 160, 192, 288, 416, 544};
static const int32_t k_widths[] = {256, 512, 1024};

/* The i-th row length to try for a type; 0 after the last. */
static int32_t width(int32_t type, int i) {
    const int32_t unit = te_type_get(type)->block_weights;
    if (is_float(type)) return i < COUNT(float_widths) ? float_widths[i] : 0;
    if (!has_vectors(type)) return i < 3 ? unit * (2 * i + 1) : 0;
    if (unit == 32) return i < COUNT(block_widths) ? block_widths[i] : 0;
    return i < COUNT(k_widths) ? k_widths[i] : 0;
}

enum { N_ROWS = 9 };
static const int32_t some[] = {0, 3, 4, 8};
static const te_rows row_choices[] = {
    {NULL, 0, N_ROWS}, {NULL, 2, 7}, {NULL, N_ROWS - 1, 1}, {some, 0, 4}, {some, 0, 0}};

static void *packed(const te_row_kernels *k, const float *x, int32_t cols) {
    const size_t n = k->act_bytes(cols);
    uint8_t *act = memory(n + 64, 0xa5);
    k->act_pack(x, cols, act);
    for (int32_t i = 0; i < 64; i++) same(i, act[n + (size_t)i], 0xa5);
    return act;
}

/* Activations: normal; whole numbers, 127 at least once in 32, so that they are their own bytes, and halves between
 * them, which are ties; all of one size. */
static float *activations(int32_t n, fill f) {
    float *x = normals(n);
    for (int32_t i = 0; i < n && f != RANDOM; i++) {
        const int32_t whole = i % 32 == 5 ? 127 : (int32_t)(random_word() % 254) - 127;
        const float tie = i % 4 == 3 ? 0.5f : 0;
        x[i] = f == WHOLE ? (float)whole + tie : f == LOWEST || i % 3 ? 1.0f : -1.0f;
    }
    return x;
}

static void check_dot(const te_row_kernels *k, const matrix *a, const float *x, bool is_exact) {
    const int32_t cols = a->m.cols;
    const bool as_bytes = has_vectors(a->m.type) && !is_float(a->m.type);
    double *seen = memory((size_t)cols * sizeof(double), 0);
    for (int32_t c = 0; c < cols; c++) seen[c] = (double)x[c];
    if (as_bytes) seen_as_bytes(x, cols, seen);
    void *act = packed(k, x, cols);
    const te_ahead aheads[] = {{NULL, {NULL, 0, 0}}, {&a->m, {NULL, N_ROWS - 3, 3}}};
    for (int i = 0; i < 2 * COUNT(row_choices); i++) {
        const te_rows rows = row_choices[i / 2];
        float *y = floats(rows.n);
        k->dot(&a->m, rows, aheads[i % 2], act, y);
        untouched(y + rows.n, 16);
        for (int32_t r = 0; r < rows.n; r++) {
            const double *w = a->w + (size_t)te_row_at(rows, r) * (size_t)cols;
            double sum = 0, size = 0;
            for (int32_t c = 0; c < cols; c++) {
                sum += w[c] * seen[c];
                size += fabs(w[c] * seen[c]);
            }
            near(r, y[r], sum, is_exact && size < 0x1p24 ? 0 : 8 * EPS * sqrt((double)cols) * size);
        }
        free(y);
    }
    free(act);
    free(seen);
}

static void check_axpy(const te_row_kernels *k, const matrix *a, bool is_exact) {
    const int32_t cols = a->m.cols, n_acc = (int32_t)te_acc_floats(cols);
    for (int i = 0; i < COUNT(row_choices); i++) {
        const te_rows rows = row_choices[i];
        float *h = normals(N_ROWS), *acc = floats(n_acc), *y = floats(cols), *before = normals(cols);
        for (int32_t r = 0; r < N_ROWS && is_exact; r++) h[r] = (float)((int)(random_word() % 7) - 3);
        for (int32_t c = 0; c < cols && is_exact; c++) before[c] = (float)c;
        if (rows.n > 2) h[2] = 0;
        memset(acc, 0, (size_t)n_acc * sizeof *acc);
        memcpy(y, before, (size_t)cols * sizeof *y);
        k->axpy(&a->m, rows, (te_ahead){NULL, {NULL, 0, 0}}, h, acc);
        for (int32_t lo = 0; lo < cols; lo += 48) k->acc_add(acc, cols, lo, lo + 48 < cols ? lo + 48 : cols, y);
        untouched(acc + n_acc, 16);
        untouched(y + cols, 16);
        for (int32_t c = 0; c < cols; c++) {
            double sum = (double)before[c], size = fabs((double)before[c]);
            for (int32_t r = 0; r < rows.n; r++) {
                const double term = (double)h[r] * a->w[(size_t)te_row_at(rows, r) * (size_t)cols + (size_t)c];
                sum += term;
                size += fabs(term);
            }
            near(c, y[c], sum, is_exact && size < 0x1p24 ? 0 : 8 * EPS * sqrt((double)rows.n) * size);
        }
        free(h);
        free(acc);
        free(y);
        free(before);
    }
}

static void check_to_f32(const te_row_kernels *k, const matrix *a) {
    const int32_t cols = a->m.cols, unit = te_type_get(a->m.type)->block_weights;
    for (int32_t c0 = 0; c0 < cols; c0 += (cols + unit) / 2 / unit * unit) { /* all, and from the middle on */
        const int32_t n = cols - c0;
        float *y = floats(n);
        k->to_f32(a->m.w, c0, n, y);
        untouched(y + n, 16);
        for (int32_t i = 0; i < n; i++) {
            double most =
                0; /* of the block: where minima are taken off, a small weight is a difference of large ones */
            for (int32_t j = 0; j < unit; j++) most = fmax(most, fabs(a->w[c0 + i / unit * unit + j]));
            near(i, y[i], a->w[c0 + i], unit == 1 ? 0 : 4 * EPS * most);
        }
        free(y);
    }
}

static void check_rows_of(int32_t type) {
    const te_row_kernels *k = &table->row[type];
    const char *name = te_type_get(type)->name;
    const bool as_bytes = has_vectors(type) && !is_float(type);
    int32_t cols;
    for (int i = 0; (cols = width(type, i)) > 0; i++)
        for (fill f = RANDOM; f < (as_bytes ? N_FILLS : has_vectors(type) ? LOWEST : WHOLE); f++) {
            matrix a = matrix_new(type, N_ROWS, cols, i % 3 == 1 ? 6 : 0, f, f == WHOLE);
            float *x = activations(cols, f);
            AT("dot %s, %d columns, fill %d", name, (int)cols, (int)f);
            check_dot(k, &a, x, f == WHOLE);
            AT("axpy %s, %d columns, fill %d", name, (int)cols, (int)f);
            check_axpy(k, &a, f == WHOLE);
            AT("to_f32 %s, %d columns, fill %d", name, (int)cols, (int)f);
            check_to_f32(k, &a);
            free(x);
            matrix_free(&a);
        }
    /* Activations without a size give zeros, or something that is not a number. */
    const float fills[] = {0.0f, 1e-42f, INFINITY, NAN};
    matrix a = matrix_new(type, N_ROWS, 256, 0, RANDOM, false);
    for (int i = 0; i < COUNT(fills) && as_bytes; i++) {
        AT("dot %s, activations of %g", name, (double)fills[i]);
        float *x = memory(256 * sizeof *x, 0), y[N_ROWS];
        for (int32_t c = 0; c < 256; c += 3) x[c] = fills[i];
        void *act = packed(k, x, 256);
        k->dot(&a.m, row_choices[0], (te_ahead){NULL, {NULL, 0, 0}}, act, y);
        for (int32_t r = 0; r < N_ROWS; r++) same(r, i < 2 ? y[r] == 0 : isnan(y[r]), 1);
        free(act);
        free(x);
    }
    matrix_free(&a);
}

/* ---- floats to rows and back ---- */

static void check_16_bits(int32_t type) {
    enum { N = 65536 };
    const te_row_kernels *k = &table->row[type];
    uint16_t *all = memory(N * sizeof *all, 0), *out = memory((N + 1) * sizeof *out, 0xa5);
    float *x = floats(N);
    for (int32_t i = 0; i < N; i++) all[i] = (uint16_t)i;
    AT("to_f32 of all 16-bit words, type %d", (int)type);
    k->to_f32(all, 0, N - 3, x);
    untouched(x + N - 3, 3);
    for (int32_t i = 0; i < N - 3; i++) {
        const double value = type == TE_F16 ? half_value((uint16_t)i) : brain_value((uint16_t)i);
        same(i, isnan(value) ? isnan(x[i]) : (double)x[i] == value && !signbit(x[i]) == !signbit(value), 1);
    }
    /* All words again, between them, and far above and below them. */
    const float factors[] = {1.0f, 1 + 0x1p-11f, 1 + 0x1p-8f, 1 - 0x1p-12f, 0x1p13f, 0x1p-13f};
    for (int f = 0; f < COUNT(factors); f++) {
        AT("from_f32 of 16-bit words times %g, type %d", (double)factors[f], (int)type);
        for (int32_t i = 0; i < N; i++)
            x[i] = (float)(type == TE_F16 ? half_value((uint16_t)i) : brain_value((uint16_t)i));
        for (int32_t i = 0; i < N; i++) x[i] *= factors[f];
        const int32_t n = N - f;
        k->from_f32(x, out, n);
        same(n, out[n], f == 0 ? 0xa5a5 : out[n]);
        for (int32_t i = 0; i < n; i += f % 2 ? 3 : 5) same(i, out[i], type == TE_F16 ? to_half(x[i]) : to_brain(x[i]));
    }
    free(all);
    free(out);
    free(x);
}

static void check_from_f32(int32_t type) {
    for (int32_t n = type == TE_Q8_0 ? 32 : 1; n < 140; n += type == TE_Q8_0 ? 32 : 13) {
        const size_t n_bytes = row_bytes(type, n);
        float *x = normals(n);
        uint8_t *expected = memory(n_bytes + 16, 0xa5), *out = memory(n_bytes + 16, 0xa5);
        for (int32_t i = 0; i < n; i++) {
            if (i % 3 == 0) x[i] *= 1e-5f;
            if (i % 32 > 15) x[i] = (float)((int)(random_word() % 252) - 126) + 0.5f; /* a tie, if the step is 1 */
            if (i % 64 == 31) x[i] = i % 128 == 31 ? 127.0f : -127.0f;
            if (i % 96 >= 64) x[i] = 0;
        }
        if (type == TE_Q8_0) to_q8_0(x, n, expected);
        for (int32_t i = 0; i < n && type != TE_Q8_0; i++) {
            const uint16_t h = type == TE_F16 ? to_half(x[i]) : to_brain(x[i]);
            memcpy(expected + (size_t)i * (n_bytes / (size_t)n), type == TE_F32 ? (void *)&x[i] : (void *)&h,
                   n_bytes / (size_t)n);
        }
        AT("from_f32 of type %d, %d values", (int)type, (int)n);
        table->row[type].from_f32(x, out, n);
        for (size_t i = 0; i < n_bytes + 16; i++) same((int32_t)i, out[i], expected[i]);
        free(x);
        free(expected);
        free(out);
    }
}

/* ---- products for many tokens ---- */

static const struct {
    int32_t n_tok, n_rows, cols, first; /* from which row or column on */
} shapes[] = {{1, 1, 5, 0},       {5, 7, 32, 0},     {16, 31, 80, 0},    {17, 66, 96, 64},
              {33, 100, 256, 64}, {26, 130, 544, 0}, {49, 7, 1024, 256}, {490, 5, 64, 0}};

static void *packed_tokens(const te_gemm_kernels *g, const float *x, int32_t n_tok, int32_t k, bool transposed) {
    const size_t pitch = (size_t)k + 3;
    float *apart = memory((size_t)n_tok * pitch * sizeof(float), 0xff); /* NaN between the rows */
    for (int32_t t = 0; t < n_tok; t++)
        memcpy(apart + (size_t)t * pitch, x + (size_t)t * (size_t)k, (size_t)k * sizeof(float));
    void *px = memory(g->pack_bytes(n_tok, k), 0xff);
    const int32_t middle = n_tok / 2 / g->pack_unit * g->pack_unit;
    void (*pack)(const float *, size_t, const int32_t *, int32_t, int32_t, int32_t, int32_t, void *) =
        transposed ? g->pack_t : g->pack;
    pack(apart, pitch, NULL, n_tok, k, middle, n_tok, px);
    if (middle > 0) pack(apart, pitch, NULL, n_tok, k, 0, middle, px);
    free(apart);
    return px;
}

static void check_product(const matrix *a, int32_t n_tok, int32_t lo, bool transposed, bool with_bias, bool add) {
    const te_gemm_kernels *g = &table->gemm;
    const int32_t cols = a->m.cols, n_rows = a->m.n_rows, k = transposed ? n_rows : cols;
    const int32_t n = transposed ? cols : n_rows, pitch = n + 5;
    float *x = normals(n_tok * k), *bias = normals(n), *y = floats(n_tok * pitch), *before = normals(n_tok * n);
    for (int32_t t = 0; t < n_tok && add; t++)
        memcpy(y + (size_t)t * (size_t)pitch + lo, before + (size_t)t * (size_t)n + lo, (size_t)(n - lo) * sizeof *y);
    void *px = packed_tokens(g, x, n_tok, k, transposed), *scratch = memory(g->scratch_bytes(n_tok, k), 0xff);
    g->begin();
    (transposed ? g->gemm_t : g->gemm)(&a->m, lo, n, px, n_tok, y, (size_t)pitch, with_bias ? bias : NULL, add,
                                       scratch);
    g->end();
    /* Two sets round both sides to bf16, whose last bit is worth 2^-7 of the first. */
    const bool bf16 = strcmp(table->name, "amx") == 0 || strcmp(table->name, "avx512_bf16") == 0;
    const double rounding = bf16 ? 2 * 0x1p-8 + 0x1p-16 : 0;
    for (int32_t t = 0; t < n_tok; t++) {
        const float *row = y + (size_t)t * (size_t)pitch, *xt = x + (size_t)t * (size_t)k;
        untouched(row, lo);
        untouched(row + n, 5);
        for (int32_t i = lo; i < n; i++) {
            double sum = 0, size = 0;
            for (int32_t j = 0; j < k; j++) {
                const double w = transposed ? a->w[(size_t)j * (size_t)cols + (size_t)i]
                                            : a->w[(size_t)i * (size_t)cols + (size_t)j];
                sum += w * (double)xt[j];
                size += fabs(w * (double)xt[j]);
            }
            const double b = with_bias ? (double)bias[i] : 0,
                         at_first = add ? (double)before[(size_t)t * (size_t)n + (size_t)i] : 0;
            const double limit = (8 * EPS * sqrt((double)k) + rounding) * size + 4 * EPS * (fabs(b) + fabs(at_first));
            near(t * n + i, row[i], sum + b + at_first, limit);
        }
    }
    untouched(y + (size_t)n_tok * (size_t)pitch, 16);
    free(x);
    free(bias);
    free(y);
    free(before);
    free(px);
    free(scratch);
}

static void check_products_of(int32_t type) {
    for (int i = 0; i < COUNT(shapes); i++) {
        const int32_t cols = shapes[i].cols;
        if (cols % te_type_get(type)->block_weights != 0) continue;
        matrix a = matrix_new(type, shapes[i].n_rows, cols, 0, RANDOM, i % 2);
        for (int transposed = 0; transposed < 2; transposed++) {
            AT("%s %s, %d tokens, %d rows, %d columns", transposed ? "gemm_t" : "gemm", te_type_get(type)->name,
               (int)shapes[i].n_tok, (int)shapes[i].n_rows, (int)cols);
            const int32_t first = transposed ? (cols > 512 ? 256 : 0) : shapes[i].first;
            if (first < (transposed ? cols : shapes[i].n_rows))
                check_product(&a, shapes[i].n_tok, first, transposed, i % 2, i % 3 > 0);
        }
        matrix_free(&a);
    }
}

/* ---- norms, softmax, activations, signs ---- */

static const int32_t lengths[] = {1, 3, 7, 8, 9, 16, 33, 288, 1031, 2060};

static void check_norms(int32_t n) {
    const double means[] = {0, 0, 1000}, sizes[] = {1e-3, 1e4, 1};
    const double eps = (double)1e-5f;
    for (int i = 0; i < 3; i++) {
        float *x = normals(n), *w = normals(n), *b = normals(n), *y = floats(n), *z = floats(n), *v = floats(n);
        double mean = 0, squares = 0, variance = 0;
        for (int32_t j = 0; j < n; j++) {
            x[j] = (float)(means[i] + sizes[i] * (double)x[j]);
            mean += (double)x[j] / n;
            squares += (double)x[j] * (double)x[j] / n;
        }
        for (int32_t j = 0; j < n; j++) variance += ((double)x[j] - mean) * ((double)x[j] - mean) / n;
        AT("rms_norm, layer_norm, mean %g, size %g, n %d", means[i], sizes[i], (int)n);
        table->rms_norm(x, w, 1e-5f, n, y);
        table->layer_norm(x, w, b, 1e-5f, n, z);
        table->layer_norm(x, w, NULL, 1e-5f, n, v);
        for (int32_t j = 0; j < n; j++) {
            const double normed = ((double)x[j] - mean) / sqrt(variance + eps) * (double)w[j];
            near(j, y[j], (double)x[j] / sqrt(squares + eps) * (double)w[j],
                 1e-6 * fabs((double)x[j] / sqrt(squares + eps) * (double)w[j]));
            /* x - mean is rounded twice, to a few units of the difference. */
            const double limit = 1e-6 * (fabs(normed) + fabs((double)w[j]));
            near(j, v[j], normed, limit);
            near(j, z[j], normed + (double)b[j], limit + 4 * EPS * fabs((double)b[j]));
        }
        untouched(y + n, 16);
        untouched(z + n, 16);
        untouched(v + n, 16);
        table->rms_norm(x, w, 1e-5f, n, x);
        same(n, memcmp(x, y, (size_t)n * sizeof *x), 0);
        free(x);
        free(w);
        free(b);
        free(y);
        free(z);
        free(v);
    }
}

static void check_softmax(int32_t n) {
    const float spreads[] = {0, 1, 30}, scales[] = {1, 0.125f, 1};
    for (int i = 0; i < 3; i++) {
        float *x = floats(n);
        double *s = memory((size_t)n * sizeof *s, 0), most = -(double)INFINITY, total = 0;
        for (int32_t j = 0; j < n; j++) {
            x[j] = j % 5 == 3 ? -INFINITY : random_normal() * spreads[i];
            s[j] = (double)x[j] * (double)scales[i];
            most = fmax(most, s[j]);
        }
        for (int32_t j = 0; j < n; j++) total += exp(s[j] - most);
        AT("softmax, spread %g, n %d", (double)spreads[i], (int)n);
        table->softmax(x, n, scales[i]);
        for (int32_t j = 0; j < n; j++) { /* the exponent itself is rounded, to EPS of its size */
            const double p = exp(s[j] - most) / total;
            near(j, x[j], p, isinf(s[j]) ? 0 : (1e-6 + EPS * (most - s[j])) * p + 1e-37);
        }
        untouched(x + n, 16);
        for (int32_t j = 0; j < n; j++) x[j] = -INFINITY;
        table->softmax(x, n, 1);
        for (int32_t j = 0; j < n; j++) near(j, x[j], 0, 0);
        for (int32_t j = 0; j < n; j++) x[j] = j == n / 2 ? NAN : 0;
        table->softmax(x, n, 1);
        int32_t n_nan = 0;
        for (int32_t j = 0; j < n; j++) n_nan += isnan(x[j]);
        same(n, n_nan > 0, 1);
        free(x);
        free(s);
    }
}

static double activated(te_activation act, double g, double threshold) {
    switch (act) {
    case TE_RELU:
        return g > threshold ? g : 0;
    case TE_DRELU:
        return g > 0 ? g : 0;
    case TE_RELU2:
        return g > 0 ? g * g : 0;
    case TE_SILU:
        return g / (1 + exp(-g));
    case TE_GELU:
        return g * 0.5 * erfc(-g / sqrt(2));
    case TE_CLAMPED:
        return fmin(g, 7) / (1 + exp(-1.702 * fmin(g, 7)));
    case TE_GELU_TANH:
        return g * 0.5 * (1 + tanh(sqrt(2 / acos(-1.0)) * (g + 0.044715 * g * g * g)));
    case TE_XIELU: /* check_xielu */
        break;
    }
    return NAN;
}

static void check_xielu(int32_t n) {
    const te_xielu curve = {0.7f, 1.9f, 0.5f, -1e-6f};
    float *x = normals(n), *h = floats(n);
    for (int32_t i = 0; i < n; i++) x[i] *= i % 3 ? 1 : 30;
    AT("xielu, n %d", (int)n);
    table->xielu(&curve, x, n, h);
    for (int32_t i = 0; i < n; i++) {
        const double v = (double)x[i], p = (double)curve.alpha_p, m = (double)curve.alpha_n, b = (double)curve.beta,
                     a = v > 0 ? p * v * v + b * v : m * (expm1(fmin(v, (double)curve.eps)) - v) + b * v;
        near(i, h[i], a, 1e-6 * fabs(a) + 2e-7 * m + 4 * EPS * m * fabs(v));
    }
    untouched(h + n, 16);
    free(x);
    free(h);
}

static void check_glu(int32_t n) {
    for (te_activation act = TE_RELU; act <= TE_RELU2; act++)
        for (int gated = 0; gated < 2; gated++) {
            const float threshold = act == TE_RELU ? 0.25f : 0;
            float *g = normals(n), *u = normals(n), *h = floats(n);
            const float extremes[] = {0.0f, -0.0f, 1e-20f, -1e-20f, 60, -60, 200, -200, 0.25f};
            for (int32_t i = 0; i < n; i++) u[i] *= i % 3 ? 1 : 8; /* some are clamped */
            for (int32_t i = 0; i < n; i++) g[i] = i % 7 == 1 ? extremes[i / 7 % COUNT(extremes)] : 4 * g[i];
            AT("glu, activation %d, gated %d, n %d", (int)act, gated, (int)n);
            table->glu(act, threshold, gated ? g : NULL, gated ? u : g, n, h);
            for (int32_t i = 0; i < n; i++) {
                const double clamped = fmax(-7, fmin((double)u[i], 7)) + 1;
                const double up = !gated                        ? 1
                                  : act == TE_CLAMPED           ? clamped
                                  : act == TE_DRELU && u[i] < 0 ? 0
                                                                : (double)u[i];
                const double a = activated(act, (double)g[i], (double)threshold) * up;
                /* 1e-6, and the rounded exponent in the tails: x^2 / 2 in GELU's, up to 1.6 x + 0.08 x^3 in its tanh
                 * form's, x in the others'. A double's tanh is 1 - 1e-16 where a sigmoid still is not. */
                const double size = fmin(fabs((double)g[i]), 13), cube = act == TE_GELU_TANH ? size * size * size : 0;
                near(i, h[i], a,
                     (1e-6 + EPS * (act == TE_GELU ? size * size : 2 * size + cube)) * fabs(a) +
                         (act == TE_GELU_TANH ? 1e-14 : 1e-34));
            }
            untouched(h + n, 16);
            free(g);
            free(u);
            free(h);
        }
    /* Neither the threshold itself nor a NaN passes. */
    const float g[] = {0.5f, nextafterf(0.5f, 1), 0.4f, -1, NAN}, expected[] = {0, g[1], 0, 0, 0};
    float h[5];
    AT("glu, threshold 0.5");
    table->glu(TE_RELU, 0.5f, NULL, g, 5, h);
    for (int32_t i = 0; i < 5; i++) near(i, h[i], (double)expected[i], 0);
}

static void check_add_and_signs(int32_t n) {
    enum { N_VECTORS = 3 };
    const size_t n_words = ((size_t)n + 63) / 64;
    float *x[N_VECTORS], *y = floats(n), dot[N_VECTORS];
    uint64_t *bits = memory((N_VECTORS * n_words + 1) * sizeof *bits, 0xa5);
    for (int i = 0; i < N_VECTORS; i++) x[i] = normals(n);
    for (int32_t j = 0; j < n; j += 4) x[1][j] = j % 8 ? -0.0f : -NAN; /* both count as positive */
    AT("add, n %d", (int)n);
    for (int32_t j = 0; j < n; j++) y[j] = x[0][j];
    table->add(x[2], n, y);
    for (int32_t j = 0; j < n; j++) near(j, y[j], (double)(x[0][j] + x[2][j]), 0);
    untouched(y + n, 16);
    AT("sign_pack, sign_dot, n %d", (int)n);
    for (int i = 0; i < N_VECTORS; i++) {
        table->sign_pack(x[i], n, bits + (size_t)i * n_words);
        for (int32_t j = 0; j < (int32_t)n_words * 64; j++)
            same(j, (int64_t)(bits[(size_t)i * n_words + (size_t)j / 64] >> j % 64 & 1), j < n && x[i][j] < 0);
    }
    same(n, (int64_t)bits[N_VECTORS * n_words], (int64_t)0xa5a5a5a5a5a5a5a5u);
    table->sign_dot(bits, N_VECTORS, bits + n_words, n, dot);
    for (int i = 0; i < N_VECTORS; i++) {
        int32_t sum = 0;
        for (int32_t j = 0; j < n; j++) sum += (x[i][j] < 0) == (x[1][j] < 0) ? 1 : -1;
        near(i, dot[i], (double)((float)sum / (float)n), 0);
    }
    for (int i = 0; i < N_VECTORS; i++) free(x[i]);
    free(y);
    free(bits);
}

/* ---- all of a table ---- */

static void check_table(void) {
    static const int32_t product_types[] = {TE_F32,  TE_F16,  TE_BF16,   TE_Q8_0,   TE_Q4_0, TE_Q4_1,
                                            TE_Q5_0, TE_Q5_1, TE_IQ4_NL, TE_MXFP4,  TE_Q2_K, TE_Q3_K,
                                            TE_Q4_K, TE_Q5_K, TE_Q6_K,   TE_IQ4_XS, TE_IQ3_S};
    static const int32_t written[] = {TE_F32, TE_F16, TE_BF16, TE_Q8_0};
    int n_types = 0;
    random_state = 1;
    for (int32_t type = 0; type < TE_TYPE_LIMIT; type++) {
        const bool known = te_type_get(type) != NULL && te_can_dequantize(type);
        AT("entries of type %d", (int)type);
        same(type, table->row[type].dot != NULL, known);
        if (!known) continue;
        check_rows_of(type);
        n_types++;
    }
    for (int i = 0; i < COUNT(written); i++) check_from_f32(written[i]);
    check_16_bits(TE_F16);
    check_16_bits(TE_BF16);
    for (int i = 0; i < COUNT(product_types); i++) check_products_of(product_types[i]);
    for (int i = 0; i < COUNT(lengths); i++) {
        check_norms(lengths[i]);
        check_softmax(lengths[i]);
        check_glu(lengths[i]);
        check_xielu(lengths[i]);
        check_add_and_signs(lengths[i]);
    }
    printf("%s: %d formats, %ld values, %ld off\n", table->name, n_types, n_checked, n_off);
    fflush(stdout);
}

int main(int argc, char **argv) {
    static const char *const all[] = {"scalar",      "avx2", "avx2_vnni", "avx512",
                                      "avx512_bf16", "amx",  "neon",      "neon_dot"};
    const int n = argc > 1 ? argc - 1 : COUNT(all);
    bool failed = false;
    for (int i = 0; i < n; i++) {
        const char *name = argc > 1 ? argv[1 + i] : all[i];
        table = te_cpu_kernels_named(name);
        if (!table && argc > 1) return fprintf(stderr, "no table %s on this machine\n", name), 2;
        if (!table) continue;
        n_checked = n_off = 0;
        check_table();
        failed = failed || n_off > 0;
    }
    return failed;
}
