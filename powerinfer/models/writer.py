"""Writing GGUF and PowerInfer files, a tensor at a time, under their final name only once they are whole.

    with GGUFWriter("out.gguf", powerinfer=True) as writer:
        writer.copy_metadata(source, without={"general.file_type"})
        writer.add("general.file_type", 1)
        writer.add_tensor("token_embd.weight", "F16", (n_vocab, n_embd))
        writer.write(part_of_the_rows)  # bytes of the tensors, in their order

Layout: magic, version 3, counts, keys, tensor infos, padding, tensors on multiples of the alignment
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). A PowerInfer file differs in its magic alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import shutil
import stat
import struct
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from .._engine import formats
from .._engine.file import ModelFile, is_demo
from ..errors import ArgumentError, FileError

ALIGNMENT = 32
_MAX_NAME_BYTES = 63  # of a tensor, in ggml

# GGUF value types and how struct packs them.
_TYPES = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i")}
_TYPES |= {"f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}
_STRING, _ARRAY = 8, 9


def is_in_hub_cache(path: str | os.PathLike[str]) -> bool:
    """Whether a file is one of a cache of huggingface_hub, which must not be written."""
    parts = Path(os.path.abspath(path)).parts
    return any(
        part.startswith("models--") and parts[i + 1 : i + 2] in (("snapshots",), ("blobs",))
        for i, part in enumerate(parts)
    )


class PartialFile:
    """A file that gets its name when it is complete: until then it is `.NAME.<random>.partial` beside it.

    Leaving the `with` block by an exception removes it. A process that is killed leaves its partial, which
    the next writer of the same NAME removes; partials of living processes are locked, and stay. Of several
    writers each writes its own, and the last to finish has the name. A symbolic link is followed, and a file
    that is replaced keeps its permissions.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises FileError if the directory cannot be written to, or the name is that of no ordinary file."""
        self.path = Path(path)
        self.stream: BinaryIO
        if os.fspath(path).endswith(os.sep):
            raise FileError(f"{path} is the name of a folder, not of a file")
        try:
            self._target = Path(os.path.realpath(self.path))
            mode = self._check_target()
            _sweep(self._target)
            self._partial, descriptor = _create_locked(self._target, _create_file)
            if mode is not None:
                with contextlib.suppress(OSError):  # a file system without permissions
                    os.fchmod(descriptor, mode)
            self.stream = open(descriptor, "wb")  # noqa: SIM115 - closed by discard
        except ValueError as error:
            raise FileError(f"{str(self.path)!r} is not the name of a file: {error}") from error
        except OSError as error:
            raise _failed(self.path, error) from error

    def _check_target(self) -> int | None:
        """The permissions of the file that will be replaced, if there is one."""
        if is_demo(self._target):
            raise FileError("the demo model belongs to the package and is never written: name another file")
        if is_in_hub_cache(self._target):
            raise FileError(
                f"{self.path} lies in the hub's cache, whose files are those of the hub: name another file"
            )
        try:
            mode = self._target.stat().st_mode
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(mode):
            raise FileError(f"{self.path} is not a file that can be replaced")
        if not os.access(self._target, os.W_OK):
            raise FileError(f"{self.path} is protected against writing")
        return stat.S_IMODE(mode)

    def expect(self, n_bytes: int) -> None:
        """Raises FileError if the disk has no room for that many: before hours of work, not after."""
        try:
            free = shutil.disk_usage(self._target.parent).free
        except OSError:
            return  # then the writes will tell
        if n_bytes > free:
            raise FileError(
                f"{self.path} cannot be written: it will have {n_bytes / 1e6:,.1f} MB, "
                f"but the disk has only {free / 1e6:,.1f} MB free"
            )

    def write(self, data: Any) -> None:
        """Appends bytes. Raises FileError (a full disk, for one)."""
        try:
            self.stream.write(data)
        except OSError as error:
            raise _failed(self.path, error) from error

    def discard(self) -> None:
        """Removes it; nothing if it has its name already."""
        # Before the file is closed, which gives up the lock.
        with contextlib.suppress(OSError):
            self._partial.unlink()
        with contextlib.suppress(OSError):
            self.stream.close()

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.stream.flush()
                os.fsync(self.stream.fileno())
                os.replace(self._partial, self._target)
        except OSError as failure:
            raise _failed(self.path, failure) from failure
        finally:
            self.discard()


class PartialFolder:
    """The same for a folder of files: it gets its name when all of them are written.

    with PartialFolder("act") as folder:
        (folder / "a.pt").write_bytes(data)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises FileError if `check_new_dir` does, or the folder cannot be made."""
        self.path = Path(path)
        check_new_dir(self.path)
        try:
            self._target = Path(os.path.realpath(self.path))
            _sweep(self._target)
            self._partial, self._descriptor = _create_locked(self._target, _create_folder)
        except OSError as error:
            raise _failed(self.path, error) from error

    def __enter__(self) -> Path:
        return self._partial

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.replace(self._partial, self._target)
        except OSError as failure:
            raise _failed(self.path, failure) from failure
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)
            os.close(self._descriptor)
        if isinstance(error, OSError) and not isinstance(error, FileError):
            raise _failed(self.path, error) from error


def check_new_file(path: str | os.PathLike[str], *, n_bytes: int = 0) -> None:
    """Raises FileError if a file of this name and size could not be written: before hours of work."""
    file = PartialFile(path)
    try:
        file.expect(n_bytes)
    finally:
        file.discard()


def check_new_dir(path: str | os.PathLike[str]) -> None:
    """Raises FileError unless a folder of this name can be made, or is there, empty, and can be replaced."""
    folder = Path(path)
    try:
        target = Path(os.path.realpath(folder))
        is_empty = target.is_dir() and not any(target.iterdir())
    except OSError as error:
        raise FileError(f"the folder {folder} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise FileError(f"{str(folder)!r} is not the name of a folder: {error}") from error
    if os.path.lexists(target) and not is_empty:
        raise FileError(f"{folder} exists already: name a new folder, or an empty one")
    if is_empty and (os.path.ismount(target) or target.samefile(os.curdir)):
        raise FileError(f"the folder {folder} is in use, and cannot be replaced: name a new folder in it")
    if not os.access(target.parent, os.W_OK):
        raise FileError(f"the folder {folder} cannot be made: {target.parent} cannot be written to")


def _failed(path: Path, error: OSError) -> FileError:
    if isinstance(error, FileError):
        return error
    reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
    return FileError(f"{path} cannot be written: {reason}")


def _create_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _create_folder(path: Path) -> int:
    path.mkdir()
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _create_locked(target: Path, create: Callable[[Path], int]) -> tuple[Path, int]:
    """A new partial of a file or folder: its path and its descriptor. The lock is held while that is open."""
    while True:
        path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        descriptor = create(path)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return path, descriptor
        os.close(descriptor)  # another writer swept it away before it was locked


def _sweep(target: Path) -> None:
    """Removes partials of a file or folder that nobody writes any more."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.partial")
    for path in target.parent.iterdir():
        if not name.fullmatch(path.name):
            continue
        # One that is locked is being written; one that cannot be opened or locked is left alone.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    shutil.rmtree(path)
                else:
                    path.unlink()
            finally:
                os.close(descriptor)


