// prefill_check.cpp - the operations of prompts of te_cuda.h against doubles, on the first GPU.
//
//     prefill_check [CUBLASLT] [PART ...] [FORMAT ...]     parts: halve gemm act scores experts attention load; all by default
//
// With the path of cuBLASLt, products are checked by it and by our own kernels. Exits with 1 if a value is off, with 2 if
// there is no GPU. Every operation is run twice for the same bits, and gemm from a recording, too. Inputs of products are
// rounded to F16, a relative error of at most 2^-11 for each of the two factors: of a sum the allowed error is six times
// what independent errors of that size make, and 2^-18 of the sum of sizes for the products' own additions.
#include <functional>

#include "check_products.hpp"
#include "check_scores.hpp"

// ---- halve ----

// type: as halves_new's.
static void check_halve_case(int n_tok, int cols, te_norm_kind kind, bool relu, double size, int type = -1) {
    AT("halve %d x %d, norm %d, relu %d, size %g, for type %d", n_tok, cols, (int)kind, (int)relu, size, type);
    floats x(n_tok, cols, (float)size);
    const std::vector<float> w = normals((size_t)cols), b = normals((size_t)cols);
    te_cuda_halve op = {};
    op.x = x.p;
    op.ldx = x.ld;
    op.n_tok = n_tok;
    op.cols = cols;
    op.norm = {kind, 1e-5f, device_of(w), kind == TE_LAYER_NORM ? device_of(b) : nullptr};
    op.relu = relu;
    halves to = halves_new(n_tok, cols, type);
    op.to = to.h;
    OK(api->halve(dev, &op));
    to.read();
    double most = 0;
    std::vector<double> all, of_token((size_t)n_tok, 0);
    for (int t = 0; t < n_tok; t++) {
        double mean = 0, sum = 0;
        for (int c = 0; c < cols && kind == TE_LAYER_NORM; c++) mean += x.at(t, c) / cols;
        for (int c = 0; c < cols; c++) sum += (x.at(t, c) - mean) * (x.at(t, c) - mean);
        for (int c = 0; c < cols; c++) {
            double v = x.at(t, c);
            if (kind != TE_NO_NORM) v = (v - mean) / sqrt(sum / cols + (double)1e-5f) * (double)w[(size_t)c];
            if (kind == TE_LAYER_NORM) v += (double)b[(size_t)c];
            if (relu && v < 0) v = 0;
            all.push_back(v);
            most = std::max(most, fabs(v));
            of_token[(size_t)t] = std::max(of_token[(size_t)t], fabs(v));
        }
    }
    for (int t = 0; t < n_tok; t++)
        for (int c = 0; c < cols; c++) {
            const double v = all[(size_t)t * (size_t)cols + (size_t)c];
            near(t * cols + c, to.at(t, c), v, 0x1p-11 * fabs(v) + 0x1p-17 * (to.h.tiles ? of_token[(size_t)t] : most));
        }
    to.free();
    x.free();
}
static void check_halve() {
    for (double size : {1.0, 3e5, 1e-6, 1e30})
        for (int cols : {20, 333, 4096}) check_halve_case(cols == 20 ? 600 : 9, cols, TE_NO_NORM, false, size);
    for (int cols : {96, 333, 4096, 14336})
        for (te_norm_kind kind : {TE_RMS_NORM, TE_LAYER_NORM}) check_halve_case(11, cols, kind, false, 1);
    check_halve_case(65, 1024, TE_NO_NORM, true, 1);
    for (int type : {TE_F16, TE_Q4_0, TE_Q4_K}) { // three orders of columns
        for (double size : {1.0, 3e5, 1e-6, 1e30}) check_halve_case(9, 4096, TE_NO_NORM, false, size, type);
        check_halve_case(17, 333, TE_LAYER_NORM, false, 1, type);
        for (int n_tok : {64, 73, 127, 150, 192}) check_halve_case(n_tok, 1024, TE_RMS_NORM, true, 1, type);
    }
}

