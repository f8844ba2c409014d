// check_experts.hpp - the experts of a few tokens, and matrices that come in the background.
#pragma once
#include "check_routes.hpp"
#include "expert_cases.hpp"

// ---- experts of a few tokens ----

struct expert_case {
    int type, down_type, n_tok, n_embd, n_ff, n_expert, n_used;
    te_activation act;
    bool missing, bias;
    bool by_neuron = false, silent = false, normed = false; // silent: no neuron fires
    bool alone = false, on_input = false;                   // alone: no gate; on_input: weights are of the input
};

// What a merge that the operation does itself gives: the sum of the parts that it leaves without one, which are checked.
static void check_sum(te_experts_args op, const std::vector<float> &parts, result &partial) {
    const size_t n_embd = (size_t)op.up.cols, n_tok = (size_t)op.n_tok, n = n_tok * n_embd, ld = n_embd + 4;
    const std::vector<float> add = normals(n_tok * ld), bias = normals(n_embd);
    float *const x = device_of(add);
    te_merge_args m = {};
    m.n_tok = op.n_tok;
    m.cols = op.up.cols;
    m.bias = device_of(bias);
    m.add = x;
    m.ld_add = m.ldy = ld;
    m.y = x;
    op.merge = &m;
    te_cuda_graph *g = nullptr;
    OK(api->capture_begin(dev));
    OK(api->experts(dev, &op));
    OK(api->capture_end(dev, &g));
    std::vector<float> got;
    for (int turn = 0; turn < 3; turn++) {
        OK(api->upload(dev, x, add.data(), 4 * add.size()));
        OK(api->fill(dev, (void *)op.partial, 0xff, 4 * parts.size()));
        finish();
        OK(api->graph_launch(dev, g));
        const std::vector<float> now = host_of(x, add.size());
        if (turn) same_bits(got, now);
        got = now;
    }
    api->graph_free(g);
    (void)partial.get(); // and nothing around it was written
    for (size_t t = 0; t < n_tok; t++)
        for (size_t c = 0; c < ld; c++) {
            const double before = (double)add[t * ld + c];
            if (c >= n_embd) {
                same((long)c, (double)got[t * ld + c], before);
                continue;
            }
            double v = before + (double)bias[c], size = fabs(before) + fabs((double)bias[c]);
            for (size_t b = 0; b < parts.size() / n; b++) {
                const double p = (double)parts[(b * n_tok + t) * n_embd + c];
                v += p;
                size += fabs(p);
            }
            near((long)c, (double)got[t * ld + c], v, 16 * EPS * size);
        }
    OK(api->free(dev, x));
    OK(api->free(dev, (void *)m.bias));
}

