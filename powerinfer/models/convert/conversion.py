"""Turning a checkpoint's folder into one file."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._engine import formats
from ..._engine.activations import ACTIVATIONS
from ..._engine.file import ModelFile
from ..._engine.model import Model
from ...errors import ArgumentError, FileError, FormatError, UnsupportedError
from ..statistics import read_activation_dir
from ..writer import GGUFWriter
from .checkpoint import Checkpoint
from .families.reading import read_hyper
from .files import map_file
from .gpt_oss import Packed
from .hyper import MAX_DIM, Hyper
from .json_file import Settings, read_object
from .keys import FILE_TYPES, model_keys, note_on_original
from .layout import FileTensor, Layout, count_next, lay_out
from .predictors import Predictors, read_predictors
from .vocabulary import read_vocabulary

Progress = Callable[[int, int], object]

_FALLBACK = "F16"
_LARGEST_F16 = 65519.0  # above it, rounding to F16 gives infinity
_LARGEST_F32 = 3.3e38  # the same of BF16


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What became of a checkpoint."""

    path: Path
    hyper: Hyper
    type: str
    is_powerinfer: bool
    n_tensors: int
    n_bytes: int
    """Of the weights."""
    predictors: Predictors | None
    n_counted_tokens: int
    """Over which the activation statistics were counted; 0 if there are none."""
    fallbacks: tuple[str, ...]
    """Tensors whose rows do not divide into the type's blocks; they are F16."""
    left_out: tuple[str, ...]
    """Tensors of the checkpoint that say nothing more."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A checkpoint's folder, opened."""

    config: Settings
    hyper: Hyper
    checkpoint: Checkpoint


def open_source(folder: str | os.PathLike[str], *, hidden_act: str = "") -> Source:
    """Raises FileError, FormatError, UnsupportedError."""
    if hidden_act and hidden_act not in ACTIVATIONS:
        raise ArgumentError(f"hidden_act is {hidden_act!r}, must be one of {', '.join(ACTIVATIONS)}")
    path = Path(folder)
    if not path.exists() and re.fullmatch(r"(hf:)?[\w.-]+/[\w.-]+", str(folder)):
        name = str(folder).removeprefix("hf:")
        raise FileError(
            f"there is no folder {folder}: fetch that of the Hugging Face Hub "
            f"(hf download {name} --local-dir {name.rpartition('/')[2]}), and convert that"
        )
    checkpoint = Checkpoint(path)
    config = read_object(path / "config.json")
    return Source(config, read_hyper(config, hidden_act=hidden_act), checkpoint)


