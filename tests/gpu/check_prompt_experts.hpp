// check_prompt_experts.hpp - experts of many tokens against doubles.
#pragma once
#include "check_prompt_attention.hpp"
#include "expert_cases.hpp"

struct prompt_expert_case {
    int type, down_type, n_tok, n_embd, n_ff, n_expert, n_used;
    te_activation act;
    bool bias;
    int n_ff_once, n_embd_once; // 0: all
    float size = 1;
    bool by_neuron = false, uneven = false;
    bool rows = false;                    // input as rows, where few tokens' could be otherwise
    bool alone = false, on_input = false; // alone: no gate; on_input: weights are of the input
};

constexpr int FEW_EXPERTS_TOK = 192; // tokens whose experts' rows are read as they are, at most

// Whether the input is rows whatever the number of tokens.
static bool rows_of(const prompt_expert_case &k) { return k.rows || k.alone || k.on_input; }

static void check_prompt_experts_case(const prompt_expert_case &k) {
    if (!is_wanted(k.type)) return;
    AT("experts %s, %s, %d tokens, %d of %d of %d neurons (%d at once), %d columns (%d), act %d, bias %d, size %g, "
       "by neuron %d, uneven %d, rows %d, alone %d, on_input %d",
       te_type_get(k.type)->name, te_type_get(k.down_type)->name, k.n_tok, k.n_used, k.n_expert, k.n_ff, k.n_ff_once,
       k.n_embd, k.n_embd_once, (int)k.act, k.bias, (double)k.size, k.by_neuron, k.uneven, k.rows, k.alone, k.on_input);
    const int type = rows_of(k) ? -1 : k.type;
    const floats x(k.n_tok, k.n_embd, k.size);
    const std::vector<int32_t> expert = (k.uneven ? uneven_routes : some_routes)(k.n_tok, k.n_used, k.n_expert);
    const size_t n_routes = expert.size(), n_y = (size_t)k.n_tok * (size_t)k.n_embd;
    const std::vector<float> weight = normals(n_routes), gate_b = normals((size_t)(k.n_expert * k.n_ff)),
                             up_b = normals((size_t)(k.n_expert * k.n_ff)),
                             down_b = normals((size_t)(k.n_expert * k.n_embd)), before = normals(n_y);
    // Those that are there, and the others in two batches, as a program does it.
    some_places s = places_new(k.n_expert, false);
    int n_gone = 0;
    for (int32_t p : s.place) n_gone += p < 0;
    struct batch {
        some_places s;
        bool missing;
        matrix gate, up, down;
    };
    std::vector<batch> batches;
    auto put = [&](bool missing, int first, int n) {
        batch b = {s, missing, {}, {}, {}};
        b.s.first = first;
        b.s.n = n;
        b.gate = expert_matrix(k.type, k.n_ff, k.n_embd, b.s, missing);
        b.up = expert_matrix(k.type, k.n_ff, k.n_embd, b.s, missing);
        b.down = k.by_neuron ? expert_matrix(k.down_type, k.n_ff, k.n_embd, b.s, missing)
                             : expert_matrix(k.down_type, k.n_embd, k.n_ff, b.s, missing);
        batches.push_back(b);
    };
    if (s.n) put(false, 0, s.n);
    if (n_gone) put(true, 0, (n_gone + 1) / 2);
    if (n_gone > 1) put(true, (n_gone + 1) / 2, n_gone / 2);
    te_cuda_prompt_experts op = {};
    op.of.n_expert = k.n_expert;
    op.of.n_used = k.n_used;
    op.of.n_ff = k.n_ff;
    if (k.bias) {
        if (!k.alone) op.of.gate_b = device_of(gate_b);
        op.of.up_b = device_of(up_b);
        op.of.down_b = device_of(down_b);
    }
    op.of.place = device_of(s.place);
    op.of.act = k.act;
    op.of.on_input = k.on_input;
    op.of.threshold = k.act == TE_RELU ? 0.05f : 0;
    op.of.counts = device_of(std::vector<uint32_t>(3, 0));
    op.n_ff_once = k.n_ff_once ? k.n_ff_once : k.n_ff;
    op.n_embd_once = k.n_embd_once ? k.n_embd_once : k.n_embd;
    const size_t n_embd = (size_t)k.n_embd, widest = up_to((size_t)std::max(op.n_ff_once, op.n_embd_once), 4);
    std::vector<double> seen; // the input of all tokens
    const std::vector<float> to_bias = normals((size_t)k.n_embd);
    const size_t ld_add = n_embd + 4;
    // What these tokens alone give, in this order; so many times.
    auto run = [&](const std::vector<int> &token, int times) {
        const int n = (int)token.size();
        floats of_x(n, k.n_embd);
        std::vector<int32_t> who;
        std::vector<float> weights, start(8, CANARY), adds;
        for (int i = 0; i < n; i++) {
            const size_t t = (size_t)token[(size_t)i], used = (size_t)k.n_used;
            std::copy_n(&x.v[t * x.ld], x.ld, &of_x.v[(size_t)i * x.ld]);
            who.insert(who.end(), expert.begin() + (ptrdiff_t)(t * used), expert.begin() + (ptrdiff_t)((t + 1) * used));
            weights.insert(weights.end(), weight.begin() + (ptrdiff_t)(t * used),
                           weight.begin() + (ptrdiff_t)((t + 1) * used));
            start.insert(start.end(), n_embd, NAN); // what is not added to is not read
            adds.insert(adds.end(), before.begin() + (ptrdiff_t)(t * n_embd),
                        before.begin() + (ptrdiff_t)((t + 1) * n_embd));
            adds.insert(adds.end(), ld_add - n_embd, NAN);
        }
        te_merge_args to = {}; // with bias the first call does this merge, too
        to.n_tok = n;
        to.cols = k.n_embd;
        to.bias = device_of(to_bias);
        to.add = device_of(adds);
        to.ld_add = ld_add;
        to.ldy = n_embd;
        start.insert(start.end(), 8, CANARY);
        OK(api->upload(dev, of_x.p, of_x.v.data(), 4 * of_x.v.size()));
        finish();
        // Products of matrices take more tokens in tiles, of some types.
        halves in = halves_new(n, k.n_embd, n <= FEW_EXPERTS_TOK ? type : -1, std::min(n, (int)TE_CUDA_WIDE_TOK));
        in.h.matrices = 0;
        te_cuda_halve half = {};
        half.x = of_x.p;
        half.ldx = of_x.ld;
        half.n_tok = n;
        half.cols = k.n_embd;
        half.to = in.h;
        OK(api->halve(dev, &half));
        if (n == k.n_tok) {
            in.read();
            if (seen.empty())
                for (int t = 0; t < n; t++)
                    for (int c = 0; c < k.n_embd; c++) seen.push_back(in.at(t, c));
        }
        const bool few = n > TE_CUDA_MAX_TOK && n <= FEW_EXPERTS_TOK && !rows_of(k);
        is_true((in.h.tiles > 0) == few, "another form");
        const bool own = few && !k.by_neuron, as_floats = own && k.n_embd % 3 != 0; // either form, whatever is faster
        halves h = halves_new((int)who.size(), op.n_ff_once, own && !as_floats ? k.down_type : -1,
                              std::min(n, (int)TE_CUDA_WIDE_TOK));
        const size_t n_hidden = as_floats ? who.size() * up_to((size_t)op.n_ff_once, 4) : 0;
        result hidden(n_hidden);
        op.hidden = n_hidden ? hidden.data() : nullptr;
        h.h.matrices = 0;
        float *y = device_of(start);
        op.x = in.h;
        op.h = h.h;
        op.of.n_tok = n;
        op.of.expert = device_of(who);
        op.of.weight = device_of(weights);
        op.of.y = to.y = y + 8;
        op.values = device_of(std::vector<float>(who.size() * widest + 4, NAN));
        std::vector<float> got;
        for (int turn = 0; turn < times; turn++) {
            OK(api->upload(dev, y, start.data(), start.size() * 4));
            OK(api->fill(dev, (void *)op.of.counts, 0, 12));
            finish();
            for (batch &b : batches) {
                if (!k.alone) op.of.gate = b.gate.m;
                op.of.up = b.up.m;
                (k.by_neuron ? op.of.down_t : op.of.down) = b.down.m;
                op.of.n_places = b.s.n;
                op.of.missing = b.missing;
                op.of.first = b.s.first;
                op.of.add = &b != &batches[0];
                op.of.merge = k.bias && !op.of.add ? &to : nullptr;
                const size_t words = api->prompt_experts_words(&op.of);
                op.lists = device_of(std::vector<int32_t>(words + 4, -5));
                OK(api->prompt_experts(dev, &op));
                const std::vector<int32_t> lists = host_of(op.lists, words + 4);
                for (size_t i = words; i < words + 4; i++) same((long)i, lists[i], -5);
                OK(api->free(dev, op.lists));
            }
            const std::vector<float> now = host_of(y, start.size());
            if (turn) same_bits(got.data(), now.data(), 4 * now.size(), "a repeat gives other bits");
            got = now;
        }
        for (size_t i = 0; i < 8; i++) {
            same((long)i - 8, (double)got[i], (double)CANARY);
            same((long)(got.size() - 8 + i), (double)got[got.size() - 8 + i], (double)CANARY);
        }
        same(0, host_of(op.of.counts, 3)[0], (double)who.size() * k.n_ff);
        for (const void *p : {(const void *)op.of.expert, (const void *)op.of.weight, (const void *)y,
                              (const void *)op.values, (const void *)to.bias, (const void *)to.add})
            OK(api->free(dev, (void *)p));
        (void)hidden.get(); // and nothing around it was written
        hidden.free();
        in.free();
        h.free();
        of_x.free();
        return std::vector<float>(got.begin() + 8, got.end() - 8);
    };
    std::vector<int> all, some;
    for (int t = 0; t < k.n_tok; t++) all.push_back(t);
    const bool few = k.n_tok > TE_CUDA_MAX_TOK && k.n_tok <= FEW_EXPERTS_TOK && !rows_of(k);
    const std::vector<float> got = run(all, few ? 4 : 2);
    // A token's bits depend neither on the others nor on their order.
    if (few) {
        for (int n : {k.n_tok, TE_CUDA_MAX_TOK + 1}) {
            some.assign(all.rbegin(), all.rbegin() + n);
            const std::vector<float> other = run(some, 1);
            for (int i = 0; i < n; i++)
                same_bits(&other[(size_t)i * n_embd], &got[(size_t)some[(size_t)i] * n_embd], 4 * n_embd,
                          "beside other tokens a token has other bits");
        }
    }
    // Of some tokens. Errors of factors that are rounded to F16 are independent: six times what such make. Of few tokens
    // those of blocks of weights come besides; of more, weights are made as floats and rounded once. Of down hidden values are
    // rounded as weights are.
    const double f16 = 6 * 0x1p-11;
    for (int t = 0; t < k.n_tok; t += k.n_tok > 24 ? 1 + (int)(random_word() % (unsigned)(k.n_tok / 12)) : 1) {
        std::vector<double> want((size_t)k.n_embd, 0), limit((size_t)k.n_embd, 0);
        for (int c = 0; c < k.n_embd && k.bias; c++)
            want[(size_t)c] = (double)before[(size_t)t * n_embd + (size_t)c] + (double)to_bias[(size_t)c];
        for (int r = 0; r < k.n_used; r++) {
            const size_t i = (size_t)(t * k.n_used + r);
            const int e = expert[i];
            const batch *b = nullptr;
            for (const batch &c : batches)
                if (c.s.at(e, c.missing) >= 0) b = &c;
            const int at = b->s.at(e, b->missing);
            std::vector<double> hv, hl;
            double most = 0;
            for (int j = 0; j < k.n_ff; j++) {
                double v[2] = {}, l[2] = {};
                for (int m = 0; m < 2; m++) {
                    const double *w = (m ? b->up : b->gate).row(at * k.n_ff + j);
                    double squares = 0, size = 0, blocks = 0; // of few tokens factors are rounded before weights
                    for (int c = 0; c < k.n_embd; c++) {
                        const double p = w[c] * seen[(size_t)t * n_embd + (size_t)c];
                        v[m] += p;
                        squares += p * p;
                        size += fabs(p);
                    }
                    if (few) blocks = (m ? b->up : b->gate).block_squares(at * k.n_ff + j, &seen[(size_t)t * n_embd]);
                    l[m] = f16 * sqrt((squares + blocks) / 3) + 0x1p-18 * size;
                    if (k.on_input) {
                        v[m] *= (double)weight[i];
                        l[m] *= fabs((double)weight[i]);
                    }
                    if (k.bias) v[m] += (double)(m ? up_b : gate_b)[(size_t)(e * k.n_ff + j)];
                }
                const double threshold = (double)op.of.threshold, a = activation(k.act, threshold, v[0]);
                double la = 1.2 * l[0];
                if (k.act == TE_RELU && fabs(v[0] - threshold) <= l[0]) la += threshold;
                if (k.act == TE_DRELU) v[1] = fmax(v[1], 0);
                if (k.act == TE_CLAMPED) v[1] = clamped_up(v[1]);
                if (k.alone) {
                    hv.push_back(activation(k.act, 0, v[1]));
                    hl.push_back((k.act == TE_RELU2 ? 2 * fabs(v[1]) + l[1] : 1.2) * l[1]);
                    most = fmax(most, fabs(hv.back()));
                    continue;
                }
                hv.push_back(a * v[1]);
                hl.push_back(la * (fabs(v[1]) + l[1]) + fabs(a) * l[1]);
                most = fmax(most, fabs(hv.back()));
            }
            const double w = k.on_input ? 1 : (double)weight[i];
            for (int c = 0; c < k.n_embd; c++) {
                double v = 0, squares = 0, errors = 0, size = 0, blocks = 0;
                for (int j = 0; j < k.n_ff; j++) {
                    const double d = k.by_neuron ? b->down.row(at * k.n_ff + j)[c] : b->down.row(at * k.n_embd + c)[j];
                    const double p = d * hv[(size_t)j], q = d * hl[(size_t)j];
                    v += p;
                    squares += p * p;
                    errors += q * q;
                    size += fabs(p) + fabs(d) * most * 0x1p-8;
                }
                if (few && !k.by_neuron) blocks = b->down.block_squares(at * k.n_embd + c, hv.data());
                if (k.bias) v += (double)down_b[(size_t)(e * k.n_embd + c)];
                want[(size_t)c] += w * v;
                limit[(size_t)c] += fabs(w) * (f16 * sqrt((2 * squares + blocks) / 3) + sqrt(errors) + 0x1p-17 * size +
                                               8 * EPS * fabs(v));
            }
        }
        for (int c = 0; c < k.n_embd; c++) {
            const size_t at = (size_t)t * (size_t)k.n_embd + (size_t)c;
            near((long)at, (double)got[at], want[(size_t)c],
                 limit[(size_t)c] + 8 * EPS * fabs(want[(size_t)c]) + 1e-12);
        }
    }
    for (const void *p : {(const void *)op.of.gate_b, (const void *)op.of.up_b, (const void *)op.of.down_b,
                          (const void *)op.of.place, (const void *)op.of.counts})
        OK(api->free(dev, (void *)p));
    for (batch &b : batches) {
        b.gate.free();
        b.up.free();
        b.down.free();
    }
    OK(api->free(dev, x.p));
}

