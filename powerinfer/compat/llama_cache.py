"""Keeping what prompts computed: `llm.set_cache(LlamaRAMCache())`, or LlamaDiskCache to keep it between runs.

A cache maps token ids to the state after them and finds the entry that shares the longest beginning with
what is asked for. An entry that is the beginning of a newer one is dropped: the newer one serves as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import struct
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from .._engine.arrays import Ids, as_int32, common_prefix
from .._engine.context import ContextState
from .._engine.report import LlamaState
from ..errors import ArgumentError, FileError

_MAGIC = b"PIstate1"
_DIGEST_BYTES = 32
_MAX_HEADER = 4096


class BaseLlamaCache(ABC):
    """Base of the prompt caches that Llama.set_cache() takes."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        """capacity_bytes: the entries used longest ago are dropped beyond this."""
        if capacity_bytes < 0:
            raise ArgumentError("capacity_bytes must not be negative")
        self.capacity_bytes = capacity_bytes

    @property
    @abstractmethod
    def cache_size(self) -> int:
        """Bytes of all entries."""

    @abstractmethod
    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """The state that shares the longest beginning with key. Raises KeyError if none shares any."""

    @abstractmethod
    def __contains__(self, key: Sequence[int]) -> bool: ...

    @abstractmethod
    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Keeps a state, unless it is larger than the capacity."""

    def lookup(self, key: Sequence[int], model: str) -> LlamaState:
        """The same among the states of one model (LlamaState.model)."""
        state = self[key]
        if state.model not in ("", model):
            raise KeyError("there are only states of other models")
        return state


