// kernels_check.cpp - every operation of te_cuda.h against doubles, on the first GPU.
//
//     kernels_check [PART ...]      parts: device linear ffn fused attention embed graph; all by default
//
// Exits with 1 if a value is off, with 2 if there is no GPU. Rows that must not be read hold no numbers, results are
// surrounded by values that must stay, and every operation is run twice for the same bits. Tolerances: the error of a sum
// of floats, 8 eps sqrt(n) sum|w x|. Integer formats see their input as bytes: without a norm the same bytes are made here;
// behind a norm, whose last bit may tip a byte, the error of making bytes, half a step a value, is allowed.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check_fused.hpp"

// ---- linear ----

static void check_linear_case(int type, int cols, int n_tok, te_cuda_norm_kind kind) {
    AT("linear %s %d columns, %d tokens, norm %d", te_type_get(type)->name, cols, n_tok, (int)kind);
    const int rows[3] = {cols > 8000 ? 40 : 130, 37, 41}, types[3] = {type, type,
                                                                      is_float(type) ? TE_F32
                                                                      : cols % 256   ? TE_Q8_0
                                                                                     : TE_Q6_K};
    input in = input_new(n_tok, cols, kind, !is_float(type));
    std::vector<matrix> a;
    std::vector<result> y;
    std::vector<std::vector<float>> bias;
    te_cuda_linear op = {};
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
        te_cuda_product *p = &op.product[i];
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
    input in = input_new(n_tok, cols, TE_CUDA_NO_NORM, !is_float(type));
    int32_t *d_list = device_of(list), *d_n = device_of(std::vector<int32_t>{n});
    result y((size_t)n_tok * (size_t)rows);
    te_cuda_linear op = {};
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

static void check_linear() {
    for (int type : all_types) {
        for (int i = 0; i < 6; i++)
            for (int n_tok : {1, 3, 8})
                check_linear_case(type, some_cols(type, i), n_tok, (te_cuda_norm_kind)((i + n_tok) % 3));
        for (int n_tok : {1, 2, 8}) check_list_and_marks(type, n_tok);
    }
}

// ---- hidden and down ----

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
    input in = input_new(n_tok, cols, TE_CUDA_RMS_NORM, !is_float(type));
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
    te_cuda_merge mop = {};
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
        for (int gated = 0; gated < 2; gated++)
            for (int skip = 0; skip < 2; skip++)
                for (choice how : {EVERY, LISTED, MASKED})
                    for (int n_tok : {1, 3, 8}) {
                        const te_activation acts[] = {TE_RELU, TE_DRELU, TE_SILU, TE_GELU, TE_GELU_QUICK};
                        te_activation act = acts[turn++ % (skip ? 2 : 5)];
                        if (!gated && act == TE_DRELU) act = TE_RELU;
                        check_ffn_case(type, some_cols(type, turn % 4), turn % 3 ? 301 : 1100, n_tok, act, gated, skip,
                                       how);
                    }
}

// ---- attention ----

struct attention_case {
    int n_tok, n_head, n_head_kv, d, type_k, type_v;
    te_cuda_rope_kind rope;
    int n_rot;
    bool norm;
    std::vector<int> seq, pos;
};

