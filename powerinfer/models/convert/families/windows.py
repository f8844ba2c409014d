"""Families of which some layers have a window: Gemma, Command R7B and A, OLMo 2 and 3, EXAONE 4."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np

from ....errors import FormatError, UnsupportedError
from ..hyper import MAX_DIM, Hyper
from ..json_file import Settings
from ..rope import RopeForm
from ..stored import Array, Stack, StoredTensor
from .dense import LLAMA
from .family import (
    ATTENTION,
    HEADS,
    OUTER,
    POST_NORMS,
    VOCAB,
    Family,
    Value,
    full_each,
    gated,
    if_any,
    integer,
    kinds_of_layers,
    mixture,
    number,
    where,
)

WINDOW: dict[str, Value] = {"attention.sliding_window": integer("sliding_window", low=1)}
GEMMA_ACTS = {"gelu": "gelu_tanh"}  # what the first configs say is not what they were trained with
GEMMA_NORMS = (
    "attn_norm",
    "post_attention_norm",
    "ffn_norm",
    "post_ffw_norm",
    "output_norm",
    "attn_q_norm",
    "attn_k_norm",
)


def _scores_of(wide: int) -> Value:
    """A check of Gemma's scores: scaled by the size of heads, and in the model of so many layers by the
    width of a head's share of the stream."""

    def check(c: Settings, h: Hyper) -> None:
        expected = h.n_embd / h.n_head if h.n_layer == wide else h.d_head
        if c.number("query_pre_attn_scalar", default=float(expected)) != expected:
            raise UnsupportedError(
                f"{c.where}: query_pre_attn_scalar is {c.values['query_pre_attn_scalar']}, "
                f"the engine has {expected:g}"
            )

    return check


def _gemma(period: int, wide: int) -> Value:
    of_layers, of_scores = full_each(period), _scores_of(wide)

    def check(c: Settings, h: Hyper) -> None:
        of_layers(c, h)
        of_scores(c, h)

    return check


# ---- Gemma 4, whose layers differ


def _kinds(c: Settings, h: Hyper) -> list[bool]:
    """Which layers see all positions."""
    return [kind == "full_attention" for kind in kinds_of_layers(c, h, "layer_types")]


def _of_full(c: Settings, h: Hyper, name: str, own: str, usual: int) -> int:
    """A number of the layers that see all: `own`, or that of the first in per_layer_config."""
    full = _kinds(c, h)
    if True not in full:
        raise c.wrong("layer_types", "a list in which some layers have full_attention")
    first = full.index(True)
    per_layer = c.object("per_layer_config").object(str(first))
    return per_layer.integer(name, default=c.integer(own, default=usual, high=1 << 20), low=1, high=1 << 20)


def _full_head(c: Settings, h: Hyper) -> int:
    return _of_full(c, h, "head_dim", "global_head_dim", h.d_head)


def _kv_heads(c: Settings, h: Hyper) -> Array | int:
    many = _of_full(c, h, "num_key_value_heads", "num_global_key_value_heads", h.n_head_kv)
    if many == h.n_head_kv:
        return h.n_head_kv
    return np.array([many if full else h.n_head_kv for full in _kinds(c, h)], np.int32)


def _widths(c: Settings, h: Hyper) -> Array | int:
    n = c.integer("num_kv_shared_layers", default=0, high=h.n_layer)
    if not n or not c.flag("use_double_wide_mlp", False):
        return h.n_ff
    return np.array([h.n_ff * (1 + (i >= h.n_layer - n)) for i in range(h.n_layer)], np.int32)


def _still_pairs(h: Hyper) -> dict[str, Array]:
    """What divides the frequencies of full layers: a number so large that the pair does not turn."""
    assert h.rope is not None
    n = int(h.keys["attention.key_length"]) // 2
    share = int(h.rope.share * n) if h.rope.kind == "proportional" else n
    return {"rope_freqs.weight": np.where(np.arange(n) < share, 1.0, 1e30).astype(np.float32)}


