"""What a GGUF file holds: metadata and tensors, without loading a model.

with ModelFile("model.gguf") as file:
    print(file.metadata["general.architecture"], len(file.tensors))
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ClosedError, FileError
from . import _native

DEMO = "demo"

# GGUF value types.
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")


_DEMO_PATH = Path(__file__).resolve().parents[1] / "demo" / "demo.gguf"


def find_model(name: str | os.PathLike[str], *, vram_budget: Any = None, verbose: bool = True) -> Path:
    """The path of a model. The word "demo" is the model that comes with the package; a file so called is
    "./demo". hf:OWNER/REPO[:FILE-or-format] is one of the Hugging Face Hub, which is fetched if it is not
    here; where several would do, memory and vram_budget choose. verbose: say on stderr what is fetched.

    Raises FileError (there is no such file; the package was installed without the demo; the hub refuses),
    ArgumentError (no path), UnsupportedError (huggingface_hub is not installed).
    """
    if not isinstance(name, (str, os.PathLike)) or isinstance(os.fspath(name), bytes):
        raise ArgumentError(f"the model's path is {name!r}, it must be text or a Path")
    if name == "":
        raise ArgumentError('the model\'s path is empty; "demo" is the model that comes with the package')
    if name == DEMO:
        if not _DEMO_PATH.is_file():
            raise FileError(f"the demo model {_DEMO_PATH} does not exist: this installation came without it")
        return _DEMO_PATH
    from .. import hub

    if hub.is_reference(name):
        from .machine import room_of

        return hub.find(str(name), room=room_of(vram_budget), verbose=verbose)
    if isinstance(name, str) and not os.path.lexists(name) and (hint := hub.hint(name)):
        raise FileError(f"there is no file {name}{hint}")
    path = Path(name)
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ArgumentError(f"the model's path {str(path)!r} has characters that no path can have") from None
    if os.path.isdir(path):
        raise FileError(f"{path} is a folder; {_in_folder(path)}")
    return path


def is_demo(path: Path) -> bool:
    """Whether a file is the one that comes with the package."""
    return path.exists() and _DEMO_PATH.exists() and path.samefile(_DEMO_PATH)


def _in_folder(path: Path) -> str:
    """What to do with a folder that is given as a model."""
    models = sorted(path.glob("*.gguf"))
    if models:
        return f"name a file in it: {', '.join(str(model) for model in models[:5])}"
    if (path / "config.json").exists():
        return f"powerinfer convert {path} -o model.gguf makes a model of it"
    return "a model is a GGUF file"


_EXPERTS = re.compile(r"_exps\.|\.ffn_(gate|up|down)\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """A file as a whole."""

    version: int
    """Of GGUF: 2 or 3."""
    is_powerinfer: bool
    """Written by PowerInfer's converter (magic PWRI)."""
    n_parts: int
    """Files of a split; 1 for an ordinary file."""
    n_tensors: int
    n_bytes: int
    """Of all parts."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a file."""

    name: str
    type: str
    """Format of the weights: "F16", "Q4_0", ..."""
    shape: tuple[int, ...]
    """As numpy has it, the last dimension contiguous (a file lists them the other way round)."""
    n_bytes: int

    @property
    def is_of_experts(self) -> bool:
        """Of all experts of a layer or, in old files, of one of them; not of one that all tokens use."""
        return _EXPERTS.search(self.name) is not None


class Metadata(Mapping[str, Any]):
    """The keys and values of a file, in its order; a value is decoded when it is first asked for.

    Scalars are int, float, bool or str; arrays of numbers are read-only numpy arrays; arrays of strings
    are list[bytes] (a file may hold text that is not valid UTF-8; in single strings such bytes become
    U+FFFD).
    """

    def __init__(self, file: ModelFile, n: int) -> None:
        self._file = file
        self._decoded: dict[str, Any] = {}
        self._index: dict[str, int] = {}
        for i in range(n):
            entry = file._meta(i)
            key = bytes(_native.ffi.buffer(entry.key, entry.key_bytes)).decode("utf-8", "replace")
            self._index.setdefault(key, i)

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = _decode(self._file._meta(self._index[key]))
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def type_name(self, key: str) -> str:
        """The type of a value as the file has it: "u32", "string", "array of f32"."""
        entry = self._file._meta(self._index[key])
        if entry.type == _ARRAY:
            return f"array of {_NAMES[entry.element_type]}"
        return _NAMES[entry.type]

    def count(self, key: str) -> int:
        """Elements of an array, without decoding it; 1 for other values."""
        return int(self._file._meta(self._index[key]).n)


def _decode(entry: Any) -> Any:
    data = bytes(_native.ffi.buffer(entry.data, entry.n_bytes)) if entry.n_bytes else b""
    if entry.type == _STRING:
        return data.decode("utf-8", "replace")
    if entry.type == _ARRAY:
        if entry.element_type == _STRING:
            return _decode_strings(data, entry.n)
        return np.frombuffer(data, _NUMBERS[entry.element_type])
    return np.frombuffer(data, _NUMBERS[entry.type])[0].item()


