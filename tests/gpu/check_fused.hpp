// check_fused.hpp - the feed-forward in one operation, and the merge that waits for words.
#pragma once
#include "check_marks.hpp"

struct ffn_case {
    int type, down_type, score_type, cols, rows, n_tok;
    te_norm_kind norm;
    te_activation act;
    bool gated, skip;
    scorer how;
    bool listed, zero_copy; // neurons are rows of larger matrices, which lie in host memory
    bool added;             // to the products of gate and up; h is stored
};

// Formats whose rows `pack` rearranges.
static bool is_rearranged(int type) { return type == TE_Q8_0 || type == TE_Q4_0 || type == TE_Q6_K; }

// Formats that kernels read in host memory as they are in a file. Of others, lists are for one token only.
static bool is_read_in_files(int type) {
    return is_float(type) || is_rearranged(type) || type == TE_Q4_K || type == TE_Q5_K;
}

// The rows of a matrix that is larger than the neurons are many, and where it lies. Those of nobody hold no numbers.
struct placed {
    matrix m;
    std::vector<int32_t> row; // of each neuron
    void *host = nullptr;
    const double *of(int j) const { return m.row(row[(size_t)j]); }
    void free() const {
        if (host) OK(api->host_free(dev, host));
        if (m.m.w && !host) OK(api->free(dev, (void *)m.m.w));
    }
};
static placed placed_new(int type, int cols, const std::vector<int32_t> &row, int rows, const std::vector<char> &unread,
                         bool zero_copy) {
    placed p;
    p.row = row;
    std::vector<char> poison((size_t)rows, 1);
    for (size_t j = 0; j < row.size(); j++) poison[(size_t)row[j]] = unread[j];
    p.m = matrix_new(type, rows, cols, 0.1f, poison);
    if (!zero_copy) return p;
    const size_t n_bytes = p.m.file_stride * (size_t)rows, off = is_rearranged(type) ? 2 : 0;
    is_true(off || p.m.m.stride == p.m.file_stride, "rows in host memory are not as in the file");
    OK(api->free(dev, (void *)p.m.m.w));
    OK(api->host_alloc(dev, n_bytes + off, &p.host)); // at an address that is no multiple of 4 where that may be
    memcpy((uint8_t *)p.host + off, p.m.file.data(), n_bytes);
    p.m.m.w = (uint8_t *)p.host + off;
    p.m.m.stride = p.m.file_stride;
    return p;
}

