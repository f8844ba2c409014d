// wide_rows.cuh - how rows of quantised formats pass through shared memory for products on Hopper (wide_groups.cuh).
#ifndef TE_CUDA_WIDE_ROWS_CUH
#define TE_CUDA_WIDE_ROWS_CUH

#include "wide.cuh"

namespace te {

constexpr int GROUP_COLS = 32 * WIDE_UNITS; // of a stage

// How a format's rows pass through shared memory, GROUP_COLS columns of a stage at a time: in `parts`, each an array in a
// row, of which a stage has `width` bytes. A part's bytes of all of a block's rows are together.
//     at(i, n), length(i, n)     where part i of a row of n columns begins, and its bytes
//     place(i, k)                where its bytes of the k-th GROUP_COLS begin in it
//     row_of(g)                  which of eight rows a lane has, so that lanes that read together want different banks
//     take(r, s, n, at, k, c, q) what lane q of four holds (wide.cuh) of row `at` of n, of part c of the k-th GROUP_COLS
//     places_of(o, n, at, q)     where that is in a stage, in so many `places`
//     take_at(r, s, o, n, k, c, q) the same of a row whose places are known
// Parts of 128 and 64 bytes lie as map_box arranges them: of eight rows pieces of sixteen bytes change places.
template <class C> struct grouped;
template <class F, class R>
__device__ __forceinline__ void group_take(R &r, const uint8_t *s, int n, int at, int k, int c, int q) {
    uint32_t o[F::places];
    F::places_of(o, n, at, q);
    F::take_at(r, s, o, n, k, c, q);
}
__device__ __forceinline__ int group_swizzled(int at, int piece) { return 128 * at + 16 * (piece ^ at % 8); }

// Blocks of 32 columns: all of BYTES each, then all scales.
template <class C, int BYTES> struct grouped_32 : wide<C> {
    static constexpr int parts = BYTES / 16 + 1, row_bytes = 8 * BYTES + 16;
    static __host__ __device__ constexpr int width(int i) { return i + 1 < parts ? 128 : 16; }
    static constexpr size_t at(int i, size_t n) { return i + 1 < parts ? 0 : n / 32 * BYTES; }
    static constexpr size_t length(int i, size_t n) { return n / 32 * (i + 1 < parts ? BYTES : 2); }
    static __device__ __forceinline__ int place(int i, int k) {
        return i + 1 < parts ? 8 * BYTES * k + 128 * i : 16 * k;
    }
    static __device__ __forceinline__ int row_of(int g) { return g / 2 + g % 2 * 4; }
    static __device__ __forceinline__ void take(typename wide<C>::row &r, const uint8_t *s, int n, int at, int k, int c,
                                                int q) {
        group_take<grouped_32>(r, s, n, at, k, c, q);
    }
    static constexpr int places = 3;
    static __device__ __forceinline__ void places_of(uint32_t (&o)[places], int n, int at, int q) {
        o[0] = group_swizzled(at, q);
        o[1] = group_swizzled(at, 4 + q);
        o[2] = 128 * n * (parts - 1) + 16 * at + 2 * (q * 16 / BYTES);
    }
    static __device__ __forceinline__ void take_at(typename wide<C>::row &r, const uint8_t *s,
                                                   const uint32_t (&o)[places], int n, int, int c, int) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            r.q[i] = *(const uint4 *)(s + 128 * n * c + o[i]);
            r.d[i] = *(const uint16_t *)(s + o[2] + (8 * c + 4 * i) * 32 / BYTES);
        }
    }
};
template <> struct grouped<codec_q8_0> : grouped_32<codec_q8_0, 32> {};
template <> struct grouped<codec_q4_0> : grouped_32<codec_q4_0, 16> {};

template <bool FIVE> struct grouped<codec_k45<FIVE>> : wide<codec_k45<FIVE>> {
    typedef codec_k45<FIVE> codec;
    static constexpr int parts = 1, row_bytes = codec::bytes;
    static __host__ __device__ constexpr int width(int) { return codec::bytes; }
    static constexpr size_t at(int, size_t) { return 0; }
    static constexpr size_t length(int, size_t n) { return n / 256 * codec::bytes; }
    static __device__ __forceinline__ int place(int, int k) { return codec::bytes * k; }
    static __device__ __forceinline__ int row_of(int g) { return g; }
    static __device__ __forceinline__ void take(typename wide<codec>::row &r, const uint8_t *s, int n, int at, int k,
                                                int c, int q) {
        group_take<grouped>(r, s, n, at, k, c, q);
    }
    static constexpr int places = 2;
    static __device__ __forceinline__ void places_of(uint32_t (&o)[places], int, int at, int q) {
        o[0] = codec::bytes * at;
        o[1] = o[0] + codec::q_at + 32 * q;
    }
    static __device__ __forceinline__ void take_at(typename wide<codec>::row &r, const uint8_t *s,
                                                   const uint32_t (&o)[places], int, int, int, int q) {
        r.head = *(const uint4 *)(s + o[0]);
        r.shift = 2 * q;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            r.q[i] = *(const uint4 *)(s + o[1] + 16 * i);
            if (FIVE) r.high[FIVE ? i : 0] = *(const uint4 *)(s + o[0] + codec::high_at + 16 * i);
        }
    }
};

// Of d there are two bytes; a copy has at least sixteen.
template <> struct grouped<codec_q6_k> : wide<codec_q6_k> {
    typedef codec_q6_k codec;
    static constexpr int parts = 4, row_bytes = 128 + 64 + 16 + 16;
    static __host__ __device__ constexpr int width(int i) { return i == 0 ? 128 : i == 1 ? 64 : 16; }
    static constexpr size_t at(int i, size_t n) {
        return n / 256 * (i == 0 ? 0 : i == 1 ? codec::high_at : i == 2 ? codec::scales_at : codec::d_at);
    }
    static constexpr size_t length(int i, size_t n) { return n / 256 * (i < 3 ? (size_t)width(i) : 2); }
    static __device__ __forceinline__ int place(int i, int k) { return i < 3 ? width(i) * k : 16 * (k / 8); }
    static __device__ __forceinline__ int row_of(int g) { return g / 2 + g % 2 * 4; }
    static __device__ __forceinline__ void take(row &r, const uint8_t *s, int n, int at, int k, int c, int q) {
        group_take<grouped>(r, s, n, at, k, c, q);
    }
    static constexpr int places = 7;
    static __device__ __forceinline__ void places_of(uint32_t (&o)[places], int n, int at, int q) {
#pragma unroll
        for (int i = 0; i < 4; i++) o[i] = group_swizzled(at, 2 * i + q / 2) + 8 * (q % 2);
#pragma unroll
        for (int i = 0; i < 2; i++) o[4 + i] = 128 * n + 64 * at + 16 * ((2 * i + q / 2) ^ at / 2 % 4) + 8 * (q % 2);
        o[6] = 192 * n + 16 * at;
    }
    static __device__ __forceinline__ void take_at(row &r, const uint8_t *s, const uint32_t (&o)[places], int n, int k,
                                                   int c, int) {
        r.a = *(const uint2 *)(s + o[2 * c]);
        r.b = *(const uint2 *)(s + o[2 * c + 1]);
        r.high = *(const uint2 *)(s + o[4 + c]);
        r.scales = *(const uint2 *)(s + o[6] + 8 * c);
        r.d = *(const uint16_t *)(s + o[6] + 16 * n + 2 * (k % 8));
    }
};

} // namespace te
#endif