static void check_experts_case(const expert_case &k) {
    if (!is_wanted(k.type)) return;
    AT("experts %s, %s, %d tokens, %d of %d of %d neurons, %d columns, act %d, missing %d, bias %d, by neuron %d, "
       "silent %d, normed %d, alone %d, on_input %d",
       te_type_get(k.type)->name, te_type_get(k.down_type)->name, k.n_tok, k.n_used, k.n_expert, k.n_ff, k.n_embd,
       (int)k.act, k.missing, k.bias, k.by_neuron, k.silent, k.normed, k.alone, k.on_input);
    const some_places s = places_new(k.n_expert, k.missing);
    input in = input_new(k.n_tok, k.n_embd, k.normed ? TE_RMS_NORM : TE_NO_NORM, !is_float(k.type));
    matrix gate = expert_matrix(k.type, k.n_ff, k.n_embd, s, k.missing),
           up = expert_matrix(k.type, k.n_ff, k.n_embd, s, k.missing),
           down = k.by_neuron ? expert_matrix(k.down_type, k.n_ff, k.n_embd, s, k.missing)
                              : expert_matrix(k.down_type, k.n_embd, k.n_ff, s, k.missing);
    const std::vector<int32_t> expert = some_routes(k.n_tok, k.n_used, k.n_expert);
    const size_t n_routes = expert.size(), ldh = (size_t)(k.n_ff + 3) / 4 * 4 + 4;
    const std::vector<float> weight = normals(n_routes), gate_b = normals((size_t)(k.n_expert * k.n_ff)),
                             up_b = normals((size_t)(k.n_expert * k.n_ff)),
                             down_b = normals((size_t)(k.n_expert * k.n_embd));
    result h(n_routes * ldh);
    te_experts_args op = {};
    op.x = in.dx;
    op.ldx = in.ld;
    op.norm = in.norm;
    op.n_tok = k.n_tok;
    op.n_expert = k.n_expert;
    op.n_used = k.n_used;
    op.n_ff = k.n_ff;
    if (!k.alone) op.gate = gate.m;
    op.up = up.m;
    (k.by_neuron ? op.down_t : op.down) = down.m;
    if (k.bias) {
        if (!k.alone) op.gate_b = device_of(gate_b);
        op.up_b = device_of(up_b);
        op.down_b = device_of(down_b);
    }
    op.n_places = s.n;
    op.place = device_of(s.place);
    op.missing = k.missing;
    op.first = s.first;
    op.expert = device_of(expert);
    op.weight = device_of(weight);
    op.act = k.act;
    op.on_input = k.on_input;
    op.threshold = k.silent ? 1e30f : k.act == TE_RELU ? 0.05f : 0;
    op.counts = device_of(std::vector<uint32_t>(3, 0));
    op.h = h.data();
    op.ldh = ldh;
    const int n_shares = api->expert_parts(dev, &op) / k.n_used; // of each rank
    result partial(n_routes * (size_t)n_shares * (size_t)k.n_embd);
    op.partial = partial.data();
    is_true(k.by_neuron ? n_shares > 0 : n_shares == 1, "another number of parts");
    OK(api->experts(dev, &op));
    const std::vector<float> got_h = h.get(), got = partial.get();
    te_cuda_graph *g = nullptr;
    OK(api->capture_begin(dev));
    OK(api->experts(dev, &op));
    OK(api->experts(dev, &op));
    OK(api->capture_end(dev, &g));
    OK(api->graph_launch(dev, g));
    same_bits(got, partial.get());
    api->graph_free(g);
    uint32_t asked = 0, fired = 0;
    const int block = is_float(k.down_type) || k.by_neuron ? 0 : 32;
    std::vector<char> read((size_t)(s.n * k.n_ff), 0); // of down's rows, by neuron
    for (int t = 0; t < k.n_tok; t++)
        for (int r = 0; r < k.n_used; r++) {
            const size_t i = (size_t)(t * k.n_used + r);
            const int e = expert[i], at = s.at(e, k.missing);
            std::vector<double> sums((size_t)k.n_embd, 0);
            for (int b = r * n_shares; b < (r + 1) * n_shares; b++)
                for (int c = 0; c < k.n_embd; c++)
                    sums[(size_t)c] += (double)got[((size_t)(b * k.n_tok) + (size_t)t) * (size_t)k.n_embd + (size_t)c];
            const float *hv = &got_h[i * ldh];
            if (at < 0) {
                for (int c = 0; c < k.n_embd; c++) same(c, sums[(size_t)c], 0);
                continue;
            }
            std::vector<double> seen;
            for (int j = 0; j < k.n_ff; j++) {
                sum us = product(up, at * k.n_ff + j, in, t), gs = k.alone ? us : product(gate, at * k.n_ff + j, in, t);
                for (sum *s : {&us, &gs}) s->times(k.on_input ? (double)weight[i] : 1);
                double gv = gs.v, uv = us.v;
                if (k.bias) {
                    gv += (double)(k.alone ? up_b : gate_b)[(size_t)(e * k.n_ff + j)];
                    uv += (double)up_b[(size_t)(e * k.n_ff + j)];
                }
                if (k.alone) {
                    const double l = gs.limit() + 4 * EPS * fabs(gv), v = activation(k.act, 0, gv);
                    near(j, (double)hv[j], v, (k.act == TE_RELU2 ? 2 * fabs(gv) + l : 1.2) * l + 8 * EPS * fabs(v));
                    asked += 3;
                    fired += hv[j] != 0 ? 3 : 0;
                    seen.push_back((double)hv[j]);
                    continue;
                }
                const double threshold = (double)op.threshold, a = activation(k.act, threshold, gv);
                double gl = 1.2 * gs.limit() + 8 * EPS * fabs(gv);
                const double ul = us.limit() + 4 * EPS * fabs(uv);
                if (k.act == TE_RELU && fabs(gv - threshold) <= gs.limit() + 4 * EPS) gl += threshold;
                if (k.act == TE_DRELU) uv = fmax(uv, 0);
                if (k.act == TE_CLAMPED) uv = clamped_up(uv);
                near(j, (double)hv[j], a * uv, gl * (fabs(uv) + ul) + fabs(a) * ul + 4 * EPS * fabs(a * uv));
                asked += 3;
                fired += hv[j] != 0 ? 3 : 0;
                seen.push_back((double)hv[j]);
                if (hv[j] != 0) read[(size_t)(at * k.n_ff + j)] = 1;
            }
            for (int j0 = 0; block && j0 < k.n_ff; j0 += block) { // as bytes
                float most = 0;
                for (int j = j0; j < j0 + block; j++) most = fmaxf(most, fabsf(hv[j]));
                const float scale = most > 1e-35f ? 127.0f / most : 0, back = most > 1e-35f ? most / 127.0f : 0;
                for (int j = j0; j < j0 + block; j++)
                    seen[(size_t)j] = (double)nearbyintf(hv[j] * scale) * (double)back;
            }
            for (int c = 0; c < k.n_embd; c++) {
                sum d;
                for (int j = 0; j < k.n_ff; j++) {
                    if (!k.by_neuron) {
                        d.add(down.row(at * k.n_embd + c)[j], seen[(size_t)j], 0);
                    } else if (seen[(size_t)j] != 0) {
                        d.add(down.row(at * k.n_ff + j)[c], seen[(size_t)j], 0);
                        // Of formats with minima a weight is a difference; its parts are at most as large as this.
                        if (!is_float(k.down_type)) d.slack += 4 * EPS * fabs(seen[(size_t)j]) * 0.5;
                    }
                }
                d.size *= minima(k.down_type);
                const double b = k.bias ? (double)down_b[(size_t)(e * k.n_embd + c)] : 0,
                             w = k.on_input ? 1 : (double)weight[i];
                near(c, sums[(size_t)c], w * (d.v + b), fabs(w) * (d.limit() + 4 * EPS * (fabs(d.v) + fabs(b))));
            }
        }
    const std::vector<uint32_t> counts = host_of(op.counts, 3);
    same(0, counts[0], asked);
    same(1, counts[1], asked);
    same(2, counts[2], fired);
    if (k.silent) same(0, fired, 0);
    if (k.by_neuron) { // rows of silent neurons may hold no numbers
        for (size_t i = 0; i < read.size(); i++)
            if (!read[i]) OK(api->fill(dev, (char *)down.m.w + i * down.m.stride, 0xff, down.m.stride));
        OK(api->experts(dev, &op));
        same_bits(got, partial.get());
    }
    te_experts_args again = op;
    again.counts = nullptr;
    check_sum(again, got, partial);
    // Bits of a token do not depend on the others, where shares of neurons do not.
    for (int t = 0; t < k.n_tok && k.n_tok > 1 && !k.by_neuron; t++) {
        te_experts_args one = op;
        one.x += one.ldx * (size_t)t;
        one.n_tok = 1;
        one.expert += t * k.n_used;
        one.weight += t * k.n_used;
        OK(api->experts(dev, &one));
        const std::vector<float> alone = partial.get();
        for (int r = 0; r < k.n_used; r++)
            is_true(!memcmp(&alone[(size_t)r * (size_t)k.n_embd],
                            &got[((size_t)r * (size_t)k.n_tok + (size_t)t) * (size_t)k.n_embd], 4 * (size_t)k.n_embd),
                    "a token alone has other bits");
    }
    for (const void *p :
         {(const void *)op.gate_b, (const void *)op.up_b, (const void *)op.down_b, (const void *)op.place,
          (const void *)op.expert, (const void *)op.weight, (const void *)op.counts})
        OK(api->free(dev, (void *)p));
    gate.free();
    up.free();
    down.free();
    in.free();
    h.free();
    partial.free();
}

