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
//     axpy_all<R, T>(p, h, y)  if `shares`, instead of it: y[t] += h[r * T + t] * chunk p[r] for R rows in their order and T
//                              vectors, where each chunk is unpacked once and each y read and written once
//     rows                     how many rows pay
//     place(c), stride         where y keeps columns c .. c + 15 of the chunk: c + 4j + k at place(c) + stride * k + j
//                              (stride 1: all columns are in order, there is no place)
//     to_f32(p, out)           block p in natural order
// A chunk is 8 * lanes weights (Q8_0), 16 * lanes (Q4_0) or a block of 256 (K formats). Rows of the former may end inside a chunk:
// rows.hpp then works on a copy that is filled up with zeros.
// Short loops over t and r that have to leave nothing but their bodies.
#ifndef TE_CODEC_HPP
#define TE_CODEC_HPP

#if defined(__clang__)
#define TE_EACH(T)     _Pragma("unroll") for (int t = 0; t < T; t++)
#define TE_EACH_ROW(R) _Pragma("unroll") for (int r = 0; r < R; r++)
#else
#define TE_EACH(T)     _Pragma("GCC unroll 8") for (int t = 0; t < T; t++)
#define TE_EACH_ROW(R) _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
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
    typename V::f32 all = V::zero();
    for (int i = 0; i < 32; i += L) {
        const typename V::f32 v = V::max(V::round(V::mul(V::load(x + i), scale)), V::splat(-127.0f)),
                              bounded = V::min(v, V::splat(127.0f));
        V::store_s8(q + i, bounded);
        all = V::add(all, bounded); // q is not read back: loads that span several stores wait for all of them
    }
    const float sum = V::sum(all);
    out.d[unit] = (m > 1e-35f ? m / 127.0f : 0.0f) + V::sum(trouble);
    out.sum[unit] = sum == sum ? (int32_t)sum : 0;
}

// y += w[0] * s[0] + w[1] * s[1] ..., one after the other, for T vectors y: a vector of the columns of R rows.
template <class V, int R, int T>
inline void add_rows(const typename V::f32 *w, const typename V::f32 (*s)[T], float *const *y, int at) {
    TE_EACH(T) {
        typename V::f32 sum = V::load(y[t] + at);
        TE_EACH_ROW(R) sum = V::fma(w[r], s[r][t], sum);
        V::store(y[t] + at, sum);
    }
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
    static constexpr int L = V::lanes, chunk = 16 * L, bytes = chunk / 32 * (int)sizeof(te_block_q4_0),
                         n_blocks = L / 4;
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
    // A chunk's registers, and in their lanes the blocks' scales times `by`, one factor for each or one for all.
    static typename V::f32 times(typename V::f32 d, const float *by, int i) {
        return V::mul(d, V::four_times(by + n_blocks * i));
    }
    static typename V::f32 times(typename V::f32 d, float by, int) { return V::mul(d, V::splat(by)); }
    template <class D> static void unpack(const uint8_t *p, D by, typename V::i32 *q, typename V::f32 *s) {
        if constexpr (L == 16) {
            V::q4_0_pair(p, by, q, s);
        } else {
            for (int i = 0; i < 2; i++, p += bytes / 2) {
                q[i] = V::q4_0_bytes(p);
                s[i] = times(V::q4_0_scales(p), by, i);
            }
        }
    }
    static typename V::f32 mac(const uint8_t *p, const act &a, typename V::f32 acc) {
        typename V::i32 q[2];
        typename V::f32 f[2];
        unpack(p, a.d[0], q, f);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const typename V::i32 s =
                V::dot_nibbles(V::one_in_four(a.start[i]), q[i], V::load_bytes(a.q[i][0]), V::load_bytes(a.q[i][1]));
            acc = V::fma(V::to_f32(s), f[i], acc);
        }
        return acc;
    }
    // Vector k of y, of either register's, is nibble k of every 32-bit lane.
    static constexpr int stride = 2 * L;
    static constexpr int place(int c) { return c / (8 * L) * (8 * L) + L * (c % 32 / 16) + 4 * (c % (8 * L) / 32); }
    static constexpr bool shares = true;
    static constexpr int rows = V::rows;
    template <int k, int R, int T>
    static void step(const typename V::i32 *q, const typename V::f32 (*s)[T], float *const *y, int at) {
        typename V::f32 w[R];
        TE_EACH_ROW(R) w[r] = V::template float_nibble_minus_8<k>(q[r]);
        add_rows<V, R, T>(w, s, y, at + L * k);
    }
    template <int R, int T> static void axpy_all(const uint8_t *const *p, const float *h, float *const *y) {
        typename V::i32 q[2][R];
        typename V::f32 s[2][R][T];
        TE_EACH_ROW(R) {
            typename V::i32 own[2];
            typename V::f32 d[2];
            unpack(p[r], T == 1 ? h[r] : 1.0f, own, d);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                q[i][r] = own[i];
                TE_EACH(T) s[i][r][t] = T == 1 ? d[i] : V::mul(d[i], V::splat(h[r * T + t]));
            }
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const int at = 8 * L * i;
            step<0, R, T>(q[i], s[i], y, at);
            step<1, R, T>(q[i], s[i], y, at);
            step<2, R, T>(q[i], s[i], y, at);
            step<3, R, T>(q[i], s[i], y, at);
            step<4, R, T>(q[i], s[i], y, at);
            step<5, R, T>(q[i], s[i], y, at);
            step<6, R, T>(q[i], s[i], y, at);
            step<7, R, T>(q[i], s[i], y, at);
        }
    }
    static constexpr int block = 32, block_bytes = sizeof(te_block_q4_0);
    static void to_f32(const uint8_t *p, float *out) {
        typedef uint8_t sixteen __attribute__((vector_size(16)));
        const te_block_q4_0 *from = (const te_block_q4_0 *)p;
        sixteen q[2];
        memcpy(q, from->q, 16);
        q[1] = q[0] >> 4;
        q[0] &= 15;
        const typename V::f32 d = V::splat(V::half(from->d)), eight = V::splat(8.0f);
        for (int i = 0; i < 32; i += L)
            V::store(out + i, V::mul(V::sub(V::widen_u8((const uint8_t *)q + i), eight), d));
    }
};

