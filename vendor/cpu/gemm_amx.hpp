// gemm_amx.hpp - products for many tokens on AMX: te_gemm_kernels in bf16 tiles, sums in f32. Both operands are rounded
// to bf16.
//
//     gemm:    sums [16 rows][16 tokens]   += A = weights [16 rows][32 k]          * B = activations [32 k][16 tokens]
//     gemm_t:  sums [16 tokens][16 columns] += A = activations [16 tokens][32 rows] * B = weights [32 rows][16 columns]
//
// An A tile is 16 rows of 32 bf16 as they come; row j of a B tile holds the pairs k = 2j, 2j+1 of its sixteen columns.
// So weights are never transposed: gemm's activations are, once, when they are packed, and its sums on their way to y;
// gemm_t interleaves neighbouring rows. A panel of weights, KC of k deep, is converted in the cache, and all tokens run
// over it with 2 x 2 sums at a time: 32 rows (16 KiB of L1) in gemm, 256 columns (128 KiB of L2) in gemm_t, because a
// block of the K formats is that wide. Meanwhile the rows of the next panel are fetched from memory. Sums of 256
// outputs stand in scratch between passes over k.
//
// 2-core Sapphire Rapids virtual machine, 512 tokens, k 4096, 11008 rows, packing and all: TFLOPS, median of five, by
// processor time, for the load of the machine was 7. On 1 and 2 threads; tiles from L1 reach
// 2.39 and 4.84. Types other than F32 get 31-42 % of that in gemm, 22-33 % in gemm_t.
//                F32   F16   BF16  Q8_0  Q4_0  Q4_K  Q5_K  Q6_K
//     gemm   1   0.70  0.94  0.89  0.98  0.99  0.91  0.87  0.90
//     gemm   2   1.26  1.57  1.69  1.72  1.67  1.66  1.57  1.49
//     gemm_t 1   0.40  0.58  0.59  0.70  0.79  0.78  0.65  0.67
//     gemm_t 2   0.75  1.08  1.20  1.19  1.37  1.40  1.16  1.25
// In a tile loop by itself, activations from L2 cost 6 %, changing sums every KC another 17 %. Without the way to y
// gemm was 11-16 % faster (BF16), without the conversion gemm_t 12-49 % (F16; runs differ that much under load).
#ifndef TE_GEMM_AMX_HPP
#define TE_GEMM_AMX_HPP

namespace {

struct gemm_amx {
    static constexpr int32_t KC = 256; // one block of the K formats
    static constexpr int32_t NC = 256; // outputs whose sums are kept
    // Tokens per pass: their sums (512 KiB), one KC of activations (256 KiB) and a panel share L2.
    static constexpr int32_t TP = 512;
    static constexpr int32_t TILE = 1024; // bytes

    static int32_t up(int32_t n, int32_t unit) { return (n + unit - 1) / unit * unit; }
    static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

    // The compiler does not know that tile instructions read memory: gcc names 8 bytes as the input of a configuration
    // and none at all as that of a tile load. Stores that they depend on must not move past this.
    static void written() { __asm__ volatile("" ::: "memory"); }

