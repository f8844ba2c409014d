// vec_neon.hpp - the vector vocabulary on Advanced SIMD as every ARMv8-A processor has it: a vector is two registers.
// What each word means: vec_scalar.hpp.
//
// Eight lanes and not four, so that 32 bytes, a block of most formats, are one i32; the tiles of gemm.hpp then take 31
// (gemm) and 29 (gemm_t) of the 32 registers. Tested for its results, under an emulator; its speed is unmeasured.
namespace {
struct vec_neon {
    static constexpr int lanes = 8;
    static constexpr bool q4_0_by_blocks = false; // whether rows_q4_0.hpp has its words
    static constexpr int abreast = 4;             // tokens, in rows_batch.hpp
    static constexpr int rows = 2;                // that one pass over axpy's sums adds
    struct f32 {
        float32x4_t lo, hi;
    };
    struct i32 {
        uint8x16_t lo, hi;
    };
    struct w16 {
        float32x4_t v[4];
    };

    // Loads go by bytes: weights and scales lie at any address.
    static uint8x16_t bytes(const void *p, int at = 0) { return vld1q_u8((const uint8_t *)p + at); }
    static int32x4_t whole(uint8x16_t a) { return vreinterpretq_s32_u8(a); }
    static uint32x4_t words(uint8x16_t a) { return vreinterpretq_u32_u8(a); }
    static int8x16_t small(uint8x16_t a) { return vreinterpretq_s8_u8(a); }
    static uint8x16_t as_bytes(int32x4_t a) { return vreinterpretq_u8_s32(a); }

