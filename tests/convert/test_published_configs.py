"""config.json as the models were published with: what is read of it, in the words of each time and author.

The names and most values are those of the repositories; what no reader looks at is left out.
"""

from __future__ import annotations

from typing import Any

import pytest

from powerinfer.models.convert.families.reading import read_hyper
from powerinfer.models.convert.hyper import Hyper
from powerinfer.models.convert.json_file import Settings

LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
FALCON_7B = {  # from before the family was part of transformers
    "architectures": ["RWForCausalLM"],
    "model_type": "RefinedWebModel",
    "alibi": False,
    "bias": False,
    "hidden_size": 4544,
    "layer_norm_epsilon": 1e-05,
    "multi_query": True,
    "n_head": 71,
    "n_layer": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
}
FALCON_40B = {
    "architectures": ["RWForCausalLM"],
    "model_type": "RefinedWeb",
    "alibi": False,
    "bias": False,
    "hidden_size": 8192,
    "layer_norm_epsilon": 1e-05,
    "n_head": 128,
    "n_head_kv": 8,
    "n_layer": 60,
    "parallel_attn": True,
    "vocab_size": 65024,
}
FALCON_11B = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "activation": "gelu",
    "alibi": False,
    "bias": False,
    "ffn_hidden_size": 16384,
    "hidden_size": 4096,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 8192,
    "multi_query": True,
    "new_decoder_architecture": True,
    "num_attention_heads": 32,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
    "num_ln_in_parallel_attn": 1,
    "parallel_attn": True,
    "rope_scaling": None,
    "rope_theta": 500042.0,
    "tie_word_embeddings": False,
    "vocab_size": 65024,
}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "_remove_final_layer_norm": False,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "ffn_dim": 16384,
    "hidden_size": 4096,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "prefix": "</s>",
    "vocab_size": 50272,
    "word_embed_proj_dim": 4096,
}
QWEN_2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_31_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def read(config: dict[str, Any]) -> Hyper:
    return read_hyper(Settings(config, "config.json"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            LLAMA_2,
            {
                "family": "llama",
                "arch": "llama",
                "act": "silu",
                "d_head": 128,
                "n_head_kv": 32,
                "tied": False,
            },
        ),
        (
            LLAMA_2 | {"hidden_act": "relu"},
            {"arch": "llama", "act": "relu", "act_threshold": 0.0, "notes": ()},
        ),
        (
            LLAMA_2
            | {
                "architectures": ["SparseLlamaForCausalLM"],
                "model_type": "sparsellama",
                "hidden_act": "fatrelu",
                "hidden_act_param": 0.01,
            },
            {"family": "llama", "arch": "llama", "act": "relu", "act_threshold": 0.01},
        ),
        (
            # Of the first Llama, when two names did not exist yet.
            {k: v for k, v in LLAMA_2.items() if k not in ("num_key_value_heads", "max_position_embeddings")}
            | {"architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048},
            {"family": "llama", "n_head_kv": 32, "n_ctx": 2048},
        ),
        (MISTRAL, {"family": "llama", "arch": "llama", "n_head_kv": 8, "d_head": 128, "n_notes": 1}),
        (MISTRAL | {"sliding_window": None, "rope_theta": 1e6}, {"n_notes": 0}),
        (
            MISTRAL | {"head_dim": 128, "hidden_size": 5120, "max_position_embeddings": 131072},
            {"d_head": 128, "q_width": 4096, "n_embd": 5120},
        ),
        (
            MISTRAL
            | {"architectures": ["BambooForCausalLM"], "model_type": "bamboo", "hidden_act": "relu"}
            | {"max_position_embeddings": 4096},
            {"family": "llama", "arch": "bamboo", "act": "drelu", "n_notes": 0},
        ),
        (
            {k: v for k, v in MISTRAL.items() if k not in ("hidden_act", "rms_norm_eps")}
            | {"architectures": ["BambooForCausalLM"], "model_type": "bamboo"},
            {"arch": "bamboo", "act": "drelu", "norm_eps": 1e-6},
        ),
        (
            FALCON_7B,
            {"arch": "falcon", "act": "gelu", "n_layer": 32, "n_head": 71, "n_head_kv": 1, "d_head": 64}
            | {"n_ff": 4 * 4544, "n_ctx": 2048, "two_norms": False, "norm_eps": 1e-5, "tied": None},
        ),
        (
            {k: v for k, v in FALCON_7B.items() if k not in ("multi_query", "layer_norm_epsilon")},
            {"n_head_kv": 1, "norm_eps": 1e-5},
        ),
        (FALCON_7B | {"multi_query": False}, {"n_head_kv": 71, "two_norms": False}),
        (FALCON_40B, {"n_layer": 60, "n_head": 128, "n_head_kv": 8, "n_ff": 4 * 8192, "two_norms": True}),
        (FALCON_40B | {"activation": "relu"}, {"act": "relu"}),
        (FALCON_40B | {"hidden_act": "relu"}, {"act": "relu"}),
        (
            FALCON_11B,
            {"n_head_kv": 8, "n_ff": 16384, "two_norms": False, "n_ctx": 8192, "tied": False},
        ),
        (
            OPT,
            {"arch": "opt", "act": "relu", "n_ff": 16384, "n_ctx": 2048, "norm_eps": 1e-5, "tied": None}
            | {"qkv_bias": True, "output_bias": True, "rope": None},
        ),
        (
            QWEN_2,
            {"arch": "qwen2", "d_head": 64, "n_head_kv": 2, "qkv_bias": True, "output_bias": False}
            | {"tied": True, "n_notes": 0},
        ),
        (QWEN_2 | {"use_sliding_window": True}, {"n_notes": 1}),
        (QWEN_2 | {"attention_bias": True}, {"qkv_bias": True, "output_bias": False}),  # which it has not
        (
            QWEN_3,
            {"arch": "qwen3", "d_head": 128, "q_width": 2048, "n_embd": 1024, "qkv_bias": False}
            | {"output_bias": False, "tied": True, "n_notes": 0},
        ),
        ({k: v for k, v in QWEN_3.items() if k != "head_dim"}, {"d_head": 128}),
    ],
)
def test_published(config: dict[str, Any], expected: dict[str, Any]) -> None:
    hyper = read(config)
    actual = {name: len(hyper.notes) if name == "n_notes" else getattr(hyper, name) for name in expected}
    assert actual == expected


@pytest.mark.parametrize(
    ("config", "base", "kind"),
    [
        (LLAMA_2, 10000, ""),
        (FALCON_7B, 10000, ""),
        (FALCON_11B, 500042, ""),
        (QWEN_3, 1e6, ""),
        (LLAMA_2 | {"rope_theta": 5e5, "rope_scaling": LLAMA_31_ROPE}, 5e5, "llama3"),
        (LLAMA_2 | {"rope_scaling": {"type": "linear", "factor": 4.0}}, 10000, "linear"),
        (QWEN_2 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 1e6, "yarn"),
        (QWEN_2 | {"rope_scaling": {"rope_type": "default"}}, 1e6, ""),
    ],
)
def test_rotations(config: dict[str, Any], base: float, kind: str) -> None:
    rope = read(config).rope
    assert rope is not None and (rope.base, rope.kind) == (base, kind)
    if kind == "llama3":
        assert (rope.factor, rope.low, rope.high, rope.n_ctx_orig) == (8, 1, 4, 8192)
    if kind == "yarn":
        assert (rope.factor, rope.n_ctx_orig, rope.beta_fast, rope.beta_slow) == (4, 131072, 32, 1)
