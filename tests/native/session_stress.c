/* session_stress.c - one model, several threads: sessions side by side, one session shared, files and models opened
 * meanwhile.
 *
 *     session_stress MODEL      prints what failed and exits with 1, or exits with 0
 *
 * Whatever runs beside it, a session must compute the same bits as alone, and what taps show of it. Built with a thread sanitizer it also shows
 * data races.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/te_os.h"
#include "powerinfer.h"
#include "../stress.h"

#define OK(call) CHECK((call) == PI_OK, "%s", pi_error_message())

enum { N_WORKERS = 4, N_STEPS = 6, N_PROMPT = 20 };

static const char *path;
static pi_model *shared_model;
static int32_t n_vocab;

/* Results of one conversation: the tokens chosen, and all bits of all logits folded into one number. */
typedef struct outcome {
    int32_t token[N_STEPS];
    uint64_t bits;
} outcome;

static int32_t prompt_token(int32_t i) { return (i * 31 + 7) % n_vocab; }

static uint64_t fold(uint64_t bits, const float *logits) {
    for (int32_t i = 0; i < n_vocab; i++) {
        uint32_t word;
        memcpy(&word, &logits[i], sizeof word);
        bits = (bits ^ word) * 1099511628211u;
    }
    return bits;
}

static int32_t best(const float *logits) {
    int32_t token = 0;
    for (int32_t i = 1; i < n_vocab; i++)
        if (logits[i] > logits[token]) token = i;
    return token;
}

static pi_model *open_model(void) {
    pi_file *file;
    pi_model *model;
    const pi_model_options options = pi_model_defaults();
    OK(pi_file_open(path, &file));
    OK(pi_model_open(file, &options, &model));
    pi_file_close(file); /* the model keeps it */
    for (int32_t done = 0, total = 1; done < total;) OK(pi_model_load(model, &done, &total));
    return model;
}

static pi_session *open_session(pi_model *model, int32_t n_threads, int32_t n_seq) {
    pi_session *session;
    pi_session_options options = pi_session_defaults();
    options.n_ctx = 64;
    options.n_pool = 64 * n_seq;
    options.n_seq = n_seq;
    options.n_batch = 32;
    options.n_threads = n_threads;
    OK(pi_session_open(model, &options, &session));
    return session;
}

/* A prompt and N_STEPS greedy steps in sequence 0, with a second sequence in the same batches. */
static outcome converse(pi_model *model, int32_t n_threads) {
    pi_session *session = open_session(model, n_threads, 2);
    int32_t token[N_PROMPT * 2], seq[N_PROMPT * 2];
    uint8_t want[N_PROMPT * 2] = {0};
    for (int32_t i = 0; i < N_PROMPT * 2; i++) {
        seq[i] = i >= N_PROMPT;
        token[i] = prompt_token(seq[i] ? 3 * i : i);
    }
    want[N_PROMPT - 1] = want[2 * N_PROMPT - 1] = 1;
    OK(pi_session_feed(session, &(pi_batch){.n_tokens = 2 * N_PROMPT, .token = token, .seq = seq, .kind = want}));

    outcome out = {.bits = 14695981039346656037u};
    for (int32_t step = 0; step < N_STEPS; step++) {
        const int32_t pair[2] = {best(pi_session_logits(session, 0)), best(pi_session_logits(session, 1))};
        out.token[step] = pair[0];
        out.bits = fold(fold(out.bits, pi_session_logits(session, 0)), pi_session_logits(session, 1));
        OK(pi_session_feed(session, &(pi_batch){.n_tokens = 2,
                                                .token = pair,
                                                .seq = (const int32_t[]){0, 1},
                                                .kind = (const uint8_t[]){1, 1}}));
    }
    pi_session_close(session);
    return out;
}

/* What taps of all layers show of a prompt in which some tokens want logits, folded into one number. */
static uint64_t tap(pi_model *model, int32_t n_threads) {
    pi_model_info info;
    pi_model_get_info(model, &info);
    pi_session *session = open_session(model, n_threads, 1);
    const size_t width = (size_t)info.n_embd * 2 + (size_t)info.n_ff * 2, n = N_PROMPT * width * (size_t)info.n_layer;
    float *rows = calloc(n, sizeof *rows);
    CHECK(rows != NULL, "%zu floats", n);
    for (int32_t layer = 0; layer < info.n_layer; layer++) {
        float *input = rows + N_PROMPT * width * (size_t)layer, *norm = input + N_PROMPT * info.n_embd,
              *hidden = norm + N_PROMPT * info.n_embd, *score = hidden + N_PROMPT * info.n_ff;
        /* A feed has N_PROMPT tokens, fewer than n_batch. */
        OK(pi_session_set_tap(
            session, layer,
            &(pi_tap){.input = input, .norm = norm, .hidden = hidden, .score = info.predictor ? score : NULL}));
    }
    int32_t token[N_PROMPT];
    uint8_t want[N_PROMPT];
    for (int32_t i = 0; i < N_PROMPT; i++) {
        token[i] = prompt_token(i);
        want[i] = i % 3 == 0;
    }
    OK(pi_session_feed(session, &(pi_batch){.n_tokens = N_PROMPT, .token = token, .kind = want}));
    uint64_t bits = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t word;
        memcpy(&word, &rows[i], sizeof word);
        bits = (bits ^ word) * 1099511628211u;
    }
    pi_session_close(session);
    free(rows);
    return bits;
}

