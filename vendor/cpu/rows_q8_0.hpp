// rows_q8_0.hpp - dot products of Q8_0 on AVX2 and AVX-512, for one token and for two; rows_tile.hpp and rows_panel.hpp have
// those for more, and the rest is codec_q8_0's.
//
// As in rows_q4_0.hpp a lane is a block: eight registers of weights become one of whole numbers, and a row's sum has in each
// lane every eighth or sixteenth block. A token's products of a block are the same number however they are added up, so that
// tiles may multiply words where AVX2's products of bytes do not fit into what it adds them up in.
//
// A Zen 4, rows in the second cache, cycles for 256 weights and a token, 1, 8 and 32 tokens, codec_q8_0's and so: AVX2 28.8,
// 23.6 and 23.6, now 24.0, 14.9 and 12.8; AVX-512 24.3, 15.6 and 15.7, now 19.2, 8.1 and 6.8.
#ifndef TE_ROWS_Q8_0_HPP
#define TE_ROWS_Q8_0_HPP

namespace {

// The activations of a chunk, start and d by lanes. has_words: once more as words, in the order of q8_0_lanes; else with what
// a block's sum begins with, as its weights are V::q8_0_offset more than they are.
template <class V, bool has_words> struct q8_0_act {
    static constexpr int L = V::lanes;
    alignas(64) int8_t q[L][32];
    alignas(4 * L) int32_t start[L];
    alignas(4 * L) float d[L];
};
template <class V> struct q8_0_act<V, true> {
    static constexpr int L = V::lanes;
    alignas(64) int8_t q[L][32];
    alignas(64) int16_t words[L][32];
    alignas(4 * L) float d[L];
};

template <class V> struct q8_0_rows : lane_rows<V, codec_q8_0<V>, q8_0_rows<V>> {
    using walk = lane_walk<V, codec_q8_0<V>, q8_0_rows>;
    using f32 = typename V::f32;
    using i32 = typename V::i32;
    static constexpr int L = V::lanes;
    static constexpr bool has_words = V::q8_0_offset == 0;
    using act = q8_0_act<V, has_words>;

    static void act_pack(const float *x, int32_t cols, void *to) {
        act *a = (act *)to;
        for (int32_t c = 0; c < cols; a++) {
            memset(a, 0, sizeof *a);
            for (int b = 0; b < L && c < cols; b++, c += 32) {
                const int lane = V::q8_0_lane(b);
                quantised one;
                quantise32<V>(x + c, 0, one);
                memcpy(a->q[b], one.q, 32);
                a->d[lane] = one.d[0];
                if constexpr (has_words)
                    for (int k = 0; k < 32; k += 4) V::even_and_odd(one.q + k, a->words[b] + k);
                else
                    a->start[lane] = -V::q8_0_offset * one.sum[0];
            }
        }
    }

    // sum[t] += a chunk . x[t].
    template <int T> static void mac(const uint8_t *p, const act *const *x, f32 *sum) {
        const typename V::q8_0_chunk chunk(p);
        i32 half[2][T];
        TE_EACH_ROW(2) {
            typename V::q8_0_weights w[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) w[i] = chunk.weights(4 * r + i);
            TE_EACH(T) {
                i32 own[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) own[i] = V::q8_0_dot(w[i], V::load_bytes(x[t]->q[0] + 4 * L * (4 * r + i)));
                half[r][t] = V::four_sums(own);
            }
        }
        const f32 d = chunk.scales();
        TE_EACH(T) {
            i32 whole = V::two_halves(half[0][t], half[1][t]);
            if constexpr (!has_words) whole = V::add_i32(whole, V::load_bytes(x[t]->start));
            sum[t] = V::fma(V::to_f32(whole), V::mul(d, V::load(x[t]->d)), sum[t]);
        }
    }
};

// For rows_tile.hpp: bytes, or words of each four the first and the third, then the second and the fourth.
template <class V> struct q8_0_lanes : q8_0_rows<V> {
    using K = q8_0_rows<V>;
    using i32 = typename V::i32;
    static constexpr bool words = K::has_words, has_minima = false, has_scales = false;
    static constexpr int L = V::lanes, ROWS = 2 * L, parts = 1, chunk_bytes = K::bytes, STEPS = words ? 16 : 8;
    struct unpacked {
        alignas(32) uint8_t q[L][2][STEPS][4 * L];
        alignas(32) uint16_t d[L][ROWS];
    };
    static constexpr int at_q(int u) {
        if constexpr (words) return (int)offsetof(typename K::act, words) + 64 * u;
        return 32 * u;
    }
    static constexpr int step(int k) { return 4 * k; }
    static constexpr int lane(int u) { return V::q8_0_lane(u); }

    static typename V::f32 scale(const unpacked &w, int u, int g) { return V::load_f16(w.d[u] + g * L); }
    static void unpack(const uint8_t *const *row, size_t at, int n, int g, unpacked &w) {
        const uint8_t *p[L]; // in registers
        TE_EACH_ROW(L) p[r] = row[r] + at;
        for (int u = 0; u < n; u++) {
            V::eight_halves(p, w.d[u] + g * L);
            for (int half = 0; half < 2; half++) {
                i32 v[4];
                V::transposed16(p, offsetof(te_block_q8_0, q) + 16 * (size_t)half, v);
                V::template q8_0_store<STEPS / 2>(w.q[u][g] + STEPS / 2 * half, v);
            }
            TE_EACH_ROW(L) p[r] += K::block_bytes;
        }
    }
};

// For rows_panel.hpp.
template <class V> struct q8_0_in_panel : q8_0_rows<V> {
    using i32 = typename V::i32;
    static constexpr int high = 16;
    static constexpr int at_q(int b) { return 32 * b; }
    static constexpr int lane(int b) { return V::q8_0_lane(b); }
    static void unpack(const uint8_t *const *row, size_t at, i32 *w) { V::q8_0_panel(row, at, w); }
    static void scales(const uint8_t *const *row, size_t at, uint16_t *d) { V::q8_0_panel_scales(row, at, d); }
};
} // namespace

#endif
