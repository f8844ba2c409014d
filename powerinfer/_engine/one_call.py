"""Steps of an engine that are a single call of the session: of a request that is alone, or of all that are
under way, which then go on by themselves (rounds.py)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..errors import ContextError, PowerInferError
from .pace import Pace
from .request import Reason, Request
from .request_queue import RequestQueue
from .rounds import Given, Limits, Rounds, limits_of
from .scheduler_stats import RequestTimes
from .session import Session


class OneCall(ABC):
    """The part of Engine that makes them. What stands first is the part of it that they need."""

    session: Session
    n_ctx: int
    queue: RequestQueue
    n_feeds: int
    totals: Counter[str]
    times: RequestTimes
    _pace: Pace
    _chosen: list[Given]

    saw: Callable[[Session], bool] | None = None
    """Called after each step of one generated token; whether it wants to see the next one, too. If not it is
    called now and then."""
    _sees_each = True
    begin_rounds: Callable[[Rounds], object] | None = None
    """What has another thread call give() of rounds that begin; None: there are none, and steps are made when
    somebody asks for them."""
    _ended_at: float | None = None
    """When the last step did, if the next one follows by itself."""

    @abstractmethod
    def _finish(self, request: Request, reason: Reason, error: BaseException | None = None) -> None: ...

    @abstractmethod
    def _took(self, took: Sequence[tuple[Request, int]]) -> None: ...

    @abstractmethod
    def _choose(self, request: Request) -> None: ...

    @abstractmethod
    def _give(self) -> None: ...

    def _made_one_call(self) -> bool:
        """Whether that was all there was to do."""
        if self.begin_rounds is not None:
            if self._go_on(self.begin_rounds):
                return True
            self._give()
        request = self._alone()
        return request is not None and self._step_alone(request)

    def _alone(self) -> Request | None:
        """The only request, if all that the step has to do is to compute its next token."""
        if len(self.queue.running) != 1 or self.queue.waiting or self.queue.is_closing:
            return None
        request = self.queue.running[0]
        is_late = request.deadline is not None and time.monotonic() >= request.deadline
        is_over = request.stream.is_cancelled or is_late or request.over is not None
        is_next = request.is_plain and request.left == 1 and request.n <= self.n_ctx
        return request if is_next and not is_over else None

    def _step_alone(self, request: Request) -> bool:
        """A step of this one in a single call of the session; False where there is no room for it."""
        sequence, choice = request.sequence, request.choice
        assert sequence is not None and choice is not None
        at = sequence.n
        sequence.n_coming, sequence.row = at + 1, None
        self.n_feeds += 1
        error, begin = None, self._begins()
        try:
            token = self.session.next(int(request.ids[at]), at, choice.sampler, seq=sequence.number)
        except PowerInferError as failed:
            if self.session.length(sequence.number) == at:  # it was not the choice
                if isinstance(failed, ContextError):
                    return False
                raise
            error = failed
        self._pace.saw(0, 1, self._ends() - begin)
        sequence.n = at + 1
        sequence.row = self.n_feeds, 0
        self._see()
        self.totals["steps"] += 1
        self.totals["computed"] += 1
        if error is not None:
            self._finish(request, "error", error)
            return True
        self._took([(request, token)])
        self._give()
        return True

    def _see(self) -> None:
        """A step of one generated token is done."""
        if self.saw is not None:
            self._sees_each = self.saw(self.session)

    def _begins(self) -> float:
        """When a step does, for who waits for tokens: what is done between two steps counts, too."""
        return time.monotonic() if self._ended_at is None else self._ended_at

    def _ends(self) -> float:
        now = time.monotonic()
        self._ended_at = now if self.begin_rounds is not None else None
        return now

    def _may_go_on(self) -> tuple[list[Request], Limits] | None:
        """Who may have rounds: all that are under way, or, while prompts wait for their next part, the
        others; None if there can be none."""
        running = self.queue.running
        limits = limits_of(running, self.n_ctx)
        if limits is not None:
            return running, limits
        reading = [request for request in running if request.left > 1]
        others = [request for request in running if request.left <= 1]
        limits = limits_of(others, self.n_ctx) if reading else None
        n_rounds = self._pace.rest(len(others)) if limits is not None else 0
        if limits is None or n_rounds < 2 or any(r.rows or r.stream.is_cancelled for r in reading):
            return None
        limits = limits.before(request.deadline for request in reading)
        return others, replace(limits, most=min(limits.most, n_rounds))

    def _go_on(self, begin_rounds: Callable[[Rounds], object]) -> bool:
        """Rounds of all that may go on by themselves; False if there can be none."""
        waits_until = None
        if self.queue.waiting and self.queue.n_places:
            if self._pace.n_patient(len(self.queue.running)):
                waits_until = self.queue.together_until(self._pace.patience_s(len(self.queue.running)))
            if waits_until is None or waits_until <= time.monotonic():
                return False
        found = self._may_go_on()
        if found is None:
            return False
        running, limits = found
        if len(running) == 1 and self.saw is not None and self._sees_each:
            return False
        limits = limits.before([waits_until, *(request.deadline for request in tuple(self.queue.waiting))])
        if limits.until <= time.monotonic():
            return False
        is_reading = len(running) < len(self.queue.running)  # who comes is read with them
        n_patient = 0 if is_reading else self._pace.n_patient(len(running))
        rounds = Rounds(running, limits, self._chosen, self.totals, self.times, n_patient=n_patient)
        begin, may_wait = self._begins(), waits_until is not None
        with self.queue.undisturbed(rounds.disturb, may_wait=may_wait) as is_undisturbed:
            if not is_undisturbed:
                return False
            self._chosen = []
            error = rounds.run(self.session, begin_rounds)
        n_rounds = len(rounds.chosen)
        if n_rounds:
            self.n_feeds += 1
            self._pace.saw(0, len(running), (self._ends() - begin) / n_rounds, n_steps=n_rounds)
            self._went_on(rounds)
        if error is not None and not isinstance(error, ContextError):
            raise error
        return n_rounds > 0

    def _went_on(self, rounds: Rounds) -> None:
        """Notes what rounds have chosen. Somebody may be over with what the last one has."""
        n_rounds, n_given = len(rounds.chosen), rounds.n_given
        if n_given < n_rounds:
            self.totals.update(steps=1, computed=len(rounds.requests))
        given = np.ascontiguousarray(rounds.chosen[:n_given].T)
        for i, request in enumerate(rounds.requests):
            sequence = request.sequence
            assert sequence is not None
            sequence.n += n_rounds
            sequence.row = self.n_feeds, i
            if n_given:
                request.went_on(given[i])
        if len(rounds.requests) == 1:
            self._see()
        if n_given == n_rounds:
            return
        last = rounds.chosen[-1].tolist()
        for i, (request, token) in enumerate(zip(rounds.requests, last, strict=True)):
            if token < 0:
                request.rows = [i]
                self._choose(request)
        self._took([each for each in zip(rounds.requests, last, strict=True) if each[1] >= 0])