    // floats
    static f32 zero() { return splat(0.0f); }
    static f32 splat(float a) { return {vdupq_n_f32(a), vdupq_n_f32(a)}; }
    static f32 load(const void *p) { return {vreinterpretq_f32_u8(bytes(p)), vreinterpretq_f32_u8(bytes(p, 16))}; }
    static void store(void *p, f32 a) {
        vst1q_u8((uint8_t *)p, vreinterpretq_u8_f32(a.lo));
        vst1q_u8((uint8_t *)p + 16, vreinterpretq_u8_f32(a.hi));
    }
    static f32 load_part(const void *p, int n) {
        float v[8] = {};
        memcpy(v, p, (size_t)n * 4);
        return load(v);
    }
    static void store_part(void *p, f32 a, int n) {
        float v[8];
        store(v, a);
        memcpy(p, v, (size_t)n * 4);
    }
#define TE_LANEWISE(name, word)                                                                                        \
    static f32 name(f32 a, f32 b) { return {word(a.lo, b.lo), word(a.hi, b.hi)}; }
    // vmaxq and vminq give a NaN if either is one; here it is b.
    static float32x4_t greater(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
    static float32x4_t lesser(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
    TE_LANEWISE(add, vaddq_f32)
    TE_LANEWISE(sub, vsubq_f32)
    TE_LANEWISE(mul, vmulq_f32)
    TE_LANEWISE(div, vdivq_f32)
    TE_LANEWISE(max, greater)
    TE_LANEWISE(min, lesser)
#undef TE_LANEWISE
    static f32 fma(f32 a, f32 b, f32 c) { return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }
    static f32 abs(f32 a) { return {vabsq_f32(a.lo), vabsq_f32(a.hi)}; }
    static f32 if_less(f32 a, f32 b, f32 x, f32 y) {
        return {vbslq_f32(vcltq_f32(a.lo, b.lo), x.lo, y.lo), vbslq_f32(vcltq_f32(a.hi, b.hi), x.hi, y.hi)};
    }
    static f32 round(f32 a) { return {vrndnq_f32(a.lo), vrndnq_f32(a.hi)}; }
    static float32x4_t power_of_2(float32x4_t n) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
    }
    static f32 ldexp(f32 a, f32 n) { return mul(a, {power_of_2(n.lo), power_of_2(n.hi)}); }
    static float sum(f32 a) {
        const float32x4_t s = vaddq_f32(a.lo, a.hi);
        return vaddv_f32(vadd_f32(vget_low_f32(s), vget_high_f32(s)));
    }
    static void sum4(const f32 *a, float *y) {
        const float32x4_t x = vpaddq_f32(vaddq_f32(a[0].lo, a[0].hi), vaddq_f32(a[1].lo, a[1].hi)),
                          z = vpaddq_f32(vaddq_f32(a[2].lo, a[2].hi), vaddq_f32(a[3].lo, a[3].hi));
        vst1q_f32(y, vpaddq_f32(x, z));
    }
    static float hmax(f32 a) { return vmaxnmvq_f32(greater(a.lo, a.hi)); }

    // half and bfloat16
    static float half(const void *p) {
        __fp16 h;
        memcpy(&h, p, 2);
        return (float)h;
    }
    static f32 splat_half(const void *p) { return splat(half(p)); }
    static uint8x16_t part16(const void *p, int n) { // n 16-bit words, the others 0
        uint16_t w[8] = {};
        memcpy(w, p, (size_t)n * 2);
        return bytes(w);
    }
    static f32 f16(uint8x16_t halves) {
        const float16x8_t h = vreinterpretq_f16_u8(halves);
        return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
    }
    static f32 load_f16(const void *p) { return f16(bytes(p)); }
    static f32 load_f16_part(const void *p, int n) { return f16(part16(p, n)); }
    static void store_f16(void *p, f32 a) {
        vst1q_u8((uint8_t *)p, vreinterpretq_u8_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.lo), a.hi)));
    }
    static void store_f16_part(void *p, f32 a, int n) {
        uint16_t w[8];
        store_f16(w, a);
        memcpy(p, w, (size_t)n * 2);
    }
    static f32 bf16(uint8x16_t halves) {
        const uint16x8_t h = vreinterpretq_u16_u8(halves);
        return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
                vreinterpretq_f32_u32(vshll_high_n_u16(h, 16))};
    }
    static f32 load_bf16(const void *p) { return bf16(bytes(p)); }
    static f32 load_bf16_part(const void *p, int n) { return bf16(part16(p, n)); }

    // bytes
    static i32 load_bytes(const void *p) { return {bytes(p), bytes(p, 16)}; }
    static void store_i32(void *p, i32 a) {
        vst1q_u8((uint8_t *)p, a.lo);
        vst1q_u8((uint8_t *)p + 16, a.hi);
    }
    static i32 splat_bytes(uint8_t b) { return {vdupq_n_u8(b), vdupq_n_u8(b)}; }
    static i32 bits_and(i32 a, uint8_t mask) {
        return {vandq_u8(a.lo, vdupq_n_u8(mask)), vandq_u8(a.hi, vdupq_n_u8(mask))};
    }
    static i32 bits_or(i32 a, i32 b) { return {vorrq_u8(a.lo, b.lo), vorrq_u8(a.hi, b.hi)}; }
    static i32 high4(i32 a) { return {vshrq_n_u8(a.lo, 4), vshrq_n_u8(a.hi, 4)}; }
    static i32 zero_i32() { return splat_bytes(0); }
    static i32 sub_i32(i32 a, i32 b) {
        return {as_bytes(vsubq_s32(whole(a.lo), whole(b.lo))), as_bytes(vsubq_s32(whole(a.hi), whole(b.hi)))};
    }
    static f32 to_f32(i32 a) { return {vcvtq_f32_s32(whole(a.lo)), vcvtq_f32_s32(whole(a.hi))}; }
    static f32 widen_u8(uint8x8_t b) {
        const uint16x8_t w = vmovl_u8(b);
        return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(w))), vcvtq_f32_u32(vmovl_high_u16(w))};
    }
    static f32 widen_s8(int8x8_t b) {
        const int16x8_t w = vmovl_s8(b);
        return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(w))), vcvtq_f32_s32(vmovl_high_s16(w))};
    }
    static f32 widen_u8(const void *p) { return widen_u8(vld1_u8((const uint8_t *)p)); }
    static f32 widen_s8(const void *p) { return widen_s8(vld1_s8((const int8_t *)p)); }
    static void store_s8(void *p, f32 a) {
        const int16x4_t lo = vmovn_s32(vcvtq_s32_f32(a.lo)), hi = vmovn_s32(vcvtq_s32_f32(a.hi));
        vst1_s8((int8_t *)p, vmovn_s16(vcombine_s16(lo, hi)));
    }

    // Products of bytes are signed here, so an unsigned w is at most 127; two products fit into 16 bits (2 * 128 * 127).
    // Neighbours are added there, and the pairs of pairs in 32 bits.
    static uint8x16_t widen_add(uint8x16_t c, int16x8_t low, int16x8_t high) {
        return as_bytes(vpadalq_s16(whole(c), vpaddq_s16(low, high)));
    }
    static uint8x16_t dot4(uint8x16_t c, int8x16_t w, int8x16_t x) {
        return widen_add(c, vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x));
    }
    static constexpr int signed_offset = 0;
    static i32 dot_s8(i32 c, i32 w, i32 x) {
        return {dot4(c.lo, small(w.lo), small(x.lo)), dot4(c.hi, small(w.hi), small(x.hi))};
    }
    static i32 dot_u8(i32 c, i32 w, i32 x) { return dot_s8(c, w, x); }
    // Here four products fit: nibbles are at most 15.
    static uint8x16_t dot4_nibbles(uint8x16_t c, uint8x16_t q, int8x16_t x0, int8x16_t x1) {
        const int8x16_t w0 = small(vandq_u8(q, vdupq_n_u8(15))), w1 = small(vshrq_n_u8(q, 4));
        const int16x8_t low = vmull_s8(vget_low_s8(w0), vget_low_s8(x0)), high = vmull_high_s8(w0, x0);
        return widen_add(c, vmlal_s8(low, vget_low_s8(w1), vget_low_s8(x1)), vmlal_high_s8(high, w1, x1));
    }
    static i32 dot_nibbles(i32 c, i32 q, i32 x0, i32 x1) {
        return {dot4_nibbles(c.lo, q.lo, small(x0.lo), small(x1.lo)),
                dot4_nibbles(c.hi, q.hi, small(x0.hi), small(x1.hi))};
    }

    // Bits `at` and up of each lane as a float: where they stand, and converted as a fixed-point number.
    template <int at> static float32x4_t field(uint8x16_t a, uint32_t mask) {
        const uint32x4_t bits = vandq_u32(words(a), vdupq_n_u32(mask << at));
        if constexpr (at == 0)
            return vcvtq_f32_u32(bits);
        else
            return vcvtq_n_f32_u32(bits, at);
    }
    template <int k> static f32 float_u8(i32 a) { return {field<8 * k>(a.lo, 255), field<8 * k>(a.hi, 255)}; }
    template <int k> static f32 float_nibble(i32 a) { return {field<4 * k>(a.lo, 15), field<4 * k>(a.hi, 15)}; }
    template <int k> static f32 float_nibble_minus_8(i32 a) { return sub(float_nibble<k>(a), splat(8.0f)); }

    static i32 q4_0_bytes(const uint8_t *p) {
        const te_block_q4_0 *b = (const te_block_q4_0 *)p;
        return {bytes(b[0].q), bytes(b[1].q)};
    }
    static f32 q4_0_scales(const uint8_t *p) {
        const te_block_q4_0 *b = (const te_block_q4_0 *)p;
        return {vdupq_n_f32(half(b[0].d)), vdupq_n_f32(half(b[1].d))};
    }
    static f32 four_times(const float *p) { return {vdupq_n_f32(p[0]), vdupq_n_f32(p[1])}; }
    static i32 one_in_four(const int32_t *p) {
        const int32x4_t zero = vdupq_n_s32(0);
        return {as_bytes(vsetq_lane_s32(p[0], zero, 0)), as_bytes(vsetq_lane_s32(p[1], zero, 0))};
    }

    static void add_transposed(float *y, const float *p, int stride, size_t pitch = 4) {
        const float32x4_t a = vld1q_f32(p), b = vld1q_f32(p + stride), c = vld1q_f32(p + 2 * stride),
                          d = vld1q_f32(p + 3 * stride);
        const float64x2_t ab02 = vreinterpretq_f64_f32(vtrn1q_f32(a, b)),
                          ab13 = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
        const float64x2_t cd02 = vreinterpretq_f64_f32(vtrn1q_f32(c, d)),
                          cd13 = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
        const float32x4_t column[4] = {
            vreinterpretq_f32_f64(vtrn1q_f64(ab02, cd02)), vreinterpretq_f32_f64(vtrn1q_f64(ab13, cd13)),
            vreinterpretq_f32_f64(vtrn2q_f64(ab02, cd02)), vreinterpretq_f32_f64(vtrn2q_f64(ab13, cd13))};
        for (int j = 0; j < 4; j++, y += pitch) vst1q_f32(y, vaddq_f32(vld1q_f32(y), column[j]));
    }

    // sixteen floats
    static w16 join(f32 lo, f32 hi) { return {{lo.lo, lo.hi, hi.lo, hi.hi}}; }
    static w16 load16(const float *p) { return join(load(p), load(p + 8)); }
    static void store16(float *p, w16 a) {
        for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
    }
    static w16 mul16(w16 a, w16 b) {
        for (int i = 0; i < 4; i++) a.v[i] = vmulq_f32(a.v[i], b.v[i]);
        return a;
    }
    static w16 splat16(float lo, float hi) { return join(splat(lo), splat(hi)); }
    static w16 halves16(const uint8_t *p) { return splat16(half(p), half(p + 2)); }
    static w16 widen16_u8(uint64_t lo, uint64_t hi) { return join(widen_u8(vcreate_u8(lo)), widen_u8(vcreate_u8(hi))); }
    static w16 widen16_s8(const void *p) { return join(widen_s8(p), widen_s8((const uint8_t *)p + 8)); }
    static f32 add_high8(f32 a, w16 b) { return {vaddq_f32(a.lo, b.v[2]), vaddq_f32(a.hi, b.v[3])}; }
    template <int a, int b, int c, int d> static f32 spread(w16 s) {
        return {vdupq_laneq_f32(s.v[a / 4], a % 4), vdupq_laneq_f32(s.v[b / 4], b % 4)};
    }
    template <int s> static uint8x16_t shift(uint8x16_t a) {
        if constexpr (s > 0) return vshlq_n_u8(a, s);
        if constexpr (s < 0) return vshrq_n_u8(a, -s);
        return a;
    }
    template <int s0, int s1> static i32 fields(const uint8_t *p, uint8_t mask) {
        return bits_and({shift<s0>(bytes(p)), shift<s0>(bytes(p, 16))}, mask);
    }

    template <int n_bytes, int at> static i32 blocks16(const uint8_t *p) {
        return {bytes(p, at), bytes(p, n_bytes + at)};
    }
    template <int n_bytes, int at> static f32 block_halves(const uint8_t *p) {
        return {vdupq_n_f32(half(p + at)), vdupq_n_f32(half(p + n_bytes + at))};
    }
    static f32 mxfp4_scales(const uint8_t *p) {
        const te_block_mxfp4 *two = (const te_block_mxfp4 *)p;
        return {vdupq_n_f32(te_half_e8m0(two[0].e)), vdupq_n_f32(te_half_e8m0(two[1].e))};
    }
    static uint8x16_t spread_bits(const uint8_t *p, uint8_t value) {
        const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
        return vandq_u8(vtstq_u8(vcombine_u8(vdup_n_u8(p[0]), vdup_n_u8(p[1])), bit), vdupq_n_u8(value));
    }
    template <int n_bytes, int at> static i32 block_bits(const uint8_t *p, uint8_t value) {
        return {spread_bits(p + at, value), spread_bits(p + n_bytes + at, value)};
    }
    template <int s0, int s1, int, int> static i32 fields4(const uint8_t *p, uint8_t mask) {
        const uint8x16_t v = bytes(p);
        return bits_and({shift<s0>(v), shift<s1>(v)}, mask);
    }
    template <int s> static i32 shift_bytes(i32 a, uint8_t mask) {
        return bits_and({shift<s>(a.lo), shift<s>(a.hi)}, mask);
    }
    static constexpr int top_factor = 1;
    static i32 top4(i32 a) { return high4(a); }
    static i32 lookup(i32 a, const int8_t *values) {
        const uint8x16_t v = bytes(values);
        return {vqtbl1q_u8(v, a.lo), vqtbl1q_u8(v, a.hi)};
    }
    static void lookup16(const int8_t *values, void *p) { vst1q_u8((uint8_t *)p, vqtbl1q_u8(bytes(values), bytes(p))); }
    // Four products of at most 64 * 127 fit into 16 bits.
    static uint8x16_t dot8(uint8x16_t c, int8x16_t w0, int8x16_t x0, int8x16_t w1, int8x16_t x1) {
        const int16x8_t low = vmull_s8(vget_low_s8(w0), vget_low_s8(x0)), high = vmull_high_s8(w0, x0);
        return widen_add(c, vmlal_s8(low, vget_low_s8(w1), vget_low_s8(x1)), vmlal_high_s8(high, w1, x1));
    }
    static i32 dot2_u8(i32 c, i32 w0, i32 x0, i32 w1, i32 x1) {
        return {dot8(c.lo, small(w0.lo), small(x0.lo), small(w1.lo), small(x1.lo)),
                dot8(c.hi, small(w0.hi), small(x0.hi), small(w1.hi), small(x1.hi))};
    }
    template <int k> static float32x4_t signed_byte(uint8x16_t a) {
        if constexpr (k == 3)
            return vcvtq_f32_s32(vshrq_n_s32(whole(a), 24));
        else
            return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(whole(a), 24 - 8 * k), 24));
    }
    template <int k> static f32 float_s8(i32 a) { return {signed_byte<k>(a.lo), signed_byte<k>(a.hi)}; }
    template <int k, int minus> static f32 float_u5(i32 a) {
        const f32 v = float_u8<k>(a);
        return minus ? sub(v, splat((float)minus)) : v;
    }
    template <int k> static f32 float_u6_minus_32(i32 a) { return sub(float_u8<k>(a), splat(32.0f)); }
    template <int at> static f32 float_bits2(i32 a) { return {field<at>(a.lo, 3), field<at>(a.hi, 3)}; }
    static w16 add16(w16 a, w16 b) {
        for (int i = 0; i < 4; i++) a.v[i] = vaddq_f32(a.v[i], b.v[i]);
        return a;
    }
    static f32 sub16(f32 a, w16 b) {
        return {vsubq_f32(a.lo, vaddq_f32(b.v[0], b.v[2])), vsubq_f32(a.hi, vaddq_f32(b.v[1], b.v[3]))};
    }
};
} // namespace
