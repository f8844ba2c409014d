// rows_input.cuh - what the row kernels are told, and how a block brings their input into shared memory: normed, and as
// bytes for integer formats.
#ifndef TE_CUDA_ROWS_INPUT_CUH
#define TE_CUDA_ROWS_INPUT_CUH

#include "codec.cuh"
#include "words.cuh"

namespace te {

constexpr int ROWS_THREADS = 512, ROWS_WARPS = ROWS_THREADS / 32;

enum select_kind {
    SELECT_ALL,  // all rows of all products
    SELECT_LIST, // a list on the device, its length known or on the device
    SELECT_MARK  // neurons whose bit is set for some token
};

struct rows_product {
    const uint8_t *w;
    const float *bias, *add;
    float *y;
    uint8_t *mark;
    size_t stride, ld_add, ldy, ld_mark;
    float threshold;
    const float *threshold_at;
    int first, n_rows; // place in the concatenation of all products
    bool relu;
};

struct rows_args {
    const float *x;
    size_t ldx;
    te_norm norm;
    const void *prepared; // several tokens on tensor cores: the input that te_cuda_prepare made, or NULL
    int n_tok, cols;
    int tile;                   // columns at a time: whole tasks
    int parts;                  // tasks of a row in a tile
    int n;                      // rows (neurons) to choose from
    int unit;                   // SELECT_ALL: a block's rows begin at multiples of this
    int share_each, share_more; // SELECT_ALL: units of a block, blocks with one more
    int capacity;               // rows that a block has room for
    select_kind select;
    const int32_t *list, *n_list;
    const uint8_t *mask; // SELECT_MARK, and bits of each token
    size_t ld_mask;
    // linear
    int n_products;
    rows_product product[TE_MAX_PRODUCTS];
    te_side side;
    int side_first;    // the first block of those that make the side
    uint64_t *publish; // marks of product 0, a part of them of each block (te_marks_args)
    te_ticket ticket;
    // hidden: gate and up are product 0 and 1, without a gate up is product 0
    bool ffn, gated, skip;
    te_activation act;
    float threshold;
    te_xielu curve;
    const float *gate_add, *up_add; // to the products, or NULL
    size_t ld_add;
    float *h;
    size_t ldh;
    uint32_t *fired, *counts;
};

// Shared memory of a block, in this order; sizes in bytes, each a multiple of 16.
struct rows_smem {
    int acts;    // activations of a tile
    int scales;  // of integer ones
    int part;    // sums of tasks
    int pointer; // rows to read
    int id;      // their ids; twice, the second time the places of ups
    int gate;    // gates while ups are read
};

typedef void (*rows_function)(rows_args, rows_smem);

// Several tokens on tensor cores (batch.cuh): shared memory of a column of all tokens and of the scales of 64; the columns
// that a warp takes at a time.
enum batch_form { BATCH_FLOATS, BATCH_HALVES, BATCH_THIRDS, BATCH_BYTES, BATCH_NIBBLES }; // what activations become
struct batch_shape {
    int column_bytes, scale_bytes, chunk; // 0: plain loops
    batch_form form;
};

// The kernels of one format, for one token and for several.
struct rows_kernels {
    int type, lane_weights, steps;
    bool int8;
    batch_shape batch;
    rows_function kernel[2][2]; // of te_linear_args, of te_cuda_hidden
    rows_function one[2];       // of te_linear_args for one token in the usual case (one.cuh), and where it posts
};
const rows_kernels *rows_float(int type); // NULL for types of another file
const rows_kernels *rows_32(int type);
const rows_kernels *rows_bits(int type);
const rows_kernels *rows_table(int type);
const rows_kernels *rows_k(int type);
const rows_kernels *rows_k23(int type);

// rows.cu: of a format; what a te_cuda_hidden asks for, and whether it can be had.
batch_shape batch_shape_for(int32_t type);
rows_args hidden_args(const te_cuda_hidden *op);
typedef te_status (*check_function)(te_cuda *d, const char *op, const te_mat *m); // check_matrix, of launch.h
te_status check_hidden(te_cuda *d, const te_cuda_hidden *op, check_function check);
te_status check_input(te_cuda *d, const char *op, const float *x, size_t ldx, int32_t n_tok, int32_t cols,
                      const te_norm *norm);

// Sum over the block of each of N values; all threads get it. room: shared, ROWS_WARPS * N floats.
template <int N> __device__ void block_sums(float (&s)[N], float *room) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float v = warp_sum(s[i]);
        if (threadIdx.x % 32 == 0) room[threadIdx.x / 32 * N + i] = v;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
        s[i] = 0;
        for (int w = 0; w < ROWS_WARPS; w++) s[i] += room[w * N + i];
    }
    __syncthreads();
}

