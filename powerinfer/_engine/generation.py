"""Token after token: the loop of computing, choosing and appending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ClosedError, ContextError, UnsupportedError
from .arrays import as_int32
from .choice import Choice
from .context import Context, Ids, Logits, Report
from .report import Timings
from .sampling import Sampling

Draft = Callable[[Ids], npt.ArrayLike]

_NO_IDS = np.empty(0, np.int32)

SAMPLING_NAMES = frozenset(field.name for field in fields(Sampling)) - {"seed"}


def sampling_of(
    where: str, given: Mapping[str, Any], penalty_last_n: int, penalize_nl: bool = True
) -> Sampling:
    """Options from keyword arguments; `temp` is `temperature`. Raises TypeError for other names."""
    given = dict(given)
    if given.pop("tfs_z", 1.0) != 1.0:
        raise UnsupportedError("tfs_z is not supported: tail-free sampling has gone from llama.cpp too")
    if not penalize_nl:
        raise UnsupportedError("penalize_nl=False is not supported: line breaks are penalised like others")
    values = {"penalty_last_n": penalty_last_n, **given}
    if "temp" in values:
        values["temperature"] = values.pop("temp")
    for name in values:
        if name not in SAMPLING_NAMES:
            raise TypeError(f"{where} got an unexpected keyword argument {name!r}")
    return Sampling(**values)


def last(ids: Ids, n: int) -> list[int]:
    """The last n ids; all for -1."""
    result: list[int] = (ids if n < 0 else ids[max(0, ids.size - n) :]).tolist()
    return result


class _Ids:
    """Ids that grow at their end, without numpy: it is not in the caches when the next token comes."""

    def __init__(self, ids: Ids) -> None:
        self.n, self.last = ids.size, int(ids[-1])
        self._room, self._n_in_room = ids, ids.size
        self._new: list[int] = []

    @property
    def all(self) -> Ids:
        """A view of them."""
        if self._new:
            if self.n > self._room.size:
                self._room = np.concatenate([self._room[: self._n_in_room], np.empty(self.n + 64, np.int32)])
            self._room[self._n_in_room : self.n] = self._new
            self._n_in_room = self.n
            self._new.clear()
        return self._room[: self.n]

    def append(self, token: int) -> None:
        self._new.append(token)
        self.last = token
        self.n += 1


class Generation:
    """The tokens that follow a prompt; iterating computes them. It has no end of its own but the context's
    and the grammar's.

    Between two tokens others may use the context: the next step then computes again what they replaced.
    """

    def __init__(
        self,
        context: Context,
        lock: threading.RLock,
        prompt: Ids,
        choice: Choice,
        *,
        report: Report | None,
        note: Callable[[Timings], None],
        timings: Timings,
        draft: Draft | None = None,
    ) -> None:
        """
        lock: held during each step.
        choice: what chooses each token, and says when it is the last.
        report: called as report(done, total) while the prompt is computed.
        note: called with the timings after each step, which go on changing; timings: where they start.
        draft: guesses tokens that are checked together.

        Raises ArgumentError or ContextError for a prompt that is empty or too long.
        """
        if not prompt.size:
            raise ArgumentError("the prompt has no tokens")
        if prompt.size > context.n_ctx:
            raise ContextError(f"the prompt has {prompt.size} tokens and n_ctx is {context.n_ctx}")
        self._context = context
        self._lock = lock
        self._prompt = prompt.copy()  # it may be the caller's own array
        self._choice = choice
        self._report = report
        self._note = note
        self._timings = Timings(load_s=timings.load_s, n_prompt=int(prompt.size))
        self._draft = draft
        self._wide = 0
        self._is_plain = draft is None and choice.is_plain and not context.keeps_all
        self._n_changes = -1  # of the context, after the last step
        choice.begin(prompt)

    def __iter__(self) -> Generator[int, Sequence[int] | None, None]:
        """Tokens that are sent to the generator are appended to what it gave."""
        held = history = _Ids(self._prompt)  # what the model sees, and all there was: more, after a shift
        guess = _NO_IDS  # ids guessed to follow held
        rows: list[Logits | None] = []  # logits after those not checked yet; None: the context has them
        logits: Logits | None = None
        is_first = True
        if self._draft is not None:
            with self._lock:
                self._wide = self._context.find_wide_step()
        try:
            while True:
                with self._lock:
                    begin = computed = time.perf_counter()
                    reused = 0
                    if not rows and held.n > self._context.n_ctx:
                        held = self._shifted(held)
                    if self._is_plain and self._is_held(held.n - 1):
                        token = self._context.next(held.last, held.n - 1, self._choice.sampler)
                        self._n_changes = self._context.n_changes
                    else:
                        if not rows:
                            guess = _NO_IDS if is_first else self._guess(held, history)
                            reused, rows = self._step(held, guess, is_first)
                            self._n_changes = self._context.n_changes
                        computed = time.perf_counter()
                        if (logits := rows.pop(0)) is None:
                            token = self._choice.token_after(self._context)
                        else:
                            token = self._choice.token(history.all, logits)
                    self._count(is_first, reused, computed - begin, time.perf_counter() - computed)
                is_first = False
                self._append(held, history, token)
                if rows and guess[-len(rows)] != token:
                    rows = []
                is_over = self._choice.is_last(token) or (
                    logits is not None and self._choice.stops(history.all, logits)
                )
                sent = yield token
                if sent is not None:
                    for token in self._sent(sent):
                        self._append(held, history, token)
                    rows = []
                elif is_over:
                    return
        finally:
            if guess.size:
                with self._lock, suppress(ClosedError):
                    self._forget_guesses(held.all[:-1], logits)

    @staticmethod
    def _append(held: _Ids, history: _Ids, token: int) -> None:
        held.append(token)
        if history is not held:
            history.append(token)

    def _sent(self, tokens: Sequence[int]) -> list[int]:
        ids: list[int] = as_int32("tokens", tokens).tolist()
        for token in ids:
            self._choice.sampler.accept(token)
            if self._choice.constraint is not None:
                self._choice.constraint.accept(token)
        return ids

    def _step(self, held: _Ids, guess: Ids, is_first: bool) -> tuple[int, list[Logits | None]]:
        """Computes held and a guess at what follows; the logits after held and after each guessed id."""
        if not guess.size and self._is_held(held.n - 1):
            self._context.feed(held.all[-1:])
            return 0, [self._context.logits]
        if not guess.size:
            report = self._report if is_first else None
            reused = self._context.hold(held.all, goes_on=not is_first, report=report)
            return reused, [None if self._is_plain else self._context.logits]
        reused = self._context.hold(held.all, goes_on=True, ahead=guess)
        return reused, [self._context.session.logits(i).copy() for i in range(guess.size + 1)]

    def _is_held(self, n: int) -> bool:
        """Whether the context holds the n ids that it held after the last step; others may have used it."""
        return self._context.n_changes == self._n_changes and self._context.n_tokens == n

    def _guess(self, held: _Ids, history: _Ids) -> Ids:
        """Ids that may follow and that fit into the context and one chunk."""
        room = min(self._context.n_ctx - held.n, self._wide)
        if self._draft is None or room < 1:
            return _NO_IDS
        ids = np.asarray(self._draft(history.all.copy())).ravel()[:room]
        bad = np.flatnonzero((ids < 0) | (ids >= self._context.n_vocab))
        return ids[: bad[0] if bad.size else ids.size].astype(np.int32)

    def _forget_guesses(self, held: Ids, logits: Logits | None) -> None:
        if logits is not None and np.array_equal(self._context.ids[: held.size], held):
            self._context.settle(held.size, logits)

    def _shifted(self, held: _Ids) -> _Ids:
        """Makes room for the last of ids, which are one more than fit."""
        ids = held.all
        if not np.array_equal(self._context.ids, ids[:-1]):
            self._context.hold(ids[:-1], goes_on=True)
        self._context.make_room(1)
        self._n_changes = self._context.n_changes
        return _Ids(np.concatenate([self._context.ids, ids[-1:]]))

    def _count(self, is_first: bool, n_reused: int, step_s: float, choice_s: float) -> None:
        t = self._timings
        if is_first:
            t.n_reused, t.prompt_s, t.generate_s = n_reused, step_s, choice_s
        else:
            t.n_generated += 1
            t.generate_s += step_s + choice_s
        self._note(t)
