"""The feed-forward's weights as predictors see them, by layer, from any file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..._engine.activations import SILENT
from ..._engine.file import ModelFile
from ..._engine.session import ModelInfo
from ...errors import UnsupportedError

Floats = npt.NDArray[np.float32]

PARALLEL = ("falcon",)  # the feed-forward reads the norm of the block's input
LAYER_NORM = ("falcon", "opt", "nemotron")
_PIECE = 1 << 22  # weights dequantised at a time


def check_is_sparse(info: ModelInfo) -> None:
    """Raises UnsupportedError for a mixture of experts and a model whose neurons are never silent."""
    if info.n_expert:
        raise UnsupportedError(
            f"the model has {info.n_expert} experts: predictors of experts are not supported; its router "
            "says which are computed"
        )
    if info.activation not in SILENT:
        raise UnsupportedError(
            f"the model's activation is {info.activation}: no neuron is ever silent, so there is nothing to "
            "predict. Predictors need a version of the model that was trained with ReLU (ReluLLaMA, "
            "ProSparse, Bamboo, OPT); if this one was and its file does not say so, name it: "
            "--activation relu"
        )


def has_tensor(file: ModelFile, name: str) -> bool:
    return any(tensor.name == name for tensor in file.tensors)


def type_of(file: ModelFile, name: str) -> str:
    """The weight format of a tensor that is there."""
    return next(tensor.type for tensor in file.tensors if tensor.name == name)


def first_name(info: ModelInfo, layer: int) -> str:
    """The matrix whose product decides whether a neuron is silent: the gate, or up where there is none."""
    return f"blk.{layer}.ffn_{'gate' if info.is_gated else 'up'}.weight"


@dataclass(frozen=True, kw_only=True)
class First:
    """What decides whether neurons are silent: neuron j is active only if

        rows[j] . norm(x) + bias[j] > 0,    norm(x) = x / rms(x), or (x - mean(x)) / deviation(x)

    with the norm's own weight and bias, and the threshold of a shifted ReLU, worked into rows and bias.
    """

    rows: Floats
    """[n_ff, n_embd]; of a LayerNorm the mean of each row is taken away, so that x need not be centred."""
    bias: Floats
    """[n_ff]"""
    centred: bool
    """The norm is a LayerNorm."""

    def scale(self, x: Floats) -> Floats:
        """rms or deviation [n] of inputs [n, n_embd]."""
        if self.centred:
            x = x - x.mean(axis=1, keepdims=True)
        return np.asarray(np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=1)), np.float32)


def read_first(file: ModelFile, info: ModelInfo, layer: int) -> First:
    """The deciding matrix of a layer, as a function of what a predictor reads."""
    norm = f"blk.{layer}.{'attn' if info.architecture in PARALLEL else 'ffn'}_norm"
    rows = file.dequantize(first_name(info, layer))
    bias = np.zeros(info.n_ff, np.float32)
    if has_tensor(file, f"{norm}.bias"):
        bias += rows @ file.dequantize(f"{norm}.bias")
    name = first_name(info, layer).replace(".weight", ".bias")
    if has_tensor(file, name):
        bias += file.dequantize(name)
    rows *= file.dequantize(f"{norm}.weight")
    centred = info.architecture in LAYER_NORM
    if centred:
        rows -= rows.mean(axis=1, keepdims=True)
    return First(rows=rows, bias=bias - np.float32(info.activation_threshold), centred=centred)


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """What the rows of one neuron take in the model's file."""

    first: float
    """The row that is read to see whether it is active."""
    others: float
    """Those that are read if it is."""

    def share(self, predictor_bytes: float, n_ff: int, computed: float, active_computed: float) -> float:
        """Bytes that a token reads over those of dense mode; computed, active_computed: of the neurons."""
        rows = computed * self.first + active_computed * self.others
        return (predictor_bytes / n_ff + rows) / (self.first + self.others)


def read_row_bytes(file: ModelFile, info: ModelInfo, layer: int) -> RowBytes:
    """Of a layer."""
    sizes = {
        tensor.name.removeprefix(f"blk.{layer}.ffn_").removesuffix(".weight"): tensor.n_bytes / info.n_ff
        for tensor in file.tensors
        if tensor.name.startswith(f"blk.{layer}.ffn_") and tensor.name.endswith(".weight")
    }
    down = sizes.get("down_t", sizes.get("down", 0.0))
    if info.is_gated:
        return RowBytes(first=sizes["gate"], others=sizes["up"] + down)
    return RowBytes(first=sizes["up"], others=down)


def down_norms(file: ModelFile, info: ModelInfo, layer: int) -> Floats:
    """[n_ff]: how long the vector is that each neuron's hidden value is multiplied with."""
    transposed = f"blk.{layer}.ffn_down_t.weight"
    name = transposed if has_tensor(file, transposed) else f"blk.{layer}.ffn_down.weight"
    n_rows, n_columns = (info.n_ff, info.n_embd) if name == transposed else (info.n_embd, info.n_ff)
    squares = np.zeros(info.n_ff, np.float64)
    step = max(1, _PIECE // n_columns)
    for at in range(0, n_rows, step):
        part = np.square(file.dequantize(name, first=at, n_rows=min(step, n_rows - at)), dtype=np.float64)
        if name == transposed:
            squares[at : at + step] = part.sum(axis=1)
        else:
            squares += part.sum(axis=0)
    return np.sqrt(squares).astype(np.float32)
