/* hybrid.c - carries a plan out: opens devices, shares layers out among them, keeps what runs need. */
#include "hybrid.h"

#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_types.h"
#include "cache.h"

/* What a device that answers at all takes for a long prompt's layers; and what a CPU takes that computes most of a large
 * model for such a prompt. */
static const int64_t device_wait_ns = 60000000000, cpu_wait_ns = 600000000000;
enum { MOST_OF_FEW = 8 };

/* ---- which layers lie where ---- */

/* n: of the layer. whole: all of them are on the device. */
static pi_status split_neurons(const pi_plan *p, int32_t l, int32_t n, bool whole, pi_device_layer *d) {
    const size_t n_bytes = sizeof *d->hot * ((size_t)n + 1); /* there may be none */
    d->hot = malloc(n_bytes);
    d->cold = malloc(n_bytes);
    d->cold_blocks = malloc(n_bytes);
    if (!d->hot || !d->cold || !d->cold_blocks)
        return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the neurons of layer %d", l);
    for (int32_t j = 0; j < n; j++) {
        if (whole || pi_is_hot(p, l, j))
            d->hot[d->n_hot++] = j;
        else if (!pi_is_pcie(p, l, j))
            d->cold[d->n_cpu++] = j;
    }
    d->n_cold = d->n_cpu;
    for (int32_t j = 0; !whole && j < n; j++)
        if (pi_is_pcie(p, l, j)) d->cold[d->n_cold++] = j;
    return PI_OK;
}

/* The CPU computes those, too, that the device should have read by zero-copy. */
static void give_to_cpu(pi_device_layer *d) {
    int32_t *all = d->cold_blocks; /* not in use yet */
    for (int32_t k = 0, i = 0, j = d->n_cpu; k < d->n_cold; k++)
        all[k] = j == d->n_cold || (i < d->n_cpu && d->cold[i] < d->cold[j]) ? d->cold[i++] : d->cold[j++];
    d->cold_blocks = d->cold;
    d->cold = all;
    d->n_cpu = d->n_cold;
}

/* The device of this run that a plan's device is: those that the plan puts nothing on are left out. */
static pi_status use_device(pi_hybrid *h, const pi_plan *plan, int32_t of_plan, int32_t *out) {
    *out = -1;
    if (of_plan < 0) return PI_OK;
    if (of_plan >= plan->n_devices || of_plan >= PI_MAX_DEVICES)
        return PI_FAIL(PI_ERROR_ARGUMENT, "the plan names device %d of %d", of_plan, plan->n_devices);
    for (int32_t i = 0; i < h->n_used && *out < 0; i++)
        if (h->device[i].of_plan == of_plan) *out = i;
    if (*out >= 0) return PI_OK;
    *out = h->n_used++;
    h->device[*out].of_plan = of_plan;
    const pi_plan_device *d = &plan->device[of_plan];
    h->device[*out].budget_bytes = d->budget_bytes;
    h->device[*out].held_bytes = d->total_bytes - d->scratch_bytes - d->staging_bytes - d->overhead_bytes;
    return PI_OK;
}

/* What the plan says of experts that the device has not. */
static pi_status copy_kept(const pi_plan *p, int32_t l, pi_device_layer *d) {
    const int32_t *from = p->kept + (ptrdiff_t)l * p->n_kept;
    const size_t n_bytes = sizeof *from * (size_t)p->n_kept;
    if (!from[p->n_kept - 1] || !d->n_cpu) return PI_OK; /* of more not fewer are kept */
    d->kept = malloc(n_bytes);
    if (!d->kept) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the experts of layer %d", l);
    memcpy(d->kept, from, n_bytes);
    return PI_OK;
}

