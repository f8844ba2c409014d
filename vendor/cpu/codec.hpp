// codec.hpp - how each weight format becomes vectors; written once, over the vocabulary V (vec_scalar.hpp).
//
// A float codec has
//     bytes                    of one weight
//     load(p), load_part(p,n)  V::lanes weights, or the first n of them
// A block codec has
//     chunk, bytes             weights and bytes that are worked on together: whole blocks
//     block, block_bytes       weights and bytes of one block
//     act                      the activations of a chunk, in the order in which the weights unpack
//     pack(x, act)             fills it from quantised activations
//     mac(p, act, acc)         acc + lane-wise partial sums of chunk p . act
//     axpy(p, h, y)            y += h * chunk p
//     axpy_few<T>(p, h, y)     y[t] += h[t] * chunk p, if `shares`: it unpacks the chunk once for T vectors
//     place(c), stride         where y keeps columns c .. c + 15 of the chunk: c + 4j + k at place(c) + stride * k + j
//                              (stride 1: all columns are in order, there is no place)
//     to_f32(p, out)           block p in natural order
// A chunk is 8 * lanes weights (Q8_0), 16 * lanes (Q4_0) or a block of 256 (K formats). Rows of the former may end inside a chunk:
// rows.hpp then works on a copy that is filled up with zeros.
// A short loop over t that has to leave nothing but its bodies.
#if defined(__clang__)
#define TE_EACH(T) _Pragma("unroll") for (int t = 0; t < T; t++)
#else
#define TE_EACH(T) _Pragma("GCC unroll 8") for (int t = 0; t < T; t++)
#endif

namespace {

template <class V> struct codec_f32 {
    static constexpr int bytes = 4;
    static typename V::f32 load(const uint8_t *p) { return V::load(p); }
    static typename V::f32 load_part(const uint8_t *p, int n) { return V::load_part(p, n); }
};
template <class V> struct codec_f16 {
    static constexpr int bytes = 2;
    static typename V::f32 load(const uint8_t *p) { return V::load_f16(p); }
    static typename V::f32 load_part(const uint8_t *p, int n) { return V::load_f16_part(p, n); }
};
template <class V> struct codec_bf16 {
    static constexpr int bytes = 2;
    static typename V::f32 load(const uint8_t *p) { return V::load_bf16(p); }
    static typename V::f32 load_part(const uint8_t *p, int n) { return V::load_bf16_part(p, n); }
};

// Activations of a chunk as int8 per 32: x = d * q, |q| <= 127, sum = the sum of 32 q.
struct quantised {
    alignas(64) int8_t q[256];
    float d[8];
    int32_t sum[8];
};

// 32 floats. If one is not finite, d is not a number (and q is something). Below 1e-35, where 127 / max would overflow,
// all is 0.
template <class V> void quantise32(const float *x, int unit, quantised &out) {
    constexpr int L = V::lanes;
    typename V::f32 most = V::zero(), trouble = V::zero();
    for (int i = 0; i < 32; i += L) {
        most = V::max(most, V::abs(V::load(x + i)));
        trouble = V::fma(V::load(x + i), V::zero(), trouble); // 0 or not a number
    }
    const float m = V::hmax(most);
    const typename V::f32 scale = V::splat(m > 1e-35f ? 127.0f / m : 0.0f);
    int8_t *q = out.q + 32 * unit;
    for (int i = 0; i < 32; i += L) {
        const typename V::f32 v = V::max(V::round(V::mul(V::load(x + i), scale)), V::splat(-127.0f));
        V::store_s8(q + i, V::min(v, V::splat(127.0f)));
    }
    int32_t sum = 0;
    for (int i = 0; i < 32; i++) sum += q[i];
    out.d[unit] = (m > 1e-35f ? m / 127.0f : 0.0f) + V::sum(trouble);
    out.sum[unit] = sum;
}

// What the accumulators of register q start from, so that `offset` is taken off every weight.
template <class V> void pack_start(const int8_t *q, int offset, int32_t *c) {
    const typename V::i32 sums = V::dot_u8(V::zero_i32(), V::splat_bytes((uint8_t)offset), V::load_bytes(q));
    V::store_i32(c, V::sub_i32(V::zero_i32(), sums));
}

// ---- Q4_0: one register holds lanes / 4 blocks, its low nibbles meet q[0], its high nibbles q[1]. A chunk is two of
// them. Activations stay small, with a number for each block and not for each lane: those of long rows are in the first
// cache as long as weights stream through it (11008 columns, AVX-512: 93 instead of 82 % of the read rate).
template <class V> struct codec_q4_0 {
    static constexpr int L = V::lanes, chunk = 16 * L, bytes = chunk / 32 * 18, n_blocks = L / 4;
    struct act {
        alignas(4 * L) int8_t q[2][2][4 * L];
        int32_t start[2][n_blocks];
        float d[2][n_blocks];
    };
    static void pack(const quantised &x, act &a) {
        for (int b = 0; b < 2 * n_blocks; b++) {
            const int i = b / n_blocks, at = b % n_blocks;
            for (int half = 0; half < 2; half++) memcpy(a.q[i][half] + 16 * at, x.q + 32 * b + 16 * half, 16);
            a.start[i][at] = -8 * x.sum[b];
            a.d[i][at] = x.d[b];
        }
    }
    static typename V::f32 mac(const uint8_t *p, const act &a, typename V::f32 acc) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++, p += bytes / 2) {
            const typename V::i32 s = V::dot_nibbles(V::one_in_four(a.start[i]), V::q4_0_bytes(p),
                                                     V::load_bytes(a.q[i][0]), V::load_bytes(a.q[i][1]));
            acc = V::fma(V::to_f32(s), V::mul(V::q4_0_scales(p), V::four_times(a.d[i])), acc);
        }
        return acc;
    }
    // Vector k of y, of either register's, is nibble k of every 32-bit lane.
    static constexpr int stride = 2 * L;
    static constexpr int place(int c) { return c / (8 * L) * (8 * L) + L * (c % 32 / 16) + 4 * (c % (8 * L) / 32); }
    static constexpr bool shares = true;
    template <int k, int T> static void step(typename V::i32 q, const typename V::f32 *s, float *const *y, int at) {
        const typename V::f32 w = V::template float_nibble_minus_8<k>(q);
        TE_EACH(T) V::store(y[t] + at + L * k, V::fma(w, s[t], V::load(y[t] + at + L * k)));
    }
    template <int T> static void axpy_few(const uint8_t *p, const float *h, float *const *y) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++, p += bytes / 2) {
            const int at = 8 * L * i;
            const typename V::i32 q = V::q4_0_bytes(p);
            const typename V::f32 d = V::q4_0_scales(p);
            typename V::f32 s[T];
            TE_EACH(T) s[t] = V::mul(d, V::splat(h[t]));
            step<0, T>(q, s, y, at);
            step<1, T>(q, s, y, at);
            step<2, T>(q, s, y, at);
            step<3, T>(q, s, y, at);
            step<4, T>(q, s, y, at);
            step<5, T>(q, s, y, at);
            step<6, T>(q, s, y, at);
            step<7, T>(q, s, y, at);
        }
    }
    static void axpy(const uint8_t *p, float h, float *y) { axpy_few<1>(p, &h, &y); }
    static constexpr int block = 32, block_bytes = 18;
    static void to_f32(const uint8_t *p, float *out) {
        typedef uint8_t sixteen __attribute__((vector_size(16)));
        sixteen q[2];
        memcpy(q, p + 2, 16);
        q[1] = q[0] >> 4;
        q[0] &= 15;
        const typename V::f32 d = V::splat(V::half(p)), eight = V::splat(8.0f);
        for (int i = 0; i < 32; i += L)
            V::store(out + i, V::mul(V::sub(V::widen_u8((const uint8_t *)q + i), eight), d));
    }
};

