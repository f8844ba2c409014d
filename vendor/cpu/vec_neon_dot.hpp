// vec_neon_dot.hpp - vec_neon.hpp with the dot product extension (ARMv8.2-A, optional there): four products of bytes
// and their sum in one instruction. Tested for its results, under an emulator; its speed is unmeasured.
namespace {
struct vec_neon_dot : vec_neon {
    static uint8x16_t dot4(uint8x16_t c, uint8x16_t w, uint8x16_t x) {
        return as_bytes(vdotq_s32(whole(c), small(w), small(x)));
    }
    static i32 dot_s8(i32 c, i32 w, i32 x) { return {dot4(c.lo, w.lo, x.lo), dot4(c.hi, w.hi, x.hi)}; }
    static i32 dot_u8(i32 c, i32 w, i32 x) { return dot_s8(c, w, x); } // w at most 127, as in vec_neon.hpp
    static i32 dot_nibbles(i32 c, i32 q, i32 x0, i32 x1) {
        return dot_s8(dot_s8(c, bits_and(q, 15), x0), high4(q), x1);
    }
    static i32 dot2_u8(i32 c, i32 w0, i32 x0, i32 w1, i32 x1) { return dot_s8(dot_s8(c, w0, x0), w1, x1); }
};
} // namespace