// Some experts in places, of the others some routes in host memory beside them: the bits of all experts in places, and zeros
// where a route is neither.
static void check_kept_case(int type, int down_type, int n_tok, int n_embd, int n_ff, int n_expert, int n_used) {
    AT("experts %s, %s in host memory, %d tokens, %d of %d of %d neurons, %d columns", te_type_get(type)->name,
       te_type_get(down_type)->name, n_tok, n_used, n_expert, n_ff, n_embd);
    input in = input_new(n_tok, n_embd, TE_NO_NORM, !is_float(type));
    const int types[] = {type, type, down_type}, rows[] = {n_ff, n_ff, n_embd}, cols[] = {n_embd, n_embd, n_ff};
    matrix m[3];
    void *host[3];
    te_mat there[3]; // in host memory
    for (int i = 0; i < 3; i++) {
        m[i] = matrix_new(types[i], n_expert * rows[i], cols[i], 0.1f);
        const size_t off = is_rearranged(types[i]) ? 2 : 0;
        // At no multiple of 4 where that may be; whole words are read.
        OK(api->host_alloc(dev, (m[i].file.size() + off + 3) / 4 * 4, &host[i]));
        memcpy((uint8_t *)host[i] + off, m[i].file.data(), m[i].file.size());
        there[i] = m[i].m;
        there[i].w = (uint8_t *)host[i] + off;
        there[i].stride = m[i].file_stride;
    }
    const std::vector<int32_t> expert = some_routes(n_tok, n_used, n_expert);
    const size_t n_routes = expert.size(), ldh = (size_t)(n_ff + 3) / 4 * 4;
    std::vector<int32_t> all, some, kept;
    for (int e = 0; e < n_expert; e++) {
        all.push_back(e);
        some.push_back(e % 2 ? -1 - e / 2 : e);
    }
    for (int32_t e : expert) kept.push_back(e % 2 && e % 3 != 1);
    result h(n_routes * ldh), partial(n_routes * (size_t)n_embd);
    te_experts_args op = {};
    op.x = in.dx;
    op.ldx = in.ld;
    op.n_tok = n_tok;
    op.n_expert = op.n_places = n_expert;
    op.n_used = n_used;
    op.n_ff = n_ff;
    op.gate = m[0].m;
    op.up = m[1].m;
    op.down = m[2].m;
    op.place = device_of(all);
    op.expert = device_of(expert);
    op.weight = device_of(normals(n_routes));
    op.act = TE_SILU;
    op.counts = device_of(std::vector<uint32_t>(3, 0));
    op.h = h.data();
    op.ldh = ldh;
    op.partial = partial.data();
    OK(api->experts(dev, &op));
    const std::vector<float> want = partial.get();
    te_experts_args in_place = op, beside = op;
    in_place.gate = there[0];
    in_place.up = there[1];
    in_place.down = there[2];
    in_place.place = beside.place = device_of(some);
    in_place.kept = device_of(kept);
    beside.add = beside.beside = 1;
    auto check = [&](bool with_places) {
        const std::vector<float> got = partial.get();
        for (int t = 0; t < n_tok; t++)
            for (int r = 0; r < n_used; r++) {
                const size_t i = (size_t)(t * n_used + r);
                const size_t at = ((size_t)r * (size_t)n_tok + (size_t)t) * (size_t)n_embd;
                const bool computed = kept[i] || (with_places && expert[i] % 2 == 0);
                for (int c = 0; c < n_embd; c++)
                    same(c, (double)got[at + (size_t)c], computed ? (double)want[at + (size_t)c] : 0);
            }
    };
    OK(api->experts(dev, &in_place));
    check(false);
    OK(api->experts(dev, &beside));
    check(true);
    te_cuda_graph *g = nullptr;
    OK(api->capture_begin(dev));
    for (int turn = 0; turn < 3; turn++) {
        OK(api->experts(dev, &in_place));
        OK(api->experts(dev, &beside));
    }
    OK(api->capture_end(dev, &g));
    for (int turn = 0; turn < 3; turn++) {
        OK(api->fill(dev, (void *)op.partial, 0xff, 4 * n_routes * (size_t)n_embd));
        OK(api->graph_launch(dev, g));
        check(true);
    }
    api->graph_free(g);
    for (const void *p : {(const void *)op.place, (const void *)op.expert, (const void *)op.weight,
                          (const void *)op.counts, (const void *)beside.place, (const void *)in_place.kept})
        OK(api->free(dev, (void *)p));
    for (int i = 0; i < 3; i++) {
        OK(api->host_free(dev, host[i]));
        m[i].free();
    }
    in.free();
    h.free();
    partial.free();
}