class GGUFWriter:
    """One GGUF file: keys and tensor infos first, then the tensors' bytes, then it appears."""

    def __init__(self, path: str | os.PathLike[str], *, powerinfer: bool) -> None:
        """powerinfer: give it the magic PWRI. Raises FileError if the file cannot be created."""
        self._powerinfer = powerinfer
        self._keys: dict[str, bytes] = {}
        self._tensors: dict[str, tuple[int, tuple[int, ...], int]] = {}  # type, shape, bytes
        self._sizes: list[int] = []  # of the tensors, once writing has begun
        self._begun = False
        self._at = 0  # the tensor that is being written, and how much of it is
        self._n_written = 0
        self._file = PartialFile(path)

    def add(self, key: str, value: Any, type: str = "") -> None:
        """A key with its value; a key that was there is replaced, in its place.

        value: bool, str, a number, a numpy array [n], or a list of str or bytes (an array of strings).
        type: of a number, as `Metadata.type_name` says; "" means bool for bool, u32 for integers, f32 for
        floats. An array has the type of its elements. Raises ArgumentError for what does not fit.
        """
        self._keys[key] = _string(key) + _encode(key, value, type)

    def copy_metadata(self, source: ModelFile, *, without: Container[str] = ()) -> None:
        """All keys of another file, byte for byte, apart from those that only describe its layout."""
        for key, data in source.raw_metadata():
            if key not in without and key != "general.alignment" and not key.startswith("split."):
                self._keys[key] = _string(key) + data

    def add_tensor(self, name: str, type: str, shape: Sequence[int]) -> None:
        """The next tensor. shape: as numpy has it, the last dimension contiguous.

        Raises ArgumentError for an unknown type, a name that was added or is too long, a shape that no
        tensor can have, or rows that do not divide into the type's blocks.
        """
        if self._begun:
            raise ArgumentError(f"the tensor {name} comes too late: the data has begun")
        if name in self._tensors:
            raise ArgumentError(f"the tensor {name} was added before")
        if not 0 < len(name.encode("utf-8", "replace")) <= _MAX_NAME_BYTES:
            raise ArgumentError(f"the name of a tensor has 1 to {_MAX_NAME_BYTES} bytes, not {name!r}")
        sizes = tuple(int(n) for n in shape)
        if not 1 <= len(sizes) <= 4 or min(sizes) < 1:
            raise ArgumentError(f"the tensor {name} cannot have the shape {sizes}")
        n_bytes = formats.row_bytes(type, sizes[-1]) * math.prod(sizes[:-1])
        self._tensors[name] = formats.number(type), sizes, n_bytes

    @property
    def n_tensor_bytes(self) -> int:
        """Of all tensors that were added."""
        return sum(n_bytes for _, _, n_bytes in self._tensors.values())

    def _head(self) -> tuple[bytes, dict[str, int], int]:
        """Everything before the data, where each tensor begins behind that, and the bytes of all."""
        head = [b"PWRI" if self._powerinfer else b"GGUF"]
        head.append(struct.pack("<IQQ", 3, len(self._tensors), len(self._keys)))
        head.extend(self._keys.values())
        offset, places = 0, {}
        for name, (number, shape, n_bytes) in self._tensors.items():
            head.append(_string(name) + struct.pack("<I", len(shape)))
            head.append(struct.pack(f"<{len(shape)}QIQ", *reversed(shape), number, offset))
            places[name] = offset
            offset += n_bytes + -n_bytes % ALIGNMENT
        data = b"".join(head)
        return data + bytes(-len(data) % ALIGNMENT), places, offset

    def outline(self, values: Mapping[str, bytes]) -> int:
        """The file as far as it is known before its data: all keys, all tensors, and of some their bytes; the
        others' are 0. Returns a descriptor of it in memory, where zeros take none; the caller closes it."""
        head, places, n_bytes = self._head()
        file = os.memfd_create("outline", os.MFD_CLOEXEC)
        os.ftruncate(file, len(head) + n_bytes)
        os.pwrite(file, head, 0)
        for name, data in values.items():
            os.pwrite(file, data, len(head) + places[name])
        return file

    def _begin(self) -> None:
        head, _, n_bytes = self._head()
        self._begun = True
        self._sizes = [size for _, _, size in self._tensors.values()]
        self._file.expect(len(head) + n_bytes)
        self._file.write(head)

    def write(self, data: Any) -> None:
        """The next bytes of the current tensor (any contiguous buffer), at most to its end.

        Raises FileError (a full disk), ArgumentError if they are more than what the tensor lacks.
        """
        if not self._begun:
            self._begin()
        view = memoryview(data).cast("B")
        size = self._sizes[self._at] if self._at < len(self._sizes) else 0
        if view.nbytes > size - self._n_written:
            left = size - self._n_written
            raise ArgumentError(f"{view.nbytes} bytes are too many: the tensor has room for {left}")
        self._file.write(view)
        self._n_written += view.nbytes
        if size and self._n_written == size:
            self._file.write(bytes(-size % ALIGNMENT))
            self._at, self._n_written = self._at + 1, 0

    def _finish(self) -> None:
        if not self._begun:
            self._begin()
        if self._at < len(self._tensors):
            raise ArgumentError(f"the tensor {list(self._tensors)[self._at]} is not complete")

    def __enter__(self) -> GGUFWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except BaseException as failure:
            self._file.__exit__(type(failure), failure, failure.__traceback__)
            raise
        self._file.__exit__(kind, error, trace)


