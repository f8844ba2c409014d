// bench_step.hpp - how long a whole step of decoding takes.
#pragma once
#include "benches.hpp"

// A model's shape, and how its feed-forward is computed. Of a sparse one a tenth of the neurons is wanted; which ones, a
// vector of its own decides, so that it stays a tenth. hot: neurons on the device; those behind belong to a CPU whose
// answers are there already.
struct step_shape {
    const char *name;
    int n_kv, ff, hot, type;
    enum { DENSE, EXACT, PREDICTED } mode;
};
static void bench_step(const step_shape &k) {
    char name[160];
    const char *modes[] = {"dense", "exact", "predicted"};
    snprintf(name, sizeof name, "step of %s, %s, %s, %d of %d neurons", k.name, te_type_get(k.type)->name,
             modes[k.mode], k.hot, k.ff);
    if (!wanted(name)) return;
    const int L = 32, D = 4096, V = 32000, R = 1024, n_pos = 256, ld = 8;
    const bool scored = k.mode == step_shape::PREDICTED, cpu = k.hot < k.ff;
    arena a(k.type, D, L * (D + 2 * k.n_kv + D + 3 * k.hot + (scored ? R : 0)) + V),
        r(k.type == TE_Q4_K ? (int)TE_Q8_0 : k.type, R, scored ? L * k.ff : 1024);
    const size_t pool = (size_t)ld * (size_t)k.n_kv * 64 * 2;
    uint8_t *kv = device_new<uint8_t>(pool * 2 * L);
    OK(api->fill(dev, kv, 0x11, pool * 2 * L));
    float *q = device_new<float>(D + 2 * (size_t)k.n_kv), *att = device_new<float>(D), *z = device_of(normals(R)),
          *z2 = device_new<float>(R), *hn = device_new<float>(D), *logits = device_new<float>(V),
          *xs = device_of(normals(D)), *hid = device_new<float>(16384);
    uint32_t *bits = device_new<uint32_t>(1024), *counts = device_of(std::vector<uint32_t>(3, 0)),
             *base = device_of(std::vector<uint32_t>(1, 7));
    int32_t *table = device_of(std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7}),
            *pos = device_of(std::vector<int32_t>{n_pos - 1}), *best = device_new<int32_t>(1);
    void *shared;
    OK(api->host_alloc(dev, (size_t)(2 * D + 65536) * 8, &shared));
    uint64_t *answer = (uint64_t *)shared, *post = answer + D, *marks = post + D;
    for (int i = 0; i < D; i++) answer[i] = (uint64_t)7 << 32;
    uint32_t *cancelled = (uint32_t *)(marks + 60000);
    *cancelled = 0;
    const double sigma = 0.02 * sqrt((double)(scored ? R : D));
    float *threshold = device_of(std::vector<float>(1, (float)(1.2816 * sigma)));
    const te_norm rms = {TE_RMS_NORM, 1e-5f, vector_one, nullptr}, none = {};
    te_attention_args at = {};
    at.q = q;
    at.k = q + D;
    at.v = q + D + k.n_kv;
    at.ldq = at.ldk = at.ldv = (size_t)(D + 2 * k.n_kv);
    at.n_tok = 1;
    at.n_head = D / 128;
    at.n_head_kv = k.n_kv / 128;
    at.n_embd_head = 128;
    at.scale = 0.088f;
    at.rope = TE_ROPE_NORM;
    at.n_rot = 128;
    at.cs = vector;
    at.pos = pos;
    at.table = table;
    at.ld_table = ld;
    at.type_k = at.type_v = TE_F16;
    at.n_ctx = 512;
    at.early = 1;
    at.out = att;
    at.ld_out = D;
    at.scratch = device_new<float>(api->attention_floats(dev, &at));
    at.counter = device_of(std::vector<uint32_t>(api->attention_counters(dev, &at), 0));
    double bytes = 0;
    auto linear = [&](const float *in, const te_norm &norm, float *out, int rows, bool add, bool relu, bool side) {
        te_linear_args op = {};
        op.x = in;
        op.ldx = D;
        op.n_tok = 1;
        op.norm = norm;
        op.n_products = 1;
        op.product[0].w = a.take(rows);
        op.product[0].y = out;
        op.product[0].add = add ? out : nullptr;
        op.product[0].relu = relu;
        if (side) {
            op.side.norm = rms;
            op.side.keep = hn;
            op.side.publish = cpu ? post : nullptr;
            op.side.ticket = {base, 0};
        }
        OK(api->linear(dev, &op));
        bytes += (double)rows * (double)a.all.stride;
    };
    const int turns = 3;
    const double us = time_us(turns, [&](int turn) {
        if (turn == 0) bytes = 0;
        for (int l = 0; l < L; l++) {
            linear(xs, rms, q, D + 2 * k.n_kv, false, false, false);
            at.k_pool = kv + 2 * pool * (size_t)l;
            at.v_pool = (uint8_t *)at.k_pool + pool;
            OK(api->attention(dev, &at));
            linear(att, none, xs, D, true, false, false);
            if (scored) linear(xs, none, z2, R, false, true, true);
            te_mat fc2 = scored ? r.take(k.ff) : te_mat{};
            if (scored && cpu) {
                te_marks_args m = {};
                m.scores.fc2 = fc2;
                m.scores.fc2.w = (const uint8_t *)fc2.w + fc2.stride * (size_t)k.hot;
                m.scores.fc2.n_rows = m.n_rows = k.ff - k.hot;
                m.scores.z = z;
                m.scores.ldz = R;
                m.scores.threshold = threshold;
                m.n_tok = 1;
                m.publish = marks;
                m.ticket = {base, 0};
                OK(api->marks(dev, &m));
                bytes += (double)m.n_rows * (double)fc2.stride;
            }
            te_ffn_args f = {};
            f.x = scored ? hn : xs;
            f.ldx = D;
            f.n_tok = 1;
            if (!scored) f.norm = rms;
            f.gate = a.take(k.hot);
            f.up = a.take(k.hot);
            f.down = a.take(k.hot);
            f.act = k.mode == step_shape::DENSE ? TE_SILU : TE_RELU;
            f.threshold = scored ? -1e30f : (float)(1.2816 * sigma); // what is predicted fires
            f.skip = k.mode != step_shape::DENSE;
            if (scored) {
                f.scores.fc2 = fc2;
                f.scores.fc2.n_rows = k.hot;
                f.scores.z = z;
                f.scores.ldz = R;
                f.scores.threshold = threshold;
                bytes += (double)k.hot * (double)fc2.stride;
            }
            f.h = hid;
            f.ldh = 16384;
            f.bits = bits;
            f.partial = partial;
            f.counts = turn == 0 && l == 0 ? counts : nullptr;
            bytes += (k.mode == step_shape::EXACT ? 1.2 : scored ? 0.3 : 3) * k.hot * (double)a.all.stride;
            te_merge_args m = {};
            OK(api->ffn(dev, &f));
            m.n_parts = api->ffn_parts(dev, &f);
            m.partial = partial;
            m.n_tok = 1;
            m.cols = D;
            m.add = m.y = xs;
            m.ld_add = m.ldy = D;
            if (cpu) {
                m.words = answer;
                m.ticket = {base, 0};
                m.cancelled = cancelled;
                m.limit_ns = 1000000000;
            }
            OK(api->merge(dev, &m));
        }
        linear(xs, rms, logits, V, false, false, false);
        OK(api->argmax(dev, logits, V, V, 1, best));
    });
    bytes /= turns;
    if (*cancelled) printf("the step timed out\n");
    const std::vector<uint32_t> n = host_of(counts, 3);
    printf("%-64s %8.3f ms  %6.1f tokens/s  %5.2f  (first layer: %u listed, %u computed, %u fired)\n", name, us / 1e3,
           1e6 / us, bytes / us / 1e3 / ceiling, n[0] / 6, n[1] / 6, n[2] / 6);
    fprintf(stderr, "{\"name\": \"%s\", \"us\": %.2f, \"bytes\": %.0f, \"share\": %.4f}\n", name, us, bytes,
            bytes / us / 1e3 / ceiling);
    a.free();
    r.free();
    OK(api->host_free(dev, shared));
    OK(api->free(dev, kv));
}