// The experts make the choice: what route gives, and then they.
static void check_choice_case(int n_tok, int n_expert, int n_used, int n_group, bool by_neuron, bool gone) {
    AT("experts that are chosen: %d of %d, %d groups, %d tokens, by neuron %d, some gone %d", n_used, n_expert, n_group,
       n_tok, by_neuron, gone);
    const int n_embd = 256, n_ff = 96, type = TE_Q4_0;
    input in = input_new(n_tok, n_embd, TE_NO_NORM, true);
    matrix gate = matrix_new(type, n_expert * n_ff, n_embd, 0.1f), up = matrix_new(type, n_expert * n_ff, n_embd, 0.1f),
           down = by_neuron ? matrix_new(type, n_expert * n_ff, n_embd, 0.1f)
                            : matrix_new(type, n_expert * n_embd, n_ff, 0.1f);
    std::vector<int32_t> place;
    for (int e = 0; e < n_expert; e++) place.push_back(gone && e % 3 == 1 ? -1 - e / 3 : n_expert - 1 - e);
    const size_t n_routes = (size_t)(n_tok * n_used);
    result weight(n_routes), h(n_routes * n_ff);
    te_route_args r = {};
    r.score = device_of(normals((size_t)(n_tok * n_expert)));
    r.ld_score = (size_t)n_expert;
    r.n_tok = n_tok;
    r.n_expert = n_expert;
    r.n_used = n_used;
    r.n_group = r.n_group_used = n_group;
    r.normed = 1;
    r.scale = 1;
    r.place = device_of(place);
    int32_t *const expert = device_of(std::vector<int32_t>(n_routes + 8, -77));
    r.expert = expert;
    r.weight = weight.data();
    r.uses = device_of(std::vector<uint32_t>((size_t)n_expert, 0));
    te_experts_args op = {};
    op.x = in.dx;
    op.ldx = in.ld;
    op.n_tok = n_tok;
    op.n_expert = op.n_places = n_expert;
    op.n_used = n_used;
    op.n_ff = n_ff;
    op.gate = gate.m;
    op.up = up.m;
    (by_neuron ? op.down_t : op.down) = down.m;
    op.place = r.place;
    op.expert = r.expert;
    op.weight = r.weight;
    op.act = TE_RELU;
    op.h = h.data();
    op.ldh = n_ff;
    result partial((size_t)(api->expert_parts(dev, &op) * n_tok) * n_embd);
    op.partial = partial.data();
    OK(api->route(dev, &r));
    OK(api->experts(dev, &op));
    const std::vector<float> want = partial.get(), weights = weight.get();
    const std::vector<int32_t> experts = host_of(expert, n_routes + 8);
    const std::vector<uint32_t> uses = host_of(r.uses, (size_t)n_expert);
    op.choice = &r;
    te_cuda_graph *g = nullptr;
    OK(api->capture_begin(dev));
    for (int turn = 0; turn < 3; turn++) OK(api->experts(dev, &op));
    OK(api->capture_end(dev, &g));
    for (int turn = 0; turn < 8; turn++) {
        OK(api->fill(dev, partial.data(), 0xff, 4 * want.size()));
        OK(api->fill(dev, weight.data(), 0xff, 4 * n_routes));
        OK(api->fill(dev, expert, 0, 4 * n_routes));
        OK(api->graph_launch(dev, g));
        same_bits(want, partial.get());
        same_bits(weights, weight.get());
        is_true(experts == host_of(expert, n_routes + 8), "other experts are chosen");
    }
    api->graph_free(g);
    const std::vector<uint32_t> more = host_of(r.uses, (size_t)n_expert);
    for (int e = 0; e < n_expert; e++) same(e, more[(size_t)e], 25 * uses[(size_t)e]);
    for (const void *p : {(const void *)r.score, (const void *)r.place, (const void *)r.expert, (const void *)r.uses})
        OK(api->free(dev, (void *)p));
    for (matrix *m : {&gate, &up, &down}) m->free();
    for (result *v : {&weight, &h, &partial}) v->free();
    in.free();
}

