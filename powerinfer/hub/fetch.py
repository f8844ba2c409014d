"""Brings one file from an HTTP server: goes on where an earlier attempt ended, and checks what came.

huggingface_hub's own downloads begin anew after a crash and compare no checksums; models are too large for
that.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from io import FileIO
from pathlib import Path
from typing import Any

from ..errors import FileError

Progress = Callable[[int, int], None]

_CHUNK = 1 << 20
_TIMEOUT_S = 30
_ATTEMPTS = 5  # one after the other that bring nothing
_PAUSE_S = 1.0
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@dataclass(frozen=True)
class Remote:
    """A file of a server."""

    name: str
    n_bytes: int
    digest: str
    """Hexadecimal: SHA-256 of the content or, for small files that Git itself keeps, SHA-1 of Git's blob."""
    is_sha256: bool
    where: Callable[[], tuple[str, Mapping[str, str]]]
    """Asks for the address, which may be valid for minutes only, and the headers to send there. Raises
    FileError where asking again is of no use, OSError where it may be."""


def fetch(remote: Remote, target: Path, progress: Progress | None = None) -> None:
    """Makes `target` that file. progress: called as progress(done, total), with the file's bytes.

    What came before an error or an interruption stays in partial_of(target), where the next call goes on. If
    another process brings the same file, this waits for it. Raises FileError.
    """
    partial = partial_of(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if target.exists():  # another process brought it meanwhile
                partial.unlink(missing_ok=True)
                return
            _complete(remote, file, progress)
            os.replace(partial, target)
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"{remote.name} cannot be written to {target.parent}: {error.strerror or error}"
        ) from error


def partial_of(target: Path) -> Path:
    """Where a file is until it is whole. Not where huggingface_hub has it, which locks otherwise: both would
    write there at once."""
    return target.with_name(target.name + ".powerinfer.incomplete")


def _complete(remote: Remote, file: FileIO, progress: Progress | None) -> None:
    file.seek(0)
    digest = _begun(remote)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    if file.tell() > remote.n_bytes:
        digest = _restart(file, remote)
    if progress is not None:
        progress(file.tell(), remote.n_bytes)
    digest = _bring(remote, file, digest, progress)
    if digest.hexdigest() != remote.digest:
        file.truncate(0)
        raise FileError(
            f"{remote.name} came with the checksum {digest.hexdigest()[:16]}..., the hub says "
            f"{remote.digest[:16]}...: it was damaged on its way, and is fetched anew next time"
        )


def _begun(remote: Remote) -> Any:
    if remote.is_sha256:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {remote.n_bytes}\0".encode(), usedforsecurity=False)


def _restart(file: FileIO, remote: Remote) -> Any:
    file.truncate(0)
    file.seek(0)
    return _begun(remote)


def _bring(remote: Remote, file: FileIO, digest: Any, progress: Progress | None) -> Any:
    """Appends what is missing; tries again where a connection breaks."""
    failures, furthest = 0, file.tell()
    while file.tell() < remote.n_bytes:
        before = file.tell()
        try:
            address, headers = remote.where()
            request = urllib.request.Request(address)
            for key, value in headers.items():
                request.add_unredirected_header(key, value)  # another host must not see a token
            if before:
                request.add_header("Range", f"bytes={before}-")
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                if before and answer.status != 206:
                    digest = _restart(file, remote)
                while file.tell() < remote.n_bytes and (chunk := answer.read(_CHUNK)):
                    chunk = chunk[: remote.n_bytes - file.tell()]
                    _append(file, chunk)
                    digest.update(chunk)
                    if progress is not None:
                        progress(file.tell(), remote.n_bytes)
            failure: Exception = FileError("the connection ended early")
        except urllib.error.HTTPError as error:
            if error.code not in (408, 416, 429) and error.code < 500:
                raise FileError(f"{remote.name}: the server answers {error.code} {error.reason}") from None
            if error.code == 416:
                digest = _restart(file, remote)
            failure = error
        except FileError:
            raise
        except (OSError, HTTPException) as error:
            if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
                raise
            failure = error
        failures = 0 if file.tell() > furthest else failures + 1
        furthest = max(furthest, file.tell())
        if failures == _ATTEMPTS:
            raise FileError(
                f"{remote.name}: {failure}; {file.tell()} of {remote.n_bytes} bytes are there, with which "
                "the next attempt goes on"
            ) from None
        if failures:
            time.sleep(_PAUSE_S * 2 ** (failures - 1))
    return digest


def _append(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
