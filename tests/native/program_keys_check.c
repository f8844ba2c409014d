/* program_keys_check.c - which programs of prompts and sequences' next tokens, and of many next tokens, are kept
 * (native/hybrid/program.c): each that is one of the last two, no more than PI_MIXED, and the one that ran longest ago gives
 * way. */
#include <stdio.h>
#include <stdlib.h>

#include "hybrid/program.h"

static pi_hybrid h;

/* With so many next tokens behind those of a prompt. */
static uint64_t key(int32_t n_next) {
    h.n_tok = 16 + n_next;
    h.grouped = 16;
    h.n_logits = n_next;
    return pi_program_key(&h);
}

static void check(bool is_so, const char *what) {
    if (is_so) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

int main(void) {
    static pi_model model;
    static pi_session session;
    session.model = &model;
    h.s = &session;
    h.max_mixed = PI_MANY;
    for (int32_t n = 2; n < 2 + PI_MIXED; n++) {
        check(key(n) == 0, "kept the first time");
        check(key(n) & PI_KEY_MIXED, "not kept the second time");
    }
    for (int32_t n = 2; n < 2 + PI_MIXED; n++) check(key(n) && key(n) == key(n), "not kept while there is room");
    check(key(2) && key(30) == 0 && key(3) && key(2) && key(30) == 0, "kept, but not one of the last two");
    check(key(30) && key(2), "the last that ran gave way");
    check(key(4) == 0 && key(5) && key(30), "another than the oldest gave way");
    check(key(4) == 0 && key(4) && key(6) == 0, "what came again is not kept");
    check(key(40) == 0 && key(41) == 0 && key(40) && key(41), "of two in turn not kept");
    check(key(42) == 0 && key(43) == 0 && key(43) && key(43) && key(42),
          "what came again between them is one of the last");
    h.grouped = h.n_tok = 16;
    h.n_logits = 1;
    check(pi_program_key(&h) == 0, "of one sequence kept the first time");
    check(pi_program_key(&h) & PI_KEY_MIXED, "of one sequence not kept the second time");
    h.n_logits = 0;
    check(pi_program_key(&h) == 0 && pi_program_key(&h) == 0, "a prompt's is kept");
    h.n_logits = 1;
    check(pi_program_key(&h) & PI_KEY_MIXED, "a prompt's took the place of one that is kept");
    h.n_tok = h.grouped = PI_MANY + 1;
    check(pi_program_key(&h) == 0 && pi_program_key(&h) == 0, "of many tokens kept");
    h.n_tok = h.grouped = 16;
    static pi_device_layer layer = {.device = -1};
    h.layer = &layer;
    model.info.n_layer = 1;
    check(pi_program_key(&h) == 0, "of one sequence kept where the CPU has layers");
    layer.device = 0;
    check(pi_program_key(&h) & PI_KEY_MIXED, "of one sequence kept no more");
    h.apart = true;
    h.grouped = 0;
    h.n_tok = h.n_logits = PI_MANY;
    check(pi_program_key(&h) && !(pi_program_key(&h) & PI_KEY_MIXED), "of many next tokens as of a prompt and others");
    h.n_tok = h.n_logits = PI_MANY + 1;
    check(pi_program_key(&h) == 0 && pi_program_key(&h) == 0, "of more next tokens than products take kept");
    h.max_mixed = PI_WIDE;
    check(pi_program_key(&h) == 0, "of more next tokens kept the first time");
    check(pi_program_key(&h) & PI_KEY_MIXED, "of more next tokens not kept the second time");
    for (int32_t n = 1; n <= PI_MANY + 1; n += PI_MANY / 2) { /* behind others of the same feed */
        h.decode = n == 1;
        h.logits_at = 0;
        h.n_tok = h.n_logits = n;
        const uint64_t first = n > PI_MANY ? pi_program_key(&h) + pi_program_key(&h) : pi_program_key(&h);
        h.logits_at = 192;
        check(pi_program_key(&h) == 0, "behind others kept the first time");
        const uint64_t behind = pi_program_key(&h);
        check(behind & PI_KEY_MIXED && behind != first, "behind others not kept, or as the first");
        h.logits_at = 191;
        check(pi_program_key(&h) == 0 && pi_program_key(&h) != behind, "as that of another place");
    }
    h.decode = false;
    h.logits_at = 0;
    h.apart = false;
    h.n_tok = h.grouped = 16;
    h.n_logits = 1;
    h.decode = true;
    check(pi_program_key(&h) && !(pi_program_key(&h) & PI_KEY_MIXED), "of few tokens as of a prompt and others");
    h.n_tok = h.grouped = 4;
    h.n_logits = 2;
    const uint64_t of_one = pi_program_key(&h);
    h.grouped = 2; /* the other two are of different sequences */
    (void)pi_program_key(&h);
    check(pi_program_key(&h) && pi_program_key(&h) != of_one, "few tokens of a sequence as of several");
    h.n_tok = h.grouped = 16;
    h.n_logits = 1;
    const uint64_t shallow = pi_program_key(&h);
    h.deep = true;
    check(pi_program_key(&h) != shallow, "the same whether few tokens read together or not");
    return 0;
}
