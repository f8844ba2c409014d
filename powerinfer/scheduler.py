"""Many generations at once on one session: continuous batching.

    scheduler = Scheduler(session, max_running=8)
    stream = scheduler.submit(ids, Choice(sampler=sampler), limit=64)
    for token in stream: ...

One thread computes. A step takes the next token of every generation that is under way and a part of the
prompts that are not read yet, in one feed; requests join and leave between steps. Prompts that begin the same
way share memory and are computed once, also with what an earlier, finished generation has left behind. Where
the memory for K and V ends, idle sequences are forgotten first, then the youngest generation waits and is
computed again later.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .choice import Choice
from .context import Ids, Logits, common_prefix
from .embedding import pool, pooling_number
from .errors import ArgumentError, BusyError, ClosedError, ContextError, PowerInferError
from .held import BLOCK, HeldSequences, blocks
from .scheduler_stats import Rates, SchedulerStats
from .session import LayerStep, Session
from .stream import Job, Reason, Stream

__all__ = ["Scheduler", "SchedulerStats", "Stream"]

Vectors = npt.NDArray[np.float32]

_PROMPT_PART = 128  # prompt tokens of a step in which others generate
_VISIT_PART = 32  # of tokens that each have logits, which take memory: visits, answers computed again
_LAYERS_S = 0.25  # how often what the layers did is read


class Scheduler:
    """Generations and embeddings of one session, which belongs to it from now on. May be used from several
    threads."""

    def __init__(
        self,
        session: Session,
        *,
        max_running: int | None = None,
        max_waiting: int = 64,
        prompt_part: int = _PROMPT_PART,
    ) -> None:
        """
        max_running: generations under way at the same time; None: half of the session's sequences, the other
            half holds what may be shared.
        max_waiting: requests that wait for a place; more are refused.
        prompt_part: prompt tokens of a step in which others generate; alone a prompt takes n_batch.
        """
        self._info = session.info
        self._session = session
        self.max_running = max_running or max(self._info.n_seq // 2, 1)
        if not 1 <= self.max_running <= self._info.n_seq:
            raise ArgumentError(f"max_running is {max_running}: the session has {self._info.n_seq} sequences")
        if max_waiting < 0 or prompt_part < 1:
            raise ArgumentError(f"max_waiting is {max_waiting} and prompt_part {prompt_part}: too small")
        self.max_waiting = max_waiting
        self._prompt_part = prompt_part
        self._held = HeldSequences(session)
        self._wake = threading.Condition()
        self._waiting: deque[Job] = deque()  # with the lock
        self._running: list[Job] = []  # the thread's; others read its length
        self._closing = False
        self._ends_at = 0.0
        self._ended: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._rates = Rates()
        self._layers: tuple[LayerStep, ...] = ()
        self._layers_at = 0.0
        self._n_free = self._info.n_blocks_free
        self.last_error: BaseException | None = None
        """Of the engine, if the last step failed."""
        self._thread = threading.Thread(target=self._run, name="powerinfer-scheduler", daemon=True)
        self._thread.start()

    # -- what others call

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
        this generation only and is raised where its stream is read. limit: most tokens; None: until n_ctx.
        deadline: of time.monotonic().

        Raises ArgumentError, ContextError (a prompt that n_ctx or the pool cannot hold), BusyError (too many
        wait), ClosedError.
        """
        self._check(prompt)
        most = self._info.n_ctx + 1  # the last token is never computed itself
        end = most if limit is None else min(prompt.size + max(limit, 1), most)
        ids = np.zeros(end, np.int32)
        ids[: prompt.size] = prompt
        job = Job(
            stream=Stream(prompt.size, self._cancel),
            ids=ids,
            n=prompt.size,
            n_prompt=prompt.size,
            choice=choice,
            deadline=deadline,
        )
        choice.begin(prompt)
        self._enter(job)
        return job.stream

    def visit(
        self,
        ids: Ids,
        seen: Callable[[int, Logits], None],
        *,
        deadline: float | None = None,
        begun: Callable[[Stream], None] | None = None,
    ) -> None:
        """Computes a text and calls seen(i, logits) after each of its tokens, in the scheduler's thread.

        begun: gets what can cancel it, which another thread may do. Waits for its turn. Raises what submit()
        raises, TimeoutError after the deadline, and ClosedError where it was cancelled.
        """
        self._visit(ids, range(ids.size), lambda i, row: seen(i, self._session.logits(row)), deadline, begun)

    def embed(
        self,
        ids: Ids,
        *,
        pooling: str | int = "mean",
        deadline: float | None = None,
        begun: Callable[[Stream], None] | None = None,
    ) -> Vectors:
        """The final hidden states of a text, in one vector [n_embd]; with pooling "none" [n, n_embd].

        "mean": of all tokens, "last": of the last, "cls": of the first. Waits and raises as visit() does.
        """
        kind = pooling_number(pooling)
        if kind < 0:
            raise ArgumentError("pooling must be 'none', 'mean', 'cls' or 'last'")
        rows: list[Vectors] = []
        wanted = {2: range(1), 3: range(ids.size - 1, ids.size)}.get(kind, range(ids.size))
        self._visit(ids, wanted, lambda _, row: rows.append(self._session.hidden(row)), deadline, begun)
        return pool(np.stack(rows), kind)

    def _visit(
        self,
        ids: Ids,
        visited: range,
        visit: Callable[[int, int], None],
        deadline: float | None,
        begun: Callable[[Stream], None] | None,
    ) -> None:
        self._check(ids)
        job = Job(
            stream=Stream(ids.size, self._cancel),
            ids=np.array(ids, np.int32),
            n=ids.size,
            n_prompt=ids.size,
            visit=visit,
            visited=visited,
            deadline=deadline,
        )
        self._enter(job)
        try:
            if begun is not None:
                begun(job.stream)
            for _ in job.stream:
                pass
        finally:
            job.stream.cancel()
        if job.stream.reason == "cancelled":
            raise ClosedError("the request was cancelled")
        if job.stream.reason != "stop":
            raise TimeoutError("the time for this request is over")

    @property
    def is_closing(self) -> bool:
        """No new requests are taken."""
        return self._closing

    def stats(self) -> SchedulerStats:
        """Numbers of the moment; does not wait for a step."""
        totals, rates = self._totals, self._rates.get()
        with self._wake:
            waiting = len(self._waiting)
        return SchedulerStats(
            running=len(self._running),
            waiting=waiting,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            n_ended=dict(self._ended),
            n_prompt_tokens=totals["prompt"],
            n_reused_tokens=totals["reused"],
            n_computed_tokens=totals["computed"],
            n_generated_tokens=totals["generated"],
            n_steps=totals["steps"],
            n_preempted=totals["preempted"],
            n_evicted=self._held.n_evicted,
            kv_used=1 - self._n_free / max(self._info.n_blocks, 1),
            tokens_per_s=rates[0],
            prompt_tokens_per_s=rates[1],
            layers=self._layers,
        )

    def close(self, *, grace_s: float = 0.0) -> None:
        """Ends the thread. Requests that wait end with ClosedError at once, those under way after grace_s
        seconds if they are not done. The session stays open."""
        self.begin_close(grace_s=grace_s)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def begin_close(self, *, grace_s: float = 0.0) -> None:
        """The same, without waiting for it."""
        with self._wake:
            if not self._closing or time.monotonic() + grace_s < self._ends_at:
                self._ends_at = time.monotonic() + grace_s
            self._closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._wake.notify_all()
        for job in waiting:
            self._finish(job, "error", ClosedError("the server is shutting down"))

    # -- entering and leaving

    def _check(self, ids: Ids) -> None:
        if not ids.size:
            raise ArgumentError("the prompt has no tokens")
        if ids.size > self._info.n_ctx:
            raise ContextError(f"the prompt has {ids.size} tokens and n_ctx is {self._info.n_ctx}")
        n_vocab = self._session.model.info.n_vocab
        if int(ids.min()) < 0 or int(ids.max()) >= n_vocab:
            raise ArgumentError(f"the prompt holds a token that is not in 0..{n_vocab - 1}")

    def _enter(self, job: Job) -> None:
        with self._wake:
            if self._closing:
                raise ClosedError("the scheduler is closed")
            free = self.max_running - len(self._running)
            if len(self._waiting) >= self.max_waiting + max(free, 0):
                raise BusyError(
                    f"{len(self._running)} requests are under way and {len(self._waiting)} are waiting"
                )
            self._waiting.append(job)
            self._wake.notify_all()

    def _cancel(self, stream: Stream) -> None:
        with self._wake:
            if stream.reason is not None:
                return
            stream.is_cancelled = True
            job = next((job for job in self._waiting if job.stream is stream), None)
            if job is not None:
                self._waiting.remove(job)
            self._wake.notify_all()
        if job is not None:
            self._finish(job, "cancelled")

    def _finish(self, job: Job, reason: Reason, error: BaseException | None = None) -> None:
        """The request is over; what was computed of it stays held."""
        if job.sequence is not None:
            if job.is_visit or error is not None:
                self._held.drop(job.sequence)
            else:
                self._held.release(job.sequence)
            job.sequence = None
        if job.choice is not None:
            job.choice.sampler.close()
        with self._wake:  # who sees that it runs no more sees it counted
            self._ended[reason] += 1
            if job in self._running:
                self._running.remove(job)
        if error is not None and not isinstance(error, Exception):
            # What ends programs must not end that of the reader: a hook's exit, a panic of a grammar.
            error = RuntimeError(f"{type(error).__name__}: {error}")
        job.stream.end(reason, error)

    # -- the thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._waiting or self._running or self._closing):
                    self._wake.wait()
                if self._closing and not self._running:
                    return
            try:
                self._step()
                self.last_error = None
            except BaseException as error:  # an engine that fails must not leave anybody waiting
                self.last_error = error
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            jobs = [*self._running, *self._waiting]
            self._waiting.clear()
        for job in jobs:
            job.sequence = None
            self._finish(job, "error", error)
        try:
            self._held.drop_all()
        except PowerInferError:
            self.begin_close()

    def _step(self) -> None:
        """One feed, and a choice for each generation whose tokens are all computed."""
        self._leave()
        self._admit()
        parts = self._feed(self._parts())
        if not parts:
            return
        n_computed = sum(n for _, n, _ in parts)
        n_next = sum(n == 1 for _, n, _ in parts)
        self._totals["steps"] += 1
        self._totals["computed"] += n_computed
        self._rates.add(n_next, n_computed - n_next)
        row = 0
        for job, n, n_rows in parts:
            assert job.sequence is not None
            job.sequence.n += n
            if job.visit is not None:
                self._show(job, n, row)
            row += n_rows
            if not job.left and job.choice is not None:
                self._totals["generated"] += 1
                self._choose(job, job.choice, row - 1)
        self._look()

    def _leave(self) -> None:
        """Those that nobody waits for any more, or not so long."""
        now = time.monotonic()
        for job in list(self._running):
            if job.stream.is_cancelled:
                self._finish(job, "cancelled")
            elif job.deadline is not None and now >= job.deadline:
                self._finish(job, "time")
            elif self._closing and now >= self._ends_at:
                self._finish(job, "error", ClosedError("the server is shutting down"))
        with self._wake:
            late = [job for job in self._waiting if job.deadline is not None and now >= job.deadline]
            left = [job for job in self._waiting if job.stream.is_cancelled and job not in late]
            for job in (*late, *left):
                self._waiting.remove(job)
        for job in late:
            self._finish(job, "time")
        for job in left:  # while they gave way to others
            self._finish(job, "cancelled")

    def _admit(self) -> None:
        """Gives places to those who wait, in the order in which they came; one whose beginning is just being
        computed for another lets others pass until it can share that."""
        with self._wake:
            candidates = list(self._waiting)
        for job in candidates:
            if len(self._running) >= self.max_running:
                return
            ids = job.ids[: job.n]
            source, n = (None, 0) if job.is_visit else self._held.find(ids)
            if not job.is_visit and self._coming(ids) - n >= BLOCK:
                continue
            # A shared block is copied when it is written; those that run may each want another.
            need = blocks(job.n) - n // BLOCK + len(self._running)
            while self._session.info.n_blocks_free < need and self._held.evict(keep=source):
                pass
            if self._running and self._session.info.n_blocks_free < need:
                return
            sequence = self._held.take(job.ids, source, n)
            if sequence is None:
                return
            with self._wake:
                if job not in self._waiting:  # cancelled meanwhile
                    self._held.release(sequence)
                    continue
                self._waiting.remove(job)
                self._running.append(job)
            job.sequence = sequence
            if not job.is_counted:
                job.is_counted, job.stream.n_reused = True, n
                self._totals["prompt"] += job.n_prompt
                self._totals["reused"] += n

    def _coming(self, ids: Ids) -> int:
        """How many of ids' first tokens, all but the last, are about to be computed for another request."""
        shared = [
            min(common_prefix(job.ids[: job.n], ids), ids.size - 1)
            for job in self._running
            if job.left > 1 and not job.is_visit
        ]
        return max(shared, default=0)

    def _parts(self) -> list[tuple[Job, int]]:
        """What the next step computes: of whom, and how many tokens."""
        n_next = sum(job.left == 1 for job in self._running)
        room = max(self._info.n_batch - n_next, 1)
        if n_next:
            room = min(room, self._prompt_part)
        parts = []
        for job in self._running:
            n = job.left
            if n > 1:
                n = min(n, room, job.part(_VISIT_PART))
                room -= n
            if n:
                parts.append((job, n))
        return parts

    def _feed(self, parts: list[tuple[Job, int]]) -> list[tuple[Job, int, int]]:
        """Computes the parts in one batch, or fewer where the pool is too small; with the number of rows of
        logits of each."""
        while parts:
            tokens, owners, wanted, rows = [], [], [], []
            for job, n in parts:
                assert job.sequence is not None
                first = job.sequence.n
                tokens.append(job.ids[first : first + n])
                owners += [job.sequence.number] * n
                wants = job.wants(first, first + n)
                wanted += wants
                rows.append(sum(wants))
            try:
                self._session.feed(np.concatenate(tokens), seq=owners, want_logits=wanted)
            except ContextError:
                if not self._held.evict():
                    if len(self._running) == 1:
                        raise
                    self._preempt()
                    parts = [part for part in parts if part[0].sequence is not None]
                continue
            return [(job, n, n_rows) for (job, n), n_rows in zip(parts, rows, strict=True)]
        return []

    def _preempt(self) -> None:
        """The youngest gives its memory back and waits at the head of the line. One alone always fits, as the
        pool is not smaller than n_ctx."""
        job = self._running.pop()
        assert job.sequence is not None
        self._held.drop(job.sequence)
        job.sequence = None
        self._totals["preempted"] += 1
        with self._wake:
            if not self._closing:
                self._waiting.appendleft(job)
                return
        self._finish(job, "error", ClosedError("the server is shutting down"))

    def _show(self, job: Job, n: int, row: int) -> None:
        """Visits what was just computed; what the visitor raises is its own."""
        assert job.visit is not None and job.sequence is not None
        try:
            for i in range(job.sequence.n - n, job.sequence.n):
                if i in job.visited:
                    job.visit(i, row)
                    row += 1
        except BaseException as error:  # also what would end the thread: others have their answers in it
            self._finish(job, "error", error)
            return
        if not job.left:
            self._finish(job, "stop")

    def _choose(self, job: Job, choice: Choice, row: int) -> None:
        """The next token of a generation; what its own hooks raise is its own."""
        try:
            logits = self._session.logits(row)
            token = choice.token(job.ids[: job.n], logits)
            job.ids[job.n] = token
            job.n += 1
            is_over = choice.is_over(job.ids[: job.n], logits)
        except BaseException as error:  # also what would end the thread: others have their answers in it
            self._finish(job, "error", error)
            return
        job.stream.put(token, token in choice.ends)
        if is_over:
            self._finish(job, "stop")
        elif job.n >= job.ids.size:
            self._finish(job, "length")

    def _look(self) -> None:
        """Now and then: what the layers did, and what is free."""
        now = time.monotonic()
        if now - self._layers_at >= _LAYERS_S or not self._running:
            self._layers_at = now
            self._layers = tuple(self._session.last_step)
            self._n_free = self._session.info.n_blocks_free
