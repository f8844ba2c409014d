/* step.c - one run of tokens through a model that lies partly on devices: starts the devices' programs
 * (program.c) and runs the CPU's side. Each hand-over is one post and one wait on either side, in the same order:
 *
 *     device                                     CPU
 *     ENTER  waits for x                         posts x (the embedding, or what its layers made)
 *     per layer: attention, predictor
 *     COLD   posts h and marks, hot neurons,     lists the marked neurons, computes them, posts their sum
 *            waits for the sum, adds
 *     LEAVE  posts x                             waits for x, computes its own layers
 *
 * A device that has the layer behind another's waits for that same x. The CPU waits for the last word of it alone, to find
 * out who is silent: others may still be on their way. Blocks that no device computes, at a layer's beginning or end, are
 * computed by the CPU: x comes back for that, and each such layer begins with ENTER, or ends with LEAVE.
 *
 * A device that helps with the head waits for the x that the last one posts (LEAVE of the last layer), behind its own layers.
 * The CPU waits for all of that first: it finds out who is silent, and the helper then has what it waits for.
 *
 * A long prompt's cold neurons are not computed by the CPU: the device loads their rows.
 *
 * A cold layer has one barrier, between the neurons' hidden values, or the members' sums, and their being added up.
 * Before it every member makes its own copy of h and its own list from the posted words, after it each posts the columns
 * that it added up. Of several tokens there is one more, behind which all read one copy and put their lists together.
 *
 * Cores get unequal shares of the memory's rate. So a predicted token's gate and up are dealt while they are computed:
 * whoever has done his own neurons goes on with others'; down is then added up by columns (te_op_ffn_down), which has one
 * order whoever computed what. Rows of formats in blocks of 256 are not cut so finely: there each member has a sum.
 *
 * A wait that times out ends all others: whatever a member has then is computed with zeros and thrown away. No member
 * leaves early, since the others meet it at barriers; for the same reason no barrier depends on what was posted. */
#include <string.h>

#include "../../vendor/core/te_types.h"
#include "../blocks/attend.h"
#include "../blocks/ffn.h"
#include "../blocks/forward.h"
#include "cache.h"
#include "program.h"

static uint32_t number(const pi_hybrid *h, int32_t l, int32_t which) { return h->number + pi_number(l, which); }

static void cancel(pi_hybrid *h, int32_t device) {
    __atomic_store_n(h->device[device].dev->cancelled, 1, __ATOMIC_RELAXED);
}
static void cancel_all(pi_hybrid *h) {
    for (int32_t i = 0; i < h->n_devices; i++) cancel(h, i);
}