static void check_one_ffn(const ffn_case &k) {
    AT("one ffn %s, down %s, scores by %s of %s, %d x %d, %d tokens, norm %d, act %d, %s, %s%s%s%s",
       te_type_get(k.type)->name, te_type_get(k.down_type)->name, scorers[k.how], te_type_get(k.score_type)->name,
       k.rows, k.cols, k.n_tok, (int)k.norm, (int)k.act, k.gated ? "gated" : "ungated", k.skip ? "skip" : "dense",
       k.listed ? ", list" : "", k.zero_copy ? ", host memory" : "", k.added ? ", added" : "");
    const float threshold = k.act == TE_RELU ? 0.05f : 0;
    const int n_tok = k.n_tok, rows = k.rows, cols = k.cols;
    input in = input_new(n_tok, cols, k.norm, !is_float(k.type), k.how == BY_SIGNS);
    predictor p(k.how, k.score_type, rows, k.score_type == TE_F16 ? 1000 : 1024, n_tok, in.dx, in.ld, cols, in.x);
    for (char doubt : p.doubt) is_true(!doubt, "scores are too close to each other");
    std::vector<char> unread((size_t)rows, 1);
    uint32_t n_wanted = 0;
    for (int j = 0; j < rows; j++)
        for (int t = 0; t < n_tok; t++)
            if (p.wanted(t, j)) {
                unread[(size_t)j] = 0;
                n_wanted++;
            }
    std::vector<int32_t> row((size_t)rows);
    const int all_rows = k.listed ? 2 * rows + 5 : rows;
    for (int j = 0; j < rows; j++) row[(size_t)j] = k.listed ? 2 * j + (int)(random_word() % 2) + 3 : j;
    if (k.listed) std::reverse(row.begin(), row.end());
    placed gate, up, down;
    if (k.gated) gate = placed_new(k.type, cols, row, all_rows, unread, k.zero_copy);
    // Values and tolerances of gates; rows of up and down that gates of 0 make unneeded hold no numbers.
    std::vector<double> g((size_t)n_tok * (size_t)rows, 1), gl(g.size(), 0);
    std::vector<float> gate_add(g.size(), 0), up_add(g.size(), 0);
    if (k.added) {
        gate_add = normals(g.size());
        up_add = normals(g.size());
    }
    std::vector<char> off((size_t)rows, 0); // h is 0 for all tokens
    uint32_t sure = 0, maybe = 0;           // of how many values it is known that they are not 0, of how many not
    const bool relu = k.act == TE_RELU || k.act == TE_DRELU || k.act == TE_RELU2;
    for (int j = 0; j < rows && k.gated; j++) {
        bool all_off = true;
        for (int t = 0; t < n_tok; t++) {
            const size_t i = (size_t)t * (size_t)rows + (size_t)j;
            if (!p.wanted(t, j)) continue;
            const sum s = product(gate.m, row[(size_t)j], in, t);
            const double v = s.v + (double)gate_add[i], l = s.limit() + (k.added ? 4 * EPS * (fabs(s.v) + fabs(v)) : 0);
            g[i] = activation(k.act, (double)threshold, v);
            gl[i] = 1.2 * l + 8 * EPS * fabs(v);
            if (k.act == TE_RELU && fabs(v - (double)threshold) <= l) gl[i] += (double)threshold;
            all_off &= v + l < (double)threshold;
        }
        if (all_off && relu) off[(size_t)j] = 1;
        if (all_off && k.skip) unread[(size_t)j] = 1;
    }
    up = placed_new(k.type, cols, row, all_rows, unread, k.zero_copy);
    const std::vector<float> bias = normals((size_t)rows), down_bias = normals((size_t)cols);
    float *d_bias = device_of(bias), *d_down_bias = device_of(down_bias);
    std::vector<double> h(g.size(), 0), hl(g.size(), 0);
    for (int j = 0; j < rows; j++) {
        bool all_off = true;
        for (int t = 0; t < n_tok; t++) {
            const size_t i = (size_t)t * (size_t)rows + (size_t)j;
            if (!p.wanted(t, j)) continue;
            if (unread[(size_t)j]) continue;
            const sum s = product(up.m, row[(size_t)j], in, t);
            double u = s.v + (double)up_add[i] + (double)bias[(size_t)j],
                   ul = s.limit() + 4 * EPS * (fabs(u) + fabs(s.v) + fabs((double)up_add[i]));
            if (k.gated) {
                if (k.act == TE_DRELU) u = fmax(u, 0);
                h[i] = g[i] * u;
                hl[i] = gl[i] * (fabs(u) + ul) + fabs(g[i]) * ul + 4 * EPS * fabs(h[i]);
            } else {
                h[i] = activation(k.act, (double)threshold, u);
                hl[i] = 1.2 * ul + 8 * EPS * fabs(u);
                if (k.act == TE_RELU && fabs(u - (double)threshold) <= ul) hl[i] += (double)threshold;
            }
            all_off &= !k.gated && u + ul < (double)threshold;
            (fabs(h[i]) > hl[i] ? sure : maybe)++;
        }
        if (all_off && relu) off[(size_t)j] = 1;
        if (off[(size_t)j]) unread[(size_t)j] = 1;
    }
    down = placed_new(k.down_type, cols, row, all_rows, unread, k.zero_copy);
    te_ffn_args op = {};
    op.x = in.dx;
    op.ldx = in.ld;
    op.n_tok = n_tok;
    op.norm = in.norm;
    op.gate = gate.m.m;
    op.up = up.m.m;
    op.down = down.m.m;
    int32_t *list = nullptr;
    if (k.listed) {
        op.list = list = device_of(row);
        op.n_list = rows;
    }
    op.zero_copy = k.zero_copy;
    float *d_gate_add = nullptr, *d_up_add = nullptr;
    if (k.added) {
        op.up_add = d_up_add = device_of(up_add);
        if (k.gated) op.gate_add = d_gate_add = device_of(gate_add);
        op.ld_add = (size_t)rows;
        op.store_h = 1;
    }
    op.up_bias = d_bias;
    op.act = k.act;
    op.threshold = threshold;
    op.curve = some_curve;
    op.skip = k.skip;
    op.scores = p.op;
    result room((size_t)n_tok * (size_t)(rows + 3));
    op.h = room.data();
    op.ldh = (size_t)rows + 3;
    const size_t n_bits = (size_t)n_tok * (size_t)((rows + 31) / 32);
    op.bits = device_of(std::vector<uint32_t>(n_bits + 1, 77));
    op.counts = device_of(std::vector<uint32_t>(3, 0));
    op.fired = device_of(std::vector<uint32_t>((size_t)rows + 1, 0));
    const int n_parts = api->ffn_parts(dev, &op);
    result partial((size_t)n_parts * (size_t)n_tok * (size_t)cols), y((size_t)n_tok * (size_t)(cols + 4));
    op.partial = partial.data();
    if (random_word() % 2) op.prepared = in.prepared(up.m.m.type);
    OK(api->ffn(dev, &op));
    const std::vector<uint32_t> counts = host_of(op.counts, 3);
    same(0, counts[0], n_wanted);
    is_true(counts[2] >= sure && counts[2] <= sure + maybe, "the count of neurons that fired");
    is_true(k.skip ? counts[1] >= counts[2] && counts[1] <= counts[0] : counts[1] == counts[0],
            "the count of rows read");
    const std::vector<uint32_t> fired = host_of(op.fired, (size_t)rows + 1);
    uint32_t n_fired = fired[(size_t)rows];
    for (int j = 0; j < rows; j++) {
        uint32_t least = 0, most = 0;
        for (int t = 0; t < n_tok && !unread[(size_t)j]; t++) {
            const size_t i = (size_t)t * (size_t)rows + (size_t)j;
            if (!p.wanted(t, j)) continue;
            least += fabs(h[i]) > hl[i];
            most += h[i] != 0 || hl[i] != 0;
        }
        is_true(fired[(size_t)j] >= least && fired[(size_t)j] <= most, "how often a neuron fired");
        n_fired += fired[(size_t)j];
    }
    same(0, n_fired, counts[2]);
    is_true(host_of(op.bits, n_bits + 1)[n_bits] == 77, "the word behind the bits was written");
    const std::vector<float> kept = room.get();
    for (int t = 0; t < n_tok && k.added; t++)
        for (int j = 0; j < rows; j++) {
            const size_t i = (size_t)t * (size_t)rows + (size_t)j;
            const bool none = unread[(size_t)j] || !p.wanted(t, j);
            near(j, (double)kept[(size_t)t * op.ldh + (size_t)j], none ? 0 : h[i], none ? 0 : hl[i]);
        }
    // The merge: with words of the CPU, which come late.
    const std::vector<float> before = normals((size_t)n_tok * (size_t)cols),
                             far = normals((size_t)n_tok * (size_t)cols);
    float *d_before = device_of(before);
    const handover w((size_t)n_tok * (size_t)cols + 1);
    uint32_t *cancelled = (uint32_t *)(w.words + (size_t)n_tok * (size_t)cols);
    *cancelled = 0;
    te_merge_args m = {};
    m.partial = partial.data();
    m.n_parts = n_parts;
    m.n_tok = n_tok;
    m.cols = cols;
    m.add = d_before;
    m.ld_add = (size_t)cols;
    m.bias = d_down_bias;
    m.y = y.data();
    m.ldy = (size_t)cols + 4;
    m.words = w.words;
    m.ticket = w.ticket;
    m.cancelled = cancelled;
    m.limit_ns = 20000000000;
    OK(api->merge(dev, &m));
    for (size_t i = far.size(); i-- > 0;) w.set(i, bits_of(far[i]));
    const std::vector<float> out = y.get();
    partial.get();
    is_true(*cancelled == 0, "the merge gave up");
    OK(api->ffn(dev, &op));
    OK(api->merge(dev, &m));
    same_bits(out, y.get());
    for (int t = 0; t < n_tok; t++)
        for (int c = 0; c < cols; c++) {
            const size_t at = (size_t)t * (size_t)cols + (size_t)c;
            sum s;
            s.add(1, (double)before[at] + (double)down_bias[(size_t)c] + (double)far[at], 0);
            s.size += 2 * fabs((double)down_bias[(size_t)c]) + fabs((double)far[at]);
            for (int j = 0; j < rows; j++) {
                const size_t i = (size_t)t * (size_t)rows + (size_t)j;
                if (h[i] == 0 && hl[i] == 0) continue;
                if (unread[(size_t)j]) continue;
                s.add(down.of(j)[c], h[i], hl[i]);
                if (!is_float(k.down_type)) s.slack += 4 * EPS * fabs(h[i]) * 0.5;
            }
            near(c, (double)out[(size_t)t * (size_t)(cols + 4) + (size_t)c], s.v, s.limit());
        }
    for (const void *q : {(const void *)d_bias, (const void *)d_down_bias, (const void *)d_before,
                          (const void *)op.bits, (const void *)op.counts, (const void *)op.fired, (const void *)list,
                          (const void *)d_gate_add, (const void *)d_up_add})
        if (q) OK(api->free(dev, (void *)q));
    gate.free();
    up.free();
    down.free();
    room.free();
    partial.free();
    y.free();
    p.free();
    in.free();
    w.free();
}