static pi_status place(pi_hybrid *h, const pi_plan *plan) {
    const pi_model_info *i = &h->s->model->info;
    const pi_plan_info *p = &plan->info;
    if (plan->n_layer != i->n_layer || plan->n_placed != i->n_placed)
        return PI_FAIL(PI_ERROR_ARGUMENT, "the plan is for %d layers of %d neurons or experts, the model has %d of %d",
                       plan->n_layer, plan->n_placed, i->n_layer, i->n_placed);
    h->layer = calloc((size_t)i->n_layer, sizeof *h->layer);
    if (!h->layer) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d layers", i->n_layer);
    for (int32_t l = 0; l < i->n_layer; l++) h->layer[l].device = -1;
    for (int32_t l = 0; l < i->n_layer; l++) {
        const pi_plan_layer *at = &plan->layer[l];
        PI_TRY(use_device(h, plan, at->on_device ? at->device : -1, &h->layer[l].device));
        if (h->layer[l].device < 0) continue;
        const pi_layer *layer = &h->s->model->layer[l];
        const bool whole = pi_is_whole_ffn(h->s->model, layer);
        PI_TRY(split_neurons(plan, l, whole ? i->n_ff : pi_n_placed(h->s->model, layer), whole, &h->layer[l]));
        if (pi_experts_of(layer)) PI_TRY(copy_kept(plan, l, &h->layer[l]));
    }
    PI_TRY(use_device(h, plan, p->head_on_device ? p->head_device : -1, &h->head_device));
    h->helper = -1;
    if (!h->s->options.keep_hidden && !h->s->model->layer[i->n_layer - 1].n_tail)
        PI_TRY(use_device(h, plan, plan->helper, &h->helper));
    h->helper_rows = plan->helper_rows;
    h->total_bytes = p->attention_bytes + p->norm_bytes + p->predictor_bytes + p->ffn_bytes + p->head_bytes;
    return PI_OK;
}

pi_status pi_hybrid_place(pi_session *s, const pi_plan *plan, pi_hybrid **out) {
    *out = NULL;
    pi_hybrid *h = calloc(1, sizeof *h);
    if (!h) return PI_FAIL(PI_ERROR_MEMORY, "out of memory opening a session");
    h->s = s;
    const pi_status st = place(h, plan);
    if (st != PI_OK) {
        pi_hybrid_close(h);
        return st;
    }
    *out = h;
    return PI_OK;
}

/* ---- opening ---- */

/* A piece that the driver refuses does not keep it from the others. */
static void map_piece(pi_hybrid *h, pi_device *dev, const void *p, size_t n_bytes) {
    if (dev->ops->map(dev, p, n_bytes) != PI_OK) h->unmapped_bytes += n_bytes;
}

/* So that the device reads cold weights where they are, as far as it can; a prompt's others pass through a small buffer. */
static void map_weights(pi_hybrid *h, int32_t device) {
    const pi_model *m = h->s->model;
    pi_device *dev = h->device[device].dev;
    /* Of copied weights nothing is left in the file that a kernel reads. */
    for (int32_t i = 0; m->options.use_mmap && i < te_gguf_n_parts(m->file->gguf); i++) {
        size_t n_bytes = 0;
        const void *p = te_gguf_mapping(m->file->gguf, i, &n_bytes);
        map_piece(h, dev, p, n_bytes);
    }
    for (int32_t l = 0; l < m->info.n_layer; l++)
        if (m->layer[l].own.p && h->layer[l].device == device)
            map_piece(h, dev, m->layer[l].own.p, m->layer[l].own.n_bytes);
}

static bool reads_experts(pi_device *dev, const pi_experts *w) {
    return (!w->gate.w || dev->ops->zero_copy(dev, &w->gate)) && dev->ops->zero_copy(dev, &w->up) && w->down.w &&
           dev->ops->zero_copy(dev, &w->down);
}

/* What the plan says is read by zero-copy is, where the device can. */
static void settle_zero_copy(pi_hybrid *h) {
    for (int32_t l = 0; l < h->s->model->info.n_layer; l++) {
        pi_device_layer *d = &h->layer[l];
        const pi_experts *e = pi_experts_of(&h->s->model->layer[l]);
        if (d->device >= 0 && d->kept && !reads_experts(h->device[d->device].dev, e)) {
            free(d->kept);
            d->kept = NULL;
        }
        if (d->device < 0 || d->n_cpu == d->n_cold) continue;
        const pi_layer *layer = &h->s->model->layer[l];
        const pi_ffn *w = pi_ffn_of(layer);
        pi_device *dev = h->device[d->device].dev;
        if (!w || pi_adapts_ffn(layer) || (w->gate.w && !dev->ops->zero_copy(dev, &w->gate)) ||
            !dev->ops->zero_copy(dev, &w->up) || !w->down_t.w || !dev->ops->zero_copy(dev, &w->down_t))
            give_to_cpu(d);
    }
}

