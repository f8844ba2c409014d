/* hybrid_cache_check.c - how well experts find their places (native/hybrid/cache.c): routers whose scores are noise and
 * `skew` times what they always are, on a device that brings every copy by the next step, half a copy a layer and step.
 * From no counts, a prompt, wrong counts and right ones; then noise of which 0.9 stays from token to token. Hits are compared with
 * those of the best places that never change, also of eight sequences. Then what is used changes all the time, copies come late, and some are
 * refused: each place holds the expert that is said to be there. Everything is drawn, and comes out the same each time. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hybrid/cache.h"

enum { N_LAYER = 6, N_EXPERT = 128, N_USED = 8, N_FF = 32, N_EMBD = 32, N_LONG = 4000 };

/* ---- what is drawn ---- */

static uint64_t state;
static double uniform(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return ((double)(state >> 11) + 0.5) / 9007199254740992.0;
}
static double normal(void) { return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()); }

typedef struct router {
    double skew, rho, always[N_EXPERT], noise[N_EXPERT];
} router;

static void route(router *r, uint32_t *uses) {
    double score[N_EXPERT];
    for (int e = 0; e < N_EXPERT; e++) {
        r->noise[e] = r->rho * r->noise[e] + sqrt(1 - r->rho * r->rho) * normal();
        score[e] = r->skew * r->always[e] + r->noise[e];
    }
    for (int k = 0; k < N_USED; k++) {
        int best = 0;
        for (int e = 1; e < N_EXPERT; e++)
            if (score[e] > score[best]) best = e;
        score[best] = -1e9;
        uses[best]++;
    }
}

static int falling(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x < y) - (x > y);
}

/* ---- a device that knows which expert each place holds ---- */

enum { NOBODY = -1, COPY_BYTES = 3 * N_FF * N_EMBD * 4 };

static uint32_t n_asked, n_came;
static bool is_late; /* copies come after some steps; now and then one is refused */
static struct {
    int32_t layer, expert, place;
} copy[PI_FETCHES];
static int32_t holds[N_LAYER][N_EXPERT]; /* by place */

/* Matrices of layer l begin at these addresses, which nobody reads. */
static const char *file_at(int l, int k) { return (const char *)((uintptr_t)(8 * l + k + 1) << 32); }
static const char *places_at(int l, int k) { return (const char *)((uintptr_t)(8 * l + k + 4) << 32); }

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static pi_status fetch(pi_device *dev, const te_mat *from, int32_t n, const te_mat *to) {
    (void)dev;
    const int32_t l = (int32_t)((uintptr_t)from[0].w >> 32) / 8;
    const int32_t expert = (int32_t)(((const char *)from[0].w - file_at(l, 0)) / (COPY_BYTES / 3)),
                  place = (int32_t)(((const char *)to[0].w - places_at(l, 0)) / (COPY_BYTES / 3));
    if (n != 3 || n_asked - n_came >= PI_FETCHES) fail("a fetch of another number of matrices, or too many of them");
    for (int k = 0; k < 3; k++)
        if ((const char *)from[k].w != file_at(l, k) + (ptrdiff_t)expert * COPY_BYTES / 3 ||
            (const char *)to[k].w != places_at(l, k) + (ptrdiff_t)place * COPY_BYTES / 3)
            fail("the matrices of a fetch are of several experts or places");
    if (is_late && uniform() < 0.1) return PI_ERROR_DEVICE;
    holds[l][place] = NOBODY; /* half of one, half of the other */
    copy[n_asked % PI_FETCHES].layer = l;
    copy[n_asked % PI_FETCHES].expert = expert;
    copy[n_asked++ % PI_FETCHES].place = place;
    return PI_OK;
}
static uint32_t fetched(pi_device *dev, pi_status *st) {
    (void)dev;
    *st = PI_OK;
    while (n_came != n_asked && (!is_late || uniform() < 0.6)) {
        const uint32_t at = n_came++ % PI_FETCHES;
        holds[copy[at].layer][copy[at].place] = copy[at].expert;
    }
    return n_came;
}
static const pi_device_ops ops = {.fetch = fetch, .fetched = fetched};

