"""What a row of the table of families says, and the words that rows are made of.

A row names a family's tensors in checkpoints and in files, what becomes of those that are not just renamed,
and where config.json has the values of the file's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....errors import FormatError, UnsupportedError
from ..hyper import MAX_DIM, Hyper
from ..json_file import Settings
from ..rope import WHOLE, RopeForm
from ..stored import Array, Stack, StoredTensor

Value = Callable[[Settings, Hyper], Any]
"""Of a key, of config.json and what is read of it already; None: the key is not written."""

Change = Callable[[Hyper, StoredTensor], Mapping[str, StoredTensor | Stack]]
"""What becomes of a tensor: names in the file, without the layer, "" for the one that it has, and values."""

NORM = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
POST_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ATTENTION = {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"} | {
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def gated(
    block: str, end: str = "", *, of: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, str]:
    """A feed-forward's matrices. of: their names, of gate, up and down."""
    return {
        f"{block}.{name}": f"ffn_{new}{end}" for name, new in zip(of, ("gate", "up", "down"), strict=True)
    }


# Of the layer behind the others that guesses at further tokens, beside what every layer has.
NEXT_LAYER = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}
OUTER = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of checkpoints."""

    arch: str | Callable[[Settings], str]
    """`general.architecture`."""
    names: tuple[str, ...]
    """config.json's model_type and classes."""
    layer: Mapping[str, str]
    """A layer's tensors: published, as in files. Without .weight and .bias, or with what they have instead;
    experts.* stands for all experts."""
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    """Those outside layers, behind `prefix` or without it."""
    prefix: str = "model."
    layers: str = "layers."
    changes: Mapping[str, Change] = field(default_factory=dict)
    """By a tensor's name in files, without the layer and what is behind the dot."""
    act: str = "silu"
    """What a file means that names no activation."""
    acts: Mapping[str, str] = field(default_factory=dict)
    """Activations that mean others in its configs."""
    is_gated: bool = True
    layer_norm: bool = False
    tied: bool = False
    """Whether the head is the embedding where the config does not say."""
    plus_one: tuple[str, ...] = ()
    """Norms whose weights get 1 added, by their names in files."""
    rope: RopeForm | None = WHOLE
    """None: there is no rotation."""
    rope_none: bool = False
    """The file says that rotation is not stretched."""
    n_ff: Value | None = None
    """None: intermediate_size."""
    n_layer: Value | None = None
    """None: num_hidden_layers."""
    keys: Mapping[str, Value] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers means where config.json does not say it, and the engine would mean something else."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of the config that the engine runs; the first is meant where none is given."""
    check: Callable[[Settings, Hyper], None] | None = None
    """Raises UnsupportedError for what the engine does not run."""
    left_out: tuple[str, ...] = ()
    """What names of tensors begin with that no file has."""
    next_head: Mapping[str, str] | None = None
    """Of a family whose head for further tokens is known (NextN, MTP): what names of its tensors begin with,
    and what those of one more layer have instead; empty where it is published as one."""
    of_weights: Mapping[str, str] = field(default_factory=dict)
    """Numbers that a layer has as tensors, and the keys that hold those of all layers."""
    extra: Callable[[Hyper], Mapping[str, Array]] | None = None
    """Tensors that no checkpoint has."""


# ---- values of keys


def integer(*names: str, low: int = 0, default: int | None = None) -> Value:
    return lambda c, _: c.integer(*names, low=low, high=1 << 31, default=default)


def number(*names: str, default: float | None = None) -> Value:
    return lambda c, _: c.number(*names, default=default)


def unless(usual: float, value: Value) -> Value:
    """Only where it is another one."""

    def of(c: Settings, h: Hyper) -> Any:
        found = value(c, h)
        return None if found == usual else found

    return of


def if_any(*names: str) -> Value:
    """A whole number, where there is one that is not 0."""
    return lambda c, _: c.integer(*names, low=0, high=1 << 31, default=0) or None


def flag(name: str, default: bool) -> Value:
    return lambda c, _: c.flag(name, default)


def always(value: Any) -> Value:
    return lambda _c, _h: value


HEADS: dict[str, Value] = {
    "attention.key_length": lambda _, h: h.d_head,
    "attention.value_length": lambda _, h: h.d_head,
}
VOCAB: dict[str, Value] = {"vocab_size": lambda _, h: h.n_vocab}


def where(applies: Callable[[Settings, Hyper], Any], keys: Mapping[str, Value]) -> dict[str, Value]:
    """These keys, of checkpoints to which it applies."""

    def of(value: Value) -> Value:
        return lambda c, h: value(c, h) if applies(c, h) else None

    return {name: of(value) for name, value in keys.items()}


def mixture(
    n: str, *, used: str = "num_experts_per_tok", width: str = "moe_intermediate_size"
) -> dict[str, Value]:
    """Keys of a mixture, by the names of the config."""
    keys = {"expert_count": integer(n, low=1), "expert_used_count": integer(used, low=1)}
    return keys | {"expert_feed_forward_length": integer(width, low=1)}


def kinds_of_layers(c: Settings, h: Hyper, *names: str) -> list[str]:
    """What config.json calls each layer. Raises FormatError."""
    name = next((name for name in names if name in c), names[0])
    kinds = c.values.get(name)
    if not isinstance(kinds, list) or len(kinds) != h.n_layer or not all(isinstance(k, str) for k in kinds):
        raise c.wrong(name, f"a list of {h.n_layer} names")
    return kinds