// ---- gemm ----

static void check_gemm(const char *blas) {
    for (int type : all_types) check_gemm_of_few(type);
    for (int by = 0; by < (blas ? 2 : 1); by++) {
        OK(api->set_blas(dev, by ? blas : nullptr));
        for (int type : all_types) {
            const bool f = is_float(type), k256 = te_type_get(type)->block_weights == 256;
            const int odd = f ? 333 : k256 ? 768 : 96, cols = k256 ? 1024 : 1056;
            check_gemm_case({type, 300, odd, 9, false, true, false, false, false, false});
            check_gemm_case({type, 130, cols, 63, false, false, true, false, false, false});
            check_gemm_case({type, 1000, cols, 64, false, true, true, false, true, true});
            check_gemm_case({type, 37, cols, 65, false, true, false, true, false, false});
            check_gemm_case({type, 520, odd, 512, false, false, false, true, false, true});
            check_gemm_case({type, 333, odd, 9, true, true, false, false, false, false});
            check_gemm_case({type, 700, cols, 65, true, true, false, true, false, true});
            check_gemm_case({type, 64, odd, 512, true, false, false, false, false, false});
        }
        check_gemm_case({TE_F16, 4100, 4096, 512, false, true, false, true, false, false});
        check_gemm_case({TE_F16, 4096, 2048, 2048, true, false, false, true, false, false});
        check_gemm_case({TE_Q4_0, 9000, 2048, 300, false, true, false, false, true, true});
    }
    OK(api->set_blas(dev, nullptr));
}

// ---- act ----

static void check_act_case(te_activation act, bool gated, bool masked, bool named, int n_tok, int n, int type = -1) {
    AT("act %d, gated %d, mask %d, ids %d, %d x %d, for type %d", (int)act, gated, masked, named, n_tok, n, type);
    const int neurons = named ? 3 * n : n;
    floats gate(n_tok, n),
        up(n_tok, n, act == TE_GELU || act == TE_GELU_TANH ? 1 : 4); // a float GELU is 0 far below 0, a double's not
    const std::vector<float> bias = normals((size_t)neurons);
    std::vector<int32_t> id((size_t)n);
    for (int i = 0; i < n; i++) id[(size_t)i] = named ? 3 * i + (int)(random_word() % 3) : i;
    const size_t ld_mask = up_to((size_t)neurons, 32) / 8;
    std::vector<uint8_t> mask((size_t)n_tok * ld_mask);
    for (uint8_t &m : mask) m = (uint8_t)random_word();
    te_cuda_act op = {};
    op.gate = gated ? gate.p : nullptr;
    op.up = up.p;
    op.ld_gate = gate.ld;
    op.ld_up = up.ld;
    op.n_tok = n_tok;
    op.n = n;
    op.id = named ? device_of(id) : nullptr;
    op.up_bias = device_of(bias);
    op.act = act;
    op.threshold = act == TE_RELU ? 0.25f : 0;
    op.mask = masked ? device_of(mask) : nullptr;
    op.ld_mask = ld_mask;
    halves to = halves_new(n_tok, n, type);
    op.to = to.h;
    op.fired = device_of(std::vector<uint32_t>((size_t)neurons, 5));
    op.counts = device_of(std::vector<uint32_t>(3, 7));
    OK(api->act(dev, &op));
    to.read();
    std::vector<uint32_t> fired((size_t)neurons, 5), counts(3, 7);
    for (int t = 0; t < n_tok; t++)
        for (int c = 0; c < n; c++) {
            const int j = id[(size_t)c];
            const bool on = !masked || (mask[(size_t)t * ld_mask + (size_t)j / 8] >> j % 8 & 1);
            const double u = (double)((float)up.at(t, c) + bias[(size_t)j]), th = (double)op.threshold;
            double h = !gated ? activation(act, th, u)
                              : activation(act, th, gate.at(t, c)) * (act == TE_DRELU ? std::max(u, 0.0) : u);
            if (!on) h = 0;
            counts[0] += on;
            counts[1] += on;
            counts[2] += h != 0;
            fired[(size_t)j] += h != 0;
            near(t * n + c, to.at(t, c), h, 0x1p-10 * fabs(h) + 0x1p-22);
        }
    is_true(host_of(op.fired, (size_t)neurons) == fired, "fired is wrong");
    is_true(host_of(op.counts, 3) == counts, "counts are wrong");
    to.free();
    gate.free();
    up.free();
}
static void check_act() {
    for (te_activation act : {TE_RELU, TE_DRELU, TE_SILU, TE_GELU, TE_GELU_TANH})
        for (bool gated : {false, true})
            for (bool masked : {false, true})
                check_act_case(act, gated, masked, masked == gated, 65, gated ? 1001 : 1000);
    for (int type : {TE_F16, TE_Q4_0, TE_Q4_K}) check_act_case(TE_RELU, true, true, false, 40, 1024, type);
}

