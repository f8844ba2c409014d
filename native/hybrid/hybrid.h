/* hybrid.h - a session whose layers lie partly on devices: what was uploaded, and both sides of a step. */
#ifndef PI_HYBRID_H
#define PI_HYBRID_H

#include "../device/device.h"
#include "../device/handover.h"
#include "../device/space.h"
#include "../plan/plan.h"
#include "../state/state.h"

/* A layer's matrices and vectors on its device; names as in pi_attention and pi_ffn. Of a mixture, "neurons" are experts;
 * those on the device have places there: place k's rows of gate, up and down or down_out follow those of place k - 1. */
typedef struct pi_device_layer {
    int32_t device; /* index in pi_hybrid, or -1: the CPU computes the layer */
    bool has_predictor;
    int32_t n_hot, n_cold, n_cpu;
    int32_t *hot, *cold;  /* ids; H. Cold ones: first n_cpu that the CPU computes, then those that the device reads in
                             place (in decoding), all three ascending */
    int32_t *cold_blocks; /* of a down stored by output */
    te_norm norm[PI_MAX_BLOCKS], post_norm[PI_MAX_BLOCKS]; /* of its blocks */
    te_norm wide_q_norm, wide_k_norm;
    te_mat q_low, kv_a, key_b, value_b; /* D; of latent attention, with q the second or only matrix of q */
    te_norm q_low_norm;
    const float *latent_norm;
    te_mat q, k, v, o, gate, up, down, down_out, fc1, fc2_hot, fc2_cold; /* D; the FFN's: hot neurons */
    /* D; w NULL: none. Of the FFN's, what has a row per neuron (b of gate and up; a of down, transposed) is hot neurons';
     * that of cold ones is in adapter_cold. */
    te_mat adapter_a[PI_N_ADAPT], adapter_b[PI_N_ADAPT], adapter_cold[PI_N_ADAPT];
    const uint64_t *sign_hot, *sign_cold;
    const float *q_b, *k_b, *v_b, *o_b, *head_gate_b, *q_norm, *k_norm, *v_norm, *sinks, *up_b, *up_b_cold, *down_b,
        *threshold;
    const int32_t *cold_ids, *cold_block_ids; /* D */
    te_mat head_gate,
        adapter_head_gate; /* D; of gated heads: rows of q that are no query's; what an adapter adds there */
    void *pool_k, *pool_v;
    struct { /* D; of a block with a state, names as in pi_delta, pi_shortconv, pi_mamba */
        te_mat in, gate, alpha, beta, out;
        const float *conv, *conv_b, *a, *d, *dt_b, *norm;
        size_t at; /* floats before the layer's in a place */
    } recurrent;
    uint32_t *fired_hot, *fired_cold;          /* D; or NULL: the session does not count */
    te_mat router;                             /* of a mixture */
    const float *factor;                       /* of its experts' weights */
    const float *choice_b, *router_b, *gate_b; /* gate_b, up_b and down_b: of all its experts, by their numbers */
    int32_t *kept; /* H [n_used + 1], or NULL: of so many of a token's experts that are not there, those that the */
    const int32_t *n_kept;                                     /* device reads in host memory; D, the same */
    te_mat shared_gate, shared_up, shared_down, shared_router; /* of its expert of all tokens; the router has one row */
    te_norm router_norm, shared_norm, shared_post_norm, own_post_norm; /* of a mixture beside a feed-forward */
} pi_device_layer;

enum { PI_MAX_DEVICES = 16 };

/* What changes from step to step, as it lies in one piece of memory: x [n_tok][n_embd] (the embedding, where the first
 * layer is the device's), pos [n_tok], first [n_tok], table [n_pools][n_tok][ld_table], cs [n_tok][n_rot]. Behind it lie counts,
 * zeros to begin with, which go back to the CPU. */
