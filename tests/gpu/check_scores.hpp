// check_scores.hpp - what stands in front of few tokens' experts: a router's scores with their side, and the choice.
#pragma once
#include "check_prompt_experts.hpp"

// type: of the matrices that are multiplied with the side; below 0: there is none.
static void check_scores_case(int n_tok, int rows, int cols, te_norm_kind kind, bool bias, int type) {
    AT("scores %d of %d columns, %d tokens, norm %d, bias %d, side for type %d", rows, cols, n_tok, (int)kind, bias,
       type);
    floats x(n_tok, cols);
    matrix m = matrix_new(TE_F32, rows, cols);
    const std::vector<float> w = normals((size_t)cols), b = normals((size_t)rows);
    const size_t ldy = (size_t)rows + 3;
    result y((size_t)n_tok * ldy), keep((size_t)n_tok * (size_t)cols);
    te_cuda_scores op = {};
    op.x = x.p;
    op.ldx = x.ld;
    op.n_tok = n_tok;
    op.cols = cols;
    if (kind != TE_NO_NORM) op.norm = {kind, 1e-5f, device_of(w), nullptr};
    op.w = m.m;
    op.bias = bias ? device_of(b) : nullptr;
    op.y = y.data();
    op.ldy = ldy;
    te_cuda_halve side = {};
    side.x = x.p;
    side.ldx = x.ld;
    side.n_tok = n_tok;
    side.cols = cols;
    side.norm = {TE_RMS_NORM, 0.125f, device_of(w), nullptr};
    const int few = std::min(n_tok, (int)TE_CUDA_WIDE_TOK);
    halves to = halves_new(n_tok, cols, type < 0 ? (int)TE_F16 : type, few),
           also = halves_new(n_tok, cols, TE_Q8_0, few);
    side.to = to.h;
    side.also = also.h;
    side.keep = keep.data();
    op.side = type < 0 ? nullptr : &side;
    OK(api->scores(dev, &op));
    const std::vector<float> got = y.get(), kept = keep.get();
    OK(api->scores(dev, &op));
    same_bits(got, y.get());
    if (type >= 0) {
        to.read();
        also.read();
    }
    for (int t = 0; t < n_tok; t++) {
        double sum = 0;
        for (int c = 0; c < cols; c++) sum += x.at(t, c) * x.at(t, c) / cols;
        const double scale = kind == TE_NO_NORM ? 1 : 1 / sqrt(sum + (double)1e-5f), own = 1 / sqrt(sum + 0.125);
        for (int r = 0; r < rows; r++) {
            double v = bias ? (double)b[(size_t)r] : 0, size = fabs(v);
            for (int c = 0; c < cols; c++) {
                double p = m.row(r)[c] * x.at(t, c) * scale;
                if (kind != TE_NO_NORM) p *= (double)w[(size_t)c];
                v += p;
                size += fabs(p);
            }
            near(r, (double)got[(size_t)t * ldy + (size_t)r], v, 8 * EPS * size);
        }
        for (size_t i = (size_t)rows; i < ldy; i++) same((long)i, (double)got[(size_t)t * ldy + i], (double)CANARY);
        for (int c = 0; c < cols && type >= 0; c++) {
            const double v = x.at(t, c) * own * (double)w[(size_t)c];
            near(c, (double)kept[(size_t)t * (size_t)cols + (size_t)c], v, 8 * EPS * fabs(v));
            for (const halves *h : {&to, &also}) near(c, h->at(t, c), v, 0x1p-11 * fabs(v) + 0x1p-17);
        }
    }
    for (const void *p : {(const void *)op.norm.w, (const void *)op.bias, (const void *)side.norm.w})
        if (p) OK(api->free(dev, (void *)p));
    to.free();
    also.free();
    y.free();
    keep.free();
    m.free();
    x.free();
}

