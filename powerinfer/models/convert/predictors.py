"""Predictors of active neurons as the original publishes them: a folder of model_0.pt, model_1.pt, ...

Each holds two matrices: fc1.weight [r, n_embd] and fc2.weight [n_ff, r], with r as each layer likes it; a
neuron's score is its row of fc2 . relu(fc1 . x). Beside them config.json may name the threshold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import FileError, FormatError
from .json_file import read_object_if_any
from .stored import StoredTensor
from .torch_file import open_torch


@dataclass(frozen=True)
class Predictors:
    """One predictor per layer."""

    fc1: tuple[StoredTensor, ...]
    fc2: tuple[StoredTensor, ...]
    threshold: float | None
    """Of the scores, for all layers; None: not given, which means 0."""
    thresholds: tuple[float, ...] = ()
    """Of each layer, where they differ."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(matrix.shape[0] for matrix in self.fc1)


def _files_of_layers(folder: Path, n_layer: int) -> list[Path]:
    """model_0.pt, model_1.pt, ... of a folder, by number; other files do not count.

    Raises FileError if one of n_layer is missing, FormatError if there are more.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise FileError(f"{folder} cannot be read: {error.strerror}") from error
    found = [int(match[1]) for name in names if (match := re.fullmatch(r"model_(0|[1-9]\d*)\.pt", name))]
    missing = next((i for i in range(n_layer) if i not in found), None)
    if missing is not None:
        raise FileError(f"{folder} has no model_{missing}.pt; the model has {n_layer} layers")
    if len(found) > n_layer:
        raise FormatError(f"{folder} has model_{max(found)}.pt, but the model has {n_layer} layers only")
    return [folder / f"model_{i}.pt" for i in range(n_layer)]


def read_predictors(folder: Path, *, n_layer: int, n_embd: int, n_ff: int) -> Predictors:
    """Names and shapes are checked, weights read later. Raises FileError, FormatError, UnsupportedError."""
    fc1, fc2 = [], []
    for path in _files_of_layers(folder, n_layer):
        content = open_torch(path)
        if not isinstance(content, dict):
            raise FormatError(f"{path} holds a single tensor, expected are fc1.weight and fc2.weight")
        names = ", ".join(sorted(content)) or "nothing"
        if set(content) != {"fc1.weight", "fc2.weight"}:
            raise FormatError(f"{path} holds {names:.200}; expected are fc1.weight and fc2.weight alone")
        first, second = content["fc1.weight"], content["fc2.weight"]
        rank = first.shape[0] if first.shape else 0
        if not rank or first.shape != (rank, n_embd) or second.shape != (n_ff, rank):
            raise FormatError(
                f"{path}: fc1.weight is {list(first.shape)} and fc2.weight {list(second.shape)}; "
                f"they must be [r, {n_embd}] and [{n_ff}, r]"
            )
        if not first.is_float or not second.is_float:
            raise FormatError(f"{path} holds numbers of type {first.dtype} and {second.dtype}, not floats")
        fc1.append(first)
        fc2.append(second)
    config = read_object_if_any(folder / "config.json")
    threshold = config.number("sparse_threshold") if "sparse_threshold" in config else None
    thresholds = config.numbers("sparse_thresholds", n_layer)
    if thresholds and threshold is None:
        threshold = min(thresholds)
    return Predictors(tuple(fc1), tuple(fc2), threshold, thresholds)
