"""Tokens per second with a GPU, beside what its memory, the host's memory and PCIe can do.

    python scripts/bench_gpu.py bamboo-8g llama-dense llama-sparse --models /dev/shm --json gpu.json

Rows are chosen by name (none: all of them; --list says what they are). A row's model is a random one of a
published shape with planted sparsity (make_model.py), written into --models, shared by neighbouring rows, and
deleted when the next row needs another, unless --keep is given. A row opens the model under its budget by the
plan that `Llama` makes, feeds a prompt of 64 tokens, decodes one token at a time, and measures prompts. In
each row, before and after, the rates at which the GPU reads its memory, the CPU the host's, and PCIe carries
bytes are measured: what a row reaches is to be read beside them. A goal of a row in which the CPU computes is
for a CPU that reads 100 GB/s, and is shown for the rate that was measured, too.

Of a mixture of experts (a random one, by make_mixture.py) it is also said which share of the experts that
tokens used was found on the GPU, and what the bytes allow where the CPU alone reads the others.

With --busy decoding is timed again beside so many programs that keep a core busy each; what the cores that
are left allow is the quiet rate times 1 - busy / cores.

A plan may be for several GPUs, which have the budget each. Of replicas each has a session, a GPU and a part
of the threads of its own; they decode at the same time, and their rates are added up.

The share is the time that all bytes of a token would take at the rate of the GPU's memory, over the time that
the token took: how near a resident model is to its ceiling, and what a larger GPU could gain.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from gpu_rows import GOAL_CPU, ROWS, Row, make_model

from powerinfer import Llama
from powerinfer._engine import machine
from powerinfer._engine.session import Model, Session
from powerinfer._llama.online import FIRST
from powerinfer.bench import commit, expert_bytes
from powerinfer.errors import PowerInferError
from powerinfer.models.plan import Plan, Settings, make_plan
from powerinfer.models.plan.rates import device_rates

GIB = 1 << 30


@dataclass(frozen=True)
class Ceilings:
    """GB/s, and on how many threads the CPU read."""

    gpu: float
    cpu: float
    copy: float
    in_place: float
    threads: int


def measure_ceilings(threads: int) -> Ceilings:
    facts = machine.device_facts("cuda", 0, measure=True)
    cpu = machine.read_rate(threads, machine.sample_bytes(1 << 30), 2)
    return Ceilings(
        gpu=facts.read_bytes_per_s / 1e9,
        cpu=cpu / 1e9,
        copy=facts.copy_bytes_per_s / 1e9,
        in_place=facts.zero_copy_bytes_per_s / 1e9,
        threads=threads,
    )


def used_mib() -> list[int]:
    """Of each GPU's memory, as its driver says; nothing: it does not."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return [
            int(n) for n in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        ]
    except (OSError, subprocess.CalledProcessError, ValueError):
        return []


def feed_prompt(s: Session, ids: np.ndarray[Any, Any]) -> float:
    s.cut(0)
    start = time.perf_counter()
    s.feed(ids)
    return time.perf_counter() - start


def summary(plan: Plan) -> dict[str, Any]:
    return {
        "layers_on_gpu": sum(layer.on_device for layer in plan.layers),
        "n_layer": len(plan.layers),
        "hot_share": plan.hot_share,
        "carried": plan.carried,
        "n_batch": plan.settings.n_batch,
        "in_place": sum(len(layer.pcie) for layer in plan.layers),
        "head_on_gpu": plan.head_on_device,
        "gib": plan.bytes.total / GIB,
        "expected_tokens_per_s": plan.expected.tokens_per_s,
    }


@dataclass(frozen=True)
class Experts:
    """How the experts of a mixture were used while tokens were timed."""

    hit_rate: float
    """Share of the uses whose expert was on the GPU."""
    in_place_rate: float
    """The same of those whose expert the GPU read in host memory."""
    mb_used: float
    """Of the experts that a token uses."""
    mb_resident: float
    """Of those, on the GPU."""
    copies_per_token: float
    mb_copied_per_token: float


def count_experts(s: Session, model: Model) -> tuple[int, ...]:
    """Uses, those on the GPU, those read in place, copies and their bytes, since the session was opened."""
    if not model.info.n_expert:
        return 0, 0, 0, 0, 0
    layers = s.experts()
    return (
        sum(layer.n_routes for layer in layers),
        sum(layer.n_resident for layer in layers),
        sum(layer.n_zero_copy for layer in layers),
        sum(layer.n_copies for layer in layers),
        sum(layer.copied_bytes for layer in layers),
    )


