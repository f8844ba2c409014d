// check_linear.hpp - products of rows: all of them, lists, marks.
#pragma once
#include "checks.hpp"

static void check_linear_case(int type, int cols, int n_tok, te_norm_kind kind) {
    AT("linear %s %d columns, %d tokens, norm %d", te_type_get(type)->name, cols, n_tok, (int)kind);
    const int rows[3] = {cols > 8000 ? 40 : 130, 37, 41}, types[3] = {type, type,
                                                                      is_float(type) ? TE_F32
                                                                      : cols % 256   ? TE_Q8_0
                                                                                     : TE_Q6_K};
    input in = input_new(n_tok, cols, kind, !is_float(type));
    std::vector<matrix> a;
    std::vector<result> y;
    std::vector<std::vector<float>> bias;
    te_linear_args op = {};
    op.x = in.dx;
    op.ldx = in.ld;
    op.n_tok = n_tok;
    op.norm = in.norm;
    op.n_products = 3;
    std::vector<float> before = normals((size_t)n_tok * 48);
    float *d_before = device_of(before);
    for (int i = 0; i < 3; i++) {
        a.push_back(matrix_new(types[i], rows[i], cols));
        y.emplace_back((size_t)n_tok * (size_t)(rows[i] + 3));
        bias.push_back(normals((size_t)rows[i]));
        te_product *p = &op.product[i];
        p->w = a[(size_t)i].m;
        p->y = y[(size_t)i].data();
        p->ldy = (size_t)rows[i] + 3;
        if (i != 1) p->bias = device_of(bias[(size_t)i]);
        p->relu = i == 2;
        if (i == 1) {
            p->add = d_before;
            p->ld_add = 48;
        }
    }
    if (random_word() % 2) op.prepared = in.prepared(type);
    OK(api->linear(dev, &op));
    std::vector<std::vector<float>> first;
    for (int i = 0; i < 3; i++) first.push_back(y[(size_t)i].get());
    OK(api->linear(dev, &op));
    for (int i = 0; i < 3; i++) {
        same_bits(first[(size_t)i], y[(size_t)i].get());
        for (int t = 0; t < n_tok; t++) {
            for (int r = 0; r < rows[i]; r++) {
                const sum s = product(a[(size_t)i], r, in, t);
                double v = s.v, limit = s.limit();
                if (i != 1) v += (double)bias[(size_t)i][(size_t)r];
                if (i == 2) v = fmax(v, 0);
                if (i == 1) v += (double)before[(size_t)t * 48 + (size_t)r];
                limit += EPS * 4 * fabs(v);
                near(r, (double)first[(size_t)i][(size_t)t * (size_t)(rows[i] + 3) + (size_t)r], v, limit);
            }
            for (int k = 0; k < 3; k++)
                same(k, (double)first[(size_t)i][(size_t)t * (size_t)(rows[i] + 3) + (size_t)(rows[i] + k)],
                     (double)CANARY);
        }
    }
    for (int i = 0; i < 3; i++) {
        a[(size_t)i].free();
        y[(size_t)i].free();
        if (op.product[i].bias) OK(api->free(dev, (void *)op.product[i].bias));
    }
    OK(api->free(dev, d_before));
    in.free();
}

// So many rows that blocks have several groups of 16 of them.
static void check_many_rows(int type, int n_tok) {
    const int cols = 512, rows = 5000;
    AT("%d rows of %s, %d tokens", rows, te_type_get(type)->name, n_tok);
    matrix a = matrix_new(type, rows, cols);
    input in = input_new(n_tok, cols, TE_NO_NORM, !is_float(type));
    result y((size_t)n_tok * (size_t)rows);
    te_linear_args op = {};
    op.x = in.dx;
    op.ldx = in.ld;
    op.n_tok = n_tok;
    op.n_products = 1;
    op.product[0].w = a.m;
    op.product[0].y = y.data();
    op.product[0].ldy = (size_t)rows;
    OK(api->linear(dev, &op));
    const std::vector<float> got = y.get();
    for (int t = 0; t < n_tok; t++)
        for (int r = 0; r < rows; r++) {
            const sum s = product(a, r, in, t);
            near(t * rows + r, (double)got[(size_t)t * (size_t)rows + (size_t)r], s.v, s.limit());
        }
    a.free();
    y.free();
    in.free();
}

