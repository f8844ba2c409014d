"""A predictor from the weights alone: the gate's product with the residual, by its largest singular values.

    score = U S V x,  [rank, n_embd] and [n_ff, rank] after a truncated singular value decomposition

Dividing by the norm's root mean square changes no sign, and its weight goes into the gate's columns, so at
full rank the score of a gated Llama has exactly the sign of its gate. A file's predictor has a ReLU in
between; relu(a) - relu(-a) = a takes it out again, at the price of two hidden units for each singular value:

    fc1 = [V; -V]        fc2 = [U S, -U S]

With sample inputs the approximation is best where inputs lie: the decomposition is that of G C^(1/2), C being
the mean of x x^T / rms(x)^2. They serve for another thing: where a bias or a shifted ReLU moves the point at
which a neuron fires, G x + bias * scale(x) > 0 is what is asked, and scale(x), the norm of x, has the
predictor's own property that it doubles when x does. So it is fitted as a sum of a_i |v_i x|, and |a| being
relu(a) + relu(-a), fc2 = [U S + bias a, -U S + bias a] adds it without any further unit.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .ffn import First
from .train import Net

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

_LEAST = 1e-6  # of the largest eigenvalue of C; smaller ones are no directions that inputs have
_FIT_ROWS = 4096


class Inputs:
    """What sample inputs of one layer say: C, and some of the inputs themselves."""

    def __init__(self, blocks: Iterable[Floats]) -> None:
        """blocks: inputs [n, n_embd], as often as there are some."""
        total: Doubles | None = None
        self.n = 0
        kept = []
        for x in blocks:
            unit = x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + np.finfo(np.float32).tiny)
            total = unit.T @ unit + (0.0 if total is None else total)
            if self.n < _FIT_ROWS:
                kept.append(x)
            self.n += len(x)
        if total is None:
            raise ValueError("no inputs")
        self.covariance = np.asarray(total, np.float64) / self.n
        self.samples = np.concatenate(kept)
        self.scale = float(np.median(np.sqrt(np.mean(np.square(self.samples), axis=1))))
        """Typical root mean square."""


def decompose(first: First, rank: int, inputs: Inputs | None = None) -> Net:
    """A predictor with `rank` hidden units (an even number), for rank / 2 singular values.

    Without inputs a bias is left to the threshold.
    """
    if rank < 2 or rank % 2:
        raise ValueError(f"rank {rank} is not an even number")
    gate = first.rows.astype(np.float64)
    root, inverse = _roots(inputs)
    seen = gate if root is None else gate @ root
    # Its right singular vectors; U S is what they are projected to, so nothing depends on how exact small
    # singular values are.
    v = np.linalg.eigh(seen.T @ seen)[1][:, ::-1].T[: rank // 2]
    n = len(v)
    left = seen @ v.T
    if inputs is not None:  # scores are alike in all layers
        left /= max(inputs.scale, np.finfo(np.float32).tiny)
    v = v if inverse is None else v @ inverse
    shift = np.zeros_like(left)
    if inputs is not None and first.bias.any():
        fit = _fit_scale(first, v, inputs.samples)
        shift = np.outer(first.bias, fit / max(inputs.scale, np.finfo(np.float32).tiny))
    fc1 = np.zeros((rank, gate.shape[1]), np.float32)
    fc2 = np.zeros((len(gate), rank), np.float32)
    # A weight may be lost in rounding: sizes near 1 keep float16 away from its ends.
    size = np.linalg.norm(v, axis=1, keepdims=True)
    half = rank // 2
    fc1[:n], fc1[half : half + n] = v / size, -v / size
    fc2[:, :n], fc2[:, half : half + n] = (left + shift) * size.T, (shift - left) * size.T
    return Net(fc1=fc1, fc2=fc2)


def _roots(inputs: Inputs | None) -> tuple[Doubles | None, Doubles | None]:
    """C^(1/2) and its inverse."""
    if inputs is None:
        return None, None
    values, vectors = np.linalg.eigh(inputs.covariance)
    values = np.sqrt(np.maximum(values, max(_LEAST * values[-1], np.finfo(np.float64).tiny)))
    return (vectors * values) @ vectors.T, (vectors / values) @ vectors.T


def _fit_scale(first: First, v: Doubles, x: Floats) -> Doubles:
    """a [n] with sum_i a_i |v_i x| near the norm of x, by least squares of the relative error."""
    scale = first.scale(x).astype(np.float64)
    used = scale > 0
    if not used.any():
        return np.zeros(len(v))
    parts = np.abs(x[used] @ v.T) / scale[used, None]
    # A little pull towards small numbers, for directions that hardly occur.
    n = parts.shape[1]
    ridge = 1e-6 * np.trace(parts.T @ parts) / n
    fit = np.linalg.solve(parts.T @ parts + ridge * np.eye(n), parts.sum(axis=0))
    return np.asarray(fit, np.float64)