// Four activations of a token; 0 behind the last column.
__device__ __forceinline__ float4 load_x(const rows_args &a, int t, int c) {
    const float *x = a.x + t * a.ldx + c;
    if (c + 4 <= a.cols) return __ldcg((const float4 *)x);
    float4 v = make_float4(0, 0, 0, 0);
    if (c < a.cols) v.x = __ldcg(x);
    if (c + 1 < a.cols) v.y = __ldcg(x + 1);
    if (c + 2 < a.cols) v.z = __ldcg(x + 2);
    return v;
}
__device__ __forceinline__ float4 load_vector(const float *w, int c, int cols, float other) {
    if (c + 4 <= cols) return __ldg((const float4 *)(w + c));
    return make_float4(c < cols ? __ldg(w + c) : other, c + 1 < cols ? __ldg(w + c + 1) : other,
                       c + 2 < cols ? __ldg(w + c + 2) : other, other);
}

__device__ __forceinline__ float4 apply_norm(const te_norm &norm, int cols, float4 v, int c, float mean, float scale,
                                             float4 w) {
    const float4 b = norm.b ? load_vector(norm.b, c, cols, 0) : make_float4(0, 0, 0, 0);
    return make_float4(fmaf((v.x - mean) * scale, w.x, b.x), fmaf((v.y - mean) * scale, w.y, b.y),
                       fmaf((v.z - mean) * scale, w.z, b.z), fmaf((v.w - mean) * scale, w.w, b.w));
}
// Squares of the distances from the mean, of those of four columns that there are.
__device__ __forceinline__ float squares(float4 v, int c, int cols, float mean) {
    float s = 0;
    if (c < cols) s = (v.x - mean) * (v.x - mean);
    if (c + 1 < cols) s = fmaf(v.y - mean, v.y - mean, s);
    if (c + 2 < cols) s = fmaf(v.z - mean, v.z - mean, s);
    if (c + 3 < cols) s = fmaf(v.w - mean, v.w - mean, s);
    return s;
}

// Mean (of a layer norm) and scale of token t, by a whole block; all threads get them. room: ROWS_WARPS floats.
__device__ inline float2 row_norm(const rows_args &a, const te_norm &norm, int t, float *room) {
    float mean = 0, s[1] = {0};
    if (norm.kind == TE_LAYER_NORM) {
        for (int c = 4 * threadIdx.x; c < a.cols; c += 4 * ROWS_THREADS) {
            const float4 v = load_x(a, t, c);
            s[0] += (v.x + v.y) + (v.z + v.w);
        }
        block_sums(s, room);
        mean = s[0] / (float)a.cols;
        s[0] = 0;
    }
    for (int c = 4 * threadIdx.x; c < a.cols; c += 4 * ROWS_THREADS) s[0] += squares(load_x(a, t, c), c, a.cols, mean);
    block_sums(s, room);
    return make_float2(mean, 1.0f / sqrtf(s[0] / (float)a.cols + norm.eps));
}

// The side of a linear operation, by some of its blocks: each norms whole tokens and writes its share of their columns.
constexpr int SIDE_BLOCKS = 32;
__device__ inline void side_block(const rows_args &a, float *room) {
    const int blocks = min((int)gridDim.x - a.side_first, SIDE_BLOCKS), quads = (a.cols + 3) / 4,
              at = (int)blockIdx.x - a.side_first;
    if (at < 0 || at >= blocks) return;
    const te_norm &norm = a.side.norm;
    const uint32_t number = a.side.publish ? ticket_number(a.side.ticket) : 0;
    const int lo = (int)((int64_t)quads * at / blocks), hi = (int)((int64_t)quads * (at + 1) / blocks);
    for (int t = 0; t < a.n_tok; t++) {
        const float2 n = norm.kind == TE_NO_NORM ? make_float2(0, 1) : row_norm(a, norm, t, room);
        const float mean = n.x, scale = n.y;
        // A column a thread: words that leave the device together are next to each other.
        for (int c = 4 * lo + (int)threadIdx.x; c < min(4 * hi, a.cols); c += ROWS_THREADS) {
            float v = __ldcg(a.x + t * a.ldx + c);
            if (norm.kind != TE_NO_NORM)
                v = fmaf((v - mean) * scale, __ldg(norm.w + c), norm.b ? __ldg(norm.b + c) : 0);
            const size_t to = (size_t)t * a.cols + c;
            if (a.side.publish) store_word(a.side.publish + to, __float_as_uint(v), number);
            if (a.side.keep) a.side.keep[to] = v;
        }
    }
}

