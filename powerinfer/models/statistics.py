"""How often each neuron of a model fires, or each expert of a mixture is used: counts, where they are kept,
and their power law.

A neuron fires for a token where act(gate) * up is not 0. Counts live in a model's file, as the keys

    powerinfer.neuron.counts   u32 array, n_layer * n_ff, layer-major
    powerinfer.neuron.tokens   u64, the tokens that were counted over

(of a mixture powerinfer.expert.counts and powerinfer.expert.tokens, with n_expert in the place of n_ff),

or, as the original PowerInfer has them, in a folder: activation_0.pt, activation_1.pt ..., a tensor [n_ff] of
any numeric type for each layer.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._engine.counts import KEYS, MOST, Counts, Numbers, Unit
from .._engine.file import ModelFile
from ..errors import ArgumentError, FileError, FormatError
from .writer import PartialFolder
from .writer import check_new_dir as check_new_dir

_FREQUENCY_TOKENS = 1 << 20  # what frequencies are turned into counts with, where nothing says how many
_FILE = re.compile(r"activation_(0|[1-9]\d*)\.pt")


# ---- in a model's file


def read_counts(file: ModelFile) -> Counts | None:
    """What a model's file says, or None if it says nothing.

    Raises FormatError if the keys are of the wrong type or length, or contradict each other.
    """
    meta = file.metadata
    unit: Unit = "experts" if _has_experts(file) else "neurons"
    counts_key, tokens_key = KEYS[unit]
    if counts_key not in meta and tokens_key not in meta:
        return None
    counts, n_tokens = meta.get(counts_key), meta.get(tokens_key)
    if not isinstance(counts, np.ndarray) or counts.dtype.kind not in "ui":
        raise FormatError(f"{file.path}: the key {counts_key} is missing or no array of integers")
    if not isinstance(n_tokens, int) or isinstance(n_tokens, bool):
        raise FormatError(f"{file.path}: the key {tokens_key} is missing or no integer")
    n_layer, n = _shape_of(file, unit)
    if len(counts) != n_layer * n:
        raise FormatError(
            f"{file.path}: the key {counts_key} has {len(counts)} numbers, but {n_layer} layers of {n} "
            f"{unit} have {n_layer * n}"
        )
    if counts.size and counts.min() < 0:
        raise FormatError(f"{file.path}: the key {counts_key} holds a negative number")
    try:
        return Counts(counts=counts.astype(np.uint64).reshape(n_layer, n), n_tokens=n_tokens, unit=unit)
    except ArgumentError as error:
        raise FormatError(f"{file.path}: {error}") from None


def _has_experts(file: ModelFile) -> bool:
    n_expert = file.metadata.get(f"{file.metadata.get('general.architecture')}.expert_count", 0)
    return isinstance(n_expert, int) and n_expert > 0


def _shape_of(file: ModelFile, unit: Unit) -> tuple[int, int]:
    """n_layer, and n_ff or n_expert."""
    architecture = file.metadata.get("general.architecture")
    shape = []
    for name in ("block_count", "feed_forward_length" if unit == "neurons" else "expert_count"):
        value = file.metadata.get(f"{architecture}.{name}")
        if not isinstance(value, int) or value <= 0:
            raise FormatError(f"{file.path}: the key {architecture}.{name} is missing or no positive integer")
        shape.append(value)
    # Layers behind the others that guess at further tokens (GLM 4.5) are not computed.
    unused = file.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    return shape[0] - (unused if isinstance(unused, int) else 0), shape[1]


# ---- in a folder


def read_activation_dir(
    folder: str | os.PathLike[str],
    *,
    n_layer: int | None = None,
    n_ff: int | None = None,
    n_tokens: int | None = None,
    unit: Unit = "neurons",
) -> Counts:
    """The counts of activation_0.pt, activation_1.pt ... in numeric order.

    n_layer, n_ff: what there must be (of a mixture n_ff is n_expert); None: what there is.
    n_tokens: the tokens counted over, which such files do not say; None: as many as the hottest neuron fired.
    Numbers that are not whole are frequencies, or proportional to them: they become counts with the hottest
    neuron at most at n_tokens (None: a million).

    Raises FileError, FormatError (a layer is missing, a tensor is of the wrong shape, or a number is
    negative, infinite or none), ArgumentError (n_tokens is less than a count).
    """
    from .convert.torch_file import read_torch

    paths = _activation_files(Path(folder), n_layer)
    layers: list[npt.NDArray[np.float64]] = []
    for path in paths:
        tensor = read_torch(path)
        if isinstance(tensor, dict):
            raise FormatError(f"{path} holds a dictionary, not one tensor")
        length = layers[0].size if layers else n_ff
        if tensor.ndim != 1 or not tensor.size or (length is not None and tensor.size != length):
            wanted = "n_ff" if length is None else length
            raise FormatError(f"{path} holds a tensor of shape {list(tensor.shape)}, not [{wanted}]")
        layers.append(_checked(path, tensor))
    values = np.stack(layers)
    hottest = float(values.max())
    if np.any(values != np.rint(values)):
        n = _FREQUENCY_TOKENS if n_tokens is None else n_tokens
        scaled = values * (n / max(hottest, 1.0))
        values = np.where(values > 0, np.maximum(np.rint(scaled), 1), 0)
    else:
        n = max(int(hottest), 1) if n_tokens is None else n_tokens
    return Counts(counts=values.astype(np.uint64), n_tokens=n, unit=unit)


def _activation_files(folder: Path, n_layer: int | None) -> list[Path]:
    """One path for each layer, in order."""
    try:
        names = os.listdir(folder)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise FileError(f"the folder {str(folder)!r} cannot be read: {reason}") from error
    found = {int(match[1]): folder / match[0] for name in names if (match := _FILE.fullmatch(name))}
    if not found:
        raise FormatError(f"the folder {folder} holds no activation_0.pt, activation_1.pt ...")
    n = max(found) + 1
    if n_layer is not None and n != n_layer:
        raise FormatError(
            f"the folder {folder} goes to activation_{n - 1}.pt, but the model has {n_layer} layers"
        )
    missing = next((i for i in range(n) if i not in found), None)
    if missing is not None:
        raise FormatError(f"the folder {folder} has an activation_{n - 1}.pt, but no activation_{missing}.pt")
    return [found[i] for i in range(n)]


def _checked(path: Path, tensor: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    if tensor.dtype.kind not in "uifb":
        raise FormatError(f"{path} holds {tensor.dtype}, not numbers that could be counts")
    values = tensor.astype(np.float64)
    wrong = np.flatnonzero(~((values >= 0) & (values <= MOST)))  # NaN as well
    if wrong.size:
        raise FormatError(f"{path} says {values[wrong[0]]:g} of neuron {wrong[0]}, which cannot be a count")
    return values


def write_activation_dir(folder: str | os.PathLike[str], counts: Counts) -> None:
    """Writes activation_0.pt ... (int64 [n_ff]) into a folder, which appears when all are written.

    Raises FileError if the folder exists and is not empty, or cannot be written.
    """
    from .convert.torch_file import write_torch

    with PartialFolder(folder) as partial:
        for i, layer in enumerate(counts.counts):
            write_torch(partial / f"activation_{i}.pt", layer.astype(np.int64))


# ---- the power law


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What counts say of one layer, or of a model."""

    active: float
    """Mean share of the neurons that fire for a token."""
    carry_80: float
    """Share of the neurons, the hottest ones, that make up 80 % of all firing."""
    carry_90: float
    never: float
    """Share of the neurons that never fired."""


