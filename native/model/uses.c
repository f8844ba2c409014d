/* uses.c - what each layer is for, where an architecture's layers differ: some attend, some have a state, and of
 * Nemotron-H some are a feed-forward and nothing else. Files say it by arrays of a number for each layer. */
#include <stdlib.h>

#include "keys.h"
#include "model.h"

enum { MAX_DIM = 1 << 20, MAX_HEADS = 4096 };

/* The one value that layers share, of those that have any: 0 is none. UNSUPPORTED if they have several. */
static pi_status only_value(const pi_arch *a, const char *name, const int32_t *each, int32_t n, int32_t *out) {
    *out = 0;
    for (int32_t l = 0; l < n; l++) {
        if (each[l] && *out && each[l] != *out)
            return PI_FAIL(PI_ERROR_UNSUPPORTED, "%s.%s is %d in one layer and %d in another", a->name, name, *out,
                           each[l]);
        if (each[l]) *out = each[l];
    }
    return PI_OK;
}

/* Which layers have a state where no number of heads says it: those that recurrent_layers names, else all but each
 * full_attention_interval-th. */
static pi_status read_interval(const pi_model *m, const te_gguf *g, int32_t n, int32_t *is_recurrent) {
    int64_t period = 0;
    bool found = false;
    PI_TRY(pi_key_each(g, m->arch->name, "attention.recurrent_layers", n, 0, 1, is_recurrent, &found));
    if (found) return PI_OK;
    PI_TRY(pi_key_i64(g, m->arch->name, "full_attention_interval", 1, n, &period, NULL));
    if (!period)
        return PI_FAIL(PI_ERROR_FORMAT,
                       "the file has neither key %s.attention.recurrent_layers nor %s.full_attention_interval",
                       m->arch->name, m->arch->name);
    for (int32_t l = 0; l < n; l++) is_recurrent[l] = (l + 1) % period != 0;
    return PI_OK;
}

/* heads, n_ff: [n] numbers of each layer. */
static pi_status choose_uses(pi_model *m, int32_t n, int32_t *heads, int32_t *n_ff) {
    const te_gguf *g = m->file->gguf;
    const pi_arch *a = m->arch;
    pi_model_info *c = &m->info;
    bool found = false;
    PI_TRY(pi_key_each(g, a->name, "attention.head_count_kv", n, 0, MAX_HEADS, heads, &found));
    if (!found) return PI_FAIL(PI_ERROR_FORMAT, "the file has no key %s.attention.head_count_kv", a->name);
    PI_TRY(pi_key_each(g, a->name, "feed_forward_length", n, 0, MAX_DIM, n_ff, &found));
    PI_TRY(only_value(a, "attention.head_count_kv", heads, c->n_layer, &c->n_head_kv));
    PI_TRY(only_value(a, "feed_forward_length", n_ff, c->n_layer, &c->n_ff));
    if (!c->n_head_kv) return PI_FAIL(PI_ERROR_UNSUPPORTED, "no layer of the model attends");
    if (!c->n_ff && !a->one_block) return PI_FAIL(PI_ERROR_FORMAT, "%s.feed_forward_length is 0", a->name);
    for (int32_t l = 0; l < c->n_layer; l++) {
        if (a->one_block && heads[l] && n_ff[l])
            return PI_FAIL(PI_ERROR_UNSUPPORTED, "layer %d has heads and a feed-forward, %s layers have one of them", l,
                           a->name);
        if (!a->one_block && !n_ff[l]) return PI_FAIL(PI_ERROR_UNSUPPORTED, "layer %d has no feed-forward", l);
        m->use[l] = heads[l] ? PI_LAYER_ATTENDS : a->one_block && n_ff[l] ? PI_LAYER_FEEDS : PI_LAYER_RECURS;
        if (a->recurrent_beside && !heads[l])
            return PI_FAIL(PI_ERROR_UNSUPPORTED, "layer %d has no heads, all layers of %s models have some", l,
                           a->name);
    }
    if (a->by_interval) {
        PI_TRY(read_interval(m, g, n, heads));
        for (int32_t l = 0; l < c->n_layer; l++) m->use[l] = heads[l] ? PI_LAYER_RECURS : PI_LAYER_ATTENDS;
    }
    return PI_OK;
}

pi_status pi_model_read_uses(pi_model *m) {
    const int32_t n = m->info.n_layer + m->n_unused_layers;
    int32_t *heads = calloc((size_t)n, sizeof *heads), *n_ff = calloc((size_t)n, sizeof *n_ff);
    m->use = calloc((size_t)n, sizeof *m->use);
    const pi_status st = heads && n_ff && m->use ? choose_uses(m, n, heads, n_ff)
                                                 : PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d layers", n);
    free(heads);
    free(n_ff);
    return st;
}
