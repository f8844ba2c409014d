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

static float *x, *y, *h, *vector, *vector_one, *partial;
static uint8_t *mask;
static uint32_t *tail;

static void bench_linear(const char *name, arena &a, std::vector<int> rows, int n_tok, bool normed,
                         uint8_t *marks = nullptr) {
    if (!wanted(name)) return;
    int total = 0;
    for (int r : rows) total += r;
    const double us = time_us(24, [&](int) {
        te_linear_args op = {};
        op.x = x;
        op.ldx = 16384;
        op.n_tok = n_tok;
        if (normed) op.norm = {TE_RMS_NORM, 1e-5f, vector, nullptr};
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
        op.norm = {TE_RMS_NORM, 1e-5f, vector, nullptr};
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
        te_merge_args m = {};
        m.partial = partial;
        m.n_parts = api->parts(dev, &op.w, n);
        m.n_tok = n_tok;
        m.cols = a.all.cols;
        m.add = x;
        m.ld_add = 16384;
        m.y = y;
        m.ldy = 40000;
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
    te_attention_args op = {};
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
    op.rope = TE_ROPE_NORM;
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

static void bench_latent(int n_head, int n_pos, int n_tok) { // of DeepSeek's sizes
    char name[100];
    snprintf(name, sizeof name, "latent attention, %d heads, F16, %d positions, %d tokens", n_head, n_pos, n_tok);
    if (!wanted(name)) return;
    const int n_ctx = 8192, ld = n_ctx / 64, rank = 512, n_rot = 64, key = 192, value = 128, most_tok = 512;
    const size_t row = te_row_bytes(TE_F16, rank + n_rot), heads = (size_t)n_head, all = (size_t)most_tok * heads;
    uint8_t *pool = device_new<uint8_t>((size_t)ld * 64 * row);
    OK(api->fill(dev, pool, 0x11, (size_t)ld * 64 * row));
    std::vector<int32_t> table((size_t)ld), pos((size_t)n_tok), seq((size_t)n_tok, 0);
    for (size_t i = 0; i < table.size(); i++) table[i] = (int32_t)(i * 37 % table.size());
    for (int t = 0; t < n_tok; t++) pos[(size_t)t] = n_pos - n_tok + t;
    matrix k_b = matrix_new(TE_F16, n_head * rank, key - n_rot), v_b = matrix_new(TE_F16, n_head * value, rank);
    te_latent_args op = {};
    op.ldq = heads * (size_t)key;
    op.ldkv = (size_t)(rank + n_rot);
    op.q = device_new<float>(all * (size_t)key);
    op.kv = device_new<float>((size_t)most_tok * op.ldkv);
    op.norm = vector;
    op.norm_eps = 1e-5f;
    op.scale = 0.07f;
    op.n_tok = n_tok;
    op.n_head = n_head;
    op.n_key = key;
    op.n_value = value;
    op.rank = rank;
    op.n_rot = n_rot;
    op.cs = device_new<float>((size_t)(most_tok * n_rot));
    op.pos = device_of(pos);
    op.table = device_of(table);
    op.row = device_of(seq);
    op.ld_table = ld;
    op.k_b = k_b.m;
    op.v_b = v_b.m;
    op.pool = pool;
    op.type = TE_F16;
    op.n_ctx = n_ctx;
    op.query = device_new<float>(all * (size_t)(rank + n_rot));
    op.gathered = device_new<float>(all * (size_t)rank);
    op.out = device_new<float>(all * (size_t)value);
    op.ld_out = heads * (size_t)value;
    op.scratch = device_new<float>(api->latent_floats(dev, &op) + 1);
    const double us = time_us(24, [&](int) { OK(api->latent(dev, &op)); });
    report(name, us,
           (double)n_tok * n_pos * (double)row + (double)(k_b.m.stride * heads * rank + v_b.m.stride * heads * value));
    for (const void *p : {(const void *)op.q, (const void *)op.kv, (const void *)op.cs, (const void *)op.pos,
                          (const void *)op.table, (const void *)op.row, (const void *)pool, (const void *)op.query,
                          (const void *)op.gathered, (const void *)op.out, (const void *)op.scratch})
        OK(api->free(dev, (void *)p));
    k_b.free();
    v_b.free();
}

// ---- a whole step ----

// A model's shape, and how its feed-forward is computed. Of a sparse one a tenth of the neurons is wanted; which ones, a
// vector of its own decides, so that it stays a tenth. hot: neurons on the device; those behind belong to a CPU whose
// answers are there already.
struct step_shape {
    const char *name;
    int n_kv, ff, hot, type;
    enum { DENSE, EXACT, PREDICTED } mode;
};
static void bench_step(const step_shape &k) {
    char name[160];
    const char *modes[] = {"dense", "exact", "predicted"};
    snprintf(name, sizeof name, "step of %s, %s, %s, %d of %d neurons", k.name, te_type_get(k.type)->name,
             modes[k.mode], k.hot, k.ff);
    if (!wanted(name)) return;
    const int L = 32, D = 4096, V = 32000, R = 1024, n_pos = 256, ld = 8;
    const bool scored = k.mode == step_shape::PREDICTED, cpu = k.hot < k.ff;
    arena a(k.type, D, L * (D + 2 * k.n_kv + D + 3 * k.hot + (scored ? R : 0)) + V),
        r(k.type == TE_Q4_K ? (int)TE_Q8_0 : k.type, R, scored ? L * k.ff : 1024);
    const size_t pool = (size_t)ld * (size_t)k.n_kv * 64 * 2;
    uint8_t *kv = device_new<uint8_t>(pool * 2 * L);
    OK(api->fill(dev, kv, 0x11, pool * 2 * L));
    float *q = device_new<float>(D + 2 * (size_t)k.n_kv), *att = device_new<float>(D), *z = device_of(normals(R)),
          *z2 = device_new<float>(R), *hn = device_new<float>(D), *logits = device_new<float>(V),
          *xs = device_of(normals(D)), *hid = device_new<float>(16384);
    uint32_t *bits = device_new<uint32_t>(1024), *counts = device_of(std::vector<uint32_t>(3, 0)),
             *base = device_of(std::vector<uint32_t>(1, 7));
    int32_t *table = device_of(std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7}),
            *pos = device_of(std::vector<int32_t>{n_pos - 1}), *best = device_new<int32_t>(1);
    void *shared;
    OK(api->host_alloc(dev, (size_t)(2 * D + 65536) * 8, &shared));
    uint64_t *answer = (uint64_t *)shared, *post = answer + D, *marks = post + D;
    for (int i = 0; i < D; i++) answer[i] = (uint64_t)7 << 32;
    uint32_t *cancelled = (uint32_t *)(marks + 60000);
    *cancelled = 0;
    const double sigma = 0.02 * sqrt((double)(scored ? R : D));
    float *threshold = device_of(std::vector<float>(1, (float)(1.2816 * sigma)));
    const te_norm rms = {TE_RMS_NORM, 1e-5f, vector_one, nullptr}, none = {};
    te_attention_args at = {};
    at.q = q;
    at.k = q + D;
    at.v = q + D + k.n_kv;
    at.ldq = at.ldk = at.ldv = (size_t)(D + 2 * k.n_kv);
    at.n_tok = 1;
    at.n_head = D / 128;
    at.n_head_kv = k.n_kv / 128;
    at.n_embd_head = 128;
    at.scale = 0.088f;
    at.rope = TE_ROPE_NORM;
    at.n_rot = 128;
    at.cs = vector;
    at.pos = pos;
    at.table = table;
    at.ld_table = ld;
    at.type_k = at.type_v = TE_F16;
    at.n_ctx = 512;
    at.early = 1;
    at.out = att;
    at.ld_out = D;
    at.scratch = device_new<float>(api->attention_floats(dev, &at));
    at.counter = device_of(std::vector<uint32_t>(api->attention_counters(dev, &at), 0));
    double bytes = 0;
    auto linear = [&](const float *in, const te_norm &norm, float *out, int rows, bool add, bool relu, bool side) {
        te_linear_args op = {};
        op.x = in;
        op.ldx = D;
        op.n_tok = 1;
        op.norm = norm;
        op.n_products = 1;
        op.product[0].w = a.take(rows);
        op.product[0].y = out;
        op.product[0].add = add ? out : nullptr;
        op.product[0].relu = relu;
        if (side) {
            op.side.norm = rms;
            op.side.keep = hn;
            op.side.publish = cpu ? post : nullptr;
            op.side.ticket = {base, 0};
        }
        OK(api->linear(dev, &op));
        bytes += (double)rows * (double)a.all.stride;
    };
    const int turns = 3;
    const double us = time_us(turns, [&](int turn) {
        if (turn == 0) bytes = 0;
        for (int l = 0; l < L; l++) {
            linear(xs, rms, q, D + 2 * k.n_kv, false, false, false);
            at.k_pool = kv + 2 * pool * (size_t)l;
            at.v_pool = (uint8_t *)at.k_pool + pool;
            OK(api->attention(dev, &at));
            linear(att, none, xs, D, true, false, false);
            if (scored) linear(xs, none, z2, R, false, true, true);
            te_mat fc2 = scored ? r.take(k.ff) : te_mat{};
            if (scored && cpu) {
                te_marks_args m = {};
                m.scores.fc2 = fc2;
                m.scores.fc2.w = (const uint8_t *)fc2.w + fc2.stride * (size_t)k.hot;
                m.scores.fc2.n_rows = m.n_rows = k.ff - k.hot;
                m.scores.z = z;
                m.scores.ldz = R;
                m.scores.threshold = threshold;
                m.n_tok = 1;
                m.publish = marks;
                m.ticket = {base, 0};
                OK(api->marks(dev, &m));
                bytes += (double)m.n_rows * (double)fc2.stride;
            }
            te_ffn_args f = {};
            f.x = scored ? hn : xs;
            f.ldx = D;
            f.n_tok = 1;
            if (!scored) f.norm = rms;
            f.gate = a.take(k.hot);
            f.up = a.take(k.hot);
            f.down = a.take(k.hot);
            f.act = k.mode == step_shape::DENSE ? TE_SILU : TE_RELU;
            f.threshold = scored ? -1e30f : (float)(1.2816 * sigma); // what is predicted fires
            f.skip = k.mode != step_shape::DENSE;
            if (scored) {
                f.scores.fc2 = fc2;
                f.scores.fc2.n_rows = k.hot;
                f.scores.z = z;
                f.scores.ldz = R;
                f.scores.threshold = threshold;
                bytes += (double)k.hot * (double)fc2.stride;
            }
            f.h = hid;
            f.ldh = 16384;
            f.bits = bits;
            f.partial = partial;
            f.counts = turn == 0 && l == 0 ? counts : nullptr;
            bytes += (k.mode == step_shape::EXACT ? 1.2 : scored ? 0.3 : 3) * k.hot * (double)a.all.stride;
            te_merge_args m = {};
            OK(api->ffn(dev, &f));
            m.n_parts = api->ffn_parts(dev, &f);
            m.partial = partial;
            m.n_tok = 1;
            m.cols = D;
            m.add = m.y = xs;
            m.ld_add = m.ldy = D;
            if (cpu) {
                m.words = answer;
                m.ticket = {base, 0};
                m.cancelled = cancelled;
                m.limit_ns = 1000000000;
            }
            OK(api->merge(dev, &m));
        }
        linear(xs, rms, logits, V, false, false, false);
        OK(api->argmax(dev, logits, V, V, 1, best));
    });
    bytes /= turns;
    if (*cancelled) printf("the step timed out\n");
    const std::vector<uint32_t> n = host_of(counts, 3);
    printf("%-64s %8.3f ms  %6.1f tokens/s  %5.2f  (first layer: %u listed, %u computed, %u fired)\n", name, us / 1e3,
           1e6 / us, bytes / us / 1e3 / ceiling, n[0] / 6, n[1] / 6, n[2] / 6);
    fprintf(stderr, "{\"name\": \"%s\", \"us\": %.2f, \"bytes\": %.0f, \"share\": %.4f}\n", name, us, bytes,
            bytes / us / 1e3 / ceiling);
    a.free();
    r.free();
    OK(api->host_free(dev, shared));
    OK(api->free(dev, kv));
}

// A mixture's layer behind its router's product: the choice, the experts, the sum. Scores are random, and some of the experts
// are on the device. Two layers' experts go round, so that little is found in a cache.
static void bench_experts(int type, int n_embd, int n_ff, int n_expert, int n_used, bool by_neuron = false) {
    char name[128];
    snprintf(name, sizeof name, "%s experts %d of %d, %d neurons, %d columns%s", te_type_get(type)->name, n_used,
             n_expert, n_ff, n_embd, by_neuron ? ", ReLU, down by neuron" : "");
    if (!wanted(name)) return;
    const int n_layer = 2, turns = 24;
    const int down_rows = n_expert * (by_neuron ? n_ff : n_embd);
    arena in(type, n_embd, 2 * n_layer * n_expert * n_ff), out(type, by_neuron ? n_embd : n_ff, n_layer * down_rows);
    const float *score = device_of(normals((size_t)(turns * 8 * n_expert)));
    int32_t *expert = device_new<int32_t>((size_t)(8 * n_used)), *n_missing = device_new<int32_t>(1);
    float *weight = device_new<float>((size_t)(8 * n_used)), *hid = device_new<float>((size_t)(8 * n_used * n_ff));
    uint32_t *uses = device_of(std::vector<uint32_t>((size_t)n_expert, 0));
    const double each = 2.0 * n_ff * (double)in.all.stride + down_rows / n_expert * (double)out.all.stride;
    auto run = [&](int n_tok, double share, int what) {
        std::vector<int32_t> place((size_t)n_expert);
        int there = 0, gone = 0;
        for (int e = 0; e < n_expert; e++)
            place[(size_t)e] = e * 37 % n_expert < share * n_expert ? there++ : -1 - gone++;
        const int32_t *d_place = device_of(place);
        const double us = time_us(turns, [&](int i) {
            te_route_args r = {};
            r.score = score + (size_t)i * 8 * (size_t)n_expert;
            r.ld_score = (size_t)n_expert;
            r.n_tok = n_tok;
            r.n_expert = n_expert;
            r.n_used = n_used;
            r.n_group = r.n_group_used = 1;
            r.normed = 1;
            r.scale = 1;
            r.place = d_place;
            r.expert = expert;
            r.weight = weight;
            r.uses = uses;
            r.n_missing = n_missing;
            OK(api->route(dev, &r));
            if (what == 0) return;
            const size_t l = (size_t)(i % n_layer);
            te_experts_args a = {};
            a.x = x;
            a.ldx = 16384;
            a.n_tok = n_tok;
            a.n_expert = n_expert;
            a.n_used = n_used;
            a.n_ff = n_ff;
            a.gate = in.all;
            a.gate.w = (const uint8_t *)in.all.w + 2 * l * (size_t)(n_expert * n_ff) * in.all.stride;
            a.up = in.all;
            a.up.w = (const uint8_t *)a.gate.w + (size_t)(n_expert * n_ff) * in.all.stride;
            a.gate.n_rows = a.up.n_rows = n_expert * n_ff;
            te_mat *down = by_neuron ? &a.down_t : &a.down;
            *down = out.all;
            down->w = (const uint8_t *)out.all.w + l * (size_t)down_rows * out.all.stride;
            down->n_rows = down_rows;
            a.n_places = there;
            a.place = d_place;
            a.expert = expert;
            a.weight = weight;
            a.act = by_neuron ? TE_RELU : TE_SILU;
            a.h = hid;
            a.ldh = (size_t)n_ff;
            a.partial = partial;
            te_merge_args m = {};
            m.n_tok = n_tok;
            m.cols = n_embd;
            m.add = x;
            m.ld_add = 16384;
            m.y = y;
            m.ldy = 40000;
            a.merge = what == 2 ? &m : nullptr;
            OK(api->experts(dev, &a));
        });
        static const char *const whats[] = {"route", "route, experts", "route, experts, merge"};
        char s[256];
        snprintf(s, sizeof s, "%s, %d tokens, %.0f %%: %s", name, n_tok, 100 * share, whats[what]);
        report(s, us, what ? n_tok * n_used * share * each : 1);
    };
    for (int what = 0; what < 3; what++) run(1, 1, what);
    run(1, 0.5, 2);
    run(1, 0, 2);
    for (int n_tok : {2, 4, 8}) run(n_tok, 1, 2);
    run(8, 0.5, 2);
    in.free();
    out.free();
}

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    if (argc > 1) filter = argv[1];
    open_gpu();
    te_cuda_info info;
    OK(api->info(dev, &info));
    x = device_of(normals(16384 * 8));
    vector = device_of(normals(16384));
    vector_one = device_of(std::vector<float>(16384, 1));
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
            te_linear_args op = {};
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
    const step_shape steps[] = {
        {"Llama-2-7B", 4096, 11008, 11008, TE_F16, step_shape::DENSE},
        {"Llama-2-7B", 4096, 11008, 11008, TE_Q4_0, step_shape::DENSE},
        {"Llama-2-7B", 4096, 11008, 11008, TE_Q8_0, step_shape::DENSE},
        {"Llama-2-7B", 4096, 11008, 11008, TE_Q4_K, step_shape::DENSE},
        {"Llama-2-7B", 4096, 11008, 11008, TE_F16, step_shape::PREDICTED},
        {"Bamboo-7B", 1024, 14336, 14336, TE_F16, step_shape::DENSE},
        {"Bamboo-7B", 1024, 14336, 14336, TE_F16, step_shape::EXACT},
        {"Bamboo-7B", 1024, 14336, 14336, TE_F16, step_shape::PREDICTED},
        {"Bamboo-7B", 1024, 14336, 4352, TE_F16, step_shape::PREDICTED},
        {"Bamboo-7B", 1024, 14336, 14336, TE_Q4_0, step_shape::PREDICTED},
        {"Bamboo-7B", 1024, 14336, 14336, TE_Q4_0, step_shape::EXACT},
        {"Bamboo-7B", 1024, 14336, 14336, TE_Q4_K, step_shape::PREDICTED},
    };
    for (const step_shape &k : steps) bench_step(k);
    for (int type : {TE_Q4_0, TE_Q8_0, TE_Q4_K, TE_F16}) bench_experts(type, 2048, 768, 128, 8);
    for (bool by_neuron : {false, true}) bench_experts(TE_Q4_0, 2560, 768, 64, 6, by_neuron);
    bench_experts(TE_Q4_0, 4096, 14336, 8, 2);
    bench_experts(TE_MXFP4, 2880, 2880, 32, 4);
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
    for (int n_head : {16, 128})
        for (int n_pos : {512, 8000}) bench_latent(n_head, n_pos, 1);
    bench_latent(16, 2048, 8);
    bench_latent(16, 2048, 512);
    api->close(dev);
    return 0;
}
