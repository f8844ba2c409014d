/* chunk.c - the rule of chunks: which tokens are computed together, and by which kernels.
 *
 * A token's bits depend on the kernels that compute it, so that choice may depend on the token's own sequence only, and
 * a prompt's must come out the same however the prompt is cut: see pi_token_kind in powerinfer.h. */
#include "chunk.h"

#include "../hybrid/hybrid.h"

enum {
    PRODUCT_MIN = 16, /* tokens that matrix products are worth; fewer are faster by row kernels */
    ROW_MAX = 16      /* generated tokens of a sequence in a batch that are for row kernels */
};

void pi_chunk_choose_kernels(const pi_session *s, const pi_cut *c, int32_t *of_seq) {
    const pi_batch *b = c->batch;
    const bool narrow = s->options.n_batch < PRODUCT_MIN;
    int32_t *n_generated = of_seq, *from = n_generated + s->kv.n_seq, *to = from + s->kv.n_seq;
    for (int32_t q = 0; q < s->kv.n_seq; q++) n_generated[q] = from[q] = to[q] = 0;
    for (int32_t i = 0; i < b->n_tokens; i++) {
        c->by_row[i] = pi_batch_kind(b, i) == PI_TOKEN_GENERATED;
        n_generated[pi_batch_seq(b, i)] += c->by_row[i];
    }
    for (int32_t i = 0; i < b->n_tokens; i++) {
        const int32_t q = pi_batch_seq(b, i);
        if (n_generated[q] > ROW_MAX) c->by_row[i] = 0;
        if (c->by_row[i]) continue;
        if (to[q] == 0) from[q] = c->pos[i];
        to[q] = c->pos[i] + 1;
    }
    for (int32_t i = 0; i < b->n_tokens; i++) {
        const int32_t q = pi_batch_seq(b, i);
        c->by_row[i] |= to[q] - from[q] < PRODUCT_MIN || narrow;
    }
}

/* Predicted mode computes a prompt's tokens with all neurons. */
static bool prompts_are_dense(const pi_session *s) {
    return s->options.sparsity == PI_SPARSITY_PREDICTED && !s->options.mask_prompts;
}

/* Whether a chunk ends in front of token i of a batch: where layers have states it does so where matrix products do, since
 * others may want to go on there. */
static bool ends_products(const pi_session *s, const uint8_t *by_row, int32_t i) {
    return s->kv.states.floats && by_row[i] && !by_row[i - 1];
}

/* The longest beginning of n tokens with at most room.n_tok for row kernels. */
static int32_t cpu_length(const pi_session *s, const uint8_t *by_row, int32_t n) {
    int32_t n_row = 0, i = 0;
    while (i < n && n_row + by_row[i] <= s->room.n_tok) {
        if (i && ends_products(s, by_row, i)) break;
        n_row += by_row[i++];
    }
    return i;
}

/* Whether tokens i and i + 1 of a batch are those of several that generate. */
static bool several_generate(const pi_batch *b, int32_t i) {
    return i + 1 < b->n_tokens && pi_batch_kind(b, i) == PI_TOKEN_GENERATED &&
           pi_batch_kind(b, i + 1) == PI_TOKEN_GENERATED && pi_batch_seq(b, i) != pi_batch_seq(b, i + 1);
}

int32_t pi_chunk_mixed(const pi_session *s) {
    if (!s->hybrid || prompts_are_dense(s) || !pi_hybrid_is_resident(s->hybrid)) return 0;
    return (int32_t)pi_min_i64(s->options.n_batch, s->hybrid->max_mixed);
}

/* How many tokens are a chunk of prompts' tokens and, behind them, those of several that generate; 0: there is none. */
static int32_t mixed_length(const pi_session *s, const pi_cut *c, int32_t first, int32_t most) {
    const pi_batch *b = c->batch;
    int32_t n = 0, n_front;
    while (n < most && !pi_batch_has_logits(b, first + n)) n++;
    n_front = n;
    for (; n < most && pi_batch_kind(b, first + n) == PI_TOKEN_GENERATED; n++)
        for (int32_t i = s->kv.states.floats ? 0 : n_front; i < n; i++) /* states are kept where a prompt ends */
            if (pi_batch_seq(b, first + i) == pi_batch_seq(b, first + n)) return 0;
    const bool goes_on = first + n < b->n_tokens && pi_batch_kind(b, first + n) == PI_TOKEN_GENERATED;
    return n_front && n > n_front && !goes_on && n - n_front <= s->hybrid->max_logits ? n : 0;
}

