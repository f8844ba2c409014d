"""PyTorch's .pt and .bin files without PyTorch, and without running what they contain.

Such a file is a zip archive: `NAME/data.pkl` describes the objects, `NAME/data/KEY` is the memory of a
storage. A pickle is a program for a stack machine that may call any function. The machine here knows the
few instructions that tensors and dictionaries need; the functions that a pickle names are compared with a
short list and never looked up, so nothing but the code below is ever run.

Format: torch/serialization.py, the pickle opcodes of Python's pickletools.
"""

from __future__ import annotations

import collections.abc
import io
import math
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ArgumentError, FormatError, PowerInferError, UnsupportedError
from ..writer import PartialFile
from .files import map_file
from .stored import DTYPES, Array, StoredTensor, is_shape

_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_ALIGNMENT = 64  # of storages within the file, as torch.save does it


def read_torch(path: str | os.PathLike[str]) -> dict[str, Array] | Array:
    """The tensor, or the dictionary of tensors by name, that a file holds. BF16 becomes float32.

    Raises FileError (it cannot be read), FormatError (it is damaged, holds something else, or wants to run
    code), UnsupportedError (it is in PyTorch's format from before 2020).
    """
    content = open_torch(path)
    if isinstance(content, StoredTensor):
        return content.read()
    return {name: tensor.read() for name, tensor in content.items()}


def open_torch(path: str | os.PathLike[str]) -> dict[str, StoredTensor] | StoredTensor:
    """What `read_torch` gives, without reading the tensors yet. Raises what `read_torch` raises."""
    data = map_file(path)
    try:
        content = _Machine(_records(data)).run()
        if isinstance(content, StoredTensor):
            return content
        if not isinstance(content, dict):
            raise FormatError(f"it holds a {type(content).__name__}, not tensors")
        for name, value in content.items():
            if not isinstance(value, StoredTensor):
                raise FormatError(f"its entry {name!r:.100} is a {type(value).__name__}, not a tensor")
        return {name: StoredTensor(name, value.dtype, value.view) for name, value in content.items()}
    except PowerInferError as error:
        raise type(error)(f"{path}: {error}") from None


def write_torch(path: str | os.PathLike[str], value: Array | Mapping[str, Array]) -> None:
    """Writes a tensor, or a dictionary of tensors, that torch.load(path, weights_only=True) reads.

    Raises ArgumentError for an array of a type that PyTorch does not have, FileError.
    """
    arrays = dict(value) if isinstance(value, collections.abc.Mapping) else {"": value}
    names = {np.dtype(DTYPES[kind]): name for name, kind in _STORAGES.items() if kind != "BF16"}
    out, stem = io.BytesIO(), Path(path).stem
    pickle = [b"\x80\x02"]
    storages = []
    for i, (name, array) in enumerate(arrays.items()):
        data = np.asarray(array)
        if data.dtype.newbyteorder("<") not in names:
            raise ArgumentError(f"PyTorch has no tensor of {data.dtype} (key {name!r})")
        data = np.ascontiguousarray(data, data.dtype.newbyteorder("<")).reshape(data.shape)
        storages.append(data)
        if value is not array:
            pickle.append((b"}(" if i == 0 else b"") + _text(name))
        pickle.append(_tensor(names[data.dtype], str(i), data.shape))
    if isinstance(value, collections.abc.Mapping):
        pickle.append(b"u" if storages else b"}")
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, out, f"{stem}/data.pkl", b"".join(pickle) + b".")
        _add(archive, out, f"{stem}/byteorder", b"little")
        for i, data in enumerate(storages):
            _add(archive, out, f"{stem}/data/{i}", data.tobytes())
        _add(archive, out, f"{stem}/version", b"3\n")
    with PartialFile(path) as file:
        file.write(out.getbuffer())


# ---- the archive -------------------------------------------------------------------------------------------


