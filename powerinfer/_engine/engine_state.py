"""What an engine has under way, and what becomes of a request's tokens: how they are chosen and given to who
waits for them, and how a request ends.

The engine (engine.py) is made of this, of who gets a place and memory (admission.py), and of steps that are a
single call of the session (one_call.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf

from ..errors import ArgumentError
from .context_shift import ContextShift
from .one_step import OneStep
from .pace import Pace
from .prefix_cache import PrefixCache
from .request import Reason, Request
from .request_queue import RequestQueue
from .rounds import Given, give
from .scheduler_stats import RequestTimes
from .session import Session


class EngineState:
    """The requests of one session, and what they leave."""

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
