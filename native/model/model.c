/* model.c - opening a model: hyperparameters, activation, loading in steps. */
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../vendor/core/te_os.h"
#include "../../vendor/core/te_quant.h"
#include "../../vendor/core/te_types.h"
#include "keys.h"

enum { MAX_DIM = 1 << 20, MAX_LAYERS = 1024 };

pi_model_options pi_model_defaults(void) {
    return (pi_model_options){
        .activation = PI_ACTIVATION_AUTO, .predictor = PI_PREDICTOR_AUTO, .predictor_type = -1, .use_mmap = 1};
}

static pi_status read_activation(pi_model *m) {
    static const struct {
        const char *name;
        int32_t value;
    } names[] = {{"relu", PI_ACTIVATION_RELU},  {"drelu", PI_ACTIVATION_DRELU}, {"silu", PI_ACTIVATION_SILU},
                 {"swish", PI_ACTIVATION_SILU}, {"gelu", PI_ACTIVATION_GELU},   {"gelu_tanh", PI_ACTIVATION_GELU_TANH},
                 {"relu2", PI_ACTIVATION_RELU2}};
    const te_gguf *g = m->file->gguf;
    m->info.activation = te_gguf_is_powerinfer(g) ? m->arch->sparse : m->arch->dense;
    te_str text = {NULL, 0};
    bool found = false;
    PI_TRY(te_gguf_get_str(g, "powerinfer.hidden_act", &text, &found));
    if (found) {
        size_t i = 0;
        while (i < sizeof names / sizeof *names && !te_str_is(text, names[i].name)) i++;
        if (i == sizeof names / sizeof *names)
            return PI_FAIL(PI_ERROR_UNSUPPORTED,
                           "powerinfer.hidden_act is \"%.*s\"; relu, drelu, relu2, silu, gelu and gelu_tanh are known",
                           (int)(text.n < 40 ? text.n : 40), text.p);
        m->info.activation = names[i].value;
    }
    if (m->options.activation != PI_ACTIVATION_AUTO) m->info.activation = m->options.activation;
    if (m->info.activation == PI_ACTIVATION_DRELU && !m->arch->gated)
        return PI_FAIL(m->options.activation == PI_ACTIVATION_DRELU ? PI_ERROR_ARGUMENT : PI_ERROR_FORMAT,
                       "drelu needs a gate, and %s has none", m->arch->name);
    PI_TRY(te_gguf_get_f32(g, "powerinfer.hidden_act_threshold", &m->info.activation_threshold, NULL));
    if (!(m->info.activation_threshold >= 0) || !isfinite(m->info.activation_threshold))
        return PI_FAIL(PI_ERROR_FORMAT, "powerinfer.hidden_act_threshold is %g, must be at least 0",
                       (double)m->info.activation_threshold);
    if (m->info.activation_threshold > 0 && m->info.activation != PI_ACTIVATION_RELU)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "powerinfer.hidden_act_threshold is %g, which only relu can have",
                       (double)m->info.activation_threshold);
    return PI_OK;
}

static int32_t largest(const int32_t *of, int32_t n) {
    int32_t most = of[0];
    for (int32_t i = 1; i < n; i++)
        if (of[i] > most) most = of[i];
    return most;
}

/* Where layers differ: how many neurons and key/value heads each has. The model's own numbers are the largest. */
static pi_status read_layers(pi_model *m) {
    const te_gguf *g = m->file->gguf;
    const char *arch = m->arch->name;
    pi_model_info *c = &m->info;
    bool has_ff = false, has_kv = false;
    const size_t n = sizeof(int32_t) * (size_t)c->n_layer;
    m->n_ff = malloc(n);
    m->n_head_kv = malloc(n);
    if (!m->n_ff || !m->n_head_kv) return PI_FAIL(PI_ERROR_MEMORY, "out of memory for %d layers", c->n_layer);
    for (int32_t i = 0; i < c->n_layer; i++) m->n_head_kv[i] = c->n_head;
    PI_TRY(pi_key_each(g, arch, "feed_forward_length", c->n_layer, 1, MAX_DIM, m->n_ff, &has_ff));
    PI_TRY(pi_key_each(g, arch, "attention.head_count_kv", c->n_layer, 1, c->n_head, m->n_head_kv, &has_kv));
    if (!has_ff) return PI_FAIL(PI_ERROR_FORMAT, "the file has no key %s.feed_forward_length", arch);
    for (int32_t i = 0; i < c->n_layer; i++)
        if (c->n_head % m->n_head_kv[i])
            return PI_FAIL(PI_ERROR_FORMAT, "%d heads cannot share %d key/value heads evenly", c->n_head,
                           m->n_head_kv[i]);
    c->n_ff = largest(m->n_ff, c->n_layer);
    c->n_head_kv = largest(m->n_head_kv, c->n_layer);
    return PI_OK;
}