GEMMA4: dict[str, Value] = {
    "feed_forward_length": _widths,
    "attention.head_count_kv": _kv_heads,
    "attention.key_length": _full_head,
    "attention.value_length": _full_head,
    "attention.key_length_swa": lambda _, h: h.d_head,
    "attention.value_length_swa": lambda _, h: h.d_head,
    "rope.dimension_count": _full_head,
    "rope.dimension_count_swa": lambda _, h: h.d_head,
    "attention.sliding_window_pattern": lambda c, h: np.array([not full for full in _kinds(c, h)]),
    "attention.shared_kv_layers": integer("num_kv_shared_layers", default=0),
    "embedding_length_per_layer_input": integer("hidden_size_per_layer_input", default=0),
    "final_logit_softcapping": number("final_logit_softcapping", default=0.0),
} | where(lambda c, _: c.flag("enable_moe_block", False), mixture("num_experts", used="top_k_experts"))

PER_LAYER = {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
PER_LAYER_OUTER = {
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}

# ---- Gemma 3n


def _one_width(c: Settings, h: Hyper) -> int:
    """Of all layers, for each of which config.json may have it."""
    given = c.values.get("intermediate_size")
    widths = given if isinstance(given, list) and given else [given]
    if widths.count(widths[0]) != len(widths):
        raise UnsupportedError(f"{c.where}: the engine has no such layers of different intermediate_size")
    if not isinstance(widths[0], int) or isinstance(widths[0], bool) or not 1 <= widths[0] <= MAX_DIM:
        raise c.wrong("intermediate_size", "a whole number, or a list of them")
    return widths[0]


def _cuts(c: Settings, h: Hyper) -> Array:
    """Up to how many standard deviations over the mean each layer's gates are cut, which is so for a given
    share of them; -inf: none is."""
    given = c.values.get("activation_sparsity_pattern")
    n = 10 if h.n_layer > 10 else 0
    shares = [0.95] * n + [0.0] * (h.n_layer - n) if given is None else given
    if not isinstance(shares, list):
        shares = [shares] * h.n_layer
    if len(shares) != h.n_layer or not all(isinstance(s, (int, float)) and 0 <= s < 1 for s in shares):
        raise c.wrong("activation_sparsity_pattern", f"a list of {h.n_layer} numbers from 0 up to 1")
    return np.array([NormalDist().inv_cdf(s) if s else -np.inf for s in shares], np.float32)


def _as_many_as_tokens(h: Hyper, t: StoredTensor) -> dict[str, StoredTensor | Stack]:
    """Tokens that stand for what is seen and heard have the first token's row, as transformers takes it."""
    n = t.shape[0]
    if not 0 < n <= h.n_vocab:
        raise FormatError(f"tensor {t.name} has {n} rows, and the vocabulary {h.n_vocab} tokens")
    return {"": t if n == h.n_vocab else replace(t, rows=np.r_[:n, np.zeros(h.n_vocab - n, np.int64)])}


# What the config.json of those that see leaves out.
GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": 4096,
}