def summarise(counts: Counts) -> list[Summary]:
    """One of each layer."""
    return [_summary(layer, counts.n_tokens) for layer in counts.counts]


def summarise_all(counts: Counts) -> Summary:
    """One of the model: its neurons taken together."""
    return _summary(counts.counts.reshape(-1), counts.n_tokens)


@dataclass(frozen=True, kw_only=True)
class ExpertSummary:
    """What counts of experts say of one layer, or of a model."""

    used: float
    """Mean share of the experts that a token uses."""
    carried_10: float
    """Share of all uses that the most used tenth of the experts has."""
    carried_25: float
    carried_50: float
    never: float
    """Share of the experts that were never used."""


def summarise_experts(counts: Counts) -> list[ExpertSummary]:
    """One of each layer; of a layer without experts all is 0."""
    return [_expert_summary(layer, counts.n_tokens) for layer in counts.counts]


def summarise_all_experts(counts: Counts) -> ExpertSummary:
    """One of the model: the mean over the layers that have experts, since each keeps its own."""
    layers = [_expert_summary(layer, counts.n_tokens) for layer in counts.counts if layer.any()]
    return ExpertSummary(
        **{
            field.name: float(np.mean([getattr(layer, field.name) for layer in layers])) if layers else 0.0
            for field in fields(ExpertSummary)
        }
    )


def _expert_summary(counts: Numbers, n_tokens: int) -> ExpertSummary:
    running = np.concatenate([[0], np.cumsum(np.sort(counts)[::-1])]).astype(np.float64)
    total = running[-1]

    def carried(share: float) -> float:
        # Between two experts the curve is straight: 10 % of 32 experts are 3.2 of them.
        at = np.interp(share * counts.size, np.arange(counts.size + 1), running)
        return float(at / total) if total else 0.0

    return ExpertSummary(
        used=float(total / (counts.size * n_tokens)),
        carried_10=carried(0.10),
        carried_25=carried(0.25),
        carried_50=carried(0.50),
        never=float(np.count_nonzero(counts == 0)) / counts.size if total else 0.0,
    )


def _summary(counts: Numbers, n_tokens: int) -> Summary:
    running = np.cumsum(np.sort(counts)[::-1])
    total = int(running[-1])

    def carry(percent: int) -> float:
        needed = -(-total * percent // 100)
        return (int(np.searchsorted(running, np.uint64(needed))) + 1) / counts.size if total else 0.0

    return Summary(
        active=total / (counts.size * n_tokens),
        carry_80=carry(80),
        carry_90=carry(90),
        never=float(np.count_nonzero(counts == 0)) / counts.size,
    )
