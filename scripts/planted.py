"""What random models of published shapes have in common: constants, random numbers, keys, formats."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from powerinfer._engine.file import ModelFile, TensorInfo
from powerinfer._engine.machine import cores
from powerinfer.models.quantize import choose_types

Array = NDArray[np.float32]

CONSTANT = 4.0  # what channel 0 of the residual holds; the other channels are near 1
END = 2  # id of the end token
BLOCK = 32  # weights that share a step: a block of the four-bit formats


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `matrix` names what it is made of, "" for a vector of equal numbers."""

    name: str
    shape: tuple[int, ...]
    matrix: str = ""
    value: float = 0.0


def normals(seed: np.random.SeedSequence, rows: int, cols: int, scale: float) -> Array:
    """Independent normal numbers, in parallel; the same ones whatever the number of threads."""
    out = np.empty((rows, cols), np.float32)
    parts = np.array_split(out, max(1, out.size >> 22))

    def fill(job: tuple[Array, np.random.SeedSequence]) -> None:
        part, own = job
        np.random.Generator(np.random.SFC64(own)).standard_normal(out=part, dtype=np.float32)
        part *= np.float32(scale)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(fill, zip(parts, seed.spawn(len(parts)), strict=True)))
    return out


def firing(rng: np.random.Generator, n: int, active: float) -> Array:
    """Shares of tokens for which n neurons fire: a power law (exponent 1.3) of mean `active`, shuffled."""
    f = (np.arange(n) + n / 50) ** -1.3
    for _ in range(50):
        f = np.minimum(0.98, f * (active / f.mean()))
    return rng.permutation(np.maximum(f, 1e-6)).astype(np.float32)


def thresholds(shares: Array) -> Array:
    """Per neuron t with P(N(0,1) > t) = its share."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse(1 - float(p)) for p in shares], np.float32)


def file_keys(arch: str, name: str, file_type: int, n_vocab: int, of_arch: dict[str, Any]) -> dict[str, Any]:
    """The keys of a file; those of the architecture are given without its name in front."""
    out: dict[str, Any] = {"general.architecture": arch, "general.name": f"random {name}"}
    out |= {"general.quantization_version": 2, "general.file_type": file_type}
    return out | {f"{arch}.{key}": value for key, value in of_arch.items()} | tokenizer_keys(n_vocab)


def tokenizer_keys(n_vocab: int) -> dict[str, Any]:
    """A vocabulary of so many pieces, bytes among them."""
    names = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{i:02X}>".encode() for i in range(256)]
    names += [f"\u2581w{i}".encode() for i in range(n_vocab - len(names))]
    types = [2, 3, 3] + [6] * 256 + [1] * n_vocab
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": names[:n_vocab],
        "tokenizer.ggml.scores": -np.arange(n_vocab, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types[:n_vocab], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": END,
    }


def types_of(
    all_tensors: Sequence[Tensor], keys: dict[str, Any], mixture: str, predictor_type: str, pure: bool
) -> dict[str, str]:
    """The format of every tensor, as `powerinfer quantize` would choose it."""
    meta = {key: value[1] if isinstance(value, tuple) else value for key, value in keys.items()}
    infos = [
        TensorInfo(name=t.name, type="F32", shape=t.shape, n_bytes=4 * int(np.prod(t.shape)))
        for t in all_tensors
    ]
    # Formats are chosen by keys, names and shapes alone: there need not be a file yet.
    stand_in = cast(ModelFile, SimpleNamespace(tensors=infos, metadata=meta, path="the model"))
    changes = choose_types(stand_in, mixture, predictor_type=predictor_type, pure=pure)
    return {change.tensor.name: change.type for change in changes}
