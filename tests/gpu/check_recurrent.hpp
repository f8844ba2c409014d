// check_recurrent.hpp - blocks with a state, of few tokens and of prompts, with what they remember; and gates.
#pragma once
#include "checks.hpp"

struct recurrent_case {
    int n_head, n_group, n_k, n_v, width, n_channels; // n_head 0: a convolution alone, of so many channels
    bool delta, tiled, paired, apart;                 // paired: betas and alphas are in one row
    std::vector<int> seq, pos, keep;                  // of each token; keep: a place, or -1
};

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

// In doubles, the same way: y and out of all tokens, and the places.
struct recurrent_reference {
    std::vector<double> y, out, state;
};

static void check_recurrent_case(const recurrent_case &k, bool early) {
    AT("recurrent %d tokens, %d heads of %d groups, %d by %d, width %d%s%s%s", (int)k.pos.size(), k.n_head, k.n_group,
       k.n_k, k.n_v, k.width, k.delta ? ", delta" : "", k.apart ? ", apart" : "", early ? ", early" : "");
    const int n_tok = (int)k.pos.size(), H = k.n_head, G = k.n_group, K = k.n_k, V = k.n_v, n_place = 6,
              C = H ? 2 * G * K + H * V : k.n_channels, each = H ? H / G : 1;
    const size_t conv = (size_t)(k.width - 1) * (size_t)C, all = conv + (size_t)H * (size_t)(K * V),
                 ld_state = (all + 3) / 4 * 4 + 8, ldx = (size_t)C + 4, ldy = (size_t)C + 8,
                 ld_out = (size_t)(H * V) + 4, ld_gate = (size_t)(2 * H + 3) / 4 * 4;
    std::vector<int32_t> order, run = {0};
    for (int s = 0; s < 3; s++) {
        for (int t = 0; t < n_tok; t++)
            if (k.seq[(size_t)t] == s) order.push_back(t);
        if ((int)order.size() > run.back()) run.push_back((int32_t)order.size());
    }
    const int n_runs = (int)run.size() - 1, asked = k.apart ? n_tok : std::min(n_tok, n_runs + 1); // one is empty
    while ((int)run.size() < asked + 1) run.push_back(n_tok);
    const std::vector<float> x = normals(ldx * (size_t)n_tok), before = normals(ldx * (size_t)n_tok),
                             after = normals(ldx * (size_t)n_tok), w = normals((size_t)(k.width * C), 0.5f),
                             b = normals((size_t)C, 0.2f), gates = normals(ld_gate * (size_t)n_tok),
                             dt_b = normals((size_t)(H + 1)), skip = normals((size_t)(H + 1)),
                             remembered = normals(ld_state * (size_t)n_place);
    std::vector<float> a((size_t)(H + 1));
    for (float &v : a) v = -0.1f - (float)random_unit();
    std::vector<int32_t> place(k.seq.begin(), k.seq.end()), pos(k.pos.begin(), k.pos.end()),
        keep(k.keep.begin(), k.keep.end());
    if (keep.empty()) keep.assign((size_t)n_tok, -1);
    result y(ldy * (size_t)n_tok), out(ld_out * (size_t)n_tok);
    float *state = device_of(remembered);
    te_recurrent_args op = {};
    op.x = device_of(x);
    op.before = H ? nullptr : device_of(before);
    op.after = H ? nullptr : device_of(after);
    op.ldx = ldx;
    op.w = device_of(w);
    op.b = H ? device_of(b) : nullptr;
    op.n_channels = C;
    op.width = k.width;
    op.silu = H > 0;
    op.y = y.data();
    op.ldy = ldy;
    op.n_head = H;
    op.n_group = G;
    op.n_k = K;
    op.n_v = V;
    op.tiled = k.tiled;
    op.q_at = 0;
    op.k_at = G * K;
    op.v_at = 2 * G * K;
    op.delta = k.delta;
    float *d_gates = device_of(gates);
    op.beta = k.delta ? d_gates : nullptr;
    op.alpha = d_gates + (k.paired ? each : H);
    op.ld_gate = ld_gate;
    op.gate_each = k.paired ? each : std::max(H, 1);
    op.gate_step = k.paired ? 2 * each : 0;
    op.a = device_of(a);
    op.dt_b = device_of(dt_b);
    op.skip = k.delta ? nullptr : device_of(skip);
    op.out = out.data();
    op.ld_out = ld_out;
    op.n_tok = n_tok;
    op.n_runs = asked;
    op.apart = k.apart;
    op.order = device_of(order);
    op.run = device_of(run);
    op.pos = device_of(pos);
    op.place = device_of(place);
    op.keep = device_of(keep);
    op.state = state;
    op.ld_state = ld_state;
    op.early = early;
    finish();
    OK(api->recurrent(dev, &op));
    const std::vector<float> got_y = y.get(), got = out.get(), got_state = host_of(state, remembered.size());
    OK(api->upload(dev, state, remembered.data(), remembered.size() * 4));
    finish();
    OK(api->recurrent(dev, &op));
    same_bits(got_y, y.get());
    same_bits(got, out.get());
    same_bits(got_state, host_of(state, remembered.size()));

    std::vector<double> want(remembered.begin(), remembered.end());
    std::vector<double> q((size_t)K), kk((size_t)K), cy((size_t)C);
    for (int32_t t : order) {
        double *own = &want[ld_state * (size_t)place[(size_t)t]], *last = own;
        if (pos[(size_t)t] == 0) std::fill(own, own + all, 0.0);
        for (int c = 0; c < C; c++) {
            const size_t at = ldx * (size_t)t + (size_t)c;
            double in = (double)x[at] * (H ? 1 : (double)before[at]), sum = H ? (double)b[(size_t)c] : 0;
            for (int j = 0; j + 1 < k.width; j++) sum += (double)w[(size_t)(j * C + c)] * last[j * C + c];
            sum += (double)w[(size_t)((k.width - 1) * C + c)] * in;
            for (int j = 0; j + 2 < k.width; j++) last[j * C + c] = last[(j + 1) * C + c];
            last[(k.width - 2) * C + c] = in;
            cy[(size_t)c] = H ? sum * sigmoid(sum) : sum * (double)after[at];
            near(c, (double)got_y[ldy * (size_t)t + (size_t)c], cy[(size_t)c], 1e-5 * (1 + fabs(cy[(size_t)c])));
        }
        for (int h = 0; h < H; h++) {
            const int g = k.tiled ? h % G : h / each;
            const size_t at = ld_gate * (size_t)t + (size_t)(k.paired ? h / each * 2 * each + h % each : h);
            const double alpha = (double)gates[at + (size_t)(k.paired ? each : H)],
                         dt = log1p(exp(alpha + (double)dt_b[(size_t)h])), decay = exp((double)a[(size_t)h] * dt),
                         rate = k.delta ? sigmoid((double)gates[at]) : dt;
            double qq = 0, ks = 0;
            for (int i = 0; i < K; i++) {
                q[(size_t)i] = cy[(size_t)(g * K + i)];
                kk[(size_t)i] = cy[(size_t)(G * K + g * K + i)];
                qq += q[(size_t)i] * q[(size_t)i];
                ks += kk[(size_t)i] * kk[(size_t)i];
            }
            for (int i = 0; i < K && k.delta; i++) {
                q[(size_t)i] /= sqrt((qq + 1e-6) * K);
                kk[(size_t)i] /= sqrt(ks + 1e-6);
            }
            double *s = own + conv + (size_t)h * (size_t)(K * V);
            for (int c = 0; c < V; c++) {
                const double v = cy[(size_t)(2 * G * K + h * V + c)];
                double known = 0, o = k.delta ? 0 : (double)skip[(size_t)h] * v, size = fabs(o);
                for (int i = 0; i < K; i++) known += kk[(size_t)i] * s[i * V + c];
                const double u = rate * (k.delta ? v - decay * known : v);
                for (int i = 0; i < K; i++) {
                    s[i * V + c] = decay * s[i * V + c] + kk[(size_t)i] * u;
                    o += q[(size_t)i] * s[i * V + c];
                    size += fabs(q[(size_t)i] * s[i * V + c]);
                }
                near(h * V + c, (double)got[ld_out * (size_t)t + (size_t)(h * V + c)], o, 2e-5 * (size + 0.1));
            }
        }
        if (keep[(size_t)t] >= 0) std::copy(own, own + all, &want[ld_state * (size_t)keep[(size_t)t]]);
    }
    for (size_t i = 0; i < want.size(); i++) near((long)i, (double)got_state[i], want[i], 2e-5 * (1 + fabs(want[i])));
    for (const void *p : {(const void *)op.x, (const void *)op.before, (const void *)op.after, (const void *)op.w,
                          (const void *)op.b, (const void *)d_gates, (const void *)op.a, (const void *)op.dt_b,
                          (const void *)op.skip, (const void *)op.order, (const void *)op.run, (const void *)op.pos,
                          (const void *)op.place, (const void *)op.keep, (const void *)state})
        OK(api->free(dev, (void *)p));
    y.free();
    out.free();
}

