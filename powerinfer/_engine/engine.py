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

import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from ..errors import ArgumentError, ClosedError, ContextError, PowerInferError, UnsupportedError
from ._native import KV_BLOCK
from .arrays import Ids
from .batch import Joined, Part, coming, joined, parts_of
from .context_shift import ContextShift
from .one_call import OneCall
from .one_step import OneStep
from .pace import Pace
from .prefix_cache import PrefixCache, Sequence, blocks
from .request import Reason, Request, Stream, check_prompt
from .request_queue import RequestQueue
from .rounds import Given, give
from .scheduler_stats import RequestTimes
from .session import Session
from .speculation import free_guesses, show_heads, take_guesses


class Engine(OneCall):
    """The requests of one session. Any thread may call add(), cancel(), check() and close(); the others are
    for one thread at a time."""

    def __init__(
        self,
        session: Session,
        *,
        n_seq: int | None = None,
        max_running: int | None = None,
        max_waiting: int | None = None,
        prompt_part: int | None = None,
        n_keep: int | None = None,
        n_guesses: int | None = None,
    ) -> None:
        """
        n_seq: the session's first sequences that are used; None: all.
        max_running: requests under way at the same time; None: half of the sequences, the other half holds
            what may be shared.
        max_waiting: requests that wait for a place; more are refused. None: any number may wait.
        prompt_part: prompt tokens of a step in which others generate; None: what pace.py finds. Alone a
            prompt takes n_batch.
        n_keep: where a context is full, forget the older half of what follows its first n_keep tokens; None:
            the generation ends.
        n_guesses: guessed tokens that a step checks at most; None: what measure_guesses() finds.
        """
        info = session.info
        self.session = session
        self.n_ctx = info.n_ctx
        self._n_batch, self._n_part = info.n_batch, info.n_part
        self._n_seq = info.n_seq if n_seq is None else n_seq
        most = max_running or max(self._n_seq // 2, 1)
        if not 1 <= most <= self._n_seq:
            raise ArgumentError(f"max_running is {max_running}: the session has {self._n_seq} sequences")
        if (max_waiting is not None and max_waiting < 0) or (prompt_part is not None and prompt_part < 1):
            raise ArgumentError(f"max_waiting is {max_waiting} and prompt_part {prompt_part}: too small")
        self._pace = Pace(prompt_part, n_mixed=info.n_mixed)
        self.parts = self._pace.parts
        """Steps in which somebody generated, by how many tokens of prompts they read; those with guesses are
        left out. Another thread copies it, since it grows meanwhile."""
        self.in_layers = self._pace.in_layers
        """The same of steps beside which some layers of a part were computed, by its tokens."""
        self.n_keep = n_keep
        self.shift = ContextShift(info.n_ctx, n_keep)
        self.cache = PrefixCache(session, n_seq=self._n_seq)
        queue = self.queue = RequestQueue(most, max_waiting)
        self.changed = self.queue.changed
        session.interrupt.is_over = lambda: queue.is_over
        self._running = self.queue.running
        self._chosen: list[Given] = []  # not given yet
        self._one_step = OneStep()
        self._n_guesses = self._n_guesses_given = n_guesses
        self.n_feeds = 0
        """Batches computed so far; the last one's logits are what the session has."""
        self.ended: Counter[str] = Counter()
        """Requests by the reason why they ended."""
        self.totals: Counter[str] = Counter()
        """Tokens: prompt, reused, computed, generated; read, of prompts; drafted, and of those accepted. And
        requests preempted."""
        self.times = RequestTimes()

    # -- what any thread may call

    @property
    def n_requests(self) -> tuple[int, int]:
        """Requests under way, and those that wait for a place."""
        return len(self._running), len(self.queue.waiting)

    @property
    def is_busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._running or self.queue.waiting)

    @property
    def is_closing(self) -> bool:
        """No new requests are taken."""
        return self.queue.is_closing

    def check(self, ids: Ids) -> None:
        """Raises ArgumentError or ContextError for a prompt that cannot be computed."""
        check_prompt(ids, self.n_ctx, self.session.model.info.n_vocab)

    def add(self, request: Request) -> None:
        """Takes a request, which waits for its place. Raises ClosedError, BusyError."""
        self.queue.add(request)

    def cancel(self, stream: Stream) -> None:
        """Ends a request before the next step; does nothing after its end."""
        request = self.queue.cancel(stream)
        if request is not None:
            self._end(request, "cancelled")

    def close(self, *, grace_s: float = 0.0) -> None:
        """Takes no more requests. Those that wait end with ClosedError at once, those under way in the first
        step after grace_s seconds."""
        for request in self.queue.close(grace_s):
            self._end(request, "error", ClosedError("the model is closed"))

    # -- what one thread at a time may call

    def step(self) -> None:
        """One feed, and a choice for each generation whose tokens are all computed."""
        with self._one_step:
            self._step()

    def _step(self) -> None:
        if not self._running:
            self._ended_at = None
        if self._made_one_call():
            return
        self._end_part()
        self._leave()
        self._admit()
        self._shift()
        known = [request for request in self._running if request.rows and request.is_ready]
        for request in known:
            self._choose(request)
        if known or not self._compute():
            self._ended_at = None  # somebody waited for a grammar
        self._give()

    @property
    def waits_for_grammars(self) -> bool:
        """Whether all that are under way do."""
        return bool(self._running) and not any(r.is_ready or not r.rows for r in self._running)

    def advance(self, request: Request) -> None:
        """Steps until a stepwise request has one more token, or is over, and raises what ended it. What
        others did with the session meanwhile is computed again."""
        self._one_step.check()
        stream = request.stream
        try:
            sequence = request.sequence
            is_held = sequence is not None and self.session.length(sequence.number) == sequence.n
            if not is_held and stream.reason is None and request not in self.queue.waiting:
                self.suspend()
                self.add(request)
            while stream.reason is None and not stream.has_more:
                self.step()
        except BaseException:
            self.recover()
            raise
        if stream.error is not None:
            raise stream.error

    def run(self, requests: Iterable[Request]) -> None:
        """Computes requests to their ends, and raises what the first that failed was ended by."""
        self.suspend()
        requests = list(requests)
        try:
            for request in requests:
                self.add(request)
            while self.is_busy:
                self.step()
        except BaseException:
            self.recover()
            raise
        for request in requests:
            if request.stream.error is not None:
                raise request.stream.error

    def suspend(self) -> None:
        """Those under way give their sequences back, which go on holding what they hold, and are no longer
        computed until they are added again."""
        self._one_step.check()
        self._end_part()
        for sequence in self.cache.all:
            self.cache.agree(sequence)
        for request in self._running:
            assert request.sequence is not None
            self._settle(request, request.n - 1)
            self.cache.release(request.sequence)
            request.sequence = None
        self._running.clear()

    def append(self, request: Request, tokens: list[int]) -> None:
        """Between two steps: these follow what was chosen for a stepwise request, which goes on behind them.
        Raises ContextError if they do not fit."""
        self._one_step.check()
        self._end_part()
        n, held = len(tokens), request.n - 1
        is_full = request.n + n > request.ids.size
        if is_full and (self.n_keep is None or min(self.n_keep, held) + n > self.n_ctx):
            raise self.shift.error(request.n, n)
        if request.sequence is not None:
            self._settle(request, held)
        request.over = None
        if is_full:
            self._move(request, *self.shift.sizes(held, n))
            if request.stream.error is not None:
                raise request.stream.error
        request.append(tokens)

    def withdraw(self, request: Request) -> None:
        """Ends a request that is not wanted any more, between two steps."""
        if request.stream.reason is not None:
            return
        self._end_part()
        if request.sequence is not None:
            self._settle(request, request.n - 1)
        self._finish(request, "cancelled")

    def recover(self) -> None:
        """After a step that was interrupted, or failed: nothing is under way, and what sequences hold is what
        the session says."""
        self._part = None
        with self.changed:
            requests = [*self._running, *self.queue.take_waiting()]
            self._running.clear()
        for request in requests:
            request.sequence = None
            request.drop_guess()
        self.cache.agree_all()

    def fail(self, error: BaseException) -> None:
        """Ends everything that is under way or waits with this error, and forgets what sequences hold."""
        self._part = None
        for request in [*self._running, *self.queue.take_waiting()]:
            request.sequence = None
            self._finish(request, "error", error)
        self.cache.drop_all()

    def measure_guesses(self) -> int:
        """How many guessed tokens a step can check and still give each the very logits that it has alone.
        Measured once, on the first sequence, which is forgotten."""
        if self._n_guesses is None:
            self.suspend()
            self.cache.drop(self.cache.all[0])
            try:
                self._n_guesses = free_guesses(self.session)
            finally:
                self.n_feeds += 1
                self.cache.agree_all()
        return self._n_guesses

    def n_unchecked(self, sequence: Sequence) -> int:
        """Of what it holds: the last guesses, which nobody has looked at yet, and the token before them."""
        return next((len(own.rows) for own in self._running if own.sequence is sequence), 0)

    def vacate(self) -> None:
        """No sequence holds anything any more; what is under way will be computed once more."""
        self._end_part()
        while self._running:
            self._preempt()
        self.cache.drop_all()

    def use(self, session: Session) -> None:
        """Goes on with another session, whose first sequence holds what it held, and the others nothing."""
        session.call = self.session.call
        session.interrupt.is_over = self.session.interrupt.is_over
        self.session = self.cache.session = session
        self._pace.n_mixed, self._n_part = session.info.n_mixed, session.info.n_part
        self._ended_at = None
        self._sees_each = True
        self._n_guesses = self._n_guesses_given  # another placement rounds otherwise: they are measured again
        self.n_feeds += 1
        for sequence in self.cache.all[1:]:
            sequence.n = 0

    # -- a step's parts

    def _finish(self, request: Request, reason: Reason, error: BaseException | None = None) -> None:
        """A request that was under way is over."""
        self._give()  # its last token among them
        self._end(request, reason, error)

    def _end(self, request: Request, reason: Reason, error: BaseException | None = None) -> None:
        """The request is over; what was computed of it stays held."""
        if request.sequence is not None:
            (self.cache.drop if request.is_text else self.cache.release)(request.sequence)
            request.sequence = None
        if request.choice is not None:
            request.choice.close()
        with self.changed:  # who sees that it runs no more sees it counted
            self.ended[reason] += 1
            if request in self._running:
                self._running.remove(request)
        request.stream.end(reason, error)

    def _over(self, request: Request, reason: Reason) -> None:
        """Its last token was chosen; who reads it step by step may yet go on."""
        if request.is_stepwise:
            request.over = reason
        else:
            self._finish(request, reason)

    def _leave(self) -> None:
        """Those that nobody waits for any more, or not so long."""
        now = time.monotonic()
        for request in list(self._running):
            if request.stream.is_cancelled:
                self._finish(request, "cancelled")
            elif request.over is not None:
                self._finish(request, request.over)
            elif request.deadline is not None and now >= request.deadline:
                self._finish(request, "time")
            elif self.queue.is_over:
                self._finish(request, "error", ClosedError("the model is closed"))
        for request, reason in self.queue.take_late(now):
            self._finish(request, reason)

    def _admit(self) -> None:
        """Gives places to those who wait, in the order in which they came; one whose beginning is just being
        computed for another lets others pass until it can share that."""
        if not self.queue.waiting:
            return
        with self.changed:
            candidates = list(self.queue.waiting)
        n_free = self.session.info.n_blocks_free  # asked once: others have Python's lock after each call
        for request in candidates:
            if len(self._running) >= self.queue.max_running:
                return
            if request.n > self.n_ctx:  # it gave way just when its context was full
                if self.n_keep is None:
                    if self.queue.start(request):
                        self._finish(request, "error", self.shift.error(self.n_ctx, 1))
                    continue
                request.forget(*self.shift.sizes(self.n_ctx, 1))
            ids = request.ids[: request.n]
            source, n = self._held_of(request, ids)
            if not request.is_text and coming(self._running, ids) - n >= KV_BLOCK:
                continue
            # A shared block is copied when it is written; those that run may each want another.
            need = blocks(request.n) - n // KV_BLOCK + len(self._running)
            if request.is_text:  # several texts of one call: those before it are not all computed yet
                need += sum(blocks(own.n) - blocks(own.n - own.left) for own in self._running)
            if n_free < need:  # what others gave up meanwhile counts
                n_free = self.session.info.n_blocks_free
            while n_free < need and self.cache.evict(keep=source):
                n_free = self.session.info.n_blocks_free
            if self._running and n_free < need:
                return
            branch = 0 if request.is_text else self.cache.branch(ids)
            sequence = self.cache.take(request.ids, request.n_prompt, source, n, request.place)
            if sequence is None:
                return
            if not self.queue.start(request):
                self.cache.release(sequence)
                continue
            request.sequence, request.branch = sequence, branch
            if request.is_text:  # its tokens are computed otherwise than those of a prompt
                sequence.n_shared = 0
            if not request.is_counted:
                request.is_counted, request.stream.n_reused = True, n
                request.stream.begun_at = time.monotonic()
                self.totals["prompt"] += request.n_prompt
                self.totals["reused"] += n
                self.times.placed(request)

    def _held_of(self, request: Request, ids: Ids) -> tuple[Sequence | None, int]:
        """A sequence that holds the beginning of a request, and how many of its ids."""
        place = request.place
        if request.is_text:
            return None, 0
        if request.is_continued and place is not None:
            request.is_continued = False  # whoever comes back finds what it left
            if place.n < ids.size and np.array_equal(place.ids[: place.n], ids[: place.n]):
                return place, place.n
        return self.cache.find(ids, request.n_prompt, place)

    def _shift(self) -> None:
        """Makes room for the next token of those whose context is full."""
        for request in [request for request in self._running if request.n > self.n_ctx]:
            if self.n_keep is None:
                self._finish(request, "error", self.shift.error(self.n_ctx, 1))
            else:
                self._move(request, *self.shift.sizes(self.n_ctx, 1))

    def _move(self, request: Request, keep: int, n_drop: int) -> None:
        """Shifts the context of one, which may end with an error, or give way."""
        while request.sequence is not None:
            try:
                self.shift.move(self.session, request.sequence, keep, n_drop)
                request.forget(keep, n_drop)
                request.sequence.is_torn = False
                break
            except ContextError as error:  # what it shares must be copied, and there is no room for that
                if self.cache.evict():
                    continue
                if len(self._running) == 1:
                    self._finish(request, "error", error)
                    return
                self._preempt()
            except UnsupportedError:
                self._yield(request)
            except PowerInferError as error:
                self._finish(request, "error", error)
                return
        else:  # it gave way: what stays is computed anew
            request.forget(keep, n_drop)

    def _compute(self) -> bool:
        """One feed, and what follows from it; False if there was none. Who waits for a grammar has none."""
        running = [request for request in self._running if not request.rows]
        if self._n_guesses:
            n_vocab = self.session.model.info.n_vocab
            for request, error in take_guesses(running, self._n_guesses, n_vocab):
                self._finish(request, "error", error)
                running.remove(request)
        running = self._leave_to_rounds(running)
        parts = parts_of(running, n_batch=self._n_batch, pace=self._pace)
        parts, batch, chosen = self._feed(parts)
        self._is_for_a_step = False
        if not parts:
            return False
        if len(parts) == 1 and parts[0][1] == 1 and not parts[0][0].is_text:
            self._see()
        n_computed = n_read = 0
        for (request, n), end in zip(parts, batch.ends, strict=True):
            sequence = request.sequence
            assert sequence is not None
            n_computed += n
            left = request.n - sequence.n
            n_read += n if left > 1 or request.is_text else 0
            sequence.n += n
            sequence.row = (self.n_feeds, end - 1) if left <= n else None
            if request.guess.size:
                self.totals["drafted"] += request.guess.size
        self.totals.update(steps=1, computed=n_computed, read=n_read)
        show_heads(self.session, parts)
        tokens = dict(zip(batch.rows, chosen, strict=False))
        took: list[tuple[Request, int]] = []
        for (request, n), first, end in zip(parts, [0, *batch.ends], batch.ends, strict=False):
            if request.show is not None:
                try:
                    request.show_rows(n, first)
                except BaseException as error:  # also what would end the thread: others' answers are in it
                    self._finish(request, "error", error)
                    continue
            if request.report is not None:
                request.report_part(n)
            if request.left > 0 or request.sequence is None:
                continue
            if request.choice is None:
                self._finish(request, "stop")
                continue
            token = tokens.get(end - 1, -1)
            if token >= 0:
                took.append((request, token))
            else:
                request.rows = list(range(end - 1 - request.guess.size, end))
                self._choose(request)
        self._took(took)
        return True

    def _took(self, took: SequenceOf[tuple[Request, int]]) -> None:
        """The engine chose a token for each of these, and its sampler knows it."""
        over: list[tuple[Request, Reason]] = []
        for request, token in took:
            reason = request.append_chosen(token)
            assert request.choice is not None
            self._chosen.append((request, token, token in request.choice.ends))
            if reason is not None:
                over.append((request, reason))
        self.totals["generated"] += len(took)
        for request, reason in over:
            self._over(request, reason)

    def _feed(self, parts: list[Part]) -> tuple[list[Part], Joined, list[int]]:
        """Computes the parts in one batch, or fewer where the pool is too small. Returns what it was, and the
        tokens that were chosen in the same call."""
        while parts:
            for request, n in parts:
                assert request.sequence is not None
                request.sequence.n_coming = request.sequence.n + n
            batch = joined(parts)
            self.n_feeds += 1
            n_next, begin = sum(request.left == 1 for request, _ in parts), self._begins()
            try:
                chosen = self.session.feed(
                    batch.ids,
                    seq=batch.owners,
                    want_logits=batch.kinds,
                    rows=batch.rows,
                    samplers=batch.samplers,
                )
                seconds = self._ends() - begin
                if not any(request.guess.size for request, _ in parts):  # which are no prompts
                    self._pace.saw(len(batch.ids) - n_next, n_next, seconds)
                return parts, batch, chosen
            except ContextError:
                if any(request.guess.size for request, _ in parts):
                    parts = [(request, n - request.guess.size) for request, n in parts]
                    for request, _ in parts:
                        request.drop_guess()
                elif not self.cache.evict():
                    if len(self._running) == 1:
                        raise
                    self._preempt()
                    parts = [part for part in parts if part[0].sequence is not None]
        return [], joined([]), []

    def _preempt(self) -> None:
        """The youngest gives its memory back and waits at the head of the line. One alone always fits, as the
        pool is not smaller than n_ctx."""
        self._yield(self._running[-1])

    def _yield(self, request: Request) -> None:
        """It gives its memory back and waits at the head of the line."""
        assert request.sequence is not None
        self.cache.drop(request.sequence)
        request.sequence = None
        request.drop_guess()
        self.totals["preempted"] += 1
        if not self.queue.put_back(request):
            self._finish(request, "error", ClosedError("the model is closed"))

    def _give(self) -> None:
        """Gives the tokens chosen in this step to those who wait: when all are chosen, or one is over.
        Who wakes up wants Python's lock, and would have it at the next call of the engine."""
        if not self._chosen:
            return
        give(self._chosen, self.times)
        self._chosen.clear()

    def _choose(self, request: Request) -> None:
        """The next tokens of a generation: one, and one more for each that was guessed right."""
        sequence = request.sequence
        assert sequence is not None
        reason: Reason | None = None
        try:
            while request.rows and reason is None:
                if not request.is_ready:
                    request.keep(self.session)
                    break
                row = request.rows.pop(0)
                sequence.row = None if request.kept else (self.n_feeds, row)
                reason = self._chosen_token(request, *request.choose(self.session, row))
                if not request.guess.size or request.ids[request.n - 1] != request.guess[0]:
                    request.drop_guess()
                else:
                    request.guess = request.guess[1:]
                    self.totals["accepted"] += 1
                if request.is_stepwise:
                    break
        except BaseException as error:  # also what would end the thread: others have their answers in it
            self._settle(request, request.n)
            self._finish(request, "error", error)
            return
        if not request.rows or reason is not None:
            self._settle(request, request.n - 1)
        if reason is not None:
            self._over(request, reason)

    def _chosen_token(self, request: Request, token: int, reason: Reason | None) -> Reason | None:
        """Notes a token that was chosen, and passes on why it is the last."""
        assert request.choice is not None
        self.totals["generated"] += 1
        self._chosen.append((request, token, token in request.choice.ends))
        return reason

    def _settle(self, request: Request, n: int) -> None:
        """What was computed beyond n tokens, because it was guessed, is forgotten."""
        sequence = request.sequence
        assert sequence is not None
        row = sequence.row
        request.drop_guess()
        if sequence.n > n:
            self.cache.cut(sequence, n)
            sequence.row = row if sequence.n == n else None
