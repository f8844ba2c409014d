"""Families with recurrent layers: short convolutions, delta nets, and Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from ....errors import FormatError, UnsupportedError
from ..hyper import MAX_DIM, Hyper
from ..json_file import Settings
from ..rope import RopeForm
from ..stored import Array, Stack, StoredTensor
from .dense import GRANITE
from .family import (
    ATTENTION,
    HEADS,
    NORM,
    OUTER,
    PERMUTED,
    VOCAB,
    Change,
    Family,
    Value,
    always,
    by_rows,
    check_rows,
    column,
    flag,
    gated,
    if_any,
    integer,
    kinds_of_layers,
    mixture,
    number,
    of_values,
    parts_of_rows,
    times,
    unless,
    where,
)
from .mixtures import FUSED_EXPERTS, GRANITE_EXPERT_NAMES, SHARED_OF_GRANITE

_INFINITY = {"__float__": "Infinity"}
ATTENDS = ("full_attention", "attention")


def _attends(c: Settings, h: Hyper) -> list[bool]:
    return [kind in ATTENDS for kind in kinds_of_layers(c, h, "layer_types", "layers_block_type")]


def _heads_of_layers(c: Settings, h: Hyper) -> Array:
    return np.array([h.n_head_kv if attends else 0 for attends in _attends(c, h)], np.int32)


# ---- LFM2: short convolutions


def _lfm_layers(c: Settings, h: Hyper) -> Array:
    if "layer_types" not in c and "full_attn_idxs" in c:
        full = c.values["full_attn_idxs"]
        if not isinstance(full, list):
            raise c.wrong("full_attn_idxs", "a list of numbers")
        return np.array([h.n_head_kv * (i in full) for i in range(h.n_layer)], np.int32)
    return _heads_of_layers(c, h)


def _lfm_width(c: Settings, _: Hyper) -> int:
    """Of the feed-forward, which the model's code may change."""
    n = c.integer("block_ff_dim", "intermediate_size", low=1, high=MAX_DIM)
    if not c.flag("block_auto_adjust_ff_dim", False):
        return n
    n = int(2 * n / 3 * c.number("block_ffn_dim_multiplier", default=1.0))
    step = c.integer("block_multiple_of", default=256, low=1, high=MAX_DIM)
    return -(-n // step) * step


LFM = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
} | gated("feed_forward", of=("w1", "w3", "w2"))
LFM_KEYS: dict[str, Value] = VOCAB | {
    "attention.head_count_kv": _lfm_layers,
    "shortconv.l_cache": integer("conv_L_cache", low=1),
}

# ---- Qwen3-Next and Qwen3.5: delta nets


def _sizes(h: Hyper) -> tuple[int, int, int, int]:
    """Of a delta net: k heads, v heads of each, and their values."""
    c = h.config
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    n_k, n_v, d_k, d_v = (c.integer(name, low=1, high=MAX_DIM) for name in names)
    if n_v % n_k:
        raise FormatError(f"{c.where}: {n_v} v heads cannot share {n_k} k heads evenly")
    return n_k, n_v // n_k, d_k, d_v


def _inner(c: Settings, h: Hyper) -> int:
    n_k, share, _, d_v = _sizes(h)
    return n_k * share * d_v


def _qkvz(h: Hyper, *which: int) -> Array:
    """Rows that are, of each k head, its q, k, v and z: those of some of these."""
    n_k, share, d_k, d_v = _sizes(h)
    cuts = np.cumsum([0, d_k, d_k, share * d_v, share * d_v])
    groups = np.arange(n_k * cuts[-1]).reshape(n_k, -1)
    return np.concatenate([groups[:, cuts[i] : cuts[i + 1]].ravel() for i in which])


def _tiled(h: Hyper, width: int, first: int = 0) -> Array:
    """Rows of v heads, `width` each: those of a k head together, to those of all k heads in turn."""
    n_k, share, _, _ = _sizes(h)
    rows = np.arange(n_k * share * width).reshape(n_k, share, width).swapaxes(0, 1).ravel()
    return np.concatenate([np.arange(first), first + rows])


