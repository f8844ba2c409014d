// check_products.hpp - products of prompts, those of a few tokens with their input in tiles, and with an activation.
#pragma once
#include "check_prompt_attention.hpp"

struct product_case {
    int type, rows, cols, n_tok;
    bool transposed, bias, relu, add, marks, pieces;
    bool tiles = false; // input in the form for a few tokens
};

static void check_gemm_case(const product_case &k) {
    AT("gemm %s %d x %d, %d tokens, transposed %d, bias %d, relu %d, add %d, marks %d, pieces %d, tiles %d, %s",
       te_type_get(k.type)->name, k.rows, k.cols, k.n_tok, k.transposed, k.bias, k.relu, k.add, k.marks, k.pieces,
       k.tiles, api->gemm_by(dev));
    const int depth = k.transposed ? k.rows : k.cols, outs = k.transposed ? k.cols : k.rows;
    matrix a = matrix_new(k.type, k.rows, k.cols);
    floats x(k.n_tok, depth);
    halves in = halves_new(k.n_tok, depth, !k.tiles ? -1 : k.transposed ? (int)TE_F16 : k.type);
    is_true(!k.tiles || in.h.tiles > 0, "no form for a few tokens");
    is_true(!k.tiles || in.h.matrices || !is_by_groups(k.type, k.n_tok), "not by wgmma");
    if (k.tiles && k.transposed && !in.h.matrices) { // by others, with their input as rows
        a.free();
        x.free();
        in.free();
        return;
    }
    te_cuda_halve half = {};
    half.x = x.p;
    half.ldx = x.ld;
    half.n_tok = k.n_tok;
    half.cols = depth;
    half.to = in.h;
    OK(api->halve(dev, &half));
    const size_t ldy = up_to((size_t)outs, 4) + 4, n_y = (size_t)k.n_tok * ldy;
    const std::vector<float> bias = normals((size_t)outs), before = normals(n_y);
    std::vector<float> start(n_y + 16, CANARY);
    if (k.add) std::copy(before.begin(), before.end(), start.begin() + 8);
    float *y = device_of(start);
    const size_t ld_mark = up_to((size_t)outs, 32) / 8;
    uint8_t *mark = device_of(std::vector<uint8_t>((size_t)k.n_tok * ld_mark, 0xa5));
    te_cuda_gemm op = {};
    op.x = in.h;
    op.n_tok = k.n_tok;
    op.transposed = k.transposed;
    op.n_products = 1;
    te_product *p = &op.product[0];
    p->w = a.m;
    p->y = y + 8;
    p->ldy = ldy;
    if (k.bias) p->bias = device_of(bias);
    p->relu = k.relu;
    if (k.add) {
        p->add = p->y;
        p->ld_add = ldy;
    }
    if (k.marks) {
        p->mark = mark;
        p->ld_mark = ld_mark;
        p->mark_threshold = 1;
    }
    size_t least;
    op.n_scratch = api->gemm_scratch(dev, &a.m, k.n_tok, &least);
    if (k.pieces) op.n_scratch = least;
    op.scratch = device_new<uint8_t>(op.n_scratch + 256);
    OK(api->gemm(dev, &op));
    const std::vector<float> got = host_of(y, n_y + 16);
    if (!k.add) { // again, from a recording: other bits if a sum's order depends on time
        te_cuda_graph *g = nullptr;
        OK(api->capture_begin(dev));
        OK(api->gemm(dev, &op));
        OK(api->capture_end(dev, &g));
        for (int turn = 0; turn < 2; turn++) OK(api->graph_launch(dev, g));
        const std::vector<float> again = host_of(y, n_y + 16);
        same_bits(got.data(), again.data(), got.size() * 4, "a repeat gives other bits");
        api->graph_free(g);
    }
    for (size_t i = 0; i < 8; i++) {
        near((long)i - 8, (double)got[i], (double)CANARY, 0);
        near((long)(n_y + i), (double)got[n_y + 8 + i], (double)CANARY, 0);
    }
    const long all = (long)k.n_tok * outs, wanted = std::min(all, 3000L);
    for (long i = 0; i < wanted; i++) {
        const long e = wanted == all ? i : i < 300 ? all - 1 - i : (long)(random_word() % (uint64_t)all);
        const int t = (int)(e / outs), r = (int)(e % outs);
        double s = 0, size = 0, squares = 0;
        std::vector<double> seen;
        for (int c = 0; c < depth; c++) {
            const double w = k.transposed ? a.row(c)[r] : a.row(r)[c], v = w * x.at(t, c);
            seen.push_back(x.at(t, c));
            s += v;
            size += fabs(v);
            squares += v * v;
        }
        // In tiles, of rows that are added up, factors are rounded for all of a block.
        const double blocks = k.tiles && !k.transposed ? a.block_squares(r, seen.data()) : 0;
        if (k.bias) s += (double)bias[(size_t)r];
        if (k.relu) s = std::max(s, 0.0);
        if (k.add) s += (double)before[(size_t)t * ldy + (size_t)r];
        near(e, (double)got[8 + (size_t)t * ldy + (size_t)r], s,
             6 * 0x1p-11 * sqrt((2 * squares + blocks) / 3) + 0x1p-18 * size + 1e-6);
    }
    for (int t = 0; t < k.n_tok; t++)
        for (size_t c = (size_t)outs; c < ldy; c++) {
            const size_t i = (size_t)t * ldy + c;
            near((long)i, (double)got[8 + i], k.add ? (double)before[i] : (double)CANARY, 0);
        }
    if (k.marks) {
        const std::vector<uint8_t> m = host_of(mark, (size_t)k.n_tok * ld_mark);
        for (int t = 0; t < k.n_tok; t++)
            for (int r = 0; r < outs; r++)
                is_true((m[(size_t)t * ld_mark + (size_t)r / 8] >> r % 8 & 1) ==
                            (got[8 + (size_t)t * ldy + (size_t)r] >= 1),
                        "a mark is wrong");
    }
    a.free();
    x.free();
    in.free();
    for (void *q : {(void *)y, (void *)mark, op.scratch}) OK(api->free(dev, q));
}

