// check_marks.hpp - the hand-over with the CPU: the side of a product, and marks of wanted rows.
#pragma once
#include "checks.hpp"

// A number of the hand-over on the device, and words in shared memory.
struct handover {
    uint32_t *base;
    te_ticket ticket;
    uint32_t number;
    uint64_t *words;
    explicit handover(size_t n_words) {
        base = device_of(std::vector<uint32_t>{(uint32_t)-3}); // numbers may wrap around
        ticket = {base, 10};
        number = 7;
        void *p;
        OK(api->host_alloc(dev, n_words * 8, &p));
        words = (uint64_t *)p;
        memset(p, 0xab, n_words * 8);
    }
    void set(size_t i, uint32_t value) const {
        __atomic_store_n(words + i, (uint64_t)number << 32 | value, __ATOMIC_RELEASE);
    }
    void free() const {
        finish();
        OK(api->free(dev, base));
        OK(api->host_free(dev, words));
    }
};
static uint32_t bits_of(float f) {
    uint32_t v;
    memcpy(&v, &f, 4);
    return v;
}

// ---- the side of a product ----

// The same side, made with the input of what follows: the bits of a product are those of what was kept.
static void check_prepared_side(te_linear_args op, const input &in, const std::vector<float> &kept, const handover &h) {
    const size_t n = kept.size(), n_bytes = api->prepared_bytes(op.product[0].w.type, in.cols),
                 rows = (size_t)op.product[0].w.n_rows, n_tok = (size_t)op.n_tok;
    result keep(n), y(n_tok * rows), again(n_tok * rows);
    te_cuda_prepare p = {};
    p.x = in.dx;
    p.ldx = in.ld;
    p.n_tok = op.n_tok;
    p.cols = in.cols;
    p.side = op.side;
    p.side.keep = keep.data();
    p.side_type = op.product[0].w.type;
    if (n_bytes) p.side_v = device_of(std::vector<uint8_t>(n_bytes, 0xff));
    memset(h.words, 0, (n + 2) * 8);
    OK(api->prepare(dev, &p));
    same_bits(kept, keep.get());
    for (size_t i = 0; i < n; i++)
        is_true(h.words[i + 1] == ((uint64_t)h.number << 32 | bits_of(kept[i])), "a word of a prepared side differs");
    is_true(h.words[0] == 0 && h.words[n + 1] == 0, "a word beside a prepared side's was written");
    if (n_bytes && in.cols % 4 == 0) {
        op.x = keep.data();
        op.ldx = (size_t)in.cols;
        op.side = {};
        op.n_products = 1;
        op.product[0].y = y.data();
        OK(api->linear(dev, &op));
        op.product[0].y = again.data();
        op.prepared = {p.side_v, p.side_type};
        OK(api->linear(dev, &op));
        same_bits(y.get(), again.get());
    }
    if (n_bytes) OK(api->free(dev, p.side_v));
    keep.free();
    y.free();
    again.free();
}

// The same results; a little otherwise where a product without a side takes lean.cu's kernel, which adds in another order.
static void same_without_side(int type, int n_tok, int cols, const std::vector<float> &alone,
                              const std::vector<float> &y) {
    if (type != TE_Q4_0 || n_tok > 2) {
        same_bits(alone, y);
        return;
    }
    float most = 0;
    for (float v : alone) most = std::max(most, fabsf(v));
    for (size_t i = 0; i < alone.size(); i++)
        near((long)i, (double)y[i], (double)alone[i], 4 * EPS * sqrt((double)cols) * (double)most);
}

static void check_side_case(int type, int cols, int n_tok, te_norm_kind kind, int n_products, int rows = 75) {
    AT("side %s %d columns, %d tokens, norm %d, %d products", te_type_get(type)->name, cols, n_tok, (int)kind,
       n_products);
    input in = input_new(n_tok, cols, kind, false);
    matrix a = matrix_new(type, rows, cols);
    const size_t n = (size_t)n_tok * (size_t)cols;
    result keep(n), y((size_t)n_tok * (size_t)rows), alone((size_t)n_tok * (size_t)rows);
    const handover h(n + 2);
    te_linear_args op = {};
    op.x = in.dx;
    op.ldx = in.ld;
    op.n_tok = n_tok;
    op.n_products = n_products;
    op.cols = cols;
    op.product[0].w = a.m;
    op.product[0].y = alone.data();
    op.product[0].ldy = (size_t)rows;
    if (n_products) OK(api->linear(dev, &op));
    op.product[0].y = y.data();
    op.side.norm = in.norm;
    op.side.keep = keep.data();
    op.side.publish = h.words + 1;
    op.side.ticket = h.ticket;
    OK(api->linear(dev, &op));
    const std::vector<float> got = keep.get();
    if (n_products) same_without_side(type, n_tok, cols, alone.get(), y.get());
    for (int t = 0; t < n_tok; t++)
        for (int c = 0; c < cols; c++) {
            const size_t i = (size_t)t * (size_t)cols + (size_t)c;
            const double v = in.of(t)[c];
            near((long)i, (double)got[i], v, kind == TE_NO_NORM ? 0 : 8 * EPS * (fabs(v) + 4));
            is_true(h.words[i + 1] == ((uint64_t)h.number << 32 | bits_of(got[i])), "a word is not what was kept");
        }
    is_true(h.words[0] == 0xababababababababull && h.words[n + 1] == h.words[0], "a word beside was written");
    op.side.keep = nullptr;
    memset(h.words, 0, (n + 2) * 8);
    OK(api->linear(dev, &op));
    finish();
    for (size_t i = 0; i < n; i++)
        is_true(h.words[i + 1] == ((uint64_t)h.number << 32 | bits_of(got[i])), "a word alone differs");
    result kept(n); // kept and not posted
    te_linear_args keeps = op;
    keeps.side.keep = kept.data();
    keeps.side.publish = nullptr;
    OK(api->linear(dev, &keeps));
    same_bits(got, kept.get());
    if (n_products) same_without_side(type, n_tok, cols, alone.get(), y.get());
    kept.free();
    check_prepared_side(op, in, got, h);
    h.free();
    a.free();
    keep.free();
    y.free();
    alone.free();
    in.free();
}

