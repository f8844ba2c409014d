"""Times answers with drafts of one model beside answers without.

Of a model with random weights, or of a text that is not the user's, what a draft guesses says nothing. So
its guesses can be replaced by ones that are right as often as is asked for, while it computes as always.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from .._engine.arrays import Ids, Logits
from .._engine.drafting import Drafter, Wanted
from ..llama import Llama


@dataclass(frozen=True, kw_only=True)
class DraftResult:
    """An answer's speed."""

    n_draft: int
    """Tokens guessed at a time; 0: none."""
    right: float | None
    """Share of the guesses that were made right, as far as those before them were; None: the draft's own."""
    tokens_per_s: float
    """Median over the repetitions."""
    spread: float
    """Standard deviation."""
    tokens_per_step: float
    accepted: float | None
    """Share of all guesses that were right."""


class ToldDrafter(Drafter):
    """Another drafter, that knows an answer and guesses it with errors."""

    def __init__(self, inner: Drafter, answer: Ids, right: float) -> None:
        self.__dict__.update(inner.__dict__)  # what it holds is the other's, too
        self._answer = answer
        n_vocab = self.session.model.info.n_vocab
        wrong = np.random.default_rng(1).random(answer.size) >= right
        self._told = np.where(wrong, (answer + 1) % n_vocab, answer).astype(np.int32)

    def guess(self, wanted: Sequence[Wanted]) -> list[Ids]:
        super().guess(wanted)
        return [self._told[known.size : known.size + n] for _, known, n in wanted]


def measure_drafts(
    llm: Llama,
    *,
    n_prompt: int,
    n_gen: int,
    drafts: Sequence[int],
    rights: Sequence[float | None],
    repetitions: int,
    tick: Callable[[], None] = lambda: None,
) -> list[DraftResult]:
    """llm: opened with a draft model. drafts: numbers of tokens guessed at a time. Cases take turns, so that
    a machine whose speed changes meanwhile treats them alike; the first one is without drafts."""
    given, drafter = llm.draft_model, llm._drafter
    assert drafter is not None
    rng = np.random.default_rng(1)
    prompt = rng.integers(3, llm.n_vocab(), n_prompt).tolist()
    llm.draft_model = None
    answer = np.array([*prompt, *islice(llm.generate(prompt, temp=0.0), n_gen + 16)], np.int32)

    def force(ids: Ids, logits: Logits) -> Logits:
        """A device's sums differ from step to step, and of random weights many tokens are nearly as likely as
        the best: without this an answer parts from what was told."""
        logits[answer[ids.size]] = np.finfo(np.float32).max
        return logits

    how: dict[str, Any] = {"temp": 0.0}
    if llm.session.info.n_device_bytes:
        how["logits_processor"] = force
    cases: list[tuple[int, float | None]] = [(0, None), *((n, right) for n in drafts for right in rights)]
    seconds: list[list[float]] = [[] for _ in cases]
    counted = [(0, 0, 0)] * len(cases)
    totals = llm._ctx.engine.totals
    usual = drafter.n_draft
    try:
        for repetition in range(-1, repetitions):
            for i, (n_draft, right) in enumerate(cases):
                drafter.n_draft = n_draft
                own = drafter if right is None else ToldDrafter(drafter, answer, right)
                llm.draft_model = own if n_draft else None
                stream = iter(llm.generate(prompt, **how))
                next(stream)
                before = totals["steps"], totals["drafted"], totals["accepted"]
                start = time.perf_counter()
                for _ in range(n_gen):
                    next(stream)
                if repetition >= 0:
                    seconds[i].append(time.perf_counter() - start)
                    tick()
                after = totals["steps"], totals["drafted"], totals["accepted"]
                counted[i] = (after[0] - before[0], after[1] - before[1], after[2] - before[2])
                stream.close()
    finally:
        drafter.n_draft = usual
        llm.draft_model = given
    out = []
    for (n_draft, right), taken, (n_steps, n_drafted, n_right) in zip(cases, seconds, counted, strict=True):
        speeds = [n_gen / s for s in taken]
        out.append(
            DraftResult(
                n_draft=n_draft,
                right=right,
                tokens_per_s=statistics.median(speeds),
                spread=statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
                tokens_per_step=n_gen / max(n_steps, 1),
                accepted=min(n_right / n_drafted, 1.0) if n_drafted else None,  # some were guessed before
            )
        )
    return out