static void check_gate_case(int n_tok, int n_group, int each, bool silu, bool norm, bool norm_last, bool in_place) {
    AT("gate %d tokens, %d groups of %d%s%s%s", n_tok, n_group, each, silu ? ", silu" : "", norm ? ", norm" : "",
       norm_last ? " last" : "");
    const size_t n = (size_t)(n_group * each), ld = n + 4;
    const std::vector<float> x = normals(ld * (size_t)n_tok), gate = normals(ld * (size_t)n_tok), w = normals(n);
    result y(ld * (size_t)n_tok);
    te_gate_args op = {};
    if (in_place) OK(api->upload(dev, y.data(), x.data(), x.size() * 4));
    float *own = device_of(x);
    op.x = in_place ? y.data() : own;
    op.ldx = op.ld_gate = op.ldy = ld;
    op.gate = device_of(gate);
    op.n_tok = n_tok;
    op.n_group = n_group;
    op.each = each;
    op.silu = silu;
    op.norm = norm ? device_of(w) : nullptr;
    op.norm_step = norm_last ? each : 0;
    op.norm_last = norm_last;
    op.norm_eps = 1e-3f;
    op.y = y.data();
    OK(api->gate(dev, &op));
    const std::vector<float> got = y.get();
    for (int t = 0; t < n_tok; t++)
        for (int g = 0; g < n_group; g++) {
            std::vector<double> v((size_t)each);
            double sum = 0;
            auto at = [&](int c) { return ld * (size_t)t + (size_t)(g * each + c); };
            auto act = [&](int c) {
                const double z = (double)gate[at(c)];
                return sigmoid(z) * (silu ? z : 1);
            };
            for (int c = 0; c < each; c++) {
                v[(size_t)c] = (double)x[at(c)] * (norm && !norm_last ? 1 : act(c));
                sum += v[(size_t)c] * v[(size_t)c];
            }
            for (int c = 0; c < each && norm; c++)
                v[(size_t)c] *= (double)w[(size_t)(g * op.norm_step + c)] / sqrt(sum / each + (double)op.norm_eps) *
                                (norm_last ? 1 : act(c));
            for (int c = 0; c < each; c++) near(c, (double)got[at(c)], v[(size_t)c], 1e-5 * (0.1 + fabs(v[(size_t)c])));
        }
    OK(api->free(dev, own));
    OK(api->free(dev, (void *)op.gate));
    OK(api->free(dev, (void *)op.norm));
    y.free();
}