static void check_prompt_experts() {
    int turn = 0;
    for (int type : all_types) {
        const int unit = is_float(type) ? 4 : te_type_get(type)->block_weights;
        for (int shape = 0; shape < 4; shape++) {
            const int n_embd[] = {unit == 4 ? 68 : unit, 512, 256, 1024},
                      n_ff[] = {unit == 4 ? 20 : unit, 256, 768, 512}, n_tok[] = {9, 300, 40, 65},
                      n_expert[] = {4, 6, 16, 3};
            const te_activation acts[] = {TE_RELU, TE_DRELU, TE_SILU, TE_GELU, TE_GELU_TANH, TE_CLAMPED};
            turn++;
            check_prompt_experts_case({type, turn % 3 || n_ff[shape] % 32 ? type : TE_Q8_0, n_tok[shape], n_embd[shape],
                                       n_ff[shape], n_expert[shape], 2, acts[turn % 6], turn % 2 == 0,
                                       shape == 2 ? 256 : 0, shape == 1 ? 256 : 0});
        }
    }
    check_prompt_experts_case({TE_Q4_0, TE_Q4_0, 700, 256, 96, 3, 1, TE_SILU, false, 0, 0});
    check_prompt_experts_case({TE_F16, TE_F16, 33, 256, 64, 5, 4, TE_SILU, false, 0, 0, 3e3f});
    check_prompt_experts_case({TE_F32, TE_F32, 20, 96, 64, 1, 1, TE_SILU, true, 0, 64});
    check_prompt_experts_case({TE_MXFP4, TE_MXFP4, 70, 2880, 160, 7, 4, TE_CLAMPED, true, 0, 0}); // as gpt-oss has them
    check_prompt_experts_case({TE_MXFP4, TE_MXFP4, 70, 160, 2880, 7, 4, TE_CLAMPED, true, 0, 0});
    check_prompt_experts_case({TE_MXFP4, TE_MXFP4, 40, 160, 2880, 5, 4, TE_CLAMPED, true, 1024, 64});
    check_prompt_experts_case({TE_MXFP4, TE_MXFP4, 40, 192, 2880, 5, 4, TE_CLAMPED, true, 0, 0, 1, false, true});
    check_prompt_experts_case({TE_Q4_K, TE_Q6_K, 40, 256, 512, 5, 3, TE_SILU, false, 0, 0});
    for (int type : all_types) { // of few tokens: several tiles of an expert, more rows than blocks, columns in turns
        const int unit = is_float(type) ? 32 : te_type_get(type)->block_weights;
        for (int shape = 0; shape < 3; shape++) {
            const int n_tok[] = {64, 33, 16 + 17 * (turn % 11)}, n_embd[] = {unit * (unit < 256 ? 33 : 5), 256, 3328},
                      n_ff[] = {256, unit * (unit < 256 ? 33 : 5), unit};
            turn++;
            check_prompt_experts_case({type, type, n_tok[shape], n_embd[shape], n_ff[shape], 9, 1 + shape % 3 * 2,
                                       turn % 2 ? TE_SILU : TE_CLAMPED, turn % 3 == 0, 0, 0, 1, false, true});
        }
    }
    check_prompt_experts_case({TE_Q4_0, TE_Q4_0, 64, 1024, 768, 24, 8, TE_SILU, false, 0, 0, 1, false, true});
    for (int n_tok : {65, 96, 97, 128, 129, 160, 191, 192, 193}) // words of bits, whole and not
        check_prompt_experts_case({TE_Q4_0, n_tok % 2 ? TE_Q4_0 : TE_Q6_K, n_tok, 512, 256, 40, 6, TE_SILU,
                                   n_tok % 3 == 0, 0, 0, 1, false, n_tok % 32 == 0});
    check_prompt_experts_case({TE_F16, TE_F16, 130, 256, 64, 1, 1, TE_SILU, false, 0, 0}); // of all tokens
    check_prompt_experts_case({TE_Q8_0, TE_Q8_0, 190, 256, 64, 500, 3, TE_SILU, true, 0, 0});
    check_prompt_experts_case({TE_Q4_0, TE_Q8_0, 40, 512, 768, 16, 3, TE_SILU, true, 256, 256, 1, false, true});
    check_prompt_experts_case({TE_Q4_0, TE_F16, 40, 512, 96, 16, 3, TE_SILU, true, 0, 0, 1, false, true});
    check_prompt_experts_case({TE_F16, TE_F16, 48, 256, 64, 8, 4, TE_SILU, false, 0, 0, 3e3f, false, true});
    check_prompt_experts_case({TE_Q4_0, TE_Q4_0, 40, 512, 256, 16, 3, TE_SILU, true, 0, 0, 1, false, true, true});
    check_prompt_experts_case({TE_Q4_0, TE_Q4_0, 40, 512, 256, 16, 3, TE_RELU, true, 0, 0, 1, true, true});
    for (int type : all_types) { // down by neuron: any number of neurons
        const int unit = is_float(type) ? 4 : te_type_get(type)->block_weights;
        for (int shape = 0; shape < 4; shape++) {
            const int n_embd[] = {unit == 4 ? 68 : unit, 512, 256, 768}, n_ff[] = {37, 256, 768, 130},
                      n_tok[] = {9, 300, 40, 65}, n_expert[] = {4, 6, 16, 3};
            const te_activation acts[] = {TE_RELU, TE_DRELU, TE_SILU};
            turn++;
            check_prompt_experts_case({type, turn % 3 || n_embd[shape] % 32 ? type : TE_Q8_0, n_tok[shape],
                                       n_embd[shape], n_ff[shape], n_expert[shape], 2, acts[turn % 3], turn % 2 == 0,
                                       shape == 2   ? 256
                                       : shape == 3 ? 64
                                                    : 0,
                                       shape == 1 ? 256 : 0, 1, true});
        }
    }
    check_prompt_experts_case({TE_F16, TE_F16, 33, 256, 64, 5, 4, TE_SILU, false, 0, 0, 3e3f, true});
    for (int n_tok : {9, 40, 64, 70, 200}) { // weights of the input
        check_prompt_experts_case(
            {TE_Q4_0, TE_Q4_0, n_tok, 512, 96, 6, 1, TE_SILU, false, 0, 0, 1, false, n_tok < 65, false, false, true});
        check_prompt_experts_case(
            {TE_F16, TE_F16, n_tok, 256, 64, 7, 3, TE_SILU, false, 0, 0, 1, n_tok == 40, false, false, false, true});
    }
    for (int type : all_types) { // without a gate
        const int unit = is_float(type) ? 32 : te_type_get(type)->block_weights;
        for (int n_tok : {9, 33, 64, 70, 300}) {
            turn++;
            check_prompt_experts_case({type, type, n_tok, turn % 2 ? 512 : unit, turn % 2 ? unit : 768, 9, 3,
                                       turn % 3 ? TE_RELU2 : TE_SILU, turn % 4 < 2, turn % 2 ? 0 : 256, 0, 1, false,
                                       n_tok < 65, n_tok == 33 && turn % 2, true});
        }
    }
}
