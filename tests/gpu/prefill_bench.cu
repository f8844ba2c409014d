// prefill_bench.cu - how fast the operations of prompts are, and a whole prompt made of them, on the first GPU.
//
//     prefill_bench [CUBLASLT] [FILTER]     one line for each, and the same as JSON lines on stderr
//
// Products are shown as TFLOPS and as share of 790, what large BF16 products of random numbers reach on an H200; memory as
// GB/s and share of 4540, what a plain kernel reads there.
#include "gpu.hpp"

static const char *filter = "";
static const char *by = "own";

template <class F> static double time_us(F op, int turns = 12) {
    op();
    double best = 1e30;
    for (int batch = 0; batch < 3; batch++) {
        OK(api->mark(dev, 0));
        for (int i = 0; i < turns; i++) op();
        OK(api->mark(dev, 1));
        finish();
        double ms;
        OK(api->elapsed(dev, 0, 1, &ms));
        best = ms < best ? ms : best;
    }
    return best * 1e3 / turns;
}
static bool wanted(const char *name) { return strstr(name, filter) != nullptr; }
static void flops(const char *name, double us, double n) {
    printf("%-64s %10.1f us %7.1f TFLOPS %5.2f\n", name, us, n / us / 1e6, n / us / 1e6 / 790);
    fprintf(stderr, "{\"name\": \"%s\", \"us\": %.2f, \"tflops\": %.1f}\n", name, us, n / us / 1e6);
}
static void bytes(const char *name, double us, double n) {
    printf("%-64s %10.1f us %7.0f GB/s   %5.2f\n", name, us, n / us / 1e3, n / us / 1e3 / 4540);
    fprintf(stderr, "{\"name\": \"%s\", \"us\": %.2f, \"gb_s\": %.1f}\n", name, us, n / us / 1e3);
}

static te_mat mat(int type, int rows, int cols) { // from few distinct rows
    matrix few = matrix_new(type, 256, cols, 0.02f);
    te_mat m = few.m;
    m.n_rows = rows;
    m.w = device_new<uint8_t>(m.stride * (size_t)rows);
    for (int r = 0; r < rows; r += 256)
        OK(api->copy(dev, (uint8_t *)m.w + (size_t)r * m.stride, few.m.w,
                     m.stride * (size_t)(rows - r < 256 ? rows - r : 256)));
    finish();
    few.free();
    return m;
}
static te_cuda_half half_new(int n_tok, int cols) {
    return {device_new<uint16_t>((size_t)n_tok * (size_t)cols), (size_t)cols, device_new<float>((size_t)n_tok + 1)};
}

constexpr int MAX_TOK = 2048, D = 4096, FF = 14336, KV = 1024;
static float *x, *x2, *q, *k, *v, *gate, *up, *vector;
static te_cuda_half in, middle;
static void *scratch;
static size_t n_scratch;

static te_cuda_gemm gemm_op(te_cuda_half from, int n_tok, bool transposed) {
    te_cuda_gemm op = {};
    op.x = from;
    op.n_tok = n_tok;
    op.transposed = transposed;
    op.scratch = scratch;
    op.n_scratch = n_scratch;
    return op;
}
static void put(te_cuda_gemm *op, te_mat w, float *y, size_t ldy, bool add) {
    te_product *p = &op->product[op->n_products++];
    p->w = w;
    p->y = y;
    p->ldy = ldy;
    if (add) {
        p->add = y;
        p->ld_add = ldy;
    }
}
static void to_half(const float *from, int cols, int n_tok, bool norm, te_cuda_half to) {
    te_cuda_halve op = {};
    op.x = from;
    op.ldx = (size_t)cols;
    op.n_tok = n_tok;
    op.cols = cols;
    if (norm) op.norm = {TE_RMS_NORM, 1e-5f, vector, nullptr};
    op.to = to;
    OK(api->halve(dev, &op));
}
static void act(int n_tok, int n, const int32_t *id) {
    te_cuda_act op = {};
    op.gate = gate;
    op.up = up;
    op.ld_gate = op.ld_up = (size_t)n;
    op.n_tok = n_tok;
    op.n = n;
    op.id = id;
    op.act = TE_RELU;
    op.to = middle;
    op.to.ld = (size_t)n;
    OK(api->act(dev, &op));
}