// A merge whose words do not come ends, and says so; what came counts.
static void check_cancelled() {
    AT("merge without words");
    const int cols = 100;
    const handover w((size_t)cols + 1);
    uint32_t *cancelled = (uint32_t *)(w.words + cols);
    const std::vector<float> x = normals((size_t)cols);
    float *dx = device_of(x);
    te_merge_args m = {};
    m.n_tok = 1;
    m.cols = cols;
    m.add = m.y = dx;
    m.words = w.words;
    m.ticket = w.ticket;
    m.cancelled = cancelled;
    for (int turn = 0; turn < 2; turn++) { // by the clock, and by the flag
        *cancelled = (uint32_t)turn;
        for (int i = 0; i < cols; i += 2) w.set((size_t)i, bits_of(1));
        m.limit_ns = turn ? 1000000000000 : 2000000;
        OK(api->merge(dev, &m));
        const std::vector<float> y = host_of(dx, (size_t)cols);
        is_true(*cancelled == 1, "the wait was not cancelled");
        for (int i = 0; i < cols; i++)
            near(i, (double)y[(size_t)i], (double)x[(size_t)i] + (i % 2 ? 0 : turn + 1), 4 * EPS * 4);
    }
    m.add = nullptr; // the words alone
    *cancelled = 0;
    for (int i = 0; i < cols; i++) w.set((size_t)i, bits_of((float)i));
    OK(api->merge(dev, &m));
    const std::vector<float> y = host_of(dx, (size_t)cols);
    for (int i = 0; i < cols; i++) same(i, (double)y[(size_t)i], i);
    w.free();
    OK(api->free(dev, dx));
}

