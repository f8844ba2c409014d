// check_device.hpp - graphs; the device and its memory.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "checks.hpp"

// ---- graphs ----

static void check_graph() {
    AT("graph");
    const int n = 1024, ff = 2048, n_tok = 2;
    for (int overlap = 0; overlap < 2; overlap++) {
        api->set_overlap(dev, overlap);
        matrix gate = matrix_new(TE_Q8_0, ff, n, 0.05f), up = matrix_new(TE_Q8_0, ff, n, 0.05f),
               down = matrix_new(TE_Q8_0, ff, n, 0.05f), square = matrix_new(TE_Q8_0, n, n, 0.05f);
        float *x = device_of(normals((size_t)(n * n_tok))), *y = device_new<float>((size_t)(n * n_tok)),
              *h = device_new<float>((size_t)(ff * n_tok));
        const int n_parts = api->parts(dev, &down.m, ff);
        float *partial = device_new<float>((size_t)n_parts * (size_t)(n_tok * n));
        const std::vector<float> start = host_of(x, (size_t)(n * n_tok));
        auto step = [&] {
            for (int layer = 0; layer < 6; layer++) {
                te_linear_args lin = {};
                lin.x = x;
                lin.ldx = (size_t)n;
                lin.n_tok = n_tok;
                lin.n_products = 1;
                lin.product[0].w = square.m;
                lin.product[0].y = y;
                lin.product[0].ldy = (size_t)n;
                lin.product[0].add = x;
                lin.product[0].ld_add = (size_t)n;
                OK(api->linear(dev, &lin));
                te_cuda_hidden hid = {};
                hid.x = y;
                hid.ldx = (size_t)n;
                hid.n_tok = n_tok;
                hid.gate = gate.m;
                hid.up = up.m;
                hid.mode = TE_CUDA_SKIP;
                hid.h = h;
                hid.ldh = (size_t)ff;
                OK(api->hidden(dev, &hid));
                te_cuda_down dow = {};
                dow.w = down.m;
                dow.h = h;
                dow.ldh = (size_t)ff;
                dow.n_tok = n_tok;
                dow.partial = partial;
                OK(api->down(dev, &dow));
                te_merge_args mer = {};
                mer.partial = partial;
                mer.n_parts = n_parts;
                mer.n_tok = n_tok;
                mer.cols = n;
                mer.add = y;
                mer.ld_add = (size_t)n;
                mer.y = x;
                mer.ldy = (size_t)n;
                OK(api->merge(dev, &mer));
            }
        };
        step();
        const std::vector<float> direct = host_of(x, (size_t)(n * n_tok));
        te_cuda_graph *g = nullptr;
        OK(api->capture_begin(dev));
        step();
        OK(api->capture_end(dev, &g));
        for (int turn = 0; turn < 3; turn++) {
            OK(api->upload(dev, x, start.data(), start.size() * 4));
            finish();
            OK(api->graph_launch(dev, g));
            same_bits(direct, host_of(x, (size_t)(n * n_tok)));
        }
        api->graph_free(g);
        gate.free();
        up.free();
        down.free();
        square.free();
    }
    // An operation that fails while it is recorded fails the graph, with its own sentence.
    OK(api->capture_begin(dev));
    te_linear_args bad = {};
    is_true(api->linear(dev, &bad) == TE_ARGUMENT, "an empty operation is refused");
    void *p;
    is_true(api->alloc(dev, 16, &p) == TE_ARGUMENT, "no allocation while recording");
    te_cuda_graph *g = nullptr;
    is_true(api->capture_end(dev, &g) == TE_ARGUMENT && !g && strstr(api->last_error(), "products"),
            "the graph reports the operation");
    finish();
}

// ---- the device ----

