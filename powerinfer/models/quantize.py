"""Writes a model in smaller weight formats, a tensor at a time.

    with ModelFile("in.gguf") as source:
        quantize_model(source, "out.gguf", "Q4_K_M", choose_types(source, "Q4_K_M"))

A mixture names the format of most weights and gives the tensors that suffer most from few bits a larger
one. Names and choices are those of llama.cpp (as in llama-cpp-python 0.3.36), so that either program gives
the same tensors the same formats. PowerInfer files keep their magic; their transposed
`ffn_down_t` counts as `ffn_down`, and predictors (`fc1`, `fc2`) have a format of their own.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .._engine import formats
from .._engine.activations import SILENT
from .._engine.file import ModelFile, TensorInfo
from .._engine.session import Model
from ..errors import ArgumentError, FormatError
from .rewrite import NewTensor, Progress, rewrite, rows_per_piece

# Name: general.file_type, and the format of most weights ("" for COPY: each keeps its own).
MIXTURES = {
    "Q4_0": (2, "Q4_0"),
    "Q4_1": (3, "Q4_1"),
    "Q5_0": (8, "Q5_0"),
    "Q5_1": (9, "Q5_1"),
    "Q8_0": (7, "Q8_0"),
    "IQ4_NL": (25, "IQ4_NL"),
    "MXFP4_MOE": (38, "MXFP4"),
    "Q2_K_S": (21, "Q2_K"),
    "Q2_K": (10, "Q2_K"),
    "Q3_K_S": (11, "Q3_K"),
    "Q3_K_M": (12, "Q3_K"),
    "Q3_K_L": (13, "Q3_K"),
    "Q4_K_S": (14, "Q4_K"),
    "Q4_K_M": (15, "Q4_K"),
    "Q5_K_S": (16, "Q5_K"),
    "Q5_K_M": (17, "Q5_K"),
    "Q6_K": (18, "Q6_K"),
    "F16": (1, "F16"),
    "BF16": (32, "BF16"),
    "F32": (0, "F32"),
    "COPY": (-1, ""),
}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
FLOATS = ("F32", "F16", "BF16")
FAST = (
    *(*FLOATS, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
)
"""Formats that the engine has vector kernels for, all that it can write among them; the others run many times
slower."""

# What takes the place of a format whose blocks the rows do not fill; F16 if that does not fit either.
_FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}

# Matrices that stay as they are: small, or read by rows that must be exact.
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "position_embd", "token_types")

# What rules call a matrix, where it is not called so itself.
_KINDS = {"attn_qkv": "attn_v", "ffn_down_t": "ffn_down", "fc1": "predictor", "fc2": "predictor"}

_DOWN = re.compile(r"\.ffn_down(_exps)?\.weight$")

# The largest number: of a format's scales, where it has some.
_LARGEST = {
    **dict.fromkeys(("F32", "MXFP4"), float(np.finfo(np.float32).max)),
    "BF16": float.fromhex("0x1.fep127"),
}
_LARGEST_HALF = 65504.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """What happens to one tensor."""

    tensor: TensorInfo
    type: str
    """Its format in the result."""
    n_bytes: int
    """In the result."""
    wanted: str
    """The format that it would have if its rows divided into blocks; "" if it has what it should."""
    by_neuron: bool = False
    """Down, whose rows will belong to neurons: it becomes `ffn_down_t`, of experts `ffn_down_t_exps`."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a matrix stands: all that rules ask for."""

    layer: int
    n_layer: int
    n_gqa: int
    """Query heads per head of K and V."""
    is_falcon: bool
    is_70b: bool
    """Llama 2 70B and its like."""
    is_8x: bool
    """Mixtures of eight experts, beside which attention is small."""


_When = Callable[[_Place], bool]


def _always(_: _Place) -> bool:
    return True


def _shared(place: _Place) -> bool:
    """Heads of K and V serve so many query heads that V is small."""
    return place.n_gqa >= 4


def _not_falcon(place: _Place) -> bool:
    return not place.is_falcon


def _first(n: int) -> _When:
    """The first n layers."""
    return lambda place: place.layer < n


def _part(n: int) -> _When:
    """The first n-th part of the layers."""
    return lambda place: place.layer < place.n_layer // n


def _outer(place: _Place) -> bool:
    """The first and the last eighth of the layers, and every third between them."""
    eighth = place.n_layer // 8
    return place.layer < eighth or place.layer >= 7 * place.n_layer // 8 or (place.layer - eighth) % 3 == 2


def _both(one: _When, other: _When) -> _When:
    return lambda place: one(place) and other(place)


