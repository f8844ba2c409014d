// vec_avx2_vnni.hpp - vec_avx2.hpp with AVX-VNNI: four products of bytes and their sum in one instruction.
namespace {
struct vec_avx2_vnni : vec_avx2 {
    static i32 dot_u8(i32 c, i32 w, i32 x) { return _mm256_dpbusd_avx_epi32(c, w, x); }
    static i32 dot_s8(i32 c, i32 w, i32 x) { // |w| * (x with the sign of w)
        return dot_u8(c, _mm256_sign_epi8(w, w), _mm256_sign_epi8(x, w));
    }
    static i32 dot2_u8(i32 c, i32 w0, i32 x0, i32 w1, i32 x1) { return dot_u8(dot_u8(c, w0, x0), w1, x1); }
    static i32 dot_nibbles(i32 c, i32 q, i32 x0, i32 x1) { return dot2_u8(c, bits_and(q, 15), x0, high4(q), x1); }

    // For rows_q4_0.hpp and rows_tile.hpp.
    static i32 dots(i32 low, const int8_t *x, i32 high, const int8_t *y) {
        return dot2_u8(zero_i32(), low, load_bytes(x), high, load_bytes(y));
    }
    static i32 fold_dwords(i32 a, i32 b) {
        return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    }
    static i32 fold_qwords(i32 a, i32 b, i32 start) {
        return _mm256_add_epi32(start, _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)));
    }
    // For rows_q8_0.hpp: weights without a sign.
    static constexpr int q8_0_offset = 128;
    using q8_0_weights = i32;
    static i32 flip(i32 a) { return _mm256_xor_si256(a, splat_bytes(128)); }
    struct q8_0_chunk : vec_avx2::q8_0_chunk {
        using vec_avx2::q8_0_chunk::q8_0_chunk;
        i32 weights(int i) const { return flip(load_bytes(p[i].q)); }
    };
    static i32 q8_0_dot(i32 w, i32 x) { return dot_u8(zero_i32(), w, x); }
    template <int n> static void q8_0_store(uint8_t (*to)[32], const i32 *v) {
        for (int i = 0; i < n; i++) store_i32(to[i], flip(v[i]));
    }

    static i32 tile_begin(i32 q, i32 x, const void *start) { return tile_dot(four_of(start), q, x); }
    static i32 tile_dot(i32 c, i32 q, i32 x) {
        c = dot_u8(c, q, x);
        asm("" : "+x"(c));
        return c;
    }
    static i32 tile_end(i32 c, const void *) { return c; }
};
} // namespace
