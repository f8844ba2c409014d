"""Times the cases of a session, mode beside mode."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .._engine import machine
from .._engine.read_probe import ReadProbe
from .._engine.session import Session, Sparsity
from .case import Case

DIGEST_TOKENS = 8
# A machine's read rate may move within seconds, so the ceiling is measured between tokens: for PROBE_S, each
# time that tokens have taken SLICE_S.
PROBE_S, SLICE_S = 0.012, 0.05

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case in one mode. What only decoding alone tells is None for prompts, and the other way round."""

    test: str
    n_prompt: int
    n_gen: int
    n_seq: int
    depth: int
    threads: int
    sparsity: str
    tokens_per_s: float
    """Mean over the repetitions; of all sequences together."""
    spread: float
    """Standard deviation of tokens_per_s over the repetitions."""
    median: float
    """Of tokens_per_s over the repetitions."""
    bytes_per_token: float
    """That the engine read."""
    read_gb_s: float | None
    """Rate at which the engine read: the median."""
    ceiling_gb_s: float | None
    """The memory's read rate on the same threads, measured between tokens: the median."""
    share: float | None
    """Of the rate at which tokens were read in the mean of the ceilings measured before and after them: the
    median over the slices of all repetitions."""
    share_spread: float | None
    """Half of the way between the quartiles of the slices' shares; None of a single one."""
    computed: float | None
    """Share of the FFN's neurons whose rows were read."""
    active: float | None
    """Share of the FFN's neurons whose product was not zero."""
    hit_rate: float | None
    """Of a mixture: share of the chosen experts that were on a device, in the last repetition."""
    gflop_per_s: float | None
    """Of a prompt's matrix products and attention: the mean."""
    seconds: list[float]
    """Of each repetition."""
    ceilings_gb_s: list[float]
    """In all slices."""


@dataclass
class _Slice:
    """Some tokens between two measurements of the ceiling."""

    before: float
    after: float = 0.0
    seconds: float = 0.0
    n_bytes: int = 0

    @property
    def share(self) -> float:
        return self.n_bytes / self.seconds / ((self.before + self.after) / 2)


@dataclass
class _Run:
    """What one repetition took and read."""

    seconds: float = 0.0
    slices: list[_Slice] = field(default_factory=list)
    n_bytes: int = 0
    active: int = 0
    computed: int = 0
    pairs: int = 0
    """Neurons times decoded tokens."""
    routes: int = 0
    """Uses of experts by decoded tokens."""
    hits: int = 0
    """Of those, whose expert was on a device."""


