"""Reading .safetensors files: a length, that many bytes of JSON that name the tensors, and their bytes.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from ...errors import FormatError, UnsupportedError
from .files import map_file
from .json_file import parse_json
from .stored import DTYPES, StoredTensor, is_shape

_MAX_HEADER = 100_000_000  # the limit of the format


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of a file by name, not read yet.

    Raises FileError, FormatError (tensors that overlap or reach beyond the file, for example),
    UnsupportedError (a type such as F8_E4M3).
    """
    data = memoryview(map_file(path))
    if data.nbytes < 8:
        raise FormatError(f"{path} is not a safetensors file: it has {data.nbytes} bytes")
    n_header = int.from_bytes(data[:8], "little")
    if n_header > min(_MAX_HEADER, data.nbytes - 8):
        raise FormatError(f"{path} is damaged: its header would have {n_header} bytes")
    header = parse_json(bytes(data[8 : 8 + n_header]), f"the header of {path}")
    if not isinstance(header, dict):
        raise FormatError(f"the header of {path} is not an object")
    header.pop("__metadata__", None)
    body = data[8 + n_header :]
    tensors, ranges = {}, []
    for name, entry in header.items():
        tensors[name], span = _tensor(f"{path}: tensor {name!r:.200}", name, entry, body)
        ranges.append((*span, name))
    end = 0
    for first, last, name in sorted(ranges):
        if first != end:
            what = "overlaps another" if first < end else "leaves a gap before it"
            raise FormatError(f"{path}: tensor {name!r:.200} {what}")
        end = last
    if end != body.nbytes:
        raise FormatError(f"{path}: the tensors have {end} bytes, the file has {body.nbytes}")
    return tensors


def _tensor(what: str, name: str, entry: Any, body: memoryview) -> tuple[StoredTensor, tuple[int, int]]:
    if not isinstance(entry, dict):
        raise FormatError(f"{what} is not described by an object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _are_sizes(shape) or not is_shape(shape):
        raise FormatError(f"{what} has the shape {shape!r:.100}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise FormatError(f"{what} has the offsets {offsets!r:.100}")
    if not isinstance(dtype, str):
        raise FormatError(f"{what} has the type {dtype!r:.100}")
    if dtype not in DTYPES:
        known = "F64, F32, F16 and BF16"
        raise UnsupportedError(f"{what} has the type {dtype:.100}; weights are read from {known}")
    first, last = offsets
    if first > last or last > body.nbytes:
        raise FormatError(
            f"{what} lies at {first}..{last} of {body.nbytes} bytes: the file is cut off or damaged"
        )
    kind = np.dtype(DTYPES[dtype])
    if math.prod(shape) * kind.itemsize != last - first:
        raise FormatError(f"{what} of type {dtype} and shape {shape} cannot have {last - first} bytes")
    if first == last:
        return StoredTensor(name, dtype, np.empty(shape, kind)), (first, last)
    return StoredTensor(name, dtype, np.frombuffer(body[first:last], kind).reshape(shape)), (first, last)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
