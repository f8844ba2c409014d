"""Texts whose tokens are visited rather than followed by others: embeddings, and how likely a prompt was.

They stand in line beside a scheduler's generations and share its steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, BusyError, ClosedError
from .context import Ids, Logits
from .embedding import needed, pool, pooling_number
from .session import Session
from .stream import Job, Stream

Vectors = npt.NDArray[np.float32]
Begun = Callable[[Stream], None]


class Visits(ABC):
    """What stands first is the part of Scheduler that these methods need."""

    max_running: int
    _session: Session

    @abstractmethod
    def _check(self, ids: Ids) -> None: ...

    @abstractmethod
    def _enter(self, job: Job) -> None: ...

    @abstractmethod
    def _cancel(self, stream: Stream) -> None: ...

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
            seen(i, self._session.logits(row))

        self._compute([self._job(ids, range(ids.size), visit, deadline)], begun)

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

        def noting(own: list[Vectors]) -> Callable[[int, int], None]:
            return lambda _, row: own.append(self._session.hidden(row))

        jobs = []
        for ids, own in zip(texts, rows, strict=True):
            jobs.append(self._job(ids, needed(ids.size, kind), noting(own), deadline))
        self._compute(jobs, begun)
        return [pool(np.stack(own), kind) for own in rows]

    def _job(
        self, ids: Ids, visited: range, visit: Callable[[int, int], None], deadline: float | None
    ) -> Job:
        self._check(ids)
        return Job(
            stream=Stream(ids.size, self._cancel),
            ids=np.array(ids, np.int32),
            n=ids.size,
            n_prompt=ids.size,
            visit=visit,
            visited=visited,
            deadline=deadline,
        )

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
        if len(under_way) >= self.max_running:
            return False
        try:
            self._enter(job)
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
