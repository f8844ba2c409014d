"""What `powerinfer plan` says about one plan, for people."""

from __future__ import annotations

import argparse
import sys
import textwrap
from itertools import pairwise

from .._text.table import columns, facts, output_width
from .._text.terminal import harmless, is_smart, one_line
from ..models.plan import LayerPlan, Plan, Rates, Settings, Statistics
from ..models.plan.picture import parts
from ..models.plan.plan import GIB

MOST_ROWS = 20  # of the table of layers; similar ones are put together
BAR, BESIDE_BAR = 40, 26  # characters


def about(name: str, plan: Plan, statistics: Statistics | None, rates: Rates) -> list[tuple[str, str]]:
    """The model and what the figures rest on."""
    m, s = plan.model, plan.settings
    source = (
        plan.statistics
        if statistics is None or (s.sparsity == "dense" and not m.n_expert)
        else statistics.source
    )
    if s.sparsity == "predicted":
        source += f"; {s.overshoot:g} neurons predicted for each that fires"
    rows = [
        (
            "model",
            one_line(f"{name}: {m.architecture}, {m.n_layer} layers of {m.n_ff} {m.unit}, {s.sparsity}"),
        ),
        ("for", f"n_ctx {s.n_ctx}, n_batch {s.n_batch}, K {s.type_k}, V {s.type_v}" + sequences(s)),
        ("statistics", one_line(source)),
        ("GPU", one_line(rates.gpu)),
        ("CPU", one_line(rates.cpu)),
        ("PCIe", one_line(rates.pcie)),
    ]
    return rows


def sequences(s: Settings) -> str:
    return f", {s.n_seq} sequences" if s.n_seq > 1 else ""


def headline(plan: Plan) -> str:
    where = f"with {plan.budget_bytes / GIB:.2f} GiB of VRAM" if plan.uses_device else "on the CPU alone"
    return f"{plan.expected.tokens_per_s:.1f} tokens/s expected {where}"


def show(args: argparse.Namespace, name: str, plan: Plan, cpu: Plan, assumed: Plan | None = None) -> None:
    """Prints a plan for people."""
    width = output_width()
    block = "\u2588" if is_smart(sys.stdout) else "#"
    for line in facts(about(name, plan, None, plan.rates), width=width):
        print(line)
    print()
    if plan.uses_device:
        for line in columns(memory_rows(plan, block, width or 80), right=(1,), width=width):
            print(line)
        print()
        if len(plan.devices) > 1:
            for line in columns(device_rows(plan), right=(2, 3, 4), width=width):
                print(line)
            print()
        for line in columns(layer_rows(plan, every=args.layers), right=(3, 4, 5, 6, 7), width=width):
            print(line)
        print()
        for line in wrapped(f"{plan.model.unit} in VRAM, layer by layer: {heights(plan)}", width):
            print(line)
        if plan.model.n_expert:
            print()
            rows = [("places", places(plan)), ("found there", found(plan, assumed))]
            for line in facts(rows, width=width):
                print(line)
        zero_copy = sum(len(y.pcie) for y in plan.layers)
        if zero_copy:
            for line in wrapped(f"{zero_copy} more are read over PCIe by the GPU while it would wait", width):
                print(line)
        print()
    elif plan.budget_bytes:
        print("Everything stays on the CPU: with these rates the GPU would make it slower.\n")
    for text in expectation(plan, cpu):
        for line in wrapped(harmless(text), width):
            print(line)


def wrapped(text: str, width: int | None) -> list[str]:
    """The lines of a text: as wide as the terminal, else 100 characters; the rest of a line is indented."""
    indent = " " * (len(text) - len(text.lstrip()))
    more = indent + "  " if indent else ""
    return textwrap.wrap(text, max(width or 100, 20), subsequent_indent=more)


def memory_rows(plan: Plan, block: str, width: int) -> list[list[str]]:
    """A bar for each kind of content, in lines of that width."""
    largest = max(n for _, _, n in parts(plan))
    bar = max(1, min(BAR, width - BESIDE_BAR))
    rows = [["VRAM", "GiB", ""]]
    for _, label, n in parts(plan):
        rows.append([label, f"{n / GIB:.3f}", block * max(1, round(bar * n / largest))])
    rows.append(["in all", f"{plan.bytes.total / GIB:.3f}", f"of a budget of {plan.budget_bytes / GIB:.3f}"])
    return rows


