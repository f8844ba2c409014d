"""Turning a LoRA adapter as PEFT saves it (adapter_config.json and adapter_model) into a GGUF file.

A pair of matrices goes where the one goes that it belongs to: B has its rows, and is reordered, cut and
scaled as these are; A has its columns. Of the base model its config.json is read, and its weights only where
the adapter has copies of them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from ..._engine import formats
from ...errors import ArgumentError, FileError, FormatError, UnsupportedError
from ..writer import GGUFWriter
from .checkpoint import Checkpoint, open_weights
from .conversion import name_of, spare_inputs
from .families.family import Family, check_rows, turned
from .families.reading import read_hyper
from .families.tensors import file_tensors
from .hyper import Hyper
from .json_file import Settings, read_object
from .layout import parts_of
from .stored import StoredTensor

TYPES = ("F32", "F16", "BF16")

Floats = npt.NDArray[np.float32]

# Tensors that the engine takes adapters of.
_TARGET = re.compile(
    r"blk\.\d+\.(attn_(qkv|q|k|v|output)|ffn_(gate|up|down))\.weight|(token_embd|output)\.weight"
)
_PAIR = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_[AB]\.weight|lora_embedding_[AB])")
# PEFT saves the embedding and the head whole where they are adapted, or the vocabulary has grown.
_WHOLE = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.weight")
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "embed_in.weight")

# What adapter_config.json may not say, and why.
_REFUSED = {
    "use_dora": "it is a DoRA, which scales the rows of the model's matrices",
    "modules_to_save": "it has whole matrices of its own (modules_to_save)",
    "lora_bias": "it has biases",
    "layer_replication": "it repeats layers",
    "alora_invocation_tokens": "it is an activated LoRA (aLoRA)",
    "target_parameters": "it changes matrices of a mixture's experts (target_parameters)",
    "trainable_token_indices": "it has rows of the embedding of its own (trainable_token_indices)",
}
# These take something out of the model's weights when training begins.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, kw_only=True)
class AdapterConversion:
    """What became of an adapter."""

    path: Path
    arch: str
    type: str
    n_matrices: int
    """That it changes."""
    ranks: tuple[int, ...]
    alpha: float


def is_adapter(folder: str | os.PathLike[str]) -> bool:
    return (Path(folder) / "adapter_config.json").is_file()


def convert_adapter(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str],
    type: str = "F32",
) -> AdapterConversion:
    """Writes the file of an adapter's folder; it appears when it is complete.

    base: the folder of the model that it belongs to, or one with its config.json alone, if the adapter has no
    copies of the model's matrices. type: one of TYPES.

    Raises FileError, FormatError, UnsupportedError, ArgumentError; then there is no file.
    """
    if type not in TYPES:
        raise ArgumentError(f"the type of an adapter is {type!r}, must be one of {', '.join(TYPES)}")
    spare_inputs(Path(out), folder, base)
    path = Path(folder)
    config = read_object(path / "adapter_config.json")
    hyper = read_hyper(read_object(Path(base) / "config.json"))
    alpha = _check(config)
    tensors: dict[str, Floats] = {}
    ranks = set()
    pairs, copies = _read(path)
    _check_copies(path, copies, Path(base))
    for module, (a, b) in pairs.items():
        rank = a.shape[0]
        ranks.add(rank)
        by = _strength(config, module, rank) / (alpha / rank)
        for name, rows in _places(hyper, module, b):
            if not _TARGET.fullmatch(name):
                raise UnsupportedError(f"{path} changes {module}, {name} of a file: that cannot be adapted")
            if f"{name}.lora_a" in tensors:
                raise FormatError(f"{path}: two pairs become {name}")
            values = a.floats()
            tensors[f"{name}.lora_a"] = values.T if name == "token_embd.weight" else values
            tensors[f"{name}.lora_b"] = rows.floats() * np.float32(by)
    with GGUFWriter(out, powerinfer=False) as writer:
        writer.add("general.architecture", hyper.arch)
        writer.add("general.type", "adapter")
        writer.add("general.name", name_of(path))
        writer.add("adapter.type", "lora")
        writer.add("adapter.lora.alpha", float(alpha))
        for name, value in tensors.items():
            _check_values(path, name, value, type)
            writer.add_tensor(name, type, value.shape)
        for value in tensors.values():
            writer.write(formats.quantize(np.ascontiguousarray(value), type))
    return AdapterConversion(
        path=Path(out),
        arch=hyper.arch,
        type=type,
        n_matrices=len(tensors) // 2,
        ranks=tuple(sorted(ranks)),
        alpha=alpha,
    )


def _check(config: Settings) -> float:
    """What the adapter is made by must be what the engine computes; returns its alpha."""
    if config.text("peft_type", default="LORA") != "LORA":
        raise UnsupportedError(f"{config.where}: peft_type is {config.text('peft_type')!r:.40}, not LORA")
    for name, why in _REFUSED.items():
        if config.values.get(name):
            raise UnsupportedError(f"{config.where}: {why}, which no such file has")
    if config.text("bias", default="none") != "none":
        raise UnsupportedError(
            f"{config.where}: bias is {config.text('bias')!r:.40}: biases were trained, too"
        )
    init = config.values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise UnsupportedError(
            f"{config.where}: init_lora_weights is {init!r:.40}: the adapter is for weights that were "
            "changed before; PEFT can save it as an ordinary one (path_initial_model_for_weight_conversion)"
        )
    alpha = config.number("lora_alpha", default=8)
    if alpha == 0:
        raise FormatError(f"{config.where}: lora_alpha is 0, so that the adapter changes nothing")
    return alpha


def _strength(config: Settings, module: str, rank: int) -> float:
    """What B A is multiplied by."""
    patterns = config.object("alpha_pattern")
    # As in PEFT: a name, or the end of one, as a regular expression; the first that fits.
    key = next((key for key in patterns.values if _fits(config, key, module)), None)
    alpha = config.number("lora_alpha", default=8) if key is None else patterns.number(key)
    return alpha / (math.sqrt(rank) if config.flag("use_rslora", False) else rank)


def _fits(config: Settings, pattern: str, module: str) -> bool:
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error:
        raise FormatError(
            f"{config.where}: alpha_pattern has {pattern!r:.80}, no regular expression"
        ) from None


def _read(folder: Path) -> tuple[dict[str, tuple[StoredTensor, StoredTensor]], dict[str, StoredTensor]]:
    """A [rank, columns] and B [rows, rank] by the names of modules; whole matrices by their own."""
    file = next(
        (
            folder / f"adapter_model{end}"
            for end in (".safetensors", ".bin")
            if (folder / f"adapter_model{end}").is_file()
        ),
        None,
    )
    if file is None:
        raise FileError(f"{folder} has no adapter_model.safetensors or adapter_model.bin")
    halves: dict[str, dict[str, StoredTensor]] = {}
    whole: dict[str, StoredTensor] = {}
    for name, tensor in open_weights(file).items():
        match = _PAIR.fullmatch(name)
        if not match:
            of = _WHOLE.fullmatch(name)
            if not of:
                raise UnsupportedError(f"{file} has a tensor {name:.200}, which is no part of a LoRA pair")
            whole[f"{of[1]}.weight"] = tensor
            continue
        if not tensor.is_float or tensor.view.ndim != 2 or not tensor.view.size:
            raise FormatError(
                f"{file}: {name:.200} is {tensor.dtype} of shape {list(tensor.shape)}, not a matrix"
            )
        if halves.setdefault(match[1], {}).setdefault(match[2], tensor) is not tensor:
            raise FormatError(f"{file}: two tensors are {match[2]} of {match[1]:.200}")
    pairs = {}
    for module, two in halves.items():
        kinds = sorted(two)
        if kinds not in (["lora_A.weight", "lora_B.weight"], ["lora_embedding_A", "lora_embedding_B"]):
            raise FormatError(f"{file}: of {module:.200} there is {' and '.join(kinds)}, not a pair")
        a, b = two[kinds[0]], two[kinds[1]]
        if a.shape[0] != b.shape[1]:
            raise FormatError(
                f"{file}: A and B of {module:.200} have shapes {list(a.shape)} and {list(b.shape)}"
            )
        pairs[module] = a, b
    if not pairs:
        raise FormatError(f"{file} has no tensors")
    return pairs, whole


def _check_copies(folder: Path, copies: dict[str, StoredTensor], base: Path) -> None:
    """Whole matrices must be the base model's: a file of an adapter has no place for others."""
    if not copies:
        return
    try:
        published = Checkpoint(base).tensors
    except FileError as error:
        raise FileError(
            f"{folder} has a copy of {next(iter(copies)):.200}, and nothing to compare it with: {error}"
        ) from None
    for name, copy in copies.items():
        own = published.get(name)
        if own is None and name == "lm_head.weight":  # the embedding's
            own = next((t for of, t in published.items() if of.endswith(_EMBEDDINGS)), None)
        if own is None:
            raise UnsupportedError(
                f"{folder} has a tensor {name:.200}, which is no part of a LoRA pair and not in {base}"
            )
        if not _alike(copy, own):
            shapes = f"{list(copy.shape)} instead of {list(own.shape)}"
            raise UnsupportedError(
                f"{folder} has a {name:.200} of its own ({shapes}), unlike that in {base}: "
                "no such file has one; merge the adapter into the model, and convert that"
            )