static void check_fused() {
    int turn = 0;
    const te_norm_kind norms[] = {TE_NO_NORM, TE_RMS_NORM, TE_LAYER_NORM};
    for (int type : all_types)
        for (int n_tok : {1, 2, 5, 8}) {
            check_side_case(type, some_cols(type, turn % 5), n_tok, norms[turn % 3], 1);
            turn++;
        }
    for (int type : {(int)TE_F16, (int)TE_Q4_0})
        check_side_case(type, 1024, 1, TE_RMS_NORM, 1, 1024); // of its own blocks
    for (te_norm_kind n : norms) check_side_case(TE_F32, 4096, 3, n, 0);
    for (int type : all_types)
        for (int rows : {100, 301, 9984}) check_marks_case(BY_ROWS, type, rows, 1 + turn++ % 8);
    for (int type : all_types)
        for (int n_tok : {1, 3, 8}) check_ties(type, n_tok);
    for (int n_tok = 1; n_tok <= 8; n_tok++) check_marks_case(BY_SIGNS, TE_F32, n_tok % 2 ? 301 : 9001, n_tok);
    check_cancelled();
    const te_activation acts[] = {TE_RELU, TE_DRELU, TE_SILU, TE_GELU, TE_GELU_TANH};
    for (int type : all_types)
        for (int gated = 0; gated < 2; gated++)
            for (int skip = 0; skip < 2; skip++)
                for (scorer how : {BY_NOTHING, BY_ROWS, BY_SIGNS})
                    for (int n_tok : {1, 1 + turn % 8}) {
                        ffn_case k = {};
                        k.type = type;
                        k.score_type = is_float(type) ? TE_F16 : type == TE_Q4_0 ? TE_Q4_0 : TE_Q8_0;
                        k.cols = some_cols(type, turn % 4);
                        k.down_type = type;
                        if (turn % 7 == 3) k.down_type = TE_F32; // no kernel for both at once
                        if (turn % 7 == 5) k.score_type = TE_F32;
                        k.rows = turn % 3 ? 301 : 1100;
                        k.n_tok = n_tok;
                        k.norm = norms[turn % 5 == 0 ? 1 : turn % 5 == 1 ? 2 : 0];
                        k.act = acts[turn % (skip ? 2 : 5)];
                        if (!gated && k.act == TE_DRELU) k.act = TE_RELU;
                        if (!gated && !skip && turn % 4 == 1) k.act = TE_XIELU;
                        k.gated = gated;
                        k.skip = skip;
                        k.how = how;
                        check_one_ffn(k);
                        k.added = true;
                        if (turn % 3 == 0) check_one_ffn(k);
                        k.added = false;
                        turn++;
                        if (!is_read_in_files(type) && n_tok > 1) continue;
                        k.listed = true;
                        k.down_type = type; // a list is for one kernel
                        k.zero_copy = turn % 4 && is_read_in_files(type) &&
                                      (is_rearranged(type) || te_row_bytes(type, k.cols) % 16 == 0);
                        check_one_ffn(k);
                    }
}