// Products of one input in one launch: the bits of each by itself.
static void check_products_together(int type, int n_tok) {
    AT("gemm %s, three products of %d tokens", te_type_get(type)->name, n_tok);
    const int cols = 1024, rows[3] = {300, 128, 77};
    floats x(n_tok, cols);
    halves in = halves_new(n_tok, cols, type);
    te_cuda_halve half = {};
    half.x = x.p;
    half.ldx = x.ld;
    half.n_tok = n_tok;
    half.cols = cols;
    half.to = in.h;
    OK(api->halve(dev, &half));
    te_cuda_gemm all = {};
    all.x = in.h;
    all.n_tok = n_tok;
    std::vector<matrix> w;
    float *y[2][3];
    for (int i = 0; i < 3; i++) {
        w.push_back(matrix_new(type, rows[i], cols));
        for (auto &of : y) of[i] = device_of(std::vector<float>((size_t)n_tok * 304, CANARY));
        te_product *p = &all.product[all.n_products++];
        p->w = w.back().m;
        p->y = y[0][i];
        p->ldy = 304;
        te_cuda_gemm one = all;
        one.n_products = 1;
        one.product[0] = *p;
        one.product[0].y = y[1][i];
        OK(api->gemm(dev, &one));
    }
    OK(api->gemm(dev, &all));
    for (int i = 0; i < 3; i++) {
        const std::vector<float> together = host_of(y[0][i], (size_t)n_tok * 304),
                                 alone = host_of(y[1][i], (size_t)n_tok * 304);
        for (size_t k = 0; k < alone.size(); k++) {
            const bool there = k % 304 < (size_t)rows[i]; // columns may be cut into other parts
            near((long)k, (double)together[k], (double)alone[k], there ? 1e-3 * fabs((double)alone[k]) + 1e-3 : 0);
        }
        w[(size_t)i].free();
        for (auto &of : y) OK(api->free(dev, of[i]));
    }
    in.free();
    x.free();
}

// Products by neuron of tokens whose input is a part of that of more: the bits of the same by themselves.
static void check_part_of_tokens(int type, int rows, int cols, int n_tok, int first, int n) {
    AT("gemm %s %d x %d by neuron, tokens %d to %d of %d", te_type_get(type)->name, rows, cols, first, first + n - 1,
       n_tok);
    floats x(n_tok, rows);
    matrix w = matrix_new(type, rows, cols);
    halves all = halves_new(n_tok, rows, TE_F16), own = halves_new(n, rows, TE_F16);
    te_cuda_gemm op = {};
    op.n_tok = n;
    op.transposed = true;
    op.n_products = 1;
    op.product[0].w = w.m;
    op.product[0].ldy = up_to((size_t)cols, 4);
    std::vector<float> got[2];
    for (int turn = 0; turn < 2; turn++) {
        const halves &in = turn ? own : all;
        te_cuda_halve half = {};
        half.x = x.p + (turn ? x.ld * (size_t)first : 0);
        half.ldx = x.ld;
        half.n_tok = turn ? n : n_tok;
        half.cols = rows;
        half.to = in.h;
        OK(api->halve(dev, &half));
        op.x = in.h;
        if (!turn) op.x.v = (uint16_t *)in.h.v + (size_t)(first / 8) * 256;
        if (!turn) op.x.scale += first;
        result y((size_t)n * op.product[0].ldy);
        op.product[0].y = y.data();
        OK(api->gemm(dev, &op));
        got[turn] = y.get();
        y.free();
    }
    same_bits(got[0], got[1]);
    w.free();
    x.free();
    all.free();
    own.free();
}