static void check_choices() {
    for (int n_tok : {1, 2, 8})
        for (int gone = 0; gone < 2; gone++) {
            check_choice_case(n_tok, 128, 8, 1, false, gone != 0);
            check_choice_case(n_tok, 64, 6, 1, true, gone != 0);
            check_choice_case(n_tok, 7, 4, 1, false, gone != 0);
        }
    check_choice_case(3, 40, 40, 1, false, false);
    check_choice_case(2, 64, 6, 4, false, false); // these are chosen in front
    check_choice_case(1, 300, 6, 1, false, true);
}

static void check_kept() {
    for (int type : all_types) {
        if (!is_read_in_files(type)) continue;
        const int unit = is_float(type) ? 64 : te_type_get(type)->block_weights;
        for (int n_tok : {1, 3}) {
            check_kept_case(type, type, n_tok, n_tok == 1 ? 2048 : 256, n_tok == 1 ? 256 : 768, 12, 8);
            check_kept_case(type, type, n_tok, unit, unit, 7, 3);
            check_kept_case(type, TE_Q6_K, n_tok, unit == 256 ? 512 : 320 / unit * unit, 256, 9, 4);
        }
    }
    check_kept_case(TE_Q4_0, TE_Q4_0, 1, 512, 384, 33, 32);
}

