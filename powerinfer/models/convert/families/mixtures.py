"""Families whose layers are attention and, most of them, a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping

from ....errors import FormatError, UnsupportedError
from ..hyper import Hyper
from ..json_file import Settings
from ..rope import RopeForm
from ..stored import Stack, StoredTensor
from .family import (
    ATTENTION,
    HEADS,
    NORM,
    VOCAB,
    Family,
    Value,
    all_experts,
    always,
    gated,
    halves,
    if_any,
    integer,
    mixture,
    number,
    stack_of,
    unless,
)

EXPERTS = gated("mlp.experts.*", "_exps") | {
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
SHARED = gated("mlp.shared_experts", "_shexp")


# ---- DeepSeek V2 and V3, whose attention is latent


def _rank(c: Settings, _: Hyper) -> int:
    return c.integer("kv_lora_rank", low=1, high=4096)


def _rotated(c: Settings, _: Hyper) -> int:
    return c.integer("qk_rope_head_dim", low=2, high=4096)


def _has_experts(c: Settings, h: Hyper) -> bool:
    return c.integer("first_k_dense_replace", default=0, high=1024) < h.n_layer and bool(
        if_any("n_routed_experts")(c, h)
    )


def _if_experts(keys: Mapping[str, Value]) -> dict[str, Value]:
    def of(value: Value) -> Value:
        return lambda c, h: value(c, h) if _has_experts(c, h) else None

    return {name: of(value) for name, value in keys.items()}


def _key_and_value(h: Hyper, t: StoredTensor) -> dict[str, StoredTensor | Stack]:
    """What brings queries of a head to the latent, turned, and what brings the latent to its value."""
    c = h.config
    n_key, n_value = (c.integer(name, low=1, high=4096) for name in ("qk_nope_head_dim", "v_head_dim"))
    if t.view.shape != (h.n_head * (n_key + n_value), _rank(c, h)):
        raise FormatError(
            f"tensor {t.name} has the shape {list(t.shape)}, which config.json's sizes do not give"
        )
    of_heads = t.view.reshape(h.n_head, n_key + n_value, -1)
    return {
        "attn_k_b": stack_of(t, of_heads[:, :n_key].swapaxes(1, 2)),
        "attn_v_b": stack_of(t, of_heads[:, n_key:]),
    }


def _check_deepseek(c: Settings, h: Hyper) -> None:
    method = c.text("topk_method", default="noaux_tc")
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise UnsupportedError(f"{c.where}: topk_method is {method!r:.60}")
    if c.integer("moe_layer_freq", default=1, high=1024) != 1:
        raise UnsupportedError(f"{c.where}: moe_layer_freq is not 1, which the engine does not run")


def _is_v3(c: Settings) -> bool:
    return (
        c.text("scoring_func", default="sigmoid" if "v3" in c.text("model_type") else "softmax") == "sigmoid"
    )


def _groups(name: str) -> Value:
    """Groups of experts; a router that is greedy has none."""
    return lambda c, _: (
        1 if c.text("topk_method") == "greedy" else c.integer(name, default=1, low=1, high=4096)
    )


LATENT: dict[str, Value] = {
    "attention.head_count_kv": always(1),
    "attention.q_lora_rank": if_any("q_lora_rank"),
    "attention.kv_lora_rank": _rank,
    "attention.key_length": lambda c, h: _rank(c, h) + _rotated(c, h),
    "attention.value_length": _rank,
    "attention.key_length_mla": lambda c, h: _rotated(c, h) + c.integer("qk_nope_head_dim", low=1, high=4096),
    "attention.value_length_mla": integer("v_head_dim", low=1),
    "rope.dimension_count": _rotated,
}

# ---- Llama 4


def _check_llama4(c: Settings, h: Hyper) -> None:
    full = [(i + 1) % 4 == 0 for i in range(h.n_layer)]
    still = c.values.get("no_rope_layers") or [int(not one) for one in full]
    kinds = [kind == "full_attention" for kind in c.values.get("layer_types") or []]
    if still != [int(not one) for one in full] or (kinds and kinds != full):
        raise UnsupportedError(
            f"{c.where}: layers without rotation are not each fourth, which the engine knows"
        )
    has_norms = c.integer("num_local_experts", low=1, high=4096) != 128
    if c.flag("use_qk_norm", True) is not has_norms:
        raise UnsupportedError(
            f"{c.where}: use_qk_norm is {not has_norms}, which the engine has with 128 experts alone"
            if has_norms
            else f"{c.where}: use_qk_norm is true, which the engine has not with 128 experts"
        )
    if not c.values.get("attn_temperature_tuning", True):
        raise UnsupportedError(f"{c.where}: attn_temperature_tuning is false, which the engine does not run")


MIXTURES = (
    Family(
        arch="deepseek2",
        names=(
            "deepseek_v2",
            "deepseek_v3",
            "kimi_k2",
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
        ),
        layer=NORM
        | {
            "self_attn.q_proj": "attn_q",
            "self_attn.q_a_proj": "attn_q_a",
            "self_attn.q_a_layernorm": "attn_q_a_norm",
            "self_attn.q_b_proj": "attn_q_b",
            "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "self_attn.kv_a_layernorm": "attn_kv_a_norm",
            "self_attn.kv_b_proj": "attn_kv_b",
            "self_attn.o_proj": "attn_output",
        }
        | gated("mlp")
        | EXPERTS
        | SHARED,
        changes={"attn_kv_b": _key_and_value},
        rope=RopeForm(log_scale=0.1),
        keys=VOCAB
        | LATENT
        | _if_experts(
            mixture("n_routed_experts")
            | {
                "leading_dense_block_count": integer("first_k_dense_replace", default=0),
                "expert_shared_count": integer("n_shared_experts", default=0),
                "expert_weights_scale": number("routed_scaling_factor", default=1.0),
                "expert_weights_norm": lambda c, _: c.flag("norm_topk_prob", _is_v3(c)),
                "expert_group_count": _groups("n_group"),
                "expert_group_used_count": _groups("topk_group"),
                "expert_gating_func": lambda c, _: 2 if _is_v3(c) else 1,
            }
        ),
        only={"attention_bias": (False,), "mlp_bias": (False,)},
        check=_check_deepseek,
    ),
    Family(
        arch="llama4",
        names=("llama4_text", "llama4", "Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        layer=NORM
        | ATTENTION
        | gated("feed_forward")
        | gated("feed_forward.shared_expert", "_shexp")
        | {
            "feed_forward.router": "ffn_gate_inp",
            "feed_forward.experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "feed_forward.experts.down_proj": "ffn_down_exps.weight",
        },
        changes={
            "ffn_gate_up_exps": halves("ffn_gate_exps", "ffn_up_exps", is_turned=True),
            "ffn_down_exps": all_experts(is_turned=True),
        },
        n_ff=integer("intermediate_size_mlp", low=1),
        keys=HEADS
        | VOCAB
        | mixture("num_local_experts", width="intermediate_size")
        | {
            "interleave_moe_layer_step": integer("interleave_moe_layer_step", default=1, low=1),
            "attention.sliding_window": unless(8192, integer("attention_chunk_size", low=1)),
            "attention.temperature_length": unless(8192, integer("floor_scale", default=8192)),
            "attention.temperature_scale": unless(0.1, number("attn_scale", default=0.1)),
        },
        only={"attention_bias": (False,)},
        check=_check_llama4,
    ),
)
