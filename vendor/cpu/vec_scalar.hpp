// vec_scalar.hpp - the vector vocabulary in portable C++: the reference for the other vec_*.hpp, and the table for
// machines without AVX2.
//
// f32 is `lanes` floats, i32 `lanes` integers, which are also 4 * lanes bytes (lane l holds bytes 4l..4l+3), w16 always
// 16 floats. No word reads or writes more than it names.
namespace {
struct vec_scalar {
    static constexpr int lanes = 8;
    static constexpr bool q4_0_by_blocks = false; // whether rows_q4_0.hpp has its words
    static constexpr int abreast = 1;             // tokens, in rows_batch.hpp; 1: one after the other
    static constexpr int rows = 2;                // that one pass over axpy's sums adds
    struct f32 {
        float v[8];
    };
    union i32 {
        int32_t v[8];
        uint8_t u8[32];
        int8_t s8[32];
    };
    struct w16 {
        float v[16];
    };

    // floats
    static f32 zero() { return {}; }
    static f32 splat(float a) {
        f32 r;
        for (float &x : r.v) x = a;
        return r;
    }
    static f32 load(const void *p) {
        f32 r;
        memcpy(r.v, p, sizeof r.v);
        return r;
    }
    static void store(void *p, f32 a) { memcpy(p, a.v, sizeof a.v); }
    static f32 load_part(const void *p, int n) { // the first n lanes, 0 < n < lanes; the others are 0
        f32 r = {};
        memcpy(r.v, p, (size_t)n * 4);
        return r;
    }
    static void store_part(void *p, f32 a, int n) { memcpy(p, a.v, (size_t)n * 4); }
#define TE_LANEWISE(name, expr)                                                                                        \
    static f32 name(f32 a, f32 b) {                                                                                    \
        for (int i = 0; i < 8; i++) a.v[i] = expr;                                                                     \
        return a;                                                                                                      \
    }
    TE_LANEWISE(add, a.v[i] + b.v[i])
    TE_LANEWISE(sub, a.v[i] - b.v[i])
    TE_LANEWISE(mul, a.v[i] * b.v[i])
    TE_LANEWISE(div, a.v[i] / b.v[i])
    TE_LANEWISE(max, a.v[i] > b.v[i] ? a.v[i] : b.v[i]) // b if either is not a number
    TE_LANEWISE(min, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
#undef TE_LANEWISE
    static f32 fma(f32 a, f32 b, f32 c) { // a*b + c; rounded once only where the machine does
        for (int i = 0; i < 8; i++) c.v[i] += a.v[i] * b.v[i];
        return c;
    }
    static f32 abs(f32 a) {
        for (float &x : a.v) x = __builtin_fabsf(x);
        return a;
    }
    static f32 if_less(f32 a, f32 b, f32 x, f32 y) { // a < b ? x : y
        for (int i = 0; i < 8; i++) y.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
        return y;
    }
    static f32 round(f32 a) { // to the nearest integer, ties to even; |a| < 2^22
        for (float &x : a.v) x = (x + 12582912.0f) - 12582912.0f;
        return a;
    }
    static f32 ldexp(f32 a, f32 n) { // a * 2^n for whole n in -126..127
        for (int i = 0; i < 8; i++) {
            const uint32_t bits = (uint32_t)((int32_t)n.v[i] + 127) << 23;
            float p;
            memcpy(&p, &bits, 4);
            a.v[i] *= p;
        }
        return a;
    }
    static float sum(f32 a) {
        return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
    }
    static void sum4(const f32 *a, float *y) { // y[i] = the sum of a[i], i < 4
        for (int i = 0; i < 4; i++) y[i] = sum(a[i]);
    }
    static float hmax(f32 a) {
        float m = a.v[0];
        for (float x : a.v) m = x > m ? x : m;
        return m;
    }

    // half and bfloat16
    static float half(const void *p) {
        uint16_t h;
        memcpy(&h, p, 2);
        return te_f16_to_f32(h);
    }
    static f32 splat_half(const void *p) { return splat(half(p)); } // in vectors: spread, then converted
    static f32 load_f16_part(const void *p, int n) {
        f32 r = {};
        for (int i = 0; i < n; i++) r.v[i] = half((const uint8_t *)p + 2 * i);
        return r;
    }
    static f32 load_f16(const void *p) { return load_f16_part(p, 8); }
    static void store_f16_part(void *p, f32 a, int n) {
        for (int i = 0; i < n; i++) {
            const uint16_t h = te_f32_to_f16(a.v[i]);
            memcpy((uint8_t *)p + 2 * i, &h, 2);
        }
    }
    static void store_f16(void *p, f32 a) { store_f16_part(p, a, 8); }
    static f32 load_bf16_part(const void *p, int n) {
        f32 r = {};
        for (int i = 0; i < n; i++) memcpy((uint8_t *)&r.v[i] + 2, (const uint8_t *)p + 2 * i, 2);
        return r;
    }
    static f32 load_bf16(const void *p) { return load_bf16_part(p, 8); }

    // bytes
    static i32 load_bytes(const void *p) {
        i32 r;
        memcpy(r.v, p, 32);
        return r;
    }
    static i32 bits_and(i32 a, uint8_t mask) {
        for (uint8_t &x : a.u8) x &= mask;
        return a;
    }
    static i32 bits_or(i32 a, i32 b) {
        for (int i = 0; i < 8; i++) a.v[i] |= b.v[i];
        return a;
    }
    static i32 high4(i32 a) { // each byte >> 4
        for (uint8_t &x : a.u8) x >>= 4;
        return a;
    }
    static i32 splat_bytes(uint8_t b) {
        i32 r;
        for (uint8_t &x : r.u8) x = b;
        return r;
    }
    static i32 sub_i32(i32 a, i32 b) {
        for (int i = 0; i < 8; i++) a.v[i] -= b.v[i];
        return a;
    }
    static void store_i32(void *p, i32 a) { memcpy(p, a.v, 32); }
    static i32 zero_i32() { return {}; }
    static f32 to_f32(i32 a) {
        f32 r;
        for (int i = 0; i < 8; i++) r.v[i] = (float)a.v[i];
        return r;
    }
    static f32 widen_u8(const void *p) { // `lanes` bytes
        f32 r;
        for (int i = 0; i < 8; i++) r.v[i] = ((const uint8_t *)p)[i];
        return r;
    }
    static f32 widen_s8(const void *p) {
        f32 r;
        for (int i = 0; i < 8; i++) r.v[i] = ((const int8_t *)p)[i];
        return r;
    }
    static void store_s8(void *p, f32 a) { // whole numbers in -127..127
        for (int i = 0; i < 8; i++) ((int8_t *)p)[i] = (int8_t)a.v[i];
    }
    // c + the four products of each lane; w unsigned, at most 127 (or signed_offset, if that is more); x signed,
    // |x| <= 127
    static i32 dot_u8(i32 c, i32 w, i32 x) {
        for (int l = 0; l < 8; l++)
            for (int i = 4 * l; i < 4 * l + 4; i++) c.v[l] += w.u8[i] * x.s8[i];
        return c;
    }
    // c + products of the low nibbles of q with x0 + products of the high nibbles with x1
    static i32 dot_nibbles(i32 c, i32 q, i32 x0, i32 x1) {
        return dot_u8(dot_u8(c, bits_and(q, 15), x0), high4(q), x1);
    }
    // The same for signed w. A set that has only unsigned products works on w + signed_offset, which c must make good.
    static constexpr int signed_offset = 0;
    static i32 dot_s8(i32 c, i32 w, i32 x) {
        for (int l = 0; l < 8; l++)
            for (int i = 4 * l; i < 4 * l + 4; i++) c.v[l] += w.s8[i] * x.s8[i];
        return c;
    }
    // Byte k of each lane as a float; nibble k (0..7, low first) of each lane as a float, minus 8 if centred.
    template <int k> static f32 float_u8(i32 a) {
        f32 r;
        for (int l = 0; l < 8; l++) r.v[l] = a.u8[4 * l + k];
        return r;
    }
    template <int k> static f32 float_nibble(i32 a) {
        f32 r;
        for (int l = 0; l < 8; l++) r.v[l] = (float)(a.u8[4 * l + k / 2] >> (k & 1) * 4 & 15);
        return r;
    }
    template <int k> static f32 float_nibble_minus_8(i32 a) { return add(float_nibble<k>(a), splat(-8.0f)); }

    // Q4_0: lanes / 4 blocks side by side, lanes 4b..4b+3 belong to block b. AVX-512, where this is what a product costs,
    // has words for two registers of Q4_0 or Q8_0 at once instead (q4_0_pair and the like).
    static i32 q4_0_bytes(const uint8_t *p) {
        i32 r;
        const te_block_q4_0 *b = (const te_block_q4_0 *)p;
        memcpy(r.u8, b[0].q, 16);
        memcpy(r.u8 + 16, b[1].q, 16);
        return r;
    }
    static f32 q4_0_scales(const uint8_t *p) {
        const te_block_q4_0 *two = (const te_block_q4_0 *)p;
        const float a = half(two[0].d), b = half(two[1].d);
        return {{a, a, a, a, b, b, b, b}};
    }
    static f32 four_times(const float *p) { return {{p[0], p[0], p[0], p[0], p[1], p[1], p[1], p[1]}}; }
    static i32 one_in_four(const int32_t *p) { return {{p[0], 0, 0, 0, p[1], 0, 0, 0}}; } // whichever of the four

    // y[pitch * j + k] += p[stride * k + j] for j, k < 4
    static void add_transposed(float *y, const float *p, int stride, size_t pitch = 4) {
        for (int i = 0; i < 16; i++) y[pitch * (size_t)(i / 4) + (size_t)(i % 4)] += p[stride * (i % 4) + i / 4];
    }

    // sixteen floats: scales of a block of 256
    static w16 load16(const float *p) {
        w16 r;
        memcpy(r.v, p, sizeof r.v);
        return r;
    }
    static void store16(float *p, w16 a) { memcpy(p, a.v, sizeof a.v); }
    static w16 mul16(w16 a, w16 b) {
        for (int i = 0; i < 16; i++) a.v[i] *= b.v[i];
        return a;
    }
    static w16 splat16(float lo, float hi) { // elements 0-7, elements 8-15
        w16 r;
        for (int i = 0; i < 16; i++) r.v[i] = i < 8 ? lo : hi;
        return r;
    }
    static w16 halves16(const uint8_t *p) { return splat16(half(p), half(p + 2)); } // two halves, like splat16
    static w16 widen16_u8(uint64_t lo, uint64_t hi) {
        w16 r;
        for (int i = 0; i < 16; i++) r.v[i] = (float)((i < 8 ? lo : hi) >> i % 8 * 8 & 255);
        return r;
    }
    static w16 widen16_s8(const void *p) {
        w16 r;
        for (int i = 0; i < 16; i++) r.v[i] = ((const int8_t *)p)[i];
        return r;
    }
    static f32 add_high8(f32 a, w16 b) { // adds elements 8-15 to lanes of a, whichever
        for (int i = 0; i < 8; i++) a.v[i] += b.v[8 + i];
        return a;
    }
    // Lanes 0-3 = element a, 4-7 = b, and of 16 lanes 8-11 = c, 12-15 = d.
    template <int a, int b, int c, int d> static f32 spread(w16 s) {
        return {{s.v[a], s.v[a], s.v[a], s.v[a], s.v[b], s.v[b], s.v[b], s.v[b]}};
    }
    // A run of 32 bytes, twice if there is room; of each byte the bits that a shift by s (left; right if negative)
    // brings under the mask, s0 for the first time and s1 for the second.
    template <int s0, int s1> static i32 fields(const uint8_t *p, uint8_t mask) {
        i32 r;
        for (int i = 0; i < 32; i++)
            r.u8[i] = (uint8_t)((s0 < 0 ? p[i] >> (s0 < 0 ? -s0 : 0) : p[i] << (s0 < 0 ? 0 : s0)) & mask);
        return r;
    }

    // Blocks that are `bytes` apart, lanes / 4 of them side by side: lanes 4b..4b+3 belong to block b. The sixteen bytes
    // `at` bytes into each; the half there; of the word of sixteen bits there bit i as byte i, `value` where it is set.
    template <int bytes, int at> static i32 blocks16(const uint8_t *p) {
        i32 r;
        for (int i = 0; i < 32; i++) r.u8[i] = p[i / 16 * bytes + at + i % 16];
        return r;
    }
    template <int bytes, int at> static f32 block_halves(const uint8_t *p) {
        const float a = half(p + at), b = half(p + bytes + at);
        return {{a, a, a, a, b, b, b, b}};
    }
    static f32 mxfp4_scales(const uint8_t *p) { // the same of blocks of MXFP4, which have a power of two instead
        const te_block_mxfp4 *two = (const te_block_mxfp4 *)p;
        const float a = te_half_e8m0(two[0].e), b = te_half_e8m0(two[1].e);
        return {{a, a, a, a, b, b, b, b}};
    }
    template <int bytes, int at> static i32 block_bits(const uint8_t *p, uint8_t value) {
        i32 r;
        for (int i = 0; i < 32; i++) r.u8[i] = p[i / 16 * bytes + at + i % 16 / 8] >> i % 8 & 1 ? value : 0;
        return r;
    }
    // A run of sixteen bytes, once for every four lanes; of each byte the bits that a shift by s (left; right if
    // negative) brings under the mask: s0 for lanes 0-3, s1 for 4-7, and of 16 lanes s2 for 8-11, s3 for 12-15.
    template <int s0, int s1, int s2, int s3> static i32 fields4(const uint8_t *p, uint8_t mask) {
        i32 r;
        for (int i = 0; i < 32; i++) {
            const int s = i < 16 ? s0 : s1;
            r.u8[i] = (uint8_t)((s < 0 ? p[i % 16] >> (s < 0 ? -s : 0) : p[i % 16] << (s < 0 ? 0 : s)) & mask);
        }
        return r;
    }
    // Each byte shifted by s in the same way, under the mask.
    template <int s> static i32 shift_bytes(i32 a, uint8_t mask) {
        for (uint8_t &x : a.u8) x = (uint8_t)((s < 0 ? x >> (s < 0 ? -s : 0) : x << (s < 0 ? 0 : s)) & mask);
        return a;
    }
    // The upper half of each byte, times top_factor.
    static constexpr int top_factor = 1;
    static i32 top4(i32 a) { return high4(a); }
    // Bytes below 16 choose from sixteen values; the second does so with sixteen bytes of memory, in place.
    static i32 lookup(i32 a, const int8_t *values) {
        for (int i = 0; i < 32; i++) a.s8[i] = values[a.u8[i]];
        return a;
    }
    static void lookup16(const int8_t *values, void *p) {
        for (int i = 0; i < 16; i++) ((int8_t *)p)[i] = values[((const uint8_t *)p)[i]];
    }
    // c + products of w0 and x0, of w1 and x1; w unsigned, at most 64 (top4: times top_factor).
    static i32 dot2_u8(i32 c, i32 w0, i32 x0, i32 w1, i32 x1) { return dot_u8(dot_u8(c, w0, x0), w1, x1); }
    // Byte k of each lane as a float: signed; below 32, less a constant; below 64, less 32; the two bits from `at` on.
    template <int k> static f32 float_s8(i32 a) {
        f32 r;
        for (int l = 0; l < 8; l++) r.v[l] = a.s8[4 * l + k];
        return r;
    }
    template <int k, int minus> static f32 float_u5(i32 a) { return sub(float_u8<k>(a), splat((float)minus)); }
    template <int k> static f32 float_u6_minus_32(i32 a) { return sub(float_u8<k>(a), splat(32.0f)); }
    template <int at> static f32 float_bits2(i32 a) {
        f32 r;
        for (int l = 0; l < 8; l++) r.v[l] = (float)(a.u8[4 * l + at / 8] >> at % 8 & 3);
        return r;
    }
    static w16 add16(w16 a, w16 b) {
        for (int i = 0; i < 16; i++) a.v[i] += b.v[i];
        return a;
    }
    static f32 sub16(f32 a, w16 b) { // takes all sixteen off lanes of a, whichever
        for (int i = 0; i < 8; i++) a.v[i] -= b.v[i] + b.v[8 + i];
        return a;
    }
};
} // namespace
