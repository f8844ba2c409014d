/* timeline.c - when each side of a hybrid step did what, in one clock: the CPU's. */
#include <stdlib.h>
#include <string.h>

#include "hybrid.h"

static void stamp_program(void *at, pi_device *dev) { dev->ops->stamp(dev, at); }

/* How far the device's clock is behind the CPU's: what the CPU saw earliest after a stamp was made is the least wrong. */
static pi_status compare_clocks(pi_device_state *d) {
    enum { TRIALS = 32 };
    pi_device *dev = d->dev;
    for (int32_t i = 0; i < TRIALS; i++) {
        __atomic_store_n(d->stamps, 0, __ATOMIC_RELAXED);
        pi_status st = dev->ops->launch(dev, stamp_program, d->stamps, 0);
        const int64_t until = te_os_now_ns() + 1000000000;
        uint64_t stamp = 0;
        int64_t now = 0;
        while (st == PI_OK && !stamp && now < until) {
            stamp = __atomic_load_n(d->stamps, __ATOMIC_ACQUIRE);
            now = te_os_now_ns();
        }
        if (st == PI_OK) st = dev->ops->finish(dev);
        if (st != PI_OK) return PI_FAIL(st, "%s", dev->ops->error());
        if (!stamp) continue;
        const int64_t ahead = now - (int64_t)stamp;
        if (!d->clock_ns || ahead < d->clock_ns) d->clock_ns = ahead;
    }
    return PI_OK;
}

pi_status pi_hybrid_start_timeline(pi_hybrid *h) {
    const size_t n = (size_t)h->s->model->info.n_layer;
    h->moment = calloc(n, sizeof *h->moment);
    if (!h->moment) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for a timeline of %zu layers", n);
    for (int32_t i = 0; i < h->n_devices; i++) {
        pi_device_state *d = &h->device[i];
        d->stamps = d->dev->ops->share(d->dev, sizeof *d->stamps * n * PI_MOMENT_INPUT);
        if (!d->stamps) return PI_FAIL(PI_ERROR_MEMORY, "%s", d->dev->ops->error());
        PI_TRY(compare_clocks(d));
    }
    pi_hybrid_clear_timeline(h); /* of the stamps that were compared */
    return PI_OK;
}

void pi_hybrid_clear_timeline(pi_hybrid *h) {
    if (!h->moment) return;
    const size_t n = (size_t)h->s->model->info.n_layer;
    memset(h->moment, 0, n * sizeof *h->moment);
    for (int32_t i = 0; i < h->n_devices; i++)
        memset(h->device[i].stamps, 0, sizeof *h->device[i].stamps * n * PI_MOMENT_INPUT);
}

pi_status pi_session_timeline(pi_session *s, int32_t layer, float *us) {
    if (!s || !us) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_timeline: session or us is NULL");
    if (layer < 0 || layer >= s->model->info.n_layer)
        return PI_FAIL(PI_ERROR_ARGUMENT, "layer %d is out of range 0..%d", layer, s->model->info.n_layer - 1);
    const pi_hybrid *h = s->hybrid;
    if (!h || !h->moment)
        return PI_FAIL(PI_ERROR_ARGUMENT, "the session was opened without timeline, or without devices");
    pi_session_lock(s);
    const int32_t device = h->layer[layer].device;
    for (int32_t k = 0; k < PI_MOMENTS; k++) {
        int64_t at = h->moment[layer][k];
        if (k < PI_MOMENT_INPUT && device >= 0) {
            const pi_device_state *d = &h->device[device];
            const uint64_t stamp = d->stamps[(ptrdiff_t)layer * PI_MOMENT_INPUT + k];
            at = stamp ? (int64_t)stamp + d->clock_ns : 0;
        }
        us[k] = at ? (float)((double)(at - h->began_ns) * 1e-3) : -1.0f;
    }
    pi_session_unlock(s);
    return PI_OK;
}
