// halves.hpp - input of products in F16, as kernels write it.
#pragma once
#include <algorithm>

#include "checks.hpp"

static size_t up_to(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Whether products of so many tokens are by wgmma: demanded, since other kernels would give the same values.
static bool is_by_groups(int type, int n_tok) {
#ifdef TE_CUDA_WGMMA
    te_cuda_info info;
    OK(api->info(dev, &info));
    bool has = false;
    for (int with : {TE_F16, TE_Q4_0, TE_Q8_0, TE_Q4_K, TE_Q5_K, TE_Q6_K}) has = has || type == with;
    return info.major == 9 && has && n_tok > TE_CUDA_MAX_TOK && n_tok <= (type == TE_F16 ? 256 : 240);
#else
    (void)type;
    (void)n_tok;
    return false;
#endif
}

// F16 input of products on the device, and what it holds.
struct halves {
    te_cuda_half h;
    int n_tok, cols;
    std::vector<double> seen;
    double at(int t, int c) const { return seen[(size_t)t * h.ld + (size_t)c]; }
    size_t n_values() const { return (size_t)(h.tiles ? 8 * h.tiles : n_tok) * h.ld; }
    // With tiles: token and column of value i. Sixteen bytes are a lane's, 32 lanes a tile's, the tiles a unit's; a lane has
    // two runs of four columns.
    void place(size_t i, size_t *t, size_t *c) const {
        const size_t tiles = (size_t)h.tiles, words = (size_t)h.words, tile = i / 256 % tiles, unit = i / 256 / tiles;
        size_t j = i % 8, lane = i / 8 % 32;
        if (h.matrices == 2) { // in order (wide_place.cuh): a row of one for each token
            lane = i / 8 % 8 * 4 + i / 64 % 4;
        } else if (h.matrices) { // four of 8 x 8, a row for each token; a lane has two columns of each
            const size_t matrix = i / 64 % 4, k = i % 2;
            lane = i / 8 % 8 * 4 + i / 2 % 4;
            j = 2 * matrix + k;
        }
        const size_t q = lane % 4;
        *t = 8 * tile + lane / 4;
        *c = unit / words * 32 * words + q * 8 * words + j / 4 * 4 * words + unit % words * 4 + j % 4;
    }
    void read() {
        const std::vector<uint16_t> v = host_of((const uint16_t *)h.v, n_values());
        const std::vector<float> scale = host_of(h.scale, h.tiles ? (size_t)n_tok : 1);
        seen.assign((size_t)n_tok * h.ld, NAN);
        for (size_t i = 0; i < v.size(); i++) {
            size_t t = i / h.ld, c = i % h.ld;
            if (h.tiles) place(i, &t, &c);
            if (t < (size_t)n_tok) seen[t * h.ld + c] = (double)scale[h.tiles ? t : 0] * (double)te_f16_to_f32(v[i]);
        }
        for (int t = 0; t < n_tok; t++)
            for (size_t c = (size_t)cols; c < h.ld; c++) is_true(at(t, (int)c) == 0, "no zeros behind the last column");
    }
    void free() {
        OK(api->free(dev, h.v));
        OK(api->free(dev, h.scale));
    }
};
// type: of the matrices, where their products of a few tokens want it otherwise than as rows.
// of_tok: what the form is that of, where the rows are tokens' routes.
static halves halves_new(int n_tok, int cols, int type = -1, int of_tok = 0) {
    halves h = {{nullptr, up_to((size_t)cols, 8) + 8, nullptr, 0, 0, 0}, n_tok, cols, {}};
    if (type >= 0) h.h = api->half_form(dev, type, of_tok ? of_tok : n_tok, cols);
    if (h.h.tiles) h.h.tiles = std::max(h.h.tiles, (n_tok + 7) / 8);
    h.h.v = device_of(std::vector<uint16_t>(h.n_values(), 0x7e00)); // no numbers
    h.h.scale = device_new<float>((size_t)n_tok + 1);
    return h;
}
