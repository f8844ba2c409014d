// rows_tile.hpp - AVX2's dot products for a few tokens: sixteen rows, a lane for each, by four tokens at a time.
//
// A chunk of the rows, eight units of 32 weights, is unpacked once into the first cache, four bytes of a row to a lane, and
// then meets the tokens in tiles, whose sums stay in registers for a unit: a load of weights serves four tokens, one of a
// token's bytes both registers of rows, and nothing is added up across a register. Sums of floats wait in memory as in
// rows_panel.hpp.
//
// One thread of a Zen 5, Q4_0, billions of products a second of 4, 8, 16 and 32 tokens, 4096 columns, weights in memory:
// eight rows by one token 102, 125, 139 and 143, so 112, 138, 154 and 161; with AVX-VNNI 116, 144, 161 and 169, so 125, 156,
// 177 and 188. A unit of eight rows and one token takes 6 cycles, of which 5.5 are multiplications (VNNI 5.1 and 5),
// unpacking 11. Zen 4: docs/performance/notes.md.
#ifndef TE_ROWS_TILE_HPP
#define TE_ROWS_TILE_HPP

namespace {

// U: a format's rows in lanes.
//     act, chunk               activations of a chunk, with d[lane]; its weights: 256
//     at_q(u), step(k)         where the 32 activations of unit u are in an act, and behind that the k-th four of them
//     lane(u)                  of the kernel of one token, which has the sums of unit u
//     has_minima, has_scales   whether a unit has a minimum; whether each sixteen have a scale, a whole number
//     words                    whether weights and activations are words there, two to a lane
//     parts                    that a unit's sum is made of, for which words do
//     unpacked                 q[u][g][k], bytes of L rows, of register g of rows; m[u], s[u][part] if there are any
//     unpack(row, at, n, g, w) n units of L rows, which are at byte `at`
//     scale(w, u, g)           of unit u
template <class V, class U> struct row_tile {
    using one_by_one = batch<V, typename U::walk>;
    using act = typename U::act;
    using f32 = typename V::f32;
    using i32 = typename V::i32;
    using unpacked = typename U::unpacked;
    static constexpr int L = V::lanes, chunk = U::chunk;
    static constexpr int G = 2, ROWS = G * L, PASS = 32, ABREAST = 4, // tokens of a pass and of a tile
        LEAST = 3;                                                    // two are as fast one row at a time
    using tokens = panel_tokens<PASS>;
    using panel = panel_of<ROWS>;
    typedef float sums[PASS][L][ROWS];

    // The products of a unit of the rows and of T tokens, whose activations begin at x, but for tile_end. start: the
    // tokens' integers.
    template <int T>
    static void products(const unpacked &w, int u, const char *const *x, const char *const *start, i32 (*sum)[T]) {
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            i32 own[T];
            TE_EACH(T) own[t] = V::four_of(x[t] + U::step(k));
            TE_EACH_ROW(G) {
                const i32 q = V::load_bytes(w.q[u][r][k]);
                TE_EACH(T) sum[r][t] = k ? V::tile_dot(sum[r][t], q, own[t]) : V::tile_begin(q, own[t], start[t]);
            }
        }
    }
    // The same of words, whose sums need no beginning.
    template <int T> static void products_of_words(const unpacked &w, int u, const char *const *x, i32 (*sum)[T]) {
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++) {
            i32 own[T];
            TE_EACH(T) own[t] = V::four_of(x[t] + U::step(k));
            TE_EACH_ROW(G) {
                const i32 q = V::load_bytes(w.q[u][r][k]);
                TE_EACH(T) {
                    const i32 two = V::words_times(q, own[t]);
                    sum[r][t] = k ? V::add_in_order(sum[r][t], two) : two;
                }
            }
        }
    }
    // The same in two parts.
    template <int T>
    static void products_in_parts(const unpacked &w, int u, const char *const *x, const char *const *acts,
                                  i32 (*sum)[T]) {
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            i32 words[G][T];
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                i32 own[T];
                TE_EACH(T) own[t] = V::four_of(x[t] + U::step(4 * part + k));
                TE_EACH_ROW(G) {
                    const i32 q = V::load_bytes(w.q[u][r][4 * part + k]);
                    TE_EACH(T) {
                        if (k > 0)
                            words[r][t] = V::words_dot(words[r][t], q, own[t]);
                        else if constexpr (U::has_scales)
                            words[r][t] = V::words_dot(V::four_of(acts[t] + U::at_start(u, part)), q, own[t]);
                        else
                            words[r][t] = V::words_begin(q, own[t]);
                    }
                }
            }
            TE_EACH_ROW(G) {
                i32 by = V::ones();
                if constexpr (U::has_scales) by = V::load_bytes(w.s[u][part] + r * L);
                TE_EACH(T) {
                    const i32 whole = V::words_times(words[r][t], by);
                    sum[r][t] = part ? V::add_i32(sum[r][t], whole) : whole;
                }
            }
        }
    }
    // to += unit u of the rows times T tokens'.
    template <int T> static void tile(const unpacked &w, int u, const char *const *acts, float *to) {
        static constexpr int32_t none = 0;
        const size_t at_lane = sizeof(float) * (size_t)U::lane(u);
        i32 sum[G][T];
        const char *x[T], *own[T]; // what is the unit's in an act, of its arrays of 32 and of one to a unit
        TE_EACH(T) {
            x[t] = acts[t] + offsetof(act, q) + U::at_q(u);
            own[t] = acts[t] + at_lane;
        }
        const char *start[T];
        TE_EACH(T) {
            if constexpr (U::has_minima || U::words)
                start[t] = (const char *)&none;
            else
                start[t] = own[t] + offsetof(act, start);
        }
        if constexpr (U::words)
            products_of_words<T>(w, u, x, sum);
        else if constexpr (U::parts == 2)
            products_in_parts<T>(w, u, x, acts, sum);
        else
            products<T>(w, u, x, start, sum);
        f32 scale[G];
        TE_EACH_ROW(G) scale[r] = U::scale(w, u, r);
        TE_EACH(T) {
            const f32 d = V::splat(*(const float *)(own[t] + offsetof(act, d)));
            TE_EACH_ROW(G) {
                float *y = to + t * L * ROWS + r * L;
                const i32 whole = U::words || U::parts == 2 ? sum[r][t] : V::tile_end(sum[r][t], start[t]);
                f32 all = V::fma(V::to_f32(whole), V::mul(scale[r], d), V::load(y));
                if constexpr (U::has_minima)
                    all =
                        V::fma(V::load(w.m[u] + r * L), V::splat(*(const float *)(own[t] + offsetof(act, minus))), all);
                V::store(y, all);
            }
        }
    }
    // What is fetched beside the units of a chunk, two rows beside each: the same chunk of the next panel, far ahead, and
    // the next chunk of this one, shortly before it is unpacked, for a part of what was fetched far ahead does not come. The
    // latter, Zen 4, weights in memory: 4, 8 and 16 tokens take 0.96, 0.95 and 0.96 of the time, 11,008 columns 0.96 to 0.97.
    struct ahead {
        const uint8_t *const *next, *const *own; // or null
        size_t at, at_own;
    };
    // sum += n units times T tokens'; at: of their act.
    template <int T>
    static void units(const unpacked &w, int n, const char *const *who, size_t at, float (*sum)[L][ROWS],
                      const ahead &fetch) {
        const char *acts[T];
        TE_EACH(T) acts[t] = who[t] + at;
        for (int u = 0; u < n; u++) {
            if (fetch.next) TE_EACH_ROW(G) prefetch<U::chunk_bytes>(fetch.next[G * u + r] + fetch.at);
            if (fetch.own) TE_EACH_ROW(G) prefetch<U::chunk_bytes, 3>(fetch.own[G * u + r] + fetch.at_own);
            tile<T>(w, u, acts, sum[0][U::lane(u)]);
        }
    }
    // One function: calls for each chunk take 4 %.
    __attribute__((flatten)) static void dot_panel(const panel &p, int32_t cols, const tokens &who, bool fetch) {
        alignas(64) sums sum;
        unpacked w;
        memset(sum, 0, sizeof sum[0] * (size_t)who.n);
        for (int32_t c = 0; c < cols; c += chunk) {
            const int n = cols - c < chunk ? (cols - c) / 32 : L;
            const size_t at = (size_t)(c / chunk) * U::chunk_bytes, at_act = (size_t)(c / chunk) * sizeof(act);
            for (int g = 0; g < G; g++) U::unpack(p.row + g * L, at, n, g, w);
            for (int t = 0, some; t < who.n; t += some) {
                const int left = who.n - t; // a tile of one token is slow
                some = left < ABREAST ? left : left == ABREAST + 1 ? ABREAST - 1 : ABREAST;
                const char *const *acts = who.act + t;
                const bool first = fetch && t == 0;
                const ahead beside = {first ? p.next : nullptr, first && c + chunk < cols ? p.row : nullptr, at,
                                      at + U::chunk_bytes};
                switch (some) {
                case 1:
                    units<1>(w, n, acts, at_act, sum + t, beside);
                    break;
                case 2:
                    units<2>(w, n, acts, at_act, sum + t, beside);
                    break;
                case 3:
                    units<3>(w, n, acts, at_act, sum + t, beside);
                    break;
                default:
                    units<ABREAST>(w, n, acts, at_act, sum + t, beside);
                    break;
                }
            }
        }
        for (int t = 0; t < who.n; t++)
            for (int g = 0; g < G; g++) V::store(who.y[t] + g * L, add_lanes<V, ROWS>(sum[t], g * L));
    }
};