/* Next tokens of more sequences than one program is for are several, as few as can be, for what a program costs by itself is as
 * much as that of a hundred tokens. They are of about as many: the more there are, the longer one more takes. Of mixtures,
 * whose experts are read for each, all but the last are of as many as it takes. */
static int32_t decoding_length(const pi_session *s, const pi_batch *b, int32_t first, int32_t n) {
    const int32_t most = pi_chunk_mixed(s);
    if (most == 0 || n <= most || !s->hybrid->splits) return n;
    for (int32_t i = first; i < first + n - 1; i++)
        if (!several_generate(b, i)) return n;
    if (!s->model->info.n_expert) { /* whole tiles */
        const int32_t n_parts = (n + most - 1) / most, each = ((n + n_parts - 1) / n_parts + 7) / 8 * 8;
        return each < most ? each : most;
    }
    /* Two to eight tokens by themselves have kernels of their own, which take longer than those of nine. */
    const int32_t few = s->hybrid->max_decode, left = n - most;
    return left > 1 && left <= few ? n - few - 1 : most;
}

/* A device takes a run of tokens whose FFN is alike, of which the last may want logits: first those that do not, then
 * those that do, of these no more than it has room for. Several that generate have a chunk of their own behind many tokens
 * of prompts: a step of decoding, with its kernels. */
int32_t pi_chunk_length(const pi_session *s, const pi_cut *c, int32_t first) {
    const pi_batch *b = c->batch;
    const int32_t left = b->n_tokens - first, most = left < s->options.n_batch ? left : s->options.n_batch;
    if (!s->hybrid) return cpu_length(s, c->by_row + first, most);
    const int32_t mixed = mixed_length(s, c, first, (int32_t)pi_min_i64(left, pi_chunk_mixed(s)));
    if (mixed) return mixed;
    int32_t n = 1, n_logits = pi_batch_has_logits(b, first);
    for (; n < most && n_logits < s->hybrid->max_logits; n++) {
        const bool wants = pi_batch_has_logits(b, first + n), before = pi_batch_has_logits(b, first + n - 1);
        if (before && !wants) break;
        if (wants != pi_batch_has_logits(b, first) && (prompts_are_dense(s) || several_generate(b, first + n))) break;
        if (ends_products(s, c->by_row, first + n)) break;
        n_logits += wants;
    }
    return decoding_length(s, b, first, n);
}

/* The chunk's tokens by sequence and position: batches have each sequence's in their order, most of them together. */
static void sort_tokens(pi_chunk *c) {
    c->n_runs = 0;
    for (int32_t i = 0; i < c->n_tok; i++) {
        int32_t at = i;
        for (; at > 0; at--) {
            const int32_t before = c->order[at - 1];
            if (c->seq[before] < c->seq[i] || (c->seq[before] == c->seq[i] && c->pos[before] < c->pos[i])) break;
            c->order[at] = before;
        }
        c->order[at] = i;
    }
    for (int32_t i = 0; i < c->n_tok; i++)
        if (i == 0 || c->seq[c->order[i]] != c->seq[c->order[i - 1]]) c->run[c->n_runs++] = i;
    c->run[c->n_runs] = c->n_tok;
}

void pi_chunk_keep(pi_session *s, const pi_cut *cut) {
    const pi_chunk *c = &s->chunk;
    for (int32_t i = 0; s->kv.states.floats && i < c->n_runs; i++) {
        const int32_t last = c->order[c->run[i + 1] - 1];
        if (!cut->by_row[c->batch_row[last]]) pi_states_keep(&s->kv.states, c->seq[last], c->pos[last] + 1, false);
    }
}