typedef struct pi_device_input {
    float *x;
    int32_t *pos, *first, *table;
    int32_t *order, *run, *state, *keep; /* where layers have states: as te_recurrent_args's; state: place */
    float *cs;
    int32_t *place;     /* [n_layer][n_expert] where experts are (te_route_args) */
    uint32_t *counts;   /* [n_layer][3] */
    uint32_t *uses;     /* [n_layer][n_expert] */
    int32_t *n_largest; /* as pi_device_logits's */
    int32_t *cold; /* of a prompt, behind these: [n_layer][n_expert] the experts that have no place, in their order */
} pi_device_input;

/* One device and the buffers of a chunk on it. */
typedef struct pi_device_state {
    int32_t of_plan;                   /* which of the plan's devices it is */
    uint64_t budget_bytes, held_bytes; /* of the plan; held: layers and head, without work space */
    pi_device *dev;
    pi_device_info info;
    void *shared_input, *input; /* S, D */
    size_t input_bytes;
    uint32_t *ticket;                                  /* D: number of the step's first hand-over */
    float *x, *h, *q, *k, *v, *att, *latent_q, *z, *y; /* D */
    float *head_gates;                                 /* D [n_batch][n_q] */
    float *cut_gates, *cut_ups;                        /* D [n_batch][n_ff]: of feed-forwards that cut gates */
    float *states;                                     /* D [places][state_floats] of its layers */
    size_t state_floats;
    float *state_in, *state_conv, *state_z, *state_gates, *state_out; /* D: what blocks with a state work with */
    float *adapt[3];                                                  /* D: a x of adapters of q, k and v */
    float *threshold;                                                 /* D [n_layer] */
    char *stage[PI_STAGES];                                           /* D: a prompt's cold weights on their way */
    size_t stage_bytes;
    uint64_t *published, *marks, *answer; /* S: x or h from the device, marks, y or x from the CPU */
    uint64_t *ahead;     /* S: marks of the next layer as the device guesses them, twice: every other layer's */
    int64_t ahead_words; /* of each */
    /* D: where the head makes logits, in place of h, q, k, v, att, latent_q and y. They may stay there until the next feed:
     * what runs a program outside a feed calls pi_hybrid_bring_rows first. */
    float *rows;
    size_t rows_floats;
    float *logits, *hidden;              /* S [max_rows] rows */
    uint64_t *largest;                   /* S [max_rows][PI_LARGEST], of these */
    int32_t *n_found;                    /* S [max_rows] */
    uint32_t *counts;                    /* S [n_layer][3], then [n_layer][n_expert]: uses of experts */
    float *score, *weight;               /* D [n_batch][n_expert] of routers; [n_batch][n_used] of what they chose, */
    int32_t *expert;                     /* [n_batch][n_used] which is this */
    float *shared_score, *shared_weight; /* D [n_batch] of the expert of all tokens, */
    int32_t *shared_expert;              /* [n_batch] zeros, */
    int32_t *shared_place;               /* and where it is: 0 */
    float *shared_x, *shared_y; /* D [n_batch][n_embd], where that stands beside the others: its input, its part */
    int32_t *n_missing;         /* D: routes of the last layer that are left to the CPU */
    int32_t *kept;              /* D [n_used] which of a token's routes the device keeps */
    uint64_t *guess,
        *routes; /* S [n_layer][max_decode][n_used][2] what the CPU is told of them, before as a guess, and */
    int32_t *guess_expert, *guess_kept; /* D: the guess; the CPU knows no more of it than of the choice */
    float *guess_weight;
    uint64_t *asked; /* S [n_layer][max_decode][n_embd]: a device that lacks no expert does not wait for the CPU */
    uint64_t *part_stamps; /* S: when the part's last layers began and ended */
    uint64_t *stamps;      /* S [n_layer][PI_MOMENT_INPUT], or NULL: the session has no timeline */
    int64_t clock_ns;      /* what the CPU's clock shows more */
    te_norm output_norm;
    te_mat output;             /* w NULL: the CPU computes the head */
    te_mat output_a, output_b; /* D; its adapter */
    const float *output_bias;  /* D, or NULL */
} pi_device_state;

