// kernels_bench.cu - how fast each operation reads its weights, on the first GPU.
//
//     kernels_bench [FILTER]     one line per operation whose name contains FILTER, and the same as JSON lines on stderr
//
// An operation is recorded many times into one graph, each time on other weights, so that nothing is found in a cache; its
// time is that of the graph over their number, so what one operation hides of the next one's start is counted as in a
// token. Shares are of the rate at which a plain kernel reads the same memory in the same run.
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

static float *x, *y, *h, *vector, *partial;
static uint8_t *mask;
static uint32_t *tail;

static void bench_linear(const char *name, arena &a, std::vector<int> rows, int n_tok, bool normed,
                         uint8_t *marks = nullptr) {
    if (!wanted(name)) return;
    int total = 0;
    for (int r : rows) total += r;
    const double us = time_us(24, [&](int) {
        te_cuda_linear op = {};
        op.x = x;
        op.ldx = 16384;
        op.n_tok = n_tok;
        if (normed) op.norm = {TE_CUDA_RMS_NORM, 1e-5f, vector, nullptr};
        op.n_products = (int)rows.size();
        for (size_t i = 0; i < rows.size(); i++) {
            op.product[i].w = a.take(rows[i]);
            op.product[i].y = marks ? nullptr : y + i * 40000 * 8;
            op.product[i].ldy = 40000;
            op.product[i].mark = marks;
            op.product[i].ld_mark = 4096;
        }
        OK(api->linear(dev, &op));
    });
    report(name, us, (double)total * (double)a.all.stride);
}

enum how { DENSE, SKIP, MASKED };
static void bench_hidden(const char *name, arena &a, int n, int n_tok, how mode, double active) {
    if (!wanted(name)) return;
    const double us = time_us(12, [&](int) {
        te_cuda_hidden op = {};
        op.x = x;
        op.ldx = 16384;
        op.n_tok = n_tok;
        op.norm = {TE_CUDA_RMS_NORM, 1e-5f, vector, nullptr};
        op.gate = a.take(n);
        op.up = a.take(n);
        op.act = TE_RELU;
        op.threshold = mode == SKIP ? 1e30f : 0;
        op.mode = mode == SKIP ? TE_CUDA_SKIP : TE_CUDA_DENSE;
        if (mode == MASKED) {
            op.mask = mask;
            op.ld_mask = 4096;
        }
        op.h = h;
        op.ldh = 16384;
        OK(api->hidden(dev, &op));
    });
    report(name, us, (mode == SKIP ? 1 : mode == MASKED ? 2 * active : 2) * n * (double)a.all.stride);
}

static void bench_down(const char *name, arena &a, int n, int n_tok, const float *weights, bool all, double active,
                       bool merge) {
    if (!wanted(name)) return;
    const double us = time_us(12, [&](int) {
        te_cuda_down op = {};
        op.w = a.take(n);
        op.h = weights;
        op.ldh = 16384;
        op.n_tok = n_tok;
        op.all = all;
        op.partial = partial;
        OK(api->down(dev, &op));
        if (!merge) return;
        const te_cuda_merge m = {partial, api->parts(dev, &op.w, n), n_tok, a.all.cols, x, nullptr, 16384, y, 40000};
        OK(api->merge(dev, &m));
    });
    report(name, us, active * n * (double)a.all.stride);
}

