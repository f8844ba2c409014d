"""The original PowerInfer's split file, `MODEL.generated.gpuidx`: which neurons of each layer lie on the GPU.

It is a GGUF container with the magic PWRI, version 3, and

    general.architecture           string  "generic.gpu_index"
    generic.gpu_index.block_count  u32
    split.vram_capacity            u64     bytes that the split was made for

then for each layer i two tensors of I32, found by their position: blk.i.gpu_idx [n_ff], 1 for neurons on the
GPU; blk.i.gpu_bucket [k], their ids, ascending. A layer may have k = 0, and a tensor without elements is none
that the engine's own reader takes for sound, so these files have a reader and a writer of their own.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import ArgumentError, FileError, FormatError
from ..writer import PartialFile
from .engine import Ids

_ARCHITECTURE = "generic.gpu_index"
_U32, _U64, _STRING, _I32 = 4, 10, 8, 26
_ALIGNMENT = 32
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """What such a file says."""

    hot: tuple[Ids, ...]
    """Of each layer, ascending."""
    vram_bytes: int


def split_path(model: Path) -> Path:
    """Where the original keeps the split of a model."""
    return model.with_name(model.name + ".generated.gpuidx")


class _Reader:
    """Reads from bytes that may be anything."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.at = path, data, 0

    def wrong(self, fact: str) -> FormatError:
        return FormatError(f"{self.path}: {fact}")

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise self.wrong(f"ends at byte {len(self.data)}, in the middle of its header")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, code: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize(code)))[0])

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def key(self, name: str, kind: int) -> int | str:
        """The value of the next key, which must be this one."""
        found, found_kind = self.text(), self.number("I")
        if (found, found_kind) != (name, kind):
            raise self.wrong(
                f"has the key {found[:60]!r} of type {found_kind} where {name} of type {kind} belongs"
            )
        return self.text() if kind == _STRING else self.number("Q" if kind == _U64 else "I")


def read_gpuidx(path: str | os.PathLike[str], n_layer: int, n_ff: int) -> Split:
    """The split of a model of that shape.

    Raises FileError, FormatError (not such a file, or one of another shape, or one that contradicts itself).
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise FileError(f"{path} is no file" if path.exists() else f"{path} does not exist")
        if path.stat().st_size > _MOST_BYTES:
            raise FormatError(f"{path} has {path.stat().st_size} bytes, too many for a split")
        r = _Reader(path, path.read_bytes())
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    if r.take(4) != b"PWRI" or r.number("I") != 3:
        raise r.wrong("is no PowerInfer file of version 3")
    n_tensors, n_keys = r.number("Q"), r.number("Q")
    if n_keys != 3:
        raise r.wrong(f"has {n_keys} keys, a split has 3")
    if r.key("general.architecture", _STRING) != _ARCHITECTURE:
        raise r.wrong("is no split of neurons between GPU and CPU")
    n_blocks, vram_bytes = r.key(f"{_ARCHITECTURE}.block_count", _U32), r.key("split.vram_capacity", _U64)
    if n_tensors != 2 * n_layer or n_blocks != n_layer:
        raise r.wrong(f"is the split of {n_blocks} layers in {n_tensors} tensors, the model has {n_layer}")
    places = [_place(r, i) for i in range(n_tensors)]
    r.at += -r.at % _ALIGNMENT
    hot = []
    for i in range(n_layer):
        flags, ids = _array(r, *places[2 * i]), _array(r, *places[2 * i + 1])
        if len(flags) != n_ff:
            raise r.wrong(f"has {len(flags)} neurons in layer {i}, the model has {n_ff}")
        if not np.array_equal(np.flatnonzero(flags), ids) or ((flags != 0) & (flags != 1)).any():
            raise r.wrong(f"contradicts itself: gpu_idx and gpu_bucket of layer {i} name different neurons")
        hot.append(ids)
    return Split(hot=tuple(hot), vram_bytes=int(vram_bytes))


def _place(r: _Reader, index: int) -> tuple[int, int]:
    """(elements, offset) of the next tensor."""
    name, n_dims = r.text(), r.number("I")
    if n_dims != 1:
        raise r.wrong(f"has a tensor {name[:60]!r} of {n_dims} dimensions at place {index}, not of 1")
    n, kind, offset = r.number("Q"), r.number("I"), r.number("Q")
    if kind != _I32:
        raise r.wrong(f"has a tensor {name[:60]!r} of type {kind} at place {index}, not of I32")
    return n, offset


def _array(r: _Reader, n: int, offset: int) -> Ids:
    """Elements at an offset from r.at, where the data begin."""
    start = r.at + offset
    if offset % _ALIGNMENT or n > len(r.data) or start + 4 * n > len(r.data):
        raise r.wrong(f"has {n} numbers at byte {start}, but ends at byte {len(r.data)}")
    array = np.frombuffer(r.data, "<i4", n, start) if n else np.zeros(0, "<i4")
    return array.astype(np.int32)


def write_gpuidx(path: str | os.PathLike[str], split: Split, n_ff: int) -> None:
    """Writes a split. Raises FileError, ArgumentError (ids that are out of range or do not ascend)."""
    arrays: list[tuple[str, Ids]] = []
    for i, ids in enumerate(split.hot):
        if len(ids) and (ids[0] < 0 or ids[-1] >= n_ff or (np.diff(ids) <= 0).any()):
            raise ArgumentError(f"the hot neurons of layer {i} must ascend from 0 to {n_ff - 1}")
        flags = np.zeros(n_ff, np.int32)
        flags[ids] = 1
        arrays += [(f"blk.{i}.gpu_idx", flags), (f"blk.{i}.gpu_bucket", np.asarray(ids, np.int32))]
    head = [b"PWRI", struct.pack("<IQQ", 3, len(arrays), 3)]
    head.append(_string("general.architecture") + struct.pack("<I", _STRING) + _string(_ARCHITECTURE))
    head.append(_string(f"{_ARCHITECTURE}.block_count") + struct.pack("<II", _U32, len(split.hot)))
    head.append(_string("split.vram_capacity") + struct.pack("<IQ", _U64, split.vram_bytes))
    offset = 0
    for name, array in arrays:
        head.append(_string(name) + struct.pack("<IQIQ", 1, len(array), _I32, offset))
        offset += array.nbytes + -array.nbytes % _ALIGNMENT
    data = b"".join(head)
    with PartialFile(path) as file:
        file.write(data + bytes(-len(data) % _ALIGNMENT))
        for _, array in arrays:
            file.write(array.astype("<i4").tobytes() + bytes(-array.nbytes % _ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