def expert_uses(model: Model, before: tuple[int, ...], after: tuple[int, ...], n: int) -> Experts | None:
    """Between two counts, over n tokens."""
    if not model.info.n_expert:
        return None
    routes, resident, in_place, copies, copied = (b - a for a, b in zip(before, after, strict=True))
    used = expert_bytes(model) / 1e6
    hit_rate = resident / routes if routes else 0.0
    in_place_rate = in_place / routes if routes else 0.0
    return Experts(hit_rate, in_place_rate, used, used * hit_rate, copies / n, copied / 1e6 / n)


HANDOVER_US = 30
"""A layer, of the limit that bytes set."""


def limit_ms(mb: float, experts: Experts, gpu: float, cpu: float, n_layer: int) -> float:
    """The time of a token by its bytes (MB) and rates (GB/s), where the GPU reads all but the experts that it
    does not have, and these the CPU alone."""
    missing = experts.mb_used - experts.mb_resident
    handover = HANDOVER_US * 1e-3 * n_layer if missing > 0 else 0.0
    return (mb - missing) / gpu + missing / cpu + handover


def by_sides(s: Session, model: Model, resident: bool) -> dict[str, float]:
    """Of the last token: bytes that each side read, in MB, and the CPU's time in its neurons, in ms."""
    steps = s.last_step
    row = model.info.n_embd
    cpu_us = 0.0 if resident else sum(step.ffn_us for step in steps)
    total = s.last_total
    return {
        "mb": total.bytes / 1e6,
        "cpu_ms": cpu_us * 1e-3,
        "active": float(np.mean([step.n_active for step in steps])),
        "active_gpu": float(np.mean([step.n_active_device for step in steps])),
        "foreseen": float(np.mean([step.n_foreseen for step in steps])),
        "n_embd": float(row),
    }


@contextmanager
def busy_cores(n: int) -> Iterator[None]:
    """Other programs that have n cores' time."""
    program = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(program) for _ in range(n)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


SETTLE_S = 1.0
"""How long decoding goes on beside busy cores before it is timed."""


def step(s: Session, row: Row, rng: np.random.Generator, n: int = 0) -> float:
    """Seconds of one more token of each sequence, or of the first n."""
    sequences = range(n or row.n_seq)
    if max(map(s.length, sequences)) > row.depth + 500:
        for seq in sequences:
            s.cut(row.depth, seq=seq)
    ids = rng.integers(3, s.model.info.n_vocab - 1, len(sequences), dtype=np.int32)
    start = time.perf_counter()
    s.feed(ids, seq=list(sequences), want_logits=True)
    return time.perf_counter() - start


def measure_busy(s: Session, row: Row, n_tokens: int, busy: Sequence[int]) -> dict[int, Any]:
    """Tokens per second, the mean and the median step's, and the longest steps, by how many cores are busy; 0
    first."""
    rng = np.random.default_rng(2)
    rates: dict[int, Any] = {}
    for n in (0, *busy):
        with busy_cores(n):
            end = time.perf_counter() + SETTLE_S
            while time.perf_counter() < end:
                step(s, row, rng)
            times = [step(s, row, rng) for _ in range(n_tokens)]
        mean, median = row.n_seq * n_tokens / sum(times), row.n_seq / statistics.median(times)
        rates[n] = {
            "mean_tokens_per_s": mean,
            "median_tokens_per_s": median,
            "longest_ms": [1e3 * seconds for seconds in sorted(times)[-5:]],
        }
    return rates


