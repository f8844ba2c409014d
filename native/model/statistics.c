/* statistics.c - what a file says of how often each expert of a mixture was used:
 *
 *     powerinfer.expert.counts   u32 array, n_layer * n_expert, layer-major; 0 in layers without experts
 *     powerinfer.expert.tokens   u64, the tokens that were counted over */
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_gguf.h"
#include "model.h"

static const char *const counts_key = "powerinfer.expert.counts", *const tokens_key = "powerinfer.expert.tokens";

/* As many as sums over all experts of a model can hold without overflow. */
static const int64_t most_tokens = (int64_t)1 << 40;

static pi_status check(const pi_model *m, int64_t n_tokens) {
    const int32_t n_expert = m->info.n_expert;
    for (size_t i = 0; i < (size_t)m->info.n_layer * (size_t)n_expert; i++)
        if (m->expert_counts[i] > n_tokens)
            return PI_FAIL(PI_ERROR_FORMAT, "%s says that expert %d of layer %d was used %u times in %lld tokens",
                           counts_key, (int32_t)(i % (size_t)n_expert), (int32_t)(i / (size_t)n_expert),
                           m->expert_counts[i], (long long)n_tokens);
    return PI_OK;
}

pi_status pi_model_read_statistics(pi_model *m) {
    const te_gguf *g = m->file->gguf;
    const te_kv *counts = te_gguf_find(g, counts_key);
    const uint64_t n = (uint64_t)m->info.n_layer * (uint64_t)m->info.n_expert;
    int64_t n_tokens = 0;
    bool found = false;
    PI_TRY(te_gguf_get_i64(g, tokens_key, 1, most_tokens, &n_tokens, &found));
    if (!counts && !found) return PI_OK;
    if (!counts || !found)
        return PI_FAIL(PI_ERROR_FORMAT, "the file has the key %s without %s", counts ? counts_key : tokens_key,
                       counts ? tokens_key : counts_key);
    if (!n) return PI_FAIL(PI_ERROR_FORMAT, "the file has the key %s, but the model has no experts", counts_key);
    if (counts->type != TE_KV_ARRAY || counts->element_type != TE_KV_U32 || counts->n != n)
        return PI_FAIL(PI_ERROR_FORMAT, "%s must be an array of %llu u32: %d layers of %d experts", counts_key,
                       (unsigned long long)n, m->info.n_layer, m->info.n_expert);
    m->expert_counts = malloc(sizeof *m->expert_counts * (size_t)n);
    if (!m->expert_counts)
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for counts of %llu experts", (unsigned long long)n);
    memcpy(m->expert_counts, counts->data, sizeof *m->expert_counts * (size_t)n); /* aligned there to nothing */
    m->expert_tokens = (uint64_t)n_tokens;
    return check(m, n_tokens);
}