static outcome expected[2]; /* with 1 and 2 threads */

static void check_outcome(pi_model *model, int32_t n_threads) {
    const outcome here = converse(model, n_threads), *alone = &expected[n_threads - 1];
    CHECK(memcmp(here.token, alone->token, sizeof here.token) == 0, "other tokens than alone, %d threads", n_threads);
    CHECK(here.bits == alone->bits, "other logits than alone, %d threads", n_threads);
}

typedef struct worker {
    int32_t index;
    pi_session *session; /* that all workers share */
} worker;

static void side_by_side(void *arg) {
    const worker *w = arg;
    for (int32_t i = 0; i < 2; i++) {
        check_outcome(shared_model, 1 + (w->index + i) % 2);
        /* An error's sentence is this thread's own. */
        pi_session *session = open_session(shared_model, 1, 1);
        const int32_t bad = -100 - w->index;
        char number[16];
        snprintf(number, sizeof number, "%d", bad);
        CHECK(pi_session_feed(session, &(pi_batch){.n_tokens = 1, .token = &bad}) == PI_ERROR_ARGUMENT, "token %d",
              bad);
        CHECK(strstr(pi_error_message(), number) != NULL, "token %d is refused with '%s'", bad, pi_error_message());
        pi_session_close(session);
    }
}

/* Each worker has a sequence of its own in the shared session; calls that come at the same time wait for each other. */
static void in_one_session(void *arg) {
    const worker *w = arg;
    for (int32_t i = 0; i < 10; i++) {
        const int32_t token = prompt_token(i + w->index);
        OK(pi_session_feed(w->session, &(pi_batch){.n_tokens = 1, .token = &token, .seq = &w->index}));
        const int32_t length = pi_seq_length(w->session, w->index);
        CHECK(length == i + 1, "sequence %d has %d positions", w->index, length);
        /* What only looks takes its turn, too. */
        pi_session_info info;
        pi_layer_step step;
        int64_t bytes;
        pi_session_get_info(w->session, &info);
        OK(pi_session_last_step(w->session, 0, &step));
        OK(pi_session_last_total(w->session, &bytes, NULL));
        CHECK(step.n_tokens == 1 && bytes > step.bytes, "%d tokens, %lld bytes", step.n_tokens, (long long)bytes);
        CHECK(info.n_blocks - info.n_blocks_free <= N_WORKERS, "%d blocks are free", info.n_blocks_free);
        CHECK(pi_session_logits(w->session, 0) != NULL && pi_session_hidden(w->session, 0) != NULL, "no logits");
    }
    OK(pi_seq_cut(w->session, w->index, 4 + w->index));
}

static void own_model(void *arg) {
    const worker *w = arg;
    pi_model *model = open_model();
    check_outcome(model, 1 + w->index % 2);
    pi_model_close(model);
}

static void run_workers(void (*run)(void *), pi_session *session) {
    worker workers[N_WORKERS];
    te_thread threads[N_WORKERS];
    for (int32_t i = 0; i < N_WORKERS; i++) {
        workers[i] = (worker){i, session};
        CHECK(te_os_thread_start(&threads[i], run, &workers[i], "worker") == TE_OK, "%s", te_last_error());
    }
    for (int32_t i = 0; i < N_WORKERS; i++) te_os_thread_join(&threads[i]);
}

int main(int argc, char **argv) {
    if (argc != 2) return fprintf(stderr, "usage: session_stress MODEL\n"), 2;
    path = argv[1];
    shared_model = open_model();
    pi_model_info info;
    pi_model_get_info(shared_model, &info);
    n_vocab = info.n_vocab;
    for (int32_t n = 1; n <= 2; n++) {
        expected[n - 1] = converse(shared_model, n);
        check_outcome(shared_model, n);
    }
    for (int32_t n = 1; n <= 3; n++) CHECK(tap(shared_model, n) == tap(shared_model, n), "other rows, %d threads", n);

    run_workers(side_by_side, NULL);
    run_workers(own_model, NULL);
    pi_session *session = open_session(shared_model, 2, N_WORKERS);
    pi_model_close(shared_model); /* the session keeps it */
    run_workers(in_one_session, session);
    for (int32_t i = 0; i < N_WORKERS; i++)
        CHECK(pi_seq_length(session, i) == 4 + i, "sequence %d has %d positions", i, pi_seq_length(session, i));
    pi_session_close(session);
    return 0;
}