def _tiled_qkv(h: Hyper) -> Array:
    n_k, _, d_k, d_v = _sizes(h)
    return _tiled(h, d_v, 2 * n_k * d_k)


def _tiled_out(h: Hyper, t: StoredTensor) -> dict[str, StoredTensor]:
    return {"": StoredTensor(t.name, t.dtype, t.view, columns=_tiled(h, _sizes(h)[3]))}


def _tiled_a(h: Hyper, t: StoredTensor) -> Mapping[str, StoredTensor | Stack]:
    order = _tiled(h, 1)
    check_rows(t, len(order))
    return of_values(lambda _, a: -np.exp(a)[order])(h, t)


DELTA = {
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
DELTA_KEYS: dict[str, Value] = HEADS | {
    "ssm.conv_kernel": integer("linear_conv_kernel_dim", low=1),
    "ssm.state_size": integer("linear_key_head_dim", low=1),
    "ssm.group_count": integer("linear_num_key_heads", low=1),
    "ssm.time_step_rank": integer("linear_num_value_heads", low=1),
    "ssm.inner_size": _inner,
    "attention.recurrent_layers": lambda c, h: (
        np.array([not attends for attends in _attends(c, h)]) if "layer_types" in c else None
    ),
    "full_attention_interval": integer("full_attention_interval", default=4, low=1),
}
QWEN_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
QWEN_PLUS_ONE = (
    *("attn_norm", "post_attention_norm", "output_norm", "attn_q_norm", "attn_k_norm"),
    *("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"),
)
QWEN_HEAD = {
    "mtp.layers.0.": "",
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}
QWEN_EXPERTS = (
    gated("mlp.experts.*", "_exps")
    | gated("mlp.shared_expert", "_shexp")
    | {
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "mlp.experts.down_proj": "ffn_down_exps.weight",
    }
)
QWEN_MIXTURE: dict[str, Value] = mixture("num_experts") | {
    "expert_shared_feed_forward_length": integer("shared_expert_intermediate_size", low=1)
}
QWEN35 = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
}
TILED: dict[str, Change] = {
    "attn_qkv": by_rows(_tiled_qkv),
    "ssm_conv1d": by_rows(_tiled_qkv),
    "attn_gate": by_rows(lambda h: _tiled(h, _sizes(h)[3])),
    "ssm_alpha": by_rows(lambda h: _tiled(h, 1)),
    "ssm_beta": by_rows(lambda h: _tiled(h, 1)),
    "ssm_dt": by_rows(lambda h: _tiled(h, 1)),
    "ssm_a": _tiled_a,
    "ssm_out": _tiled_out,
}


def _sections(c: Settings, h: Hyper) -> Array | None:
    sections = c.object("rope_parameters").values.get("mrope_section")
    if sections is None:
        return None
    if not isinstance(sections, list) or not all(isinstance(n, int) for n in sections) or len(sections) > 4:
        raise c.wrong("rope_parameters", "an object whose mrope_section is a list of numbers")
    return np.array([*sections, 0, 0, 0, 0][:4], np.int32)


def _check_sparse_step(c: Settings, _: Hyper) -> None:
    if c.values.get("mlp_only_layers"):
        raise UnsupportedError(f"{c.where}: mlp_only_layers is set, which the engine does not run")


# ---- Mamba-2


def _mamba(block: str) -> dict[str, str]:
    return {
        f"{block}.A_log": "ssm_a",
        f"{block}.D": "ssm_d",
        f"{block}.dt_bias": "ssm_dt.bias",
        f"{block}.conv1d": "ssm_conv1d",
        f"{block}.in_proj": "ssm_in",
        f"{block}.norm": "ssm_norm",
        f"{block}.out_proj": "ssm_out",
    }


def _groups(h: Hyper) -> int:
    return h.config.integer("mamba_n_groups", "n_groups", low=1, high=4096)


MAMBA_CHANGES: dict[str, Change] = {
    "ssm_a": of_values(lambda _, a: -np.exp(a).reshape(-1, 1)),
    "ssm_d": column,
    "ssm_norm": of_values(lambda h, w: w.reshape(_groups(h), -1)),
}


