"""The models that were fetched before: huggingface_hub's cache, which other programs share."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from .._extras import how
from ..errors import ArgumentError, UnsupportedError
from .names import PREFIX, Choice, choose, format_of, is_reference, parse

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Stored:
    """A model in the cache."""

    name: str
    """What stands for it wherever a model is named."""
    path: Path
    """Of its (first) file."""
    n_bytes: int
    last_used: float
    """Seconds of the epoch."""


def client() -> Any:
    """huggingface_hub. Raises UnsupportedError."""
    try:
        return import_module("huggingface_hub")
    except ImportError:
        raise UnsupportedError(f"models from the hub need huggingface_hub: {how('hub')}") from None


def cache_folder(cache_dir: StrPath | None = None) -> Path:
    """Where models lie: as HF_HOME or HF_HUB_CACHE say."""
    if cache_dir is not None:
        return Path(cache_dir)
    client()
    return Path(import_module("huggingface_hub.constants").HF_HUB_CACHE)


def repo_folder(repo: str, cache_dir: StrPath | None = None) -> Path:
    """Of a repository, in the cache."""
    return cache_folder(cache_dir) / f"models--{repo.replace('/', '--')}"


def snapshot(repo: str, cache_dir: StrPath | None = None) -> tuple[Path, dict[str, int]] | None:
    """The folder of a repository's newest revision that is here, and its files with their sizes."""
    root = repo_folder(repo, cache_dir)
    folders = [path for path in (root / "snapshots").glob("*") if path.is_dir()]
    if not folders:
        return None
    reference = root / "refs" / "main"
    current = root / "snapshots" / (reference.read_text().strip() if reference.is_file() else "")
    folder = current if current in folders else max(folders, key=lambda path: path.stat().st_mtime)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]  # no links whose file is gone
    return folder, {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def stored(cache_dir: StrPath | None = None) -> list[Stored]:
    """The GGUF models in the cache, by name; parts of a split are one. Those that lack parts are left out."""
    found = []
    for root in sorted(cache_folder(cache_dir).glob("models--*--*")):
        repo = root.name.removeprefix("models--").replace("--", "/", 1)
        here = snapshot(repo, cache_dir)
        models = [] if here is None else _whole_models(repo, here[1])
        formats = [format_of(model.model) for model in models]
        for model, form in zip(models, formats, strict=True):
            assert here is not None
            told = form if form and formats.count(form) == 1 else model.model
            path = here[0] / model.model
            used = max(path.stat().st_atime, path.stat().st_mtime)
            found.append(Stored(f"{PREFIX}{repo}:{told}", path, model.n_bytes, used))
    return found


def _whole_models(repo: str, sizes: dict[str, int]) -> list[Choice]:
    found = []
    for name in sizes:
        if name.endswith(".gguf"):
            try:
                found.append(choose(repo, sizes, name))
            except ArgumentError:  # a part of a split
                continue
    return found


def remove(name: str, cache_dir: StrPath | None = None) -> tuple[list[str], int]:
    """Deletes a model from the cache: hf:OWNER/REPO with all its files, or one model of it. Returns the names
    of the files that are gone, and how many bytes that freed. Raises ArgumentError if it is not there."""
    if not is_reference(name):
        raise ArgumentError(
            f"{name!r} is no model of the hub's cache: those are called hf:OWNER/REPO[:FORMAT]"
        )
    reference = parse(name)
    root = repo_folder(reference.repo, cache_dir)
    here = snapshot(reference.repo, cache_dir)
    if here is None:
        raise ArgumentError(f"{name} is not here; `powerinfer list` shows what is")
    only: set[str] | None = None
    if reference.wanted is not None:
        model = choose(reference.repo, here[1], reference.wanted)
        # What lies beside it goes with the last model of its folder.
        shared = any(
            Path(other.model).parent == Path(model.model).parent
            for other in _whole_models(reference.repo, here[1])
            if other.model != model.model
        )
        only = {file for file in model.files if not shared or file.endswith(".gguf")}
    gone, blobs = _unlink(root / "snapshots", only)
    if only is None:
        blobs |= set((root / "blobs").glob("*.incomplete"))
    used = {path.resolve() for path in (root / "snapshots").rglob("*") if path.is_symlink()}
    freed = 0
    for blob in blobs - used:
        if blob.is_file() and blob.resolve().parent == (root / "blobs").resolve():
            freed += blob.stat().st_size
            blob.unlink()
    if not any((root / "snapshots").glob("*")):
        for path in (root / "refs").glob("*"):
            path.unlink()
        _remove_empty(root)
    return sorted(gone), freed


def _unlink(snapshots: Path, only: Collection[str] | None) -> tuple[set[str], set[Path]]:
    """Takes these names, or all, out of every revision; the names and the files that they stood for."""
    gone: set[str] = set()
    blobs: set[Path] = set()
    for folder in snapshots.glob("*"):
        for path in sorted(folder.rglob("*"), reverse=True):
            name = path.relative_to(folder).as_posix()
            if (only is None or name in only) and (path.is_symlink() or path.is_file()):
                blobs.add(path.resolve())
                gone.add(name)
                path.unlink()
        _remove_empty(folder)
    return gone, blobs


def _remove_empty(root: Path) -> None:
    for path in [*sorted(root.rglob("*"), reverse=True), root]:
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()