// Gates that are cut by what all of their token's are.
static void check_cut_case(int n_tok, int n, float cut) {
    AT("cut %g: %d tokens of %d gates", (double)cut, n_tok, n);
    const size_t ld = (size_t)n + 4;
    std::vector<float> g = normals((size_t)n_tok * ld), up = normals((size_t)n_tok * ld);
    for (size_t i = 0; i < g.size(); i++) g[i] = 3 * g[i] + 0.5f;
    te_cut_args op = {};
    op.gate = device_of(g);
    op.up = device_of(up);
    op.ld = ld;
    op.n_tok = n_tok;
    op.n = n;
    op.cut = cut;
    op.act = TE_GELU_TANH;
    op.fired = device_of(std::vector<uint32_t>((size_t)n, 0));
    op.counts = device_of(std::vector<uint32_t>(3, 0));
    OK(api->cut(dev, &op));
    const std::vector<float> got = host_of(op.gate, g.size());
    const std::vector<uint32_t> fired = host_of(op.fired, (size_t)n), counts = host_of(op.counts, 3);
    std::vector<uint32_t> expected((size_t)n, 0);
    uint32_t all = 0;
    for (int t = 0; t < n_tok; t++) {
        const float *row = &g[ld * (size_t)t];
        double mean = 0, squares = 0;
        for (int j = 0; j < n; j++) mean += (double)row[j] / n;
        for (int j = 0; j < n; j++) squares += ((double)row[j] - mean) * ((double)row[j] - mean);
        const double least = mean + sqrt(squares / n) * (double)cut;
        for (int j = 0; j < n; j++) {
            const size_t at = ld * (size_t)t + (size_t)j;
            const double v = (double)row[j] - least, h = v > 0 ? activation(TE_GELU_TANH, 0, v) * (double)up[at] : 0;
            near(j, (double)got[at], h, 1e-5 * (1 + fabs(h)) * (1 + fabs((double)up[at])));
            expected[(size_t)j] += got[at] != 0;
            all += got[at] != 0;
        }
        for (size_t j = (size_t)n; j < ld; j++) same((long)j, (double)got[ld * (size_t)t + j], (double)row[j]);
    }
    for (int j = 0; j < n; j++) same(j, fired[(size_t)j], expected[(size_t)j]);
    same(0, counts[0], (double)n_tok * n);
    same(1, counts[1], (double)n_tok * n);
    same(2, counts[2], all);
    for (const void *p : {(const void *)op.gate, (const void *)op.up, (const void *)op.fired, (const void *)op.counts})
        OK(api->free(dev, (void *)p));
}

