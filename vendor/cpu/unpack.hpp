// unpack.hpp - rows of the block formats as bytes, for the products of many tokens on x86-64:
//
//     w = d * (q - offset)  or  w = d * q + m        q unsigned, d and m one for each group of 32 or 16 weights
#ifndef TE_UNPACK_HPP
#define TE_UNPACK_HPP

namespace {

struct byte_format {
    // n blocks
    void (*unpack)(const uint8_t *p, int32_t n, uint8_t *q, float *d, float *m);
    int32_t block, bytes; // weights and bytes of a block
    int32_t group, bits;  // q < 2^bits
    int32_t offset;       // 0: the format has minima, m
    // Of a block of 256 the minima as integers, m = *scale * min; NULL if it has none.
    void (*minima)(const uint8_t *p, int16_t *min, float *scale);
};

inline const uint8_t *row_at(const te_mat *m, const byte_format &f, int32_t row, int32_t first) {
    return (const uint8_t *)m->w + (size_t)row * m->stride + (size_t)(first / f.block) * (size_t)f.bytes;
}

template <class V> struct byte_formats {
#define TE_CODES uint8_t *q, float *d
    static __m256i load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
    static void store(uint8_t *q, __m256i v) { _mm256_storeu_si256((__m256i *)q, v); }
    // The bits of `mask` of every byte, from bit `shift` on.
    static __m256i field(__m256i v, int shift, int mask) {
        return _mm256_and_si256(_mm256_srli_epi16(v, shift), _mm256_set1_epi8((char)mask));
    }
    // Sixteen low nibbles, then the high ones.
    static __m256i nibbles(const uint8_t *p) {
        const __m128i v = _mm_loadu_si128((const __m128i *)p);
        return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
    }
    // Bit 4 of each of 32 weights, from 32 bits.
    static __m256i fifth_bits(const uint8_t *p) {
        const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
        const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        int32_t word;
        memcpy(&word, p, 4);
        const __m256i set = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), spread), bit);
        return _mm256_and_si256(_mm256_cmpeq_epi8(set, bit), _mm256_set1_epi8(16));
    }
    // 16 bytes of nibbles as values of the non-linear formats, plus 128.
    static void values(const uint8_t *p, uint8_t *q) {
        const __m128i table = _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, (char)129, (char)141, (char)153, (char)166,
                                            (char)181, (char)197, (char)217, (char)241);
        store(q, _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles(p)));
    }

    static void times(float scale, __m256i n, float *out) {
        _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(n)));
    }

    static void q4_0(const te_block_q4_0 *b, TE_CODES, float *) {
        *d = V::half(b->d);
        store(q, nibbles(b->q));
    }
    static void q4_1(const te_block_q4_1 *b, TE_CODES, float *m) {
        *d = V::half(b->d);
        *m = V::half(b->m);
        store(q, nibbles(b->q));
    }
    static void q5_0(const te_block_q5_0 *b, TE_CODES, float *) {
        *d = V::half(b->d);
        store(q, _mm256_or_si256(nibbles(b->q), fifth_bits(b->qh)));
    }
    static void q5_1(const te_block_q5_1 *b, TE_CODES, float *m) {
        *d = V::half(b->d);
        *m = V::half(b->m);
        store(q, _mm256_or_si256(nibbles(b->q), fifth_bits(b->qh)));
    }
    static void q8_0(const te_block_q8_0 *b, TE_CODES, float *) {
        *d = V::half(b->d);
        store(q, _mm256_xor_si256(load(b->q), _mm256_set1_epi8((char)128)));
    }
    static void iq4_nl(const te_block_iq4_nl *b, TE_CODES, float *) {
        *d = V::half(b->d);
        values(b->q, q);
    }
    static void mxfp4(const te_block_mxfp4 *b, TE_CODES, float *) {
        const __m128i plus_16 = _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4);
        *d = te_half_e8m0(b->e);
        store(q, _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(plus_16), nibbles(b->q)));
    }
    static void iq4_xs(const te_block_iq4_xs *b, TE_CODES, float *) {
        uint16_t high;
        memcpy(&high, b->scales_h, 2);
        TE_UNROLL for (int u = 0; u < 8; u++) {
            const int scale = (b->scales_l[u / 2] >> u % 2 * 4 & 15) | (high >> 2 * u & 3) << 4;
            d[u] = V::half(b->d) * (float)(scale - 32);
            values(b->q + 16 * u, q + 32 * u);
        }
    }
    static void q2_k(const te_block_q2_k *b, TE_CODES, float *m) {
        const float scale = V::half(b->d), minimum = V::half(b->dmin);
        for (int g = 0; g < 16; g++) d[g] = scale * (float)(b->scales[g] & 15);
        for (int g = 0; g < 16; g++) m[g] = -minimum * (float)(b->scales[g] >> 4);
        TE_UNROLL for (int u = 0; u < 8; u++) store(q + 32 * u, field(load(b->q + u / 4 * 32), u % 4 * 2, 3));
    }
    static void q3_k(const te_block_q3_k *b, TE_CODES, float *) {
        const float scale = V::half(b->d);
        for (int g = 0; g < 16; g++) {
            const int low = b->scales[g % 8] >> g / 8 * 4 & 15, high = b->scales[8 + g % 4] >> g / 4 * 2 & 3;
            d[g] = scale * (float)((low | high << 4) - 32);
        }
        const __m256i high = load(b->qh);
        TE_UNROLL for (int u = 0; u < 8; u++) {
            const __m256i low = field(load(b->q + u / 4 * 32), u % 4 * 2, 3);
            store(q + 32 * u, _mm256_or_si256(low, _mm256_slli_epi16(field(high, u, 1), 2)));
        }
    }
    static void q2_k_minima(const uint8_t *p, int16_t *min, float *scale) {
        const te_block_q2_k *b = (const te_block_q2_k *)p;
        *scale = -V::half(b->dmin);
        for (int g = 0; g < 16; g++) min[g] = b->scales[g] >> 4;
    }
    // Of Q4_K and Q5_K, which begin alike.
    static void k_minima(const uint8_t *p, int16_t *min, float *scale) {
        const te_block_q4_k *b = (const te_block_q4_k *)p;
        uint64_t scales, minima;
        k_scales(b->scales, scales, minima);
        *scale = -V::half(b->dmin);
        _mm_storeu_si128((__m128i *)min, _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)minima)));
    }
    template <class B> static void k_factors(const B *b, float *d, float *m) {
        uint64_t scales, minima;
        k_scales(b->scales, scales, minima);
        times(V::half(b->d), _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)scales)), d);
        times(-V::half(b->dmin), _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)minima)), m);
    }
    // Unit u of the four bits of Q4_K and Q5_K.
    static __m256i k_nibbles(const uint8_t *p, int u) { return field(load(p + u / 2 * 32), u % 2 * 4, 15); }
    static void q4_k(const te_block_q4_k *b, TE_CODES, float *m) {
        k_factors(b, d, m);
        TE_UNROLL for (int u = 0; u < 8; u++) store(q + 32 * u, k_nibbles(b->q, u));
    }
    static void q5_k(const te_block_q5_k *b, TE_CODES, float *m) {
        k_factors(b, d, m);
        const __m256i high = load(b->qh);
        TE_UNROLL for (int u = 0; u < 8; u++)
            store(q + 32 * u, _mm256_or_si256(k_nibbles(b->q, u), _mm256_slli_epi16(field(high, u, 1), 4)));
    }
    static void q6_k(const te_block_q6_k *b, TE_CODES, float *) {
        const float scale = V::half(b->d);
        for (int g = 0; g < 16; g += 8)
            times(scale, _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(b->scales + g))), d + g);
        TE_UNROLL for (int u = 0; u < 8; u++) {
            const __m256i low = field(load(b->q + u / 4 * 64 + u % 2 * 32), u % 4 / 2 * 4, 15);
            const __m256i high = field(load(b->qh + u / 4 * 32), u % 4 * 2, 3);
            store(q + 32 * u, _mm256_or_si256(low, _mm256_slli_epi16(high, 4)));
        }
    }