def measure_widths(s: Session, row: Row) -> dict[int, float]:
    """Tokens per second by the number of sequences, by the fastest fifth of the steps: what other programs of
    the host take is no property of a number."""
    rng, times = np.random.default_rng(4), {n: list[float]() for n in range(1, row.n_seq + 1)}
    for turn in range(4):
        for n in sorted(times, reverse=turn % 2 == 1):
            for seq in range(n):
                s.cut(row.depth, seq=seq)
            steps = [step(s, row, rng, n) for _ in range(WIDTH_STEPS)]
            times[n] += steps[2:]  # the first ones of a number may record a graph
    return {n: n / sorted(own)[len(own) // 5] for n, own in times.items()}


WIDTH_STEPS = 8


def fewer(widths: dict[int, float]) -> dict[int, float]:
    """Numbers of sequences that make fewer tokens/s than one less, and by which share."""
    return {n: 1 - rate / widths[n - 1] for n, rate in widths.items() if n > 1 and rate < widths[n - 1]}


def measure_plans(row: Row, path: Path, threads: int) -> list[dict[str, float]]:
    """What a plan expects, and what its first tokens made; before and after these corrected it."""
    out = []
    with Llama(path, vram_budget=row.budget, n_ctx=512, n_threads=threads, verbose=False) as llm:
        for _ in range(3):
            llm.create_completion([1], max_tokens=FIRST + 20, temperature=1.0)
            plan = llm.plan
            assert plan is not None
            measured = plan.expected.measured
            out.append(
                {
                    "expected_tokens_per_s": plan.expected.tokens_per_s,
                    "measured_tokens_per_s": measured.tokens_per_s if measured else 0,
                    "hot_share": plan.hot_share,
                }
            )
    return out


@contextmanager
def others_decode(others: Sequence[Session], row: Row) -> Iterator[list[list[float]]]:
    """Replicas that decode meanwhile, and the seconds of each one's steps."""
    times: list[list[float]] = [[] for _ in others]
    ended = threading.Event()

    def decode(s: Session, own: list[float]) -> None:
        rng = np.random.default_rng(3)
        while not ended.is_set():
            own.append(step(s, row, rng))

    threads = [threading.Thread(target=decode, args=pair) for pair in zip(others, times, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield times
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def measure(
    row: Row, path: Path, threads: int, n_tokens: int, idle: Sequence[int], busy: Sequence[int] = ()
) -> dict[str, Any]:
    """idle: MiB that each GPU's memory held before this process used it."""
    before = measure_ceilings(threads)
    n_gpus = max(row.gpus, row.replicas)
    facts = [machine.device_facts("cuda", i, measure=True) for i in range(n_gpus)]
    n_ctx = max(*row.prompts, row.depth) + 512 * row.n_seq + row.depth * (row.n_seq - 1)
    settings = Settings(n_ctx=n_ctx, n_seq=row.n_seq, n_batch=row.n_batch, sparsity=row.sparsity)
    rng = np.random.default_rng(1)
    with Model(path) as model:
        rates = device_rates(facts, zero_copy=row.zero_copy)
        budgets = [row.budget] * row.gpus
        plan = make_plan(model, vram_budget=budgets, settings=settings, rates=rates)
        start = time.perf_counter()
        with ExitStack() as stack:
            sessions = [
                stack.enter_context(
                    Session(
                        model,
                        plan=plan.native(model),
                        device=[f"cuda:{i + k}" for k in range(row.gpus)],
                        n_ctx=settings.n_ctx,
                        n_batch=plan.settings.n_batch,
                        sparsity=row.sparsity,
                        n_threads=max(threads // row.replicas, 1),
                        n_seq=row.n_seq,
                        look_ahead=row.look_ahead,
                    )
                )
                for i in range(row.replicas)
            ]
            s = sessions[0]
            open_s = time.perf_counter() - start
            high = model.info.n_vocab - 1

            def draw(n: int) -> np.ndarray[Any, Any]:
                return rng.integers(3, high, n)

            prompts = {}
            for n in row.prompts:
                ids = draw(n)
                prompts[n] = n / min(feed_prompt(s, ids) for _ in range(3))
            for one in sessions:
                feed_prompt(one, draw(row.depth))
                for other in range(1, row.n_seq):
                    one.feed(draw(row.depth), seq=other)
            sides = []
            times: list[float] = []
            resident = all(len(layer.hot) == model.info.n_placed for layer in plan.layers)
            counted = count_experts(s, model)
            with others_decode(sessions[1:], row) as of_others:
                for i in range(n_tokens + row.n_warm):
                    if i == row.n_warm:
                        counted = count_experts(s, model)
                    seconds = step(s, row, rng)
                    if i >= row.n_warm:
                        times.append(seconds)
                        sides.append(by_sides(s, model, resident))
            experts = expert_uses(model, counted, count_experts(s, model), n_tokens * row.n_seq)
            beside = measure_busy(s, row, n_tokens, busy) if busy else {}
            widths = measure_widths(s, row) if row.widths else {}
            n_layer = model.info.n_layer
            used = sum(now - then for now, then in zip(used_mib()[:n_gpus], idle, strict=False))
            own = sum(one.info.n_device_bytes for one in sessions) / GIB
    after = measure_ceilings(threads)
    corrected = measure_plans(row, path, threads) if row.counted else []
    all_times = [times, *(own[row.n_warm :] for own in of_others)]
    ms = 1e3 * statistics.median(times)
    side = {name: statistics.median(one[name] for one in sides) for name in sides[0]}
    best = {name: max(getattr(before, name), getattr(after, name)) for name in ("gpu", "cpu")}
    gpu_ms = 1e3 * (side["mb"] / 1e3) / best["gpu"]
    of_experts: dict[str, Any] | None = None
    if experts is not None:
        limit = limit_ms(side["mb"], experts, best["gpu"], best["cpu"], n_layer)
        of_experts = asdict(experts) | {"mb_rest": side["mb"] - experts.mb_used, "limit_ms": limit}
    return {
        "tokens_per_s": sum(row.n_seq / statistics.median(own) for own in all_times),
        "mean_tokens_per_s": sum(row.n_seq / statistics.fmean(own) for own in all_times),
        "busy": beside,
        "widths": widths,
        "plans": corrected,
        "goal_here": row.goal * (1 if resident else (before.cpu + after.cpu) / 2 / GOAL_CPU),
        "best_tokens_per_s": sum(row.n_seq / min(own) for own in all_times),
        "ms": ms,
        "cpu_ms": side["cpu_ms"],
        "mb_per_token": side["mb"],
        "active": side["active"],
        "active_gpu": side["active_gpu"],
        "foreseen": side["foreseen"],
        "experts": of_experts,
        "share_if_all_on_gpu": gpu_ms / ms,
        "prompt_tokens_per_s": prompts,
        "open_s": open_s,
        "gpu_used_gib": used / 1024,
        "gpu_counted_gib": own,
        "plan": summary(plan),
        "ceilings": {"before": asdict(before), "after": asdict(after)},
    }


def budget(row: Row) -> str:
    return f"{row.budget:g} GiB" + (" each" if row.gpus * row.replicas > 1 else "")


def show(name: str, row: Row, r: dict[str, Any]) -> None:
    p, a, b = r["plan"], r["ceilings"]["before"], r["ceilings"]["after"]
    prompts = ", ".join(f"{n}: {rate:,.0f}" for n, rate in r["prompt_tokens_per_s"].items())
    goal = f"; goal {row.goal:g}, at this CPU's rate {r['goal_here']:.0f}" if row.goal else ""
    unit = "experts" if r["experts"] else "neurons"
    print(
        f"{name}: {row.what}, {budget(row)}\n"
        f"  {r['tokens_per_s']:.1f} tokens/s (mean {r['mean_tokens_per_s']:.1f}, "
        f"best {r['best_tokens_per_s']:.1f}{goal}), "
        f"{r['ms']:.3f} ms a token, CPU at work {r['cpu_ms']:.3f} ms, {r['mb_per_token']:.0f} MB a token; "
        f"prompts {prompts} tokens/s\n"
        f"  plan: {p['layers_on_gpu']} of {p['n_layer']} layers, {p['hot_share']:.0%} of the {unit}, "
        f"{p['carried']:.0%} of those computed, {p['in_place']} read in place, {p['gib']:.2f} GiB, "
        f"{p['expected_tokens_per_s']:.0f} tokens/s expected; {p['n_batch']} tokens of a prompt at a time\n"
        f"  GPU memory: {r['gpu_used_gib']:.2f} GiB by the driver, {r['gpu_counted_gib']:.2f} counted; "
        f"opened in {r['open_s']:.1f} s; active {r['active']:.0f} a layer, {r['active_gpu']:.0f} on the GPU, "
        f"{r['foreseen']:.0f} fetched ahead\n"
        f"  ceilings, GB/s, before and after: GPU {a['gpu']:.0f} {b['gpu']:.0f}, CPU {a['cpu']:.0f} "
        f"{b['cpu']:.0f} on {a['threads']} threads, PCIe copy {a['copy']:.1f} {b['copy']:.1f}, "
        f"in place {a['in_place']:.1f} {b['in_place']:.1f}; all bytes at the GPU's rate would be "
        f"{r['share_if_all_on_gpu']:.0%} of the time",
        flush=True,
    )
    quiet = r["busy"].get(0, {}).get("mean_tokens_per_s", 1)
    for n, rate in r["busy"].items():
        print(
            f"  {n} of {machine.cores()} cores busy: mean {rate['mean_tokens_per_s']:.1f} tokens/s, "
            f"{rate['mean_tokens_per_s'] / quiet:.2f} of the quiet one ({1 - n / machine.cores():.2f} of the "
            f"cores are left), median {rate['median_tokens_per_s']:.1f}, longest steps "
            f"{', '.join(f'{ms:.1f}' for ms in rate['longest_ms'])} ms",
            flush=True,
        )
    if widths := r["widths"]:
        shown = ", ".join(f"{n}: {rate:,.0f}" for n, rate in widths.items())
        less = ", ".join(f"{n} ({share:.1%})" for n, share in fewer(widths).items()) or "none"
        print(f"  sequences: {shown}\n  fewer tokens/s than with one less: {less}", flush=True)
    for p in r["plans"]:
        print(
            f"  a plan as `Llama` has it, {p['hot_share']:.0%} of the neurons: "
            f"{p['expected_tokens_per_s']:.0f} tokens/s expected, {p['measured_tokens_per_s']:.0f} measured",
            flush=True,
        )
    e = r["experts"]
    if e and row.n_seq == 1:
        print(
            f"  experts: {e['mb_used']:.0f} MB a token, {e['mb_rest']:.0f} MB of the rest; "
            f"{e['hit_rate']:.1%} of the uses found on the GPU, {e['in_place_rate']:.1%} read in "
            f"place, {e['copies_per_token']:.2f} a token copied "
            f"there ({e['mb_copied_per_token']:.1f} MB); these bytes and {HANDOVER_US} us a layer allow "
            f"{1e3 / e['limit_ms']:.0f} tokens/s, of which this is {e['limit_ms'] / r['ms']:.0%}",
            flush=True,
        )
    elif e:
        print(f"  experts: {e['hit_rate']:.1%} found on the GPU", flush=True)


def earlier(path: Path | None, gpu: str) -> dict[str, Any]:
    """What is to be written, with the rows that the file has already. Raises ValueError if it is of another
    machine, or none of these."""
    here: dict[str, Any] = {"cpu": machine.cpu_name(), "isa": machine.isa(), "gpu": gpu, "rows": {}}
    if path is None or not path.exists():
        return here
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not isinstance(found.get("rows"), dict):
        raise ValueError(f"{path} has no results of this script")
    for name in ("gpu", "cpu", "isa"):
        if found.get(name) != here[name]:
            raise ValueError(
                f"{path} is of another machine: its {name} is {found.get(name)}, not {here[name]}"
            )
    rows: dict[str, Any] = {
        name: {"commit": found.get("commit", "")} | row for name, row in found["rows"].items()
    }
    return here | {"rows": rows}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("rows", nargs="*", metavar="ROW", help="names of rows (default: all)")
    p.add_argument("--list", action="store_true", help="say what the rows are")
    p.add_argument("--models", type=Path, default=Path("/dev/shm"), metavar="DIR", help="where models go")
    p.add_argument("--keep", action="store_true", help="leave the last model there")
    p.add_argument("--threads", type=int, default=0, metavar="N", help="default: cores less one")
    p.add_argument("--tokens", type=int, default=96, metavar="N", help="decoded per row (default 96)")
    p.add_argument(
        "--prompts", type=int, nargs="+", default=[], metavar="N", help="lengths, instead of the rows'"
    )
    p.add_argument("--no-zero-copy", action="store_true", help="the GPU reads no weights in host memory")
    p.add_argument("--no-look-ahead", action="store_true", help="the CPU fetches nothing by a guess")
    p.add_argument(
        "--busy", type=int, nargs="+", default=[], metavar="N", help="decode again beside N busy cores"
    )
    p.add_argument(
        "--json", type=Path, metavar="FILE", help="results as JSON; rows of it that are not measured stay"
    )
    a = p.parse_args()
    if a.list:
        for name, row in ROWS.items():
            print(f"{name}: {row.what}, {budget(row)}")
        return 0
    unknown = [name for name in a.rows if name not in ROWS]
    if unknown:
        p.error(f"no row is called {unknown[0]}; there are {', '.join(ROWS)}")
    threads = a.threads or max(machine.cores() - 1, 1)
    now = {"commit": commit(), "date": date.today().isoformat()}
    path = None
    idle = used_mib()
    try:
        results = earlier(a.json, machine.device_facts("cuda", 0).name)
        for name in a.rows or ROWS:
            row = replace(ROWS[name], zero_copy=not a.no_zero_copy, look_ahead=not a.no_look_ahead)
            row = replace(row, prompts=tuple(a.prompts) or row.prompts)
            path = make_model(row, a.models)
            results["rows"][name] = asdict(row) | now | measure(row, path, threads, a.tokens, idle, a.busy)
            if a.json:
                a.json.write_text(json.dumps(results, indent=1) + "\n")
            show(name, row, results["rows"][name])
    except BrokenPipeError:  # who reads the rows has enough of them
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (PowerInferError, OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"bench_gpu.py: {error}", file=sys.stderr)
        return 1
    finally:
        if path is not None and not a.keep:
            path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
