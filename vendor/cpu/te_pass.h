/* te_pass.h - private to te_ffn.c, te_experts.c: neurons of one feed-forward for a few tokens, in three stages, each of
 * which works on a group at a time and prefetches the rows of the stage that comes next:
 *
 *     gate   a group of the list: g = gate_j . x; those that act(g) lets through wait in a queue
 *     up     a group of those:    h = act(g) * (up_j . x); those with h != 0 wait in a second queue
 *     down   a group of those:    sums += h * down_j
 *
 * A group is eight rows, enough for the prefetch to run ahead of the arithmetic, whichever share of the neurons
 * survives; with several tokens it is sixteen, which share what is read of the tokens' vectors.
 * Queues keep the order of the list, so each sum has the same terms in the same order however many neurons fell out
 * (dense and exact give the same bits). Every queue entry has a bit per token. Where a single token looks at all
 * neurons, the first stage takes longer pieces (te_ffn.c). */
#ifndef TE_PASS_H
#define TE_PASS_H

#include "te_workspace.h"

/* A queue grows by up to a group in a turn and is then drained by one if it began the turn with as many: never more
 * than 3 * GROUP - 1. */
enum { TE_GROUP_OF_ONE = 8, TE_GROUP = 16, TE_QUEUE_ROOM = 3 * TE_GROUP };

/* Neurons between two stages. value[t * TE_QUEUE_FLOATS + i] belongs to entry i and token t. */
typedef struct te_queue {
    int32_t n;
    int32_t id[TE_QUEUE_ROOM];
    uint32_t tokens[TE_QUEUE_ROOM]; /* bit t: token t still has a use for this neuron */
    float *value;
} te_queue;

typedef struct te_pass {
    te_workspace *ws;
    const te_ffn *f;
    const te_ffn_io *io;  /* its pointers moved to the first token of the pass */
    const char *act[2];   /* packed activations of token 0, for gate and for up */
    float *sums;          /* of token 0, which down's rows are added to */
    const float *weight;  /* of the tokens: what hidden values are multiplied with before down; or NULL */
    float *const *hidden; /* where those of token t go, or NULL */
    uint32_t only;        /* the tokens that want all of the list; 0: io says which */
    int32_t n_tok;
    int32_t group;
    bool skip;
    te_ffn_counts *counts;
    te_queue gated, down;
} te_pass;

/* Sets up what follows from the others: the group, and the member's queues. */
void te_pass_begin(te_pass *p, const te_member *me);
/* All neurons at positions [lo, hi) of the list. */
void te_pass_neurons(te_pass *p, te_rows rows, int32_t lo, int32_t hi);
/* Which set of packed activations up takes: the gate's where both formats are packed alike. */
int32_t te_pass_up_act(const te_workspace *ws, const te_ffn *f);

#endif
