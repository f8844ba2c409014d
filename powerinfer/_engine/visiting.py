"""Texts whose tokens are visited rather than followed by others: embeddings, and how likely a prompt was.

They stand in line beside a scheduler's generations and share its steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import ArgumentError, BusyError, ClosedError
from .context import Ids, Logits
from .embedding import Vectors, embedding_job, pool, pooling_number
from .engine import Engine
from .stream import Job, Stream, visit_job

Begun = Callable[[Stream], None]


class Visits:
    """The methods of a scheduler that compute texts."""

    engine: Engine

    def visit(
        self,
        ids: Ids,
        seen: Callable[[int, Logits], None],
        *,
        deadline: float | None = None,
        begun: Begun | None = None,
    ) -> None:
        """Computes a text and calls seen(i, logits) after each of its tokens, in the scheduler's thread.

        begun: gets what can cancel it, which another thread may do. Waits for its turn. Raises what submit()
        raises, TimeoutError after the deadline, and ClosedError where it was cancelled.
        """

        def visit(i: int, row: int) -> None:
            seen(i, self.engine.session.logits(row))

        self.engine.check(ids)
        self._compute([visit_job(ids, range(ids.size), visit, self.engine.cancel, deadline=deadline)], begun)

    def embed(
        self,
        ids: Ids,
        *,
        pooling: str | int = "mean",
        deadline: float | None = None,
        begun: Begun | None = None,
    ) -> Vectors:
        """The final hidden states of a text, in one vector [n_embd]; with pooling "none" [n, n_embd].

        "mean": of all tokens, "last": of the last, "cls": of the first. Waits and raises as visit() does.
        """
        return self.embed_all([ids], pooling=pooling, deadline=deadline, begun=begun)[0]

    def embed_all(
        self,
        texts: Sequence[Ids],
        *,
        pooling: str | int = "mean",
        deadline: float | None = None,
        begun: Begun | None = None,
    ) -> list[Vectors]:
        """The same of several texts, which are computed together as far as there are places.

        begun: called for each of them.
        """
        kind = pooling_number(pooling)
        if kind < 0:
            raise ArgumentError("pooling must be 'none', 'mean', 'cls' or 'last'")
        rows: list[list[Vectors]] = [[] for _ in texts]
        jobs = []
        for ids, own in zip(texts, rows, strict=True):
            jobs.append(embedding_job(self.engine, ids, kind, own, deadline=deadline))
        self._compute(jobs, begun)
        return [pool(np.stack(own), kind) for own in rows]

    def _compute(self, jobs: Sequence[Job], begun: Begun | None) -> None:
        """Enters them, no more at a time than there are places, and waits for all."""
        under_way: deque[Stream] = deque()
        try:
            for job in jobs:
                while not self._found_place(job, under_way):
                    _wait(under_way)
                under_way.append(job.stream)
                if begun is not None:
                    begun(job.stream)
            while under_way:
                _wait(under_way)
        finally:
            for stream in under_way:
                stream.cancel()

    def _found_place(self, job: Job, under_way: deque[Stream]) -> bool:
        if len(under_way) >= self.engine.max_running:
            return False
        try:
            self.engine.add(job)
        except BusyError:
            if not under_way:
                raise
            return False
        return True


def _wait(under_way: deque[Stream]) -> None:
    """Until the first of them has ended."""
    for _ in under_way[0]:
        pass
    reason = under_way.popleft().reason
    if reason == "cancelled":
        raise ClosedError("the request was cancelled")
    if reason != "stop":
        raise TimeoutError("the time for this request is over")