// The experts of few tokens make the choice: what route gives, and then they.
static void check_prompt_choice_case(int n_tok, int n_expert, int n_used, int n_group) {
    AT("prompt's experts that are chosen: %d of %d, %d groups, %d tokens", n_used, n_expert, n_group, n_tok);
    const int n_embd = 256, n_ff = 96, type = TE_Q4_0;
    const size_t n_routes = (size_t)(n_tok * n_used), n_y = (size_t)n_tok * (size_t)n_embd;
    floats x(n_tok, n_embd);
    halves in = halves_new(n_tok, n_embd, type, std::min(n_tok, (int)TE_CUDA_WIDE_TOK)),
           h = halves_new((int)n_routes, n_ff);
    in.h.matrices = 0;
    te_cuda_halve half = {};
    half.x = x.p;
    half.ldx = x.ld;
    half.n_tok = n_tok;
    half.cols = n_embd;
    half.to = in.h;
    OK(api->halve(dev, &half));
    matrix gate = matrix_new(type, n_expert * n_ff, n_embd, 0.1f), up = matrix_new(type, n_expert * n_ff, n_embd, 0.1f),
           down = matrix_new(type, n_expert * n_embd, n_ff, 0.1f);
    std::vector<int32_t> place;
    for (int e = 0; e < n_expert; e++) place.push_back(e % 3 == 1 ? -1 - e / 3 : n_expert - 1 - e);
    result weight(n_routes), y(n_y), hidden(n_routes * (size_t)n_ff), values(n_routes * (size_t)n_embd);
    int32_t *const expert = device_of(std::vector<int32_t>(n_routes + 8, -77));
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
    r.expert = expert;
    r.weight = weight.data();
    r.uses = device_of(std::vector<uint32_t>((size_t)n_expert, 0));
    te_cuda_prompt_experts op = {};
    op.of.n_tok = n_tok;
    op.of.n_expert = op.of.n_places = n_expert;
    op.of.n_used = n_used;
    op.of.n_ff = op.n_ff_once = n_ff;
    op.of.gate = gate.m;
    op.of.up = up.m;
    op.of.down = down.m;
    op.of.place = r.place;
    op.of.expert = expert;
    op.of.weight = r.weight;
    op.of.act = TE_SILU;
    op.of.y = y.data();
    op.n_embd_once = n_embd;
    op.x = in.h;
    op.h = h.h;
    op.hidden = hidden.data();
    op.values = values.data();
    op.lists = device_of(std::vector<int32_t>(api->prompt_experts_words(&op.of), -5));
    OK(api->route(dev, &r));
    OK(api->prompt_experts(dev, &op));
    const std::vector<float> want = y.get(), weights = weight.get();
    const std::vector<int32_t> experts = host_of(expert, n_routes + 8);
    const std::vector<uint32_t> uses = host_of(r.uses, (size_t)n_expert);
    op.of.choice = &r;
    te_cuda_graph *g = nullptr;
    OK(api->capture_begin(dev));
    for (int turn = 0; turn < 3; turn++) OK(api->prompt_experts(dev, &op));
    OK(api->capture_end(dev, &g));
    for (int turn = 0; turn < 4; turn++) {
        OK(api->fill(dev, y.data(), 0xff, 4 * n_y));
        OK(api->fill(dev, weight.data(), 0xff, 4 * n_routes));
        OK(api->fill(dev, expert, 0, 4 * n_routes));
        OK(api->graph_launch(dev, g));
        same_bits(want, y.get());
        same_bits(weights, weight.get());
        is_true(experts == host_of(expert, n_routes + 8), "other experts are chosen");
    }
    api->graph_free(g);
    const std::vector<uint32_t> more = host_of(r.uses, (size_t)n_expert);
    for (int e = 0; e < n_expert; e++) same(e, more[(size_t)e], 13 * uses[(size_t)e]);
    for (const void *p : {(const void *)r.score, (const void *)r.place, (const void *)expert, (const void *)r.uses,
                          (const void *)op.lists})
        OK(api->free(dev, (void *)p));
    for (matrix *m : {&gate, &up, &down}) m->free();
    for (result *v : {&weight, &y, &hidden, &values}) v->free();
    in.free();
    h.free();
    x.free();
}

static void check_scores() {
    for (int n_tok : {9, 16, 33, 64, 65, 131, 192}) {
        check_scores_case(n_tok, 128, 2048, TE_RMS_NORM, false, TE_Q4_0);
        check_scores_case(n_tok, 32, 2880, TE_RMS_NORM, true, TE_MXFP4);
        check_scores_case(n_tok, 7, 68, TE_NO_NORM, false, -1);
        check_scores_case(n_tok, 65, 5120, TE_NO_NORM, true, TE_F16);
    }
    for (int n_tok : {9, 33, 64, 65, 97, 192}) {
        check_prompt_choice_case(n_tok, 128, 8, 1);
        check_prompt_choice_case(n_tok, 7, 4, 1);
        check_prompt_choice_case(n_tok, 200, 6, 1); // these are chosen in front
        check_prompt_choice_case(n_tok, 64, 6, 4);
    }
}
