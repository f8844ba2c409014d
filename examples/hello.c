/* hello.c - the engine from C: feeds prompt tokens to a model and prints the ids of the 16 that it thinks follow.
 *
 *     cc hello.c $(pkg-config --cflags --libs powerinfer) -o hello && ./hello model.gguf 1 15043
 */
#include <powerinfer.h>
#include <stdio.h>
#include <stdlib.h>

static void check(pi_status status) {
    if (status == PI_OK) return;
    fprintf(stderr, "error: %s\n", pi_error_message());
    exit(1);
}

int main(int argc, char **argv) {
    if (argc < 3 || argc > 66) return fprintf(stderr, "usage: hello MODEL TOKEN...\n"), 2;
    pi_file *file;
    pi_model *model;
    pi_session *session;
    const pi_model_options model_options = pi_model_defaults();
    const pi_session_options session_options = pi_session_defaults();
    check(pi_file_open(argv[1], &file));
    check(pi_model_open(file, &model_options, &model));
    for (int32_t done = 0, total = 1; done < total;) check(pi_model_load(model, &done, &total));
    check(pi_session_open(model, &session_options, &session));

    pi_model_info info;
    pi_model_get_info(model, &info);
    int32_t tokens[64], n = argc - 2;
    for (int32_t i = 0; i < n; i++) tokens[i] = atoi(argv[2 + i]);
    for (int32_t step = 0; step < 16; step++, n = 1) {
        check(pi_session_feed(session, &(pi_batch){.n_tokens = n, .token = tokens}));
        const float *logits = pi_session_logits(session, 0);
        tokens[0] = 0;
        for (int32_t i = 1; i < info.n_vocab; i++) tokens[0] = logits[i] > logits[tokens[0]] ? i : tokens[0];
        printf("%d%c", tokens[0], step < 15 ? ' ' : '\n');
    }
    pi_session_close(session), pi_model_close(model), pi_file_close(file);
    return 0;
}