static pi_layer layer[N_LAYER];
static pi_model model;
static pi_session session;
static pi_layer_step steps[N_LAYER];
static pi_device device = {.ops = &ops};
static pi_device_layer on[N_LAYER];
static uint32_t counts[N_LAYER * (3 + N_EXPERT)], profile[N_LAYER * N_EXPERT];
static pi_hybrid h;

static void check_places(const char *what) {
    for (int l = 0; l < N_LAYER; l++) {
        int at[N_EXPERT], n_missing = 0;
        memset(at, -1, sizeof at);
        for (int e = 0; e < N_EXPERT; e++) {
            const int32_t p = h.place[l * N_EXPERT + e];
            if (p >= 0 && (p >= on[l].n_hot || at[p] >= 0 || on[l].hot[p] != e || holds[l][p] != e)) goto wrong;
            if (p >= 0) at[p] = e;
            if (p < 0 && (-1 - p >= on[l].n_cold || on[l].cold[-1 - p] != e)) goto wrong;
            n_missing += p < 0;
        }
        if (n_missing == on[l].n_cold) continue;
    wrong:
        fprintf(stderr, "%s: the places of layer %d are not consistent\n", what, l);
        exit(1);
    }
}

static void open_cache(void) {
    n_asked = n_came = 0;
    for (int l = 0; l < N_LAYER; l++)
        for (int k = 0; k < on[l].n_hot; k++) holds[l][k] = on[l].hot[k];
    if (pi_cache_open(&h, true) != PI_OK) fail("the cache cannot be opened");
}

typedef enum start { NO_COUNTS, PROMPT, WRONG, RIGHT } start; /* PROMPT: no counts, but a prompt of 512 tokens */

/* Shares of the uses that found their expert: before token 200, of the 400 behind, and of the best static places. */
typedef struct shares {
    double first, rest, best;
} shares;

static shares run(double skew, double rho, start begin, int32_t n_places) {
    static router r[N_LAYER];
    const char *names[] = {"no counts", "a prompt", "wrong counts", "right counts"};
    shares s = {0, 0, 0};
    state = 7;
    for (int l = 0; l < N_LAYER; l++) {
        r[l] = (router){.skew = skew, .rho = rho};
        for (int e = 0; e < N_EXPERT; e++) {
            r[l].always[e] = normal();
            r[l].noise[e] = normal();
        }
        router fresh = r[l]; /* of many texts */
        fresh.rho = 0;
        uint32_t *of = profile + (size_t)l * N_EXPERT, sorted[N_EXPERT];
        memset(of, 0, sizeof sorted);
        for (int t = 0; t < N_LONG; t++) route(&fresh, of);
        memcpy(sorted, of, sizeof sorted);
        qsort(sorted, N_EXPERT, sizeof *sorted, falling);
        for (int k = 0; k < n_places; k++) s.best += (double)sorted[k] / N_LONG / N_USED / N_LAYER;
        for (int e = 0; begin == WRONG && e < N_EXPERT / 2; e++) { /* those of the reverse order */
            const uint32_t other = of[e];
            of[e] = of[N_EXPERT - 1 - e];
            of[N_EXPERT - 1 - e] = other;
        }
        on[l].n_hot = on[l].n_cold = 0;
        for (int e = 0; e < N_EXPERT; e++) {
            int before = 0;
            for (int i = 0; i < N_EXPERT; i++) before += of[i] > of[e] || (of[i] == of[e] && i < e);
            if ((begin < WRONG ? e : before) < n_places)
                on[l].hot[on[l].n_hot++] = e;
            else
                on[l].cold[on[l].n_cold++] = e;
        }
    }
    model.expert_counts = begin < WRONG ? NULL : profile;
    model.expert_tokens = N_LONG;
    memset(counts, 0, sizeof counts);
    open_cache();
    for (int l = 0; begin == PROMPT && l < N_LAYER; l++)
        for (int t = 0; t < 512; t++) route(&r[l], counts + 3 * N_LAYER + (size_t)l * N_EXPERT);
    if (begin == PROMPT) pi_cache_follow(&h, 512, (int64_t)N_LAYER * COPY_BYTES * 10);
    for (int t = 0; t < 600; t++) {
        if (pi_cache_settle(&h) != PI_OK) exit(1);
        check_places(names[begin]);
        memset(counts, 0, sizeof counts);
        for (int l = 0; l < N_LAYER; l++) {
            uint32_t *uses = counts + 3 * N_LAYER + (size_t)l * N_EXPERT;
            route(&r[l], uses);
            for (int e = 0; e < N_EXPERT; e++)
                if (uses[e] && h.place[l * N_EXPERT + e] >= 0) *(t < 200 ? &s.first : &s.rest) += 1;
        }
        /* Half a copy for each layer: three matrices of N_FF rows of N_EMBD floats, 0.3 of the time at 40 bytes a ns. */
        pi_cache_follow(&h, 1, N_LAYER * COPY_BYTES / 2 / 12);
    }
    pi_cache_close(&h);
    s.first /= 200.0 * N_LAYER * N_USED;
    s.rest /= 400.0 * N_LAYER * N_USED;
    printf("skew %.1f rho %.1f, %d places, %-12s: %.3f, then %.3f; static %.3f; %u copies\n", skew, rho, n_places,
           names[begin], s.first, s.rest, s.best, n_asked);
    return s;
}