/* What a member of the CPU's team keeps of a layer with cold neurons. */
typedef struct pi_cold_member {
    float *x;                      /* [max_decode][n_embd] what the device posted */
    uint32_t *marks;               /* [max_decode][words] */
    uint32_t *ahead;               /* [words] the device's guess at them */
    int32_t *guessed, n_guessed;   /* [n_ff] the neurons that it names */
    size_t part_at, part_bytes;    /* of a row of down, where it adds up columns; else part_bytes is 0 */
    int32_t n_parts_ahead;         /* how many guessed neurons' parts it fetches, from the first on */
    int32_t n_rows_ahead;          /* how many neurons' rows it fetches at most, */
    int64_t first_row;             /* from this one on */
    int64_t next_ahead, end_ahead; /* what is left of all that */
    size_t ahead_bytes;            /* of the next row, that are done */
    int32_t *list;                 /* [n_ff + 2 n_threads] marked neurons */
    int32_t *n_of;                 /* [n_threads] after pi_hybrid_assign: each member's */
    int32_t *place;                /* [n_ff + 2 n_threads] and where in all these neurons stand */
    uint32_t *tokens;              /* [n_ff] which tokens marked them */
    int32_t n_list;                /* of several tokens: of its share of the marks */
    int32_t *all;                  /* [n_ff] then: all members' lists. Of one: what pi_hybrid_assign hands out */
    int32_t *rest;                 /* [n_ff] places of what nobody fetched */
    uint32_t *all_tokens;
} pi_cold_member;

typedef struct pi_hybrid {
    pi_session *s;
    int64_t process_id;        /* of the process that opened the devices: a forked one has none of them */
    int64_t wait_ns;           /* for a device */
    int32_t n_used, n_devices; /* that something lies on; of those, opened */
    pi_device_state device[PI_MAX_DEVICES];
    pi_device_layer *layer; /* [n_layer] */
    int32_t ld_table;
    struct pi_expert_cache *cache; /* of mixtures; owns: */
    int32_t *place;                /* [n_layer][n_expert] where experts are in the next step */
    int32_t head_device;           /* or -1 */
    int32_t helper, helper_rows;   /* the device that has a copy of the head's first rows, or -1 */
    int32_t max_decode;            /* tokens that are handed over within a layer */
    int32_t max_logits;            /* tokens of a run that want logits */
    int32_t max_rows;              /* of a feed whose logits stay where its runs left them */
    int32_t max_mixed;             /* tokens of prompts and next ones of sequences that are one program */
    int32_t max_part;              /* tokens of a part; 0: there can be none */
    uint32_t number;               /* of the step's first hand-over */
    bool splits;                   /* more next tokens than max_mixed are several programs */
    bool is_whole;                 /* all is resident, and the head: the CPU computes nothing in a step */
    te_pool *caller;               /* the calling thread by itself */
    te_pool *few;                  /* a part of the threads, for what is small: one of all always finds its CPU taken */
    pi_cold_member *member;        /* [n_threads] */
    float *y;                      /* [max_decode][n_embd] the cold neurons' sum, where down is stored by output */
    float *listed;                 /* [n_ff] hidden values of listed neurons */
    int32_t *n_routes;             /* [n_layer] of a mixture's step: the CPU's */
    void *memory;                  /* of y, listed and the members */
    size_t memory_bytes;
    pi_progress progress; /* while loading */
    void *progress_ctx;
    uint64_t sent_bytes, total_bytes;
    uint64_t unmapped_bytes; /* of weights in host memory, which drivers refused to register */
    /* The run under way. */
    int32_t n_members; /* of the CPU's team */
    int32_t late;      /* 1 + the device that did not answer in time; 0: all did */
    int32_t lost;      /* 1 + the device that was cancelled first, as far as the CPU saw; 0: none */
    int64_t last_ns;   /* when the CPU's last hand-over ended */
    int64_t began_ns;
    int64_t (*moment)[PI_MOMENTS]; /* [n_layer], or NULL: of the CPU */
    bool decode;                   /* cold neurons are the CPU's or read by zero-copy; else their rows are loaded */
    bool masked;                   /* by predictor */
    bool skip;                     /* silent neurons */
    int32_t grouped;               /* as te_attention_args's */
    bool apart;                    /* no two tokens are of one sequence */
    bool deep;                     /* a few of a prompt, and they see so much that they are to read it together */
    /* Keys of programs for prompts and decoding: the last one's, and of those that are kept, that of the last run first. */
    uint64_t last_mixed[2], mixed[PI_MIXED];
    int32_t n_tok, n_logits;
    int32_t n_largest;              /* as the session's; 0: rows of logits are brought here; less: both */
    bool all_largest;               /* those of all runs of the feed so far */
    int32_t logits_at;              /* the row of d->logits where this program's begin */
    int32_t n_lent;                 /* rows of the feed that are where the device left them */
    int32_t n_unwanted;             /* of the last layer, from the first token on */
    int32_t first_layer, end_layer; /* that the program computes: all, but for a part's (part.c) */
    struct pi_hybrid_part *part;    /* that is under way, or was last; NULL: there was none */
    int32_t n_runs;                 /* of blocks with a state: at least the chunk's */
    pi_status kv_status;
    bool kv_lost;
} pi_hybrid;

