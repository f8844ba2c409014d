"""Opening what lies in a checkpoint's folder: ordinary files only.

Such a folder comes from anybody, and may hold links to devices that never end, and pipes that nobody writes
to.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from ...errors import FileError, FormatError, PowerInferError

_MOST_BYTES = 1 << 30  # of a file that is read as a whole
_LFS_POINTER = b"version https://git-lfs"


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file that is not large. Raises FileError, FormatError (it is large)."""
    with _opened(path) as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            raise FormatError(f"{path} is too large")
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of such a file, its lines ended by newlines alone. Raises FileError, FormatError."""
    try:
        return io.StringIO(read_file(path).decode(), newline=None).read()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text: {error}") from None


def map_file(path: str | os.PathLike[str]) -> mmap.mmap | bytes:
    """A file's bytes, read-only, in memory only as far as they are used. Raises FileError."""
    with _opened(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""  # which cannot be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileError(f"{path} is a device or a pipe, not a file")
            if file.peek(len(_LFS_POINTER)).startswith(_LFS_POINTER):
                raise FileError(f"{path} is only Git LFS's pointer to the file: `git lfs pull` fetches it")
            yield file
    except PowerInferError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(f"{path} cannot be read: {reason}") from error


def _open_at_once(path: str, flags: int) -> int:
    """Does not wait for a pipe's writer."""
    return os.open(path, flags | os.O_NONBLOCK)
