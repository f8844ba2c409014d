// codec_k.hpp - the K formats: blocks of 256 weights, eight units of 32. The interface is that of codec.hpp; a chunk is
// a block.
//
// 4 * lanes bytes of the four-bit part make one register of low and one of high nibbles. With 16 lanes a register holds
// two units: a K-block's scales times the activations' scales are one vector of sixteen (w16), from which V::spread
// takes those of a register's lanes.
#ifndef TE_CODEC_K_HPP
#define TE_CODEC_K_HPP

namespace {

// Loops over the registers of a block; the register's number must be a constant, since it selects shifts and lanes.
#define TE_STEPS(step)                                                                                                 \
    do {                                                                                                               \
        step(0);                                                                                                       \
        step(1);                                                                                                       \
        if constexpr (V::lanes == 8) {                                                                                 \
            step(2);                                                                                                   \
            step(3);                                                                                                   \
        }                                                                                                              \
    } while (0)

// The 6-bit scales and minima of eight units (12 bytes): eight bytes each.
inline void k_scales(const uint8_t *p, uint64_t &scales, uint64_t &minima) {
    uint64_t first; // units 0-3; the upper two bits of each byte are those of units 4-7
    uint32_t second;
    memcpy(&first, p, 8);
    memcpy(&second, p + 8, 4);
    const uint64_t six = first & 0x3f3f3f3f3f3f3f3f;
    const uint64_t four = (second & 0x0f0f0f0f) | (uint64_t)(second >> 4 & 0x0f0f0f0f) << 32;
    const uint64_t rest = four | (first >> 2 & 0x3030303030303030);
    scales = (six & 0xffffffff) | rest << 32;
    minima = six >> 32 | (rest & 0xffffffff00000000);
}

// Q4_K and Q5_K: byte i of thirty-two has weight i of two units, u in its low half and u + 1 in its high one.
//
// For dot products a register takes sixteen bytes of each of lanes / 4 such runs, so that the two registers of first and
// second bytes have the same scales and are added as integers. For axpy registers are as they lie in memory.
template <class V, class B> struct codec_q45_k {
    static constexpr bool five = sizeof(B) == sizeof(te_block_q5_k);
    static constexpr int high = offsetof(te_block_q5_k, qh); // if five
    static constexpr int L = V::lanes, chunk = 256, bytes = sizeof(B), low = offsetof(B, q);
    static constexpr int n = 16 / L; // groups of 8 * lanes bytes
    static constexpr int top_factor = five ? 1 : V::top_factor;
    struct act {
        alignas(64) int8_t q[n][2][2][4 * L]; // of a group: its low and high halves; first and second bytes
        alignas(64) float d[16];              // the units' scales, then minus the sums of their activations
    };
    static void pack(const quantised &x, act &a) {
        for (int i = 0; i < 256; i += 16) {
            const int u = i / 32, run = u / 2;
            memcpy(&a.q[run / (L / 4)][u % 2][i % 32 / 16][run % (L / 4) * 16], x.q + i, 16);
        }
        for (int u = 0; u < 8; u++) {
            a.d[u] = u % 2 ? x.d[u] / top_factor : x.d[u];
            a.d[8 + u] = -x.d[u] * (float)x.sum[u];
        }
    }
    // d * scale of the units, then dmin * minimum
    static typename V::w16 factors(const uint8_t *p) {
        uint64_t scales, minima;
        const B *from = (const B *)p;
        k_scales(from->scales, scales, minima);
        static_assert(offsetof(B, dmin) == offsetof(B, d) + 2, "two halves");
        return V::mul16(V::widen16_u8(scales, minima), V::halves16(from->d));
    }
    // First (half 0) or second sixteen bytes of the runs of group g, as low and as high halves.
    template <int g, int half> static void codes(const uint8_t *p, typename V::i32 &a, typename V::i32 &b) {
        const typename V::i32 q = V::template blocks16<32, 16 * half>(p + low + 8 * L * g);
        constexpr int u = L / 2 * g; // bit u of the fifth bits belongs to unit u and is moved to bit 4
        a = V::bits_and(q, 15);
        if constexpr (five) {
            a = V::bits_or(a, V::template fields4<4 - u, 2 - u, -u, -2 - u>(p + high + 16 * half, 16));
            b = V::bits_or(V::high4(q), V::template fields4<3 - u, 1 - u, -1 - u, -3 - u>(p + high + 16 * half, 16));
        } else {
            b = V::top4(q);
        }
    }
    template <int g, int odd> static typename V::f32 spread(typename V::w16 f) {
        constexpr int u = L / 2 * g + odd;
        return V::template spread<u, u + 2, (u + 4) % 16, (u + 6) % 16>(f);
    }
    template <int g>
    static typename V::f32 group(const uint8_t *p, const act &x, typename V::w16 f, typename V::f32 acc) {
        typename V::i32 a0, b0, a1, b1;
        codes<g, 0>(p, a0, b0);
        codes<g, 1>(p, a1, b1);
        const typename V::i32 even =
            V::dot2_u8(V::zero_i32(), a0, V::load_bytes(x.q[g][0][0]), a1, V::load_bytes(x.q[g][0][1]));
        const typename V::i32 odd =
            V::dot2_u8(V::zero_i32(), b0, V::load_bytes(x.q[g][1][0]), b1, V::load_bytes(x.q[g][1][1]));
        acc = V::fma(V::to_f32(even), spread<g, 0>(f), acc);
        return V::fma(V::to_f32(odd), spread<g, 1>(f), acc);
    }
    static typename V::f32 mac(const uint8_t *p, const act &x, typename V::f32 acc) {
        const typename V::w16 f = V::mul16(factors(p), V::load16(x.d));
        acc = V::add_high8(acc, f);
        acc = group<0>(p, x, f, acc);
        if constexpr (L == 8) acc = group<1>(p, x, f, acc);
        return acc;
    }
    // Register g of axpy has units u = lanes / 4 * g (and u + 2) in its low halves. y keeps, for byte k of the lanes,
    // vector 8g + 2k for these and the next one for the high halves.
    static constexpr int stride = 2 * L, n_minima = 8;
    static constexpr int place(int c) {
        const int u = c / 32, l = c % 32 / 4 + (L == 16 && u % 4 >= 2 ? 8 : 0);
        return L * (8 * (4 * u / L) + u % 2) + l;
    }
    // The factors of low (odd = 0) or high halves.
    template <int g, int odd> static typename V::f32 spread_pair(typename V::w16 f) {
        constexpr int u = L / 4 * g + odd;
        return V::template spread<u, u, (u + 2) % 16, (u + 2) % 16>(f);
    }
    template <int g, int i, int R, int T>
    static void step(const typename V::i32 *a, const typename V::i32 *b, const typename V::f32 (*s)[R][T],
                     float *const *y) {
        typename V::f32 w[R];
        TE_EACH_ROW(R) {
            if constexpr (five)
                w[r] = V::template float_u5<i / 2, 0>(i % 2 ? b[r] : a[r]);
            else
                w[r] = V::template float_nibble<i>(a[r]);
        }
        add_rows<V, R, T>(w, s[i % 2], y, L * (8 * g + i));
    }
    template <int g, int R, int T>
    static void registers(const uint8_t *const *p, const typename V::w16 (*f)[T], float *const *y) {
        typename V::i32 a[R], b[R];
        typename V::f32 s[2][R][T];
        TE_EACH_ROW(R) {
            a[r] = b[r] = V::load_bytes(p[r] + low + 4 * L * g);
            if constexpr (five) {
                constexpr int u = L / 4 * g;
                b[r] = V::bits_or(V::high4(a[r]), V::template fields<3 - u, 1 - u>(p[r] + high, 16));
                a[r] = V::bits_or(V::bits_and(a[r], 15), V::template fields<4 - u, 2 - u>(p[r] + high, 16));
            }
            TE_EACH(T) {
                s[0][r][t] = spread_pair<g, 0>(f[r][t]);
                s[1][r][t] = spread_pair<g, 1>(f[r][t]);
            }
        }
        step<g, 0, R, T>(a, b, s, y);
        step<g, 1, R, T>(a, b, s, y);
        step<g, 2, R, T>(a, b, s, y);
        step<g, 3, R, T>(a, b, s, y);
        step<g, 4, R, T>(a, b, s, y);
        step<g, 5, R, T>(a, b, s, y);
        step<g, 6, R, T>(a, b, s, y);
        step<g, 7, R, T>(a, b, s, y);
    }
    static constexpr bool shares = true;
    static constexpr int rows = 2; // four: Sapphire Rapids 80 % of the read rate, where one has 93
    template <int R, int T> static void axpy_all(const uint8_t *const *p, const float *h, float *const *y) {
        typename V::w16 f[R][T];
        TE_EACH_ROW(R) {
            const typename V::w16 own = factors(p[r]);
            TE_EACH(T) {
                f[r][t] = V::mul16(own, V::splat16(h[r * T + t], h[r * T + t]));
                V::store16(y[t] + 256, V::add16(V::load16(y[t] + 256), f[r][t])); // its lower half is of no use
            }
        }
#define TE_STEP(g) registers<g, R, T>(p, f, y)
        TE_STEPS(TE_STEP);
#undef TE_STEP
    }
    static constexpr int block = 256, block_bytes = bytes;
    static void to_f32(const uint8_t *p, float *out) {
        float f[16];
        V::store16(f, factors(p));
        for (int u = 0; u < 8; u++) {
            uint8_t q[32];
            for (int i = 0; i < 32; i++) {
                q[i] = (uint8_t)(p[low + 32 * (u / 2) + i] >> u % 2 * 4 & 15);
                if (five) q[i] = (uint8_t)(q[i] | (p[high + i] >> u & 1) << 4);
            }
            for (int i = 0; i < 32; i += L)
                V::store(out + 32 * u + i, V::sub(V::mul(V::widen_u8(q + i), V::splat(f[u])), V::splat(f[8 + u])));
        }
    }
};
template <class V> using codec_q4_k = codec_q45_k<V, te_block_q4_k>;
template <class V> using codec_q5_k = codec_q45_k<V, te_block_q5_k>;

// Q6_K: in each half of 128 weights, unit u (0..3) has its low bits
// in bytes 32 * (u % 2) of the half's q, nibble u / 2, and its two high bits in qh, bits 2u and 2u + 1.
template <class V> struct codec_q6_k {
    static constexpr bool shares = true;
    static constexpr int rows = 2; // four: Sapphire Rapids 80 % of the read rate, where one has 93
    static constexpr int L = V::lanes, chunk = 256, bytes = sizeof(te_block_q6_k);
    struct act {
        alignas(64) int8_t q[64 / L][4 * L];
        alignas(64) int32_t start[64 / L][L];
        alignas(64) float d[16]; // a unit's scale twice
    };
    // First unit of register i, which is the low (i even) or high nibbles of register pair i / 2; a second unit is the
    // next one.
    static constexpr int unit(int i) { return 4 * (i / 2 * L / 16) + i / 2 * L / 8 % 2 + 2 * (i % 2); }
    static void pack(const quantised &x, act &a) {
        for (int i = 0; i < 64 / L; i++) {
            memcpy(a.q[i], x.q + 32 * unit(i), 4 * L);
            pack_start<V>(a.q[i], 32, a.start[i]);
        }
        for (int s = 0; s < 16; s++) a.d[s] = x.d[s / 2];
    }
    static typename V::w16 factors(const uint8_t *p, float h) {
        const te_block_q6_k *from = (const te_block_q6_k *)p;
        const float d = V::half(from->d) * h;
        return V::mul16(V::widen16_s8(from->scales), V::splat16(d, d));
    }
    template <int g> static void registers(const uint8_t *p, typename V::i32 &a, typename V::i32 &b) {
        const te_block_q6_k *from = (const te_block_q6_k *)p;
        const typename V::i32 q = V::load_bytes(from->q + 4 * L * g);
        const uint8_t *high = from->qh + 32 * (g * L / 16);
        constexpr int u = g * L / 8 % 2;
        a = V::bits_or(V::bits_and(q, 15), V::template fields<4 - 2 * u, 2 - 2 * u>(high, 0x30));
        b = V::bits_or(V::high4(q), V::template fields<-2 * u, -2 - 2 * u>(high, 0x30));
    }
    template <int i> static typename V::f32 spread(typename V::w16 f) {
        constexpr int s = 2 * unit(i);
        return V::template spread<s, s + 1, (s + 2) % 16, (s + 3) % 16>(f);
    }
    static typename V::f32 mac(const uint8_t *p, const act &x, typename V::f32 acc) {
        const typename V::w16 f = V::mul16(factors(p, 1.0f), V::load16(x.d));
        typename V::i32 a, b;
#define TE_STEP(g)                                                                                                     \
    registers<g>(p, a, b);                                                                                             \
    a = V::dot_u8(V::load_bytes(x.start[2 * g]), a, V::load_bytes(x.q[2 * g]));                                        \
    b = V::dot_u8(V::load_bytes(x.start[2 * g + 1]), b, V::load_bytes(x.q[2 * g + 1]));                                \
    acc = V::fma(V::to_f32(a), spread<2 * g>(f), acc);                                                                 \
    acc = V::fma(V::to_f32(b), spread<2 * g + 1>(f), acc)
        TE_STEPS(TE_STEP);
#undef TE_STEP
        return acc;
    }
    // y keeps, for register i and byte k, the lanes' columns: vector 4i + k.
    static constexpr int stride = L, n_minima = 0;
    static constexpr int place(int c) {
        const int u = c / 32, pair = L == 16 ? u / 4 : u / 4 * 2 + u % 2, i = 2 * pair + u % 4 / 2;
        return L * 4 * i + c % 32 / 4 + (L == 16 ? u % 2 * 8 : 0);
    }
    template <int k, int R, int T>
    static void step(const typename V::i32 *q, const typename V::f32 (*s)[T], float *const *y, int at) {
        typename V::f32 w[R];
        TE_EACH_ROW(R) w[r] = V::template float_u6_minus_32<k>(q[r]);
        add_rows<V, R, T>(w, s, y, at + L * k);
    }
    // Register i's four vectors.
    template <int i, int R, int T>
    static void four_steps(const typename V::i32 *q, const typename V::w16 (*f)[T], float *const *y) {
        typename V::f32 s[R][T];
        TE_EACH_ROW(R) { TE_EACH(T) s[r][t] = spread<i>(f[r][t]); }
        step<0, R, T>(q, s, y, 4 * L * i);
        step<1, R, T>(q, s, y, 4 * L * i);
        step<2, R, T>(q, s, y, 4 * L * i);
        step<3, R, T>(q, s, y, 4 * L * i);
    }
    template <int g, int R, int T>
    static void eight_steps(const uint8_t *const *p, const typename V::w16 (*f)[T], float *const *y) {
        typename V::i32 a[R], b[R];
        TE_EACH_ROW(R) registers<g>(p[r], a[r], b[r]);
        four_steps<2 * g, R, T>(a, f, y);
        four_steps<2 * g + 1, R, T>(b, f, y);
    }
    template <int R, int T> static void axpy_all(const uint8_t *const *p, const float *h, float *const *y) {
        typename V::w16 f[R][T];
        TE_EACH_ROW(R) { TE_EACH(T) f[r][t] = factors(p[r], h[r * T + t]); }
#define TE_STEP(g) eight_steps<g, R, T>(p, f, y)
        TE_STEPS(TE_STEP);
#undef TE_STEP
    }
    static constexpr int block = 256, block_bytes = bytes;
    static void to_f32(const uint8_t *p, float *out) {
        float f[16];
        V::store16(f, factors(p, 1.0f));
        for (int u = 0; u < 8; u++) {
            const te_block_q6_k *b = (const te_block_q6_k *)p;
            const uint8_t *ql = b->q + 64 * (u / 4) + 32 * (u % 2), *qh = b->qh + 32 * (u / 4);
            int8_t q[32];
            for (int i = 0; i < 32; i++)
                q[i] = (int8_t)(((ql[i] >> u % 4 / 2 * 4 & 15) | (qh[i] >> u % 4 * 2 & 3) << 4) - 32);
            for (int i = 0; i < 32; i += L)
                V::store(out + 32 * u + i, V::mul(V::widen_s8(q + i), V::splat(f[2 * u + i / 16])));
        }
    }
};
#undef TE_STEPS
} // namespace

#endif
