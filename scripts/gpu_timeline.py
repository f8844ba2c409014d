"""Where the time of a decode layer goes that a GPU and the CPU compute together.

    python scripts/gpu_timeline.py measure bamboo-8g --models /dev/shm --json timeline.json
    python scripts/gpu_timeline.py draw timeline.json -o timeline.svg

measure opens a row's model (bench_gpu.py) under its budget and decodes token by token: as always, with a
timeline, whose marks cost some microseconds a layer themselves, and with thresholds that no neuron reaches.
The last, of a session that does not look ahead, beside one that has all neurons on the GPU and also computes
none, leaves what the hand-over itself takes: x and marks posted, read and listed, an empty sum posted, read
and added. What looking ahead adds there is the GPU's guess at the next layer's marks, for which a layer with
neurons on the CPU has time. draw makes a picture of a mean layer; it needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from bench_gpu import measure_ceilings
from gpu_rows import ROWS, Row, make_model

from powerinfer._engine import machine
from powerinfer._engine.session import Model, Session
from powerinfer._engine.types import MOMENTS
from powerinfer.bench import commit
from powerinfer.errors import PowerInferError
from powerinfer.models.plan import Settings, make_plan
from powerinfer.models.plan.rates import device_rates

NEVER = 1e30
"""A threshold that no score reaches."""
WARM = 8
GPU = MOMENTS[:7]
WORDS = {
    "qkv": "norm, q, k, v",
    "attention": "attention",
    "output": "output product",
    "predict": "predictor, first layer; x posted",
    "marks": "its second, cold neurons; marks posted",
    "hot": "hot neurons",
    "merge": "waits for the CPU's sum, adds",
    "input": "waits for x, reads it",
    "list": "reads the marks, lists neurons",
    "answer": "cold neurons; sum posted",
}


def decode(s: Session, n_tokens: int, rng: np.random.Generator) -> list[float]:
    """Seconds of each token, after a prompt of 64."""
    high = s.model.info.n_vocab - 1
    s.cut(0)
    s.feed(rng.integers(3, high, 64, np.int32))
    times = []
    for i in range(n_tokens + WARM):
        ids = rng.integers(3, high, 1, np.int32)
        start = time.perf_counter()
        s.feed(ids)
        if i >= WARM:
            times.append(time.perf_counter() - start)
    return times


def layers_of(s: Session, n_tokens: int, rng: np.random.Generator) -> dict[str, Any]:
    """Moments after the end of the layer before, over all layers but the first and all tokens."""
    high = s.model.info.n_vocab - 1
    found: dict[str, list[float]] = {name: [] for name in MOMENTS}
    for i in range(n_tokens + WARM):
        s.feed(rng.integers(3, high, 1, np.int32))
        if i < WARM:
            continue
        timeline = s.last_timeline
        for before, layer in pairwise(timeline):
            for name, us in layer.items():
                found[name].append(us - before["merge"])
    return {
        name: {
            "mean": statistics.fmean(us),
            "median": statistics.median(us),
            "p10": float(np.quantile(us, 0.1)),
            "p90": float(np.quantile(us, 0.9)),
        }
        for name, us in found.items()
        if us
    }


def measure(row: Row, path: Path, threads: int, n_tokens: int, whole: float) -> dict[str, Any]:
    settings = Settings(n_ctx=1024, n_batch=512, sparsity=row.sparsity)
    facts = machine.device_facts("cuda", 0, measure=True)
    options: dict[str, Any] = {
        "device": "cuda",
        "n_ctx": settings.n_ctx,
        "n_batch": settings.n_batch,
        "sparsity": row.sparsity,
        "n_threads": threads,
    }
    found: dict[str, Any] = {"ceilings": vars(measure_ceilings(threads))}

    def per_layer(s: Session) -> float:
        return 1e6 * statistics.median(decode(s, n_tokens, rng)) / s.model.info.n_layer

    with Model(path) as model:
        for name, budget in (("split", row.budget), ("plain", row.budget), ("whole", whole)):
            plan = make_plan(model, vram_budget=budget, settings=settings, rates=device_rates([facts]))
            hot = sum(len(layer.hot) for layer in plan.layers) / (model.info.n_layer * model.info.n_ff)
            rng = np.random.default_rng(1)
            with Session(model, plan=plan.native(model), look_ahead=name != "plain", **options) as s:
                us = per_layer(s)
                steps = s.last_step
                cold = statistics.fmean(step.n_active - step.n_active_device for step in steps)
                s.set_threshold(NEVER)
                found[name] = {"hot_share": hot, "cold": cold, "us": us, "empty_us": per_layer(s)}
            if name == "split":
                with Session(model, plan=plan.native(model), timeline=True, **options) as s:
                    found["marked_us"] = per_layer(s)
                    found["layer"] = layers_of(s, n_tokens, rng)
                    s.set_threshold(NEVER)
                    found["empty_marked_us"] = per_layer(s)
                    found["empty_layer"] = layers_of(s, n_tokens, rng)
    found["handover_us"] = found["plain"]["empty_us"] - found["whole"]["empty_us"]
    found["guess_us"] = found["split"]["empty_us"] - found["plain"]["empty_us"]
    return found


def show(r: dict[str, Any]) -> None:
    print(
        f"{r['row']}: {r['split']['us']:.1f} us a layer, {r['marked_us']:.1f} with marks, "
        f"{r['plain']['us']:.1f} without looking ahead; no neuron: {r['split']['empty_us']:.1f}, "
        f"{r['plain']['empty_us']:.1f} without looking ahead, all on the GPU {r['whole']['empty_us']:.1f}: "
        f"a hand-over takes {r['handover_us']:.1f} us, a guess that nothing hides {r['guess_us']:.1f}",
        flush=True,
    )
    for what in ("layer", "empty_layer"):
        print(what + ": " + ", ".join(f"{name} {at['mean']:.1f}" for name, at in r[what].items()), flush=True)


def spans(layer: dict[str, Any]) -> list[tuple[int, str, float, float]]:
    """Side (0: GPU), what, from, to."""
    out = []
    at = 0.0
    for name in GPU:
        if name in layer:
            out.append((0, name, at, layer[name]["mean"]))
            at = layer[name]["mean"]
    at = 0.0
    for name in MOMENTS[len(GPU) :]:
        if name in layer:
            out.append((1, name, at, layer[name]["mean"]))
            at = layer[name]["mean"]
    return out


def draw(r: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "powerinfer"
    from matplotlib import pyplot as plt

    colours = dict(zip(MOMENTS, plt.get_cmap("tab20").colors[::2], strict=False))  # type: ignore[attr-defined]
    colours |= {"merge": "#dddddd", "input": "#eeeeee"}
    figure, axes = plt.subplots(2, 1, figsize=(11, 5.4), sharex=True)
    titles = (
        (f"a layer with {r['split']['cold']:.0f} active neurons on the CPU", r["layer"]),
        ("no active neuron: the hand-over by itself", r["empty_layer"]),
    )
    names: dict[str, Any] = {}
    for axis, (title, layer) in zip(axes, titles, strict=True):
        for side, name, begin, end in spans(layer):
            bar = axis.barh(
                1 - side, end - begin, left=begin, height=0.7, color=colours[name], edgecolor="white"
            )
            names.setdefault(name, bar)
            if end - begin > 4:
                axis.text(
                    (begin + end) / 2, 1 - side, f"{end - begin:.0f}", ha="center", va="center", fontsize=8
                )
        axis.set_yticks([1, 0], ["GPU", "CPU"])
        axis.set_title(title, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel(
        f"microseconds after the layer before (means; {r['marked_us']:.0f} us a layer with these marks, "
        f"{r['split']['us']:.0f} without)"
    )
    figure.legend(
        names.values(),
        [WORDS[name] for name in names],
        ncols=3,
        loc="lower center",
        fontsize=8,
        frameon=False,
    )
    figure.suptitle(
        f"{r['what']}, {r['budget']:g} GiB of an {r['gpu']}, {r['ceilings']['threads']} threads", fontsize=11
    )
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    do = p.add_subparsers(dest="do", required=True)
    m = do.add_parser("measure", help="with a GPU: decode and write what was seen")
    m.add_argument("row", choices=[name for name, row in ROWS.items() if row.sparsity == "predicted"])
    m.add_argument(
        "--models", type=Path, default=Path("/dev/shm"), metavar="DIR", help="where the model goes"
    )
    m.add_argument(
        "--whole", type=float, default=40, metavar="GIB", help="a budget that holds all of it (default 40)"
    )
    m.add_argument("--threads", type=int, default=0, metavar="N", help="default: cores less one")
    m.add_argument("--tokens", type=int, default=64, metavar="N", help="decoded each time (default 64)")
    m.add_argument("--json", type=Path, metavar="FILE", help="results as JSON")
    d = do.add_parser("draw", help="a picture of what was written")
    d.add_argument("json", type=Path)
    d.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=".svg or .png")
    a = p.parse_args()
    try:
        if a.do == "draw":
            draw(json.loads(a.json.read_text()), a.output)
            return 0
        row = ROWS[a.row]
        found = {
            "commit": commit(),
            "cpu": machine.cpu_name(),
            "isa": machine.isa(),
            "row": a.row,
            "what": row.what,
        }
        found |= {"gpu": machine.device_facts("cuda", 0).name, "budget": row.budget}
        threads = a.threads or max(machine.cores() - 1, 1)
        found |= measure(row, make_model(row, a.models), threads, a.tokens, a.whole)
        show(found)
        if a.json:
            a.json.write_text(json.dumps(found, indent=1) + "\n")
    except (PowerInferError, OSError) as error:
        print(f"gpu_timeline.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