static void check_attention_case(const attention_case &k) {
    AT("attention %d tokens, %d on %d heads of %d, %s %s, rope %d", k.n_tok, k.n_head, k.n_head_kv, k.d,
       te_type_get(k.type_k)->name, te_type_get(k.type_v)->name, (int)k.rope);
    const int n_seq = 5, n_ctx = 2048, ld_table = n_ctx / 64, n_blocks = n_seq * ld_table + 3;
    const size_t d = (size_t)k.d, row_k = te_row_bytes(k.type_k, k.d), row_v = te_row_bytes(k.type_v, k.d);
    const size_t pool_k = (size_t)n_blocks * (size_t)k.n_head_kv * 64 * row_k,
                 pool_v = (size_t)n_blocks * (size_t)k.n_head_kv * 64 * row_v;
    std::vector<int32_t> table((size_t)(n_seq * ld_table));
    for (size_t i = 0; i < table.size(); i++) table[i] = (int32_t)i + 3;
    for (size_t i = table.size(); i > 1; i--) std::swap(table[i - 1], table[random_word() % i]);
    // Positions that hold something are random, all others no numbers.
    std::vector<uint8_t> hk(pool_k, 0xff), hv(pool_v, 0xff);
    std::vector<float> x(d);
    auto place = [&](int s, int p, int h) {
        return ((size_t)table[(size_t)(s * ld_table + p / 64)] * (size_t)k.n_head_kv + (size_t)h) * 64 +
               (size_t)(p % 64);
    };
    std::vector<int> held(n_seq, 0);
    for (int t = 0; t < k.n_tok; t++) {
        int old = k.pos[(size_t)t];
        for (int u = 0; u < t; u++) old -= k.seq[(size_t)u] == k.seq[(size_t)t] && k.pos[(size_t)u] >= 0;
        held[(size_t)k.seq[(size_t)t]] = std::max(held[(size_t)k.seq[(size_t)t]], std::max(old, 0));
    }
    for (int s = 0; s < n_seq; s++)
        for (int p = 0; p < held[(size_t)s]; p++)
            for (int h = 0; h < k.n_head_kv; h++) {
                for (float &v : x) v = random_normal();
                te_quantize_row(k.type_k, x.data(), &hk[place(s, p, h) * row_k], k.d);
                for (float &v : x) v = random_normal();
                te_quantize_row(k.type_v, x.data(), &hv[place(s, p, h) * row_v], k.d);
            }
    uint8_t *dk = device_of(hk), *dv = device_of(hv);
    const size_t ldq = (size_t)k.n_head * d, ldk = (size_t)k.n_head_kv * d;
    std::vector<float> q = normals((size_t)k.n_tok * ldq), kk = normals((size_t)k.n_tok * ldk),
                       v = normals((size_t)k.n_tok * ldk);
    std::vector<float> qn = normals(d), kn = normals(d), cs((size_t)k.n_tok * (size_t)std::max(k.n_rot, 2));
    for (int t = 0; t < k.n_tok; t++)
        for (int i = 0; i < k.n_rot / 2; i++) {
            const double angle = k.pos[(size_t)t] * pow(10000, -2.0 * i / k.n_rot);
            cs[(size_t)(t * k.n_rot + 2 * i)] = (float)cos(angle);
            cs[(size_t)(t * k.n_rot + 2 * i + 1)] = (float)sin(angle);
        }
    std::vector<int32_t> pos(k.pos.begin(), k.pos.end()), seq(k.seq.begin(), k.seq.end());
    result out((size_t)k.n_tok * ldq);
    te_cuda_attention op = {};
    op.q = device_of(q);
    op.k = device_of(kk);
    op.v = device_of(v);
    op.ldq = ldq;
    op.ldk = op.ldv = ldk;
    op.n_tok = k.n_tok;
    op.n_head = k.n_head;
    op.n_head_kv = k.n_head_kv;
    op.n_embd_head = k.d;
    if (k.norm) {
        op.q_norm = device_of(qn);
        op.k_norm = device_of(kn);
    }
    op.norm_eps = 1e-5f;
    op.scale = (float)(1 / sqrt((double)k.d));
    op.rope = k.rope;
    op.n_rot = k.n_rot;
    op.cs = device_of(cs);
    op.pos = device_of(pos);
    op.table = device_of(table);
    op.seq = device_of(seq);
    op.ld_table = ld_table;
    op.k_pool = dk;
    op.v_pool = dv;
    op.type_k = k.type_k;
    op.type_v = k.type_v;
    op.n_ctx = n_ctx;
    op.early = k.norm || k.n_tok == 3;
    op.out = out.data();
    op.ld_out = ldq;
    op.scratch = device_new<float>(api->attention_floats(dev, &op));
    op.counter = device_of(std::vector<uint32_t>(api->attention_counters(dev, &op), 0));
    OK(api->attention(dev, &op));
    const std::vector<float> got = out.get();
    const std::vector<uint8_t> after_k = host_of(dk, pool_k), after_v = host_of(dv, pool_v);
    OK(api->attention(dev, &op));
    same_bits(got, out.get());
    for (uint32_t c : host_of(op.counter, api->attention_counters(dev, &op))) same(0, c, 0);

    auto ready = [&](const float *src, const float *norm, int t) { // normed and rotated
        std::vector<double> r(src, src + d);
        if (norm) {
            double ss = 0;
            for (double e : r) ss += e * e;
            for (size_t i = 0; i < d; i++) r[i] *= (double)norm[i] / sqrt(ss / (double)d + 1e-5);
        }
        for (int i = 0; i < k.n_rot / 2 && k.rope != TE_CUDA_NO_ROPE; i++) {
            const size_t a = (size_t)(k.rope == TE_CUDA_ROPE_NORM ? 2 * i : i),
                         b = a + (size_t)(k.rope == TE_CUDA_ROPE_NORM ? 1 : k.n_rot / 2);
            const double c = (double)cs[(size_t)(t * k.n_rot + 2 * i)],
                         s = (double)cs[(size_t)(t * k.n_rot + 2 * i + 1)], u = r[a], w = r[b];
            r[a] = u * c - w * s;
            r[b] = u * s + w * c;
        }
        return r;
    };
    // What the step stored: within one rounding of the format; the rest of the pool untouched.
    for (int t = 0; t < k.n_tok; t++)
        for (int h = 0; h < k.n_head_kv && k.pos[(size_t)t] >= 0; h++) {
            const size_t at = place(k.seq[(size_t)t], k.pos[(size_t)t], h);
            const std::vector<double> key =
                ready(&kk[(size_t)t * ldk + (size_t)h * d], k.norm ? kn.data() : nullptr, t);
            double most = 0;
            for (double e : key) most = fmax(most, fabs(e));
            const double rounding = k.type_k == TE_F32    ? 1e-6
                                    : k.type_k == TE_F16  ? 0x1p-10
                                    : k.type_k == TE_BF16 ? 0x1p-7
                                                          : 1.01 / 127;
            te_dequantize_row(k.type_k, &after_k[at * row_k], x.data(), k.d);
            for (size_t i = 0; i < d; i++) near((long)i, (double)x[i], key[i], rounding * most + 1e-6);
            std::vector<uint8_t> row(row_v);
            te_quantize_row(k.type_v, &v[(size_t)t * ldk + (size_t)h * d], row.data(), k.d);
            is_true(!memcmp(row.data(), &after_v[at * row_v], row_v), "V is not stored as the reference does");
            memcpy(&hk[at * row_k], &after_k[at * row_k], row_k);
            memcpy(&hv[at * row_v], &after_v[at * row_v], row_v);
        }
    is_true(hk == after_k && hv == after_v, "the pool changed elsewhere");
    std::vector<double> score;
    for (int t = 0; t < k.n_tok; t++)
        for (int h = 0; h < k.n_head; h++) {
            const int n = k.pos[(size_t)t] + 1, kvh = h / (k.n_head / k.n_head_kv);
            const float *o = &got[(size_t)t * ldq + (size_t)h * d];
            if (n < 1) {
                for (size_t i = 0; i < d; i++) same((long)i, (double)o[i], 0);
                continue;
            }
            const std::vector<double> query =
                ready(&q[(size_t)t * ldq + (size_t)h * d], k.norm ? qn.data() : nullptr, t);
            score.assign((size_t)n, 0);
            double most = -1e300, total = 0, doubt = 0;
            for (int p = 0; p < n; p++) {
                te_dequantize_row(k.type_k, &hk[place(k.seq[(size_t)t], p, kvh) * row_k], x.data(), k.d);
                double size = 0;
                for (size_t i = 0; i < d; i++) {
                    score[(size_t)p] += query[i] * (double)x[i] * (double)op.scale;
                    size += fabs(query[i] * (double)x[i]) * (double)op.scale;
                }
                doubt = fmax(doubt, 8 * EPS * sqrt((double)d) * size);
                most = fmax(most, score[(size_t)p]);
            }
            std::vector<double> value(d, 0), weight(d, 0);
            for (int p = 0; p < n; p++) {
                const double e = exp(score[(size_t)p] - most);
                total += e;
                te_dequantize_row(k.type_v, &hv[place(k.seq[(size_t)t], p, kvh) * row_v], x.data(), k.d);
                for (size_t i = 0; i < d; i++) {
                    value[i] += e * (double)x[i];
                    weight[i] += e * fabs((double)x[i]);
                }
            }
            for (size_t i = 0; i < d; i++)
                near((long)i, (double)o[i], value[i] / total,
                     (weight[i] / total) * (2 * doubt + 8 * EPS * sqrt((double)n)) + 1e-30);
        }
    for (const void *p :
         {(const void *)op.q, (const void *)op.k, (const void *)op.v, (const void *)op.q_norm, (const void *)op.k_norm,
          (const void *)op.cs, (const void *)op.pos, (const void *)op.table, (const void *)op.seq, (const void *)dk,
          (const void *)dv, (const void *)op.scratch, (const void *)op.counter})
        OK(api->free(dev, (void *)p));
    out.free();
}

