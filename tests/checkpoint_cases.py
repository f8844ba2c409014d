"""What tests/checkpoints.py makes files of: transformers' classes, their configurations, and what llama.cpp's
converter writes of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.models import Array

N_VOCAB, N_CTX = 293, 256
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = [[1.0, 1.1, 1.3, 1.7], [1.5, 2.0, 4.0, 8.0]]  # longrope's factors of 4 pairs, short and long


@dataclass(frozen=True)
class Case:
    """One checkpoint."""

    arch: str
    """`general.architecture`."""
    table: str
    """gguf's name of it."""
    model: str
    """transformers' class, without ForCausalLM."""
    config: dict[str, Any] = field(default_factory=dict)
    """Beyond COMMON."""
    keys: dict[str, Any] = field(default_factory=dict)
    """Of the file, without the architecture in front, beyond those that all have."""
    permuted: bool = False
    """q's and k's rows are brought into the order of interleaved RoPE."""
    layer_norm: bool = False
    scaled: bool = False
    """Embeddings are multiplied by the root of their width."""
    n_prompt: int = 40
    change: Callable[[Case, str, Array], dict[str, Array]] | None = None
    """What else the converter does with a weight: its names and values in a file."""

    def value(self, name: str) -> Any:
        return (COMMON | self.config)[name]


COMMON: dict[str, Any] = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": N_CTX,
    "tie_word_embeddings": False,
}


def _neox(case: Case, name: str, value: Array) -> dict[str, Array]:
    """q, k and v of a head stand together in a checkpoint, those of all heads in a file."""
    if "query_key_value" not in name:
        return {}
    n_head = case.value("num_attention_heads")
    split = value.reshape(n_head, 3, -1, *value.shape[1:]).swapaxes(0, 1)
    return {name: np.ascontiguousarray(split).reshape(value.shape)}


def _gpt2(case: Case, name: str, value: Array) -> dict[str, Array]:
    """Weights of products are stored the other way round."""
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {name: np.ascontiguousarray(value.T)} if name.endswith(turned) else {}


