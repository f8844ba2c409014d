// elem.hpp - norms, softmax and activations over V's floats. Sums are kept in doubles beyond 1024 elements.
#ifndef TE_ELEM_HPP
#define TE_ELEM_HPP

namespace {

template <class V> struct elementwise {
    using f32 = typename V::f32;
    static constexpr int L = V::lanes;

    static f32 neg(f32 a) { return V::sub(V::zero(), a); }

    // e^x to 2 ulp; 0 below -87.3 (where it would be denormal), e^88 above 88. 2^n e^r with n = round(x / ln 2); |r| <=
    // ln 2 / 2; e^r = 1 + r + r^2 q(r), q fitted to 4e-9.
    static f32 exp(f32 x) {
        const f32 c = V::max(V::splat(-87.3f), V::min(V::splat(88.0f), x)); // in this order a NaN stays one
        const f32 n = V::round(V::mul(c, V::splat(1.44269504f)));
        // ln 2 = 0.693145752 + 1.42860677e-6; the first has so few bits that n times it is exact
        f32 r = V::fma(n, V::splat(-0.693145752f), c);
        r = V::fma(n, V::splat(-1.42860677e-6f), r);
        f32 q = V::fma(V::splat(0.00137511503f), r, V::splat(0.00836898723f));
        q = V::fma(q, r, V::splat(0.0416695443f));
        q = V::fma(q, r, V::splat(0.166665179f));
        q = V::fma(q, r, V::splat(0.499999885f));
        q = V::add(V::splat(1.0f), V::fma(V::mul(r, r), q, r));
        return V::if_less(x, V::splat(-87.3f), V::zero(), V::ldexp(q, n));
    }
    static f32 sigmoid(f32 x) { return V::div(V::splat(1.0f), V::add(V::splat(1.0f), exp(neg(x)))); }

    // erfc(z) for z >= 0: e^(-z^2) t p(t), t = 1 / (1 + 0.35 z), p fitted to 6e-8 over z <= 9.5.
    static f32 erfc(f32 z) {
        const f32 t = V::div(V::splat(1.0f), V::fma(V::splat(0.35f), z, V::splat(1.0f)));
        f32 p = V::fma(V::splat(0.0481189465f), t, V::splat(-0.302109392f));
        p = V::fma(p, t, V::splat(0.613296524f));
        p = V::fma(p, t, V::splat(-0.443527467f));
        p = V::fma(p, t, V::splat(0.429930341f));
        p = V::fma(p, t, V::splat(0.0531198568f));
        p = V::fma(p, t, V::splat(0.208967782f));
        p = V::fma(p, t, V::splat(0.194586821f));
        p = V::fma(p, t, V::splat(0.197616529f));
        return V::mul(exp(neg(V::mul(z, z))), V::mul(t, p));
    }
    static f32 gelu(f32 x) { // x/2 * erfc(-x/sqrt 2); for x > 0 by erfc(-z) = 2 - erfc(z)
        const f32 half_tail = V::mul(V::splat(0.5f), erfc(V::mul(V::abs(x), V::splat(0.707106781f))));
        return V::mul(x, V::if_less(V::zero(), x, V::sub(V::splat(1.0f), half_tail), half_tail));
    }
    static f32 gelu_tanh(f32 x) { // 1 + tanh(u) = 2 sigmoid(2 u)
        const f32 slope = V::fma(V::mul(x, x), V::splat(0.0713548163f), V::splat(1.59576912f));
        return V::mul(x, sigmoid(V::mul(x, slope)));
    }
    static void soft_cap(float *x, int32_t n, float scale, float cap) { // tanh(u) = 2 sigmoid(2 u) - 1
        const f32 slope = V::splat(2 * scale / cap), twice = V::splat(2 * cap), once = V::splat(-cap);
        for (int32_t i = 0; i < n; i += L) {
            const int part = n - i < L ? n - i : L;
            const f32 v = part == L ? V::load(x + i) : V::load_part(x + i, part);
            const f32 y = V::fma(twice, sigmoid(V::mul(slope, v)), once);
            if (part == L)
                V::store(x + i, y);
            else
                V::store_part(x + i, y, part);
        }
    }
    static f32 relu(f32 x, f32 threshold) { return V::if_less(threshold, x, x, V::zero()); }

    // Sums of x - from and of its square.
    static double sum(const float *x, float from, int32_t n) {
        double s = 0;
        int32_t i = 0;
        while (i + L <= n) {
            const int32_t end = n - i < 1024 ? n : i + 1024;
            f32 part = V::zero();
            for (; i + L <= end; i += L) part = V::add(part, V::sub(V::load(x + i), V::splat(from)));
            s += (double)V::sum(part);
        }
        for (; i < n; i++) s += (double)x[i] - (double)from;
        return s;
    }
    static double sum_squares(const float *x, float from, int32_t n) {
        double s = 0;
        int32_t i = 0;
        while (i + L <= n) {
            const int32_t end = n - i < 1024 ? n : i + 1024;
            f32 part = V::zero();
            for (; i + L <= end; i += L) {
                const f32 d = V::sub(V::load(x + i), V::splat(from));
                part = V::fma(d, d, part);
            }
            s += (double)V::sum(part);
        }
        for (; i < n; i++) s += ((double)x[i] - (double)from) * ((double)x[i] - (double)from);
        return s;
    }

    static void rms_norm(const float *x, const float *w, float eps, int32_t n, float *y) {
        const f32 scale = V::splat((float)(1.0 / __builtin_sqrt(sum_squares(x, 0.0f, n) / n + (double)eps)));
        int32_t i = 0;
        for (; i + L <= n; i += L) V::store(y + i, V::mul(V::mul(V::load(x + i), scale), V::load(w + i)));
        if (i < n)
            V::store_part(y + i, V::mul(V::mul(V::load_part(x + i, n - i), scale), V::load_part(w + i, n - i)), n - i);
    }
    static void layer_norm(const float *x, const float *w, const float *b, float eps, int32_t n, float *y) {
        const double mean = (double)x[0] + sum(x, x[0], n) / n; // about x[0]: the mean may be large beside the spread
        const f32 high = V::splat((float)mean), low = V::splat((float)(mean - (double)(float)mean));
        const f32 scale = V::splat((float)(1.0 / __builtin_sqrt(sum_squares(x, (float)mean, n) / n + (double)eps)));
        for (int32_t i = 0; i < n; i += L) {
            const int part = n - i < L ? n - i : L;
            const bool all = part == L;
            const f32 d = V::sub(V::sub(all ? V::load(x + i) : V::load_part(x + i, part), high), low);
            f32 v = V::mul(V::mul(d, scale), all ? V::load(w + i) : V::load_part(w + i, part));
            if (b) v = V::add(v, all ? V::load(b + i) : V::load_part(b + i, part));
            if (all)
                V::store(y + i, v);
            else
                V::store_part(y + i, v, part);
        }
    }

    static void softmax(float *x, int32_t n, float scale) {
        float most = x[0];
        int32_t i = 0;
        if (n >= L) {
            f32 m = V::load(x);
            for (i = L; i + L <= n; i += L) m = V::max(m, V::load(x + i));
            most = V::hmax(m);
        }
        for (; i < n; i++) most = x[i] > most ? x[i] : most;
        if (most == -__builtin_inff()) most = 0; // then all entries become 0
        const f32 s = V::splat(scale), top = V::splat(most);
        double total = 0;
        for (i = 0; i + L <= n;) {
            const int32_t end = n - i < 1024 ? n : i + 1024;
            f32 part = V::zero();
            for (; i + L <= end; i += L) {
                const f32 e = exp(V::mul(s, V::sub(V::load(x + i), top)));
                V::store(x + i, e);
                part = V::add(part, e);
            }
            total += (double)V::sum(part);
        }
        if (i < n) {
            V::store_part(x + i, exp(V::mul(s, V::sub(V::load_part(x + i, n - i), top))), n - i);
            total += (double)V::sum(V::load_part(x + i, n - i));
        }
        const float factor = total > 0 ? (float)(1.0 / total) : total == 0 ? 0.0f : (float)total;
        for (i = 0; i + L <= n; i += L) V::store(x + i, V::mul(V::load(x + i), V::splat(factor)));
        for (; i < n; i++) x[i] *= factor;
    }

    static void add(const float *x, int32_t n, float *y) {
        for (int32_t i = 0; i < n; i++) y[i] += x[i];
    }

    static void sign_pack(const float *x, int32_t n, uint64_t *bits) {
        for (int32_t i = 0; i < n; i += 64) {
            uint64_t word = 0;
            for (int32_t j = 0; j < 64 && i + j < n; j++) word |= (uint64_t)(x[i + j] < 0) << j;
            bits[i / 64] = word;
        }
    }
    static void sign_dot(const uint64_t *rows, int32_t n_rows, const uint64_t *x, int32_t n, float *y) {
        const int32_t words = (n + 63) / 64;
        for (int32_t r = 0; r < n_rows; r++, rows += words) {
            int64_t differ = 0;
            for (int32_t i = 0; i < words; i++) differ += __builtin_popcountll(rows[i] ^ x[i]);
            y[r] = (float)(n - 2 * differ) / (float)n;
        }
    }

    template <int act> static f32 activate(f32 g, f32 threshold) {
        if constexpr (act == TE_RELU) return relu(g, threshold);
        if constexpr (act == TE_DRELU) return relu(g, V::zero());
        if constexpr (act == TE_RELU2) {
            g = relu(g, V::zero());
            return V::mul(g, g);
        }
        if constexpr (act == TE_SILU) return V::mul(g, sigmoid(g));
        if constexpr (act == TE_GELU) return gelu(g);
        if constexpr (act == TE_CLAMPED) { // of a NaN and 7 the NaN
            g = V::min(V::splat(7.0f), g);
            return V::mul(g, sigmoid(V::mul(V::splat(1.702f), g)));
        }
        return gelu_tanh(g);
    }
    // What a gate g lets through of u.
    template <int act> static f32 glu_of(f32 g, f32 u, f32 threshold) {
        if constexpr (act == TE_DRELU) u = relu(u, V::zero());
        if constexpr (act == TE_CLAMPED) u = V::add(V::max(V::splat(-7.0f), V::min(V::splat(7.0f), u)), V::splat(1.0f));
        return V::mul(activate<act>(g, threshold), u);
    }
    template <int act> static void glu_loop(float threshold, const float *g, const float *u, int32_t n, float *h) {
        const f32 least = V::splat(threshold);
        for (int32_t i = 0; i < n; i += L) {
            const int part = n - i < L ? n - i : L;
            const bool all = part == L;
            f32 v = all ? V::load(u + i) : V::load_part(u + i, part);
            if (g)
                v = glu_of<act>(all ? V::load(g + i) : V::load_part(g + i, part), v, least);
            else
                v = activate<act>(v, least);
            if (all)
                V::store(h + i, v);
            else
                V::store_part(h + i, v, part);
        }
    }
    static void glu(te_activation act, float threshold, const float *g, const float *u, int32_t n, float *h) {
        switch (act) {
        case TE_RELU:
            return glu_loop<TE_RELU>(threshold, g, u, n, h);
        case TE_DRELU:
            return glu_loop<TE_DRELU>(threshold, g, u, n, h);
        case TE_SILU:
            return glu_loop<TE_SILU>(threshold, g, u, n, h);
        case TE_GELU:
            return glu_loop<TE_GELU>(threshold, g, u, n, h);
        case TE_GELU_TANH:
            return glu_loop<TE_GELU_TANH>(threshold, g, u, n, h);
        case TE_CLAMPED:
            return glu_loop<TE_CLAMPED>(threshold, g, u, n, h);
        case TE_RELU2:
            return glu_loop<TE_RELU2>(threshold, g, u, n, h);
        case TE_XIELU:
            return;
        }
    }
    static void xielu(const te_xielu *c, const float *x, int32_t n, float *h) {
        const f32 p = V::splat(c->alpha_p), m = V::splat(c->alpha_n), b = V::splat(c->beta), eps = V::splat(c->eps);
        for (int32_t i = 0; i < n; i += L) {
            const int part = n - i < L ? n - i : L;
            const f32 v = part == L ? V::load(x + i) : V::load_part(x + i, part);
            const f32 below = V::mul(m, V::sub(V::sub(exp(V::min(eps, v)), V::splat(1.0f)), v)),
                      curve = V::if_less(V::zero(), v, V::mul(p, V::mul(v, v)), below), y = V::fma(b, v, curve);
            if (part == L)
                V::store(h + i, y);
            else
                V::store_part(h + i, y, part);
        }
    }
};
} // namespace

#endif
