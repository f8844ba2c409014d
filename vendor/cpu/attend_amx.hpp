// attend_amx.hpp - attention of many queries in bf16 tiles: te_gemm_kernels' attend, on the tiles of gemm_amx.hpp.
//
//     scores [32 positions][32 queries] = K [32 positions][d] * q [d][32 queries]
//     weights = 2^(c * (scores - top))                          queries in lanes: no sum or maximum across lanes
//     out    [32 columns][32 queries] += V^T [32 columns][positions] * weights [positions][32 queries]
//
// Scores leave the tiles with positions as rows, and so a pair of rows is a row of what V^T is multiplied with. K and V of a
// span of positions are converted once for all queries, V transposed; scores of 32 queries stay in L1.
#ifndef TE_ATTEND_AMX_HPP
#define TE_ATTEND_AMX_HPP

namespace {

struct attend_amx {
    using G = gemm_amx;
    static constexpr int32_t TILE = G::TILE, BLOCK = 4 * TILE / 4; // floats of 2 x 2 sums

    // Where things stand in a thread's memory; a scratch of gemm_amx.hpp is in front.
    struct room {
        int32_t d, dv, groups, n_pos; // of 32: dimensions of K, of V, groups of queries, positions of a span
        room(int32_t n_rows, int32_t k_cols, int32_t v_cols, int32_t span)
            : d(G::up(k_cols, 32) / 32), dv(G::up(v_cols, 32) / 32), groups(G::up(n_rows, 32) / 32),
              n_pos(G::up(span, 32) / 32) {}
        size_t k() const { return sizeof(G::scratch); }
        size_t v() const { return k() + (size_t)n_pos * (size_t)d * 2 * TILE; }
        size_t score() const { return v() + (size_t)n_pos * (size_t)dv * 2 * TILE; }
        size_t weight() const { return score() + (size_t)n_pos * BLOCK * sizeof(float); }
        size_t out() const { return weight() + (size_t)n_pos * 2 * TILE; }
        size_t top() const { return out() + (size_t)groups * (size_t)dv * BLOCK * sizeof(float); }
        size_t total() const { return top() + (size_t)groups * 32 * sizeof(float); }
        size_t bytes() const { return total() + (size_t)groups * 32 * sizeof(float); }
    };
    static size_t bytes(int32_t n_rows, int32_t d, int32_t dv, int32_t span) {
        return room(n_rows, d, dv, span).bytes();
    }

    // Positions 32 * i.. of a span, as tiles [d / 32][2]; zeros where there are none.
    static void open_k(const te_attend *a, int32_t i, G::scratch *s, uint8_t *out) {
        const te_mat *m = &a->k[i * 32 / a->block];
        const int32_t first = i * 32 % a->block;
        for (int32_t c = 0; c < m->cols; c += G::KC) {
            G::panel p = G::panel_of<G::from_rows>(m, first, m->n_rows, c, m->cols, s, out + c / 32 * 2 * TILE);
            if (p.on < 0) p.on = 0;
            G::from_rows::make(p);
        }
    }
    // The same of V, transposed: tile pair j of the 32 positions stands at out + j * apart. Of 32 columns the first tile has
    // 0-3, 8-11, 16-19 and 24-27.
    static void open_v(const te_attend *a, int32_t i, G::scratch *s, uint8_t *out, size_t apart) {
        const te_mat *m = &a->v[i * 32 / a->block];
        const int32_t first = i * 32 % a->block;
        alignas(64) uint8_t pairs[G::NC / 16][TILE];
        for (int32_t c = 0; c < m->cols; c += G::NC) {
            const G::panel p = G::panel_of<G::from_cols>(m, c, m->cols, 0, m->n_rows, s, NULL);
            for (int32_t r = 0; r < 32; r += 2) {
                __m512i v[2][G::NC / 32];
                for (int32_t h = 0; h < 2; h++)
                    if (first + r + h < m->n_rows)
                        G::unpack<1>(p, first + r + h, v[h]);
                    else
                        for (int32_t j = 0; j < p.pairs(); j++) v[h][j] = _mm512_setzero_si512();
                for (int32_t j = 0; j < p.pairs(); j++) {
                    _mm512_store_si512(pairs[2 * j] + r * 32, _mm512_unpacklo_epi16(v[0][j], v[1][j]));
                    _mm512_store_si512(pairs[2 * j + 1] + r * 32, _mm512_unpackhi_epi16(v[0][j], v[1][j]));
                }
            }
            for (int32_t j = 0; j < 2 * p.pairs(); j++) {
                uint8_t *to = out + (size_t)(c / 32 + j / 2) * apart + j % 2 * TILE;
                for (int g = 0; g < 4; g++) {
                    __m512i v[4];
                    G::transpose(pairs[j], 64, g, v);
                    for (int e = 0; e < 4; e++) _mm512_store_si512(to + 256 * g + 64 * e, v[e]);
                }
            }
        }
    }