static pi_status read_ropes(pi_model *m) {
    const te_gguf *g = m->file->gguf;
    const pi_arch *a = m->arch;
    const pi_model_info *c = &m->info;
    static const char *const by_length[] = {"rope_factors_short.weight", "rope_factors_long.weight"};
    const bool is_long = te_gguf_find_tensor(g, by_length[1]) != NULL;
    int64_t n_orig = c->n_ctx_train;
    PI_TRY(pi_key_i64(g, a->name, "rope.scaling.original_context_length", 1, INT32_MAX, &n_orig, NULL));
    m->n_ctx_orig = (int32_t)n_orig;
    pi_rope_kind kind = a->rope;
    bool has_rope = true;
    if (a->rope_unless) PI_TRY(pi_key_bool(g, a->name, "rope.scaling.finetuned", &has_rope));
    if (!has_rope) kind = PI_ROPE_NONE;
    m->n_ropes = kind == PI_ROPE_NONE ? 0 : is_long ? 2 : 1;
    m->has_long_rope = m->n_ropes == 2;
    if (m->has_long_rope && (a->window_rope || !te_gguf_find_tensor(g, by_length[0])))
        return PI_FAIL(PI_ERROR_FORMAT, "the file has %s, but not %s, or it is a %s model", by_length[1], by_length[0],
                       a->name);
    PI_TRY(pi_rope_init(&m->rope[0], kind, g, a->name, c->n_embd_head, c->n_ctx_train, a->yarn_exact,
                        m->has_long_rope ? by_length[0] : "rope_freqs.weight"));
    if (m->has_long_rope)
        PI_TRY(
            pi_rope_init(&m->rope[1], kind, g, a->name, c->n_embd_head, c->n_ctx_train, a->yarn_exact, by_length[1]));
    if (a->norm_after_rope && m->rope[0].magnitude != 1)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "RoPE that changes the length of keys in front of their norm (%s)",
                       a->name);
    memcpy(m->info.rope, m->rope[0].text, sizeof m->info.rope);
    return PI_OK;
}

/* A key that must be a positive number. */
static pi_status read_scale(const pi_model *m, const char *name, float *out) {
    PI_TRY(pi_key_f32(m->file->gguf, m->arch->name, name, out, NULL));
    if (!(*out > 0) || !isfinite(*out))
        return PI_FAIL(PI_ERROR_FORMAT, "%s.%s is %g, must be positive", m->arch->name, name, (double)*out);
    return PI_OK;
}

static pi_status read_scales(pi_model *m) {
    const pi_arch *a = m->arch;
    float residual = 1;
    m->embd_scale = a->scaled_embd ? sqrtf((float)m->info.n_embd) : 1;
    /* Norms of latents (q_a, kv_a) have none given in DeepSeek's own code, nor in transformers' of V2, V3, Kimi K2 and
     * GLM 4.7 Flash: it is 1e-6, whatever rms_norm_eps is, which a file's key is made of (GLM 4.7 Flash's is 1e-5). */
    m->inner_eps = m->latent_rank ? 1e-6F : m->norm_eps;
    m->logit_scale = 1;
    if (a->logit_scale) PI_TRY(read_scale(m, "logit_scale", &m->logit_scale));
    if (a->warm_queries) PI_TRY(read_scale(m, "attention.temperature_scale", &m->temperature));
    if (!a->scales) return PI_OK;
    m->score_scale = 1 / sqrtf((float)m->info.n_embd_head);
    PI_TRY(read_scale(m, "attention.scale", &m->score_scale));
    PI_TRY(read_scale(m, "embedding_scale", &m->embd_scale));
    PI_TRY(read_scale(m, "residual_scale", &residual));
    PI_TRY(read_scale(m, "logit_scale", &m->logit_scale));
    m->logit_scale = 1 / m->logit_scale;
    /* What blocks add is multiplied by `residual`. The whole stream divided by it says the same to the norms that read it. */
    m->embd_scale /= residual;
    m->norm_eps /= residual * residual;
    return PI_OK;
}