/* Others are cancelled because of this one: it is asked first what happened. */
static void note_lost(pi_hybrid *h, int32_t device) {
    int32_t none = 0;
    __atomic_compare_exchange_n(&h->lost, &none, device + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

/* Of the thread that feeds, which alone may ask whether the feed is to end. */
static _Thread_local bool may_ask;

/* At all of them: the one that is waited for may wait for x of another that is lost. */
static void look_at_all(void *ctx) {
    pi_hybrid *h = ctx;
    bool lost = may_ask && pi_step_is_stopped(h->s);
    for (int32_t i = 0; i < h->n_devices; i++) {
        pi_device *dev = h->device[i].dev;
        dev->ops->look(dev);
        if (!__atomic_load_n(dev->cancelled, __ATOMIC_RELAXED)) continue;
        note_lost(h, i);
        lost = true;
    }
    if (lost) cancel_all(h);
}

void pi_hybrid_await(pi_hybrid *h, int32_t device, const uint64_t *words, int64_t first, int64_t n, uint32_t ticket,
                     uint32_t *out) {
    pi_device *dev = h->device[device].dev;
    const pi_wait wait = {dev->cancelled, h->wait_ns, look_at_all, h};
    const pi_awaited got = pi_await_words(&wait, words, first, n, ticket, out);
    if (got == PI_GOT) return;
    if (got == PI_LATE) __atomic_store_n(&h->late, device + 1, __ATOMIC_RELAXED);
    if (got == PI_CANCELLED) note_lost(h, device);
    cancel_all(h);
}

/* This member's share of x in front of layer l, or of the head: of its tokens that are wanted there. */
static void share_x(const pi_hybrid *h, te_team *team, int32_t l, int64_t *lo, int64_t *hi) {
    const int64_t n = h->s->model->info.n_embd, before = l > 0 ? pi_hybrid_unwanted(h, l - 1) : 0;
    te_share(team, (h->n_tok - before) * n, 16, lo, hi);
    *lo += before * n;
    *hi += before * n;
}

static void post_from_cpu(pi_hybrid *h, te_team *team, int32_t device, int32_t l, const float *x, uint32_t ticket) {
    int64_t lo, hi;
    share_x(h, team, l, &lo, &hi);
    pi_publish_words(h->device[device].answer, lo, hi - lo, ticket, (const uint32_t *)(const void *)(x + lo));
}

/* This member's share of what the device posted, to x. */
static void await_on_cpu(pi_hybrid *h, te_team *team, int32_t device, int32_t l, float *x) {
    const uint32_t ticket = number(h, l - 1, PI_LEAVE);
    int64_t lo, hi;
    share_x(h, team, l, &lo, &hi);
    pi_hybrid_await(h, device, h->device[device].published, lo, hi - lo, ticket, (uint32_t *)(void *)(x + lo));
}

/* Where devices pass x on by themselves: until its last word is there, whatever the others are. A device that posts it and
 * fails before them is found by whoever waits for the next one. All members wait: none is to wait for the second device while
 * it waits for the first. */
static void watch(pi_hybrid *h, int32_t device, int32_t l) {
    uint32_t word;
    const int64_t last = (int64_t)h->n_tok * h->s->model->info.n_embd - 1;
    pi_hybrid_await(h, device, h->device[device].published, last, 1, number(h, l - 1, PI_LEAVE), &word);
}

/* ---- cold neurons ---- */

/* The tokens whose word has bit i. */
static uint32_t tokens_of(const uint32_t *bits, int64_t n_words, int32_t n_tok, int32_t i) {
    uint32_t tokens = 0;
    for (int32_t t = 0; t < n_tok; t++) tokens |= (bits[t * n_words] >> i & 1) << t;
    return tokens;
}

int32_t pi_hybrid_list(const pi_hybrid *h, int32_t l, const uint32_t *marks, int32_t p0, int32_t p1, int32_t *list,
                       uint32_t *tokens) {
    const pi_device_layer *w = &h->layer[l];
    const pi_device_state *d = &h->device[w->device];
    const int32_t n_parts = d->info.n_parts, per_part = pi_part_words(w->n_cpu, n_parts), n_tok = h->n_tok;
    const int64_t n_words = (int64_t)per_part * n_parts;
    const int32_t step = w->n_cpu / n_parts,
                  remainder = w->n_cpu % n_parts; /* as pi_part_begin divides, all the time */
    int32_t n = 0, lo = pi_part_begin(w->n_cpu, p0, n_parts), hi, over = (int32_t)((int64_t)w->n_cpu * p0 % n_parts);
    for (int32_t p = p0; p < p1; p++, lo = hi) {
        over += remainder;
        hi = lo + step + (over >= n_parts);
        if (over >= n_parts) over -= n_parts;
        const uint32_t *bits = marks + (ptrdiff_t)p * per_part;
        for (const int32_t *id = w->cold + lo, *end = w->cold + hi; id < end; id += 32, bits++) {
            uint32_t any = bits[0];
            for (int32_t t = 1; t < n_tok; t++) any |= bits[t * n_words];
            if (end - id < 32) any &= (1U << (end - id)) - 1;
            for (; any; any &= any - 1) {
                const int32_t i = __builtin_ctz(any);
                if (n_tok > 1) tokens[n] = tokens_of(bits, n_words, n_tok, i);
                list[n++] = id[i];
            }
        }
    }
    return n;
}

bool pi_hybrid_by_columns(const pi_hybrid *h, const te_team *team, int32_t l) {
    /* Of long rows little was fetched ahead, and columns are read less fast than rows: Falcon-40B lost 5 %, Bamboo-7B,
     * whose rows are half as long, gained 5 to 12. */
    enum { MOST_ROW_BYTES = 8192 };
    const pi_layer *layer = &h->s->model->layer[l];
    const pi_ffn *w = pi_ffn_of(layer);
    int32_t lo, hi;
    if (!h->masked || h->n_tok > 1 || !w->down_t.w || pi_row_bytes(&w->down_t) > MOST_ROW_BYTES) return false;
    return !pi_adapts_ffn(layer) && te_ffn_columns(team, &w->down_t, &lo, &hi);
}

/* The list of neurons that any token's marks name, and which tokens do, made by every member for itself. */
static te_rows list_marked(pi_hybrid *h, int32_t l, const pi_cold_member *me, bool guessed, te_ffn_io *io) {
    const int32_t device = h->layer[l].device, n_parts = h->device[device].info.n_parts,
                  n_words = pi_mark_words(h->layer[l].n_cpu, n_parts), n_members = h->s->options.n_threads;
    pi_hybrid_await(h, device, h->device[device].marks, 0, (int64_t)h->n_tok * n_words, number(h, l, PI_COLD),
                    me->marks);
    int32_t *list = guessed ? me->all : me->list;
    const int32_t n = pi_hybrid_list(h, l, me->marks, 0, n_parts, list, me->tokens);
    if (guessed) {
        io->n_of = me->n_of;
        io->place = me->place;
        io->room = pi_hybrid_assign(me, n, n_members);
    }
    if (h->n_tok > 1) io->tokens = me->tokens;
    return (te_rows){me->list, 0, n};
}

/* What a device posts for several tokens is long: each member brings whole tokens' x over, and a share of the marks; all
 * read the same x, and each puts the shares together. Returns the length of the list. */
static int32_t share_input(pi_hybrid *h, te_team *team, int32_t l, const te_ffn *f, te_ffn_io *io) {
    const pi_device_layer *w = &h->layer[l];
    const pi_device_state *d = &h->device[w->device];
    const int32_t n_embd = h->s->model->info.n_embd, n_parts = d->info.n_parts;
    const uint32_t ticket = number(h, l, PI_COLD);
    pi_cold_member *me = &h->member[team->ith];
    float *x = h->member[0].x;
    io->x = x;
    io->packed_once = true;
    for (int32_t t = team->ith; t < h->n_tok; t += team->nth) {
        const int64_t at = (int64_t)t * n_embd;
        pi_hybrid_await(h, w->device, d->published, at, n_embd, ticket, (uint32_t *)(void *)(x + at));
        te_op_ffn_pack_token(h->s->ws, f, io, t);
    }
    pi_hybrid_note(h, team, l, PI_MOMENT_INPUT);
    if (h->masked) {
        const int64_t per_part = pi_part_words(w->n_cpu, n_parts), n_words = per_part * n_parts;
        int64_t p0, p1;
        te_share(team, n_parts, 1, &p0, &p1);
        for (int32_t t = 0; t < h->n_tok; t++) {
            const int64_t at = t * n_words + p0 * per_part;
            pi_hybrid_await(h, w->device, d->marks, at, (p1 - p0) * per_part, ticket, me->marks + at);
        }
        me->n_list = pi_hybrid_list(h, l, me->marks, (int32_t)p0, (int32_t)p1, me->list, me->tokens);
    }
    te_barrier(team);
    int32_t n = 0;
    for (int32_t i = 0; h->masked && i < team->nth; i++) {
        const pi_cold_member *from = &h->member[i];
        memcpy(me->all + n, from->list, sizeof *me->all * (size_t)from->n_list);
        memcpy(me->all_tokens + n, from->tokens, sizeof *me->all_tokens * (size_t)from->n_list);
        n += from->n_list;
    }
    return n;
}

typedef struct answer {
    uint64_t *words;
    int32_t n_embd;
    uint32_t ticket;
} answer;

static void post_sum(void *ctx, int32_t t, int32_t lo, int32_t hi, const float *y) {
    const answer *a = ctx;
    pi_publish_words(a->words, (int64_t)t * a->n_embd + lo, hi - lo, a->ticket,
                     (const uint32_t *)(const void *)(y + lo));
}

static void cold_neurons(pi_hybrid *h, te_team *team, int32_t l) {
    pi_session *s = h->s;
    const pi_model *m = s->model;
    const pi_layer *layer = &m->layer[l];
    const pi_ffn *w = pi_ffn_of(layer);
    const pi_device_layer *d = &h->layer[l];
    const size_t n_embd = (size_t)m->info.n_embd, n_ff = (size_t)m->info.n_ff;
    const pi_cold_member *me = &h->member[team->ith];
    const uint32_t ticket = number(h, l, PI_COLD);
    const bool by_output = !w->down_t.w; /* the whole of down is then multiplied with hidden values */
    const bool adapted = pi_adapts_ffn(layer), by_columns = pi_hybrid_by_columns(h, team, l);
    te_ffn f = pi_ffn_operator(m, w);
    if (by_columns) f.down = (te_mat){0};
    answer to = {h->device[d->device].answer, m->info.n_embd, ticket};
    te_ffn_io io = {.x = me->x, .ldx = n_embd, .n_tok = h->n_tok, .is_packed = true, .fired = pi_fired_of(s, l)};
    if (by_output) {
        pi_keep_hidden(s, team, w, 0, h->n_tok, &io);
        te_barrier(team);
    } else if (adapted) {
        int64_t lo, hi;
        te_share(team, (int64_t)h->n_tok * m->info.n_embd, 16, &lo, &hi);
        memset(h->y + lo, 0, sizeof *h->y * (size_t)(hi - lo));
        io.y = h->y;
        io.ldy = n_embd;
    } else {
        io.sink = post_sum;
        io.sink_ctx = &to;
    }
    if (by_columns) {
        io.hidden = s->up;
        io.ld_hidden = n_ff;
        io.listed = h->listed;
    }
    const bool guessed = pi_hybrid_looks_ahead(h, l);
    if (guessed) {
        pi_hybrid_take_guess(h, team, l);
        pi_hybrid_fetch_ahead(h, team, l, h->device[d->device].published);
    }
    te_rows rows = {d->cold, 0, d->n_cpu};
    if (h->n_tok > 1 && !adapted) {
        const int32_t n = share_input(h, team, l, &f, &io);
        if (h->masked) rows = (te_rows){me->all, 0, n};
        if (h->masked) io.tokens = me->all_tokens;
    } else {
        pi_hybrid_await(h, d->device, h->device[d->device].published, 0, (int64_t)h->n_tok * m->info.n_embd, ticket,
                        (uint32_t *)(void *)me->x);
        pi_hybrid_note(h, team, l, PI_MOMENT_INPUT);
        if (adapted) te_barrier(team); /* members have their own copies of x, but one is read by all */
        pi_adapt_ffn(s, team, layer, h->member[0].x, 0, h->n_tok, &io);
        te_op_ffn_pack(team, s->ws, &f, &io);
        if (guessed) pi_hybrid_fetch_ahead(h, team, l, h->device[d->device].marks);
        if (h->masked) {
            rows = list_marked(h, l, me, guessed, &io);
            if (guessed && team->ith == 0) s->step[l].n_foreseen = pi_hybrid_foreseen(h, l, me);
        }
    }
    const int64_t began = team->ith == 0 ? te_os_now_ns() : 0;
    pi_hybrid_note(h, team, l, PI_MOMENT_LIST);
    te_ffn_counts *c = &s->count[(ptrdiff_t)l * s->options.n_threads + team->ith].ffn;
    te_op_ffn(team, s->ws, &f, rows, h->skip, &io, c);
    if (by_columns) {
        te_barrier(team);
        const te_rows all = {guessed ? me->all : me->list, 0, rows.n};
        te_op_ffn_down(team, s->ws, &w->down_t, all, &io, c);
    }
    if (by_output) {
        te_barrier(team);
        const te_linear out = {.w = w->down, .y = h->y, .ldy = n_embd};
        te_op_linear(team, s->ws, &out, 1, s->up, n_ff, h->n_tok);
        pi_count_down(s, team, l, &w->down);
    }
    if (by_output || adapted) {
        te_barrier(team);
        pi_adapt(s, team, pi_adapter_of(layer, PI_ADAPT_DOWN), s->up, n_ff, h->n_tok, TE_BY_ROWS, h->y, n_embd);
        post_from_cpu(h, team, d->device, l, h->y, ticket);
    }
    pi_hybrid_layer_done(h, team, l, began);
}

static void cpu_step(void *ctx, te_team *team) {
    pi_hybrid *h = ctx;
    pi_session *s = h->s;
    const int32_t n = s->model->info.n_layer;
    int32_t at = pi_hybrid_embeds_first(h) ? h->layer[0].device : -1; /* where x is */
    may_ask = team->ith == 0;
    if (team->ith == 0) {
        h->n_members = team->nth;
        h->last_ns = te_os_now_ns();
    }
    if (at < 0) pi_step_embed(s, team);
    for (int32_t l = 0; l <= n; l++) {
        const int32_t device = pi_hybrid_device_of(h, l), n_host = l < n && device >= 0 ? s->model->layer[l].n_host : 0;
        const bool keeps = l == n && s->options.keep_hidden;
        if (l == n && !h->n_logits && !keeps) break;
        const bool passes = pi_hybrid_passes(h, l), shares = l == n && pi_hybrid_shares_head(h);
        if (passes)
            watch(h, at, l);
        else if (at >= 0 && (device != at || n_host || keeps || shares)) /* shares: all that the helper waits for */
            await_on_cpu(h, team, at, l, s->x);
        if (at >= 0 && (device < 0 || n_host || keeps)) te_barrier(team);
        if (keeps) pi_step_hidden(s, team);
        if (l == n && !h->n_logits) break;
        if (n_host) { /* x passes through here within the layer */
            pi_step_blocks(s, team, l, 0, n_host, 0);
            at = -1;
        }
        if (device >= 0 && device != at && !passes) post_from_cpu(h, team, device, l, s->x, number(h, l, PI_ENTER));
        at = device;
        if (l == n) break;
        s->count[(ptrdiff_t)l * s->options.n_threads + team->ith] = (pi_layer_count){0};
        if (device < 0) {
            if (pi_step_ends_before(s, team, l)) return;
            pi_step_layer(s, team, l);
            if (team->ith == 0) h->last_ns = te_os_now_ns();
            continue;
        }
        if (team->ith == 0) s->step[l] = (pi_layer_step){0};
        if (!n_host) pi_attention_next(team, l);
        if (h->decode && h->layer[l].n_cpu) {
            if (pi_experts_of(&s->model->layer[l]))
                pi_hybrid_cold_experts(h, team, l);
            else
                cold_neurons(h, team, l);
        }
        const pi_layer *layer = &s->model->layer[l];
        if (!layer->n_tail) continue;
        await_on_cpu(h, team, device, l + 1, s->x);
        te_barrier(team);
        pi_step_blocks(s, team, l, layer->n_blocks - layer->n_tail, layer->n_blocks, pi_hybrid_unwanted(h, l));
        at = -1;
    }
    if (at < 0) pi_step_head(s, team);
}

/* ---- what a device's layer did ---- */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Rows that the device read: for several tokens at most so many, since they may share some. */
static void device_rows(const pi_hybrid *h, int32_t l, const uint32_t *count, pi_layer_step *st) {
    const pi_ffn *w = pi_ffn_of(&h->s->model->layer[l]);
    const int32_t n_ff = h->s->model->info.n_ff, n_here = h->decode ? n_ff - h->layer[l].n_cpu : n_ff;
    const int64_t listed = least(count[0], n_here), computed = least(count[1], n_here), fired = least(count[2], n_here);
    const int64_t first = h->decode ? listed : n_here, rest = h->decode && h->skip ? computed : first,
                  down = h->decode && h->skip ? fired : first;
    const int64_t gate_rows = w->gate.w ? first : 0, up_rows = w->gate.w ? rest : first;
    st->n_rows += gate_rows + up_rows + down;
    st->ffn_bytes += gate_rows * (int64_t)pi_row_bytes(&w->gate) + up_rows * (int64_t)pi_row_bytes(&w->up);
    st->ffn_bytes += w->down_t.w ? down * (int64_t)pi_row_bytes(&w->down_t) : pi_mat_bytes(&w->down) / n_ff * n_here;
}

/* The same of a mixture: experts that some token uses, but for silent neurons' rows of a down that is stored by neuron. */
static void device_experts(pi_hybrid *h, int32_t l, const uint32_t *count, pi_layer_step *st) {
    const pi_experts *w = pi_experts_of(&h->s->model->layer[l]);
    const int32_t n_expert = h->s->model->info.n_expert;
    const uint32_t *uses =
        h->device[h->layer[l].device].counts + 3 * (ptrdiff_t)h->s->model->info.n_layer + (ptrdiff_t)l * n_expert;
    const int32_t *place = h->place + (ptrdiff_t)l * n_expert;
    int64_t n = 0; /* experts that were read */
    for (int32_t e = 0; e < n_expert; e++) {
        n += uses[e] && (place[e] >= 0 || !h->decode);
        h->s->uses[(ptrdiff_t)l * n_expert + e] += uses[e];
        st->n_routes += uses[e];
        if (place[e] >= 0) st->n_routes_device += uses[e];
        if (place[e] < 0 && !h->decode) st->n_routes_streamed += uses[e];
    }
    st->n_zero_copy = pi_hybrid_kept(h, l);
    n += st->n_zero_copy;
    for (int32_t e = 0; h->s->fired && e < n_expert; e++)
        h->s->fired[(ptrdiff_t)l * h->s->model->info.n_placed + e] += uses[e];
    const int64_t all = n * w->n_ff, down = w->down_t.w && h->decode ? least(count[2], all) : all;
    st->n_rows += (w->gate.w ? 2 : 1) * all + down;
    st->ffn_bytes += n * ((pi_mat_bytes(&w->gate) + pi_mat_bytes(&w->up)) / w->n_expert) + pi_mat_bytes(&w->router);
    st->ffn_bytes += down * pi_mat_bytes(pi_expert_mat(w, 2)) / ((int64_t)w->n_expert * w->n_ff);
}

static void record(pi_hybrid *h, int32_t l) {
    pi_session *s = h->s;
    const pi_layer *layer = &s->model->layer[l];
    const uint32_t *on_device = h->device[h->layer[l].device].counts + 3 * (ptrdiff_t)l;
    pi_layer_step *st = &s->step[l];
    const int32_t from = pi_hybrid_unwanted(h, l);
    st->n_tokens = h->n_tok - from;
    st->n_sparse = pi_n_sparse(&s->chunk, from);
    const int64_t listed = pi_sum_counts(s, l, h->decode && h->layer[l].n_cpu ? h->n_members : 0, st);
    if (st->n_tokens && pi_experts_of(layer))
        device_experts(h, l, on_device, st);
    else if (st->n_tokens && pi_ffn_of(layer))
        device_rows(h, l, on_device, st);
    st->n_predicted = on_device[0] + listed;
    st->n_computed += on_device[1];
    st->n_active += on_device[2];
    st->n_active_device = on_device[2];
    if (!st->n_sparse) st->n_predicted = st->n_computed = st->n_active = st->n_active_device = 0;
    if (h->masked && st->n_tokens) st->ffn_bytes += pi_predictor_bytes(s->model, pi_ffn_of(layer));
    st->bytes = st->ffn_bytes + pi_bytes_before_ffn(s, l, from);
    if (pi_attention_of(layer) && !st->n_tokens) st->bytes -= pi_attention_query_bytes(layer);
    s->last_bytes += st->bytes;
}

/* ---- a run ---- */

/* The sentence of the first error stays, but one of waiting gives way to what was waited for. */
static void note(pi_status *st, pi_status next, const char *why, char (*problem)[1024]) {
    if (next == PI_OK || (*st != PI_OK && (*st != PI_ERROR_TIMEOUT || next == PI_ERROR_TIMEOUT))) return;
    *st = next;
    strncpy(*problem, why, sizeof *problem - 1);
}

/* Until a prompt's program has ended, or whoever asked for the feed wants that to end; or too long: finish says so. */
static void await_end(pi_hybrid *h, pi_device *dev) {
    enum { LOOK_MS = 50 };
    const int64_t until = te_os_now_ns() + h->wait_ns;
    while (!dev->ops->ended(dev, LOOK_MS) && te_os_now_ns() < until)
        if (pi_step_is_stopped(h->s)) return cancel_all(h);
}

/* Both sides of a step. Whatever happens, no program is left running, and the next step can begin. */
static pi_status run(pi_hybrid *h) {
    pi_session *s = h->s;
    pi_device_part part[PI_MAX_DEVICES];
    char problem[1024] = "";
    pi_status st = PI_OK;
    h->late = h->lost = 0;
    const pi_status before = pi_hybrid_part_launch(h); /* while the device is at it inputs are made */
    note(&st, before, pi_error_message(), &problem);
    pi_hybrid_fill_inputs(h);
    const uint64_t key = pi_program_key(h);
    h->n_runs = key ? h->n_tok : s->chunk.n_runs; /* a recorded one may have as many */
    pi_hybrid_clear_timeline(h);
    h->began_ns = te_os_now_ns();
    for (int32_t i = 0; i < h->n_devices && st == PI_OK; i++) {
        const pi_device_ops *ops = h->device[i].dev->ops;
        part[i] = (pi_device_part){h, i};
        const pi_status launched = ops->launch(h->device[i].dev, pi_hybrid_program, &part[i], key);
        note(&st, launched, ops->error(), &problem);
    }
    if (st == PI_OK)
        te_pool_run(!h->is_whole ? s->pool : h->n_tok > h->max_decode ? h->few : h->caller, cpu_step, h);
    else
        cancel_all(h);
    if (s->is_stopped) cancel_all(h);
    if (h->late) {
        const pi_status late = PI_FAIL(PI_ERROR_TIMEOUT, "device %d did not answer within %g s",
                                       h->device[h->late - 1].of_plan, (double)h->wait_ns * 1e-9);
        note(&st, late, pi_error_message(), &problem);
    }
    for (int32_t k = 0; k < h->n_devices; k++) {
        const int32_t i = h->lost ? (h->lost - 1 + k) % h->n_devices : k;
        const pi_device_ops *ops = h->device[i].dev->ops;
        if (st != PI_OK)
            cancel(h, i); /* it may wait for x of one before it */
        else if (!h->decode && s->asking)
            await_end(h, h->device[i].dev);
        const pi_status finished = ops->finish(h->device[i].dev);
        note(&st, finished, ops->error(), &problem);
    }
    if (s->is_stopped && s->stop_layer > s->model->info.n_layer) s->stop_layer = 1; /* some have counted */
    pi_hybrid_part_went(h, st);
    if (st == PI_OK) return PI_OK;
    /* A program that did not run has not counted its step. */
    for (int32_t i = 0; i < h->n_devices; i++)
        (void)h->device[i].dev->ops->upload(h->device[i].dev, h->device[i].ticket, &h->number, sizeof h->number);
    return PI_FAIL(st, "%s", problem);
}

/* Whether each block of the last layer that a device computes can do without the first tokens' output. */
static bool leaves_out(const pi_hybrid *h) {
    const int32_t l = h->s->model->info.n_layer - 1;
    const pi_layer *layer = &h->s->model->layer[l];
    for (int32_t i = layer->n_host; h->layer[l].device >= 0 && i < layer->n_blocks - layer->n_tail; i++)
        if (layer->block[i].kind->device->tokens == PI_ALL_TOKENS) return false;
    return true;
}

/* As on the CPU; but a prompt's operations on devices are of more than max_decode tokens. */
static int32_t count_unwanted(const pi_hybrid *h) {
    if (h->decode || !leaves_out(h)) return 0;
    const int32_t first = pi_first_wanted(h->s, h->s->model->info.n_layer - 1), least = h->n_tok - h->max_decode - 1;
    return first < h->n_tok && first > least ? least : first;
}

void pi_hybrid_set_run(pi_hybrid *h) {
    const pi_session *s = h->s;
    h->n_tok = s->chunk.n_tok;
    h->n_logits = s->chunk.n_logits;
    h->masked = s->options.sparsity == PI_SPARSITY_PREDICTED && !s->chunk.n_dense;
    h->skip = s->options.sparsity != PI_SPARSITY_DENSE && pi_is_relu(s->model->info.activation);
    h->decode = h->n_tok <= h->max_decode;
    h->n_unwanted = count_unwanted(h);
}

pi_status pi_hybrid_check_process(const pi_hybrid *h) {
    if (h->process_id == te_os_process_id()) return PI_OK;
    return PI_FAIL(PI_ERROR_DEVICE, "a session with layers on a device cannot be used in a forked process");
}

pi_status pi_hybrid_run(pi_hybrid *h) {
    pi_session *s = h->s;
    const pi_model_info *info = &s->model->info;
    PI_TRY(pi_hybrid_check_process(h));
    PI_TRY(pi_hybrid_kv_status(h));
    pi_hybrid_set_run(h);
    PI_TRY(pi_cache_settle(h));
    const bool stays = pi_hybrid_place_logits(h);
    h->number += pi_numbers(info->n_layer);
    PI_TRY(run(h));
    for (int32_t l = 0; l < info->n_layer; l++)
        if (h->layer[l].device >= 0) record(h, l);
    pi_cache_follow(h, h->n_tok, te_os_now_ns() - h->began_ns);
    if (h->head_device >= 0 && h->n_logits) pi_hybrid_give_logits(h, stays);
    return PI_OK;
}