// Gate and up with their activation in one launch, beside the same products by themselves. down: the type of the matrix that
// hidden values are for. size: of the input, whose hidden values may leave the range of F16. uneven: one neuron has far larger
// values than all others, and tokens are small, usual and large in turn (1); or all are usual, so that in one block they are
// too large (2); or some so small that in all blocks but one they are too small (3). bare: without biases and counts.
static void check_activated(int type, int down, te_activation act, int n, int cols, int n_tok, double size,
                            int uneven = 0, bool bare = false) {
    AT("gemm %s %d x %d and activation %d for %s, %d tokens, size %g, uneven %d, bare %d", te_type_get(type)->name, n,
       cols, (int)act, te_type_get(down)->name, n_tok, size, uneven, bare);
    halves in = halves_new(n_tok, cols, type), to = halves_new(n_tok, n, down);
    const bool at_once = in.h.matrices && to.h.matrices;
    is_true(at_once || !is_by_groups(type, n_tok) || !is_by_groups(down, n_tok), "not by wgmma");
    if (!at_once) { // by kernels of their own
        in.free();
        to.free();
        return;
    }
    floats x(n_tok, cols, (float)size);
    if (uneven) { // by 1: of the first all are too small, of the second all but the one, of the third the one is too large
        const float by[3][4] = {{1e-9f, 1e-5f, 1, 1e4f}, {1, 1, 1, 1}, {2e-5f, 0.1f, 2e-5f, 0.1f}};
        for (size_t i = 0; i < x.v.size(); i++) x.v[i] *= by[uneven - 1][i / x.ld % 4];
        OK(api->upload(dev, x.p, x.v.data(), x.v.size() * sizeof(float)));
        finish();
    }
    te_cuda_halve half = {};
    half.x = x.p;
    half.ldx = x.ld;
    half.n_tok = n_tok;
    half.cols = cols;
    half.to = in.h;
    OK(api->halve(dev, &half));
    matrix w[2] = {matrix_new(type, n, cols), matrix_new(type, n, cols)}; // up, gate
    const size_t ld = up_to((size_t)n, 4);
    std::vector<float> bias = normals((size_t)n);
    if (uneven) bias[(size_t)n / 2] = uneven == 3 ? 1e3f : 1e4f;
    if (bare) bias.assign((size_t)n, 0);
    float *y[2];
    te_cuda_gemm op = {};
    op.x = in.h;
    op.n_tok = n_tok;
    op.n_products = 2;
    for (int i = 0; i < 2; i++) {
        y[i] = device_new<float>((size_t)n_tok * ld);
        op.product[i].w = w[i].m;
        op.product[i].y = y[i];
        op.product[i].ldy = ld;
    }
    OK(api->gemm(dev, &op));
    const std::vector<float> up = host_of(y[0], (size_t)n_tok * ld), gate = host_of(y[1], (size_t)n_tok * ld);
    te_cuda_act a = {};
    a.up = y[0];
    a.ld_up = ld;
    a.n_tok = n_tok;
    a.n = n;
    a.up_bias = bare ? nullptr : device_of(bias);
    a.act = act;
    a.to = to.h;
    a.fired = bare ? nullptr : device_of(std::vector<uint32_t>((size_t)n, 5));
    a.counts = bare ? nullptr : device_of(std::vector<uint32_t>(3, 7));
    op.act = &a;
    op.counter = device_of(std::vector<uint32_t>((size_t)n_tok + 1, 0));
    for (int turn = 0; turn < 2; turn++) OK(api->gemm(dev, &op));
    to.read();
    double most[2] = {0, 0};
    for (size_t i = 0; i < up.size(); i++) {
        most[0] = fmax(most[0], fabs((double)up[i]));
        most[1] = fmax(most[1], fabs((double)gate[i]));
    }
    uint32_t least_fired = 0, most_fired = 0; // floats may be too small to be numbers
    const std::vector<float> scale = host_of(to.h.scale, (size_t)n_tok);
    for (int t = 0; t < n_tok; t++) {
        double largest = 0;
        for (int j = 0; j < n; j++) {
            const size_t i = (size_t)t * ld + (size_t)j;
            const double u = (double)(up[i] + bias[(size_t)j]), g = activation(act, 0, (double)gate[i]), h = g * u;
            least_fired += fabs(g) > 1e-36 && fabs(h) > 1e-36;
            most_fired += fabs(h) > 1e-46;
            near((long)i, to.at(t, j), h,
                 0x1p-10 * fabs(h) + 0x1p-15 * (fabs(u) * most[1] + fabs(g) * most[0]) + 1e-30);
            largest = fmax(largest, fabs(h));
        }
        const double by = (double)scale[(size_t)t]; // half_range.cuh, but for what floats may have rounded
        if (largest < 32700 && largest > 0x1.01p-8) is_true(by == 1, "scaled though all fit");
        if ((largest > 32800 || largest < 0x0.ffp-8) && largest > 1e-30 && largest < 1e30)
            is_true(largest / by > 0x0.ffp13 && largest / by < 0x1.01p14, "not scaled to the range of F16");
    }
    if (!bare) {
        const std::vector<uint32_t> counts = host_of(a.counts, 3), of = host_of(a.fired, (size_t)n);
        is_true(counts[0] == 7 + 2 * (uint32_t)(n_tok * n) && counts[1] == counts[0], "counts are wrong");
        uint32_t all = 0;
        for (uint32_t c : of) all += c - 5;
        const bool is_within = all >= 2 * least_fired && all <= 2 * most_fired;
        is_true(all + 7 == counts[2] && (size > 1 || is_within), "fired is wrong");
    }
    for (uint32_t c : host_of(op.counter, (size_t)n_tok + 1)) same(0, c, 0);
    for (const void *q : {(const void *)y[0], (const void *)y[1], (const void *)a.up_bias, (const void *)a.fired,
                          (const void *)a.counts, (const void *)op.counter})
        OK(api->free(dev, (void *)q));
    for (matrix &m : w) m.free();
    in.free();
    to.free();
    x.free();
}