/* The order is pi_chunk's. A device computes all of a chunk alike, and so does the CPU beside it. */
void pi_chunk_fill(pi_session *s, const pi_cut *cut, int32_t first, int32_t n, int32_t *row) {
    const pi_batch *b = cut->batch;
    pi_chunk *c = &s->chunk;
    const bool split = prompts_are_dense(s), device_decodes = s->hybrid && n <= s->hybrid->max_decode;
    c->n_tok = c->n_prefill = c->n_dense = c->n_logits = 0;
    for (int32_t pass = 0; pass < 4; pass++) {
        int32_t next = *row;
        if (pass == 1) c->first_dense = c->n_tok;
        if (pass == 2) c->n_prefill = c->n_tok;
        for (int32_t i = first; i < first + n; i++) {
            const bool wants = pi_batch_has_logits(b, i), dense = split && !wants;
            const bool by_row = s->hybrid ? device_decodes : cut->by_row[i];
            const int32_t own = next;
            next += wants;
            if (pass != (by_row ? (dense ? 2 : 3) : dense)) continue;
            const int32_t at = c->n_tok++;
            c->token[at] = b->token[i];
            c->seq[at] = pi_batch_seq(b, i);
            c->pos[at] = cut->pos[i];
            c->logits_row[at] = wants ? own : -1;
            c->batch_row[at] = i;
            c->n_dense += dense;
            c->n_logits += wants;
        }
    }
    *row += c->n_logits;
    if (s->kv.states.floats) sort_tokens(c);
    for (int32_t i = 0; s->kv.states.floats && i < n; i++)
        c->kept[i] = pi_states_reserved(&s->kv.states, c->seq[c->order[i]], c->pos[c->order[i]] + 1);
    c->decode = n <= s->room.n_tok;
    for (int32_t i = 1; i < n && c->decode; i++)
        for (int32_t j = 0; j < i; j++) c->decode &= c->seq[i] != c->seq[j];
}

/* ---- what callers ask ---- */

/* How many tokens of a whole prompt are computed by matrix products; its last one is computed as what follows is. */
static int64_t by_products(int64_t n_prompt) { return n_prompt > PRODUCT_MIN ? (int64_t)n_prompt - 1 : 0; }

static int32_t computed_alike(int32_t n_same, int32_t n_held_prompt, int32_t n_prompt) {
    if (n_same > n_held_prompt) return n_same;
    int64_t n = pi_min_i64(n_same, pi_min_i64((int64_t)n_held_prompt, (int64_t)n_prompt) - 1);
    const int64_t last = by_products(n_prompt), held_last = by_products(n_held_prompt);
    if (n >= last && last == held_last) return (int32_t)pi_max_i64(n, 0);
    n = pi_min_i64(n, pi_min_i64(last, held_last));
    return (int32_t)(n == last ? n : pi_max_i64(pi_min_i64(n, last - PRODUCT_MIN), 0));
}

int32_t pi_prefix_reusable(const pi_session *s, int32_t seq, int32_t n_same, int32_t n_held_prompt, int32_t n_prompt) {
    int32_t n = computed_alike(n_same, n_held_prompt, n_prompt);
    for (int32_t before = -1; s && n > 0 && n != before;) {
        before = n;
        n = pi_seq_reachable(s, seq, n);
        if (n > 0 && n != before) n = computed_alike(n, n_held_prompt, n_prompt);
    }
    return n;
}

/* Where a part ends that no branch cuts short. */
static int32_t part_end(const pi_prompt_rest *r) {
    const int64_t first = r->first, generated = pi_min_i64(r->generated_from, r->end),
                  end = pi_min_i64(r->end, pi_max_i64(first, generated) + ROW_MAX);
    int64_t size = r->size;
    const int64_t ahead = pi_max_i64((int64_t)r->scored_from - first, 0); /* tokens before the first that is scored */
    if (r->scored_to - first - ahead > r->max_scored) size = pi_min_i64(size, r->max_scored + ahead);
    if (size <= 0) return r->first;
    if (end - first <= size) return (int32_t)end;
    const int64_t last = pi_max_i64(pi_min_i64(generated, end), 0);
    if (last - first < PRODUCT_MIN) return (int32_t)pi_min_i64(first + size, end);
    /* Both this chunk and what comes after it must bring enough tokens for matrix products. */
    int64_t cut = first + size;
    if (cut >= last) return (int32_t)last;
    cut = pi_max_i64(pi_min_i64(cut, last - PRODUCT_MIN), first + PRODUCT_MIN);
    return (int32_t)(cut <= last - PRODUCT_MIN ? cut : last);
}

int32_t pi_chunk_end(const pi_prompt_rest *r) {
    if (!r || r->first < 0 || r->end < r->first) return -1;
    const int32_t end = part_end(r);
    const int64_t last = pi_max_i64(pi_min_i64(r->generated_from, r->end), 0);
    int64_t branch = pi_min_i64(r->branch, last);
    if (branch != last) branch = pi_min_i64(branch, last - PRODUCT_MIN);
    return branch - r->first >= PRODUCT_MIN && branch < end ? (int32_t)branch : end;
}