WINDOWS = (
    Family(
        arch="gemma",
        names=("gemma", "GemmaForCausalLM"),
        defaults={"rms_norm_eps": 1e-6},
        layer=LLAMA,
        plus_one=GEMMA_NORMS,
        act="gelu_tanh",
        acts=GEMMA_ACTS,
        keys=HEADS,
        only={"attention_bias": (False,)},
        tied=True,
    ),
    Family(
        arch="gemma2",
        names=("gemma2", "Gemma2ForCausalLM"),
        defaults={"rms_norm_eps": 1e-6, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        layer=POST_NORMS | ATTENTION | gated("mlp"),
        plus_one=GEMMA_NORMS,
        act="gelu_tanh",
        acts=GEMMA_ACTS,
        keys=HEADS
        | WINDOW
        | {
            "attn_logit_softcapping": number("attn_logit_softcapping", default=0.0),
            "final_logit_softcapping": number("final_logit_softcapping", default=0.0),
        },
        only={"attention_bias": (False,)},
        check=_gemma(2, wide=46),
        tied=True,
    ),
    Family(
        arch="gemma3",
        names=("gemma3_text", "gemma3", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        defaults=GEMMA3,
        layer=POST_NORMS | ATTENTION | gated("mlp"),
        plus_one=GEMMA_NORMS,
        act="gelu_tanh",
        acts=GEMMA_ACTS,
        rope=RopeForm(window_base=10000.0),
        keys=HEADS | WINDOW,
        only={
            "attention_bias": (False,),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False,),
        },
        check=_gemma(6, wide=62),
        tied=True,
    ),
    Family(
        arch="gemma3n",
        names=("gemma3n_text", "gemma3n", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 256, "num_key_value_heads": 2},
        layer=POST_NORMS
        | ATTENTION
        | gated("mlp")
        | PER_LAYER
        | {
            "altup.correct_output_scale": "altup_correct_scale.weight",
            "altup.correction_coefs": "altup_correct_coef",
            "altup.prediction_coefs": "altup_predict_coef",
            "altup.modality_router": "altup_router",
            "altup.router_norm": "altup_router_norm",
            "laurel.linear_left": "laurel_l",
            "laurel.linear_right": "laurel_r",
            "laurel.post_laurel_norm": "laurel_post_norm",
        },
        outer=OUTER
        | PER_LAYER_OUTER
        | {
            "altup_projections.*": "altup_proj",
            "altup_unembed_projections.*": "altup_unembd_proj",
        },
        changes={"per_layer_token_embd": _as_many_as_tokens},
        act="gelu_tanh",
        acts=GEMMA_ACTS,
        rope=RopeForm(window_base=10000.0),
        n_ff=_one_width,
        keys=HEADS
        | {
            "attention.sliding_window": integer("sliding_window", default=512, low=1),
            "attention.sliding_window_pattern": lambda c, h: np.array([not full for full in _kinds(c, h)]),
            "attention.shared_kv_layers": integer("num_kv_shared_layers", default=15),
            "embedding_length_per_layer_input": integer("hidden_size_per_layer_input", default=256),
            "activation_sparsity_scale": _cuts,
            "altup.active_idx": integer("altup_active_idx", default=0),
            "altup.num_inputs": integer("altup_num_inputs", default=4, low=2),
            "final_logit_softcapping": number("final_logit_softcapping", default=30.0),
        },
        only={"attention_bias": (False,), "altup_correct_scale": (True,)},
        tied=True,
    ),
    Family(
        arch="gemma4",
        names=("gemma4_text", "gemma4", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 1e6},
        layer=POST_NORMS
        | ATTENTION
        | gated("mlp")
        | PER_LAYER
        | {
            "layer_scalar": "layer_output_scale.weight",
            "experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "experts.down_proj": "ffn_down_exps.weight",
            "router.proj": "ffn_gate_inp",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
        },
        outer=OUTER | PER_LAYER_OUTER,
        act="gelu_tanh",
        acts=GEMMA_ACTS,
        rope=RopeForm(window_base=10000.0, proportional=True),
        keys=WINDOW | GEMMA4,
        only={"attention_bias": (False,)},
        extra=_still_pairs,
        tied=True,
    ),
    Family(
        arch="olmo2",
        names=("olmo2", "Olmo2ForCausalLM"),
        layer=POST_NORMS | ATTENTION | gated("mlp"),
        only={"attention_bias": (False,)},
    ),
    Family(
        arch="olmo2",
        names=("olmo3", "Olmo3ForCausalLM"),
        defaults={"rope_theta": 500000.0},
        layer=POST_NORMS | ATTENTION | gated("mlp"),
        rope=RopeForm(window_base=0.0),
        keys=WINDOW,
        only={"attention_bias": (False,)},
        check=full_each(4),
    ),
    Family(
        arch="cohere2",
        names=("cohere2", "Cohere2ForCausalLM"),
        layer=LLAMA,
        layer_norm=True,
        rope_none=True,
        keys=HEADS | VOCAB | WINDOW | {"logit_scale": number("logit_scale", default=0.0625)},
        only={"attention_bias": (False,)},
        check=full_each(4),
        tied=True,
    ),
    Family(
        arch="exaone4",
        names=("exaone4", "Exaone4ForCausalLM"),
        layer=POST_NORMS | ATTENTION | gated("mlp"),
        keys=VOCAB | {"attention.sliding_window": if_any("sliding_window")},
        check=full_each(4),
    ),
)