struct cache { // K and V of one layer
    uint8_t *k, *v;
    int32_t *pos, *seq, *table;
    float *cs, *scratch;
};
static void attend(const cache &c, int n_tok, int n_ctx) {
    te_attention_args op = {};
    op.q = q;
    op.k = k;
    op.v = v;
    op.ldq = D;
    op.ldk = op.ldv = KV;
    op.n_tok = n_tok;
    op.n_head = 32;
    op.n_head_kv = 8;
    op.n_embd_head = 128;
    op.scale = 0.088f;
    op.rope = TE_ROPE_NORM;
    op.n_rot = 128;
    op.cs = c.cs;
    op.pos = c.pos;
    op.row = c.seq;
    op.table = c.table;
    op.ld_table = n_ctx / 64;
    op.k_pool = c.k;
    op.v_pool = c.v;
    op.type_k = op.type_v = TE_F16;
    op.n_ctx = n_ctx;
    op.out = x2;
    op.ld_out = D;
    op.scratch = c.scratch;
    OK(api->prompt_attention(dev, &op));
}
static cache cache_new(int n_tok, int first) {
    const int n_ctx = 8192;
    const size_t n_bytes = (size_t)n_ctx * KV * 2;
    std::vector<int32_t> pos, seq((size_t)n_tok, 0), table;
    for (int t = 0; t < n_tok; t++) pos.push_back(first + t);
    for (int i = 0; i < n_ctx / 64; i++) table.push_back(i * 37 % (n_ctx / 64));
    cache c = {device_new<uint8_t>(n_bytes),
               device_new<uint8_t>(n_bytes),
               device_of(pos),
               device_of(seq),
               device_of(table),
               device_of(normals((size_t)n_tok * 128)),
               device_new<float>((size_t)n_tok * 32 * 64)};
    OK(api->fill(dev, c.k, 0x11, n_bytes));
    OK(api->fill(dev, c.v, 0x11, n_bytes));
    return c;
}

static void bench_products(int type) {
    char name[128];
    struct {
        const char *what;
        int rows, cols;
        bool transposed;
    } shapes[] = {{"output 4096 x 4096", D, D, false},
                  {"gate 14336 x 4096", FF, D, false},
                  {"down by neurons 14336 x 4096", FF, D, true}};
    for (auto &s : shapes) {
        te_mat w = mat(type, s.rows, s.cols);
        for (int n_tok : {16, 32, 33, 64, 65, 96, 97, 128, 512, 2048}) {
            snprintf(name, sizeof name, "gemm %s %s, %d tokens, %s", te_type_get(type)->name, s.what, n_tok, by);
            if (!wanted(name)) continue;
            te_cuda_half from = middle;
            from.ld = (size_t)(s.transposed ? s.rows : s.cols);
            te_cuda_gemm op = gemm_op(from, n_tok, s.transposed);
            put(&op, w, gate, (size_t)(s.transposed ? s.cols : s.rows), false);
            flops(name, time_us([&] { OK(api->gemm(dev, &op)); }), 2.0 * n_tok * s.rows * s.cols);
            te_cuda_half form = api->half_form(dev, type, n_tok, s.transposed ? s.rows : s.cols);
            if (!form.tiles || (s.transposed && !form.matrices)) continue;
            if (s.transposed) form = api->half_form(dev, TE_F16, n_tok, s.rows);
            if (!form.tiles) continue; // more tokens than products by neuron take
            op.x.ld = form.ld;
            op.x.tiles = form.tiles;
            op.x.words = form.words;
            op.x.matrices = form.matrices;
            snprintf(name, sizeof name, "gemm %s %s, %d tokens, as they are", te_type_get(type)->name, s.what, n_tok);
            bytes(name, time_us([&] { OK(api->gemm(dev, &op)); }), (double)w.stride * s.rows);
        }
        OK(api->free(dev, (void *)w.w));
    }
}

