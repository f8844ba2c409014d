// check_hidden.hpp - a feed-forward in two operations and the sum of its parts.
#pragma once
#include "checks.hpp"

enum choice { EVERY, LISTED, MASKED };
static const char *choices[] = {"all", "list", "mask"};

static void check_ffn_case(int type, int cols, int rows, int n_tok, te_activation act, bool gated, bool skip,
                           choice how) {
    AT("ffn %s %d x %d, %d tokens, act %d, %s, %s, %s", te_type_get(type)->name, rows, cols, n_tok, (int)act,
       gated ? "gated" : "ungated", skip ? "skip" : "dense", choices[how]);
    const float threshold = act == TE_RELU ? 0.05f : 0;
    std::vector<char> wanted((size_t)rows, how == EVERY), poison((size_t)rows, 0);
    const size_t ld_mask = (size_t)(rows + 31) / 32 * 4 + 4;
    std::vector<uint8_t> mask((size_t)n_tok * ld_mask, 0);
    std::vector<int32_t> list;
    auto asked = [&](int t, int j) {
        return how != MASKED || (mask[(size_t)t * ld_mask + (size_t)j / 8] >> j % 8 & 1);
    };
    for (int j = 0; j < rows; j++) {
        for (int t = 0; t < n_tok && how == MASKED; t++)
            if (random_word() % 6 == 0) {
                mask[(size_t)t * ld_mask + (size_t)j / 8] |= (uint8_t)(1 << j % 8);
                wanted[(size_t)j] = 1;
            }
        if (how == LISTED) wanted[(size_t)j] = random_word() % 5 == 0;
        poison[(size_t)j] = !wanted[(size_t)j];
        if (wanted[(size_t)j]) list.push_back(j);
    }
    input in = input_new(n_tok, cols, TE_RMS_NORM, !is_float(type));
    matrix gate, up, down;
    if (gated) gate = matrix_new(type, rows, cols, 0.1f, poison);
    // Rows of up and down that a gate of 0 for all tokens makes unneeded hold no numbers, either; gates near 0 decide nothing.
    std::vector<std::vector<sum>> gs((size_t)n_tok);
    std::vector<char> unread = poison, unread_down = poison;
    for (int t = 0; t < n_tok && gated; t++)
        for (int j = 0; j < rows; j++) gs[(size_t)t].push_back(wanted[(size_t)j] ? product(gate, j, in, t) : sum());
    for (int j = 0; j < rows && gated && skip; j++) {
        bool all_off = true;
        for (int t = 0; t < n_tok; t++) {
            const sum &g = gs[(size_t)t][(size_t)j];
            all_off &= !asked(t, j) || g.v + g.limit() < (double)threshold;
        }
        if (all_off) unread[(size_t)j] = unread_down[(size_t)j] = 1;
    }
    up = matrix_new(type, rows, cols, 0.1f, unread);
    std::vector<float> bias = normals((size_t)rows);
    float *d_bias = device_of(bias);
    const int n_h = how == LISTED ? (int)list.size() : rows;
    result h((size_t)n_tok * (size_t)(rows + 4));
    uint32_t *fired = device_of(std::vector<uint32_t>((size_t)rows, 5)),
             *counts = device_of(std::vector<uint32_t>(3, 0));
    te_cuda_hidden op = {};
    op.x = in.dx;
    op.ldx = in.ld;
    op.n_tok = n_tok;
    op.norm = in.norm;
    op.gate = gate.m;
    op.up = up.m;
    op.up_bias = gated ? nullptr : d_bias;
    op.act = act;
    op.threshold = threshold;
    op.mode = skip ? TE_CUDA_SKIP : TE_CUDA_DENSE;
    std::vector<int32_t> longer = list;
    longer.resize(list.size() + 9, 0);
    int32_t *d_list = device_of(longer), *d_n = device_of(std::vector<int32_t>{(int32_t)list.size()});
    if (how == LISTED) op.rows = {d_list, d_n, (int32_t)longer.size()};
    uint8_t *d_mask = device_of(mask);
    if (how == MASKED) {
        op.mask = d_mask;
        op.ld_mask = ld_mask;
    }
    op.h = h.data();
    op.ldh = (size_t)rows + 4;
    op.fired = fired;
    op.counts = counts;
    if (random_word() % 2) op.prepared = in.prepared(type);
    OK(api->hidden(dev, &op));
    const std::vector<float> got = h.get();
    OK(api->hidden(dev, &op));
    same_bits(got, h.get());
    const std::vector<uint32_t> n_fired = host_of(fired, (size_t)rows), n = host_of(counts, 3);
    uint32_t n_asked = 0, total = 0;
    std::vector<uint32_t> per((size_t)rows, 0);
    for (int t = 0; t < n_tok; t++)
        for (int i = 0; i < rows + 4; i++) {
            const float v = got[(size_t)t * (size_t)(rows + 4) + (size_t)i];
            if (i >= n_h) {
                same(i, (double)v, (double)CANARY);
                continue;
            }
            const int j = how == LISTED ? list[(size_t)i] : i;
            if (!asked(t, j)) {
                same(i, (double)v, 0);
                continue;
            }
            n_asked++;
            total += v != 0;
            per[(size_t)j] += v != 0;
            sum u;
            double uv = 0, ul = 0;
            if (!unread[(size_t)j]) {
                u = product(up, j, in, t);
                uv = u.v + (gated ? 0 : (double)bias[(size_t)j]);
                ul = u.limit() + 4 * EPS * fabs(uv);
            }
            if (!gated) {
                const double slope =
                    1.2 * ul + (act == TE_RELU && fabs(uv - (double)threshold) <= ul ? (double)threshold + ul : 0);
                near(i, (double)v, activation(act, (double)threshold, uv), slope + 8 * EPS * fabs(uv));
                continue;
            }
            const sum &g = gs[(size_t)t][(size_t)j];
            const double a = activation(act, (double)threshold, g.v);
            double gl = 1.2 * g.limit() + 8 * EPS * fabs(g.v);
            if (act == TE_RELU && fabs(g.v - (double)threshold) <= g.limit()) gl += (double)threshold;
            if (act == TE_DRELU) uv = fmax(uv, 0);
            near(i, (double)v, a * uv, gl * (fabs(uv) + ul) + fabs(a) * ul + 4 * EPS * fabs(a * uv));
        }
    for (int j = 0; j < rows; j++) same(j, n_fired[(size_t)j], 5 + 2 * per[(size_t)j]);
    same(0, n[0], 2 * n_asked);
    same(2, n[2], 2 * total);
    is_true(skip ? n[1] >= n[2] && n[1] <= n[0] : n[1] == n[0], "counts of computed pairs");

    // The second half, of the h that was found: rows with h = 0 for all tokens are not read.
    AT("down %s %d x %d, %d tokens, %s", te_type_get(type)->name, rows, cols, n_tok, choices[how]);
    for (int i = 0; i < n_h; i++) {
        bool any = false;
        for (int t = 0; t < n_tok; t++) any |= got[(size_t)t * (size_t)(rows + 4) + (size_t)i] != 0;
        unread_down[(size_t)(how == LISTED ? list[(size_t)i] : i)] = !any;
    }
    down = matrix_new(type, rows, cols, 0.1f, unread_down);
    te_cuda_down dop = {};
    dop.w = down.m;
    dop.h = h.data();
    dop.ldh = op.ldh;
    dop.n_tok = n_tok;
    dop.rows = op.rows;
    dop.all = !skip;
    const int n_parts = api->parts(dev, &down.m, how == LISTED ? (int)longer.size() : rows);
    result partial((size_t)n_parts * (size_t)n_tok * (size_t)cols), y((size_t)n_tok * (size_t)(cols + 4));
    dop.partial = partial.data();
    OK(api->down(dev, &dop));
    std::vector<float> before = normals((size_t)n_tok * (size_t)cols), down_bias = normals((size_t)cols);
    float *d_before = device_of(before), *d_down_bias = device_of(down_bias);
    te_merge_args mop = {};
    mop.partial = partial.data();
    mop.n_parts = n_parts;
    mop.n_tok = n_tok;
    mop.cols = cols;
    mop.add = d_before;
    mop.bias = d_down_bias;
    mop.ld_add = (size_t)cols;
    mop.y = y.data();
    mop.ldy = (size_t)cols + 4;
    OK(api->merge(dev, &mop));
    const std::vector<float> out = y.get();
    partial.get();
    OK(api->down(dev, &dop));
    OK(api->merge(dev, &mop));
    same_bits(out, y.get());
    for (int t = 0; t < n_tok; t++)
        for (int c = 0; c < cols; c++) {
            sum s;
            s.add(1, (double)before[(size_t)t * (size_t)cols + (size_t)c] + (double)down_bias[(size_t)c], 0);
            s.size += fabs((double)down_bias[(size_t)c]);
            for (int i = 0; i < n_h; i++) {
                const double hv = (double)got[(size_t)t * (size_t)(rows + 4) + (size_t)i];
                if (hv == 0) continue;
                const int j = how == LISTED ? list[(size_t)i] : i;
                s.add(down.row(j)[c], hv, 0);
                // Of formats with minima a weight is a difference; its parts are at most as large as this.
                if (!is_float(type)) s.slack += 4 * EPS * fabs(hv) * 0.5;
            }
            near(c, (double)out[(size_t)t * (size_t)(cols + 4) + (size_t)c], s.v, s.limit());
        }
    for (float *p : {d_bias, d_before, d_down_bias}) OK(api->free(dev, p));
    for (void *p : {(void *)d_list, (void *)d_n, (void *)d_mask, (void *)fired, (void *)counts}) OK(api->free(dev, p));
    if (gated) gate.free();
    up.free();
    down.free();
    h.free();
    partial.free();
    y.free();
    in.free();
}

static void check_ffn() {
    int turn = 0;
    for (int type : all_types)
        for (int skip = 0; skip < 2; skip++) // more columns than fill_one takes
            for (int cols : {some_cols(type, 4), 5120}) check_ffn_case(type, cols, 301, 1, TE_RELU, true, skip, EVERY);
    for (int type : all_types)
        for (int gated = 0; gated < 2; gated++)
            for (int skip = 0; skip < 2; skip++)
                for (choice how : {EVERY, LISTED, MASKED})
                    for (int n_tok : {1, 3, 8}) {
                        const te_activation acts[] = {TE_RELU, TE_DRELU, TE_SILU, TE_GELU, TE_GELU_TANH};
                        te_activation act = acts[turn++ % (skip ? 2 : 5)];
                        if (!gated && act == TE_DRELU) act = TE_RELU;
                        check_ffn_case(type, some_cols(type, turn % 4), turn % 3 ? 301 : 1100, n_tok, act, gated, skip,
                                       how);
                    }
}
