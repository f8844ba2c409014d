// rows_units_wide.hpp - dot products of Q4_K, Q5_K and Q6_K on AVX-512: by units, as on AVX2 (rows_units.hpp), whose sums
// are whole numbers. A register's lanes are the units of two blocks.
//
// One to four tokens: a row at a time, products added up across registers, so that a lane is a unit. More: sixteen rows, a
// lane for each. A block of theirs is unpacked once into the first cache, four bytes of a row to a lane, and then meets the
// tokens, whose sums of floats wait in memory, one register for each lane of the other kernel. So the bits are the same.
//
// A Zen 4 (gcc 12), rows in the second cache, cycles for 256 weights and a token:
//     tokens                          1     2     4     8    16    32
//     Q4_K                         15.7  12.0   9.4   8.0   7.1   7.1
//     a scale for each register    16.5  11.9   9.8  10.1  10.1  10.1     (codec_k.hpp)
//     Q5_K                         21.3  15.0  11.3   8.7   7.4   7.4
//     so                           21.6  15.5  12.3  11.0  11.0  11.0
//     Q6_K                         22.1  16.4  14.7  10.3   8.6   8.6
//     so                           23.6  19.2  15.4  15.4  15.4  15.4
#ifndef TE_ROWS_UNITS_WIDE_HPP
#define TE_ROWS_UNITS_WIDE_HPP

