"""Weight formats by name: sizes, and turning floats into them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ArgumentTypeError
from . import _native


def number(name: str) -> int:
    """ggml's number of a format: 12 for "Q4_K". Raises ArgumentError for an unknown name."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"{name!r} is no name of a weight format")
    value = int(_native.lib.pi_type_find(name.encode("utf-8", "replace")))
    if value < 0:
        raise ArgumentError(f"{name!r} is not a weight format")
    return value


def canonical(name: str) -> str:
    """A format's name as files list it, for a name in any case. Raises ArgumentError for an unknown one."""
    text: bytes = _native.ffi.string(_native.lib.pi_type_name(number(name)))
    return text.decode()


def block(name: str) -> int:
    """Weights per block: 256 for "Q4_K", 1 for floats."""
    return int(_native.lib.pi_type_block(number(name)))


def row_bytes(name: str, n: int) -> int:
    """Bytes of n weights. Raises ArgumentError if n is no multiple of the block."""
    if n % block(name):
        raise ArgumentError(f"rows of {n} weights do not divide into the blocks of {block(name)} of {name}")
    return int(_native.lib.pi_type_bytes(number(name), n))


def can_quantize(name: str) -> bool:
    """Whether `quantize` can write this format."""
    return bool(_native.lib.pi_type_can_quantize(number(name)))


def quantize(weights: npt.ArrayLike, name: str, *, n_threads: int = 0) -> npt.NDArray[np.uint8]:
    """Weights [..., columns] as rows of a format: bytes [..., row_bytes(columns)].

    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, F16 and BF16 have the bits of ggml's reference; Q2_K to Q6_K and
    IQ4_NL search for the least error. n_threads: 0 for the physical cores; the bits do not depend on it.
    What comes of infinities and NaNs is not defined. Raises ArgumentError (columns that do not divide into
    blocks), UnsupportedError (a format that cannot be written).
    """
    source = np.ascontiguousarray(weights, np.float32)
    n_columns = source.shape[-1]
    out = np.empty((*source.shape[:-1], row_bytes(name, n_columns)), np.uint8)
    if out.size:
        _native.check(
            _native.lib.pi_quantize(
                number(name),
                _native.ffi.from_buffer("float[]", source),
                source.size // n_columns,
                n_columns,
                _native.ffi.from_buffer(out, require_writable=True),
                _native.fit("n_threads", n_threads),
            )
        )
    return out
