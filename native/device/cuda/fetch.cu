/* fetch.cu - matrices that come to the device in the background (pi_device_ops's fetch). */
#include <cstdio>
#include <cstring>

#include "cuda.cuh"

namespace pi {
namespace {

constexpr size_t fetch_half_bytes = 2u << 20;

void fail(Cuda *c, te_status st) {
    if (st == TE_OK || c->fetch_status != TE_OK) return;
    c->fetch_status = st;
    snprintf(c->fetch_problem, sizeof c->fetch_problem, "%s", te_last_error());
}

te_status send(Cuda *c, const te_mat &from, const te_mat &to, int32_t first, int32_t n, const void *src,
               size_t src_stride) {
    te_cuda_pack op = {};
    op.dst = to;
    op.dst.w = (const char *)to.w + to.stride * (size_t)first;
    op.dst.n_rows = n;
    op.dst.type = from.type;
    op.src = src;
    op.src_stride = src_stride;
    const te_status st = c->te->fetch(c->d, &op, c->room[FETCH], PI_FETCH_BYTES);
    if (st == TE_OK) c->sent++;
    return st;
}

/* Puts what there is room for on the stream: whole matrices where the copy engine reads the source, else rows by way of a
 * half of the ring that is free. ended: of vendor/cuda's fetches. */
te_status pump(Cuda *c, uint32_t ended) {
    while (c->n_fetch_sent != c->n_fetch_asked && c->sent - ended < TE_CUDA_FETCHES) {
        auto &f = c->fetch[c->n_fetch_sent % PI_FETCHES];
        const te_mat &from = f.from[c->fetch_mat], &to = f.to[c->fetch_mat];
        te_status st;
        if (const void *src = mapped(c, from.w)) {
            st = send(c, from, to, 0, from.n_rows, src, from.stride);
            c->fetch_row = from.n_rows;
        } else {
            const size_t row = te_row_bytes(from.type, from.cols), stride = (row + 15) / 16 * 16;
            int32_t n = (int32_t)(fetch_half_bytes / stride);
            if (!n) return te_fail(TE_UNSUPPORTED, "a row of %zu bytes is too long to be brought to a GPU", row);
            if ((int32_t)(c->fetch_half_end[c->fetch_turn] - ended) > 0) return TE_OK; /* not yet */
            if (n > from.n_rows - c->fetch_row) n = from.n_rows - c->fetch_row;
            char *half = c->fetch_ring + fetch_half_bytes * (size_t)c->fetch_turn;
            for (int32_t i = 0; i < n; i++)
                memcpy(half + stride * (size_t)i, (const char *)from.w + from.stride * (size_t)(c->fetch_row + i), row);
            st = send(c, from, to, c->fetch_row, n, half, stride);
            c->fetch_half_end[c->fetch_turn] = c->sent;
            c->fetch_turn ^= 1;
            c->fetch_row += n;
        }
        if (st != TE_OK) return st;
        if (c->fetch_row < from.n_rows) continue;
        c->fetch_row = 0;
        if (++c->fetch_mat < f.n) continue;
        c->fetch_mat = 0;
        f.end = c->sent;
        c->n_fetch_sent++;
    }
    return TE_OK;
}

/* What operations have asked for already, if there were any (op_route). */
te_status get_ready(Cuda *c) {
    if (!c->room[FETCH]) {
        c->room[FETCH] = alloc_alone(&c->base, PI_FETCH_BYTES);
        if (!c->room[FETCH]) return TE_MEMORY;
        c->have[FETCH] = PI_FETCH_BYTES;
    }
    return c->te->fetch_open(c->d);
}

} // namespace

pi_status fetch(pi_device *dev, const te_mat *from, int32_t n, const te_mat *to) {
    Cuda *c = of(dev);
    if (n < 1 || n > FETCH_MATS || c->n_fetch_asked - c->n_fetched >= PI_FETCHES)
        return (pi_status)te_fail(TE_ARGUMENT, "%u fetches are under way, another of %d matrices is too much",
                                  c->n_fetch_asked - c->n_fetched, (int)n);
    const te_status st = get_ready(c);
    if (st != TE_OK) return (pi_status)st;
    auto &f = c->fetch[c->n_fetch_asked % PI_FETCHES];
    for (int32_t i = 0; i < n; i++) {
        if (!mapped(c, from[i].w) && !c->fetch_ring) {
            c->fetch_ring = (char *)share(dev, 2 * fetch_half_bytes);
            if (!c->fetch_ring) return PI_ERROR_MEMORY;
        }
        f.from[i] = from[i];
        f.to[i] = to[i];
    }
    f.n = n;
    c->n_fetch_asked++;
    pi_status seen = PI_OK;
    (void)fetched(dev, &seen);
    return PI_OK;
}

uint32_t fetched(pi_device *dev, pi_status *st) {
    Cuda *c = of(dev);
    uint32_t ended = 0;
    if (c->fetch_status == TE_OK) fail(c, c->te->fetched(c->d, &ended));
    if (c->fetch_status == TE_OK) fail(c, pump(c, ended));
    while (c->fetch_status == TE_OK && c->n_fetched != c->n_fetch_sent &&
           (int32_t)(ended - c->fetch[c->n_fetched % PI_FETCHES].end) >= 0)
        c->n_fetched++;
    *st = c->fetch_status == TE_OK ? PI_OK : (pi_status)te_fail(c->fetch_status, "%s", c->fetch_problem);
    return c->n_fetched;
}

} // namespace pi
