// recurrent.hpp - what layers with a state do to their tokens, one after the other: causal convolutions, and matrices
// that decay and take up products of two vectors. Vectors run over channels, or columns of the state, and no number
// depends on its neighbours: so neither cutting a run of tokens nor sharing out columns changes a bit.
#ifndef TE_RECURRENT_HPP
#define TE_RECURRENT_HPP

namespace {

template <class V> struct recurrent {
    using f32 = typename V::f32;
    using elem = elementwise<V>;
    static constexpr int L = V::lanes;
    static constexpr int ABREAST =
        32 / L; // vectors of columns: what hides an addition's latency, and stays in the first cache

    static f32 load(const float *p, int part) { return part == L ? V::load(p) : V::load_part(p, part); }
    static void store(float *p, f32 v, int part) {
        if (part == L)
            V::store(p, v);
        else
            V::store_part(p, v, part);
    }

    // L channels from c on, or the last `part` of them.
    template <int WIDTH> static void conv_channels(const te_conv &k, int32_t c, int part) {
        f32 w[WIDTH], x[WIDTH]; // the last tokens, the present one at the end
        for (int j = 0; j < WIDTH; j++) w[j] = load(k.w + (size_t)j * k.ld + c, part);
        for (int j = 0; j + 1 < WIDTH; j++) x[j] = load(k.last + (size_t)j * k.ld + c, part);
        const f32 bias = k.b ? load(k.b + c, part) : V::zero();
        for (int32_t i = 0; i < k.n; i++) {
            const size_t t = (size_t)k.row[i];
            x[WIDTH - 1] = load(k.x + t * k.ldx + c, part);
            if (k.before) x[WIDTH - 1] = V::mul(load(k.before + t * k.ldx + c, part), x[WIDTH - 1]);
            f32 y = bias;
            for (int j = 0; j < WIDTH; j++) y = V::fma(w[j], x[j], y);
            for (int j = 0; j + 1 < WIDTH; j++) x[j] = x[j + 1];
            if (k.silu) y = V::mul(y, elem::sigmoid(y));
            if (k.after) y = V::mul(load(k.after + t * k.ldx + c, part), y);
            store(k.y + t * k.ldy + c, y, part);
        }
        for (int j = 0; j + 1 < WIDTH; j++) store(k.last + (size_t)j * k.ld + c, x[j], part);
    }
    template <int WIDTH> static void conv_all(const te_conv &k) {
        for (int32_t c = 0; c < k.n_channels; c += L)
            conv_channels<WIDTH>(k, c, k.n_channels - c < L ? k.n_channels - c : L);
    }
    static void conv(const te_conv *k) {
        switch (k->width) {
        case 2:
            return conv_all<2>(*k);
        case 3:
            return conv_all<3>(*k);
        case 4:
            return conv_all<4>(*k);
        case 5:
            return conv_all<5>(*k);
        case 6:
            return conv_all<6>(*k);
        case 7:
            return conv_all<7>(*k);
        case 8:
            return conv_all<8>(*k);
        }
    }

    // N vectors of columns from c on, of which the last has `part`. A sweep over the state gives a token's output and, for
    // the delta rule, what the state already says for the next token's k.
    template <int N, bool whole> static void scan_columns(const te_scan &s, int32_t c, int part) {
        f32 known[N];
        for (int v = 0; v < N; v++) known[v] = V::zero();
        const auto part_of = [=](int v) { return whole || v + 1 < N ? L : part; };
        for (int32_t r = 0; s.delta && r < s.n_k; r++) {
            const f32 k = V::splat(s.k[(size_t)s.row[0] * s.ldx + (size_t)r]);
            for (int v = 0; v < N; v++)
                known[v] = V::fma(k, load(s.state + (size_t)r * s.ld_state + c + v * L, part_of(v)), known[v]);
        }
        for (int32_t i = 0; i < s.n; i++) {
            const size_t t = (size_t)s.row[i];
            const float *k = s.k + t * s.ldx, *q = s.q + t * s.ldx, *x = s.v + t * s.ldx + c;
            const float *next = s.delta && i + 1 < s.n ? s.k + (size_t)s.row[i + 1] * s.ldx : NULL;
            const f32 decay = V::splat(s.decay[t * s.ld_gate]), rate = V::splat(s.rate[t * s.ld_gate]);
            f32 u[N], out[N];
            for (int v = 0; v < N; v++) {
                const f32 own = load(x + v * L, part_of(v));
                u[v] = V::mul(rate, s.delta ? V::sub(own, V::mul(decay, known[v])) : own);
                out[v] = V::mul(V::splat(s.skip), own);
                known[v] = V::zero();
            }
            for (int32_t r = 0; r < s.n_k; r++) {
                float *row = s.state + (size_t)r * s.ld_state + c;
                const f32 kr = V::splat(k[r]), qr = V::splat(q[r]);
                f32 h[N];
#pragma GCC unroll 4
                for (int v = 0; v < N; v++) {
                    h[v] = V::fma(kr, u[v], V::mul(decay, load(row + v * L, part_of(v))));
                    store(row + v * L, h[v], part_of(v));
                    out[v] = V::fma(qr, h[v], out[v]);
                }
                if (!next) continue;
                const f32 nr = V::splat(next[r]);
#pragma GCC unroll 4
                for (int v = 0; v < N; v++) known[v] = V::fma(nr, h[v], known[v]);
            }
            for (int v = 0; v < N; v++) store(s.y + t * s.ldy + c + v * L, out[v], part_of(v));
        }
    }
    static void scan(const te_scan *s) {
        int32_t c = 0;
        for (; c + ABREAST * L <= s->n_v; c += ABREAST * L) scan_columns<ABREAST, true>(*s, c, L);
        for (; c < s->n_v; c += L) scan_columns<1, false>(*s, c, s->n_v - c < L ? s->n_v - c : L);
    }
};
} // namespace

#endif
