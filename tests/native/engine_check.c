/* engine_check.c - logits and greedy tokens of a model on every instruction set that this machine has, against numbers
 * from a file and against each other; and that the best set is the one which a program gets.
 *
 *     engine_check MODEL GOLDEN             exits with 1 if a number is off, with 2 if it cannot run
 *     engine_check --write MODEL GOLDEN     prints GOLDEN anew, with what the portable kernels answer on this machine
 *
 * A golden has lines of words. Lines "greedy" and "logits" are the answers:
 *
 *     tolerance X          of the logits, as the length of the difference over that of the golden's
 *     case MODE N          a session in a mode (dense, exact, predicted), N tokens after the prompt
 *     prompt ID ...        only the last one wants logits
 *     greedy ID ...        N of them; where two tokens are as good, rounding decides: each must be one of the best
 *     logits STEP ID:VALUE ...   after STEP of those tokens
 *
 * The instruction set is chosen once per process, so each one computes in a child, which leaves its logits in memory
 * that is shared. */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "powerinfer.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))
#define OK(call)                                                                                                       \
    do {                                                                                                               \
        if ((call) != PI_OK) {                                                                                         \
            fprintf(stderr, "%s\n", pi_error_message());                                                               \
            _exit(2);                                                                                                  \
        }                                                                                                              \
    } while (0)

enum { MAX_CASES = 8, MAX_TOKENS = 512, MAX_STEPS = 128, MAX_LOGITS = 4096, N_WRITTEN = 32 };
#define SHARED_BYTES ((size_t)256 << 20)

typedef struct test_case {
    char mode[16];
    int32_t n_prompt, n_steps, n_logits;
    int32_t prompt[MAX_TOKENS], greedy[MAX_STEPS];
    int32_t step[MAX_LOGITS], id[MAX_LOGITS]; /* of the stored logits */
    double value[MAX_LOGITS];
} test_case;

/* What a child leaves: the instruction set that was chosen, and of each case the logits after 0 .. n_steps tokens. */
typedef struct answers {
    char isa[16];
    int32_t n_vocab;
    float logits[];
} answers;

static test_case cases[MAX_CASES];
static int n_cases;
static double tolerance = 0;

static void bad(const char *what) {
    fprintf(stderr, "the golden is not as it must be: %s\n", what);
    exit(2);
}

static void read_case_line(test_case *c, const char *word, char *rest) {
    int32_t n = 0;
    if (strcmp(word, "logits") == 0) {
        const int32_t step = (int32_t)strtol(rest, &rest, 10);
        if (step < 0 || step > c->n_steps) bad("a step");
        for (char *item = strtok(rest, " \n"); item; item = strtok(NULL, " \n")) {
            if (c->n_logits == MAX_LOGITS) bad("too many logits");
            char *value;
            c->id[c->n_logits] = (int32_t)strtol(item, &value, 10);
            if (*value != ':') bad(item);
            c->value[c->n_logits] = strtod(value + 1, NULL);
            c->step[c->n_logits++] = step;
        }
        return;
    }
    const int is_prompt = strcmp(word, "prompt") == 0;
    if (!is_prompt && strcmp(word, "greedy") != 0) bad(word);
    for (char *item = strtok(rest, " \n"); item; item = strtok(NULL, " \n")) {
        if (n == (is_prompt ? MAX_TOKENS : c->n_steps)) bad("too many tokens");
        (is_prompt ? c->prompt : c->greedy)[n++] = (int32_t)strtol(item, NULL, 10);
    }
    if (is_prompt) c->n_prompt = n;
}

static void read_golden(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) bad("it cannot be read");
    char *line = NULL;
    size_t n_line = 0;
    while (getline(&line, &n_line, file) > 0) {
        char word[16];
        int at = 0;
        if (sscanf(line, "%15s%n", word, &at) != 1 || word[0] == '#') continue;
        test_case *c = &cases[n_cases];
        if (strcmp(word, "tolerance") == 0) {
            tolerance = strtod(line + at, NULL);
        } else if (strcmp(word, "case") == 0) {
            if (n_cases == MAX_CASES) bad("too many cases");
            if (sscanf(line + at, "%15s %d", c->mode, &c->n_steps) != 2 || c->n_steps < 0 || c->n_steps > MAX_STEPS)
                bad(line);
            n_cases++;
        } else if (n_cases > 0) {
            read_case_line(c - 1, word, line + at);
        } else {
            bad(line);
        }
    }
    free(line);
    fclose(file);
    if (n_cases == 0) bad("no case");
}

