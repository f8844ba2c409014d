/* find.c - the operations of a kind of device; those of cuda are in a library beside the engine's own. */
#include <string.h>

#include "../../vendor/core/te_os.h"
#include "../common.h"
#include "device.h"

static pi_status find_cuda(const pi_device_ops **out) {
    static const char name[] = "libpowerinfer_cuda.so";
    char path[4096], why[512] = "";
    if (!te_os_own_folder(path, sizeof path - sizeof name)) path[0] = '\0';
    memcpy(path + strlen(path), name, sizeof name);
    void *library = te_os_library(path, why, sizeof why);
    const pi_device_ops *(*table)(void) = NULL;
    if (!library || !te_os_symbol(library, "pi_device_cuda", (void *)&table, sizeof table))
        return PI_FAIL(PI_ERROR_DEVICE, "this build has no CUDA backend: %s", why);
    const pi_device_ops *ops = table();
    if (ops->version != PI_DEVICE_VERSION)
        return PI_FAIL(PI_ERROR_DEVICE, "%s is of another version (%u, not %d)", name, ops->version, PI_DEVICE_VERSION);
    *out = ops;
    return PI_OK;
}

pi_status pi_device_find(int32_t kind, const pi_device_ops **out) {
    switch (kind) {
    case PI_DEVICE_HOST:
        *out = pi_device_host();
        return PI_OK;
    case PI_DEVICE_CUDA:
        return find_cuda(out);
    default:
        return PI_FAIL(PI_ERROR_ARGUMENT, "device kind %d is not known", kind);
    }
}
