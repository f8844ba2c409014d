// gpu.hpp - what the GPU programs share: the opened device, buffers, random numbers, matrices of every format.
#pragma once
#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <malloc.h>
#include <string>
#include <vector>

#include "core/te_half.h"
#include "core/te_quant.h"
#include "core/te_types.h"
#include "cuda/te_cuda.h"

inline const te_cuda_api *api;
inline te_cuda *dev;

inline void ok(te_status s, const char *what) {
    if (s == TE_OK) return;
    fprintf(stderr, "%s: status %d, %s\n", what, (int)s, api->last_error());
    exit(1);
}
#define OK(expr) ok((expr), #expr)

inline void open_gpu() {
    mallopt(M_MMAP_MAX, 0); // large buffers come and go: their pages are kept
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
    api = te_cuda_table();
    int32_t n = 0;
    if (api->count(&n) != TE_OK || n < 1) {
        fprintf(stderr, "no GPU: %s\n", api->last_error());
        exit(2);
    }
    OK(api->open(0, &dev));
}
inline void finish() { OK(api->wait(dev, 20)); }

// Device memory of n values; freed by hand only where it is large.
template <class T> T *device_new(size_t n) {
    void *p;
    OK(api->alloc(dev, n * sizeof(T), &p));
    return (T *)p;
}
template <class T> T *device_of(const std::vector<T> &v) {
    T *p = device_new<T>(v.size());
    if (!v.empty()) OK(api->upload(dev, p, v.data(), v.size() * sizeof(T)));
    finish();
    return p;
}
template <class T> std::vector<T> host_of(const T *p, size_t n) {
    std::vector<T> v(n);
    finish();
    OK(api->download(dev, v.data(), p, n * sizeof(T)));
    finish();
    return v;
}

inline uint64_t random_state = 88172645463325252ull;
inline uint32_t random_word() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 16);
}
inline double random_unit() { return (random_word() + 0.5) / 4294967296.0; }
inline float random_normal() { return (float)(sqrt(-2 * log(random_unit())) * cos(6.283185307179586 * random_unit())); }
inline std::vector<float> normals(size_t n, float size = 1) {
    std::vector<float> v(n);
    for (float &x : v) x = size * random_normal();
    return v;
}

// n of a table of such numbers, from any place in it on: large matrices take seconds else.
inline void table_normals(float *to, int n, float size) {
    static const std::vector<float> table = normals(65521);
    for (size_t at = random_word() % table.size(); n--; at = at + 1 < table.size() ? at + 1 : 0)
        *to++ = size * table[at];
}

inline bool is_float(int type) { return type == TE_F32 || type == TE_F16 || type == TE_BF16; }
inline std::vector<int> all_types = {TE_F32,  TE_F16,  TE_BF16, TE_Q8_0,   TE_Q4_0,   TE_Q4_K,  TE_Q5_K, TE_Q6_K,
                                     TE_Q4_1, TE_Q5_0, TE_Q5_1, TE_IQ4_NL, TE_IQ4_XS, TE_MXFP4, TE_Q2_K, TE_Q3_K};
inline bool is_wanted(int type) {
    for (int one : all_types)
        if (one == type) return true;
    return false;
}
// Of the arguments of a program, names of formats: if there are some, the checks are of these only. Returns whether there
// are other arguments.
inline bool choose_types(int argc, char **argv) {
    std::vector<int> chosen;
    int n = 1;
    for (int i = 1; i < argc; i++)
        for (int type : all_types)
            if (!strcmp(argv[i], te_type_get(type)->name)) {
                chosen.push_back(type);
                n++;
            }
    if (n > 1) all_types = chosen;
    return argc > n;
}

