// codec_k.hpp - the K formats: blocks of 256 weights, eight units of 32. The interface is that of codec.hpp; a chunk is
// a block.
//
// 4 * lanes bytes of the four-bit part make one register of low and one of high nibbles. With 16 lanes a register holds
// two units: a K-block's scales times the activations' scales are one vector of sixteen (w16), from which V::spread
// takes those of a register's lanes.
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
    uint32_t a[3];
    memcpy(a, p, 12);
    scales = (a[0] & 0x3f3f3f3f) | (uint64_t)((a[2] & 0x0f0f0f0f) | (a[0] >> 2 & 0x30303030)) << 32;
    minima = (a[1] & 0x3f3f3f3f) | (uint64_t)((a[2] >> 4 & 0x0f0f0f0f) | (a[1] >> 2 & 0x30303030)) << 32;
}

// Q4_K and Q5_K. Register pair g: low nibbles are unit u = lanes / 4 * g (and u + 2), high ones unit u + 1 (and u + 3).
template <class V, bool five> struct codec_q45_k {
    static constexpr int L = V::lanes, chunk = 256, bytes = five ? 176 : 144, low = five ? 48 : 16;
    struct act {
        alignas(64) int8_t q[64 / L][4 * L];
        alignas(64) float d[16]; // the units' scales, then minus the sums of their activations
    };
    static void pack(const quantised &x, act &a) {
        for (int i = 0; i < 64 / L; i++)
            for (int run = 0; run < L / 8; run++)
                memcpy(a.q[i] + 32 * run, x.q + 32 * (L / 4 * (i / 2) + i % 2 + 2 * run), 32);
        for (int u = 0; u < 8; u++) {
            a.d[u] = x.d[u];
            a.d[8 + u] = -x.d[u] * (float)x.sum[u];
        }
    }
    // d * scale of the units, then dmin * minimum
    static typename V::w16 factors(const uint8_t *p) {
        uint64_t scales, minima;
        k_scales(p + 4, scales, minima);
        return V::mul16(V::widen16_u8(scales, minima), V::halves16(p));
    }
    template <int g> static void registers(const uint8_t *p, typename V::i32 &a, typename V::i32 &b) {
        const typename V::i32 q = V::load_bytes(p + low + 4 * L * g);
        constexpr int u = L / 4 * g; // bit u of the fifth bits belongs to unit u and is moved to bit 4
        a = V::bits_and(q, 15);
        b = V::high4(q);
        if constexpr (five) {
            a = V::bits_or(a, V::template fields<4 - u, 2 - u>(p + 16, 16));
            b = V::bits_or(b, V::template fields<3 - u, 1 - u>(p + 16, 16));
        }
    }
    // The factors of register g, which holds units u and u + 2: of the scales (from = 0) or the minima (from = 8).
    template <int g, int from> static typename V::f32 spread(typename V::w16 f) {
        constexpr int u = from + L / 4 * (g / 2) + g % 2;
        return V::template spread<u, u, (u + 2) % 16, (u + 2) % 16>(f);
    }
    static typename V::f32 mac(const uint8_t *p, const act &x, typename V::f32 acc) {
        const typename V::w16 f = V::mul16(factors(p), V::load16(x.d));
        acc = V::add_high8(acc, f);
        typename V::i32 a, b;
#define TE_STEP(g)                                                                                                     \
    registers<g>(p, a, b);                                                                                             \
    a = V::dot_u8(V::zero_i32(), a, V::load_bytes(x.q[2 * g]));                                                        \
    b = V::dot_u8(V::zero_i32(), b, V::load_bytes(x.q[2 * g + 1]));                                                    \
    acc = V::fma(V::to_f32(a), spread<2 * g, 0>(f), acc);                                                              \
    acc = V::fma(V::to_f32(b), spread<2 * g + 1, 0>(f), acc)
        TE_STEPS(TE_STEP);
#undef TE_STEP
        return acc;
    }
    // y keeps, for register pair g and byte k of the lanes, first the low nibbles' columns, then the high nibbles'.
    static constexpr int stride = 2 * L;
    static constexpr int place(int c) {
        const int u = c / 32, l = c % 32 / 4 + (L == 16 && u % 4 >= 2 ? 8 : 0);
        return L * (8 * (4 * u / L) + u % 2) + l;
    }
    template <int k> static void step(typename V::i32 q, typename V::f32 s, typename V::f32 m, float *y) {
        V::store(y + 2 * L * k, V::sub(V::fma(V::template float_u8<k>(q), s, V::load(y + 2 * L * k)), m));
    }
    static void four_steps(typename V::i32 q, typename V::f32 s, typename V::f32 m, float *y) {
        step<0>(q, s, m, y);
        step<1>(q, s, m, y);
        step<2>(q, s, m, y);
        step<3>(q, s, m, y);
    }
    static void axpy(const uint8_t *p, float h, float *y) {
        const typename V::w16 f = V::mul16(factors(p), V::splat16(h, h));
        typename V::i32 a, b;
#define TE_STEP(g)                                                                                                     \
    registers<g>(p, a, b);                                                                                             \
    four_steps(a, spread<2 * g, 0>(f), spread<2 * g, 8>(f), y + 8 * L * g);                                            \
    four_steps(b, spread<2 * g + 1, 0>(f), spread<2 * g + 1, 8>(f), y + 8 * L * g + L)
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
                if (five) q[i] = (uint8_t)(q[i] | (p[16 + i] >> u & 1) << 4);
            }
            for (int i = 0; i < 32; i += L)
                V::store(out + 32 * u + i, V::sub(V::mul(V::widen_u8(q + i), V::splat(f[u])), V::splat(f[8 + u])));
        }
    }
};
template <class V> using codec_q4_k = codec_q45_k<V, false>;
template <class V> using codec_q5_k = codec_q45_k<V, true>;

