"""A checkpoint as Hugging Face publishes it: one file, or several with an index of which tensor is where."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...errors import FileError, FormatError
from .json_file import read_object
from .safetensors_file import open_safetensors
from .stored import StoredTensor
from .torch_file import open_torch

_KINDS = (("model", ".safetensors"), ("pytorch_model", ".bin"))


class Checkpoint:
    """The tensors of a folder, by their published names. Nothing is read before it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises FileError, FormatError, UnsupportedError."""
        self.folder = folder
        self.files, placed = _find_files(folder)
        self.tensors: dict[str, StoredTensor] = {}
        for path in self.files:
            for name, tensor in open_weights(path).items():
                if placed.get(name, path.name) != path.name:
                    continue
                if name in self.tensors:
                    raise FormatError(f"{folder}: two files have a tensor {name!r:.200}")
                self.tensors[name] = tensor
        for name, file in placed.items():
            if name not in self.tensors:
                raise FormatError(
                    f"{folder}: the index promises a tensor {name!r:.200}, which {file} has not"
                )

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def weight(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """A tensor of floats of this shape. Raises FormatError for any other, or none."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise FormatError(f"{self.folder} has no tensor {name}")
        if tensor.shape != shape:
            raise FormatError(
                f"{self.folder}: tensor {name} has the shape {list(tensor.shape)}, "
                f"by config.json it must be {list(shape)}"
            )
        if not tensor.is_float:
            raise FormatError(f"{self.folder}: tensor {name} is of type {tensor.dtype}, not of floats")
        return tensor


def open_weights(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name. Raises FileError, FormatError, UnsupportedError."""
    reader: Callable[[Path], Any] = open_safetensors if path.suffix == ".safetensors" else open_torch
    content = reader(path)
    if not isinstance(content, dict):
        raise FormatError(f"{path} holds a tensor without a name")
    return content


def _find_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The weight files in their order, and, where an index says so, which tensor is in which."""
    if not folder.is_dir():
        raise FileError(f"{folder} is not a folder")
    for stem, suffix in _KINDS:
        index = folder / f"{stem}{suffix}.index.json"
        if index.is_file():
            placed = _read_index(index)
            return [folder / name for name in sorted(set(placed.values()))], placed
        single = folder / f"{stem}{suffix}"
        if single.is_file():
            return [single], {}
        shards = _shards(folder, stem, suffix)
        if shards:
            return shards, {}
    raise FileError(
        f"{folder} has no weights: model.safetensors, pytorch_model.bin or their numbered parts are expected"
    )


def _read_index(path: Path) -> dict[str, str]:
    placed = read_object(path).object("weight_map").values
    for name, file in placed.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise FormatError(
                f"{path}: the tensor {name!r:.200} is in {file!r:.200}, which is not a file's name"
            )
    if not placed:
        raise FormatError(f"{path} names no tensors")
    return placed


def _shards(folder: Path, stem: str, suffix: str) -> list[Path]:
    """model-00001-of-00003.safetensors and so on, without an index. All must be there."""
    found = {}
    for path in folder.iterdir():
        match = re.fullmatch(rf"{stem}-(\d+)-of-(\d+){re.escape(suffix)}", path.name)
        if match:
            found[int(match[1]), int(match[2])] = path
    if not found:
        return []
    total = max(n for _, n in found)
    missing = next((i for i in range(1, total + 1) if (i, total) not in found), None)
    if missing is not None:
        raise FileError(f"{folder}: of the {total} parts of the weights, number {missing} is missing")
    if len(found) > total:
        raise FormatError(f"{folder} has more than {total} parts of weights, and no index says which count")
    return [found[i, total] for i in range(1, total + 1)]