static int32_t best(const float *logits, int32_t n_vocab) {
    int32_t token = 0;
    for (int32_t i = 1; i < n_vocab; i++)
        if (logits[i] > logits[token]) token = i;
    return token;
}

/* The golden's tokens are fed, or with `free_run` those that this session finds best. */
static void run_case(pi_model *model, test_case *c, int free_run, int32_t n_vocab, float *out) {
    static const char *const modes[] = {"auto", "predicted", "exact", "dense"}; /* in the order of pi_sparsity */
    pi_session *session;
    pi_session_options options = pi_session_defaults();
    options.sparsity = -1;
    for (int i = 0; i < COUNT(modes); i++)
        if (strcmp(c->mode, modes[i]) == 0) options.sparsity = i;
    options.n_ctx = MAX_TOKENS + MAX_STEPS;
    pi_model_info info;
    pi_model_get_info(model, &info);
    if (options.n_ctx > info.n_ctx_train) options.n_ctx = info.n_ctx_train;
    options.n_threads = 2;
    OK(pi_session_open(model, &options, &session));
    OK(pi_session_feed(session, &(pi_batch){.n_tokens = c->n_prompt, .token = c->prompt}));
    for (int32_t step = 0;; step++, out += n_vocab) {
        memcpy(out, pi_session_logits(session, 0), (size_t)n_vocab * sizeof *out);
        if (step == c->n_steps) break;
        const int32_t token = free_run ? best(out, n_vocab) : c->greedy[step];
        OK(pi_session_feed(session, &(pi_batch){.n_tokens = 1, .token = &token}));
    }
    pi_session_close(session);
}