static void check_gemm_of_few(int type) {
    const bool f = is_float(type), k256 = te_type_get(type)->block_weights == 256;
    const int odd = f ? 333 : k256 ? 768 : 96, cols = k256 ? 1024 : 1056;
    check_gemm_case({type, 300, odd, 9, false, true, false, false, false, false, true});
    check_gemm_case({type, 130, cols, 63, false, false, true, false, false, false, true});
    check_gemm_case({type, 1000, cols, 64, false, true, true, false, false, false, true});
    check_gemm_case({type, 37, cols, 17, false, true, false, true, false, false, true});
    check_gemm_case({type, 520, odd, 33, false, false, false, true, false, false, true});
    check_gemm_case({type, 520, 4096, 24, false, false, false, true, false, false, true});
    if (type == TE_F16) { // blocks of one and of several groups of rows, columns in one part and in two
        check_gemm_case({type, 3000, 6400, 64, false, true, false, false, false, false, true});
        for (int n_tok : {9, 16, 24, 25, 40, 48, 56, 64}) {
            check_gemm_case(
                {type, 100 + 16 * n_tok, 333 + 8 * n_tok, n_tok, false, true, false, true, false, false, true});
            check_activated(type, type, TE_SILU, 77 * n_tok, 520, n_tok, 1);
            check_gemm_case(
                {type, 333 + 8 * n_tok, 100 + 77 * n_tok, n_tok, true, true, false, true, false, false, true});
            check_gemm_case({type, 2050, 4096, n_tok, true, false, false, false, false, false, true});
        }
        // Transposed: of one to four parts, one to three groups.
        for (int outs : {40, 1024, 2048, 5120, 8200, 11008, 25300})
            check_gemm_case({type, outs < 8200 ? 1500 : 200, outs, 30, true, true, true, false, false, false, true});
        check_gemm_case({type, 11008, 64, 12, true, false, false, true, false, false, true});
        check_activated(type, type, TE_RELU, 22016, 264, 16, 1e6);
        check_activated(type, TE_Q8_0, TE_SILU, 1000, 520, 24, 1);
        check_activated(TE_Q8_0, type, TE_SILU, 1000, 544, 64, 1);
    }
    // By neuron: each number of tiles, outputs and rows that fill no block, one part and as many as there are.
    if (type != TE_F16 && is_by_groups(type, 64)) {
        const int unit = te_type_get(type)->block_weights;
        for (int n_tok = 9; n_tok <= 64; n_tok += n_tok == 57 ? 7 : 8) {
            const int outs = unit * (1 + n_tok * (k256 ? 1 : 5) / 8);
            check_gemm_case({type, 100 + 77 * n_tok, outs, n_tok, true, true, false, true, false, false, true});
            check_gemm_case({type, 2050, 4096, n_tok, true, false, true, false, false, false, true});
        }
        // Few rows. Scales and minima of Q4_K and Q5_K are rounded to F16 each; of ten rows such errors do not even out.
        for (int n_tok : {10, 16, 31, 40, 63})
            check_gemm_case({type, type == TE_Q4_K || type == TE_Q5_K ? n_tok * 5 + 20 : n_tok * 9 - 80, 5 * unit,
                             n_tok, true, true, false, false, false, false, true});
        for (int outs : {2048, 2560, 5120, 8192, 14336, 34048 / unit * unit})
            check_gemm_case({type, 1500, outs, 30, true, true, true, false, false, false, true});
        check_gemm_case({type, 11008, 4096, 33, true, false, false, true, false, false, true});
        check_gemm_case({type, 11008, unit, 12, true, false, false, true, false, false, true});
        for (int n_tok : {129, 152, 192, 256}) {
            const int part = (n_tok / 2 + 7) / 8 * 8;
            check_part_of_tokens(type, 1000 + n_tok, 7 * unit, n_tok, 0, part);
            check_part_of_tokens(type, 1000 + n_tok, 7 * unit, n_tok, part, n_tok - part);
        }
        check_part_of_tokens(type, 11008, 4096, 64, 32, 20); // rows of a stage in more pieces
    }
    // Many rows and columns, and each number of tiles.
    if (type == TE_F16 || type == TE_Q4_0 || type == TE_Q6_K || is_by_groups(type, 64)) {
        check_gemm_case({type, 6000, 1024, 32, false, true, false, false, false, false, true});
        check_gemm_case({type, 9000, 1024, 28, false, true, false, false, false, false, true});
        check_gemm_case({type, 13000, 1024, 41, false, true, false, false, false, false, true});
        check_gemm_case({type, 40, 14336, 56, false, true, false, false, false, false, true});
        check_activated(type, type, TE_SILU, 5632, 1024, 49, 1);
    }
    // More tokens than other kernels take: each number of tiles, and a last one with one token and with all.
    for (int n_tok : {65, 72, 73, 81, 96, 97, 105, 120, 127, 128, 129, 144, 145, 161, 192, 193, 224, 225, 240, 256}) {
        if (!is_by_groups(type, n_tok)) continue;
        check_gemm_case({type, 1000, cols, n_tok, false, true, true, false, false, false, true});
        check_gemm_case({type, 40, 14336, n_tok, false, true, false, false, false, false, true});
        check_activated(type, type, TE_RELU, 300, cols, n_tok, 1e6);
        check_products_together(type, n_tok);
        // Blocks with all columns, of which two bring the tokens' values of many together.
        check_gemm_case({type, 1000, 256, n_tok, false, true, false, true, false, false, true});
        const int unit = f ? 37 : te_type_get(type)->block_weights, outs = unit * (1 + n_tok % 7 * (k256 ? 1 : 5));
        check_gemm_case({type, 100 + 9 * n_tok, outs, n_tok, true, true, false, true, false, false, true});
        check_gemm_case({type, 2050, 4096, n_tok, true, false, true, false, false, false, true});
        check_gemm_case({type, 4096, 1024, n_tok, false, false, false, true, false, false, true});
        if (n_tok != 65 && n_tok != 97 && n_tok != 128 && n_tok != 192 && n_tok < 240) continue; // many rows
        check_gemm_case({type, 6000, 1024, n_tok, false, false, false, true, false, false, true});
        check_gemm_case({type, 13000, 1024, n_tok, false, true, false, false, false, false, true});
        check_gemm_case({type, 1500, 14336, n_tok, true, true, true, false, false, false, true});
        check_activated(type, type, TE_SILU, 5632, 1024, n_tok, 1);
    }
    if (type == TE_Q4_K) check_activated(type, TE_Q6_K, TE_SILU, 1024, 1024, 40, 1);
    for (int n_tok : {10, 48, 55}) check_products_together(type, n_tok);
    check_activated(type, type, TE_RELU, 300, cols, 17, 1);
    for (int n_tok : {20, 125, 130})
        if (is_by_groups(type, n_tok)) check_activated(type, type, TE_SILU, 3000, cols, n_tok, 1, 1);
    for (int uneven : {2, 3})
        if (is_by_groups(type, 20)) check_activated(type, type, TE_SILU, 3000, cols, 20, 1, uneven);
    check_activated(type, type, TE_SILU, 1002, cols, 58, 1, 0, true);
    check_activated(type, type, TE_SILU, 1000, odd, 64, 1e6);
}
