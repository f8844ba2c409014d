/* api.c - version, processor, errors: what belongs to no handle, or to several. */
#include "../vendor/core/te_os.h"
#include "../vendor/cpu/te_kernels.h"
#include "common.h"
#include "sample/sampler.h"
#include "step/session.h"

_Static_assert((int)PI_OK == TE_OK && (int)PI_ERROR_IO == TE_IO && (int)PI_ERROR_FORMAT == TE_FORMAT,
               "statuses share their numbers");
_Static_assert((int)PI_ERROR_ARGUMENT == TE_ARGUMENT && (int)PI_ERROR_MEMORY == TE_MEMORY,
               "statuses share their numbers");
_Static_assert((int)PI_ERROR_UNSUPPORTED == TE_UNSUPPORTED && (int)PI_ERROR_CONTEXT == TE_CONTEXT,
               "statuses share their numbers");
_Static_assert((int)PI_ACTIVATION_RELU == TE_RELU && (int)PI_ACTIVATION_DRELU == TE_DRELU,
               "activations share their numbers");
_Static_assert((int)PI_ACTIVATION_SILU == TE_SILU && (int)PI_ACTIVATION_GELU == TE_GELU,
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

pi_status pi_session_next(pi_session *session, int32_t seq, int32_t pos, int32_t token, pi_sampler *sampler,
                          int32_t *next) {
    if (!session || !sampler || !next)
        return PI_FAIL(PI_ERROR_ARGUMENT, "pi_session_next: session, sampler or next is NULL");
    *next = -1;
    const int32_t n_vocab = session->model->info.n_vocab, n_sampled = pi_sampler_n_vocab(sampler);
    if (n_sampled != n_vocab)
        return PI_FAIL(PI_ERROR_ARGUMENT, "there are %d logits, of this sampler they must be %d", n_vocab, n_sampled);
    const pi_batch batch = {.n_tokens = 1, .token = &token, .pos = &pos, .seq = &seq};
    PI_TRY(pi_session_feed(session, &batch));
    *next = token;
    int32_t chosen = -1;
    PI_TRY(pi_sampler_sample(sampler, pi_session_logits(session, 0), &chosen));
    PI_TRY(pi_sampler_accept(sampler, chosen));
    *next = chosen;
    return PI_OK;
}
