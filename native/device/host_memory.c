/* host_memory.c - the stand-in device's memory: ordinary memory under a budget, the faults that tests ask for, and the first
 * error of a program. */
#include "host.h"

#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_types.h"

#ifdef PI_TESTING
pi_host_fault pi_host_faults;
int32_t pi_host_left_out;

bool pi_host_is_due(int32_t *fault) {
    return __atomic_load_n(fault, __ATOMIC_RELAXED) > 0 && __atomic_sub_fetch(fault, 1, __ATOMIC_RELAXED) == 0;
}

void pi_host_be_late(const pi_host_device *d) {
    static uint32_t n_ops;
    const int32_t us = __atomic_load_n(&pi_host_faults.late_us, __ATOMIC_RELAXED);
    if (us > 0 && __atomic_add_fetch(&n_ops, 1, __ATOMIC_RELAXED) % 3 == 0)
        te_os_wait(d->base.cancelled, 0, (uint64_t)us * 1000);
}
#endif

void pi_host_fail(pi_host_device *d, pi_status status) {
    if (status == PI_OK || d->status != PI_OK) return;
    d->status = status;
    strncpy(d->problem, te_last_error(), sizeof d->problem - 1);
    __atomic_store_n(d->base.cancelled, 1, __ATOMIC_RELAXED); /* nobody waits for what will not come */
}

static void *add_block(pi_host_device *d, size_t n_bytes) {
    pi_host_block *b = malloc(sizeof *b);
    void *p = te_os_alloc(n_bytes ? n_bytes : 1);
    if (!b || !p || PI_HOST_IS_DUE(alloc)) {
        te_os_free(p, n_bytes ? n_bytes : 1);
        free(b);
        (void)PI_FAIL(PI_ERROR_MEMORY, "out of memory for %zu bytes of a host device", n_bytes);
        return NULL;
    }
    *b = (pi_host_block){d->blocks, p, n_bytes ? n_bytes : 1};
    d->blocks = b;
    return p;
}

static pi_status use(pi_host_device *d, size_t n_bytes) {
    if (d->budget_bytes && (n_bytes > d->budget_bytes || d->used_bytes > d->budget_bytes - n_bytes))
        return PI_FAIL(PI_ERROR_MEMORY, "%zu bytes more would exceed the device's budget: %llu of %llu are used",
                       n_bytes, (unsigned long long)d->used_bytes, (unsigned long long)d->budget_bytes);
    d->used_bytes += n_bytes;
    return PI_OK;
}

pi_status pi_host_reserve(pi_device *dev, size_t n_bytes) {
    pi_host_device *d = pi_host(dev);
    PI_TRY(use(d, n_bytes));
    d->reserved_bytes = n_bytes;
    return PI_OK;
}

/* Whatever fits is cut from what is reserved, as a GPU does it. */
void *pi_host_alloc(pi_device *dev, size_t n_bytes) {
    pi_host_device *d = pi_host(dev);
    const bool cut = n_bytes <= d->reserved_bytes;
    if (!cut && use(d, n_bytes) != PI_OK) return NULL;
    void *p = add_block(d, n_bytes);
    if (cut && p) d->reserved_bytes -= n_bytes;
    if (!cut && !p) d->used_bytes -= n_bytes;
    return p;
}

void *pi_host_share(pi_device *dev, size_t n_bytes) { return add_block(pi_host(dev), n_bytes); }