/* Eight sequences that use the same all the time: whether few experts move, and the rest is found. Returns 0 if so. */
static int steady(void) {
    enum { N_STEPS = 300, SETTLED = 100, N_TOK = 8, N_PLACES = 55 };
    static router r[N_LAYER];
    state = 13;
    double found = 0, best = 0;
    for (int l = 0; l < N_LAYER; l++) {
        uint32_t *of = profile + (size_t)l * N_EXPERT, sorted[N_EXPERT];
        r[l] = (router){.skew = 0.5};
        for (int e = 0; e < N_EXPERT; e++) r[l].always[e] = normal();
        memset(of, 0, sizeof sorted);
        for (int t = 0; t < N_LONG; t++) route(&r[l], of);
        memcpy(sorted, of, sizeof sorted);
        qsort(sorted, N_EXPERT, sizeof *sorted, falling);
        for (int k = 0; k < N_PLACES; k++) best += (double)sorted[k] / N_LONG / N_USED / N_LAYER;
        on[l].n_hot = on[l].n_cold = 0;
        for (int e = 0; e < N_EXPERT; e++)
            if (e < N_PLACES)
                on[l].hot[on[l].n_hot++] = e;
            else
                on[l].cold[on[l].n_cold++] = e;
    }
    model.expert_counts = NULL;
    open_cache();
    uint32_t before = 0;
    for (int step = 0; step < N_STEPS; step++) {
        if (pi_cache_settle(&h) != PI_OK) fail("a copy failed");
        if (step == SETTLED) before = n_asked;
        memset(counts, 0, sizeof counts);
        for (int l = 0; l < N_LAYER; l++) {
            uint32_t *uses = counts + 3 * N_LAYER + (size_t)l * N_EXPERT;
            for (int t = 0; t < N_TOK; t++) route(&r[l], uses);
            for (int e = 0; step >= SETTLED && e < N_EXPERT; e++) found += h.place[l * N_EXPERT + e] >= 0 ? uses[e] : 0;
        }
        pi_cache_follow(&h, N_TOK, (int64_t)N_LAYER * COPY_BYTES / 6); /* two copies a layer and step */
    }
    pi_cache_close(&h);
    const double share = found / ((N_STEPS - SETTLED) * N_LAYER * N_TOK * N_USED),
                 copies = (double)(n_asked - before) / ((N_STEPS - SETTLED) * N_LAYER);
    printf("eight sequences: %.3f; static %.3f; %.3f copies a layer and step\n", share, best, copies);
    return share < 0.98 * best || copies > 0.25;
}