// ---- Q8_0: two registers, each lanes / 8 blocks. Scales of the activations by block, as in Q4_0.
template <class V> struct codec_q8_0 {
    static constexpr int L = V::lanes, chunk = 8 * L, bytes = chunk / 32 * (int)sizeof(te_block_q8_0), n_blocks = L / 8;
    static constexpr bool has_start = V::signed_offset != 0; // no zeros to add: 1.2 times, AVX2
    struct act {
        alignas(4 * L) int8_t q[2][4 * L];
        alignas(has_start ? 4 * L : 4) int32_t start[2][has_start ? L : 1];
        float d[2][n_blocks];
    };
    static typename V::i32 start(const act &a, int i) {
        if constexpr (has_start) return V::load_bytes(a.start[i]);
        return V::zero_i32();
    }
    static void pack(const quantised &x, act &a) {
        memcpy(a.q, x.q, sizeof a.q);
        for (int i = 0; i < 2; i++) {
            if constexpr (has_start) pack_start<V>(a.q[i], V::signed_offset, a.start[i]);
            for (int b = 0; b < n_blocks; b++) a.d[i][b] = x.d[i * n_blocks + b];
        }
    }
    static typename V::f32 mac(const uint8_t *p, const act &a, typename V::f32 acc) {
        typename V::i32 q[2];
        typename V::f32 f[2];
        if constexpr (L == 16) {
            V::q8_0_pair(p, a.d[0], q, f);
        } else {
            static_assert(n_blocks == 1, "a register is a block");
            for (int i = 0; i < 2; i++) {
                const te_block_q8_0 *from = (const te_block_q8_0 *)p + i;
                q[i] = V::load_bytes(from->q);
                f[i] = V::mul(V::splat_half(from->d), V::splat(a.d[i][0]));
            }
        }
        const typename V::i32 s0 = V::dot_s8(start(a, 0), q[0], V::load_bytes(a.q[0]));
        const typename V::i32 s1 = V::dot_s8(start(a, 1), q[1], V::load_bytes(a.q[1]));
        acc = V::fma(V::to_f32(s0), f[0], acc);
        return V::fma(V::to_f32(s1), f[1], acc);
    }
    static constexpr int stride = 1;
    static constexpr bool shares = true;
    static constexpr int rows = V::rows;
    // The scales of a chunk's blocks times h, each in all lanes.
    static void splats(const uint8_t *p, float h, typename V::f32 *s) {
        if constexpr (L == 16)
            V::q8_0_splats(p, h, s);
        else
            for (int b = 0; b < chunk / 32; b++)
                s[b] = V::mul(V::splat_half(((const te_block_q8_0 *)p)[b].d), V::splat(h));
    }
    template <int R, int T> static void axpy_all(const uint8_t *const *p, const float *h, float *const *y) {
        // All scales first: a store to y might change them, as far as the compiler knows.
        typename V::f32 s[chunk / 32][R][T];
        TE_EACH_ROW(R) {
            typename V::f32 d[chunk / 32];
            splats(p[r], T == 1 ? h[r] : 1.0f, d);
#pragma GCC unroll 4
            for (int b = 0; b < chunk / 32; b++) {
                TE_EACH(T) s[b][r][t] = T == 1 ? d[b] : V::mul(d[b], V::splat(h[r * T + t]));
            }
        }
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            const int b = k * L / 32;
            typename V::f32 w[R];
            TE_EACH_ROW(R) w[r] = V::widen_s8(((const te_block_q8_0 *)p[r])[b].q + k * L % 32);
            add_rows<V, R, T>(w, s[b], y, L * k);
        }
    }
    static constexpr int block = 32, block_bytes = sizeof(te_block_q8_0);
    static void to_f32(const uint8_t *p, float *out) {
        const te_block_q8_0 *from = (const te_block_q8_0 *)p;
        const typename V::f32 d = V::splat(V::half(from->d));
        for (int i = 0; i < 32; i += L) V::store(out + i, V::mul(V::widen_s8(from->q + i), d));
    }
};
} // namespace

#endif
