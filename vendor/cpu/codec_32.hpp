// codec_32.hpp - formats of 32 weights with four or five bits beside Q4_0: Q4_1, Q5_0, Q5_1, IQ4_NL and MXFP4. The interface
// is that of codec.hpp.
//
// A register holds lanes / 4 blocks, sixteen bytes each. As in Q4_0 a byte holds weight i in its low half and weight
// 16 + i in its high one. A fifth bit comes from a word of 32 bits; halves of IQ4_NL and MXFP4 choose from a list of values. Those of MXFP4 fit
// into five bits, so it is a Q5_0 whose bits come from a list and whose scale is a power of two.
#ifndef TE_CODEC_32_HPP
#define TE_CODEC_32_HPP

namespace {

alignas(16) constexpr int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};
alignas(16) constexpr int8_t fp4_values_plus_16[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

typedef uint8_t sixteen __attribute__((vector_size(16)));

// What differs: has_min, has_fifth, has_power; the list, and whether it is signed; where the fields of a block are; what is
// taken off each weight's code.
template <class B> struct kind_32;
template <> struct kind_32<te_block_q4_1> {
    static constexpr bool has_min = true, has_fifth = false, has_power = false, is_signed = false;
    static constexpr const int8_t *list = nullptr;
    static constexpr int d_at = offsetof(te_block_q4_1, d), m_at = offsetof(te_block_q4_1, m), high_at = 0, minus = 0;
};
template <> struct kind_32<te_block_q5_0> {
    static constexpr bool has_min = false, has_fifth = true, has_power = false, is_signed = false;
    static constexpr const int8_t *list = nullptr;
    static constexpr int d_at = offsetof(te_block_q5_0, d), m_at = 0, high_at = offsetof(te_block_q5_0, qh), minus = 16;
};
template <> struct kind_32<te_block_q5_1> {
    static constexpr bool has_min = true, has_fifth = true, has_power = false, is_signed = false;
    static constexpr const int8_t *list = nullptr;
    static constexpr int d_at = offsetof(te_block_q5_1, d), m_at = offsetof(te_block_q5_1, m),
                         high_at = offsetof(te_block_q5_1, qh), minus = 0;
};
template <> struct kind_32<te_block_iq4_nl> {
    static constexpr bool has_min = false, has_fifth = false, has_power = false, is_signed = true;
    static constexpr const int8_t *list = iq4_values;
    static constexpr int d_at = offsetof(te_block_iq4_nl, d), m_at = 0, high_at = 0, minus = 0;
};

template <> struct kind_32<te_block_mxfp4> {
    static constexpr bool has_min = false, has_fifth = false, has_power = true, is_signed = false;
    static constexpr const int8_t *list = fp4_values_plus_16;
    static constexpr int d_at = offsetof(te_block_mxfp4, e), m_at = 0, high_at = 0, minus = 16;
};

template <class V, class B> struct codec_32 : kind_32<B> {
    using kind_32<B>::has_min, kind_32<B>::has_fifth, kind_32<B>::has_power, kind_32<B>::is_signed, kind_32<B>::list,
        kind_32<B>::d_at, kind_32<B>::m_at, kind_32<B>::high_at, kind_32<B>::minus;
    static constexpr bool shares = false;
    static constexpr int L = V::lanes, chunk = 8 * L, q_at = offsetof(B, q);
    static constexpr int block = 32, block_bytes = sizeof(B), bytes = L / 4 * block_bytes;

    struct act {
        alignas(64) int8_t q[2][4 * L];
        alignas(4 * L) int32_t start[L];
        alignas(4 * L) float d[L];
        alignas(4 * L) float sum[L]; // of a block's activations, in its first lane
    };
    static void pack(const quantised &x, act &a) {
        int32_t c[2][L];
        for (int half = 0; half < 2; half++) {
            for (int b = 0; b < L / 4; b++) memcpy(a.q[half] + 16 * b, x.q + 32 * b + 16 * half, 16);
            pack_start<V>(a.q[half], is_signed ? V::signed_offset : minus, c[half]);
        }
        for (int l = 0; l < L; l++) {
            a.start[l] = c[0][l] + c[1][l];
            a.d[l] = x.d[l / 4];
            a.sum[l] = l % 4 == 0 ? x.d[l / 4] * (float)x.sum[l / 4] : 0.0f;
        }
    }
    static void registers(const uint8_t *p, typename V::i32 &a, typename V::i32 &b) {
        const typename V::i32 q = V::template blocks16<block_bytes, q_at>(p);
        a = V::bits_and(q, 15);
        b = V::high4(q);
        if constexpr (has_fifth) {
            a = V::bits_or(a, V::template block_bits<block_bytes, high_at>(p, 16));
            b = V::bits_or(b, V::template block_bits<block_bytes, high_at + 2>(p, 16));
        }
        if constexpr (list != nullptr) {
            a = V::lookup(a, list);
            b = V::lookup(b, list);
        }
    }
    static typename V::f32 scales(const uint8_t *p) {
        if constexpr (has_power)
            return V::mxfp4_scales(p);
        else
            return V::template block_halves<block_bytes, d_at>(p);
    }
    static typename V::f32 mac(const uint8_t *p, const act &x, typename V::f32 acc) {
        typename V::i32 a, b, s = V::load_bytes(x.start);
        registers(p, a, b);
        if constexpr (is_signed)
            s = V::dot_s8(V::dot_s8(s, a, V::load_bytes(x.q[0])), b, V::load_bytes(x.q[1]));
        else
            s = V::dot2_u8(s, a, V::load_bytes(x.q[0]), b, V::load_bytes(x.q[1]));
        if constexpr (has_min) acc = V::fma(V::template block_halves<block_bytes, m_at>(p), V::load(x.sum), acc);
        return V::fma(V::to_f32(s), V::mul(scales(p), V::load(x.d)), acc);
    }
    // Vector 2k of y is byte k of the low halves' lanes, 2k + 1 of the high ones'.
    static constexpr int stride = 2 * L;
    static constexpr int place(int c) { return L * (c % 32 / 16) + 4 * (c / 32); }
    template <int k> static void step(typename V::i32 q, typename V::f32 s, typename V::f32 m, float *y) {
        typename V::f32 w;
        if constexpr (is_signed)
            w = V::template float_s8<k>(q);
        else
            w = V::template float_u5<k, minus>(q);
        w = V::fma(w, s, V::load(y + 2 * L * k));
        V::store(y + 2 * L * k, has_min ? V::add(w, m) : w);
    }
    static void four_steps(typename V::i32 q, typename V::f32 s, typename V::f32 m, float *y) {
        step<0>(q, s, m, y);
        step<1>(q, s, m, y);
        step<2>(q, s, m, y);
        step<3>(q, s, m, y);
    }
    static void axpy(const uint8_t *p, float h, float *y) {
        typename V::i32 a, b;
        registers(p, a, b);
        const typename V::f32 s = V::mul(scales(p), V::splat(h));
        typename V::f32 m = s;
        if constexpr (has_min) m = V::mul(V::template block_halves<block_bytes, m_at>(p), V::splat(h));
        four_steps(a, s, m, y);
        four_steps(b, s, m, y + L);
    }
    static void to_f32(const uint8_t *p, float *out) {
        sixteen q[2];
        memcpy(q, p + q_at, 16);
        q[1] = q[0] >> 4;
        q[0] &= 15;
        if constexpr (has_fifth) { // the halves of the word, as if they were two blocks
            alignas(64) uint8_t fifth[4 * L];
            V::store_i32(fifth, V::template block_bits<2, high_at>(p, 16));
            for (int half = 0; half < 2; half++) {
                sixteen bits;
                memcpy(&bits, fifth + 16 * half, 16);
                q[half] |= bits;
            }
        }
        if constexpr (list != nullptr)
            for (int half = 0; half < 2; half++) V::lookup16(list, &q[half]);
        if constexpr (has_power) { // no offset after the scale: that of the largest powers has no number
            const typename V::f32 d = V::splat(te_half_e8m0(p[d_at])), off = V::splat((float)minus);
            for (int i = 0; i < 32; i += L)
                V::store(out + i, V::mul(V::sub(V::widen_s8((const int8_t *)q + i), off), d));
            return;
        }
        const typename V::f32 d = V::splat(V::half(p + d_at));
        const typename V::f32 m = V::splat(has_min ? V::half(p + m_at) : (float)-minus * V::half(p + d_at));
        for (int i = 0; i < 32; i += L) V::store(out + i, V::add(V::mul(V::widen_s8((const int8_t *)q + i), d), m));
    }
};
template <class V> using codec_q4_1 = codec_32<V, te_block_q4_1>;
template <class V> using codec_q5_0 = codec_32<V, te_block_q5_0>;
template <class V> using codec_q5_1 = codec_32<V, te_block_q5_1>;
template <class V> using codec_iq4_nl = codec_32<V, te_block_iq4_nl>;
template <class V> using codec_mxfp4 = codec_32<V, te_block_mxfp4>;
} // namespace

#endif