def full_each(period: int) -> Callable[[Settings, Hyper], None]:
    """A check: of so many layers the last one sees all positions, the others have a window."""

    def check(c: Settings, h: Hyper) -> None:
        names = ("sliding_window_pattern", "_sliding_window_pattern")
        given = next((c.values[name] for name in names if name in c), period)
        full = [(i + 1) % period == 0 for i in range(h.n_layer)]
        kinds = [kind == "full_attention" for kind in c.texts("layer_types")]
        if kinds and all(kinds) and "sliding_window" not in c:
            return
        if (kinds and kinds != full) or (given not in (period, "L" * (period - 1) + "G") and not kinds):
            raise UnsupportedError(
                f"{c.where}: the engine knows such models where the last of each {period} layers sees all "
                "positions and the others have a window"
            )

    return check


# ---- changes of tensors


def by_rows(rows: Callable[[Hyper], Array]) -> Change:
    """In another order."""
    return _parts({"": rows})


def parts_of_rows(**parts: Callable[[Hyper], Array]) -> Change:
    """Several tensors, which have all rows of one."""
    return _parts(parts)


def _parts(parts: Mapping[str, Callable[[Hyper], Array]]) -> Change:
    def change(h: Hyper, t: StoredTensor) -> dict[str, StoredTensor | Stack]:
        each = {name: rows(h) for name, rows in parts.items()}
        check_rows(t, sum(map(len, each.values())))
        return {name: _with_rows(t, rows) for name, rows in each.items()}

    return change


def check_rows(t: StoredTensor, n: int) -> None:
    """Raises FormatError where a tensor has not so many rows."""
    if t.shape[0] != n:
        raise FormatError(f"tensor {t.name} has {t.shape[0]} rows, by config.json it must have {n}")


def _with_rows(t: StoredTensor, rows: Array) -> StoredTensor:
    return StoredTensor(t.name, t.dtype, t.view, rows=rows, columns=t.columns, scale=t.scale)


def times(scale: Callable[[Hyper], float | Array]) -> Change:
    return lambda h, t: {"": StoredTensor(t.name, t.dtype, t.view, scale=scale(h))}


def of_values(function: Callable[[Hyper, Array], Array]) -> Change:
    """Of a vector that is not large."""

    def change(h: Hyper, t: StoredTensor) -> dict[str, StoredTensor | Stack]:
        if t.view.size > MAX_DIM:
            raise FormatError(f"tensor {t.name} has the shape {list(t.shape)}, and must be a vector")
        return {"": StoredTensor(t.name, "F32", np.asarray(function(h, t.floats()), np.float32))}

    return change


def turned(_h: Hyper, t: StoredTensor) -> dict[str, StoredTensor | Stack]:
    """Published with columns for rows."""
    return {"": StoredTensor(t.name, t.dtype, t.view.T) if t.view.ndim == 2 else t}


def halves(gate: str, up: str, *, is_turned: bool = False) -> Change:
    """Gate's rows, then up's: two tensors. Of one matrix, or of one for each expert.

    is_turned: experts are published with columns for rows.
    """

    def change(h: Hyper, t: StoredTensor) -> dict[str, StoredTensor | Stack]:
        if t.view.ndim == 3:
            view = t.view.swapaxes(1, 2) if is_turned else t.view
            half = view.shape[1] // 2
            return {gate: stack_of(t, view[:, :half]), up: stack_of(t, view[:, half:])}
        half = t.view.shape[0] // 2
        return {gate: _view(t, t.view[:half]), up: _view(t, t.view[half:])}

    return change


def all_experts(*, is_turned: bool = False) -> Change:
    """A matrix of all experts in one tensor. is_turned: with columns for rows."""

    def change(_: Hyper, t: StoredTensor) -> dict[str, StoredTensor | Stack]:
        if t.view.ndim != 3:
            raise FormatError(
                f"tensor {t.name} has the shape {list(t.shape)}, and must have three dimensions"
            )
        return {"": stack_of(t, t.view.swapaxes(1, 2) if is_turned else t.view)}

    return change


def _view(t: StoredTensor, view: Array) -> StoredTensor:
    return StoredTensor(t.name, t.dtype, view)


def stack_of(t: StoredTensor, view: Array) -> Stack:
    """Matrices of one tensor, [n, rows, columns]."""
    return Stack(t.name, tuple(StoredTensor(f"{t.name}[{i}]", t.dtype, one) for i, one in enumerate(view)))


def column(_h: Hyper, t: StoredTensor) -> dict[str, StoredTensor | Stack]:
    """A vector as a matrix of one column."""
    return {"": StoredTensor(t.name, "F32", t.floats().reshape(-1, 1))}


def pairs_of_halves(n_head: int, d_head: int) -> Array:
    """Rows of q or k so that the two of a rotated pair, half a head apart, become neighbours."""
    order = np.arange(n_head * d_head).reshape(n_head, 2, d_head // 2)
    return np.ascontiguousarray(order.swapaxes(1, 2)).ravel()


PERMUTED: dict[str, Change] = {
    "attn_q": by_rows(lambda h: pairs_of_halves(h.n_head, h.d_head)),
    "attn_k": by_rows(lambda h: pairs_of_halves(h.n_head_kv, h.d_head)),
}
"""Of files whose rotation turns neighbours, where checkpoints have halves."""
