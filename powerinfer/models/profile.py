"""Counting how often each neuron of a model fires over a text, or each expert of a mixture is used, and a
picture of what was counted.

    with Model("model.gguf") as model:
        counts = profile(model, read_corpus(model.file, ["text.txt"]))

Neurons fire very unevenly: a few for almost every token, most rarely. The counts say which are which; a plan
for a GPU's memory and a predictor's size start from them.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._engine.activations import SILENT
from .._engine.counts import Counts
from .._engine.session import Model, ModelInfo, Progress, Session
from .._extras import how
from ..errors import ArgumentError, FormatError, UnsupportedError
from .corpus import Corpus
from .statistics import summarise_all
from .writer import PartialFile

N_CTX = 512
MAX_TAP_BYTES = 512 << 20
PICTURES = (".pdf", ".png", ".svg")

Floats = npt.NDArray[np.float64]


def check_can_be_profiled(info: ModelInfo) -> None:
    """Raises UnsupportedError for a model whose neurons are never silent, unless it has experts."""
    if not info.n_expert and info.activation not in SILENT:
        raise UnsupportedError(
            f"the model's activation is {info.activation}: every neuron fires for every token, so there is "
            "nothing to count. A version of the model that was trained with ReLU can be profiled (ReluLLaMA, "
            "ProSparse, Bamboo); if this one was and its file does not say so, name it: --activation relu"
        )


def profile(
    model: Model,
    corpus: Corpus,
    *,
    n_ctx: int = 0,
    n_tokens: int = 0,
    n_batch: int = 512,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> Counts:
    """Counts over a text, computed with all neurons in windows of n_ctx tokens, each from an empty context.

    A window begins with the BOS, where the vocabulary has one; it is not counted.
    n_ctx: 0: 512, or what the model was trained with if that is less.
    n_tokens: count over the first so many tokens of the text; 0: all.
    n_batch: tokens computed together; fewer, where what they leave would take more than MAX_TAP_BYTES.
    progress: called as progress(tokens counted, tokens to count).

    Raises UnsupportedError (a model whose neurons are never silent), ArgumentError, FormatError (the model's
    values are not finite), OutOfMemoryError.
    """
    info = model.info
    check_can_be_profiled(info)
    n_ctx = n_ctx or min(N_CTX, info.n_ctx_train)
    head = [] if corpus.bos is None else [corpus.bos]
    width = n_ctx - len(head)
    if width < 1:
        raise ArgumentError(f"n_ctx is {n_ctx}, which leaves no room for text")
    if n_tokens < 0:
        raise ArgumentError(f"n_tokens is {n_tokens}, it cannot be negative (0: all)")
    if n_batch < 1:
        raise ArgumentError(f"n_batch is {n_batch}, at least 1 is needed")
    tokens = corpus.tokens[: n_tokens or None]
    if not tokens.size:
        raise ArgumentError("the text is empty")
    if info.n_expert:
        return _count_experts(model, tokens, head, n_ctx, n_batch, n_threads, progress)
    most = max(MAX_TAP_BYTES // (4 * info.n_layer * info.n_ff), 1)
    counts = np.zeros((info.n_layer, info.n_ff), np.uint64)
    with (
        Session(
            model, n_ctx=n_ctx, n_batch=min(n_batch, most, n_ctx), n_threads=n_threads, sparsity="exact"
        ) as session,
        session.tap(hidden=True) as tap,
    ):
        step = session.info.n_batch
        done, is_finite = 0, True
        for start in range(0, len(tokens), width):
            window = np.concatenate([np.asarray(head, np.int32), tokens[start : start + width]])
            session.drop()
            for at in range(0, len(window), step):
                batch = window[at : at + step]
                session.feed(batch, want_logits=None if at + step >= len(window) else False)
                skip = len(head) if at == 0 else 0
                for layer, hidden in tap.hidden.items():
                    fired = (hidden[skip:] != 0).view(np.uint8)
                    counts[layer] += np.add.reduce(fired, axis=0, dtype=np.uint32)
                done += len(batch) - skip
                if progress is not None:
                    progress(done, len(tokens))
                # What is not finite in a layer spreads to all that follows: the last layer, and the end.
                is_finite &= bool(np.isfinite(tap.hidden[info.n_layer - 1]).all())
            if not is_finite or not np.isfinite(session.hidden()).all():
                raise FormatError("the model's values are not finite: its weights are broken")
    return Counts(counts=counts, n_tokens=len(tokens))


def _count_experts(
    model: Model,
    tokens: npt.NDArray[np.int32],
    head: list[int],
    n_ctx: int,
    n_batch: int,
    n_threads: int,
    progress: Progress | None,
) -> Counts:
    """The same of a mixture: the engine counts."""
    info = model.info
    width, done = n_ctx - len(head), 0
    counts = np.zeros((info.n_layer, info.n_expert), np.uint64)
    session = Session(
        model, n_ctx=n_ctx, n_batch=min(n_batch, n_ctx), n_threads=n_threads, count_neurons=True
    )
    with session:
        step = session.info.n_batch
        for start in range(0, len(tokens), width):
            window = tokens[start : start + width]
            session.drop()
            if head:
                session.feed(head)
                session.neuron_counts(reset=True)
            for at in range(0, len(window), step):
                batch = window[at : at + step]
                # The last layer is computed, and counted, from the first token on whose logits are wanted.
                wanted = np.zeros(len(batch), np.uint8)
                wanted[[0, -1]] = 1
                session.feed(batch, want_logits=wanted)
                done += len(batch)
                if progress is not None:
                    progress(done, len(tokens))
            if not np.isfinite(session.hidden()).all():
                raise FormatError("the model's values are not finite: its weights are broken")
            counts += session.neuron_counts(reset=True).counts
    return Counts(counts=counts, n_tokens=len(tokens), unit="experts")


# ---- the picture


def check_can_plot(path: str | os.PathLike[str]) -> None:
    """Raises UnsupportedError without matplotlib, ArgumentError for a kind of picture that is not known."""
    if Path(path).suffix.lower() not in PICTURES:
        raise ArgumentError(f"a picture's name ends in {', '.join(PICTURES)}, but that of {path} does not")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(f"pictures need matplotlib, which is not installed: {how('plot')}") from error


def plot(counts: Counts, path: str | os.PathLike[str], *, title: str) -> None:
    """Draws the power law: how much of all firing the hottest neurons make up, and how often each fires.

    Raises what `check_can_plot` raises, and FileError.
    """
    check_can_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.8), layout="constrained")
    FigureCanvasAgg(figure)
    # A title is text: "$" begins no formula.
    what = "neurons fire" if counts.unit == "neurons" else "experts are used"
    figure.suptitle(f"{title}: how often {what}".replace("$", r"\$"), fontsize=15)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    _draw_shares(left, counts)
    _draw_frequencies(right, counts)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(path).suffix[1:].lower(), dpi=150)
    with PartialFile(path) as file:
        file.write(drawn.getvalue())


def _hottest_first(counts: npt.NDArray[np.uint64]) -> Floats:
    return -np.sort(-counts.astype(np.float64), axis=-1)


def _draw_shares(axes: Any, counts: Counts) -> None:
    """A curve of each layer, and one of all together: share of the firing over share of the neurons."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    def curve(fired: Floats) -> tuple[Floats, Floats]:
        share = np.concatenate([[0.0], np.cumsum(fired) / max(fired.sum(), 1.0)])
        at = np.unique(np.linspace(0, fired.size, 1001).astype(np.int64))  # more is not seen
        return 100 * at / fired.size, 100 * share[at]

    # Without its light end, which does not show as a line on white.
    colors = ListedColormap(colormaps["viridis"](np.linspace(0, 0.9, 256)))
    scale = ScalarMappable(Normalize(0, max(counts.n_layer - 1, 1)), colors)
    for layer, color in zip(counts.counts, scale.to_rgba(np.arange(counts.n_layer)), strict=True):
        axes.plot(*curve(_hottest_first(layer)), color=color, linewidth=1.2)
    axes.plot(
        *curve(_hottest_first(counts.counts.reshape(-1))),
        color="black",
        linewidth=2.4,
        label="all layers together",
    )
    carry = 100 * summarise_all(counts).carry_80
    axes.plot(
        [0, carry, carry],
        [80, 80, 0],
        color="black",
        linewidth=1,
        linestyle=":",
        marker="o",
        markevery=[1],
        label=f"{carry:.0f} % of the {counts.unit} make up 80 %",
    )
    axes.set(xlim=(0, 100), ylim=(0, 101))
    of_neurons = counts.unit == "neurons"
    axes.set_title(f"How uneven the {'firing' if of_neurons else 'use'} is", fontsize=12)
    axes.set_xlabel(f"{counts.unit}, the hottest first (%)", fontsize=11)
    axes.set_ylabel(f"their share of all {'firing' if of_neurons else 'uses'} (%)", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=10, framealpha=1)
    bar = axes.figure.colorbar(scale, ax=axes, pad=0.02)
    bar.set_label("layer", fontsize=11)
    bar.locator = _whole_numbers()
    bar.update_ticks()


