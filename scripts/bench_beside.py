"""How long others' tokens take while a prompt is read, without HTTP: a scheduler with --streams streams, and
one request after the other with a prompt of --prompt tokens.

    python scripts/bench_beside.py MODEL.gguf --vram-budget 70 --streams 1 8 64

For each number of streams it prints the milliseconds from token to token of a stream: quiet, before and
behind a prompt, and beside it the mean, how many times the quiet one that is, median, p90, p95, p99 and the
longest, the means of the first and of the last tenth; how long the prompt took, and how many steps read how
much of it, or had layers of a part of how much beside them. The first prompt of a number is the first that
the engine reads beside so many: nothing is learnt.

With --newcomers short requests come now and then, too, one after the other, and the milliseconds to their
first token are told, quiet and beside a prompt.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter

import numpy as np
import numpy.typing as npt

from powerinfer._engine import machine
from powerinfer._engine.choice import Choice
from powerinfer._engine.devices import choose_devices
from powerinfer._engine.engine import Engine
from powerinfer._engine.file import ModelFile
from powerinfer._engine.request import Stream
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.scheduler import Scheduler
from powerinfer._engine.session import Model, Session
from powerinfer._llama.loader import Loader

ENDS = frozenset[int]()
NEW_TOKENS = 16
NEW_S = 0.03
"""Between two newcomers, on average."""


class Timed(Stream):
    """Notes when its tokens came."""

    at: list[float]

    def put(self, token: int, is_end: bool, now: float) -> None:
        self.at.append(now)
        super().put(token, is_end, now)


def submit(scheduler: Scheduler, rng: np.random.Generator, n_prompt: int, limit: int | None) -> Timed:
    n_vocab = scheduler.engine.session.model.info.n_vocab
    ids = rng.integers(3, n_vocab, n_prompt, dtype=np.int32)
    choice = Choice(sampler=Sampler(Sampling(temperature=0), n_vocab), ends=ENDS)
    with scheduler.engine.changed:  # no token comes before it is one that notes it
        stream = scheduler.submit(ids, choice, limit=limit)
        stream.__class__ = Timed
        assert isinstance(stream, Timed)
        stream.at = []
    return stream


def between(stream: Timed, begin: float, end: float) -> npt.NDArray[np.float64]:
    """Milliseconds from token to token of those that came in between."""
    at = np.array(stream.at)
    return np.diff(at[(at >= begin) & (at <= end)]) * 1000


def quiet(stream: Timed, seconds: float) -> float:
    begin = time.monotonic()
    time.sleep(seconds)
    if stream.reason is not None:
        raise SystemExit("a stream came to its end: its context is full")
    return float(np.mean(between(stream, begin, time.monotonic())))


class Newcomers:
    """Short requests, one after the other, until told to stop."""

    def __init__(self, scheduler: Scheduler, rng: np.random.Generator) -> None:
        self._scheduler, self._rng = scheduler, rng
        self._is_over = threading.Event()
        self._ms: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(self._rng.exponential(NEW_S)):
            begin = time.monotonic()
            stream = submit(self._scheduler, self._rng, NEW_TOKENS, 1)
            while stream.reason is None:
                time.sleep(0.0002)
            self._ms.append((stream.at[0] - begin) * 1000)

    def stop(self) -> str:
        """What they saw."""
        self._is_over.set()
        self._thread.join()
        if not self._ms:
            return "none"
        p50, p90, p99 = np.percentile(self._ms, [50, 90, 99])
        return f"p50 {p50:.1f}, p90 {p90:.1f}, p99 {p99:.1f}, most {max(self._ms):.1f} ms ({len(self._ms)})"


def measure(session: Session, args: argparse.Namespace, n: int) -> None:
    """With n streams, on an engine of its own."""
    rng = np.random.default_rng(n)
    scheduler = Scheduler(Engine(session, n_seq=args.n_seq, max_running=n + 1 + args.newcomers))
    streams = [submit(scheduler, rng, 16, None) for _ in range(n)]
    while not all(stream.at for stream in streams):
        time.sleep(0.01)
    time.sleep(args.quiet / 2)
    first = streams[0]
    if args.newcomers:
        come = Newcomers(scheduler, np.random.default_rng(n))
        quiet(first, 2 * args.quiet)
        print(f"{n:3} streams, newcomers' first token, quiet: {come.stop()}", flush=True)
    before = quiet(first, args.quiet)
    for i in range(args.prompts):
        seen, in_layers = Counter(scheduler.engine.parts), Counter(scheduler.engine.in_layers)
        begin = time.monotonic()
        reader = submit(scheduler, rng, args.prompt, 1)
        come_beside = Newcomers(scheduler, np.random.default_rng(i)) if args.newcomers else None
        while reader.reason is None:
            time.sleep(0.002)
        end = reader.last_at or time.monotonic()
        if come_beside is not None:
            print(f"{n:3} streams, newcomers' first token, beside: {come_beside.stop()}", flush=True)
        parts, in_layers = (
            Counter(scheduler.engine.parts) - seen,
            Counter(scheduler.engine.in_layers) - in_layers,
        )
        ms = between(first, begin, end)
        last = quiet(first, args.quiet)
        own = (before + last) / 2
        p50, p90, p95, p99 = np.percentile(ms, [50, 90, 95, 99])
        tenth = max(len(ms) // 10, 1)
        print(
            f"{n:3} streams, prompt {i + 1}: quiet {before:.2f} and {last:.2f} ms, mean {ms.mean():.2f}",
            f"({ms.mean() / own:.2f} times), p50 {p50:.2f}, p90 {p90:.2f},",
            f"p95 {p95:.2f} ({p95 / own:.2f} times), p99 {p99:.2f},",
            f"most {ms.max():.1f};",
            f"first tenth {ms[:tenth].mean():.2f}, last {ms[-tenth:].mean():.2f};",
            f"{end - begin:.2f} s; parts {dict(sorted(parts.items()))},",
            f"in layers {dict(sorted(in_layers.items()))}",
            flush=True,
        )
        before = last
    for stream in streams:
        stream.cancel()
    scheduler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--vram-budget", type=float, help="GiB; without it the CPU computes")
    parser.add_argument("--sparsity", default="dense")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--prompt", type=int, default=8000, help="its tokens")
    parser.add_argument(
        "--prompts", type=int, default=2, help="one after the other, for each number of streams"
    )
    parser.add_argument("--quiet", type=float, default=0.5, help="seconds without a prompt")
    parser.add_argument("--room", type=int, default=1500, help="tokens of each stream")
    parser.add_argument("--newcomers", action="store_true", help="short requests come meanwhile")
    parser.add_argument("-t", "--threads", type=int, default=machine.cores())
    args = parser.parse_args()
    most = max(args.streams)
    args.n_seq = 2 * most + 2 + 8 * args.newcomers
    devices = choose_devices(args.vram_budget, None) if args.vram_budget else None
    with ModelFile(args.model) as file, Model(file) as model:
        loader = Loader(
            model,
            devices=devices,
            n_threads=args.threads,
            sparsity=args.sparsity,
            type_k=None,
            type_v=None,
            n_ctx=args.prompt + 128,
            n_seq=args.n_seq,
            n_batch=0,
            n_pool=most * args.room + 2 * args.prompt + 4096,
        )
        with loader.open() as session:
            print(f"{session.info.n_mixed} tokens of prompts and of streams in one program", flush=True)
            for n in args.streams:
                measure(session, args, n)
                for q in range(args.n_seq):
                    session.drop(q)


if __name__ == "__main__":
    main()
