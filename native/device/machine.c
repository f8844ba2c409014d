/* machine.c - the machine and its graphics cards, for people who have to find out what is slow or missing.
 *
 * CUDA's driver (libcuda.so.1) and NVML are opened at run time and asked; no context is made, so no device memory is
 * taken. Neither being there is not an error. */
#include <stdio.h>
#include <string.h>

#include "../../vendor/core/te_os.h"
#include "../common.h"

pi_status pi_machine_get_info(pi_machine_info *out) {
    if (!out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_machine_get_info: out is NULL");
    te_machine m;
    te_os_machine("", &m);
    *out = (pi_machine_info){.n_cores = te_os_n_cores(),
                             .n_logical = te_os_n_logical(),
                             .n_online = m.n_online,
                             .threads_per_core = m.threads_per_core,
                             .n_numa = m.n_numa,
                             .cpu_quota = m.cpu_quota,
                             .memory_bytes = m.memory_bytes,
                             .memory_free_bytes = m.memory_free_bytes,
                             .memory_limit_bytes = m.memory_limit_bytes,
                             .memlock_bytes = m.memlock_bytes};
    memcpy(out->cpu, m.cpu, sizeof out->cpu);
    memcpy(out->os, m.os, sizeof out->os);
    memcpy(out->distribution, m.distribution, sizeof out->distribution);
    memcpy(out->libc, m.libc, sizeof out->libc);
    memcpy(out->container, m.container, sizeof out->container);
    memcpy(out->huge_pages, m.huge_pages, sizeof out->huge_pages);
    return PI_OK;
}

/* Numbers of CUDA's driver interface (CUdevice_attribute). */
enum { N_SM = 16, MEMORY_CLOCK_KHZ = 36, MEMORY_BUS_BITS = 37, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };

/* The functions that are asked; NULL where a driver lacks one. */
typedef struct cuda_driver {
    int (*init)(unsigned flags);
    int (*version)(int *version);
    int (*count)(int *n);
    int (*get)(int *device, int ordinal);
    int (*name)(char *name, int n, int device);
    int (*memory)(size_t *n_bytes, int device);
    int (*attribute)(int *value, int attribute, int device);
    int (*bus_id)(char *id, int n, int device);
    int (*error)(int result, const char **text);
} cuda_driver;

typedef struct nvml_memory {
    unsigned long long total, free, used;
} nvml_memory;

typedef struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*version)(char *text, unsigned n);
    int (*by_bus_id)(const char *id, void **device);
    int (*memory)(void *device, nvml_memory *out);
    int (*generation)(void *device, unsigned *out);
    int (*width)(void *device, unsigned *out);
} nvml;

#define FIND(library, name, function) te_os_symbol(library, name, &(function), sizeof(function))

static bool find_cuda(void *library, cuda_driver *c) {
    bool all = FIND(library, "cuInit", c->init);
    all &= FIND(library, "cuDriverGetVersion", c->version);
    all &= FIND(library, "cuDeviceGetCount", c->count);
    all &= FIND(library, "cuDeviceGet", c->get);
    all &= FIND(library, "cuDeviceGetName", c->name);
    all &= FIND(library, "cuDeviceTotalMem_v2", c->memory);
    all &= FIND(library, "cuDeviceGetAttribute", c->attribute);
    all &= FIND(library, "cuDeviceGetPCIBusId", c->bus_id);
    all &= FIND(library, "cuGetErrorString", c->error);
    return all;
}

static bool find_nvml(void *library, nvml *n) {
    bool all = FIND(library, "nvmlInit_v2", n->init);
    all &= FIND(library, "nvmlShutdown", n->shutdown);
    all &= FIND(library, "nvmlSystemGetDriverVersion", n->version);
    all &= FIND(library, "nvmlDeviceGetHandleByPciBusId_v2", n->by_bus_id);
    all &= FIND(library, "nvmlDeviceGetMemoryInfo", n->memory);
    all &= FIND(library, "nvmlDeviceGetMaxPcieLinkGeneration", n->generation);
    all &= FIND(library, "nvmlDeviceGetMaxPcieLinkWidth", n->width);
    return all;
}