// ---- load ----

static void check_load_case(int type, int n_rows, int cols, bool rows, bool blocks) {
    AT("load %s %d x %d, rows %d, blocks %d", te_type_get(type)->name, n_rows, cols, rows, blocks);
    const size_t stride = te_row_bytes(type, cols);
    void *host = nullptr;
    OK(api->host_alloc(dev, stride * (size_t)n_rows + 64, &host));
    // files align rows to their blocks only
    uint8_t *src = (uint8_t *)host + (type == TE_F32 ? 4 : te_type_get(type)->block_bytes % 2 ? 3 : 2);
    for (size_t i = 0; i < stride * (size_t)n_rows; i++) src[i] = (uint8_t)random_word();
    std::vector<int32_t> row, block;
    const int w = te_type_get(type)->block_weights;
    for (int r = 0; r < n_rows; r++)
        if (random_word() % 3) row.push_back(r);
    for (int b = 0; b < cols / w; b++)
        if (random_word() % 3 || b == 1) block.push_back(b);
    const int out_rows = rows ? (int)row.size() : n_rows, out_cols = blocks ? (int)block.size() * w : cols;
    te_cuda_pack op = {};
    op.dst = {nullptr, api->stride(type, out_cols), type, out_cols, out_rows};
    op.src = src;
    op.src_stride = stride;
    op.rows = rows ? device_of(row) : nullptr;
    op.blocks = blocks ? device_of(block) : nullptr;
    const size_t n_bytes = op.dst.stride * (size_t)out_rows;
    std::vector<uint8_t> got[3];
    for (int i = 0; i < 3; i++) {
        uint8_t *to = device_of(std::vector<uint8_t>(n_bytes + 16, 0xee));
        op.dst.w = to;
        te_cuda_graph *g = nullptr;
        if (i == 2) OK(api->capture_begin(dev));
        if (i == 0) OK(api->pack(dev, &op));
        if (i > 0) {
            OK(api->load(dev, 1, &op));
            OK(api->load_ready(dev, 1));
        }
        if (i == 2) {
            OK(api->capture_end(dev, &g));
            OK(api->graph_launch(dev, g));
        }
        got[i] = host_of(to, n_bytes + 16);
        if (g) api->graph_free(g);
        OK(api->free(dev, to));
    }
    is_true(got[0] == got[1], "other bytes than pack's");
    is_true(got[0] == got[2], "other bytes from a recording");
    OK(api->host_free(dev, host));
}

