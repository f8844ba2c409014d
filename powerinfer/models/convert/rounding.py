"""What is left of weights after a format has rounded them: written by the engine, read back by the few lines
here, which are the formats' definitions (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..._engine import formats

Array = npt.NDArray[np.float32]

BLOCK = 32  # weights of Q8_0 and Q4_0 that share a scale


def rounded(weights: Array, type: str, *, transposed: bool = False) -> Array:
    """Float32 weights [rows, columns] as a file gives them back.

    transposed: the file's rows are these columns; the rows here are then whole blocks, or all there are.
    """
    if transposed:
        return np.ascontiguousarray(rounded(np.ascontiguousarray(weights.T), type).T)
    if weights.shape[1] % formats.block(type):
        type = "F16"
    if type == "F32":
        return weights
    return _decode(formats.quantize(weights, type), type).reshape(weights.shape)


def _decode(data: npt.NDArray[np.uint8], type: str) -> Array:
    if type == "F16":
        return data.view("<f2").astype(np.float32)
    if type == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    blocks = data.reshape(-1, formats.row_bytes(type, BLOCK))
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    if type == "Q8_0":
        return scale * blocks[:, 2:].view(np.int8)
    assert type == "Q4_0"
    quarter = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return scale * (quarter.astype(np.float32) - 8)
