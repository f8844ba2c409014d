"""An open te_gguf as Python sees it, and the file that most tests of the reader start from."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from tests.core import capi
from tests.core.gguf_bytes import (
    Tensor,
    every_value,
    gguf,
)


class Guarded:
    """A copy of some bytes that ends where the memory ends: reading one byte too far kills the process."""

    def __init__(self, data: bytes) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        room = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, room + mmap.PAGESIZE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = base + room - len(data)
        self._map[room - len(data) : room] = data
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert libc.mprotect(base + room, mmap.PAGESIZE, 0) == 0


class File:
    """An open te_gguf, as Python sees it."""

    def __init__(self, source: bytes | Path) -> None:
        self.ffi, self.lib = capi.load()
        handle = self.ffi.new("te_gguf **")
        if isinstance(source, Path):
            status = self.lib.te_gguf_open(os.fsencode(source), handle)
        else:
            self._keep = Guarded(source)
            status = self.lib.te_gguf_open_memory(
                self.ffi.cast("void *", self._keep.address), len(source), handle
            )
        if status != 0:
            assert handle[0] == self.ffi.NULL
        capi.check(status)
        self.handle = handle[0]

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.lib.te_gguf_close(self.handle)

    def _bytes(self, p: Any, n: int) -> bytes:
        return bytes(self.ffi.buffer(p, n)) if n else b""

    def text(self, s: Any) -> bytes:
        return self._bytes(s.p, s.n)

    def keys(self) -> list[bytes]:
        return [
            self.text(self.lib.te_gguf_kv_at(self.handle, i).key)
            for i in range(self.lib.te_gguf_n_kv(self.handle))
        ]

    def find(self, key: str) -> Any:
        """(type, element type, n, bytes of the value), or None."""
        kv = self.lib.te_gguf_find(self.handle, key.encode())
        return (
            None
            if kv == self.ffi.NULL
            else (kv.type, kv.element_type, kv.n, self._bytes(kv.data, kv.n_bytes))
        )

    def tensors(self) -> list[tuple[bytes, int, list[int], bytes, int]]:
        """(name, type, dims, bytes, part) of every tensor."""
        found = []
        for i in range(self.lib.te_gguf_n_tensors(self.handle)):
            t = self.lib.te_gguf_tensor_at(self.handle, i)
            assert list(t.ne[t.n_dims : 4]) == [1] * (4 - t.n_dims)
            found.append(
                (self.text(t.name), t.type, list(t.ne[0 : t.n_dims]), self._bytes(t.data, t.n_bytes), t.part)
            )
        return found

    def get(self, what: str, key: str, *limits: int) -> Any:
        """A value by one of the typed getters, or None if the key is absent."""
        out = self.ffi.new({"i64": "int64_t *", "f32": "float *", "bool": "bool *", "str": "te_str *"}[what])
        found = self.ffi.new("bool *", True)
        capi.check(getattr(self.lib, f"te_gguf_get_{what}")(self.handle, key.encode(), *limits, out, found))
        if not found[0]:
            return None
        return self.text(out[0]) if what == "str" else out[0]


INT64 = (-(2**63), 2**63 - 1)
ONE = Tensor(name="one", dims=(8,), data=struct.pack("<8f", *range(8)))
TWO = Tensor(name="two", dims=(32, 2), kind=2, data=bytes(range(36)))
THREE = Tensor(name="three", dims=(1, 2, 3, 4), data=bytes(96))


def good(**changes: Any) -> bytes:
    return gguf(every_value(), [ONE, TWO, THREE], **changes)
