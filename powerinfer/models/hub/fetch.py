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
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import FileError

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
    """Asks for the address, which may be valid for minutes only, and the headers to send there."""


def fetch(remote: Remote, target: Path, progress: Progress | None = None) -> None:
    """Makes `target` that file. progress: called as progress(done, total), with the file's bytes.

    What came before an error or an interruption stays in target.incomplete, where the next call goes on. If
    another process brings the same file, this waits for it. Raises FileError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".incomplete")
    with partial.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if target.exists():  # another process brought it meanwhile
            return
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
        file.flush()
        os.replace(partial, target)


def _begun(remote: Remote) -> Any:
    if remote.is_sha256:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {remote.n_bytes}\0".encode(), usedforsecurity=False)


def _restart(file: BinaryIO, remote: Remote) -> Any:
    file.truncate(0)
    file.seek(0)
    return _begun(remote)


def _bring(remote: Remote, file: BinaryIO, digest: Any, progress: Progress | None) -> Any:
    """Appends what is missing; tries again where a connection breaks."""
    failures = 0
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
                    file.write(chunk)
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
        except (OSError, HTTPException) as error:
            if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
                raise FileError(f"{file.name}: {error.strerror}") from None
            failure = error
        failures = 0 if file.tell() > before else failures + 1
        if failures == _ATTEMPTS:
            raise FileError(
                f"{remote.name}: {failure}; {file.tell()} of {remote.n_bytes} bytes are there, with which "
                "the next attempt goes on"
            ) from None
        if failures:
            time.sleep(_PAUSE_S * 2 ** (failures - 1))
    return digest