/* All cases on one instruction set, in a child. */
static const answers *compute(const char *path, const char *isa, int free_run) {
    answers *a = mmap(NULL, SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (a == MAP_FAILED) exit(2);
    const pid_t child = fork();
    if (child == 0) {
        setenv("POWERINFER_ISA", isa, 1);
        pi_file *file;
        pi_model *model;
        pi_model_info info;
        const pi_model_options options = pi_model_defaults();
        OK(pi_file_open(path, &file));
        OK(pi_model_open(file, &options, &model));
        for (int32_t done = 0, total = 1; done < total;) OK(pi_model_load(model, &done, &total));
        pi_model_get_info(model, &info);
        a->n_vocab = info.n_vocab;
        size_t at = 0;
        for (int i = 0; i < n_cases; i++) {
            const size_t n = ((size_t)cases[i].n_steps + 1) * (size_t)info.n_vocab;
            if ((at + n) * sizeof(float) > SHARED_BYTES - sizeof *a) _exit(2);
            run_case(model, &cases[i], free_run, info.n_vocab, a->logits + at);
            at += n;
        }
        snprintf(a->isa, sizeof a->isa, "%s", pi_cpu_isa());
        pi_model_close(model);
        pi_file_close(file);
        _exit(0);
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
        fprintf(stderr, "%s: the process that computes ended with %d\n", isa, status);
        exit(2);
    }
    return a;
}

static void print_golden(const answers *a) {
    const float *logits = a->logits;
    printf("tolerance %g\n", tolerance);
    for (int i = 0; i < n_cases; i++) {
        const test_case *c = &cases[i];
        printf("case %s %d\nprompt", c->mode, (int)c->n_steps);
        for (int32_t j = 0; j < c->n_prompt; j++) printf(" %d", (int)c->prompt[j]);
        printf("\ngreedy");
        for (int32_t j = 0; j < c->n_steps; j++) printf(" %d", (int)best(logits + j * a->n_vocab, a->n_vocab));
        for (int32_t step = 0; step <= c->n_steps; step += c->n_steps > 0 ? c->n_steps : 1) {
            printf("\nlogits %d", (int)step);
            for (int32_t j = 0; j < N_WRITTEN; j++) {
                const int32_t id = (int32_t)((int64_t)j * a->n_vocab / N_WRITTEN);
                printf(" %d:%.6g", (int)id, (double)logits[step * a->n_vocab + id]);
            }
        }
        printf("\n");
        logits += (c->n_steps + 1) * a->n_vocab;
    }
}

/* Length of a difference over that of what it is measured by. */
typedef struct distance {
    double apart, size;
} distance;

static void count(distance *d, double value, double reference) {
    d->apart += (value - reference) * (value - reference);
    d->size += reference * reference;
}

static double relative(distance d) { return d.size > 0 ? sqrt(d.apart / d.size) : d.apart > 0 ? (double)INFINITY : 0; }

static int compare(const answers *a, const answers *scalar) {
    const int32_t n = a->n_vocab;
    const float *logits = a->logits, *other = scalar->logits;
    double worst_golden = 0, worst_scalar = 0;
    int n_other_tokens = 0, n_off = 0;
    for (int i = 0; i < n_cases; i++) {
        const test_case *c = &cases[i];
        for (int32_t step = 0; step <= c->n_steps; step++, logits += n, other += n) {
            distance from_golden = {0, 0}, from_scalar = {0, 0}, from_zero = {0, 0};
            for (int32_t j = 0; j < c->n_logits; j++)
                if (c->step[j] == step && c->id[j] < n) count(&from_golden, (double)logits[c->id[j]], c->value[j]);
            for (int32_t j = 0; j < n; j++) {
                count(&from_scalar, (double)logits[j], (double)other[j]);
                count(&from_zero, (double)logits[j], 0);
            }
            worst_golden = fmax(worst_golden, relative(from_golden));
            worst_scalar = fmax(worst_scalar, relative(from_scalar));
            const double short_of =
                step == c->n_steps ? 0 : (double)(logits[best(logits, n)] - logits[c->greedy[step]]);
            const int near = relative(from_golden) <= tolerance && relative(from_scalar) <= tolerance;
            const int as_good = short_of <= tolerance * sqrt(from_zero.apart / n);
            n_other_tokens += short_of > 0;
            if (near && as_good) continue;
            n_off++;
            fprintf(stderr, "%s, case %d (%s), step %d: %.3g from the golden, %.3g from scalar, token %.3g short\n",
                    a->isa, i, c->mode, (int)step, relative(from_golden), relative(from_scalar), short_of);
        }
    }
    printf("%s: %d cases, at most %.2g from the golden and %.2g from scalar, allowed %.2g; %d tokens by a hair\n",
           a->isa, n_cases, worst_golden, worst_scalar, tolerance, n_other_tokens);
    return n_off;
}

int main(int argc, char **argv) {
    const int writing = argc == 4 && strcmp(argv[1], "--write") == 0;
    if (argc != 3 && !writing) return fprintf(stderr, "usage: engine_check [--write] MODEL GOLDEN\n"), 2;
    const char *path = argv[argc - 2];
    read_golden(argv[argc - 1]);
    const answers *scalar = compute(path, "scalar", writing);
    if (writing) {
        print_golden(scalar);
        return 0;
    }
    int n_off = compare(scalar, scalar);
    static const char *const others[] = {"avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx", "neon", "neon_dot"};
    const char *last = "scalar";
    for (int i = 0; i < COUNT(others); i++) {
        if (!pi_cpu_has_isa(others[i])) continue;
        n_off += compare(compute(path, others[i], 0), scalar);
        last = others[i];
    }
    unsetenv("POWERINFER_ISA");
    const char *chosen = pi_cpu_isa();
    if (!chosen || strcmp(chosen, last) != 0) {
        fprintf(stderr, "%s is chosen, not %s\n", chosen ? chosen : "nothing", last);
        n_off++;
    }
    return n_off > 0;
}