def device_rows(plan: Plan) -> list[list[str]]:
    """What each of several devices has."""
    rows = [["device", "layers", "budget", "used", plan.model.unit]]
    for k, d in enumerate(plan.devices):
        mine = [y for y in plan.layers if y.device == k]
        layers = (
            span(d.first_layer, max(i for i, y in enumerate(plan.layers) if y.device == k))
            if mine
            else "none"
        )
        rows.append(
            [
                f"{k}" + (", output matrix" if plan.head_device == k else ""),
                layers,
                f"{d.budget_bytes / GIB:.3f}",
                f"{d.total_bytes / GIB:.3f}",
                str(sum(len(y.hot) for y in mine)),
            ]
        )
    return rows


def alike(plan: Plan, a: int, b: int, tolerance: float) -> bool:
    same = plan.layers[a].device == plan.layers[b].device
    return same and abs(plan.share(a) - plan.share(b)) <= tolerance


def runs(plan: Plan, tolerance: float) -> list[list[int]]:
    """Neighbouring layers that hardly differ from the first of their run."""
    out = [[0]]
    for _, i in pairwise(range(len(plan.layers))):
        if alike(plan, out[-1][0], i, tolerance):
            out[-1].append(i)
        else:
            out.append([i])
    return out


def layer_rows(plan: Plan, *, every: bool) -> list[list[str]]:
    """Layers in runs, as few as it takes to stay short."""
    groups = [[i] for i in range(len(plan.layers))]
    tolerances = (0.01, 0.02, 0.05, 0.1, 1.0)
    for tolerance in () if every else tolerances:
        groups = runs(plan, tolerance)
        if len(groups) <= MOST_ROWS:
            break
    unit = plan.model.unit
    rows = [["layers", "attention", f"{unit} in VRAM", "share", "computed there", "GPU us", "CPU us", "us"]]
    for group in groups:
        layers = [plan.layers[i] for i in group]
        n = len(layers)
        computed = sum(y.active_hot + y.active_cold for y in layers)
        rows.append(
            [
                span(group[0], group[-1]),
                "GPU" if layers[0].on_device else "CPU",
                span(min(len(y.hot) for y in layers), max(len(y.hot) for y in layers)),
                f"{sum(plan.share(i) for i in group) / n:.0%}",
                f"{sum(y.active_hot for y in layers) / computed if computed else 0:.0%}",
                microseconds(sum(gpu_us(y) for y in layers) / n),
                microseconds(sum(cpu_us(y) for y in layers) / n),
                microseconds(sum(y.us for y in layers) / n),
            ]
        )
    return rows


def microseconds(us: float) -> str:
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def gpu_us(y: LayerPlan) -> float:
    return y.gpu_ffn_us + (y.fixed_us if y.on_device else 0.0)


def cpu_us(y: LayerPlan) -> float:
    return y.cpu_ffn_us + (0.0 if y.on_device else y.fixed_us)


def heights(plan: Plan) -> str:
    """A character for each layer: how much of it lies in VRAM; a dot where attention is on the CPU."""
    levels = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588" if is_smart(sys.stdout) else "12345678"
    return "".join(
        levels[min(7, int(8 * plan.share(i)))] if y.on_device else "." for i, y in enumerate(plan.layers)
    )