// Of each token, in shared memory: x is normed to (x - mean) * scale.
template <int T> struct rows_norm {
    float mean[T], scale[T];
};
template <int T> __device__ void measure(const rows_args &a, rows_norm<T> &n, float *room) {
    if (a.norm.kind == TE_NO_NORM) return;
    float mean[T] = {}, sum[T] = {};
    if (a.norm.kind == TE_LAYER_NORM) {
        for (int c = 4 * threadIdx.x; c < a.cols; c += 4 * ROWS_THREADS)
#pragma unroll
            for (int t = 0; t < T; t++)
                if (t < a.n_tok) {
                    const float4 v = load_x(a, t, c);
                    mean[t] += (v.x + v.y) + (v.z + v.w);
                }
        block_sums(mean, room);
#pragma unroll
        for (int t = 0; t < T; t++) mean[t] /= (float)a.cols;
    }
    for (int c = 4 * threadIdx.x; c < a.cols; c += 4 * ROWS_THREADS)
#pragma unroll
        for (int t = 0; t < T; t++)
            if (t < a.n_tok) sum[t] += squares(load_x(a, t, c), c, a.cols, mean[t]);
    block_sums(sum, room);
    if (threadIdx.x == 0)
#pragma unroll
        for (int t = 0; t < T; t++) {
            n.mean[t] = mean[t];
            n.scale[t] = 1.0f / sqrtf(sum[t] / (float)a.cols + a.norm.eps);
        }
    __syncthreads();
}

// Four activations as bytes, and what holds for their 32, which eight lanes have in order; whole warps call it. Without a
// size all is 0; one that is not finite makes d no number. The sums are for the first of the eight.
struct quad_bytes {
    uint32_t q;
    bytes32 of;
};
__device__ __forceinline__ quad_bytes make_bytes(float4 v) {
    // Of floats without their signs, read as integers, the largest is the largest; above all numbers are infinity and NaN.
    auto size = [](float x) { return __float_as_uint(x) & 0x7fffffff; };
    uint32_t bits = max(max(size(v.x), size(v.y)), max(size(v.z), size(v.w)));
    for (int o = 1; o < 8; o *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, o));
    const float most = __uint_as_float(bits), scale = most > 1e-35f ? 127.0f / most : 0;
    // Added to this, a small number is rounded to an integer, whose low byte is that of the sum.
    auto byte = [&](float x) { return __float_as_uint(__fadd_rn(__fmul_rn(x, scale), 12582912.0f)); };
    const uint32_t q =
        __byte_perm(__byte_perm(byte(v.x), byte(v.y), 0x0040), __byte_perm(byte(v.z), byte(v.w), 0x0040), 0x5410);
    int sum = __dp4a((int)q, 0x01010101, 0);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int other = __shfl_xor_sync(~0u, sum, 4);
    const float d = bits >= 0x7f800000 ? __uint_as_float(0x7fffffff) : most > 1e-35f ? most / 127.0f : 0;
    return {q, {d, {(int16_t)sum, (int16_t)other}}};
}

// Four activations of token t, the i-th of the tile, into shared memory; whole warps call it for integer formats.
// A: rows_args, or something else with its tile.
template <class C, class A>
__device__ __forceinline__ void put_x(const A &a, int t, int i, float4 v, uint4 *q, bytes32 *b) {
    if constexpr (!C::int8) {
        *reinterpret_cast<float4 *>(&q[t * (a.tile / 4) + swizzle(i)]) = v;
    } else {
        const quad_bytes k = make_bytes(v);
        reinterpret_cast<uint32_t *>(&q[t * (a.tile / 16) + swizzle(i >> 2)])[i & 3] = k.q;
        if (i % 8 == 0) b[t * (a.tile / 32) + i / 8] = k.of;
    }
}

// Columns c0 .. c0 + tile - 1 of the input, normed, into shared memory.
template <class C, int T>
__device__ void fill_acts(const rows_args &a, const rows_norm<T> &n, int c0, uint4 *q, bytes32 *b) {
    for (int i = threadIdx.x; i < a.tile / 4; i += ROWS_THREADS) {
        const int c = c0 + 4 * i;
#pragma unroll
        for (int t = 0; t < T; t++) {
            float4 v = make_float4(0, 0, 0, 0);
            if (t < a.n_tok && c < a.cols) {
                v = load_x(a, t, c);
                if (a.norm.kind != TE_NO_NORM)
                    v = apply_norm(a.norm, a.cols, v, c, n.mean[t], n.scale[t], load_vector(a.norm.w, c, a.cols, 0));
            }
            put_x<C>(a, t, i, v, q, b);
        }
    }
    __syncthreads();
}