def _draw_frequencies(axes: Any, counts: Counts) -> None:
    """A row of each layer, its neurons sorted: for which share of the tokens each fires."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    least = max(100 / counts.n_tokens, 1e-3)
    n = min(counts.n_ff, 1024)  # more columns are not seen
    at = np.minimum((np.arange(n) + 0.5) * counts.n_ff / n, counts.n_ff - 1).astype(np.int64)
    frequency = 100 * _hottest_first(counts.counts)[:, at] / counts.n_tokens
    colors = colormaps["viridis"].with_extremes(bad="white")
    image = axes.imshow(
        np.ma.masked_equal(frequency, 0.0),
        aspect="auto",
        interpolation="nearest",
        cmap=colors,
        norm=LogNorm(min(least, 1), 100),
        extent=(0, 100, counts.n_layer - 0.5, -0.5),
    )
    active = summarise_all(counts)
    verb = "fire" if counts.unit == "neurons" else "are used"
    axes.set_title(
        f"{100 * active.active:.1f} % {verb} for a token, {100 * active.never:.1f} % never (white)",
        fontsize=12,
    )
    axes.set_xlabel(f"{counts.unit}, the hottest first (% of the layer)", fontsize=11)
    axes.set_ylabel("layer", fontsize=11)
    axes.yaxis.set_major_locator(_whole_numbers())
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, format="{x:g}")
    fires = "the neuron fired" if counts.unit == "neurons" else "the expert was used"
    bar.set_label(f"tokens for which {fires} (% of {counts.n_tokens:,})", fontsize=11)


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, min_n_ticks=1)
