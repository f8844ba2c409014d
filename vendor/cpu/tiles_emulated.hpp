// tiles_emulated.hpp - AMX's instructions on AVX-512, so that gemm_amx.hpp and attend_amx.hpp can be tested where the
// processor has no tiles: results, not speed. Only with the build option POWERINFER_EMULATE_AMX. All tiles are 16 rows of
// 64 bytes, which is what G::begin asks for; one that was not configured is not noticed.
#ifndef TE_TILES_EMULATED_HPP
#define TE_TILES_EMULATED_HPP

namespace {

struct tiles_emulated {
    enum { ROWS = 16, ROW = 64 };
    static uint8_t *row(int tile, int i) {
        alignas(64) static thread_local uint8_t all[8][ROWS][ROW];
        return all[tile][i];
    }
    static void load(int tile, const void *from, size_t stride) {
        for (int i = 0; i < ROWS; i++) memcpy(row(tile, i), (const uint8_t *)from + stride * (size_t)i, ROW);
    }
    static void store(int tile, void *to, size_t stride) {
        for (int i = 0; i < ROWS; i++) memcpy((uint8_t *)to + stride * (size_t)i, row(tile, i), ROW);
    }
    static void zero(int tile) {
        for (int i = 0; i < ROWS; i++) memset(row(tile, i), 0, ROW);
    }
    // sum[i][j] += a[i][2k] * b[k][2j] + a[i][2k + 1] * b[k][2j + 1], k after k
    static void product(int sum, int a, int b) {
        for (int i = 0; i < ROWS; i++) {
            __m512 v = _mm512_load_ps(row(sum, i));
            for (int k = 0; k < ROWS; k++) {
                int32_t pair;
                memcpy(&pair, row(a, i) + 4 * k, sizeof pair);
                v = _mm512_dpbf16_ps(v, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_load_si512(row(b, k)));
            }
            _mm512_store_ps(row(sum, i), v);
        }
    }
};

} // namespace

// Compilers have functions or macros of these names.
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config)        ((void)(config))
#define _tile_release()                 ((void)0)
#define _tile_loadd(tile, from, stride) tiles_emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride)  tiles_emulated::store(tile, to, stride)
#define _tile_zero(tile)                tiles_emulated::zero(tile)
#define _tile_dpbf16ps(sum, a, b)       tiles_emulated::product(sum, a, b)

#endif
