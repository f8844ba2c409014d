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

from collections.abc import Iterable

from ..errors import ClosedError, ContextError
from .arrays import Ids
from .batch import Joined, Part, joined
from .one_call import OneCall
from .prefix_cache import Sequence
from .request import Request, Stream, check_prompt
from .session import Session
from .speculation import free_guesses, show_heads, take_guesses


class Engine(OneCall):
    """The requests of one session. Any thread may call add(), cancel(), check() and close(); the others are
    for one thread at a time."""

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
        if not self._newcomers:
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
        self._part, self._newcomers = None, ()
        with self.changed:
            requests = [*self._running, *self.queue.take_waiting()]
            self._running.clear()
        for request in requests:
            request.sequence = None
            request.drop_guess()
        self.cache.agree_all()

    def fail(self, error: BaseException) -> None:
        """Ends everything that is under way or waits with this error, and forgets what sequences hold."""
        self._part, self._newcomers = None, ()
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

    def _compute(self) -> bool:
        """One feed, and what follows from it; False if there was none. Who waits for a grammar has none."""
        running = [request for request in self._running if not request.rows]
        if self._n_guesses:
            n_vocab = self.session.model.info.n_vocab
            for request, error in take_guesses(running, self._n_guesses, n_vocab):
                self._finish(request, "error", error)
                running.remove(request)
        parts = self._parts_of_step(running)
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
                    self._end_part()  # perhaps it is of who gives way
                    self._preempt()
                    parts = [part for part in parts if part[0].sequence is not None]
        return [], joined([]), []