// A layer of Bamboo-7B over and over; with cold neurons those rows come from host memory.
static void bench_prompt(int type, int n_tok, int n_cold) {
    char name[128];
    snprintf(name, sizeof name, "prompt of 32 layers %s, %d tokens, %d of 14336 streamed, %s", te_type_get(type)->name,
             n_tok, n_cold, by);
    if (!wanted(name)) return;
    const int n_hot = FF - n_cold;
    te_mat wq = mat(type, D, D), wk = mat(type, KV, D), wv = mat(type, KV, D), wo = mat(type, D, D);
    te_mat hot[3], slot[2][3];
    const void *host[3] = {};
    int32_t *ids = nullptr, *cold = nullptr;
    const size_t stride = te_row_bytes(type, D);
    for (int i = 0; i < 3; i++) hot[i] = mat(type, n_hot, D);
    if (n_cold) {
        std::vector<int32_t> list, other;
        for (int j = 0; j < FF; j++) // runs, as neurons of like frequency are not neighbours
            (((int64_t)(j + 1) * n_cold / FF > (int64_t)j * n_cold / FF) ? list : other).push_back(j);
        cold = device_of(list);
        ids = device_of(other);
        for (int i = 0; i < 3; i++) {
            void *p;
            OK(api->host_alloc(dev, stride * FF, &p));
            memset(p, 0x11, stride * FF);
            host[i] = p;
            for (auto &s : slot) {
                s[i] = {nullptr, api->stride(type, D), type, D, n_cold};
                s[i].w = device_new<uint8_t>(s[i].stride * (size_t)n_cold);
            }
        }
    }
    const cache c = cache_new(n_tok, 0);
    auto load = [&](int layer) {
        for (int i = 0; i < 3; i++) {
            const te_cuda_pack op = {slot[layer % 2][i], host[i], stride, cold, nullptr};
            OK(api->load(dev, layer % 2, &op));
        }
    };
    auto ffn = [&](const te_mat *w, const int32_t *id) {
        te_cuda_gemm a = gemm_op(in, n_tok, false);
        put(&a, w[0], gate, (size_t)w[0].n_rows, false);
        put(&a, w[1], up, (size_t)w[0].n_rows, false);
        OK(api->gemm(dev, &a));
        act(n_tok, w[0].n_rows, id);
        te_cuda_half h = middle;
        h.ld = (size_t)w[0].n_rows;
        te_cuda_gemm b = gemm_op(h, n_tok, true);
        put(&b, w[2], x, D, true);
        OK(api->gemm(dev, &b));
    };
    const double us = time_us(
        [&] {
            if (n_cold) load(0);
            for (int layer = 0; layer < 32; layer++) {
                if (n_cold && layer + 1 < 32) load(layer + 1);
                to_half(x, D, n_tok, true, in);
                te_cuda_gemm a = gemm_op(in, n_tok, false);
                put(&a, wq, q, D, false);
                put(&a, wk, k, KV, false);
                put(&a, wv, v, KV, false);
                OK(api->gemm(dev, &a));
                attend(c, n_tok, 8192);
                to_half(x2, D, n_tok, false, in);
                te_cuda_gemm o = gemm_op(in, n_tok, false);
                put(&o, wo, x, D, true);
                OK(api->gemm(dev, &o));
                to_half(x, D, n_tok, true, in);
                ffn(hot, ids);
                if (n_cold) {
                    OK(api->load_ready(dev, layer % 2));
                    ffn(slot[layer % 2], cold);
                    OK(api->load_free(dev, layer % 2));
                }
            }
        },
        2);
    const double weights = 2.0 * D * D + 2.0 * KV * D + 3.0 * FF * D;
    flops(name, us, 32 * 2.0 * n_tok * weights);
    printf("    %.0f tokens/s", n_tok / us * 1e6);
    if (n_cold) printf(", %.1f GB/s over the bus", 32.0 * 3 * n_cold * (double)stride / us / 1e3);
    printf("\n");
    for (te_mat *m : {&wq, &wk, &wv, &wo, &hot[0], &hot[1], &hot[2]}) OK(api->free(dev, (void *)m->w));
    for (int i = 0; i < 3 && n_cold; i++) {
        OK(api->host_free(dev, (void *)host[i]));
        for (auto &s : slot) OK(api->free(dev, (void *)s[i].w));
    }
}

