"""The tokens that follow a prompt, computed by who reads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress

from .._engine.arrays import as_int32
from .._engine.engine import Engine
from .._engine.report import Timings
from .._engine.request import Request
from ..errors import ClosedError


class Generation:
    """Iterating computes; it has no end of its own but the context's and the grammar's.

    Between two tokens others may use the context: the next step then computes again what they replaced.
    """

    def __init__(
        self,
        engine: Engine,
        lock: threading.RLock,
        request: Request,
        *,
        note: Callable[[Timings], None],
        load_s: float,
    ) -> None:
        """
        lock: held during each step.
        request: a stepwise one.
        note: called with the timings after each step, which go on changing.
        """
        self._engine = engine
        self._lock = lock
        self._request = request
        self._note = note
        self._timings = Timings(load_s=load_s, n_prompt=request.n_prompt)

    def __iter__(self) -> Generator[int, Sequence[int] | None, None]:
        """Tokens that are sent to the generator are appended to what it gave."""
        engine, request, stream = self._engine, self._request, self._request.stream
        try:
            if request.draft is not None:
                with self._lock:
                    engine.measure_guesses()
            while True:
                with self._lock:
                    begin = time.perf_counter()
                    engine.advance(request)
                    if not stream.has_more or stream.reason is not None:
                        return
                    token = next(stream)
                    self._count(time.perf_counter() - begin)
                sent = yield token
                if sent is not None:
                    with self._lock:
                        self._append(sent)
        finally:
            if request.rows:  # what was guessed is not the context's
                with self._lock, suppress(ClosedError):
                    engine.withdraw(request)

    def _append(self, tokens: Sequence[int]) -> None:
        """Tokens that the caller sent follow, and what was guessed does not."""
        request, choice = self._request, self._request.choice
        assert choice is not None
        ids: list[int] = as_int32("tokens", tokens).tolist()
        self._engine.append(request, ids)
        for token in ids:
            choice.sampler.accept(token)
            if choice.constraint is not None:
                choice.constraint.accept(token)

    def _count(self, taken_s: float) -> None:
        t = self._timings
        if not t.prompt_s:
            t.n_reused, t.prompt_s = self._request.stream.n_reused, taken_s
        else:
            t.n_generated += 1
            t.generate_s += taken_s
        self._note(t)