// A merge does not wait where nothing is expected.
static void check_expected() {
    for (int expected = 0; expected < 2; expected++) {
        AT("merge, expected %d", expected);
        const int cols = 96;
        void *shared = nullptr;
        OK(api->host_alloc(dev, 4096, &shared));
        uint64_t *words = (uint64_t *)shared;
        uint32_t *cancelled = (uint32_t *)(words + cols);
        *cancelled = 0;
        const float v = 2.5f;
        uint32_t bits;
        memcpy(&bits, &v, 4);
        for (int c = 0; c < cols; c++) words[c] = (uint64_t)(expected ? 7 : 6) << 32 | bits;
        const std::vector<float> before = normals((size_t)cols);
        result y((size_t)cols);
        te_merge_args m = {};
        m.n_tok = 1;
        m.cols = cols;
        m.add = device_of(before);
        m.ld_add = m.ldy = (size_t)cols;
        m.y = y.data();
        m.words = words;
        m.ticket = {device_of(std::vector<uint32_t>(1, 7)), 0};
        m.expected = device_of(std::vector<int32_t>(1, expected));
        m.cancelled = cancelled;
        m.limit_ns = 200000000;
        OK(api->merge(dev, &m));
        const std::vector<float> got = y.get();
        for (int c = 0; c < cols; c++)
            same(c, (double)got[(size_t)c], (double)(before[(size_t)c] + (expected ? v : 0)));
        same(0, *cancelled, 0);
        OK(api->host_free(dev, shared));
        y.free();
    }
}