static void bench_attention(int n_head, int n_head_kv, int type, int n_pos, int n_tok) {
    char name[100];
    snprintf(name, sizeof name, "attention %d on %d heads, %s, %d positions, %d tokens", n_head, n_head_kv,
             te_type_get(type)->name, n_pos, n_tok);
    if (!wanted(name)) return;
    const int n_ctx = 8192, ld = n_ctx / 64, n_layer = 8;
    const size_t row = te_row_bytes(type, 128), layer = (size_t)(n_tok * ld) * (size_t)n_head_kv * 64 * row;
    uint8_t *k = device_new<uint8_t>(layer * n_layer), *v = device_new<uint8_t>(layer * n_layer);
    OK(api->fill(dev, k, 0x11, layer * n_layer));
    OK(api->fill(dev, v, 0x11, layer * n_layer));
    std::vector<int32_t> table((size_t)(n_tok * ld)), pos((size_t)n_tok, n_pos - 1);
    for (size_t i = 0; i < table.size(); i++) table[i] = (int32_t)(i * 37 % table.size());
    te_cuda_attention op = {};
    op.q = x;
    op.k = x;
    op.v = x;
    op.ldq = 16384;
    op.ldk = op.ldv = 16384;
    op.n_tok = n_tok;
    op.n_head = n_head;
    op.n_head_kv = n_head_kv;
    op.n_embd_head = 128;
    op.scale = 0.088f;
    op.rope = TE_CUDA_ROPE_NORM;
    op.n_rot = 128;
    op.cs = vector;
    op.pos = device_of(pos);
    op.table = device_of(table);
    op.ld_table = ld;
    op.type_k = op.type_v = type;
    op.n_ctx = n_ctx;
    op.early = 1;
    op.out = y;
    op.ld_out = 40000;
    op.scratch = device_new<float>(api->attention_floats(dev, &op));
    op.counter = device_of(std::vector<uint32_t>(api->attention_counters(dev, &op), 0));
    const double us = time_us(24, [&](int i) {
        op.k_pool = k + layer * (size_t)(i % n_layer);
        op.v_pool = v + layer * (size_t)(i % n_layer);
        OK(api->attention(dev, &op));
    });
    report(name, us, 2.0 * n_tok * n_pos * n_head_kv * (double)row);
    OK(api->free(dev, k));
    OK(api->free(dev, v));
    OK(api->free(dev, op.scratch));
}

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    if (argc > 1) filter = argv[1];
    open_gpu();
    te_cuda_info info;
    OK(api->info(dev, &info));
    x = device_of(normals(16384 * 8));
    vector = device_of(normals(16384));
    y = device_new<float>(40000 * 8 * 4);
    h = device_new<float>(16384 * 8);
    partial = device_new<float>((size_t)64 << 20);
    tail = device_new<uint32_t>(4);
    std::vector<uint8_t> bits(4096 * 8);
    for (uint8_t &b : bits)
        for (int i = 0; i < 8; i++) b |= (uint8_t)((random_word() % 10 == 0) << i);
    mask = device_of(bits);
    std::vector<float> some(16384 * 8, 0);
    for (float &v : some)
        if (random_word() % 10 == 0) v = random_normal();
    float *sparse = device_of(some), *dense = device_of(normals(16384 * 8));
    uint8_t *marks = device_of(std::vector<uint8_t>(4096 * 8, 0));
    {
        const size_t n_bytes = (size_t)2 << 30;
        arena a(TE_F16, 4096, (int)(n_bytes / 8192));
        for (int blocks = 2; blocks <= 8; blocks *= 2) {
            double best = 1e30;
            for (int turn = 0; turn < 5; turn++) {
                OK(api->mark(dev, 0));
                read_kernel<<<info.n_sm * blocks, 512, 0, (cudaStream_t)api->stream(dev)>>>((const uint4 *)a.all.w,
                                                                                            n_bytes / 16, tail);
                OK(api->mark(dev, 1));
                finish();
                double ms;
                OK(api->elapsed(dev, 0, 1, &ms));
                best = ms < best ? ms : best;
            }
            if (n_bytes / best / 1e6 > ceiling) ceiling = n_bytes / best / 1e6;
        }
        printf("%s, %d multiprocessors; a plain kernel reads %.0f GB/s\n", info.name, info.n_sm, ceiling);
        fprintf(stderr, "{\"name\": \"read\", \"device\": \"%s\", \"GB/s\": %.1f}\n", info.name, ceiling);
        const double us = time_us(4, [&](int i) {
            te_cuda_linear op = {};
            op.x = x;
            op.n_tok = 1;
            op.n_products = 1;
            op.product[0].w = a.take(65536);
            op.product[0].y = partial + i * 65536;
            OK(api->linear(dev, &op));
        });
        report("linear F16, 65536 x 4096 (one long product)", us, 65536 * 8192.0);
        a.free();
    }
    for (int type : all_types) {
        char s[128];
        const char *t = te_type_get(type)->name;
#define NAME(...) (snprintf(s, sizeof s, __VA_ARGS__), s)
        arena a(type, 4096, type == TE_F32 ? 98304 : 196608);
        const bool main_type = type == TE_F16 || type == TE_Q8_0 || type == TE_Q4_0 || type == TE_Q4_K;
        bench_linear(NAME("%s Bamboo norm + QKV 6144 x 4096", t), a, {4096, 1024, 1024}, 1, true);
        bench_linear(NAME("%s Llama-2 norm + QKV 12288 x 4096", t), a, {4096, 4096, 4096}, 1, true);
        bench_linear(NAME("%s O 4096 x 4096", t), a, {4096}, 1, false);
        bench_linear(NAME("%s fc1 1024 x 4096", t), a, {1024}, 1, false);
        bench_linear(NAME("%s head 32000 x 4096", t), a, {32000}, 1, true);
        bench_hidden(NAME("%s gate + up, 14336, dense", t), a, 14336, 1, DENSE, 1);
        bench_hidden(NAME("%s gate + up, 11008, dense", t), a, 11008, 1, DENSE, 1);
        bench_hidden(NAME("%s gate first, 14336, none active", t), a, 14336, 1, SKIP, 0);
        bench_hidden(NAME("%s gate + up, 14336, mask of 10 %%", t), a, 14336, 1, MASKED, 0.1);
        bench_hidden(NAME("%s gate + up, 4352, mask of 10 %%", t), a, 4352, 1, MASKED, 0.1);
        bench_down(NAME("%s down, 14336, dense", t), a, 14336, 1, dense, true, 1, false);
        bench_down(NAME("%s down + merge, 14336, dense", t), a, 14336, 1, dense, true, 1, true);
        bench_down(NAME("%s down, 14336, 10 %%", t), a, 14336, 1, sparse, false, 0.1, false);
        bench_down(NAME("%s down + merge, 14336, 10 %%", t), a, 14336, 1, sparse, false, 0.1, true);
        if (main_type)
            for (int n_tok : {2, 4, 8}) {
                bench_linear(NAME("%s Bamboo norm + QKV 6144 x 4096, %d tokens", t, n_tok), a, {4096, 1024, 1024},
                             n_tok, true);
                bench_linear(NAME("%s head 32000 x 4096, %d tokens", t, n_tok), a, {32000}, n_tok, true);
                bench_hidden(NAME("%s gate + up, 14336, dense, %d tokens", t, n_tok), a, 14336, n_tok, DENSE, 1);
                bench_down(NAME("%s down, 14336, dense, %d tokens", t, n_tok), a, 14336, n_tok, dense, true, 1, false);
            }
        a.free();
        if (!main_type) continue;
        arena r(type, 1024, 458752);
        bench_linear(NAME("%s fc2 + marks, 14336 x 1024", t), r, {14336}, 1, false, marks);
        bench_linear(NAME("%s fc2 + marks, 4352 x 1024", t), r, {4352}, 1, false, marks);
        r.free();
        const int ff = 11008;
        arena o(type, ff, 65536);
        bench_linear(NAME("%s down by output, 4096 x 11008", t), o, {4096}, 1, false);
        o.free();
    }
    for (int n_pos : {128, 512, 2048, 8000})
        for (int type : {TE_F16, TE_Q8_0}) {
            bench_attention(32, 8, type, n_pos, 1);
            bench_attention(32, 32, type, n_pos, 1);
        }
    bench_attention(32, 8, TE_F16, 512, 8);
    api->close(dev);
    return 0;
}