/* Lengths of latent attention. Keys and values are of what a row of the pool holds, those of a head have names of their
 * own; files from before that have a head's under the first names. */
static pi_status read_latent(pi_model *m) {
    enum { MOST = 4096 };
    const te_gguf *g = m->file->gguf;
    const char *a = m->arch->name;
    pi_model_info *c = &m->info;
    int32_t n_rot;
    int64_t key_length = 0, value_length = 0, key = 0, value = 0;
    PI_TRY(pi_key_need_i32(g, a, "attention.kv_lora_rank", 1, MOST, &m->latent_rank));
    PI_TRY(pi_key_need_i32(g, a, "rope.dimension_count", 2, MOST, &n_rot));
    const int32_t row = m->latent_rank + n_rot;
    PI_TRY(pi_key_i64(g, a, "attention.key_length", 1, 2 * MOST, &key_length, NULL));
    PI_TRY(pi_key_i64(g, a, "attention.value_length", 1, MOST, &value_length, NULL));
    PI_TRY(pi_key_i64(g, a, "attention.key_length_mla", 1, MOST, &key, NULL));
    PI_TRY(pi_key_i64(g, a, "attention.value_length_mla", 1, MOST, &value, NULL));
    if (!key != !value)
        return PI_FAIL(PI_ERROR_FORMAT, "of %s.attention.key_length_mla and value_length_mla only one is there", a);
    if (key && (key_length != row || value_length != m->latent_rank))
        return PI_FAIL(
            PI_ERROR_FORMAT,
            "key length %lld and value length %lld are not those of a latent of %d values and %d rotated ones",
            (long long)key_length, (long long)value_length, m->latent_rank, n_rot);
    m->head_key = (int32_t)(key ? key : key_length);
    m->head_value = (int32_t)(value ? value : value_length);
    if (m->head_key <= n_rot || m->head_value < 1)
        return PI_FAIL(PI_ERROR_FORMAT, "a head's key has %d values, of which %d are rotated, its value %d",
                       m->head_key, n_rot, m->head_value);
    if (m->head_key > row || m->head_value > row)
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "a head's key of %d values or value of %d is longer than the %d values that are kept of a token",
                       m->head_key, m->head_value, row);
    c->n_head_kv = 1;
    c->n_embd_head = row;
    if ((int64_t)c->n_head * row > MAX_DIM)
        return PI_FAIL(PI_ERROR_FORMAT, "%d heads of %d values are more than %d", c->n_head, row, MAX_DIM);
    return PI_OK;
}

/* Lengths of ordinary attention. */
static pi_status read_heads(pi_model *m) {
    const te_gguf *g = m->file->gguf;
    const pi_arch *a = m->arch;
    pi_model_info *c = &m->info;
    int64_t key_length = 0, value_length;
    PI_TRY(pi_key_i64(g, a->name, "attention.key_length", 1, 4096, &key_length, NULL));
    if (!key_length) {
        if (c->n_embd % c->n_head)
            return PI_FAIL(PI_ERROR_FORMAT, "embedding length %d is not a multiple of %d heads", c->n_embd, c->n_head);
        key_length = c->n_embd / c->n_head;
    }
    value_length = key_length;
    PI_TRY(pi_key_i64(g, a->name, "attention.value_length", 1, 4096, &value_length, NULL));
    if (value_length != key_length)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "key length %lld and value length %lld differ", (long long)key_length,
                       (long long)value_length);
    c->n_embd_head = (int32_t)key_length;
    if (a->layers_differ) {
        int64_t near = key_length, near_v = near;
        PI_TRY(pi_key_i64(g, a->name, "attention.key_length_swa", 1, key_length, &near, NULL));
        near_v = near;
        PI_TRY(pi_key_i64(g, a->name, "attention.value_length_swa", 1, key_length, &near_v, NULL));
        if (near_v != near)
            return PI_FAIL(PI_ERROR_UNSUPPORTED, "key length %lld and value length %lld of layers with a window differ",
                           (long long)near, (long long)near_v);
        m->n_embd_head_window = (int32_t)near;
    }
    if ((int64_t)c->n_head * key_length > MAX_DIM)
        return PI_FAIL(PI_ERROR_FORMAT, "%d heads of %lld values are more than %d", c->n_head, (long long)key_length,
                       MAX_DIM);
    return PI_OK;
}

