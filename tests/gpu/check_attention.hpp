// check_attention.hpp - attention of a few tokens, with what it writes to the pools.
#pragma once
#include "halves.hpp"

struct attention_case {
    int n_tok, n_head, n_head_kv, d, type_k, type_v;
    te_rope_kind rope;
    int n_rot;
    bool norm;
    std::vector<int> seq, pos;
    int window = 0;
    bool sinks = false;
    float soft_cap = 0;
    bool v_norm = false;
    bool chunked = false, warm = false; // warm: queries grow with their positions
};

// A router's product that a single token's attention computes beside it.
struct beside_attention {
    input in;
    matrix m;
    std::vector<float> bias;
    result y;
    te_linear_args op = {};
    explicit beside_attention(bool large)
        : in(input_new(1, large ? 2560 : 68, TE_NO_NORM, false)), m(matrix_new(TE_F32, large ? 64 : 7, in.cols)),
          bias(normals((size_t)m.m.n_rows)), y(bias.size()) {
        op.x = in.dx;
        op.n_tok = op.n_products = 1;
        op.cols = in.cols;
        op.product[0].w = m.m;
        op.product[0].bias = large ? nullptr : device_of(bias);
        op.product[0].y = y.data();
        is_true(api->attends_beside(&op) != 0, "attention does not take a router");
    }
    void check() const {
        const std::vector<float> got = y.get();
        for (int r = 0; r < m.m.n_rows; r++) {
            const sum s = product(m, r, in, 0);
            const double b = op.product[0].bias ? (double)bias[(size_t)r] : 0;
            near(r, (double)got[(size_t)r], s.v + b, s.limit() + 4 * EPS * fabs(b));
        }
    }
    void free() {
        if (op.product[0].bias) OK(api->free(dev, (void *)op.product[0].bias));
        in.free();
        m.free();
        y.free();
    }
};

