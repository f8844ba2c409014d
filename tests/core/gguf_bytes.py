"""Writes GGUF files byte by byte, also wrong ones: all that a file states about itself can be overridden."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
SCALAR = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "B",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def string(text: str | bytes, *, length: int | None = None) -> bytes:
    """A length and the bytes; `length` overrides what the length says."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(kind: int, value: float | int | str | bytes) -> bytes:
    """One value as it stands in a file."""
    if kind == STRING:
        assert isinstance(value, str | bytes)
        return string(value)
    return struct.pack("<" + SCALAR[kind], value)


def pair(key: str | bytes, kind: int, value: float | int | str | bytes) -> bytes:
    """A key and its scalar or string."""
    return string(key) + struct.pack("<I", kind) + scalar(kind, value)


def array(
    key: str | bytes, kind: int, values: Sequence[float | int | str | bytes], *, count: int | None = None
) -> bytes:
    """A key and its array; `count` overrides the number of elements it claims."""
    head = struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count)
    return string(key) + head + b"".join(scalar(kind, value) for value in values)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor info and its bytes. Without an offset it follows the tensor before it, aligned."""

    name: str | bytes
    dims: Sequence[int]
    data: bytes
    kind: int = 0
    offset: int | None = None
    n_dims: int | None = None


def header(*, magic: bytes = b"GGUF", version: int = 3, n_tensors: int = 0, n_kv: int = 0) -> bytes:
    """The 24 bytes that a file begins with."""
    return magic + struct.pack("<IQQ", version, n_tensors, n_kv)


def gguf(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[Tensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_kv: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file. `alignment` is only how it is laid out: the key is for the caller to add."""
    infos = b""
    data = b""
    for tensor in tensors:
        if tensor.offset is None:
            data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        infos += string(tensor.name) + struct.pack(
            "<I", len(tensor.dims) if tensor.n_dims is None else tensor.n_dims
        )
        infos += struct.pack(f"<{len(tensor.dims)}QIQ", *tensor.dims, tensor.kind, offset)
        data += tensor.data
    head = header(
        magic=magic,
        version=version,
        n_tensors=len(tensors) if n_tensors is None else n_tensors,
        n_kv=len(pairs) if n_kv is None else n_kv,
    )
    text = head + b"".join(pairs) + infos
    if tensors:
        text += bytes(-len(text) % alignment)
    return text + data


def every_value() -> list[bytes]:
    """One key of every value type and arrays of most, for a file with all of the format in it."""
    scalars = {
        U8: 200,
        I8: -100,
        U16: 60000,
        I16: -30000,
        U32: 4_000_000_000,
        I32: -2_000_000_000,
        F32: 0.5,
        BOOL: 1,
        U64: 2**63 + 5,
    }
    return [
        pair("general.architecture", STRING, "llama"),
        *(pair(f"scalar.{kind}", kind, value) for kind, value in scalars.items()),
        pair(f"scalar.{I64}", I64, -(2**62)),
        pair(f"scalar.{F64}", F64, 0.1),
        pair("empty", STRING, b""),
        pair("bytes", STRING, b"\xff\x00\xfe"),
        array("words", STRING, ["a", "", "word", b"\x00"]),
        array("halves", U16, [1, 2, 3]),
        array("flags", BOOL, [0, 1, 1]),
        array("doubles", F64, [1.0, -2.0]),
        array("none", I32, []),
    ]