template <class V> struct q4_0_lanes : q4_0_rows<V> {
    using K = q4_0_rows<V>;
    using i32 = typename V::i32;
    static constexpr int L = V::lanes, ROWS = 2 * L, parts = 1, chunk_bytes = K::bytes;
    static constexpr bool has_minima = false, has_scales = false, words = false;
    struct unpacked {
        alignas(32) uint8_t q[L][2][8][4 * L];
        alignas(32) uint16_t d[L][ROWS];
    };
    static constexpr int at_q(int u) { return 8 * L * (u / (L / 4)) + 16 * (u % (L / 4)); }
    static constexpr int step(int k) { return 4 * (k % 4) + (k < 4 ? 0 : 4 * L); }
    static constexpr int lane(int u) { return 4 * (u % (L / 4)) + u / (L / 4); }

    static typename V::f32 scale(const unpacked &w, int u, int g) { return V::load_f16(w.d[u] + g * L); }
    static void unpack(const uint8_t *const *row, size_t at, int n, int g, unpacked &w) {
        const uint8_t *p[L]; // in registers
        TE_EACH_ROW(L) p[r] = row[r] + at;
        for (int u = 0; u < n; u++) {
            i32 v[4], q[8];
            V::eight_halves(p, w.d[u] + g * L);
            V::transposed16(p, offsetof(te_block_q4_0, q), v);
            for (int k = 0; k < 4; k++) {
                q[k] = V::bits_and(v[k], 15);
                q[k + 4] = V::high4(v[k]);
            }
            for (int k = 0; k < 8; k++) V::store_i32(w.q[u][g][k], q[k]); // in order, or it takes a third longer
            TE_EACH_ROW(L) p[r] += K::block_bytes;
        }
    }
};
} // namespace

#endif
