"""A tensor in a checkpoint's file: seen through a mapping, read when and as far as it is asked for."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ArgumentError

Array = npt.NDArray[Any]

# By the names of safetensors. BF16 has no numpy type: its bits are kept as they are.
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U8": "|u1",
    "BOOL": "|b1",
}
FLOATS = ("F64", "F32", "F16", "BF16")

_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    """One of DTYPES."""
    view: Array
    """Onto the file, in the tensor's shape; of BF16 the bits, as u2."""
    rows: Array | None = None
    """Which rows of the view are the tensor's, in which order; None: all, as they are."""
    columns: Array | None = None
    """The same of columns."""
    scale: float | Array = 1.0
    """What weights are multiplied by: a number, or one for each row of the tensor."""
    is_ternary: bool = False
    """Weights become -1, 0 or 1 times the mean size of all, as BitNet computes with them."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape if self.rows is None else (len(self.rows), *self.view.shape[1:])

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def read(self, first: int = 0, n_rows: int | None = None) -> Array:
        """A copy, whole or n_rows of the first dimension from row `first` on; BF16 becomes float32.

        Raises ArgumentError for rows that the tensor does not have.
        """
        part = self.view
        if part.ndim:
            total = self.shape[0]
            count = total - first if n_rows is None else n_rows
            if not 0 <= first <= first + count <= total:
                raise ArgumentError(
                    f"the tensor {self.name} has {total} rows, not {first}..{first + count - 1}"
                )
            part = (
                part[first : first + count] if self.rows is None else part[self.rows[first : first + count]]
            )
        if self.columns is not None:
            part = part[..., self.columns]
        if self.dtype == "BF16":
            wide = part.astype(np.uint32)
            wide <<= 16
            return wide.view(np.float32)
        return part.astype(part.dtype.newbyteorder("="), copy=True, order="C")

    def floats(self, first: int = 0, n_rows: int | None = None) -> npt.NDArray[np.float32]:
        """`read` as float32, scaled; what does not fit becomes infinite."""
        with np.errstate(over="ignore"):
            out = self.read(first, n_rows).astype(np.float32, copy=False)
        if self.is_ternary:
            mean = np.float32(self._mean_size)
            out = np.clip(np.rint(out / mean), -1, 1) * mean
        if isinstance(self.scale, np.ndarray):
            of_rows = self.scale[first : first + len(out)].astype(np.float32)
            return np.asarray(out * of_rows.reshape(-1, *[1] * (out.ndim - 1)), np.float32)
        return out if self.scale == 1 else np.asarray(out * np.float32(self.scale))

    @functools.cached_property
    def _mean_size(self) -> float:
        """Of all weights; at least 1e-5."""
        sizes = [
            np.abs(replace(self, is_ternary=False, scale=1.0).floats(i, min(1024, self.shape[0] - i))).sum(
                dtype=np.float64
            )
            for i in range(0, self.shape[0], 1024)
        ]
        return max(float(sum(sizes)) / math.prod(self.shape), 1e-5)

    def chunks(self) -> Iterator[npt.NDArray[np.float32]]:
        """`floats` of all rows, so many at a time that a chunk has a moderate size."""
        step = self.rows_per_chunk()
        for first in range(0, self.shape[0], step):
            yield self.floats(first, min(step, self.shape[0] - first))

    def rows_per_chunk(self) -> int:
        """Rows of which the float32 copy has a moderate size; a multiple of 32."""
        row = int(np.prod(self.shape[1:], dtype=np.int64)) * 4
        return max(32, _CHUNK_BYTES // max(row, 1) // 32 * 32)


@dataclass(frozen=True, eq=False)
class Stack:
    """Tensors of one shape as one, [n, ...]: the matrices of a layer's experts."""

    name: str
    parts: tuple[StoredTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    def chunks(self) -> Iterator[npt.NDArray[np.float32]]:
        """As of a StoredTensor: rows of the parts."""
        for part in self.parts:
            yield from part.chunks()


def is_shape(sizes: Sequence[int]) -> bool:
    """Whether an array can have this shape; also if it is empty, numpy multiplies all other sizes."""
    return len(sizes) <= 8 and math.prod(max(n, 1) for n in sizes) < 1 << 56
