"""Rounds: steps of generations that go on by themselves, with nothing of Python between them.

Where all that is under way has just its next token to compute, the engine is told so once, and computes one
token of each again and again until one of them is over or somebody comes or goes. Meanwhile another thread
gives the tokens to those who wait, round by round: the thread that computes needs no turn of Python's lock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import PowerInferError
from . import _native
from .arrays import Ids
from .request import Request
from .scheduler_stats import RequestTimes
from .session import Session

MOST = 256  # rounds
LONGEST_S = 0.2  # after which the thread looks at what else there is to do

Given = tuple[Request, int, bool]
"""A token that was chosen for a request, and whether it is an end token."""


@dataclass(frozen=True)
class Limits:
    """Of rounds."""

    most: int
    until: float
    """Of time.monotonic(), when no further one begins."""

    def before(self, deadlines: Iterable[float | None]) -> Limits:
        """With these, too."""
        return replace(self, until=min([self.until, *(at for at in deadlines if at is not None)]))


def limits_of(running: Sequence[Request], n_ctx: int) -> Limits | None:
    """Of rounds of all these; None if one has not just its next token to compute, or is over."""
    now, most = time.monotonic(), MOST
    for request in running:
        if not (request.is_plain and request.left == 1) or request.rows or request.n > n_ctx:
            return None
        most = min(most, request.left_to_give, n_ctx + 1 - request.n)
    limits = Limits(most, now + LONGEST_S).before(request.deadline for request in running)
    return limits if running and limits.until > now else None


class Rounds:
    """Of requests that each have just their next token to compute, one call of the engine long."""

    def __init__(
        self,
        requests: Sequence[Request],
        limits: Limits,
        earlier: list[Given],
        totals: Counter[str],
        times: RequestTimes,
        *,
        n_patient: int = 0,
        part_layers: int = 0,
    ) -> None:
        """
        earlier: tokens of the step before, which are given before those of the rounds.
        n_patient: rounds for which somebody who comes may wait, see disturb().
        part_layers: of a part of prompts that is under way, how many are computed in front of each round.
        totals, times: the engine's, which count what is given.
        """
        ffi, n = _native.ffi, len(requests)
        self.requests = list(requests)
        self.chosen: Ids = np.empty((0, n), np.int32)
        """Of rounds that are done, [n_rounds, n_requests]; after run()."""
        self.n_given = 0
        """Rounds whose tokens are given."""
        self._earlier = earlier
        self._n_patient = n_patient
        self._totals, self._times = totals, times
        self._lock = threading.Lock()  # of who gives
        self._is_over = False
        ends: set[int] = set()
        last: Collection[int] = ()
        tokens, owners, samplers = [], [], []
        for request in requests:
            assert request.sequence is not None and request.choice is not None
            choice = request.choice
            tokens.append(request.ids.item(request.n - 1))
            owners.append(request.sequence.number)
            samplers.append(choice.sampler.handle)
            if choice.ends is not last:  # most have the same
                ends.update(last := choice.ends)
        # Arrays that the struct points to live as long as this.
        self._arrays = [ffi.new("int32_t[]", values) for values in (tokens, owners, [*ends])]
        self._samplers = samplers, ffi.new("pi_sampler *[]", samplers)
        self._chosen = np.empty((limits.most, n), np.int32)
        self._native = ffi.new(
            "pi_rounds *",
            {
                "n": n,
                "most": limits.most,
                "token": self._arrays[0],
                "seq": self._arrays[1],
                "end": self._arrays[2],
                "n_end": len(ends),
                "sampler": self._samplers[1],
                "chosen": ffi.from_buffer("int32_t[]", self._chosen),
                "until_ns": int(limits.until * 1e9),
                "part_layers": part_layers,
            },
        )

    @property
    def part_left(self) -> int:
        """Layers of the part that are left."""
        return int(self._native.part_left)

    @property
    def part_s(self) -> float:
        """Seconds that the device took for those of these rounds."""
        return float(self._native.part_ns) * 1e-9

    def stop(self) -> None:
        """No further round begins. From any thread."""
        self._native.stop = 1

    def disturb(self, is_urgent: bool) -> None:
        """Somebody wants to come or go: no further round begins, or only so many as that may wait. From any
        thread, one at a time."""
        if is_urgent or not self._n_patient:
            self.stop()
        elif not self._native.stop:
            self._native.stop = (self._native.state >> 1) + 1 + self._n_patient

    def run(self, session: Session, begin: Callable[[Rounds], object]) -> PowerInferError | None:
        """Runs them, and gives what was not given yet, but for the last round. Returns what a further one
        failed with. begin: called first, has another thread call give()."""
        error = None
        for request in self.requests:
            assert request.sequence is not None
            request.sequence.row = None
        begin(self)
        try:
            session.run_rounds(self._native, len(self.requests))
        except PowerInferError as failed:
            error = failed
            if not self._native.state & 1:  # the session is closed, and somebody waits
                _native.lib.pi_session_rounds(_native.ffi.NULL, self._native)
        with self._lock:
            self._is_over = True
            self.chosen = self._chosen[: int(self._native.state) >> 1]
            self._give(len(self.chosen) - 1)
        return error

    def give(self) -> None:
        """In another thread, from when run() is called: gives tokens as they come."""
        n_done = 0
        while not self._is_over:
            with self._lock:
                if not self._is_over:
                    # The last round is for who runs them: somebody may be over with it.
                    self._give(n_done)
            before, n_done = n_done, _native.lib.pi_rounds_wait(self._native, n_done)
            if self._native.state & 1 or n_done == before:
                return

    def _give(self, n_rounds: int) -> None:
        """Up to this round."""
        if self._earlier:
            give(self._earlier, self._times)
            self._earlier = []
        n = len(self.requests)
        for tokens in self._chosen[self.n_given : max(n_rounds, 0)].tolist():
            self._totals.update(steps=1, computed=n, generated=n)
            given = [(request, token, False) for request, token in zip(self.requests, tokens, strict=True)]
            self.n_given += 1
            give(given, self._times)


def give(chosen: Sequence[Given], times: RequestTimes) -> None:
    """Gives tokens to those who wait for them."""
    now = time.monotonic()
    times.given([request for request, _, _ in chosen], now)
    for request, token, is_end in chosen:
        request.stream.put(token, is_end, now)
