// benches.hpp - how kernels_bench.cu times an operation and shows it, and what operations work on.
#pragma once
#include "gpu.hpp"

static const char *filter = "";
static double ceiling = 1;

__global__ void read_kernel(const uint4 *p, size_t n, uint32_t *out) {
    uint32_t s = 0;
    const size_t step = (size_t)gridDim.x * blockDim.x;
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        const uint4 a = __ldcs(p + i), b = __ldcs(p + i + step), c = __ldcs(p + i + 2 * step),
                    d = __ldcs(p + i + 3 * step);
        s += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    if (s == 12345) *out = s;
}

// Time of a graph of `n` operations, each microseconds; the best of several.
template <class F> static double time_us(int n, F op) {
    te_cuda_graph *g = nullptr;
    OK(api->capture_begin(dev));
    for (int i = 0; i < n; i++) op(i);
    OK(api->capture_end(dev, &g));
    double best = 1e30;
    for (int turn = 0; turn < 6; turn++) {
        OK(api->mark(dev, 0));
        OK(api->graph_launch(dev, g));
        OK(api->mark(dev, 1));
        finish();
        double ms;
        OK(api->elapsed(dev, 0, 1, &ms));
        if (turn > 0 && ms < best) best = ms;
    }
    api->graph_free(g);
    return best * 1e3 / n;
}
static bool wanted(const char *name) { return strstr(name, filter) != nullptr; }
static void report(const char *name, double us, double bytes) {
    printf("%-64s %8.2f us %9.2f MB %6.0f GB/s %5.2f\n", name, us, bytes / 1e6, bytes / us / 1e3,
           bytes / us / 1e3 / ceiling);
    fprintf(stderr, "{\"name\": \"%s\", \"us\": %.3f, \"bytes\": %.0f, \"share\": %.4f}\n", name, us, bytes,
            bytes / us / 1e3 / ceiling);
}

// Rows of one width, many of them: from few distinct ones, over and over.
struct arena {
    te_mat all;
    int at = 0;
    arena(int type, int cols, int rows) {
        const int distinct = 1024;
        matrix few = matrix_new(type, distinct, cols, 0.02f);
        all = {nullptr, few.m.stride, type, cols, rows};
        all.w = device_new<uint8_t>(all.stride * (size_t)rows);
        for (int r = 0; r < rows; r += distinct)
            OK(api->copy(dev, (uint8_t *)all.w + (size_t)r * all.stride, few.m.w,
                         all.stride * (size_t)(rows - r < distinct ? rows - r : distinct)));
        finish();
        few.free();
    }
    te_mat take(int rows) { // the next ones
        if (at + rows > all.n_rows) at = 0;
        te_mat m = all;
        m.w = (const uint8_t *)all.w + (size_t)at * all.stride;
        m.n_rows = rows;
        at += rows;
        return m;
    }
    void free() { OK(api->free(dev, (void *)all.w)); }
};

static float *x, *y, *h, *vector, *vector_one, *partial;
static uint8_t *mask;
static uint32_t *tail;