def _decode_strings(data: bytes, n: int) -> list[bytes]:
    """n strings, each a 64-bit length and its bytes; the lengths were checked when the file was opened."""
    strings: list[bytes] = []
    append, read_length, at = strings.append, struct.Struct("<Q").unpack_from, 0
    for _ in range(n):
        start = at + 8
        at = start + read_length(data, at)[0]
        append(data[start:at])
    return strings


class ModelFile:
    """An open GGUF file (or split of files), memory-mapped. May be used from several threads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """path: a file, any part of a split, or "demo".

        Raises FileError (it cannot be opened), FormatError (it is not a sound GGUF file), OutOfMemoryError.
        """
        self.path = find_model(path)
        name = os.fsencode(self.path)
        if b"\0" in name:
            raise ArgumentError(f"the path {str(self.path)!r} contains a zero byte")
        out = _native.ffi.new("pi_file **")
        _native.check(_native.lib.pi_file_open(name, out))
        self._handle: Any = _native.ffi.gc(out[0], _native.lib.pi_file_close)
        native = _native.ffi.new("pi_file_info *")
        _native.lib.pi_file_get_info(self._handle, native)
        self.info = FileInfo(
            version=native.version,
            is_powerinfer=bool(native.is_powerinfer),
            n_parts=native.n_parts,
            n_tensors=native.n_tensors,
            n_bytes=native.n_bytes,
        )
        self.metadata = Metadata(self, native.n_meta)
        self._tensors: tuple[TensorInfo, ...] | None = None

    @property
    def handle(self) -> Any:
        """The native file. Raises ClosedError after close()."""
        if self._handle is None:
            raise ClosedError(f"the file {self.path} is closed")
        return self._handle

    def _meta(self, index: int) -> Any:
        entry = _native.ffi.new("pi_meta *")
        _native.check(_native.lib.pi_file_meta(self.handle, index, entry))
        return entry

    def _tensor(self, index: int) -> Any:
        entry = _native.ffi.new("pi_tensor *")
        _native.check(_native.lib.pi_file_tensor(self.handle, index, entry))
        return entry

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """All tensors, in the order of the file."""
        if self._tensors is None:
            self._tensors = tuple(_tensor_info(self._tensor(i)) for i in range(self.info.n_tensors))
        return self._tensors

    def _index_of(self, name: str) -> int:
        index = next((i for i, tensor in enumerate(self.tensors) if tensor.name == name), None)
        if index is None:
            raise ArgumentError(f"the file {self.path} has no tensor {name!r}")
        return index

    def dequantize(self, name: str, *, first: int = 0, n_rows: int | None = None) -> npt.NDArray[np.float32]:
        """A tensor's weights as float32, in its shape; or n_rows of its first dimension from row `first` on.

        Raises ArgumentError for a name or rows that the file does not have, UnsupportedError for a type
        without a decoder.
        """
        index = self._index_of(name)
        shape = self.tensors[index].shape
        count = shape[0] - first if n_rows is None else n_rows
        if not 0 <= first <= first + count <= shape[0]:
            raise ArgumentError(f"the tensor {name} has {shape[0]} rows, not {first}..{first + count - 1}")
        out = np.empty((count, *shape[1:]), np.float32)
        row = out.size // count if count else 0
        floats = _native.ffi.from_buffer("float[]", out, require_writable=True)
        _native.check(_native.lib.pi_file_dequantize(self.handle, index, first * row, out.size, floats))
        return out

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes as the file has them, read-only, without a copy: valid until the file is closed.

        Raises ArgumentError for a name that the file does not have.
        """
        entry = self._tensor(self._index_of(name))
        view = np.frombuffer(_native.ffi.buffer(entry.data, entry.n_bytes), np.uint8)
        view.flags.writeable = False
        return view

    def raw_metadata(self) -> Iterator[tuple[str, bytes]]:
        """Every key with its value as the file has it, type in front: what a writer copies."""
        for index in self.metadata._index.values():
            entry = self._meta(index)
            key = bytes(_native.ffi.buffer(entry.key, entry.key_bytes)).decode("utf-8", "replace")
            head = struct.pack("<I", entry.type)
            if entry.type == _ARRAY:
                head += struct.pack("<IQ", entry.element_type, entry.n)
            elif entry.type == _STRING:
                head += struct.pack("<Q", entry.n_bytes)
            yield key, head + bytes(_native.ffi.buffer(entry.data, entry.n_bytes))

    def close(self) -> None:
        """Unmaps the file, unless a model uses it. Values that were read stay, others raise ClosedError."""
        self._handle = None

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = (
            "closed" if self._handle is None else f"{self.info.n_tensors} tensors, {self.info.n_bytes} bytes"
        )
        return f"ModelFile({str(self.path)!r}, {state})"


def _tensor_info(entry: Any) -> TensorInfo:
    ffi = _native.ffi
    return TensorInfo(
        name=bytes(ffi.buffer(entry.name, entry.name_bytes)).decode("utf-8", "replace"),
        type=ffi.string(entry.type_name).decode(),
        shape=tuple(entry.ne[i] for i in reversed(range(entry.n_dims))),
        n_bytes=entry.n_bytes,
    )
