"""Families whose layers are attention and, most of them, a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping

from ....errors import FormatError, UnsupportedError
from ..hyper import MAX_DIM, Hyper
from ..json_file import Settings
from ..rope import RopeForm
from ..stored import Stack, StoredTensor
from .dense import GRANITE, LLAMA
from .family import (
    ATTENTION,
    HEADS,
    NORM,
    PERMUTED,
    VOCAB,
    Change,
    Family,
    Value,
    all_experts,
    always,
    flag,
    full_each,
    gated,
    halves,
    if_any,
    integer,
    kinds_of_layers,
    mixture,
    number,
    stack_of,
    unless,
    where,
)

EXPERTS = gated("mlp.experts.*", "_exps") | {
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
SHARED = gated("mlp.shared_experts", "_shexp")


FUSED_EXPERTS: dict[str, Change] = {
    "ffn_gate_up_exps": halves("ffn_gate_exps", "ffn_up_exps"),
    "ffn_down_exps": all_experts(),
}

# ---- Granite: gate's rows, then up's, also of a shared feed-forward, which is the only one without experts

GRANITE_EXPERT_NAMES = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.input_linear": "ffn_gate_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}


def _shared_input(h: Hyper, t: StoredTensor) -> Mapping[str, StoredTensor | Stack]:
    """The shared feed-forward, which is the only one where there are no experts."""
    end = "_shexp" if h.experts is not None else ""
    return halves(f"ffn_gate{end}", f"ffn_up{end}")(h, t)


def _shared_output(h: Hyper, t: StoredTensor) -> Mapping[str, StoredTensor | Stack]:
    return {"ffn_down_shexp" if h.experts is not None else "ffn_down": t}


SHARED_OF_GRANITE: dict[str, Change] = {
    "ffn_gate_up_shexp": _shared_input,
    "ffn_down_shexp": _shared_output,
}

# ---- DeepSeek V2 and V3, whose attention is latent


def _rank(c: Settings, _: Hyper) -> int:
    return c.integer("kv_lora_rank", low=1, high=4096)


def _rotated(c: Settings, _: Hyper) -> int:
    return c.integer("qk_rope_head_dim", low=2, high=4096)


def _has_experts(c: Settings, h: Hyper) -> bool:
    return _n_dense(c, h) < h.n_layer and bool(if_any("n_routed_experts")(c, h))


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
    if method != "noaux_tc" and not _is_v3(c) and c.flag("norm_topk_prob", False):
        raise UnsupportedError(
            f"{c.where}: norm_topk_prob is true, which programs for DeepSeek V2 read in different ways"
        )
    if c.integer("moe_layer_freq", default=1, high=1024) != 1:
        raise UnsupportedError(f"{c.where}: moe_layer_freq is not 1, which the engine does not run")


def _is_v3(c: Settings) -> bool:
    """Whether routers have sigmoids."""
    later = any(name in c.text("model_type") for name in ("v3", "glm4"))
    return c.text("scoring_func", default="sigmoid" if later else "softmax") == "sigmoid"


def _n_dense(c: Settings, h: Hyper) -> int:
    """Layers in front of those with experts."""
    if "mlp_layer_types" not in c:
        return c.integer("first_k_dense_replace", default=0, high=1024)
    kinds = kinds_of_layers(c, h, "mlp_layer_types")
    n = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    if kinds[n:] != ["sparse"] * (len(kinds) - n):
        raise UnsupportedError(f"{c.where}: layers without experts are not all in front of those with some")
    return n


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
    kinds = [kind == "full_attention" for kind in c.texts("layer_types")]
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


# ---- others


def _of_all(*names: str) -> Value:
    """A whole number, which may be given for each layer if all have the same."""

    def of(c: Settings, _: Hyper) -> int:
        name = next((name for name in names if name in c), names[0])
        given = c.values.get(name)
        if isinstance(given, list) and given and all(one == given[0] for one in given):
            given = given[0]
        return Settings({name: given}, c.where).integer(name, low=1, high=MAX_DIM)

    return of


def _check_ernie(c: Settings, h: Hyper) -> None:
    is_last = c.values.get("moe_layer_end_index") in (None, -1, h.n_layer - 1)
    if c.integer("moe_layer_interval", default=1, high=1024) != 1 or not is_last:
        raise UnsupportedError(f"{c.where}: there are layers without experts behind those with some")


def _is_one_row(_: Hyper, t: StoredTensor) -> dict[str, StoredTensor | Stack]:
    return {"": StoredTensor(t.name, t.dtype, t.view.reshape(-1))}


SIGMOID: dict[str, Value] = {"expert_gating_func": always(2)}

MIXTURES = (
    Family(
        arch="dots1",
        names=("dots1", "Dots1ForCausalLM"),
        defaults={"rms_norm_eps": 1e-6},
        layer=LLAMA | EXPERTS | SHARED,
        keys=HEADS
        | SIGMOID
        | mixture("n_routed_experts")
        | {
            "leading_dense_block_count": integer("first_k_dense_replace", default=0),
            "expert_shared_count": integer("n_shared_experts", default=0),
            "expert_weights_scale": number("routed_scaling_factor", default=1.0),
            "expert_weights_norm": flag("norm_topk_prob", False),
            "expert_group_count": integer("n_group", default=1),
            "expert_group_used_count": integer("topk_group", default=1),
        },
        only={"attention_bias": (False,)},
    ),
    Family(
        arch="ernie4_5-moe",
        names=("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM"),
        defaults={"rope_theta": 500000.0},
        layer=LLAMA | EXPERTS | SHARED | {"mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
        changes={"exp_probs_b": _is_one_row},
        keys={
            "expert_count": integer("moe_num_experts", low=1),
            "expert_used_count": integer("moe_k", low=1),
            "expert_feed_forward_length": integer("moe_intermediate_size", low=1),
            "expert_shared_count": integer("moe_num_shared_experts", default=0),
            "interleave_moe_layer_step": integer("moe_layer_interval", default=1),
            "leading_dense_block_count": integer("moe_layer_start_index", default=0),
        },
        only={"use_bias": (False,)},
        check=_check_ernie,
        left_out=("model.mtp",),
        tied=True,
    ),
    Family(
        arch="hunyuan-moe",
        names=("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
        layer=LLAMA
        | gated("mlp.experts.*", "_exps")
        | gated("mlp.shared_mlp", "_shexp")
        | {
            "mlp.gate.wg": "ffn_gate_inp",
            "self_attn.query_layernorm": "attn_q_norm",
            "self_attn.key_layernorm": "attn_k_norm",
        },
        rope=RopeForm(dynamic=True),
        keys=HEADS
        | {
            "expert_count": _of_all("num_experts"),
            "expert_used_count": _of_all("moe_topk"),
            "expert_feed_forward_length": _of_all("moe_intermediate_size", "intermediate_size"),
            "expert_shared_feed_forward_length": integer("intermediate_size", low=1),
            "expert_shared_count": lambda c, h: (
                _of_all("num_shared_expert")(c, h) if "num_shared_expert" in c else 1
            ),
        },
        only={"attention_bias": (False,), "use_cla": (False,)},
        tied=True,
    ),
    Family(
        arch="minimax-m2",
        names=("minimax_m2", "MiniMaxM2ForCausalLM"),
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 5e6},
        layer=LLAMA
        | gated("block_sparse_moe.experts.*", "_exps", of=("w1", "w3", "w2"))
        | {
            "block_sparse_moe.gate": "ffn_gate_inp",
            "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
        },
        rope=RopeForm(share=1.0),
        keys=HEADS | SIGMOID | mixture("num_local_experts", width="intermediate_size"),
        only={
            "use_qk_norm": (True,),
            "scoring_func": ("sigmoid",),
            "shared_intermediate_size": (0,),
        },
    ),
    Family(
        arch="afmoe",
        names=("afmoe", "AfmoeForCausalLM"),
        defaults={"mup_enabled": False},
        layer=LLAMA
        | EXPERTS
        | SHARED
        | {
            "post_attention_layernorm": "post_attention_norm",
            "pre_mlp_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "self_attn.gate_proj": "attn_gate",
            "mlp.router.gate": "ffn_gate_inp",
            "mlp.expert_bias": "exp_probs_b.bias",
        },
        keys=HEADS
        | VOCAB
        | SIGMOID
        | mixture("num_experts")
        | {
            "leading_dense_block_count": integer("num_dense_layers", default=0),
            "expert_shared_count": integer("num_shared_experts", default=0),
            "expert_weights_scale": number("route_scale", default=1.0),
            "expert_weights_norm": flag("route_norm", True),
            "attention.sliding_window": integer("sliding_window", low=1),
        },
        only={
            "attention_bias": (False,),
            "mup_enabled": (True,),
            "score_func": ("sigmoid",),
            "global_attn_every_n_layers": (4,),
        },
        check=full_each(4),
    ),
    Family(
        arch="granitemoe",
        names=("granitemoe", "granitemoeshared", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        defaults={"rms_norm_eps": 1e-6},
        layer=NORM | ATTENTION | GRANITE_EXPERT_NAMES,
        changes=PERMUTED | FUSED_EXPERTS | SHARED_OF_GRANITE,
        keys=VOCAB
        | GRANITE
        | mixture("num_local_experts", width="intermediate_size")
        | {"expert_shared_feed_forward_length": if_any("shared_intermediate_size")},
        only={"attention_bias": (False,)},
        tied=True,
    ),
    Family(
        arch="deepseek2",
        names=(
            "deepseek_v2",
            "deepseek_v3",
            "kimi_k2",
            "glm4_moe_lite",
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "Glm4MoeLiteForCausalLM",
        ),
        defaults={"rms_norm_eps": 1e-6, "head_dim": 64},  # heads are not parts of the stream's width
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
        | where(
            _has_experts,
            mixture("n_routed_experts")
            | {
                "leading_dense_block_count": _n_dense,
                "expert_shared_count": integer("n_shared_experts", default=0),
                "expert_weights_scale": number("routed_scaling_factor", default=1.0),
                "expert_weights_norm": lambda c, _: c.flag("norm_topk_prob", _is_v3(c)),
                "expert_group_count": _groups("n_group"),
                "expert_group_used_count": _groups("topk_group"),
                "expert_gating_func": lambda c, _: 2 if _is_v3(c) else 1,
            },
        ),
        next_head={},
        only={"attention_bias": (False,), "mlp_bias": (False,), "rope_interleave": (True,)},
        check=_check_deepseek,
    ),
    Family(
        arch="llama4",
        names=("llama4_text", "llama4", "Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        defaults={"rope_theta": 500000.0},
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
        only={"attention_bias": (False,), "no_rope_layer_interval": (4,)},
        check=_check_llama4,
    ),
)