pi_status pi_host_upload(pi_device *dev, void *to, const void *from, size_t n_bytes) {
    (void)dev;
    if (PI_HOST_IS_DUE(transfer)) return PI_FAIL(PI_ERROR_DEVICE, "a fault that was asked for: copy");
    memcpy(to, from, n_bytes);
    return PI_OK;
}
size_t pi_host_stride(int32_t type, int32_t cols) { return (size_t)pi_space_row(te_row_bytes(type, cols)); }
pi_status pi_host_map(pi_device *dev, const void *p, size_t n_bytes) {
    pi_host_device *d = pi_host(dev);
    if (PI_HOST_HAS(map) || PI_HOST_IS_DUE(map_one))
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "a fault that was asked for: map");
    if (d->n_mapped == PI_HOST_RANGES)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "more than %d pieces of host memory to map", PI_HOST_RANGES);
    d->mapped[d->n_mapped++] = (pi_host_range){p, n_bytes};
    return PI_OK;
}
bool pi_host_zero_copy(pi_device *dev, const te_mat *m) {
    const pi_host_device *d = pi_host(dev);
    const char *first = m->w, *end = first + m->stride * (size_t)(m->n_rows - 1) + te_row_bytes(m->type, m->cols);
    for (int32_t i = 0; i < d->n_mapped; i++)
        if (first >= d->mapped[i].p && end <= d->mapped[i].p + d->mapped[i].n_bytes) return true;
    return false;
}
void pi_host_gather(const te_mat *from, const int32_t *ids, int32_t each, int32_t n, bool columns, const te_mat *to) {
    if (each < 1) each = 1;
    const te_type_info *t = te_type_get(from->type);
    const size_t block = (size_t)t->block_bytes, row = te_row_bytes(from->type, from->cols);
    char *out = (char *)(uintptr_t)to->w;
    for (int32_t i = 0; !columns && i < n; i++)
        memcpy(out + to->stride * (size_t)i,
               (const char *)from->w + from->stride * (size_t)(ids ? ids[i / each] * each + i % each : i), row);
    for (int32_t r = 0; columns && r < from->n_rows; r++)
        for (int32_t i = 0; i < n; i += t->block_weights)
            memcpy(out + to->stride * (size_t)r + block * (size_t)(i / t->block_weights),
                   (const char *)from->w + from->stride * (size_t)r +
                       block * (size_t)(ids ? ids[i / t->block_weights] : i / t->block_weights),
                   block);
}

pi_status pi_host_pack(pi_device *dev, const te_mat *from, const int32_t *ids, int32_t n, bool columns, te_mat *out) {
    (void)dev;
    const int32_t cols = columns ? n : from->cols;
    *out = (te_mat){out->w, pi_host_stride(from->type, cols), from->type, cols, columns ? from->n_rows : n};
    pi_host_gather(from, ids, 1, n, columns, out);
    return PI_OK;
}
pi_status pi_host_copy(pi_device *dev, void *to, const void *from, size_t n_bytes) {
    return pi_host_upload(dev, to, from, n_bytes);
}

/* What is fetched arrives when somebody looks, one at a time: as late as a GPU's, and always at the same moment. */
pi_status pi_host_fetch(pi_device *dev, const te_mat *from, int32_t n, const te_mat *to) {
    pi_host_device *d = pi_host(dev);
    if (d->n_asked - d->n_fetched >= PI_FETCHES || n < 1 || n > PI_HOST_FETCH_MATS)
        return PI_FAIL(PI_ERROR_ARGUMENT, "%u fetches are under way, another of %d matrices is too much",
                       d->n_asked - d->n_fetched, n);
    const uint32_t at = d->n_asked++ % PI_FETCHES;
    d->n_fetch[at] = n;
    for (int32_t k = 0; k < n; k++) {
        d->fetch[at][k].from = from[k];
        d->fetch[at][k].to = to[k];
    }
    return PI_OK;
}

uint32_t pi_host_fetched(pi_device *dev, pi_status *st) {
    pi_host_device *d = pi_host(dev);
    if (d->n_fetched != d->n_asked && d->fetch_status == PI_OK) {
        const uint32_t at = d->n_fetched++ % PI_FETCHES;
        for (int32_t k = 0; k < d->n_fetch[at]; k++)
            pi_host_gather(&d->fetch[at][k].from, NULL, 1, d->fetch[at][k].from.n_rows, false, &d->fetch[at][k].to);
        if (PI_HOST_IS_DUE(fetch)) d->fetch_status = PI_FAIL(PI_ERROR_DEVICE, "a fault that was asked for: a fetch");
    }
    *st = d->fetch_status;
    return d->n_fetched;
}
