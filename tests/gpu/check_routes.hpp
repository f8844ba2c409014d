// check_routes.hpp - a router's choice.
#pragma once
#include "check_fused.hpp"

struct route_case {
    int n_tok, n_expert, n_used, n_group, n_group_used;
    te_gating gating;
    bool normed, bias, publish;
};

static void check_route_case(const route_case &k) {
    AT("route %d of %d, %d tokens, %d of %d groups, gating %d, normed %d, bias %d, publish %d", k.n_used, k.n_expert,
       k.n_tok, k.n_group_used, k.n_group, (int)k.gating, k.normed, k.bias, k.publish);
    const int n = k.n_expert, ld = n + 5;
    std::vector<float> score((size_t)(k.n_tok * ld), NAN), bias((size_t)n);
    for (int t = 0; t < k.n_tok; t++)
        for (int e = 0; e < n; e++) // in steps, so that equal ones are equal and others differ
            score[(size_t)(t * ld + e)] = floorf(48 * random_normal()) / 16;
    for (float &b : bias) b = floorf(8 * random_normal()) / 16;
    std::vector<int32_t> place((size_t)n);
    int there = 0, gone = 0;
    for (int32_t &p : place) p = random_word() % 3 ? there++ : -1 - gone++;
    const size_t n_routes = (size_t)(k.n_tok * k.n_used);
    void *shared = nullptr;
    OK(api->host_alloc(dev, 16 * n_routes, &shared));
    uint64_t *words = (uint64_t *)shared;
    for (size_t i = 0; i < 2 * n_routes; i++) words[i] = 0;
    te_route_args op = {};
    op.score = device_of(score);
    op.ld_score = (size_t)ld;
    op.n_tok = k.n_tok;
    op.n_expert = n;
    op.n_used = k.n_used;
    op.n_group = k.n_group;
    op.n_group_used = k.n_group_used;
    op.gating = k.gating;
    op.normed = k.normed;
    op.scale = 1.5f;
    op.choice_b = k.bias ? device_of(bias) : nullptr;
    const bool has_factor = k.bias != k.normed;
    std::vector<float> factor((size_t)n, 1);
    for (float &f : factor)
        if (has_factor) f = random_normal();
    op.factor = has_factor ? device_of(factor) : nullptr;
    op.place = device_of(place);
    op.expert = device_of(std::vector<int32_t>(n_routes + 8, -77));
    result weight(n_routes);
    op.weight = weight.data();
    op.uses = device_of(std::vector<uint32_t>((size_t)n, 3));
    op.n_missing = device_of(std::vector<int32_t>(1, 12345));
    uint32_t *base = device_of(std::vector<uint32_t>(1, 40));
    op.publish = k.publish ? words : nullptr;
    const bool keeps = k.publish && k.n_tok % 2; // of m that are not there half are kept, rounded up
    std::vector<int32_t> n_kept;
    for (int m = 0; m <= k.n_used; m++) n_kept.push_back((m + 1) / 2);
    op.n_kept = keeps ? device_of(n_kept) : nullptr;
    op.kept = device_of(std::vector<int32_t>(n_routes + 8, -77));
    op.ticket = {base, 2};
    OK(api->route(dev, &op));
    const std::vector<float> w = weight.get();
    const std::vector<int32_t> expert = host_of(op.expert, n_routes + 8), kept = host_of(op.kept, n_routes + 8);
    te_cuda_graph *g = nullptr; // again, as a program does it
    OK(api->capture_begin(dev));
    OK(api->route(dev, &op));
    OK(api->capture_end(dev, &g));
    OK(api->graph_launch(dev, g));
    same_bits(w, weight.get());
    api->graph_free(g);
    std::vector<uint32_t> uses((size_t)n, 3);
    int missing = 0;
    for (int t = 0; t < k.n_tok; t++) {
        const float *s = &score[(size_t)(t * ld)];
        std::vector<double> p(s, s + n);
        double most = -1e30, sum = 0;
        for (double v : p) most = std::max(most, v);
        for (double v : p) sum += exp(v - most);
        for (double &v : p) {
            if (k.gating == TE_GATING_SOFTMAX) v = exp(v - most) / sum;
            if (k.gating == TE_GATING_SIGMOID) v = 1 / (1 + exp(-v));
        }
        std::vector<float> rank((size_t)n);
        for (int e = 0; e < n; e++) rank[(size_t)e] = (float)p[(size_t)e] + (k.bias ? bias[(size_t)e] : 0);
        if (k.n_group > 1) {
            const int size = n / k.n_group;
            std::vector<float> group;
            for (int i = 0; i < k.n_group; i++) {
                std::vector<float> of(rank.begin() + i * size, rank.begin() + (i + 1) * size);
                std::sort(of.rbegin(), of.rend());
                group.push_back(size > 1 ? of[0] + of[1] : of[0]);
            }
            for (int i = 0; i < k.n_group; i++) {
                int before = 0;
                for (int j = 0; j < k.n_group; j++)
                    before += group[(size_t)j] > group[(size_t)i] || (group[(size_t)j] == group[(size_t)i] && j < i);
                for (int e = i * size; e < (i + 1) * size && before >= k.n_group_used; e++) rank[(size_t)e] = -INFINITY;
            }
        }
        std::vector<int> order;
        for (int e = 0; e < n; e++) order.push_back(e);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return rank[(size_t)a] > rank[(size_t)b]; });
        double total = 0, chosen_most = -1e30;
        for (int r = 0; r < k.n_used; r++) chosen_most = std::max(chosen_most, p[(size_t)order[(size_t)r]]);
        std::vector<double> of;
        for (int r = 0; r < k.n_used; r++) {
            const double v = p[(size_t)order[(size_t)r]];
            of.push_back(k.gating == TE_GATING_CHOSEN ? exp(v - chosen_most) : v);
            total += of.back();
        }
        int n_gone = 0, n_seen = 0;
        for (int r = 0; r < k.n_used; r++) n_gone += place[(size_t)order[(size_t)r]] < 0;
        for (int r = 0; r < k.n_used; r++) {
            const size_t i = (size_t)(t * k.n_used + r);
            const int e = order[(size_t)r];
            same((long)i, expert[i], e);
            const bool is_kept = keeps && place[(size_t)e] < 0 && n_seen++ < n_kept[(size_t)n_gone];
            same((long)i, kept[i], keeps ? is_kept : -77);
            const double v = 1.5 * factor[(size_t)e] *
                             (k.normed || k.gating == TE_GATING_CHOSEN ? of[(size_t)r] / total : of[(size_t)r]);
            near((long)i, (double)w[i], v, (16 + sqrt((double)n)) * EPS * fabs(v) + 1e-30);
            const bool is_there = place[(size_t)e] >= 0 || is_kept;
            missing += !is_there;
            uses[(size_t)e] += 2;
            if (!k.publish) continue;
            float bits;
            memcpy(&bits, &w[i], 4);
            uint32_t as_word;
            memcpy(&as_word, &w[i], 4);
            is_true(words[2 * i] == ((uint64_t)42 << 32 | (is_there ? UINT32_MAX : (uint32_t)e)), "another word: who");
            is_true(words[2 * i + 1] == ((uint64_t)42 << 32 | as_word), "another word: the weight");
        }
    }
    for (size_t i = n_routes; i < n_routes + 8; i++) same((long)i, expert[i], -77);
    for (size_t i = n_routes; i < n_routes + 8; i++) same((long)i, kept[i], -77);
    same(0, host_of(op.n_missing, 1)[0], missing);
    is_true(host_of(op.uses, (size_t)n) == uses, "uses are wrong");
    OK(api->host_free(dev, shared));
    for (const void *p : {(const void *)op.score, (const void *)op.choice_b, (const void *)op.factor,
                          (const void *)op.place, (const void *)op.expert, (const void *)op.n_kept,
                          (const void *)op.kept, (const void *)op.uses, (const void *)op.n_missing, (const void *)base})
        OK(api->free(dev, (void *)p));
    weight.free();
}

