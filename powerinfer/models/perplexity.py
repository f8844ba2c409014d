"""How well a model predicts a text, in any sparsity mode, and how far two modes are apart.

    corpus = read_corpus(model.file, ["held-out.txt"])
    with Session(model, n_ctx=512, mask_prompts=True) as session:
        print(perplexity(session, corpus.with_bos, n_ctx=512, bos=corpus.bos).value)

The procedure is llama.cpp's, so that figures compare:

without a stride   The text is cut into chunks of n_ctx tokens (what is left at its end is not used). Each is
                   computed from an empty context, with the BOS in place of its first token. The tokens of
                   its second half are predicted: positions n_ctx/2 .. n_ctx-2 each predict the next one.
with a stride      Chunks of n_ctx tokens begin every `stride` tokens, and of each the last `stride` tokens
                   are predicted, so every token but the first ones is predicted once, with a long context.

    value = exp(mean nll)        error = value * sqrt((mean(nll^2) - mean(nll)^2) / (n - 1))

where nll = -ln p(token). Recent llama.cpp means to put the BOS into the chunks of a strided run too, but does
it after it has computed them; here it is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._engine.arrays import as_int32
from .._engine.session import Progress, Session
from ..errors import ArgumentError, FormatError

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One mode beside the first one, over the same tokens."""

    ratio: float
    """Of the perplexities: this over the first."""
    ratio_error: float
    """Its standard error, from the differences token by token: far below that of either perplexity."""
    kl_divergence: float
    """Mean over the tokens of sum p ln(p/q): p of the first mode, q of this one."""
    same_top: float
    """Share of the tokens where both modes find the same token the likeliest."""


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """What a measurement says of one mode."""

    sparsity: str
    """"predicted", "exact" or "dense"."""
    value: float
    error: float
    """One standard error."""
    n_tokens: int
    """Tokens that were predicted."""
    n_chunks: int
    ffn_rows: float
    """Share of the feed-forward's weight rows that these tokens need, when they come one at a time."""
    comparison: Comparison | None = None
    """None for the first mode."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which tokens are computed and which are predicted."""

    n_ctx: int
    first: int
    """Positions first .. n_ctx-2 of a chunk predict the next one."""
    starts: range
    """Where chunks begin."""

    @property
    def n_predicted(self) -> int:
        """Of all chunks."""
        return (self.n_ctx - 1 - self.first) * len(self.starts)