# For a mixture and a kind of matrix: the first that holds gives the format; if none does, the mixture's own.
_RULES: dict[tuple[str, str], Sequence[tuple[_When, str]]] = {
    ("Q2_K", "attn_v"): [(_shared, "Q4_K"), (_always, "Q3_K")],
    ("Q2_K_S", "attn_v"): [(_shared, "Q4_K")],
    ("Q3_K_M", "attn_v"): [(_first(2), "Q5_K"), (_always, "Q4_K")],
    ("Q3_K_L", "attn_v"): [(_always, "Q5_K")],
    ("Q4_K_S", "attn_v"): [(_first(4), "Q5_K")],
    ("Q4_K_M", "attn_v"): [(_outer, "Q6_K")],
    ("Q5_K_M", "attn_v"): [(_outer, "Q6_K")],
    ("IQ4_NL", "attn_v"): [(_shared, "Q5_K")],
    ("Q2_K", "attn_output"): [(_not_falcon, "Q3_K")],
    ("Q3_K_M", "attn_output"): [(_not_falcon, "Q4_K")],
    ("Q3_K_L", "attn_output"): [(_not_falcon, "Q5_K"), (_always, "Q4_K")],
    ("Q2_K", "ffn_down"): [(_always, "Q3_K")],
    ("Q2_K_S", "ffn_down"): [(_part(8), "Q4_K")],
    ("Q3_K_M", "ffn_down"): [(_part(16), "Q5_K"), (_not_falcon, "Q4_K"), (_outer, "Q4_K")],
    ("Q3_K_L", "ffn_down"): [(_not_falcon, "Q5_K"), (_always, "Q4_K")],
    ("Q4_K_S", "ffn_down"): [(_both(_not_falcon, _part(8)), "Q5_K")],
    ("Q4_K_M", "ffn_down"): [
        (_both(_not_falcon, _outer), "Q6_K"),
        (_part(16), "Q6_K"),
        (_outer, "Q5_K"),
    ],
    ("Q5_K_M", "ffn_down"): [(_outer, "Q6_K")],
    ("IQ4_NL", "ffn_down"): [(_part(8), "Q5_K")],
}


# Mixtures of formats that give the attention output of a mixture of eight experts Q5_K.
_OUTPUT_8X = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL")


def find_mixture(name: str) -> str:
    """A mixture's name as MIXTURES has it: in any case, or llama.cpp's short ones. Raises ArgumentError."""
    upper = name.upper()
    upper = ALIASES.get(upper, upper)
    if upper not in MIXTURES:
        raise ArgumentError(f"{name!r} is not a mixture of weight formats; there are {', '.join(MIXTURES)}")
    return upper


def choose_types(
    source: ModelFile,
    mixture: str,
    *,
    predictor_type: str = "",
    output_type: str = "",
    embedding_type: str = "",
    pure: bool = False,
    down_by_neuron: bool = False,
) -> list[Change]:
    """What each tensor of a file becomes.

    predictor_type, output_type, embedding_type: replace the mixture's choice for fc1 and fc2, for the output
    matrix (token_embd, where that is the output as well), and for token_embd. pure: no choices, one format
    for all matrices. down_by_neuron: rows of down belong to neurons, so that those of silent ones need not be
    read. Raises ArgumentError (unknown names, no such rows, or neurons that are never silent).
    """
    name = find_mixture(mixture)
    if down_by_neuron:
        _check_can_turn(source)
    chosen = {"predictor": predictor_type, "output": output_type, "token_embd": embedding_type}
    chosen = {kind: _writable(type) for kind, type in chosen.items() if type}
    model = _first_place(source)
    is_tied = all(tensor.name != "output.weight" for tensor in source.tensors)
    changes = []
    for tensor in source.tensors:
        turns = down_by_neuron and _DOWN.search(tensor.name) is not None
        if name == "COPY" and turns:
            changes.append(_by_neuron(tensor, tensor.type))
            continue
        if name == "COPY" or not _is_matrix(tensor):
            changes.append(Change(tensor=tensor, type=tensor.type, n_bytes=tensor.n_bytes, wanted=""))
            continue
        kind = _kind(tensor.name)
        if kind == "token_embd" and is_tied and kind not in chosen:
            kind = "output"
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        place = replace(model, layer=int(layer[1])) if layer else model
        if name == "MXFP4_MOE" and not pure and not tensor.is_of_experts:
            wanted = chosen.get(kind, "Q8_0")  # as llama.cpp: the format is of experts alone
        else:
            wanted = chosen.get(kind) or _of_mixture(name, kind, tensor.shape[-1], place, pure=pure)
        changes.append(_by_neuron(tensor, wanted) if turns else _fitting(tensor, wanted))
    return changes