    // 2^z to 3e-6, and 1 of 0; 0 of minus infinity, whose rest is 0. scalef takes the whole part of z.
    static __m512 exp2(__m512 z) {
        const __m512 r = _mm512_reduce_ps(z, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.0134266912f), r, _mm512_set1_ps(0.0522424700f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.241280213f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693044841f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
        return _mm512_scalef_ps(p, z);
    }

    // Scores of 16 queries and positions 32 * begin .. 32 * end - 1, in blocks of which these queries have the tiles 0 and 2,
    // become weights; what was gathered before is worth *by of what it was.
    static void weigh(const te_attend *a, float *score, int32_t begin, int32_t end, int32_t r0, float *top,
                      float *total, uint8_t *weight, __m512 *by) {
        const int32_t n = a->n_rows - r0;
        const __mmask16 rows = (__mmask16)(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1);
        const __m512i lo = _mm512_maskz_loadu_epi32(rows, a->lo + r0), hi = _mm512_maskz_loadu_epi32(rows, a->hi + r0);
        const int32_t all_from = rows == 0xffff ? _mm512_reduce_max_epi32(lo) : INT32_MAX,
                      all_to = _mm512_reduce_min_epi32(hi);
        const __m512 none = _mm512_set1_ps(-__builtin_inff()), old = _mm512_load_ps(top);
        __m512 most[2] = {old, old};
        for (int32_t i = begin; i < end; i++)
            for (int32_t half = 0; half < 2; half++) {
                float *x = score + (ptrdiff_t)i * BLOCK + half * 512;
                const int32_t p = i * 32 + half * 16;
                if (p >= all_from && p + 16 <= all_to) {
                    for (int32_t j = 0; j < 16; j++)
                        most[j % 2] = _mm512_max_ps(most[j % 2], _mm512_load_ps(x + 16 * j));
                    continue;
                }
                for (int32_t j = 0; j < 16; j++) {
                    const __m512i at = _mm512_set1_epi32(p + j);
                    const __mmask16 seen = _mm512_cmpge_epi32_mask(at, lo) & _mm512_cmplt_epi32_mask(at, hi);
                    const __m512 v = _mm512_mask_blend_ps(seen, none, _mm512_load_ps(x + 16 * j));
                    _mm512_store_ps(x + 16 * j, v);
                    most[j % 2] = _mm512_max_ps(most[j % 2], v);
                }
            }
        const __m512 now = _mm512_max_ps(most[0], most[1]), c = _mm512_set1_ps(a->scale * 1.44269504f);
        // Where nothing is seen yet all become 0.
        const __m512 least = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(now, none, _CMP_EQ_OQ), now, _mm512_setzero_ps());
        const __m512 from = _mm512_mul_ps(least, c);
        const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                               6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int32_t i = begin; i < end; i++)
            for (int32_t half = 0; half < 2; half++) {
                const float *x = score + (ptrdiff_t)i * BLOCK + half * 512;
                for (int32_t j = 0; j < 16; j += 2, weight += 64) {
                    const __m512 e = exp2(_mm512_fmsub_ps(_mm512_load_ps(x + 16 * j), c, from)),
                                 f = exp2(_mm512_fmsub_ps(_mm512_load_ps(x + 16 * j + 16), c, from));
                    sum[0] = _mm512_add_ps(sum[0], e);
                    sum[1] = _mm512_add_ps(sum[1], f);
                    _mm512_store_si512(weight, _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(f, e)));
                }
            }
        *by = exp2(_mm512_mul_ps(_mm512_sub_ps(old, least), c)); // 1 where nothing has changed
        _mm512_store_ps(top, now);
        const __m512 before = _mm512_mul_ps(_mm512_load_ps(total), *by);
        _mm512_store_ps(total, _mm512_add_ps(before, _mm512_add_ps(sum[0], sum[1])));
    }

    // The positions of the span that some of n rows see, in units of 32.
    static void bounds(const te_attend *a, int32_t r0, int32_t n, int32_t *begin, int32_t *end) {
        int32_t lo = INT32_MAX, hi = 0;
        for (int32_t r = r0; r < r0 + n; r++) {
            if (a->hi[r] <= a->lo[r]) continue;
            if (a->lo[r] < lo) lo = a->lo[r];
            if (a->hi[r] > hi) hi = a->hi[r];
        }
        *begin = hi ? lo / 32 : 0;
        *end = G::up(hi, 32) / 32;
    }

    static void block(bool two, const uint8_t *w, const uint8_t *x, int32_t depth) {
        G::ahead none = {};
        if (two)
            G::block<G::from_rows, true>(w, x, depth, none);
        else
            G::block<G::from_rows, false>(w, x, depth, none);
    }

    static void attend(const te_attend *a) {
        uint8_t *memory = (uint8_t *)a->memory;
        G::scratch *s = (G::scratch *)a->memory;
        const int32_t span = a->n_blocks * a->block;
        const room at(a->n_rows, a->k[0].cols, a->v[0].cols, a->span);
        uint8_t *k = memory + at.k(), *v = memory + at.v(), *weight = memory + at.weight();
        float *score = (float *)(memory + at.score()), *out = (float *)(memory + at.out()),
              *top = (float *)(memory + at.top()), *total = (float *)(memory + at.total());
        const size_t v_apart = (size_t)at.n_pos * 2 * TILE;
        if (a->first) {
            memset(out, 0, (size_t)at.groups * (size_t)at.dv * BLOCK * sizeof *out);
            memset(total, 0, (size_t)at.groups * 32 * sizeof *total);
            for (int32_t r = 0; r < at.groups * 32; r++) top[r] = -__builtin_inff();
        }
        int32_t first, last;
        bounds(a, 0, a->n_rows, &first, &last);
        if (last * 32 > span) last = span / 32;
        for (int32_t i = first; i < last; i++) {
            open_k(a, i, s, k + (size_t)i * (size_t)at.d * 2 * TILE);
            open_v(a, i, s, v + (size_t)i * 2 * TILE, v_apart);
        }
        G::written();
        for (int32_t g = 0; g < at.groups; g++, out += at.dv * BLOCK) {
            const int32_t r0 = g * 32, n = G::least(32, a->n_rows - r0);
            const bool two = n > 16;
            int32_t begin, end;
            bounds(a, r0, n, &begin, &end);
            const int32_t depth = end - begin;
            if (depth <= 0) continue;
            for (int32_t i = begin; i < end; i++) {
                G::change_sums<false>(NULL, NULL, true);
                for (int32_t c = 0; c < at.d; c += G::KC / 32)
                    block(two, k + ((size_t)i * (size_t)at.d + (size_t)c) * 2 * TILE,
                          (const uint8_t *)a->q + G::packed_tile(r0, c * 32, a->n_rows, a->k[0].cols),
                          G::least(G::KC / 32, at.d - c));
                G::change_sums<true>(score + (ptrdiff_t)i * BLOCK, NULL, true);
            }
            G::written();
            float scale = a->scale;
            te_attend capped = *a;
            if (a->cap > 0) {
                elementwise<vec_avx512>::soft_cap(score + (ptrdiff_t)begin * BLOCK, depth * BLOCK, scale, a->cap);
                capped.scale = 1;
            }
            __m512 by[2];
            for (int32_t t = 0; t < 1 + two; t++)
                weigh(&capped, score + t * 256, begin, end, r0 + 16 * t, top + r0 + 16 * t, total + r0 + 16 * t,
                      weight + (ptrdiff_t)t * depth * TILE, &by[t]);
            for (int32_t t = 0; t < 1 + two && !a->first; t++) {
                if (_mm512_cmp_ps_mask(by[t], _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) continue;
                for (int32_t i = 0; i < 2 * at.dv; i++)
                    for (int32_t j = 0; j < 16; j++) {
                        float *o = out + (ptrdiff_t)i * 512 + t * 256 + j * 16;
                        _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), by[t]));
                    }
            }
            G::written();
            for (int32_t i = 0; i < at.dv; i++) {
                float *o = out + (ptrdiff_t)i * BLOCK;
                G::change_sums<false>(NULL, o, false);
                block(two, v + (size_t)i * v_apart + (size_t)begin * 2 * TILE, weight, depth);
                G::change_sums<true>(o, NULL, true);
            }
        }
        G::written();
    }

    // What was gathered: rows of out, ld floats apart, and of each what it was weighed by.
    static void end(const te_attend *a, float *y, size_t ld, float *top, float *total) {
        const uint8_t *memory = (const uint8_t *)a->memory;
        const int32_t dv = a->v[0].cols;
        const room at(a->n_rows, a->k[0].cols, dv, a->span);
        const float *out = (const float *)(memory + at.out());
        const __m512i front = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0),
                      back = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
        memcpy(top, memory + at.top(), (size_t)a->n_rows * sizeof *top);
        memcpy(total, memory + at.total(), (size_t)a->n_rows * sizeof *total);
        for (int32_t r = 0; r < a->n_rows; r += 16)
            for (int32_t c = 0; c < dv; c += 32) {
                const float *sums =
                    out + ((size_t)(r / 32) * (size_t)at.dv + (size_t)(c / 32)) * BLOCK + r / 16 % 2 * 256;
                const uint32_t mask = dv - c >= 32 ? 0xffffffffu : (1u << (dv - c)) - 1;
                const int32_t n = G::least(16, a->n_rows - r);
                for (int32_t g = 0; 4 * g < n; g++) {
                    __m512i v[4], w[4];
                    G::transpose(sums, 64, g, v);
                    G::transpose(sums + 512, 64, g, w);
                    for (int32_t i = 0; i < G::least(4, n - 4 * g); i++) {
                        float *to = y + (size_t)(r + 4 * g + i) * ld + c;
                        const __m512i lo = _mm512_permutex2var_epi64(v[i], front, w[i]),
                                      hi = _mm512_permutex2var_epi64(v[i], back, w[i]);
                        _mm512_mask_storeu_ps(to, (__mmask16)mask, (__m512)lo);
                        if (mask >> 16) _mm512_mask_storeu_ps(to + 16, (__mmask16)(mask >> 16), (__m512)hi);
                    }
                }
            }
    }
};

} // namespace
#endif
