"""Many generations at once on one session: continuous batching.

    scheduler = Scheduler(session, max_running=8)
    stream = scheduler.submit(ids, Choice(sampler=sampler), limit=64)
    for token in stream: ...

One thread steps an engine; others wait for their tokens.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from .choice import Choice
from .context import Ids
from .engine import Engine
from .scheduler_stats import SchedulerStats
from .session import Session
from .stream import Job, Stream
from .visiting import Visits

__all__ = ["Scheduler", "SchedulerStats", "Stream"]

_PROBE_S = 5.0  # how often an engine that has failed is tried again


class Scheduler(Visits):
    """Generations and embeddings of one session, which belongs to it from now on. May be used from several
    threads."""

    def __init__(self, session: Session, *, max_waiting: int = 64, **options: Any) -> None:
        """max_waiting: requests that wait for a place; more are refused. options: those of Engine."""
        self.engine = Engine(session, max_waiting=max_waiting, **options)
        self._thread = threading.Thread(target=self._run, name="powerinfer-scheduler", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Ids,
        choice: Choice,
        *,
        limit: int | None = None,
        deadline: float | None = None,
    ) -> Stream:
        """Begins a generation and returns its tokens.

        choice: of this generation alone; its hooks run in the scheduler's thread, an exception from them ends
        this generation only and is raised where its stream is read. limit: most tokens; None: until n_ctx
        is full, or as many as that where it is shifted.
        deadline: of time.monotonic().

        Raises ArgumentError, ContextError (a prompt that n_ctx or the pool cannot hold), BusyError (too many
        wait), ClosedError.
        """
        engine = self.engine
        engine.check(prompt)
        n_ctx = engine.session.info.n_ctx
        most = n_ctx + 1  # the last token is never computed itself
        room = most - prompt.size if engine.n_keep is None else n_ctx
        left = room if limit is None else max(limit, 1)
        if engine.n_keep is None:
            left = min(left, room)
        ids = np.zeros(min(prompt.size + left, most), np.int32)
        ids[: prompt.size] = prompt
        job = Job(
            stream=Stream(prompt.size, engine.cancel),
            ids=ids,
            n=prompt.size,
            n_prompt=prompt.size,
            left_to_give=left,
            choice=choice,
            deadline=deadline,
        )
        choice.begin(prompt)
        engine.add(job)
        return job.stream

    @property
    def is_closing(self) -> bool:
        """No new requests are taken."""
        return self.engine.is_closing

    @property
    def last_error(self) -> BaseException | None:
        """Of the engine, if a step failed and it has not worked since; it is tried again now and then."""
        return self.engine.last_error

    def stats(self) -> SchedulerStats:
        """Numbers of the moment; does not wait for a step."""
        return self.engine.stats()

    def close(self, *, grace_s: float = 0.0) -> None:
        """Ends the thread. Requests that wait end with ClosedError at once, those under way after grace_s
        seconds if they are not done. The session stays open."""
        self.begin_close(grace_s=grace_s)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def begin_close(self, *, grace_s: float = 0.0) -> None:
        """The same, without waiting for it."""
        self.engine.close(grace_s=grace_s)

    def _run(self) -> None:
        engine = self.engine
        while True:
            with engine.changed:
                while not (engine.is_busy or engine.is_closing):
                    if not engine.changed.wait(_PROBE_S if engine.last_error is not None else None):
                        break
                if engine.is_closing and not engine.is_busy:
                    return
            try:
                if engine.is_busy:
                    engine.step()
                else:
                    engine.probe()
            except BaseException as error:  # an engine that fails must not leave anybody waiting
                engine.fail(error)