def _alike(copy: StoredTensor, own: StoredTensor) -> bool:
    """But for the rounding of the narrower type of both, which PEFT may have cast to."""
    if copy.shape != own.shape or not copy.is_float or not own.is_float or not copy.view.ndim:
        return False
    types = {copy.dtype, own.dtype}
    ulp = 0.0 if len(types) == 1 else 2.0**-8 if "BF16" in types else 2.0**-11 if "F16" in types else 2.0**-24
    least = 2.0**-25 if "F16" in types and ulp else 0.0  # half the distance of F16's smallest numbers
    step = own.rows_per_chunk()
    for first in range(0, own.shape[0], step):
        n = min(step, own.shape[0] - first)
        a, b = copy.floats(first, n), own.floats(first, n)
        if not (np.abs(a - b) <= ulp * np.abs(b) + least).all():
            return False
    return True


def _places(h: Hyper, module: str, b: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """The file's tensors that a matrix becomes, and of each its rows of B."""
    if module == "lm_head":
        yield "output.weight", b
        return
    if ".experts." in module:
        raise UnsupportedError(f"the adapter changes {module:.200}: experts of a mixture cannot be adapted")
    published = f"{module}.weight"
    if h.row is not None:
        row = cast(Family, h.row)
        # A and B are rows and columns of a product whichever way the matrix itself is published.
        row = replace(row, changes={name: of for name, of in row.changes.items() if of is not turned})
        found = list(file_tensors(published, b, h, row))
    else:
        parts = [part for source, part in parts_of(h) if source == published]
        for part in parts:
            # Of an embedding A has a column for each token, and B a row for each value.
            check_rows(b, part.shape[part.name == "token_embd"])
        found = [(f"{part.name}.weight", replace(b, rows=part.rows)) for part in parts]
    if not found:
        raise FormatError(
            f"the adapter changes {module:.200}, which a {h.family} model of {h.n_layer} layers has not"
        )
    for name, tensor in found:
        if not isinstance(tensor, StoredTensor) or tensor.columns is not None:
            raise UnsupportedError(f"the adapter changes {module:.200}: that cannot be adapted")
        yield name, replace(tensor, is_ternary=False)


def _check_values(folder: Path, name: str, value: Floats, type: str) -> None:
    largest = float(np.abs(value).max())
    if not largest <= (65519.0 if type == "F16" else 3.3e38):
        raise FormatError(f"{folder}: {name} has weights that {type} cannot hold, or that are no numbers")
