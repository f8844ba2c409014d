"""Token after token: the loop of computing, choosing and appending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from .context import Context, Ids, Logits, Report
from .errors import ArgumentError, ContextError
from .report import Timings
from .sampling import LogitsProcessorList, Sampler, Sampling, StoppingCriteriaList

SAMPLING_NAMES = frozenset(field.name for field in fields(Sampling)) - {"seed"}


def sampling_of(where: str, given: Mapping[str, Any], penalty_last_n: int) -> Sampling:
    """Options from keyword arguments; `temp` is `temperature`. Raises TypeError for other names."""
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
    """The tokens that follow a prompt; iterating computes them. It has no end of its own but the context's.

    Between two tokens others may use the context: the next step then computes again what they replaced.
    """

    def __init__(
        self,
        context: Context,
        lock: threading.RLock,
        prompt: Ids,
        sampler: Sampler,
        *,
        allow: Callable[[Logits], Logits],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        report: Report | None,
        note: Callable[[Timings], None],
        timings: Timings,
    ) -> None:
        """
        lock: held during each step.
        allow: takes tokens that cannot be out of the logits.
        report: called as report(done, total) while the prompt is computed.
        note: called with the timings after each step; timings: where they start.

        Raises ArgumentError or ContextError for a prompt that is empty or too long.
        """
        if not prompt.size:
            raise ArgumentError("the prompt has no tokens")
        if prompt.size > context.n_ctx:
            raise ContextError(f"the prompt has {prompt.size} tokens and n_ctx is {context.n_ctx}")
        self._context = context
        self._lock = lock
        self._prompt = prompt
        self._sampler = sampler
        self._allow = allow
        self._processors = processors
        self._criteria = criteria
        self._report = report
        self._note = note
        self._timings = Timings(load_s=timings.load_s, n_prompt=int(prompt.size))
        if sampler.options.penalises:
            sampler.accept(*last(prompt, sampler.options.penalty_last_n))

    def __iter__(self) -> Iterator[int]:
        held = history = self._prompt  # what the model sees (a context shift shortens it), and all there was
        is_first = True
        while True:
            with self._lock:
                begin = time.perf_counter()
                if held.size > self._context.n_ctx:
                    held = self._shifted(held)
                reused = self._context.hold(held, report=self._report if is_first else None)
                logits = self._context.logits
                computed = time.perf_counter()
                if self._processors:
                    logits = self._processors(history.copy(), logits)
                token = self._sampler.sample(self._allow(logits))
                self._sampler.accept(token)
                self._count(is_first, reused, computed - begin, time.perf_counter() - computed)
            is_first = False
            new = np.array([token], np.int32)
            held, history = np.concatenate([held, new]), np.concatenate([history, new])
            ends = bool(self._criteria) and self._criteria(history.copy(), logits)
            yield token
            if ends:
                return

    def _shifted(self, ids: Ids) -> Ids:
        """Makes room for the last of ids, which are one more than fit."""
        if not np.array_equal(self._context.ids, ids[:-1]):
            self._context.hold(ids[:-1])
        self._context.make_room(1)
        return np.concatenate([self._context.ids, ids[-1:]])

    def _count(self, is_first: bool, n_reused: int, step_s: float, choice_s: float) -> None:
        t = self._timings
        if is_first:
            self._timings = replace(t, n_reused=n_reused, prompt_s=step_s, generate_s=choice_s)
        else:
            generate_s = t.generate_s + step_s + choice_s
            self._timings = replace(t, n_generated=t.n_generated + 1, generate_s=generate_s)
        self._note(self._timings)
