// check_latent.hpp - latent attention of few tokens and of prompts, with what it writes to the pool.
#pragma once
#include "checks.hpp"

struct latent_case {
    int n_head, n_key, n_value, rank, n_rot, type, type_b;
    std::vector<int> seq, pos;
};

static void check_latent_case(const latent_case &k) {
    const int n_tok = (int)k.pos.size(), n_seq = 3, n_ctx = 2048, ld_table = n_ctx / 64,
              n_blocks = n_seq * ld_table + 3, row = k.n_rot + k.rank, n_nope = k.n_key - k.n_rot;
    AT("latent attention %d tokens, %d heads of %d and %d, latent of %d and %d, %s, matrices %s", n_tok, k.n_head,
       k.n_key, k.n_value, k.rank, k.n_rot, te_type_get(k.type)->name, te_type_get(k.type_b)->name);
    const size_t row_bytes = te_row_bytes(k.type, row), pool_bytes = (size_t)n_blocks * 64 * row_bytes;
    std::vector<int32_t> table((size_t)(n_seq * ld_table));
    for (size_t i = 0; i < table.size(); i++) table[i] = (int32_t)i + 3;
    for (size_t i = table.size(); i > 1; i--) std::swap(table[i - 1], table[random_word() % i]);
    auto place = [&](int s, int p) { return (size_t)table[(size_t)(s * ld_table + p / 64)] * 64 + (size_t)(p % 64); };
    // Positions that hold something are random, all others no numbers.
    std::vector<uint8_t> pool(pool_bytes, 0xff);
    std::vector<float> x((size_t)row);
    for (int s = 0; s < n_seq; s++) {
        int held = -1; // the first position of this step
        for (int t = n_tok - 1; t >= 0; t--)
            if (k.seq[(size_t)t] == s && k.pos[(size_t)t] >= 0) held = k.pos[(size_t)t];
        for (int p = 0; p < held; p++) {
            for (float &v : x) v = random_normal();
            te_quantize_row(k.type, x.data(), &pool[place(s, p) * row_bytes], row);
        }
    }
    uint8_t *d_pool = device_of(pool);
    const size_t ldq = (size_t)(k.n_head * k.n_key), ldkv = (size_t)row, ld_out = (size_t)(k.n_head * k.n_value);
    const std::vector<float> q = normals((size_t)n_tok * ldq), kv = normals((size_t)n_tok * ldkv),
                             norm = normals((size_t)k.rank);
    std::vector<float> cs((size_t)(n_tok * k.n_rot));
    for (int t = 0; t < n_tok; t++)
        for (int i = 0; i < k.n_rot / 2; i++) {
            const double angle = k.pos[(size_t)t] * pow(10000, -2.0 * i / k.n_rot);
            cs[(size_t)(t * k.n_rot + 2 * i)] = (float)cos(angle);
            cs[(size_t)(t * k.n_rot + 2 * i + 1)] = (float)sin(angle);
        }
    matrix k_b = matrix_new(k.type_b, k.n_head * k.rank, n_nope, 1 / sqrtf((float)n_nope)),
           v_b = matrix_new(k.type_b, k.n_head * k.n_value, k.rank, 1 / sqrtf((float)k.rank));
    const std::vector<int32_t> pos(k.pos.begin(), k.pos.end()), seq(k.seq.begin(), k.seq.end());
    result out((size_t)n_tok * ld_out);
    te_latent_args op = {};
    op.q = device_of(q);
    op.kv = device_of(kv);
    op.ldq = ldq;
    op.ldkv = ldkv;
    op.n_tok = n_tok;
    op.n_head = k.n_head;
    op.n_key = k.n_key;
    op.n_value = k.n_value;
    op.rank = k.rank;
    op.n_rot = k.n_rot;
    op.norm = device_of(norm);
    op.norm_eps = 1e-5f;
    op.scale = (float)(1 / sqrt((double)k.n_key));
    op.cs = device_of(cs);
    op.pos = device_of(pos);
    op.table = device_of(table);
    op.row = device_of(seq);
    op.ld_table = ld_table;
    op.k_b = k_b.m;
    op.v_b = v_b.m;
    op.pool = d_pool;
    op.type = k.type;
    op.n_ctx = n_ctx;
    op.query = device_new<float>((size_t)n_tok * (size_t)(k.n_head * row));
    op.gathered = device_new<float>((size_t)n_tok * (size_t)(k.n_head * k.rank));
    op.out = out.data();
    op.ld_out = ld_out;
    op.scratch = device_new<float>(api->latent_floats(dev, &op) + 1);
    OK(api->latent(dev, &op));
    const std::vector<float> got = out.get();
    const std::vector<uint8_t> after = host_of(d_pool, pool_bytes);
    OK(api->latent(dev, &op));
    same_bits(got, out.get());
    const std::vector<float> blank(got.size(), CANARY);
    for (int before : {n_tok / 2, n_tok}) { // without results of the first tokens: the same pool, the others' results
        te_latent_args part = op;
        const size_t at = (size_t)before * ld_out;
        part.n_before = before;
        part.scratch = device_new<float>(api->latent_floats(dev, &part) + 1);
        OK(api->upload(dev, d_pool, pool.data(), pool_bytes));
        OK(api->upload(dev, op.out, blank.data(), blank.size() * 4));
        OK(api->latent(dev, &part));
        const std::vector<float> rest = out.get();
        for (size_t i = 0; i < at; i++) same((int)i, (double)rest[i], (double)CANARY);
        const double largest = 1e-5 * fabs((double)*std::max_element(got.begin(), got.end()));
        for (size_t i = at; i < rest.size(); i++) near((int)i, (double)rest[i], (double)got[i], largest);
        is_true(host_of(d_pool, pool_bytes) == after, "another pool");
        OK(api->free(dev, part.scratch));
    }

    auto rotated = [&](const float *from, int t, double *to) {
        for (int i = 0; i < k.n_rot / 2; i++) {
            const double c = (double)cs[(size_t)(t * k.n_rot + 2 * i)],
                         s = (double)cs[(size_t)(t * k.n_rot + 2 * i + 1)], u = from[2 * i], w = from[2 * i + 1];
            to[2 * i] = u * c - w * s;
            to[2 * i + 1] = u * s + w * c;
        }
    };
    for (int t = 0; t < n_tok; t++) { // what the step stored: within one rounding; the rest of the pool untouched
        if (k.pos[(size_t)t] < 0) continue;
        const float *from = &kv[(size_t)t * ldkv];
        std::vector<double> want((size_t)row);
        double squares = 0, most = 0;
        rotated(from + k.rank, t, want.data());
        for (int i = 0; i < k.rank; i++) squares += (double)from[i] * (double)from[i];
        for (int i = 0; i < k.rank; i++)
            want[(size_t)(k.n_rot + i)] =
                (double)from[i] * (double)norm[(size_t)i] / sqrt(squares / k.rank + (double)op.norm_eps);
        for (double e : want) most = fmax(most, fabs(e));
        const double rounding = k.type == TE_F32    ? 1e-6
                                : k.type == TE_F16  ? 0x1p-10
                                : k.type == TE_BF16 ? 0x1p-7
                                                    : 1.01 / 127;
        const size_t at = place(k.seq[(size_t)t], k.pos[(size_t)t]) * row_bytes;
        te_dequantize_row(k.type, &after[at], x.data(), row);
        for (int i = 0; i < row; i++) near(i, (double)x[(size_t)i], want[(size_t)i], rounding * most + 1e-6);
        memcpy(&pool[at], &after[at], row_bytes);
    }
    is_true(pool == after, "the pool changed elsewhere");
    std::vector<double> query((size_t)row), size((size_t)row), score, sum((size_t)k.rank), weight((size_t)k.rank);
    for (int t = 0; t < n_tok; t++)
        for (int h = 0; h < k.n_head; h++) {
            const int n = k.pos[(size_t)t] + 1;
            const float *own = &q[(size_t)t * ldq + (size_t)(h * k.n_key)],
                        *o = &got[(size_t)t * ld_out + (size_t)(h * k.n_value)];
            if (n < 1) {
                for (int i = 0; i < k.n_value; i++) same(i, (double)o[i], 0);
                continue;
            }
            rotated(own + n_nope, t, query.data());
            for (int i = 0; i < k.n_rot; i++) size[(size_t)i] = fabs(query[(size_t)i]);
            for (int r = 0; r < k.rank; r++) {
                const double *w = k_b.row(h * k.rank + r);
                double a = 0, b = 0;
                for (int i = 0; i < n_nope; i++) {
                    a += w[i] * (double)own[i];
                    b += fabs(w[i] * (double)own[i]);
                }
                query[(size_t)(k.n_rot + r)] = a;
                size[(size_t)(k.n_rot + r)] = b;
            }
            score.assign((size_t)n, 0);
            double most = -1e300, total = 0, doubt = 0;
            for (int p = 0; p < n; p++) {
                te_dequantize_row(k.type, &pool[place(k.seq[(size_t)t], p) * row_bytes], x.data(), row);
                double all = 0;
                for (int i = 0; i < row; i++) {
                    score[(size_t)p] += query[(size_t)i] * (double)x[(size_t)i] * (double)op.scale;
                    all += size[(size_t)i] * fabs((double)x[(size_t)i]) * (double)op.scale;
                }
                doubt = fmax(doubt, 8 * EPS * (sqrt((double)row) + sqrt((double)n_nope)) * all);
                most = fmax(most, score[(size_t)p]);
            }
            std::fill(sum.begin(), sum.end(), 0);
            std::fill(weight.begin(), weight.end(), 0);
            for (int p = 0; p < n; p++) {
                const double e = exp(score[(size_t)p] - most);
                total += e;
                te_dequantize_row(k.type, &pool[place(k.seq[(size_t)t], p) * row_bytes], x.data(), row);
                for (int i = 0; i < k.rank; i++) {
                    sum[(size_t)i] += e * (double)x[(size_t)(k.n_rot + i)];
                    weight[(size_t)i] += e * fabs((double)x[(size_t)(k.n_rot + i)]);
                }
            }
            for (int r = 0; r < k.n_value; r++) {
                const double *w = v_b.row(h * k.n_value + r);
                double a = 0, b = 0;
                for (int i = 0; i < k.rank; i++) {
                    a += w[i] * sum[(size_t)i] / total;
                    b += fabs(w[i]) * weight[(size_t)i] / total;
                }
                near(r, (double)o[r], a, b * (2 * doubt + 8 * EPS * (sqrt((double)n) + sqrt((double)k.rank))) + 1e-30);
            }
        }
    for (const void *p : {(const void *)op.q, (const void *)op.kv, (const void *)op.norm, (const void *)op.cs,
                          (const void *)op.pos, (const void *)op.table, (const void *)op.row, (const void *)d_pool,
                          (const void *)op.query, (const void *)op.gathered, (const void *)op.scratch})
        OK(api->free(dev, (void *)p));
    k_b.free();
    v_b.free();
    out.free();
}

