"""Low-rank adapters (LoRA) from GGUF files, as llama.cpp's converter writes them.

An adapter names matrices of a model and brings two small ones for each, `NAME.lora_a` [rank, inputs] and
`NAME.lora_b` [outputs, rank]: y = W x + lora_scale * alpha / rank * B (A x). Of the embedding, whose rows are
looked up, it is `token_embd.weight.lora_a` [n_vocab, rank] and `lora_b` [n_embd, rank]: row t of A, times B,
is added to row t of W. The model's weights stay as they are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ArgumentTypeError, FormatError, UnsupportedError
from . import checks
from .file import ModelFile
from .session import Model

_A, _B = ".lora_a", ".lora_b"
_EMBEDDING = "token_embd.weight"
_OWN = (_EMBEDDING, "output.weight")  # matrices of no layer


Pair = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], float]
"""a [rank, columns], b [rows, rank], and the strength."""


def adapters_of(given: Any, scale: Any) -> list[tuple[str | os.PathLike[str], float]]:
    """What lora_path and lora_scale mean: one path or several, and one scale for all or one for each.

    Raises ArgumentTypeError, ArgumentError (another number of scales)."""
    paths = [] if given is None else [given] if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(paths, Sequence) or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise ArgumentTypeError(f"lora_path is {given!r}, it must be a path or a list of paths")
    each = scale if isinstance(scale, (list, tuple)) else [scale] * len(paths)
    scales = [checks.real("lora_scale", one) for one in each]
    if len(scales) != len(paths):
        raise ArgumentError(f"there are {len(paths)} paths in lora_path and {len(scales)} in lora_scale")
    return list(zip(paths, scales, strict=True))


def add_adapters(model: Model, adapters: Sequence[tuple[str | os.PathLike[str], float]]) -> str | None:
    """Adds the adapters of files, each with its scale, to a model that has no sessions yet; a notice for the
    user, or None. What several of them add to a matrix is added up: their ranks stand side by side.

    An adapter of the embedding leaves the output matrix as it is, also where both are one (as in PEFT).

    Raises FileError, FormatError (no adapter, or not of this model), UnsupportedError (other tensors than
    matrices of layers, embedding and output; an adapter that begins to work after certain tokens, aLoRA),
    ArgumentError for a scale that is no number, OutOfMemoryError. A model whose adapter failed must not be
    used.
    """
    found: dict[str, list[Pair]] = {}
    for path, scale in adapters:
        for name, pair in _read(model, path, scale).items():
            found.setdefault(name, []).append(pair)
    for name, pairs in found.items():
        a, b, strength = pairs[0]
        if len(pairs) > 1:
            a, strength = np.concatenate([np.float32(own) * a for a, _, own in pairs]), 1.0
            b = np.concatenate([b for _, b, _ in pairs], axis=1)
        model.add_adapter(name, a, b, scale=strength)
    if model.info.predictor != "none" and any(".ffn_" in name for name in found):
        return (
            "the adapter changes the feed-forward, so the predictors no longer fit: all neurons are computed"
        )
    return None


def check_adapter(file: ModelFile, model_architecture: Any) -> None:
    """Whether the keys of a file are those of a LoRA for models of an architecture.

    Raises FormatError, UnsupportedError (aLoRA)."""
    meta = file.metadata
    if meta.get("general.type") != "adapter" or meta.get("adapter.type") != "lora":
        raise FormatError(f"{file.path} is no LoRA adapter: 'general.type' is {meta.get('general.type')!r}")
    architecture = meta.get("general.architecture")
    if architecture != model_architecture:
        raise FormatError(f"{file.path} is for {architecture!r}, the model is {model_architecture!r}")
    if "adapter.alora.invocation_tokens" in meta:
        raise UnsupportedError(f"{file.path} is an activated LoRA (aLoRA), which is not supported")


def _read(model: Model, path: str | os.PathLike[str], scale: float) -> dict[str, Pair]:
    """What the adapter of a file adds to each matrix."""
    if not math.isfinite(scale):
        raise ArgumentError(f"lora_scale is {scale}")
    found: dict[str, Pair] = {}
    with ModelFile(path) as file:
        check_adapter(file, model.info.architecture)
        alpha = file.metadata.get("adapter.lora.alpha", 0.0)
        shapes = {t.name: t.shape for t in file.tensors}
        pairs = _pairs(file, shapes)
        for name, rank in pairs.items():
            shape = model.matrix_shape(name)
            if shape is None:
                raise FormatError(f"{file.path} changes {name}, which the model does not have")
            rows, cols = shape
            expected = {_A: (rank, cols), _B: (rows, rank)}
            if name == _EMBEDDING:
                expected = {_A: (rows, rank), _B: (cols, rank)}
            if any(shapes[name + part] != expected[part] for part in (_A, _B)):
                raise FormatError(
                    f"the adapter of {name} has shapes {shapes[name + _A]} and {shapes[name + _B]}, "
                    f"the matrix has {shape}"
                )
        for name, rank in pairs.items():
            a, b = file.dequantize(name + _A), file.dequantize(name + _B)
            strength = scale * _strength(alpha, rank)
            with np.errstate(over="ignore"):
                largest = np.float32(strength) * np.abs(a).max()
            if not (np.isfinite(largest) and np.isfinite(b).all()):
                raise FormatError(f"the adapter of {name} has weights that are no numbers, or too large")
            if name == _EMBEDDING:
                a, b = b.T, a
            found[name] = a, b, strength
    return found


def _strength(alpha: Any, rank: int) -> float:
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise FormatError(f"'adapter.lora.alpha' is {alpha!r}")
    return alpha / rank if alpha else 1.0


def _pairs(file: ModelFile, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The matrices that are changed, with the rank of what is added."""
    pairs = {}
    for name, shape in shapes.items():
        base = name.removesuffix(_A).removesuffix(_B)
        if "_exps." in base:
            raise UnsupportedError(
                f"{file.path} changes {base}: adapters of a mixture's experts are not supported, those of "
                "its attention are"
            )
        if base == name or base + _A not in shapes or base + _B not in shapes or len(shape) != 2:
            raise UnsupportedError(f"{file.path} has the tensor {name}, which is no part of a LoRA pair")
        if not base.startswith("blk.") and base not in _OWN:
            raise UnsupportedError(
                f"{file.path} changes {base}: only matrices of layers, embedding and output can be adapted"
            )
        pairs[base] = shapes[base + _A][1 if base == _EMBEDDING else 0]
    if not pairs:
        raise FormatError(f"{file.path} has no tensors")
    return pairs