// Q6_K: ql[128], qh[64], scales[16] of 16 weights each, d. In each half of 128 weights, unit u (0..3) has its low bits
// in bytes 32 * (u % 2) of the half's ql, nibble u / 2, and its two high bits in qh, bits 2u and 2u + 1.
template <class V> struct codec_q6_k {
    static constexpr int L = V::lanes, chunk = 256, bytes = 210;
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
        const float d = V::half(p + 208) * h;
        return V::mul16(V::widen16_s8(p + 192), V::splat16(d, d));
    }
    template <int g> static void registers(const uint8_t *p, typename V::i32 &a, typename V::i32 &b) {
        const typename V::i32 q = V::load_bytes(p + 4 * L * g);
        const uint8_t *high = p + 128 + 32 * (g * L / 16);
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
    static constexpr int stride = L;
    static constexpr int place(int c) {
        const int u = c / 32, pair = L == 16 ? u / 4 : u / 4 * 2 + u % 2, i = 2 * pair + u % 4 / 2;
        return L * 4 * i + c % 32 / 4 + (L == 16 ? u % 2 * 8 : 0);
    }
    template <int k> static void step(typename V::i32 q, typename V::f32 s, float *y) {
        const typename V::f32 w = V::sub(V::template float_u8<k>(q), V::splat(32.0f));
        V::store(y + L * k, V::fma(w, s, V::load(y + L * k)));
    }
    static void four_steps(typename V::i32 q, typename V::f32 s, float *y) {
        step<0>(q, s, y);
        step<1>(q, s, y);
        step<2>(q, s, y);
        step<3>(q, s, y);
    }
    static void axpy(const uint8_t *p, float h, float *y) {
        const typename V::w16 f = factors(p, h);
        typename V::i32 a, b;
#define TE_STEP(g)                                                                                                     \
    registers<g>(p, a, b);                                                                                             \
    four_steps(a, spread<2 * g>(f), y + 8 * L * g);                                                                    \
    four_steps(b, spread<2 * g + 1>(f), y + 8 * L * g + 4 * L)
        TE_STEPS(TE_STEP);
#undef TE_STEP
    }
    static constexpr int block = 256, block_bytes = bytes;
    static void to_f32(const uint8_t *p, float *out) {
        float f[16];
        V::store16(f, factors(p, 1.0f));
        for (int u = 0; u < 8; u++) {
            const uint8_t *ql = p + 64 * (u / 4) + 32 * (u % 2), *qh = p + 128 + 32 * (u / 4);
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