def convert(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    type: str = "F16",
    predictors: str | os.PathLike[str] | None = None,
    activation: str | os.PathLike[str] | None = None,
    hidden_act: str = "",
    pre: str = "",
    transpose_down: bool = False,
    next_head: bool = True,
    progress: Progress | None = None,
) -> Conversion:
    """Writes the file of a Hugging Face folder; it appears when it is complete.

    type: of the matrices, one of FILE_TYPES; vectors are F32.
    predictors: a folder of model_0.pt, model_1.pt ...; then it is a PowerInfer file.
    activation: a folder of activation_0.pt, activation_1.pt ..., which become keys.
    hidden_act: what the model was trained with, where config.json says something else.
    pre: the name of the pre-tokenizer, where it is not recognised.
    transpose_down: store ffn_down as rows of neurons also without predictors. The engine then reads only the
        rows of neurons that fire, in any format; llama.cpp does not read such a file.
    next_head: keep the layer that guesses at further tokens (NextN, MTP), if the checkpoint has one and
        there are no predictors.
    progress: called as progress(bytes done, bytes in all); an exception from it ends the conversion.

    Raises FileError, FormatError, UnsupportedError, ArgumentError; then there is no file.
    """
    if type not in FILE_TYPES:
        raise ArgumentError(f"the type is {type!r}, must be one of {', '.join(FILE_TYPES)}")
    source = open_source(folder, hidden_act=hidden_act)
    spare_inputs(Path(out), folder, predictors, activation)
    hyper, path = source.hyper, Path(folder)
    powerinfer = predictors is not None
    if (powerinfer or transpose_down) and not hyper.is_relu:
        what = "predictors are" if powerinfer else "a transposed ffn_down is"
        raise UnsupportedError(
            f"{source.config.where}: with the activation {hyper.act} no neuron is ever silent, and {what} of "
            "use for ReLU models only; --hidden-act relu says that it is one"
        )
    if hyper.experts is not None and powerinfer:
        raise UnsupportedError(f"{source.config.where}: the engine has no predictors of experts")
    if next_head and not powerinfer:
        hyper = replace(hyper, n_next=count_next(source.checkpoint, hyper))
    transposed = powerinfer or transpose_down
    layout = lay_out(source.checkpoint, hyper, powerinfer=powerinfer, transpose_down=transposed)
    found = None
    if predictors is not None:
        found = read_predictors(Path(predictors), n_layer=hyper.n_layer, n_embd=hyper.n_embd, n_ff=hyper.n_ff)
    counts = None
    if activation is not None:
        counts = read_activation_dir(
            activation,
            n_layer=hyper.n_layer,
            n_ff=hyper.experts.n if hyper.experts else hyper.n_ff,
            unit="experts" if hyper.experts else "neurons",
        )
    vocabulary = read_vocabulary(path, source.config, arch=hyper.arch, n_vocab=hyper.n_vocab, pre=pre)

    keys = dict(model_keys(hyper, name=name_of(path), type=type, powerinfer=powerinfer, predictors=found))
    keys.update(layout.keys)
    if found is not None and found.thresholds:
        keys["powerinfer.sparse_thresholds"] = np.array(found.thresholds, np.float32)
    keys.update(counts.keys if counts is not None else {})
    keys.update(vocabulary.keys())
    tensors = _all_tensors(layout, found)
    types = {name: _type_of(name, tensor, type) for name, tensor in tensors.items()}
    n_bytes = _write(Path(out), powerinfer, keys, tensors, types, progress, hyper, str(path))
    notes = [*hyper.notes, *layout.notes, *vocabulary.notes]
    note = note_on_original(hyper, set(tensors), type=type, pre=vocabulary.pre) if powerinfer else ""
    notes += [note] if note else []
    return Conversion(
        path=Path(out),
        hyper=hyper,
        type=type,
        is_powerinfer=powerinfer,
        n_tensors=len(tensors),
        n_bytes=n_bytes,
        predictors=found,
        n_counted_tokens=counts.n_tokens if counts is not None else 0,
        fallbacks=tuple(n for n, kind in types.items() if kind != type and _is_matrix(n, tensors[n])),
        left_out=layout.left_out,
        notes=tuple(notes),
    )


def spare_inputs(out: Path, *folders: str | os.PathLike[str] | None) -> None:
    """Raises ArgumentError if the output would replace what the folders hold, apart from earlier outputs."""
    places = {os.path.realpath(out.parent), os.path.dirname(os.path.realpath(out))}
    if places & {os.path.realpath(folder) for folder in folders if folder is not None}:
        with contextlib.suppress(FileError):  # there is no such file yet
            if map_file(out)[:4] not in (b"GGUF", b"PWRI"):
                raise ArgumentError(f"{out} belongs to what is converted; the output must be another file")