static void check_attention() {
    const te_cuda_rope_kind no = TE_CUDA_NO_ROPE, norm = TE_CUDA_ROPE_NORM, neox = TE_CUDA_ROPE_NEOX;
    const std::vector<attention_case> cases = {
        {1, 8, 8, 64, TE_F16, TE_F16, norm, 64, false, {0}, {0}},
        {1, 8, 8, 128, TE_F16, TE_F16, neox, 128, false, {1}, {77}},
        {1, 32, 8, 128, TE_F16, TE_F16, norm, 128, false, {2}, {513}},
        {1, 32, 8, 128, TE_Q8_0, TE_Q8_0, norm, 128, true, {2}, {1999}},
        {1, 16, 2, 128, TE_BF16, TE_F16, neox, 64, true, {4}, {63}},
        {1, 16, 2, 128, TE_F16, TE_F16, neox, 64, true, {4}, {190}},
        {1, 71, 1, 64, TE_F16, TE_F16, neox, 64, false, {0}, {700}},
        {1, 4, 2, 80, TE_F32, TE_F32, neox, 32, false, {3}, {130}},
        {1, 4, 4, 256, TE_F32, TE_BF16, norm, 256, false, {3}, {1024}},
        {1, 2, 1, 16, TE_F16, TE_F16, norm, 16, false, {3}, {100}},
        {1, 4, 4, 96, TE_Q8_0, TE_F16, no, 0, false, {0}, {64}},
        {3, 32, 8, 128, TE_F16, TE_F16, norm, 128, false, {0, 1, 2}, {5, 800, 64}},
        {4, 16, 4, 128, TE_Q8_0, TE_Q8_0, neox, 128, true, {1, 1, 1, 1}, {62, 63, 64, 65}},
        {8, 12, 4, 64, TE_F16, TE_F16, norm, 64, false, {0, 1, 1, 2, 3, 3, 3, 4}, {1000, 0, 1, 300, 15, 16, 17, -1}},
        {8,
         8,
         8,
         128,
         TE_BF16,
         TE_BF16,
         norm,
         128,
         false,
         {3, 3, 3, 3, 3, 3, 3, 3},
         {120, 121, 122, 123, 124, 125, 126, 127}},
    };
    for (const attention_case &c : cases) check_attention_case(c);
}

