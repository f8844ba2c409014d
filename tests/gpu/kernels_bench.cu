// kernels_bench.cu - how fast each operation reads its weights, on the first GPU.
//
//     kernels_bench [FILTER]     one line per operation whose name contains FILTER, and the same as JSON lines on stderr
//
// An operation is recorded many times into one graph, each time on other weights, so that nothing is found in a cache; its
// time is that of the graph over their number, so what one operation hides of the next one's start is counted as in a
// token. Shares are of the rate at which a plain kernel reads the same memory in the same run.
#include "bench_step.hpp"
#include "benches.hpp"

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