class LlamaRAMCache(BaseLlamaCache):
    """A prompt cache in memory, for one process."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        self._entries: OrderedDict[tuple[str, bytes], LlamaState] = OrderedDict()

    @property
    def cache_size(self) -> int:
        return sum(state.n_bytes for state in self._entries.values())

    def _find(self, key: Sequence[int], model: str | None) -> tuple[str, bytes] | None:
        wanted = as_int32("key", key)
        entries = ((e, np.frombuffer(e[1], np.int32)) for e in self._entries)
        found: tuple[str, bytes] | None = _longest(entries, wanted, model)
        return found

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        return self._get(key, None)

    def lookup(self, key: Sequence[int], model: str) -> LlamaState:
        return self._get(key, model)

    def _get(self, key: Sequence[int], model: str | None) -> LlamaState:
        entry = self._find(key, model)
        if entry is None:
            raise KeyError("no entry begins like this")
        self._entries.move_to_end(entry)
        return self._entries[entry]

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._find(key, None) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        if value.n_bytes > self.capacity_bytes:
            return
        name = value.model, as_int32("key", key).tobytes()
        for old in [old for old in self._entries if old[0] == name[0] and name[1].startswith(old[1])]:
            del self._entries[old]
        self._entries[name] = value
        while self.cache_size > self.capacity_bytes:
            self._entries.popitem(last=False)


LlamaCache = LlamaRAMCache


class LlamaDiskCache(BaseLlamaCache):
    """A prompt cache in a folder, with one file for each entry. Several processes may share it.

    Files are checked when they are read: one that is damaged is deleted and counts as absent. They hold
    what was said, in the tokens and in K and V: the folder is made for its owner alone.
    """

    def __init__(
        self, cache_dir: str | os.PathLike[str] = ".cache/llama_cache", capacity_bytes: int = 2 << 30
    ) -> None:
        """Raises FileError: the folder cannot be made. So does writing an entry that the disk refuses."""
        super().__init__(capacity_bytes)
        self.folder = Path(cache_dir)
        with _in_words(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self.folder.glob(".*.tmp"):  # of a process that was killed
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - 3600:
                    path.unlink()

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of use, bytes and path of the entries, oldest first."""
        found = []
        for path in self.folder.glob("*.pistate"):
            with suppress(OSError):
                status = path.stat()
                if stat.S_ISREG(status.st_mode):  # opening a pipe would wait for whoever writes into it
                    found.append((status.st_mtime, status.st_size, path))
        return sorted(found)

    @property
    def cache_size(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _keys(self) -> Iterator[tuple[tuple[str, Path], Ids]]:
        for _, _, path in self._files():
            with suppress(OSError, ValueError), path.open("rb") as file:
                header = _read_header(file)
                ids = np.frombuffer(file.read(4 * header["n_ids"]), np.int32)
                if ids.size == header["n_ids"]:
                    yield (header["model"], path), ids

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        return self._get(key, None)

    def lookup(self, key: Sequence[int], model: str) -> LlamaState:
        return self._get(key, model)

    def _get(self, key: Sequence[int], model: str | None) -> LlamaState:
        wanted = as_int32("key", key)
        while (entry := _longest(self._keys(), wanted, model)) is not None:
            path = entry[1]
            try:
                state = _read(path)
            except FileNotFoundError:  # another process dropped it
                continue
            except ValueError:
                path.unlink(missing_ok=True)
                continue
            with suppress(OSError):
                os.utime(path)
            return state
        raise KeyError("no entry begins like this")

    def __contains__(self, key: Sequence[int]) -> bool:
        return _longest(self._keys(), as_int32("key", key), None) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        ids = as_int32("key", key)
        data = _packed(ids, value)
        size = sum(map(len, data))
        if size > self.capacity_bytes:
            return
        name = hashlib.blake2b(value.model.encode() + b"\0" + ids.tobytes(), digest_size=20).hexdigest()
        older = [path for (model, path), held in self._keys() if _covers(value.model, ids, model, held)]
        temporary = self.folder / f".{name}.{secrets.token_hex(8)}.tmp"
        path = self.folder / f"{name}.pistate"
        with _in_words(path):
            try:
                with open(temporary, "xb", opener=_private) as file:
                    file.writelines(data)
                os.replace(temporary, path)
            finally:
                with suppress(OSError):
                    temporary.unlink()
        for old in older:
            if old != path:
                old.unlink(missing_ok=True)
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, old in files:
            if total <= self.capacity_bytes:
                break
            if old != path:
                old.unlink(missing_ok=True)
                total -= size


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Within the block a system's error is a FileError."""
    try:
        yield
    except OSError as error:
        raise FileError(f"the cache {path} cannot be written: {error.strerror or error}") from error


def _longest(entries: Iterator[tuple[Any, Ids]], wanted: Ids, model: str | None) -> Any:
    """The entry with the longest common beginning, its name being (model, ...); None if there is none."""
    best, found = 0, None
    for name, ids in entries:
        n = common_prefix(ids, wanted) if model is None or name[0] in ("", model) else 0
        if n > best:
            best, found = n, name
    return found


def _covers(model: str, ids: Ids, old_model: str, old: Ids) -> bool:
    return model == old_model and common_prefix(ids, old) == old.size


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


# A file: magic, length of the header, header (JSON), key, ids, logits, K and V, and a digest of all that.


def _packed(key: Ids, state: LlamaState) -> list[bytes]:
    context = state.context
    header = json.dumps(
        {
            "model": state.model,
            "n_ids": int(key.size),
            "n_held": int(context.ids.size),
            "rows": list(context.rows.shape),
            "n_kv": len(context.kv),
        }
    ).encode()
    parts = [_MAGIC, struct.pack("<I", len(header)), header, key.tobytes()]
    parts += [context.ids.tobytes(), np.ascontiguousarray(context.rows).tobytes(), context.kv]
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return [*parts, digest.digest()]


def _read_header(file: Any) -> dict[str, Any]:
    """Raises ValueError for a file that is no entry."""
    begin = file.read(12)
    if len(begin) != 12 or begin[:8] != _MAGIC:
        raise ValueError("no entry")
    (size,) = struct.unpack("<I", begin[8:])
    if size > _MAX_HEADER:
        raise ValueError("a header that is too long")
    try:
        header = json.loads(file.read(size))
    except RecursionError:
        raise ValueError("a header that is nested too deeply") from None
    if not isinstance(header, dict) or not isinstance(header.get("model"), str):
        raise ValueError("no header")
    rows = header.get("rows")
    if not isinstance(rows, list) or len(rows) != 2:
        raise ValueError("no shape of logits")
    counts = [header.get("n_ids"), header.get("n_held"), header.get("n_kv"), *rows]
    n_bytes = os.fstat(file.fileno()).st_size
    if not all(type(n) is int and 0 <= n <= n_bytes for n in counts):
        raise ValueError("sizes that cannot be")
    return header


def _read(path: Path) -> LlamaState:
    """Raises ValueError for a damaged file, OSError."""
    with path.open("rb") as file:
        header = _read_header(file)
        begin = file.tell()
        file.seek(0)
        data = file.read()
    n_ids, n_held, rows, n_kv = header["n_ids"], header["n_held"], header["rows"], header["n_kv"]
    sizes = [4 * n_ids, 4 * n_held, 4 * rows[0] * rows[1], n_kv, _DIGEST_BYTES]
    if begin + sum(sizes) != len(data):
        raise ValueError("the file was cut")
    if hashlib.blake2b(data[:-_DIGEST_BYTES], digest_size=_DIGEST_BYTES).digest() != data[-_DIGEST_BYTES:]:
        raise ValueError("the file is damaged")
    parts, at = [], begin
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    ids = np.frombuffer(parts[1], np.int32).copy()
    logits = np.frombuffer(parts[2], np.float32).reshape(rows).copy()
    return LlamaState(ContextState(ids, parts[3], logits), None, header["model"])