// ---- embeddings, small kernels ----

static void check_embed() {
    for (int type : all_types)
        for (int on_host = 0; on_host < 2; on_host++) {
            const int cols = te_type_get(type)->block_weights == 256 ? 768 : 96, rows = 50;
            AT("embed %s, %s", te_type_get(type)->name, on_host ? "in host memory" : "on the device");
            matrix a = matrix_new(type, rows, cols);
            void *host = nullptr;
            OK(api->host_alloc(dev, a.file.size(), &host));
            memcpy(host, a.file.data(), a.file.size());
            uint8_t *there = device_of(a.file);
            const std::vector<int32_t> ids = {3, 49, -1, 0};
            result y(4 * (size_t)(cols + 4));
            te_cuda_embed op = {};
            op.table = {on_host ? host : there, a.file_stride, type, cols, rows};
            op.id = device_of(ids);
            op.n_tok = 4;
            op.y = y.data();
            op.ldy = (size_t)cols + 4;
            OK(api->embed(dev, &op));
            const std::vector<float> once = y.get();
            op.id = device_of(std::vector<int32_t>{1, 2, -1, 0});
            op.offset = 2;
            op.add = 1;
            OK(api->embed(dev, &op));
            const std::vector<float> twice = y.get();
            for (int t = 0; t < 4; t++)
                for (int c = 0; c < cols; c++) {
                    const double first = ids[(size_t)t] < 0 ? 0 : a.row(ids[(size_t)t])[c],
                                 second = t == 2 ? 0 : a.row((t == 3 ? 0 : t + 1) + 2)[c];
                    const size_t at = (size_t)t * (size_t)(cols + 4) + (size_t)c;
                    near(c, (double)once[at], first, is_float(type) ? 0 : 4 * EPS * 4);
                    near(c, (double)twice[at], first + second, EPS * 16);
                }
            OK(api->host_free(dev, host));
            OK(api->free(dev, there));
            a.free();
            y.free();
        }
    AT("pack of rows and blocks");
    {
        matrix a = matrix_new(TE_Q8_0, 12, 256);
        const std::vector<int32_t> rows = {3, 4, 11}, blocks = {7, 0, 2};
        uint8_t *file = device_of(a.file);
        te_mat m = {nullptr, api->stride(TE_Q8_0, 96), TE_Q8_0, 96, 3};
        m.w = device_new<uint8_t>(m.stride * 3);
        const te_cuda_pack op = {m, file, a.file_stride, device_of(rows), device_of(blocks)};
        OK(api->pack(dev, &op));
        const std::vector<uint8_t> got = host_of((const uint8_t *)m.w, m.stride * 3);
        for (int r = 0; r < 3; r++)
            for (int c = 0; c < 96; c++) {
                uint16_t half;
                memcpy(&half, &got[(size_t)r * m.stride + 96 + (size_t)(c / 32) * 2], 2);
                const double w = (double)(int8_t)got[(size_t)r * m.stride + (size_t)c] * (double)te_f16_to_f32(half);
                same(c, w, a.row(rows[(size_t)r])[blocks[(size_t)(c / 32)] * 32 + c % 32]);
            }
        for (int r = 0; r < 3; r++)
            for (size_t i = 102; i < m.stride; i++) same((long)i, got[(size_t)r * m.stride + i], 0);
        a.free();
    }
    AT("add");
    const std::vector<float> x = normals(1003), z = normals(1003);
    float *dx = device_of(x), *dz = device_of(z);
    OK(api->add(dev, dx, dz, 1003));
    const std::vector<float> sums = host_of(dz, 1003);
    for (size_t i = 0; i < 1003; i++) same((long)i, (double)sums[i], (double)(x[i] + z[i]));
    AT("argmax");
    std::vector<float> big = normals(3 * 40000);
    big[20001] = big[30001] = 50;
    big[40000 + 39999] = NAN;
    big[40000 + 7] = 60;
    for (size_t i = 80000; i < 120000; i++) big[i] = NAN;
    int32_t *best = device_new<int32_t>(3);
    OK(api->argmax(dev, device_of(big), 40000, 40000, 3, best));
    const std::vector<int32_t> got = host_of(best, 3);
    same(0, got[0], 20001);
    same(1, got[1], 7);
    same(2, got[2], 0);
}