def _string(text: str | bytes) -> bytes:
    """Length and bytes; what UTF-8 has no form for (half of a surrogate pair) becomes a question mark."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
    return struct.pack("<Q", len(data)) + data


def _encode(key: str, value: Any, type: str) -> bytes:
    """A value with its type in front."""
    if isinstance(value, (str, bytes)):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, list) and all(isinstance(item, (str, bytes)) for item in value):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
    if isinstance(value, np.ndarray):
        kind = "bool" if value.dtype.kind == "b" else f"{value.dtype.kind}{value.dtype.itemsize * 8}"
        if value.ndim != 1 or kind not in _TYPES:
            raise ArgumentError(f"the key {key} cannot hold an array of {value.dtype} {value.shape}")
        data = value.astype(value.dtype.newbyteorder("<")).tobytes()
        return struct.pack("<IIQ", _ARRAY, _TYPES[kind][0], len(value)) + data
    if not isinstance(value, (bool, int, float, np.generic)):
        raise ArgumentError(f"the key {key} cannot hold {value!r}")
    if not type:
        is_float = isinstance(value, (float, np.floating))
        type = "bool" if isinstance(value, (bool, np.bool_)) else "f32" if is_float else "u32"
    try:
        number, code = _TYPES[type]
        return struct.pack(f"<I{code}", number, value)
    except (KeyError, struct.error, OverflowError) as error:
        raise ArgumentError(f"the key {key} cannot hold {value!r} as {type}: {error}") from error
