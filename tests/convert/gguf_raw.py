"""A file read by its bytes alone, as a loader sees it. Written from the GGUF specification."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SCALARS = dict(
    enumerate([("u8", "<B"), ("i8", "<b"), ("u16", "<H"), ("i16", "<h"), ("u32", "<I"), ("i32", "<i")])
)
SCALARS |= {6: ("f32", "<f"), 7: ("bool", "<?"), 10: ("u64", "<Q"), 11: ("i64", "<q"), 12: ("f64", "<d")}
# number: name, weights in a block, bytes of a block
FLOAT_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2)}
TENSOR_TYPES = FLOAT_TYPES | {2: ("Q4_0", 32, 18), 8: ("Q8_0", 32, 34)}


@dataclass(frozen=True)
class RawTensor:
    type: str
    ne: tuple[int, ...]
    """As the file has it: the contiguous dimension first."""
    data: bytes

    def floats(self) -> Any:
        """[rows, columns] of F32, F16 or Q8_0, by their definitions."""
        shape = tuple(reversed(self.ne))
        if self.type in ("F32", "F16"):
            return np.frombuffer(self.data, "<f4" if self.type == "F32" else "<f2").reshape(shape)
        assert self.type == "Q8_0"
        blocks = np.frombuffer(self.data, np.dtype([("d", "<f2"), ("q", "i1", 32)]))
        return (blocks["d"].astype(np.float32)[:, None] * blocks["q"]).reshape(shape)


@dataclass(frozen=True)
class RawFile:
    magic: bytes
    version: int
    keys: dict[str, tuple[str, Any]]
    """Type and value; the type of an array begins with "array of ". In the order of the file."""
    tensors: dict[str, RawTensor]


def read(path: Path) -> RawFile:
    data = path.read_bytes()
    at = 0

    def take(code: str) -> Any:
        nonlocal at
        value = struct.unpack_from(code, data, at)[0]
        at += struct.calcsize(code)
        return value

    def string() -> bytes:
        nonlocal at
        n = take("<Q")
        at += n
        assert at <= len(data)
        return data[at - n : at]

    def value(kind: int) -> tuple[str, Any]:
        nonlocal at
        if kind == 8:
            return "string", string()
        if kind == 9:
            inner, n = take("<I"), take("<Q")
            if inner == 8:
                return "array of string", [string() for _ in range(n)]
            name, code = SCALARS[inner]
            items = np.frombuffer(data, code.replace("?", "b1"), n, at) if code[1] != "?" else None
            assert items is not None
            at += items.nbytes
            return f"array of {name}", items
        name, code = SCALARS[kind]
        return name, take(code)

    magic, version = data[:4], struct.unpack_from("<I", data, 4)[0]
    at = 8
    n_tensors, n_keys = take("<Q"), take("<Q")
    keys = {}
    for _ in range(n_keys):
        name = string().decode()
        assert name not in keys
        keys[name] = value(take("<I"))
    infos = []
    for _ in range(n_tensors):
        name = string().decode()
        ne = tuple(take("<Q") for _ in range(take("<I")))
        infos.append((name, ne, take("<I"), take("<Q")))
    start = at + -at % 32
    tensors, end = {}, 0
    for name, ne, number, offset in infos:
        kind, weights, size = TENSOR_TYPES[number]
        assert offset % 32 == 0 and offset >= end and ne[0] % weights == 0
        n_bytes = int(np.prod(ne)) // weights * size
        end = offset + n_bytes
        assert name not in tensors and start + end <= len(data)
        tensors[name] = RawTensor(kind, ne, data[start + offset : start + end])
    return RawFile(magic, version, keys, tensors)