// A mixture's experts, by a router of random scores: what is there, in one call. skew: of the scores.
static void bench_experts(int type, int n_embd, int n_ff, int n_expert, int n_used, int n_tok, float skew,
                          bool by_neuron = false) {
    char name[160];
    snprintf(name, sizeof name, "%s experts %d of %d, %d x %d%s, %d tokens, skew %g", te_type_get(type)->name, n_used,
             n_expert, n_ff, n_embd, by_neuron ? ", down by neuron" : "", n_tok, (double)skew);
    if (!wanted(name)) return;
    const te_mat g = mat(type, n_expert * n_ff, n_embd), u = mat(type, n_expert * n_ff, n_embd),
                 d = by_neuron ? mat(type, n_expert * n_ff, n_embd) : mat(type, n_expert * n_embd, n_ff);
    std::vector<float> score = normals((size_t)(n_tok * n_expert)), liked = normals((size_t)n_expert, skew);
    for (size_t i = 0; i < score.size(); i++) score[i] += liked[i % (size_t)n_expert];
    std::vector<int32_t> place((size_t)n_expert);
    for (int e = 0; e < n_expert; e++) place[(size_t)e] = e;
    const size_t n_routes = (size_t)n_tok * (size_t)n_used, widest = (size_t)(n_ff > n_embd ? n_ff : n_embd);
    te_route_args r = {};
    r.score = device_of(score);
    r.ld_score = (size_t)n_expert;
    r.n_tok = n_tok;
    r.n_expert = n_expert;
    r.n_used = n_used;
    r.normed = 1;
    r.scale = 1;
    r.place = device_of(place);
    r.expert = device_new<int32_t>(n_routes);
    float *weight = device_new<float>(n_routes);
    r.weight = weight;
    te_cuda_prompt_experts op = {};
    op.of.n_tok = n_tok;
    op.of.n_expert = op.of.n_places = n_expert;
    op.of.n_used = n_used;
    op.of.n_ff = n_ff;
    op.of.gate = g;
    op.of.up = u;
    (by_neuron ? op.of.down_t : op.of.down) = d;
    op.of.place = r.place;
    op.of.expert = r.expert;
    op.of.weight = weight;
    op.of.act = TE_SILU;
    op.of.y = device_new<float>((size_t)n_tok * (size_t)n_embd);
    op.x = half_new(n_tok, n_embd);
    const float *from = device_of(normals((size_t)n_tok * (size_t)n_embd));
    // As much at once as pi_hidden_rows says.
    auto once = [&](int n) {
        const size_t most = ((size_t)16 << 20) / n_routes / 256 * 256;
        return most < 256 ? 256 : most < (size_t)n ? (int)most : n;
    };
    op.n_ff_once = once(n_ff);
    op.n_embd_once = once(n_embd);
    op.values = device_new<float>(n_routes * widest);
    op.h = half_new((int)n_routes, n_ff);
    op.lists = device_new<int32_t>(api->prompt_experts_words(&op.of));
    snprintf(name + strlen(name), sizeof name - strlen(name), ": route");
    bytes(name, time_us([&] { OK(api->route(dev, &r)); }), 4.0 * n_tok * n_expert);
    snprintf(name + strlen(name) - 5, 24, "all");
    flops(name, time_us([&] {
              to_half(from, n_embd, n_tok, false, op.x);
              OK(api->route(dev, &r));
              OK(api->prompt_experts(dev, &op));
          }),
          6.0 * (double)n_routes * n_ff * n_embd);
    for (const void *p : {g.w, u.w, d.w, (const void *)op.values, (const void *)op.h.v}) OK(api->free(dev, (void *)p));
}

