// checks.hpp - what the checks share: comparing values, results with room around them, inputs, sums with a tolerance.
#pragma once
#include <algorithm>

#include "gpu.hpp"

static const double EPS = 0x1p-23;
static const float CANARY = 1.5e30f;
static char what[200];
static long n_checked, n_off;
#define AT(...) snprintf(what, sizeof what, __VA_ARGS__)

static void near(long i, double value, double reference, double limit) {
    n_checked++;
    if (fabs(value - reference) <= limit) return;
    fprintf(stderr, "%s [%ld]: %.9g instead of %.9g, allowed is %.3g\n", what, i, value, reference, limit);
    if (++n_off == 30) exit(1);
}
static void same(long i, double value, double reference) { near(i, value, reference, 0); }
static void is_true(bool b, const char *why) {
    n_checked++;
    if (b) return;
    fprintf(stderr, "%s: %s\n", what, why);
    if (++n_off == 30) exit(1);
}

// Results with room around them: floats, ld apart, 8 in front and behind.
struct result {
    float *p;
    size_t n;
    explicit result(size_t n_values) : p(device_of(std::vector<float>(n_values + 16, CANARY))), n(n_values) {}
    float *data() const { return p + 8; }
    std::vector<float> get() const {
        std::vector<float> v = host_of(p, n + 16);
        for (size_t i = 0; i < 8; i++) {
            same((long)i - 8, (double)v[i], (double)CANARY);
            same((long)(n + i), (double)v[n + 8 + i], (double)CANARY);
        }
        return std::vector<float>(v.begin() + 8, v.end() - 8);
    }
    void free() { OK(api->free(dev, p)); }
};
// Runs an operation twice, the second time on top of what the first left after `again`.
static void same_bits(const std::vector<float> &a, const std::vector<float> &b) {
    is_true(a.size() == b.size() && !memcmp(a.data(), b.data(), a.size() * 4), "a repeat gives other bits");
}

// ---- inputs ----

struct input {
    int n_tok, cols;
    size_t ld;
    std::vector<float> x, w, b;
    float *dx, *dw, *db;
    te_norm norm;
    std::vector<double> seen,
        step; // after norm (and, without one, as bytes); half a step of the byte that a value becomes
    const double *of(int t) const { return &seen[(size_t)t * (size_t)cols]; }
    const double *half(int t) const { return &step[(size_t)t * (size_t)cols]; }
    // As kernels multiply with it, for matrices of a type; nothing where they take it as it is.
    te_prepared prepared(int type) {
        const size_t n_bytes = api->prepared_bytes(type, cols);
        if (!n_bytes) return {};
        if (!ready) ready = device_of(std::vector<uint8_t>(2 * n_bytes, 0xff));
        te_cuda_prepare op = {};
        op.x = dx;
        op.ldx = ld;
        op.n_tok = n_tok;
        op.cols = cols;
        op.norm = norm;
        op.type = type;
        op.v = ready;
        OK(api->prepare(dev, &op));
        const std::vector<uint8_t> all = host_of(ready, 2 * n_bytes);
        bool beside = false;
        for (size_t i = n_bytes; i < 2 * n_bytes; i++) beside |= all[i] != 0xff;
        is_true(!beside, "something behind the prepared input was written");
        return {ready, type};
    }
    uint8_t *ready = nullptr;
    void free() {
        for (float *p : {dx, dw, db}) OK(api->free(dev, p));
        if (ready) OK(api->free(dev, ready));
    }
};
// zeros: some values are 0, of either sign.
static input input_new(int n_tok, int cols, te_norm_kind kind, bool bytes, bool zeros = false) {
    input in;
    in.n_tok = n_tok;
    in.cols = cols;
    in.ld = (size_t)(cols + 3) / 4 * 4 + 8;
    in.x = normals(in.ld * (size_t)n_tok);
    for (int t = 0; t < n_tok; t++)
        for (size_t c = (size_t)cols; c < in.ld; c++) in.x[(size_t)t * in.ld + c] = NAN;
    if (kind == TE_LAYER_NORM)
        for (float &v : in.x) v += 3;
    for (int t = 0; t < n_tok && zeros; t++)
        for (size_t c = 7; c < (size_t)cols; c += 41) in.x[(size_t)t * in.ld + c] = c % 2 ? 0.0f : -0.0f;
    in.w = normals((size_t)cols);
    in.b = normals((size_t)cols);
    in.dx = device_of(in.x);
    in.dw = device_of(in.w);
    in.db = device_of(in.b);
    in.norm = {kind, random_word() % 2 ? 1e-5f : 0.125f, in.dw, kind == TE_LAYER_NORM ? in.db : nullptr};
    in.seen.resize((size_t)n_tok * (size_t)cols);
    in.step.assign((size_t)n_tok * (size_t)cols, 0);
    for (int t = 0; t < n_tok; t++) {
        const float *x = &in.x[(size_t)t * in.ld];
        double *s = &in.seen[(size_t)t * (size_t)cols], *half = &in.step[(size_t)t * (size_t)cols], mean = 0, sum = 0;
        if (kind == TE_LAYER_NORM)
            for (int c = 0; c < cols; c++) mean += (double)x[c] / cols;
        for (int c = 0; c < cols; c++) sum += ((double)x[c] - mean) * ((double)x[c] - mean);
        const double scale = kind == TE_NO_NORM ? 1 : 1 / sqrt(sum / cols + (double)in.norm.eps);
        for (int c = 0; c < cols; c++) {
            s[c] = ((double)x[c] - mean) * scale;
            if (kind != TE_NO_NORM) s[c] *= (double)in.w[(size_t)c];
            if (kind == TE_LAYER_NORM) s[c] += (double)in.b[(size_t)c];
        }
        for (int c0 = 0; c0 < cols && bytes; c0 += 32) {
            float most = 0;
            double big = 0;
            for (int c = c0; c < c0 + 32; c++) {
                most = fmaxf(most, fabsf(x[c]));
                big = fmax(big, fabs(s[c]));
            }
            const float up = 127.0f / most, down = most / 127.0f;
            for (int c = c0; c < c0 + 32; c++) {
                if (kind == TE_NO_NORM)
                    s[c] = (double)(nearbyintf(x[c] * up) * 1.0f) * (double)down;
                else
                    half[c] = 0.5001 * big / 127;
            }
        }
    }
    return in;
}

