"""A plan as a picture: device memory by what it holds, and how much of each layer lies there."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path

from ..._extras import how
from ...errors import ArgumentError, UnsupportedError
from ..writer import PartialFile
from .plan import GIB, Plan

LABELS = {
    "kv": "K and V",
    "attention": "attention",
    "norms": "norms",
    "predictor": "predictors",
    "ffn": "hot neurons",
    "head": "output matrix",
    "scratch": "work space",
    "staging": "prompt streaming",
    "overhead": "driver, libraries",
}
_COLOURS = {
    "kv": "#1f77b4",
    "attention": "#ff7f0e",
    "norms": "#8c564b",
    "predictor": "#9467bd",
    "ffn": "#2ca02c",
    "head": "#bcbd22",
    "scratch": "#7f7f7f",
    "staging": "#a9a9a9",
    "overhead": "#c7c7c7",
}


def parts(plan: Plan) -> list[tuple[str, str, int]]:
    """(kind, label, bytes) of all that takes any."""
    labels = LABELS | ({"ffn": "experts"} if plan.model.n_expert else {})
    return [(kind, label, n) for kind, label in labels.items() if (n := getattr(plan.bytes, kind))]


def draw(plan: Plan, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Writes the picture; the ending of its name is the format: png, svg or pdf.

    Raises UnsupportedError if matplotlib is not installed, ArgumentError (another ending), FileError.
    """
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in ("png", "svg", "pdf"):
        raise ArgumentError(f"{path}: a picture's name ends in .png, .svg or .pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(f"a picture needs matplotlib: {how('plot')}") from None
    figure = Figure(figsize=(10, 6), layout="constrained")
    memory, layers = figure.subplots(2, 1, height_ratios=(1, 2))
    left = 0.0
    for kind, label, n_bytes in parts(plan):
        gib = n_bytes / GIB
        memory.barh(0, gib, left=left, color=_COLOURS[kind], label=f"{label} {gib:.3f}")
        left += gib
    memory.axvline(
        plan.budget_bytes / GIB, color="black", linestyle="--", label=f"budget {plan.budget_bytes / GIB:.3g}"
    )
    memory.set_yticks([])
    memory.set_xlabel("GiB of VRAM")
    memory.legend(ncols=5, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    index = list(range(len(plan.layers)))
    layers.bar(
        index, [100 * plan.share(i) for i in index], color=_COLOURS["ffn"], label=f"{plan.model.unit} in VRAM"
    )
    carried = [100 * y.active_hot / (y.active_hot + y.active_cold or 1) for y in plan.layers]
    layers.plot(index, carried, "o", color="#d62728", markersize=3, label="of those computed per token")
    on_cpu = [i for i, y in enumerate(plan.layers) if not y.on_device]
    if on_cpu:
        layers.plot(
            on_cpu, [0] * len(on_cpu), "x", color="black", label="attention on the CPU", clip_on=False
        )
    layers.set_ylim(0, 100)
    layers.set_xlim(-0.7, len(index) - 0.3)
    layers.set_xlabel("layer")
    layers.xaxis.get_major_locator().set_params(integer=True)
    layers.set_ylabel("%")
    layers.legend(ncols=3, fontsize="small", loc="lower right", bbox_to_anchor=(1.0, 1.0))
    # A file's name may hold what matplotlib takes for a formula.
    figure.suptitle(title or f"{plan.expected.tokens_per_s:.1f} tokens/s expected", parse_math=False)
    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a title's letter that the font lacks is drawn as a box
        figure.savefig(data, format=suffix, dpi=120)
    with PartialFile(path) as file:
        file.write(data.getvalue())