// Rows of entries that are wanted come, those of others stay as they were; what says so is written by the device in front,
// behind work that takes long.
static void check_wanted_case(int type, int n_entries, int each, int cols, int kind) {
    AT("load %s, %d entries of %d rows of %d, wanted %d", te_type_get(type)->name, n_entries, each, cols, kind);
    const int n_all = n_entries + 5, n_rows = n_entries * each;
    const size_t stride = te_row_bytes(type, cols), n_src = stride * (size_t)(n_all * each), n_work = 64u << 20;
    void *host = nullptr;
    OK(api->host_alloc(dev, n_src + 64, &host));
    uint8_t *src = (uint8_t *)host + (type == TE_F32 ? 4 : te_type_get(type)->block_bytes % 2 ? 3 : 2);
    for (size_t i = 0; i < n_src; i++) src[i] = (uint8_t)random_word();
    std::vector<int32_t> row;
    for (int e = 0; e < n_all && (int)row.size() < n_entries; e++)
        if (random_word() % 3 || n_all - e == n_entries - (int)row.size()) row.push_back(e);
    std::vector<uint32_t> wanted;
    for (int e = 0; e < n_all; e++) wanted.push_back(kind == 0 ? 0 : kind == 1 ? 7 : random_word() % 3 == 0);
    te_cuda_pack op = {};
    op.dst = {nullptr, api->stride(type, cols), type, cols, n_rows};
    op.src = src;
    op.src_stride = stride;
    op.rows = device_of(row);
    op.each = each;
    uint32_t *first = device_of(std::vector<uint32_t>(wanted.size(), 0)), *then = device_of(wanted);
    uint8_t *work = device_new<uint8_t>(2 * n_work);
    const size_t n_bytes = op.dst.stride * (size_t)n_rows;
    std::vector<uint8_t> got[2];
    for (int i = 0; i < 2; i++) {
        uint8_t *to = device_of(std::vector<uint8_t>(n_bytes + 16, 0xee));
        op.dst.w = to;
        op.wanted = i ? first : nullptr;
        if (i) {
            for (int k = 0; k < 20; k++) OK(api->copy(dev, work, work + n_work, n_work));
            OK(api->copy(dev, first, then, sizeof *first * wanted.size()));
            OK(api->load_after(dev));
        }
        OK(api->load(dev, 2, &op));
        OK(api->load_ready(dev, 2));
        got[i] = host_of(to, n_bytes + 16);
        OK(api->free(dev, to));
    }
    for (int r = 0; r < n_rows; r++) {
        const size_t at = op.dst.stride * (size_t)r;
        const bool comes = wanted[(size_t)row[(size_t)(r / each)]] != 0;
        bool right = true;
        for (size_t i = at; i < at + op.dst.stride; i++) right &= got[1][i] == (comes ? got[0][i] : 0xee);
        if (!right) near(r, 1, 0, 0);
    }
    for (size_t i = n_bytes; i < n_bytes + 16; i++) is_true(got[1][i] == 0xee, "bytes behind the result");
    for (const void *p : {(const void *)op.rows, (const void *)first, (const void *)then, (const void *)work})
        OK(api->free(dev, (void *)p));
    OK(api->host_free(dev, host));
}
static void check_wanted() {
    for (int type : all_types)
        for (int kind = 0; kind < 4; kind++) {
            check_wanted_case(type, 12, 768, is_float(type) ? 256 : 768, kind);
            check_wanted_case(type, 70, 3, 512, kind);
            if (kind > 1) check_wanted_case(type, 1, 20, 14336, kind);
        }
}