// ---- scores ----

// A threshold between two scores that are far apart; about one in six reaches it.
static float gap(std::vector<double> s) {
    std::sort(s.begin(), s.end());
    size_t best = s.size() * 3 / 4;
    for (size_t i = best; i + 1 < s.size() * 19 / 20; i++)
        if (s[i + 1] - s[i] > s[best + 1] - s[best]) best = i;
    return (float)((s[best] + s[best + 1]) / 2);
}

enum scorer { BY_NOTHING, BY_ROWS, BY_SIGNS };
static const char *scorers[] = {"all", "rows", "signs"};

// Who is wanted, by a predictor of random rows or of random signs. h: what signs are compared with.
struct predictor {
    te_scores op = {};
    matrix fc2;
    input z;
    scorer how;
    std::vector<void *> own;
    std::vector<char> on, doubt; // [n_tok][rows]; rounding may decide otherwise
    int rows;
    predictor(scorer kind, int type, int n_rows, int rank, int n_tok, const float *h, size_t ldh, int cols,
              const std::vector<float> &host_h)
        : how(kind), on((size_t)n_tok * (size_t)n_rows, 1), doubt(on.size(), 0), rows(n_rows) {
        std::vector<double> score(on.size());
        double limit = 0;
        if (how == BY_ROWS) {
            fc2 = matrix_new(type, rows, rank);
            z = input_new(n_tok, rank, TE_NO_NORM, !is_float(type));
            for (int t = 0; t < n_tok; t++)
                for (int j = 0; j < rows; j++) {
                    const sum s = product(fc2, j, z, t);
                    score[(size_t)t * (size_t)rows + (size_t)j] = s.v;
                    limit = fmax(limit, s.limit());
                }
            op.fc2 = fc2.m;
            op.z = z.dx;
            op.ldz = z.ld;
        } else if (how == BY_SIGNS) {
            const size_t n_words = (size_t)(cols + 63) / 64;
            std::vector<uint64_t> sign((size_t)rows * n_words, 0);
            for (int j = 0; j < rows; j++)
                for (int c = 0; c < cols; c++)
                    if (random_word() % 2) sign[(size_t)j * n_words + (size_t)c / 64] |= (uint64_t)1 << c % 64;
            for (int t = 0; t < n_tok; t++)
                for (int j = 0; j < rows; j++) {
                    int differ = 0;
                    for (int c = 0; c < cols; c++)
                        differ += (sign[(size_t)j * n_words + (size_t)c / 64] >> c % 64 & 1) !=
                                  (host_h[(size_t)t * ldh + (size_t)c] < 0);
                    score[(size_t)t * (size_t)rows + (size_t)j] = (double)((float)(cols - 2 * differ) / (float)cols);
                }
            uint64_t *p = device_of(sign);
            own.push_back(p);
            op.sign = p;
            op.h = h;
            op.ldh = ldh;
            op.cols = cols;
        } else {
            return;
        }
        std::vector<double> sorted = score;
        std::sort(sorted.begin(), sorted.end());
        // Signs are exact: one of the scores themselves.
        const float threshold = how == BY_SIGNS ? (float)sorted[sorted.size() * 5 / 6] : gap(score);
        for (size_t i = 0; i < on.size(); i++) {
            on[i] = score[i] >= (double)threshold;
            doubt[i] = how == BY_ROWS && fabs(score[i] - (double)threshold) <= limit;
        }
        float *p = device_of(std::vector<float>{threshold});
        own.push_back(p);
        op.threshold = p;
    }
    bool wanted(int t, int j) const { return on[(size_t)t * (size_t)rows + (size_t)j]; }
    void free() {
        if (how == BY_ROWS) {
            fc2.free();
            z.free();
        }
        for (void *p : own) OK(api->free(dev, p));
    }
};