static int32_t attribute(const cuda_driver *c, int which, int device) {
    int value = 0;
    return c->attribute(&value, which, device) == 0 ? value : 0;
}

static void ask_nvml(const nvml *n, const char *bus_id, pi_gpu *out) {
    void *device = NULL;
    nvml_memory memory = {0, 0, 0};
    unsigned value = 0;
    if (n->by_bus_id(bus_id, &device) != 0) return;
    if (n->memory(device, &memory) == 0) out->free_bytes = memory.free;
    if (n->generation(device, &value) == 0) out->pcie_generation = (int32_t)value;
    if (n->width(device, &value) == 0) out->pcie_lanes = (int32_t)value;
}

static void ask_device(const cuda_driver *c, const nvml *n, int ordinal, pi_gpu *out) {
    int device = 0;
    size_t bytes = 0;
    char bus_id[32] = "";
    *out = (pi_gpu){0};
    if (c->get(&device, ordinal) != 0) return;
    if (c->name(out->name, (int)sizeof out->name, device) != 0) out->name[0] = '\0';
    out->name[sizeof out->name - 1] = '\0';
    if (c->memory(&bytes, device) == 0) out->memory_bytes = bytes;
    out->capability_major = attribute(c, CAPABILITY_MAJOR, device);
    out->capability_minor = attribute(c, CAPABILITY_MINOR, device);
    out->n_sm = attribute(c, N_SM, device);
    /* Two transfers per clock on every line of the bus. */
    out->memory_bytes_per_s =
        2e3 * attribute(c, MEMORY_CLOCK_KHZ, device) * (attribute(c, MEMORY_BUS_BITS, device) / 8.0);
    if (n && c->bus_id(bus_id, (int)sizeof bus_id, device) == 0) ask_nvml(n, bus_id, out);
}

static void say(pi_gpu_driver *d, const char *text) { snprintf(d->problem, sizeof d->problem, "%s", text); }

pi_status pi_gpu_probe(pi_gpu_driver *driver, int32_t n_gpus, pi_gpu *gpu) {
    if (!driver || (n_gpus > 0 && !gpu)) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_gpu_probe: driver or gpu is NULL");
    if (n_gpus < 0) return PI_FAIL(PI_ERROR_ARGUMENT, "n_gpus is %d, cannot be negative", n_gpus);
    *driver = (pi_gpu_driver){0};
    cuda_driver c;
    nvml n;
    char why[200];
    void *library = te_os_library("libcuda.so.1", why, sizeof why);
    if (!library) {
        snprintf(driver->problem, sizeof driver->problem, "no driver: %s", why);
        return PI_OK;
    }
    driver->is_present = 1;
    if (!find_cuda(library, &c)) {
        say(driver, "the driver is too old: it lacks functions of CUDA 6 and later");
        return PI_OK;
    }
    int version = 0, count = 0;
    if (c.version(&version) == 0) driver->cuda_version = version;
    void *library2 = te_os_library("libnvidia-ml.so.1", why, sizeof why);
    const bool has_nvml = library2 && find_nvml(library2, &n) && n.init() == 0;
    if (has_nvml && n.version(driver->version, (unsigned)sizeof driver->version) != 0) driver->version[0] = '\0';
    driver->version[sizeof driver->version - 1] = '\0';
    int result = c.init(0);
    if (result == 0) result = c.count(&count);
    if (result != 0) {
        const char *text = NULL;
        if (c.error(result, &text) != 0 || !text) text = "no reason given";
        snprintf(driver->problem, sizeof driver->problem, "the driver does not start: %.150s (%d)", text, result);
        count = 0;
    } else if (count <= 0) {
        say(driver, "the driver has no device");
        count = 0;
    }
    driver->n_gpus = count;
    for (int i = 0; i < count && i < n_gpus; i++) ask_device(&c, has_nvml ? &n : NULL, i, &gpu[i]);
    if (has_nvml) n.shutdown();
    return PI_OK;
}
