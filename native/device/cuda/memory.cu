/* memory.cu - a GPU's memory within its budget, and weights on their way into it. */
#include <cstring>

#include <cuda_runtime.h>

#include "../../../vendor/core/te_layout.h"
#include "cuda.cuh"

namespace pi {
namespace {

/* Rows pass through two halves of pinned memory while the other half is read by the device. */
constexpr size_t half_bytes = 8u << 20;

pi_status status(te_status st) { return (pi_status)st; }

/* The driver loads code when it is first used: at most this much for one kind of work. */
constexpr uint64_t code_bytes = 64u << 20;

/* cudaMalloc takes whole pages of 2 MiB, and puts small pieces together in one. */
constexpr uint64_t page_bytes = 2u << 20;
constexpr size_t slab_bytes = 32u << 20;

pi_status refuse_budget(const Cuda *c, size_t n_bytes) {
    return status(te_fail(TE_MEMORY, "%.1f MiB more would exceed the GPU's budget: %.1f of %.1f MiB are used",
                          (double)n_bytes / 0x1p20, (double)c->used_bytes / 0x1p20, (double)c->budget_bytes / 0x1p20));
}
bool fits(const Cuda *c, size_t n_bytes) {
    return !c->budget_bytes || (n_bytes <= c->budget_bytes && c->used_bytes <= c->budget_bytes - n_bytes);
}

} // namespace

uint64_t free_bytes(Cuda *c) {
    te_cuda_memory m = {};
    return c->te->memory(c->d, &m) == TE_OK ? m.free_bytes : 0;
}

void *alloc_alone(pi_device *dev, size_t n_bytes) {
    Cuda *c = of(dev);
    if (!n_bytes) n_bytes = 1;
    if (!fits(c, n_bytes)) return (void)refuse_budget(c, n_bytes), nullptr;
    const uint64_t before = free_bytes(c);
    void *p = nullptr;
    if (c->te->alloc(c->d, n_bytes, &p) != TE_OK) return nullptr;
    count_taken(c, before, n_bytes);
    if (!fits(c, 0)) {
        give(dev, p, n_bytes);
        return (void)refuse_budget(c, n_bytes), nullptr;
    }
    return p;
}

namespace {

size_t pages(size_t n_bytes) { return (n_bytes + page_bytes - 1) / page_bytes * page_bytes; }

/* Another piece of memory that holds n bytes, and more of the same kind where the budget is far from spent. */
Slab *add_slab(pi_device *dev, size_t n_bytes) {
    Cuda *c = of(dev);
    if (c->n_slabs == MAX_SLABS)
        return (void)te_fail(TE_MEMORY, "more than %d pieces of a GPU's memory", (int)MAX_SLABS), nullptr;
    size_t want = slab_bytes;
    if (c->budget_bytes) {
        const uint64_t left = c->budget_bytes > c->used_bytes ? c->budget_bytes - c->used_bytes : 0;
        if (want > left / 8) want = (size_t)(left / 8);
    }
    if (n_bytes > want) want = n_bytes;
    void *p = alloc_alone(dev, pages(want));
    if (!p) return nullptr;
    c->slab[c->n_slabs] = {(char *)p, pages(want), 0};
    return &c->slab[c->n_slabs++];
}

/* The driver's tables of host memory that kernels read: 8 bytes for every 4 KiB. */
constexpr uint64_t table_share = 512;

} // namespace

pi_status reserve(pi_device *dev, size_t n_bytes) {
    Cuda *c = of(dev);
    if (!n_bytes) return PI_OK;
    void *p = c->n_slabs < MAX_SLABS ? alloc_alone(dev, pages(n_bytes)) : nullptr;
    if (!p) return PI_ERROR_MEMORY;
    c->slab[c->n_slabs++] = {(char *)p, pages(n_bytes), 0};
    return PI_OK;
}

/* Matrices share pieces of memory: by itself, each would waste half a page. */
void *alloc(pi_device *dev, size_t n_bytes) {
    Cuda *c = of(dev);
    const size_t n = pi_space(n_bytes ? n_bytes : 1);
    if (n < n_bytes) return (void)refuse_budget(c, n_bytes), nullptr;
    Slab *s = nullptr;
    for (int32_t i = 0; i < c->n_slabs && !s; i++)
        if (c->slab[i].n_bytes - c->slab[i].used_bytes >= n) s = &c->slab[i];
    if (!s) s = add_slab(dev, n);
    if (!s) return nullptr;
    char *p = s->p + s->used_bytes;
    if (c->te->fill(c->d, p, 0, n) != TE_OK) return nullptr;
    s->used_bytes += n;
    return p;
}

void count_taken(Cuda *c, uint64_t free_before, uint64_t n_bytes) {
    const uint64_t after = free_bytes(c);
    uint64_t took = free_before > after ? free_before - after : 0;
    if (took > n_bytes + page_bytes) took = n_bytes + page_bytes; /* the rest is other programs' */
    c->used_bytes += took;
}

/* What graphs took, or gave back, since so much was free and up to n were taken away. The driver has pages of 2 MiB for
 * several: a page may come with any graph, and go with any other. */
void count_graphs(Cuda *c, uint64_t free_before, int32_t n_gone) {
    const uint64_t after = free_bytes(c), most = graph_bytes + page_bytes, back = 2 * page_bytes * (uint64_t)n_gone;
    if (free_before > after) {
        const uint64_t took = free_before - after;
        c->used_bytes += took < most ? took : most;
        c->graphs_bytes += took < most ? took : most;
        return;
    }
    uint64_t gave = after - free_before; /* beyond these limits it is other programs' */
    if (gave > back) gave = back;
    if (gave > c->graphs_bytes) gave = c->graphs_bytes;
    c->used_bytes -= gave;
    c->graphs_bytes -= gave;
}

/* NVML, the driver's library for looking at GPUs, needs no context. Its declarations are not everywhere where CUDA's are. */
uint64_t used_without_context(int32_t index) {
    struct Memory {
        unsigned long long total, free, used;
    } m = {};
    char bus[32], why[256];
    void *gpu = nullptr;
    int (*init)(void) = nullptr, (*handle)(const char *, void **) = nullptr, (*memory)(void *, Memory *) = nullptr;
    void *library = te_os_library("libnvidia-ml.so.1", why, sizeof why);
    if (!library || !te_os_symbol(library, "nvmlInit_v2", (void *)&init, sizeof init) ||
        !te_os_symbol(library, "nvmlDeviceGetHandleByPciBusId_v2", (void *)&handle, sizeof handle) ||
        !te_os_symbol(library, "nvmlDeviceGetMemoryInfo", (void *)&memory, sizeof memory))
        return 0;
    if (cudaDeviceGetPCIBusId(bus, sizeof bus, index) != cudaSuccess) return (void)cudaGetLastError(), 0;
    return init() == 0 && handle(bus, &gpu) == 0 && memory(gpu, &m) == 0 ? m.used : 0;
}

void give(pi_device *dev, void *p, size_t n_bytes) {
    Cuda *c = of(dev);
    const uint64_t before = free_bytes(c);
    if (!p || c->te->free(c->d, p) != TE_OK) return;
    const uint64_t after = free_bytes(c);
    uint64_t gave = after > before ? after - before : 0;
    if (gave > n_bytes + page_bytes) gave = n_bytes + page_bytes;
    c->used_bytes -= gave < c->used_bytes ? gave : c->used_bytes;
}

void *share(pi_device *dev, size_t n_bytes) {
    Cuda *c = of(dev);
    void *p = nullptr;
    if (c->te->host_alloc(c->d, n_bytes ? n_bytes : 1, &p) != TE_OK) return nullptr;
    memset(p, 0, n_bytes ? n_bytes : 1);
    return p;
}

pi_status upload(pi_device *dev, void *to, const void *from, size_t n_bytes) {
    Cuda *c = of(dev);
    const te_status st = c->te->upload(c->d, to, from, n_bytes);
    return status(st != TE_OK ? st : c->te->wait(c->d, finish_seconds));
}
pi_status download(pi_device *dev, void *to, const void *from, size_t n_bytes) {
    Cuda *c = of(dev);
    const te_status st = c->te->download(c->d, to, from, n_bytes);
    return status(st != TE_OK ? st : c->te->wait(c->d, finish_seconds));
}
pi_status copy(pi_device *dev, void *to, const void *from, size_t n_bytes) {
    Cuda *c = of(dev);
    return status(c->te->copy(c->d, to, from, n_bytes));
}

pi_status map(pi_device *dev, const void *p, size_t n_bytes) {
    Cuda *c = of(dev);
    if (c->n_mapped == MAX_RANGES)
        return status(te_fail(TE_UNSUPPORTED, "more than %d pieces of host memory to map", (int)MAX_RANGES));
    const void *device = nullptr;
    const uint64_t before = free_bytes(c);
    const te_status st = c->te->host_register(c->d, p, n_bytes, &device);
    count_taken(c, before, n_bytes / table_share);
    if (st == TE_OK) c->mapped[c->n_mapped++] = {(const char *)p, n_bytes, (const char *)device};
    return status(st);
}

const void *mapped(const Cuda *c, const void *p) {
    for (int32_t i = 0; i < c->n_mapped; i++) {
        const Range &r = c->mapped[i];
        if ((const char *)p >= r.host && (const char *)p < r.host + r.n_bytes)
            return r.device + ((const char *)p - r.host);
    }
    return nullptr;
}

/* As te_ffn_args's `zero_copy` wants them. */
bool zero_copy(pi_device *dev, const te_mat *m) {
    const Cuda *c = of(dev);
    const size_t n_bytes = m->stride * (size_t)(m->n_rows - 1) + te_row_bytes(m->type, m->cols);
    const char *p = (const char *)mapped(c, m->w), *last = (const char *)mapped(c, (const char *)m->w + n_bytes - 1);
    const bool there = p && last == p + n_bytes - 1;
    const te_layout *l = te_layout_get(m->type);
    if (!there || !pi_space_reads_rows(m->type, m->stride)) return false;
    if (l->n_planes > 1) return (uintptr_t)p % 2 == 0;
    return (uintptr_t)p % PI_DEVICE_ROW == 0 && m->stride >= c->te->stride(m->type, m->cols);
}

namespace {

struct Gather {
    const te_mat *from;
    const int32_t *ids; /* H */
    bool columns;
    te_mat to;
    int32_t each; /* as pi_device_load's */
};

/* Where kernels read the whole of the source: one operation. */
te_status pack_mapped(Cuda *c, const Gather &g, const void *src) {
    const int32_t n = g.columns ? g.to.cols / te_type_get(g.to.type)->block_weights : g.to.n_rows;
    if (g.ids && (size_t)n > 2 * half_bytes / sizeof(int32_t))
        return te_fail(TE_UNSUPPORTED, "a list of %d rows is too long", (int)n);
    const int32_t *list = g.ids ? (const int32_t *)c->ring : nullptr;
    if (g.ids) memcpy(c->ring, g.ids, sizeof(int32_t) * (size_t)n);
    te_cuda_pack op = {};
    op.dst = g.to;
    op.src = src;
    op.src_stride = g.from->stride;
    op.rows = g.columns ? nullptr : list;
    op.blocks = g.columns ? list : nullptr;
    const te_status st = c->te->pack(c->d, &op), waited = c->te->wait(c->d, finish_seconds);
    return st != TE_OK ? st : waited;
}

/* Rows of the result from first on, `n` of them, as they are in a file, to `at`, `stride` apart. */
struct Piece {
    const Gather *g;
    int32_t first, n;
    char *at;
    size_t stride;
};

void copy_row(const Piece &p, int32_t i) {
    const Gather &g = *p.g;
    const te_mat &m = *g.from;
    const int32_t r = p.first + i, each = g.each > 1 ? g.each : 1,
                  row = !g.columns && g.ids ? g.ids[r / each] * each + r % each : r;
    const char *src = (const char *)m.w + m.stride * (size_t)row;
    char *dst = p.at + p.stride * (size_t)i;
    const te_type_info *t = te_type_get(m.type);
    const size_t block = (size_t)t->block_bytes;
    if (!g.columns || !g.ids) return (void)memcpy(dst, src, te_row_bytes(m.type, g.to.cols));
    for (int32_t b = 0; b < g.to.cols / t->block_weights; b++)
        memcpy(dst + block * (size_t)b, src + block * (size_t)g.ids[b], block);
}

void copy_share(void *ctx, te_team *team) {
    const Piece &p = *(const Piece *)ctx;
    int64_t lo, hi;
    te_share(team, p.n, 1, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) copy_row(p, (int32_t)i);
}

/* Brings rows over piece by piece: half(turn) waits until that half of the ring is free, send(op, turn) takes what lies in
 * it. copiers: who copies, or null. */
template <class H, class S> te_status by_ring(Cuda *c, const Gather &g, te_pool *copiers, H half, S send) {
    const size_t row = te_row_bytes(g.to.type, g.to.cols), stride = (row + 15) / 16 * 16, most = half_bytes / stride;
    if (!most) return te_fail(TE_UNSUPPORTED, "a row of %zu bytes is too long to be brought to a GPU", row);
    for (int32_t first = 0; first < g.to.n_rows; c->turn ^= 1) {
        const int32_t left = g.to.n_rows - first, n = (size_t)left < most ? left : (int32_t)most;
        Piece p = {&g, first, n, c->ring + half_bytes * (size_t)c->turn, stride};
        te_status st = half(c->turn);
        if (st != TE_OK) return st;
        te_team alone = {};
        alone.nth = 1;
        if (copiers)
            te_pool_run(copiers, copy_share, &p);
        else
            copy_share(&p, &alone);
        te_cuda_pack op = {};
        op.dst = g.to;
        op.dst.w = (const char *)g.to.w + g.to.stride * (size_t)first;
        op.dst.n_rows = n;
        op.src = p.at;
        op.src_stride = stride;
        st = send(&op, c->turn);
        if (st != TE_OK) return st;
        first += n;
    }
    return TE_OK;
}

/* More bring no more over the bus. */
constexpr int32_t most_copiers = 8;

} // namespace

te_status reserve_copiers(Cuda *c) {
    if (c->copiers) return TE_OK;
    const int32_t n = te_os_n_cores() / 2;
    return te_pool_new(n < 1 ? 1 : n > most_copiers ? most_copiers : n, &c->copiers);
}

te_status load_by_ring(Cuda *c, const pi_device_load *a) {
    const Gather g = {&a->from, a->host_ids, a->columns, a->to, a->each};
    auto half = [&](int32_t turn) {
        te_status st;
        do st = c->te->load_passed(c->d, turn, finish_seconds);
        while (st == TE_TIMEOUT &&
               !*(volatile uint32_t *)c->base.cancelled); /* what is in front may wait for the CPU */
        return st;
    };
    return by_ring(c, g, c->copiers, half, [&](const te_cuda_pack *op, int32_t turn) {
        const te_status st = c->te->load(c->d, a->stage, op);
        return st != TE_OK ? st : c->te->load_mark(c->d, turn);
    });
}

pi_status pack(pi_device *dev, const te_mat *from, const int32_t *ids, int32_t n, bool columns, te_mat *out) {
    Cuda *c = of(dev);
    const int32_t cols = columns ? n : from->cols, rows = columns ? from->n_rows : n;
    *out = te_mat{out->w, c->te->stride(from->type, cols), from->type, cols, rows};
    if (!c->ring) c->ring = (char *)share(dev, 2 * half_bytes);
    if (!c->ring) return PI_ERROR_MEMORY;
    const Gather g = {from, ids, columns, *out, 1};
    const uint64_t before = c->packed ? 0 : free_bytes(c); /* the first call loads the kernel */
    te_status st;
    if (const void *src = mapped(c, from->w)) {
        st = pack_mapped(c, g, src);
    } else {
        auto half = [&](int32_t) { return c->te->wait(c->d, finish_seconds); };
        st = by_ring(c, g, nullptr, half, [&](const te_cuda_pack *op, int32_t) { return c->te->pack(c->d, op); });
        const te_status waited = c->te->wait(c->d, finish_seconds);
        if (st == TE_OK) st = waited;
    }
    if (!c->packed) count_taken(c, before, code_bytes);
    c->packed = true;
    return status(st);
}

} // namespace pi
