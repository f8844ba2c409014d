"""`powerinfer plan MODEL --vram-budget GIB`: what a budget of GPU memory would hold, and the speed to expect.

No GPU is needed: sizes are counted from the file, speeds from measured, given or published rates.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from itertools import pairwise
from typing import Any

from .._engine.session import Model
from .._text.terminal import harmless, is_smart, one_line
from ..errors import ArgumentError
from ..models.plan import (
    LayerPlan,
    Plan,
    Rates,
    Settings,
    Statistics,
    as_table,
    budget_bytes,
    budget_settings,
    export_gpuidx,
    find_card,
    find_rates,
    find_statistics,
    import_gpuidx,
    make_plan,
    unknown_experts,
)
from ..models.plan.picture import draw, parts
from ..models.plan.plan import GIB
from .options import SPARSITY, Parser, add_model
from .table import columns, facts, output_width

EXAMPLES = """
powerinfer plan model.gguf
powerinfer plan model.gguf --vram-budget 8 --gpu 4070 --cpu-gbps 50
powerinfer plan model.gguf --vram-budget 4,6,8,12 -c 8192
powerinfer plan -m model.gguf --vram-budget 8 --layers -o plan.json --picture plan.png
"""

SWEEP = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 80.0, 141.0)
MOST_ROWS = 20  # of the table of layers; similar ones are put together
BAR, BESIDE_BAR = 40, 26  # characters
Gib = float | list[float]


def add_arguments(parser: Parser) -> None:
    parser.open_with(
        EXAMPLES,
        usage="MODEL [options]",
        more="Without --vram-budget, or with several budgets, a line for each.",
    )
    add_model(parser)
    parser.add_argument(
        "--vram-budget",
        metavar="GIB[,GIB...]",
        help="GPU memory to use, or several to compare; 8+8: of two GPUs",
    )
    group = parser.add_argument_group("what the plan is for")
    group.add_argument(
        "-c",
        "--n-ctx",
        type=int,
        metavar="N",
        default=0,
        help="context size (default: the model's, at most 4096)",
    )
    group.add_argument(
        "-np", "--n-seq", type=int, metavar="N", default=1, help="sequences (default %(default)s)"
    )
    group.add_argument(
        "--n-guesses",
        type=int,
        metavar="N",
        default=0,
        help="of recurrent layers: room for the states behind so many guesses of a draft: --draft-max for each "
        "sequence, 15 at most (default 0: nothing drafts)",
    )
    group.add_argument(
        "-b",
        "--n-batch",
        type=int,
        metavar="N",
        default=0,
        help="prompt tokens computed together (default: 512, up to 2048 where that costs little)",
    )
    group.add_argument(
        "--kv-type", choices=("f32", "f16", "q8_0"), default="f16", help="of K and V (default f16)"
    )
    group.add_argument(
        "--sparsity", choices=SPARSITY, default="auto", help="which neurons are computed (default auto)"
    )
    group.add_argument(
        "--overhead-mib",
        type=float,
        metavar="MIB",
        default=Settings().overhead_bytes / (1 << 20),
        help="memory of driver and libraries (default %(default)g, as measured on one H200)",
    )
    group = parser.add_argument_group("speeds")
    group.add_argument(
        "--gpu", metavar="NAME", default="", help='a card by its name, "4090" (default: the one here)'
    )
    group.add_argument("--gpu-gbps", type=float, metavar="X", help="its memory's rate in GB/s, instead")
    group.add_argument(
        "--cpu-gbps", type=float, metavar="X", help="host memory's rate in GB/s (default: measured)"
    )
    group.add_argument("--pcie-gbps", type=float, metavar="X", help="rate between both in GB/s")
    group.add_argument(
        "--handover-us", type=float, metavar="X", help="GPU to CPU and back, per layer (default 6)"
    )
    group.add_argument(
        "--zero-copy-gbps",
        "--in-place-gbps",  # an older name
        type=float,
        metavar="X",
        help="rate at which the GPU reads weights in host memory while it would wait (default 0: never)",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--layers", action="store_true", help="list every layer")
    group.add_argument("--json", action="store_true", help="print JSON")
    group.add_argument("-o", "--output", metavar="PLAN.json", help="save the plan, for Llama(plan=...)")
    group.add_argument("--picture", metavar="OUT.png", help="draw the plan (png, svg or pdf)")
    group.add_argument("--export-gpuidx", metavar="FILE", help="write the original PowerInfer's split file")
    group.add_argument(
        "--import-gpuidx",
        metavar="FILE",
        help="show what the original's split file stands for, instead of planning",
    )


def main(args: argparse.Namespace) -> int:
    budgets = parse_budgets(args.vram_budget)
    one = args.import_gpuidx is not None or len(budgets) == 1
    if len(budgets) > 1 and args.import_gpuidx:
        raise ArgumentError("--import-gpuidx has one budget, or none")
    for name in ("output", "picture", "export_gpuidx"):
        if getattr(args, name) and not one:
            raise ArgumentError(f"--{name.replace('_', '-')} needs one --vram-budget")
    with Model(args.model, load=False) as model:
        settings = settings_of(args)
        statistics = find_statistics(model, active_share=settings.active_share)
        rates = find_rates(
            gpu=args.gpu,
            gpu_gbps=args.gpu_gbps,
            cpu_gbps=args.cpu_gbps,
            pcie_gbps=args.pcie_gbps,
            handover_us=args.handover_us,
            zero_copy_gbps=args.zero_copy_gbps,
        )
        known: dict[str, Any] = {"settings": settings, "statistics": statistics, "rates": rates}
        cpu = make_plan(model, vram_budget=0, **known)
        if not one:
            if not budgets:
                budgets = default_budgets(args, model, cpu)
            return sweep(args, model, cpu, budgets, known)
        if args.import_gpuidx:
            plan = import_gpuidx(
                args.import_gpuidx, model, vram_budget=_single(budgets[0]) if budgets else None, **known
            )
        else:
            plan = make_plan(model, vram_budget=budgets[0], **known)
        assumed = without_counts(model, budgets[0], plan, known) if budgets else None
    if args.output:
        plan.save(args.output)
    if args.export_gpuidx:
        export_gpuidx(plan, args.export_gpuidx)
    if args.picture:
        draw(plan, args.picture, title=one_line(f"{model.file.path.name}: {headline(plan)}"))
    if args.json:
        more = {"cpu_tokens_per_s": cpu.expected.tokens_per_s}
        print(json.dumps(as_table(plan) | more | as_mixture(plan, assumed)))
    else:
        show(args, model.file.path.name, plan, cpu, assumed)
    return 0


def parse_budgets(text: str | None) -> list[Gib]:
    """GiB, checked; a list where it is of several devices. Raises ArgumentError."""
    budgets: list[Gib] = []
    try:
        for word in text.split(",") if text is not None else []:
            each = [float(part) for part in word.split("+")]
            budgets.append(each if len(each) > 1 else each[0])
    except ValueError:
        raise ArgumentError(
            f"--vram-budget is {text!r}, it must be numbers of GiB with commas between, or + for devices"
        ) from None
    for gib in budgets:
        budget_settings(gib)
    return budgets


def spell(gib: Gib) -> str:
    return "+".join(f"{n:g}" for n in gib) if isinstance(gib, list) else f"{gib:g}"


def _single(gib: Gib) -> float:
    if isinstance(gib, list):
        raise ArgumentError("--import-gpuidx is for one device")
    return gib


def settings_of(args: argparse.Namespace) -> Settings:
    if not 0 <= args.overhead_mib < 1 << 40:
        raise ArgumentError(f"--overhead-mib is {args.overhead_mib:g}, it must be 0 to {(1 << 40) - 1}")
    return Settings(
        n_ctx=args.n_ctx,
        n_seq=args.n_seq,
        n_guesses=args.n_guesses,
        n_batch=args.n_batch,
        type_k=args.kv_type,
        type_v=args.kv_type,
        sparsity=args.sparsity,
        overhead_bytes=int(args.overhead_mib * (1 << 20)),
    )


def default_budgets(args: argparse.Namespace, model: Model, cpu: Plan) -> list[Gib]:
    """Sizes that cards have, up to the first that holds the whole model."""
    sizes = set(SWEEP)
    if args.gpu:
        sizes.add(find_card(args.gpu).gib)
    budgets = sorted(sizes)
    enough = next((i for i, gib in enumerate(budgets) if gib * GIB >= cpu.full_bytes), len(budgets) - 1)
    useful: list[Gib] = [gib for gib in budgets[: enough + 1] if gib * GIB >= cpu.min_bytes]
    return useful or [budgets[enough]]


# ---- several budgets


def sweep(
    args: argparse.Namespace, model: Model, cpu: Plan, budgets: list[Gib], known: dict[str, Any]
) -> int:
    """A line for each budget."""
    plans = [(gib, plan_or_problem(model, gib, cpu, known)) for gib in budgets]
    each = gains(plans, cpu)
    assumed = [
        None if isinstance(plan, str) else without_counts(model, gib, plan, known) for gib, plan in plans
    ]
    if args.json:
        out = [
            {"vram_budget": gib}
            | (
                {"error": plan}
                if isinstance(plan, str)
                else as_table(plan) | {"tokens_per_s_per_gib": gain} | as_mixture(plan, other)
            )
            for (gib, plan), gain, other in zip(plans, each, assumed, strict=True)
        ]
        print(json.dumps({"cpu_tokens_per_s": cpu.expected.tokens_per_s, "plans": out}))
        return 0
    width = output_width()
    for line in facts(about(model.file.path.name, cpu, known["statistics"], known["rates"]), width=width):
        print(line)
    print()
    unit = cpu.model.unit
    rows = [["budget", "tokens/s", "x CPU", "gain/GiB", "used", "attention", unit]]
    rows[0] += ["a layer", "found there", "assumed"] if cpu.model.n_expert else ["computed there"]
    for (gib, plan), gain, other in zip(plans, each, assumed, strict=True):
        small = [f"{spell(gib)} GiB", "too small", *[""] * (len(rows[0]) - 2)]
        rows.append(small if isinstance(plan, str) else sweep_row(gib, plan, cpu, gain, other))
    if not any(assumed) and cpu.model.n_expert:
        rows = [row[:-1] for row in rows]
    for line in columns(rows, right=range(len(rows[0])), width=width):
        print(line)
    print()
    what = "gain/GiB: tokens/s that each GiB more buys. Of the layers those with attention on the GPU, "
    if not cpu.model.n_expert:
        what += "of the neurons those in VRAM, and of the neurons computed for a token those that are."
    else:
        what += "of the experts those with a place in VRAM, in all and in a layer, and found there: of those "
        what += "that a token chooses, "
        what += "by the file's counts and as assumed without any." if any(assumed) else "as assumed above."
    for line in wrapped(f"{what} {comparison(cpu)} Estimates: bytes over rates.", width):
        print(line)
    return 0


def total_gib(gib: Gib) -> float:
    return sum(gib) if isinstance(gib, list) else gib


def gains(plans: list[tuple[Gib, Plan | str]], cpu: Plan) -> list[float | None]:
    """Tokens per second that each GiB more buys, from the budget before (or the CPU alone) to each."""
    out: list[float | None] = []
    before = 0.0, cpu.expected.tokens_per_s
    for gib, plan in plans:
        more = total_gib(gib) - before[0]
        if isinstance(plan, str):
            out.append(None)
            continue
        out.append((plan.expected.tokens_per_s - before[1]) / more if more > 0 else None)
        before = total_gib(gib), plan.expected.tokens_per_s
    return out


def without_counts(model: Model, gib: Gib, plan: Plan, known: dict[str, Any]) -> Plan | None:
    """Of a mixture whose experts' uses are known: the plan if they were not."""
    if not plan.model.n_expert or plan.statistics_kind == "heuristic":
        return None
    return make_plan(model, vram_budget=gib, **known | {"statistics": unknown_experts(model)})


