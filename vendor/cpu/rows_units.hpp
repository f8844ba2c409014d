// rows_units.hpp - dot products of Q4_K, Q5_K and Q6_K on AVX2, for one token and for two; rows_tile.hpp has those for
// more, and the rest is codec_k.hpp's.
//
// The products of a block are added up, by transposing, to one integer for each unit of 32, so that a lane is a unit: one
// conversion, one product of scales and one fma for all eight of them. The scales of Q6_K's sixteens, whole numbers too,
// are factors of the integers. Words do for the first sums: of eight products of weights of six bits, less 32, which
// come to 8 * 32 * 127 at the most, so that what runs over on the way comes back.
//
// One thread of a Zen 5, billions of products a second of 1, 4, 8, 16 and 32 tokens, 4096 columns, weights in memory, each
// register with its own scales (codec_k.hpp) and so: Q4_K 59, 87, 82, 85 and 85, now 59, 100, 115, 138 and 149; Q5_K 43, 74,
// 73, 74 and 75, now 45, 83, 109, 126 and 136; Q6_K 37, 53, 49, 51 and 52, now 47, 84, 111, 129 and 143.
#ifndef TE_ROWS_UNITS_HPP
#define TE_ROWS_UNITS_HPP

namespace {

// The activations of a block. has_start: with the words that sums of Q6_K begin with.
template <class V, bool has_start> struct units_act {
    alignas(64) int8_t q[8][32];
    alignas(32) float d[8], minus[8]; // minus: the scale times the sum, negative
};
template <class V> struct units_act<V, true> {
    alignas(64) int8_t q[8][32];
    alignas(32) float d[8];
    // -32 times the sums of the words of V::four_units
    int16_t start[2][16];
};

// Four units, u = 4h ... 4h + 3, of a block, a register each.
template <class V, int h> void four_units_of(const te_block_q4_k &b, typename V::i32 *q) {
    for (int i = 0; i < 2; i++) {
        const typename V::i32 v = V::load_bytes(b.q + 64 * h + 32 * i);
        q[2 * i] = V::bits_and(v, 15);
        q[2 * i + 1] = V::high4(v);
    }
}
template <class V, int h> void four_units_of(const te_block_q5_k &b, typename V::i32 *q) {
    constexpr int u = 4 * h; // bit u of the fifth bits belongs to unit u and is moved to bit 4
    const typename V::i32 v = V::load_bytes(b.q + 64 * h), w = V::load_bytes(b.q + 64 * h + 32);
    q[0] = V::bits_or(V::bits_and(v, 15), V::template fields<4 - u, 4 - u>(b.qh, 16));
    q[1] = V::bits_or(V::high4(v), V::template fields<3 - u, 3 - u>(b.qh, 16));
    q[2] = V::bits_or(V::bits_and(w, 15), V::template fields<2 - u, 2 - u>(b.qh, 16));
    q[3] = V::bits_or(V::high4(w), V::template fields<1 - u, 1 - u>(b.qh, 16));
}
template <class V, int h> void four_units_of(const te_block_q6_k &b, typename V::i32 *q) {
    const typename V::i32 v = V::load_bytes(b.q + 64 * h), w = V::load_bytes(b.q + 64 * h + 32);
    const uint8_t *high = b.qh + 32 * h;
    q[0] = V::bits_or(V::bits_and(v, 15), V::template fields<4, 4>(high, 0x30));
    q[1] = V::bits_or(V::bits_and(w, 15), V::template fields<2, 2>(high, 0x30));
    q[2] = V::bits_or(V::high4(v), V::template fields<0, 0>(high, 0x30));
    q[3] = V::bits_or(V::high4(w), V::template fields<-2, -2>(high, 0x30));
}

// C: the codec, B: its block.
template <class V, class C, class B> struct units_walk;
template <class V, class C, class B> struct units_rows : k_rows<V, C> {
    using walk = units_walk<V, C, B>;
    using codec = C;
    using block = B;
    using f32 = typename V::f32;
    using i32 = typename V::i32;
    static constexpr bool has_minima = C::n_minima > 0;
    using act = units_act<V, !has_minima>;
    static constexpr int chunk = 256, bytes = sizeof(B);
    static_assert(V::lanes == 8, "a lane is a unit");

    static size_t act_bytes(int32_t cols) { return (size_t)(cols / chunk) * sizeof(act); }
    static void act_pack(const float *x, int32_t cols, void *to) {
        act *a = (act *)to;
        for (int32_t c = 0; c < cols; c += chunk, a++) {
            quantised own;
            for (int u = 0; u < 8; u++) quantise32<V>(x + c + 32 * u, u, own);
            memcpy(a->q, own.q, sizeof a->q);
            memcpy(a->d, own.d, sizeof a->d);
            if constexpr (has_minima) {
                for (int u = 0; u < 8; u++) a->minus[u] = -own.d[u] * (float)own.sum[u];
            } else {
                for (int i = 0; i < 32; i++) { // word i: of unit i / 16 * 4 + i % 8 / 2, its sixteen i / 8 % 2
                    const int8_t *q = a->q[i / 16 * 4 + i % 8 / 2] + i / 8 % 2 * 16 + 2 * (i % 2);
                    int sum = 0;
                    for (int k = 0; k < 16; k += 4) sum += q[k] + q[k + 1];
                    a->start[i / 16][i % 16] = (int16_t)(-32 * sum);
                }
            }
        }
    }
    // sum[t] += a block . x[t]. Its units are unpacked once for all T.
    template <int T> static void mac(const uint8_t *p, const act *const *x, f32 *sum) {
        const B &b = *(const B *)p;
        i32 q[4], first[T];
        four_units_of<V, 0>(b, q);
        TE_EACH(T) first[t] = V::four_units(q, x[t]->q[0]);
        four_units_of<V, 1>(b, q);
        if constexpr (has_minima) {
            const typename V::w16 f = C::factors(p);
            TE_EACH(T) {
                const i32 whole = V::eight_units(first[t], V::ones(), V::four_units(q, x[t]->q[4]), V::ones());
                sum[t] = V::fma(V::to_f32(whole), V::mul(V::low8(f), V::load(x[t]->d)), sum[t]);
                sum[t] = V::fma(V::high8(f), V::load(x[t]->minus), sum[t]);
            }
        } else {
            const f32 d = V::splat_half(b.d);
            i32 s[2];
            V::unit_scales(b.scales, s);
            TE_EACH(T) {
                const i32 low = V::add_words(first[t], V::load_bytes(x[t]->start[0])),
                          high = V::add_words(V::four_units(q, x[t]->q[4]), V::load_bytes(x[t]->start[1]));
                const i32 whole = V::eight_units(low, s[0], high, s[1]); // less than 2^24
                sum[t] = V::fma(V::to_f32(whole), V::mul(d, V::load(x[t]->d)), sum[t]);
            }
        }
    }
    static void dot(const te_mat *m, te_rows rows, te_ahead named, const void *acts, float *y) {
        using K = k_rows<V, C>;
        const typename K::following next(m, rows, named, 1);
        for (int32_t r = 0; r < rows.n; r++) {
            const typename K::walk_of row = K::walk_from(next, r, 1);
            const act *a = (const act *)acts;
            f32 sum = V::zero();
            for (size_t at = 0; at < next.row_bytes; at += bytes, a++) {
                row.template fetch<bytes>(at, K::near, next.row_bytes);
                mac<1>(row.w + at, &a, &sum);
            }
            y[r] = V::sum(sum);
        }
    }
};

// For rows_batch.hpp.
template <class V, class C, class B> struct units_walk : block_walk<V, C, k_rows<V, C>::sums> {
    using K = units_rows<V, C, B>;
    using act = typename K::act;
    static constexpr int sums = 1;
    // 24 KiB of eight tokens' activations
    static constexpr int32_t of_eight = 3072 / (int)sizeof(act) * K::chunk;
    static int32_t columns(int32_t n_tok) { return of_eight * (n_tok <= 2 ? 4 : n_tok <= 4 ? 2 : 1); }

    template <int T, int R>
    static void dot(const uint8_t *const *row, const char *const *packed, int32_t at, int32_t n, bool,
                    typename V::f32 (*sum)[sums], const uint8_t *const *following) {
        const uint8_t *w = *row, *next = *following;
        const act *x[T];
        TE_EACH(T) x[t] = (const act *)packed[t] + at / K::chunk;
        for (; n > 0; n -= K::chunk, w += K::bytes, next += K::bytes) {
            prefetch<K::bytes>(next);
            K::template mac<T>(w, x, *sum);
            TE_EACH(T) x[t]++;
        }
    }
    static float total(const typename V::f32 *sum) { return V::sum(*sum); }
};

// ---- rows in lanes, for rows_tile.hpp and rows_units_wide.hpp

// A block of G * L rows, a lane of G registers for each.
template <class V, class B, int G> struct units_in_lanes {
    using i32 = typename V::i32;
    static constexpr int L = V::lanes, ROWS = G * L;
    static constexpr bool has_fifth = sizeof(B) == sizeof(te_block_q5_k),
                          has_scales = sizeof(B) == sizeof(te_block_q6_k), has_minima = !has_scales;
    struct unpacked {
        alignas(4 * L) uint8_t q[8][G][8][4 * L]; // of unit u, four weights of each row
        alignas(4 * L) float d[has_scales ? 1 : 8][ROWS], m[has_scales ? 1 : 8][ROWS];
        alignas(4 * L) int32_t s[has_scales ? 8 : 1][2][ROWS]; // the scales of a unit's sixteens, as V::unit_scale
    };
    // L rows' block at byte `at`, which are the lanes of register g.
    static void unpack(const uint8_t *const *row, size_t at, int g, unpacked &w) {
        if constexpr (has_scales)
            unpack_six(row, at, g, w);
        else
            unpack_four(row, at, g, w);
    }
    static void unpack_four(const uint8_t *const *row, size_t at, int g, unpacked &w) {
        i32 v[4], fifth[8];
        V::transposed16(row, at, v); // d and dmin, scales and minima
        const typename V::f32 d = V::template halves<0>(v[0]), m = V::template halves<1>(v[0]);
        const i32 scales[2] = {V::bits_and(v[1], 63),
                               V::bits_or(V::bits_and(v[3], 15), V::template shift_bytes<-2>(v[1], 0x30))},
                  minima[2] = {V::bits_and(v[2], 63),
                               V::bits_or(V::high4(v[3]), V::template shift_bytes<-2>(v[2], 0x30))};
        for (int h = 0; h < 2; h++) {
            four_factors(scales[h], d, w.d + 4 * h, g);
            four_factors(minima[h], m, w.m + 4 * h, g);
        }
        if constexpr (has_fifth)
            for (int half = 0; half < 2; half++)
                V::transposed16(row, at + offsetof(te_block_q5_k, qh) + 16 * (size_t)half, fifth + 4 * half);
        four_bits<0>(row, at, g, fifth, w);
        four_bits<1>(row, at, g, fifth, w);
        four_bits<2>(row, at, g, fifth, w);
        four_bits<3>(row, at, g, fifth, w);
    }
    static void four_factors(i32 bytes, typename V::f32 by, float (*to)[ROWS], int g) {
        V::store(to[0] + g * L, V::mul(V::template float_u8<0>(bytes), by));
        V::store(to[1] + g * L, V::mul(V::template float_u8<1>(bytes), by));
        V::store(to[2] + g * L, V::mul(V::template float_u8<2>(bytes), by));
        V::store(to[3] + g * L, V::mul(V::template float_u8<3>(bytes), by));
    }
    // Units 2i and 2i + 1, low and high nibbles of the same bytes.
    template <int i> static void four_bits(const uint8_t *const *row, size_t at, int g, const i32 *fifth, unpacked &w) {
        i32 a[4], b[4], v[4];
        for (int half = 0; half < 2; half++) {
            V::transposed16(row, at + offsetof(B, q) + 32 * (size_t)i + 16 * (size_t)half, v);
            for (int j = 0; j < 4; j++) {
                const int k = 4 * half + j;
                a[j] = V::bits_and(v[j], 15);
                b[j] = V::high4(v[j]);
                if constexpr (has_fifth) {
                    a[j] = V::bits_or(a[j], V::template shift_bytes<4 - 2 * i>(fifth[k], 16));
                    b[j] = V::bits_or(b[j], V::template shift_bytes<3 - 2 * i>(fifth[k], 16));
                }
            }
            for (int j = 0; j < 4; j++) V::store_i32(w.q[2 * i][g][4 * half + j], a[j]);
            for (int j = 0; j < 4; j++) V::store_i32(w.q[2 * i + 1][g][4 * half + j], b[j]);
        }
    }
    static void unpack_six(const uint8_t *const *row, size_t at, int g, unpacked &w) {
        const uint8_t *d[L];
        uint16_t halves[L];
        for (int r = 0; r < L; r++) d[r] = row[r] + at + offsetof(te_block_q6_k, d);
        for (int r = 0; r < L; r += 8) V::eight_halves(d + r, halves + r);
        V::store(w.d[0] + g * L, V::load_f16(halves));
        i32 v[4];
        V::transposed16(row, at + offsetof(te_block_q6_k, scales), v);
        for (int i = 0; i < 4; i++) { // of units 2i and 2i + 1
            V::store_i32(w.s[2 * i][0] + g * L, V::template unit_scale<0>(v[i]));
            V::store_i32(w.s[2 * i][1] + g * L, V::template unit_scale<1>(v[i]));
            V::store_i32(w.s[2 * i + 1][0] + g * L, V::template unit_scale<2>(v[i]));
            V::store_i32(w.s[2 * i + 1][1] + g * L, V::template unit_scale<3>(v[i]));
        }
        for (int h = 0; h < 2; h++)
            for (int half = 0; half < 2; half++) { // weights 16 * half ... of units 4h to 4h + 3
                i32 a[4], b[4], c[4];
                const size_t own = at + offsetof(te_block_q6_k, q) + 64 * (size_t)h + 16 * (size_t)half;
                V::transposed16(row, own, a);
                V::transposed16(row, own + 32, b);
                V::transposed16(row, at + offsetof(te_block_q6_k, qh) + 32 * (size_t)h + 16 * (size_t)half, c);
                for (int j = 0; j < 4; j++) {
                    const int k = 4 * half + j;
                    const auto put = [&](int u, i32 low, i32 high) {
                        V::store_i32(w.q[4 * h + u][g][k], V::bits_or(low, high));
                    };
                    put(0, V::bits_and(a[j], 15), V::template shift_bytes<4>(c[j], 0x30));
                    put(1, V::bits_and(b[j], 15), V::template shift_bytes<2>(c[j], 0x30));
                    put(2, V::high4(a[j]), V::bits_and(c[j], 0x30));
                    put(3, V::high4(b[j]), V::template shift_bytes<-2>(c[j], 0x30));
                }
            }
    }
};

// What all three have in rows_tile.hpp.
template <class V, class C, class B> struct units_lanes : units_rows<V, C, B> {
    using K = units_rows<V, C, B>;
    using W = units_in_lanes<V, B, 2>;
    using unpacked = typename W::unpacked;
    static constexpr int L = V::lanes, ROWS = W::ROWS;
    static constexpr bool has_minima = W::has_minima, has_scales = W::has_scales, words = false;
    static constexpr int parts = has_scales || W::has_fifth ? 2 : 1, chunk_bytes = sizeof(B);
    static constexpr int at_q(int u) { return 32 * u; }
    static constexpr int step(int k) { return 4 * k; }
    static constexpr int lane(int u) { return u; }
    static constexpr int at_start(int u, int part) {
        return (int)offsetof(typename K::act, start) + 32 * (u / 4) + 4 * (u % 4) + 16 * part;
    }

    static typename V::f32 scale(const unpacked &w, int u, int r) { return V::load(w.d[has_scales ? 0 : u] + r * L); }

    static void unpack(const uint8_t *const *row, size_t at, int, int g, unpacked &w) {
        const uint8_t *p[L]; // in registers
        TE_EACH_ROW(L) p[r] = row[r] + at;
        W::unpack(p, 0, g, w);
    }
};
} // namespace

#endif