/* Numbers of a step's hand-overs. */
enum { PI_ENTER, PI_COLD, PI_LEAVE, PI_HANDOVERS };
static inline uint32_t pi_number(int32_t l, int32_t which) { return (uint32_t)l * PI_HANDOVERS + (uint32_t)which + 1; }
static inline uint32_t pi_numbers(int32_t n_layer) { return ((uint32_t)n_layer + 1) * PI_HANDOVERS; }

/* hybrid.c: which layers lie where; then, once the session's KV pool is made, uploads them. Errors: ARGUMENT, MEMORY,
 * DEVICE, UNSUPPORTED. */
pi_status pi_hybrid_place(pi_session *s, const pi_plan *plan, pi_hybrid **out);
pi_status pi_hybrid_load(pi_hybrid *h, const pi_session_options *o);
/* Memory of all devices that is in use. */
uint64_t pi_hybrid_bytes(const pi_hybrid *h);
/* Whether the layers on devices have what a mode needs. Errors: UNSUPPORTED. */
pi_status pi_hybrid_check_sparsity(const pi_hybrid *h, int32_t sparsity);
/* Sends the thresholds [n_layer] to the devices. Errors: DEVICE (the session's own are then sent back). */
pi_status pi_hybrid_set_thresholds(pi_hybrid *h, const float *threshold);
/* Adds to count [n_ff] how often the layer's neurons fired on a device since the last reset. Errors: DEVICE, MEMORY. */
pi_status pi_hybrid_add_fired(pi_hybrid *h, int32_t l, uint32_t *count);
/* Sets the devices' counts of all layers to 0. Errors: the same. */
pi_status pi_hybrid_reset_fired(pi_hybrid *h);
/* The first error of copies of K and V since it was asked last. */
pi_status pi_hybrid_kv_status(pi_hybrid *h);
/* Whether devices load nothing for a prompt: of a mixture, they have all of its experts; and whether they have all layers,
 * too. */
bool pi_hybrid_loads_nothing(const pi_hybrid *h);
bool pi_hybrid_is_resident(const pi_hybrid *h);
/* Neurons of all layers that devices read by zero-copy. */
int32_t pi_hybrid_zero_copy(const pi_hybrid *h);
/* How many of a layer's cold neurons are loaded at once into n_bytes. */
int32_t pi_hybrid_staged(const pi_hybrid *h, int32_t l, size_t n_bytes);
void pi_hybrid_close(pi_hybrid *h);
/* upload.c: brings the weights of a device's layers and head there, and reserves its buffers. Errors: MEMORY,
 * DEVICE. */