def short(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def expectation(plan: Plan, cpu: Plan) -> list[str]:
    """The speed, and the arithmetic behind it with its numbers."""
    e, r = plan.expected, plan.rates
    gpu, host = f"{r.gpu_bytes_per_s / 1e9:,.0f} GB/s", f"{r.cpu_bytes_per_s / 1e9:,.1f} GB/s"
    lines = [f"{headline(plan)}: {short(e.total_us / 1e3)} ms a token"]
    if plan.uses_device:
        lines[0] += f"; the CPU alone {cpu.expected.tokens_per_s:.1f}"
        shown = next((i for i, y in enumerate(plan.layers) if y.on_device), 0)
        y = plan.layers[shown]
        side = f"{r.layer_us:g} us + bytes / {gpu}" if y.on_device else f"bytes / {host}"
        zero_copy = ""
        if e.active_pcie:
            zero_copy = (
                f"; others by zero-copy: {r.ffn_us:g} us + bytes / {r.zero_copy_bytes_per_s / 1e9:,.0f} GB/s"
            )
        layers_ms = (e.total_us - e.head_us) / 1e3
        lines += [
            f"  token    = layers + output matrix = {short(layers_ms)} + {short(e.head_us / 1e3)} ms",
            f"  layer    = attention, K, V, predictor ({side})",
            f"             + max(hot {plan.model.unit}: {r.ffn_us:g} us + bytes / {gpu}{zero_copy},",
            f"                   cold {plan.model.unit}: bytes / {host} + hand-over)",
            f"  layer {shown:<2} = {y.fixed_us:.1f} + max({y.gpu_ffn_us:.1f}, "
            f"{y.cpu_ffn_us:.1f} + {y.handover_us:g}) = {y.us:.1f} us",
            f"  busy per token: GPU {short(e.gpu_us / 1e3)} ms, CPU {short(e.cpu_us / 1e3)} ms, "
            f"hand-overs {short(e.handover_us / 1e3)} ms",
        ]
        if e.prompt_us:
            lines.append(
                f"  prompts: {short(e.stream_bytes / 1e9)} GB of weights stay on the host, so that each "
                f"{plan.settings.n_batch} tokens of a long one take {short(e.prompt_us / 1e3)} ms "
                "or more (PCIe)"
            )
            if plan.budget_bytes >= plan.full_bytes:
                lines.append("  The budget holds the whole model; with these rates a mixture is faster.")
    else:
        fixed, ffn = (sum(getattr(y, name) for y in plan.layers) for name in ("fixed_us", "cpu_ffn_us"))
        lines += [
            "  token = attention, K, V, predictors + neurons + output matrix",
            f"        = {short(fixed / 1e3)} + {short(ffn / 1e3)} + {short(e.head_us / 1e3)} ms, "
            f"each bytes / {host}",
        ]
    lines.append(
        "  One sequence, its context half full; bytes over rates, so an estimate, not a measurement."
    )
    return lines


def places(plan: Plan) -> str:
    """How many of a mixture's experts have a place: "43 of 128 in every layer", or by runs of layers."""
    counts = [len(y.hot) for y in plan.layers]
    if len(set(counts)) == 1:
        return f"{counts[0]} of {plan.model.n_ff} experts in every layer"
    groups: list[tuple[int, int]] = []  # first layer, places
    for i, n in enumerate(counts):
        if not groups or groups[-1][1] != n:
            groups.append((i, n))
    if len(groups) > 6:
        return f"{span(min(counts), max(counts))} of {plan.model.n_ff} experts in a layer"
    ends = [first - 1 for first, _ in groups[1:]] + [len(counts) - 1]
    parts = [
        f"{n} in layer{'s' * (end > first)} {span(first, end)}"
        for (first, n), end in zip(groups, ends, strict=True)
    ]
    return f"of {plan.model.n_ff} experts {', '.join(parts)}"


def found(plan: Plan, assumed: Plan | None) -> str:
    """Which share of the chosen experts is expected to have a place."""
    share = f"{plan.carried:.0%} of those that a token chooses"
    if plan.statistics_kind == "heuristic":
        return f"{share}, if some are used by three times as many tokens as others (assumed)"
    if assumed is None:
        return share
    speed = f"{assumed.expected.tokens_per_s:.1f} tokens/s"
    return f"{share} (without the file's counts one would expect {assumed.carried:.0%} and {speed})"


def comparison(cpu: Plan) -> str:
    return (
        f"The CPU alone does {cpu.expected.tokens_per_s:.1f} tokens/s, {cpu.min_bytes / GIB:.2f} GiB are the "
        f"least that puts anything on the GPU, {cpu.full_bytes / GIB:.2f} GiB hold the whole model."
    )