static void check_attention_case(const attention_case &k) {
    AT("attention %d tokens, %d on %d heads of %d, %s %s, rope %d, window %d, sinks %d, cap %g", k.n_tok, k.n_head,
       k.n_head_kv, k.d, te_type_get(k.type_k)->name, te_type_get(k.type_v)->name, (int)k.rope, k.window, k.sinks,
       (double)k.soft_cap);
    const int n_seq = 1 + *std::max_element(k.seq.begin(), k.seq.end()),
              n_ctx = *std::max_element(k.pos.begin(), k.pos.end()) < 2048 ? 2048 : 8192, ld_table = n_ctx / 64,
              n_blocks = n_seq * ld_table + 3;
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
    std::vector<float> qn = normals(d), kn = normals(d), vn = normals(d),
                       cs((size_t)k.n_tok * (size_t)std::max(k.n_rot, 2));
    for (int t = 0; t < k.n_tok; t++)
        for (int i = 0; i < k.n_rot / 2; i++) {
            const double angle = k.pos[(size_t)t] * pow(10000, -2.0 * i / k.n_rot);
            cs[(size_t)(t * k.n_rot + 2 * i)] = (float)cos(angle);
            cs[(size_t)(t * k.n_rot + 2 * i + 1)] = (float)sin(angle);
        }
    std::vector<int32_t> pos(k.pos.begin(), k.pos.end()), seq(k.seq.begin(), k.seq.end());
    result out((size_t)k.n_tok * ldq);
    te_attention_args op = {};
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
    if (k.v_norm) op.v_norm = device_of(vn);
    op.norm_eps = random_word() % 2 ? 1e-5f : 0.125f;
    op.soft_cap = k.soft_cap;
    op.scale = (float)(1 / sqrt((double)k.d));
    op.rope = k.rope;
    op.n_rot = k.n_rot;
    op.cs = device_of(cs);
    op.pos = device_of(pos);
    op.table = device_of(table);
    op.row = device_of(seq);
    op.ld_table = ld_table;
    op.k_pool = dk;
    op.v_pool = dv;
    op.type_k = k.type_k;
    op.type_v = k.type_v;
    op.n_ctx = n_ctx;
    op.window = k.window;
    op.chunked = k.chunked;
    if (k.warm) {
        op.temp_scale = TEMP_SCALE;
        op.temp_first = TEMP_FIRST;
        op.temp_length = TEMP_LENGTH;
    }
    const std::vector<float> sinks = some_sinks(k.n_head);
    op.sinks = k.sinks ? device_of(sinks) : nullptr;
    op.apart = k.n_tok > TE_CUDA_MAX_TOK || k.n_tok == 3; // no two of them are of one sequence
    op.early = k.norm || k.n_tok == 3;
    op.out = out.data();
    op.ld_out = ldq;
    op.scratch = device_new<float>(api->attention_floats(dev, &op));
    op.counter = device_of(std::vector<uint32_t>(api->attention_counters(dev, &op), 0));
    beside_attention router(k.norm);
    if (k.n_tok == 1) op.beside = &router.op;
    halves half = {};
    const bool halved = api->attention_halves(dev, &op) != 0;
    if (halved) { // the result in F16, too
        half = halves_new(k.n_tok, (int)ldq, k.norm ? TE_Q4_0 : TE_F16);
        op.half = half.h.v;
        op.half_scale = half.h.scale;
        op.half_tiles = half.h.tiles;
        op.half_words = half.h.words;
        op.half_matrices = half.h.matrices;
    }
    OK(api->attention(dev, &op));
    const std::vector<float> got = out.get();
    if (op.beside) router.check();
    router.free();
    op.beside = nullptr;
    if (halved) {
        half.read();
        for (int t = 0; t < k.n_tok; t++)
            for (int c = 0; c < (int)ldq; c++)
                same(t * (long)ldq + c, half.at(t, c),
                     (double)te_f16_to_f32(te_f32_to_f16(got[(size_t)t * ldq + (size_t)c])));
    }
    const std::vector<uint8_t> after_k = host_of(dk, pool_k), after_v = host_of(dv, pool_v);
    OK(api->attention(dev, &op));
    same_bits(got, out.get());
    if (halved) half.free();
    op.half = nullptr;
    for (uint32_t c : host_of(op.counter, api->attention_counters(dev, &op))) same(0, c, 0);

    auto ready = [&](const float *src, const float *norm, int t) { // normed and rotated
        std::vector<double> r(src, src + d);
        if (norm) {
            double ss = 0;
            for (double e : r) ss += e * e;
            for (size_t i = 0; i < d; i++) r[i] *= (double)norm[i] / sqrt(ss / (double)d + (double)op.norm_eps);
        }
        for (int i = 0; i < k.n_rot / 2 && k.rope != TE_NO_ROPE; i++) {
            const size_t a = (size_t)(k.rope == TE_ROPE_NORM ? 2 * i : i),
                         b = a + (size_t)(k.rope == TE_ROPE_NORM ? 1 : k.n_rot / 2);
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
            if (k.v_norm) { // rounded to the format's steps
                const float *from = &v[(size_t)t * ldk + (size_t)h * d];
                double squares = 0;
                most = 0;
                for (size_t i = 0; i < d; i++) squares += (double)from[i] * (double)from[i];
                std::vector<double> value(d);
                for (size_t i = 0; i < d; i++) {
                    value[i] = (double)from[i] * (double)vn[i] / sqrt(squares / (double)d + (double)op.norm_eps);
                    most = fmax(most, fabs(value[i]));
                }
                te_dequantize_row(k.type_v, &after_v[at * row_v], x.data(), k.d);
                for (size_t i = 0; i < d; i++) near((long)i, (double)x[i], value[i], 1.01 / 127 * most + 1e-6);
            } else {
                is_true(!memcmp(row.data(), &after_v[at * row_v], row_v), "V is not stored as the reference does");
            }
            memcpy(&hk[at * row_k], &after_k[at * row_k], row_k);
            memcpy(&hv[at * row_v], &after_v[at * row_v], row_v);
        }
    is_true(hk == after_k && hv == after_v, "the pool changed elsewhere");
    std::vector<double> score;
    for (int t = 0; t < k.n_tok; t++)
        for (int h = 0; h < k.n_head; h++) {
            const int n = k.pos[(size_t)t] + 1, kvh = h / (k.n_head / k.n_head_kv),
                      lowest = lowest_of(n - 1, k.window, k.chunked);
            const float *o = &got[(size_t)t * ldq + (size_t)h * d];
            if (n < 1) {
                for (size_t i = 0; i < d; i++) same((long)i, (double)o[i], 0);
                continue;
            }
            std::vector<double> query = ready(&q[(size_t)t * ldq + (size_t)h * d], k.norm ? qn.data() : nullptr, t);
            for (double &v : query) v *= k.warm ? warmth_of(n - 1) : 1;
            score.assign((size_t)n, 0);
            double most = -1e300, total = 0, doubt = 0;
            for (int p = lowest; p < n; p++) {
                te_dequantize_row(k.type_k, &hk[place(k.seq[(size_t)t], p, kvh) * row_k], x.data(), k.d);
                double size = 0;
                for (size_t i = 0; i < d; i++) {
                    score[(size_t)p] += query[i] * (double)x[i] * (double)op.scale;
                    size += fabs(query[i] * (double)x[i]) * (double)op.scale;
                }
                doubt = fmax(doubt, 8 * EPS * sqrt((double)d) * size + 8 * EPS * (double)k.soft_cap);
                if (k.soft_cap > 0) score[(size_t)p] = (double)k.soft_cap * tanh(score[(size_t)p] / (double)k.soft_cap);
                most = fmax(most, score[(size_t)p]);
            }
            std::vector<double> value(d, 0), weight(d, 0);
            if (k.sinks) {
                total = exp((double)sinks[(size_t)h] - most);
                doubt += 2 * EPS * fabs((double)sinks[(size_t)h] - most);
            }
            for (int p = lowest; p < n; p++) {
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
    for (const void *p : {(const void *)op.q, (const void *)op.k, (const void *)op.v, (const void *)op.q_norm,
                          (const void *)op.k_norm, (const void *)op.v_norm, (const void *)op.cs, (const void *)op.pos,
                          (const void *)op.table, (const void *)op.row, (const void *)dk, (const void *)dv,
                          (const void *)op.scratch, (const void *)op.counter, (const void *)op.sinks})
        OK(api->free(dev, (void *)p));
    out.free();
}

static void check_attention() {
    const te_rope_kind no = TE_NO_ROPE, norm = TE_ROPE_NORM, neox = TE_ROPE_NEOX;
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
        // Soft caps; scores are about 1.
        {1, 32, 16, 128, TE_F16, TE_F16, neox, 128, false, {2}, {513}, 0, false, 0.5f},
        {1, 8, 4, 256, TE_F16, TE_F16, neox, 256, false, {1}, {1535}, 512, false, 50},
        {4, 16, 4, 64, TE_Q8_0, TE_Q8_0, neox, 64, true, {1, 1, 1, 1}, {62, 63, 64, 65}, 64, false, 1},
        // Norms of V.
        {1, 32, 16, 256, TE_F16, TE_F16, neox, 256, true, {2}, {513}, 0, false, 0, true},
        {4, 16, 4, 64, TE_Q8_0, TE_Q8_0, neox, 64, true, {1, 1, 1, 1}, {62, 63, 64, 65}, 64, false, 0, true},
        // Windows: longer than what is held, as long, shorter, and beginning within and between blocks.
        {1, 32, 8, 128, TE_F16, TE_F16, norm, 128, false, {2}, {513}, 600},
        {1, 32, 8, 128, TE_F16, TE_F16, norm, 128, false, {2}, {513}, 514},
        {1, 32, 8, 128, TE_F16, TE_F16, norm, 128, false, {2}, {513}, 513},
        {1, 32, 8, 128, TE_Q8_0, TE_Q8_0, norm, 128, true, {2}, {1999}, 1024},
        {1, 8, 4, 256, TE_F16, TE_F16, neox, 256, true, {1}, {1535}, 512},
        {1, 4, 2, 80, TE_F32, TE_F32, neox, 32, false, {3}, {130}, 8},
        {1, 71, 1, 64, TE_F16, TE_F16, neox, 64, false, {0}, {700}, 70},
        {3, 32, 8, 128, TE_F16, TE_F16, norm, 128, false, {0, 1, 2}, {5, 800, 64}, 65},
        {4, 16, 4, 128, TE_Q8_0, TE_Q8_0, neox, 128, true, {1, 1, 1, 1}, {62, 63, 64, 65}, 64},
        {8,
         12,
         4,
         64,
         TE_F16,
         TE_F16,
         norm,
         64,
         false,
         {0, 1, 1, 2, 3, 3, 3, 4},
         {1000, 0, 1, 300, 15, 16, 17, -1},
         16},
        {8,
         8,
         8,
         64,
         TE_F16,
         TE_F16,
         norm,
         64,
         false,
         {3, 3, 3, 3, 3, 3, 3, 3},
         {120, 121, 122, 123, 124, 125, 126, 127},
         8},
        // Chunks: whose border lies within the step, in front of it, behind blocks and within them; queries that grow.
        {4, 16, 4, 128, TE_F16, TE_F16, norm, 128, false, {1, 1, 1, 1}, {62, 63, 64, 65}, 64, false, 0, false, true},
        {4, 16, 4, 128, TE_Q8_0, TE_Q8_0, neox, 64, true, {1, 1, 1, 1}, {70, 71, 72, 73}, 24, false, 0, false, true},
        {4, 4, 4, 64, TE_F16, TE_F16, norm, 64, false, {1, 1, 1, 1}, {71, 72, 73, 74}, 24, false, 0, false, true, true},
        {1, 71, 1, 64, TE_F16, TE_F16, neox, 64, false, {0}, {700}, 70, false, 0, false, true},
        {1, 40, 8, 128, TE_F16, TE_F16, norm, 128, false, {2}, {1023}, 512, false, 0, false, true},
        {1, 40, 8, 128, TE_F16, TE_F16, no, 0, false, {2}, {1023}, 0, false, 0, false, false, true},
        {3, 8, 2, 80, TE_F32, TE_F32, no, 0, true, {0, 1, 2}, {5, 800, 64}, 0, false, 0, false, false, true},
        {8,
         12,
         4,
         64,
         TE_F16,
         TE_F16,
         norm,
         64,
         false,
         {0, 1, 1, 2, 3, 3, 3, 4},
         {1000, 0, 1, 300, 15, 16, 17, -1},
         16,
         false,
         0,
         false,
         true},
        // Sinks: of one part and of several, in all three kinds of groups.
        {1, 64, 8, 64, TE_F16, TE_F16, neox, 64, false, {0}, {0}, 0, true},
        {1, 64, 8, 64, TE_F16, TE_F16, neox, 64, false, {0}, {1000}, 128, true},
        {1, 64, 8, 64, TE_F16, TE_F16, neox, 64, false, {0}, {2000}, 0, true},
        {1, 8, 8, 128, TE_F16, TE_F16, neox, 128, false, {1}, {1500}, 0, true},
        {1, 6, 2, 80, TE_F32, TE_F32, neox, 32, true, {3}, {700}, 0, true},
        {1, 71, 1, 64, TE_Q8_0, TE_Q8_0, neox, 64, false, {0}, {1700}, 0, true},
        {3, 64, 8, 64, TE_F16, TE_F16, neox, 64, false, {0, 1, 2}, {5, 1800, 64}, 0, true},
        {8,
         64,
         8,
         64,
         TE_Q8_0,
         TE_F16,
         neox,
         64,
         false,
         {0, 1, 1, 2, 3, 3, 3, 4},
         {1000, 0, 1, 300, 15, 16, 17, -1},
         128,
         true},
    };
    for (const attention_case &c : cases) check_attention_case(c);
    // Long contexts, in which each warp has positions of its own.
    for (int d : {64, 128}) {
        check_attention_case({1, 4, 4, d, TE_F16, TE_F16, norm, d, false, {0}, {4096}});
        check_attention_case({1, 4, 2, d, TE_F16, TE_F16, neox, d, true, {1}, {4999}, 0, true});
        check_attention_case({1, 16, 2, d, TE_F16, TE_F16, neox, 64, false, {1}, {8191}, 5000});
        check_attention_case({1, 16, 2, d, TE_F16, TE_F16, neox, 64, false, {1}, {8100}, 8100, false, 0, false, true});
        check_attention_case(
            {1, 4, 4, d, TE_F16, TE_F16, norm, d, false, {1}, {8100}, 3800, false, 0, false, true, true});
        check_attention_case({2, 6, 1, d, TE_F16, TE_F16, norm, d, false, {0, 0}, {6006, 6007}, 0, false, 0.5f});
        check_attention_case({3, 2, 2, d, TE_F16, TE_F16, norm, d, false, {0, 1, 2}, {4500, 10, 7777}, 0, true});
        check_attention_case({8,
                              4,
                              4,
                              d,
                              TE_F16,
                              TE_F16,
                              norm,
                              d,
                              false,
                              {0, 0, 0, 0, 0, 0, 0, 0},
                              {5115, 5116, 5117, 5118, 5119, 5120, 5121, 5122}});
    }
    // Many tokens, each of a sequence of its own: with one, two and four warps for a token's KV head, or several chunks of
    // query heads, or in other formats.
    struct many {
        int n_tok, n_head, n_head_kv, d;
        int type_v = TE_F16, window = 0;
        float soft_cap = 0;
        bool norm = false, chunked = false, warm = false; // the last two are left to the kernel of few tokens
    };
    for (const many &m :
         {many{9, 16, 16, 128}, many{13, 64, 16, 128}, many{40, 16, 16, 128}, many{40, 36, 36, 64},
          many{64, 24, 24, 64, TE_F16, 70}, many{64, 32, 8, 128, TE_F16, 0, 0, true},
          many{33, 36, 6, 64, TE_F16, 100, 0.5f, true}, many{17, 32, 32, 128, TE_F16, 0, 1},
          many{9, 16, 4, 64, TE_Q8_0, 0, 0, true}, many{40, 16, 4, 64, TE_Q8_0, 0, 0, true},
          many{12, 36, 36, 64, TE_F16, 100, 0, false, true}, many{40, 36, 36, 64, TE_F16, 100, 0, false, true},
          many{40, 32, 8, 128, TE_F16, 70, 0, false, true, true},
          many{33, 16, 16, 64, TE_F16, 0, 0, true, false, true}}) {
        attention_case c = {m.n_tok, m.n_head, m.n_head_kv, m.d, TE_F16, m.type_v, neox, 64, m.norm, {}, {}};
        for (int t = 0; t < m.n_tok; t++) {
            c.seq.push_back((t * 7 + 3) % m.n_tok);
            c.pos.push_back(t == 5 ? -1 : t == 6 ? 0 : (int)(random_word() % 600));
        }
        c.window = m.window;
        c.soft_cap = m.soft_cap;
        c.chunked = m.chunked;
        c.warm = m.warm;
        c.sinks = m.norm;
        check_attention_case(c);
    }
}