// ---- Q8_0: two registers, each lanes / 8 blocks
template <class V> struct codec_q8_0 {
    static constexpr int L = V::lanes, chunk = 8 * L, bytes = chunk / 32 * 34;
    struct act {
        alignas(64) int8_t q[2][4 * L];
        alignas(4 * L) int32_t start[2][L];
        alignas(4 * L) float d[2][L];
    };
    static void pack(const quantised &x, act &a) {
        memcpy(a.q, x.q, sizeof a.q);
        for (int i = 0; i < 2; i++) {
            pack_start<V>(a.q[i], V::signed_offset, a.start[i]);
            for (int l = 0; l < L; l++) a.d[i][l] = x.d[i * L / 8 + l / 8];
        }
    }
    static typename V::f32 mac(const uint8_t *p, const act &a, typename V::f32 acc) {
        const uint8_t *p1 = p + bytes / 2;
        const typename V::i32 s0 = V::dot_s8(V::load_bytes(a.start[0]), V::q8_0_bytes(p), V::load_bytes(a.q[0]));
        const typename V::i32 s1 = V::dot_s8(V::load_bytes(a.start[1]), V::q8_0_bytes(p1), V::load_bytes(a.q[1]));
        acc = V::fma(V::to_f32(s0), V::mul(V::q8_0_scales(p), V::load(a.d[0])), acc);
        return V::fma(V::to_f32(s1), V::mul(V::q8_0_scales(p1), V::load(a.d[1])), acc);
    }
    static constexpr int stride = 1;
    static constexpr bool shares = true;
    template <int T> static void axpy_few(const uint8_t *p, const float *h, float *const *y) {
        // All scales first: a store to y might change them, as far as the compiler knows.
        typename V::f32 s[chunk / 32][T];
#pragma GCC unroll 4
        for (int b = 0; b < chunk / 32; b++) {
            const typename V::f32 d = V::splat_half(p + 34 * b);
            TE_EACH(T) s[b][t] = V::mul(d, V::splat(h[t]));
        }
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            const int b = k * L / 32;
            const typename V::f32 w = V::widen_s8(p + 34 * b + 2 + k * L % 32);
            TE_EACH(T) V::store(y[t] + L * k, V::fma(w, s[b][t], V::load(y[t] + L * k)));
        }
    }
    static void axpy(const uint8_t *p, float h, float *y) { axpy_few<1>(p, &h, &y); }
    static constexpr int block = 32, block_bytes = 34;
    static void to_f32(const uint8_t *p, float *out) {
        const typename V::f32 d = V::splat(V::half(p));
        for (int i = 0; i < 32; i += L) V::store(out + i, V::mul(V::widen_s8(p + 2 + i), d));
    }
};
} // namespace
