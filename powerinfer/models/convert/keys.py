"""The keys of a file that describe the model, in the order of the original's converters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from .families.family import Family
from .hyper import Experts, Hyper
from .layout import OPT_UNUSED_POSITIONS
from .predictors import Predictors
from .rope import Rope

FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2}
"""Formats that can be written, with their numbers in `general.file_type`."""

_QUANTIZATION_VERSION = 2


def model_keys(
    hyper: Hyper, *, name: str, type: str, powerinfer: bool, predictors: Predictors | None
) -> Iterator[tuple[str, Any]]:
    """Keys and values up to the tokenizer's. Whole numbers are u32, floats f32.

    The keys that a PowerInfer file has are those of the original, which knows no others of this project but
    reads past them; an ordinary file says as much as llama.cpp's does.
    """
    yield "general.architecture", hyper.arch
    if not powerinfer:
        yield "general.type", "model"
    yield "general.name", name
    shape: Iterator[tuple[str, Any]]
    if hyper.row is not None:
        shape = _of_row(hyper, cast(Family, hyper.row))
    else:
        shape = {"falcon": _falcon, "opt": _opt}.get(hyper.arch, _llama)(hyper, powerinfer)
    for key, value in shape:
        yield f"{hyper.arch}.{key}", value
    yield "general.file_type", FILE_TYPES[type]
    if type.startswith("Q"):
        yield "general.quantization_version", _QUANTIZATION_VERSION
    if predictors is not None and predictors.threshold is not None:
        yield "powerinfer.sparse_threshold", predictors.threshold
    if hyper.act != hyper.default_act(powerinfer=powerinfer) or hyper.act_threshold:
        yield "powerinfer.hidden_act", hyper.act
    if hyper.act_threshold:
        yield "powerinfer.hidden_act_threshold", hyper.act_threshold


def _of_row(h: Hyper, row: Family) -> Iterator[tuple[str, Any]]:
    keys: dict[str, Any] = {
        "context_length": h.n_ctx,
        "embedding_length": h.n_embd,
        "block_count": h.n_layer + h.n_next,
        "feed_forward_length": h.n_ff,
        "attention.head_count": h.n_head,
        "attention.head_count_kv": h.n_head_kv,
        f"attention.layer_norm_{'' if row.layer_norm else 'rms_'}epsilon": h.norm_eps,
    }
    if h.d_rot:
        keys["rope.dimension_count"] = h.d_rot
    keys |= dict(_rope(h))
    if row.rope_none:
        keys.setdefault("rope.scaling.type", "none")
    keys |= h.keys
    if h.n_next:
        keys["nextn_predict_layers"] = h.n_next
        if (recurs := keys.get("attention.recurrent_layers")) is not None:
            keys["attention.recurrent_layers"] = np.append(recurs, [False] * h.n_next)
    yield from keys.items()


def _llama(h: Hyper, powerinfer: bool) -> Iterator[tuple[str, Any]]:
    yield "context_length", h.n_ctx
    yield "embedding_length", h.n_embd
    yield "block_count", h.n_layer + h.n_next
    if h.n_next:
        yield "nextn_predict_layers", h.n_next
    yield "feed_forward_length", h.n_ff
    yield "rope.dimension_count", h.d_rot or h.d_head
    yield "attention.head_count", h.n_head
    yield "attention.head_count_kv", h.n_head_kv
    yield "attention.layer_norm_rms_epsilon", h.norm_eps
    yield from _rope(h)
    if h.q_width != h.n_embd or h.family in _NAMES_HEADS:
        yield "attention.key_length", h.d_head
        yield "attention.value_length", h.d_head
    if h.window:
        yield "attention.sliding_window", h.window
    if h.experts is not None:
        yield from _experts(h, h.experts)
    if not powerinfer:
        yield "vocab_size", h.n_vocab


_NAMES_HEADS = ("qwen3", "qwen3moe", "smallthinker", "glm4moe", "gpt-oss")


def _experts(h: Hyper, experts: Experts) -> Iterator[tuple[str, Any]]:
    yield "expert_count", experts.n
    yield "expert_used_count", experts.n_used
    if h.arch not in ("llama", "olmoe"):
        yield "expert_feed_forward_length", experts.n_ff
    if h.arch == "glm4moe":
        yield "expert_shared_count", experts.n_ff_shared // experts.n_ff
        yield "leading_dense_block_count", experts.n_dense
        yield "expert_gating_func", 2
        yield "expert_weights_scale", experts.scale
        yield "expert_weights_norm", experts.is_normed
        return
    if experts.n_ff_shared:
        yield "expert_shared_feed_forward_length", experts.n_ff_shared
    if h.arch == "smallthinker":
        yield "expert_gating_func", 2 if experts.is_sigmoid else 1
    meant = h.arch in ("llama", "qwen3moe", "smallthinker", "gpt-oss")  # where no key says it
    if experts.is_normed != meant:
        yield "expert_weights_norm", experts.is_normed


def _falcon(h: Hyper, powerinfer: bool) -> Iterator[tuple[str, Any]]:
    yield "context_length", h.n_ctx
    yield "tensor_data_layout", "jploski"
    yield "embedding_length", h.n_embd
    yield "feed_forward_length", h.n_ff
    yield "block_count", h.n_layer
    yield "attention.head_count", h.n_head
    yield "attention.head_count_kv", h.n_head_kv
    yield "attention.layer_norm_epsilon", h.norm_eps
    yield from _rope(h)


def _opt(h: Hyper, powerinfer: bool) -> Iterator[tuple[str, Any]]:
    yield "context_length", h.n_ctx + OPT_UNUSED_POSITIONS  # rows of the table, as the original counts
    yield "embedding_length", h.n_embd
    yield "block_count", h.n_layer
    yield "feed_forward_length", h.n_ff
    yield "attention.head_count", h.n_head


def _rope(h: Hyper) -> Iterator[tuple[str, Any]]:
    rope = h.rope or Rope()
    if rope.has_base and (h.family != "falcon" or rope.base != Rope().base):
        yield "rope.freq_base", rope.base
    if rope.window_base:
        yield "rope.freq_base_swa", rope.window_base
    if rope.kind == "longrope":
        yield "rope.scaling.original_context_length", rope.n_ctx_orig
        yield "rope.scaling.attn_factor", rope.magnitude
    if rope.kind not in ("linear", "yarn"):
        return
    yield "rope.scaling.type", rope.kind
    yield "rope.scaling.factor", rope.factor
    yield "rope.scaling.original_context_length", rope.n_ctx_orig
    if rope.kind == "yarn":
        usual = Rope()
        if rope.magnitude:
            # The file's factor multiplies the magnitude that follows from the stretching.
            yield "rope.scaling.attn_factor", rope.magnitude / (1 + 0.1 * math.log(rope.factor))
        if rope.log_multiplier:
            yield "rope.scaling.yarn_log_multiplier", rope.log_multiplier
        if rope.beta_fast != usual.beta_fast:
            yield "rope.scaling.yarn_beta_fast", rope.beta_fast
        if rope.beta_slow != usual.beta_slow:
            yield "rope.scaling.yarn_beta_slow", rope.beta_slow


def note_on_original(hyper: Hyper, tensors: set[str], *, type: str, pre: str) -> str:
    """What the original would make of a PowerInfer file; "" if it gives the same answers.

    pre: how the tokenizer cuts words, "" for SentencePiece.
    """
    why = _why_not_original(hyper, tensors, type)
    if why:
        return f"the original PowerInfer cannot run this file: {why}"
    why = _why_original_differs(hyper, pre)
    return f"the original PowerInfer gives other answers with this file: {why}" if why else ""


def _why_not_original(h: Hyper, tensors: set[str], type: str) -> str:
    if h.arch not in ("llama", "bamboo", "falcon", "opt"):
        return f"it does not know {h.arch}"
    if type not in ("F16", "Q4_0"):
        return "it computes F16 and Q4_0 only"
    if "rope_freqs.weight" in tensors:
        return "it does not know Llama 3's rotation"
    if h.arch == "opt" and h.n_ctx != 2048:
        return "it takes OPT models of 2048 positions only"
    if h.arch in ("llama", "bamboo") and (h.qkv_bias or h.output_bias):
        return "it has no place for attention biases"
    if h.arch in ("llama", "bamboo") and h.q_width != h.n_embd:
        return "its heads must be as wide as the embedding together"
    return ""


def _why_original_differs(h: Hyper, pre: str) -> str:
    if h.act_threshold:
        return f"it takes every gate above 0 as active, the model those above {h.act_threshold:g}"
    if h.n_ff <= 1000:
        return "it masks layers of up to 1000 neurons in groups"
    if pre not in ("", "gpt-2"):
        return f"it cuts words as GPT-2 does, not by the scheme {pre}"
    return ""
