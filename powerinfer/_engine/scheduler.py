"""Many generations at once on one session: continuous batching.

    scheduler = Scheduler(session, max_running=8)
    stream = scheduler.submit(ids, Choice(sampler=sampler), limit=64)
    for token in stream: ...

One thread steps an engine; others wait for their tokens, which a second one gives while steps go on
(rounds.py). Texts to embed or to score stand in line beside generations and share their steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

import numpy as np

from ..errors import ArgumentError, BusyError, ClosedError, DeadlineError
from . import turn
from .arrays import Ids, Logits
from .choice import Choice
from .drafting import Drafter
from .embedding import Vectors, embedding_request, pool, pooling_number
from .engine import Engine
from .expert_stats import ExpertWatch
from .request import Draft, Request, Stream, text_request
from .rounds import Rounds
from .scheduler_stats import Rates, SchedulerStats
from .session import LayerStep

__all__ = ["Scheduler", "SchedulerStats", "Stream"]

_PROBE_S = 5.0  # how often a session that has failed is tried again
_TICK_S = 0.001  # how often grammars are asked where nothing else can be done
_N_TICKS = 50
_LOOK_S = 0.25  # how often what the layers did is read

Begun = Callable[[Stream], None]


class Scheduler:
    """Generations and texts of one session, which belongs to it from now on. May be used from several
    threads."""

    def __init__(
        self,
        engine: Engine,
        *,
        draft: Draft | Drafter | None = None,
        improve: Callable[[bool], Callable[[], object] | None] | None = None,
    ) -> None:
        """
        draft: guesses tokens that follow.
        improve: called now and then, with whether nothing is under way; returns None, or what gives the
            engine another session.
        """
        self.engine = engine
        self._draft = draft
        self._improve = improve
        self._rates = Rates()
        self._layers: tuple[LayerStep, ...] = ()
        self._experts = ExpertWatch(engine.session) if engine.session.model.info.n_expert else None
        self._looked_at = 0.0
        info = engine.session.info  # asked once: it waits for a step
        self._n_blocks, self._n_free = info.n_blocks, info.n_blocks_free
        self._process = os.getpid()
        self.last_error: BaseException | None = None
        """Of the session, if a step failed and it has not worked since; it is tried again now and then."""
        if draft is not None:
            engine.measure_guesses()
        self._begun: SimpleQueue[Rounds | None] = SimpleQueue()
        engine.begin_rounds = self._begun.put
        engine.session.call = self._turn = turn.begin()
        self._thread = threading.Thread(target=self._run, name="powerinfer-scheduler", daemon=True)
        giver = threading.Thread(target=_give, args=(self._begun,), name="powerinfer-giver", daemon=True)
        giver.start()
        self._thread.start()

    def submit(
        self,
        prompt: Ids,
        choice: Choice,
        *,
        limit: int | None = None,
        deadline: float | None = None,
        is_whole: bool = False,
    ) -> Stream:
        """Begins a generation and returns its tokens.

        choice: of this generation alone; its hooks run in the scheduler's thread, an exception from them ends
        this generation only and is raised where its stream is read. limit: most tokens; None: until n_ctx
        is full, or as many as that where it is shifted.
        deadline: of time.monotonic(). is_whole: give the tokens when it has ended.

        Raises ArgumentError, ContextError (a prompt that n_ctx or the pool cannot hold), BusyError (too many
        wait), ClosedError.
        """
        engine = self.engine
        engine.check(prompt)
        most = engine.n_ctx + 1  # the last token is never computed itself
        room = most - prompt.size if engine.n_keep is None else engine.n_ctx
        left = room if limit is None else max(limit, 1)
        if engine.n_keep is None:
            left = min(left, room)
        ids = np.zeros(min(prompt.size + left, most), np.int32)
        ids[: prompt.size] = prompt
        request = Request(
            stream=Stream(prompt.size, engine.cancel),
            ids=ids,
            n=prompt.size,
            n_prompt=prompt.size,
            left_to_give=left,
            choice=choice,
            draft=self._draft,
            deadline=deadline,
        )
        request.stream.is_whole = is_whole
        choice.begin(prompt)
        self._add(request)
        return request.stream

    def score(
        self,
        ids: Ids,
        seen: Callable[[int, Logits], None],
        *,
        deadline: float | None = None,
        begun: Begun | None = None,
    ) -> None:
        """Computes a text and calls seen(i, logits) after each of its tokens, in the scheduler's thread.

        begun: gets what can cancel it, which another thread may do. Waits for its turn. Raises what submit()
        raises, DeadlineError after the deadline, and ClosedError where it was cancelled.
        """
        engine = self.engine

        def show(i: int, row: int) -> None:
            seen(i, engine.session.logits(row))

        engine.check(ids)
        self._compute([text_request(ids, range(ids.size), show, engine.cancel, deadline=deadline)], begun)

    def embed(
        self,
        ids: Ids,
        *,
        pooling: str | int = "mean",
        deadline: float | None = None,
        begun: Begun | None = None,
    ) -> Vectors:
        """The final hidden states of a text, in one vector [n_embd]; with pooling "none" [n, n_embd].

        "mean": of all tokens, "last": of the last, "cls": of the first. Waits and raises as score() does.
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
        requests = []
        for ids, own in zip(texts, rows, strict=True):
            requests.append(embedding_request(self.engine, ids, kind, own, deadline=deadline))
        self._compute(requests, begun)
        return [pool(np.stack(own), kind) for own in rows]

    def _compute(self, requests: Sequence[Request], begun: Begun | None) -> None:
        """Enters them, no more at a time than there are places, and waits for all."""
        under_way: deque[Stream] = deque()
        try:
            for request in requests:
                while not self._found_place(request, under_way):
                    _wait(under_way)
                under_way.append(request.stream)
                if begun is not None:
                    begun(request.stream)
            while under_way:
                _wait(under_way)
        finally:
            for stream in under_way:
                stream.cancel()

    def check_process(self) -> None:
        """Raises ClosedError in a process that was forked: it has none of the threads."""
        if os.getpid() != self._process:
            raise ClosedError("this process was forked from the one that opened the model: open it here anew")

    def _add(self, request: Request) -> None:
        self.check_process()
        self.engine.add(request)

    def _found_place(self, request: Request, under_way: deque[Stream]) -> bool:
        # Where others wait, it enters one text at a time.
        n_waiting = self.engine.n_requests[1]
        if len(under_way) >= self.engine.queue.max_running or (under_way and n_waiting > len(under_way)):
            return False
        try:
            self._add(request)
        except BusyError:
            if not under_way:
                raise
            return False
        return True

    @property
    def is_closing(self) -> bool:
        """No new requests are taken."""
        return self.engine.is_closing

    def stats(self) -> SchedulerStats:
        """Numbers of the moment; does not wait for a step."""
        engine, totals, rates = self.engine, self.engine.totals, self._rates.get()
        n_running, n_waiting = engine.n_requests
        return SchedulerStats(
            running=n_running,
            waiting=n_waiting,
            max_running=engine.queue.max_running,
            max_waiting=engine.queue.max_waiting or 0,
            n_ended=dict(engine.ended),
            n_prompt_tokens=totals["prompt"],
            n_reused_tokens=totals["reused"],
            n_computed_tokens=totals["computed"],
            n_generated_tokens=totals["generated"],
            n_steps=totals["steps"],
            n_preempted=totals["preempted"],
            n_evicted=engine.cache.n_evicted,
            kv_used=1 - self._n_free / max(self._n_blocks, 1),
            tokens_per_s=rates[0],
            prompt_tokens_per_s=rates[1],
            queue=engine.times.queue.copy(),
            first_token=engine.times.first_token.copy(),
            between_tokens=engine.times.between_tokens.copy(),
            layers=self._layers,
            experts=None if self._experts is None else self._experts.stats,
        )

    def close(self, *, grace_s: float = 0.0) -> None:
        """Ends the thread. Requests that wait end with ClosedError at once, those under way after grace_s
        seconds if they are not done. The session stays open."""
        self.begin_close(grace_s=grace_s)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def begin_close(self, *, grace_s: float = 0.0) -> None:
        """The same, without waiting for it."""
        self.engine.close(grace_s=grace_s)

    # -- the thread

    def _run(self) -> None:
        try:
            self._steps()
        finally:
            turn.end(self._turn)
            self._begun.put(None)

    def _steps(self) -> None:
        engine = self.engine
        while True:
            if not engine.is_busy:
                self._turn.leave()
            with engine.changed:
                while not (engine.is_busy or engine.is_closing):
                    if not engine.changed.wait(_PROBE_S if self.last_error is not None else None):
                        break
                if engine.is_closing and not engine.is_busy:
                    return
            try:
                if engine.is_busy:
                    self._step()
                else:
                    self._probe()
            except BaseException as error:  # a session that fails must not leave anybody waiting
                self._fail(error)

    def _step(self) -> None:
        engine, totals = self.engine, self.engine.totals
        before = totals["steps"], totals["generated"], totals["read"]
        engine.step()
        if totals["steps"] == before[0]:
            for _ in range(_N_TICKS):
                with engine.changed:
                    if not engine.waits_for_grammars or engine.changed.wait(_TICK_S):
                        break
            return
        self.last_error = None
        self._rates.add(totals["generated"] - before[1], totals["read"] - before[2])
        now = time.monotonic()
        n_running, _ = engine.n_requests
        if now - self._looked_at >= _LOOK_S or not n_running:
            self._looked_at = now
            self._layers = tuple(engine.session.last_step)
            if self._experts is not None:
                self._experts.look(engine.session)
            self._n_free = engine.session.info.n_blocks_free
            if self._improve is not None:
                move = self._improve(not n_running)
                if move is not None:
                    engine.vacate()
                    move()
                    if self._draft is not None:
                        engine.measure_guesses()

    def _probe(self) -> None:
        """Tries whether a session that failed works again; raises what it raises."""
        self.engine.cache.drop_all()
        self.engine.session.feed(np.zeros(1, np.int32), seq=0, want_logits=True)
        self.engine.session.drop(0)
        self.last_error = None

    def _fail(self, error: BaseException) -> None:
        """Nothing that was under way can go on; what comes later may, if the session still works."""
        self.last_error = error
        try:
            self.engine.fail(error)
        except BaseException:
            self.begin_close()
            return
        with suppress(Exception):
            self._probe()


def _give(begun: SimpleQueue[Rounds | None]) -> None:
    """A thread's: what rounds have chosen is given while further ones are computed."""
    while (rounds := begun.get()) is not None:
        rounds.give()
        del rounds  # and what it holds


def _wait(under_way: deque[Stream]) -> None:
    """Until the first of them has ended."""
    for _ in under_way[0]:
        pass
    reason = under_way.popleft().reason
    if reason == "cancelled":
        raise ClosedError("the request was cancelled")
    if reason != "stop":
        raise DeadlineError("the time for this request is over")