// A router's scores, with an RMS norm and what else is made of the input.
static void bench_scores(int n_tok, int rows, int cols) {
    char name[64];
    snprintf(name, sizeof name, "scores %d of %d columns, %d tokens", rows, cols, n_tok);
    if (!wanted(name)) return;
    te_cuda_halve side = {};
    side.x = x;
    side.ldx = (size_t)cols;
    side.n_tok = n_tok;
    side.cols = cols;
    side.norm = {TE_RMS_NORM, 1e-5f, device_of(normals((size_t)cols)), nullptr};
    side.to = api->half_form(dev, TE_Q4_0, n_tok, cols);
    side.to.v = device_new<uint16_t>(8 * (size_t)side.to.tiles * side.to.ld);
    side.to.scale = device_new<float>((size_t)n_tok + 1);
    side.keep = device_new<float>((size_t)n_tok * (size_t)cols);
    te_cuda_scores op = {};
    op.x = x;
    op.ldx = (size_t)cols;
    op.n_tok = n_tok;
    op.cols = cols;
    op.norm = side.norm;
    op.w = {device_of(normals((size_t)rows * (size_t)cols)), sizeof(float) * (size_t)cols, TE_F32, cols, rows};
    op.y = device_new<float>((size_t)n_tok * (size_t)rows);
    op.ldy = (size_t)rows;
    op.side = &side;
    bytes(name, time_us([&] { OK(api->scores(dev, &op)); }), 4.0 * rows * cols);
    for (const void *p : {(const void *)side.norm.w, (const void *)side.to.v, (const void *)side.to.scale,
                          (const void *)side.keep, op.w.w, (const void *)op.y})
        OK(api->free(dev, (void *)p));
}

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const char *blas = argc > 1 && strchr(argv[1], '/') ? argv[1] : nullptr;
    if (argc > (blas ? 2 : 1)) filter = argv[blas ? 2 : 1];
    open_gpu();
    x = device_of(normals((size_t)MAX_TOK * D));
    x2 = device_new<float>((size_t)MAX_TOK * D);
    q = device_of(normals((size_t)MAX_TOK * D));
    k = device_of(normals((size_t)MAX_TOK * KV));
    v = device_of(normals((size_t)MAX_TOK * KV));
    gate = device_new<float>((size_t)MAX_TOK * FF);
    up = device_new<float>((size_t)MAX_TOK * FF);
    for (int t = 0; t < MAX_TOK; t += 64) // values of usual sizes
        for (float *p : {gate, up}) OK(api->copy(dev, p + (size_t)t * FF, x, (size_t)64 * FF * 4));
    vector = device_of(normals(D));
    in = half_new(MAX_TOK, D);
    middle = half_new(MAX_TOK, FF);
    {
        const std::vector<float> few = normals((size_t)64 * FF);
        float *p = device_of(few);
        for (int t = 0; t < MAX_TOK; t += 64) {
            te_cuda_half part = middle;
            part.v = (uint16_t *)middle.v + (size_t)t * FF;
            to_half(p, FF, 64, false, part);
        }
        finish();
    }
    n_scratch = (size_t)96 << 20; // as gemm_scratch advises at most
    scratch = device_new<uint8_t>(n_scratch);
    char name[128];
    for (int n_tok : {64, 512, 2048}) {
        snprintf(name, sizeof name, "norm to F16, %d x 4096", n_tok);
        if (wanted(name)) bytes(name, time_us([&] { to_half(x, D, n_tok, true, in); }), 6.0 * n_tok * D);
        snprintf(name, sizeof name, "act, %d x 14336", n_tok);
        if (wanted(name)) bytes(name, time_us([&] { act(n_tok, FF, nullptr); }), 10.0 * n_tok * FF);
        for (int first : {0, 4096}) {
            snprintf(name, sizeof name, "attention 32 on 8 heads, %d tokens behind %d", n_tok, first);
            if (!wanted(name)) continue;
            const cache c = cache_new(n_tok, first);
            flops(name, time_us([&] { attend(c, n_tok, 8192); }), 4.0 * D * n_tok * (first + 0.5 * n_tok));
        }
    }
    for (int n_tok : {16, 128, 512, 2048})
        for (float skew : {0.0f, 1.0f}) bench_experts(TE_Q4_0, 2048, 768, 128, 8, n_tok, skew);
    for (int type : {TE_F16, TE_Q8_0, TE_Q4_K, TE_Q6_K}) bench_experts(type, 2048, 768, 128, 8, 2048, 0.5f);
    bench_experts(TE_Q4_0, 4096, 14336, 8, 2, 2048, 0);
    for (bool by_neuron : {false, true}) bench_experts(TE_Q4_0, 2560, 768, 64, 6, 2048, 0.5f, by_neuron);
    for (int type : {TE_F16, TE_Q8_0, TE_Q4_0})
        for (bool listed : {false, true}) {
            snprintf(name, sizeof name, "load %s 14336 x 4096%s", te_type_get(type)->name, listed ? ", listed" : "");
            if (!wanted(name)) continue;
            void *host;
            const size_t n_bytes = te_row_bytes(type, D) * FF;
            OK(api->host_alloc(dev, n_bytes, &host));
            std::vector<int32_t> all;
            for (int i = 0; i < FF; i++) all.push_back(i);
            te_mat to = mat(type, FF, D);
            const te_cuda_pack op = {to, host, te_row_bytes(type, D), listed ? device_of(all) : nullptr, nullptr};
            const double us = time_us(
                [&] {
                    OK(api->load_free(dev, 0)); // the load begins when the mark was passed
                    OK(api->load(dev, 0, &op));
                    OK(api->load_ready(dev, 0));
                },
                4);
            bytes(name, us, (double)n_bytes);
            OK(api->host_free(dev, host));
            OK(api->free(dev, (void *)to.w));
        }
    for (int type : {TE_Q4_0, TE_F16})
        for (int cols : {2048, 768}) { // gate and up, down of experts of 768 neurons
            const int each = cols == 2048 ? 768 : 2048, n = 12;
            snprintf(name, sizeof name, "load %s of %d experts, %d x %d", te_type_get(type)->name, n, each, cols);
            if (!wanted(name)) continue;
            void *host;
            const size_t stride = te_row_bytes(type, cols), n_bytes = stride * (size_t)each * (size_t)n;
            OK(api->host_alloc(dev, 2 * n_bytes + 64, &host));
            std::vector<int32_t> ids;
            for (int i = 0; i < n; i++) ids.push_back(2 * i + (int)(random_word() % 2));
            te_mat to = mat(type, n * each, cols);
            te_cuda_pack op = {to, (uint8_t *)host + 32, stride, device_of(ids), nullptr}; // as files align tensors
            op.each = each;
            const double us = time_us(
                [&] {
                    OK(api->load_free(dev, 0));
                    OK(api->load(dev, 0, &op));
                    OK(api->load_ready(dev, 0));
                },
                8);
            bytes(name, us, (double)n_bytes);
            OK(api->host_free(dev, host));
            OK(api->free(dev, (void *)to.w));
            OK(api->free(dev, (void *)op.rows));
        }
    for (int n_tok : {9, 16, 64}) {
        bench_scores(n_tok, 128, 2048);
        bench_scores(n_tok, 32, 2880);
    }
    for (int turn = 0; turn < (blas ? 2 : 1); turn++) {
        if (turn) OK(api->set_blas(dev, blas));
        by = api->gemm_by(dev);
        for (int type : {TE_F16, TE_Q8_0, TE_Q4_0, TE_Q4_K, TE_Q5_K, TE_Q6_K}) bench_products(type);
        for (int type : {TE_F16, TE_Q4_0})
            for (int n_tok : {64, 512, 2048}) {
                bench_prompt(type, n_tok, 0);
                if (n_tok > 64) bench_prompt(type, n_tok, 8960);
            }
    }
    api->close(dev);
    return 0;
}
