"""Low-rank adapters (LoRA) from GGUF files, as llama.cpp's converter writes them.

An adapter names matrices of a model and brings two small ones for each, `NAME.lora_a` [rank, inputs] and
`NAME.lora_b` [outputs, rank]: y = W x + lora_scale * alpha / rank * B (A x). The model's weights stay
as they are.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from .errors import ArgumentError, FormatError, UnsupportedError
from .file import ModelFile
from .session import Model

_A, _B = ".lora_a", ".lora_b"


def add_adapter(model: Model, path: str | os.PathLike[str], scale: float = 1.0) -> str | None:
    """Adds the adapter of a file to a model that has no sessions yet; a notice for the user, or None.

    Raises FileError, FormatError (no adapter, or not of this model), UnsupportedError (adapters of embeddings
    or of the output), ArgumentError for a scale that is no number, OutOfMemoryError. A model whose adapter
    failed must not be used.
    """
    if not math.isfinite(scale):
        raise ArgumentError(f"lora_scale is {scale}")
    with ModelFile(path) as file:
        meta = file.metadata
        if meta.get("general.type") != "adapter" or meta.get("adapter.type") != "lora":
            raise FormatError(
                f"{file.path} is no LoRA adapter: 'general.type' is {meta.get('general.type')!r}"
            )
        architecture = meta.get("general.architecture")
        if architecture != model.info.architecture:
            raise FormatError(
                f"{file.path} is for {architecture!r}, the model is {model.info.architecture!r}"
            )
        alpha = meta.get("adapter.lora.alpha", 0.0)
        shapes = {t.name: t.shape for t in file.tensors}
        pairs = _pairs(file, shapes)
        for name, rank in pairs.items():
            shape = model.matrix_shape(name)
            if shape is None:
                raise FormatError(f"{file.path} changes {name}, which the model does not have")
            if shapes[name + _A] != (rank, shape[1]) or shapes[name + _B] != (shape[0], rank):
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
            model.add_adapter(name, a, b, scale=strength)
    if model.info.predictor != "none" and any(".ffn_" in name for name in pairs):
        return (
            "the adapter changes the feed-forward, so the predictors no longer fit: all neurons are computed"
        )
    return None


def _strength(alpha: Any, rank: int) -> float:
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise FormatError(f"'adapter.lora.alpha' is {alpha!r}")
    return alpha / rank if alpha else 1.0


def _pairs(file: ModelFile, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The matrices that are changed, with the rank of what is added."""
    pairs = {}
    for name, shape in shapes.items():
        base = name.removesuffix(_A).removesuffix(_B)
        if base == name or base + _A not in shapes or base + _B not in shapes or len(shape) != 2:
            raise UnsupportedError(f"{file.path} has the tensor {name}, which is no part of a LoRA pair")
        if not base.startswith("blk."):
            raise UnsupportedError(f"{file.path} changes {base}: only matrices of layers can be adapted")
        pairs[base] = shapes[base + _A][0]
    if not pairs:
        raise FormatError(f"{file.path} has no tensors")
    return pairs