// A list whose length is on the device; rows outside hold no numbers. Then marks.
static void check_list_and_marks(int type, int n_tok) {
    const int cols = 1024, rows = 300;
    AT("list of %s, %d tokens", te_type_get(type)->name, n_tok);
    std::vector<int32_t> list;
    std::vector<char> poison((size_t)rows, 1);
    for (int r = 0; r < rows; r++)
        if (random_word() % 4 == 0) {
            list.push_back(r);
            poison[(size_t)r] = 0;
        }
    const int32_t n = (int32_t)list.size();
    for (int r = 0; r < 20; r++) list.push_back(0); // not counted
    matrix a = matrix_new(type, rows, cols, 1, poison);
    input in = input_new(n_tok, cols, TE_NO_NORM, !is_float(type));
    int32_t *d_list = device_of(list), *d_n = device_of(std::vector<int32_t>{n});
    result y((size_t)n_tok * (size_t)rows);
    te_linear_args op = {};
    op.x = in.dx;
    op.ldx = in.ld;
    op.n_tok = n_tok;
    op.norm = in.norm;
    op.n_products = 1;
    op.rows = {d_list, d_n, (int32_t)list.size()};
    op.product[0].w = a.m;
    op.product[0].y = y.data();
    op.product[0].ldy = (size_t)rows;
    OK(api->linear(dev, &op));
    const std::vector<float> got = y.get();
    for (int t = 0; t < n_tok; t++)
        for (int i = 0; i < rows; i++) {
            const double v = (double)got[(size_t)t * (size_t)rows + (size_t)i];
            if (i >= n) {
                same(i, v, (double)CANARY);
                continue;
            }
            const sum s = product(a, list[(size_t)i], in, t);
            near(i, v, s.v, s.limit());
        }
    a.free();

    AT("marks of %s, %d tokens", te_type_get(type)->name, n_tok);
    matrix b = matrix_new(type, rows, cols);
    std::vector<uint8_t> none((size_t)n_tok * 44, 0);
    uint8_t *mark = device_of(none);
    op.rows = {};
    op.product[0].w = b.m;
    op.product[0].mark = mark;
    op.product[0].ld_mark = 44;
    op.product[0].mark_threshold = 5;
    OK(api->linear(dev, &op));
    const std::vector<uint8_t> bits = host_of(mark, none.size());
    const std::vector<float> score = y.get();
    for (int t = 0; t < n_tok; t++)
        for (int r = 0; r < 44 * 8; r++) {
            const bool on = bits[(size_t)t * 44 + (size_t)r / 8] >> r % 8 & 1;
            same(r, on, r < rows && score[(size_t)t * (size_t)rows + (size_t)r] >= 5);
        }
    b.free();
    y.free();
    in.free();
    OK(api->free(dev, mark));
}

// A norm by itself, as of all heads of q together: of one token by linear, of several by prepare.
static void check_norm_case(int cols, int n_tok, te_norm_kind kind) {
    AT("norm %d of %d columns, %d tokens", (int)kind, cols, n_tok);
    input in = input_new(n_tok, cols, kind, false);
    result y((size_t)n_tok * (size_t)cols);
    te_linear_args one = {};
    one.x = in.dx;
    one.ldx = in.ld;
    one.n_tok = n_tok;
    one.cols = cols;
    one.side.norm = in.norm;
    one.side.keep = y.data();
    te_cuda_prepare several = {};
    several.x = in.dx;
    several.ldx = in.ld;
    several.n_tok = n_tok;
    several.cols = cols;
    several.type = several.side_type = -1;
    several.side = one.side;
    if (n_tok == 1)
        OK(api->linear(dev, &one));
    else
        OK(api->prepare(dev, &several));
    const std::vector<float> got = y.get();
    for (int t = 0; t < n_tok; t++)
        for (int c = 0; c < cols; c++)
            near(c, (double)got[(size_t)t * (size_t)cols + (size_t)c], in.of(t)[c], 16 * EPS * (fabs(in.of(t)[c]) + 1));
    in.free();
    y.free();
}

static void check_linear() {
    for (int cols : {64, 300, 2048, 4096})
        for (int n_tok : {1, 2, 5, 8})
            for (te_norm_kind kind : {TE_NO_NORM, TE_RMS_NORM}) check_norm_case(cols, n_tok, kind);
    for (int type : all_types) {
        for (int i = 0; i < 6; i++)
            for (int n_tok : {1, 3, 8})
                check_linear_case(type, some_cols(type, i), n_tok, (te_norm_kind)((i + n_tok) % 3));
        for (te_norm_kind kind : {TE_NO_NORM, TE_RMS_NORM}) // more columns than one_input takes
            for (int cols : {some_cols(type, 4), 5120}) check_linear_case(type, cols, 1, kind);
        for (int n_tok : {1, 2, 8}) check_list_and_marks(type, n_tok);
        for (int n_tok : {1, 2, 8}) check_many_rows(type, n_tok);
    }
}