def _ssm(kernel: str, state: str, groups: str, heads: str, size: str) -> dict[str, Value]:
    """Keys of Mamba-2, by the names of the config."""
    n, d = integer(heads, low=1), integer(size, low=1)
    return {
        "ssm.conv_kernel": integer(kernel, low=1),
        "ssm.state_size": integer(state, low=1),
        "ssm.group_count": integer(groups, low=1),
        "ssm.time_step_rank": n,
        "ssm.inner_size": lambda c, h: n(c, h) * d(c, h),
    }


MAMBA_KEYS = _ssm("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head")
NEMOTRON_KEYS = _ssm("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim")

# ---- Falcon-H1: its multipliers go into weights


def _multiplier(*names: str) -> Change:
    def of(h: Hyper) -> float:
        product = 1.0
        for name in names:
            product *= h.config.number(name, default=1.0)
        return product

    return times(of)


def _of_mlp(which: int) -> Change:
    return times(lambda h: (h.config.numbers("mlp_multipliers", 2) or (1.0, 1.0))[which])


def _of_ssm_in(h: Hyper) -> Array:
    """One for each row of z, x, B, C and dt."""
    c = h.config
    each = c.numbers("ssm_multipliers", 5) or (1.0,) * 5
    names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")
    n, d, groups, state = (c.integer(name, low=1, high=MAX_DIM) for name in names)
    return np.repeat(
        np.array(each) * c.number("ssm_in_multiplier", default=1.0),
        (n * d, n * d, groups * state, groups * state, n),
    )


FALCON_CHANGES: dict[str, Change] = {
    "token_embd": _multiplier("embedding_multiplier"),
    "output": _multiplier("lm_head_multiplier"),
    "attn_q": _multiplier("attention_in_multiplier"),
    "attn_k": _multiplier("attention_in_multiplier", "key_multiplier"),
    "attn_v": _multiplier("attention_in_multiplier"),
    "attn_output": _multiplier("attention_out_multiplier"),
    "ffn_gate": _of_mlp(0),
    "ffn_down": _of_mlp(1),
    "ssm_in": times(_of_ssm_in),
    "ssm_out": _multiplier("ssm_out_multiplier"),
}


def _check_steps(c: Settings, _: Hyper) -> None:
    """The time steps that transformers allows must be all; of JSON, infinity has several forms."""
    limit = c.values.get("time_step_limit")
    if limit is not None and limit not in ([0.0, one] for one in (math.inf, None, "Infinity", _INFINITY)):
        raise UnsupportedError(f"{c.where}: time_step_limit is {limit!r:.60}, the engine has none")


def _check_falcon(c: Settings, h: Hyper) -> None:
    _check_steps(c, h)
    if c.flag("mamba_rms_norm", False) and c.flag("mamba_norm_before_gate", True):
        raise UnsupportedError(f"{c.where}: mamba_norm_before_gate is true, the engine gates before the norm")
    both = [c.number(f"{name}_multiplier", default=1.0) for name in ("embedding", "lm_head")]
    if c.flag("tie_word_embeddings", False) and both[0] != both[1]:
        raise UnsupportedError(f"{c.where}: the head is the embedding, but their multipliers differ")


# ---- Granite 4: experts' gates and ups are one tensor


def _granite_width(c: Settings, h: Hyper) -> int:
    names = ("intermediate_size",) if if_any("num_local_experts")(c, h) else ("shared_intermediate_size",)
    return c.integer(*names, low=1, high=MAX_DIM)


GRANITE_EXPERTS = where(
    if_any("num_local_experts"),
    mixture("num_local_experts", width="intermediate_size")
    | {"expert_shared_feed_forward_length": integer("shared_intermediate_size", low=1)},
)


def _check_granite(c: Settings, h: Hyper) -> None:
    _check_steps(c, h)
    kind = c.text("position_embedding_type", default="nope")
    if kind not in ("nope", "rope"):
        raise UnsupportedError(f"{c.where}: position_embedding_type is {kind!r:.60}; nope and rope are known")


# ---- Nemotron-H: layers of one block