def _records(data: Any) -> dict[str, memoryview]:
    """The entries of the archive, by their name without the folder that all are in."""
    view = memoryview(data)
    if bytes(view[:4]) != b"PK\x03\x04":
        if bytes(view[:2]) in (b"\x80\x02", b"\x80\x04") or bytes(view[257:262]) == b"ustar":
            raise UnsupportedError(
                "it is in PyTorch's format from before version 1.6; "
                "load it with PyTorch and save it again to bring it into the present one"
            )
        raise FormatError("it is not a PyTorch file (a zip archive)")
    try:
        with zipfile.ZipFile(_Reader(view)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, struct.error) as error:
        raise FormatError(f"it is not a sound zip archive: {error}") from None
    pickles = [entry.filename for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise FormatError(f"it is not a PyTorch file: it has {len(pickles)} entries data.pkl")
    folder = pickles[0][: -len("data.pkl")]
    out = {}
    for entry in entries:
        if entry.filename.startswith(folder) and not entry.is_dir():
            name = entry.filename[len(folder) :]
            if name in out:
                raise FormatError(f"it has two entries {name!r:.100}")
            out[name] = _record(view, entry)
    if bytes(out.get("byteorder", memoryview(b"little"))) != b"little":
        raise UnsupportedError("it was written on a big-endian machine")
    return out


def _record(view: memoryview, entry: zipfile.ZipInfo) -> memoryview:
    """The bytes of one entry, which must lie in the file as they are."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        raise FormatError(f"its entry {entry.filename!r:.100} is compressed or encrypted")
    head = bytes(view[entry.header_offset : entry.header_offset + 30])
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise FormatError(f"its entry {entry.filename!r:.100} has no header")
    start = entry.header_offset + 30 + sum(struct.unpack("<HH", head[26:30]))
    if entry.file_size != entry.compress_size or start + entry.file_size > view.nbytes:
        raise FormatError(f"its entry {entry.filename!r:.100} reaches beyond the end of the file")
    return view[start : start + entry.file_size]


class _Reader(io.RawIOBase):
    """A file object over memory, without a copy of it."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._view.nbytes)[whence]
        if at < 0:
            raise ValueError("a negative position")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        end = None if size is None or size < 0 else self._at + size
        out = bytes(self._view[self._at : end])
        self._at += len(out)
        return out


# ---- the pickle --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Global:
    """The name of a class or function: no more than a name."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class _Storage:
    dtype: str
    size: int
    """In elements."""
    data: memoryview


_MARK = object()
_REBUILD_TENSOR = _Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_PARAMETER = _Global("torch._utils", "_rebuild_parameter")
_ORDERED_DICT = _Global("collections", "OrderedDict")
_ALLOWED = {_REBUILD_TENSOR, _REBUILD_PARAMETER, _ORDERED_DICT} | {_Global("torch", s) for s in _STORAGES}

# Instructions that put their own argument, or a constant, on the stack.
_ARGUMENT = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANT: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_TUPLE_SIZE = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """Runs a pickle as far as it makes tensors and containers."""

    def __init__(self, records: dict[str, memoryview]) -> None:
        self._records = records
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The object that the pickle describes. Raises FormatError."""
        try:
            for opcode, argument, _ in pickletools.genops(bytes(self._records["data.pkl"])):
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._step(opcode.name, argument)
        except (LookupError, TypeError, ValueError, OverflowError, struct.error) as error:
            if isinstance(error, PowerInferError):
                raise
            raise FormatError(f"its data.pkl is damaged: {error!s:.200}") from None
        raise FormatError("its data.pkl has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _ARGUMENT:
            stack.append(argument)
        elif name in _CONSTANT:
            stack.append(_CONSTANT[name]())
        elif name in _TUPLE_SIZE:
            stack.append(tuple(self._pop(_TUPLE_SIZE[name])))
        elif name in ("TUPLE", "LIST"):
            items = self._pop_to_mark()
            stack.append(tuple(items) if name == "TUPLE" else items)
        elif name in ("APPEND", "APPENDS"):
            items = self._pop_to_mark() if name == "APPENDS" else self._pop(1)
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop_to_mark() if name == "SETITEMS" else self._pop(2)
            self._top(dict).update(_entries(zip(items[::2], items[1::2], strict=True)))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            stack.append(_allowed(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(_allowed(*self._pop(2)))
        elif name == "BINPERSID":
            stack.append(self._storage(*self._pop(1)[0]))
        elif name == "REDUCE":
            stack.append(_call(*self._pop(2)))
        elif name == "BUILD":
            # A state_dict carries the versions of its modules as an attribute, which nothing here needs.
            self._pop(1)
            self._top(dict)
        elif name not in ("PROTO", "FRAME"):
            raise FormatError(
                f"its data.pkl uses the instruction {name}, which no tensor needs; it was not run"
            )

    def _pop(self, n: int) -> list[Any]:
        items = self._stack[len(self._stack) - n :] if n <= len(self._stack) else []
        if len(items) != n or any(item is _MARK for item in items):
            raise ValueError("its stack runs empty")
        del self._stack[-n:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        at = next((i for i in reversed(range(len(self._stack))) if self._stack[i] is _MARK), None)
        if at is None:
            raise ValueError("it has no mark")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise ValueError(f"it needs a {kind.__name__} on its stack")
        return self._stack[-1]

    def _storage(self, tag: Any, kind: Any, key: Any, _location: Any, size: Any) -> _Storage:
        if tag != "storage" or not isinstance(kind, _Global) or kind.name not in _STORAGES:
            raise FormatError("its data.pkl refers to something that is not a storage")
        if not isinstance(key, str):  # not shown: tuples of the same tuples are endless
            raise FormatError("it has a storage whose key is not a text")
        dtype = _STORAGES[kind.name]
        data = self._records.get(f"data/{key}")
        if data is None:
            raise FormatError(f"it has no storage {key!r:.100}")
        n_bytes = _size(size) * np.dtype(DTYPES[dtype]).itemsize
        if n_bytes > data.nbytes:
            raise FormatError(f"its storage {key!r:.100} has {data.nbytes} bytes, {n_bytes} are needed")
        return _Storage(dtype, size, data)


def _allowed(module: Any, name: Any) -> _Global:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("it uses something without a name")
    found = _Global(module, name)
    if found not in _ALLOWED:
        what = f"{module:.100}.{name:.100}"
        raise FormatError(f"it wants to use {what}, which is not allowed; nothing of it was run")
    return found


def _entries(pairs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Keys and values. A key is a text: hashing a tuple would follow it to any depth."""
    for key, value in pairs:
        if not isinstance(key, str):
            raise ValueError(f"a dictionary has a key that is a {type(key).__name__}")
        yield key, value


def _call(function: Any, arguments: Any) -> Any:
    """What the allowed functions of this name would give."""
    if not isinstance(arguments, tuple):
        raise ValueError("it calls without arguments")
    if function == _REBUILD_TENSOR:
        return _view(*arguments[:4])
    if function == _REBUILD_PARAMETER and arguments and isinstance(arguments[0], StoredTensor):
        return arguments[0]
    if function == _ORDERED_DICT and not arguments:
        return {}
    raise ValueError("it calls something that is not a function")


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("a size is not a number of this range")
    return value


def _view(storage: Any, offset: Any, shape: Any, strides: Any) -> StoredTensor:
    """A tensor in a storage. Refuses one that reaches beyond it, or has more elements than it."""
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError("a tensor is not described by a storage, a shape and strides")
    dtype = np.dtype(DTYPES[storage.dtype])
    # Before anything is multiplied: the product of a million large sizes would take hours.
    if len(shape) > 8 or not is_shape([_size(size) for size in shape]):
        raise ValueError(f"a tensor has {len(shape)} dimensions, or too many elements")
    n, last = math.prod(shape), _size(offset)
    for size, stride in zip(shape, strides, strict=True):
        last += (size - 1) * _size(stride)
    if n == 0:
        return StoredTensor("", storage.dtype, np.empty(shape, dtype))
    if last >= storage.size or n > storage.size:
        raise FormatError(f"a tensor of shape {shape} reaches beyond its storage of {storage.size} elements")
    flat = np.frombuffer(storage.data, dtype, storage.size)
    steps = [stride * dtype.itemsize for stride in strides]
    view = np.lib.stride_tricks.as_strided(flat[offset:], shape, steps, writeable=False)
    return StoredTensor("", storage.dtype, view)


# ---- writing -----------------------------------------------------------------------------------------------


def _add(archive: zipfile.ZipFile, out: io.BytesIO, name: str, data: bytes) -> None:
    """An entry whose bytes begin at a multiple of the alignment."""
    info = zipfile.ZipInfo(name)
    padding = -(out.tell() + 30 + len(name.encode()) + 4) % _ALIGNMENT
    info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    archive.writestr(info, data)


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value) if value < 1 << 31 else b"\x8a\x08" + struct.pack("<q", value)


def _numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def _tensor(storage: str, key: str, shape: tuple[int, ...]) -> bytes:
    """torch._utils._rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())"""
    strides = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
    size = int(np.prod(shape, dtype=np.int64))
    return b"".join(
        (
            b"ctorch._utils\n_rebuild_tensor_v2\n(",
            b"(" + _text("storage") + f"ctorch\n{storage}\n".encode() + _text(key) + _text("cpu"),
            _number(size) + b"tQ",
            _number(0) + _numbers(shape) + _numbers(strides),
            b"\x89ccollections\nOrderedDict\n)RtR",
        )
    )