namespace {

// The activations of two blocks. Units are in the order of V::units_of_two and V::units_of_sixteens.
template <bool has_minima> struct wide_act {
    alignas(64) int8_t q[2][2][2][64];  // of a block's even and odd units their first and second halves
    alignas(64) float d[16], minus[16]; // minus: the scale times the sum, negative
    static constexpr int at_q(int b, int u, int k) {
        return 256 * b + 128 * (u % 2) + 64 * (k / 4) + 16 * (u / 2) + k % 4 * 4;
    }
    static constexpr int lane(int b, int u) { return 4 * (u / 2) + 2 * b + u % 2; }
};
template <> struct wide_act<false> {
    alignas(64) int8_t q[2][4][64];
    alignas(64) int32_t start[2][4][16]; // -32 times the sums of each four
    alignas(64) int32_t sixteens[2][16]; // and of each sixteen
    alignas(64) float d[16];
    static constexpr int at_q(int b, int u, int k) { return 256 * b + 32 * u + 4 * k; }
    static constexpr int lane(int b, int u) { return 8 * b + 4 * (u % 2) + u / 2; }
};

// C: the codec, B: its block.
template <class V, class C, class B> struct wide_units : k_rows<V, C> {
    using walk = lane_walk<V, C, wide_units, k_rows<V, C>::sums>;
    using f32 = typename V::f32;
    using i32 = typename V::i32;
    static constexpr bool has_fifth = sizeof(B) == sizeof(te_block_q5_k), has_minima = C::n_minima > 0;
    using act = wide_act<has_minima>;
    static constexpr int chunk = 512, bytes = 2 * sizeof(B);
    static constexpr uint8_t nothing[2] = {};
    static_assert(V::lanes == 16, "two blocks' units");

    static size_t act_bytes(int32_t cols) { return (size_t)((cols + chunk - 1) / chunk) * sizeof(act); }
    static void act_pack(const float *x, int32_t cols, void *to) {
        act *a = (act *)to;
        for (int32_t c = 0; c < cols; c += chunk, a++) {
            memset(a, 0, sizeof *a);
            for (int b = 0; b < 2 && c + 256 * b < cols; b++) pack_block(x + c + 256 * b, b, *a);
        }
    }
    static void pack_block(const float *x, int b, act &a) {
        quantised own;
        for (int u = 0; u < 8; u++) {
            quantise32<V>(x + 32 * u, u, own);
            for (int half = 0; half < 2; half++)
                memcpy((int8_t *)a.q + act::at_q(b, u, 4 * half), own.q + 32 * u + 16 * half, 16);
            a.d[act::lane(b, u)] = own.d[u];
            if constexpr (has_minima) a.minus[act::lane(b, u)] = -own.d[u] * (float)own.sum[u];
        }
        if constexpr (!has_minima)
            for (int i = 0; i < 4; i++) {
                pack_start<V>(a.q[b][i], 32, a.start[b][i]);
                for (int l = 0; l < 16; l++) a.sixteens[b][4 * i + l / 4] += a.start[b][i][l];
            }
    }
    // sum[t] += n blocks . x[t]. They are unpacked once for all T.
    template <int T, int n = 2> static void mac(const uint8_t *p, const act *const *x, f32 *sum) {
        const B *b = (const B *)p;
        if constexpr (has_minima) {
            i32 w[2][2][2]; // as in act
            for (int k = 0; k < n; k++) codes(b[k], w[k]);
            f32 d, m, second = V::zero();
            if constexpr (n == 2) second = C::factors(p + sizeof(B));
            V::factors_of_two(C::factors(p), second, d, m);
            TE_EACH(T) {
                i32 s[2][2] = {{V::zero_i32(), V::zero_i32()}, {V::zero_i32(), V::zero_i32()}};
#pragma GCC unroll 2
                for (int k = 0; k < n; k++)
#pragma GCC unroll 2
                    for (int odd = 0; odd < 2; odd++)
                        s[k][odd] = V::dot2_u8(V::zero_i32(), w[k][odd][0], V::load_bytes(x[t]->q[k][odd][0]),
                                               w[k][odd][1], V::load_bytes(x[t]->q[k][odd][1]));
                const i32 whole = V::template units_of_two<has_fifth>(s[0][0], s[0][1], s[1][0], s[1][1]);
                sum[t] = V::fma(V::to_f32(whole), V::mul(d, V::load(x[t]->d)), sum[t]);
                sum[t] = V::fma(m, V::load(x[t]->minus), sum[t]);
            }
        } else {
            i32 part[2][T];
            TE_EACH(T) part[1][t] = V::zero_i32();
#pragma GCC unroll 2
            for (int k = 0; k < n; k++) {
                i32 w[4];
                six_bits<0>(b[k], w);
                six_bits<1>(b[k], w + 2);
                const i32 by = V::sixteen_scales(b[k].scales);
                TE_EACH(T) {
                    i32 s[4];
                    TE_EACH_ROW(4)
                    s[r] = V::dot_u8(V::load_bytes(x[t]->start[k][r]), w[r], V::load_bytes(x[t]->q[k][r]));
                    part[k][t] = V::scaled_sixteens(s, by);
                }
            }
            const f32 d = V::two_halves16(b[0].d, n == 2 ? b[1].d : nothing);
            TE_EACH(T) {
                const i32 whole = V::units_of_sixteens(part[0][t], part[1][t]); // less than 2^24
                sum[t] = V::fma(V::to_f32(whole), V::mul(d, V::load(x[t]->d)), sum[t]);
            }
        }
    }
    static void codes(const B &b, i32 (*w)[2]) {
        half_codes<0>(b, w);
        half_codes<1>(b, w);
    }
    template <int half> static void half_codes(const B &b, i32 (*w)[2]) {
        const i32 q = V::template blocks16<32, 16 * half>(b.q);
        w[0][half] = V::bits_and(q, 15);
        w[1][half] = V::high4(q);
        if constexpr (has_fifth) { // bit u of them belongs to unit u and is moved to bit 4
            w[0][half] = V::bits_or(w[0][half], V::template fields4<4, 2, 0, -2>(b.qh + 16 * half, 16));
            w[1][half] = V::bits_or(w[1][half], V::template fields4<3, 1, -1, -3>(b.qh + 16 * half, 16));
        }
    }
    // Units 4h ... 4h + 3, two to a register.
    template <int h> static void six_bits(const B &b, i32 *w) {
        const i32 q = V::load_bytes(b.q + 64 * h);
        w[0] = V::bits_or(V::bits_and(q, 15), V::template fields<4, 2>(b.qh + 32 * h, 0x30));
        w[1] = V::bits_or(V::high4(q), V::template fields<0, -2>(b.qh + 32 * h, 0x30));
    }
    // Of a row's last block.
    template <int T>
    __attribute__((noinline, flatten)) static void mac_part(const uint8_t *p, int32_t, const act *const *x, f32 *sum) {
        mac<T, 1>(p, x, sum);
    }
    static void dot(const te_mat *m, te_rows rows, te_ahead named, const void *acts, float *y) {
        using K = k_rows<V, C>;
        const typename K::following next(m, rows, named, 1);
        for (int32_t r = 0; r < rows.n; r++) {
            const typename K::walk_of row = K::walk_from(next, r, 1);
            const act *a = (const act *)acts;
            f32 sum = V::zero();
            size_t at = 0;
            for (; at + bytes <= next.row_bytes; at += bytes, a++) {
                row.template fetch<bytes>(at, K::near, next.row_bytes);
                mac<1>(row.w + at, &a, &sum);
            }
            if (at < next.row_bytes) mac_part<1>(row.w + at, 256, &a, &sum);
            y[r] = V::sum(sum);
        }
    }
};

// For rows_panel.hpp.
template <class V, class C, class B> struct wide_panel {
    using K = wide_units<V, C, B>;
    using one_by_one = batch<V, typename K::walk>;
    using act = typename K::act;
    using f32 = typename V::f32;
    using i32 = typename V::i32;
    static constexpr int L = V::lanes, ROWS = L, PASS = 24, ABREAST = 4, LEAST = 5; // tokens of a pass, of a tile
    static constexpr bool has_minima = K::has_minima;
    using W = units_in_lanes<V, B, 1>;
    using unpacked = typename W::unpacked;
    using tokens = panel_tokens<PASS>;
    using panel = panel_of<ROWS>;
    typedef float sums[L][ROWS]; // of a token

    static f32 splat(const float *p) { return V::splat(*p); }
    // + 4n products of unit u's weights, from the k-th four on.
    template <int T, int n> static void products(const unpacked &w, int u, int k, const int8_t *const *x, i32 *sum) {
#pragma GCC unroll 8
        for (int i = k; i < k + n; i++) {
            const i32 q = V::load_bytes(w.q[u][0][i]);
            TE_EACH(T) sum[t] = V::dot_u8(sum[t], q, V::four_of(x[t] + act::at_q(0, 0, i)));
        }
    }
    // to += unit u of block b of the rows times T tokens'.
    template <int T> static void unit(const unpacked &w, int b, int u, const act *const *x, sums *to) {
        const int lane = act::lane(b, u);
        const int8_t *q[T];
        TE_EACH(T) q[t] = (const int8_t *)x[t]->q + act::at_q(b, u, 0);
        f32 whole[T];
        if constexpr (has_minima) {
            i32 sum[T];
            TE_EACH(T) sum[t] = V::zero_i32();
            products<T, 8>(w, u, 0, q, sum);
            TE_EACH(T) whole[t] = V::to_f32(sum[t]);
        } else {
            i32 first[T], second[T];
            TE_EACH(T) {
                first[t] = V::four_of(&x[t]->sixteens[b][2 * u]);
                second[t] = V::four_of(&x[t]->sixteens[b][2 * u + 1]);
            }
            products<T, 4>(w, u, 0, q, first);
            products<T, 4>(w, u, 4, q, second);
            const f32 by[2] = {V::load(w.s[u][0]), V::load(w.s[u][1])};
            // Less than 2^24, so exact.
            TE_EACH(T) whole[t] = V::fma(V::to_f32(first[t]), by[0], V::mul(V::to_f32(second[t]), by[1]));
        }
        const f32 d = V::load(w.d[has_minima ? u : 0]);
        TE_EACH(T) {
            float *y = to[t][lane];
            f32 sum = V::fma(whole[t], V::mul(d, splat(x[t]->d + lane)), V::load(y));
            if constexpr (has_minima) sum = V::fma(V::load(w.m[u]), splat(x[t]->minus + lane), sum);
            V::store(y, sum);
        }
        asm volatile("" ::: "memory"); // or gcc mixes units, and runs out of registers
    }
    // next: the next panel's rows, or null, whose block at `at` is fetched, two rows' beside each unit.
    template <int T>
    static void block(const unpacked &w, int b, const act *const *x, sums *sum, const uint8_t *const *next, size_t at) {
        for (int u = 0; u < 8; u++) {
            if (next) TE_EACH_ROW(2) prefetch<sizeof(B)>(next[2 * u + r] + at);
            unit<T>(w, b, u, x, sum);
        }
    }
    __attribute__((flatten)) static void dot_panel(const panel &p, int32_t cols, const tokens &who, bool fetch) {
        alignas(64) sums sum[PASS];
        unpacked w;
        memset(sum, 0, sizeof sum[0] * (size_t)who.n);
        for (int32_t i = 0; i < cols / 256; i++) {
            const size_t at = (size_t)i * sizeof(B);
            W::unpack(p.row, at, 0, w);
            for (int t = 0, some; t < who.n; t += some) {
                const int left = who.n - t;
                some = left < ABREAST ? left : left == ABREAST + 1 ? ABREAST - 1 : ABREAST;
                const act *x[ABREAST];
                for (int k = 0; k < some; k++) x[k] = (const act *)who.act[t + k] + i / 2;
                const uint8_t *const *next = fetch && t == 0 ? p.next : nullptr;
                switch (some) {
                case 1:
                    block<1>(w, i % 2, x, sum + t, next, at);
                    break;
                case 2:
                    block<2>(w, i % 2, x, sum + t, next, at);
                    break;
                case 3:
                    block<3>(w, i % 2, x, sum + t, next, at);
                    break;
                default:
                    block<ABREAST>(w, i % 2, x, sum + t, next, at);
                    break;
                }
            }
        }
        for (int t = 0; t < who.n; t++) V::store(who.y[t], add_lanes<V, ROWS>(sum[t], 0));
    }
};
} // namespace

#endif