def _experts(case: Case, name: str, value: Array) -> dict[str, Array]:
    """gate and up of experts are apart in a file; a router is F32."""
    stem, last = name.rsplit(".", 1)
    if last == "gate_up_proj":
        gate, up = np.split(value, 2, axis=1)
        return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    if name.endswith("shared_mlp.input_linear.weight"):  # Granite's
        gate, up = np.split(value, 2)
        stem = name.replace("shared_mlp.input_linear.weight", "mlp.shared_experts.")
        return {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
    if last == "down_proj":
        return {f"{name}.weight": value}
    is_router = any(word in name for word in (".mlp.gate.weight", "router", ".wg."))
    return {name: value.astype(np.float32)} if is_router else {}


def _latent(case: Case, name: str, value: Array) -> dict[str, Array]:
    """What brings queries to the latent, turned, and what brings the latent to values; experts."""
    if "kv_b_proj" not in name:
        return _experts(case, name, value)
    n_key = case.value("qk_nope_head_dim")
    each = value.reshape(case.value("num_attention_heads"), -1, case.value("kv_lora_rank"))
    return {
        name.replace("kv_b", "k_b"): np.ascontiguousarray(each[:, :n_key].swapaxes(1, 2)),
        name.replace("kv_b", "v_b"): np.ascontiguousarray(each[:, n_key:]),
    }


def _gemma4(case: Case, name: str, value: Array) -> dict[str, Array]:
    """Matrices of experts stay fused; two vectors are named after what they scale."""
    for word, known in (
        ("router.scale", "router.proj.scale"),
        ("router.per_expert_scale", "experts.down_proj.scale"),
        ("layer_scalar", "layer_scalar.weight"),
        ("experts.gate_up_proj", "experts.gate_up_proj.weight"),
        ("experts.down_proj", "experts.down_proj.weight"),
    ):
        if name.endswith(word):
            return {name.replace(word, known): value}
    return {name: value.astype(np.float32)} if "router.proj" in name else {}


MIXTURE = {"expert_count": 8, "expert_used_count": 3}

CASES: dict[str, Case] = {
    "phi3": Case(
        "phi3",
        "PHI3",
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": LONG[0],
                "long_factor": LONG[1],
                "original_max_position_embeddings": 64,
            },
            "original_max_position_embeddings": 64,
            "max_position_embeddings": N_CTX,
            "sliding_window": None,
        },
        {
            "rope.dimension_count": 8,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(4) / np.log(64))),
        },
    ),
    "granite": Case(
        "granite",
        "GRANITE",
        "Granite",
        {
            "rms_norm_eps": 1.0,  # so large that its place in a scaled stream is seen
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.15,
            "logits_scaling": 2.0,
        },
        {
            "attention.layer_norm_rms_epsilon": 1.0,
            "embedding_scale": 3.0,
            "residual_scale": 0.4,
            "attention.scale": 0.15,
            "logit_scale": 2.0,
        },
        permuted=True,
    ),
    "starcoder2": Case(
        "starcoder2",
        "STARCODER2",
        "Starcoder2",
        {"use_bias": True, "sliding_window": None, "norm_epsilon": 1e-5},
        layer_norm=True,
    ),
    "glm4": Case(
        "glm4",
        "GLM4",
        "Glm4",
        {
            "attention_bias": True,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        {"rope.dimension_count": 8},
    ),
    "smollm3": Case("smollm3", "SMOLLM3", "SmolLM3", {"num_hidden_layers": 5}, permuted=True),
    "seed_oss": Case(
        "seed_oss",
        "SEED_OSS",
        "SeedOss",
        {"attention_bias": True, "attention_out_bias": False, "head_dim": 24},
    ),
    "hunyuan-dense": Case("hunyuan-dense", "HUNYUAN_DENSE", "HunYuanDenseV1", {"head_dim": 16}),
    "ernie4_5": Case("ernie4_5", "ERNIE4_5", "Ernie4_5", {"head_dim": 16, "use_bias": False}),
    "stablelm": Case(
        "stablelm",
        "STABLELM",
        "StableLm",
        {
            "use_qkv_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
        {"rope.dimension_count": 4, "use_parallel_residual": False},
        layer_norm=True,
    ),
    "stablelm-parallel": Case(
        "stablelm",
        "STABLELM",
        "StableLm",
        {
            "use_parallel_residual": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
        {"rope.dimension_count": 4, "use_parallel_residual": True},
        layer_norm=True,
    ),
    "exaone4": Case(
        "exaone4",
        "EXAONE4",
        "Exaone4",
        {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 2},
    ),
    "mistral3": Case(
        "mistral3",
        "MISTRAL3",
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": YARN
            | {
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "attention.temperature_scale": 0.1,
        },
        permuted=True,
        n_prompt=140,
    ),
    "command-r": Case(
        "command-r",
        "COMMAND_R",
        "Cohere",
        {"tie_word_embeddings": True, "logit_scale": 0.5, "layer_norm_eps": 1e-5},
        {"logit_scale": 0.5, "rope.scaling.type": "none"},
        layer_norm=True,
    ),
    "gptneox": Case(
        "gptneox",
        "GPTNEOX",
        "GPTNeoX",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "use_parallel_residual": True,
            "layer_norm_eps": 1e-5,
        },
        {"rope.dimension_count": 4, "use_parallel_residual": True},
        layer_norm=True,
        change=_neox,
    ),
    "gptneox-serial": Case(
        "gptneox",
        "GPTNEOX",
        "GPTNeoX",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "use_parallel_residual": False,
            "layer_norm_eps": 1e-5,
        },
        {"rope.dimension_count": 4, "use_parallel_residual": False},
        layer_norm=True,
        change=_neox,
    ),
    "phi2": Case(
        "phi2",
        "PHI2",
        "Phi",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "layer_norm_eps": 1e-5,
        },
        {"rope.dimension_count": 8},
        layer_norm=True,
    ),
    "gpt2": Case(
        "gpt2",
        "GPT2",
        "GPT2",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 160,
            "n_positions": N_CTX,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
        layer_norm=True,
        change=_gpt2,
    ),
    "bitnet": Case(
        "bitnet",
        "BITNET",
        "BitNet",
        {"hidden_act": "silu", "tie_word_embeddings": True},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
    ),
    "dots1": Case(
        "dots1",
        "DOTS1",
        "Dots1",
        {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        MIXTURE
        | {
            "expert_feed_forward_length": 48,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
        },
        change=_experts,
    ),
    "glm4_moe_lite": Case(
        "deepseek2",
        "DEEPSEEK2",
        "Glm4MoeLite",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
        },
        MIXTURE
        | {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": 32,
            "attention.kv_lora_rank": 32,
            "attention.key_length": 48,
            "attention.value_length": 32,
            "attention.key_length_mla": 32,
            "attention.value_length_mla": 24,
            "rope.dimension_count": 16,
            "expert_feed_forward_length": 48,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.8,
            "expert_weights_norm": True,
        },
        change=_latent,
    ),
    "ernie4_5-moe": Case(
        "ernie4_5-moe",
        "ERNIE4_5_MOE",
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
        MIXTURE
        | {
            "expert_feed_forward_length": 48,
            "expert_shared_feed_forward_length": 80,  # what the converter says has nothing to do with theirs
            "expert_shared_count": 2,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
        },
        change=_experts,
    ),
    "hunyuan-moe": Case(
        "hunyuan-moe",
        "HUNYUAN_MOE",
        "HunYuanMoEV1",
        {"head_dim": 16, "num_experts": 8, "moe_topk": 3, "intermediate_size": 96},
        MIXTURE
        | {
            "feed_forward_length": 96,
            "expert_feed_forward_length": 96,
            "expert_shared_feed_forward_length": 96,
            "expert_shared_count": 1,
        },
        change=_experts,
    ),
    "minimax-m2": Case(
        "minimax-m2",
        "MINIMAXM2",
        "MiniMaxM2",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 96,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        MIXTURE
        | {
            "feed_forward_length": 96,
            "expert_feed_forward_length": 96,
            "expert_gating_func": 2,
            "rope.dimension_count": 8,
        },
        change=_experts,
    ),
    "afmoe": Case(
        "afmoe",
        "AFMOE",
        "Afmoe",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 48,
            "route_scale": 2.5,
            "sliding_window": 24,
            "mup_enabled": True,
        },
        MIXTURE
        | {
            "expert_feed_forward_length": 48,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_gating_func": 2,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "attention.sliding_window": 24,
        },
        change=_experts,
        scaled=True,
    ),
}
GEMMA4 = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 15.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": N_VOCAB,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 100000.0,
        },
    },
}
CASES["gemma4moe"] = Case(
    "gemma4",
    "GEMMA4",
    "Gemma4",
    GEMMA4 | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 48},
    MIXTURE
    | {
        "expert_feed_forward_length": 48,
        "attention.head_count_kv": [2, 2, 1],
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": [True, True, False],
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.freq_base": 100000.0,
        "rope.freq_base_swa": 500.0,
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 32,
        "final_logit_softcapping": 15.0,
    },
    change=_gemma4,
    scaled=True,
)
CASES["gemma3n"] = Case(
    "gemma3n",
    "GEMMA3N",
    "Gemma3n",
    {
        "num_hidden_layers": 5,
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
        "num_kv_shared_layers": 2,
        "final_logit_softcapping": 15.0,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": N_VOCAB,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    {
        "feed_forward_length": [160] * 5,
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": [True, True, False, True, False],
        "attention.shared_kv_layers": 2,
        "embedding_length_per_layer_input": 16,
        "activation_sparsity_scale": [1.6448534727096558] * 2 + [float("-inf")] * 3,
        "altup.active_idx": 0,
        "altup.num_inputs": 4,
        "rope.freq_base": 10000.0,
        "rope.freq_base_swa": 500.0,
        "final_logit_softcapping": 15.0,
    },
    scaled=True,
)
CASES["apertus"] = Case(
    "apertus",
    "APERTUS",
    "Apertus",
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    {"xielu.beta": [0.5, 0.5], "xielu.eps": [-1e-6, -1e-6], "rope.dimension_count": 16},
)
for _name, _shared in (("granitemoe", 0), ("granitemoe-shared", 96)):
    CASES[_name] = Case(
        "granitemoe",
        "GRANITE_MOE",
        "GraniteMoeShared" if _shared else "GraniteMoe",
        CASES["granite"].config
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 96}
        | ({"shared_intermediate_size": _shared} if _shared else {}),
        CASES["granite"].keys
        | MIXTURE
        | {"feed_forward_length": 96}
        | ({"expert_shared_feed_forward_length": _shared} if _shared else {}),
        permuted=True,
        change=_experts,
    )
CASES["phi3-long"] = replace(CASES["phi3"], n_prompt=100)  # transformers takes the factors for long contexts
CASES["phi3-window"] = replace(
    CASES["phi3"],
    config=CASES["phi3"].config | {"sliding_window": 24},
    keys=CASES["phi3"].keys | {"attention.sliding_window": 24},
)  # all layers see 24 positions
CASES["exaone4-window"] = replace(
    CASES["exaone4"],
    config={"num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": 4},
    keys={"attention.sliding_window": 24},
    n_prompt=60,
)  # the fourth layer sees all, and has no RoPE