def measure(
    session: Session,
    case: Case,
    modes: Sequence[Sparsity],
    *,
    repetitions: int,
    warm_up: bool = True,
    ceiling_bytes: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Times a case in every mode. Modes take turns, so that a machine whose speed changes meanwhile treats
    them alike.

    ceiling_bytes: of memory to measure its read rate with between tokens; 0: not measured. tick: called after
    each repetition. The session is left with `depth` tokens in each of the case's sequences, the first ones,
    and with nothing in the others.
    """
    rng = np.random.default_rng(1)
    n_vocab = session.model.info.n_vocab

    def tokens(n: int) -> Tokens:
        return rng.integers(0, n_vocab, n, dtype=np.int32)

    probe = None
    if ceiling_bytes and case.n_gen and not case.n_prompt:
        probe = _probe(session, ceiling_bytes)
    prompt, generated = tokens(case.n_prompt), tokens(case.n_gen * case.n_seq).reshape(-1, case.n_seq)
    for seq in range(session.info.n_seq):  # what a case before left in more of them takes memory
        session.drop(seq)
        if case.depth and seq < case.n_seq:
            session.feed(tokens(case.depth), seq=seq, want_logits=False)
    runs: dict[Sparsity, list[_Run]] = {mode: [] for mode in modes}
    for repetition in range(-1 if warm_up else 0, repetitions):
        for mode in modes:
            session.set_sparsity(mode)
            run = _once(session, case, prompt, generated, probe)
            if repetition >= 0:
                runs[mode].append(run)
            tick()
    return [_result(session, case, mode, found) for mode, found in runs.items()]


def _probe(session: Session, n_bytes: int) -> ReadProbe:
    """Slices that are read in about PROBE_S, of n_bytes in all."""
    rate = machine.read_rate(session.info.n_threads, min(n_bytes, 256 << 20), 2)
    size = max(1 << 20, min(int(rate * PROBE_S), n_bytes // 4))
    return session.read_probe(size, max(1, n_bytes // size))


def _feed_prompt(session: Session, prompt: Tokens) -> int:
    """Feeds it a chunk at a time, so that Ctrl-C is heard in between; the bytes that were read."""
    n_bytes, step = 0, session.info.n_batch
    for at in range(0, len(prompt), step):
        session.feed(prompt[at : at + step], want_logits=None if at + step >= len(prompt) else False)
        n_bytes += session.last_total.bytes
    return n_bytes


def _rewind(session: Session, depth: int, seq: int) -> None:
    """Back to `depth` tokens, which are computed anew where layers with a window no longer reach so far."""
    if session.reachable(depth, seq=seq) == depth:
        session.cut(depth, seq=seq)
        return
    session.drop(seq)
    tokens = np.arange(depth, dtype=np.int32) % session.model.info.n_vocab
    session.feed(tokens, seq=seq, want_logits=False)


def _once(session: Session, case: Case, prompt: Tokens, generated: Tokens, probe: ReadProbe | None) -> _Run:
    """One repetition, from `depth` tokens back to `depth` tokens."""
    run = _Run()
    if case.n_prompt:
        start = time.perf_counter()
        run.n_bytes += _feed_prompt(session, prompt)
        run.seconds += time.perf_counter() - start
    elif case.n_gen:  # wakes the threads
        session.feed(generated[0, :1])
        _rewind(session, case.depth, 0)
    sequences = list(range(case.n_seq))
    piece = _Slice(before=probe.next()) if probe else None
    for i, step_tokens in enumerate(generated):
        start = time.perf_counter()
        session.feed(step_tokens, seq=sequences, want_logits=True)
        seconds = time.perf_counter() - start
        n_bytes = session.last_total.bytes
        run.seconds += seconds
        run.n_bytes += n_bytes
        for step in session.last_step:
            run.active += step.n_active
            run.computed += step.n_computed
            run.pairs += step.n_sparse * session.model.info.n_neurons
            run.routes += step.n_routes
            run.hits += step.n_routes_device
        if probe and piece:
            piece.seconds += seconds
            piece.n_bytes += n_bytes
            if piece.seconds >= SLICE_S or i + 1 == len(generated):
                piece.after = probe.next()
                run.slices.append(piece)
                piece = _Slice(before=piece.after)
    for seq in sequences:
        _rewind(session, case.depth, seq)
    return run


def _ceilings(runs: Sequence[_Run]) -> list[float]:
    """All that were measured, in GB/s."""
    firsts = [run.slices[0].before for run in runs if run.slices]
    return [rate / 1e9 for rate in firsts + [piece.after for run in runs for piece in run.slices]]


def _share_spread(shares: Sequence[float]) -> float | None:
    if len(shares) < 2:
        return None
    low, _, high = statistics.quantiles(shares, n=4, method="inclusive")
    return (high - low) / 2


def _result(session: Session, case: Case, mode: str, runs: Sequence[_Run]) -> Result:
    ceilings, shares = _ceilings(runs), [piece.share for run in runs for piece in run.slices]
    seconds = [run.seconds for run in runs]
    speeds = [case.n_tokens / s for s in seconds]
    decodes, prompts = not case.n_prompt, not case.n_gen
    last = runs[-1]
    rates = [run.n_bytes / run.seconds / 1e9 for run in runs]
    has_pairs = decodes and last.pairs > 0
    return Result(
        test=case.name,
        n_prompt=case.n_prompt,
        n_gen=case.n_gen,
        n_seq=case.n_seq,
        depth=case.depth,
        threads=session.info.n_threads,
        sparsity=mode,
        tokens_per_s=statistics.mean(speeds),
        spread=statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        median=statistics.median(speeds),
        bytes_per_token=last.n_bytes / case.n_tokens,
        read_gb_s=statistics.median(rates) if decodes else None,
        ceiling_gb_s=statistics.median(ceilings) if ceilings else None,
        share=statistics.median(shares) if shares else None,
        share_spread=_share_spread(shares),
        computed=last.computed / last.pairs if has_pairs else None,
        active=last.active / last.pairs if has_pairs else None,
        hit_rate=last.hits / last.routes if decodes and last.routes else None,
        gflop_per_s=statistics.mean(prompt_flop(session, case) / s for s in seconds) / 1e9
        if prompts
        else None,
        seconds=seconds,
        ceilings_gb_s=ceilings,
    )


def prompt_flop(session: Session, case: Case) -> int:
    """Multiplications and additions that a prompt needs, computed with all neurons: two for each weight and
    token, of experts those that a token uses, and those of attention; of the last layer, but for its K and V,
    and of the output matrix for one token."""
    info = session.model.info

    def used(shape: Sequence[int]) -> int:
        """Weights of a tensor by one token: matrices, and stacks of experts."""
        if len(shape) == 3:
            return info.n_expert_used * math.prod(shape[1:])
        return math.prod(shape) if len(shape) == 2 else 0

    def weights(part: str) -> int:
        return sum(
            used(tensor.shape)
            for tensor in session.model.file.tensors
            if tensor.name.startswith(part) and ".fc" not in tensor.name
        )

    n, first = case.n_prompt, case.depth + 1
    positions = n * (2 * first + n - 1) // 2  # sum over the tokens of the positions that each sees
    once = weights(f"blk.{info.n_layer - 1}.") - 2 * info.n_embd * info.n_head_kv * info.n_embd_head
    seen = (info.n_layer - 1) * positions + first + n - 1
    attention = 4 * info.n_head * info.n_embd_head * seen
    return 2 * ((weights("blk.") - once) * n + once + info.n_vocab * info.n_embd) + attention


def logits_digest(session: Session) -> str:
    """Of the logits after fixed tokens: if it stays, a change of code changed no bit. Empties sequence 0."""
    session.drop()
    session.feed([1 + i % (session.model.info.n_vocab - 1) for i in range(DIGEST_TOKENS)])
    digest = hashlib.sha256(session.logits().tobytes()).hexdigest()[:16]
    session.drop()
    return digest
