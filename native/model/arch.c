/* arch.c - the table of architectures. */
#include <string.h>

#include "model.h"

static const pi_arch table[] = {
    {.name = "llama",
     .block = {&pi_attention_kind, &pi_ffn_kind},
     .rope = PI_ROPE_NORM,
     .gated = true,
     .dense = PI_ACTIVATION_SILU,
     .sparse = PI_ACTIVATION_RELU},
    {.name = "bamboo",
     .block = {&pi_attention_kind, &pi_ffn_kind},
     .rope = PI_ROPE_NORM,
     .gated = true,
     .dense = PI_ACTIVATION_DRELU,
     .sparse = PI_ACTIVATION_DRELU},
    {.name = "falcon",
     .block = {&pi_attention_kind, &pi_ffn_kind},
     .rope = PI_ROPE_NEOX,
     .layer_norm = true,
     .parallel = true,
     .fused_qkv = true,
     .dense = PI_ACTIVATION_GELU,
     .sparse = PI_ACTIVATION_RELU},
    {.name = "opt",
     .block = {&pi_attention_kind, &pi_ffn_kind},
     .rope = PI_ROPE_NONE,
     .layer_norm = true,
     .learned_pos = true,
     .bias = true,
     .dense = PI_ACTIVATION_RELU,
     .sparse = PI_ACTIVATION_RELU},
    {.name = "qwen2",
     .block = {&pi_attention_kind, &pi_ffn_kind},
     .rope = PI_ROPE_NEOX,
     .gated = true,
     .qkv_bias = true,
     .dense = PI_ACTIVATION_SILU,
     .sparse = PI_ACTIVATION_RELU},
    {.name = "qwen3",
     .block = {&pi_attention_kind, &pi_ffn_kind},
     .rope = PI_ROPE_NEOX,
     .gated = true,
     .qk_norm = true,
     .dense = PI_ACTIVATION_SILU,
     .sparse = PI_ACTIVATION_RELU},
    {.name = "qwen3moe",
     .block = {&pi_attention_kind, &pi_experts_kind},
     .rope = PI_ROPE_NEOX,
     .gated = true,
     .qk_norm = true,
     .dense = PI_ACTIVATION_SILU,
     .sparse = PI_ACTIVATION_RELU},
    {.name = "gemma3",
     .block = {&pi_attention_kind, &pi_ffn_kind},
     .rope = PI_ROPE_NEOX,
     .gated = true,
     .qk_norm = true,
     .post_norm = true,
     .scaled_embd = true,
     .window_period = 6,
     .wide_layers = 62,
     .dense = PI_ACTIVATION_GELU_TANH,
     .sparse = PI_ACTIVATION_RELU},
};

const pi_arch *pi_arch_find(const char *name, size_t n) {
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strlen(table[i].name) == n && !memcmp(table[i].name, name, n)) return &table[i];
    return NULL;
}

const char *pi_arch_names(void) { return "llama, bamboo, falcon, opt, qwen2, qwen3, qwen3moe, gemma3"; }
