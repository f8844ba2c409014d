/* api.c - version, processor, errors: what belongs to no handle, or to several. */
#include "../vendor/core/te_os.h"
#include "../vendor/cpu/te_kernels.h"
#include "common.h"

_Static_assert((int)PI_OK == TE_OK && (int)PI_ERROR_IO == TE_IO && (int)PI_ERROR_FORMAT == TE_FORMAT,
               "statuses share their numbers");
_Static_assert((int)PI_ERROR_ARGUMENT == TE_ARGUMENT && (int)PI_ERROR_MEMORY == TE_MEMORY,
               "statuses share their numbers");
_Static_assert((int)PI_ERROR_UNSUPPORTED == TE_UNSUPPORTED && (int)PI_ERROR_CONTEXT == TE_CONTEXT,
               "statuses share their numbers");
_Static_assert((int)PI_ACTIVATION_RELU == TE_RELU && (int)PI_ACTIVATION_DRELU == TE_DRELU,
               "activations share their numbers");
_Static_assert((int)PI_ACTIVATION_SILU == TE_SILU && (int)PI_ACTIVATION_GELU == TE_GELU &&
                   (int)PI_ACTIVATION_GELU_TANH == TE_GELU_TANH && (int)PI_ACTIVATION_CLAMPED == TE_CLAMPED &&
                   (int)PI_ACTIVATION_RELU2 == TE_RELU2 && (int)PI_ACTIVATION_XIELU == TE_XIELU,
               "activations share their numbers");

const char *pi_error_message(void) { return te_last_error(); }
const char *pi_version(void) { return PI_VERSION; }

const char *pi_cpu_isa(void) {
    const te_kernels *k = te_cpu_kernels();
    return k ? k->name : NULL;
}

int32_t pi_cpu_has_isa(const char *name) { return name && te_cpu_kernels_named(name) != NULL; }
int32_t pi_cpu_cores(void) { return te_os_n_cores(); }

const char *pi_build_info(void) {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "a compiler without a name";
#endif
}