    static void begin() {
        struct alignas(64) {
            uint8_t palette, start, zero[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } config = {};
        config.palette = 1;
        for (int i = 0; i < 8; i++) {
            config.row_bytes[i] = 64;
            config.rows[i] = 16;
        }
        written();
        _tile_loadconfig(&config);
    }
    static void end() { _tile_release(); }

    static size_t pack_bytes(int32_t n_tok, int32_t k) {
        return ((size_t)n_tok + 15) / 16 * 16 * (size_t)up(k, 32) * 2;
    }

    // Tiles lie [k / KC][token / 16][k % KC / 32], so that a pass reads one stream.
    static size_t packed_tile(int32_t t, int32_t k, int32_t n_tok, int32_t cols) {
        const int32_t k0 = k / KC * KC, tiles = up(least(KC, cols - k0), 32) / 32;
        return ((size_t)up(n_tok, 16) / 16 * (size_t)(k0 / 32) + (size_t)(t / 16) * (size_t)tiles +
                (size_t)(k - k0) / 32) *
               TILE;
    }

    // Columns k0..k0+31 of a token as bf16; zeros beyond column k.
    static __m512i bf16(const float *x, int32_t k0, int32_t k) {
        const int32_t left = k - k0;
        const __mmask16 lo = (__mmask16)(left >= 16 ? 0xffff : (1 << left) - 1);
        const __mmask16 hi = (__mmask16)(left >= 32 ? 0xffff : left > 16 ? (1 << (left - 16)) - 1 : 0);
        const __m512 b = hi ? _mm512_maskz_loadu_ps(hi, x + k0 + 16) : _mm512_setzero_ps();
        return (__m512i)_mm512_cvtne2ps_pbh(b, _mm512_maskz_loadu_ps(lo, x + k0));
    }

    // Rows 4g..4g+3 of the transpose of 16 x 16 dwords that stand `stride` bytes apart. Rows i, i+4, i+8, i+12 meet in
    // the lanes of one register on their way from memory, so 32 shuffles do it instead of 64.
    static void transpose(const void *in, size_t stride, int g, __m512i out[4]) {
        __m512i v[4];
        for (int i = 0; i < 4; i++) {
            const uint8_t *p = (const uint8_t *)in + (size_t)i * stride + 16 * g;
            v[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
            v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x00f0, _mm_loadu_si128((const __m128i *)(p + 4 * stride)));
            v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x0f00, _mm_loadu_si128((const __m128i *)(p + 8 * stride)));
            v[i] = _mm512_mask_broadcast_i32x4(v[i], 0xf000, _mm_loadu_si128((const __m128i *)(p + 12 * stride)));
        }
        const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
        const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
        out[0] = _mm512_unpacklo_epi64(a, c);
        out[1] = _mm512_unpackhi_epi64(a, c);
        out[2] = _mm512_unpacklo_epi64(b, d);
        out[3] = _mm512_unpackhi_epi64(b, d);
    }

    template <bool b_tiles>
    static void pack_tiles(const float *x, size_t ldx, const int32_t *row, int32_t n_tok, int32_t k, int32_t t0,
                           int32_t t1, void *px) {
        alignas(64) uint8_t rows[TILE];
        for (int32_t t = t0; t < t1; t += 16) {
            const float *in[16];
            for (int32_t i = 0; i < 16; i++) in[i] = t + i < n_tok ? token_at(x, ldx, row, t + i) : NULL;
            for (int32_t k0 = 0; k0 < k; k0 += 32) {
                uint8_t *out = (uint8_t *)px + packed_tile(t, k0, n_tok, k), *to = b_tiles ? rows : out;
                for (int32_t i = 0; i < 16; i++)
                    _mm512_store_si512(to + 64 * i, in[i] ? bf16(in[i], k0, k) : _mm512_setzero_si512());
                for (int g = 0; b_tiles && g < 4; g++) {
                    __m512i v[4];
                    transpose(rows, 64, g, v);
                    for (int i = 0; i < 4; i++) _mm512_store_si512(out + 256 * g + 64 * i, v[i]);
                }
            }
        }
    }

    struct scratch {
        uint8_t panel[NC * KC * 2];
        float f[KC];
        // Follow: sums, [pair of output tiles][pair of token tiles][2 outputs][2 tokens] tiles.
        float *sums() { return (float *)(this + 1); }
    };
    static size_t scratch_bytes(int32_t n_tok, int32_t) {
        return sizeof(scratch) + (size_t)up(least(n_tok, TP), 32) * NC * sizeof(float);
    }

