"""Token after token: the loop of computing, choosing and appending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .choice import Choice
from .context import Context, Ids, Logits, Report
from .errors import ArgumentError, ClosedError, ContextError, UnsupportedError
from .report import Timings
from .sampling import Sampling
from .session import as_int32

Draft = Callable[[Ids], npt.ArrayLike]

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
        note: called with the timings after each step; timings: where they start.
        draft: guesses tokens that are checked together.

        Raises ArgumentError or ContextError for a prompt that is empty or too long.
        """
        if not prompt.size:
            raise ArgumentError("the prompt has no tokens")
        if prompt.size > context.n_ctx:
            raise ContextError(f"the prompt has {prompt.size} tokens and n_ctx is {context.n_ctx}")
        self._context = context
        self._lock = lock
        self._prompt = prompt
        self._choice = choice
        self._report = report
        self._note = note
        self._timings = Timings(load_s=timings.load_s, n_prompt=int(prompt.size))
        self._draft = draft
        self._wide = 0
        self._is_plain = draft is None and choice.is_plain
        choice.begin(prompt)

    def __iter__(self) -> Generator[int, Sequence[int] | None, None]:
        """Tokens that are sent to the generator are appended to what it gave."""
        held = history = self._prompt  # what the model sees (a context shift shortens it), and all there was
        guess = held[:0]  # ids guessed to follow held
        rows: list[Logits | None] = []  # logits after those not checked yet; None: the context has them
        is_first = True
        if self._draft is not None:
            with self._lock:
                self._wide = self._context.find_wide_step()
        try:
            while True:
                with self._lock:
                    begin = time.perf_counter()
                    reused = 0
                    if not rows:
                        if held.size > self._context.n_ctx:
                            held = self._shifted(held)
                        guess = held[:0] if is_first else self._guess(held, history)
                        reused, rows = self._step(held, guess, is_first)
                    logits = rows.pop(0)
                    computed = time.perf_counter()
                    if logits is None:
                        token = self._choice.token_after(self._context)
                    else:
                        token = self._choice.token(history, logits)
                    self._count(is_first, reused, computed - begin, time.perf_counter() - computed)
                is_first = False
                new = np.array([token], np.int32)
                held, history = np.concatenate([held, new]), np.concatenate([history, new])
                if rows and guess[-len(rows)] != token:
                    rows = []
                is_over = self._choice.is_over(history, logits)
                sent = yield token
                if sent is not None:
                    more = self._sent(sent)
                    held, history, rows = np.concatenate([held, more]), np.concatenate([history, more]), []
                elif is_over:
                    return
        finally:
            if guess.size:
                with self._lock, suppress(ClosedError):
                    self._forget_guesses(held[:-1], logits)

    def _sent(self, tokens: Sequence[int]) -> Ids:
        ids = as_int32("tokens", tokens)
        for token in ids.tolist():
            self._choice.sampler.accept(token)
            if self._choice.constraint is not None:
                self._choice.constraint.accept(token)
        return ids

    def _step(self, held: Ids, guess: Ids, is_first: bool) -> tuple[int, list[Logits | None]]:
        """Computes held and a guess at what follows; the logits after held and after each guessed id."""
        if not guess.size:
            report = self._report if is_first else None
            reused = self._context.hold(held, goes_on=not is_first, report=report)
            return reused, [None if self._is_plain else self._context.logits]
        reused = self._context.hold(held, goes_on=True, ahead=guess)
        return reused, [self._context.session.logits(i).copy() for i in range(guess.size + 1)]

    def _guess(self, held: Ids, history: Ids) -> Ids:
        """Ids that may follow and that fit into the context and one chunk."""
        room = min(self._context.n_ctx - held.size, self._wide)
        if self._draft is None or room < 1:
            return held[:0]
        ids = np.asarray(self._draft(history.copy())).ravel()[:room]
        bad = np.flatnonzero((ids < 0) | (ids >= self._context.n_vocab))
        return ids[: bad[0] if bad.size else ids.size].astype(np.int32)

    def _forget_guesses(self, held: Ids, logits: Logits | None) -> None:
        if logits is not None and np.array_equal(self._context.ids[: held.size], held):
            self._context.settle(held.size, logits)

    def _shifted(self, ids: Ids) -> Ids:
        """Makes room for the last of ids, which are one more than fit."""
        if not np.array_equal(self._context.ids, ids[:-1]):
            self._context.hold(ids[:-1], goes_on=True)
        self._context.make_room(1)
        return np.concatenate([self._context.ids, ids[-1:]])

    def _count(self, is_first: bool, n_reused: int, step_s: float, choice_s: float) -> None:
        t = self._timings
        if is_first:
            self._timings = replace(t, n_reused=n_reused, prompt_s=step_s, generate_s=choice_s)
        else:
            self._timings = Timings(  # replace() would take as long as choosing a token
                load_s=t.load_s,
                n_prompt=t.n_prompt,
                n_reused=t.n_reused,
                prompt_s=t.prompt_s,
                n_generated=t.n_generated + 1,
                generate_s=t.generate_s + step_s + choice_s,
            )
        self._note(self._timings)