// ---- fetches ----

static void check_fetches() {
    const size_t n_room = 200000;
    uint8_t *room = device_new<uint8_t>(n_room);
    uint32_t asked = 0, n = 0;
    OK(api->fetch_open(dev));
    for (int type : all_types)
        for (int cols : {256, 2048, 2880, 5376}) {
            if (cols % te_type_get(type)->block_weights) continue;
            AT("fetch %s, %d columns", te_type_get(type)->name, cols);
            const int rows = 333;
            matrix a = matrix_new(type, rows, cols);
            void *host = nullptr;
            OK(api->host_alloc(dev, a.file.size() + 2, &host));
            uint8_t *src = (uint8_t *)host + (type == TE_F32 ? 0 : 2);
            memcpy(src, a.file.data(), a.file.size());
            const size_t n_bytes = a.m.stride * (size_t)rows;
            uint8_t *to[2] = {device_of(std::vector<uint8_t>(n_bytes + 16, 0xee)),
                              device_of(std::vector<uint8_t>(n_bytes + 16, 0xee))};
            for (int i = 0; i < 2; i++) { // two under way, the second through the same room
                te_cuda_pack op = {a.m, src, a.file_stride, nullptr, nullptr};
                op.dst.w = to[i];
                OK(api->fetch(dev, &op, room, n_room));
                asked++;
            }
            for (long turn = 0; n != asked && turn < 100000000; turn++) OK(api->fetched(dev, &n));
            is_true(n == asked, "fetches do not end");
            const std::vector<uint8_t> want = host_of((const uint8_t *)a.m.w, n_bytes);
            for (uint8_t *p : to) {
                const std::vector<uint8_t> got = host_of(p, n_bytes + 16);
                is_true(!memcmp(got.data(), want.data(), n_bytes), "other bytes than pack's");
                for (size_t i = n_bytes; i < n_bytes + 16; i++) same((long)i, got[i], 0xee);
                OK(api->free(dev, p));
            }
            OK(api->host_free(dev, host));
            a.free();
        }
    OK(api->free(dev, room));
}