static void check_recurrent() {
    check_cut_case(1, 16384, 1.645f);
    check_cut_case(3, 160, 1.645f);
    check_cut_case(70, 8192, 0);
    check_cut_case(2, 5, -1);
    std::vector<recurrent_case> cases = {
        {32, 16, 128, 128, 4, 0, true, false, true, true, {0}, {7}, {}},        // Qwen3-Next
        {32, 16, 128, 128, 4, 0, true, true, false, true, {1, 0}, {0, 30}, {}}, // Qwen3.5
        {4, 2, 20, 24, 4, 0, true, false, true, true, {2}, {3}, {}},
        {6, 2, 32, 32, 4, 0, true, true, false, false, {1, 1, 0, 1}, {5, 6, 0, 7}, {3, -1, -1, 5}},
        {4, 1, 256, 64, 4, 0, false, false, false, true, {0}, {9}, {}}, // Mamba-2
        {4, 2, 24, 40, 2, 0, false, false, false, false, {0, 2, 0}, {1, 0, 2}, {4, -1, -1}},
        {0, 0, 0, 0, 3, 200, false, false, false, true, {0, 1, 2}, {0, 1, 9}, {}}, // LFM2
        {0, 0, 0, 0, 8, 33, false, false, false, false, {0, 0, 1}, {3, 4, 0}, {5, -1, -1}},
    };
    for (int kind = 0; kind < 3; kind++) { // prompts of two sequences, mixed
        recurrent_case prompt =
            kind < 2 ? recurrent_case{4,  2, kind ? 48 : 128, kind ? 40 : 128, 4, 0, kind == 0, true, false, false, {},
                                      {}, {}}
                     : recurrent_case{0, 0, 0, 0, 3, 300, false, false, false, false, {}, {}, {}};
        int at[2] = {0, 11};
        for (int t = 0; t < 77; t++) {
            const int s = t % 5 == 1 || t % 7 == 2;
            prompt.seq.push_back(s);
            prompt.pos.push_back(at[s]++);
            prompt.keep.push_back(t == 40 ? 4 : -1);
        }
        cases.push_back(prompt);
    }
    for (const recurrent_case &k : cases)
        for (bool early : {false, true}) check_recurrent_case(k, early);
    check_gate_case(1, 32, 128, true, true, false, true);
    check_gate_case(3, 5, 40, true, true, false, false);
    check_gate_case(9, 4, 300, true, true, true, true);
    check_gate_case(2, 3, 64, true, false, false, false);
    check_gate_case(4, 16, 256, false, false, false, true);
}