static pi_status open_device(pi_hybrid *h, const pi_device_ops *ops, const pi_session_options *o) {
    pi_device_state *d = &h->device[h->n_devices];
    const int32_t index = o->device_index ? o->device_index[d->of_plan] : d->of_plan;
    const pi_status st = ops->open(index, d->budget_bytes, &d->dev);
    if (st != PI_OK) return PI_FAIL(st, "%s", ops->error());
    h->n_devices++;
    d->dev->wait_ns = o->wait_ms ? h->wait_ns : cpu_wait_ns;
    d->dev->ops->get_info(d->dev, &d->info);
    if (d->info.max_decode < h->max_decode) h->max_decode = d->info.max_decode;
    return PI_OK;
}

/* Hands out parts of one allocation, each on a cache line of its own; with base NULL it only measures. */
static void *carve(char *base, size_t *used, size_t rows, size_t cols) {
    const size_t at = *used, n = pi_mul(pi_mul(rows, cols), sizeof(float)); /* all are of four bytes */
    *used = pi_add(at, n == SIZE_MAX ? n : (n + 127) / 128 * 128);
    return base ? base + at : NULL;
}

static size_t lay_out(pi_hybrid *h, char *base) {
    const pi_model_info *i = &h->s->model->info;
    const size_t n_embd = (size_t)i->n_embd, n_ff = (size_t)i->n_ff, n_tok = (size_t)h->max_decode,
                 n_threads = (size_t)h->s->options.n_threads;
    int32_t n_words = 0;
    for (int32_t l = 0; l < i->n_layer; l++) {
        const pi_device_layer *d = &h->layer[l];
        const bool marks = d->device >= 0 && pi_ffn_of(&h->s->model->layer[l]);
        const int32_t n = !marks ? 0 : pi_mark_words(d->n_cpu, h->device[d->device].info.n_parts);
        if (n > n_words) n_words = n;
    }
    size_t used = 0;
    h->y = carve(base, &used, n_tok, n_embd);
    h->listed = carve(base, &used, 1, n_ff);
    h->n_routes = carve(base, &used, 1, (size_t)i->n_layer);
    for (int32_t k = 0; k < h->s->options.n_threads; k++) {
        pi_cold_member *m = &h->member[k];
        m->x = carve(base, &used, n_tok, n_embd);
        m->marks = carve(base, &used, n_tok, (size_t)n_words);
        m->ahead = carve(base, &used, 1, (size_t)n_words);
        m->guessed = carve(base, &used, 1, n_ff);
        m->list = carve(base, &used, 1, n_ff + 2 * n_threads);
        m->n_of = carve(base, &used, 1, n_threads);
        m->place = carve(base, &used, 1, n_ff + 2 * n_threads);
        m->tokens = carve(base, &used, 1, n_ff);
        m->all = carve(base, &used, 1, n_ff);
        m->rest = carve(base, &used, 1, n_ff);
        m->all_tokens = carve(base, &used, 1, n_ff);
    }
    return used;
}

static pi_status reserve_members(pi_hybrid *h) {
    h->member = calloc((size_t)h->s->options.n_threads, sizeof *h->member);
    if (h->member) h->memory_bytes = lay_out(h, NULL);
    h->memory = h->member ? te_os_alloc(h->memory_bytes) : NULL;
    if (!h->memory) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for lists of neurons");
    (void)lay_out(h, h->memory);
    return PI_OK;
}

static bool is_whole(const pi_hybrid *h) {
    const pi_model *m = h->s->model;
    bool whole = pi_hybrid_is_resident(h) && h->head_device >= 0 && !h->s->options.keep_hidden;
    for (int32_t l = 0; l < m->info.n_layer; l++) whole &= !m->layer[l].n_host && !m->layer[l].n_tail;
    return whole;
}

int32_t pi_hybrid_device_of(const pi_hybrid *h, int32_t l) {
    return l < h->s->model->info.n_layer ? h->layer[l].device : h->head_device;
}

bool pi_hybrid_passes(const pi_hybrid *h, int32_t l) {
    const pi_model *m = h->s->model;
    const int32_t to = pi_hybrid_device_of(h, l), from = l > 0 ? h->layer[l - 1].device : -1;
    if (from < 0 || to < 0 || from == to || m->layer[l - 1].n_tail) return false;
    return l < m->info.n_layer ? !m->layer[l].n_host : !h->s->options.keep_hidden;
}

/* Of how many tokens, at most n, products read the layer's matrices as they are, which they do with experts of any format;
 * 0: not of many. */