static void check_latent() {
    const std::vector<latent_case> cases = {
        {16, 192, 128, 512, 64, TE_F16, TE_F16, {0}, {0}},
        {16, 192, 128, 512, 64, TE_F16, TE_F16, {1}, {777}},
        {16, 192, 128, 512, 64, TE_Q8_0, TE_BF16, {2}, {1999}},
        {128, 192, 128, 512, 64, TE_F16, TE_F16, {2}, {130}},
        {20, 256, 256, 512, 64, TE_BF16, TE_F16, {0}, {1024}}, // GLM 4.7 Flash; the last block has four heads
        {6, 48, 32, 48, 16, TE_F32, TE_F32, {1}, {65}},
        {3, 40, 20, 36, 12, TE_F16, TE_F16, {1}, {15}},
        {16, 192, 128, 512, 64, TE_F16, TE_F16, {0, 1, 2}, {63, 64, 800}},
        {16, 192, 128, 512, 64, TE_F16, TE_F16, {1, 1, 1, 1}, {62, 63, 64, 65}},
        {9, 96, 64, 256, 32, TE_F32, TE_F16, {0, 1, 1, 2, 2, 2, 2, 0}, {100, 0, 1, 15, 16, 17, 18, -1}},
    };
    for (const latent_case &k : cases) check_latent_case(k);
    latent_case prompt = {10, 96, 64, 256, 32, TE_F16, TE_F16, {}, {}};
    for (int t = 0; t < 37; t++) { // of two sequences, one of which goes on behind what it holds
        prompt.seq.push_back(t < 20 ? 0 : 2);
        prompt.pos.push_back(t < 20 ? t + 120 : t - 20);
    }
    check_latent_case(prompt);
}