pi_status pi_hybrid_upload(pi_hybrid *h, int32_t device);
/* How the KV pool reaches the layers that lie on devices; errors wait in kv_status. */
pi_kv_device pi_hybrid_kv(pi_hybrid *h);
/* input.c: where a step's inputs for n_tok tokens lie from base on, and how many bytes they take; of these, counts. */
pi_device_input pi_hybrid_input(const pi_hybrid *h, int32_t n_tok, void *base);
size_t pi_hybrid_input_bytes(const pi_hybrid *h, int32_t n_tok);
size_t pi_hybrid_count_bytes(const pi_hybrid *h);
/* Whether the first layer's device is given the embedding with the step's other inputs. */
bool pi_hybrid_embeds_first(const pi_hybrid *h);
/* The run's inputs for all devices; h->grouped and h->apart follow from them. */
void pi_hybrid_fill_inputs(pi_hybrid *h);
/* part.c: a part of prompts whose layers are computed a few at a time, in front of others' steps. most: its tokens; 0: there
 * can be none. begin: s->chunk, none of whose tokens wants logits, is the part, and none of it is computed yet. ask: so many
 * of its layers come in front of the next run. left: layers that are not computed; 0: no part is under way, -1: it is lost,
 * since a run that had some of its layers has failed. ns: how long the last ones took. launch and went: step.c's, in front of
 * a run and behind it. rest: computes all that are left. forget: it is not under way any more. Errors: DEVICE, TIMEOUT,
 * MEMORY. */
int32_t pi_hybrid_most_part(const pi_hybrid *h);
pi_status pi_hybrid_part_begin(pi_hybrid *h);
void pi_hybrid_part_ask(pi_hybrid *h, int32_t n_layers);
int32_t pi_hybrid_part_left(const pi_hybrid *h);
int64_t pi_hybrid_part_ns(const pi_hybrid *h);
pi_status pi_hybrid_part_launch(pi_hybrid *h);
void pi_hybrid_part_went(pi_hybrid *h, pi_status st);
pi_status pi_hybrid_part_rest(pi_hybrid *h);
void pi_hybrid_part_forget(pi_hybrid *h);
/* step.c. Errors: DEVICE: the devices are of the process that this one was forked from. */
pi_status pi_hybrid_check_process(const pi_hybrid *h);
/* step.c: what a run of s->chunk is, but for its inputs. */
void pi_hybrid_set_run(pi_hybrid *h);
/* step.c: s->chunk, whose tokens are all of one kind, the n_logits last of them wanting logits. */
pi_status pi_hybrid_run(pi_hybrid *h);
/* logits.c. In front of a run: where its logits will be; whether they stay where the device leaves them. Behind it: they are
 * the session's. */
bool pi_hybrid_place_logits(pi_hybrid *h);
void pi_hybrid_give_logits(pi_hybrid *h, bool stays);
/* Brings the rows of the last feed's logits, if only their largest were brought. Errors: DEVICE. */
pi_status pi_hybrid_bring_rows(pi_hybrid *h);
/* Where the head's logits are made. Single values are slow to leave a device: it has room for them, if they are not too many,
 * and they leave all at once; more are made where the CPU finds them. */
static inline float *pi_hybrid_rows(const pi_hybrid *h, const pi_device_state *d) {
    const size_t n = (size_t)h->n_logits * (size_t)h->s->model->info.n_vocab;
    return n <= d->rows_floats ? d->rows : h->device[h->head_device].logits;
}
/* Tokens, from the first on, whose output of layer l nobody wants; l = n_layer: nor that of the last one. */
static inline int32_t pi_hybrid_unwanted(const pi_hybrid *h, int32_t l) {
    return l + 1 < h->s->model->info.n_layer ? 0 : h->n_unwanted;
}
/* The device of layer l, or of the head (n_layer); -1: the CPU. Devices are numbered in the order of their layers. */
int32_t pi_hybrid_device_of(const pi_hybrid *h, int32_t l);
/* Whether x in front of layer l, or of the head, goes straight from the device of the layer before to another one, which
 * reads it where the first has posted it. Plans see to it that the first has no layer behind: it would post other words
 * there, perhaps before the CPU has seen these, and the two could wait for each other. */
bool pi_hybrid_passes(const pi_hybrid *h, int32_t l);
/* Whether the helper computes its rows of the head in this run: it has done its layers, and reads x where the last one's
 * device posts it. */
static inline bool pi_hybrid_shares_head(const pi_hybrid *h) {
    return h->helper >= 0 && h->decode && h->n_tok == 1 && h->n_logits == 1;
}
/* Waits for words from a device; one that times out gives zeros, and ends all other waits. */
void pi_hybrid_await(pi_hybrid *h, int32_t device, const uint64_t *words, int64_t first, int64_t n, uint32_t ticket,
                     uint32_t *out);
