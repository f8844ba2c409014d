"""Thresholds of each layer, chosen so that a share of the activation mass is kept.

    curves = measure(model, windows)                    # the engine's own scores, of any predictor
    thresholds = [curve.threshold(0.99) for curve in curves]

Every layer keeps the same share of its own mass. Sharing losses out between layers, so that one more neuron
is worth the same in each, was measured on the demo model with two predictors and three ways to weigh layers:
at equal perplexity it reads as many rows, and low targets become less safe.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._engine.session import Model, Progress, Session
from ...errors import ArgumentError
from .curve import Curve
from .data import Windows, batch_for, run
from .ffn import down_norms

TARGET = 0.99

THRESHOLD_KEY = "powerinfer.sparse_threshold"
THRESHOLDS_KEY = "powerinfer.sparse_thresholds"
PREDICTOR_KEY = "powerinfer.predictor"
ACTIVATION_KEY = "powerinfer.hidden_act"


def check_target(target: float) -> None:
    """Raises ArgumentError for a share that cannot be asked for."""
    if not 0 < target < 1:
        raise ArgumentError(f"the target is {target:g}, it must be a share between 0 and 1, such as {TARGET}")


def measure(
    model: Model, windows: Windows, *, n_threads: int = 0, progress: Progress | None = None
) -> list[Curve]:
    """One curve of each layer: the scores that the engine computes, with all neurons computed.

    Raises ArgumentError for a model without a predictor, FormatError if its values are not finite.
    """
    info = model.info
    norms = [down_norms(model.file, info, i) for i in range(info.n_layer)]
    curves = [Curve() for _ in norms]
    n_batch = batch_for(windows, 2 * info.n_ff * info.n_layer)
    with (
        Session(
            model, n_ctx=windows.n_ctx, n_batch=n_batch, n_threads=n_threads, sparsity="exact"
        ) as session,
        session.tap(hidden=True, score=True) as tap,
    ):
        for taken, step in run(session, tap, windows, progress=progress):
            for i, (curve, norm) in enumerate(zip(curves, norms, strict=True)):
                curve.add(taken.score[i][step.skip :], np.abs(taken.hidden[i][step.skip :]) * norm)
    return curves


def keys(predictor: str, thresholds: list[float], activation: str) -> dict[str, Any]:
    """What a file says of its predictor, as `rewrite.rewrite` takes it. A reader that knows one threshold for
    all layers gets the lowest, which loses nothing."""
    return {
        THRESHOLD_KEY: ("f32", min(thresholds)),
        THRESHOLDS_KEY: np.asarray(thresholds, np.float32),
        PREDICTOR_KEY: predictor,
        ACTIVATION_KEY: activation,
    }
