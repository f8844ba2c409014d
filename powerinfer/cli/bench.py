"""`powerinfer bench MODEL`: tokens per second for prompts (pp) and decode (tg), beside what the memory gives.

A decode step costs the bytes that it must read, so the figure to compare between machines and days is the
share of the measured read rate that is reached, not tokens per second. The engine counts the bytes of every
step itself; the read rate is measured before and after each repetition, in the same run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .. import __version__, machine
from ..errors import ArgumentError
from ..file import ModelFile, find_model
from ..session import Model, Session
from .options import MODEL_HELP, add_compute_arguments
from .table import columns
from .terminal import Bar, harmless

READ_BYTES = 2 << 30  # more than any last-level cache
WARM_UP = 16  # tokens that a decode test begins with, not measured


@dataclass(frozen=True, kw_only=True)
class Result:
    """One test: medians over the repetitions."""

    test: str
    """"pp512" or "tg128"."""
    tokens_per_s: float
    spread: float
    """Standard deviation of tokens_per_s over the repetitions."""
    bytes_per_token: float
    read_gb_s: float
    """Rate at which the engine read."""
    ceiling_gb_s: float
    """The memory's read rate on the same threads, measured in between."""
    share: float
    """read_gb_s / ceiling_gb_s, pair by pair."""
    active: float | None
    """Share of the FFN's neurons whose product was not zero; None for prompts."""
    computed: float | None
    """Share of the FFN's neurons whose rows were read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "-p",
        "--n-prompt",
        type=int,
        metavar="N",
        default=512,
        help="prompt tokens; 0: no prompt test (default 512)",
    )
    parser.add_argument(
        "-n",
        "--n-gen",
        type=int,
        metavar="N",
        default=32,
        help="decoded tokens; 0: no decode test (default 32)",
    )
    parser.add_argument("-r", "--repetitions", type=int, metavar="N", default=3, help="default 3")
    add_compute_arguments(parser, n_batch=512)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def measure(
    session: Session, name: str, n_prompt: int, n_gen: int, repetitions: int, ceiling_bytes: int
) -> Result:
    """Times one test on random tokens: a prompt is one feed; decode is a token per feed, after a warm-up."""
    rng = np.random.default_rng(1)
    info, threads = session.model.info, session.info.n_threads

    def tokens(n: int) -> Any:
        return rng.integers(0, info.n_vocab, n, dtype=np.int32)

    def once() -> tuple[float, int, float, float]:
        session.drop()
        n_bytes, active, computed, pairs = 0, 0, 0, 0
        if n_prompt:
            start = time.perf_counter()
            session.feed(tokens(n_prompt))
            return time.perf_counter() - start, session.last_total.bytes, 0.0, 0.0
        session.feed(tokens(WARM_UP))
        seconds = 0.0
        for token in tokens(n_gen):
            start = time.perf_counter()
            session.feed([int(token)])
            seconds += time.perf_counter() - start
            n_bytes += session.last_total.bytes
            steps = session.last_step
            active += sum(s.n_active for s in steps)
            computed += sum(s.n_computed for s in steps)
            pairs += sum(s.n_sparse for s in steps) * info.n_ff
        return seconds, n_bytes, active / max(pairs, 1), computed / max(pairs, 1)

    def ceiling() -> float:
        return machine.read_rate(threads, ceiling_bytes, 2)

    once()  # reads the weights in, wakes the threads
    n = n_prompt or n_gen
    speeds, rates, ceilings, last = [], [], [ceiling()], (0.0, 0, 0.0, 0.0)
    for _ in range(repetitions):
        last = once()
        speeds.append(n / last[0])
        rates.append(last[1] / last[0])
        ceilings.append(ceiling())
    shares = [r / ((a + b) / 2) for r, a, b in zip(rates, ceilings, ceilings[1:], strict=False)]
    return Result(
        test=name,
        tokens_per_s=statistics.median(speeds),
        spread=statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        bytes_per_token=last[1] / n,
        read_gb_s=statistics.median(rates) / 1e9,
        ceiling_gb_s=statistics.median(ceilings) / 1e9,
        share=statistics.median(shares),
        active=None if n_prompt else last[2],
        computed=None if n_prompt else last[3],
    )


def logits_hash(session: Session) -> str:
    """A digest of the logits after 8 fixed tokens: if it stays, a change of code changed no bit."""
    session.drop()
    session.feed([1 + i % (session.model.info.n_vocab - 1) for i in range(8)])
    return hashlib.sha256(session.logits().tobytes()).hexdigest()[:16]


def main(args: argparse.Namespace) -> int:
    if args.repetitions < 1:
        raise ArgumentError(f"repetitions is {args.repetitions}, at least 1 is needed")
    if args.n_prompt < 0 or args.n_gen < 0:
        raise ArgumentError("-p and -n cannot be negative")
    if args.n_prompt + args.n_gen == 0:
        raise ArgumentError("nothing to measure: -p 0 and -n 0")
    path = find_model(args.model)
    n_ctx = max(args.n_prompt, args.n_gen + WARM_UP)
    with (
        ModelFile(path) as file,
        Bar(f"loading {args.model}") as bar,
        Model(file, predictor=args.predictor, progress=bar) as model,
        Session(
            model, n_ctx=n_ctx, n_batch=args.n_batch, n_threads=args.n_threads or 0, sparsity=args.sparsity
        ) as session,
    ):
        if args.threshold is not None:
            session.set_threshold(args.threshold)
        info = session.info
        about = {
            "version": __version__,
            "build": machine.build_info(),
            "cpu": machine.cpu_name(),
            "isa": machine.isa(),
            "threads": info.n_threads,
            "model": path.name,
            "model_bytes": file.info.n_bytes,
            "architecture": model.info.architecture,
            "sparsity": info.sparsity,
            "logits": logits_hash(session),
        }
        results, n_bytes = [], machine.sample_bytes(READ_BYTES)
        if args.n_prompt:
            name = f"pp{args.n_prompt}"
            results.append(measure(session, name, args.n_prompt, 0, args.repetitions, n_bytes))
        if args.n_gen:
            name = f"tg{args.n_gen}"
            results.append(measure(session, name, 0, args.n_gen, args.repetitions, n_bytes))
    if args.json:
        print(json.dumps({**about, "results": [asdict(r) for r in results]}))
    else:
        show(about, results, n_bytes)
    return 0


def show(about: dict[str, Any], results: list[Result], n_bytes: int) -> None:
    """Prints the results for people, in lines of at most 80 characters if the names are not too long."""
    size = about["model_bytes"]
    shown = f"{size / 2**30:.2f} GiB" if size >= 1 << 30 else f"{size / 2**20:.1f} MiB"
    print(harmless(f"{about['model']}: {about['architecture']}, {shown}, {about['sparsity']}"))
    print(f"{about['cpu']}, {about['threads']} threads, {about['isa']}")
    print(f"{about['build']}; logits {about['logits']}\n")
    rows = [["test", "tokens/s", "MB/token", "GB/s", "ceiling", "share", "computed", "active"]]
    for r in results:
        decode = r.active is not None and r.computed is not None
        rows.append(
            [
                r.test,
                f"{r.tokens_per_s:.2f} ± {r.spread:.2f}",
                f"{r.bytes_per_token / 1e6:.1f}",
                f"{r.read_gb_s:.1f}" if decode else "",
                f"{r.ceiling_gb_s:.1f}",
                f"{r.share:.0%}" if decode else "",
                f"{r.computed:.1%}" if decode else "",
                f"{r.active:.1%}" if decode else "",
            ]
        )
    for line in columns(rows, right=range(1, 8)):
        print(line)
    if size < n_bytes // 4:
        print(
            "\nThe model may fit in the processor's cache, then its share of the memory's\n"
            "read rate says little."
        )
