"""`powerinfer plan MODEL --vram-budget GIB`: what a budget of GPU memory would hold, and the speed to expect.

No GPU is needed: sizes are counted from the file, speeds from measured, given or published rates.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from .._engine.devices import budget_bytes
from .._engine.session import Model
from .._text.table import columns, facts, output_width
from .._text.terminal import one_line
from ..errors import ArgumentError
from ..models.plan import (
    Plan,
    Settings,
    as_table,
    budget_settings,
    export_gpuidx,
    find_card,
    find_rates,
    find_statistics,
    import_gpuidx,
    make_plan,
    unknown_experts,
)
from ..models.plan.picture import draw
from ..models.plan.plan import GIB
from .options import SPARSITY, Parser, add_model
from .plan_text import about, comparison, headline, show, span, wrapped

EXAMPLES = """
powerinfer plan model.gguf
powerinfer plan model.gguf --vram-budget 8 --gpu 4070 --cpu-gbps 50
powerinfer plan model.gguf --vram-budget 4,6,8,12 -c 8192
powerinfer plan -m model.gguf --vram-budget 8 --layers -o plan.json --picture plan.png
"""

SWEEP = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 80.0, 141.0)
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
        help="of recurrent layers: room for the states behind so many guesses of a draft: --draft-max for "
        "each sequence, 15 at most (default 0: nothing drafts)",
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
                budgets = default_budgets(args, cpu)
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


def default_budgets(args: argparse.Namespace, cpu: Plan) -> list[Gib]:
    """Sizes that cards have, up to the first that holds the whole model."""
    sizes = set(SWEEP)
    if args.gpu:
        sizes.add(find_card(args.gpu).gib)
    budgets = sorted(sizes)
    enough = next((i for i, gib in enumerate(budgets) if gib * GIB >= cpu.full_bytes), len(budgets) - 1)
    useful: list[Gib] = [gib for gib in budgets[: enough + 1] if gib * GIB >= cpu.min_bytes]
    return useful or [budgets[enough]]


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


def plan_or_problem(model: Model, gib: Gib, cpu: Plan, known: dict[str, Any]) -> Plan | str:
    """The plan, or why the budget is too small for one."""
    try:
        return make_plan(model, vram_budget=gib, **known)
    except ArgumentError as error:
        if min(budget_bytes(n) for n in (gib if isinstance(gib, list) else [gib])) >= cpu.min_bytes:
            raise
        return str(error)


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
