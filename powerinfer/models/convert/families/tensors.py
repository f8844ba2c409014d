"""The tensors of a file whose family is a row of the table."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import numpy.typing as npt

from ....errors import FormatError, UnsupportedError
from ..checkpoint import Checkpoint
from ..hyper import Hyper
from ..stored import Stack, StoredTensor
from .family import NEXT_LAYER, Family, of_values

_KINDS = (".weight", ".bias")
_ORDER = re.compile(r"blk\.(\d+)\.")
_plus_one = of_values(lambda _, w: w + 1)

# Of models that see and hear, what is not the language model, and what its tensors begin with.
_OTHER = re.compile(r"(model\.)?(vision|visual|audio|multi_modal|embed_vision|embed_audio|patch|mm_|speech)")
_FURTHER_HEAD = re.compile(r"mtp\.layers\.[1-9]")
_LANGUAGE = re.compile(r"^(model\.language_model\.|language_model\.model\.)")


@dataclass
class Found:
    """What a checkpoint has of a file."""

    tensors: dict[str, StoredTensor | Stack] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    skipped: list[str] = field(default_factory=list)
    """Of parts that no file has."""
    notes: list[str] = field(default_factory=list)
    keys: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Of the file, without the architecture: numbers of each layer."""


def find_tensors(checkpoint: Checkpoint, h: Hyper, row: Family) -> Found:
    """Names and values; tensors that the row does not name are not used. Raises FormatError."""
    out, experts = Found(), dict[str, dict[int, StoredTensor]]()
    for published, tensor in checkpoint.tensors.items():
        name = _plain(published, h, row)
        where, inner = _layer_of(name, row)
        if name == "" or where >= h.n_layer + h.n_next:
            out.skipped.append(published)
            continue
        if where >= 0 and inner in row.of_weights:
            out.used.add(published)
            if tensor.view.size != 1:
                shape = list(tensor.shape)
                raise FormatError(
                    f"{checkpoint.folder}: tensor {published} has shape {shape}, not one number"
                )
            numbers = out.keys.setdefault(row.of_weights[inner], np.full(h.n_layer, np.nan, np.float32))
            numbers[where] = tensor.floats().reshape(-1)[0]
            continue
        inner, expert = _one_of(inner)
        new = _file_name(inner, _names(where, h, row))
        if new is None:
            continue
        if not tensor.is_float:
            raise FormatError(
                f"{checkpoint.folder}: tensor {published} is of type {tensor.dtype}, not of floats"
            )
        if not tensor.shape or not tensor.view.size:
            shape = list(tensor.shape)
            raise FormatError(f"{checkpoint.folder}: tensor {published} has the shape {shape}, which is none")
        out.used.add(published)
        if where >= 0:
            new = f"blk.{where}.{new}"
        if expert >= 0:
            experts.setdefault(new, {})[expert] = tensor
            continue
        for changed, value in _changed(h, row, new, tensor):
            if changed in out.tensors:
                raise FormatError(
                    f"{checkpoint.folder}: two tensors become {changed}, one is {published:.200}"
                )
            out.tensors[changed] = value
    for key, numbers in out.keys.items():
        if not np.isfinite(numbers).all():
            layer = np.flatnonzero(~np.isfinite(numbers))[0]
            raise FormatError(f"{checkpoint.folder}: layer {layer} has no finite number for {key}")
    for name, parts in experts.items():
        out.tensors[name] = _stacked(checkpoint, h, name, parts)
    out.tensors.update(
        (name, StoredTensor(name, "F32", values))
        for name, values in (row.extra(h) if row.extra else {}).items()
    )
    out.tensors = dict(sorted(out.tensors.items(), key=lambda one: _place(one[0], h)))
    if out.skipped:
        out.notes.append("parts of the checkpoint that the engine does not use are left out")
    return out


def file_tensors(
    published: str, tensor: StoredTensor, h: Hyper, row: Family
) -> Iterator[tuple[str, StoredTensor | Stack]]:
    """What one tensor becomes, under names in a file; nothing where the row does not name it."""
    name = _plain(published, h, row)
    where, inner = _layer_of(name, row)
    new = _file_name(inner, _names(where, h, row))
    if new is not None and where < h.n_layer:
        yield from _changed(h, row, f"blk.{where}.{new}" if where >= 0 else new, tensor)