// The same for one token and a row that 4 * FILL_ONCE values of each thread cover: x is read once, and the weights of the
// norm are on their way before dep_wait. What sums must still be multiplied with is returned: an RMS norm's is not waited
// for. (Twice as wide there are not enough registers: loads in flight would be spilled.)
constexpr int FILL_ONCE = 2;
// Whether one_input (one.cuh) takes it: all columns at once, and an RMS norm at most.
inline bool fills_once(const rows_args &a) {
    auto simple = [](const te_norm &n) { return n.kind == TE_NO_NORM || (n.kind == TE_RMS_NORM && !n.b); };
    const te_norm &n = a.norm, &side = a.side.norm;
    const bool same = n.kind == side.kind && n.w == side.w && n.eps == side.eps;
    return a.tile >= a.cols && a.tile <= 4 * FILL_ONCE * ROWS_THREADS && a.cols % 4 == 0 && simple(n) &&
           ((!a.side.keep && !a.side.publish) ||
            ((uintptr_t)a.side.keep % 16 == 0 && simple(side) && (n.kind == TE_NO_NORM || same)));
}
struct early_norm {
    float4 w[FILL_ONCE];
    __device__ __forceinline__ void load(const te_norm &norm, int cols) {
#pragma unroll
        for (int k = 0; k < FILL_ONCE; k++) {
            const int c = 4 * (threadIdx.x + k * ROWS_THREADS);
            w[k] = make_float4(0, 0, 0, 0);
            if (norm.kind != TE_NO_NORM && c < cols) w[k] = load_vector(norm.w, c, cols, 0);
        }
    }
};
template <class C>
__device__ __forceinline__ float fill_one(const rows_args &a, const early_norm &early, uint4 *q, bytes32 *b,
                                          float *room) {
    float4 v[FILL_ONCE];
#pragma unroll
    for (int k = 0; k < FILL_ONCE; k++) {
        const int c = 4 * (threadIdx.x + k * ROWS_THREADS);
        v[k] = c < a.cols ? load_x(a, 0, c) : make_float4(0, 0, 0, 0);
    }
    float mean = 0, scale = 1;
    if (a.norm.kind == TE_RMS_NORM && !a.norm.b) {
        float s = 0;
#pragma unroll
        for (int k = 0; k < FILL_ONCE; k++) {
            const int i = threadIdx.x + k * ROWS_THREADS;
            s += squares(v[k], 4 * i, a.cols, 0);
            if (4 * i < a.tile) put_x<C>(a, 0, i, apply_norm(a.norm, a.cols, v[k], 4 * i, 0, 1, early.w[k]), q, b);
        }
        s = warp_sum(s);
        if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = s;
        __syncthreads();
        s = 0;
        for (int w = 0; w < ROWS_WARPS; w++) s += room[w];
        return 1.0f / sqrtf(s / (float)a.cols + a.norm.eps);
    }
    if (a.norm.kind == TE_LAYER_NORM) {
        float s[1] = {0};
#pragma unroll
        for (int k = 0; k < FILL_ONCE; k++) s[0] += (v[k].x + v[k].y) + (v[k].z + v[k].w);
        block_sums(s, room);
        mean = s[0] / (float)a.cols;
    }
    if (a.norm.kind != TE_NO_NORM) {
        float s[1] = {0};
#pragma unroll
        for (int k = 0; k < FILL_ONCE; k++) s[0] += squares(v[k], 4 * (threadIdx.x + k * ROWS_THREADS), a.cols, mean);
        block_sums(s, room);
        scale = 1.0f / sqrtf(s[0] / (float)a.cols + a.norm.eps);
    }
#pragma unroll
    for (int k = 0; k < FILL_ONCE; k++) {
        const int i = threadIdx.x + k * ROWS_THREADS;
        if (4 * i >= a.tile) continue;
        if (a.norm.kind != TE_NO_NORM && 4 * i < a.cols)
            v[k] = apply_norm(a.norm, a.cols, v[k], 4 * i, mean, scale, early.w[k]);
        put_x<C>(a, 0, i, v[k], q, b);
    }
    __syncthreads();
    return 1;
}

} // namespace te
#endif