_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _blocks(c: Settings) -> list[str]:
    """What each layer is."""
    pattern = c.text("hybrid_override_pattern")
    if not pattern:
        kinds = c.values.get("layers_block_type")
        pattern = "".join(
            next((k for k, one in _BLOCKS.items() if kind == one), "?")
            for kind in (
                {"linear_attention": "mamba", "full_attention": "attention"}.get(str(kind), kind)
                for kind in (kinds if isinstance(kinds, list) else [])
            )
        )
    unknown = next((k for k in pattern if k not in _BLOCKS), None)
    if not pattern or unknown:
        raise UnsupportedError(f"{c.where}: what each layer is is not said, or not known")
    if "-" in pattern and "E" in pattern:
        raise UnsupportedError(
            f"{c.where}: some layers are a feed-forward and some a mixture, which no file says"
        )
    return [_BLOCKS[k] for k in pattern]


def _of_blocks(*kinds: str) -> Callable[[Settings, int], Array]:
    return lambda c, n: np.array([n if kind in kinds else 0 for kind in _blocks(c)], np.int32)


NEMOTRON = {
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.*.up_proj": "ffn_up_exps",
    "mixer.experts.*.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
} | _mamba("mixer")

RECURRENT = (
    Family(
        arch="lfm2",
        names=("lfm2", "Lfm2ForCausalLM"),
        defaults={"rope_theta": 1e6},
        layer=LFM,
        outer=OUTER | {"embedding_norm": "token_embd_norm"},
        n_ff=_lfm_width,
        keys=LFM_KEYS,
        only={"conv_bias": (False,)},
        tied=True,
    ),
    Family(
        arch="lfm2moe",
        names=("lfm2_moe", "Lfm2MoeForCausalLM"),
        defaults={"rope_theta": 1e6},
        layer=LFM
        | gated("feed_forward.experts.*", "_exps", of=("w1", "w3", "w2"))
        | {"feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b.bias"},
        outer=OUTER | {"embedding_norm": "token_embd_norm"},
        keys=LFM_KEYS
        | mixture("num_experts")
        | {
            "leading_dense_block_count": integer("num_dense_layers", default=0),
            "expert_gating_func": always(2),
            "expert_weights_scale": unless(1.0, number("routed_scaling_factor", default=1.0)),
        },
        only={"conv_bias": (False,), "norm_topk_prob": (True,)},
        tied=True,
    ),
    Family(
        arch="qwen3next",
        names=("qwen3_next", "Qwen3NextForCausalLM"),
        defaults={"rms_norm_eps": 1e-6},
        layer=QWEN_NORMS
        | ATTENTION
        | QWEN_EXPERTS
        | DELTA
        | {"linear_attn.in_proj_qkvz": "attn_qkvz", "linear_attn.in_proj_ba": "ssm_ba"},
        changes=FUSED_EXPERTS
        | {
            "attn_qkvz": parts_of_rows(
                attn_qkv=lambda h: _qkvz(h, 0, 1, 2),
                attn_gate=lambda h: _qkvz(h, 3),
            ),
            "ssm_a": of_values(lambda _, a: -np.exp(a)),
        },
        plus_one=QWEN_PLUS_ONE,
        rope=RopeForm(share=0.25),
        keys=DELTA_KEYS | QWEN_MIXTURE,
        only={"attention_bias": (False,), "norm_topk_prob": (True,), "decoder_sparse_step": (1,)},
        check=_check_sparse_step,
        next_head=QWEN_HEAD,
        left_out=("mtp.",),
    ),
    Family(
        arch="qwen35",
        names=("qwen3_5_text", "qwen3_5", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        defaults={"rms_norm_eps": 1e-6},
        layer=QWEN_NORMS | ATTENTION | gated("mlp") | DELTA | QWEN35,
        changes=TILED,
        plus_one=QWEN_PLUS_ONE,
        rope=RopeForm(share=0.25),
        keys=DELTA_KEYS | {"rope.dimension_sections": _sections},
        only={"attention_bias": (False,)},
        next_head=QWEN_HEAD,
        left_out=("mtp.",),
    ),
    Family(
        arch="qwen35moe",
        names=(
            "qwen3_5_moe_text",
            "qwen3_5_moe",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        defaults={"rms_norm_eps": 1e-6},
        layer=QWEN_NORMS | ATTENTION | QWEN_EXPERTS | DELTA | QWEN35,
        changes=TILED | FUSED_EXPERTS,
        plus_one=QWEN_PLUS_ONE,
        rope=RopeForm(share=0.25),
        n_ff=integer("intermediate_size", "moe_intermediate_size", low=1),
        keys=DELTA_KEYS | QWEN_MIXTURE | {"rope.dimension_sections": _sections},
        only={"attention_bias": (False,), "norm_topk_prob": (True,)},
        next_head=QWEN_HEAD,
        left_out=("mtp.",),
    ),
    Family(
        arch="falcon-h1",
        names=("falcon_h1", "FalconH1ForCausalLM"),
        layer=ATTENTION
        | gated("feed_forward")
        | _mamba("mamba")
        | {"input_layernorm": "attn_norm", "pre_ff_layernorm.weight": "ffn_norm"},
        outer=OUTER | {"final_layernorm": "output_norm"},
        changes=MAMBA_CHANGES | FALCON_CHANGES,
        keys=HEADS | VOCAB | MAMBA_KEYS,
        only={
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "mamba_proj_bias": (False,),
            "projectors_bias": (False,),
        },
        check=_check_falcon,
    ),
    Family(
        arch="granitehybrid",
        names=("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
        defaults={"rms_norm_eps": 1e-6},
        layer=NORM | ATTENTION | _mamba("mamba") | GRANITE_EXPERT_NAMES,
        changes=PERMUTED | MAMBA_CHANGES | FUSED_EXPERTS | SHARED_OF_GRANITE,
        n_ff=_granite_width,
        keys=VOCAB
        | GRANITE
        | MAMBA_KEYS
        | GRANITE_EXPERTS
        | {
            "attention.head_count_kv": _heads_of_layers,
            "rope.scaling.finetuned": lambda c, _: (
                c.text("position_embedding_type", default="nope") == "rope"
            ),
        },
        only={"attention_bias": (False,), "mamba_proj_bias": (False,)},
        check=_check_granite,
        tied=True,
    ),
    Family(
        arch=lambda c: "nemotron_h_moe" if "moe" in _blocks(c) else "nemotron_h",
        names=("nemotron_h", "NemotronHForCausalLM"),
        prefix="backbone.",
        layer=NEMOTRON,
        outer={
            "embeddings": "token_embd",
            "embedding": "token_embd",
            "norm_f": "output_norm",
            "lm_head": "output",
        },
        changes=MAMBA_CHANGES,
        act="relu2",
        is_gated=False,
        layer_norm=True,  # as files call the epsilon
        rope=None,
        n_layer=lambda c, _: len(_blocks(c)),
        keys=HEADS
        | VOCAB
        | NEMOTRON_KEYS
        | {
            "attention.head_count_kv": lambda c, h: _of_blocks("attention")(c, h.n_head_kv),
            "feed_forward_length": lambda c, h: _of_blocks("mlp", "moe")(c, h.n_ff),
            "rope.dimension_count": lambda _, h: h.d_head,
            "rope.scaling.finetuned": always(False),
        }
        | where(
            lambda c, _: "moe" in _blocks(c),
            mixture("n_routed_experts")
            | {
                "expert_shared_feed_forward_length": integer("moe_shared_expert_intermediate_size", low=1),
                "expert_shared_count": integer("n_shared_experts", default=1),
                "expert_group_count": integer("n_group", default=1),
                "expert_group_used_count": integer("topk_group", default=1),
                "expert_weights_norm": flag("norm_topk_prob", True),
                "expert_weights_scale": number("routed_scaling_factor", default=1.0),
            },
        ),
        only={
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "mamba_proj_bias": (False,),
            "use_bias": (False,),
            "moe_latent_size": (None,),
        },
        check=_check_steps,
        left_out=("mtp.",),
    ),
)
