"""Predictors into a PowerInfer file, or into a folder as the original publishes them.

A PowerInfer file has fc1 and fc2 in each layer, and ffn_down transposed, so that a neuron's row is in one
piece; the original's loader accepts exactly its own set of tensors, which this follows: llama, bamboo and
falcon files have an output.weight of their own, opt files have none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._engine import formats
from ..._engine.file import ModelFile, TensorInfo
from ..._engine.session import ModelInfo, Progress
from ...errors import ArgumentError
from ..convert.torch_file import write_torch
from ..rewrite import NewTensor, rewrite
from ..writer import PartialFolder
from .ffn import first_name, type_of
from .train import Net

LoadNet = Callable[[int], Net]
"""The predictor of a layer."""

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
"""What predictors can be stored as."""
BLOCK = 32
_FLOATS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_FALLBACK = "Q8_0"
_ROWS = 512  # of a transposed matrix made at a time


def predictor_type(file: ModelFile, info: ModelInfo, name: str) -> str:
    """The weight format of fc1 and fc2. name: as the user gave it; "auto": F16, or in a quantised model what
    its feed-forward has, if predictors can have it.

    Raises ArgumentError for a format that predictors cannot have.
    """
    if name == "auto":
        own = type_of(file, first_name(info, 0))
        name = "F16" if own in _FLOATS else own if own in TYPES and not info.n_embd % BLOCK else _FALLBACK
    if name not in TYPES or (name not in _FLOATS and info.n_embd % BLOCK):
        raise ArgumentError(
            f"predictors cannot have the format {name}: it must be F32, F16 or BF16, or, where n_embd is a "
            f"multiple of {BLOCK} (here {info.n_embd}), Q8_0 or Q4_0"
        )
    return name


def rank_bytes(info: ModelInfo, type: str) -> float:
    """What one hidden unit of one layer's predictor takes."""
    return formats.row_bytes(type, BLOCK) / BLOCK * (info.n_embd + info.n_ff)


def as_stored(weights: npt.NDArray[np.float32], type: str) -> npt.NDArray[np.float32]:
    """Weights [rows, columns] as a reader of a file in this format gets them."""
    data = formats.quantize(weights, type)
    if type == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(weights.shape)
    if type in _FLOATS:
        return data.view(_FLOATS[type]).astype(np.float32).reshape(weights.shape)
    # Blocks of 32 weights: a float16 scale, then a number for each, in bytes or in halves of bytes.
    blocks = data.reshape(-1, formats.row_bytes(type, BLOCK))
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    numbers = blocks[:, 2:]
    if type == "Q8_0":
        values = numbers.view(np.int8).astype(np.float32)
    else:
        values = np.concatenate([numbers & 15, numbers >> 4], axis=1).astype(np.float32) - 8
    return np.asarray(scale * values).reshape(weights.shape)


# ---- a file


def write_model(
    source: ModelFile,
    info: ModelInfo,
    out: Path,
    load: LoadNet,
    *,
    type: str,
    keys: Mapping[str, Any],
    notice: Callable[[str], None],
    progress: Progress | None = None,
) -> None:
    """Writes the source as a PowerInfer file with these predictors. notice: told what a user should know.

    Raises FileError, ArgumentError.
    """
    tensors = {tensor.name: tensor for tensor in source.tensors}
    new: dict[str, NewTensor] = {}
    dropped = []
    for i in range(info.n_layer):
        for kind in ("weight", "bias"):
            name = f"blk.{i}.ffn_down.{kind}"
            if name not in tensors:
                continue
            dropped.append(name)
            tensor = tensors[name]
            renamed = name.replace("ffn_down", "ffn_down_t")
            new[renamed] = _copy(source, tensor) if kind == "bias" else _transposed(source, tensor)
        net = load(i)
        new[f"blk.{i}.fc1.weight"] = _weights(load, i, "fc1", net.fc1.shape, type)
        new[f"blk.{i}.fc2.weight"] = _weights(load, i, "fc2", net.fc2.shape, type)
    down = [tensors[name] for name in dropped if name.endswith("ffn_down.weight")]
    if any(tensor.type not in _FLOATS for tensor in down):
        notice("ffn_down is quantised: its weights are rounded once more where it is transposed")
    if any(tensor.type != new[tensor.name.replace("_down", "_down_t")].type for tensor in down):
        notice(f"ffn_down has a format that its rows cannot have: its transposed copy is {_FALLBACK}")
    output, embedding = tensors.get("output.weight"), tensors["token_embd.weight"]
    if info.architecture == "opt" and output is not None:
        if np.array_equal(source.raw("output.weight"), source.raw("token_embd.weight")):
            dropped.append("output.weight")
        else:
            notice("the model has its own output.weight, which the original PowerInfer cannot read")
    elif info.architecture in ("llama", "bamboo", "falcon") and output is None:
        new["output.weight"] = _copy(source, embedding)
    rewrite(
        source,
        out,
        powerinfer=True,
        keys=keys,
        replace_tensors=new,
        drop_tensors=dropped,
        progress=progress,
    )


def _copy(source: ModelFile, tensor: TensorInfo) -> NewTensor:
    return NewTensor(type=tensor.type, shape=tensor.shape, pieces=lambda: [source.raw(tensor.name)])


def _weights(load: LoadNet, layer: int, name: str, shape: tuple[int, ...], type: str) -> NewTensor:
    def pieces() -> Iterator[npt.NDArray[np.uint8]]:
        yield formats.quantize(getattr(load(layer), name), type)

    return NewTensor(type=type, shape=shape, pieces=pieces)


def _transposed(source: ModelFile, tensor: TensorInfo) -> NewTensor:
    """ffn_down [n_embd, n_ff] as ffn_down_t [n_ff, n_embd]: the same numbers in a format of floats; other
    formats have blocks that run along rows, so they are made anew."""
    n_embd, n_ff = tensor.shape
    exact = tensor.type in _FLOATS
    fits = exact or (formats.can_quantize(tensor.type) and n_embd % formats.block(tensor.type) == 0)
    type = tensor.type if fits else _FALLBACK

    def pieces() -> Iterator[npt.NDArray[Any]]:
        if exact:
            matrix = source.raw(tensor.name).view(_FLOATS[type]).reshape(n_embd, n_ff)
        else:
            matrix = source.dequantize(tensor.name)
        for at in range(0, n_ff, _ROWS):
            rows = np.ascontiguousarray(matrix[:, at : at + _ROWS].T)
            yield rows if exact else formats.quantize(rows, type)

    return NewTensor(type=type, shape=(n_ff, n_embd), pieces=pieces)


# ---- a folder


def write_folder(folder: Path, n_layer: int, load: LoadNet, thresholds: Sequence[float]) -> None:
    """Writes model_0.pt ... (fc1.weight, fc2.weight, float16) and config.json into a new folder, which
    appears when it is complete.

    Raises FileError if it exists and is not empty, or cannot be written.
    """
    config = {"sparse_threshold": min(thresholds), "sparse_thresholds": list(thresholds)}
    with PartialFolder(folder) as partial:
        for i in range(n_layer):
            net = load(i)
            weights = {"fc1.weight": net.fc1.astype(np.float16), "fc2.weight": net.fc2.astype(np.float16)}
            write_torch(partial / f"model_{i}.pt", weights)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