// ---- graphs ----

static void check_graph() {
    AT("graph");
    const int n = 1024, ff = 2048, n_tok = 2;
    for (int overlap = 0; overlap < 2; overlap++) {
        api->set_overlap(dev, overlap);
        matrix gate = matrix_new(TE_Q8_0, ff, n, 0.05f), up = matrix_new(TE_Q8_0, ff, n, 0.05f),
               down = matrix_new(TE_Q8_0, ff, n, 0.05f), square = matrix_new(TE_Q8_0, n, n, 0.05f);
        float *x = device_of(normals((size_t)(n * n_tok))), *y = device_new<float>((size_t)(n * n_tok)),
              *h = device_new<float>((size_t)(ff * n_tok));
        const int n_parts = api->parts(dev, &down.m, ff);
        float *partial = device_new<float>((size_t)n_parts * (size_t)(n_tok * n));
        const std::vector<float> start = host_of(x, (size_t)(n * n_tok));
        auto step = [&] {
            for (int layer = 0; layer < 6; layer++) {
                te_cuda_linear lin = {};
                lin.x = x;
                lin.ldx = (size_t)n;
                lin.n_tok = n_tok;
                lin.n_products = 1;
                lin.product[0].w = square.m;
                lin.product[0].y = y;
                lin.product[0].ldy = (size_t)n;
                lin.product[0].add = x;
                lin.product[0].ld_add = (size_t)n;
                OK(api->linear(dev, &lin));
                te_cuda_hidden hid = {};
                hid.x = y;
                hid.ldx = (size_t)n;
                hid.n_tok = n_tok;
                hid.gate = gate.m;
                hid.up = up.m;
                hid.mode = TE_CUDA_SKIP;
                hid.h = h;
                hid.ldh = (size_t)ff;
                OK(api->hidden(dev, &hid));
                te_cuda_down dow = {};
                dow.w = down.m;
                dow.h = h;
                dow.ldh = (size_t)ff;
                dow.n_tok = n_tok;
                dow.partial = partial;
                OK(api->down(dev, &dow));
                te_cuda_merge mer = {};
                mer.partial = partial;
                mer.n_parts = n_parts;
                mer.n_tok = n_tok;
                mer.cols = n;
                mer.add = y;
                mer.ld_add = (size_t)n;
                mer.y = x;
                mer.ldy = (size_t)n;
                OK(api->merge(dev, &mer));
            }
        };
        step();
        const std::vector<float> direct = host_of(x, (size_t)(n * n_tok));
        te_cuda_graph *g = nullptr;
        OK(api->capture_begin(dev));
        step();
        OK(api->capture_end(dev, &g));
        for (int turn = 0; turn < 3; turn++) {
            OK(api->upload(dev, x, start.data(), start.size() * 4));
            finish();
            OK(api->graph_launch(dev, g));
            same_bits(direct, host_of(x, (size_t)(n * n_tok)));
        }
        api->graph_free(g);
        gate.free();
        up.free();
        down.free();
        square.free();
    }
    // An operation that fails while it is recorded fails the graph, with its own sentence.
    OK(api->capture_begin(dev));
    te_cuda_linear bad = {};
    is_true(api->linear(dev, &bad) == TE_ARGUMENT, "an empty operation is refused");
    void *p;
    is_true(api->alloc(dev, 16, &p) == TE_ARGUMENT, "no allocation while recording");
    te_cuda_graph *g = nullptr;
    is_true(api->capture_end(dev, &g) == TE_ARGUMENT && !g && strstr(api->last_error(), "products"),
            "the graph reports the operation");
    finish();
}

