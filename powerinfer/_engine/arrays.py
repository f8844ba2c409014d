"""Arrays of token ids and logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


def as_int32(
    name: str, values: Sequence[int] | npt.NDArray[np.int32], n: int | None = None
) -> npt.NDArray[np.int32]:
    """The values as contiguous int32. Raises ArgumentError for values that do not fit, or not n of them."""
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        raise ArgumentError(f"{name} must be a sequence of integers, not of lists") from None
    if n is None and array.dtype == np.int32 and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError(
            f"{name} must be a sequence of integers, not {array.dtype} of shape {array.shape}"
        )
    if n is not None and array.size != n:
        raise ArgumentError(f"{name} has {array.size} entries for {n} tokens")
    if array.dtype != np.int32:
        limits = np.iinfo(np.int32)
        if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
            raise ArgumentError(f"{name} holds a number that is no 32-bit integer")
    return np.ascontiguousarray(array, np.int32)


def common_prefix(a: Ids, b: Ids) -> int:
    """How many ids at the beginning are the same."""
    n = min(a.size, b.size)
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n
