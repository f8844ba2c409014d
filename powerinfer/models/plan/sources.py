"""Which neurons are hot: where a plan's statistics come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..._engine.counts import COUNTS_KEY, EXPERT_COUNTS_KEY, Numbers
from ..._engine.file import ModelFile
from ..._engine.session import Model
from ...errors import ArgumentError
from ..statistics import read_activation_dir, read_counts
from .engine import Counts, Ids, Settings
from .gpuidx import read_gpuidx, split_path

ACTIVATION_DIR = "activation"
# A split only says which neurons are hot, so these are made to carry this share of all firing (hot neurons of
# the published ReLU models carry 80 % and more), over as many tokens as make the rounding not matter.
_SPLIT_CARRIES = 0.8
_SPLIT_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """How often each neuron fires, and in words how one knows."""

    kind: str
    """"file", "folder", "split", "given", "heuristic" or "dense"."""
    source: str
    counts: Counts | None = None
    """uint32 [n_layer, n_ff] over n_tokens; None: all the same."""
    n_tokens: int = 0


def heuristic(active_share: float) -> Statistics:
    """What is assumed where nothing is known."""
    return Statistics(
        kind="heuristic",
        source="none (`powerinfer profile` makes them): every neuron is taken to fire for "
        f"{active_share:.0%} of the tokens",
    )


def dense() -> Statistics:
    return Statistics(kind="dense", source="not needed: every neuron is computed for every token")


def find_statistics(model: Model, *, active_share: float = Settings().active_share) -> Statistics:
    """The best there is: keys of the model's file, a folder `activation` beside it, the original PowerInfer's
    split (`MODEL.generated.gpuidx`), or an assumption.

    Raises FormatError or FileError if what is found cannot be used.
    """
    if model.next_head:  # what is counted is the model's layers
        return unknown_experts(model) if model.info.n_expert else heuristic(active_share)
    found = from_file(model.file)
    if found is not None:
        return found
    n_layer, n_ff, path = model.info.n_layer, model.info.n_placed, model.file.path
    folder = path.absolute().parent / ACTIVATION_DIR
    if folder.is_dir():
        return from_folder(folder, n_layer, n_ff)
    if split_path(path).is_file():
        return from_split(split_path(path), n_layer, n_ff, active_share)
    return unknown_experts(model) if model.info.n_expert else heuristic(active_share)


def unknown_experts(model: Model) -> Statistics:
    """What is assumed of a mixture where nothing is known."""
    share = model.info.n_expert_used / model.info.n_expert
    return Statistics(
        kind="heuristic",
        source=f"none (`powerinfer profile` makes them): an expert is taken to be used by {share:.0%} of the "
        "tokens, some by three times as many as others; a session finds out which",
    )


def from_file(file: ModelFile) -> Statistics | None:
    """Of the keys of a model's file, if it has them."""
    counts = read_counts(file)
    if counts is None:
        return None
    key = COUNTS_KEY if counts.unit == "neurons" else EXPERT_COUNTS_KEY
    return _statistics("file", f"{key} of the file", counts.counts, counts.n_tokens)


def from_folder(folder: Path, n_layer: int, n_ff: int) -> Statistics:
    """Of the original PowerInfer's activation_0.pt, activation_1.pt ..."""
    counts = read_activation_dir(folder, n_layer=n_layer, n_ff=n_ff)
    return _statistics(
        "folder", f"the folder {folder.name}/ beside the model", counts.counts, counts.n_tokens
    )


def from_split(path: Path, n_layer: int, n_ff: int, active_share: float) -> Statistics:
    """Of a split, which knows hot and cold only."""
    split = read_gpuidx(path, n_layer, n_ff)
    counts = np.stack([_two_levels(ids, n_ff, active_share) for ids in split.hot])
    source = f"{path.name}: its hot neurons are taken to fire {_SPLIT_CARRIES:.0%} of the time that any does"
    return Statistics(kind="split", source=source, counts=counts, n_tokens=_SPLIT_TOKENS)


def _two_levels(hot: Ids, n_ff: int, active_share: float) -> Counts:
    share = len(hot) / n_ff
    counts = np.full(n_ff, round(active_share * _SPLIT_TOKENS), np.uint32)
    if 0 < share < _SPLIT_CARRIES:
        cold = active_share * (1 - _SPLIT_CARRIES) / (1 - share)
        counts[:] = round(cold * _SPLIT_TOKENS)
        counts[hot] = round(min(1.0, active_share * _SPLIT_CARRIES / share) * _SPLIT_TOKENS)
    return counts


def _statistics(kind: str, source: str, counts: Numbers, n_tokens: int) -> Statistics:
    shift = max(0, int(counts.max()).bit_length() - 32)
    return Statistics(
        kind=kind,
        source=f"{source}, over {n_tokens:,} tokens",
        counts=(counts >> np.uint64(shift)).astype(np.uint32),
        n_tokens=max(1, n_tokens >> shift),
    )


def given(counts: Sequence[Sequence[int]] | Numbers | Counts, n_tokens: int, source: str) -> Statistics:
    """Counts that a program has: [n_layer, n_ff], over n_tokens. Raises ArgumentError."""
    numbers = np.asarray(counts)
    if numbers.ndim != 2 or not numbers.size or numbers.dtype.kind not in "iuf":
        raise ArgumentError(f"counts must be numbers of [n_layer, n_ff]; these are of {numbers.shape}")
    if not (numbers.min() >= 0 and numbers.max() < 1 << 63):  # NaN as well
        raise ArgumentError("counts must be finite and not negative")
    if n_tokens < 1:
        raise ArgumentError(f"n_tokens is {n_tokens}, counts come from at least 1")
    return _statistics("given", source, numbers.astype(np.uint64), n_tokens)
