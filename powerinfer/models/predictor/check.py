"""What a predictor does to a model: layer by layer, and to its answers.

    check = check_predictor(model, corpus)
    check.layers[3].point.recall

Three runs give the figures. In exact mode a tap takes scores and hidden values, so it is known which neurons
were active and what each contributed. In predicted mode, every token computed with the predictor's neurons,
the engine's own counters say how many it computed; a tap counts the same pairs again, and both must agree to
the last one. And tokens computed one at a time, as in generation, say how many weight rows and bytes are
read, beside dense mode. Perplexity in both modes says what it costs (`powerinfer.models.perplexity`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..._engine.session import LayerStep, Model, Session, Sparsity
from ...errors import ArgumentError
from ..corpus import Corpus
from ..perplexity import Perplexity, compare
from .build import Stage
from .curve import Curve, Point, make_point
from .data import Windows, batch_for, choose_windows, run
from .ffn import down_norms

TARGETS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
N_TOKENS = 8192
N_SINGLE = 256
N_SINGLE_WINDOWS = 8
N_CHUNKS = 32


@dataclass(frozen=True, kw_only=True)
class Single:
    """What single tokens read in one layer's feed-forward, per token."""

    rows: float
    bytes: float
    """The predictor's included."""


@dataclass(frozen=True, kw_only=True)
class LayerCheck:
    """One layer. The point is that of the exact run; `computed` and `active` those of the predicted run."""

    layer: int
    rank: int
    """Hidden units of the predictor; 0: it is made of signs."""
    predictor_bytes: int
    point: Point
    computed: float
    """Share of the (token, neuron) pairs that the engine predicted, by its counters."""
    active: float
    """Share of the pairs that were predicted and active, by its counters."""
    predicted_mode: Single
    exact_mode: Single
    dense_mode: Single

    @property
    def rows(self) -> float:
        """Weight rows read in predicted mode over those of dense mode."""
        return self.predicted_mode.rows / self.dense_mode.rows

    @property
    def bytes(self) -> float:
        """Bytes read in predicted mode over those of dense mode."""
        return self.predicted_mode.bytes / self.dense_mode.bytes


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One point of the trade-off: thresholds that keep a share of each layer's activation mass."""

    target: float
    thresholds: tuple[float, ...]
    computed: float
    """Means over the layers, as in Point."""
    recall: float
    precision: float
    mass: float
    perplexity: Perplexity | None = None
    """In predicted mode with these thresholds, beside exact mode."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Check:
    """Everything."""

    predictor: str
    """"mlp" or "sign"."""
    n_tokens: int
    n_single: int
    """Tokens that were computed one at a time."""
    layers: tuple[LayerCheck, ...]
    curves: tuple[Curve, ...]
    trade_off: tuple[Setting, ...]
    exact: Perplexity
    predicted: Perplexity
    n_counted: int
    """(token, neuron) pairs that the engine's counters and a tap counted as predicted ..."""
    n_disagreed: int
    """... and in how many layers and feeds the two differed: 0."""

    def mean(self, of: Callable[[LayerCheck], float]) -> float:
        return float(np.mean([of(layer) for layer in self.layers]))

    @property
    def rows(self) -> float:
        """Weight rows of all layers read in predicted mode over those of dense mode."""
        return sum(c.predicted_mode.rows for c in self.layers) / sum(c.dense_mode.rows for c in self.layers)

    @property
    def bytes(self) -> float:
        """The same of bytes, those of the predictors included."""
        return sum(c.predicted_mode.bytes for c in self.layers) / sum(c.dense_mode.bytes for c in self.layers)


