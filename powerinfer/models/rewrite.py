"""Copies a model's file with some keys and tensors changed, in pieces, without loading a model.

    with ModelFile("in.gguf") as source:
        rewrite(
            source,
            "out.gguf",
            keys={"powerinfer.sparse_threshold": 0.5, "powerinfer.neuron.tokens": ("u64", n)},
            replace_tensors={"blk.0.fc1.weight": ("F16", fc1)},
        )

A split model becomes one file. The result may have the name of the source: what was read of the old file
stays valid, and the new one takes its place at the end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._engine import formats
from .._engine.file import ModelFile
from ..errors import ArgumentError
from .writer import GGUFWriter

PIECE_BYTES = 8 << 20

Progress = Callable[[int, int], object]
"""Called with the bytes of tensors that are done, and their number in all."""


@dataclass(frozen=True, kw_only=True)
class NewTensor:
    """A tensor whose bytes are made when they are to be written."""

    type: str
    shape: tuple[int, ...]
    """As numpy has it."""
    pieces: Callable[[], Iterable[Any]]
    """Contiguous buffers that are the tensor's bytes, one after the other."""


def from_array(type: str, array: npt.ArrayLike) -> NewTensor:
    """A tensor of float weights (any numpy float type) that will be written in the format `type`."""
    weights = np.asarray(array)
    if weights.ndim < 1 or weights.dtype.kind != "f":
        raise ArgumentError(f"weights are arrays of floats, not {weights.dtype} {weights.shape}")

    def pieces() -> Iterator[npt.NDArray[np.uint8]]:
        rows = weights.reshape(-1, weights.shape[-1])
        step = rows_per_piece(rows.shape[1])
        for first in range(0, len(rows), step):
            yield formats.quantize(rows[first : first + step], type)

    return NewTensor(type=type, shape=weights.shape, pieces=pieces)


def rows_per_piece(n_columns: int) -> int:
    """So many rows of floats that they and what is made of them take a bounded share of memory."""
    return max(1, PIECE_BYTES // (4 * n_columns))


def rewrite(
    source: ModelFile,
    out_path: str | os.PathLike[str],
    *,
    powerinfer: bool | None = None,
    keys: Mapping[str, Any] | None = None,
    drop_keys: Collection[str] = (),
    replace_tensors: Mapping[str, NewTensor | tuple[str, npt.ArrayLike]] | None = None,
    drop_tensors: Collection[str] = (),
    progress: Progress | None = None,
) -> None:
    """Writes out_path: the source with these changes. It appears when it is complete, or not at all.

    powerinfer: whether it gets the magic PWRI; None: as the source. keys: replaced in their places or
    appended; a value is what `GGUFWriter.add` takes, or (type, value). replace_tensors: replaced in their
    places or appended; (type, array) is an array of float weights that will be written in that format.
    Raises FileError (also for a part of the source itself when that is split), ArgumentError.
    """
    new = {
        name: tensor if isinstance(tensor, NewTensor) else from_array(*tensor)
        for name, tensor in (replace_tensors or {}).items()
    }
    unknown = sorted(set(drop_tensors) - {tensor.name for tensor in source.tensors})
    if unknown:
        raise ArgumentError(f"the file {source.path} has no tensor {unknown[0]!r} that could be dropped")
    check_target(source, out_path)
    result = {
        tensor.name: _copied(source, tensor.name, tensor.type, tensor.shape) for tensor in source.tensors
    }
    result.update(new)
    result = {name: tensor for name, tensor in result.items() if name not in drop_tensors}
    is_powerinfer = source.info.is_powerinfer if powerinfer is None else powerinfer
    with GGUFWriter(out_path, powerinfer=is_powerinfer) as writer:
        writer.copy_metadata(source, without=drop_keys)
        for key, value in (keys or {}).items():
            if isinstance(value, tuple):
                writer.add(key, value[1], value[0])
            else:
                writer.add(key, value)
        for name, tensor in result.items():
            writer.add_tensor(name, tensor.type, tensor.shape)
        total, done = writer.n_tensor_bytes, 0
        for tensor in result.values():
            for piece in tensor.pieces():
                writer.write(piece)
                done += memoryview(piece).nbytes
                if progress is not None:
                    progress(done, total)


def _copied(source: ModelFile, name: str, type: str, shape: tuple[int, ...]) -> NewTensor:
    """A tensor as the source has it."""

    def pieces() -> Iterator[npt.NDArray[np.uint8]]:
        data = source.raw(name)
        for at in range(0, data.size, PIECE_BYTES):
            yield data[at : at + PIECE_BYTES]

    return NewTensor(type=type, shape=shape, pieces=pieces)


def check_target(source: ModelFile, out_path: str | os.PathLike[str]) -> None:
    """Raises ArgumentError if out_path is a part of the source and that is split."""
    name = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", source.path.name)
    if source.info.n_parts == 1 or name is None or not os.path.exists(out_path):
        return
    for i in range(1, source.info.n_parts + 1):
        if os.path.samefile(source.path.with_name(f"{name[1]}{i:05}{name[2]}"), out_path):
            raise ArgumentError(
                f"{out_path} is a part of the split model that is read: the result is one file, name another"
            )
