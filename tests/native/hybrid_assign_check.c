/* hybrid_assign_check.c - who computes which cold neuron: random marks and guesses, good and bad ones. Every marked neuron
 * has one member; no member has more than one above the mean rounded up; a neuron is computed by the member that fetched
 * it, if that is not full; those that nobody fetched go round. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hybrid/hybrid.h"

enum { N_FF = 700, MOST_MEMBERS = 19 };

static uint32_t state = 1;
static uint32_t below(uint32_t n) {
    state = state * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)state * n >> 32);
}

static void fail(const char *what, int round) {
    fprintf(stderr, "round %d: %s\n", round, what);
    exit(1);
}

/* Each neuron in one of a hundred cases, or in the first `front` neurons only. */
static int32_t draw(int32_t *list, bool *in, uint32_t percent, int32_t front) {
    int32_t n = 0;
    for (int32_t j = 0; j < front; j++)
        if ((in[j] = below(100) < percent)) list[n++] = j;
    return n;
}

static void check(const pi_cold_member *m, const bool *marked, int32_t n, int32_t n_members, int32_t most, int32_t room,
                  int round) {
    const int32_t mean = (n + n_members - 1) / n_members;
    int32_t n_dealt = 0, computed_by[N_FF], n_kept[MOST_MEMBERS] = {0}, least = N_FF, largest = 0, n_full = 0;
    memset(computed_by, -1, sizeof computed_by);
    for (int32_t i = 0; i < n_members; i++) {
        if (m->n_of[i] > mean + 1) fail("a member has too many", round);
        for (int32_t k = 0; k < m->n_of[i]; k++, n_dealt++) {
            const int32_t j = m->list[i * room + k];
            if (m->all[m->place[i * room + k]] != j) fail("a neuron's place is wrong", round);
            if (j < 0 || j >= N_FF || !marked[j]) fail("a neuron that is not marked", round);
            if (computed_by[j] >= 0) fail("a neuron is computed twice", round);
            computed_by[j] = i;
        }
    }
    if (n_dealt != n) fail("a neuron is computed by nobody", round);
    int32_t fetched_by[N_FF];
    memset(fetched_by, -1, sizeof fetched_by);
    for (int32_t i = 0, place = 0; i < n_members; i++) {
        const int32_t end = (int32_t)((int64_t)m->n_guessed * (i + 1) / n_members);
        for (int32_t k = 0; place < end; place++, k++)
            if (k < most) fetched_by[m->guessed[place]] = i;
    }
    for (int32_t j = 0; j < N_FF; j++)
        if (marked[j] && fetched_by[j] == computed_by[j] && fetched_by[j] >= 0) n_kept[computed_by[j]]++;
    for (int32_t j = 0; j < N_FF; j++)
        if (marked[j] && fetched_by[j] >= 0 && fetched_by[j] != computed_by[j] && n_kept[fetched_by[j]] <= mean)
            fail("a neuron is not computed by the member that fetched it", round);
    for (int32_t i = 0; i < n_members; i++) {
        const int32_t others = m->n_of[i] - n_kept[i];
        n_full += m->n_of[i] == mean + 1;
        if (others < least) least = others;
        if (others > largest) largest = others;
        for (int32_t k = 0; k < n_kept[i]; k++)
            if (fetched_by[m->list[i * room + k]] != i) fail("what was fetched does not come first", round);
    }
    if (!n_full && largest > least + 1) fail("what nobody fetched does not go round", round);
}

int main(void) {
    int32_t guessed[N_FF], all[N_FF], rest[N_FF], place[N_FF + 2 * MOST_MEMBERS], list[N_FF + 2 * MOST_MEMBERS],
        n_of[MOST_MEMBERS], again[N_FF + 2 * MOST_MEMBERS];
    static const uint32_t percents[] = {0, 1, 10, 50, 100};
    for (int round = 0; round < 4000; round++) {
        const int32_t n_members = 1 + (int32_t)below(MOST_MEMBERS),
                      most = (int32_t)below(3) ? N_FF : (int32_t)below(20);
        bool marked[N_FF] = {0}, in_guess[N_FF] = {0};
        pi_cold_member m = {.guessed = guessed,
                            .all = all,
                            .rest = rest,
                            .list = list,
                            .n_of = n_of,
                            .place = place,
                            .n_rows_ahead = most};
        const int32_t n = draw(all, marked, percents[below(5)], below(3) ? N_FF : 90);
        const uint32_t wrong = below(4) * 10;
        for (int32_t j = 0; j < N_FF; j++) {
            in_guess[j] = below(100) < wrong ? below(2) != 0 : marked[j];
            if (in_guess[j]) guessed[m.n_guessed++] = j;
        }
        const int32_t room = pi_hybrid_assign(&m, n, n_members);
        if (room * n_members > N_FF + 2 * MOST_MEMBERS) fail("the list has no room", round);
        check(&m, marked, n, n_members, most, room, round);
        memcpy(again, list, sizeof again);
        if (pi_hybrid_assign(&m, n, n_members) != room || memcmp(again, list, sizeof again) != 0)
            fail("dealt otherwise when asked again", round);
    }
    return 0;
}
