"""The engine's loop: requests come in, and each step computes one batch of tokens for all of them.

    engine = Engine(session)
    engine.add(request)
    while engine.is_busy:
        engine.step()

It has no thread of its own: who steps it computes. A step takes the next token of every generation that is
under way and a part of the prompts that are not computed yet, in one feed; requests join and leave between
steps. Prompts that begin the same way share memory and are computed once, also with what an earlier, finished
generation has left behind. Where the memory for K and V ends, idle sequences are forgotten first, then the
youngest generation waits and is computed again later.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, BusyError, ClosedError, ContextError, PowerInferError
from ._native import KV_BLOCK
from .choice import Choice
from .context import VISIT_PART, Ids, common_prefix, n_dropped
from .held import HeldSequences, blocks
from .scheduler_stats import Rates, SchedulerStats
from .session import LayerStep, Session
from .stream import Job, Reason, Stream

PROMPT_PART = 128
"""Prompt tokens of a step in which others generate."""

_VISITS_PART = 2 * VISIT_PART  # of all visits together
_LAYERS_S = 0.25  # how often what the layers did is read


class Engine:
    """The requests of one session. One thread at a time may call step(), fail() and probe(); any may call the
    others."""

    def __init__(
        self,
        session: Session,
        *,
        n_seq: int | None = None,
        max_running: int | None = None,
        max_waiting: int | None = None,
        prompt_part: int = PROMPT_PART,
        n_keep: int | None = None,
        draft: Callable[[Ids], npt.ArrayLike] | None = None,
        n_wide: int = 0,
        improve: Callable[[bool], Callable[[], Session] | None] | None = None,
    ) -> None:
        """
        n_seq: the session's first sequences that are used; None: all.
        max_running: requests under way at the same time; None: half of the sequences, the other half holds
            what may be shared.
        max_waiting: requests that wait for a place; more are refused. None: any number may wait.
        prompt_part: prompt tokens of a step in which others generate; alone a prompt takes n_batch.
        n_keep: where a context is full, forget the older half of what follows its first n_keep tokens; None:
            the generation ends.
        draft: guesses tokens that follow; n_wide: how many more than one token a step can take and still give
            each of them the logits it has alone.
        improve: called now and then, with whether nothing is under way; returns None, or what closes the
            session and opens another one in its place.
        """
        self._info = session.info
        self.session = session
        self._n_seq = self._info.n_seq if n_seq is None else n_seq
        self.max_running = max_running or max(self._n_seq // 2, 1)
        if not 1 <= self.max_running <= self._n_seq:
            raise ArgumentError(f"max_running is {max_running}: the session has {self._n_seq} sequences")
        if (max_waiting is not None and max_waiting < 0) or prompt_part < 1:
            raise ArgumentError(f"max_waiting is {max_waiting} and prompt_part {prompt_part}: too small")
        self.max_waiting = max_waiting
        self._prompt_part = prompt_part
        self.n_keep = n_keep
        self._draft = draft
        self._n_wide = n_wide
        self._improve = improve
        self._held = HeldSequences(session, n_seq=self._n_seq)
        self.changed = threading.Condition()
        """Notified when a request comes or is cancelled, and when the engine is closed."""
        self._waiting: deque[Job] = deque()  # with the lock
        self._running: list[Job] = []  # of who steps; others read its length
        self._chosen: list[tuple[Stream, int, bool]] = []  # not given yet
        self.is_closing = False
        """No new requests are taken."""
        self._ends_at = 0.0
        self._ended: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._rates = Rates()
        self._layers: tuple[LayerStep, ...] = ()
        self._layers_at = 0.0
        self._n_free = self._info.n_blocks_free
        self.last_error: BaseException | None = None
        """Of the session, if a step failed and it has not worked since."""

    # -- what any thread may call

    @property
    def is_busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._running or self._waiting)

    def check(self, ids: Ids) -> None:
        """Raises ArgumentError or ContextError for a prompt that cannot be computed."""
        if not ids.size:
            raise ArgumentError("the prompt has no tokens")
        if ids.size > self._info.n_ctx:
            raise ContextError(f"the prompt has {ids.size} tokens and n_ctx is {self._info.n_ctx}")
        n_vocab = self.session.model.info.n_vocab
        if int(ids.min()) < 0 or int(ids.max()) >= n_vocab:
            raise ArgumentError(f"the prompt holds a token that is not in 0..{n_vocab - 1}")

    def add(self, job: Job) -> None:
        """Takes a request, which waits for its place. Raises ClosedError, BusyError."""
        with self.changed:
            if self.is_closing:
                raise ClosedError("the scheduler is closed")
            free = max(self.max_running - len(self._running), 0)
            if self.max_waiting is not None and len(self._waiting) >= self.max_waiting + free:
                raise BusyError(
                    f"{len(self._running)} requests are under way and {len(self._waiting)} are waiting"
                )
            self._waiting.append(job)
            self.changed.notify_all()

    def cancel(self, stream: Stream) -> None:
        """Ends a request before the next step; does nothing after its end."""
        with self.changed:
            if stream.reason is not None:
                return
            stream.is_cancelled = True
            job = next((job for job in self._waiting if job.stream is stream), None)
            if job is not None:
                self._waiting.remove(job)
            self.changed.notify_all()
        if job is not None:
            self._end(job, "cancelled")

    def close(self, *, grace_s: float = 0.0) -> None:
        """Takes no more requests. Those that wait end with ClosedError at once, those under way in the first
        step after grace_s seconds."""
        with self.changed:
            if not self.is_closing or time.monotonic() + grace_s < self._ends_at:
                self._ends_at = time.monotonic() + grace_s
            self.is_closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self.changed.notify_all()
        for job in waiting:
            self._end(job, "error", ClosedError("the server is shutting down"))

    def stats(self) -> SchedulerStats:
        """Numbers of the moment; does not wait for a step."""
        totals, rates = self._totals, self._rates.get()
        with self.changed:
            waiting = len(self._waiting)
        return SchedulerStats(
            running=len(self._running),
            waiting=waiting,
            max_running=self.max_running,
            max_waiting=self.max_waiting or 0,
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

    # -- what one thread at a time may call

    def step(self) -> None:
        """One feed, and a choice for each generation whose tokens are all computed."""
        self._leave()
        self._admit()
        self._shift()
        parts = self._feed(self._parts())
        if not parts:
            return
        self.last_error = None
        n_before = self._totals["generated"]
        n_read = sum(n for job, n, _ in parts if job.left > 1 or job.is_visit)
        self._totals["steps"] += 1
        self._totals["computed"] += sum(n for _, n, _ in parts)
        row = 0
        for job, n, n_rows in parts:
            assert job.sequence is not None
            job.sequence.n += n
            if job.visit is not None:
                self._show(job, n, row)
            row += n_rows
            if job.left <= 0 and job.choice is not None:
                self._choose(job, job.choice, row - 1 - job.guess.size)
        self._give()
        self._rates.add(self._totals["generated"] - n_before, n_read)
        self._look()

    def fail(self, error: BaseException) -> None:
        """Nothing that was under way can go on; what comes later may, if the engine still works."""
        self.last_error = error
        with self.changed:
            jobs = [*self._running, *self._waiting]
            self._waiting.clear()
        for job in jobs:
            job.sequence = None
            self._finish(job, "error", error)
        try:
            self.drop_all()
        except BaseException:
            self.close()
            return
        with suppress(Exception):
            self.probe()

    def drop_all(self) -> None:
        """Forgets what the sequences hold."""
        self._held.drop_all()

    def probe(self) -> None:
        """Tries whether a session that failed works again; raises what it raises."""
        self._held.drop_all()
        self.session.feed(np.zeros(1, np.int32), seq=0, want_logits=True)
        self.session.drop(0)
        self.last_error = None

    # -- a step's parts

    def _finish(self, job: Job, reason: Reason, error: BaseException | None = None) -> None:
        """A request that was under way is over."""
        self._give()  # its last token among them
        self._end(job, reason, error)

    def _end(self, job: Job, reason: Reason, error: BaseException | None = None) -> None:
        """The request is over; what was computed of it stays held."""
        if job.sequence is not None:
            if job.is_visit or error is not None:
                self._held.drop(job.sequence)
            else:
                self._held.release(job.sequence)
            job.sequence = None
        if job.choice is not None:
            job.choice.sampler.close()
        with self.changed:  # who sees that it runs no more sees it counted
            self._ended[reason] += 1
            if job in self._running:
                self._running.remove(job)
        job.stream.end(reason, error)

    def _leave(self) -> None:
        """Those that nobody waits for any more, or not so long."""
        now = time.monotonic()
        for job in list(self._running):
            if job.stream.is_cancelled:
                self._finish(job, "cancelled")
            elif job.deadline is not None and now >= job.deadline:
                self._finish(job, "time")
            elif self.is_closing and now >= self._ends_at:
                self._finish(job, "error", ClosedError("the server is shutting down"))
        with self.changed:
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
        with self.changed:
            candidates = list(self._waiting)
        for job in candidates:
            if len(self._running) >= self.max_running:
                return
            if job.n > self._info.n_ctx:  # it gave way just when its context was to be shifted
                job.forget(*self._forgotten())
            ids = job.ids[: job.n]
            source, n = (None, 0) if job.is_visit else self._held.find(ids, job.n_prompt)
            if not job.is_visit and self._coming(ids) - n >= KV_BLOCK:
                continue
            # A shared block is copied when it is written; those that run may each want another.
            need = blocks(job.n) - n // KV_BLOCK + len(self._running)
            if job.is_visit:  # several texts of one call: those before it are not all computed yet
                need += sum(blocks(own.n) - blocks(own.n - own.left) for own in self._running)
            while self.session.info.n_blocks_free < need and self._held.evict(keep=source):
                pass
            if self._running and self.session.info.n_blocks_free < need:
                return
            sequence = self._held.take(job.ids, job.n_prompt, source, n)
            if sequence is None:
                return
            with self.changed:
                if job not in self._waiting:  # cancelled meanwhile
                    self._held.release(sequence)
                    continue
                self._waiting.remove(job)
                self._running.append(job)
            job.sequence = sequence
            if job.is_visit:  # its tokens are computed otherwise than those of a prompt
                sequence.n_shared = 0
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

    def _shift(self) -> None:
        """Makes room for the next token of those whose context is full."""
        keep, n_drop = self._forgotten()
        for job in [job for job in self._running if job.n > self._info.n_ctx]:
            while job.sequence is not None:
                try:
                    self.session.shift(keep, n_drop, seq=job.sequence.number)
                    job.forget(keep, n_drop)
                    break
                except ContextError as error:  # what it shares must be copied, and there is no room for that
                    if self._held.evict():
                        continue
                    if len(self._running) == 1:
                        self._finish(job, "error", error)
                    else:
                        self._preempt()
                except PowerInferError as error:
                    self._finish(job, "error", error)

    def _forgotten(self) -> tuple[int, int]:
        """How many tokens a context shift keeps, and how many it drops behind them."""
        n_ctx = self._info.n_ctx
        keep = min(self.n_keep or 0, n_ctx - 1)
        return keep, n_dropped(n_ctx, keep, 1, n_ctx)

    def _guess(self) -> None:
        """Ids that may follow, where the step is so narrow that each has the logits it has alone."""
        if self._draft is None or any(job.left > 1 for job in self._running):
            return
        room = self._n_wide + 1 - len(self._running)
        for job in list(self._running):
            if room < 1 or job.is_visit:
                continue
            try:
                ids = np.asarray(self._draft(job.history.copy())).ravel()[:room]
                bad = np.flatnonzero((ids < 0) | (ids >= self.session.model.info.n_vocab))
                job.take_guess(ids[: bad[0] if bad.size else ids.size].astype(np.int32))
            except Exception as error:  # it is the user's, and belongs to this generation
                self._finish(job, "error", error)
            room -= job.guess.size

    def _parts(self) -> list[tuple[Job, int]]:
        """What the next step computes: of whom, and how many tokens."""
        self._guess()
        n_next = sum(job.left == 1 for job in self._running)
        room = max(self._info.n_batch - n_next, 1)
        if n_next:
            room = min(room, self._prompt_part)
        visits = _VISITS_PART
        parts = []
        for job in self._running:
            n = job.left
            if n > 1:
                n = job.part(room, min(visits, VISIT_PART)) if room > 0 else 0
                room -= n
            if job.is_visit and job.sequence is not None:
                visits -= int(np.count_nonzero(job.wants(job.sequence.n, job.sequence.n + n)))
            if n:
                parts.append((job, n + job.guess.size))
        return sorted(parts, key=lambda part: part[0].is_visit)  # rows of logits of one kind stand together

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
                rows.append(int(np.count_nonzero(wants)))
            try:
                self.session.feed(np.concatenate(tokens), seq=owners, want_logits=wanted)
            except ContextError:
                if any(job.guess.size for job, _ in parts):
                    parts = [(job, n - job.guess.size) for job, n in parts]
                    for job, _ in parts:
                        job.guess = job.guess[:0]
                elif not self._held.evict():
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
        job.guess = job.guess[:0]
        self._totals["preempted"] += 1
        with self.changed:
            if not self.is_closing:
                self._waiting.appendleft(job)
                return
        self._finish(job, "error", ClosedError("the server is shutting down"))

    def _show(self, job: Job, n: int, row: int) -> None:
        """Visits what was just computed; what the visitor raises is its own."""
        assert job.visit is not None and job.sequence is not None
        try:
            for i in range(job.sequence.n - n, job.sequence.n):
                if i in job.visited:
                    if i >= job.n_seen:  # the others were, before it gave way
                        job.visit(i, row)
                        job.n_seen = i + 1
                    row += 1
        except BaseException as error:  # also what would end the thread: others have their answers in it
            self._finish(job, "error", error)
            return
        if not job.left:
            self._finish(job, "stop")

    def _give(self) -> None:
        """Gives the tokens chosen in this step to those who wait: when all are chosen, or one is over.
        Who wakes up wants Python's lock, and would have it at the next call of the engine."""
        for stream, token, is_end in self._chosen:
            stream.put(token, is_end)
        self._chosen.clear()

    def _choose(self, job: Job, choice: Choice, row: int) -> None:
        """The next tokens of a generation: one, and one more for each that was guessed right."""
        guess, job.guess = job.guess, job.guess[:0]
        reason: Reason | None = None
        try:
            for i in range(guess.size + 1):
                self._totals["generated"] += 1
                reason = self._choose_one(job, choice, row + i)
                if reason is not None or i == guess.size or job.ids[job.n - 1] != guess[i]:
                    break
        except BaseException as error:  # also what would end the thread: others have their answers in it
            self._finish(job, "error", error)
            return
        assert job.sequence is not None
        if job.sequence.n >= job.n:
            self.session.cut(job.n - 1, seq=job.sequence.number)
            job.sequence.n = job.n - 1
        if reason is not None:
            self._finish(job, reason)

    def _choose_one(self, job: Job, choice: Choice, row: int) -> Reason | None:
        """A token, and why it is the last; what its hooks raise is its own."""
        if choice.is_plain:
            logits = None
            token = self.session.draw(choice.sampler, row)
            choice.accept(token)
        else:
            logits = self.session.logits(row)
            token = choice.token(job.history, logits)
        job.ids[job.n] = token
        job.n += 1
        job.left_to_give -= 1
        is_over = choice.is_last(token) or (logits is not None and choice.stops(job.history, logits))
        self._chosen.append((job.stream, token, token in choice.ends))
        return "stop" if is_over else "length" if not job.left_to_give else None

    def _look(self) -> None:
        """Now and then: what the layers did, and what is free."""
        now = time.monotonic()
        if now - self._layers_at >= _LAYERS_S or not self._running:
            self._layers_at = now
            self._layers = tuple(self.session.last_step)
            self._n_free = self.session.info.n_blocks_free
            if self._improve is not None:
                self._move(self._improve(not self._running))

    def _move(self, open_other: Callable[[], Session] | None) -> None:
        """Goes on with another session, which has to compute what is under way once more."""
        if open_other is None:
            return
        while self._running:
            self._preempt()
        self._held.drop_all()
        self.session = open_other()
        self._held = HeldSequences(self.session, n_seq=self._n_seq, n_evicted=self._held.n_evicted)