/* A model of the first layer behind the others, which is of the last one's kind but attends. */
static pi_status become_head(pi_model *m) {
    pi_model_info *c = &m->info;
    if (!m->n_unused_layers)
        return PI_FAIL(PI_ERROR_UNSUPPORTED,
                       "the file has no layer that guesses at further tokens (%s.nextn_predict_layers)", m->arch->name);
    m->first_layer = c->n_layer;
    c->n_layer = 1;
    c->n_layer_dense = 0;
    if (m->use) m->use[0] = PI_LAYER_ATTENDS;
    return PI_OK;
}

/* OPT files carry no epsilon (the original computes with 0, a bug); 1e-5 is what the models were trained with. */
static pi_status read_epsilon(pi_model *m) {
    const te_gguf *g = m->file->gguf;
    const pi_arch *a = m->arch;
    bool found = false;
    m->norm_eps = 1e-5F;
    PI_TRY(pi_key_f32(g, a->name, a->layer_norm ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon",
                      &m->norm_eps, &found));
    if (!found && a->one_block) /* Nemotron-H's files have the other's name */
        PI_TRY(pi_key_f32(g, a->name, "attention.layer_norm_epsilon", &m->norm_eps, &found));
    if (!found && !a->learned_pos)
        return PI_FAIL(PI_ERROR_FORMAT, "the file has no key %s.attention.layer_norm_%sepsilon", a->name,
                       a->layer_norm ? "" : "rms_");
    if (!(m->norm_eps >= 0) || !isfinite(m->norm_eps))
        return PI_FAIL(PI_ERROR_FORMAT, "the norm's epsilon is %g", (double)m->norm_eps);
    return PI_OK;
}

/* The first two rows of OPT's position table are never used, so a table of 2050 rows serves 2048 positions. */
static pi_status read_learned_positions(pi_model *m) {
    const te_gguf_tensor *pos = te_gguf_find_tensor(m->file->gguf, "position_embd.weight");
    if (!pos) return PI_FAIL(PI_ERROR_FORMAT, "the file has no tensor position_embd.weight");
    if (pos->ne[1] <= m->arch->pos_offset || pos->ne[1] > 1 << 24)
        return PI_FAIL(PI_ERROR_FORMAT, "position_embd.weight has %lld rows, at least %d are needed",
                       (long long)pos->ne[1], m->arch->pos_offset + 1);
    m->info.n_ctx_train = (int32_t)pos->ne[1] - m->arch->pos_offset;
    return PI_OK;
}