static void check_marks_case(scorer how, int type, int rows, int n_tok) {
    AT("marks by %s, %s, %d rows, %d tokens", scorers[how], te_type_get(type)->name, rows, n_tok);
    const int cols = 333;
    input in = input_new(n_tok, cols, TE_NO_NORM, false, how == BY_SIGNS);
    predictor p(how, type, rows, 768, n_tok, in.dx, in.ld, cols, in.x);
    const int n_parts = api->mark_parts(dev), each = ((rows + n_parts - 1) / n_parts + 31) / 32, words = n_parts * each;
    const handover h((size_t)(n_tok * words) + 1);
    te_marks_args op = {};
    op.scores = p.op;
    op.n_rows = rows;
    op.n_tok = n_tok;
    op.publish = h.words;
    op.ticket = h.ticket;
    OK(api->marks(dev, &op));
    finish();
    for (int t = 0; t < n_tok; t++)
        for (int b = 0; b < n_parts; b++) {
            const int lo = (int)((int64_t)rows * b / n_parts), hi = (int)((int64_t)rows * (b + 1) / n_parts);
            for (int w = 0; w < each; w++) {
                uint32_t bits = 0, unsure = 0;
                for (int i = 0; i < 32 && lo + 32 * w + i < hi; i++) {
                    const size_t j = (size_t)(lo + 32 * w + i), at = (size_t)t * (size_t)rows + j;
                    bits |= (uint32_t)p.on[at] << i;
                    unsure |= (uint32_t)p.doubt[at] << i;
                }
                is_true(((h.words[(t * n_parts + b) * each + w] ^ ((uint64_t)h.number << 32 | bits)) &
                         ~(uint64_t)unsure) == 0,
                        "a word of marks is off");
            }
        }
    is_true(h.words[n_tok * words] == 0xababababababababull, "a word behind was written");
    h.free();
    p.free();
    in.free();
}

// A score that equals the threshold reaches it. Of a predictor whose middle is silent all scores are 0.
static void check_ties(int type, int n_tok) {
    AT("scores equal to the threshold, %s, %d tokens", te_type_get(type)->name, n_tok);
    const int cols = 1024, rows = 333, words = (rows + 31) / 32;
    const uint32_t all = (uint32_t)(rows * n_tok);
    auto bits_in = [](const auto &values) {
        uint32_t n = 0;
        for (auto v : values) n += (uint32_t)__builtin_popcount((uint32_t)v);
        return n;
    };
    matrix fc2 = matrix_new(type, rows, cols), up = matrix_new(type, rows, cols, 0.1f);
    input in = input_new(n_tok, cols, TE_NO_NORM, !is_float(type));
    float *z = device_of(std::vector<float>((size_t)n_tok * (size_t)cols, 0)), *zero = device_of(std::vector<float>{0});
    te_linear_args lin = {};
    lin.x = z;
    lin.ldx = (size_t)cols;
    lin.n_tok = n_tok;
    lin.n_products = 1;
    lin.product[0].w = fc2.m;
    lin.product[0].ld_mark = 4 * (size_t)words;
    uint8_t *mark = device_of(std::vector<uint8_t>(lin.product[0].ld_mark * (size_t)n_tok, 0));
    lin.product[0].mark = mark;
    OK(api->linear(dev, &lin));
    same(0, bits_in(host_of(mark, lin.product[0].ld_mark * (size_t)n_tok)), all);

    const int n_parts = api->mark_parts(dev);
    const size_t n_posted = (size_t)(n_tok * n_parts) * (size_t)(((rows + n_parts - 1) / n_parts + 31) / 32);
    const handover h(n_posted);
    te_marks_args marks = {};
    marks.scores.fc2 = fc2.m;
    marks.scores.z = z;
    marks.scores.ldz = (size_t)cols;
    marks.scores.threshold = zero;
    marks.n_rows = rows;
    marks.n_tok = n_tok;
    marks.publish = h.words;
    marks.ticket = h.ticket;
    OK(api->marks(dev, &marks));
    finish();
    same(1, bits_in(std::vector<uint64_t>(h.words, h.words + n_posted)), all);

    te_ffn_args ffn = {};
    ffn.x = in.dx;
    ffn.ldx = in.ld;
    ffn.n_tok = n_tok;
    ffn.up = ffn.down = up.m;
    ffn.act = TE_RELU;
    ffn.scores = marks.scores;
    ffn.ldh = (size_t)(rows + 3) / 4 * 4;
    ffn.h = device_new<float>(ffn.ldh * (size_t)n_tok);
    ffn.bits = device_new<uint32_t>((size_t)(n_tok * words));
    for (bool gated : {false, true}) {
        ffn.gate = gated ? up.m : te_mat();
        ffn.counts = device_of(std::vector<uint32_t>(3, 0));
        ffn.partial = device_new<float>((size_t)api->ffn_parts(dev, &ffn) * (size_t)(n_tok * cols));
        OK(api->ffn(dev, &ffn));
        same(2 + gated, host_of(ffn.counts, 3)[0], all);
        OK(api->free(dev, ffn.counts));
        OK(api->free(dev, ffn.partial));
    }
    h.free();
    fc2.free();
    up.free();
    in.free();
    for (void *p : {(void *)z, (void *)zero, (void *)mark, (void *)ffn.h, (void *)ffn.bits}) OK(api->free(dev, p));
}
