/* examine.c - what a device is and what it can do, before a plan is made for it. */
#include <stdio.h>
#include <string.h>

#include "../../vendor/core/te_os.h"
#include "../model/model.h"
#include "device.h"

/* So much of a mapping is registered to see whether that is allowed. */
enum { SAMPLE_BYTES = 1 << 20 };

static void try_mapping(pi_device *dev, const pi_model *model, pi_device_facts *out) {
    size_t n_bytes = SAMPLE_BYTES;
    void *own = NULL;
    const void *p = model ? te_gguf_mapping(model->file->gguf, 0, &n_bytes) : NULL;
    if (!p) p = own = te_os_alloc(n_bytes = SAMPLE_BYTES);
    if (n_bytes > SAMPLE_BYTES) n_bytes = SAMPLE_BYTES;
    if (!p)
        snprintf(out->no_mapping, sizeof out->no_mapping, "out of memory");
    else if (dev->ops->map(dev, p, n_bytes) == PI_OK)
        out->can_map = 1;
    else
        snprintf(out->no_mapping, sizeof out->no_mapping, "%s", dev->ops->error());
    dev->ops->close(dev); /* which ends the mapping */
    te_os_free(own, SAMPLE_BYTES);
}

pi_status pi_device_examine(int32_t kind, int32_t index, const pi_model *model, int32_t measure, pi_device_facts *out) {
    if (!out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_device_examine: out is NULL");
    *out = (pi_device_facts){0};
    const pi_device_ops *ops = NULL;
    PI_TRY(pi_device_find(kind, &ops));
    pi_device *dev = NULL;
    const pi_status opened = ops->open(index, 0, &dev);
    if (opened != PI_OK) return PI_FAIL(opened, "%s", ops->error());
    pi_device_info info;
    ops->get_info(dev, &info);
    memcpy(out->name, info.name, sizeof out->name);
    out->name[sizeof out->name - 1] = '\0';
    out->memory_bytes = info.memory_bytes;
    out->free_bytes = info.free_bytes;
    pi_device_rates rates;
    if (measure && ops->measure && ops->measure(dev, &rates) == PI_OK) {
        out->read_bytes_per_s = rates.read_bytes_per_s;
        out->copy_bytes_per_s = rates.copy_bytes_per_s;
        out->zero_copy_bytes_per_s = rates.zero_copy_bytes_per_s;
    }
    try_mapping(dev, model, out);
    return PI_OK;
}