#undef TE_CODES

    template <class B> using unpack_fn = void(const B *, uint8_t *, float *, float *);
    template <class B, unpack_fn<B> *one, int block, int group>
    static void many(const uint8_t *p, int32_t n, uint8_t *q, float *d, float *m) {
        for (int32_t i = 0; i < n; i++)
            one((const B *)p + i, q + i * block, d + i * (block / group), m + i * (block / group));
    }
    template <class B, unpack_fn<B> *one, int block, int group, int bits, int offset,
              void (*minima)(const uint8_t *, int16_t *, float *) = nullptr>
    static const byte_format *format() {
        static constexpr byte_format f = {many<B, one, block, group>, block, sizeof(B), group, bits, offset, minima};
        return &f;
    }
    // NULL: not one of these
    static const byte_format *of(int32_t type) {
        switch (type) {
        case TE_Q4_0:
            return format<te_block_q4_0, q4_0, 32, 32, 4, 8>();
        case TE_Q4_1:
            return format<te_block_q4_1, q4_1, 32, 32, 4, 0>();
        case TE_Q5_0:
            return format<te_block_q5_0, q5_0, 32, 32, 5, 16>();
        case TE_Q5_1:
            return format<te_block_q5_1, q5_1, 32, 32, 5, 0>();
        case TE_Q8_0:
            return format<te_block_q8_0, q8_0, 32, 32, 8, 128>();
        case TE_IQ4_NL:
            return format<te_block_iq4_nl, iq4_nl, 32, 32, 8, 128>();
        case TE_MXFP4:
            return format<te_block_mxfp4, mxfp4, 32, 32, 5, 16>();
        case TE_IQ4_XS:
            return format<te_block_iq4_xs, iq4_xs, 256, 32, 8, 128>();
        case TE_Q2_K:
            return format<te_block_q2_k, q2_k, 256, 16, 2, 0, q2_k_minima>();
        case TE_Q3_K:
            return format<te_block_q3_k, q3_k, 256, 16, 3, 4>();
        case TE_Q4_K:
            return format<te_block_q4_k, q4_k, 256, 32, 4, 0, k_minima>();
        case TE_Q5_K:
            return format<te_block_q5_k, q5_k, 256, 32, 5, 0, k_minima>();
        case TE_Q6_K:
            return format<te_block_q6_k, q6_k, 256, 16, 6, 32>();
        default:
            return NULL;
        }
    }
};

} // namespace
#endif