/* Scores that are no numbers come last, and a token's experts are different all the same. */
static void check_route_of_no_numbers(int n, int n_group) {
    AT("route of no numbers, %d experts, %d groups", n, n_group);
    const int n_used = 12;
    std::vector<float> score((size_t)n, NAN);
    score[40] = 1;
    score[7] = 2;
    te_route_args op = {};
    op.score = device_of(score);
    op.ld_score = (size_t)n;
    op.n_tok = 1;
    op.n_expert = n;
    op.n_used = n_used;
    op.n_group = op.n_group_used = n_group;
    op.gating = TE_GATING_SIGMOID;
    op.scale = 1;
    op.place = device_of(std::vector<int32_t>((size_t)n, 0));
    op.expert = device_of(std::vector<int32_t>(n_used, -77));
    result weight(n_used);
    op.weight = weight.data();
    OK(api->route(dev, &op));
    const std::vector<int32_t> expert = host_of(op.expert, n_used);
    same(0, expert[0], 7);
    same(1, expert[1], 40);
    for (int r = 2; r < n_used; r++) same(r, expert[(size_t)r], r < 9 ? r - 2 : r - 1); // in order, without 7
    for (const void *p : {(const void *)op.score, (const void *)op.place, (const void *)op.expert})
        OK(api->free(dev, (void *)p));
    weight.free();
}

static void check_routes() {
    check_route_of_no_numbers(60, 1);
    check_route_of_no_numbers(512, 1);
    check_route_of_no_numbers(64, 2);
    for (te_gating gating : {TE_GATING_SOFTMAX, TE_GATING_SIGMOID, TE_GATING_CHOSEN})
        for (int bias = 0; bias < 2; bias++)
            for (int normed = 0; normed < 2; normed++)
                for (int n_tok : {1, 3, 8, 100}) {
                    const bool publish = n_tok <= 8;
                    check_route_case({n_tok, 128, 8, 1, 1, gating, normed != 0, bias != 0, publish});
                    check_route_case({n_tok, 60, 4, 1, 1, gating, normed != 0, bias != 0, publish});
                    check_route_case({n_tok, 256, 8, 8, 4, gating, normed != 0, bias != 0, publish});
                    check_route_case({n_tok, 1, 1, 1, 1, gating, normed != 0, false, false});
                }
    check_route_case({5, 8, 8, 0, 0, TE_GATING_SOFTMAX, true, false, true});
    check_route_case({3, 512, 40, 1, 1, TE_GATING_SIGMOID, true, true, true});
    check_route_case({2, 4096, 17, 32, 5, TE_GATING_SIGMOID, false, true, true});
    check_route_case({9, 200, 50, 1, 1, TE_GATING_SOFTMAX, false, false, true});
    check_route_case({3, 64, 6, 64, 8, TE_GATING_SIGMOID, true, true, false});
}
