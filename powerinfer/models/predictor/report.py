"""A check of a predictor in words and numbers: rows for a terminal, a Markdown page, JSON, a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..perplexity import Perplexity
from ..profile import check_can_plot
from ..writer import PartialFile
from .check import Check, LayerCheck

LAYER_HEAD = ("layer", "rank", "active", "computed", "engine", "recall", "precision", "mass", "rows", "bytes")
TRADE_HEAD = ("target", "computed", "recall", "precision", "mass")
SWEPT_HEAD = ("rows", "perplexity", "over exact", "KL divergence")

LEGEND = """\
active: neurons whose product is not zero; computed: those that the predictor names, from its scores in exact
mode; engine: the same in predicted mode, by the engine's counters; recall: active neurons that are named;
precision: named neurons that are active; mass: share of sum |h| * ||down row|| that the named neurons carry;
rows, bytes: weight rows and bytes (the predictor's own included) that single tokens read in the
feed-forward, over those of dense mode."""


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def layer_rows(check: Check) -> list[list[str]]:
    """One row for each layer, and their mean."""

    def row(name: str, rank: str, c: Sequence[float]) -> list[str]:
        return [name, rank, *(percent(value) for value in c)]

    def values(c: LayerCheck) -> tuple[float, ...]:
        p = c.point
        return p.active, p.computed, c.computed, p.recall, p.precision, p.mass, c.rows, c.bytes

    rows = [row(str(c.layer), str(c.rank) if c.rank else "signs", values(c)) for c in check.layers]
    means = [check.mean(lambda c, i=i: values(c)[i]) for i in range(6)]  # type: ignore[misc]
    rank = f"{check.mean(lambda c: c.rank):.0f}" if check.layers[0].rank else "signs"
    return [*rows, row("all", rank, [*means, check.rows, check.bytes])]


def trade_head(check: Check) -> list[str]:
    swept = any(setting.perplexity for setting in check.trade_off)
    return [*TRADE_HEAD, *(SWEPT_HEAD if swept else ())]


def trade_rows(check: Check) -> list[list[str]]:
    """One row for each target."""
    out = []
    for setting in check.trade_off:
        row = [f"{100 * setting.target:g} %"]
        row += [percent(v) for v in (setting.computed, setting.recall, setting.precision, setting.mass)]
        if setting.perplexity is not None:
            row += _cost(setting.perplexity)
        out.append(row)
    return out


def _cost(result: Perplexity) -> list[str]:
    c = result.comparison
    assert c is not None
    return [
        percent(result.ffn_rows),
        f"{result.value:.4f}",
        f"{c.ratio:.5f} ± {c.ratio_error:.5f}",
        f"{c.kl_divergence:.5f}",
    ]


def summary(check: Check) -> list[tuple[str, str]]:
    """What matters most."""
    exact, predicted = check.exact, check.predicted
    c = predicted.comparison
    assert c is not None
    n_bytes = sum(layer.predictor_bytes for layer in check.layers)
    agreed = (
        f"agree on all {check.n_counted:,} (token, neuron) pairs that were predicted"
        if not check.n_disagreed
        else f"DISAGREE in {check.n_disagreed} cases"
    )
    return [
        (
            "perplexity",
            f"{predicted.value:.4f} predicted, {exact.value:.4f} exact ({exact.n_tokens:,} tokens)",
        ),
        (
            "difference",
            f"{c.ratio:.5f} ± {c.ratio_error:.5f} times, KL divergence {c.kl_divergence:.5f}, same first "
            f"choice {percent(c.same_top)}",
        ),
        (
            "FFN rows read",
            f"{percent(check.rows)} of dense mode's ({percent(_exact_rows(check))} in exact mode), over "
            f"{check.n_single:,} single tokens",
        ),
        ("FFN bytes read", f"{percent(check.bytes)} of dense mode's, predictor included"),
        ("predictor", f"{check.predictor}, {n_bytes / 2**20:,.2f} MiB"),
        ("counters", f"engine and taps {agreed}"),
    ]


def _exact_rows(check: Check) -> float:
    dense = sum(c.dense_mode.rows for c in check.layers)
    return sum(c.exact_mode.rows for c in check.layers) / dense


# ---- a page


def markdown(check: Check, *, title: str, how: str, picture: str = "") -> str:
    """The whole check as a page. how: what was measured with what."""
    parts = [f"# {title}", how, _table(("", ""), [list(row) for row in summary(check)], right=False)]
    parts += ["## Layers", _table(LAYER_HEAD, layer_rows(check)), _paragraph(LEGEND)]
    parts += [
        "## Trade-off",
        "Thresholds that keep a share of each layer's activation mass (target) on this text.",
        _table(trade_head(check), trade_rows(check)),
    ]
    if picture:
        parts.append(f"![what thresholds cost and keep]({picture})")
    return "\n\n".join(parts) + "\n"


def _paragraph(text: str) -> str:
    return text.replace("|h| * ||down row||", "\\|h\\| · ‖down row‖")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = True) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + ("---:|" if right else "---|") * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def write_text(path: Path, text: str) -> None:
    """Raises FileError."""
    with PartialFile(path) as file:
        file.write(text.encode())


def as_json(check: Check) -> dict[str, Any]:
    """What a program reads."""
    return {
        "predictor": check.predictor,
        "n_tokens": check.n_tokens,
        "n_single": check.n_single,
        "rows": check.rows,
        "bytes": check.bytes,
        "n_counted": check.n_counted,
        "n_disagreed": check.n_disagreed,
        "layers": [
            {**asdict(layer), "accuracy": layer.point.accuracy, "rows": layer.rows, "bytes": layer.bytes}
            for layer in check.layers
        ],
        "trade_off": [asdict(setting) for setting in check.trade_off],
        "exact": asdict(check.exact),
        "predicted": asdict(check.predicted),
    }


# ---- a picture


def plot(check: Check, path: Path, *, title: str) -> None:
    """Draws what thresholds cost and keep in each layer, and where this predictor stands.

    Raises what `profile.check_can_plot` raises, and FileError.
    """
    check_can_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}: what the predictor costs and keeps".replace("$", r"\$"), fontsize=15)
    left, right = figure.subplots(1, 2)
    _draw_curves(left, check)
    _draw_layers(right, check)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=150)
    with PartialFile(path) as file:
        file.write(drawn.getvalue())


def _draw_curves(axes: Any, check: Check) -> None:
    """Missed mass over computed neurons, a line for each layer, with a point where its threshold is."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    # Without its light end, which does not show as a line on white.
    colors = ListedColormap(colormaps["viridis"](np.linspace(0, 0.9, 256)))
    scale = ScalarMappable(Normalize(0, max(len(check.layers) - 1, 1)), colors)
    for c, curve, color in zip(
        check.layers, check.curves, scale.to_rgba(np.arange(len(check.layers))), strict=True
    ):
        steps = curve.steps()
        at = np.unique(np.linspace(0, len(steps.mass) - 1, 1001).astype(np.int64))  # more is not seen
        missed = 1 - steps.mass[at] / max(steps.mass[-1], np.finfo(float).tiny)
        axes.plot(100 * steps.count[at] / steps.count[-1], 100 * missed, color=color, linewidth=1.2)
        axes.plot([100 * c.point.computed], [100 * (1 - c.point.mass)], "o", color=color, markersize=6)
    axes.set(xlim=(0, 100), ylim=(0.01, 100), yscale="log")
    axes.set_title("Each layer's thresholds, and those in use (dots)", fontsize=12)
    axes.set_xlabel("neurons computed (%)", fontsize=11)
    axes.set_ylabel("activation mass missed (%)", fontsize=11)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    bar = axes.figure.colorbar(scale, ax=axes, pad=0.02)
    bar.set_label("layer", fontsize=11)


def _draw_layers(axes: Any, check: Check) -> None:
    """What is active, predicted and read, by layer."""
    from matplotlib.ticker import MaxNLocator

    at = np.arange(len(check.layers))
    axes.bar(
        at,
        [100 * c.computed for c in check.layers],
        color="#9ecae1",
        label="computed: predicted by the engine",
    )
    axes.bar(at, [100 * c.active for c in check.layers], color="#3b528b", label="of those, active")
    axes.plot(
        at,
        [100 * c.rows for c in check.layers],
        "D",
        color="#d95f0e",
        markersize=5,
        label="weight rows read, over dense",
    )
    axes.set_ylim(0, 130 * max(*(c.computed for c in check.layers), *(c.rows for c in check.layers), 1e-3))
    axes.set_title(
        f"{100 * check.rows:.1f} % of dense mode's rows are read, {100 * check.bytes:.1f} % of its bytes",
        fontsize=12,
    )
    axes.set_xlabel("layer", fontsize=11)
    axes.set_ylabel("share (%)", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper left", fontsize=10, framealpha=1)