static int32_t reads_as_is(const pi_layer *layer, int32_t n) {
    const pi_experts *e = pi_experts_of(layer);
    if (layer->adapter || (e && (!e->gate.w || e->on_input))) return 0;
    for (int32_t i = 0; i < layer->n_blocks; i++) {
        pi_block b = layer->block[i];
        pi_block_mat mats[PI_BLOCK_MATS];
        const int32_t n_mats = b.kind->matrices(&b, mats);
        for (int32_t k = 0; k < n_mats; k++) {
            const te_mat *m = mats[k].mat;
            if (!m->w || mats[k].use == PI_MAT_PREDICTOR || mats[k].use == PI_MAT_EXPERTS) continue;
            const bool is_router = b.kind == &pi_experts_kind && m == &b.experts.router;
            if (is_router && m->type == TE_F32) continue;
            const int32_t of_type = pi_space_wide(m->type);
            n = n < of_type ? n : of_type;
        }
    }
    return n;
}

/* Tokens that are one program: more than PI_MANY where all layers' products of so many are faster together. splits: more are
 * several; not where there are no kernels for many. */
static int32_t most_mixed(const pi_hybrid *h, bool *splits) {
    const pi_model *m = h->s->model;
    int32_t n = m->info.n_expert ? PI_WIDE_EXPERTS : PI_WIDE;
    *splits = m->info.n_expert > 0;                /* of more tokens all experts are read as a prompt's are */
    if (*splits && m->latent_rank) return PI_MANY; /* not measured */
    for (int32_t l = 0; l < m->info.n_layer; l++)
        if (!(n = reads_as_is(&m->layer[l], n))) return PI_MANY;
    for (int32_t i = 0; i < h->n_devices; i++) n = n < h->device[i].info.max_wide ? n : h->device[i].info.max_wide;
    *splits |= n > PI_MANY;
    return n;
}

pi_status pi_hybrid_load(pi_hybrid *h, const pi_session_options *o) {
    const pi_device_ops *ops = NULL;
    PI_TRY(pi_device_find(o->device, &ops));
    h->process_id = te_os_process_id();
    h->ld_table = (o->n_ctx + PI_KV_BLOCK - 1) / PI_KV_BLOCK;
    h->max_logits = (int32_t)pi_space_rows((uint64_t)o->n_batch, (uint64_t)h->s->model->info.n_vocab);
    h->max_rows =
        (int32_t)pi_space_kept_rows((uint64_t)h->max_logits, (uint64_t)o->n_seq, (uint64_t)h->s->model->info.n_vocab);
    h->max_decode = 32; /* tokens of a list have a bit each */
    h->wait_ns = o->wait_ms ? (int64_t)o->wait_ms * 1000000 : device_wait_ns;
    h->progress = o->progress;
    h->progress_ctx = o->progress_ctx;
    while (h->n_devices < h->n_used) PI_TRY(open_device(h, ops, o));
    h->max_mixed = most_mixed(h, &h->splits);
    h->end_layer = h->s->model->info.n_layer;
    PI_TRY(pi_cache_open(h, !o->frozen_experts));
    for (int32_t i = 0; i < h->n_devices && !o->no_pinning; i++) map_weights(h, i);
    settle_zero_copy(h);
    for (int32_t i = 0; i < h->n_devices; i++) PI_TRY(pi_hybrid_upload(h, i));
    PI_TRY(reserve_members(h));
    h->is_whole = is_whole(h);
    PI_TRY(te_pool_new(1, &h->caller));
    const int32_t half = h->s->options.n_threads / 2;
    PI_TRY(te_pool_new(half < 1 ? 1 : half > MOST_OF_FEW ? MOST_OF_FEW : half, &h->few));
    if (o->timeline) PI_TRY(pi_hybrid_start_timeline(h));
    h->max_part = pi_hybrid_most_part(h);
    if (h->progress && h->progress(h->progress_ctx, h->total_bytes, h->total_bytes) != 0)
        return PI_FAIL(PI_ERROR_DEVICE, "bringing weights to a device was stopped");
    return PI_OK;
}

void pi_hybrid_close(pi_hybrid *h) {
    if (!h) return;
    te_pool_free(h->caller);
    te_pool_free(h->few);
    te_os_free(h->memory, h->memory_bytes);
    free(h->member);
    free(h->moment);
    free(h->part);
    for (int32_t i = 0; i < h->n_devices && h->process_id == te_os_process_id(); i++)
        h->device[i].dev->ops->close(h->device[i].dev);
    for (int32_t l = 0; h->layer && l < h->s->model->info.n_layer; l++) {
        free(h->layer[l].hot);
        free(h->layer[l].cold);
        free(h->layer[l].cold_blocks);
        free(h->layer[l].kept);
    }
    free(h->layer);
    pi_cache_close(h);
    free(h);
}