// ---- the device ----

static void check_device() {
    AT("device");
    te_cuda_info info;
    OK(api->info(dev, &info));
    is_true(api->version == TE_CUDA_VERSION && api->size == sizeof(te_cuda_api), "the table's version");
    te_cuda *other = nullptr;
    is_true(api->open(1000, &other) == TE_ARGUMENT && !other && strstr(api->last_error(), "1000"), "device 1000");
    te_cuda_memory before, during, after;
    OK(api->memory(dev, &before));
    void *p;
    is_true(api->alloc(dev, (size_t)1 << 60, &p) == TE_MEMORY && !p && strstr(api->last_error(), "MiB"),
            "too much memory");
    OK(api->alloc(dev, (size_t)64 << 20, &p));
    is_true((uintptr_t)p % 256 == 0, "alignment");
    OK(api->memory(dev, &during));
    same(0, (double)(during.owned_bytes - before.owned_bytes), (double)(64 << 20));
    is_true(during.free_bytes < before.free_bytes, "free memory goes down");
    is_true(api->free(dev, (char *)p + 1) == TE_ARGUMENT, "a foreign pointer");
    OK(api->free(dev, p));
    OK(api->memory(dev, &after));
    is_true(after.owned_bytes == before.owned_bytes && after.free_bytes == before.free_bytes, "memory is given back");
    OK(api->free(dev, nullptr));
    te_cuda_graph *g = nullptr;
    is_true(api->capture_end(dev, &g) == TE_ARGUMENT && !g, "nothing was being recorded");

    // A limit on waiting: a second or so of work, a wait of a millisecond.
    matrix m = matrix_new(TE_F16, 512, 4096);
    result y(512);
    te_cuda_linear op = {};
    op.x = device_of(normals(4096));
    op.ldx = 4096;
    op.n_tok = 1;
    op.n_products = 1;
    op.product[0].w = m.m;
    op.product[0].y = y.data();
    OK(api->capture_begin(dev));
    for (int i = 0; i < 2000; i++) OK(api->linear(dev, &op));
    OK(api->capture_end(dev, &g));
    OK(api->mark(dev, 0));
    for (int i = 0; i < 10; i++) OK(api->graph_launch(dev, g));
    OK(api->mark(dev, 1));
    is_true(api->wait(dev, 0.001) == TE_TIMEOUT, "a wait ends in time");
    finish();
    double ms = 0;
    OK(api->elapsed(dev, 0, 1, &ms));
    is_true(ms > 5 && ms < 5000, "elapsed time");
    api->graph_free(g);
    m.free();

    // Host memory, and a file that is mapped read-only.
    OK(api->host_alloc(dev, 4096, &p));
    memset(p, 0x3c, 4096);
    float *q = device_new<float>(1024);
    OK(api->copy(dev, q, p, 4096));
    same(0, (double)host_of((uint32_t *)q, 1024)[1023], (double)0x3c3c3c3cu);
    OK(api->host_free(dev, p));
    char name[] = "/tmp/kernels_check.XXXXXX";
    const int fd = mkstemp(name);
    std::vector<float> numbers = normals(1 << 16);
    is_true(fd >= 0 && write(fd, numbers.data(), numbers.size() * 4) == (ssize_t)(numbers.size() * 4), "a file");
    void *map = mmap(nullptr, numbers.size() * 4, PROT_READ, MAP_SHARED, fd, 0);
    const void *there = nullptr;
    const te_status s = api->host_register(dev, map, numbers.size() * 4, &there);
    printf("registering a file mapping: %s\n", s == TE_OK ? "works" : api->last_error());
    is_true(s == TE_OK || s == TE_UNSUPPORTED, "a mapping is registered or refused");
    if (s == TE_OK) {
        float *z = device_of(std::vector<float>(numbers.size(), 0));
        OK(api->add(dev, (const float *)there, z, (int64_t)numbers.size()));
        is_true(host_of(z, numbers.size()) == numbers, "a kernel reads the file");
        OK(api->host_unregister(dev, map));
    }
    munmap(map, numbers.size() * 4);
    close(fd);
    unlink(name);

    // Opening and closing leaves nothing behind.
    for (int i = 0; i < 3; i++) {
        te_cuda *d;
        OK(api->open(0, &d));
        void *a;
        OK(api->alloc(d, (size_t)1 << 28, &a));
        api->close(d);
    }
    OK(api->memory(dev, &before));
    for (int i = 0; i < 30; i++) {
        te_cuda *d;
        OK(api->open(0, &d));
        void *a, *b;
        OK(api->alloc(d, (size_t)1 << 28, &a));
        OK(api->host_alloc(d, 1 << 16, &b));
        OK(api->capture_begin(d));
        if (i % 2) OK(api->capture_end(d, &g));
        if (i % 2) api->graph_free(g);
        api->close(d);
    }
    OK(api->memory(dev, &after));
    is_true(after.free_bytes >= before.free_bytes, "closing gives all memory back");
}

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    open_gpu();
    const struct {
        const char *name;
        void (*run)();
    } parts[] = {{"device", check_device}, {"linear", check_linear},       {"ffn", check_ffn},
                 {"fused", check_fused},   {"attention", check_attention}, {"embed", check_embed},
                 {"graph", check_graph}};
    for (auto &p : parts) {
        bool wanted = argc == 1;
        for (int i = 1; i < argc; i++) wanted |= !strcmp(argv[i], p.name);
        if (!wanted) continue;
        const long n = n_checked, off = n_off;
        p.run();
        printf("%s: %ld values, %ld off\n", p.name, n_checked - n, n_off - off);
    }
    api->close(dev);
    return n_off ? 1 : 0;
}
