// codec_256.hpp - formats of 256 weights beside those of codec_k.hpp: Q2_K, Q3_K and IQ4_XS. The interface is that of
// codec.hpp; a chunk is a block.
#ifndef TE_CODEC_256_HPP
#define TE_CODEC_256_HPP

namespace {

// Q2_K and Q3_K: two bits of weight 128h + 32t + i stand in byte 32h + i of q, bits 2t and 2t + 1. Register number t has
// them from both halves if there is room, else number 4h + t from one. Sixteen weights have a scale: one for four lanes.
template <class V> struct layout_2_bits {
    static constexpr int L = V::lanes, n = 64 / L;
    static constexpr int half(int i) { return i / 4; }
    static constexpr int first(int i) { return 8 * half(i) + 2 * (i % 4); } // scale; then the next one, and those 8 on
    static void pack(const int8_t *x, int8_t (*q)[4 * L]) {
        for (int i = 0; i < n; i++)
            for (int b = 0; b < 4 * L; b += 32) memcpy(q[i] + b, x + 128 * (half(i) + b / 32) + 32 * (i % 4), 32);
    }
    template <int i> static typename V::f32 spread(typename V::w16 f) {
        constexpr int s = first(i);
        return V::template spread<s, s + 1, (s + 8) % 16, (s + 9) % 16>(f);
    }
    // y keeps, for register i and byte k, the lanes' columns: vector 4i + k.
    static constexpr int stride = L;
    static constexpr int place(int c) {
        const int h = c / 128, t = c % 128 / 32, l = c % 32 / 4;
        return L == 16 ? L * 4 * t + 8 * h + l : L * 4 * (4 * h + t) + l;
    }
};

// Runs step(i) for every register; its number must be a constant.
#define TE_REGISTERS(step)                                                                                             \
    do {                                                                                                               \
        step(0);                                                                                                       \
        step(1);                                                                                                       \
        step(2);                                                                                                       \
        step(3);                                                                                                       \
        if constexpr (V::lanes == 8) {                                                                                 \
            step(4);                                                                                                   \
            step(5);                                                                                                   \
            step(6);                                                                                                   \
            step(7);                                                                                                   \
        }                                                                                                              \
    } while (0)

// Q2_K: a byte of scales has four bits of scale, four of minimum. The sums of minima: rows_k.hpp.
template <class V> struct codec_q2_k {
    static constexpr bool shares = false;
    using in = layout_2_bits<V>;
    static constexpr int L = V::lanes, chunk = 256, bytes = sizeof(te_block_q2_k), block = 256, block_bytes = bytes;
    struct act {
        alignas(64) int8_t q[in::n][4 * L];
        alignas(64) float d[16];   // a unit's scale twice
        alignas(64) float sum[16]; // of sixteen activations
    };
    static void pack(const quantised &x, act &a) {
        in::pack(x.q, a.q);
        for (int s = 0; s < 16; s++) {
            int32_t sum = 0;
            for (int i = 0; i < 16; i++) sum += x.q[16 * s + i];
            a.d[s] = x.d[s / 2];
            a.sum[s] = x.d[s / 2] * (float)sum;
        }
    }
    static constexpr int q_at = offsetof(te_block_q2_k, q);
    static typename V::w16 nibbles(const uint8_t *p, int shift, float d) {
        uint64_t s[2];
        memcpy(s, p, 16);
        const uint64_t mask = 0x0f0f0f0f0f0f0f0f;
        return V::mul16(V::widen16_u8(s[0] >> shift & mask, s[1] >> shift & mask), V::splat16(d, d));
    }
    static typename V::w16 scales(const uint8_t *p, float h) {
        return nibbles(p, 0, V::half(p + offsetof(te_block_q2_k, d)) * h);
    }
    static typename V::w16 minima(const uint8_t *p, float h) {
        return nibbles(p, 4, V::half(p + offsetof(te_block_q2_k, dmin)) * h);
    }
    static typename V::f32 mac(const uint8_t *p, const act &x, typename V::f32 acc) {
        const typename V::w16 f = V::mul16(scales(p, 1.0f), V::load16(x.d));
        acc = V::sub16(acc, V::mul16(minima(p, 1.0f), V::load16(x.sum)));
        typename V::i32 a;
#define TE_STEP(i)                                                                                                     \
    a = V::template shift_bytes<-2 * (i % 4)>(V::load_bytes(p + q_at + 32 * in::half(i)), 3);                          \
    a = V::dot_u8(V::zero_i32(), a, V::load_bytes(x.q[i]));                                                            \
    acc = V::fma(V::to_f32(a), in::template spread<i>(f), acc)
        TE_REGISTERS(TE_STEP);
#undef TE_STEP
        return acc;
    }
    static constexpr int stride = in::stride, n_minima = 16;
    static constexpr int place(int c) { return in::place(c); }
    template <int i, int k> static void step(typename V::i32 q, typename V::f32 s, float *y) {
        const typename V::f32 w = V::template float_bits2<8 * k + 2 * (i % 4)>(q);
        V::store(y + L * (4 * i + k), V::fma(w, s, V::load(y + L * (4 * i + k))));
    }
    static void axpy(const uint8_t *p, float h, float *y) {
        const typename V::w16 f = scales(p, h);
        V::store16(y + 256, V::add16(V::load16(y + 256), minima(p, h)));
#define TE_STEP(i)                                                                                                     \
    {                                                                                                                  \
        const typename V::i32 q = V::load_bytes(p + q_at + 32 * in::half(i));                                          \
        const typename V::f32 s = in::template spread<i>(f);                                                           \
        step<i, 0>(q, s, y);                                                                                           \
        step<i, 1>(q, s, y);                                                                                           \
        step<i, 2>(q, s, y);                                                                                           \
        step<i, 3>(q, s, y);                                                                                           \
    }
        TE_REGISTERS(TE_STEP);
#undef TE_STEP
    }
    static void to_f32(const uint8_t *p, float *out) {
        float f[16], m[16];
        V::store16(f, scales(p, 1.0f));
        V::store16(m, minima(p, 1.0f));
        for (int u = 0; u < 8; u++) {
            uint8_t q[32];
            for (int i = 0; i < 32; i++) q[i] = p[q_at + u / 4 * 32 + i] >> u % 4 * 2 & 3;
            for (int i = 0; i < 32; i += L) {
                const int s = 2 * u + i / 16;
                V::store(out + 32 * u + i, V::sub(V::mul(V::widen_u8(q + i), V::splat(f[s])), V::splat(m[s])));
            }
        }
    }
};

// Q3_K: the third bit of weight 32u + i is bit u of byte i of qh;
// weights are q - 4, scales s - 32.
template <class V> struct codec_q3_k {
    static constexpr bool shares = false;
    using in = layout_2_bits<V>;
    static constexpr int L = V::lanes, chunk = 256, bytes = sizeof(te_block_q3_k), block = 256, block_bytes = bytes;
    struct act {
        alignas(64) int8_t q[in::n][4 * L];
        alignas(64) int32_t start[in::n][L];
        alignas(64) float d[16]; // a unit's scale twice
    };
    static void pack(const quantised &x, act &a) {
        in::pack(x.q, a.q);
        for (int i = 0; i < in::n; i++) pack_start<V>(a.q[i], 4, a.start[i]);
        for (int s = 0; s < 16; s++) a.d[s] = x.d[s / 2];
    }
    static typename V::w16 factors(const uint8_t *p, float h) {
        uint64_t low, s[2];
        uint32_t high;
        const te_block_q3_k *from = (const te_block_q3_k *)p;
        memcpy(&low, from->scales, 8);
        memcpy(&high, from->scales + 8, 4);
        const uint64_t mask = 0x0f0f0f0f0f0f0f0f, two = 0x30303030;
        s[0] = (low & mask) | (high << 4 & two) | (high << 2 & two) << 32;
        s[1] = (low >> 4 & mask) | (high & two) | (high >> 2 & two) << 32;
        const float d = V::half(from->d) * h;
        return V::mul16(V::add16(V::widen16_u8(s[0], s[1]), V::splat16(-32.0f, -32.0f)), V::splat16(d, d));
    }
    static_assert(offsetof(te_block_q3_k, qh) == 0, "read from the start of a block");
    // The third bits, so that those of register i are bit i of each byte: with room for both halves, bits 0-3 are those of
    // weights 0-127 in one half of the register, and of weights 128-255 in the other.
    static typename V::i32 high_bits(const uint8_t *p) {
        if constexpr (L == 16)
            return V::template fields<0, -4>(p, 0xff);
        else
            return V::load_bytes(p);
    }
    template <int i> static typename V::i32 codes(const uint8_t *p, typename V::i32 high) {
        const typename V::i32 q = V::load_bytes(((const te_block_q3_k *)p)->q + 32 * in::half(i));
        return V::bits_or(V::template shift_bytes<-2 * (i % 4)>(q, 3), V::template shift_bytes<2 - i>(high, 4));
    }
    static typename V::f32 mac(const uint8_t *p, const act &x, typename V::f32 acc) {
        const typename V::w16 f = V::mul16(factors(p, 1.0f), V::load16(x.d));
        const typename V::i32 high = high_bits(p);
        typename V::i32 a;
#define TE_STEP(i)                                                                                                     \
    a = V::dot_u8(V::load_bytes(x.start[i]), codes<i>(p, high), V::load_bytes(x.q[i]));                                \
    acc = V::fma(V::to_f32(a), in::template spread<i>(f), acc)
        TE_REGISTERS(TE_STEP);
#undef TE_STEP
        return acc;
    }
    static constexpr int stride = in::stride, n_minima = 0;
    static constexpr int place(int c) { return in::place(c); }
    template <int k> static void step(typename V::i32 q, typename V::f32 s, float *y) {
        V::store(y + L * k, V::fma(V::template float_u5<k, 4>(q), s, V::load(y + L * k)));
    }
    static void axpy(const uint8_t *p, float h, float *y) {
        const typename V::w16 f = factors(p, h);
        const typename V::i32 high = high_bits(p);
#define TE_STEP(i)                                                                                                     \
    {                                                                                                                  \
        const typename V::i32 q = codes<i>(p, high);                                                                   \
        const typename V::f32 s = in::template spread<i>(f);                                                           \
        step<0>(q, s, y + 4 * L * i);                                                                                  \
        step<1>(q, s, y + 4 * L * i);                                                                                  \
        step<2>(q, s, y + 4 * L * i);                                                                                  \
        step<3>(q, s, y + 4 * L * i);                                                                                  \
    }
        TE_REGISTERS(TE_STEP);
#undef TE_STEP
    }
    static void to_f32(const uint8_t *p, float *out) {
        float f[16];
        V::store16(f, factors(p, 1.0f));
        for (int u = 0; u < 8; u++) {
            const te_block_q3_k *b = (const te_block_q3_k *)p;
            int8_t q[32];
            for (int i = 0; i < 32; i++)
                q[i] = (int8_t)(((b->q[u / 4 * 32 + i] >> u % 4 * 2 & 3) | (b->qh[i] >> u & 1) << 2) - 4);
            for (int i = 0; i < 32; i += L)
                V::store(out + 32 * u + i, V::mul(V::widen_s8(q + i), V::splat(f[2 * u + i / 16])));
        }
    }
};
#undef TE_REGISTERS

// IQ4_XS: a unit of 32 weights is
// sixteen bytes with the order and the list of IQ4_NL. Scales are s - 32.
template <class V> struct codec_iq4_xs {
    static constexpr bool shares = false;
    static constexpr int L = V::lanes, n = 32 / L, chunk = 256, bytes = sizeof(te_block_iq4_xs), block = 256,
                         block_bytes = bytes;
    struct act {
        alignas(64) int8_t q[n][2][4 * L]; // register: lanes / 4 units; their first halves, their second ones
        alignas(64) int32_t start[n][L];
        alignas(64) float d[16]; // eight are used
    };
    static void pack(const quantised &x, act &a) {
        for (int g = 0; g < n; g++) {
            int32_t c[2][L];
            for (int half = 0; half < 2; half++) {
                for (int j = 0; j < L / 4; j++)
                    memcpy(a.q[g][half] + 16 * j, x.q + 32 * (L / 4 * g + j) + 16 * half, 16);
                pack_start<V>(a.q[g][half], V::signed_offset, c[half]);
            }
            for (int l = 0; l < L; l++) a.start[g][l] = c[0][l] + c[1][l];
        }
        for (int u = 0; u < 16; u++) a.d[u] = u < 8 ? x.d[u] : 0.0f;
    }
    static typename V::w16 factors(const uint8_t *p, float h) {
        uint16_t upper;
        uint32_t lower;
        const te_block_iq4_xs *from = (const te_block_iq4_xs *)p;
        memcpy(&upper, from->scales_h, 2);
        memcpy(&lower, from->scales_l, 4);
        uint64_t s = lower, t = upper; // eight fields of four and of two bits, to a byte each
        s = (s | s << 16) & 0x0000ffff0000ffff;
        s = (s | s << 8) & 0x00ff00ff00ff00ff;
        s = (s | s << 4) & 0x0f0f0f0f0f0f0f0f;
        t = (t | t << 24) & 0x000000ff000000ff;
        t = (t | t << 12) & 0x000f000f000f000f;
        t = (t | t << 6) & 0x0303030303030303;
        const float d = V::half(from->d) * h;
        return V::mul16(V::add16(V::widen16_u8(s | t << 4, 0), V::splat16(-32.0f, 0.0f)), V::splat16(d, d));
    }
    template <int g> static typename V::f32 spread(typename V::w16 f) {
        constexpr int u = L / 4 * g;
        return V::template spread<u, u + 1, u + 2, u + 3>(f);
    }
    template <int g> static typename V::f32 sum(const uint8_t *p, const act &x) {
        const typename V::i32 q = V::load_bytes(((const te_block_iq4_xs *)p)->q + 4 * L * g);
        const typename V::i32 a = V::lookup(V::bits_and(q, 15), iq4_values), b = V::lookup(V::high4(q), iq4_values);
        typename V::i32 s = V::load_bytes(x.start[g]);
        s = V::dot_s8(s, a, V::load_bytes(x.q[g][0]));
        return V::to_f32(V::dot_s8(s, b, V::load_bytes(x.q[g][1])));
    }
    static typename V::f32 mac(const uint8_t *p, const act &x, typename V::f32 acc) {
        const typename V::w16 f = V::mul16(factors(p, 1.0f), V::load16(x.d));
        acc = V::fma(sum<0>(p, x), spread<0>(f), acc);
        acc = V::fma(sum<1>(p, x), spread<1>(f), acc);
        if constexpr (L == 8) {
            acc = V::fma(sum<2>(p, x), spread<2>(f), acc);
            acc = V::fma(sum<3>(p, x), spread<3>(f), acc);
        }
        return acc;
    }
    // For register g first the vectors of bytes 0-3 of the lanes' low halves, then those of the high ones.
    static constexpr int stride = L, n_minima = 0;
    static constexpr int place(int c) {
        const int u = c / 32, g = u / (L / 4);
        return 8 * L * g + 4 * L * (c % 32 / 16) + 4 * (u % (L / 4));
    }
    template <int k> static void step(typename V::i32 q, typename V::f32 s, float *y) {
        V::store(y + L * k, V::fma(V::template float_s8<k>(q), s, V::load(y + L * k)));
    }
    template <int g> static void part(const uint8_t *p, typename V::w16 f, float *y) {
        const typename V::i32 q = V::load_bytes(((const te_block_iq4_xs *)p)->q + 4 * L * g);
        const typename V::i32 half[2] = {V::lookup(V::bits_and(q, 15), iq4_values), V::lookup(V::high4(q), iq4_values)};
        const typename V::f32 s = spread<g>(f);
        for (int i = 0; i < 2; i++) {
            step<0>(half[i], s, y + L * (8 * g + 4 * i));
            step<1>(half[i], s, y + L * (8 * g + 4 * i));
            step<2>(half[i], s, y + L * (8 * g + 4 * i));
            step<3>(half[i], s, y + L * (8 * g + 4 * i));
        }
    }
    static void axpy(const uint8_t *p, float h, float *y) {
        const typename V::w16 f = factors(p, h);
        part<0>(p, f, y);
        part<1>(p, f, y);
        if constexpr (L == 8) {
            part<2>(p, f, y);
            part<3>(p, f, y);
        }
    }
    static void to_f32(const uint8_t *p, float *out) {
        float f[16];
        V::store16(f, factors(p, 1.0f));
        for (int u = 0; u < 8; u++) {
            sixteen q[2];
            memcpy(q, ((const te_block_iq4_xs *)p)->q + 16 * u, 16);
            q[1] = q[0] >> 4;
            q[0] &= 15;
            for (int half = 0; half < 2; half++) V::lookup16(iq4_values, &q[half]);
            for (int i = 0; i < 32; i += L)
                V::store(out + 32 * u + i, V::mul(V::widen_s8((const int8_t *)q + i), V::splat(f[u])));
        }
    }
};
} // namespace

#endif
