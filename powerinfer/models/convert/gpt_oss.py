"""The experts of gpt-oss in its checkpoints: all of a layer in one tensor, rows of gate and up in turn, in
MXFP4 or as floats.

MXFP4 has four bits for a weight (e2m1) and one scale for 32 of them, 2^(s - 127) (OCP Microscaling Formats).
Checkpoints have blocks [n, rows, blocks, 16] of two neighbours in a byte, and scales [n, rows, blocks]; files
have 17 bytes for a block, the scale first, and in byte j the weights j and j + 16. No weight changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import FormatError
from .checkpoint import Checkpoint
from .hyper import Experts, Hyper
from .stored import Stack, StoredTensor

Bytes = npt.NDArray[np.uint8]
BLOCK = 32

# Values of the sixteen codes.
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix of each expert, in MXFP4."""

    name: str
    blocks: Bytes
    """[n, rows, blocks, 16]"""
    scales: Bytes
    """[n, rows, blocks]"""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.scales.shape[:-1], self.scales.shape[-1] * BLOCK)

    def codes(self, e: int) -> Bytes:
        """Of one expert, [rows, blocks, 32]."""
        pairs = np.ascontiguousarray(self.blocks[e])
        return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], BLOCK)

    def raw(self) -> Iterator[Bytes]:
        """The bytes of a file, one expert after the other."""
        for e in range(len(self.blocks)):
            codes = self.codes(e)
            out = np.empty((*codes.shape[:-1], 1 + BLOCK // 2), np.uint8)
            out[..., 0] = self.scales[e]
            out[..., 1:] = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
            yield out.reshape(len(out), -1)

    def floats(self, e: int) -> npt.NDArray[np.float32]:
        """The weights of one expert, [rows, cols]."""
        scale = np.ldexp(np.float32(1), self.scales[e].astype(np.int32) - 127)
        values = CODES[self.codes(e)] * scale[..., None]
        return np.asarray(values.reshape(len(values), -1), np.float32)


Take = Callable[[str, tuple[int, ...]], StoredTensor]


def take_packed(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], used: set[str]) -> Packed:
    """A matrix of all experts, [n, rows, cols]. Raises FormatError."""
    n, rows, cols = shape
    parts, of_scales = [], (n, rows, cols // BLOCK)
    for suffix, expected in (("_blocks", (*of_scales, 16)), ("_scales", of_scales)):
        tensor = checkpoint.tensors.get(name + suffix)
        if tensor is None or tensor.shape != expected or tensor.dtype != "U8" or cols % BLOCK:
            found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise FormatError(
                f"{checkpoint.folder}: tensor {name}{suffix} must be U8 {list(expected)}, but is {found}"
            )
        used.add(name + suffix)
        parts.append(tensor.view)
    return Packed(name, *parts)


def expert_tensors(
    checkpoint: Checkpoint, h: Hyper, experts: Experts, layer: int, take: Take, used: set[str]
) -> Iterator[tuple[str, StoredTensor | Stack | Packed]]:
    """Names in a file and tensors of one layer's experts."""
    source, own = f"model.layers.{layer}.mlp.experts.", f"blk.{layer}."
    n, n_ff, d = experts.n, experts.n_ff, h.n_embd
    bias = take(source + "gate_up_proj_bias", (n, 2 * n_ff))
    down_bias = take(source + "down_proj_bias", (n, d))
    if source + "gate_up_proj_blocks" in checkpoint:
        both = take_packed(checkpoint, source + "gate_up_proj", (n, 2 * n_ff, d), used)
        for i, name in enumerate(("gate", "up")):
            part = Packed(f"{own}ffn_{name}_exps.weight", both.blocks[:, i::2], both.scales[:, i::2])
            yield part.name, part
        name = f"{own}ffn_down_exps.weight"
        down = take_packed(checkpoint, source + "down_proj", (n, d, n_ff), used)
        yield name, Packed(name, down.blocks, down.scales)
    else:  # transposed
        wide = take(source + "gate_up_proj", (n, d, 2 * n_ff))
        for i, name in enumerate(("gate", "up")):
            turned = _turned(wide, f"{own}ffn_{name}_exps.weight", slice(i, None, 2))
            yield turned.name, turned
        name = f"{own}ffn_down_exps.weight"
        yield name, _turned(take(source + "down_proj", (n, n_ff, d)), name, slice(None))
    for i, name in enumerate(("gate", "up")):
        yield f"{own}ffn_{name}_exps.bias", StoredTensor(bias.name, bias.dtype, bias.view[:, i::2])
    yield f"{own}ffn_down_exps.bias", down_bias


def _turned(tensor: StoredTensor, name: str, columns: slice) -> Stack:
    """Some columns of each expert's matrix [cols, rows] as its rows."""
    return Stack(
        name,
        tuple(
            StoredTensor(f"{tensor.name}[{e}]", tensor.dtype, tensor.view[e][:, columns].T)
            for e in range(len(tensor.view))
        ),
    )