def _check_can_turn(source: ModelFile) -> None:
    kinds = {bool(found[1]) for tensor in source.tensors if (found := _DOWN.search(tensor.name))}
    if not kinds:
        raise ArgumentError("down cannot be stored by neuron: the model has no ffn_down")
    if False in kinds:  # of a dense layer; what experts leave out is known per expert
        with Model(source.path) as model:
            activation = model.info.activation
        if activation not in SILENT and model.info.architecture != "gemma3n":  # whose gates are cut
            raise ArgumentError(
                f"down is not stored by neuron: with the activation {activation} no neuron is ever silent"
            )


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _by_neuron(tensor: TensorInfo, wanted: str) -> Change:
    turned = replace(tensor, shape=_turned(tensor.shape))
    return replace(_fitting(turned, _writable(wanted)), tensor=tensor, by_neuron=True)


def _first_place(source: ModelFile) -> _Place:
    """What the keys of a file say of every place."""
    arch = source.metadata.get("general.architecture", "")
    n_layer = _integer(source, f"{arch}.block_count")
    n_head = _integer(source, f"{arch}.attention.head_count")
    n_gqa = n_head // (_integer(source, f"{arch}.attention.head_count_kv") or n_head or 1)
    return _Place(
        layer=0,
        n_layer=n_layer,
        n_gqa=n_gqa,
        is_falcon=arch == "falcon",
        is_70b=n_layer == 80 and (arch == "qwen2" or (arch == "llama" and n_gqa > 1)),
        is_8x=_integer(source, f"{arch}.expert_count") == 8,
    )


def _integer(source: ModelFile, key: str) -> int:
    """A key's value, or the first of several; 0 if it has none."""
    value = source.metadata.get(key, 0)
    if isinstance(value, np.ndarray) and len(value):
        value = value[0].item()
    return value if isinstance(value, int) else 0


def _writable(name: str) -> str:
    """A format's name as files list it. Raises ArgumentError for one that cannot be written."""
    known = formats.canonical(name)
    if not formats.can_quantize(known):
        raise ArgumentError(f"weights cannot be written as {known}")
    return known


def _is_matrix(tensor: TensorInfo) -> bool:
    """Whether a tensor may get another format: norms, biases and the like keep theirs."""
    n_rows = math.prod(tensor.shape[:-1])
    return n_rows > 1 and tensor.name.endswith("weight") and not any(part in tensor.name for part in _KEPT)


def _kind(name: str) -> str:
    """What rules call a matrix."""
    stem = re.sub(r"\.\d+$", "", name.removesuffix(".weight")).rpartition(".")[2]
    stem = stem.removesuffix("_exps").removesuffix(
        "_shexp"
    )  # of all experts of a layer, or the one that all use
    return _KINDS.get(stem, stem)


def _of_mixture(mixture: str, kind: str, n_columns: int, place: _Place, *, pure: bool) -> str:
    """The format that a mixture gives a matrix."""
    most = MIXTURES[mixture][1]
    if kind == "predictor":
        return _of_predictor(most, n_columns)
    if pure or most in FLOATS:
        return most
    if kind == "output":
        if place.is_falcon or most == "Q8_0" or n_columns % formats.block(most):
            return "Q8_0"
        return "Q6_K"
    if place.is_8x and kind in ("attn_k", "attn_v"):
        return "Q8_0"
    if place.is_8x and kind == "attn_output":
        return "Q5_K" if mixture in _OUTPUT_8X else most
    type = next((type for when, type in _RULES.get((mixture, kind), ()) if when(place)), most)
    # There a matrix of V serves eight query heads: a larger format costs nearly nothing.
    return "Q5_K" if place.is_70b and kind == "attn_v" and type in ("Q3_K", "Q4_K") else type


def _of_predictor(most: str, n_columns: int) -> str:
    """The format of fc1 and fc2: all of both is read for every token, yet an error only names other neurons.

    Measured on a layer of the demo model (rank 256, 11 % of the neurons active, recall 64.3 % in F32), recall
    changes by -0.01 points in Q8_0, -0.03 in Q5_K, -0.07 in Q5_0, -0.3 in Q4_K and -0.4 in Q4_0. The original
    uses Q4_0 in Q4_0 files, else Q5_0, which takes as many bits as Q5_K.
    """
    if most in FLOATS or most in ("Q8_0", "Q4_0"):
        return most
    return "Q8_0" if n_columns % formats.block("Q5_K") else "Q5_K"