static void check_experts() {
    int turn = 0;
    for (int type : all_types) {
        const int unit = is_float(type) ? 4 : te_type_get(type)->block_weights;
        for (int n_tok : {1, 2, 8})
            for (int shape = 0; shape < 4; shape++) {
                const int n_embd[] = {unit == 4 ? 68 : unit, 256, 2048, 1024}, n_ff[] = {unit, 768, 256, 1792};
                const te_activation acts[] = {TE_RELU, TE_DRELU, TE_SILU, TE_GELU, TE_GELU_TANH, TE_CLAMPED};
                turn++;
                if (shape > 1 && (n_tok == 8 || (type + shape + n_tok) % 2)) continue; // one of the large ones for each
                check_experts_case({type, turn % 4 || n_ff[shape] % 32 ? type : TE_Q8_0, n_tok, n_embd[shape],
                                    n_ff[shape], 5 + shape, 3, acts[turn % 6], turn % 3 == 0, turn % 2 == 0});
            }
    }
    check_experts_case({TE_Q4_0, TE_Q4_0, 1, 2048, 768, 12, 8, TE_SILU, false, false});
    check_experts_case({TE_Q4_0, TE_Q6_K, 1, 256, 256, 1, 1, TE_SILU, false, false});
    check_experts_case({TE_F16, TE_F16, 8, 64, 36, 70, 64, TE_SILU, false, true});
    for (int n_tok : {1, 3, 8}) // as gpt-oss has them: rows of 90 blocks
        for (int missing = 0; missing < 2; missing++) {
            check_experts_case({TE_MXFP4, TE_MXFP4, n_tok, 2880, 160, 7, 4, TE_CLAMPED, missing != 0, true});
            check_experts_case({TE_MXFP4, TE_MXFP4, n_tok, 160, 2880, 7, 4, TE_CLAMPED, missing != 0, true});
        }
    check_experts_case({TE_MXFP4, TE_MXFP4, 1, 2880, 2880, 3, 2, TE_CLAMPED, false, true});
    for (int n_tok : {1, 2, 8}) { // weights of the input
        check_experts_case({TE_Q4_0, TE_Q4_0, n_tok, 512, 96, 6, 1, TE_SILU, n_tok == 2, false, false, false,
                            n_tok == 1, false, true});
        check_experts_case(
            {TE_F16, TE_F16, n_tok, 68, 36, 6, 3, TE_SILU, n_tok != 2, false, false, false, false, false, true});
        check_experts_case(
            {TE_Q4_K, TE_Q4_K, n_tok, 256, 256, 6, 1, TE_SILU, false, false, true, false, false, false, true});
    }
    for (int type : all_types) { // without a gate
        const int unit = is_float(type) ? 4 : te_type_get(type)->block_weights;
        for (int n_tok : {1, 2, 8}) {
            turn++;
            const te_activation act = turn % 3 ? TE_RELU2 : TE_SILU;
            check_experts_case({type, type, n_tok, unit == 4 ? 68 : unit, 768, 5, 3, act, turn % 2 == 0, turn % 4 < 2,
                                false, false, false, true});
            check_experts_case(
                {type, type, n_tok, 1024, unit, 7, 3, act, turn % 2 != 0, false, false, false, n_tok == 1, true});
        }
    }
    for (int type : {TE_Q4_0, TE_F16, TE_Q4_K}) // a single token's norm
        check_experts_case({type, type, 1, 512, 256, 5, 3, TE_SILU, false, type == TE_F16, false, false, true});
    for (int down : {TE_Q6_K, TE_Q5_K, TE_Q3_K})
        check_experts_case({TE_Q4_K, down, 2, 256, 512, 5, 3, TE_SILU, false, false});
    for (int type : all_types) { // down by neuron: any number of neurons
        const int unit = is_float(type) ? 4 : te_type_get(type)->block_weights;
        for (int n_tok : {1, 3, 8})
            for (int shape = 0; shape < 4; shape++) {
                const int n_embd[] = {unit == 4 ? 68 : unit, 1024, 256, 768}, n_ff[] = {7, 768, 1, 131};
                const te_activation acts[] = {TE_RELU, TE_DRELU, TE_RELU, TE_SILU};
                if (n_tok > 1 && shape == 1) continue;
                turn++;
                check_experts_case({type, turn % 4 || n_embd[shape] % 32 ? type : TE_Q4_0, n_tok, n_embd[shape],
                                    n_ff[shape], 5 + shape, 3, acts[turn % 4], turn % 3 == 0, turn % 2 == 0, true});
            }
        check_experts_case({type, type, 2, 512, 96, 6, 3, TE_RELU, false, type % 2 == 0, true, true});
    }
    // A share of more neurons than a list has room for; more routes than blocks at once.
    check_experts_case({TE_F32, TE_F32, 8, 1024, 1300, 9, 6, TE_RELU, false, false, true});
    check_experts_case({TE_Q4_0, TE_Q4_0, 8, 2048, 64, 70, 64, TE_RELU, false, true, true});
}
