// rows_q4_0.hpp - dot products of Q4_0 on AVX2 and AVX-512, for one token and for two; rows_panel.hpp has those for more,
// and the rest is codec_q4_0's.
//
// As many blocks as a register has lanes are worked on together. Their products are added up, by transposing, to one
// integer for each, so that a lane is a block: one conversion, one product of scales and one fma for all of them, instead
// of one for every register. A row's sum has in lane l the blocks l, l + lanes, l + 2 * lanes ... of an order that is the
// vocabulary's.
//
// One thread of a Zen 5, 4096 columns, GB/s read for 1 and 2 tokens: AVX2, from memory, codec_q4_0's 28 and 17.5, these 36
// and 24.5; AVX-512, from the second cache, 62 and 40, these 78 and 48 (from memory both reach what it gives).
#ifndef TE_ROWS_Q4_0_HPP
#define TE_ROWS_Q4_0_HPP

namespace {

// What these have in common with rows_q8_0.hpp. C: the codec of the rest; K: the kernels themselves, which have
//     act, act_pack      of a chunk, as many blocks as a register has lanes
//     mac<T>(p, x, sum)  sum[t] += a chunk . x[t]
template <class V, class C, class K> struct lane_rows : block_rows<V, C> {
    using f32 = typename V::f32;
    static constexpr int L = V::lanes, chunk = 32 * L, block_bytes = C::block_bytes, bytes = L * block_bytes;

    static size_t act_bytes(int32_t cols) { return (size_t)((cols + chunk - 1) / chunk) * sizeof(typename K::act); }

    // Of a chunk of which the row has only some blocks, often a half.
    template <int T, class act>
    __attribute__((noinline, flatten)) static void mac_part(const uint8_t *p, int32_t cols, const act *const *x,
                                                            f32 *sum) {
        uint8_t copy[bytes] = {};
        if (cols == chunk / 2)
            memcpy(copy, p, bytes / 2);
        else
            memcpy(copy, p, (size_t)(cols / 32) * block_bytes);
        K::template mac<T>(copy, x, sum);
    }

    template <int N, class act> static float dot_row(const uint8_t *w, const act *a, int32_t cols, fetched<N> next) {
        f32 sum = V::zero();
        for (; cols >= chunk; cols -= chunk, w += bytes, a++) {
            next.template piece<bytes>();
            K::template mac<1>(w, &a, &sum);
        }
        if (cols) mac_part<1>(w, cols, &a, &sum);
        return V::sum(sum);
    }
    static void dot(const te_mat *m, te_rows rows, te_ahead ahead, const void *acts, float *y) {
        typedef typename K::act act;
        const row_ahead next(m, rows, ahead, (size_t)(m->cols / 32) * block_bytes);
        if (next.is_list)
            dot_all<2>(m, rows, next, (const act *)acts, y);
        else
            dot_all<1>(m, rows, next, (const act *)acts, y);
    }
    template <int N, class act>
    static void dot_all(const te_mat *m, te_rows rows, const row_ahead &next, const act *acts, float *y) {
        for (int32_t i = 0; i < rows.n; i++) {
            const uint8_t *w = row_start(m, rows, i);
            y[i] = dot_row(w, acts, m->cols, fetched<N>::beside(next, i, w));
        }
    }
};

// For rows_batch.hpp.
template <class V, class C, class K, int acc_floats = C::chunk> struct lane_walk : block_walk<V, C, acc_floats> {
    using act = typename K::act;
    static constexpr int sums = 1;
    // 24 KiB of eight tokens' activations
    static constexpr int32_t of_eight = 3072 / (int)sizeof(act) * K::chunk;
    static int32_t columns(int32_t n_tok) { return of_eight * (n_tok <= 2 ? 4 : n_tok <= 4 ? 2 : 1); }

    template <int T, int R>
    static void dot(const uint8_t *const *row, const char *const *packed, int32_t at, int32_t n, bool last,
                    typename V::f32 (*sum)[sums], const uint8_t *const *following) {
        const uint8_t *w = *row, *next = *following;
        const act *x[T];
        TE_EACH(T) x[t] = (const act *)packed[t] + at / K::chunk;
        for (; n >= K::chunk; n -= K::chunk, w += K::bytes, next += K::bytes) {
            prefetch<K::bytes>(next);
            K::template mac<T>(w, x, *sum);
            TE_EACH(T) x[t]++;
        }
        if (last && n) K::template mac_part<T>(w, n, x, *sum);
    }
    static float total(const typename V::f32 *sum) { return V::sum(*sum); }
};

template <class V> struct q4_0_rows : lane_rows<V, codec_q4_0<V>, q4_0_rows<V>> {
    using walk = lane_walk<V, codec_q4_0<V>, q4_0_rows>;
    using f32 = typename V::f32;
    using i32 = typename V::i32;
    static constexpr int L = V::lanes, chunk = 32 * L;

    // Of a chunk. Register i has blocks i * L / 4 + j, sixteen bytes each.
    struct act {
        alignas(64) int8_t q[4][2][4 * L];
        alignas(4 * L) int32_t start[L]; // by lanes
        alignas(4 * L) float d[L];
    };
    static void act_pack(const float *x, int32_t cols, void *to) {
        act *a = (act *)to;
        for (int32_t c = 0; c < cols; a++) {
            memset(a, 0, sizeof *a);
            for (int b = 0; b < L && c < cols; b++, c += 32) {
                const int i = b / (L / 4), j = b % (L / 4), lane = 4 * j + i;
                quantised one;
                quantise32<V>(x + c, 0, one);
                for (int half = 0; half < 2; half++) memcpy(a->q[i][half] + 16 * j, one.q + 16 * half, 16);
                a->start[lane] = -8 * one.sum[0];
                a->d[lane] = one.d[0];
            }
        }
    }

    // sum[t] += a chunk . x[t]. A register's nibbles are unpacked once for all T.
    template <int T> static void mac(const uint8_t *p, const act *const *x, f32 *sum) {
        i32 q[4], half[2][T];
        f32 d;
        V::q4_0_chunk(p, q, &d);
        TE_EACH_ROW(2) {
            i32 s[2][T];
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
                const int i = 2 * r + k;
                const i32 low = V::bits_and(q[i], 15), high = V::high4(q[i]);
                TE_EACH(T) s[k][t] = V::dots(low, x[t]->q[i][0], high, x[t]->q[i][1]);
            }
            TE_EACH(T) half[r][t] = V::fold_dwords(s[0][t], s[1][t]);
        }
        TE_EACH(T) {
            const i32 whole = V::fold_qwords(half[0][t], half[1][t], V::load_bytes(x[t]->start));
            sum[t] = V::fma(V::to_f32(whole), V::mul(d, V::load(x[t]->d)), sum[t]);
        }
    }
};

// For rows_panel.hpp.
template <class V> struct q4_0_in_panel : q4_0_rows<V> {
    using i32 = typename V::i32;
    static constexpr int L = V::lanes, high = 4 * L;
    static constexpr int at_q(int b) { return 8 * L * (b / (L / 4)) + 16 * (b % (L / 4)); }
    static constexpr int lane(int b) { return 4 * (b % (L / 4)) + b / (L / 4); }
    static void unpack(const uint8_t *const *row, size_t at, i32 *w) { V::q4_0_panel(row, at, w); }
    static void scales(const uint8_t *const *row, size_t at, uint16_t *d) { V::q4_0_panel_scales(row, at, d); }
};
} // namespace

#endif
