// check_elem.hpp - packing, embeddings, addition, the largest value.
#pragma once
#include "checks.hpp"

static void check_embed() {
    for (int type : all_types)
        for (int on_host = 0; on_host < 2; on_host++) {
            const int cols = te_type_get(type)->block_weights == 256 ? 768 : 96, rows = 50;
            AT("embed %s, %s", te_type_get(type)->name, on_host ? "in host memory" : "on the device");
            matrix a = matrix_new(type, rows, cols);
            void *host = nullptr;
            OK(api->host_alloc(dev, a.file.size(), &host));
            memcpy(host, a.file.data(), a.file.size());
            uint8_t *there = device_of(a.file);
            const std::vector<int32_t> ids = {3, 49, -1, 0};
            result y(4 * (size_t)(cols + 4));
            te_cuda_embed op = {};
            op.table = {on_host ? host : there, a.file_stride, type, cols, rows};
            op.id = device_of(ids);
            op.n_tok = 4;
            op.y = y.data();
            op.ldy = (size_t)cols + 4;
            OK(api->embed(dev, &op));
            const std::vector<float> once = y.get();
            op.id = device_of(std::vector<int32_t>{1, 2, -1, 0});
            op.offset = 2;
            op.add = 1;
            OK(api->embed(dev, &op));
            const std::vector<float> twice = y.get();
            for (int t = 0; t < 4; t++)
                for (int c = 0; c < cols; c++) {
                    const double first = ids[(size_t)t] < 0 ? 0 : a.row(ids[(size_t)t])[c],
                                 second = t == 2 ? 0 : a.row((t == 3 ? 0 : t + 1) + 2)[c];
                    const size_t at = (size_t)t * (size_t)(cols + 4) + (size_t)c;
                    near(c, (double)once[at], first, is_float(type) ? 0 : 4 * EPS * 4);
                    near(c, (double)twice[at], first + second, EPS * 16);
                }
            OK(api->host_free(dev, host));
            OK(api->free(dev, there));
            a.free();
            y.free();
        }
    AT("pack of rows and blocks");
    {
        matrix a = matrix_new(TE_Q8_0, 12, 256);
        const std::vector<int32_t> rows = {3, 4, 11}, blocks = {7, 0, 2};
        uint8_t *file = device_of(a.file);
        te_mat m = {nullptr, api->stride(TE_Q8_0, 96), TE_Q8_0, 96, 3};
        m.w = device_new<uint8_t>(m.stride * 3);
        const te_cuda_pack op = {m, file, a.file_stride, device_of(rows), device_of(blocks)};
        OK(api->pack(dev, &op));
        const std::vector<uint8_t> got = host_of((const uint8_t *)m.w, m.stride * 3);
        for (int r = 0; r < 3; r++)
            for (int c = 0; c < 96; c++) {
                uint16_t half;
                memcpy(&half, &got[(size_t)r * m.stride + 96 + (size_t)(c / 32) * 2], 2);
                const double w = (double)(int8_t)got[(size_t)r * m.stride + (size_t)c] * (double)te_f16_to_f32(half);
                same(c, w, a.row(rows[(size_t)r])[blocks[(size_t)(c / 32)] * 32 + c % 32]);
            }
        for (int r = 0; r < 3; r++)
            for (size_t i = 102; i < m.stride; i++) same((long)i, got[(size_t)r * m.stride + i], 0);
        a.free();
    }
    AT("add");
    const std::vector<float> x = normals(1003), z = normals(1003);
    float *dx = device_of(x), *dz = device_of(z);
    OK(api->add(dev, dx, dz, 1003));
    const std::vector<float> sums = host_of(dz, 1003);
    for (size_t i = 0; i < 1003; i++) same((long)i, (double)sums[i], (double)(x[i] + z[i]));
    AT("argmax");
    std::vector<float> big = normals(3 * 40000);
    big[20001] = big[30001] = 50;
    big[40000 + 39999] = NAN;
    big[40000 + 7] = 60;
    for (size_t i = 80000; i < 120000; i++) big[i] = NAN;
    int32_t *best = device_new<int32_t>(3);
    OK(api->argmax(dev, device_of(big), 40000, 40000, 3, best));
    const std::vector<int32_t> got = host_of(best, 3);
    same(0, got[0], 20001);
    same(1, got[1], 7);
    same(2, got[2], 0);
}
