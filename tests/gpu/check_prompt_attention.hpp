// check_prompt_attention.hpp - attention of prompts against doubles, and the inputs that prefill_check.cpp shares with it.
#pragma once
#include "halves.hpp"

static void same_bits(const void *a, const void *b, size_t n_bytes, const char *why) {
    is_true(!memcmp(a, b, n_bytes), why);
}
struct floats { // [n_tok][ld] on the device, no numbers behind the columns
    std::vector<float> v;
    size_t ld;
    float *p;
    floats(int n_tok, int cols, float size = 1) : ld(up_to((size_t)cols, 4) + 4) {
        v = normals((size_t)n_tok * ld, size);
        for (size_t i = 0; i < v.size(); i++)
            if (i % ld >= (size_t)cols) v[i] = NAN;
        p = device_of(v);
    }
    double at(int t, int c) const { return (double)v[(size_t)t * ld + (size_t)c]; }
    void free() { OK(api->free(dev, p)); }
};

// ---- attention ----

struct heads_case {
    int n_head, n_head_kv, d, type_k, type_v;
    te_rope_kind rope;
    int n_rot;
    bool norm;
    std::vector<int> first, n; // of each sequence: the position of its first token here, and how many tokens
    int window = 0;
    bool sinks = false;
    float soft_cap = 0;
    bool v_norm = false;
    bool chunked = false, warm = false; // warm: queries grow with their positions
};
static std::vector<double> settled(const float *x, int d, const float *norm, double eps, const heads_case &k,
                                   bool rotate, const float *cs) {
    std::vector<double> v(x, x + d);
    if (norm) {
        double sum = 0;
        for (double e : v) sum += e * e;
        for (int i = 0; i < d; i++) v[(size_t)i] *= (double)norm[i] / sqrt(sum / d + eps);
    }
    for (int i = 0; rotate && k.rope != TE_NO_ROPE && i < k.n_rot / 2; i++) {
        const int a = k.rope == TE_ROPE_NORM ? 2 * i : i, b = k.rope == TE_ROPE_NORM ? a + 1 : i + k.n_rot / 2;
        const double u = v[(size_t)a], w = v[(size_t)b], c = (double)cs[2 * i], s = (double)cs[2 * i + 1];
        v[(size_t)a] = u * c - w * s;
        v[(size_t)b] = u * s + w * c;
    }
    return v;
}
static void check_attention_case(const heads_case &k) {
    const int n_seq = (int)k.n.size(), d = k.d, n_ctx = 1024, ld_table = n_ctx / 64;
    int n_tok = 1; // one that is left out
    for (int n : k.n) n_tok += n;
    AT("attention %d on %d heads of %d, %s %s, rope %d, norm %d, %d tokens, window %d, sinks %d, cap %g", k.n_head,
       k.n_head_kv, d, te_type_get(k.type_k)->name, te_type_get(k.type_v)->name, (int)k.rope, k.norm, n_tok, k.window,
       k.sinks, (double)k.soft_cap);
    const size_t row_k = te_row_bytes(k.type_k, d), row_v = te_row_bytes(k.type_v, d);
    const size_t n_rows = (size_t)(n_seq * ld_table * k.n_head_kv * 64);
    auto pool_new = [&](int type, size_t row) {
        std::vector<uint8_t> p(n_rows * row);
        const std::vector<float> x = normals((size_t)d * 64);
        for (size_t r = 0; r < n_rows; r++) te_quantize_row(type, &x[(size_t)d * (r * 7 % 64)], &p[r * row], d);
        return p;
    };
    std::vector<uint8_t> k_pool = pool_new(k.type_k, row_k), v_pool = pool_new(k.type_v, row_v);
    std::vector<int32_t> table((size_t)(n_seq * ld_table)), pos, seq;
    for (size_t i = 0; i < table.size(); i++) table[i] = (int32_t)(table.size() - 1 - i);
    auto row_of = [&](int s, int p, int head) {
        return ((size_t)table[(size_t)(s * ld_table + p / 64)] * (size_t)k.n_head_kv + (size_t)head) * 64 +
               (size_t)(p % 64);
    };
    // Positions that nothing was written to hold no numbers.
    for (int s = 0; s < n_seq; s++) {
        if (s == n_seq - 1) {
            pos.push_back(-1);
            seq.push_back(s);
        }
        for (int i = 0; i < k.n[(size_t)s]; i++) {
            pos.push_back(k.first[(size_t)s] + i);
            seq.push_back(s);
        }
        for (int p = k.first[(size_t)s]; p < n_ctx; p++)
            for (int h = 0; h < k.n_head_kv; h++) {
                memset(&k_pool[row_of(s, p, h) * row_k], 0xff, row_k);
                memset(&v_pool[row_of(s, p, h) * row_v], 0xff, row_v);
            }
    }
    floats q(n_tok, k.n_head * d), kk(n_tok, k.n_head_kv * d), vv(n_tok, k.n_head_kv * d);
    const std::vector<float> q_norm = normals((size_t)d), k_norm = normals((size_t)d), v_norm = normals((size_t)d);
    std::vector<float> cs((size_t)(n_tok * k.n_rot + 2));
    for (size_t i = 0; i + 1 < cs.size(); i += 2) {
        const double angle = 6.28 * random_unit();
        cs[i] = (float)cos(angle);
        cs[i + 1] = (float)sin(angle);
    }
    te_attention_args op = {};
    op.q = q.p;
    op.k = kk.p;
    op.v = vv.p;
    op.ldq = q.ld;
    op.ldk = kk.ld;
    op.ldv = vv.ld;
    op.n_tok = n_tok;
    op.n_head = k.n_head;
    op.n_head_kv = k.n_head_kv;
    op.n_embd_head = d;
    op.q_norm = k.norm ? device_of(q_norm) : nullptr;
    op.k_norm = k.norm ? device_of(k_norm) : nullptr;
    op.v_norm = k.v_norm ? device_of(v_norm) : nullptr;
    op.norm_eps = random_word() % 2 ? 1e-5f : 0.125f;
    op.soft_cap = k.soft_cap;
    op.scale = (float)(1 / sqrt((double)d));
    op.rope = k.rope;
    op.n_rot = k.n_rot;
    op.cs = device_of(cs);
    op.pos = device_of(pos);
    op.table = device_of(table);
    op.row = device_of(seq);
    op.ld_table = ld_table;
    op.k_pool = device_of(k_pool);
    op.v_pool = device_of(v_pool);
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
    op.ld_out = (size_t)(k.n_head * d + 4);
    op.out = device_of(std::vector<float>((size_t)n_tok * op.ld_out, CANARY));
    op.scratch = device_new<float>(api->prompt_attention_floats(dev, &op));
    op.grouped = n_tok;
    // Of few tokens the result once more, in F16.
    const bool halved = n_tok > TE_CUDA_MAX_TOK && n_tok <= 128 && k.n_head * d % 256 == 0;
    const bool few = n_tok <= TE_CUDA_WIDE_TOK;
    is_true(!halved || api->attention_halves(dev, &op), "few tokens, but no result in F16");
    halves half = {};
    if (halved) {
        half = halves_new(n_tok, k.n_head * d, few && !k.norm ? TE_F16 : TE_Q4_0);
        op.half = half.h.v;
        op.half_scale = half.h.scale;
        op.half_tiles = half.h.tiles;
        op.half_words = half.h.words;
        op.half_matrices = half.h.matrices;
    }
    OK(api->prompt_attention(dev, &op));
    const std::vector<float> out = host_of(op.out, (size_t)n_tok * op.ld_out);
    if (halved) {
        half.read();
        for (int t = 0; t < n_tok; t++)
            for (int c = 0; c < k.n_head * d; c++)
                near(t * 10000 + c, half.at(t, c), (double)out[(size_t)t * op.ld_out + (size_t)c],
                     0x1p-11 * fabs(half.at(t, c)) + 0x1p-25);
        half.free();
        op.half = nullptr;
    }
    OK(api->prompt_attention(dev, &op));
    const std::vector<float> again = host_of(op.out, (size_t)n_tok * op.ld_out);
    same_bits(out.data(), again.data(), out.size() * 4, "a repeat gives other bits");
    const std::vector<uint8_t> k_now = host_of((const uint8_t *)op.k_pool, k_pool.size()),
                               v_now = host_of((const uint8_t *)op.v_pool, v_pool.size());
    // Without results of the first tokens: the same pool, the others' results.
    const std::vector<float> blank(out.size(), CANARY);
    for (int before : {n_tok / 3, n_tok}) {
        te_attention_args part = op;
        const size_t at = (size_t)before * op.ld_out;
        part.n_before = before;
        OK(api->upload(dev, part.out, blank.data(), blank.size() * 4));
        OK(api->upload(dev, part.k_pool, k_pool.data(), k_pool.size()));
        OK(api->upload(dev, part.v_pool, v_pool.data(), v_pool.size()));
        OK(api->prompt_attention(dev, &part));
        const std::vector<float> rest = host_of(op.out, out.size());
        for (size_t i = 0; i < at; i++) near((int)i, (double)rest[i], (double)CANARY, 0);
        same_bits(rest.data() + at, out.data() + at, (out.size() - at) * 4, "a token's result depends on others");
        same_bits(host_of((const uint8_t *)op.k_pool, k_pool.size()).data(), k_now.data(), k_now.size(), "other K");
        same_bits(host_of((const uint8_t *)op.v_pool, v_pool.size()).data(), v_now.data(), v_now.size(), "other V");
    }
    // What was stored: within a step of the format of the settled head.
    auto stored = [&](const std::vector<uint8_t> &pool, int type, size_t row, size_t at) {
        std::vector<float> x((size_t)d);
        te_dequantize_row(type, &pool[at * row], x.data(), d);
        return x;
    };
    for (int t = 0; t < n_tok; t++) {
        if (pos[(size_t)t] < 0) continue;
        for (int h = 0; h < k.n_head_kv; h++)
            for (int is_k = 0; is_k < 2; is_k++) {
                const floats &from = is_k ? kk : vv;
                const float *norm = is_k ? k.norm ? k_norm.data() : nullptr : k.v_norm ? v_norm.data() : nullptr;
                const std::vector<double> x = settled(&from.v[(size_t)t * from.ld + (size_t)(h * d)], d, norm,
                                                      (double)op.norm_eps, k, is_k, &cs[(size_t)(t * k.n_rot)]);
                const int type = is_k ? k.type_k : k.type_v;
                const std::vector<float> y =
                    stored(is_k ? k_now : v_now, type, is_k ? row_k : row_v, row_of(seq[(size_t)t], pos[(size_t)t], h));
                for (int i = 0; i < d; i++) {
                    double most = 0;
                    for (int j = i / 32 * 32; j < std::min(d, i / 32 * 32 + 32); j++)
                        most = std::max(most, fabs(x[(size_t)j]));
                    const double v = x[(size_t)i], step = type == TE_Q8_0   ? 0.51 * most / 127 + 0x1p-10 * fabs(v)
                                                          : type == TE_BF16 ? 0x1p-8 * fabs(v)
                                                          : type == TE_F16  ? 0x1p-11 * fabs(v)
                                                                            : 0;
                    near(i, (double)y[(size_t)i], v, step + 4e-6);
                }
            }
    }
    // What came out, from what is stored. Errors: q, k (F32 and others become F16) and the weights of positions.
    const int group = k.n_head / k.n_head_kv;
    for (int t = 0; t < n_tok; t += 1 + (int)(random_word() % 7)) {
        for (int h = 0; h < k.n_head; h++) {
            const float *got = &out[(size_t)t * op.ld_out + (size_t)(h * d)];
            if (pos[(size_t)t] < 0) {
                for (int i = 0; i < d; i++) near(i, (double)got[i], 0, 0);
                continue;
            }
            std::vector<double> x =
                settled(&q.v[(size_t)t * q.ld + (size_t)(h * d)], d, k.norm ? q_norm.data() : nullptr,
                        (double)op.norm_eps, k, true, &cs[(size_t)(t * k.n_rot)]);
            for (double &v : x) v *= k.warm ? warmth_of(pos[(size_t)t]) : 1;
            std::vector<double> sum((size_t)d, 0.0), score;
            double top = -1e300, total = 0, most = 0, off = 0;
            const int lowest = lowest_of(pos[(size_t)t], k.window, k.chunked);
            for (int p = lowest; p <= pos[(size_t)t]; p++) {
                const std::vector<float> y = stored(k_now, k.type_k, row_k, row_of(seq[(size_t)t], p, h / group));
                double s = 0, squares = 0;
                for (int i = 0; i < d; i++) {
                    s += x[(size_t)i] * (double)y[(size_t)i];
                    squares += x[(size_t)i] * x[(size_t)i] * (double)y[(size_t)i] * (double)y[(size_t)i];
                }
                off = std::max(off, 6 * 0x1p-11 * sqrt(2 * squares / 3) * (double)op.scale);
                off = std::max(off, 8 * EPS * (double)k.soft_cap);
                s *= (double)op.scale;
                score.push_back(k.soft_cap > 0 ? (double)k.soft_cap * tanh(s / (double)k.soft_cap) : s);
                top = std::max(top, score.back());
            }
            if (k.sinks) total = exp((double)sinks[(size_t)h] - top);
            for (int p = lowest; p <= pos[(size_t)t]; p++) {
                const std::vector<float> y = stored(v_now, k.type_v, row_v, row_of(seq[(size_t)t], p, h / group));
                const double e = exp(score[(size_t)(p - lowest)] - top);
                total += e;
                for (int i = 0; i < d; i++) {
                    sum[(size_t)i] += e * (double)y[(size_t)i];
                    most = std::max(most, fabs((double)y[(size_t)i]));
                }
            }
            for (int i = 0; i < d; i++)
                near(t * 10000 + i, (double)got[i], sum[(size_t)i] / total, (off + 0x1p-10) * most);
        }
        for (size_t c = (size_t)(k.n_head * d); c < op.ld_out; c++)
            near((long)c, (double)out[(size_t)t * op.ld_out + c], (double)CANARY, 0);
    }
    for (const void *p : {(const void *)op.k_pool, (const void *)op.v_pool, (const void *)op.out,
                          (const void *)op.scratch, (const void *)op.sinks})
        OK(api->free(dev, (void *)p));
}
static void check_attention() {
    const te_rope_kind none = TE_NO_ROPE, norm = TE_ROPE_NORM, neox = TE_ROPE_NEOX;
    check_attention_case({32, 8, 128, TE_F16, TE_F16, norm, 128, false, {0}, {300}});
    check_attention_case({4, 4, 128, TE_F16, TE_F16, neox, 64, true, {100}, {65}});
    check_attention_case({4, 2, 64, TE_F16, TE_F16, none, 0, false, {3, 600, 0}, {40, 9, 130}});
    check_attention_case({11, 1, 64, TE_F16, TE_F16, neox, 64, false, {63}, {140}});
    check_attention_case({6, 2, 80, TE_F16, TE_F16, norm, 80, false, {0, 64}, {64, 66}});
    check_attention_case({2, 1, 256, TE_F16, TE_F16, neox, 256, true, {0, 500}, {100, 63}});
    check_attention_case({4, 2, 36, TE_F16, TE_F16, norm, 36, false, {10}, {70}});
    // Few tokens, of which several blocks share positions.
    check_attention_case({32, 8, 128, TE_F16, TE_F16, norm, 128, false, {0}, {9}});
    check_attention_case({32, 32, 128, TE_F16, TE_F16, norm, 128, true, {950}, {55}});
    check_attention_case({4, 4, 128, TE_F16, TE_F16, neox, 64, true, {700}, {63}});
    check_attention_case({4, 4, 64, TE_F16, TE_F16, none, 0, false, {3, 600, 0, 900}, {10, 9, 13, 20}});
    check_attention_case({11, 1, 64, TE_F16, TE_F16, neox, 64, false, {963}, {30}});
    check_attention_case({6, 2, 80, TE_F16, TE_F16, norm, 80, false, {0, 864}, {24, 16}});
    check_attention_case({2, 1, 256, TE_F16, TE_F16, neox, 256, true, {0, 500}, {10, 43}});
    check_attention_case({4, 2, 36, TE_F16, TE_F16, norm, 36, false, {610}, {50}});
    check_attention_case({8, 2, 128, TE_Q8_0, TE_F32, norm, 128, false, {5, 800}, {33, 20}, 0, true});
    check_attention_case({8, 4, 256, TE_F16, TE_F16, neox, 256, false, {0, 500}, {10, 40}, 0, false, 0.5f});
    // So many heads that a part has more tiles than are in flight.
    check_attention_case({132, 132, 64, TE_F16, TE_F16, none, 0, false, {960}, {30}});
    check_attention_case({132, 132, 128, TE_F16, TE_F16, norm, 128, false, {900, 5, 850}, {13, 6, 20}});
    // Many short sequences, of which each block takes some; and long ones among them.
    for (int n : {13, 16, 25}) {
        std::vector<int> first, of;
        for (int i = 0; i < n; i++) {
            first.push_back(i % 7 == 3 ? 200 + 31 * i : i % 3);
            of.push_back(4 + i % 3);
        }
        check_attention_case({8, 8, 128, TE_F16, TE_F16, norm, 128, false, first, of});
        check_attention_case({8, 2, 128, TE_F16, TE_F16, norm, 128, true, first, of, 100});
        check_attention_case({8, 2, 64, TE_Q8_0, TE_F16, neox, 64, false, first, of});
        check_attention_case({4, 2, 256, TE_F16, TE_F16, neox, 256, true, first, of, 0, true});
    }
    for (int window : {1, 33, 64, 100, 500}) {
        check_attention_case({32, 8, 128, TE_F16, TE_F16, norm, 128, false, {100, 900}, {40, 16}, window});
        check_attention_case({4, 2, 64, TE_F16, TE_F16, none, 0, false, {3, 600}, {20, 30}, window, true});
        check_attention_case({8,
                              2,
                              64,
                              TE_F16,
                              TE_F16,
                              neox,
                              64,
                              false,
                              {70, 900},
                              {40, 16},
                              window < 24 ? 24 : window,
                              false,
                              0,
                              false,
                              true,
                              true});
    }
    for (int window : {1, 33, 64, 100, 299, 300, 500}) {
        check_attention_case({32, 8, 128, TE_F16, TE_F16, norm, 128, false, {0}, {300}, window});
        check_attention_case({8, 4, 256, TE_F16, TE_F16, neox, 256, true, {0, 500}, {100, 163}, window});
        check_attention_case({4, 2, 64, TE_Q8_0, TE_Q8_0, none, 0, false, {3, 600, 0}, {40, 9, 130}, window});
    }
    for (int chunk : {24, 33, 64, 128, 500}) {
        check_attention_case({40, 8, 128, TE_F16, TE_F16, norm, 128, false, {0}, {300}, chunk, false, 0, false, true});
        check_attention_case({4,
                              2,
                              64,
                              TE_Q8_0,
                              TE_Q8_0,
                              none,
                              0,
                              false,
                              {3, 600, 0},
                              {40, 9, 130},
                              chunk,
                              false,
                              0,
                              false,
                              true,
                              true});
    }
    check_attention_case(
        {8, 4, 256, TE_F16, TE_F16, none, 0, true, {0, 500}, {100, 163}, 0, false, 0, false, false, true});
    for (int window : {0, 128}) {
        check_attention_case({64, 8, 64, TE_F16, TE_F16, neox, 64, false, {0}, {300}, window, true});
        check_attention_case({6, 2, 96, TE_Q8_0, TE_F16, none, 0, true, {3, 600, 0}, {40, 9, 130}, window, true});
        check_attention_case({11, 1, 256, TE_F16, TE_F16, neox, 256, false, {63}, {140}, window, true});
    }
    for (float cap : {0.5f, 50.0f}) { // scores are about 1: some are where the cap bends them
        check_attention_case({32, 16, 128, TE_F16, TE_F16, neox, 128, false, {0}, {300}, 100, false, cap});
        check_attention_case({8, 4, 256, TE_F16, TE_F16, neox, 256, false, {0, 500}, {100, 163}, 0, false, cap});
        check_attention_case({4, 2, 64, TE_Q8_0, TE_F16, norm, 64, true, {3, 600}, {40, 130}, 33, false, cap});
    }
    check_attention_case({8, 4, 256, TE_F16, TE_F16, neox, 256, true, {0, 500}, {100, 163}, 64, false, 0, true});
    check_attention_case({4, 2, 64, TE_Q8_0, TE_Q8_0, norm, 64, true, {3, 600}, {40, 130}, 0, false, 0, true});
    for (int type : {TE_F32, TE_BF16, TE_Q8_0}) {
        check_attention_case({8, 2, 128, type, type, norm, 128, false, {5, 0}, {100, 30}});
        check_attention_case({2, 2, 96, type, TE_F16, none, 0, false, {0}, {33}});
    }
}