uint64_t pi_hybrid_bytes(const pi_hybrid *h) {
    uint64_t n_bytes = 0;
    for (int32_t i = 0; i < h->n_devices; i++) {
        pi_device_info info;
        h->device[i].dev->ops->get_info(h->device[i].dev, &info);
        n_bytes += info.used_bytes;
    }
    return n_bytes;
}

bool pi_hybrid_loads_nothing(const pi_hybrid *h) {
    for (int32_t l = 0; l < h->s->model->info.n_layer; l++)
        if (h->layer[l].device >= 0 && h->layer[l].n_cold) return false;
    return true;
}

bool pi_hybrid_is_resident(const pi_hybrid *h) {
    for (int32_t l = 0; l < h->s->model->info.n_layer; l++)
        if (h->layer[l].device < 0) return false;
    return pi_hybrid_loads_nothing(h);
}

int32_t pi_hybrid_zero_copy(const pi_hybrid *h) {
    int32_t n = 0;
    for (int32_t l = 0; l < h->s->model->info.n_layer; l++) n += h->layer[l].n_cold - h->layer[l].n_cpu;
    return n;
}

/* ---- what a session changes ---- */

pi_status pi_hybrid_check_sparsity(const pi_hybrid *h, int32_t sparsity) {
    for (int32_t l = 0; sparsity == PI_SPARSITY_PREDICTED && l < h->s->model->info.n_layer; l++)
        if (h->layer[l].device >= 0 && !h->layer[l].has_predictor)
            return PI_FAIL(PI_ERROR_UNSUPPORTED,
                           "the session was opened without predictors on its devices: sparsity \"predicted\" must be "
                           "asked for when it is opened");
    return PI_OK;
}

static pi_status send_thresholds(pi_hybrid *h, const float *threshold) {
    for (int32_t i = 0; i < h->n_devices; i++) {
        pi_device *dev = h->device[i].dev;
        const pi_status st = dev->ops->upload(dev, h->device[i].threshold, threshold,
                                              sizeof *threshold * (size_t)h->s->model->info.n_layer);
        if (st != PI_OK) return PI_FAIL(st, "%s", dev->ops->error());
    }
    return PI_OK;
}

pi_status pi_hybrid_set_thresholds(pi_hybrid *h, const float *threshold) {
    const pi_status st = send_thresholds(h, threshold);
    if (st == PI_OK) return PI_OK;
    char problem[512] = "";
    strncpy(problem, pi_error_message(), sizeof problem - 1);
    (void)send_thresholds(h, h->s->threshold);
    return PI_FAIL(st, "%s", problem);
}

/* ---- neurons that fired ---- */

/* Counts of n neurons on a device, added to those of their ids, or (count NULL) set to 0. */
static pi_status move_fired(pi_device *dev, uint32_t *on_device, const int32_t *ids, int32_t n, uint32_t *count) {
    if (!on_device) return PI_OK;
    uint32_t *here = calloc((size_t)n, sizeof *here);
    if (!here) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for the counts of %d neurons", n);
    const size_t n_bytes = sizeof *here * (size_t)n;
    const pi_status st =
        count ? dev->ops->download(dev, here, on_device, n_bytes) : dev->ops->upload(dev, on_device, here, n_bytes);
    for (int32_t k = 0; count && st == PI_OK && k < n; k++) count[ids[k]] += here[k];
    free(here);
    return st == PI_OK ? PI_OK : PI_FAIL(st, "%s", dev->ops->error());
}

static pi_status layer_fired(pi_hybrid *h, int32_t l, uint32_t *count) {
    const pi_device_layer *d = &h->layer[l];
    if (d->device < 0) return PI_OK;
    pi_device *dev = h->device[d->device].dev;
    PI_TRY(move_fired(dev, d->fired_hot, d->hot, d->n_hot, count));
    return move_fired(dev, d->fired_cold, d->cold, d->n_cold, count);
}

pi_status pi_hybrid_add_fired(pi_hybrid *h, int32_t l, uint32_t *count) { return layer_fired(h, l, count); }