def next_layers(checkpoint: Checkpoint, h: Hyper, row: Family) -> int:
    """Heads for further tokens; a config may tell of some that were not saved. Raises UnsupportedError where
    there are several and the family has names for one."""
    if row.next_head is None:
        return 0
    for name in filter(_FURTHER_HEAD.match, checkpoint if row.next_head else ()):
        raise UnsupportedError(
            f"{checkpoint.folder}: {name:.200} is of a second layer that guesses at further tokens, and of "
            "this family the engine knows one; --no-mtp leaves them out"
        )
    of_one = replace(h, n_next=1)
    return count_joins({_plain(name, of_one, row) for name in checkpoint}, f"{row.layers}", h.n_layer)


def count_joins(names: Container[str], layers: str, n_layer: int) -> int:
    """How many layers behind the others join a token and a hidden state."""
    return next(i for i in count() if f"{layers}{n_layer + i}.eh_proj.weight" not in names)


def _names(where: int, h: Hyper, row: Family) -> Mapping[str, str]:
    """What tensors of a layer are called, or of none."""
    if where < 0:
        return row.outer
    return {**row.layer, **NEXT_LAYER} if where >= h.n_layer else row.layer


def _plain(published: str, h: Hyper, row: Family) -> str:
    """The name as the language model alone has it; "" of a part that is left out."""
    if h.n_next:
        for start, inner in (row.next_head or {}).items():
            if published.startswith(start):
                return f"{row.layers}{h.n_layer}.{inner}{published.removeprefix(start)}"
    if published.startswith(row.left_out):
        return ""
    if "text_config" in h.config:
        if _OTHER.match(published):
            return ""
        published = _LANGUAGE.sub("model.", published).removeprefix("language_model.")
    return published.removeprefix(row.prefix)


def _layer_of(name: str, row: Family) -> tuple[int, str]:
    """A layer's number, or -1, and the name within."""
    match = re.match(rf"{re.escape(row.layers)}(\d{{1,6}})\.(.+)", name)
    return (int(match[1]), match[2]) if match else (-1, name)


def _one_of(inner: str) -> tuple[str, int]:
    """Of several tensors that are stored together (experts, projections of streams): their name and which."""
    match = re.match(r"(.*(?:\bexperts|\baltup_\w*projections))\.(\d{1,6})\.(.+)", inner)
    return (f"{match[1]}.*.{match[3]}", int(match[2])) if match else (inner, -1)


def _file_name(inner: str, names: Mapping[str, str]) -> str | None:
    if inner in names:
        return names[inner]
    for kind in _KINDS:
        stem = inner.removesuffix(kind)
        if stem != inner and stem in names:
            return f"{names[stem]}{kind}"
    return None


def _changed(h: Hyper, row: Family, name: str, t: StoredTensor) -> Iterator[tuple[str, StoredTensor | Stack]]:
    """What a tensor becomes, under names in a file."""
    match = _ORDER.match(name)
    layer, inner = (match[0], name[match.end() :]) if match else ("", name)
    stem, dot, kind = inner.rpartition(".")
    stem, end = (stem, dot + kind) if dot + kind in _KINDS else (inner, "")
    if t.view.ndim == 3 and t.view.shape[1] == 1:  # of a convolution, each channel by itself
        t = StoredTensor(t.name, t.dtype, t.view[:, 0])
    if stem == "ffn_gate_inp_shexp" and t.view.ndim == 2:
        t = StoredTensor(t.name, t.dtype, t.view[0])
    change = row.changes.get(stem)
    if stem in row.plus_one and end == ".weight":
        change = _plus_one
    if change is None:
        yield name, t
        return
    for new, value in change(h, t).items():
        yield (f"{layer}{new}{end}" if new else name), value


def _stacked(checkpoint: Checkpoint, h: Hyper, name: str, parts: dict[int, StoredTensor]) -> Stack:
    one, n = "expert", h.experts.n if h.experts is not None else 0
    if name.startswith("altup_"):
        one, n = "projection", int(h.keys["altup.num_inputs"]) - 1
    missing = next((e for e in range(n) if e not in parts), None)
    if missing is not None or len(parts) != n:
        what = (
            f"{one} {missing} is missing"
            if missing is not None
            else f"there are {len(parts)} {one}s, not {n}"
        )
        raise FormatError(f"{checkpoint.folder}: of what becomes {name}, {what}")
    shapes = {part.shape for part in parts.values()}
    if len(shapes) > 1:
        raise FormatError(f"{checkpoint.folder}: {one}s that become {name} have the shapes {sorted(shapes)}")
    return Stack(name, tuple(parts[e] for e in range(n)))


def _place(name: str, h: Hyper) -> tuple[int, str]:
    """The order of a file: embeddings, layer by layer, the head."""
    match = _ORDER.match(name)
    return (int(match[1]) if match else h.n_layer if name.startswith("output") else -1, "")