static pi_status read_shape(pi_model *m) {
    const te_gguf *g = m->file->gguf;
    const pi_arch *a = m->arch;
    pi_model_info *c = &m->info;
    PI_TRY(pi_key_need_i32(g, a->name, "block_count", 1, MAX_LAYERS, &c->n_layer));
    PI_TRY(pi_key_need_i32(g, a->name, "embedding_length", 1, MAX_DIM, &c->n_embd));
    if (!a->layers_differ && !a->recurrent)
        PI_TRY(pi_key_need_i32(g, a->name, "feed_forward_length", 1, MAX_DIM, &c->n_ff));
    PI_TRY(pi_key_need_i32(g, a->name, "attention.head_count", 1, 4096, &c->n_head));
    PI_TRY(pi_key_need_i32(g, a->name, "context_length", 1, INT32_MAX / 64, &c->n_ctx_train));
    int64_t n_head_kv = c->n_head, n_expert = 0, n_unused = 0, n_dense = 0;
    if (a->next_layers) PI_TRY(pi_key_i64(g, a->name, "nextn_predict_layers", 0, c->n_layer - 1, &n_unused, NULL));
    m->n_unused_layers = (int32_t)n_unused;
    c->n_layer -= m->n_unused_layers;
    c->n_next = m->n_unused_layers;
    if (a->experts) PI_TRY(pi_key_i64(g, a->name, "leading_dense_block_count", 0, c->n_layer - 1, &n_dense, NULL));
    if (a->recurrent) {
        PI_TRY(pi_model_read_uses(m));
        n_head_kv = c->n_head_kv;
    } else if (a->layers_differ) {
        PI_TRY(read_layers(m));
        n_head_kv = c->n_head_kv;
    } else {
        PI_TRY(pi_key_i64(g, a->name, "attention.head_count_kv", 1, c->n_head, &n_head_kv, NULL));
    }
    if (c->n_head % n_head_kv)
        return PI_FAIL(PI_ERROR_FORMAT, "%d heads cannot share %lld key/value heads evenly", c->n_head,
                       (long long)n_head_kv);
    c->n_head_kv = (int32_t)n_head_kv;
    PI_TRY(pi_key_i64(g, a->name, "expert_count", 0, INT32_MAX, &n_expert, NULL));
    c->n_expert = (int32_t)n_expert;
    c->n_layer_dense = n_expert ? (int32_t)n_dense : 0;
    c->n_neurons = c->n_ff;
    if (n_expert && !a->experts && a->block[1] != &pi_experts_kind)
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "the model has %lld experts, which are not supported for %s models",
                       (long long)n_expert, a->name);
    PI_TRY(a->block[0] == &pi_latent_kind ? read_latent(m) : read_heads(m));

    const te_gguf_tensor *embd = te_gguf_find_tensor(g, "token_embd.weight");
    if (!embd) return PI_FAIL(PI_ERROR_FORMAT, "the file has no tensor token_embd.weight");
    if (embd->ne[1] < 1 || embd->ne[1] > 1 << 24)
        return PI_FAIL(PI_ERROR_FORMAT, "token_embd.weight has %lld rows", (long long)embd->ne[1]);
    c->n_vocab = (int32_t)embd->ne[1];
    c->is_gated = a->gated;
    strncpy(c->architecture, a->name, sizeof c->architecture - 1);

    PI_TRY(read_epsilon(m));
    if (a->learned_pos) PI_TRY(read_learned_positions(m));
    PI_TRY(read_ropes(m));
    if (m->latent_rank) m->rope[0].magnitude = 1; /* YaRN's is in the scale of scores */
    if (a->window_rope)
        PI_TRY(pi_rope_init_window(&m->rope[m->n_ropes++], &m->rope[0], g, a->name, a->window_base,
                                   a->layers_differ ? m->n_embd_head_window : 0));
    PI_TRY(read_scales(m));
    if (a->soft_caps || a->logit_cap)
        PI_TRY(pi_key_cap(g, a->name, "final_logit_softcapping", a->soft_caps ? 30 : 0, &m->logit_cap));
    return m->options.next_head ? become_head(m) : PI_OK;
}

static pi_status check_predictor_type(int32_t type) {
    if (type == -1) return PI_OK;
    if (!te_type_get(type)) return PI_FAIL(PI_ERROR_ARGUMENT, "weight format %d is not known", type);
    if (!te_can_quantize(type))
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "a predictor cannot be written as %s", te_type_get(type)->name);
    return PI_OK;
}