// Two slots in turn: each product must see the weights that were loaded for it, and no load may come too early.
static void check_turns(bool recorded) {
    AT("loads in turn, recorded %d", recorded);
    const int n = 12, rows = 2048, cols = 4096, n_tok = 512;
    const size_t stride = te_row_bytes(TE_F16, cols), n_bytes = stride * (size_t)rows;
    void *host = nullptr;
    OK(api->host_alloc(dev, n_bytes * n, &host));
    for (int i = 0; i < n; i++)
        for (size_t e = 0; e < n_bytes / 2; e++)
            ((uint16_t *)((uint8_t *)host + n_bytes * (size_t)i))[e] = te_f32_to_f16((float)(i + 1) / 64);
    te_mat slot[2];
    for (te_mat &m : slot) m = {device_new<uint8_t>(n_bytes), stride, TE_F16, cols, rows};
    std::vector<float> ones((size_t)n_tok * (size_t)cols, 1);
    halves in = halves_new(n_tok, cols);
    te_cuda_halve half = {};
    half.x = device_of(ones);
    half.ldx = (size_t)cols;
    half.n_tok = n_tok;
    half.cols = cols;
    half.to = in.h;
    OK(api->halve(dev, &half));
    float *y = device_new<float>((size_t)n * n_tok * rows);
    auto load = [&](int i) {
        te_cuda_pack op = {};
        op.dst = slot[i % 2];
        op.src = (uint8_t *)host + n_bytes * (size_t)i;
        op.src_stride = stride;
        OK(api->load(dev, i % 2, &op));
    };
    te_cuda_graph *g = nullptr;
    if (recorded) OK(api->capture_begin(dev));
    load(0);
    for (int i = 0; i < n; i++) {
        if (i + 1 < n) load(i + 1);
        OK(api->load_ready(dev, i % 2));
        te_cuda_gemm op = {};
        op.x = in.h;
        op.n_tok = n_tok;
        op.n_products = 1;
        op.product[0].w = slot[i % 2];
        op.product[0].y = y + (size_t)i * n_tok * rows;
        op.product[0].ldy = rows;
        OK(api->gemm(dev, &op));
        OK(api->load_free(dev, i % 2));
    }
    if (recorded) {
        OK(api->capture_end(dev, &g));
        for (int turn = 0; turn < 2; turn++) OK(api->graph_launch(dev, g));
    }
    const std::vector<float> got = host_of(y, (size_t)n * n_tok * rows);
    for (int i = 0; i < n; i++) {
        long wrong = 0;
        for (size_t e = 0; e < (size_t)n_tok * rows; e++)
            wrong += got[(size_t)i * n_tok * rows + e] != (float)(64 * (i + 1));
        near(i, (double)wrong, 0, 0);
    }
    if (g) api->graph_free(g);
    for (void *p : {(void *)slot[0].w, (void *)slot[1].w, (void *)y}) OK(api->free(dev, p));
    OK(api->host_free(dev, host));
    in.free();
}
static void check_load() {
    for (int type : all_types)
        for (int how = 0; how < 4; how++) {
            check_load_case(type, 100, is_float(type) ? 333 : 768, how & 1, how & 2);
            check_load_case(type, 70, 14336, how & 1, how & 2);
            if (te_type_get(type)->block_weights == 32) check_load_case(type, 90, 160, how & 1, how & 2);
        }
    check_wanted();
    check_turns(false);
    check_turns(true);
}

int main(int argc, char **argv) {
    const char *blas = argc > 1 && strchr(argv[1], '/') ? argv[1] : nullptr;
    const bool some = choose_types(blas ? argc - 1 : argc, blas ? argv + 1 : argv);
    open_gpu();
    const struct {
        const char *name;
        std::function<void()> run;
    } parts[] = {{"halve", check_halve},   {"gemm", [&] { check_gemm(blas); }}, {"act", check_act},
                 {"scores", check_scores}, {"experts", check_prompt_experts},   {"attention", check_attention},
                 {"load", check_load}};
    for (const auto &part : parts) {
        bool wanted = !some;
        for (int i = blas ? 2 : 1; i < argc; i++) wanted |= !strcmp(argv[i], part.name);
        if (!wanted) continue;
        const long before = n_checked, off = n_off;
        part.run();
        printf("%s: %ld values, %ld off\n", part.name, n_checked - before, n_off - off);
        fflush(stdout);
    }
    api->close(dev);
    printf("%s\n", n_off ? "FAILED" : "all right");
    return n_off ? 1 : 0;
}