def _fitting(tensor: TensorInfo, wanted: str) -> Change:
    """The wanted format, or what takes its place where rows do not divide into its blocks."""
    columns, type = tensor.shape[-1], wanted
    if columns % formats.block(type):
        type = _FALLBACK.get(type, type)
    if columns % formats.block(type):
        type = "F16"
    n_bytes = formats.row_bytes(type, columns) * math.prod(tensor.shape[:-1])
    return Change(tensor=tensor, type=type, n_bytes=n_bytes, wanted="" if type == wanted else wanted)


def check_requantize(changes: Sequence[Change]) -> None:
    """Raises ArgumentError if weights that are quantised already would be so again."""
    for change in changes:
        tensor = change.tensor
        kept = () if change.by_neuron else (change.type,)
        if tensor.type not in (*FLOATS, *kept):
            raise ArgumentError(
                f"the tensor {tensor.name} is {tensor.type} already, and quantising it again adds to its "
                "error: begin with a model in F16 or F32, or allow it (--allow-requantize)"
            )


def quantize_model(
    source: ModelFile,
    out_path: str | os.PathLike[str],
    mixture: str,
    changes: Sequence[Change],
    *,
    allow_requantize: bool = False,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> None:
    """Writes the file that `choose_types` describes; all keys are kept, but for general.file_type.

    allow_requantize: also weights that are quantised already, whose error then adds up. n_threads: 0 for the
    physical cores; the bits do not depend on it. Memory: some multiples of 8 MiB, whatever the model. Raises
    FileError, ArgumentError (weights that are quantised already, the result is the source), FormatError
    (weights that are not finite), UnsupportedError (formats that cannot be read).
    """
    name = find_mixture(mixture)
    if os.path.exists(out_path) and os.path.samefile(out_path, source.path):
        raise ArgumentError(f"{out_path} is the model that is read: the result needs a name of its own")
    if not allow_requantize:
        check_requantize(changes)
    new, dropped = {}, []
    for change in changes:
        tensor = change.tensor
        pieces = _Pieces(source, change, n_threads)
        if change.by_neuron:
            dropped.append(tensor.name)
            new[tensor.name.replace(".ffn_down", ".ffn_down_t")] = NewTensor(
                type=change.type, shape=_turned(tensor.shape), pieces=pieces
            )
        elif change.type != tensor.type:
            new[tensor.name] = NewTensor(type=change.type, shape=tensor.shape, pieces=pieces)
    keys = {"general.quantization_version": 2}
    if name != "COPY":
        keys["general.file_type"] = MIXTURES[name][0]
    rewrite(source, out_path, keys=keys, replace_tensors=new, drop_tensors=dropped, progress=progress)


@dataclass(frozen=True)
class _Pieces:
    """Makes the bytes of a tensor in its new format, some rows at a time."""

    source: ModelFile
    change: Change
    n_threads: int

    def __call__(self) -> Iterator[npt.NDArray[np.uint8]]:
        tensor, type = self.change.tensor, self.change.type
        step = rows_per_piece(math.prod(tensor.shape[1:]))
        if self.change.by_neuron and len(tensor.shape) == 2:
            yield from self._of_a_matrix_by_neuron(step)
            return
        for first in range(0, tensor.shape[0], step):
            weights = self._read(first, min(step, tensor.shape[0] - first))
            if self.change.by_neuron:
                weights = np.ascontiguousarray(weights.swapaxes(1, 2))
            yield formats.quantize(weights, type, n_threads=self.n_threads)

    def _of_a_matrix_by_neuron(self, step: int) -> Iterator[npt.NDArray[np.uint8]]:
        """A neuron's row has a weight of every row that is read, so all of the matrix is held."""
        n_embd, n_ff = self.change.tensor.shape
        turned = np.empty((n_ff, n_embd), np.float32)
        for first in range(0, n_embd, step):
            n = min(step, n_embd - first)
            turned[:, first : first + n] = self._read(first, n).T
        for first in range(0, n_ff, step):
            yield formats.quantize(turned[first : first + step], self.change.type, n_threads=self.n_threads)

    def _read(self, first: int, n_rows: int) -> npt.NDArray[np.float32]:
        name, type = self.change.tensor.name, self.change.type
        weights = self.source.dequantize(name, first=first, n_rows=n_rows)
        limit = _LARGEST.get(type, _LARGEST_HALF)
        # A NaN makes either of them NaN, and the comparison false.
        if not -limit <= float(weights.min()) <= float(weights.max()) <= limit:
            raise FormatError(
                f"the tensor {name} has weights that {type} cannot hold: not finite, or beyond +-{limit:g}"
            )
        return weights