/* The neurons that marks of parts p0 to p1 - 1 name, into list, and which tokens do, if these are several; returns how
 * many. */
int32_t pi_hybrid_list(const pi_hybrid *h, int32_t l, const uint32_t *marks, int32_t p0, int32_t p1, int32_t *list,
                       uint32_t *tokens);
/* experts.c: of a step's routes in layer l, how many the device computed by zero-copy. */
int32_t pi_hybrid_kept(const pi_hybrid *h, int32_t l);
/* experts.c: the CPU's part of a mixture of experts: what the device has not, of a few tokens. */
void pi_hybrid_cold_experts(pi_hybrid *h, te_team *team, int32_t l);
/* Whether each member adds up columns of its own of the cold neurons' sum in layer l, not neurons of its own. */
bool pi_hybrid_by_columns(const pi_hybrid *h, const te_team *team, int32_t l);
/* lookahead.c: whether a device guesses the marks of layer l while layer l - 1 is computed. where the
 * guess is posted. take waits for it and lists this member's share. fetch fetches rows of that until the word `until` is
 * posted, and goes on where it stopped. foreseen: how many of me->marks were guessed. assign: who computes which of the
 * marked neurons me->all[0..n-1], ascending: member i the me->n_of[i] from me->list[i * room] on; returns room. It
 * follows from the marks and the guess alone, so that all members come to the same. */
bool pi_hybrid_looks_ahead(const pi_hybrid *h, int32_t l);
uint64_t *pi_hybrid_guess(const pi_hybrid *h, int32_t l);
void pi_hybrid_take_guess(pi_hybrid *h, const te_team *team, int32_t l);
void pi_hybrid_fetch_ahead(pi_hybrid *h, const te_team *team, int32_t l, const uint64_t *until);
int32_t pi_hybrid_foreseen(const pi_hybrid *h, int32_t l, const pi_cold_member *me);
int32_t pi_hybrid_assign(const pi_cold_member *me, int32_t n, int32_t n_members);
/* Whether a device tells early which experts of layer l the CPU will be asked for: its choice, or a guess while layer l - 1
 * is computed. fetch: this member's rows of them, until the word `until` is posted. foreseen: how many of n routes had one
 * of these experts. */
bool pi_hybrid_guesses_experts(const pi_hybrid *h, int32_t l);
int32_t pi_hybrid_foreseen_experts(const pi_hybrid *h, int32_t l, const int32_t *of, int32_t n);
void pi_hybrid_fetch_experts(pi_hybrid *h, const te_team *team, int32_t l, const uint64_t *until);
/* timeline.c, where the session keeps one: reserves room, once weights lie where they belong; forgets the run before;
 * notes a moment of the CPU. */
pi_status pi_hybrid_start_timeline(pi_hybrid *h);
void pi_hybrid_clear_timeline(pi_hybrid *h);
static inline void pi_hybrid_note(pi_hybrid *h, const te_team *team, int32_t l, pi_moment which) {
    if (h->moment && team->ith == 0) h->moment[l][which] = te_os_now_ns();
}
/* The CPU's part of layer l is over, which began then. */
static inline void pi_hybrid_layer_done(pi_hybrid *h, const te_team *team, int32_t l, int64_t began_ns) {
    if (team->ith == 0) {
        const int64_t now = te_os_now_ns();
        h->s->step[l].ffn_us = (float)((double)(now - began_ns) * 1e-3);
        h->s->step[l].layer_us = (float)((double)(now - h->last_ns) * 1e-3);
        h->last_ns = now;
    }
    pi_hybrid_note(h, team, l, PI_MOMENT_ANSWER);
}
/* program.c: the device's side: a pi_device_program; ctx is a pi_device_part. */
typedef struct pi_device_part {
    pi_hybrid *h;
    int32_t device;
} pi_device_part;
void pi_hybrid_program(void *ctx, pi_device *dev);

#endif