def plan_chunks(n_tokens: int, *, n_ctx: int, stride: int = 0, n_chunks: int = 0) -> Plan:
    """The chunks of a text of n_tokens; n_chunks > 0: only so many.

    Raises ArgumentError for sizes out of range, for a text of less than 2 n_ctx tokens, and where only one
    token would be predicted, which leaves no error to be estimated.
    """
    if n_ctx < 4:
        raise ArgumentError(f"n_ctx is {n_ctx}: perplexity needs chunks of at least 4 tokens")
    if not 0 <= stride < n_ctx:
        raise ArgumentError(
            f"the stride is {stride}, it must be from 1 to n_ctx - 1 = {n_ctx - 1}, or 0 for none"
        )
    if n_chunks < 0:
        raise ArgumentError(f"the number of chunks is {n_chunks}, it cannot be negative (0: all)")
    if n_tokens < 2 * n_ctx:
        raise ArgumentError(
            f"the text has {n_tokens:,} tokens, but perplexity with chunks of {n_ctx:,} needs at least "
            f"{2 * n_ctx:,}: take a longer text or a smaller n_ctx"
        )
    n_all = -(-(n_tokens - n_ctx) // stride) if stride else n_tokens // n_ctx
    n = min(n_all, n_chunks) if n_chunks else n_all
    step = stride or n_ctx
    first = n_ctx - stride - 1 if stride else n_ctx // 2
    plan = Plan(n_ctx=n_ctx, first=first, starts=range(0, n * step, step))
    if plan.n_predicted < 2:
        raise ArgumentError("only 1 token would be predicted: take more chunks, or larger ones")
    return plan


class _Sum:
    """Running sums of one mode."""

    def __init__(self) -> None:
        self.n = 0
        self.nll = self.nll2 = 0.0
        self.difference = self.difference2 = 0.0  # of nll, to the first mode
        self.kl = 0.0
        self.n_same = 0
        self.rows = self.all_rows = 0

    def add(self, nll: float) -> None:
        """One predicted token."""
        self.n += 1
        self.nll += nll
        self.nll2 += nll * nll

    def add_comparison(self, difference: float, kl: float, same: bool) -> None:
        """How that token stands beside the first mode."""
        self.difference += difference
        self.difference2 += difference * difference
        self.kl += kl
        self.n_same += same

    def add_rows(self, session: Session) -> None:
        """Rows that the tokens of the last feed need. A feed is one chunk, so its steps are all there is."""
        info = session.model.info
        for step in session.last_step:
            pairs = step.n_sparse * info.n_neurons
            down = step.n_active if info.can_skip_down else pairs
            self.rows += step.n_predicted + down + (step.n_computed if info.is_gated else 0)
            self.all_rows += (3 if info.is_gated else 2) * pairs

    def result(self, sparsity: str, n_chunks: int, first: _Sum) -> Perplexity:
        mean, error = _mean(self.nll, self.nll2, self.n)
        value = _exp(mean)
        comparison = None
        if self is not first:
            difference, difference_error = _mean(self.difference, self.difference2, self.n)
            ratio = _exp(difference)
            comparison = Comparison(
                ratio=ratio,
                ratio_error=ratio * difference_error,
                kl_divergence=self.kl / self.n,
                same_top=self.n_same / self.n,
            )
        return Perplexity(
            sparsity=sparsity,
            value=value,
            error=value * error,
            n_tokens=self.n,
            n_chunks=n_chunks,
            ffn_rows=1.0 if sparsity == "dense" or not self.all_rows else self.rows / self.all_rows,
            comparison=comparison,
        )


def _mean(total: float, squares: float, n: int) -> tuple[float, float]:
    """Mean and its standard error, of which a single number says nothing."""
    mean = total / n
    variance = max(squares / n - mean * mean, 0.0)
    return mean, math.sqrt(variance / (n - 1)) if n > 1 else math.inf


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """[n_vocab]."""
    shifted = logits.astype(np.float64)
    lowest, highest = shifted.min(), shifted.max()
    if not (np.isfinite(lowest) and np.isfinite(highest)):
        raise FormatError(
            "the model's logits are not finite: its weights are broken, or of another activation"
        )
    shifted -= highest
    shifted -= math.log(np.exp(shifted).sum())
    return shifted


def compare(
    sessions: Sequence[Session],
    tokens: Sequence[int] | Tokens,
    *,
    n_ctx: int,
    stride: int = 0,
    bos: int | None = None,
    n_chunks: int = 0,
    progress: Progress | None = None,
    running: Callable[[list[Perplexity]], None] | None = None,
) -> list[Perplexity]:
    """Perplexity in several modes, one session of the same model for each, with the comparison to the first.

    sessions: opened with n_ctx at least this n_ctx, and, for predicted mode, with mask_prompts=True, since
        else tokens whose logits are not wanted are computed with all neurons. Their sequence 0 is used, and
        is empty afterwards.
    tokens: the text; with the BOS in front if the vocabulary has it.
    bos: what replaces the first token of each chunk; None: nothing.
    n_chunks: at most so many; 0: all.
    progress: called as progress(tokens computed, tokens to compute).
    running: called after each chunk with the results so far.

    Logits of n_batch tokens are held at a time. Raises ArgumentError (sizes, a text that is too short, a
    token out of range), FormatError if the model's logits are not finite.
    """
    if not sessions:
        raise ArgumentError("there is no session to measure")
    ids = as_int32("tokens", tokens)
    plan = plan_chunks(len(ids), n_ctx=n_ctx, stride=stride, n_chunks=n_chunks)
    n_vocab = sessions[0].model.info.n_vocab
    for session in sessions:
        if session.info.n_ctx < n_ctx:
            raise ArgumentError(
                f"the session has room for {session.info.n_ctx} tokens, fewer than n_ctx = {n_ctx}"
            )
        if session.info.sparsity == "predicted" and not session.mask_prompts:
            raise ArgumentError(
                "the session computes tokens that want no logits with all neurons: open it with "
                "mask_prompts=True"
            )
        if session.model.info.n_vocab != n_vocab:
            raise ArgumentError("the sessions are of models with different vocabularies")
    outside = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if outside.size:
        raise ArgumentError(f"token {ids[outside[0]]} is outside of the model's vocabulary of {n_vocab}")
    n_batch = min(session.info.n_batch for session in sessions)
    sparsities = [session.info.sparsity for session in sessions]
    sums = [_Sum() for _ in sessions]
    results: list[Perplexity] = []
    done, total = 0, (n_ctx - 1) * len(plan.starts)
    for chunk, start in enumerate(plan.starts, 1):
        for session in sessions:
            session.drop()
        for batch, wanted, targets in _batches(ids[start : start + n_ctx], plan.first, n_batch, bos):
            for session, one in zip(sessions, sums, strict=True):
                session.feed(batch, want_logits=wanted)
                one.add_rows(session)
            _add_logits(sessions, sums, targets)
            done += len(batch)
            if progress is not None:
                progress(done, total)
        if running is not None or chunk == len(plan.starts):
            results = [one.result(mode, chunk, sums[0]) for one, mode in zip(sums, sparsities, strict=True)]
        if running is not None:
            running(results)
    for session in sessions:
        session.drop()
    return results


def _batches(
    chunk: Tokens, first: int, n_batch: int, bos: int | None
) -> Iterator[tuple[Tokens, list[bool], Tokens]]:
    """The tokens of a chunk but its last one, n_batch at a time: tokens, which of them want logits, and the
    tokens that those predict."""
    inputs = chunk[:-1].copy()
    if bos is not None:
        inputs[0] = bos
    for at in range(0, len(inputs), n_batch):
        end = min(at + n_batch, len(inputs))
        yield inputs[at:end], [i >= first for i in range(at, end)], chunk[max(at, first) + 1 : end + 1]


def _add_logits(sessions: Sequence[Session], sums: Sequence[_Sum], targets: Tokens) -> None:
    """Adds what the sessions' last feed says of the tokens that came next."""
    for row, target in enumerate(targets):
        first, *others = (_log_softmax(session.logits(row)) for session in sessions)
        sums[0].add(-float(first[target]))
        if others:
            p, top = np.exp(first), int(first.argmax())
            for one, logits in zip(sums[1:], others, strict=True):
                one.add(-float(logits[target]))
                one.add_comparison(
                    float(first[target] - logits[target]),
                    float(p @ (first - logits)),
                    int(logits.argmax()) == top,
                )


def perplexity(
    session: Session,
    tokens: Sequence[int] | Tokens,
    *,
    n_ctx: int,
    stride: int = 0,
    bos: int | None = None,
    n_chunks: int = 0,
    progress: Progress | None = None,
    running: Callable[[list[Perplexity]], None] | None = None,
) -> Perplexity:
    """Perplexity in the session's mode. Arguments and errors: as `compare`."""
    (result,) = compare(
        [session],
        tokens,
        n_ctx=n_ctx,
        stride=stride,
        bos=bos,
        n_chunks=n_chunks,
        progress=progress,
        running=running,
    )
    return result