def name_of(folder: Path) -> str:
    """The folder's name; in Hugging Face's cache, models--WHO--NAME/snapshots/HASH, that of the model."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        folder = Path(folder.parent.parent.name.rpartition("--")[2])
    return folder.name.encode("utf-8", "replace").decode() or "model"


def _all_tensors(layout: Layout, predictors: Predictors | None) -> dict[str, FileTensor]:
    out = dict(layout.tensors)
    if predictors is not None:
        for i, (fc1, fc2) in enumerate(zip(predictors.fc1, predictors.fc2, strict=True)):
            out[f"blk.{i}.fc1.weight"] = fc1
            out[f"blk.{i}.fc2.weight"] = fc2
    return out


# Matrices that are floats whatever is asked for: a rounded router chooses other experts, and convolutions and
# norms of groups of heads are small.
_FLOATS = ("ffn_gate_inp.weight", "_norm.weight", "conv1d.weight", "shortconv.conv.weight")


def _is_matrix(name: str, tensor: FileTensor) -> bool:
    """Whether it has the type that was asked for."""
    if isinstance(tensor, Packed) or len(tensor.shape) < 2:
        return False
    return name.endswith(".weight") and not name.endswith(_FLOATS)


def _type_of(name: str, tensor: FileTensor, type: str) -> str:
    if isinstance(tensor, Packed):
        return "MXFP4"
    if not _is_matrix(name, tensor):
        return "F32"
    return type if tensor.shape[-1] % formats.block(type) == 0 else _FALLBACK


def _write(
    out: Path,
    powerinfer: bool,
    keys: dict[str, Any],
    tensors: dict[str, FileTensor],
    types: dict[str, str],
    progress: Progress | None,
    hyper: Hyper,
    where: str,
) -> int:
    """The file; returns the bytes of its tensors. where: what is converted."""
    with GGUFWriter(out, powerinfer=powerinfer) as writer:
        for key, value in keys.items():
            if isinstance(value, tuple):
                writer.add(key, value[1], value[0])
            else:
                writer.add(key, value)
        total = 0
        for name, tensor in tensors.items():
            writer.add_tensor(name, types[name], tensor.shape)
            rows = math.prod(tensor.shape[:-1])
            total += rows * formats.row_bytes(types[name], tensor.shape[-1])
        _examine(writer, tensors, types, hyper, where)
        done = 0
        for name, tensor in tensors.items():
            for data in _encode(name, tensor, types[name]):
                writer.write(data)
                done += data.nbytes
                if progress is not None:
                    progress(done, total)
    return total


def _examine(
    writer: GGUFWriter, tensors: dict[str, FileTensor], types: dict[str, str], hyper: Hyper, where: str
) -> None:
    """Opens what will be written, before hours of work: the engine checks each name, shape and key.

    Raises FormatError, UnsupportedError.
    """
    vectors = {
        name: b"".join(data.tobytes() for data in _encode(name, tensor, types[name]))
        for name, tensor in tensors.items()
        if types[name] == "F32" and math.prod(tensor.shape) <= MAX_DIM
    }
    outline, of = writer.outline(vectors), ""
    try:
        with ModelFile(f"/proc/self/fd/{outline}") as file:
            Model(file, load=False).close()
            if hyper.n_next:
                of = " (the layer that guesses at further tokens; --no-mtp leaves it out)"
                Model(file, load=False, next_head=True).close()
    except (FormatError, UnsupportedError) as error:
        raise type(error)(f"{where}: the engine would not open what becomes of it{of}: {error}") from None
    finally:
        os.close(outline)


def _encode(name: str, tensor: FileTensor, type: str) -> Iterator[npt.NDArray[np.uint8]]:
    """A tensor's bytes, in pieces."""
    if isinstance(tensor, Packed):
        yield from tensor.raw()
        return
    largest = _LARGEST_F32 if type in ("F32", "BF16") else _LARGEST_F16
    for chunk in tensor.chunks():
        low, high = float(chunk.min()), float(chunk.max())
        if not (low >= -largest and high <= largest):  # neither holds of NaN
            if abs(low) <= _LARGEST_F32 and abs(high) <= _LARGEST_F32:
                peak = max(-low, high)
                raise FormatError(
                    f"{name} has a weight of size {peak:g}, which {type} cannot hold; BF16 and F32 can"
                )
            raise FormatError(f"{name} has weights that are no numbers or infinite")
        yield formats.quantize(chunk.reshape(-1, tensor.shape[-1]) if chunk.ndim > 1 else chunk[None], type)