static void check_device() {
    AT("device");
    te_cuda_info info;
    OK(api->info(dev, &info));
    is_true(api->version == TE_CUDA_VERSION && api->size == sizeof(te_cuda_api), "the table's version");
    te_cuda *other = nullptr;
    is_true(api->open(1000, &other) == TE_ARGUMENT && !other && strstr(api->last_error(), "1000"), "device 1000");
    te_cuda_memory before, during, after;
    OK(api->memory(dev, &before));
    void *p;
    is_true(api->alloc(dev, (size_t)1 << 60, &p) == TE_MEMORY && !p && strstr(api->last_error(), "MiB"),
            "too much memory");
    OK(api->alloc(dev, (size_t)64 << 20, &p));
    is_true((uintptr_t)p % 256 == 0, "alignment");
    OK(api->memory(dev, &during));
    same(0, (double)(during.owned_bytes - before.owned_bytes), (double)(64 << 20));
    is_true(during.free_bytes < before.free_bytes, "free memory goes down");
    is_true(api->free(dev, (char *)p + 1) == TE_ARGUMENT, "a foreign pointer");
    OK(api->free(dev, p));
    OK(api->memory(dev, &after));
    is_true(after.owned_bytes == before.owned_bytes && after.free_bytes == before.free_bytes, "memory is given back");
    OK(api->free(dev, nullptr));
    te_cuda_graph *g = nullptr;
    is_true(api->capture_end(dev, &g) == TE_ARGUMENT && !g, "nothing was being recorded");

    // A limit on waiting: a second or so of work, a wait of a millisecond.
    matrix m = matrix_new(TE_F16, 512, 4096);
    result y(512);
    te_linear_args op = {};
    op.x = device_of(normals(4096));
    op.ldx = 4096;
    op.n_tok = 1;
    op.n_products = 1;
    op.product[0].w = m.m;
    op.product[0].y = y.data();
    OK(api->capture_begin(dev));
    for (int i = 0; i < 2000; i++) OK(api->linear(dev, &op));
    OK(api->capture_end(dev, &g));
    OK(api->mark(dev, 0));
    for (int i = 0; i < 10; i++) OK(api->graph_launch(dev, g));
    OK(api->mark(dev, 1));
    is_true(api->wait(dev, 0.001) == TE_TIMEOUT, "a wait ends in time");
    finish();
    double ms = 0;
    OK(api->elapsed(dev, 0, 1, &ms));
    is_true(ms > 5 && ms < 5000, "elapsed time");
    api->graph_free(g);
    m.free();

    // Host memory, and a file that is mapped read-only.
    OK(api->host_alloc(dev, 4096, &p));
    memset(p, 0x3c, 4096);
    float *q = device_new<float>(1024);
    OK(api->copy(dev, q, p, 4096));
    same(0, (double)host_of((uint32_t *)q, 1024)[1023], (double)0x3c3c3c3cu);
    OK(api->host_free(dev, p));
    char name[] = "/tmp/kernels_check.XXXXXX";
    const int fd = mkstemp(name);
    std::vector<float> numbers = normals(1 << 16);
    is_true(fd >= 0 && write(fd, numbers.data(), numbers.size() * 4) == (ssize_t)(numbers.size() * 4), "a file");
    void *map = mmap(nullptr, numbers.size() * 4, PROT_READ, MAP_SHARED, fd, 0);
    const void *there = nullptr;
    const te_status s = api->host_register(dev, map, numbers.size() * 4, &there);
    printf("registering a file mapping: %s\n", s == TE_OK ? "works" : api->last_error());
    is_true(s == TE_OK || s == TE_UNSUPPORTED, "a mapping is registered or refused");
    if (s == TE_OK) {
        float *z = device_of(std::vector<float>(numbers.size(), 0));
        OK(api->add(dev, (const float *)there, z, (int64_t)numbers.size()));
        is_true(host_of(z, numbers.size()) == numbers, "a kernel reads the file");
        // Another device of the program asks for its beginning (as examining does), or for more than there is.
        te_cuda *other;
        const void *again = nullptr;
        OK(api->open(0, &other));
        OK(api->host_register(other, map, 4096, &again));
        is_true(again == there, "registered memory has one address");
        api->close(other);
        OK(api->open(0, &other));
        OK(api->host_unregister(dev, map));
        OK(api->host_register(dev, map, 4096, &there));
        is_true(api->host_register(other, map, numbers.size() * 4, &again) == TE_UNSUPPORTED,
                "more than is registered is refused");
        api->close(other);
        OK(api->host_unregister(dev, map));
    }
    munmap(map, numbers.size() * 4);
    close(fd);
    unlink(name);

    // Opening and closing leaves nothing behind.
    for (int i = 0; i < 3; i++) {
        te_cuda *d;
        OK(api->open(0, &d));
        void *a;
        OK(api->alloc(d, (size_t)1 << 28, &a));
        api->close(d);
    }
    OK(api->memory(dev, &before));
    for (int i = 0; i < 30; i++) {
        te_cuda *d;
        OK(api->open(0, &d));
        void *a, *b;
        OK(api->alloc(d, (size_t)1 << 28, &a));
        OK(api->host_alloc(d, 1 << 16, &b));
        OK(api->capture_begin(d));
        if (i % 2) OK(api->capture_end(d, &g));
        if (i % 2) api->graph_free(g);
        api->close(d);
    }
    OK(api->memory(dev, &after));
    is_true(after.free_bytes >= before.free_bytes, "closing gives all memory back");
}