def predictor_sizes(model: Model) -> list[tuple[int, int]]:
    """Rank and bytes of each layer's predictor; rank 0 for signs, one bit for each weight of the gate."""
    info = model.info
    if info.predictor == "sign":
        return [(0, info.n_sign_bytes // info.n_layer)] * info.n_layer
    tensors = {tensor.name: tensor for tensor in model.file.tensors}
    out = []
    for i in range(info.n_layer):
        fc1, fc2 = tensors[f"blk.{i}.fc1.weight"], tensors[f"blk.{i}.fc2.weight"]
        out.append((fc1.shape[0], fc1.n_bytes + fc2.n_bytes))
    return out


def check_predictor(
    model: Model,
    corpus: Corpus,
    *,
    n_ctx: int,
    n_tokens: int = N_TOKENS,
    n_single: int = N_SINGLE,
    n_chunks: int = N_CHUNKS,
    targets: Sequence[float] = TARGETS,
    sweep: bool = False,
    thresholds: Sequence[float] | None = None,
    n_threads: int = 0,
    stage: Stage,
) -> Check:
    """Measures the model's predictor on a text, which it should not have been made with.

    n_tokens: of the exact and the predicted run. n_single: computed one at a time. n_chunks: of perplexity;
    0: the whole text. sweep: perplexity for each target. thresholds: instead of the file's.

    Raises ArgumentError (no predictor, a text that is too short), FormatError.
    """
    info = model.info
    if info.predictor == "none":
        raise ArgumentError(
            "the model has no predictor: make one with `powerinfer predictor train`, `svd` or `sign`, or "
            "name one that needs no file: --predictor sign"
        )
    limits = list(model.thresholds if thresholds is None else thresholds)
    windows = choose_windows(corpus, n_ctx=n_ctx, n_train=0, n_held_out=n_tokens)
    with stage("exact mode") as progress:
        curves, points = _exact_run(model, windows, limits, n_threads, progress)
    with stage("predicted mode") as progress:
        counted = _predicted_run(model, windows, limits, n_threads, progress)
    with stage("single tokens") as progress:
        n_single, singles = _single_tokens(model, windows, limits, n_single, n_threads, progress)
    trade_off = [_setting(curves, target) for target in targets]
    tries = [limits] + ([list(setting.thresholds) for setting in trade_off] if sweep else [])
    with stage("perplexity") as progress, ExitStack() as stack:
        sessions = []
        for i in range(1 + len(tries)):
            mode: Sparsity = "predicted" if i else "exact"
            session = _open(model, n_ctx, min(512, n_ctx), mode, n_threads)
            sessions.append(stack.enter_context(session))
            if i:
                session.set_thresholds(tries[i - 1])
        results = compare(
            sessions, corpus.with_bos, n_ctx=n_ctx, bos=corpus.bos, n_chunks=n_chunks, progress=progress
        )
    if sweep:
        trade_off = [
            replace(setting, perplexity=result)
            for setting, result in zip(trade_off, results[2:], strict=True)
        ]
    sizes = predictor_sizes(model)
    layers = tuple(
        LayerCheck(
            layer=i,
            rank=sizes[i][0],
            predictor_bytes=sizes[i][1],
            point=points[i],
            computed=counted.predicted[i] / counted.n_pairs,
            active=counted.active[i] / counted.n_pairs,
            predicted_mode=singles["predicted"][i],
            exact_mode=singles["exact"][i],
            dense_mode=singles["dense"][i],
        )
        for i in range(info.n_layer)
    )
    return Check(
        predictor=info.predictor,
        n_tokens=windows.n_tokens,
        n_single=n_single,
        layers=layers,
        curves=tuple(curves),
        trade_off=tuple(trade_off),
        exact=results[0],
        predicted=results[1],
        n_counted=int(counted.predicted.sum()),
        n_disagreed=int(counted.n_disagreed),
    )


def _open(
    model: Model, n_ctx: int, n_batch: int, mode: Sparsity, n_threads: int, *, mask: bool = True
) -> Session:
    return Session(model, n_ctx=n_ctx, n_batch=n_batch, n_threads=n_threads, sparsity=mode, mask_prompts=mask)


def _exact_run(
    model: Model, windows: Windows, limits: list[float], n_threads: int, progress: Callable[[int, int], None]
) -> tuple[list[Curve], list[Point]]:
    """Curves, and what the thresholds do, from scores and hidden values of all neurons."""
    info = model.info
    norms = [down_norms(model.file, info, i) for i in range(info.n_layer)]
    curves = [Curve() for _ in norms]
    computed, active, hits = (np.zeros(info.n_layer, np.int64) for _ in range(3))
    total, kept = np.zeros(info.n_layer), np.zeros(info.n_layer)
    n_batch = batch_for(windows, 2 * info.n_ff * info.n_layer)
    with (
        _open(model, windows.n_ctx, n_batch, "exact", n_threads) as session,
        session.tap(hidden=True, score=True) as tap,
    ):
        for taken, step in run(session, tap, windows, progress=progress):
            for i in range(info.n_layer):
                score, hidden = taken.score[i][step.skip :], taken.hidden[i][step.skip :]
                mass = np.abs(hidden) * norms[i]
                predicted = score >= np.float32(limits[i])
                computed[i] += np.count_nonzero(predicted)
                active[i] += np.count_nonzero(mass)
                hits[i] += np.count_nonzero(predicted & (mass > 0))
                total[i] += mass.sum(dtype=np.float64)
                kept[i] += mass.sum(dtype=np.float64, where=predicted)
                curves[i].add(score, mass)
    n = windows.n_tokens * info.n_ff
    points = [
        make_point(limits[i], n, int(computed[i]), int(active[i]), int(hits[i]), total[i], kept[i])
        for i in range(info.n_layer)
    ]
    return curves, points


@dataclass(frozen=True)
class _Counted:
    n_pairs: int  # of each layer
    predicted: npt.NDArray[np.int64]  # of each layer
    active: npt.NDArray[np.int64]
    n_disagreed: int


def _predicted_run(
    model: Model, windows: Windows, limits: list[float], n_threads: int, progress: Callable[[int, int], None]
) -> _Counted:
    """What the engine's counters say of predicted mode, compared with a tap's count of the same."""
    info = model.info
    predicted, active = (np.zeros(info.n_layer, np.int64) for _ in range(2))
    n_tokens = n_disagreed = 0
    n_batch = batch_for(windows, 2 * info.n_ff * info.n_layer)
    with (
        _open(model, windows.n_ctx, n_batch, "predicted", n_threads) as session,
        session.tap(hidden=True, score=True) as tap,
    ):
        session.set_thresholds(limits)
        for taken, _ in run(session, tap, windows, progress=progress):
            steps = session.last_step
            n_tokens += steps[0].n_sparse
            for i, step in enumerate(steps):
                predicted[i] += step.n_predicted
                active[i] += step.n_active
                marked = np.count_nonzero(taken.score[i] >= np.float32(limits[i]))
                fired = np.count_nonzero(taken.hidden[i])
                n_disagreed += int(marked != step.n_predicted or fired != step.n_active)
    return _Counted(n_tokens * info.n_ff, predicted, active, n_disagreed)


def _single_tokens(
    model: Model,
    windows: Windows,
    limits: list[float],
    n_single: int,
    n_threads: int,
    progress: Callable[[int, int], None],
) -> tuple[int, dict[str, list[Single]]]:
    """Rows and bytes per token of each layer, by mode, for tokens that come one at a time after a prompt; and
    how many such tokens the text has, up to n_single."""
    info = model.info
    if n_single < 1:
        raise ArgumentError(f"{n_single} single tokens cannot be measured: at least 1 is needed")
    out: dict[str, list[Single]] = {}
    modes: tuple[Sparsity, ...] = ("predicted", "exact", "dense")
    each = min(len(window) - len(window) // 2 for window in windows.tokens)
    n_single = min(n_single, each * len(windows.tokens))
    # From several parts of the text: tokens that follow one another are much alike.
    n_windows = min(max(N_SINGLE_WINDOWS, -(-n_single // each)), len(windows.tokens))
    chosen = [windows.tokens[i * len(windows.tokens) // n_windows] for i in range(n_windows)]
    done = 0
    for mode in modes:
        rows, sizes = np.zeros(info.n_layer), np.zeros(info.n_layer)
        n = 0
        with _open(model, windows.n_ctx, min(512, windows.n_ctx), mode, n_threads, mask=False) as session:
            if mode == "predicted":
                session.set_thresholds(limits)
            # Dense mode reads all rows for any token.
            wanted = n_single if mode != "dense" else 1
            for i, window in enumerate(chosen):
                if n >= wanted:
                    break
                session.drop()
                half = len(window) // 2
                session.feed(window[:half], want_logits=False)
                share = -(-(wanted - n) // (n_windows - i))
                for token in window[half : half + share]:
                    session.feed([int(token)])
                    _add(session.last_step, rows, sizes)
                    n += 1
                    done += 1
                    progress(done, 2 * n_single + 1)
        out[mode] = [Single(rows=rows[i] / n, bytes=sizes[i] / n) for i in range(info.n_layer)]
    return n_single, out


def _add(steps: list[LayerStep], rows: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64]) -> None:
    for i, step in enumerate(steps):
        rows[i] += step.n_rows
        sizes[i] += step.ffn_bytes


def _setting(curves: Sequence[Curve], target: float) -> Setting:
    thresholds = [curve.threshold(target) for curve in curves]
    points = [curve.at(threshold) for curve, threshold in zip(curves, thresholds, strict=True)]
    return Setting(
        target=target,
        thresholds=tuple(thresholds),
        computed=float(np.mean([point.computed for point in points])),
        recall=float(np.mean([point.recall for point in points])),
        precision=float(np.mean([point.precision for point in points])),
        mass=float(np.mean([point.mass for point in points])),
    )