// A sum of products, its tolerance.
struct sum {
    double v = 0, size = 0, slack = 0;
    int n = 0;
    void add(double w, double x, double half) {
        v += w * x;
        size += fabs(w * x);
        slack += fabs(w) * half;
        n++;
    }
    void times(double by) {
        v *= by;
        size *= fabs(by);
        slack *= fabs(by);
    }
    double limit() const { return 8 * EPS * sqrt((double)n) * size + slack + 1e-30; }
};
// The formats with minima take a difference of two sums: their sizes count, not that of the difference.
static double minima(int type) {
    for (int t : {TE_Q4_K, TE_Q5_K, TE_Q4_0, TE_Q6_K, TE_Q4_1, TE_Q5_0, TE_Q5_1, TE_Q2_K, TE_Q3_K})
        if (t == type) return 4;
    return 1;
}
static sum product(const matrix &a, int r, const input &in, int t) {
    sum s;
    const double *w = a.row(r), *x = in.of(t), *half = in.half(t);
    for (int c = 0; c < a.m.cols; c++) s.add(w[c], x[c], half[c]);
    s.size *= minima(a.m.type);
    if (in.norm.kind != TE_NO_NORM) { // the norm's own rounding
        for (int c = 0; c < a.m.cols; c++) s.slack += 8 * EPS * fabs(w[c]) * (fabs(x[c]) + 1);
    }
    return s;
}

static int some_cols(int type, int i) {
    static const int floats[] = {20, 333, 1028, 4096, 11008, 28672}, blocks[] = {32, 96, 1056, 4096, 11008, 28672},
                     ks[] = {256, 768, 1024, 4096, 11008, 28672};
    return is_float(type) ? floats[i] : te_type_get(type)->block_weights == 32 ? blocks[i] : ks[i];
}

// Of heads: most beside their scores, some far above, some far below them.
static std::vector<float> some_sinks(int n_head) {
    std::vector<float> v = normals((size_t)n_head, 3);
    for (size_t h = 1; h < v.size(); h += 5) v[h] = h % 2 ? -120.0f : 120.0f;
    return v;
}
// The first position that a token sees, and what its query is multiplied by if that depends on its position.
static int lowest_of(int pos, int window, bool chunked) {
    return !window ? 0 : chunked ? pos / window * window : std::max(0, pos + 1 - window);
}
constexpr float TEMP_SCALE = 0.5f;
constexpr int TEMP_FIRST = 1, TEMP_LENGTH = 20;
static double warmth_of(int pos) { return 1 + (double)TEMP_SCALE * log(1 + (pos + TEMP_FIRST) / TEMP_LENGTH); }
static double clamped_up(double x) { return fmin(fmax(x, -7), 7) + 1; } // what TE_CLAMPED makes of up
static const te_xielu some_curve = {0.03f, 0.2f, 0.2f, -1e-6f};         // flatter than 1.2 where values are
static double activation(te_activation act, double threshold, double x) {
    switch (act) {
    case TE_RELU:
        return x > threshold ? x : 0;
    case TE_DRELU:
        return fmax(x, 0);
    case TE_RELU2:
        return x > 0 ? x * x : 0;
    case TE_SILU:
        return x / (1 + exp(-x));
    case TE_GELU:
        return 0.5 * x * erfc(-x * 0.70710678118654752);
    case TE_GELU_TANH:
        return x / (1 + exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
    case TE_CLAMPED:
        x = fmin(x, 7);
        return x / (1 + exp(-1.702 * x));
    case TE_XIELU:
        return (x > 0 ? (double)some_curve.alpha_p * x * x
                      : (double)some_curve.alpha_n * (expm1(fmin(x, (double)some_curve.eps)) - x)) +
               (double)some_curve.beta * x;
    }
    return NAN;
}