static pi_status open_model(pi_model *m) {
    const te_gguf *g = m->file->gguf;
    te_str name = {NULL, 0};
    bool found = false;
    m->kernels = te_cpu_kernels();
    if (!m->kernels) return PI_ERROR_ARGUMENT;
    if (m->options.activation < PI_ACTIVATION_AUTO || m->options.activation > PI_ACTIVATION_RELU2 ||
        m->options.activation == PI_ACTIVATION_CLAMPED)
        return PI_FAIL(PI_ERROR_ARGUMENT, "activation %d is not known", m->options.activation);
    if (m->options.predictor < PI_PREDICTOR_AUTO || m->options.predictor > PI_PREDICTOR_SIGN)
        return PI_FAIL(PI_ERROR_ARGUMENT, "predictor %d is not known", m->options.predictor);
    PI_TRY(check_predictor_type(m->options.predictor_type));
    PI_TRY(te_gguf_get_str(g, "general.architecture", &name, &found));
    if (!found) return PI_FAIL(PI_ERROR_FORMAT, "the file has no key general.architecture");
    m->arch = pi_arch_find(name);
    if (!m->arch) {
        char known[900]; /* a sentence has 1024 */
        pi_arch_names(known, sizeof known);
        return PI_FAIL(PI_ERROR_UNSUPPORTED, "architecture \"%.*s\" is not supported (%s are)",
                       (int)(name.n < 40 ? name.n : 40), name.p, known);
    }
    PI_TRY(read_shape(m));
    PI_TRY(read_activation(m));
    PI_TRY(pi_model_bind(m));
    return m->first_layer ? PI_OK : pi_model_read_statistics(m);
}

pi_status pi_model_open(pi_file *file, const pi_model_options *options, pi_model **out) {
    if (!file || !out) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_model_open: file or out is NULL");
    *out = NULL;
    pi_model *m = calloc(1, sizeof *m);
    if (!m) return PI_FAIL(PI_ERROR_MEMORY, "out of memory opening a model");
    m->ref.n = 1;
    m->file = file;
    m->options = options ? *options : pi_model_defaults();
    pi_ref_take(&file->ref);
    const pi_status s = open_model(m);
    if (s != PI_OK) {
        pi_model_close(m);
        return s;
    }
    *out = m;
    return PI_OK;
}

void pi_model_close(pi_model *m) {
    if (!m || !pi_ref_drop(&m->ref)) return;
    pi_model_unbind(m);
    free(m->expert_counts);
    free(m->n_ff);
    free(m->n_head_kv);
    for (int32_t i = 0; i < PI_MAX_ROPES; i++) pi_rope_free(&m->rope[i]);
    pi_file_close(m->file);
    free(m);
}

void pi_model_get_info(const pi_model *m, pi_model_info *out) {
    if (out) *out = m ? m->info : (pi_model_info){0};
}

float pi_model_threshold(const pi_model *m, int32_t layer) {
    return m && layer >= 0 && layer < m->info.n_layer ? pi_threshold_of(&m->layer[layer]) : NAN;
}

static pi_status lock_and_prefault(pi_model *m, int32_t part, int32_t n_parts) {
    for (int32_t i = 0; i < te_gguf_n_parts(m->file->gguf); i++) {
        size_t n;
        const char *p = te_gguf_mapping(m->file->gguf, i, &n);
        const size_t lo = n / (size_t)n_parts * (size_t)part,
                     hi = part + 1 == n_parts ? n : n / (size_t)n_parts * (size_t)(part + 1);
        if (m->options.use_mlock)
            PI_TRY(te_os_lock(p + lo, hi - lo));
        else if (m->options.prefault)
            te_os_prefault(p + lo, hi - lo);
    }
    return PI_OK;
}

pi_status pi_model_load(pi_model *m, int32_t *done, int32_t *total) {
    if (!m) return PI_FAIL(PI_ERROR_ARGUMENT, "pi_model_load: model is NULL");
    const int32_t n = m->info.n_layer;
    if (m->loaded < n) {
        pi_layer *l = &m->layer[m->loaded];
        if (m->loaded == 0) {
            PI_TRY(pi_copy_check(m));
            if (!m->own.p) PI_TRY(pi_copy_head(m));
        }
        if (m->options.use_mmap) PI_TRY(lock_and_prefault(m, m->loaded, n));
        if (m->sign_words && !pi_ffn_of(l)->sign) PI_TRY(pi_load_signs(m, l));
        PI_TRY(pi_copy_layer(m, l));
        if (++m->loaded == n) {
            m->info.can_skip_down = 1;
            for (int32_t i = 0; i < n; i++)
                if (pi_keeps_down(&m->layer[i])) m->info.can_skip_down = 0;
            te_pool_free(m->team);
            m->team = NULL;
        }
    }
    if (done) *done = m->loaded;
    if (total) *total = n;
    return PI_OK;
}
