// rows_panel.hpp - dot products of Q4_0 and Q8_0 for a few tokens: a panel of rows at a time, a lane of a register for each.
//
// A block of each row is brought into lanes once and then meets one token after the other, whose products want no adding
// up across a register and only one product of scales and one fma for all rows. Sums wait in memory: of each token one
// register for each lane of rows_q4_0.hpp or rows_q8_0.hpp, which has the blocks that are in that lane there, so that the
// bits are the same.
//
// How a panel is multiplied: on AVX-512 here, sixteen rows, a block of which stays in registers. What tokens bring comes
// 8 bytes at a time, in all lanes: else loads are what limits a Zen 5. On AVX2 in rows_tile.hpp.
//
// One thread of a Zen 5, 4096 columns, weights in memory, billions of products a second of 4, 8, 16 and 32 tokens, row by
// row and so: AVX-512 138, 137, 174, 177 and 153, 222, 267, 270.
#ifndef TE_ROWS_PANEL_HPP
#define TE_ROWS_PANEL_HPP

namespace {

template <int PASS> struct panel_tokens {
    int n;
    const char *act[PASS];
    float *y[PASS];
};
template <int ROWS> struct panel_of {
    const uint8_t *row[ROWS], *next[ROWS];
};

// The sums of rows c ... over lanes, as V::sum adds them.
template <class V, int ROWS> typename V::f32 add_lanes(const float (*sum)[ROWS], int c) {
    constexpr int L = V::lanes;
    typename V::f32 v[L];
    for (int l = 0; l < L; l++) v[l] = V::load(sum[l] + c);
    for (int half = L / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) v[l] = V::add(v[l], v[l + half]);
    return v[0];
}

// U: a format's rows, of which panels need
//     act, with start and d by lanes, and block_bytes, at whose beginning is the scale
//     at_q(b), high      where the first sixteen activations of block b are in an act, and how far behind them the others
//     lane(b)            of the kernel of one token, which has the sums of block b
//     unpack(row, at, w) a block of sixteen rows, as q4_0_panel_dot wants it
//     scales(row, at, d) of sixteen blocks, by blocks
template <class V, class U> struct block_panel {
    using one_by_one = batch<V, typename U::walk>;
    using act = typename U::act;
    using f32 = typename V::f32;
    using i32 = typename V::i32;
    static constexpr int L = V::lanes, chunk = U::chunk, block_bytes = U::block_bytes;
    static constexpr int ROWS = L, ABREAST = 4, PASS = 24, // tokens of a pass, whose sums stay in the first cache
        LEAST = 3;                                         // two are as fast one row at a time
    using tokens = panel_tokens<PASS>;
    using panel = panel_of<ROWS>;
    typedef uint16_t scales[L][L]; // of a chunk, by blocks
    typedef float sums[PASS][L][L];

    // Those of n blocks.
    static void load_scales(const uint8_t *const *row, size_t at, int n, scales &d) {
        if (n == L) return U::scales(row, at, d[0]);
        for (int b = 0; b < n; b++)
            for (int r = 0; r < L; r++) memcpy(&d[b][r], row[r] + at + b * block_bytes, 2);
    }

    // to += a block of the rows, w and their scales, times a token's, which is at these places of its activations.
    static void meet(const i32 *w, f32 scale, const char *x, size_t at_q, size_t at_lane, float *to) {
        const char *own = x + at_lane;
        const i32 whole = V::q4_0_panel_dot(w, x + at_q, x + at_q + U::high, own + offsetof(act, start));
        const f32 by = V::mul(scale, V::splat(((const float *)(own + offsetof(act, d)))[0]));
        V::store(to, V::fma(V::to_f32(whole), by, V::load(to)));
    }
    // sum += n blocks from column c on, c in whole chunks.
    __attribute__((flatten)) static void blocks(const panel &p, int32_t c, int n, const tokens &who, bool fetch,
                                                sums &sum) {
        const size_t at = (size_t)(c / 32) * block_bytes, acts = (size_t)(c / chunk) * sizeof(act);
        alignas(64) scales d;
        load_scales(p.row, at, n, d);
        i32 w[8], then[8]; // the next block is unpacked while tokens meet this one: 3 %
        U::unpack(p.row, at, then);
        for (int b = 0; b < n; b++) {
            if (fetch) prefetch<L * block_bytes>(p.next[b] + at);
            const int lane = U::lane(b);
            for (int k = 0; k < 8; k++) w[k] = then[k];
            if (b + 1 < n) U::unpack(p.row, at + (size_t)((b + 1) * block_bytes), then);
            const f32 scale = V::load_f16(d[b]);
            const size_t at_q = acts + offsetof(act, q) + (size_t)U::at_q(b),
                         at_lane = acts + sizeof(int32_t) * (size_t)lane;
            float *to = sum[0][lane];
            int t = 0; // four of them in a turn of the loop: 10 %
            for (; t + ABREAST <= who.n; t += ABREAST, to += ABREAST * L * L) TE_EACH_ROW(ABREAST) {
                    meet(w, scale, who.act[t + r], at_q, at_lane, to + r * L * L);
                    asm volatile("" ::: "memory"); // or gcc mixes them, and runs out of registers
                }
            for (; t < who.n; t++, to += L * L) meet(w, scale, who.act[t], at_q, at_lane, to);
        }
    }
    static void dot_panel(const panel &p, int32_t cols, const tokens &who, bool fetch) {
        alignas(64) sums sum;
        memset(sum, 0, sizeof sum[0] * (size_t)who.n);
        for (int32_t c = 0; c < cols; c += chunk) blocks(p, c, cols - c < chunk ? (cols - c) / 32 : L, who, fetch, sum);
        for (int t = 0; t < who.n; t++) V::store(who.y[t], add_lanes<V, L>(sum[t], 0));
    }
};

// P: ROWS of a panel, LEAST and PASS, the fewest tokens for which it pays and those that it meets at a time, dot_panel;
// one_by_one has what is no panel.
template <class V, class P> struct panel_rows {
    using one_by_one = typename P::one_by_one;
    static constexpr int ROWS = P::ROWS, LEAST = P::LEAST, TILE = 4;
    static_assert(P::PASS % TILE == 0, "a pass is whole tiles");

    // Whether the ROWS rows from place i of the list on are wanted by the same tokens, enough of them.
    static bool is_panel(te_rows rows, te_tokens who, int32_t i) {
        if (i + ROWS > rows.n) return false;
        if (!who.bits) return who.n >= LEAST;
        for (int r = 1; r < ROWS; r++)
            if (who.bits[i + r] != who.bits[i]) return false;
        return __builtin_popcount(who.bits[i]) >= LEAST;
    }
    static void dot(const te_mat *m, te_rows rows, te_ahead ahead, te_tokens who, const void *acts, size_t stride,
                    float *y, size_t ldy) {
        for (int32_t i = 0, end; i < rows.n; i = end) {
            for (end = i; end < rows.n && !is_panel(rows, who, end); end++) {
            }
            if (end > i) {
                const te_tokens some = {who.bits ? who.bits + i : nullptr, who.n};
                one_by_one::dot(m, te_rows_part(rows, i, end), ahead, some, acts, stride, y + i, ldy);
                continue;
            }
            end = i + ROWS;
            const typename batch_rows<V>::following next = {m, rows, ahead, 0};
            typename P::panel p;
            for (int r = 0; r < ROWS; r++) {
                p.row[r] = row_start(m, rows, i + r);
                p.next[r] = next.of(i + r, ROWS, p.row[r]);
            }
            // Passes of as many tokens each, as far as whole tiles allow: 32 are 16 and 16.
            const int n_who = who.bits ? __builtin_popcount(who.bits[i]) : who.n,
                      n_passes = (n_who + P::PASS - 1) / P::PASS,
                      each = ((n_who + n_passes - 1) / n_passes + TILE - 1) / TILE * TILE;
            typename P::tokens some = {};
            bool fetch = true;
            for (int32_t t = 0; t < who.n; t++) {
                if (te_wants(who, i, t)) {
                    some.act[some.n] = (const char *)acts + stride * (size_t)t;
                    some.y[some.n++] = y + ldy * (size_t)t + i;
                }
                if (some.n < each && (t + 1 < who.n || some.n == 0)) continue;
                P::dot_panel(p, m->cols, some, fetch);
                some.n = 0;
                fetch = false;
            }
        }
    }
    static void axpy(const te_mat *m, te_rows rows, te_ahead ahead, te_tokens who, const float *a, size_t lda,
                     float *acc, size_t stride) {
        one_by_one::axpy(m, rows, ahead, who, a, lda, acc, stride);
    }
};
} // namespace

#endif