// A matrix on the device, the bytes of its file, and its weights.
struct matrix {
    te_mat m = {};
    std::vector<uint8_t> file;
    std::vector<double> w;
    std::vector<double> low; // of each low_block weights what is taken off them, of formats that have that
    size_t file_stride = 0;
    int low_block = 0;
    const double *row(int r) const { return &w[(size_t)r * (size_t)m.cols]; }
    // Where a block's factor and what is taken off are rounded to F16 each, their errors are those of all its weights, and do
    // not even out: squares of what they are multiplied with in a product of row r with x.
    double block_squares(int r, const double *x) const {
        double squares = 0;
        for (int b = 0; low_block && b < m.cols / low_block; b++) {
            const double l = low[(size_t)(r * (m.cols / low_block) + b)];
            double with = 0, off = 0;
            for (int c = b * low_block; c < (b + 1) * low_block; c++) {
                with += (row(r)[c] + l) * x[c];
                off += l * x[c];
            }
            squares += with * with + off * off;
        }
        return squares;
    }
    void free() { OK(api->free(dev, (void *)m.w)); }
};
// The scales of a block of random bytes, for weights of about this size. Their own search for the best ones is slow.
inline void set_scales(int type, uint8_t *block, float size) {
    if (type == TE_MXFP4) {
        block[0] = (uint8_t)(124 + (int)floorf(log2f(size)) + (int)(random_word() % 3));
        return;
    }
    float d = 2e-3f;
    int at = 0;
    if (type == TE_Q2_K) d = 2e-2f, at = 80;
    if (type == TE_Q3_K) d = 8e-3f, at = 108;
    if (type == TE_Q6_K) d = 4e-4f, at = 208;
    if (type == TE_IQ4_XS) d = 3e-4f;
    if (type == TE_IQ4_NL) d = 1e-2f;
    const uint16_t half = te_f32_to_f16(size * d), low = te_f32_to_f16(size * 2e-2f);
    memcpy(block + at, &half, 2);
    if (type == TE_Q2_K || type == TE_Q4_K || type == TE_Q5_K) memcpy(block + at + 2, &low, 2);
}
// poison: rows (a multiple of it, behind the first) whose bytes are all ones, which is not a number in every format.
inline matrix matrix_new(int type, int rows, int cols, float size = 1, const std::vector<char> &poison = {}) {
    matrix a;
    a.file_stride = te_row_bytes(type, cols);
    a.file.resize(a.file_stride * (size_t)rows);
    a.w.resize((size_t)rows * (size_t)cols);
    a.low_block = type == TE_Q2_K ? 16 : type == TE_Q4_K || type == TE_Q5_K ? 32 : 0;
    if (a.low_block) a.low.resize(a.w.size() / (size_t)a.low_block);
    std::vector<float> x((size_t)cols);
    for (int r = 0; r < rows; r++) {
        uint8_t *to = &a.file[(size_t)r * a.file_stride];
        if (!poison.empty() && poison[(size_t)r]) {
            memset(to, 0xff, a.file_stride);
            continue;
        }
        if (te_type_get(type)->block_weights == 256 || type == TE_MXFP4 || type == TE_IQ4_NL) {
            for (size_t i = 0; i < a.file_stride; i++) to[i] = (uint8_t)random_word();
            for (size_t b = 0; b < a.file_stride; b += (size_t)te_type_get(type)->block_bytes)
                set_scales(type, to + b, size);
        } else {
            table_normals(x.data(), cols, size);
            te_quantize_row(type, x.data(), to, cols);
        }
        te_dequantize_row(type, to, x.data(), cols);
        for (int c = 0; c < cols; c++) a.w[(size_t)r * (size_t)cols + (size_t)c] = (double)x[(size_t)c];
        if (!a.low_block) continue;
        std::vector<uint8_t> none(to, to + a.file_stride); // weights of 0, less what is taken off
        const size_t block = (size_t)te_type_get(type)->block_bytes, end = type == TE_Q2_K ? 80 : block;
        for (size_t b = 0; b < none.size(); b += block) std::fill_n(&none[b + 16], end - 16, (uint8_t)0);
        te_dequantize_row(type, none.data(), x.data(), cols);
        for (int c = 0; c < cols; c += a.low_block)
            a.low[((size_t)r * (size_t)cols + (size_t)c) / (size_t)a.low_block] = -(double)x[(size_t)c];
    }
    a.m = {nullptr, api->stride(type, cols), type, cols, rows};
    a.m.w = device_new<uint8_t>(a.m.stride * (size_t)rows);
    uint8_t *staged = device_of(a.file);
    OK(api->fill(dev, (void *)a.m.w, 0xee, a.m.stride * (size_t)rows));
    const te_cuda_pack op = {a.m, staged, a.file_stride, nullptr, nullptr};
    OK(api->pack(dev, &op));
    finish();
    OK(api->free(dev, staged));
    return a;
}