    // One panel: outputs o0..o0+on-1 and k0..k0+kn-1 of a matrix, as tiles [pair of output tiles][k / 32][2], zeros
    // where there are none. Of each row of the matrix it takes n weights from weight `first` on: its k if outputs are
    // rows, else its outputs.
    struct panel {
        const te_mat *m;
        void (*to_f32)(const void *row, int32_t c0, int32_t n, float *out);
        int32_t o0, on, k0, kn, first, n;
        size_t first_byte, bytes;
        uint8_t *out;
        scratch *s;

        int32_t depth() const { return up(kn, 32) / 32; }
        int32_t pairs() const { return up(on, 32) / 32; }
        uint8_t *tile(int32_t group, int32_t k) const {
            return out + ((group / 2 * depth() + k) * 2 + group % 2) * TILE;
        }
        const uint8_t *row(int32_t r) const { return (const uint8_t *)m->w + (size_t)r * m->stride; }
    };

    // A block's codes in the low five bits of words; the fifth is that of `high`.
    static __m512i words(const te_block_q4_0 *b, __m512i high) {
        const __m512i fours = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
        const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)b->q));
        const __m512i q = _mm512_srlv_epi16(_mm512_cvtepu8_epi16(twice), fours);
        return _mm512_ternarylogic_epi32(q, _mm512_set1_epi16(15), high, 0xea); // (q & 15) | high
    }

    // The scales of at most KC / 32 blocks, converted together: one by one they cost more of the shuffles' unit, and put
    // together in memory each row waited for the stores of the one before it (Zen 5: 2.2 ns for 32 weights, else 1.1, and 0.8
    // without a copy of the row).
    static void scales_q4_0(const te_block_q4_0 *b, int32_t n, float *d) {
        static_assert(KC == 256, "the scales of a panel's row are converted together");
        __m128i half;
        if (n == KC / 32) { // the first word of every nine, of 64
            const __m512i at = _mm512_castsi128_si512(_mm_setr_epi16(0, 9, 18, 27, 36, 45, 54, 63)),
                          first = _mm512_loadu_si512(b), second = _mm512_loadu_si512((const uint8_t *)b + 64);
            half = _mm512_castsi512_si128(_mm512_permutex2var_epi16(first, at, second));
        } else {
            uint64_t of[2] = {};
            for (int i = 0; i < n; i++) of[i / 4] |= (uint64_t)(b[i].d[0] | b[i].d[1] << 8) << i % 4 * 16;
            half = _mm_set_epi64x((long long)of[1], (long long)of[0]);
        }
        _mm256_store_ps(d, _mm256_cvtph_ps(half));
    }
    // A block has 16 values, those of two are a table of 32, and looking them up converts.
    template <int32_t step> static void unpack_q4_0(const te_block_q4_0 *b, int32_t n, const float *d, __m512i *out) {
        const __m512 steps = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
        for (int32_t i = 0; i < n; i += 2) {
            const __m512 first = _mm512_mul_ps(steps, _mm512_set1_ps(d[i])),
                         second = _mm512_mul_ps(steps, _mm512_set1_ps(d[i + 1]));
            const __m512i values = (__m512i)_mm512_cvtne2ps_pbh(second, first);
            out[i * step] = _mm512_permutexvar_epi16(words(b + i, _mm512_setzero_si512()), values);
            if (i + 1 < n)
                out[(i + 1) * step] = _mm512_permutexvar_epi16(words(b + i + 1, _mm512_set1_epi16(16)), values);
        }
    }

    // The panel's weights of row r as bf16, n rounded up to 32, each 32 of them `step` registers on. The formats of most
    // files need no detour over floats in memory.
    template <int32_t step> static void unpack(const panel &p, int32_t r, __m512i *out) {
        const uint8_t *w = p.row(r) + p.first_byte;
        const int32_t groups = up(p.n, 32) / 32, type = p.n % 32 ? -1 : p.m->type;
        if (type == TE_BF16) {
            for (int32_t i = 0; i < groups; i++) out[i * step] = _mm512_loadu_si512(w + 64 * i);
        } else if (type == TE_F16) {
            for (int32_t i = 0; i < groups; i++) {
                const __m512 lo = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w + 64 * i)));
                const __m512 hi = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w + 64 * i + 32)));
                out[i * step] = (__m512i)_mm512_cvtne2ps_pbh(hi, lo);
            }
        } else if (type == TE_Q8_0) {
            for (int32_t i = 0; i < groups; i++, w += sizeof(te_block_q8_0)) {
                const te_block_q8_0 *b = (const te_block_q8_0 *)w;
                const __m512 d = _mm512_set1_ps(vec_avx512::half(b->d));
                const __m512i lo = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)b->q));
                const __m512i hi = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(b->q + 16)));
                out[i * step] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(d, _mm512_cvtepi32_ps(hi)),
                                                             _mm512_mul_ps(d, _mm512_cvtepi32_ps(lo)));
            }
        } else if (type == TE_Q4_0) {
            alignas(32) float d[KC / 32];
            scales_q4_0((const te_block_q4_0 *)w, groups, d);
            unpack_q4_0<step>((const te_block_q4_0 *)w, groups, d, out);
        } else if (type == TE_Q4_K) {
            const __m512 steps = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            for (int32_t i = 0; i < groups; i += 8, w += sizeof(te_block_q4_k)) {
                const te_block_q4_k *b = (const te_block_q4_k *)w;
                float d[8], m[8];
                byte_formats<vec_avx512>::k_factors(b, d, m);
                for (int u = 0; u < 8; u++) {
                    const __m512 of_16 = _mm512_fmadd_ps(steps, _mm512_set1_ps(d[u]), _mm512_set1_ps(m[u]));
                    const __m512i values = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(of_16));
                    const __m256i q = byte_formats<vec_avx512>::k_nibbles(b->q, u);
                    out[(i + u) * step] = _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(q), values);
                }
            }
        } else {
            p.to_f32(p.row(r), p.first, p.n, p.s->f);
            for (int32_t i = 0; i < groups; i++) out[i * step] = bf16(p.s->f, 32 * i, p.n);
        }
    }

    struct from_rows { // outputs are rows of the matrix
        static constexpr bool by_row = true;
        static constexpr int32_t width = 32; // outputs per panel
        static constexpr int32_t step = 2 * TILE / 64;
        static __m512i *at(const panel &p, int32_t r) { return (__m512i *)(p.tile(r / 16, 0) + r % 16 * 64); }
        // All rows' scales come first: else those of each row keep its products waiting (AMX, one thread: 2.2 ns for 32
        // weights, 1.6 so; Zen 5: 1.6 and 1.1).
        static void make_q4_0(const panel &p) {
            alignas(32) float d[32][KC / 32];
            const auto row = [&](int32_t r) { return (const te_block_q4_0 *)(p.row(p.o0 + r) + p.first_byte); };
            for (int32_t r = 0; r < 32; r++) scales_q4_0(row(r), KC / 32, d[r]);
            for (int32_t r = 0; r < 32; r++) unpack_q4_0<step>(row(r), KC / 32, d[r], at(p, r));
        }
        static void make(const panel &p) {
            if (p.m->type == TE_Q4_0 && p.n == KC && p.on == 32) {
                make_q4_0(p);
                return;
            }
            for (int32_t r = 0; r < 32; r++) {
                if (r < p.on)
                    unpack<step>(p, p.o0 + r, at(p, r));
                else
                    for (int32_t i = 0; i < p.depth(); i++) at(p, r)[i * step] = _mm512_setzero_si512();
            }
        }
    };

    // Outputs are columns. Pairs of rows are interleaved within lanes only: of 32 columns, the first tile gets 0-3,
    // 8-11, 16-19 and 24-27.
    struct from_cols {
        static constexpr bool by_row = false;
        static constexpr int32_t width = NC;
        static void make(const panel &p) {
            for (int32_t r = 0; r < p.depth() * 32; r += 2) {
                __m512i v[2][NC / 32];
                for (int32_t h = 0; h < 2; h++)
                    if (r + h < p.kn)
                        unpack<1>(p, p.k0 + r + h, v[h]);
                    else
                        for (int32_t i = 0; i < p.pairs(); i++) v[h][i] = _mm512_setzero_si512();
                for (int32_t i = 0; i < p.pairs(); i++) {
                    uint8_t *out = p.tile(2 * i, r / 32) + r % 32 * 32;
                    // Four row pairs on, for these stores spread over a panel in L2: F16, three runs each, mean of
                    // their best 0.70 TFLOPS without and 0.76 with.
                    _mm_prefetch((const char *)out + 256, _MM_HINT_T0);
                    _mm_prefetch((const char *)out + TILE + 256, _MM_HINT_T0);
                    _mm512_store_si512(out, _mm512_unpacklo_epi16(v[0][i], v[1][i]));
                    _mm512_store_si512(out + TILE, _mm512_unpackhi_epi16(v[0][i], v[1][i]));
                }
            }
        }
    };

    // Fetches n rows from memory, a few at each of `steps` steps.
    struct ahead {
        const uint8_t *row;
        size_t stride, bytes;
        int64_t n, steps, credit;
        int64_t left;
        void step() {
            for (credit += n; left > 0 && credit >= steps; credit -= steps, left--, row += stride)
                for (size_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)row + i, _MM_HINT_T1);
        }
    };

    // 2 x 2 sums (2 x 1 if `two` is false) over one panel's depth. w: the tiles of two output tiles, x: those of 32
    // tokens. All tiles of a step are loaded first: on 16 threads, two of which seem to share a core, 0.64 TFLOPS each
    // instead of 0.59 with loads between the products; on one it makes no difference.
    template <class From, bool two> static void block(const uint8_t *w, const uint8_t *x, int32_t depth, ahead &next) {
#define TE_TILE(sum, weights, tokens)                                                                                  \
    do {                                                                                                               \
        if (From::by_row)                                                                                              \
            _tile_dpbf16ps(sum, weights, tokens);                                                                      \
        else                                                                                                           \
            _tile_dpbf16ps(sum, tokens, weights);                                                                      \
    } while (0)
        const uint8_t *x1 = x + depth * TILE;
        for (int32_t i = 0; i < depth; i++) {
            _tile_loadd(6, x + i * TILE, 64);
            if (two) _tile_loadd(7, x1 + i * TILE, 64);
            _tile_loadd(4, w + 2 * i * TILE, 64);
            _tile_loadd(5, w + (2 * i + 1) * TILE, 64);
            TE_TILE(0, 4, 6);
            TE_TILE(2, 5, 6);
            if (two) TE_TILE(1, 4, 7);
            if (two) TE_TILE(3, 5, 7);
            next.step();
        }
#undef TE_TILE
    }

    // Stores the sums of one block and takes up those of the next, in turn: in a tile loop by itself 1.98 TFLOPS,
    // and 1.76 with all stores first and then all loads.
    template <bool store> static void change_sums(float *c, const float *next, bool zero) {
#define TE_CHANGE(i)                                                                                                   \
    do {                                                                                                               \
        if (store) _tile_stored(i, c + 256 * (i), 64);                                                                 \
        if (zero)                                                                                                      \
            _tile_zero(i);                                                                                             \
        else                                                                                                           \
            _tile_loadd(i, next + 256 * (i), 64);                                                                      \
    } while (0)
        TE_CHANGE(0);
        TE_CHANGE(1);
        TE_CHANGE(2);
        TE_CHANGE(3);
#undef TE_CHANGE
    }

    static void put(float *y, __mmask16 mask, __m512 sum, const float *bias, bool add) {
        if (bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, bias));
        if (add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, y));
        _mm512_mask_storeu_ps(y, mask, sum);
    }

    // y[t][o] (+)= sums + bias for the outputs of one panel and tn tokens
    template <class From>
    static void to_y(const float *sums, int32_t on, int32_t tn, float *y, size_t ldy, const float *bias, bool add) {
        const int32_t t_pairs = up(tn, 32) / 32;
        const __m512i front = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0),
                      back = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
        for (int32_t t = 0; t < tn; t += 16)
            for (int32_t o = 0; o < on; o += 32) {
                const float *c = sums + ((size_t)(o / 32) * (size_t)t_pairs + (size_t)(t / 32)) * 1024 +
                                 t / 16 % 2 * 256,
                            *d = c + 512;
                const uint32_t mask = on - o >= 32 ? 0xffffffffu : (1u << (on - o)) - 1;
                const float *b = bias ? bias + o : NULL, *e = bias && on - o > 16 ? b + 16 : b;
                const int32_t n = least(16, tn - t);
                for (int32_t g = 0; 4 * g < n; g++) {
                    __m512i v[4], w[4];
                    if (From::by_row) {
                        transpose(c, 64, g, v);
                        transpose(d, 64, g, w);
                    } else
                        for (int32_t i = 0; i < 4; i++) {
                            const __m512i first = _mm512_load_si512(c + (4 * g + i) * 16),
                                          second = _mm512_load_si512(d + (4 * g + i) * 16);
                            v[i] = _mm512_permutex2var_epi64(first, front, second);
                            w[i] = _mm512_permutex2var_epi64(first, back, second);
                        }
                    for (int32_t i = 0; i < least(4, n - 4 * g); i++) {
                        float *out = y + (size_t)(t + 4 * g + i) * ldy + o;
                        put(out, (__mmask16)mask, (__m512)v[i], b, add);
                        if (mask >> 16) put(out + 16, (__mmask16)(mask >> 16), (__m512)w[i], e, add);
                    }
                }
            }
    }

    // Where a panel stands in a product. Order: NC outputs from o on, passes of tokens, passes of k, panels within the
    // NC outputs.
    struct place {
        int32_t o, t, k, sub;
    };

    // A matrix's outputs, to y.
    template <class From> struct plain {
        const te_mat *m;
        int32_t k, n_out;
        float *y; // of output 0
        size_t ldy;
        const float *bias;
        bool add;

        panel open(place at, scratch *s) const { return panel_of<From>(m, at.o + at.sub, n_out, at.k, k, s, s->panel); }
        void finish(const float *sums, int32_t o, int32_t on, int32_t t, int32_t tn) const {
            to_y<From>(sums, on, tn, y + (size_t)t * ldy + o, ldy, bias ? bias + o : NULL, add);
        }
    };
    template <class From>
    static panel panel_of(const te_mat *m, int32_t o0, int32_t o1, int32_t k0, int32_t k, scratch *s, uint8_t *out) {
        const te_type_info *info = te_type_get(m->type);
        panel p = {};
        p.m = m;
        p.to_f32 = row_table(m->type).to_f32;
        p.o0 = o0;
        p.on = least(From::width, o1 - o0);
        p.k0 = k0;
        p.kn = least(KC, k - k0);
        p.first = From::by_row ? p.k0 : p.o0;
        p.n = From::by_row ? p.kn : p.on;
        p.first_byte = (size_t)(p.first / info->block_weights) * (size_t)info->block_bytes;
        p.bytes = (size_t)(p.n / info->block_weights) * (size_t)info->block_bytes;
        p.out = out;
        p.s = s;
        return p;
    }

    // Hidden values of gated neurons. Panels of gate's rows and of up's follow each other in turn: of 64 outputs the first 32
    // are gates.
    struct gated {
        const te_gated *a;
        int32_t n_tok;
        uint8_t *ph;
        int64_t *n_open, *n_fired;

        panel open(place at, scratch *s) const {
            const int32_t turn = (at.o + at.sub) / from_rows::width;
            return panel_of<from_rows>(turn % 2 ? a->up : a->gate, turn / 2 * from_rows::width, a->up->n_rows, at.k,
                                       a->up->cols, s, s->panel);
        }
        static __m512 with(const float *bias, int32_t j, int32_t n, const float *sums) {
            const __m512 v = _mm512_load_ps(sums);
            return bias && j < n ? _mm512_add_ps(v, _mm512_set1_ps(bias[j])) : v;
        }
        // Sums have tokens in lanes, and so has a tile of what `down` reads: pairs of neurons lie together.
        template <int act> void tile(const float *g, const float *u, int32_t j0, __mmask16 tokens, uint8_t *out) const {
            const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                                   22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
            const __m512 zero = _mm512_setzero_ps(), least = _mm512_set1_ps(a->threshold);
            const int32_t n = a->up->n_rows;
            int32_t open = 0, fired = 0;
            for (int32_t r = 0; r < 16; r += 2, out += 64) {
                __m512 h[2];
                for (int32_t e = 0; e < 2; e++) {
                    const int32_t j = j0 + r + e;
                    const __m512 gate = with(a->gate_b, j, n, g + (r + e) * 16);
                    h[e] = elementwise<vec_avx512>::glu_of<act>(gate, with(a->up_b, j, n, u + (r + e) * 16), least);
                    if (j >= n) continue;
                    const __mmask16 lets = act == TE_RELU ? _mm512_cmp_ps_mask(gate, least, _CMP_GT_OQ)
                                           : act == TE_DRELU || act == TE_RELU2
                                               ? _mm512_cmp_ps_mask(gate, zero, _CMP_GT_OQ)
                                               : (__mmask16)0;
                    open += __builtin_popcount(lets & tokens);
                    fired += __builtin_popcount(_mm512_cmp_ps_mask(h[e], zero, _CMP_NEQ_UQ) & tokens);
                }
                const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(h[1], h[0]);
                _mm512_store_si512(out, _mm512_permutexvar_epi16(pairs, both));
            }
            *n_open += open;
            *n_fired += fired;
        }
        template <int act> void tiles(const float *sums, int32_t o, int32_t on, int32_t t, int32_t tn) const {
            const int32_t t_pairs = up(tn, 32) / 32;
            for (int32_t i = 0; i < on; i += 64)
                for (int32_t at = 0; at < tn; at += 16) {
                    const float *g = sums + ((size_t)(i / 32) * (size_t)t_pairs + (size_t)(at / 32)) * 1024 +
                                     at / 16 % 2 * 256,
                                *u = g + (size_t)t_pairs * 1024;
                    const int32_t j = (o + i) / 2;
                    const __mmask16 tokens = (__mmask16)(tn - at >= 16 ? 0xffff : (1 << (tn - at)) - 1);
                    uint8_t *out = ph + packed_tile(t + at, j, n_tok, a->up->n_rows);
                    for (int32_t half = 0; half < 2; half++)
                        tile<act>(g + half * 512, u + half * 512, j + half * 16, tokens, out + half * 512);
                }
        }
        void finish(const float *sums, int32_t o, int32_t on, int32_t t, int32_t tn) const {
            switch (a->act) {
            case TE_RELU:
                return tiles<TE_RELU>(sums, o, on, t, tn);
            case TE_DRELU:
                return tiles<TE_DRELU>(sums, o, on, t, tn);
            case TE_SILU:
                return tiles<TE_SILU>(sums, o, on, t, tn);
            case TE_GELU:
                return tiles<TE_GELU>(sums, o, on, t, tn);
            case TE_GELU_TANH:
                return tiles<TE_GELU_TANH>(sums, o, on, t, tn);
            case TE_CLAMPED:
                return tiles<TE_CLAMPED>(sums, o, on, t, tn);
            case TE_RELU2:
                return tiles<TE_RELU2>(sums, o, on, t, tn);
            case TE_XIELU:
                return;
            }
        }
    };

    // Outputs o0..o1-1, sums over 0..k-1. A job opens panels, and takes the sums.
    template <class From, class Job>
    static void product(const Job &job, int32_t o0, int32_t o1, int32_t k, const void *px, int32_t n_tok,
                        void *memory) {
        scratch *s = (scratch *)memory;
        const auto follow = [=](place p) {
            place next = {p.o, p.t, p.k, p.sub + From::width};
            if (next.sub >= least(NC, o1 - p.o)) next = {p.o, p.t, p.k + KC, 0};
            if (next.k >= k) next = {p.o, p.t + TP, 0, 0};
            if (next.t >= n_tok) next = {p.o + NC, 0, 0, 0};
            return next;
        };
        place at = {o0, 0, 0, 0};
        panel now = job.open(at, s);
        for (;;) {
            From::make(now);
            written();
            const int32_t on = least(NC, o1 - at.o);
            const place after = follow(at);
            const bool last = after.o >= o1;
            const panel next = job.open(last ? at : after, s);
            const int32_t tn = least(TP, n_tok - at.t), t_pairs = up(tn, 32) / 32, depth = now.depth(),
                          blocks = now.pairs() * t_pairs;
            const int32_t rows = last ? 0 : From::by_row ? next.on : next.kn;
            ahead fetch = {next.row(From::by_row ? next.o0 : next.k0) + next.first_byte,
                           next.m->stride,
                           next.bytes,
                           rows,
                           (int64_t)blocks * depth,
                           0,
                           rows};
            float *c = s->sums() + (size_t)(at.sub / 32 * t_pairs) * 1024;
            change_sums<false>(NULL, c, at.k == 0);
            for (int32_t i = 0; i < blocks; i++, c += 1024) {
                const int32_t j = i / t_pairs, t = i % t_pairs * 32;
                const uint8_t *w = now.tile(2 * j, 0), *x = (const uint8_t *)px + packed_tile(at.t + t, at.k, n_tok, k);
                if (tn - t > 16)
                    block<From, true>(w, x, depth, fetch);
                else
                    block<From, false>(w, x, depth, fetch);
                change_sums<true>(c, i + 1 < blocks ? c + 1024 : c, at.k == 0);
            }
            if (at.k + KC >= k && at.sub + From::width >= on) job.finish(s->sums(), at.o, on, at.t, tn);
            if (last) return;
            now = next;
            at = after;
        }
    }

    static void gemm(const te_mat *m, int32_t r0, int32_t r1, const void *px, int32_t n_tok, float *y, size_t ldy,
                     const float *bias, bool add, void *memory) {
        const plain<from_rows> job = {m, m->cols, r1, y, ldy, bias, add};
        product<from_rows>(job, r0, r1, m->cols, px, n_tok, memory);
    }
    static void gemm_t(const te_mat *m, int32_t c0, int32_t c1, const void *ph, int32_t n_tok, float *y, size_t ldy,
                       const float *bias, bool add, void *memory) {
        const plain<from_cols> job = {m, m->n_rows, c1, y, ldy, bias, add};
        product<from_cols>(job, c0, c1, m->n_rows, ph, n_tok, memory);
    }
    static void glu(const te_gated *a, const void *px, int32_t n_tok, void *ph, int64_t *n_open, int64_t *n_fired,
                    void *memory) {
        const gated job = {a, n_tok, (uint8_t *)ph, n_open, n_fired};
        product<from_rows>(job, 0, 2 * gemm_amx::up(a->up->n_rows, from_rows::width), a->up->cols, px, n_tok, memory);
    }
};

} // namespace
#endif