/* Eight sequences, 10,000 tokens, that are of something else every 40 steps. */
static void churn(void) {
    static router r[N_LAYER];
    state = 11;
    is_late = true;
    model.expert_counts = NULL;
    for (int l = 0; l < N_LAYER; l++) {
        on[l].n_hot = on[l].n_cold = 0;
        for (int e = 0; e < N_EXPERT; e++)
            if (l && e % 3 == 0) /* of one layer there are no places */
                on[l].hot[on[l].n_hot++] = e;
            else
                on[l].cold[on[l].n_cold++] = e;
    }
    open_cache();
    for (int step = 0; step < 1250; step++) {
        if (pi_cache_settle(&h) != PI_OK) fail("a copy failed");
        check_places("10,000 tokens");
        memset(counts, 0, sizeof counts);
        for (int l = 0; l < N_LAYER; l++) {
            if (step % 40 == 0) r[l] = (router){.skew = 2};
            for (int e = 0; step % 40 == 0 && e < N_EXPERT; e++) r[l].always[e] = normal();
            for (int t = 0; t < 8; t++) route(&r[l], counts + 3 * N_LAYER + (size_t)l * N_EXPERT);
        }
        pi_cache_follow(&h, 8, (int64_t)N_LAYER * COPY_BYTES);
    }
    int64_t n_copies = 0;
    for (int l = 0; l < N_LAYER; l++) {
        const pi_expert_counts c = pi_cache_counts(&h, l);
        if (c.copied_bytes != (uint64_t)c.n_copies * COPY_BYTES || (!l && c.n_copies)) fail("the counts are wrong");
        n_copies += c.n_copies;
    }
    printf("10,000 tokens: %lld copies\n", (long long)n_copies);
    if (n_copies != n_asked || n_copies < 1000) fail("other copies than were asked for, or few");
    pi_cache_close(&h);
    is_late = false;
}

int main(void) {
    for (int l = 0; l < N_LAYER; l++) {
        layer[l].n_blocks = 1;
        layer[l].block[0].kind = &pi_experts_kind;
        pi_experts *w = &layer[l].block[0].experts;
        w->n_expert = N_EXPERT;
        w->n_used = N_USED;
        w->n_ff = N_FF;
        te_mat *const mats[] = {&w->gate, &w->up, &w->down}, *const there[] = {&on[l].gate, &on[l].up, &on[l].down_out};
        for (int k = 0; k < 3; k++) { /* N_FF is N_EMBD */
            *mats[k] = (te_mat){file_at(l, k), sizeof(float) * N_EMBD, TE_F32, N_EMBD, N_EXPERT * N_FF};
            *there[k] = *mats[k];
            there[k]->w = places_at(l, k);
        }
        on[l].hot = malloc(sizeof(int32_t) * N_EXPERT);
        on[l].cold = malloc(sizeof(int32_t) * N_EXPERT);
        if (!on[l].hot || !on[l].cold) return 1;
    }
    model.info = (pi_model_info){.n_layer = N_LAYER, .n_expert = N_EXPERT, .n_expert_used = N_USED, .n_embd = N_EMBD};
    model.layer = layer;
    session.model = &model;
    session.step = steps;
    h = (pi_hybrid){.s = &session, .n_devices = 1, .layer = on};
    h.device[0].dev = &device;
    h.device[0].counts = counts;
    int bad = 0;
    for (int p = 0; p < 2; p++) {
        const int32_t n_places = p ? 16 : 55;
        for (start begin = NO_COUNTS; begin <= RIGHT; begin++)
            for (int k = 1; k <= 2; k++) {
                const shares s = run(0.5 * k, 0, begin, n_places);
                bad += s.rest < 0.95 * s.best || ((begin == RIGHT || begin == PROMPT) && s.first < 0.95 * s.best);
            }
        const shares near = run(0.5, 0.9, NO_COUNTS, n_places);
        bad += near.rest <= near.best;
    }
    bad += steady();
    churn();
    for (int l = 0; l < N_LAYER; l++) {
        free(on[l].hot);
        free(on[l].cold);
    }
    if (bad) fprintf(stderr, "%d of these are worse than they must be\n", bad);
    return bad ? 1 : 0;
}