def as_mixture(plan: Plan, assumed: Plan | None) -> dict[str, Any]:
    """What JSON has of a mixture besides: how many experts of each layer have a place, which share of those
    that a token chooses is expected there, and the same if nothing was known."""
    if not plan.model.n_expert:
        return {}
    out: dict[str, Any] = {"places": [len(y.hot) for y in plan.layers], "hit_rate": plan.carried}
    other = plan if plan.statistics_kind == "heuristic" else assumed
    if other is not None:
        out["assumed"] = {"hit_rate": other.carried, "tokens_per_s": other.expected.tokens_per_s}
    return out


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


def plan_or_problem(model: Model, gib: Gib, cpu: Plan, known: dict[str, Any]) -> Plan | str:
    """The plan, or why the budget is too small for one."""
    try:
        return make_plan(model, vram_budget=gib, **known)
    except ArgumentError as error:
        if min(budget_bytes(n) for n in (gib if isinstance(gib, list) else [gib])) >= cpu.min_bytes:
            raise
        return str(error)


def comparison(cpu: Plan) -> str:
    return (
        f"The CPU alone does {cpu.expected.tokens_per_s:.1f} tokens/s, {cpu.min_bytes / GIB:.2f} GiB are the "
        f"least that puts anything on the GPU, {cpu.full_bytes / GIB:.2f} GiB hold the whole model."
    )


def sweep_row(gib: Gib, plan: Plan, cpu: Plan, gain: float | None, assumed: Plan | None) -> list[str]:
    n_device = sum(y.on_device for y in plan.layers)
    row = [
        f"{spell(gib)} GiB",
        f"{plan.expected.tokens_per_s:.1f}",
        f"{cpu.expected.total_us / plan.expected.total_us:.1f}",
        "" if gain is None else f"{gain:+.1f}",
        f"{plan.bytes.total / GIB:.2f}",
        f"{n_device}/{len(plan.layers)}",
        f"{plan.hot_share:.0%}",
    ]
    if not plan.model.n_expert:
        return [*row, f"{plan.carried:.0%}"]
    counts = [len(y.hot) for y in plan.layers]
    row += [span(min(counts), max(counts)), f"{plan.carried:.0%}"]
    return [*row, "" if assumed is None else f"{assumed.carried:.0%}"]


# ---- one plan


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