pi_status pi_hybrid_reset_fired(pi_hybrid *h) {
    for (int32_t l = 0; l < h->s->model->info.n_layer; l++) PI_TRY(layer_fired(h, l, NULL));
    return PI_OK;
}

/* ---- K and V, and states, on devices ---- */

static bool kv_has(void *ctx, int32_t l) {
    const pi_hybrid *h = ctx;
    return h->layer[l].device >= 0 && !h->s->model->layer[l].n_host;
}
static char *kv_pool(const pi_hybrid *h, int32_t l, bool is_v) {
    return is_v ? h->layer[l].pool_v : h->layer[l].pool_k;
}
static pi_device *kv_device(const pi_hybrid *h, int32_t l) { return h->device[h->layer[l].device].dev; }
static void kv_note(pi_hybrid *h, pi_status st) {
    if (h->kv_status == PI_OK) h->kv_status = st;
}
static void kv_read(void *ctx, int32_t l, bool is_v, size_t at, void *to, size_t n_bytes) {
    pi_hybrid *h = ctx;
    pi_device *dev = kv_device(h, l);
    kv_note(h, dev->ops->download(dev, to, kv_pool(h, l, is_v) + at, n_bytes));
}
static void kv_write(void *ctx, int32_t l, bool is_v, size_t at, const void *from, size_t n_bytes) {
    pi_hybrid *h = ctx;
    pi_device *dev = kv_device(h, l);
    kv_note(h, dev->ops->upload(dev, kv_pool(h, l, is_v) + at, from, n_bytes));
}
static void kv_copy(void *ctx, int32_t l, bool is_v, size_t to, size_t from, size_t n_bytes) {
    pi_hybrid *h = ctx;
    pi_device *dev = kv_device(h, l);
    char *pool = kv_pool(h, l, is_v);
    const pi_status st = dev->ops->copy(dev, pool + to, pool + from, n_bytes);
    kv_note(h, st);
    h->kv_lost |= st != PI_OK; /* a sequence holds the block that was to be its copy */
}
static pi_status kv_status(void *ctx) { return pi_hybrid_kv_status(ctx); }

pi_status pi_hybrid_kv_status(pi_hybrid *h) {
    const pi_status st = h->kv_status;
    if (h->kv_lost)
        return PI_FAIL(PI_ERROR_DEVICE, "K and V, or states, were lost on a device: the session must be opened anew");
    h->kv_status = PI_OK;
    return st == PI_OK ? PI_OK : PI_FAIL(st, "K and V, or states, could not be copied from, to or on a device");
}

static bool states_have(void *ctx, int32_t l) {
    const pi_hybrid *h = ctx;
    return h->layer[l].device >= 0 && pi_recurrent_on_device(&h->s->model->layer[l]);
}
static void states_copy(void *ctx, int32_t to, int32_t from) {
    pi_hybrid *h = ctx;
    for (int32_t i = 0; i < h->n_devices; i++) {
        const pi_device_state *d = &h->device[i];
        const size_t n = d->state_floats;
        if (!n) continue;
        const pi_status st =
            d->dev->ops->copy(d->dev, d->states + n * (size_t)to, d->states + n * (size_t)from, n * sizeof(float));
        kv_note(h, st);
        h->kv_lost |= st != PI_OK;
    }
}
static float *state_at(const pi_hybrid *h, int32_t l, int32_t place) {
    const pi_device_state *d = &h->device[h->layer[l].device];
    return d->states + d->state_floats * (size_t)place + h->layer[l].recurrent.at;
}
static size_t state_bytes(const pi_hybrid *h, int32_t l) {
    return pi_recurrent_floats(&pi_recurrent_of(&h->s->model->layer[l])->recurrent) * sizeof(float);
}
static void states_read(void *ctx, int32_t l, int32_t place, void *to) {
    pi_hybrid *h = ctx;
    pi_device *dev = kv_device(h, l);
    kv_note(h, dev->ops->download(dev, to, state_at(h, l, place), state_bytes(h, l)));
}
static void states_write(void *ctx, int32_t l, int32_t place, const void *from) {
    pi_hybrid *h = ctx;
    pi_device *dev = kv_device(h, l);
    kv_note(h, dev->ops->upload(dev, state_at(h, l, place), from, state_bytes(h, l)));
}

pi_kv_device pi_hybrid_kv(pi_hybrid *h) {
    return (pi_kv_device){
        h, kv_has, kv_read, kv_write, kv_copy, kv_status, {h, states_have, states_copy, states_read, states_write}};
}
